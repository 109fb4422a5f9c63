"""Checks the arguments of the collectives, once for a call and once for each leaf.

Every error names the function, the argument, its value, and what would be right.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat, choose, primitives, wire
from jax_ring.config import ALGORITHMS, current
from jax_ring.executor import Array, Communicator, Groups
from jax_ring.plan import plan
from jax_ring.primitives import MAX, MIN, PROD, SUM, Axes, Method, Reduction
from jax_ring.schedules import Kind, Schedule, hierarchical, verify
from jax_ring.schedules.families import names
from jax_ring.wire import WireFormat

AxisName = Any  # a hashable name, or a tuple or list of names, as in jax.lax
AxisIndexGroups = Sequence[Sequence[int]] | None
Algorithm = str | Schedule
Op = str | Callable[[Array, Array], Array]
Wire = str | WireFormat | None
# All-reduces over several axes also take one for each level.
AlgorithmByLevel = Algorithm | Mapping[Any, Algorithm]
WireByLevel = Wire | Mapping[Any, Wire]

_REDUCTIONS = {"sum": SUM, "mean": SUM, "max": MAX, "min": MIN, "prod": PROD}
OP_NAMES = tuple(_REDUCTIONS)
_KINDS = ("floating", "complexfloating", "signedinteger", "unsignedinteger", "bool_")


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call that do not depend on the leaf.

    Attributes:
      name: the public function, for messages.
      axes: the names of the axes; if empty, the rest means nothing.
      size: the ranks along them.
      groups: the groups of ranks, or None.
      reduction: what is computed; the sum for a gather, whose transpose needs one.
      mean: whether the result is divided by the ranks.
      method: the algorithm, which may also be "xla", the wire, and how long runs are unrolled.
      reduce_dtype: the dtype asked for, or None.
      key: what the wire rounds at random with, or None.
      kind: the kind of collective.
    """

    name: str
    axes: Axes
    size: int
    groups: Groups | None
    reduction: Reduction
    mean: bool
    method: Method
    reduce_dtype: Any
    key: Any
    kind: Kind

    @property
    def ranks(self) -> int:
        """The ranks that communicate, where all groups are of one size."""
        return self.size if self.groups is None else len(self.groups[0])

    @property
    def one_size(self) -> bool:
        """Whether all groups are of one size."""
        return self.groups is None or len({len(group) for group in self.groups}) == 1

    @property
    def by_xla(self) -> bool:
        """Whether lax's own op is asked for."""
        return self.method.algorithm == "xla"


def parse(
    api: str,
    x: Any,
    axis_name: AxisName,
    kind: Kind,
    *,
    op: Op = "sum",
    identity: Any = None,
    axis_index_groups: AxisIndexGroups,
    algorithm: Algorithm,
    reduce_dtype: Any,
    wire: Wire,
) -> Call:
    """Checks all arguments of a call that do not depend on the leaf."""
    name = f"jax_ring.{api}"
    reduction, mean = _reduction(name, op, identity)
    axes = _axes(name, axis_name)
    size = _axis_size(name, axes)
    groups = _groups(name, axis_index_groups, axes, size, equal=kind is not Kind.ALL_REDUCE)
    ranks = {size} if groups is None else {len(group) for group in groups}
    form, key = _wire(name, wire, x)
    if algorithm == "hierarchical":
        algorithm = _hierarchy(name, kind, axes, groups)
    chosen: tuple[Algorithm, str] = ("ring", "")
    if axes:
        chosen = _algorithm(name, algorithm, kind, ranks, form is not None)
    wanted = _requested_dtype(name, reduce_dtype, x)
    if form is not None and wanted not in (None, jnp.float32):
        raise ValueError(
            f"{name}: sums over wire={form.name!r} are taken in float32, got reduce_dtype={wanted}"
        )
    settings = current()
    method = Method(chosen[0], settings.unroll, form, settings.reducer, chosen[1])
    if key is not None and kind is Kind.ALL_REDUCE and axes:
        _check_rounds_once(name, method, ranks)
    return Call(name, axes, size, groups, reduction, mean, method, wanted, key, kind)


def _check_rounds_once(name: str, method: Method, ranks: set[int]) -> None:
    """Where several ranks make the same sum, each would round it at random in a way of its own."""
    if any(plan(method.schedule(Kind.ALL_REDUCE, n)).redundant for n in ranks):
        raise ValueError(
            f"{name}: algorithm={method.algorithm!r} makes a sum on several ranks, which a wire "
            "with a key would round differently on each; 'direct', 'ring' and 'halving_doubling' "
            "make it on one"
        )


def _wire(name: str, requested: Wire, x: Any) -> tuple[WireFormat | None, Any]:
    """The format without its key, and the key."""
    try:
        form = wire.get(requested)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if form is None:
        return None, None
    leaves = [leaf for leaf in jax.tree.leaves(x) if _is_number(leaf)]
    if leaves and not any(_kind(jax.dtypes.result_type(leaf)) == "floating" for leaf in leaves):
        found = sorted({str(jax.dtypes.result_type(leaf)) for leaf in leaves})
        raise ValueError(
            f"{name}: wire={form.name!r} is for floating-point leaves, but x has only {found}"
        )
    if not isinstance(form, wire.Blocks) or not form.stochastic:
        return form, None
    if form.key is None:
        raise ValueError(f"{name}: wire={form!r} rounds at random and needs a key: Blocks(key=...)")
    return dataclasses.replace(form, key=None), form.key


def seed(call: Call, leaf: int) -> tuple[Array, ...]:
    """The seed of a leaf's messages, as operands: one if the wire rounds at random, else none."""
    if call.key is None:
        return ()
    key = jax.random.fold_in(call.key, leaf)
    return (jax.random.bits(key, (2,), jnp.uint32),)


def for_leaf(call: Call, x: Array) -> Call:
    """The call with how this leaf is communicated: its wire if it has one, and its algorithm."""
    method = call.method
    if method.wire is not None and _kind(x.dtype) != "floating":
        method = dataclasses.replace(method, wire=None)
        if method.algorithm == "xla":
            method = dataclasses.replace(method, algorithm="ring")
    if method.algorithm == "auto":
        method = _chosen(call, method, x)
    return dataclasses.replace(call, method=method)


def _chosen(call: Call, method: Method, x: Array) -> Method:
    """The method with the algorithm of the smallest predicted time."""
    if not call.one_size:
        reason = "the groups differ in size"
        return dataclasses.replace(method, algorithm="ring", reason=reason)
    nbytes = x.size * x.dtype.itemsize * (call.ranks if call.kind is Kind.ALL_GATHER else 1)
    levels = len(call.axes) > 1 and call.groups is None
    prices = prices_in_force(lax.axis_size(call.axes[-1]) if levels else 1)
    choice = choose.choose(
        call.kind,
        call.ranks,
        nbytes,
        prices.link,
        across=prices.across,
        inner=prices.inner,
        segments=_most_segments(x.shape, call.ranks),
        allow_xla=current().allow_xla and _has_xla(call),
    )
    reason = f"{choice.reason}; link {prices.name}"
    return dataclasses.replace(method, algorithm=choice.algorithm, reason=reason)


@dataclasses.dataclass(frozen=True)
class Prices:
    """The links that "auto" reckons with.

    Attributes:
      name: what they are called.
      link: what the ranks are joined by, or those of a group.
      across: what groups of `inner` ranks are joined by; None if there are none.
      inner: the ranks of a group.
    """

    name: str
    link: choose.Link
    across: choose.Link | None = None
    inner: int = 1


def prices_in_force(inner: int = 1) -> Prices:
    """The links by the settings, the platform and the number of processes.

    Args:
      inner: the ranks of a group that may be joined by another link than the groups are.
    """
    settings = current()
    links = choose.links_in(settings.tuning)
    within = between = settings.link
    if settings.link == "auto":
        within, between = choose.links_of(_compat.platform(), jax.process_count())
    if inner == 1 or within == between:
        return Prices(between, links[between])
    return Prices(f"{within}, {between}", links[within], links[between], inner)


def _has_xla(call: Call) -> bool:
    """Whether lax has an op for the call, as `jax_ring.xla` would find."""
    ops = {Kind.ALL_REDUCE: (SUM, MAX, MIN)}.get(call.kind, (SUM,))
    return call.reduction in ops and (call.groups is None or not _compat.check_vma())


def _most_segments(shape: tuple[int, ...], ranks: int) -> int:
    """The most segments into whose chunks a dimension divides, if into ranks chunks any does."""
    even = [size // ranks for size in shape if size % ranks == 0]
    parts = [1 << i for i in range(choose.MOST_SEGMENTS.bit_length())]
    fitting = [k for k in parts if not even or any(size % k == 0 for size in even)]
    return max(fitting)


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
    try:
        hash(op)
    except TypeError:
        raise TypeError(
            f"{name}: op must be hashable, as static arguments are, got {op!r}"
        ) from None
    if identity is None:
        raise ValueError(
            f"{name}: a custom op needs its identity, for example op=jnp.maximum, identity=-jnp.inf"
        )
    scalar = np.asarray(identity)
    if scalar.ndim or not isinstance(scalar.item(), (bool, int, float, complex)):
        raise ValueError(f"{name}: identity must be a scalar number, got {identity!r}")
    return Reduction(getattr(op, "__name__", "custom"), op, scalar.item()), False


def names_of(axis_name: AxisName) -> Axes:
    """The names of the axes, of which one alone may stand for itself."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def _axes(name: str, axis_name: AxisName) -> Axes:
    axes = names_of(axis_name)
    for axis in axes:
        if isinstance(axis, numbers.Integral):
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
    name: str, groups: AxisIndexGroups, axes: Axes, size: int, *, equal: bool
) -> Groups | None:
    if groups is None:
        return None
    try:
        result = tuple(tuple(operator.index(i) for i in group) for group in groups)
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


def _algorithm(
    name: str, algorithm: Algorithm, kind: Kind, ranks: set[int], wired: bool
) -> tuple[Algorithm, str]:
    """The algorithm, "auto" where it depends on the leaf, and why."""
    if isinstance(algorithm, Schedule):
        if algorithm.kind is not kind:
            raise ValueError(
                f"{name}: algorithm must be a schedule of kind {kind.value}, got {algorithm!r}"
            )
        if ranks != {algorithm.ranks}:
            raise ValueError(
                f"{name}: algorithm={algorithm!r} is for {algorithm.ranks} ranks, but there are "
                f"{' and '.join(map(str, sorted(ranks)))} to reduce over"
            )
        if kind is not Kind.ALL_REDUCE and algorithm.chunks != algorithm.ranks:
            raise ValueError(
                f"{name}: algorithm must have as many chunks as ranks, got {algorithm!r}"
            )
        return _verified(algorithm), "asked for by algorithm="
    known = [*ALGORITHMS, "hierarchical"]
    wanted = f"{name}: algorithm must be one of {known} or a Schedule, got {algorithm!r}"
    if not isinstance(algorithm, str):
        raise TypeError(wanted)
    if algorithm not in ALGORITHMS:
        raise ValueError(wanted)
    possible = (*names(kind), "xla")
    reason = "asked for by algorithm="
    if algorithm == "auto":
        algorithm, reason = _default(possible, wired)
    if algorithm not in (*possible, "auto"):
        raise _all_reduce_only(name, algorithm, kind)
    if algorithm == "xla" and wired:
        raise ValueError(
            f"{name}: algorithm='xla' (given, or what 'auto' stands for here) has no wire formats; "
            "algorithm='direct' or 'ring' has"
        )
    return algorithm, reason


def _default(possible: tuple[str, ...], wired: bool) -> tuple[str, str]:
    """What "auto" stands for, and why."""
    wanted_by_all = current().algorithm
    if wanted_by_all in possible:
        return wanted_by_all, "asked for by JAX_RING_ALGORITHM or jax_ring.config(algorithm=)"
    if wired:
        return "direct", "over a lossy wire it rounds each value twice, however many ranks"
    return "auto", ""


def _all_reduce_only(name: str, algorithm: str, kind: Kind) -> ValueError:
    return ValueError(
        f"{name}: algorithm={algorithm!r} is an all-reduce only; for {kind.value} there are "
        f"{names(kind)}"
    )


def _hierarchy(name: str, kind: Kind, axes: Axes, groups: Groups | None) -> Schedule:
    """The hierarchical all-reduce whose inner level is the last axis."""
    if kind is not Kind.ALL_REDUCE:
        raise _all_reduce_only(name, "hierarchical", kind)
    if len(axes) < 2 or groups is not None:
        raise ValueError(
            f"{name}: algorithm='hierarchical' wants an axis for each level, the outer ones first, "
            f"as in axis_name=('node', 'local'), and no axis_index_groups; got axis_name="
            f"{_show(axes)}. For levels within one axis pass algorithm=jax_ring.hosts.hierarchical("
            "mesh, axis), or schedules.hierarchical(inner, outer)"
        )
    sizes = [lax.axis_size(axis) for axis in axes]
    return hierarchical(sizes[-1], math.prod(sizes[:-1]))


@dataclasses.dataclass(frozen=True)
class Levels:
    """The calls that make up an all-reduce that says for each of several axes how.

    Attributes:
      whole: the all-reduce over all axes, for what does not depend on the level.
      outermost: the all-reduce over the first axis.
      inner: the reduce-scatter and the all-gather over each of the others, in their order.
    """

    whole: Call
    outermost: Call
    inner: tuple[tuple[Call, Call], ...]


def levels(
    api: str,
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups,
    algorithm: AlgorithmByLevel,
    reduce_dtype: Any,
    wire: WireByLevel,
    **op: Any,
) -> Levels:
    """Checks all arguments of an all-reduce by levels that do not depend on the leaf.

    Raises:
      ValueError: for groups, an axis that is not among those reduced over, or a schedule for all
        axes at once or for any but the first; otherwise as `parse`.
      TypeError: as `parse`.
    """
    name = f"jax_ring.{api}"
    axes = _axes(name, axis_name)
    _check_by_level(name, axes, axis_index_groups, algorithm, wire)
    if algorithm == "hierarchical":
        algorithm = "auto"  # Having levels is what makes it one.

    def call(kind: Kind, axis_name: AxisName, algorithm: Any, wire: Any, **op: Any) -> Call:
        how = {"algorithm": algorithm, "wire": wire, "reduce_dtype": reduce_dtype}
        return parse(api, x, axis_name, kind, axis_index_groups=None, **how, **op)

    def at(axis: Any) -> tuple[Any, Any]:
        method = algorithm.get(axis, "auto") if isinstance(algorithm, Mapping) else algorithm
        return method, wire.get(axis) if isinstance(wire, Mapping) else wire

    whole = call(Kind.ALL_REDUCE, axes, "ring", None, **op)
    if not axes:
        return Levels(whole, whole, ())
    return Levels(
        whole,
        call(Kind.ALL_REDUCE, axes[0], *at(axes[0]), **op),
        tuple(
            (
                call(Kind.REDUCE_SCATTER, axis, *at(axis), **op),
                call(Kind.ALL_GATHER, axis, *at(axis)),
            )
            for axis in axes[1:]
        ),
    )


def _check_by_level(
    name: str,
    axes: Axes,
    axis_index_groups: AxisIndexGroups,
    algorithm: AlgorithmByLevel,
    wire: WireByLevel,
) -> None:
    for argument, given in (("algorithm", algorithm), ("wire", wire)):
        unknown = [axis for axis in given if axis not in axes] if isinstance(given, Mapping) else []
        if unknown:
            raise ValueError(
                f"{name}: {argument} names the axes {unknown}, but the reduction is over {axes}"
            )
    if axis_index_groups is not None:
        raise ValueError(
            f"{name}: axis_index_groups must be None where algorithm or wire is given for each axis"
        )
    if isinstance(algorithm, Schedule):
        raise ValueError(
            f"{name}: algorithm must be a name, or names by axis, where wire is given for each "
            f"axis; got {algorithm!r}"
        )
    by_axis = algorithm if isinstance(algorithm, Mapping) else {}
    for axis in axes[1:]:
        if isinstance(by_axis.get(axis), Schedule):
            raise ValueError(
                f"{name}: algorithm must name what axis {axis!r} is scattered and gathered by, as "
                f"'ring'; only the first axis, {axes[0]!r}, can have a schedule; got "
                f"{by_axis[axis]!r}"
            )


def _requested_dtype(name: str, requested: Any, x: Any) -> Any:
    """The reduce_dtype as a dtype, which must be of the kind of at least one leaf."""
    if requested is None:
        return None
    try:
        wanted = jnp.dtype(requested)
    except TypeError:
        raise TypeError(f"{name}: reduce_dtype must be a dtype, got {requested!r}") from None
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(f"{name}: reduce_dtype={wanted} needs jax_enable_x64")
    leaves = [leaf for leaf in jax.tree.leaves(x) if _is_number(leaf)]
    found = [jnp.dtype(jax.dtypes.result_type(leaf)) for leaf in leaves]
    if found and not any(_kind(dtype) == _kind(wanted) for dtype in found):
        raise ValueError(
            f"{name}: reduce_dtype={wanted} is not of the kind of any leaf of x, whose dtypes are "
            f"{sorted({str(dtype) for dtype in found})}"
        )
    return wanted


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) or (
        hasattr(leaf, "dtype") and _kind(leaf.dtype) is not None
    )


def _kind(dtype: Any) -> str | None:
    return next((kind for kind in _KINDS if jnp.issubdtype(dtype, getattr(jnp, kind))), None)


# --- leaves ---------------------------------------------------------------------------------------


def partial_dtype(call: Call, dtype: Any, *, mean: bool) -> Any:
    """The dtype in which partial results of a leaf are held and travel.

    `reduce_dtype` speaks of the leaves of its kind; counters beside float gradients keep theirs.
    """
    wanted = call.reduce_dtype
    if call.method.wire is not None and _kind(dtype) == "floating":
        return jnp.dtype(jnp.float32)
    if wanted is None or _kind(wanted) != _kind(dtype):
        default = primitives.default_reduce_dtype(dtype, mean=mean)
        narrow = _kind(dtype) == "floating" and default.itemsize < 4
        return jnp.dtype(jnp.float32) if narrow and _never_sends_sums(call) else default
    if not _holds(wanted, dtype):
        raise ValueError(
            f"{call.name}: reduce_dtype must hold every value of the data's dtype {dtype}, got "
            f"{wanted}"
        )
    return wanted


def _never_sends_sums(call: Call) -> bool:
    """Whether a wide sum costs no bytes, as only contributions and finished sums travel."""
    algorithm = call.method.algorithm
    return algorithm == "direct" or (
        isinstance(algorithm, Schedule)
        and not primitives.partial_sums_travel(algorithm, call.kind, call.ranks)
    )


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether each value of a dtype is one of another of the same kind."""
    finfo: Any = jnp.finfo
    iinfo: Any = jnp.iinfo
    if jnp.issubdtype(wide, jnp.floating):
        a, b = finfo(wide), finfo(narrow)
        return bool(a.nmant >= b.nmant and a.maxexp >= b.maxexp)
    if jnp.issubdtype(wide, jnp.integer):
        return bool(iinfo(wide).bits >= iinfo(narrow).bits)
    return bool(wide.itemsize >= jnp.dtype(narrow).itemsize)


def check_op(call: Call, dtype: Any) -> None:
    """Checks a custom op on the dtype in which it will be applied."""
    reduction = call.reduction
    if reduction in (SUM, MAX, MIN, PROD):
        return
    operand = jax.ShapeDtypeStruct((2, 3), dtype)
    try:
        jaxpr = jax.make_jaxpr(reduction.combine)(operand, operand)
    except Exception as error:
        raise TypeError(
            f"{call.name}: op={reduction.name!r} must be a function of two JAX arrays, such as "
            f"jnp.maximum; on arrays of dtype {dtype} it fails with {type(error).__name__}: {error}"
        ) from error
    if [(a.shape, a.dtype) for a in jaxpr.out_avals] != [(operand.shape, dtype)]:
        raise TypeError(
            f"{call.name}: op={reduction.name!r} must return an array of its operands' shape and "
            f"dtype {dtype}, got {', '.join(map(str, jaxpr.out_avals))} for shape {operand.shape}"
        )
    if any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts):
        raise ValueError(
            f"{call.name}: op={reduction.name!r} uses a traced value from outside: make it part "
            "of x"
        )
    _check_identity(call, dtype)


def _check_identity(call: Call, dtype: Any) -> None:
    identity = call.reduction.identity
    if jnp.issubdtype(dtype, jnp.inexact):
        fits = not isinstance(identity, complex) or _kind(dtype) == "complexfloating"
    else:
        fits = np.isfinite(identity) and np.array(identity).astype(dtype) == identity
    if not fits:
        raise ValueError(
            f"{call.name}: identity must be a value of dtype {dtype}, got {identity!r}"
        )


def dimension(call: Call, argument: str, value: Any, ndim: int) -> int:
    """A dimension counted from the front."""
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{call.name}: {argument} must be an integer, got {value!r}") from None
    if not -ndim <= index < ndim:
        raise ValueError(f"{call.name}: {argument}={value} is out of bounds for {ndim} dimensions")
    return index % ndim


def check_scatter(call: Call, shape: tuple[int, ...], dimension: int, tiled: bool) -> None:
    """Checks that a dimension can be scattered over the ranks."""
    length, ranks = shape[dimension], call.ranks
    where = f"dimension {dimension} of x with shape {shape} has size {length}"
    over = f"{ranks}, the number of ranks along axis {_show(call.axes)}"
    if tiled and length % ranks:
        raise ValueError(f"{call.name}: {where}, which must be divisible by {over}")
    if not tiled and length != ranks:
        hint = "; pass tiled=True to give each rank a block of it" if length % ranks == 0 else ""
        raise ValueError(f"{call.name}: {where}, which must be {over}{hint}")


def as_array(call: Call, leaf: Any) -> Any:
    """A leaf as an array that can be communicated."""
    try:
        array = jnp.asarray(leaf)
    except TypeError:
        raise TypeError(
            f"{call.name}: x has a leaf of type {type(leaf).__name__}, which is no array: {leaf!r}"
        ) from None
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{call.name}: x has a leaf of dtype {array.dtype}, which can't be communicated; for "
            "random keys pass jax.random.key_data(key)"
        )
    if not call.by_xla and not all(isinstance(size, int) for size in array.shape):
        raise ValueError(
            f"{call.name}: x has the symbolic shape {array.shape}; it must be constant, as chunks "
            "of a symbolic size can't be sliced. algorithm='xla' takes any"
        )
    return array


def sum_of_constant(call: Call, leaf: Any) -> Any:
    """The sum or mean of what all ranks know, without communication.

    Python scalars stay Python's, so that a sum of 1 is an axis size that can be used in a shape.
    """
    if getattr(leaf, "dtype", None) == jax.dtypes.float0:
        return leaf
    if isinstance(leaf, bool) or getattr(leaf, "dtype", None) == np.bool_:
        leaf = lax.convert_element_type(leaf, jnp.int32)
    if not isinstance(leaf, (int, float, complex, np.ndarray, np.generic)):
        leaf = as_array(call, leaf)
    partial_dtype(call, jax.dtypes.result_type(leaf), mean=call.mean)  # checks it
    if call.mean:
        return leaf / 1  # which makes a float of an integer
    ranks = group_size(call)
    if isinstance(leaf, (int, float, complex)):
        return leaf * ranks
    return leaf * (np.array(ranks) if isinstance(ranks, int) else ranks).astype(leaf.dtype)


def group_size(call: Call) -> Any:
    """How many ranks are reduced together: static, unless the groups differ in size."""
    if call.one_size:
        return call.ranks
    assert call.groups is not None
    column = np.zeros(call.size, np.int64)
    for group in call.groups:
        column[list(group)] = len(group)
    comm = Communicator(call.axes, tuple(lax.axis_size(axis) for axis in call.axes))
    return comm.lookup(comm.index(), column, call.size + 1)


def operand(call: Call, x: Array) -> tuple[Array, bool]:
    """The operand, varying over all axes or unreduced over all, and whether it is the latter."""
    aval = jax.typeof(x)
    pending = _compat.unreduced(aval) & set(call.axes)
    if not pending:
        return _cast_varying(call, x), False
    if pending != set(call.axes):
        raise ValueError(
            f"{call.name}: x is unreduced over {sorted(pending)} but not over all axes of "
            f"{call.axes}: reduce over the former by themselves"
        )
    taken_by = {"sum": SUM, "max": MAX, "min": MIN}
    kind = _compat.unreduced_kind(aval)
    gathers = call.kind is Kind.ALL_GATHER
    if gathers or taken_by[kind] != call.reduction or call.groups is not None:
        raise ValueError(
            f"{call.name}: x is unreduced ({kind}) over {call.axes}; only the {kind} over whole "
            f"axes can take it, got type {aval}"
        )
    return x, True


def _cast_varying(call: Call, x: Array) -> Array:
    cast = primitives.cast_varying(x, call.axes)
    if cast is not x and not _compat.auto_pcast():
        raise ValueError(
            f"{call.name}: x must vary over axis_name={call.axes}, got type {jax.typeof(x)}: cast "
            "it with jax.lax.pcast(x, axis_name, to='varying'), or set jax_auto_pcast"
        )
    return cast
