"""jax_ring: the collective as your own program.

Drop-in replacements for `jax.lax.psum`, `pmean`, `pmax`, `pmin`, `psum_scatter` and `all_gather`,
built as explicit algorithms from `jax.lax.ppermute` inside `jax.shard_map`:

- the collectives, and their generic forms `all_reduce` and `reduce_scatter`;
- `jax_ring.schedules`: algorithms as data, with a verifier and a cost model;
- `jax_ring.wire`: what chunks look like while they travel, for fewer bytes;
- `jax_ring.gradients`: buckets, reduction inside of backward, accumulation;
- `jax_ring.error_feedback`: sums over a lossy wire whose errors do not add up;
- `jax_ring.explain`: every collective of a function, where, by which algorithm and why;
- `jax_ring.choose`: what `algorithm="auto"` means, its prices, and tuning files;
- `jax_ring.hosts`: schedules that fit which ranks share a host;
- `jax_ring.distributed`: processes: start, checks, and errors instead of hangs;
- `jax_ring.config`: settings, from `JAX_RING_*` or for a block of code;
- `jax_ring.native`: what came of loading the compiled part.

Example:
  >>> import jax, jax.numpy as jnp, jax_ring
  >>> from jax.sharding import PartitionSpec as P
  >>> mesh = jax.sharding.Mesh(jax.devices(), "data")
  >>> @jax.jit
  ... @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
  ... def total(x):
  ...     return jax_ring.psum(x.sum(), "data")
  >>> print(total(jnp.arange(16.0)))
  120.0
"""

from jax_ring import choose, distributed, error_feedback, gradients, hosts, native, schedules, wire
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
from jax_ring.explanation import explain

__version__ = "0.1.0"
__all__ = [
    "all_gather",
    "all_reduce",
    "choose",
    "config",
    "distributed",
    "error_feedback",
    "explain",
    "gradients",
    "hosts",
    "native",
    "pmax",
    "pmean",
    "pmin",
    "psum",
    "psum_scatter",
    "reduce_scatter",
    "schedules",
    "wire",
]

native.load()
