#!/usr/bin/env bash
# Builds and tests what the BUILD files describe where no module registry can be reached: with Debian's
# Bazel 4, rules and GoogleTest, and stand-ins (tools/bazel/offline) for rules that need a newer Bazel.
#
#   tools/bazel_offline.sh [PYTHON]
#
# PYTHON has jaxlib, whose headers are used, and nanobind; by default it is that of .venv. If that one
# lacks them, an environment is made from pyproject.toml's build requirements.
# Runs as root on Debian, where it installs missing packages. It leaves nothing else behind.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
# Bazel makes some of its folders read-only.
trap 'chmod -R u+w "$work" && rm -rf "$work"' EXIT

say() { printf '\n=== %s\n' "$*"; }

installed() { [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>&1) == installed ]]; }

install_packages() {
  local package missing=()
  for package in bazel-{bootstrap,platforms,rules-java,skylib} libgtest-dev; do
    installed "$package" || missing+=("$package")
  done
  python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
  if ((${#missing[@]})); then
    say "apt-get install ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null
    if ! apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null &>"$work/apt.log"; then
      cat "$work/apt.log" >&2
      return 1
    fi
  fi
}

has_headers() { "$1" -c 'import jaxlib, nanobind' &>/dev/null; }

# Sets `python` to the absolute path of a Python with jaxlib and nanobind.
find_python() {
  python=$(realpath --no-symlinks "${1:-.venv/bin/python}") # A resolved link would leave the environment.
  if has_headers "$python"; then return; fi
  if (($#)); then
    echo "$1 has no jaxlib or no nanobind" >&2
    return 1
  fi
  say "installing the build requirements"
  python3 -m venv "$work/venv"
  python=$work/venv/bin/python
  "$python" -c 'if True:
    import tomllib
    with open("pyproject.toml", "rb") as file:
        print(*tomllib.load(file)["build-system"]["requires"], sep="\n")' >"$work/requirements.txt"
  "$python" -m pip --disable-pip-version-check install --quiet --no-deps -r "$work/requirements.txt"
  has_headers "$python"
}

python_says() { "$python" -c "import nanobind, sysconfig; print($1)"; }

# Sets up the folders of the repositories that Bazel would download, and says so in bazelrc.
make_repositories() {
  local folder
  cp -r tools/bazel/offline "$work/repositories"
  ln -s "$(python_says 'nanobind.__path__[0]')" "$work/repositories/nanobind_bazel/nanobind"
  ln -s "$(python_says 'sysconfig.get_path("include")')" "$work/repositories/nanobind_bazel/python"
  for folder in "$work"/repositories/*; do
    touch "$folder/WORKSPACE.bazel"
    echo "common --override_repository=${folder##*/}=$folder"
  done >"$work/bazelrc"
  cat >>"$work/bazelrc" <<END
common --override_repository=bazel_skylib=/usr/share/bazel/tools/skylib
common --override_repository=platforms=/usr/share/bazel/tools/platforms
common --override_repository=rules_java=/usr/share/bazel/rules/java
common --noshow_progress --repo_env=JAX_RING_PYTHON=$python
build --compilation_mode=opt --force_pic --nosandbox_debug
build --per_file_copt=^cc/@-Wall,-Wextra,-Werror
test --test_output=errors
END
}

# Bazel 4 wants a WORKSPACE file: it gets one in a folder of its own, where the tree is linked.
make_workspace() {
  mkdir -p "$work/workspace/tools"
  ln -s "$PWD"/{.bazelignore,BUILD.bazel,LICENSE,cc,jax_ring} "$work/workspace"
  ln -s "$PWD/tools/bazel" "$work/workspace/tools"
  cat >"$work/workspace/WORKSPACE.bazel" <<'END'
workspace(name = "jax_ring")

load("//tools/bazel:xla_ffi.bzl", "xla_ffi")

xla_ffi(name = "xla_ffi")
END
}

# --batch: no server stays behind.
bazel_offline() (
  cd "$work/workspace"
  bazel --batch --nohome_rc --bazelrc="$work/bazelrc" --output_user_root="$work/bazel" "$@"
)

# A source that no target names would be missed by nobody here. CUDA's are built by CMake alone.
check_sources() {
  local there named
  there=$(find cc -name '*.cc' -o -name '*.h' -o -name '*.inc' | grep --invert-match cuda | LC_ALL=C sort)
  if ! named=$(bazel_offline query 'kind("source file", deps(//..., 1))' 2>"$work/query.log"); then
    cat "$work/query.log" >&2
    return 1
  fi
  named=$(sed -n 's|:|/|; s|^//\(cc/.*\)|\1|p' <<<"$named" | LC_ALL=C sort)
  diff --label 'files in cc/' --label 'named by a BUILD file' -u <(echo "$there") <(echo "$named")
}

check_module() {
  "$python" - "$1" <<'END'
import importlib.machinery
import importlib.util
import sys

loader = importlib.machinery.ExtensionFileLoader("_native", sys.argv[1])
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_native", loader))
loader.exec_module(module)
handlers = sorted(module.registrations())
if not handlers:
    sys.exit("it hands over no handler")
print("XLA FFI API", *module.ffi_api_version(), "with", *handlers)
END
}

install_packages
find_python "$@"
make_repositories
make_workspace

say "Bazel $(dpkg-query --show --showformat='${Version}' bazel-bootstrap), headers of $python"
check_sources
bazel_offline test //...

say "the native module that Bazel built"
check_module "$work/workspace/bazel-bin/jax_ring/_native.so"
say "Bazel: passed"
