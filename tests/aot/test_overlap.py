"""The step of a transformer for 8 x H200: what its buckets' permutes are scheduled beside."""

import pytest
from overlap import LATENCY_HIDING, LAYER_BYTES, LAYERS, read

pytestmark = pytest.mark.aot

SENT = LAYERS * LAYER_BYTES * 14 // 8  # 2(N-1)/N of all gradients


def overlap(mesh, layers, hiding=True, **how):
    options = {LATENCY_HIDING: hiding}
    found = read(mesh, options, bucket_bytes=layers * LAYER_BYTES, **how)
    assert sum(found.beside) + sum(found.exposed) == SENT
    return found


def test_all_buckets_but_the_last_travel_beside_matrix_products(one_host):
    found = overlap(one_host, 1, algorithm="ring")
    assert sum(nbytes > 0 for nbytes in found.beside) == LAYERS - 1, found


def test_without_latency_hiding_all_is_exposed(one_host):
    found = overlap(one_host, 1, hiding=False, algorithm="ring")
    assert not any(found.beside), found


def test_in_order_nothing_but_the_last_bucket_is_exposed(one_host):
    how = {"algorithm": "halving_doubling"}
    *before, last = overlap(one_host, 2, in_order=True, **how).exposed
    assert (before, last) == ([0, 0], SENT // 3)
    assert sum(overlap(one_host, 2, **how).exposed) > last
