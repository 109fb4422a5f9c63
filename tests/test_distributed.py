"""How processes find each other, that they are told what is wrong, and that none is waited for."""

import collections
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from coordination import Store
from harness import mesh
from jax.sharding import PartitionSpec as P
from processes import finish, free_port, start

import jax_ring
from jax_ring import _compat, distributed, rollcall
from jax_ring.choose import Link, save_tuning
from jax_ring.distributed import check_consistency, find, launched
from jax_ring.schedules import ring
from jax_ring.watchdog import EXIT_STATUS

WHERE = {"JAX_RING_COORDINATOR": "node1:1234"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", **WHERE}, "node1:1234"),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", **WHERE}, "node1:1234"),
        (
            {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
            "10.0.0.1:29500",
        ),
        (
            {
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_PROCID": "3",
                "SLURM_JOB_ID": "4097",
                "SLURM_STEP_NODELIST": "node[017-019,40],other",
            },
            "node017:61441",
        ),
        # srun speaks PMI as well.
        (
            {
                "PMI_SIZE": "4",
                "PMI_RANK": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_PROCID": "3",
                "SLURM_JOB_ID": "4097",
                "SLURM_STEP_NODELIST": "node[017-019,40],other",
            },
            "node017:61441",
        ),
        (
            {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "fe80::1", "MASTER_PORT": "29500"},
            "[fe80::1]:29500",
        ),
        # Half of what torchrun sets is somebody else's.
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "RANK": "0", **WHERE}, "node1:1234"),
        ({"JAX_RING_PROCESSES": "4", "JAX_RING_PROCESS": "3", **WHERE}, "node1:1234"),
        # mpirun in a Slurm job: Slurm counts nodes.
        (
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "0",
                "PMI_SIZE": "4",
                "PMI_RANK": "3",
                **WHERE,
            },
            "node1:1234",
        ),
    ],
)
def test_what_launchers_say(environment, found):
    place = find(environment)
    assert (place.coordinator, place.processes, place.process) == (found, 4, 3)
    assert launched(environment)


def test_arguments_come_first():
    place = find({"PMI_SIZE": "4", "PMI_RANK": "3"}, coordinator="a:1", processes=2, process=1)
    assert (place.coordinator, place.processes, place.process) == ("a:1", 2, 1)


@pytest.mark.parametrize(
    "environment",
    [{"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, {"RANK": "0"}],
)
def test_a_batch_script_and_a_stray_variable_are_no_job(environment):
    assert not launched(environment)


def test_what_variables_say_does_not_matter_where_all_is_given():
    contradictory = {"PMI_SIZE": "2", "PMI_RANK": "0", "WORLD_SIZE": "4", "RANK": "0"}
    assert find(contradictory, coordinator="a:1", processes=2, process=1).source == "arguments"


@pytest.mark.parametrize("name", ["processes", "process"])
def test_a_number_is_an_integer(name):
    numbers = {"processes": 2, "process": 1, name: "1"}
    with pytest.raises(TypeError, match=f"{name} must be an int, got '1'"):
        find({}, coordinator="a:1", **numbers)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan")])
def test_a_timeout_is_a_time(timeout):
    with pytest.raises(ValueError, match="timeout must be more than 0 and at most 1e6 s, got"):
        distributed.initialize("127.0.0.1:1", 2, 1, timeout=timeout)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "nothing says processes and process"),
        ({"PMI_RANK": "1"}, r"PMI_RANK is set, but PMI_SIZE \(PMI\) is missing"),
        ({"PMI_SIZE": "x", "PMI_RANK": "1"}, "PMI_SIZE must be an integer .*'x'"),
        ({"PMI_SIZE": "2", "PMI_RANK": "2", **WHERE}, "process must be .* got process 2 of 2"),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0", "WORLD_SIZE": "4", "RANK": "0"},
            "PMI says process 0 of 2, but torchrun says process 0 of 4",
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "set JAX_RING_COORDINATOR=host:port"),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0", "JAX_RING_COORDINATOR": "node1"},
            "coordinator must be host:port, .*got 'node1'",
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0", "JAX_RING_COORDINATOR": "::1:12"},
            "an IPv6 address in brackets, got '::1:12'",
        ),
    ],
)
def test_what_is_missing_or_contradictory_is_said(environment, message):
    with pytest.raises(ValueError, match=message):
        find(environment)


HELLO = {"process": 1, "processes": 2, "where": "here", "jax": "1", "jax_ring": "1"}


@pytest.fixture
def roll_call():
    """Process 0 of two, which hears at most 20 s and then says that something is wrong."""
    port, got = free_port(), []

    def process_0():
        calls = rollcall.take(port, 2, 20.0)
        got.extend(said for _, said in calls)
        rollcall.answer(calls, "what is wrong")

    thread = threading.Thread(target=process_0, daemon=True)
    thread.start()
    yield port, got
    thread.join(20)
    assert not thread.is_alive()


def connect(port, host="127.0.0.1"):
    """A connection to process 0, which may still be about to listen."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, port), 5.0)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    "said",
    [
        b"PRI * HTTP/2.0\r\n\n",
        b"",
        b'{"process": "a"}\n',
        json.dumps({**HELLO, "process": "1"}).encode() + b"\n",
        json.dumps({**HELLO, "where": None}).encode() + b"\n",
    ],
)
def test_a_stranger_at_the_roll_call_is_passed_over(roll_call, said):
    port, got = roll_call
    with connect(port) as stranger:
        stranger.sendall(said)
    assert rollcall.call(("127.0.0.1", port), HELLO, 20.0) == "what is wrong"
    assert got == [HELLO]


def test_a_stranger_who_does_not_end_holds_nobody_up(roll_call):
    port, got = roll_call
    with connect(port) as stranger:
        stranger.sendall(b"x")
        # Heard while the other one is on the line.
        assert rollcall.call(("127.0.0.1", port), HELLO, 20.0) == "what is wrong"
        assert got == [HELLO]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_the_roll_is_called_over_ipv6(roll_call):
    port, got = roll_call
    try:
        connect(port, "::1").close()
    except OSError:
        connect(port).close()
        rollcall.call(("127.0.0.1", port), HELLO, 20.0)
        pytest.skip("IPv6 is switched off")
    assert rollcall.call(("::1", port), HELLO, 20.0) == "what is wrong"
    assert got == [HELLO]


def test_nobody_answers():
    with pytest.raises(TimeoutError, match="refused"):
        rollcall.call(("127.0.0.1", free_port()), {"process": 1}, 0.2)


def test_one_process_is_consistent():
    f = jax.shard_map(lambda x: jax_ring.psum(x, "x"), mesh=mesh(2), in_specs=P("x"), out_specs=P())
    check_consistency(f, jnp.ones(2))


@pytest.fixture
def as_two_processes(monkeypatch):
    """Checks one function and then another, as if two processes did."""

    def check(first, second, settings=({}, {})):
        said = []
        monkeypatch.setattr(
            distributed, "exchanged", lambda what, own, timeout: said.append(own) or said
        )
        for f, changes in zip((first, second), settings, strict=True):
            whole = jax.shard_map(f, mesh=mesh(2), in_specs=P("x"), out_specs=P("x"))
            with jax_ring.config(**changes):
                check_consistency(whole, jnp.ones((2, 4), jnp.bfloat16))

    return check


def psum(**how):
    return lambda v: jax.lax.pcast(jax_ring.psum(v, "x", **how), "x", to="varying")


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ({"algorithm": "ring"}, {"algorithm": "direct"}, "by ring .*; .* by direct "),
        ({"wire": "int8"}, {"wire": "bfloat16"}, "sent as int8 .*; .* sent as bfloat16"),
        ({}, {"reduce_dtype": jnp.float32}, "by ring .*; .* with sums in float32"),
        (
            {"algorithm": ring(2)},
            {"algorithm": ring(2, channels=2)},
            "of 2 chunks .*; .* of 4 chunks on 2 channels ",
        ),
        ({"algorithm": ring(2)}, {"algorithm": ring(2, segments=3)}, "of 2 chunks.* of 6 chunks"),
    ],
)
def test_what_decides_the_program_is_compared(as_two_processes, first, second, difference):
    with pytest.raises(RuntimeError, match=f"differ in collective 1: process 0 .*{difference}"):
        as_two_processes(*(psum(**{"algorithm": "ring"} | how) for how in (first, second)))


def test_tuning_files_are_compared_by_what_they_say(as_two_processes, tmp_path):
    a, b, other = (str(tmp_path / name) for name in ("a.json", "b.json", "other.json"))
    save_tuning(a, {"gloo": Link(alpha=1e-3, beta=1e-9, source="here")})
    save_tuning(b, {"gloo": Link(alpha=1e-3, beta=1e-9, source="there")})
    save_tuning(other, {"gloo": Link(alpha=2e-3, beta=1e-9)})
    f = psum(algorithm="ring")
    as_two_processes(f, f, settings=({"tuning": a}, {"tuning": b}))
    for first, second in ((a, other), (None, a)):
        message = "differ in the tuning: process 0 has prices .* from .*; process 1 has prices .*"
        with pytest.raises(RuntimeError, match=message + re.escape(second)):
            as_two_processes(f, f, settings=({"tuning": first}, {"tuning": second}))


def test_who_comes_after_a_timeout_finds_nothing_old(monkeypatch):
    store = Store()
    monkeypatch.setattr(_compat, "coordination_client", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    # Alone, process 0 finds nobody; process 1 comes when it has gone.
    for process, other in ((0, 1), (1, 0)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        monkeypatch.setattr(distributed, "_turns", collections.defaultdict(itertools.count))
        with pytest.raises(TimeoutError, match=f"process {other} did not say its collectives"):
            distributed.exchanged("collectives", "[]", 0.1)
        assert store.values == {}


# --- several processes ----------------------------------------------------------------------------


JOIN = """
import jax, jax_ring
jax_ring.distributed.initialize(timeout=6)
"""


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ids": [0, 1, 1]}, r"two processes have id 1: .*, pid \d+ and .*, pid \d+"),
        ({"ids": [0, 1]}, r"of 3 processes \[2\] did not come within 6 s"),
        ({"ids": [1]}, "process 1 did not reach process 0 at 127.0.0.1:"),
        ({"count": [3, 3, 4]}, "different numbers of processes: process 0 .* 3, .*process 2 .* 4"),
        ({"devices": [1, 2, 1]}, "process 0 has 1, process 1 has 2, process 2 has 1"),
    ],
)
def test_a_job_that_is_wrong_is_told_to_all(how, message):
    for status, _, errors in finish(start(JOIN, 3, **how)):
        assert status == 1
        assert re.search(message, errors), errors[-2000:]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_other_versions_are_told_to_all():
    code = "import os, jax_ring; jax_ring.__version__ += os.environ['JAX_RING_PROCESS']\n" + JOIN
    for status, _, errors in finish(start(code, 2)):
        assert status == 1
        assert "different versions of jax_ring: process 0 (" in errors


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_first_difference_is_told_with_both_lines(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import jax, jax.numpy as jnp, jax_ring
            from jax.sharding import Mesh, PartitionSpec as P
            jax_ring.distributed.initialize(timeout=30)
            def f(x):
                x = jax_ring.psum(x, "x")
                if jax.process_index() == 1:
                    return jax_ring.pmax(x, "x")
                return jax_ring.pmin(x, "x")
            g = jax.shard_map(f, mesh=Mesh(jax.devices(), "x"), in_specs=P("x"), out_specs=P())
            jax_ring.distributed.check_consistency(g, jax.ShapeDtypeStruct((4, 3), jnp.float32))
            """
        )
    )
    code = f"import runpy; runpy.run_path({str(program)!r})"
    for status, _, errors in finish(start(code, 2)):
        assert status == 1
        assert re.search(
            r"differ in collective 2: process 0 has pmin of float32\[2, 3\] .*program.py:9; "
            r"process 1 has pmax .*program.py:8",
            errors,
        ), errors[-2000:]


STEPS = """
import os, signal, sys, time, jax, jax.numpy as jnp, numpy as np, jax_ring
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax_ring.distributed.initialize(timeout=60)
mesh = Mesh(jax.devices(), "x")
x = jax.make_array_from_callback((4, 8), NamedSharding(mesh, P("x")), lambda i: np.ones((4, 8))[i])
f = jax.jit(jax.shard_map(lambda v: jax_ring.psum(v, "x") / 4, mesh=mesh, in_specs=P("x"),
                          out_specs=P("x"), check_vma=False))
with jax_ring.distributed.watchdog(timeout=4) as dog:
    for step in range(10_000):
        dog.step(step)
        x = jax.block_until_ready(f(x))
        if step == 20:
            time.sleep(2)
            if jax.process_index() == int(os.environ["VICTIM"]):
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        time.sleep(0.01)
"""


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_every_survivor_ends_and_names_who_is_missing(number, victim):
    started = start(STEPS, 4, VICTIM=str(victim), SIGNAL=str(int(number)))
    missing = started.pop(victim)
    try:
        for status, _, errors in finish(started, timeout=60):
            assert status != 0
            assert f"jax_ring.watchdog: process {victim} (" in errors, errors[-3000:]
            if number == signal.SIGSTOP:
                assert status == EXIT_STATUS
    finally:
        missing.kill()
        missing.communicate(timeout=30)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_an_error_in_one_process_ends_the_others():
    code = STEPS.replace('os.kill(os.getpid(), int(os.environ["SIGNAL"]))', "raise KeyError('oh')")
    for process, (status, _, errors) in enumerate(finish(start(code, 2, VICTIM="1"))):
        assert status != 0
        if process == 0:
            assert "jax_ring.watchdog: process 1 (" in errors
            assert ") failed (KeyError: 'oh'), last in step 20; process 0 waits" in errors
        else:
            assert "KeyError: 'oh'" in errors


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_under_mpirun(flavour):
    command = shutil.which(f"mpirun.{flavour}")
    if command is None:
        pytest.skip(f"{flavour} is not installed")
    # Written at once: MPICH mixes the lines of processes.
    code = JOIN + "import os\nos.write(1, b'%d %d\\n' % (jax.process_index(), jax.device_count()))"
    root = ["--allow-run-as-root", "--oversubscribe"] if flavour == "openmpi" else []
    result = subprocess.run(
        [command, *root, "-n", "2", sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert sorted(result.stdout.splitlines()) == ["0 2", "1 2"]
