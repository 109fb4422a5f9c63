"""Halving and doubling: as few bytes as the ring, in a number of steps that is logarithmic."""

from __future__ import annotations

import functools

import numpy as np

from jax_ring.schedules.schedule import Kind, Op, Schedule, Step, Steps, compose, rotation


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _halvings(n: int) -> list[Step]:
    """Rabenseifner's: partners differ in one bit, from the highest, and halve what they share."""
    ranks = np.arange(n)
    steps = []
    bit = n // 2
    while bit:
        # What rank r still sums are the `2 * bit` chunks that agree with it in the higher bits.
        first = ranks & ~(2 * bit - 1)
        span = np.arange(bit)
        keep = (first + (ranks & bit))[:, None] + span
        give = (first + (~ranks & bit))[:, None] + span
        steps.append(Step(tuple((r, r ^ bit) for r in range(n)), give, keep, Op.REDUCE))
        bit //= 2
    return steps


def _circulant(n: int) -> list[Step]:
    """Träff's: in each step a rank sends half of what it still holds to one `skip` ahead."""
    ranks = np.arange(n)[:, None]
    steps = []
    held = n
    while held > 1:
        skip = -(-held // 2)
        span = np.arange(held - skip)
        perm = rotation(n, skip)
        steps.append(Step(perm, (ranks + skip + span) % n, (ranks + span) % n, Op.REDUCE))
        held = skip
    return steps


def _reductions(n: int) -> list[Step]:
    if n < 1:
        raise ValueError(f"halving and doubling need at least one rank, got n={n}")
    return _halvings(n) if _is_power_of_two(n) else _circulant(n)


def _reversed(step: Step) -> Step:
    """What was summed travels back the way its parts came."""
    perm = tuple(sorted((destination, source) for source, destination in step.perm))
    return Step(perm, step.recv, step.send, Op.COPY)


@functools.cache
def halving_doubling_reduce_scatter(n: int) -> Schedule:
    """The recursive-halving reduce-scatter: rank r ends with the reduction of chunk r.

    For a power of two of ranks, each exchanges half of the chunks that it still sums with the
    partner whose index differs in one bit, from the highest on. For any other number each sends
    half of them a fixed distance ahead, and receives as many from as far behind.

    Cost: ceil(log2(n)) steps, (n-1)/n of the buffer sent by each rank: the least possible of both.
    Source: for powers of two Thakur, Rabenseifner and Gropp, "Optimization of collective
    communication operations in MPICH", 2005, section 4.2; else Träff, "Optimal, Non-pipelined
    Reduce-scatter and Allreduce Algorithms", 2024, section 2.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind REDUCE_SCATTER with n chunks.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> print(halving_doubling_reduce_scatter(3))
      Schedule(halving_doubling, reduce_scatter, ranks=3, chunks=3, steps=2)
        step 0: rank r -> r+2; send (r - 1) mod 3, reduce into (r) mod 3
        step 1: rank r -> r+1; send (r + 1) mod 3, reduce into (r) mod 3
    """
    return Schedule(n, n, Steps(_reductions(n), n), Kind.REDUCE_SCATTER, "halving_doubling")


@functools.cache
def halving_doubling_all_gather(n: int) -> Schedule:
    """The recursive-doubling all-gather: the reduce-scatter run backwards.

    Cost: ceil(log2(n)) steps, (n-1)/n of the gathered buffer sent by each rank.
    Source: as `halving_doubling_reduce_scatter`.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind ALL_GATHER with n chunks.

    Raises:
      ValueError: if n is less than 1.
    """
    steps = [_reversed(step) for step in reversed(_reductions(n))]
    return Schedule(n, n, Steps(steps, n), Kind.ALL_GATHER, "halving_doubling")


@functools.cache
def halving_doubling(n: int) -> Schedule:
    """The halving-doubling all-reduce: a reduce-scatter, then an all-gather.

    Each chunk is summed by one rank and then copied, so all ranks end with the same bits.

    Cost: 2 ceil(log2(n)) steps, 2(n-1)/n of the buffer sent by each rank. Against the ring it has
    fewer steps, but messages cross the whole network: there it may have to share links.
    Source: as `halving_doubling_reduce_scatter`; together they are known as Rabenseifner's
    algorithm.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind ALL_REDUCE with n chunks.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> [len(halving_doubling(n).steps) for n in (2, 3, 8, 12)]
      [2, 4, 6, 8]
    """
    parts = halving_doubling_reduce_scatter(n), halving_doubling_all_gather(n)
    return compose("halving_doubling", Kind.ALL_REDUCE, *parts)
