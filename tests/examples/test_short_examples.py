"""The two short examples, run as a reader would."""

import re

import pytest


def counts(line: str) -> dict[str, int]:
    return {name: int(n) for name, n in re.findall(r"([a-z]+-[a-z]+): (\d+)", line)}


def test_replace_psum_agrees_and_shows_the_ring(run_example) -> None:
    out = run_example("replace_psum.py").stdout.splitlines()
    before, after = counts(out[0]), counts(out[1])
    assert before == {"all-reduce": 1, "collective-permute": 0}
    assert after == {"all-reduce": 0, "collective-permute": 2 * (8 - 1)}
    difference = re.fullmatch(r"they agree: largest difference (\S+)", out[2])
    assert difference
    assert float(difference[1]) < 1e-6


@pytest.mark.slow
def test_pjit_forms_have_equal_losses_and_different_collectives(run_example) -> None:
    out = run_example("pjit_data_parallel.py").stdout.splitlines()
    plain, ring = counts(out[0]), counts(out[1])
    assert float(out[2].rpartition(" ")[2]) <= 1e-6
    # The reduction over "data" is gone; that over "model" is still the compiler's.
    assert (plain["all-reduce"], ring["all-reduce"]) == (2, 1)
    # One ring of four ranks for the loss and for each of the two gradients.
    assert (plain["collective-permute"], ring["collective-permute"]) == (0, 3 * 2 * (4 - 1))
    assert plain["all-gather"] == ring["all-gather"] == 0
    losses = [re.search(r"loss (\S+) -> (\S+);", line) for line in out[:2]]
    for found in losses:
        assert found
        assert float(found[2]) < float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_models_of_other_libraries_learn_as_by_the_compiler(run_example, library: str) -> None:
    pytest.importorskip({"nnx": "flax"}.get(library, library), exc_type=ImportError)
    first, last = run_example(f"{library}_data_parallel.py").stdout.splitlines()
    assert float(first.rpartition(" ")[2]) < 1e-6
    before, after = re.fullmatch(r"loss (\S+) -> (\S+)", last).groups()
    assert float(after) < float(before) / 5


@pytest.mark.parametrize(
    "example",
    [
        "replace_psum.py",
        "pjit_data_parallel.py",
        "nnx_data_parallel.py",
        "equinox_data_parallel.py",
    ],
)
def test_short_examples_start_with_what_to_learn(examples, example: str) -> None:
    text = (examples / example).read_text()
    assert text.startswith('"""')
    assert f"python examples/{example}" in text
