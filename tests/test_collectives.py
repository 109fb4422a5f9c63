"""What users see: values, shapes, dtypes, types and errors, against jax.lax and NumPy."""

import functools
import inspect
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from harness import Hlo, compiled, integers, mesh, per_rank, same_bits, sharded, vary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring.schedules import Kind
from jax_ring.schedules.families import names

N = 8
REDUCTIONS = ["psum", "pmean", "pmax", "pmin"]
INTEGERS = [np.dtype(f"{kind}int{bits}") for kind in ("", "u") for bits in (8, 16, 32)]
FLOATS = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]
FP8 = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
COMPLEX = [np.dtype(np.complex64)]


def ours_and_lax(name):
    return getattr(jax_ring, name), getattr(lax, name)


def assert_like_lax(names, x, n=N, check_vma=True, rtol=0.0, **kwargs):
    """Ours and lax's on the same rows: same structure, shapes and dtypes, and the same values.

    Several functions and leaves are compiled as one program, which is most of a test's time.
    """
    names = [names] if isinstance(names, str) else names

    def f(v):
        return {name: [g(v, "x", **kwargs) for g in ours_and_lax(name)] for name in names}

    for name, (ours, theirs) in per_rank(f, n, x, check_vma=check_vma).items():
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for path, a in jax.tree.leaves_with_path(ours):
            b = functools.reduce(lambda tree, key: tree[key.key], path, theirs)
            assert (a.shape, a.dtype) == (b.shape, b.dtype), (name, path)
            wide = np.complex128 if jnp.iscomplexobj(a) else np.float64
            np.testing.assert_allclose(
                np.asarray(a).astype(wide),
                np.asarray(b).astype(wide),
                rtol,
                err_msg=f"{name} {path}",
            )


def of_every(dtypes, shape, **kwargs):
    return {str(dtype): integers(shape, dtype, **kwargs) for dtype in dtypes}


# --- a drop-in for lax ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*REDUCTIONS, "psum_scatter", "all_gather"])
def test_parameters_are_those_of_the_installed_lax(name):
    ours, theirs = (list(inspect.signature(f).parameters.values()) for f in ours_and_lax(name))
    strip = functools.partial(map, lambda p: (p.name, p.kind, p.default))
    assert list(strip(ours))[: len(theirs)] == list(strip(theirs))
    extra = ours[len(theirs) :]
    assert [p.name for p in extra] == ["algorithm", "reduce_dtype", "wire"]
    assert all(p.kind is p.KEYWORD_ONLY for p in extra)


BOOL = [np.dtype(bool)]


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sums_of_every_dtype(check_vma):
    x = of_every([*INTEGERS, *FLOATS, *COMPLEX, *BOOL], (N, 13))
    assert_like_lax(["psum", "pmean"], x, check_vma=check_vma, rtol=1e-3)
    assert_like_lax("psum", x, check_vma=check_vma)


def test_extrema_of_every_dtype():
    assert_like_lax(["pmax", "pmin"], of_every([*INTEGERS, *FLOATS, *BOOL], (N, 13), high=120))


def test_scatters_and_gathers_of_every_dtype():
    assert_like_lax("psum_scatter", of_every([*INTEGERS, *FLOATS, *COMPLEX], (N, N, 3)))
    assert_like_lax("all_gather", of_every([*INTEGERS, *FLOATS, *FP8, *COMPLEX, *BOOL], (N, 3)))


def test_8_bit_floats():
    assert_like_lax([*REDUCTIONS, "psum_scatter"], of_every(FP8, (N, N)))


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_4_bit_integers_wrap(dtype):
    x = jnp.asarray(integers((N, 16), np.int8, high=7), dtype)
    out = per_rank(lambda v: jax_ring.psum(v, "x"), N, x)
    assert out.dtype == jnp.dtype(dtype)
    total = np.asarray(x.astype(jnp.int32)).sum(0)
    expected = total % 16 if dtype == "uint4" else (total + 8) % 16 - 8
    assert (np.asarray(out.astype(jnp.int32)) == expected).all()


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.complex128])
def test_64_bit_dtypes(dtype):
    with jax.enable_x64(True):
        x = integers((N, 5), dtype)
        for name in ("psum", "pmean"):
            assert_like_lax(name, x)
        assert per_rank(lambda v: jax_ring.psum(v, "x"), N, x).dtype == dtype


def test_a_float32_stays_one_in_64_bit_mode():
    with jax.enable_x64(True):
        out = per_rank(lambda v: jax_ring.psum(v, "x"), N, np.ones((N,), np.float32))
    assert out.dtype == np.float32
    assert (out == 8).all()


def test_bool_counts():
    x = np.tile(np.arange(N)[:, None] % 2 == 0, (1, 5))
    out = per_rank(lambda v: jax_ring.psum(v, "x"), N, x)
    assert out.dtype == np.int32
    assert (out == 4).all()


def test_a_scatter_counts_bool_as_int32():
    out = per_rank(lambda v: jax_ring.psum_scatter(v, "x"), N, np.ones((N, N), bool))
    assert out.dtype == np.int32
    assert (out == 8).all()


def test_complex_sums():
    x = (np.arange(1, 9)[:, None] * np.full(3, 1 - 2j)).astype(np.complex64)
    assert (per_rank(lambda v: jax_ring.psum(v, "x"), N, x) == 36 - 72j).all()


def test_integers_wrap():
    out = per_rank(lambda v: jax_ring.psum(v, "x"), 2, np.array([[120], [100]], np.int8))
    assert (out == -36).all()


def test_every_shape():
    shapes = [(), (1,), (3,), (7,), (8,), (9,), (0,), (2, 0, 3), (3, 5, 2), (16, 3), (3, 64)]
    assert_like_lax(REDUCTIONS, {shape: integers((N, *shape), np.float32) for shape in shapes})


@pytest.mark.parametrize("n", range(1, 9))
def test_every_number_of_ranks(n):
    assert_like_lax(
        "psum", {length: integers((n, length), np.int32) for length in (1, 3, 16, 31)}, n
    )


@given(
    n=st.sampled_from([2, 3, 5, 8]),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from([np.float32, np.int8, np.float16]),
    check_vma=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_shape_against_lax(n, shape, dtype, check_vma, seed):
    # lax rounds the mean of float16 twice.
    assert_like_lax(REDUCTIONS, integers((n, *shape), dtype, seed), n, check_vma, rtol=2**-10)


@given(
    n=st.sampled_from([2, 3, 8]),
    before=st.lists(st.integers(1, 3), max_size=2),
    after=st.lists(st.integers(0, 3), max_size=2),
    blocks=st.integers(1, 3),
    tiled=st.booleans(),
    negative=st.booleans(),
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_scatter_and_gather_against_lax(n, before, after, blocks, tiled, negative):
    d = len(before)
    size = n * blocks if tiled else n
    x = integers((n, *before, size, *after), np.float32)
    assert_like_lax("psum_scatter", x, n, scatter_dimension=d, tiled=tiled)
    ndim = x.ndim - 1 + (not tiled)
    assert_like_lax("all_gather", x, n, axis=d - ndim if negative else d, tiled=tiled)


def test_scattering_and_gathering_nothing():  # which lax does not lower
    x = np.zeros((N, 0, 3), np.float32)

    def f(v):
        return jax_ring.psum_scatter(v, "x", tiled=True), jax_ring.all_gather(v, "x", tiled=True)

    block, whole = per_rank(f, N, x)
    assert block.shape == whole.shape == (N, 0, 3)


def test_negative_scatter_dimensions():  # which fail late in lax
    x = integers((N, 3, 2 * N), np.float32)
    out = per_rank(lambda v: jax_ring.psum_scatter(v, "x", scatter_dimension=-1, tiled=True), N, x)
    assert (np.concatenate(out, axis=-1) == x.sum(0)).all()


def test_random_floats_are_close_to_an_exact_sum():
    x = np.random.default_rng(0).normal(size=(N, 10_000)).astype(np.float32)
    out = np.asarray(per_rank(lambda v: jax_ring.psum(v, "x"), N, x))
    exact = x.astype(np.float64).sum(0)
    # Seven additions, each rounding a partial sum by half an ulp at most.
    bound = 7 * 2**-24 * np.abs(x).astype(np.float64).sum(0)
    assert (np.abs(out - exact) <= bound).all()


def test_sum_of_infinities_and_nans():
    x = np.zeros((N, 4), np.float32)
    x[3] = [np.inf, -np.inf, np.nan, np.inf]
    x[5, 3] = -np.inf
    out = per_rank(lambda v: jax_ring.psum(v, "x"), N, x)
    np.testing.assert_array_equal(out, np.tile([np.inf, -np.inf, np.nan, np.nan], (N, 1)))
    # lax's own drop the NaN here.
    f = {"pmax": np.max, "pmin": np.min}
    for name in f:
        out = per_rank(lambda v, name=name: getattr(jax_ring, name)(v, "x"), N, x)
        np.testing.assert_array_equal(out[4], f[name](x, axis=0))


# --- pytrees and constants ------------------------------------------------------------------------


def test_pytrees_keep_their_structure():
    tree = {
        "a": integers((N, 3), np.float32),
        "b": (integers((N, 2, 2), ml_dtypes.bfloat16), None),
        "c": [],
    }
    ours = per_rank(lambda t: jax_ring.psum(t, "x"), N, tree)
    theirs = per_rank(lambda t: lax.psum(t, "x"), N, tree)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs) == jax.tree.structure(tree)
    assert jax.tree.all(jax.tree.map(same_bits, ours, theirs))


@pytest.mark.parametrize("tree", [None, (), {}, [None, {}]])
@pytest.mark.parametrize("name", [*REDUCTIONS, "psum_scatter", "all_gather"])
def test_empty_trees(name, tree):
    def f(x):
        assert getattr(jax_ring, name)(tree, "x") == tree
        return x

    per_rank(f, N, np.zeros(N))


@pytest.mark.parametrize("leaf", [1, 2.5, 3 + 1j, True, np.float32(2), np.arange(3), np.int8(5)])
def test_constants_are_folded_as_lax_does(leaf):
    def f(x):
        pairs = [[g(leaf, "x") for g in ours_and_lax(name)] for name in ("psum", "pmean")]
        for ours, theirs in pairs:
            assert type(ours) is type(theirs)
            assert jnp.result_type(ours) == jnp.result_type(theirs)
        return pairs

    for ours, theirs in per_rank(f, N, np.zeros(N)):
        np.testing.assert_array_equal(ours, theirs)


def test_the_axis_size_is_static():
    def f(x):
        size = jax_ring.psum(1, "x")
        assert isinstance(size, int)
        return jnp.zeros(size) + x

    assert per_rank(f, 6, np.zeros(6)).shape == (6, 6)


@pytest.mark.parametrize("name", ["pmax", "pmin"])
def test_extrema_of_constants(name):
    out = per_rank(lambda x: getattr(jax_ring, name)(3, "x") + 0 * x, N, np.zeros(N, np.int32))
    assert (out == 3).all()


def test_a_constant_is_gathered():
    out = per_rank(lambda x: jax_ring.all_gather(7, "x"), N, np.zeros(N))
    assert out.shape == (N, N)
    assert (out == 7).all()


def test_reducing_what_is_replicated_counts_every_rank():
    for check_vma in (True, False):
        out = per_rank(
            lambda x: jax_ring.psum(jax_ring.psum(1.0 + 0 * x, "x"), "x"),
            N,
            np.zeros(N, np.float32),
            check_vma=check_vma,
        )
        assert (out == 64).all()


def test_weak_types_are_kept():
    def f(x):
        for name in REDUCTIONS:
            ours, theirs = (jax.typeof(g(x * 0 + 2.0, "x")) for g in ours_and_lax(name))
            assert ours.weak_type == theirs.weak_type
        return x

    jax.shard_map(f, mesh=mesh(2), in_specs=P(), out_specs=P())(3.0)


def test_unused_parameters_have_zero_gradients():
    def loss(params, x):
        return jnp.sum(params["used"] * x)

    def step(params, x):
        params = jax.tree.map(lambda p: vary(p, ("x",)), params)
        return jax_ring.psum(jax.grad(loss)(params, x), "x")

    f = jax.shard_map(step, mesh=mesh(N), in_specs=(P(), P("x")), out_specs=P())
    grads = jax.jit(f)({"used": jnp.ones(1), "unused": jnp.ones((3, 2))}, jnp.arange(8.0))
    assert (grads["unused"] == 0).all()
    assert (grads["used"] == 28).all()


# --- axes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*REDUCTIONS, "psum_scatter", "all_gather"])
def test_no_axes_mean_the_identity(name):
    x = np.arange(8.0, dtype=np.float32)
    kwargs = {"tiled": True} if name in ("psum_scatter", "all_gather") else {}
    for empty in ((), []):
        assert getattr(jax_ring, name)(x, empty, **kwargs) is x


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ["x", "y"], ("x",), "y"])
def test_several_axes(axes, explicit):
    def f(v):
        # lax's pmax takes no list.
        given = {"ours": axes, "lax": tuple(axes)}
        return [
            [g(v, names) for g, names in zip(ours_and_lax(name), given.values(), strict=True)]
            for name in REDUCTIONS
        ]

    x = integers((8, 5), np.float32)
    for ours, theirs in per_rank(f, mesh(2, 4, explicit=explicit), x):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("x", "y", "z"), ("z", "x"), ("y", "z")])
def test_chunks_over_several_axes_follow_the_order_of_names(axes):
    m = mesh(2, 2, 2)
    x = integers((8, 24), np.float32, high=50)
    names = ("psum_scatter", "all_gather")

    def f(v):
        return [[g(v, axes, tiled=True) for g in ours_and_lax(name)] for name in names]

    for ours, theirs in per_rank(f, m, x):
        assert same_bits(ours, theirs)


def test_what_varies_on_one_axis_is_counted_on_both():
    def f(x):
        return jax_ring.psum(x, ("x", "y"))

    g = jax.shard_map(f, mesh=mesh(2, 4), in_specs=P("x"), out_specs=P())
    assert g(jnp.arange(2.0)) == 4


def test_rings_along_one_axis_of_a_mesh():
    x = np.arange(8.0, dtype=np.float32)
    out = per_rank(lambda v: jax_ring.psum(v, "y"), mesh(2, 4), x)
    assert out.tolist() == [6] * 4 + [22] * 4


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("name", [*REDUCTIONS, "psum_scatter", "all_gather"])
def test_an_axis_of_size_1_is_the_identity(name, dtype):
    x = np.random.default_rng(0).integers(-9, 9, (8, 231)).astype(dtype)
    kwargs = {"tiled": True} if name in ("psum_scatter", "all_gather") else {}

    def f(v):
        return getattr(jax_ring, name)(v, "x", **kwargs)

    m = mesh(1, 8)
    out = per_rank(f, m, x)
    if name != "pmean" or dtype != np.int8:
        assert same_bits(out, x)
    g = jax.shard_map(f, mesh=m, in_specs=P("y"), out_specs=P("y"), check_vma=False)
    hlo = compiled(g, sharded(m, P("y"), (8 * 231,), dtype))
    assert not hlo.permutes
    assert not hlo.other_collectives


@pytest.mark.parametrize("order", [[3, 1, 7, 0, 5, 2, 6, 4], [7, 6, 5, 4, 3, 2, 1, 0]])
def test_answers_do_not_depend_on_the_order_of_devices(order):
    x = integers((8, 16), np.float32, high=50)
    m = mesh(8, order=order)
    assert (per_rank(lambda v: jax_ring.psum(v, "x"), m, x) == x.sum(0)).all()
    out = per_rank(lambda v: jax_ring.psum_scatter(v, "x", tiled=True), m, x)
    assert (np.asarray(out).reshape(-1) == x.sum(0)).all()


# --- groups ---------------------------------------------------------------------------------------

GROUPS = {
    "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "strided": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "shuffled": [[7, 0], [3, 1], [2, 6], [5, 4]],
    "all": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "alone": [[i] for i in range(8)],
}
UNEQUAL = {
    "3 and 5": [[0, 1, 2], [3, 4, 5, 6, 7]],
    "1, 2 and 5": [[6], [5, 0], [7, 1, 2, 3, 4]],
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("groups", (GROUPS | UNEQUAL).values(), ids=(GROUPS | UNEQUAL).keys())
def test_groups(groups, check_vma):
    x = integers((8, 5), np.float32, high=9)

    def f(v):
        return {name: getattr(jax_ring, name)(v, "x", axis_index_groups=groups) for name in numpy}

    numpy = {"psum": np.sum, "pmean": np.mean, "pmax": np.max, "pmin": np.min}
    for name, out in per_rank(f, 8, x, check_vma=check_vma).items():
        for group in groups:
            expected = np.tile(numpy[name](x[group], axis=0), (len(group), 1))
            np.testing.assert_allclose(np.asarray(out)[group], expected, 1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_groups_of_scatters_and_gathers(groups, check_vma):
    x = integers((8, 16), np.float32, high=9)
    kwargs = {"axis_index_groups": groups, "tiled": True}
    assert_like_lax(["psum_scatter", "all_gather"], x, check_vma=check_vma, **kwargs)


def test_groups_over_two_axes():
    groups = [[0, 5, 2], [1, 7, 4], [3, 6]]
    x = integers((8, 7), np.int32)
    out = np.asarray(
        per_rank(lambda v: jax_ring.psum(v, ("y", "x"), axis_index_groups=groups), mesh(2, 4), x)
    )
    of_index = [x.reshape(2, 4, 7)[i % 2, i // 2] for i in range(8)]
    for group in groups:
        for i in group:
            assert (out.reshape(2, 4, 7)[i % 2, i // 2] == sum(of_index[j] for j in group)).all()


def test_groups_leave_the_result_varying():
    def f(x):
        y = jax_ring.psum(x, "x", axis_index_groups=[[0, 1], [2, 3]])
        assert jax.typeof(y).manual_axis_type.varying == {"x"}
        return y

    jax.shard_map(f, mesh=mesh(4), in_specs=P("x"), out_specs=P("x"))(jnp.arange(4.0))


def test_a_constant_in_unequal_groups_counts_its_own_group():
    out = per_rank(
        lambda x: jax_ring.psum(2, "x", axis_index_groups=UNEQUAL["3 and 5"]) + 0 * x,
        8,
        np.zeros(8, np.int32),
    )
    assert out.tolist() == [6] * 3 + [10] * 5


def test_integers_have_the_mean_of_their_group():
    out = per_rank(
        lambda x: jax_ring.pmean(x, "x", axis_index_groups=UNEQUAL["3 and 5"]),
        8,
        np.arange(8, dtype=np.int32),
    )
    assert out.tolist() == [1.0] * 3 + [5.0] * 5


# --- the generic collectives ----------------------------------------------------------------------

NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


@pytest.mark.parametrize("op", NUMPY)
@pytest.mark.parametrize("length", [8, 11])
def test_all_reduce_by_name(op, length):
    x = integers((N, length), np.float32) + 1
    out = per_rank(lambda v: jax_ring.all_reduce(v, "x", op), N, x)
    np.testing.assert_allclose(out[3], NUMPY[op](x, axis=0), 1e-6)


@pytest.mark.parametrize("op", NUMPY)
def test_reduce_scatter_by_name(op):
    x = integers((N, 2 * N), np.float32) + 1
    out = per_rank(lambda v: jax_ring.reduce_scatter(v, "x", op, tiled=True), N, x)
    np.testing.assert_allclose(np.asarray(out).reshape(-1), NUMPY[op](x, axis=0), 1e-6)


def test_a_custom_operation():
    x = integers((N, 11), np.int32, high=1000)

    def f(v):
        total = jax_ring.all_reduce(v, "x", jnp.bitwise_xor, identity=0)
        part = jax_ring.reduce_scatter(v[:8], "x", jnp.bitwise_xor, identity=0)
        return total, part

    total, part = per_rank(f, N, x)
    assert (total == np.bitwise_xor.reduce(x)).all()
    assert (part == np.bitwise_xor.reduce(x)[:8]).all()


def test_padding_is_the_identity_of_a_custom_operation():
    def reciprocal_sum(a, b):
        return 1 / (1 / a + 1 / b)  # NaN or an error if padding were zero in debug mode

    with jax.debug_nans(True):
        out = per_rank(
            lambda v: jax_ring.all_reduce(v, "x", reciprocal_sum, identity=np.inf),
            N,
            np.ones((N, 3), np.float32),
        )
    np.testing.assert_allclose(out, 1 / 8, 1e-6)


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("big", range(N))
def test_reduce_dtype_accumulates_end_to_end(dtype, big):
    x = np.ones((N, 19), dtype)
    x[big] = 256
    out = per_rank(lambda v: jax_ring.psum(v, "x", reduce_dtype=jnp.float32), N, x)
    assert out.dtype == dtype
    # 263, halfway between 262 and 264, rounds to the even one in bfloat16; float16 holds it.
    assert (out.astype(np.float32) == (264 if dtype != np.float16 else 263)).all()
    part = per_rank(
        lambda v: jax_ring.psum_scatter(v[:16], "x", tiled=True, reduce_dtype=jnp.float32), N, x
    )
    assert (part.astype(np.float32) == (264 if dtype != np.float16 else 263)).all()


def test_by_default_sums_are_rounded_at_each_step():
    x = np.ones((N, N), ml_dtypes.bfloat16)
    x[2] = 256
    rows = per_rank(lambda v: jax_ring.psum(v, "x", algorithm="ring"), N, x)
    out = np.asarray(rows).astype(np.float32)
    assert set(np.unique(out)) == {256.0, 260.0, 264.0}
    assert (out == out[0]).all()


def test_partial_sums_that_overflow():
    x = np.zeros((N, N), np.float16)
    x[:4] = np.array([60000, 60000, -60000, -60000])[:, None]
    wide = per_rank(lambda v: jax_ring.psum(v, "x", reduce_dtype=jnp.float32), N, x)
    assert (wide == 0).all()
    narrow = per_rank(lambda v: jax_ring.psum(v, "x"), N, x)
    assert not np.isfinite(narrow).all()


def test_a_float16_mean_does_not_overflow():
    x = np.full((N, 11), 10000, np.float16)
    assert (per_rank(lambda v: jax_ring.pmean(v, "x"), N, x) == 10000).all()
    assert np.isinf(per_rank(lambda v: jax_ring.psum(v, "x"), N, x)).all()
    assert np.isinf(per_rank(lambda v: lax.psum(v, "x"), N, x)).all()
    scattered = per_rank(lambda v: jax_ring.reduce_scatter(v[:8], "x", "mean"), N, x)
    assert (scattered == 10000).all()


def test_widening_first_gives_a_wide_sum():
    x = np.tile((1 + np.arange(N) / 128)[:, None], (1, 6)).astype(ml_dtypes.bfloat16)
    out = per_rank(lambda v: jax_ring.psum(v.astype(jnp.float32), "x"), N, x)
    assert out.dtype == np.float32
    assert (out == x.astype(np.float32).sum(0)).all()


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax"])
def test_every_rank_holds_the_same_bits(name):
    for dtype in (np.float32, ml_dtypes.bfloat16):
        x = np.random.default_rng(3).normal(size=(N, 1001)).astype(dtype)
        out = np.asarray(per_rank(lambda v: getattr(jax_ring, name)(v, "x"), N, x))
        assert all(same_bits(row, out[0]) for row in out)


def test_every_run_gives_the_same_bits():
    m = mesh(N)
    x = np.random.default_rng(4).normal(size=(N, 1001)).astype(np.float32)
    f = jax.shard_map(lambda v: jax_ring.psum(v, "x"), mesh=m, in_specs=P("x"), out_specs=P())
    runs = [jax.jit(f)(x) for _ in range(20)]
    runs += [jax.jit(lambda x: f(x))(x)]  # compiled again
    assert all(same_bits(run, runs[0]) for run in runs)


# --- algorithm= -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["auto", "ring", "xla"])
def test_named_algorithms(algorithm):
    names = [*REDUCTIONS, "psum_scatter", "all_gather"]
    x = integers((N, N), np.float32)
    ours = per_rank(
        lambda v: [getattr(jax_ring, name)(v, "x", algorithm=algorithm) for name in names], N, x
    )
    theirs = per_rank(lambda v: [getattr(lax, name)(v, "x") for name in names], N, x)
    assert all(map(same_bits, ours, theirs))


def test_xla_is_laxs_own_operation():
    f = jax.shard_map(
        lambda v: jax_ring.psum(v, "x", algorithm="xla"),
        mesh=mesh(N),
        in_specs=P("x"),
        out_specs=P(),
    )
    hlo = compiled(f, sharded(mesh(N), P("x"), (80,)))
    assert hlo.other_collectives == ["all-reduce"]
    assert not hlo.permutes


def test_xla_honours_the_reduce_dtype():
    x = np.full((N, 3), 10000, np.float16)
    out = per_rank(
        lambda v: jax_ring.pmean(v, "x", algorithm="xla", reduce_dtype=jnp.float32), N, x
    )
    assert (out == 10000).all()


def test_the_settings_name_the_automatic_algorithm():
    def f(v):
        return jax_ring.psum(v, "x")

    g = jax.shard_map(f, mesh=mesh(N), in_specs=P("x"), out_specs=P())
    with jax_ring.config(algorithm="xla"):
        assert not compiled(g, sharded(mesh(N), P("x"), (80,))).permutes


def test_a_schedule_as_algorithm():
    schedule = jax_ring.schedules.ring(N)
    x = integers((N, 10), np.float32)
    out = per_rank(lambda v: jax_ring.psum(v, "x", algorithm=schedule), N, x)
    assert (out == x.sum(0)).all()


# --- errors ---------------------------------------------------------------------------------------


def on_ranks(f, n=N, shape=(N, 10)):
    return per_rank(f, n, np.zeros(shape, np.float32))


@pytest.mark.parametrize("name", [*REDUCTIONS, "psum_scatter", "all_gather"])
def test_outside_of_shard_map_the_error_says_where_to_call(name):
    for x in (jnp.ones(8), 1.0):
        with pytest.raises(
            NameError, match=f"unbound axis name: q.* call {name} under `jax.shard_map`"
        ):
            getattr(jax_ring, name)(x, "q")
    with pytest.raises(NameError, match="unbound axis name"):
        jax.jit(lambda x: getattr(jax_ring, name)(x, "q"))(jnp.ones(8))


@pytest.mark.parametrize("name", [*REDUCTIONS, "psum_scatter", "all_gather"])
def test_positional_axes_are_refused_forward_and_in_gradients(name):
    def f(x):
        return jnp.sum(getattr(jax_ring, name)(x, 0))

    for g in (f, jax.grad(f)):
        with pytest.raises(ValueError, match="axis_name=0: positional axes are not supported"):
            on_ranks(g)
    with pytest.raises(ValueError, match="positional axes are not supported"):
        on_ranks(lambda v: getattr(jax_ring, name)(v, np.int64(0)))


@pytest.mark.parametrize(
    ("axis_name", "error", "message"),
    [
        ({"x"}, TypeError, "axis_name must be a name"),
        (None, TypeError, "axis_name must be a name"),
        (("x", "x"), ValueError, "names an axis twice"),
        (("x", "nope"), NameError, "unbound axis name: nope"),
    ],
)
def test_bad_axis_names(axis_name, error, message):
    with pytest.raises(error, match=message):
        on_ranks(lambda v: jax_ring.psum(v, axis_name))


@pytest.mark.parametrize(
    "groups",
    [[[0, 1, 2]], [[0, 1], [1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6, 8]], [[], [0, 1]], []],
)
def test_groups_must_cover_each_index_once(groups):
    for name in ("psum", "psum_scatter", "all_gather"):
        with pytest.raises(ValueError, match=r"all indices 0 to 7 of axis 'x' \(size 8\) exactly"):
            on_ranks(lambda v, name=name: getattr(jax_ring, name)(v, "x", axis_index_groups=groups))


def test_groups_of_the_wrong_type():
    for groups in ([0, 1], [[0.5, 1], [2, 3, 4, 5, 6, 7]]):
        with pytest.raises(TypeError, match="axis_index_groups must be a list of lists"):
            on_ranks(lambda v, groups=groups: jax_ring.psum(v, "x", axis_index_groups=groups))


@pytest.mark.parametrize("name", ["psum_scatter", "all_gather"])
def test_scatters_and_gathers_need_equal_groups(name):
    with pytest.raises(ValueError, match="must all be of the same size"):
        on_ranks(
            lambda v: getattr(jax_ring, name)(v, "x", axis_index_groups=UNEQUAL["3 and 5"]),
        )


@pytest.mark.parametrize(
    ("shape", "tiled", "message"),
    [
        ((16, 3), False, r"shape \(16, 3\) has size 16, which must be 8, the number of ranks"),
        ((16, 3), False, "pass tiled=True"),
        ((10,), True, "size 10, which must be divisible by 8, the number of ranks along axis 'x'"),
    ],
)
def test_scatters_that_do_not_fit(shape, tiled, message):
    with pytest.raises(ValueError, match=message):
        on_ranks(lambda v: jax_ring.psum_scatter(v, "x", tiled=tiled), shape=(N, *shape))


@pytest.mark.parametrize("dimension", [2, -3])
def test_dimensions_out_of_bounds(dimension):
    with pytest.raises(ValueError, match=f"scatter_dimension={dimension} is out of bounds for 2"):
        on_ranks(
            lambda v: jax_ring.psum_scatter(v, "x", scatter_dimension=dimension), shape=(N, N, 2)
        )
    with pytest.raises(ValueError, match=f"axis={dimension * 2} is out of bounds for 3"):
        on_ranks(lambda v: jax_ring.all_gather(v, "x", axis=dimension * 2), shape=(N, N, 2))
    with pytest.raises(ValueError, match="out of bounds for 0 dimensions"):
        on_ranks(lambda v: jax_ring.psum_scatter(v, "x"), shape=(N,))
    with pytest.raises(TypeError, match="axis must be an integer, got 'a'"):
        on_ranks(lambda v: jax_ring.all_gather(v, "x", axis="a"))


SLOW = pytest.mark.slow


@pytest.mark.parametrize("n", [5, *(pytest.param(n, marks=SLOW) for n in (1, 2, 3, 4, 6, 7, 8))])
@pytest.mark.parametrize("kind", list(Kind))
def test_every_algorithm_on_devices(kind, n):
    x = integers((n, 2 * n, 3), np.float32)
    names_of_kind = names(kind)

    def f(v):
        return [by(v, algorithm) for algorithm in names_of_kind]

    by, expected = _collective(kind, x)
    for rows in per_rank(f, n, x):
        assert same_bits(np.asarray(rows), expected)


@pytest.mark.parametrize(
    "n", [3, 8, *(pytest.param(n, marks=SLOW) for n in (1, 2, *range(4, 8), *range(9, 17)))]
)
@pytest.mark.parametrize("kind", list(Kind))
def test_every_algorithm_over_a_vmapped_axis(kind, n):
    x = integers((n, 2 * n, 3), np.float32)
    by, expected = _collective(kind, x)
    for algorithm in names(kind):
        rows = jax.vmap(lambda v, a=algorithm: by(v, a), axis_name="x")(x)
        if kind is not Kind.REDUCE_SCATTER:
            rows = jnp.broadcast_to(rows, expected.shape)
        assert same_bits(np.asarray(rows), expected)


def _collective(kind, x):
    """A collective by an algorithm, and NumPy's result on every rank."""
    n = len(x)
    if kind is Kind.ALL_REDUCE:
        everyone = np.broadcast_to(x.sum(0), x.shape)
        return lambda v, algorithm: jax_ring.psum(v, "x", algorithm=algorithm), everyone
    if kind is Kind.REDUCE_SCATTER:
        parts = x.sum(0).reshape(n, 2, 3)
        how = {"tiled": True}
        return lambda v, algorithm: jax_ring.psum_scatter(v, "x", algorithm=algorithm, **how), parts
    everyone = np.broadcast_to(x, (n, *x.shape))
    return lambda v, algorithm: jax_ring.all_gather(v, "x", algorithm=algorithm), everyone


@pytest.mark.parametrize("unroll", [32, 1])
@pytest.mark.parametrize("n", [2, 5, 8])
def test_channels_side_by_side(n, unroll):
    schedules = jax_ring.schedules
    backwards = tuple(range(n)), (0, *range(n - 1, 0, -1))
    x = integers((n, 3, 101), np.float32)

    def f(v):
        return [
            jax_ring.psum(v, "x", algorithm=algorithm)
            for algorithm in (
                schedules.ring(n, channels=3),
                schedules.ring(n, segments=3),
                schedules.ring(n, channels=2, orders=backwards),
                schedules.bidirectional_ring(n),
            )
        ] + [jax_ring.pmean(v.astype(jnp.bfloat16), "x", algorithm="bidirectional_ring")]

    with jax_ring.config(unroll=unroll):
        *sums, mean = per_rank(f, n, x)
    for total in sums:
        assert all(same_bits(row, x.sum(0)) for row in np.asarray(total))
    assert all(same_bits(row, mean[0]) for row in mean)
    np.testing.assert_allclose(np.asarray(mean[0], np.float64), x.mean(0), rtol=0.02)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (1, 5)])
def test_hierarchies_of_any_mesh(sizes):
    m = mesh(*sizes)
    x = integers((m.size, 101), np.float32)
    rows = per_rank(lambda v: jax_ring.psum(v, ("x", "y"), algorithm="hierarchical"), m, x)
    assert all(same_bits(row, x.sum(0)) for row in np.asarray(rows))


def test_algorithms_that_are_all_reduces_only():
    f = jax.vmap(
        lambda v: jax_ring.psum_scatter(v, "x", algorithm="double_binary_tree"), axis_name="x"
    )
    with pytest.raises(ValueError, match="'double_binary_tree' is an all-reduce only; .*'ring'"):
        f(np.ones((4, 4)))
    with jax_ring.config(algorithm="recursive_doubling"):  # What "auto" means, where it can.
        scattered = jax.vmap(lambda v: jax_ring.psum_scatter(v, "x"), axis_name="x")
        np.testing.assert_array_equal(scattered(np.ones((4, 4))), [4.0] * 4)


# Levels with a wire and an algorithm each.


@pytest.mark.parametrize("shape", [(16,), (3, 5), (), (5, 8), (0, 3)])
@pytest.mark.parametrize("check_vma", [True, False])
def test_levels_of_their_own(shape, check_vma):
    m = mesh(2, 3)
    x = integers((6, *shape), np.float32)

    def f(v):
        by_level = {"x": "recursive_doubling", "y": "ring"}
        return (
            jax_ring.psum(v, ("x", "y"), algorithm=by_level),
            jax_ring.pmean(v, ("x", "y"), wire={"x": "float8_e5m2"}),
            jax_ring.pmax(v.astype(int), ("x", "y"), algorithm={"y": "direct"}),
            jax_ring.psum(v > 1, ("x", "y"), algorithm={}),
            jax_ring.psum(v, ("x", "y"), algorithm="hierarchical", wire={}, reduce_dtype=v.dtype),
        )

    total, mean, largest, count, wide = per_rank(f, m, x, check_vma=check_vma)
    for result, expected in (
        (total, x.sum(0)),
        (largest, x.max(0).astype(np.int32)),
        (count, (x > 1).sum(0).astype(np.int32)),
        (wide, x.sum(0)),
    ):
        assert all(same_bits(row, np.asarray(expected)) for row in np.asarray(result))
    assert all(same_bits(row, mean[0]) for row in mean)
    np.testing.assert_allclose(mean[0], x.mean(0), atol=0.3)


def test_three_levels():
    m = mesh(2, 2, 2)
    x = integers((8, 12), np.float32)
    f = functools.partial(jax_ring.psum, axis_name=("x", "y", "z"), wire={"x": "bfloat16"})
    rows = per_rank(f, m, x)
    assert all(same_bits(row, x.sum(0)) for row in np.asarray(rows))


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
def test_bytes_across_the_outer_level(wire):
    hosts, local, size = 2, 4, 1 << 14
    m = mesh(hosts, local)
    f = jax.shard_map(
        lambda v: jax_ring.psum(v, ("x", "y"), algorithm="hierarchical", wire={"x": wire}),
        mesh=m,
        in_specs=P(("x", "y")),
        out_specs=P(),
    )
    hlo = compiled(f, sharded(m, P(("x", "y")), (hosts * local * size,)))
    assert not hlo.other_collectives
    crossing, within = 0, 0
    for line in hlo.text.splitlines():
        if " collective-permute(" not in line:
            continue
        kind, shape = re.search(r"= (\w+?)\[([\d,]+)\]", line).groups()
        pairs = re.search(r"source_target_pairs=\{\{(.*?)\}\}", line)[1].split("},{")
        crosses = [int(s) // local != int(t) // local for s, t in (p.split(",") for p in pairs)]
        assert len(set(crosses)) == 1, "a step stays inside or leaves on all ranks"
        nbytes = (
            math.prod(map(int, shape.split(","))) * {"f32": 4, "u16": 2, "s8": 1, "u8": 1}[kind]
        )
        if crosses[0]:
            crossing += nbytes
        else:
            within += nbytes
    share = 2 * (hosts - 1) / hosts * 4 * size / local  # 2 (H-1)/H S/G
    assert within == 2 * (local - 1) / local * 4 * size
    if wire == "int8":
        assert crossing <= 0.27 * share
    else:
        assert crossing == share * (0.5 if wire else 1)


@pytest.mark.parametrize("how", [{"wire": {"x": "int8"}}, {"wire": {}, "reduce_dtype": "float32"}])
def test_levels_of_leaves_that_do_not_take_part_in_a_wire(how):
    m = mesh(2, 3)
    x = {
        "w": integers((6, 5), np.float32),
        "half": integers((6, 8), jnp.bfloat16, seed=1),
        "step": integers((6,), np.int32, seed=2),
        "seen": integers((6, 4), bool, seed=3, high=2),
    }

    def f(tree):
        by_level = [jax_ring.psum(tree, ("x", "y"), **how), jax_ring.pmean(tree, ("x", "y"), **how)]
        return by_level, [lax.psum(tree, ("x", "y")), lax.pmean(tree, ("x", "y"))]

    ours, theirs = per_rank(f, m, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        lossy = "wire" in how and how["wire"] and jnp.issubdtype(a.dtype, jnp.floating)
        atol = 0.3 if lossy else 0.01
        np.testing.assert_allclose(np.float64(a), np.float64(b), atol=atol)


def test_levels_of_what_all_ranks_know():
    wired = {"wire": {"x": "int8"}}

    def f(v):
        count = jax_ring.psum(1.0, ("x", "y"), **wired)
        assert count == 4  # Without communication.
        return count * v

    assert (per_rank(f, mesh(2, 2), np.ones(4)) == 4).all()
    cases = [
        (1, {"wire": {"x": "int3"}}, "wire must be None, .* got 'int3'"),
        (1, wired, r"wire='int8' is for floating-point leaves, but x has only \['int32'\]"),
        (1.0, {"algorithm": {"y": "tree"}}, "algorithm must be one of .* got 'tree'"),
        (1.0, {"wire": {"z": None}}, r"wire names the axes \['z'\]"),
        (1.0, {"wire": {}, "reduce_dtype": jnp.int32}, "reduce_dtype=int32 is not of the kind"),
    ]
    for x, how, message in cases:
        with pytest.raises(ValueError, match=f"jax_ring.psum: {message}"):
            per_rank(
                lambda v, x=x, h=how: v + jax_ring.psum(x, ("x", "y"), **h), mesh(2, 2), np.ones(4)
            )


def test_the_first_level_by_a_schedule():
    x = integers((6, 5), np.float32)
    ring = jax_ring.schedules.ring
    total = per_rank(
        lambda v: jax_ring.psum(v, ("x", "y"), algorithm={"x": ring(2, segments=2)}), mesh(2, 3), x
    )
    assert all(same_bits(row, x.sum(0)) for row in np.asarray(total))


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("spec", [P(None, "z"), P("z", None), P()], ids=str)
def test_levels_where_an_axis_is_left_to_the_compiler(spec, explicit):
    """The compiler shards the array over axis z, along a dimension that the ranks divide too."""
    m = mesh(2, 2, 2, explicit=explicit)
    x = integers((2, 2, 8, 12), np.float32)
    laid_out = jax.NamedSharding(m, P("x", "y", *spec))

    def body(v, reduced):
        return reduced(v[0, 0], ("x", "y"))

    by_level = functools.partial(jax_ring.psum, algorithm={"x": "ring", "y": "ring"})
    how = {"in_specs": P("x", "y"), "out_specs": P(), "axis_names": {"x", "y"}}
    with jax.set_mesh(m):
        ours, theirs = (
            jax.jit(jax.shard_map(functools.partial(body, reduced=f), **how))
            for f in (by_level, lax.psum)
        )
        value = jax.device_put(x, laid_out)
        assert (np.asarray(ours(value)) == x.sum((0, 1))).all()
        hlo, of_lax = (Hlo(f.lower(value).compile().as_text(), None) for f in (ours, theirs))
    # On explicit axes some versions of shard_map gather at its border, with lax's sum too.
    assert hlo.counts["all-gather"] == of_lax.counts["all-gather"]
    assert hlo.counts["all-gather"] == 0 or explicit
    part = 8 * 12 // (2 if "z" in spec else 1)
    assert [size for _, size in hlo.permutes] == [part // 2, part // 4, part // 4, part // 2]


@st.composite
def levels(draw):
    """Sizes of axes, the axes in an order, and by some of them an algorithm and a wire."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    axes = draw(st.permutations("xyz"[: len(sizes)]))
    algorithm = {
        axis: draw(st.sampled_from(names(Kind.REDUCE_SCATTER if i else Kind.ALL_REDUCE)))
        for i, axis in enumerate(axes)
        if draw(st.booleans())
    }
    wires = st.sampled_from([None, "bfloat16", "int8"])
    return sizes, tuple(axes), {"algorithm": algorithm, "wire": {axes[0]: draw(wires)}}


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    levels(),
    st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=3),
    st.sampled_from(["psum", "pmean", "pmax"]),
    st.sampled_from([1, 32]),
)
def test_levels_drawn_at_random(drawn, shapes, name, unroll):
    sizes, axes, how = drawn
    dtypes = [np.float32, np.int32, np.float16]
    rows = [
        integers((*sizes, *shape), dtype)
        for shape, dtype in zip(shapes, dtypes[: len(shapes)], strict=True)
    ]
    if name == "pmax":
        how = {"algorithm": how["algorithm"]}
    f = functools.partial(getattr(jax_ring, name), axis_name=axes, **how)
    for axis in reversed("xyz"[: len(sizes)]):
        f = jax.vmap(f, axis_name=axis)
    with jax_ring.config(unroll=unroll):
        found = jax.jit(f)(rows)
    numpy = {"psum": np.sum, "pmean": np.mean, "pmax": np.max}[name]
    for x, y in zip(rows, map(np.asarray, found), strict=True):
        every = y.reshape(math.prod(sizes), *x.shape[len(sizes) :])
        assert all(same_bits(row, every[0]) for row in every)
        want = numpy(x.astype(np.float64), axis=tuple(range(len(sizes))))
        lossy = how.get("wire", {axes[0]: None})[axes[0]] and x.dtype.kind == "f"
        exact = not lossy and name != "pmean"
        np.testing.assert_allclose(
            every[0], want, rtol=0 if exact else 0.02, atol=0.5 * bool(lossy)
        )


def test_levels_differentiate():
    m = mesh(2, 3)

    def loss(v):
        return (jax_ring.psum(v, ("x", "y"), algorithm={"x": "ring"}) ** 2).sum()

    x = integers((6, 7), np.float32)
    rows = per_rank(lambda v: jax.grad(loss)(v), m, x)
    assert all(same_bits(row, 2 * x.sum(0)) for row in np.asarray(rows))


def test_bad_levels():
    cases = [
        (
            {"wire": {"z": "int8"}},
            r"wire names the axes \['z'\], but the reduction is over \('x', 'y'",
        ),
        ({"algorithm": {"node": "ring"}}, r"algorithm names the axes \['node'\]"),
        ({"wire": {}, "axis_index_groups": [[0, 1, 2, 3]]}, "axis_index_groups must be None"),
        ({"wire": {}, "algorithm": jax_ring.schedules.ring(4)}, "algorithm must be a name"),
        ({"algorithm": {"y": "double_binary_tree"}}, "is an all-reduce only"),
        (
            {"algorithm": {"y": jax_ring.schedules.ring(2)}},
            "algorithm must name what axis 'y' is scattered and gathered by, .* first axis, 'x'",
        ),
        ({"wire": {"x": "int3"}}, "int3"),
    ]
    for how, message in cases:
        with pytest.raises(ValueError, match=message):
            per_rank(
                lambda v, how=how: jax_ring.psum(v, ("x", "y"), **how), mesh(2, 2), np.ones((4, 4))
            )


def test_hierarchies_want_levels():
    f = jax.vmap(lambda v: jax_ring.psum(v, "x", algorithm="hierarchical"), axis_name="x")
    with pytest.raises(ValueError, match="wants an axis for each level.*got axis_name='x'"):
        f(np.ones((4, 4)))


def test_bad_algorithms():
    schedules = jax_ring.schedules
    cases = [
        ("tree", ValueError, "algorithm must be one of .*'ring', .*'direct'.*'xla'.* got 'tree'"),
        (7, TypeError, "algorithm must be one of .* got 7"),
        (schedules.ring(4), ValueError, "is for 4 ranks, but there are 8 to reduce over"),
        (schedules.ring_all_gather(8), ValueError, "must be a schedule of kind all_reduce"),
    ]
    for algorithm, error, message in cases:
        with pytest.raises(error, match=message):
            on_ranks(lambda v, a=algorithm: jax_ring.psum(v, "x", algorithm=a))
    ring = schedules.ring(8)
    wrong = schedules.Schedule(8, 8, list(ring.steps)[:-1], ring.kind)
    with pytest.raises(schedules.ScheduleError, match="lacks the contributions"):
        on_ranks(lambda v: jax_ring.psum(v, "x", algorithm=wrong))
    halves = schedules.Schedule(8, 16, [], schedules.Kind.ALL_GATHER)
    with pytest.raises(ValueError, match="as many chunks as ranks"):
        on_ranks(lambda v: jax_ring.all_gather(v, "x", algorithm=halves))


@pytest.mark.parametrize(
    ("requested", "error", "message"),
    [
        (np.float64, ValueError, "reduce_dtype=float64 needs jax_enable_x64"),
        (np.float16, ValueError, "must hold every value of the data's dtype float32, got float16"),
        (
            np.int32,
            ValueError,
            r"reduce_dtype=int32 is not of the kind of any leaf .*\['float32'\]",
        ),
        (np.complex64, ValueError, "reduce_dtype=complex64 is not of the kind"),
        ("nonsense", TypeError, "reduce_dtype must be a dtype, got 'nonsense'"),
    ],
)
def test_bad_reduce_dtypes(requested, error, message):
    with pytest.raises(error, match=message):
        on_ranks(lambda v: jax_ring.psum(v, "x", reduce_dtype=requested))
    with pytest.raises(error, match="reduce_dtype"):
        on_ranks(lambda v: jax_ring.psum(1.0, "x", reduce_dtype=requested) + v)


def test_reduce_dtype_speaks_of_the_leaves_of_its_kind():
    tree = {"grads": np.full((N, 3), 256, ml_dtypes.bfloat16), "count": np.ones((N, 3), np.int32)}
    tree["grads"][1:] = 1
    out = per_rank(lambda t: jax_ring.psum(t, "x", reduce_dtype=jnp.float32), N, tree)
    assert (out["grads"].astype(np.float32) == 264).all()
    assert out["count"].dtype == np.int32
    assert (out["count"] == 8).all()


@pytest.mark.parametrize(
    ("dtype", "wide"), [(FP8[0], np.float32), (FP8[1], ml_dtypes.bfloat16), (np.int8, np.int32)]
)
def test_wider_reduce_dtypes_of_narrow_data(dtype, wide):
    x = integers((N, 5), dtype)
    out = per_rank(lambda v: jax_ring.psum(v, "x", reduce_dtype=wide), N, x)
    assert same_bits(out[0], x.astype(np.float32).sum(0).astype(dtype))


def test_bad_operations():
    def reduce(*args, **kwargs):
        return lambda v: jax_ring.all_reduce(v, "x", *args, **kwargs)

    with pytest.raises(ValueError, match="op must be one of .* got 'xor'"):
        on_ranks(reduce("xor"))
    with pytest.raises(ValueError, match="a custom op needs its identity"):
        on_ranks(reduce(jnp.maximum))
    with pytest.raises(ValueError, match="identity is for a custom op only"):
        on_ranks(reduce("sum", identity=0))
    for identity in (np.zeros(3), "z"):
        with pytest.raises(ValueError, match="identity must be a scalar number"):
            on_ranks(reduce(jnp.maximum, identity=identity))
    with pytest.raises(TypeError, match="op must be a name or a function"):
        on_ranks(reduce(3))
    with pytest.raises(ValueError, match="algorithm='xla' .* cannot do op='prod'"):
        on_ranks(reduce("prod", algorithm="xla"))
    with pytest.raises(ValueError, match="algorithm='xla' .* cannot scatter op='max'"):
        on_ranks(lambda v: jax_ring.reduce_scatter(v[:8], "x", "max", algorithm="xla"))


def test_custom_operations_that_do_not_fit():
    class Unhashable:
        __hash__ = None

        def __call__(self, a, b):
            return a + b

    def reduce(op, identity=0):
        return lambda v: jax_ring.all_reduce(v.astype(jnp.int32), "x", op, identity=identity)

    for length in (8, 10):  # whether or not chunks are filled up
        shape = (N, length)
        with pytest.raises(TypeError, match="op='logaddexp' must return .* dtype int32, got float"):
            on_ranks(reduce(jnp.logaddexp), shape=shape)
        with pytest.raises(TypeError, match="op='<lambda>' must return an array of its operands'"):
            on_ranks(reduce(lambda a, b: (a + b)[:1]), shape=shape)
        with pytest.raises(TypeError, match="op='max' must be a function of two JAX arrays"):
            on_ranks(reduce(max), shape=shape)
        with pytest.raises(TypeError, match="op must be hashable"):
            on_ranks(reduce(Unhashable()), shape=shape)
        with pytest.raises(ValueError, match="identity must be a value of dtype int32, got -inf"):
            on_ranks(reduce(jnp.maximum, -jnp.inf), shape=shape)
        with pytest.raises(ValueError, match="uses a traced value from outside"):
            on_ranks(
                lambda v: jax_ring.all_reduce(v, "x", lambda a, b: a + b * v[0], identity=0),
                shape=shape,
            )


def test_a_custom_operation_is_not_known_by_its_name():
    def sum(a, b):
        return a * b

    x = np.full((N, 3), 2.0, np.float32)
    out = per_rank(lambda v: jax_ring.all_reduce(v, "x", sum, identity=1), N, x)
    assert (out == 2**N).all()
    with pytest.raises(ValueError, match="cannot do op='sum'"):
        on_ranks(lambda v: jax_ring.all_reduce(v, "x", sum, identity=1, algorithm="xla"))


def test_xla_with_groups():
    """lax divides by the size of the first group, and types a maximum as replicated."""
    groups = UNEQUAL["3 and 5"]
    x = np.arange(8, dtype=np.float32)
    kwargs = {"axis_index_groups": groups, "algorithm": "xla"}
    out = per_rank(lambda v: jax_ring.pmean(v, "x", **kwargs), 8, x, check_vma=False)
    assert out.tolist() == [1.0] * 3 + [5.0] * 5
    for name in ("psum", "pmean", "pmax"):
        with pytest.raises(NotImplementedError, match="no axis_index_groups under check_vma=True"):
            on_ranks(lambda v, name=name: getattr(jax_ring, name)(v, "x", **kwargs))


def test_products_count_bools():
    x = np.ones((N, 3), bool)
    x[2, 1] = False
    out = per_rank(lambda v: jax_ring.all_reduce(v, "x", "prod"), N, x)
    assert out.dtype == np.int32
    assert out[0].tolist() == [1, 0, 1]


def test_constants_keep_their_dtype_and_do_not_overflow():
    def f(v):
        counts = np.ones(3, np.uint8)
        sums = jax_ring.psum(counts, "x", axis_index_groups=UNEQUAL["3 and 5"])
        assert sums.dtype == np.uint8
        return sums + v.astype(jnp.uint8), jax_ring.pmean(np.float16(10000), "x") + 0 * v[0]

    sums, mean = per_rank(f, 8, np.zeros((8, 3), np.float32))
    assert sums[:, 0].tolist() == [3] * 3 + [5] * 5
    assert (mean == 10000).all()


@pytest.mark.parametrize("name", [*REDUCTIONS, "all_gather"])
def test_leaves_that_are_no_arrays(name):
    with pytest.raises(TypeError, match="leaf of type str"):
        on_ranks(lambda v: getattr(jax_ring, name)({"a": v, "b": "text"}, "x"))


def test_random_keys_are_refused_with_a_way_out():
    def f(v):
        return jax_ring.all_gather(jax.random.key(v[0].astype(int)), "x")

    with pytest.raises(TypeError, match="jax.random.key_data"):
        on_ranks(f)


def test_gathering_to_an_unknown_type():
    with pytest.raises(ValueError, match="to must be 'varying', 'invarying' or 'reduced'"):
        on_ranks(lambda v: jax_ring.all_gather(v, "x", to="sideways"))
    with pytest.raises(ValueError, match="with axis_index_groups the result differs"):
        on_ranks(
            lambda v: jax_ring.all_gather(
                v, "x", to="invarying", axis_index_groups=GROUPS["strided"]
            )
        )


def test_without_automatic_casts_an_invarying_operand_is_refused():
    def f(v):
        return jax_ring.psum(jnp.ones(3) * 2 + jax_ring.psum(v, "x")[:3], "x")

    from jax_ring import _compat

    with _compat._config.auto_pcast(False), pytest.raises(ValueError, match="cast it with"):
        on_ranks(f)
