"""What is built and shipped: tags, contents, and installs where something is missing."""

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import zipfile

import jax
import pytest

import jax_ring
from jax_ring import native

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STABLE_ABI = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
FFI_API_OF_OLDEST_JAXLIB = (0, 3)  # XLA_FFI_API_MAJOR and MINOR in jaxlib 0.10.2.

built = pytest.mark.skipif(not native.status().available, reason=str(native.status()))


def module_file() -> pathlib.Path:
    path = native.status().path
    assert path is not None
    return pathlib.Path(path)


def installed() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("jax-ring")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jax-ring is not installed")


def tag_and_suffix() -> tuple[str, str]:
    """The start of the wheel's tag, and the module's suffix that this interpreter calls for."""
    if STABLE_ABI:
        return "cp312-abi3-", ".abi3.so" if os.name == "posix" else ".pyd"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}", importlib.machinery.EXTENSION_SUFFIXES[0]


# The build that these tests run on.


def test_the_version_has_one_place():
    assert installed().version == jax_ring.__version__
    assert "version" in PROJECT["project"]["dynamic"]


def test_headers_are_those_of_the_oldest_supported_jaxlib():
    required = PROJECT["build-system"]["requires"]
    pinned = [r.split(";")[0] for r in required if r.startswith("jaxlib==")]
    oldest = [d for d in PROJECT["project"]["dependencies"] if d.startswith("jax>=")]
    assert len(pinned) == len(oldest) == 1
    assert pinned[0].removeprefix("jaxlib==") == oldest[0].removeprefix("jax>=")


@built
def test_it_was_compiled_against_the_oldest_ffi_api():
    installed()
    assert native.status().ffi_api_built == FFI_API_OF_OLDEST_JAXLIB
    if jax.__version__ == "0.10.2":
        assert native.status().ffi_api_runtime == FFI_API_OF_OLDEST_JAXLIB
    info = native._build_info()
    assert info is not None
    assert info["native"] is True
    assert tuple(info["ffi_api_version"]) == FFI_API_OF_OLDEST_JAXLIB
    assert re.fullmatch(r"\w+ \d+(\.\d+)+", info["compiler"])


@built
def test_the_modules_suffix_is_what_the_wheel_claims():
    tag, suffix = tag_and_suffix()
    assert module_file().name == "_native" + suffix
    wheel = installed().read_text("WHEEL")
    assert wheel is not None
    assert re.search(rf"^Tag: {tag}", wheel, re.MULTILINE)


@built
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's ldd")
def test_it_links_the_system_alone():
    # Nothing of jaxlib (there is no ABI promise between wheels), Python, nanobind or CUDA.
    system = {"linux-vdso", "ld-linux", "libc", "libm", "libdl", "librt", "libpthread"}
    system |= {"libstdc++", "libgcc_s"}
    linked = subprocess.run(
        ["ldd", module_file()], capture_output=True, text=True, check=True
    ).stdout
    names = {pathlib.Path(line.split()[0]).name for line in linked.splitlines()}
    found = {re.split(r"\.so|-x86|-aarch64", name)[0] for name in names}
    assert "libc" in found
    assert found <= system


@built
def test_the_native_module_is_in_the_environment_not_in_the_sources():
    assert not list((ROOT / "jax_ring").glob("_native*.so"))
    assert not (ROOT / "jax_ring" / "_build_info.json").exists()


def test_the_marker_of_typed_packages_is_found():
    assert any(pathlib.Path(folder, "py.typed").is_file() for folder in jax_ring.__path__)


# Configuring alone: what is missing becomes the reason, and never an error.

needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")


def configure(
    folder: pathlib.Path, *options: str, **environment: str
) -> tuple[dict[str, object], str]:
    """Runs CMake alone.

    Returns:
      _build_info.json, and what CMake printed.
    """
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    printed = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, printed
    return json.loads((folder / "_build_info.json").read_text()), printed


def script(path: pathlib.Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


@needs_cmake
@pytest.mark.slow
def test_no_compiler_names_the_minimum(tmp_path):
    info, printed = configure(tmp_path, CXX="/nonexistent/c++")
    assert info["native"] is False
    assert re.search(r"no working C\+\+ compiler .* g\+\+ 9, clang 10", str(info["reason"]))
    assert "CMake Warning at CMakeLists.txt" in printed
    assert str(info["reason"]) in printed


@needs_cmake
@pytest.mark.slow
def test_a_broken_compiler_is_as_good_as_none(tmp_path):
    info, _ = configure(tmp_path / "build", CXX=script(tmp_path / "c++", "exit 1"))
    assert str(info["reason"]).startswith("no working C++ compiler")


@needs_cmake
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_an_old_compiler_is_named_with_the_minimum(tmp_path):
    old = script(tmp_path / "c++", 'exec g++ -U__GNUC__ -D__GNUC__=7 "$@"')
    info, _ = configure(tmp_path / "build", CXX=old)
    assert info["native"] is False
    assert re.search(r"too old: GNU 7\..* g\+\+ 9, clang 10", str(info["reason"]))


@needs_cmake
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_compiler_that_fails_on_xlas_headers_is_found_out_early(tmp_path):
    header = tmp_path / "include" / "xla" / "ffi" / "api" / "ffi.h"
    header.parent.mkdir(parents=True)
    header.write_text('#include "c_api.h"\n#error "not with this compiler"\n')
    header.with_name("c_api.h").write_text(
        "#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 3\n"
    )
    info, printed = configure(
        tmp_path / "build", f"-DJAX_RING_FFI_INCLUDE={tmp_path / 'include'}", CXX="g++"
    )
    assert "cannot compile XLA's headers" in str(info["reason"])
    assert info["ffi_api_version"] == [0, 3]
    assert "not with this compiler" in printed


@needs_cmake
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_missing_headers_are_named(tmp_path):
    info, _ = configure(tmp_path, "-DJAX_RING_FFI_INCLUDE=/nonexistent", CXX="g++")
    assert "xla/ffi/api/ffi.h was not found" in str(info["reason"])


@needs_cmake
@pytest.mark.slow
def test_the_native_module_can_be_required(tmp_path):
    with pytest.raises(AssertionError, match="cannot be built: no working C"):
        configure(tmp_path, "-DJAX_RING_REQUIRE_NATIVE=ON", CXX="/nonexistent/c++")


@needs_cmake
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_broken_cuda_does_not_matter(tmp_path):
    # The PATH holds no nvcc, and CUDA_HOME leads nowhere.
    info, _ = configure(tmp_path, CXX="g++", CUDA_HOME="/nonexistent", CUDACXX="/nonexistent/nvcc")
    assert info["native"] is True


# Whole wheels.

PIP_WHEEL = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
PIP_WHEEL += ["--no-build-isolation", "--no-deps", "--no-cache-dir"]

needs_backend = pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None, reason="no scikit-build-core"
)


def build_wheel(
    source: pathlib.Path, folder: pathlib.Path, environment: dict[str, str] | None = None
) -> zipfile.ZipFile:
    """Builds a wheel as `pip install` would, but with what is installed here."""
    done = subprocess.run(
        [*PIP_WHEEL, "-w", folder, source],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def install(wheel: zipfile.ZipFile, folder: pathlib.Path) -> pathlib.Path:
    """Makes an environment with the wheel and everything that is installed here.

    Returns:
      Its Python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    wheel.extractall(packages)
    # A path in a .pth file adds the folder, but runs none of its .pth files: an editable install
    # of jax_ring in it stays out.
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


def without_compiler() -> dict[str, str]:
    """An environment whose PATH holds this Python's programs alone."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "PYTHONPATH")}
    environment["PATH"] = str(pathlib.Path(sys.executable).parent)
    for compiler in ("c++", "g++", "gcc", "clang++"):
        assert shutil.which(compiler, path=environment["PATH"]) is None
    return environment


USE = """
    import warnings
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        import jax_ring
        from jax_ring import native
    import jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    total = jax.shard_map(
        lambda v: jax_ring.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    print(jax_ring.__file__)
    print(jax.jit(total)(jnp.arange(16.0)), native.copy(jnp.arange(3)), native.status().available)
    for w in warned:
        print(w.message)
"""


def use(python: pathlib.Path) -> list[str]:
    """Imports jax_ring and sums over 8 devices; checks that the environment's own was used.

    Returns:
      What was printed: the results, then the warnings.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", textwrap.dedent(USE)],
        env=environment,
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    file, *printed = done.stdout.splitlines()
    assert pathlib.Path(file).is_relative_to(python.parent.parent)
    return printed


@needs_backend
@pytest.mark.slow
def test_without_a_compiler_it_installs_and_works(tmp_path):
    wheel = build_wheel(ROOT, tmp_path / "wheel", without_compiler())
    result, warning = use(install(wheel, tmp_path / "environment"))
    assert result == "[56. 64.] [0 1 2] False"
    assert re.search(r"no working C\+\+ compiler was found; .*g\+\+ 9", warning)


@needs_backend
@pytest.mark.slow
@built
def test_a_wheel_holds_what_its_tag_says(tmp_path):
    wheel = build_wheel(ROOT, tmp_path / "wheel")
    tag, suffix = tag_and_suffix()
    assert f"-{tag}" in pathlib.Path(wheel.filename or "").name
    names = set(wheel.namelist())
    modules = {name for name in names if name.startswith("jax_ring/_native.")}
    assert modules == {f"jax_ring/_native{suffix}", "jax_ring/_native.pyi"}
    assert {"jax_ring/py.typed", "jax_ring/_build_info.json", "jax_ring/__init__.py"} <= names
    # Nothing but the package: no cc/, tests/ or examples/.
    assert {name.split("/")[0].split("-")[0] for name in names} == {"jax_ring"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert use(install(wheel, tmp_path / "environment")) == ["[56. 64.] [0 1 2] True"]


@needs_backend
@pytest.mark.slow
def test_leaving_it_out_gives_a_wheel_for_everyone(tmp_path):
    wheel = build_wheel(ROOT, tmp_path / "wheel", os.environ | {"JAX_RING_NATIVE": "0"})
    assert pathlib.Path(wheel.filename or "").name.endswith("-py3-none-any.whl")
    info = json.loads(wheel.read("jax_ring/_build_info.json"))
    assert info["skipped"] == "requested"
    assert not any(name.endswith((".so", ".pyd")) for name in wheel.namelist())
    assert use(install(wheel, tmp_path / "environment")) == ["[56. 64.] [0 1 2] False"]


@needs_backend
@pytest.mark.slow
@built
def test_a_compilation_that_fails_gives_a_wheel_without_it(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jax_ring", "cc", "cmake"):
        shutil.copytree(ROOT / name, source / name)
    (source / "cc" / "module.cc").write_text('#error "broken"\n')
    wheel = build_wheel(source, tmp_path / "wheel")
    assert pathlib.Path(wheel.filename or "").name.endswith("-py3-none-any.whl")
    info = json.loads(wheel.read("jax_ring/_build_info.json"))
    assert info["native"] is False
    assert info["skipped"] == "failed"
    assert "compilation failed" in info["reason"]
