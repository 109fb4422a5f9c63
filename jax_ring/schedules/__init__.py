"""Collective algorithms as data. Pure Python and NumPy: nothing here imports JAX."""

from jax_ring.schedules.cost import cost
from jax_ring.schedules.direct import direct, direct_all_gather, direct_reduce_scatter
from jax_ring.schedules.double_binary_tree import double_binary_tree
from jax_ring.schedules.families import FAMILIES
from jax_ring.schedules.halving_doubling import (
    halving_doubling,
    halving_doubling_all_gather,
    halving_doubling_reduce_scatter,
)
from jax_ring.schedules.hierarchical import hierarchical
from jax_ring.schedules.recursive_doubling import recursive_doubling
from jax_ring.schedules.ring import (
    bidirectional_ring,
    bidirectional_ring_all_gather,
    bidirectional_ring_reduce_scatter,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    torus_orders,
)
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
from jax_ring.schedules.verify import position_independent, verify

__all__ = [
    "FAMILIES",
    "Kind",
    "Op",
    "Run",
    "Schedule",
    "ScheduleError",
    "Step",
    "Steps",
    "bidirectional_ring",
    "bidirectional_ring_all_gather",
    "bidirectional_ring_reduce_scatter",
    "compose",
    "cost",
    "direct",
    "direct_all_gather",
    "direct_reduce_scatter",
    "double_binary_tree",
    "halving_doubling",
    "halving_doubling_all_gather",
    "halving_doubling_reduce_scatter",
    "hierarchical",
    "position_independent",
    "recursive_doubling",
    "ring",
    "ring_all_gather",
    "ring_reduce_scatter",
    "torus_orders",
    "verify",
]
