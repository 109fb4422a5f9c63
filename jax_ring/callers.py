"""Where in the user's program a collective is called, from a traceback of JAX."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import jax

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
# contextlib: functions of JAX and of Python that wrap others.
_THEIRS = (os.path.dirname(os.path.abspath(jax.__file__)) + os.sep, contextlib.__file__)


def place(traceback: Any) -> tuple[str, int]:
    """File and line of the innermost frame that is the user's; ("", 0) if there is none."""
    for frame in _frames(traceback):
        if not frame.file_name.startswith((_OURS, *_THEIRS)):
            return frame.file_name, frame.line_num
    return "", 0


def functions_of_jax(traceback: Any) -> list[str]:
    """The functions of JAX through which the innermost other frame called, the innermost first."""
    inside = itertools.takewhile(
        lambda frame: frame.file_name.startswith(_THEIRS), _frames(traceback)
    )
    return [frame.function_name for frame in inside]


def _frames(traceback: Any) -> list[Any]:
    """The frames of a traceback, or of None, the innermost first."""
    return list(traceback.frames) if traceback is not None else []
