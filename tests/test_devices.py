"""What only whole processes show: many devices, one core, run-to-run bits, caches, clean exits."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

PRELUDE = """
import jax, jax.numpy as jnp, numpy as np, jax_ring
from jax.sharding import Mesh, PartitionSpec as P
N = len(jax.devices())
mesh = Mesh(jax.devices(), "x")
def on_mesh(f, out_specs=P()):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=out_specs))
"""


def run(code, devices=8, prefix=(), timeout=240, **environment):
    """Runs code in a process of its own and returns what it printed."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("devices", [16, 32, 64])
def test_many_devices(devices):
    code = """
        x = np.random.default_rng(0).integers(0, 9, (N, 1000)).astype(np.float32)
        print((on_mesh(lambda v: jax_ring.psum(v[0], "x"))(x) == x.sum(0)).all())
    """
    assert run(code, devices).strip() == "True"


@pytest.mark.skipif(not shutil.which("taskset"), reason="needs taskset")
def test_eight_devices_on_one_core():
    code = """
        f = on_mesh(lambda v: jax_ring.psum(v, "x"))
        x = jnp.ones(8000)
        for _ in range(200):
            y = f(x)
        print(y[0])
    """
    assert run(code, prefix=["taskset", "-c", "0"]).strip() == "8.0"


def test_one_slow_device():
    code = """
        def f(v):
            turns = jnp.where(jax.lax.axis_index("x") == 3, 20, 0)
            def work(i, m):
                return jnp.tanh(m @ m)
            m = jax.lax.fori_loop(0, turns, work, jnp.ones((1500, 1500)) * v[0])
            return jax_ring.psum(v + 0 * m[0, :1], "x")
        print(on_mesh(f)(jnp.arange(8.0))[0])
    """
    assert run(code).strip() == "28.0"


def test_two_processes_give_the_same_bits():
    code = """
        import hashlib
        x = np.random.default_rng(0).normal(size=(N, 10_001)).astype(np.float32)
        f = on_mesh(lambda v: jax_ring.psum(v[0], "x"))
        print({hashlib.sha256(np.asarray(f(x)).tobytes()).hexdigest() for _ in range(20)})
    """
    first, second = run(code), run(code)
    assert first == second
    assert first.count(",") == 0


def test_a_second_process_finds_the_compiled_program(tmp_path):
    code = """
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        print(on_mesh(lambda v: jax_ring.psum(v, "x"))(jnp.arange(8.0))[0])
    """
    run(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    entries = {p.name for p in tmp_path.iterdir() if p.name.endswith("-cache")}
    assert entries
    run(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert {p.name for p in tmp_path.iterdir() if p.name.endswith("-cache")} == entries


def test_leaving_without_waiting():
    code = """
        f = on_mesh(lambda v: jax_ring.psum(v, "x"))
        x = jnp.ones(8 * 100_000)
        for _ in range(50):
            f(x)
        print("left")
    """
    assert run(code).strip() == "left"


def test_settings_from_the_environment():
    code = """
        print(on_mesh(lambda v: jax_ring.psum(v, "x")).lower(jnp.ones(8)).as_text())
    """
    assert "all_reduce" in run(code, JAX_RING_ALGORITHM="xla")
    by_ring = {"JAX_RING_ALGORITHM": "ring"}
    assert "stablehlo.while" in run(code, JAX_RING_UNROLL="2", **by_ring)
    assert "stablehlo.while" not in run(code, **by_ring)
    for variable, value in [("JAX_RING_ALGORITHM", "tree"), ("JAX_RING_UNROLL", "some")]:
        with pytest.raises(AssertionError, match=f"{variable}.* got '{value}'"):
            run(code, **{variable: value})


def test_importing_starts_no_service():
    code = """
        import socket, threading
        from jax._src import distributed
        assert distributed.global_state.client is None
        print(len(jax.devices()))
    """
    assert run(code).strip() == "8"
