import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jax_ring import layout


@given(st.lists(st.integers(1, 40), max_size=4).map(tuple), st.integers(1, 12))
@settings(deadline=None, max_examples=6)
def test_dividing_and_restoring_is_the_identity(shape, chunks):
    x = jnp.arange(math.prod(shape)).reshape(shape)
    plan = layout.choose(x, chunks)
    buffer = plan.divide(x, -1)
    assert buffer.shape[plan.axis] == chunks * plan.block
    assert buffer.size // chunks == math.ceil(x.size / chunks)
    assert (plan.restore(buffer, shape) == x).all()
    assert (buffer == -1).sum() == buffer.size - x.size


@pytest.mark.parametrize(
    ("shape", "axis", "source"),
    [
        ((64, 3), 0, (64, 3)),  # as it is
        ((3, 64), 0, (192,)),  # rows of 8 floats are half a cache line
        ((3, 1024), 1, (3, 1024)),
        ((1, 8), 1, (1, 8)),  # one row, however short
        ((5, 7), 0, (35,)),  # nothing to cut: flat
        ((1000, 8), 0, (1000, 8)),
        ((1001, 8), 0, (8008,)),  # columns of single floats would touch every line 8 times
    ],
)
def test_a_dimension_is_cut_where_it_can_be(shape, axis, source):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = layout.choose(x, 8)
    assert (plan.axis, plan.source) == (axis, source)


def in_partly_manual(f, x, spec, *, explicit):
    """Runs f where axis x is manual and y is left to the compiler."""
    m = mesh(2, 2, explicit=explicit)
    with jax.set_mesh(m):
        x = jax.device_put(x, jax.NamedSharding(m, spec))
        jax.jit(jax.shard_map(f, in_specs=P(), out_specs=P(), axis_names={"x"})).lower(x)


@pytest.mark.parametrize("explicit", [True, False])
def test_where_an_axis_is_left_to_the_compiler_nothing_is_flattened(explicit):
    seen = []

    def f(v):
        seen.append(layout.choose(v, 4))
        return v

    in_partly_manual(f, np.zeros((3, 64)), P(), explicit=explicit)
    if explicit:  # and known not to be sharded
        assert (seen[0].shape, seen[0].axis, seen[0].block) == ((3, 64), 1, 16)
    else:
        assert (seen[0].shape, seen[0].axis, seen[0].block) == ((3, 16, 4), 2, 1)
    in_partly_manual(f, np.zeros((5, 7)), P(), explicit=explicit)
    assert (seen[1].shape, seen[1].length) == ((5, 2, 4), 8)
    in_partly_manual(f, np.zeros(()), P(), explicit=explicit)
    assert seen[2].shape == (1, 4)


def test_known_shardings_are_respected():
    seen = []

    def f(v):
        seen.append(layout.choose(v, 4))
        return v

    # 4 rows of 4 chunks leave 1 row for 2 devices, so the other dimension is filled up.
    in_partly_manual(f, np.zeros((4, 3)), P("y"), explicit=True)
    assert (seen[0].shape, seen[0].axis) == ((4, 1, 4), 2)
    in_partly_manual(f, np.zeros((8, 3)), P("y"), explicit=True)
    assert (seen[1].shape, seen[1].axis) == ((2, 4, 3), 1)
    # With no other dimension it is filled up to a row for each device.
    in_partly_manual(f, np.zeros(2), P("y"), explicit=True)
    assert (seen[2].shape, seen[2].axis, seen[2].length) == ((2, 4), 1, 8)


@pytest.mark.parametrize("explicit", [True, False])
def test_an_axis_of_one_device_counts_as_manual(explicit):
    seen = []

    def f(v):
        seen.append(layout.choose(v, 4))
        return v

    m = mesh(4, 1, explicit=explicit)
    with jax.set_mesh(m):
        g = jax.shard_map(f, in_specs=P(), out_specs=P(), axis_names={"x"})
        jax.jit(g).lower(jax.device_put(np.zeros((16, 3)), jax.NamedSharding(m, P())))
    assert (seen[0].shape, seen[0].block) == ((16, 3), 4)
