"""What the Bazel files promise and no build here proves: modules are resolved only elsewhere."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BAZEL = ROOT / "tools" / "bazel"
BUILD_FILES = [ROOT / "BUILD.bazel", *sorted((ROOT / "cc").rglob("BUILD.bazel"))]
STARLARK = [*BUILD_FILES, BAZEL / "BUILD.bazel", *sorted(BAZEL.glob("*.bzl"))]
# The compilers' defaults differ, so CMake asks for C++17 in its own way.
STANDARD = {"-std=c++17"}

pytestmark = pytest.mark.skipif(not BAZEL.is_dir(), reason="not in a checkout")


def strings(file: pathlib.Path) -> set[str]:
    # What these files use of Starlark is Python's syntax.
    tree = ast.parse(file.read_text(), filename=str(file))
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def module_calls(function: str) -> list[ast.Call]:
    tree = ast.parse((ROOT / "MODULE.bazel").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == function]


def keywords(call: ast.Call) -> dict[str, object]:
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}


def modules() -> dict[str, dict[str, object]]:
    return {str(dep["name"]): dep for dep in map(keywords, module_calls("bazel_dep"))}


def test_every_repository_that_is_used_is_declared_and_the_other_way_round():
    used = {
        name for file in STARLARK for text in strings(file) for name in re.findall(r"@(\w+)", text)
    }
    others = {ast.literal_eval(arg) for call in module_calls("use_repo") for arg in call.args[1:]}
    assert used == modules().keys() | others


def test_modules_are_pinned_and_only_tests_need_googletest():
    assert all(re.match(r"\d+\.\d+", str(dep.get("version"))) for dep in modules().values())
    assert {name for name, dep in modules().items() if dep.get("dev_dependency")} == {"googletest"}
    for file in (ROOT / "BUILD.bazel", ROOT / "cc" / "BUILD.bazel"):
        assert not any(text.startswith("@googletest") for text in strings(file))


def test_every_module_has_a_stand_in_for_the_build_without_a_registry():
    stand_ins = {folder.name for folder in (BAZEL / "offline").iterdir()}
    script = (ROOT / "tools" / "bazel_offline.sh").read_text()
    from_debian = set(re.findall(r"--override_repository=(\w+)=/usr", script))
    assert modules().keys() <= stand_ins | from_debian


def test_bazel_and_cmake_give_the_kernels_the_same_flags():
    cmake = re.sub(r"#.*", "", (ROOT / "cc" / "chunk_reduce.cmake").read_text())
    bazel = strings(BAZEL / "copts.bzl") | strings(ROOT / "cc" / "BUILD.bazel")
    in_bazel = {text for text in bazel if text.startswith("-")}
    in_cmake = set(re.findall(r"(?<![\w-])-[A-Za-z][\w=-]*", cmake))
    assert "-ffp-contract=off" in in_cmake
    assert in_bazel - STANDARD == in_cmake
