"""What a data-parallel training step needs around the collectives.

- `sync_gradients`: all leaves of a tree averaged over the ranks, in buckets;
- `plan_buckets`: which leaf goes into which bucket, to be printed and compared;
- `reduce_in_backward`: the same inside of the backward pass, as each layer's gradients are ready;
- `accumulate_gradients`: several micro-batches, and one reduction;
- `data_parallel`: all of it for jitted programs whose arrays carry shardings.

All are pure functions of pytrees, for use inside `jax.shard_map`, but the last, which makes one.
"""

from jax_ring.gradients.accumulate import accumulate_gradients
from jax_ring.gradients.buckets import BucketPlan, plan_buckets
from jax_ring.gradients.parallel import data_parallel
from jax_ring.gradients.sync import reduce_in_backward, sync_gradients

__all__ = [
    "BucketPlan",
    "accumulate_gradients",
    "data_parallel",
    "plan_buckets",
    "reduce_in_backward",
    "sync_gradients",
]
