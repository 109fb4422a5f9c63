"""What the compiler made of the collective, read from the optimized HLO."""

from __future__ import annotations

import dataclasses
import math
import re

_COLLECTIVE = re.compile(
    r" = (?P<type>.+?) (?P<name>collective-permute|all-reduce|all-gather|reduce-scatter|all-to-all)"
    r"(?:-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+(?P<bits>\d+))\[(?P<shape>[\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The collectives of one kind in a compiled program.

    Attributes:
      count: how many instructions.
      nbytes: bytes of their results on one rank, all together.
    """

    count: int = 0
    nbytes: int = 0


def find_collectives(hlo: str) -> dict[str, Collectives]:
    """Counts the collectives in an HLO text, by the name of the instruction."""
    found: dict[str, Collectives] = {}
    for match in _COLLECTIVE.finditer(hlo):
        seen = found.get(match["name"], Collectives())
        # Asynchronous forms list the operand before the result, so only the first array counts.
        nbytes = _first_array_bytes(match["type"])
        found[match["name"]] = Collectives(seen.count + 1, seen.nbytes + nbytes)
    return found


def _first_array_bytes(hlo_type: str) -> int:
    array = _ARRAY.search(hlo_type)
    if array is None:
        return 0
    elements = math.prod(int(size) for size in array["shape"].split(",") if size)
    return elements * int(array["bits"]) // 8
