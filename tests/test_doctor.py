"""The diagnosis: facts, the self-test, and what follows from them."""

import dataclasses
import json
import sys
import types

import jax
import pytest
from jax.sharding import Mesh

from jax_ring import choose, doctor, native
from jax_ring.bench.measure import AXIS
from jax_ring.bench.operands import Operands
from jax_ring.config import config
from jax_ring.doctor import Advice, Check, diagnose, self_test
from jax_ring.launch import MALLOC_TUNING
from jax_ring.schedules import Kind
from jax_ring.schedules.families import names


def ranks(n):
    return Mesh(jax.devices()[:n], AXIS)


@pytest.fixture
def quick(monkeypatch):
    """Without the self-test, which has tests of its own, and without the allocator's probe."""
    monkeypatch.setattr(doctor, "self_test", lambda mesh, progress: iter(()))
    monkeypatch.setattr(doctor, "_page_faults", lambda nbytes: 0.0)


def advice(diagnosis, what):
    (found,) = (one for one in diagnosis.advice if what in one.what)
    return found


@pytest.mark.slow
def test_the_self_test_runs_every_algorithm_of_every_collective():
    found = list(self_test(ranks(1)))
    for kind in Kind:
        ran = {check.algorithm for check in found if check.collective == kind.value}
        assert ran == {*names(kind), "direct+bfloat16", "direct+int8"}
    assert all(check.passed for check in found)


@pytest.mark.slow
def test_the_self_test_runs_on_all_devices():
    assert all(check.passed for check in self_test(ranks(8)))


def test_what_is_wrong_is_a_problem(monkeypatch, quick):
    broken = [Check("all_reduce", "ring", 3), Check("all_gather", "ring", None, "ValueError: no")]
    monkeypatch.setattr(doctor, "self_test", lambda mesh, progress: iter(broken))
    found = diagnose(lambda: ranks(2))
    assert (found.healthy, found.verdict) == (False, "not healthy: 2 problem(s)")
    assert found.advice[0].what == "all_reduce by ring fails: 3 elements are wrong"
    assert found.advice[1].what == "all_gather by ring fails: ValueError: no"
    assert all("jax-ring doctor --json" in one.step for one in found.advice[:2])


def test_the_self_test_sees_wrong_elements_and_errors(monkeypatch):
    monkeypatch.setattr(Operands, "wrong", lambda self, result, **_: 1)
    assert next(self_test(ranks(1))).wrong == 4  # One on each emulated rank.
    monkeypatch.setattr(jax, "vmap", lambda *_, **__: 1 / 0)
    found = next(self_test(ranks(1)))
    assert found == Check("all_reduce", "ring", None, "ZeroDivisionError: division by zero")


def test_facts_are_those_of_this_process(quick):
    found = diagnose(lambda: ranks(4))
    assert found.healthy
    assert found.facts["versions"]["jax"] == jax.__version__
    assert found.facts["native"]["available"] == native.status().available
    assert found.facts["devices"]["used"] == 4
    assert found.facts["devices"]["count"] == 8
    assert found.facts["topology"] == {
        "ranks": 4,
        "processes": 1,
        "ranks of each process": [4],
        "slices": 1,
        "coordinates": None,
    }
    assert json.loads(json.dumps(found.to_dict()))["schema"] == "jax_ring.doctor"


def test_a_backend_that_does_not_start_is_reported(quick):
    def mesh():
        raise RuntimeError("Unknown backend\ncuda")

    found = diagnose(mesh)
    assert not found.healthy
    assert found.advice[0].what == "no devices: Unknown backend cuda"
    assert "JAX_PLATFORMS=cpu" in found.advice[0].step
    assert found.facts["versions"]


def test_default_prices_are_noted_and_measured_ones_are_not(quick, tmp_path):
    assert "jax-ring tune" in advice(diagnose(lambda: ranks(2)), "default prices").step
    path = str(tmp_path / "tuning.json")
    choose.save_tuning(path, {"cpu": choose.Link(alpha=1e-6, beta=0.0, gamma=1e-11, shared=True)})
    with config(tuning=path):
        found = diagnose(lambda: ranks(2))
    assert not [one for one in found.advice if "default prices" in one.what]
    assert found.facts["tuning"]["file"] == path
    assert found.facts["tuning"]["links"]["cpu"]["alpha"] == 1e-6


def test_page_faults_lead_to_allocator_settings(quick, monkeypatch):
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(doctor, "_page_faults", lambda nbytes: 16384.0)
    note = advice(diagnose(lambda: ranks(2)), "page faults")
    assert not note.problem
    assert note.what.startswith("each result of 64 MiB costs 16,384 page faults")
    for name, value in MALLOC_TUNING.items():
        assert f"{name}={value}" in note.step
    for name in MALLOC_TUNING:
        monkeypatch.setenv(name, "1")
    note = advice(diagnose(lambda: ranks(2)), "page faults")
    assert note.step.startswith("glibc is told to, perhaps with other values than jax-ring run has")
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    note = advice(diagnose(lambda: ranks(2)), "page faults")
    assert "LD_PRELOAD=libtcmalloc.so" in note.step
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("", ""))
    assert not [one for one in diagnose(lambda: ranks(2)).advice if "faults" in one.what]


@pytest.mark.skipif(sys.platform != "linux", reason="counts faults of 4 KiB")
def test_page_faults_are_counted():
    # Results of one page are kept, whatever the allocator.
    assert doctor._page_faults(4096, calls=2) < 1024


@pytest.mark.skipif(sys.platform != "linux", reason="counts faults of 4 KiB")
def test_calls_before_memory_is_kept_do_not_count(monkeypatch):
    of_calls = [9, 9, 9, 0, 0, 9, 0, 0]  # While it warms up, and once in between.
    counts = iter(
        [n for i, c in enumerate(of_calls) for n in (sum(of_calls[:i]), sum(of_calls[:i]) + c)]
    )
    usage = types.SimpleNamespace
    monkeypatch.setattr("resource.getrusage", lambda who: usage(ru_minflt=next(counts)))
    assert doctor._page_faults(4096, warmup=3, calls=5) == 0


def test_one_cpu_device_is_told_how_to_get_more(quick):
    assert "--devices 8" in advice(diagnose(lambda: ranks(1)), "one CPU device").step


def test_gpus_that_jax_does_not_use_are_noted(quick, monkeypatch):
    smi = types.SimpleNamespace(stdout="NVIDIA H200, 580.1, 143771 MiB\n" * 2)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: smi)
    found = diagnose(lambda: ranks(2))
    assert found.facts["cuda"]["GPUs"] == ["NVIDIA H200, 580.1, 143771 MiB"] * 2
    assert "jax[cuda13]" in advice(found, "there are 2 GPUs, but JAX runs on CPU").step


def test_a_missing_native_module_is_noted(quick, monkeypatch):
    missing = native.Status(available=False, reason="it was not built")
    monkeypatch.setattr(doctor.native, "status", lambda: missing)
    found = diagnose(lambda: ranks(2))
    if doctor.settings.native:
        assert "C++ compiler" in advice(found, "not used: it was not built").step
    assert found.healthy


def test_a_wrong_variable_is_a_problem_and_nothing_is_run(quick, monkeypatch):
    wrong = "unroll (JAX_RING_UNROLL) must be an integer of at least 1, got 0"
    monkeypatch.setattr(doctor, "environment_error", wrong)
    monkeypatch.setattr(sys.modules[config.__module__], "environment_error", wrong)
    found = diagnose(lambda: ranks(2))
    assert not found.healthy
    assert found.advice[0].what == found.facts["settings"]["error"] == wrong
    assert found.checks == ()
    monkeypatch.setenv("JAX_RING_UNROLL", "0")
    with pytest.raises(ValueError, match="JAX_RING_UNROLL"), config(link="cpu"):
        pass


def test_launchers_that_contradict_each_other_are_a_problem(quick, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    found = diagnose(lambda: ranks(2))
    assert not found.healthy
    assert "PMI_SIZE is set, but PMI_RANK (PMI) is missing" in found.advice[0].what


def test_processes_that_do_not_meet_are_no_lack_of_devices(quick, monkeypatch):
    monkeypatch.setenv("JAX_RING_COORDINATOR", "localhost:1234")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")

    def join():
        raise TimeoutError("of 2 processes [1] did not come within 60 s")

    found = diagnose(lambda: pytest.fail("there is nothing to look at"), join=join)
    (problem,) = (one for one in found.advice if one.problem)
    assert problem.what == (
        "the processes do not come together: of 2 processes [1] did not come within 60 s"
    )
    assert "clusters.md" in problem.step
    assert (found.facts["processes"]["process"], found.checks) == (0, ())
    assert found.facts["processes"]["error"] in problem.what
    assert "devices" not in found.facts
    assert json.loads(json.dumps(found.to_dict()))["healthy"] is False


def other_processes_say(monkeypatch, *others):
    """What process 1 and so on found: whether their environment is wrong, and what they advise."""
    said = [
        json.dumps([wrong, [dataclasses.asdict(one) for one in their]]) for wrong, their in others
    ]
    monkeypatch.setattr(doctor.distributed, "exchanged", lambda what, own, _: [own, *said])


def test_what_other_processes_find_is_told(quick, monkeypatch):
    checks = [Check("all_reduce", "ring", 0)]
    monkeypatch.setattr(doctor, "self_test", lambda mesh, progress: iter(checks))
    own = advice(diagnose(lambda: ranks(2)), "default prices")
    alike = Advice(False, "other figures", own.step)
    broken = Advice(True, "the disk is full", "make room")
    other_processes_say(monkeypatch, (False, [alike]), (False, [broken, own]), (False, [own]))
    found = diagnose(lambda: ranks(2))
    assert found.advice[0] == Advice(True, "process 2: the disk is full", "make room")
    assert own in found.advice
    assert not [one for one in found.advice if "other figures" in one.what]
    assert (found.healthy, len(found.checks)) == (False, 1)
    if rest := [one for one in found.advice[1:] if one != own]:  # Notes of this process alone.
        assert all(one.what.startswith("process 0: ") for one in rest)


def test_the_self_test_waits_for_a_right_environment_everywhere(quick, monkeypatch):
    monkeypatch.setattr(doctor, "self_test", lambda mesh, progress: pytest.fail("it would hang"))
    wrong = Advice(True, "JAX_RING_UNROLL must be an integer", "set it right, or unset it")
    other_processes_say(monkeypatch, (True, [wrong]), (True, [wrong]))
    found = diagnose(lambda: ranks(2))
    assert found.advice[0].what == "processes 1, 2: JAX_RING_UNROLL must be an integer"
    assert (found.healthy, found.checks) == (False, ())


def test_a_process_that_says_nothing_is_a_problem(quick, monkeypatch):
    def exchanged(*_):
        raise TimeoutError("process 1 did not say its diagnosis within 60 s")

    monkeypatch.setattr(doctor.distributed, "exchanged", exchanged)
    found = diagnose(lambda: ranks(2))
    assert found.advice[0].what == "process 1 did not say its diagnosis within 60 s"
    assert found.checks == ()


def test_variables_that_nothing_reads_are_noted(quick, monkeypatch):
    monkeypatch.setenv("JAX_RING_ALGORTIHM", "ring")
    found = diagnose(lambda: ranks(2))
    assert advice(found, "nothing reads JAX_RING_ALGORTIHM=ring").step == (
        "did you mean JAX_RING_ALGORITHM?"
    )
    assert found.healthy


def test_a_proxy_is_noted_where_there_are_processes(quick, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://localhost:1")
    assert not [one for one in diagnose(lambda: ranks(2)).advice if "proxy" in one.what]
    monkeypatch.setenv("JAX_RING_COORDINATOR", "localhost:1234")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    assert "unset them" in advice(diagnose(lambda: ranks(2)), "http_proxy").step


def test_an_unknown_jax_is_noted(quick, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (99, 0, 0))
    assert advice(diagnose(lambda: ranks(2)), "not among those").problem is False
