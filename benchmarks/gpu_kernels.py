r"""How fast the CUDA kernels are, against device-to-device copies of as many bytes.

    nvcc -std=c++17 -O3 -fmad=false -arch=native -I cc -o gpu_kernels \
        cc/chunk_reduce_cuda_*.cu cc/tests/chunk_reduce_cuda_benchmark.cu
    python benchmarks/gpu_kernels.py ./gpu_kernels

A kernel only moves memory: what it reads and writes, by the time of a copy that reads and writes as
much, taken in turns with it in the same run, is how close it is to the best that it could be.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

# The least share of the copy's bytes per second, from LARGE on.
BARS = {"sum float32": 0.90, "sum bfloat16": 0.90, "reduce int8 wire": 0.80}
LARGE = 64  # MiB


def main() -> int:
    """Runs the benchmark, prints a table, and says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=pathlib.Path, help="what the above command made")
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="MiB of data")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    arguments = parser.parse_args()

    command = [str(arguments.binary.resolve()), *map(str, arguments.sizes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    figures = [_with_rates(json.loads(line)) for line in done.stdout.splitlines()]
    print(f"{'kernel':<34}{'MiB':>5}{'us':>10}{'GB/s':>8}{'copy GB/s':>11}{'share':>8}")
    for row in figures:
        print(
            f"{row['kernel']:<34}{row['mib']:>5}{row['kernel_us']:>10.1f}{row['gb_per_s']:>8.0f}"
            f"{row['copy_gb_per_s']:>11.0f}{row['share']:>8.2f}  {row['verdict']}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if done.returncode != 0:
        return done.returncode
    return int(any(row["verdict"] == "TOO SLOW" for row in figures))


def _with_rates(row: dict[str, Any]) -> dict[str, Any]:
    share = row["copy_us"] / row["kernel_us"]
    bar = BARS.get(row["kernel"]) if row["mib"] >= LARGE else None
    return row | {
        "gb_per_s": row["bytes"] / row["kernel_us"] / 1e3,
        "copy_gb_per_s": row["bytes"] / row["copy_us"] / 1e3,
        "share": share,
        "bar": bar,
        "verdict": "" if bar is None else "ok" if share >= bar else "TOO SLOW",
    }


if __name__ == "__main__":
    sys.exit(main())
