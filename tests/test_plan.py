import dataclasses

import pytest
from algorithms import halving_doubling, recursive_doubling, reduce_and_broadcast, relay

from jax_ring.plan import Source, plan
from jax_ring.schedules import Op, direct, ring, ring_all_gather, ring_reduce_scatter, verify


def test_the_ring_forwards_and_stores_only_finished_chunks():
    segments = plan(ring(8)).segments
    traits = [
        (s.count, s.traits.source, s.rest, s.traits.store, s.traits.finishes) for s in segments
    ]
    assert traits == [
        (6, Source.LOAD, Source.FORWARD, False, False),
        (1, Source.FORWARD, Source.FORWARD, True, True),
        (7, Source.FORWARD, Source.FORWARD, True, False),
    ]
    assert not plan(ring(8)).widened
    assert plan(ring(8)).partials_travel


def test_a_direct_exchange_sums_in_hand_and_sends_its_sum_again_and_again():
    state = plan(direct(4))
    traits = [(s.traits.source, s.traits.accumulates, s.traits.store) for s in state.segments]
    assert traits == [
        (Source.LOAD, False, False),
        (Source.LOAD, True, False),
        (Source.LOAD, True, True),
        (Source.FORWARD, False, True),
        (Source.RESEND, False, True),
        (Source.RESEND, False, True),
    ]
    assert [s.traits.raw for s in state.segments] == [True] * 3 + [False] * 3
    assert not any((state.partials_travel, state.widened, state.redundant, state.reencodes))


def test_who_completes_a_sum_and_what_is_copied_later():
    assert plan(recursive_doubling(4)).redundant
    assert plan(halving_doubling(4)).reencodes
    for make in (ring, direct, relay, reduce_and_broadcast):
        assert not plan(make(4)).redundant
        assert not plan(make(4)).reencodes


def test_the_halves_of_the_ring():
    scatter = plan(ring_reduce_scatter(8))
    assert scatter.result_is_last_value
    assert not any(s.traits.store for s in scatter.segments)
    assert [s.traits.finishes for s in scatter.segments] == [False, True]
    gather = plan(ring_all_gather(8))
    assert not gather.widened
    assert {s.traits.source for s in gather.segments} == {Source.FORWARD}
    assert not any(s.traits.finishes for s in gather.segments)


@pytest.mark.parametrize("make", [halving_doubling, relay])
def test_partial_sums_on_the_way_are_noticed(make):
    verify(make(4))
    assert plan(make(4)).widened
    assert not any(s.traits.finishes for s in plan(make(4)).segments)


@pytest.mark.parametrize("make", [recursive_doubling, reduce_and_broadcast])
def test_a_sum_of_several_steps_is_held_until_it_is_finished(make):
    state = plan(make(4))
    assert not state.widened
    sums = [s.traits for s in state.segments if s.first.op is Op.REDUCE]
    assert [t.finishes for t in sums] == [False] * (len(sums) - 1) + [True]
    assert [t.store for t in sums] == [False] * (len(sums) - 1) + [True]


def test_steps_are_covered_once_and_in_order():
    for schedule in (ring(7), direct(5), halving_doubling(8), relay(4), reduce_and_broadcast(5)):
        segments = plan(schedule).segments
        steps = [
            s.first.advanced(t * s.advance, schedule.chunks)
            for s in segments
            for t in range(s.count)
        ]
        assert steps == list(schedule.steps)
        starts = [s.start for s in segments]
        assert starts == [sum(s.count for s in segments[:i]) for i in range(len(segments))]


def test_plans_do_not_depend_on_how_runs_were_written():
    written_out = dataclasses.replace(ring(6), steps=list(ring(6).steps))
    assert plan(written_out) == plan(ring(6))
