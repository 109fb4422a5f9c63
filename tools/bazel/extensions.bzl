"""What MODULE.bazel uses that is no module."""

load(":xla_ffi.bzl", _xla_ffi = "xla_ffi")

def _xla_ffi_impl(_module_ctx):
    _xla_ffi(name = "xla_ffi")

# No wheel is pinned here. A handler runs on the jaxlib it was compiled against and on newer ones, and
# only the user knows what the program will run on. A root module that pins jaxlib, and wants nothing
# of the machine's Python, puts a repository of its own in this one's place (override_repo).
xla_ffi = module_extension(implementation = _xla_ffi_impl)
