"""Operands whose results are exact, and the oracle that counts what is wrong."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ring.bench.operands import OPS, PERIOD, Operands
from jax_ring.schedules import Kind

REDUCE = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "mean": np.mean}


def rows(operands, count):
    return np.stack([operands.of_rank(r, count) for r in range(operands.ranks)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8", "int32"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 7, pytest.param(300, marks=pytest.mark.slow)])
def test_results_are_exact_in_any_order(dtype, op, ranks):
    if op == "mean" and "int" in dtype:
        return
    operands = Operands(Kind.ALL_REDUCE, op, dtype, ranks)
    x = rows(operands, 999)
    assert x.dtype == jnp.dtype(dtype)
    if op == "mean":
        op, scale = "sum", ranks
    else:
        scale = 1
    binary = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    for order in (np.arange(ranks), np.random.default_rng(ranks).permutation(ranks)):
        total = x[order[0]]
        for rank in order[1:]:
            total = binary(total, x[rank]).astype(x.dtype)
        wide = REDUCE[op](x.astype(np.float64), axis=0)
        np.testing.assert_array_equal(total.astype(np.float64), wide)
        expected = (wide / scale).astype(x.dtype)
        assert operands.wrong(expected, rank=0, count=999) == 0


def test_values_differ_between_ranks_and_places():
    x = rows(Operands(Kind.ALL_REDUCE, "sum", "float32", 4), 1 << 12)
    assert len({row.tobytes() for row in x}) == 4
    assert len({x[0, i : i + 64].tobytes() for i in range(0, 1 << 12, 64)}) == 64


@pytest.mark.parametrize("count", [5, PERIOD, 64 * PERIOD + 3, 66 * PERIOD - 1])
def test_what_is_wrong_is_counted(count):
    operands = Operands(Kind.ALL_REDUCE, "sum", "int32", 3)
    total = rows(operands, count).sum(0, dtype=np.int32)
    assert operands.wrong(total, rank=1, count=count) == 0
    for place in {0, count // 2, count - 1}:
        total[place] += 1
    assert operands.wrong(total, rank=1, count=count) == len({0, count // 2, count - 1})


def test_nan_is_wrong():
    operands = Operands(Kind.ALL_REDUCE, "max", "float32", 2)
    found = rows(operands, 4).max(0)
    found[2] = np.nan
    assert operands.wrong(found, rank=0, count=4) == 1


def test_a_result_of_another_size_is_wrong_as_a_whole():
    operands = Operands(Kind.ALL_GATHER, "sum", "float32", 2)
    assert operands.wrong(rows(operands, 4).ravel()[:7], rank=0, count=4) == 7
    assert operands.wrong(np.empty(0, np.float32), rank=0, count=4) == 1


def test_blocks_of_a_reduce_scatter_belong_to_their_ranks():
    operands = Operands(Kind.REDUCE_SCATTER, "sum", "float32", 4)
    total = rows(operands, 4 * 70_000).sum(0).reshape(4, -1)
    for rank in range(4):
        assert operands.wrong(total[rank], rank=rank, count=4 * 70_000) == 0
        assert operands.wrong(total[rank], rank=(rank + 1) % 4, count=4 * 70_000) > 60_000


def test_an_all_gather_is_all_operands():
    operands = Operands(Kind.ALL_GATHER, "sum", "float32", 3)
    gathered = rows(operands, 10)
    assert operands.wrong(gathered.ravel(), rank=2, count=10) == 0
    assert operands.wrong(gathered[::-1].ravel(), rank=2, count=10) > 0


@pytest.mark.parametrize("wire", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_lossy_wires_may_be_off_by_a_bound_and_no_more(wire):
    operands = Operands(Kind.ALL_REDUCE, "sum", "float32", 4, (wire,))
    total = rows(operands, 1000).sum(0)
    step = np.abs(total).max() * 1e-3
    options = {"rank": 0, "count": 1000, "wire": wire, "algorithm": "direct"}
    assert operands.wrong(total + step, **options) == 0
    assert operands.wrong(total + 1e4 * step, **options) == 1000
    assert operands.wrong(total + step, rank=0, count=1000) == 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("median", "float32"), "op must be one of sum, prod, max, min, mean, got 'median'"),
        (("mean", "int32"), "a mean is for floats, got dtype int32"),
        (("prod", "float32", 2, ("int8",)), "what a product may lose over wire='int8' has no"),
    ],
)
def test_what_has_no_exact_result_is_refused(arguments, message):
    op, dtype, *others = arguments
    ranks, wires = others or (2, (None,))
    with pytest.raises(ValueError, match=message):
        Operands(Kind.ALL_REDUCE, op, dtype, ranks, wires)
