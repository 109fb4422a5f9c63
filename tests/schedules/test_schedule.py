import dataclasses
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ring.schedules import (
    Kind,
    Op,
    Run,
    Schedule,
    ScheduleError,
    Step,
    Steps,
    compose,
    hierarchical,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)
from jax_ring.schedules.schedule import affine


def test_schedules_do_not_import_jax():
    code = (
        "import sys, types, importlib.util as u\n"
        "spec = u.find_spec('jax_ring')\n"
        "package = types.ModuleType('jax_ring')\n"
        "package.__path__ = spec.submodule_search_locations\n"
        "sys.modules['jax_ring'] = package\n"
        "import jax_ring.schedules as s; s.verify(s.ring(8))\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_equal_steps_make_equal_hashable_schedules():
    written_out = Schedule(6, 6, list(ring(6).steps), Kind.ALL_REDUCE, "ring")
    assert written_out == ring(6)
    assert hash(written_out) == hash(ring(6))
    assert len({written_out, ring(6), ring(7)}) == 2
    assert ring(6) != dataclasses.replace(ring(6), name="other")


def test_like_steps_are_merged_into_runs():
    assert [run.count for run in Steps(list(ring(6).steps), 6).runs] == [5, 5]


def test_steps_behave_as_a_sequence():
    steps = ring(5).steps
    assert len(list(steps)) == len(steps) == 8
    assert steps[-1] == list(steps)[-1] == steps[7]
    assert steps[2:4] == list(steps)[2:4]
    with pytest.raises(IndexError, match="step 8"):
        steps[8]
    with pytest.raises(IndexError):
        steps[-9]


def test_step_tables_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        ring(4).steps[0].send[0, 0] = 3


def test_text_says_what_travels():
    assert repr(ring(4)) == "Schedule(ring, all_reduce, ranks=4, chunks=4, steps=6)"
    assert "step 3-5: rank r -> r+1; send (r - s) mod 4, copy into (r - s - 1) mod 4" in str(
        ring(4)
    )
    odd = Schedule(2, 1, [Step(((0, 1),), [0, 0], [0, 0], Op.REDUCE)], Kind.ALL_REDUCE)
    assert "step 0: 0->1; send (0) mod 1, reduce into (0) mod 1" in str(odd)


def test_pickles_to_another_process():
    code = (
        "import pickle, sys; from jax_ring.schedules import ring\n"
        "schedule = pickle.load(sys.stdin.buffer)\n"
        "sys.exit({schedule: 1} != {ring(5): 1})"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        input=pickle.dumps(ring(5)),
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=False,
    )
    assert done.returncode == 0


def test_composing_unlike_schedules_is_refused():
    with pytest.raises(ScheduleError, match="ranks or chunks differ"):
        compose("x", Kind.ALL_REDUCE, ring_reduce_scatter(4), ring_all_gather(5))


@pytest.mark.parametrize(("ranks", "chunks"), [(0, 1), (1, 0), (-1, 4)])
def test_impossible_sizes_are_refused(ranks, chunks):
    with pytest.raises(ScheduleError, match="at least 1"):
        Schedule(ranks, chunks, [], Kind.ALL_REDUCE)


def test_tables_of_a_wrong_rank_are_refused():
    with pytest.raises(ScheduleError, match=r"send must have shape \[ranks, k\]"):
        Step(((0, 1),), np.zeros((2, 1, 1), int), [0, 0], Op.COPY)


def test_empty_runs_are_refused():
    step = ring(4).steps[0]
    with pytest.raises(ScheduleError, match="count=0"):
        Steps([Run(step, 0)], 4)


def test_steps_of_other_chunks_share_what_they_do_not_change():
    step = ring(4).steps[0]
    other = step.with_chunks([0, 1, 2, 3], [3, 0, 1, 2])
    assert other == Step(step.perm, [0, 1, 2, 3], [3, 0, 1, 2], step.op)
    assert other.perm is step.perm
    assert not other.send.flags.writeable
    with pytest.raises(ScheduleError, match=r"recv must have shape \[ranks, k\]"):
        step.with_chunks([0], np.zeros((1, 1, 1), int))


def test_runs_are_found_anew_for_other_chunks():
    """The steps stay what they are; what is a run modulo 4 is none modulo 5."""
    steps = Schedule(4, 5, ring(4).steps, Kind.ALL_REDUCE).steps
    assert list(steps) == list(ring(4).steps)
    assert (len(ring(4).steps.runs), len(steps.runs)) == (2, 6)


def test_the_text_of_a_schedule_is_short_however_many_chunks_there_are():
    text = str(hierarchical(4, 64, "ring", "direct"))
    assert "send [[192 to 255], [0 to 63], [64 to 127], [128 to 191], [192 to 255]," in text
    assert max(map(len, text.splitlines())) < 1000
    scattered = Step(((0, 1),), [[2, 0, 1]] * 2, [[0, 1, 2]] * 2, Op.COPY)
    assert "send [[2, 0, 1], [2, 0, 1]], copy into [[0 to 2], [0 to 2]]" in str(
        Schedule(2, 3, [scattered], Kind.ALL_REDUCE)
    )


def test_parts_number_their_channels_anew():
    nothing = Step((), [0, 0], [0, 0], Op.COPY, 0)
    there = Step(((0, 1),), [0, 0], [0, 0], Op.REDUCE, 1)
    back = Step(((1, 0),), [0, 0], [0, 0], Op.COPY, 0)
    whole = Schedule(2, 1, [nothing, back, there], Kind.ALL_REDUCE)
    assert whole.channels == 2
    first, second = whole.part(0, 1), whole.part(1, 2)
    assert list(first.steps) == [dataclasses.replace(there, channel=0)]
    assert list(second.steps) == [back]
    assert whole.part(2, 2).channels == 0


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40), st.integers(1, 12))
@settings(deadline=None)
def test_affine_columns_are_recognized(a, b, modulus, ranks):
    column = (a * np.arange(ranks) + b) % modulus
    form = affine(column, modulus)
    assert form is not None
    assert ((form[0] * np.arange(ranks) + form[1]) % modulus == column).all()


def test_other_columns_are_not():
    assert affine(np.array([0, 1, 3]), 4) is None
