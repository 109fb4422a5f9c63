"""Who is there, before JAX's coordination service starts, so that errors can be said plainly.

That service ends a process by SIGABRT and a stack trace if another is missing or has the same id.
So processes first tell process 0, on the port that the service will have, who they are: one line of
JSON each, and one line back to all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any

_LONGEST = 2**16
_RETRY_S = 0.1
_GRACE_S = 5.0  # That process 0 may take longer than the others, which began to wait before it.
_LINE_S = 2.0  # For a caller to say who it is. It needs no time to think.
_FIELDS = {"process": int, "processes": int, "where": str, "jax": str, "jax_ring": str}

Hello = Mapping[str, Any]


def take(port: int, processes: int, timeout: float) -> list[tuple[socket.socket, Hello]]:
    """As process 0, listens until there are as many calls as other processes, or time is over.

    Callers are heard side by side. Who does not say what a process of jax_ring says is passed over.

    Args:
      port: where to listen, at all addresses.
      processes: how many there are, with this one.
      timeout: in seconds.

    Returns:
      Each connection with what was said on it.

    Raises:
      OSError: if the port is taken.
    """
    deadline = time.monotonic() + timeout
    calls: list[tuple[socket.socket, Hello]] = []
    with _listen(port) as server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        callers: set[_Caller] = set()
        while len(calls) < processes - 1 and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(min(_RETRY_S, left)):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):  # It has hung up already.
                        callers.add(caller := _Caller(server.accept()[0]))
                        selector.register(caller.connection, selectors.EVENT_READ, caller)
                else:
                    key.data.listen()
            for caller in [c for c in callers if c.finished]:
                callers.remove(caller)
                selector.unregister(caller.connection)
                if (said := caller.hello()) is None:
                    caller.connection.close()
                else:
                    calls.append((caller.connection, said))
        for caller in callers:
            caller.connection.close()
    return calls


def _listen(port: int) -> socket.socket:
    """A server at all addresses, of IPv6 too where there are any."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:  # The kernel knows IPv6, but it is switched off.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port))


@dataclasses.dataclass(eq=False)
class _Caller:
    """One that has called and may not have said all yet."""

    connection: socket.socket
    data: bytes = b""
    deadline: float = dataclasses.field(default_factory=lambda: time.monotonic() + _LINE_S)
    closed: bool = False

    def listen(self) -> None:
        """Takes what has come, at most some."""
        more = b""
        with contextlib.suppress(OSError):
            more = self.connection.recv(4096, socket.MSG_DONTWAIT)
        self.data += more
        self.closed = not more

    @property
    def finished(self) -> bool:
        """Whether no more is to be heard."""
        said = self.data.endswith(b"\n") or len(self.data) >= _LONGEST
        return said or self.closed or time.monotonic() > self.deadline

    def hello(self) -> Hello | None:
        """What it said, or None if it is somebody else's."""
        said = _parsed(self.data)
        if said is None or any(type(said.get(name)) is not kind for name, kind in _FIELDS.items()):
            return None
        return said


def answer(calls: list[tuple[socket.socket, Hello]], problem: str) -> None:
    """Tells all who called what is wrong, or "" if nothing is, and hangs up."""
    for connection, _ in calls:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_LINE_S)
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
                if (said := _read(connection, deadline + _GRACE_S)) and "problem" in said:
                    return str(said["problem"])
                last = "it does not answer as jax_ring.distributed.initialize does"
        except OSError as error:
            last = str(error)
        time.sleep(_RETRY_S)
    raise TimeoutError(last)


def _read(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """A line of JSON with an object, or None."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _LONGEST:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("no answer")
        connection.settimeout(left)
        more = connection.recv(4096)
        if not more:
            break
        data += more
    return _parsed(data)


def _parsed(data: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        said = json.loads(data)
        return said if isinstance(said, dict) else None
    return None
