import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled, integers, mesh, mixed_leaves, per_rank, same_bits, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import (
    gather_params,
    plan_buckets,
    save_all_but_gathered,
    scatter_gradients,
    shard_params,
    shard_specs,
    sync_gradients,
    unshard,
)
from jax_ring.gradients.sharded import own_shards

N = 4


def tree(ranks=N):
    return mixed_leaves(ranks) | {"even": integers((ranks, 2, 8), np.float32, seed=3)}


def joined(shards):
    """The whole leaves of what `per_rank` returns for a tree of shards: the ranks' parts."""

    def join(node):
        parts = [np.asarray(part) for part in node.value]
        return node.split.trim(jnp.concatenate(parts, node.split.dimension))

    return jax.tree.map(join, shards, is_leaf=lambda node: hasattr(node, "split"))


@pytest.mark.parametrize(
    ("op", "check_vma"),
    [
        ("mean", True),
        pytest.param("sum", False, marks=pytest.mark.slow),
        pytest.param("max", True, marks=pytest.mark.slow),
    ],
)
def test_each_rank_has_its_part_of_what_sync_gradients_gives(op, check_vma):
    x, hows = tree(), ((64, False), (64, True), (10**9, False))

    def f(v):
        parts = [
            scatter_gradients(v, "x", bucket_bytes=limit, op=op, in_order=in_order)
            for limit, in_order in hows
        ]
        return sync_gradients(v, "x", op=op), parts

    whole, found = per_rank(f, N, x, check_vma=check_vma)
    for parts in found:
        wanted = jax.tree.map(lambda leaf: leaf[0], whole)
        assert jax.tree.all(jax.tree.map(same_bits, joined(parts), wanted))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 10**9])
def test_what_is_gathered_is_whole_and_its_gradient_a_shard(limit):
    params = {"w": jnp.arange(15.0).reshape(3, 5), "b": jnp.arange(8.0), "n": jnp.arange(3)}
    shards = shard_params(params, N)
    specs = shard_specs(shards, "x")
    x = integers((N, 3, 5), np.float32)

    def f(shards, x, limit):
        def loss(floats):
            p = gather_params(floats | {"n": shards["n"]}, "x", bucket_bytes=limit)
            return (p["w"] * x).sum() + p["b"].sum() * x[0, 0, 0] + p["n"].sum(), p

        grads, p = jax.grad(loss, has_aux=True)({"w": shards["w"], "b": shards["b"]})
        return grads, jax.tree.map(lambda leaf: leaf[None], p)

    grad_specs = {"w": specs["w"], "b": specs["b"]}
    mapped = jax.shard_map(
        functools.partial(f, limit=limit),
        mesh=mesh(N),
        in_specs=(specs, P("x")),
        out_specs=(grad_specs, P("x")),
    )
    grads, whole = jax.jit(mapped)(shards, x)
    for name, leaf in params.items():
        assert all(same_bits(row, leaf) for row in np.asarray(whole[name]))
    grads = unshard(grads)
    assert same_bits(grads["w"], x.mean(0))
    assert same_bits(grads["b"], np.full(8, x[:, 0, 0].mean()))


@pytest.mark.slow
def test_ranks_over_two_axes_are_numbered_as_the_specs_lay_them_out():
    m, axes = mesh(2, 4), ("y", "x")
    params = {"w": jnp.arange(40.0).reshape(8, 5), "b": jnp.arange(11)}
    shards = shard_params(params, 8)
    specs = shard_specs(shards, axes)

    def f(shards, params):
        whole = gather_params(shards, axes)
        return own_shards(params, axes), jax.tree.map(lambda leaf: leaf[None], whole)

    mapped = jax.shard_map(f, mesh=m, in_specs=(specs, P()), out_specs=(specs, P(axes)))
    own, whole = jax.jit(mapped)(shards, params)
    assert jax.tree.all(jax.tree.map(same_bits, own, shards))
    for name, leaf in params.items():
        assert all(same_bits(row, leaf) for row in np.asarray(whole[name]))


def stacked(layers, width, ranks):
    """Shapes of sharded layers and of a batch."""
    m = mesh(ranks)
    stack = jax.eval_shape(
        lambda w: shard_params(w, ranks, stacked=True),
        jax.ShapeDtypeStruct((layers, width, width), np.float32),
    )
    specs = shard_specs(stack, "x")
    args = jax.tree.map(lambda v, s: sharded(m, s, v.shape), stack, specs)
    return m, specs, args, sharded(m, P("x"), (ranks * 4, width))


def deep_gradients(stack, x, remat=None, **how):
    def layer(y, w):
        return jnp.tanh(y @ gather_params(w, "x", **how)), None

    def loss(stack):
        return (lax.scan(remat(layer) if remat else layer, x, stack)[0] ** 2).sum()

    return jax.grad(loss)(stack)


REMATS = {
    "all": jax.checkpoint,
    "parameters": functools.partial(jax.checkpoint, policy=save_all_but_gathered),
}


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["parameters", "all"])
def test_layers_are_gathered_twice_and_never_kept(remat):
    layers, width, ranks = 24, 64, 8
    m, specs, stack, x = stacked(layers, width, ranks)
    how = {"algorithm": "ring", "gather_algorithm": "ring"}
    layer_bytes = width * width * 4

    def program(remat):
        f = functools.partial(deep_gradients, remat=remat, **how)
        mapped = jax.shard_map(f, mesh=m, in_specs=(specs, P("x")), out_specs=specs)
        return compiled(mapped, stack, x)

    hlo = program(REMATS[remat])
    # Gathered in forward, again in backward, and scattered: each in the body of a loop.
    assert [elements for _, elements in hlo.permutes] == [width * width // ranks] * 3 * (ranks - 1)
    assert not hlo.other_collectives
    entry = hlo.text[hlo.text.index("\nENTRY") :]
    assert " collective-permute(" not in entry
    kept = program(None)
    assert len(kept.permutes) == 2 * (ranks - 1)
    assert kept.memory.temp_size_in_bytes > layers * layer_bytes
    activations = layers * x.shape[0] // ranks * width * 4
    assert hlo.memory.temp_size_in_bytes < 4 * layer_bytes + 4 * activations
    assert hlo.memory.temp_size_in_bytes < kept.memory.temp_size_in_bytes / 3
    # What enters and leaves is this rank's part.
    assert hlo.memory.output_size_in_bytes == layers * layer_bytes // ranks
    # The policy redoes no product of forward.
    products = {"parameters": 3, "all": 4}[remat]
    assert hlo.counts["dot"] == products


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True])
def test_gradients_of_gathered_layers_are_those_of_the_whole(explicit):
    random = np.random.default_rng(0)
    whole = {"w": random.standard_normal((5, 6, 6)).astype(np.float32) / 4, "s": np.ones(5)}
    x = random.standard_normal((N * 3, 6)).astype(np.float32)
    m = mesh(N, explicit=explicit)

    def loss(stack, x, use=lambda w: w):
        def layer(y, w):
            w = use(w)
            return jnp.tanh(y @ w["w"]) * w["s"].astype(y.dtype), None

        return (lax.scan(layer, x, stack)[0] ** 2).mean()

    def f(stack, x):
        use = functools.partial(gather_params, axis_name="x", bucket_bytes=64)
        return jax.grad(jax.checkpoint(functools.partial(loss, use=use)))(stack, x)

    shards = shard_params(whole, N, stacked=True)
    specs = shard_specs(shards, "x")
    shards = jax.device_put(shards, jax.tree.map(lambda s: NamedSharding(m, s), specs))
    mapped = jax.jit(jax.shard_map(f, mesh=m, in_specs=(specs, P("x")), out_specs=specs))
    found = unshard(mapped(shards, jax.device_put(x, NamedSharding(m, P("x")))))
    for name, wanted in jax.grad(loss)(jax.tree.map(jnp.asarray, whole), x).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


# Programs.


@pytest.mark.slow
def test_one_reduce_scatter_a_bucket_and_half_the_bytes():
    shapes = [(64,), (128,), (32, 4), (80,)]
    plan = plan_buckets([jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], 4 * 208)
    args = [sharded(mesh(8), P("x"), (8 * shape[0], *shape[1:])) for shape in shapes]
    how = {"bucket_bytes": 4 * 208, "algorithm": "ring"}

    def f(*grads):
        return [shard.value for shard in scatter_gradients(list(grads), "x", **how)]

    hlo = compiled(jax.shard_map(f, mesh=mesh(8), in_specs=P("x"), out_specs=P("x")), *args)
    sizes = [bucket.nbytes // 4 // 8 for bucket in plan.buckets for _ in range(7)]
    assert sorted(elements for _, elements in hlo.permutes) == sorted(sizes)
    assert not hlo.other_collectives


def test_a_leaf_with_a_bucket_to_itself_is_not_copied():
    f = lambda g: scatter_gradients(g, "x", algorithm="ring").value  # noqa: E731
    mapped = jax.shard_map(f, mesh=mesh(8), in_specs=P("x"), out_specs=P("x"))
    assert not compiled(mapped, sharded(mesh(8), P("x"), (8 * 800,))).copies_of(800)


@pytest.mark.slow
def test_wires_and_the_compute_dtype_are_what_travels():
    m, specs, stack, x = stacked(3, 16, N)

    def permutes(**how):
        f = functools.partial(deep_gradients, algorithm="ring", gather_algorithm="ring", **how)
        mapped = jax.shard_map(f, mesh=m, in_specs=(specs, P("x")), out_specs=specs)
        kinds = [kind for kind, _ in compiled(mapped, stack, x).permutes]
        return kinds[: N - 1], kinds[N - 1 :]

    forward, backward = permutes(dtype=jnp.bfloat16, wire="bfloat16")
    # As bits, for a backend may widen bfloat16.
    assert set(forward) == set(backward) == {"u16"}
    forward, backward = permutes(gather_wire="int8")
    assert set(backward) == {"f32"}
    assert "f32" not in forward


@pytest.mark.slow
def test_manual_over_data_alone_gathers_nothing_else():
    m = mesh(4, 2)

    def f(shards):
        how = {"algorithm": "ring", "gather_algorithm": "ring"}
        return jax.grad(lambda s: (gather_params(s, "x", **how) ** 2).sum())(shards)

    # Cut over x along the first dimension, and by the compiler over y along the other.
    shards = jax.eval_shape(lambda w: shard_params(w, 4), jax.ShapeDtypeStruct((32, 6), np.float32))
    specs = shard_specs(shards, "x")
    mapped = jax.shard_map(f, mesh=m, in_specs=(specs,), out_specs=specs, axis_names={"x"})
    args = jax.tree.map(lambda v: sharded(m, P("x", "y"), v.shape), shards)
    hlo = compiled(mapped, args)
    assert hlo.permutes
    assert not hlo.other_collectives
    assert {elements for _, elements in hlo.permutes} == {32 // 4 * 6 // 2}


# Errors.


def test_errors():
    x = np.ones((N, 8), np.float32)

    def run(f):
        return per_rank(f, N, x)

    with pytest.raises(ValueError, match=r"scatter_gradients: leaf \['w'\] of grads must vary"):
        run(lambda v: scatter_gradients({"w": jnp.ones(3)}, "x")["w"].value)
    with pytest.raises(TypeError, match=r"leaf \['w'\] must be a Shard, .* got Dynamic"):
        run(lambda v: gather_params({"w": jnp.ones(3)}, "x"))

    for again in (sync_gradients, scatter_gradients):
        with pytest.raises(ValueError, match=r"leaf \['w'\] is a Shard, which is reduced over"):
            run(lambda v, again=again: again({"w": scatter_gradients(v, "x")}, "x"))
    like = shard_params({"w": jnp.ones(8)}, N)
    with pytest.raises(ValueError, match="grads must be a tree like the shards of the parameters"):
        run(lambda v: scatter_gradients({"v": v}, "x", like=like))
    with pytest.raises(ValueError, match=r"leaf \['w'\] of grads must be of the shape \(8,\)"):
        run(lambda v: scatter_gradients({"w": v[:4]}, "x", like=like))
