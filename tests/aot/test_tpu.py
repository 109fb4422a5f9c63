"""Programs for 8 x TPU v5e, compiled without one: what travels, and that nothing waits for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot.scheduled import Scheduled, scheduled
from harness import sharded
from jax.sharding import PartitionSpec as P

import jax_ring

pytestmark = pytest.mark.aot

LENGTH = 1 << 20


def program(f, mesh, dtype=np.float32) -> Scheduled:
    """Compiles f for devices that each hold `LENGTH` elements."""
    g = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())
    return scheduled(g, sharded(mesh, P("data"), (mesh.size * LENGTH,), dtype), donate_argnums=0)


@pytest.mark.parametrize(("dtype", "bits"), [(np.float32, "f32"), (jnp.bfloat16, "u16")])
def test_the_rings_permutes_are_asynchronous(tpus, dtype, bits):
    hlo = program(lambda x: jax_ring.psum(x, "data", algorithm="ring"), tpus, dtype)
    assert hlo.permutes == [(bits, LENGTH // 8)] * 14
    assert hlo.other_collectives == []
    assert hlo.counts["collective-permute-start"] == hlo.counts["collective-permute-done"] == 14


def test_the_bfloat16_wire_is_asynchronous(tpus):
    hlo = program(lambda x: jax_ring.psum(x, "data", wire="bfloat16"), tpus)
    assert hlo.permutes == [("u16", LENGTH // 8)] * 14
    assert hlo.other_collectives == []
    assert hlo.counts["collective-permute-start"] == hlo.counts["collective-permute-done"] == 14
