"""What crosses the links between hosts, by the counters of their interfaces."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import time

import pytest
from netlab import NETDEV, Lab, Unavailable
from processes import finish

pytestmark = pytest.mark.netlab

SIZE = 16 << 20  # Bytes of the buffer on each rank.

# Each case is called once, then twice and four times between two readings of the counter: the
# difference is two calls, without what it takes to begin and to end together. TCP hands on up to 64
# KiB under one set of headers, which are counted too: 0.2% of the bytes.
PROGRAM = """
import json, os, pathlib, sys
import jax
jax.distributed.initialize(
    os.environ["COORDINATOR"], int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
)
import numpy as np
import jax_ring
from jax_ring import hosts, schedules
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

size, interface, cases = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
devices = jax.devices()
interleaved = sorted(devices, key=lambda device: (device.id % jax.local_device_count(), device.id))
meshes = {"in order": Mesh(devices, "x"), "interleaved": Mesh(interleaved, "x")}
N = len(devices)
row = np.arange(size // 4, dtype=np.float32) % 9

def sent():
    return int(pathlib.Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())

def bytes_of(run, meet, x, calls):
    jax.block_until_ready(meet(x))
    before = sent()
    for _ in range(calls):
        jax.block_until_ready(run(x))
    jax.block_until_ready(meet(x))
    return sent() - before

for order, options in cases:
    mesh = meshes[order]
    options = eval(f"dict({options})")
    def mapped(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P()))
    x = jax.make_array_from_callback(
        (N, row.size), NamedSharding(mesh, P("x")), lambda i: row[None, i[1]]
    )
    run = mapped(lambda v: jax_ring.psum(v[0], "x", **options))
    meet = mapped(lambda v: jax.lax.psum(v[0, 0], "x"))
    total = np.asarray(run(x).addressable_data(0))
    np.testing.assert_allclose(total, N * row, atol=0 if "wire" not in options else N * 8 / 50)
    print("\\nsent", (bytes_of(run, meet, x, 4) - bytes_of(run, meet, x, 2)) / 2)
"""


def bytes_a_call(lab, cases, devices):
    """What each host sends in a call: for each case one number a host."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(SIZE), NETDEV, json.dumps(cases)]
    outputs = lab.run(command, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags})
    # Gloo says something on the standard output too.
    figures = [re.findall(r"^sent (\S+)$", out, re.MULTILINE) for out in outputs]
    assert {len(figure) for figure in figures} == {len(cases)}
    return [[float(sent) for sent in case] for case in zip(*figures, strict=True)]


@pytest.fixture(scope="module")
def made():
    """Labs by their number of hosts, all taken away in the end."""
    labs = {}
    yield labs
    for lab in labs.values():
        lab.__exit__()


@pytest.fixture
def network(made):
    """A function that gives a lab of so many hosts on links of 1 Gbit/s."""

    def of(hosts):
        if hosts not in made:
            try:
                made[hosts] = Lab(hosts, "1gbit").__enter__()
            except Unavailable as error:
                pytest.skip(f"no lab of hosts: {error}")
        return made[hosts]

    return of


def test_bytes_of_the_ring_and_of_wires(network):
    cases = [
        ("in order", "algorithm='ring'"),
        ("in order", "algorithm='ring', wire='bfloat16'"),
        ("in order", "algorithm='ring', wire='int8'"),
    ]
    full = 2 * 3 / 4 * SIZE
    plain, bf16, int8 = bytes_a_call(network(4), cases, devices=1)
    assert plain == pytest.approx([full] * 4, rel=0.02)
    assert bf16 == pytest.approx([full / 2] * 4, rel=0.02)
    assert all(full / 4 < sent <= 0.27 * full for sent in int8)


def test_bytes_between_hosts_of_several_devices(network):
    cases = [
        ("in order", "algorithm=hosts.hierarchical(mesh, 'x')"),
        ("interleaved", "algorithm=hosts.ring(mesh, 'x')"),
        ("interleaved", "algorithm='ring'"),
    ]
    hierarchical, fitted, unaware = bytes_a_call(network(2), cases, devices=4)
    # Four ranks of a host, each of which all-reduces a quarter with its like on the other.
    assert hierarchical == pytest.approx([4 * 2 * 1 / 2 * SIZE / 4] * 2, rel=0.02)
    # One edge of the ring leaves a host; where neighbours are always apart, four do.
    edge = 2 * 7 / 8 * SIZE
    assert fitted == pytest.approx([edge] * 2, rel=0.02)
    assert unaware == pytest.approx([4 * edge] * 2, rel=0.02)


TALK = """
import os, socket, time
me, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address, port = os.environ["COORDINATOR"].split(":")
if me == 0:
    with socket.create_server((address, int(port))) as server:
        with server.accept()[0] as peer:
            while peer.recv(1 << 20):
                pass
else:
    while True:
        try:
            peer = socket.create_connection((address, int(port)))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    start = time.perf_counter()
    peer.sendall(bytes(4 << 20))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)  # Comes when the other has read all.
    print(time.perf_counter() - start)
"""


def test_links_count_what_they_carry_and_carry_no_more_than_their_rate(network):
    network(2)
    with Lab(2, "200mbit") as lab:
        before = lab.sent_bytes(1)
        _, seconds = lab.run([sys.executable, "-c", TALK])
        assert lab.sent_bytes(1) - before == pytest.approx(4 << 20, rel=0.02)
        # Two token buckets of 256 KiB are on the way.
        assert float(seconds) > ((4 << 20) - 2 * (256 << 10)) * 8 / 200e6


STEPS = """
import os, pathlib, jax, numpy as np, jax_ring
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax_ring.distributed.initialize()
mesh = Mesh(jax.devices(), "x")
where = NamedSharding(mesh, P("x"))
x = jax.make_array_from_callback((4, 8), where, lambda i: np.ones((4, 8), np.float32)[i])
f = jax.jit(jax.shard_map(lambda v: jax_ring.psum(v, "x") / 4, mesh=mesh, in_specs=P("x"),
                          out_specs=P("x"), check_vma=False))
with jax_ring.distributed.watchdog(timeout=5) as dog:
    for step in range(1_000_000):
        dog.step(step)
        x = jax.block_until_ready(f(x))
        if step == 20:
            pathlib.Path(os.environ["BEGUN"]).touch()
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_a_host_that_is_cut_off_ends_the_job_everywhere(tmp_path, network, victim):
    network(2)
    with Lab(4, "1gbit") as lab, contextlib.ExitStack() as stack:
        shared = {"JAX_RING_COORDINATOR": lab.coordinator(), "JAX_RING_PROCESSES": "4"}
        shared |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        begun = [tmp_path / f"begun{host}" for host in range(4)]
        started = []
        for host in range(4):
            own = {"JAX_RING_PROCESS": str(host), "BEGUN": str(begun[host])}
            command = [sys.executable, "-W", "ignore", "-c", STEPS]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(lab.start(host, command, shared | own, **pipes))
            stack.callback(started[-1].kill)
        deadline = time.monotonic() + 120
        while not all(path.exists() for path in begun):
            assert all(process.poll() is None for process in started), finish(started)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lab.cut(victim)
        for host, (status, _, errors) in enumerate(finish(started, timeout=60)):
            assert status != 0
            said = re.findall(r"jax_ring.watchdog: process (\d) \(.*\) gave no sign", errors)
            # Who is cut off misses the others.
            assert said, errors[-3000:]
            assert (int(said[0]) == victim) == (host != victim), errors[-3000:]


def test_a_lab_says_who_failed_and_is_taken_away(network):
    network(2)
    with Lab(2, "1gbit") as lab:
        names = lab.names
        assert all(os.path.exists(f"/run/netns/{name}") for name in names)
        with pytest.raises(RuntimeError, match="host 1 ended with status 3"):
            lab.run(["sh", "-c", "exit $((RANK * 3))"])
        with pytest.raises(RuntimeError, match=r"hosts \[0, 1\] did not end within 0.2 s"):
            lab.run(["sleep", "60"], timeout=0.2)
    assert not any(os.path.exists(f"/run/netns/{name}") for name in names)
    assert not any(os.path.exists(f"/etc/netns/{name}") for name in names)


def test_a_lab_that_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unavailable, match="there is no `ip`"), Lab(2, "1gbit"):
        pass
    with pytest.raises(ValueError, match="hosts must be from 1 to 250, got 0"):
        Lab(0, "1gbit")


def test_a_rate_that_there_is_not_leaves_nothing_behind(network):
    network(2)
    lab = Lab(2, "fast")
    with pytest.raises(Unavailable, match='tc .* rate fast .*"rate"'), lab:
        pass
    assert not any(os.path.exists(f"/run/netns/{name}") for name in lab.names)


def test_the_benchmark_tells_a_case_that_is_wrong(network, tmp_path):
    network(2)
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "network.py"
    options = ("--alone", "--hosts", "2", "--size", "16K", "--json", str(tmp_path / "r.json"))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *options, "dict(algorithm='nope')"],
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert re.match(r"network.py: jax, rank \d: ValueError: jax_ring.psum: algorithm must", last)
    assert last.endswith("got 'nope'")
    assert not (tmp_path / "r.json").exists()
