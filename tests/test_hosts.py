"""Schedules by where devices are. Devices that are elsewhere are stood in for by a name."""

import types

import jax
import numpy as np
import pytest
from harness import integers, mesh, per_rank, same_bits

import jax_ring
from jax_ring import hosts, schedules


def placed(*places, names=("x",), slices=None):
    """Something like a mesh, of devices in the given processes."""
    array = np.empty(np.shape(places), object)
    for index, place in np.ndenumerate(np.asarray(places)):
        array[index] = types.SimpleNamespace(process_index=int(place))
        if slices:
            array[index].slice_index = slices[int(place)]
    return types.SimpleNamespace(devices=array, axis_names=names)


def crossings(schedule, place):
    """The pairs of ranks in different places between which a schedule sends."""
    return {(s, d) for step in schedule.steps for s, d in step.perm if place[s] != place[d]}


def test_groups_follow_processes_or_slices():
    assert hosts.groups(placed(0, 0, 1, 1), "x") == ((0, 1), (2, 3))
    assert hosts.groups(placed(0, 1, 0, 1), "x") == ((0, 2), (1, 3))
    sliced = placed(0, 1, 2, 3, slices=[0, 0, 1, 1])
    assert hosts.groups(sliced, "x", hosts.slice_of) == ((0, 1), (2, 3))
    assert hosts.groups(placed(0, 0, 1), "x", hosts.slice_of) == ((0, 1), (2,))


def test_every_row_of_the_mesh_must_be_alike():
    alike = placed((0, 1), (0, 1), names=("x", "y"))
    assert hosts.groups(alike, "y") == ((0,), (1,))
    assert hosts.groups(alike, "x") == ((0, 1),)
    with pytest.raises(ValueError, match="placed differently in different rows"):
        hosts.groups(placed((0, 0), (1, 2), names=("x", "y")), "y")


def test_bad_places():
    with pytest.raises(ValueError, match=r"axis_name must be one of \('x',\), got 'z'"):
        hosts.groups(placed(0, 1), "z")
    for mesh_of_none in (jax.sharding.AbstractMesh((2,), ("x",)), None):
        with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh, .* got (Abs|None)"):
            hosts.groups(mesh_of_none, "x")
    with pytest.raises(ValueError, match=r"as many ranks of axis 'x', got \[1, 2\]"):
        hosts.hierarchical(placed(0, 0, 1), "x")
    with pytest.raises(ValueError, match="channels must be at least 1, got 0"):
        hosts.ring(placed(0, 0, 1), "x", channels=0)


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("place", [(0, 1, 0, 1, 0, 1), (0, 0, 1, 1, 2, 2), (0, 1, 1, 1, 0, 2)])
def test_a_ring_enters_and_leaves_each_place_once(place, channels):
    schedule = hosts.ring(placed(*place), "x", channels=channels)
    schedules.verify(schedule)
    for channel in range(channels):
        first = next(s for s in schedule.steps if s.channel == channel)
        between = [(place[s], place[d]) for s, d in first.perm if place[s] != place[d]]
        assert len({s for s, _ in between}) == len({d for _, d in between}) == len(between)
        assert len(between) == len(set(place))


def test_channels_leave_a_place_from_different_ranks():
    place = (0, 0, 1, 1)
    schedule = hosts.ring(placed(*place), "x", channels=2)
    assert len(crossings(schedule, place)) == 4


def test_bytes_across_places_whatever_the_order_of_devices():
    place = (0, 1, 1, 0, 1, 0, 0, 1)
    schedule = hosts.hierarchical(placed(*place), "x")
    schedules.verify(schedule)
    sent = np.zeros(8)
    for step in schedule.steps:
        for source, target in step.perm:
            sent[source] += step.k * (place[source] != place[target])
    np.testing.assert_allclose(sent / schedule.chunks, 2 * (1 / 2) / 4)  # 2 (H-1)/H S/G


@pytest.mark.parametrize("make", [hosts.hierarchical, hosts.ring])
def test_results_do_not_depend_on_places(make):
    schedule = make(placed(0, 1, 1, 0, 1, 0, 0, 1), "x")
    x = integers((8, 37), np.float32)
    rows = per_rank(lambda v: jax_ring.psum(v, "x", algorithm=schedule), mesh(8), x)
    assert all(same_bits(row, x.sum(0)) for row in np.asarray(rows))
