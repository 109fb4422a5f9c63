"""Simulates a schedule over a topology, message by message.

The rules:

- A rank begins a round when it has received, and reduced, all that it gets in earlier rounds. So
  ranks drift apart: there is no barrier between the rounds.
- A message starts when both of its ends have begun its round, and each link on its way has carried
  all that it carries in earlier rounds.
- Messages of a round that cross the same link share it, each in proportion to its bytes, so that
  all take as long as the link needs for all of them: a message takes the longest such time on its
  way (it is on all of its links at once), and the sum of their latencies on top. The links are
  free again when its last byte has left.

A link therefore never carries more than its bandwidth. What the rules leave out is that a message
may go faster while others with which it shares a link have not started yet, or have ended: where
ranks drift apart on shared links the times are upper bounds.

Each time is a maximum of earlier ones plus a constant. If a round moves all of them on by the same
amount, then so does every round after it with the same messages: from there on a run is not
simulated but multiplied. Times are whole numbers of ticks, so that this is exact, and a ring over
100,000 ranks takes a second.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_ring.schedules.schedule import Op, Perm, Run, Schedule
from jax_ring.schedules.topology import Floats, Ints, Topology

_TICKS = 2.0**60  # In a time that is certainly enough; what int64 holds, with room for sums.
_LOOK = 32  # Rounds are compared with those before them after 1/32 of the rounds so far.


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """What came out.

    Attributes:
      seconds: when the last rank has all that it receives.
      finish: when each rank has, in seconds: float [ranks].
      link_bytes: the bytes that each link carried: float [links].
      busiest: the number of the link that was busy for longest, or None if no bytes were sent.
      busiest_name: what that link is, or None.
      utilisation: the part of the time that it was busy, 0 to 1.
    """

    seconds: float
    finish: Floats
    link_bytes: Floats
    busiest: int | None
    busiest_name: str | None
    utilisation: float


def simulate(
    schedule: Schedule,
    nbytes: float,
    topology: Topology,
    *,
    stragglers: Mapping[int, float] | None = None,
    slowdowns: Mapping[int, float] | None = None,
    gamma: float = 0.0,
) -> Simulation:
    """Simulates a schedule once; `Simulator` does it for several sizes.

    Args:
      schedule: what to simulate.
      nbytes: size of the whole buffer in bytes, as for `cost`.
      topology: what it runs on.
      stragglers: for some ranks, by how many seconds they begin late.
      slowdowns: for some ranks, by what factor all that they send and receive takes longer.
      gamma: seconds per byte that a rank reduces.

    Returns:
      Times, and what the links carried.

    Raises:
      ValueError: if the topology has another number of ranks, a rank does not exist, or something
        is negative.

    Example:
      >>> from jax_ring.schedules import ring
      >>> from jax_ring.schedules.topology import Uniform
      >>> result = simulate(ring(8), 1e9, Uniform(8, bandwidth=400e9))
      >>> print(f"{result.seconds * 1e3:.3f} ms")
      4.375 ms
      >>> late = simulate(ring(8), 1e9, Uniform(8, bandwidth=400e9), stragglers={3: 1e-3})
      >>> print(f"{late.seconds * 1e3:.3f} ms")
      5.375 ms
    """
    return Simulator(schedule, topology).run(
        nbytes, stragglers=stragglers, slowdowns=slowdowns, gamma=gamma
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Traffic:
    """A stretch of rounds whose messages are alike.

    Attributes:
      rounds: how many.
      parts: for each channel that sends something, which messages are its, and whether it reduces.
      source: of each message the rank that sends it.
      destination: the rank that receives it.
      chunks: how many chunks it holds.
      routes: the links that it crosses, [hops, messages], filled up with -1.
      load: the most seconds that a link on its way needs for what crosses it, per byte of a chunk.
      latency: the seconds that its links add.
      shared: `routes`, but only of links that carry messages to several ranks.
    """

    rounds: int
    parts: tuple[tuple[slice, bool], ...]
    source: Ints
    destination: Ints
    chunks: Ints
    routes: Ints
    load: Floats
    latency: Floats
    shared: Ints

    @functools.cached_property
    def ranks(self) -> Ints:
        """All that take part."""
        return np.union1d(self.source, self.destination)

    @functools.cached_property
    def shared_links(self) -> Ints:
        """Those that `shared` names."""
        return np.unique(self.shared[self.shared >= 0])


class Simulator:
    """A schedule on a topology, ready to be simulated for any size.

    Example:
      >>> from jax_ring.schedules import halving_doubling
      >>> from jax_ring.schedules.topology import NvlinkNodes
      >>> simulator = Simulator(halving_doubling(16), NvlinkNodes(16))
      >>> [f"{simulator.run(size).seconds * 1e6:.1f} us" for size in (1e3, 1e6)]
      ['22.0 us', '46.6 us']
    """

    def __init__(self, schedule: Schedule, topology: Topology) -> None:
        """Finds the way of every message.

        Args:
          schedule: what to simulate.
          topology: what it runs on.

        Raises:
          ValueError: if the topology has another number of ranks.
        """
        if schedule.ranks != topology.ranks:
            raise ValueError(
                f"simulate: the schedule has {schedule.ranks} ranks, "
                f"the topology ({topology.name}) {topology.ranks}"
            )
        self.schedule, self.topology = schedule, topology
        self._bandwidths = np.append(topology.bandwidths, np.inf)  # Link -1 stands for none.
        self._latencies = np.append(topology.latencies, 0.0)
        self._link_chunks = np.zeros(len(self._bandwidths))
        self._traffic = [self._routed(rounds, runs) for rounds, runs in _stretches(schedule)]

    def _routed(self, rounds: int, runs: Sequence[Run]) -> _Traffic:
        parts, ends, start = [], [], 0
        for run in runs:
            ends.append(np.array(run.first.perm, np.int64))
            parts.append((slice(start, start + len(ends[-1])), run.first.op is Op.REDUCE))
            start += len(ends[-1])
        source, destination = np.concatenate(ends).T.copy()
        chunks = np.repeat([run.first.k for run in runs], [len(pairs) for pairs in ends])
        routes = np.ascontiguousarray(self.topology.routes(source, destination).T)
        links = len(self._bandwidths)
        carried = np.zeros(links)
        for hop in routes:
            carried += np.bincount(hop % links, chunks, links)
        self._link_chunks += rounds * carried
        return _Traffic(
            rounds,
            tuple(parts),
            source,
            destination,
            chunks,
            routes,
            (carried / self._bandwidths)[routes].max(axis=0, initial=0.0),
            self._latencies[routes].sum(axis=0),
            _shared(routes, destination, links),
        )

    def run(
        self,
        nbytes: float,
        *,
        stragglers: Mapping[int, float] | None = None,
        slowdowns: Mapping[int, float] | None = None,
        gamma: float = 0.0,
    ) -> Simulation:
        """Simulates it for a size; arguments and result are those of `simulate`."""
        late = self._of_ranks("stragglers", stragglers or {}, 0.0)
        slow = self._of_ranks("slowdowns", slowdowns or {}, 1.0)
        for name, value in (("nbytes", nbytes), ("gamma", gamma)):
            if not 0 <= value < math.inf:
                raise ValueError(f"simulate: {name} must be finite and at least 0, got {value}")
        chunk = nbytes / self.schedule.chunks
        spans = [_Durations.of(traffic, chunk, slow, gamma) for traffic in self._traffic]
        limit = late.max() + sum(
            span.longest * traffic.rounds
            for span, traffic in zip(spans, self._traffic, strict=True)
        )
        tick = float(limit) / _TICKS or 1.0
        state = _State(_ticks(late, tick), np.zeros(len(self._bandwidths), np.int64))
        for traffic, span in zip(self._traffic, spans, strict=True):
            _advance(state, traffic, span.in_ticks(tick))
        finish = state.ready.astype(np.float64) * tick
        return self._result(finish, self._link_chunks[:-1] * chunk)

    def _of_ranks(self, name: str, values: Mapping[int, float], usual: float) -> Floats:
        result = np.full(self.schedule.ranks, usual)
        for rank, value in values.items():
            if not 0 <= rank < self.schedule.ranks:
                raise ValueError(
                    f"simulate: {name} names rank {rank}, there are 0 to {self.schedule.ranks - 1}"
                )
            if not 0 <= value < math.inf or (usual and not value):
                wanted = f"finite and {'above' if usual else 'at least'} 0"
                raise ValueError(f"simulate: {name}[{rank}] must be {wanted}, got {value}")
            result[rank] = value
        return result

    def _result(self, finish: Floats, link_bytes: Floats) -> Simulation:
        seconds = float(finish.max())
        busy = link_bytes / self._bandwidths[:-1]
        if not busy.any():
            return Simulation(seconds, finish, link_bytes, None, None, 0.0)
        busiest = int(busy.argmax())
        name, utilisation = self.topology.link_name(busiest), float(busy[busiest] / seconds)
        return Simulation(seconds, finish, link_bytes, busiest, name, utilisation)


def _stretches(schedule: Schedule) -> Iterator[tuple[int, list[Run]]]:
    """Rounds that move as many chunks along the same ways: how many, and a run of each channel."""
    held: tuple[int, list[Run]] | None = None
    for rounds, current in schedule.stretches():
        runs = [run for run in current if run.first.perm]
        if not runs:
            continue
        if held and _alike(held[1], runs):
            held = (held[0] + rounds, runs)
            continue
        if held:
            yield held
        held = (rounds, runs)
    if held:
        yield held


def _alike(a: Sequence[Run], b: Sequence[Run]) -> bool:
    def traits(runs: Sequence[Run]) -> list[tuple[Perm, int, Op]]:
        return [(run.first.perm, run.first.k, run.first.op) for run in runs]

    return traits(a) == traits(b)


def _shared(routes: Ints, destination: Ints, links: int) -> Ints:
    """The routes without links whose messages all have the same destination.

    That one begins a round after these links have carried what they carry in the one before.
    """
    low, high = np.full(links, np.iinfo(np.int64).max), np.full(links, -1)
    for hop in routes:
        np.minimum.at(low, hop, destination)
        np.maximum.at(high, hop, destination)
    kept = np.where((low < high)[routes], routes, -1)
    return kept[(kept >= 0).any(axis=1)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Durations:
    """How long things take in a stretch of rounds, in seconds or in ticks.

    Attributes:
      transfer: for each message, until its last byte has left its links.
      latency: and from then until it has arrived.
      reduction: for each channel that sends something, how long a rank reduces what arrives in it.
    """

    transfer: npt.NDArray[Any]
    latency: npt.NDArray[Any]
    reduction: npt.NDArray[Any]

    @classmethod
    def of(cls, traffic: _Traffic, chunk: float, slow: Floats, gamma: float) -> _Durations:
        """In seconds, for chunks of so many bytes."""
        factor = np.maximum(slow[traffic.source], slow[traffic.destination])
        reduction = [
            gamma * chunk * traffic.chunks[messages.start] * reduces
            for messages, reduces in traffic.parts
        ]
        return cls(traffic.load * chunk * factor, traffic.latency * factor, np.array(reduction))

    @property
    def longest(self) -> float:
        """A round takes no longer than this."""
        return float((self.transfer + self.latency).max() + self.reduction.sum())

    def in_ticks(self, tick: float) -> _Durations:
        """The same, rounded."""
        return _Durations(*(_ticks(x, tick) for x in dataclasses.astuple(self)))


def _ticks(seconds: Floats, tick: float) -> Ints:
    return np.rint(seconds / tick).astype(np.int64)


@dataclasses.dataclass(eq=False)
class _State:
    """Where things stand, in ticks.

    Attributes:
      ready: when each rank begins the next round.
      free: when each link has carried what it carries in the rounds so far. The last entry, of the
        link -1 that stands for none, is always 0.
    """

    ready: Ints
    free: Ints


def _advance(state: _State, traffic: _Traffic, durations: _Durations) -> None:
    """Moves the state on by all rounds of a stretch.

    The first and the last round look at all links. Between them, one whose messages all have the
    same destination is never what these wait for.
    """
    _round(state, traffic, durations, traffic.routes)
    done, marked, mark = 1, 1, _moving(state, traffic)
    while done < traffic.rounds - 1:
        _round(state, traffic, durations, traffic.shared)
        done += 1
        period = done - marked
        # Grows, so that looking stays cheap where ranks take long to fall into step.
        if period <= done // _LOOK:
            continue
        now = _moving(state, traffic)
        moved = now - mark
        marked, mark = done, now
        if moved.min() == moved.max():
            times = (traffic.rounds - 1 - done) // period
            state.ready[traffic.ranks] += times * moved[0]
            state.free[traffic.shared_links] += times * moved[0]
            done += times * period
            for _ in range(traffic.rounds - 1 - done):
                _round(state, traffic, durations, traffic.shared)
            break
    if traffic.rounds > 1:
        _round(state, traffic, durations, traffic.routes)


def _moving(state: _State, traffic: _Traffic) -> Ints:
    return np.concatenate([state.ready[traffic.ranks], state.free[traffic.shared_links]])


def _round(state: _State, traffic: _Traffic, durations: _Durations, routes: Ints) -> None:
    """Moves the state on by one round, in which messages wait for the links of `routes`."""
    sent = np.maximum(state.ready[traffic.source], state.ready[traffic.destination])
    for hop in routes:
        np.maximum(sent, state.free[hop], out=sent)
    sent += durations.transfer
    for hop in routes:
        np.maximum.at(state.free, hop, sent)
    state.free[-1] = 0
    sent += durations.latency
    for i, (messages, _) in enumerate(traffic.parts):
        destination, arrived = traffic.destination[messages], sent[messages]
        if i:  # The receiver may still be busy with what came in the channels before.
            arrived = np.maximum(arrived, state.ready[destination])
        state.ready[destination] = arrived + durations.reduction[i]
