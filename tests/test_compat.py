"""What happens on a JAX that jax_ring does not fit, and to the rules it registers."""

import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jax_ring import _compat


@pytest.mark.parametrize(
    "missing", ["core.NamedAxisEffect", "config._check_vma", "lax.parallel._check_axis_names"]
)
def test_a_jax_without_a_private_name_is_refused_with_the_range_that_fits(missing):
    module, name = f"jax._src.{missing}".rsplit(".", 1)
    code = f"import importlib, jax; del importlib.import_module({module!r}).{name}\nimport jax_ring"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: this jax_ring was checked with jax 0.10.2 to ")
    assert f"does not fit the installed jax {jax.__version__}" in last
    assert name in last


def test_the_installed_jax_is_in_the_range():
    def numbers(version):
        return tuple(int(part) for part in version.split(".")[:3])

    assert numbers(_compat.OLDEST_JAX) <= numbers(jax.__version__)


def test_the_mesh_inside_of_a_shard_map_is_the_one_in_force_there():
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    seen = []

    def inner(x):
        seen.append(jax.sharding.get_abstract_mesh())
        return x

    def outer(x):
        seen.append(jax.sharding.get_abstract_mesh())
        return jax.shard_map(inner, in_specs=P("y"), out_specs=P("y"), axis_names={"y"})(x)

    f = jax.shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    (first,) = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((8,), "float32")).eqns
    (second,) = first.params["jaxpr"].eqns
    for eqn, there, manual in zip((first, second), seen, (["x"], ["x", "y"]), strict=True):
        found = _compat.mesh_inside(eqn)
        assert dict(found.shape) == {"x": 2, "y": 4}
        assert sorted(found.manual_axes) == sorted(there.manual_axes) == manual
