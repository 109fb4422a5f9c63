"""Runs the examples in processes of their own: they choose their devices themselves."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What would change the examples' devices, or decorate their output.
UNSET = ("XLA_FLAGS", "JAX_PLATFORMS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def examples() -> Path:
    """The folder of the examples."""
    return ROOT / "examples"


@pytest.fixture(scope="session")
def example_environment() -> dict[str, str]:
    """The same packages as here, plain output of a fixed width, no choice of devices."""
    environment = {k: v for k, v in os.environ.items() if k not in UNSET}
    path = os.pathsep.join(p for p in sys.path if p)
    return environment | {"PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture(scope="session")
def run_example(examples: Path, example_environment: dict[str, str]) -> Run:
    """Runs an example with arguments and checks its exit status (any if `status` is None)."""

    def run(
        name: str, *arguments: str, status: int | None = 0, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, str(examples / name), *arguments],
            env=example_environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert status in (None, done.returncode), done.stdout + done.stderr
        return done

    return run
