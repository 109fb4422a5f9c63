"""The state of compressed gradients: over the mesh, in chains of optax, through checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from harness import mesh, same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import (
    CompressionState,
    one_bit,
    powersgd,
    shard_params,
    shard_specs,
    sharded_optimizer,
    state_specs,
)

N = 4
METHODS = {
    "powersgd": lambda: powersgd("x", 1, warmup_steps=1),
    "one_bit": lambda: one_bit("x", 1, exact_below=8),
}
PARAMS = {"w": jnp.ones((12, 8)) / 8, "b": jnp.zeros(6)}


def training(compress, *, check_vma=True):
    """Compiled: the start of an optimizer's state, and a step of parameters, state and batch."""
    optimizer = optax.chain(optax.clip(1e3), compress, optax.adam(0.05))
    specs = state_specs(jax.eval_shape(optimizer.init, PARAMS), "x")
    on_ranks = functools.partial(jax.shard_map, mesh=mesh(N), check_vma=check_vma)

    def loss(params, batch):
        return (
            (jnp.tanh(batch @ params["w"]).sum(1) - params["b"].sum() - batch[:, 0]) ** 2
        ).mean()

    def step(params, state, batch):
        local = jax.lax.pcast(params, "x", to="varying") if check_vma else params
        updates, state = optimizer.update(jax.grad(loss)(local, batch), state, params)
        return optax.apply_updates(params, updates), state

    init = on_ranks(optimizer.init, in_specs=P(), out_specs=specs)
    step = on_ranks(step, in_specs=(P(), specs, P("x")), out_specs=(P(), specs))
    return jax.jit(init), jax.jit(step)


def batches(steps):
    return np.random.default_rng(0).standard_normal((steps, 8 * N, 12)).astype(np.float32)


@pytest.mark.parametrize("method", ["powersgd", pytest.param("one_bit", marks=pytest.mark.slow)])
def test_a_chain_on_a_mesh_holds_an_error_for_each_rank(method):
    init, step = training(METHODS[method]())
    params, state = PARAMS, init(PARAMS)
    for batch in batches(4):
        params, state = step(params, state, batch)
    (kept,) = (node for node in state if isinstance(node, CompressionState))
    assert kept.error["w"].shape == (N * 12, 8)
    assert kept.error["w"].sharding.is_equivalent_to(NamedSharding(mesh(N), P("x")), 2)
    rows = np.asarray(kept.error["w"]).reshape(N, 12, 8)
    assert len({row.tobytes() for row in rows}) == N
    others = jax.tree.leaves((params, kept._replace(error=None)))
    assert all(leaf.sharding.is_fully_replicated for leaf in others)
    for leaf in others:
        copies = [shard.data for shard in leaf.addressable_shards]
        assert all(same_bits(copies[0], copy) for copy in copies)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_types_checked_or_not_make_no_difference(method):
    results = []
    for check_vma in (True, False):
        init, step = training(METHODS[method](), check_vma=check_vma)
        params, state = PARAMS, init(PARAMS)
        for batch in batches(3):
            params, state = step(params, state, batch)
        results.append((params, state))
    assert jax.tree.all(jax.tree.map(same_bits, *results))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_goes_on_to_the_same_bits(method, tmp_path):
    init, step = training(METHODS[method]())
    params, state = PARAMS, init(PARAMS)
    before, after = np.split(batches(6), 2)
    for batch in before:
        params, state = step(params, state, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", (params, state))
    for batch in after:
        params, state = step(params, state, batch)
        restored = step(*restored, batch)
    assert jax.tree.all(jax.tree.map(same_bits, (params, state), restored))


def test_specs_of_what_is_no_compression():
    optimizer = sharded_optimizer(optax.adam(0.1), "x")
    shards = optimizer.init(shard_params(PARAMS, ranks=N))
    assert state_specs(shards, "x") == shard_specs(shards, "x")
    state = powersgd(("x", "y"), 1).init(PARAMS)
    specs = state_specs({"compress": state, "rate": 1.0}, ("x", "y"))
    assert specs["rate"] == specs["compress"].step == specs["compress"].basis["w"] == P()
    assert specs["compress"].error == {"w": P(("x", "y")), "b": None}
