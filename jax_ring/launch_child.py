"""Becomes a command that dies with its launcher. Run as a file, so that it starts in milliseconds.

`python launch_child.py PARENT COMMAND ARGUMENTS...`: on Linux the kernel is asked to kill this
process when its parent ends, however that ends, and then the command takes its place. A
`preexec_fn` would do the same, but runs Python between fork and exec, which may deadlock where
threads are.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # As a shell says it.


def die_with(parent: int) -> None:
    """Asks to be killed when the parent ends; ends at once if it has already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Becomes the command."""
    die_with(int(sys.argv[1]))
    command = sys.argv[2:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"jax-ring run: {command[0]}: {error.strerror}", file=sys.stderr)
        found = not isinstance(error, FileNotFoundError)
        sys.exit(NOT_EXECUTABLE if found else NOT_FOUND)


if __name__ == "__main__":
    main()
