"""Wire formats: messages, errors, bytes; collectives over them, the same bits on all ranks."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from algorithms import one_half_to_a_channel, textbook_ring
from harness import compiled, mesh, per_rank, same_bits, sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from kernel_reference import BLOCK_WIRES, assert_bitwise, decoded, encoded, message_size

import jax_ring
from jax_ring import wire
from jax_ring.schedules import FAMILIES, double_binary_tree, hierarchical, verify

N = 8
BITS = {"bfloat16": "u16", "float16": "u16", "int8": "s8"}


def data(length=4096, seed=0, ranks=N):
    return np.random.default_rng(seed).standard_normal((ranks, length)).astype(np.float32)


def form_of(name, block, **more):
    return wire.Blocks(name, block, **more) if name in BLOCK_WIRES else wire.Cast(name)


# --- messages -------------------------------------------------------------------------------------


def rows_to_encode(n, seed=0):
    """Rows of n: ordinary numbers of many sizes, zeros, and some with special values in them."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((12, n)) * 2.0 ** rng.integers(-30, 30, (12, 1))
    rows[1] = 0
    rows[2] = -0.0
    rows[3] = 1e-40
    rows[4] *= 1e30
    rows[5:, :: max(1, n // 7)] = np.array(
        [[np.nan, np.inf, -np.inf, 3.4e38, 1e-45, 65520, -0.0]]
    ).T
    return np.clip(rows, -3.4e38, 3.4e38, where=np.isfinite(rows), out=rows).astype(np.float32)


@pytest.mark.parametrize("name", wire.NAMES)
def test_messages_are_those_of_numpy(name):
    """Sizes and blocks that divide each other and that do not, blocks longer than the row."""
    cases = [(1, 256), (7, 4), (255, 256), (256, 16), (257, 256), (30, 1000), (90, 62)]

    @jax.jit
    def both(rows):
        forms = [form_of(name, block) for _, block in cases]
        messages = [form.encode(row) for form, row in zip(forms, rows, strict=True)]
        values = [
            form.decode(message, n)
            for form, message, (n, _) in zip(forms, messages, cases, strict=True)
        ]
        return messages, values

    rows = [rows_to_encode(n) for n, _ in cases]
    messages, values = both(rows)
    for (n, block), x, message, value in zip(cases, rows, messages, values, strict=True):
        want = np.stack([encoded(name, row, block) for row in x])
        assert message.shape[-1] == message_size(name, n, block)
        assert message.nbytes // len(x) == form_of(name, block).nbytes(n)
        assert_bitwise(message, want, name)
        assert_bitwise(value, np.stack([decoded(name, row, n, block) for row in want]))


def test_a_message_of_a_million_values():
    n = 1_000_003
    x = data(n, ranks=1)[0]
    message = np.asarray(jax.jit(wire.get("int4").encode)(x))
    assert_bitwise(message, encoded("int4", x, 256))
    value = jax.jit(functools.partial(wire.get("int4").decode, n=n))(message)
    assert_bitwise(value, decoded("int4", message, n, 256))


@pytest.mark.parametrize(("n", "block"), [(37, 8), (16, 256)])
def test_messages_of_signs_are_those_of_numpy(n, block):
    form, x = wire.OneBit(block), data(n, ranks=3)
    x[1, 3], x[1, 4], x[2] = -0.0, 0.0, 3e38
    message = np.asarray(jax.jit(form.encode)(x))
    assert (message.dtype, message.shape) == (np.uint8, (3, form.nbytes(n)))
    bytes_of_signs = -(-n // 8)
    signs = np.packbits(np.signbit(x), axis=1, bitorder="little")
    np.testing.assert_array_equal(message[:, :bytes_of_signs], signs)
    sizes = np.ascontiguousarray(message[:, bytes_of_signs:]).view(ml_dtypes.bfloat16)
    starts = range(0, n, block)
    wanted = [np.abs(x[:, i : i + block].astype(np.float64)).mean(1) for i in starts]
    np.testing.assert_allclose(sizes.astype(np.float64), np.stack(wanted, 1), rtol=2.0**-8)
    of_each = np.repeat(sizes.astype(np.float32), block, 1)[:, :n]
    values = jax.jit(functools.partial(form.decode, n=n))(message)
    np.testing.assert_array_equal(values, np.where(np.signbit(x), -of_each, of_each))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_signs_of_what_is_not_finite_have_no_finite_value(bad):
    form, x = wire.OneBit(4), np.array([1, bad, 2, 3, 4], np.float32)
    values = np.asarray(form.decode(form.encode(x), 5))
    assert not np.isfinite(values[:4]).any()
    assert values[4] == 4


@pytest.mark.parametrize("block", [0, -1, True, 2.0])
def test_blocks_of_signs_that_cannot_be(block):
    with pytest.raises(ValueError, match=r"block must be an integer of at least 1, got"):
        wire.OneBit(block)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_messages_rounded_at_random_are_those_of_numpy(name):
    seed = np.array([4_000_000_000, 17], np.uint32)
    form = wire.Blocks(name, 62, stochastic=True)
    x = rows_to_encode(301, 3)
    message = jax.jit(form.encode)(x, seed)
    assert_bitwise(message, np.stack([encoded(name, row, 62, seed) for row in x]))


@pytest.mark.parametrize("name", BLOCK_WIRES)
def test_every_code_that_may_arrive_is_read(name):
    """Those too that no encoder writes: 0x7f of float8_e4m3fn, -128 of int8."""
    n = 512 if name == "int4" else 256
    codes = np.append(np.arange(256, dtype=np.uint8), np.array([0x40, 0x3F], np.uint8))
    message = codes.view(np.int8) if name == "int8" else codes
    value = jax.jit(functools.partial(wire.Blocks(name, 512).decode, n=n))(message)
    assert_bitwise(value, decoded(name, message, n, 512))


def test_every_code_of_16_bits_is_read():
    bits = np.arange(1 << 16, dtype=np.uint16)
    for name in ("bfloat16", "float16"):
        value = jax.jit(functools.partial(wire.get(name).decode, n=bits.size))(bits)
        assert_bitwise(value, bits.view(name).astype(np.float32))


def half_steps(name, x, block=256):
    """What the docstring of `jax_ring.wire` says of the error of each of x [..., n]."""
    x = np.abs(x.astype(np.float64))
    if name in ("bfloat16", "float16"):
        return x * 2.0**-8 if name == "bfloat16" else np.maximum(x * 2.0**-11, 2.0**-25)
    starts = range(0, x.shape[-1], block)
    largest = np.concatenate(
        [
            np.broadcast_to(part.max(-1, keepdims=True), part.shape)
            for part in (x[..., i : i + block] for i in starts)
        ],
        -1,
    )
    return {
        "int8": largest / 252,
        "int4": largest / 13.8,
        "float8_e4m3fn": np.maximum(x * 2.0**-4, largest * 2.0**-18),
        "float8_e5m2": np.maximum(x * 2.0**-3, largest * 2.0**-32),
    }[name] * (1 + 1e-6)


@functools.cache
def round_trip(name, block=256):
    form = form_of(name, block)
    return jax.jit(lambda x: form.decode(form.encode(x), x.shape[-1]))


@pytest.mark.parametrize("name", wire.NAMES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), largest=st.floats(1.0, 2.0), size=st.integers(-13, 14))
def test_no_error_is_larger_than_documented(name, seed, largest, size):
    x = np.random.default_rng(seed).uniform(-1, 1, 512)
    x[[0, 256]] = largest * 7, -largest * 127 / 128
    x = np.clip(x * 2.0**size, -65000, 65000).astype(np.float32)
    error = np.abs(np.asarray(round_trip(name)(x), np.float64) - x)
    assert (error <= half_steps(name, x)).all()


def test_the_worst_scale_of_int4():
    """The largest is just above 7, so that the scale is one bfloat16 above 1."""
    x = np.array([7.001, 0.5035, 0.5045], np.float32)
    scale = 1 + 2.0**-7
    assert (round_trip("int4")(x) == np.array([7, 0, 1]) * scale).all()
    assert x[0] / 14 < 0.5035


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", wire.NAMES)
def test_messages_are_integers_of_the_stated_size(name):
    n, length = 4, 1024

    def f(v):
        return (
            jax_ring.psum(v, "x", wire=name),
            jax_ring.psum_scatter(2 * v, "x", tiled=True, wire=name),
            jax_ring.all_gather(v, "x", wire=name),
        )

    g = jax.shard_map(f, mesh=mesh(n), in_specs=P("x"), out_specs=(P(), P("x"), P("x")))
    hlo = compiled(g, sharded(mesh(n), P("x"), (n * length,)))
    width = 2 if name in ("bfloat16", "float16") else 1
    part, whole = (wire.get(name).nbytes(size) // width for size in (length // n, length))
    kind = BITS.get(name, "u8")
    assert sorted(hlo.permutes) == [(kind, part)] * 3 * (n - 1) + [(kind, whole)] * (n - 1)
    assert hlo.other_collectives == []


def test_bytes_against_float32():
    n = 1 << 20
    for name, limit in {"int8": 0.27, "int4": 0.15, "bfloat16": 0.505}.items():
        assert wire.get(name).nbytes(n) <= limit * 4 * n


# --- sums -----------------------------------------------------------------------------------------

LENGTH = N * 300  # Chunks of a whole block and a part of one.


@functools.cache
def summing(name):
    """A compiled program: what each rank gets as the sum, by either algorithm."""

    def f(rows):
        sums = {
            how: jax_ring.psum(rows[0], "x", wire=name, algorithm=how) for how in ("direct", "ring")
        }
        return jax.tree.map(lambda v: jax.lax.pcast(v, "x", to="varying")[None], sums)

    g = jax.jit(jax.shard_map(f, mesh=mesh(N), in_specs=P("x"), out_specs=P("x")))

    def run(x):
        with jax_ring.config(unroll=2):
            return jax.tree.map(np.asarray, g(x))

    return run


@pytest.mark.parametrize("name", wire.NAMES)
def test_sums_are_the_same_on_every_rank_and_close(name):
    x = data(LENGTH)
    exact = x.astype(np.float64).sum(0)
    for algorithm, rows in summing(name)(x).items():
        assert all(same_bits(row, rows[0]) for row in rows), algorithm
        error = np.linalg.norm(rows[0] - exact) / np.linalg.norm(exact)
        limits = {"bfloat16": 6e-3, "int8": 2e-2, "float16": 1e-3}
        assert error <= limits.get(name, 0.3), algorithm


@pytest.mark.parametrize("name", wire.NAMES)
def test_direct_rounds_each_contribution_once_and_the_sum_once(name):
    for seed in range(3):
        x = data(LENGTH, seed) * 10.0 ** (seed - 1)
        exact = x.astype(np.float64).sum(0)
        chunks = x.reshape(N, N, -1)
        steps = np.stack([half_steps(name, rows) for rows in chunks])
        for rank in range(N):
            steps[rank, rank] = 0  # Its own contribution to the chunk that it sums never travels.
        once = steps.sum(0)
        again = half_steps(name, np.abs(exact.reshape(N, -1)) + once)
        error = np.abs(summing(name)(x)["direct"][0] - exact).reshape(N, -1)
        assert (error <= once + again + 1e-6 * np.abs(chunks).sum(0)).all()


@pytest.mark.parametrize("name", wire.NAMES)
def test_special_values_on_one_rank(name):
    x = data(LENGTH)
    bad = {5: np.inf, 600: -np.inf, LENGTH - 1: np.nan}
    for at, value in bad.items():
        x[3, at] = value
    x[:, 900:1200] = 0
    for algorithm, rows in summing(name)(x).items():
        assert all(same_bits(row, rows[0]) for row in rows if name in ("bfloat16", "float16"))
        assert not np.isfinite(rows[:, list(bad)]).any(), algorithm
        assert (rows[:, 900:1200] == 0).all(), algorithm
        assert np.isfinite(rows[:, 900:1200]).all()


@pytest.mark.parametrize("name", wire.NAMES)
def test_zeros_small_and_large_values(name):
    zeros = np.zeros((N, LENGTH), np.float32)
    for x in (zeros, -zeros):
        assert all((rows == 0).all() for rows in summing(name)(x).values())
    tiny = np.full((N, LENGTH), 1e-40, np.float32)
    for rows in summing(name)(tiny).values():
        assert (np.abs(rows) <= 1e-39).all()
    large = data(LENGTH) * 1e30
    for rows in summing(name)(large).values():
        assert np.isfinite(rows).all() == (name != "float16")


def test_direct_rounds_bfloat16_once_without_a_wire():
    x = data(4096).astype(ml_dtypes.bfloat16)

    def f(v):
        return jax_ring.psum(v, "x", algorithm="direct")

    rows = np.asarray(per_rank(f, N, x))
    exact = x.astype(np.float64).sum(0)
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-30))) - 7)
    assert (np.abs(rows.astype(np.float64) - exact) <= ulp / 2 * (1 + 1e-4)).all()
    assert all(same_bits(row, rows[0]) for row in rows)
    ones = np.ones((N, N), ml_dtypes.bfloat16)
    for big in range(N):
        ones[:, big] = np.where(np.arange(N) == big, 256, 1)
    assert (per_rank(f, N, ones).astype(np.float32) == 264).all()
    g = jax.shard_map(f, mesh=mesh(N), in_specs=P("x"), out_specs=P())
    hlo = compiled(g, sharded(mesh(N), P("x"), (N * 64,), x.dtype))
    assert hlo.permutes == [("u16", 8)] * 14


HIERARCHY = "hierarchical"


@pytest.mark.parametrize("n", [4, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", [*FAMILIES, HIERARCHY])
def test_every_algorithm_over_wires(algorithm, n):
    chosen = (
        hierarchical(2, 2, "ring", "recursive_doubling") if algorithm == HIERARCHY else algorithm
    )
    if algorithm == HIERARCHY and n == 3:
        pytest.skip("of 2 x 2 ranks")
    x = data(101, ranks=n)

    def f(v):
        how = {"axis_name": "x", "algorithm": chosen}
        sums = {
            name: (jax_ring.psum(v, wire=name, **how), jax_ring.pmean(v, wire=name, **how))
            for name in ("bfloat16", "int8")
        }
        return sums, jax_ring.pmean(v.astype(jnp.bfloat16), wire="float16", **how)

    sums, narrow = per_rank(f, n, x, check_vma=False)
    for total, mean in sums.values():
        assert all(same_bits(row, total[0]) for row in total)
        assert all(same_bits(row, mean[0]) for row in mean)
        assert near(total[0], x.sum(0))
        assert near(mean[0], x.mean(0))
    assert all(same_bits(row, narrow[0]) for row in narrow)
    assert near(narrow[0], x.mean(0), 0.01)


@pytest.mark.parametrize("form", [None, "bfloat16"])
def test_loops_of_steps_that_send_on_nothing_of_what_they_make(form):
    """Such steps hold values, though what the loop begins with comes from the buffer."""
    x = data(48, ranks=2)

    def f(v):
        how = {"wire": form, "algorithm": double_binary_tree(2)}
        return jax_ring.psum(v, "x", **how), jax_ring.pmean(v, "x", **how)

    with jax_ring.config(reducer="native", unroll=1):
        looped = per_rank(f, 2, x)
    with jax_ring.config(reducer="native"):
        unrolled = per_rank(f, 2, x)
    assert all(map(same_bits, looped, unrolled))
    assert near(looped[0][0], x.sum(0))
    assert near(looped[1][0], x.mean(0))


@pytest.mark.parametrize("algorithm", ["ring", "direct", "recursive_doubling"])
def test_means_by_native_code_as_values_are(algorithm):
    x = data(40, ranks=4)
    f = functools.partial(jax_ring.pmean, axis_name="x", algorithm=algorithm)
    with jax_ring.config(reducer="native"):
        mean = per_rank(f, 4, x)
    np.testing.assert_allclose(mean, np.tile(x.mean(0), (4, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reducing", [0, 1])
def test_channels_that_send_in_one_half_only(reducing):
    n = 3
    schedule = one_half_to_a_channel(n, reducing)
    verify(schedule)
    x = data(40, ranks=n)
    keyed = wire.Blocks("int8", key=jax.random.key(0))

    def f(v):
        return [jax_ring.psum(v, "x", wire=w, algorithm=schedule) for w in ("bfloat16", keyed)]

    for total in per_rank(f, n, x):
        assert all(same_bits(row, total[0]) for row in total)
        assert near(total[0], x.sum(0))


@pytest.mark.parametrize("reducer", ["auto", "native", "xla"])
def test_a_scatter_that_ends_in_a_copy(reducer):
    n = 4
    schedule = textbook_ring(n)
    verify(schedule)
    x = data(n * 12, ranks=n)

    def f(v):
        how = {"axis_name": "x", "tiled": True, "algorithm": schedule}
        return (
            jax_ring.psum_scatter(v, **how),
            jax_ring.psum_scatter(v, wire="bfloat16", **how),
            jax_ring.reduce_scatter(v, op="mean", wire="int8", **how),
        )

    with jax_ring.config(reducer=reducer):
        exact, total, mean = (np.asarray(rows).reshape(-1) for rows in per_rank(f, n, x))
    np.testing.assert_allclose(exact, x.sum(0), rtol=1e-5, atol=1e-5)
    assert near(total, x.sum(0))
    assert near(mean, x.mean(0))


def test_a_function_is_what_it_does_and_not_what_it_is_called():
    def sum(a, b):
        return jnp.maximum(a, b)

    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    for how in ({"wire": "bfloat16"}, {}):
        for reducer in ("auto", "native", "xla"):
            with jax_ring.config(reducer=reducer):
                f = functools.partial(jax_ring.all_reduce, op=sum, identity=-jnp.inf, **how)
                largest = jax.vmap(lambda v, f=f: f(v, "i"), axis_name="i")(x)
            np.testing.assert_array_equal(largest[0], [3, 4])


# --- rounding at random ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_mean_over_keys_is_the_value(name):
    form = wire.Blocks(name, 64, stochastic=True)
    x = data(128, ranks=1)[0]
    seeds = jax.random.bits(jax.random.key(0), (4000, 2), jnp.uint32)
    draws = jax.jit(jax.vmap(lambda seed: form.decode(form.encode(x, seed), 128)))(seeds)
    steps = half_steps(name, x, 64) * 2
    off = np.abs(np.asarray(draws, np.float64).mean(0) - x)
    assert (off <= 5 * steps / 2 / np.sqrt(4000)).all()
    assert (np.asarray(draws) != np.asarray(draws[0])).any()
    assert (np.abs(draws - x) <= steps).all()


def test_keys_ranks_and_leaves_draw_different_numbers():
    x = np.tile(data(500, ranks=1), (4, 1))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None), axis_name="x", out_axes=None)
    def gathered(v, key):
        form = wire.Blocks("int8", key=key)
        return jax_ring.all_gather({"a": v, "b": v}, "x", wire=form, to="invarying")

    first, again, other = (gathered(x, jax.random.key(i)) for i in (1, 1, 2))
    assert all(same_bits(first[leaf], again[leaf]) for leaf in "ab")
    rows = [*first["a"], *first["b"], *other["a"], *other["b"]]
    for i, row in enumerate(rows):
        for before in rows[:i]:
            assert 0.05 < np.mean(np.asarray(row) != np.asarray(before)) < 0.95


def test_sums_rounded_at_random_have_the_right_mean():
    x = np.tile(data(256, ranks=1), (4, 1))
    per_key = jax.vmap(
        lambda v, key: jax_ring.psum(v, "x", wire=wire.Blocks("int4", key=key)),
        in_axes=(0, None),
        out_axes=None,
        axis_name="x",
    )
    f = jax.jit(lambda keys: jax.lax.map(lambda key: per_key(x, key), keys))
    sums = np.asarray(f(jax.random.split(jax.random.key(0), 300)), np.float64)
    once = np.asarray(jax.vmap(lambda v: jax_ring.psum(v, "x", wire="int4"), axis_name="x")(x)[0])
    exact = 4.0 * x[0]
    assert np.linalg.norm(sums.mean(0) - exact) < np.linalg.norm(once - exact) / 3
    assert np.abs(sums.mean(0) - exact).max() < 5 * sums.std(0).max() / np.sqrt(300)


def test_a_key_under_vmap_and_shard_map():
    x = data(64)

    def f(rows, key):
        form = wire.Blocks("int8", key=key)
        return jax.vmap(lambda v: jax_ring.psum(v, "x", wire=form))(rows)

    g = jax.shard_map(f, mesh=mesh(N), in_specs=(P(None, "x"), P()), out_specs=P(None, None))
    both = np.stack([x, 2 * x]).reshape(2, -1)
    out = jax.jit(g)(both, jax.random.key(3))
    exact = np.stack([x, 2 * x]).sum(1)
    assert np.linalg.norm(out - exact) <= 0.03 * np.linalg.norm(exact)


# --- through the collectives ----------------------------------------------------------------------


def near(got, want, limit=0.02):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


def test_means_groups_trees_and_two_axes():
    m = mesh(2, 4)
    x = data(80)
    groups = [[0, 3], [1, 2]]

    def f(v):
        tree = {"a": v, "n": jnp.int32(3) * (v[0] > -9), "h": v[:9].astype(jnp.bfloat16)}
        return {
            "both axes": jax_ring.pmean(v, ("y", "x"), wire="int8"),
            "groups": jax_ring.psum(v, "y", axis_index_groups=groups, wire="bfloat16"),
            "tree": jax_ring.psum(tree, ("x", "y"), wire="float16"),
            "scattered": jax_ring.psum_scatter(v, ("x", "y"), tiled=True, wire="int8"),
            "gathered": jax_ring.all_gather(v, "x", wire="float8_e4m3fn"),
        }

    out = per_rank(f, m, x)
    assert near(out["both axes"], np.tile(x.mean(0), (N, 1)))
    rows = x.reshape(2, 4, 80)
    pairs = rows + rows[:, [3, 2, 1, 0]]
    assert near(out["groups"], pairs.reshape(N, 80))
    assert near(out["tree"]["a"], np.tile(x.sum(0), (N, 1)))
    assert (out["tree"]["n"] == 24).all()
    assert out["tree"]["n"].dtype == np.int32
    assert out["tree"]["h"].dtype == jnp.bfloat16
    assert near(out["scattered"], x.sum(0).reshape(N, 10))
    assert near(out["gathered"], np.tile(rows.transpose(1, 0, 2), (2, 1, 1)), 0.05)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(check_vma):
    n = 4
    x, c = data(32, ranks=n), data(32, 1, ranks=n)

    def gradients(form):
        def loss(v, w):
            total = jax_ring.psum(v, "x", wire=form)
            part = jax_ring.psum_scatter(v, "x", tiled=True, wire=form)
            rows = jax_ring.all_gather(v, "x", wire=form)
            return (total**2 * w).sum() + (part**3).sum() + (rows**2 * w).sum()

        return per_rank(jax.grad(loss), n, x, c, check_vma=check_vma)

    assert near(gradients("int8"), gradients(None), 0.05)


@pytest.mark.parametrize("reducer", ["native", pytest.param("xla", marks=pytest.mark.slow)])
def test_gradients_over_a_vmapped_axis(reducer):
    x, c = data(12, ranks=3), data(12, 1, ranks=3)

    def gradients(form, reducer):
        def loss(x):
            def rank(v, w):
                total = jax_ring.psum(v, "i", wire=form)
                part = jax_ring.psum_scatter(v, "i", tiled=True, wire=form)
                rows = jax_ring.all_gather(v, "i", wire=form)
                return (total * w).sum() + part.sum() * w[0] + (rows * w).sum()

            return jax.vmap(rank, axis_name="i")(x, c).sum()

        with jax_ring.config(reducer=reducer):
            return jax.grad(loss)(x)

    assert near(gradients("int8", reducer), gradients(None, "xla"), 1e-5)
    assert near(gradients(None, reducer), gradients(None, "xla"), 1e-5)


# --- formats of one's own -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Halves:
    """Two bfloat16 for each value: its own and that of what it lost. A message of two arrays."""

    name: str = "halves"

    def encode(self, values, seed=None):
        high = wire.bfloat16_bits(values)
        low = wire.bfloat16_bits(values - wire.get("bfloat16").decode(high, values.shape[-1]))
        return {"high": high, "low": low}

    def decode(self, message, n):
        return sum(wire.get("bfloat16").decode(part, n) for part in message.values())

    def nbytes(self, n):
        return 4 * n


def test_a_message_of_two_arrays():
    x = data(100, ranks=4)

    def f(v):
        return {
            how: jax_ring.psum(v, "x", wire=Halves(), algorithm=how) for how in ("direct", "ring")
        } | {
            "scattered": jax_ring.psum_scatter(v, "x", tiled=True, wire=Halves()),
            "gathered": jax_ring.all_gather(v, "x", wire=Halves()),
        }

    out = per_rank(f, 4, x)
    for how in ("direct", "ring"):
        assert near(out[how], np.tile(x.sum(0), (4, 1)), 1e-4)
        assert all(same_bits(row, out[how][0]) for row in out[how])
    assert near(out["scattered"], x.sum(0).reshape(4, 25), 1e-4)
    assert near(out["gathered"], np.tile(x, (4, 1, 1)), 1e-4)


@dataclasses.dataclass(frozen=True)
class Ones(wire.Blocks):
    """A format of the library, changed: it must not be taken for that by native code."""

    def encode(self, values, seed=None):
        return super().encode(jnp.ones_like(values), seed)


def test_a_changed_format_is_not_the_original():
    np.testing.assert_allclose(sum_over(Ones("int8"), data(8, ranks=4)), 1, rtol=0.01)


class Unhashable(Halves):
    __hash__ = None


@dataclasses.dataclass(frozen=True)
class Nameless:
    def encode(self, values, seed=None):
        return values

    def decode(self, message, n):
        return message


@dataclasses.dataclass(frozen=True)
class Misshapen(Halves):
    """What it encodes has no rows, or what it decodes is short, or its size is another."""

    fault: str = ""

    def encode(self, values, seed=None):
        message = super().encode(values)
        return jax.tree.map(jnp.ravel, message) if self.fault == "encode" else message

    def decode(self, message, n):
        value = super().decode(message, n)
        return {"decode": value[..., :1], "dtype": value.astype(jnp.bfloat16)}.get(
            self.fault, value
        )

    def nbytes(self, n):
        return super().nbytes(n) + (self.fault == "nbytes")


def sum_over(form, x=None):
    return jax.vmap(lambda v: jax_ring.psum(v, "x", wire=form), axis_name="x")(
        data(8) if x is None else x
    )


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        ("int3", ValueError, "psum: wire must be .*'int8'.*got 'int3'"),
        (8, TypeError, "wire must be None, one of .* or a WireFormat .* got 8"),
        (Halves, TypeError, "wire must be None, one of .* got <class"),
        (Nameless(), TypeError, "an object with name, encode, decode and nbytes"),
        (Unhashable(), TypeError, "wire must be hashable"),
        (
            wire.Blocks("int8", stochastic=True),
            ValueError,
            r"rounds at random and needs a key: Blocks\(key=",
        ),
        (Misshapen(fault="encode"), ValueError, "'halves'.*encode.*leading dimensions"),
        (Misshapen(fault="decode"), ValueError, "'halves'.*decode.*float32"),
        (Misshapen(fault="dtype"), ValueError, "'halves'.*decode.*float32"),
        (Misshapen(fault="nbytes"), ValueError, r"'halves'.*nbytes\(6\) must be .* 24, got 25"),
    ],
)
def test_bad_formats(form, error, message):
    with pytest.raises(error, match=message):
        sum_over(form)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: wire.Cast("float32"), ValueError, "name must be 'bfloat16' or 'float16', got"),
        (lambda: wire.Blocks("int2"), ValueError, "element must be one of .*got 'int2'"),
        (lambda: wire.Blocks("int8", 0), ValueError, "block must be at least 1, got 0"),
        (lambda: wire.Blocks("int8", 1 << 70), ValueError, "block must be less than 2..62, got"),
        (lambda: wire.Blocks("int8", 1.5), TypeError, "block must be an integer, got 1.5"),
        (lambda: wire.Blocks("int4", 3), ValueError, "block must be an even integer .*got 3"),
        (
            lambda: wire.Blocks("float8_e5m2", key=jax.random.key(0)),
            ValueError,
            "key rounds int8 and int4 only, not float8_e5m2",
        ),
    ],
)
def test_formats_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_what_a_wire_does_not_take():
    with pytest.raises(ValueError, match="floating-point leaves, but x has only"):
        sum_over("int8", np.ones((8, 2), int))
    with pytest.raises(ValueError, match="taken in float32, got reduce_dtype=bfloat16"):
        jax.vmap(
            lambda v: jax_ring.psum(v, "x", wire="int8", reduce_dtype=jnp.bfloat16), axis_name="x"
        )(data(8))
    with pytest.raises(ValueError, match="algorithm='xla' .* has no wire formats"):
        jax.vmap(lambda v: jax_ring.psum(v, "x", wire="int8", algorithm="xla"), axis_name="x")(
            data(8)
        )


def test_one_sum_on_many_ranks_is_not_rounded_at_random():
    form = wire.Blocks("int8", key=jax.random.key(0))
    f = functools.partial(jax_ring.psum, axis_name="x", wire=form)
    with pytest.raises(ValueError, match="'recursive_doubling' makes a sum on several ranks"):
        jax.vmap(functools.partial(f, algorithm="recursive_doubling"), axis_name="x")(data(8))


def test_equal_formats_are_one_program():
    """The key is an operand, not a part of the program."""
    traces = []

    @jax.jit
    def f(x, key):
        traces.append(1)
        return sum_over(wire.Blocks("int8", key=key), x)

    x = data(8)
    f(x, jax.random.key(0))
    f(x, jax.random.key(1))
    assert traces == [1]
    assert wire.get("int8") == wire.Blocks("int8", 256)
    assert hash(wire.get("int8")) == hash(wire.Blocks("int8", 256))
    assert math.isclose(wire.get("int4").nbytes(1 << 20) / (4 << 20), 0.127, rel_tol=0.01)
