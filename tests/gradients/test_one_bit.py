"""1-bit gradients against their algorithm in float64, and what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled, integers, mesh, over_steps, same_bits, sharded
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring.gradients import one_bit, state_specs
from jax_ring.wire import OneBit

N, CHUNK = 4, 8


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def signs(x):
    """Each chunk as its signs and the mean of its magnitudes, rounded to bfloat16."""
    size = np.abs(x).mean(-1, keepdims=True)
    rounded = size.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    return np.where(np.signbit(x), -rounded, rounded)


def reference(grads):
    """[steps, ranks, ranks, chunk] in float64: results and errors; rank j sums chunk j."""
    error, results, owner = np.zeros(grads.shape[1:]), [], np.arange(N)
    for g in grads.astype(np.float64):
        m = g + error
        sent = signs(m)
        sent[owner, owner] = m[owner, owner]  # What does not travel is not rounded.
        mean = sent.mean(0)
        error = m - sent
        error[owner, owner] = N * (mean - signs(mean))
        results.append(signs(mean))
    return np.array(results), error


def test_steps_are_those_of_the_algorithm():
    grads = normal(6, N, N * CHUNK)
    compress = one_bit("x", 0, block=CHUNK, exact_below=1, algorithm="direct")
    results, state = over_steps(compress, grads)
    wanted, error = reference(grads.reshape(6, N, N, CHUNK))
    # Sizes are bfloat16s, so that a last bit of float32 may move them by 2^-8.
    np.testing.assert_allclose(results[:, 0], wanted.reshape(6, -1), rtol=0.01)
    np.testing.assert_allclose(state.error, error.reshape(N, -1), atol=0.05)
    assert all(same_bits(results[:, 0], results[:, r]) for r in range(N))


@pytest.mark.slow
def test_small_leaves_are_exact_and_errors_hold_what_the_rest_lacks():
    grads = {
        "w": normal(5, N, 16, 12).astype(jnp.bfloat16),
        "bias": integers((5, N, 7), np.float32),
        "scalar": integers((5, N), np.float32),
        "count": integers((5, N, 8, 8), np.int32),
        "none": None,
    }
    results, state = over_steps(one_bit("x", 0, exact_below=10), grads)
    assert [state.error[k] is None for k in grads] == [False, True, True, True, True]
    for name in ("bias", "scalar", "count"):
        assert same_bits(results[name][:, 0], grads[name].mean(1, dtype=np.float32)), name
    assert (results["w"].dtype, state.error["w"].dtype) == (jnp.bfloat16, jnp.float32)
    total = np.asarray(results["w"], np.float64)[:, 0].sum(0) + np.asarray(state.error["w"]).mean(0)
    np.testing.assert_allclose(total, grads["w"].astype(np.float64).mean(1).sum(0), atol=1e-4)


@pytest.mark.slow
def test_the_warm_up_is_exact():
    grads = integers((5, N, 40), np.float32)
    results, state = over_steps(one_bit("x", 3, exact_below=1), grads)
    mean = grads.mean(1)
    equal = [same_bits(result[0], exact) for result, exact in zip(results, mean, strict=True)]
    assert equal == [True, True, True, False, False]
    assert state.step.tolist() == [5] * N
    alone, rest = over_steps(one_bit("x", 0, exact_below=1), grads[3:])
    assert same_bits(results[3:], alone)
    assert same_bits(state.error, rest.error)


@pytest.mark.slow
def test_without_error_feedback_descent_ends_elsewhere():
    """Each rank pulls to a place of its own; their mean is where the sum of pulls is zero."""
    places = normal(N, 32)
    compress = one_bit("x", 0, exact_below=1)

    def with_memory(g, state):
        return compress.update(g, state)

    def without(g, state):
        return jax_ring.pmean(g, "x", wire=OneBit()), state

    def descend(place, update):
        def step(carry, rate):
            w, state = carry
            g, state = update(w - place, state)
            return (w - rate * g, state), None

        start = jnp.zeros(32), compress.init(place)
        return jax.lax.scan(step, start, 1 / (10 + jnp.arange(500.0)))[0][0]

    def missed(update):
        run = jax.vmap(functools.partial(descend, update=update), axis_name="x")
        return float(np.linalg.norm(np.asarray(jax.jit(run)(places))[0] - places.mean(0)))

    assert missed(without) > 10 * missed(with_memory)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_step_is_seen_by_all_and_does_not_stay(bad):
    grads = normal(4, N, 48)
    grads[1, 2, 3] = bad
    compress = one_bit("x", 0, exact_below=1)
    results, state = over_steps(compress, grads)
    finite = np.isfinite(results).all(2)
    assert finite.tolist() == [[True] * N, [False] * N, [True] * N, [True] * N]
    good, wanted = over_steps(compress, grads[[0, 2, 3]])
    assert same_bits(results[2:], good[1:])
    assert same_bits(state.error, wanted.error)


@pytest.mark.parametrize("bucket_bytes", [2**20, pytest.param(1, marks=pytest.mark.slow)])
def test_bytes_are_a_bit_for_each_value_and_two_for_each_block(bucket_bytes):
    m, compress = mesh(N), one_bit("x", 0, algorithm="direct", bucket_bytes=bucket_bytes)
    shapes = {"w": (64, 64), "v": (2048,), "b": (32,)}
    state = jax.eval_shape(
        compress.init, {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    )
    specs = state_specs(state, "x")
    f = jax.shard_map(compress.update, mesh=m, in_specs=(P("x"), specs), out_specs=(P(), specs))
    grads = {k: sharded(m, P("x"), (N * v[0], *v[1:])) for k, v in shapes.items()}
    hlo = compiled(f, grads, state._replace(error={**grads, "b": None}))
    assert not hlo.other_collectives
    sent = {kind: sum(n for k, n in hlo.permutes if k == kind) for kind, _ in hlo.permutes}
    values = 64 * 64 + 2048
    assert sent == {"u8": 2 * (N - 1) * values // N * (1 / 8 + 2 / 256), "f32": 2 * (N - 1) * 8}


def test_errors():
    for how, message in (
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"warmup_steps": True}, "warmup_steps must be at least 0, got True"),
        ({"warmup_steps": 0, "block": 0}, "block must be at least 1, got 0"),
        ({"warmup_steps": 0, "exact_below": -1}, "exact_below must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            one_bit("x", **how)
    with pytest.raises(TypeError, match="warmup_steps must be an integer, got None"):
        one_bit("x", None)
    compress = one_bit("x", 0, exact_below=1, algorithm="recursive_doubling")
    grads = np.ones((N, 8), np.float32)
    update = jax.vmap(
        functools.partial(compress.update, state=compress.init(grads[0])), axis_name="x"
    )
    with pytest.raises(ValueError, match="'direct' and 'ring' do not"):
        update(grads)
