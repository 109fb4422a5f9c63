#!/bin/sh
# Builds the C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer, and again with
# ThreadSanitizer, and runs them. Each finding is an error.
#
#   tools/sanitize.sh PYTHON    a Python that has jaxlib, for XLA's headers, and may have cmake
set -eu

python=${1:?usage: tools/sanitize.sh PYTHON}
root=$(cd "$(dirname "$0")/.." && pwd)
PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH
include=$("$python" -c '
import importlib.util as u, pathlib as p
print(p.Path(next(iter(u.find_spec("jaxlib").submodule_search_locations)), "include"))')

check() {  # The sanitizers, what to build, and which tests to run.
  build=$root/build/sanitize-$(echo "$1" | tr , -)
  cmake -S "$root/cc/tests" -B "$build" -DJAX_RING_SANITIZE="$1" -DJAX_RING_FFI_INCLUDE="$include"
  cmake --build "$build" --parallel 2 --target "$2"
  ctest --test-dir "$build" --output-on-failure -R "$3"
}

export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1
check address,undefined all .
check thread chunk_reduce_ffi_test chunk_reduce_ffi_test  # The only one with threads.
