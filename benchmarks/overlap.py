r"""Which bytes of a bucketed train step travel beside matrix products, in programs for 8 x H200.

    make test-aot VENV=.venv-aot && .venv-aot/bin/python benchmarks/overlap.py

Compiles a step of the example's transformer, made larger, for GPUs that are not there, and reads
its schedule. A permute overlaps if a matrix product is scheduled between its start and its end; all
others are exposed: the step waits for them. No time is measured.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path += [str(pathlib.Path(__file__).parents[1] / part) for part in ("tests", "examples")]

import jax
import jax.numpy as jnp
import rich.console
import rich.table
from aot.scheduled import Instruction, Scheduled
from flax import nnx
from harness import sharded
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from language_model.config import Config
from language_model.model import Transformer, bits_per_byte

from jax_ring.gradients import plan_buckets, sync_gradients

CONFIG = Config(width=1024, layers=6, heads=16, window=1024, batch=64)
LAYERS = CONFIG.layers
LAYER_BYTES = (12 * CONFIG.width + 2) * CONFIG.width * 2  # bfloat16
ENDS_BYTES = (256 + 1) * CONFIG.width * 2  # The embedding and the last norm.
LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
# Whether latency hiding is on, the layers of a bucket, and how they are reduced.
CASES: tuple[tuple[bool, float, dict[str, Any]], ...] = (
    (False, 1, {"algorithm": "ring"}),
    (True, 1, {"algorithm": "ring"}),
    (True, 0.5, {"algorithm": "ring"}),
    (True, 1, {"algorithm": "ring", "in_order": True}),
    (True, 1, {"algorithm": "halving_doubling"}),
    (True, 1, {"algorithm": "halving_doubling", "in_order": True}),
    (True, 2, {"algorithm": "halving_doubling", "in_order": True}),
    (True, LAYERS, {"algorithm": "halving_doubling"}),
)


def order(paths: Sequence[str]) -> list[int]:
    """The last layer first; the embedding, which begins the model and ends it, comes last."""
    ends = [i for i, path in enumerate(paths) if "blocks" not in path]
    return [i for i in reversed(range(len(paths))) if i not in ends] + ends


def parameters() -> tuple[nnx.GraphDef[Transformer], Any]:
    """The model's structure, and the shapes of its parameters, in bfloat16."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0))))
    return graph, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)


def step(graph: Any, params: Any, windows: jax.Array, how: dict[str, Any]) -> Any:
    """Gradients, their mean in buckets, and a step of plain gradient descent."""
    local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
    grads = jax.grad(functools.partial(bits_per_byte, graph))(local, windows)
    grads = sync_gradients(grads, "data", order=order, **how)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What a rank sends in a step.

    Attributes:
      beside: bytes of each bucket that travel while a matrix product runs, in the order of buckets.
      exposed: bytes of each bucket during which none runs.
      temporary: bytes of temporary memory.
    """

    beside: list[int]
    exposed: list[int]
    temporary: int


def is_product(instruction: Instruction) -> bool:
    """Whether it is a matrix product, as cuBLAS, cuDNN or a Triton kernel."""
    marks = ("gemm", "cublas", "cudnn")
    return instruction.op == "dot" or any(mark in instruction.attributes for mark in marks)


def read(mesh: Mesh, options: dict[str, Any], **how: Any) -> Overlap:
    """Compiles the step with XLA's options and reads what its permutes overlap with."""
    graph, shapes = parameters()
    params = jax.tree.map(lambda p: sharded(mesh, P(), p.shape, p.dtype), shapes)
    windows = sharded(mesh, P("data"), (CONFIG.batch, CONFIG.window + 1), jnp.uint8)
    f = jax.shard_map(
        lambda params, windows: step(graph, params, windows, how),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    compiled = jax.jit(f, donate_argnums=0).lower(params, windows).compile(compiler_options=options)
    hlo = Scheduled(compiled.as_text(), compiled.memory_analysis())
    count = len(plan_buckets(params, how["bucket_bytes"], order=order).buckets)
    beside, exposed = collections.Counter[int](), collections.Counter[int]()
    for (bucket, nbytes), during in zip(_sent(hlo), hlo.during_permutes, strict=True):
        (beside if any(map(is_product, during)) else exposed)[bucket] += nbytes
    by_bucket = [[sent[i] for i in range(count)] for sent in (beside, exposed)]
    return Overlap(*by_bucket, temporary=hlo.memory.temp_size_in_bytes)


def _sent(hlo: Scheduled) -> list[tuple[int, int]]:
    """The bucket and the bytes of each permute, in the order in which they start."""
    sent = []
    for instruction in hlo.schedule:
        if instruction.op in ("collective-permute", "collective-permute-start"):
            found = re.search(r"bucket(\d+)/", instruction.attributes)
            assert found is not None, instruction
            # A start's result holds operand and result.
            arrays = len(instruction.operands)
            nbytes = sum(int(kind[1:]) // 8 * n for kind, n in instruction.arrays[:arrays])
            sent.append((int(found[1]), nbytes))
    return sent


def main() -> None:
    """Prints a row for each case."""
    from aot.conftest import h200s

    mesh = h200s(1)
    table = rich.table.Table(
        "latency hiding", "algorithm", "in order", "buckets", "overlapped", "sent", "exposed"
    )
    for hiding, layers, how in CASES:
        nbytes = int(layers * LAYER_BYTES) + ENDS_BYTES
        found = read(mesh, {LATENCY_HIDING: hiding}, bucket_bytes=nbytes, **how)
        sent, exposed = sum(found.beside + found.exposed), sum(found.exposed)
        table.add_row(
            "on" if hiding else "off",
            how["algorithm"],
            "yes" if how.get("in_order") else "no",
            f"{len(found.beside)} of {nbytes / 2**20:.1f} MiB",
            str(sum(map(bool, found.beside))),
            f"{sent / 2**20:.0f} MiB",
            f"{exposed / 2**20:.0f} MiB ({exposed / sent:.0%})",
        )
    rich.console.Console(width=110).print(table)  # Also where nobody looks.


if __name__ == "__main__":
    main()
