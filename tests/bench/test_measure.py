"""Measuring: quantities, cases, and that what is wrong is seen."""

import dataclasses
import tempfile

import jax
import numpy as np
import pytest

from jax_ring import choose, schedules
from jax_ring.bench.measure import AXIS, Bench, Case, Rounds, Timing, busbw_factor, elements, sweep
from jax_ring.bench.operands import Operands
from jax_ring.config import config
from jax_ring.schedules import Kind, Op, Schedule, Step

ONCE = Rounds(iters=2, warmup=0)


def bench(kind, ranks=2, op="sum", dtype="float32", wires=(None,)):
    mesh = jax.sharding.Mesh(jax.devices()[:ranks], AXIS)
    return Bench(mesh, Operands(kind, op, dtype, ranks, wires))


def test_factors_are_those_of_nccl_tests():
    assert [busbw_factor(kind, 4) for kind in Kind] == [1.5, 0.75, 0.75]
    assert busbw_factor(Kind.ALL_REDUCE, 1) == 0


def test_sizes_are_those_of_the_larger_buffer_in_whole_blocks():
    assert [elements(kind, 1000, 4, 8) for kind in Kind] == [250, 248, 31]
    assert [elements(kind, 1, 4, 8) for kind in Kind] == [1, 8, 1]


def test_times_have_a_median_and_percentiles():
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0), wrong=0)
    assert (timing.median, timing.percentile(0), timing.percentile(100)) == (3.0, 1.0, 5.0)


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("ring", Case("ring+int8", "ring", "int8")),
        ("auto+bfloat16", Case("auto+bfloat16", "auto", "bfloat16")),
        ("lax", Case("psum", "psum")),
        ("xla", Case("psum", "psum")),
    ],
)
def test_cases_as_they_are_written(text, case):
    assert Case.parse(text, Kind.ALL_REDUCE, "int8") == case


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("rnig", Kind.ALL_REDUCE, "no all_reduce 'rnig': there are auto, ring, "),
        ("hierarchical", Kind.ALL_GATHER, "no all_gather 'hierarchical'"),
        ("psum+int8", Kind.ALL_REDUCE, "lax's own op has no wire, got 'psum\\+int8'"),
    ],
)
def test_cases_that_there_are_not(text, kind, message):
    with pytest.raises(ValueError, match=message):
        Case.parse(text, kind)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_is_measured_and_right(kind):
    cases = [Case.parse(text, kind) for text in ("psum", "ring", "ring+int8")]
    found = bench(kind, wires=(None, "int8")).measure(cases, 4096, ONCE)
    assert [m.case for m in found] == cases
    assert [m.chosen for m in found] == ["lax", "ring", "ring"]
    for m in found:
        assert m.nbytes == 4096
        assert m.count == (1024 if kind is Kind.ALL_REDUCE else 512)
        assert (m.in_place is None) == (kind is not Kind.ALL_REDUCE)
        for timing in m.timings:
            assert timing.wrong == 0
            assert len(timing.seconds) == 2
            assert min(timing.seconds) > 0


def test_nothing_is_checked_where_nobody_asks():
    case = Case.parse("ring", Kind.ALL_REDUCE)
    (found,) = bench(Kind.ALL_REDUCE).measure([case], 64, Rounds(1, 0, checks=0), in_place=False)
    assert (found.out_of_place.wrong, found.in_place) == (None, None)


def test_a_wrong_algorithm_is_found_out(monkeypatch):
    # Both ranks copy instead of reducing: verified schedules cannot, so the proof is left out.
    swap = Step(((0, 1), (1, 0)), [0, 0], [0, 0], Op.COPY)
    monkeypatch.setattr(schedules, "verify", lambda schedule: None)
    monkeypatch.setattr("jax_ring.arguments.verify", lambda *schedule: None)
    broken = Schedule(2, 1, [swap], Kind.ALL_REDUCE, "broken")
    (found,) = bench(Kind.ALL_REDUCE).measure([Case("broken", broken)], 4096, ONCE)
    assert found.out_of_place.wrong > 1500  # Of 2 x 1024: some values are their own sum.
    assert found.chosen == "broken"


def test_segments_of_a_ring_are_told():
    small = dataclasses.replace(choose.LINKS["cpu"], alpha=0.0, spills=((64, 50.0),))
    with config(tuning=None):
        assert bench(Kind.ALL_REDUCE, 4).chosen(Case("ring", "ring"), 1024) == "ring"
    with tempfile.TemporaryDirectory() as folder:
        choose.save_tuning(f"{folder}/t.json", {"cpu": small})
        with config(tuning=f"{folder}/t.json"):
            chosen = bench(Kind.ALL_REDUCE, 4).chosen(Case("auto", "auto"), 1024)
    assert chosen == "ring of 16 segments"


def test_cases_take_turns():
    one = bench(Kind.ALL_REDUCE)
    order, time = [], one._time
    one._time = lambda program, *args, **options: (
        order.append(id(program)) or time(program, *args, **options)
    )
    cases = [Case.parse(text, Kind.ALL_REDUCE) for text in ("psum", "recursive_doubling")]
    one.measure(cases, 64, Rounds(iters=2, warmup=1), in_place=False)
    assert len(set(order)) == 2
    assert order == order[:2] * 3


def test_what_lax_cannot_do_is_said():
    with pytest.raises(ValueError, match="lax has no all_reduce by prod; leave psum out"):
        bench(Kind.ALL_REDUCE, op="prod").measure([Case("psum", "psum")], 64, ONCE)


def test_sweeping_lets_go_of_programs_and_tells_its_progress():
    one, told = bench(Kind.ALL_REDUCE), []
    cases = [Case.parse("recursive_doubling", Kind.ALL_REDUCE)]
    found = list(sweep(one, cases, [64, 128], Rounds(2, 1), told.append))
    assert [m.nbytes for m in found] == [64, 128]
    assert not one._programs
    steps = ["compiling recursive_doubling"] * 2 + ["warming up", "round 2", "round 3"]
    assert told == steps * 2


SUMS = [("sum", dtype) for dtype in ("float32", "bfloat16", "float16", "int8", "int32", "uint8")]
OTHERS = [(op, dtype) for op in ("prod", "max") for dtype in ("float16", "int8")]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), [*SUMS, *OTHERS, ("min", "uint8"), ("mean", "bfloat16")])
def test_every_dtype_and_op_is_right_by_every_algorithm(op, dtype):
    one = bench(Kind.ALL_REDUCE, 4, op, dtype)
    cases = [Case.parse(name, Kind.ALL_REDUCE) for name in schedules.FAMILIES]
    for m in one.measure(cases, 1000, Rounds(1, 0), in_place=False):
        assert m.out_of_place.wrong == 0, m.case


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8", "int4", "float8_e4m3fn"])
def test_every_wire_stays_within_its_bound(kind, wire):
    one = bench(kind, 8, wires=(wire,))
    cases = [Case.parse(f"{name}+{wire}", kind) for name in ("ring", "direct", "halving_doubling")]
    for m in one.measure(cases, 1 << 16, Rounds(1, 0), in_place=False):
        assert m.out_of_place.wrong == 0, m.case


@pytest.mark.slow
def test_a_profile_names_cases_and_sizes(tmp_path):
    cases = [Case.parse("recursive_doubling", Kind.ALL_REDUCE)]
    bench(Kind.ALL_REDUCE).trace(cases, [64, 128], tmp_path, calls=2)
    for nbytes in (64, 128):
        (found,) = (tmp_path / f"{nbytes}B").rglob("*.xplane.pb")
        assert f"recursive_doubling {nbytes} B".encode() in found.read_bytes()


def test_operands_lie_where_their_ranks_are():
    one = bench(Kind.ALL_REDUCE, 4)
    x = one.operand(100)
    for shard in x.addressable_shards:
        rank = list(one.mesh.devices.flat).index(shard.device)
        np.testing.assert_array_equal(np.asarray(shard.data), one.operands.of_rank(rank, 100))
