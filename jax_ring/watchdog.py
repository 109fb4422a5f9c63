"""A process that is missing becomes an error: heartbeats beside the program, and who is late.

Where one process has ended or stands still, the others wait in a collective, which cannot say for
whom. Here a thread of each process writes a heartbeat into the key-value store of the coordination
service and reads those of the others. The program itself only stores the number of its step.

If process 0 ends, the store ends with it, and JAX ends every other process by SIGABRT at once, so
that no thread of theirs can still say why. A small child process of each does, see `last_words`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any

import jax

from jax_ring import _compat, consistency, last_words

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h.
_KEY = "jax_ring/heartbeat"


class Watchdog:
    """Ends this process, with a message, when another gives no sign of life. See `watchdog`."""

    def __init__(self, timeout: float) -> None:
        """Does not start yet."""
        if not timeout > 0:
            raise ValueError(f"jax_ring.watchdog: timeout must be more than 0 s, got {timeout}")
        self.timeout = timeout
        self._interval = min(1.0, timeout / 5)
        self._step, self._advanced = 0, time.monotonic()
        self._beats = 0
        # Of each process its last heartbeat, and when that was first seen here.
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}
        self._exchanged = time.monotonic()
        self._told: int | None = None
        self._compared: int | None = None
        self._failed = ""
        self._stop = threading.Event()
        self._speaker: subprocess.Popen[bytes] | None = None
        self._writer = threading.Thread(target=self._exchange, daemon=True)

    def step(self, number: int) -> None:
        """Says that this process begins a step. It costs nothing: two fields are set.

        Args:
          number: of the step.
        """
        self._step, self._advanced = number, time.monotonic()

    def __enter__(self) -> Watchdog:
        """Starts watching, where there are other processes."""
        client, address = _compat.coordination_client(), _compat.coordinator_address()
        if client is None or jax.process_count() == 1:
            return self
        self._client = client
        self._exchanged = time.monotonic()
        self._seen = {i: ({"step": 0}, time.monotonic()) for i in range(jax.process_count())}
        if jax.process_index() and address:
            self._speaker = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    last_words.__file__,
                    address,
                    str(jax.process_index()),
                ],
                stdin=subprocess.PIPE,
            )
        self._writer.start()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops watching; after an error the others are told, and end too.

        A collective fails when a peer ends. So that the message says which, an error of the runtime
        (some are ValueErrors) is kept back until the others are known to live.
        """
        if self._seen and isinstance(error, (RuntimeError, ValueError)):
            self._stop.wait(1.5 * self.timeout)
        if error is not None:
            self._failed = f"{type(error).__name__}: {error}"[:500]
            # JAX's shutdown, when Python exits, would wait for the others far longer.
            threading.Thread(target=self._end_late, daemon=True).start()
        self._stop.set()
        if not self._seen:
            return
        if self._writer.is_alive():
            self._writer.join(self.timeout)
        if self._speaker is not None and self._speaker.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._speaker.stdin as pipe:
                pipe.write(last_words.BYE)
            self._speaker.wait(self.timeout)

    def _exchange(self) -> None:
        """Writes and reads heartbeats. It may hang where process 0 does, which `_watch` sees."""
        own = {"where": f"{socket.gethostname()}, pid {os.getpid()}"}
        left = False
        while True:
            self._beats += 1
            now = {"beat": self._beats, "step": self._step, "left": left, "failed": self._failed}
            now["late"] = time.monotonic() - self._advanced > self.timeout
            beat = json.dumps(own | now)
            # While the store fails, nothing is exchanged: the other thread will say so.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                key = f"{_KEY}/{jax.process_index()}"
                self._client.key_value_set(key, beat, allow_overwrite=True)
                for name, text in self._client.key_value_dir_get(_KEY):
                    self._note(int(name.rpartition("/")[2]), json.loads(text))
                self._exchanged = time.monotonic()
                self._compare()
            if left:
                return
            left = self._stop.wait(self._interval)

    def _end_late(self) -> None:
        time.sleep(self.timeout)
        os._exit(EXIT_STATUS)

    def _note(self, process: int, beat: dict[str, Any]) -> None:
        last, _ = self._seen[process]
        if beat["beat"] != last.get("beat"):
            self._seen[process] = (beat, time.monotonic())

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            now = time.monotonic()
            if now - self._exchanged > self.timeout:
                self._end(0, now - self._exchanged)
            # Its own silence is not the others': what is judged is what was read.
            silent = [
                (at, i)
                for i, (beat, at) in self._seen.items()
                if self._exchanged - at > self.timeout and not beat.get("left")
            ]
            if silent:
                at, process = min(silent)
                self._end(process, now - at)
            for process, (beat, _) in self._seen.items():
                if beat.get("failed") and process != jax.process_index():
                    self._end_with(process, f"failed ({beat['failed']})")
            if now - self._advanced > self.timeout and self._step != self._told:
                self._tell_who_is_late()

    def _tell_who_is_late(self) -> None:
        """Reports, once for a step, that all live and yet this step takes long."""
        self._told = self._step
        behind = min(self._seen, key=lambda i: int(self._seen[i][0]["step"]))
        step = self._seen[behind][0]["step"]
        _say(
            f"process {jax.process_index()} is in step {self._step} for more than "
            f"{self.timeout:g} s; all processes live; "
            + (
                f"process {behind} is the furthest behind, in step {step}"
                if step < self._step
                else "none is behind"
            )
        )

    def _compare(self) -> None:
        """Where no process gets on, looks once in a step whether all have compiled the same."""
        beats = [beat for beat, _ in self._seen.values()]
        if self._step == self._compared or not all(b.get("late") or b.get("left") for b in beats):
            return
        self._compared = self._step
        if (found := consistency.difference()) is not None:
            self._end_with(*found)
        elif (found := consistency.missing()) is not None:
            # It may only be late, so that this is no reason to end.
            process, why = found
            _say(f"nobody gets on; process {process} {why}")

    def _end(self, process: int, seconds: float) -> None:
        self._end_with(process, f"gave no sign of life for {seconds:.1f} s")

    def _end_with(self, process: int, why: str) -> None:
        beat = self._seen[process][0]
        _say(
            f"process {process} ({beat.get('where', 'never seen')}) {why}, last in step "
            f"{beat['step']}; process {jax.process_index()} waits for it in step {self._step} "
            "and ends"
        )
        if self._speaker is not None:
            self._speaker.kill()
        if jax.process_index() == 0:
            # The store ends with this process, and JAX aborts the others: let them end first.
            time.sleep(1.0 + 3 * self._interval)
        os._exit(EXIT_STATUS)


def _say(text: str) -> None:
    print(f"jax_ring.watchdog: {text}", file=sys.stderr, flush=True)


def watchdog(timeout: float = 60.0) -> Watchdog:
    """Watches, in a with statement, that all processes of the job live, and ends this one if not.

    After `timeout` seconds without a sign of life of another process, this one says which it is and
    in which steps both are, and exits with status `EXIT_STATUS`; likewise where another left the
    with statement by an error. Where all live and a step takes longer than that, it says once who
    is the furthest behind, and goes on. Where all are late, it compares what they have compiled,
    see `jax_ring.consistency`: if two have each a program that the other has not, they end, and say
    in what they differ.

    Args:
      timeout: in seconds; give a dead process's heartbeats time, so at least a few. Keep it below
        `heartbeat_timeout_seconds` of `jax.distributed.initialize` (100 s), after which JAX
        ends processes by itself.

    Returns:
      The watchdog. Call its `step(number)` at the start of each step.

    Raises:
      ValueError: for a timeout that is not positive.

    Example:
      >>> with watchdog(timeout=30) as dog:
      ...     for number in range(3):
      ...         dog.step(number)
    """
    return Watchdog(timeout)
