"""Tests that run on a GPU, with the CUDA kernels: `tools/gpu_check.sh`, or JAX_PLATFORMS=cuda,cpu.

Elsewhere they are skipped.
"""

import jax
import numpy as np
import pytest

import jax_ring


def _missing() -> str:
    """Why these tests cannot run, or nothing."""
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"JAX has no GPU (JAX_PLATFORMS=cuda,cpu?): {error}"
    if "cuda" not in jax_ring.native.platforms():
        return f"the CUDA kernels are not there: {jax_ring.native.status()}"
    return ""


@pytest.fixture(scope="session")
def gpu() -> jax.Device:
    """The first GPU."""
    missing = _missing()
    if missing:
        pytest.skip(missing)
    return jax.devices("cuda")[0]


@pytest.fixture(autouse=True)
def _on_gpu(gpu):
    with jax.default_device(gpu):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
