"""The demo: what it claims in its output, what it leaves behind, resuming, and its errors."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

for package in ("flax", "optax", "orbax.checkpoint", "matplotlib", "rich", "typer"):
    pytest.importorskip(package, exc_type=ImportError)

SCRIPT = "train_language_model.py"
TINY = (
    *("--devices", "4", "--batch", "8", "--window", "16", "--corpus-bytes", "20000"),
    *("--width", "16", "--layers", "1", "--heads", "2", "--sample-bytes", "8"),
    *("--measure-every", "2", "--evaluate-every", "2", "--steps", "6"),
)


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def straight(run_example, tmp_path_factory) -> tuple[str, Path]:
    """Six steps by the ring in one go: the output and the output directory."""
    folder = tmp_path_factory.mktemp("straight")
    done = run_example(SCRIPT, *TINY, "--check-steps", "3", "--output-dir", str(folder))
    return done.stdout, folder


def test_table_is_that_of_the_compiled_step(straight) -> None:
    out, folder = straight
    sent = metrics(folder)["communication"]
    assert sent["compiled_permutes"] == sent["schedule_permutes"] == 2 * (4 - 1)
    chunk = -(-sent["buffer_bytes"] // 4 // 4) * 4
    assert sent["compiled_bytes"] == sent["schedule_bytes"] == 2 * (4 - 1) * chunk
    row = next(line for line in out.splitlines() if "collective-permutes" in line)
    assert re.findall(r"\d+", row) == ["6", "6"]
    assert f"{sent['compiled_bytes']:,}" in out
    assert "the compiled step communicates as the schedule says: passed" in out


def test_gradients_are_reduced_by_permutes_only(straight) -> None:
    assert metrics(straight[1])["communication"]["compiled_all_reduces"] == 0


def test_ring_and_psum_give_the_same_losses(straight) -> None:
    out, folder = straight
    check = metrics(folder)["check"]
    assert (check["other"], check["steps"]) == ("psum", 3)
    assert check["difference"] <= check["tolerance"]
    assert re.search(r"the first 3 losses by ring and by psum differ by at most .*: passed", out)


def test_plot_is_a_png(straight) -> None:
    data = (straight[1] / "loss.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000


def test_progress_tells_loss_and_tokens_and_communication(straight) -> None:
    assert re.search(r"step 6/6 .* bits/byte .* tokens/s .*% communication", straight[0])


@pytest.mark.slow
def test_psum_leaves_the_reduction_to_xla_and_a_failed_check_fails_the_run(
    run_example, tmp_path
) -> None:
    arguments = ("--collective", "psum", "--output-dir", str(tmp_path))
    strict = ("--tolerance", "1e-30", "--learning-rate", "0.1", "--check-steps", "6")
    done = run_example(SCRIPT, *TINY, *arguments, *strict, status=None)
    numbers = metrics(tmp_path)
    sent, check = numbers["communication"], numbers["check"]
    assert sent["compiled_permutes"] == sent["schedule_permutes"] == 0
    assert sent["compiled_all_reduces"] == 1
    assert check["other"] == "ring"
    # Sums in another order need not differ in bits, but where they do the run must fail.
    assert done.returncode == int(check["difference"] > 0), done.stdout + done.stderr
    assert ("FAILED" in done.stdout) == (check["difference"] > 0)


@pytest.mark.slow
def test_wire_and_buckets_and_accumulation_are_in_the_table(run_example, tmp_path) -> None:
    arguments = ("--wire", "int8", "--accumulate", "2", "--bucket-mb", "0.01")
    done = run_example(SCRIPT, *TINY, *arguments, "--output-dir", str(tmp_path))
    sent = metrics(tmp_path)["communication"]
    # The loss travels apart, exactly; the largest gradient, of the embedding, is a bucket's 16 KiB.
    assert sent["reductions"] > 2
    assert sent["compiled_permutes"] == sent["schedule_permutes"]
    assert sent["compiled_permutes"] == sent["reductions"] * 2 * (4 - 1)
    # A quarter of what float32 sends, and scales.
    exact = sent["buffer_bytes"] * 2 * (4 - 1) / 4
    assert exact / 4 < sent["compiled_bytes"] == sent["schedule_bytes"] < exact * 0.3
    assert "sent as int8" in done.stdout


@pytest.mark.slow
def test_zero_holds_one_part_of_n_and_resumes_on_other_ranks(
    run_example, straight, interrupted, tmp_path
) -> None:
    """Three steps of stage 0 on 4 ranks, one of stage 3 on 2, and two of stage 2 on 8."""
    saved = ("--checkpoint-dir", str(shutil.copytree(interrupted, tmp_path / "saved")))
    common = (*TINY, *saved, "--resume", "--output-dir", str(tmp_path))
    whole, held = metrics(straight[1])["held"], {}
    for ranks, stage, steps in ((2, 3, 4), (8, 2, 6)):
        arguments = ("--devices", str(ranks), "--zero", str(stage), "--steps", str(steps))
        done = run_example(SCRIPT, *common, *arguments, "--check-steps", "0")
        assert f"ZeRO stage {stage}" in done.stdout
        numbers = metrics(tmp_path)
        sent, held = numbers["communication"], numbers["held"]
        parts = {
            name: whole[name] // (ranks if part else 1)
            for name, part in (("params_bytes", stage == 3), ("optimizer_bytes", True))
        }
        assert held["params_bytes"] == parts["params_bytes"]
        # Two counts are whole.
        assert parts["optimizer_bytes"] <= held["optimizer_bytes"] <= parts["optimizer_bytes"] + 8
        assert f"{held['optimizer_bytes']:,}" in done.stdout
        assert sent["compiled_permutes"] == sent["schedule_permutes"] > 0
        assert sent["compiled_bytes"] == sent["schedule_bytes"]
        assert sent["compiled_all_reduces"] == 0
    straight_losses = metrics(straight[1])["history"]["train"]
    losses = numbers["history"]["train"]
    assert losses[:3] == straight_losses[:3]
    assert losses == pytest.approx(straight_losses, abs=1e-4)


@pytest.fixture(scope="module")
def interrupted(run_example, tmp_path_factory) -> Path:
    """The checkpoints of a run of three steps."""
    folder = tmp_path_factory.mktemp("interrupted")
    arguments = ("--checkpoint-dir", str(folder / "saved"), "--output-dir", str(folder))
    run_example(SCRIPT, *TINY, *arguments, "--check-steps", "0", "--steps", "3")
    return folder / "saved"


@pytest.mark.slow
def test_a_checkpoint_is_not_mixed_with_other_runs(run_example, interrupted) -> None:
    saved = ("--checkpoint-dir", str(interrupted))
    again = run_example(SCRIPT, *TINY, *saved, status=2).stderr
    assert "--checkpoint-dir" in again
    assert "already holds step 3" in again
    wider = run_example(SCRIPT, *TINY, *saved, "--resume", "--width", "32", status=2).stderr
    assert "--width must be 16, as in the checkpoint of --resume, got 32" in wider
    fewer = run_example(SCRIPT, *TINY, *saved, "--resume", "--steps", "2", status=2).stderr
    assert "--steps must be at least 3" in fewer


@pytest.mark.slow
def test_resume_continues_to_the_same_bits(run_example, straight, interrupted, tmp_path) -> None:
    arguments = ("--check-steps", "0", "--output-dir", str(tmp_path / "out"))
    saved = ("--checkpoint-dir", str(shutil.copytree(interrupted, tmp_path / "saved")))
    done = run_example(SCRIPT, *TINY, *arguments, *saved, "--resume")
    assert "resumed after step 3" in done.stdout
    assert "ring was not compared with psum" in done.stdout
    resumed, whole = metrics(tmp_path / "out"), metrics(straight[1])
    assert len(resumed["history"]["train"]) == 6
    assert resumed["history"]["train"] == whole["history"]["train"]
    assert resumed["history"]["validation"][-1] == whole["history"]["validation"][-1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_keeps_the_last_checkpoint(
    run_example, examples, example_environment, tmp_path
) -> None:
    saved = tmp_path / "saved"
    arguments = (*TINY, "--checkpoint-dir", str(saved), "--checkpoint-every", "4")
    # A background shell ignores interrupts, and its children inherit that; a handler they do not.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, str(examples / SCRIPT), *arguments, "--steps", "1000000"],
        env=example_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, previous)
    try:
        deadline = time.monotonic() + 120
        while not any(p.name.isdigit() for p in saved.glob("*")) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, out + err
    found = re.search(r"interrupted after step \d+; continue from step (\d+) with --resume", out)
    assert found, out + err
    step = int(found[1])
    extra = ("--resume", "--steps", str(step + 2), "--check-steps", "0")
    done = run_example(SCRIPT, *arguments, *extra, "--output-dir", str(tmp_path))
    assert f"resumed after step {step}" in done.stdout
    assert len(metrics(tmp_path)["history"]["train"]) == step + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--accumulate", "3"), "--accumulate must divide the 4 windows of a rank"),
        (("--collective", "psum", "--wire", "int8"), "--wire needs --collective ring"),
        (("--zero", "4"), "--zero must be 0, 1, 2 or 3, got 4"),
        (("--wire", "int9"), "--wire must be one of bfloat16"),
        (
            ("--devices", "8", "--batch", "30"),
            "--batch must be a multiple of --devices 8 (24 or 32), got 30",
        ),
        (("--devices", "0"), "--devices must be positive, got 0"),
        (("--steps", "-1"), "--steps must be positive, got -1"),
        (("--seed", "-1"), "--seed must not be negative, got -1"),
        (("--width", "20", "--heads", "4"), "--width must be a multiple of twice --heads 4"),
        (("--prompt", "x" * 65), "must fit into --window 64 bytes"),
        (("--resume",), "--resume needs --checkpoint-dir"),
        (("--collective", "tree"), "'tree'"),
    ],
)
def test_bad_options_are_named_with_what_would_be_right(
    run_example, arguments: tuple[str, ...], message: str
) -> None:
    error = run_example(SCRIPT, *arguments, status=2).stderr
    assert message in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_errors_that_need_a_look_at_the_machine(run_example, tmp_path) -> None:
    missing = ("--resume", "--checkpoint-dir", str(tmp_path / "none"))
    assert "does not exist" in run_example(SCRIPT, *missing, status=2).stderr
    assert not (tmp_path / "none").exists()
    empty = ("--resume", "--checkpoint-dir", str(tmp_path))
    assert "holds none" in run_example(SCRIPT, *empty, status=2).stderr
    (tmp_path / "file").touch()
    for option in ("--output-dir", "--checkpoint-dir"):
        told = run_example(SCRIPT, *TINY, option, str(tmp_path / "file" / "x"), status=2).stderr
        assert f"{option} must be a directory that" in told
        assert "Not a directory" in told
        assert "Traceback" not in told
    little = run_example(SCRIPT, "--corpus-bytes", "100", status=2).stderr
    assert "--corpus-bytes must be at least 2113" in little


def test_help_says_how_communication_is_estimated(run_example) -> None:
    out = " ".join(run_example(SCRIPT, "--help").stdout.split())
    assert "The share of communication is estimated" in out
    assert "--collective" in out


@pytest.mark.slow
def test_full_demo_learns_well_beyond_the_unigram_entropy(run_example, tmp_path) -> None:
    out = run_example(SCRIPT, "--output-dir", str(tmp_path), timeout=1500).stdout
    numbers = metrics(tmp_path)
    assert numbers["history"]["validation"][-1][1] < 3.2
    assert numbers["history"]["validation"][-1][1] < numbers["unigram"] - 1.2
    assert numbers["communication"]["compiled_permutes"] == 14
    assert numbers["check"]["steps"] == 20
    assert out.count("passed") == 2
