"""The custom calls of the chunk kernels, made directly."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_reference import message_dtype, message_size

NO_ALIASES: Mapping[int, int] = {}


def _call(name, result, aliases, *operands, **attributes) -> jax.Array:
    call = jax.ffi.ffi_call(name, result, input_output_aliases=dict(aliases))
    return jax.jit(functools.partial(call, **attributes))(*operands)


def _attributes(wire: str, block: int, **others: Any) -> dict[str, Any]:
    return {"wire": wire, "block": np.int64(block), **others}


def message(wire: str, block: int, batch: int, n: int) -> jax.ShapeDtypeStruct:
    """The type of a lossy wire's messages."""
    return jax.ShapeDtypeStruct((batch, message_size(wire, n, block)), message_dtype(wire))


def encode(buffer, row, *seed, wire, block=0, factor=1.0) -> jax.Array:
    batch, _, n = buffer.shape
    if wire == "identity":
        result = jax.ShapeDtypeStruct((batch, n), buffer.dtype)
    else:
        result = message(wire, block, batch, n)
    attributes = _attributes(wire, block, factor=np.float32(factor))
    return _call("jax_ring_chunk_encode", result, NO_ALIASES, buffer, row, *seed, **attributes)


def reduce(
    received, buffer, row, *seed, wire, block=0, op="sum", factor=1.0, value=False, in_place=False
) -> jax.Array:
    result = jax.ShapeDtypeStruct(received.shape, received.dtype)
    if value:
        result = jax.ShapeDtypeStruct((received.shape[0], buffer.shape[-1]), jnp.float32)
    aliases = {0: 0} if in_place else NO_ALIASES
    attributes = _attributes(wire, block, op=op, factor=np.float32(factor))
    operands = (received, buffer, row, *seed)
    return _call("jax_ring_chunk_reduce", result, aliases, *operands, **attributes)


def decode(message, buffer, row, *, wire, block=0, in_place=False) -> jax.Array:
    result = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
    aliases = {1: 0} if in_place else NO_ALIASES
    attributes = _attributes(wire, block)
    operands = (message, buffer, row)
    return _call("jax_ring_chunk_decode", result, aliases, *operands, **attributes)
