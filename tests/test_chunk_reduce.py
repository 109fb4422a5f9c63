"""Native code for the work on chunks: the bits of plain JAX, where it is called, how it batches."""

import collections
import concurrent.futures
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled, mesh, per_rank, same_bits, sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_reference import BLOCK_WIRES, FLOATS, INTEGERS, LOSSY_WIRES, OPS, assert_bitwise

import jax_ring
from jax_ring import _compat, chunk_reduce, native, wire

pytestmark = pytest.mark.skipif(not native.status().available, reason=str(native.status()))

N = 8
ROOT = pathlib.Path(__file__).parents[1]
SPECIAL = np.array(
    [
        *(0.0, -0.0, 1e-40, -1e-45, 2.0**-126, -(2.0**-126), 2.0**-125, 6e-8, 1e-3, 1, -1, 1.5),
        # Not within 1% of the largest float32: where a product overflows, a fused sum need not.
        *(65519, 65520, -1e30, 3e38, -3e38, np.inf, -np.inf, np.nan),
    ],
    np.float32,
)


def values(shape, seed, special=0.0, dtype="float32"):
    """Numbers of many sizes, a part of them special."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, shape[:-1])[..., None]
    chosen = rng.random(shape) < special
    return np.where(chosen, rng.choice(SPECIAL, shape), x).astype(dtype)


def traced_with(reducer, f):
    """f, whose work on chunks is done so."""

    @functools.wraps(f)
    def g(*args):
        with jax_ring.config(reducer=reducer):
            return f(*args)

    return g


def count(text):
    """The number of custom calls, by what they do."""
    found = re.findall(r'custom_call_target="jax_ring_chunk_(\w+)"', text)
    return dict(collections.Counter(found))


def over_mesh(f, m=None, spec=P("x"), out=P("x")):
    return jax.shard_map(f, mesh=m or mesh(N), in_specs=spec, out_specs=out)


# --- the same bits --------------------------------------------------------------------------------


def form_of(name, block, stochastic=False):
    if name not in BLOCK_WIRES:
        return wire.Cast(name)
    block += block % 2 if name == "int4" else 0
    return wire.Blocks(name, block, stochastic=stochastic and name.startswith("int"))


blocks = st.sampled_from([1, 2, 3, 16, 31, 64, 255, 256, 257, 5000])
sizes = st.one_of(st.integers(1, 80), st.integers(1, 3000))


@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from(LOSSY_WIRES),
    block=blocks,
    n=sizes,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    stochastic=st.booleans(),
    factor=st.sampled_from([1.0, 1 / 3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_done_with_a_chunk(name, block, n, dtype, stochastic, factor, seed):
    form = form_of(name, block, stochastic)
    draws = stochastic and name.startswith("int")

    @jax.jit
    def both(buffer, other, row, seed):
        results = {}
        for reducer in ("native", "xla"):
            codec = chunk_reduce.Codec(form, "sum", lax.add, reducer, factor)
            drawn = seed if draws else None
            message = codec.encode(other, row, drawn)
            given = (message, buffer, row)
            results[reducer] = [
                message,
                codec.reduce(*given, drawn, finish=True, encode=True),
                codec.reduce(*given, finish=True, encode=False),
                codec.decode(message, buffer, row),
            ]
        return results

    seeds = np.random.default_rng(seed).integers(0, 2**32, (3, 2), np.uint32)
    for i, special in enumerate([0, 0.01, 1]):
        data = values((2, 3, n), seed + i, special, dtype)
        results = both(*data, np.int32(i), seeds[i])
        for got, want in zip(results["native"], results["xla"], strict=True):
            assert_bitwise(got, np.asarray(want), name)


@settings(max_examples=3, deadline=None)
@given(
    name=st.sampled_from(LOSSY_WIRES),
    block=blocks,
    n=sizes,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    algorithm=st.sampled_from(["direct", "ring"]),
    ranks=st.integers(2, N),
    key=st.none() | st.integers(0, 1000),
    mean=st.booleans(),
)
def test_collectives_over_a_wire(name, block, n, dtype, algorithm, ranks, key, mean):
    draws = key is not None and name.startswith("int")

    def f(v, key):
        form = form_of(name, block)
        if draws:
            form = wire.Blocks(name, form.block, jax.random.wrap_key_data(key))
        how = {"axis_name": "x", "algorithm": algorithm, "wire": form}
        rows = v[: n // ranks * ranks].reshape(ranks, -1)
        return (
            (jax_ring.pmean if mean else jax_ring.psum)(v, **how),
            jax_ring.psum_scatter(rows, **how),
            jax_ring.all_gather(v, **how),
        )

    keys = np.tile(np.array([0, key or 0], np.uint32), (ranks, 1))
    for special in (0, 0.01):
        x = values((ranks, n), n, special, dtype)
        with jax_ring.config(unroll=2):
            fast, plain = (
                per_rank(traced_with(reducer, f), ranks, x, keys, check_vma=not draws)
                for reducer in ("native", "xla")
            )
        for got, want in zip(fast, plain, strict=True):
            assert_bitwise(got, np.asarray(want))


def test_chunks_of_every_dtype_without_a_wire():
    rng = np.random.default_rng(0)

    def numbers(dtype, op):
        dtype = np.dtype(dtype)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            return rng.integers(info.min, info.max, (2, 3, 50), dtype, endpoint=True)
        x = values((2, 3, 50), 7, 0.1, dtype)
        if op in ("max", "min"):
            # Which of two zeros is the larger is nowhere said, nor whether subnormals are zeros.
            x = np.where(np.abs(x.astype(np.float64)) < 2.0**-126, np.ones_like(x), x)
        return x

    def reduced(reducer, tree):
        def one(op, pair):
            codec = chunk_reduce.Codec(None, op, chunk_reduce.OPS[op], reducer)
            return codec.reduce(pair[0][1], pair[1], jnp.int32(2), finish=True, encode=True)

        return {key: one(key[0], pair) for key, pair in tree.items()}

    with jax.enable_x64(True), np.errstate(all="ignore"):
        x = {(op, dtype): numbers(dtype, op) for op in OPS for dtype in [*FLOATS, *INTEGERS]}
        fast, plain = (jax.jit(functools.partial(reduced, how)) for how in ("native", "xla"))
        fast = fast.lower(x).compile()
        assert count(fast.as_text()) == {"reduce": len(x)}
        jax.tree.map(lambda a, b: assert_bitwise(a, np.asarray(b)), fast(x), plain(x))


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_collectives_without_a_wire(algorithm):
    def f(v):
        how = {"axis_name": "x", "algorithm": algorithm}
        return (
            jax_ring.psum(v, **how),
            jax_ring.pmax(v.astype(jnp.int16), **how),
            jax_ring.psum_scatter(v, tiled=True, **how),
        )

    x = values((4, 4, 25), 1)
    with jax_ring.config(unroll=1):
        fast, plain = (per_rank(traced_with(how, f), 4, x) for how in ("native", "xla"))
    assert all(map(same_bits, fast, plain))


# --- where calls are made -------------------------------------------------------------------------


@pytest.mark.parametrize("reducer", ["auto", "native", "xla"])
def test_the_setting_decides(reducer):
    def f(v):
        how = {"axis_name": "x", "algorithm": "direct"}
        forms = {"int8": "int8", "bfloat16": "bfloat16", "none": None}
        return {name: jax_ring.psum(v, wire=form, **how) for name, form in forms.items()}

    g = over_mesh(traced_with(reducer, f), mesh(3), out=P())
    found = count(compiled(g, sharded(mesh(3), P("x"), (30,))).text)
    # Each rank writes a message for each of the others and one of its sum, and reads two, and its
    # own, into the buffer. The two that arrive are added in the one call each.
    each = {"encode": 2, "reduce": 2, "decode": 3}
    forms = ("int8", "bfloat16", None)
    preferred = [chunk_reduce.prefers_native("cpu", wire.get(form)) for form in forms]
    times = {"auto": sum(preferred), "native": len(forms), "xla": 0}[reducer]
    assert found == {kind: n * times for kind, n in each.items() if times}


def calls_of(dtype, reducer="auto", algorithm="ring", op=jax_ring.psum, size=64, **how):
    """The custom calls of a collective without a wire over four ranks."""
    f = traced_with(reducer, lambda v: op(v, "x", algorithm=algorithm, **how))
    g = over_mesh(f, mesh(4), out=P("x") if op is jax_ring.psum_scatter else P())
    return count(compiled(g, sharded(mesh(4), P("x"), (size,), dtype)).text)


def test_what_is_called_without_a_wire():
    ring = {"encode": 1, "reduce": 3, "decode": 4}
    for dtype in (jnp.float32, jnp.int16, jnp.bfloat16):
        assert calls_of(dtype) == ring
    assert calls_of(jnp.float32, op=jax_ring.pmax) == ring
    assert calls_of(jnp.float32, algorithm="recursive_doubling") == {"reduce": 2}
    scatter = {"encode": 1, "reduce": 3}
    assert calls_of(jnp.float32, op=jax_ring.psum_scatter, tiled=True) == scatter
    # A type that XLA reduces faster, one that has no native form, and sums in another type.
    assert calls_of(jnp.float16) == {"encode": 1, "decode": 4}
    assert calls_of(jnp.float16, "native") == ring
    assert calls_of(jnp.complex64) == {}
    assert calls_of(jnp.bfloat16, reduce_dtype="float32") == {}
    # Whole buffers that are large: XLA can add them in place of a donated operand.
    assert calls_of(jnp.float32, algorithm="recursive_doubling", size=16 << 20) == {}
    # Steps that move some chunks, not one and not all.
    assert calls_of(jnp.float32, algorithm="halving_doubling") == {}


def test_no_call_where_ranks_are_rows_of_a_sharded_array():
    m = mesh(N)
    f = jax.vmap(traced_with("native", lambda v: jax_ring.psum(v, "i", wire="int8")), axis_name="i")
    x = values((4, 1000), 0)
    assert count(compiled(f, x).text) != {}
    for spec in (P(None, "x"), P()):
        assert count(compiled(f, sharded(m, spec, x.shape)).text) == {}
    laid_out = jax.device_put(x, NamedSharding(m, P(None, "x")))
    assert same_bits(jax.jit(f)(laid_out), jax.jit(f)(x))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", ["int8", "bfloat16"])
def test_no_call_where_a_mesh_axis_is_left_to_the_compiler(name, explicit):
    m = mesh(4, 2, explicit=explicit)

    def program(f):
        return jax.shard_map(f, mesh=m, in_specs=P("x"), out_specs=P(), axis_names={"x"})

    x = jax.device_put(values((4 * 6, 64), 0), NamedSharding(m, P("x", "y")))
    f = program(traced_with("native", lambda v: jax_ring.psum(v, "x", wire=name)))
    ours, plain = compiled(f, x), compiled(program(lambda v: jax_ring.psum(v, "x")), x)
    assert count(ours.text) == {}
    # On explicit axes some versions of shard_map gather at its border, without a wire too.
    assert ours.counts["all-gather"] == plain.counts["all-gather"]
    assert ours.counts["all-gather"] == 0 or explicit
    halves = 6 * 64 // 4 // 2  # Of each chunk, over the axis left to the compiler.
    assert sum(n for _, n in ours.permutes) < 6 * halves * 1.3
    exact = np.asarray(x, np.float64).reshape(4, 6, 64).sum(0)
    error = np.linalg.norm(jax.jit(f)(x) - exact)
    assert error <= 0.02 * np.linalg.norm(exact)


def test_a_call_where_the_axis_left_to_the_compiler_has_one_device():
    m = mesh(4, 1)
    f = jax.shard_map(
        traced_with("native", lambda v: jax_ring.psum(v, "x", wire="int8")),
        mesh=m,
        in_specs=P("x"),
        out_specs=P(),
        axis_names={"x"},
    )
    assert count(compiled(f, sharded(m, P("x"), (64,))).text) != {}


# --- batches --------------------------------------------------------------------------------------


def test_a_vmapped_collective_is_as_many_calls():
    def psum(v):
        return jax_ring.psum(v, "x", wire="bfloat16")

    x = np.random.default_rng(0).integers(-8, 8, (3, 5, N, 40)).astype(np.float32)
    one = traced_with("native", psum)
    two = jax.vmap(jax.vmap(one))
    single = compiled(over_mesh(one, out=P()), sharded(mesh(N), P("x"), (N, 40)))
    both = over_mesh(two, spec=P(None, None, "x"), out=P())
    hlo = compiled(both, sharded(mesh(N), P(None, None, "x"), x.shape))
    assert count(hlo.text) == count(single.text)
    assert len(hlo.permutes) == len(single.permutes)
    assert (jax.jit(both)(x)[:, :, 0] == x.sum(2)).all()


def test_a_vmapped_axis_inside_shard_map_is_one_call_for_all_its_ranks():
    def f(rows):
        g = traced_with("native", lambda v: jax_ring.psum(v, "i", wire="int8", algorithm="direct"))
        return jax.vmap(g, axis_name="i")(rows)

    x = values((2, 4, 1000), 0)
    m = mesh(2)
    g = over_mesh(f, m, P("x"), P("x"))
    found = count(compiled(g, sharded(m, P("x"), (8, 1000))).text)
    assert found == {"encode": 3, "reduce": 3, "decode": 4}
    rows = np.asarray(jax.jit(g)(x.reshape(8, 1000))).reshape(x.shape)
    for part, got in zip(x, rows, strict=True):
        on_mesh = per_rank(
            traced_with("native", lambda v: jax_ring.psum(v, "x", wire="int8")), 4, part
        )
        assert same_bits(got, on_mesh)


@pytest.mark.parametrize("name", ["int8", "bfloat16", None])
@pytest.mark.parametrize("mapped", ["all", "row", "buffer"])
def test_a_vmapped_chunk_is_one_call_with_the_same_bits(name, mapped):
    form = wire.get(name)
    codec = chunk_reduce.Codec(form, "sum", lax.add, "native")
    buffers = values((2, 3, 4, 70), 1)
    rows = np.array([[0, 2, 3], [1, 1, 0]], np.int32)
    axes = (0 if mapped != "row" else None, 0 if mapped != "buffer" else None)
    buffer = buffers if axes[0] == 0 else buffers[0, 0]
    row = rows if axes[1] == 0 else rows[0, 0]

    def one(buffer, row):
        message = codec.encode(buffer, row)
        more = codec.reduce(message, buffer, row, finish=True, encode=True)
        value = codec.reduce(message, buffer, row, finish=True, encode=False)
        return more, value, codec.decode(message, buffer, row)

    batched = jax.vmap(jax.vmap(one, in_axes=axes), in_axes=axes)
    found = count(compiled(batched, buffer, row).text)
    # Without a wire a message is a value.
    assert found == {"encode": 1, "reduce": 1 if form is None else 2, "decode": 1}
    results = jax.jit(batched)(buffer, row)
    single = jax.jit(one)
    for index in np.ndindex(2, 3):
        given = (buffer[index] if axes[0] == 0 else buffer, row[index] if axes[1] == 0 else row)
        for got, want in zip(results, single(*given), strict=True):
            assert same_bits(got[index], want)


# --- types and memory -----------------------------------------------------------------------------


def test_results_vary_where_any_operand_does():
    """A custom call that typed as replicated would let out_specs=P() pass on what differs."""
    found = {}

    @functools.partial(
        jax.shard_map,
        mesh=mesh(2, 4),
        in_specs=(P("x"), P("y"), P()),
        out_specs=P("x", "y"),
    )
    def f(buffer, row, message):
        codec = chunk_reduce.Codec(wire.get("int8"), "sum", lax.add, "native")
        results = {
            "encode": codec.encode(buffer, row[0]),
            "value": codec.reduce(message, buffer, row[0], finish=True, encode=False),
            "reduce": codec.reduce(message, buffer, row[0], finish=True, encode=True),
            "decode": codec.decode(message, buffer, row[0]),
            "only x": codec.encode(buffer, jnp.int32(0)),
        }
        found.update({name: _compat.varying(jax.typeof(v)) for name, v in results.items()})
        return results["decode"][:, None]

    given = (np.ones((6, 10), np.float32), np.zeros(4, np.int32), np.zeros(12, np.int8))
    assert jax.jit(f)(*given).shape == (6, 4, 10)
    both, x = frozenset("xy"), frozenset("x")
    assert found == {
        "encode": both,
        "value": both,
        "reduce": both,
        "decode": both,
        "only x": x,
    }


@pytest.mark.parametrize("name", ["int8", None])
def test_operands_are_left_as_they_were(name):
    def f(x):
        return x + traced_with("native", lambda v: jax_ring.psum(v, "x", wire=name))(x)

    g = over_mesh(f)
    x = jax.device_put(values((N * 100,), 0), NamedSharding(mesh(N), P("x")))
    before = np.array(x)
    kept = jax.jit(g)(x)
    assert same_bits(x, before)
    total = jax.jit(over_mesh(traced_with("xla", f)))(x)
    assert same_bits(kept, total)
    given_away = jax.jit(g, donate_argnums=0)(x)
    assert x.is_deleted()
    assert same_bits(given_away, kept)


# --- threads and processes ------------------------------------------------------------------------


def test_a_thousand_calls_from_many_threads():
    f = jax.jit(
        jax.vmap(traced_with("native", functools.partial(reduced_mean, "int8")), axis_name="x")
    )
    inputs = [values((4, 1000), seed) for seed in range(20)]
    wanted = [np.asarray(f(x)) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = pool.map(lambda i: same_bits(f(inputs[i % 20]), wanted[i % 20]), range(1000))
        assert all(results)


def reduced_mean(name, v):
    return jax_ring.pmean(v, "x", wire=name)


STEPS = textwrap.dedent("""
    import re
    import jax, jax.numpy as jnp, numpy as np, jax_ring
    from jax.sharding import Mesh, PartitionSpec as P

    def step(total, x):
        return total + jax_ring.psum(x, "x", wire="bfloat16") + jax_ring.psum(x, "x", wire="int8")

    mesh = Mesh(np.array(jax.devices()), ("x",))
    f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P()))
    total, x = jnp.zeros(1000), np.ones(8000, np.float32)
    assert "jax_ring_chunk_reduce" in f.lower(total, x).as_text()
    for _ in range(200):
        total = f(total, x)
    lost = np.abs(np.asarray(total) / (200 * 16) - 1).max()
    assert lost < 4e-3, lost
    print("done", len(jax.devices()))
""")


@pytest.mark.parametrize("cores", ["all", pytest.param("one", marks=pytest.mark.slow)])
def test_steps_that_are_not_awaited(cores):
    """In a process of its own, so that a deadlock fails; also with one core for eight devices."""
    if cores == "one" and shutil.which("taskset") is None:
        pytest.skip("needs taskset")
    core = str(min(os.sched_getaffinity(0)))
    prefix = ["taskset", "-c", core] if cores == "one" else []
    result = subprocess.run(
        [*prefix, sys.executable, "-c", STEPS],
        # NPROC: threads for the devices of several steps at once, without which XLA:CPU may wait
        # for itself, with two lax.psum as well.
        env={**os.environ, "JAX_RING_REDUCER": "native", "NPROC": "64"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.stdout == f"done {N}\n", result.stderr
