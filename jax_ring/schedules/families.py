"""The algorithms by name, for `algorithm=` and for all that compares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax_ring.schedules.direct import direct, direct_all_gather, direct_reduce_scatter
from jax_ring.schedules.double_binary_tree import double_binary_tree
from jax_ring.schedules.halving_doubling import (
    halving_doubling,
    halving_doubling_all_gather,
    halving_doubling_reduce_scatter,
)
from jax_ring.schedules.recursive_doubling import recursive_doubling
from jax_ring.schedules.ring import (
    bidirectional_ring,
    bidirectional_ring_all_gather,
    bidirectional_ring_reduce_scatter,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)
from jax_ring.schedules.schedule import Kind, Schedule

FAMILIES: Mapping[str, Mapping[Kind, Callable[[int], Schedule]]] = {
    "ring": {
        Kind.ALL_REDUCE: ring,
        Kind.REDUCE_SCATTER: ring_reduce_scatter,
        Kind.ALL_GATHER: ring_all_gather,
    },
    "bidirectional_ring": {
        Kind.ALL_REDUCE: bidirectional_ring,
        Kind.REDUCE_SCATTER: bidirectional_ring_reduce_scatter,
        Kind.ALL_GATHER: bidirectional_ring_all_gather,
    },
    "direct": {
        Kind.ALL_REDUCE: direct,
        Kind.REDUCE_SCATTER: direct_reduce_scatter,
        Kind.ALL_GATHER: direct_all_gather,
    },
    "halving_doubling": {
        Kind.ALL_REDUCE: halving_doubling,
        Kind.REDUCE_SCATTER: halving_doubling_reduce_scatter,
        Kind.ALL_GATHER: halving_doubling_all_gather,
    },
    "recursive_doubling": {Kind.ALL_REDUCE: recursive_doubling},
    "double_binary_tree": {Kind.ALL_REDUCE: double_binary_tree},
}


def names(kind: Kind) -> list[str]:
    """The algorithms that there are for a kind of collective.

    Example:
      >>> names(Kind.REDUCE_SCATTER)
      ['ring', 'bidirectional_ring', 'direct', 'halving_doubling']
    """
    return [name for name, made in FAMILIES.items() if kind in made]


def make(name: str, kind: Kind, ranks: int) -> Schedule:
    """The schedule of an algorithm.

    Args:
      name: one of `FAMILIES`.
      kind: the collective, for which the algorithm exists.
      ranks: the number of ranks, at least 1.

    Returns:
      The schedule.

    Raises:
      KeyError: if there is no such algorithm for the collective.
      ValueError: if ranks is less than 1.

    Example:
      >>> make("halving_doubling", Kind.ALL_REDUCE, 8)
      Schedule(halving_doubling, all_reduce, ranks=8, chunks=8, steps=6)
    """
    return FAMILIES[name][kind](ranks)
