"""What a command does about a mistake of its user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def mistakes_of_the_user(command: str) -> Iterator[None]:
    """Tells an error in one line on stderr, without a traceback, and exits with status 2."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"jax-ring {command}: {error}", err=True)
        raise typer.Exit(2) from None
