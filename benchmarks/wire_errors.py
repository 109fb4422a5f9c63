r"""The errors of all-reduces over lossy wires, against sums in float64.

    python benchmarks/wire_errors.py --plot docs/images/wire_errors.png

For 2 to 64 ranks (emulated by `vmap`), three kinds of data, each wire, the direct exchange and the
ring: the L2 norm of the error, relative to that of the exact sums. Prints a Markdown table.

- normal: each value drawn from a normal distribution
- long-tailed: Student's t with 2 degrees of freedom, so that a few values are far larger
- cancelling: each rank but the last one normal, the last such that the sums are 1000 times smaller
"""

from __future__ import annotations

import pathlib
from typing import Annotated

import jax
import numpy as np
import typer

import jax_ring

RANKS = [2, 4, 8, 16, 32, 64]
ALGORITHMS = ["direct", "ring"]
KINDS = ["normal", "long-tailed", "cancelling"]
LENGTH = 1 << 14
Key = tuple[str, str, str, int]  # Kind, wire, algorithm, ranks.


def data(kind: str, ranks: int) -> np.ndarray:
    """[ranks, LENGTH] float32."""
    rng = np.random.default_rng(ranks)
    if kind == "long-tailed":
        return rng.standard_t(2, (ranks, LENGTH)).astype(np.float32)
    values = rng.standard_normal((ranks, LENGTH))
    if kind == "cancelling":
        small = 1e-3 * values.sum(0)
        values[-1] = small - values[:-1].sum(0)
    return values.astype(np.float32)


def error(x: np.ndarray, wire: str, algorithm: str) -> float:
    """The relative L2 error of rank 0's result; all ranks have the same bits."""

    def body(v: jax.Array) -> jax.Array:
        return jax_ring.psum(v, "ranks", wire=wire, algorithm=algorithm)

    exact = x.astype(np.float64).sum(0)
    got = np.asarray(jax.jit(jax.vmap(body, axis_name="ranks"))(x)[0], np.float64)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def plot(errors: dict[Key, float], path: pathlib.Path) -> None:
    """Draws error against ranks: a panel for each kind of data."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(KINDS), figsize=(12, 4.2), layout="constrained")
    for kind, panel in zip(KINDS, panels, strict=True):
        for color, wire in enumerate(jax_ring.wire.NAMES):
            for algorithm, style in zip(ALGORITHMS, ("-", "--"), strict=True):
                y = [errors[kind, wire, algorithm, ranks] for ranks in RANKS]
                label = wire if (kind, algorithm) == ("normal", "direct") else None
                panel.plot(RANKS, y, style, color=f"C{color}", marker=".", label=label)
        panel.set(title=kind, xscale="log", yscale="log", xlabel="ranks")
        panel.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("relative error (L2)")
    figure.legend(loc="outside right center", title="— direct\n- - ring", frameon=False)
    figure.savefig(path, dpi=110)


def main(
    image: Annotated[
        pathlib.Path | None, typer.Option("--plot", help="where to draw the errors")
    ] = None,
) -> None:
    """Measures the errors of lossy wires."""
    errors: dict[Key, float] = {}
    for kind in KINDS:
        print(f"\n| {kind} | algorithm | " + " | ".join(f"{n} ranks" for n in RANKS) + " |")
        print("|---" * (2 + len(RANKS)) + "|")
        inputs = {ranks: data(kind, ranks) for ranks in RANKS}
        for wire in jax_ring.wire.NAMES:
            for algorithm in ALGORITHMS:
                row = [error(inputs[ranks], wire, algorithm) for ranks in RANKS]
                errors |= {(kind, wire, algorithm, n): e for n, e in zip(RANKS, row, strict=True)}
                print(f"| {wire} | {algorithm} | " + " | ".join(f"{e:.1e}" for e in row) + " |")
    if image:
        plot(errors, image)


if __name__ == "__main__":
    typer.run(main)
