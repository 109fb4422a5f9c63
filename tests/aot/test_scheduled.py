"""What scheduled.py reads, on a module as XLA:GPU and XLA:TPU write them, shortened."""

import textwrap

import pytest
from aot.scheduled import Scheduled

MODULE = """\
    HloModule jit_f, is_scheduled=true

    %fused_update (param_0: f32[64], param_1: f32[8], param_2: s32[]) -> f32[64] {
      %param_0 = f32[64]{0} parameter(0)
      %bitcast.1 = f32[64]{0} bitcast(%param_0)
      %param_1 = f32[8]{0} parameter(1)
      %param_2 = s32[] parameter(2)
      ROOT %update.1 = f32[64]{0} dynamic-update-slice(%bitcast.1, %param_1, %param_2)
    }

    %fused_update_of_a_copy (param_0: f32[64], param_1: f32[8], param_2: s32[]) -> f32[64] {
      %param_0 = f32[64]{0} parameter(0)
      %negate.1 = f32[64]{0} negate(%param_0)
      %param_1 = f32[8]{0} parameter(1)
      %param_2 = s32[] parameter(2)
      ROOT %update.2 = f32[64]{0} dynamic-update-slice(%negate.1, %param_1, %param_2)
    }

    %fused_halves (param_0: f32[64]) -> (f32[32], f32[32]) {
      %param_0 = f32[64]{0} parameter(0)
      %slice.1 = f32[32]{0} slice(%param_0), slice={[0:32]}
      %slice.2 = f32[32]{0} slice(%param_0), slice={[32:64]}
      ROOT %tuple.1 = (f32[32]{0}, f32[32]{0}) tuple(%slice.1, %slice.2)
    }

    ENTRY %main (param.1: f32[64], param.2: s8[8]) -> f32[64] {
      %param.1 = f32[64]{0} parameter(0), metadata={op_name="x"}
      %param.2 = s8[8]{0} parameter(1)
      %row = s32[] partition-id()
      %room = f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"
      %sent = u16[8]{0:T(1024)(128)(2,1)S(1)} collective-permute(%param.2), channel_id=1
      %both.1 = (s8[8]{0}, f32[4,2]{1,0}) collective-permute(%param.2, %row), channel_id=1
      %start.1 = ((f32[8]{0}), f32[8]{0}) collective-permute-start(%param.1), channel_id=1
      %reduce.1 = s8[8]{0} custom-call(%param.2, %param.1), custom_call_target="reduce"
      %stored.1 = f32[64]{0} fusion(%param.1, %sent, %row), kind=kLoop, calls=%fused_update
      %done.1 = f32[8]{0} collective-permute-done(%start.1)
      %stored.2 = f32[64]{0} fusion(%stored.1, %done.1, %row), calls=%fused_update_of_a_copy
      %halves = (f32[32]{0}, f32[32]{0}) fusion(%stored.2), kind=kLoop, calls=%fused_halves
      %decoded = f32[64]{0} custom-call(%reduce.1, %stored.2), custom_call_target="decode", \
output_to_operand_aliasing={{}: (1, {})}
      %other = f32[64]{0} custom-call(%reduce.1, %stored.2), custom_call_target="decode"
      ROOT %copy.1 = f32[64]{0} copy(%decoded)
    }
"""


@pytest.fixture
def hlo() -> Scheduled:
    return Scheduled(textwrap.dedent(MODULE), None)


def test_the_schedule_is_the_entrys(hlo):
    names = [i.name for i in hlo.schedule]
    assert names[0] == "param.1"
    assert names[-1] == "copy.1"
    assert len(names) == 15
    assert hlo.counts["fusion"] == 3
    assert str(hlo.schedule[4]) == "sent = u16[8] collective-permute(param.2)"


def test_permutes_count_what_travels_combined_and_asynchronous_ones_too(hlo):
    assert hlo.permutes == [("u16", 8), ("s8", 8), ("f32", 8), ("f32", 8)]


def test_what_runs_during_a_permute(hlo):
    during = [[i.name for i in ran] for ran in hlo.during_permutes]
    assert during == [[], [], ["reduce.1", "stored.1"]]


def test_calls_of_a_handler(hlo):
    calls = hlo.custom_calls("decode")
    assert [i.name for i in calls] == ["decoded", "other"]
    assert [i.promised for i in calls] == [{0: 1}, {}]
    assert [hlo.reads(i) for i in calls] == [[8, 64], [8, 64]]


def test_what_is_updated_in_place_is_not_written_whole(hlo):
    assert hlo.whole_writes(64) == [
        "fusion of dynamic-update-slice",  # of a value that the same fusion made
        "fusion of slice, slice",
        "custom-call",  # without a promise
        "copy",
    ]
