"""Data parallelism for jitted programs whose arrays carry shardings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jax_ring.arguments import AxisName, names_of
from jax_ring.gradients.accumulate import Step, accumulate_gradients


def data_parallel(
    loss_fn: Callable[[Any, Any], Any],
    mesh: Mesh | None = None,
    axis_name: AxisName = "data",
    *,
    microbatches: int = 1,
    weighted: bool = False,
    **how: Any,
) -> Step:
    """The loss and gradients of a batch that is sharded over an axis, reduced by jax_ring.

    What `jax.value_and_grad(loss_fn)` is under `jax.jit`, where the compiler would reduce the
    gradients over the ranks by its own all-reduce. Here the loss and its gradients are computed in
    a `jax.shard_map` that is manual over `axis_name` alone; the other axes of the mesh stay with
    the compiler, or with the types of the arrays where these axes are explicit. So tensor
    parallelism in the model goes on as it was. (jax 0.10.2 gathers what is sharded over explicit
    axes where it enters and leaves the `shard_map`; newer ones do not.)

    Loss functions of any library will do that are functions of a pytree: split the arrays that are
    learned from the rest of a flax or equinox model first (`nnx.split`, `eqx.partition`), and join
    them in the loss function. Values that the loss function closes over are the same on all ranks.

    Args:
      loss_fn: (params, this rank's part of the batch) -> its mean loss, a real scalar; with
        `weighted` a pair of that and its weight, as `accumulate_gradients`.
      mesh: the mesh; None for that of `jax.set_mesh`.
      axis_name: the axis of the mesh, or axes, that the batch is sharded over and the parameters
        are not. Where the axis is explicit, their types must say so.
      microbatches: as `accumulate_gradients`: into how many parts each rank cuts its batch.
      weighted: as `accumulate_gradients`.
      **how: as `sync_gradients`, but op: it takes the mean.

    Returns:
      A function (params, batch) -> (loss, gradients), to be called under `jax.jit`, or outside of
      it. All leaves of the batch are cut along their first dimension, which the number of ranks
      times microbatches must divide. The loss is a float32 scalar, the mean over all examples; the
      gradients are like params, sharded over the other axes as the compiler or the types say.

    Raises:
      ValueError: if the mesh has no such axis, scatter is given, and as `accumulate_gradients`.

    Complexity: as `sync_gradients`. On a mesh with other axes than `axis_name` each leaf has a
    bucket to itself.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ring.gradients import data_parallel
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], "data")
      >>> step = data_parallel(lambda w, x: (w * x).mean(), mesh)
      >>> loss, gradient = jax.jit(step)(jnp.float32(2.0), jnp.arange(8.0))
      >>> print(loss, gradient)
      7.0 3.5
    """
    if how.get("scatter") is not None:
        raise ValueError(
            "data_parallel: scatter must not be given, as the gradients are returned whole, got "
            f"{how['scatter']!r}; for gradients in parts use accumulate_gradients in a shard_map"
        )
    axes = names_of(axis_name)
    known = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).axis_names
    missing = [axis for axis in axes if axis not in known]
    if missing or not axes:
        raise ValueError(
            f"data_parallel: axis_name must name axes of the mesh, which are {known}, got "
            f"{axis_name!r}" + ("" if known else "; pass mesh, or call it under jax.set_mesh")
        )
    step = accumulate_gradients(
        loss_fn, microbatches, axis_name=axis_name, weighted=weighted, **how
    )
    batch = PartitionSpec(axes)
    mapped: Step = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), batch),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
    )
    return mapped
