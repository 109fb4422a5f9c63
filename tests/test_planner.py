import math

import pytest

from jax_ring import planner as module
from jax_ring.planner import Planner, plan_algorithms
from jax_ring.schedules import FAMILIES, Kind, cost, hierarchical, ring, torus_orders
from jax_ring.schedules.families import make, names
from jax_ring.schedules.simulate import simulate
from jax_ring.schedules.topology import NvlinkNodes, Torus, TwoDatacentres, Uniform

GB = 10**9


def by_name(plan):
    return {prediction.name: prediction for prediction in plan.predictions}


@pytest.mark.parametrize("kind", Kind)
def test_every_algorithm_is_priced_by_the_model(kind):
    plan = plan_algorithms(12, GB, kind=kind, alpha=5e-6, bandwidth=45e9)
    assert set(by_name(plan)) == set(names(kind))
    assert plan.skipped == ()
    for name, prediction in by_name(plan).items():
        schedule = make(name, kind, 12)
        expected = cost(schedule, GB, 5e-6, 1 / 45e9)
        assert prediction.seconds == prediction.model_seconds == expected
        assert prediction.simulated_seconds is prediction.busiest_link is None
        assert prediction.steps == schedule.rounds
        assert prediction.channels == schedule.channels


def test_the_best_comes_first_and_of_equals_the_one_of_fewer_steps():
    plan = plan_algorithms(8, GB, alpha=0.0, bandwidth=400e9)
    seconds = [prediction.seconds for prediction in plan.predictions]
    assert seconds == pytest.approx(sorted(seconds))
    equals = [p for p in plan.predictions if p.seconds == pytest.approx(4.375e-3)]
    assert [p.steps for p in equals] == sorted(p.steps for p in equals)
    assert {p.name for p in equals} >= {"ring", "direct", "halving_doubling"}


@pytest.mark.parametrize(
    ("kind", "factor", "sent"),
    [
        (Kind.ALL_REDUCE, 1.75, 1.75),
        (Kind.REDUCE_SCATTER, 0.875, 0.875),
        (Kind.ALL_GATHER, 0.875, 0.875),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(kind, factor, sent):
    found = by_name(plan_algorithms(8, GB, kind=kind, alpha=0.0, bandwidth=400e9))["ring"]
    assert found.busbw == pytest.approx(400e9)
    assert found.algbw == pytest.approx(400e9 / factor)
    assert found.bytes_per_rank == sent * GB


def test_a_topology_is_simulated():
    topology = NvlinkNodes(32)
    plan = plan_algorithms(32, GB, topology=topology)
    assert (plan.alpha, plan.bandwidth) == (topology.hockney[0], pytest.approx(45e9))
    for name in FAMILIES:
        prediction = by_name(plan)[name]
        result = simulate(make(name, Kind.ALL_REDUCE, 32), GB, topology)
        assert prediction.seconds == prediction.simulated_seconds == result.seconds
        assert prediction.busiest_link == result.busiest_name
        assert prediction.utilisation == result.utilisation


def test_alpha_and_bandwidth_stand_before_those_of_the_topology():
    plan = plan_algorithms(16, GB, topology=NvlinkNodes(16), alpha=1.0, bandwidth=1e9)
    found = by_name(plan)["ring"]
    assert found.model_seconds == pytest.approx(cost(ring(16), GB, 1.0, 1e-9))
    assert found.simulated_seconds < 1.0


def test_nodes_bring_hierarchies():
    found = by_name(plan_algorithms(32, GB, topology=NvlinkNodes(32)))
    hierarchies = [name for name in found if name.startswith("hierarchical")]
    assert "hierarchical(8, 4, ring, ring)" in hierarchies
    assert len(hierarchies) == len(set(hierarchies)) > 2
    for name in hierarchies:
        inner, outer, inside, across = name[len("hierarchical(") : -1].split(", ")
        schedule = hierarchical(int(inner), int(outer), inside, across)
        assert found[name].seconds == simulate(schedule, GB, NvlinkNodes(32)).seconds
    assert min(found.values(), key=lambda p: p.seconds).name in hierarchies


@pytest.mark.parametrize(
    ("topology", "groups"),
    [(Uniform(16, 1e9), set()), (NvlinkNodes(8), set()), (TwoDatacentres(16, 4), {4, 8})],
)
def test_hierarchies_follow_the_groups(topology, groups):
    found = by_name(plan_algorithms(topology.ranks, GB, topology=topology))
    hierarchies = [name for name in found if name.startswith("hierarchical")]
    assert {int(name.split("(")[1].split(",")[0]) for name in hierarchies} == groups


def test_a_torus_brings_two_rings():
    topology = Torus((8, 4), latency=0.0)
    found = by_name(plan_algorithms(32, GB, topology=topology))
    both = found["ring(channels=2, torus_orders)"]
    schedule = ring(32, channels=2, orders=torus_orders(8, 4))
    assert both.seconds == simulate(schedule, GB, topology).seconds
    assert both.seconds == pytest.approx(found["ring"].seconds / 2)
    for shape in ((6, 4), (32,), (2, 4, 4)):
        assert not any(
            "orders" in name
            for name in by_name(plan_algorithms(math.prod(shape), GB, topology=Torus(shape)))
        )


def test_a_reduce_scatter_has_no_hierarchy():
    plan = plan_algorithms(16, GB, kind=Kind.REDUCE_SCATTER, topology=NvlinkNodes(16))
    assert set(by_name(plan)) == set(names(Kind.REDUCE_SCATTER))


def test_a_wire_carries_fewer_bytes():
    options = {"alpha": 0.0, "bandwidth": 45e9}
    plain = by_name(plan_algorithms(8, GB, itemsize=4, **options))["ring"]
    bf16 = by_name(plan_algorithms(8, GB, itemsize=4, wire="bfloat16", **options))["ring"]
    int8 = by_name(plan_algorithms(8, GB, itemsize=2, wire="int8", **options))["ring"]
    assert bf16.bytes_per_rank == plain.bytes_per_rank / 2
    assert int8.bytes_per_rank / plain.bytes_per_rank == pytest.approx(0.5 * (1 + 2 / 256), 1e-4)
    assert bf16.seconds == pytest.approx(plain.seconds / 2)
    assert bf16.algbw == pytest.approx(2 * plain.algbw)  # Of the buffer, whatever travels.


@pytest.mark.parametrize(
    "options", [{"stragglers": {3: 1.0}}, {"slowdowns": {3: 2.0}}, {"gamma": 1e-9}]
)
def test_what_only_a_simulation_knows_is_simulated(options):
    plan = plan_algorithms(8, GB, alpha=1e-6, bandwidth=45e9, **options)
    expected = simulate(ring(8), GB, Uniform(8, 45e9, 1e-6), **options).seconds
    assert by_name(plan)["ring"].seconds == pytest.approx(expected, rel=1e-9)
    assert by_name(plan)["ring"].seconds > by_name(plan)["ring"].model_seconds


def test_schedules_too_large_are_left_out_and_said(monkeypatch):
    monkeypatch.setattr(module, "LARGEST_TABLES", 100_000_000)
    plan = plan_algorithms(1024, GB, alpha=5e-6, bandwidth=45e9)
    (skipped,) = plan.skipped
    assert skipped.name == "direct"
    # 2046 steps of 1024 messages of 16 + 128 bytes.
    assert skipped.reason == "making it for 1024 ranks takes about 0.3 GB of tables"
    assert set(by_name(plan)) == set(names(Kind.ALL_REDUCE)) - {"direct"}


@pytest.mark.parametrize(
    "candidate",
    [
        *module._candidates(512, Kind.ALL_REDUCE, NvlinkNodes(512)),
        *module._candidates(512, Kind.ALL_REDUCE, Torus((16, 32))),
    ],
    ids=lambda candidate: candidate.name,
)
def test_the_estimate_of_tables_is_about_right(candidate):
    schedule = candidate.make(512)
    actual = module._bytes_of(schedule, candidate.expands)
    assert module._table_bytes(candidate, 512) == pytest.approx(actual, rel=0.35)


def test_one_rank_has_nothing_to_do():
    for options in ({"bandwidth": 1.0}, {"topology": Uniform(1, 1.0)}):
        plan = plan_algorithms(1, GB, **options)
        assert {(p.seconds, p.algbw, p.busbw) for p in plan.predictions} == {(0.0, None, None)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give a topology, or a bandwidth"),
        ({"bandwidth": 0.0}, "bandwidth must be finite and above 0, got 0.0"),
        ({"bandwidth": math.inf}, "bandwidth must be finite and above 0, got inf"),
        ({"bandwidth": math.nan}, "bandwidth must be finite and above 0, got nan"),
        ({"bandwidth": 1e-320}, "bandwidth must be finite and above 0, got 1e-320"),
        ({"bandwidth": 1.0, "alpha": -1.0}, "alpha must be finite and not negative, got -1.0"),
        ({"bandwidth": 1.0, "alpha": math.inf}, "alpha must be finite and not negative, got inf"),
        ({"bandwidth": 1.0, "alpha": math.nan}, "alpha must be finite and not negative, got nan"),
        ({"bandwidth": 1.0, "nbytes": -1}, "nbytes must be finite and not negative, got -1"),
        ({"bandwidth": 1.0, "nbytes": math.inf}, "nbytes must be finite and not negative, got inf"),
        ({"bandwidth": 1.0, "itemsize": 0}, "itemsize must be an integer of at least 1, got 0"),
        ({"bandwidth": 1.0, "itemsize": 2.5}, "itemsize must be an integer of at least 1, got 2.5"),
        ({"bandwidth": 1.0, "gamma": math.nan}, "gamma must be finite and at least 0, got nan"),
        ({"bandwidth": 1.0, "wire": "int3"}, "wire must be None, a WireFormat or one of"),
        ({"bandwidth": 1.0, "ranks": 0}, "ranks must be an integer of at least 1, got 0"),
        ({"topology": Uniform(4, 1.0)}, "the schedule has 8 ranks, the topology .* 4"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        plan_algorithms(**{"ranks": 8, "nbytes": GB, **options})


def test_a_planner_serves_several_sizes():
    planner = Planner(16, topology=NvlinkNodes(16))
    small, large = planner.plan(1000), planner.plan(GB)
    assert small == plan_algorithms(16, 1000, topology=NvlinkNodes(16))
    assert large == plan_algorithms(16, GB, topology=NvlinkNodes(16))
    assert small.predictions[0].steps < large.predictions[0].steps
