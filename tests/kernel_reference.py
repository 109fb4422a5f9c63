"""What the chunk kernels are to give, in NumPy and ml_dtypes.

It shares nothing with the implementations: integers and small floats are rounded by NumPy and
ml_dtypes. The formats are the same on all processors; only sums and products of float32s differ,
by whether subnormals are taken for zeros (`flush`), as XLA:CPU has it.
"""

import ml_dtypes
import numpy as np

BLOCK_WIRES = ["int8", "int4", "float8_e4m3fn", "float8_e5m2"]
LOSSY_WIRES = ["bfloat16", "float16", *BLOCK_WIRES]
FLOATS = ["float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
OPS = ["sum", "max", "min", "prod"]

# The types of values, their largest, and the least scales.
_VALUES = {
    "int8": (np.dtype(np.int8), 127.0, 2.0**-125),
    "int4": (np.dtype(np.int8), 7.0, 2.0**-125),
    "float8_e4m3fn": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0, 2.0**-116),
    "float8_e5m2": (np.dtype(ml_dtypes.float8_e5m2), 57344.0, 2.0**-109),
}
_LEAST_NORMAL = np.float32(2.0**-126)
_CASTS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def message_dtype(wire: str) -> np.dtype:
    if wire in _CASTS:
        return np.dtype(np.uint16)
    return np.dtype(np.int8 if wire == "int8" else np.uint8)


def message_size(wire: str, n: int, block: int) -> int:
    if wire not in BLOCK_WIRES:
        return n
    values = -(-n // 2) if wire == "int4" else n
    return values + values % 2 + 2 * -(-n // block)


@np.errstate(all="ignore")
def encoded(wire: str, x: np.ndarray, block: int, seed: np.ndarray | None = None) -> np.ndarray:
    """The message of float32s [n]."""
    if wire in _CASTS:
        return x.astype(_CASTS[wire]).view(np.uint16)
    dtype, largest, floor = _VALUES[wire]
    n = x.size
    block = min(block, n)
    blocks = np.zeros((-(-n // block), block), np.float32)
    blocks.reshape(-1)[:n] = x
    finite = np.isfinite(blocks).all(-1)
    scale = _rounded_up(np.abs(blocks).max(-1) * np.float32(1 / largest))
    scale = np.where(finite, np.maximum(scale, np.float32(floor)), np.float32(np.nan))
    y = (blocks * (np.float32(1) / scale)[:, None])[finite]
    codes = np.zeros(blocks.shape, np.uint8)
    if dtype != np.int8:
        rounded = np.clip(y, -largest, largest).astype(dtype)
    elif seed is None:
        rounded = np.clip(np.rint(y), -largest, largest).astype(np.int8)
    else:
        index = np.arange(blocks.size, dtype=np.uint64).reshape(blocks.shape)[finite]
        draw = _mixed((_mixed((index + seed[0]) % 2**32) + seed[1]) % 2**32) >> 17
        # Of subnormals, on all processors, as of zeros.
        normal = np.where(np.abs(blocks[finite]) < _LEAST_NORMAL, np.float32(0), y)
        up = np.floor((np.rint(normal.astype(np.float64) * 2**15) + draw) / 2**15)
        rounded = np.clip(up, -largest, largest).astype(np.int8)
    codes[finite] = rounded.view(np.uint8)
    codes = codes.reshape(-1)[:n]
    if wire == "int4":
        codes = np.append(codes, np.zeros(n % 2, np.uint8))
        codes = (codes[0::2] & 15) | (codes[1::2] << 4)
    codes = np.append(codes, np.zeros(codes.size % 2, np.uint8))
    scales = np.where(finite, scale.view(np.uint32) >> 16, 0x7FC0).astype("<u2")
    return np.append(codes, scales.view(np.uint8)).view(message_dtype(wire))


@np.errstate(all="ignore")
def decoded(wire: str, message: np.ndarray, n: int, block: int) -> np.ndarray:
    """The float32s [n] of a message."""
    if wire in _CASTS:
        return message.view(_CASTS[wire]).astype(np.float32)
    message = message.view(np.uint8)
    blocks = -(-n // block)
    scales = message[message.size - 2 * blocks :].copy().view("<u2").astype(np.uint32) << 16
    if wire == "int4":
        nibbles = np.stack([message & 15, message >> 4], -1).reshape(-1)[:n].astype(np.int8)
        values = np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.float32)
    else:
        values = message[:n].view(_VALUES[wire][0]).astype(np.float32)
    return values * scales.view(np.float32)[np.arange(n) // block]


@np.errstate(all="ignore")
def summed(
    decoded: np.ndarray, local: np.ndarray, factor: float, *, flush: bool = False
) -> np.ndarray:
    """One rounding for the sum, one for the product."""
    total = _kept(decoded, flush) + _kept(local.astype(np.float32), flush)
    return scaled(_kept(total, flush), factor, flush=flush)


@np.errstate(all="ignore")
def scaled(x: np.ndarray, factor: float, *, flush: bool = False) -> np.ndarray:
    """float32s times a factor; one of 1 is left out."""
    return x if factor == 1 else _kept(_kept(x, flush) * np.float32(factor), flush)


@np.errstate(all="ignore")
def combined(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What op makes of arrays of a dtype, rounded once; integers wrap."""
    dtype = a.dtype
    if op in ("max", "min"):
        wide = np.float64 if dtype.kind in "fV" else dtype
        # With a NaN in either, NaN.
        result = (np.maximum if op == "max" else np.minimum)(a.astype(wide), b.astype(wide))
        return result.astype(dtype)
    function = np.add if op == "sum" else np.multiply
    if dtype in (np.float64, np.float32) or dtype.kind in "iu":
        return function(a, b)
    return function(a.astype(np.float32), b.astype(np.float32)).astype(dtype)


def assert_bitwise(got: object, want: np.ndarray, wire: str = "") -> None:
    """Equal bits, where all NaNs are alike; messages of 16-bit floats are read as such."""
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if wire in _CASTS:
        got, want = got.view(_CASTS[wire]), want.view(_CASTS[wire])
    if got.dtype.kind in "fV":  # V: those of ml_dtypes.
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)
        got, want = got[~nan], want[~nan]
    bits = np.dtype(f"u{got.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(bits), want.view(bits))


def _kept(x: np.ndarray, flush: bool) -> np.ndarray:
    """What a processor has of float32s that it reads or writes."""
    return np.where(np.abs(x) < _LEAST_NORMAL, np.copysign(np.float32(0), x), x) if flush else x


def _rounded_up(x: np.ndarray) -> np.ndarray:
    """The least bfloat16 that is no less, as float32."""
    bits = x.view(np.uint32).astype(np.uint64)
    return (-(-bits // 65536) * 65536).astype(np.uint32).view(np.float32)


def _mixed(h: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor) % np.uint64(2**32)
    return h ^ (h >> np.uint64(16))
