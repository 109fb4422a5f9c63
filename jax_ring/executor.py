"""Turns a schedule into a program: the only place that emits communication.

Each step is a `ppermute`, a slice and a reduction, as `jax_ring.plan` decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring.plan import Segment, own_chunks, plan
from jax_ring.schedules import Op, Schedule
from jax_ring.schedules.schedule import Perm, Table, affine

Array = jax.Array
Groups = tuple[tuple[int, ...], ...]


# --- ranks and messages --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Communicator:
    """The ranks that take part, and how they reach each other.

    Attributes:
      axes: the mesh axes in the caller's order, major first.
      sizes: their sizes.
      groups: the groups of ranks that communicate among themselves, all of one size; None for
        one group of all. Ranks that are in no group take part in nothing.
      mesh_order: the same axes in the mesh's order, which `ppermute` wants.
      emulated: whether the axis is that of the innermost vmap, whose rows are the ranks.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: Groups | None = None
    mesh_order: tuple[str, ...] = ()
    emulated: bool = False

    @property
    def world(self) -> int:
        """Ranks on the axes, over all groups."""
        return math.prod(self.sizes)

    @property
    def size(self) -> int:
        """Ranks in a group."""
        return self.world if self.groups is None else len(self.groups[0])

    @property
    def everyone(self) -> bool:
        """Whether every device is in one of the groups."""
        return self.groups is None or len(self.groups) * self.size == self.world

    def takes_part(self) -> Array:
        """Whether this device is in one of the groups."""
        return self.member(self.index(), range(self.size))

    def rank(self) -> Array:
        """This device's rank in its group."""
        return self.lookup(self.index(), np.arange(self.size), self.size)

    def index(self) -> Array:
        """This device's index along the axes, in the caller's order."""
        index: Array | int = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            index = index * size + lax.axis_index(axis)
        return jnp.asarray(index, jnp.int32)

    def lookup(self, index: Array, column: Table, modulus: int) -> Array:
        """The entry, for the device at `index`, of a column with one for each rank of a group."""
        full = np.asarray(column)
        if self.groups is not None:
            full = np.zeros(self.world, np.int64)
            for group in self.groups:
                full[list(group)] = column
        form = affine(full, modulus)
        if form is None:
            table = jnp.asarray(full, jnp.int32)
            return cast(Array, lax.dynamic_index_in_dim(table, index, keepdims=False))
        a, b = form
        if a == 0:
            return jnp.asarray(b, jnp.int32)
        return lax.rem(index * jnp.int32(a) + jnp.int32(b), jnp.int32(modulus))

    def member(self, index: Array, ranks: Sequence[int]) -> Array:
        """Whether the device at `index` is one of some ranks of its group."""
        column = np.zeros(self.size, np.int64)
        column[list(ranks)] = 1
        return self.lookup(index, column, 2) == 1

    def permute(self, x: Array, perm: Perm) -> Array:
        """Sends x along perm, in every group at once."""
        pairs = list(perm)
        if self.groups is not None:
            pairs = [(group[s], group[d]) for group in self.groups for s, d in perm]
        if self.emulated:
            return _permute_rows(x, pairs, self.world)
        pairs = [(self._in_mesh_order(s), self._in_mesh_order(d)) for s, d in pairs]
        axes = self.mesh_order or self.axes
        bits, restore = _as_bits(x)
        return restore(lax.ppermute(bits, axes if len(axes) > 1 else axes[0], pairs))

    def _in_mesh_order(self, index: int) -> int:
        if not self.mesh_order or self.mesh_order == self.axes:
            return index
        position = dict(zip(self.axes, np.unravel_index(index, self.sizes), strict=True))
        size = dict(zip(self.axes, self.sizes, strict=True))
        return int(
            np.ravel_multi_index(
                [int(position[axis]) for axis in self.mesh_order],
                [size[axis] for axis in self.mesh_order],
            )
        )


def _permute_rows(x: Array, pairs: list[tuple[int, int]], world: int) -> Array:
    """What `ppermute` does when the ranks are the rows of the innermost vmap.

    lax's own wants a full permutation there, and fails where varying types are checked. A rank that
    no one sends to keeps its row, which is not looked at.
    """
    source = np.arange(world)
    for sender, receiver in pairs:
        source[receiver] = sender

    @jax.custom_batching.custom_vmap
    def permute(row: Array) -> Array:
        return row

    @permute.def_vmap
    def _(axis_size: int, in_batched: list[bool], rows: Array) -> tuple[Array, bool]:
        del axis_size
        return (rows[source] if in_batched[0] else rows), in_batched[0]

    return cast(Array, permute(x))


def _as_bits(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Narrow floats travel as integers, or XLA:CPU widens them (bfloat16 to float32) on the way."""
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 2:
        return x, lambda y: y
    bits = jnp.uint16 if dtype.itemsize == 2 else jnp.uint8
    return lax.bitcast_convert_type(x, bits), lambda y: lax.bitcast_convert_type(y, dtype)


# --- executing -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How chunks are reduced.

    Attributes:
      combine: the associative and commutative function of two arrays.
      dtype: the type in which partial results are held and travel.
      finish: applied to each finished chunk once, by the rank that finishes it, before the result
        is rounded to the type of the data; None for nothing.
    """

    combine: Callable[[Array, Array], Array]
    dtype: Any
    finish: Callable[[Array], Array] | None = None


class _Execution:
    """A schedule being traced over one buffer with a dimension of chunks."""

    def __init__(
        self,
        schedule: Schedule,
        comm: Communicator,
        arithmetic: Arithmetic | None,
        axis: int,
        block: int,
        dtype: Any,
        label: str,
    ) -> None:
        self.schedule, self.comm, self.label = schedule, comm, label
        self.axis, self.block = axis, block
        self.plan = plan(schedule)
        self.index = comm.index()
        self.result_dtype = dtype
        self.arithmetic = arithmetic or Arithmetic(lambda a, b: a, dtype)
        self.buffer_dtype = self.arithmetic.dtype if self.plan.widened else dtype

    def finish(self, value: Array) -> Array:
        """What a finished chunk looks like in the result."""
        if self.arithmetic.finish is not None:
            value = self.arithmetic.finish(value)
        return value.astype(self.result_dtype)

    def load(self, buffer: Array, rows: list[Array] | Array | None, k: int) -> Array:
        """Reads k chunks; `rows` as the method of that name gives it."""
        if rows is None:
            return buffer
        if isinstance(rows, list):
            parts = [self.load(buffer, row, 1) for row in rows]
            return lax.concatenate(parts, self.axis)
        sizes = list(buffer.shape)
        sizes[self.axis] = k * self.block
        return lax.dynamic_slice(
            buffer, self._starts(buffer, rows), sizes, allow_negative_indices=False
        )

    def store(self, buffer: Array, value: Array, rows: list[Array] | Array | None) -> Array:
        """Writes chunks where `load` would read them."""
        if rows is None:
            return value
        if isinstance(rows, list):
            for i, row in enumerate(rows):
                start, stop = i * self.block, (i + 1) * self.block
                part = lax.slice_in_dim(value, start, stop, axis=self.axis)
                buffer = self.store(buffer, part, row)
            return buffer
        starts = self._starts(buffer, rows)
        return lax.dynamic_update_slice(buffer, value, starts, allow_negative_indices=False)

    def _starts(self, buffer: Array, row: Array) -> list[Array]:
        zero = jnp.zeros((), row.dtype)
        start = row * self.block if self.block > 1 else row
        return [start if d == self.axis else zero for d in range(buffer.ndim)]

    def rows(self, table: Table, t: Array | int, advance: int) -> list[Array] | Array | None:
        """Where this rank's chunks are: one start, k separate ones, or None for all of them."""
        chunks, k = self.schedule.chunks, table.shape[1]
        span = np.arange(k)
        if k == chunks and (table == span).all():
            return None
        stays = advance == 0
        if k == 1 or (stays and (table == table[:, :1] + span).all()):
            return self._row(table[:, 0], t, advance)
        return [self._row(table[:, i], t, advance) for i in range(k)]

    def _row(self, column: Table, t: Array | int, advance: int) -> Array:
        chunks = self.schedule.chunks
        if isinstance(t, int):
            return self.comm.lookup(self.index, (column + t * advance) % chunks, chunks)
        base = self.comm.lookup(self.index, column, chunks)
        return lax.rem(base + t.astype(jnp.int32) * jnp.int32(advance), jnp.int32(chunks))

    def step(
        self, segment: Segment, t: Array | int, buffer: Array, value: Array | None
    ) -> tuple[Array, Array]:
        """One step: send, reduce or copy what arrives, store it if it is read again."""
        step, advance = segment.first, segment.advance
        if value is None:
            value = self.load(buffer, self.rows(step.send, t, advance), step.k)
        value = self.comm.permute(value.astype(self.dtype_of(step.op)), step.perm)
        rows = self.rows(step.recv, t, advance)
        if step.op is Op.REDUCE:
            local = self.load(buffer, rows, step.k).astype(self.arithmetic.dtype)
            value = self.arithmetic.combine(value, local)
        if segment.finishes:
            value = self.finish(value)
        if not segment.store:
            return buffer, value
        kept = value
        if len(step.perm) < self.comm.size:
            # Ranks that no one sends to keep what they have.
            receives = self.comm.member(self.index, [target for _, target in step.perm])
            kept = jnp.where(receives, value, self.load(buffer, rows, step.k))
        return self.store(buffer, kept, rows), value

    def dtype_of(self, op: Op) -> Any:
        """Sums travel in the type of the arithmetic, what is copied in that of the buffer."""
        return self.arithmetic.dtype if op is Op.REDUCE else self.buffer_dtype

    def segment(
        self, segment: Segment, buffer: Array, value: Array | None, unroll: int
    ) -> tuple[Array, Array]:
        """All steps of a segment, unrolled or as a loop."""
        phase = "reduce_scatter" if segment.first.op is Op.REDUCE else "all_gather"
        if segment.load_first:
            value = None
        if segment.count <= unroll:
            for t in range(segment.count):
                with jax.named_scope(f"{self.label}/{phase}/{segment.start + t}"):
                    held = None if t and segment.load_rest else value
                    buffer, value = self.step(segment, t, buffer, held)
            return buffer, cast(Array, value)
        with jax.named_scope(f"{self.label}/{phase}/loop"):
            return self._loop(segment, buffer, value)

    def _loop(self, segment: Segment, buffer: Array, value: Array | None) -> tuple[Array, Array]:
        step = segment.first
        if value is None:
            value = self.load(buffer, self.rows(step.send, 0, 0), step.k)
        value = value.astype(self.dtype_of(step.op))
        if not segment.store:
            # The buffer is only read, so the loop does not carry it.
            return buffer, lax.fori_loop(
                0, segment.count, lambda t, v: self._iterate(segment, t, buffer, v)[1], value
            )
        carried: tuple[Array, Array] = lax.fori_loop(
            0, segment.count, lambda t, carry: self._iterate(segment, t, *carry), (buffer, value)
        )
        return carried

    def _iterate(
        self, segment: Segment, t: Array, buffer: Array, value: Array
    ) -> tuple[Array, Array]:
        buffer, produced = self.step(segment, t, buffer, None if segment.load_rest else value)
        return buffer, produced.astype(value.dtype)

    def run(self, buffer: Array, value: Array | None, unroll: int) -> tuple[Array, Array | None]:
        """All segments."""
        for segment in self.plan.segments:
            buffer, value = self.segment(segment, buffer, value, unroll)
        return buffer, value


def all_reduce(
    schedule: Schedule,
    buffer: Array,
    comm: Communicator,
    arithmetic: Arithmetic,
    *,
    axis: int,
    block: int,
    unroll: int,
    label: str,
) -> Array:
    """Executes an all-reduce.

    Args:
      schedule: of kind ALL_REDUCE, for `comm.size` ranks.
      buffer: the local data; dimension `axis` holds `schedule.chunks` blocks.
      comm: who takes part.
      arithmetic: how chunks are reduced.
      axis: the dimension along which the chunks lie.
      block: the size of a chunk along it.
      unroll: longer segments become loops.
      label: names the steps in a profile.

    Returns:
      The reduced buffer, of the same shape and dtype.
    """
    run = _Execution(schedule, comm, arithmetic, axis, block, buffer.dtype, label)
    result, _ = run.run(buffer.astype(run.buffer_dtype), None, unroll)
    return run.finish(result) if run.plan.widened else result


def reduce_scatter(
    schedule: Schedule,
    buffer: Array,
    comm: Communicator,
    arithmetic: Arithmetic,
    *,
    axis: int,
    block: int,
    unroll: int,
    label: str,
) -> Array:
    """Executes a reduce-scatter.

    Args:
      schedule: of kind REDUCE_SCATTER, for `comm.size` ranks.
      buffer: the local data; dimension `axis` holds `schedule.chunks` blocks.
      comm: who takes part.
      arithmetic: how chunks are reduced.
      axis: the dimension along which the chunks lie.
      block: the size of a chunk along it.
      unroll: longer segments become loops.
      label: names the steps in a profile.

    Returns:
      This rank's chunks, reduced: `buffer` with a dimension `axis` of chunks / ranks blocks.
    """
    run = _Execution(schedule, comm, arithmetic, axis, block, buffer.dtype, label)
    result, value = run.run(buffer.astype(run.buffer_dtype), None, unroll)
    if not run.plan.result_is_last_value or value is None:
        own = own_chunks(schedule)
        value = run.load(result, run.rows(own, 0, 0), own.shape[1])
    return run.finish(value) if run.plan.widened else value


def all_gather(
    schedule: Schedule,
    chunk: Array,
    comm: Communicator,
    *,
    axis: int,
    block: int,
    unroll: int,
    label: str,
) -> Array:
    """Executes an all-gather.

    Args:
      schedule: of kind ALL_GATHER, for `comm.size` ranks.
      chunk: this rank's data; dimension `axis` holds chunks / ranks blocks.
      comm: who takes part.
      axis: the dimension along which the chunks lie.
      block: the size of a chunk along it.
      unroll: longer segments become loops.
      label: names the steps in a profile.

    Returns:
      The chunks of all ranks: `chunk` with a dimension `axis` of `schedule.chunks` blocks.
    """
    run = _Execution(schedule, comm, None, axis, block, chunk.dtype, label)
    rows = run.rows(own_chunks(schedule), 0, 0)
    buffer = _blank(chunk, axis, schedule.ranks)
    if any(segment.load_first or segment.load_rest for segment in run.plan.segments):
        return run.run(run.store(buffer, chunk, rows), chunk, unroll)[0]
    # Nothing is sent from the buffer, so sending need not wait for the own chunk to be stored.
    return run.store(run.run(buffer, chunk, unroll)[0], chunk, rows)


def _blank(chunk: Array, axis: int, ranks: int) -> Array:
    """Room for the chunks of all ranks, of the chunk's type."""
    aval = jax.typeof(chunk)
    zero = jnp.zeros((), chunk.dtype)
    if varying := tuple(aval.manual_axis_type.varying):
        zero = lax.pcast(zero, varying, to="varying")
    shape = list(chunk.shape)
    shape[axis] *= ranks
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    return lax.broadcast(zero, shape, out_sharding=aval.sharding if explicit else None)
