"""What a command does about a mistake of its user, and about a device that fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import typer
from typer.core import TyperCommand, TyperGroup

# Exit statuses, besides 0. docs/command.md lists them.
FAILED = 1  # A result is wrong, or the devices failed, or memory ran out.
MISTAKEN = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

T = TypeVar("T")


class Guarded(TyperCommand):
    """A command: what goes wrong in it, or while its help is printed, is told in one line."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        """Reads the options; prints the help."""
        with mistakes_of_the_user(self.name or ""):
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Runs it."""
        with mistakes_of_the_user(self.name or ""):
            return super().invoke(ctx)


class GuardedGroup(TyperGroup):
    """All commands; the same for the options and the help that come before one."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        """Reads the options; prints the help and the version."""
        with mistakes_of_the_user():
            return super().make_context(*arguments, **extra)


@contextlib.contextmanager
def mistakes_of_the_user(command: str = "") -> Iterator[None]:
    """Tells an error in one line on stderr, without a traceback, and exits with status 2.

    With status 1 if the devices or this machine fail, for example without enough memory, and
    without a word if nobody reads what it writes any more.

    Args:
      command: which one it is about.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # What cannot be written is told here, not by Python's exit.
    except BrokenPipeError:  # Who read it has seen enough, as head has.
        _write_nowhere()
        raise typer.Exit(BROKEN_PIPE) from None
    except (ValueError, ImportError, OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
        _write_nowhere()
        with contextlib.suppress(OSError):
            said = " ".join(str(error).split()) or "no memory is left"
            typer.echo(f"{f'jax-ring {command}'.strip()}: {said}", err=True)
        failed = isinstance(error, (MemoryError, jax.errors.JaxRuntimeError))
        raise typer.Exit(FAILED if failed else MISTAKEN) from None


def _write_nowhere() -> None:
    """Lets go of what could not be written, or Python would try again when it exits."""
    with contextlib.suppress(OSError, AttributeError):  # There may be no stdout.
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
