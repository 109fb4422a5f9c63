"""Pictures and texts show what is in the schedule, all of it, and the same each time."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

from jax_ring.schedules import (
    FAMILIES,
    Kind,
    Op,
    Schedule,
    Step,
    bidirectional_ring,
    cost,
    direct,
    halving_doubling,
    hierarchical,
    recursive_doubling,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)
from jax_ring.schedules.draw import (
    crossings,
    draw,
    draw_text,
    figure,
    plot_bandwidths,
    plot_times,
)
from jax_ring.schedules.families import make

EACH = [(name, kind) for name, made in FAMILIES.items() for kind in made]
SOME = [
    ring(4),
    ring(3, channels=2),
    bidirectional_ring(4),
    halving_doubling(8),
    hierarchical(2, 3),
]
SVG = "{http://www.w3.org/2000/svg}"


def messages(schedule):
    return sorted(
        f"step{index}-r{source}-r{destination}"
        for index, step in enumerate(schedule.steps)
        for source, destination in step.perm
    )


def svg(path):
    return ElementTree.parse(path).getroot()


def arrows(root):
    """The groups of arrows by id."""
    groups = {group.get("id", ""): group for group in root.iter(f"{SVG}g")}
    return {gid: group for gid, group in groups.items() if gid.startswith("step")}


def lines(group):
    """The styles of the curves of a message, without their white edges."""
    styles = [path.get("style") for path in group.iter(f"{SVG}path")]
    parsed = [dict(part.split(": ") for part in style.split("; ")) for style in styles]
    return [style for style in parsed if style["fill"] == "none" and style["stroke"] != "#ffffff"]


def words(path):
    return [text.text for text in svg(path).iter(f"{SVG}text")]


# Pictures.


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_every_message_has_an_arrow(name, kind):
    for n in (1, 2, 4, 5):
        schedule = make(name, kind, n)
        ids = [artist.get_gid() for artist in figure(schedule).axes[0].collections]
        assert sorted(gid for gid in ids if gid) == messages(schedule)
        assert len(messages(schedule)) == sum(len(step.perm) for step in schedule.steps)


@pytest.mark.parametrize("schedule", SOME, ids=repr)
def test_an_arrow_has_a_line_for_each_chunk_dashed_if_it_is_copied(schedule, tmp_path):
    draw(schedule, tmp_path / "picture.svg")
    drawn = arrows(svg(tmp_path / "picture.svg"))
    assert sorted(drawn) == messages(schedule)
    colors = {}
    for index, step in enumerate(schedule.steps):
        for source, destination in step.perm:
            found = lines(drawn[f"step{index}-r{source}-r{destination}"])
            assert len(found) == step.k
            for chunk, line in zip(step.send[source].tolist(), found, strict=True):
                assert ("stroke-dasharray" in line) == (step.op is Op.COPY)
                assert colors.setdefault(chunk, line["stroke"]) == line["stroke"]
    assert len(set(colors.values())) == schedule.chunks


def test_more_chunks_than_named_colors_differ_too(tmp_path):
    draw(ring_reduce_scatter(12), tmp_path / "picture.svg")
    drawn = arrows(svg(tmp_path / "picture.svg")).values()
    assert len({line["stroke"] for group in drawn for line in lines(group)}) == 12


@pytest.mark.parametrize("schedule", SOME, ids=repr)
def test_ranks_steps_and_title_are_named(schedule, tmp_path):
    draw(schedule, tmp_path / "picture.svg")
    found = words(tmp_path / "picture.svg")
    ranks = [word for word in found if word.startswith("rank ")]
    assert sorted(ranks) == sorted(2 * [f"rank {rank}" for rank in range(schedule.ranks)])
    steps = [word for word in found if word.startswith("step ")]
    assert steps == [f"step {i}" for i in range(schedule.rounds)]
    assert f"{schedule.name}: all_reduce of {schedule.ranks} ranks" in found


@pytest.mark.parametrize(
    ("schedule", "complete"),
    [
        (ring_reduce_scatter(4), 4),
        (ring_all_gather(4), 4 + 8 + 12 + 16),
        (ring(4), 4 + 8 + 12 + 16),
        (recursive_doubling(4), 4),
        (bidirectional_ring(4), 4 + 12 + 16),
    ],
    ids=repr,
)
def test_complete_chunks_stand_out(schedule, complete):
    chunks = [text for text in figure(schedule).axes[0].texts if text.get_text().isdigit()]
    assert len(chunks) == schedule.ranks * schedule.chunks * (schedule.rounds + 1)
    assert sum(text.get_weight() == "bold" for text in chunks) == complete


def test_a_wrong_schedule_can_be_drawn():
    step = Step(((0, 1), (1, 0)), [0, 0], [1, 1], Op.COPY)
    figure(Schedule(2, 2, [step, step], Kind.ALL_GATHER))


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_same_schedule_gives_the_same_file(suffix, tmp_path):
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    draw(ring(3), first)
    with matplotlib.rc_context({"svg.hashsalt": "another", "savefig.dpi": 50}):
        draw(bidirectional_ring(5), second)
        draw(ring(3), second)
    assert first.read_bytes() == second.read_bytes()
    draw(ring(4), second)
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize("shown", [figure, draw_text])
def test_what_no_eye_can_follow_is_refused(shown):
    shown(recursive_doubling(64))
    with pytest.raises(ValueError, match="recursive_doubling: cannot draw 65 ranks, at most 64"):
        shown(recursive_doubling(65))
    with pytest.raises(ValueError, match="direct: cannot draw 66 steps, at most 64"):
        shown(direct(34))


@pytest.mark.parametrize("name", ["picture", "picture.jpg", "picture.svg.gz"])
def test_other_suffixes_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"picture.*: use one of \.svg, \.png, \.pdf"):
        draw(ring(2), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_there_are_texts(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "rank 2" in draw_text(ring(3))
    with pytest.raises(ImportError, match=r"pip install 'jax-ring\[plot\]'"):
        draw(ring(3), tmp_path / "picture.svg")
    with pytest.raises(ImportError, match=r"pip install 'jax-ring\[plot\]'"):
        plot_times({"a": [1.0, 2.0]}, [1, 2], tmp_path / "times.svg")


def test_texts_do_not_load_matplotlib():
    code = """
import sys
from jax_ring.schedules import ring
from jax_ring.schedules.draw import draw_text
draw_text(ring(3))
print("matplotlib" in sys.modules)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


# Texts.


def test_the_ring_as_a_table():
    assert draw_text(ring(3)).splitlines() == [
        "ring: all_reduce of 3 ranks",
        "3 chunks, 4 steps, each rank sends 1.33 times the buffer",
        "",
        "step          rank 0  rank 1  rank 2",
        "   0  send    2 → 1   0 → 2   1 → 0",
        "      reduce  1 ← 2   2 ← 0   0 ← 1",
        "   1  send    1 → 1   2 → 2   0 → 0",
        "      reduce  0 ← 2   1 ← 0   2 ← 1",
        "   2  send    0 → 1   1 → 2   2 → 0",
        "      copy    2 ← 2   0 ← 0   1 ← 1",
        "   3  send    2 → 1   0 → 2   1 → 0",
        "      copy    1 ← 2   2 ← 0   0 ← 1",
        "",
        "2 → 1: sends chunk 2 to rank 1.  2 ← 1: gets chunk 2 from rank 1.",
    ]


def test_channels_share_the_number_of_a_round():
    text = draw_text(bidirectional_ring(4))
    # The last round of each half has one direction only.
    assert [line[:19] for line in text.splitlines() if " send " in line] == [
        "   0        0  send",
        "            1  send",
        "   1        0  send",
        "   2        0  send",
        "            1  send",
        "   3        0  send",
    ]


def test_chunks_are_shown_as_ranges():
    text = draw_text(halving_doubling(8))
    assert "4-7 → 4" in text
    assert "0-3 ← 4" in text


def test_a_rank_may_be_idle_and_send_less():
    text = draw_text(recursive_doubling(3))
    assert "each rank sends at most 2 times the buffer" in text
    (first,) = [line for line in text.splitlines() if line.startswith("   0")]
    assert first.split() == ["0", "send", "0", "→", "1", "·", "·"]


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_every_message_is_in_the_table_twice(name, kind):
    for n in range(1, 10):
        schedule = make(name, kind, n)
        for width in (None, 60):
            table, _, legend = draw_text(schedule, width=width).rpartition("\n\n")
            if schedule.rounds:
                assert legend.startswith("2 → 1")
                assert table.count(" → ") == table.count(" ← ") == len(messages(schedule))
            if width:
                assert max(map(len, table.splitlines()[2:]), default=0) <= width


def test_one_rank_has_nothing_to_do():
    assert draw_text(ring(1)).splitlines() == [
        "ring: all_reduce of 1 rank",
        "1 chunk, 0 steps, each rank sends 0 times the buffer",
    ]


# Times.

SIZES = [1000 * 2**i for i in range(21)]


def curves(alpha, beta):
    schedules = ring(8), recursive_doubling(8), halving_doubling(8)
    return {s.name: [cost(s, size, alpha, beta) for size in SIZES] for s in schedules}


def test_a_crossing_is_where_the_model_says():
    alpha, beta = 5e-6, 1 / 400e9
    ((size, before, after),) = crossings(curves(alpha, beta), SIZES)
    assert (before, after) == ("recursive_doubling", "halving_doubling")
    # 3 steps of S against 6 steps of 2 (7/8) S in all; curves are straight between the sizes.
    assert size == pytest.approx(3 * alpha / (1.25 * beta), rel=0.01)


def test_equal_curves_do_not_cross():
    assert crossings({"a": [1.0, 2.0], "b": [1.0, 2.0]}, [1, 2]) == []
    assert crossings({"a": [2.0, 2.0], "b": [1.0, 2.0]}, [1, 2]) == []


def test_the_plot_names_curves_and_crossings(tmp_path):
    plot_times(curves(5e-6, 1 / 400e9), SIZES, tmp_path / "times.svg", title="Eight ranks")
    found = words(tmp_path / "times.svg")
    assert {"Eight ranks", "ring", "recursive_doubling"} < set(found)
    assert found.count("halving_doubling") == 2  # In the legend, and where it becomes the fastest.
    assert any(re.fullmatch(r"from 4\.8\d? MB:", word) for word in found)
    assert {"10 kB", "1 GB", "100 µs"} < set(found)


def test_the_plot_of_bandwidths_names_curves_and_units(tmp_path):
    curves = {"ring": [1e9, 2e9, 4e9], "psum": [2e9, 3e9, 4e9]}
    plot_bandwidths(curves, [1 << 10, 1 << 15, 1 << 20], tmp_path / "b.svg", title="8 ranks")
    found = words(tmp_path / "b.svg")
    assert {"8 ranks", "ring", "psum", "bus bandwidth", "0 B/s", "4 GB/s", "100 kB"} < set(found)


def test_the_same_curves_give_the_same_file(tmp_path):
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for path in (first, second):
        plot_times(curves(5e-6, 1 / 400e9), SIZES, path)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("given", "sizes", "message"),
    [
        ({}, [1, 2], "no curve"),
        ({"a": [1.0, 2.0]}, [2, 1], r"sizes must increase, got \[2, 1\]"),
        ({"a": [1.0]}, [1], "sizes must increase"),
        ({"a": [1.0, 2.0, 3.0]}, [1, 2], "a has 3 values for 2 sizes"),
        ({"a": [1.0, 0.0]}, [1, 2], "a must be positive, got 0.0"),
        ({"a": [1.0, 2.0]}, [0, 2], "sizes must be positive, got 0"),
    ],
)
def test_curves_that_cannot_be_plotted_are_refused(given, sizes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        plot_times(given, sizes, tmp_path / "times.svg")
