"""Several micro-batches and one reduction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat, primitives
from jax_ring.arguments import AxisName, names_of
from jax_ring.gradients.sync import sync_gradients

Array = jax.Array
# (params, batch) -> (loss, gradients)
Step = Callable[[Any, Any], tuple[Array, Any]]


def accumulate_gradients(
    loss_fn: Callable[[Any, Any], Any],
    microbatches: int,
    *,
    axis_name: AxisName | None = None,
    weighted: bool = False,
    **how: Any,
) -> Step:
    """The loss and gradients of a batch, a micro-batch at a time, reduced over the ranks once.

    The batch is cut along the first dimension of its leaves, and a `lax.scan` goes over the parts.
    Gradients are accumulated in float32 at least, whatever the parameters are of. The loop has no
    collective in it: the sums are reduced after it, in the buckets of `sync_gradients`. Over a wire
    the loss and the weight travel apart and exactly.

    The result is the mean over all examples of all ranks. With `weighted` the loss function says
    how much its micro-batch counts, for example its number of tokens that are no padding: the mean
    is then right for ranks and micro-batches of different weights, also where it is 0. A
    micro-batch of weight 0 counts nothing, even if its loss is NaN.

    Args:
      loss_fn: (params, micro-batch) -> the mean loss of the micro-batch, a real scalar; with
        `weighted` a pair of that and its weight, a scalar of at least 0.
      microbatches: into how many parts the batch is cut, at least 1; the batch's first dimension
        must be divisible by it.
      axis_name: the axes of the ranks, as `jax_ring.psum`; None for one rank.
      weighted: whether loss_fn returns a weight.
      **how: as `sync_gradients`, but op.

    Returns:
      A function (params, batch) -> (loss, gradients): a float32 scalar and a tree like params, of
      its dtypes; both the same on all ranks. If all weights are 0, so is everything.

    Raises:
      ValueError: if microbatches is less than 1 or does not divide the batch, or op is given.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ring.gradients import accumulate_gradients
      >>> step = accumulate_gradients(lambda w, x: (w * x).mean(), microbatches=2)
      >>> loss, gradient = step(jnp.float32(3.0), jnp.arange(4.0))
      >>> print(loss, gradient)
      4.5 1.5
    """
    if isinstance(microbatches, bool) or not microbatches >= 1:
        raise ValueError(
            f"accumulate_gradients: microbatches must be at least 1, got {microbatches!r}"
        )
    if "op" in how:
        raise ValueError(
            f"accumulate_gradients: op must not be given, it takes the mean; got {how['op']!r}"
        )
    axes = () if axis_name is None else names_of(axis_name)

    def weighed(params: Any, batch: Any) -> tuple[Array, Array]:
        found = loss_fn(params, batch)
        loss, weight = found if weighted else (found, 1.0)
        return loss, jnp.asarray(weight, jnp.float32)

    def step(params: Any, batch: Any) -> tuple[Array, Any]:
        # Varying parameters have gradients of their own rank; jax.grad would sum others itself.
        local = jax.tree.map(lambda leaf: primitives.cast_varying(jnp.asarray(leaf), axes), params)
        sums = _sums(weighed, local, _cut(batch, microbatches))
        loss, gradients, weight = sums
        if axis_name is not None:
            scalars: tuple[Array, ...] = (loss, weight)
            if not weighted:
                # What every rank knows is not sent.
                scalars, weight = (loss,), jnp.float32(microbatches * lax.axis_size(axes))
            gradients, scalars = _summed(gradients, scalars, axis_name, how)
            loss, weight = (*scalars, weight)[:2]
        scale = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1.0), 0.0)
        means = jax.tree.map(
            lambda total, leaf: (total * scale).astype(jnp.asarray(leaf).dtype), gradients, params
        )
        return loss * scale, means

    return step


def _summed(gradients: Any, scalars: Any, axis_name: AxisName, how: dict[str, Any]) -> Any:
    """Both summed over the ranks; a lossy wire is not for the scalars, nor they for its scales."""
    sync = functools.partial(sync_gradients, axis_name=axis_name, op="sum")
    if how.get("wire") is None and "order" not in how:
        return sync((gradients, scalars), **how)
    exact = {name: value for name, value in how.items() if name not in ("wire", "order")}
    return sync(gradients, **how), sync(scalars, **exact)


def _cut(batch: Any, microbatches: int) -> Any:
    def cut(path: Any, leaf: Any) -> Array:
        array = jnp.asarray(leaf)
        if array.ndim == 0 or array.shape[0] % microbatches:
            raise ValueError(
                f"accumulate_gradients: leaf {jax.tree_util.keystr(path)} of the batch has shape "
                f"{array.shape}, whose first dimension must be divisible by microbatches="
                f"{microbatches}"
            )
        return array.reshape(microbatches, array.shape[0] // microbatches, *array.shape[1:])

    return jax.tree_util.tree_map_with_path(cut, batch)


def _sums(
    loss_fn: Callable[[Any, Any], tuple[Array, Array]], params: Any, parts: Any
) -> tuple[Array, Any, Array]:
    """This rank's sums over the micro-batches: weighted losses and gradients, and weights."""

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        (loss, weight), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, part)

        def added(total: Array, value: Array) -> Array:
            # 0 x NaN is NaN: what does not count is not to be multiplied.
            return total + jnp.where(weight > 0, weight.astype(total.dtype) * value, 0)

        total, accumulated, weights = sums
        accumulated = jax.tree.map(added, accumulated, gradients)
        return (added(total, loss), accumulated, weights + weight), None

    def zeros(like: Any) -> Array:
        # As sharded as it, where an axis of the mesh is explicit.
        wide = lax.full_like(like, 0, jnp.promote_types(like.dtype, jnp.float32))
        return _like(wide, params, parts)

    scalar = jnp.zeros((), jnp.float32)
    start = (zeros(scalar), jax.tree.map(zeros, params), zeros(scalar))
    sums, _ = lax.scan(add, start, parts)
    result: tuple[Array, Any, Array] = sums
    return result


def _like(zeros: Array, *trees: Any) -> Array:
    """Zeros that vary over all that the leaves of some trees vary over, as a loop's carry must."""
    if not _compat.check_vma():
        return zeros
    varying = frozenset[str]().union(
        *(_compat.varying(jax.typeof(leaf)) for leaf in jax.tree.leaves(trees))
    )
    return primitives.cast_varying(zeros, tuple(sorted(varying)))
