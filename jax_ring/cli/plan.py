"""`jax-ring plan`: which algorithm for which cluster, without having it."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from jax_ring.cli import completion
from jax_ring.cli.mistakes import check_ranks, read
from jax_ring.cli.terminal import Output
from jax_ring.cli.units import (
    format_bandwidth,
    format_seconds,
    format_size,
    parse_bandwidth,
    parse_dtype,
    parse_factor,
    parse_seconds,
    parse_size,
)
from jax_ring.planner import Plan, Planner
from jax_ring.schedules import Kind
from jax_ring.schedules.topology import PRESETS, Topology, get

_WIDTH = 160  # Of a table that is not shown on a terminal.
_PER_DECADE = 4  # Sizes of a plot.


def plan(
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="how many take part")],
    size: Annotated[str, typer.Option(help="of the buffer: 1GB is 10^9 bytes, 1GiB and 1G 2^30")],
    dtype: Annotated[str, typer.Option(help="of its elements; counts where there is a wire")] = (
        "float32"
    ),
    topology: Annotated[
        str | None,
        typer.Option(
            help=f"a JSON file, or a name like {', '.join(PRESETS)}",
            autocompletion=completion.topologies,
        ),
    ] = None,
    alpha: Annotated[
        str | None, typer.Option(help="time per message in the model; without a topology, 5us")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="of each rank in the model, such as 400GB/s or 100Gbit/s")
    ] = None,
    kind: Annotated[Kind, typer.Option(help="the collective")] = Kind.ALL_REDUCE,
    wire: Annotated[
        str | None,
        typer.Option(
            help="what chunks travel as, such as bfloat16 or int8", autocompletion=completion.wires
        ),
    ] = None,
    straggler: Annotated[
        list[str] | None, typer.Option(help="RANK:TIME, a rank that begins late; may be repeated")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(help="RANK:FACTOR, a rank whose messages take longer; may be repeated"),
    ] = None,
    reduce_bandwidth: Annotated[
        str | None, typer.Option(help="at which a rank reduces what arrives; by default no limit")
    ] = None,
    plot: Annotated[
        pathlib.Path | None,
        typer.Option(help="draw time against size into this .png, .svg or .pdf"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compares the algorithms of a collective on a cluster that need not be at hand.

    Without --topology by the alpha-beta model, where a message takes alpha + bytes / bandwidth and
    links are never shared. With it also by a simulation of every message over the shared links.
    Nothing is run on a device.

    The names of topologies stand for default numbers; a JSON file holds your own (the documentation
    of jax_ring.schedules.topology.load has its format).

    \b
    Examples:
      jax-ring plan -n 8 --size 1GB --dtype bf16 --alpha 0 --bandwidth 400GB/s
      jax-ring plan -n 4096 --size 1GB --dtype bf16 --topology nvlink8+ib
      jax-ring plan -n 256 --size 64MiB --topology torus16x16 --wire int8
      jax-ring plan -n 64 --size 1GB --topology cluster.json --straggler 3:2ms
      jax-ring plan -n 64 --size 1GB --bandwidth 100Gbit/s --plot times.png
    """  # noqa: D301  (\b keeps the lines apart in the help.)
    check_ranks(ranks)
    name, itemsize = read("--dtype", parse_dtype, dtype)
    if wire is not None and "float" not in name:
        raise ValueError(f"--wire {wire} is for floats, such as --dtype bf16, got {dtype!r}")
    nbytes = read("--size", parse_size, size)
    cluster = get(topology, ranks) if topology else None
    planner = Planner(
        ranks,
        kind=kind,
        alpha=_alpha(alpha, cluster),
        bandwidth=_bandwidth(bandwidth, cluster),
        topology=cluster,
        itemsize=itemsize,
        wire=wire,
        stragglers=_by_rank("--straggler", straggler, parse_seconds, ranks),
        slowdowns=_by_rank("--slow", slow, parse_factor, ranks),
        gamma=_gamma(reduce_bandwidth),
    )
    result = planner.plan(nbytes)
    where = cluster.name if cluster else f"{ranks} ranks"
    if plot is not None:
        _draw(planner, nbytes, plot, f"{kind.value}, {where}")
    title = f"{kind.value} of {format_size(nbytes)} ({name}{f' as {wire}' if wire else ''})"
    if as_json:
        settings = {"dtype": name, "kind": kind.value, "wire": wire, "topology": topology}
        typer.echo(json.dumps(_as_json(result, settings), indent=2))
    else:
        _print(result, f"{title}, {where}")


def _alpha(text: str | None, cluster: Topology | None) -> float | None:
    if text is not None:
        return read("--alpha", parse_seconds, text)
    return None if cluster else 5e-6


def _bandwidth(text: str | None, cluster: Topology | None) -> float | None:
    if text is None and cluster is None:
        raise ValueError("give a --topology, or a --bandwidth such as 400GB/s")
    return None if text is None else read("--bandwidth", parse_bandwidth, text)


def _gamma(text: str | None) -> float:
    return 1 / read("--reduce-bandwidth", parse_bandwidth, text) if text is not None else 0.0


def _by_rank(
    option: str, texts: Sequence[str] | None, parse: Callable[[str], float], ranks: int
) -> dict[int, float]:
    """What RANK:VALUE says for each rank."""
    result: dict[int, float] = {}
    for text in texts or []:
        number, colon, value = text.partition(":")
        if not colon or not re.fullmatch(r"[0-9]+", number):
            raise ValueError(f"{option} must be RANK:VALUE, such as 3:2, got {text!r}")
        rank = int(number)
        if rank >= ranks:
            raise ValueError(f"{option}: the rank must be 0 to {ranks - 1}, got {text!r}")
        if rank in result:
            raise ValueError(f"{option} must name a rank once, got rank {rank} again in {text!r}")
        result[rank] = read(option, parse, value)
    return result


def _as_json(result: Plan, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "ranks": result.ranks,
        "bytes": result.nbytes,
        **settings,
        "alpha": result.alpha,
        "bandwidth": result.bandwidth if math.isfinite(result.bandwidth) else None,
        "algorithms": [dataclasses.asdict(prediction) for prediction in result.predictions],
        "skipped": [dataclasses.asdict(skipped) for skipped in result.skipped],
    }


def _print(result: Plan, title: str) -> None:
    simulated = any(p.simulated_seconds is not None for p in result.predictions)
    table = Table(title=title, title_justify="left")
    table.add_column("algorithm", overflow="fold")
    for heading in [*(["simulated"] if simulated else []), "model", "steps", "bytes/rank"]:
        table.add_column(heading, justify="right")
    for heading in ("algbw", "busbw"):
        table.add_column(heading, justify="right")
    if simulated:
        table.add_column("busiest link")
    for p in result.predictions:
        cells = [format_seconds(p.model_seconds), f"{p.steps:,}", format_size(p.bytes_per_rank)]
        cells += ["-" if x is None else format_bandwidth(x) for x in (p.algbw, p.busbw)]
        if p.simulated_seconds is not None:
            cells.insert(0, format_seconds(p.simulated_seconds))
            cells.append(f"{p.busiest_link}, {p.utilisation:.0%} busy" if p.busiest_link else "-")
        table.add_row(p.name, *cells)
    console = Output(_WIDTH)
    console.print(table)
    for skipped in result.skipped:
        console.print(f"skipped {skipped.name}: {skipped.reason}")
    model = f"{format_seconds(result.alpha)} per message, {format_bandwidth(result.bandwidth)}"
    console.print(f"model: {model}")


def _draw(planner: Planner, nbytes: int, path: pathlib.Path, title: str) -> None:
    """Time against size, up to at least the size that was asked for."""
    from jax_ring.schedules.draw import plot_times

    decades = range(3 * _PER_DECADE, 9 * _PER_DECADE + 1)
    sizes = sorted({round(10 ** (i / _PER_DECADE)) for i in decades} | ({nbytes} - {0}))
    curves: dict[str, list[float]] = {}
    for size in sizes:
        for prediction in planner.plan(size).predictions:
            label = re.sub(
                r"hierarchical\((\d+), (\d+), ring, (\w+)\)", r"\1x\2, \3", prediction.name
            )
            curves.setdefault(label, []).append(prediction.seconds)
    plot_times(curves, sizes, path, title=title)
