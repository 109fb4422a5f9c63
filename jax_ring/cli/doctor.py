"""`jax-ring doctor`: what is installed, what is seen, what works, and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from jax_ring.cli.devices import Devices, all_ranks, check_devices, is_first_process, join
from jax_ring.cli.mistakes import FAILED
from jax_ring.doctor import Diagnosis, diagnose


def doctor(
    devices: Devices = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for a bug report")] = False,
) -> None:
    """Says what is installed, what works, and what to do.

    Every algorithm is run once on the devices, and its result compared with NumPy. Over several
    processes the first prints its facts, and what any of them advises; a process that does not come
    so far prints what it has.

    The exit status is 1 if something is broken. A GPU, a native module or a tuning file that is not
    there is no failure: it is said what it would bring.

    \b
    Examples:
      jax-ring doctor
      jax-ring doctor --devices 8
      jax-ring doctor --json > report.json
      jax-ring run -n 2 -- jax-ring doctor
    """  # noqa: D301  (\b keeps the lines apart in the help.)
    check_devices(devices)
    with Console(stderr=True).status("starting") as status:
        diagnosis = diagnose(lambda: all_ranks(devices), status.update, lambda: join(devices))
    alone = "devices" not in diagnosis.facts or "error" in diagnosis.facts["devices"]
    if alone or is_first_process():
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2) if as_json else _text(diagnosis))
    if not diagnosis.healthy:
        raise typer.Exit(FAILED)


def _text(diagnosis: Diagnosis) -> str:
    lines = []
    for section, facts in diagnosis.facts.items():
        lines += [section, *(_indented(facts) or ["  nothing"]), ""]
    lines += ["self-test against NumPy", *([] if diagnosis.checks else ["  not run"])]
    for check in diagnosis.checks:
        state = "ok" if check.passed else check.error or f"WRONG: {check.wrong} elements"
        lines.append(f"  {check.collective:14} {check.algorithm:20} {state}")
    lines += ["", f"verdict: {diagnosis.verdict}"]
    for number, advice in enumerate(diagnosis.advice, 1):
        kind = "problem" if advice.problem else "note"
        lines += [f"  {number}. {kind}: {advice.what}", f"     -> {advice.step}"]
    return "\n".join(lines)


def _indented(facts: Mapping[str, Any], depth: int = 1) -> list[str]:
    """A fact a line; what has nothing to say is left out."""
    lines = []
    for name, value in facts.items():
        if value in (None, "", [], {}):
            continue
        start = f"{'  ' * depth}{name}:"
        if isinstance(value, Mapping):
            lines += [start, *_indented(value, depth + 1)]
        elif isinstance(value, list):
            lines.append(f"{start} {', '.join(map(str, value))}")
        else:
            lines.append(f"{start} {value}")
    return lines
