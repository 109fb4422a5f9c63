"""PowerSGD against its algorithm in float64, and what it sends from the compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled, integers, mesh, over_steps, same_bits, sharded
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import one_bit, powersgd, state_specs, sync_gradients

N = 4


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference(grads, q):
    """Algorithms 1 and 2 of the paper, [steps, ranks, n, m] in float64: results and errors."""
    grads, q = grads.astype(np.float64), np.asarray(q, np.float64)
    error, results = np.zeros(grads.shape[1:]), []
    for g in grads:
        m = g + error
        p = np.linalg.qr((m @ q).mean(0))[0]
        own = np.swapaxes(m, 1, 2) @ p
        q = own.mean(0)
        error = m - p @ np.swapaxes(own, 1, 2)
        results.append(p @ q.T)
    return np.array(results), error


@pytest.mark.parametrize("rank", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_are_those_of_the_paper(rank):
    grads = normal(6, N, 12, 9)
    compress = powersgd("x", rank)
    results, state = over_steps(compress, grads)
    wanted, error = reference(grads, compress.init(grads[0, 0]).basis)
    np.testing.assert_allclose(results[:, 0], wanted, atol=2e-4)
    np.testing.assert_allclose(state.error, error, atol=2e-4)
    assert all(same_bits(results[:, 0], results[:, r]) for r in range(N))
    assert all(same_bits(state.basis[0], state.basis[r]) for r in range(N))
    assert (np.linalg.matrix_rank(results[:, 0], tol=1e-4) == rank).all()


@pytest.mark.slow
def test_a_leaf_of_more_dimensions_is_one_matrix():
    grads = normal(2, N, 3, 3, 8, 10)
    compress = powersgd("x", 2)
    basis = compress.init(grads[0, 0]).basis
    assert basis.shape == (10, 2)  # 72 + 10 is less than 9 + 80.
    results, _ = over_steps(compress, grads)
    wanted, _ = reference(grads.reshape(2, N, 72, 10), basis)
    np.testing.assert_allclose(results[:, 0].reshape(2, 72, 10), wanted, atol=2e-4)


def test_small_leaves_and_integers_are_exact_and_errors_hold_what_the_rest_lacks():
    grads = {
        "w": normal(5, N, 16, 12).astype(jnp.bfloat16),
        "bias": integers((5, N, 7), np.float32),
        "square": integers((5, N, 4, 4), np.float32),  # Two columns would be as many numbers.
        "count": integers((5, N, 8, 8), np.int32),
        "none": None,
    }
    results, state = over_steps(powersgd("x", 2), grads)
    assert [state.error[k] is None for k in grads] == [False, True, True, True, True]
    for name in ("bias", "square", "count"):
        assert same_bits(results[name][:, 0], grads[name].mean(1, dtype=np.float32)), name
    assert (results["w"].dtype, state.error["w"].dtype) == (jnp.bfloat16, jnp.float32)
    total = np.asarray(results["w"], np.float64)[:, 0].sum(0) + np.asarray(state.error["w"]).mean(0)
    exact = grads["w"].astype(np.float64).mean(1).sum(0)
    np.testing.assert_allclose(total, exact, atol=1e-4)


def test_the_warm_up_is_exact():
    grads = integers((5, N, 8, 8), np.float32)
    results, state = over_steps(powersgd("x", 1, warmup_steps=3), grads)
    mean = grads.mean(1)
    equal = [same_bits(result[0], exact) for result, exact in zip(results, mean, strict=True)]
    assert equal == [True, True, True, False, False]
    assert state.step.tolist() == [5] * N
    alone, _ = over_steps(powersgd("x", 1), grads[3:])
    np.testing.assert_allclose(results[3:, 0], alone[:, 0], atol=1e-5)


def descend(compress, noise, target, keep):
    """Gradient descent to the target, beside which each step's gradient has large noise."""

    def step(carry, factor):
        w, state = carry
        g, new = compress.update(w - target + factor * noise, state)
        kept = new if keep else new._replace(error=jnp.zeros_like(new.error))
        return (w - 0.02 * g, kept), None

    def one_rank(_):
        start = jnp.zeros_like(target), compress.init(target)
        return jax.lax.scan(step, start, jnp.resize(jnp.array([3.0, -3.0]), 400))[0][0]

    return jax.jit(jax.vmap(one_rank, axis_name="x"))(jnp.zeros(2))[0]


@pytest.mark.slow
def test_without_error_feedback_noise_hides_what_is_to_be_learned():
    noise, target = np.zeros((2, 8, 8), np.float32)
    noise[0, 0], target[1, 1] = 1, 1
    lacking = {
        keep: abs(descend(powersgd("x", 1), noise, target, keep)[1, 1] - 1)
        for keep in (True, False)
    }
    assert lacking[False] > 0.9
    assert lacking[True] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_step_is_seen_by_all_and_does_not_stay(bad):
    grads = normal(4, N, 8, 6)
    grads[1, 2, 3, 4] = bad
    results, state = over_steps(powersgd("x", 1), grads)
    finite = np.isfinite(results).all((2, 3))
    assert finite.tolist() == [[True] * N, [False] * N, [True] * N, [True] * N]
    good, wanted = over_steps(powersgd("x", 1), grads[[0, 2, 3]])
    assert same_bits(results[2:], good[1:])
    assert same_bits(state.error, wanted.error)


@pytest.mark.slow
def test_gradients_of_zeros_leave_the_start_as_it_was():
    grads = np.zeros((2, N, 8, 6), np.float32)
    compress = powersgd("x", 2)
    results, state = over_steps(compress, grads)
    assert not np.any(results)
    assert same_bits(state.basis[0], compress.init(grads[0, 0]).basis)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_neither_tiny_nor_huge_gradients_leave_the_range(size):
    grads = normal(6, N, 12, 9)
    results, _ = over_steps(powersgd("x", 1), grads * np.float32(size))
    wanted, _ = over_steps(powersgd("x", 1), grads)
    np.testing.assert_allclose(np.asarray(results) / size, wanted, atol=1e-3)


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bytes_are_those_of_two_thin_factors(rank):
    m, compress = mesh(N), powersgd("x", rank, algorithm="direct")
    shapes = {"w": (64, 32), "b": (32,)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    state = jax.eval_shape(compress.init, params)
    specs = state_specs(state, "x")
    f = jax.shard_map(compress.update, mesh=m, in_specs=(P("x"), specs), out_specs=(P(), specs))
    grads = {k: sharded(m, P("x"), (N * v[0], *v[1:])) for k, v in shapes.items()}
    rows = state.error["w"].shape[0]
    errors = {"w": sharded(m, P("x"), (N * rows, 32)), "b": None}
    hlo = compiled(f, grads, state._replace(error=errors))
    assert not hlo.other_collectives
    assert {kind for kind, _ in hlo.permutes} == {"f32"}
    # P with the bias, and Q: each goes around by 2 (N - 1) / N.
    numbers = (64 * rank + 32) + 32 * rank
    assert sum(n for _, n in hlo.permutes) == 2 * (N - 1) * numbers // N
    assert len(hlo.permutes) == 2 * 2 * (N - 1)


def test_errors():
    for how, message in (
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"min_compression": 0.5}, "min_compression must be at least 1, got 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            powersgd("x", **how)
    with pytest.raises(TypeError, match=r"rank must be an integer, got 1\.5"):
        powersgd("x", 1.5)
    compress, grads = powersgd("x", 1), np.ones((N, 8, 6), np.float32)
    state = compress.init(np.ones((6, 8)))
    update = jax.vmap(functools.partial(compress.update, state=state), axis_name="x")
    with pytest.raises(
        ValueError, match=r"state.error must have the shape \(8, 6\), .*, got \(6, 8"
    ):
        update(grads)
    with pytest.raises(
        ValueError, match=r"state.error\['w'\] must have .* \(8, 6\), .*, got nothing"
    ):
        update({"w": grads})


def test_a_state_of_other_settings_is_refused():
    grads = np.ones((N, 8, 6), np.float32)
    for state, message in (
        (powersgd("x", 2, min_compression=1).init(grads[0]), r"basis .*\(6, 1\), .*, got \(6, 2\)"),
        (one_bit("x", 0).init(grads[0]), r"error .*\(8, 6\), .*, got None"),
    ):
        update = jax.vmap(functools.partial(powersgd("x", 1).update, state=state), axis_name="x")
        with pytest.raises(ValueError, match=message):
            update(grads)
    state = powersgd("x", 1).init(grads[0])
    update = functools.partial(one_bit("x", 0, exact_below=1).update, state=state)
    with pytest.raises(ValueError, match=r"basis must have the shape None, .*, got \(6, 1\)"):
        jax.vmap(update, axis_name="x")(grads)


@pytest.mark.slow
def test_what_is_summed_already_is_refused():
    compress = powersgd("x", 1)

    def f(w):
        return compress.update(w, compress.init(w))[0]

    g = jax.shard_map(f, mesh=mesh(N), in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"jax_ring.powersgd: leaf  of grads must vary over 'x'"):
        g(np.ones((8, 6), np.float32))


@pytest.mark.slow
def test_buckets_change_no_more_than_rounding():
    grads = {"a": normal(3, N, 12, 9), "b": normal(3, N, 10, 8, seed=1), "c": normal(3, N, 5)}
    one, _ = over_steps(powersgd("x", 1), grads)
    many, _ = over_steps(powersgd("x", 1, bucket_bytes=1), grads)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), one, many)
    exact = jax.vmap(lambda g: sync_gradients(g, "x"), axis_name="x")(grads["c"][0])
    np.testing.assert_allclose(one["c"][0], exact, atol=1e-6)
