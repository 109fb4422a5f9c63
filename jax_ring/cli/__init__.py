"""The command `jax-ring`, also `python -m jax_ring`: one module for each of its commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from jax_ring.cli.bench import bench
from jax_ring.cli.doctor import doctor
from jax_ring.cli.mistakes import INTERRUPTED, MISTAKEN
from jax_ring.cli.plan import plan
from jax_ring.cli.run import run
from jax_ring.cli.show import show
from jax_ring.cli.tune import tune

app = typer.Typer(
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    help="Collectives as your own program: plan, look at, measure, tune.",
)
app.command()(bench)
app.command()(doctor)
app.command()(plan)
app.command()(run)
app.command()(show)
app.command()(tune)

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
