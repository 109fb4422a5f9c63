"""An equinox model trained data-parallel under `jax.jit`, its gradients reduced by `jax_ring`.

    pip install equinox && python examples/equinox_data_parallel.py

`eqx.partition` takes the model apart into the arrays that are learned and the rest, with None in
either where the other has something; None is no leaf to `data_parallel`. The loss function of the
arrays joins them again.
"""

import os

# Eight virtual CPU devices, unless the caller has asked for something else.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import data_parallel

STEPS = 100
Batch = tuple[jax.Array, jax.Array]


def main() -> None:
    """Trains and compares with the gradients by the compiler."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    model = eqx.nn.MLP(8, "scalar", 64, 1, activation=jnp.tanh, key=jax.random.key(1))
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(3e-3)

    def loss_of(params: eqx.nn.MLP, batch: Batch) -> jax.Array:
        x, y = batch
        return jnp.mean((jax.vmap(eqx.combine(params, rest))(x) - y) ** 2)

    value_and_grad = data_parallel(loss_of, mesh)

    @jax.jit
    def step(params: eqx.nn.MLP, state: optax.OptState, batch: Batch):
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
