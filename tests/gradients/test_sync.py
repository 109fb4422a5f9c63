"""Buckets in programs: values against lax, collectives and what they depend on from the HLO."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled, integers, mesh, mixed_leaves, per_rank, same_bits, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import native
from jax_ring.gradients import plan_buckets, reduce_in_backward, sync_gradients

N = 4


def tree(ranks=N):
    return mixed_leaves(ranks) | {"count": integers((ranks, 2), np.int32, seed=3)}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("limit", [1, 64, 10**12])
@pytest.mark.parametrize("op", ["mean", "sum", "max"])
def test_values_are_those_of_the_leaves_one_by_one(op, limit, check_vma):
    x = tree()

    def f(v):
        return sync_gradients(v, "x", bucket_bytes=limit, op=op)

    result = per_rank(f, N, x, check_vma=check_vma)
    apart = per_rank(
        lambda v: jax.tree.map(lambda leaf: jax_ring.all_reduce(leaf, "x", op), v), N, x
    )
    assert jax.tree.structure(result) == jax.tree.structure(x)
    assert jax.tree.all(jax.tree.map(same_bits, result, apart))


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_order_values_are_the_same_and_each_bucket_but_the_first_waits(check_vma):
    def f(v, in_order):
        return sync_gradients(v, "x", bucket_bytes=64, in_order=in_order)

    x = tree()
    wanted, found = (
        per_rank(functools.partial(f, in_order=given), N, x, check_vma=check_vma)
        for given in (False, True)
    )
    assert jax.tree.all(jax.tree.map(same_bits, found, wanted))
    one = jax.tree.map(lambda v: v[0], x)
    traced = jax.make_jaxpr(functools.partial(f, in_order=True), axis_env=[("x", N)])(one)
    buckets = plan_buckets(one, 64).buckets
    assert len(buckets) > 2
    # That the compiler keeps to it is for tests/aot/test_overlap.py: on CPU it has no reason to.
    assert str(traced).count("optimization_barrier") == len(buckets) - 1


@pytest.mark.parametrize("x", [{}, None, 3.0, {"a": None}])
def test_trees_that_are_hardly_any(x):
    found = jax.vmap(lambda _: sync_gradients(x, "i"), axis_name="i", out_axes=None)(jnp.zeros(2))
    assert jax.tree.structure(found) == jax.tree.structure(x)
    assert jax.tree.leaves(found) == jax.tree.leaves(x)


@pytest.mark.parametrize("ranks", [4, 6])
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_deterministic_bits_do_not_depend_on_buckets(ranks, wire):
    random = np.random.default_rng(0)
    x = [random.standard_normal((ranks, n)).astype(np.float32) for n in (1, 37, 500, 64)]

    def f(v):
        return [
            sync_gradients(v, "x", bucket_bytes=limit, deterministic=True, wire=wire)
            for limit in (1, 400, 10**9)
        ]

    first, *others = per_rank(f, ranks, x)
    for other in others:
        assert jax.tree.all(jax.tree.map(same_bits, first, other))


def test_without_it_they_do():
    random = np.random.default_rng(0)
    x = [random.standard_normal((N, n)).astype(np.float32) for n in (1, 37, 500, 64)]
    how = {"algorithm": "ring"}
    f = lambda v: [sync_gradients(v, "x", bucket_bytes=limit, **how) for limit in (1, 10**9)]  # noqa: E731
    first, other = per_rank(f, N, x)
    assert not jax.tree.all(jax.tree.map(same_bits, first, other))


def test_fifty_steps_are_the_same_whatever_the_buckets():
    data = np.random.default_rng(0).standard_normal((N, 8, 6)).astype(np.float32)
    params = {"a": jnp.ones((6, 5)) / 7, "b": jnp.zeros(5), "c": jnp.ones((5, 1)) / 3}

    def loss(p, x):
        return ((jnp.tanh(x @ p["a"] + p["b"]) @ p["c"] - x.sum(1, keepdims=True)) ** 2).mean()

    def train(x, limit):
        def step(p, _):
            value, grads = jax.value_and_grad(loss)(lax.pcast(p, "x", to="varying"), x)
            grads = sync_gradients(grads, "x", bucket_bytes=limit, deterministic=True)
            return jax.tree.map(lambda a, g: a - 0.05 * g, p, grads), jax_ring.pmean(value, "x")

        return lax.scan(step, params, length=50)[1]

    losses = [
        per_rank(functools.partial(train, limit=limit), N, data)[0] for limit in (1, 100, 2**30)
    ]
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert same_bits(losses[0], losses[1])
    assert same_bits(losses[0], losses[2])


def test_what_cannot_be_deterministic():
    for how, message in (
        ({"algorithm": "ring"}, "such as 'recursive_doubling', got algorithm='ring'"),
        ({"algorithm": "xla"}, "got algorithm='xla'"),
        ({"wire": "int8"}, "such as 'bfloat16', got wire='int8'"),
    ):
        f = functools.partial(sync_gradients, axis_name="x", deterministic=True, **how)
        with pytest.raises(ValueError, match=message):
            per_rank(f, N, [np.ones((N, 3), np.float32)])


def test_an_operation_for_each_leaf():
    ranks = np.arange(8, dtype=np.float32)
    ops = {"g": "sum", "amax": "max"}
    result = per_rank(lambda v: sync_gradients({"g": v, "amax": v}, "x", op=ops), 8, ranks)
    assert (result["g"] == 28).all()
    assert (result["amax"] == 7).all()
    x = tree()
    upper = {"state": "max", "grads": "mean"}
    f = lambda v: sync_gradients({"grads": v, "state": [v]}, "x", op=upper)  # noqa: E731
    result, wanted = per_rank(f, N, x), jax.tree.map(lambda v: v.max(0), x)
    first = jax.tree.map(lambda v: v[0], result["state"][0])
    assert jax.tree.all(jax.tree.map(same_bits, first, wanted))
    assert same_bits(result["grads"]["w"][0], x["w"].mean(0))


def test_an_operation_that_there_is_not():
    with pytest.raises(ValueError, match="op must be .*'sum'.*got 'most'"):
        per_rank(lambda v: sync_gradients({"a": v}, "x", op={"a": "most"}), N, np.ones(N))


# Double reduction.


def test_what_is_summed_already_is_refused():
    def f(x):
        grads = jax.grad(lambda w: (w * x).sum())(jnp.ones(3))
        return sync_gradients({"w": grads}, "x")

    with pytest.raises(ValueError, match=r"leaf \['w'\] of grads must vary over 'x'.*pcast"):
        per_rank(f, N, np.ones((N, 3), np.float32))


def test_the_recipe_of_the_message():
    def f(x):
        w = lax.pcast(jnp.ones(3), "x", to="varying")
        return sync_gradients(jax.grad(lambda w: (w * x).sum())(w), "x")

    x = integers((N, 3), np.float32)
    assert same_bits(per_rank(f, N, x)[0], x.mean(0))


# Programs.


class Graph:
    """The instructions of a compiled program's entry, and what they depend on."""

    def __init__(self, text):
        self.module = text
        entry = text[text.index("\nENTRY") :]
        self.operands, self.text = {}, {}
        for line in entry.splitlines():
            found = re.match(r"\s+(?:ROOT )?%([\w.-]+) = (.*)", line)
            if found:
                name, rest = found.groups()
                self.text[name] = rest.split(", metadata=")[0]
                self.operands[name] = re.findall(r"%([\w.-]+)", self.text[name].split("calls=")[0])

    def named(self, kind):
        """The instructions of a kind, and the fusions with one in them."""
        pattern = r"\n%([\w.-]+) \(.*?\n}"
        bodies = {m[1]: m[0] for m in re.finditer(pattern, self.module, re.DOTALL)}
        within = {name for name, body in bodies.items() if f" {kind}(" in body}

        def is_one(text):
            called = re.search(r"calls=%([\w.-]+)", text)
            return f" {kind}(" in text or bool(called and called[1] in within)

        return [name for name, text in self.text.items() if is_one(text)]

    def ancestors(self, name):
        found, todo = set(), [name]
        while todo:
            for operand in self.operands.get(todo.pop(), []):
                if operand not in found:
                    found.add(operand)
                    todo.append(operand)
        return found

    def parameters(self, name):
        numbers = (re.search(r" parameter\((\d+)\)", self.text[a]) for a in self.ancestors(name))
        return frozenset(int(found[1]) for found in numbers if found)


def synced(shapes, limit, **how):
    args = [sharded(mesh(8), P("x"), (8 * shape[0], *shape[1:])) for shape in shapes]
    f = jax.shard_map(
        lambda *g: sync_gradients(g, "x", bucket_bytes=limit, **how),
        mesh=mesh(8),
        in_specs=P("x"),
        out_specs=P(),
    )
    return compiled(f, *args)


def test_a_bucket_depends_on_its_own_leaves_alone():
    shapes = [(64,), (128,), (32, 4), (80,)]
    plan = plan_buckets([jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], 4 * 208)
    wanted = {frozenset(leaf.index for leaf in bucket.leaves) for bucket in plan.buckets}
    assert wanted == {frozenset({2, 3}), frozenset({0, 1})}
    hlo = synced(shapes, 4 * 208, algorithm="ring")
    graph = Graph(hlo.text)
    permutes = graph.named("collective-permute")
    assert len(permutes) == 2 * 14
    assert {graph.parameters(name) for name in permutes} == wanted


def test_a_leaf_with_a_bucket_to_itself_is_not_copied():
    alone = synced([(800,)], 10**9, algorithm="ring")
    copies = {} if "cpu" in native.platforms() else {"copy": 1}
    assert alone.copies_of(800) == copies, "as jax_ring.psum: the result"
    joint = synced([(400,), (200, 2)], 10**9, algorithm="ring")
    assert joint.copies_of(800)["concatenate"] == 1


def test_the_last_layers_gradients_are_sent_while_backward_goes_on():
    """The last layer's bucket needs no matrix product of the layers before it in backward."""
    layers = 3

    def step(*operands):
        x, params = operands[0], [lax.pcast(w, "x", to="varying") for w in operands[1:]]

        def loss(params):
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return (y**2).sum()

        return sync_gradients(jax.grad(loss)(params), "x", bucket_bytes=1, algorithm="ring")

    f = jax.shard_map(
        step, mesh=mesh(8), in_specs=(P("x"), *[P()] * layers), out_specs=[P()] * layers
    )
    args = [sharded(mesh(8), P("x"), (8 * 16, 64))] + [sharded(mesh(8), P(), (64, 64))] * layers
    graph = Graph(compiled(f, *args).text)
    products = set(graph.named("dot"))
    assert len(products) >= 3 * layers - 1
    needs = {
        frozenset(graph.ancestors(name) & products) for name in graph.named("collective-permute")
    }
    sizes = sorted(map(len, needs))
    # Forward has 3 products; each layer's gradient takes one more, and one to go on.
    assert sizes == [layers + 1, layers + 2, layers + 3]


def test_manual_over_data_alone_leaves_leaves_apart():
    m = mesh(4, 2)
    f = jax.shard_map(
        lambda g: sync_gradients(g, "x"), mesh=m, in_specs=P("x"), out_specs=P(), axis_names={"x"}
    )
    shapes = [sharded(m, P("x", "y"), (32, 16)), sharded(m, P("x", "y"), (16, 8))]
    hlo = compiled(f, shapes)
    assert not hlo.other_collectives


# Inside of backward.


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_come_out_of_backward_reduced(check_vma):
    x = integers((N, 5), np.float32)

    def f(v):
        def loss(w):
            return (reduce_in_backward(w, "x") * v).sum()

        return jax.grad(loss)(jnp.ones(5))

    rows = per_rank(f, N, x, check_vma=check_vma)
    assert all(same_bits(row, x.mean(0)) for row in np.asarray(rows))


def test_layers_in_a_loop_are_reduced_in_the_loop():
    layers, width = 6, 16

    def f(x, stack):
        def loss(stack):
            def layer(y, w):
                return jnp.tanh(y @ reduce_in_backward(w, "x", algorithm="ring")), None

            return (lax.scan(layer, x, stack)[0] ** 2).sum()

        return jax.grad(loss)(stack)

    g = jax.shard_map(f, mesh=mesh(N), in_specs=(P("x"), P()), out_specs=P())
    x = np.random.default_rng(0).standard_normal((N * 4, width)).astype(np.float32)
    stack = np.random.default_rng(1).standard_normal((layers, width, width)).astype(np.float32) / 4
    hlo = compiled(g, x, stack)
    in_loops = [
        body.count(" collective-permute(") for body in hlo.text.split("\n\n") if "ENTRY" not in body
    ]
    assert max(in_loops) == 2 * (N - 1)
    assert sum(in_loops) == len(hlo.permutes)
    assert not hlo.other_collectives

    def whole(stack):
        y = x
        for w in stack:
            y = jnp.tanh(y @ w)
        return (y**2).sum() / N

    np.testing.assert_allclose(jax.jit(g)(x, stack), jax.grad(whole)(stack), rtol=1e-4, atol=1e-5)
