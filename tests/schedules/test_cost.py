import pytest

from jax_ring.schedules import cost, ring, ring_all_gather, ring_reduce_scatter


@pytest.mark.parametrize("n", [1, 2, 3, 8, 100])
def test_the_ring_costs_what_the_literature_says(n):
    alpha, beta, size = 3e-6, 1 / 45e9, 1e9
    expected = 2 * (n - 1) * alpha + 2 * (n - 1) / n * size * beta
    assert cost(ring(n), size, alpha, beta) == pytest.approx(expected, rel=1e-12)


def test_an_all_reduce_costs_its_two_halves():
    parts = [cost(make(6), 12.0, 1.0, 1.0) for make in (ring_reduce_scatter, ring_all_gather)]
    assert cost(ring(6), 12.0, 1.0, 1.0) == sum(parts) == 30.0


@pytest.mark.parametrize("value", [-2.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["nbytes", "alpha", "beta"])
def test_bad_arguments_are_named(name, value):
    arguments = {"nbytes": 1.0, "alpha": 1.0, "beta": 1.0, name: value}
    with pytest.raises(ValueError, match=f"{name} must be finite and not negative, got {value}"):
        cost(ring(4), **arguments)
