"""Starts a program several times on this machine, as the processes of one `jax.distributed` job.

This is what `jax-ring run` does. It starts no JAX backend of its own. Each process learns from its
environment who it is, in variables that `jax_ring.distributed.initialize` reads, and in those that
torchrun sets, for programs which read these:

| variable                           | what                                                     |
|------------------------------------|----------------------------------------------------------|
| JAX_RING_COORDINATOR               | host:port where process 0 has its coordination service   |
| JAX_RING_PROCESSES                 | how many processes there are                             |
| JAX_RING_PROCESS                   | which of them this is, from 0                            |
| RANK, WORLD_SIZE                   | the same two                                             |
| LOCAL_RANK, LOCAL_WORLD_SIZE       | the same, since all are on this host                     |
| MASTER_ADDR, MASTER_PORT           | the same address                                         |

What MPI launchers have said of the launcher itself is taken out. Unless the user has set them,
PYTHONUNBUFFERED=1 lets lines be seen when they are printed, and JAX_ENABLE_PREEMPTION_SERVICE=0
lets SIGTERM end a process, which `jax.distributed` otherwise only notes.

On CPU those of `MALLOC_TUNING` are set, unless the user has set them or asked for none: glibc is
told to keep freed memory. XLA:CPU allocates every result anew, and without them each large one is
mapped, and all of its pages are faulted in, in every step.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from jax_ring import launch_child
from jax_ring.config import ENVIRONMENT
from jax_ring.outlet import Outlet, split_lines

DEVICE_COUNT = "--xla_force_host_platform_device_count"
# Freed memory stays with the process: nothing is mapped apart, nothing is given back. One arena,
# or each of XLA's threads would keep memory of its own.
MALLOC_TUNING = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "MALLOC_ARENA_MAX": "1",
}
LOOPBACK = "127.0.0.1"
_UNLESS_SET = {"PYTHONUNBUFFERED": "1", "JAX_ENABLE_PREEMPTION_SERVICE": "0"}
_OF_MPI = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASS_ON = (signal.SIGUSR1, signal.SIGUSR2)
_LONGEST_LINE = 2**20  # A longer one is passed on in parts.
_POLL_S = 0.02  # How often is looked whether a process has ended.
_DRAIN_S = 1.0  # How long output may still come from what an ended process left behind.


@dataclasses.dataclass(frozen=True)
class Job:
    """What is started.

    Attributes:
      command: the program and its arguments.
      processes: how often, at least 1.
      devices_per_process: how many CPU devices each has, or None for what the environment says.
      malloc_tuning: whether allocators are told to keep freed memory, where JAX runs on CPU.
      grace_s: how long processes may take to end, in seconds, before they are killed.
    """

    command: tuple[str, ...]
    processes: int
    devices_per_process: int | None = None
    malloc_tuning: bool = True
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        """Rejects what cannot be started."""
        if not self.command:
            raise ValueError("a command is needed, such as: -- python train.py")
        if self.processes < 1:
            raise ValueError(f"at least 1 process is needed, got {self.processes}")
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise ValueError(
                f"devices per process must be at least 1, got {self.devices_per_process}"
            )
        if not self.grace_s >= 0:
            raise ValueError(f"the grace time must be at least 0 seconds, got {self.grace_s}")

    def tuning(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The allocator's variables that are set: where JAX runs on CPU, and the user has none."""
        if not self.malloc_tuning or not on_cpu(environment):
            return {}
        return {k: v for k, v in MALLOC_TUNING.items() if k not in environment}

    def environment(self, base: Mapping[str, str], process: int, port: int) -> dict[str, str]:
        """The environment of one process.

        Args:
          base: what the launcher's own environment is.
          process: which process, from 0.
          port: of the coordination service.

        Returns:
          All variables.

        Example:
          >>> job = Job(("python", "train.py"), 2, devices_per_process=4)
          >>> found = job.environment({"XLA_FLAGS": "--xla_dump_to=/tmp"}, 1, 12345)
          >>> found["JAX_RING_COORDINATOR"], found["JAX_RING_PROCESS"], found["WORLD_SIZE"]
          ('127.0.0.1:12345', '1', '2')
          >>> found["XLA_FLAGS"]
          '--xla_dump_to=/tmp --xla_force_host_platform_device_count=4'
        """
        count, rank = str(self.processes), str(process)
        result = {
            **_UNLESS_SET,
            **{name: value for name, value in base.items() if not name.startswith(_OF_MPI)},
            **self.tuning(base),
            "JAX_RING_COORDINATOR": f"{LOOPBACK}:{port}",
            "JAX_RING_PROCESSES": count,
            "JAX_RING_PROCESS": rank,
            "RANK": rank,
            "WORLD_SIZE": count,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
        }
        if self.devices_per_process is not None:
            # The last of two like flags counts.
            flag = f"{DEVICE_COUNT}={self.devices_per_process}"
            result["XLA_FLAGS"] = f"{base.get('XLA_FLAGS', '')} {flag}".strip()
        return result


def on_cpu(environment: Mapping[str, str]) -> bool:
    """Whether JAX will run on CPU: it is told to, or no accelerator is seen here.

    Example:
      >>> on_cpu({"JAX_PLATFORMS": "cpu"}), on_cpu({"JAX_PLATFORMS": "cuda,cpu"})
      (True, False)
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0].strip().lower() == "cpu"
    return not any(pathlib.Path(d).exists() for d in ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0"))


def free_port() -> int:
    """A TCP port that nobody listens on, on loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def how_it_ended(returncode: int) -> str:
    """What `subprocess` says of an end, in words.

    Example:
      >>> how_it_ended(255), how_it_ended(-9), how_it_ended(-35)
      ('status 255', 'killed by SIGKILL', 'killed by signal 35')
    """
    if returncode >= 0:
        return f"status {returncode}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-returncode, f'signal {-returncode}')}"


def exit_status(returncode: int) -> int:
    """The status as a shell says it: 128 + the signal that ended the process.

    Example:
      >>> exit_status(3), exit_status(-9)
      (3, 137)
    """
    return returncode if returncode >= 0 else 128 - returncode


def launch(
    job: Job,
    *,
    environment: Mapping[str, str] = ENVIRONMENT,
    prefix: Callable[[int, TextIO | None], str] | None = lambda process, to: f"[{process}] ",
    own_prefix: str | None = None,
) -> int:
    """Starts the processes, passes their output on, and waits until all have ended.

    Lines are passed on as they are completed, by a newline or a carriage return, never mixed:
    standard output to standard output, and errors to standard error. A reader that stalls holds
    the processes up, as a pipe does, but not the launcher. If one process fails the others are
    stopped, by SIGTERM, and by SIGKILL after the grace time. SIGINT, SIGTERM, SIGHUP and SIGQUIT
    are forwarded and start the grace time; a second one kills at once. SIGUSR1 and SIGUSR2 are
    forwarded. Processes read nothing from standard input. On Linux they die with the launcher,
    should it be killed. What a process has started and left behind is not waited for, once it
    prints nothing for a second.

    Args:
      job: what to start.
      environment: that of the launcher.
      prefix: what a line of a process begins with, on standard output or error; None for nothing:
        then what a process prints is passed on unchanged.
      own_prefix: what a line on standard error begins with in which the launcher says what it
        does; None to say nothing.

    Returns:
      The status of the first process that failed, 128 + the signal if one ended it, else 0.

    Example:
      >>> import sys
      >>> launch(Job((sys.executable, "-c", "import os; exit(int(os.environ['RANK']) * 7)"), 2))
      7
    """

    async def run() -> int:
        return await _Launcher(job, environment, prefix, own_prefix).run()

    return asyncio.run(run())


class _Launcher:
    def __init__(
        self,
        job: Job,
        environment: Mapping[str, str],
        prefix: Callable[[int, TextIO | None], str] | None,
        own_prefix: str | None,
    ) -> None:
        self.job, self.environment = job, environment
        self.prefix, self.own_prefix = prefix, own_prefix
        self.out, self.err = Outlet(sys.stdout), Outlet(sys.stderr)
        self.running: dict[int, asyncio.subprocess.Process] = {}
        # Ended, but what they have started may still print.
        self.ended: dict[int, asyncio.subprocess.Process] = {}
        self.passed_on: collections.Counter[int] = collections.Counter()
        self.failed: int | None = None
        self.stopping: asyncio.Task[None] | None = None
        self.told_to_stop = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _STOP:
            loop.add_signal_handler(number, self._told_to_stop, number)
        for number in _PASS_ON:
            loop.add_signal_handler(number, self._send, number)
        port = free_port()
        self._say_tuning()
        try:
            waits = []
            for process in range(self.job.processes):
                waits.append(
                    loop.create_task(self._process(process, await self._start(process, port)))
                )
            await asyncio.gather(*waits)
        finally:
            self._send(signal.SIGKILL)
            if self.stopping is not None:
                self.stopping.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.err.write(b""), _DRAIN_S)
        return self.failed or 0

    def _say(self, text: str) -> None:
        if self.own_prefix is not None:
            self.err.put(f"{self.own_prefix}{text}\n".encode())

    def _say_tuning(self) -> None:
        tuning = self.job.tuning(self.environment)
        if tuning:
            variables = " ".join(f"{name}={value}" for name, value in tuning.items())
            self._say(f"keeps freed memory: {variables} (--no-malloc-tuning leaves them off)")

    async def _start(self, process: int, port: int) -> asyncio.subprocess.Process:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launch_child.__file__, str(os.getpid())),
            *self.job.command,
            env=self.job.environment(self.environment, process, port),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # A group of its own: a signal reaches what it has started too, and Ctrl-C comes once.
            process_group=0,
        )
        self.running[process] = started
        return started

    async def _process(self, process: int, started: asyncio.subprocess.Process) -> None:
        """Passes the output of a process on and waits for its end."""
        assert started.stdout is not None
        assert started.stderr is not None
        output = asyncio.gather(
            self._pass_on(process, started.stdout, self.out),
            self._pass_on(process, started.stderr, self.err),
        )
        # wait() of Python 3.11 waits for the pipes too: others may hold them, or nobody read.
        while (returncode := started.returncode) is None:
            await asyncio.sleep(_POLL_S)
        self.ended[process] = self.running.pop(process)
        if returncode:
            self._fail(process, returncode)
        await self._drain(process, output)
        del self.ended[process]

    async def _drain(self, process: int, output: asyncio.Future[Any]) -> None:
        """Waits for the rest of the output of an ended process.

        Not for what it has left behind if that holds the pipe open and prints nothing, nor, when
        the launcher was told to stop, for a reader that stalls.
        """
        while True:
            before = self.passed_on[process]
            done, _ = await asyncio.wait([output], timeout=_DRAIN_S)
            stalled = self.out.busy or self.err.busy
            quiet = self.passed_on[process] == before and not stalled
            if done or quiet or self.told_to_stop:
                break
        output.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await output

    def _fail(self, process: int, returncode: int) -> None:
        if self.failed is not None:
            return
        self.failed = exit_status(returncode)
        if self.stopping is None:
            others = "; stopping the others" if self.running else ""
            self._say(f"process {process} failed ({how_it_ended(returncode)}){others}")
            self._stop(signal.SIGTERM)

    def _told_to_stop(self, number: int) -> None:
        """Forwards a signal that ends; kills if that comes while processes are being stopped."""
        self.told_to_stop = True
        if self.stopping is not None:
            self._send(signal.SIGKILL)
            return
        self._stop(number)

    def _stop(self, number: int) -> None:
        """Sends a signal that ends, and kills after the grace time."""
        self._send(number)
        self.stopping = asyncio.get_running_loop().create_task(self._kill_later())

    async def _kill_later(self) -> None:
        await asyncio.sleep(self.job.grace_s)
        if self.running:
            self._say(f"still running after {self.job.grace_s:g} s, killed: {sorted(self.running)}")
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for started in (*self.running.values(), *self.ended.values()):
            # If there is none, it has ended with all that it had started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, number)

    async def _pass_on(self, process: int, source: asyncio.StreamReader, to: Outlet) -> None:
        prefix = self.prefix(process, to.stream).encode() if self.prefix else b""
        rest = b""
        while data := await source.read(2**16):
            self.passed_on[process] += len(data)
            lines, rest = split_lines(rest + data)
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest + b"\n" * bool(prefix)], b""
            await self._write(to, b"".join(prefix + line for line in lines))
        if rest:
            await self._write(to, prefix + rest + b"\n" * bool(prefix))

    async def _write(self, to: Outlet, data: bytes) -> None:
        try:
            await to.write(data)
        except BrokenPipeError:
            # Nobody reads any more, as after `| head`.
            if self.failed is None:
                self.failed = 128 + signal.SIGPIPE
                if self.stopping is None:
                    self._stop(signal.SIGTERM)
