"""Trees to shards and back inside of `shard_map`: reduce-scatters and all-gathers in buckets."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import primitives
from jax_ring.arguments import Algorithm, AxisName, Op, Wire, names_of
from jax_ring.collectives import all_gather, reduce_scatter
from jax_ring.gradients.buckets import BUCKET_BYTES, Order, plan_buckets, reverse_order
from jax_ring.gradients.shards import Shard, Split, is_shard, shard_params
from jax_ring.gradients.sync import after, bucket_limit, check_local, cut, wire_of

Array = jax.Array

# What makes whole parameters of shards, and what only moves them on to where they are used.
_GATHERS = (primitives.all_gather_p.name, "all_gather")
_MOVES = ("concatenate", "convert_element_type", "reshape", "slice", "squeeze", "transpose")


def scatter_gradients(
    grads: Any,
    axis_name: AxisName,
    *,
    like: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    op: Op = "mean",
    algorithm: Algorithm = "auto",
    wire: Wire = None,
    reduce_dtype: Any = None,
    order: Order = reverse_order,
    in_order: bool = False,
) -> Any:
    """Reduces a tree over the ranks, of which each keeps its part: half of `sync_gradients`.

    Buckets are those of `sync_gradients`, and each is one reduce-scatter. A bucket of several
    leaves costs one copy into its buffer; a leaf that has a bucket to itself costs none, but for
    the filling where it cannot be cut evenly.

    Args:
      grads: a tree of arrays, local to each rank, as for `sync_gradients`.
      axis_name: as `jax_ring.psum_scatter`.
      like: the parameters' shards, if the gradients shall be cut as they are; by default as
        `shard_params` cuts them.
      bucket_bytes: as `sync_gradients`.
      op: as `jax_ring.reduce_scatter`, for all leaves.
      algorithm: as `jax_ring.psum_scatter`, for every bucket.
      wire: as `jax_ring.psum`.
      reduce_dtype: as `jax_ring.psum`.
      order: see `plan_buckets`.
      in_order: as `sync_gradients`.

    Returns:
      The tree of `Shard`s, whose values vary over `axis_name`.

    Raises:
      ValueError: if a leaf is the same on all ranks by its type or a `Shard`, as for
        `sync_gradients`; if `like` is not a tree of shards of these leaves; otherwise as
        `jax_ring.reduce_scatter`.

    Complexity: one reduce-scatter for each bucket: half of the bytes that `sync_gradients` sends.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ring.gradients import scatter_gradients
      >>> grads = {"w": jnp.arange(8.0).reshape(2, 4)}
      >>> print(jax.vmap(lambda g: scatter_gradients(g, "i"), axis_name="i")(grads)["w"].value)
      [[2. 3.]
       [4. 5.]]
    """
    check_local("scatter_gradients", grads, axis_name)
    ranks = primitives.axis_size(names_of(axis_name))
    leaves, treedef = jax.tree.flatten(grads)
    splits = _splits(grads, like, ranks)
    shapes = [
        split.part_shape(jnp.shape(leaf), ranks) for split, leaf in zip(splits, leaves, strict=True)
    ]
    # Symbolic zeros are in no bucket.
    parts: list[Any] = [np.zeros(shape, jax.dtypes.float0) for shape in shapes]
    reduced: Array | None = None
    for bucket in plan_buckets(grads, bucket_limit(bucket_bytes), order=order).buckets:
        reduce = functools.partial(
            reduce_scatter,
            axis_name=axis_name,
            op=op,
            algorithm=algorithm,
            wire=wire_of(bucket, wire),
            reduce_dtype=reduce_dtype,
        )
        before = reduced if in_order else None
        inside = [leaf.index for leaf in bucket.leaves]
        if len(inside) == 1:
            i = inside[0]
            whole = after(before, splits[i].fill(jnp.asarray(leaves[i]), ranks))
            reduced = parts[i] = reduce(whole, scatter_dimension=splits[i].dimension, tiled=True)
            continue
        rows = [splits[i].parts(jnp.asarray(leaves[i]), ranks) for i in inside]
        reduced = reduce(after(before, lax.concatenate(rows, 1)))
        for i, values in zip(inside, cut(reduced, [v.shape[1] for v in rows]), strict=True):
            parts[i] = values.reshape(shapes[i])
    return jax.tree.unflatten(treedef, list(map(Shard, parts, splits)))


def gather_shards(
    shards: Any,
    axis_name: AxisName,
    *,
    to: str,
    bucket_bytes: int,
    algorithm: Algorithm,
    wire: Wire,
) -> Any:
    """The whole leaves of a tree of shards, by one all-gather for each bucket.

    Args:
      shards: a tree of `Shard`s and nothing else.
      axis_name: as `jax_ring.psum_scatter`.
      to: as `jax_ring.all_gather`.
      bucket_bytes: as `sync_gradients`, of the whole leaves.
      algorithm: as `jax_ring.all_gather`.
      wire: as `jax_ring.all_gather`.

    Returns:
      The tree of whole arrays.
    """
    ranks = primitives.axis_size(names_of(axis_name))
    nodes, treedef = jax.tree.flatten(shards, is_leaf=is_shard)
    values = [jnp.asarray(node.value) for node in nodes]
    result: list[Any] = [None] * len(nodes)
    limit = max(1, bucket_limit(bucket_bytes) // ranks)
    for bucket in plan_buckets(values, limit, order=_forward_order).buckets:
        gather = functools.partial(
            all_gather, axis_name=axis_name, to=to, algorithm=algorithm, wire=wire_of(bucket, wire)
        )
        inside = [leaf.index for leaf in bucket.leaves]
        if len(inside) == 1:
            split = nodes[inside[0]].split
            whole = gather(values[inside[0]], axis=split.dimension, tiled=True)
            result[inside[0]] = split.trim(whole)
            continue
        rows = gather(lax.concatenate([values[i].reshape(-1) for i in inside], 0))
        for i, parts in zip(inside, cut(rows, [values[i].size for i in inside]), strict=True):
            result[i] = nodes[i].split.join(parts, values[i].shape)
    return jax.tree.unflatten(treedef, result)


def own_shards(params: Any, axis_name: AxisName) -> Any:
    """This rank's shards of a tree of whole arrays that every rank has.

    Args:
      params: a tree of arrays.
      axis_name: as `jax_ring.psum_scatter`.

    Returns:
      The tree of `Shard`s, as `shard_params` cuts them; varying over `axis_name`.
    """
    axes = names_of(axis_name)
    ranks = primitives.axis_size(axes)

    def own(shard: Shard) -> Shard:
        value, d = shard.value, shard.split.dimension
        size = value.shape[d] // ranks
        start = lax.axis_index(axes) * size
        return Shard(lax.dynamic_slice_in_dim(value, start, size, value.ndim + d), shard.split)

    local = jax.tree.map(lambda leaf: primitives.cast_varying(jnp.asarray(leaf), axes), params)
    return jax.tree.map(own, shard_params(local, ranks), is_leaf=is_shard)


def gather_params(
    shards: Any,
    axis_name: AxisName,
    *,
    dtype: Any = None,
    gather_algorithm: Algorithm = "auto",
    gather_wire: Wire = None,
    bucket_bytes: int = BUCKET_BYTES,
    **how: Any,
) -> Any:
    """The whole parameters from the shards of the ranks, whose gradients come back as shards.

    The derivative is `scatter_gradients`: the mean over the ranks, in the dtype of the shards. Call
    it in the function of a layer, on the shards of that layer, so that no more than a layer is
    whole at a time, and put `jax.checkpoint` around that function, so that the backward pass
    gathers again what it needs and nothing whole is kept from forward to backward: with its default
    policy, with one that names what to save, or with `save_all_but_gathered`.

    Args:
      shards: a tree of `Shard`s: this rank's part of parameters.
      axis_name: as `jax_ring.psum_scatter`.
      dtype: in which floats are gathered, for example bfloat16 of float32 shards; by default
        theirs.
      gather_algorithm: as `jax_ring.all_gather`.
      gather_wire: as `jax_ring.all_gather`.
      bucket_bytes: as `sync_gradients`: for the whole leaves, gathered or scattered together.
      **how: for the gradients, as `scatter_gradients`: op, algorithm, wire, reduce_dtype, order,
        in_order.

    Returns:
      The tree of whole arrays; where types are checked, varying over `axis_name`.

    Raises:
      TypeError: for a leaf that is no `Shard`.
      ValueError: as `scatter_gradients`, when it is differentiated; as `jax_ring.all_gather`.

    Complexity: one all-gather for each bucket, and in backward one reduce-scatter.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ring.gradients import Shard, gather_params, shard_params
      >>> shards = shard_params(jnp.arange(4.0), ranks=4)
      >>> rows = Shard(shards.value.reshape(4, 1), shards.split)
      >>> def loss(shards, x):
      ...     return (gather_params(shards, "i") * x).sum()
      >>> gradient = jax.jit(jax.vmap(jax.grad(loss), axis_name="i"))(rows, jnp.arange(4.0))
      >>> print(gradient.value.reshape(4))
      [1.5 1.5 1.5 1.5]
    """
    _check_shards(shards)
    like = jax.tree.map(jax.typeof, shards)

    @jax.custom_vjp
    def gather(tree: Any) -> Any:
        return gather_shards(
            jax.tree.map(lambda value: in_dtype(value, dtype), tree),
            axis_name,
            to="varying",
            bucket_bytes=bucket_bytes,
            algorithm=gather_algorithm,
            wire=gather_wire,
        )

    def forward(tree: Any) -> tuple[Any, None]:
        return gather(tree), None

    def backward(_: None, cotangents: Any) -> tuple[Any]:
        wide = jax.tree.map(
            lambda node, cotangent: in_dtype(cotangent, node.value.dtype),
            like,
            cotangents,
            is_leaf=is_shard,
        )
        return (scatter_gradients(wide, axis_name, like=like, bucket_bytes=bucket_bytes, **how),)

    gather.defvjp(forward, backward)
    return gather(shards)


def save_all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A policy for `jax.checkpoint`: only parameters are gathered again, nothing else is redone.

    Everything that arithmetic made is kept from forward to backward, as without `jax.checkpoint`.
    What a gather made is not, nor what was only moved or cast after it (reshaped, sliced, joined,
    transposed), which is done again.

    Args:
      primitive: the operation in question, as JAX passes it.
      **parameters: those of the operation.

    Returns:
      Whether its result may be kept.

    Example:
      >>> import jax
      >>> from jax_ring.gradients import save_all_but_gathered
      >>> def layer(shard, x): ...
      >>> layer = jax.checkpoint(layer, policy=save_all_but_gathered)
    """
    # `gather_params` has a derivative of its own, and comes as one call.
    called = parameters.get("call_jaxpr")
    inside = [equation.primitive.name for equation in called.eqns] if called is not None else []
    gathers = any(name in _GATHERS for name in [primitive.name, *inside])
    return not gathers and primitive.name not in _MOVES


def _forward_order(paths: Sequence[str]) -> Sequence[int]:
    """The first leaf first: it is needed first."""
    return range(len(paths))


def in_dtype(value: Any, dtype: Any) -> Any:
    """Floats in another dtype, if one is given; others, also symbolic zeros, as they are."""
    if dtype is None or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return value.astype(dtype)


def _splits(grads: Any, like: Any, ranks: int) -> list[Split]:
    """How each leaf is cut: as another tree's shards are, or as `shard_params` would."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(grads)
    if like is None:
        return [Split.choose(jnp.shape(leaf), ranks) for _, leaf in flat]
    _check_shards(like)
    nodes = jax.tree.leaves(like, is_leaf=is_shard)
    wanted: Any = jax.tree.structure(like, is_leaf=is_shard)
    if wanted != treedef:
        raise ValueError(
            f"jax_ring.scatter_gradients: grads must be a tree like the shards of the parameters, "
            f"{wanted}, got {treedef}"
        )
    for (path, leaf), node in zip(flat, nodes, strict=True):
        shape = node.split.shape
        if jnp.shape(leaf)[jnp.ndim(leaf) - len(shape) :] != shape:
            raise ValueError(
                f"jax_ring.scatter_gradients: leaf {jax.tree_util.keystr(path)} of grads must be "
                f"of the shape {shape} of its shard, got {jnp.shape(leaf)}"
            )
    return [node.split for node in nodes]


def _check_shards(tree: Any) -> None:
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shard)[0]:
        if not is_shard(node):
            raise TypeError(
                f"jax_ring.gradients: leaf {jax.tree_util.keystr(path)} must be a Shard, as "
                f"shard_params makes them, got {type(node).__name__}"
            )
