"""Results put together in memory that nothing was written into."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled, integers, mesh, per_rank, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import native, room, schedules

N = 8
built = pytest.mark.skipif("cpu" not in native.platforms(), reason=str(native.status()))
MAKERS = [
    schedules.ring,
    schedules.bidirectional_ring,
    functools.partial(schedules.ring, channels=2),
    functools.partial(schedules.ring, segments=2),
    schedules.halving_doubling,
    schedules.recursive_doubling,
    schedules.double_binary_tree,
    schedules.direct,
    lambda n: schedules.hierarchical(n // 2, 2) if n % 2 == 0 else schedules.ring(n),
]


@pytest.fixture
def poisoned(monkeypatch):
    """Memory full of NaN; counts how often it was asked for."""
    asked = []

    def in_place_of(buffer, after):
        asked.append(buffer.shape)
        return lax.optimization_barrier((jnp.full_like(buffer, jnp.nan), after))[0]

    monkeypatch.setattr(room, "in_place_of", in_place_of)
    return asked


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6, 8))])
@pytest.mark.parametrize("wire", [None, "int8"])
def test_what_lay_there_is_never_read(poisoned, n, wire):
    x = np.random.default_rng(n).normal(size=(n, 96)).astype(np.float32)

    def sums(v):
        made = []
        for make in MAKERS:
            try:
                made.append(jax_ring.psum(v, "x", algorithm=make(n), wire=wire))
            except NotImplementedError:  # It copies chunks before all sums are made.
                assert wire
        return jnp.stack(made)

    for summed in np.moveaxis(per_rank(sums, mesh(n), x).reshape(n, -1, 96), 1, 0):
        tolerance = 0.1 if wire else 1e-5
        np.testing.assert_allclose(summed, np.broadcast_to(x.sum(0), (n, 96)), atol=tolerance)
    assert len(poisoned) >= 4


@pytest.mark.parametrize("wire", [None, "int8"])
def test_gathers_never_read_what_lay_there(poisoned, wire):
    x = integers((N, 16), np.float32)
    for algorithm in ("ring", "direct"):
        f = functools.partial(jax_ring.all_gather, axis_name="x", algorithm=algorithm, wire=wire)
        gathered = per_rank(f, mesh(N), x)
        np.testing.assert_allclose(gathered.reshape(N, N, 16), np.stack([x] * N), atol=0.1)
    assert len(poisoned) == 2


@pytest.mark.parametrize("unroll", [1, 32])
def test_loops_start_with_it(poisoned, unroll):
    x = integers((N, 32), np.float32)
    with jax_ring.config(unroll=unroll):
        summed = per_rank(lambda v: jax_ring.psum(v, "x", algorithm="ring"), mesh(N), x)
    np.testing.assert_array_equal(summed.reshape(N, 32), np.stack([x.sum(0)] * N))
    assert len(poisoned) == 1


@built
@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving_doubling"])
@pytest.mark.parametrize("donate", [True, False])
def test_no_copy_of_the_operand(wire, algorithm, donate):
    if wire and algorithm == "halving_doubling":
        pytest.skip("a lossy wire encodes and decodes all of it at once")
    size, m = 1 << 14, mesh(N)
    f = functools.partial(jax_ring.psum, axis_name="x", algorithm=algorithm, wire=wire)
    g = jax.shard_map(f, mesh=m, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    hlo = compiled(g, sharded(m, P("x"), (N * size,)), donate_argnums=0 if donate else ())
    assert hlo.copies_of(size) == {}
    assert hlo.counts["copy_fusion"] == 0
    assert hlo.text.count('custom_call_target="jax_ring_room"') == 1
    assert hlo.memory.alias_size_in_bytes == (4 * size if donate else 0)
    assert hlo.memory.temp_size_in_bytes < 1.1 * 4 * size


@built
def test_memory_is_taken_once_for_a_batch():
    f = jax.vmap(lambda v: jax_ring.psum(v, "x", algorithm="ring"))
    x = integers((N, 3, 16), np.float32)
    np.testing.assert_array_equal(per_rank(f, mesh(N), x), np.stack([x.sum(0)] * N))
    g = jax.shard_map(f, mesh=mesh(N), in_specs=P(None, "x"), out_specs=P())
    text = compiled(g, sharded(mesh(N), P(None, "x"), (3, N * 16))).text
    assert text.count('custom_call_target="jax_ring_room"') == 1


@built
@pytest.mark.parametrize("donate", [True, False])
def test_segments_share_the_memory_of_what_moves(donate):
    size, m, parts = 1 << 16, mesh(N), 4
    f = functools.partial(jax_ring.psum, axis_name="x", algorithm=schedules.ring(N, segments=parts))
    g = jax.shard_map(f, mesh=m, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    hlo = compiled(g, sharded(m, P("x"), (N * size,)), donate_argnums=0 if donate else ())
    assert hlo.copies_of(size) == {}
    assert hlo.text.count('custom_call_target="jax_ring_room"') == 1
    assert 'custom_call_target="jax_ring_after"' in hlo.text
    # The finished chunk of each segment waits; of those that move there are only one segment's.
    chunk = 4 * size // (N * parts)
    assert hlo.memory.temp_size_in_bytes < (parts + 3) * chunk


@built
def test_after_works_in_place_only():
    x = jnp.arange(4.0)
    f = jax.jit(lambda v: jax.ffi.ffi_call("jax_ring_after", jax.typeof(x))(v, v))
    with pytest.raises(jax.errors.JaxRuntimeError, match="result must alias its first operand"):
        f(x).block_until_ready()


@pytest.mark.parametrize("calls", [True, False])
def test_after_is_the_value(calls):
    x = integers((3, 4), np.float32)
    with jax_ring.config(native=calls):
        f = jax.jit(lambda v: room.after(v + 1, (v, [2 * v])))
        np.testing.assert_array_equal(f(x), x + 1)
        np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x), x + 1)


def test_elsewhere_it_is_the_buffer_itself():
    def f(x):
        return room.in_place_of(x, x + 1)

    with jax_ring.config(native=False):
        np.testing.assert_array_equal(jax.jit(lambda x: f(x))(jnp.arange(4)), np.arange(4))
    for platform in ("tpu", "cuda"):
        text = jax.jit(f).trace(jnp.ones(3)).lower(lowering_platforms=(platform,)).as_text()
        assert "jax_ring_room" not in text
