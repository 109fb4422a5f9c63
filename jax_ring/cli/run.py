"""`jax-ring run`: the processes of one job, on this machine."""

from __future__ import annotations

from typing import Annotated, TextIO

import typer

from jax_ring.launch import Job, launch

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def run(
    command: Annotated[list[str], typer.Argument(help="the program and its arguments, after --")],
    processes: Annotated[int, typer.Option("--processes", "-n", help="how many are started")],
    devices_per_process: Annotated[
        int | None,
        typer.Option("--devices-per-process", "-d", help="CPU devices of each, in XLA_FLAGS"),
    ] = None,
    malloc_tuning: Annotated[
        bool,
        typer.Option(
            "--malloc-tuning/--no-malloc-tuning",
            help="on CPU, tell glibc to keep freed memory: large collectives are faster",
        ),
    ] = True,
    grace: Annotated[
        float, typer.Option(help="seconds that processes have to end before they are killed")
    ] = 10.0,
    prefix: Annotated[
        bool,
        typer.Option(
            "--prefix/--no-prefix",
            help="begin each line with the process; without, output is as the program's",
        ),
    ] = True,
) -> None:
    """Starts a program several times, as processes that jax_ring.distributed.initialize() joins.

    If one fails the others are stopped. The exit status is that of the first that failed, 128 + the
    signal if one ended it; 2 for a mistake in the command line, 126 or 127 if the program cannot be
    started.

    \b
    Examples:
      jax-ring run -n 4 -- python train.py --steps 100
      jax-ring run -n 2 --devices-per-process 4 -- python train.py
      jax-ring run -n 2 --no-prefix -- jax-ring doctor --json > report.json
    """  # noqa: D301  (\b keeps the lines apart in the help.)
    job = Job(tuple(command), processes, devices_per_process, malloc_tuning, grace)
    status = launch(job, prefix=_coloured if prefix else None, own_prefix="jax-ring run: ")
    raise typer.Exit(status)


def _coloured(process: int, to: TextIO | None) -> str:
    """What a line begins with: the process, coloured where a terminal shows it."""
    from rich.console import Console

    console = Console(file=to)
    with console.capture() as captured:
        style = _COLOURS[process % len(_COLOURS)]
        console.print(f"[{process}] ", style=style, end="", markup=False, highlight=False)
    return captured.get()
