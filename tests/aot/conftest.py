"""Meshes of devices that are not there, for JAX's ahead-of-time compiler.

`make test-aot` installs what is needed; elsewhere these tests are skipped.
"""

import importlib.util
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

H200 = pathlib.Path(__file__).with_name("targets") / "h200.txt"


def needs(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{package} is not installed: make test-aot")


def h200s(hosts: int) -> Mesh:
    needs("jax_cuda13_plugin", "jax[cuda13]")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200.read_text(), topology=f"1x{hosts}x8"
    )
    assert {device.process_index for device in topology.devices} == set(range(hosts))
    return Mesh(np.array(topology.devices), ("data",))


@pytest.fixture(scope="session")
def one_host() -> Mesh:
    """8 x H200 in one host."""
    return h200s(1)


@pytest.fixture(scope="session")
def two_hosts() -> Mesh:
    """16 x H200 in two hosts."""
    return h200s(2)


@pytest.fixture(scope="session")
def tpus() -> Iterator[Mesh]:
    """8 x TPU v5e."""
    needs("libtpu", "libtpu")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TPU_SKIP_MDS_QUERY", "1")  # Or it asks a cloud what it runs on.
        # Else libtpu locks the TPU, which is not there, for one process.
        environment.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        topology = topologies.get_topology_desc("v5e:2x4", platform="tpu")
        yield Mesh(np.array(topology.devices), ("data",))
