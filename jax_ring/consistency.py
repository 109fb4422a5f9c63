"""Whether all processes compile the same communication: the form of the check that is always on.

Processes whose programs differ, by a branch on `jax.process_index()`, by settings or by data, wait
for each other forever. So each notes what it compiles, where there are several processes: for each
program, when it is lowered, the collectives of jax_ring over axes that reach other processes, with
their source lines, a digest of all that the program sends (operations, types, who to whom), which
processes have devices in its mesh, and whether it is lowered to be called at once or ahead of time.
A thread writes that into the key-value store of the coordination service.

Nothing is compared while things go well. Programs may be compiled in any order, again, or by some
processes only, as long as they are only compiled: that is no error. Two processes differ if each
has a program that the other does not have, though it takes part in it. That is looked for and said

- by process 0 in a `watchdog`, when no process has begun a step for its timeout. It ends the job if
  each of the two has called its program and waits for a result; otherwise it goes on;
- without one, `PATIENCE_S` after a process compiled something last, as a warning, once for each
  two programs. Process 0 compares all processes, each other one itself with process 0.

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
import itertools
import json
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ring import _compat, callers
from jax_ring.config import current

PATIENCE_S = 60.0
_KEY = "jax_ring/programs"
_MOST = 4096  # Programs that are told of, the newest.
_PAIRS, _EXTRA = 100_000, 8  # What is compared at most: kinds of processes, programs of each.
_WARNINGS = 4  # At a time.
_LOWER = jax.stages.Traced.lower.__code__


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
class Note:
    """That a process has a program that sends something to other processes.

    Attributes:
      digest: of all that it sends, in order, and of its collectives.
      called: whether it was lowered for a call, which the other processes must then make too, and
        not ahead of time by `.lower`.
      processes: those with devices in its mesh, the first and the last of each run of them; None if
        the mesh did not say.
    """

    digest: str
    called: bool = True
    processes: tuple[tuple[int, int], ...] | None = None

    def takes(self, process: int) -> bool:
        """Whether a process takes part in it, as far as one knows."""
        runs = self.processes
        return runs is None or any(first <= process <= last for first, last in runs)


@dataclasses.dataclass(frozen=True)
class Program:
    """What there is to say of such a program.

    Attributes:
      name: as JAX has it.
      collectives: those of jax_ring, each kind once: what it is, and the line of its first call.
      note: what is compared.
    """

    name: str
    collectives: dict[str, str]
    note: Note


class _Book:
    """The programs of this process, and the thread that tells the others."""

    def __init__(self) -> None:
        self.programs: collections.OrderedDict[str, Program] = collections.OrderedDict()
        self._open = threading.local()  # Of each thread: the program that it lowers.
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._started = False
        self._warned: set[tuple[str, str]] = set()

    def known(self) -> list[Program]:
        """The programs so far, the newest last."""
        with self._lock:
            return list(self.programs.values())

    def note(self, module: Any, mesh: Any, what: str, where: str) -> None:
        """Adds a collective over a mesh to the program that this thread lowers."""
        with self._lock:
            if not self._started:
                self._started = True
                _compat.on_lowered(self._complete)
                threading.Thread(target=self._tell, daemon=True).start()
        if getattr(self._open, "module", None) is not module:
            self._open.module, self._open.collectives = module, {}
            self._open.processes = _runs(_owners(mesh))
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
        called = not _ahead_of_time()
        with self._lock:
            if (known := self.programs.get(digest)) is not None:
                called |= known.note.called
            note = Note(digest, called, self._open.processes)
            self.programs[digest] = Program(name, self._open.collectives, note)
            self.programs.move_to_end(digest)
            if len(self.programs) > _MOST:
                self.programs.popitem(last=False)
        self._news.set()

    def _tell(self) -> None:
        """Writes what is new, and looks whether the others have it, when nothing is new."""
        told: set[str] = set()
        while True:
            self._news.wait()
            self._news.clear()
            # The store ends with process 0, and then there is nobody to tell.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._write(told)
                if not self._news.wait(PATIENCE_S):
                    self._warn()

    def _write(self, told: set[str]) -> None:
        client = _compat.coordination_client()
        if client is None:
            return
        own = jax.process_index()
        programs = self.known()
        for program in programs:
            if (digest := program.note.digest) not in told:
                text = json.dumps({"name": program.name, "collectives": program.collectives})
                client.key_value_set(f"{_KEY}/of/{own}/{digest}", text, allow_overwrite=True)
                told.add(digest)
        # Last, so that what it lists is there.
        notes = json.dumps([dataclasses.astuple(program.note) for program in programs])
        client.key_value_set(f"{_KEY}/by/{own}", notes, allow_overwrite=True)

    def _warn(self) -> None:
        """Says the differences that were not yet said."""
        told = told_by(None if jax.process_index() == 0 else 0)
        new = {d.digests: d for d in differences(told) if d.digests not in self._warned}
        for digests, found in itertools.islice(new.items(), _WARNINGS):
            self._warned.add(digests)
            _say(f"processes differ, and may wait for each other: {found}")


def _say(text: str) -> None:
    print(f"jax_ring: {text}", file=sys.stderr, flush=True)


def _ahead_of_time() -> bool:
    """Whether a program that is lowered now is so by `.lower`, and not for a call."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        if caller.f_code is _LOWER:
            return True
        frame = caller
    return False


_book = _Book()


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
        _book.note(lowering.module, lowering.mesh, describe(), f"{file}:{line}")


@functools.lru_cache(maxsize=256)
def _reaches_others(mesh: Any, axes: tuple[str, ...]) -> bool:
    """Whether ranks along axes belong to different processes."""
    if mesh is None or not set(axes) <= set(mesh.axis_names):
        return False
    if isinstance(mesh, jax.sharding.AbstractMesh):
        # It does not say whose devices these are; they may all be ours.
        return bool(mesh.size > jax.local_device_count())
    owners = _owners(mesh)
    along = [mesh.axis_names.index(axis) for axis in axes]
    rows = np.moveaxis(owners, along, range(len(along)))
    rows = rows.reshape(math.prod(rows.shape[: len(along)]), -1)
    return bool((rows != rows[0]).any())


def _owners(mesh: Any) -> Any:
    """The process of each device of a mesh, in its shape; None if the mesh does not say."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return None
    return np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)


def _runs(owners: Any) -> tuple[tuple[int, int], ...] | None:
    """The first and the last of each run of consecutive numbers."""
    if owners is None:
        return None
    numbers = np.unique(owners)
    ends = np.flatnonzero(np.diff(numbers) > 1)
    starts = [0, *(ends + 1)]
    return tuple(
        (int(numbers[a]), int(numbers[b])) for a, b in zip(starts, [*ends, -1], strict=True)
    )


# --- and the others -------------------------------------------------------------------------------

Told = Mapping[int, Sequence[Note]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two processes, each of which has a program that the other, taking part in it, has not.

    Attributes:
      processes: the two.
      notes: the program of each.
    """

    processes: tuple[int, int]
    notes: tuple[Note, Note]

    @property
    def digests(self) -> tuple[str, str]:
        """By which it is known again."""
        return self.notes[0].digest, self.notes[1].digest

    @property
    def called(self) -> bool:
        """Whether each was called, and not only compiled, and the other surely takes part in it."""
        return all(note.called and note.processes is not None for note in self.notes)

    def __str__(self) -> str:
        """The first collectives in which they differ, with their lines."""
        (a, first), (b, second) = (
            (process, _program(process, note))
            for process, note in zip(self.processes, self.notes, strict=True)
        )
        only_first = _only(first, second)
        only_second = _only(second, first)
        if only_first or only_second:
            return (
                f"process {a} compiled {first.name} with {only_first or 'nothing'}; process {b} "
                f"compiled {second.name} with {only_second or 'nothing'}"
            )
        return (
            f"process {a} compiled {first.name} and process {b} {second.name} with the same "
            f"collectives, but in another order or number, or in other steps: {_calls(second)}"
        )


def told_by(other: int | None = None) -> dict[int, list[Note]]:
    """What processes have told that they compiled, the newest last.

    Args:
      other: the process that is asked beside this one; None for all.

    Raises:
      jax.errors.JaxRuntimeError: if the store does not answer.
    """
    client = _compat.coordination_client()
    own = jax.process_index()
    found = {own: [program.note for program in _book.known()]}
    if client is None or other == own:
        return found
    if other is not None:
        texts = [(str(other), client.key_value_try_get(f"{_KEY}/by/{other}"))]
    else:
        texts = client.key_value_dir_get(f"{_KEY}/by")
    theirs = {int(key.rpartition("/")[2]): json.loads(text) for key, text in texts}
    return {process: [_note(*n) for n in notes] for process, notes in theirs.items()} | found


def _note(digest: str, called: bool, processes: list[list[int]] | None) -> Note:
    runs = None if processes is None else tuple((first, last) for first, last in processes)
    return Note(digest, called, runs)


def differences(told: Told) -> list[Difference]:
    """The differences of processes: of each two kinds of them one, such that were called first.

    Args:
      told: of each process what it has compiled.
    """
    found = [
        difference
        for first, second in itertools.islice(itertools.combinations(_alike(told), 2), _PAIRS)
        if (difference := _difference(told, first, second)) is not None
    ]
    return sorted(found, key=lambda difference: not difference.called)


def missing(told: Told) -> str:
    """A program that one process has and another, taking part in it, has not, or "".

    The other may not have come so far.

    Args:
      told: of each process what it has compiled.
    """
    kinds = _alike(told)
    lacks = [
        (not note.called, first[0], other, note)
        for first, second in itertools.islice(itertools.permutations(kinds, 2), _PAIRS)
        for note in _extra(told, first, second)
        if (other := _member(second, note)) is not None
    ]
    if not lacks:
        return ""
    _, process, other, note = min(lacks, key=lambda lack: lack[:3])
    program = _program(process, note)
    return (
        f"process {process} compiled {program.name}, which process {other} has not: "
        f"{_calls(program)}"
    )


def _alike(told: Told) -> list[list[int]]:
    """The processes, those together that have the same programs, in whatever order."""
    kinds: dict[frozenset[Note], list[int]] = collections.defaultdict(list)
    for process, notes in sorted(told.items()):
        kinds[frozenset(notes)].append(process)
    return list(kinds.values())


def _difference(told: Told, first: list[int], second: list[int]) -> Difference | None:
    found = [
        Difference((a, b), (x, y))
        for x, y in itertools.product(_extra(told, first, second), _extra(told, second, first))
        if (a := _member(first, y)) is not None and (b := _member(second, x)) is not None
    ]
    return min(found, key=lambda difference: not difference.called, default=None)


def _extra(told: Told, first: list[int], second: list[int]) -> list[Note]:
    """What the first have and the second have not: what was called first, then the newest."""
    have = {note.digest for note in told[second[0]]}
    extra = [note for note in reversed(told[first[0]]) if note.digest not in have]
    return sorted(extra, key=lambda note: not note.called)[:_EXTRA]


def _member(processes: Iterable[int], note: Note) -> int | None:
    """The first of the processes that takes part in a program."""
    return next(filter(note.takes, processes), None)


def _program(process: int, note: Note) -> Program:
    if process == jax.process_index() and (own := _book.programs.get(note.digest)) is not None:
        return own
    client = _compat.coordination_client()
    said = json.loads(client.key_value_try_get(f"{_KEY}/of/{process}/{note.digest}"))
    return Program(said["name"], said["collectives"], note)


def _calls(program: Program) -> str:
    return ", ".join(f"{what} at {at}" for what, at in program.collectives.items())


def _only(program: Program, other: Program) -> str:
    """The first collective that another program has not, or ""."""
    mine, theirs = program.collectives.items(), other.collectives
    return next((f"{what} at {at}" for what, at in mine if what not in theirs), "")
