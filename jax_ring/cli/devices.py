"""Which devices a command runs on: how many, in this process and in others."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import jax
import typer
from jax.sharding import Mesh

from jax_ring import distributed
from jax_ring.bench.measure import AXIS
from jax_ring.launch import DEVICE_COUNT

_PATIENCE_S = 60.0  # How long processes wait for each other before they measure.

Devices = Annotated[
    int | None,
    typer.Option(
        help="how many to use in each process, by default all there are; on CPU as many are made"
    ),
]


def all_ranks(devices: int | None) -> Mesh:
    """A mesh of one axis, `AXIS`, over the devices of all processes.

    Joins the other processes first, if a launcher says that there are any.

    Args:
      devices: how many to use in each process; None for all.

    Raises:
      ValueError: if there are fewer, or JAX does not start.

    Example:
      >>> all_ranks(None).size
      8
    """
    join(devices)
    everywhere = _started()
    chosen = []
    for process in range(jax.process_count()):
        found = [d for d in everywhere if d.process_index == process]
        if devices is not None and len(found) < devices:
            raise ValueError(
                f"--devices {devices}: process {process} has {len(found)} {found[0].platform} "
                "devices; their number is fixed once JAX has started"
            )
        chosen += found[:devices]
    return Mesh(chosen, AXIS)


def _started() -> list[jax.Device]:
    """The devices of all processes."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        why = str(error) or f"nothing answers for JAX_PLATFORMS={platforms}"
        raise ValueError(f"JAX does not start ({why}); jax-ring doctor says more") from error


def check_devices(devices: int | None) -> None:
    """Rejects what no number of devices is."""
    if devices is not None and devices < 1:
        raise ValueError(f"--devices must be at least 1, got {devices}")


def join(devices: int | None) -> None:
    """Joins the processes that were started together, if there are others.

    Args:
      devices: as `all_ranks`; asked for before, which counts if JAX has not started yet.

    Raises:
      ValueError: if they do not come together, saying why.
    """
    check_devices(devices)
    flag = f"{DEVICE_COUNT}={devices}"
    if devices is not None and flag not in os.environ.get("XLA_FLAGS", "").split()[-1:]:
        # The last of two like flags counts.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    if jax.distributed.is_initialized() or not distributed.launched():
        return
    try:
        distributed.initialize()
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def is_first_process() -> bool:
    """Whether this process is the one that prints and writes files. Starts the backend."""
    return jax.process_index() == 0


def by_first_process(check: Callable[[], None]) -> None:
    """Has the first process check what only it needs; all must call this, and all fail with it.

    Raises:
      ValueError: with what the check raised there.
      TimeoutError: if a process does not call.

    Example:
      >>> by_first_process(lambda: os.stat("/nowhere"))
      Traceback (most recent call last):
      ...
      ValueError: [Errno 2] No such file or directory: '/nowhere'
    """
    problem = ""
    if is_first_process():
        try:
            check()
        except (ValueError, ImportError, OSError) as error:
            problem = str(error)
    problem = distributed.exchanged("checks", problem, _PATIENCE_S)[0]
    if problem:
        raise ValueError(problem)
