"""`jax-ring tune`, as it is typed."""

import json
import os
import shlex
import subprocess
import sys

import jax
import pytest
from typer.testing import CliRunner

from jax_ring import choose
from jax_ring.cli import app
from jax_ring.config import config

jax.devices()  # Starts JAX with the devices of all tests, before --devices asks for fewer.


@pytest.fixture
def two_algorithms(monkeypatch):
    monkeypatch.setattr("jax_ring.bench.tune.names", lambda kind: ["ring", "recursive_doubling"])


def run(line):
    environment = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}
    return CliRunner().invoke(app, ["tune", *shlex.split(line)], env=environment)


def test_a_file_that_auto_reads(two_algorithms, tmp_path):
    path = tmp_path / "tuning.json"
    result = run(f"--devices 2 -o {path} -b 4K -e 1M -f 16 -n 2 -w 0")
    assert result.exit_code == 0, result.output
    link = choose.load_tuning(path)["cpu"]
    assert link.source.startswith("jax-ring tune, ")
    assert ": 2 x cpu on " in link.source
    assert (link.shared, link != choose.LINKS["cpu"]) == (True, True)
    with config(tuning=str(path)) as settings:
        assert settings.tuning == str(path)
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[0] == "cpu, 2 ranks"
    assert any(line.startswith("alpha ") for line in lines)
    assert any(line.startswith("within 10% of the fastest at ") for line in lines)
    assert lines[-1].endswith(f"export JAX_RING_TUNING={path}")
    assert os.listdir(tmp_path) == ["tuning.json"]


def test_a_report_for_programs(two_algorithms, tmp_path):
    path = tmp_path / "tuning.json"
    result = run(f"--devices 2 -o {path} -b 4K -e 16K -n 2 -w 0 --no-verify --json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    (one,) = found["levels"]
    assert (one["name"], one["ranks"], one["sizes"]) == ("cpu", 2, [4096, 16384])
    assert one["link"]["alpha"] == choose.load_tuning(path)["cpu"].alpha
    assert found["auto"] == []
    assert found["about"]["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-b 4Q", "-b: a size must end in a unit"),
        ("-b 4K -e 4K", "at least two sizes are needed, but -b 4K -e 4K -f 4 makes only one"),
        ("-b 4K -e 8K", "-b 4K -e 8K -f 4 makes only one"),
        ("-b 1 -e 4", "-b 1 -e 4 -f 4 makes only one"),  # Element.
        ("-n 0", "-n must be at least 1 and -w at least 0, got 0 and 3"),
        ("-o /nowhere/tuning.json", "/nowhere/tuning.json: there is no folder /nowhere"),
        ("-o .", ".: a folder, not a file"),
        ("-o /proc/tuning.json", "/proc/tuning.json: No such file or directory"),
        ("--devices 1", "one device is joined to no other: use --devices 8"),
        (f"-o {__file__}", "it is no JSON"),
    ],
)
def test_errors_are_one_line(line, message):
    result = run(line)
    assert (result.exit_code, result.stdout) == (2, "")
    said = result.stderr.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("jax-ring tune: ")
    assert message in said[0]


def test_the_file_may_be_named_before_it_is_made(two_algorithms, tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("JAX_RING_TUNING", str(path))
    monkeypatch.setattr(sys.modules[config.__module__], "environment_error", "it is not there yet")
    result = run(f"--devices 2 -o {path} -b 4K -e 16K -n 2 -w 0")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "cpu" in choose.load_tuning(path)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_levels_inside_of_processes_and_across_them(tmp_path):
    for name in ("0/out", "1"):  # Only the first process needs a folder for what it writes.
        (tmp_path / name).mkdir(parents=True)
    path = tmp_path / "0/out/tuning.json"
    jax_ring = (sys.executable, "-W", "ignore", "-m", "jax_ring")
    tune = f"{shlex.join(jax_ring)} tune --devices 2 -o out/tuning.json -b 4K -e 32K -f 8 -n 2 -w 1"
    script = f'cd {tmp_path}/"$JAX_RING_PROCESS" && exec {tune} --no-verify'
    result = subprocess.run(
        [*jax_ring, "run", "-n", "2", "--", "sh", "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    content = json.loads(path.read_text())
    assert set(content["links"]) == {"cpu", "gloo"}
    assert all(link["alpha"] > 0 for link in content["links"].values())
    links = choose.load_tuning(path)
    assert all(links[name].alpha == link["alpha"] for name, link in content["links"].items())
    assert result.stdout.count("gloo, 4 ranks") == 1
