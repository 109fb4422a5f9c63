"""Leaves of which each rank holds one part: how they are cut, put together, and saved.

A `Shard` is a pytree node, so a tree of them goes through `jax.tree.map`, optimizers, `jit` and
`scan` like a tree of arrays, and an optimizer's state that mirrors the parameters is made of shards
too. A leaf keeps its dimensions: one of them is cut into the parts of the ranks, the one that needs
the least filling up. Outside of `shard_map` the value is one global array, laid out over the mesh
as `shard_specs` says; inside of it, it is this rank's part.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_ring.arguments import AxisName, names_of

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Split:
    """How a leaf is cut, whatever the number of ranks.

    Attributes:
      shape: the leaf's true shape. Arrays may have more dimensions in front, such as layers.
      dimension: the one that is cut, counted from the end. A scalar is cut as if of shape (1,).
    """

    shape: tuple[int, ...]
    dimension: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape that is cut: that of the leaf, or (1,) of a scalar."""
        return self.shape or (1,)

    @classmethod
    def choose(cls, shape: tuple[int, ...], ranks: int) -> Split:
        """Cuts the dimension that is filled up by the fewest elements, the first of those."""
        sizes = shape or (1,)

        def filled(d: int) -> int:
            return math.prod(sizes[:d]) * (sizes[d] + -sizes[d] % ranks) * math.prod(sizes[d + 1 :])

        return cls(shape, min(range(len(sizes)), key=filled) - len(sizes))

    def fill(self, x: Array, ranks: int) -> Array:
        """An array [..., *shape], filled up with zeros so that it can be cut."""
        if not self.shape:
            x = lax.expand_dims(x, [x.ndim])
        missing = -x.shape[self.dimension] % ranks
        if not missing:
            return x
        config = [(0, missing if d == x.ndim + self.dimension else 0, 0) for d in range(x.ndim)]
        return lax.pad(x, jnp.zeros((), x.dtype), config)

    def part_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """The shape of a rank's part of an array [..., *shape] of that shape."""
        part = list(shape if self.shape else (*shape, 1))
        part[self.dimension] = -(-part[self.dimension] // ranks)
        return tuple(part)

    def parts(self, x: Array, ranks: int) -> Array:
        """The parts of all ranks, [ranks, elements], of an array [..., *shape]."""
        part = self.part_shape(x.shape, ranks)
        d = len(part) + self.dimension
        filled = self.fill(x, ranks).reshape(*part[:d], ranks, *part[d:])
        return jnp.moveaxis(filled, d, 0).reshape(ranks, math.prod(part))

    def join(self, parts: Array, shape: tuple[int, ...]) -> Array:
        """The inverse of `parts`, for parts that are of a shape each."""
        ranks, d = parts.shape[0], len(shape) + self.dimension
        rows = jnp.moveaxis(parts.reshape(ranks, *shape), 0, d)
        return self.trim(rows.reshape(*shape[:d], ranks * shape[d], *shape[d + 1 :]))

    def trim(self, x: Array) -> Array:
        """The inverse of `fill`."""
        size = self.sizes[self.dimension]
        if x.shape[self.dimension] != size:
            x = lax.slice_in_dim(x, 0, size, axis=self.dimension)
        return x if self.shape else lax.squeeze(x, [x.ndim - 1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """A leaf of which each rank holds one part.

    Attributes:
      value: the part, of the leaf's dimensions; outside of `shard_map` the global array of all
        parts, with zeros at the end where the leaf was filled up.
      split: how the leaf is cut. Part of the tree's structure.
    """

    value: Any
    split: Split = dataclasses.field(metadata={"static": True})


def is_shard(x: Any) -> bool:
    """Whether it is a `Shard`; for the `is_leaf` of `jax.tree.map`."""
    return isinstance(x, Shard)


def shard_params(params: Any, ranks: int, *, stacked: bool = False) -> Any:
    """Cuts all leaves of a tree into the parts of the ranks.

    For use outside of `shard_map`, on whole arrays; no rank is known there, so the values of the
    result are still global arrays. Put them where they belong by `shard_specs`, or make them there:
    `jax.jit(lambda p: shard_params(p, ranks), out_shardings=...)`.

    Args:
      params: a tree of arrays of any shape and dtype. None is no leaf.
      ranks: into how many parts, at least 1.
      stacked: whether leaves are stacks of layers, for `lax.scan`: their first dimension is then
        not cut, and each layer is a shard of its own.

    Returns:
      The tree of `Shard`s.

    Raises:
      ValueError: if ranks is less than 1, or a stacked leaf has no dimension.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ring.gradients import shard_params
      >>> shards = shard_params({"w": jnp.ones((3, 8)), "b": jnp.ones(6)}, ranks=4)
      >>> print(shards["w"].split, shards["b"].value)
      Split(shape=(3, 8), dimension=-1) [1. 1. 1. 1. 1. 1. 0. 0.]
    """
    if isinstance(ranks, bool) or not ranks >= 1:
        raise ValueError(f"shard_params: ranks must be at least 1, got {ranks!r}")

    def cut(path: Any, leaf: Any) -> Shard:
        array = jnp.asarray(leaf)
        if stacked and not array.ndim:
            raise ValueError(
                f"shard_params: stacked=True needs leaves with a dimension of layers, but leaf "
                f"{jax.tree_util.keystr(path)} is a scalar"
            )
        split = Split.choose(array.shape[stacked:], ranks)
        return Shard(split.fill(array, ranks), split)

    return jax.tree_util.tree_map_with_path(cut, params)


def unshard(tree: Any) -> Any:
    """The tree with whole arrays in place of its shards: what is best saved.

    The result does not depend on the number of ranks. That of an optimizer's state has the
    structure and the shapes which the same optimizer has without any shards. For use outside of
    `shard_map`; inside, see `gather_params`.

    Args:
      tree: any tree with `Shard`s in it, such as parameters or the state of an optimizer; of
        arrays, or of their shapes under `jax.eval_shape`.

    Returns:
      The tree with arrays for shards; other leaves as they are.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ring.gradients import shard_params, unshard
      >>> print(unshard(shard_params(jnp.arange(3), ranks=4)))
      [0 1 2]
    """

    def whole(leaf: Any) -> Any:
        if not is_shard(leaf):
            return leaf
        split = leaf.split
        # Not always one array: optimizers put trees of their own into shards.
        return jax.tree.map(lambda value: split.trim(_sliceable(value, split)), leaf.value)

    return jax.tree.map(whole, tree, is_leaf=is_shard)


def _sliceable(x: Any, split: Split) -> Array:
    """An array that `trim` may slice: gathered where it is explicitly sharded and was filled up."""
    array = jnp.asarray(x)
    kind = jax.typeof(array).sharding
    filled = array.shape[split.dimension] != split.sizes[split.dimension]
    if not filled or all(entry is None for entry in kind.spec):
        return array
    known = None if isinstance(array, jax.core.Tracer) else array.sharding
    mesh = known.mesh if isinstance(known, NamedSharding) else kind.mesh
    whole: Array = jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec()))
    return whole


def shard_like(tree: Any, like: Any) -> Any:
    """Cuts the leaves of a whole tree where another tree has shards: the inverse of `unshard`.

    So a state that was saved whole is taken to another number of ranks, see docs/training.md.

    Args:
      tree: a tree as `unshard` returns it, of whole arrays.
      like: a tree with `Shard`s, of arrays or of their shapes (`jax.eval_shape`).

    Returns:
      The tree of the structure of `like`, with the values of `tree`.

    Raises:
      ValueError: if a leaf has another shape than `like` wants, or the structures differ.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ring.gradients import shard_like, shard_params
      >>> like = jax.eval_shape(lambda: shard_params({"w": jnp.zeros(3)}, ranks=2))
      >>> print(shard_like({"w": jnp.arange(3)}, like)["w"].value)
      [0 1 2 0]
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_shard)
    wanted: Any = jax.tree.structure(jax.eval_shape(unshard, like))
    if wanted != jax.tree.structure(tree):
        raise ValueError(
            f"shard_like: tree must have the structure of `unshard(like)`, {wanted}, got "
            f"{jax.tree.structure(tree)}"
        )
    leaves = iter(jax.tree.leaves(tree))

    def cut(path: Any, old: Any) -> Any:
        def part(value: Any) -> Array:
            array = jnp.asarray(next(leaves))
            front = value.shape[: len(value.shape) - len(old.split.sizes)]
            if array.shape != (*front, *old.split.shape):
                raise ValueError(
                    f"shard_like: leaf {jax.tree_util.keystr(path)} of tree must be of shape "
                    f"{(*front, *old.split.shape)}, got {array.shape}"
                )
            filled: Array = old.split.fill(array, max(1, value.shape[old.split.dimension]))
            return filled

        if not is_shard(old):
            return next(leaves)
        return Shard(jax.tree.map(part, old.value), old.split)

    return jax.tree.unflatten(treedef, [cut(path, old) for path, old in flat])


def shard_specs(tree: Any, axis_name: AxisName) -> Any:
    """How a tree is laid out over the mesh: shards over the axis, other leaves on every rank.

    For `in_specs` and `out_specs` of `jax.shard_map`, and, put into `NamedSharding`s, for
    `jax.device_put`, `out_shardings` and checkpoints.

    Args:
      tree: any tree with `Shard`s in it, of arrays or of their shapes (`jax.eval_shape`).
      axis_name: the axes that the ranks lie along, in the order in which `jax_ring.psum_scatter`
        numbers them.

    Returns:
      The tree with a `PartitionSpec` for each array.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ring.gradients import shard_params, shard_specs
      >>> shards = shard_params({"w": jnp.ones((3, 8))}, ranks=4)
      >>> print(shard_specs(shards, "data")["w"].value)
      P(None, 'data')
    """
    axes = names_of(axis_name)
    entry = axes if len(axes) > 1 else axes[0]

    def of(leaf: Any) -> Any:
        if not is_shard(leaf):
            return PartitionSpec()

        def spec(value: Any) -> PartitionSpec:
            front = len(value.shape) + leaf.split.dimension
            return PartitionSpec(*[None] * front, entry)

        return Shard(jax.tree.map(spec, leaf.value), leaf.split)

    return jax.tree.map(of, tree, is_leaf=is_shard)
