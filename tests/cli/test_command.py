"""The one roof: help, version, completion, statuses, and the command lines of the document."""

import io
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import pytest
import typer
from typer.testing import CliRunner

from jax_ring import __version__
from jax_ring.bench import report
from jax_ring.cli import app, main

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "command.md"
COMMANDS = ("bench", "doctor", "plan", "run", "show", "tune")


def documented():
    """The command lines of the document and of all help texts, each from `jax-ring` on."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    for name in (None, *COMMANDS):
        text = help_of(*([name] if name else []))
        examples = re.search(r"Examples:\n(.*?)\n\n", text, re.DOTALL)[1]
        lines += [re.split(r" {2,}[a-z]", line.strip())[0] for line in examples.splitlines()]
    parts = [re.split(r"(?=jax-ring )", line)[1:] for line in lines]
    return sorted({part.split(" > ")[0].removesuffix(" -- ") for found in parts for part in found})


def help_of(*arguments):
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    return result.stdout


LINES = documented()


def test_the_document_has_examples_of_every_command():
    for name in COMMANDS:
        assert len([line for line in LINES if line.startswith(f"jax-ring {name}")]) >= 2, name


@pytest.mark.parametrize("line", LINES)
def test_documented_lines_are_understood(line):
    _, name, *arguments = shlex.split(line)
    if name.startswith("--"):
        assert name in help_of()
        return
    if name == "run" and "--" not in arguments:
        arguments += ["--", "jax-ring"]  # What follows was taken as a line of its own.
    group = typer.main.get_command(app)
    group.get_command(None, name).make_context(name, arguments)  # Raises for what it does not know.


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("jax-ring show")])
def test_documented_pictures_are_shown(line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.stderr
    assert result.stdout or any(tmp_path.iterdir())


def test_the_document_shows_the_columns():
    for line in report.header():
        assert line.rstrip() in PAGE.read_text()


def test_every_option_of_bench_has_help():
    text = help_of("bench")
    for option in ("-b", "-e", "-f", "-i", "-n", "-w", "-m", "-d", "-o", "-c"):
        assert re.search(rf" {option}, --\w+ +\S+ +\S+| {option}, --\w+", text), option


def test_the_help_names_every_command_and_status():
    text = help_of()
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", text, re.MULTILINE)
    for status in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE):
        assert re.search(rf"^    {status} ", text, re.MULTILINE)


def test_the_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"jax-ring {__version__}\n")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("do", ["doctor"]),
        ("show r", ["ring", "recursive_doubling"]),
        ("bench --compare psum,hi", ["psum,hierarchical"]),
        ("bench --wire int", ["int8", "int4"]),
        ("bench --collective all", ["all_reduce", "all_gather"]),
        ("plan --topology tor", ["torus16x16"]),
        ("tune --dev", ["--devices"]),
    ],
)
def test_the_shell_completes(typed, offered, monkeypatch, capsys):
    monkeypatch.setenv("_JAX_RING_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"jax-ring {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code in (0, None)
    assert capsys.readouterr().out.split() == offered


def test_an_interrupt_is_a_status(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["jax_ring.cli.show"], "draw_text", interrupted)
    with pytest.raises(SystemExit) as exit_:
        main(["show", "ring", "-n", "4"])
    assert exit_.value.code == 130


def test_devices_that_fail_are_one_line_and_a_status(monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")

    monkeypatch.setattr(sys.modules["jax_ring.cli.bench"], "all_ranks", full)
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 1
    assert result.stderr == "jax-ring bench: RESOURCE_EXHAUSTED: out of memory\n"


@pytest.mark.slow
def test_the_module_is_the_command():
    command = [sys.executable, "-W", "ignore", "-m", "jax_ring", "show", "ring", "-n", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "jax-ring show: --ranks must be at least 1, got 0\n"


def test_memory_that_ends_is_one_line_and_a_status(monkeypatch):
    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(sys.modules["jax_ring.cli.bench"], "all_ranks", full)
    result = CliRunner().invoke(app, ["bench"])
    assert (result.exit_code, result.stderr) == (1, "jax-ring bench: no memory is left\n")


class Unwritable(io.StringIO):
    """Buffers what is written, as a pipe or a file does, and then cannot write it."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def flush(self):
        if self.getvalue():
            raise self.error


PLAN = "plan -n 4 --size 1GB --bandwidth 1GB/s"
LINES_THAT_PRINT = ["show ring -n 4", PLAN, "--help", "--version", "plan --help", "doctor --help"]


@pytest.mark.parametrize("line", LINES_THAT_PRINT)
def test_a_reader_that_has_gone_is_a_status(line, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", Unwritable(BrokenPipeError()))
    with pytest.raises(SystemExit) as exit_:
        main(shlex.split(line))
    assert exit_.value.code == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("line", LINES_THAT_PRINT)
def test_output_that_cannot_be_written_is_one_line(line, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", Unwritable(OSError(28, "No space left on device")))
    with pytest.raises(SystemExit) as exit_:
        main(shlex.split(line))
    assert exit_.value.code == 2
    name = "" if line.startswith("-") else f" {line.split()[0]}"
    assert capfd.readouterr().err == f"jax-ring{name}: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("line", ["show ring -n 4", PLAN])
def test_output_may_be_closed(line, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as exit_:
        main(shlex.split(line))
    assert not exit_.value.code


@pytest.mark.slow
def test_nothing_is_said_of_output_that_was_not_written_when_the_process_ends():
    command = [sys.executable, "-W", "ignore", "-m", "jax_ring", "show", "ring", "-n", "4"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "jax-ring show: [Errno 28] No space left on device\n"


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-W", "ignore", "-m", "jax_ring", "show", "ring", "-n", "4"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as started:
        started.stdout.close()
        assert started.stderr.read() == ""
        assert started.wait(60) == 141
