"""Processes: how they find each other, whether they agree, and what is said when one is missing.

A thin layer over `jax.distributed`. `initialize` takes what the launcher says from its environment:

| launcher              | processes            | this process         | coordinator             |
|-----------------------|----------------------|----------------------|-------------------------|
| `jax-ring run`, yours | JAX_RING_PROCESSES   | JAX_RING_PROCESS     | JAX_RING_COORDINATOR    |
| Open MPI              | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_RANK | known on one host       |
| MPICH and other PMI   | PMI_SIZE             | PMI_RANK             | as Slurm's, or one host |
| torchrun and the like | WORLD_SIZE           | RANK                 | MASTER_ADDR:MASTER_PORT |
| Slurm                 | SLURM_STEP_NUM_TASKS | SLURM_PROCID         | first node of the step  |

JAX_RING_COORDINATOR=host:port goes with each of them; over several hosts mpirun needs it. Slurm's
variables count where nothing else does, or where they agree.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

import jax

import jax_ring
from jax_ring import _compat, choose, consistency, ending, rollcall
from jax_ring.config import ENVIRONMENT, current
from jax_ring.explanation import Collective, Explanation, explain
from jax_ring.watchdog import Watchdog as Watchdog
from jax_ring.watchdog import watchdog as watchdog

_LAUNCHERS = {
    "jax-ring run": ("JAX_RING_PROCESSES", "JAX_RING_PROCESS"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "PMI": ("PMI_SIZE", "PMI_RANK"),
    "torchrun": ("WORLD_SIZE", "RANK"),
}
# mpirun in a Slurm job leaves Slurm's variables as they are for the node: they count last.
# SLURM_NTASKS is set in a batch script too, which no srun has started.
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
# Programs that start no processes set one of these for their own ends.
_MAY_BE_HALF = ("torchrun", "Slurm")
_PORTS = 2**12  # The last ones, of which a job takes one by its number.


@dataclasses.dataclass(frozen=True)
class Place:
    """What a process is told of its job.

    Attributes:
      coordinator: host:port of process 0's coordination service.
      processes: how many there are.
      process: which of them this is, from 0.
      source: who says so.
    """

    coordinator: str
    processes: int
    process: int
    source: str

    def __post_init__(self) -> None:
        """Rejects what cannot be."""
        for name in ("processes", "process"):
            if type(value := getattr(self, name)) is not int:
                raise TypeError(
                    f"jax_ring.distributed: {name} must be an int, got {value!r} ({self.source})"
                )
        if self.processes < 1 or not 0 <= self.process < self.processes:
            raise ValueError(
                f"jax_ring.distributed: process must be from 0 to processes - 1, got process "
                f"{self.process} of {self.processes} ({self.source})"
            )
        host, _, port = str(self.coordinator).rpartition(":")
        named = host and (":" not in host or (host[0], host[-1]) == ("[", "]"))
        if not named or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                "jax_ring.distributed: coordinator must be host:port, an IPv6 address in brackets, "
                f"got {self.coordinator!r}"
            )

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's host and port."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find(
    environment: Mapping[str, str] = ENVIRONMENT,
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> Place:
    """What the environment says of this process; arguments come first.

    Args:
      environment: the variables.
      coordinator: as `Place`.
      processes: as `Place`.
      process: as `Place`.

    Returns:
      The place of this process.

    Raises:
      ValueError: naming what is missing, is no number, or contradicts something else.
      TypeError: for an argument that is no integer.

    Example:
      >>> find({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1",
      ...       "JAX_RING_COORDINATOR": "node1:1234"})
      Place(coordinator='node1:1234', processes=4, process=1, source='Open MPI')
    """
    # With all that is needed, what variables say cannot be wrong.
    said = {} if None not in (coordinator, processes, process) else _said(environment)
    source = "arguments" if not said or None not in (processes, process) else next(iter(said))
    if said:
        count, rank = next(iter(said.values()))
        processes = count if processes is None else processes
        process = rank if process is None else process
    missing = [n for n, v in (("processes", processes), ("process", process)) if v is None]
    if processes is None or process is None:
        raise ValueError(
            f"jax_ring.distributed: nothing says {' and '.join(missing)}: start with `jax-ring run "
            "-n 4 -- python ...`, mpirun, srun or torchrun, set JAX_RING_COORDINATOR, "
            "JAX_RING_PROCESSES and JAX_RING_PROCESS, or pass arguments"
        )
    where = coordinator or environment.get("JAX_RING_COORDINATOR")
    if not where:
        where = _coordinator(environment, source, processes, process)
    return Place(where, processes, process, source)


def launched(environment: Mapping[str, str] = ENVIRONMENT) -> bool:
    """Whether a launcher says that this is one of several processes.

    Args:
      environment: as `find`.

    Raises:
      ValueError: as `find`.

    Example:
      >>> launched({"PMI_SIZE": "4", "PMI_RANK": "1"}), launched({"PMI_SIZE": "1", "PMI_RANK": "0"})
      (True, False)
    """
    return any(processes > 1 for processes, _ in _said(environment).values())


def _said(environment: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Processes and process, by each launcher that says them."""
    said = {}
    for name, (count, rank) in _LAUNCHERS.items():
        if (found := _pair(environment, name, count, rank)) is not None:
            said[name] = found
    if len(set(said.values())) > 1:
        texts = (f"{name} says process {r} of {n}" for name, (n, r) in said.items())
        raise ValueError(
            f"jax_ring.distributed: {', but '.join(texts)}: start by one of them, or unset the "
            "other's variables"
        )
    if not said and (found := _pair(environment, "Slurm", *_SLURM)) is not None:
        said["Slurm"] = found
    return said


def _pair(
    environment: Mapping[str, str], name: str, count: str, rank: str
) -> tuple[int, int] | None:
    there = [v for v in (count, rank) if v in environment]
    if len(there) == 1:
        (missing,) = {count, rank} - set(there)
        if name in _MAY_BE_HALF:
            return None
        raise ValueError(
            f"jax_ring.distributed: {there[0]} is set, but {missing} ({name}) is missing"
        )
    for variable in there:
        if not environment[variable].isdecimal():
            raise ValueError(
                f"jax_ring.distributed: {variable} must be an integer of at least 0, got "
                f"{environment[variable]!r}"
            )
    return (int(environment[count]), int(environment[rank])) if there else None


def _coordinator(environment: Mapping[str, str], source: str, processes: int, process: int) -> str:
    """Where process 0 is, as the launcher has it."""
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        host = environment["MASTER_ADDR"]
        bare = ":" in host and not host.startswith("[")
        return f"{f'[{host}]' if bare else host}:{environment['MASTER_PORT']}"
    port = 2**16 - _PORTS
    # srun speaks PMI too, and mpirun in a Slurm job leaves Slurm's variables as they are.
    if _pair(environment, "Slurm", *_SLURM) == (processes, process):
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
        job = environment.get("SLURM_JOB_ID", "")
        if nodes and job.isdecimal():
            return f"{_first_host(nodes)}:{port + int(job) % _PORTS}"
    on_this_host = environment.get(
        {"Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI": "MPI_LOCALNRANKS"}.get(source, ""), ""
    )
    if on_this_host == str(processes):
        # Its launcher is the parent of all of them.
        return f"127.0.0.1:{port + os.getppid() % _PORTS}"
    raise ValueError(
        f"jax_ring.distributed: nothing says where process 0 is ({source}, {processes} "
        "processes): set JAX_RING_COORDINATOR=host:port, a free port on its host, for all"
    )


def _first_host(nodes: str) -> str:
    """The first of a list such as "node[01-04,07],other"."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: float = 60.0,
    equal_device_counts: bool = True,
    **options: Any,
) -> Place:
    """Joins the processes of a job: `jax.distributed.initialize`, with checks. Call it first.

    To compare the numbers of devices it starts JAX's backend, which JAX's own does not: what the
    backend reads must be set before, or `equal_device_counts` be False.

    A process that an exception ends afterwards does not wait for the others when Python exits, as
    JAX's hook would for up to 300 s. After `sys.exit(1)` it does: Python tells no hook the status.

    Args:
      coordinator: host:port of process 0's coordination service. What is None is taken from the
        environment, see the module.
      processes: how many there are.
      process: which of them this is, from 0.
      timeout: how long the others are waited for, in seconds, at most 1e6.
      equal_device_counts: whether all must have as many devices.
      **options: further ones of `jax.distributed.initialize`.

    Returns:
      What was found.

    Raises:
      ValueError: for variables or arguments that are missing or contradictory.
      TypeError: for a number of processes that is no integer.
      TimeoutError: naming the processes that did not come, or the coordinator.
      RuntimeError: if two processes have one id, or processes differ in how many they think there
        are, in their versions of jax or jax_ring, or in their devices.
    """
    place = find(coordinator=coordinator, processes=processes, process=process)
    if not 0 < timeout <= 1e6:
        raise ValueError(
            f"jax_ring.distributed: timeout must be more than 0 and at most 1e6 s, got {timeout}"
        )
    _call_the_roll(place, timeout)
    # They are all there, so that what is left takes seconds.
    seconds = max(1, round(timeout))
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        initialization_timeout=seconds,
        **{"cluster_detection_method": "deactivate", **options},
    )
    ending.do_not_wait_after_an_error(place.process, place.processes)
    if equal_device_counts:
        _compare_device_counts(timeout)
    return place


def _compare_device_counts(timeout: float) -> None:
    counts = exchanged("devices", str(jax.local_device_count()), timeout)
    if len(set(counts)) > 1:
        each = ", ".join(f"process {i} has {n}" for i, n in enumerate(counts))
        raise RuntimeError(
            f"jax_ring.distributed: processes have different numbers of devices: {each}; pass "
            "equal_device_counts=False if that is meant"
        )


def _call_the_roll(place: Place, timeout: float) -> None:
    own = {
        "process": place.process,
        "processes": place.processes,
        "where": f"{socket.gethostname()}, pid {os.getpid()}",
        "jax": jax.__version__,
        "jax_ring": jax_ring.__version__,
    }
    host, port = place.address
    if place.process:
        try:
            problem = rollcall.call((host, port), own, timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"jax_ring.distributed: process {place.process} did not reach process 0 at "
                f"{place.coordinator} within {timeout:g} s ({error}): is it started, is that its "
                "address, is the port open?"
            ) from None
    else:
        try:
            calls = rollcall.take(port, place.processes, timeout)
        except OSError as error:
            raise RuntimeError(
                f"jax_ring.distributed: process 0 cannot listen on port {port}: {error}: another "
                "program has it, or two processes have id 0"
            ) from None
        problem = _problem([own, *(said for _, said in calls)], place, timeout)
        rollcall.answer(calls, problem)
    if problem:
        kind = TimeoutError if "did not come" in problem else RuntimeError
        raise kind(f"jax_ring.distributed: {problem}")


def _problem(hellos: list[Mapping[str, Any]], place: Place, timeout: float) -> str:
    """What is wrong with those who called, or ""."""
    by_id = collections.defaultdict(list)
    for hello in hellos:
        by_id[hello["process"]].append(hello["where"])
    for process, where in sorted(by_id.items()):
        if len(where) > 1:
            return f"two processes have id {process}: {' and '.join(where)}"
    for field, what in (
        ("processes", "numbers of processes"),
        ("jax", "versions of jax"),
        ("jax_ring", "versions of jax_ring"),
    ):
        if len({hello[field] for hello in hellos}) > 1:
            each = ", ".join(
                f"process {h['process']} ({h['where']}) {h[field]}"
                for h in sorted(hellos, key=lambda h: int(h["process"]))
            )
            return f"processes have different {what}: {each}"
    missing = sorted(set(range(place.processes)) - set(by_id))
    if missing:
        return f"of {place.processes} processes {missing} did not come within {timeout:g} s"
    return ""


# --- do they agree? -------------------------------------------------------------------------------

_turns: dict[str, itertools.count[int]] = collections.defaultdict(itertools.count)


def exchanged(what: str, own: str, timeout: float) -> list[str]:
    """What each process says, in their order. All must call it, as often as each other.

    Args:
      what: what it is about.
      own: what this process says.
      timeout: how long it waits for each other process, in seconds.

    Raises:
      TimeoutError: naming a process that said nothing.
    """
    client = _compat.coordination_client()
    if client is None:
        return [own]
    key = f"jax_ring/{what}/{next(_turns[what])}"
    client.key_value_set(f"{key}/{jax.process_index()}", own)
    said = []
    for process in range(jax.process_count()):
        try:
            said.append(str(client.blocking_key_value_get(f"{key}/{process}", int(timeout * 1000))))
        except jax.errors.JaxRuntimeError as error:
            # Who comes later shall not compare itself with what is old.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                client.key_value_delete(f"{key}/{jax.process_index()}")
            raise TimeoutError(
                f"jax_ring.distributed: process {process} did not say its {what} within "
                f"{timeout:g} s ({str(error).splitlines()[0]})"
            ) from None
    return said


def check_consistency(
    f: Callable[..., Any] | Explanation, /, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> None:
    """Checks that all processes are about to run the same collectives. All of them must call it.

    Processes that differ, by a branch on `jax.process_index()`, by settings or by data, wait for
    each other forever in the first collective that one of them does not have. Compared are order,
    shapes, dtypes, axes, groups, algorithms with their chunks and channels, wires, the dtypes of
    sums, loops, and the prices by which "auto" chooses: the content of tuning files, not their
    names. See `jax_ring.consistency` for the check that needs no call.

    Args:
      f: a function, jitted or not, or what `jax_ring.explain` said of one.
      *args: as `jax_ring.explain`.
      timeout: how long other processes are waited for, in seconds.
      **kwargs: as `jax_ring.explain`.

    Raises:
      RuntimeError: with the first difference and the source lines of both sides.
      TimeoutError: naming a process that did not call. One that calls later gets it too, as then
        the processes are out of step: end the job.

    Example:
      >>> import jax
      >>> check_consistency(jax.jit(lambda x: x + 1), 1.0)
    """
    found = f if isinstance(f, Explanation) else explain(f, *args, **kwargs)
    own = [_tuning(), *map(_fingerprint, found.collectives)]
    everyone = exchanged("collectives", json.dumps(own), timeout)
    first = json.loads(everyone[0])
    for process, text in enumerate(everyone):
        for i, (a, b) in enumerate(
            itertools.zip_longest(first, json.loads(text), fillvalue=("none", ""))
        ):
            if a[0] != b[0]:
                what = f"collective {i}" if i else "the tuning"
                raise RuntimeError(
                    f"jax_ring.check_consistency: processes differ in {what}: process 0 has "
                    f"{''.join(a)}; process {process} has {''.join(b)}"
                )


def _tuning() -> tuple[str, str]:
    """The prices by which "auto" chooses, whatever the file is called, and where they are from."""
    file = current().tuning
    prices = choose.digest(choose.links_in(file))
    return f"prices {prices}", f" from {file or 'jax_ring.choose.LINKS'}"


def _fingerprint(c: Collective) -> tuple[str, str]:
    """What all processes must have alike, and where it stands in the source."""
    what = consistency.described(
        name=c.name,
        dtype=c.dtype,
        shape=c.shape,
        axes=c.axes,
        groups=c.groups,
        algorithm=c.algorithm,
        chunks=c.chunks,
        channels=c.channels,
        wire=c.wire,
        reduce_dtype=c.reduce_dtype,
    )
    return what + "".join(f" in {loop}" for loop in c.nesting), f" at {c.file}:{c.line}"
