"""The run from start to end: train, evaluate, save, check against the other collective, report."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

import jax_ring
from jax_ring.distributed import Watchdog, check_consistency, watchdog
from jax_ring.explanation import Explanation
from jax_ring.gradients import shard_like, unshard
from jax_ring.wire import NAMES as WIRES
from language_model import parallel, report
from language_model.checkpoint import Checkpoints
from language_model.config import Config, ConfigError
from language_model.data import (
    Batches,
    Bytes,
    Corpus,
    Starts,
    evaluation_batches,
    load_corpus,
    windows,
)
from language_model.model import Transformer, generate, init_model

EVALUATION_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Setup:
    """What stays the same throughout a run, whichever collective reduces.

    Attributes:
      config: the options.
      corpus: the text.
      mesh: the ranks.
      graph: the model's structure.
    """

    config: Config
    corpus: Corpus
    mesh: Mesh
    graph: nnx.GraphDef[Transformer]

    def initial_state(self) -> parallel.TrainState:
        """The state before the first step, the same for the same seed."""
        _, params = init_model(self.config)
        return parallel.initial_state(self.mesh, params, self.config)

    def batches(self) -> Batches:
        """The training data from its start."""
        c = self.config
        return Batches(self.corpus.train, c.window, c.batch, c.seed)

    def on_devices(self, text: Bytes, starts: Starts) -> jax.Array:
        """The windows of a batch, uint8 [batch, window + 1], each on its device."""
        window = self.config.window
        shape = (len(starts), window + 1)
        return parallel.split_batch(
            self.mesh, shape, lambda rows: windows(text, starts[rows], window)
        )

    def compile_step(self, collective: str) -> tuple[Any, Explanation]:
        """The train step, compiled ahead of its first call, and the collectives that it makes."""
        state = self.initial_state()
        step = parallel.make_train_step(self.mesh, self.graph, state, self.config, collective)
        batch = self.on_devices(self.corpus.train, np.zeros(self.config.batch, np.int64))
        # Without a loop over the ring's steps, so that each is an instruction we can count.
        with jax_ring.config(unroll=max(2, self.config.devices)):
            return step.lower(state, batch).compile(), jax_ring.explain(step, state, batch)


class Trainer:
    """A run in progress: its state, its place in the data, its losses and its timings."""

    def __init__(self, setup: Setup, collective: str) -> None:
        """Compiles the step and starts from the seed."""
        config = setup.config
        self.setup, self.collective = setup, collective
        # The data first: that a text is too short should not be told after the compilation.
        self.batches = setup.batches()
        self._held_out = evaluation_batches(
            setup.corpus.validation, config.window, config.batch, EVALUATION_BATCHES
        )
        self.compiled, self.planned = setup.compile_step(collective)
        self.state = setup.initial_state()
        self.history, self.timings = report.History(), report.Timings()
        self._evaluate = parallel.make_evaluate(
            setup.mesh, setup.graph, self.state, config, collective
        )
        self._reduction = parallel.make_reduction(setup.mesh, config, collective)
        ranks = NamedSharding(setup.mesh, P(parallel.AXIS))
        shapes = jax.eval_shape(unshard, self.state.params)
        self._rows = jax.jit(
            lambda: jax.tree.map(
                lambda leaf: jnp.zeros((config.devices, *leaf.shape), leaf.dtype), shapes
            ),
            out_shardings=ranks,
        )()
        rows_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._rows))
        self.timings.reduction_bytes = rows_bytes // config.devices

    @property
    def step(self) -> int:
        """Steps taken."""
        return len(self.history.train)

    def train_step(self) -> None:
        """Takes one step and notes its loss and time."""
        start = time.perf_counter()
        batch = self.setup.on_devices(self.setup.corpus.train, self.batches.next())
        self.state, loss = self.compiled(self.state, batch)
        self.history.train.append(float(loss))
        self.timings.step.append(time.perf_counter() - start)

    def time_reduction(self) -> None:
        """Times the reduction by itself; the first call compiles and is not counted."""
        if not self.timings.reduction:
            jax.block_until_ready(self._reduction(self._rows))
        start = time.perf_counter()
        jax.block_until_ready(self._reduction(self._rows))
        self.timings.reduction.append(time.perf_counter() - start)

    def evaluate(self) -> None:
        """Notes the validation loss."""
        text = self.setup.corpus.validation
        losses = [
            float(self._evaluate(self.state.params, self.setup.on_devices(text, starts)))
            for starts in self._held_out
        ]
        self.history.validation.append((self.step, float(np.mean(losses))))

    def resume(self, checkpoints: Checkpoints) -> None:
        """Continues from the newest checkpoint."""
        like = jax.eval_shape(lambda state: state, self.state)
        whole = jax.eval_shape(unshard, like)
        restored = checkpoints.restore(whole, parallel.shardings(self.setup.mesh, whole))
        # Saved whole, it is cut anew, for as many ranks as there are now.
        self.state = jax.jit(
            lambda state: shard_like(state, like),
            out_shardings=parallel.shardings(self.setup.mesh, like),
        )(restored.state)
        self.batches.go_to(restored.place)
        self.history = report.History(**restored.history)

    def save(self, checkpoints: Checkpoints) -> None:
        """Writes a checkpoint of all that `resume` needs."""
        history = dataclasses.asdict(self.history)
        whole = jax.jit(unshard)(self.state)
        checkpoints.save(self.step, whole, self.batches.place(), history)


def run(config: Config) -> int:
    """Trains by the options and reports; of several processes the first one speaks.

    Returns:
      The exit status: 0, or 1 if a check failed, or 130 after Ctrl-C.

    Raises:
      ConfigError: for options that only now turn out not to work.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells about every checkpoint
    console = Console(quiet=not parallel.speaks())
    make_output_dir(config)
    with Checkpoints(config) as checkpoints:
        setup = prepare(config)
        console.print(describe(setup))
        with console.status(f"compiling the train step ({config.collective})"):
            trainer = Trainer(setup, config.collective)
        if config.resume:
            trainer.resume(checkpoints)
            console.print(f"resumed after step {trainer.step}")
        # Processes that differ would wait for each other; one that dies would be waited for.
        check_consistency(trainer.planned)
        with watchdog(config.watchdog) as dog:
            try:
                train(trainer, checkpoints, console, dog)
            except KeyboardInterrupt:
                console.print(interrupted(trainer, checkpoints), soft_wrap=True)
                return 130
            return finish(trainer, console)


def make_output_dir(config: Config) -> None:
    """Makes the directory in which the first process writes; if it cannot, none of them trains.

    Raises:
      ConfigError: if the directory cannot be written.
    """
    problem = ""
    if parallel.speaks():
        try:
            config.output_dir.mkdir(parents=True, exist_ok=True)
            if not os.access(config.output_dir, os.W_OK):
                problem = "not writable"
        except OSError as error:
            problem = str(error.strerror)
    if multihost_utils.broadcast_one_to_all(np.array(bool(problem))):
        raise ConfigError(
            f"--output-dir must be a directory that process 0 can write, got {config.output_dir}"
            f"{problem and f' ({problem})'}"
        )


def prepare(config: Config) -> Setup:
    """Reads the text and sets up mesh, model and optimizer."""
    if config.wire is not None and config.wire not in WIRES:
        raise ConfigError(f"--wire must be one of {', '.join(WIRES)}, got {config.wire}")
    corpus, mesh = load_corpus(config.corpus_bytes), parallel.make_mesh(config.devices)
    graph, _ = init_model(config)
    return Setup(config, corpus, mesh, graph)


def describe(setup: Setup) -> str:
    """A line each about the text, what is held out, and the mesh."""
    c, text = setup.config, setup.corpus
    kind = setup.mesh.devices.flat[0].platform
    return (
        f"text: {len(text.train):,} bytes of {text.train_files} standard library files\n"
        f"held out: {len(text.validation):,} bytes of {text.validation_files} others\n"
        f"mesh: {c.devices} {kind} devices, {c.batch // c.devices} of {c.batch} windows each; "
        f"gradients averaged by {c.collective}{'' if c.wire is None else f', sent as {c.wire}'}"
        f"{f'; ZeRO stage {c.zero}' if c.zero else ''}"
    )


def train(trainer: Trainer, checkpoints: Checkpoints, console: Console, dog: Watchdog) -> None:
    """Takes the remaining steps, with a progress bar."""
    config = trainer.setup.config
    with _progress(console) as progress:
        task = progress.add_task("", total=config.steps, loss=0.0, rate=0.0, share=0.0)
        while trainer.step < config.steps:
            dog.step(trainer.step)
            trainer.train_step()
            last = trainer.step == config.steps
            if trainer.step % config.measure_every == 0 or last:
                trainer.time_reduction()
            if trainer.step % config.evaluate_every == 0 or last:
                trainer.evaluate()
                progress.console.print(_losses_line(trainer))
            if checkpoints.due(trainer.step):
                trainer.save(checkpoints)
            progress.update(task, completed=trainer.step, **_live_numbers(trainer))


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("[bold]{task.fields[loss]:.3f}[/] bits/byte"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TextColumn("{task.fields[share]:.0%} communication"),
        TimeRemainingColumn(),
        console=console,
    )


def _live_numbers(trainer: Trainer) -> dict[str, Any]:
    config, recent = trainer.setup.config, trainer.timings.step[-20:]
    return {
        "loss": float(np.mean(trainer.history.train[-10:])),
        "rate": config.batch * config.window * len(recent) / sum(recent),
        "share": trainer.timings.share(),
    }


def _losses_line(trainer: Trainer) -> str:
    recent = np.mean(trainer.history.train[-10:])
    step, validation = trainer.history.validation[-1]
    return f"step {step:4d}: training {recent:.3f}, validation {validation:.3f} bits/byte"


def interrupted(trainer: Trainer, checkpoints: Checkpoints) -> str:
    """What to tell after Ctrl-C."""
    saved = checkpoints.latest()
    advice = (
        f"continue from step {saved} with --resume"
        if saved is not None
        else "no checkpoint was written; pass --checkpoint-dir to keep some"
    )
    return f"interrupted after step {trainer.step}; {advice}"


def finish(trainer: Trainer, console: Console) -> int:
    """Plot, sample, table and check; returns the exit status."""
    setup, config = trainer.setup, trainer.setup.config
    unigram = setup.corpus.unigram_bits()
    sent = report.communication(
        trainer.collective,
        config.devices,
        trainer.planned,
        trainer.compiled.as_text(),
        trainer.timings,
    )
    held = report.Held.by_a_rank(trainer.state.params, trainer.state.optimizer)
    console.print(Panel(sample(trainer), title="sample", title_align="left"))
    console.print(report.communication_table(sent, held))
    with console.status("repeating the first steps with the other collective"):
        check = compare_collectives(trainer)
    if parallel.speaks():
        write_outputs(trainer, sent, held, unigram, check)
    console.print(
        f"{check.verdict(config)}\n"
        f"check: the compiled step communicates as the schedule says: {_verdict(sent.agrees)}\n"
        f"validation: {trainer.history.validation[-1][1]:.3f} bits/byte; "
        f"unigram entropy: {unigram:.3f}\n"
        f"plot: {config.output_dir / 'loss.png'}",
        soft_wrap=True,
    )
    return 0 if check.passed(config) and sent.agrees else 1


def sample(trainer: Trainer) -> Text:
    """Text by the trained model, on one device of each process."""
    config = trainer.setup.config
    params = parallel.on_one_device(trainer.setup.mesh, trainer.state.params)
    text = generate(trainer.setup.graph, params, config.prompt.encode(), config)
    return Text(text.decode("utf-8", errors="replace"))


@dataclasses.dataclass(frozen=True)
class Check:
    """The first steps repeated with the other collective.

    Attributes:
      other: the other collective.
      steps: how many steps were repeated.
      difference: largest difference of their losses, in bits per byte.
    """

    other: str
    steps: int
    difference: float

    def passed(self, config: Config) -> bool:
        """Whether the losses are the same within the tolerance."""
        return self.difference <= config.largest_difference

    def verdict(self, config: Config) -> str:
        """One line for the reader."""
        if not self.steps:
            return (
                f"check: {config.collective} was not compared with {self.other} (--check-steps 0)"
            )
        return (
            f"check: the first {self.steps} losses by {config.collective} and by {self.other} "
            f"differ by at most {self.difference:.1e} bits/byte (tolerance "
            f"{config.largest_difference:.0e}): {_verdict(self.passed(config))}"
        )


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def compare_collectives(trainer: Trainer) -> Check:
    """Repeats the first steps from the same seed with the other collective.

    The two sum the ranks' gradients in different orders, so they agree up to rounding only, and
    the optimizer lets the difference grow from step to step.
    """
    other = "psum" if trainer.collective == "ring" else "ring"
    steps = min(trainer.setup.config.check_steps, trainer.step)
    if not steps:
        return Check(other, 0, 0.0)
    again = Trainer(trainer.setup, other)
    for _ in range(steps):
        again.train_step()
    pairs = zip(trainer.history.train[:steps], again.history.train, strict=True)
    return Check(other, steps, max(abs(a - b) for a, b in pairs))


def write_outputs(
    trainer: Trainer,
    sent: report.Communication,
    held: report.Held,
    unigram: float,
    check: Check,
) -> None:
    """Writes loss.png and metrics.json into the output directory."""
    config = trainer.setup.config
    title = f"Data-parallel training on {config.devices} ranks, gradients by {config.collective}"
    report.plot_losses(config.output_dir / "loss.png", trainer.history, unigram, title)
    report.write_metrics(
        config.output_dir / "metrics.json",
        trainer.history,
        sent,
        held=dataclasses.asdict(held),
        unigram=unigram,
        check={**dataclasses.asdict(check), "tolerance": config.largest_difference},
    )
