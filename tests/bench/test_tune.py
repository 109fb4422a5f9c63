"""Prices from times: those that made the times are found again."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_ring import choose
from jax_ring.bench import tune
from jax_ring.bench.measure import AXIS, Case, Measurement, Rounds, Timing
from jax_ring.bench.tune import Level, Sample, fit, level, levels_of, merged, to_dict, verify
from jax_ring.choose import LINKS, Link, predict
from jax_ring.schedules import Kind
from jax_ring.schedules.families import make, names

SIZES = tuple(4 << 10 << 2 * i for i in range(7))


def samples(link, ranks=8, noise=0.0):
    random = np.random.default_rng(0)
    schedules = [make(name, Kind.ALL_REDUCE, ranks) for name in names(Kind.ALL_REDUCE)]
    return [
        Sample(s, n, predict(s, n, link) * float(np.exp(noise * random.normal())))
        for s in schedules
        for n in SIZES
    ]


@pytest.mark.parametrize(
    "true",
    [
        Link(alpha=3e-5, beta=2e-9),
        Link(alpha=3e-5, beta=2e-9, serial=True, exchange=1.5),
        Link(alpha=3e-6, beta=2e-11, ports=2),
        Link(alpha=0.0, beta=1e-9),
        Link(alpha=1e-3, beta=0.0),
    ],
)
def test_prices_of_a_network_are_found_again(true):
    found, error = fit(samples(true), true, "here")
    assert found.alpha == pytest.approx(true.alpha)
    assert found.beta == pytest.approx(true.beta)
    assert found.exchange == pytest.approx(true.exchange)
    assert (found.serial, found.ports, found.shared) == (true.serial, true.ports, False)
    assert (found.source, error) == ("here", pytest.approx(0, abs=1e-9))


def test_prices_of_one_machine_are_found_again_with_its_caches():
    true = Link(1e-5, 0.0, gamma=1e-11, spills=((1 << 17, 2.0), (1 << 20, 3.0)), shared=True)
    found, error = fit(samples(true), LINKS["cpu"])
    assert found.alpha == pytest.approx(true.alpha)
    assert found.gamma == pytest.approx(true.gamma)
    assert found.shared
    assert error == pytest.approx(0, abs=1e-9)
    # Caches that end between the same messages are the same.
    for sample in samples(true):
        assert predict(sample.schedule, sample.nbytes, found) == pytest.approx(sample.seconds)


@pytest.mark.parametrize("name", ["cpu", "gloo"])
def test_noise_does_not_change_choices_much(name):
    true = LINKS[name]
    found, error = fit(samples(true, noise=0.1), true)
    assert 0.02 < error < 0.15
    for size in SIZES:
        chosen = choose.choose(Kind.ALL_REDUCE, 8, size, found).algorithm
        schedule = make(chosen, Kind.ALL_REDUCE, 8) if isinstance(chosen, str) else chosen
        best = choose.choose(Kind.ALL_REDUCE, 8, size, true).seconds
        assert predict(schedule, size, true) <= 1.15 * best


def test_too_few_times_are_refused():
    with pytest.raises(ValueError, match="tune: at least 4 times are needed, got 3"):
        fit(samples(LINKS["gloo"])[:3], LINKS["gloo"])


def measured(name, seconds, chosen=None, nbytes=4096):
    timing = Timing((seconds,) * 3, None)
    return Measurement(Case(name, name), chosen or name, nbytes, nbytes // 4, timing, None)


def test_verdicts_compare_with_the_fastest(monkeypatch):
    found = [
        *(measured("auto", 2.0, "ring"), measured("ring", 1.9), measured("direct", 1.0)),
        measured("auto", 1.05, "ring of 4 segments", 8192),
        *(measured("ring", 5.0, nbytes=8192), measured("direct", 1.0, nbytes=8192)),
    ]
    monkeypatch.setattr(tune, "sweep", lambda *_, **__: iter(found))
    first, second = verify(Mesh(jax.devices()[:2], AXIS), {}, [4096, 8192], Rounds(), print)
    # The ring's own time counts, since that is what auto was; of segments auto's.
    assert (first.chosen, first.best, first.ratio, first.near) == ("ring", "direct", 1.9, False)
    assert (second.chosen, second.ratio, second.near) == ("ring of 4 segments", 1.05, True)


def test_levels_are_those_of_the_links():
    devices = jax.devices()
    assert list(levels_of(Mesh(devices, AXIS))) == ["cpu"]
    with pytest.raises(ValueError, match="one device is joined to no other: use --devices 8"):
        levels_of(Mesh(devices[:1], AXIS))


def test_levels_inside_of_and_between_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = levels_of(Mesh(jax.devices(), AXIS))
    assert list(found) == ["cpu", "gloo"]
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # Which has none of these devices.
    assert list(levels_of(Mesh(jax.devices(), AXIS))) == ["gloo"]


def test_other_links_of_a_file_are_kept(tmp_path):
    path = tmp_path / "tuning.json"
    gloo = Link(alpha=1e-3, beta=1e-9)
    choose.save_tuning(path, {"gloo": gloo, "cpu": Link(alpha=1.0, beta=0.0)})
    cpu = Link(alpha=2.0, beta=0.0)
    assert merged(path, {"cpu": cpu}) == {"gloo": gloo, "cpu": cpu}
    path.write_text("{}")
    with pytest.raises(ValueError, match="must name a file as jax_ring.choose.save_tuning"):
        merged(path, {})


def test_crossings_are_in_the_report():
    times = {"recursive_doubling": (1.0, 4.0), "ring": (2.0, 2.0)}
    one = Level("cpu", 8, LINKS["cpu"], 0.1, times, (1024, 4096))
    ((size, before, after),) = to_dict([one], [])["levels"][0]["crossings"]
    assert (size, before, after) == (pytest.approx(2048), "recursive_doubling", "ring")
    assert json.dumps(to_dict([one], []))


@pytest.mark.slow
def test_measured_prices_predict_what_was_measured():
    mesh = Mesh(jax.devices()[:4], AXIS)
    found = level(mesh, "cpu", [4096, 1 << 18, 1 << 22], Rounds(5, 1), lambda what: None)
    assert set(found.times) == set(names(Kind.ALL_REDUCE))
    assert found.link.alpha > 0
    assert found.link.gamma > 0
    assert found.error < 1  # A sum of prices that explains nothing would be off by 1.
    assert dataclasses.asdict(found.link)["shared"]
