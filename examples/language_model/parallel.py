"""Data parallelism with the collective as a program of our own. This is the file to read.

Every rank holds all parameters and a slice of the batch. It computes the gradients of its slice;
`jax_ring.gradients` averages them over the ranks; every rank then takes the same optimizer step.

Two things are worth knowing:

1.  Inside `jax.shard_map` the parameters have the type "the same on all ranks". The gradient with
    respect to such a value must be the same on all ranks too, so `jax.grad` sums it over them by
    itself, with XLA's all-reduce. `accumulate_gradients` first casts the parameters to "may vary
    over the ranks" (`jax.lax.pcast`), so that their gradients stay local until it reduces them.

2.  A ring of N ranks takes 2(N-1) steps for *each array* that it reduces. The loss and all
    gradients are put into buckets, so that there is one ring for each of these rather than one for
    each of the model's arrays: fewer and larger messages, and a quicker compilation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring.gradients import accumulate_gradients, sync_gradients
from language_model.config import Config, ConfigError
from language_model.model import Transformer, bits_per_byte

AXIS = "data"
# Who reduces: the explicit ring, or the operation built into JAX.
ALGORITHMS = {"ring": "ring", "psum": "xla"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a train step updates.

    Attributes:
      params: the model's parameters.
      optimizer: the optimizer's state.
    """

    params: nnx.State
    optimizer: optax.OptState


def make_mesh(devices: int) -> Mesh:
    """A one-dimensional mesh over the first devices.

    Raises:
      ConfigError: if there are too few.
    """
    found = jax.devices()
    if len(found) < devices:
        raise ConfigError(
            f"--devices must be at most {len(found)}, the {found[0].platform} devices that JAX "
            f"sees, got {devices}; for virtual ones unset XLA_FLAGS and JAX_PLATFORMS"
        )
    return jax.make_mesh((devices,), (AXIS,), (AxisType.Auto,), devices=found[:devices])


def reduction_of(config: Config, collective: str) -> dict[str, Any]:
    """How `jax_ring.gradients` is to reduce. A wire is for our own algorithms only."""
    return {
        "algorithm": ALGORITHMS[collective],
        "wire": config.wire if collective == "ring" else None,
        "bucket_bytes": int(config.bucket_mb * 2**20),
    }


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with warm-up and 1/sqrt decay, a schedule that does not depend on `--steps`.

    So a run can be resumed with more steps, and is the same as if it had had them from the start.
    """

    def learning_rate(count: jax.Array) -> jax.Array:
        ramp = (count + 1) / config.warmup
        return config.learning_rate * jnp.minimum(ramp, 1 / jnp.sqrt(ramp))

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, b2=0.98, weight_decay=0.05)
    )


def make_train_step(
    mesh: Mesh,
    graph: nnx.GraphDef[Transformer],
    optimizer: optax.GradientTransformation,
    config: Config,
    collective: str,
) -> Any:
    """The jitted step: (state, windows) to (new state, loss); the old state's memory is reused."""
    value_and_grad = accumulate_gradients(
        functools.partial(bits_per_byte, graph),
        config.accumulate,
        axis_name=AXIS,
        **reduction_of(config, collective),
    )

    def step_of_rank(state: TrainState, windows: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = value_and_grad(state.params, windows)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss

    step = jax.shard_map(step_of_rank, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
    return jax.jit(step, donate_argnums=0)


def make_evaluate(mesh: Mesh, graph: nnx.GraphDef[Transformer], collective: str) -> Any:
    """The jitted validation loss: (params, windows) to bits per byte."""

    def loss_of_rank(params: nnx.State, windows: jax.Array) -> jax.Array:
        loss = bits_per_byte(graph, params, windows)
        return jax_ring.pmean(loss, AXIS, algorithm=ALGORITHMS[collective])

    return jax.jit(jax.shard_map(loss_of_rank, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P()))


def make_reduction(mesh: Mesh, config: Config, collective: str) -> Any:
    """The train step's reduction and nothing else, to time it: a tree of [ranks, ...] to [...]."""

    def reduce(rows: Any) -> Any:
        local = jax.tree.map(lambda row: row[0], rows)
        return sync_gradients(local, AXIS, **reduction_of(config, collective))

    return jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=P(AXIS), out_specs=P()))


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Puts a copy of a pytree onto every device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def split_batch(mesh: Mesh, windows: np.ndarray) -> jax.Array:
    """Gives every device its slice of a batch."""
    return jax.device_put(windows, NamedSharding(mesh, P(AXIS)))
