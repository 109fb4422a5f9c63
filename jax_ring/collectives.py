"""The public collectives: drop-in replacements for those of `jax.lax`, and the generic ones.

The parameters are those of `jax.lax`, in the same order, then keyword-only:

- `algorithm`: "auto" (what `JAX_RING_ALGORITHM` says; by default the one with the smallest
  predicted time, see `jax_ring.choose`, and "direct" over a lossy wire), a name in
  `jax_ring.schedules.FAMILIES` ("ring", "bidirectional_ring", "direct", "halving_doubling",
  "recursive_doubling", "double_binary_tree"), "hierarchical" (over several axes, the last of which
  is the inner level), "xla" (lax's own op), or a `jax_ring.schedules.Schedule`.
- `reduce_dtype`: the dtype in which partial results are held and travel. By default the dtype of
  the data, as in NCCL: no more bytes are sent than lax's op sends, and a 16-bit sum is rounded at
  each step. With `reduce_dtype=jnp.float32` it is rounded once, for twice the bytes in the reducing
  half. "direct" sends no partial sums, so it sums 16-bit floats in float32. Exceptions: 8-bit
  floats are always summed in float32, and the mean of float16 is taken in float32, since the sum
  may overflow where the mean does not.
- `wire`: what chunks look like while they travel: None (as they are), a name in `jax_ring.wire`,
  such as "bfloat16" or "int8", or a `WireFormat`. Leaves that are not real floats travel as they
  are. Sums are taken in float32, all ranks end with the same bits, and derivatives pass through the
  same format, rounded to the nearest, as if it were exact.

All-reduces over several axes take `algorithm` and `wire` for each axis as well, as in
`psum(x, ("dcn", "ici"), wire={"dcn": "int8"})`: a reduce-scatter over the last axis, an all-reduce
over the others, an all-gather over the last, each by what is said for its axis. Only the first
axis can have a `Schedule`, an all-reduce; the others are scattered and gathered, by a name. The
derivative is made of the transposes of the three.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat, arguments, layout, primitives, xla
from jax_ring.arguments import (
    Algorithm,
    AlgorithmByLevel,
    AxisIndexGroups,
    AxisName,
    Call,
    Levels,
    Op,
    Wire,
    WireByLevel,
)
from jax_ring.executor import Array
from jax_ring.primitives import PROD, SUM
from jax_ring.schedules import Kind

Tree = TypeVar("Tree")


def psum(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: AlgorithmByLevel = "auto",
    reduce_dtype: Any = None,
    wire: WireByLevel = None,
) -> Tree:
    """All-reduce sum of `x` over `axis_name`: `jax.lax.psum` as an explicit algorithm.

    All ranks end with the same bits, and every run gives the same ones. Integers wrap, bool is
    counted as int32, and a sum of Python scalars is the static `x * axis size`.

    Differentiates as `jax.lax.psum`: where varying types are checked (`check_vma=True`) the
    transpose casts to varying without communication, otherwise it is another sum.

    Args:
      x: array, Python scalar, or pytree of them; any shape and any dtype but those of keys.
      axis_name: the name of a mesh axis that is manual here, or of a vmapped axis; or a tuple or
        list of names, the empty one meaning the identity.
      axis_index_groups: groups of axis indices that are summed separately, covering each index
        once; they may differ in size. With checked types the result stays varying.
      algorithm: see the module.
      reduce_dtype: see the module.
      wire: see the module.

    Returns:
      The tree of sums, each of the shape and dtype of its leaf. Not varying over `axis_name`
      where types are checked and there are no groups.

    Raises:
      NameError: if an axis is not bound here.
      ValueError: if the groups do not cover each index once, or the algorithm does not fit.
      TypeError: for an argument of the wrong type.

    Complexity: by the ring 2(N-1) steps of ceil(L/N) elements for L elements on N ranks.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ring
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), "i")
      >>> f = jax.shard_map(
      ...     lambda x: jax_ring.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
      ... )
      >>> print(f(jnp.arange(8.0)))
      [28.]
    """
    return _all_reduce(
        x,
        axis_name,
        api="psum",
        op="sum",
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        reduce_dtype=reduce_dtype,
        wire=wire,
    )


def pmean(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: AlgorithmByLevel = "auto",
    reduce_dtype: Any = None,
    wire: WireByLevel = None,
) -> Tree:
    """All-reduce mean of `x` over `axis_name`: `jax.lax.pmean` as an explicit algorithm.

    Each rank divides only the chunk that it has summed, before the result is rounded and sent on.
    The mean of float16 is taken in float32, so it does not overflow where the sum would. Integers
    are summed as integers and then divided. In groups of different sizes each is divided by its
    own size.

    Args:
      x: as `psum`.
      axis_name: as `psum`.
      axis_index_groups: as `psum`.
      algorithm: as `psum`.
      reduce_dtype: as `psum`.
      wire: as `psum`.

    Returns:
      As `psum`; the mean of integers and bools is a float.

    Raises:
      NameError, ValueError, TypeError: as `psum`.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ring
      >>> x = jnp.full((8, 2), 10_000, jnp.float16)  # whose sum is more than float16 holds
      >>> print(jax.vmap(lambda x: jax_ring.pmean(x, "i"), axis_name="i")(x)[0].tolist())
      [10000.0, 10000.0]
    """
    return _all_reduce(
        x,
        axis_name,
        api="pmean",
        op="mean",
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        reduce_dtype=reduce_dtype,
        wire=wire,
    )


def pmax(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: AlgorithmByLevel = "auto",
    reduce_dtype: Any = None,
    wire: WireByLevel = None,
) -> Tree:
    """All-reduce maximum of `x` over `axis_name`: `jax.lax.pmax` as an explicit algorithm.

    NaN on any rank gives NaN on all. Unlike lax's it can be differentiated: the tangents of all
    ranks that hold the maximum count alike, as in `jnp.max`.

    Args:
      x: as `psum`; bool stays bool.
      axis_name: as `psum`.
      axis_index_groups: as `psum`.
      algorithm: as `psum`.
      reduce_dtype: as `psum`.
      wire: as `psum`.

    Returns:
      As `psum`.

    Raises:
      NameError, ValueError, TypeError: as `psum`.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ring
      >>> print(jax.vmap(lambda x: jax_ring.pmax(x, "i"), axis_name="i")(jnp.arange(4)))
      [3 3 3 3]
    """
    return _all_reduce(
        x,
        axis_name,
        api="pmax",
        op="max",
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        reduce_dtype=reduce_dtype,
        wire=wire,
    )


def pmin(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: AlgorithmByLevel = "auto",
    reduce_dtype: Any = None,
    wire: WireByLevel = None,
) -> Tree:
    """All-reduce minimum of `x` over `axis_name`: `jax.lax.pmin` as an explicit algorithm.

    Args:
      x: as `pmax`.
      axis_name: as `psum`.
      axis_index_groups: as `psum`.
      algorithm: as `psum`.
      reduce_dtype: as `psum`.
      wire: as `psum`.

    Returns:
      As `pmax`.

    Raises:
      NameError, ValueError, TypeError: as `psum`.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ring
      >>> print(jax.vmap(lambda x: jax_ring.pmin(x, "i"), axis_name="i")(jnp.arange(4)))
      [0 0 0 0]
    """
    return _all_reduce(
        x,
        axis_name,
        api="pmin",
        op="min",
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        reduce_dtype=reduce_dtype,
        wire=wire,
    )


def all_reduce(
    x: Tree,
    axis_name: AxisName,
    op: Op = "sum",
    *,
    identity: Any = None,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: AlgorithmByLevel = "auto",
    reduce_dtype: Any = None,
    wire: WireByLevel = None,
) -> Tree:
    """All-reduce of `x` over `axis_name` by any operation: the generic form of `psum`.

    Args:
      x: as `psum`.
      axis_name: as `psum`.
      op: "sum", "mean", "max", "min", "prod", or an elementwise function of two arrays that is
        associative and commutative (the ring combines the ranks in a rotated order).
      identity: the neutral element of a custom `op`; required with one, and only then.
      axis_index_groups: as `psum`.
      algorithm: as `psum`.
      reduce_dtype: as `psum`.
      wire: as `psum`.

    Returns:
      As `psum`.

    Raises:
      NameError, ValueError, TypeError: as `psum`.
      NotImplementedError: when a custom op is differentiated.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ring
      >>> f = lambda x: jax_ring.all_reduce(x, "i", jnp.logaddexp, identity=-jnp.inf)
      >>> print(jax.vmap(f, axis_name="i")(jnp.zeros(4)).round(4))  # log 4
      [1.3863 1.3863 1.3863 1.3863]
    """
    return _all_reduce(
        x,
        axis_name,
        api="all_reduce",
        op=op,
        identity=identity,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        reduce_dtype=reduce_dtype,
        wire=wire,
    )


def psum_scatter(
    x: Tree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
    algorithm: Algorithm = "auto",
    reduce_dtype: Any = None,
    wire: Wire = None,
) -> Tree:
    """Sum over `axis_name`, of which each rank keeps one block: `jax.lax.psum_scatter`.

    Args:
      x: as `psum`.
      axis_name: as `psum`. Over several axes the blocks are numbered in the order of the names,
        the first one major.
      scatter_dimension: the dimension that is split among the ranks; may be negative.
      axis_index_groups: as `psum`, but all groups must be of one size.
      tiled: if False, the dimension's size is the number of ranks and the dimension is dropped; if
        True, it is a multiple of that and is divided by it.
      algorithm: as `psum`.
      reduce_dtype: as `psum`.
      wire: as `psum`.

    Returns:
      The tree of blocks, varying over `axis_name`. Unlike lax's, bool is counted as int32.

    Raises:
      NameError, TypeError: as `psum`.
      ValueError: if the dimension does not fit the number of ranks; otherwise as `psum`.

    Complexity: by the ring N-1 steps of L/N elements for L elements on N ranks.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ring
      >>> f = lambda x: jax_ring.psum_scatter(x, "i", tiled=True)
      >>> print(jax.vmap(f, axis_name="i")(jnp.ones((2, 4))))
      [[2. 2.]
       [2. 2.]]
    """
    return _reduce_scatter(
        x,
        axis_name,
        api="psum_scatter",
        op="sum",
        scatter_dimension=scatter_dimension,
        tiled=tiled,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        reduce_dtype=reduce_dtype,
        wire=wire,
    )


def reduce_scatter(
    x: Tree,
    axis_name: AxisName,
    op: Op = "sum",
    *,
    identity: Any = None,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
    algorithm: Algorithm = "auto",
    reduce_dtype: Any = None,
    wire: Wire = None,
) -> Tree:
    """Reduce-scatter by any operation: the generic form of `psum_scatter`.

    Args:
      x: as `psum`.
      axis_name: as `psum_scatter`.
      op: as `all_reduce`.
      identity: as `all_reduce`.
      scatter_dimension: as `psum_scatter`.
      axis_index_groups: as `psum_scatter`.
      tiled: as `psum_scatter`.
      algorithm: as `psum`.
      reduce_dtype: as `psum`.
      wire: as `psum`.

    Returns:
      As `psum_scatter`.

    Raises:
      NameError, ValueError, TypeError: as `psum_scatter`.
      NotImplementedError: when a custom op is differentiated.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ring
      >>> x = jnp.array([[1, 5], [4, 2]])
      >>> print(jax.vmap(lambda x: jax_ring.reduce_scatter(x, "i", "max"), axis_name="i")(x))
      [4 5]
    """
    return _reduce_scatter(
        x,
        axis_name,
        api="reduce_scatter",
        op=op,
        identity=identity,
        scatter_dimension=scatter_dimension,
        tiled=tiled,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        reduce_dtype=reduce_dtype,
        wire=wire,
    )


def all_gather(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    algorithm: Algorithm = "auto",
    reduce_dtype: Any = None,
    wire: Wire = None,
) -> Tree:
    """Gathers `x` from all ranks: `jax.lax.all_gather` as an explicit algorithm.

    Args:
      x: as `psum`.
      axis_name: as `psum_scatter`.
      axis_index_groups: as `psum_scatter`.
      axis: the dimension of the result along which the ranks are put one after the other; may be
        negative.
      tiled: if False, that dimension is new, of the number of ranks; if True, an existing one is
        multiplied by it.
      to: the result's type over `axis_name`: "varying" (transposes to a reduce-scatter),
        "invarying" (to the own slice, without communication) or "reduced" (to a reduce-scatter of
        an unreduced cotangent). Other than "varying" not with groups.
      algorithm: as `psum`.
      reduce_dtype: as `psum`, for the reduce-scatter that this transposes to.
      wire: as `psum`; the own block too is what its message says.

    Returns:
      The tree of gathered arrays.

    Raises:
      NameError, ValueError, TypeError: as `psum_scatter`.

    Complexity: by the ring N-1 steps of L elements for L elements on each of N ranks.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ring
      >>> f = lambda x: jax_ring.all_gather(x, "i", tiled=True)
      >>> print(jax.vmap(f, axis_name="i")(jnp.arange(4).reshape(2, 2)))
      [[0 1 2 3]
       [0 1 2 3]]
    """
    call = arguments.parse(
        "all_gather",
        x,
        axis_name,
        Kind.ALL_GATHER,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        reduce_dtype=reduce_dtype,
        wire=wire,
    )
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(f"{call.name}: to must be 'varying', 'invarying' or 'reduced', got {to!r}")
    if call.groups is not None and to != "varying":
        raise ValueError(
            f"{call.name}: with axis_index_groups the result differs between groups, so to must be "
            f"'varying', got {to!r}"
        )
    if not call.axes:
        return x

    def gather(leaf: Any, position: int) -> Any:
        leaf = arguments.as_array(call, leaf)
        d = arguments.dimension(call, "axis", axis, leaf.ndim + (not tiled))
        return _gathered(call, leaf, position, d, tiled, to)

    return _map_leaves(gather, x)


# --- shared ---------------------------------------------------------------------------------------


def _map_leaves(f: Callable[[Any, int], Any], x: Tree) -> Tree:
    """The tree of f(leaf, its position)."""
    leaves, tree = jax.tree.flatten(x)
    result: Tree = jax.tree.unflatten(tree, [f(leaf, i) for i, leaf in enumerate(leaves)])
    return result


def _all_reduce(x: Tree, axis_name: AxisName, *, api: str, **given: Any) -> Tree:
    reduced: Callable[..., Any]
    if isinstance(given["algorithm"], Mapping) or isinstance(given["wire"], Mapping):
        levels = arguments.levels(api, x, axis_name, **given)
        call, reduced = levels.whole, functools.partial(_reduced_by_levels, levels)
    else:
        call = arguments.parse(api, x, axis_name, Kind.ALL_REDUCE, **given)
        reduced = functools.partial(_reduced, call)
    if not call.axes:
        return x

    def reduce(leaf: Any, position: int) -> Any:
        if call.reduction == SUM and not isinstance(leaf, jax.core.Tracer):
            return arguments.sum_of_constant(call, leaf)
        leaf = _counted(call, arguments.as_array(call, leaf))
        if call.mean and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return reduced(leaf, position, mean=False) / arguments.group_size(call)
        return reduced(leaf, position, mean=call.mean)

    return _map_leaves(reduce, x)


def _reduced_by_levels(levels: Levels, leaf: Array, position: int, *, mean: bool) -> Any:
    """Reduce-scatters over the last axis, reduces over the others, and gathers."""
    if not levels.inner or leaf.size == 0:
        only = levels.whole if levels.inner else levels.outermost
        return _reduced(only, leaf, position, mean=mean)
    to = "invarying" if _compat.check_vma() else "varying"
    # Each part rounds at random by itself.
    salt = position * (1 + 2 * len(levels.inner))

    def reduced(x: Array, depth: int) -> Array:
        if depth == 0:
            outermost: Array = _reduced(levels.outermost, x, salt, mean=mean)
            return outermost.astype(leaf.dtype)
        scatter, gather = levels.inner[depth - 1]
        division = layout.choose(x, scatter.ranks)
        rows = division.divide(x, levels.whole.reduction.identity)
        at = division.axis
        part = _scattered(scatter, rows, salt + 2 * depth - 1, at, True, mean=mean)
        part = reduced(part, depth - 1)
        whole = _gathered(gather, part, salt + 2 * depth, at, True, to)
        return division.restore(whole, x.shape)

    # Between the levels sums are held as they are within one.
    held = arguments.partial_dtype(levels.whole, leaf.dtype, mean=mean)
    return reduced(leaf.astype(held), len(levels.inner))


def _counted(call: Call, leaf: Array) -> Array:
    """Bools are counted, as jnp.sum and jnp.prod do."""
    return leaf.astype(jnp.int32) if leaf.dtype == bool and call.reduction in (SUM, PROD) else leaf


def _reduced(call: Call, leaf: Array, position: int, *, mean: bool) -> Any:
    call = arguments.for_leaf(call, leaf)
    dtype = arguments.partial_dtype(call, leaf.dtype, mean=mean)
    arguments.check_op(call, dtype)
    leaf, unreduced = arguments.operand(call, leaf)
    if call.by_xla:
        with xla.scope(primitives.public_name(call.kind, call.reduction, mean)):
            total = xla.all_reduce(call.name, leaf, call.axes, call.groups, call.reduction, dtype)
        return (total / arguments.group_size(call) if mean else total).astype(leaf.dtype)
    return primitives.all_reduce_p.bind(
        leaf,
        *arguments.seed(call, position),
        axes=call.axes,
        groups=call.groups,
        reduction=call.reduction,
        mean=mean,
        reduce_dtype=dtype,
        method=call.method,
        invariant=call.groups is None and _compat.check_vma(),
        unreduced=unreduced,
    )


def _reduce_scatter(
    x: Tree, axis_name: AxisName, *, api: str, scatter_dimension: int, tiled: bool, **given: Any
) -> Tree:
    call = arguments.parse(api, x, axis_name, Kind.REDUCE_SCATTER, **given)
    if not call.axes:
        return x

    def scatter(leaf: Any, position: int) -> Any:
        leaf = _counted(call, arguments.as_array(call, leaf))
        d = arguments.dimension(call, "scatter_dimension", scatter_dimension, leaf.ndim)
        arguments.check_scatter(call, leaf.shape, d, tiled)
        if call.mean and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return _scattered(call, leaf, position, d, tiled, mean=False) / call.ranks
        return _scattered(call, leaf, position, d, tiled, mean=call.mean)

    return _map_leaves(scatter, x)


def _scattered(
    call: Call, leaf: Array, position: int, dimension: int, tiled: bool, *, mean: bool
) -> Any:
    call = arguments.for_leaf(call, leaf)
    dtype = arguments.partial_dtype(call, leaf.dtype, mean=mean)
    arguments.check_op(call, dtype)
    leaf, unreduced = arguments.operand(call, leaf)
    if call.by_xla:
        with xla.scope(primitives.public_name(call.kind, call.reduction, mean)):
            total = xla.reduce_scatter(
                call.name,
                leaf,
                call.axes,
                call.groups,
                call.reduction,
                dtype,
                dimension=dimension,
                tiled=tiled,
            )
        return (total / call.ranks if mean else total).astype(leaf.dtype)
    return primitives.reduce_scatter_p.bind(
        leaf,
        *arguments.seed(call, position),
        axes=call.axes,
        groups=call.groups,
        dimension=dimension,
        tiled=tiled,
        size=call.ranks,
        reduction=call.reduction,
        mean=mean,
        reduce_dtype=dtype,
        method=call.method,
        unreduced=unreduced,
    )


def _gathered(call: Call, leaf: Array, position: int, dimension: int, tiled: bool, to: str) -> Any:
    leaf, _ = arguments.operand(call, leaf)
    own = arguments.for_leaf(call, leaf)
    if own.by_xla:
        with xla.scope("all_gather"):
            return lax.all_gather(
                leaf, call.axes, axis_index_groups=call.groups, axis=dimension, tiled=tiled, to=to
            )
    return primitives.all_gather_p.bind(
        leaf,
        *arguments.seed(call, position),
        axes=call.axes,
        groups=call.groups,
        dimension=dimension,
        tiled=tiled,
        size=call.ranks,
        # Where types are not checked only the transpose would differ, and it must communicate.
        to=to if _compat.check_vma() else "varying",
        reduce_dtype=arguments.partial_dtype(own, leaf.dtype, mean=False),
        method=own.method,
    )
