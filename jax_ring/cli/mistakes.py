"""What a command does about a mistake of its user, and about a device that fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import typer

# Exit statuses, besides 0. docs/command.md lists them.
FAILED = 1  # A result is wrong, or the devices failed.
MISTAKEN = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

T = TypeVar("T")


@contextlib.contextmanager
def mistakes_of_the_user(command: str) -> Iterator[None]:
    """Tells an error in one line on stderr, without a traceback, and exits with status 2.

    With status 1 if the devices fail, for example without enough memory, and without a word if
    nobody reads what it writes any more.
    """
    try:
        yield
    except BrokenPipeError:  # Who read it has seen enough, as head has.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    except (ValueError, ImportError, OSError, jax.errors.JaxRuntimeError) as error:
        typer.echo(f"jax-ring {command}: {' '.join(str(error).split())}", err=True)
        failed = isinstance(error, jax.errors.JaxRuntimeError)
        raise typer.Exit(FAILED if failed else MISTAKEN) from None


def read(option: str, parse: Callable[[str], T], text: str) -> T:
    """The value of an option; what is wrong with it is told with the option's name."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def check_ranks(ranks: int) -> None:
    """Rejects what no number of ranks is."""
    if ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {ranks}")
