import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import compiled, mesh, per_rank, same_bits, sharded
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import accumulate_gradients

N = 4


def loss(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    return ((predicted - batch["y"]) ** 2).mean()


def data(ranks=N, rows=12):
    random = np.random.default_rng(0)
    return {
        "x": random.standard_normal((ranks, rows, 5)).astype(np.float32),
        "y": random.standard_normal((ranks, rows)).astype(np.float32),
    }


PARAMS = {"w": np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4), "v": np.ones(4, np.float32)}


def flat(batch):
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("parts", [1, 3, 4, 12])
def test_it_is_the_gradient_of_the_whole_batch(parts, check_vma):
    batch = data()
    step = accumulate_gradients(loss, parts, axis_name="x")
    value, grads = per_rank(lambda b: step(PARAMS, b), N, batch, check_vma=check_vma)
    expected, wanted = jax.value_and_grad(loss)(PARAMS, flat(batch))
    for row in np.asarray(value):
        np.testing.assert_allclose(row, expected, rtol=1e-6)
    for name in PARAMS:
        assert all(same_bits(row, grads[name][0]) for row in np.asarray(grads[name]))
        np.testing.assert_allclose(grads[name][0], wanted[name], rtol=1e-5, atol=1e-6)


def masked(params, batch):
    """The mean over examples that count; NaN where none does."""
    errors = (batch["x"] @ params - batch["y"]) ** 2
    count = batch["counts"].sum()
    return (errors * batch["counts"]).sum() / count, count


def test_ranks_and_parts_with_other_weights_or_none():
    batch = data()
    counts = (np.random.default_rng(1).random((N, 12)) < 0.5).astype(np.float32)
    counts[2] = 0.0  # A rank that has nothing,
    counts[0, :4] = 0.0  # and a micro-batch.
    batch["counts"] = counts
    w = np.arange(5, dtype=np.float32)
    step = accumulate_gradients(masked, 3, axis_name="x", weighted=True)
    value, grads = per_rank(lambda b: step(w, b), N, batch)
    (expected, _), wanted = jax.value_and_grad(masked, has_aux=True)(w, flat(batch))
    np.testing.assert_allclose(value[0], expected, rtol=1e-5)
    np.testing.assert_allclose(grads[0], wanted, rtol=1e-5)


def test_nothing_counts():
    batch = data() | {"counts": np.zeros((N, 12), np.float32)}
    step = accumulate_gradients(masked, 3, axis_name="x", weighted=True)
    value, grads = per_rank(lambda b: step(np.ones(5, np.float32), b), N, batch)
    assert not np.any(value)
    assert not np.any(grads)


def test_ranks_without_a_batch_count_nothing():
    """Ranks 6 and 7 have weight 0: the mean of 0 to 5."""
    x = {"v": np.arange(8, dtype=np.float32)[:, None], "w": (np.arange(8) < 6)[:, None]}
    f = accumulate_gradients(
        lambda p, b: (p * b["v"].sum(), b["w"].sum()), 1, axis_name="x", weighted=True
    )
    assert per_rank(lambda b: f(np.float32(1), b)[1], 8, x).tolist() == [2.5] * 8


def test_a_parameter_of_the_first_part_alone():
    def first(params, batch):
        return jnp.where(batch.max() == 0, params["a"], 0.0) + params["b"] * batch.mean()

    batch = np.tile(np.arange(4, dtype=np.float32), (N, 1))
    params = {"a": np.float32(0), "b": np.float32(0)}
    grads = per_rank(
        lambda b: accumulate_gradients(first, 4, axis_name="x")(params, b)[1], N, batch
    )
    assert grads["a"].tolist() == [0.25] * N
    assert grads["b"].tolist() == [1.5] * N


def test_small_gradients_of_narrow_parameters_are_not_lost():
    def linear(w, x):
        return (w.astype(jnp.float32) * x).sum()

    # Added in bfloat16, the ones after the 256 would be lost.
    batch = np.concatenate([[256.0], np.ones(255)]).astype(np.float32)
    step = accumulate_gradients(linear, 256)
    _, grad = step(jnp.zeros((), jnp.bfloat16), batch)
    assert grad.dtype == jnp.bfloat16
    assert float(grad) == np.float32(511 / 256).astype(jnp.bfloat16)


def test_one_reduction_after_the_loop_and_none_in_it():
    step = accumulate_gradients(loss, 4, axis_name="x", algorithm="ring")
    f = jax.shard_map(step, mesh=mesh(N), in_specs=(P(), P("x")), out_specs=P())
    batch = jax.tree.map(lambda leaf: sharded(mesh(N), P("x"), leaf.shape), flat(data()))
    hlo = compiled(f, PARAMS, batch)
    entry = hlo.text[hlo.text.index("\nENTRY") :]
    assert entry.count(" collective-permute(") == len(hlo.permutes) == 2 * (N - 1)
    assert not hlo.other_collectives
    assert " while(" in entry


def test_in_a_training_loop():
    batch, optimizer = data(), optax.adam(0.05)
    step = accumulate_gradients(loss, 3, axis_name="x")

    def train(b):
        def update(state, _):
            params, moments = state
            value, grads = step(params, b)
            changes, moments = optimizer.update(grads, moments)
            return (optax.apply_updates(params, changes), moments), value

        params = jax.tree.map(jnp.asarray, PARAMS)
        return jax.lax.scan(update, (params, optimizer.init(params)), length=60)[1]

    losses = per_rank(train, N, batch)
    assert losses[0][-1] < 0.6 * losses[0][0]


def test_bad_arguments():
    for wrong in (0, True):
        with pytest.raises(ValueError, match=f"microbatches must be at least 1, got {wrong}"):
            accumulate_gradients(loss, wrong)
    with pytest.raises(ValueError, match="op must not be given, it takes the mean; got 'sum'"):
        accumulate_gradients(loss, 2, op="sum")
    step = accumulate_gradients(loss, 5)
    with pytest.raises(ValueError, match=r"leaf \['x'\] of the batch has shape \(12, 5\), whose"):
        step(PARAMS, jax.tree.map(lambda leaf: leaf[0], data()))
    scalar = functools.partial(accumulate_gradients(lambda p, b: p * b, 1), 1.0)
    with pytest.raises(ValueError, match=r"has shape \(\), whose first dimension"):
        scalar(2.0)


def test_a_lossy_wire_leaves_the_loss_exact_and_its_size_out_of_the_scales():
    batch = data()
    huge = lambda params, part: loss(params, part) + 1e6  # noqa: E731
    step = accumulate_gradients(huge, 2, axis_name="x", wire="int8", algorithm="ring")
    value, grads = per_rank(lambda b: step(PARAMS, b), N, batch)
    expected, wanted = jax.value_and_grad(huge)(PARAMS, flat(batch))
    np.testing.assert_allclose(value[0], expected, rtol=1e-6)
    np.testing.assert_allclose(grads["w"][0], wanted["w"], atol=0.05)
