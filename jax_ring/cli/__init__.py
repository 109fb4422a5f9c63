"""The command `jax-ring`, also `python -m jax_ring`: one module for each of its commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import jax_ring
from jax_ring.cli.bench import bench
from jax_ring.cli.doctor import doctor
from jax_ring.cli.mistakes import INTERRUPTED, MISTAKEN, Guarded, GuardedGroup
from jax_ring.cli.plan import plan
from jax_ring.cli.run import run
from jax_ring.cli.show import show
from jax_ring.cli.tune import tune


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jax-ring {jax_ring.__version__}")
        raise typer.Exit


app = typer.Typer(cls=GuardedGroup, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def _jax_ring(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="and exit")
    ] = False,
) -> None:
    """Collectives as your own program: plan them, look at them, measure them.

    \b
    Examples:
      jax-ring doctor                       what is installed, what works, what to do
      jax-ring bench --devices 8            nccl-tests for JAX
      jax-ring show ring -n 4               an algorithm, step by step
      jax-ring plan -n 4096 --size 1GB --topology nvlink8+ib
      jax-ring run -n 4 -- python train.py
      jax-ring --install-completion         for the shell that this is typed in

    \b
    Exit status:
      0    all is well
      1    a result is wrong, a self-test or a device failed, memory ran out
      2    a mistake in the command line or in the environment
      130  interrupted
      141  nobody reads the output any more
      run has that of the first process that failed
    """  # noqa: D301  (\b keeps the lines apart in the help.)


for _command in (bench, doctor, plan, run, show, tune):
    app.command(cls=Guarded)(_command)

# The base of all errors of usage. It belongs to click, which newer versions of typer contain.
_UsageError: Any = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command, and exits with its status: 2 after an error of the user, told in one line.

    Args:
      arguments: what follows `jax-ring`; by default that of the command line.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = app(given or ["--help"], prog_name="jax-ring", standalone_mode=False)
    except _UsageError as error:
        text = " ".join(error.format_message().split())
        print(f"jax-ring: {text} See jax-ring --help.", file=sys.stderr)
        sys.exit(MISTAKEN)
    except typer.Abort:
        sys.exit(INTERRUPTED)
    sys.exit(status)
