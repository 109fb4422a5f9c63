"""Several micro-batches and one reduction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat, primitives
from jax_ring.arguments import AxisName, names_of
from jax_ring.gradients.sharded import own_shards, scatter_gradients
from jax_ring.gradients.sync import refuse_shards, sync_gradients

Array = jax.Array
# (params, batch) -> (loss, gradients)
Step = Callable[[Any, Any], tuple[Array, Any]]
Scatter = Literal["once", "each"]


def accumulate_gradients(
    loss_fn: Callable[[Any, Any], Any],
    microbatches: int,
    *,
    axis_name: AxisName | None = None,
    weighted: bool = False,
    scatter: Scatter | None = None,
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

    With `scatter` each rank keeps its part of the reduced gradients, for `sharded_optimizer`: by
    one reduce-scatter after the loop ("once"), or by one for each micro-batch ("each"), which sends
    `microbatches` times as much and adds up in 1/N of the memory. Where the parameters are `Shard`s
    already, the derivative of `gather_params` reduces each micro-batch: leave out axis_name.

    Args:
      loss_fn: (params, micro-batch) -> the mean loss of the micro-batch, a real scalar; with
        `weighted` a pair of that and its weight, a scalar of at least 0.
      microbatches: into how many parts the batch is cut, at least 1; the batch's first dimension
        must be divisible by it.
      axis_name: the axes of the ranks, as `jax_ring.psum`; None for one rank.
      weighted: whether loss_fn returns a weight.
      scatter: None, "once" or "each"; needs axis_name.
      **how: as `sync_gradients`, or with scatter as `scatter_gradients`, but op.

    Returns:
      A function (params, batch) -> (loss, gradients): a float32 scalar and a tree like params, of
      its dtypes; both the same on all ranks, but with scatter the gradients are `Shard`s. If all
      weights are 0, so is everything.

    Raises:
      ValueError: if microbatches is less than 1 or does not divide the batch, op is given, scatter
        is none of the above, or parameters are `Shard`s and axis_name is given.

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
    if scatter not in (None, "once", "each") or (scatter and axis_name is None):
        raise ValueError(
            "accumulate_gradients: scatter must be None, 'once' or 'each', with an axis_name, got "
            f"scatter={scatter!r}, axis_name={axis_name!r}"
        )
    axes = () if axis_name is None else names_of(axis_name)

    def weighed(params: Any, batch: Any) -> tuple[Array, Array]:
        found = loss_fn(params, batch)
        loss, weight = found if weighted else (found, 1.0)
        return loss, jnp.asarray(weight, jnp.float32)

    def step(params: Any, batch: Any) -> tuple[Array, Any]:
        if axis_name is not None:
            refuse_shards("accumulate_gradients", params)
        # Varying parameters have gradients of their own rank; jax.grad would sum others itself.
        local = jax.tree.map(lambda leaf: primitives.cast_varying(jnp.asarray(leaf), axes), params)
        each = _scatter(axis_name, how) if scatter == "each" else None
        loss, gradients, weight = _sums(weighed, local, _cut(batch, microbatches), each)
        if axis_name is not None:
            scalars: tuple[Array, ...] = (loss, weight)
            if not weighted:
                # What every rank knows is not sent.
                scalars, weight = (loss,), jnp.float32(microbatches * lax.axis_size(axes))
            gradients, scalars = _summed(gradients, scalars, axis_name, scatter, how)
            loss, weight = (*scalars, weight)[:2]
        scale = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1.0), 0.0)

        def mean(leaf: Any, total: Any) -> Any:
            dtype = jnp.asarray(leaf).dtype
            return jax.tree.map(lambda part: (part * scale).astype(dtype), total)

        return loss * scale, jax.tree.map(mean, params, gradients)

    return step


class _Scatter(NamedTuple):
    """Gradients to each rank's part of their sum.

    Attributes:
      sums: the reduce-scatter.
      own: the rank's parts of what all ranks have.
    """

    sums: Callable[[Any], Any]
    own: Callable[[Any], Any]


def _scatter(axis_name: AxisName | None, how: dict[str, Any]) -> _Scatter:
    return _Scatter(
        functools.partial(scatter_gradients, axis_name=axis_name, op="sum", **how),
        functools.partial(own_shards, axis_name=axis_name),
    )


def _summed(
    gradients: Any, scalars: Any, axis_name: AxisName, scatter: Scatter | None, how: dict[str, Any]
) -> Any:
    """Both summed over the ranks; a lossy wire is not for the scalars, nor they for its scales."""
    sync = functools.partial(sync_gradients, axis_name=axis_name, op="sum")
    if scatter is None and how.get("wire") is None and "order" not in how:
        return sync((gradients, scalars), **how)
    if scatter is None:
        gradients = sync(gradients, **how)
    elif scatter == "once":
        gradients = _scatter(axis_name, how).sums(gradients)
    exact = {name: value for name, value in how.items() if name not in ("wire", "order")}
    return gradients, sync(scalars, **exact)


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
    loss_fn: Callable[[Any, Any], tuple[Array, Array]],
    params: Any,
    parts: Any,
    scatter: _Scatter | None,
) -> tuple[Array, Any, Array]:
    """This rank's sums over the micro-batches: weighted losses and gradients, and weights.

    With `scatter` the gradients are those of all ranks, of which this one has its part.
    """

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        (loss, weight), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, part)

        def weighted(value: Array) -> Array:
            # 0 x NaN is NaN: what does not count is not to be multiplied.
            wide = jnp.promote_types(value.dtype, jnp.float32)
            return jnp.where(weight > 0, weight.astype(wide) * value, 0)

        total, accumulated, weights = sums
        gradients = jax.tree.map(weighted, gradients)
        if scatter is not None:
            gradients = scatter.sums(gradients)
        accumulated = jax.tree.map(jnp.add, accumulated, gradients)
        return (total + weighted(loss), accumulated, weights + weight), None

    def zeros(like: Any) -> Array:
        # As sharded as it, where an axis of the mesh is explicit.
        wide = lax.full_like(like, 0, jnp.promote_types(like.dtype, jnp.float32))
        return _like(wide, params, parts)

    scalar, empty = jnp.zeros((), jnp.float32), jax.tree.map(zeros, params)
    if scatter is not None:
        empty = scatter.own(empty)
    sums, _ = lax.scan(add, (zeros(scalar), empty, zeros(scalar)), parts)
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
