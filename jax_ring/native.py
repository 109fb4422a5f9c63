"""The native module: loads it, registers its handlers, and says what came of it.

Nothing here is needed for a right answer: without the native module everything runs through plain
JAX. `JAX_RING_NATIVE=0` leaves the module out, at install (it is not built) or at run time.

Example:
  >>> from jax_ring import native
  >>> str(native.status()).startswith("jax_ring native module: ")
  True
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import json
import pathlib
import re
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.version import __version__ as jaxlib_version

from jax_ring.config import current, settings

Version = tuple[int, int]

_MODULE = "jax_ring._native"
_CUDA_LIBRARY = "libjax_ring_cuda.so"
_CUDA_HANDLERS = {
    "jax_ring_chunk_encode": "JaxRingCudaChunkEncode",
    "jax_ring_chunk_reduce": "JaxRingCudaChunkReduce",
    "jax_ring_chunk_decode": "JaxRingCudaChunkDecode",
}
_API_VERSION = 1  # Typed handlers. JAX's default could change, and the wrong one crashes.


@dataclasses.dataclass(frozen=True)
class Status:
    """What came of loading the native module.

    Attributes:
      available: whether its handlers are registered.
      reason: why it is not available, or empty.
      ffi_api_built: the XLA FFI API (major, minor) it was compiled against, if known.
      ffi_api_runtime: the XLA FFI API (major, minor) of the installed jaxlib, if known.
      path: the file of the module, if it was found.
      cuda_reason: why there are no handlers for CUDA, or empty.
      cuda_path: the file of the CUDA kernels, if their handlers are registered.
    """

    available: bool
    reason: str = ""
    ffi_api_built: Version | None = None
    ffi_api_runtime: Version | None = None
    path: str | None = None
    cuda_reason: str = "there is no native module"
    cuda_path: str | None = None

    def __str__(self) -> str:
        """One line for people."""
        if not self.available:
            return f"jax_ring native module: not used, because {self.reason}"
        return (
            f"jax_ring native module: {self.path} (compiled against XLA FFI API "
            f"{_text(self.ffi_api_built)}, jaxlib {jaxlib_version} has "
            f"{_text(self.ffi_api_runtime)}); CUDA kernels: "
            f"{self.cuda_path or f'not there, because {self.cuda_reason}'}"
        )


class _UnavailableError(Exception):
    """Why the native module is not used, and whether somebody wanted that."""

    def __init__(self, reason: str, *, wanted: bool = False) -> None:
        super().__init__(reason)
        self.wanted = wanted


@functools.cache
def load() -> Status:
    """Imports the native module and registers its handlers, once per process.

    Never raises. Warns once if the module is not available although nobody left it out on purpose.

    Returns:
      What came of it, as `status` does.
    """
    module: ModuleType | None = None
    runtime = _runtime_ffi_api()
    try:
        module = _import_module()
        _check_ffi_api(module.ffi_api_version(), runtime)
        _register(module.registrations(), "cpu")
    except _UnavailableError as error:
        if not error.wanted:
            _warn(str(error))
        status = Status(available=False, reason=str(error), ffi_api_runtime=runtime)
    else:
        status = _with_cuda(Status(available=True, ffi_api_runtime=runtime), module)
    if module is None:
        return status
    return dataclasses.replace(status, ffi_api_built=module.ffi_api_version(), path=module.__file__)


def status() -> Status:
    """What came of loading the native module.

    Returns:
      Whether it is used, why not, the versions of the XLA FFI API, and its file. `str` of it is
      one line for people.

    Example:
      >>> from jax_ring import native
      >>> status = native.status()
      >>> status.available or status.reason != ""
      True
    """
    return load()


def platforms() -> frozenset[str]:
    """The platforms for which native code is registered: "cpu", "cuda" or both."""
    if not current().native:
        return frozenset()
    loaded = load()
    found = {"cpu": loaded.available, "cuda": loaded.cuda_path is not None}
    return frozenset(platform for platform, there in found.items() if there)


def copy(x: jax.typing.ArrayLike) -> jax.Array:
    """Copies an array through the native module, to see that it works.

    On CPU, if the native module is available, this is one custom call; everywhere else it is
    plain JAX. Inside `jax.shard_map` the result varies over the same axes as the operand. It maps
    under `jax.vmap`; the native call has no derivative.

    Args:
      x: an array of any shape and dtype.

    Returns:
      An array equal to it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ring import native
      >>> native.copy(jnp.arange(3))
      Array([0, 1, 2], dtype=int32)
    """
    x = jnp.asarray(x)
    if not (current().native and load().available):
        return jnp.copy(x)
    copied: jax.Array = jax.lax.platform_dependent(x, cpu=_native_copy, default=jnp.copy)
    return copied


def _native_copy(x: jax.Array) -> jax.Array:
    # `like` carries the manual axes that x varies over; a bare ShapeDtypeStruct would type the
    # result as replicated, without an error.
    result = jax.ShapeDtypeStruct.like(x)
    copied: jax.Array = jax.ffi.ffi_call("jax_ring_copy", result, vmap_method="broadcast_all")(x)
    return copied


def _import_module() -> ModuleType:
    if not settings.native:
        raise _UnavailableError("JAX_RING_NATIVE=0 is set", wanted=True)
    try:
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name == _MODULE:
            raise _why_missing() from None
        raise _UnavailableError(f"it does not import ({error})") from error
    except Exception as error:  # A module built for another machine may raise anything.
        raise _UnavailableError(f"it does not import ({type(error).__name__}: {error})") from error


def _why_missing() -> _UnavailableError:
    info = _build_info()
    if info is None:
        folder = pathlib.Path(__file__).parent
        return _UnavailableError(f"it was not built in {folder}, which is not an installed package")
    reason = info["reason"] or "its file is gone; reinstall jax-ring"
    return _UnavailableError(reason, wanted=info["skipped"] == "requested")


def _build_info() -> Mapping[str, Any] | None:
    # An editable install keeps what was built in another folder than the sources.
    for folder in sys.modules["jax_ring"].__path__:
        file = pathlib.Path(folder, "_build_info.json")
        if file.is_file():
            info: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return info
    return None


def _runtime_ffi_api() -> Version | None:
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return _parse_ffi_api(text)


def _parse_ffi_api(header: str) -> Version | None:
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header, re.MULTILINE))
    if len(found) != 2:
        return None
    return int(found["MAJOR"]), int(found["MINOR"])


def _check_ffi_api(built: Version, runtime: Version | None) -> None:
    """Raises if the runtime would refuse the handlers; it would say so only when one is called."""
    if runtime is None or (built[0] == runtime[0] and built[1] <= runtime[1]):
        return
    raise _UnavailableError(
        f"it was compiled against XLA FFI API {_text(built)}, but jaxlib {jaxlib_version} has "
        f"{_text(runtime)}; install a jaxlib whose API is {built[0]}.{built[1]} or a later "
        f"{built[0]}.x, or reinstall jax-ring from source"
    )


def _with_cuda(status: Status, module: ModuleType) -> Status:
    """Registers the handlers of the CUDA kernels, which lie beside the module if they were built.

    They are in a library of their own because one that nvcc made knows nothing of Python.
    """
    path = pathlib.Path(str(module.__file__)).with_name(_CUDA_LIBRARY)
    if not path.is_file():
        reason = (_build_info() or {}).get("cuda_reason") or f"{path} is gone; reinstall jax-ring"
        return dataclasses.replace(status, cuda_reason=reason)
    try:
        library = ctypes.CDLL(str(path))
        handlers = {
            name: jax.ffi.pycapsule(getattr(library, symbol))
            for name, symbol in _CUDA_HANDLERS.items()
        }
        _register(handlers, "CUDA")
    except (OSError, AttributeError, _UnavailableError) as error:
        reason = f"{path} does not load ({error})"
        _warn_of_cuda(reason)
        return dataclasses.replace(status, cuda_reason=reason)
    return dataclasses.replace(status, cuda_reason="", cuda_path=str(path))


def _register(registrations: Mapping[str, object], platform: str) -> None:
    for name, handler in registrations.items():
        try:
            jax.ffi.register_ffi_target(name, handler, platform=platform, api_version=_API_VERSION)
        except Exception as error:  # Importing jax_ring must not fail on what a jaxlib may raise.
            raise _UnavailableError(f"jaxlib refused its handler {name!r} ({error})") from error


def _warn(reason: str) -> None:
    warnings.warn(
        f"jax_ring runs without its native module: {reason}. Everything works, through plain JAX. "
        "To get it, install a C++ compiler (g++ 9, clang 10 or newer) and then jax-ring from "
        "source; to leave it out without this warning, set JAX_RING_NATIVE=0.",
        UserWarning,
        stacklevel=4,  # _warn, load, jax_ring/__init__.py, and then who imports jax_ring.
    )


def _warn_of_cuda(reason: str) -> None:
    warnings.warn(
        f"jax_ring runs without its CUDA kernels: {reason}. Everything works, through plain JAX.",
        UserWarning,
        stacklevel=5,  # _warn_of_cuda, _with_cuda, load, jax_ring/__init__.py, and who imports it.
    )


def _text(version: Version | None) -> str:
    return "unknown" if version is None else f"{version[0]}.{version[1]}"
