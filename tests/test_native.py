"""The native module: its handler, and what happens where it is missing or does not fit."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import native

DTYPES = [
    *("bool", "int2", "uint4", "int8", "uint16", "int32"),
    *("float8_e4m3fn", "bfloat16", "float16", "float32", "complex64"),
]

built = pytest.mark.skipif(not native.status().available, reason=str(native.status()))


def mesh(axis_type: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((8,), ("x",), axis_types=(axis_type,))


def compiled_text(function, *operands) -> str:
    return jax.jit(function).lower(*operands).compile().as_text()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter that imports the jax_ring that is tested here."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_is_built_where_a_compiler_is():
    # All other tests here skip without it, so that must not happen unseen.
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    assert native.status().available, str(native.status())


@built
def test_status_names_the_file_and_both_versions():
    status = native.status()
    assert status is native.load()
    assert status.reason == ""
    assert status.ffi_api_built is not None
    assert status.ffi_api_runtime is not None
    assert status.path is not None
    assert pathlib.Path(status.path).is_file()
    assert status.ffi_api_built <= status.ffi_api_runtime
    for version in (status.ffi_api_built, status.ffi_api_runtime):
        assert f"{version[0]}.{version[1]}" in str(status)
    assert status.path in str(status)


# The handler.


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (2, 0, 3)])
def test_copy_is_bitwise(dtype, shape):
    numbers = np.random.default_rng(0).integers(0, 2, shape)
    x = jnp.asarray(numbers, dtype)
    copied = native.copy(x)
    assert copied.dtype == x.dtype
    assert copied.shape == shape
    np.testing.assert_array_equal(np.asarray(copied), np.asarray(x))


@built
def test_copy_is_one_custom_call():
    text = compiled_text(native.copy, jnp.ones((3, 5)))
    assert text.count('custom_call_target="jax_ring_copy"') == 1
    assert "conditional" not in text


@built
def test_copy_keeps_nan_payloads_and_signed_zeros():
    bits = jnp.array([0x80000000, 0x7FC00123, 0xFFC00001, 0x00000001], jnp.uint32)
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    copied = jax.lax.bitcast_convert_type(native.copy(x), jnp.uint32)
    np.testing.assert_array_equal(copied, bits)


@built
def test_a_donated_operand_may_be_the_result():
    copied = jax.jit(native.copy, donate_argnums=0)(jnp.arange(1000.0) + 1)
    np.testing.assert_array_equal(copied, np.arange(1000.0) + 1)


@built
def test_vmap_is_one_call_for_the_whole_batch():
    x = jnp.arange(24.0).reshape(4, 2, 3)
    np.testing.assert_array_equal(jax.vmap(native.copy)(x), x)
    text = compiled_text(jax.vmap(native.copy), x)
    assert text.count('custom_call_target="jax_ring_copy"') == 1
    assert " while(" not in text


@built
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_result_varies_where_the_operand_does(axis_type):
    x = np.arange(16.0, dtype=np.float32)
    with jax.set_mesh(mesh(axis_type)):
        copied = jax.jit(jax.shard_map(native.copy, in_specs=P("x"), out_specs=P("x")))
        sharded = jax.device_put(x, P("x"))
        np.testing.assert_array_equal(copied(sharded), x)
        assert "jax_ring_copy" in copied.lower(sharded).compile().as_text()
        # Typed as replicated, this would pass, and give one device's values for all.
        replicated = jax.shard_map(native.copy, in_specs=P("x"), out_specs=P(), check_vma=True)
        with pytest.raises(ValueError, match="replication"):
            jax.jit(replicated)(sharded)
        # A sum must count every device.
        total = jax.shard_map(
            lambda v: jax.lax.psum(native.copy(v), "x"), in_specs=P("x"), out_specs=P()
        )
        np.testing.assert_array_equal(jax.jit(total)(sharded), x.reshape(8, 2).sum(0))


@built
def test_a_thousand_calls_from_eight_devices():
    def body(v):
        return jax.lax.fori_loop(0, 125, lambda _, c: native.copy(c + 1), v)

    looped = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=P("x"), out_specs=P("x")))
    np.testing.assert_array_equal(looped(jnp.zeros(8 * 100)), np.full(800, 125.0))


@built
@pytest.mark.parametrize(
    ("shape", "dtype", "numbers"),
    [
        ((3, 2), "float32", r"shape \[2,3\], the result \[3,2\]"),
        ((6,), "float32", r"shape \[2,3\], the result \[6\]"),
        ((), "float32", r"shape \[2,3\], the result \[\]"),
        ((2, 3), "int32", "dtype F32, the result S32"),
        ((2, 3), "bfloat16", "dtype F32, the result BF16"),
    ],
)
def test_a_mismatch_is_an_invalid_argument_with_both_values(shape, dtype, numbers):
    call = jax.ffi.ffi_call("jax_ring_copy", jax.ShapeDtypeStruct(shape, dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"INVALID_ARGUMENT.*{numbers}"):
        jax.block_until_ready(jax.jit(call)(jnp.ones((2, 3))))


def test_config_switches_it_off():
    with jax_ring.config(native=False):
        x = jnp.arange(3.0)
        assert "jax_ring_copy" not in compiled_text(lambda v: native.copy(v), x)
        np.testing.assert_array_equal(native.copy(x), x)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_run_through_plain_jax(platform):
    traced = jax.jit(native.copy).trace(jnp.ones(3))
    assert "jax_ring_copy" not in traced.lower(lowering_platforms=(platform,)).as_text()


# Loading.


@pytest.fixture
def registered(monkeypatch) -> list[tuple]:
    """The calls of register_ffi_target, which do nothing."""
    calls: list[tuple] = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: calls.append((a, k)))
    return calls


def test_handlers_are_registered_as_typed_ones(registered):
    calls = registered
    native._register({"one": "capsule 1", "two": "capsule 2"}, "cpu")
    assert calls == [
        (("one", "capsule 1"), {"platform": "cpu", "api_version": 1}),
        (("two", "capsule 2"), {"platform": "cpu", "api_version": 1}),
    ]


def test_the_runtimes_ffi_api_is_read_from_jaxlibs_header():
    assert native._parse_ffi_api("#define XLA_FFI_API_MAJOR 1\n\n#define XLA_FFI_API_MINOR 12") == (
        1,
        12,
    )
    assert native._parse_ffi_api("#define XLA_FFI_API_MAJOR 1") is None
    runtime = native._runtime_ffi_api()
    assert runtime is not None
    assert runtime >= (0, 3)


@pytest.mark.parametrize(
    ("built_with", "runtime"), [((0, 3), (0, 3)), ((0, 3), (0, 5)), ((0, 3), None)]
)
def test_an_ffi_api_that_fits(built_with, runtime):
    native._check_ffi_api(built_with, runtime)


@pytest.mark.parametrize(("built_with", "runtime"), [((0, 9), (0, 3)), ((0, 3), (1, 3))])
def test_an_ffi_api_that_does_not_fit_is_named(built_with, runtime):
    numbers = [rf"{major}\.{minor}" for major, minor in (built_with, runtime)]
    with pytest.raises(native._UnavailableError, match=".*".join(numbers)) as caught:
        native._check_ffi_api(built_with, runtime)
    assert not caught.value.wanted
    assert re.search("install a jaxlib.*or reinstall jax-ring", str(caught.value))


@built
def test_a_module_newer_than_jaxlib_is_left_out_with_one_warning(monkeypatch):
    monkeypatch.setattr(native, "_runtime_ffi_api", lambda: (0, 1))
    monkeypatch.setattr(native, "_register", lambda *_: pytest.fail("registered all the same"))
    with pytest.warns(UserWarning, match="XLA FFI API 0.3, but jaxlib .* has 0.1;") as warned:
        status = native.load.__wrapped__()
    assert len(warned) == 1
    assert not status.available
    assert (status.ffi_api_built, status.ffi_api_runtime) == ((0, 3), (0, 1))
    assert status.reason in str(status)


@pytest.mark.parametrize("error", [ImportError("undefined symbol"), OSError("no"), SystemError()])
def test_a_module_that_does_not_import_stops_nothing(monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(native.importlib, "import_module", fail)
    with pytest.warns(UserWarning, match="does not import") as warned:
        status = native.load.__wrapped__()
    assert len(warned) == 1
    assert not status.available
    assert type(error).__name__ in status.reason


def test_a_handler_that_jaxlib_refuses_stops_nothing(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("duplicate")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", fail)
    with pytest.raises(native._UnavailableError, match=r"refused its handler 'one' \(duplicate\)"):
        native._register({"one": object()}, "cpu")


# The CUDA kernels.


def with_cuda(folder: pathlib.Path) -> native.Status:
    """The status of a native module in a folder."""
    module = types.SimpleNamespace(__file__=str(folder / "_native.so"))
    return native._with_cuda(native.Status(available=True), module)


@built
def test_handlers_of_the_cuda_library_are_registered(registered, tmp_path):
    source, library = tmp_path / "handlers.cc", tmp_path / "libjax_ring_cuda.so"
    symbols = native._CUDA_HANDLERS.values()
    source.write_text("".join(f'extern "C" void {symbol}() {{}}\n' for symbol in symbols))
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    status = with_cuda(tmp_path)
    assert (status.cuda_path, status.cuda_reason) == (str(library), "")
    assert str(library) in str(status)
    assert [arguments[0] for arguments, _ in registered] == list(native._CUDA_HANDLERS)
    assert {how["platform"] for _, how in registered} == {"CUDA"}


def test_a_cuda_library_that_does_not_load_stops_nothing(tmp_path):
    (tmp_path / "libjax_ring_cuda.so").write_text("no library")
    with pytest.warns(UserWarning, match="without its CUDA kernels: .* does not load") as warned:
        status = with_cuda(tmp_path)
    assert len(warned) == 1
    assert status.available
    assert status.cuda_path is None
    assert status.cuda_reason in str(status)


def test_why_there_are_no_cuda_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_build_info", lambda: {"cuda_reason": "no working nvcc"})
    assert with_cuda(tmp_path).cuda_reason == "no working nvcc"
    monkeypatch.setattr(native, "_build_info", lambda: {"cuda_reason": None})
    assert "libjax_ring_cuda.so is gone; reinstall" in with_cuda(tmp_path).cuda_reason


@pytest.mark.parametrize(
    ("info", "reason", "wanted"),
    [
        (None, "was not built in .*jax_ring, which is not an installed package", False),
        ({"reason": "no working C++", "skipped": None}, r"no working C\+\+", False),
        ({"reason": "its compilation", "skipped": "failed"}, "its compilation", False),
        ({"reason": "JAX_RING_NATIVE=0", "skipped": "requested"}, "JAX_RING_NATIVE=0", True),
        ({"reason": None, "skipped": None}, "its file is gone", False),
    ],
)
def test_why_it_is_missing(monkeypatch, info, reason, wanted):
    monkeypatch.setattr(native, "_build_info", lambda: info)
    error = native._why_missing()
    assert re.search(reason, str(error))
    assert error.wanted is wanted


MISSING = """
    import sys, warnings
    sys.modules["jax_ring._native"] = None  # What import finds where there is none.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        import jax_ring
        from jax_ring import native
        native.load(), native.status()
    ours = [w for w in warned if "jax_ring" in str(w.message)]
    for w in ours:
        print(w.category.__name__, w.filename, w.message)
    import jax.numpy as jnp
    print(len(ours), native.status().available, native.copy(jnp.arange(3)))
"""


def test_importing_without_it_warns_once_and_works():
    done = run_python(MISSING)
    assert done.returncode == 0, done.stderr
    warning, result = done.stdout.splitlines()
    # The warning points at the line that imports jax_ring.
    assert warning.startswith("UserWarning <string> jax_ring runs without its native module: ")
    assert "through plain JAX" in warning
    assert "install a C++ compiler" in warning
    assert result == "1 False [0 1 2]"


def test_importing_without_it_on_purpose_is_silent():
    done = run_python(MISSING, JAX_RING_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 False [0 1 2]\n"


def test_importing_starts_no_backend():
    done = run_python(
        """
        import jax_ring
        from jax._src import xla_bridge
        print(xla_bridge.backends_are_initialized())
        """
    )
    assert done.stdout == "False\n", done.stderr


def test_the_module_is_found_once():
    # Two jax_ring folders on the path (sources and install) must not be two packages.
    spec = importlib.util.find_spec("jax_ring")
    assert spec is not None
    assert spec.origin == jax_ring.__file__
