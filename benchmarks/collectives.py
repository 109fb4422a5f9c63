r"""All-reduces over the virtual devices of one process, against `jax.lax.psum`.

    python benchmarks/collectives.py --json collectives.json

Every algorithm with every wire, reduced by XLA and by the custom call, in turns with `lax.psum` in
the same run. The figures are medians; only their ratios mean anything on a shared machine. Within a
process a wire saves no time that a network would take: this shows what it costs.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

DEVICES = 8
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
).strip()

import jax
import numpy as np
import rich
import rich.table
import typer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring

ALGORITHMS = list(jax_ring.schedules.FAMILIES)
SIZES = [4 << 10, 256 << 10, 4 << 20, 64 << 20]  # Bytes of float32 on each device.
Case = tuple[str, str, str]  # Algorithm, wire, reducer.


def program(mesh: jax.sharding.Mesh, case: Case, x: jax.Array) -> Callable[[], Any]:
    """A compiled all-reduce of x."""
    algorithm, wire, reducer = case

    def body(v: jax.Array) -> jax.Array:
        if algorithm == "lax.psum":
            return jax.lax.psum(v, "data")
        return jax_ring.psum(v, "data", algorithm=algorithm, wire=None if wire == "none" else wire)

    with jax_ring.config(reducer=reducer):
        call = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P()))
        compiled = call.lower(x).compile()
    return lambda: jax.block_until_ready(compiled(x))


def measure(ranks: int, size: int, cases: list[Case], rounds: int) -> dict[Case, float]:
    """The median seconds of each case, taken in turns."""
    mesh = jax.make_mesh((ranks,), ("data",), devices=jax.devices()[:ranks])
    values = np.random.default_rng(0).standard_normal(ranks * size // 4).astype(np.float32)
    x = jax.device_put(values, NamedSharding(mesh, P("data")))
    runs = {case: program(mesh, case, x) for case in cases}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for case, run in runs.items():
            start = time.perf_counter()
            run()
            times[case].append(time.perf_counter() - start)
    return {case: statistics.median(each) for case, each in times.items()}


def main(
    wires: Annotated[list[str] | None, typer.Argument(help="wires; by default all")] = None,
    algorithms: Annotated[
        list[str] | None, typer.Option("--algorithm", help="algorithms; by default all")
    ] = None,
    ranks: Annotated[int, typer.Option(help="devices", min=2, max=DEVICES)] = DEVICES,
    most: Annotated[int, typer.Option(help="MiB on each device, at most")] = 64,
    rounds: Annotated[int, typer.Option(help="how often each is timed")] = 9,
    output: Annotated[
        pathlib.Path | None, typer.Option("--json", help="where to write the figures")
    ] = None,
) -> None:
    """Times all-reduces against jax.lax.psum."""
    reducers = ["xla", "native"] if jax_ring.native.status().available else ["xla"]
    baseline = ("lax.psum", "none", "xla")
    cases = [
        (algorithm, wire, reducer)
        for wire in wires or ["none", *jax_ring.wire.NAMES]
        for algorithm in algorithms or ALGORITHMS
        for reducer in reducers
    ]
    sizes = [size for size in SIZES if size <= most << 20]
    seconds = {size: measure(ranks, size, [baseline, *cases], rounds) for size in sizes}
    heads = [f"{size >> 10} KiB" for size in sizes]
    table = rich.table.Table(
        "wire", "algorithm", "reducer", *heads, title=f"time / lax.psum, {ranks} ranks"
    )
    figures = []
    for case in cases:
        algorithm, wire, reducer = case
        ratios = [seconds[size][case] / seconds[size][baseline] for size in sizes]
        table.add_row(wire, algorithm, reducer, *(f"{ratio:.2f}" for ratio in ratios))
        for size, ratio in zip(sizes, ratios, strict=True):
            names = {"wire": wire, "algorithm": algorithm, "reducer": reducer}
            took = {"bytes": size, "seconds": seconds[size][case], "of_lax_psum": ratio}
            figures.append(names | took)
    rich.print(table)
    if output:
        output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
