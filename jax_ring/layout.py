"""How a buffer of any shape is divided into equal chunks.

Where every mesh axis is manual, a dimension that the number of chunks divides is cut into blocks
as it is; if there is none, the buffer is flattened (which moves nothing) and filled up. Buffers are
not reshaped without need: XLA fuses the reshape into the update of the buffer, which is then made
in a copy.

Where some axes are left to the compiler a dimension may be sharded over them, and cutting it into
blocks would gather it. There one dimension of size c n is split into (c, n), and chunk j is index j
of the second of the two, so that every device keeps its part of every chunk.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

# Rows shorter than a cache line make every pass over a chunk touch the lines of the others too.
_SHORTEST_ROW_BYTES = 64
_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """How data of one shape becomes a buffer of chunks.

    Attributes:
      source: the shape as which the data is seen first.
      filled: the dimension of it that is filled up to `length`.
      length: the size that dimension is filled up to.
      shape: the shape of the buffer.
      axis: the dimension of the buffer along which the chunks lie.
      block: the size of a chunk along it.
    """

    source: tuple[int, ...]
    filled: int
    length: int
    shape: tuple[int, ...]
    axis: int
    block: int

    def divide(self, x: Array, padding: Any) -> Array:
        """The data as a buffer of chunks."""
        x = x.reshape(self.source)
        missing = self.length - self.source[self.filled]
        if missing:
            config = [(0, missing if d == self.filled else 0, 0) for d in range(x.ndim)]
            x = lax.pad(x, jnp.asarray(padding, x.dtype), config)
        return x.reshape(self.shape)

    def restore(self, buffer: Array, shape: tuple[int, ...]) -> Array:
        """The inverse of `divide`, for data of the given shape."""
        filled = list(self.source)
        filled[self.filled] = self.length
        whole = buffer.reshape(filled)
        if self.length != self.source[self.filled]:
            whole = lax.slice_in_dim(whole, 0, self.source[self.filled], axis=self.filled)
        return whole.reshape(shape)


def choose(x: Array, chunks: int) -> Layout:
    """The layout for an array in the current mesh.

    Args:
      x: the array, of at least one element; its explicit sharding, if any, is respected.
      chunks: the number of chunks.

    Returns:
      A layout that needs no communication.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.manual_axes) != set(mesh.axis_names):
        return _split(x, chunks, mesh.shape)
    for d, size in enumerate(x.shape):
        row = math.prod(x.shape[d:]) // chunks * x.dtype.itemsize
        long_enough = row >= _SHORTEST_ROW_BYTES or math.prod(x.shape[:d]) == 1
        if size % chunks == 0 and long_enough and size <= _INT32_MAX:
            return Layout(x.shape, d, size, x.shape, d, size // chunks)
    return _flat(x.size, chunks)


def _flat(size: int, chunks: int) -> Layout:
    block = -(-size // chunks)
    length = block * chunks
    if length > _INT32_MAX:  # where the start of a chunk would not fit an int32
        return Layout((size,), 0, length, (chunks, block), 0, 1)
    return Layout((size,), 0, length, (length,), 0, block)


def _split(x: Array, chunks: int, mesh_shape: Any) -> Layout:
    shape = x.shape or (1,)
    shards = [_shards(entry, mesh_shape) for entry in jax.typeof(x).sharding.spec] or [1]

    def preference(d: int) -> tuple[bool, bool, int]:
        """What needs no filling, then what is not known to be sharded, then the longest."""
        return (shape[d] % (chunks * shards[d]) == 0, shards[d] == 1, shape[d])

    d = max(range(len(shape)), key=preference)
    rows = -(-shape[d] // chunks)
    divided = (*shape[:d], rows, chunks, *shape[d + 1 :])
    return Layout(shape, d, rows * chunks, divided, d + 1, 1)


def _shards(entry: Any, sizes: Any) -> int:
    names = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(int(sizes[name]) for name in names if name in sizes)
