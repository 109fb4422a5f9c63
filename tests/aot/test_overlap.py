"""A step of the example's transformer for 8 x H200: what its permutes are scheduled beside."""

import pytest

pytest.importorskip("flax")
from overlap import ENDS_BYTES, LATENCY_HIDING, LAYER_BYTES, LAYERS, order, parameters, read

from jax_ring.gradients import plan_buckets

pytestmark = pytest.mark.aot


def overlap(mesh, layers, hiding=True, **how):
    limit = layers * LAYER_BYTES + ENDS_BYTES
    found = read(mesh, {LATENCY_HIDING: hiding}, bucket_bytes=limit, **how)
    buckets = plan_buckets(parameters()[1], limit, order=order).buckets
    assert len(buckets) == len(found.beside) == LAYERS // layers
    chunks = [-(-bucket.nbytes // 2 // 8) * 2 for bucket in buckets]  # bfloat16, 8 ranks
    assert sum(found.beside) + sum(found.exposed) == 14 * sum(chunks)
    return found


def test_all_buckets_but_the_last_travel_beside_matrix_products(one_host):
    *before, last = overlap(one_host, 1, algorithm="ring", in_order=True).beside
    assert all(before)
    assert last == 0


def test_not_in_order_each_has_at_least_one_product(one_host):
    found = overlap(one_host, 1, algorithm="ring")
    # XLA combines permutes of two buckets here and there: which one has none is not the question.
    assert sum(nbytes > 0 for nbytes in found.beside) >= LAYERS - 1


def test_without_latency_hiding_all_is_exposed(one_host):
    found = overlap(one_host, 1, hiding=False, algorithm="ring")
    assert not any(found.beside)


def test_in_order_little_but_the_last_bucket_is_exposed(one_host):
    how = {"algorithm": "halving_doubling"}
    found = overlap(one_host, 2, in_order=True, **how)
    # XLA leaves one of a bucket's 14 chunks bare in jax 0.12.1, none in 0.12.0.1.
    for exposed, beside in zip(found.exposed[:-1], found.beside[:-1], strict=True):
        assert exposed <= (exposed + beside) / 14
    assert sum(overlap(one_host, 2, **how).exposed) > found.exposed[-1]
