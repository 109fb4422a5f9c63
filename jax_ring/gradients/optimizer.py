"""Optimizers whose state is cut into the parts of the ranks (ZeRO).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, section 5.

Nothing here imports optax: an optimizer is anything with `init` and `update` as optax has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_ring import _compat, primitives
from jax_ring.arguments import Algorithm, AxisName, Wire, names_of
from jax_ring.collectives import psum
from jax_ring.gradients.buckets import BUCKET_BYTES
from jax_ring.gradients.sharded import gather_shards, in_dtype, own_shards, scatter_gradients
from jax_ring.gradients.shards import is_shard

Array = jax.Array


class Optimizer(Protocol):
    """What is asked of an optimizer: the two functions of `optax.GradientTransformation`."""

    @property
    def init(self) -> Callable[..., Any]:
        """(params) -> state."""

    @property
    def update(self) -> Callable[..., tuple[Any, Any]]:
        """(grads, state, params) -> (updates, state)."""


class Transformation(NamedTuple):
    """A pair of functions that optax, and what is written for it, takes for its own.

    Attributes:
      init: (params) -> state.
      update: (grads, state, params=None) -> (updates, state).
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


def sharded_optimizer(
    optimizer: Optimizer,
    axis_name: AxisName,
    *,
    gather_algorithm: Algorithm = "auto",
    gather_wire: Wire = None,
    bucket_bytes: int = BUCKET_BYTES,
    **how: Any,
) -> Transformation:
    """An optimizer of which each rank holds, and computes, one part of N.

    `update` reduce-scatters the gradients, updates the rank's own part, and all-gathers the
    updates: the bytes of one all-reduce, and 1/N of the state and of the arithmetic. It takes local
    gradients in place of averaged ones, so `sync_gradients` goes; the rest of a step stays.

    Gradients that are `Shard`s already, as from `scatter_gradients`, `accumulate_gradients` with
    `scatter` or the derivative of `gather_params`, are not scattered again. Where the parameters
    are shards, the updates are shards too, and nothing is gathered.

    The optimizer must work element by element (sgd, adam, adamw, lion, rmsprop and the like): it is
    given the parts, which it cannot tell from leaves. Those that factor leaves (adafactor) are
    refused, but those that take a norm of a whole leaf (lamb, lars, muon) would take it of each
    part. For `optax.clip_by_global_norm` take this module's `clip_by_global_norm`. Randomness
    would be the same in all parts.

    Args:
      optimizer: anything with optax's `init` and `update`, also a chain.
      axis_name: as `jax_ring.psum_scatter`.
      gather_algorithm: as `jax_ring.all_gather`, for the updates.
      gather_wire: as `jax_ring.all_gather`: all ranks apply the same rounded updates.
      bucket_bytes: as `sync_gradients`.
      **how: for the gradients, as `scatter_gradients`: op, algorithm, wire, reduce_dtype, order,
        in_order.

    Returns:
      The pair `init` and `update`. Inside of `shard_map` init makes the rank's part of the state of
      whole parameters. Of `shard_params(params, ranks)` it makes, outside, the global state. Where
      types are checked, updates are the same on all ranks by their type. The state crosses the
      border of `shard_map` by `shard_specs`.

    Raises:
      ValueError: from init, if the state is not made of arrays of the parameters' shapes; from
        update, as `scatter_gradients`.

    Complexity: as `sync_gradients` by rings, for updates of the gradients' dtype.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from jax_ring.gradients import shard_params, shard_specs, sharded_optimizer
      >>> optimizer = sharded_optimizer(optax.adam(0.1), "data")
      >>> params = {"w": jnp.ones(16)}
      >>> state = optimizer.init(shard_params(params, ranks=8))
      >>> specs = shard_specs(state, "data")
      >>> mesh = Mesh(jax.devices(), "data")
      >>> @jax.jit
      ... @functools.partial(
      ...     jax.shard_map, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
      ... )
      ... def step(params, state, batch):
      ...     local = jax.lax.pcast(params, "data", to="varying")
      ...     grads = jax.grad(lambda p: (p["w"] * batch).sum())(local)
      ...     updates, state = optimizer.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params, state = step(params, state, jnp.arange(8.0))
      >>> print(params["w"].shape, state[0].mu["w"].value.addressable_shards[0].data.shape)
      (16,) (2,)
    """

    def init(params: Any) -> Any:
        parts = params if _sharded(params) else own_shards(params, axis_name)
        state = optimizer.init(parts)
        _check_elementwise(state, parts)
        return state

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        result = grads if params is None else params
        parts = params
        if params is not None and not _sharded(params):
            parts = own_shards(params, axis_name)
        if not _sharded(grads):
            grads = scatter_gradients(
                grads, axis_name, like=parts, bucket_bytes=bucket_bytes, **how
            )
        if parts is not None:
            # Whole parameters in a compute dtype have gradients in it.
            grads = jax.tree.map(lambda g, p: in_dtype(g, p.dtype), grads, parts)
        updates, state = optimizer.update(grads, state, parts, **extra)
        if not _sharded(result):
            updates = gather_shards(
                updates,
                axis_name,
                to="invarying",
                bucket_bytes=bucket_bytes,
                algorithm=gather_algorithm,
                wire=gather_wire,
            )
        return updates, state

    return Transformation(init, update)


def global_norm(tree: Any, axis_name: AxisName, *, algorithm: Algorithm = "auto") -> Array:
    """The Euclidean norm of a tree of shards, over all leaves and all ranks.

    Args:
      tree: `Shard`s, and arrays that are the same on all ranks; those count once.
      axis_name: as `jax_ring.psum`.
      algorithm: as `jax_ring.psum`.

    Returns:
      A scalar of float32 at least, the same on all ranks.

    Raises:
      ValueError: if by its type an array that is no shard differs between ranks.

    Complexity: an all-reduce of one element, and none without shards.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ring.gradients import global_norm, scatter_gradients
      >>> def norm(g):
      ...     return global_norm(scatter_gradients(g, "i"), "i")
      >>> print(jax.vmap(norm, axis_name="i")(jnp.array([[1.0, 2.0], [5.0, 6.0]])))
      [5. 5.]
    """
    shards: list[Array] = []
    whole = [jnp.float32(0)]
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shard)[0]:
        if is_shard(node):
            shards += map(_squares, jax.tree.leaves(node.value))
            continue
        _check_same(path, node, axis_name)
        whole.append(_squares(node))
    if shards:
        whole.append(psum(functools.reduce(jnp.add, shards), axis_name, algorithm=algorithm))
    return jnp.sqrt(sum(whole))


def clip_by_global_norm(
    max_norm: float, axis_name: AxisName, *, algorithm: Algorithm = "auto"
) -> Transformation:
    """Scales updates down to a global norm, of all ranks' shards together.

    What `optax.clip_by_global_norm` is for whole leaves: on shards that one would see the norm of
    the rank's own part and scale each part by another factor.

    Args:
      max_norm: the largest norm, more than 0.
      axis_name: as `jax_ring.psum`.
      algorithm: as `jax_ring.psum`.

    Returns:
      A transformation without state, to be put first in an `optax.chain` that `sharded_optimizer`
      is given.

    Raises:
      ValueError: if max_norm is not more than 0; as `global_norm`.

    Complexity: as `global_norm`.

    Example:
      >>> import optax
      >>> from jax_ring.gradients import clip_by_global_norm, sharded_optimizer
      >>> clipped = optax.chain(clip_by_global_norm(1.0, "data"), optax.adam(1e-3))
      >>> optimizer = sharded_optimizer(clipped, "data")
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm must be more than 0, got {max_norm!r}")

    def init(params: Any) -> tuple[()]:
        del params
        return ()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        norm = global_norm(updates, axis_name, algorithm=algorithm)
        within = norm < max_norm

        def clip(value: Array) -> Array:
            return jnp.where(within, value, value / norm.astype(value.dtype) * max_norm)

        return jax.tree.map(clip, updates), state

    return Transformation(init, update)


def _sharded(tree: Any) -> bool:
    return any(map(is_shard, jax.tree.leaves(tree, is_leaf=is_shard)))


def _check_elementwise(state: Any, parts: Any) -> None:
    """Refuses an optimizer that keeps anything but an array like it for a part."""
    known = {
        (node.split, jnp.shape(node.value)) for node in jax.tree.leaves(parts, is_leaf=is_shard)
    }
    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_shard)[0]:
        for value in jax.tree.leaves(node.value) if is_shard(node) else ():
            if (node.split, jnp.shape(value)) not in known:
                raise ValueError(
                    "sharded_optimizer: optimizer must work element by element, with a state of "
                    f"arrays of the shapes of the parameters, but {jax.tree_util.keystr(path)} of "
                    f"its state is of shape {jnp.shape(value)} for a leaf of {node.split.shape}"
                )


def _squares(x: Array) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(jnp.square(jnp.abs(wide)))


def _check_same(path: Any, leaf: Any, axis_name: AxisName) -> None:
    varying = _compat.varying(jax.typeof(leaf)) & set(primitives.manual_axes(names_of(axis_name)))
    if _compat.check_vma() and varying:
        raise ValueError(
            f"jax_ring.gradients.global_norm: leaf {jax.tree_util.keystr(path)} is no Shard, so it "
            f"must be the same on all ranks, but its type says that it varies over {axis_name!r}: "
            "reduce it first, by sync_gradients or scatter_gradients"
        )
