"""Before and after: swap `jax.lax.psum` for `jax_ring.psum`.

    python examples/replace_psum.py

The function around it, its types and its gradients stay as they are. What changes is the compiled
program: one all-reduce becomes the 2(N-1) collective-permutes of a ring of N ranks.
"""

import os

# Eight virtual CPU devices, unless the caller has asked for something else.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring


def before(x: jax.Array) -> jax.Array:
    """Normalizes the columns of a matrix whose rows are spread over the ranks."""
    return x / jnp.sqrt(jax.lax.psum((x**2).sum(axis=0), "ranks"))


def after(x: jax.Array) -> jax.Array:
    """The same, and the sum is a ring that we can see."""
    return x / jnp.sqrt(jax_ring.psum((x**2).sum(axis=0), "ranks", algorithm="ring"))


def main() -> None:
    """Runs both, compares them and counts the collectives."""
    mesh = jax.make_mesh((jax.device_count(),), ("ranks",), (AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (16 * jax.device_count(), 1024))
    x = jax.device_put(x, NamedSharding(mesh, P("ranks")))
    results = []
    for function in (before, after):
        sharded = jax.shard_map(function, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"))
        compiled = jax.jit(sharded).lower(x).compile()
        results.append(compiled(x))
        hlo = compiled.as_text()
        counts = [f"{op}: {hlo.count(f' {op}(')}" for op in ("all-reduce", "collective-permute")]
        print(f"{function.__name__:6}: {', '.join(counts)}")
    np.testing.assert_allclose(*results, rtol=1e-6)
    print(f"they agree: largest difference {abs(results[0] - results[1]).max():.1e}")


if __name__ == "__main__":
    main()
