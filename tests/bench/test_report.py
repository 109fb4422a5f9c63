"""What is told of measurements."""

import csv
import json
import re

import pytest

from jax_ring.bench.measure import Case, Measurement, Timing
from jax_ring.bench.report import Report, cells, header, line, summary
from jax_ring.schedules import Kind

RING, PSUM = Case("ring", "ring"), Case("psum", "psum")


def measured(case, nbytes, seconds, in_place=None, wrong=0):
    donated = None if in_place is None else Timing(in_place, wrong)
    return Measurement(case, case.name, nbytes, nbytes // 4, Timing(seconds, wrong), donated)


def report(*measurements, kind=Kind.ALL_REDUCE, cases=(PSUM, RING)):
    return Report(kind, "sum", "float32", 4, cases, {"load": 0.5}, list(measurements))


BOTH = report(
    measured(PSUM, 4_000_000, (1e-3, 2e-3, 4e-3), (2e-3, 2e-3, 2e-3)),
    measured(RING, 4_000_000, (3e-3, 4e-3, 4e-3), (1e-3, 1e-3, 1e-3)),
)


def test_bandwidths():
    first = BOTH.measurements[0]
    assert BOTH.algbw(first, first.out_of_place) == pytest.approx(2.0)
    assert BOTH.busbw(first, first.out_of_place) == pytest.approx(3.0)
    assert BOTH.average_busbw("psum") == pytest.approx(3.0)
    assert BOTH.average_busbw("ring") == pytest.approx((1.5 + 6.0) / 2)
    assert BOTH.average_busbw("nobody") == 0.0


def test_ratios_are_those_within_a_round():
    psum, ring = BOTH.measurements
    assert BOTH.ratio(psum) == 1.0
    assert BOTH.ratio(ring) == 2.0  # The median of 3, 2 and 1, where the medians give 2 as well.
    assert BOTH.ratio(ring, "in_place") == 0.5
    assert report(measured(RING, 4, (1.0,))).ratio(measured(RING, 4, (1.0,))) is None


def test_the_columns_are_those_of_nccl_tests():
    names = header()[1].lstrip("#").split()
    assert names[:5] == ["size", "count", "type", "redop", "algorithm"]
    assert names[5:] == ["time", "spread", "algbw", "busbw", "#wrong"] * 2
    row = line(BOTH, BOTH.measurements[0]).split()
    assert row[:5] == ["4000000", "1000000", "float32", "sum", "psum"]
    assert row[5:] == ["2000.0", "120", "2.000", "3.000", "0", "2000.0", "0", "2.000", "3.000", "0"]


def test_columns_stand_under_their_headings():
    ends = [m.end() for m in re.finditer(r"\S+", header()[1][1:])]
    row = line(BOTH, BOTH.measurements[0])
    assert [m.end() - 1 for m in re.finditer(r"\S+", row)] == ends


def test_what_was_not_measured_says_so():
    case = Case("auto", "auto")
    m = Measurement(case, "direct", 64, 4, Timing((1.0,), None), None)
    one = report(m, kind=Kind.ALL_GATHER, cases=[case])
    assert cells(one, m)[3:5] == ["none", "auto: direct"]
    assert cells(one, m)[-5:] == ["N/A"] * 5
    assert cells(one, m)[9] == "N/A"


def test_the_summary_ends_as_that_of_nccl_tests():
    lines = summary(BOTH)
    assert lines[0] == "# time / psum, out-of-place, ring: 4000000 B 2.00"
    assert lines[1] == "# Out of bounds values : 0 OK"
    assert lines[-1] == "# Avg bus bandwidth (ring) : 3.75"
    bad = report(measured(RING, 8, (1.0,), wrong=3), cases=[RING])
    assert (bad.wrong, summary(bad)[0]) == (3, "# Out of bounds values : 3 FAILED")


def test_json_has_every_call(tmp_path):
    BOTH.write_json(tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["schema"], found["version"], found["about"]) == (
        "jax_ring.bench",
        1,
        {"load": 0.5},
    )
    assert found["results"][1]["seconds"]["out_of_place"] == [3e-3, 4e-3, 4e-3]
    assert found["results"][1]["in_place"]["ratio"] == 0.5
    assert found["average_busbw_GBps"] == {"psum": pytest.approx(3.0), "ring": pytest.approx(3.75)}
    assert found["wrong"] == 0


def test_csv_has_a_line_for_each_measurement(tmp_path):
    mixed = report(*BOTH.measurements, measured(RING, 8, (1.0,)))
    mixed.write_csv(tmp_path / "r.csv")
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [row["case"] for row in rows] == ["psum", "ring", "ring"]
    assert float(rows[0]["in_place_busbw_GBps"]) == pytest.approx(3.0)
    assert rows[2]["in_place_time_us"] == ""


def test_the_plot_has_a_line_for_each_case_and_half(tmp_path):
    pytest.importorskip("matplotlib")
    more = [measured(case, 8_000_000, (1e-3,), (1e-3,)) for case in (PSUM, RING)]
    report(*BOTH.measurements, *more).plot(tmp_path / "r.svg")
    text = (tmp_path / "r.svg").read_text()
    for label in ("psum", "ring", "psum, in place", "ring, in place", "all_reduce, 4 ranks"):
        assert label in text
