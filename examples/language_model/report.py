"""The plot, the table and the file of numbers that a run leaves behind."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from jax_ring.explanation import Explanation
from language_model.hlo import Collectives, find_collectives

INK, TRAIN, VALIDATION, BASELINE = "#333333", "#4c78a8", "#e45756", "#8a8a8a"


@dataclasses.dataclass
class History:
    """The losses of a run, in bits per byte.

    Attributes:
      train: one for each step.
      validation: (step, loss) pairs.
    """

    train: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Timings:
    """Seconds of the train steps and, every so many steps, of the reduction alone.

    Attributes:
      step: whole train steps.
      reduction: the gradients' reduction by itself, on arrays of the same sizes.
      reduction_bytes: the size of these arrays on each rank.
    """

    step: list[float] = dataclasses.field(default_factory=list)
    reduction: list[float] = dataclasses.field(default_factory=list)
    reduction_bytes: int = 0

    def share(self) -> float:
        """The reduction's share of a step, as far as it can be told (0 before any timing)."""
        if not self.step or not self.reduction:
            return 0.0
        return statistics.median(self.reduction) / statistics.median(self.step)


@dataclasses.dataclass(frozen=True)
class Communication:
    """What one train step sends: by the schedule, and in the compiled program.

    Attributes:
      collective: "ring" or "psum".
      ranks: number of ranks.
      reductions: how many there are: one for each bucket.
      gathers: how many all-gathers of updates or parameters there are, with `--zero`.
      buffer_bytes: size of all that is reduced in a step, loops and all: loss and gradients.
      schedule_permutes: steps of all schedules, those in a loop once; 0 for psum, whose algorithm
        is XLA's choice.
      schedule_bytes: bytes that each rank sends by the schedules, those in a loop once.
      step_bytes: bytes that each rank sends in a train step, loops and all.
      compiled_permutes: collective-permute instructions in the compiled train step.
      compiled_bytes: bytes that these send from each rank.
      compiled_all_reduces: all-reduce instructions in the compiled train step.
      reduction_seconds: median time of the reduction alone, or None if it was not timed.
      reduction_bytes: what that reduces on each rank.
      share: that time over the median time of a train step.
    """

    collective: str
    ranks: int
    reductions: int
    gathers: int
    buffer_bytes: int
    schedule_permutes: int
    schedule_bytes: int
    step_bytes: int
    compiled_permutes: int
    compiled_bytes: int
    compiled_all_reduces: int
    reduction_seconds: float | None
    reduction_bytes: int
    share: float

    @property
    def agrees(self) -> bool:
        """Whether the compiler kept the schedule, and added no reduction of its own."""
        by_ring = self.collective == "ring" and self.ranks > 1
        return (
            self.schedule_permutes == self.compiled_permutes
            and self.schedule_bytes == self.compiled_bytes
            and (self.compiled_all_reduces == 0 or not by_ring)
        )


@dataclasses.dataclass(frozen=True)
class Held:
    """What one rank holds from step to step, measured on its device.

    Attributes:
      params_bytes: of the parameters.
      optimizer_bytes: of the optimizer's state.
    """

    params_bytes: int
    optimizer_bytes: int

    @classmethod
    def by_a_rank(cls, params: Any, optimizer: Any) -> Held:
        """What the first device holds of two trees."""

        def held(tree: Any) -> int:
            first = (leaf.addressable_shards[0] for leaf in jax.tree.leaves(tree))
            return sum(shard.data.nbytes for shard in first)

        return cls(held(params), held(optimizer))


def communication(
    collective: str, ranks: int, planned: Explanation, hlo: str, timings: Timings
) -> Communication:
    """Compares what the schedules promise with what the compiled train step contains."""
    found = find_collectives(hlo)
    compiled = found.get("collective-permute", Collectives())
    reduced = [c for c in planned.collectives if c.name != "all_gather"]
    return Communication(
        collective=collective,
        ranks=ranks,
        reductions=len(reduced),
        gathers=len(planned.collectives) - len(reduced),
        buffer_bytes=sum(c.nbytes * (c.times or 1) for c in reduced),
        # A loop's body is in the program once, however often it runs.
        schedule_permutes=sum(c.steps or 0 for c in planned.collectives),
        schedule_bytes=sum(c.bytes_sent or 0 for c in planned.collectives),
        step_bytes=planned.totals.bytes_sent,
        compiled_permutes=compiled.count,
        compiled_bytes=compiled.nbytes,
        compiled_all_reduces=found.get("all-reduce", Collectives()).count,
        reduction_seconds=statistics.median(timings.reduction) if timings.reduction else None,
        reduction_bytes=timings.reduction_bytes,
        share=timings.share(),
    )


def communication_table(sent: Communication, held: Held) -> Table:
    """The communication of one train step as a table, and what a rank holds."""
    ring = sent.collective == "ring"
    table = Table(title="Communication of one train step", title_justify="left")
    table.add_column("")
    table.add_column("by the schedule", justify="right")
    table.add_column("in the compiled step", justify="right")
    table.add_row("algorithm", "ring" if ring else "XLA's choice", sent.collective)
    table.add_row("ranks", str(sent.ranks), str(sent.ranks))
    table.add_row("reductions (buckets)", str(sent.reductions), "")
    if sent.gathers:
        table.add_row("all-gathers (buckets)", str(sent.gathers), "")
    table.add_row(
        "collective-permutes",
        str(sent.schedule_permutes) if ring else "-",
        str(sent.compiled_permutes),
    )
    table.add_row(
        "bytes sent by each rank",
        f"{sent.schedule_bytes:,}" if ring else "-",
        f"{sent.compiled_bytes:,}" if ring else "-",
    )
    table.add_row("all-reduces", "0" if ring else "-", str(sent.compiled_all_reduces))
    if sent.step_bytes != sent.schedule_bytes:
        table.add_row("bytes sent, loops repeated", f"{sent.step_bytes:,}", "")
    table.add_section()
    table.add_row("parameters on each rank, bytes", "", f"{held.params_bytes:,}")
    table.add_row("optimizer state on each rank, bytes", "", f"{held.optimizer_bytes:,}")
    table.add_row("loss and gradients reduced, bytes", f"{sent.buffer_bytes:,}", "")
    if sent.reduction_seconds:
        # Bus bandwidth: the wire traffic of an all-reduce, or a reduce-scatter, whatever its
        # algorithm.
        algbw = sent.reduction_bytes / sent.reduction_seconds / 1e9
        busbw = algbw * (1 if sent.gathers else 2) * (sent.ranks - 1) / sent.ranks
        table.add_row("time of the reduction alone", "", f"{sent.reduction_seconds * 1e3:.1f} ms")
        table.add_row("its share of a step, estimated", "", f"{sent.share:.1%}")
        table.add_row("algbw, busbw", "", f"{algbw:.2g}, {busbw:.2g} GB/s")
    return table


def write_metrics(path: Path, history: History, sent: Communication, **more: Any) -> None:
    """Writes all numbers of the run as JSON; floats survive bit for bit."""
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    numbers = {
        **more,
        "communication": dataclasses.asdict(sent),
        "versions": versions,
        "history": dataclasses.asdict(history),
    }
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def plot_losses(path: Path, history: History, unigram: float, title: str) -> None:
    """Draws training and validation loss over the steps, with the unigram baseline."""
    matplotlib.rcParams["font.size"] = 10
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(history.train) + 1)
    axes.plot(steps, history.train, color=TRAIN, alpha=0.3, linewidth=0.8)
    axes.plot(steps, _smooth(history.train), color=TRAIN, linewidth=1.8, label="training")
    at, losses = np.array(history.validation).T
    axes.plot(at, losses, "o-", color=VALIDATION, markersize=4, linewidth=1.2, label="validation")
    _annotate(axes, len(steps), unigram, losses)
    axes.set(xlabel="step", ylabel="loss (bits per byte)", xlim=(0, len(steps) * 1.01))
    axes.set_ylim(min(losses.min(), min(history.train)) - 0.4, unigram + 2)
    axes.set_title(title, loc="left", color=INK)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.98))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def _annotate(axes: Axes, steps: int, unigram: float, losses: np.ndarray) -> None:
    axes.axhline(unigram, color=BASELINE, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"unigram entropy of the text: {unigram:.2f}",
        (steps, unigram),
        (0, 4),
        textcoords="offset points",
        ha="right",
        color=BASELINE,
    )
    axes.annotate(
        f"{losses[-1]:.2f}",
        (steps, losses[-1]),
        (0, 8),
        textcoords="offset points",
        ha="right",
        color=VALIDATION,
        weight="bold",
    )


def _smooth(values: list[float], reach: int = 7) -> np.ndarray:
    """Mean over up to `reach` neighbours on either side, so the curve does not lag behind."""
    return np.array(
        [np.mean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
    )
