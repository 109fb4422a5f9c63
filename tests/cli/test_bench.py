"""`jax-ring bench`, as it is typed."""

import contextlib
import csv
import json
import os
import shlex
import subprocess
import sys

import jax
import pytest
from typer.testing import CliRunner

from jax_ring.bench.measure import Bench
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
    assert "# Out of bounds values : N/A, nothing was checked" in result.stdout


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
        ("--json .", ".: a folder, not a file"),
        ("--csv /proc/r.csv", "/proc/r.csv: No such file or directory"),
        ("--trace /proc/trace", "/proc/trace: No such file or directory"),
        ("--plot r.png -b 4 -e 7 -i 1", "--plot needs at least two sizes that differ"),
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


def sizes_in(path):
    return [row["size"] for row in json.loads(path.read_text())["results"]]


def test_sizes_of_as_many_elements_are_measured_once(tmp_path):
    path = tmp_path / "r.json"
    result = run(f"bench --devices 2 -n 1 -w 0 -b 1 -e 9 -i 1 --algorithm psum --json {path}")
    assert result.exit_code == 0
    assert sizes_in(path) == [4, 8]


@pytest.mark.parametrize(
    ("failure", "status"),
    [(MemoryError("no room"), 1), (KeyboardInterrupt(), 130), (OSError("a full disk"), 2)],
)
def test_what_was_measured_before_a_failure_is_written(failure, status, monkeypatch, tmp_path):
    measure = Bench.measure
    files = [tmp_path / name for name in ("r.json", "r.csv", "r.png")]

    def fail_at_16k(self, cases, nbytes, rounds, **how):
        if nbytes == 16384:
            # Not only in the end: the process might have been killed.
            assert sizes_in(files[0]) == [4096, 8192]
            raise failure
        return measure(self, cases, nbytes, rounds, **how)

    monkeypatch.setattr(Bench, "measure", fail_at_16k)
    asked = "--json {} --csv {} --plot {}".format(*files)
    result = run(f"bench --devices 2 -n 1 -w 0 -b 4K -e 16K --algorithm psum {asked}")
    assert result.exit_code == status
    assert sizes_in(files[0]) == [4096, 8192]
    assert len(list(csv.DictReader(files[1].read_text().splitlines()))) == 2
    assert files[2].stat().st_size > 1000


def test_a_trace_that_fails_costs_nothing_that_was_measured(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise OSError("no room for a profile")

    monkeypatch.setattr(Bench, "trace", fail)
    asked = f"--json {tmp_path / 'r.json'} --trace {tmp_path / 'trace'}"
    result = run(f"bench --devices 2 {QUICK} --algorithm psum {asked}")
    assert (result.exit_code, result.stderr) == (2, "jax-ring bench: no room for a profile\n")
    assert sizes_in(tmp_path / "r.json") == [4096, 8192]


def test_what_is_no_file_is_written_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        result = run(f"bench --devices 2 {QUICK} --algorithm psum --json {pipe}")
        assert result.exit_code == 0
        assert len(json.loads(reader.communicate(timeout=60)[0])["results"]) == 2


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_is_live_where_it_fits(width, monkeypatch):
    module = sys.modules["jax_ring.cli.bench"]
    shown = []

    @contextlib.contextmanager
    def live(report, steps):
        shown.append(report)
        yield lambda what: None, lambda: None

    monkeypatch.setattr(module, "is_terminal", lambda: True)
    monkeypatch.setattr(module, "_live", live)
    monkeypatch.setenv("COLUMNS", str(width))
    result = run(f"bench --devices 2 {QUICK} --algorithm psum")
    lines = [line for line in result.stdout.splitlines() if line.split()[0] == "4096"]
    assert (len(shown), len(lines)) == ((0, 1) if width == 80 else (1, 0))


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
    for name in ("0/out", "1"):  # Only the first process needs a folder for what it writes.
        (tmp_path / name).mkdir(parents=True)
    jax_ring = shlex.join((sys.executable, "-W", "ignore", "-m", "jax_ring"))
    bench = f"bench --devices 2 {QUICK} --compare psum,hierarchical,host_ring"
    bench += f" --json out/r.json --trace {tmp_path / 'trace'}"
    script = f'cd {tmp_path}/"$JAX_RING_PROCESS" && exec {jax_ring} {bench}'
    result = command("run", "-n", "2", "--", "sh", "-c", script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("4 ranks, processes: 2") == 1  # By the first process only.
    found = json.loads((tmp_path / "0/out/r.json").read_text())
    assert (found["ranks"], found["wrong"], len(found["results"])) == (4, 0, 6)
    traces = [
        path.relative_to(tmp_path / "trace") for path in tmp_path.glob("trace/**/*.xplane.pb")
    ]
    assert sorted(path.parts[:2] for path in traces) == [
        (f"{size}B", f"process{i}") for size in (4096, 8192) for i in (0, 1)
    ]


@pytest.mark.slow
def test_a_mistake_of_the_launcher_is_one_line():
    result = command("bench", JAX_RING_PROCESSES="2", JAX_RING_PROCESS="x")
    assert result.returncode == 2
    assert result.stderr.startswith("jax-ring bench: jax_ring.distributed: JAX_RING_PROCESS must")
    assert result.stderr.count("\n") == 1
