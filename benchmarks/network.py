r"""All-reduces between hosts of a lab, against the bound, `jax.lax.psum`, PyTorch and MPI.

    sudo python benchmarks/network.py --json network.json

Hosts are network namespaces on links of a set rate, each with one process for each library that is
installed: jax with gloo, torch.distributed with gloo, Open MPI and MPICH by mpi4py. All cases are
called in turns within one run. A figure is the median over the rounds; the time of a call is that
of the slowest host, from when all have met. The bound is 2(N-1)/N S/B: the time of the bytes that
each host must send, without headers. `bytes` is what host 0 sent in a call, divided by those.
With --tune FILE the hosts run jax-ring tune instead.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import dataclasses
import datetime
import json
import multiprocessing.connection
import os
import pathlib
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import rich
import rich.progress
import rich.table
import typer
from netlab import NETDEV, Lab, Unavailable

from jax_ring.cli.files import check_file
from jax_ring.cli.mistakes import read
from jax_ring.cli.units import parse_size
from jax_ring.launch import MALLOC_TUNING

SIZES = ("16 KiB", "1 MiB", "16 MiB", "64 MiB")
PSUM = "lax.psum"
# Ours, as the keywords of `jax_ring.psum`; N is the number of hosts.
CASES = (
    PSUM,
    "dict()",
    "dict(algorithm='ring')",
    "dict(wire='bfloat16')",
    "dict(wire='int8')",
    "dict(algorithm='ring', wire='bfloat16')",
    "dict(algorithm='ring', wire='int8')",
    "dict(algorithm=ring(N, channels=4), wire='bfloat16')",
    "dict(algorithm=ring(N, channels=2), wire='int8')",
)
JAX_ON_CPU = {"JAX_PLATFORMS": "cpu", **MALLOC_TUNING}
START_S = 60.0  # How long a library may take to start,
ANSWER_S = 300.0  # and to compile and check, or to do, what it is asked for.
PEERS = pathlib.Path(__file__).with_name("network_peers.py")
# In place of ssh: [-x] host command ...
AGENT = """#!/bin/sh
[ "$1" != -x ] || shift
host=$1
shift
exec ip netns exec "$host" sh -c "$*"
"""
# Both would rather send through the memory of what is in truth one machine.
OPEN_MPI = "mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none --host {hosts} \
--mca plm_rsh_agent {agent} --mca btl tcp,self --mca pml ob1 --mca btl_tcp_if_include {netdev} \
--mca oob_tcp_if_include {netdev} --mca mpi_yield_when_idle 1"
MPICH = "mpirun.mpich -launcher ssh -launcher-exec {agent} -hosts {hosts} -iface {netdev} -ppn 1 \
-genv MPIR_CVAR_NOLOCAL 1 -genv FI_PROVIDER tcp -genv FI_TCP_IFACE {netdev} \
-genv UCX_TLS tcp,self -genv UCX_NET_DEVICES {netdev}"


class Failed(RuntimeError):
    """A process could not do what it was asked for; the message says which, and why."""


@dataclasses.dataclass
class Library:
    """The processes of a library.

    Attributes:
      name: what it is called.
      cases: what it is timed on.
      peers: a connection to each host's process, by rank.
      version: what it says that it is.
    """

    name: str
    cases: tuple[str, ...]
    peers: list[Any]
    version: str

    def ask(self, command: str, argument: Any) -> list[Any]:
        """Has every host do something.

        Returns:
          What each answers, by rank.

        Raises:
          Failed: as soon as one cannot do it, or has ended, or if one does not answer in time.
        """
        waiting = {peer: rank for rank, peer in enumerate(self.peers)}
        answers: dict[int, Any] = {}
        with _told(f"{self.name}: a process has ended"):
            for peer in self.peers:
                peer.send((command, argument))
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), ANSWER_S)
            if not ready:
                late = sorted(waiting.values())
                raise Failed(f"{self.name}: ranks {late} did not {command} within {ANSWER_S:g} s")
            for peer in ready:
                rank = waiting.pop(peer)
                with _told(f"{self.name}: the process of rank {rank} has ended"):
                    problem, answers[rank] = peer.recv()
                if problem:
                    raise Failed(f"{self.name}, rank {rank}: {problem}")
        return [answers[rank] for rank in sorted(answers)]


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError):
        raise Failed(what) from None


class Starter:
    """Starts processes on the hosts of a lab, and ends them."""

    def __init__(self, lab: Lab, folder: str, stack: contextlib.ExitStack) -> None:
        """Prepares for it; what is started ends with the stack."""
        self.lab, self.folder, self._stack = lab, pathlib.Path(folder), stack
        self.log = stack.enter_context((self.folder / "log").open("w+"))
        agent = self.folder / "agent"
        agent.write_text(AGENT)
        agent.chmod(0o755)

    def library(
        self,
        name: str,
        module: str,
        python: str,
        cases: Sequence[str],
        launcher: str = "",
        environment: Mapping[str, str] = {},
    ) -> Library | None:
        """Starts the processes of a library, or says why it is left out.

        Args:
          name: what it is called.
          module: in `network_peers.LIBRARIES`.
          python: the interpreter that has it.
          cases: what it is timed on.
          launcher: what starts all its processes, from host 0; none starts one on each host.
          environment: variables for them.
        """
        address = str(self.folder / f"{name.replace(' ', '-')}.socket")
        command = [python, str(PEERS), module, address]
        if launcher:
            names = {"hosts": ",".join(self.lab.names), "agent": str(self.folder / "agent")}
            command = shlex.split(launcher.format(netdev=NETDEV, **names)) + command
        hosts = range(1 if launcher else len(self.lab.names))
        shared = {"WORLD_SIZE": str(len(self.lab.names)), "COORDINATOR": self.lab.coordinator()}
        with multiprocessing.connection.Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            for host in hosts:
                variables = {**environment, **shared, "RANK": str(host)}
                process = self.lab.start(host, command, variables, stdout=self.log, stderr=self.log)
                self._stack.callback(_end, process)
            try:
                peers = [listener.accept() for _ in self.lab.names]
                for peer in peers:
                    self._stack.callback(peer.close)
                said = [peer.recv() if peer.poll(START_S) else _late() for peer in peers]
            except (OSError, EOFError) as error:
                print(f"{name} is left out ({error!r}): {self.said(500)}", file=sys.stderr)
                return None
        ranked = sorted(zip(said, peers, strict=True), key=lambda pair: pair[0])
        return Library(name, tuple(cases), [peer for _, peer in ranked], said[0][1])

    def said(self, characters: int) -> str:
        """The end of what the processes printed."""
        self.log.seek(0)
        return self.log.read()[-characters:].strip()


def _late() -> Any:
    raise TimeoutError(f"it did not start within {START_S:g} s")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tune(lab: Lab, file: pathlib.Path) -> None:
    """Runs `jax-ring tune` on the hosts, and shows what it says."""
    address, port = lab.coordinator().split(":")
    rendezvous = {"MASTER_ADDR": address, "MASTER_PORT": port, "COLUMNS": "120"}
    command = [sys.executable, "-m", "jax_ring", "tune", "-o", str(file.absolute())]
    said = lab.run(command, {**JAX_ON_CPU, **rendezvous}, timeout=1200)
    print(said[0])


def _has(python: str | None, module: str) -> bool:
    return (
        python is not None
        and not subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode
    )


def libraries(start: Starter, cases: Sequence[str], torch: str, alone: bool) -> Iterator[Library]:
    """Starts jax, and unless it is alone what else is installed."""
    found = [start.library("jax", "jax", sys.executable, cases, environment=JAX_ON_CPU)]
    if not alone:
        found += peers(start, torch)
    yield from filter(None, found)


def peers(start: Starter, torch: str) -> list[Library | None]:
    """Starts what can be found of other libraries."""
    found = []
    if _has(shutil.which(torch), "torch"):
        variables = {"GLOO_SOCKET_IFNAME": NETDEV, "OMP_NUM_THREADS": "1"}
        found.append(
            start.library("torch gloo", "torch", torch, ["torch gloo"], environment=variables)
        )
    if shutil.which("mpirun.openmpi") and _has(sys.executable, "mpi4py"):
        variables = {"MPI4PY_MPIABI": "openmpi"}
        found.append(
            start.library("Open MPI", "mpi", sys.executable, ["Open MPI"], OPEN_MPI, variables)
        )
    library = ctypes.util.find_library("mpich")
    if shutil.which("mpirun.mpich") and library and _has(sys.executable, "mpi4py"):
        # Debian calls it by another name than its ABI does.
        (start.folder / "libmpi.so.12").symlink_to(_path_of(library))
        variables = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(start.folder)}
        found.append(start.library("MPICH", "mpi", sys.executable, ["MPICH"], MPICH, variables))
    return found


def _path_of(library: str) -> str:
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    return next(line.split()[-1] for line in listed.splitlines() if library in line)


def measure(lab: Lab, found: Sequence[Library], nbytes: int, rounds: int) -> dict[str, Any]:
    """Times all cases of all libraries in turns."""
    for library in found:
        library.ask("prepare", (library.cases, nbytes))
    cases = [(library, case) for library in found for case in library.cases]
    seconds: dict[str, list[float]] = {case: [] for _, case in cases}
    sent: dict[str, list[int]] = {case: [] for _, case in cases}
    for turn in range(rounds + 1):
        for library, case in cases:
            before = lab.sent_bytes(0)
            took = max(library.ask("time", case))
            if turn:  # The first is to warm up.
                seconds[case].append(took)
                sent[case].append(lab.sent_bytes(0) - before)
    return {
        case: {"seconds": seconds[case], "bytes": statistics.median(sent[case])}
        for _, case in cases
    }


def main(
    cases: Annotated[
        list[str] | None, typer.Argument(help="instead of the usual, as dict(algorithm='ring')")
    ] = None,
    hosts: Annotated[int, typer.Option(min=2, max=16, help="how many")] = 4,
    rate: Annotated[float, typer.Option(help="of each link, in Gbit/s")] = 1.0,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--size", help=f"such as 4MiB; repeat it for more; else {', '.join(SIZES)}"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="how often each is timed; five times if small")] = 9,
    torch: Annotated[str, typer.Option(help="a Python that has torch")] = "/usr/bin/python3",
    alone: Annotated[bool, typer.Option("--alone", help="no other libraries")] = False,
    output: Annotated[pathlib.Path | None, typer.Option("--json", help="a file to write")] = None,
    tuning: Annotated[
        pathlib.Path | None, typer.Option("--tune", help="only jax-ring tune, into this file")
    ] = None,
) -> None:
    """Times all-reduces between hosts of a lab."""
    chosen = [PSUM, *cases] if cases else CASES
    try:
        if rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {rounds}")
        wanted = [_size(text) for text in sizes or SIZES]
        for file in filter(None, (output, tuning)):
            check_file(file)
        with contextlib.ExitStack() as stack:
            lab = stack.enter_context(Lab(hosts, f"{round(rate * 1000)}mbit"))
            if tuning is not None:
                tune(lab, tuning)
                return
            start = Starter(lab, stack.enter_context(tempfile.TemporaryDirectory()), stack)
            try:
                found = list(libraries(start, chosen, torch, alone))
                about = _about(found, hosts, rate)
                rich.print(about)
                _sweep(lab, found, wanted, rounds, rate, about, output)
            except Failed:
                print(start.said(3000), file=sys.stderr)
                raise
    except (ValueError, RuntimeError, Unavailable) as error:
        print(f"network.py: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


def _size(text: str) -> tuple[str, int]:
    """A size as it is called, and its bytes."""
    nbytes = read("--size", parse_size, text)
    if nbytes < 4 or nbytes % 4:
        raise ValueError(f"--size: floats take 4 bytes each, got {text!r}")
    return text, nbytes


def _about(found: Sequence[Library], hosts: int, rate: float) -> dict[str, Any]:
    """What figures depend on."""
    return {
        "date": datetime.date.today().isoformat(),
        "versions": [library.version for library in found],
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "hosts": hosts,
        "rate": rate,
    }


def _sweep(
    lab: Lab,
    found: Sequence[Library],
    sizes: Sequence[tuple[str, int]],
    rounds: int,
    rate: float,
    about: Mapping[str, Any],
    output: pathlib.Path | None,
) -> None:
    """Measures at one size after the other, shows it, and writes what there is so far."""
    figures = {}
    for name, nbytes in sizes:
        turns = rounds if nbytes > 1 << 20 else 5 * rounds
        figures[name] = measure(lab, found, nbytes, turns)
        hosts = len(lab.names)
        show(name, figures[name], 2 * (hosts - 1) / hosts * nbytes, rate)
        if output:
            output.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n")


def show(name: str, figures: dict[str, Any], volume: float, rate: float) -> None:
    """Prints the times of a size."""
    bound = volume * 8 / (rate * 1e9)
    title = f"{name}: bound {bound * 1e3:.3g} ms"
    table = rich.table.Table("case", "ms", "spread", "/ bound", f"/ {PSUM}", "bytes", title=title)
    psum = figures[PSUM]["seconds"]
    for case, figure in figures.items():
        seconds = figure["seconds"]
        middle = statistics.median(seconds)
        ratio = statistics.median(a / b for a, b in zip(seconds, psum, strict=True))
        table.add_row(
            case,
            f"{middle * 1e3:.4g}",
            f"{min(seconds) * 1e3:.4g} to {max(seconds) * 1e3:.4g}",
            f"{middle / bound:.2f}",
            f"{ratio:.2f}",
            f"{figure['bytes'] / volume:.3f}",
        )
    rich.print(table)


if __name__ == "__main__":
    typer.run(main)
