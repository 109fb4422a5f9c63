"""A verifier is worth what it rejects: each test breaks a good schedule in one way."""

import dataclasses

import numpy as np
import pytest

from jax_ring.schedules import (
    Kind,
    Op,
    Schedule,
    ScheduleError,
    Step,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    verify,
)


def broken(schedule, index, **changes):
    steps = list(schedule.steps)
    steps[index] = dataclasses.replace(steps[index], **changes)
    return dataclasses.replace(schedule, steps=steps)


def fails(schedule, match, *, step=None, rank=None, chunk=None):
    with pytest.raises(ScheduleError, match=match) as caught:
        verify(schedule)
    assert (caught.value.step, caught.value.rank, caught.value.chunk) == (step, rank, chunk)


def test_a_missing_last_step_is_named():
    schedule = dataclasses.replace(ring(4), steps=list(ring(4).steps)[:-1])
    fails(schedule, "lacks the contributions of ranks", step=1, rank=3, chunk=0)


def test_a_wrong_chunk_sent_is_found():
    send = ring(4).steps[1].send.copy()
    send[2] = (send[2] + 1) % 4
    message = "data of chunk 1 is reduced into data of chunk 0"
    fails(broken(ring(4), 1, send=send), message, step=1, rank=3, chunk=0)


def test_a_step_done_twice_counts_contributions_twice():
    steps = list(ring(4).steps)
    again = dataclasses.replace(ring(4), steps=[steps[0], *steps])
    fails(again, r"contributions of ranks \[0\] are counted twice", step=1, rank=1, chunk=3)


def test_a_wrong_chunk_reduced_into_is_found():
    recv = ring(4).steps[0].recv.copy()
    recv[1] = (recv[1] + 1) % 4
    message = "data of chunk 3 is reduced into data of chunk 0"
    fails(broken(ring(4), 0, recv=recv), message, step=0, rank=1, chunk=0)


def test_copying_instead_of_reducing_loses_contributions():
    fails(broken(ring(4), 1, op=Op.COPY), "lacks the contributions", step=2, rank=0, chunk=0)


def test_reducing_instead_of_copying_counts_twice():
    fails(broken(ring(4), 4, op=Op.REDUCE), "counted twice", step=4, rank=1, chunk=3)


def test_sending_what_is_not_held_yet():
    send = ring_all_gather(4).steps[0].send.copy()
    send[2] = 0
    fails(
        broken(ring_all_gather(4), 0, send=send),
        "sends chunk 0, which it does not hold yet",
        step=0,
        rank=2,
        chunk=0,
    )


def test_storing_a_gathered_chunk_in_the_wrong_place():
    recv = ring_all_gather(3).steps[1].recv.copy()
    recv[0] = 2
    fails(broken(ring_all_gather(3), 1, recv=recv), "rank 0, chunk 1 lacks", rank=0, chunk=1)


def test_two_senders_to_one_rank():
    perm = ((0, 1), (1, 2), (2, 3), (3, 1))
    fails(broken(ring(4), 0, perm=perm), "rank 1 is a destination twice", step=0, rank=1)


def test_two_messages_from_one_rank():
    perm = ((0, 1), (0, 2), (2, 3), (3, 0))
    fails(broken(ring(4), 2, perm=perm), "rank 0 is a source twice", step=2, rank=0)


def test_a_rank_that_does_not_exist():
    perm = ((0, 1), (1, 2), (2, 3), (3, 4))
    fails(broken(ring(4), 0, perm=perm), "destination 4 is not one of the 4 ranks", step=0, rank=4)


def test_a_chunk_that_does_not_exist():
    send = ring(4).steps[0].send.copy()
    send[3] = 4
    fails(broken(ring(4), 0, send=send), r"send\[3\] names chunk 4 of 4", step=0, rank=3, chunk=4)


def test_a_table_for_other_ranks():
    fails(broken(ring(4), 0, send=np.zeros((3, 1), int)), r"shape \(4, 1\), got \(3, 1\)", step=0)


def test_a_chunk_named_twice_in_a_message():
    step = Step(((0, 1), (1, 0)), [[0, 0], [1, 1]], [[0, 1], [0, 1]], Op.COPY)
    schedule = Schedule(2, 2, [step], Kind.ALL_REDUCE)
    fails(schedule, r"send\[0\] names chunk 0 twice", step=0, rank=0, chunk=0)


def test_no_steps_reduce_nothing():
    schedule = Schedule(2, 2, [], Kind.REDUCE_SCATTER)
    fails(
        schedule, r"lacks the contributions of ranks \[1\]; it was never written", rank=0, chunk=0
    )


def test_a_scatter_ends_with_the_own_chunk():
    steps = [
        dataclasses.replace(s, send=(s.send + 1) % 4, recv=(s.recv + 1) % 4)
        for s in ring_reduce_scatter(4).steps
    ]
    with pytest.raises(ScheduleError, match="rank 0, chunk 0 lacks"):
        verify(dataclasses.replace(ring_reduce_scatter(4), steps=steps))


def test_a_scatter_needs_a_chunk_for_each_rank():
    with pytest.raises(ScheduleError, match="needs a multiple of 2 chunks, got 3"):
        verify(Schedule(2, 3, [], Kind.REDUCE_SCATTER))


def test_sums_of_different_association_are_not_the_same_bits():
    table = [0] * 4
    steps = [
        Step(((0, 1), (1, 0)), table, table, Op.REDUCE),  # ranks 0 and 1: a + b
        Step(((2, 1), (3, 2)), table, table, Op.REDUCE),  # 1: (a + b) + c, 2: c + d
        Step(((3, 1), (2, 0)), table, table, Op.REDUCE),  # 1: ((a + b) + c) + d
        Step(((0, 2), (1, 3)), table, table, Op.COPY),  # 0 and 2: (a + b) + (c + d)
    ]
    schedule = Schedule(4, 1, steps, Kind.ALL_REDUCE)
    fails(schedule, "ranks 0 and 1 reduce it in different orders", step=2, rank=1, chunk=0)


def test_recursive_doubling_is_the_same_tree_everywhere():
    table = [0] * 4
    pairs = Step(((0, 1), (1, 0), (2, 3), (3, 2)), table, table, Op.REDUCE)
    across = Step(((0, 2), (1, 3), (2, 0), (3, 1)), table, table, Op.REDUCE)
    verify(Schedule(4, 1, [pairs, across], Kind.ALL_REDUCE))


def test_a_round_sends_what_was_there_before_it():
    right = Step(((0, 1), (1, 0)), [0, 0], [0, 0], Op.REDUCE)
    on = Step(((0, 1), (1, 0)), [0, 0], [1, 1], Op.COPY, channel=1)
    with pytest.raises(ScheduleError, match="chunk 1"):
        verify(Schedule(2, 2, [right, on], Kind.ALL_REDUCE))


def test_channels_have_numbers_from_zero():
    step = Step(((0, 1), (1, 0)), [0, 0], [0, 0], Op.REDUCE, channel=1)
    with pytest.raises(ScheduleError, match=r"channels must be numbered from 0, got \[1\]"):
        Schedule(2, 1, [step], Kind.ALL_REDUCE)
