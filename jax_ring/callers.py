"""Where in the user's program a collective is called, from a traceback of JAX."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
# contextlib: functions of JAX and of Python that wrap others.
_THEIRS = (os.path.dirname(os.path.abspath(jax.__file__)) + os.sep, contextlib.__file__)


def frames(traceback: Any) -> list[Any]:
    """The frames of a traceback, or of None, the innermost first, without those of JAX."""
    found: list[Any] = traceback.frames if traceback is not None else []
    return [frame for frame in found if not frame.file_name.startswith(_THEIRS)]


def is_ours(frame: Any) -> bool:
    """Whether it is in this package."""
    return bool(frame.file_name.startswith(_OURS))


def place(traceback: Any) -> tuple[str, int]:
    """File and line of the innermost frame that is the user's; ("", 0) if there is none."""
    user = next((frame for frame in frames(traceback) if not is_ours(frame)), None)
    return (user.file_name, user.line_num) if user else ("", 0)
