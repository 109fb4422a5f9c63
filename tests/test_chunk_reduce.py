"""Native code for the work on chunks: the bits of plain JAX, where calls are made, how they batch."""

import collections
import concurrent.futures
import contextlib
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
import ml_dtypes
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
from jax_ring import _compat, chunk_reduce, native, schedules, wire

pytestmark = pytest.mark.skipif(not native.status().available, reason=str(native.status()))

N = 8
ROOT = pathlib.Path(__file__).parents[1]
SPECIAL = np.array(
    [0, -0.0, 1e-40, -1e-45, 2.0**-126, -(2.0**-126), 2.0**-125, 6e-8, 1e-3, 1, -1, 1.5, 65519]
    + [65520, -1e30, 3e38, -3.4e38, np.inf, -np.inf, np.nan],
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


def calls(text):
    """How often each of our custom calls occurs in a program's text."""
    return collections.Counter(re.findall(r"jax_ring_chunk_(\w+)\"|@jax_ring_chunk_(\w+)", text))


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


def with_both(f, *args):
    """What f gives on each rank by native code and by plain JAX."""
    return [per_rank(traced_with(reducer, f), N, *args) for reducer in ("native", "xla")]


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


@pytest.mark.parametrize("op", OPS)
def test_collectives_without_a_wire(op):
    """Every dtype in one program, on ranks that are rows of a vmap."""
    n, dtypes = 3, [*FLOATS, *INTEGERS]
    rng = np.random.default_rng(OPS.index(op))

    def numbers(dtype):
        dtype = np.dtype(dtype)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            return rng.integers(info.min, info.max, (n, 3, 50), dtype, endpoint=True)
        x = values((n, 3, 50), 7, 0.05)
        # Which of two zeros is the larger is nowhere said.
        return np.where(x == 0, 1, x).astype(dtype) if op in ("max", "min") else x.astype(dtype)

    def f(tree):
        def each(v):
            return (
                jax_ring.all_reduce(v[0], "x", op, algorithm="ring", reduce_dtype=v.dtype),
                jax_ring.reduce_scatter(v, "x", op, algorithm="direct", reduce_dtype=v.dtype),
            )

        return {name: each(v) for name, v in tree.items()}

    with jax.enable_x64(True), np.errstate(all="ignore"):
        x = {dtype: numbers(dtype) for dtype in dtypes}
        fast, plain = (
            jax.jit(jax.vmap(traced_with(reducer, f), axis_name="x"))
            for reducer in ("native", "xla")
        )
        assert count(fast.lower(x).compile().as_text())["reduce"] >= 2 * len(dtypes)
        jax.tree.map(lambda a, b: assert_bitwise(a, np.asarray(b)), fast(x), plain(x))
