"""Schedules that fit where the devices of a mesh are: which ranks share a process, host or slice.

What crosses hosts is slower than what does not, and shared by all ranks of a host. Inside
`shard_map` nobody knows where a rank is; the mesh does. So ask it first, and pass the schedule on:

    algorithm = jax_ring.hosts.hierarchical(mesh, "data")
    jax_ring.psum(x, "data", algorithm=algorithm)  # inside shard_map over that mesh
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_ring import schedules
from jax_ring.schedules import Schedule

Where = Callable[[Any], Any]


def process_of(device: Any) -> int:
    """The process that a device belongs to."""
    return int(device.process_index)


def slice_of(device: Any) -> int:
    """The slice of a TPU that a device belongs to; its process if it belongs to none."""
    found = getattr(device, "slice_index", None)
    return process_of(device) if found is None else int(found)


def groups(mesh: Any, axis_name: str, by: Where = process_of) -> tuple[tuple[int, ...], ...]:
    """Which ranks along an axis of a mesh are in one place.

    Args:
      mesh: a `jax.sharding.Mesh`.
      axis_name: one of its axes.
      by: says where a device is: `process_of`, `slice_of`, or a function of your own.

    Returns:
      The ranks of each place, ascending; the places in the order of their first rank.

    Raises:
      ValueError: if the mesh has no such axis, or ranks are together in one row of the mesh and
        apart in another, so that no one schedule fits all.
      TypeError: for a mesh without devices, as an `AbstractMesh`.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], "data")
      >>> groups(mesh, "data")
      ((0, 1, 2, 3),)
      >>> groups(mesh, "data", by=lambda device: device.id % 2)
      ((0, 2), (1, 3))
    """
    try:
        devices = np.asarray(mesh.devices)
    except (AttributeError, ValueError):  # The latter from an AbstractMesh.
        raise TypeError(
            "hosts.groups: mesh must be a jax.sharding.Mesh, whose devices are known; inside of a "
            f"program pass on what was found outside; got {mesh!r}"
        ) from None
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"hosts.groups: axis_name must be one of {tuple(mesh.axis_names)}, got {axis_name!r}"
        )
    along = np.moveaxis(devices, mesh.axis_names.index(axis_name), -1)
    rows = {
        _partition([by(device) for device in row]) for row in along.reshape(-1, along.shape[-1])
    }
    if len(rows) > 1:
        raise ValueError(
            f"hosts.groups: along axis {axis_name!r} the devices are placed differently in "
            f"different rows of the mesh: {sorted(rows)}; order them alike, for example with "
            "jax.experimental.mesh_utils.create_hybrid_device_mesh"
        )
    return rows.pop()


def _partition(places: list[Any]) -> tuple[tuple[int, ...], ...]:
    found: dict[Any, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place, []).append(rank)
    return tuple(map(tuple, found.values()))


def hierarchical(
    mesh: Any,
    axis_name: str,
    by: Where = process_of,
    *,
    inner_algorithm: str = "ring",
    outer_algorithm: str = "ring",
) -> Schedule:
    """The hierarchical all-reduce along an axis, its groups the ranks that are in one place.

    Args:
      mesh: as `groups`.
      axis_name: as `groups`.
      by: as `groups`.
      inner_algorithm: as `schedules.hierarchical`.
      outer_algorithm: as `schedules.hierarchical`.

    Returns:
      A schedule for the ranks along the axis.

    Raises:
      ValueError: as `groups`; if places hold different numbers of ranks.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], "data")
      >>> schedule = hierarchical(mesh, "data", by=lambda device: device.id % 2)
      >>> schedule
      Schedule(hierarchical, all_reduce, ranks=4, chunks=4, steps=4)
    """
    found = groups(mesh, axis_name, by)
    sizes = sorted({len(group) for group in found})
    if len(sizes) > 1:
        raise ValueError(
            f"hosts.hierarchical: all places must hold as many ranks of axis {axis_name!r}, got "
            f"{sizes} in {found}; hosts.ring takes any"
        )
    return schedules.hierarchical(sizes[0], len(found), inner_algorithm, outer_algorithm, found)


def ring(mesh: Any, axis_name: str, by: Where = process_of, *, channels: int = 1) -> Schedule:
    """The ring along an axis in an order that enters and leaves each place once.

    So a host has one incoming and one outgoing connection to others for each ring, however the
    mesh orders its devices. Each chunk is still summed once, by another order of the ranks.

    Args:
      mesh: as `groups`.
      axis_name: as `groups`.
      by: as `groups`.
      channels: rings side by side, at least 1. They leave a place from different ranks of it, as
        far as there are any.

    Returns:
      A schedule for the ranks along the axis.

    Raises:
      ValueError: as `groups`; if channels is less than 1.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], "data")
      >>> schedule = ring(mesh, "data", by=lambda device: device.id % 2)
      >>> schedule.steps[0].perm  # Ranks 0 and 2 are in one place, 1 and 3 in another.
      ((0, 2), (1, 3), (2, 1), (3, 0))
    """
    found = groups(mesh, axis_name, by)
    orders = tuple(
        tuple(group[(i + turn) % len(group)] for group in found for i in range(len(group)))
        for turn in range(channels)
    )
    return schedules.ring(sum(map(len, found)), channels=channels, orders=orders)
