import dataclasses
import re
import sys

import pytest

import jax_ring
from jax_ring.config import Settings, current, unread


def test_defaults():
    assert Settings.from_environment({}) == Settings(
        algorithm="auto",
        allow_xla=False,
        link="auto",
        tuning=None,
        unroll=32,
        native=True,
        reducer="auto",
        check_consistency=True,
    )


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("JAX_RING_ALGORITHM", " XLA ", "algorithm", "xla"),
        ("JAX_RING_REDUCER", "Native", "reducer", "native"),
        ("JAX_RING_UNROLL", "7", "unroll", 7),
        ("JAX_RING_NATIVE", "0", "native", False),
        ("JAX_RING_NATIVE", "true", "native", True),
        ("JAX_RING_ALLOW_XLA", "1", "allow_xla", True),
        ("JAX_RING_LINK", "GLOO", "link", "gloo"),
        ("JAX_RING_CHECK_CONSISTENCY", "0", "check_consistency", False),
    ],
)
def test_variables(variable, text, field, value):
    expected = dataclasses.replace(Settings(), **{field: value})
    assert Settings.from_environment({variable: text}) == expected


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("JAX_RING_ALGORITHM", "tree"),
        ("JAX_RING_REDUCER", "cuda"),
        ("JAX_RING_ALLOW_XLA", "maybe"),
        ("JAX_RING_LINK", "carrier pigeon"),
        ("JAX_RING_TUNING", "/no/such/file"),
        ("JAX_RING_UNROLL", "0"),
        ("JAX_RING_UNROLL", "many"),
        ("JAX_RING_NATIVE", "2"),
        ("JAX_RING_CHECK_CONSISTENCY", "never"),
    ],
)
def test_bad_values_name_the_variable(variable, text):
    with pytest.raises(ValueError, match=f"{variable}.*got '?{text}"):
        Settings.from_environment({variable: text})


def test_settings_hold_for_a_block():
    before = current()
    with jax_ring.config(unroll=3, algorithm="xla"):
        assert (current().unroll, current().algorithm) == (3, "xla")
        with jax_ring.config(unroll=5):
            assert (current().unroll, current().algorithm) == (5, "xla")
    assert current() == before
    with pytest.raises(RuntimeError), jax_ring.config(unroll=3):
        raise RuntimeError
    assert current() == before


def test_unknown_and_bad_settings():
    with pytest.raises(TypeError, match="colour"), jax_ring.config(colour="red"):
        pass
    with pytest.raises(ValueError, match="unroll.*got 0"), jax_ring.config(unroll=0):
        pass
    with pytest.raises(ValueError, match="native.*got 1"), jax_ring.config(native=1):
        pass


def test_a_setting_may_stand_in_for_a_wrong_variable(monkeypatch):
    module = sys.modules[jax_ring.config.__module__]
    monkeypatch.setenv("JAX_RING_TUNING", "/no/such/file")
    monkeypatch.setenv("JAX_RING_UNROLL", "7")
    monkeypatch.setattr(module, "environment_error", "tuning")
    with pytest.raises(ValueError, match="/no/such/file"), jax_ring.config(link="gloo"):
        pass
    with jax_ring.config(tuning=None), jax_ring.config(link="gloo"):
        assert (current().tuning, current().unroll, current().link) == (None, 7, "gloo")
    with pytest.raises(ValueError, match="tuning"):
        current()


def test_names_that_nothing_reads():
    known = re.findall(r"^\| (JAX_RING_\w+)", sys.modules[jax_ring.config.__module__].__doc__, re.M)
    known += re.findall(r"(JAX_RING_\w+)", jax_ring.distributed.__doc__)
    assert len(known) >= 12
    assert unread(dict.fromkeys(known, "1")) == {}
    typos = {"JAX_RING_TUNNING": "1", "JAX_RING_PROCES": "2", "JAX_RING_COLOUR": "3"}
    found = unread({**typos, "_JAX_RING_COMPLETE": "bash_source", "PATH": "/bin"})
    assert found.pop("JAX_RING_PROCES") in ("JAX_RING_PROCESS", "JAX_RING_PROCESSES")
    assert found == {"JAX_RING_TUNNING": "JAX_RING_TUNING", "JAX_RING_COLOUR": ""}
