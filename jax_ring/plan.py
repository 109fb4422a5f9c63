"""How a schedule is executed, decided once from its tables. No JAX.

For each step: whether it forwards the value that the step before produced or loads from the buffer,
whether what it produces is stored, and whether that is finished. Steps that are alike in all of
these form a segment, which may become a loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from jax_ring.schedules import Kind, Op, Schedule, Step
from jax_ring.schedules.schedule import Table


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one run that execute alike.

    Attributes:
      first: the first step.
      count: how many steps.
      advance: what the chunk indices of each next step are ahead.
      start: the index of the first step in the schedule.
      load_first: whether the first step sends chunks from the buffer; otherwise it forwards the
        value that the step before produced.
      load_rest: the same for all steps after the first.
      store: whether what the steps produce is written to the buffer.
      finishes: whether the steps complete the sums that they add to.
    """

    first: Step
    count: int
    advance: int
    start: int
    load_first: bool
    load_rest: bool
    store: bool
    finishes: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a schedule is executed.

    Attributes:
      segments: the steps, in order.
      widened: whether the buffer or a COPY holds partial sums on the way. The buffer then has the
        type of the sums, and all of it is finished at the end; otherwise each chunk is finished by
        the step that completes it, and only finished chunks are stored and copied.
      result_is_last_value: whether what the last step produces is a reduce-scatter's result.
    """

    segments: tuple[Segment, ...]
    widened: bool
    result_is_last_value: bool


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
    forwards = [_forwards(steps, i) for i in range(len(steps))]
    if schedule.kind is Kind.ALL_GATHER and steps:
        # A rank starts with its own chunk in hand.
        forwards[0] = _same_chunks(steps[0], steps[0].send, own_chunks(schedule))
    last_value = (
        schedule.kind is Kind.REDUCE_SCATTER
        and bool(steps)
        and len(steps[-1].perm) == schedule.ranks
        and np.array_equal(steps[-1].recv, own_chunks(schedule))
    )
    stores = _stores(schedule, steps, forwards, last_value)
    complete = _complete(schedule, steps)
    widened = any(
        not complete[i] and (step.op is Op.COPY or stores[i]) for i, step in enumerate(steps)
    )
    finishes = [
        complete[i] and step.op is Op.REDUCE and not widened for i, step in enumerate(steps)
    ]
    traits = list(zip(forwards, stores, finishes, strict=True))
    return Plan(tuple(_segments(schedule, traits)), widened, last_value)


def own_chunks(schedule: Schedule) -> Table:
    """The chunks that each rank owns in a reduce-scatter or an all-gather."""
    per_rank = schedule.chunks // schedule.ranks
    return np.arange(schedule.ranks * per_rank, dtype=np.int64).reshape(schedule.ranks, per_rank)


def _same_chunks(step: Step, wanted: Table, held: Table) -> bool:
    sources = [source for source, _ in step.perm]
    return np.array_equal(wanted[sources], held[sources])


def _forwards(steps: list[Step], i: int) -> bool:
    """Whether all that step i sends is just what step i-1 produced on the sending ranks."""
    if i == 0:
        return False
    produced = {target for _, target in steps[i - 1].perm}
    return all(source in produced for source, _ in steps[i].perm) and _same_chunks(
        steps[i], steps[i].send, steps[i - 1].recv
    )


def _stores(
    schedule: Schedule, steps: list[Step], forwards: list[bool], last_value: bool
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
        sources, targets = np.array(step.perm, int).reshape(-1, 2).T
        written = (targets[:, None], step.recv[targets])
        stores[i] = bool(live[written].any())
        live[written] = step.op is Op.REDUCE  # which reads the local chunk first
        if not forwards[i]:
            live[sources[:, None], step.send[sources]] = True
    return stores


def _complete(schedule: Schedule, steps: list[Step]) -> list[bool]:
    """Whether all that each step produces holds the contributions of all ranks.

    Contributions are bit masks: in a schedule that `verify` accepts, a union is a sum.
    """
    if schedule.kind is Kind.ALL_GATHER:
        return [True] * len(steps)
    everyone = (1 << schedule.ranks) - 1
    held = [[1 << rank] * schedule.chunks for rank in range(schedule.ranks)]
    complete = []
    for step in steps:
        send, recv = step.send.tolist(), step.recv.tolist()
        arrived = [
            (target, into, held[source][chunk])
            for source, target in step.perm
            for chunk, into in zip(send[source], recv[target], strict=True)
        ]
        for target, into, mask in arrived:
            held[target][into] = mask | (held[target][into] if step.op is Op.REDUCE else 0)
        complete.append(all(held[target][into] == everyone for target, into, _ in arrived))
    return complete


def _segments(schedule: Schedule, traits: list[tuple[bool, bool, bool]]) -> Iterator[Segment]:
    """Cuts runs where a trait (forwards, stores, finishes) changes; the first may load instead."""
    begin = 0
    for run in schedule.steps.runs:
        end = begin + run.count
        start = begin
        while start < end:
            second = traits[min(start + 1, end - 1)]
            stop = start + 1
            while stop < end and traits[stop] == second and second[1:] == traits[start][1:]:
                stop += 1
            forwards, store, finishes = traits[start]
            yield Segment(
                first=run.first.advanced((start - begin) * run.advance, schedule.chunks),
                count=stop - start,
                advance=run.advance,
                start=start,
                load_first=not forwards,
                load_rest=stop > start + 1 and not second[0],
                store=store,
                finishes=finishes,
            )
            start = stop
        begin = end
