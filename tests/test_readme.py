"""The README's code runs as it stands there."""

import doctest
import os
import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


def block_with(text):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if text in block]
    return found


def start(code, *args):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last_line(process):
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-3000:]
    return out.splitlines()[-1]


def test_examples_at_the_prompt():
    result = doctest.testfile(str(README), module_relative=False)
    assert result.attempted > 10
    assert not result.failed


def test_the_swap():
    code = block_with("mean_square")
    (value,) = re.findall(r"# ([\d.]+), on every device", code)
    assert last_line(start(code)) == value


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes(tmp_path):
    (tmp_path / "train.py").write_text(block_with("distributed.initialize"))
    (command,) = re.findall(r"^jax-ring (run .*train\.py)$", README.read_text(), re.MULTILINE)
    run = [sys.executable, "-m", "jax_ring", *command.split()]
    run[run.index("python")] = sys.executable
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    # Gloo's threads write to the standard output too, some of them in each other's lines.
    said = re.findall(r"^\[\d\] 8\.0$", result.stdout, re.MULTILINE)
    assert sorted(said) == [f"[{i}] 8.0" for i in range(4)], result.stdout
