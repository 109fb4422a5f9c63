import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh, same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring.gradients import Shard, shard_like, shard_params, shard_specs, unshard
from jax_ring.gradients.shards import Split


@pytest.mark.parametrize(
    ("shape", "ranks", "dimension"),
    [
        ((), 4, -1),
        ((3,), 4, -1),
        ((8, 3), 4, -2),
        ((3, 8), 4, -1),
        ((8, 8), 4, -2),  # The first of those that need no filling.
        ((5, 3, 7), 4, -1),  # 8 x 3 x 7, 5 x 4 x 7 or 5 x 3 x 8.
        ((0, 3), 4, -2),
        ((7, 7), 1, -2),
    ],
)
def test_the_dimension_with_the_least_filling_is_cut(shape, ranks, dimension):
    assert Split.choose(shape, ranks) == Split(shape, dimension)


@pytest.mark.parametrize(
    ("shape", "ranks"), [((), 3), ((5,), 4), ((0, 2), 3), ((3, 5), 1), ((4, 7, 3), 4)]
)
def test_a_ranks_part_is_the_slice_of_its_dimension(shape, ranks):
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    split = Split.choose(shape, ranks)
    shard = shard_params(x, ranks)
    assert shard.split == split
    rows = split.parts(jnp.asarray(x), ranks)
    for row, wanted in zip(rows, np.split(shard.value, ranks, axis=split.dimension), strict=True):
        assert wanted.shape == split.part_shape(shape, ranks)
        assert same_bits(row, wanted.reshape(-1))
    assert same_bits(split.join(rows, split.part_shape(shape, ranks)), x)
    assert same_bits(unshard(shard), x)


def state_of(optimizer, params, ranks):
    return jax.eval_shape(lambda p: optimizer.init(shard_params(p, ranks)), params)


PARAMS = {"w": jnp.ones((3, 5)), "none": None, "b": jnp.arange(6.0), "s": jnp.float32(2)}


def test_states_are_whole_when_unsharded_whatever_the_number_of_ranks():
    optimizer = optax.chain(
        optax.masked(optax.adam(0.1), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
        optax.trace(0.9),
    )
    wanted = jax.eval_shape(optimizer.init, PARAMS)
    for ranks in (1, 4):
        found = jax.eval_shape(unshard, state_of(optimizer, PARAMS, ranks))
        # What is a vector of one for a shard is a scalar again; masks look at dimensions.
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        assert jax.tree.leaves(found) == jax.tree.leaves(wanted)


def test_from_four_ranks_to_eight_and_two():
    four = shard_params(PARAMS, 4)
    for ranks in (8, 2):
        like = jax.eval_shape(lambda p, ranks=ranks: shard_params(p, ranks), PARAMS)
        again, wanted = shard_like(unshard(four), like), shard_params(PARAMS, ranks)
        assert jax.tree.structure(again) == jax.tree.structure(wanted)
        assert jax.tree.all(jax.tree.map(same_bits, again, wanted))


def test_stacked_layers_are_cut_each():
    stack = {"w": jnp.arange(24.0).reshape(4, 2, 3), "scale": jnp.arange(4.0)}
    shards = shard_params(stack, 2, stacked=True)
    assert shards["w"].split == Split((2, 3), -2)
    assert shards["scale"].split == Split((), -1)
    assert shards["scale"].value.shape == (4, 2)
    assert shard_specs(shards, "x")["w"].value == P(None, "x")
    assert jax.tree.all(jax.tree.map(same_bits, unshard(shards), stack))
    like = jax.eval_shape(lambda s: shard_params(s, 3, stacked=True), stack)
    assert jax.tree.all(jax.tree.map(same_bits, unshard(shard_like(stack, like)), stack))


def test_specs_lay_out_a_part_on_each_device():
    shards = shard_params({"w": jnp.ones((3, 8)), "n": jnp.zeros((2, 2, 5))}, 8)
    specs = shard_specs((shards, jnp.float32(1)), ("x", "y"))
    assert specs[1] == P()
    assert specs[0]["w"].value == P(None, ("x", "y"))
    assert isinstance(specs[0]["w"], Shard)
    m = mesh(4, 2)
    for shard, spec in zip(jax.tree.leaves(shards), jax.tree.leaves(specs[0]), strict=True):
        placed = jax.device_put(shard, NamedSharding(m, spec))
        assert {piece.data.size for piece in placed.addressable_shards} == {shard.size // 8}


def test_unshard_of_what_is_explicitly_sharded():
    m = mesh(4, explicit=True)
    shards = shard_params({"even": jnp.ones(8), "uneven": jnp.arange(6.0)}, 4)
    placed = jax.device_put(
        shards, jax.tree.map(lambda s: NamedSharding(m, s), shard_specs(shards, "x"))
    )
    for found in (unshard(placed), jax.jit(unshard)(placed)):
        assert same_bits(found["even"], np.ones(8, np.float32))
        assert same_bits(found["uneven"], np.arange(6, dtype=np.float32))


def test_errors():
    like = shard_params({"w": jnp.zeros(3)}, 2)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        shard_params({}, 0)
    with pytest.raises(ValueError, match=r"stacked=True needs .* leaf \['a'\] is a scalar"):
        shard_params({"a": jnp.float32(1)}, 2, stacked=True)
    with pytest.raises(ValueError, match=r"leaf \['w'\] of tree must be of shape \(3,\), got \(4,"):
        shard_like({"w": jnp.zeros(4)}, like)
    with pytest.raises(ValueError, match=r"tree must have the structure of .*'w'.* got .*'v'"):
        shard_like({"v": jnp.zeros(3)}, like)
