"""Output whose reader may stall, written beside an event loop, for `jax_ring.launch`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import threading
from typing import TextIO


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    r"""Whole lines, with their ends, and the rest. A carriage return ends a line too.

    A last one stays in the rest: a newline may follow.

    Example:
      >>> split_lines(b"one\r\n10%\r20%\r")
      ([b'one\r\n', b'10%\r'], b'20%\r')
    """
    lines = data.splitlines(keepends=True)
    rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
    return lines, rest


class Outlet:
    """A stream whose reader may stall: a thread of its own waits for it.

    Attributes:
      stream: such as `sys.stdout`; None, as after `>&-`, takes everything and keeps nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Starts the thread, which does not keep Python from exiting."""
        self.stream = stream
        if stream is not None:
            stream.flush()  # What was printed before comes first.
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[None] | None]] = (
            queue.SimpleQueue()
        )
        self._unwritten = 0
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether something is not yet written."""
        return self._unwritten > 0

    def put(self, data: bytes) -> None:
        """Writes, in order with all else, and does not wait; errors are passed over."""
        self._unwritten += 1
        self._waiting.put((data, None))

    async def write(self, data: bytes) -> None:
        """Writes and waits for it.

        Raises:
          OSError: as the stream does, such as BrokenPipeError.
        """
        done = self._loop.create_future()
        self._unwritten += 1
        self._waiting.put((data, done))
        await done

    def _work(self) -> None:
        while True:
            data, done = self._waiting.get()
            error = None
            try:
                _write(self.stream, data)
            except (OSError, ValueError) as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                self._loop.call_soon_threadsafe(self._written, done, error)

    def _written(self, done: asyncio.Future[None] | None, error: Exception | None) -> None:
        self._unwritten -= 1
        if done is not None and not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)


def _write(stream: TextIO | None, data: bytes) -> None:
    """Writes to the file descriptor: who waits in a buffered stream keeps Python from exiting."""
    if stream is None or not data:
        return
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError):  # As in a notebook.
        stream.write(data.decode(errors="replace"))
        stream.flush()
        return
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
