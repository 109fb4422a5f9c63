"""Trains a small language model data-parallel, with every gradient averaged by `jax_ring`.

    python examples/train_language_model.py --devices 8

What to learn here, and in which file of `language_model/`:

* how to take over the gradients' reduction from JAX and give it to a collective of your choice,
  `parallel.py`;
* how to tell what was communicated, from the schedule and from the compiled program, `report.py`
  and `hlo.py`;
* that the explicit ring trains as `jax.lax.psum` does, step by step, up to rounding,
  `training.py`;
* how to resume to the very same bits, `checkpoint.py` and `data.py`;
* how the same program runs in several processes, each with its part of the data, and what happens
  if one dies, `processes.py` and `training.py`:

    jax-ring run -n 2 -- python examples/train_language_model.py --devices 8

The text is the source of Python's own standard library, so nothing is downloaded. On two CPU
cores that pose as eight devices a run takes about two minutes.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from language_model import processes
from language_model.config import Config, ConfigError


class Collective(enum.StrEnum):
    """Who averages the gradients."""

    RING = "ring"
    PSUM = "psum"


def main(
    devices: Annotated[
        int, typer.Option(help="Ranks, of all processes; virtual CPU devices by default.")
    ] = (Config.devices),
    collective: Annotated[
        Collective, typer.Option(help="jax_ring's explicit ring, or jax.lax.pmean.")
    ] = Collective.RING,
    wire: Annotated[
        str | None,
        typer.Option(help="What the ring sends gradients as: bfloat16, float8_e4m3fn, int8, int4."),
    ] = Config.wire,
    accumulate: Annotated[
        int, typer.Option(help="Micro-batches of a rank, one reduction for all of them.")
    ] = Config.accumulate,
    bucket_mb: Annotated[
        float, typer.Option(help="MiB of gradients that are reduced together.")
    ] = Config.bucket_mb,
    zero: Annotated[
        int,
        typer.Option(
            help="What each rank holds only its part of: 1 the optimizer's state, 2 accumulated "
            "gradients too, 3 parameters too; 0 nothing. Checkpoints fit all of them and any "
            "--devices."
        ),
    ] = Config.zero,
    steps: Annotated[int, typer.Option(help="Train steps in all, resumed ones included.")] = (
        Config.steps
    ),
    batch: Annotated[int, typer.Option(help="Windows per step, over all ranks.")] = Config.batch,
    seed: Annotated[int, typer.Option(help="Of parameters, data order and sample.")] = Config.seed,
    window: Annotated[int, typer.Option(help="Bytes of context.")] = Config.window,
    width: Annotated[int, typer.Option(help="Size of the residual stream.")] = Config.width,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = Config.layers,
    heads: Annotated[int, typer.Option(help="Attention heads per block.")] = Config.heads,
    learning_rate: Annotated[float, typer.Option(help="Peak, reached after the warm-up.")] = (
        Config.learning_rate
    ),
    warmup: Annotated[int, typer.Option(help="Steps of warm-up.")] = Config.warmup,
    corpus_bytes: Annotated[int, typer.Option(help="Most bytes to train on.")] = (
        Config.corpus_bytes
    ),
    evaluate_every: Annotated[int, typer.Option(help="Steps between validations.")] = (
        Config.evaluate_every
    ),
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = (
        Config.checkpoint_every
    ),
    measure_every: Annotated[
        int,
        typer.Option(
            help="Steps between two timings of the reduction. The share of communication is "
            "estimated: the median time of a jitted function that only reduces a buffer of the "
            "same size, over the median time of a train step. Waiting for a late rank is not in "
            "it, and where communication overlaps with computation it is an upper bound."
        ),
    ] = Config.measure_every,
    check_steps: Annotated[
        int, typer.Option(help="First steps to repeat with the other collective; 0 for none.")
    ] = Config.check_steps,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference, in bits per byte, that this check accepts; by default 1e-4, "
            "with --wire 0.1."
        ),
    ] = Config.tolerance,
    prompt: Annotated[str, typer.Option(help="What the sample continues.")] = Config.prompt,
    sample_bytes: Annotated[int, typer.Option(help="Length of the sample.")] = Config.sample_bytes,
    output_dir: Annotated[Path, typer.Option(help="For loss.png and metrics.json.")] = (
        Config.output_dir
    ),
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="For checkpoints; none are kept without it.")
    ] = Config.checkpoint_dir,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint.")
    ] = Config.resume,
    watchdog: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of life of a process after which the others end, and say "
            "which it was."
        ),
    ] = Config.watchdog,
) -> None:
    """Trains a byte-level transformer on the standard library's source, data-parallel.

    Exits with status 1 if the ring and psum disagree, or if the compiled program does not
    communicate as the schedule says.
    """
    config = Config(**{**locals(), "collective": collective.value})
    try:
        config.validate()
        # Before JAX: it must find its devices and the other processes.
        processes.join(config)
        from language_model.training import run

        raise typer.Exit(run(config))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
