"""`jax-ring show`: the schedule of an algorithm, as text or as a picture."""

from __future__ import annotations

import pathlib
import shutil
from typing import Annotated

import typer

from jax_ring.cli import completion
from jax_ring.cli.mistakes import check_ranks
from jax_ring.cli.terminal import is_terminal
from jax_ring.schedules import Kind, Schedule, hierarchical, ring
from jax_ring.schedules.draw import draw, draw_text
from jax_ring.schedules.families import make, names

HIERARCHICAL = "hierarchical"


def show(
    algorithm: Annotated[
        str,
        typer.Argument(
            help="its name, such as ring or hierarchical",
            autocompletion=completion.algorithms_to_show,
        ),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="how many take part")],
    kind: Annotated[Kind, typer.Option(help="the collective")] = Kind.ALL_REDUCE,
    channels: Annotated[
        int, typer.Option(help="how many rings share the buffer, for an all_reduce by ring")
    ] = 1,
    inner: Annotated[
        int | None, typer.Option(help="ranks in a group, for hierarchical; divides --ranks")
    ] = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option("--output", "-o", help="draw into this .svg, .png or .pdf instead"),
    ] = None,
) -> None:
    """Shows which rank sends which chunk to which other, step by step.

    \b
    Examples:
      jax-ring show ring -n 4
      jax-ring show halving_doubling -n 8 --kind reduce_scatter
      jax-ring show ring -n 4 --channels 2 -o ring.svg
      jax-ring show hierarchical -n 8 --inner 4 -o hierarchical.png
    """  # noqa: D301  (\b keeps the lines apart in the help.)
    check_ranks(ranks)
    schedule = _schedule(algorithm, kind, ranks, channels, inner)
    if output is not None:
        draw(schedule, output)
        return
    width = shutil.get_terminal_size().columns if is_terminal() else None
    typer.echo(draw_text(schedule, width=width))


def _schedule(algorithm: str, kind: Kind, ranks: int, channels: int, inner: int | None) -> Schedule:
    """The schedule that was asked for; a ValueError says what does not fit."""
    known = [*names(kind), *([HIERARCHICAL] if kind is Kind.ALL_REDUCE else [])]
    if algorithm not in known:
        raise ValueError(f"no {kind.value} {algorithm!r}: there are {', '.join(known)}")
    if channels != 1 and (algorithm, kind) != ("ring", Kind.ALL_REDUCE):
        raise ValueError(f"--channels is for an all_reduce by ring, not for {algorithm}")
    if algorithm != HIERARCHICAL:
        if inner is not None:
            raise ValueError(f"--inner is for {HIERARCHICAL}, not for {algorithm}")
        return make(algorithm, kind, ranks) if channels == 1 else ring(ranks, channels=channels)
    if inner is None or inner < 1 or ranks % inner:
        raise ValueError(f"{HIERARCHICAL} needs --inner, which divides the {ranks} ranks")
    return hierarchical(inner, ranks // inner)
