"""Error feedback: what many steps lose is what the residual holds, wherever that is carried."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from harness import mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import error_feedback, wire

N = 4


def gradients(steps, ranks=N, seed=0):
    """A tree of arrays [steps, ranks, ...], different on each rank and in each step."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (65,), "b": (3, 7)}
    drawn = {k: rng.standard_normal((steps, ranks, *shape)) for k, shape in shapes.items()}
    return {k: (v + 0.3).astype(np.float32) for k, v in drawn.items()}


def over_steps(name, algorithm="auto", mean=True):
    """A compiled program: the results of all steps, and the residuals after the last."""

    def step(residual, x):
        reduce = error_feedback.pmean if mean else error_feedback.psum
        total, residual = reduce(x, residual, "x", wire=name, algorithm=algorithm)
        return residual, total

    def one_rank(x, residual):
        residual, totals = jax.lax.scan(step, residual, x)
        return totals, residual

    return jax.jit(jax.vmap(one_rank, in_axes=(1, 0), axis_name="x", out_axes=(None, 0)))


def zeros_like(x):
    return error_feedback.init(jax.tree.map(lambda leaf: leaf[0], x))


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("int8", "direct"),
        ("int4", "ring"),
        pytest.param("bfloat16", "direct", marks=pytest.mark.slow),
        pytest.param("float8_e5m2", "ring", marks=pytest.mark.slow),
    ],
)
def test_what_all_steps_lack_is_the_mean_of_the_residuals(name, algorithm):
    x = gradients(20)
    means, residual = over_steps(name, algorithm)(x, zeros_like(x))
    for leaf, exact in x.items():
        total = np.asarray(means[leaf], np.float64).sum(0) + np.asarray(residual[leaf]).mean(0)
        np.testing.assert_allclose(total, exact.astype(np.float64).mean(1).sum(0), atol=1e-4)


def test_sums_lack_the_sum_of_the_residuals():
    x = gradients(5)
    sums, residual = over_steps("int8", mean=False)(x, zeros_like(x))
    for leaf, exact in x.items():
        total = np.asarray(sums[leaf], np.float64).sum(0) + np.asarray(residual[leaf]).sum(0)
        np.testing.assert_allclose(total, exact.astype(np.float64).sum((0, 1)), atol=1e-3)


@pytest.mark.parametrize("name", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_error_of_many_steps_is_that_of_one(name):
    steps = 100
    x = jax.tree.map(lambda leaf: np.repeat(leaf, steps, 0), gradients(1))
    means, _ = over_steps(name)(x, zeros_like(x))
    alone = jax.jit(jax.vmap(lambda v: jax_ring.pmean(v, "x", wire=name), axis_name="x"))

    def error(totals, leaf):
        return np.abs(np.asarray(totals, np.float64) - x[leaf].astype(np.float64).mean(1).sum(0))

    without = alone(jax.tree.map(lambda leaf: leaf[0], x))
    for leaf in x:
        of_one = error(means[leaf][:1].sum(0) * steps, leaf).max() / steps
        kept = error(np.asarray(means[leaf], np.float64).sum(0), leaf).max()
        grown = error(steps * np.asarray(without[leaf][0], np.float64), leaf).max()
        assert kept < 5 * of_one < grown / 5


def test_a_step_of_zeros_first_then_data():
    x = gradients(10)
    for leaf in x.values():
        leaf[0] = 0
    means, residual = over_steps("int4")(x, zeros_like(x))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((means, residual)))
    assert all((leaf[0] == 0).all() for leaf in means.values())


def test_a_bad_step_does_not_stay():
    x = gradients(8)
    x["a"][3, 2, 7] = np.nan
    x["b"][3, 3, 1, 1] = np.inf
    means, residual = over_steps("int8")(x, zeros_like(x))
    assert np.isnan(means["a"][3]).any()
    assert not np.isfinite(means["b"][3]).all()
    later = jax.tree.map(lambda leaf: leaf[4:], means)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((later, residual)))


# --- where a residual may go ----------------------------------------------------------------------


def on_mesh(ranks, name="int4"):
    def step(x, residual):
        rows = jax.tree.map(lambda v: v[0], (x, residual))
        mean, residual = error_feedback.pmean(*rows, "x", wire=name)
        return mean, jax.tree.map(lambda v: v[None], residual)

    m = mesh(ranks)
    f = jax.shard_map(step, mesh=m, in_specs=P("x"), out_specs=(P(), P("x")))
    return jax.jit(f), NamedSharding(m, P("x"))


@pytest.mark.parametrize("kind", ["orbax", "npz"])
def test_a_checkpoint_goes_on_as_if_nothing_had_been(tmp_path, kind):
    step, sharding = on_mesh(N)
    x = gradients(4)
    parts = [jax.tree.map(lambda leaf, i=i: jax.device_put(leaf[i], sharding), x) for i in range(4)]
    residual = jax.device_put(zeros_like(x), sharding)
    for part in parts[:2]:
        _, residual = step(part, residual)
    restored = through(kind, tmp_path, residual)
    for part in parts[2:]:
        want, residual = step(part, residual)
        got, restored = step(part, restored)
        jax.tree.map(np.testing.assert_array_equal, (got, restored), (want, residual))


def through(kind, folder, residual):
    if kind == "npz":
        np.savez(folder / "residual.npz", **residual)
        with np.load(folder / "residual.npz") as stored:
            return {name: jnp.asarray(stored[name]) for name in stored}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "residual", residual)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(folder / "residual", residual)
    return restored


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_another_number_of_ranks(ranks):
    """The identity holds over both parts of a run."""
    before, after = gradients(5), gradients(5, ranks, seed=1)
    first, residual = over_steps("int4")(before, zeros_like(before))
    fewer = error_feedback.redistribute(residual, ranks)
    then, residual = over_steps("int4")(after, fewer)
    for leaf in before:
        got = sum(np.asarray(part[leaf], np.float64).sum(0) for part in (first, then))
        exact = sum(part[leaf].astype(np.float64).mean(1).sum(0) for part in (before, after))
        lacking = np.asarray(residual[leaf], np.float64).mean(0)
        np.testing.assert_allclose(got + lacking, exact, atol=1e-4)


@pytest.mark.slow
def test_leaves_are_kept_apart():
    """What a leaf loses does not depend on what else is in the tree."""
    x = gradients(3)
    _, together = over_steps("int8")(x, zeros_like(x))
    for name, leaf in x.items():
        _, alone = over_steps("int8")({name: leaf}, zeros_like({name: leaf}))
        np.testing.assert_array_equal(alone[name], together[name])


def test_narrow_leaves_keep_wide_residuals():
    x = np.ones((N, 40), jnp.bfloat16)
    f = jax.jit(jax.vmap(lambda v, e: error_feedback.psum(v, e, "x", wire="int8"), axis_name="x"))
    total, residual = f(x, error_feedback.init(x))
    assert (total.dtype, residual.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_format_that_rounds_at_random():
    x = gradients(1)["a"][0]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None), axis_name="x")
    def f(v, e, key):
        form = wire.Blocks("int4", key=key)
        return error_feedback.pmean(v, e, "x", wire=form)

    mean, residual = f(x, error_feedback.init(x), jax.random.key(0))
    got = np.asarray(mean[0], np.float64) + np.asarray(residual).mean(0)
    np.testing.assert_allclose(got, x.astype(np.float64).mean(0), atol=1e-5)


# --- errors ---------------------------------------------------------------------------------------

ONES = np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("x", "residual", "how", "error", "message"),
    [
        (ONES, ONES, {"wire": None}, ValueError, "psum: wire must be a format, got None"),
        ({"a": ONES}, {"b": ONES}, {}, ValueError, "residual must be a tree like x"),
        (ONES, ONES[:, :5], {}, ValueError, r"leaf of shape \(5,\), where x has \(6,\)"),
        ({"a": ONES, "n": ONES.astype(int)}, {"a": ONES, "n": ONES}, {}, TypeError, "real floats"),
        ({}, {}, {}, ValueError, "x has no leaves"),
        (ONES, ONES, {"algorithm": "recursive_doubling"}, ValueError, "'direct' and 'ring' do not"),
    ],
)
def test_bad_calls(x, residual, how, error, message):
    def f(_, x, residual):
        return error_feedback.psum(x, residual, "x", **{"wire": "int8", **how})

    with pytest.raises(error, match=message):
        jax.vmap(f, axis_name="x")(ONES, x, residual)


def test_bad_redistribution():
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        error_feedback.redistribute(ONES, 0)
