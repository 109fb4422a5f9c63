"""Turns a schedule into a program: the only place that emits communication.

Each step is a `ppermute`, a slice and a reduction, as `jax_ring.plan` decides.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import room
from jax_ring.chunk_reduce import Codec, rounded, scaled
from jax_ring.layout import left_to_compiler
from jax_ring.plan import Origin, Places, Plan, Segment, Source, Sum, own_chunks, plan, suits_calls
from jax_ring.schedules import Op, Schedule
from jax_ring.schedules.schedule import Perm, Table, affine
from jax_ring.wire import Message, mix

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
      codec: without a wire; its function of two arrays is associative and commutative.
      dtype: the type in which partial results are held and travel.
      finish: applied to each finished chunk once, by the rank that finishes it, before the result
        is rounded to the type of the data; None for nothing.
    """

    codec: Codec
    dtype: Any
    finish: Callable[[Array], Array] | None = None


Rows = list[Array] | Array | None
Hands = dict[int, Any]  # By channel.
Active = list[tuple[Segment, int]]  # Segments, and how many of their steps are done.


def _origin(segment: Segment, t: Array | int) -> Origin:
    return segment.traits.origin if isinstance(t, int) and t == 0 else segment.rest


class _Execution:
    """A schedule being traced over one buffer with a dimension of chunks."""

    def __init__(self, schedule: Schedule, comm: Communicator, label: str) -> None:
        self.schedule, self.comm, self.label = schedule, comm, label
        self.plan = plan(schedule)
        self.index = comm.index()
        # What the step before in each channel sent, for a step that sends it again.
        self.sent: Hands = {}
        # Whether what is stored next may go into new memory.
        self.renews = self.plan.renews and not comm.emulated
        # What waits in hand to be stored.
        self.waiting: list[tuple[Segment, Array | int]] = []

    # What subclasses say: how chunks are sent, reduced and stored. What a channel has in hand, for
    # a step to send or to add to, is theirs to define.

    def outgoing(self, segment: Segment, t: Array | int, buffer: Array, held: Any) -> Any:
        """The message of a step that does not send again what was sent."""
        raise NotImplementedError

    def among(self, held: Any, places: Places) -> Any:
        """Some of the chunks in hand, as if a step had produced these alone."""
        raise NotImplementedError

    def reduce(
        self, segment: Segment, t: Array | int, arrived: Any, buffer: Array, held: Any
    ) -> Any:
        """What a REDUCE step holds."""
        raise NotImplementedError

    def copy(self, arrived: Any) -> Any:
        """What a COPY step holds."""
        raise NotImplementedError

    def kept(self, segment: Segment, t: Array | int, buffer: Array, held: Any) -> Array:
        """The buffer after what a step holds was stored."""
        raise NotImplementedError

    def carried(self, segment: Segment, held: Any) -> Any:
        """What is held, as a loop over the segment's steps carries it on."""
        raise NotImplementedError

    def before_loop(self, segment: Segment, t: int, buffer: Array, hands: Hands) -> Any:
        """What a loop starts from: what it holds for its first step to send."""
        origin = _origin(segment, t)
        if origin.source is Source.LOAD:
            held = self.outgoing(segment, t, buffer, None)
        else:
            held = hands[origin.channel]
        return self.carried(segment, held)

    def _row(self, column: Table, t: Array | int, advance: int) -> Array:
        chunks = self.schedule.chunks
        if isinstance(t, int):
            return self.comm.lookup(self.index, (column + t * advance) % chunks, chunks)
        base = self.comm.lookup(self.index, column, chunks)
        return lax.rem(base + t.astype(jnp.int32) * jnp.int32(advance), jnp.int32(chunks))

    def send(self, segment: Segment, t: Array | int, buffer: Array, hands: Hands) -> Any:
        """What arrives in a step."""
        channel, origin = segment.first.channel, _origin(segment, t)
        if origin.source is not Source.RESEND:
            forwarded = None
            if origin.source is Source.FORWARD:
                forwarded = self._in_hand(hands, origin)
            self.sent[channel] = self.outgoing(segment, t, buffer, forwarded)
        perm = segment.first.perm
        return jax.tree.map(lambda part: self.comm.permute(part, perm), self.sent[channel])

    def _in_hand(self, hands: Hands, origin: Origin | Sum) -> Any:
        held = hands[origin.channel]
        return held if origin.places is None else self.among(held, origin.places)

    def receive(
        self, segment: Segment, t: Array | int, arrived: Any, buffer: Array, hands: Hands
    ) -> tuple[Array, Any]:
        """Reduces or copies what arrives."""
        step, traits = segment.first, segment.traits
        if step.op is Op.COPY:
            return buffer, self.copy(arrived)
        held = self._in_hand(hands, traits.adds_to or Sum(step.channel))
        if traits.raw and isinstance(t, int):
            # Ties what is encoded next to this: XLA:GPU otherwise sends all contributions
            # first, keeps all that arrive, and only then adds them.
            buffer, arrived, held = lax.optimization_barrier((buffer, arrived, held))
        held = self.reduce(segment, t, arrived, buffer, held)
        if traits.raw and isinstance(t, int):
            # Keeps the next encoding out of this sum's kernel, which could not add in place.
            buffer = lax.optimization_barrier(buffer)
        return buffer, held

    def keep(
        self, segments: list[tuple[Segment, Array | int]], buffer: Array, hands: Hands
    ) -> Array:
        """Stores what is read again, once the plan allows it."""
        storing = [(segment, t) for segment, t in segments if segment.traits.store]
        segment, t = segments[0]
        if not isinstance(t, int):  # What a loop stores does not wait.
            return self._store(storing, buffer, hands)
        self.waiting += storing
        return buffer if segment.start + t < self.plan.stores_from else self._flush(buffer, hands)

    def _flush(self, buffer: Array, hands: Hands) -> Array:
        storing, self.waiting = self.waiting, []
        return self._store(storing, buffer, hands)

    def _store(
        self, storing: list[tuple[Segment, Array | int]], buffer: Array, hands: Hands
    ) -> Array:
        if not storing:
            return buffer
        # Ties each store to the permute after next: XLA:GPU otherwise puts all stores behind the
        # last permute, and keeps every chunk that arrived until then. And all stores come after
        # the channels' sums, which would otherwise be of a copy of the buffer.
        channels = [segment.first.channel for segment, _ in storing]
        tied = [(hands[channel], self.sent[channel]) for channel in channels]
        buffer, tied = lax.optimization_barrier((buffer, tied))
        for channel, (held, sent) in zip(channels, tied, strict=True):
            hands[channel], self.sent[channel] = held, sent
        if self.renews:
            buffer, self.renews = room.in_place_of(buffer, hands), False
        for (segment, t), channel in zip(storing, channels, strict=True):
            buffer = self.kept(segment, t, buffer, hands[channel])
        return buffer

    def where_received(self, step: Any, value: Array, old: Callable[[], Array]) -> Array:
        """A value, but on ranks that no one sends to what they have."""
        if len(step.perm) == self.comm.size:
            return value
        receives = self.comm.member(self.index, step.targets)
        return jnp.where(receives, value, old())

    def round(
        self, active: Active, t: Array | int, buffer: Array, hands: Hands
    ) -> tuple[Array, Hands]:
        """A step of every active channel: all send first, then each receives."""
        before, after, arrivals = hands, dict(hands), []
        for segment, done in active:
            with jax.named_scope(self.scope(segment, done, t)):
                arrivals.append(self.send(segment, done + t, buffer, before))
        at = [(segment, done + t) for segment, done in active]
        for i, (segment, done) in enumerate(active):
            with jax.named_scope(self.scope(segment, done, t)):
                channel = segment.first.channel
                buffer, after[channel] = self.receive(segment, done + t, arrivals[i], buffer, after)
                if self.plan.in_turn or i == len(active) - 1:
                    received = at[i : i + 1] if self.plan.in_turn else at
                    buffer = self.keep(received, buffer, after)
        return buffer, after

    def scope(self, segment: Segment, done: int, t: Array | int) -> str:
        """What a step is called in a profile."""
        phase = "reduce_scatter" if segment.first.op is Op.REDUCE else "all_gather"
        if len(self.plan.channels) > 1:
            phase = f"channel{segment.first.channel}/{phase}"
        index = segment.start + done + t if isinstance(t, int) else "loop"
        return f"{self.label}/{phase}/{index}"

    def _loop(self, active: Active, count: int, buffer: Array, hands: Hands) -> tuple[Array, Hands]:
        """Rounds that are alike, as a loop."""
        start = {s.first.channel: self.before_loop(s, done, buffer, hands) for s, done in active}

        def iterate(t: Array, buffer: Array, held: Hands) -> tuple[Array, Hands]:
            buffer, held = self.round(active, t, buffer, {**hands, **held})
            return buffer, {
                s.first.channel: self.carried(s, held[s.first.channel]) for s, _ in active
            }

        if any(segment.traits.store for segment, _ in active):
            if self.renews and not any(_loads(segment) for segment, _ in active):
                buffer = room.in_place_of(buffer, (hands, start))
            self.renews = False
            carry = (buffer, start)
            buffer, held = lax.fori_loop(0, count, lambda t, carry: iterate(t, *carry), carry)
        else:
            # The buffer is only read, so the loop does not carry it.
            held = lax.fori_loop(0, count, lambda t, held: iterate(t, buffer, held)[1], start)
        return buffer, {**hands, **held}

    def _follow(self, before: set[int], channels: set[int], buffer: Array, hands: Hands) -> None:
        """Lets channels begin when others have ended."""
        done = (buffer, [hands[channel] for channel in before])
        self.index = room.after(self.index, done)
        for channel in channels:
            hands[channel] = jax.tree.map(lambda part: room.after(part, done), hands[channel])

    def run(self, buffer: Array, held: Any, unroll: int) -> tuple[Array, Hands]:
        """All rounds; in the beginning every channel has the same in hand."""
        hands: Hands = dict.fromkeys(range(len(self.plan.channels)), held)
        before: set[int] = set()
        for count, active in _spans(self.plan):
            channels = {segment.first.channel for segment, _ in active}
            segment, done = active[0]
            if segment.start + done > self.plan.stores_from:
                buffer = self._flush(buffer, hands)
            if before and before.isdisjoint(channels):
                self._follow(before, channels, buffer, hands)
            before = channels
            if count > unroll and all(_alone(segment) for segment, _ in active):
                buffer, hands = self._loop(active, count, buffer, hands)
                continue
            for t in range(count):
                buffer, hands = self.round(active, t, buffer, hands)
        return self._flush(buffer, hands), hands


def _alone(segment: Segment) -> bool:
    """Whether its steps after the first take nothing from hand but what their channel sends on.

    That is all that a loop carries for a channel; what another one produced is not.
    """
    channel, rest = segment.first.channel, segment.rest
    forwards = rest.source is Source.LOAD or rest.channel == channel
    return forwards and segment.traits.adds_to is None


def _loads(segment: Segment) -> bool:
    """Whether its steps read the buffer."""
    sums = segment.first.op is Op.REDUCE and segment.traits.adds_to is None
    return sums or Source.LOAD in (segment.traits.origin.source, segment.rest.source)


def _spans(plan: Plan) -> Iterator[tuple[int, Active]]:
    """Stretches of rounds in which no segment begins or ends, and the active ones."""
    segments = plan.segments
    cuts = sorted({cut for s in segments for cut in (s.start, s.start + s.count)})
    for start, stop in itertools.pairwise(cuts):
        active = [(s, start - s.start) for s in segments if s.start <= start < s.start + s.count]
        if active:
            yield stop - start, active


_NO_SUMS = Codec(None, "custom", lambda a, _: a, "xla")


class _Plain(_Execution):
    """Chunks travel as they are. A step holds an array: its chunks."""

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
        super().__init__(schedule, comm, label)
        self.axis, self.block = axis, block
        self.result_dtype = dtype
        self.arithmetic = arithmetic or Arithmetic(_NO_SUMS, dtype)
        self.buffer_dtype = self.arithmetic.dtype if self.plan.widened else dtype

    def load(self, buffer: Array, rows: Rows, k: int) -> Array:
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

    def store(self, buffer: Array, value: Array, rows: Rows) -> Array:
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

    def rows(self, table: Table, t: Array | int, advance: int) -> Rows:
        """Where this rank's chunks are: one start, k separate ones, or None for all of them."""
        chunks, k = self.schedule.chunks, table.shape[1]
        span = np.arange(k)
        if k == chunks and (table == span).all():
            return None
        stays = advance == 0
        if k == 1 or (stays and (table == table[:, :1] + span).all()):
            return self._row(table[:, 0], t, advance)
        return [self._row(table[:, i], t, advance) for i in range(k)]

    def cut(self, buffer: Array, rows: Rows, k: int) -> Array:
        """As `load`, for a message: it is not read on the way to something else."""
        return self.load(buffer, rows, k)

    def add(self, arrived: Array, buffer: Array, rows: Rows, k: int) -> Array:
        """The sum of what arrived and what `load` would read."""
        dtype = self.arithmetic.dtype
        local = self.load(buffer, rows, k)
        return self.arithmetic.codec.combine(arrived.astype(dtype), local.astype(dtype))

    def finish(self, value: Array) -> Array:
        """What a finished chunk looks like in the result."""
        if self.arithmetic.finish is not None:
            value = self.arithmetic.finish(value)
        return value.astype(self.result_dtype)

    def outgoing(self, segment: Segment, t: Array | int, buffer: Array, held: Any) -> Any:
        """Chunks in the type in which they travel."""
        step = segment.first
        if held is None:
            held = self.cut(buffer, self.rows(step.send, t, segment.advance), step.k)
        return held.astype(self._travels_in(segment))

    def among(self, held: Any, places: Places) -> Any:
        """Their chunks."""
        table = np.array(places)
        return self.load(held, self.rows(table, 0, 0), table.shape[1])

    def _travels_in(self, segment: Segment) -> Any:
        """Sums travel in the type of the arithmetic, what is copied in that of the buffer."""
        if segment.first.op is Op.COPY:
            return self.buffer_dtype
        return self.result_dtype if segment.traits.raw else self.arithmetic.dtype

    def reduce(
        self, segment: Segment, t: Array | int, arrived: Any, buffer: Array, held: Any
    ) -> Any:
        """The sums, finished if the step completes them."""
        step, rows = segment.first, None
        if segment.traits.adds_to is None:
            rows, held = self.rows(step.recv, t, segment.advance), buffer
        total = self.add(arrived, held, rows, step.k)
        return self.finish(total) if segment.traits.finishes else total

    def copy(self, arrived: Any) -> Any:
        """What arrived."""
        return arrived

    def kept(self, segment: Segment, t: Array | int, buffer: Array, held: Any) -> Array:
        """The buffer with the chunks."""
        step = segment.first
        rows = self.rows(step.recv, t, segment.advance)
        held = self.where_received(step, held, lambda: self.load(buffer, rows, step.k))
        return self.store(buffer, held.astype(buffer.dtype), rows)

    def carried(self, segment: Segment, held: Any) -> Any:
        """In the type in which it travels."""
        return held.astype(self._travels_in(segment))


class _ByCall(_Plain):
    """Custom calls cut, add and store the chunks, a chunk or all of them in a step.

    XLA:CPU runs them in the thread that it is in, but hands its own loops over a chunk to other
    threads, and waits. The buffer is [chunks, n], and what a step holds has one dimension: a
    reshape between two calls that work in place would be a copy.
    """

    def load(self, buffer: Array, rows: Rows, k: int) -> Array:
        """In one dimension."""
        return super().load(buffer, rows, k).reshape(-1)

    def store(self, buffer: Array, value: Array, rows: Rows) -> Array:
        """All as they are, or one by a call."""
        if rows is None:
            return value.reshape(buffer.shape)
        return self.arithmetic.codec.decode(value, buffer, cast(Array, rows))

    def cut(self, buffer: Array, rows: Rows, k: int) -> Array:
        """By a call, if not all are sent."""
        if rows is None:
            return self.load(buffer, rows, k)
        return cast(Array, self.arithmetic.codec.encode(buffer, cast(Array, rows)))

    def add(self, arrived: Array, buffer: Array, rows: Rows, k: int) -> Array:
        """By a call, to a chunk or to all that is there."""
        codec = self.arithmetic.codec
        if not codec.adds(buffer.dtype):
            return super().add(arrived, buffer, rows, k)
        row = cast(Array, rows)
        if rows is None:
            buffer, row = buffer.reshape(1, -1), jnp.int32(0)
        return cast(Array, codec.reduce(arrived, buffer, row, finish=False, encode=True))

    def among(self, held: Any, places: Places) -> Any:
        """Their chunks."""
        return super().among(held.reshape(self.schedule.chunks, -1), places)


# XLA can put a sum of whole buffers in place of a donated operand, a call only in place of what
# arrived. Measured: from about so many bytes on that saves more than a call does.
_LARGE_WHOLE = 8 << 20


def _by_rows(
    schedule: Schedule, buffer: Array, comm: Communicator, arithmetic: Arithmetic, axis: int
) -> bool:
    """Whether custom calls are to work on the chunks, which must be one after the other in memory.

    Processes may differ in it: what travels is the same.
    """
    apart = math.prod(buffer.shape[:axis]) > 1
    if apart or comm.emulated or left_to_compiler() > 1 or buffer.dtype != arithmetic.dtype:
        return False
    if schedule.chunks == 1 and buffer.size * buffer.dtype.itemsize > _LARGE_WHOLE:
        return False
    rows = jax.ShapeDtypeStruct((1, buffer.size), buffer.dtype)
    return suits_calls(schedule) and arithmetic.codec.calls(rows)


def _plain(
    schedule: Schedule,
    buffer: Array,
    comm: Communicator,
    arithmetic: Arithmetic,
    axis: int,
    block: int,
    label: str,
) -> tuple[_Plain, Array]:
    """The execution of a schedule that reduces, and the buffer as it wants it."""
    kind, dtype = _Plain, buffer.dtype
    if _by_rows(schedule, buffer, comm, arithmetic, axis):
        kind, axis, block = _ByCall, 0, 1
        buffer = buffer.reshape(schedule.chunks, -1)
    run = kind(schedule, comm, arithmetic, axis, block, dtype, label)
    return run, buffer.astype(run.buffer_dtype)


@dataclasses.dataclass(frozen=True)
class Sealed:
    """What a step over a wire holds: a message, or a value to which more is added."""

    message: Message = None
    value: Array | None = None


jax.tree_util.register_dataclass(Sealed, ["message", "value"], [])


class _Wired(_Execution):
    """Chunks travel as messages of a wire format.

    The buffer is [chunks, ..., n]. What a step produces is kept as a message where the next one
    sends it on: decoding, adding and encoding are then one call. Finished chunks are encoded once,
    by the rank that finishes them, which stores what the message says, as all others do.
    """

    def __init__(
        self,
        schedule: Schedule,
        comm: Communicator,
        codec: Codec,
        label: str,
        *,
        seed: Array | None = None,
        residual: Array | None = None,
        bare: bool = False,
    ) -> None:
        super().__init__(schedule, comm, label)
        self.bare = bare
        self.width = max((run.first.k for run in schedule.steps.runs), default=1)
        self.codec, self.seed, self.residual = codec, seed, residual

    def indices(self, table: Table, t: Array | int, advance: int) -> list[Array]:
        """This rank's chunks, one by one."""
        chunks = self.schedule.chunks
        return [
            jnp.asarray(self._row(table[:, i] % chunks, t, advance), jnp.int32)
            for i in range(table.shape[1])
        ]

    def outgoing(self, segment: Segment, t: Array | int, buffer: Array, held: Any) -> Any:
        """The messages of this step's chunks, as `stacked` has them."""
        if held is not None and held.message is not None:
            return held.message
        rows = self.indices(segment.first.send, t, segment.advance)
        if held is not None:
            buffer, rows = held.value, [jnp.int32(i) for i in range(len(rows))]
        index, channel = segment.start + t, segment.first.channel
        parts = []
        for i, row in enumerate(rows):
            message = self.codec.encode(buffer, row, self.draw(index, channel, 2 * i))
            if self.residual is not None:
                self._keep_error(row, buffer[row], message)
            parts.append(message)
        return self.stacked(parts)

    def among(self, held: Any, places: Places) -> Any:
        """Their messages or values."""
        rows = self.indices(np.array(places), 0, 0)
        return jax.tree.map(lambda part: jnp.stack([part[row] for row in rows]), held)

    def reduce(
        self, segment: Segment, t: Array | int, arrived: Any, buffer: Array, held: Any
    ) -> Any:
        """A message if it is sent on, else the value."""
        traits = segment.traits
        rows = self.indices(segment.first.recv, t, segment.advance)
        encodes = self.seals(segment)
        index, channel = segment.start + t, segment.first.channel
        results = []
        for i, row in enumerate(rows):
            local, at = buffer, row
            if traits.adds_to is not None:
                local, at = held.value, jnp.int32(i)
            if self.plan.redundant:
                # All ranks that make this sum must make the same one, so none may add its own
                # contribution as it is.
                own = self.codec.encode(local, at, self.draw(index, channel, 2 * i))
                local, at = self.codec.value(own, local.shape[-1])[None], jnp.int32(0)
            received = self._message(arrived, i)
            seed = self.draw(index, channel, 2 * i + 1)
            results.append(self._sum(received, local, at, row, seed, traits.finishes, encodes))
        return (
            Sealed(message=self.stacked(results)) if encodes else Sealed(value=jnp.stack(results))
        )

    def _sum(
        self,
        received: Message,
        local: Array,
        at: Array,
        row: Array,
        seed: Array | None,
        finishes: bool,
        encodes: bool,
    ) -> Any:
        fused = encodes and self.residual is None
        total = self.codec.reduce(received, local, at, seed, finish=finishes, encode=fused)
        if fused or not encodes:
            return total
        message = self.codec.encode(total[None], jnp.int32(0), seed)
        self._keep_error(row, total, message, self.codec.factor if finishes else 1.0)
        return message

    def _keep_error(self, row: Array, value: Array, message: Message, factor: float = 1.0) -> None:
        """Stores what a message lost of the value, to be added to the next contribution."""
        assert self.residual is not None
        lost = (value - self.codec.value(message, value.shape[-1])) / factor
        lost = jnp.where(jnp.isfinite(lost), lost, 0.0)
        self.residual = lax.dynamic_update_index_in_dim(self.residual, lost, row, 0)

    def stacked(self, messages: list[Message]) -> Message:
        """The messages of a step with a leading dimension.

        Not where they are the operands of custom calls and each step sends one: XLA would copy it.
        Elsewhere the dimension saves XLA:CPU two copies of the buffer, and keeps XLA:GPU from
        holding two messages more.
        """
        if self.bare:
            return messages[0]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *messages)

    def _message(self, stacked: Message, i: int) -> Message:
        return stacked if self.bare else jax.tree.map(lambda part: part[i], stacked)

    def draw(self, index: Array | int, channel: int, salt: int) -> Array | None:
        """A seed for one message: another for each rank, round, channel and chunk."""
        if self.seed is None:
            return None
        step = index * len(self.plan.channels) + channel
        step = jnp.asarray(step, jnp.uint32) * jnp.uint32(2 * self.width)
        rank = self.index.astype(jnp.uint32)
        return jnp.stack([mix(self.seed[0] + rank), mix(self.seed[1] + step + jnp.uint32(salt))])

    def seals(self, segment: Segment) -> bool:
        """Whether a step holds messages, not values."""
        forwarded = segment.traits.forwarded and not self.plan.redundant
        return forwarded or segment.first.op is Op.COPY

    def before_loop(self, segment: Segment, t: int, buffer: Array, hands: Hands) -> Sealed:
        """As the steps of the loop hold what they produce: messages, or values."""
        origin = _origin(segment, t)
        held = None if origin.source is Source.LOAD else hands[origin.channel]
        if self.seals(segment):
            return Sealed(message=self.outgoing(segment, t, buffer, held))
        if held is not None and held.value is not None:
            return cast(Sealed, held)
        rows = self.indices(segment.first.send, t, segment.advance)
        if held is None:
            values = [buffer[row] for row in rows]
        else:
            values = [self.value(held, i, buffer.shape[-1]) for i in range(len(rows))]
        return Sealed(value=jnp.stack(values).astype(jnp.float32))

    def copy(self, arrived: Any) -> Any:
        """The message that arrived."""
        return Sealed(message=arrived)

    def kept(self, segment: Segment, t: Array | int, buffer: Array, held: Any) -> Array:
        """The buffer with what the messages say, or with the values."""
        rows = self.indices(segment.first.recv, t, segment.advance)
        before = buffer
        for i, row in enumerate(rows):
            if held.message is not None:
                buffer = self.codec.decode(self._message(held.message, i), buffer, row)
            else:
                value = rounded(held.value[i], buffer.dtype)
                buffer = lax.dynamic_update_index_in_dim(buffer, value, row, 0)
        return self.where_received(segment.first, buffer, lambda: before)

    def value(self, held: Sealed, i: int, n: int) -> Array:
        """The chunk number i, of rows of n, of what a step holds."""
        if held.value is not None:
            return held.value[i]
        return self.codec.value(self._message(held.message, i), n)

    def carried(self, segment: Segment, held: Any) -> Any:
        """The same."""
        return held


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
    run, rows = _plain(schedule, buffer, comm, arithmetic, axis, block, label)
    result, _ = run.run(rows, None, unroll)
    return (run.finish(result) if run.plan.widened else result).reshape(buffer.shape)


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
    shape = list(buffer.shape)
    shape[axis] //= comm.size
    run, rows = _plain(schedule, buffer, comm, arithmetic, axis, block, label)
    result, hands = run.run(rows, None, unroll)
    if run.plan.result is not None:
        value = hands[run.plan.result]
    else:
        own = own_chunks(schedule)
        value = run.load(result, run.rows(own, 0, 0), own.shape[1])
    return (run.finish(value) if run.plan.widened else value).reshape(shape)


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
    run = _Plain(schedule, comm, None, axis, block, chunk.dtype, label)
    rows = run.rows(own_chunks(schedule), 0, 0)
    buffer = _blank(chunk, axis, comm)
    origins = [o for s in run.plan.segments for o in (s.traits.origin, s.rest)]
    if any(origin.source is Source.LOAD for origin in origins):
        return run.run(run.store(buffer, chunk, rows), chunk, unroll)[0]
    # Nothing is sent from the buffer, so sending need not wait for the own chunk to be stored.
    return run.store(run.run(buffer, chunk, unroll)[0], chunk, rows)


def _blank(chunk: Array, axis: int, comm: Communicator) -> Array:
    """Room for the chunks of all ranks, of the chunk's type."""
    aval = jax.typeof(chunk)
    shape = list(chunk.shape)
    shape[axis] *= comm.size
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    empty = lax.empty(tuple(shape), chunk.dtype, out_sharding=aval.sharding if explicit else None)
    varying = tuple(aval.manual_axis_type.varying)
    if varying:
        empty = lax.pcast(empty, varying, to="varying")
    return empty if comm.emulated else room.in_place_of(empty, chunk)


# --- over a wire ---------------------------------------------------------------------------------


def wired_all_reduce(
    schedule: Schedule,
    rows: Array,
    comm: Communicator,
    codec: Codec,
    *,
    unroll: int,
    label: str,
    seed: Array | None = None,
    feedback: bool = False,
) -> tuple[Array, Array | None]:
    """Executes an all-reduce over a wire.

    Args:
      schedule: of kind ALL_REDUCE, for `comm.size` ranks.
      rows: [chunks, ..., n], the local data.
      comm: who takes part.
      codec: how chunks travel and are reduced.
      unroll: longer segments become loops.
      label: names the steps in a profile.
      seed: uint32 [2] for formats that round at random.
      feedback: whether to return what this rank's messages lost.

    Returns:
      The reduced rows, and float32 rows of what was lost or None.
    """
    residual = jnp.zeros(rows.shape, jnp.float32) if feedback else None
    bare = _one_call_a_step(schedule, codec, rows)
    state = plan(schedule)
    dtype = rows.dtype
    if state.widened or state.reencodes:
        rows = rows.astype(jnp.float32)

    def execution(part: Schedule) -> _Wired:
        return _Wired(part, comm, codec, label, seed=seed, residual=residual, bare=bare)

    if state.reencodes:
        first = execution(_part(schedule, Op.REDUCE))
        sums, _ = first.run(rows, None, unroll)
        if first.plan.widened:
            sums = scaled(sums, codec.factor)
        result = _gathered_messages(_part(schedule, Op.COPY), sums, first, unroll)
    else:
        run = execution(schedule)
        result, _ = run.run(rows, None, len(schedule.steps) if feedback else unroll)
        residual = run.residual
        if state.widened:
            result = scaled(result, codec.factor)
    return rounded(result, dtype), residual


def _one_call_a_step(schedule: Schedule, codec: Codec, rows: Array) -> bool:
    return codec.calls(rows) and all(run.first.k == 1 for run in schedule.steps.runs)


def _part(schedule: Schedule, op: Op) -> Schedule:
    """The steps up to the last reduction, or those after it."""
    moving = [{step.op for _, step in steps if step.perm} for steps in schedule.by_round()]
    end = max(i for i, ops in enumerate(moving) if Op.REDUCE in ops) + 1
    if any(Op.COPY in ops for ops in moving[:end]):
        raise NotImplementedError(
            f"algorithm={schedule!r} with a lossy wire: it copies chunks from the buffer before "
            "all sums are made; let all copies come last, or send on what just arrived"
        )
    return schedule.part(0, end) if op is Op.REDUCE else schedule.part(end, schedule.rounds)


def _gathered_messages(schedule: Schedule, sums: Array, run: _Wired, unroll: int) -> Array:
    """Copies finished chunks as messages, each encoded once, and reads them all at the end.

    For schedules that send chunks which came in different steps: what a rank has stored is then the
    message, as encoding its value again might not give the same one.
    """
    chunks, n = schedule.chunks, sums.shape[-1]
    codec = run.codec
    after = run.schedule.rounds
    parts = [codec.encode(sums, jnp.int32(j), run.draw(after, 0, 2 * j)) for j in range(chunks)]
    messages, tree = jax.tree.flatten(jax.tree.map(lambda *rows: jnp.stack(rows), *parts))
    gathered = []
    for message in messages:
        copies = _Plain(schedule, run.comm, None, 0, 1, message.dtype, run.label)
        gathered.append(copies.run(message, None, unroll)[0])
    result: Array = codec.value(jax.tree.unflatten(tree, gathered), n)
    return result


def wired_reduce_scatter(
    schedule: Schedule,
    rows: Array,
    comm: Communicator,
    codec: Codec,
    *,
    unroll: int,
    label: str,
    seed: Array | None = None,
) -> Array:
    """Executes a reduce-scatter over a wire: only what travels is rounded.

    Args:
      schedule: of kind REDUCE_SCATTER, with a chunk for each rank.
      rows: [chunks, ..., n], the local data.
      comm: as `wired_all_reduce`.
      codec: as `wired_all_reduce`.
      unroll: as `wired_all_reduce`.
      label: as `wired_all_reduce`.
      seed: as `wired_all_reduce`.

    Returns:
      This rank's chunk: [..., n].
    """
    dtype = rows.dtype
    bare = _one_call_a_step(schedule, codec, rows)
    run = _Wired(schedule, comm, codec, label, seed=seed, bare=bare)
    if run.plan.widened:
        rows = rows.astype(jnp.float32)
    buffer, hands = run.run(rows, None, unroll)
    if run.plan.result is not None:
        chunk = run.value(hands[run.plan.result], 0, rows.shape[-1])
    else:
        own = run.indices(own_chunks(schedule), 0, 0)[0]
        chunk = lax.dynamic_index_in_dim(buffer, own, keepdims=False)
    if run.plan.widened:
        chunk = scaled(chunk, codec.factor)
    return rounded(chunk, dtype)


def wired_all_gather(
    schedule: Schedule,
    chunk: Array,
    comm: Communicator,
    codec: Codec,
    *,
    unroll: int,
    label: str,
    seed: Array | None = None,
) -> Array:
    """Executes an all-gather over a wire: all ranks get what the message of each says.

    Args:
      schedule: of kind ALL_GATHER, with a chunk for each rank.
      chunk: [..., n], this rank's.
      comm: as `wired_all_reduce`.
      codec: as `wired_all_reduce`.
      unroll: as `wired_all_reduce`.
      label: as `wired_all_reduce`.
      seed: as `wired_all_reduce`.

    Returns:
      [ranks, ..., n].
    """
    if seed is not None:
        seed = jnp.stack([mix(seed[0] + comm.index().astype(jnp.uint32)), seed[1]])
    message = codec.encode(chunk[None], jnp.int32(0), seed)
    if plan(schedule).reencodes:
        gathered = [
            all_gather(schedule, part[None], comm, axis=0, block=1, unroll=unroll, label=label)
            for part in jax.tree.leaves(message)
        ]
        messages = jax.tree.unflatten(jax.tree.structure(message), gathered)
        return rounded(codec.value(messages, chunk.shape[-1]), chunk.dtype)
    buffer = _blank(chunk[None], 0, comm)
    bare = _one_call_a_step(schedule, codec, buffer)
    run = _Wired(schedule, comm, codec, label, bare=bare)
    held = Sealed(message=run.stacked([message]))
    own = run.indices(own_chunks(schedule), 0, 0)[0]
    return codec.decode(message, run.run(buffer, held, unroll)[0], own)
