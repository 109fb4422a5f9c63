"""The ring: each rank talks to its two neighbours only, and no link carries a byte too many."""

from __future__ import annotations

import functools

import numpy as np

from jax_ring.schedules.schedule import Kind, Op, Perm, Run, Schedule, Step, Steps, compose


def _neighbours(n: int) -> Perm:
    return tuple((r, (r + 1) % n) for r in range(n))


def _ring_phase(n: int, kind: Kind, op: Op, first_sent: int) -> Schedule:
    """N-1 steps in which rank r sends chunk r + first_sent - s and receives the one before it."""
    if n < 1:
        raise ValueError(f"a ring needs at least one rank, got n={n}")
    ranks = np.arange(n)
    step = Step(_neighbours(n), (ranks + first_sent) % n, (ranks + first_sent - 1) % n, op)
    steps = Steps([Run(step, n - 1, -1)] if n > 1 else [], n)
    return Schedule(n, n, steps, kind, "ring")


@functools.cache
def ring_reduce_scatter(n: int) -> Schedule:
    """The ring reduce-scatter: rank r ends with the reduction of chunk r.

    In step s = 0 .. n-2 rank r sends chunk (r-1-s) mod n to rank r+1 and reduces what arrives
    into chunk (r-2-s) mod n. Chunk j is therefore summed in the order of ranks j+1, j+2, ..., j.

    Cost: n-1 steps, (n-1)/n of the buffer sent by each rank, which is the least possible.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009, section 3.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind REDUCE_SCATTER with n chunks.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> print(ring_reduce_scatter(4))
      Schedule(ring, reduce_scatter, ranks=4, chunks=4, steps=3)
        step 0-2: rank r -> r+1; send (r - s - 1) mod 4, reduce into (r - s + 2) mod 4
    """
    return _ring_phase(n, Kind.REDUCE_SCATTER, Op.REDUCE, -1)


@functools.cache
def ring_all_gather(n: int) -> Schedule:
    """The ring all-gather: every rank ends with the chunks of all.

    In step s = 0 .. n-2 rank r sends chunk (r-s) mod n to rank r+1 and stores what arrives as
    chunk (r-1-s) mod n.

    Cost: n-1 steps, (n-1)/n of the gathered buffer sent by each rank.
    Source: as `ring_reduce_scatter`.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind ALL_GATHER with n chunks.

    Raises:
      ValueError: if n is less than 1.
    """
    return _ring_phase(n, Kind.ALL_GATHER, Op.COPY, 0)


@functools.cache
def ring(n: int) -> Schedule:
    """The ring all-reduce: a reduce-scatter, then an all-gather.

    Each chunk is summed by one rank and then copied, so all ranks end with the same bits.

    Cost: 2(n-1) steps, 2(n-1)/n of the buffer sent by each rank: the least possible number of
    bytes, at a latency that grows with n.
    Source: as `ring_reduce_scatter`.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind ALL_REDUCE with n chunks.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> len(ring(8).steps)
      14
    """
    return compose("ring", Kind.ALL_REDUCE, ring_reduce_scatter(n), ring_all_gather(n))
