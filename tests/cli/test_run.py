"""`jax-ring run`, as it is typed, with small programs that need no JAX."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jax_ring.distributed import find
from jax_ring.launch import MALLOC_TUNING, Job, on_cpu

JOB = Job(("python", "train.py"), 4)


def start(*arguments, program, **options):
    command = [sys.executable, "-W", "ignore", "-m", "jax_ring", "run", *arguments, "--"]
    if isinstance(program, str):
        program = ["sh", "-c", program]
    return subprocess.Popen(
        command + program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        **options,
    )


def run(*arguments, program):
    started = start(*arguments, program=program)
    try:
        out, err = started.communicate(timeout=60)
    finally:
        started.kill()
    return started.returncode, out, err


def line_of(started):
    """The first line of output: from then on the processes run."""
    return started.stdout.readline()


def test_each_process_learns_who_it_is():
    found = [JOB.environment({"HOME": "/root"}, process, 4567) for process in range(4)]
    for process, variables in enumerate(found):
        rank = str(process)
        assert variables["JAX_RING_PROCESS"] == variables["RANK"] == variables["LOCAL_RANK"] == rank
        assert variables["JAX_RING_PROCESSES"] == variables["WORLD_SIZE"] == "4"
        assert variables["LOCAL_WORLD_SIZE"] == "4"
        assert variables["JAX_RING_COORDINATOR"] == "127.0.0.1:4567"
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", "4567")
        assert variables["HOME"] == "/root"
        assert "XLA_FLAGS" not in variables


def test_memory_is_kept_on_cpu_unless_the_user_says_otherwise():
    cpu = {"JAX_PLATFORMS": "cpu"}
    assert JOB.tuning(cpu) == MALLOC_TUNING
    assert Job(("x",), 1, malloc_tuning=False).tuning(cpu) == {}
    assert JOB.tuning({"JAX_PLATFORMS": "cuda"}) == {}
    own = JOB.environment({**cpu, "MALLOC_ARENA_MAX": "3"}, 0, 1)
    assert own["MALLOC_ARENA_MAX"] == "3"
    assert not on_cpu({"JAX_PLATFORMS": "tpu,cpu"})


def test_what_started_the_launcher_is_not_said_of_the_processes():
    mpi = {"PMI_SIZE": "1", "PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "0"}
    found = JOB.environment({**mpi, "OMPI_MCA_btl": "tcp,self"}, 2, 4567)
    assert not mpi.keys() & found.keys()
    assert found["OMPI_MCA_btl"] == "tcp,self"
    assert find(found).process == 2


@pytest.mark.parametrize("name", ["PYTHONUNBUFFERED", "JAX_ENABLE_PREEMPTION_SERVICE"])
def test_output_is_seen_and_sigterm_ends_unless_the_user_says_otherwise(name):
    assert JOB.environment({}, 0, 1)[name] == {"P": "1", "J": "0"}[name[0]]
    assert JOB.environment({name: "own"}, 0, 1)[name] == "own"


def test_a_grace_time_is_a_time():
    with pytest.raises(ValueError, match="the grace time must be at least 0 seconds, got nan"):
        Job(("x",), 1, grace_s=float("nan"))


def test_output_is_prefixed_line_by_line_and_streams_are_kept_apart():
    program = 'for i in 1 2 3; do echo "out $i"; echo "err $i" >&2; done; printf "no newline"'
    status, out, err = run("-n", "3", program=program)
    assert status == 0
    for process in range(3):
        own = [line for line in out.splitlines() if line.startswith(f"[{process}] ")]
        assert own == [f"[{process}] {text}" for text in ("out 1", "out 2", "out 3", "no newline")]
        assert f"[{process}] err 2" in err.splitlines()
    assert len(out.splitlines()) == 12
    told = [line for line in err.splitlines() if line.startswith("jax-ring run: ")]
    assert len(told) == 1
    assert all(f"{name}={value}" in told[0] for name, value in MALLOC_TUNING.items())


@pytest.mark.multiprocess
@pytest.mark.slow
def test_long_lines_of_two_processes_are_not_mixed():
    code = "import os; print(os.environ['RANK'] * 300_000); print('end')"
    status, out, _ = run("-n", "2", program=[sys.executable, "-S", "-c", code])
    assert status == 0
    expected = [f"[{r}] {text}" for r in "01" for text in (r * 300_000, "end")]
    assert sorted(out.splitlines()) == sorted(expected)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "status", "how"),
    [
        ("exit 5", 5, "status 5"),
        ("exit 255", 255, "status 255"),
        ("kill -KILL $$", 137, "killed by SIGKILL"),
    ],
)
def test_the_first_failure_stops_the_others_and_is_the_status(failure, status, how):
    program = f'if [ "$RANK" = 1 ]; then {failure}; fi; sleep 300'
    began = time.monotonic()
    found, _, err = run("-n", "3", program=program)
    assert found == status
    assert time.monotonic() - began < 60
    assert f"jax-ring run: process 1 failed ({how}); stopping the others" in err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_who_does_not_stop_is_killed_after_the_grace_time():
    program = 'trap "" TERM; [ "$RANK" = 1 ] && sleep 1 && exit 4; while :; do sleep 1; done'
    status, _, err = run("-n", "2", "--grace", "0.5", program=program)
    assert status == 4
    assert "still running after 0.5 s, killed: [0]" in err


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded(number):
    name = number.name.removeprefix("SIG")
    program = f'trap "echo caught; exit 9" {name}; echo ready; while :; do sleep 0.1; done'
    started = start("-n", "2", program=program)
    try:
        assert line_of(started).endswith("ready\n")
        assert line_of(started).endswith("ready\n")
        started.send_signal(number)
        out, _ = started.communicate(timeout=60)
    finally:
        started.kill()
    assert started.returncode == 9
    assert sorted(out.splitlines()) == ["[0] caught", "[1] caught"]


JOIN = """
import os, sys, time, jax, jax_ring
jax_ring.distributed.initialize(timeout=60)
"""


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_in_one_jax_process_ends_the_job(victim):
    code = f"if jax.process_index() == {victim}: raise KeyError('oh')\ntime.sleep(300)"
    status, _, err = run("-n", "2", program=[sys.executable, "-W", "ignore", "-c", JOIN + code])
    assert status == 1
    assert f"[{victim}] KeyError: 'oh'" in err.splitlines()
    assert f"process {victim} failed (status 1); stopping the others" in err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_sigterm_ends_jax_processes_whose_printing_was_seen():
    code = JOIN + "print('ready')\ntime.sleep(300)"
    started = start("-n", "2", program=[sys.executable, "-W", "ignore", "-c", code])
    try:
        assert {line_of(started), line_of(started)} == {"[0] ready\n", "[1] ready\n"}
        started.send_signal(signal.SIGTERM)
        _, err = started.communicate(timeout=60)
    finally:
        started.kill()
    assert started.returncode == 143
    assert "killed" not in err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_reader_that_stalls_holds_up_no_signal():
    program = "echo $$ >&2; exec yes"
    started = start("-n", "1", "--no-malloc-tuning", program=program)
    try:
        assert started.stderr.readline().startswith("[0] ")
        time.sleep(1)  # Until the pipe, which nobody reads, is full.
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=30)
    finally:
        started.kill()
        started.communicate(timeout=30)
    assert started.returncode == 143


@pytest.mark.multiprocess
@pytest.mark.slow
def test_who_is_left_behind_is_not_waited_for():
    status, out, err = run("-n", "1", program="echo done; setsid sleep 20 & exit 0")
    assert (status, out) == (0, "[0] done\n")
    assert "killed" not in err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_without_prefix_output_is_as_it_was():
    program = r'printf "1\r2\r\n{\n}"'
    status, out, _ = run("-n", "1", "--no-prefix", program=program)
    assert status == 0
    assert out == "1\n2\n{\n}"  # Read as text, in which Python has newlines only.


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_processes_die_with_a_launcher_that_is_killed():
    started = start("-n", "1", program="echo $$; while :; do sleep 0.1; done")
    pid = int(line_of(started).split()[-1])
    started.kill()
    started.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while _runs(pid):
        assert time.monotonic() < deadline, f"{pid} outlived its launcher"
        time.sleep(0.05)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.multiprocess
@pytest.mark.slow
def test_nobody_reads_the_output_any_more():
    started = start("-n", "2", program="while :; do echo more; sleep 0.01; done")
    line_of(started)
    started.stdout.close()
    started.stdout = None
    started.communicate(timeout=60)
    assert started.returncode == 141


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "program", "status", "message"),
    [
        (["-n", "0"], ["ls"], 2, "jax-ring run: at least 1 process is needed, got 0"),
        (["-n", "1", "-d", "0"], ["ls"], 2, "jax-ring run: devices per process must be at least 1"),
        (["-n", "1", "--grace", "-1"], ["ls"], 2, "jax-ring run: the grace time must be at least"),
        (["-n", "1"], [], 2, "jax-ring: Missing argument 'command'"),
        (["-n", "1"], ["no-such-program"], 127, "jax-ring run: no-such-program: No such file"),
        (["-n", "1"], ["/etc"], 126, "jax-ring run: /etc: Permission denied"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, program, status, message):
    found, _, err = run(*arguments, program=program)
    assert found == status
    assert message in err
    assert "Traceback" not in err
