"""Schedules unlike the ring, to test that nothing is written for the ring alone."""

import dataclasses

import numpy as np

from jax_ring.schedules import (
    Kind,
    Op,
    Schedule,
    Step,
    double_binary_tree,
    halving_doubling,
    recursive_doubling,
)
from jax_ring.schedules.schedule import rotation


def reduce_and_broadcast(n):
    """A star through rank 0, in which most ranks are idle in each step."""
    up = [Step(((r, 0),), [0] * n, [0] * n, Op.REDUCE) for r in range(1, n)]
    down = [Step(((0, r),), [0] * n, [0] * n, Op.COPY) for r in range(1, n)]
    return Schedule(n, 1, up + down, Kind.ALL_REDUCE, "star")


def swapped_in_reverse():
    """Two ranks exchange both chunks in one step, the last one first."""
    backwards = [[1, 0]] * 2
    step = Step(((0, 1), (1, 0)), backwards, backwards, Op.REDUCE)
    return Schedule(2, 2, [step], Kind.ALL_REDUCE, "backwards")


def relay(n):
    """Rank 0 takes its partial sum to one rank after the other and gets it back by COPY."""
    table = [0] * n
    steps = []
    for r in range(1, n):
        steps.append(Step(((0, r),), table, table, Op.REDUCE))
        steps.append(Step(((r, 0),), table, table, Op.COPY))
    steps += [Step(((0, r),), table, table, Op.COPY) for r in range(1, n - 1)]
    return Schedule(n, 1, steps, Kind.ALL_REDUCE, "relay")


def one_half_to_a_channel(n, reducing=1):
    """A star whose sums are made in one channel, and copied in the other."""
    nothing = Step((), [0] * n, [0] * n, Op.COPY, reducing)
    wait = [nothing] * (n - 1)
    star = reduce_and_broadcast(n).steps
    up = [dataclasses.replace(step, channel=reducing) for step in star[: n - 1]]
    idle = [dataclasses.replace(step, channel=1 - reducing) for step in wait]
    down = [dataclasses.replace(step, channel=1 - reducing) for step in star[n - 1 :]]
    return Schedule(n, 1, [*up, *wait, *idle, *down], Kind.ALL_REDUCE, "halves")


def textbook_ring(n):
    """The reduce-scatter that ends with chunk r + 1 on rank r, and a step that puts it right."""
    ranks = np.arange(n)
    perm = rotation(n, 1)
    steps = [Step(perm, (ranks - s) % n, (ranks - 1 - s) % n, Op.REDUCE) for s in range(n - 1)]
    steps.append(Step(perm, (ranks + 1) % n, ranks, Op.COPY))
    return Schedule(n, n, steps, Kind.REDUCE_SCATTER, "textbook")


ALL_REDUCES = [
    recursive_doubling,
    reduce_and_broadcast,
    halving_doubling,
    double_binary_tree,
    relay,
]
