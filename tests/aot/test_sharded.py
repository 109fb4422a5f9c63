"""Parameters gathered layer by layer, compiled for 8 x H200: what is whole at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import gather_params, save_all_but_gathered, shard_params, shard_specs

pytestmark = pytest.mark.aot

LAYERS, WIDTH = 8, 1024


def memory(mesh, remat):
    """Bytes of temporaries on each device, in the gradients of layers in a loop."""
    stack = jax.eval_shape(
        functools.partial(shard_params, ranks=mesh.size, stacked=True),
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), np.float32),
    )
    specs = shard_specs(stack, "data")

    def layer(y, w):
        return jnp.tanh(y @ gather_params(w, "data", gather_algorithm="ring")), None

    def loss(stack, x):
        return (lax.scan(remat(layer), x, stack)[0] ** 2).mean()

    f = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs)
    args = jax.tree.map(lambda leaf, spec: sharded(mesh, spec, leaf.shape), stack, specs)
    hlo = compiled(f, args, sharded(mesh, P("data"), (mesh.size * 64, WIDTH)))
    assert not hlo.other_collectives
    return hlo.memory.temp_size_in_bytes


def test_no_more_than_some_layers_are_whole_at_a_time(one_host):
    remat = functools.partial(jax.checkpoint, policy=save_all_but_gathered, prevent_cse=False)
    layer = WIDTH * WIDTH * 4
    kept, gathered = memory(one_host, lambda f: f), memory(one_host, remat)
    assert kept > LAYERS * layer
    # Of the layer, its gradient and what travels.
    assert gathered < kept - (LAYERS - 1) * layer
