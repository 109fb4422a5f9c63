"""The repository of XLA's FFI headers, which every jaxlib brings along."""

_FIND = """
import importlib.util, pathlib, sys
jaxlib = importlib.util.find_spec("jaxlib")
if jaxlib is None:
    sys.exit("jaxlib is not installed")
print(pathlib.Path(next(iter(jaxlib.submodule_search_locations)), "include").as_posix(), end="")
"""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "xla_ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _xla_ffi_impl(repository_ctx):
    python = repository_ctx.os.environ.get("JAX_RING_PYTHON") or repository_ctx.which("python3")
    if not python:
        fail("no python3 was found; name one with --repo_env=JAX_RING_PYTHON=...")
    found = repository_ctx.execute([python, "-c", _FIND])
    if found.return_code:
        fail("{} has no XLA headers: {}; name another Python with --repo_env=JAX_RING_PYTHON=...".format(
            python,
            found.stderr.strip(),
        ))
    repository_ctx.symlink(found.stdout, "include")
    repository_ctx.file("BUILD.bazel", _BUILD)

xla_ffi = repository_rule(
    implementation = _xla_ffi_impl,
    configure = True,
    doc = "Headers of the jaxlib of JAX_RING_PYTHON, or else of python3. Nothing of it is linked.",
    environ = [
        "JAX_RING_PYTHON",
        "PATH",
    ],
    local = True,
)
