"""What the tests share: meshes of virtual devices, ways to run a function on them, compiled HLO."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh(*sizes: int, names: str = "xyz", explicit: bool = False, order: Any = None) -> Mesh:
    """A mesh over the first devices, optionally in another order."""
    devices = np.array(jax.devices()[: math.prod(sizes)])
    if order is not None:
        devices = devices[np.asarray(order)]
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(devices.reshape(sizes), tuple(names[: len(sizes)]), (kind,) * len(sizes))


def per_rank(
    f: Callable[..., Any], n: int | Mesh, *args: Any, check_vma: bool = True, jit: bool = True
) -> Any:
    """Runs f once on each rank; rank r gets row r of each argument. Returns the rows of results.

    Each result is made varying, so that every rank's copy is seen.
    """
    m = mesh(n) if isinstance(n, int) else n
    axes = m.axis_names

    def body(*rows: Any) -> Any:
        out = f(*jax.tree.map(lambda v: v[0], rows))
        return jax.tree.map(lambda v: vary(v, axes)[None], out)

    g = jax.shard_map(body, mesh=m, in_specs=P(axes), out_specs=P(axes), check_vma=check_vma)
    rows = jax.device_put(args, NamedSharding(m, P(axes)))
    return (jax.jit(g) if jit else g)(*rows)


def vary(x: Any, axes: tuple[str, ...]) -> jax.Array:
    """Casts to varying over all axes, where types are checked."""
    x = jax.numpy.asarray(x)
    have = jax.typeof(x).manual_axis_type.varying
    missing = tuple(axis for axis in axes if axis not in have)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


@dataclasses.dataclass(frozen=True)
class Hlo:
    """A compiled module, and what it is made of."""

    text: str
    memory: Any

    @property
    def counts(self) -> collections.Counter[str]:
        """How often each instruction occurs, fused ones too."""
        return collections.Counter(re.findall(r" = (?:\(.*?\)|\S+) ([a-z-]+)\(", self.text))

    @property
    def permutes(self) -> list[tuple[str, int]]:
        """(element type, elements) of each collective-permute, in order."""
        found = re.findall(r" = (\w+)\[([\d,]*)\]\S* collective-permute\(", self.text)
        return [(kind, math.prod(int(d) for d in dims.split(",") if d)) for kind, dims in found]

    @property
    def other_collectives(self) -> list[str]:
        """Names of collectives that are no permutes."""
        names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-broadcast")
        return [n for n in self.counts for name in names if n.startswith(name)]

    def groups(self, name: str) -> list[list[list[int]]]:
        """The replica groups of each instruction of that name."""
        lines = re.findall(rf" {name}(?:-start)?\(.*replica_groups=(.+?), use_global", self.text)
        return [_groups(line) for line in lines]

    def copies_of(self, elements: int) -> dict[str, int]:
        """How often instructions that move data without need produce at least `elements`."""
        found: collections.Counter[str] = collections.Counter()
        pattern = r" = \w+\[([\d,]*)\]\S* (copy|pad|concatenate|transpose|gather|scatter|slice)\("
        for dims, name in re.findall(pattern, self.text):
            if math.prod(int(d) for d in dims.split(",") if d) >= elements:
                found[name] += 1
        return dict(found)


def _groups(text: str) -> list[list[int]]:
    """Replica groups in any of XLA's three forms: a list, a reshaped range, axes of a mesh."""
    if text.startswith("{"):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    axes = dict(re.findall(r"'(\w+)'=(\d+)", text))
    counted, order = (re.findall(r"[=(]\[([\d,]+)\](?:T\(([\d,]+)\))?", text) or [("", "")])[0]
    shape = _numbers(counted) or [int(size) for size in axes.values()]
    ranks = np.arange(math.prod(shape)).reshape(shape).transpose(_numbers(order) or None)
    if not axes:
        return ranks.reshape(_numbers(re.findall(r"^\[([\d,]+)\]", text)[0])).tolist()
    within = [list(axes).index(name) for name in re.findall(r"'(\w+)'(?!=)", text)]
    ranks = ranks.reshape([int(size) for size in axes.values()])
    size = math.prod(ranks.shape[axis] for axis in within)
    return np.moveaxis(ranks, within, range(-len(within), 0)).reshape(-1, size).tolist()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def compiled(f: Callable[..., Any], *args: Any, **jit_options: Any) -> Hlo:
    """Compiles f for arguments or their shapes."""
    result = jax.jit(f, **jit_options).lower(*args).compile()
    return Hlo(result.as_text(), result.memory_analysis())


def sharded(m: Mesh, spec: P, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """The shape of an array laid out over a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(m, spec))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays agree in dtype, shape and every bit."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def integers(shape: tuple[int, ...], dtype: Any, seed: int = 0, high: int = 4) -> np.ndarray:
    """Small whole numbers, whose sums are exact in any order and in any dtype."""
    values = np.random.default_rng(seed).integers(0, high, shape)
    return values.astype(dtype)


def mixed_leaves(ranks: int) -> dict[str, Any]:
    """A tree for `per_rank`: leaves of several shapes and dtypes, an empty one and none."""
    return {
        "w": integers((ranks, 3, 5), np.float32),
        "none": None,
        "half": integers((ranks, 7), jnp.bfloat16, seed=1),
        "scalar": integers((ranks,), np.float32, seed=2),
        "empty": np.zeros((ranks, 0, 2), np.float32),
    }


def over_steps(transformation: Any, grads: Any, state: Any = None) -> tuple[Any, Any]:
    """Runs a gradient transformation over axis "x" on a tree of [steps, ranks, ...].

    Returns its results and the last state, for every rank: [steps, ranks, ...] and [ranks, ...].
    """
    rows = jax.tree.map(lambda v: v[0, 0], grads)
    start = transformation.init(rows) if state is None else state

    def one_rank(grads: Any) -> tuple[Any, Any]:
        def step(state: Any, g: Any) -> tuple[Any, Any]:
            result, state = transformation.update(g, state)
            return state, result

        return jax.lax.scan(step, start, grads)

    run = jax.vmap(one_rank, in_axes=1, out_axes=(0, 1), axis_name="x")
    state, results = jax.jit(run)(grads)
    return results, state
