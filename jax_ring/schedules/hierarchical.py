"""Hierarchical collectives: inside of each group, then across the groups, then inside again."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from jax_ring.schedules.families import make, names
from jax_ring.schedules.schedule import Kind, Run, Schedule, Step, Steps, Table, compose


@functools.cache
def hierarchical(
    inner: int,
    outer: int,
    inner_algorithm: str = "ring",
    outer_algorithm: str = "ring",
    groups: tuple[tuple[int, ...], ...] | None = None,
) -> Schedule:
    """The hierarchical all-reduce over `outer` groups of `inner` ranks each.

    Every group reduce-scatters, the ranks with the same number in their groups all-reduce their
    parts across the groups, and every group all-gathers. Each chunk is copied from the ranks that
    end with the same bits, so all do.

    Cost: the two halves of the inner algorithm over the whole buffer, and the outer one over
    1/inner of it: by the ring across H groups of G ranks each rank sends 2(H-1)/H / G of the
    buffer out of its group.
    Source: the hierarchical all-reduce of Jia et al., "Highly scalable deep learning training
    system with mixed-precision: training ImageNet in four minutes", 2018.

    Args:
      inner: ranks in a group, at least 1.
      outer: groups, at least 1.
      inner_algorithm: the name of one that has a reduce-scatter and an all-gather.
      outer_algorithm: the name of an all-reduce.
      groups: the ranks of each group; by default rank r is number r % inner in group r // inner.

    Returns:
      A schedule of kind ALL_REDUCE for inner x outer ranks. A chunk of the inner algorithm holds
      all those of the outer one.

    Raises:
      ValueError: if inner or outer is less than 1, there is no such algorithm, or groups are not
        `outer` groups of `inner` ranks.

    Example:
      >>> schedule = hierarchical(4, 2)
      >>> schedule, len(schedule.steps)
      (Schedule(hierarchical, all_reduce, ranks=8, chunks=8, steps=8), 8)
    """
    for name, value in (("inner", inner), ("outer", outer)):
        if value < 1:
            raise ValueError(f"hierarchical: {name} must be at least 1, got {value}")
    chosen = (
        ("inner_algorithm", inner_algorithm, Kind.REDUCE_SCATTER),
        ("outer_algorithm", outer_algorithm, Kind.ALL_REDUCE),
    )
    for name, algorithm, kind in chosen:
        if algorithm not in names(kind):
            raise ValueError(
                f"hierarchical: {name} must be one of {names(kind)}, got {algorithm!r}"
            )
    across = make(outer_algorithm, Kind.ALL_REDUCE, outer)
    ranks = _placed(inner, outer, groups)
    chunks = np.arange(inner * across.chunks)
    # In a group, a chunk of the inner algorithm is all the chunks of the outer one on one rank.
    whole = np.tile(chunks.reshape(inner, across.chunks), (outer, 1, 1))
    return compose(
        "hierarchical",
        Kind.ALL_REDUCE,
        _side_by_side(make(inner_algorithm, Kind.REDUCE_SCATTER, inner), ranks, whole),
        _side_by_side(across, ranks.T, chunks.reshape(inner, across.chunks, 1)),
        _side_by_side(make(inner_algorithm, Kind.ALL_GATHER, inner), ranks, whole),
    )


def _placed(inner: int, outer: int, groups: tuple[tuple[int, ...], ...] | None) -> Table:
    """The ranks as [outer, inner]."""
    wanted = np.arange(inner * outer)
    if groups is None:
        return wanted.reshape(outer, inner)
    sizes = [len(group) for group in groups]
    if sizes != [inner] * outer or sorted(r for group in groups for r in group) != wanted.tolist():
        raise ValueError(
            f"hierarchical: groups must be {outer} groups of {inner} that hold each rank 0 to "
            f"{inner * outer - 1} once, got {groups}"
        )
    return np.array(groups, np.int64).reshape(outer, inner)


def _side_by_side(schedule: Schedule, ranks: Table, chunks: Table) -> Schedule:
    """Several copies of a schedule at once, as a part of the whole.

    Args:
      schedule: the schedule.
      ranks: [copies, schedule.ranks], the rank of the whole that each is.
      chunks: [copies, schedule.chunks, c], the chunks of the whole that each is.
    """

    def placed(table: Table) -> Table:
        result = np.empty((ranks.size, table.shape[1] * chunks.shape[2]), np.int64)
        result[ranks.ravel()] = chunks[:, table].reshape(ranks.size, -1)
        return result

    def spread(run: Run) -> Iterator[Step]:
        perm = np.array(run.first.perm, np.int64)
        pairs = sorted((s, d) for s, d in ranks[:, perm].reshape(-1, 2).tolist())
        nothing = np.zeros((ranks.size, 1), np.int64)
        first = dataclasses.replace(run.first, perm=tuple(pairs), send=nothing, recv=nothing)
        for step in Steps([run], schedule.chunks):
            yield first.with_chunks(placed(step.send), placed(step.recv))

    count = int(chunks.max()) + 1
    steps = Steps(itertools.chain.from_iterable(map(spread, schedule.steps.runs)), count)
    return Schedule(ranks.size, count, steps, Kind.ALL_REDUCE, "part")
