import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import compiled, mesh, per_rank, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring.gradients import (
    accumulate_gradients,
    clip_by_global_norm,
    gather_params,
    global_norm,
    scatter_gradients,
    shard_like,
    shard_params,
    shard_specs,
    sharded_optimizer,
    sync_gradients,
    unshard,
)

N = 4
RANDOM = np.random.default_rng(0)
# No size is a multiple of the number of ranks, but for one.
PARAMS = {
    "w": RANDOM.standard_normal((6, 5)).astype(np.float32),
    "b": np.zeros(5, np.float32),
    "none": None,
    "s": np.float32(1),
    "v": RANDOM.standard_normal((5, 8)).astype(np.float32),
}
DATA = RANDOM.standard_normal((12, 16, 6)).astype(np.float32)

OPTIMIZERS = {
    "adam": optax.adam(0.03),
    "adamw": optax.adamw(optax.linear_schedule(0.01, 0.02, 10)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(0.03),
}


def loss(params, x):
    y = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] * params["s"]
    return ((y - 1) ** 2).mean()


def placed(m, tree, specs):
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(m, spec), specs))


def plain(optimizer, data, ranks=N):
    """The losses of data-parallel training with whole states on all ranks."""

    def step(carry, x):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(lax.pcast(params, "x", to="varying"), x)
        updates, state = optimizer.update(sync_gradients(grads, "x"), state, params)
        return (optax.apply_updates(params, updates), state), jax_ring.pmean(value, "x")

    f = jax.shard_map(
        lambda x: lax.scan(step, (start, optimizer.init(start)), x)[1],
        mesh=mesh(ranks),
        in_specs=P(None, "x"),
        out_specs=P(),
    )
    start = jax.tree.map(jnp.asarray, PARAMS)
    return np.asarray(jax.jit(f)(data))


@functools.cache
def plain_losses(name, clip):
    whole = OPTIMIZERS[name]
    return plain(optax.chain(optax.clip_by_global_norm(1.0), whole) if clip else whole, DATA)


def start(optimizer, stage, ranks):
    """Parameters and state on their devices, and their specs."""
    shards = shard_params(PARAMS, ranks)
    state = optimizer.init(shards)
    params = shards if stage == 3 else jax.tree.map(jnp.asarray, PARAMS)
    carry = (params, state)
    specs = (shard_specs(params, "x"), shard_specs(state, "x"))
    return placed(mesh(ranks), carry, specs), specs


def program(optimizer, stage, ranks, specs, check_vma=True, **how):
    """(params, state), batches -> (params, state), losses; of jitted sharded training."""

    def step(carry, x):
        params, state = carry
        if stage == 3:
            at = lambda shards: loss(gather_params(shards, "x", **how), x)  # noqa: E731
            value, grads = jax.value_and_grad(at)(params)
        else:
            value, grads = jax.value_and_grad(loss)(lax.pcast(params, "x", to="varying"), x)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), jax_ring.pmean(value, "x")

    return jax.shard_map(
        functools.partial(lax.scan, step),
        mesh=mesh(ranks),
        in_specs=(specs, P(None, "x")),
        out_specs=(specs, P()),
        check_vma=check_vma,
    )


def train(optimizer, stage, data, ranks=N, **how):
    carry, specs = start(optimizer, stage, ranks)
    return jax.jit(program(optimizer, stage, ranks, specs, **how))(carry, data)


@pytest.mark.parametrize(
    ("name", "stage", "clip"),
    [
        ("momentum", 2, True),
        *(
            pytest.param(name, stage, clip, marks=pytest.mark.slow)
            for name in OPTIMIZERS
            for stage in (2, 3)
            for clip in (False, True)
            if (name, stage, clip) != ("momentum", 2, True)
        ),
    ],
)
def test_trajectories_are_those_of_plain_data_parallelism(name, stage, clip):
    part = OPTIMIZERS[name]
    if clip:
        # The norm is larger in the beginning and smaller in the end.
        part = optax.chain(clip_by_global_norm(1.0, "x"), part)
    (_, _), losses = train(sharded_optimizer(part, "x"), stage, DATA)
    wanted = plain_losses(name, clip)
    assert wanted[-1] < 0.85 * wanted[0]
    np.testing.assert_allclose(losses, wanted, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_they_are_without_checked_types_too(stage):
    part = optax.chain(clip_by_global_norm(1.0, "x"), OPTIMIZERS["adam"])
    (_, _), losses = train(sharded_optimizer(part, "x"), stage, DATA, check_vma=False)
    np.testing.assert_allclose(losses, plain_losses("adam", True), rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_holds_one_part_of_n(stage):
    ranks = 8
    params = {"w": jnp.zeros((64, 48)), "b": jnp.zeros(64)}
    optimizer = sharded_optimizer(optax.adam(0.1), "x")
    state = optimizer.init(shard_params(params, ranks))
    specs = shard_specs(state, "x")
    on_devices = placed(mesh(ranks), state, specs)
    held = [0] * ranks
    for leaf in jax.tree.leaves(on_devices):
        for piece in leaf.addressable_shards:
            held[piece.device.id] += piece.data.nbytes
    whole = 4 * (64 * 48 + 64)
    # Two moments, and a count.
    assert held == [2 * whole // ranks + 4] * ranks

    parts = shard_params(params, ranks) if stage == 3 else params
    part_specs = shard_specs(parts, "x")

    def step(params, state, x):
        def at(p):
            return sum((leaf * x.sum()).sum() for leaf in jax.tree.leaves(p))

        if stage == 3:
            grads = jax.grad(lambda shards: at(gather_params(shards, "x")))(params)
        else:
            grads = jax.grad(at)(lax.pcast(params, "x", to="varying"))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    f = jax.shard_map(
        step,
        mesh=mesh(ranks),
        in_specs=(part_specs, specs, P("x")),
        out_specs=(part_specs, specs),
    )
    hlo = compiled(f, parts, state, sharded(mesh(ranks), P("x"), (ranks,)), donate_argnums=(0, 1))
    of_params = whole // ranks if stage == 3 else whole
    arguments = hlo.memory.argument_size_in_bytes
    assert arguments == of_params + 2 * whole // ranks + 4 + 4
    assert not hlo.other_collectives


@pytest.mark.slow
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_an_update_sends_what_one_all_reduce_does(wire):
    ranks, size = 8, 8 * 96
    how = {"algorithm": "ring", "gather_algorithm": "ring", "wire": wire, "gather_wire": wire}
    optimizer = sharded_optimizer(optax.sgd(0.1, momentum=0.9), "x", **how)
    params = {"a": jnp.zeros((96, 4)), "b": jnp.zeros(384)}
    state = optimizer.init(shard_params(params, ranks))
    specs = shard_specs(state, "x")

    def step(grads, state):
        grads = jax.tree.map(lambda leaf: leaf[0], grads)
        return optimizer.update(grads, state)

    f = jax.shard_map(step, mesh=mesh(ranks), in_specs=(P("x"), specs), out_specs=(P(), specs))
    grads = jax.tree.map(lambda leaf: sharded(mesh(ranks), P("x"), (ranks, *leaf.shape)), params)
    hlo = compiled(f, grads, state)
    travels = "f32" if wire is None else "u16"
    assert hlo.permutes == [(travels, size // ranks)] * 2 * (ranks - 1)
    assert not hlo.other_collectives


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_four_ranks_then_two_then_eight_continue_as_if_nothing_was(stage, tmp_path):
    """Through files of whole arrays, which know nothing of ranks."""
    optimizer = sharded_optimizer(
        optax.chain(clip_by_global_norm(1.0, "x"), OPTIMIZERS["adam"]), "x"
    )
    whole, losses = None, []
    for ranks, part in zip((4, 2, 8), np.split(DATA, 3), strict=True):
        carry, specs = start(optimizer, stage, ranks)
        if whole is not None:
            saved = np.load(tmp_path / "saved.npz")
            leaves, treedef = jax.tree.flatten(jax.eval_shape(unshard, carry))
            read = [saved[str(i)] for i in range(len(leaves))]
            carry = placed(mesh(ranks), shard_like(jax.tree.unflatten(treedef, read), carry), specs)
        carry, found = jax.jit(program(optimizer, stage, ranks, specs))(carry, part)
        losses += found.tolist()
        whole = jax.tree.leaves(jax.jit(unshard)(carry))
        np.savez(tmp_path / "saved.npz", **{str(i): leaf for i, leaf in enumerate(whole)})
    np.testing.assert_allclose(losses, plain_losses("adam", True), rtol=2e-6)


@pytest.mark.slow
def test_an_orbax_checkpoint_is_read_onto_other_ranks(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", exc_type=ImportError)
    optimizer = sharded_optimizer(optax.adam(0.01), "x")
    (params, state), _ = train(optimizer, 3, DATA)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", jax.jit(unshard)((params, state)))
        checkpointer.wait_until_finished()
        like, specs = start(optimizer, 3, 8)
        whole = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh(8), P())
            ),
            jax.eval_shape(unshard, like),
        )
        read = checkpointer.restore(tmp_path / "saved", whole)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh(8), spec), specs)
    found = jax.jit(lambda tree: shard_like(tree, like), out_shardings=shardings)(read)
    for a, b in zip(
        jax.tree.leaves(unshard(found)), jax.tree.leaves(unshard((params, state))), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_whole_parameters_in_half_precision_of_shards_in_full():
    optimizer = sharded_optimizer(OPTIMIZERS["adam"], "x")
    carry, specs = start(optimizer, 3, N)
    f = jax.jit(program(optimizer, 3, N, specs, dtype=jnp.bfloat16))
    (params, _), losses = f(carry, DATA)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    wanted = plain_losses("adam", False)
    assert not np.array_equal(losses, wanted)
    np.testing.assert_allclose(losses, wanted, rtol=0.03)


# Accumulation.


def accumulated(scatter, microbatches=4, **how):
    """The gradients of a batch on each rank, cut like the parameters or whole."""
    step = accumulate_gradients(
        loss, microbatches, axis_name="x", algorithm="ring", scatter=scatter, **how
    )
    params = jax.tree.map(jnp.asarray, PARAMS)
    specs = shard_specs(shard_params(params, N), "x") if scatter else P()
    return jax.shard_map(
        functools.partial(step, params),
        mesh=mesh(N),
        in_specs=P("x"),
        out_specs=(P(), specs),
    )


@pytest.mark.slow
@pytest.mark.parametrize("scatter", ["once", "each"])
def test_accumulated_gradients_are_scattered(scatter):
    value, grads = jax.jit(accumulated(scatter))(DATA[0])
    expected, wanted = jax.value_and_grad(loss)(PARAMS, DATA[0])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    grads = unshard(grads)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    hlo = compiled(accumulated(scatter), sharded(mesh(N), P("x"), DATA[0].shape))
    entry = hlo.text[hlo.text.index("\nENTRY") :].count(" collective-permute(")
    # The loss goes by itself, by 2(N-1) steps; "each" scatters in the body of the loop.
    assert len(hlo.permutes) == 3 * (N - 1)
    assert entry == {"once": 3, "each": 2}[scatter] * (N - 1)
    assert not hlo.other_collectives


@pytest.mark.slow
def test_scattered_sums_of_ranks_with_other_weights():
    counts = jnp.array([3.0, 0.0, 1.0, 2.0])

    def weighted(w, batch):
        return jnp.where(batch["n"] > 0, (w * batch["x"]).sum(), jnp.nan), batch["n"].sum()

    batch = {"x": jnp.arange(16.0).reshape(8, 2), "n": jnp.repeat(counts, 2)}
    wanted = (batch["n"][:, None] * batch["x"]).sum(0) / batch["n"].sum()
    for scatter in ("once", "each"):
        step = accumulate_gradients(
            lambda w, b: weighted(w, jax.tree.map(lambda leaf: leaf[0], b)),
            2,
            axis_name="x",
            weighted=True,
            scatter=scatter,
        )
        f = jax.shard_map(
            lambda b, step=step: step(jnp.ones(2), b)[1].value,
            mesh=mesh(N),
            in_specs=P("x"),
            out_specs=P("x"),
        )
        np.testing.assert_allclose(jax.jit(f)(batch)[:2], wanted, rtol=1e-6)


@pytest.mark.slow
def test_parameters_that_are_shards_are_accumulated_without_an_axis():
    shards = shard_params(PARAMS, N)
    specs = shard_specs(shards, "x")

    def at(shards, x):
        return loss(gather_params(shards, "x"), x)

    def run(**how):
        step = accumulate_gradients(at, 2, **how)
        f = lambda p, x: step(p, x)[1]  # noqa: E731
        mapped = jax.shard_map(f, mesh=mesh(N), in_specs=(specs, P("x")), out_specs=specs)
        return jax.jit(mapped)(shards, DATA[0])

    with pytest.raises(ValueError, match=r"accumulate_gradients: leaf \['b'\] is a Shard"):
        run(axis_name="x")
    found, wanted = unshard(run()), jax.grad(loss)(PARAMS, DATA[0])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# Norms and errors.


def test_the_norm_is_that_of_the_whole():
    tree = {"w": RANDOM.standard_normal((N, 5, 3)).astype(np.float32), "s": np.ones(N, np.float32)}

    def f(grads):
        shards = scatter_gradients({"w": grads["w"]}, "x")
        return global_norm(shards | {"same": jax_ring.pmean(grads["s"], "x")}, "x")

    wanted = np.sqrt((tree["w"].mean(0).astype(np.float64) ** 2).sum() + 1)
    np.testing.assert_allclose(per_rank(f, N, tree), np.full(N, wanted), rtol=1e-6)
    with pytest.raises(ValueError, match=r"global_norm: leaf \['s'\] is no Shard, .* varies over"):
        per_rank(lambda grads: global_norm(grads, "x"), N, tree)


def test_errors():
    with pytest.raises(ValueError, match="max_norm must be more than 0, got -1"):
        clip_by_global_norm(-1, "x")
    with pytest.raises(
        ValueError, match="scatter must be None, 'once' or 'each', .* got scatter='all'"
    ):
        accumulate_gradients(loss, 2, axis_name="x", scatter="all")
    with pytest.raises(ValueError, match="with an axis_name, got scatter='each', axis_name=None"):
        accumulate_gradients(loss, 2, scatter="each")
    factored = sharded_optimizer(optax.adafactor(0.1, min_dim_size_to_factor=2), "x")
    with pytest.raises(ValueError, match=r"must work element by element, .* is of shape \(\d,?\)"):
        factored.init(shard_params(PARAMS, N))
    optimizer = sharded_optimizer(optax.adam(0.1), "x")

    def summed(x):
        grads = jax.grad(lambda w: (w * x).sum())(jnp.ones(3))
        return optimizer.update(grads, optimizer.init(jnp.ones(3)), jnp.ones(3))[0]

    with pytest.raises(ValueError, match="scatter_gradients: leaf .* must vary over 'x'"):
        per_rank(summed, N, np.ones((N, 3), np.float32))
