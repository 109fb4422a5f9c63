"""Memory for a result, without what XLA would write into it first.

A result that is put together from chunks needs memory to put them in. Where the operand is kept,
XLA copies all of it into that memory, and `lax.empty` fills it with zeros on CPU; both cost as much
as passing the buffer through memory once more. Here the memory comes as it is.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jax_ring import _compat, native
from jax_ring.layout import left_to_compiler

Array = jax.Array


def in_place_of(buffer: Array, after: Any) -> Array:
    """Memory of the shape and type of a buffer that nobody reads any more.

    Where there is a native handler, a new array whose elements are undefined: all must be written
    before they are read. XLA may give it the buffer's own memory. Elsewhere the buffer itself.

    Args:
      buffer: any array.
      after: a pytree of arrays that are computed first; all reads of the buffer must lead to them.

    Returns:
      The array.
    """
    if left_to_compiler() > 1:
        return buffer
    result: Array = room_p.bind(buffer, *jax.tree.leaves(after))
    return result


def after(value: Array, done: Any) -> Array:
    """A value that is there only when others are.

    XLA:CPU forgets `lax.optimization_barrier` before it orders what it runs.

    Args:
      value: any array that is not read elsewhere later.
      done: a pytree of arrays that are computed first.

    Returns:
      The value.
    """
    if left_to_compiler() > 1:
        return value
    result: Array = after_p.bind(value, *jax.tree.leaves(done))
    return result


def _result(buffer: Any, *_: Any) -> tuple[tuple[int, ...], Any]:
    return buffer.shape, buffer.dtype


def _buffer(buffer: Array, *_: Array) -> Array:
    return buffer


def _call(buffer: Array, *after: Array) -> Array:
    out = _compat.varying_struct(buffer.shape, buffer.dtype, *map(jax.typeof, (buffer, *after)))
    made: Array = jax.ffi.ffi_call("jax_ring_room", out)(*after)
    return made


def _wanted(platform: str, *_: Any) -> bool:
    return platform in native.platforms()


def _batch(values: Any, dims: Any) -> tuple[Any, Any]:
    """What comes before may be mapped or not: the memory is as the buffer."""
    return room_p.bind(*values), dims[0]


room_p = _compat.local_primitive(
    "jax_ring_room",
    result=_result,
    body=_buffer,
    native={"cpu": _call},
    wanted=_wanted,
    batch=_batch,
)


def _barrier(value: Array, *done: Array) -> Array:
    result: Array = lax.optimization_barrier((value, done))[0]
    return result


def _same(value: Array, *done: Array) -> Array:
    out = _compat.varying_struct(value.shape, value.dtype, *map(jax.typeof, (value, *done)))
    # It does nothing to the memory that it gets, which is the value's.
    return jax.ffi.ffi_call("jax_ring_after", out, input_output_aliases={0: 0})(value, *done)


def _batch_after(values: Any, dims: Any) -> tuple[Any, Any]:
    return after_p.bind(*values), dims[0]


after_p = _compat.local_primitive(
    "jax_ring_after",
    result=_result,
    body=_barrier,
    native={"cpu": _same},
    wanted=_wanted,
    batch=_batch_after,
)
