"""The schedule of a collective, as plain data.

A schedule says, for each step, which rank sends to which, which chunks travel, and whether what
arrives is reduced into the local chunk or copied over it. Everything else is derived from it: the
program that runs (`jax_ring.executor`), the proof (`verify`) and the price (`cost`). Nothing here
imports JAX.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

Perm = tuple[tuple[int, int], ...]
Table = npt.NDArray[np.int64]


class ScheduleError(ValueError):
    """A schedule that is malformed or does not compute its collective.

    Attributes:
      step: index of the step where it first goes wrong, or None.
      rank: the rank where it goes wrong, or None.
      chunk: the chunk that goes wrong, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """Stores where it went wrong beside the message."""
        super().__init__(message)
        self.step, self.rank, self.chunk = step, rank, chunk


class Op(enum.Enum):
    """What a rank does with the chunks that arrive."""

    REDUCE = "reduce"
    COPY = "copy"


class Kind(enum.Enum):
    """The collective that a schedule computes.

    ALL_REDUCE: every rank starts with all chunks and ends with the reduction of all of them.
    REDUCE_SCATTER: every rank starts with all chunks; rank r ends with the reduction of chunk r.
    ALL_GATHER: rank r starts with chunk r; every rank ends with all chunks.
    """

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


def _as_table(name: str, value: npt.ArrayLike) -> Table:
    table = np.array(value, dtype=np.int64)
    if table.ndim == 1:
        table = table[:, None]
    if table.ndim != 2:
        raise ScheduleError(f"{name} must have shape [ranks, k], got shape {table.shape}")
    table.flags.writeable = False
    return table


def _advanced(table: Table, by: int, chunks: int) -> Table:
    """All chunk indices moved by `by`, modulo `chunks`."""
    return (table + by) % chunks if by % chunks else table


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One communication step: at most one message out of and into each rank.

    Attributes:
      perm: the (source, destination) pairs; a rank may be absent on either side.
      send: int array [ranks, k], the chunks that each rank sends. A one-dimensional array stands
        for k = 1.
      recv: int array [ranks, k], the chunks that what arrives is reduced into or copied over.
      op: what is done with what arrives.
      channel: which of the sequences of steps that go on side by side it belongs to, from 0.
    """

    perm: Perm
    send: Table
    recv: Table
    op: Op
    channel: int = 0

    def __post_init__(self) -> None:
        """Normalizes the fields, so that equal steps compare and hash equal."""
        object.__setattr__(self, "perm", tuple((int(s), int(d)) for s, d in self.perm))
        object.__setattr__(self, "send", _as_table("send", self.send))
        object.__setattr__(self, "recv", _as_table("recv", self.recv))

    @property
    def k(self) -> int:
        """Chunks per message."""
        return int(self.send.shape[1])

    @property
    def sources(self) -> list[int]:
        """The ranks that send."""
        return [source for source, _ in self.perm]

    @property
    def targets(self) -> list[int]:
        """The ranks that receive, in the order of their sources."""
        return [target for _, target in self.perm]

    def advanced(self, by: int, chunks: int) -> Step:
        """The same step with all chunk indices moved by `by`, modulo `chunks`."""
        if by % chunks == 0:
            return self
        return self.with_chunks(_advanced(self.send, by, chunks), _advanced(self.recv, by, chunks))

    def with_chunks(self, send: npt.ArrayLike, recv: npt.ArrayLike) -> Step:
        """The same messages of other chunks.

        Unlike `dataclasses.replace` it does not go through `perm` again, of which many steps share
        one.
        """
        result = copy.copy(self)
        object.__setattr__(result, "send", _as_table("send", send))
        object.__setattr__(result, "recv", _as_table("recv", recv))
        return result

    def _key(self) -> tuple[Any, ...]:
        tables = (self.send.shape, self.send.tobytes(), self.recv.tobytes())
        return (self.perm, self.op, self.channel, *tables)

    def __eq__(self, other: object) -> bool:
        """Whether both steps move the same chunks between the same ranks."""
        return isinstance(other, Step) and self._key() == other._key()

    def __hash__(self) -> int:
        """Hash over all fields."""
        return hash(self._key())


@dataclasses.dataclass(frozen=True)
class Run:
    """`count` consecutive steps that differ only by a constant advance of their chunk indices.

    Attributes:
      first: the first step.
      count: how many steps.
      advance: step t moves the chunks of `first` plus `t * advance`, modulo the chunks.
    """

    first: Step
    count: int
    advance: int = 0


class Steps(Sequence[Step]):
    """The steps of a schedule: a sequence of `Step`, stored as runs.

    A ring of N ranks has 2(N-1) steps with tables of N entries each; as two runs it takes O(N).
    All steps of channel 0 come first, then those of channel 1, and so on.

    Attributes:
      runs: the steps, as few runs as there can be.
      chunks: what chunk indices are counted modulo.
    """

    def __init__(self, items: Iterable[Step | Run], chunks: int) -> None:
        """Stores the items by channel, merging steps that form a run."""
        self.chunks = chunks
        ordered = sorted(items, key=_channel)
        self.runs: tuple[Run, ...] = tuple(_merge(ordered, chunks))
        self._length = sum(run.count for run in self.runs)

    def __len__(self) -> int:
        """The number of steps."""
        return self._length

    def __iter__(self) -> Iterator[Step]:
        """Yields each step, expanded."""
        for run in self.runs:
            for t in range(run.count):
                yield run.first.advanced(t * run.advance, self.chunks)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        """The step at an index, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if position >= 0:
            for run in self.runs:
                if position < run.count:
                    return run.first.advanced(position * run.advance, self.chunks)
                position -= run.count
        raise IndexError(f"step {index} of a schedule of {len(self)} steps")

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same runs; steps written out one by one are merged into runs."""
        if not isinstance(other, Steps):
            return NotImplemented
        return self.runs == other.runs

    def __hash__(self) -> int:
        """Hash over the runs."""
        return hash(self.runs)

    def __repr__(self) -> str:
        """Short, because the tables are long."""
        return f"<{len(self)} steps in {len(self.runs)} runs>"


def _channel(item: Step | Run) -> int:
    return item.first.channel if isinstance(item, Run) else item.channel


def _advance_between(a: Step, b: Step, chunks: int) -> int | None:
    """The constant by which b's tables are ahead of a's, or None."""
    alike = (a.perm, a.op, a.channel) == (b.perm, b.op, b.channel)
    if not alike or a.send.shape != b.send.shape or not a.send.size:
        return None
    by = int(b.send.flat[0] - a.send.flat[0]) % chunks
    follows = np.array_equal(_advanced(a.send, by, chunks), b.send) and np.array_equal(
        _advanced(a.recv, by, chunks), b.recv
    )
    return by if follows else None


def _merge(items: Iterable[Step | Run], chunks: int) -> Iterator[Run]:
    """Joins neighbouring steps into maximal runs, reading from the left."""
    held: Run | None = None
    for item in items:
        run = item if isinstance(item, Run) else Run(item, 1)
        if run.count < 1:
            raise ScheduleError(f"a run must have at least one step, got count={run.count}")
        run = Run(run.first, run.count, run.advance % chunks if run.count > 1 else 0)
        joined = held and _join(held, run, chunks)
        if joined:
            held = joined
            continue
        if held:
            yield held
        held = run
    if held:
        yield held


def _join(a: Run, b: Run, chunks: int) -> Run | None:
    last = a.first.advanced((a.count - 1) * a.advance, chunks)
    by = _advance_between(last, b.first, chunks)
    if by is None or any(r.count > 1 and r.advance != by for r in (a, b)):
        return None
    return Run(a.first, a.count + b.count, by)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A collective algorithm as data: an immutable, hashable list of steps.

    Steps of different channels go on side by side. Round t consists of step t of every channel: all
    of them send what was there before the round, and what arrives is then reduced or copied in the
    order of the channels.

    Attributes:
      ranks: the number of ranks.
      chunks: the number of equal chunks that the buffer is divided into.
      steps: the steps, any iterable of `Step` or `Run` when constructed; afterwards a sequence
        that yields each `Step` expanded (and holds the compressed `steps.runs`).
      kind: the collective that it computes.
      name: what it is called in profiles and tables.

    Example:
      >>> from jax_ring.schedules import ring
      >>> schedule = ring(4)
      >>> schedule
      Schedule(ring, all_reduce, ranks=4, chunks=4, steps=6)
      >>> schedule.steps[0].perm
      ((0, 1), (1, 2), (2, 3), (3, 0))
      >>> schedule.steps[0].send.ravel()
      array([3, 0, 1, 2])
    """

    ranks: int
    chunks: int
    steps: Steps
    kind: Kind
    name: str = "custom"
    _hash: int = dataclasses.field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Normalizes the steps and hashes them once: schedules are static arguments of jit."""
        if self.ranks < 1 or self.chunks < 1:
            raise ScheduleError(
                f"ranks and chunks must be at least 1, got {self.ranks} and {self.chunks}"
            )
        if not isinstance(self.steps, Steps) or self.steps.chunks != self.chunks:
            items: Iterable[Step | Run] = self.steps
            object.__setattr__(self, "steps", Steps(items, self.chunks))
        object.__setattr__(self, "kind", Kind(self.kind))
        present = {run.first.channel for run in self.steps.runs}
        if present != set(range(len(present))):
            raise ScheduleError(f"channels must be numbered from 0, got {sorted(present)}")
        key = (self.ranks, self.chunks, self.steps, self.kind, self.name)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        """The hash computed at construction."""
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the hash, which another process would compute differently."""
        return Schedule, (self.ranks, self.chunks, self.steps, self.kind, self.name)

    def __repr__(self) -> str:
        """One line."""
        channels = f", channels={self.channels}" if self.channels > 1 else ""
        return (
            f"Schedule({self.name}, {self.kind.value}, ranks={self.ranks}, "
            f"chunks={self.chunks}, steps={self.rounds}{channels})"
        )

    def __str__(self) -> str:
        """The header and one line for each run of steps."""
        lines = [repr(self)]
        start = [0] * max(self.channels, 1)
        for run in self.steps.runs:
            channel = run.first.channel
            where = f"channel {channel} " if self.channels > 1 else ""
            if run.first.perm:
                lines.append(f"  {where}{_describe(run, start[channel], self.chunks)}")
            start[channel] += run.count
        return "\n".join(lines)

    @property
    def channels(self) -> int:
        """How many sequences of steps go on side by side; 0 if there is no step."""
        return self.steps.runs[-1].first.channel + 1 if self.steps.runs else 0

    @property
    def rounds(self) -> int:
        """The steps that follow one another: those of the longest channel."""
        lengths = [0] * max(self.channels, 1)
        for run in self.steps.runs:
            lengths[run.first.channel] += run.count
        return max(lengths)

    def stretches(self) -> Iterator[tuple[int, list[Run]]]:
        """Stretches of rounds in which no run begins or ends: how many, and the runs they are of.

        Example:
          >>> from jax_ring.schedules import ring
          >>> [(rounds, runs[0].first.op.value) for rounds, runs in ring(4).stretches()]
          [(3, 'reduce'), (3, 'copy')]
        """
        channels: list[list[Run]] = [[] for _ in range(self.channels)]
        for run in self.steps.runs:
            channels[run.first.channel].append(run)
        ends = [list(itertools.accumulate(run.count for run in runs)) for runs in channels]
        start = 0
        for end in sorted({end for each in ends for end in each}):
            at = [bisect.bisect_right(each, start) for each in ends]
            yield (
                end - start,
                [runs[i] for runs, i in zip(channels, at, strict=True) if i < len(runs)],
            )
            start = end

    def by_round(self) -> list[list[tuple[int, Step]]]:
        """For each round its steps, in the order of the channels, with their index in `steps`.

        Example:
          >>> from jax_ring.schedules import bidirectional_ring
          >>> [(i, step.channel) for i, step in bidirectional_ring(4).by_round()[0]]
          [(0, 0), (4, 1)]
        """
        rounds: list[list[tuple[int, Step]]] = [[] for _ in range(self.rounds)]
        taken = [0] * max(self.channels, 1)
        for index, step in enumerate(self.steps):
            rounds[taken[step.channel]].append((index, step))
            taken[step.channel] += 1
        return rounds

    def part(self, start: int, stop: int) -> Schedule:
        """The steps of some rounds, without channels that send nothing in them.

        Args:
          start: the first round.
          stop: the round after the last.

        Returns:
          A schedule of the same kind and name, though it computes only a part of the collective,
          whose channels are numbered from 0 again.

        Example:
          >>> from jax_ring.schedules import ring
          >>> [step.op.value for step in ring(3).part(1, 3).steps]
          ['reduce', 'copy']
        """
        steps = [step for steps in self.by_round()[start:stop] for _, step in steps]
        moving = sorted({step.channel for step in steps if step.perm})
        number = {channel: i for i, channel in enumerate(moving)}
        kept = [
            dataclasses.replace(step, channel=number[step.channel])
            for step in steps
            if step.channel in number
        ]
        return dataclasses.replace(self, steps=Steps(kept, self.chunks))

    def sent_chunks(self) -> npt.NDArray[np.int64]:
        """How many chunks each rank sends in all: int array [ranks]."""
        sent = np.zeros(self.ranks, np.int64)
        for run in self.steps.runs:
            for source in run.first.sources:
                sent[source] += run.first.k * run.count
        return sent


def compose(name: str, kind: Kind, *parts: Schedule) -> Schedule:
    """Runs schedules over the same ranks and chunks one after the other.

    A part begins when all channels of the one before have ended: steps that send nothing fill up
    the shorter ones.

    Args:
      name: the name of the result.
      kind: what the whole computes.
      *parts: the schedules, in order.

    Returns:
      The schedule that holds the steps of all parts.

    Raises:
      ScheduleError: if the parts differ in ranks or in chunks.
    """
    first = parts[0]
    for part in parts[1:]:
        if (part.ranks, part.chunks) != (first.ranks, first.chunks):
            raise ScheduleError(f"cannot compose {first!r} with {part!r}: ranks or chunks differ")
    channels = max(part.channels for part in parts)
    items = [
        run for part in parts for run in filled(part.steps.runs, part.ranks, part.rounds, channels)
    ]
    return Schedule(first.ranks, first.chunks, Steps(items, first.chunks), kind, name)


def filled(runs: Sequence[Run], ranks: int, rounds: int, channels: int) -> Iterator[Run]:
    """The runs, and others that send nothing, so that every channel takes so many rounds."""
    yield from runs
    nothing = np.zeros((ranks, 1), np.int64)
    for channel in range(channels):
        lacking = rounds - sum(run.count for run in runs if run.first.channel == channel)
        if lacking:
            yield Run(Step((), nothing, nothing, Op.COPY, channel), lacking)


def rotation(n: int, by: int) -> Perm:
    """Every rank sends to the one `by` ranks ahead.

    Example:
      >>> rotation(3, 1)
      ((0, 1), (1, 2), (2, 0))
    """
    return tuple((r, (r + by) % n) for r in range(n))


def affine(column: Table, modulus: int) -> tuple[int, int] | None:
    """Finds (a, b) with column[r] == (a * r + b) % modulus for every r, or None.

    Example:
      >>> affine(np.array([3, 0, 1, 2]), 4)
      (1, 3)
    """
    b = int(column[0])
    a = int(column[1] - column[0]) % modulus if len(column) > 1 else 0
    expected = (a * np.arange(len(column)) + b) % modulus
    return (a, b) if np.array_equal(expected, column) else None


_LISTED = 16  # Ranks, and chunks of a rank, at most, that a text lists one by one.


def _describe(run: Run, start: int, chunks: int) -> str:
    step = run.first
    span = f"{start}" if run.count == 1 else f"{start}-{start + run.count - 1}"
    shift = {(d - s) % len(step.send) for s, d in step.perm}
    if len(shift) == 1 and len(step.perm) == len(step.send):
        route = f"rank r -> r+{shift.pop()}"
    else:
        route = " ".join(f"{s}->{d}" for s, d in step.perm[:_LISTED])
        if len(step.perm) > _LISTED:
            route += f" ... ({len(step.perm)} pairs)"
    move = f"send {_chunks(step.send, run, chunks)}, {step.op.value} into "
    return f"step {span}: {route}; {move}{_chunks(step.recv, run, chunks)}"


def _row(chunks: list[int]) -> str:
    """The chunks of a rank: from the first to the last if they lie side by side."""
    if len(chunks) > 2 and chunks == list(range(chunks[0], chunks[-1] + 1)):
        return f"[{chunks[0]} to {chunks[-1]}]"
    return _listed(list(map(str, chunks[:_LISTED])), len(chunks))


def _listed(items: list[str], count: int) -> str:
    return f"[{', '.join([*items, *(['...'] if count > len(items) else [])])}]"


def _chunks(table: Table, run: Run, modulus: int) -> str:
    form = affine(table[:, 0], modulus) if table.shape[1] == 1 else None
    if form is None:
        text = _listed([_row(row) for row in table[:_LISTED].tolist()], len(table))
        return text if run.count == 1 else f"{text} + {run.advance} s"
    terms = []
    for coefficient, symbol in ((form[0], "r"), (run.advance, "s"), (form[1], "")):
        signed = coefficient - modulus if coefficient * 2 > modulus else coefficient
        if signed:
            factor = str(abs(signed)) if abs(signed) != 1 or not symbol else ""
            terms.append(f"{'-' if signed < 0 else '+'} {factor}{symbol}")
    body = " ".join(terms).removeprefix("+ ") or "0"
    return f"({body}) mod {modulus}"
