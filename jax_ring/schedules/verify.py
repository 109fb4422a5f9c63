"""Proves a schedule by symbolic execution: no data, no devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jax_ring.schedules.schedule import Kind, Op, Schedule, ScheduleError, Step


@dataclasses.dataclass(frozen=True)
class _Value:
    """What a chunk holds: data of which chunk, whose contributions (a bit mask), which expression.

    Two values with the same expression number have the same bits for any commutative operation,
    because they are the same tree of pairwise reductions.
    """

    chunk: int
    ranks: int
    expression: int


_Chunks = list[list[_Value | None]]


class _Machine:
    """The chunks of all ranks, executed one step at a time."""

    def __init__(self, schedule: Schedule, *, by_rank_alone: bool) -> None:
        self.schedule = schedule
        self.by_rank_alone = by_rank_alone  # Contributions of a rank to all chunks look alike.
        self.expressions: dict[tuple[int, int], int] = {}
        self.state: _Chunks = [
            [self._initial(rank, chunk) for chunk in range(schedule.chunks)]
            for rank in range(schedule.ranks)
        ]
        # The step that last wrote each chunk, to name where a missing contribution was lost.
        self.written: dict[tuple[int, int], int] = {}

    def _initial(self, rank: int, chunk: int) -> _Value | None:
        if self.schedule.kind is Kind.ALL_GATHER:
            owner = chunk * self.schedule.ranks // self.schedule.chunks
            return _Value(chunk, 1 << rank, -1 - chunk) if owner == rank else None
        place = rank if self.by_rank_alone else rank * self.schedule.chunks + chunk
        return _Value(chunk, 1 << rank, -1 - place)

    def run(self, steps: list[tuple[int, Step]]) -> None:
        """Executes a round: all sends read what was there before it."""
        for index, step in steps:
            _check_shape(self.schedule, index, step)
        arrivals = [self._sent(step) for _, step in steps]
        for (index, step), arrived in zip(steps, arrivals, strict=True):
            self._receive(index, step, arrived)

    def _sent(self, step: Step) -> list[tuple[int, int, int, _Value | None]]:
        """The source, target, slot and value of each chunk that a step sends."""
        return [
            (source, target, slot, self.state[source][int(step.send[source, slot])])
            for source, target in step.perm
            for slot in range(step.k)
        ]

    def _receive(
        self, index: int, step: Step, arrived: list[tuple[int, int, int, _Value | None]]
    ) -> None:
        for source, target, slot, value in arrived:
            chunk = int(step.recv[target, slot])
            if value is None:
                sent = int(step.send[source, slot])
                raise ScheduleError(
                    f"step {index}: rank {source} sends chunk {sent}, which it does not hold yet",
                    step=index,
                    rank=source,
                    chunk=sent,
                )
            if step.op is Op.REDUCE:
                value = self._reduce(index, target, chunk, value)
            self.state[target][chunk] = value
            self.written[target, chunk] = index

    def _reduce(self, index: int, rank: int, chunk: int, arrived: _Value) -> _Value:
        local = self.state[rank][chunk]
        where = f"step {index}: rank {rank}, chunk {chunk}"
        if local is None:
            raise ScheduleError(
                f"{where}: reduces into a chunk that it does not hold",
                step=index,
                rank=rank,
                chunk=chunk,
            )
        if arrived.chunk != local.chunk:
            raise ScheduleError(
                f"{where}: data of chunk {arrived.chunk} is reduced into data of chunk "
                f"{local.chunk}",
                step=index,
                rank=rank,
                chunk=chunk,
            )
        twice = arrived.ranks & local.ranks
        if twice:
            raise ScheduleError(
                f"{where}: contributions of ranks {_members(twice)} are counted twice",
                step=index,
                rank=rank,
                chunk=chunk,
            )
        low, high = sorted((arrived.expression, local.expression))
        expression = self.expressions.setdefault((low, high), len(self.expressions))
        return _Value(local.chunk, arrived.ranks | local.ranks, expression)

    def check_result(self) -> None:
        """Checks what every rank must hold after the last step."""
        for chunk in range(self.schedule.chunks):
            holders = list(self._holders(chunk))
            for rank in holders:
                self._check_complete(rank, chunk)
            reference = self.state[holders[0]][chunk]
            for rank in holders:
                if self.state[rank][chunk] != reference:
                    raise ScheduleError(
                        f"chunk {chunk}: ranks {holders[0]} and {rank} reduce it in different "
                        "orders, so their results differ in bits",
                        step=self.written.get((rank, chunk)),
                        rank=rank,
                        chunk=chunk,
                    )

    def _holders(self, chunk: int) -> Iterable[int]:
        if self.schedule.kind is Kind.REDUCE_SCATTER:
            return [chunk * self.schedule.ranks // self.schedule.chunks]
        return range(self.schedule.ranks)

    def _check_complete(self, rank: int, chunk: int) -> None:
        value = self.state[rank][chunk]
        if self.schedule.kind is Kind.ALL_GATHER:
            wanted = 1 << chunk * self.schedule.ranks // self.schedule.chunks
        else:
            wanted = (1 << self.schedule.ranks) - 1
        if value is not None and (value.chunk, value.ranks) == (chunk, wanted):
            return
        step = self.written.get((rank, chunk))
        when = "was never written" if step is None else f"was last written in step {step}"
        if value is not None and value.chunk != chunk:
            wrong = f"holds data of chunk {value.chunk}"
        else:
            lacking = _members(wanted & ~(value.ranks if value else 0))
            wrong = f"lacks the contributions of ranks {lacking}"
        raise ScheduleError(
            f"after the last step rank {rank}, chunk {chunk} {wrong}; it {when}",
            step=step,
            rank=rank,
            chunk=chunk,
        )


def _members(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _check_shape(schedule: Schedule, index: int, step: Step) -> None:
    """Checks a step's ranks and tables before anything is executed."""
    for side, ranks in zip(("source", "destination"), zip(*step.perm, strict=True), strict=False):
        seen: set[int] = set()
        for rank in ranks:
            if not 0 <= rank < schedule.ranks:
                raise ScheduleError(
                    f"step {index}: {side} {rank} is not one of the {schedule.ranks} ranks",
                    step=index,
                    rank=rank,
                )
            if rank in seen:
                raise ScheduleError(
                    f"step {index}: rank {rank} is a {side} twice", step=index, rank=rank
                )
            seen.add(rank)
    for name, table in (("send", step.send), ("recv", step.recv)):
        if table.shape != (schedule.ranks, step.k):
            raise ScheduleError(
                f"step {index}: {name} must have shape ({schedule.ranks}, {step.k}), "
                f"got {table.shape}",
                step=index,
            )
        for rank in range(schedule.ranks):
            _check_row(schedule, index, name, rank, table[rank].tolist())


def _check_row(schedule: Schedule, index: int, name: str, rank: int, row: list[int]) -> None:
    seen: set[int] = set()
    for chunk in row:
        if not 0 <= chunk < schedule.chunks:
            raise ScheduleError(
                f"step {index}: {name}[{rank}] names chunk {chunk} of {schedule.chunks}",
                step=index,
                rank=rank,
                chunk=chunk,
            )
        if chunk in seen:
            raise ScheduleError(
                f"step {index}: {name}[{rank}] names chunk {chunk} twice",
                step=index,
                rank=rank,
                chunk=chunk,
            )
        seen.add(chunk)


def verify(schedule: Schedule) -> None:
    """Proves that a schedule computes its collective, with the same bits on every rank.

    Every chunk of every rank is followed symbolically, as the set of ranks that contributed to it
    and the tree of reductions that made it. The proof holds for any data and any commutative
    operation.

    Complexity: O(ranks x steps x k) dictionary operations; a ring of 256 ranks takes about a
    second.

    Args:
      schedule: what to prove.

    Raises:
      ScheduleError: naming the first step, rank and chunk that goes wrong: malformed tables, a
        chunk sent before it is held, a contribution counted twice or missing in the end, ranks
        that end with differently associated sums.

    Example:
      >>> from jax_ring.schedules import ring
      >>> verify(ring(8))
    """
    if schedule.kind is not Kind.ALL_REDUCE and schedule.chunks % schedule.ranks:
        raise ScheduleError(
            f"a {schedule.kind.value} of {schedule.ranks} ranks needs a multiple of "
            f"{schedule.ranks} chunks, got {schedule.chunks}"
        )
    _executed(schedule).check_result()


def _executed(schedule: Schedule, *, by_rank_alone: bool = False) -> _Machine:
    machine = _Machine(schedule, by_rank_alone=by_rank_alone)
    for steps in schedule.by_round():
        machine.run(steps)
    return machine


def position_independent(schedule: Schedule) -> bool:
    """Whether an all-reduce adds the ranks in the same order in every chunk.

    An element's sum then has the same bits wherever in a buffer it lies, whatever else is in it.

    Args:
      schedule: of kind ALL_REDUCE, one that `verify` accepts.

    Returns:
      Whether all chunks are reduced by the same tree.

    Example:
      >>> from jax_ring.schedules import halving_doubling, recursive_doubling, ring
      >>> [position_independent(make(8)) for make in (ring, halving_doubling, recursive_doubling)]
      [False, True, True]
    """
    held = _executed(schedule, by_rank_alone=True).state[0]
    trees = {value.expression for value in held if value is not None}
    return len(trees) == 1
