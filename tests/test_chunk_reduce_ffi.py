"""The handlers of the chunk kernels, called directly, against tests/kernel_reference.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import (
    FLOATS,
    INTEGERS,
    LOSSY_WIRES,
    OPS,
    assert_bitwise,
    combined,
    decoded,
    encoded,
    message_dtype,
    message_size,
    scaled,
    summed,
)

from jax_ring import native

pytestmark = pytest.mark.skipif(not native.status().available, reason=str(native.status()))


def attributes(wire: str, block: int = 0, **others) -> dict:
    kinds = {"factor": np.float32, "op": str}
    return {
        "wire": wire,
        "block": np.int64(block),
        **{name: kinds[name](value) for name, value in others.items()},
    }


def encode(buffer, row, *seed, wire, block=0, factor=1.0, message=None, aliases=None):
    if message is None:
        dtype = buffer.dtype if wire == "identity" else message_dtype(wire)
        size = message_size(wire, buffer.shape[-1], block)
        message = jax.ShapeDtypeStruct((buffer.shape[0], size), dtype)
    call = jax.ffi.ffi_call("jax_ring_chunk_encode", message, input_output_aliases=aliases)
    return call(buffer, row, *seed, **attributes(wire, block, factor=factor))


def reduce(
    received, buffer, row, *seed, wire, block=0, op="sum", factor=1.0, out=None, aliases=None
):
    out = jax.ShapeDtypeStruct(received.shape, received.dtype) if out is None else out
    call = jax.ffi.ffi_call("jax_ring_chunk_reduce", out, input_output_aliases=aliases)
    return call(received, buffer, row, *seed, **attributes(wire, block, op=op, factor=factor))


def decode(message, buffer, row, *, wire, block=0, out=None, aliases=None):
    out = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) if out is None else out
    call = jax.ffi.ffi_call("jax_ring_chunk_decode", out, input_output_aliases=aliases)
    return call(message, buffer, row, **attributes(wire, block))


@functools.partial(jax.jit, static_argnames=("wire", "block", "factor"))
def everything(buffer, other, row, other_row, *seed, wire, block, factor=1.0):
    """What each target makes of two buffers, of one chunk of each."""
    batch, _, n = other.shape
    message = encode(other, other_row, *seed, wire=wire, block=block, factor=factor)
    how = {"wire": wire, "block": block}
    values = jax.ShapeDtypeStruct((batch, n), jnp.float32)
    return (
        message,
        reduce(message, buffer, row, *seed, **how, factor=factor),
        reduce(message, buffer, row, **how, factor=factor, out=values),
        decode(message, other, other_row, **how),
    )


def check_everything(buffer, other, wire, block, seed=None, factor=1.0):
    """Compares `everything` with NumPy; buffer may have a batch of 1."""
    batch, chunks, n = other.shape
    row = np.arange(batch, dtype=np.int32) % buffer.shape[1]
    other_row = (chunks - 1 - np.arange(batch, dtype=np.int32)) % chunks
    seeds = [] if seed is None else [seed]
    message, again, values, stored = everything(
        buffer, other, row, other_row, *seeds, wire=wire, block=block, factor=factor
    )
    want_stored = other.copy()
    for i in range(batch):
        seed_i = None if seed is None else seed[i]
        x = scaled(other[i, other_row[i]].astype(np.float32), factor, flush=True)
        want = encoded(wire, x, block, seed_i)
        assert_bitwise(message[i], want, wire)
        value = decoded(wire, want, n, block)
        local = buffer[i if buffer.shape[0] > 1 else 0, row[i]]
        total = summed(value, local, factor, flush=True)
        assert_bitwise(values[i], total)
        assert_bitwise(again[i], encoded(wire, total, block, seed_i), wire)
        want_stored[i, other_row[i]] = value.astype(other.dtype)
    assert_bitwise(stored, want_stored)


@pytest.mark.parametrize("wire", LOSSY_WIRES)
def test_a_sum_may_take_the_place_of_the_accumulator(wire):
    rows, n, zero = 2, 1003, np.zeros(2, np.int32)
    buffer = numbers((rows, 1, n))
    message = encode(numbers((rows, 1, n), seed=1), zero, wire=wire, block=64)
    how = {"wire": wire, "block": 64}
    apart = reduce(message, buffer, zero, **how, out=result(rows, n, dtype=np.float32))
    out = result(rows, 1, n, dtype=np.float32)
    donated = jax.jit(
        lambda accumulator: reduce(message, accumulator, zero, **how, out=out, aliases={1: 0}),
        donate_argnums=0,
    )
    assert_bitwise(donated(jnp.asarray(buffer))[:, 0], np.asarray(apart))


def numbers(shape, seed=0, dtype="float32") -> np.ndarray:
    """Normally distributed, of sizes that differ by block."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, (*shape[:-1], 1))).astype(dtype)


# Every target, every wire.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire", LOSSY_WIRES)
def test_all_targets_of_a_lossy_wire(wire, dtype):
    for n, block in [(1, 2), (67, 16), (515, 256), (2051, 1 << 40), (3101, 1030)]:
        check_everything(
            numbers((2, 3, n), 1, dtype), numbers((2, 2, n), 2, dtype), wire, block, factor=0.5
        )


@pytest.mark.parametrize("wire", LOSSY_WIRES)
def test_one_buffer_serves_the_whole_batch(wire):
    check_everything(numbers((1, 2, 300)), numbers((3, 2, 300), 1), wire, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_stochastic_rounding(wire, dtype):
    seed = np.random.default_rng(3).integers(0, 2**32, (2, 2), dtype=np.uint32)
    check_everything(
        numbers((2, 3, 515), 1, dtype), numbers((2, 2, 515), 2, dtype), wire, 256, seed=seed
    )


@pytest.mark.parametrize("wire", LOSSY_WIRES)
def test_special_values(wire):
    # A block of each, and one of them all; the buffer has them at other places.
    tiny, huge = np.float32(1e-40), np.finfo(np.float32).max
    specials = [0.0, -0.0, tiny, -tiny, huge, -huge, np.inf, -np.inf, np.nan, 65519.9, 65520, 6e-8]
    blocks = [np.full(8, value) for value in specials]
    blocks += [np.resize(specials[:4], 8), np.resize(specials, 16)]
    other = np.concatenate([*blocks, np.linspace(-1, 1, 8)]).astype(np.float32)[None, None]
    for shift in (0, 5, 8):
        check_everything(np.roll(other, shift, -1), other, wire, 8)


def test_stochastic_rounding_takes_subnormals_for_zero():
    # Whether or not the processor does. A scale of 2^-125 is the least there is.
    seed = np.array([[1, 2]], np.uint32)
    other = np.full((1, 1, 64), 1e-38, np.float32)
    check_everything(np.zeros_like(other), other, "int8", 64, seed=seed)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_identity(dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        if dtype in FLOATS:
            a, b = (rng.normal(size=(2, 3, 131)) * 20 for _ in range(2))
            a[..., :6] = [np.nan, 1, np.nan, np.inf, 0, 448]
            b[..., :6] = [1, np.nan, np.nan, -np.inf, 0, 448]
        else:
            info = np.iinfo(dtype)
            a, b = (
                rng.integers(info.min, info.max, (2, 3, 131), dtype, endpoint=True)
                for _ in range(2)
            )
        with np.errstate(all="ignore"):
            a, b = a.astype(dtype), b.astype(dtype)
        row = np.array([2, 0], np.int32)

        @jax.jit
        def run(a, b):
            message = encode(a, row, wire="identity")
            ops = [reduce(message, b, row, wire="identity", op=op) for op in OPS]
            return message, ops, decode(message, b, row, wire="identity")

        message, results, stored = run(a, b)
        chunk, local = a[np.arange(2), row], b[np.arange(2), row]
        assert_bitwise(message, chunk)
        for got, op in zip(results, OPS, strict=True):
            assert_bitwise(got, combined(op, chunk, local))
        want = b.copy()
        want[np.arange(2), row] = chunk
        assert_bitwise(stored, want)


# In place.


@pytest.mark.parametrize("wire", ["identity", *LOSSY_WIRES])
def test_results_in_place_of_their_operands(wire):
    n, block = 1031, 256
    buffer, other = numbers((2, 2, n)), numbers((2, 2, n), 1)
    row = np.array([1, 0], np.int32)
    run = functools.partial(jax.jit, donate_argnums=0)
    how = {"wire": wire, "block": block}
    make = jax.jit(functools.partial(encode, **how))
    kept = np.asarray(make(other, row))  # Views a buffer of its own: one in use is not donated.
    message = make(other, row)

    want = jax.jit(functools.partial(reduce, **how))(kept, buffer, row)
    in_place = run(functools.partial(reduce, **how, aliases={0: 0}))
    address = message.unsafe_buffer_pointer()
    got = in_place(message, buffer, row)
    assert got.unsafe_buffer_pointer() == address
    assert_bitwise(got, np.asarray(want), wire)

    want = jax.jit(functools.partial(decode, **how))(kept, buffer, row)

    def store(buffer, message):
        return decode(message, buffer, row, **how, aliases={1: 0})

    donated = jnp.array(buffer)
    address = donated.unsafe_buffer_pointer()
    got = run(store)(donated, kept)
    assert got.unsafe_buffer_pointer() == address
    assert_bitwise(got, np.asarray(want))


# Sizes.


@pytest.mark.parametrize("wire", ["identity", *LOSSY_WIRES])
@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0), (0, 0, 0), (2, 0, 0)])
def test_nothing_to_do(wire, shape):
    # No index of a chunk is looked at, where there is nothing.
    row = np.full(shape[0], 99, np.int32)
    buffer = np.ones(shape, np.float32)
    message = encode(buffer, row, wire=wire, block=2)
    assert message.shape == (shape[0], message_size(wire, shape[2], 2))
    assert reduce(message, buffer, row, wire=wire, block=2).shape == message.shape
    assert_bitwise(decode(message, buffer, row, wire=wire, block=2), buffer)


@settings(max_examples=10, deadline=None)
@given(
    wire=st.sampled_from(LOSSY_WIRES),
    n=st.integers(1, 700),
    block=st.integers(1, 400),
    seed=st.integers(0, 2**32 - 1),
    special=st.floats(width=32),
)
def test_any_size_and_block(wire, n, block, seed, special):
    buffer, other = numbers((1, 2, n), seed), numbers((2, 2, n), seed + 1)
    other[0, :, seed % n] = special
    check_everything(buffer, other, wire, block + block % 2 if wire == "int4" else block)


# Errors. Each names the operand, and both what it is and what is wanted.


def operand(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


def result(*shape, dtype=np.int8):
    return jax.ShapeDtypeStruct(shape, dtype)


ROW = jnp.zeros(2, jnp.int32)
SEED = jnp.zeros((2, 2), jnp.uint32)
INT8 = {"wire": "int8", "block": 4}  # Ten elements make 16.
BUFFER = operand(2, 3, 10)
MESSAGE = operand(2, 16, dtype=jnp.int8)

ENCODE_ERRORS = {
    "message has 15 elements a row, but 10 elements in blocks of 4 on wire int8 make 16": (
        (BUFFER, ROW),
        INT8 | {"message": result(2, 15)},
    ),
    "message has 9 elements a row, but 10 elements on wire bfloat16 make 10": (
        (BUFFER, ROW),
        {"wire": "bfloat16", "message": result(2, 9, dtype=np.uint16)},
    ),
    "message has dtype U8, but S8 is wanted": (
        (BUFFER, ROW),
        INT8 | {"message": result(2, 16, dtype=np.uint8)},
    ),
    "message has rank 1, but 2 is wanted: .batch, elements of a message.": (
        (BUFFER, ROW),
        INT8 | {"message": result(32)},
    ),
    "message has batch 3, but 2 is wanted": ((BUFFER, ROW), INT8 | {"message": result(3, 16)}),
    "buffer has rank 2, but 3 is wanted: .batch, chunks, n.": (
        (operand(2, 10), ROW),
        INT8 | {"message": result(2, 16)},
    ),
    "buffer has dtype F16, but wire int8 carries F32 and BF16 only": (
        (operand(2, 3, 10, dtype=jnp.float16), ROW),
        INT8,
    ),
    "buffer has dtype C64, but an integer of 8 to 64 bits or one of F64, F32": (
        (operand(2, 3, 10, dtype=jnp.complex64), ROW),
        {"wire": "identity"},
    ),
    "row has dtype U32, but S32 is wanted": ((BUFFER, ROW.astype(jnp.uint32)), INT8),
    "row has rank 2, but 1 is wanted: .batch.": ((BUFFER, ROW[:, None]), INT8),
    "row has batch 1, but 2 is wanted": ((BUFFER, ROW[:1]), INT8),
    r"row.1. is 3, but buffer has 3 chunks": ((BUFFER, jnp.array([0, 3], jnp.int32)), INT8),
    r"row.0. is -1, but buffer has 3 chunks": ((BUFFER, jnp.array([-1, 0], jnp.int32)), INT8),
    "wire is 'int3', but one of identity, bfloat16, float16, float8_e4m3fn, .* is wanted": (
        (BUFFER, ROW),
        {"wire": "int3", "message": result(2, 16)},
    ),
    "block is 0, but at least 1 is wanted": (
        (BUFFER, ROW),
        {"wire": "int8", "block": 0, "message": result(2, 16)},
    ),
    "block is -2, but at least 1 is wanted": (
        (BUFFER, ROW),
        {"wire": "int4", "block": -2, "message": result(2, 16)},
    ),
    "block is 3, but wire int4 wants an even one": (
        (BUFFER, ROW),
        {"wire": "int4", "block": 3},
    ),
    "factor is 0.5, but wire identity wants 1": (
        (BUFFER, ROW),
        {"wire": "identity", "factor": 0.5},
    ),
    "a seed is given, but wire float8_e5m2 does not round at random: int8 and int4 do": (
        (BUFFER, ROW, SEED),
        {"wire": "float8_e5m2", "block": 4},
    ),
    "seed has dtype S32, but U32 is wanted": ((BUFFER, ROW, SEED.astype(jnp.int32)), INT8),
    "seed has rank 1, but 2 is wanted": ((BUFFER, ROW, SEED[0]), INT8),
    "seed has batch 1, but 2 is wanted": ((BUFFER, ROW, SEED[:1]), INT8),
    "seed has words 1, but 2 is wanted": ((BUFFER, ROW, SEED[:, :1]), INT8),
    "2 operands follow row, but at most one, seed, is wanted": ((BUFFER, ROW, SEED, SEED), INT8),
}

REDUCE_ERRORS = {
    "received has 15 elements a row, but 10 elements in blocks of 4 on wire int8 make 16": (
        (MESSAGE[:, :15], BUFFER, ROW),
        INT8,
    ),
    "received has dtype F32, but S8 is wanted": ((MESSAGE.astype(np.float32), BUFFER, ROW), INT8),
    "received has rank 1, but 2 is wanted": ((MESSAGE[0], BUFFER, ROW), INT8),
    "buffer has batch 3, but received has 2, and that or 1 is wanted": (
        (MESSAGE, operand(3, 3, 10), ROW),
        INT8,
    ),
    "buffer has rank 1, but 3 is wanted": ((MESSAGE, operand(10), ROW), INT8),
    "row has batch 1, but 2 is wanted": ((MESSAGE, operand(1, 3, 10), ROW[:1]), INT8),
    "row.0. is 7, but buffer has 3 chunks": ((MESSAGE, BUFFER, ROW + 7), INT8),
    "out has dtype U8, but S8, to travel on, or F32 is wanted": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(2, 16, dtype=np.uint8)},
    ),
    "out has 15 elements a row, but 10 elements in blocks of 4 on wire int8 make 16": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(2, 15)},
    ),
    "out has n 16, but 10 is wanted": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(2, 16, dtype=np.float32)},
    ),
    "out has batch 1, but 2 is wanted": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(1, 10, dtype=np.float32)},
    ),
    "out has rank 1, but 3 is wanted: .batch, 1, n. or .batch, n.": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(10, dtype=np.float32)},
    ),
    "out has chunks 2, but 1 is wanted": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(2, 2, 10, dtype=np.float32)},
    ),
    "out has dtype S32, but F32 is wanted": (
        (operand(2, 10), BUFFER, ROW),
        {"wire": "identity", "out": result(2, 10, dtype=np.int32)},
    ),
    "op is 'mean', but one of sum, max, min, prod is wanted": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"op": "mean"},
    ),
    "op is 'max', but wire int8 takes sum only": ((MESSAGE, BUFFER, ROW), INT8 | {"op": "max"}),
    "factor is 2, but wire identity wants 1": (
        (operand(2, 10), BUFFER, ROW),
        {"wire": "identity", "factor": 2.0},
    ),
    "a seed is given, but wire bfloat16 does not round at random": (
        (operand(2, 10, dtype=jnp.uint16), BUFFER, ROW, SEED),
        {"wire": "bfloat16"},
    ),
}

DECODE_ERRORS = {
    "message has 16 elements a row, but 10 elements in blocks of 10 on wire int8 make 12": (
        (MESSAGE, BUFFER, ROW),
        {"wire": "int8", "block": 10},
    ),
    "message has dtype U8, but S8 is wanted": ((MESSAGE.astype(jnp.uint8), BUFFER, ROW), INT8),
    "message has batch 1, but 2 is wanted": ((MESSAGE[:1], BUFFER, ROW), INT8),
    "buffer has dtype S32, but wire int8 carries F32 and BF16 only": (
        (MESSAGE, BUFFER.astype(jnp.int32), ROW),
        INT8,
    ),
    "row.1. is 3, but buffer has 3 chunks": (
        (MESSAGE, BUFFER, jnp.array([0, 3], jnp.int32)),
        INT8,
    ),
    "out has dtype BF16, but F32 is wanted": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(2, 3, 10, dtype=jnp.bfloat16)},
    ),
    "out has rank 2, but 3 is wanted: .batch, chunks, n.": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(6, 10, dtype=np.float32)},
    ),
    "out has batch 1, but 2 is wanted": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(1, 3, 10, dtype=np.float32)},
    ),
    "out has chunks 2, but 3 is wanted": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(2, 2, 10, dtype=np.float32)},
    ),
    "out has n 9, but 10 is wanted": (
        (MESSAGE, BUFFER, ROW),
        INT8 | {"out": result(2, 3, 9, dtype=np.float32)},
    ),
}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        *((encode, message) for message in ENCODE_ERRORS),
        *((reduce, message) for message in REDUCE_ERRORS),
        *((decode, message) for message in DECODE_ERRORS),
    ],
)
def test_errors(target, message):
    cases = {encode: ENCODE_ERRORS, reduce: REDUCE_ERRORS, decode: DECODE_ERRORS}[target]
    operands, how = cases[message]
    match = f"jax_ring_chunk_{target.__name__}: {message}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=match) as error:
        jax.block_until_ready(target(*operands, **how))
    assert "INVALID_ARGUMENT" in str(error.value)
