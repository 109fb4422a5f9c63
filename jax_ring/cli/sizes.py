"""The sizes that a command measures at, in the manner of nccl-tests: -b, -e and -f or -i."""

from __future__ import annotations

import math

from jax_ring.cli.mistakes import read
from jax_ring.cli.units import parse_size


def sizes_from(begin: str, end: str, factor: float, step: str | None = None) -> list[int]:
    """The sizes from the first to the last, as they are written.

    Args:
      begin: the first, such as 4K.
      end: which none exceeds.
      factor: from one to the next.
      step: what is added from one to the next, instead.

    Returns:
      Bytes, ascending.

    Raises:
      ValueError: naming the option that is wrong.

    Example:
      >>> sizes_from("4K", "64K", 4)
      [4096, 16384, 65536]
    """
    smallest, largest = read("-b", parse_size, begin), read("-e", parse_size, end)
    if not 0 < smallest <= largest:
        raise ValueError(f"-b must be above 0 and at most -e, got {begin} and {end}")
    if step is not None:
        by = read("-i", parse_size, step)
        if by < 1:
            raise ValueError(f"-i must be at least 1 byte, got {step}")
        return list(range(smallest, largest + 1, by))
    if not 1 < factor < math.inf:
        raise ValueError(f"-f must be above 1, got {factor:g}")
    sizes = [smallest]
    while (following := max(round(sizes[-1] * factor), sizes[-1] + 1)) <= largest:
        sizes.append(following)
    return sizes
