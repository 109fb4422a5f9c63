"""How processes of a job end by their watchdogs, and that healthy ones do not."""

import re
import textwrap

import pytest
from processes import finish, start

from jax_ring.watchdog import EXIT_STATUS

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROGRAM = """
import ctypes, sys, time, jax, numpy as np, jax_ring
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax_ring.distributed.initialize(timeout=60)
me = jax.process_index()
mesh = Mesh(jax.devices(), "x")
x = jax.make_array_from_callback((2, 8), NamedSharding(mesh, P("x")), lambda i: np.ones((2, 8))[i])
f = jax.jit(jax.shard_map(lambda v: jax_ring.psum(v, "x") / 2, mesh=mesh, in_specs=P("x"),
                          out_specs=P("x"), check_vma=False))
def steps(timeout, last, then=lambda: None):
    with jax_ring.distributed.watchdog(timeout) as dog:
        for step in np.arange(last):
            dog.step(step)
            jax.block_until_ready(f(x))
        then()
        dog.step(last)
"""


def run(code):
    return finish(start(PROGRAM + textwrap.dedent(code), 2))


FAIL = """
def fail():
    raise ValueError("bad key")
steps(3, 20, fail if me == 0 else lambda: f(x).block_until_ready())
"""
EXIT = """
steps(3, 20, (lambda: sys.exit(3)) if me == 1 else lambda: f(x).block_until_ready())
"""
CATCH = """
def fail():
    raise KeyError("oh")
try:
    steps(3, 20, fail if me == 1 else lambda: f(x).block_until_ready())
except Exception:
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("code", "culprit", "why"),
    [
        (FAIL, 0, r"failed \(ValueError: bad key\)"),
        (EXIT, 1, r"failed \(SystemExit: 3\)"),
        (CATCH, 1, r"has ended after an error \(KeyError: 'oh'\)"),
    ],
)
def test_a_failure_ends_who_waits(code, culprit, why):
    results = run(code)
    for status, _, _ in results:
        assert status != 0
    status, _, errors = results[1 - culprit]
    assert re.search(
        rf"process {culprit} \(.*\) {why}, last in step 19; process {1 - culprit} waits", errors
    ), errors[-3000:]
    assert status == EXIT_STATUS or culprit == 0  # As process 0 ends, JAX aborts the other.
    if code is FAIL:
        assert "ValueError: bad key" in results[culprit][2]


def test_who_leaves_or_pauses_is_no_failure():
    code = """
        def early():
            raise KeyError("early stop")
        try:
            steps(2, 3, early if me == 1 else lambda: None)
        except KeyError:
            pass
        time.sleep(4)
        # Again; and process 1 is done before the other.
        steps(2, 3, (lambda: sys.exit(0)) if me == 1 else lambda: time.sleep(5))
        print("finished")
    """
    for process, (status, out, errors) in enumerate(run(code)):
        assert status == 0, errors[-3000:]
        assert " ends" not in errors
        assert ("finished" in out) == (process == 0)


def test_who_stands_still_blames_nobody_else():
    code = """
        def stand_still():
            time.sleep(1)
            ctypes.PyDLL(None).sleep(6)  # Holds the GIL.
            time.sleep(20)
        steps(3, 20, stand_still if me == 1 else lambda: time.sleep(20))
    """
    (status, _, others), (_, _, errors) = run(code)
    assert status == EXIT_STATUS
    assert re.search(r"process 1 \(.*\) gave no sign of life", others), others[-3000:]
    assert "process 1 stood still for" in errors, errors[-3000:]
    assert not re.search(r"process 0 \(.*\) gave no sign of life", errors), errors[-3000:]
