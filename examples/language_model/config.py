"""The options of the demo and the checks on them. Nothing here imports JAX."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class ConfigError(ValueError):
    """An option that cannot work; the message names it, its value and what would be right."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of a run; the command line shows them with their help.

    Attributes:
      devices: ranks of the data-parallel mesh.
      collective: who averages the gradients, "ring" (jax_ring) or "psum" (jax.lax).
      wire: what the ring sends gradients as; None as they are.
      accumulate: micro-batches that each rank cuts its part of the batch into.
      bucket_mb: MiB of gradients that are reduced together.
      zero: what each rank holds only its part of: 0 nothing, 1 the optimizer's state, 2 gradients
        too, 3 parameters too.
      steps: optimizer steps in all, those before a resume included.
      batch: windows per step, over all ranks together.
      seed: of the parameters, the order of the data and the sample.
      window: bytes of context.
      width: size of the residual stream.
      layers: transformer blocks.
      heads: attention heads per block.
      learning_rate: its peak, reached after the warm-up.
      warmup: steps of linear warm-up; then the rate falls with one over the square root.
      corpus_bytes: at most so much text is read for training.
      evaluate_every: steps between two validation losses.
      checkpoint_every: steps between two checkpoints.
      measure_every: steps between two timings of the reduction alone.
      check_steps: first steps that are repeated with the other collective in the end.
      tolerance: largest difference in bits per byte that this check accepts; None for
        1e-4, or 0.1 where a wire rounds the gradients.
      prompt: what the sample continues.
      sample_bytes: length of the sample.
      output_dir: where the plot and the metrics go.
      checkpoint_dir: where checkpoints go; None keeps none.
      resume: continue from the newest checkpoint.
      watchdog: seconds without a sign of life of a process after which the others end.
    """

    devices: int = 8
    collective: str = "ring"
    wire: str | None = None
    accumulate: int = 1
    bucket_mb: float = 25.0
    zero: int = 0
    steps: int = 400
    batch: int = 32
    seed: int = 0
    window: int = 64
    width: int = 128
    layers: int = 2
    heads: int = 4
    learning_rate: float = 4e-3
    warmup: int = 40
    corpus_bytes: int = 2_000_000
    evaluate_every: int = 25
    checkpoint_every: int = 50
    measure_every: int = 10
    check_steps: int = 20
    tolerance: float | None = None
    prompt: str = "def "
    sample_bytes: int = 400
    output_dir: Path = Path("demo_output")
    checkpoint_dir: Path | None = None
    resume: bool = False
    watchdog: float = 60.0

    def validate(self) -> None:
        """Checks what can be checked before JAX is imported.

        Raises:
          ConfigError: naming the option, its value and what would be right.
        """
        for name in _POSITIVE:
            given = getattr(self, name)
            _require(given is None or given > 0, name, given, "must be positive")
        for name in ("seed", "check_steps", "sample_bytes"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        _require(
            self.collective in ("ring", "psum"),
            "collective",
            self.collective,
            "must be ring or psum",
        )
        _require(self.zero in (0, 1, 2, 3), "zero", self.zero, "must be 0, 1, 2 or 3")
        _require(
            self.wire is None or self.collective == "ring",
            "wire",
            self.wire,
            "needs --collective ring; lax's own operation has no wire",
        )
        _require_multiple("batch", self.batch, "devices", self.devices)
        _require(
            self.batch // self.devices % self.accumulate == 0,
            "accumulate",
            self.accumulate,
            f"must divide the {self.batch // self.devices} windows of a rank (--batch over "
            "--devices)",
        )
        _require(
            self.width % (2 * self.heads) == 0,
            "width",
            self.width,
            f"must be a multiple of twice --heads {self.heads}, say {4 * self.heads}",
        )
        _require(bool(self.prompt.encode()), "prompt", repr(self.prompt), "must not be empty")
        _require(
            len(self.prompt.encode()) <= self.window,
            "prompt",
            repr(self.prompt),
            f"must fit into --window {self.window} bytes",
        )
        _require(
            not self.resume or self.checkpoint_dir is not None,
            "resume",
            self.resume,
            "needs --checkpoint-dir, the directory that the earlier run wrote to",
        )

    @property
    def largest_difference(self) -> float:
        """The tolerance in force."""
        if self.tolerance is not None:
            return self.tolerance
        return 1e-4 if self.wire is None else 0.1


_POSITIVE = (
    "devices",
    "steps",
    "batch",
    "window",
    "width",
    "layers",
    "heads",
    "learning_rate",
    "warmup",
    "accumulate",
    "bucket_mb",
    "corpus_bytes",
    "evaluate_every",
    "checkpoint_every",
    "measure_every",
    "tolerance",
    "watchdog",
)


def flag(name: str) -> str:
    """The command line's spelling of an option."""
    return "--" + name.replace("_", "-")


def _require(good: bool, name: str, value: object, rule: str) -> None:
    if not good:
        raise ConfigError(f"{flag(name)} {rule}, got {value}")


def _require_multiple(name: str, value: int, of: str, divisor: int) -> None:
    lower = value // divisor * divisor
    fitting = f"{lower} or {lower + divisor}" if lower else f"{divisor}"
    _require(
        value % divisor == 0, name, value, f"must be a multiple of {flag(of)} {divisor} ({fitting})"
    )


def request_cpu_devices(count: int) -> None:
    """Asks XLA for virtual CPU devices; it must run before JAX is imported.

    A device count already in XLA_FLAGS, or a platform in JAX_PLATFORMS, is left as it is.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}={count}".strip()
