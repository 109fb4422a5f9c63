"""Schedules unlike the ring, to test that nothing is written for the ring alone."""

from jax_ring.schedules import (
    Kind,
    Op,
    Schedule,
    Step,
    double_binary_tree,
    halving_doubling,
    recursive_doubling,
)


def reduce_and_broadcast(n):
    """A star through rank 0, in which most ranks are idle in each step."""
    up = [Step(((r, 0),), [0] * n, [0] * n, Op.REDUCE) for r in range(1, n)]
    down = [Step(((0, r),), [0] * n, [0] * n, Op.COPY) for r in range(1, n)]
    return Schedule(n, 1, up + down, Kind.ALL_REDUCE, "star")


def relay(n):
    """Rank 0 takes its partial sum to one rank after the other and gets it back by COPY."""
    table = [0] * n
    steps = []
    for r in range(1, n):
        steps.append(Step(((0, r),), table, table, Op.REDUCE))
        steps.append(Step(((r, 0),), table, table, Op.COPY))
    steps += [Step(((0, r),), table, table, Op.COPY) for r in range(1, n - 1)]
    return Schedule(n, 1, steps, Kind.ALL_REDUCE, "relay")


ALL_REDUCES = [
    recursive_doubling,
    reduce_and_broadcast,
    halving_doubling,
    double_binary_tree,
    relay,
]
