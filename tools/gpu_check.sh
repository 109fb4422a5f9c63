#!/bin/bash
# Builds the CUDA kernels for the GPU that is here, tests and times them. Some minutes; needs no network.
#
#   tools/gpu_check.sh [--build-only]
#
# Needs nvcc, g++, and a Python ($PYTHON, by default python3) with jax[cuda], nanobind and pytest. Installs
# jax_ring into that Python, in editable mode; where that fails (for want of scikit-build-core or CMake, say),
# it links what it needs into the source tree. Logs and figures go to $OUT, by default build/gpu_check. Each
# part runs even if one before it failed; the exit status is that of all. compute-sanitizer is used where it
# is found and takes the GPU.
# shellcheck disable=SC2329  # Functions are handed to part, by way of bash -c.
set -uo pipefail

cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
out=${OUT:-build/gpu_check}
mkdir -p "$out"
out=$(cd "$out" && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

build_only=0
case ${1:-} in
  "") ;;
  --build-only) build_only=1 ;;
  *) echo "usage: $0 [--build-only]" >&2; exit 2 ;;
esac

command -v nvcc > /dev/null || { echo "gpu_check: no nvcc in PATH" >&2; exit 2; }
if capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1) \
  && [ -n "$capability" ]; then
  nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader
elif [ $build_only = 1 ]; then
  capability=9.0
  echo "no GPU here: building for compute capability $capability"
else
  echo "gpu_check: no GPU here (nvidia-smi shows none); --build-only builds all the same" >&2
  exit 2
fi
architecture=${capability/./}

results=()
failed=0

# part <name> <seconds> <command ...>: runs it, with its output in a log and its end on the screen.
part() {
  local name=$1 limit=$2 start=$SECONDS status
  shift 2
  echo "--- $name"
  timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1
  status=$?
  record "$name" $status $((SECONDS - start))
}

record() {
  local verdict=ok
  if [ "$2" != 0 ]; then
    verdict="FAILED (status $2)"
    failed=1
  fi
  tail -n "$([ "$2" = 0 ] && echo 5 || echo 60)" "$out/$1.log"
  results+=("$(printf '%-12s %4d s  %s' "$1" "$3" "$verdict")")
}

# The driver and the benchmark, from the same objects.
compile() {
  local flags=(-std=c++17 -O3 -fmad=false "-arch=sm_$architecture" -Icc -Xcompiler -fPIC
               -Xcompiler -ffp-contract=off)
  local source sources=(cc/chunk_reduce_cuda_*.cu cc/tests/chunk_reduce_cuda_*.cu
                        cc/chunk_reduce_cpu.cc cc/chunk_reduce_cpu_baseline.cc)
  local jobs=() job
  for source in "${sources[@]}"; do
    nvcc "${flags[@]}" -c "$source" -o "$build/$(basename "$source").o" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || return 1; done
  nvcc "-arch=sm_$architecture" -o "$build/driver" "$build"/chunk_reduce_cuda_{blocks,elementwise,driver}.cu.o \
    "$build"/chunk_reduce_cpu*.o || return 1
  nvcc "-arch=sm_$architecture" -o "$build/benchmark" \
    "$build"/chunk_reduce_cuda_{blocks,elementwise,benchmark}.cu.o
}

install() {
  export JAX_RING_CUDA=1 SKBUILD_CMAKE_DEFINE="JAX_RING_CUDA_ARCHITECTURES=$architecture-real"
  "$python" -m pip install --no-build-isolation --no-deps --no-index -v -e . && built && return
  echo "gpu_check: not through pip; linking into the source tree"
  "$python" -m pip uninstall --yes jax-ring
  link
}

# Whether there are CUDA kernels: an install without them does not fail.
built() {
  "$python" -c 'from jax_ring import native; s = native.status(); print(s); exit(s.cuda_path is None)'
}

# Without pip and CMake: the native module, and the CUDA kernels from the objects of `compile`.
link() {
  until [ -e "$build/compile.rc" ]; do sleep 1; done
  local ffi nanobind python_include suffix flags
  read -r ffi nanobind python_include suffix < <("$python" -c '
import sysconfig, jax.ffi, nanobind, pathlib
print(jax.ffi.include_dir(), pathlib.Path(nanobind.__file__).parent, sysconfig.get_path("include"),
      sysconfig.get_config_var("EXT_SUFFIX"))')
  flags=(-std=c++17 -O2 -fPIC -shared -fvisibility=hidden -fno-strict-aliasing -ffp-contract=off -DNDEBUG
         -Icc -isystem "$ffi")
  g++ "${flags[@]}" -isystem "$python_include" -isystem "$nanobind/include" \
    -isystem "$nanobind/ext/robin_map/include" -o "jax_ring/_native$suffix" "$nanobind/src/nb_combined.cpp" \
    cc/{module,copy_ffi,room_ffi,chunk_reduce_ffi,chunk_reduce_cpu,chunk_reduce_cpu_baseline}.cc &
  nvcc "-arch=sm_$architecture" -std=c++17 -O2 -shared -Icc -Xcompiler -fPIC -isystem "$ffi" \
    -Xlinker "--version-script=cc/chunk_reduce_cuda.map" -o jax_ring/libjax_ring_cuda.so \
    cc/chunk_reduce_cuda_ffi.cc "$build"/chunk_reduce_cuda_{blocks,elementwise}.cu.o \
    && wait $! && built
}

loaded() {
  "$python" - << 'END'
import jax
from jax_ring import native

print(jax.devices(), native.status())
assert jax.default_backend() == "gpu", jax.default_backend()
assert "cuda" in native.platforms(), native.platforms()
END
}

export -f compile install built link loaded
export python build architecture
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false

# Side by side: there are more processors than either uses.
(timeout 300 bash -c compile > "$out/compile.log" 2>&1; echo $? > "$build/compile.rc") &
compiling=$!
start=$SECONDS
part install 400 bash -c install
wait $compiling
record compile "$(cat "$build/compile.rc")" $((SECONDS - start))

if [ $build_only = 0 ]; then
  part loaded 60 bash -c loaded
  part driver 120 "$build/driver" 100001
  workers=()
  "$python" -c 'import xdist' 2> /dev/null && workers=(-n 4)
  part pytest 200 "$python" -m pytest tests/gpu -m gpu -q -rs -p no:cacheprovider "${workers[@]}"
  part benchmark 90 "$python" benchmarks/gpu_kernels.py "$build/benchmark" --json "$out/gpu_kernels.json"
  cat "$out/benchmark.log"
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)
  if [ -z "$sanitizer" ]; then
    results+=("memcheck, racecheck: not run, there is no compute-sanitizer")
  elif ! "$sanitizer" "$build/driver" 1 10000 > "$out/sanitizer.log" 2>&1 \
    && grep -qi "not supported" "$out/sanitizer.log"; then
    results+=("memcheck, racecheck: not run, compute-sanitizer does not support this device")
  else
    # Every 97th case: 97 has no factor in common with how the cases are ordered, so all kinds are among them.
    part memcheck 100 "$sanitizer" --tool memcheck --error-exitcode 1 "$build/driver" 20001 97
    part racecheck 60 "$sanitizer" --tool racecheck --error-exitcode 1 "$build/driver" 20001 97
  fi
fi

echo "=== gpu_check for compute capability $capability"
printf '%s\n' "${results[@]}"
exit $failed
