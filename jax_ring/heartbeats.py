"""What heartbeats say: who lives, who is gone, who is behind. Process 0 judges those of all.

No heartbeat, no clock of another host and no store is read here: `Judge` is told what was read, and
its verdict is written for the others by `jax_ring.watchdog`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a process says of itself, every second or more often.

    Attributes:
      beat: a number that changes.
      where: host and process id.
      step: that it is in.
      late: whether it has begun no step for the timeout.
      stuck: whether, besides, it has been waiting for the same result for half of that.
      error: with which it left the with statement, or "".
      failure: which of the errors of that process it is, from 1; 0 for none.
      state: "" as long as it is watched; "left" after the with statement; "failed" when an error
        ends the process; "ended" when the process ends, and something has caught the error.
    """

    beat: int
    where: str
    step: int
    late: bool = False
    stuck: bool = False
    error: str = ""
    failure: int = 0
    state: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What process 0 tells the others.

    Attributes:
      own: the heartbeat of process 0.
      end: why all have to end, or "".
      culprit: the process because of which, or -1.
      answered: processes, and which of their errors: since each of these all that are watched have
        been heard of.
      behind: the process in the lowest step, and that step.
      absent: the processes that are not in the with statement.
      notes: what all should say, once each.
      last: whether none follows.
    """

    own: Beat
    end: str = ""
    culprit: int = -1
    answered: tuple[tuple[int, int], ...] = ()
    behind: tuple[int, int] = (0, 0)
    absent: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    last: bool = False

    @classmethod
    def read(cls, text: str) -> Verdict:
        """From its fields in JSON."""
        fields = json.loads(text)
        answered = tuple((process, failure) for process, failure in fields["answered"])
        return cls(**fields | {"own": Beat(**fields["own"]), "answered": answered})


class Silence:
    """For how long nothing new was heard, in time in which this process was awake.

    A process that itself stands still (stopped, a C extension that holds the GIL) has not listened
    meanwhile. So of the time between two looks at most `most` counts.
    """

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts at zero."""
        self._most, self._clock = most, clock
        self._last: object = None
        self._looked = clock()
        self.seconds = 0.0
        self.changes = 0

    def look(self, heard: object) -> float:
        """Whatever changes is a sign of life. Returns the seconds without one."""
        now = self._clock()
        waited, self._looked = min(now - self._looked, self._most), now
        if heard == self._last:
            self.seconds += waited
        else:
            self.seconds, self._last, self.changes = 0.0, heard, self.changes + 1
        return self.seconds


class Judge:
    """Follows the heartbeats of all processes."""

    def __init__(
        self, processes: int, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Of `processes` processes, of which none may be silent for `timeout` seconds."""
        self._timeout = timeout
        self._silences = [Silence(timeout / 4, clock) for _ in range(processes)]
        # Of each error of a process, how often each had changed when it was told.
        self._told: dict[tuple[int, int], dict[int, int]] = {}
        self._notes: list[str] = []
        self._end = ""

    def end(self, why: str) -> None:
        """Lets all processes end, for a reason that is no single one of them."""
        self._end = why

    def say(self, note: str) -> None:
        """Lets all processes say something, once."""
        if note not in self._notes:
            self._notes.append(note)

    def judge(self, beats: Mapping[int, Beat]) -> Verdict:
        """The verdict.

        Args:
          beats: the last heartbeat of each process that has ever sent one; process 0 has.
        """
        watched = {i: beat for i, beat in beats.items() if beat.state not in ("left", "ended")}
        silent = {i: self._silences[i].look(beat.beat) for i, beat in watched.items()}
        for i, beat in beats.items():
            if beat.error and beat.state != "failed":
                self.say(f"{_who(i, beat)} left the watchdog in step {beat.step}: {beat.error}")
        culprit, why = self._culprit(beats, silent)
        inside = {i: beat for i, beat in watched.items() if not beat.error}
        behind = min(inside, key=lambda i: inside[i].step, default=0)
        return Verdict(
            own=beats[0],
            end=f"{_who(culprit, beats[culprit])} {why}" if why else self._end,
            culprit=culprit,
            answered=tuple(self._answered(beats, watched)),
            behind=(behind, beats[behind].step),
            absent=tuple(i for i in range(len(self._silences)) if i not in inside),
            notes=tuple(self._notes),
        )

    def _answered(
        self, beats: Mapping[int, Beat], watched: Mapping[int, Beat]
    ) -> Iterator[tuple[int, int]]:
        """The errors since which all have been heard of.

        A heartbeat that is new since may have been made before. The second is made after the first
        was written.
        """
        changes = {i: self._silences[i].changes for i in watched}
        for failed in ((i, beat.failure) for i, beat in beats.items() if beat.failure):
            told = self._told.setdefault(failed, changes)
            if all(changes[i] >= told[i] + 2 for i in told if i in changes):
                yield failed

    def _culprit(self, beats: Mapping[int, Beat], silent: Mapping[int, float]) -> tuple[int, str]:
        """Who is missing, and how; or -1."""
        for i, beat in beats.items():
            if beat.state == "failed":
                return i, f"failed ({beat.error}), last in step {beat.step}"
        longest = max(silent, key=lambda i: silent[i], default=-1)
        if silent.get(longest, 0.0) > self._timeout:
            seconds, step = silent[longest], beats[longest].step
            return longest, f"gave no sign of life for {seconds:.1f} s, last in step {step}"
        # Something caught its error, so that perhaps nobody waits for it.
        if any(beats[i].stuck for i in silent):
            for i, beat in beats.items():
                if beat.state == "ended":
                    return i, f"has ended after an error ({beat.error}), last in step {beat.step}"
        return -1, ""


def _who(process: int, beat: Beat) -> str:
    return f"process {process} ({beat.where})"
