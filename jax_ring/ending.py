"""How a process leaves a job of several: one that fails does not wait for those that go on.

When Python exits JAX waits, for up to 300 s, until all processes of the job do. A process that an
exception ends would wait too, while the others wait for it in a collective. So before JAX's hook
one of ours looks whether all are leaving. If not and this process has failed, or if another has
gone that way, JAX is kept from waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import sys
import time
from typing import Any

import jax

from jax_ring import _compat

_KEY = "jax_ring/ending"
_LEAVING, _GONE = "leaving", "gone"
# For others that fail at the same time: when process 0 ends, JAX aborts them.
_PATIENCE_S = 3.0
_POLL_S = 0.1
# For JAX to clean up, which may itself wait for a collective that was begun.
_CLEANUP_S = 10.0


def do_not_wait_after_an_error(process: int, processes: int) -> None:
    """From now on, an exception that ends this process ends it without waiting for the others.

    It is called after `jax.distributed.initialize`. An exit by `sys.exit` waits as before, since
    Python tells no hook its status.

    Args:
      process: which this is.
      processes: how many there are.
    """
    if processes > 1:
        atexit.register(_leave, process, processes)


def _leave(process: int, processes: int) -> None:
    client = _compat.coordination_client()
    if client is None:
        return  # It has been shut down.
    failed = _failed()
    try:
        if _all_leave(client, process, processes, failed):
            return
    except jax.errors.JaxRuntimeError:  # Process 0 has gone.
        pass
    _compat.abandon_coordination()
    with contextlib.suppress(AttributeError, ValueError):  # Where there is no stderr.
        faulthandler.dump_traceback_later(_CLEANUP_S, exit=True)


def _all_leave(client: Any, process: int, processes: int, failed: bool) -> bool:
    """Whether JAX may wait for the others: they leave too, or this process has not failed."""
    key = f"{_KEY}/{process}"
    client.key_value_set(key, _LEAVING, allow_overwrite=True)
    deadline = time.monotonic() + (_PATIENCE_S if failed else 0.0)
    while True:
        states = [state for _, state in client.key_value_dir_get(_KEY)]
        if _GONE not in states and (len(states) == processes or not failed):
            return True
        if time.monotonic() >= deadline:
            client.key_value_set(key, _GONE, allow_overwrite=True)
            return False
        time.sleep(_POLL_S)


def _failed() -> bool:
    """Whether an exception ends this process, and not only a line at a prompt."""
    return nothing_caught_it() and not hasattr(sys, "ps1")


def nothing_caught_it() -> bool:
    """Whether Python has printed an exception that nothing caught."""
    return getattr(sys, "last_value", None) is not None
