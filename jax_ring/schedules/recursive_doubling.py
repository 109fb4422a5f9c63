"""Recursive doubling: the whole buffer, exchanged with partners at distances 1, 2, 4, ..."""

from __future__ import annotations

import functools

import numpy as np

from jax_ring.schedules.schedule import Kind, Op, Perm, Schedule, Step, Steps


@functools.cache
def recursive_doubling(n: int) -> Schedule:
    """The recursive-doubling all-reduce: the fewest steps, for small buffers.

    Of a power of two of ranks, each exchanges its sum with the partner whose index differs in one
    bit, for one bit after the other. Other ranks hand theirs to one of these first, and get the
    result at the end. Every rank makes every sum in the same association, so all end with the same
    bits; an element's does not depend on where it lies in the buffer.

    Cost: log2(n) steps of the whole buffer for a power of two; else floor(log2(n)) + 2.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", 2005, section 4.4.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind ALL_REDUCE with one chunk.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> print(recursive_doubling(4))
      Schedule(recursive_doubling, all_reduce, ranks=4, chunks=1, steps=2)
        step 0: 0->1 1->0 2->3 3->2; send (0) mod 1, reduce into (0) mod 1
        step 1: rank r -> r+2; send (0) mod 1, reduce into (0) mod 1
      >>> [len(recursive_doubling(n).steps) for n in (2, 3, 8, 12)]
      [1, 3, 3, 5]
    """
    if n < 1:
        raise ValueError(f"recursive doubling needs at least one rank, got n={n}")
    bits = n.bit_length() - 1
    surplus = n - (1 << bits)
    # Of the first 2 * surplus ranks the odd ones take part, of the others all.
    member = [2 * i + 1 if i < surplus else i + surplus for i in range(1 << bits)]
    fold_in = tuple((2 * i, 2 * i + 1) for i in range(surplus))
    steps = [_step(n, fold_in, Op.REDUCE)] if surplus else []
    for bit in range(bits):
        perm = sorted((member[i], member[i ^ 1 << bit]) for i in range(1 << bits))
        steps.append(_step(n, tuple(perm), Op.REDUCE))
    if surplus:
        steps.append(_step(n, tuple((d, s) for s, d in fold_in), Op.COPY))
    return Schedule(n, 1, Steps(steps, 1), Kind.ALL_REDUCE, "recursive_doubling")


def _step(n: int, perm: Perm, op: Op) -> Step:
    only_chunk = np.zeros(n, np.int64)
    return Step(perm, only_chunk, only_chunk, op)
