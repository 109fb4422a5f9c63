"""What a measurement was made with: versions, devices, load and settings, for reports."""

from __future__ import annotations

import datetime
import os
import platform
import socket
from typing import Any

import jax
from jaxlib.version import __version__ as jaxlib_version

import jax_ring
from jax_ring.launch import MALLOC_TUNING

# What decides how XLA:CPU gets memory for results.
ALLOCATOR = (*MALLOC_TUNING, "LD_PRELOAD")


def versions() -> dict[str, str]:
    """The versions of what takes part.

    Example:
      >>> sorted(versions())
      ['jax', 'jax_ring', 'jaxlib', 'python']
    """
    return {
        "jax_ring": jax_ring.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib_version,
        "python": platform.python_version(),
    }


def load() -> float | None:
    """Processes that wanted a core during the last minute, on average; None if unknown."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def surroundings() -> dict[str, Any]:
    """All that a figure depends on beside what was measured, ready for JSON. Starts the backend.

    Example:
      >>> found = surroundings()
      >>> found["devices"]["count"], found["devices"]["platform"], found["processes"]
      (8, 'cpu', 1)
    """
    first = jax.devices()[0]
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": versions(),
        "devices": {
            "platform": first.platform,
            "kind": first.device_kind,
            "count": jax.device_count(),
            "version": " ".join(str(first.client.platform_version).split()),
        },
        "processes": jax.process_count(),
        "cores": os.cpu_count(),
        "load": load(),
        "environment": {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name in ("XLA_FLAGS", "JAX_PLATFORMS", *ALLOCATOR)
            or name.startswith(("JAX_RING_", "NCCL_"))
        },
    }
