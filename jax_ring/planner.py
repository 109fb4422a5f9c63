"""Which algorithm for which cluster: all of them, priced and simulated, without any device."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping

from jax_ring import wire as wires
from jax_ring.schedules import Kind, Schedule, cost, hierarchical, ring, torus_orders
from jax_ring.schedules.families import make, names
from jax_ring.schedules.simulate import Simulator
from jax_ring.schedules.topology import Topology, Torus, Uniform

# Schedules that need more tables to be made are left out. This much takes about ten seconds.
LARGEST_TABLES = 1_200_000_000  # Bytes.

_PAIR_BYTES = 128  # A (source, destination) of a permutation: two ints in a tuple in a tuple.
_SMALL = 64  # Ranks of the instances that the estimate starts from.

# Across groups. The ring's variants are left out: there they differ from it by their latency only.
_OUTER = ("ring", "halving_doubling", "recursive_doubling", "double_binary_tree")
_OUTER_OF_TWO = ("ring", "recursive_doubling")  # Of two groups the others are one of these.


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is expected of an algorithm.

    Attributes:
      name: the algorithm and its parameters.
      seconds: `simulated_seconds` if there are, else `model_seconds`.
      model_seconds: by `cost`, with the alpha and beta of the plan.
      simulated_seconds: by `simulate`, or None without a topology.
      steps: the rounds, each of which pays latency.
      channels: how many steps go on side by side.
      bytes_per_rank: what the rank that sends the most sends.
      algbw: size of the buffer / seconds, or None if it takes no time.
      busbw: algbw times 2(n-1)/n for an all-reduce and (n-1)/n else, as in nccl-tests: the
        bandwidth that each rank would need in the best algorithm; or None.
      busiest_link: the link that is busy for longest, or None without a topology or any bytes.
      utilisation: the part of the time that it is busy, or None without a topology.
    """

    name: str
    seconds: float
    model_seconds: float
    simulated_seconds: float | None
    steps: int
    channels: int
    bytes_per_rank: int
    algbw: float | None
    busbw: float | None
    busiest_link: str | None
    utilisation: float | None


@dataclasses.dataclass(frozen=True)
class Skipped:
    """An algorithm that was left out.

    Attributes:
      name: the algorithm and its parameters.
      reason: why.
    """

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The comparison.

    Attributes:
      ranks: the number of ranks.
      nbytes: size of the whole buffer, before any wire format.
      alpha: seconds per message in the closed-form model.
      bandwidth: bytes per second in the closed-form model, infinite for a single rank.
      predictions: the algorithms, best first.
      skipped: those left out.
    """

    ranks: int
    nbytes: int
    alpha: float
    bandwidth: float
    predictions: tuple[Prediction, ...]
    skipped: tuple[Skipped, ...]


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """An algorithm that may be worth it.

    Attributes:
      name: with its parameters.
      make: the schedule for a number of ranks, a multiple of `unit`.
      unit: what `make` needs the ranks to be a multiple of.
      expands: whether it makes all steps before it finds runs among them.
    """

    name: str
    make: Callable[[int], Schedule]
    unit: int = 1
    expands: bool = False


class Planner:
    """The algorithms for some ranks, ready to be compared at any size.

    Example:
      >>> from jax_ring.schedules.topology import NvlinkNodes
      >>> planner = Planner(16, topology=NvlinkNodes(16))
      >>> for nbytes in (10_000, 1_000_000_000):
      ...     print(planner.plan(nbytes).predictions[0].name)
      recursive_doubling
      hierarchical(8, 2, ring, recursive_doubling)
    """

    def __init__(
        self,
        ranks: int,
        *,
        kind: Kind = Kind.ALL_REDUCE,
        alpha: float | None = None,
        bandwidth: float | None = None,
        topology: Topology | None = None,
        itemsize: int = 4,
        wire: str | wires.WireFormat | None = None,
        stragglers: Mapping[int, float] | None = None,
        slowdowns: Mapping[int, float] | None = None,
        gamma: float = 0.0,
    ) -> None:
        """Builds all schedules; arguments are those of `plan_algorithms`."""
        if topology is None and bandwidth is None:
            raise ValueError("plan: give a topology, or a bandwidth")
        _check(ranks, itemsize, alpha, bandwidth)
        usual = topology.hockney if topology else (0.0, 0.0)
        self._alpha = usual[0] if alpha is None else alpha
        self._beta = usual[1] if bandwidth is None else 1 / bandwidth
        if topology is None and (stragglers or slowdowns or gamma):
            topology = Uniform(ranks, 1 / self._beta, self._alpha)
        self._ranks, self._kind, self._topology = ranks, kind, topology
        self._itemsize, self._wire = itemsize, wires.get(wire)
        self._run = functools.partial(
            Simulator.run, stragglers=stragglers, slowdowns=slowdowns, gamma=gamma
        )
        self._schedules: dict[str, Schedule] = {}
        skipped = []
        for candidate in _candidates(ranks, kind, topology):
            size = _table_bytes(candidate, ranks)
            if size > LARGEST_TABLES:
                reason = f"making it for {ranks} ranks takes about {size / 1e9:,.1f} GB of tables"
                skipped.append(Skipped(candidate.name, reason))
            else:
                self._schedules[candidate.name] = candidate.make(ranks)
        self._skipped = tuple(skipped)

    @functools.cached_property
    def _simulators(self) -> dict[str, Simulator]:
        if not self._topology:
            return {}
        return {name: Simulator(s, self._topology) for name, s in self._schedules.items()}

    @functools.cached_property
    def _sent_chunks(self) -> dict[str, int]:
        return {name: int(s.sent_chunks().max()) for name, s in self._schedules.items()}

    def plan(self, nbytes: int) -> Plan:
        """Compares the algorithms for a buffer of so many bytes."""
        if not 0 <= nbytes < math.inf:
            raise ValueError(f"plan: nbytes must be finite and not negative, got {nbytes}")
        found = [
            self._predict(name, schedule, nbytes) for name, schedule in self._schedules.items()
        ]
        # Of those that differ in the last bits only, the one of the fewest steps comes first.
        found.sort(key=lambda prediction: (float(f"{prediction.seconds:.9g}"), prediction.steps))
        bandwidth = 1 / self._beta if self._beta else math.inf
        return Plan(self._ranks, nbytes, self._alpha, bandwidth, tuple(found), self._skipped)

    def _predict(self, name: str, schedule: Schedule, nbytes: int) -> Prediction:
        sent = self._on_the_wire(schedule, nbytes)
        ports = self._topology.ports if self._topology else 1
        model = cost(schedule, sent, self._alpha, self._beta, ports=ports)
        simulator = self._simulators.get(name)
        simulated = self._run(simulator, sent) if simulator else None
        seconds = simulated.seconds if simulated else model
        algbw = nbytes / seconds if seconds else None
        factor = (2 if self._kind is Kind.ALL_REDUCE else 1) * (self._ranks - 1) / self._ranks
        return Prediction(
            name,
            seconds,
            model,
            simulated.seconds if simulated else None,
            schedule.rounds,
            schedule.channels,
            round(self._sent_chunks[name] * sent / schedule.chunks),
            algbw,
            None if algbw is None else algbw * factor,
            simulated.busiest_name if simulated else None,
            simulated.utilisation if simulated else None,
        )

    def _on_the_wire(self, schedule: Schedule, nbytes: int) -> int:
        """The bytes of all chunks as messages."""
        if self._wire is None:
            return nbytes
        elements = -(-nbytes // self._itemsize)
        return schedule.chunks * self._wire.nbytes(-(-elements // schedule.chunks))


def _check(ranks: int, itemsize: int, alpha: float | None, bandwidth: float | None) -> None:
    for name, count in (("ranks", ranks), ("itemsize", itemsize)):
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
            raise ValueError(f"plan: {name} must be an integer of at least 1, got {count!r}")
    if alpha is not None and not 0 <= alpha < math.inf:
        raise ValueError(f"plan: alpha must be finite and not negative, got {alpha}")
    # Of less than the least float64 that is not subnormal the inverse would be infinite.
    if bandwidth is not None and not sys.float_info.min <= bandwidth < math.inf:
        raise ValueError(f"plan: bandwidth must be finite and above 0, got {bandwidth}")


def plan_algorithms(
    ranks: int,
    nbytes: int,
    *,
    kind: Kind = Kind.ALL_REDUCE,
    alpha: float | None = None,
    bandwidth: float | None = None,
    topology: Topology | None = None,
    itemsize: int = 4,
    wire: str | wires.WireFormat | None = None,
    stragglers: Mapping[int, float] | None = None,
    slowdowns: Mapping[int, float] | None = None,
    gamma: float = 0.0,
) -> Plan:
    """Compares all algorithms that there are for a collective.

    Beside those of `schedules.FAMILIES`, for an all-reduce over a topology with groups of ranks,
    the hierarchical ones over these, and over a torus two rings that share no link.

    `Planner` does it for several sizes. No JAX backend is started.

    Args:
      ranks: the number of ranks.
      nbytes: size of the whole buffer in bytes, as for `cost`.
      kind: the collective.
      alpha: seconds per message in the closed-form model; by default those of the slowest message
        between neighbours in the topology, or 0.
      bandwidth: bytes per second in it; by default the same of the topology.
      topology: what to simulate the algorithms on; None does not simulate, or, if there are
        stragglers, slowdowns or gamma, does so on a `Uniform` one of alpha and bandwidth.
      itemsize: bytes of an element, for the wire.
      wire: the wire format, as for the collectives.
      stragglers: for some ranks, by how many seconds they begin late.
      slowdowns: for some ranks, by what factor all that they send and receive takes longer.
      gamma: seconds per byte that a rank reduces.

    Returns:
      The algorithms, best first.

    Raises:
      ValueError: if an argument is out of range, or there is neither a topology nor a bandwidth.

    Example:
      >>> plan = plan_algorithms(8, 10**9, alpha=5e-6, bandwidth=400e9)
      >>> best = plan.predictions[0]
      >>> best.name, f"{best.seconds * 1e3:.2f} ms", best.steps
      ('halving_doubling', '4.40 ms', 6)
    """
    planner = Planner(
        ranks,
        kind=kind,
        alpha=alpha,
        bandwidth=bandwidth,
        topology=topology,
        itemsize=itemsize,
        wire=wire,
        stragglers=stragglers,
        slowdowns=slowdowns,
        gamma=gamma,
    )
    return planner.plan(nbytes)


def _candidates(ranks: int, kind: Kind, topology: Topology | None) -> Iterator[_Candidate]:
    for name in names(kind):
        yield _Candidate(name, functools.partial(make, name, kind))
    if topology is None or kind is not Kind.ALL_REDUCE:
        return
    if isinstance(topology, Torus):
        yield from _rings_of(topology)
    for group in topology.groups:
        if 1 < group < ranks:
            yield from _hierarchies(group, ranks // group)


def _rings_of(torus: Torus) -> Iterator[_Candidate]:
    """Two rings that share no link, where they can be made."""
    if len(torus.shape) != 2:
        return
    try:
        orders = torus_orders(*torus.shape)
    except ValueError:
        return
    name = "ring(channels=2, torus_orders)"
    yield _Candidate(name, lambda n: ring(n, channels=2, orders=orders), torus.ranks)


def _hierarchies(inner: int, outer: int) -> Iterator[_Candidate]:
    for across in _OUTER if outer > 2 else _OUTER_OF_TWO:
        # The estimate keeps what is smaller, and lets the other grow.
        if inner <= outer:
            make_one = functools.partial(_grown_outer, inner, across)
        else:
            make_one = functools.partial(_grown_inner, outer, across)
        name = f"hierarchical({inner}, {outer}, ring, {across})"
        yield _Candidate(name, make_one, min(inner, outer), expands=True)


def _grown_outer(inner: int, across: str, ranks: int) -> Schedule:
    return hierarchical(inner, ranks // inner, "ring", across)


def _grown_inner(outer: int, across: str, ranks: int) -> Schedule:
    return hierarchical(ranks // outer, outer, "ring", across)


def _table_bytes(candidate: _Candidate, ranks: int) -> float:
    """About what a schedule would take, from two small ones as a power of the ranks."""
    small = candidate.unit * max(2, _SMALL // candidate.unit)
    if ranks <= 2 * small:
        return 0.0
    made = (candidate.make(small), candidate.make(2 * small))
    fewer, more = (_bytes_of(schedule, candidate.expands) for schedule in made)
    return float(more * (ranks / (2 * small)) ** math.log2(more / fewer))


def _bytes_of(schedule: Schedule, expanded: bool) -> int:
    """What the tables and permutations take, run by run or step by step."""
    return sum(
        (run.first.send.nbytes + run.first.recv.nbytes + len(run.first.perm) * _PAIR_BYTES)
        * (run.count if expanded else 1)
        for run in schedule.steps.runs
    )
