r"""`algorithm="auto"` between the virtual devices of one process, against `jax.lax.psum`.

    python benchmarks/inprocess.py --json inprocess.json

For 2, 4 and 8 devices and each size: all-reduces by `auto`, once with the operand kept and once
with it donated, and by whatever else is asked for, in turns with `lax.psum` (operand kept) in the
same run. A figure is the median over the rounds of the ratio within a round; the last column the
median over the numbers of devices, with the bar that the project sets itself.

Each number of devices runs in a process of its own, as it must be known before JAX starts.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import rich
import rich.table
import typer

RANKS = (2, 4, 8)
KIB = {4: 1.7, 256: 2.0, 4096: 2.0, 65536: 1.4}  # Size on each device, and the bar for auto.
DONATED = {2: 1.3, 4: 0.9, 8: 0.7}  # Bars at the largest size.
AUTO, DONATING = "auto", "auto, donated"


def measure(ranks: int, kib: int, algorithms: list[str], rounds: int) -> dict[str, Any]:
    """Runs in a process of its own: each case's ratios to lax.psum and what auto chose."""
    flags = f"--xla_force_host_platform_device_count={ranks}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_ring

    mesh = jax.make_mesh((ranks,), ("data",))
    layout = NamedSharding(mesh, P("data"))
    values = np.random.default_rng(0).integers(0, 9, ranks * kib * 256).astype(np.float32)
    x = jax.device_put(values, layout)

    def compiled(reduce: Callable[[Any], Any], *, donate: bool) -> Any:
        body = jax.shard_map(
            reduce, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
        )
        return jax.jit(body, donate_argnums=0 if donate else ()).lower(x).compile()

    def ours(algorithm: str) -> Callable[[Any], Any]:
        return lambda v: jax_ring.psum(v, "data", algorithm=algorithm)

    runs = {"lax.psum": compiled(lambda v: jax.lax.psum(v, "data"), donate=False)}
    runs[AUTO] = compiled(ours(AUTO), donate=False)
    runs[DONATING] = compiled(ours(AUTO), donate=True)
    runs |= {name: compiled(ours(name), donate=False) for name in algorithms}
    copy = jax.jit(lambda v: v + 0)
    expected = values.reshape(ranks, -1).sum(0)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            operand = jax.block_until_ready(copy(x)) if name == DONATING else x
            start = time.perf_counter()
            result = jax.block_until_ready(run(operand))
            took = time.perf_counter() - start
            if turn:
                times[name].append(took)
            else:
                np.testing.assert_array_equal(np.asarray(result)[: len(expected)], expected)
            del result, operand
    explained = jax_ring.explain(
        jax.shard_map(ours(AUTO), mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=True), x
    )
    return {
        "ranks": ranks,
        "kib": kib,
        "chosen": explained.collectives[0].algorithm,
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
        "ratios": {
            name: statistics.median(a / b for a, b in zip(taken, times["lax.psum"], strict=True))
            for name, taken in times.items()
        },
    }


def in_a_process(ranks: int, kib: int, algorithms: list[str], rounds: int) -> dict[str, Any]:
    """`measure` in a new process."""
    arguments = json.dumps([ranks, kib, algorithms, rounds])
    done = subprocess.run(
        [sys.executable, __file__, "--measure", arguments], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def show(figures: list[dict[str, Any]]) -> None:
    """Prints the ratios, their medians and the bars."""
    sizes = list(dict.fromkeys(figure["kib"] for figure in figures))
    heads = [f"N = {ranks}" for ranks in RANKS]
    table = rich.table.Table("size", "case", *heads, "median", "bar", title="time / lax.psum")
    for kib in sizes:
        rows = {figure["ranks"]: figure for figure in figures if figure["kib"] == kib}
        for name in rows[RANKS[0]]["ratios"]:
            ratios = [rows[ranks]["ratios"][name] for ranks in RANKS]
            shown = [f"{ratio:.2f}" for ratio in ratios]
            if name == AUTO:
                shown = [
                    f"{text} {rows[n]['chosen']}" for text, n in zip(shown, RANKS, strict=True)
                ]
            bar = f"{KIB[kib]}" if name == AUTO else ""
            if name == DONATING and kib == max(KIB):
                bar = ", ".join(map(str, DONATED.values()))
            table.add_row(f"{kib} KiB", name, *shown, f"{statistics.median(ratios):.2f}", bar)
    rich.print(table)


def main(
    algorithms: Annotated[list[str] | None, typer.Argument(help="others to compare")] = None,
    most: Annotated[int, typer.Option(help="MiB on each device, at most")] = 64,
    rounds: Annotated[int, typer.Option(help="how often each is timed; ten times if small")] = 9,
    output: Annotated[pathlib.Path | None, typer.Option("--json", help="a file to write")] = None,
    measured: Annotated[str | None, typer.Option("--measure", hidden=True)] = None,
) -> None:
    """Times algorithm="auto" against jax.lax.psum."""
    if measured is not None:
        print(json.dumps(measure(*json.loads(measured))))
        return
    figures = [
        in_a_process(ranks, kib, algorithms or [], rounds if kib > 4096 else 10 * rounds)
        for kib in KIB
        for ranks in RANKS
        if kib <= most << 10
    ]
    show(figures)
    load = os.getloadavg()[0]
    rich.print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load}")
    if output:
        about = {"date": datetime.date.today().isoformat(), "load": load, "figures": figures}
        output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
