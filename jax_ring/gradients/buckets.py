"""Buckets: which leaves of a tree are reduced together. Static, from paths, shapes and dtypes."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.arguments import OP_NAMES

BUCKET_BYTES = 25 * 2**20

# Puts the leaves, given by their paths, in the order in which their gradients become ready.
Order = Callable[[Sequence[str]], Sequence[int]]


def reverse_order(paths: Sequence[str]) -> Sequence[int]:
    """The last leaf first: backward goes through a model from its end to its beginning."""
    return range(len(paths))[::-1]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf in a bucket.

    Attributes:
      index: its position among the leaves of the tree.
      path: where it is in the tree, as `jax.tree_util.keystr` has it.
      shape: its shape.
    """

    index: int
    path: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are reduced together.

    Attributes:
      dtype: of all of them.
      leaves: in the order in which they lie in the buffer.
      op: what they are reduced by, if the plan was made for several operations.
    """

    dtype: np.dtype[Any]
    leaves: tuple[Leaf, ...]
    op: Any = None

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves."""
        return sum(leaf.size for leaf in self.leaves) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Which leaf goes into which bucket.

    Attributes:
      buckets: in the order in which they become ready.
      apart: leaves that are not reduced: those of symbolic zeros (float0).
    """

    buckets: tuple[Bucket, ...]
    apart: tuple[Leaf, ...]

    @property
    def fingerprint(self) -> str:
        """The same for equal plans, also in other processes."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """A line for each bucket and one for each leaf."""
        lines = []
        for i, bucket in enumerate(self.buckets):
            op = "" if bucket.op is None else f", {bucket.op}"
            lines.append(f"bucket {i}: {bucket.dtype}{op}, {bucket.nbytes:,} bytes")
            lines += [f"  {leaf.path or '(the tree)'} {list(leaf.shape)}" for leaf in bucket.leaves]
        lines += [f"not reduced: {leaf.path}" for leaf in self.apart]
        return "\n".join(lines) or "no leaves"


def plan_buckets(
    tree: Any,
    bucket_bytes: int = BUCKET_BYTES,
    *,
    order: Order = reverse_order,
    op: Any = None,
) -> BucketPlan:
    """Plans the buckets of a tree.

    Leaves are taken in their order, and put into the last bucket of their dtype and operation if
    they fit, into a new one else. So a bucket is of at most `bucket_bytes`, unless one leaf alone
    is larger.

    Args:
      tree: arrays, or anything with a shape and a dtype. None is no leaf.
      bucket_bytes: how large a bucket may become, at least 1.
      order: puts the paths of the leaves in the order in which their gradients become ready.
      op: the name of what the leaves are reduced by, or a tree of names like the tree or its upper
        part, of the same types of nodes.

    Returns:
      The plan; the same for trees of the same structure, shapes and dtypes, and the same op.

    Raises:
      ValueError: if bucket_bytes is less than 1, order does not give each leaf once, or op is a
        tree of another structure.
      TypeError: for a leaf that is no array.

    Example:
      >>> import jax.numpy as jnp
      >>> tree = {"a": jnp.zeros((2, 3)), "b": None, "c": jnp.zeros(4), "d": jnp.zeros(4, int)}
      >>> print(plan_buckets(tree))
      bucket 0: int32, 16 bytes
        ['d'] [4]
      bucket 1: float32, 40 bytes
        ['c'] [4]
        ['a'] [2, 3]
      >>> print(plan_buckets({"g": jnp.zeros(3), "amax": 1.0}, op={"g": "sum", "amax": "max"}))
      bucket 0: float32, sum, 12 bytes
        ['g'] [3]
      bucket 1: float32, max, 4 bytes
        ['amax'] []
    """
    if isinstance(bucket_bytes, bool) or not bucket_bytes >= 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes!r}")
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [jax.tree_util.keystr(path) for path, _ in flat]
    ready = list(order(paths))
    if sorted(ready) != list(range(len(paths))):
        raise ValueError(f"order must give each of the {len(paths)} leaves once, got {ready}")
    ops = _for_each_leaf(op, tree)
    buckets: list[list[Leaf]] = []
    kinds: list[tuple[np.dtype[Any], Any]] = []
    last: dict[tuple[np.dtype[Any], Any], int] = {}
    apart = []
    for index in ready:
        value = flat[index][1]
        shape, dtype = _type(paths[index], value)
        leaf = Leaf(index, paths[index], shape)
        if dtype == jax.dtypes.float0:
            apart.append(leaf)
            continue
        kind = (dtype, ops[index])
        held = buckets[last[kind]] if kind in last else None
        total = sum(other.size for other in held or ()) + leaf.size
        if held is None or total * dtype.itemsize > bucket_bytes:
            last[kind] = len(buckets)
            buckets.append([])
            kinds.append(kind)
        buckets[last[kind]].append(leaf)
    made = (
        Bucket(dtype, tuple(held), which)
        for (dtype, which), held in zip(kinds, buckets, strict=True)
    )
    return BucketPlan(tuple(made), tuple(apart))


def _for_each_leaf(op: Any, tree: Any) -> list[Any]:
    """The operations of the leaves, from one or a tree of them."""
    wanted = f"op must be one of {list(OP_NAMES)}, or a tree of these like the leaves' or its upper"
    if op is None or jax.tree_util.all_leaves([op]):
        ops = [op] * len(jax.tree.leaves(tree))
    else:
        try:
            ops = list(jax.tree.leaves(jax.tree.broadcast(op, tree)))
        except ValueError:
            given, structure = jax.tree.structure(op), jax.tree.structure(tree)
            raise ValueError(f"{wanted} part, {structure}; got {given}: {op!r}") from None
    for one in ops:
        if one is not None and one not in OP_NAMES:
            raise ValueError(f"{wanted} part, got {one!r}")
    return ops


def _type(path: str, value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    try:
        return tuple(jnp.shape(value)), np.dtype(jax.dtypes.result_type(value))
    except TypeError:
        raise TypeError(
            f"leaf {path} must be an array, got {type(value).__name__}: {value!r}"
        ) from None
