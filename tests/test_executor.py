"""What the program is made of: permutes, bytes, memory, size, names. Read from compiled HLO."""

import collections
import functools
import math
import pathlib
import re

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from algorithms import ALL_REDUCES, recursive_doubling, swapped_in_reverse
from harness import compiled, integers, mesh, per_rank, same_bits, sharded
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import executor, native
from jax_ring.plan import plan
from jax_ring.schedules import Kind, Op, Schedule, Step, verify
from jax_ring.schedules.families import make, names
from jax_ring.schedules.schedule import Run, Steps

N = 8


@pytest.fixture(autouse=True)
def by_the_ring():
    """What is read off programs here is the ring's; tests/test_choose.py is about the choice."""
    with jax_ring.config(algorithm="ring"):
        yield


def program(f, length, n=N, out_specs=P(), dtype=np.float32, donate=False, shape=None):
    """Compiles f for ranks that each hold `shape`, by default (length,)."""
    m = mesh(n)
    shape = (length,) if shape is None else shape
    g = jax.shard_map(
        lambda v: f(v.reshape(shape)), mesh=m, in_specs=P("x"), out_specs=out_specs, check_vma=True
    )
    whole = (n * shape[0], *shape[1:]) if shape else (n,)
    return compiled(g, sharded(m, P("x"), whole, dtype), donate_argnums=0 if donate else ())


def psum(v, **kwargs):
    return jax_ring.psum(v, "x", **kwargs)


# --- communication --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("length", [1, 7, 64, 1001])
def test_a_sum_is_2_n_minus_1_permutes_of_a_chunk(n, length):
    hlo = program(psum, length, n)
    assert hlo.permutes == [("f32", math.ceil(length / n))] * (2 * (n - 1))
    assert hlo.other_collectives == []


@pytest.mark.parametrize("shape", [(), (8, 3), (3, 8), (3, 5), (2, 3, 64), (16, 1, 5), (6, 4)])
def test_a_chunk_is_no_larger_for_any_shape(shape):
    hlo = program(psum, None, shape=shape)
    assert hlo.permutes == [("f32", math.ceil(math.prod(shape) / N))] * 14


@pytest.mark.parametrize("n", [2, 5, 8])
def test_scatters_and_gathers_are_n_minus_1_permutes(n):
    scatter = program(
        lambda v: jax_ring.psum_scatter(v, "x", tiled=True), 3 * n, n, out_specs=P("x")
    )
    gather = program(lambda v: jax_ring.all_gather(v, "x", to="invarying"), 3, n)
    for hlo in (scatter, gather):
        assert hlo.permutes == [("f32", 3)] * (n - 1)
        assert hlo.other_collectives == []


def test_two_axes_are_one_ring():
    m = mesh(2, 4)
    f = jax.shard_map(
        lambda v: jax_ring.psum(v, ("x", "y")), mesh=m, in_specs=P("x"), out_specs=P()
    )
    hlo = compiled(f, sharded(m, P("x"), (32,)))
    assert hlo.permutes == [("f32", 2)] * 14


def test_groups_are_rings_side_by_side():
    f = functools.partial(psum, axis_index_groups=[[0, 2, 4, 6], [1, 3, 5, 7]])
    assert program(f, 16, out_specs=P("x")).permutes == [("f32", 4)] * 6


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (ml_dtypes.bfloat16, "u16"),
        (np.float16, "u16"),
        (np.int8, "s8"),
        (np.uint8, "u8"),
        (np.int32, "s32"),
        (np.complex64, "c64"),
    ],
)
def test_nothing_is_widened_on_the_way(dtype, bits):
    """XLA:CPU sends a bfloat16 permute as float32; its bits as an integer stay what they are."""
    hlo = program(psum, 64, dtype=dtype)
    assert hlo.permutes == [(bits, 8)] * 14


def test_narrow_floats_are_gathered_as_bits():
    for dtype, bits in [(ml_dtypes.float8_e4m3fn, "u8"), (ml_dtypes.bfloat16, "u16")]:
        f = functools.partial(jax_ring.all_gather, axis_name="x", to="invarying")
        assert program(f, 4, dtype=dtype).permutes == [(bits, 4)] * 7


def test_reduce_dtype_travels_while_reducing_and_the_result_afterwards():
    hlo = program(functools.partial(psum, reduce_dtype=jnp.float32), 64, dtype=ml_dtypes.bfloat16)
    assert hlo.permutes == [("f32", 8)] * 7 + [("u16", 8)] * 7


def test_reduce_dtype_is_honoured_on_both_axes():
    m = mesh(2, 4)
    x = np.ones((8, 16), ml_dtypes.bfloat16)
    x[3] = 256
    f = functools.partial(jax_ring.psum, axis_name=("x", "y"), reduce_dtype=jnp.float32)
    assert (per_rank(f, m, x).astype(np.float32) == 264).all()
    g = jax.shard_map(f, mesh=m, in_specs=P("x"), out_specs=P())
    kinds = {kind for kind, _ in compiled(g, sharded(m, P("x"), (32,), x.dtype)).permutes}
    assert kinds == {"f32", "u16"}


def test_a_mean_divides_chunks_not_buffers():
    hlo = program(lambda v: jax_ring.pmean(v, "x"), 64, n=7)
    assert hlo.counts["divide"] + hlo.counts["multiply"] > 0
    sizes = [
        math.prod(int(d) for d in dims.split(","))
        for dims in re.findall(r" = f32\[([\d,]+)\]\S* (?:divide|multiply)\(", hlo.text)
    ]
    assert sizes
    assert max(sizes) == 10


# --- memory and passes over it --------------------------------------------------------------------

ROOM = "cpu" in native.platforms()
SCALARS = 1024  # bytes: XLA keeps the rank, and where each chunk starts


@pytest.mark.parametrize("shape", [(1 << 14,), (128, 128), (1, 1 << 14), (3, 4096), (8, 16, 33)])
@pytest.mark.parametrize("donate", [True, False])
def test_memory_of_an_even_sum_is_three_chunks_or_two_and_a_copy(shape, donate):
    m = mesh(N)
    size = math.prod(shape)
    g = jax.shard_map(psum, mesh=m, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    whole = sharded(m, P("x"), (N * shape[0], *shape[1:]))
    hlo = compiled(g, whole, donate_argnums=0 if donate else ())
    assert hlo.memory.temp_size_in_bytes <= (3 if ROOM else 2) * 4 * size // N + SCALARS
    assert hlo.memory.alias_size_in_bytes == (4 * size if donate else 0)
    # Without native code what is not donated is copied once, to be the result.
    assert hlo.copies_of(size) == ({} if donate or ROOM else {"copy": 1})


@pytest.mark.parametrize("length", [1001, 16_001, 16_007])
def test_memory_of_an_uneven_sum_is_one_more_buffer(length):
    hlo = program(psum, length)
    chunk = math.ceil(length / N)
    assert hlo.memory.temp_size_in_bytes <= 4 * N * chunk + 2 * 4 * chunk + SCALARS
    assert hlo.copies_of(length) == {"pad": 1, "slice": 1}


def test_memory_of_a_scatter_is_two_chunks():
    hlo = program(lambda v: jax_ring.psum_scatter(v, "x", tiled=True), 1 << 14, out_specs=P("x"))
    assert hlo.memory.temp_size_in_bytes <= 2 * 4 * (1 << 14) // N + SCALARS
    assert hlo.copies_of(1 << 14) == {}


@pytest.mark.parametrize("tiled", [True, False])
def test_memory_of_a_gather_is_two_chunks(tiled):
    hlo = program(lambda v: jax_ring.all_gather(v, "x", tiled=tiled, to="invarying"), 1 << 11)
    assert hlo.memory.temp_size_in_bytes <= 2 * 4 * (1 << 11) + SCALARS
    assert hlo.copies_of(1 << 14) == {}


# --- size -----------------------------------------------------------------------------------------


def lowered_for(n, collective="psum"):
    """StableHLO for any number of ranks; no devices are needed."""
    m = AbstractMesh((n,), ("x",), (AxisType.Explicit,))
    bodies = {
        "psum": (lambda v: jax_ring.psum(v, "x"), P()),
        "psum_scatter": (lambda v: jax_ring.psum_scatter(v, "x", tiled=True), P("x")),
        "all_gather": (lambda v: jax_ring.all_gather(v, "x", to="invarying"), P()),
    }
    body, out = bodies[collective]
    f = jax.jit(jax.shard_map(body, mesh=m, in_specs=P("x"), out_specs=out))
    x = jax.ShapeDtypeStruct((n * n * 2,), np.float32, sharding=NamedSharding(m, P("x")))
    return f.trace(x).lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("collective", ["psum", "psum_scatter", "all_gather"])
def test_the_program_for_512_ranks_is_not_larger_than_twice_that_for_32(collective):
    small = len(lowered_for(32, collective))
    for n in (64, 256, 512):
        assert len(lowered_for(n, collective)) <= 2 * small


@pytest.mark.parametrize("n", [2, 4, 7, 8])
@pytest.mark.parametrize(
    "dtype", [np.float32, pytest.param(ml_dtypes.bfloat16, marks=pytest.mark.slow)]
)
def test_loops_give_the_bits_of_the_unrolled_form(n, dtype):
    x = np.random.default_rng(0).normal(size=(n, 5 * n + 1)).astype(dtype)
    even = x[:, : 4 * n]

    def f(v, w):
        return (
            jax_ring.psum(v, "x"),
            jax_ring.pmean(w, "x", reduce_dtype=jnp.float32),
            jax_ring.psum_scatter(w, "x", tiled=True),
            jax_ring.all_gather(w, "x"),
            jax_ring.pmax(v, "x"),
        )

    unrolled = per_rank(f, n, x, even)
    with jax_ring.config(unroll=1):
        rolled = per_rank(f, n, x, even)
    assert all(map(same_bits, unrolled, rolled))


def test_a_loop_is_one():
    def f(v):
        with jax_ring.config(unroll=2):  # as it is when the collective is called
            return psum(v)

    hlo = program(f, 64)
    assert hlo.counts["while"] == 2
    assert len(hlo.permutes) == 3


# --- any schedule ---------------------------------------------------------------------------------


def scattered_chunks(n):
    """A gather that sends two chunks that do not lie side by side."""
    half = n // 2
    near = Step(
        tuple((r, (r + half) % n) for r in range(n)),
        [[r] for r in range(n)],
        [[(r - half) % n] for r in range(n)],
        Op.COPY,
    )
    around = [
        Step(
            tuple((r, (r + 1) % n) for r in range(n)),
            [[(r - s) % n, (r - s + half) % n] for r in range(n)],
            [[(r - 1 - s) % n, (r - 1 - s + half) % n] for r in range(n)],
            Op.COPY,
        )
        for s in range(half - 1)
    ]
    return Schedule(n, n, [near, *around], Kind.ALL_GATHER, "two_ways")


@pytest.mark.parametrize("make", ALL_REDUCES)
@pytest.mark.parametrize("n", [2, 8, pytest.param(4, marks=pytest.mark.slow)])
def test_schedules_unlike_the_ring(make, n):
    schedule = make(n)
    verify(schedule)
    x = integers((n, 3 * n + 1), np.float32)
    wide = np.ones((n, 5), ml_dtypes.bfloat16)
    wide[n - 1] = 256

    def f(v, w):
        return (
            jax_ring.psum(v, "x", algorithm=schedule),
            jax_ring.pmean(v, "x", algorithm=schedule),
            jax_ring.pmax(v, "x", algorithm=schedule),
            jax_ring.all_reduce(v, "x", "prod", algorithm=schedule),
            jax_ring.psum(w, "x", algorithm=schedule, reduce_dtype=jnp.float32),
        )

    # It is this schedule that runs: one permute a step.
    hlo = program(lambda v: jax_ring.psum(v, "x", algorithm=schedule), 3 * n, n)
    assert len(hlo.permutes) == len(schedule.steps)
    total, mean, top, product, rounded = per_rank(f, n, x, wide)
    assert (total == x.sum(0)).all()
    np.testing.assert_allclose(mean, np.tile(x.mean(0), (n, 1)), 1e-6)
    assert (top == x.max(0)).all()
    assert (product == x.prod(0)).all()
    assert (rounded == np.float32(256 + n - 1).astype(ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize("make", ALL_REDUCES)
@pytest.mark.parametrize("n", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_schedules_unlike_the_ring_over_a_vmapped_axis(make, n):
    x = integers((n, 3 * n + 1), np.float32) + 1
    for op, numpy in (("sum", np.sum), ("max", np.max), ("min", np.min)):
        f = functools.partial(jax_ring.all_reduce, axis_name="i", op=op, algorithm=make(n))
        assert (jax.vmap(f, axis_name="i")(x) == numpy(x, axis=0)).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_whole_buffer_at_once_sums_alike_wherever_an_element_lies(dtype):
    """So that putting gradients into buckets changes nothing."""
    x = np.random.default_rng(5).normal(size=(8, 37)).astype(dtype)

    def f(v):
        g = functools.partial(jax_ring.psum, axis_name="x", algorithm=recursive_doubling(8))
        return g(v), jnp.concatenate([g(v[:5]), g(v[5:])])

    whole, parts = per_rank(f, 8, x)
    assert same_bits(whole, parts)


@pytest.mark.parametrize("n", [4, 8])
def test_messages_of_chunks_that_are_not_neighbours(n):
    schedule = scattered_chunks(n)
    verify(schedule)
    x = integers((n, 3), np.float32, high=99)
    out = per_rank(lambda v: jax_ring.all_gather(v, "x", algorithm=schedule), n, x)
    assert (np.asarray(out) == x).all()


def reads_last_in_a_loop(n):
    """A ring for the even chunks beside recursive doubling, and one copy too many, for the odd."""
    ranks = np.arange(n)
    around = tuple((r, (r + 1) % n) for r in range(n))
    nothing, early = np.zeros((n, 1), np.int64), np.full((n, 1), 2 * n - 2)
    odd = np.tile(np.arange(1, 2 * n, 2), (n, 1))

    def even(r):
        return (2 * r % (2 * n))[:, None]

    runs = [
        Run(Step(around, even(ranks - 1), even(ranks - 2), Op.REDUCE, 0), n - 1, -2),
        Run(Step(around, even(ranks), even(ranks - 1), Op.COPY, 0), n, -2),
        *(
            Run(Step(tuple((r, r ^ bit) for r in range(n)), odd, odd, Op.REDUCE, 1), 1)
            for bit in (1 << i for i in range(n.bit_length() - 1))
        ),
        Run(Step((), nothing, nothing, Op.COPY, 2), 1),
        Run(Step(((1, 0),), early, early, Op.COPY, 2), 1),
    ]
    return Schedule(n, 2 * n, Steps(runs, 2 * n), Kind.ALL_REDUCE, "reads_last_in_a_loop")


@pytest.mark.parametrize("unroll", [1, 32])
def test_what_waits_to_be_stored_is_stored_after_the_loop_that_reads_last(unroll):
    schedule = reads_last_in_a_loop(N)
    verify(schedule)
    assert plan(schedule).stores_from == 6
    x = integers((N, 4 * N), np.float32)
    with jax_ring.config(unroll=unroll):
        out = per_rank(lambda v: jax_ring.psum(v, "x", algorithm=schedule), N, x)
    assert (np.asarray(out) == x.sum(0)).all()


def test_all_chunks_at_once_in_another_order():
    x = integers((2, 5), np.float32)
    out = per_rank(lambda v: jax_ring.psum(v, "x", algorithm=swapped_in_reverse()), 2, x)
    assert (np.asarray(out) == x.sum(0)).all()


def test_a_scatter_whose_result_is_not_the_last_value():
    """Each rank sends all chunks straight to their owners; the owner's turn comes at any step."""
    n = 4
    ranks = np.arange(n)
    steps = [
        Step(tuple((r, (r + d) % n) for r in range(n)), (ranks + d) % n, ranks, Op.REDUCE)
        for d in range(1, n)
    ]
    direct = Schedule(n, n, steps, Kind.REDUCE_SCATTER, "direct")
    verify(direct)
    x = integers((n, 2 * n), np.float32)
    out = per_rank(
        lambda v: (
            jax_ring.psum_scatter(v, "x", tiled=True, algorithm=direct),
            jax_ring.reduce_scatter(v, "x", "mean", tiled=True, algorithm=direct),
        ),
        n,
        x,
    )
    assert (np.asarray(out[0]).reshape(-1) == x.sum(0)).all()
    np.testing.assert_allclose(np.asarray(out[1]).reshape(-1), x.mean(0), 1e-6)


# --- profiles, caches, limits ---------------------------------------------------------------------


def test_every_step_has_a_name():
    m = mesh(N)
    f = jax.shard_map(psum, mesh=m, in_specs=P("x"), out_specs=P())
    text = jax.jit(f).lower(sharded(m, P("x"), (64,))).compile().as_text()
    for s in range(7):
        assert f"jax_ring.psum/ring/reduce_scatter/{s}/" in text
        assert f"jax_ring.psum/ring/all_gather/{7 + s}/" in text


def test_more_than_2_to_the_31_elements_do_not_overflow_an_index():
    """Lowered only: the starts of chunks must fit their type."""
    length = 2**31 + 8
    m = AbstractMesh((8,), ("x",), (AxisType.Explicit,))
    for shape in ((length,), (length, 1), (1, length)):
        f = jax.jit(jax.shard_map(psum, mesh=m, in_specs=P(None), out_specs=P()))
        x = jax.ShapeDtypeStruct(shape, np.int8, sharding=NamedSharding(m, P()))
        text = f.trace(x).lower(lowering_platforms=("cpu",)).as_text()
        assert f"tensor<8x{length // 8}xi8>" in text
        constants = [int(c) for c in re.findall(r"dense<(-?\d+)> : tensor<i32>", text)]
        assert max(map(abs, constants)) <= 8


@pytest.mark.parametrize("collective", ["psum_scatter", "all_gather"])
def test_long_dimensions_do_not_overflow_an_index(collective):
    """Lowered only, as a block's start may not be computed from a rank in 32 bits."""
    m = AbstractMesh((8,), ("x",), (AxisType.Explicit,))
    length = 2**32 if collective == "psum_scatter" else 2**29
    f = functools.partial(getattr(jax_ring, collective), axis_name="x", tiled=True)
    g = jax.jit(jax.shard_map(f, mesh=m, in_specs=P(None), out_specs=P("x")))
    x = jax.ShapeDtypeStruct((length,), np.int8, sharding=NamedSharding(m, P()))
    text = g.trace(x).lower(lowering_platforms=("cpu",)).as_text()
    constants = [int(c) for c in re.findall(r"dense<(-?\d+)> : tensor<i32>", text)]
    assert max(map(abs, constants)) <= 8
    assert f"tensor<8x{2**29}xi8>" in text


def test_symbolic_shapes_are_refused():
    """XLA crashes on their slices."""
    m = mesh(N)
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((8 * b, 16), np.float32, sharding=NamedSharding(m, P("x")))

    def exported(algorithm):
        f = functools.partial(psum, algorithm=algorithm)
        g = jax.jit(jax.shard_map(f, mesh=m, in_specs=P("x"), out_specs=P()))
        return jax.export.export(g)(x)

    with pytest.raises(ValueError, match=r"symbolic shape \(b, 16\); it must be constant"):
        exported("ring")
    data = integers((40, 16), np.float32)
    placed = jax.device_put(data, NamedSharding(m, P("x")))
    total = jax.jit(exported("xla").call)(placed)
    assert (np.asarray(total) == data.reshape(8, 5, 16).sum(0)).all()


@pytest.mark.parametrize("wire", [None, "int8"])
def test_exported_programs_have_no_custom_calls(wire):
    f = functools.partial(psum, algorithm="ring", wire=wire)
    g = jax.jit(jax.shard_map(f, mesh=mesh(N), in_specs=P("x"), out_specs=P()))
    exported = jax.export.export(g)(sharded(mesh(N), P("x"), (64,)))
    assert re.findall(r"custom_call @(jax_ring\w*)", exported.mlir_module()) == []
    x = integers((N, 8), np.float32)
    total = jax.jit(exported.call)(jax.device_put(x.ravel(), NamedSharding(mesh(N), P("x"))))
    np.testing.assert_allclose(total, x.sum(0), atol=0.1 if wire else 0)


def test_two_traces_give_the_same_program():
    assert lowered_for(8) == lowered_for(8)


def test_communication_and_private_names_each_have_one_place():
    root = pathlib.Path(executor.__file__).parent
    users = {p.name for p in root.rglob("*.py") if re.search(r"lax\.ppermute\(", p.read_text())}
    assert users == {"executor.py"}
    private = {p.name for p in root.rglob("*.py") if "jax._src" in p.read_text()}
    assert private == {"_compat.py"}
    partitioning = {p.name for p in root.rglob("*.py") if "custom_partitioning" in p.read_text()}
    assert not partitioning


def test_both_directions_of_a_ring_send_half_each():
    size = N * 1000
    f = jax.shard_map(
        lambda v: jax_ring.psum(v, "x", algorithm="bidirectional_ring"),
        mesh=mesh(N),
        in_specs=P("x"),
        out_specs=P(),
    )
    hlo = compiled(f, sharded(mesh(N), P("x"), (N * size,)))
    first = re.findall(r"source_target_pairs=\{\{(\d+),(\d+)\}", hlo.text)
    directions = collections.Counter((int(b) - int(a)) % N for a, b in first)
    assert hlo.permutes == [("f32", size // N)] * 14
    assert directions == {1: 8, N - 1: 6}
    assert not hlo.other_collectives


# Channels drawn at random.


@st.composite
def side_by_side(draw):
    """Algorithms in channels of their own, each over chunks and an order of ranks of its own."""
    n = draw(st.integers(2, 6))
    chosen = draw(st.lists(st.sampled_from(names(Kind.ALL_REDUCE)), min_size=1, max_size=3))
    parts = [make(name, Kind.ALL_REDUCE, n) for name in chosen]
    total = sum(p.chunks for p in parts)
    places = draw(st.permutations(range(total)))
    steps, first, channel = [], 0, 0
    for part in parts:
        own = np.array(places[first : first + part.chunks])
        first += part.chunks
        order = draw(st.permutations(range(n)))
        position = np.argsort(order)
        idle = draw(st.integers(0, 3))
        # The channels of a part advance together, so idle rounds go in front of all of them.
        for c in range(max(part.channels, 1)):
            nothing = np.zeros((n, 1), int)
            steps += [Step((), nothing, nothing, Op.COPY, channel + c)] * idle
            for step in part.steps:
                if step.channel == c:
                    perm = tuple((order[s], order[d]) for s, d in step.perm)
                    send, recv = own[step.send][position], own[step.recv][position]
                    steps.append(Step(perm, send, recv, step.op, channel + c))
        channel += max(part.channels, 1)
    return Schedule(n, total, steps, Kind.ALL_REDUCE, "drawn")


def by_vmap(f, x):
    return np.asarray(jax.vmap(f, axis_name="i")(x))


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    side_by_side(),
    st.sampled_from([1, 32]),
    st.integers(1, 90),
    st.sampled_from([None, None, "bfloat16", "int8"]),
    st.booleans(),
)
def test_channels_drawn_at_random(schedule, unroll, size, wire, mean):
    verify(schedule)
    n = schedule.ranks
    x = np.random.default_rng(size).integers(-3, 4, (n, size)).astype(np.float32)
    f = jax_ring.pmean if mean else jax_ring.psum
    with jax_ring.config(unroll=unroll):
        try:
            rows = by_vmap(lambda v: f(v, "i", algorithm=schedule, wire=wire), x)
        except NotImplementedError:  # It copies chunks before all sums are made.
            reject()
        wide = {"algorithm": schedule, "reduce_dtype": jnp.float32}
        narrow = by_vmap(lambda v: f(v, "i", **wide), x.astype(jnp.bfloat16)).astype(np.float32)
    rows, narrow = (np.broadcast_to(r, x.shape) for r in (rows, narrow))
    want = x.mean(0) if mean else x.sum(0)
    assert all(r.tobytes() == rows[0].tobytes() for r in rows)
    if wire is None and not mean:
        assert (rows[0] == want).all()
    else:
        np.testing.assert_allclose(rows[0], want, atol=0.02 if wire is None else 0.35, rtol=0.01)
    np.testing.assert_allclose(narrow[0], want, rtol=0.01)


def chain(chunks):
    """0 -> 1 -> 2 -> 1 -> 0: a channel to a hop, each a round behind the one before it."""
    hops = [(0, 1, Op.REDUCE), (1, 2, Op.REDUCE), (2, 1, Op.COPY), (1, 0, Op.COPY)]
    steps = []
    for channel, (source, target, op) in enumerate(hops):
        steps += [Step((), [0] * 3, [0] * 3, Op.COPY, channel)] * channel
        steps += [Step(((source, target),), [c] * 3, [c] * 3, op, channel) for c in range(chunks)]
    return Schedule(3, chunks, steps, Kind.ALL_REDUCE, "chain")


@pytest.mark.parametrize(
    ("chunks", "unroll"), [(6, 1), (6, 32), pytest.param(40, 32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", [np.int32, ml_dtypes.bfloat16])
def test_channels_that_pass_on_what_others_made_are_not_looped(chunks, unroll, dtype):
    schedule = chain(chunks)
    verify(schedule)
    x = integers((3, chunks * 2), dtype, high=9)
    with jax_ring.config(unroll=unroll):
        how = {"algorithm": schedule} | ({} if dtype == np.int32 else {"reduce_dtype": jnp.float32})
        rows = per_rank(lambda v: jax_ring.psum(v, "x", **how), 3, x)
    assert all(same_bits(row, x.sum(0, dtype=dtype)) for row in np.asarray(rows))
