"""How a schedule is executed, decided once from its tables. No JAX.

For each step: where what it sends comes from, what it reduces into, whether what it produces is
stored, and whether that is finished. Steps that are alike in all of these form a segment, which may
become a loop.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator

import numpy as np

from jax_ring.schedules import Kind, Op, Schedule, Step
from jax_ring.schedules.schedule import Table


class Source(enum.Enum):
    """Where the chunks that a step sends come from."""

    LOAD = "load"  # The buffer.
    FORWARD = "forward"  # What the step before produced.
    RESEND = "resend"  # What the step before sent.


@dataclasses.dataclass(frozen=True)
class Traits:
    """How a step executes.

    Attributes:
      source: where what it sends comes from.
      raw: whether all that it and the steps of its run send are contributions not yet reduced.
      accumulates: whether it reduces into what the step before produced, not into the buffer.
      store: whether what it produces is written to the buffer.
      finishes: whether it completes the sums that it adds to.
      forwarded: whether it reduces, and the next step sends just what it produces.
    """

    source: Source
    raw: bool
    accumulates: bool
    store: bool
    finishes: bool
    forwarded: bool

    def alike(self, other: Traits) -> bool:
        """Whether both are equal but for their source."""
        return dataclasses.replace(self, source=other.source) == other


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one run that execute alike.

    Attributes:
      first: the first step.
      count: how many steps.
      advance: what the chunk indices of each next step are ahead.
      start: the index of the first step in the schedule.
      traits: how they execute; its source is the first step's.
      rest: the source of all steps after the first.
    """

    first: Step
    count: int
    advance: int
    start: int
    traits: Traits
    rest: Source


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a schedule is executed.

    Attributes:
      segments: the steps, in order.
      widened: whether the buffer or a COPY holds partial sums on the way. The buffer then has the
        type of the sums, and all of it is finished at the end; otherwise each chunk is finished by
        the step that completes it, and only finished chunks are stored and copied.
      result_is_last_value: whether what the last step produces is a reduce-scatter's result.
      partials_travel: whether any partial sum is ever sent.
      redundant: whether some sum is completed by more than one rank.
      reencodes: whether a finished chunk is copied by a rank that holds only its value, and not
        the message that all others read it from.
    """

    segments: tuple[Segment, ...]
    widened: bool
    result_is_last_value: bool
    partials_travel: bool
    redundant: bool
    reencodes: bool


@functools.lru_cache(maxsize=256)
def plan(schedule: Schedule) -> Plan:
    """Plans the execution of a schedule.

    Complexity: O(ranks x steps x k) operations, once; a ring of 512 ranks takes about a second.

    Args:
      schedule: a schedule that `verify` accepts.

    Returns:
      The plan, cached.
    """
    steps = list(schedule.steps)
    sources = _sources(schedule, steps)
    accumulates = [_accumulates(steps, i) for i in range(len(steps))]
    last_value = (
        schedule.kind is Kind.REDUCE_SCATTER
        and bool(steps)
        and len(steps[-1].perm) == schedule.ranks
        and np.array_equal(steps[-1].recv, own_chunks(schedule))
    )
    stores = _stores(schedule, steps, sources, accumulates, last_value)
    sums = _follow(schedule, steps)
    complete, raw = sums.complete, _in_whole_runs(schedule, sums.raw)
    widened = any(
        not complete[i] and (step.op is Op.COPY or stores[i]) for i, step in enumerate(steps)
    )
    after = [*zip(sources, accumulates, strict=True), (Source.LOAD, False)]
    traits = [
        Traits(
            source=sources[i],
            raw=raw[i],
            accumulates=accumulates[i],
            store=stores[i],
            finishes=complete[i] and step.op is Op.REDUCE and not widened,
            forwarded=step.op is Op.REDUCE and after[i + 1] == (Source.FORWARD, False),
        )
        for i, step in enumerate(steps)
    ]
    copies = [i for i, step in enumerate(steps) if step.op is Op.COPY]
    return Plan(
        segments=tuple(_segments(schedule, traits)),
        widened=widened,
        result_is_last_value=last_value,
        partials_travel=any(
            not raw[i] for i, step in enumerate(steps) if step.op is Op.REDUCE or not complete[i]
        ),
        redundant=sums.redundant,
        reencodes=any(
            complete[i] and (sources[i] is Source.LOAD or sums.redundant) for i in copies
        ),
    )


def own_chunks(schedule: Schedule) -> Table:
    """The chunks that each rank owns in a reduce-scatter or an all-gather."""
    per_rank = schedule.chunks // schedule.ranks
    return np.arange(schedule.ranks * per_rank, dtype=np.int64).reshape(schedule.ranks, per_rank)


def _same_chunks(step: Step, wanted: Table, held: Table) -> bool:
    sources = [source for source, _ in step.perm]
    return np.array_equal(wanted[sources], held[sources])


def _sources(schedule: Schedule, steps: list[Step]) -> list[Source]:
    """Where each step gets what it sends."""
    alone = [run.count == 1 for run in schedule.steps.runs for _ in range(run.count)]
    sources = []
    for i in range(len(steps)):
        if _forwards(steps, i):
            sources.append(Source.FORWARD)
        elif i and alone[i] and alone[i - 1] and _resends(steps[i - 1], steps[i]):
            sources.append(Source.RESEND)
        else:
            sources.append(Source.LOAD)
    gathers = schedule.kind is Kind.ALL_GATHER and bool(steps)
    if gathers and _same_chunks(steps[0], steps[0].send, own_chunks(schedule)):
        sources[0] = Source.FORWARD  # A rank starts with its own chunk in hand.
    return sources


def _forwards(steps: list[Step], i: int) -> bool:
    """Whether all that step i sends is just what step i-1 produced on the sending ranks."""
    if i == 0:
        return False
    produced = {target for _, target in steps[i - 1].perm}
    return all(source in produced for source, _ in steps[i].perm) and _same_chunks(
        steps[i], steps[i].send, steps[i - 1].recv
    )


def _resends(before: Step, step: Step) -> bool:
    """Whether all that a step sends is just what the step before sent, and it still holds."""
    sent = {source for source, _ in before.perm}
    written = {target: set(before.recv[target].tolist()) for _, target in before.perm}
    return (
        step.op is before.op
        and all(source in sent for source, _ in step.perm)
        and _same_chunks(step, step.send, before.send)
        and not any(written.get(s, set()) & set(step.send[s].tolist()) for s, _ in step.perm)
    )


def _accumulates(steps: list[Step], i: int) -> bool:
    """Whether step i reduces into just what step i-1 produced by a reduction."""
    if i == 0 or steps[i].op is not Op.REDUCE or steps[i - 1].op is not Op.REDUCE:
        return False
    produced = {target for _, target in steps[i - 1].perm}
    targets = [target for _, target in steps[i].perm]
    return produced.issuperset(targets) and np.array_equal(
        steps[i].recv[targets], steps[i - 1].recv[targets]
    )


def _stores(
    schedule: Schedule,
    steps: list[Step],
    sources: list[Source],
    accumulates: list[bool],
    last_value: bool,
) -> list[bool]:
    """Walks the steps backwards: what is read from the buffer later on must be stored."""
    live = np.zeros((schedule.ranks, schedule.chunks), bool)
    if schedule.kind is not Kind.REDUCE_SCATTER:
        live[:] = True
    elif not last_value:
        np.put_along_axis(live, own_chunks(schedule), True, axis=1)
    stores = [False] * len(steps)
    for i in reversed(range(len(steps))):
        step = steps[i]
        senders, targets = np.array(step.perm, int).reshape(-1, 2).T
        written = (targets[:, None], step.recv[targets])
        stores[i] = bool(live[written].any())
        # A reduction reads the local chunk first.
        live[written] = step.op is Op.REDUCE and not accumulates[i]
        if sources[i] is Source.LOAD:
            live[senders[:, None], step.send[senders]] = True
    return stores


def _in_whole_runs(schedule: Schedule, trait: list[bool]) -> list[bool]:
    """The trait where all steps of a run have it, so that it cuts none."""
    result: list[bool] = []
    for run in schedule.steps.runs:
        part = trait[len(result) : len(result) + run.count]
        result += [all(part)] * run.count
    return result


@dataclasses.dataclass(frozen=True)
class _Sums:
    """What the chunks hold, followed through the steps.

    Attributes:
      complete: for each step, whether all that it produces are contributions of all ranks.
      raw: for each step, whether all that it sends are contributions of one rank.
      redundant: whether more than one rank completes some chunk by a reduction.
    """

    complete: list[bool]
    raw: list[bool]
    redundant: bool


def _follow(schedule: Schedule, steps: list[Step]) -> _Sums:
    """Follows the contributions as bit masks: where `verify` accepts, a union is a sum."""
    if schedule.kind is Kind.ALL_GATHER:
        return _Sums([True] * len(steps), [False] * len(steps), False)
    everyone = (1 << schedule.ranks) - 1
    held = [[1 << rank] * schedule.chunks for rank in range(schedule.ranks)]
    complete, raw, completions = [], [], [0] * schedule.chunks
    for step in steps:
        send, recv = step.send.tolist(), step.recv.tolist()
        arrived = [
            (target, into, held[source][chunk])
            for source, target in step.perm
            for chunk, into in zip(send[source], recv[target], strict=True)
        ]
        raw.append(all(mask & (mask - 1) == 0 for _, _, mask in arrived))
        for target, into, mask in arrived:
            reduces = step.op is Op.REDUCE
            held[target][into] = mask | (held[target][into] if reduces else 0)
            completions[into] += reduces and held[target][into] == everyone
        complete.append(all(held[target][into] == everyone for target, into, _ in arrived))
    return _Sums(complete, raw, any(count > 1 for count in completions))


def _segments(schedule: Schedule, traits: list[Traits]) -> Iterator[Segment]:
    """Cuts runs where a trait changes; only the first step's source may differ from the rest's."""
    begin = 0
    for run in schedule.steps.runs:
        end = begin + run.count
        start = begin
        while start < end:
            second = traits[min(start + 1, end - 1)]
            stop = start + 1
            while stop < end and traits[stop] == second and second.alike(traits[start]):
                stop += 1
            yield Segment(
                first=run.first.advanced((start - begin) * run.advance, schedule.chunks),
                count=stop - start,
                advance=run.advance,
                start=start,
                traits=traits[start],
                rest=second.source if stop > start + 1 else traits[start].source,
            )
            start = stop
        begin = end
