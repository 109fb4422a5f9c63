"""Who is taken for missing, and who is not."""

import dataclasses
import json

import pytest

from jax_ring.heartbeats import Beat, Judge, Silence, Verdict


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def beat(number=1, **changes):
    return Beat(**{"beat": number, "where": "host, pid 1", "step": 7} | changes)


def test_silence_is_what_was_listened_to(clock):
    silence = Silence(2.0, clock)
    heard = []
    for clock.now, what in [(1, "a"), (2, "a"), (3.5, "a"), (4, "b"), (5, "b"), (100, "b")]:
        heard.append(silence.look(what))
    # In the end this process stood still itself.
    assert heard == [0, 1, 2.5, 0, 1, 3]


def judged(clock, rounds, processes=3, timeout=4.0):
    """The verdict after so many rounds, a second each, of beats by their number."""
    judge = Judge(processes, timeout, clock)
    for number, beats in enumerate(rounds):
        clock.now += 1.0
        verdict = judge.judge(beats(number))
    return verdict


def test_who_is_silent_is_missing(clock):
    verdict = judged(clock, [lambda n: {0: beat(n), 1: beat(n), 2: beat(min(n, 3))}] * 9)
    assert verdict.end == "process 2 (host, pid 1) gave no sign of life for 5.0 s, last in step 7"
    assert verdict.culprit == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "left"},
        {"state": "ended", "error": "KeyError: 1"},  # And nobody waits for a result.
        {"error": "KeyError: 1"},
        {"late": True, "stuck": True},
    ],
)
def test_who_is_not_missing(clock, changes):
    last = 3 if "state" in changes else 99
    verdict = judged(clock, [lambda n: {0: beat(n), 1: beat(min(n, last), **changes)}] * 20)
    assert not verdict.end
    # Process 2 never came: it may yet.
    assert 2 in verdict.absent
    assert verdict.notes == (
        ("process 1 (host, pid 1) left the watchdog in step 7: KeyError: 1",)
        if "error" in changes
        else ()
    )


def test_this_process_stood_still(clock):
    judge = Judge(2, 4.0, clock)
    for clock.now in (1.0, 2.0, 60.0, 61.0):
        verdict = judge.judge({0: beat(clock.now), 1: beat(1)})
        assert not verdict.end


def test_an_error_is_answered_when_all_were_heard_of_since(clock):
    """By the second heartbeat that is news: the first may have been made before the error."""
    judge = Judge(4, 4.0, clock)
    failed = beat(error="KeyError: 1", failure=5)
    # Process 2 is slow, process 3 leaves.
    rounds = [
        (beat(1), beat(1), beat(1), beat(1), ()),
        (beat(2), failed, beat(1), beat(2), ()),
        (beat(3), dataclasses.replace(failed, beat=2), beat(2), beat(2), ()),
        (beat(4), dataclasses.replace(failed, beat=3), beat(2), beat(2, state="left"), ()),
        (beat(5), dataclasses.replace(failed, beat=4), beat(3), beat(2, state="left"), ((1, 5),)),
        # It goes on, and fails again.
        (beat(6), beat(1), beat(4), beat(2, state="left"), ()),
        (beat(7), beat(2, error="KeyError: 1", failure=6), beat(5), beat(1), ()),
    ]
    for *beats, answered in rounds:
        verdict = judge.judge(dict(enumerate(beats)))
        assert verdict.answered == answered
        assert Verdict.read(json.dumps(dataclasses.asdict(verdict))).answered == answered


def test_an_error_is_not_answered_while_one_is_silent(clock):
    def beats(n):
        return {0: beat(n), 1: beat(n, error="KeyError: 1", failure=1), 2: beat(1)}

    for rounds in range(1, 5):
        assert judged(clock, [beats] * rounds).answered == ()
    verdict = judged(clock, [beats] * 9)
    assert (verdict.answered, verdict.culprit) == ((), 2)


@pytest.mark.parametrize("culprit", [0, 1])
def test_who_failed(clock, culprit):
    beats = {0: beat(), 1: beat(), culprit: beat(error="KeyError: 'oh'", state="failed")}
    verdict = judged(clock, [lambda _: beats])
    assert verdict.end == f"process {culprit} (host, pid 1) failed (KeyError: 'oh'), last in step 7"
    assert verdict.culprit == culprit


def test_who_ended_while_others_wait(clock):
    gone = beat(error="KeyError: 1", state="ended")
    verdict = judged(clock, [lambda n: {0: beat(n, late=True, stuck=True), 1: gone}])
    assert "process 1 (host, pid 1) has ended after an error (KeyError: 1), last" in verdict.end


def test_who_is_behind(clock):
    beats = {0: beat(step=5), 1: beat(step=4), 2: beat(step=3, error="KeyError: 1")}
    verdict = judged(clock, [lambda _: beats])
    assert (verdict.behind, verdict.absent) == ((1, 4), (2,))


def test_what_is_said_is_said_once_and_read_again(clock):
    judge = Judge(1, 4.0, clock)
    judge.say("this")
    judge.say("this")
    judge.end("all differ")
    verdict = judge.judge({0: beat()})
    assert (verdict.notes, verdict.end, verdict.culprit) == (("this",), "all differ", -1)
    read = Verdict.read(json.dumps(dataclasses.asdict(verdict)))
    assert (read.own, read.end) == (verdict.own, verdict.end)
