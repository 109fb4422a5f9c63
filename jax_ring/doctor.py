"""What `jax-ring doctor` finds out: what is installed, what is seen, what works, and what to do.

Everything that cannot be found out is said, never raised: a report must come of a broken
installation too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ring import _compat, choose, distributed, hosts, native
from jax_ring.bench.measure import AXIS, Bench, Case, Rounds
from jax_ring.bench.operands import Operands
from jax_ring.bench.surroundings import ALLOCATOR, load, versions
from jax_ring.config import current, environment_error, settings, unread
from jax_ring.launch import MALLOC_TUNING
from jax_ring.schedules import Kind
from jax_ring.schedules.families import names

SCHEMA, VERSION = "jax_ring.doctor", 1
_ELEMENTS = 1003  # On each rank in the self-test: no multiple of any number of ranks.
_EMULATED = 4  # Ranks where there is only one device.
_WIRES = ("bfloat16", "int8")
_PROBE_MIB = 64
_PATIENCE_S = 60.0  # How long a process waits for what the others found.
_SET_RIGHT = "set it right, or unset it"
_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


@dataclasses.dataclass(frozen=True)
class Advice:
    """Something to know or to do.

    Attributes:
      problem: whether something is broken, or only could be better.
      what: what was seen.
      step: what to do about it.
    """

    problem: bool
    what: str
    step: str


@dataclasses.dataclass(frozen=True)
class Check:
    """An algorithm of the self-test.

    Attributes:
      collective: such as "all_reduce".
      algorithm: its name, and +WIRE.
      wrong: elements that NumPy says are wrong; None if it did not run.
      error: why it did not run, or empty.
    """

    collective: str
    algorithm: str
    wrong: int | None
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran and was right."""
        return self.wrong == 0


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The report.

    Attributes:
      facts: what was found, in sections.
      checks: the self-test.
      advice: what follows from both, problems first.
    """

    facts: Mapping[str, Mapping[str, Any]]
    checks: tuple[Check, ...]
    advice: tuple[Advice, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem."""
        return not any(advice.problem for advice in self.advice)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.healthy:
            right = f"{len(self.checks)} of {len(self.checks)} self-tests are right"
            return f"healthy: {right}"
        return f"not healthy: {sum(advice.problem for advice in self.advice)} problem(s)"

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "verdict": self.verdict,
            "healthy": self.healthy,
            "facts": {name: dict(section) for name, section in self.facts.items()},
            "self_test": [dataclasses.asdict(check) for check in self.checks],
            "advice": [dataclasses.asdict(advice) for advice in self.advice],
        }


Progress = Callable[[str], None]


def diagnose(
    mesh: Callable[[], Mesh],
    progress: Progress = lambda what: None,
    join: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """Looks at everything. Over several processes all have to call it.

    Args:
      mesh: makes the mesh of one axis, `AXIS`, that is looked at; may start the JAX backend.
      progress: is told in a few words what comes next.
      join: joins the other processes, if there are any, before the backend starts.

    Returns:
      The report; nothing is raised for what is broken. The facts are those of this process; the
      advice is that of all of them.

    Example:
      >>> diagnosis = diagnose(lambda: Mesh(jax.devices()[:2], AXIS))
      >>> diagnosis.healthy, all(check.passed for check in diagnosis.checks)
      (True, True)
      >>> sorted(diagnosis.facts)[:4]
      ['allocator', 'cuda', 'devices', 'native']
    """
    advice: list[Advice] = []
    facts: dict[str, Mapping[str, Any]] = {}
    progress("versions and native module")
    facts["versions"] = _versions(advice)
    facts["native"] = _native(advice)
    facts["cuda"] = _cuda()
    facts["settings"] = _settings(advice)
    progress("processes")
    facts["processes"] = _processes(advice, join)
    checks: tuple[Check, ...] = ()
    if "error" not in facts["processes"]:
        checks = _working(mesh, facts, advice, progress)
    advice.sort(key=lambda one: not one.problem)
    return Diagnosis(facts, checks, tuple(advice))


def _working(
    mesh: Callable[[], Mesh],
    facts: dict[str, Mapping[str, Any]],
    advice: list[Advice],
    progress: Progress,
) -> tuple[Check, ...]:
    """Looks at the devices, adding to the facts and the advice, and tries the algorithms."""
    progress("devices")
    try:
        found = mesh()
    except Exception as error:  # JAX has asserts there, too.
        facts["devices"] = {"error": _one_line(error)}
        advice.append(_no_devices(error))
        return ()
    facts["devices"] = _devices(found, facts["cuda"], facts["native"], advice)
    facts["topology"] = _topology(found, advice)
    progress("allocator")
    facts["allocator"] = _allocator(found, advice)
    if not environment_error:
        facts["tuning"] = _tuning(found, advice)
    progress("what other processes found")
    checks = tuple(self_test(found, progress)) if _all_can_start(advice) else ()
    advice += _of_checks(checks)
    return checks


# --- what is installed ----------------------------------------------------------------------------


def _versions(advice: list[Advice]) -> dict[str, Any]:
    oldest, newest = _compat.OLDEST_JAX, _compat.NEWEST_CHECKED_JAX
    found = jax.__version_info__
    if not _numbers(oldest) <= found <= _numbers(newest):
        advice.append(
            Advice(
                False,
                f"jax {jax.__version__} is not among those that jax_ring was checked with",
                f"if something is odd, install a jax from {oldest} to {newest}",
            )
        )
    return {
        **versions(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "checked with jax": f"{oldest} to {newest}",
    }


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def _native(advice: list[Advice]) -> dict[str, Any]:
    status = native.status()
    if not status.available and settings.native:
        advice.append(
            Advice(
                False,
                f"the native module is not used: {status.reason}",
                "install a C++ compiler and jax-ring from source; lossy wires are then faster",
            )
        )
    dots = [
        None if v is None else ".".join(map(str, v))
        for v in (status.ffi_api_built, status.ffi_api_runtime)
    ]
    return {
        "available": status.available,
        "handlers for": [] if environment_error else sorted(native.platforms()),
        "reason": status.reason or None,
        "FFI API of the module": dots[0],
        "FFI API of jaxlib": dots[1],
        "file": status.path,
        "CUDA kernels": status.cuda_path,
        "no CUDA kernels because": status.cuda_reason or None,
    }


def _cuda() -> dict[str, Any]:
    """What the system says about GPUs of NVIDIA, without JAX."""
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    driver = None
    with contextlib.suppress(OSError):
        driver = _DRIVER.read_text().splitlines()[0]
    gpus: list[str] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=True)
        gpus = asked.stdout.strip().splitlines()
    return {"driver": driver, "GPUs": gpus, "packages": packages}


def _settings(advice: list[Advice]) -> dict[str, Any]:
    wanted = ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
    prefixes = ("JAX_RING_", "NCCL_", "SLURM_", "OMPI_COMM_WORLD_", "PMI_")
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in wanted or name.startswith(prefixes)
    }
    for name, similar in unread().items():
        meant = f"did you mean {similar}?" if similar else "jax_ring.config lists those there are"
        advice.append(Advice(False, f"nothing reads {name}={os.environ[name]}", meant))
    if environment_error:
        advice.append(Advice(True, environment_error, _SET_RIGHT))
        return {"error": environment_error, "environment": variables}
    return {**dataclasses.asdict(current()), "environment": variables}


def _processes(advice: list[Advice], join: Callable[[], None]) -> dict[str, Any]:
    place = None
    try:
        place = distributed.find() if distributed.launched() else None
        join()
    except Exception as error:  # Of JAX, too.
        what = "" if place is None else "the processes do not come together: "
        advice.append(Advice(True, what + _one_line(error), "see docs/clusters.md"))
        return {**({} if place is None else dataclasses.asdict(place)), "error": _one_line(error)}
    proxies = [
        n for n in ("http_proxy", "https_proxy", "HTTPS_PROXY", "grpc_proxy") if n in os.environ
    ]
    if place is not None and proxies:
        advice.append(
            Advice(
                False,
                f"{', '.join(proxies)} are set, and there are {place.processes} processes",
                "unset them if processes do not find each other: gRPC may go through the proxy",
            )
        )
    return {} if place is None else dataclasses.asdict(place)


# --- what is seen ---------------------------------------------------------------------------------


def _no_devices(error: Exception) -> Advice:
    return Advice(
        True,
        f"no devices: {_one_line(error)}",
        "try JAX_PLATFORMS=cpu; for NVIDIA GPUs pip install 'jax[cuda13]' and a driver that fits",
    )


def _devices(
    mesh: Mesh, cuda: Mapping[str, Any], native_: Mapping[str, Any], advice: list[Advice]
) -> dict[str, Any]:
    first = mesh.devices.flat[0]
    cpu = first.platform == "cpu"
    if cpu and cuda["GPUs"]:
        advice.append(
            Advice(
                False,
                f"there are {len(cuda['GPUs'])} GPUs, but JAX runs on CPU",
                "pip install 'jax[cuda13]', and unset JAX_PLATFORMS, to use them",
            )
        )
    if first.platform in ("gpu", "cuda") and not native_["CUDA kernels"]:
        advice.append(
            Advice(
                False,
                f"no CUDA kernels: {native_['no CUDA kernels because']}",
                "JAX_RING_CUDA=1 pip install . with nvcc in PATH; till then by plain JAX",
            )
        )
    if cpu and mesh.size == 1:
        advice.append(
            Advice(
                False,
                "one CPU device: nothing is communicated",
                "jax-ring doctor --devices 8, and in programs "
                "XLA_FLAGS=--xla_force_host_platform_device_count=8",
            )
        )
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "used": mesh.size,
        "count": jax.device_count(),
        "in this process": jax.local_device_count(),
        "backend": " ".join(str(first.client.platform_version).split()),
        "cores": os.cpu_count(),
        "load": load(),
    }


def _topology(mesh: Mesh, advice: list[Advice]) -> dict[str, Any]:
    groups = hosts.groups(mesh, AXIS)
    sizes = sorted({len(group) for group in groups})
    if len(sizes) > 1:
        advice.append(
            Advice(
                False,
                f"processes have different numbers of devices: {sizes}",
                "the hierarchical algorithm needs equal ones; hosts.ring takes any",
            )
        )
    slices = {hosts.slice_of(device) for device in mesh.devices.flat}
    coordinates = [getattr(device, "coords", None) for device in mesh.devices.flat]
    return {
        "ranks": mesh.size,
        "processes": len(groups),
        "ranks of each process": sizes,
        "slices": len(slices),
        "coordinates": None if None in coordinates else [list(c) for c in coordinates if c],
    }


def _tuning(mesh: Mesh, advice: list[Advice]) -> dict[str, Any]:
    """The prices that "auto" reckons with, and where they are from."""
    path = current().tuning
    links = choose.links_in(path)
    inner, outer = choose.links_of(mesh.devices.flat[0].platform, jax.process_count())
    in_force = {name: dataclasses.asdict(links[name]) for name in dict.fromkeys((inner, outer))}
    if all(links[name] == choose.LINKS[name] for name in in_force) and mesh.size > 1:
        advice.append(
            Advice(
                False,
                '"auto" reckons with default prices, which were not measured here',
                "jax-ring tune -o tuning.json, then set JAX_RING_TUNING=tuning.json",
            )
        )
    return {"file": path, "links": in_force}


def _allocator(mesh: Mesh, advice: list[Advice]) -> dict[str, Any]:
    """Whether XLA:CPU gets memory for large results that must be faulted in at each call."""
    found: dict[str, Any] = {
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "variables": {name: os.environ[name] for name in ALLOCATOR if name in os.environ},
    }
    if mesh.devices.flat[0].platform != "cpu":
        return found
    found[f"page faults per call of {_PROBE_MIB} MiB"] = faults = _page_faults(_PROBE_MIB << 20)
    # A call whose memory was kept has next to none; huge pages would be of 2 MiB.
    if faults is not None and faults >= _PROBE_MIB // 4 and platform.libc_ver()[0] == "glibc":
        advice.append(
            Advice(
                False,
                f"each result of {_PROBE_MIB} MiB costs {faults:,.0f} page faults: large "
                "collectives on CPU would gain from an allocator that keeps freed memory",
                _how_to_keep_memory(),
            )
        )
    return found


def _how_to_keep_memory() -> str:
    wanted = " ".join(f"{name}={value}" for name, value in MALLOC_TUNING.items())
    if all(name in os.environ for name in MALLOC_TUNING):
        if preloaded := os.environ.get("LD_PRELOAD"):
            return f"glibc is told to, but LD_PRELOAD={preloaded} may be another allocator"
        return f"glibc is told to, perhaps with other values than jax-ring run has: {wanted}"
    return f"start with jax-ring run, which sets this, or set it yourself: {wanted}"


def _page_faults(nbytes: int, warmup: int = 16, calls: int = 5) -> float | None:
    """Page faults of a call with a result of so many bytes, once memory could have been kept.

    That takes up to a dozen calls, as results that live side by side lie where there is room. The
    median: one of them may still not fit.
    """
    try:
        import resource
    except ImportError:  # Not on Windows.
        return None
    device = jax.local_devices()[0]
    x = jax.device_put(np.ones(nbytes // 4, np.float32), device)
    add = jax.jit(lambda v: v + 1)
    faults = []
    for _ in range(warmup + calls):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready(add(x))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(faults[warmup:])


def _all_can_start(advice: list[Advice]) -> bool:
    """Adds what other processes advise, and says whether the self-test can start in all of them.

    What several processes say is said once; what not all do, with the processes that do.
    """
    own = json.dumps([bool(environment_error), [dataclasses.asdict(one) for one in advice]])
    try:
        everyone = [
            json.loads(text) for text in distributed.exchanged("diagnosis", own, _PATIENCE_S)
        ]
    except TimeoutError as error:
        advice.append(Advice(True, _one_line(error), "see what that process prints"))
        return False
    said: dict[Advice, list[int]] = {}
    for process, (_, theirs) in enumerate(everyone):
        for one in (Advice(**fields) for fields in theirs):
            alike = (known for known in said if known == one or _same_note(known, one))
            said.setdefault(next(alike, one), []).append(process)
    advice[:] = [
        one
        if len(processes) == len(everyone)
        else dataclasses.replace(one, what=f"{_processes_named(processes)}: {one.what}")
        for one, processes in said.items()
    ]
    return not any(wrong for wrong, _ in everyone)


def _same_note(a: Advice, b: Advice) -> bool:
    """Whether two processes say the same, perhaps with other figures."""
    return not a.problem and not b.problem and a.step == b.step


def _processes_named(processes: list[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


# --- what works -----------------------------------------------------------------------------------


def self_test(mesh: Mesh, progress: Progress = lambda what: None) -> Iterator[Check]:
    """Runs every algorithm of every collective once, and over some wires, and asks NumPy.

    Where there is one device only, ranks are emulated on it by `jax.vmap`.

    Args:
      mesh: as `diagnose`.
      progress: as `diagnose`.

    Yields:
      What came of each.

    Example:
      >>> next(self_test(Mesh(jax.devices()[:1], AXIS)))
      Check(collective='all_reduce', algorithm='ring', wrong=0, error='')
    """
    for kind in Kind:
        ranks = mesh.size if mesh.size > 1 else _EMULATED
        wired = [f"direct+{wire}" for wire in _WIRES]
        for text in [*names(kind), *wired]:
            progress(f"self-test: {kind.value} by {text}")
            case = Case.parse(text, kind)
            operands = Operands(kind, "sum", "float32", ranks, (case.wire,))
            yield _checked(Bench(mesh, operands), case)


def _checked(bench: Bench, case: Case) -> Check:
    operands = bench.operands
    try:
        if bench.ranks > 1:
            count = _ELEMENTS * (bench.ranks if operands.kind is Kind.REDUCE_SCATTER else 1)
            nbytes = 4 * count * (bench.ranks if operands.kind is Kind.ALL_GATHER else 1)
            once = Rounds(iters=1, warmup=0)
            (measured,) = bench.measure([case], nbytes, once, in_place=False)
            wrong = measured.out_of_place.wrong
        else:
            wrong = _emulated(bench, case)
    except Exception as error:  # Whatever is broken must end up in the report.
        return Check(
            operands.kind.value, case.name, None, f"{type(error).__name__}: {_one_line(error)}"
        )
    return Check(operands.kind.value, case.name, wrong)


def _emulated(bench: Bench, case: Case) -> int:
    """Wrong elements of all ranks, which are all on one device."""
    operands = bench.operands
    count = _ELEMENTS * operands.ranks
    x = jnp.stack([operands.of_rank(rank, count) for rank in range(operands.ranks)])
    results = np.asarray(jax.jit(jax.vmap(bench.collective(case), axis_name=AXIS))(x))
    return sum(
        operands.wrong(row, rank=rank, count=count, wire=case.wire, algorithm=str(case.algorithm))
        for rank, row in enumerate(results)
    )


def _of_checks(checks: tuple[Check, ...]) -> Iterator[Advice]:
    for check in checks:
        if not check.passed:
            came = check.error or f"{check.wrong} elements are wrong"
            yield Advice(
                True,
                f"{check.collective} by {check.algorithm} fails: {came}",
                "report it with the output of jax-ring doctor --json; till then "
                "JAX_RING_REDUCER=xla leaves native code out, JAX_RING_ALGORITHM=xla all of ours",
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
