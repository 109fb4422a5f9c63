"""The price of a schedule in the alpha-beta model."""

from __future__ import annotations

from jax_ring.schedules.schedule import Schedule


def cost(schedule: Schedule, nbytes: float, alpha: float, beta: float) -> float:
    """Time of a schedule when each step takes alpha plus beta for each byte of its message.

    All messages of a step travel at the same time, over links that they do not share. The model
    is Hockney's; for the formulas of the common algorithms in it see Thakur, Rabenseifner and
    Gropp, "Optimization of collective communication operations in MPICH", 2005, section 3.

    Args:
      schedule: what to price.
      nbytes: size of the whole buffer in bytes: what is reduced, or the result of an all-gather.
      alpha: seconds per step.
      beta: seconds per byte.

    Returns:
      Seconds.

    Raises:
      ValueError: if nbytes, alpha or beta is negative.

    Example:
      >>> from jax_ring.schedules import ring
      >>> seconds = cost(ring(8), nbytes=1e9, alpha=0.0, beta=1 / 400e9)  # 2 (7/8) S / B
      >>> print(f"{seconds * 1e3:.3f} ms")
      4.375 ms
    """
    for name, value in (("nbytes", nbytes), ("alpha", alpha), ("beta", beta)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    moved = sum(run.count * run.first.k for run in schedule.steps.runs if run.first.perm)
    return len(schedule.steps) * alpha + moved / schedule.chunks * nbytes * beta
