"""Gradients averaged over the ranks: after the backward pass in buckets, or inside of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat, layout, primitives
from jax_ring.arguments import Algorithm, AxisName, Wire, names_of
from jax_ring.collectives import all_reduce
from jax_ring.gradients.buckets import (
    BUCKET_BYTES,
    Bucket,
    Order,
    plan_buckets,
    reverse_order,
)
from jax_ring.gradients.shards import is_shard
from jax_ring.plan import plan
from jax_ring.schedules import Kind, Schedule, position_independent
from jax_ring.schedules.families import make, names

Array = jax.Array
Tree = TypeVar("Tree")


def sync_gradients(
    grads: Tree,
    axis_name: AxisName,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    op: str | Mapping[Any, Any] | Sequence[Any] = "mean",
    algorithm: Algorithm = "auto",
    wire: Wire = None,
    reduce_dtype: Any = None,
    order: Order = reverse_order,
    in_order: bool = False,
    deterministic: bool = False,
) -> Tree:
    """Reduces all leaves of a tree over the ranks, several leaves to a collective.

    Leaves of one dtype are put into buckets, those first whose gradients are ready first. Each
    bucket is one collective, which depends on its own leaves alone, so that XLA may run it while
    the backward pass goes on. A bucket of several leaves costs one copy into its buffer and one out
    of it (two more on CPU, where XLA takes the last store of the all-reduce into the first slice of
    its result); a leaf that has a bucket to itself costs none. Where some mesh axes are left to the
    compiler, every leaf has one, since joining leaves would gather what is sharded.

    An element's sum may differ in its last bits with where in a bucket it lies, and so with
    `bucket_bytes`: algorithms such as the ring add the ranks in another order in each chunk. With
    `deterministic` the bits are the same for every `bucket_bytes`.

    Args:
      grads: a tree of arrays, local to each rank. None is no leaf, float0 is left as it is. Where
        types are checked (`check_vma=True`), all must vary over `axis_name`.
      axis_name: as `jax_ring.psum`.
      bucket_bytes: how large a bucket may become; one leaf may be larger.
      op: "mean", "sum", "max", "min" or "prod"; or a tree of these, like grads or its upper part
        and of the same types of nodes, as in `op={"grads": "mean", "amax": "max"}`. Leaves of
        different ones are in different buckets.
      algorithm: as `jax_ring.psum`, for every bucket.
      wire: as `jax_ring.psum`.
      reduce_dtype: as `jax_ring.psum`.
      order: see `plan_buckets`.
      in_order: lets each bucket wait for the one before it. They take as long, for they share the
        links; but XLA's latency-hiding scheduler, which lays out the program from its end, then
        spreads the steps of all but the last over the backward pass, where it else would leave
        most of them at the end.
      deterministic: takes an algorithm that adds the ranks in the same order in all chunks:
        halving-doubling for a power of two, else, and over a wire, recursive doubling.

    Returns:
      The tree of reduced leaves; those of `"mean"` over integers are floats.

    Raises:
      ValueError: if a leaf is the same on all ranks by its type, for then `jax.grad` has summed it
        over them already, or a `Shard`; if `deterministic` is asked for with an algorithm or a wire
        that cannot be; if `op` is a tree that does not fit; otherwise as `jax_ring.all_reduce`.

    Complexity: one collective for each bucket.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ring.gradients import sync_gradients
      >>> grads = {"w": jnp.arange(8.0).reshape(4, 2), "b": jnp.ones(4)}
      >>> mean = jax.vmap(lambda g: sync_gradients(g, "i"), axis_name="i")(grads)
      >>> print(mean["w"][0], mean["b"][0])
      [3. 4.] 1.0
    """
    check_local("sync_gradients", grads, axis_name)
    leaves, tree = jax.tree.flatten(grads)
    planned = plan_buckets(grads, bucket_limit(bucket_bytes), order=order, op=op)
    if deterministic:
        algorithm = _deterministic(algorithm, wire, lax.axis_size(axis_name))
    reduce = functools.partial(
        all_reduce,
        axis_name=axis_name,
        algorithm=algorithm,
        reduce_dtype=reduce_dtype,
    )
    result = list(leaves)
    reduced: Array | None = None
    for number, bucket in enumerate(planned.buckets):
        with jax.named_scope(f"bucket{number}"):  # What it is called in a profile.
            buffer = after(reduced if in_order else None, pack(bucket, leaves))
            reduced = reduce(buffer, op=bucket.op, wire=wire_of(bucket, wire))
            for index, value in unpack(bucket, reduced):
                result[index] = value
    synced: Tree = jax.tree.unflatten(tree, result)
    return synced


def bucket_limit(limit: int) -> int:
    """The limit; where axes are left to the compiler, joining leaves would gather them."""
    return limit if layout.left_to_compiler() == 1 else 1


def wire_of(bucket: Bucket, wire: Wire) -> Wire:
    """A wire is for floats only; integers beside them travel as they are."""
    return wire if jnp.issubdtype(bucket.dtype, jnp.floating) else None


def pack(bucket: Bucket, leaves: Sequence[Any]) -> Array:
    """The leaves of a bucket in one buffer; a single leaf as it is."""
    values = [jnp.asarray(leaves[leaf.index]) for leaf in bucket.leaves]
    if len(values) == 1:
        return values[0]
    return lax.concatenate([value.reshape(-1) for value in values], 0)


def after(before: Array | None, buffer: Array) -> Array:
    """The buffer of a bucket, which is not to be had before the result of another."""
    if before is None:
        return buffer
    held: Array = lax.optimization_barrier((before, buffer))[1]
    return held


def unpack(bucket: Bucket, buffer: Array) -> list[tuple[int, Array]]:
    """The leaves of a bucket, each with its index in the tree."""
    if len(bucket.leaves) == 1:
        return [(bucket.leaves[0].index, buffer)]
    parts = cut(buffer, [leaf.size for leaf in bucket.leaves])
    return [
        (leaf.index, part.reshape(leaf.shape))
        for leaf, part in zip(bucket.leaves, parts, strict=True)
    ]


def cut(buffer: Array, sizes: Sequence[int]) -> list[Array]:
    """Slices of some sizes along the last dimension."""
    ends = itertools.accumulate(sizes)
    return [
        lax.slice_in_dim(buffer, end - size, end, axis=-1)
        for size, end in zip(sizes, ends, strict=True)
    ]


def refuse_shards(api: str, tree: Any) -> None:
    """Refuses what each rank holds a part of: parts of different ranks must not be added."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shard)[0]:
        if is_shard(leaf):
            raise ValueError(
                f"jax_ring.{api}: leaf {jax.tree_util.keystr(path)} is a Shard, which is reduced "
                "over the ranks already: by scatter_gradients, or by the derivative of "
                f"gather_params. Leave {api} out, or its axis_name"
            )


def check_local(api: str, grads: Any, axis_name: AxisName) -> None:
    """Refuses what has been summed over the ranks already: shards, and as its type tells."""
    refuse_shards(api, grads)
    if not _compat.check_vma():
        return
    manual = set(primitives.manual_axes(names_of(axis_name)))
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        kind = jax.typeof(leaf)
        have = _compat.varying(kind) | _compat.unreduced(kind)
        if getattr(leaf, "dtype", None) != jax.dtypes.float0 and not manual <= have:
            raise ValueError(
                f"jax_ring.{api}: leaf {jax.tree_util.keystr(path)} of grads must vary "
                f"over {axis_name!r}, but its type {kind} says that it is the same on all ranks: "
                "jax.grad has summed it over them, because the parameters are. To reduce it here, "
                f"differentiate by jax.lax.pcast(params, {axis_name!r}, to='varying'); to keep "
                f"that sum, leave {api} out and divide by the number of ranks for a mean"
            )


def _deterministic(algorithm: Algorithm, wire: Wire, ranks: int) -> Algorithm:
    """An algorithm that adds the ranks in the same order in every chunk."""
    cast_only = wire is None or (isinstance(wire, str) and "float" in wire)
    if not cast_only:
        raise ValueError(
            f"jax_ring.sync_gradients: deterministic=True needs a wire that rounds each value by "
            f"itself, such as 'bfloat16', got wire={wire!r}"
        )
    if algorithm == "auto":
        even = wire is None and ranks & (ranks - 1) == 0
        algorithm = "halving_doubling" if even else "recursive_doubling"
    schedule = algorithm if isinstance(algorithm, Schedule) else _named(algorithm, ranks)
    fits = schedule is not None and position_independent(schedule)
    # Over a wire a rank rounds what it sends and not what it adds to, unless all make all sums.
    if schedule is None or not fits or (wire is not None and not plan(schedule).redundant):
        raise ValueError(
            "jax_ring.sync_gradients: deterministic=True needs an algorithm that adds the ranks in "
            f"one order everywhere, such as 'recursive_doubling', got algorithm={algorithm!r}"
        )
    return algorithm


def _named(algorithm: str, ranks: int) -> Schedule | None:
    known = algorithm in names(Kind.ALL_REDUCE)
    return make(algorithm, Kind.ALL_REDUCE, ranks) if known else None


def reduce_in_backward(params: Tree, axis_name: AxisName, **how: Any) -> Tree:
    """The parameters as they are, whose gradients are reduced inside of the backward pass.

    Use the result in place of the parameters of a layer: its gradients are then reduced as soon as
    backward has made them, and come out of `jax.grad` the same on all ranks. For layers in a
    `lax.scan` call it in the loop's body, on the parameters of the one layer, so that the reduction
    is in the body of the backward loop too.

    Args:
      params: a tree of arrays, the same on all ranks. Where types are checked they must be so by
        their type (not varying over `axis_name`).
      axis_name: as `jax_ring.psum`.
      **how: as `sync_gradients`: by default the mean.

    Returns:
      The same values; where types are checked, varying over `axis_name`.

    Raises:
      ValueError: as `sync_gradients`, when it is differentiated.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ring.gradients import reduce_in_backward
      >>> def loss(w, x):
      ...     return reduce_in_backward(w, "i") * x
      >>> per_rank = jax.vmap(jax.grad(loss), in_axes=(None, 0), axis_name="i")
      >>> print(per_rank(1.0, jnp.arange(4.0)))
      [1.5 1.5 1.5 1.5]
    """
    axes = names_of(axis_name)

    @jax.custom_vjp
    def hook(tree: Tree) -> Tree:
        cast: Tree = jax.tree.map(lambda leaf: primitives.cast_varying(leaf, axes), tree)
        return cast

    def forward(tree: Tree) -> tuple[Tree, None]:
        return hook(tree), None

    def backward(_: None, cotangents: Tree) -> tuple[Tree]:
        return (sync_gradients(cotangents, axis_name, **how),)

    hook.defvjp(forward, backward)
    result: Tree = hook(params)
    return result
