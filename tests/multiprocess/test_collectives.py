"""The same collectives across processes, through JAX's own engine (gloo on CPU)."""

import os
import subprocess
import sys
import textwrap

import pytest
from processes import free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PRELUDE = """
import sys, time
import jax
address, count, process = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, count, process)
import jax.numpy as jnp, numpy as np, jax_ring
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(jax.devices(), "x")
N = len(jax.devices())
def rows(x):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("x")), lambda i: x[i])
def local(y):
    return np.asarray(y.addressable_data(0))
"""


def run(code, processes=2, devices=4, timeout=240):
    """Runs the same code in several processes; returns the last line that each printed."""
    address = f"127.0.0.1:{free_port()}"
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PRELUDE + textwrap.dedent(code),
                address,
                str(processes),
                str(i),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        outputs = [p.communicate(timeout=timeout) for p in started]
    finally:
        for p in started:
            p.kill()
    for p, (_, errors) in zip(started, outputs, strict=True):
        assert p.returncode == 0, errors[-3000:]
    return [out.splitlines()[-1] for out, _ in outputs]


CHECK = """
x = np.random.default_rng(0).integers(0, 9, (N, 8 * 11)).astype(np.float32)
def f(v):
    v = v[0]
    total = jax_ring.psum(v, "x")
    block = jax_ring.psum_scatter(v, "x", tiled=True)
    return total, jax_ring.all_gather(block, "x", tiled=True, to="invarying"), jax_ring.pmax(v, "x")
g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P()))
total, gathered, top = map(local, g(rows(x)))
assert (total == x.sum(0)).all() and (gathered == x.sum(0)).all() and (top == x.max(0)).all()
import hashlib
y = np.random.default_rng(1).normal(size=(N, 1001)).astype(np.float32)
h = jax.jit(jax.shard_map(lambda v: jax_ring.psum(v[0], "x", algorithm="ring"), mesh=mesh,
                          in_specs=P("x"), out_specs=P()))
print(hashlib.sha256(local(h(rows(y))).tobytes()).hexdigest())
"""


def test_processes_give_the_bits_of_one_process():
    one, *_ = run(CHECK, processes=1, devices=8)
    for processes in (2, 4, 8):
        assert set(run(CHECK, processes=processes, devices=8 // processes)) == {one}


def test_psum_scatter_a_thousand_times():
    """Of lax's own, wrong results were reported here."""
    code = """
        chunk = 1 << 20  # Elements of float32: 4 MiB.
        x = np.random.default_rng(0).integers(0, 999, (N, N * chunk)).astype(np.float32)
        f = jax.jit(jax.shard_map(
            lambda v, i: jax_ring.psum_scatter(v[0] + i, "x", algorithm="ring", tiled=True),
            mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))
        mine = x.sum(0)[process * chunk :][:chunk]
        x = rows(x)
        wrong = sum((local(f(x, np.float32(i))) != mine + N * i).any() for i in range(1000))
        print(wrong)
    """
    assert run(code, devices=1) == ["0", "0"]


def test_a_late_process_is_waited_for():
    """lax.psum_scatter gives up after 30 seconds on CPU; permutes wait."""
    code = """
        f = jax.jit(jax.shard_map(lambda v: jax_ring.psum_scatter(v[0], "x")[None],
                                  mesh=mesh, in_specs=P("x"), out_specs=P("x")))
        x = rows(np.ones((N, N), np.float32))
        jax.block_until_ready(f(x))
        time.sleep(40 * process)
        print(local(f(x)))
    """
    assert run(code, devices=1) == ["[2.]", "[2.]"]
