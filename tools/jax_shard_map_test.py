"""Runs JAX's own tests/shard_map_test.py with lax's collectives replaced by ours.

    python tools/jax_shard_map_test.py path/to/shard_map_test.py [pytest arguments]

Take the file from JAX's repository at the tag of the installed version. It runs twice, first as it
is; the tests that fail only with ours are listed. Some assert on the names of operations in HLO or
jaxprs and must fail; docs/semantics.md lists those.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

REPLACE = """
import os
if os.environ["JAX_RING_REPLACES"] == "1":
    import jax_ring
    from jax import lax
    for name in ("psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather"):
        setattr(lax, name, getattr(jax_ring, name))
"""


def failures(test_file: pathlib.Path, replaced: bool, arguments: list[str]) -> set[str]:
    """The tests that fail, with or without the replacement."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "conftest.py").write_text(REPLACE)
        copy = pathlib.Path(folder, test_file.name)
        copy.write_bytes(test_file.read_bytes())
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-rf", *arguments, str(copy)],
            cwd=folder,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                "JAX_RING_REPLACES": str(int(replaced)),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    print(f"{'jax_ring' if replaced else 'lax'}: {done.stdout.splitlines()[-1]}")
    return set(re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE))


def main() -> int:
    """Compares both runs; the status is the number of tests that fail only with ours."""
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    test_file, arguments = pathlib.Path(sys.argv[1]), sys.argv[2:]
    before = failures(test_file, False, arguments)
    new = sorted(failures(test_file, True, arguments) - before)
    print("\n".join(["fail only with jax_ring:", *new]))
    return len(new)


if __name__ == "__main__":
    sys.exit(main())
