import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled, mesh, same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import data_parallel

SPECS = {"up": P(None, "model"), "down": P("model", None)}


def loss(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["up"])
    # Where "model" is explicit, what a sum over it becomes has to be said.
    explicit = jax.typeof(params["up"]).sharding.spec == SPECS["up"]
    return (
        (jnp.dot(hidden, params["down"], out_sharding=P() if explicit else None) - y) ** 2
    ).mean()


def data():
    random = np.random.default_rng(0)
    params = {
        "up": random.standard_normal((6, 16)).astype(np.float32),
        "down": random.standard_normal((16, 2)).astype(np.float32),
    }
    batch = [random.standard_normal((16, n)).astype(np.float32) for n in (6, 2)]
    return params, tuple(batch)


def placed(m, params, batch):
    shardings = {name: NamedSharding(m, spec) for name, spec in SPECS.items()}
    return jax.device_put(params, shardings), jax.device_put(batch, NamedSharding(m, P("data")))


def mesh_of(explicit):
    return jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType[explicit],) * 2)


def spans_data(group):
    """Whether some of these devices are of different rows of the mesh [data, model]."""
    return len({device // 2 for device in group}) > 1


@pytest.mark.parametrize("explicit", ["Auto", "Explicit"])
@pytest.mark.parametrize("parts", [1, 2])
def test_model_axis_stays_with_the_compiler(explicit, parts):
    m = mesh_of(explicit)
    params, batch = data()
    with jax.set_mesh(m):
        step = data_parallel(loss, m, microbatches=parts, algorithm="ring")
        on_mesh = placed(m, params, batch)
        value, grads = jax.jit(step)(*on_mesh)
        hlo = compiled(step, *on_mesh)
    expected, wanted = jax.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(grads[name], wanted[name], rtol=1e-5, atol=1e-6)
        assert grads[name].sharding.spec == SPECS[name]
    # The compiler still sums over "model" in the forward pass, and over "data" nothing.
    groups = hlo.groups("all-reduce")
    assert groups
    assert not any(spans_data(group) for found in groups for group in found)
    # One ring of four ranks for the loss and for each gradient; more would be a second reduction.
    assert len(hlo.permutes) == 3 * 2 * (4 - 1)


def test_the_compilers_own_form_does_reduce_over_data():
    """What the test above looks for is found where it is."""
    hlo = compiled(jax.value_and_grad(loss), *placed(mesh_of("Auto"), *data()))
    assert any(spans_data(group) for found in hlo.groups("all-reduce") for group in found)


def test_mesh_in_force_is_taken_and_two_axes_are_ranks():
    m = mesh(2, 4, names=("a", "b"))
    params, batch = data()
    with jax.set_mesh(m):
        value, grads = jax.jit(data_parallel(loss, axis_name=("a", "b")))(params, batch)
    expected, wanted = jax.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grads["up"], wanted["up"], rtol=1e-5, atol=1e-6)


def test_ranks_of_other_weights():
    def masked(params, batch):
        x, y, counts = batch
        errors = ((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2).mean(1)
        return (errors * counts).sum() / counts.sum(), counts.sum()

    params, (x, y) = data()
    counts = np.array([1, 0, 1, 1, 0, 0, 0, 0] * 2, np.float32)
    step = jax.jit(data_parallel(masked, mesh(4), "x", weighted=True))
    np.testing.assert_allclose(
        step(params, (x, y, counts))[0], masked(params, (x, y, counts))[0], rtol=1e-6
    )


def test_wire_and_buckets_are_passed_on():
    params, batch = data()
    step = data_parallel(loss, mesh(4), "x", algorithm="ring", wire="bfloat16", bucket_bytes=2**20)
    # The loss, one element of which a message is, travels exactly.
    assert {kind for kind, size in compiled(step, params, batch).permutes if size > 1} == {"u16"}
    step = data_parallel(loss, mesh(4), "x", algorithm="ring")
    # The loss, both gradients and the weight are one bucket.
    assert len(compiled(step, params, batch).permutes) == 2 * (4 - 1)


def test_what_is_closed_over_is_the_same_on_all_ranks():
    params, batch = data()

    @jax.jit
    def step(params, batch, scale):
        return data_parallel(lambda p, b: scale * loss(p, b), mesh(4), "x")(params, batch)

    doubled = step(params, batch, 2.0)[1]["up"]
    assert same_bits(doubled, 2 * np.asarray(step(params, batch, 1.0)[1]["up"]))


@pytest.mark.parametrize("axis", ["data", (), ("x", "data")])
def test_unknown_axis_is_named(axis):
    with pytest.raises(
        ValueError, match=r"axis_name must name axes of the mesh, which are \('x',\)"
    ):
        data_parallel(loss, mesh(4), axis)


def test_gradients_in_parts_are_for_a_shard_map():
    with pytest.raises(ValueError, match="scatter must not be given, .* got 'once'"):
        data_parallel(loss, mesh(4), "x", scatter="once")


def test_no_mesh_says_what_to_do():
    with pytest.raises(ValueError, match=r"pass mesh, or call it under jax\.set_mesh"):
        data_parallel(loss)
