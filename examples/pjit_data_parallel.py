"""A jitted train step on a mesh of data x model, its gradient reduction left to XLA or taken over.

    python examples/pjit_data_parallel.py

The parameters are sharded over "model", and the compiler partitions the computation for that. The
batch is sharded over "data", and the gradients have to be averaged over it. Two forms:

* plain: `jax.grad` of the mean loss under `jax.jit`; the compiler inserts the all-reduces;
* ring: `jax_ring.gradients.data_parallel`, a `jax.shard_map` that is manual over "data" only, in
  which jax_ring averages the gradients, while "model" stays with the compiler.

Both are the same training to the last digits; the collectives in their programs differ. The ring
form keeps one all-reduce: that over "model", in the middle of the forward pass.
"""

import functools
import os
import re
from collections import Counter

# Eight virtual CPU devices, unless the caller has asked for something else.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import data_parallel

DATA, MODEL, STEPS, RATE = 4, 2, 10, 0.1
KINDS = ("all-reduce", "collective-permute", "all-gather")
Params = dict[str, jax.Array]
Batch = tuple[jax.Array, jax.Array]
SPECS = {"up": P(None, "model"), "down": P("model", None)}


def loss_of(params: Params, batch: Batch) -> jax.Array:
    """Mean squared error of a perceptron with one hidden layer."""
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def train(mesh: Mesh, by_ring: bool) -> tuple[list[float], Counter[str]]:
    """Takes a few steps of gradient descent: the losses, and the collectives in the program."""
    by_compiler = jax.value_and_grad(loss_of)  # The mean is over the whole batch: it must reduce.
    compute = data_parallel(loss_of, mesh, algorithm="ring") if by_ring else by_compiler
    params, batch = make_data(mesh)

    @functools.partial(jax.jit, out_shardings=(shardings_of(mesh), None))
    def step(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        loss, grads = compute(params, batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss

    compiled = step.lower(params, batch).compile()
    losses = []
    for _ in range(STEPS):
        params, loss = compiled(params, batch)
        losses.append(float(loss))
    return losses, count_collectives(compiled.as_text())


def shardings_of(mesh: Mesh) -> dict[str, NamedSharding]:
    """Where the parameters lie."""
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def make_data(mesh: Mesh) -> tuple[Params, Batch]:
    """Parameters sharded over "model", a batch sharded over "data"."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (64, 256)) / 8,
        "down": jax.random.normal(keys[1], (256, 64)) / 16,
    }
    x, y = (jax.random.normal(key, (128, 64)) for key in keys[2:])
    batch = jax.device_put((x, y), NamedSharding(mesh, P("data")))
    return jax.device_put(params, shardings_of(mesh)), batch


def count_collectives(hlo: str) -> Counter[str]:
    """The number of instructions of each kind in the compiled program."""
    return Counter(re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", hlo))


def main() -> None:
    """Trains in both forms and compares."""
    mesh = jax.make_mesh((DATA, MODEL), ("data", "model"), (AxisType.Auto,) * 2)
    losses = {}
    for name in ("plain", "ring"):
        losses[name], found = train(mesh, by_ring=name == "ring")
        counts = ", ".join(f"{kind}: {found[kind]}" for kind in KINDS)
        print(f"{name:5}: loss {losses[name][0]:.6f} -> {losses[name][-1]:.6f}; {counts}")
    difference = max(abs(a - b) for a, b in zip(losses["plain"], losses["ring"], strict=True))
    print(f"largest difference of the {STEPS} losses: {difference:.1e}")
    if difference > 1e-6:
        raise SystemExit("the losses differ by more than 1e-6")


if __name__ == "__main__":
    main()
