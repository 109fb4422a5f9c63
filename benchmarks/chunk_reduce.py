r"""The chunk kernels on the CPU: the custom call, XLA's own fusion, and a plain copy.

    python benchmarks/chunk_reduce.py --json chunk_reduce.json

A step decodes a message, adds the local chunk and encodes the sum, again and again within one
program. Each is timed in turns with the same step left to XLA and with a memcpy that moves as many
bytes; the figures are medians, and only their ratios mean anything on a shared machine. One thread
works, as one does per device where there are several.

What `JAX_RING_REDUCER=auto` picks is what this finds faster.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
).strip()

import jax
import jax.numpy as jnp
import numpy as np
import rich
import rich.table
import typer
from jax import lax

from jax_ring import native, wire
from jax_ring.chunk_reduce import Codec

KIB = 1 << 10
SIZES = [64 << 10 << (2 * i) for i in range(7)]  # Bytes of float32: 64 KiB to 256 MiB.
IDENTITY = "none"


def step(name: str, reducer: str, repeat: int) -> Callable[..., Any]:
    """A program that reduces the same chunk into a message `repeat` times."""
    form = None if name == IDENTITY else wire.get(name)
    codec = Codec(form, "sum", lax.add, reducer)

    def run(message: Any, buffer: Any, row: Any) -> Any:
        def body(_: Any, held: Any) -> Any:
            return codec.reduce(held, buffer, row, finish=False, encode=True)

        return lax.fori_loop(0, repeat, body, message)

    return jax.jit(run, donate_argnums=0)


def seconds(run: Callable[[], Any]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(name: str, size: int, rounds: int) -> dict[str, Any]:
    """Times a step on a chunk of `size` bytes of float32."""
    n = size // 4
    repeat = max(1, min(200, (16 << 20) // size))
    buffer = jnp.asarray(np.random.default_rng(0).standard_normal((2, n)), jnp.float32)
    row = jnp.int32(1)
    form = None if name == IDENTITY else wire.get(name)
    message = jax.block_until_ready(buffer[0] if form is None else form.encode(buffer[0]))
    moved = size + 2 * message.nbytes
    source, target = (np.ones(moved // 2, np.uint8) for _ in range(2))

    def program(reducer: str) -> Callable[[], Any]:
        compiled = step(name, reducer, repeat)
        held = [jnp.array(message)]

        def run() -> None:
            held[0] = jax.block_until_ready(compiled(held[0], buffer, row))

        return run

    def copy() -> None:
        for _ in range(repeat):
            np.copyto(target, source)

    runs = {"native": program("native"), "xla": program("xla"), "copy": copy}
    for run in runs.values():
        run()  # Compiles.
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(rounds):
        for kind, run in runs.items():
            times[kind].append(seconds(run) / repeat)
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    return {
        "wire": name,
        "bytes": size,
        "native_us": 1e6 * medians["native"],
        "xla_us": 1e6 * medians["xla"],
        "native_gb_per_s": moved / medians["native"] / 1e9,
        "speedup": medians["xla"] / medians["native"],
        "share_of_copy": medians["copy"] / medians["native"],
    }


def size_text(size: int) -> str:
    """Bytes for people."""
    return f"{size // KIB} KiB" if size < KIB**2 else f"{size // KIB**2} MiB"


def main(
    wires: Annotated[list[str] | None, typer.Argument(help="wires; by default all")] = None,
    most: Annotated[int, typer.Option(help="MiB of the largest chunk")] = 256,
    rounds: Annotated[int, typer.Option(help="how often each is timed")] = 7,
    output: Annotated[
        pathlib.Path | None, typer.Option("--json", help="where to write the figures")
    ] = None,
) -> None:
    """Times the chunk kernels against XLA's own fusion and a plain copy."""
    if not native.status().available:
        raise SystemExit(str(native.status()))
    table = rich.table.Table("wire", "chunk", "native us", "GB/s", "XLA / native", "share of copy")
    figures = []
    for name in wires or [*wire.NAMES, IDENTITY]:
        for size in (size for size in SIZES if size <= most << 20):
            row = measure(name, size, rounds)
            figures.append(row)
            table.add_row(
                name,
                size_text(size),
                f"{row['native_us']:.0f}",
                f"{row['native_gb_per_s']:.1f}",
                f"{row['speedup']:.2f}",
                f"{row['share_of_copy']:.0%}",
            )
    rich.print(table)
    if output:
        output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
