"""What commands print to: a terminal, a file or a pipe, or nothing at all."""

from __future__ import annotations

import sys

from rich.console import Console


def is_terminal() -> bool:
    """Whether somebody sees the output as it comes; it may be closed, too."""
    return sys.stdout is not None and sys.stdout.isatty()


class Output(Console):
    """Prints to standard output; where nobody reads it any more that is an error as of any print.

    Args:
      width: of what is not shown on a terminal, by default that of a terminal nevertheless.

    Example:
      >>> Output(width=120).print("as wide as that")
      as wide as that
    """

    def __init__(self, width: int | None = None) -> None:
        """Numbers and paths are not coloured of their own accord."""
        super().__init__(width=None if is_terminal() else width, highlight=False)

    def on_broken_pipe(self) -> None:
        """Leaves it to the command: rich itself would exit with a status of its own."""
        raise BrokenPipeError
