"""What the compressing transformations share: their state, and where that lies."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_ring import _compat, primitives
from jax_ring.arguments import AxisName, names_of
from jax_ring.gradients.shards import is_shard, shard_specs

Array = jax.Array


class CompressionState(NamedTuple):
    """The state of `powersgd` and `one_bit`.

    It belongs to leaves and not to buckets, so that it fits whatever the buckets are.

    Attributes:
      step: int32 [], the steps taken; the same on all ranks.
      error: a tree like the parameters: for each leaf that is compressed what this rank has not yet
        got across, of the leaf's shape, in float32; None for each that is exact. Each rank has
        its own.
      basis: `powersgd`: the same with float32 [columns, rank], where the next step starts; the same
        on all ranks. `one_bit`: None.
    """

    step: Array
    error: Any
    basis: Any = None


def state_specs(state: Any, axis_name: AxisName) -> Any:
    """How an optimizer state with compression in it crosses the border of `jax.shard_map`.

    All of it is the same on all ranks, but for the errors: outside, those of all ranks lie one
    after the other along the first dimension. `Shard`s in it are as `shard_specs` has them.

    Args:
      state: the state of any optimizer, such as a chain with `powersgd` in it, or its shapes.
      axis_name: the axes of the ranks, as `jax_ring.psum`.

    Returns:
      A tree of `PartitionSpec` for `in_specs` and `out_specs`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_ring.gradients import powersgd, state_specs
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], "data")
      >>> compress, params = powersgd("data"), {"w": jnp.ones((64, 32))}
      >>> specs = state_specs(jax.eval_shape(compress.init, params), "data")
      >>> init = jax.shard_map(compress.init, mesh=mesh, in_specs=P(), out_specs=specs)
      >>> state = jax.jit(init)(params)
      >>> state.error["w"].shape, state.basis["w"].shape
      ((256, 32), (32, 2))
    """
    own = PartitionSpec(names_of(axis_name))

    def specs(node: Any) -> Any:
        if not isinstance(node, CompressionState):
            return shard_specs(node, axis_name)
        shared = jax.tree.map(lambda _: PartitionSpec(), node)
        return shared._replace(error=jax.tree.map(lambda _: own, node.error))

    def whole(node: Any) -> bool:
        return isinstance(node, CompressionState) or is_shard(node)

    return jax.tree.map(specs, state, is_leaf=whole)


def zeros_of_rank(leaf: Any, axis_name: AxisName) -> Array:
    """The error that a rank starts with, varying over the axes where types are checked."""
    return primitives.cast_varying(jnp.zeros(jnp.shape(leaf), jnp.float32), names_of(axis_name))


def errors_of(api: str, state: CompressionState, grads: Any, axis_name: AxisName) -> list[Any]:
    """The errors of the leaves, in their order; None for those that are exact.

    Raises:
      ValueError: if they do not belong to these gradients.
    """
    tree: Any = jax.tree.structure(grads)
    try:
        errors = tree.flatten_up_to(state.error)
    except ValueError as problem:
        raise ValueError(
            f"jax_ring.{api}: state must be what init made of parameters like grads, {tree}: "
            f"{problem}"
        ) from None
    flat = jax.tree_util.tree_flatten_with_path(grads)[0]
    for (path, leaf), error in zip(flat, errors, strict=True):
        if error is not None and jnp.shape(error) != jnp.shape(leaf):
            raise ValueError(
                f"jax_ring.{api}: leaf {jax.tree_util.keystr(path)} of grads has shape "
                f"{jnp.shape(leaf)}, but its error in state has {jnp.shape(error)}: make the state "
                "in jax.shard_map, and let it out and in by jax_ring.gradients.state_specs"
            )
    axes = names_of(axis_name)
    return [None if e is None else primitives.cast_varying(e, axes) for e in errors]


def rounded(wide: Array, lost: Array, dtype: Any) -> tuple[Array, Array]:
    """A result in the dtype of its leaf, and the error with what that rounding lost."""
    result = wide.astype(dtype)
    return result, lost + _varying_as(lost, wide - result.astype(jnp.float32))


def unless_bad(result: Array, new: Array, before: Array) -> Array:
    """The new state of a leaf, or that before it if the result is not finite."""
    return jnp.where(_varying_as(new, jnp.isfinite(result).all()), new, before)


def _varying_as(like: Array, x: Array) -> Array:
    if not _compat.check_vma():
        return x
    return primitives.cast_varying(x, tuple(sorted(_compat.varying(jax.typeof(like)))))


def at_least(api: str, argument: str, value: Any, least: int) -> int:
    """An integer argument, checked."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"jax_ring.{api}: {argument} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"jax_ring.{api}: {argument} must be at least {least}, got {value!r}")
    return number
