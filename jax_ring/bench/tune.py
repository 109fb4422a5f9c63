"""Measures what `algorithm="auto"` reckons with: the prices of links, and whether they serve.

The time of an all-reduce is linear in a link's prices, so that they follow from times of different
algorithms and sizes by least squares, in which an error counts relative to the time, and no price
is negative. What a link is, shared or with how many ports, is taken from `choose.LINKS`.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import pathlib
import socket
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jax_ring import choose
from jax_ring.bench.measure import AXIS, Bench, Case, Measurement, Progress, Rounds, sweep
from jax_ring.bench.operands import Operands
from jax_ring.choose import Link, predict
from jax_ring.config import config
from jax_ring.schedules import Kind, Schedule
from jax_ring.schedules.draw import crossings
from jax_ring.schedules.families import make, names

Floats = npt.NDArray[np.float64]

# Where caches may end: sizes of messages from which a byte may cost more.
_THRESHOLDS = tuple(1 << power for power in range(15, 24))
_LEAST = 4  # As many times as there are prices.
_NEAR = 1.1  # By the fastest: an algorithm within this is as good as that.
_AUTO = Case("auto", "auto")


@dataclasses.dataclass(frozen=True)
class Sample:
    """A time.

    Attributes:
      schedule: of what.
      nbytes: size of the buffer of a rank.
      seconds: how long it took.
    """

    schedule: Schedule
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Level:
    """What was measured of one link.

    Attributes:
      name: the link, in `choose.LINKS`.
      ranks: how many took part.
      link: its prices.
      error: by how much a prediction is off, relative to the time: the median.
      times: for each algorithm its seconds at each size.
      sizes: bytes.
    """

    name: str
    ranks: int
    link: Link
    error: float
    times: Mapping[str, tuple[float, ...]]
    sizes: tuple[int, ...]

    @property
    def crossings(self) -> list[tuple[float, str, str]]:
        """Where another algorithm becomes the fastest, as measured: bytes, from which, to which."""
        return crossings(self.times, self.sizes)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How "auto" does at one size.

    Attributes:
      nbytes: the size.
      chosen: what it chose.
      best: the fastest that was measured.
      ratio: its time by that of the fastest.
    """

    nbytes: int
    chosen: str
    best: str
    ratio: float

    @property
    def near(self) -> bool:
        """Whether it is within a tenth of the fastest."""
        return self.ratio <= _NEAR


# --- fitting --------------------------------------------------------------------------------------


def fit(samples: Sequence[Sample], base: Link, source: str = "") -> tuple[Link, float]:
    """The prices that predict some times best.

    Args:
      samples: of several algorithms and sizes.
      base: what kind of link it is: `shared`, `ports` and `serial` are kept.
      source: where the figures come from.

    Returns:
      The link, and the median of the relative errors of its predictions.

    Raises:
      ValueError: if there are fewer samples than prices.

    Complexity: for a shared link, a least-squares problem for each pair of cache sizes.

    Example:
      >>> from jax_ring.schedules import recursive_doubling, ring
      >>> true = Link(alpha=1e-5, beta=1e-9)
      >>> samples = [Sample(s, n, predict(s, n, true))
      ...            for s in (ring(8), recursive_doubling(8)) for n in (1 << 12, 1 << 20)]
      >>> link, error = fit(samples, Link(alpha=0.0, beta=0.0))
      >>> f"{link.alpha:.3g} {link.beta:.3g} {error:.3f}"
      '1e-05 1e-09 0.000'
    """
    if len(samples) < _LEAST:
        raise ValueError(f"tune: at least {_LEAST} times are needed, got {len(samples)}")
    kind = Link(0.0, 0.0, ports=base.ports, serial=base.serial, shared=base.shared, source=source)
    link = _fit_shared(samples, kind) if base.shared else _fit_network(samples, kind)
    errors = [abs(predict(s.schedule, s.nbytes, link) / s.seconds - 1) for s in samples]
    return link, statistics.median(errors)


def _column(samples: Sequence[Sample], link: Link) -> Floats:
    """What each sample would cost, by its time."""
    return np.array([predict(s.schedule, s.nbytes, link) / s.seconds for s in samples])


def _solve(columns: Sequence[Floats]) -> tuple[list[float], float]:
    """Prices, none negative, and what is left: columns times prices shall be 1."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]  # Slow to import.

    scales = [max(float(column.max()), 1e-300) for column in columns]
    matrix = np.stack([c / s for c, s in zip(columns, scales, strict=True)], axis=1)
    prices, left = nnls(matrix, np.ones(len(matrix)))
    return [float(p / s) for p, s in zip(prices, scales, strict=True)], float(left)


def _fit_network(samples: Sequence[Sample], kind: Link) -> Link:
    per_step = _column(samples, dataclasses.replace(kind, alpha=1.0))
    per_byte = _column(samples, dataclasses.replace(kind, beta=1.0))
    exchanged = _column(samples, dataclasses.replace(kind, beta=1.0, exchange=2.0)) - per_byte
    (alpha, beta, more), _ = _solve([per_step, per_byte, exchanged])
    if not beta:  # All bytes that count are exchanged, or none do.
        (alpha, beta), _ = _solve([per_step, per_byte])
        more = 0.0
    return dataclasses.replace(
        kind, alpha=alpha, beta=beta, exchange=1 + more / beta if beta else 1.0
    )


def _fit_shared(samples: Sequence[Sample], kind: Link) -> Link:
    """Prices of steps, of memory, and of memory beyond one or two caches."""
    per_step = _column(samples, dataclasses.replace(kind, alpha=1.0))
    moved = dataclasses.replace(kind, gamma=1.0)
    per_byte = _column(samples, moved)
    beyond = {
        size: _column(samples, dataclasses.replace(moved, spills=((size, 2.0),))) - per_byte
        for size in _THRESHOLDS
    }
    best: tuple[float, Link] | None = None
    for caches in itertools.chain([()], itertools.combinations(_THRESHOLDS, 2)):
        prices, left = _solve([per_step, per_byte, *(beyond[size] for size in caches)])
        alpha, gamma, *more = prices
        if best is not None and (left >= best[0] or not gamma):
            continue
        factors = 1 + np.cumsum(more) / gamma if gamma else np.ones(len(caches))
        spills = tuple((size, float(f)) for size, f in zip(caches, factors, strict=True))
        best = left, dataclasses.replace(kind, alpha=alpha, gamma=gamma, spills=spills)
    assert best is not None
    return best[1]


# --- measuring ------------------------------------------------------------------------------------


def level(mesh: Mesh, link: str, sizes: Sequence[int], rounds: Rounds, progress: Progress) -> Level:
    """Measures one link with all-reduces by all algorithms. All processes must call it alike.

    Args:
      mesh: of one axis, `AXIS`, whose devices are joined by the link.
      link: a name in `choose.LINKS`.
      sizes: bytes of the buffer of a rank, ascending.
      rounds: as `Bench.measure`.
      progress: as `Bench.measure`.

    Returns:
      Its prices, the same on all processes.

    Example:
      >>> mesh = Mesh(jax.devices()[:2], AXIS)
      >>> found = level(mesh, "cpu", [4096], Rounds(iters=3), lambda what: None)
      >>> found.link.shared, found.link.alpha >= 0, sorted(found.times)[0]
      (True, True, 'bidirectional_ring')
    """
    cases = [Case(name, name) for name in names(Kind.ALL_REDUCE)]
    found = list(sweep(_bench(mesh), cases, sizes, rounds, progress, in_place=False))
    seconds = np.array([m.out_of_place.median for m in found])
    if jax.process_count() > 1:  # All must choose alike.
        seconds = np.asarray(multihost_utils.broadcast_one_to_all(seconds), np.float64)
    samples = [
        Sample(make(m.case.name, Kind.ALL_REDUCE, mesh.size), m.nbytes, float(s))
        for m, s in zip(found, seconds, strict=True)
    ]
    first = mesh.devices.flat[0]
    source = (
        f"jax-ring tune, {datetime.date.today().isoformat()}: {mesh.size} x {first.device_kind} "
        f"on {socket.gethostname()}, jax {jax.__version__}, {sizes[0]} to {sizes[-1]} bytes"
    )
    prices, error = fit(samples, choose.LINKS[link], source)
    times: dict[str, list[float]] = {}
    for measured, sample in zip(found, samples, strict=True):
        times.setdefault(measured.case.name, []).append(sample.seconds)
    return Level(
        link, mesh.size, prices, error, {n: tuple(t) for n, t in times.items()}, tuple(sizes)
    )


def _bench(mesh: Mesh) -> Bench:
    return Bench(mesh, Operands(Kind.ALL_REDUCE, "sum", "float32", mesh.size))


def levels_of(mesh: Mesh) -> dict[str, Mesh]:
    """The links of the devices of a mesh, and between which of them each is to be measured.

    Args:
      mesh: of one axis, over all processes.

    Returns:
      Meshes by the names of links: inside of this process, and across all.

    Raises:
      ValueError: if there is one device only.

    Example:
      >>> {name: found.size for name, found in levels_of(Mesh(jax.devices(), AXIS)).items()}
      {'cpu': 8}
    """
    if mesh.size < 2:
        raise ValueError("one device is joined to no other: use --devices 8, or several processes")
    devices = list(mesh.devices.flat)
    inner, outer = choose.links_of(devices[0].platform, jax.process_count())
    own = [device for device in devices if device.process_index == jax.process_index()]
    found = {inner: Mesh(own, AXIS)} if inner != outer and len(own) > 1 else {}
    return {**found, outer: mesh}


def verify(
    mesh: Mesh,
    links: Mapping[str, Link],
    sizes: Sequence[int],
    rounds: Rounds,
    progress: Progress,
) -> list[Verdict]:
    """Measures "auto" with some links against all algorithms, in turns.

    Args:
      mesh: as `level`.
      links: what "auto" is to reckon with.
      sizes: as `level`.
      rounds: as `level`.
      progress: as `level`.

    Returns:
      A verdict for each size.
    """
    cases = [_AUTO, *(Case(name, name) for name in names(Kind.ALL_REDUCE))]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "tuning.json")
        choose.save_tuning(path, links)
        with config(tuning=str(path), algorithm="auto", link="auto"):
            found = list(sweep(_bench(mesh), cases, sizes, rounds, progress, in_place=False))
    groups = itertools.groupby(found, key=lambda measured: measured.nbytes)
    return [_judge(nbytes, list(group)) for nbytes, group in groups]


def _judge(nbytes: int, group: Sequence[Measurement]) -> Verdict:
    seconds = {measured.case.name: measured.out_of_place.median for measured in group}
    auto = next(measured for measured in group if measured.case == _AUTO)
    # Where it chose one of them that is the same program: their times differ by chance only.
    own = seconds.get(auto.chosen, seconds[_AUTO.name])
    rest = {name: s for name, s in seconds.items() if name != _AUTO.name}
    best = min(rest, key=lambda name: rest[name])
    return Verdict(nbytes, auto.chosen, best, own / rest[best])


def merged(path: pathlib.Path, links: Mapping[str, Link]) -> dict[str, Link]:
    """Links, and those that a tuning file, if it is there, has besides.

    Raises:
      ValueError: if the file is no tuning file.

    Example:
      >>> list(merged(pathlib.Path("/nowhere"), {"gloo": Link(alpha=1e-3, beta=1e-9)}))
      ['gloo']
    """
    kept = choose.load_tuning(path) if path.exists() else {}
    return {n: link for n, link in kept.items() if link != choose.LINKS[n]} | dict(links)


def to_dict(levels: Sequence[Level], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {
        "levels": [dataclasses.asdict(one) | {"crossings": one.crossings} for one in levels],
        "auto": [dataclasses.asdict(verdict) | {"near": verdict.near} for verdict in verdicts],
    }
