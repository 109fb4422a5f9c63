"""What a function communicates, before it is run: every collective, its algorithm and why.

The function is traced, not run, so that neither the devices of its mesh nor data are needed. Its
jaxpr is searched, with all that is nested in it, for the primitives of jax_ring, and for those of
lax that communicate, so that it is seen which collectives are not jax_ring's. What nobody reads is
left out, as XLA leaves it out. Nor is there a collective over an axis of `jax.vmap`: that is
arithmetic on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters import partial_eval

from jax_ring import _compat, arguments, callers, choose, layout, primitives, xla
from jax_ring._compat import ClosedJaxpr
from jax_ring.executor import Groups
from jax_ring.plan import plan
from jax_ring.schedules import Kind, Op, Schedule, Step
from jax_ring.wire import Blocks, WireFormat

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

_XLA = "xla"

_WIDTH = 100  # Of the text, in columns.
_WHERE = 25  # Of the column of source lines, at least, if they are that long.
# lax's own, by the names of their primitives: what they are called by.
_LAX_NAMES = {
    "psum": "psum",
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "pmax": "pmax",
    "unreduced_pmax": "pmax",
    "pmin": "pmin",
    "unreduced_pmin": "pmin",
    "reduce_scatter": "psum_scatter",
    "unreduced_reduce_scatter": "psum_scatter",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
    "pbroadcast": "pbroadcast",
}


# --- the result -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a function, on one array.

    What is said of bytes and steps is of one execution. Sizes are those of a rank: the manual part
    of the mesh's devices. Where some mesh axes are left to the compiler, a rank is several devices.

    Attributes:
      name: the public function, of jax_ring or lax: "psum", "pmean", "psum_scatter", "all_gather"
        and so on, with the operation where that is more: "all_reduce_prod", "reduce_scatter_mean".
      file: the file of the call, or "" if it is not known.
      line: the line of the call there, or 0.
      scope: the named scopes and transformations around it, as in a profile.
      backward: whether it belongs to the backward pass of a derivative.
      nesting: the loops and branches that it is in, the outermost first.
      times: how often it runs in one call of the function; None in a while loop. In a branch: if
        that is taken.
      axes: the mesh axes that it is over.
      ranks: how many ranks communicate with each other.
      groups: the groups of ranks that do, or None for one group of all. Groups of different sizes
        make a collective for each size.
      shape: the shape of the operand on each rank.
      dtype: the dtype of the operand.
      nbytes: the bytes of the operand on each rank.
      reduce_dtype: the dtype in which sums are held; None for a gather, and for lax's own.
      wire: the format in which chunks travel, or None.
      algorithm: its name; "xla" for lax's own, of which the rest is not known.
      reason: why it is that one.
      chunks: into how many chunks it cuts the buffer.
      channels: how many streams of steps go on side by side.
      steps: the communication steps, one after the other.
      bytes_sent: the bytes that a rank sends, the one that sends most.
      bytes_per_link: the bytes from one rank to another, over the busiest of these links.
      link: the links for which the time is predicted, by their names in `choose.LINKS`: those that
        "auto" reckons with, see `jax_ring.config(link=)`.
      seconds: the predicted time.
    """

    name: str
    file: str
    line: int
    scope: str
    backward: bool
    nesting: tuple[str, ...]
    times: int | None
    axes: tuple[str, ...]
    ranks: int
    groups: Groups | None
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    reduce_dtype: str | None
    wire: str | None
    algorithm: str
    reason: str
    chunks: int | None = None
    channels: int | None = None
    steps: int | None = None
    bytes_sent: int | None = None
    bytes_per_link: int | None = None
    link: str | None = None
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Totals:
    """What one call of a function communicates in all, one collective after the other.

    Attributes:
      steps: the communication steps.
      bytes_sent: the bytes that a rank sends.
      seconds: the predicted time.
      exact: whether all is counted. Not counted is what lax's own collectives send, of a while loop
        all but one iteration, and of branches all but the costliest.
    """

    steps: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    exact: bool = True


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The collectives of a function, as `explain` found them. `print` it.

    Attributes:
      collectives: each of them, in the order of the program.
      totals: what one call of the function communicates.
    """

    collectives: tuple[Collective, ...]
    totals: Totals

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, strings and numbers, as in the JSON."""
        result: dict[str, Any] = json.loads(self.to_json())
        return result

    def to_json(self, indent: int | None = None) -> str:
        """All of it as a JSON object with the fields `collectives` and `totals`."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __rich__(self) -> RenderableType:
        """For `rich.print`: a table, why, the totals, and what is not in them."""
        from rich.console import Group
        from rich.text import Text

        lines = [Text(line) for line in _summary(self)]
        if not self.collectives:
            return Group(*lines)
        return Group(_table(self.collectives, _reasons(self.collectives)), *lines)

    def __str__(self) -> str:
        """The same as plain text."""
        from rich.console import Console

        text = io.StringIO()
        console = Console(
            file=text, width=_WIDTH, force_terminal=False, color_system=None, legacy_windows=False
        )
        console.print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


# --- the search -----------------------------------------------------------------------------------


def explain(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Lists every collective of a function: where it is called, by which algorithm, at what cost.

    The function is traced for the arguments and not run. A jitted one is traced as jit does it: the
    settings that count are those in force when jit first saw such arguments.

    Args:
      f: a function, jitted or not, with `jax.shard_map` inside, over a mesh of devices or over a
        `jax.sharding.AbstractMesh`.
      *args: what it is called with: arrays, or their shapes (`jax.ShapeDtypeStruct`), in pytrees.
      **kwargs: what it is called with by name.

    Returns:
      The explanation. `print` shows a table; `to_dict` and `to_json` give the numbers.

    Raises:
      TypeError: if f is not a function, or an argument of a function that is not jitted has a leaf
        that is no array.
      Exception: what f raises.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ring
      >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
      >>> from jax_ring.explanation import explain
      >>> mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
      >>> total = jax.shard_map(
      ...     lambda x: jax_ring.psum(x, "data", algorithm="ring"),
      ...     mesh=mesh, in_specs=P("data"), out_specs=P(),
      ... )
      >>> found = explain(total, jax.ShapeDtypeStruct((8, 2**18), jnp.float32))
      >>> psum = found.collectives[0]  # of 1 MiB on each rank
      >>> psum.algorithm, psum.steps, psum.bytes_sent == 2 * 7 / 8 * 2**20
      ('ring', 14, True)
    """
    if not callable(f):
        raise TypeError(f"jax_ring.explain: f must be a function, got {f!r}")
    closed = _traced(f, args, kwargs)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    found, totals = _walk(jaxpr, _Scope(jax.sharding.get_abstract_mesh()))
    return Explanation(tuple(found), totals)


def _traced(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ClosedJaxpr:
    if isinstance(f, jax.stages.Wrapped):
        traced: ClosedJaxpr = f.trace(*args, **kwargs).jaxpr
        return traced
    for leaf in jax.tree.leaves((args, kwargs)):
        if not isinstance(leaf, (bool, int, float, complex)) and not hasattr(leaf, "dtype"):
            raise TypeError(
                "jax_ring.explain: arguments of f must be arrays, their shapes "
                f"(jax.ShapeDtypeStruct) or pytrees of them, got {leaf!r}; fix others with "
                "functools.partial"
            )
    # A new function each time, or JAX might have traced it under other settings before.
    made: ClosedJaxpr = jax.make_jaxpr(lambda *a, **k: f(*a, **k))(*args, **kwargs)
    return made


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Where an equation is.

    Attributes:
      mesh: the abstract mesh in force, with its manual axes.
      times: how often the equation runs, or None.
      nesting: the loops and branches around it.
      names: the name stacks around it.
    """

    mesh: Any
    times: int | None = 1
    nesting: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def at(self, eqn: JaxprEqn) -> _Scope:
        """The scope of an equation, and of what is in it."""
        name = str(eqn.source_info.name_stack)
        return dataclasses.replace(self, names=(*self.names, name)) if name else self

    def inside(self, what: str, times: int | None) -> _Scope:
        """The scope in a loop or branch."""
        total = None if self.times is None or times is None else self.times * times
        return dataclasses.replace(self, times=total, nesting=(*self.nesting, what))


_Found = tuple[list[Collective], Totals]


def _walk(jaxpr: Jaxpr | ClosedJaxpr, scope: _Scope) -> _Found:
    """The collectives of a jaxpr and of all that is nested in it."""
    return _one_after_the_other(
        _of_equation(eqn, scope.at(eqn)) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def _of_equation(eqn: JaxprEqn, scope: _Scope) -> _Found:
    own = [*_ring_collectives(eqn, scope), *_lax_collectives(eqn, scope)]
    return _one_after_the_other([(own, _sum(map(_totals_of, own))), _nested(eqn, scope)])


def _nested(eqn: JaxprEqn, scope: _Scope) -> _Found:
    """The collectives of the jaxprs that are parameters of an equation."""
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map":
        return _walk(params["jaxpr"], dataclasses.replace(scope, mesh=_compat.mesh_inside(eqn)))
    if name == "scan":
        length: int = params["length"]
        found, totals = _walk(params["jaxpr"], scope.inside(f"scan of {length}", length))
        return found, _repeated(totals, length)
    if name == "while":
        parts = [
            _walk(params[f"{part}_jaxpr"], scope.inside(f"while {part}", None))
            for part in ("cond", "body")
        ]
        found, totals = _one_after_the_other(parts)
        return found, dataclasses.replace(totals, exact=totals.exact and not found)
    if name == "cond":
        count = len(params["branches"])
        return _one_of(
            _walk(branch, scope.inside(f"branch {i} of {count}", 1))
            for i, branch in enumerate(params["branches"])
        )
    if name == "custom_linear_solve":  # Its other jaxprs are for derivatives.
        return _walk(params["jaxprs"].solve, scope)
    return _one_after_the_other(_walk(jaxpr, scope) for jaxpr in _jaxprs(params.values()))


def _jaxprs(values: Iterable[Any]) -> Iterator[Jaxpr | ClosedJaxpr]:
    for value in values:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _jaxprs(value)


def _one_after_the_other(parts: Iterable[_Found]) -> _Found:
    every = list(parts)
    return [c for found, _ in every for c in found], _sum(totals for _, totals in every)


def _one_of(parts: Iterable[_Found]) -> _Found:
    every = list(parts)
    totals = [totals for _, totals in every]
    costliest = Totals(
        steps=max(t.steps for t in totals),
        bytes_sent=max(t.bytes_sent for t in totals),
        seconds=max(t.seconds for t in totals),
        exact=all(t.exact and t == totals[0] for t in totals),
    )
    return [c for found, _ in every for c in found], costliest


def _sum(parts: Iterable[Totals]) -> Totals:
    every = list(parts)
    return Totals(
        steps=sum(part.steps for part in every),
        bytes_sent=sum(part.bytes_sent for part in every),
        seconds=sum(part.seconds for part in every),
        exact=all(part.exact for part in every),
    )


def _repeated(totals: Totals, times: int) -> Totals:
    return dataclasses.replace(
        totals,
        steps=totals.steps * times,
        bytes_sent=totals.bytes_sent * times,
        seconds=totals.seconds * times,
    )


def _totals_of(collective: Collective) -> Totals:
    """Those of one execution."""
    if collective.algorithm == _XLA:
        return Totals(exact=False)
    return Totals(collective.steps or 0, collective.bytes_sent or 0, collective.seconds or 0.0)


# --- one collective -------------------------------------------------------------------------------


def _ring_collectives(eqn: JaxprEqn, scope: _Scope) -> Iterator[Collective]:
    """Those of jax_ring: one for each size of group."""
    kind = primitives.KINDS.get(eqn.primitive)
    axes = _mesh_axes(eqn.params["axes"], scope) if kind is not None else ()
    if kind is None or not axes:
        return
    params, operand = eqn.params, _operand(eqn)
    method = params["method"]
    reduce_dtype = params.get("reduce_dtype", operand.dtype)
    for ranks, groups in _sizes(axes, params.get("groups"), scope):
        schedule = method.schedule(kind, ranks)
        with jax.sharding.use_abstract_mesh(scope.mesh):
            costs = _costs(eqn, schedule, method.wire, reduce_dtype)
        yield dataclasses.replace(
            _common(eqn, scope, operand, axes, ranks, groups),
            name=primitives.name_of(eqn.primitive, eqn.params),
            reduce_dtype=None if kind is Kind.ALL_GATHER else str(reduce_dtype),
            wire=None if method.wire is None else method.wire.name,
            algorithm=schedule.name,
            reason=method.reason,
            chunks=schedule.chunks,
            channels=schedule.channels,
            **costs,
        )


def _lax_collectives(eqn: JaxprEqn, scope: _Scope) -> Iterator[Collective]:
    """Those of lax: one for each operand."""
    axes = _mesh_axes(eqn.params.get("axes", eqn.params.get("axis_name", ())), scope)
    if _started(eqn) not in _LAX_NAMES or not axes:
        return
    asked_for = xla.asked_for("/".join(scope.names))
    groups = eqn.params.get("axis_index_groups")
    groups = None if groups is None else tuple(tuple(map(int, group)) for group in groups)
    for ranks, of_size in _sizes(axes, groups, scope):
        for operand in eqn.invars:
            common = _common(eqn, scope, operand.aval, axes, ranks, of_size)
            yield dataclasses.replace(
                common,
                name=_lax_name(eqn, asked_for),
                algorithm=_XLA,
                reason=_why_lax(asked_for, common.backward),
            )


def _operand(eqn: JaxprEqn) -> Any:
    """The type of the array that is communicated; a seed may follow it."""
    return eqn.invars[0].aval


def _mesh_axes(names: Any, scope: _Scope) -> tuple[str, ...]:
    """The axes, if they are manual axes of a mesh."""
    axes = arguments.names_of(names)
    return axes if set(axes) <= set(scope.mesh.manual_axes) else ()


def _sizes(
    axes: tuple[str, ...], groups: Groups | None, scope: _Scope
) -> list[tuple[int, Groups | None]]:
    """The sizes of groups, and the groups of each."""
    if groups is None:
        return [(math.prod(scope.mesh.shape[axis] for axis in axes), None)]
    sizes = dict.fromkeys(map(len, groups))
    return [(size, tuple(group for group in groups if len(group) == size)) for size in sizes]


def _common(
    eqn: JaxprEqn,
    scope: _Scope,
    operand: Any,
    axes: tuple[str, ...],
    ranks: int,
    groups: Groups | None,
) -> Collective:
    """What is known of every collective; the rest is for the caller to fill in."""
    file, line = callers.place(eqn.source_info.traceback)
    names = "/".join(scope.names)
    return Collective(
        name="",
        file=file,
        line=line,
        scope=names,
        backward="transpose(" in names,
        nesting=scope.nesting,
        times=scope.times,
        axes=tuple(map(str, axes)),
        ranks=ranks,
        groups=groups,
        shape=tuple(map(int, operand.shape)),
        dtype=str(operand.dtype),
        nbytes=int(operand.size) * operand.dtype.itemsize,
        reduce_dtype=None,
        wire=None,
        algorithm="",
        reason="",
    )


def _lax_name(eqn: JaxprEqn, asked_for: str | None) -> str:
    """The public function that calls lax's own: lax's, or that of jax_ring that was asked for it.

    A mean is a sum by lax, and then divided.
    """
    name = _LAX_NAMES[_started(eqn)]
    mean = {"psum": "pmean", "psum_scatter": "reduce_scatter_mean"}.get(name)
    within = {asked_for, *callers.functions_of_jax(eqn.source_info.traceback)}
    return mean if mean is not None and mean in within else name


def _started(eqn: JaxprEqn) -> str:
    """The name of a primitive; where lax has one that starts it, that of the whole."""
    return str(eqn.primitive.name).removesuffix("_start")


# --- what it sends --------------------------------------------------------------------------------

_Bytes = tuple[int, int, int]  # Of a chunk that is a contribution, that is a sum, that is copied.


def _costs(
    eqn: JaxprEqn, schedule: Schedule, wire: WireFormat | None, reduce_dtype: Any
) -> dict[str, Any]:
    """The fields of a `Collective` that the schedule decides, in the mesh in force."""
    if schedule.ranks == 1 or not _operand(eqn).size:
        return {"steps": 0, "bytes_sent": 0, "bytes_per_link": 0, "seconds": 0.0}
    chunk = _chunk_bytes(eqn, schedule, wire, reduce_dtype)
    sent, over_link = _traffic(schedule, chunk)
    # As it travels: on average over chunks of different types.
    buffer = sent * schedule.chunks / int(schedule.sent_chunks().max())
    predicted = _predicted(schedule, buffer, eqn.params["axes"])
    known = {"steps": schedule.rounds, "bytes_sent": sent, "bytes_per_link": over_link}
    return known | predicted


def _predicted(schedule: Schedule, nbytes: float, axes: tuple[str, ...]) -> dict[str, Any]:
    """The seconds for a buffer of nbytes, and the links: those that "auto" reckons with."""
    levels = schedule.name == "hierarchical" and len(axes) > 1
    mesh = jax.sharding.get_abstract_mesh()
    prices = arguments.prices_in_force(mesh.shape[axes[-1]] if levels else 1)
    seconds = choose.predict(
        schedule, nbytes, prices.link, across=prices.across, inner=prices.inner
    )
    return {"link": prices.name, "seconds": seconds}


def _chunk_bytes(
    eqn: JaxprEqn, schedule: Schedule, wire: WireFormat | None, reduce_dtype: Any
) -> _Bytes:
    """The bytes of a chunk on its way, as the executor sends it."""
    chunk = _chunk(eqn, schedule)
    elements = math.prod(chunk)
    if wire is not None:
        message = _message_bytes(chunk, wire)
        return message, message, message
    narrow, wide = _operand(eqn).dtype.itemsize, reduce_dtype.itemsize
    if schedule.kind is Kind.ALL_GATHER or narrow == wide:
        return (narrow * elements,) * 3
    copied = wide if plan(schedule).widened else narrow
    return narrow * elements, wide * elements, copied * elements


def _message_bytes(chunk: tuple[int, ...], wire: WireFormat) -> int:
    """The bytes of a chunk over a wire; where the compiler may shard it, it is several rows."""
    shards = layout.left_to_compiler()
    n = math.prod(chunk) if shards == 1 else max(chunk, default=1)
    if shards > 1 and isinstance(wire, Blocks):
        wire = wire.within(n, shards)
    return math.prod(chunk) // n * wire.nbytes(n)


def _chunk(eqn: JaxprEqn, schedule: Schedule) -> tuple[int, ...]:
    """The shape of a chunk."""
    operand = _operand(eqn)
    if schedule.kind is Kind.ALL_GATHER:
        return tuple(operand.shape)
    if schedule.kind is Kind.REDUCE_SCATTER:
        result: Any = eqn.outvars[0].aval
        return tuple(result.shape)
    made: list[layout.Layout] = []
    struct = jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=operand.sharding)
    jax.eval_shape(lambda x: made.append(layout.choose(x, schedule.chunks)), struct)
    (whole,) = made
    return (*whole.shape[: whole.axis], whole.block, *whole.shape[whole.axis + 1 :])


def _traffic(schedule: Schedule, chunk: _Bytes) -> tuple[int, int]:
    """The bytes that the busiest rank sends, and those over the busiest link."""
    sent, links = _chunks_sent(schedule, len(set(chunk)) > 1)
    return int((np.array(chunk) @ sent).max()), int((np.array(chunk) @ links).max())


@functools.lru_cache(maxsize=256)
def _chunks_sent(
    schedule: Schedule, apart: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many chunks each rank sends, [3, ranks], and how many go over each link, [3, links].

    Args:
      schedule: of more than one rank.
      apart: whether contributions, sums and copies are told apart; else all count as the first.
        That needs the plan, which takes long for many ranks.
    """
    sent = np.zeros((3, schedule.ranks), np.int64)
    keys, sorts, counts = [], [], []
    for step, count, sort in _moves(schedule, apart):
        if step.perm:
            pairs = np.array(step.perm)
            sent[sort, pairs[:, 0]] += count * step.k
            keys.append(pairs @ [schedule.ranks, 1])
            sorts.append(np.full(len(pairs), sort))
            counts.append(np.full(len(pairs), count * step.k))
    links, index = np.unique(np.concatenate(keys), return_inverse=True)
    over = np.zeros((3, len(links)), np.int64)
    np.add.at(over, (np.concatenate(sorts), index), np.concatenate(counts))
    return sent, over


def _moves(schedule: Schedule, apart: bool) -> Iterator[tuple[Step, int, int]]:
    """Steps, how many like them follow one another, and what they send: an index of `_Bytes`."""
    if not apart:
        for run in schedule.steps.runs:
            yield run.first, run.count, 0
        return
    for segment in plan(schedule).segments:
        reduces = 0 if segment.traits.raw else 1
        yield segment.first, segment.count, reduces if segment.first.op is Op.REDUCE else 2


def _why_lax(asked_for: str | None, backward: bool) -> str:
    if asked_for is not None:
        return "algorithm='xla' was asked for, or chosen by 'auto'"
    if backward:
        return "the derivative of a cast to varying, or of lax's own"
    return "lax's own is called"


# --- the text -------------------------------------------------------------------------------------
# rich is imported where it is used: only who prints an explanation waits for it.


def _table(collectives: tuple[Collective, ...], reasons: list[str]) -> RichTable:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.HORIZONTALS, pad_edge=False, collapse_padding=True, show_lines=True)
    table.add_column("where", overflow="fold", min_width=min(_WHERE, max(map(_width, collectives))))
    for title in ("collective", "on each rank", "algorithm"):
        table.add_column(title, overflow="fold", min_width=14)
    for title in ("steps\ntime", "sent: rank\nlink"):
        table.add_column(title, justify="right", no_wrap=True)
    for collective in collectives:
        table.add_row(*(Text("\n".join(lines)) for lines in _cells(collective, reasons)))
    return table


def _cells(c: Collective, reasons: list[str]) -> Iterator[list[str]]:
    """The lines of each cell of a row."""
    yield [_where(c), *c.nesting, *(["backward pass"] if c.backward else [])]
    ranks = f"{c.ranks} ranks" if c.groups is None else f"groups of {c.ranks} ranks"
    yield [c.name, f"over {', '.join(c.axes)}", ranks]
    sums = [] if c.reduce_dtype in (None, c.dtype) else [f"sums in {c.reduce_dtype}"]
    wire = [] if c.wire is None else [f"wire {c.wire}"]
    yield [f"{c.dtype}[{','.join(map(str, c.shape))}]", _size(c.nbytes), *sums, *wire]
    channels = [] if c.channels in (None, 0, 1) else [f"{c.channels} channels"]
    yield [c.algorithm, *channels, *([f"[{reasons.index(c.reason) + 1}]"] if c.reason else [])]
    time = [] if c.seconds is None else [_duration(c.seconds)]
    yield ["?"] if c.steps is None else [str(c.steps), *time]
    yield [_size(n) for n in (c.bytes_sent, c.bytes_per_link) if n is not None] or ["?"]


def _where(c: Collective) -> str:
    return f"{os.path.basename(c.file)}:{c.line}" if c.file else "?"


def _width(c: Collective) -> int:
    return len(_where(c))


def _reasons(collectives: Iterable[Collective]) -> list[str]:
    """The reasons, each once."""
    return list(dict.fromkeys(c.reason for c in collectives if c.reason))


def _summary(explanation: Explanation) -> Iterator[str]:
    collectives, totals = explanation.collectives, explanation.totals
    if not collectives:
        yield "no collectives (over an axis of jax.vmap nothing is communicated)"
        return
    yield from (f"[{i}] {reason}" for i, reason in enumerate(_reasons(collectives), 1))
    lax = sum(c.algorithm == _XLA for c in collectives)
    yield f"{len(collectives) - lax} of jax_ring, {lax} of lax"
    links = ", ".join(dict.fromkeys(c.link for c in collectives if c.link is not None))
    yield (
        f"all in one call: {totals.steps} steps, {_size(totals.bytes_sent)} sent by a rank, "
        f"{_duration(totals.seconds)} predicted{links and f' (links: {links})'}"
    )
    if lax:
        yield "  not counted: what lax's own collectives send"
    if any(c.times is None for c in collectives):
        yield "  counted once: each while loop"
    if any(part.startswith("branch ") for c in collectives for part in c.nesting):
        yield "  of branches that exclude each other: the costliest"


def _size(nbytes: int) -> str:
    """The bytes, in a unit in which they are less than 1024.

    Example:
      >>> _size(1000), _size(1835008)
      ('1000 B', '1.75 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.2f} {units[power]}"


def _duration(seconds: float) -> str:
    """The time, in a unit in which it is at least 1.

    Example:
      >>> _duration(1.5), _duration(0.0000123)
      ('1.50 s', '12.30 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-9:.2f} ns"
