"""The custom calls of the chunk kernels, made directly: for a batch, or without one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_reference import message_dtype, message_size


@functools.cache
def _compiled(name: str, result: Any, in_place_of: int | None, attributes: Any) -> Any:
    """A program of one call, whose result takes the place of an operand, which is donated."""
    aliases = {} if in_place_of is None else {in_place_of: 0}
    call = jax.ffi.ffi_call(name, result, input_output_aliases=aliases)
    return jax.jit(functools.partial(call, **dict(attributes)), donate_argnums=tuple(aliases))


def _call(name: str, result: Any, in_place_of: int | None, *operands: Any, **attributes: Any):
    return _compiled(name, result, in_place_of, tuple(attributes.items()))(*operands)


def encode(buffer, row, *seed, wire, block=0, factor=1.0) -> jax.Array:
    dtype = buffer.dtype if wire == "identity" else message_dtype(wire)
    size = message_size(wire, buffer.shape[-1], block)
    result = jax.ShapeDtypeStruct((*row.shape, size), dtype)
    attributes = {"wire": wire, "block": np.int64(block), "factor": np.float32(factor)}
    return _call("jax_ring_chunk_encode", result, None, buffer, row, *seed, **attributes)


def reduce(
    received, buffer, row, *seed, wire, block=0, op="sum", factor=1.0, value=False, in_place=False
) -> jax.Array:
    """In place of what was received; or, where the result is a value, of the accumulator."""
    result = jax.ShapeDtypeStruct(received.shape, received.dtype)
    if value:
        result = jax.ShapeDtypeStruct((*row.shape, 1, buffer.shape[-1]), jnp.float32)
    place = int(value) if in_place else None
    attributes = {"wire": wire, "block": np.int64(block), "factor": np.float32(factor), "op": op}
    operands = (received, buffer, row, *seed)
    return _call("jax_ring_chunk_reduce", result, place, *operands, **attributes)


def decode(message, buffer, row, *, wire, block=0, in_place=False) -> jax.Array:
    result = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
    place = 1 if in_place else None
    attributes = {"wire": wire, "block": np.int64(block)}
    return _call("jax_ring_chunk_decode", result, place, message, buffer, row, **attributes)
