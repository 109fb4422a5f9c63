"""Says why a process was aborted, when it no longer can: that process 0 is gone.

`python last_words.py HOST:PORT PROCESS`, a file that imports no JAX. It waits until its standard
input, a pipe from the process, is closed. Without a goodbye before that, the process has died. If
process 0 can then not be reached either, that is why.
"""

from __future__ import annotations

import signal
import socket
import sys
import time

BYE = b"bye\n"
_PATIENCE_S = 2.0  # For the port of process 0 to be closed.


def reachable(address: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except OSError:
        return False


def main() -> None:
    """Waits, and says it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # They come to the process, and end this one too.
    address, process = sys.argv[1:]
    if sys.stdin.buffer.read() == BYE:
        return
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if not reachable(address):
            print(
                f"jax_ring.watchdog: process 0 (coordinator {address}) is gone, so process "
                f"{process} has ended",
                file=sys.stderr,
                flush=True,
            )
            return
        time.sleep(0.1)


if __name__ == "__main__":
    main()
