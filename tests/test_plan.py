import dataclasses

import pytest
from algorithms import halving_doubling, recursive_doubling, reduce_and_broadcast, relay

from jax_ring.plan import plan
from jax_ring.schedules import ring, ring_all_gather, ring_reduce_scatter, verify


def test_the_ring_forwards_and_stores_only_finished_chunks():
    segments = plan(ring(8)).segments
    traits = [(s.count, s.load_first, s.load_rest, s.store, s.finishes) for s in segments]
    assert traits == [
        (6, True, False, False, False),
        (1, False, False, True, True),
        (7, False, False, True, False),
    ]
    assert not plan(ring(8)).widened


def test_the_halves_of_the_ring():
    scatter = plan(ring_reduce_scatter(8))
    assert scatter.result_is_last_value
    assert not any(s.store for s in scatter.segments)
    assert [s.finishes for s in scatter.segments] == [False, True]
    gather = plan(ring_all_gather(8))
    assert not gather.widened
    assert not any(s.load_first or s.load_rest or s.finishes for s in gather.segments)


@pytest.mark.parametrize("make", [recursive_doubling, halving_doubling, relay])
def test_partial_sums_on_the_way_are_noticed(make):
    verify(make(4))
    assert plan(make(4)).widened
    assert not any(s.finishes for s in plan(make(4)).segments)


def test_a_star_finishes_in_its_last_sum():
    # Rank 0 adds to its chunk in the buffer, so the buffer holds partial sums.
    assert plan(reduce_and_broadcast(4)).widened
    assert not plan(reduce_and_broadcast(2)).widened


def test_steps_are_covered_once_and_in_order():
    for schedule in (ring(7), halving_doubling(8), relay(4), reduce_and_broadcast(5)):
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
