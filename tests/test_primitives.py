"""Types, derivatives, batching and control flow, against jax.lax."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from harness import Hlo, compiled, integers, mesh, per_rank, same_bits, sharded, vary
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_ring

N = 8


@pytest.fixture(autouse=True)
def by_the_ring():
    """What is read off programs here is the ring's; tests/test_choose.py is about the choice."""
    with jax_ring.config(algorithm="ring"):
        yield


BOTH_MODES = pytest.mark.parametrize("check_vma", [True, False])


def on_mesh(f, n=N, in_specs=P("x"), out_specs=P("x"), check_vma=True, **kwargs):
    m = mesh(n) if isinstance(n, int) else n
    return jax.shard_map(
        f, mesh=m, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma, **kwargs
    )


def pair(name):
    return [getattr(module, name) for module in (jax_ring, lax)]


# --- types ----------------------------------------------------------------------------------------


def varying_of(f, *operands, m=None):
    """The axes that the result varies over, for operands given as (value, axes)."""
    m = m or mesh(2, 4)
    seen = []

    def body(x):
        values = [vary(x * 0, axes) for axes in operands]
        y = f(*values)
        seen.append(jax.typeof(y).manual_axis_type)
        return x

    jax.jit(on_mesh(body, m, P(), P())).lower(jnp.zeros(8))
    return seen[0]


# Over both axes lax's psum refuses what varies over one of them only.
@pytest.mark.parametrize(
    ("axes", "held"),
    [(axes, held) for axes in ("x", ("y",)) for held in ((), ("x",), ("y",), ("x", "y"))]
    + [(("x", "y"), ()), (("x", "y"), ("x", "y"))],
)
@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin"])
def test_types_of_all_reduces_are_those_of_lax(name, axes, held):
    ours, theirs = (varying_of(lambda v, g=g: g(v, axes), held) for g in pair(name))
    assert ours == theirs


@pytest.mark.parametrize("to", ["varying", "invarying", "reduced"])
def test_types_of_gathers_are_those_of_lax(to):
    ours, theirs = (
        varying_of(lambda v, g=g: g(v, "x", to=to, tiled=True), ("x", "y"))
        for g in pair("all_gather")
    )
    assert ours == theirs


def test_types_of_scatters_are_those_of_lax():
    ours, theirs = (
        varying_of(lambda v, g=g: g(v, "y", tiled=True), ("x", "y")) for g in pair("psum_scatter")
    )
    assert ours == theirs


def test_a_sum_leaves_shard_map_as_replicated():
    for name in ("psum", "pmean", "pmax", "pmin"):
        f = on_mesh(lambda v, name=name: getattr(jax_ring, name)(v, "x"), out_specs=P())
        assert f(jnp.arange(8.0)).shape == (1,)
    f = on_mesh(lambda v: jax_ring.all_gather(v, "x", tiled=True, to="invarying"), out_specs=P())
    assert (f(jnp.arange(8.0)) == jnp.arange(8.0)).all()


def test_a_gather_to_varying_does_not():
    with pytest.raises(ValueError, match="out_specs"):
        on_mesh(lambda v: jax_ring.all_gather(v, "x", tiled=True), out_specs=P())(jnp.arange(8.0))


def test_unreduced_values_are_summed():
    def f(v):
        partial = lax.pcast(v, "x", to="unreduced")
        total = jax_ring.psum(partial, "x")
        block = jax_ring.psum_scatter(partial, "x", tiled=True)
        assert jax.typeof(total).manual_axis_type.varying == frozenset()
        assert not jax.typeof(total).manual_axis_type.unreduced
        assert jax.typeof(block).manual_axis_type.varying == {"x"}
        return total, block

    x = integers((N * N,), np.float32)
    total, block = jax.jit(on_mesh(f, out_specs=(P(), P("x"))))(x)
    assert (total == x.reshape(N, N).sum(0)).all()
    assert same_bits(total, block)


def test_unreduced_values_that_can_not_be_taken_are_refused():
    def f(name, **kwargs):
        def body(v):
            return getattr(jax_ring, name)(lax.pcast(v, "x", to="unreduced"), "x", **kwargs)

        return jax.jit(on_mesh(body))

    for bad in (
        f("pmax"),
        f("all_gather"),
        f("psum", axis_index_groups=[[0, 1, 2, 3, 4, 5, 6, 7]]),
    ):
        with pytest.raises(ValueError, match="x is unreduced"):
            bad(jnp.zeros(64))


def test_gathers_to_reduced_transpose_as_lax_does():
    def body(v):
        pulled = []
        for gather in pair("all_gather"):
            y, pull = jax.vjp(lambda w, g=gather: g(w, "x", tiled=True, to="reduced"), v)
            assert jax.typeof(y).manual_axis_type.reduced == {"x"}
            ct = jnp.arange(16.0) * lax.axis_index("x")
            pulled.append(pull(lax.pcast(ct, "x", to="unreduced"))[0])
        return pulled

    ours, theirs = jax.jit(on_mesh(body, out_specs=[P("x")] * 2))(jnp.linspace(0, 1, 16))
    assert same_bits(ours, theirs)


def test_own_zeros_and_loop_carries_are_cast():
    def f(v):
        with jax_ring.config(unroll=1):
            return jax_ring.psum(v, "x"), jax.jacrev(lambda u: jax_ring.psum(u, "x"))(v)

    total, jacobian = per_rank(f, N, integers((N, 10), np.float32))
    assert same_bits(total[0], integers((N, 10), np.float32).sum(0))
    assert (jacobian == np.eye(10)).all()


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check_vma", "expected"), [(True, [28.0] * 8), (False, 8.0 * np.arange(8))]
)
def test_gradients_of_a_sum_follow_the_mode(check_vma, expected):
    def f(w, x):
        return jax.grad(lambda w: jnp.sum(jax_ring.psum(w * x, "x")))(w)[None]

    def ours(w, x):
        g = f(w, x)
        return vary(g, ("x",)) if check_vma else g

    g = on_mesh(ours, in_specs=(P(), P("x")), check_vma=check_vma)
    assert jax.jit(g)(1.0, jnp.arange(8.0)).reshape(-1).tolist() == list(expected)


def losses():
    """Scalar functions of a (16,) array that use each collective, as (name, f(module, v))."""
    w = jnp.linspace(0.5, 2.0, 16)
    return {
        "psum": lambda m, v: jnp.sum(jnp.sin(m.psum(v * w, "x")) * v),
        "psum alone": lambda m, v: jnp.sum(m.psum(v, "x") ** 2),
        "pmean": lambda m, v: jnp.sum(jnp.cos(m.pmean(v * w, "x"))),
        "groups": lambda m, v: jnp.sum(
            m.psum_scatter(v, "x", axis_index_groups=[[0, 2], [1, 3]], tiled=True) ** 2
        ),
        "scatter": lambda m, v: jnp.sum(jnp.sin(m.psum_scatter(v * w, "x", tiled=True))),
        "scatter 2d": lambda m, v: jnp.sum(
            m.psum_scatter(v.reshape(4, 4), "x", scatter_dimension=1) ** 3
        ),
        "gather": lambda m, v: jnp.sum(jnp.sin(m.all_gather(v, "x")) * jnp.arange(4.0)[:, None]),
        "gather tiled": lambda m, v: jnp.sum(m.all_gather(v * w, "x", tiled=True) ** 2),
        "twice": lambda m, v: jnp.sum(m.psum(m.pmean(v**2, "x") * v, "x")),
    }


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("to", ["varying", "invarying", "reduced"])
def test_gathers_differentiate_where_types_are_not_checked(to, inside):
    """Each rank's loss weighs all blocks; its gradient is the sum over ranks of the weights."""
    weights = jnp.arange(1.0, 9.0)

    def loss(v):
        return jnp.sum(jax_ring.all_gather(v, "x", to=to, tiled=True) * weights)

    if inside:
        f = on_mesh(jax.grad(loss), check_vma=False)
        expected = 8 * weights
    else:
        g = on_mesh(lambda v: loss(v)[None], check_vma=False)
        f = jax.grad(lambda v: jnp.sum(g(v)) / 8)
        expected = weights
    np.testing.assert_allclose(f(jnp.arange(8.0)), expected, 1e-6)


def test_the_backward_of_a_gather_accumulates_as_asked():
    def body(v):
        ct = jnp.where(lax.axis_index("x") == 2, 256, 1).astype(v.dtype) * jnp.ones(N, v.dtype)
        f = functools.partial(jax_ring.all_gather, axis_name="x", reduce_dtype=jnp.float32)
        once = jax.vjp(f, v)[1](ct)[0]
        scatter = functools.partial(jax_ring.psum_scatter, axis_name="x", reduce_dtype=jnp.float32)
        gathered = jax.linear_transpose(scatter, ct)
        again = jax.linear_transpose(lambda u: gathered(u)[0], v)(ct)[0]
        return once, again

    for out in per_rank(body, N, np.ones(N, ml_dtypes.bfloat16)):
        assert (out.astype(np.float32) == 264).all()


def test_derivatives_without_automatic_casts():
    from jax_ring import _compat

    with _compat._config.auto_pcast(False):
        f = on_mesh(lambda v: jax_ring.pmax(v, "x"), out_specs=P())
        assert jax.grad(lambda x: f(x)[0])(jnp.arange(8.0)).tolist() == [0.0] * 7 + [1.0]


@BOTH_MODES
@pytest.mark.parametrize(
    "transform",
    ["grad", "jvp", *(pytest.param(t, marks=pytest.mark.slow) for t in ("linearize", "hessian"))],
)
def test_derivatives_are_those_of_lax(transform, check_vma):
    """To the bit where a collective is a sum of whole numbers; else to rounding."""
    names = list(losses())

    def derive(f, v, t):
        if transform == "grad":
            return jax.grad(f)(v)
        if transform == "jvp":
            return jax.jvp(f, (v,), (t,))[1]
        if transform == "linearize":
            return jax.linearize(f, v)[1](t)
        return jax.hessian(f)(v)

    def body(v):
        t = jnp.cos(v)
        return [
            [derive(functools.partial(losses()[n], m), v, t) for m in (jax_ring, lax)]
            for n in names
        ]

    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    for name, (ours, theirs) in zip(names, per_rank(body, 4, x, check_vma=check_vma), strict=True):
        np.testing.assert_allclose(ours, theirs, 2e-5, 2e-5, err_msg=name)


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather"])
@BOTH_MODES
def test_transposes_of_whole_numbers_are_laxs_to_the_bit(name, check_vma):
    kwargs = {} if name == "psum" else {"tiled": True}

    def body(v):
        results = []
        for f in pair(name):
            y, pull = jax.vjp(lambda u, f=f: f(u, "x", **kwargs), v)
            ct = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)
            varying = jax.typeof(y).manual_axis_type.varying
            results.append(pull(vary(ct, tuple(varying)))[0])
        return results

    ours, theirs = per_rank(body, N, integers((N, 16), np.float32), check_vma=check_vma)
    assert same_bits(ours, theirs)


@pytest.mark.slow
def test_numerical_derivatives():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(4, 16))

        def f(x, name):
            g = on_mesh(lambda v: losses()[name](jax_ring, v[0])[None], 4)
            return jax.jit(g)(x)

        for name in ("psum", "scatter", "gather"):
            check_grads(functools.partial(f, name=name), (x,), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("op", ["max", "prod", pytest.param("min", marks=pytest.mark.slow)])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_derivatives_that_lax_does_not_have(op, collective):
    local = {"max": jnp.max, "min": jnp.min, "prod": jnp.prod}[op]
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    x[1, 3] = 0.0  # a product with a zero factor has a derivative too
    weights = jnp.arange(1.0, 9.0)

    def body(v):
        if collective == "all_reduce":
            return jnp.sum(jax_ring.all_reduce(v, "x", op) * weights)
        own = lax.dynamic_slice_in_dim(weights, lax.axis_index("x") * 2, 2)
        part = jax_ring.reduce_scatter(v, "x", op, tiled=True) * own
        return jax_ring.psum(jnp.sum(part), "x")

    def whole(x):
        return jnp.sum(local(x, axis=0) * weights)

    ours = jax.jit(on_mesh(lambda v: body(v[0]), 4, out_specs=P()))
    np.testing.assert_allclose(ours(x), whole(x), 1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(ours))(x), jax.grad(whole)(x), 1e-5, 1e-6)
    tangent = jnp.cos(x)
    np.testing.assert_allclose(
        jax.jvp(ours, (x,), (tangent,))[1], jax.jvp(whole, (x,), (tangent,))[1], 1e-5, 1e-6
    )


@pytest.mark.parametrize("op", ["max", "prod", pytest.param("min", marks=pytest.mark.slow)])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_derivatives_over_a_vmapped_axis(op, collective):
    local = {"max": jnp.max, "min": jnp.min, "prod": jnp.prod}[op]
    x = jnp.array(np.random.default_rng(1).integers(1, 3, (4, 4)), jnp.float32)  # many ties
    weights = jnp.arange(1.0, 5.0)

    def f(x):
        def each(v):
            out = getattr(jax_ring, collective)(v, "i", op)
            return out * weights if collective == "all_reduce" else out

        out = jax.vmap(each, axis_name="i")(x)
        return jnp.sum(out) / 4 if collective == "all_reduce" else jnp.sum(out * weights)

    def whole(x):
        return jnp.sum(local(x, axis=0) * weights)

    np.testing.assert_allclose(f(x), whole(x), 1e-6)
    np.testing.assert_allclose(jax.grad(f)(x), jax.grad(whole)(x), 1e-6)
    np.testing.assert_allclose(jax.jvp(f, (x,), (x,))[1], jax.jvp(whole, (x,), (x,))[1], 1e-6)


def test_derivatives_over_a_vmapped_axis_in_groups():
    x = jnp.array([1.0, 2.0, 2.0, 2.0, 1.0])
    groups = [[0, 3], [1, 2, 4]]
    f = jax.vmap(lambda v: jax_ring.pmax(v, "i", axis_index_groups=groups), axis_name="i")
    assert f(x).tolist() == [2.0] * 5
    assert jax.grad(lambda x: jnp.sum(f(x)))(x).tolist() == [0.0, 1.5, 1.5, 2.0, 0.0]


def test_ties_over_a_vmapped_axis_and_a_mesh_axis():
    def body(v):
        def loss(v):
            return jax.vmap(lambda u: jax_ring.pmax(u, ("x", "i")), axis_name="i")(v)[0]

        return jax.grad(loss)(v)

    out = per_rank(body, 4, np.ones((4, 3), np.float32))
    np.testing.assert_allclose(out, np.full((4, 3), 1 / 12), 1e-6)


def test_products_over_a_vmapped_axis_and_a_mesh_axis():
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)

    def body(v):
        def loss(v):
            each = jax.vmap(
                lambda u: jax_ring.all_reduce(u, ("i", "x"), "prod"), axis_name="i", out_axes=None
            )
            return each(v)

        return jax.grad(loss)(v)

    expected = jax.grad(lambda x: jnp.prod(x))(x)
    np.testing.assert_allclose(per_rank(body, 4, x), expected, 1e-4)


def test_custom_operations_over_a_vmapped_axis_have_no_derivative():
    f = jax.vmap(
        lambda v: jax_ring.all_reduce(v, "i", jnp.logaddexp, identity=-jnp.inf), axis_name="i"
    )
    with pytest.raises(NotImplementedError, match="op='logaddexp' has no derivative"):
        jax.grad(lambda x: f(x)[0])(jnp.zeros(4))


def test_ties_share_the_derivative_of_a_maximum():
    f = on_mesh(lambda v: jax_ring.pmax(v, "x"), 4, out_specs=P())
    assert jax.grad(lambda x: f(x)[0])(jnp.array([1.0, 3.0, 3.0, 2.0])).tolist() == [0, 0.5, 0.5, 0]


def test_a_maximum_without_gradient():
    f = on_mesh(lambda v: v - lax.stop_gradient(jax_ring.pmax(v, "x")))
    assert (jax.grad(lambda x: jnp.sum(f(x)))(jnp.arange(8.0)) == 1).all()


def test_custom_operations_have_no_derivative():
    f = on_mesh(
        lambda v: jax_ring.all_reduce(v, "x", jnp.logaddexp, identity=-jnp.inf), out_specs=P()
    )
    assert f(jnp.zeros(8))[0] == pytest.approx(np.log(8))
    with pytest.raises(NotImplementedError, match="op='logaddexp' has no derivative"):
        jax.grad(lambda x: f(x)[0])(jnp.zeros(8))


def permutes_of(f, *shapes, in_specs=None, out_specs=P()):
    in_specs = in_specs or (P("x"),) * len(shapes)
    args = [sharded(mesh(N), spec, s) for s, spec in zip(shapes, in_specs, strict=True)]
    return len(compiled(on_mesh(f, in_specs=in_specs, out_specs=out_specs), *args).permutes)


def test_the_backward_pass_of_a_step_communicates_once():
    """A layer whose weights are replicated: one all-reduce for its gradient, none for the loss."""

    def step(w, x):
        local = vary(w, ("x",))
        loss, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(local)
        return jax_ring.psum(grad, "x"), jax_ring.psum(loss, "x")

    both = permutes_of(step, (16, 16), (8, 16), in_specs=(P(), P("x")), out_specs=(P(), P()))
    assert both == 2 * 14


def test_with_checked_types_a_sum_transposes_without_communication():
    def grad(v):
        return jax.grad(lambda u: jnp.sum(jax_ring.psum(u, "x") * 2))(v)

    assert permutes_of(grad, (64,), out_specs=P("x")) == 0


# --- vmap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axis", [0, 1, -1])
@pytest.mark.parametrize("out_axis", [0, 1, -1])
def test_vmap_of_another_dimension(in_axis, out_axis):
    x = integers((4, 8, 8, 8), np.float32)

    def body(v):
        def each(m, name, u):
            kwargs = {} if name in ("psum", "pmax") else {"tiled": True}
            if name == "psum_scatter":
                kwargs["scatter_dimension"] = 1
            return getattr(m, name)(u, "x", **kwargs)

        return [
            [
                jax.vmap(functools.partial(each, m, name), in_axes=in_axis, out_axes=out_axis)(v)
                for m in (jax_ring, lax)
            ]
            for name in ("psum", "pmax", "all_gather", *(["psum_scatter"] if in_axis == 0 else []))
        ]

    for ours, theirs in per_rank(body, 4, x):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("d", [0, 1, 2])
@pytest.mark.parametrize("tiled", [True, False])
def test_a_mapped_scatter_equals_a_loop(d, tiled):
    x = integers((4, 4, 4, 4), np.float32)

    def body(v):
        f = functools.partial(
            jax_ring.psum_scatter, axis_name="x", scatter_dimension=1, tiled=tiled
        )
        looped = jnp.stack([f(lax.index_in_dim(v, i, d, keepdims=False)) for i in range(4)])
        return jax.vmap(f, in_axes=d)(v), looped

    mapped, looped = per_rank(body, 4, x)
    assert same_bits(mapped, looped)


def test_one_set_of_permutes_serves_a_whole_batch():
    def f(v):
        return jax.vmap(lambda u: jax_ring.psum(u, "x"))(v)

    def in_two_levels(v):
        return jax.vmap(jax.vmap(lambda u: jax_ring.psum(u, "x")))(v)

    assert permutes_of(f, (8 * 16, 24)) == 14
    assert permutes_of(in_two_levels, (8 * 4, 4, 24)) == 14


def test_vmap_of_a_shard_map():
    f = on_mesh(lambda v: jax_ring.psum(v, "x"), out_specs=P())
    x = integers((5, 8, 3), np.float32)
    assert same_bits(jax.vmap(f)(x), jnp.stack([f(row) for row in x]))


COLLECTIVES = {
    "psum": lambda m, v: m.psum(v, "i"),
    "pmean": lambda m, v: m.pmean(v, "i"),
    "pmax": lambda m, v: m.pmax(v, "i"),
    "pmin": lambda m, v: m.pmin(v, "i"),
    "psum_scatter": lambda m, v: m.psum_scatter(v, "i"),
    "psum_scatter tiled": lambda m, v: m.psum_scatter(v, "i", scatter_dimension=1, tiled=True),
    "all_gather": lambda m, v: m.all_gather(v, "i"),
    "all_gather tiled": lambda m, v: m.all_gather(v, "i", axis=1, tiled=True),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 5, 8, 16])
def test_vmap_of_the_named_axis(name, n):
    x = integers((n, n, n), np.float32)
    f = COLLECTIVES[name]
    ours, theirs = (
        jax.jit(jax.vmap(functools.partial(f, m), axis_name="i"))(x) for m in (jax_ring, lax)
    )
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin"])
def test_the_sum_over_a_vmapped_axis_is_not_mapped(name):
    f = jax.vmap(lambda v: getattr(jax_ring, name)(v, "i"), axis_name="i", out_axes=None)
    assert f(jnp.arange(8.0)).shape == ()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_is_not_mapped_is_the_same_on_every_rank(name):
    f = COLLECTIVES[name]
    x = integers((4, 4), np.float32)
    ours, theirs = (
        jax.vmap(functools.partial(f, m), axis_name="i", in_axes=None, axis_size=4)(x)
        for m in (jax_ring, lax)
    )
    assert same_bits(ours, theirs)


def test_groups_over_a_vmapped_axis():  # which lax refuses
    x = integers((8, 5), np.float32)
    groups = [[0, 3, 5], [1, 2, 4, 6, 7]]
    out = jax.vmap(lambda v: jax_ring.psum(v, "i", axis_index_groups=groups), axis_name="i")(x)
    for group in groups:
        assert (np.asarray(out)[group] == x[group].sum(0)).all()
    halves = [[0, 2], [1, 3]]
    for name in ("psum_scatter", "all_gather"):
        f = jax.vmap(
            lambda v, name=name: getattr(jax_ring, name)(
                v, "i", axis_index_groups=halves, tiled=True
            ),
            axis_name="i",
        )
        mapped = f(integers((4, 6), np.float32))
        real = per_rank(
            lambda v, name=name: getattr(lax, name)(v, "x", axis_index_groups=halves, tiled=True),
            4,
            integers((4, 6), np.float32),
        )
        assert same_bits(mapped, real)


@pytest.mark.slow
def test_two_vmapped_axes():
    x = integers((2, 4, 8), np.float32)

    def both(f):
        return jax.vmap(jax.vmap(f, axis_name="j"), axis_name="i")(x)

    total = both(lambda v: jax_ring.psum(v, ("i", "j")))
    assert (total == x.sum((0, 1))).all()
    blocks = both(lambda v: jax_ring.psum_scatter(v, ("i", "j")))
    assert (np.asarray(blocks).reshape(8) == x.sum((0, 1))).all()
    swapped = both(lambda v: jax_ring.psum_scatter(v, ("j", "i"), tiled=True))
    assert (np.asarray(swapped)[..., 0].T.reshape(8) == x.sum((0, 1))).all()
    rows = both(lambda v: jax_ring.all_gather(v, ("i", "j")))
    assert (np.asarray(rows)[1, 2] == x.reshape(8, 8)).all()


def test_a_vmapped_axis_inside_of_a_mesh_axis():
    x = integers((4, 3, 12), np.float32)

    def body(v):
        def f(u):
            names = ("x", "i")
            return (
                jax_ring.psum(u, names, algorithm=jax_ring.schedules.ring(12)),
                jax_ring.pmean(u, names),
                jax_ring.psum_scatter(u, names),
                jax_ring.all_gather(u[:2], names, tiled=True),
            )

        return jax.vmap(f, axis_name="i")(v)

    total, mean, blocks, rows = per_rank(body, 4, x)
    assert (total == x.sum((0, 1))).all()
    np.testing.assert_allclose(mean, np.broadcast_to(x.mean((0, 1)), mean.shape), 1e-6)
    assert (np.asarray(blocks).reshape(12) == x.sum((0, 1))).all()
    assert (np.asarray(rows)[2, 1] == x[..., :2].reshape(-1)).all()


def test_reduce_dtype_holds_from_a_vmapped_axis_to_a_mesh_axis():
    x = np.ones((4, 2, 8), ml_dtypes.bfloat16)
    x[2, 1] = 256

    def body(v):
        def f(u):
            wide = {"axis_name": ("x", "i"), "reduce_dtype": jnp.float32}
            return jax_ring.psum(u, **wide), jax_ring.psum_scatter(u, **wide)

        return jax.vmap(f, axis_name="i")(v)

    for out in per_rank(body, 4, x):
        assert (out.astype(np.float32) == 264).all()


def test_gradients_through_a_vmapped_axis():
    def loss(m, x):
        return jnp.sum(jax.vmap(lambda v: jnp.sin(m.psum(v**2, "i")) * v, axis_name="i")(x))

    x = jnp.linspace(0, 1, 12).reshape(4, 3)
    ours, theirs = (jax.grad(functools.partial(loss, m))(x) for m in (jax_ring, lax))
    np.testing.assert_allclose(ours, theirs, 1e-6)


# --- control flow and transformations -------------------------------------------------------------


def test_inside_of_scan_while_cond_remat_and_custom_vjp():
    @jax.custom_vjp
    def scaled(v):
        return jax_ring.psum(v, "x")

    scaled.defvjp(lambda v: (scaled(v), None), lambda _, ct: (vary(3 * ct, ("x",)),))

    def body(v):
        s = jax_ring.psum(v, "x")

        def carry(c, _):
            return vary(jax_ring.pmean(c + v, "x"), ("x",)), jax_ring.psum(c, "x")

        scanned = lax.scan(carry, v, None, length=3)
        looped = lax.while_loop(
            lambda c: c[1] < 3,
            lambda c: (vary(jax_ring.psum(c[0], "x"), ("x",)) / N, c[1] + 1),
            (v, 0),
        )
        branch = lax.cond(
            jnp.sum(s) > 0, lambda u: jax_ring.psum(u, "x"), lambda u: jax_ring.pmax(u, "x"), v
        )
        remat = jax.grad(lambda u: jnp.sum(jax.checkpoint(lambda w: jax_ring.psum(w, "x") ** 2)(u)))
        custom = jax.grad(lambda u: jnp.sum(scaled(u)))(v)
        return scanned, looped, branch, remat(v), custom

    x = integers((N, 5), np.float32) + 1
    total = x.sum(0)
    (carry, ys), (looped, count), branch, remat, custom = per_rank(body, N, x)
    mean = x.mean(0)
    np.testing.assert_allclose(carry[0], 4 * mean, 1e-6)
    np.testing.assert_allclose(ys[0], [total, 2 * total, 3 * total], 1e-6)
    np.testing.assert_allclose(looped[0], mean, 1e-6)
    assert (count == 3).all()
    assert (branch == total).all()
    np.testing.assert_allclose(remat[2], 2 * total, 1e-6)
    assert (custom == 3).all()


def test_a_branch_that_only_some_ranks_take_is_an_error():
    def f(v):
        return lax.cond(lax.axis_index("x") == 0, lambda u: jax_ring.psum(u, "x"), lambda u: u, v)

    with pytest.raises(TypeError, match="cond"):
        on_mesh(f)(jnp.zeros(8))


def test_eval_shape_and_ahead_of_time_compilation():
    f = on_mesh(lambda v: jax_ring.psum(v, "x"), out_specs=P())
    shape = jax.eval_shape(f, jax.ShapeDtypeStruct((16, 3), jnp.bfloat16))
    assert (shape.shape, shape.dtype) == ((2, 3), jnp.bfloat16)
    ready = jax.jit(f).lower(sharded(mesh(N), P("x"), (16,))).compile()
    assert (
        ready(jax.device_put(jnp.ones(16), sharded(mesh(N), P("x"), (16,)).sharding)) == 8
    ).all()


def test_donated_and_kept_operands():
    x = np.arange(64.0, dtype=np.float32)

    def f(v):
        return jax_ring.psum(v, "x") + 0 * v

    def g(v):
        return v + jax_ring.psum(v, "x")

    place = sharded(mesh(N), P("x"), (64,)).sharding
    total = x.reshape(8, 8).sum(0)
    assert (
        np.asarray(jax.jit(on_mesh(f), donate_argnums=0)(jax.device_put(x, place))).reshape(8, 8)
        == total
    ).all()
    kept = jax.device_put(x, place)
    out = jax.jit(on_mesh(g))(kept)
    assert (np.asarray(kept) == x).all()
    assert (np.asarray(out).reshape(8, 8) == x.reshape(8, 8) + total).all()


def test_eager_and_disabled_jit():
    x = integers((4, 6), np.float32)
    assert (per_rank(lambda v: jax_ring.psum(v, "x"), 4, x, jit=False) == x.sum(0)).all()
    with jax.disable_jit():
        assert (per_rank(lambda v: jax_ring.psum(v, "x"), 4, x, jit=False) == x.sum(0)).all()


def test_two_independent_rings_in_one_step():
    f = jax.jit(
        on_mesh(lambda v: (jax_ring.psum(v, "x"), jax_ring.psum(2 * v, "x")), out_specs=(P(), P()))
    )
    for _ in range(100):
        one, two = f(jnp.arange(8.0))
        assert (one[0], two[0]) == (28, 56)


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [True, False])
def test_automatic_and_explicit_meshes_set_for_the_program(explicit):
    m = mesh(8, explicit=explicit)
    with jax.set_mesh(m):
        x = jax.device_put(jnp.arange(16.0), jax.NamedSharding(m, P("x")))

        @jax.jit
        @jax.shard_map(in_specs=P("x"), out_specs=P())
        def f(v):
            return jax_ring.psum(v, "x")

        assert f(x).tolist() == [56.0, 64.0]


@pytest.mark.parametrize("explicit", [True, False])
def test_nested_shard_maps(explicit):
    m = mesh(2, 4, explicit=explicit)
    x = integers((8, 8), np.float32)

    def outer(module, v):
        def inner(u):
            return module.psum(module.psum(u, "y"), "x")

        y = jax.shard_map(inner, in_specs=P(None, "y"), out_specs=P(), axis_names={"y"})(v)
        return y + jnp.sum(module.psum(v, "x"))

    with jax.set_mesh(m):
        x = jax.device_put(x, jax.NamedSharding(m, P("x", "y")))
        ours, theirs = (
            jax.jit(
                jax.shard_map(
                    functools.partial(outer, module),
                    in_specs=P("x"),
                    out_specs=P(),
                    axis_names={"x"},
                )
            )(x)
            for module in (jax_ring, lax)
        )
    assert same_bits(ours, theirs)


PARTIAL_SPECS = [P(None, "y"), P("y", None), P(None, None), P("y")]


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("spec", PARTIAL_SPECS, ids=str)
@pytest.mark.parametrize("shape", [(16, 24), (8, 8)])
def test_manual_over_data_alone_gathers_nothing(spec, shape, explicit):
    """Mesh data x model; the parameter is sharded over model by the compiler."""
    m = mesh(4, 2, explicit=explicit)
    x = np.random.default_rng(0).integers(0, 9, (4, *shape)).astype(np.float32)
    laid_out = jax.NamedSharding(m, P("x", *spec))

    def program(module):
        def body(v):
            return module.psum(v[0], "x")

        return jax.jit(jax.shard_map(body, in_specs=P("x"), out_specs=P(), axis_names={"x"}))

    with jax.set_mesh(m):
        value = jax.device_put(x, laid_out)
        assert (np.asarray(program(jax_ring)(value)) == x.sum(0)).all()
        hlo, of_lax = (
            Hlo(program(module).lower(value).compile().as_text(), None)
            for module in (jax_ring, lax)
        )
    # On explicit axes some versions of shard_map gather at its border, with lax's sum too.
    assert hlo.counts["all-gather"] == of_lax.counts["all-gather"]
    assert hlo.counts["all-gather"] == 0 or explicit
    assert not hlo.counts["all-reduce"]
    share = int(np.prod(shape)) // 4 // (2 if "y" in spec else 1)
    assert hlo.permutes == [("f32", share)] * 6


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (1, 2)])
def test_manual_over_data_alone_with_uneven_shapes(shape):
    m = mesh(4, 2)
    x = integers((4, *shape), np.float32)
    with jax.set_mesh(m):
        f = jax.jit(
            jax.shard_map(
                lambda v: (jax_ring.psum(v[0], "x"), jax_ring.pmax(v[0], "x")),
                in_specs=P("x"),
                out_specs=P(),
                axis_names={"x"},
            )
        )
        total, top = f(x)
    assert (np.asarray(total) == x.sum(0)).all()
    assert (np.asarray(top) == x.max(0)).all()


@pytest.mark.parametrize("length", [2, 6, 10])
def test_fewer_elements_on_a_device_than_ranks(length):
    m = mesh(4, 2, explicit=True)
    x = integers((4, length), np.float32)
    with jax.set_mesh(m):
        f = jax.shard_map(
            lambda v: jax_ring.psum(v[0], "x"), in_specs=P("x"), out_specs=P(), axis_names={"x"}
        )
        total = jax.jit(f)(jax.device_put(x, jax.NamedSharding(m, P("x", "y"))))
    assert (np.asarray(total) == x.sum(0)).all()


def test_scatter_and_gather_manual_over_data_alone():
    m = mesh(4, 2)
    x = integers((4, 8, 6), np.float32)

    def body(v):
        block = jax_ring.psum_scatter(v[0], "x", tiled=True)
        return jax_ring.all_gather(block, "x", tiled=True, to="invarying")

    with jax.set_mesh(m):
        f = jax.jit(jax.shard_map(body, in_specs=P("x"), out_specs=P(), axis_names={"x"}))
        value = jax.device_put(x, jax.NamedSharding(m, P("x", None, "y")))
        assert (np.asarray(f(value)) == x.sum(0)).all()
        text = f.lower(value).compile().as_text()
    assert Hlo(text, None).other_collectives == []
    assert Hlo(text, None).permutes == [("f32", 2 * 3)] * 6
