"""The ring: each rank talks to its two neighbours only, and no link carries a byte too many."""

from __future__ import annotations

import functools
import math

import numpy as np

from jax_ring.schedules.schedule import (
    Kind,
    Op,
    Run,
    Schedule,
    Step,
    Steps,
    compose,
    filled,
    rotation,
)


def _half(n: int, kind: Kind, name: str, ways: tuple[tuple[int, int], ...]) -> Schedule:
    """A half of a ring: in each channel every chunk goes so many steps in one direction.

    Args:
      n: the number of ranks.
      kind: REDUCE_SCATTER, where chunk r comes to rank r, or ALL_GATHER, where it leaves it.
      name: of the schedule.
      ways: for each channel +1 or -1, the direction, and how many steps.
    """
    if n < 1:
        raise ValueError(f"a ring needs at least one rank, got n={n}")
    scatters = kind is Kind.REDUCE_SCATTER
    ranks = np.arange(n)
    runs = []
    for channel, (way, steps) in enumerate(ways):
        sent = ranks + way * steps if scatters else ranks
        op = Op.REDUCE if scatters else Op.COPY
        step = Step(rotation(n, way), sent % n, (sent - way) % n, op, channel)
        if steps:
            runs.append(Run(step, steps, -way))
    return Schedule(n, n, Steps(runs, n), kind, name)


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
    return _half(n, Kind.REDUCE_SCATTER, "ring", ((1, n - 1),))


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
    return _half(n, Kind.ALL_GATHER, "ring", ((1, n - 1),))


@functools.cache
def ring(
    n: int,
    *,
    segments: int = 1,
    channels: int = 1,
    orders: tuple[tuple[int, ...], ...] | None = None,
) -> Schedule:
    """The ring all-reduce: a reduce-scatter, then an all-gather.

    Each chunk is summed by one rank and then copied, so all ranks end with the same bits.

    With several segments the buffer is reduced one part after the other, and then gathered so, in
    chunks so much smaller that they may fit into a cache. With several channels it is divided among
    as many rings that do not depend on each other: while one adds, another may send. They may visit
    the ranks in different orders, so that they use different links.

    Cost: 2(n-1) steps, 2(n-1)/n of the buffer sent by each rank: the least possible number of
    bytes, at a latency that grows with n. Segments take as many times the steps, and send as many
    bytes; channels send as many bytes in more messages.
    Source: as `ring_reduce_scatter`; segments as in Open MPI's segmented ring, though one after the
    other.

    Args:
      n: the number of ranks, at least 1.
      segments: the parts that are reduced one after the other, at least 1.
      channels: the number of rings side by side, at least 1.
      orders: for each channel the order in which it visits the ranks; by default 0, 1, 2, ... for
        all. `torus_orders` gives some that share no link.

    Returns:
      A schedule of kind ALL_REDUCE with n x segments x channels chunks; chunk j belongs to channel
      j % (segments x channels), of which those of one segment move at once.

    Raises:
      ValueError: if n, segments or channels is less than 1, or orders are not one permutation of
        the ranks for each channel.

    Example:
      >>> len(ring(8).steps)
      14
      >>> print(ring(3, channels=2))
      Schedule(ring, all_reduce, ranks=3, chunks=6, steps=4, channels=2)
        channel 0 step 0-1: rank r -> r+1; send (2r - 2s - 2) mod 6, reduce into (2r - 2s + 2) mod 6
        channel 0 step 2-3: rank r -> r+1; send (2r - 2s) mod 6, copy into (2r - 2s - 2) mod 6
        channel 1 step 0-1: rank r -> r+1; send (2r - 2s - 1) mod 6, reduce into (2r - 2s + 3) mod 6
        channel 1 step 2-3: rank r -> r+1; send (2r - 2s + 1) mod 6, copy into (2r - 2s - 1) mod 6
    """
    for name, value in (("segments", segments), ("channels", channels)):
        if value < 1:
            raise ValueError(f"ring: {name} must be at least 1, got {value}")
    halves = (ring_reduce_scatter(n), ring_all_gather(n))
    if segments == channels == 1 and orders is None:
        return compose("ring", Kind.ALL_REDUCE, *halves)
    orders = (tuple(range(n)),) * channels if orders is None else orders
    wanted = list(range(n))
    if len(orders) != channels or any(sorted(order) != wanted for order in orders):
        raise ValueError(
            f"ring: orders must hold a permutation of the {n} ranks for each of {channels} "
            f"channels, got {orders}"
        )
    parts = [
        _ordered(half, orders, segment, segments) for half in halves for segment in range(segments)
    ]
    return compose("ring", Kind.ALL_REDUCE, *parts)


def _ordered(
    half: Schedule, orders: tuple[tuple[int, ...], ...], segment: int, segments: int
) -> Schedule:
    """A half of a segment's rings: one for each order, in chunks a stride apart."""
    stride = segments * len(orders)
    runs = []
    for channel, order in enumerate(orders, start=segment * len(orders)):
        position = np.argsort(order)
        for run in half.steps.runs:
            perm = sorted((order[s], order[d]) for s, d in run.first.perm)
            send, recv = (t[position] * stride + channel for t in (run.first.send, run.first.recv))
            step = Step(tuple(perm), send, recv, run.first.op, channel)
            runs.append(Run(step, run.count, run.advance * stride))
    chunks = half.chunks * stride
    steps = Steps(list(filled(runs, half.ranks, half.rounds, stride)), chunks)
    return Schedule(half.ranks, chunks, steps, half.kind, half.name)


def torus_orders(rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two cycles through all nodes of a torus that share no link, for a ring of two channels.

    Node (i, j) is rank i x columns + j, and has links to (i, j +- 1) and (i +- 1, j). The first
    cycle goes along each row, always one column short, and then down; the second takes the links
    that are left. Together they are all links of the torus, each in one direction.

    Source: Bae and Bose, "Edge disjoint Hamiltonian cycles in k-ary n-cubes and hypercubes", IEEE
    Transactions on Computers 52(10), 2003, section 3, in this form for rectangles.

    Args:
      rows: a multiple r of columns with gcd(r, columns - 1) = 1; all square tori are.
      columns: at least 3, or a node would have two links to the same one.

    Returns:
      Two orders of the ranks.

    Raises:
      ValueError: if the construction does not cover the torus.

    Example:
      >>> torus_orders(3, 3)
      ((0, 1, 2, 5, 3, 4, 7, 8, 6), (0, 3, 6, 7, 1, 4, 5, 8, 2))
    """
    if columns < 3 or rows % columns or math.gcd(rows // columns, columns - 1) > 1:
        raise ValueError(
            "torus_orders: rows must be a multiple r of columns >= 3 with gcd(r, columns - 1) = 1, "
            f"got rows={rows}, columns={columns}"
        )
    first, second = [], []
    for i in range(rows):
        first += [i * columns + (j - i) % columns for j in range(columns)]
    row = 0
    for j in range(rows):
        second += [(row + i) % rows * columns + j % columns for i in range(columns)]
        row += columns - 1
    return tuple(first), tuple(second)


def _both_ways(n: int, kind: Kind) -> Schedule:
    """Half of the chunks' ways clockwise in channel 0, half of them against it in channel 1."""
    return _half(n, kind, "bidirectional_ring", ((1, n // 2), (-1, (n - 1) // 2)))


@functools.cache
def bidirectional_ring_reduce_scatter(n: int) -> Schedule:
    """The reduce-scatter of the ring in both directions at once.

    The contributions to chunk r come to rank r from both sides: from the n // 2 ranks before it in
    channel 0, from the (n-1) // 2 after it in channel 1.

    Cost: n // 2 steps, (n-1)/n of the buffer sent by each rank, half of it in each direction.
    Source: Chan, van de Geijn, Gropp and Thakur, "Collective communication on architectures that
    support simultaneous communication over multiple links", 2006, in one dimension.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind REDUCE_SCATTER with n chunks.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> print(bidirectional_ring_reduce_scatter(5))
      Schedule(bidirectional_ring, reduce_scatter, ranks=5, chunks=5, steps=2, channels=2)
        channel 0 step 0-1: rank r -> r+1; send (r - s + 2) mod 5, reduce into (r - s + 1) mod 5
        channel 1 step 0-1: rank r -> r+4; send (r + s - 2) mod 5, reduce into (r + s - 1) mod 5
    """
    return _both_ways(n, Kind.REDUCE_SCATTER)


@functools.cache
def bidirectional_ring_all_gather(n: int) -> Schedule:
    """The all-gather of the ring in both directions at once.

    Cost: as `bidirectional_ring_reduce_scatter`.
    Source: as `bidirectional_ring_reduce_scatter`.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind ALL_GATHER with n chunks.

    Raises:
      ValueError: if n is less than 1.
    """
    return _both_ways(n, Kind.ALL_GATHER)


@functools.cache
def bidirectional_ring(n: int) -> Schedule:
    """The all-reduce of the ring in both directions at once.

    Cost: 2 (n // 2) steps, about half the ring's, and the ring's bytes, half of them in each
    direction. Where a rank sends to both neighbours at once it takes half the ring's time; where
    its messages share one port, half the latency and the same time for the bytes.
    Source: as `bidirectional_ring_reduce_scatter`.

    Args:
      n: the number of ranks, at least 1.

    Returns:
      A schedule of kind ALL_REDUCE with n chunks and, from 3 ranks on, two channels.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> schedule = bidirectional_ring(8)
      >>> schedule.rounds, len(schedule.steps)
      (8, 16)
    """
    halves = (bidirectional_ring_reduce_scatter(n), bidirectional_ring_all_gather(n))
    return compose("bidirectional_ring", Kind.ALL_REDUCE, *halves)
