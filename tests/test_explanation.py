import functools
import inspect
import json
import re
import subprocess
import sys

import harness
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import error_feedback
from jax_ring.choose import LINKS, Link, choose, predict, save_tuning
from jax_ring.explanation import Totals, explain
from jax_ring.schedules import Kind, direct, double_binary_tree, hierarchical
from jax_ring.schedules.families import make, names

MIB = 2**20
BITS = {"pred": 8, "s4": 4}


@pytest.fixture(autouse=True)
def by_the_ring():
    """All is by the ring unless a test says otherwise."""
    with jax_ring.config(algorithm="ring", link="cpu"):
        yield


def abstract(*sizes, axes="xyz"):
    return AbstractMesh(sizes, tuple(axes[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


def mapped(f, mesh, *, out=None, check_vma=True, axes=None):
    """f on each rank of a mesh, with its arguments divided over all axes."""
    spec = P(tuple(axes or mesh.axis_names))
    return jax.shard_map(
        f,
        mesh=mesh,
        in_specs=spec,
        out_specs=spec if out is None else out,
        check_vma=check_vma,
        axis_names=set(axes or mesh.axis_names),
    )


def floats(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def only(explanation):
    (collective,) = explanation.collectives
    return collective


def line_of(text):
    """The line of this file that holds a text, which no other may."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line and "line_of" not in line]
    return number


def bytes_in(hlo):
    """The bytes of all permutes of a compiled program."""
    return sum(n * BITS.get(kind, int(re.sub(r"\D", "", kind))) // 8 for kind, n in hlo.permutes)


# --- what a collective costs ----------------------------------------------------------------------


def test_the_ring_of_8_for_a_mebibyte():
    f = mapped(lambda x: jax_ring.psum(x, "x", algorithm="ring"), abstract(8), out=P())
    found = explain(jax.jit(f), floats(8, MIB // 4))
    psum = only(found)
    assert (psum.name, psum.algorithm, psum.axes, psum.ranks) == ("psum", "ring", ("x",), 8)
    assert (psum.shape, psum.dtype, psum.nbytes) == ((1, MIB // 4), "float32", MIB)
    assert (psum.steps, psum.bytes_sent) == (14, 2 * 7 * MIB // 8)
    assert psum.bytes_per_link == psum.bytes_sent  # Each rank sends to one other only.
    assert (psum.times, psum.nesting, psum.backward, psum.groups) == (1, (), False, None)
    assert found.totals.steps == 14
    assert found.totals.bytes_sent == psum.bytes_sent
    assert found.totals.exact


@pytest.mark.parametrize(
    ("algorithm", "wire", "reduce_dtype", "dtype", "size"),
    [
        ("ring", None, None, jnp.float32, 1000),
        ("ring", None, None, jnp.bool_, 1024),  # Counted as int32.
        ("ring", None, jnp.float32, jnp.bfloat16, 1001),  # Sums are wide, what is copied is not.
        ("direct", None, None, jnp.bfloat16, 1001),  # Contributions are narrow.
        ("bidirectional_ring", None, None, jnp.float16, 100),
        ("halving_doubling", None, jnp.float32, jnp.bfloat16, 1024),
        ("recursive_doubling", None, jnp.float32, jnp.bfloat16, 1001),
        ("ring", "bfloat16", None, jnp.float32, 1001),
        ("direct", "int8", None, jnp.float32, 1001),
        ("ring", "int4", None, jnp.bfloat16, 5000),
        ("halving_doubling", "float8_e4m3fn", None, jnp.float32, 5000),
        ("direct", jax_ring.wire.Blocks("int8", block=32), None, jnp.float32, 8192),
    ],
)
def test_the_bytes_are_those_of_the_compiled_program(algorithm, wire, reduce_dtype, dtype, size):
    def body(x):
        return jax_ring.psum(x[0], "x", algorithm=algorithm, wire=wire, reduce_dtype=reduce_dtype)

    f = mapped(body, harness.mesh(8), out=P())
    shape = floats(8, size, dtype=dtype)
    psum = only(explain(f, shape))
    hlo = harness.compiled(f, shape)
    assert psum.bytes_sent == bytes_in(hlo)
    assert psum.steps <= len(hlo.permutes)


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("algorithm", names(Kind.ALL_GATHER))
@pytest.mark.parametrize("tiled", [True, False])
def test_the_bytes_of_halves_are_those_of_the_compiled_program(algorithm, tiled, wire):
    given = {"algorithm": algorithm, "tiled": tiled, "wire": wire}

    def body(x):
        scattered = jax_ring.psum_scatter(x, "x", scatter_dimension=1, **given)
        return jax_ring.all_gather(scattered, "x", axis=1, **given)

    f = mapped(body, harness.mesh(8), out=P("x"))
    shape = floats(8 * 24, 64 if tiled else 8, 5)
    scatter, gather = explain(f, shape).collectives
    assert (scatter.name, gather.name) == ("psum_scatter", "all_gather")
    assert (scatter.reduce_dtype, gather.reduce_dtype) == ("float32", None)
    assert scatter.bytes_sent + gather.bytes_sent == bytes_in(harness.compiled(f, shape))


def test_a_rank_is_several_devices_where_axes_are_left_to_the_compiler():
    mesh = harness.mesh(2, 4)
    for wire in (None, "int8"):

        def body(x, wire=wire):
            return jax_ring.psum(x, "x", algorithm="ring", wire=wire)

        f = mapped(body, mesh, out=P(), axes=("x",))
        shape = harness.sharded(mesh, P("x", "y"), (4, 12 * 256))
        psum = only(explain(f, shape))
        assert psum.ranks == 2
        assert psum.bytes_sent == 4 * bytes_in(harness.compiled(f, shape))


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("algorithm", names(Kind.ALL_REDUCE))
def test_ranks_and_links_are_counted_step_by_step(algorithm, ranks):
    schedule = make(algorithm, Kind.ALL_REDUCE, ranks)
    sent, links = [0] * ranks, {}
    for step in schedule.steps:
        for source, target in step.perm:
            sent[source] += step.k
            links[source, target] = links.get((source, target), 0) + step.k
    f = mapped(lambda x: jax_ring.psum(x, "x", algorithm=algorithm), abstract(ranks), out=P())
    psum = only(explain(f, floats(ranks, 6 * schedule.chunks)))
    assert psum.steps == schedule.rounds
    assert psum.bytes_sent == max(sent) * 6 * 4
    assert psum.bytes_per_link == max(links.values()) * 6 * 4


def test_what_one_rank_or_no_element_costs():
    f = mapped(lambda x: jax_ring.psum(x, "x"), abstract(1), out=P())
    alone = only(explain(f, floats(4)))
    assert (alone.steps, alone.bytes_sent, alone.bytes_per_link, alone.seconds) == (0, 0, 0, 0.0)
    f = mapped(lambda x: jax_ring.psum(x, "x", wire="int8"), abstract(4), out=P())
    assert only(explain(f, floats(4, 0))).bytes_sent == 0


def test_256_ranks_that_are_not_there():
    f = mapped(lambda x: jax_ring.psum(x, "x", algorithm="direct"), abstract(256), out=P())
    psum = only(explain(f, floats(256, MIB // 4)))
    assert (psum.ranks, psum.steps) == (256, direct(256).rounds)
    assert psum.bytes_sent == 2 * 255 * MIB // 256
    assert psum.bytes_per_link == 2 * MIB // 256


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling"])
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_the_time_is_the_predicted_one(algorithm, wire):
    def body(x):
        return jax_ring.psum(x, "x", algorithm=algorithm, wire=wire)

    found = explain(mapped(body, abstract(8), out=P()), floats(8, MIB))
    schedule = make(algorithm, Kind.ALL_REDUCE, 8)
    seconds = predict(schedule, 4 * MIB if wire is None else 2 * MIB, LINKS["cpu"])
    assert only(found).link == "cpu"
    assert only(found).seconds == found.totals.seconds == pytest.approx(seconds)


def test_the_time_is_for_the_links_in_force(tmp_path):
    save_tuning(tmp_path / "links.json", {"nvlink": Link(alpha=1.0, beta=0.0)})
    f = mapped(lambda x: jax_ring.psum(x, "x"), harness.mesh(8), out=P())
    with jax_ring.config(link="nvlink", tuning=str(tmp_path / "links.json")):
        assert only(explain(f, floats(8))).seconds == 14.0
    with jax_ring.config(link="auto"):
        assert only(explain(f, floats(8))).link == "cpu"  # As the devices of the mesh say.


def test_a_hierarchy_is_priced_on_two_links(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    body = functools.partial(jax_ring.psum, axis_name=("x", "y"), algorithm="hierarchical")
    with jax_ring.config(link="auto"):
        psum = only(explain(mapped(body, harness.mesh(2, 4), out=P()), floats(8, 1024)))
    assert psum.link == "cpu, gloo"
    schedule, inside, across = hierarchical(4, 2), LINKS["cpu"], LINKS["gloo"]
    assert psum.seconds == predict(schedule, 4096, inside, across=across, inner=4)


def test_auto_says_what_it_chose_from():
    def body(x):
        return jax_ring.psum(x, "x"), jax_ring.psum(x, "x", algorithm="direct")

    with jax_ring.config(algorithm="auto"):
        auto, asked = explain(mapped(body, abstract(8), out=P()), floats(8, 1024)).collectives
    choice = choose(Kind.ALL_REDUCE, 8, 4096, LINKS["cpu"])
    assert auto.algorithm == choice.algorithm
    assert auto.seconds == pytest.approx(choice.seconds)
    assert choice.reason in auto.reason
    assert asked.reason == "asked for by algorithm="


def test_no_backend_is_needed():
    code = """
import jax, jax.numpy as jnp, jax_ring
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from jax_ring.explanation import explain
mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
f = jax.shard_map(lambda x: jax_ring.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
print(explain(jax.jit(f), jax.ShapeDtypeStruct((8, 8), jnp.float32)))
"""
    settings = {"JAX_PLATFORMS": "no_such_platform", "JAX_RING_NATIVE": "0", "JAX_RING_LINK": "ici"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**settings, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "float32[1,8]" in done.stdout


# --- which collectives there are ------------------------------------------------------------------


def test_the_gradient_where_types_are_checked_communicates_nothing():
    def loss(x):
        return jax_ring.psum((x**2).sum(), "x")

    f = mapped(loss, abstract(8), out=P())
    forward, backward = (explain(g, floats(64)) for g in (f, jax.grad(f)))
    assert [c.name for c in forward.collectives] == ["psum"]
    assert backward.collectives == ()  # The value that nobody reads is not summed either.
    assert backward.totals == Totals()
    assert [c.backward for c in explain(jax.value_and_grad(f), floats(64)).collectives] == [False]


@pytest.mark.parametrize("compiles", [False, True])
def test_the_gradient_where_types_are_not_checked_is_another_sum(compiles):
    mesh = harness.mesh(8) if compiles else abstract(8)
    f = mapped(lambda x: jax_ring.psum(x**2, "x"), mesh, out=P(), check_vma=False)
    g = jax.value_and_grad(lambda x: f(x).sum())
    found = explain(g, floats(64))
    assert [c.backward for c in found.collectives] == [False, True]
    assert len({c.line for c in found.collectives}) == 1
    if compiles:
        assert found.totals.steps == len(harness.compiled(g, floats(64)).permutes)


def test_halves_transpose_to_each_other():
    def loss(x):
        return jax_ring.all_gather(jax_ring.psum_scatter(x, "x", tiled=True), "x").sum()

    f = mapped(lambda x: jax.grad(loss)(x), abstract(8))
    found = explain(f, floats(64, 3)).collectives
    assert [(c.name, c.backward) for c in found] == [("psum_scatter", True), ("all_gather", True)]


def test_a_sum_that_jax_makes_of_a_cast_is_seen():
    def f(x, w):
        return jax.grad(lambda w: (x * w).sum())(w)

    g = jax.shard_map(f, mesh=abstract(8), in_specs=(P("x"), P()), out_specs=P())
    psum = only(explain(g, floats(64), floats()))
    assert (psum.name, psum.algorithm, psum.backward) == ("psum", "xla", True)
    assert psum.reason == "the derivative of a cast to varying, or of lax's own"


def test_a_scan_repeats_and_a_while_loop_may():
    def body(x):
        def step(carry, _):
            carry = lax.fori_loop(0, 3, lambda i, c: c + jax_ring.psum(c, "x"), carry)
            return carry - jax_ring.pmean(carry, "x"), None

        x, _ = lax.scan(step, x, length=5)
        return lax.while_loop(
            lambda c: jax_ring.pmax(c[0], "x") > 0, lambda c: c - jax_ring.pmin(c, "x"), x
        )

    found = explain(mapped(body, abstract(4)), floats(64))
    assert [(c.name, c.times, c.nesting) for c in found.collectives] == [
        ("psum", 15, ("scan of 5", "scan of 3")),
        ("pmean", 5, ("scan of 5",)),
        ("pmax", None, ("while cond",)),
        ("pmin", None, ("while body",)),
    ]
    assert found.totals.steps == (15 + 5 + 1 + 1) * 6
    assert not found.totals.exact
    assert "counted once: each while loop" in str(found)


def test_of_branches_the_costliest_counts():
    def body(x):
        return lax.cond(
            jax_ring.psum(x.sum(), "x") > 0,
            lambda c: c - jax_ring.psum(jax_ring.psum(c, "x"), "x"),
            lambda c: c - jax_ring.pmax(c, "x"),
            x,
        )

    found = explain(mapped(body, abstract(4)), floats(64))
    assert [(c.name, c.nesting) for c in found.collectives] == [
        ("psum", ()),
        ("pmax", ("branch 0 of 2",)),
        ("psum", ("branch 1 of 2",)),
        ("psum", ("branch 1 of 2",)),
    ]
    assert found.totals.steps == 3 * 6
    assert not found.totals.exact
    assert "of branches that exclude each other: the costliest" in str(found)


def test_branches_that_cost_the_same_are_exact():
    def body(x):
        return lax.cond(
            lax.axis_index("x") < 9,
            lambda c: c - jax_ring.psum(c, "x"),
            lambda c: c - jax_ring.pmax(c, "x"),
            x,
        )

    totals = explain(mapped(body, abstract(4)), floats(64)).totals
    assert (totals.steps, totals.exact) == (6, True)


def test_what_is_nested_in_transformations_is_found():
    @jax.custom_vjp
    def twice(x):
        return jax_ring.pmax(x, "x")

    twice.defvjp(lambda x: (twice(x), None), lambda _, ct: (ct,))

    def body(x):
        y = jax.jit(jax.checkpoint(lambda v: jnp.sin(jax_ring.psum(jnp.sin(v), "x"))))(x)
        return y + twice(x) + jax.jit(lambda v: jax_ring.pmin(v, "x"))(x)

    found = explain(jax.jit(mapped(body, abstract(4), out=P())), floats(64))
    assert [c.name for c in found.collectives] == ["psum", "pmax", "pmin"]


def test_recomputation_communicates_again():
    def loss(x):
        return jax.checkpoint(lambda v: jnp.sin(jax_ring.psum(jnp.sin(v), "x")))(x).sum()

    f = jax.value_and_grad(mapped(loss, abstract(4), out=P()))
    found = explain(f, floats(64)).collectives
    assert [(c.name, c.algorithm, c.backward) for c in found] == [
        ("psum", "ring", False),
        ("psum", "ring", True),
    ]


def test_of_a_linear_solve_only_the_solution_runs():
    def body(x):
        def matvec(v):
            return v + jax_ring.psum(v, "x")

        return lax.custom_linear_solve(matvec, x, lambda f, b: f(f(b)), symmetric=True)

    found = explain(mapped(body, abstract(4)), floats(64))
    assert [c.name for c in found.collectives] == ["psum", "psum"]


def test_one_for_each_leaf():
    tree = {"w": floats(8, 3), "b": floats(8, dtype=jnp.bfloat16), "n": floats(8, dtype=jnp.int32)}
    f = mapped(lambda t: jax_ring.psum(t, "x", wire="int8"), abstract(8), out=P())
    found = explain(f, tree).collectives
    assert [(c.dtype, c.shape, c.wire) for c in found] == [
        ("bfloat16", (1,), "int8"),
        ("int32", (1,), None),
        ("float32", (1, 3), "int8"),
    ]
    assert len({c.line for c in found}) == 1


def test_groups_and_their_sizes():
    groups = [[0, 1, 2], [3, 4, 5], [6, 7]]
    f = mapped(lambda x: jax_ring.psum(x, "x", axis_index_groups=groups), harness.mesh(8))
    found = explain(f, floats(8, 6))
    assert [(c.ranks, c.groups, c.steps) for c in found.collectives] == [
        (3, ((0, 1, 2), (3, 4, 5)), 4),
        (2, ((6, 7),), 2),
    ]
    assert found.totals.bytes_sent == bytes_in(harness.compiled(f, floats(8, 6)))
    assert "groups of 3 ranks" in str(found)


def test_several_axes_and_a_hierarchy():
    mesh = abstract(2, 4, axes=("node", "local"))

    def body(x):
        return jax_ring.pmean(x, ("node", "local"), algorithm="hierarchical")

    mean = only(explain(mapped(body, mesh, out=P()), floats(8, 32)))
    assert (mean.name, mean.algorithm) == ("pmean", "hierarchical")
    assert (mean.axes, mean.ranks) == (("node", "local"), 8)
    assert mean.steps == hierarchical(4, 2).rounds
    inner, outer = 2 * 3 * 32 // 4, 2 * 1 * 32 // 8
    assert mean.bytes_sent == (inner + outer) * 4
    assert mean.bytes_per_link == inner * 4


def test_nested_maps_over_one_axis_each():
    def outer(x):
        inner = jax.shard_map(
            lambda v: jax_ring.psum(v, "y"), in_specs=P("y"), out_specs=P(), axis_names={"y"}
        )
        return jax_ring.psum(inner(x), "x")

    f = mapped(outer, harness.mesh(2, 4), out=P(), axes=("x",))
    found = explain(f, floats(64)).collectives
    assert [(c.axes, c.ranks, c.shape) for c in found] == [(("y",), 4, (8,)), (("x",), 2, (8,))]


def test_from_inside_of_a_map():
    found = []

    def outer(x):
        found.append(explain(lambda v: jax_ring.psum(v, "x"), x))
        return x

    jax.eval_shape(mapped(outer, abstract(4)), floats(64))
    assert [(only(e).ranks, only(e).shape) for e in found] == [(4, (16,))]


def test_other_operations_by_name():
    def body(x):
        return (
            jax_ring.all_reduce(x, "x", "prod"),
            jax_ring.all_reduce(x, "x", jnp.logaddexp, identity=-jnp.inf),
            jax_ring.reduce_scatter(x, "x", "max", tiled=True),
            jax_ring.reduce_scatter(x, "x", "mean", tiled=True),
            jax_ring.pmean(x.astype(jnp.float16), "x"),
        )

    f = mapped(body, abstract(4), out=(P(), P(), P("x"), P("x"), P()))
    found = explain(f, floats(64)).collectives
    assert [(c.name, c.reduce_dtype) for c in found] == [
        ("all_reduce_prod", "float32"),
        ("all_reduce_logaddexp", "float32"),
        ("reduce_scatter_max", "float32"),
        ("reduce_scatter_mean", "float32"),
        ("pmean", "float32"),
    ]


def test_error_feedback():
    def body(x, residual):
        return error_feedback.pmean(x, residual, "x", wire="int4", algorithm="direct")

    f = jax.shard_map(
        body, mesh=harness.mesh(8), in_specs=(P("x"), P("x")), out_specs=(P(), P("x"))
    )
    mean = only(explain(f, floats(8, 1000), floats(8, 1000)))
    assert (mean.name, mean.wire, mean.algorithm) == ("error_feedback.pmean", "int4", "direct")
    assert mean.bytes_sent == bytes_in(harness.compiled(f, floats(8, 1000), floats(8, 1000)))


def test_a_schedule_is_called_by_its_name():
    def body(x):
        return jax_ring.psum(x, "x", algorithm=double_binary_tree(4))

    psum = only(explain(mapped(body, abstract(4), out=P()), floats(64)))
    assert psum.algorithm == "double_binary_tree"


@pytest.mark.parametrize("check_vma", [True, False])
def test_collectives_of_lax_are_told_apart(check_vma):
    def body(x):
        ours = jax_ring.psum(x, "x", algorithm="xla") + jax_ring.psum(x, "x", algorithm="ring")
        both = lax.psum((x, x * 2), "x")  # called as lax's
        halves = lax.all_gather(lax.psum_scatter(x, "x", tiled=True), "x", tiled=True)
        return ours + both[0] + both[1] + lax.pmax(x, "x") + halves

    f = mapped(body, abstract(4), check_vma=check_vma, out=P("x"))
    found = explain(f, floats(64))
    assert [(c.name, c.algorithm) for c in found.collectives] == [
        ("psum", "xla"),
        ("psum", "ring"),
        ("psum", "xla"),
        ("psum", "xla"),
        ("psum_scatter", "xla"),
        ("all_gather", "xla"),
        ("pmax", "xla"),
    ]
    asked, _, called, *_ = found.collectives
    assert asked.reason == "algorithm='xla' was asked for, or chosen by 'auto'"
    assert called.reason == "lax's own is called"
    assert (called.file, called.line) == (__file__, line_of("# called as lax's"))
    assert (called.steps, called.bytes_sent, called.seconds) == (None, None, None)
    assert (called.shape, called.ranks) == ((16,), 4)
    assert (found.totals.steps, found.totals.exact) == (6, False)
    assert "1 of jax_ring, 6 of lax" in str(found)
    assert "not counted: what lax's own collectives send" in str(found)


@pytest.mark.parametrize("check_vma", [True, False])
def test_lax_does_it_by_the_name_it_was_called_by(check_vma):
    """As by any other algorithm: a mean is not called a sum because lax sums and then divides."""

    def body(x, how):
        mean = {"op": "mean", "axis_name": "x", **how}
        scattered = jax_ring.reduce_scatter(x, tiled=True, **mean).sum()
        gathered = jax_ring.all_gather(x, "x", **how).sum()
        return jax_ring.pmean(x, "x", **how) + jax_ring.all_reduce(x, **mean) + scattered + gathered

    names = []
    for how in ({"algorithm": "ring"}, {"algorithm": "xla"}):
        f = mapped(functools.partial(body, how=how), abstract(4), check_vma=check_vma, out=P("x"))
        found = explain(f, floats(64)).collectives
        names.append(sorted(c.name for c in found))
        assert {c.algorithm for c in found} == set(how.values())
        assert all("called" not in c.reason for c in found)
    assert names[0] == names[1] == ["all_gather", "pmean", "pmean", "reduce_scatter_mean"]

    def loss(x):
        y = jax_ring.psum_scatter(x, "x", tiled=True, algorithm="xla")
        return (y**2).sum()

    f = mapped(jax.grad(loss), abstract(4), check_vma=check_vma, out=P("x"))
    forth, back = explain(f, floats(64)).collectives
    assert (forth.name, forth.backward, back.name, back.backward) == (
        "psum_scatter",
        False,
        "all_gather",
        True,
    )
    assert forth.reason == back.reason


def test_what_else_lax_communicates():
    def body(x):
        x = lax.ppermute(lax.pmean(x, "x"), "x", [(0, 1), (1, 0)])
        return lax.all_to_all(x, "x", 0, 0, tiled=True)

    found = explain(mapped(body, abstract(4), check_vma=False, out=P("x")), floats(64))
    assert [c.name for c in found.collectives] == ["pmean", "ppermute", "all_to_all"]
    assert {c.reason for c in found.collectives} == {"lax's own is called"}


def test_over_a_vmapped_axis_nothing_is_communicated():
    def f(x):
        return jax.vmap(lambda v: jax_ring.psum(v, "i"), axis_name="i")(x)

    found = explain(f, floats(4))
    assert found.collectives == ()
    assert str(found) == "no collectives (over an axis of jax.vmap nothing is communicated)"


def test_a_batch_is_one_collective():
    f = mapped(jax.vmap(lambda v: jax_ring.psum(v, "x")), abstract(4), out=P())
    assert only(explain(f, floats(64, 5))).shape == (16, 5)


def test_what_nobody_reads_is_left_out():
    def body(x):
        jax_ring.psum(x, "x")
        lax.psum(x, "x")
        return x

    f = mapped(body, harness.mesh(8))
    assert explain(f, floats(64)).collectives == ()
    hlo = harness.compiled(f, floats(64))
    assert (hlo.permutes, hlo.other_collectives) == ([], [])


# --- where ----------------------------------------------------------------------------------------


def test_each_call_has_its_line():
    def body(x):
        with jax.named_scope("first"):
            y = jax_ring.psum(x, "x")  # the first call
        trees = jax.tree.map(lambda v: jax_ring.pmax(v, "x"), [y - x])  # the second call
        return functools.reduce(jnp.add, trees) + jax_ring.pmin(x, "x")  # the third call

    found = explain(jax.jit(mapped(body, abstract(4), out=P())), floats(64)).collectives
    assert {c.file for c in found} == {__file__}
    wanted = ["the first call", "the second call", "the third call"]
    assert [c.line for c in found] == [line_of(f"# {call}") for call in wanted]
    assert [c.scope for c in found] == ["first", "", ""]


# --- how it is shown ------------------------------------------------------------------------------


def example():
    def body(x):
        x = lax.fori_loop(0, 3, lambda i, c: c + jax_ring.psum(c, "data", wire="int8"), x)
        return lax.psum(x, "data")

    f = mapped(body, abstract(8, axes=("data",)), out=P())
    return explain(f, floats(8, MIB // 2, dtype=jnp.bfloat16))


def test_json_holds_all_of_it():
    found = example()
    as_dict = found.to_dict()
    assert json.loads(found.to_json()) == json.loads(found.to_json(indent=2)) == as_dict
    assert set(as_dict) == {"collectives", "totals"}
    first = as_dict["collectives"][0]
    assert first["name"] == "psum"
    assert (first["axes"], first["shape"], first["nesting"]) == (
        ["data"],
        [1, MIB // 2],
        ["scan of 3"],
    )
    assert (first["wire"], first["dtype"], first["reduce_dtype"]) == ("int8", "bfloat16", "float32")
    assert (first["ranks"], first["groups"], first["times"]) == (8, None, 3)
    assert as_dict["totals"]["bytes_sent"] == 3 * first["bytes_sent"]


def test_the_text_says_all_of_it_in_100_columns():
    found = example()
    ring, _ = found.collectives
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    for word in (
        f"test_explanation.py:{ring.line}",
        "scan of 3",
        "over data",
        "8 ranks",
        f"bfloat16[1,{MIB // 2}]",
        "1.00 MiB",
        "sums in float32",
        "wire int8",
        "ring",
        f"{ring.seconds * 1e3:.2f} ms",
        f"[1] {ring.reason}",
        "[2] lax's own is called",
        "1 of jax_ring, 1 of lax",
        f"{ring.seconds * 3e3:.2f} ms predicted (links: cpu)",
    ):
        assert word in text


def test_rich_shows_the_same():
    from rich.console import Console

    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(example())
    assert [line.rstrip() for line in capture.get().splitlines()] == str(example()).splitlines()


# --- what it refuses ------------------------------------------------------------------------------


def test_what_is_no_function():
    with pytest.raises(TypeError, match=r"^jax_ring\.explain: f must be a function, got 3$"):
        explain(3)


def test_what_is_no_array():
    with pytest.raises(
        TypeError, match=r"^jax_ring\.explain: arguments of f must be arrays, .*'a'"
    ):
        explain(lambda x, mode: x, 1.0, mode="a")


def test_static_arguments_of_jit_are_its_own():
    @functools.partial(jax.jit, static_argnames="name")
    def f(x, *, name):
        return mapped(lambda v: jax_ring.psum(v, name), abstract(4), out=P())(x)

    assert only(explain(f, floats(64), name="x")).axes == ("x",)


def test_an_axis_that_is_not_bound_is_the_collectives_own_error():
    with pytest.raises(NameError, match="unbound axis name: x"):
        explain(lambda v: jax_ring.psum(v, "x"), floats(4))


def test_the_settings_in_force_count():
    f = mapped(lambda x: jax_ring.psum(x, "x"), abstract(4), out=P())
    for algorithm in ("halving_doubling", "direct"):
        with jax_ring.config(algorithm=algorithm):
            assert only(explain(f, floats(64))).algorithm == algorithm
