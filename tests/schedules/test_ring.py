import numpy as np
import pytest

from jax_ring.schedules import Kind, Op, ring, ring_all_gather, ring_reduce_scatter, verify

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
