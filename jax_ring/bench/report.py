"""What was measured, as nccl-tests reports it: a table, JSON, CSV and a plot."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ring.bench.measure import Case, Measurement, Timing, busbw_factor
from jax_ring.schedules import Kind

SCHEMA, VERSION = "jax_ring.bench", 1
HALVES = ("out_of_place", "in_place")
GIGA = 1e9


@dataclasses.dataclass
class Report:
    """The measurements of one run.

    Attributes:
      kind: the collective.
      op: how it reduces.
      dtype: the elements.
      ranks: how many took part.
      cases: what was compared; the first is what the others are divided by.
      about: what it was measured with, see `surroundings`.
      measurements: what was measured, in order; grows while it is.

    Example:
      >>> case = Case("ring", "ring")
      >>> report = Report(Kind.ALL_REDUCE, "sum", "float32", 8, [case], {})
      >>> timing = Timing((1e-3, 1e-3), wrong=0)
      >>> report.measurements.append(Measurement(case, "ring", 4_000_000, 1_000_000, timing, None))
      >>> report.average_busbw("ring")  # 4 MB in 1 ms, times 2 (8 - 1) / 8.
      7.0
      >>> report.wrong
      0
    """

    kind: Kind
    op: str
    dtype: str
    ranks: int
    cases: Sequence[Case]
    about: Mapping[str, Any]
    measurements: list[Measurement] = dataclasses.field(default_factory=list)

    def algbw(self, measured: Measurement, timing: Timing) -> float:
        """Bytes of the larger buffer by the median time, in GB/s."""
        return measured.nbytes / timing.median / GIGA

    def busbw(self, measured: Measurement, timing: Timing) -> float:
        """What each rank's link would carry in the best algorithm, in GB/s."""
        return self.algbw(measured, timing) * busbw_factor(self.kind, self.ranks)

    def average_busbw(self, case: str) -> float:
        """The mean over sizes and halves, in GB/s."""
        found = [
            self.busbw(measured, timing)
            for measured in self.measurements
            if measured.case.name == case
            for timing in measured.timings
        ]
        return statistics.fmean(found) if found else 0.0

    @property
    def wrong(self) -> int | None:
        """Wrong elements of all measurements; None if nothing was checked."""
        timings = [timing for m in self.measurements for timing in m.timings]
        checked = [timing.wrong for timing in timings if timing.wrong is not None]
        return sum(checked) if checked else None

    def ratio(self, measured: Measurement, half: str = "out_of_place") -> float | None:
        """Time by that of the first case: the median over the rounds of the ratio within a round.

        Returns:
          1 for the first case itself; None if it was not measured at this size and half.
        """
        own: Timing | None = getattr(measured, half)
        for other in self.measurements:
            first = other.case == self.cases[0] and other.nbytes == measured.nbytes
            base: Timing | None = getattr(other, half)
            if first and own is not None and base is not None:
                pairs = zip(own.seconds, base.seconds, strict=True)
                return statistics.median(a / b for a, b in pairs)
        return None

    def _half(self, measured: Measurement, half: str) -> dict[str, Any] | None:
        timing: Timing | None = getattr(measured, half)
        if timing is None:
            return None
        return {
            "time_us": timing.median * 1e6,
            "p10_us": timing.percentile(10) * 1e6,
            "p90_us": timing.percentile(90) * 1e6,
            "min_us": min(timing.seconds) * 1e6,
            "algbw_GBps": self.algbw(measured, timing),
            "busbw_GBps": self.busbw(measured, timing),
            "ratio": self.ratio(measured, half),
            "wrong": timing.wrong,
        }

    def row(self, measured: Measurement) -> dict[str, Any]:
        """A measurement, ready for JSON; a half that there is not is None."""
        return {
            "size": measured.nbytes,
            "count": measured.count,
            "type": self.dtype,
            "redop": "none" if self.kind is Kind.ALL_GATHER else self.op,
            "case": measured.case.name,
            "algorithm": measured.chosen,
            "wire": measured.case.wire,
            **{half: self._half(measured, half) for half in HALVES},
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, the seconds of every call too."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "about": dict(self.about),
            "collective": self.kind.value,
            "ranks": self.ranks,
            "results": [
                {
                    **self.row(m),
                    "seconds": {
                        half: list(getattr(m, half).seconds)
                        for half in HALVES
                        if getattr(m, half) is not None
                    },
                }
                for m in self.measurements
            ],
            "average_busbw_GBps": {c.name: self.average_busbw(c.name) for c in self.cases},
            "wrong": self.wrong,
        }

    def write_json(self, path: pathlib.Path) -> None:
        """Writes `to_dict` into a file."""
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def write_csv(self, path: pathlib.Path) -> None:
        """Writes a line for each measurement, its halves side by side."""
        with path.open("w", encoding="utf-8", newline="") as file:
            writer: Any = None
            for measured in self.measurements:
                flat = _flat(self.row(measured))
                if writer is None:
                    writer = csv.DictWriter(file, flat)
                    writer.writeheader()
                writer.writerow(flat)

    def plot(self, path: pathlib.Path) -> None:
        """Plots bus bandwidth against size, a line for each case and half.

        Raises:
          ValueError: if the suffix is not one that can be drawn, or there is only one size.
          ImportError: without matplotlib.
        """
        from jax_ring.schedules.draw import plot_bandwidths

        sizes = sorted({m.nbytes for m in self.measurements})
        curves: dict[str, list[float]] = {}
        for m in self.measurements:
            for half in HALVES:
                if (timing := getattr(m, half)) is not None:
                    label = m.case.name + (", in place" if half == "in_place" else "")
                    curves.setdefault(label, []).append(self.busbw(m, timing) * GIGA)
        title = f"{self.kind.value}, {self.ranks} ranks, {self.dtype}"
        plot_bandwidths(curves, sizes, path, title=title)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Halves as columns, those of one that is not there empty."""
    fields = list(row[HALVES[0]])
    flat = {name: value for name, value in row.items() if name not in HALVES}
    for half in HALVES:
        for field in fields:
            flat[f"{half}_{field}"] = None if row[half] is None else row[half][field]
    return flat


# --- the columns of the table ---------------------------------------------------------------------

# (name, unit, width): what comes before the halves, and what each half has.
LEADING = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 9),
    ("redop", "", 6),
    ("algorithm", "", 20),
)
OF_A_HALF = (
    ("time", "(us)", 9),
    ("spread", "(%)", 7),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
)


def cells(report: Report, measured: Measurement) -> list[str]:
    """The cells of a measurement: those of `LEADING`, and of `OF_A_HALF` twice.

    The spread is what lies between the 10th and the 90th percentile, by the median.
    """
    row = report.row(measured)
    name = row["case"]
    if measured.case.algorithm == "auto":
        name = f"{name}: {measured.chosen}"
    leading = [str(row["size"]), str(row["count"]), row["type"], row["redop"], name]
    return leading + [cell for half in HALVES for cell in _cells_of_half(row[half])]


def _cells_of_half(half: Mapping[str, Any] | None) -> list[str]:
    if half is None:
        return ["N/A"] * len(OF_A_HALF)
    time = half["time_us"]
    spread = (half["p90_us"] - half["p10_us"]) / time
    return [
        f"{time:.1f}" if time < 1e5 else f"{time:.0f}",
        f"{spread:.0%}".rstrip("%"),
        f"{half['algbw_GBps']:.3f}",
        f"{half['busbw_GBps']:.3f}",
        "N/A" if half["wrong"] is None else str(half["wrong"]),
    ]


def header() -> list[str]:
    """The lines above those of `line`, as nccl-tests has them."""
    columns = (*LEADING, *OF_A_HALF, *OF_A_HALF)
    lead = sum(width + 1 for _, _, width in LEADING)
    half = sum(width + 1 for _, _, width in OF_A_HALF)
    return [
        "#" + " " * (lead - 1) + "out-of-place".center(half) + "in-place".center(half).rstrip(),
        _line([name for name, _, _ in columns], "#"),
        _line([unit for _, unit, _ in columns], "#").rstrip(),
    ]


def line(report: Report, measured: Measurement) -> str:
    """A measurement as a line of text."""
    return _line(cells(report, measured), " ")


def _line(texts: Sequence[str], first: str) -> str:
    widths = [width for _, _, width in (*LEADING, *OF_A_HALF, *OF_A_HALF)]
    text = " ".join(text.rjust(width) for text, width in zip(texts, widths, strict=True))
    return first + text


def summary(report: Report) -> list[str]:
    """What comes last: ratios, wrong elements, average bus bandwidth."""
    lines = []
    if len(report.cases) > 1:
        base = report.cases[0].name
        for case in report.cases[1:]:
            ratios = [
                f"{m.nbytes} B {ratio:.2f}"
                for m in report.measurements
                if m.case == case and (ratio := report.ratio(m)) is not None
            ]
            lines.append(f"# time / {base}, out-of-place, {case.name}: {', '.join(ratios)}")
    if report.wrong is None:
        lines.append("# Out of bounds values : N/A, nothing was checked")
    else:
        state = "FAILED" if report.wrong else "OK"
        lines.append(f"# Out of bounds values : {report.wrong} {state}")
    for case in report.cases:
        name = f" ({case.name})" if len(report.cases) > 1 else ""
        lines.append(f"# Avg bus bandwidth{name} : {report.average_busbw(case.name):.4g}")
    return lines
