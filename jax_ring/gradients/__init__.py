"""What a data-parallel training step needs around the collectives.

- `sync_gradients`: all leaves of a tree averaged over the ranks, in buckets;
- `plan_buckets`: which leaf goes into which bucket, to be printed and compared;
- `reduce_in_backward`: the same inside of the backward pass, as each layer's gradients are ready;
- `accumulate_gradients`: several micro-batches, and one reduction;
- `powersgd`, `one_bit`: means of compressed gradients, as transformations for `optax.chain`, and
  `state_specs`, by which their `CompressionState` crosses the border of `shard_map`;
- `sharded_optimizer`: each rank holds a part of the optimizer's state (ZeRO), with `shard_params`,
  `shard_specs`, `unshard` and `shard_like` for what crosses the border of `shard_map` and for
  checkpoints, and `clip_by_global_norm` and `global_norm` over the parts of all ranks;
- `gather_params`: each rank holds a part of the parameters too (FSDP), gathered layer by layer;
- `scatter_gradients`: the reducing half of `sync_gradients`;
- `data_parallel`: `accumulate_gradients` for jitted programs whose arrays carry shardings.

All are pure functions of pytrees, for use inside `jax.shard_map`, but the last, which makes one.
"""

from jax_ring.gradients.accumulate import accumulate_gradients
from jax_ring.gradients.buckets import BucketPlan, plan_buckets
from jax_ring.gradients.compression import CompressionState, state_specs
from jax_ring.gradients.one_bit import one_bit
from jax_ring.gradients.optimizer import clip_by_global_norm, global_norm, sharded_optimizer
from jax_ring.gradients.parallel import data_parallel
from jax_ring.gradients.powersgd import powersgd
from jax_ring.gradients.sharded import gather_params, save_all_but_gathered, scatter_gradients
from jax_ring.gradients.shards import Shard, shard_like, shard_params, shard_specs, unshard
from jax_ring.gradients.sync import reduce_in_backward, sync_gradients

__all__ = [
    "BucketPlan",
    "CompressionState",
    "Shard",
    "accumulate_gradients",
    "clip_by_global_norm",
    "data_parallel",
    "gather_params",
    "global_norm",
    "one_bit",
    "plan_buckets",
    "powersgd",
    "reduce_in_backward",
    "save_all_but_gathered",
    "scatter_gradients",
    "shard_like",
    "shard_params",
    "shard_specs",
    "sharded_optimizer",
    "state_specs",
    "sync_gradients",
    "unshard",
]
