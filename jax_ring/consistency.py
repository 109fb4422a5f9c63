"""Whether all processes compile the same communication: the form of the check that is always on.

Processes whose programs differ, by a branch on `jax.process_index()`, by settings or by data, wait
for each other forever. So each notes what it compiles, where there are several processes: for each
program, when it is lowered, the collectives of jax_ring over axes that reach other processes, with
their source lines, and a digest of all that the program sends (operations, types, who to whom).
A thread writes that into the key-value store of the coordination service.

Nothing is compared while things go well. Programs may be compiled in any order, again, or by some
processes only, as long as they are only compiled: that is no error. Two processes differ if each
has a program that the other does not have. It is looked for and said

- by a `watchdog`, when no process has begun a step for its timeout; then the process ends. If only
  one of them has such a program, the watchdog says that, and goes on;
- without one, `PATIENCE_S` after this process compiled something last: once, as a warning.

Not seen is that programs which all have compiled are run in another order, or by some only;
programs without a collective of jax_ring; those that were exported and loaded.
`jax_ring.distributed.check_consistency` compares before a step is run, and stops it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jax_ring import _compat, callers
from jax_ring.config import current

PATIENCE_S = 60.0
_KEY = "jax_ring/programs"
_MOST = 4096  # Programs that are told of, the newest.


def described(
    *,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    groups: Any,
    algorithm: str,
    chunks: int | None,
    channels: int | None,
    wire: str | None,
    reduce_dtype: str | None,
) -> str:
    """What processes must have alike of a collective, for people to read.

    Example:
      >>> described(name="psum", dtype="bfloat16", shape=(8, 3), axes=("x",), groups=None,
      ...     algorithm="ring", chunks=8, channels=2, wire=None, reduce_dtype="float32")
      'psum of bfloat16[8, 3] over x by ring of 8 chunks on 2 channels with sums in float32'
    """
    parts = [f"{name} of {dtype}{list(shape)} over {'/'.join(map(str, axes))}"]
    parts += [] if groups is None else [f"in groups {groups}"]
    parts += [f"by {algorithm}" if chunks is None else f"by {algorithm} of {chunks} chunks"]
    parts += [] if channels in (None, 1) else [f"on {channels} channels"]
    parts += [] if wire is None else [f"sent as {wire}"]
    parts += [f"with sums in {reduce_dtype}"] if reduce_dtype not in (None, "", dtype) else []
    return " ".join(parts)


# --- what this process has compiled ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that sends something to other processes.

    Attributes:
      name: as JAX has it.
      digest: of all that it sends, in order, and of `collectives`.
      collectives: those of jax_ring, each kind once: what it is, and the line of its first call.
    """

    name: str
    digest: str
    collectives: dict[str, str]


class _Book:
    """The programs of this process, and the thread that tells the others."""

    def __init__(self) -> None:
        self.programs: collections.OrderedDict[str, Program] = collections.OrderedDict()
        self._open = threading.local()  # Of each thread: the program that it lowers.
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._started = False

    def known(self) -> list[Program]:
        """The programs so far, the newest last."""
        with self._lock:
            return list(self.programs.values())

    def note(self, module: Any, what: str, where: str) -> None:
        """Adds a collective to the program that this thread lowers."""
        with self._lock:
            if not self._started:
                self._started = True
                _compat.on_lowered(self._complete)
                threading.Thread(target=self._tell, daemon=True).start()
        if getattr(self._open, "module", None) is not module:
            self._open.module, self._open.collectives = module, {}
        self._open.collectives.setdefault(what, where)

    def _complete(self, name: str) -> None:
        """The program of this thread is complete, or one that was lowered meanwhile."""
        module = getattr(self._open, "module", None)
        sent = None if module is None else _compat.communication(module)
        if sent is None:
            return
        self._open.module = None
        text = "\n".join([*sent, *sorted(self._open.collectives)])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        with self._lock:
            self.programs[digest] = Program(name, digest, self._open.collectives)
            self.programs.move_to_end(digest)
            if len(self.programs) > _MOST:
                self.programs.popitem(last=False)
        self._news.set()

    def _tell(self) -> None:
        """Writes what is new, and looks once whether the others have it, when nothing is new."""
        told: set[str] = set()
        said = False
        while True:
            self._news.wait()
            self._news.clear()
            # The store ends with process 0, and then there is nobody to tell.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._write(told)
                if not said and not self._news.wait(PATIENCE_S):
                    said = _warn()

    def _write(self, told: set[str]) -> None:
        client = _compat.coordination_client()
        if client is None:
            return
        own = jax.process_index()
        programs = self.known()
        for program in programs:
            if program.digest not in told:
                text = json.dumps(dataclasses.asdict(program))
                client.key_value_set(
                    f"{_KEY}/of/{own}/{program.digest}", text, allow_overwrite=True
                )
                told.add(program.digest)
        # Last, so that what it lists is there.
        digests = json.dumps([p.digest for p in programs])
        client.key_value_set(f"{_KEY}/by/{own}", digests, allow_overwrite=True)


_book = _Book()


def _warn() -> bool:
    """Says a difference, if there is one, and whether there was."""
    if (found := difference()) is None:
        return False
    process, why = found
    print(
        f"jax_ring: processes differ, and may wait for each other: process {process} {why}",
        file=sys.stderr,
        flush=True,
    )
    return True


def note(lowering: _compat.Lowering, axes: tuple[str, ...], describe: Callable[[], str]) -> None:
    """Notes a collective that is lowered, if it reaches other processes. It takes microseconds.

    Args:
      lowering: what becomes part of which program.
      axes: those that it is over.
      describe: says what all must have alike.
    """
    if _compat.coordination_client() is None or not current().check_consistency:
        return
    if _reaches_others(lowering.mesh, axes):
        file, line = callers.place(lowering.traceback)
        _book.note(lowering.module, describe(), f"{file}:{line}")


@functools.lru_cache(maxsize=256)
def _reaches_others(mesh: Any, axes: tuple[str, ...]) -> bool:
    """Whether ranks along axes belong to different processes."""
    if mesh is None or not set(axes) <= set(mesh.axis_names):
        return False
    if isinstance(mesh, jax.sharding.AbstractMesh):
        # It does not say whose devices these are; they may all be ours.
        return bool(mesh.size > jax.local_device_count())
    owners = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    along = [mesh.axis_names.index(axis) for axis in axes]
    rows = np.moveaxis(owners, along, range(len(along)))
    rows = rows.reshape(math.prod(rows.shape[: len(along)]), -1)
    return bool((rows != rows[0]).any())


# --- and the others -------------------------------------------------------------------------------


def difference() -> tuple[int, str] | None:
    """A process that has a program which this one has not, and the other way round.

    Returns:
      The process, and in what they differ; None if there is none.

    Raises:
      jax.errors.JaxRuntimeError: if the store does not answer.
    """
    for process, extra, lacking in _others():
        if extra and lacking:
            other = _program(process, extra[0])
            alike = [p for p in lacking if p.name == other.name]
            return process, _said(other, (alike or lacking)[0])
    return None


def missing() -> tuple[int, str] | None:
    """A process that lacks a program of this one, or has more: it may not have come so far.

    Returns:
      The process, and which program that is; None if there is none.

    Raises:
      jax.errors.JaxRuntimeError: if the store does not answer.
    """
    own = f"process {jax.process_index()}"
    for process, extra, lacking in _others():
        if extra:
            program = _program(process, extra[0])
            return process, f"compiled {program.name}, which {own} has not: {_calls(program)}"
        if lacking:
            program = lacking[0]
            return process, f"has not compiled {program.name}, as {own} has: {_calls(program)}"
    return None


def _others() -> Iterator[tuple[int, list[str], list[Program]]]:
    """Of each process the digests that only it has, and the programs that only this one has."""
    client = _compat.coordination_client()
    if client is None:
        return
    own = {program.digest: program for program in _book.known()}
    for key, text in client.key_value_dir_get(f"{_KEY}/by"):
        theirs = dict.fromkeys(json.loads(text))
        lacking = [program for digest, program in own.items() if digest not in theirs]
        yield int(key.rpartition("/")[2]), [d for d in theirs if d not in own], lacking


def _program(process: int, digest: str) -> Program:
    client = _compat.coordination_client()
    found = client.blocking_key_value_get(f"{_KEY}/of/{process}/{digest}", 5000)
    return Program(**json.loads(found))


def _calls(program: Program) -> str:
    return ", ".join(f"{what} at {at}" for what, at in program.collectives.items())


def _said(theirs: Program, own: Program) -> str:
    """The first difference of two programs, of another process and of this one."""
    first, second = (
        next((f"{what} at {at}" for what, at in p.items() if what not in q), "")
        for p, q in (
            (theirs.collectives, own.collectives),
            (own.collectives, theirs.collectives),
        )
    )
    ours = f"process {jax.process_index()} compiled {own.name}"
    if first or second:
        return (
            f"compiled {theirs.name} with {first or 'nothing'}; {ours} with {second or 'nothing'}"
        )
    return (
        f"compiled {theirs.name} and {ours} with the same collectives, but in another order or "
        f"number, or in other steps: {_calls(own)}"
    )
