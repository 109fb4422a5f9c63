"""`jax-ring doctor`, as it is typed."""

import json
import os
import shlex
import subprocess
import sys

import jax
import pytest
from typer.testing import CliRunner

from jax_ring import doctor
from jax_ring.cli import app
from jax_ring.doctor import Check

jax.devices()  # Starts JAX with the devices of all tests, before --devices asks for fewer.


@pytest.fixture
def checks(monkeypatch):
    found = [Check("all_reduce", "ring", 0)]
    monkeypatch.setattr(doctor, "self_test", lambda mesh, progress: iter(found))
    monkeypatch.setattr(doctor, "_page_faults", lambda nbytes: 0.0)
    return found


def run(*arguments):
    environment = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}
    return CliRunner().invoke(app, ["doctor", *arguments], env=environment)


def test_a_report_for_people(checks):
    result = run("--devices", "2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for section in ("versions", "native", "devices", "topology", "tuning", "allocator"):
        assert section in lines
    assert f"  jax: {jax.__version__}" in lines
    assert "  used: 2" in lines
    assert "  all_reduce     ring                 ok" in lines
    assert "verdict: healthy: 1 of 1 self-tests are right" in lines
    (note,) = (line for line in lines if "default prices" in line)
    assert note.strip()[1:] == (
        '. note: "auto" reckons with default prices, which were not measured here'
    )


def test_a_report_for_programs(checks):
    result = run("--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["healthy"], found["facts"]["devices"]["used"]) == (True, 8)
    assert found["self_test"] == [
        {"collective": "all_reduce", "algorithm": "ring", "wrong": 0, "error": ""}
    ]


def test_what_is_broken_is_an_exit_status(checks):
    checks.append(Check("all_reduce", "direct", 2))
    result = run()
    assert result.exit_code == 1
    assert "  all_reduce     direct               WRONG: 2 elements" in result.stdout
    assert "  1. problem: all_reduce by direct fails: 2 elements are wrong" in result.stdout


def test_a_mistake_is_one_line(checks):
    result = run("--devices", "0")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "jax-ring doctor: --devices must be at least 1, got 0\n"


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "jax_ring", *arguments],
        env={**os.environ, "XLA_FLAGS": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_all_of_it_without_a_gpu():
    result = command("doctor", "--devices", "4", "--json", JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["facts"]["devices"]["platform"] == "cpu"
    assert found["facts"]["allocator"]["page faults per call of 64 MiB"] is not None
    assert len(found["self_test"]) == 20


@pytest.mark.slow
def test_a_platform_that_is_not_there():
    result = command("doctor", JAX_PLATFORMS="nonsense")
    assert result.returncode == 1
    assert "1. problem: no devices: " in result.stdout
    assert "Traceback" not in result.stderr
    result = command("bench", JAX_PLATFORMS="nonsense")
    assert result.returncode == 2
    assert result.stderr.startswith("jax-ring bench: JAX does not start (")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_are_seen():
    doctor_ = (sys.executable, "-W", "ignore", "-m", "jax_ring", "doctor", "--devices", "2")
    result = command("run", "-n", "2", "--", *doctor_, JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("verdict: healthy") == 1
    assert "[0]   source: jax-ring run" in result.stdout
    assert "[0]   processes: 2" in result.stdout


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_problem_of_one_process_is_told():
    doctor_ = shlex.join((sys.executable, "-W", "ignore", "-m", "jax_ring", "doctor"))
    script = f'[ "$JAX_RING_PROCESS" = 0 ] || export JAX_RING_UNROLL=0; exec {doctor_}'
    result = command("run", "-n", "2", "--", "sh", "-c", script, JAX_PLATFORMS="cpu")
    assert result.returncode == 1
    assert "[0] verdict: not healthy: 1 problem(s)" in result.stdout
    assert "[0]   1. problem: process 1: unroll (JAX_RING_UNROLL) must be" in result.stdout
    assert "[0]   not run" in result.stdout


@pytest.mark.slow
def test_half_a_place_is_no_lack_of_devices():
    result = command("doctor", JAX_PLATFORMS="cpu", JAX_RING_PROCESS="0")
    assert result.returncode == 1
    assert "JAX_RING_PROCESSES (jax-ring run) is missing" in result.stdout
    assert "no devices" not in result.stdout
