"""What "auto" means: predictions against closed forms, choices, and the tuning file."""

import dataclasses
import json
import os
import re

import jax
import numpy as np
import pytest
from harness import compiled, integers, mesh, per_rank, same_bits, sharded
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import choose
from jax_ring.choose import LINKS, Link, load_tuning, predict, save_tuning
from jax_ring.schedules import (
    FAMILIES,
    Kind,
    Schedule,
    bidirectional_ring,
    hierarchical,
    recursive_doubling,
    ring,
)
from jax_ring.schedules.families import make, names

NETWORK = Link(alpha=1e-5, beta=1e-9)
SHARED = Link(alpha=1e-5, beta=0.0, gamma=1e-9, spills=((1 << 20, 2.0),), shared=True)


def test_predictions_are_the_closed_forms():
    n, size = 8, 1e6
    assert predict(ring(n), size, NETWORK) == pytest.approx(14e-5 + 2 * 7 / 8 * 1e-3)
    assert predict(recursive_doubling(n), size, NETWORK) == pytest.approx(3e-5 + 3e-3)


def test_ports_count_where_a_step_sends_both_ways():
    one = predict(bidirectional_ring(9), 1e6, dataclasses.replace(NETWORK, alpha=0.0))
    two = predict(bidirectional_ring(9), 1e6, dataclasses.replace(NETWORK, alpha=0.0, ports=2))
    assert one == pytest.approx(2 * two)


def test_on_one_machine_everything_is_paid_for_every_rank():
    # Recursive doubling receives (2), adds (3) the whole buffer at each of three steps.
    touched = 3 * 5 * 1e5
    assert predict(recursive_doubling(8), 1e5, SHARED) == pytest.approx(
        8 * (3 * 1e-5 + touched * 1e-9)
    )
    # Both directions are two rendezvous.
    still = dataclasses.replace(SHARED, gamma=0.0)
    assert predict(bidirectional_ring(8), 1e5, still) == predict(ring(8), 1e5, still)


def test_messages_that_no_cache_holds_cost_more():
    fits, spills = (predict(recursive_doubling(2), size, SHARED) for size in (1 << 20, 1 << 21))
    assert spills - 2e-5 == pytest.approx(4 * (fits - 2e-5))


def test_levels_are_priced_by_their_own_links():
    inside, across = Link(alpha=1e-6, beta=1e-11), Link(alpha=1e-4, beta=1e-9)
    seconds = predict(hierarchical(4, 2), 1e6, inside, across=across, inner=4)
    within = 6e-6 + 2 * 3 / 4 * 1e6 * 1e-11
    between = 2e-4 + 2 * 1 / 2 / 4 * 1e6 * 1e-9
    assert seconds == pytest.approx(within + between)


def test_levels_on_machines_of_their_own():
    """A machine has as much to do as for its ranks alone, and a read for what came from others.

    With a single other one its sums go there from hand, and need not be stored. Its steps move
    several chunks, which no custom call does: that takes twice as long.
    """
    steps = predict(ring(4), 0, SHARED)
    moves = predict(ring(4), 1e5, SHARED) - steps
    free = Link(alpha=0.0, beta=0.0)
    for n, passes in ((2, 0), (4, 2), (8, 2)):
        seconds = predict(hierarchical(4, n), 1e5, SHARED, across=free, inner=4)
        assert seconds == pytest.approx(steps + 2 * (moves + 4 * passes * 1e-9 * 1e5 / 4))


def test_levels_of_several_channels():
    """A channel that waits for others pays nothing, and what is sent at once pays once."""
    schedule = hierarchical(3, 4, "ring", "bidirectional_ring")
    assert schedule.channels == 2
    one = Link(alpha=1.0, beta=0.0)
    assert predict(schedule, 1.0, one, across=Link(alpha=0.0, beta=0.0), inner=3) == 4
    assert predict(schedule, 1.0, Link(alpha=0.0, beta=0.0), across=one, inner=3) == 4
    assert predict(schedule, 1.0, one) == 4 + 4


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, 128])
@pytest.mark.parametrize("link", [NETWORK, SHARED, *LINKS.values()])
def test_the_choice_is_the_fastest_candidate(kind, ranks, link):
    if ranks > 64 and link.gamma:
        pytest.skip("so many ranks are not in one process")
    for nbytes in (0, 4 << 10, 64 << 20):
        choice = choose.choose(kind, ranks, nbytes, link)
        assert choice.seconds == min(seconds for _, seconds in choice.candidates)
        found = {name for name, _ in choice.candidates if name in FAMILIES}
        assert found == set(names(kind)) - ({"direct"} if ranks > 64 else set())
        for name, seconds in choice.candidates:
            if name in FAMILIES:
                assert seconds == predict(make(name, kind, ranks), nbytes, link)
        assert choice.reason.startswith(f"smallest predicted time: {choice.candidates[0][0]}")


def test_few_steps_when_small_and_few_bytes_when_large():
    small = choose.choose(Kind.ALL_REDUCE, 8, 4 << 10, LINKS["cpu"])
    large = choose.choose(Kind.ALL_REDUCE, 8, 64 << 20, LINKS["cpu"])
    assert small.algorithm == "recursive_doubling"
    assert isinstance(large.algorithm, Schedule)
    assert large.algorithm == ring(8, segments=large.algorithm.chunks // 8)
    assert large.algorithm.chunks > 8


@pytest.mark.parametrize("ranks", [2, 8, 64, 512])
def test_programs_stay_of_a_size_that_compiles(ranks):
    choice = choose.choose(Kind.ALL_REDUCE, ranks, 16 << 30, LINKS["cpu"])
    if isinstance(choice.algorithm, Schedule):
        assert choice.algorithm.chunks <= 128


def test_hierarchies_where_groups_are_slow_to_reach():
    inside, across = LINKS["nvlink"], LINKS["infiniband"]
    choice = choose.choose(Kind.ALL_REDUCE, 16, 1 << 30, inside, across=across, inner=8)
    assert choice.algorithm == hierarchical(8, 2)


def test_lax_only_where_it_is_allowed():
    allowed = choose.choose(Kind.ALL_REDUCE, 8, 4 << 20, LINKS["cpu"], allow_xla=True)
    assert allowed.algorithm == "xla"
    without = choose.choose(Kind.ALL_REDUCE, 8, 4 << 20, LINKS["cpu"])
    assert "xla" not in dict(without.candidates)


def test_exchanges_and_channels_cost_more_between_processes():
    assert choose.choose(Kind.ALL_REDUCE, 4, 16 << 10, LINKS["gloo"]).algorithm == (
        "recursive_doubling"
    )
    for ranks in (4, 8, 16):
        choice = choose.choose(Kind.ALL_REDUCE, ranks, 16 << 20, LINKS["gloo"])
        assert choice.algorithm == "ring"
    link = Link(alpha=1.0, beta=1.0, serial=True, exchange=3.0)
    seconds = {
        name: predict(make(name, Kind.ALL_REDUCE, 4), 4.0, link) for name in names(Kind.ALL_REDUCE)
    }
    # As many messages; in none of them do two ranks send to each other.
    assert seconds["ring"] == seconds["bidirectional_ring"] == 6 + 6
    # Of what goes 1, 2 and 3 ranks on, twice, only that 2 ranks on is sent both ways.
    assert seconds["direct"] == 6 + 6 + 2 * (3 - 1)
    assert seconds["recursive_doubling"] == 2 + 2 * 4 * 3
    assert seconds["halving_doubling"] == 4 + 6 * 3


def test_platforms():
    assert choose.links_of("cpu", 4) == ("cpu", "gloo")
    assert choose.links_of("cuda", 1) == ("nvlink", "nvlink")
    assert choose.links_of("tpu", 8) == ("ici", "ici")


# In programs.


def permutes(size, **settings):
    f = jax.shard_map(lambda v: jax_ring.psum(v, "x"), mesh=mesh(8), in_specs=P("x"), out_specs=P())
    with jax_ring.config(**settings):
        return compiled(f, sharded(mesh(8), P("x"), (8 * size,)))


def test_auto_differs_by_size():
    assert permutes(64).permutes == [("f32", 64)] * 3
    large = permutes(1 << 20).permutes
    assert large == [("f32", 1 << 17)] * 14


def test_auto_takes_the_prices_of_the_link():
    assert len(permutes(1 << 18, link="gloo").permutes) == 6  # Halving-doubling.


def test_auto_may_be_lax_only_if_allowed():
    assert not permutes(64).other_collectives
    allowed = permutes(1 << 18, allow_xla=True)
    assert allowed.other_collectives
    assert not allowed.permutes


def test_what_lax_cannot_do_is_never_left_to_it():
    x = integers((4, 1 << 16), np.float32)
    with jax_ring.config(allow_xla=True):
        rows = per_rank(lambda v: jax_ring.all_reduce(v, "x", "prod"), 4, x)
    assert same_bits(rows[0], x.prod(0))


@pytest.mark.parametrize("shape", [(8 << 18,), (1 << 10, 3 * 1 << 9), (7, 300001), (8, 3, 87381)])
def test_large_arrays_of_any_shape(shape):
    x = integers((4, *shape), np.float32)
    rows = per_rank(lambda v: jax_ring.psum(v, "x"), 4, x)
    assert all(same_bits(row, x.sum(0)) for row in np.asarray(rows))


def test_segments_cost_no_copy_that_the_ring_does_not():
    f = jax.shard_map(
        lambda v: jax_ring.psum(v, "x"),
        mesh=mesh(4),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    size = 1 << 24  # 64 MiB on each device.
    hlo = compiled(f, sharded(mesh(4), P("x"), (4 * size,)), donate_argnums=0)
    assert len(hlo.permutes) > 6
    assert not hlo.copies_of(size)
    # The finished chunks of a rank wait until nothing more is read: a quarter, and what moves.
    assert hlo.memory.temp_size_in_bytes < size + 3 * (1 << 20)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1, 2], [3]]])
def test_groups(groups):
    x = integers((4, 5), np.float32)
    rows = per_rank(lambda v: jax_ring.psum(v, "x", axis_index_groups=groups), 4, x)
    for group in groups:
        for rank in group:
            assert same_bits(rows[rank], x[group].sum(0))


# The tuning file.


def test_a_tuning_file_overrides_what_it_names(tmp_path):
    path = tmp_path / "tuning.json"
    slow = Link(alpha=1.0, beta=0.0, spills=((7, 1.5),), shared=True, source="slow steps")
    save_tuning(path, {"cpu": slow})
    links = load_tuning(path)
    assert links["cpu"] == slow
    assert links["cpu"].alpha == 1.0
    assert links["gloo"] == LINKS["gloo"]
    with jax_ring.config(tuning=str(path)):
        assert len(permutes(1 << 18).permutes) == 3  # Steps are all that counts.
    assert list(tmp_path.iterdir()) == [path]


def test_a_tuning_file_is_read_again_when_it_changes(tmp_path):
    path = tmp_path / "tuning.json"
    save_tuning(path, {"cpu": Link(alpha=1.0, beta=0.0)})
    load_tuning(path)
    save_tuning(path, {"cpu": Link(alpha=2.25, beta=0.0)})
    assert load_tuning(path)["cpu"].alpha == 2.25


def test_part_of_a_link_may_be_left_out(tmp_path):
    path = tmp_path / "tuning.json"
    content = {"schema": choose.SCHEMA, "version": 1, "links": {"gloo": {"beta": 1e-10}}}
    path.write_text(json.dumps(content))
    assert load_tuning(path)["gloo"] == dataclasses.replace(LINKS["gloo"], beta=1e-10)


GOOD = {"schema": "jax_ring.tuning", "version": 1, "links": {}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ("[]", 'must be an object with "schema"'),
        (json.dumps({"alpha": 1}), 'must be an object with "schema"'),
        (json.dumps(GOOD | {"schema": "nccl"}), 'must be an object with "schema"'),
        (json.dumps(GOOD | {"version": 2}), "its version must be 1, got 2"),
        (json.dumps(GOOD | {"version": True}), "its version must be 1, got True"),
        (json.dumps(GOOD | {"version": 1.0}), "its version must be 1, got 1.0"),
        (json.dumps(GOOD | {"link": {}}), 'must have "schema", "version", "links", got'),
        (json.dumps(GOOD | {"links": []}), 'must have "schema", "version", "links"'),
        (json.dumps(GOOD | {"links": {"token ring": {}}}), "links are .* got 'token ring'"),
        (json.dumps(GOOD | {"links": {"cpu": {"aplha": 1}}}), "a link has the fields .*aplha"),
        (json.dumps(GOOD | {"links": {"cpu": 7}}), "a link has the fields .* got 7"),
        (json.dumps(GOOD | {"links": {"cpu": {"alpha": -1}}}), "in link 'cpu' alpha must be"),
        (json.dumps(GOOD | {"links": {"cpu": {"alpha": 10**400}}}), "in link 'cpu' alpha must be"),
        (
            json.dumps(GOOD | {"links": {"cpu": {"spills": [[float("nan"), 2.0]]}}}),
            r"in link 'cpu' spills must be pairs of a finite size > 0 .* got \(\(nan, 2.0\),\)",
        ),
        (json.dumps(GOOD | {"links": {"cpu": {"beta": "x"}}}), "in link 'cpu' beta must be"),
        (json.dumps(GOOD | {"links": {"cpu": {"ports": 0}}}), "in link 'cpu' ports must be"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(tmp_path, content, message):
    path = tmp_path / "tuning.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        load_tuning(path)
    assert "tuning.json" in str(raised.value)
    assert "JAX_RING_TUNING" in str(raised.value)
    with pytest.raises(ValueError, match=message), jax_ring.config(tuning=str(path)):
        pass


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="missing.json.*can't be read: No such file"):
        load_tuning(tmp_path / "missing.json")


@pytest.mark.parametrize("path", [3, ["a"], 2.5, True])
def test_what_is_no_path_is_an_error(path):
    message = f"tuning .JAX_RING_TUNING. must name a file .* got {re.escape(repr(path))}: it is no"
    with pytest.raises(ValueError, match=message), jax_ring.config(tuning=path):
        pass


def test_paths_of_any_kind(tmp_path):
    path = tmp_path / "tuning.json"
    save_tuning(path, {"cpu": NETWORK})
    for kind in (path, str(path), os.fsencode(path)):
        assert load_tuning(kind)["cpu"] == NETWORK


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    save_tuning(path, {"cpu": LINKS["cpu"]})
    before = path.read_bytes()

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        save_tuning(path, {"cpu": NETWORK})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_links_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"links must be named as in .* got \['lan'\]"):
        save_tuning(tmp_path / "tuning.json", {"lan": NETWORK})


def test_a_file_can_be_read_by_others_as_before(tmp_path):
    path = tmp_path / "tuning.json"
    for mode in (0o644, 0o664):
        save_tuning(path, {"cpu": NETWORK})
        assert path.stat().st_mode & 0o777 == mode
        path.chmod(0o664)
    with pytest.raises(FileNotFoundError, match="tuning.json: there is no folder .*nowhere"):
        save_tuning(tmp_path / "nowhere" / "tuning.json", {"cpu": NETWORK})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("alpha", float("nan"), "alpha must be a finite number of at least 0"),
        ("beta", True, "beta must be a finite number"),
        ("spills", ((0, 2.0),), "spills must be pairs of a finite size > 0"),
        ("spills", ((float("inf"), 2.0),), "spills must be pairs of a finite size > 0"),
        (
            "spills",
            ((1, 0.5),),
            "spills must be pairs of a finite size > 0 and a finite factor >= 1",
        ),
        ("spills", ((2, 1.0), (1, 2.0)), "spills must ascend"),
        ("spills", 3, "spills must be pairs"),
        ("ports", 1.5, "ports must be an integer of at least 1, got 1.5"),
        ("exchange", 0.5, "exchange must be a finite number of at least 1, got 0.5"),
        ("serial", 1, "serial must be a bool, got 1"),
        ("shared", 1, "shared must be a bool"),
    ],
)
def test_bad_links(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(NETWORK, **{field: value})
