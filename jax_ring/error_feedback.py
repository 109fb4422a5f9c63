"""Error feedback: what a lossy wire loses in one step is added to the next.

Each rank keeps, for each leaf, a residual of the leaf's shape: what its own messages lost. Summed
over the ranks it is exactly what the results lack, so that the results of many steps and the last
residuals add up to the exact sums; without it, an error that is the same in each step grows with
the number of steps.

The residual is a pytree like the gradients, in float32: keyed by leaf and not by bucket, it can be
carried through `jit`, saved with the rest of the state, and taken to another number of ranks by
`redistribute`. A loss that is not finite is dropped, so that one bad step does not stay.

Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes",
2019; the residual of the summed chunk, which its owner keeps, as in Tang et al., "DoubleSqueeze",
2019.

Example:
  >>> import jax, jax.numpy as jnp
  >>> from jax_ring import error_feedback
  >>> from jax.sharding import PartitionSpec as P
  >>> mesh = jax.sharding.Mesh(jax.devices(), "data")
  >>> @jax.jit
  ... @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")))
  ... def mean(gradient, residual):
  ...     return error_feedback.pmean(gradient, residual, "data", wire="int4")
  >>> gradient = jnp.linspace(0.0, 1.0, 8 * 16)
  >>> residual = error_feedback.init(gradient)
  >>> total = jnp.zeros(16)
  >>> for _ in range(100):
  ...     average, residual = mean(gradient, residual)
  ...     total += average
  >>> error = total / 100 - gradient.reshape(8, 16).mean(0)
  >>> print(bool(abs(error).max() < 1e-3))
  True
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_ring import arguments, primitives
from jax_ring.arguments import Algorithm, AxisName, Call, Wire
from jax_ring.executor import Array
from jax_ring.plan import plan
from jax_ring.schedules import Kind

Tree = TypeVar("Tree")


def init(x: Tree) -> Tree:
    """The residual to start with.

    Args:
      x: pytree of arrays, or of their shapes (`jax.ShapeDtypeStruct`).

    Returns:
      The same tree of zeros, in float32.
    """
    zeros: Tree = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), x)
    return zeros


def psum(
    x: Tree, residual: Tree, axis_name: AxisName, *, wire: Wire, algorithm: Algorithm = "auto"
) -> tuple[Tree, Tree]:
    """`jax_ring.psum` over a lossy wire, with error feedback.

    Args:
      x: pytree of real floating-point arrays.
      residual: the same tree in float32: `init` at first, then what the last call returned.
      axis_name: as `jax_ring.psum`.
      wire: a name in `jax_ring.wire` or a `WireFormat`.
      algorithm: as `jax_ring.psum`; one that completes each sum on one rank, such as "direct" (the
        default) or "ring".

    Returns:
      The sums of x, as from `jax_ring.psum`, and the new residual, which varies over `axis_name`.
      It has no derivative.

    Raises:
      NameError, ValueError, TypeError: as `jax_ring.psum`; ValueError also if x and residual differ
        in structure or shape, or the algorithm does not fit.
    """
    return _all_reduce(x, residual, axis_name, "psum", "sum", wire, algorithm)


def pmean(
    x: Tree, residual: Tree, axis_name: AxisName, *, wire: Wire, algorithm: Algorithm = "auto"
) -> tuple[Tree, Tree]:
    """`jax_ring.pmean` over a lossy wire, with error feedback.

    Args:
      x: as `psum`.
      residual: as `psum`.
      axis_name: as `psum`.
      wire: as `psum`.
      algorithm: as `psum`.

    Returns:
      The means of x, and the new residual: the mean of which is what the means lack.

    Raises:
      NameError, ValueError, TypeError: as `psum`.
    """
    return _all_reduce(x, residual, axis_name, "pmean", "mean", wire, algorithm)


def redistribute(residual: Tree, ranks: int, *, mean: bool = True) -> Tree:
    """The residuals of all ranks for another number of ranks, after a change of the mesh.

    Args:
      residual: pytree of arrays [old ranks, ...]: the residuals of all ranks, stacked.
      ranks: the new number.
      mean: whether they belong to `pmean`, whose results lack the mean of the residuals; else the
        sum of them.

    Returns:
      The tree of arrays [ranks, ...], with the same mean, or the same sum.

    Raises:
      ValueError: if there are no ranks.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ring import error_feedback
      >>> print(error_feedback.redistribute(jnp.array([[1.0], [3.0]]), 4)[:, 0])
      [2. 2. 2. 2.]
      >>> print(error_feedback.redistribute(jnp.array([[1.0], [3.0]]), 4, mean=False)[:, 0])
      [1. 1. 1. 1.]
    """
    if ranks < 1:
        raise ValueError(f"error_feedback.redistribute: ranks must be at least 1, got {ranks}")

    def spread(leaf: Any) -> Any:
        share = leaf.mean(0) if mean else leaf.sum(0) / ranks
        return jnp.broadcast_to(share, (ranks, *leaf.shape[1:]))

    result: Tree = jax.tree.map(spread, residual)
    return result


def _all_reduce(
    x: Tree,
    residual: Tree,
    axis_name: AxisName,
    api: str,
    op: str,
    wire: Wire,
    algorithm: Algorithm,
) -> tuple[Tree, Tree]:
    call = arguments.parse(
        f"error_feedback.{api}",
        x,
        axis_name,
        Kind.ALL_REDUCE,
        op=op,
        axis_index_groups=None,
        algorithm=algorithm,
        reduce_dtype=None,
        wire=wire,
    )
    _check(call, x, residual)
    if not call.axes:
        return x, residual
    leaves, tree = jax.tree.flatten(x)
    pairs = [
        _leaf(call, leaf, before, i)
        for i, (leaf, before) in enumerate(zip(leaves, jax.tree.leaves(residual), strict=True))
    ]
    sums, lost = (jax.tree.unflatten(tree, part) for part in zip(*pairs, strict=True))
    return sums, lost


def _leaf(call: Call, leaf: Any, before: Any, position: int) -> tuple[Array, Array]:
    x = arguments.as_array(call, leaf)
    wide, _ = arguments.operand(call, x.astype(jnp.float32) + before)
    total, lost = primitives.all_reduce_feedback_p.bind(
        wide,
        *arguments.seed(call, position),
        axes=call.axes,
        mean=call.mean,
        method=call.method,
    )
    return total.astype(x.dtype), lost


def _check(call: Call, x: Any, residual: Any) -> None:
    if call.method.wire is None:
        raise ValueError(f"{call.name}: wire must be a format, got None, which loses nothing")
    if not jax.tree.leaves(x):
        raise ValueError(f"{call.name}: x has no leaves")
    if call.axes:
        schedule = call.method.schedule(Kind.ALL_REDUCE, call.size)
        state = plan(schedule)
        alone = any(len(step.perm) < schedule.ranks for step in schedule.steps)
        if state.redundant or state.reencodes or alone:
            raise ValueError(
                f"{call.name}: algorithm={schedule!r} completes a sum on several ranks, encodes it "
                "more than once or leaves ranks out of a step, so that it is not known what was "
                "lost where; 'direct' and 'ring' do not"
            )
    wanted: Any = jax.tree.structure(x)
    if wanted != jax.tree.structure(residual):
        raise ValueError(
            f"{call.name}: residual must be a tree like x, {wanted}, got "
            f"{jax.tree.structure(residual)}"
        )
    for leaf, before in zip(jax.tree.leaves(x), jax.tree.leaves(residual), strict=True):
        dtype = jax.dtypes.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{call.name}: x must be of real floats, got a leaf of dtype {dtype}")
        if jnp.shape(leaf) != jnp.shape(before):
            raise ValueError(
                f"{call.name}: residual has a leaf of shape {jnp.shape(before)}, where x has "
                f"{jnp.shape(leaf)}"
            )
