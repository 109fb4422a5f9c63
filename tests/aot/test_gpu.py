"""Programs for 8 and 2 x 8 H200, compiled without one: what travels, when, and what is copied."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot.scheduled import Scheduled, scheduled
from harness import sharded
from jax.sharding import PartitionSpec as P

import jax_ring

pytestmark = pytest.mark.aot

LENGTH = 1 << 24  # float32 on each device: 64 MiB
SCALARS = 16 << 10  # bytes: XLA keeps the rank, and where each chunk starts, in 256 bytes each
MEMORY = 3  # chunks, beyond the result


@pytest.fixture(params=["one_host", "two_hosts"])
def mesh(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def native():
    """Custom calls for all that they are made for; the handlers need not run to be compiled."""
    if "cuda" not in jax_ring.native.platforms():
        pytest.skip(f"no CUDA handlers: {jax_ring.native.status()}")
    with jax_ring.config(reducer="native"):
        yield


@pytest.fixture(params=["xla", "native"])
def reducer(request):
    """Each way to reduce."""
    if request.param == "native":
        request.getfixturevalue("native")
        yield
    else:
        with jax_ring.config(reducer="xla"):
            yield


def psum(x, **kwargs):
    """By the ring unless something else is said, or follows from a wire."""
    by = {} if "wire" in kwargs else {"algorithm": "ring"}
    return jax_ring.psum(x, "data", **by | kwargs)


def program(f, mesh, length=LENGTH, dtype=np.float32, donate=False, out=P()) -> Scheduled:
    """Compiles f for devices that each hold `length` elements."""
    g = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=out)
    x = sharded(mesh, P("data"), (mesh.size * length,), dtype)
    return scheduled(g, x, donate_argnums=0 if donate else ())


def chunks_of_memory(hlo: Scheduled, chunk: int) -> float:
    """The temporary memory, in chunks of so many float32."""
    return (hlo.memory.temp_size_in_bytes - SCALARS) / (4 * chunk)


# --- the ring -------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "kept"])
def test_a_sum_sends_chunks_and_copies_nothing(mesh, donate):
    chunk = LENGTH // mesh.size
    hlo = program(psum, mesh, donate=donate)
    assert hlo.permutes == [("f32", chunk)] * (2 * (mesh.size - 1))
    assert hlo.other_collectives == []
    # What is not donated is copied once, to be the result.
    assert hlo.whole_writes(LENGTH) == ([] if donate else ["copy"])
    assert hlo.memory.alias_size_in_bytes == (4 * LENGTH if donate else 0)
    assert chunks_of_memory(hlo, chunk) <= MEMORY


def test_a_scatter_sends_chunks_and_copies_nothing(mesh):
    chunk = LENGTH // mesh.size
    hlo = program(
        lambda x: jax_ring.psum_scatter(x, "data", tiled=True, algorithm="ring"),
        mesh,
        out=P("data"),
    )
    assert hlo.permutes == [("f32", chunk)] * (mesh.size - 1)
    assert hlo.other_collectives == []
    assert hlo.whole_writes(LENGTH) == []
    assert chunks_of_memory(hlo, chunk) <= MEMORY


def test_a_gather_sends_chunks_and_copies_nothing(mesh):
    chunk = LENGTH // mesh.size
    hlo = program(
        lambda x: jax_ring.all_gather(x, "data", to="invarying", algorithm="ring"),
        mesh,
        length=chunk,
    )
    assert hlo.permutes == [("f32", chunk)] * (mesh.size - 1)
    assert hlo.other_collectives == []
    assert hlo.whole_writes(LENGTH) == []
    assert chunks_of_memory(hlo, chunk) <= MEMORY


def test_a_chunk_is_stored_while_the_next_one_travels(mesh):
    hlo = program(psum, mesh, donate=True)
    gathering = hlo.during_permutes[mesh.size - 1 :]
    # Nothing has arrived yet that the first could be overlapped with, but for the own chunk.
    assert [len(stores) for stores in gathering[1:]] == [1] * (mesh.size - 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8])
def test_narrow_types_stay_narrow(one_host, dtype):
    bits = {1: "s8", 2: "u16"}[jnp.dtype(dtype).itemsize]
    hlo = program(psum, one_host, dtype=dtype, donate=True)
    assert hlo.permutes == [(bits, LENGTH // 8)] * 14
    assert hlo.whole_writes(LENGTH) == []


def test_a_direct_exchange_without_a_wire_holds_a_chunk_more(one_host, reducer):
    # The most that there is; over a wire, where it is the default, what travels is smaller.
    hlo = program(lambda x: psum(x, algorithm="direct"), one_host, donate=True)
    assert hlo.permutes == [("f32", LENGTH // 8)] * 14
    assert hlo.whole_writes(LENGTH) == []
    assert chunks_of_memory(hlo, LENGTH // 8) <= MEMORY + 1


# --- wires ----------------------------------------------------------------------------------------

BLOCK = 256


def even(n: int) -> int:
    return n + n % 2


def scales(n: int) -> int:
    """Bytes: a bfloat16 for each block."""
    return 2 * math.ceil(n / BLOCK)


# The element type of a message, its elements for a chunk of n, and what it may cost at most,
# relative to float32.
WIRES = {
    "bfloat16": ("u16", lambda n: n, 0.505),
    "float16": ("u16", lambda n: n, 0.505),
    "float8_e4m3fn": ("u8", lambda n: even(n) + scales(n), 0.27),
    "float8_e5m2": ("u8", lambda n: even(n) + scales(n), 0.27),
    "int8": ("s8", lambda n: even(n) + scales(n), 0.27),
    "int4": ("u8", lambda n: even(math.ceil(n / 2)) + scales(n), 0.15),
}
BYTES = {"u16": 2, "u8": 1, "s8": 1, "f32": 4}

each_wire = pytest.mark.parametrize("wire", WIRES)


def message(wire: str, chunk: int) -> tuple[str, int]:
    kind, elements, _ = WIRES[wire]
    return kind, elements(chunk)


def check_sum_over_a_wire(mesh, wire: str, algorithm: str) -> None:
    chunk = LENGTH // mesh.size
    hlo = program(lambda x: psum(x, wire=wire, algorithm=algorithm), mesh, donate=True)
    assert hlo.permutes == [message(wire, chunk)] * (2 * (mesh.size - 1))
    assert hlo.other_collectives == []
    assert hlo.whole_writes(LENGTH) == []
    assert chunks_of_memory(hlo, chunk) <= MEMORY
    travelled = sum(BYTES[kind] * elements for kind, elements in hlo.permutes)
    assert travelled / (4 * chunk * len(hlo.permutes)) <= WIRES[wire][2]


@each_wire
def test_a_wire_sends_messages_and_copies_nothing(one_host, reducer, wire):
    check_sum_over_a_wire(one_host, wire, "auto")


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4"])
def test_so_it_does_in_a_ring(one_host, reducer, wire):
    check_sum_over_a_wire(one_host, wire, "ring")


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_so_it_does_between_hosts(two_hosts, reducer, wire):
    check_sum_over_a_wire(two_hosts, wire, "auto")


@each_wire
def test_a_chunk_that_fills_no_block_is_filled_up_to_an_even_message(one_host, wire):
    chunk = 3 * BLOCK + 7
    hlo = program(lambda x: psum(x, wire=wire), one_host, length=8 * chunk - 5)
    assert hlo.permutes == [message(wire, chunk)] * 14


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_halves_send_messages_too(one_host, reducer, wire):
    chunk = LENGTH // 8
    scatter = program(
        lambda x: jax_ring.psum_scatter(x, "data", tiled=True, wire=wire), one_host, out=P("data")
    )
    gather = program(
        lambda x: jax_ring.all_gather(x, "data", to="invarying", wire=wire), one_host, length=chunk
    )
    for hlo in (scatter, gather):
        assert hlo.permutes == [message(wire, chunk)] * 7
        assert hlo.whole_writes(LENGTH) == []
        assert chunks_of_memory(hlo, chunk) <= MEMORY


# --- the native kernels ---------------------------------------------------------------------------


def test_a_reduction_takes_the_whole_buffer_and_the_place_of_what_arrived(one_host, native):
    chunk = LENGTH // 8
    hlo = program(psum, one_host, donate=True)
    calls = hlo.custom_calls("jax_ring_chunk_reduce")
    assert [hlo.reads(call) for call in calls] == [[chunk, LENGTH, 1]] * 7
    assert [call.promised for call in calls] == [{0: 0}] * 7
    assert hlo.permutes == [("f32", chunk)] * 14
    assert hlo.whole_writes(LENGTH) == []
    assert chunks_of_memory(hlo, chunk) <= MEMORY


def test_messages_are_made_of_the_whole_buffer_and_read_into_it(one_host, native):
    chunk = LENGTH // 8
    _, size = message("int8", chunk)
    hlo = program(lambda x: psum(x, wire="int8", algorithm="ring"), one_host, donate=True)
    encodes, reduces, decodes = (
        hlo.custom_calls(f"jax_ring_chunk_{name}") for name in ("encode", "reduce", "decode")
    )
    assert [hlo.reads(call) for call in encodes] == [[LENGTH, 1]]
    assert [hlo.reads(call) for call in reduces] == [[size, LENGTH, 1]] * 7
    assert [call.promised for call in reduces] == [{0: 0}] * 7
    assert [hlo.reads(call) for call in decodes] == [[size, LENGTH, 1]] * 8
    assert [call.promised for call in decodes] == [{0: 1}] * 8


def test_what_arrived_is_summed_while_the_next_message_travels(one_host, native):
    """But for the first, before which nothing arrived."""
    hlo = program(lambda x: psum(x, wire="int8"), one_host, donate=True)
    reducing = hlo.during_permutes[1:7]
    sums = hlo.custom_calls("jax_ring_chunk_reduce")
    assert [sum(i in sums for i in ran) for ran in reducing] == [1] * 6


def test_a_sum_of_messages_stays_where_it_is(one_host, native):
    """The direct exchange: the first makes a sum, the last a message in place of what arrived."""
    hlo = program(lambda x: psum(x, wire="int8"), one_host, donate=True)
    calls = hlo.custom_calls("jax_ring_chunk_reduce")
    assert [call.promised for call in calls] == [{}, *[{0: 1}] * 5, {0: 0}]
    assert len(hlo.custom_calls("jax_ring_chunk_encode")) == 7
    assert [call.promised for call in hlo.custom_calls("jax_ring_chunk_decode")] == [{0: 1}] * 8


# --- a train step ---------------------------------------------------------------------------------

SIZES = (1024, 4096, 1024)
BATCH = 16  # rows on each device


def loss(params, x, y):
    for i, (w, b) in enumerate(params):
        x = (jax.nn.gelu(x) if i else x) @ w + b
    return ((x - y) ** 2).mean()


def step(params, x, y):
    own = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
    value, gradients = jax.value_and_grad(loss)(own, x, y)
    gradients = jax_ring.pmean(gradients, "data", algorithm="ring")
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return params, jax_ring.pmean(value, "data", algorithm="ring")


def train_step(mesh) -> tuple[Scheduled, list[int]]:
    """The program of a step of a small MLP, and the sizes of its parameters."""
    shapes = [((n, m), (m,)) for n, m in itertools.pairwise(SIZES)]
    params = [(sharded(mesh, P(), w), sharded(mesh, P(), b)) for w, b in shapes]
    rows = mesh.size * BATCH
    x, y = (sharded(mesh, P("data"), (rows, size)) for size in (SIZES[0], SIZES[-1]))
    specs = (P(), P("data"), P("data"))
    f = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), P()))
    hlo = scheduled(f, params, x, y, donate_argnums=0)
    return hlo, [leaf.size for leaf in jax.tree.leaves(params)]


def test_a_train_step_sends_each_gradient_in_chunks(mesh):
    hlo, sizes = train_step(mesh)
    loss_and_gradients = [1, *sizes]
    chunks = [math.ceil(size / mesh.size) for size in loss_and_gradients]
    assert sorted(hlo.permutes) == sorted([("f32", c) for c in chunks] * 2 * (mesh.size - 1))
    assert hlo.other_collectives == []
    # Parameters are updated where they lie. What is kept beside them are the gradients, what the
    # layers computed, and the chunks of each leaf.
    assert hlo.memory.alias_size_in_bytes == 4 * sum(sizes)
    activations = 4 * BATCH * sum(SIZES)
    limit = 4 * (sum(sizes) + MEMORY * sum(chunks)) + activations + SCALARS * len(chunks)
    assert hlo.memory.temp_size_in_bytes <= limit
