"""Collective algorithms as data. Pure Python and NumPy: nothing here imports JAX."""

from jax_ring.schedules.cost import cost
from jax_ring.schedules.direct import direct, direct_all_gather, direct_reduce_scatter
from jax_ring.schedules.ring import ring, ring_all_gather, ring_reduce_scatter
from jax_ring.schedules.schedule import (
    Kind,
    Op,
    Run,
    Schedule,
    ScheduleError,
    Step,
    Steps,
    compose,
)
from jax_ring.schedules.verify import verify

__all__ = [
    "Kind",
    "Op",
    "Run",
    "Schedule",
    "ScheduleError",
    "Step",
    "Steps",
    "compose",
    "cost",
    "direct",
    "direct_all_gather",
    "direct_reduce_scatter",
    "ring",
    "ring_all_gather",
    "ring_reduce_scatter",
    "verify",
]
