"""The training example in several processes: as in one, and one of them may die."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from processes import finish, start_command

for package in ("flax", "optax", "orbax.checkpoint", "matplotlib", "rich", "typer"):
    pytest.importorskip(package, exc_type=ImportError)

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = str(pathlib.Path(__file__).parents[2] / "examples" / "train_language_model.py")
EXAMPLE = (
    *(sys.executable, "-W", "ignore", SCRIPT),
    *("--devices", "4", "--batch", "8", "--window", "16", "--corpus-bytes", "20000"),
    *("--width", "16", "--layers", "1", "--heads", "2", "--sample-bytes", "1"),
    *("--measure-every", "1000", "--evaluate-every", "1000", "--check-steps", "0"),
)
WATCHDOG_S = 5.0
STEPS = 60


def losses(folder):
    return json.loads((folder / "metrics.json").read_text())["history"]["train"]


def run(*command):
    """Runs the example to its end."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        command,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of a run in one process."""
    folder = tmp_path_factory.mktemp("straight")
    run(*EXAMPLE, "--steps", str(STEPS), "--output-dir", str(folder))
    return losses(folder)


def wait_for(condition, started):
    """Until a condition holds, while all processes run."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing was saved"
        assert all(process.poll() is None for process in started), finish(started)
        time.sleep(0.001)


def complete(saved):
    """The steps of complete checkpoints."""
    return sorted(int(path.name) for path in saved.glob("*") if path.name.isdigit())


def being_written(saved):
    return any("tmp" in path.name for path in saved.glob("*"))


def test_a_killed_process_ends_the_other_and_the_run_resumes(straight, tmp_path):
    """Killed while a checkpoint is written, for which process 0 waits."""
    saved, out = tmp_path / "saved", tmp_path / "out"
    arguments = ["--checkpoint-dir", str(saved), "--checkpoint-every", "2"]
    command = [*EXAMPLE, *arguments]
    limits = ["--steps", "1000000", "--watchdog", str(WATCHDOG_S)]
    started = start_command([*command, *limits], 2, devices=2)
    wait_for(lambda: complete(saved)[-1:] >= [4] and being_written(saved), started)
    started[1].send_signal(signal.SIGKILL)
    (status, _, errors), _ = finish(started, timeout=60)
    assert status != 0
    assert "jax_ring.watchdog: process 1 (" in errors, errors[-3000:]

    last = complete(saved)[-1]
    more = ["--resume", "--steps", str(last + 3), "--output-dir", str(out)]
    launcher = [sys.executable, "-m", "jax_ring", "run", "-n", "2", "-d", "2", "--"]
    said = run(*launcher, *command, *more)
    assert f"[0] resumed after step {last}" in said
    assert "[1] resumed" not in said
    assert 4 < len(losses(out)) == last + 3 <= STEPS
    assert losses(out) == straight[: last + 3]
