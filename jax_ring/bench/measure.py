"""Times collectives: nccl-tests' quantities, measured in turns and checked.

Cases that are compared run in turns, one after the other in each round, so that what else the
machine does falls on all of them alike. A time is that of one call as a user has it: from Python's
call to the result being there on all devices of the process, and over several processes that of the
slowest, all having started from a barrier.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import collectives, hosts
from jax_ring.bench.operands import Operands
from jax_ring.explanation import explain
from jax_ring.schedules import Kind, Schedule
from jax_ring.schedules.families import make, names

AXIS = "ranks"
LAX = "psum"
BY_HOSTS = ("hierarchical", "host_ring")  # All-reduces that fit which ranks share a process.
LAX_OPS: dict[Kind, dict[str, Callable[..., Any]]] = {
    Kind.ALL_REDUCE: {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin, "mean": lax.pmean},
    Kind.REDUCE_SCATTER: {"sum": functools.partial(lax.psum_scatter, tiled=True)},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured against others.

    Attributes:
      name: what it is called.
      algorithm: "auto", a name in `schedules.FAMILIES`, "hierarchical" or "host_ring" (over the
        processes, see `jax_ring.hosts`), "psum" for lax's own op, or a schedule.
      wire: what chunks travel as, a name in `jax_ring.wire`, or None.
    """

    name: str
    algorithm: str | Schedule
    wire: str | None = None

    @classmethod
    def parse(cls, text: str, kind: Kind, wire: str | None = None) -> Case:
        """A case as it is written: an algorithm, and perhaps +WIRE.

        Args:
          text: such as "ring" or "direct+int8"; "xla" and "lax" are other names of "psum".
          kind: the collective.
          wire: what chunks travel as if the text does not say.

        Raises:
          ValueError: for an algorithm that is not there.

        Example:
          >>> Case.parse("direct+int8", Kind.ALL_REDUCE)
          Case(name='direct+int8', algorithm='direct', wire='int8')
        """
        algorithm, plus, own = text.strip().partition("+")
        algorithm = LAX if algorithm in ("xla", "lax") else algorithm
        by_hosts = BY_HOSTS if kind is Kind.ALL_REDUCE else ()
        known = ("auto", *names(kind), *by_hosts, LAX)
        if algorithm not in known:
            raise ValueError(f"no {kind.value} {algorithm!r}: there are {', '.join(known)}")
        if algorithm == LAX:
            if plus:
                raise ValueError(f"lax's own op has no wire, got {text!r}")
            return cls(LAX, LAX)
        wire = own if plus else wire
        return cls(algorithm + (f"+{wire}" if wire else ""), algorithm, wire)


@dataclasses.dataclass(frozen=True)
class Timing:
    """What repeated calls took.

    Attributes:
      seconds: of each call, in the order of the rounds.
      wrong: elements that were wrong, over all ranks; None if nothing was checked.
    """

    seconds: tuple[float, ...]
    wrong: int | None

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    def percentile(self, percent: float) -> float:
        """Seconds that so many percent of the calls did not exceed."""
        return float(np.percentile(self.seconds, percent))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One case at one size.

    Attributes:
      case: what was measured.
      chosen: the algorithm that it came to.
      nbytes: the size of the buffer of a rank: of the larger one, where two differ.
      count: elements as nccl-tests counts them: those of the smaller buffer.
      out_of_place: with the operand kept.
      in_place: with the operand donated; None where the buffers differ in size, since XLA cannot
        reuse one for the other.
    """

    case: Case
    chosen: str
    nbytes: int
    count: int
    out_of_place: Timing
    in_place: Timing | None

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Those that there are."""
        return (self.out_of_place,) if self.in_place is None else (self.out_of_place, self.in_place)


def busbw_factor(kind: Kind, ranks: int) -> float:
    """Bus bandwidth by algorithm bandwidth, as in nccl-tests' PERFORMANCE.md.

    Example:
      >>> busbw_factor(Kind.ALL_REDUCE, 8), busbw_factor(Kind.ALL_GATHER, 8)
      (1.75, 0.875)
    """
    return (2 if kind is Kind.ALL_REDUCE else 1) * (ranks - 1) / ranks


def elements(kind: Kind, nbytes: int, itemsize: int, ranks: int) -> int:
    """The elements that a rank puts in for buffers of so many bytes, at least one to a rank.

    Sizes are those of the larger buffer. Where it is made of one block for each rank, it is rounded
    down to whole blocks.

    Example:
      >>> [elements(kind, 4096, 4, 8) for kind in Kind]
      [1024, 1024, 128]
    """
    if kind is Kind.ALL_REDUCE:
        return max(nbytes // itemsize, 1)
    block = max(nbytes // itemsize // ranks, 1)
    return block if kind is Kind.ALL_GATHER else block * ranks


def distinct(kind: Kind, sizes: Sequence[int], itemsize: int, ranks: int) -> list[int]:
    """The sizes without those that come to as many elements as one before.

    Example:
      >>> distinct(Kind.ALL_REDUCE, [1, 2, 4, 7, 8], 4, 2)
      [1, 8]
    """
    found: dict[int, int] = {}
    for nbytes in sizes:
        found.setdefault(elements(kind, nbytes, itemsize, ranks), nbytes)
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How often things are done.

    Attributes:
      iters: calls that are timed.
      warmup: calls before that are not.
      together: calls that are issued before the last one is waited for; their time is divided by
        as many. Hides what Python's call takes where devices work on their own.
      checks: calls whose results are checked, before the others.
    """

    iters: int = 20
    warmup: int = 5
    together: int = 1
    checks: int = 1


Run = Callable[[], float]
Progress = Callable[[str], None]


class Bench:
    """Measures one collective over one mesh; programs are compiled once for each size.

    Args:
      mesh: of one axis, `AXIS`: all of its devices take part. Over several processes each has to
        make the same calls.
      operands: the collective, and what goes in.
    """

    def __init__(self, mesh: Mesh, operands: Operands) -> None:
        """Keeps both; nothing is compiled yet."""
        self.mesh, self.operands = mesh, operands
        self.ranks = mesh.size
        self.sharding = NamedSharding(mesh, P(AXIS))
        self.dtype = jnp.dtype(operands.dtype)
        self._programs: dict[tuple[Case, int, bool], Any] = {}
        self._copy = jax.jit(jnp.copy)

    # --- programs ---

    def collective(self, case: Case) -> Callable[[jax.Array], jax.Array]:
        """The call of a case on one rank, where `AXIS` is bound.

        Raises:
          ValueError: if lax is to do what it cannot.
        """
        kind, op = self.operands.kind, self.operands.op
        if case.algorithm == LAX:
            if kind is Kind.ALL_GATHER:
                return lambda v: lax.all_gather(v, AXIS, tiled=True)
            if op not in LAX_OPS[kind]:
                raise ValueError(f"lax has no {kind.value} by {op}; leave {LAX} out")
            return lambda v: LAX_OPS[kind][op](v, AXIS)
        how: dict[str, Any] = {"algorithm": self._algorithm(case), "wire": case.wire}
        if kind is Kind.ALL_REDUCE:
            return lambda v: collectives.all_reduce(v, AXIS, op, **how)
        if kind is Kind.REDUCE_SCATTER:
            return lambda v: collectives.reduce_scatter(v, AXIS, op, tiled=True, **how)
        return lambda v: collectives.all_gather(v, AXIS, tiled=True, **how)

    def _algorithm(self, case: Case) -> str | Schedule:
        if case.algorithm == "hierarchical":
            return hosts.hierarchical(self.mesh, AXIS)
        if case.algorithm == "host_ring":
            return hosts.ring(self.mesh, AXIS)
        return case.algorithm

    def _mapped(self, case: Case) -> Callable[[jax.Array], jax.Array]:
        # Every rank's result is kept, so that every rank's is checked.
        mapped: Callable[[jax.Array], jax.Array] = jax.shard_map(
            self.collective(case),
            mesh=self.mesh,
            in_specs=P(AXIS),
            out_specs=P(AXIS),
            check_vma=False,
        )
        return mapped

    def _shape(self, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.ranks * count,), self.dtype, sharding=self.sharding)

    def compiled(self, case: Case, count: int, *, donate: bool) -> Any:
        """The program of a case for so many elements on each rank.

        Raises:
          ValueError, TypeError, NotImplementedError: if the case cannot do it.
        """
        key = (case, count, donate)
        if key not in self._programs:
            call = jax.jit(self._mapped(case), donate_argnums=0 if donate else ())
            self._programs[key] = call.lower(self._shape(count)).compile()
        return self._programs[key]

    def chosen(self, case: Case, count: int) -> str:
        """The name of the algorithm that a case comes to."""
        if case.algorithm == LAX:
            return "lax"
        if isinstance(case.algorithm, Schedule):
            return case.name
        found = explain(self._mapped(case), self._shape(count)).collectives
        if not found:
            return "none"
        name, steps = found[0].algorithm, found[0].steps
        if name != "ring" or not steps:
            return name
        # What "auto" cuts into segments has a multiple of the ring's steps.
        parts = steps // make(name, self.operands.kind, self.ranks).rounds
        return name if parts == 1 else f"{name} of {parts} segments"

    def forget(self) -> None:
        """Lets go of the compiled programs."""
        self._programs.clear()

    # --- data ---

    def operand(self, count: int) -> jax.Array:
        """The operand: on rank r the values of rank r."""
        shape = (self.ranks * count,)

        def block(index: Any) -> Any:
            return self.operands.of_rank((index[0].start or 0) // count, count)

        return jax.make_array_from_callback(shape, self.sharding, block)

    def wrong(self, result: jax.Array, case: Case, count: int, chosen: str) -> int:
        """The wrong elements of all ranks."""
        each = result.shape[0] // self.ranks
        found = sum(
            self.operands.wrong(
                np.asarray(shard.data),
                rank=(shard.index[0].start or 0) // each,
                count=count,
                wire=case.wire,
                algorithm=chosen,
            )
            for shard in result.addressable_shards
        )
        return int(self._everywhere(np.array([found])).sum())

    def _everywhere(self, values: Any) -> Any:
        """[processes, ...]: what each process of the mesh has."""
        if self._processes == 1:
            return np.asarray(values)[None]
        return np.asarray(multihost_utils.process_allgather(values))

    @property
    def _processes(self) -> int:
        return len({device.process_index for device in self.mesh.devices.flat})

    def _barrier(self) -> None:
        if self._processes > 1:
            multihost_utils.sync_global_devices("jax_ring.bench")

    # --- measuring ---

    def measure(
        self,
        cases: Sequence[Case],
        nbytes: int,
        rounds: Rounds,
        *,
        in_place: bool = True,
        progress: Progress = lambda what: None,
    ) -> list[Measurement]:
        """Measures all cases at one size, in turns.

        Args:
          cases: what is compared.
          nbytes: the size of the larger buffer of a rank.
          rounds: how often.
          in_place: whether to measure with donated operands too, where that means anything.
          progress: is told in a few words what comes next, once for each step of the work.

        Returns:
          A measurement of each case, in their order.

        Raises:
          ValueError, TypeError, NotImplementedError: if a case cannot do it.
        """
        kind = self.operands.kind
        count = elements(kind, nbytes, self.dtype.itemsize, self.ranks)
        both = in_place and kind is Kind.ALL_REDUCE
        x = self.operand(count)
        chosen = {case: self.chosen(case, count) for case in cases}
        runs: dict[tuple[Case, bool], Run] = {}
        wrong: dict[tuple[Case, bool], int] = {}
        for case in cases:
            for donate in (False, True) if both else (False,):
                progress(f"compiling {case.name}")
                program = self.compiled(case, count, donate=donate)
                wrong[case, donate] = sum(
                    self.wrong(program(self._copy(x) if donate else x), case, count, chosen[case])
                    for _ in range(rounds.checks)
                )
                runs[case, donate] = functools.partial(
                    self._time, program, x, rounds.together, donate=donate
                )
        seconds = self._in_turns(runs, rounds, progress)
        checked = rounds.checks > 0
        timings = {
            key: Timing(tuple(seconds[key]), wrong[key] if checked else None) for key in runs
        }
        smaller = count // self.ranks if kind is Kind.REDUCE_SCATTER else count
        larger = count * (self.ranks if kind is Kind.ALL_GATHER else 1) * self.dtype.itemsize
        return [
            Measurement(
                case,
                chosen[case],
                larger,
                smaller,
                timings[case, False],
                timings.get((case, True)),
            )
            for case in cases
        ]

    def trace(
        self, cases: Sequence[Case], sizes: Sequence[int], folder: pathlib.Path, calls: int
    ) -> None:
        """Profiles some calls of each case at each size, which are not timed.

        Args:
          cases: as `measure`.
          sizes: bytes of the larger buffer of a rank.
          folder: where the profiles go, one for each size, and of several processes for each of
            them, for TensorBoard, XProf or Perfetto.
          calls: how many of each, named after the case and the size.
        """
        # Of a host JAX keeps one profile in a folder.
        own = f"process{jax.process_index()}" if self._processes > 1 else ""
        for nbytes in sizes:
            count = elements(self.operands.kind, nbytes, self.dtype.itemsize, self.ranks)
            programs = {case: self.compiled(case, count, donate=False) for case in cases}
            x = self.operand(count)
            with jax.profiler.trace(str(folder / f"{nbytes}B" / own)):
                for case, program in programs.items():
                    for _ in range(calls):
                        with jax.profiler.TraceAnnotation(f"{case.name} {nbytes} B"):
                            jax.block_until_ready(program(x))
            self.forget()

    def _in_turns(
        self, runs: dict[tuple[Case, bool], Run], rounds: Rounds, progress: Progress
    ) -> dict[tuple[Case, bool], list[float]]:
        taken: dict[tuple[Case, bool], list[float]] = {key: [] for key in runs}
        for turn in range(rounds.warmup + rounds.iters):
            progress(f"round {turn + 1}" if turn >= rounds.warmup else "warming up")
            for key, run in runs.items():
                took = run()
                if turn >= rounds.warmup:
                    taken[key].append(took)
        slowest = self._everywhere(np.array(list(taken.values()))).max(axis=0)
        return {key: [float(s) for s in row] for key, row in zip(taken, slowest, strict=True)}

    def _time(self, program: Any, x: jax.Array, together: int, *, donate: bool) -> float:
        """Seconds of a call; donated operands are made before."""
        operands = [self._copy(x) if donate else x for _ in range(together)]
        jax.block_until_ready(operands)
        self._barrier()
        result = None
        start = time.perf_counter()
        for operand in operands:
            result = program(operand)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / together


def sweep(
    bench: Bench,
    cases: Sequence[Case],
    sizes: Sequence[int],
    rounds: Rounds,
    progress: Progress = lambda what: None,
    *,
    in_place: bool = True,
) -> Iterator[Measurement]:
    """Measures all cases at one size after the other.

    Args:
      bench: what is measured.
      cases: as `Bench.measure`.
      sizes: bytes of the larger buffer of a rank.
      rounds: as `Bench.measure`.
      progress: as `Bench.measure`.
      in_place: as `Bench.measure`.

    Yields:
      The measurements of the first size, then those of the next.

    Raises:
      ValueError, TypeError, NotImplementedError: as `Bench.measure`.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:2], AXIS)
      >>> bench = Bench(mesh, Operands(Kind.ALL_REDUCE, "sum", "float32", 2))
      >>> cases = [Case.parse("ring", Kind.ALL_REDUCE)]
      >>> for measured in sweep(bench, cases, [4096, 8192], Rounds(iters=2, warmup=0)):
      ...     print(measured.nbytes, measured.chosen, measured.out_of_place.wrong)
      4096 ring 0
      8192 ring 0
    """
    for nbytes in sizes:
        yield from bench.measure(cases, nbytes, rounds, in_place=in_place, progress=progress)
        bench.forget()
