import heapq
import itertools
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jax_ring.schedules import (
    FAMILIES,
    Kind,
    Op,
    Run,
    Schedule,
    Step,
    bidirectional_ring,
    cost,
    direct,
    double_binary_tree,
    halving_doubling,
    hierarchical,
    ring,
)
from jax_ring.schedules import simulate as module
from jax_ring.schedules.families import make
from jax_ring.schedules.simulate import Simulator, simulate
from jax_ring.schedules.topology import Graph, Link, NvlinkNodes, Torus, TwoDatacentres, Uniform

GB = 1e9


# The published figures.


def test_a_gigabyte_on_8_gpus_takes_4_4_ms():
    seconds = simulate(ring(8), 1 * GB, Uniform(8, bandwidth=400e9)).seconds
    assert seconds == pytest.approx(4.375e-3, rel=1e-9)


@pytest.mark.parametrize(
    "topology",
    [Uniform(512, bandwidth=45e9), NvlinkNodes(512, nvlink_latency=0.0, nic_latency=0.0)],
)
def test_a_gigabyte_on_64_nodes_takes_45_ms(topology):
    assert simulate(ring(512), 1 * GB, topology).seconds == pytest.approx(44.4e-3, rel=2e-3)


def test_a_ring_over_1024_ranks_pays_more_than_10_ms_of_latency():
    seconds = simulate(ring(1024), 0.0, Uniform(1024, bandwidth=45e9, alpha=5e-6)).seconds
    assert seconds == pytest.approx(2046 * 5e-6, rel=1e-9)
    assert seconds > 10e-3


@pytest.mark.parametrize("n", [2, 3, 8, 100, 1000])
@pytest.mark.parametrize("alpha", [0.0, 5e-6])
def test_an_uncontended_ring_takes_what_the_closed_form_says(n, alpha):
    result = simulate(ring(n), 1 * GB, Uniform(n, bandwidth=45e9, alpha=alpha))
    closed_form = 2 * (n - 1) * alpha + 2 * (n - 1) / n * GB / 45e9
    assert result.seconds == pytest.approx(closed_form, rel=1e-9)
    assert result.finish == pytest.approx(np.full(n, closed_form), rel=1e-9)
    transfers = closed_form - 2 * (n - 1) * alpha
    assert result.utilisation == pytest.approx(transfers / closed_form, rel=1e-9)


def test_a_ring_over_100000_ranks():
    start = time.perf_counter()
    n = 100_000
    result = simulate(ring(n), 1 * GB, Uniform(n, bandwidth=45e9, alpha=5e-6))
    assert time.perf_counter() - start < 60
    assert result.seconds == pytest.approx(cost(ring(n), GB, 5e-6, 1 / 45e9), rel=1e-6)


def test_one_rank_takes_no_time():
    result = simulate(ring(1), 1 * GB, Uniform(1, bandwidth=45e9))
    assert (result.seconds, result.busiest, result.busiest_name) == (0.0, None, None)
    assert result.utilisation == 0.0


# Shared links.


def one_step(perm, ranks, channels=1):
    table = np.zeros(ranks, int)
    steps = [Step(perm, table, table, Op.COPY, channel) for channel in range(channels)]
    return Schedule(ranks, 1, steps, Kind.ALL_REDUCE)


def dumbbell(bandwidth=1.0, latency=0.0):
    """Ranks 0 and 1, and on the other side of one link 2 and 3."""
    ends = [Link(f"gpu{r}", f"switch{r // 2}", 100.0) for r in range(4)]
    middle = Link("switch0", "switch1", bandwidth, latency)
    return Graph(tuple(f"gpu{r}" for r in range(4)), (*ends, middle))


def test_two_messages_over_one_link_take_twice_as_long():
    alone = simulate(one_step([(0, 2)], 4), 10.0, dumbbell())
    both = simulate(one_step([(0, 2), (1, 3)], 4), 10.0, dumbbell())
    opposite = simulate(one_step([(0, 2), (3, 1)], 4), 10.0, dumbbell())
    assert alone.seconds == opposite.seconds == pytest.approx(10.0)
    assert both.seconds == pytest.approx(20.0)
    assert both.busiest_name == "link from switch0 to switch1"
    assert both.utilisation == pytest.approx(1.0)


def test_messages_of_two_channels_share_a_port():
    topology = Uniform(2, bandwidth=1.0, alpha=0.5)
    assert simulate(one_step([(0, 1)], 2), 3.0, topology).seconds == pytest.approx(3.5)
    assert simulate(one_step([(0, 1)], 2, channels=2), 3.0, topology).seconds == pytest.approx(6.5)


def test_latencies_of_a_way_add_up():
    result = simulate(one_step([(0, 2)], 4), 10.0, dumbbell(latency=7.0))
    assert result.seconds == pytest.approx(17.0)


def test_a_link_carries_its_rounds_one_after_the_other():
    # Rank 0 has no part in the second message, but its own is still on the link that they share.
    table = np.zeros(4, int)
    steps = [Step([pair], table, table, Op.COPY) for pair in ((0, 2), (1, 3))]
    result = simulate(Schedule(4, 1, steps, Kind.ALL_REDUCE), 10.0, dumbbell())
    assert result.finish == pytest.approx([0.0, 0.0, 10.0, 20.0])


def test_both_directions_pay_off_where_a_rank_has_two_ports():
    n, size = 9, 1 * GB
    one_port = simulate(bidirectional_ring(n), size, Uniform(n, bandwidth=45e9)).seconds
    two_ports = simulate(bidirectional_ring(n), size, Torus((n,), latency=0.0)).seconds
    assert one_port == pytest.approx(cost(bidirectional_ring(n), size, 0.0, 1 / 45e9))
    assert two_ports == pytest.approx(one_port / 2)


def test_the_hierarchical_one_uses_all_nics():
    topology = NvlinkNodes(64)
    flat = simulate(ring(64), 1 * GB, topology)
    both = simulate(hierarchical(8, 8), 1 * GB, topology)
    assert both.seconds < flat.seconds / 4
    carried = both.link_bytes[2 * 64 : 3 * 64]  # The NICs.
    assert carried == pytest.approx(np.full(64, 2 * 7 / 8 * GB / 8))


def test_a_long_link_is_shared_by_all():
    topology = TwoDatacentres(32, node_size=4)
    # In its first step every rank sends half of the buffer to the other half of them.
    result = simulate(halving_doubling(32), 1 * GB, topology)
    assert result.busiest_name.startswith("long link")
    assert result.link_bytes[-2:] == pytest.approx([2 * 16 * GB / 2] * 2)


def test_ranks_drift_apart():
    # Rank 2 sends to 3 in the second round, and waits for nobody before.
    table = np.zeros(4, int)
    slow = Step([(0, 1)], np.zeros((4, 2), int), np.array([[0, 1]] * 4), Op.COPY)
    quick = Step([(2, 3)], table, table, Op.COPY)
    schedule = Schedule(4, 2, [slow, quick], Kind.ALL_REDUCE)
    result = simulate(schedule, 10.0, Uniform(4, bandwidth=1.0))
    assert result.finish == pytest.approx([0.0, 10.0, 0.0, 5.0])


# Slow and late ranks, and the time to reduce.


@pytest.mark.parametrize("n", [2, 5, 64])
def test_a_straggler_delays_a_ring_by_all_of_its_lateness(n):
    topology = Uniform(n, bandwidth=45e9, alpha=5e-6)
    on_time = simulate(ring(n), 1e6, topology).seconds
    late = simulate(ring(n), 1e6, topology, stragglers={n // 2: 3e-3}).seconds
    assert late == pytest.approx(on_time + 3e-3, rel=1e-9)


def test_a_straggler_delays_only_those_who_wait_for_it():
    result = simulate(
        one_step([(0, 1), (2, 3)], 4), 1.0, Uniform(4, bandwidth=1.0), stragglers={0: 5.0}
    )
    assert result.finish == pytest.approx([5.0, 6.0, 0.0, 1.0])


def test_lateness_may_be_hidden():
    # A rank that is a leaf late in its tree has time until its parent has heard of the others.
    n = 16
    topology = Uniform(n, bandwidth=1.0)
    on_time = simulate(double_binary_tree(n), 80.0, topology)
    delays = [
        simulate(double_binary_tree(n), 80.0, topology, stragglers={r: 1.0}).seconds
        - on_time.seconds
        for r in range(n)
    ]
    assert max(delays) <= 1.0 + 1e-9
    assert min(delays) < 0.5


def test_a_slow_rank_sets_the_pace_of_a_ring():
    n, size = 8, 1 * GB
    topology = Uniform(n, bandwidth=45e9)
    usual = simulate(ring(n), size, topology).seconds
    assert simulate(ring(n), size, topology, slowdowns={3: 2.5}).seconds == pytest.approx(
        2.5 * usual
    )


def test_reducing_takes_time_and_copying_does_not():
    n, size, gamma = 8, 1 * GB, 1 / 100e9
    topology = Uniform(n, bandwidth=45e9)
    extra = simulate(ring(n), size, topology, gamma=gamma).seconds
    extra -= simulate(ring(n), size, topology).seconds
    assert extra == pytest.approx((n - 1) / n * size * gamma, rel=1e-9)


def test_channels_are_reduced_one_after_the_other():
    table = np.zeros(2, int)
    steps = [Step([(0, 1)], table, table, Op.REDUCE, channel) for channel in range(3)]
    schedule = Schedule(2, 1, steps, Kind.ALL_REDUCE)
    result = simulate(schedule, 1.0, Uniform(2, bandwidth=1.0), gamma=10.0)
    assert result.seconds == pytest.approx(3.0 + 3 * 10.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stragglers": {8: 1.0}}, "stragglers names rank 8, there are 0 to 7"),
        ({"stragglers": {0: -1.0}}, r"stragglers\[0\] must be finite and at least 0, got -1.0"),
        ({"slowdowns": {2: 0.0}}, r"slowdowns\[2\] must be finite and above 0, got 0.0"),
        ({"slowdowns": {2: float("nan")}}, r"slowdowns\[2\] must be finite and above 0, got nan"),
        ({"stragglers": {0: float("inf")}}, r"stragglers\[0\] must be finite .*, got inf"),
        ({"gamma": -1.0}, "gamma must be finite and at least 0, got -1.0"),
        ({"nbytes": float("nan")}, "nbytes must be finite and at least 0, got nan"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(ring(8), **{"nbytes": 1.0, "topology": Uniform(8, bandwidth=1.0), **options})


def test_a_topology_of_other_ranks_is_refused():
    with pytest.raises(ValueError, match=r"the schedule has 8 ranks, the topology \(.*\) 4"):
        simulate(ring(8), 1.0, Uniform(4, bandwidth=1.0))


# Against an event loop.


class Message:
    def __init__(self, round, channel, reduces, source, destination, nbytes, route):
        self.round, self.channel, self.reduces = round, channel, reduces
        self.source, self.destination, self.nbytes = source, destination, nbytes
        self.route = route
        self.started = self.sent = self.arrived = self.reduced = False

    def uses(self, link):
        return link in self.route


def messages_of(schedule, nbytes, topology):
    result = []
    for index, steps in enumerate(schedule.by_round()):
        for _, step in steps:
            for source, destination in step.perm:
                route = [link for link in topology.routes([source], [destination])[0] if link >= 0]
                size = step.k * nbytes / schedule.chunks
                reduces = step.op is Op.REDUCE
                result.append(
                    Message(index, step.channel, reduces, source, destination, size, route)
                )
    return result


def event_loop(schedule, nbytes, topology, late=(), slow=(), gamma=0.0):
    """Follows the rules to the letter: at each event, looks for all that can begin."""
    late, slow = dict(late), dict(slow)
    messages = messages_of(schedule, nbytes, topology)
    now, finish = 0.0, [late.get(rank, 0.0) for rank in range(schedule.ranks)]
    tie = itertools.count()
    events = [(time, next(tie), None, "late") for time in finish]
    heapq.heapify(events)

    def begun(rank, index):
        open_ones = (m for m in messages if m.destination == rank and m.round < index)
        return now >= late.get(rank, 0.0) and all(m.reduced for m in open_ones)

    def link_is_free(link, index):
        return all(m.sent for m in messages if m.round < index and m.uses(link))

    def duration(message):
        seconds = [
            sum(m.nbytes for m in messages if m.round == message.round and m.uses(link))
            / topology.bandwidths[link]
            for link in message.route
        ]
        factor = max(slow.get(message.source, 1.0), slow.get(message.destination, 1.0))
        return max(seconds, default=0.0) * factor, factor

    def first_to_reduce(message):
        siblings = [
            m
            for m in messages
            if (m.round, m.destination) == (message.round, message.destination) and not m.reduced
        ]
        return message is min(siblings, key=lambda m: m.channel)

    busy = set()
    while events:
        now, _, message, what = heapq.heappop(events)
        if message:
            setattr(message, what, True)
            if what == "reduced":
                busy.discard(message.destination)
                finish[message.destination] = now
        for m in messages:
            ends = (m.source, m.destination)
            ready = not m.started and all(begun(rank, m.round) for rank in ends)
            if ready and all(link_is_free(link, m.round) for link in m.route):
                m.started = True
                transfer, factor = duration(m)
                latency = factor * sum(topology.latencies[link] for link in m.route)
                heapq.heappush(events, (now + transfer, next(tie), m, "sent"))
                heapq.heappush(events, (now + transfer + latency, next(tie), m, "arrived"))
            if m.arrived and not m.reduced and m.destination not in busy and first_to_reduce(m):
                busy.add(m.destination)
                end = now + gamma * m.nbytes * m.reduces
                heapq.heappush(events, (end, next(tie), m, "reduced"))
    return finish


TOPOLOGIES = [
    Uniform(4, bandwidth=3.0, alpha=0.25),
    NvlinkNodes(4, 2, 5.0, 0.1, 1.0, 0.5),
    TwoDatacentres(4, 2, 5.0, 0.1, 1.0, 0.5, long_bandwidth=1.5, long_latency=2.0),
    Torus((2, 2), 2.0, 0.3),
    Torus((4,), 2.0, 0.0),
    dumbbell(),
]


@st.composite
def schedules(draw, ranks=4, longest=6):
    chunks = draw(st.integers(1, 4))
    runs = []
    for channel in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 3))):
            sources = draw(st.permutations(range(ranks)))
            destinations = draw(st.permutations(range(ranks)))
            messages = draw(st.integers(0, ranks))
            k = draw(st.integers(1, chunks))
            table = np.tile(np.arange(k), (ranks, 1))
            perm = list(zip(sources, destinations, strict=True))[:messages]
            op = draw(st.sampled_from(Op))
            runs.append(Run(Step(perm, table, table, op, channel), draw(st.integers(1, longest))))
    return Schedule(ranks, chunks, runs, Kind.ALL_REDUCE)


seconds = st.floats(0.0, 5.0)
some_ranks = st.integers(0, 3)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    schedule=schedules(),
    topology=st.sampled_from(TOPOLOGIES),
    nbytes=st.sampled_from([0.0, 1.0, 12.0]),
    stragglers=st.dictionaries(some_ranks, seconds),
    slowdowns=st.dictionaries(some_ranks, st.sampled_from([0.5, 2.0])),
    gamma=st.sampled_from([0.0, 0.7]),
)
def test_it_agrees_with_an_event_loop(schedule, topology, nbytes, stragglers, slowdowns, gamma):
    options = {"stragglers": stragglers, "slowdowns": slowdowns, "gamma": gamma}
    result = simulate(schedule, nbytes, topology, **options)
    expected = event_loop(schedule, nbytes, topology, stragglers, slowdowns, gamma)
    assert result.finish == pytest.approx(expected, rel=1e-9, abs=1e-9)


def critical_path(schedule, nbytes, topology):
    """The time without any waiting for links."""
    ready = [0.0] * schedule.ranks
    for steps in schedule.by_round():
        after = list(ready)
        for _, step in steps:
            for source, destination in step.perm:
                route = topology.routes([source], [destination])[0]
                size = step.k * nbytes / schedule.chunks
                alone = sum(topology.latencies[route])
                alone += max((size / topology.bandwidths[link] for link in route), default=0.0)
                start = max(ready[source], ready[destination])
                after[destination] = max(after[destination], start + alone)
        ready = after
    return max(ready)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(schedule=schedules(), nbytes=st.sampled_from([0.0, 1.0, 12.0]))
def test_it_takes_at_least_the_critical_path(schedule, nbytes):
    topology = Uniform(4, bandwidth=3.0, alpha=0.25)
    bound = critical_path(schedule, nbytes, topology)
    assert simulate(schedule, nbytes, topology).seconds >= bound * (1 - 1e-9)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(schedule=schedules(longest=40), topology=st.sampled_from(TOPOLOGIES))
def test_bytes_are_conserved_and_links_are_never_overfull(schedule, topology):
    nbytes = 12.0
    result = simulate(schedule, nbytes, topology)
    carried = np.zeros_like(result.link_bytes)
    for message in messages_of(schedule, nbytes, topology):
        carried[message.route] += message.nbytes
    assert result.link_bytes == pytest.approx(carried)
    assert (carried / topology.bandwidths <= result.seconds * (1 + 1e-9)).all()
    assert 0 <= result.utilisation <= 1 + 1e-9


# Multiplying instead of simulating.


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    schedule=schedules(longest=300),
    topology=st.sampled_from(TOPOLOGIES),
    stragglers=st.dictionaries(some_ranks, seconds),
)
def test_multiplied_rounds_are_exactly_those_simulated(schedule, topology, stragglers):
    multiplied = simulate(schedule, 12.0, topology, stragglers=stragglers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LOOK", 1)  # Never looks.
        simulated = simulate(schedule, 12.0, topology, stragglers=stragglers)
    assert (multiplied.finish == simulated.finish).all()


@pytest.mark.parametrize(
    "make_one", [ring, bidirectional_ring, direct, lambda n: hierarchical(8, 8)]
)
@pytest.mark.parametrize("topology", [NvlinkNodes(64), TwoDatacentres(64), Torus((8, 8))])
@pytest.mark.parametrize("slowdowns", [{}, {5: 1.5, 40: 1.2}])
def test_multiplied_rounds_of_algorithms(make_one, topology, slowdowns, monkeypatch):
    simulator = Simulator(make_one(64), topology)
    multiplied = simulator.run(1e6, stragglers={3: 1e-4}, slowdowns=slowdowns)
    monkeypatch.setattr(module, "_LOOK", 1)
    simulated = simulator.run(1e6, stragglers={3: 1e-4}, slowdowns=slowdowns)
    assert (multiplied.finish == simulated.finish).all()


def test_few_rounds_of_a_long_run_are_simulated(monkeypatch):
    rounds = []
    original = module._round
    monkeypatch.setattr(module, "_round", lambda *a: rounds.append(1) or original(*a))
    simulate(ring(1000), 1 * GB, NvlinkNodes(1000))
    assert len(rounds) < 60  # Of 1998.


def run_of(perm, ranks, count):
    table = np.zeros(ranks, int)
    run = Run(Step(perm, table, table, Op.COPY), count)
    return Schedule(ranks, 1, [run], Kind.ALL_REDUCE)


def test_late_messages_hold_up_a_shared_link_in_every_round():
    schedule = run_of([(0, 2), (1, 3)], 4, 6)
    result = simulate(schedule, 10.0, dumbbell(), stragglers={1: 5.0})
    assert result.finish == pytest.approx([0.0, 5.0, 125.0, 125.0])
    assert result.finish == pytest.approx(event_loop(schedule, 10.0, dumbbell(), {1: 5.0}))


def test_multiplied_rounds_leave_those_alone_who_have_no_part_in_them():
    schedule = run_of([(0, 1), (1, 0)], 4, 1000)
    result = simulate(schedule, 10.0, Uniform(4, bandwidth=1.0), stragglers={3: 7.0})
    assert result.finish == pytest.approx([10_000.0, 10_000.0, 0.0, 7.0])


def test_ranks_that_take_long_to_fall_into_step_are_multiplied_then(monkeypatch):
    rounds = []
    original = module._round
    monkeypatch.setattr(module, "_round", lambda *a: rounds.append(1) or original(*a))
    n = 200  # A delay takes as many rounds to reach everybody.
    schedule = run_of([(r, (r + 1) % n) for r in range(n)], n, 100_000)
    result = simulate(schedule, 2.0, Uniform(n, bandwidth=1.0), stragglers={3: 1.0})
    assert result.finish == pytest.approx(np.full(n, 200_001.0), rel=1e-9)
    assert n <= len(rounds) < 2 * n


@pytest.mark.parametrize("name", FAMILIES)
def test_algorithms_take_about_what_the_model_says_where_nothing_is_shared(name):
    n, alpha, bandwidth = 16, 5e-6, 45e9
    for kind in FAMILIES[name]:
        schedule = make(name, kind, n)
        modelled = cost(schedule, 1e6, alpha, 1 / bandwidth)
        simulated = simulate(schedule, 1e6, Uniform(n, bandwidth, alpha)).seconds
        # A model with barriers between the rounds is an upper bound; partial steps need no barrier.
        lowest = 0.8 if name == "double_binary_tree" else 1 - 1e-9
        assert lowest * modelled <= simulated <= modelled * (1 + 1e-9)


def test_a_simulator_serves_several_sizes():
    topology = NvlinkNodes(16)
    simulator = Simulator(halving_doubling(16), topology)
    for size in (0.0, 1.0, 1e6, 1e12):
        once = simulate(halving_doubling(16), size, topology)
        assert simulator.run(size).seconds == once.seconds


def test_it_holds_over_many_orders_of_magnitude():
    for scale in (1e-12, 1.0, 1e12):
        topology = Uniform(100, bandwidth=1 / scale, alpha=scale)
        assert simulate(ring(100), 100.0, topology).seconds == pytest.approx(
            198 * 2 * scale, rel=1e-9
        )
