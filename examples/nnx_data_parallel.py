"""A flax nnx model trained data-parallel under `jax.jit`, its gradients reduced by `jax_ring`.

    python examples/nnx_data_parallel.py

`nnx.split` takes the model apart into its structure, the parameters that are learned, and all other
state. The loss function of the parameters joins them again, and `data_parallel` does the rest: each
rank computes the gradients of its part of the batch, and jax_ring averages them, in buckets.
"""

import os

# Eight virtual CPU devices, unless the caller has asked for something else.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import data_parallel

STEPS = 100
Batch = tuple[jax.Array, jax.Array]


class Model(nnx.Module):
    """A perceptron with normalised inputs, whose mean and variance are state but not learned."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Allocates parameters and state."""
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.up = nnx.Linear(8, 64, rngs=rngs)
        self.down = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, 8] to [batch]."""
        return self.down(jnp.tanh(self.up(self.norm(x))))[:, 0]


def main() -> None:
    """Trains and compares with the gradients by the compiler."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    structure, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    optimizer = optax.adam(3e-3)

    def loss_of(params: nnx.State, batch: Batch) -> jax.Array:
        x, y = batch
        return jnp.mean((nnx.merge(structure, params, rest)(x) - y) ** 2)

    value_and_grad = data_parallel(loss_of, mesh)

    @jax.jit
    def step(params: nnx.State, state: optax.OptState, batch: Batch):
        loss, grads = value_and_grad(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads

    x = jax.random.normal(jax.random.key(0), (512, 8))
    batch = jax.device_put((x, jnp.sin(x).sum(1)), NamedSharding(mesh, P("data")))
    state, losses = optimizer.init(params), []
    wanted = jax.jit(jax.grad(loss_of))(params, batch)
    for i in range(STEPS):
        params, state, loss, grads = step(params, state, batch)
        losses.append(float(loss))
        if i == 0:
            off = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), grads, wanted)
            print(f"the compiler's gradients differ by at most {max(jax.tree.leaves(off)):.1e}")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
