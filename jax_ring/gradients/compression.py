"""What the compressing transformations share: their state, and where that lies."""

from __future__ import annotations

import operator
from collections.abc import Callable
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


def errors_of(
    api: str,
    state: CompressionState,
    grads: Any,
    init: Callable[[Any], CompressionState],
    axis_name: AxisName,
) -> list[Any]:
    """The errors of the leaves, in their order; None for those that are exact.

    Raises:
      ValueError: if the state is not as `init` makes it of these gradients.
    """
    wanted = jax.eval_shape(init, grads)
    for name in ("error", "basis"):
        have, want = _shapes(getattr(state, name)), _shapes(getattr(wanted, name))
        for path in [*want, *have]:
            if have.get(path, "nothing") != want.get(path, "nothing"):
                raise ValueError(
                    f"jax_ring.{api}: state.{name}{path} must have the shape "
                    f"{want.get(path, 'nothing')}, as init makes it of these gradients, got "
                    f"{have.get(path, 'nothing')}: it is of other parameters or settings, or came "
                    "into jax.shard_map in another way than by jax_ring.gradients.state_specs"
                )
    axes = names_of(axis_name)
    errors = jax.tree.structure(grads).flatten_up_to(state.error)  # type: ignore[attr-defined]
    return [None if e is None else primitives.cast_varying(e, axes) for e in errors]


def _shapes(tree: Any) -> dict[str, Any]:
    """The shapes of the leaves by their paths; None for None."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
    return {
        jax.tree_util.keystr(path): None if leaf is None else jnp.shape(leaf) for path, leaf in flat
    }


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
