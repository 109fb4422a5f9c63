"""A process that is missing becomes an error: heartbeats beside the program, and who is late.

Where one process has ended or stands still, the others wait in a collective, which cannot say for
whom. Here a thread of each process writes a heartbeat into the key-value store of the coordination
service. That of process 0 reads them all, and writes its verdict for the others, who read no more
than that. The program itself only stores the number of its step.

If process 0 ends, the store ends with it, and JAX ends every other process by SIGABRT at once, so
that no thread of theirs can still say why. A small child process of each does, see `last_words`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any, SupportsIndex

import jax

from jax_ring import _compat, consistency, ending, last_words
from jax_ring.heartbeats import Beat, Judge, Silence, Verdict

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h.
_BEATS = "jax_ring/watchdog/beats"
_VERDICT = "jax_ring/watchdog/verdict"


class Watchdog:
    """Ends this process, with a message, when another gives no sign of life. See `watchdog`."""

    def __init__(self, timeout: float) -> None:
        """Does not start yet."""
        if not timeout > 0:
            raise ValueError(f"jax_ring.watchdog: timeout must be more than 0 s, got {timeout}")
        self.timeout = timeout
        self._interval = min(1.0, timeout / 5)
        self._step, self._advanced = 0, time.monotonic()
        self._beats: dict[int, Beat] = {}  # In process 0, those of all.
        self._verdict: Verdict | None = None
        self._rounds, self._heard = 0, 0  # Begun, and those that the store answered.
        # Where half of the timeout is over: results that are not there, and where its thread is.
        self._awaited: list[weakref.ref[jax.Array]] | None = None
        self._place: list[tuple[types.CodeType, int]] = []
        self._compared = 0.0
        self._told: int | None = None
        self._said: set[str] = set()
        self._error, self._failure = "", 0
        self._may_be_anothers = self._exits = False
        self._state = ""
        self._stop = threading.Event()
        self._writer: threading.Thread | None = None
        self._speaker: subprocess.Popen[bytes] | None = None

    def step(self, number: SupportsIndex) -> None:
        """Says that this process begins a step. It costs nothing: two fields are set.

        Args:
          number: of the step. An array is waited for, if it is not yet computed.

        Raises:
          TypeError: if it is no integer.
        """
        try:
            self._step, self._advanced = operator.index(number), time.monotonic()
        except TypeError:
            raise TypeError(
                f"jax_ring.watchdog: step's number must be an integer, got {number!r}"
            ) from None

    def __enter__(self) -> Watchdog:
        """Starts watching, where there are other processes."""
        client = _compat.coordination_client()
        if client is None or jax.process_count() == 1:
            return self
        _begin(self)
        self._client, self._own, self._thread_id = (
            client,
            jax.process_index(),
            threading.get_ident(),
        )
        self._where = f"{socket.gethostname()}, pid {os.getpid()}"
        self._judge = Judge(jax.process_count(), self.timeout)
        self._advanced = time.monotonic()
        if self._own and (address := _compat.coordinator_address()):
            command = [sys.executable, "-I", "-S", last_words.__file__, address, str(self._own)]
            self._speaker = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._writer = self._thread(self._exchange)
        self._thread(self._watch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        """Stops watching; after an error it tells the others, and goes on.

        Until another `watchdog` begins, as the program has caught the error, or the process ends
        and `conclude` is called.
        """
        if self._writer is None:
            return
        if error is not None and not _only_leaves(error):
            # Not itself: its traceback would keep arrays alive.
            self._error = ": ".join(filter(None, (type(error).__name__, str(error))))[:500]
            self._failure = next(_failures)
            self._exits = isinstance(error, SystemExit)
            # A collective fails when a peer ends: with a RuntimeError, or some with a ValueError.
            self._may_be_anothers = isinstance(error, (RuntimeError, ValueError))
            return
        self._state = "left"
        if self._own:
            self._finish()  # Process 0 goes on to judge the others, until it ends.

    # --- what is told and read --------------------------------------------------------------------

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=functools.partial(self._guard, work), daemon=True)
        thread.start()
        return thread

    def _guard(self, work: Callable[[], None]) -> None:
        """An error of the watchdog itself ends no process: it is said, and this one leaves."""
        try:
            work()
        except Exception as error:
            _say(
                f"process {self._own} watches no more and is not watched, by an error of the "
                f"watchdog itself: {error!r}"
            )
            self._state = "left"
            self._stop.set()
            with contextlib.suppress(Exception):
                self._write(Verdict(self._beat(), last=True))

    def _exchange(self) -> None:
        """Writes and reads. It may hang where process 0 does, which `_watch` sees."""
        while self._client is _compat.coordination_client():
            last = self._stop.is_set()
            # While the store fails, nothing is exchanged: the other thread will say so.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._round()
            if last:
                return
            self._stop.wait(self._interval)
        self._stop.set()  # `jax.distributed` has been shut down: nobody is missing.

    def _round(self) -> None:
        self._rounds += 1
        own = self._beat()
        if self._own:
            self._write(Verdict(own))
            said = self._client.key_value_dir_get(_VERDICT)
            verdict = Verdict.read(said[0][1]) if said else None
        else:
            told = self._client.key_value_dir_get(_BEATS)
            beats = {int(key.rpartition("/")[2]): Beat(**json.loads(text)) for key, text in told}
            self._beats = beats | {0: own}
            judged = self._judge.judge(self._beats)
            verdict = dataclasses.replace(judged, last=self._stop.is_set())
            self._write(verdict)
        self._verdict, self._heard = verdict, self._rounds

    def _write(self, verdict: Verdict) -> None:
        """As process 0 the verdict, else one's own heartbeat."""
        key, what = (
            (f"{_BEATS}/{self._own}", verdict.own) if self._own else (f"{_VERDICT}/0", verdict)
        )
        text = json.dumps(dataclasses.asdict(what))
        self._client.key_value_set(key, text, allow_overwrite=True)

    def _beat(self) -> Beat:
        idle = time.monotonic() - self._advanced
        inside = not self._error and not self._state
        if not inside or idle < self.timeout / 2:
            self._awaited, self._place = None, []
        elif self._awaited is None:
            self._awaited = [weakref.ref(x) for x in jax.live_arrays() if _awaited(x)]
            self._place = self._inside_a_call()
        late = inside and idle > self.timeout
        return Beat(
            beat=self._rounds,
            where=self._where,
            step=self._step,
            late=late,
            stuck=late and self._waits(),
            error=self._error,
            failure=self._failure,
            state=self._state,
        )

    def _waits(self) -> bool:
        """Whether what was waited for, when half of the timeout was over, is still not there."""
        if any(_awaited(ref()) for ref in self._awaited or ()):
            return True
        return bool(self._place) and self._place == self._inside_a_call()

    def _inside_a_call(self) -> list[tuple[types.CodeType, int]]:
        """Where the thread is that entered, if it may be in a program that runs in that thread.

        On CPU those of one device do, if they are small: their results are no arrays before.
        """
        if jax.default_backend() != "cpu" or jax.local_device_count() > 1:
            return []
        innermost = sys._current_frames().get(self._thread_id)
        if innermost is None:
            return []
        return [(frame.f_code, frame.f_lasti) for frame, _ in traceback.walk_stack(innermost)]

    # --- what follows from it ---------------------------------------------------------------------

    def _watch(self) -> None:
        store, judge = Silence(self.timeout / 4), Silence(self.timeout / 4)
        woke = time.monotonic()
        while not self._stop.wait(self._interval) and not self._state:
            slept, woke = time.monotonic() - woke, time.monotonic()
            if slept > self.timeout:
                _say(
                    f"process {self._own} stood still for {slept:.1f} s, for which others may have "
                    "ended"
                )
                continue  # What it has read is old.
            silent = store.look(self._heard)
            verdict = self._verdict
            if verdict is not None and verdict.own.state == "" and self._own:
                silent = max(silent, judge.look(verdict.own.beat))
            if silent > self.timeout:
                self._end_for_process_0(silent)
            if verdict is not None:
                self._obey(verdict)
            if woke - self._advanced > self.timeout and not self._error:
                if self._step != self._told and silent < self.timeout / 2:
                    self._tell_who_is_late(verdict)
                if not self._own:
                    self._compare()

    def _obey(self, verdict: Verdict) -> None:
        for note in verdict.notes:
            if note not in self._said:
                self._said.add(note)
                _say(note)
        if verdict.end and verdict.culprit == self._own:
            self._end(f"{verdict.end}, so the others have been told to end; it ends too")
        elif verdict.end:
            whom = "waits for it" if verdict.culprit >= 0 else "waits"
            self._end(f"{verdict.end}; process {self._own} {whom} in step {self._step} and ends")

    def _end_for_process_0(self, seconds: float) -> None:
        last = self._verdict.own if self._verdict is not None else None
        where, step = (
            (last.where, str(last.step)) if last is not None else ("never seen", "unknown")
        )
        self._end(
            f"process 0 ({where}) gave no sign of life for {seconds:.1f} s, last in step {step}; "
            f"process {self._own} waits for it in step {self._step} and ends"
        )

    def _tell_who_is_late(self, verdict: Verdict | None) -> None:
        """Reports, once for a step, that all live and yet this step takes long."""
        self._told = self._step
        behind, step = (0, self._step) if verdict is None else verdict.behind
        absent = [0] if verdict is None else list(verdict.absent)
        _say(
            f"process {self._own} is in step {self._step} for more than {self.timeout:g} s; "
            + (f"processes {absent} are not in their watchdog; " if absent else "")
            + f"all {'others' if absent else 'processes'} live; "
            + (
                f"process {behind} is the furthest behind, in step {step}"
                if step < self._step and behind != self._own
                else "none is behind"
            )
        )

    def _compare(self) -> None:
        """As process 0, where nobody gets on, looks whether all have compiled the same."""
        beats = {i: beat for i, beat in self._beats.items() if not beat.state and not beat.error}
        if not all(beat.late for beat in beats.values()):
            return
        if time.monotonic() - self._compared < self.timeout / 2:
            return
        self._compared = time.monotonic()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            told = {i: notes for i, notes in consistency.told_by().items() if i in beats}
            stuck = {i: notes for i, notes in told.items() if beats[i].stuck}
            if (found := consistency.differences(stuck)) and found[0].called:
                self._judge.end(f"processes differ, and wait for each other: {found[0]}")
            elif found := consistency.differences(told):
                self._judge.say(
                    f"nobody gets on; processes differ, and may wait for each other: {found[0]}"
                )
            elif one := consistency.missing(told):
                self._judge.say(f"nobody gets on; {one}")

    def _end(self, why: str) -> None:
        _say(why)
        if self._speaker is not None:
            self._speaker.kill()
        if not self._own:
            self._let_others_end()
        os._exit(EXIT_STATUS)

    def _let_others_end(self) -> None:
        """The store ends with process 0, and JAX aborts the others: they have to read first."""
        time.sleep(2.0 + 3 * self._interval)

    # --- the end of this process ------------------------------------------------------------------

    def _conclude(self) -> None:
        """Tells the others, where it was left by an error, whether that ends this process."""
        if self._error:
            if ending.nothing_caught_it() or self._exits:
                if self._may_be_anothers:
                    self._look_for_the_cause()
                self._state = "failed"
                threading.Thread(target=self._end_late, daemon=True).start()
            else:
                self._state = "ended"
        self._finish()
        if self._state == "failed" and not self._own:
            self._let_others_end()

    def _look_for_the_cause(self) -> None:
        """Waits until all have been heard of since the error, or `_watch` ends this process."""
        while not self._stop.wait(self._interval / 2):
            verdict = self._verdict
            if verdict is not None and (
                (self._own, self._failure) in verdict.answered or verdict.last
            ):
                return
            if "cause" not in self._said:
                self._said.add("cause")
                _say(
                    f"process {self._own} failed ({self._error}); before it ends it looks "
                    "whether another process is missing"
                )

    def _finish(self) -> None:
        """Writes what is last, and ends the threads and the child process."""
        self._stop.set()
        if self._writer is not None:
            self._writer.join(self.timeout)
        if self._speaker is not None and self._speaker.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._speaker.stdin as pipe:
                pipe.write(last_words.BYE)
            self._speaker.wait(self.timeout)
            self._speaker = None

    def _end_late(self) -> None:
        """JAX's shutdown, when Python exits, would wait for the others far longer."""
        time.sleep(self.timeout)
        _say(
            f"process {self._own} failed ({self._error}) {self.timeout:g} s ago and has "
            "not ended, perhaps as it waits for the others: it is ended"
        )
        os._exit(EXIT_STATUS)


_failures = itertools.count(1)
# The one that began last, which may have been left, but not have ended.
_current: Watchdog | None = None


def _begin(dog: Watchdog) -> None:
    global _current
    if _current is None:
        # Called before those that JAX registered when it was imported, which end the store.
        atexit.register(conclude)
    elif _current._error or _current._state:
        _current._finish()
    _current = dog


def conclude() -> None:
    """Tells the other processes that this one ends. Called when Python exits.

    If an error has left the with statement of a `watchdog`, they are told that it failed. First, if
    the error may be one of a collective that a missing process made fail, it waits until that is
    known, and then this process ends with the name of the other.
    """
    if _current is not None and (_current._error or _current._state):
        _current._conclude()


def _only_leaves(error: BaseException) -> bool:
    """Whether it is no failure."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return isinstance(error, GeneratorExit)


def _awaited(x: Any) -> bool:
    """Whether an array is not yet computed."""
    try:
        return x is not None and not x.is_deleted() and not x.is_ready()
    except RuntimeError:
        return False  # Deleted meanwhile.


def _say(text: str) -> None:
    print(f"jax_ring.watchdog: {text}", file=sys.stderr, flush=True)


def watchdog(timeout: float = 60.0) -> Watchdog:
    """Watches, in a with statement, that all processes of the job live, and ends this one if not.

    It says why, and exits with status `EXIT_STATUS`,

    - after `timeout` seconds without a sign of life of process 0, or of another process that has
      entered its with statement and not left it: which it is, and in which steps both are. Seconds
      in which this process itself stands still do not count;
    - where another process failed: an error, or an exit with a status other than 0, left its with
      statement, nothing caught it, and the process ends. If something caught it, the others are
      told, and end if that process has ended and one of them waits for a result;
    - where no process has begun a step for `timeout` seconds, two of them wait for a result, and
      each of these has called a program that the other should have called, and has not compiled;
      see `jax_ring.consistency`.

    Where all live and a step takes longer than `timeout`, it says once who is the furthest behind,
    and goes on. In a single process it does nothing.

    An error is not held back. If nothing catches it, and it may be one of a collective
    (RuntimeError, ValueError), the process ends when all others have been heard of since, some
    seconds later, or with the name of one that is missing. What is run at exit then has `timeout`
    seconds.

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
