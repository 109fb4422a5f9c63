"""jax_ring: the collective as your own program."""

from jax_ring import schedules
from jax_ring.collectives import (
    all_gather,
    all_reduce,
    pmax,
    pmean,
    pmin,
    psum,
    psum_scatter,
    reduce_scatter,
)
from jax_ring.config import config

__version__ = "0.1.0"
__all__ = [
    "all_gather",
    "all_reduce",
    "config",
    "pmax",
    "pmean",
    "pmin",
    "psum",
    "psum_scatter",
    "reduce_scatter",
    "schedules",
]
