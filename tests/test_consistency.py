"""What processes compile is noted, told and compared; and healthy jobs are left alone."""

import dataclasses
import json
import re
import textwrap
import types

import coordination
import jax
import numpy as np
import pytest
from harness import mesh
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from processes import finish, start

import jax_ring
from jax_ring import _compat, consistency
from jax_ring.consistency import Note, Program


class Store(coordination.Store):
    def tell(self, process, *programs):
        notes = [dataclasses.astuple(p.note) for p in programs]
        self.values[f"{consistency._KEY}/by/{process}"] = json.dumps(notes)
        for p in programs:
            key = f"{consistency._KEY}/of/{process}/{p.note.digest}"
            self.values[key] = json.dumps({"name": p.name, "collectives": p.collectives})


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr(_compat, "coordination_client", lambda: found)
    monkeypatch.setattr(consistency, "_book", consistency._Book())
    return found


@pytest.fixture
def compiled(store, monkeypatch):
    """Compiles as one of two processes; returns the programs noted in this process."""
    monkeypatch.setattr(consistency, "_reaches_others", lambda mesh, axes: True)

    def run(f, x=np.ones((2, 4), np.float32)):
        mapped = jax.shard_map(f, mesh=mesh(2), in_specs=P("x"), out_specs=P("x"), check_vma=False)
        jax.jit(mapped).lower(x)
        return list(consistency._book.programs.values())

    return run


def total(v):
    return jax_ring.psum(v, "x", algorithm="ring")


def test_what_is_noted(compiled):
    (program,) = compiled(lambda v: jax_ring.pmax(total(v), "x", algorithm="ring"))
    assert "lambda" in program.name
    assert list(program.collectives) == [
        "psum of float32[1, 4] over x by ring",
        "pmax of float32[1, 4] over x by ring",
    ]
    for where in program.collectives.values():
        assert re.search(r"test_consistency.py:\d+$", where)


def test_a_program_is_known_again_by_what_it_sends(compiled):
    compiled(total)
    compiled(lambda v: total(v) * 2)  # The same to the others.
    assert len(compiled(total)) == 1
    # Alike collectives are lowered once, but sent twice.
    assert len(compiled(lambda v: total(total(v)))) == 2
    # And in a function that is called twice.
    inner = jax.jit(total)
    assert len(compiled(lambda v: inner(inner(v) * 3))) == 2
    # lax's own count where there is one of ours.
    assert len(compiled(lambda v: jax.lax.ppermute(total(v), "x", [(0, 1)]))) == 3


def test_whether_it_is_called_is_noted(compiled, monkeypatch):
    monkeypatch.setattr(_compat, "communication", lambda module: ["something"])

    def called(run):
        f = jax.jit(jax.shard_map(total, mesh=mesh(2), in_specs=P("x"), out_specs=P()))
        run(f, np.ones((2, 4), np.float32))
        (program,) = consistency._book.programs.values()
        return program.note.called

    assert not called(lambda f, x: f.lower(x))
    assert not called(lambda f, x: f.trace(x).lower())
    assert called(lambda f, x: f(x))
    assert called(lambda f, x: f.lower(x))  # It stays so.


def test_nothing_is_noted_that_stays_here_or_is_not_wanted(store, monkeypatch):
    def run():
        f = jax.shard_map(total, mesh=mesh(2), in_specs=P("x"), out_specs=P())
        jax.jit(f).lower(np.ones((2, 4), np.float32))
        return list(consistency._book.programs)

    assert run() == []  # The devices are all of this process.
    monkeypatch.setattr(consistency, "_reaches_others", lambda mesh, axes: True)
    with jax_ring.config(check_consistency=False):
        assert run() == []
    assert len(run()) == 1
    monkeypatch.setattr(_compat, "coordination_client", lambda: None)
    monkeypatch.setattr(consistency, "_book", consistency._Book())
    assert run() == []


def test_which_axes_reach_others():
    devices = [types.SimpleNamespace(process_index=i // 2) for i in range(4)]
    two = types.SimpleNamespace(
        axis_names=("node", "local"), devices=np.array(devices, object).reshape(2, 2)
    )
    assert consistency._runs(consistency._owners(two)) == ((0, 1),)
    assert consistency._runs([5, 1, 2, 7, 6, 1]) == ((1, 2), (5, 7))
    assert consistency._owners(AbstractMesh((8,), ("x",))) is None
    reaches = consistency._reaches_others.__wrapped__
    assert reaches(two, ("node",))
    assert reaches(two, ("node", "local"))
    assert not reaches(two, ("local",))
    assert not reaches(None, ("local",))
    assert not reaches(two, ("of vmap",))
    assert not reaches(AbstractMesh((8,), ("x",)), ("x",))
    assert reaches(AbstractMesh((16,), ("x",)), ("x",))


def program(digest, called=True, processes=((0, 3),)):
    return Program(
        "jit(f)", {f"psum of {digest}": f"f.py:{digest}"}, Note(digest, called, processes)
    )


A, B, C, D = map(program, "1234")
B_AHEAD, C_AHEAD = program("2", called=False), program("3", called=False)


@pytest.fixture
def told(store):
    """What is said where this process, 0, and others have these programs."""

    def tell(ours, *others):
        consistency._book.programs.clear()
        consistency._book.programs.update({p.note.digest: p for p in ours})
        for process, programs in enumerate((ours, *others)):
            store.tell(process, *programs)
        return consistency.told_by()

    return tell


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([A], [A]),
        ([A, B], [B, A]),  # In another order.
        ([A, B], [A, B_AHEAD]),
        ([A, B], [A]),  # The other has not come so far.
        ([A], [A, B, C]),  # Nor have we.
        ([A], []),
        # Programs in which the other takes no part.
        ([A, program("5", processes=((0, 0), (2, 3)))], [A, program("6", processes=((1, 3),))]),
        ([A, program("5", processes=((0, 0), (2, 3)))], [A, B]),
    ],
)
def test_processes_that_do_not_differ(told, ours, theirs):
    assert consistency.differences(told(ours, theirs)) == []


def test_teams_with_programs_of_their_own(told):
    first, second = program("5", processes=((0, 1),)), program("6", processes=((2, 3),))
    assert consistency.differences(told([first], [first], [second], [second])) == []
    assert consistency.missing(told([first], [first], [second], [second])) == ""
    third = program("7", processes=((2, 3),))
    (found,) = consistency.differences(told([first], [first], [second], [third]))
    assert (found.processes, found.called) == ((2, 3), True)


def test_what_one_has_not_compiled_yet(told):
    assert consistency.missing(told([A, B], [B, A])) == ""
    assert (
        consistency.missing(told([A, B], [A]))
        == "process 0 compiled jit(f), which process 1 has not: psum of 2 at f.py:2"
    )
    assert (
        consistency.missing(told([A, B], [A, B], [A, B_AHEAD, C]))
        == "process 2 compiled jit(f), which process 0 has not: psum of 3 at f.py:3"
    )


def test_processes_that_differ(told):
    (found,) = consistency.differences(told([A, B], [A, B], [A, C]))
    assert found.processes == (0, 2)
    assert found.called
    assert str(found) == (
        "process 0 compiled jit(f) with psum of 2 at f.py:2; process 2 compiled jit(f) with psum "
        "of 3 at f.py:3"
    )
    again = Program("jit(g)", B.collectives, Note("4"))
    (found,) = consistency.differences(told([A, B], [A, B], [A, again]))
    assert "jit(f) and process 2 jit(g) with the same collectives, but in another" in str(found)


@pytest.mark.parametrize(
    ("ours", "theirs", "digests", "called"),
    [
        ([B_AHEAD], [C_AHEAD], ("2", "3"), False),
        ([B_AHEAD], [C], ("2", "3"), False),
        ([program("2", processes=None)], [C], ("2", "3"), False),
        # What is called comes before what is newer.
        ([A, B_AHEAD], [C, program("5", called=False)], ("1", "3"), True),
        ([A, B], [C, D], ("2", "4"), True),
    ],
)
def test_what_is_called_differs_for_sure(told, ours, theirs, digests, called):
    (found,) = consistency.differences(told(ours, theirs))
    assert (found.digests, found.called) == (digests, called)


def test_each_difference_is_said_once(told, capsys):
    def said(*programs):
        told(*programs)
        consistency._book._warn()
        return re.findall(r"psum of (\d) .*; .*psum of (\d)", capsys.readouterr().err)

    assert said([B_AHEAD], [C_AHEAD]) == [("2", "3")]
    assert said([B_AHEAD], [C_AHEAD]) == []
    # One that does no harm does not use it up.
    assert said([B_AHEAD, A], [C_AHEAD, D]) == [("1", "4")]
    assert said([B_AHEAD, A], [C_AHEAD, D]) == []


def test_who_reads_what(told, store, monkeypatch):
    told([A], [B], [C])
    assert list(consistency.told_by()) == [0, 1, 2]
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    assert sorted(consistency.told_by(0)) == [0, 2]


def test_nothing_of_it_stops_a_compilation(monkeypatch):
    heard = []

    def fail(name):
        heard.append(name)
        if "spiral" in name:
            raise KeyError(name)

    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", heard.append)
    _compat.on_lowered(fail)
    listener = heard.pop()
    with pytest.warns(UserWarning, match="a program was not noted: KeyError.*spiral"):
        listener(_compat._LOWERED, 0.1, fun_name="jit(spiral)")
    listener("/jax/core/compile/backend_compile_duration", 0.1)
    assert heard == ["jit(spiral)"]


# --- several processes ----------------------------------------------------------------------------

PROGRAM = """
import sys, time, jax, jax.numpy as jnp, numpy as np, jax_ring
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_ring import consistency
jax_ring.distributed.initialize(timeout=60)
mesh = Mesh(jax.devices(), "x")
x = jax.make_array_from_callback((4, 8), NamedSharding(mesh, P("x")), lambda i: np.ones((4, 8))[i])
me = jax.process_index()
def mapped(f, mesh=mesh):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_job_that_stands_still_ends_with_the_difference():
    code = """
        ring = lambda v: jax_ring.psum(v, "x", algorithm="ring")
        direct = lambda v: jax_ring.psum(v, "x", algorithm="direct")
        f = mapped(ring if me == 1 else direct)
        with jax_ring.distributed.watchdog(timeout=3) as dog:
            for step in range(10_000):
                dog.step(step)
                jax.block_until_ready(f(x))
    """
    results = finish(start(PROGRAM + textwrap.dedent(code), processes=2, devices=2))
    for process, (status, _, errors) in enumerate(results):
        assert status == 70, errors[-2000:]
        said = re.search(
            r"processes differ, and wait for each other: process 0 compiled jit\(<lambda>\) with "
            r"psum of .* by direct at <string>:\d+; process 1 compiled jit\(<lambda>\) with psum "
            rf"of .* by ring at <string>:\d+; process {process} waits in step 0 and ends",
            errors,
        )
        assert said, errors[-2000:]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_what_one_alone_has_compiled_is_said_when_nobody_gets_on():
    code = """
        import signal
        f = mapped(lambda v: jax_ring.psum(v, "x", algorithm="direct"))
        g = mapped(lambda v: jax_ring.psum(v, "x", algorithm="ring"))
        jax.block_until_ready(f(x))
        signal.alarm(8)
        with jax_ring.distributed.watchdog(timeout=2) as dog:
            dog.step(1)
            if me == 1:
                g(x)  # Its value is wanted by one process only.
            jax.block_until_ready(f(x))
    """
    results = finish(start(PROGRAM + textwrap.dedent(code), processes=2, devices=2))
    for status, _, errors in results:
        assert status != 0
        assert (
            "jax_ring.watchdog: nobody gets on; process 1 compiled jit(<lambda>), which process 0 "
            "has not: psum of float32[1, 8] over x by ring at <string>:" in errors
        ), errors[-2000:]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_without_a_watchdog_a_difference_is_said_once():
    code = """
        consistency.PATIENCE_S = 1.0
        # Does not stand still: what one has more meets the other's next.
        once = lambda v: jax_ring.psum(v, "x", algorithm="ring")
        twice = lambda v: once(once(v))
        f = mapped(twice if me else once)
        y = [f(x) for _ in range(4 if me else 8)]
        jax.block_until_ready(y)
        time.sleep(3)
        jax.block_until_ready(mapped(lambda v: jax_ring.pmax(v, "x"))(x))
        time.sleep(2)
    """
    for status, _, errors in finish(start(PROGRAM + textwrap.dedent(code), processes=2, devices=2)):
        assert status == 0, errors[-2000:]
        assert errors.count("jax_ring: processes differ, and may wait for each other:") == 1
        assert "in another order or number, or in other steps: psum of float32" in errors


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_healthy_job_goes_on():
    """In another order, twice, one process alone, for later, at other times, with long pauses."""
    code = """
        consistency.PATIENCE_S = 0.5
        f = mapped(lambda v: jax_ring.psum(v, "x"))
        g = mapped(lambda v: jax_ring.pmax(v, "x"))
        for h in (f, g) if me else (g, f):
            h.lower(x)
        other = mapped(lambda v: jax_ring.psum(v, "x", algorithm="ring" if me else "direct"))
        other.lower(x).compile()  # Never called.
        if me:
            mapped(lambda v: jax_ring.pmin(v, "x")).lower(x)
            local = Mesh(jax.local_devices(), "x")
            mapped(lambda v: jax_ring.pmin(v, "x"), local)(jnp.ones((2, 8)))
            jax.clear_caches()
        time.sleep(1)
        with jax_ring.distributed.watchdog(timeout=1.5) as dog:
            dog.step(0)
            if me:
                time.sleep(3)
            jax.block_until_ready((f(x), g(x)))
            time.sleep(4)
    """
    for status, _, errors in finish(start(PROGRAM + textwrap.dedent(code), processes=2, devices=2)):
        assert status == 0, errors[-2000:]
        assert " ends" not in errors
        # What was only compiled is said, and no more.
        assert "nobody gets on; processes differ, and may wait for each other: process 0" in errors
