"""How a buffer of any shape is divided into equal chunks.

Where every mesh axis is manual the buffer is flattened, which is free. Where some axes are left to
the compiler a dimension may be sharded over them, and flattening would gather it: there one
dimension of size c n is split into (c, n), and chunk j is index j of the second of the two, so that
every device keeps its part of every chunk.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Layout:
    """A buffer divided into chunks.

    Attributes:
      shape: the shape of the data.
      dimension: the dimension that is split; None if the data is flattened first.
      chunks: the number of chunks.
    """

    shape: tuple[int, ...]
    dimension: int | None
    chunks: int

    @property
    def axis(self) -> int:
        """The dimension of chunks in the divided buffer."""
        return 0 if self.dimension is None else self.dimension + 1

    @property
    def length(self) -> int:
        """Elements along what is split."""
        return math.prod(self.shape) if self.dimension is None else self.shape[self.dimension]

    @property
    def chunk(self) -> int:
        """Elements of a chunk along what is split."""
        return -(-self.length // self.chunks)

    def divide(self, x: Array, padding: Any) -> Array:
        """The buffer with a dimension of chunks, filled up where the length is uneven."""
        d = self.dimension
        if d is None:
            return self._padded(x.reshape(-1), 0, padding).reshape(self.chunks, self.chunk)
        shape = (*self.shape[:d], self.chunk, self.chunks, *self.shape[d + 1 :])
        return self._padded(x.reshape(self.shape), d, padding).reshape(shape)

    def restore(self, buffer: Array, shape: tuple[int, ...]) -> Array:
        """The inverse of `divide`, for data of the given shape."""
        d = self.dimension or 0
        padded = list(self.shape) if self.dimension is not None else [self.length]
        padded[d] = self.chunk * self.chunks
        whole = buffer.reshape(padded)
        if self.length != padded[d]:
            whole = lax.slice_in_dim(whole, 0, self.length, axis=d)
        return whole.reshape(shape)

    def _padded(self, x: Array, dimension: int, padding: Any) -> Array:
        missing = self.chunk * self.chunks - self.length
        if not missing:
            return x
        config = [(0, missing if d == dimension else 0, 0) for d in range(x.ndim)]
        return lax.pad(x, jnp.asarray(padding, x.dtype), config)


def choose(x: Array, chunks: int) -> Layout:
    """The layout for an array in the current mesh.

    Args:
      x: the array; its explicit sharding, if any, is respected.
      chunks: the number of chunks.

    Returns:
      A layout that needs no communication.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.manual_axes) == set(mesh.axis_names):
        return Layout(x.shape, None, chunks)
    if x.ndim == 0:
        return Layout((1,), 0, chunks)
    shards = [_shards(entry, mesh.shape) for entry in jax.typeof(x).sharding.spec]
    return Layout(x.shape, _dimension(x.shape, shards, chunks), chunks)


def _shards(entry: Any, sizes: Any) -> int:
    names = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(int(sizes[name]) for name in names if name in sizes)


def _dimension(shape: tuple[int, ...], shards: list[int], chunks: int) -> int:
    """Prefers what needs no padding, then what is not known to be sharded, then the longest."""

    def preference(d: int) -> tuple[bool, bool, int]:
        return (shape[d] % (chunks * shards[d]) == 0, shards[d] == 1, shape[d])

    return max(range(len(shape)), key=preference)
