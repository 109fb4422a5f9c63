"""The work on one chunk: write it for the wire, add what arrived to it, read it.

Three primitives, each of which is an XLA FFI custom call (C++ on CPU, CUDA on GPU) where that was
measured to win or is asked for, and plain JAX elsewhere, with the same bits:

- `chunk_encode(buffer, row) -> message`
- `chunk_reduce(received, buffer, row) -> message or value`: decode, add the local chunk in float32,
  encode again, in one pass
- `chunk_decode(message, buffer, row) -> buffer`

They take the whole local buffer and the index of a chunk on the device: given a slice, XLA makes
copies of all slices first, since the operands of a custom call must be in memory.

Each operand has a leading dimension for a batch, so that a vmapped call is still one call; that is
why they have a batching rule of their own. `vmap_method` of `jax.ffi` can only loop, or give all
operands the batch: a ring under `vmap(axis_name=...)` maps the index alone, and would copy the
buffer for each.

Whether a custom call is made is settled when a call is lowered (`_compat.local_primitive`): outside
manual regions, and in those that leave some mesh axes to the compiler, it would gather its
operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat, native, wire
from jax_ring.wire import Blocks, Cast, Message, WireFormat

Array = jax.Array

OPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "prod": lax.mul,
}


@dataclasses.dataclass(frozen=True)
class Codec:
    """How the chunks of one collective are written, reduced and read.

    Attributes:
      wire: the format; None for chunks as they are.
      op: a name in `OPS`, or "custom".
      combine: the function of two arrays.
      reducer: "auto", "native" or "xla".
      factor: what finished sums are multiplied by before they are written, where there is a wire.
    """

    wire: WireFormat | None
    op: str
    combine: Callable[[Array, Array], Array]
    reducer: str
    factor: float = 1.0

    def encode(self, buffer: Array, row: Array, seed: Array | None = None) -> Message:
        """The message of a chunk.

        Args:
          buffer: [chunks, ..., n].
          row: int32, the chunk.
          seed: uint32 [2] for formats that round at random.

        Returns:
          The message.
        """
        if not self._as_call(buffer):
            return self._written(_row(buffer, row), seed)
        return self._bind(encode_p, (buffer, row), seed)[0]

    def reduce(
        self,
        received: Message,
        buffer: Array,
        row: Array,
        seed: Array | None = None,
        *,
        finish: bool,
        encode: bool,
    ) -> Message:
        """Adds the local chunk to what arrived.

        Args:
          received: a message.
          buffer: [chunks, ..., n].
          row: int32, the local chunk.
          seed: uint32 [2] for formats that round at random.
          finish: whether to multiply by `factor`.
          encode: whether to write the result for the wire again.

        Returns:
          The message, or the value: [..., n], in float32 if there is a wire.
        """
        factor = self.factor if finish and self.wire is not None else 1.0
        if not self._as_call(buffer) or self.op not in OPS:
            total = _reduced(self.wire, self.combine, received, _row(buffer, row), factor)
            return self._written(total, seed) if encode else total
        value = not encode and self.wire is not None
        operands = (received, buffer, row)
        result = self._bind(
            reduce_p, operands, None if value else seed, factor=factor, op=self.op, value=value
        )
        return result[0, 0] if value else result[0]

    def decode(self, message: Message, buffer: Array, row: Array) -> Array:
        """The buffer with a chunk read from a message.

        Args:
          message: a message.
          buffer: [chunks, ..., n].
          row: int32, where the chunk goes.

        Returns:
          The buffer.
        """
        if not self._as_call(buffer):
            return _replaced(buffer, row, self.value(message, buffer.shape[-1]))
        return self._bind(decode_p, (message, buffer, row), None)[0]

    def value(self, message: Message, n: int) -> Array:
        """What a message of n elements says: [..., n], in float32 if there is a wire."""
        return message if self.wire is None else self.wire.decode(message, n)

    def calls(self, buffer: Array | jax.ShapeDtypeStruct) -> bool:
        """Whether custom calls will be made, as far as can be told before lowering."""
        return self._as_call(buffer) and self._wanted()

    def adds(self, dtype: Any) -> bool:
        """Whether the calls that move chunks as they are should also reduce those of a dtype."""
        return self.op in OPS and (self.reducer == "native" or dtype.name not in _FASTER_BY_XLA)

    def _wanted(self) -> bool:
        platform = {"gpu": "cuda"}.get(_compat.platform(), _compat.platform())
        return _wanted(platform, wire=self.wire, reducer=self.reducer)

    def _written(self, value: Array, seed: Array | None) -> Message:
        if self.wire is None:
            return value
        return self.wire.encode(value.astype(jnp.float32), seed)

    def _as_call(self, buffer: Array | jax.ShapeDtypeStruct) -> bool:
        """Whether there may be a custom call for this."""
        if self.reducer == "xla" or buffer.ndim != 2 or buffer.size == 0:
            return False
        if self.wire is None:
            return buffer.dtype.name in _IDENTITY_DTYPES
        lossy = type(self.wire) in (Cast, Blocks) and self.op == "sum"
        return lossy and buffer.dtype in (jnp.float32, jnp.bfloat16)

    def _bind(self, primitive: Any, operands: Any, seed: Array | None, **params: Any) -> Array:
        """Calls a primitive for a batch of one."""
        batched = [_batch_of_one(operand) for operand in operands]
        if seed is not None:
            batched.append(_batch_of_one(seed))
        result: Array = primitive.bind(*batched, wire=self.wire, reducer=self.reducer, **params)
        return result


# What the native module moves as it is, and reduces.
_IDENTITY_DTYPES = {
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
}
# Of these, what XLA:CPU was measured to reduce faster.
_FASTER_BY_XLA = {"float16", "float8_e5m2"}


def _batch_of_one(x: Array) -> Array:
    return lax.reshape(x, (1, *x.shape))


def _row(buffer: Array, row: Array) -> Array:
    taken: Array = lax.dynamic_index_in_dim(
        buffer, row, keepdims=False, allow_negative_indices=False
    )
    return taken


def _replaced(buffer: Array, row: Array, value: Array) -> Array:
    starts = [row, *[jnp.zeros((), row.dtype)] * value.ndim]
    return lax.dynamic_update_slice(
        buffer, rounded(value, buffer.dtype)[None], starts, allow_negative_indices=False
    )


def rounded(value: Array, dtype: Any) -> Array:
    """A value in another dtype; to bfloat16 as a wire rounds, the same on every backend."""
    if value.dtype == jnp.float32 and dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(wire.bfloat16_bits(value), jnp.bfloat16)
    return value.astype(dtype)


def _reduced(
    wire_format: WireFormat | None,
    combine: Callable[[Array, Array], Array],
    received: Message,
    local: Array,
    factor: float,
) -> Array:
    if wire_format is None:
        return combine(received, local)
    total = combine(wire_format.decode(received, local.shape[-1]), local.astype(jnp.float32))
    return scaled(total, factor)


def scaled(total: Array, factor: float) -> Array:
    """A float32 sum times what it is finished with."""
    return total * jnp.float32(factor) if factor != 1.0 else total


# --- primitives: all operands with a leading batch ------------------------------------------------


def _encode_result(buffer: Any, row: Any, *_: Any, wire: Any, **__: Any) -> Any:
    if wire is None:
        return (row.shape[0], buffer.shape[-1]), buffer.dtype
    values = jax.ShapeDtypeStruct((row.shape[0], buffer.shape[-1]), jnp.float32)
    message = jax.eval_shape(wire.encode, values)
    return message.shape, message.dtype


def _reduce_result(
    received: Any, buffer: Any, row: Any, *_: Any, value: bool, **__: Any
) -> tuple[tuple[int, ...], Any]:
    if value:  # The shape of an accumulator, so that the result can take its place.
        return (row.shape[0], 1, buffer.shape[-1]), jnp.dtype(jnp.float32)
    return received.shape, received.dtype


def _decode_result(message: Any, buffer: Any, row: Any, **_: Any) -> tuple[tuple[int, ...], Any]:
    del message, row
    return buffer.shape, buffer.dtype


def _one_by_one(body: Callable[..., Array]) -> Callable[..., Array]:
    """A function of single operands over the batch; a batch of one is no batch."""

    def batched(*operands: Array, **params: Any) -> Array:
        count = operands[-1].shape[0]  # Of the seeds, or of the rows: never broadcast.
        if count == 1:
            return body(*(operand[0] for operand in operands), **params)[None]
        axes = [0 if operand.shape[0] == count else None for operand in operands]
        single = [o if axis == 0 else o[0] for o, axis in zip(operands, axes, strict=True)]
        result: Array = jax.vmap(lambda *each: body(*each, **params), in_axes=axes)(*single)
        return result

    return batched


@_one_by_one
def _encode_body(buffer: Array, row: Array, *seed: Array, wire: Any, reducer: str) -> Array:
    del reducer
    chunk = _row(buffer, row)
    message: Array = chunk if wire is None else wire.encode(chunk.astype(jnp.float32), *seed)
    return message


@_one_by_one
def _reduce_body(
    received: Array,
    buffer: Array,
    row: Array,
    *seed: Array,
    wire: Any,
    op: str,
    factor: float,
    value: bool,
    reducer: str,
) -> Array:
    del reducer
    total = _reduced(wire, OPS[op], received, _row(buffer, row), factor)
    if wire is None:
        return total
    if value:
        return total[None]
    message: Array = wire.encode(total, *seed)
    return message


@_one_by_one
def _decode_body(message: Array, buffer: Array, row: Array, *, wire: Any, reducer: str) -> Array:
    del reducer
    value = message if wire is None else wire.decode(message, buffer.shape[-1])
    return _replaced(buffer, row, value)


def _attributes(wire_format: WireFormat | None) -> dict[str, Any]:
    block = wire_format.block if isinstance(wire_format, Blocks) else 0
    name = "identity" if wire_format is None else wire_format.name
    return {"wire": name, "block": np.int64(block)}


def _call(target: str, result: Any, aliases: dict[int, int], *operands: Array, **kw: Any) -> Array:
    """Makes the custom call: for a batch of one without the batch's dimension.

    That cancels the reshape of `_batch_of_one`, which next to an operand whose place the result
    takes would be a copy of it.
    """
    shape, dtype = result
    single = all(operand.shape[0] == 1 for operand in operands)
    if single:
        operands = tuple(lax.reshape(operand, operand.shape[1:]) for operand in operands)
    out = _compat.varying_struct(shape[single:], dtype, *map(jax.typeof, operands))
    called: Array = jax.ffi.ffi_call(target, out, input_output_aliases=aliases)(*operands, **kw)
    return _batch_of_one(called) if single else called


def _encode_call(*operands: Array, wire: Any, reducer: str) -> Array:
    del reducer
    result = _encode_result(*operands, wire=wire)
    attributes = _attributes(wire) | {"factor": np.float32(1)}
    return _call("jax_ring_chunk_encode", result, {}, *operands, **attributes)


def _reduce_call(
    *operands: Array, wire: Any, op: str, factor: float, value: bool, reducer: str
) -> Array:
    del reducer
    buffer = operands[1]
    result = _reduce_result(*operands, value=value)
    # In place: the message that goes on takes the place of the one that came, or a sum its own.
    aliases = {0: 0} if not value else {}
    if value and (buffer.shape, buffer.dtype) == result:
        aliases = {1: 0}
    attributes = _attributes(wire) | {"factor": np.float32(factor), "op": op}
    return _call("jax_ring_chunk_reduce", result, aliases, *operands, **attributes)


def _decode_call(*operands: Array, wire: Any, reducer: str) -> Array:
    del reducer
    result = operands[1].shape, operands[1].dtype
    return _call("jax_ring_chunk_decode", result, {1: 0}, *operands, **_attributes(wire))


def _wanted(platform: str, *avals: Any, wire: Any, reducer: str, **_: Any) -> bool:
    """Whether a custom call is preferred; `_as_call` has said that it can be made."""
    del avals
    if reducer == "xla" or platform not in native.platforms():
        return False
    return reducer == "native" or prefers_native(platform, wire)


def prefers_native(platform: str, wire: WireFormat | None) -> bool:
    """What `JAX_RING_REDUCER=auto` picks: on CPU, what was measured to be faster for large buffers.

    By `benchmarks/chunk_reduce.py` and, for whole collectives, `benchmarks/collectives.py`; see
    docs/benchmarks.md. On GPUs nothing has been measured: there custom calls serve the formats that
    XLA does not fuse into one kernel.

    Args:
      platform: "cpu" or "cuda".
      wire: the format.

    Returns:
      Whether the custom call is made.
    """
    return platform == "cpu" or isinstance(wire, Blocks)


def _primitive(
    name: str, result: Any, body: Any, call: Any, *, row: int, shared: int | None = None
) -> Any:
    """A primitive whose operand `row` is the rows; `shared` is a buffer that calls may share."""

    def batch(values: Any, dims: Any, **params: Any) -> tuple[Any, int]:
        """Merges a vmapped dimension into the batch; repeats what is not mapped nor shared."""
        size = next(v.shape[d] for v, d in zip(values, dims, strict=True) if d is not None)
        count = values[row].size if dims[row] is None else values[row].size // size

        def merge(position: int, value: Array, d: int | None) -> Array:
            if d is None and position == shared and value.shape[0] == 1:
                return value
            if d is None:
                value = jnp.broadcast_to(value, (size, *value.shape))
            else:
                value = jnp.moveaxis(value, d, 0)
            value = jnp.broadcast_to(value, (size, count, *value.shape[2:]))
            return value.reshape(size * count, *value.shape[2:])

        operands = zip(values, dims, strict=True)
        y = primitive.bind(*(merge(i, v, d) for i, (v, d) in enumerate(operands)), **params)
        return y.reshape(size, count, *y.shape[1:]), 0

    primitive = _compat.local_primitive(
        name,
        result=result,
        body=body,
        native={"cpu": call, "cuda": call},
        wanted=_wanted,
        batch=batch,
    )
    return primitive


encode_p = _primitive("jax_ring_chunk_encode", _encode_result, _encode_body, _encode_call, row=1)
reduce_p = _primitive(
    "jax_ring_chunk_reduce", _reduce_result, _reduce_body, _reduce_call, row=2, shared=1
)
decode_p = _primitive("jax_ring_chunk_decode", _decode_result, _decode_body, _decode_call, row=2)
