r"""What compressed gradients cost in loss and save in bytes, on two real tasks.

    pip install '.[examples,benchmarks]'
    python benchmarks/compressed_gradients.py

The example's language model (AdamW, as in examples/train_language_model.py) and scikit-learn's
digits (a perceptron with one hidden layer, SGD with momentum), data-parallel on 4 virtual devices.
Each method starts from the same parameters, sees the same batches and takes as many steps; the
learning rates were chosen for exact gradients and are the same for all. Prints a Markdown table for
each task.

The bytes are those that the collective-permutes of the compiled reduction send from each rank, for
1-bit after its warm-up. All use the direct exchange, which rounds each contribution once.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

from language_model.config import Config, request_cpu_devices

RANKS = 4
request_cpu_devices(RANKS)  # XLA reads its flags once, before JAX starts.

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import PartitionSpec as P
from language_model import parallel
from language_model.data import Batches, evaluation_batches, load_corpus
from language_model.hlo import find_collectives
from language_model.model import bits_per_byte, init_model

import jax_ring
from jax_ring.gradients import one_bit, powersgd, state_specs, sync_gradients

AXIS = parallel.AXIS
ALGORITHM = "direct"


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
      init: seed -> parameters.
      loss: (parameters, batch) -> mean loss over the batch.
      batches: seed -> batches without end.
      score: parameters -> figures by name, on what was held out.
      optimizer: what comes after the reduction.
      steps: how many.
      warmup: the exact steps of 1-bit.
    """

    init: Callable[[int], Any]
    loss: Callable[[Any, Any], jax.Array]
    batches: Callable[[int], Iterator[Any]]
    score: Callable[[Any], dict[str, float]]
    optimizer: optax.GradientTransformation
    steps: int
    warmup: int


def language_model(steps: int) -> Task:
    """The example's transformer on the standard library's source."""
    config = Config(devices=RANKS, batch=16, width=64, corpus_bytes=1_000_000)
    corpus = load_corpus(config.corpus_bytes)
    graph, _ = init_model(config)
    loss = functools.partial(bits_per_byte, graph)
    held_out = evaluation_batches(corpus.validation, config.window, 64, 4)
    evaluate = jax.jit(loss)

    def batches(seed: int) -> Iterator[Any]:
        source = Batches(corpus.train, config.window, config.batch, seed)
        while True:
            yield source.next()

    def score(params: Any) -> dict[str, float]:
        losses = [float(evaluate(params, windows)) for windows in held_out]
        return {"bits per byte, held out": float(np.mean(losses))}

    return Task(
        init=lambda seed: init_model(dataclasses.replace(config, seed=seed))[1],
        loss=loss,
        batches=batches,
        score=score,
        optimizer=parallel.make_optimizer(config),
        steps=steps,
        warmup=config.warmup,
    )


def digits(steps: int) -> Task:
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, a fifth of them held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels.astype(np.int32), test_size=0.2, random_state=0, stratify=labels
    )

    def init(seed: int) -> Any:
        rng = np.random.default_rng(seed)

        def weights(inputs: int, outputs: int) -> jax.Array:
            drawn = rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
            return jnp.asarray(drawn, jnp.float32)

        return {
            "hidden": {"w": weights(64, 256), "b": jnp.zeros(256)},
            "out": {"w": weights(256, 10), "b": jnp.zeros(10)},
        }

    def logits(params: Any, x: Any) -> jax.Array:
        hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
        return hidden @ params["out"]["w"] + params["out"]["b"]

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    def batches(seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            chosen = rng.choice(len(train_x), 64, replace=False)
            yield train_x[chosen], train_y[chosen]

    def score(params: Any) -> dict[str, float]:
        right = logits(params, test_x).argmax(1) == test_y
        return {
            "training loss": float(loss(params, (train_x, train_y))),
            "held out, right in %": 100 * float(right.mean()),
        }

    rate = optax.cosine_decay_schedule(0.1, steps)
    optimizer = optax.sgd(rate, momentum=0.9)
    return Task(init, loss, batches, score, optimizer, steps, warmup=steps // 10)


def over_wire(wire: str | None) -> optax.GradientTransformation:
    """The mean over a wire, without state, in the form of the others."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return sync_gradients(grads, AXIS, algorithm=ALGORITHM, wire=wire), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def methods(warmup: int) -> dict[str, Any]:
    """What is compared."""
    wires = ["bfloat16", "float8_e4m3fn", "int8", "int4"]
    return {
        "exact": over_wire(None),
        **{name: over_wire(name) for name in wires},
        **{
            f"PowerSGD, rank {rank}": powersgd(AXIS, rank, algorithm=ALGORITHM)
            for rank in (4, 2, 1)
        },
        "1-bit": one_bit(AXIS, warmup, algorithm=ALGORITHM),
    }


def on_ranks(mesh: jax.sharding.Mesh, compress: Any, task: Task) -> tuple[Any, Any]:
    """The start of the optimizer's state and the train step, jitted."""
    optimizer = optax.chain(compress, task.optimizer)
    specs = state_specs(jax.eval_shape(optimizer.init, task.init(0)), AXIS)
    shard_map = functools.partial(jax.shard_map, mesh=mesh)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        local = jax.lax.pcast(params, AXIS, to="varying")
        loss, grads = jax.value_and_grad(task.loss)(local, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, AXIS)

    init = shard_map(optimizer.init, in_specs=P(), out_specs=specs)
    train = shard_map(step, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs, P()))
    return jax.jit(init), jax.jit(train, donate_argnums=(0, 1))


def train(mesh: jax.sharding.Mesh, compress: Any, task: Task, seeds: int) -> dict[str, list[float]]:
    """The scores after the last step, for each seed."""
    init, step = on_ranks(mesh, compress, task)
    scores: dict[str, list[float]] = {}
    for seed in range(seeds):
        params = parallel.replicate(mesh, task.init(seed))
        state, batches = init(params), task.batches(seed)
        for _ in range(task.steps):
            params, state, loss = step(params, state, parallel.split_batch(mesh, next(batches)))
            loss.block_until_ready()
        for name, value in task.score(jax.device_get(params)).items():
            scores.setdefault(name, []).append(value)
    return scores


def bytes_sent(mesh: jax.sharding.Mesh, compress: Any, params: Any) -> int:
    """By each rank in one reduction, from the compiled program."""
    specs = state_specs(jax.eval_shape(compress.init, params), AXIS)

    def reduce(grads: Any) -> Any:
        local = jax.lax.pcast(grads, AXIS, to="varying")
        return compress.update(local, compress.init(grads))

    f = jax.shard_map(reduce, mesh=mesh, in_specs=P(), out_specs=(P(), specs))
    # Without a loop over the steps, so that each is an instruction that can be counted.
    with jax_ring.config(unroll=2 * RANKS):
        found = find_collectives(jax.jit(f).lower(params).compile().as_text())
    assert set(found) <= {"collective-permute"}
    return found["collective-permute"].nbytes


def table(task: Task, seeds: int) -> Iterator[str]:
    """The lines of a Markdown table."""
    mesh = parallel.make_mesh(RANKS)
    params = task.init(0)
    after_warmup, exact = methods(0), 0
    for name, compress in methods(task.warmup).items():
        scores = train(mesh, compress, task, seeds)
        nbytes = bytes_sent(mesh, after_warmup[name], params)
        if not exact:
            exact = nbytes
            heads = ["gradients", "bytes per step", "of exact", *scores]
            yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
        shown = [f"{np.mean(s):.4g} ({min(s):.4g} to {max(s):.4g})" for s in scores.values()]
        share = f"1/{exact / nbytes:.3g}" if nbytes < exact else "1"
        yield f"| {' | '.join([name, f'{nbytes:,}', share, *shown])} |"


def main(
    steps: Annotated[int, typer.Option(help="of the language model")] = 300,
    digits_steps: Annotated[int, typer.Option(help="of digits")] = 400,
    seeds: Annotated[int, typer.Option(help="runs of each; the mean, and the range")] = 3,
) -> None:
    """Trains both tasks with every method."""
    versions = f"Python {platform.python_version()}, jax {jax.__version__}, optax"
    print(f"{versions} {optax.__version__}, {datetime.date.today()}; {RANKS} ranks, {seeds} seeds")
    tasks = {f"digits, {digits_steps} steps": digits(digits_steps)}
    tasks[f"language model, {steps} steps"] = language_model(steps)
    for title, task in tasks.items():
        size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0)))
        print(f"\n{title}, {size:,} parameters, 1-bit exact for {task.warmup} steps:\n")
        for line in table(task, seeds):
            print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
