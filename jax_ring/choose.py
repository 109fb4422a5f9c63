"""What `algorithm="auto"` means: the algorithm with the smallest predicted time.

The time of a schedule is that of its steps, of its bytes on the links, and of its bytes through the
memory of each rank. The three prices stand in a table of links, which a tuning file overrides.
Everything here is pure, but for reading and writing that file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from jax_ring.plan import Origin, Segment, Source, overwrites, plan
from jax_ring.schedules import Kind, Op, Run, Schedule, hierarchical, ring
from jax_ring.schedules.cost import through_a_port
from jax_ring.schedules.families import make, names
from jax_ring.schedules.schedule import Perm
from jax_ring.schedules.topology import is_finite


@dataclasses.dataclass(frozen=True)
class Link:
    """What communication costs between ranks that are joined in one way.

    Attributes:
      alpha: seconds per step.
      beta: seconds per byte that a rank sends.
      gamma: seconds per byte that a rank reads or writes in memory on the way; 0 where the link is
        so much slower that memory does not count.
      spills: pairs (bytes, factor), ascending: in a message of more than so many bytes, which some
        cache no longer holds, a byte costs so many times gamma. The ring may be divided into
        segments whose chunks are of at most the last of these sizes.
      ports: messages that a rank sends at once without slowing down.
      serial: whether the messages of several channels go one after the other, each with its alpha.
      exchange: how many times beta a byte costs where two ranks send to each other in one step.
      shared: whether all ranks share the cores and the memory of one machine, so that every cost is
        one for each rank.
      source: where the figures come from.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    spills: tuple[tuple[int, float], ...] = ()
    ports: int = 1
    serial: bool = False
    exchange: float = 1.0
    shared: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        """Rejects what no link can be."""
        for name in ("alpha", "beta", "gamma"):
            value = getattr(self, name)
            if not is_finite(value) or value < 0:
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
        _check_spills(self.spills)
        if isinstance(self.ports, bool) or not isinstance(self.ports, int) or self.ports < 1:
            raise ValueError(f"ports must be an integer of at least 1, got {self.ports!r}")
        if not is_finite(self.exchange) or self.exchange < 1:
            raise ValueError(
                f"exchange must be a finite number of at least 1, got {self.exchange!r}"
            )
        for name in ("serial", "shared"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if not isinstance(self.source, str):
            raise ValueError(f"source must be a text, got {self.source!r}")


def _check_spills(spills: Any) -> None:
    pairs = isinstance(spills, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(map(is_finite, pair)) for pair in spills
    )
    if not pairs or any(size <= 0 or factor < 1 for size, factor in spills):
        raise ValueError(
            f"spills must be pairs of a finite size > 0 and a finite factor >= 1, got {spills!r}"
        )
    if list(spills) != sorted(spills):
        raise ValueError(f"spills must ascend, got {spills!r}")


LINKS: Mapping[str, Link] = {
    "cpu": Link(
        alpha=30e-6,
        beta=0.0,
        gamma=0.010e-9,
        spills=(
            (256 << 10, 1.25),
            (512 << 10, 1.7),
            (1 << 20, 2.0),
            (2 << 20, 2.4),
            (4 << 20, 3.0),
            (8 << 20, 3.1),
        ),
        shared=True,
        source="devices of one process, fitted to benchmarks/inprocess.py on two cores",
    ),
    "gloo": Link(
        alpha=1.8e-3,
        beta=8e-9,
        # XLA:CPU runs one permute after the other; two processes share one connection.
        serial=True,
        exchange=1.85,
        source="four hosts on links of 1 Gbit/s: a ring of 16 KiB, the links' nominal rate, and at "
        "16 MiB halving-doubling against the ring (benchmarks/network.py)",
    ),
    "nvlink": Link(
        alpha=5e-6,
        beta=1 / 400e9,
        source="assumed: 400 GB/s of bus bandwidth between the 8 GPUs of a node, 5 us per step",
    ),
    "infiniband": Link(
        alpha=10e-6,
        beta=1 / 45e9,
        source="assumed: 45 GB/s per GPU of a network card of 400 Gbit/s, 10 us per step",
    ),
    "ici": Link(
        alpha=2e-6,
        beta=1 / 45e9,
        ports=2,
        source="assumed: 45 GB/s in each direction of a TPU v5e ring, 2 us per step",
    ),
}

# For each platform the link within a process, and the one between processes.
_PLATFORMS = {
    "cpu": ("cpu", "gloo"),
    "gpu": ("nvlink", "infiniband"),
    "cuda": ("nvlink", "infiniband"),
    "rocm": ("nvlink", "infiniband"),
    "tpu": ("ici", "ici"),
}


def links_of(platform: str, processes: int) -> tuple[str, str]:
    """The names of the links inside of a process and across the whole of the ranks.

    Args:
      platform: as `jax.Device.platform` has it; an unknown one is taken for a GPU.
      processes: how many there are.

    Returns:
      Two names in `LINKS`, the same for one process.

    Example:
      >>> links_of("cpu", 1), links_of("gpu", 64)
      (('cpu', 'cpu'), ('nvlink', 'infiniband'))
    """
    inner, outer = _PLATFORMS.get(platform, _PLATFORMS["gpu"])
    return inner, outer if processes > 1 else inner


# --- predicting -----------------------------------------------------------------------------------


def predict(
    schedule: Schedule, nbytes: float, link: Link, *, across: Link | None = None, inner: int = 1
) -> float:
    """The predicted time of a schedule.

    Args:
      schedule: what to price.
      nbytes: size of the whole buffer in bytes, as it travels.
      link: what the ranks are joined by.
      across: if given, what groups of `inner` ranks are joined by; `link` is then the one inside.
      inner: ranks in a group.

    Returns:
      Seconds.

    Example:
      >>> from jax_ring.schedules import ring
      >>> f"{predict(ring(8), 1e9, Link(alpha=0.0, beta=1 / 400e9)) * 1e3:.3f} ms"
      '4.375 ms'
    """
    rounds = list(schedule.stretches())
    segments, copies = [], False
    if link.gamma or (across and across.gamma):
        segments = plan(schedule).segments
        copies = overwrites(schedule)
    whole = _Part(nbytes, schedule.chunks, rounds, segments, copies, schedule.ranks)
    if across is None:
        return whole.seconds(link)

    def part(leaves: bool) -> _Part:
        runs = [(n, [run for run in runs if leaves is _leaves(run, inner)]) for n, runs in rounds]
        chosen = [segment for segment in segments if leaves is _leaves(segment, inner)]
        return dataclasses.replace(whole, rounds=runs, segments=chosen)

    # A machine holds the ranks of a group, which copy their operands there.
    within = dataclasses.replace(part(False), sharing=inner)
    between = dataclasses.replace(part(True), copies=False)
    return within.seconds(link) + between.seconds(across)


def _leaves(steps: Run | Segment, inner: int) -> bool:
    """Whether any of the messages leaves its group."""
    return any(source // inner != target // inner for source, target in steps.first.perm)


# How many times a byte costs more, on shared links, in a step that moves some chunks, not one and
# not all. No custom call does that work, and XLA:CPU hands its own loops to other threads.
_BY_LOOPS = 2.0


@dataclasses.dataclass(frozen=True)
class _Part:
    """All of a schedule, or its steps inside of groups or those that leave them.

    Attributes:
      nbytes: size of the whole buffer.
      chunks: into how many chunks it is divided.
      rounds: the part's stretches of rounds, and the runs they are of.
      segments: its segments in the plan of the whole, if memory has a price.
      copies: whether a copy of the operand belongs to it.
      sharing: how many ranks share one machine, if any do.
    """

    nbytes: float
    chunks: int
    rounds: list[tuple[int, list[Run]]]
    segments: list[Segment]
    copies: bool
    sharing: int

    @property
    def chunk(self) -> float:
        """The size of a chunk in bytes."""
        return self.nbytes / self.chunks

    def seconds(self, link: Link) -> float:
        """The time over one kind of link."""
        memory = link.gamma * self._touched(link) if link.gamma else 0.0
        steps = sum(n * _moving(runs) for n, runs in self.rounds)
        if link.shared:
            # Each step is a rendezvous of all ranks, one after the other in whatever channel.
            sending = steps * link.alpha + self._sent(1) * self.chunk * link.beta
            return self.sharing * (sending + memory)
        latencies = steps if link.serial else sum(n for n, runs in self.rounds if _moving(runs))
        # Messages that go one after the other are as those through one port.
        sent = self._sent(1 if link.serial else link.ports)
        if link.exchange > 1:
            sent += (link.exchange - 1) * sum(n * _exchanged(runs) for n, runs in self.rounds)
        return latencies * link.alpha + sent * self.chunk * link.beta + memory

    def _sent(self, ports: int) -> float:
        """The chunks that pass through the busiest port."""
        return sum(n * through_a_port(runs, ports) for n, runs in self.rounds)

    def _touched(self, link: Link) -> float:
        """Bytes that a rank reads and writes; those that spill count as often as they cost."""
        touched = 0.0
        for segment in self.segments:
            message = segment.first.k * self.chunk
            price = _spilled(link, message)
            if link.shared and 1 < segment.first.k < self.chunks:
                price *= _BY_LOOPS
            touched += price * _passes(segment, self.chunks) * message
        return touched + 2 * self.nbytes * self.copies * _spilled(link, self.chunk)


def _moving(runs: list[Run]) -> int:
    return sum(bool(run.first.perm) for run in runs)


def _exchanged(runs: list[Run]) -> int:
    """The chunks of those steps of a round in which two ranks send to each other."""
    return sum(run.first.k for run in runs if _exchanges(run.first.perm))


def _exchanges(perm: Perm) -> bool:
    pairs = set(perm)
    return any(source != target and (target, source) in pairs for source, target in perm)


def _spilled(link: Link, message: float) -> float:
    return max((factor for size, factor in link.spills if message > size), default=1.0)


def _passes(segment: Segment, chunks: int) -> float:
    """How often the steps of a segment read or write each byte of their messages."""
    whole = segment.first.k == chunks
    loads = _cuts(segment.traits.origin) + (segment.count - 1) * _cuts(segment.rest)
    each = 2 + 3 * (segment.first.op is Op.REDUCE) + 2 * (segment.traits.store and not whole)
    return segment.count * each + 2 * loads * (not whole)


def _cuts(origin: Origin) -> bool:
    """Whether what a step sends is cut out of something larger first."""
    return origin.source is Source.LOAD or origin.places is not None


# --- choosing -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
      algorithm: a name in `schedules.FAMILIES`, "xla", or a schedule.
      seconds: its predicted time.
      reason: one sentence.
      candidates: what it was chosen from: names and predicted seconds, the best first.
    """

    algorithm: str | Schedule
    seconds: float
    reason: str
    candidates: tuple[tuple[str, float], ...]


# Each segment is a ring of its own in the program: more would take long to compile.
MOST_SEGMENTS = 16
_MOST_CHUNKS = 128


@functools.lru_cache(maxsize=4096)
def choose(
    kind: Kind,
    ranks: int,
    nbytes: int,
    link: Link,
    *,
    across: Link | None = None,
    inner: int = 1,
    segments: int = MOST_SEGMENTS,
    allow_xla: bool = False,
) -> Choice:
    """Chooses the algorithm with the smallest predicted time.

    Args:
      kind: the collective.
      ranks: the number of ranks.
      nbytes: size of the whole buffer in bytes: what is reduced, or the result of an all-gather.
      link: what the ranks are joined by.
      across: if given, what groups of `inner` consecutive ranks are joined by, for hierarchies.
      inner: ranks in a group.
      segments: the most segments into which the ring may be divided.
      allow_xla: whether lax's own op is a candidate.

    Returns:
      The choice, cached.

    Complexity: builds every candidate; a few milliseconds for 64 ranks, once for each size.

    Example:
      >>> for nbytes in (4 << 10, 4 << 20):
      ...     print(choose(Kind.ALL_REDUCE, 8, nbytes, LINKS["cpu"]).algorithm)
      recursive_doubling
      ring
    """
    slowest = across or link
    candidates: list[tuple[str, str | Schedule, float]] = []
    for name, algorithm, schedule in _candidates(kind, ranks, nbytes, link, segments):
        candidates.append((name, algorithm, predict(schedule, nbytes, slowest)))
    if across is not None and kind is Kind.ALL_REDUCE and 1 < inner < ranks:
        schedule = hierarchical(inner, ranks // inner)
        seconds = predict(schedule, nbytes, link, across=across, inner=inner)
        candidates.append(("hierarchical", schedule, seconds))
    if allow_xla:
        candidates.append(("xla", "xla", _by_xla(kind, ranks, nbytes, slowest)))
    # Of those that differ in the last bits only, the first one.
    candidates.sort(key=lambda candidate: float(f"{candidate[2]:.9g}"))
    name, algorithm, seconds = candidates[0]
    return Choice(algorithm, seconds, _reason(candidates), tuple((c[0], c[2]) for c in candidates))


def _candidates(
    kind: Kind, ranks: int, nbytes: int, link: Link, segments: int
) -> Iterator[tuple[str, str | Schedule, Schedule]]:
    for name in names(kind):
        if name == "direct" and ranks > 64:
            continue  # As many bytes and steps as the ring, in tables of ranks x ranks.
        yield name, name, make(name, kind, ranks)
    # Two ranks send no more in one step of recursive doubling.
    if kind is Kind.ALL_REDUCE and ranks > 2:
        most = min(segments, 1 << (max(_MOST_CHUNKS // ranks, 1).bit_length() - 1))
        # To fit where the smallest messages do takes more rendezvous than it saves.
        sizes = [size for size, _ in link.spills[1:] or link.spills]
        fitting = {_fitting(nbytes / ranks, size, most) for size in sizes}
        for parts in sorted(fitting - {1}):
            schedule = ring(ranks, segments=parts)
            yield f"ring of {parts} segments", schedule, schedule


def _fitting(chunk: float, size: float, most: int) -> int:
    """Into how many parts a chunk is divided, so that each fits, if that is not too many."""
    return min(1 << math.ceil(math.log2(max(chunk / size, 1))), most)


def _by_xla(kind: Kind, ranks: int, nbytes: int, link: Link) -> float:
    """The time of lax's own op: one step where ranks share memory, else that of the ring."""
    if not link.shared:
        return predict(make("ring", kind, ranks), nbytes, link)
    passes = 5 if kind is Kind.ALL_REDUCE else 3
    return ranks * link.alpha + link.gamma * nbytes * passes * (ranks - 1)


def _reason(candidates: list[tuple[str, str | Schedule, float]]) -> str:
    others = ", ".join(f"{name} {seconds * 1e6:.4g}" for name, _, seconds in candidates[1:])
    name, _, seconds = candidates[0]
    return f"smallest predicted time: {name} {seconds * 1e6:.4g} us" + (
        f" (others: {others})" if others else ""
    )


# --- the tuning file ------------------------------------------------------------------------------

SCHEMA, VERSION = "jax_ring.tuning", 1


def save_tuning(path: str | os.PathLike[str], links: Mapping[str, Link]) -> None:
    """Writes a tuning file, whole or not at all.

    Args:
      path: where; `JAX_RING_TUNING` names it to `algorithm="auto"`.
      links: the links that it overrides, by their name in `LINKS`.

    Raises:
      ValueError: for a name that is not in `LINKS`.

    Example:
      >>> import tempfile, os
      >>> path = os.path.join(tempfile.mkdtemp(), "tuning.json")
      >>> save_tuning(path, {"gloo": Link(alpha=1e-3, beta=1e-9, source="measured")})
      >>> load_tuning(path)["gloo"].alpha
      0.001
    """
    unknown = sorted(set(links) - set(LINKS))
    if unknown:
        raise ValueError(f"links must be named as in {list(LINKS)}, got {unknown}")
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "links": {name: dataclasses.asdict(link) for name, link in links.items()},
    }
    target = pathlib.Path(path)
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
    with tempfile.NamedTemporaryFile("w", dir=target.parent, suffix=".tmp", delete=False) as file:
        try:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            # Not only for whom it was made by: it is read on all hosts.
            os.chmod(file.name, stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def load_tuning(path: str | os.PathLike[str]) -> Mapping[str, Link]:
    """Reads a tuning file.

    Args:
      path: a file as `save_tuning` writes it. What a link leaves out is as in `LINKS`.

    Returns:
      All links, with the file's in place of those of `LINKS`. Read again when the file changes.

    Raises:
      ValueError: naming the file and what is wrong with it: not there, no JSON, of another schema
        or version, a link or a field that there is not, a value that cannot be.
    """
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise _unusable(path, "it is no path") from None
    try:
        state = os.stat(name)
        return _load(name, (state.st_mtime_ns, state.st_size))
    except OSError as error:
        raise _unusable(name, f"it can't be read: {error.strerror}") from None


def links_in(tuning: str | os.PathLike[str] | None) -> Mapping[str, Link]:
    """The links by a tuning file, or `LINKS` without one."""
    return LINKS if tuning is None else load_tuning(tuning)


def digest(links: Mapping[str, Link]) -> str:
    """A short digest of all prices, the same for the same prices wherever they are from.

    Example:
      >>> digest(LINKS) == digest({**LINKS, "gloo": dataclasses.replace(LINKS["gloo"], source="")})
      True
    """
    prices = {name: dataclasses.asdict(link) | {"source": ""} for name, link in links.items()}
    return hashlib.sha256(json.dumps(prices, sort_keys=True).encode()).hexdigest()[:12]


def _unusable(name: Any, why: str) -> ValueError:
    return ValueError(
        f"tuning (JAX_RING_TUNING) must name a file as jax_ring.choose.save_tuning writes it, got "
        f"{name!r}: {why}"
    )


@functools.lru_cache(maxsize=16)
def _load(name: str, _: tuple[int, int]) -> Mapping[str, Link]:
    try:
        content = json.loads(pathlib.Path(name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unusable(name, f"it is no JSON: {error}") from None
    except RecursionError:
        raise _unusable(name, "it is nested too deeply") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise _unusable(name, f'it must be an object with "schema": "{SCHEMA}"')
    version = content.get("version")
    if version != VERSION or not isinstance(version, int) or isinstance(version, bool):
        raise _unusable(name, f"its version must be {VERSION}, got {version!r}")
    if set(content) != {"schema", "version", "links"} or not isinstance(content["links"], dict):
        raise _unusable(name, f'it must have "schema", "version", "links", got {sorted(content)}')
    links = dict(LINKS)
    for link, fields in content["links"].items():
        if link not in LINKS:
            raise _unusable(name, f"links are {list(LINKS)}, got {link!r}")
        links[link] = _changed(name, link, fields)
    return links


def _changed(name: str, link: str, fields: Any) -> Link:
    known = [field.name for field in dataclasses.fields(Link)]
    if not isinstance(fields, dict) or not set(fields) <= set(known):
        raise _unusable(name, f"a link has the fields {known}, got {fields!r} for {link!r}")
    if isinstance(fields.get("spills"), list):
        pairs = [tuple(pair) if isinstance(pair, list) else pair for pair in fields["spills"]]
        fields = fields | {"spills": tuple(pairs)}
    try:
        return dataclasses.replace(LINKS[link], **fields)
    except ValueError as error:
        raise _unusable(name, f"in link {link!r} {error}") from None
