#!/bin/bash
# Compiles the CUDA kernels for each architecture and prints the registers, stack and spills of each.
# Fails if one spills or has a stack: what a kernel holds in registers it must not send through memory.
#
#   tools/kernel_report.sh [architecture ...]      by default 80 90 100
set -euo pipefail

cc=$(cd "$(dirname "$0")/../cc" && pwd)
architectures=("$@")
if [ ${#architectures[@]} = 0 ]; then architectures=(80 90 100); fi
command -v nvcc > /dev/null || { echo "kernel_report: no nvcc in PATH" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for architecture in "${architectures[@]}"; do
  for source in "$cc"/*.cu; do
    # As cmake/JaxRingCuda.cmake has it.
    nvcc -std=c++17 -O3 -fmad=false -arch="sm_$architecture" -cubin -Xptxas -v \
      -o "$work/cubin" "$source" 2>> "$work/log" || { cat "$work/log" >&2; exit 2; }
  done
done

# ptxas says of each kernel, on lines of their own: its name, its stack and spills, its registers.
c++filt < "$work/log" | awk '
  /Compiling entry function/ {
    name = $0
    sub(/.*Compiling entry function \047/, "", name)
    sub(/\047 for \047sm_.*/, "", name)
    gsub(/jax_ring::|cuda::|\(anonymous namespace\)::|^void /, "", name)
    sub(/>\([A-Z].*$/, ">", name)  # The parameters.
    architecture = $NF
    gsub(/\047/, "", architecture)
  }
  /bytes stack frame/ { stack = $1; stores = $5; loads = $9 }
  /Used [0-9]+ registers/ && name != "" {
    match($0, /Used [0-9]+/)
    registers = substr($0, RSTART + 5, RLENGTH - 5)
    bad = stack + stores + loads > 0
    failures += bad
    ++kernels
    if (registers + 0 > most) most = registers + 0
    printf "%-8s %9d %6d %6d %6d  %s%s\n", architecture, registers, stack, stores, loads, name, bad ? "  FAILED" : ""
    name = ""
  }
  BEGIN { printf "%-8s %9s %6s %6s %6s  %s\n", "arch", "registers", "stack", "stores", "loads", "kernel" }
  END {
    printf "%d kernels, at most %d registers, %d with a stack or spills\n", kernels, most, failures
    exit failures > 0 || kernels == 0
  }'
