"""`jax-ring tune`: measures the prices of links, for `algorithm="auto"`."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jax_ring import choose
from jax_ring.bench.measure import Rounds, distinct
from jax_ring.bench.surroundings import load, surroundings
from jax_ring.bench.tune import Level, Verdict, level, levels_of, merged, to_dict, verify
from jax_ring.cli.devices import Devices, all_ranks, by_first_process, is_first_process
from jax_ring.cli.files import check_file
from jax_ring.cli.sizes import sizes_from
from jax_ring.cli.terminal import Output
from jax_ring.cli.units import format_seconds, format_size
from jax_ring.config import config
from jax_ring.schedules import Kind

_ITEMSIZE = 4  # Of what is measured.
_WIDTH = 120  # Of a table that is not shown on a terminal.


def tune(
    output: Annotated[
        pathlib.Path, typer.Option("--output", "-o", help="the tuning file")
    ] = pathlib.Path("tuning.json"),
    begin: Annotated[str, typer.Option("--minbytes", "-b", help="the smallest size")] = "4K",
    end: Annotated[str, typer.Option("--maxbytes", "-e", help="the largest size")] = "16M",
    factor: Annotated[
        float, typer.Option("--stepfactor", "-f", help="from one size to the next")
    ] = 4.0,
    iters: Annotated[int, typer.Option("--iters", "-n", help="calls that are timed")] = 20,
    warmup: Annotated[
        int, typer.Option("--warmup_iters", "-w", help="calls before that are not")
    ] = 3,
    check: Annotated[
        bool, typer.Option("--verify/--no-verify", help="measure how auto does with the file")
    ] = True,
    devices: Devices = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Measures what links cost, for algorithm="auto".

    Every algorithm is timed at every size, inside of a process and, if there are several, across
    them. The prices per step and per byte follow by least squares. Then "auto" is measured with
    them, in turns with all algorithms. Other links in an existing file are kept.

    Set JAX_RING_TUNING to the file afterwards, the same one on all hosts; here it counts for
    nothing. Only the first process needs the folder of the file. Measure with the processes, hosts
    and devices that you will use, and while nothing else runs on them.

    \b
    Examples:
      jax-ring tune --devices 8 -o tuning.json
      jax-ring run -n 4 -- jax-ring tune -o tuning.json
      srun jax-ring tune -o /shared/tuning.json -e 256M
      JAX_RING_TUNING=tuning.json jax-ring bench --devices 8 --compare auto,ring
    """  # noqa: D301  (\b keeps the lines apart in the help.)
    sizes = distinct(Kind.ALL_REDUCE, sizes_from(begin, end, factor), _ITEMSIZE, ranks=1)
    if len(sizes) < 2:
        raise ValueError(
            f"at least two sizes are needed, but -b {begin} -e {end} -f {factor:g} makes only one"
        )
    if iters < 1 or warmup < 0:
        raise ValueError(f"-n must be at least 1 and -w at least 0, got {iters} and {warmup}")
    with config(tuning=None):  # It may be the one that is to be made.
        mesh = all_ranks(devices)
        by_first_process(lambda: _check(output))
        rounds = Rounds(iters, warmup)
        with Console(stderr=True, quiet=not is_first_process()).status("starting") as status:
            levels = [
                level(part, name, sizes, rounds, _labelled(status.update, name))
                for name, part in levels_of(mesh).items()
            ]
            links = {one.name: one.link for one in levels}
            say = _labelled(status.update, "auto")
            verdicts = verify(mesh, links, sizes, rounds, say) if check else []
        if is_first_process():
            choose.save_tuning(output, merged(output, links))
    if not is_first_process():
        return
    if as_json:
        about = {"about": surroundings(), "file": str(output.absolute())}
        typer.echo(json.dumps(about | to_dict(levels, verdicts), indent=1))
    else:
        _print(levels, verdicts, output)


def _check(output: pathlib.Path) -> None:
    """Says before anything is measured that the file could not be written, or is another's."""
    check_file(output)
    if not os.access(output.absolute().parent, os.W_OK):  # Made there, and then moved.
        raise ValueError(f"{output}: nothing may be written into its folder")
    merged(output, {})


def _labelled(update: Callable[[str], None], label: str) -> Callable[[str], None]:
    return lambda what: update(f"{label}: {what}")


def _print(levels: Sequence[Level], verdicts: Sequence[Verdict], output: pathlib.Path) -> None:
    console = Output(_WIDTH)
    for one in levels:
        console.print(_table(one))
        console.print(_prices(one))
        for size, before, after in one.crossings:
            console.print(f"  from {format_size(size)}: {after} is faster than {before}")
    if verdicts:
        table = Table(title="auto with these prices", title_justify="left")
        for heading in ("size", "auto", "fastest of the others", "time / fastest"):
            table.add_column(heading, justify="right")
        for v in verdicts:
            table.add_row(format_size(v.nbytes), v.chosen, v.best, f"{v.ratio:.2f}")
        console.print(table)
        near = sum(v.near for v in verdicts)
        console.print(f"within 10% of the fastest at {near} of {len(verdicts)} sizes")
    console.print(f"load: {load()}")
    console.print(f"wrote {output}; export JAX_RING_TUNING={output.absolute()}", soft_wrap=True)


def _table(one: Level) -> Table:
    table = Table(title=f"{one.name}, {one.ranks} ranks", title_justify="left")
    table.add_column("size", justify="right")
    for name in one.times:
        table.add_column(name, justify="right")
    for i, size in enumerate(one.sizes):
        times = [one.times[name][i] for name in one.times]
        cells = [
            f"[bold]{format_seconds(t)}[/bold]" if t == min(times) else format_seconds(t)
            for t in times
        ]
        table.add_row(format_size(size), *cells)
    return table


def _prices(one: Level) -> str:
    link = one.link
    parts = [f"alpha {format_seconds(link.alpha)} per step"]
    parts += [f"beta {link.beta * 1e9:.3g} ns per byte sent"] if link.beta else []
    parts += [f"{link.exchange:.2f} times that in exchanges"] if link.exchange > 1 else []
    parts += [f"gamma {link.gamma * 1e9:.3g} ns per byte in memory"] if link.gamma else []
    parts += [
        f"{factor:.2f} times that beyond {size >> 10} KiB"
        for size, factor in link.spills
        if factor > 1
    ]
    return f"{', '.join(parts)}; predictions are off by {one.error:.0%} (median)"
