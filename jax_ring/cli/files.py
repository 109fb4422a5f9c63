"""Files that a command writes in the end: what could not be written is told in the beginning."""

from __future__ import annotations

import pathlib


def check_file(path: pathlib.Path) -> None:
    """Finds out whether a file could be written; leaves no trace.

    Raises:
      ValueError: naming the path, and why not.

    Example:
      >>> check_file(pathlib.Path("/nowhere/result.json"))
      Traceback (most recent call last):
      ...
      ValueError: /nowhere/result.json: there is no folder /nowhere
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{path}: a folder, not a file")
    there = path.exists()
    if there and not path.is_file():
        return  # A pipe may be opened only once.
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def check_folder(path: pathlib.Path) -> None:
    """Makes a folder, unless it is there.

    Raises:
      ValueError: naming the path, and why not.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
