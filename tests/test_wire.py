"""Collectives over wire formats: bytes on the wire, errors, the same bits on all ranks."""

import jax
import numpy as np
import pytest
from harness import compiled, mesh, per_rank, same_bits, sharded
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import error_feedback, wire

N = 8
BITS = {"bfloat16": "u16", "float16": "u16", "int8": "s8"}


def data(length=4096, seed=0):
    return np.random.default_rng(seed).standard_normal((N, length)).astype(np.float32)


@pytest.mark.parametrize("name", wire.NAMES)
def test_messages_are_integers_of_the_stated_size(name):
    f = jax.shard_map(
        lambda v: jax_ring.psum(v, "x", wire=name), mesh=mesh(N), in_specs=P("x"), out_specs=P()
    )
    hlo = compiled(f, sharded(mesh(N), P("x"), (N * 4096,)))
    form = wire.get(name)
    width = 2 if name in ("bfloat16", "float16") else 1
    assert hlo.permutes == [(BITS.get(name, "u8"), form.nbytes(512) // width)] * 14
    assert hlo.other_collectives == []


def test_bytes_against_float32():
    n = 1 << 20
    for name, limit in {"int8": 0.27, "int4": 0.15, "bfloat16": 0.505}.items():
        assert wire.get(name).nbytes(n) <= limit * 4 * n


@pytest.mark.parametrize(("name", "limit"), [("bfloat16", 6e-3), ("int8", 2e-2)])
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_errors_and_the_same_bits_everywhere(name, limit, algorithm):
    x = data()
    exact = x.astype(np.float64).sum(0)
    rows = per_rank(lambda v: jax_ring.psum(v, "x", wire=name, algorithm=algorithm), N, x)
    assert all(same_bits(row, rows[0]) for row in rows)
    assert np.linalg.norm(rows[0] - exact) <= limit * np.linalg.norm(exact)


@pytest.mark.parametrize("name", wire.NAMES)
def test_what_is_not_finite_stays_so_on_every_rank(name):
    x = data(33)
    x[3, 5] = np.inf
    rows = np.asarray(per_rank(lambda v: jax_ring.psum(v, "x", wire=name), N, x))
    assert not np.isfinite(rows[:, 5]).any()


def test_zeros_are_exact():
    rows = per_rank(lambda v: jax_ring.psum(v, "x", wire="int8"), N, np.zeros((N, 1000), "f4"))
    assert (np.asarray(rows) == 0).all()


def test_error_feedback_makes_the_error_of_many_steps_that_of_one():
    x = data(64)
    f = jax.jit(jax.vmap(lambda g, e: error_feedback.psum(g, e, "x", wire="int4"), axis_name="x"))
    residual, total, plain = error_feedback.init(x), 0.0, 0.0
    once = jax.vmap(lambda g: jax_ring.psum(g, "x", wire="int4"), axis_name="x")(x)[0]
    for _ in range(50):
        y, residual = f(x, residual)
        total, plain = total + np.asarray(y[0], np.float64), plain + np.asarray(once, np.float64)
    exact = 50 * x.astype(np.float64).sum(0)
    np.testing.assert_allclose(total + np.asarray(residual).sum(0), exact, atol=1e-3)
    assert np.abs(total - exact).max() < np.abs(plain - exact).max() / 5


def test_bad_wires():
    with pytest.raises(ValueError, match="wire must be .*got 'int3'"):
        jax.vmap(lambda v: jax_ring.psum(v, "x", wire="int3"), axis_name="x")(data(8))
    with pytest.raises(ValueError, match="floating-point leaves"):
        jax.vmap(lambda v: jax_ring.psum(v, "x", wire="int8"), axis_name="x")(np.ones((8, 2), int))
