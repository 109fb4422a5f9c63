"""`jax-ring bench`: nccl-tests for JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import jax
import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jax_ring import wire as wires
from jax_ring.bench import report as reports
from jax_ring.bench.measure import Bench, Case, Rounds, distinct, sweep
from jax_ring.bench.operands import OPS, Operands
from jax_ring.bench.report import Report
from jax_ring.bench.surroundings import load, surroundings
from jax_ring.cli import completion
from jax_ring.cli.devices import Devices, all_ranks, by_first_process, is_first_process
from jax_ring.cli.files import check_file, check_folder
from jax_ring.cli.mistakes import FAILED, read
from jax_ring.cli.sizes import sizes_from
from jax_ring.cli.terminal import Output, is_terminal
from jax_ring.cli.units import format_size, parse_dtype
from jax_ring.schedules import Kind
from jax_ring.schedules.draw import check_plot

_TRACED_CALLS = 3


def bench(
    begin: Annotated[str, typer.Option("--minbytes", "-b", help="the smallest size")] = "4K",
    end: Annotated[str, typer.Option("--maxbytes", "-e", help="the largest size")] = "64M",
    factor: Annotated[
        float, typer.Option("--stepfactor", "-f", help="from one size to the next")
    ] = 2.0,
    step: Annotated[
        str | None, typer.Option("--stepbytes", "-i", help="added from size to size, instead of -f")
    ] = None,
    iters: Annotated[int, typer.Option("--iters", "-n", help="calls that are timed")] = 20,
    warmup: Annotated[
        int, typer.Option("--warmup_iters", "-w", help="calls before that are not")
    ] = 5,
    together: Annotated[
        int, typer.Option("--agg_iters", "-m", help="calls issued before one is waited for")
    ] = 1,
    dtype: Annotated[str, typer.Option("--datatype", "-d", help="of the elements")] = "float32",
    op: Annotated[str, typer.Option("--op", "-o", help=f"{', '.join(OPS)} or avg")] = "sum",
    check: Annotated[
        int, typer.Option("--check", "-c", help="calls whose results are checked; 0 for none")
    ] = 1,
    collective: Annotated[Kind, typer.Option(help="what is measured")] = Kind.ALL_REDUCE,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="auto (the default), ring, ..., or psum for lax's own",
            autocompletion=completion.algorithms_to_measure,
        ),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(
            help="what chunks travel as, such as bfloat16 or int8", autocompletion=completion.wires
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="algorithms in turns with it, such as psum,ring,direct+int8",
            autocompletion=completion.lists_of_algorithms,
        ),
    ] = None,
    devices: Devices = None,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="write everything into this file")
    ] = None,
    csv_file: Annotated[
        pathlib.Path | None, typer.Option("--csv", help="write the table into this file")
    ] = None,
    plot: Annotated[
        pathlib.Path | None,
        typer.Option(help="draw busbw against size into this .png, .svg or .pdf"),
    ] = None,
    trace: Annotated[
        pathlib.Path | None, typer.Option(help="then profile some calls into this folder")
    ] = None,
) -> None:
    """Measures and checks a collective, as nccl-tests does.

    The options, columns and bandwidths are those of all_reduce_perf. A time is the median over the
    calls; the spread what lies between their 10th and 90th percentile. Algorithms are called in
    turns, so that only the ratio between them counts, however busy the machine is. In-place means
    that the operand is donated.

    Each result is compared with float64: the operands are whole numbers whose sums are exact in any
    order. The exit status is 1 if one is wrong.

    Several processes measure together if they are started by jax-ring run, mpirun or srun. The
    first of them prints, and writes the files, after each size.

    \b
    Examples:
      jax-ring bench --devices 8 -b 4K -e 256M -f 4
      jax-ring bench --devices 8 -b 1M -e 16M --compare psum,ring,halving_doubling --plot busbw.png
      jax-ring bench --devices 4 --algorithm direct --wire int8 -d bfloat16 -o avg
      jax-ring bench --collective reduce_scatter -b 64K -e 64M -n 50 --json result.json
      jax-ring run -n 4 -- jax-ring bench -b 16K -e 16M --compare psum,ring
    """  # noqa: D301  (\b keeps the lines apart in the help.)
    name, itemsize = read("--datatype", parse_dtype, dtype)
    _check_dtype(name)
    sizes = sizes_from(begin, end, factor, step)
    rounds = _rounds(iters, warmup, together, check)
    cases = _cases(collective, algorithm, wire, compare)
    op = "mean" if op == "avg" else op
    files = Files(json_file, csv_file, plot, trace)
    with _64_bits(itemsize):
        mesh = all_ranks(devices)
        sizes = distinct(collective, sizes, itemsize, mesh.size)
        by_first_process(lambda: files.check(len(sizes)))
        formats = tuple(dict.fromkeys(case.wire for case in cases))
        bench_ = Bench(mesh, Operands(collective, op, name, mesh.size, formats))
        report = Report(collective, op, name, mesh.size, cases, surroundings())
        try:
            _measure(bench_, report, sizes, rounds, files)
            if trace is not None:
                bench_.trace(cases, sizes, trace, calls=_TRACED_CALLS)
        finally:  # An interrupt or a size that is too large leaves what was measured before.
            files.finish(report)
    if report.wrong:
        raise typer.Exit(FAILED)


# --- what was asked for ---------------------------------------------------------------------------


def _check_dtype(name: str) -> None:
    if name == "bool" or name.startswith("complex"):
        raise ValueError(f"--datatype: {name} has no exact check; use a float or integer type")


def _rounds(iters: int, warmup: int, together: int, check: int) -> Rounds:
    for option, value, least in (("-n", iters, 1), ("-w", warmup, 0), ("-m", together, 1)):
        if value < least:
            raise ValueError(f"{option} must be at least {least}, got {value}")
    if check < 0:
        raise ValueError(f"-c must be at least 0, got {check}")
    return Rounds(iters, warmup, together, check)


def _cases(kind: Kind, algorithm: str | None, wire: str | None, compare: str | None) -> list[Case]:
    """What is measured: --algorithm first, unless only --compare is given."""
    wires.get(wire)
    texts = compare.split(",") if compare else []
    if algorithm is not None or not texts:
        texts.insert(0, algorithm or "auto")
    cases = list(dict.fromkeys(Case.parse(text, kind, wire) for text in texts))
    for case in cases:
        wires.get(case.wire)
    return cases


def _64_bits(itemsize: int) -> contextlib.AbstractContextManager[Any]:
    """JAX holds elements of 8 bytes only where it is told to."""
    return jax.enable_x64(True) if itemsize == 8 else contextlib.nullcontext()


# --- measuring and telling ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Files:
    """What the first process writes.

    Attributes:
      json: everything; written anew after each size.
      csv: the table; likewise.
      plot: the picture, in the end.
      trace: the folder of the profile.
    """

    json: pathlib.Path | None
    csv: pathlib.Path | None
    plot: pathlib.Path | None
    trace: pathlib.Path | None

    def check(self, sizes: int) -> None:
        """Says before anything is measured that it could not be written.

        Args:
          sizes: how many there are.

        Raises:
          ValueError: naming the path, and why.
          ImportError: if there is nothing to plot with.
        """
        for path in filter(None, (self.json, self.csv, self.plot)):
            check_file(path)
        if self.trace is not None:
            check_folder(self.trace)
        if self.plot is not None:
            check_plot(self.plot)
            if sizes < 2:
                raise ValueError("--plot needs at least two sizes that differ in elements")

    def grow(self, report: Report, *, last: bool = False) -> None:
        """Writes what there is so far; what is no file, as a pipe, in the end only."""
        if not is_first_process():
            return
        if self.json is not None and (last or _is_file(self.json)):
            report.write_json(self.json)
        if self.csv is not None and (last or _is_file(self.csv)):
            report.write_csv(self.csv)

    def finish(self, report: Report) -> None:
        """Writes everything."""
        if not report.measurements or not is_first_process():
            return
        self.grow(report, last=True)
        if self.plot is not None and len({m.nbytes for m in report.measurements}) > 1:
            report.plot(self.plot)
            smallest = format_size(report.measurements[0].nbytes)
            typer.echo(f"# {self.plot}: busbw of {smallest} and more")


def _is_file(path: pathlib.Path) -> bool:
    return path.is_file() or not path.exists()


def _measure(
    bench: Bench, report: Report, sizes: Sequence[int], rounds: Rounds, files: Files
) -> None:
    """Fills the report and the files, showing it as it grows."""
    in_both = report.kind is Kind.ALL_REDUCE
    compiling = len(report.cases) * (2 if in_both else 1)
    steps = len(sizes) * (compiling + rounds.warmup + rounds.iters)
    with _shown(report, steps) as (progress, measured):
        try:
            for measurement in sweep(bench, report.cases, sizes, rounds, progress):
                report.measurements.append(measurement)
                measured()
                files.grow(report)
        except (TypeError, NotImplementedError) as error:
            raise ValueError(str(error)) from error


Told = tuple[Callable[[str], None], Callable[[], None]]


@contextlib.contextmanager
def _shown(report: Report, steps: int) -> Iterator[Told]:
    """Shows a report: in a wide terminal as a live table, else line by line as nccl-tests does.

    Yields:
      What to call before each step of the work, and after each measurement.
    """
    if not is_first_process():
        yield lambda what: None, lambda: None
        return
    typer.echo("\n".join(_introduction(report)))
    if is_terminal() and Output().width >= max(map(len, reports.header())):
        with _live(report, steps) as told:
            yield told
    else:
        typer.echo("\n".join(reports.header()))
        yield lambda what: None, lambda: typer.echo(reports.line(report, report.measurements[-1]))
    typer.echo("\n".join(reports.summary(report)))
    typer.echo(f"# load after: {load()}")


def _introduction(report: Report) -> list[str]:
    about, found = report.about, report.about["devices"]
    each = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        f"# jax-ring bench: {report.kind.value}, {report.ranks} ranks, processes: "
        f"{about['processes']}, devices: {found['count']} x {found['kind']} ({found['platform']})",
        f"# {each}; {about['host']}, {about['cores']} cores, load before: {about['load']}",
    ]
    lines += [f"# {name}={value}" for name, value in about["environment"].items()]
    if report.ranks == 1:
        lines.append("# one rank has nobody to talk to: see --devices, or jax-ring run")
    return lines


@contextlib.contextmanager
def _live(report: Report, steps: int) -> Iterator[Told]:
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )
    task = bar.add_task("starting", total=steps)

    def view() -> Any:
        return Group(_table(report), bar) if not bar.finished else _table(report)

    with Live(get_renderable=view, console=Output(), refresh_per_second=4):
        yield lambda what: bar.update(task, advance=1, description=what), lambda: None


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for half in ("", "in-place"):
        columns = reports.OF_A_HALF if half else (*reports.LEADING, *reports.OF_A_HALF)
        for name, unit, _ in columns:
            left = name in ("type", "redop", "algorithm")
            heading = "\n".join(filter(None, (half, name, unit)))
            table.add_column(heading, justify="left" if left else "right")
    for measured in report.measurements:
        wrong = any(timing.wrong for timing in measured.timings)
        table.add_row(*reports.cells(report, measured), style="bold red" if wrong else None)
    return table
