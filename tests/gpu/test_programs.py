"""The CUDA kernels inside programs: in order, in CUDA graphs, and in collectives."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import kernel_reference as reference
import numpy as np
import pytest
from gpu.calls import decode, encode, reduce

import jax_ring

pytestmark = pytest.mark.gpu


def test_in_order_with_producers_and_consumers():
    """A thousand rounds of program after program, none of which is waited for."""
    block, n, rows = 256, 1 << 20, 4
    how = {"wire": "int8", "block": block}

    @jax.jit
    def produce(total, i):
        return total + i, total * 0 + 127 * (i % 7 - 3)

    @jax.jit
    def consume(total, stored):
        return total + stored[0, 1]

    # Multiples of 127, all the same in a block, travel exactly.
    total = jnp.zeros((1, n), jnp.float32)
    buffer = jnp.full((1, rows, n), 127, jnp.float32)
    want = 0.0
    row = jnp.ones(1, jnp.int32)
    for i in range(1000):
        _, x = produce(total, jnp.float32(i))
        sent = encode(x[:, None], jnp.zeros(1, jnp.int32), **how)
        summed = reduce(sent, buffer, row, in_place=True, **how)
        stored = decode(summed, buffer, row, **how)
        total = consume(total, stored)
        want += 127 * (i % 7 - 3 + 1)
    got = np.asarray(total)
    np.testing.assert_array_equal(got, np.full_like(got, want))


GRAPH = """
    import jax, jax.numpy as jnp, numpy as np
    import jax_ring
    import kernel_reference as reference
    from gpu.calls import decode, encode, reduce
    from gpu.test_programs import over_ranks

    how = {"wire": "int8", "block": 64}
    n = 4096

    @jax.jit
    def step(other, buffer, row):
        message = encode(other + 1, jnp.zeros(1, jnp.int32), **how)
        message = reduce(message, buffer * 2, row, **how)
        return decode(message, buffer - 1, row, **how) * 2

    rng = np.random.default_rng(0)
    for i in range(100):  # Of which all but the first few replay what was recorded.
        other = rng.normal(size=(1, 1, n)).astype(np.float32)
        buffer = rng.normal(size=(1, 3, n)).astype(np.float32)
        row = np.array([i % 3], np.int32)
        got = step(other, buffer, row)
        sent = reference.encoded("int8", other[0, 0] + 1, 64)
        local = buffer[0, i % 3] * 2
        total = reference.summed(reference.decoded("int8", sent, n, 64), local, 1.0)
        want = buffer - 1
        want[0, i % 3] = reference.decoded("int8", reference.encoded("int8", total, 64), n, 64)
        reference.assert_bitwise(got, want * 2)

    def psum(x):
        return jax_ring.psum(x, "i", wire="int8")

    native, plain = (over_ranks(psum, reducer, (4, n), "float32") for reducer in ("native", "xla"))
    for _ in range(20):
        x = rng.normal(size=(4, n)).astype(np.float32)
        reference.assert_bitwise(native(x), np.asarray(plain(x)))
    print("120 replays")
"""
GRAPH_FLAGS = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"


def test_replayed_in_cuda_graphs():
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {GRAPH_FLAGS}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(GRAPH)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "120 replays\n", done.stderr


def over_ranks(f, reducer, shape, dtype):
    """Compiles f for one GPU with all ranks on it: the rows of a vmapped axis."""
    with jax_ring.config(reducer=reducer):
        mapped = jax.jit(jax.vmap(f, axis_name="i"))
        compiled = mapped.lower(jax.ShapeDtypeStruct(shape, dtype)).compile()
    assert ("jax_ring_chunk_reduce" in compiled.as_text()) == (reducer == "native")
    return compiled


def check_that_of_plain_jax(f, x):
    native, plain = (over_ranks(f, reducer, x.shape, x.dtype) for reducer in ("native", "xla"))
    reference.assert_bitwise(native(x), np.asarray(plain(x)))


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("wire", reference.LOSSY_WIRES)
def test_a_whole_collective_is_that_of_plain_jax(rng, wire, algorithm):
    ranks, dtype = (4, "float32") if algorithm == "ring" else (5, "bfloat16")
    x = rng.normal(size=(ranks, 12345)).astype(dtype)
    check_that_of_plain_jax(lambda x: jax_ring.psum(x, "i", wire=wire, algorithm=algorithm), x)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_its_halves_are_too(rng, wire):
    def halves(x):
        scattered = jax_ring.psum_scatter(x, "i", tiled=True, wire=wire)
        return jax_ring.all_gather(scattered, "i", tiled=True, wire=wire)

    check_that_of_plain_jax(halves, rng.normal(size=(4, 4 * 1003)).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
@pytest.mark.parametrize("op", ["psum", "pmax", "pmin"])
def test_a_whole_collective_without_a_wire(rng, op, dtype):
    x = (rng.normal(size=(5, 12345)) * 8).astype(dtype)
    check_that_of_plain_jax(lambda x: getattr(jax_ring, op)(x, "i"), x)
