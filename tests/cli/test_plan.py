"""`jax-ring plan`, as it is typed."""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from jax_ring.cli import app, main
from jax_ring.planner import plan_algorithms
from jax_ring.schedules import FAMILIES, Kind, ring
from jax_ring.schedules.families import names
from jax_ring.schedules.simulate import simulate
from jax_ring.schedules.topology import NvlinkNodes, Torus, Uniform


def run(line):
    return CliRunner().invoke(app, shlex.split(line))


def planned(line):
    """What `jax-ring plan ... --json` prints."""
    result = run(f"plan {line} --json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def algorithm(plan, name):
    (found,) = (item for item in plan["algorithms"] if item["name"] == name)
    return found


def test_a_gigabyte_on_8_gpus():
    plan = planned("--ranks 8 --size 1GB --dtype bf16 --alpha 0 --bandwidth 400GB/s")
    found = algorithm(plan, "ring")
    assert found["seconds"] == pytest.approx(4.4e-3, rel=0.01)
    assert (found["steps"], found["bytes_per_rank"]) == (14, 1_750_000_000)
    assert found["busbw"] == pytest.approx(400e9)
    assert {item["name"] for item in plan["algorithms"]} == set(FAMILIES)
    assert (plan["bytes"], plan["dtype"], plan["topology"]) == (10**9, "bfloat16", None)
    assert (plan["alpha"], plan["bandwidth"], plan["skipped"]) == (0.0, 400e9, [])


def test_a_gigabyte_on_64_nodes():
    plan = planned("-n 512 --size 1GB --dtype bf16 --alpha 0 --bandwidth 45GB/s")
    assert algorithm(plan, "ring")["seconds"] == pytest.approx(45e-3, rel=0.02)


def test_a_step_takes_5_us_if_nothing_else_is_said():
    plan = planned("-n 1024 --size 1GB --bandwidth 45GB/s")
    latency = algorithm(plan, "ring")["seconds"] - 2 * 1023 / 1024 / 45
    assert latency == pytest.approx(2046 * 5e-6)
    assert latency > 10e-3


def test_a_topology_by_name():
    plan = planned("-n 32 --size 64MiB --topology nvlink8+ib")
    expected = simulate(ring(32), 64 << 20, NvlinkNodes(32))
    found = algorithm(plan, "ring")
    assert found["seconds"] == found["simulated_seconds"] == expected.seconds
    assert found["busiest_link"] == expected.busiest_name
    assert plan["algorithms"][0]["name"].startswith("hierarchical(8, 4, ring, ")


def test_a_topology_from_a_file(tmp_path):
    path = tmp_path / "cluster.json"
    content = {"schema": "jax-ring-topology", "version": 1, "kind": "torus", "shape": [4, 4]}
    path.write_text(json.dumps({**content, "bandwidth": 1e9}))
    plan = planned(f"-n 16 --size 1GB --topology {path}")
    expected = simulate(ring(16), 1e9, Torus((4, 4), 1e9)).seconds
    assert algorithm(plan, "ring")["seconds"] == expected
    path.write_text(json.dumps({**content, "bandwidth": "fast"}))
    result = run(f"plan -n 16 --size 1GB --topology {path}")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"jax-ring plan: {path}: bandwidth must be a number of bytes")


def test_kind_and_wire():
    plan = planned("-n 8 --size 1GB --kind all_gather --wire int8 --dtype bf16 --bandwidth 45GB/s")
    assert {item["name"] for item in plan["algorithms"]} == set(names(Kind.ALL_GATHER))
    expected = plan_algorithms(
        8, 10**9, kind=Kind.ALL_GATHER, wire="int8", itemsize=2, alpha=5e-6, bandwidth=45e9
    )
    assert [item["seconds"] for item in plan["algorithms"]] == [
        prediction.seconds for prediction in expected.predictions
    ]


def test_late_and_slow_ranks_and_the_time_to_reduce():
    line = "-n 8 --size 1GB --alpha 0 --bandwidth 45GB/s"
    found = planned(f"{line} --straggler 3:2ms --straggler 4:1s --slow 0:1.5 --slow 2:3")
    options = {"stragglers": {3: 2e-3, 4: 1.0}, "slowdowns": {0: 1.5, 2: 3.0}}
    expected = simulate(ring(8), 1e9, Uniform(8, 45e9), **options).seconds
    assert algorithm(found, "ring")["seconds"] == pytest.approx(expected)
    found = planned(f"{line} --reduce-bandwidth 100GB/s")
    expected = simulate(ring(8), 1e9, Uniform(8, 45e9), gamma=1 / 100e9).seconds
    assert algorithm(found, "ring")["seconds"] == pytest.approx(expected)


def test_a_table_says_it_all():
    result = run("plan -n 16 --size 1GB --dtype bf16 --topology nvlink8+ib --wire int8")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "all_reduce of 1 GB (bfloat16 as int8), nvlink+ib, 16 ranks"
    for heading in ("algorithm", "simulated", "model", "steps", "bytes/rank", "algbw", "busbw"):
        assert heading in lines[2]
    (line,) = (line for line in lines if line.split()[1:2] == ["ring"])
    prediction = algorithm(
        planned("-n 16 --size 1GB --dtype bf16 --topology nvlink8+ib --wire int8"), "ring"
    )
    assert f"{prediction['seconds'] * 1e3:.1f} ms" in line
    assert f"{prediction['busbw'] / 1e9:.1f} GB/s" in line
    assert "NIC out of rank 0, 99% busy" in line
    assert lines[-1] == "model: 7 us per message, 45 GB/s"


def test_without_a_topology_the_table_has_the_model_only():
    result = run("plan -n 16 --size 1GB --bandwidth 400GB/s")
    assert result.exit_code == 0
    assert "simulated" not in result.stdout
    assert "busiest" not in result.stdout
    assert "4.84 ms" in result.stdout  # The ring: 4.6875 ms and 30 x 5 us.


def test_a_single_rank():
    plan = planned("-n 1 --size 1GB --topology nvlink1+ib")
    assert plan["bandwidth"] is None
    assert {item["algbw"] for item in plan["algorithms"]} == {None}
    assert run("plan -n 1 --size 1GB --topology nvlink1+ib").exit_code == 0


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.svg"
    result = run(f"plan -n 8 --size 3GB --bandwidth 45GB/s --plot {path}")
    assert (result.exit_code, result.stderr) == (0, "")
    for name in FAMILIES:
        assert name in path.read_text()
    for size in ("0", "64GB"):  # Nothing takes no time; sizes go on up to what was asked for.
        again = run(f"plan -n 8 --size {size} --bandwidth 45GB/s --plot {path} --alpha 0")
        assert (again.exit_code, again.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n 8 --size 1gb --bandwidth 1GB/s", "--size: a size must end in a unit such as GB"),
        ("-n 8 --size 1GB", "give a --topology, or a --bandwidth such as 400GB/s"),
        ("-n 8 --size 1GB --bandwidth 400GB", "--bandwidth: a bandwidth must end in a unit"),
        ("-n 8 --size 1GB --bandwidth 1GB/s --alpha 5min", "--alpha: a time must end in"),
        ("-n 8 --size 1GB --bandwidth 1GB/s --dtype x", "--dtype: a dtype must be a name"),
        ("-n 8 --size 1GB --bandwidth 1GB/s --wire int3", "wire must be None, a WireFormat or"),
        ("-n 8 --size 1GB --topology lan", "topology must be a file or a name like nvlink8+ib"),
        ("-n 9 --size 1GB --topology nvlink8+ib", "nvlink8+ib: ranks must be a multiple of"),
        ("-n 0 --size 1GB --bandwidth 1GB/s", "--ranks must be at least 1, got 0"),
        ("-n -1 --size 1GB --topology nvlink8+ib", "--ranks must be at least 1, got -1"),
        ("-n 8 --size 1e400 --bandwidth 1GB/s", "--size: a size must be finite, got '1e400'"),
        ("-n 8 --size 1GB --bandwidth 1e300PB/s", "--bandwidth: a bandwidth must be finite, got"),
        ("-n 8 --size 1GB --bandwidth 1e-320", "plan: bandwidth must be finite and above 0"),
        ("-n 8 --size 1GB --bandwidth 1GB/s --alpha 1e400", "--alpha: a time must be finite"),
        (
            "-n 8 --size 1GB --bandwidth 1GB/s --wire int8 --dtype int32",
            "--wire int8 is for floats, such as --dtype bf16, got 'int32'",
        ),
        ("-n 8 --size 1GB --bandwidth 1GB/s --straggler 3", "--straggler must be RANK:VALUE"),
        ("-n 8 --size 1GB --bandwidth 1GB/s --straggler 3:x", "--straggler: a time must be"),
        (
            "-n 8 --size 1GB --bandwidth 1GB/s --straggler 8:1s",
            "--straggler: the rank must be 0 to 7",
        ),
        ("-n 8 --size 1GB --bandwidth 1GB/s --slow 1:abc", "--slow: a factor must be a finite num"),
        (
            "-n 8 --size 1GB --bandwidth 1GB/s --slow 3:0",
            "--slow: a factor must be a finite number",
        ),
        ("-n 8 --size 1GB --bandwidth 1GB/s --slow 3:nan", "--slow: a factor must be a finite num"),
        ("-n 8 --size 1GB --bandwidth 1GB/s --slow 3:2 --slow 3:3", "--slow must name a rank once"),
        ("-n 8 --size 1GB --bandwidth 1GB/s --plot x.bmp", "cannot draw into 'x.bmp'"),
    ],
)
def test_errors_are_one_line(line, message):
    result = run(f"plan {line}")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"jax-ring plan: {message}")
    assert result.stderr.count("\n") == 1


# The program around it.


def exit_status(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return exit_.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "-n", "8"], "Missing option '--size'."),
        (["plan", "-n", "many", "--size", "1GB"], "Invalid value for '--ranks' / '-n'"),
        (["plan", "--what"], "No such option: --what"),
        (["paln"], "No such command 'paln'."),
    ],
)
def test_errors_of_usage_are_one_line(arguments, message, capsys):
    assert exit_status(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"jax-ring: {message}")
    assert output.err.count("\n") == 1


def test_statuses(capsys):
    assert exit_status("plan", "-n", "8", "--size", "1GB", "--bandwidth", "1GB/s") in (0, None)
    assert exit_status("plan", "-n", "8", "--size", "1") == 2
    assert exit_status() in (0, None)
    assert "plan" in capsys.readouterr().out


def test_help_has_examples(capsys):
    assert exit_status("plan", "--help") in (0, None)
    text = capsys.readouterr().out
    assert "jax-ring plan -n 4096 --size 1GB --dtype bf16 --topology nvlink8+ib" in text


def test_the_module_plans_without_a_backend():
    # A backend that does not exist: any use of a device would fail.
    line = "plan -n 16 --size 1GB --topology nvlink8+ib --wire int8 --json"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "jax_ring", *shlex.split(line)],
        env={**os.environ, "JAX_PLATFORMS": "nonsense"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    assert algorithm(json.loads(result.stdout), "ring")["steps"] == 30


@pytest.mark.slow
@pytest.mark.slow
def test_4096_ranks_are_planned_in_less_than_a_minute():
    start = time.perf_counter()
    plan = planned("-n 4096 --size 1GB --dtype bf16 --topology nvlink8+ib")
    assert time.perf_counter() - start < 60
    assert plan["algorithms"][0]["name"].startswith("hierarchical(8, 512, ")
    assert [item["name"] for item in plan["skipped"]] == ["direct"]
