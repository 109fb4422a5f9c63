"""One process, or several that a launcher started: who joins whom, with which devices."""

from __future__ import annotations

import os

from language_model.config import Config, ConfigError, request_cpu_devices


def join(config: Config) -> None:
    """Joins the other processes, if there are any, and asks XLA for this one's devices.

    It comes before anything else of JAX: XLA reads its flags when it makes its devices, and the
    processes must have met by then.

    Raises:
      ConfigError: if the processes cannot have as many devices each.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jax_ring import distributed

    if not distributed.launched():
        request_cpu_devices(config.devices)
        return
    processes = distributed.find().processes
    if config.devices % processes:
        raise ConfigError(
            f"--devices must be a multiple of the {processes} processes, got {config.devices}"
        )
    request_cpu_devices(config.devices // processes)
    distributed.initialize()
