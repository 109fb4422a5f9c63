import dataclasses

import pytest
from algorithms import (
    halving_doubling,
    recursive_doubling,
    reduce_and_broadcast,
    relay,
    swapped_in_reverse,
)

from jax_ring.plan import Source, overwrites, plan, suits_calls
from jax_ring.schedules import (
    Kind,
    Op,
    Schedule,
    Step,
    bidirectional_ring,
    direct,
    double_binary_tree,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    verify,
)


def segments(schedule):
    """Those of the only channel."""
    (only,) = plan(schedule).channels
    return only


def test_the_ring_forwards_and_stores_only_finished_chunks():
    traits = [
        (s.count, s.traits.origin.source, s.rest.source, s.traits.store, s.traits.finishes)
        for s in segments(ring(8))
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
    traits = [
        (s.traits.origin.source, s.traits.adds_to is not None, s.traits.store)
        for s in segments(direct(4))
    ]
    assert traits == [
        (Source.LOAD, False, False),
        (Source.LOAD, True, False),
        (Source.LOAD, True, True),
        (Source.FORWARD, False, True),
        (Source.RESEND, False, True),
        (Source.RESEND, False, True),
    ]
    assert [s.traits.raw for s in segments(direct(4))] == [True] * 3 + [False] * 3
    assert not any((state.partials_travel, state.widened, state.redundant, state.reencodes))


def test_who_completes_a_sum_and_what_is_copied_later():
    assert plan(recursive_doubling(4)).redundant
    assert plan(halving_doubling(4)).reencodes
    for make in (ring, direct, relay, reduce_and_broadcast):
        assert not plan(make(4)).redundant
        assert not plan(make(4)).reencodes


def test_the_halves_of_the_ring():
    scatter = plan(ring_reduce_scatter(8))
    assert scatter.result == 0
    assert not any(s.traits.store for s in scatter.channels[0])
    assert [s.traits.finishes for s in scatter.channels[0]] == [False, True]
    gather = plan(ring_all_gather(8))
    assert not gather.widened
    assert {s.traits.origin.source for s in gather.channels[0]} == {Source.FORWARD}
    assert not any(s.traits.finishes for s in gather.channels[0])


def test_partial_sums_on_the_way_are_noticed():
    verify(relay(4))
    assert plan(relay(4)).widened
    assert not any(s.traits.finishes for s in segments(relay(4)))


@pytest.mark.parametrize("make", [recursive_doubling, reduce_and_broadcast, halving_doubling])
def test_a_sum_of_several_steps_is_held_until_it_is_finished(make):
    state = plan(make(4))
    assert not state.widened
    sums = [s.traits for s in segments(make(4)) if s.first.op is Op.REDUCE]
    assert [t.finishes for t in sums] == [False] * (len(sums) - 1) + [True]
    assert [t.store for t in sums] == [False] * (len(sums) - 1) + [True]


def test_halves_of_a_sum_are_sent_and_added_to_in_hand():
    first, second, third, *gather = segments(halving_doubling(8))
    assert first.traits.origin.source is Source.LOAD
    for earlier, later in ((first, second), (second, third)):
        assert not earlier.traits.store
        origin, added = later.traits.origin, later.traits.adds_to
        assert origin.source is Source.FORWARD
        for rank in range(8):
            made = earlier.first.recv[rank]
            assert list(made[list(origin.places[rank])]) == list(later.first.send[rank])
            assert list(made[list(added.places[rank])]) == list(later.first.recv[rank])
    assert third.traits.store
    assert third.traits.finishes
    assert len(gather) == 3


def test_steps_are_covered_once_and_in_order():
    for schedule in (ring(7), direct(5), halving_doubling(8), relay(4), reduce_and_broadcast(5)):
        found = segments(schedule)
        steps = [
            s.first.advanced(t * s.advance, schedule.chunks) for s in found for t in range(s.count)
        ]
        assert steps == list(schedule.steps)
        starts = [s.start for s in found]
        assert starts == [sum(s.count for s in found[:i]) for i in range(len(found))]


def test_plans_do_not_depend_on_how_runs_were_written():
    written_out = dataclasses.replace(ring(6), steps=list(ring(6).steps))
    assert plan(written_out) == plan(ring(6))


@pytest.mark.parametrize("n", [4, 5, 8, 9])
def test_both_ways_of_a_ring_meet_in_hand(n):
    state = plan(bidirectional_ring(n))
    ending = {s.first.channel for part in state.channels for s in part if s.traits.finishes}
    assert len(ending) == 1, "one of the two completes each sum"
    gathers = [next(s for s in part if s.first.op is Op.COPY) for part in state.channels]
    assert {s.traits.origin.source for s in gathers} == {Source.FORWARD}
    assert {s.traits.origin.channel for s in gathers} == ending
    assert not any((state.widened, state.redundant, state.reencodes))


def test_finished_chunks_are_not_copied_in_parts():
    both, table = [[0, 1]] * 3, [[1]] * 3
    up = [Step(((r, 0),), both, both, Op.REDUCE) for r in (1, 2)]
    down = [Step(((0, r),), both, both, Op.COPY) for r in (1, 2)]
    schedule = Schedule(3, 2, [*up, Step(((0, 2),), table, table, Op.COPY), *down], Kind.ALL_REDUCE)
    verify(schedule)
    state = plan(schedule)
    assert state.reencodes
    assert all(s.traits.origin.places is None for s in state.segments)


def test_what_custom_calls_can_work_on():
    one_or_all = [ring(8), bidirectional_ring(4), direct(4), recursive_doubling(8), relay(4)]
    assert all(map(suits_calls, [*one_or_all, ring_reduce_scatter(4), direct(5)]))
    assert not any(map(overwrites, one_or_all))
    assert suits_calls(ring(8, segments=2))
    assert suits_calls(ring(3, segments=2, channels=2))
    # Some chunks at once; all of them, but in another order; stores among what is still read.
    assert not suits_calls(halving_doubling(8))
    assert not suits_calls(swapped_in_reverse())
    assert overwrites(double_binary_tree(5))
    assert not suits_calls(double_binary_tree(5))


def test_what_waits_until_nothing_more_is_read():
    # The last reduction of the second segment reads in round 2 x 7 - 1.
    state = plan(ring(8, segments=2))
    assert (state.stores_from, state.renews) == (13, True)
    assert plan(double_binary_tree(5)).stores_from == 0
