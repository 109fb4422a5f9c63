"""What the shell offers for values that are names."""

from __future__ import annotations

from collections.abc import Iterable

from jax_ring import wire
from jax_ring.bench.measure import BY_HOSTS, LAX
from jax_ring.schedules import FAMILIES
from jax_ring.schedules.topology import PRESETS


def algorithms_to_show(incomplete: str) -> list[str]:
    """Those that there are schedules of.

    Example:
      >>> algorithms_to_show("r")
      ['ring', 'recursive_doubling']
    """
    return _beginning(incomplete, [*FAMILIES, "hierarchical"])


def algorithms_to_measure(incomplete: str) -> list[str]:
    """Those that can be measured.

    Example:
      >>> algorithms_to_measure("h")
      ['halving_doubling', 'hierarchical', 'host_ring']
    """
    return _beginning(incomplete, ["auto", *FAMILIES, *BY_HOSTS, LAX])


def lists_of_algorithms(incomplete: str) -> list[str]:
    """Those that can be measured, after what is typed already.

    Example:
      >>> lists_of_algorithms("psum,ri")
      ['psum,ring']
    """
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in algorithms_to_measure(last)]


def wires(incomplete: str) -> list[str]:
    """The wire formats.

    Example:
      >>> wires("int")
      ['int8', 'int4']
    """
    return _beginning(incomplete, wire.NAMES)


def topologies(incomplete: str) -> list[str]:
    """The topologies that have a name.

    Example:
      >>> topologies("nvl")
      ['nvlink8+ib', 'nvlink8+ib+wan']
    """
    return _beginning(incomplete, PRESETS)


def _beginning(incomplete: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
