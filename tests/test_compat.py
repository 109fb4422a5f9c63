"""What happens on a JAX that jax_ring does not fit, and to the rules it registers."""

import subprocess
import sys

import jax
import pytest

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
