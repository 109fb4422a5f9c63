"""The typed primitives behind the collectives.

In the type system of `jax.shard_map` a sum over an axis no longer varies over it, although it is
made of `ppermute`s whose results do. No public function makes that step, so each collective is a
primitive of its own: it says what its type is, how it differentiates and batches, and is lowered by
tracing the executor.

| primitive      | type                                  | transpose                               |
|----------------|---------------------------------------|-----------------------------------------|
| all_reduce     | varying -> invarying (checked types)  | cast to varying, no communication       |
|                | unreduced -> invarying                | cast to reduced, no communication       |
|                | varying -> varying (groups, or types  | all_reduce                              |
|                | not checked)                          |                                         |
| reduce_scatter | varying or unreduced -> varying       | all_gather, to varying or to reduced    |
| all_gather     | varying -> varying, to='varying'      | reduce_scatter                          |
|                | varying -> invarying, to='invarying'  | the own slice, no communication         |
|                | varying -> reduced, to='reduced'      | reduce_scatter of an unreduced value    |
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from jax_ring import _compat, consistency, executor, layout
from jax_ring.chunk_reduce import OPS, Codec
from jax_ring.executor import Array, Communicator, Groups
from jax_ring.plan import plan
from jax_ring.schedules import Kind, Schedule
from jax_ring.schedules.families import make, names
from jax_ring.wire import Blocks, WireFormat

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Reduction:
    """What is computed from the values of all ranks.

    Attributes:
      name: "sum", "max", "min", "prod", or the name of a custom function.
      combine: the associative and commutative function of two arrays.
      identity: fills up uneven chunks; never part of a result.
    """

    name: str
    combine: Callable[[Array, Array], Array]
    identity: Any = 0

    @property
    def operation(self) -> str:
        """Which of the operations that kernels know it is; a function of any name is none."""
        return self.name if OPS.get(self.name) is self.combine else "custom"


SUM = Reduction("sum", lax.add)
MAX = Reduction("max", lax.max)
MIN = Reduction("min", lax.min)
PROD = Reduction("prod", lax.mul)


# --- who takes part, and by which schedule -------------------------------------------------------


def axis_size(axes: Axes) -> int:
    """The number of ranks along axes."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def manual_axes(axes: Axes) -> Axes:
    """Those of the axes that are manual mesh axes, not vmapped ones."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis in manual)


def cast_varying(x: Array, axes: Axes) -> Array:
    """Casts a value to varying over those axes where it is not yet."""
    if not _compat.check_vma():
        return x
    have = _compat.varying(jax.typeof(x))
    missing = tuple(axis for axis in manual_axes(axes) if axis not in have)
    return lax.pcast(x, missing, to="varying") if missing else x


def _communicators(axes: Axes, groups: Groups | None, emulated: bool) -> list[Communicator]:
    """One communicator for each size of group."""
    sizes = tuple(lax.axis_size(axis) for axis in axes)
    mesh = jax.sharding.get_abstract_mesh().axis_names
    order = tuple(sorted(axes, key=mesh.index)) if set(axes) <= set(mesh) else axes
    if groups is None:
        return [Communicator(axes, sizes, None, order, emulated)]
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    return [Communicator(axes, sizes, tuple(g), order, emulated) for g in by_size.values()]


@dataclasses.dataclass(frozen=True)
class Method:
    """How a collective is carried out, settled when it is called.

    Attributes:
      algorithm: a name in `schedules.FAMILIES` or a schedule.
      unroll: longer runs of like steps become a loop.
      wire: the format in which chunks travel; None for as they are.
      reducer: "auto", "native" or "xla": what does the work on a chunk.
      reason: why this algorithm, for `jax_ring.explain`.
    """

    algorithm: str | Schedule
    unroll: int
    wire: WireFormat | None = None
    reducer: str = "auto"
    reason: str = dataclasses.field(default="", compare=False)

    def schedule(self, kind: Kind, ranks: int) -> Schedule:
        """The schedule for a collective of some ranks."""
        if isinstance(self.algorithm, Schedule):
            return self.algorithm
        return make(self.algorithm, kind, ranks)

    def for_others(self) -> Method:
        """The method for another kind of collective, or over other ranks: a schedule fits one."""
        if self.algorithm in names(Kind.REDUCE_SCATTER) or self.algorithm == "xla":
            return self
        other = "ring" if self.wire is None else "direct"
        reason = f"{_called(self.algorithm)} has no form for this part of the collective"
        return dataclasses.replace(self, algorithm=other, reason=reason)

    def codec(self, reduction: Reduction, factor: float = 1.0) -> Codec:
        """How the chunks are written, reduced and read."""
        return Codec(self.wire, reduction.operation, reduction.combine, self.reducer, factor)


def _called(algorithm: str | Schedule) -> str:
    return algorithm if isinstance(algorithm, str) else algorithm.name


def _arithmetic(
    method: Method, reduction: Reduction, mean: bool, ranks: int, reduce_dtype: Any
) -> executor.Arithmetic:
    finish = _mean_of(ranks) if mean else None
    return executor.Arithmetic(method.codec(reduction), reduce_dtype, finish)


def _mean_of(ranks: int) -> Callable[[Array], Array]:
    def divide(value: Array) -> Array:
        return value / ranks

    return divide


def partial_sums_travel(algorithm: str | Schedule, kind: Kind, ranks: int) -> bool:
    """Whether an algorithm ever sends a sum that is not yet complete."""
    return plan(Method(algorithm, 1).schedule(kind, ranks)).partials_travel


def public_name(kind: Kind, reduction: Reduction, mean: bool) -> str:
    """What a collective is called by: the public function, and what it computes if that is more."""
    if kind is Kind.ALL_GATHER:
        return "all_gather"
    what = "mean" if mean else reduction.name
    if kind is Kind.REDUCE_SCATTER:
        return "psum_scatter" if what == "sum" else f"reduce_scatter_{what}"
    names = {SUM: "psum", MAX: "pmax", MIN: "pmin"}
    return "pmean" if mean else names.get(reduction, f"all_reduce_{what}")


def name_of(primitive: Primitive, params: Mapping[str, Any]) -> str:
    """The public function that makes a primitive in `KINDS`."""
    name = public_name(KINDS[primitive], params.get("reduction", SUM), params.get("mean", False))
    return f"error_feedback.{name}" if primitive is all_reduce_feedback_p else name


def _lowered(lowering: _compat.Lowering) -> None:
    """Notes a collective that becomes part of a program, for the comparison of processes."""
    params = lowering.params
    method = params["method"]
    schedule = method.algorithm if isinstance(method.algorithm, Schedule) else None

    def described() -> str:
        return consistency.described(
            name=name_of(lowering.primitive, params),
            dtype=str(lowering.aval.dtype),
            shape=lowering.aval.shape,
            axes=params["axes"],
            groups=params.get("groups"),
            algorithm=_called(method.algorithm),
            chunks=None if schedule is None else schedule.chunks,
            channels=None if schedule is None else schedule.channels,
            wire=None if method.wire is None else method.wire.name,
            reduce_dtype=str(params.get("reduce_dtype", "")),
        )

    consistency.note(lowering, params["axes"], described)


# --- all_reduce ----------------------------------------------------------------------------------


def _all_reduce(
    x: Array,
    *seed: Array,
    axes: Axes,
    groups: Groups | None,
    reduction: Reduction,
    mean: bool,
    reduce_dtype: Any,
    method: Method,
    invariant: bool,
    unreduced: bool,
    emulated: bool = False,
) -> Array:
    """The program of an all-reduce, traced when it is lowered or emulated."""
    del invariant, unreduced
    result = x
    for comm in _communicators(axes, groups, emulated):
        if comm.size == 1 or x.size == 0:
            continue
        if method.wire is not None:
            reduced, _ = _wired_all_reduce(
                x, *seed, comm=comm, reduction=reduction, mean=mean, method=method
            )
        else:
            reduced = _plain_all_reduce(x, comm, reduction, mean, reduce_dtype, method)
        result = reduced if comm.everyone else jnp.where(comm.takes_part(), reduced, result)
    return result


def _plain_all_reduce(
    x: Array,
    comm: Communicator,
    reduction: Reduction,
    mean: bool,
    reduce_dtype: Any,
    method: Method,
) -> Array:
    schedule = method.schedule(Kind.ALL_REDUCE, comm.size)
    division = layout.choose(x, schedule.chunks)
    buffer = executor.all_reduce(
        schedule,
        division.divide(x, reduction.identity),
        comm,
        _arithmetic(method, reduction, mean, comm.size, reduce_dtype),
        axis=division.axis,
        block=division.block,
        unroll=method.unroll,
        label=f"jax_ring.{public_name(Kind.ALL_REDUCE, reduction, mean)}/{schedule.name}",
    )
    return division.restore(buffer, x.shape)


def _wired_all_reduce(
    x: Array,
    *seed: Array,
    comm: Communicator,
    reduction: Reduction,
    mean: bool,
    method: Method,
    feedback: bool = False,
) -> tuple[Array, Array | None]:
    """The reduced array, and float32 of its shape with what this rank's messages lost."""
    schedule = method.schedule(Kind.ALL_REDUCE, comm.size)
    division, shape = layout.choose_rows(x, schedule.chunks)
    rows = shape.divide(division.divide(x, reduction.identity))
    result, lost = executor.wired_all_reduce(
        schedule,
        rows,
        comm,
        _codec(method, rows, reduction, 1 / comm.size if mean else 1.0),
        unroll=method.unroll,
        label=f"jax_ring.{public_name(Kind.ALL_REDUCE, reduction, mean)}/{schedule.name}",
        seed=seed[0] if seed else None,
        feedback=feedback,
    )

    def restored(rows: Array) -> Array:
        return division.restore(shape.restore(rows), x.shape)

    return restored(result), None if lost is None else restored(lost)


def _codec(method: Method, rows: Array, reduction: Reduction, factor: float = 1.0) -> Codec:
    """The codec for rows; where the compiler may shard them, blocks keep within its shards."""
    codec = method.codec(reduction, factor)
    shards = layout.left_to_compiler()
    if shards > 1 and isinstance(codec.wire, Blocks):
        return dataclasses.replace(codec, wire=codec.wire.within(rows.shape[-1], shards))
    return codec


def _all_reduce_type(
    aval: Any, *_: Any, axes: Axes, invariant: bool, reduction: Reduction, mean: bool, **__: Any
) -> tuple[Any, set[Any]]:
    _compat.check_axis_names(axes, f"jax_ring.{public_name(Kind.ALL_REDUCE, reduction, mean)}")
    varying, unreduced = _compat.varying(aval), _compat.unreduced(aval)
    if invariant:
        varying, unreduced = varying - set(axes), unreduced - set(axes)
    result = _compat.retype(aval, varying=varying, unreduced=unreduced)
    return result, _compat.axis_effects(axes)


def _all_reduce_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any
) -> tuple[Any, Any]:
    x, t = primals[0], tangents[0]
    y = all_reduce_p.bind(*primals, **params)
    return y, _all_reduce_tangent(x, y, t, **params)


def _all_reduce_tangent(
    x: Array, y: Array, t: Array, *, reduction: Reduction, **params: Any
) -> Array:
    axes, groups = params["axes"], params["groups"]
    if reduction == SUM:
        result: Array = all_reduce_p.bind(t, reduction=SUM, **params)
        return result
    if params["method"].wire is not None:
        # What comes off a lossy wire is not one of the values that went on.
        raise NotImplementedError(_no_derivative(reduction, "over a wire format"))
    params = {**params, "reduction": SUM, "method": params["method"].for_others()}
    if reduction in (MAX, MIN):
        # As jnp.max: the tangents of all ranks that hold the extremum count alike.
        chosen = (x == cast_varying(y, axes)).astype(t.dtype)
        result = all_reduce_p.bind(t * chosen, **params) / all_reduce_p.bind(chosen, **params)
        return result
    if reduction == PROD and groups is None:
        everyone = all_gather_p.bind(
            x,
            axes=axes,
            groups=groups,
            dimension=0,
            tiled=False,
            size=axis_size(axes),
            to="varying",
            reduce_dtype=params["reduce_dtype"],
            method=params["method"],
        )
        own = lax.broadcasted_iota(jnp.int32, everyone.shape, 0) == _index(axes)
        others = jnp.prod(jnp.where(own, jnp.ones_like(everyone), everyone), axis=0)
        result = all_reduce_p.bind(t * others, **params)
        return result
    raise NotImplementedError(
        _no_derivative(reduction, "" if groups is None else "with axis_index_groups")
    )


def _index(axes: Axes) -> Array:
    return Communicator(axes, tuple(lax.axis_size(axis) for axis in axes)).index()


def _all_reduce_transpose(ct: Any, x: Any, **params: Any) -> tuple[Any]:
    del x
    axes = params["axes"]
    if not params["invariant"]:
        return (all_reduce_p.bind(ct, **params),)
    if params["mean"]:
        ct = ct / axis_size(axes)
    if params["unreduced"]:
        return (lax.pcast(ct, axes, to="reduced"),)
    return (cast_varying(ct, axes),)


def _all_reduce_batch(
    axis_data: Any, values: tuple[Any, ...], dims: tuple[Any, ...], *, axes: Axes, **params: Any
) -> tuple[Any, Any]:
    (x, *seed), (d, *_) = _with_one_seed(values, dims)
    if axis_data.name not in axes:
        return all_reduce_p.bind(x, *seed, axes=axes, **params), d
    groups = params["groups"]
    rest = _without(axis_data.name, axes, groups)
    if rest:
        # A schedule is for the product of the axes, and only its last sum may be rounded.
        params["method"] = params["method"].for_others()
        wide = x.astype(params["reduce_dtype"])
        y, dim = _all_reduce_rows(axis_data, wide, *seed, d=d, rest=rest, **params)
        return y.astype(x.dtype), dim
    return _all_reduce_rows(axis_data, x, *seed, d=d, rest=rest, **params)


def _with_one_seed(values: Any, dims: Any) -> tuple[Any, Any]:
    """Operands whose seed, if there is one, is not mapped: chunks hold the whole batch."""
    if len(values) == 1 or dims[1] is None:
        return values, dims
    return (values[0], values[1].sum(dims[1], dtype=jnp.uint32)), (dims[0], None)


def _all_reduce_rows(
    axis_data: Any, x: Array, *seed: Array, d: int | None, rest: Axes, **params: Any
) -> tuple[Array, int | None]:
    """Reduces over a vmapped axis, whose ranks are rows of x, and then over the other axes."""
    groups, reduction = params["groups"], params["reduction"]

    def over_rest(local: Array) -> Array:
        whole: Array = all_reduce_p.bind(local, *seed, axes=rest, **params) if rest else local
        return whole

    if d is None and groups is None and reduction in (SUM, MAX, MIN):
        # Known by every rank already, so nothing is sent.
        summed = reduction == SUM and not params["mean"]
        local = x * jnp.asarray(axis_data.size, x.dtype) if summed else x
        return over_rest(local), None

    def over_rows(rows: Array, **method: Method) -> Array:
        how = {**params, **method, "axes": (axis_data.name,)}
        reduced = _emulate(lambda v: _all_reduce(v, *seed, emulated=True, **how), rows, axis_data)
        return reduced[0] if groups is None else reduced

    rows = _rows(x, d, axis_data)
    if reduction == SUM:
        y = over_rest(_linear(over_rows, params["method"])(rows))
    elif reduction in (MAX, MIN) and groups is None:
        # Ties are shared among all ranks at once, not axis by axis.
        tangent = functools.partial(_extremum_tangent, axes=rest, **params)
        y = _with_tangent(lambda rows: over_rest(over_rows(rows)), tangent)(rows)
    else:
        tangent = functools.partial(_rows_tangent, **params)
        y = over_rest(_with_tangent(over_rows, tangent)(rows))
    return y, None if groups is None else 0


def _extremum_tangent(rows: Array, y: Array, t: Array, *, axes: Axes, **params: Any) -> Array:
    """The tangent of a maximum or minimum over rows and over axes, as in `_all_reduce_tangent`."""
    chosen = (rows == cast_varying(y, axes)).astype(t.dtype)
    total, count = (t * chosen).sum(0), chosen.sum(0)
    if axes:
        sums = {**params, "axes": axes, "reduction": SUM}
        total, count = all_reduce_p.bind(total, **sums), all_reduce_p.bind(count, **sums)
    return total / count


def _rows_tangent(
    rows: Array, y: Array, t: Array, *, reduction: Reduction, groups: Groups | None, **_: Any
) -> Array:
    del y
    return _tangent_of(lambda v: _reduced_rows(v, reduction, groups), rows, t)


def _with_tangent(
    f: Callable[[Array], Array], tangent: Callable[[Array, Array, Array], Array]
) -> Callable[[Array], Array]:
    """A function with a derivative of its own: a maximum's steps would each split ties in two."""
    g = jax.custom_jvp(f)

    @g.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        y = g(*primals)
        return y, tangent(primals[0], y, tangents[0])

    result: Callable[[Array], Array] = g
    return result


def _linear(f: Callable[..., Array], method: Method) -> Callable[[Array], Array]:
    """A collective that is linear, over rows, with the derivative of what it is without rounding.

    The arithmetic of a wire on bits has none, nor have custom calls.
    """
    if method.wire is None:
        return f
    plain = dataclasses.replace(method.for_others(), wire=None, reducer="xla")
    return _with_tangent(f, lambda rows, y, t: _tangent_of(lambda v: f(v, method=plain), rows, t))


def _reduced_rows(rows: Array, reduction: Reduction, groups: Groups | None) -> Array:
    """The same reduction by jnp, from which a derivative is taken."""
    functions: dict[Reduction, Any] = {MAX: jnp.max, MIN: jnp.min, PROD: jnp.prod}
    if reduction not in functions:
        raise NotImplementedError(_no_derivative(reduction, ""))
    reduced = rows
    for group in groups or (tuple(range(rows.shape[0])),):
        members = jnp.array(group)
        reduced = reduced.at[members].set(functions[reduction](rows[members], axis=0))
    return reduced if groups else reduced[0]


def _tangent_of(f: Callable[[Array], Array], x: Array, t: Array) -> Array:
    result: Array = jax.jvp(f, (x,), (t,))[1]
    return result


def _no_derivative(reduction: Reduction, where: str) -> str:
    return (
        f"op={reduction.name!r} {where} has no derivative: stop_gradient its operand, or give it "
        "one with jax.custom_jvp"
    ).replace("  ", " ")


def _without(name: str, axes: Axes, groups: Groups | None) -> Axes:
    rest = tuple(axis for axis in axes if axis != name)
    if rest and groups is not None:
        raise NotImplementedError(
            f"axis_index_groups over the axes {axes} where {name!r} is a vmapped axis: "
            "reduce over one axis at a time"
        )
    return rest


def _rows(x: Array, d: int | None, axis_data: Any) -> Array:
    """The values of all ranks of a vmapped axis, along dimension 0."""
    if d is None:
        return jnp.broadcast_to(x, (axis_data.size, *jnp.shape(x)))
    return jnp.moveaxis(x, d, 0)


def _emulate(body: Callable[[Array], Array], rows: Array, axis_data: Any) -> Array:
    """Runs a collective over a vmapped axis: each row is a rank."""
    result: Array = jax.vmap(body, axis_name=axis_data.name, axis_size=axis_data.size)(rows)
    return result


all_reduce_p = _compat.collective_primitive(
    "jax_ring_all_reduce",
    abstract_eval=_all_reduce_type,
    body=_all_reduce,
    lowered=_lowered,
    transpose=_all_reduce_transpose,
    batch=_all_reduce_batch,
    jvp=_all_reduce_jvp,
)


# --- all_reduce that returns what it lost --------------------------------------------------------


def _feedback(
    x: Array, *seed: Array, axes: Axes, mean: bool, method: Method, emulated: bool = False
) -> tuple[Array, Array]:
    """The program of a sum, and what this rank's messages lost."""
    (comm,) = _communicators(axes, None, emulated)
    if comm.size == 1 or x.size == 0:
        return x, jnp.zeros_like(x)
    y, lost = _wired_all_reduce(
        x, *seed, comm=comm, reduction=SUM, mean=mean, method=method, feedback=True
    )
    assert lost is not None
    return y, lost


def _feedback_type(
    aval: Any, *seed: Any, axes: Axes, mean: bool, method: Method
) -> tuple[tuple[Any, Any], set[Any]]:
    del seed, mean, method
    _compat.check_axis_names(axes, "jax_ring.error_feedback")
    varying = _compat.varying(aval)
    known = varying - set(axes) if _compat.check_vma() else varying
    return (_compat.retype(aval, varying=known), aval), _compat.axis_effects(axes)


def _feedback_batch(
    axis_data: Any, values: Any, dims: Any, *, axes: Axes, **params: Any
) -> tuple[Any, Any]:
    (x, *seed), (d, *_) = _with_one_seed(values, dims)
    if axis_data.name not in axes:
        return all_reduce_feedback_p.bind(x, *seed, axes=axes, **params), (d, d)
    if len(axes) > 1:
        raise NotImplementedError(
            f"jax_ring.error_feedback over the axes {axes}, of which {axis_data.name!r} is vmapped"
        )

    def body(row: Array) -> tuple[Array, Array]:
        return _feedback(row, *seed, axes=axes, emulated=True, **params)

    rows = _rows(x, d, axis_data)
    y, lost = jax.vmap(body, axis_name=axis_data.name, axis_size=axis_data.size)(rows)
    return (y[0], lost), (None, 0)


all_reduce_feedback_p = _compat.collective_primitive(
    "jax_ring_all_reduce_feedback",
    abstract_eval=_feedback_type,
    body=_feedback,
    lowered=_lowered,
    batch=_feedback_batch,
    multiple_results=True,
)


# --- reduce_scatter ------------------------------------------------------------------------------


def _reduce_scatter(
    x: Array,
    *seed: Array,
    axes: Axes,
    groups: Groups | None,
    dimension: int,
    tiled: bool,
    size: int,
    reduction: Reduction,
    mean: bool,
    reduce_dtype: Any,
    method: Method,
    unreduced: bool,
    emulated: bool = False,
) -> Array:
    """The program of a reduce-scatter."""
    del unreduced
    (comm,) = _communicators(axes, groups, emulated)
    shape = _scattered_shape(x.shape, dimension, tiled, size)
    if size == 1 or x.size == 0:
        return x.reshape(shape)
    if method.wire is not None:
        chunks = _blocks(x, dimension, size) if tiled else x
        chunk = _wired_reduce_scatter(
            chunks, *seed, comm=comm, at=dimension, reduction=reduction, mean=mean, method=method
        )
        return chunk.reshape(shape)
    if tiled and x.shape[dimension] > layout.INT32_MAX:
        x = _blocks(x, dimension, size)
    schedule = method.schedule(Kind.REDUCE_SCATTER, size)
    chunk = executor.reduce_scatter(
        schedule,
        x,
        comm,
        _arithmetic(method, reduction, mean, size, reduce_dtype),
        axis=dimension,
        block=x.shape[dimension] // size,
        unroll=method.unroll,
        label=f"jax_ring.reduce_scatter/{schedule.name}",
    )
    return chunk.reshape(shape)


def _wired_reduce_scatter(
    chunks: Array,
    *seed: Array,
    comm: Communicator,
    at: int,
    reduction: Reduction,
    mean: bool,
    method: Method,
) -> Array:
    """This rank's chunk, [..., 1, ...]; there is one for each index of dimension `at`."""
    schedule = method.schedule(Kind.REDUCE_SCATTER, comm.size)
    blocks = layout.Rows(chunks.shape, at, layout.left_to_compiler() == 1)
    rows = blocks.divide(chunks)
    row = executor.wired_reduce_scatter(
        schedule,
        rows,
        comm,
        _codec(method, rows, reduction, 1 / comm.size if mean else 1.0),
        unroll=method.unroll,
        label=f"jax_ring.reduce_scatter/{schedule.name}",
        seed=seed[0] if seed else None,
    )
    return blocks.restore(row[None])


def _scattered_shape(
    shape: tuple[int, ...], dimension: int, tiled: bool, size: int
) -> tuple[int, ...]:
    blocks = (shape[dimension] // size,) if tiled else ()
    return (*shape[:dimension], *blocks, *shape[dimension + 1 :])


def _reduce_scatter_type(
    aval: Any, *_: Any, axes: Axes, dimension: int, tiled: bool, size: int, **__: Any
) -> tuple[Any, set[Any]]:
    _compat.check_axis_names(axes, "jax_ring.psum_scatter")
    spec = list(aval.sharding.spec)
    if not tiled:
        del spec[dimension]
    result = _compat.retype(
        aval,
        varying=_compat.varying(aval) | (_compat.unreduced(aval) & set(axes)),
        unreduced=_compat.unreduced(aval) - set(axes),
        shape=_scattered_shape(aval.shape, dimension, tiled, size),
        sharding=aval.sharding.update(spec=PartitionSpec(*spec)),
    )
    return result, _compat.axis_effects(axes)


def _reduce_scatter_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any
) -> tuple[Any, Any]:
    x, t = primals[0], tangents[0]
    y = reduce_scatter_p.bind(*primals, **params)
    if params["reduction"] == SUM:
        return y, reduce_scatter_p.bind(t, **params)
    # Not linear: its own slice of the all-reduce's tangent.
    names = ("axes", "groups", "reduction", "mean", "reduce_dtype")
    whole = {name: params[name] for name in names}
    whole |= {"method": params["method"].for_others(), "invariant": False, "unreduced": False}
    tangent = _all_reduce_tangent(x, all_reduce_p.bind(x, **whole), t, **whole)
    return y, _own_slice(tangent, **params)


def _own_slice(
    x: Array,
    *,
    axes: Axes,
    groups: Groups | None,
    dimension: int,
    tiled: bool,
    size: int,
    **_: Any,
) -> Array:
    (comm,) = _communicators(axes, groups, False)
    blocks = _blocks(x, dimension, size) if tiled else x
    own = lax.dynamic_slice_in_dim(blocks, comm.rank(), 1, dimension)
    return lax.squeeze(own, [dimension])


def _blocks(x: Array, dimension: int, size: int) -> Array:
    """A dimension as (ranks, block), in which an index of a rank fits any type."""
    block = x.shape[dimension] // size
    return x.reshape(*x.shape[:dimension], size, block, *x.shape[dimension + 1 :])


def _reduce_scatter_transpose(ct: Any, x: Any, **params: Any) -> tuple[Any]:
    del x
    names = ("axes", "groups", "dimension", "tiled", "size", "reduce_dtype")
    if params["mean"]:
        ct = ct / params["size"]
    to = "reduced" if params["unreduced"] else "varying"
    shared = {name: params[name] for name in names}
    return (all_gather_p.bind(ct, to=to, method=params["method"].for_others(), **shared),)


def _reduce_scatter_batch(
    axis_data: Any, values: tuple[Any, ...], dims: tuple[Any, ...], **params: Any
) -> tuple[Any, Any]:
    (x, *seed), (d, *_) = _with_one_seed(values, dims)
    axes, dimension = params["axes"], params["dimension"]
    if axis_data.name not in axes:
        if d is not None and d <= dimension:
            params["dimension"] = dimension + 1
        elif d is not None and not params["tiled"]:
            d -= 1
        return reduce_scatter_p.bind(x, *seed, **params), d
    rows = _rows(x, d, axis_data)
    if _without(axis_data.name, axes, params["groups"]):
        wide = rows.astype(params["reduce_dtype"])
        return _scatter_in_turn(axis_data, wide, *seed, **params).astype(x.dtype), 0

    def scatter(rows: Array, **method: Method) -> Array:
        how = {**params, **method}
        return _emulate(lambda v: _reduce_scatter(v, *seed, emulated=True, **how), rows, axis_data)

    def tangent(rows: Array, y: Array, t: Array) -> Array:
        del y
        return _tangent_of(lambda v: _scattered_rows(v, **params), rows, t)

    if params["reduction"] == SUM:
        return _linear(scatter, params["method"])(rows), 0
    return _with_tangent(scatter, tangent)(rows), 0


def _scattered_rows(
    rows: Array,
    *,
    groups: Groups | None,
    reduction: Reduction,
    dimension: int,
    tiled: bool,
    size: int,
    **_: Any,
) -> Array:
    """A reduce-scatter over rows by jnp, from which a derivative is taken."""
    everyone = (tuple(range(rows.shape[0])),) if groups is None else groups
    reduced = _reduced_rows(rows, reduction, everyone)
    rank_of = {member: rank for group in everyone for rank, member in enumerate(group)}
    ranks = jnp.array([rank_of[i] for i in range(rows.shape[0])])

    def own(row: Array, rank: Array) -> Array:
        blocks = _blocks(row, dimension, size) if tiled else row
        return jnp.take(blocks, rank, axis=dimension)

    result: Array = jax.vmap(own)(reduced, ranks)
    return result


def _scatter_in_turn(
    axis_data: Any, rows: Array, *seed: Array, axes: Axes, tiled: bool, **params: Any
) -> Array:
    """Scatters over several axes, one of them vmapped: one axis after the other, major first."""
    dimension, size = params.pop("dimension"), params.pop("size")

    def body(v: Array) -> Array:
        sizes = [lax.axis_size(axis) for axis in axes]
        blocks = (*sizes, v.shape[dimension] // size) if tiled else tuple(sizes)
        v = v.reshape(*v.shape[:dimension], *blocks, *v.shape[dimension + 1 :])
        for axis, n in zip(axes, sizes, strict=True):
            v = reduce_scatter_p.bind(
                v,
                *seed,
                axes=(axis,),
                dimension=dimension,
                tiled=False,
                size=n,
                **{**params, "method": params["method"].for_others()},
            )
        return v

    return _emulate(body, rows, axis_data)


reduce_scatter_p = _compat.collective_primitive(
    "jax_ring_reduce_scatter",
    abstract_eval=_reduce_scatter_type,
    body=_reduce_scatter,
    lowered=_lowered,
    transpose=_reduce_scatter_transpose,
    batch=_reduce_scatter_batch,
    jvp=_reduce_scatter_jvp,
)


# --- all_gather ----------------------------------------------------------------------------------


def _all_gather(
    x: Array,
    *seed: Array,
    axes: Axes,
    groups: Groups | None,
    dimension: int,
    tiled: bool,
    size: int,
    to: str,
    reduce_dtype: Any,
    method: Method,
    emulated: bool = False,
) -> Array:
    """The program of an all-gather."""
    del to, reduce_dtype
    (comm,) = _communicators(axes, groups, emulated)
    shape = _gathered_shape(x.shape, dimension, tiled, size)
    if size == 1 or x.size == 0:
        return x.reshape(shape)
    if method.wire is not None:
        chunk = lax.expand_dims(x, [dimension])
        chunks = _wired_all_gather(chunk, *seed, comm=comm, at=dimension, method=method)
        return chunks.reshape(shape)
    schedule = method.schedule(Kind.ALL_GATHER, size)
    tiled = tiled and shape[dimension] <= layout.INT32_MAX
    buffer = executor.all_gather(
        schedule,
        x if tiled else lax.expand_dims(x, [dimension]),
        comm,
        axis=dimension,
        block=x.shape[dimension] if tiled else 1,
        unroll=method.unroll,
        label=f"jax_ring.all_gather/{schedule.name}",
    )
    return buffer.reshape(shape)


def _wired_all_gather(
    chunk: Array, *seed: Array, comm: Communicator, at: int, method: Method
) -> Array:
    """The chunks of all ranks, along dimension `at` of this one's, which is of size 1."""
    schedule = method.schedule(Kind.ALL_GATHER, comm.size)
    blocks = layout.Rows(chunk.shape, at, layout.left_to_compiler() == 1)
    row = blocks.divide(chunk)[0]
    rows = executor.wired_all_gather(
        schedule,
        row,
        comm,
        _codec(method, row[None], SUM),
        unroll=method.unroll,
        label=f"jax_ring.all_gather/{schedule.name}",
        seed=seed[0] if seed else None,
    )
    return blocks.restore(rows)


def _gathered_shape(
    shape: tuple[int, ...], dimension: int, tiled: bool, size: int
) -> tuple[int, ...]:
    if tiled:
        return (*shape[:dimension], shape[dimension] * size, *shape[dimension + 1 :])
    return (*shape[:dimension], size, *shape[dimension:])


def _all_gather_type(
    aval: Any, *_: Any, axes: Axes, dimension: int, tiled: bool, size: int, to: str, **__: Any
) -> tuple[Any, set[Any]]:
    _compat.check_axis_names(axes, "jax_ring.all_gather")
    spec = list(aval.sharding.spec)
    if not tiled:
        spec.insert(dimension, None)
    varying = _compat.varying(aval)
    result = _compat.retype(
        aval,
        varying=varying if to == "varying" else varying - set(axes),
        unreduced=_compat.unreduced(aval),
        reduced=_compat.reduced(aval) | (set(axes) if to == "reduced" else set()),
        shape=_gathered_shape(aval.shape, dimension, tiled, size),
        sharding=aval.sharding.update(spec=PartitionSpec(*spec)),
    )
    return result, _compat.axis_effects(axes)


def _all_gather_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any
) -> tuple[Any, Any]:
    return all_gather_p.bind(*primals, **params), all_gather_p.bind(tangents[0], **params)


def _all_gather_transpose(ct: Any, x: Any, **params: Any) -> tuple[Any]:
    del x
    to, method = params.pop("to"), params.pop("method")
    if to == "invarying":
        return (_own_slice(cast_varying(ct, params["axes"]), **params),)
    scatter = reduce_scatter_p.bind(
        ct,
        reduction=SUM,
        mean=False,
        method=method.for_others(),
        unreduced=to == "reduced",
        **params,
    )
    return (scatter,)


def _all_gather_batch(
    axis_data: Any, values: tuple[Any, ...], dims: tuple[Any, ...], **params: Any
) -> tuple[Any, Any]:
    (x, *seed), (d, *_) = _with_one_seed(values, dims)
    axes, dimension = params["axes"], params["dimension"]
    if axis_data.name not in axes:
        if d is not None and d <= dimension:
            params["dimension"] = dimension + 1
        elif d is not None and not params["tiled"]:
            d += 1
        return all_gather_p.bind(x, *seed, **params), d
    rows = _rows(x, d, axis_data)
    if _without(axis_data.name, axes, params["groups"]):
        return _gather_in_turn(axis_data, rows, *seed, **params), None

    def gather(rows: Array, **method: Method) -> Array:
        how = {**params, **method}
        return _emulate(lambda v: _all_gather(v, *seed, emulated=True, **how), rows, axis_data)

    result = _linear(gather, params["method"])(rows)
    return (result[0], None) if params["groups"] is None else (result, 0)


def _gather_in_turn(
    axis_data: Any, rows: Array, *seed: Array, axes: Axes, tiled: bool, **params: Any
) -> Array:
    """Gathers over several axes, one of them vmapped: one axis after the other, minor first."""
    dimension, size = params.pop("dimension"), params.pop("size")
    params["method"] = params["method"].for_others()

    def body(v: Array) -> Array:
        shape = _gathered_shape(v.shape, dimension, tiled, size)
        for axis in reversed(axes):
            v = all_gather_p.bind(
                v,
                *seed,
                axes=(axis,),
                dimension=dimension,
                tiled=False,
                size=lax.axis_size(axis),
                **params,
            )
        return v.reshape(shape)

    return _emulate(body, rows, axis_data)[0]


all_gather_p = _compat.collective_primitive(
    "jax_ring_all_gather",
    abstract_eval=_all_gather_type,
    body=_all_gather,
    lowered=_lowered,
    transpose=_all_gather_transpose,
    batch=_all_gather_batch,
    jvp=_all_gather_jvp,
)

# What each of them does.
KINDS: dict[Primitive, Kind] = {
    all_reduce_p: Kind.ALL_REDUCE,
    all_reduce_feedback_p: Kind.ALL_REDUCE,
    reduce_scatter_p: Kind.REDUCE_SCATTER,
    all_gather_p: Kind.ALL_GATHER,
}


def default_reduce_dtype(dtype: Any, *, mean: bool) -> Any:
    """The type in which partial results are held and travel unless the caller says.

    The type of the data, so that no more bytes travel than lax's op moves; except where a running
    sum in it would be worthless: 8-bit floats and 4-bit integers (no backend adds them), and the
    mean of float16, whose sum overflows long before the mean does.
    """
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        if dtype.itemsize < 2 or (mean and dtype == jnp.float16):
            return jnp.dtype(jnp.float32)
    elif dtype.name in ("int2", "int4", "uint2", "uint4"):
        return jnp.dtype(jnp.int8 if dtype.name.startswith("int") else jnp.uint8)
    return dtype
