"""Wire formats: what a chunk looks like while it travels.

Every collective takes `wire=`: None (as it is), a name, or a `WireFormat`.

| name            | bytes for n float32 (block 256)     | a rounding error is at most     |
|-----------------|-------------------------------------|---------------------------------|
| None            | 4 n                                 | 0                               |
| "bfloat16"      | 2 n                                 | 2^-8 of the value               |
| "float16"       | 2 n                                 | 2^-11 of it, 2^-25; up to 65504 |
| "float8_e4m3fn" | n + 2 ceil(n/256)                   | 2^-4 of it, 2^-18 of the block  |
| "float8_e5m2"   | n + 2 ceil(n/256)                   | 2^-3 of it                      |
| "int8"          | n + 2 ceil(n/256)                   | 1/252 of the block's largest    |
| "int4"          | n/2 + 2 ceil(n/256)                 | 1/13.8 of the block's largest   |

Sums are taken in float32 whatever the wire. What travels is always an array of integers, so that no
compiler pass can widen it.

8-bit floats are scaled by blocks like the integers: gradients are far smaller than the range of a
bare float8_e4m3fn, whose least value is 0.002.

The scale of a block is one bfloat16. It has float32's range, so that blocks of any size have one;
its 8 bits times the 8 of a value are exact in float32, so that decoding does not round and gives
the same bits with and without fused multiply-add; and it costs 0.8% of an int8 message where a
float32 would cost 1.6%. A power of two would cost 0.4%, but would lose up to one bit of each value.
It is rounded up, so that no value is beyond the range of the elements; what is within 1% of the
largest float32 may be read as infinite.

Special values: a NaN or an infinity makes its whole block NaN in the block formats; in the others
it stays what it is. A block of zeros is exact. Subnormal values become zero in the block formats,
where -0 may become +0. Finite values beyond 65504 become infinite on a float16 wire.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, Literal, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Message = Any  # A pytree of arrays.

DEFAULT_BLOCK = 256


@runtime_checkable
class WireFormat(Protocol):
    """How chunks are written for the wire, and read again.

    Implement it to have a format of your own: a hashable object (a frozen dataclass, say), as it
    becomes part of the compiled program, whose functions are traced by JAX.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, jax_ring
      >>> @dataclasses.dataclass(frozen=True)
      ... class Sign:
      ...     '''Only the sign travels; all values are taken to be of one size.'''
      ...     size: float
      ...     name: str = "sign"
      ...     def encode(self, values, seed=None):
      ...         return (values >= 0).astype(jnp.int8)
      ...     def decode(self, message, n):
      ...         return jnp.where(message == 1, self.size, -self.size)
      ...     def nbytes(self, n):
      ...         return n
      >>> x = jnp.array([[0.5, -3.0], [0.25, 4.0]])
      >>> f = lambda x: jax_ring.psum(x, "i", wire=Sign(1.0))
      >>> print(jax.vmap(f, axis_name="i")(x)[0])
      [1. 1.]
    """

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    def encode(self, values: Array, seed: Array | None = None) -> Message:
        """Writes values for the wire.

        Args:
          values: float32 [..., n].
          seed: uint32 [2] for formats that round at random, different at each call; else None.

        Returns:
          A pytree of arrays, all with the leading dimensions of `values`.
        """
        ...

    def decode(self, message: Message, n: int) -> Array:
        """Reads a message of n values for each entry of its leading dimensions.

        Args:
          message: what `encode` gave.
          n: the number of values.

        Returns:
          float32 [..., n].
        """
        ...

    def nbytes(self, n: int) -> int:
        """The bytes of a message of n values."""
        ...


# --- small floats, by integer arithmetic ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Float:
    """A float of at most 16 bits: bits in its mantissa, and bias of its exponent."""

    mantissa: int
    bias: int
    bits: int
    largest: float

    @property
    def dtype(self) -> Any:
        """The unsigned integer that holds it."""
        return jnp.uint16 if self.bits == 16 else jnp.uint8


_FLOATS = {
    "float16": _Float(10, 15, 16, 65504.0),
    "float8_e4m3fn": _Float(3, 7, 8, 448.0),
    "float8_e5m2": _Float(2, 15, 8, 57344.0),
}


def _float_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _as_float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def bfloat16_bits(x: Array) -> Array:
    """float32 to the bits of the nearest bfloat16, ties to even, in integer arithmetic.

    XLA's own conversion is not used: it may flush subnormals and move across a collective.
    """
    u = _float_bits(x)
    nearest = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    quiet = (u >> 16) | 0x40
    return jnp.where(jnp.isnan(x), quiet, nearest).astype(jnp.uint16)


def _from_bfloat16_bits(bits: Array) -> Array:
    return _as_float(bits.astype(jnp.uint32) << 16)


def _small_float_bits(x: Array, kind: _Float) -> Array:
    """float32, of magnitude up to that which rounds to `kind.largest`, to the nearest in bits."""
    u = _float_bits(jnp.abs(x))
    drop = 23 - kind.mantissa
    odd = (u >> drop) & 1
    rebased = (127 - kind.bias) << kind.mantissa
    normal = ((u + ((1 << (drop - 1)) - 1) + odd) >> drop) - rebased
    # Adding a power of two whose unit in the last place is the least subnormal rounds to it.
    magic = jnp.float32(2.0 ** (23 + 1 - kind.bias - kind.mantissa))
    subnormal = _float_bits(jnp.abs(x) + magic) - _float_bits(magic)
    is_normal = u >= (128 - kind.bias) << 23
    sign = (_float_bits(x) >> 31) << (kind.bits - 1)
    return sign | jnp.where(is_normal, normal, subnormal)


def _from_small_float_bits(bits: Array, kind: _Float) -> Array:
    """The exact float32 value, without arithmetic on float32's subnormals."""
    bits = bits.astype(jnp.uint32)
    magnitude = bits & ((1 << (kind.bits - 1)) - 1)
    sign = (bits >> (kind.bits - 1)) << 31
    normal = (magnitude << (23 - kind.mantissa)) + ((127 - kind.bias) << 23)
    least = jnp.float32(2.0 ** (1 - kind.bias - kind.mantissa))
    subnormal = _float_bits(magnitude.astype(jnp.float32) * least)
    return _as_float(sign | jnp.where(magnitude >> kind.mantissa == 0, subnormal, normal))


def _from_bits_with_infinity(bits: Array, kind: _Float) -> Array:
    """The same for a format whose largest exponent is for infinities and NaNs."""
    magnitude = bits.astype(jnp.uint32) & ((1 << (kind.bits - 1)) - 1)
    sign = (bits.astype(jnp.uint32) >> (kind.bits - 1)) << 31
    special = sign | 0x7F800000 | (magnitude << (23 - kind.mantissa))
    value = _from_small_float_bits(bits, kind)
    return jnp.where(magnitude < 0x1F << kind.mantissa, value, _as_float(special))


# --- formats --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cast:
    """Each value rounded to a 16-bit float, ties to even.

    Attributes:
      name: "bfloat16" or "float16".

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ring import wire
      >>> bits = wire.Cast("bfloat16").encode(jnp.array([1.0, 3.14159265]))
      >>> bits.dtype, wire.Cast("bfloat16").decode(bits, 2).tolist()
      (dtype('uint16'), [1.0, 3.140625])
    """

    name: Literal["bfloat16", "float16"]

    def __post_init__(self) -> None:
        """Rejects other names."""
        if self.name not in ("bfloat16", "float16"):
            raise ValueError(f"wire.Cast: name must be 'bfloat16' or 'float16', got {self.name!r}")

    def encode(self, values: Array, seed: Array | None = None) -> Array:
        """uint16 [..., n], the bits of the rounded values."""
        del seed
        if self.name == "bfloat16":
            return bfloat16_bits(values)
        u = _float_bits(values)
        bits = _small_float_bits(values, _FLOATS["float16"])
        infinite = (u & 0x7FFFFFFF) >= _float_bits(jnp.float32(65520.0))
        special = ((u >> 31) << 15) | jnp.where(jnp.isnan(values), 0x7E00, 0x7C00).astype(u.dtype)
        return jnp.where(infinite, special, bits).astype(jnp.uint16)

    def decode(self, message: Array, n: int) -> Array:
        """float32 [..., n]."""
        del n
        if self.name == "bfloat16":
            return _from_bfloat16_bits(message)
        return _from_bits_with_infinity(message, _FLOATS["float16"])

    def nbytes(self, n: int) -> int:
        """2 n."""
        return 2 * n


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Values of 8 or 4 bits, scaled by blocks so that the largest of each fills their range.

    A message holds the values, two to a byte for int4 (the first in the low half), filled up to an
    even number of bytes, and then the scales, in bfloat16.

    Attributes:
      element: "int8", "int4", "float8_e4m3fn" or "float8_e5m2".
      block: values to a scale; even for int4.
      key: a key of `jax.random`, with which int8 and int4 round at random such that the mean over
        keys is the value itself; None rounds to the nearest, ties to even. Each rank and each
        message draws its own numbers from it; give each call another key.
      stochastic: whether values round at random, as they do when there is a key.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ring import wire
      >>> int8 = wire.Blocks("int8", block=4)
      >>> message = int8.encode(jnp.array([1.0, -2.0, 0.0, 0.5, 100.0, 3.0]))
      >>> message.dtype, message.size == int8.nbytes(6)
      (dtype('int8'), True)
      >>> print(int8.decode(message, 6).round())
      [  1.  -2.   0.   1. 100.   3.]
    """

    element: Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"]
    block: int = DEFAULT_BLOCK
    key: Any = dataclasses.field(default=None, compare=False)
    stochastic: bool = False

    def __post_init__(self) -> None:
        """Rejects what no message can have."""
        if self.element not in _LARGEST:
            raise ValueError(
                f"wire.Blocks: element must be one of {sorted(_LARGEST)}, got {self.element!r}"
            )
        try:
            block = operator.index(self.block)
        except TypeError:
            raise TypeError(f"wire.Blocks: block must be an integer, got {self.block!r}") from None
        if block < 1 or (self.element == "int4" and block % 2):
            kind = "an even integer of at least 2" if self.element == "int4" else "at least 1"
            raise ValueError(f"wire.Blocks: block must be {kind}, got {block}")
        if block >= 1 << 62:
            raise ValueError(f"wire.Blocks: block must be less than 2**62, got {block}")
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "stochastic", self.stochastic or self.key is not None)
        if self.stochastic and not self._integral:
            raise ValueError(f"wire.Blocks: key rounds int8 and int4 only, not {self.element}")

    @property
    def name(self) -> str:
        """The element's name."""
        return self.element

    @property
    def _integral(self) -> bool:
        return self.element.startswith("int")

    @property
    def _bits(self) -> int:
        return 4 if self.element == "int4" else 8

    def encode(self, values: Array, seed: Array | None = None) -> Array:
        """int8 (for int4 and floats: uint8) [..., nbytes(n)]."""
        n = values.shape[-1]
        codes, scale = self.parts(values, seed)
        codes = codes.reshape(*values.shape[:-1], -1)[..., :n]
        parts = [self._packed(codes), lax.bitcast_convert_type(scale, jnp.uint8)]
        parts[1] = parts[1].reshape(*values.shape[:-1], -1)
        message = lax.concatenate(parts, values.ndim - 1)
        return lax.bitcast_convert_type(message, jnp.int8) if self.element == "int8" else message

    def decode(self, message: Array, n: int) -> Array:
        """float32 [..., n]."""
        bytes_ = lax.bitcast_convert_type(message, jnp.uint8)
        values = lax.slice_in_dim(bytes_, 0, self._value_bytes(n), axis=-1)
        scales = lax.slice_in_dim(bytes_, self._code_bytes(n), None, axis=-1)
        scale = lax.bitcast_convert_type(scales.reshape(*scales.shape[:-1], -1, 2), jnp.uint16)
        blocks = self.united(self._in_blocks(self._unpacked(values, n), n), scale)
        return blocks.reshape(*message.shape[:-1], -1)[..., :n]

    def nbytes(self, n: int) -> int:
        """Those of the values, filled up to an even number, and two for each block."""
        return self._code_bytes(n) + 2 * -(-n // self.block)

    def within(self, n: int, shards: int) -> WireFormat:
        """The format for rows of n that the compiler may shard: no block or message spans shards.

        Its blocks may be shorter, and its values and scales travel as two messages.
        """
        part = n // shards if n % shards == 0 else n
        block = max(b for b in range(1, min(self.block, part) + 1) if part % b == 0)
        if self.element == "int4" and block % 2:
            return _Apart(Blocks("int8", block, stochastic=self.stochastic))
        return _Apart(dataclasses.replace(self, block=block))

    def parts(self, values: Array, seed: Array | None) -> tuple[Array, Array]:
        """The values, one to a byte, [..., blocks, block], and the bits of the scales."""
        blocks = self._in_blocks(values, values.shape[-1])
        scale, inverse, finite = self._scales(blocks)
        kept = finite[..., None]
        if seed is not None:
            # Where subnormals are not flushed the floor of the scale hides them from rounding to
            # the nearest only.
            kept &= (_float_bits(blocks) & 0x7FFFFFFF) >= 0x00800000
        quotient = jnp.where(kept, blocks * inverse[..., None], 0.0)
        if self._integral:
            return self._integers(quotient, seed), scale
        kind = _FLOATS[self.element]
        bounded = jnp.clip(quotient, -kind.largest, kind.largest)
        return _small_float_bits(bounded, kind).astype(jnp.uint8), scale

    def united(self, codes: Array, scale: Array) -> Array:
        """float32 [..., blocks, block] from values, a byte (or its high half) each, and scales."""
        return self._decoded(codes) * _from_bfloat16_bits(scale)[..., None]

    def _value_bytes(self, n: int) -> int:
        return -(-n * self._bits // 8)

    def _code_bytes(self, n: int) -> int:
        return -(-self._value_bytes(n) // 2) * 2

    def _in_blocks(self, values: Array, n: int) -> Array:
        """[..., n] to [..., blocks, block], filled up with zeros."""
        return _split(values, max(1, min(self.block, n)))  # No longer than all there is.

    def _scales(self, blocks: Array) -> tuple[Array, Array, Array]:
        """For each block: the bits of its scale, the inverse of that, and whether it is finite."""
        magnitude = _float_bits(blocks) & 0x7FFFFFFF
        amax = magnitude.max(-1)  # As integers, so that NaN > infinity > any number.
        finite = amax < 0x7F800000
        largest, floor = _LARGEST[self.element]
        scale = _float_bits(_as_float(amax) * jnp.float32(1.0 / largest))
        scale = jnp.maximum((scale + 0xFFFF) >> 16 << 16, jnp.uint32(floor))
        scale = jnp.where(finite, scale, jnp.uint32(0x7FC00000))
        return (scale >> 16).astype(jnp.uint16), 1.0 / _as_float(scale), finite

    def _integers(self, quotient: Array, seed: Array | None) -> Array:
        largest = int(_LARGEST[self.element][0])
        if seed is None:
            codes = lax.round(quotient, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
        else:
            # In fixed point: a float sum could be fused with the product before it.
            fixed = lax.round(quotient * 32768.0, lax.RoundingMethod.TO_NEAREST_EVEN)
            codes = (fixed.astype(jnp.int32) + _random_15_bits(quotient, seed)) >> 15
        codes = jnp.clip(codes, -largest, largest)
        return lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)

    def _packed(self, codes: Array) -> Array:
        """Values in uint8 as bytes, of an even number."""
        n = codes.shape[-1]
        if self._bits == 4:
            codes = _fill_even(codes)
            pairs = codes.reshape(*codes.shape[:-1], -1, 2)
            codes = (pairs[..., 0] & 15) | (pairs[..., 1] << 4)
        packed = _fill_even(codes)
        assert packed.shape[-1] == self._code_bytes(n)
        return packed

    def _unpacked(self, values: Array, n: int) -> Array:
        """The inverse of `_packed`; nibbles in the high half of a byte."""
        if self._bits == 8:
            return values
        halves = jnp.stack([values << 4, values & 0xF0], axis=-1)
        return halves.reshape(*values.shape[:-1], -1)[..., :n]

    def _decoded(self, codes: Array) -> Array:
        """Values in uint8 as float32, without their scale."""
        if self.element == "float8_e4m3fn":
            value = _from_small_float_bits(codes, _FLOATS[self.element])
            return jnp.where(codes & 0x7F == 0x7F, jnp.float32(jnp.nan), value)
        if self.element == "float8_e5m2":
            return _from_bits_with_infinity(codes, _FLOATS[self.element])
        signed = lax.bitcast_convert_type(codes, jnp.int8)
        if self._bits == 4:
            signed = signed >> 4
        return signed.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class OneBit:
    """The sign of each value, eight to a byte, and for each block the mean of its magnitudes.

    That scale makes the L2 error of the block least. It is still as large as the values are, so
    this is of use only where what is lost is added to the next message
    (`jax_ring.gradients.one_bit`), and has no name for `wire=` of its own. A block with a NaN or an
    infinity has no finite value when read. The format runs through XLA: it has no native kernels.

    Source: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs", 2014; the scale of Karimireddy et al., 2019, section 4.

    Attributes:
      block: values to a scale (bfloat16).

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ring import wire
      >>> signs = wire.OneBit(block=4)
      >>> message = signs.encode(jnp.array([1.0, -2.0, 3.0, 0.0, 8.0]))
      >>> message.dtype, message.size == signs.nbytes(5) == 1 + 2 * 2
      (dtype('uint8'), True)
      >>> print(signs.decode(message, 5))
      [ 1.5 -1.5  1.5  1.5  8. ]
    """

    block: int = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        """Rejects what no message can have."""
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(
                f"wire.OneBit: block must be an integer of at least 1, got {self.block!r}"
            )

    @property
    def name(self) -> str:
        """The name in messages."""
        return "onebit"

    def encode(self, values: Array, seed: Array | None = None) -> Array:
        """uint8 [..., nbytes(n)]."""
        del seed
        n = values.shape[-1]
        blocks = _split(values, max(1, min(self.block, n)))
        # Each is divided before the sum, so that finite values have a finite mean.
        held = np.minimum(blocks.shape[-1], n - blocks.shape[-1] * np.arange(blocks.shape[-2]))
        scale = (jnp.abs(blocks) / held.astype(np.float32)[:, None]).sum(-1)
        scales = lax.bitcast_convert_type(bfloat16_bits(scale), jnp.uint8)
        signs = _split((_float_bits(values) >> 31).astype(jnp.uint8), 8)
        packed = (signs << np.arange(8, dtype=np.uint8)).sum(-1, dtype=jnp.uint8)
        scales = scales.reshape(*values.shape[:-1], -1)
        return lax.concatenate([packed, scales], values.ndim - 1)

    def decode(self, message: Array, n: int) -> Array:
        """float32 [..., n]."""
        packed, pairs = message[..., : -(-n // 8)], message[..., -(-n // 8) :]
        signs = (packed[..., None] >> np.arange(8, dtype=np.uint8)) & 1
        flat = signs.reshape(*message.shape[:-1], -1)[..., :n]
        blocks = _split(1.0 - 2.0 * flat.astype(jnp.float32), max(1, min(self.block, n)))
        bits = lax.bitcast_convert_type(pairs.reshape(*pairs.shape[:-1], -1, 2), jnp.uint16)
        values = blocks * _from_bfloat16_bits(bits)[..., None]
        return values.reshape(*message.shape[:-1], -1)[..., :n]

    def nbytes(self, n: int) -> int:
        """A byte for each eight values and two for each block."""
        return -(-n // 8) + 2 * -(-n // self.block)


def _split(values: Array, size: int) -> Array:
    """[..., n] to [..., parts, size], filled up with zeros."""
    missing = -values.shape[-1] % size
    if missing:
        padding = [(0, 0, 0)] * (values.ndim - 1) + [(0, missing, 0)]
        values = lax.pad(values, jnp.zeros((), values.dtype), padding)
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


@dataclasses.dataclass(frozen=True)
class _Apart:
    """Blocks whose values and scales are two arrays, for rows that may be sharded."""

    blocks: Blocks

    @property
    def name(self) -> str:
        """That of the blocks."""
        return self.blocks.name

    def encode(self, values: Array, seed: Array | None = None) -> tuple[Array, Array]:
        """The values (two to a byte for int4) and the scales, by blocks."""
        codes, scale = self.blocks.parts(values, seed)
        if self.blocks.element == "int4":
            codes = (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)
        return codes, scale

    def decode(self, message: tuple[Array, Array], n: int) -> Array:
        """float32 [..., n]."""
        codes, scale = message
        if self.blocks.element == "int4":
            halves = jnp.stack([codes << 4, codes & 0xF0], axis=-1)
            codes = halves.reshape(*codes.shape[:-1], -1)
        return self.blocks.united(codes, scale).reshape(*codes.shape[:-2], n)

    def nbytes(self, n: int) -> int:
        """Those of the blocks."""
        return self.blocks.nbytes(n)


# The largest value, and the least scale (bits of a float32) that float32's subnormals, which some
# backends flush, divided by it are surely zero.
_LARGEST = {
    "int8": (127.0, 0x01000000),
    "int4": (7.0, 0x01000000),
    "float8_e4m3fn": (448.0, 0x05800000),
    "float8_e5m2": (57344.0, 0x09000000),
}


def _fill_even(codes: Array) -> Array:
    if codes.shape[-1] % 2 == 0:
        return codes
    padding = [(0, 0, 0)] * (codes.ndim - 1) + [(0, 1, 0)]
    return lax.pad(codes, jnp.zeros((), codes.dtype), padding)


def _random_15_bits(like: Array, seed: Array) -> Array:
    """int32 in [0, 2^15), a hash of the seed and the position in the message."""
    blocks, size = like.shape[-2:]
    shape = (*like.shape[:-2], blocks, size)
    block = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
    position = block * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return (mix(mix(position + seed[0]) + seed[1]) >> 17).astype(jnp.int32)


def mix(h: Array) -> Array:
    """A bijection of uint32 in which each bit of the result depends on all of the argument's."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


_FORMATS: dict[str, Cast | Blocks] = {
    "bfloat16": Cast("bfloat16"),
    "float16": Cast("float16"),
    "float8_e4m3fn": Blocks("float8_e4m3fn"),
    "float8_e5m2": Blocks("float8_e5m2"),
    "int8": Blocks("int8"),
    "int4": Blocks("int4"),
}
NAMES = tuple(_FORMATS)


def get(wire: str | WireFormat | None) -> WireFormat | None:
    """The format that `wire=` means.

    Args:
      wire: None, a name, or a format.

    Returns:
      The format, or None.

    Raises:
      ValueError: for a name that there is not, and a format whose functions do not fit together.
      TypeError: for what is no format.

    Example:
      >>> from jax_ring import wire
      >>> wire.get("int8") == wire.Blocks("int8", block=256)
      True
    """
    if wire is None:
        return None
    if isinstance(wire, str):
        if wire not in _FORMATS:
            raise ValueError(f"wire must be None, a WireFormat or one of {NAMES}, got {wire!r}")
        return _FORMATS[wire]
    if isinstance(wire, type) or not isinstance(wire, WireFormat):
        raise TypeError(
            f"wire must be None, one of {NAMES} or a WireFormat (an object with name, encode, "
            f"decode and nbytes), got {wire!r}"
        )
    try:
        hash(wire)
    except TypeError:
        raise TypeError(
            f"wire must be hashable, since it becomes part of the program, got {wire!r}; a frozen "
            "dataclass is"
        ) from None
    if type(wire) not in (Cast, Blocks, OneBit, _Apart):
        _check(cast(Any, wire))  # A Protocol is not Hashable to mypy.
    return wire


@functools.lru_cache(maxsize=256)
def _check(wire: WireFormat) -> None:
    """Tries a format of someone else's on shapes."""
    rows, n = 2, 6
    message = jax.eval_shape(wire.encode, jax.ShapeDtypeStruct((rows, n), jnp.float32))
    leaves = jax.tree.leaves(message)
    if not leaves or any(leaf.shape[:1] != (rows,) for leaf in leaves):
        raise ValueError(
            f"wire={wire.name!r}: encode must keep the leading dimensions of float32[{rows}, {n}] "
            f"in each array of its message, got {[str(leaf) for leaf in leaves]}"
        )
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if size != rows * wire.nbytes(n):
        raise ValueError(
            f"wire={wire.name!r}: nbytes({n}) must be the bytes that encode makes of {n} values, "
            f"{size / rows:g}, got {wire.nbytes(n)}"
        )
    value = jax.eval_shape(lambda message: wire.decode(message, n), message)
    if getattr(value, "shape", None) != (rows, n) or value.dtype != jnp.float32:
        raise ValueError(
            f"wire={wire.name!r}: decode must give float32[{rows}, {n}] for the message of as many "
            f"values, got {value}"
        )
