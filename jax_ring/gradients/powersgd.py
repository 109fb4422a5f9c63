"""PowerSGD: of each matrix of gradients the ranks exchange two thin factors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring.arguments import Algorithm, AxisName
from jax_ring.gradients.buckets import BUCKET_BYTES
from jax_ring.gradients.compression import (
    CompressionState,
    at_least,
    errors_of,
    rounded,
    unless_bad,
    zeros_of_rank,
)
from jax_ring.gradients.optimizer import Transformation
from jax_ring.gradients.sync import check_local, sync_gradients

Array = jax.Array


def powersgd(
    axis_name: AxisName,
    rank: int = 2,
    *,
    warmup_steps: int = 0,
    min_compression: float = 1.0,
    seed: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    algorithm: Algorithm = "auto",
) -> Transformation:
    """The mean of the ranks' gradients, approximated by matrices of low rank, with error feedback.

    A leaf is a matrix M [n, m]: its dimensions are divided where n + m is least. With Q from the
    step before, the ranks average P = M Q, make its columns orthonormal (QR, in float32), and
    average Q = M^T P; the result is P Q^T. That is r (n + m) numbers in place of n m. Leaves of one
    dimension, those that would not become smaller, and those that are no floats are averaged
    exactly, in the same buckets. A rank of at least min(n, m) is thus exact.

    What a rank keeps for the next step is its *own* error, its matrix (with the error before) less
    P (M^T P)^T of its own M. So the results of all steps and the mean of the last errors add up to
    the sum of the exact means, up to rounding.

    A leaf whose result is not finite is not finite on any rank, and leaves its state as it was. A
    column of Q that has become zero, as with a gradient of zeros, stays as it was, too.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for
    distributed optimization", 2019, algorithms 1 and 2.

    Args:
      axis_name: as `jax_ring.psum`; gradients must be local to each rank, see `sync_gradients`.
      rank: r, at least 1: how many columns.
      warmup_steps: how many steps are exact at first.
      min_compression: a leaf is compressed if that divides its size by more than this, at least 1.
      seed: of the first Q, the same on all ranks.
      bucket_bytes: as `sync_gradients`.
      algorithm: as `jax_ring.psum`.

    Returns:
      A pair (init, update) that `optax.chain` takes; see `state_specs` for how its state,
      a `CompressionState`, crosses `jax.shard_map`. The updates have the dtypes of the gradients
      (floats for integers) and are the same on all ranks.

    Raises:
      ValueError: if rank, warmup_steps or min_compression is too small; from update, if the state
        does not fit the gradients, and as `sync_gradients`.
      TypeError: if rank or warmup_steps is no integer.

    Complexity: two collectives for each bucket; 8 r n m operations for a leaf, and O(n r^2) for QR.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ring.gradients import powersgd
      >>> compress = powersgd("i", rank=1)
      >>> state = compress.init(jnp.zeros((6, 4)))
      >>> rows = jnp.arange(1.0, 5.0)  # Rank i has i + 1 times a matrix of rank 1.
      >>> grads = rows[:, None, None] * jnp.outer(jnp.arange(6.0), jnp.ones(4))
      >>> per_rank = jax.vmap(lambda g: compress.update(g, state)[0], axis_name="i")
      >>> print(bool(jnp.allclose(per_rank(grads)[0], grads.mean(0), atol=1e-5)))
      True
    """
    rank = at_least("powersgd", "rank", rank, 1)
    warmup_steps = at_least("powersgd", "warmup_steps", warmup_steps, 0)
    if not min_compression >= 1:
        raise ValueError(
            f"jax_ring.powersgd: min_compression must be at least 1, got {min_compression!r}"
        )

    def init(params: Any) -> CompressionState:
        leaves, tree = jax.tree.flatten(params)
        error: list[Any] = [None] * len(leaves)
        basis: list[Any] = [None] * len(leaves)
        for i, leaf in enumerate(leaves):
            columns = _columns(leaf, rank, min_compression)
            if columns:
                error[i] = zeros_of_rank(leaf, axis_name)
                key = jax.random.fold_in(jax.random.key(seed), i)
                basis[i] = jax.random.normal(key, (columns, rank), jnp.float32)
        like = functools.partial(jax.tree.unflatten, tree)
        return CompressionState(jnp.zeros((), jnp.int32), like(error), like(basis))

    def mean(leaves: dict[int, Any]) -> dict[int, Any]:
        return sync_gradients(leaves, axis_name, bucket_bytes=bucket_bytes, algorithm=algorithm)

    def update(
        grads: Any, state: CompressionState, params: Any = None
    ) -> tuple[Any, CompressionState]:
        del params
        check_local("powersgd", grads, axis_name)
        leaves = jax.tree.leaves(grads)
        tree: Any = jax.tree.structure(grads)
        memory = Memory(
            errors_of("powersgd", state, grads, init, axis_name), tree.flatten_up_to(state.basis)
        )

        def exact() -> tuple[list[Any], Memory]:
            means = mean(dict(enumerate(leaves)))
            return [means[i] for i in range(len(leaves))], memory

        def compressed() -> tuple[list[Any], Memory]:
            return _low_rank_mean(leaves, memory, mean)

        if warmup_steps:
            result, memory = lax.cond(state.step < warmup_steps, exact, compressed)
        else:
            result, memory = compressed()
        like = functools.partial(jax.tree.unflatten, tree)
        new = CompressionState(state.step + 1, like(memory.errors), like(memory.basis))
        return like(result), new

    return Transformation(init, update)


class Memory(NamedTuple):
    """What is kept of each leaf, in their order: None for those that are exact."""

    errors: list[Any]
    basis: list[Any]


def _low_rank_mean(
    leaves: list[Any], memory: Memory, mean: Callable[[dict[int, Any]], dict[int, Any]]
) -> tuple[list[Any], Memory]:
    """One step of algorithm 1, with the errors of algorithm 2; letters as there."""
    thin = {i: q for i, q in enumerate(memory.basis) if q is not None}
    m = {
        i: (leaves[i].astype(jnp.float32) + memory.errors[i]).reshape(-1, q.shape[0])
        for i, q in thin.items()
    }
    means = mean({i: _product(m[i], thin[i]) if i in thin else x for i, x in enumerate(leaves)})
    p = {i: jnp.linalg.qr(means[i])[0] for i in thin}
    own = {i: _product(m[i].T, p[i]) for i in thin}
    shared = mean(own)
    result = [means[i] for i in range(len(leaves))]
    errors, basis = list(memory.errors), list(memory.basis)
    for i, q in thin.items():
        shape, dtype = leaves[i].shape, leaves[i].dtype
        lost = (m[i] - _product(p[i], own[i].T)).reshape(shape)
        wide = _product(p[i], shared[i].T).reshape(shape)
        result[i], lost = rounded(wide, lost, dtype)
        errors[i] = unless_bad(result[i], lost, errors[i])
        basis[i] = unless_bad(result[i], _scaled(shared[i], q), q)
    return result, Memory(errors, basis)


def _product(a: Array, b: Array) -> Array:
    """In full float32, also where products are by default of narrower factors: errors add up."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _scaled(q: Array, before: Array) -> Array:
    """The columns with 1 as their largest magnitude; those before where they are zero.

    A scale changes nothing of what a column spans, but M Q would be of the size of the gradients'
    squares, and out of float32's range.
    """
    size = jnp.abs(q).max(0)
    return jnp.where(size > 0, q / jnp.where(size > 0, size, 1.0), before)


def _columns(leaf: Any, rank: int, min_compression: float) -> int:
    """How many columns the leaf has as a matrix, or 0 if it is averaged exactly."""
    shape = jnp.shape(leaf)
    size = math.prod(shape)
    if not jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.floating) or not size:
        return 0
    columns = (math.prod(shape[d:]) for d in range(1, len(shape)))
    best = min(columns, key=lambda m: size // m + m, default=0)
    smaller = best and size > min_compression * rank * (size // best + best)
    return best if smaller else 0
