"""Starts a piece of code in several processes of one job, and waits for them."""

import os
import socket
import subprocess
import sys
import textwrap


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(code, processes, **how):
    """Starts the code in several processes; see `start_command`."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    return start_command(command, processes, **how)


def start_command(
    command, processes, devices=1, ids=None, coordinator=None, count=None, **variables
):
    """Starts a command in several processes of one job, with so many devices each."""
    coordinator = coordinator or f"127.0.0.1:{free_port()}"
    started = []
    for i in range(processes) if ids is None else ids:
        environment = {
            **{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count="
            + str(devices[i] if isinstance(devices, list) else devices),
            "JAX_RING_COORDINATOR": coordinator,
            "JAX_RING_PROCESSES": str(count[i] if count else processes),
            "JAX_RING_PROCESS": str(i),
            **variables,
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    return started


def finish(started, timeout=120):
    try:
        outputs = [p.communicate(timeout=timeout) for p in started]
    finally:
        for p in started:
            p.kill()
    return [(p.returncode, *output) for p, output in zip(started, outputs, strict=True)]
