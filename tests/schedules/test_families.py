"""All algorithms: proofs, steps and bytes, and what each promises of its own."""

import math

import numpy as np
import pytest

from jax_ring.schedules import (
    FAMILIES,
    Kind,
    cost,
    double_binary_tree,
    halving_doubling,
    hierarchical,
    recursive_doubling,
    verify,
)
from jax_ring.schedules.double_binary_tree import trees
from jax_ring.schedules.families import make, names

SIZES = [*range(1, 65), 96, 128, 256]
EACH = [(name, kind) for name, made in FAMILIES.items() for kind in made]


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_every_algorithm_is_proved(name, kind):
    for n in SIZES:
        if n < 100 or name != "ring":  # tests/schedules/test_ring.py has the longest rings.
            schedule = make(name, kind, n)
            verify(schedule)
            assert (schedule.name, schedule.kind, schedule.ranks) == (name, kind, n)


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_no_ranks_are_refused(name, kind):
    with pytest.raises(ValueError, match="n=0"):
        make(name, kind, 0)


@pytest.mark.parametrize("n", range(1, 65))
def test_scatters_and_gathers_send_no_byte_too_many(n):
    for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
        for name in names(kind):
            assert (make(name, kind, n).sent_chunks() == n - 1).all()


@pytest.mark.parametrize("n", range(1, 65))
def test_steps(n):
    logarithm = math.ceil(math.log2(n))
    whole = 2 ** int(math.log2(n)) == n
    assert len(halving_doubling(n).steps) == 2 * logarithm
    assert len(recursive_doubling(n).steps) == (logarithm if whole else logarithm + 1)
    assert recursive_doubling(n).chunks == 1


# Trees.


@pytest.mark.parametrize("n", range(1, 130))
def test_no_rank_is_interior_in_both_trees(n):
    first, second = trees(n)
    assert len(first) == len(second) == n - 1
    if n > 2:  # Of two ranks each is the parent in one tree.
        assert not set(first.values()) & set(second.values())
    for parents in (first, second):
        children = list(parents.values())
        assert all(children.count(rank) <= 2 for rank in range(n))


@pytest.mark.parametrize("n", [2, 3, 8, 13, 64, 100])
def test_the_trees_cost_is_within_its_bound(n):
    for blocks in (1, 2, 4, 8, 32):
        schedule = double_binary_tree(n, blocks)
        steps = 2 * (2 * blocks + 2 * math.ceil(math.log2(n)))
        assert len(schedule.steps) <= steps
        assert cost(schedule, 1e9, 1e-6, 1e-9) <= steps * (1e-6 + 1 / (2 * blocks))


def test_many_blocks_approach_the_bandwidth_of_two_trees():
    # Twice the buffer at the full bandwidth of a link, each half of it through one tree.
    seconds = cost(double_binary_tree(64, blocks=256), 1e9, 0.0, 1e-9)
    assert 2.0 <= seconds <= 2.1


def test_blocks_must_be_there():
    with pytest.raises(ValueError, match="blocks must be at least 1, got 0"):
        double_binary_tree(4, blocks=0)


# Hierarchies.


@pytest.mark.parametrize("outer_algorithm", names(Kind.ALL_REDUCE))
@pytest.mark.parametrize("inner_algorithm", names(Kind.REDUCE_SCATTER))
def test_every_hierarchy_is_proved(inner_algorithm, outer_algorithm):
    for inner, outer in [(1, 1), (1, 5), (5, 1), (2, 3), (3, 2), (4, 4), (8, 2), (3, 7)]:
        verify(hierarchical(inner, outer, inner_algorithm, outer_algorithm))


@pytest.mark.parametrize(("inner", "outer"), [(8, 2), (4, 3), (8, 8)])
def test_bytes_across_groups(inner, outer):
    schedule = hierarchical(inner, outer)
    sent = np.zeros(schedule.ranks)
    for step in schedule.steps:
        for source, destination in step.perm:
            if source // inner != destination // inner:
                sent[source] += step.k
    np.testing.assert_allclose(sent / schedule.chunks, 2 * (outer - 1) / outer / inner)


def test_a_hierarchy_of_thousands_of_ranks():
    """All steps of a part share one permutation, or there would be a million pairs."""
    schedule = hierarchical(8, 128)
    assert (schedule.ranks, schedule.rounds) == (1024, 2 * 7 + 2 * 127)
    assert len({id(run.first.perm) for run in schedule.steps.runs}) <= 4


def test_bad_hierarchies():
    with pytest.raises(ValueError, match="inner must be at least 1, got 0"):
        hierarchical(0, 2)
    with pytest.raises(ValueError, match="inner_algorithm must be one of .* got 'recursive_doub"):
        hierarchical(2, 2, "recursive_doubling")
    with pytest.raises(ValueError, match="outer_algorithm must be one of .* got 'tree'"):
        hierarchical(2, 2, "ring", "tree")
