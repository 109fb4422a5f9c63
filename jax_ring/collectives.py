"""The public collectives: drop-in replacements for those of `jax.lax`, and the generic ones.

The parameters are those of `jax.lax`, in the same order, then keyword-only:

- `algorithm`: "auto" (what `JAX_RING_ALGORITHM` says, by default the ring), "ring", "xla" (lax's
  own op), or a `jax_ring.schedules.Schedule`.
- `reduce_dtype`: the dtype in which partial results are held and travel. By default the dtype of
  the data, as in NCCL: no more bytes are sent than lax's op sends, and a 16-bit sum is rounded at
  each step. With `reduce_dtype=jnp.float32` it is rounded once, for twice the bytes in the reducing
  half. Exceptions: 8-bit floats are always summed in float32, and the mean of float16 is taken in
  float32, since the sum may overflow where the mean does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat, primitives
from jax_ring.config import ALGORITHMS, current
from jax_ring.executor import Array, Communicator, Groups
from jax_ring.primitives import MAX, MIN, PROD, SUM, Axes, Method, Reduction
from jax_ring.schedules import Kind, Schedule, verify

Tree = TypeVar("Tree")
AxisName = Any  # a hashable name, or a tuple or list of names, as in jax.lax
AxisIndexGroups = Sequence[Sequence[int]] | None
Algorithm = str | Schedule
Op = str | Callable[[Array, Array], Array]

_REDUCTIONS = {"sum": SUM, "mean": SUM, "max": MAX, "min": MIN, "prod": PROD}


def psum(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: Algorithm = "auto",
    reduce_dtype: Any = None,
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
        "psum", x, axis_name, "sum", None, axis_index_groups, algorithm, reduce_dtype
    )


def pmean(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: Algorithm = "auto",
    reduce_dtype: Any = None,
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
        "pmean", x, axis_name, "mean", None, axis_index_groups, algorithm, reduce_dtype
    )


def pmax(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: Algorithm = "auto",
    reduce_dtype: Any = None,
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
        "pmax", x, axis_name, "max", None, axis_index_groups, algorithm, reduce_dtype
    )


def pmin(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: Algorithm = "auto",
    reduce_dtype: Any = None,
) -> Tree:
    """All-reduce minimum of `x` over `axis_name`: `jax.lax.pmin` as an explicit algorithm.

    Args:
      x: as `pmax`.
      axis_name: as `psum`.
      axis_index_groups: as `psum`.
      algorithm: as `psum`.
      reduce_dtype: as `psum`.

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
        "pmin", x, axis_name, "min", None, axis_index_groups, algorithm, reduce_dtype
    )


def all_reduce(
    x: Tree,
    axis_name: AxisName,
    op: Op = "sum",
    *,
    identity: Any = None,
    axis_index_groups: AxisIndexGroups = None,
    algorithm: Algorithm = "auto",
    reduce_dtype: Any = None,
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
        "all_reduce", x, axis_name, op, identity, axis_index_groups, algorithm, reduce_dtype
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
        "psum_scatter",
        x,
        axis_name,
        "sum",
        None,
        scatter_dimension,
        axis_index_groups,
        tiled,
        algorithm,
        reduce_dtype,
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
        "reduce_scatter",
        x,
        axis_name,
        op,
        identity,
        scatter_dimension,
        axis_index_groups,
        tiled,
        algorithm,
        reduce_dtype,
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
    name = "jax_ring.all_gather"
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(f"{name}: to must be 'varying', 'invarying' or 'reduced', got {to!r}")
    axes = _axes(name, axis_name)
    if not axes:
        return x
    size = _axis_size(name, axes)
    groups = _groups(name, axis_index_groups, axes, size, equal=True)
    if groups is not None and to != "varying":
        raise ValueError(
            f"{name}: with axis_index_groups the result differs between groups, so to must be "
            f"'varying', got {to!r}"
        )
    ranks = size if groups is None else len(groups[0])
    chosen = _algorithm(name, algorithm, Kind.ALL_GATHER, ranks)

    def gather(leaf: Any) -> Any:
        leaf = _as_array(name, leaf)
        dimension = _dimension(name, "axis", axis, leaf.ndim + (not tiled))
        leaf, _ = _operand(name, leaf, axes, groups, None)
        if chosen == "xla":
            return lax.all_gather(
                leaf, axes, axis_index_groups=groups, axis=dimension, tiled=tiled, to=to
            )
        return primitives.all_gather_p.bind(
            leaf,
            axes=axes,
            groups=groups,
            dimension=dimension,
            tiled=tiled,
            size=ranks,
            to=to,
            method=Method(chosen, current().unroll),
        )

    result: Tree = jax.tree.map(gather, x)
    return result


# --- shared ---------------------------------------------------------------------------------------


def _all_reduce(
    api: str,
    x: Tree,
    axis_name: AxisName,
    op: Op,
    identity: Any,
    axis_index_groups: AxisIndexGroups,
    algorithm: Algorithm,
    reduce_dtype: Any,
) -> Tree:
    name = f"jax_ring.{api}"
    reduction, mean = _reduction(name, op, identity)
    axes = _axes(name, axis_name)
    if not axes:
        return x
    size = _axis_size(name, axes)
    groups = _groups(name, axis_index_groups, axes, size)
    sizes = {size} if groups is None else {len(group) for group in groups}
    chosen = _algorithm(name, algorithm, Kind.ALL_REDUCE, *sizes)

    def reduce(leaf: Any) -> Any:
        if reduction == SUM and not isinstance(leaf, jax.core.Tracer):
            return _sum_of_constant(name, leaf, axes, groups, size, mean)
        leaf = _as_array(name, leaf)
        counted = leaf.astype(jnp.int32) if leaf.dtype == bool and reduction == SUM else leaf
        exact_mean = mean and not jnp.issubdtype(counted.dtype, jnp.inexact)
        result = _bind_all_reduce(
            name, counted, axes, groups, reduction, mean and not exact_mean, chosen, reduce_dtype
        )
        return result / _group_size(axes, groups, size) if exact_mean else result

    result: Tree = jax.tree.map(reduce, x)
    return result


def _bind_all_reduce(
    name: str,
    x: Array,
    axes: Axes,
    groups: Groups | None,
    reduction: Reduction,
    mean: bool,
    algorithm: Algorithm,
    reduce_dtype: Any,
) -> Any:
    partial_dtype = _reduce_dtype(name, reduce_dtype, x.dtype, mean)
    x, unreduced = _operand(name, x, axes, groups, reduction)
    if algorithm == "xla":
        return _xla_all_reduce(name, x, axes, groups, reduction, mean, partial_dtype)
    return primitives.all_reduce_p.bind(
        x,
        axes=axes,
        groups=groups,
        reduction=reduction,
        mean=mean,
        reduce_dtype=partial_dtype,
        method=Method(algorithm, current().unroll),
        invariant=groups is None and _compat.check_vma(),
        unreduced=unreduced,
    )


def _xla_all_reduce(
    name: str,
    x: Array,
    axes: Axes,
    groups: Groups | None,
    reduction: Reduction,
    mean: bool,
    partial_dtype: Any,
) -> Any:
    functions: dict[str, Callable[..., Any]] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
    if reduction.name not in functions:
        raise ValueError(
            f"{name}: algorithm='xla' knows the ops {sorted(functions)} and 'mean', got op="
            f"{reduction.name!r}"
        )
    function: Callable[..., Any] = lax.pmean if mean else functions[reduction.name]
    result = function(x.astype(partial_dtype), axes, axis_index_groups=groups)
    return result.astype(x.dtype)


def _reduce_scatter(
    api: str,
    x: Tree,
    axis_name: AxisName,
    op: Op,
    identity: Any,
    scatter_dimension: int,
    axis_index_groups: AxisIndexGroups,
    tiled: bool,
    algorithm: Algorithm,
    reduce_dtype: Any,
) -> Tree:
    name = f"jax_ring.{api}"
    reduction, mean = _reduction(name, op, identity)
    axes = _axes(name, axis_name)
    if not axes:
        return x
    size = _axis_size(name, axes)
    groups = _groups(name, axis_index_groups, axes, size, equal=True)
    ranks = size if groups is None else len(groups[0])
    chosen = _algorithm(name, algorithm, Kind.REDUCE_SCATTER, ranks)
    if chosen == "xla" and reduction != SUM:
        raise ValueError(
            f"{name}: algorithm='xla' knows the ops ['sum'] and 'mean', got op={reduction.name!r}"
        )

    def scatter(leaf: Any) -> Any:
        leaf = _as_array(name, leaf)
        counted = leaf.astype(jnp.int32) if leaf.dtype == bool and reduction == SUM else leaf
        dimension = _dimension(name, "scatter_dimension", scatter_dimension, counted.ndim)
        _check_scatter(name, counted.shape, dimension, tiled, axes, ranks)
        exact_mean = mean and not jnp.issubdtype(counted.dtype, jnp.inexact)
        inside = mean and not exact_mean
        partial_dtype = _reduce_dtype(name, reduce_dtype, counted.dtype, inside)
        counted, unreduced = _operand(name, counted, axes, groups, reduction)
        if chosen == "xla":
            total = lax.psum_scatter(
                counted.astype(partial_dtype),
                axes,
                scatter_dimension=dimension,
                axis_index_groups=groups,
                tiled=tiled,
            )
            return (total / ranks).astype(counted.dtype) if inside else total.astype(counted.dtype)
        result = primitives.reduce_scatter_p.bind(
            counted,
            axes=axes,
            groups=groups,
            dimension=dimension,
            tiled=tiled,
            size=ranks,
            reduction=reduction,
            mean=inside,
            reduce_dtype=partial_dtype,
            method=Method(chosen, current().unroll),
            unreduced=unreduced,
        )
        return result / ranks if exact_mean else result

    result: Tree = jax.tree.map(scatter, x)
    return result


# --- arguments ------------------------------------------------------------------------------------


def _reduction(name: str, op: Op, identity: Any) -> tuple[Reduction, bool]:
    """The reduction that `op` names, and whether its result is divided by the ranks."""
    if isinstance(op, str):
        if op not in _REDUCTIONS:
            raise ValueError(f"{name}: op must be one of {list(_REDUCTIONS)}, got {op!r}")
        if identity is not None:
            raise ValueError(f"{name}: identity is for a custom op only, got op={op!r}")
        return _REDUCTIONS[op], op == "mean"
    if not callable(op):
        raise TypeError(f"{name}: op must be a name or a function of two arrays, got {op!r}")
    if identity is None:
        raise ValueError(
            f"{name}: a custom op needs its identity, for example op=jnp.maximum, identity=-jnp.inf"
        )
    scalar = np.asarray(identity)
    if scalar.ndim:
        raise ValueError(f"{name}: identity must be a scalar, got shape {scalar.shape}")
    return Reduction(getattr(op, "__name__", "custom"), op, scalar.item()), False


def _axes(name: str, axis_name: AxisName) -> Axes:
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for axis in axes:
        if isinstance(axis, int):
            raise ValueError(
                f"{name}: axis_name={axis_name!r}: positional axes are not supported, reduce over "
                f"them first, for example with jnp.sum(x, axis={axis})"
            )
        if isinstance(axis, (set, frozenset, list, dict)) or axis is None:
            raise TypeError(
                f"{name}: axis_name must be a name, or a tuple or list of names, got {axis_name!r}"
            )
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: axis_name={axis_name!r} names an axis twice")
    return axes


def _axis_size(name: str, axes: Axes) -> int:
    size = 1
    for axis in axes:
        try:
            size *= lax.axis_size(axis)
        except NameError:
            bound = list(jax.sharding.get_abstract_mesh().manual_axes)
            api = name.removeprefix("jax_ring.")
            raise NameError(
                f"Found an unbound axis name: {axis}. To fix this, please call {api} under "
                f"`jax.shard_map` over a mesh with that axis, or under `jax.vmap(..., axis_name="
                f"{axis!r})` ({name} was called where the manual mesh axes are {bound})"
            ) from None
    return size


def _groups(
    name: str, groups: AxisIndexGroups, axes: Axes, size: int, *, equal: bool = False
) -> Groups | None:
    if groups is None:
        return None
    try:
        result = tuple(tuple(int(i) for i in group) for group in groups)
    except TypeError:
        raise TypeError(
            f"{name}: axis_index_groups must be a list of lists of indices, got {groups!r}"
        ) from None
    members = sorted(i for group in result for i in group)
    if members != list(range(size)) or not all(result):
        raise ValueError(
            f"{name}: axis_index_groups must cover all indices 0 to {size - 1} of axis "
            f"{_show(axes)} (size {size}) exactly once, got {groups!r}"
        )
    if equal and len({len(group) for group in result}) > 1:
        raise ValueError(f"{name}: axis_index_groups must all be of the same size, got {groups!r}")
    return result


def _show(axes: Axes) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)


@functools.lru_cache(maxsize=256)
def _verified(schedule: Schedule) -> Schedule:
    verify(schedule)
    return schedule


def _algorithm(name: str, algorithm: Algorithm, kind: Kind, *ranks: int) -> Algorithm:
    if isinstance(algorithm, Schedule):
        if algorithm.kind is not kind:
            raise ValueError(
                f"{name}: algorithm must be a schedule of kind {kind.value}, got {algorithm!r}"
            )
        if set(ranks) != {algorithm.ranks}:
            raise ValueError(
                f"{name}: algorithm={algorithm!r} is for {algorithm.ranks} ranks, but there are "
                f"{' and '.join(map(str, sorted(ranks)))} to reduce over"
            )
        if kind is not Kind.ALL_REDUCE and algorithm.chunks != algorithm.ranks:
            raise ValueError(
                f"{name}: algorithm must have as many chunks as ranks, got {algorithm!r}"
            )
        return _verified(algorithm)
    if not isinstance(algorithm, str):
        raise TypeError(
            f"{name}: algorithm must be one of {list(ALGORITHMS)} or a Schedule, got {algorithm!r}"
        )
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"{name}: algorithm must be one of {list(ALGORITHMS)} or a Schedule, got {algorithm!r}"
        )
    return current().algorithm if algorithm == "auto" else algorithm


def _reduce_dtype(name: str, requested: Any, dtype: Any, mean: bool) -> Any:
    if requested is None:
        return primitives.default_reduce_dtype(dtype, mean=mean)
    wanted = jnp.dtype(requested)
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(f"{name}: reduce_dtype={wanted} needs jax_enable_x64")
    if jnp.promote_types(dtype, wanted) != wanted or _kind(wanted) != _kind(dtype):
        raise ValueError(
            f"{name}: reduce_dtype must hold every value of the data's dtype {dtype} and be of "
            f"the same kind, got {wanted}"
        )
    return wanted


def _kind(dtype: Any) -> str:
    kinds = ("floating", "complexfloating", "signedinteger", "unsignedinteger", "bool_")
    return next(kind for kind in kinds if jnp.issubdtype(dtype, getattr(jnp, kind)))


def _dimension(name: str, argument: str, value: Any, ndim: int) -> int:
    dimension = int(value) if hasattr(value, "__index__") else None
    if dimension is None:
        raise TypeError(f"{name}: {argument} must be an integer, got {value!r}")
    if not -ndim <= dimension < ndim:
        raise ValueError(f"{name}: {argument}={value} is out of bounds for {ndim} dimensions")
    return dimension % ndim


def _check_scatter(
    name: str, shape: tuple[int, ...], dimension: int, tiled: bool, axes: Axes, ranks: int
) -> None:
    length = shape[dimension]
    where = f"dimension {dimension} of x with shape {shape} has size {length}"
    over = f"{ranks}, the number of ranks along axis {_show(axes)}"
    if tiled and length % ranks:
        raise ValueError(f"{name}: {where}, which must be divisible by {over}")
    if not tiled and length != ranks:
        hint = "; pass tiled=True to give each rank a block of it" if length % ranks == 0 else ""
        raise ValueError(f"{name}: {where}, which must be {over}{hint}")


# --- leaves ---------------------------------------------------------------------------------------


def _as_array(name: str, leaf: Any) -> Any:
    """A leaf as an array that can be communicated."""
    try:
        array = jnp.asarray(leaf)
    except TypeError:
        raise TypeError(
            f"{name}: x has a leaf of type {type(leaf).__name__}, which is no array: {leaf!r}"
        ) from None
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{name}: x has a leaf of dtype {array.dtype}, which can't be communicated; for random "
            "keys pass jax.random.key_data(key)"
        )
    return array


def _sum_of_constant(
    name: str, leaf: Any, axes: Axes, groups: Groups | None, size: int, mean: bool
) -> Any:
    """The sum of what all ranks know: no communication, and Python scalars stay Python's."""
    ranks = _group_size(axes, groups, size)
    if getattr(leaf, "dtype", None) == jax.dtypes.float0:
        return leaf
    if isinstance(leaf, bool) or getattr(leaf, "dtype", None) == np.bool_:
        leaf = lax.convert_element_type(leaf, jnp.int32)
    if isinstance(leaf, (int, float, complex)) or not isinstance(ranks, int):
        total = leaf * ranks
    else:
        array = leaf if isinstance(leaf, (np.ndarray, np.generic)) else _as_array(name, leaf)
        total = array * np.array(ranks).astype(array.dtype)
    return total / ranks if mean else total


def _group_size(axes: Axes, groups: Groups | None, size: int) -> Any:
    """How many ranks are reduced together: static, unless the groups differ in size."""
    if groups is None:
        return size
    lengths = {len(group) for group in groups}
    if len(lengths) == 1:
        return lengths.pop()
    column = np.zeros(size, np.int64)
    for group in groups:
        column[list(group)] = len(group)
    comm = Communicator(axes, tuple(lax.axis_size(axis) for axis in axes))
    return comm.lookup(comm.index(), column, size + 1)


def _operand(
    name: str, x: Array, axes: Axes, groups: Groups | None, reduction: Reduction | None
) -> tuple[Array, bool]:
    """The operand, varying over all axes or unreduced over all, and whether it is the latter."""
    aval = jax.typeof(x)
    pending = _compat.unreduced(aval) & set(axes)
    if not pending:
        return _cast_varying(name, x, axes), False
    if pending != set(axes):
        raise ValueError(
            f"{name}: x is unreduced over {sorted(pending)} but not over all axes of {axes}: "
            "reduce over the former by themselves"
        )
    kind = _compat.unreduced_kind(aval)
    if reduction is None or kind != reduction.name or groups is not None:
        raise ValueError(
            f"{name}: x is unreduced ({kind}) over {axes}; only the {kind} over whole axes can "
            f"take it, got type {aval}"
        )
    return x, True


def _cast_varying(name: str, x: Array, axes: Axes) -> Array:
    cast = primitives.cast_varying(x, axes)
    if cast is not x and not _compat.auto_pcast():
        raise ValueError(
            f"{name}: x must vary over axis_name={axes}, got type {jax.typeof(x)}: cast it with "
            "jax.lax.pcast(x, axis_name, to='varying'), or set jax_auto_pcast"
        )
    return cast
