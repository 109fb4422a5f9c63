"""One bit for each gradient: its sign, and for each block one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import error_feedback
from jax_ring.arguments import Algorithm, AxisName
from jax_ring.gradients.buckets import BUCKET_BYTES, Bucket, plan_buckets
from jax_ring.gradients.compression import (
    CompressionState,
    at_least,
    errors_of,
    rounded,
    unless_bad,
    zeros_of_rank,
)
from jax_ring.gradients.optimizer import Transformation
from jax_ring.gradients.sync import (
    bucket_limit,
    check_local,
    pack,
    sync_gradients,
    unpack,
)
from jax_ring.wire import DEFAULT_BLOCK, OneBit

Array = jax.Array


def one_bit(
    axis_name: AxisName,
    warmup_steps: int,
    *,
    block: int = DEFAULT_BLOCK,
    exact_below: int = 1024,
    bucket_bytes: int = BUCKET_BYTES,
    algorithm: Algorithm = "auto",
) -> Transformation:
    """The mean of the ranks' gradients from their signs, with error feedback.

    After `warmup_steps` exact steps, leaves travel as `jax_ring.wire.OneBit`: every rank sends the
    signs and sizes of each chunk, with the error before, to the rank that sums it, which sends
    those of the mean to all. Each keeps what its messages lost, the owner of a chunk also what that
    second one lost. So the results of all steps and the mean of the last errors add up to the sum
    of the exact means, up to rounding.

    A leaf whose result is not finite is not finite on any rank, and leaves its error as it was.

    Source: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs", 2014; the warm-up and the errors of both messages as in
    Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence
    speed", 2021. That compresses the momentum and freezes the variance; here it is the gradients,
    whatever comes after.

    Args:
      axis_name: as `jax_ring.psum`; gradients must be local to each rank, see `sync_gradients`.
      warmup_steps: how many steps are exact at first; 0 for none.
      block: values to a size (bfloat16), at least 1.
      exact_below: leaves of fewer elements, scalars, and those that are no floats are always
        averaged exactly.
      bucket_bytes: as `sync_gradients`, of float32.
      algorithm: as `jax_ring.error_feedback.psum`.

    Returns:
      A pair (init, update) that `optax.chain` takes; see `state_specs` for how its state,
      a `CompressionState`, crosses `jax.shard_map`. The updates have the dtypes of the gradients
      (floats for integers) and are the same on all ranks.

    Raises:
      ValueError: if warmup_steps, block or exact_below is too small; from update, if the state does
        not fit the gradients, and as `sync_gradients` and `jax_ring.error_feedback.psum`.
      TypeError: if one of them is no integer.

    Complexity: one collective for each bucket; by the direct exchange each of N ranks sends about
      2 (N - 1) / N (1 / 8 + 2 / block) bytes for each element.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ring.gradients import one_bit
      >>> compress = one_bit("i", warmup_steps=0, exact_below=1)
      >>> grads = jnp.array([[3.0, -1.0, 2.0, -2.0], [1.0, 1.0, -1.0, -1.0]])
      >>> update = jax.vmap(compress.update, in_axes=(0, None), axis_name="i")
      >>> mean, state = update(grads, compress.init(grads[0]))
      >>> print(mean[0], mean[0] + state.error.mean(0))
      [ 1.  1.  1. -1.] [ 2.   0.   0.5 -1.5]
    """
    warmup_steps = at_least("one_bit", "warmup_steps", warmup_steps, 0)
    exact_below = at_least("one_bit", "exact_below", exact_below, 0)
    wire = OneBit(at_least("one_bit", "block", block, 1))

    def init(params: Any) -> CompressionState:
        def error(leaf: Any) -> Array | None:
            floating = jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.floating)
            small = not jnp.ndim(leaf) or jnp.size(leaf) < max(1, exact_below)
            return zeros_of_rank(leaf, axis_name) if floating and not small else None

        return CompressionState(jnp.zeros((), jnp.int32), jax.tree.map(error, params))

    def exact_mean(leaves: list[Any]) -> list[Any]:
        return sync_gradients(leaves, axis_name, bucket_bytes=bucket_bytes, algorithm=algorithm)

    def feedback_mean(values: list[Array], errors: list[Array]) -> tuple[list[Any], list[Any]]:
        """Means and errors in float32, by buckets."""
        buckets = plan_buckets(values, bucket_limit(bucket_bytes)).buckets
        parts = [pack(bucket, values) for bucket in buckets]
        before = [pack(bucket, errors) for bucket in buckets]
        if not parts:
            return [], []
        means, lost = error_feedback.pmean(parts, before, axis_name, wire=wire, algorithm=algorithm)
        return _in_order(buckets, means), _in_order(buckets, lost)

    def compressed(leaves: list[Any], errors: list[Any]) -> tuple[list[Any], list[Any]]:
        chosen = [i for i, error in enumerate(errors) if error is not None]
        others = [i for i, error in enumerate(errors) if error is None]
        result, kept = list(leaves), list(errors)
        for i, mean in zip(others, exact_mean([leaves[i] for i in others]), strict=True):
            result[i] = mean
        values = [leaves[i].astype(jnp.float32) for i in chosen]
        means, lost = feedback_mean(values, [errors[i] for i in chosen])
        for i, mean, error in zip(chosen, means, lost, strict=True):
            result[i], error = rounded(mean, error, leaves[i].dtype)
            kept[i] = unless_bad(result[i], error, errors[i])
        return result, kept

    def update(
        grads: Any, state: CompressionState, params: Any = None
    ) -> tuple[Any, CompressionState]:
        del params
        check_local("one_bit", grads, axis_name)
        leaves, tree = jax.tree.flatten(grads)
        errors = errors_of("one_bit", state, grads, init, axis_name)
        if warmup_steps:
            result, errors = lax.cond(
                state.step < warmup_steps,
                lambda: (exact_mean(leaves), errors),
                lambda: compressed(leaves, errors),
            )
        else:
            result, errors = compressed(leaves, errors)
        new = CompressionState(state.step + 1, jax.tree.unflatten(tree, errors))
        return jax.tree.unflatten(tree, result), new

    return Transformation(init, update)


def _in_order(buckets: Sequence[Bucket], buffers: Sequence[Array]) -> list[Array]:
    """The leaves of all buckets, in the order of the tree."""
    found: dict[int, Array] = {}
    for bucket, buffer in zip(buckets, buffers, strict=True):
        found.update(unpack(bucket, buffer))
    return [found[i] for i in range(len(found))]
