import collections

import numpy as np
import pytest

from jax_ring.schedules import (
    Kind,
    Op,
    bidirectional_ring,
    cost,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    torus_orders,
    verify,
)

SIZES = [*range(1, 65), 96, 128]


@pytest.mark.parametrize("make", [ring, ring_reduce_scatter, ring_all_gather])
@pytest.mark.parametrize("n", SIZES)
def test_ring_is_proved(make, n):
    verify(make(n))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_steps_and_bytes(n):
    assert len(ring(n).steps) == 2 * (n - 1)
    assert len(ring_reduce_scatter(n).steps) == len(ring_all_gather(n).steps) == n - 1
    assert ring(n).chunks == n
    assert (ring(n).sent_chunks() == 2 * (n - 1)).all()


def test_chunks_follow_the_documented_order():
    n = 5
    ranks = np.arange(n)
    for s, step in enumerate(ring(n).steps):
        assert step.perm == tuple((r, (r + 1) % n) for r in range(n))
        if s < n - 1:
            assert step.op is Op.REDUCE
            assert (step.send[:, 0] == (ranks - 1 - s) % n).all()
            assert (step.recv[:, 0] == (ranks - 2 - s) % n).all()
        else:
            s -= n - 1
            assert step.op is Op.COPY
            assert (step.send[:, 0] == (ranks - s) % n).all()
            assert (step.recv[:, 0] == (ranks - 1 - s) % n).all()


def test_a_thousand_ranks_are_stored_as_two_runs():
    schedule = ring(1024)
    assert len(schedule.steps) == 2046
    assert len(schedule.steps.runs) == 2


def test_kinds():
    assert ring(4).kind is Kind.ALL_REDUCE
    assert ring_reduce_scatter(4).kind is Kind.REDUCE_SCATTER
    assert ring_all_gather(4).kind is Kind.ALL_GATHER


@pytest.mark.parametrize("make", [ring, ring_reduce_scatter, ring_all_gather])
def test_no_ranks_are_refused(make):
    with pytest.raises(ValueError, match="n=0"):
        make(0)


# Channels.


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("channels", [2, 3, 4])
def test_channels_divide_the_buffer(n, channels):
    schedule = ring(n, channels=channels)
    verify(schedule)
    assert schedule.rounds == 2 * (n - 1)
    assert schedule.chunks == n * channels
    assert (schedule.sent_chunks() == 2 * (n - 1) * channels).all()
    assert len(schedule.steps.runs) == (2 * channels if n > 2 else schedule.rounds * channels)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_segments_come_one_after_the_other(n):
    schedule = ring(n, segments=3, channels=2)
    verify(schedule)
    assert schedule.rounds == 3 * 2 * (n - 1)
    assert schedule.chunks == n * 3 * 2
    halves = [Op.REDUCE] * 3 + [Op.COPY] * 3
    for i, steps in enumerate(schedule.by_round()):
        moving = [step for _, step in steps if step.perm]
        part = i // (n - 1)
        assert [step.channel // 2 for step in moving] == [part % 3] * 2
        assert all(step.op is halves[part] for step in moving)
        assert all((step.send % 6 == step.channel).all() for step in moving)


@pytest.mark.parametrize("n", range(1, 65))
def test_both_directions_take_half_the_rounds_and_half_the_bytes_each(n):
    schedule = bidirectional_ring(n)
    assert schedule.rounds == 2 * (n // 2)
    links = collections.Counter()
    for step in schedule.steps:
        for pair in step.perm:
            links[pair] += step.k
    if n > 2:
        assert set(links.values()) == {2 * (n // 2), 2 * ((n - 1) // 2)}
    if n % 2:
        halved = cost(schedule, 1.0, 0.1, 1.0, ports=2) * 2
        assert halved == pytest.approx(cost(ring(n), 1.0, 0.1, 1.0))
    assert cost(schedule, 1.0, 0.0, 1.0) == pytest.approx(cost(ring(n), 1.0, 0.0, 1.0))


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (4, 4), (8, 4), (8, 8), (15, 5)])
def test_two_cycles_are_all_links_of_a_torus(rows, columns):
    orders = torus_orders(rows, columns)
    links = [frozenset(pair) for o in orders for pair in zip(o, o[1:] + o[:1], strict=True)]
    assert len(set(links)) == len(links) == 2 * rows * columns
    for a, b in links:
        (i, j), (k, m) = divmod(a, columns), divmod(b, columns)
        assert sorted(
            [min((i - k) % rows, (k - i) % rows), min((j - m) % columns, (m - j) % columns)]
        ) == [0, 1]
    verify(ring(rows * columns, channels=2, orders=orders))


def test_bad_channels():
    with pytest.raises(ValueError, match="channels must be at least 1, got 0"):
        ring(4, channels=0)
    with pytest.raises(ValueError, match="segments must be at least 1, got 0"):
        ring(4, segments=0)
    with pytest.raises(ValueError, match="orders must hold a permutation of the 4 ranks for each"):
        ring(4, channels=2, orders=((0, 1, 2, 3), (0, 1, 2, 2)))
    with pytest.raises(ValueError, match="rows=6, columns=3"):
        torus_orders(6, 3)
