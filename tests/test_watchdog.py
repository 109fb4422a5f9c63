"""What ends a process, and what does not."""

import contextlib
import dataclasses
import itertools
import json
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coordination import Store

from jax_ring import _compat, watchdog
from jax_ring.heartbeats import Beat, Verdict
from jax_ring.watchdog import Watchdog


def test_it_wants_time():
    with pytest.raises(ValueError, match="timeout must be more than 0 s, got 0"):
        Watchdog(0)


@pytest.mark.parametrize("number", [3, np.int64(3), jnp.int32(3), np.array(3)])
def test_what_numbers_a_step(number):
    dog = Watchdog(1.0)
    dog.step(number)
    assert type(dog._step) is int
    assert dog._step == 3


@pytest.mark.parametrize("number", ["epoch 1", 1.5, None, np.ones(2)])
def test_what_does_not(number):
    with pytest.raises(TypeError, match="step's number must be an integer, got"):
        Watchdog(1.0).step(number)


@pytest.mark.parametrize("error", [KeyError("early"), SystemExit(0), SystemExit(3), RuntimeError()])
def test_in_one_process_an_error_is_nothing(error):
    before = threading.active_count()
    with pytest.raises(type(error)), Watchdog(0.01):
        raise error
    assert threading.active_count() == before
    watchdog.conclude()


class Job:
    """Two processes, of which this is one; how it ends, and what it says."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.store, self.said, self.status = Store(), [], None
        self.ended, self.over = threading.Event(), threading.Event()

    def watchdog(self, process, timeout=0.5):
        """As this process."""
        self.monkeypatch.setattr(jax, "process_index", lambda: process)
        return Watchdog(timeout)

    @contextlib.contextmanager
    def other(self, process, **changes):
        """The other process lives meanwhile; gives a function that changes the verdict of 0."""
        stop = threading.Event()

        def live():
            for number in itertools.count():
                beat = Beat(beat=number, where="there", step=1)
                what = beat if process else Verdict(beat, **changes)
                key = f"{watchdog._BEATS}/1" if process else f"{watchdog._VERDICT}/0"
                text = json.dumps(dataclasses.asdict(what))
                self.store.key_value_set(key, text, allow_overwrite=True)
                if stop.wait(0.05):
                    return

        thread = threading.Thread(target=live)
        thread.start()
        yield changes.update
        stop.set()
        thread.join()

    def end(self, status):
        """In place of os._exit: the threads of the watchdog do nothing more."""
        self.status = status
        watchdog._current._stop.set()
        self.ended.set()
        self.over.wait(30)

    def own_beat(self):
        """What this process, if it is 1, has said last."""
        return Beat(**json.loads(self.store.values[f"{watchdog._BEATS}/1"]))


@pytest.fixture
def job(monkeypatch):
    job = Job(monkeypatch)
    monkeypatch.setattr(_compat, "coordination_client", lambda: job.store)
    monkeypatch.setattr(_compat, "coordinator_address", lambda: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(watchdog, "_say", job.said.append)
    monkeypatch.setattr(watchdog, "_current", None)
    monkeypatch.setattr(watchdog.atexit, "register", lambda f: None)
    monkeypatch.setattr(watchdog.os, "_exit", job.end)
    monkeypatch.setattr(Watchdog, "_let_others_end", lambda self: None)
    monkeypatch.setattr(Watchdog, "_end_late", lambda self: None)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    yield job
    job.over.set()
    watchdog.conclude()


@pytest.mark.parametrize("process", [0, 1])
def test_the_other_is_silent(job, process):
    other = 1 - process
    with job.watchdog(process) as dog:
        dog.step(2)
        with job.other(other):
            assert not job.ended.wait(0.7)
        assert job.ended.wait(10)
    assert job.status == watchdog.EXIT_STATUS
    assert job.said[-1].startswith(f"process {other} (there) gave no sign of life for 0.")
    assert job.said[-1].endswith(
        f"last in step 1; process {process} waits for it in step 2 and ends"
    )


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("error", [None, SystemExit(0), SystemExit(None), GeneratorExit()])
def test_who_leaves_is_told_of_as_such(job, process, error):
    with job.other(1 - process):
        with contextlib.suppress(type(error or Exception())), job.watchdog(process):
            if error is not None:
                raise error
        watchdog.conclude()
    own = (
        job.own_beat() if process else Verdict.read(job.store.values[f"{watchdog._VERDICT}/0"]).own
    )
    assert (own.state, own.error, job.said, job.status) == ("left", "", [], None)
    assert process or Verdict.read(job.store.values[f"{watchdog._VERDICT}/0"]).last


def left_by(job, error, *, uncaught):
    """As process 1, which ends after an error left the watchdog."""
    with job.other(0):
        dog = job.watchdog(1)
        dog._interval = 0.05
        with contextlib.suppress(type(error)), dog:
            raise error
        time.sleep(0.3)
        assert job.own_beat().error  # Told soon, and the process may go on.
        assert not job.own_beat().state
        job.monkeypatch.setattr(sys, "last_value", error if uncaught else None, raising=False)
        watchdog.conclude()
    assert job.status is None


def test_an_error_that_nothing_catches_is_a_failure(job):
    left_by(job, KeyError("oh"), uncaught=True)
    assert (job.own_beat().state, job.own_beat().error) == ("failed", "KeyError: 'oh'")
    assert job.said == []


def test_an_exit_with_a_status_is_a_failure(job):
    left_by(job, SystemExit(3), uncaught=False)
    assert job.own_beat().state == "failed"


def test_an_error_that_is_caught_is_none(job):
    left_by(job, ValueError("oh"), uncaught=False)
    assert job.own_beat().state == "ended"
    assert job.said == []


@pytest.mark.parametrize("judged", ["answered", "last"])
def test_an_error_that_may_be_anothers_waits_until_all_were_heard_of(job, judged):
    dog = job.watchdog(1, 60.0)
    dog._interval = 0.05
    with job.other(0) as change:
        with contextlib.suppress(ValueError), dog:
            raise ValueError("bad key")
        change(answered=[(1, dog._failure - 1), (0, dog._failure)])
        job.monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
        ending = threading.Thread(target=watchdog.conclude)
        ending.start()
        ending.join(0.5)
        assert ending.is_alive()
        assert not job.own_beat().state
        change(**{"answered": {"answered": [(1, dog._failure)]}, "last": {"last": True}}[judged])
        ending.join(30)
        assert not ending.is_alive()
    assert (job.own_beat().state, job.status) == ("failed", None)
    assert job.said == [
        "process 1 failed (ValueError: bad key); before it ends it looks whether another process "
        "is missing"
    ]


def test_process_0_looks_too(job):
    with contextlib.suppress(RuntimeError), job.watchdog(0):
        with job.other(1):
            time.sleep(0.3)
        raise RuntimeError("connection closed")
    job.monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)
    watchdog.conclude()
    assert job.status == watchdog.EXIT_STATUS
    assert "process 1 (there) gave no sign of life" in job.said[-1]


def test_an_error_of_a_collective_ends_with_who_is_missing(job):
    with contextlib.suppress(RuntimeError), job.watchdog(1):
        with job.other(0):
            time.sleep(0.3)
        raise RuntimeError("connection closed")
    job.monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)
    watchdog.conclude()
    assert job.status == watchdog.EXIT_STATUS
    assert "process 0 (there) gave no sign of life" in job.said[-1]


def test_a_new_watchdog_follows_an_error(job):
    with job.other(0):
        for attempt in range(2):
            with contextlib.suppress(KeyError), job.watchdog(1) as dog:
                dog.step(attempt)
                time.sleep(0.3)
                if attempt == 0:
                    raise KeyError
    assert (job.own_beat().step, job.own_beat().state, job.own_beat().error) == (1, "left", "")


def test_an_error_of_the_watchdog_itself_is_said_and_ends_nothing(job):
    with job.watchdog(0), job.other(1):
        job.store.values[f"{watchdog._BEATS}/1"] = "no JSON"
        job.monkeypatch.setattr(job.store, "key_value_dir_get", lambda key: [("x/1", "no JSON")])
        assert not job.ended.wait(0.7)
    (said,) = job.said
    assert said.startswith("process 0 watches no more and is not watched, by an error of the watch")
    assert Verdict.read(job.store.values[f"{watchdog._VERDICT}/0"]).own.state == "left"


def test_nobody_is_missing_when_jax_distributed_was_shut_down(job):
    with job.watchdog(1, timeout=0.3), job.other(0):
        job.monkeypatch.setattr(_compat, "coordination_client", lambda: None)
        assert not job.ended.wait(0.7)
    assert job.said == []


def test_a_process_that_stood_still_blames_nobody(job):
    with job.other(0), job.watchdog(1) as dog:
        time.sleep(0.3)
        clock, stood = time.monotonic, [0.0]
        job.monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock() + stood[0])
        dog.step(3)
        time.sleep(0.3)
        stood[0] = 10.0
        assert not job.ended.wait(0.7)
    assert any("process 1 stood still for 10." in said for said in job.said)
    assert not any("sign of life" in said for said in job.said)


def test_results_that_are_awaited(job):
    class Array:
        ready = False

        def is_ready(self):
            return self.ready

        def is_deleted(self):
            return False

    array = Array()
    job.monkeypatch.setattr(jax, "live_arrays", lambda: [array])
    dog = job.watchdog(1)
    dog._own, dog._where, dog._thread_id = 1, "here", 0
    clock = [0.0]
    job.monkeypatch.setattr(watchdog.time, "monotonic", lambda: dog._advanced + clock[0])
    states = []
    for clock[0] in (0.1, 0.3, 0.6, 0.7):
        states.append((dog._beat().late, dog._beat().stuck))
        array.ready = clock[0] > 0.65
    assert states == [(False, False), (False, False), (True, True), (True, True)]
    assert not dog._beat().stuck
    # One that is computed only for a short time is not waited for.
    array.ready, dog._awaited = False, []
    assert dog._beat().late
    assert not dog._beat().stuck


def test_a_program_that_runs_in_the_thread_itself(job):
    job.monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    dog = job.watchdog(1, timeout=0.2)
    begun, go_on, done = (threading.Event() for _ in range(3))

    def work():
        dog._thread_id = threading.get_ident()
        begun.set()
        go_on.wait(30)
        done.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(30)
    dog._own, dog._where, dog._advanced = 1, "here", time.monotonic() - 1.0
    assert [dog._beat().stuck for _ in range(2)] == [True, True]
    go_on.set()
    time.sleep(0.1)
    assert not dog._beat().stuck
    done.set()
    thread.join()
