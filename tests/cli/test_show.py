"""`jax-ring show`, as it is typed."""

import re
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jax_ring.cli import app
from jax_ring.schedules import Kind, hierarchical, ring
from jax_ring.schedules.draw import draw, draw_text
from jax_ring.schedules.families import make


def run(line):
    return CliRunner().invoke(app, ["show", *shlex.split(line)])


def test_the_table_of_an_algorithm():
    result = run("ring -n 4")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == draw_text(ring(4)) + "\n"


@pytest.mark.parametrize(
    ("line", "schedule"),
    [
        ("halving_doubling --ranks 8", make("halving_doubling", Kind.ALL_REDUCE, 8)),
        ("direct -n 3 --kind reduce_scatter", make("direct", Kind.REDUCE_SCATTER, 3)),
        ("ring -n 3 --kind all_gather", make("ring", Kind.ALL_GATHER, 3)),
        ("ring -n 4 --channels 2", ring(4, channels=2)),
        ("hierarchical -n 8 --inner 4", hierarchical(4, 2)),
    ],
)
def test_what_can_be_asked_for(line, schedule):
    result = run(line)
    assert (result.exit_code, result.stdout) == (0, draw_text(schedule) + "\n")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture(suffix, tmp_path):
    path, wanted = tmp_path / f"ring.{suffix}", tmp_path / f"wanted.{suffix}"
    result = run(f"ring -n 3 -o {path}")
    assert (result.exit_code, result.output) == (0, "")
    draw(ring(3), wanted)
    assert path.read_bytes() == wanted.read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("star -n 4", "no all_reduce 'star': there are ring, .*, hierarchical"),
        ("hierarchical -n 4 --kind all_gather", "no all_gather 'hierarchical': there are ring, "),
        ("ring -n 0", "--ranks must be at least 1, got 0"),
        ("ring -n 65", "cannot draw 65 ranks, at most 64"),
        ("ring -n 4 --channels 0", "channels must be at least 1, got 0"),
        ("direct -n 4 --channels 2", "--channels is for an all_reduce by ring, not for direct"),
        ("ring -n 4 --inner 2", "--inner is for hierarchical, not for ring"),
        ("hierarchical -n 6", "hierarchical needs --inner, which divides the 6 ranks"),
        ("hierarchical -n 6 --inner 4", "hierarchical needs --inner, which divides the 6 ranks"),
        ("hierarchical -n 6 --inner 0", "hierarchical needs --inner, which divides the 6 ranks"),
        ("ring -n 4 -o ring.jpg", r"use one of \.svg, \.png, \.pdf"),
        ("ring -n 4 -o /nowhere/ring.svg", "/nowhere/ring.svg"),
    ],
)
def test_a_mistake_is_told_in_one_line(line, message):
    result = run(line)
    assert (result.exit_code, result.stdout) == (2, "")
    (said,) = result.stderr.splitlines()
    assert said.startswith("jax-ring show: ")
    assert re.search(message, said)


def test_a_picture_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(f"ring -n 3 -o {tmp_path}/ring.svg")
    assert result.exit_code == 2
    assert "pip install 'jax-ring[plot]'" in result.stderr


def test_help_has_examples():
    assert "jax-ring show ring -n 4 --channels 2 -o ring.svg" in run("--help").stdout


def test_no_backend_is_initialised():
    code = """
from jax_ring.cli.show import show
show("ring", 4)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
