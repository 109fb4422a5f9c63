"""Two binary trees, each for half of the buffer, such that no rank works for both."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from jax_ring.schedules.schedule import Kind, Op, Schedule, Step, Steps

DEFAULT_BLOCKS = 4

Parents = dict[int, int]  # Of each rank but the root.
Edge = tuple[int, int]  # The tree, and the rank that sends to its parent.
Message = tuple[int, int, int]  # Source, destination, chunk.


def _in_order(first: int, size: int) -> Iterator[tuple[int, int]]:
    """(rank, depth) of the root of the in-order tree over `size` ranks, and of all below it.

    The left half is as large a perfect tree as fits, so all ranks at even distance from `first` are
    leaves.
    """
    if size == 0:
        return
    left = (1 << size.bit_length() - 1) - 1
    yield first + left, 0
    for part in (_in_order(first, left), _in_order(first + left + 1, size - left - 1)):
        for rank, depth in part:
            yield rank, depth + 1


def trees(n: int) -> tuple[Parents, Parents]:
    """The two trees over n ranks: the parent of each rank but the root.

    The leaves of the first are the even ranks. The second is the first with each rank replaced by
    the next, so that its leaves are the odd ranks (and perhaps rank 0).

    Args:
      n: the number of ranks, at least 1.

    Returns:
      Two dictionaries.

    Raises:
      ValueError: if n is less than 1.

    Example:
      >>> trees(4)
      ({1: 3, 0: 1, 2: 1}, {2: 0, 1: 2, 3: 2})
    """
    if n < 1:
        raise ValueError(f"a tree needs at least one rank, got n={n}")
    path: list[int] = []
    first: Parents = {}
    for rank, depth in _in_order(0, n):
        del path[depth:]
        if path:
            first[rank] = path[-1]
        path.append(rank)
    return first, {(r + 1) % n: (parent + 1) % n for r, parent in first.items()}


def _colors(pairs: tuple[Parents, Parents]) -> dict[Edge, int]:
    """Two colors for the edges, such that no rank sends or receives twice in one color.

    A rank sends one message in each tree, and receives at most two, all in the tree in which it is
    interior: each edge has at most two others to differ from, in paths and cycles of even length.
    """
    edges = [(tree, rank) for tree, parents in enumerate(pairs) for rank in parents]
    ends: dict[tuple[str, int], list[Edge]] = {}
    for tree, rank in edges:
        for end in (("from", rank), ("to", pairs[tree][rank])):
            ends.setdefault(end, []).append((tree, rank))
    colors: dict[Edge, int] = {}
    for first in edges:
        waiting = [(first, 0)]
        while waiting:
            edge, color = waiting.pop()
            if edge in colors:
                continue
            colors[edge] = color
            for end in (("from", edge[1]), ("to", pairs[edge[0]][edge[1]])):
                waiting += [(other, 1 - color) for other in ends[end] if other != edge]
    return colors


def _upward(n: int, blocks: int) -> list[list[Message]]:
    """The messages of each step that bring all blocks to the roots.

    Edges of one color are used in even steps, those of the other in odd ones, each for one block
    after the other from when the first can have arrived.
    """
    pairs = trees(n)
    colors = _colors(pairs)
    steps: dict[int, list[Message]] = {}
    for tree, parents in enumerate(pairs):
        ready = [0] * n  # When a rank has received the first block from all its children.
        for rank in sorted(parents, key=lambda rank: -_depth(parents, rank)):
            start = ready[rank] + (ready[rank] + colors[tree, rank]) % 2
            parent = parents[rank]
            ready[parent] = max(ready[parent], start + 1)
            for block in range(blocks):
                message = (rank, parent, tree * blocks + block)
                steps.setdefault(start + 2 * block, []).append(message)
    return [steps[t] for t in sorted(steps)]


def _depth(parents: Parents, rank: int) -> int:
    depth = 0
    while rank in parents:
        rank, depth = parents[rank], depth + 1
    return depth


def _step(n: int, messages: list[Message], op: Op) -> Step:
    send, recv = np.zeros(n, int), np.zeros(n, int)
    for source, destination, chunk in messages:
        send[source] = recv[destination] = chunk
    return Step(tuple(sorted((s, d) for s, d, _ in messages)), send, recv, op)


@functools.cache
def double_binary_tree(n: int, blocks: int = DEFAULT_BLOCKS) -> Schedule:
    """The double-binary-tree all-reduce: logarithmic latency, at nearly the bandwidth of the ring.

    Each half of the buffer is summed up a binary tree of its own and sent down again, in blocks
    that follow each other. A rank that is interior in one tree is a leaf in the other, so that each
    sends and receives about as much.

    Cost: at most 2 (2 blocks + 2 ceil(log2(n))) steps of 1 / (2 blocks) of the buffer each: with
    many blocks it approaches twice the buffer, in a time that grows with the logarithm of n.
    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan", 2009, sections 3 and 4.

    Args:
      n: the number of ranks, at least 1.
      blocks: into how many blocks each half is cut, at least 1.

    Returns:
      A schedule of kind ALL_REDUCE with 2 `blocks` chunks.

    Raises:
      ValueError: if n or blocks is less than 1.

    Example:
      >>> print(double_binary_tree(4, blocks=1))
      Schedule(double_binary_tree, all_reduce, ranks=4, chunks=2, steps=6)
        step 0: 0->1 3->2; send [[0], [0], [0], [1]], reduce into [[0], [0], [1], [0]]
        step 1: 1->2 2->1; send [[0], [1], [0], [0]], reduce into [[0], [0], [1], [0]]
        step 2: 1->3 2->0; send [[0], [0], [1], [0]], reduce into [[1], [0], [0], [0]]
        step 3: 0->2 3->1; send [[1], [0], [0], [0]], copy into [[0], [0], [1], [0]]
        step 4: 1->2 2->1; send [[0], [0], [1], [0]], copy into [[0], [1], [0], [0]]
        step 5: 1->0 2->3; send [[0], [0], [1], [0]], copy into [[0], [0], [0], [1]]
    """
    if blocks < 1:
        raise ValueError(f"double_binary_tree: blocks must be at least 1, got {blocks}")
    up = _upward(n, blocks)
    down = [[(d, s, chunk) for s, d, chunk in messages] for messages in reversed(up)]
    steps = [_step(n, messages, Op.REDUCE) for messages in up]
    steps += [_step(n, messages, Op.COPY) for messages in down]
    chunks = 2 * blocks
    return Schedule(n, chunks, Steps(steps, chunks), Kind.ALL_REDUCE, "double_binary_tree")
