"""Data parallelism with the collective as a program of our own. This is the file to read.

Every rank holds all parameters and a slice of the batch. It computes the gradients of its slice;
`jax_ring.gradients` averages them over the ranks; every rank then takes the same optimizer step.
With `--zero` a rank holds only its part of the optimizer's state (1), of the sums of gradients (2),
and of the parameters (3): it takes the optimizer step for its part.

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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring.gradients import (
    accumulate_gradients,
    clip_by_global_norm,
    gather_params,
    scatter_gradients,
    shard_params,
    shard_specs,
    sharded_optimizer,
    sync_gradients,
    unshard,
)
from language_model.config import Config, ConfigError
from language_model.data import Bytes
from language_model.model import Gather, Transformer, bits_per_byte

AXIS = "data"
# Who reduces: the explicit ring, or the operation built into JAX.
ALGORITHMS = {"ring": "ring", "psum": "xla"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a train step updates.

    Attributes:
      params: the model's parameters; with `--zero 3` shards of them.
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
    if jax.process_count() > 1 and len(found) != devices:
        raise ConfigError(
            f"--devices must be {len(found)}, the devices of all {jax.process_count()} processes, "
            f"got {devices}"
        )
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


def make_optimizer(config: Config, collective: str) -> optax.GradientTransformation:
    """AdamW with warm-up and 1/sqrt decay, a schedule that does not depend on `--steps`.

    So a run can be resumed with more steps, and is the same as if it had had them from the start.
    """

    def learning_rate(count: jax.Array) -> jax.Array:
        ramp = (count + 1) / config.warmup
        return config.learning_rate * jnp.minimum(ramp, 1 / jnp.sqrt(ramp))

    algorithm = ALGORITHMS[collective]
    optimizer = optax.chain(
        # The norm of all ranks' parts together, where gradients come in parts.
        clip_by_global_norm(1.0, AXIS, algorithm=algorithm),
        optax.adamw(learning_rate, b2=0.98, weight_decay=0.05),
    )
    if not config.zero:
        return optimizer
    bucket_bytes = reduction_of(config, collective)["bucket_bytes"]
    return sharded_optimizer(optimizer, AXIS, gather_algorithm=algorithm, bucket_bytes=bucket_bytes)


def initial_state(mesh: Mesh, params: nnx.State, config: Config) -> TrainState:
    """The state before the first step, on its devices; the same whichever collective reduces."""
    parts = shard_params(params, config.devices) if config.zero else params
    state = TrainState(
        parts if config.zero == 3 else params, make_optimizer(config, "ring").init(parts)
    )
    return put(state, shardings(mesh, state))


def put(tree: Any, where: Any) -> Any:
    """Arrays that every process has, each on its devices, some of which may be other processes'."""

    def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree, where)


def speaks() -> bool:
    """Whether this process prints and writes for all."""
    return jax.process_index() == 0


def on_one_device(mesh: Mesh, params: Any) -> Any:
    """The whole parameters on the first device of this process."""
    everywhere = jax.jit(unshard, out_shardings=NamedSharding(mesh, P()))(params)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), everywhere)


def shardings(mesh: Mesh, tree: Any) -> Any:
    """Where a tree belongs: a shard's parts on a device each, all else on every device."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), shard_specs(tree, AXIS))


def make_gather(config: Config, collective: str) -> Gather | None:
    """For `--zero 3`: parameters from their shards, whose gradients are scattered."""
    if config.zero < 3:
        return None
    return functools.partial(
        gather_params,
        axis_name=AXIS,
        gather_algorithm=ALGORITHMS[collective],
        **reduction_of(config, collective),
    )


def make_value_and_grad(graph: nnx.GraphDef[Transformer], config: Config, collective: str) -> Any:
    """(params, windows) to (loss, gradients), over the ranks; the gradients in parts with zero."""
    gather, how = make_gather(config, collective), reduction_of(config, collective)
    loss_of_rank = functools.partial(bits_per_byte, graph, gather=gather)
    if gather is None:
        scatter = (None, "once", "each")[config.zero]
        return accumulate_gradients(
            loss_of_rank, config.accumulate, axis_name=AXIS, scatter=scatter, **how
        )
    # The gradients of what was gathered are scattered already.
    value_and_grad = accumulate_gradients(loss_of_rank, config.accumulate)

    def step(params: nnx.State, windows: jax.Array) -> tuple[jax.Array, nnx.State]:
        loss, grads = value_and_grad(params, windows)
        return jax_ring.pmean(loss, AXIS, algorithm=how["algorithm"]), grads

    return step


def make_train_step(
    mesh: Mesh,
    graph: nnx.GraphDef[Transformer],
    like: TrainState,
    config: Config,
    collective: str,
) -> Any:
    """The jitted step: (state, windows) to (new state, loss); the old state's memory is reused."""
    value_and_grad = make_value_and_grad(graph, config, collective)
    optimizer = make_optimizer(config, collective)

    def step_of_rank(state: TrainState, windows: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = value_and_grad(state.params, windows)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss

    specs = shard_specs(like, AXIS)
    step = jax.shard_map(step_of_rank, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=(specs, P()))
    return jax.jit(step, donate_argnums=0)


def make_evaluate(
    mesh: Mesh,
    graph: nnx.GraphDef[Transformer],
    like: TrainState,
    config: Config,
    collective: str,
) -> Any:
    """The jitted validation loss: (params, windows) to bits per byte."""
    gather = make_gather(config, collective)

    def loss_of_rank(params: nnx.State, windows: jax.Array) -> jax.Array:
        loss = bits_per_byte(graph, params, windows, gather)
        return jax_ring.pmean(loss, AXIS, algorithm=ALGORITHMS[collective])

    specs = shard_specs(like.params, AXIS)
    return jax.jit(jax.shard_map(loss_of_rank, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=P()))


def make_reduction(mesh: Mesh, config: Config, collective: str) -> Any:
    """The reduction of gradients and nothing else, to time it, of a tree of [ranks, ...]."""
    reduce = scatter_gradients if config.zero else sync_gradients

    def reduce_rows(rows: Any) -> Any:
        local = jax.tree.map(lambda row: row[0], rows)
        reduced = reduce(local, AXIS, **reduction_of(config, collective))
        # Of shards only the parts, in one dimension: how they are cut does not matter here.
        return jax.tree.map(jnp.ravel, reduced)

    specs = P(AXIS) if config.zero else P()
    return jax.jit(jax.shard_map(reduce_rows, mesh=mesh, in_specs=P(AXIS), out_specs=specs))


def split_batch(mesh: Mesh, shape: tuple[int, ...], read: Callable[[slice], Bytes]) -> jax.Array:
    """Gives every device its slice of a batch. Each process reads those of its own devices only."""
    where = NamedSharding(mesh, P(AXIS))
    return jax.make_array_from_callback(shape, where, lambda index: read(index[0]))
