"""The CUDA kernels against NumPy, bit for bit.

Rows of a batch lie end to end, so that with an odd number of elements most of them are misaligned.
"""

import functools

import jax
import jax.numpy as jnp
import kernel_reference as reference
import ml_dtypes  # noqa: F401  NumPy learns the names of its types.
import numpy as np
import pytest
from gpu.calls import decode, encode, reduce

pytestmark = pytest.mark.gpu

# Odd ones misalign. cc/tests/chunk_reduce_cuda_driver.cu has many more.
SIZES = [1, 67, 4096, 70001]
BLOCKS = [2, 4, 16, 30, 32, 64, 128, 256, 384, 512, 1030, 2048, 8192, 1 << 40]


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    # Of sizes that differ by row, within the type's range.
    powers = {"float16": 10, "float8_e4m3fn": 3, "float8_e5m2": 8}.get(dtype, 20)
    exponents = rng.integers(-powers, powers, (*shape[:-1], 1))
    return (rng.normal(size=shape) * 2.0**exponents).astype(dtype)


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


@jax.jit
def combinations(received, buffer, row):
    """By each operation: the result, and the result in place of what was received."""
    call = functools.partial(reduce, received, buffer, row, wire="identity")
    return {op: (call(op=op), call(op=op, in_place=True)) for op in reference.OPS}


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("dtype", [*reference.FLOATS, *reference.INTEGERS])
def test_identity(rng, dtype):
    row = np.array([2, 0, 1], np.int32)
    for n in SIZES:
        received, buffer = numbers(rng, (3, n), dtype), numbers(rng, (3, 3, n), dtype)
        if np.dtype(dtype).kind in "fV" and n > 16:
            received[0, 3], buffer[1, 0, 5] = np.nan, np.nan
            if dtype != "float8_e4m3fn":
                received[2, 7] = -np.inf
        for op, results in combinations(received, buffer, row).items():
            want = reference.combined(op, received, buffer[np.arange(3), row])
            # Of the largest and the least, the sign of a zero is free.
            zero = np.zeros((), dtype)
            for got in results:
                if op in ("max", "min"):
                    reference.assert_bitwise(np.asarray(got) + zero, want + zero)
                else:
                    reference.assert_bitwise(got, want)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64"])
def test_rows_as_they_are(rng, dtype):
    row = np.array([2, 0, 1], np.int32)
    for n in SIZES:
        buffer, values = numbers(rng, (3, 3, n), dtype), numbers(rng, (3, n), dtype)
        got = encode(buffer, row, wire="identity")
        reference.assert_bitwise(got, buffer[np.arange(3), row])
        got = decode(values, jnp.asarray(buffer), row, wire="identity")
        buffer[np.arange(3), row] = values
        reference.assert_bitwise(got, buffer)


@functools.partial(jax.jit, static_argnames=("wire", "block", "factor"))
def everything(buffer, other, row, other_row, *seed, wire, block, factor):
    """What can be made of a chunk of each of two buffers, in one program."""
    how = {"wire": wire, "block": block}
    scaled = how | {"factor": factor}
    message = encode(other, other_row, *seed, **scaled)
    return (
        message,
        reduce(message, buffer, row, **scaled, value=True),
        reduce(message, buffer, row, *seed, **scaled),
        reduce(message, buffer, row, *seed, **scaled, in_place=True),
        decode(message, other, row, **how),
        decode(message, other, row, **how, in_place=True),
    )


def check_lossy(rng, wire, dtype, n, block, *, seed=None, factor=1.0, shared=False, special=False):
    """Compares `everything` with NumPy, in a batch of three."""
    buffer = numbers(rng, (1 if shared else 3, 2, n), dtype)
    other = numbers(rng, (3, 2, n), dtype)
    if special:
        tiny = np.float32(1e-40).astype(dtype)
        values = [np.inf, np.nan, -np.inf, tiny, -tiny, 0.0, -0.0, 65519.9, 65520.0]
        places = rng.integers(0, n, len(values))
        buffer[0, :, places] = np.array(values, dtype)[:, None]
        other[1, :, places] = np.array(values, dtype)[:, None]
    row, other_row = np.array([1, 0, 1], np.int32), np.array([0, 1, 1], np.int32)
    seeds = () if seed is None else (seed,)
    messages, values, *results, apart, in_place = everything(
        buffer, other, row, other_row, *seeds, wire=wire, block=block, factor=factor
    )
    stored = other.copy()
    for i in range(3):
        seed_i = None if seed is None else seed[i]
        x = reference.scaled(other[i, other_row[i]].astype(np.float32), factor)
        want = reference.encoded(wire, x, block, seed_i)
        reference.assert_bitwise(messages[i], want, wire)
        value = reference.decoded(wire, want, n, block)
        total = reference.summed(value, buffer[0 if shared else i, row[i]], factor)
        reference.assert_bitwise(values[i, 0], total)
        for result in results:
            reference.assert_bitwise(result[i], reference.encoded(wire, total, block, seed_i), wire)
        stored[i, row[i]] = value.astype(dtype)
    reference.assert_bitwise(apart, stored)
    reference.assert_bitwise(in_place, stored)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_casts(rng, wire, dtype):
    for n in SIZES:
        check_lossy(rng, wire, dtype, n, 0, factor=0.5)
    check_lossy(rng, wire, dtype, 515, 0, special=True)
    check_lossy(rng, wire, dtype, 515, 0, shared=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("wire", reference.BLOCK_WIRES)
def test_blocks(rng, wire, block, dtype):
    check_lossy(rng, wire, dtype, 4097, block, factor=0.5)
    check_lossy(rng, wire, dtype, 5120, block, special=True)


@pytest.mark.parametrize("wire", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("block", [1, 3, 5])
def test_odd_blocks(rng, wire, block):
    check_lossy(rng, wire, "float32", 515, block, shared=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_stochastic_rounding(rng, wire, dtype):
    seed = rng.integers(0, 2**32, (3, 2), np.uint32)
    for n, block in [(515, 256), (4096, 64), (70000, 8192)]:
        check_lossy(rng, wire, dtype, n, block, seed=seed)


@pytest.mark.parametrize("wire", ["identity", *reference.LOSSY_WIRES])
def test_without_a_batch(rng, wire):
    buffer, other = numbers(rng, (3, 1003), "float32"), numbers(rng, (3, 1003), "float32")
    row, batch, how = np.array(2, np.int32), np.array([2], np.int32), {"wire": wire, "block": 64}
    message = encode(other, row, **how)
    one = message[None]
    reference.assert_bitwise(one, np.asarray(encode(other[None], batch, **how)))
    calls = [(reduce, how), (decode, how)]
    if wire != "identity":
        calls.append((reduce, how | {"value": True}))
    for call, how in calls:
        got = call(message, buffer, row, **how)
        reference.assert_bitwise(got[None], np.asarray(call(one, buffer[None], batch, **how)))


def test_a_large_batch_of_small_rows(rng):
    # More than a grid has in its second dimension.
    batch, n = 70_000, 3
    received = rng.integers(-100, 100, (batch, n), np.int32)
    buffer = rng.integers(-100, 100, (batch, 1, n), np.int32)
    got = reduce(received, buffer, np.zeros(batch, np.int32), wire="identity")
    np.testing.assert_array_equal(got, received + buffer[:, 0])


def test_rows_outside_are_the_nearest(rng):
    buffer = numbers(rng, (4, 3, 100), "float32")
    row = np.array([-5, 3, 2**31 - 1, -(2**31)], np.int32)
    got = encode(buffer, row, wire="identity")
    reference.assert_bitwise(got, buffer[np.arange(4), [0, 2, 2, 0]])


@pytest.mark.parametrize("wire", ["identity", *reference.LOSSY_WIRES])
@pytest.mark.parametrize("n", [1, 67, 4096])
def test_results_in_place_of_their_operands(rng, wire, n):
    buffer, other = numbers(rng, (3, 1, n), "float32"), numbers(rng, (3, 1, n), "float32")
    row, how = np.zeros(3, np.int32), {"wire": wire, "block": 64}
    message = np.asarray(encode(other, row, **how))
    calls = [
        (message, lambda place, **where: reduce(place, buffer, row, **how, **where)),
        (buffer, lambda place, **where: decode(message, place, row, **how, **where)),
    ]
    if wire != "identity":
        how_value = how | {"value": True}
        calls.append(
            (buffer, lambda sums, **where: reduce(message, sums, row, **how_value, **where))
        )
    for operand, call in calls:
        want = np.asarray(call(operand))
        donated = jnp.array(operand)
        address = donated.unsafe_buffer_pointer()
        got = call(donated, in_place=True)
        assert got.unsafe_buffer_pointer() == address
        reference.assert_bitwise(got, want)


@pytest.mark.parametrize("wire", ["identity", *reference.LOSSY_WIRES])
@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0), (2, 0, 0)])
def test_nothing_to_do(wire, shape):
    buffer, row, how = np.ones(shape, np.float32), np.zeros(shape[0], np.int32), {"wire": wire}
    message = encode(buffer, row, block=4, **how)
    assert message.shape == (shape[0], reference.message_size(wire, shape[2], 4))
    assert reduce(message, buffer, row, block=4, **how).shape == message.shape
    reference.assert_bitwise(decode(message, buffer, row, block=4, **how), buffer)


# More elements than an int32 counts.
HUGE = 2**31 + 8


@pytest.fixture
def memory(gpu):
    stats = gpu.memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    if free < 24 << 30:
        pytest.skip(f"needs 24 GiB of free GPU memory, there are {free >> 30}")


@functools.partial(jax.jit, static_argnames="dtype")
def pattern(factor: np.uint32, dtype: np.dtype) -> jax.Array:
    """[1, 1, HUGE], which does not repeat."""
    bits = (jax.lax.iota(jnp.uint32, HUGE) * factor) >> 16
    return bits.astype(jnp.int16).astype(dtype)[None, None]


def piece(x: jax.Array, first: int, count: int) -> np.ndarray:
    """Some of the last dimension; slices, unlike indices, are of 64 bits."""
    return np.asarray(jax.lax.slice_in_dim(x, first, first + count, axis=-1)).reshape(count)


@pytest.mark.usefixtures("memory")
def test_huge_identity():
    received = pattern(np.uint32(2654435761), np.dtype(np.int8))[0]
    local = pattern(np.uint32(2246822519), np.dtype(np.int8))
    got = reduce(received, local, np.zeros(1, np.int32), wire="identity")
    assert bool(jax.jit(lambda a, b, c: jnp.all(a + b[0] == c))(received, local, got))


@pytest.mark.usefixtures("memory")
def test_huge_int8_wire():
    block, row = 256, np.zeros(1, np.int32)
    buffer = pattern(np.uint32(2654435761), np.dtype(jnp.bfloat16))
    got = encode(buffer, row, wire="int8", block=block)
    got = reduce(got, buffer, row, wire="int8", block=block, factor=0.5, in_place=True)
    stored = decode(got, buffer, row, wire="int8", block=block)
    scales = got.shape[1] - 2 * -(-HUGE // block)
    last = HUGE // block * block - 4 * block  # And what follows has a block that is cut short.
    for first, n in ((0, 8 * block), (last, HUGE - last)):
        x = piece(buffer, first, n).astype(np.float32)
        once = reference.decoded("int8", reference.encoded("int8", x, block), n, block)
        want = reference.encoded("int8", reference.summed(once, x, 0.5), block)
        values = piece(got, first, n)
        found = piece(got, scales + 2 * (first // block), 2 * -(-n // block))
        reference.assert_bitwise(np.concatenate([values, found]), want)
        reference.assert_bitwise(
            piece(stored, first, n),
            reference.decoded("int8", want, n, block).astype(buffer.dtype),
        )


INT8 = {"wire": "int8", "block": 4}
BUFFER = np.zeros((2, 3, 10), np.float32)
ROW = np.zeros(2, np.int32)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: encode(BUFFER, ROW[:1], **INT8), "row has batch 1, but 2 is wanted"),
        (lambda: encode(BUFFER, ROW, wire="identity", factor=2), "factor is 2"),
        (lambda: encode(BUFFER[:, :0], ROW, **INT8), "buffer has 0 chunks"),
        (
            lambda: reduce(np.zeros((2, 15), np.int8), BUFFER, ROW, **INT8),
            "received has 15 elements a row, but 10 elements in blocks of 4 on wire int8 make 16",
        ),
        (
            lambda: reduce(np.zeros((2, 16), np.int8), BUFFER, ROW, op="max", **INT8),
            "op is 'max', but wire int8 takes sum only",
        ),
        (
            lambda: decode(np.zeros((2, 16), np.uint8), BUFFER, ROW, **INT8),
            "message has dtype U8, but S8 is wanted",
        ),
    ],
)
def test_errors(call, match):
    with pytest.raises(jax.errors.JaxRuntimeError, match=match) as error:
        jax.block_until_ready(call())
    assert "INVALID_ARGUMENT" in str(error.value)
