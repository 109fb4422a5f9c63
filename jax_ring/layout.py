"""How a buffer of any shape is divided into equal chunks.

Where every mesh axis of more than one device is manual, a dimension that the number of chunks
divides is cut into blocks as it is; if there is none, the buffer is flattened (which moves nothing)
and filled up. Buffers are not reshaped without need: XLA fuses the reshape into the update of the
buffer, which is then made in a copy.

Where some axes are left to the compiler a dimension may be sharded over them, and cutting it into
blocks would gather it. Unless it is known not to be, one dimension of size c n is split into
(c, n), and chunk j is index j of the second of the two: every device keeps its part of every chunk.
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
INT32_MAX = 2**31 - 1


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
    if left_to_compiler() > 1:
        mesh = jax.sharding.get_abstract_mesh()
        spec = jax.typeof(x).sharding.spec if mesh.manual_axes else ()
        return _split(x, chunks, mesh, spec)
    for d in range(x.ndim):
        if _can_cut(x, d, chunks):
            return _cut(x.shape, d, chunks)
    return _flat(x.size, chunks)


def left_to_compiler() -> int:
    """Over how many devices the compiler may shard an array here: 1 where all axes are manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(int(size) for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Chunks as the rows of a buffer [chunks, ..., n], from any buffer of chunks and back.

    Attributes:
      shape: the shape of the buffer of chunks, whose dimension `axis` holds them, one to an index.
      axis: that dimension.
      flat: whether a row has one dimension. It has those of a chunk, the longest last, where some
        may be sharded by the compiler.
    """

    shape: tuple[int, ...]
    axis: int
    flat: bool

    @property
    def _last(self) -> int:
        """The dimension of a chunk that is put last, counted without the chunks' own."""
        chunk = [size for d, size in enumerate(self.shape) if d != self.axis]
        return max(range(len(chunk)), key=chunk.__getitem__)

    def divide(self, buffer: Array) -> Array:
        """The rows of a buffer; the dimension of chunks may be of another size than in `shape`."""
        rows = jnp.moveaxis(buffer, self.axis, 0)
        if self.flat:
            return rows.reshape(rows.shape[0], -1)
        return jnp.moveaxis(rows, self._last + 1, -1)

    def restore(self, rows: Array) -> Array:
        """The inverse of `divide`."""
        if self.flat:
            chunk = [size for d, size in enumerate(self.shape) if d != self.axis]
            rows = rows.reshape(rows.shape[0], *chunk)
        else:
            rows = jnp.moveaxis(rows, -1, self._last + 1)
        return jnp.moveaxis(rows, 0, self.axis)


def choose_rows(x: Array, chunks: int) -> tuple[Layout, Rows]:
    """The layout in which an array's chunks are rows, one after the other in memory if possible.

    Args:
      x: as in `choose`.
      chunks: the number of chunks.

    Returns:
      A layout whose chunks are one index each, and how its buffer becomes rows.
    """
    if left_to_compiler() == 1:
        block = -(-x.size // chunks)
        shape = (chunks, block)
        return Layout((x.size,), 0, block * chunks, shape, 0, 1), Rows(shape, 0, True)
    division = choose(x, chunks)
    if division.block > 1 or division.shape[division.axis] == chunks * division.block:
        d = division.axis
        split = (*division.shape[:d], chunks, division.block, *division.shape[d + 1 :])
        division = dataclasses.replace(division, shape=split, block=1)
    return division, Rows(division.shape, division.axis, False)


def _can_cut(x: Array, d: int, chunks: int) -> bool:
    """Whether dimension d can be cut into blocks as it is, and its rows are worth it."""
    size = x.shape[d]
    if size % chunks or size > INT32_MAX:
        return False
    row = size // chunks * math.prod(x.shape[d + 1 :]) * x.dtype.itemsize
    return row >= _SHORTEST_ROW_BYTES or math.prod(x.shape[:d]) == 1


def _cut(shape: tuple[int, ...], d: int, chunks: int) -> Layout:
    return Layout(shape, d, shape[d], shape, d, shape[d] // chunks)


def _flat(size: int, chunks: int) -> Layout:
    block = -(-size // chunks)
    length = block * chunks
    if length > INT32_MAX:  # where the start of a chunk would not fit an int32
        return Layout((size,), 0, length, (chunks, block), 0, 1)
    return Layout((size,), 0, length, (length,), 0, block)


def _split(x: Array, chunks: int, mesh: Any, spec: Any) -> Layout:
    shape = x.shape or (1,)
    shards = [_shards(entry, mesh.shape) for entry in spec] or [1] * len(shape)
    known = not any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)
    if known:
        for d in range(x.ndim):
            if shards[d] == 1 and _can_cut(x, d, chunks):
                return _cut(shape, d, chunks)

    def preference(d: int) -> tuple[bool, bool, bool, int]:
        """No filling, not known to be sharded, rows of a cache line or more, the longest."""
        row = math.prod(shape[d + 1 :]) * x.dtype.itemsize
        fits = shape[d] % (chunks * shards[d]) == 0
        return fits, shards[d] == 1, row >= _SHORTEST_ROW_BYTES, shape[d]

    d = max(range(len(shape)), key=preference)
    # Each device keeps whole rows, or the chunks themselves would be sharded.
    rows = -(-shape[d] // (chunks * shards[d])) * shards[d]
    divided = (*shape[:d], rows, chunks, *shape[d + 1 :])
    return Layout(shape, d, rows * chunks, divided, d + 1, 1)


def _shards(entry: Any, sizes: Any) -> int:
    names = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(int(sizes[name]) for name in names if name in sizes)
