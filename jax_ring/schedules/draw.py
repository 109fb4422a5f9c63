"""Schedules as pictures and as text, and predicted times as a plot.

matplotlib (`pip install 'jax-ring[plot]'`) is imported by what needs it, not by this module.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jax_ring.schedules.schedule import Kind, Op, Schedule, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIMIT = 64  # Ranks, and rounds, at most: what an eye can follow.
SUFFIXES = (".svg", ".png", ".pdf")


def _check_size(schedule: Schedule) -> None:
    for name, value in (("ranks", schedule.ranks), ("steps", schedule.rounds)):
        if value > LIMIT:
            raise ValueError(f"{schedule.name}: cannot draw {value} {name}, at most {LIMIT}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _title(schedule: Schedule) -> str:
    return f"{schedule.name}: {schedule.kind.value} of {_count(schedule.ranks, 'rank')}"


def _facts(schedule: Schedule) -> list[str]:
    facts = [_count(schedule.chunks, "chunk"), _count(schedule.rounds, "step")]
    if schedule.channels > 1:
        facts.append(_count(schedule.channels, "channel"))
    sent = schedule.sent_chunks()
    most = "at most " if sent.min() < sent.max() else ""
    return [*facts, f"each rank sends {most}{sent.max() / schedule.chunks:.3g} times the buffer"]


# Text.


def draw_text(schedule: Schedule, *, width: int | None = None) -> str:
    """A schedule as a table: for each step a line of what ranks send, and one of what they get.

    Steps of several channels in one round have the same number.

    Args:
      schedule: what to show.
      width: characters per line, at most; the ranks that do not fit follow in further tables. By
        default all are in one.

    Returns:
      Lines, without a newline at the end.

    Raises:
      ValueError: if there are more than 64 ranks or 64 steps.

    Example:
      >>> from jax_ring.schedules import recursive_doubling
      >>> print(draw_text(recursive_doubling(4)))
      recursive_doubling: all_reduce of 4 ranks
      1 chunk, 2 steps, each rank sends 2 times the buffer
      <BLANKLINE>
      step          rank 0  rank 1  rank 2  rank 3
         0  send    0 → 1   0 → 0   0 → 3   0 → 2
            reduce  0 ← 1   0 ← 0   0 ← 3   0 ← 2
         1  send    0 → 2   0 → 3   0 → 0   0 → 1
            reduce  0 ← 2   0 ← 3   0 ← 0   0 ← 1
      <BLANKLINE>
      2 → 1: sends chunk 2 to rank 1.  2 ← 1: gets chunk 2 from rank 1.
    """
    _check_size(schedule)
    left, right = _text_columns(schedule)
    lines = [_title(schedule), ", ".join(_facts(schedule))]
    for part in _fitting(left, right, width) if schedule.rounds else ():
        lines.append("")
        lines += ["  ".join(row).rstrip() for row in zip(*left, *part, strict=True)]
    if schedule.rounds:
        lines += ["", "2 → 1: sends chunk 2 to rank 1.  2 ← 1: gets chunk 2 from rank 1."]
    return "\n".join(lines)


def _text_columns(schedule: Schedule) -> tuple[list[list[str]], list[list[str]]]:
    """The columns that name a line, and those of the ranks, all their cells equally wide."""
    labels = [["step", "channel", ""]]
    cells = [[f"rank {rank}" for rank in range(schedule.ranks)]]
    for number, steps in enumerate(schedule.by_round()):
        shown = [step for _, step in steps if step.perm]
        for i, step in enumerate(shown):
            sent, received = _sent_and_received(schedule.ranks, step)
            labels += [[f"{number:4}" if i == 0 else "", f"{step.channel:7}", "send"]]
            labels += [["", "", step.op.value]]
            cells += [sent, received]
    columns = [_padded(column) for column in zip(*labels, strict=True)]
    if schedule.channels < 2:
        del columns[1]
    return columns, [_padded(column) for column in zip(*cells, strict=True)]


def _sent_and_received(ranks: int, step: Step) -> tuple[list[str], list[str]]:
    sent, received = ["·"] * ranks, ["·"] * ranks
    for source, destination in step.perm:
        sent[source] = f"{_ranges(step.send[source])} → {destination}"
        received[destination] = f"{_ranges(step.recv[destination])} ← {source}"
    return sent, received


def _ranges(chunks: Iterable[int]) -> str:
    """Chunk indices, in short.

    Example:
      >>> _ranges([4, 2, 3, 0])
      '0,2-4'
    """
    spans: list[list[int]] = []
    for chunk in sorted(int(chunk) for chunk in chunks):
        if spans and chunk == spans[-1][1] + 1:
            spans[-1][1] = chunk
        else:
            spans.append([chunk, chunk])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) for cell in column]


def _fitting(
    left: list[list[str]], right: list[list[str]], width: int | None
) -> Iterator[list[list[str]]]:
    """The columns of the ranks, in parts that fit beside those that name a line."""
    part: list[list[str]] = []
    room = free = math.inf if width is None else width - sum(len(c[0]) + 2 for c in left) + 2
    for column in right:
        need = len(column[0]) + 2
        if part and need > free:
            yield part
            part, free = [], room
        part.append(column)
        free -= need
    yield part


# Pictures.

# Okabe and Ito's colors, which the color-blind can tell apart; without their yellow, which does not
# show on white, and with two darker ones.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#4D4D4D", "#882255")
_INK, _FAINT = "#1f2328", "#6e7781"
_DASHES = {Op.REDUCE: "solid", Op.COPY: (0.0, (3.2, 1.8))}
_POINTS = 72.0  # Per inch.
Point = tuple[float, float]


def draw(schedule: Schedule, path: str | pathlib.Path) -> None:
    """Draws a schedule into a file: see `figure`.

    The same schedule gives the same file, so that pictures under version control change only when
    what they show does.

    Args:
      schedule: what to draw.
      path: where to; its suffix says how: .svg, .png or .pdf.

    Raises:
      ValueError: if there are more than 64 ranks or 64 steps, or the suffix is another one.
      ImportError: if matplotlib is not installed.
    """
    _check_suffix(path)
    _save(figure(schedule), path)


def figure(schedule: Schedule) -> Figure:
    """Draws a schedule: a row for each rank, time from left to right, an arrow for each message.

    The boxes of a rank are its chunks; how far one is filled shows how many of the contributions it
    holds. An arrow goes from the chunk that is sent to the one that it is reduced into (a solid
    line) or copied over (a dashed one). Those of a message have the id `step3-r0-r1` in an SVG:
    index in `schedule.steps`, source, destination.

    Nothing is verified: a picture of a schedule that is wrong may show where.

    Args:
      schedule: what to draw.

    Returns:
      The figure, to be shown or saved.

    Raises:
      ValueError: if there are more than 64 ranks or 64 steps.
      ImportError: if matplotlib is not installed.
    """
    _check_size(schedule)
    _check_matplotlib()
    from matplotlib.figure import Figure

    layout = _Layout.of(schedule)
    result = Figure(figsize=(layout.width, layout.height), facecolor="white")
    axes = result.add_axes((0, 0, 1, 1), xlim=(0, layout.width), ylim=(layout.height, 0))
    axes.set_axis_off()
    picture = _Picture(axes, schedule, layout, _chunk_colors(schedule.chunks))
    picture.draw_words()
    picture.draw_legend()
    for time, shares in enumerate(_shares(schedule)):
        picture.draw_chunks(time, shares)
    for time, steps in enumerate(schedule.by_round()):
        for index, step in steps:
            for source, destination in step.perm:
                gid = f"step{index}-r{source}-r{destination}"
                picture.draw_message(time, step, source, destination, gid)
    return result


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where things are, in inches from the upper left corner."""

    ranks: int
    chunks: int
    rounds: int
    cell: tuple[float, float]  # Width and height of a chunk's box.
    pitch: tuple[float, float]  # From one round to the next, and from one rank to the next.

    left, top, bottom = 0.85, 1.12, 0.62

    @classmethod
    def of(cls, schedule: Schedule) -> _Layout:
        """Boxes that are large if they are few, and longer arrows between ranks further apart."""
        stack = min(0.17 * schedule.chunks, 1.4, 36 / schedule.ranks)
        down = stack + min(0.2, 0.3 * stack + 0.1)
        across = 0.32 + min(0.7 + 0.06 * down * schedule.ranks, 2.4)
        return cls(
            schedule.ranks,
            schedule.chunks,
            schedule.rounds,
            (0.32, stack / schedule.chunks),
            (across, down),
        )

    @property
    def width(self) -> float:
        """Of the figure: there is room for the title whatever the schedule is."""
        return max(2 * self.left + self.rounds * self.pitch[0] + self.cell[0], 6.6)

    @property
    def end(self) -> float:
        """The lower end of the last rank's boxes."""
        return self.top + (self.ranks - 1) * self.pitch[1] + self.chunks * self.cell[1]

    @property
    def height(self) -> float:
        """Of the figure."""
        return self.end + self.bottom

    def x(self, time: int) -> float:
        """The left edge of the boxes before round `time`."""
        return self.left + time * self.pitch[0]

    def y(self, rank: int, chunk: float = 0) -> float:
        """The upper edge of a chunk's box."""
        return self.top + rank * self.pitch[1] + chunk * self.cell[1]


def _chunk_colors(chunks: int) -> list[str]:
    if chunks <= len(_COLORS):
        return list(_COLORS[:chunks])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.87 * i / (chunks - 1))) for i in range(chunks)]


def _tint(color: str, strength: float) -> tuple[float, float, float]:
    """A color mixed with white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(color))
    return red, green, blue


def _shares(schedule: Schedule) -> Iterator[npt.NDArray[np.float64]]:
    """What share of its contributions each chunk holds before each round and in the end."""
    ranks, chunks = schedule.ranks, schedule.chunks
    held = np.repeat(np.eye(ranks, dtype=bool)[:, None], chunks, axis=1)  # [rank, chunk, whose]
    gathers = schedule.kind is Kind.ALL_GATHER
    if gathers:
        held &= np.arange(chunks)[:, None] * ranks // chunks == np.arange(ranks)
    for steps in [[], *schedule.by_round()]:
        before = held.copy()
        for _, step in steps:
            for source, destination in step.perm:
                arrived, at = before[source, step.send[source]], step.recv[destination]
                held[destination, at] = arrived | (step.op is Op.REDUCE) & held[destination, at]
        yield np.asarray(held.any(2) if gathers else held.mean(2), np.float64)


@dataclasses.dataclass(frozen=True)
class _Picture:
    """What the parts of a figure are drawn with."""

    axes: Axes
    schedule: Schedule
    layout: _Layout
    colors: Sequence[str]  # Of the chunks.

    def write(self, x: float, y: float, text: str, size: float, color: str, **style: Any) -> None:
        """Puts a text beside a point."""
        style = {"va": "center_baseline", **style}
        self.axes.text(x, y, text, size=size, color=color, **style)

    def draw_words(self) -> None:
        """The title, and the names of ranks and steps."""
        layout, schedule = self.layout, self.schedule
        self.write(0.25, 0.3, _title(schedule), 12.5, _INK, weight="bold")
        self.write(0.25, 0.55, ", ".join(_facts(schedule)), 9, _FAINT)
        for rank in range(schedule.ranks):
            y = layout.y(rank, schedule.chunks / 2)
            self.write(layout.x(0) - 0.1, y, f"rank {rank}", 9, _INK, ha="right")
            if schedule.rounds:
                x = layout.x(schedule.rounds) + layout.cell[0] + 0.1
                self.write(x, y, f"rank {rank}", 9, _INK)
        for time in range(schedule.rounds):
            x = (layout.x(time) + layout.cell[0] + layout.x(time + 1)) / 2
            self.write(x, layout.top - 0.22, f"step {time}", 9, _INK, ha="center")

    def draw_legend(self) -> None:
        """What lines and boxes mean."""
        y = self.layout.height - 0.25
        arrows = ((0.25, Op.REDUCE, "what arrives is reduced"), (2.4, Op.COPY, "is copied"))
        for x, op, text in arrows:
            self.draw_arrows([((x, y), (x + 0.42, y))], [_FAINT], op, 0.05)
            self.write(x + 0.5, y, text, 8.5, _FAINT)
        boxes = [((3.7 + 0.26 * i, y - 0.06), _FAINT, i / 2) for i in range(3)]
        self.draw_boxes(boxes, (0.22, 0.12))
        self.write(4.53, y, "holds no, half, all contributions", 8.5, _FAINT)

    def draw_chunks(self, time: int, shares: npt.NDArray[np.float64]) -> None:
        """The boxes of all ranks before a round, with their numbers if these can be read."""
        (width, height), x = self.layout.cell, self.layout.x(time)
        boxes = []
        for (rank, chunk), share in np.ndenumerate(shares):
            y, color = self.layout.y(rank, chunk), self.colors[chunk]
            boxes.append(((x, y + 0.06 * height), color, float(share)))
            if height > 0.1:
                done = bool(share == 1)
                ink = "white" if done and sum(_tint(color, 1.0)) < 1.75 else _INK
                weight = "bold" if done else "normal"
                middle = x + width / 2, y + height / 2
                self.write(*middle, str(chunk), 7.5, ink, weight=weight, ha="center")
        self.draw_boxes(boxes, (width, 0.88 * height))

    def draw_boxes(
        self, boxes: Iterable[tuple[Point, str, float]], size: tuple[float, float]
    ) -> None:
        """Boxes, by corner, color, and how much is filled; what is complete stands out."""
        from matplotlib.collections import PolyCollection

        outlines, faces = [], []
        for (x, y), color, share in boxes:
            for part, strength in ((1.0, 0.12), (share, 1.0 if share == 1 else 0.5)):
                if part:
                    right, bottom = x + part * size[0], y + size[1]
                    outlines.append([(x, y), (right, y), (right, bottom), (x, bottom)])
                    faces.append(_tint(color, strength))
        drawn = PolyCollection(outlines, facecolors=faces, linewidths=0, clip_on=False)
        self.axes.add_collection(drawn, autolim=False)

    def draw_message(self, time: int, step: Step, source: int, destination: int, gid: str) -> None:
        """An arrow for each chunk of a message."""
        layout = self.layout
        # Channels leave from, and arrive at, different heights of a box.
        within = (step.channel + 1) / (self.schedule.channels + 1)
        start, end = layout.x(time) + layout.cell[0] + 0.03, layout.x(time + 1) - 0.03
        sent, received = step.send[source].tolist(), step.recv[destination].tolist()
        lines = [
            ((start, layout.y(source, a + within)), (end, layout.y(destination, b + within)))
            for a, b in zip(sent, received, strict=True)
        ]
        head = min(0.05, 0.3 * layout.cell[1])
        self.draw_arrows(lines, [self.colors[chunk] for chunk in sent], step.op, head, gid)

    def draw_arrows(
        self,
        lines: Iterable[tuple[Point, Point]],
        colors: Iterable[str],
        op: Op,
        head: float,
        gid: str | None = None,
    ) -> None:
        """Curves from left to right, with a white edge where they cross others, and a head."""
        from matplotlib.collections import PathCollection
        from matplotlib.path import Path
        from matplotlib.patheffects import withStroke

        paths, edges, faces = [], [], []
        for ((x, y), (end, to)), color in zip(lines, colors, strict=True):
            neck = end - 2 * head
            bend = (x + neck) / 2
            curve = [(x, y), (bend, y), (bend, to), (neck, to)]
            paths.append(Path(curve, [Path.MOVETO, *[Path.CURVE4] * 3]))
            paths.append(Path([(neck, to - head), (end, to), (neck, to + head)]))
            edges += [color, "none"]
            faces += ["none", color]
        width = 0.45 * head * _POINTS
        drawn = PathCollection(
            paths,
            edgecolors=edges,
            facecolors=faces,
            linewidths=[width, 0],
            linestyles=[_DASHES[op], "solid"],
            path_effects=[withStroke(linewidth=width + 1.2, foreground="white")],
            clip_on=False,
            gid=gid,
        )
        self.axes.add_collection(drawn, autolim=False)


# Times.


def plot_times(
    curves: Mapping[str, Sequence[float]],
    sizes: Sequence[int],
    path: str | pathlib.Path,
    *,
    title: str = "Predicted time",
) -> None:
    """Plots the time of algorithms against size, and marks where another becomes the fastest.

    Args:
      curves: for each algorithm its seconds for each size.
      sizes: bytes, increasing.
      path: where to draw; its suffix says how: .svg, .png or .pdf.
      title: what is above the plot.

    Raises:
      ValueError: if there is no curve, one is not as long as sizes, sizes do not increase,
        something is not positive, or the suffix is another one.
      ImportError: if matplotlib is not installed.

    Example:
      >>> import tempfile
      >>> from jax_ring.schedules import cost, recursive_doubling, ring
      >>> sizes = [2**i for i in range(10, 31)]
      >>> curves = {
      ...     s.name: [cost(s, size, 5e-6, 1 / 400e9) for size in sizes]
      ...     for s in (ring(8), recursive_doubling(8))
      ... }
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     plot_times(curves, sizes, f"{folder}/times.svg")
    """
    result, axes = _plot(curves, sizes, path, title, "time", "s", "log")
    _draw_envelope(axes, curves, sizes)
    _save(result, path)


def plot_bandwidths(
    curves: Mapping[str, Sequence[float]],
    sizes: Sequence[int],
    path: str | pathlib.Path,
    *,
    title: str = "Bus bandwidth",
) -> None:
    """Plots bandwidths against size, as measured.

    Args:
      curves: for each algorithm its bytes per second for each size.
      sizes: as `plot_times`.
      path: as `plot_times`.
      title: what is above the plot.

    Raises:
      ValueError: as `plot_times`.
      ImportError: if matplotlib is not installed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     plot_bandwidths({"ring": [1e9, 2e9]}, [4096, 8192], f"{folder}/bandwidth.svg")
    """
    result, axes = _plot(curves, sizes, path, title, "bus bandwidth", "B/s", "linear")
    axes.set_ylim(0)
    axes.set_position((0.11, 0.12, 0.64, 0.79))  # Bandwidths are long words.
    _save(result, path)


def _plot(
    curves: Mapping[str, Sequence[float]],
    sizes: Sequence[int],
    path: str | pathlib.Path,
    title: str,
    what: str,
    unit: str,
    scale: str,
) -> tuple[Figure, Axes]:
    """Curves over sizes, their axes and their legend."""
    check_plot(path)
    _check_curves(curves, sizes)
    from matplotlib.figure import Figure

    result = Figure(figsize=(9.5, 5), facecolor="white")
    axes = result.add_axes((0.09, 0.12, 0.66, 0.79), xscale="log", yscale=scale)
    axes.set_xlim(sizes[0], sizes[-1])
    _draw_curves(axes, curves, sizes)
    axes.set_xlabel("size of the buffer", color=_INK)
    axes.set_ylabel(what, color=_INK)
    axes.xaxis.set_major_formatter(lambda value, _: _si(value, "B"))
    axes.yaxis.set_major_formatter(lambda value, _: _si(value, unit))
    axes.minorticks_off()
    axes.grid(color="#d0d7de", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, size=12.5, weight="bold", color=_INK, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, handlelength=3)
    return result, axes


def check_plot(path: str | pathlib.Path) -> None:
    """Raises what the plots raise if they could not draw into a path, before there is anything.

    Args:
      path: as `plot_times`.

    Raises:
      ValueError: if the suffix is none that can be drawn.
      ImportError: if matplotlib is not installed.

    Example:
      >>> check_plot("times.svg")
    """
    _check_suffix(path)
    _check_matplotlib()


def _check_curves(curves: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> None:
    if not curves:
        raise ValueError("there is no curve to plot")
    if len(sizes) < 2 or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"sizes must increase, got {list(sizes)}")
    for name, values in [("sizes", sizes), *curves.items()]:
        if len(values) != len(sizes):
            raise ValueError(f"{name} has {len(values)} values for {len(sizes)} sizes")
        if min(values) <= 0:
            raise ValueError(f"{name} must be positive, got {min(values)}")


def fastest(curves: Mapping[str, Sequence[float]]) -> list[str]:
    """The fastest algorithm at each size; of equally fast ones the one before, or the first.

    Example:
      >>> fastest({"a": [1.0, 2.0, 3.0], "b": [2.0, 2.0, 2.0]})
      ['a', 'a', 'b']
    """
    best: list[str] = []
    for times in zip(*curves.values(), strict=True):
        by_name = dict(zip(curves, times, strict=True))
        limit = min(times) * (1 + 1e-9)
        candidates = [*best[-1:], *curves]
        best.append(next(name for name in candidates if by_name[name] <= limit))
    return best


def crossings(
    curves: Mapping[str, Sequence[float]], sizes: Sequence[float]
) -> list[tuple[float, str, str]]:
    """Where another algorithm becomes the fastest: (size, the one before, the one after).

    Between the sizes given the curves are taken as straight in a log-log plot.

    Example:
      >>> crossings({"a": [1.0, 100.0], "b": [10.0, 10.0]}, [1, 100])
      [(10.0, 'a', 'b')]
    """
    best = fastest(curves)
    found = []
    for i in range(len(sizes) - 1):
        before, after = best[i], best[i + 1]
        if before != after:
            gaps = [math.log(curves[after][j] / curves[before][j]) for j in (i, i + 1)]
            part = gaps[0] / (gaps[0] - gaps[1])
            found.append((sizes[i] * (sizes[i + 1] / sizes[i]) ** part, before, after))
    return found


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> None:
    """All curves, each broken in its own way so that equal ones show."""
    dashes = ("solid", (0, (5, 3)), (0, (2, 4)), (0, (7, 2, 2, 2)))
    for i, (name, times) in enumerate(curves.items()):
        color = _COLORS[i % len(_COLORS)]
        axes.plot(
            sizes, times, color=color, linestyle=dashes[i % len(dashes)], linewidth=2, label=name
        )


def _draw_envelope(axes: Axes, curves: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> None:
    """A band under whatever is the fastest, and a mark where that changes."""
    colors = dict(zip(curves, itertools.cycle(_COLORS), strict=False))
    found = crossings(curves, sizes)
    x = np.array([*sizes, *(size for size, _, _ in found)])
    start, name = float(sizes[0]), fastest(curves)[0]
    for end, _, after in [*found, (sizes[-1], name, name)]:
        part = np.sort(x[(start <= x) & (x <= end)])
        times = np.exp(np.interp(np.log(part), np.log(sizes), np.log(curves[name])))
        axes.plot(part, times, color=_tint(colors[name], 0.35), linewidth=8, zorder=1)
        if end < sizes[-1]:
            _mark(axes, (end, times[-1]), f"from {_si(end, 'B')}:\n{after}")
        start, name = end, after


def _mark(axes: Axes, at: Point, text: str) -> None:
    axes.plot(*at, "o", color=_INK, markersize=6, markeredgecolor="white", zorder=5)
    axes.annotate(text, at, (8, -8), textcoords="offset points", va="top", size=9, color=_INK)


def _si(value: float, unit: str) -> str:
    """A value with a prefix.

    Example:
      >>> _si(4.8e6, "B"), _si(1e-5, "s")
      ('4.8 MB', '10 µs')
    """
    if not value:
        return f"0 {unit}"
    value = float(f"{value:.3g}")
    exponent = min(max(math.floor(math.log10(value) / 3 + 1e-9), -4), 4)
    prefix = "pnµm kMGT"[exponent + 4].strip()
    return f"{value / 1000.0**exponent:.3g} {prefix}{unit}"


# Files.


def _check_suffix(path: str | pathlib.Path) -> None:
    suffix = pathlib.Path(path).suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"cannot draw into {str(path)!r}: use one of {', '.join(SUFFIXES)}")


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'jax-ring[plot]'") from error


def _save(figure: Figure, path: str | pathlib.Path) -> None:
    """Writes a figure without date, random ids or versions, and with text as text."""
    import matplotlib

    settings: dict[Any, Any] = {
        "svg.hashsalt": "jax-ring",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
    }
    suffix = pathlib.Path(path).suffix
    metadata: dict[str, dict[str, str | None]] = {
        ".svg": {"Creator": "jax-ring", "Date": None},
        ".pdf": {"Creator": "jax-ring", "Producer": None, "CreationDate": None},
        ".png": {"Software": "jax-ring"},
    }
    longest = max(figure.get_size_inches())
    with matplotlib.rc_context(settings):
        figure.savefig(path, dpi=min(150, 16000 / longest), metadata=metadata[suffix])
