"""Eight virtual CPU devices for every test and doctest, set before anything imports JAX.

The tests must see the package that was built, with its native module, and not the bare folder
jax_ring/ beside this file. `make` installs in editable mode: an import hook then takes the Python
files from here and the built ones from the environment, wherever pytest starts. Without an
install, `python -m pytest` tests the folder alone, and tests/test_native.py says so.
"""

import os

DEVICES = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()
