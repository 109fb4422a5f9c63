"""How a schedule is executed, decided once from its tables. No JAX.

For each step: where what it sends comes from, what it reduces into, whether what it produces is
stored, and whether that is finished. Steps that are alike in all of these form a segment, which may
become a loop.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from jax_ring.schedules import Kind, Op, Run, Schedule, Step
from jax_ring.schedules.schedule import Table


class Source(enum.Enum):
    """Where the chunks that a step sends come from."""

    LOAD = "load"  # The buffer.
    FORWARD = "forward"  # What a channel's last step produced.
    RESEND = "resend"  # What the step before in its channel sent.


Places = tuple[tuple[int, ...], ...]  # For each rank, indices among the chunks that it has in hand.


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where what a step sends comes from.

    Attributes:
      source: the buffer, or what is in hand.
      channel: whose last step produced it, if it is forwarded.
      places: which of the chunks in hand it is; None for all.
    """

    source: Source
    channel: int = 0
    places: Places | None = None


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum in hand that a step adds to.

    Attributes:
      channel: whose last step produced it.
      places: which of the chunks in hand it is; None for all.
    """

    channel: int
    places: Places | None = None


@dataclasses.dataclass(frozen=True)
class Traits:
    """How a step executes.

    Attributes:
      origin: where what it sends comes from.
      raw: whether all that it and the steps of its run send are contributions not yet reduced.
      adds_to: the sum to which it adds what arrives; None for to the buffer.
      store: whether what it produces is written to the buffer.
      finishes: whether it completes the sums that it adds to.
      forwarded: whether it reduces, and what it produces is only sent on from hand.
    """

    origin: Origin
    raw: bool
    adds_to: Sum | None
    store: bool
    finishes: bool
    forwarded: bool

    def alike(self, other: Traits) -> bool:
        """Whether both are equal but for their origin."""
        return dataclasses.replace(self, origin=other.origin) == other


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one run that execute alike.

    Attributes:
      first: the first step.
      count: how many steps.
      advance: what the chunk indices of each next step are ahead.
      start: the round of the first step.
      traits: how they execute; its origin is the first step's.
      rest: the origin of all steps after the first.
    """

    first: Step
    count: int
    advance: int
    start: int
    traits: Traits
    rest: Origin


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a schedule is executed.

    Attributes:
      channels: the steps of each channel, in order; those that send nothing are left out.
      widened: whether the buffer or a COPY holds partial sums on the way. The buffer then has the
        type of the sums, and all of it is finished at the end; otherwise each chunk is finished by
        the step that completes it, and only finished chunks are stored and copied.
      result: the channel whose last step produces a reduce-scatter's result; None if it is in the
        buffer.
      in_turn: whether the channels of a round must store what they receive one after the other.
      stores_from: the first round that stores. What is to be stored of the rounds before waits in
        hand until then.
      partials_travel: whether any partial sum is ever sent.
      redundant: whether some sum is completed by more than one rank.
      renews: whether, once a step has stored, nothing but what steps stored is read from the
        buffer, and at the end all of it is: it may be new memory from there on.
      reencodes: whether a finished chunk is copied by a rank that holds only its value, and not
        the message that all others read it from.
    """

    channels: tuple[tuple[Segment, ...], ...]
    widened: bool
    result: int | None
    in_turn: bool
    stores_from: int
    partials_travel: bool
    redundant: bool
    renews: bool
    reencodes: bool

    @property
    def segments(self) -> list[Segment]:
        """Those of all channels, one channel after the other."""
        return [segment for channel in self.channels for segment in channel]


@functools.lru_cache(maxsize=256)
def plan(schedule: Schedule) -> Plan:
    """Plans the execution of a schedule.

    Complexity: O(ranks x steps x k) operations, once; a ring of 512 ranks takes about a second.

    Args:
      schedule: a schedule that `verify` accepts.

    Returns:
      The plan, cached.
    """
    rounds = schedule.by_round()
    indexed = dict(itertools.chain.from_iterable(rounds))
    steps = [indexed[i] for i in range(len(indexed))]
    hands = _Hands(schedule, steps)
    hands.follow(rounds)
    last = _last_product(schedule, rounds)
    stores = _stores(schedule, rounds, hands, last is not None)
    sums = _follow(schedule, rounds)
    complete, raw = sums.complete, _in_whole_runs(schedule, sums.raw)
    stores_from = _stores_from(schedule, rounds, hands, stores)
    widened = any(
        not complete[i] and (step.op is Op.COPY or stores[i]) for i, step in enumerate(steps)
    )
    return Plan(
        channels=_channels(schedule, _traits(steps, hands, stores, complete, raw, widened)),
        widened=widened,
        result=None if last is None else last.channel,
        in_turn=hands.in_turn,
        stores_from=stores_from,
        partials_travel=any(
            not raw[i] for i, step in enumerate(steps) if step.op is Op.REDUCE or not complete[i]
        ),
        redundant=sums.redundant,
        renews=_renews(schedule, rounds, hands, stores, stores_from),
        reencodes=any(
            complete[i] and (hands.origins[i].source is Source.LOAD or sums.redundant)
            for i, step in enumerate(steps)
            if step.op is Op.COPY and step.perm
        ),
    )


def overwrites(schedule: Schedule) -> bool:
    """Whether parts are stored among what is still read: the operand is copied, unless donated."""
    state = plan(schedule)
    parts = any(s.traits.store and s.first.k < schedule.chunks for s in state.segments)
    return parts and not state.renews


def suits_calls(schedule: Schedule) -> bool:
    """Whether custom calls can do the work on the chunks, without a wire.

    Each step must move one chunk, which a call finds by its index, or all of them in their order;
    and what a call writes into must not be the operand, which XLA would copy first, donated or not.
    """
    each = all(_one_or_all(run.first, schedule.chunks) for run in schedule.steps.runs)
    return each and not overwrites(schedule)


def _one_or_all(step: Step, chunks: int) -> bool:
    tables = (step.send, step.recv)
    return step.k == 1 or all(
        table.shape[1] == chunks and (table == np.arange(chunks)).all() for table in tables
    )


_Rounds = list[list[tuple[int, Step]]]  # As `Schedule.by_round` has them.


def own_chunks(schedule: Schedule) -> Table:
    """The chunks that each rank owns in a reduce-scatter or an all-gather."""
    per_rank = schedule.chunks // schedule.ranks
    return np.arange(schedule.ranks * per_rank, dtype=np.int64).reshape(schedule.ranks, per_rank)


def _same_chunks(step: Step, wanted: Table, held: Table) -> bool:
    return np.array_equal(wanted[step.sources], held[step.sources])


def _at(ranks: list[int], table: Table) -> tuple[Table, Table]:
    """Indexes an array [ranks, chunks] at some ranks' chunks."""
    return np.array(ranks, np.int64)[:, None], table[ranks]


class _Hands:
    """What every channel has in hand while the steps execute, and what becomes of it.

    Attributes:
      origins: for each step, where what it sends comes from.
      adds_to: for each step, the sum in hand to which it adds, or None.
      in_turn: whether in some round a channel adds to what another stored there in that round.
    """

    def __init__(self, schedule: Schedule, steps: list[Step]) -> None:
        self.schedule, self.steps = schedule, steps
        self.origins = [Origin(Source.LOAD)] * len(steps)
        self.adds_to: list[Sum | None] = [None] * len(steps)
        self.in_turn = False
        self._sent_on: set[int] = set()
        self._added_to: set[int] = set()
        self._alone = [run.count == 1 for run in schedule.steps.runs for _ in range(run.count)]
        # The step that wrote each chunk last, and the last one of each channel.
        self._writer = np.full((schedule.ranks, schedule.chunks), -1)
        self._last: dict[int, int] = {}
        self._sent: dict[int, Table] = {}  # Who wrote what a channel's last step sent.

    def follow(self, rounds: _Rounds) -> None:
        """Goes through the rounds."""
        for steps in rounds:
            moving = [(i, step) for i, step in steps if step.perm]
            for i, step in moving:
                self.origins[i] = self._origin(i, step)
            for _, step in moving:
                self._sent[step.channel] = self._writer[_at(step.sources, step.send)]
            received: list[int] = []
            for i, step in moving:
                self._receive(i, step, received)
                received.append(i)

    def only_sent(self, i: int) -> bool:
        """Whether what step i produces is sent on as it is, and nothing is added to it in hand."""
        return i in self._sent_on and i not in self._added_to

    def _origin(self, i: int, step: Step) -> Origin:
        gathers = self.schedule.kind is Kind.ALL_GATHER
        own = self._last.get(step.channel)
        if own is None and gathers and _same_chunks(step, step.send, own_chunks(self.schedule)):
            return Origin(Source.FORWARD, step.channel)  # A rank starts with its chunk in hand.
        for channel in self._nearest(step):
            if self._made(self._last[channel], step.sources, step.send):
                self._sent_on.add(self._last[channel])
                return Origin(Source.FORWARD, channel)
        if own is not None and self._alone[i] and self._alone[own] and self._resends(step, own):
            return Origin(Source.RESEND, step.channel)
        # Over a wire finished chunks are copied as the messages that all of their step became.
        in_parts = self._alone[i] and step.op is Op.REDUCE
        for channel in self._nearest(step) if in_parts else ():
            places = self._among(self._last[channel], step.sources, step.send)
            if places is not None:
                return Origin(Source.FORWARD, channel, places)
        return Origin(Source.LOAD)

    def _made(self, before: int, ranks: list[int], chunks: Table) -> bool:
        """Whether a step produced just these chunks of some ranks, and they still hold."""
        same = np.array_equal(chunks[ranks], self.steps[before].recv[ranks])
        return same and self._still_holds(before, ranks, chunks)

    def _still_holds(self, before: int, ranks: list[int], chunks: Table) -> bool:
        """Whether chunks of some ranks are as a step left them."""
        wrote = bool((self._writer[_at(ranks, chunks)] == before).all())
        return wrote and set(self.steps[before].targets).issuperset(ranks)

    def _among(self, before: int, ranks: list[int], chunks: Table) -> Places | None:
        """Where chunks of some ranks are among those that a step produced, if all of them are."""
        if not self._still_holds(before, ranks, chunks):
            return None
        made = self.steps[before].recv
        place = np.zeros_like(self._writer)
        np.put_along_axis(place, made, np.arange(made.shape[1])[None], axis=1)
        return tuple(map(tuple, np.take_along_axis(place, chunks, axis=1).tolist()))

    def _resends(self, step: Step, before: int) -> bool:
        """Whether all that a step sends is just what another sent, and it still holds."""
        held = self.steps[before]
        return (
            step.op is held.op
            and set(held.sources).issuperset(step.sources)
            and _same_chunks(step, step.send, held.send)
            and self._unchanged(step.sources, held, self._sent[step.channel])
        )

    def _unchanged(self, senders: list[int], held: Step, wrote: Table) -> bool:
        position = {source: p for p, source in enumerate(held.sources)}
        then = wrote[[position[sender] for sender in senders]]
        return bool((self._writer[_at(senders, held.send)] == then).all())

    def _receive(self, i: int, step: Step, before: list[int]) -> None:
        """Follows a step, after those of its round that are received before it."""
        written = _at(step.targets, step.recv)
        if step.op is Op.REDUCE:
            self.adds_to[i] = self._sum_in_hand(i, step)
            if self.adds_to[i] is None:
                self.in_turn |= bool(np.isin(self._writer[written], before).any())
        self._writer[written] = i
        self._last[step.channel] = i

    def _sum_in_hand(self, i: int, step: Step) -> Sum | None:
        """What the last step of a channel reduced and this one adds to, its own if it can be."""
        last = {channel: self._last[channel] for channel in self._nearest(step)}
        sums = {channel: j for channel, j in last.items() if self.steps[j].op is Op.REDUCE}
        for channel, j in sums.items():
            if self._made(j, step.targets, step.recv):
                self._added_to.add(j)
                return Sum(channel)
        for channel, j in sums.items() if self._alone[i] else ():
            places = self._among(j, step.targets, step.recv)
            if places is not None:
                self._added_to.add(j)
                return Sum(channel, places)
        return None

    def _nearest(self, step: Step) -> list[int]:
        """The channels that have something in hand, the step's own first."""
        return sorted(self._last, key=lambda channel: channel != step.channel)


def _traits(
    steps: list[Step],
    hands: _Hands,
    stores: list[bool],
    complete: list[bool],
    raw: list[bool],
    widened: bool,
) -> list[Traits]:
    """How each step executes."""
    return [
        Traits(
            origin=hands.origins[i],
            raw=raw[i],
            adds_to=hands.adds_to[i],
            store=stores[i],
            finishes=complete[i] and step.op is Op.REDUCE and not widened,
            forwarded=step.op is Op.REDUCE and hands.only_sent(i),
        )
        for i, step in enumerate(steps)
    ]


def _last_product(schedule: Schedule, rounds: _Rounds) -> Step | None:
    """The step that produces the result of a reduce-scatter on every rank at once."""
    moving = [step for steps in rounds for _, step in steps if step.perm]
    if schedule.kind is not Kind.REDUCE_SCATTER or not moving:
        return None
    last = moving[-1]
    whole = len(last.perm) == schedule.ranks and np.array_equal(last.recv, own_chunks(schedule))
    return last if whole else None


def _stores(schedule: Schedule, rounds: _Rounds, hands: _Hands, result_in_hand: bool) -> list[bool]:
    """Walks the rounds backwards: what is read from the buffer later on must be stored."""
    live = np.zeros((schedule.ranks, schedule.chunks), bool)
    if schedule.kind is not Kind.REDUCE_SCATTER:
        live[:] = True
    elif not result_in_hand:
        np.put_along_axis(live, own_chunks(schedule), True, axis=1)
    stores = [False] * len(hands.steps)
    for moving in reversed(rounds):
        for i, step in reversed(moving):
            written = _at(step.targets, step.recv)
            stores[i] = bool(live[written].any())
            # A reduction reads the local chunk first.
            live[written] = step.op is Op.REDUCE and hands.adds_to[i] is None
        for i, step in moving:
            if hands.origins[i].source is Source.LOAD:
                live[_at(step.sources, step.send)] = True
    return stores


def _stores_from(schedule: Schedule, rounds: _Rounds, hands: _Hands, stores: list[bool]) -> int:
    """The last round that reads the buffer, if what is stored before can wait in hand; or 0."""
    reads = [
        [cells for i, step in moving if step.perm for cells in _reads(step, hands, i)]
        for moving in rounds
    ]
    last = max((r for r, cells in enumerate(reads) if cells), default=0)
    waits = np.zeros((schedule.ranks, schedule.chunks), bool)
    waiting: set[int] = set()
    for moving, cells in zip(rounds[: last + 1], reads, strict=False):
        overtaken = not waiting.isdisjoint(step.channel for _, step in moving if step.perm)
        if hands.in_turn or overtaken or any(waits[read].any() for read in cells):
            return 0
        for i, step in moving:
            if step.perm and stores[i]:
                waiting.add(step.channel)
                waits[_at(step.targets, step.recv)] = True
    return last


def _renews(
    schedule: Schedule, rounds: _Rounds, hands: _Hands, stores: list[bool], stores_from: int
) -> bool:
    """Follows what each rank has stored, and what it reads from the first store on."""
    stored = np.zeros((schedule.ranks, schedule.chunks), bool)
    for r, moving in enumerate(rounds):
        reads = [cells for i, step in moving for cells in _reads(step, hands, i)]
        # Until `stores_from` what was stored waits in hand.
        if r > stores_from and stored.any() and not all(stored[cells].all() for cells in reads):
            return False
        stores_now = [step for i, step in moving if stores[i]]
        if stores_now and hands.in_turn:
            return False
        for step in stores_now:
            stored[_at(step.targets, step.recv)] = True
    return bool(stored.all())


def _reads(step: Step, hands: _Hands, i: int) -> Iterator[tuple[Table, Table]]:
    """What step i reads from the buffer."""
    if hands.origins[i].source is Source.LOAD:
        yield _at(step.sources, step.send)
    if step.op is Op.REDUCE and hands.adds_to[i] is None:
        yield _at(step.targets, step.recv)


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


def _follow(schedule: Schedule, rounds: _Rounds) -> _Sums:
    """Follows the contributions as bit masks: where `verify` accepts, a union is a sum."""
    count = len(schedule.steps)
    if schedule.kind is Kind.ALL_GATHER:
        return _Sums([True] * count, [False] * count, False)
    everyone = (1 << schedule.ranks) - 1
    held = [[1 << rank] * schedule.chunks for rank in range(schedule.ranks)]
    complete, raw = [True] * count, [True] * count
    completions = [0] * schedule.chunks
    for moving in rounds:
        arrivals = [(i, step, _arriving(step, held)) for i, step in moving]
        for i, step, arrived in arrivals:
            raw[i] = all(mask & (mask - 1) == 0 for _, _, mask in arrived)
            for target, into, mask in arrived:
                reduces = step.op is Op.REDUCE
                held[target][into] = mask | (held[target][into] if reduces else 0)
                completions[into] += reduces and held[target][into] == everyone
            complete[i] = all(held[target][into] == everyone for target, into, _ in arrived)
    return _Sums(complete, raw, any(count > 1 for count in completions))


def _arriving(step: Step, held: list[list[int]]) -> list[tuple[int, int, int]]:
    """The target, its chunk and the contributions of all that a step sends."""
    send, recv = step.send.tolist(), step.recv.tolist()
    return [
        (target, into, held[source][chunk])
        for source, target in step.perm
        for chunk, into in zip(send[source], recv[target], strict=True)
    ]


def _channels(schedule: Schedule, traits: list[Traits]) -> tuple[tuple[Segment, ...], ...]:
    """The segments of each channel."""
    channels: list[list[Segment]] = [[] for _ in range(schedule.channels)]
    starts = [0] * schedule.channels
    begin = 0
    for run in schedule.steps.runs:
        channel = run.first.channel
        of_run = traits[begin : begin + run.count]
        if run.first.perm:
            channels[channel] += _segments(run, starts[channel], of_run, schedule.chunks)
        starts[channel] += run.count
        begin += run.count
    return tuple(map(tuple, channels))


def _segments(run: Run, begin: int, traits: list[Traits], chunks: int) -> Iterator[Segment]:
    """Cuts a run where a trait changes; only the first step's origin may differ from the rest's."""
    start = 0
    while start < run.count:
        second = traits[min(start + 1, run.count - 1)]
        stop = start + 1
        while stop < run.count and traits[stop] == second and second.alike(traits[start]):
            stop += 1
        yield Segment(
            first=run.first.advanced(start * run.advance, chunks),
            count=stop - start,
            advance=run.advance,
            start=begin + start,
            traits=traits[start],
            rest=second.origin if stop > start + 1 else traits[start].origin,
        )
        start = stop
