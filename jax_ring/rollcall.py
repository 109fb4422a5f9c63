"""Who is there, before JAX's coordination service starts, so that errors can be said plainly.

That service ends a process by SIGABRT and a stack trace if another is missing or has the same id.
So processes first tell process 0, on the port that the service will have, who they are: one line of
JSON each, and one line back to all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

_LONGEST = 2**16
_RETRY_S = 0.1
_GRACE_S = 5.0  # That process 0 may take longer than the others, which began to wait before it.

Hello = Mapping[str, Any]


def take(
    address: tuple[str, int], processes: int, timeout: float
) -> list[tuple[socket.socket, Hello]]:
    """As process 0, listens until all others have called, or one called twice, or the time is over.

    Args:
      address: where to listen.
      processes: how many there are, with this one.
      timeout: in seconds.

    Returns:
      Each connection with what was said on it.

    Raises:
      OSError: if the port is taken.
    """
    deadline = time.monotonic() + timeout
    calls: list[tuple[socket.socket, Hello]] = []
    with socket.create_server(address) as server:
        while len(calls) < processes - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                connection.settimeout(min(1.0, left))
                said = _read(connection)
                if said is None or "process" not in said:
                    connection.close()  # Somebody else's.
                else:
                    calls.append((connection, said))
    return calls


def answer(calls: list[tuple[socket.socket, Hello]], problem: str) -> None:
    """Tells all who called what is wrong, or "" if nothing is, and hangs up."""
    for connection, _ in calls:
        with contextlib.suppress(OSError), connection:
            connection.sendall(json.dumps({"problem": problem}).encode() + b"\n")


def call(address: tuple[str, int], hello: Hello, timeout: float) -> str:
    """Calls process 0 until it answers.

    Args:
      address: its address.
      hello: who calls.
      timeout: in seconds.

    Returns:
      What is wrong, or "".

    Raises:
      TimeoutError: if nobody answers.
    """
    deadline, last = time.monotonic() + timeout, "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address, deadline - time.monotonic()) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                connection.settimeout(timeout + _GRACE_S)
                if (said := _read(connection)) is not None and "problem" in said:
                    return str(said["problem"])
                last = "it does not answer as jax_ring.distributed.initialize does"
        except OSError as error:
            last = str(error)
        time.sleep(_RETRY_S)
    raise TimeoutError(last)


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """A line of JSON with an object, or None."""
    data = b""
    with contextlib.suppress(OSError, ValueError):
        while not data.endswith(b"\n") and len(data) < _LONGEST:
            more = connection.recv(4096)
            if not more:
                return None
            data += more
        said = json.loads(data)
        return said if isinstance(said, dict) else None
    return None
