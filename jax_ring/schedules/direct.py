"""Direct exchange: each chunk goes straight to the rank that sums it, and straight back."""

from __future__ import annotations

import functools

import numpy as np

from jax_ring.schedules.schedule import Kind, Op, Schedule, Step, Steps, compose, rotation


def _shifts(n: int) -> range:
    if n < 1:
        raise ValueError(f"a direct exchange needs at least one rank, got n={n}")
    return range(1, n)


@functools.cache
def direct_reduce_scatter(n: int) -> Schedule:
    """The direct reduce-scatter: rank r gets chunk r from every other rank and sums it.

    In step s = 1 .. n-1 rank r sends its own chunk (r+s) mod n to rank r+s. No partial sum ever
    travels: on a lossy wire each contribution is rounded once, whatever n is.

    Cost: n-1 steps, (n-1)/n of the buffer sent by each rank, as the ring; but to n-1 other ranks,
    which a network must be able to connect at once, and its runs are as many as its steps.
    Source: the pairwise exchange of Thakur, Rabenseifner and Gropp, "Optimization of collective
    communication operations in MPICH", 2005, section 4.2.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind REDUCE_SCATTER with n chunks.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> print(direct_reduce_scatter(3))
      Schedule(direct, reduce_scatter, ranks=3, chunks=3, steps=2)
        step 0: rank r -> r+1; send (r + 1) mod 3, reduce into (r) mod 3
        step 1: rank r -> r+2; send (r - 1) mod 3, reduce into (r) mod 3
    """
    ranks = np.arange(n)
    steps = [
        Step(rotation(n, shift), (ranks + shift) % n, ranks, Op.REDUCE) for shift in _shifts(n)
    ]
    return Schedule(n, n, Steps(steps, n), Kind.REDUCE_SCATTER, "direct")


@functools.cache
def direct_all_gather(n: int) -> Schedule:
    """The direct all-gather: rank r sends chunk r to every other rank.

    In step s = 1 .. n-1 rank r sends chunk r to rank r+s.

    Cost: as `direct_reduce_scatter`.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind ALL_GATHER with n chunks.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> print(direct_all_gather(3))
      Schedule(direct, all_gather, ranks=3, chunks=3, steps=2)
        step 0: rank r -> r+1; send (r) mod 3, copy into (r - 1) mod 3
        step 1: rank r -> r+2; send (r) mod 3, copy into (r + 1) mod 3
    """
    ranks = np.arange(n)
    steps = [Step(rotation(n, shift), ranks, (ranks - shift) % n, Op.COPY) for shift in _shifts(n)]
    return Schedule(n, n, Steps(steps, n), Kind.ALL_GATHER, "direct")


@functools.cache
def direct(n: int) -> Schedule:
    """The direct all-reduce: a direct reduce-scatter followed by a direct all-gather.

    Cost: 2(n-1) steps, 2(n-1)/n of the buffer sent by each rank. On a lossy wire two roundings
    whatever n is: of each contribution, and of the sum.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind ALL_REDUCE with n chunks.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> len(direct(8).steps)
      14
    """
    return compose("direct", Kind.ALL_REDUCE, direct_reduce_scatter(n), direct_all_gather(n))
