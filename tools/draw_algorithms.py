"""Draws the pictures of docs/algorithms.md.

python tools/draw_algorithms.py
"""

from __future__ import annotations

import pathlib

from jax_ring.schedules import (
    Kind,
    bidirectional_ring,
    cost,
    direct,
    double_binary_tree,
    halving_doubling,
    hierarchical,
    recursive_doubling,
    ring,
)
from jax_ring.schedules.draw import draw, plot_times
from jax_ring.schedules.families import make, names

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "images" / "algorithms"

PICTURES = {
    "ring": ring(4),
    "bidirectional_ring": bidirectional_ring(4),
    "channels": ring(4, channels=2),
    "direct": direct(4),
    "halving_doubling": halving_doubling(4),
    "recursive_doubling": recursive_doubling(4),
    "double_binary_tree": double_binary_tree(4, blocks=2),
    "hierarchical": hierarchical(2, 2),
}

RANKS, ALPHA, BANDWIDTH = 8, 5e-6, 400e9  # Seconds per step, bytes per second.
SIZES = [round(10 ** (3 + i / 10)) for i in range(61)]  # 1 kB to 1 GB.
TITLE = f"All-reduce of {RANKS} ranks, {ALPHA * 1e6:.0f} µs a step, {BANDWIDTH / 1e9:.0f} GB/s"


def predicted() -> dict[str, list[float]]:
    """Of each algorithm the seconds at each size."""
    schedules = [make(name, Kind.ALL_REDUCE, RANKS) for name in names(Kind.ALL_REDUCE)]
    return {s.name: [cost(s, size, ALPHA, 1 / BANDWIDTH) for size in SIZES] for s in schedules}


def main(folder: pathlib.Path = FOLDER) -> None:
    """Draws all pictures into a folder."""
    for name, schedule in PICTURES.items():
        draw(schedule, folder / f"{name}.svg")
    plot_times(predicted(), SIZES, folder / "times.svg", title=TITLE)


if __name__ == "__main__":
    main()
