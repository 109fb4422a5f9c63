import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ring.gradients import plan_buckets


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def paths(plan):
    return [[leaf.path for leaf in bucket.leaves] for bucket in plan.buckets]


TREE = {"a": f32(10), "b": f32(20), "c": f32(30), "d": f32(5)}


def test_the_last_leaves_come_first_and_buckets_are_full():
    assert paths(plan_buckets(TREE, 4 * 35)) == [["['d']", "['c']"], ["['b']", "['a']"]]
    assert paths(plan_buckets(TREE, 4 * 36)) == [["['d']", "['c']"], ["['b']", "['a']"]]
    assert paths(plan_buckets(TREE, 4 * 34)) == [["['d']"], ["['c']"], ["['b']", "['a']"]]


@pytest.mark.parametrize(("limit", "buckets"), [(1, 4), (4 * 65, 1), (10**12, 1)])
def test_limits_at_both_ends(limit, buckets):
    plan = plan_buckets(TREE, limit)
    assert len(plan.buckets) == buckets
    assert sum(bucket.nbytes for bucket in plan.buckets) == 4 * 65


def test_one_dtype_to_a_bucket():
    half = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    plan = plan_buckets([f32(1), half, f32(2), half])
    assert paths(plan) == [["[3]", "[1]"], ["[2]", "[0]"]]
    assert [bucket.dtype for bucket in plan.buckets] == [jnp.bfloat16, jnp.float32]
    assert [bucket.nbytes for bucket in plan.buckets] == [16, 12]


def test_what_is_no_leaf_or_no_number():
    plan = plan_buckets({"a": f32(2), "b": None, "c": np.zeros(3, jax.dtypes.float0)})
    assert paths(plan) == [["['a']"]]
    assert [leaf.path for leaf in plan.apart] == ["['c']"]
    assert str(plan_buckets({})) == "no leaves"
    assert paths(plan_buckets(1.0)) == [[""]]


def test_thousands_of_scalars_are_one_bucket():
    assert len(plan_buckets([f32()] * 3000).buckets) == 1


def test_an_order_of_ones_own():
    plan = plan_buckets(TREE, 4 * 30, order=lambda found: [found.index("['b']"), 0, 3, 2])
    assert paths(plan) == [["['b']", "['a']"], ["['d']"], ["['c']"]]


def test_plans_depend_on_paths_shapes_and_dtypes_alone():
    again = {key: jnp.zeros(TREE[key].shape) for key in reversed(TREE)}
    assert plan_buckets(again) == plan_buckets(TREE)
    assert plan_buckets(again).fingerprint == plan_buckets(TREE).fingerprint
    assert plan_buckets(TREE, 1).fingerprint != plan_buckets(TREE).fingerprint
    assert "bucket 0: float32, 260 bytes\n  ['d'] [5]" in str(plan_buckets(TREE))


def test_bad_arguments():
    for wrong in (0, -5, True):
        with pytest.raises(ValueError, match=f"bucket_bytes must be at least 1, got {wrong}"):
            plan_buckets(TREE, wrong)
    with pytest.raises(ValueError, match="order must give each of the 4 leaves once, got"):
        plan_buckets(TREE, order=lambda found: [0, 0, 1, 2])
    with pytest.raises(TypeError, match=r"leaf \['x'\] must be an array, got str"):
        plan_buckets({"x": "weights"})


def test_one_operation_to_a_bucket():
    plan = plan_buckets(TREE, op={"a": "sum", "b": "max", "c": "sum", "d": "max"})
    assert paths(plan) == [["['d']", "['b']"], ["['c']", "['a']"]]
    assert [bucket.op for bucket in plan.buckets] == ["max", "sum"]
    upper = plan_buckets({"grads": TREE, "amax": f32()}, op={"grads": "mean", "amax": "max"})
    assert [(bucket.op, len(bucket.leaves)) for bucket in upper.buckets] == [
        ("mean", 4),
        ("max", 1),
    ]
    assert plan_buckets({"a": None}, op={"a": "sum"}).buckets == ()


@pytest.mark.parametrize("op", [{"a": "sum"}, ["sum"] * 4, {"a": {"more": "sum"}, "b": 1}])
def test_operations_of_another_structure(op):
    with pytest.raises(
        ValueError, match="op must be one of .*'prod'.*, or a tree of these like .*'a'"
    ):
        plan_buckets(TREE, op=op)


@pytest.mark.parametrize(
    "op", ["avg", jnp.maximum, {"a": "sum", "b": jnp.add, "c": "sum", "d": "max"}]
)
def test_operations_that_have_no_name(op):
    with pytest.raises(ValueError, match="op must be one of .*'prod'.*, got "):
        plan_buckets(TREE, op=op)
