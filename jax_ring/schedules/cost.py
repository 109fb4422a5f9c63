"""The price of a schedule in the alpha-beta model."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jax_ring.schedules.schedule import Run, Schedule


def cost(schedule: Schedule, nbytes: float, alpha: float, beta: float, *, ports: int = 1) -> float:
    """Time of a schedule when each step takes alpha plus beta for each byte of its message.

    All messages of a step travel at the same time, over links that they do not share. The model
    is Hockney's; for the formulas of the common algorithms in it see Thakur, Rabenseifner and
    Gropp, "Optimization of collective communication operations in MPICH", 2005, section 3. Steps of
    several channels in one round pay alpha once, and share the ports of a rank.

    Args:
      schedule: what to price.
      nbytes: size of the whole buffer in bytes: what is reduced, or the result of an all-gather.
      alpha: seconds per step.
      beta: seconds per byte through a port.
      ports: how many messages a rank sends and receives at once without slowing down.

    Returns:
      Seconds.

    Raises:
      ValueError: if nbytes, alpha or beta is negative or not finite, or ports less than 1.

    Example:
      >>> from jax_ring.schedules import bidirectional_ring, ring
      >>> seconds = cost(ring(8), nbytes=1e9, alpha=0.0, beta=1 / 400e9)  # 2 (7/8) S / B
      >>> print(f"{seconds * 1e3:.3f} ms")
      4.375 ms
      >>> seconds = cost(bidirectional_ring(9), nbytes=1e9, alpha=0.0, beta=1 / 400e9, ports=2)
      >>> print(f"{seconds * 1e3:.3f} ms")  # Half of 2 (8/9) S / B.
      2.222 ms
    """
    for name, value in (("nbytes", nbytes), ("alpha", alpha), ("beta", beta)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    if ports < 1:
        raise ValueError(f"ports must be at least 1, got {ports}")
    moved = sum(rounds * through_a_port(runs, ports) for rounds, runs in schedule.stretches())
    return schedule.rounds * alpha + moved / schedule.chunks * nbytes * beta


def through_a_port(runs: Iterable[Run], ports: int) -> float:
    """The chunks that pass through the busiest port of a rank in a round of steps of some runs."""
    messages = [run.first.k for run in runs if run.first.perm]
    return max(max(messages, default=0), sum(messages) / ports)
