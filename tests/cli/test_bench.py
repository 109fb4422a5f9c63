"""`jax-ring bench`, as it is typed."""

import csv
import json
import os
import shlex
import subprocess
import sys

import jax
import pytest
from typer.testing import CliRunner

from jax_ring.bench.operands import Operands
from jax_ring.cli import app

jax.devices()  # Starts JAX with the devices of all tests, before --devices asks for fewer.
QUICK = "-n 2 -w 0 -b 4K -e 8K"


def run(line):
    # --devices sets XLA_FLAGS; the runner sets back what it was given.
    environment = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}
    return CliRunner().invoke(app, shlex.split(line), env=environment)


def test_a_table_of_what_was_asked_for(tmp_path):
    files = {name: tmp_path / f"r.{name}" for name in ("json", "csv")}
    options = " ".join(f"--{name} {path}" for name, path in files.items())
    result = run(f"bench --devices 2 {QUICK} --compare psum,recursive_doubling {options}")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("# jax-ring bench: all_reduce, 2 ranks, processes: 1, devices: 8 x ")
    assert ", jax 0." in lines[1]
    assert "load before" in lines[1]
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:5] for row in rows] == [
        [size, count, "float32", "sum", name]
        for size, count in (("4096", "1024"), ("8192", "2048"))
        for name in ("psum", "recursive_doubling")
    ]
    assert {(row[9], row[14]) for row in rows} == {("0", "0")}
    assert "# Out of bounds values : 0 OK" in lines
    assert lines[-2].startswith("# Avg bus bandwidth (recursive_doubling) : ")
    found = json.loads(files["json"].read_text())
    assert [r["case"] for r in found["results"]] == [row[4] for row in rows]
    assert found["about"]["versions"]["jax"] in lines[1]
    assert found["about"]["devices"]["count"] == 8
    assert len(list(csv.DictReader(files["csv"].read_text().splitlines()))) == 4


def test_auto_says_what_it_chose():
    result = run(f"bench --devices 4 {QUICK} --collective reduce_scatter -o max -d double -c 0")
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if not line.startswith("#")]
    assert "128   float64    max auto: " in rows[0]
    assert rows[0].split()[-6:] == ["N/A"] * 6


def test_a_wrong_result_is_an_exit_status(monkeypatch):
    of_rank = Operands.of_rank

    def off_by_one(self, rank, count):
        values = of_rank(self, rank, count)
        values[:3] += rank
        return values

    monkeypatch.setattr(Operands, "of_rank", off_by_one)
    result = run("bench --devices 2 -n 1 -w 0 -b 4K -e 4K --algorithm recursive_doubling")
    assert result.exit_code == 1
    # Three elements, on two ranks, out of place and in place.
    assert "# Out of bounds values : 12 FAILED" in result.stdout


def test_one_rank_is_told_how_to_get_more():
    result = run("bench --devices 1 -n 1 -w 0 -b 4 -e 4")
    assert result.exit_code == 0
    assert "# one rank has nobody to talk to: see --devices, or jax-ring run" in result.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-b 4Q", "-b: a size must end in a unit"),
        ("-b 2M -e 1M", "-b must be above 0 and at most -e, got 2M and 1M"),
        ("-f 1", "-f must be above 1, got 1"),
        ("-i 0", "-i must be at least 1 byte, got 0"),
        ("-n 0", "-n must be at least 1, got 0"),
        ("-w -1", "-w must be at least 0, got -1"),
        ("-m 0", "-m must be at least 1, got 0"),
        ("-c -1", "-c must be at least 0, got -1"),
        ("-d floaty", "--datatype: a dtype must be a name"),
        ("-d complex64", "--datatype: complex64 has no exact check"),
        ("-o median", "op must be one of sum, prod, max, min, mean, got 'median'"),
        ("--algorithm rnig", "no all_reduce 'rnig': there are auto, ring, "),
        ("--compare psum,rnig", "no all_reduce 'rnig': there are auto, ring, "),
        ("--wire int3", "wire must be None, a WireFormat or"),
        ("--compare ring+int3", "wire must be None, a WireFormat or"),
        ("--devices 0", "--devices must be at least 1, got 0"),
        ("--devices 9", "--devices 9: process 0 has 8 cpu devices"),
        ("--json /nowhere/r.json", "/nowhere/r.json: there is no folder /nowhere"),
        ("--plot r.bmp", "cannot draw into 'r.bmp'"),
        ("--plot r.png -e 4K", "--plot needs at least two sizes"),
        ("-o prod --devices 2 --compare psum -e 4K", "lax has no all_reduce by prod"),
        ("--wire int8 -d int32 --devices 2 -e 4K", "wire"),
    ],
)
def test_errors_are_one_line(line, message):
    result = run(f"bench {line}")
    assert result.exit_code == 2
    said = result.stderr.splitlines()
    assert len(said) == 1
    assert said[0].startswith("jax-ring bench: ")
    assert message in said[0]


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "jax_ring", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_devices_are_made_before_jax_starts():
    result = command("bench", "--devices", "3", *shlex.split(QUICK))
    assert result.returncode == 0, result.stderr
    assert "all_reduce, 3 ranks, processes: 1, devices: 3 x cpu" in result.stdout


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_of_jax_ring_run_measure_together(tmp_path):
    bench = f"bench --devices 2 {QUICK} --compare psum,hierarchical,host_ring"
    result = command(
        *("run", "-n", "2", "--", sys.executable, "-W", "ignore", "-m", "jax_ring"),
        *shlex.split(bench),
        *("--json", str(tmp_path / "r.json")),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("4 ranks, processes: 2") == 1  # By the first process only.
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["ranks"], found["wrong"], len(found["results"])) == (4, 0, 6)


@pytest.mark.slow
def test_a_mistake_of_the_launcher_is_one_line():
    result = command("bench", JAX_RING_PROCESSES="2", JAX_RING_PROCESS="x")
    assert result.returncode == 2
    assert result.stderr.startswith("jax-ring bench: jax_ring.distributed: JAX_RING_PROCESS must")
    assert result.stderr.count("\n") == 1
