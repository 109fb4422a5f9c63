"""Memory for a result, without what XLA would write into it first.

A result that is put together from chunks needs memory to put them in. Where the operand is kept,
XLA copies all of it into that memory, and `lax.empty` fills it with zeros on CPU; both cost as much
as passing the buffer through memory once more. Here the memory comes as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive

from jax_ring import _compat, native
from jax_ring.layout import left_to_compiler

Array = jax.Array


def in_place_of(buffer: Array, done: Any) -> Array:
    """Memory of the shape and type of a buffer that nobody reads any more.

    Where there is a native handler, a new array whose elements are undefined: all must be written
    before they are read. XLA may give it the buffer's own memory. Elsewhere the buffer itself.

    Args:
      buffer: any array.
      done: a pytree of arrays that are computed first; all reads of the buffer must lead to them.

    Returns:
      The array.
    """
    return _bound(room_p, buffer, done)


def after(value: Array, done: Any) -> Array:
    """A value that is there only when others are.

    XLA:CPU forgets `lax.optimization_barrier` before it orders what it runs.

    Args:
      value: any array that is not read elsewhere later.
      done: a pytree of arrays that are computed first.

    Returns:
      The value.
    """
    return _bound(after_p, value, done)


def _bound(primitive: Primitive, value: Array, done: Any) -> Array:
    if left_to_compiler() > 1:
        return value
    result: Array = primitive.bind(value, *jax.tree.leaves(done))
    return result


def _primitive(name: str, body: Callable[..., Array], call: Callable[..., Array]) -> Primitive:
    """Of a value and of what is computed first: the result is as the value, also when mapped."""
    primitive = _compat.local_primitive(
        name,
        result=lambda value, *_: (value.shape, value.dtype),
        body=body,
        native={"cpu": call},
        wanted=lambda platform, *_: platform in native.platforms(),
        batch=lambda values, dims: (primitive.bind(*values), dims[0]),
    )
    return primitive


def _struct(value: Array, done: tuple[Array, ...]) -> jax.ShapeDtypeStruct:
    return _compat.varying_struct(value.shape, value.dtype, *map(jax.typeof, (value, *done)))


def _buffer(buffer: Array, *_: Array) -> Array:
    return buffer


def _room(buffer: Array, *done: Array) -> Array:
    made: Array = jax.ffi.ffi_call("jax_ring_room", _struct(buffer, done))(*done)
    return made


def _barrier(value: Array, *done: Array) -> Array:
    result: Array = lax.optimization_barrier((value, done))[0]
    return result


def _same(value: Array, *done: Array) -> Array:
    # It does nothing to the memory that it gets, which is the value's.
    call = jax.ffi.ffi_call("jax_ring_after", _struct(value, done), input_output_aliases={0: 0})
    same: Array = call(value, *done)
    return same


room_p = _primitive("jax_ring_room", _buffer, _room)
after_p = _primitive("jax_ring_after", _barrier, _same)
