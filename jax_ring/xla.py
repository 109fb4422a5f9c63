"""`algorithm="xla"`: lax's own collectives, with the arguments that only ours have."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jax_ring import _compat
from jax_ring.executor import Array, Groups
from jax_ring.primitives import MAX, MIN, SUM, Axes, Reduction

_REDUCE: dict[Reduction, Callable[..., Any]] = {SUM: lax.psum, MAX: lax.pmax, MIN: lax.pmin}


def _refuse(name: str, what: str) -> str:
    return (
        f"{name}: algorithm='xla' (given, or what 'auto' stands for here) {what}; "
        "algorithm='ring' can"
    )


def scope(name: str) -> contextlib.AbstractContextManager[None]:
    """The named scope of lax's op for a collective, which profiles and `jax_ring.explain` show."""
    return jax.named_scope(f"jax_ring.{name}/xla")


def asked_for(scopes: str) -> str | None:
    """The collective in whose `scope` something is, if it is in one.

    Example:
      >>> asked_for("jit(step)/transpose(jvp(jax_ring.pmean/xla))")
      'pmean'
    """
    found = re.findall(r"\bjax_ring\.(\w+)/xla\b", scopes)
    return found[-1] if found else None


def all_reduce(
    name: str, x: Array, axes: Axes, groups: Groups | None, reduction: Reduction, dtype: Any
) -> Array:
    """`lax.psum`, `pmax` or `pmin` in a dtype, from which the result is not converted back.

    Raises:
      ValueError: for an operation that lax does not have.
      NotImplementedError: for groups where types are checked: lax refuses a sum, and types a
        maximum as replicated although it differs between groups.
    """
    if reduction not in _REDUCE:
        raise ValueError(_refuse(name, f"cannot do op={reduction.name!r}"))
    if groups is not None and _compat.check_vma():
        raise NotImplementedError(_refuse(name, "takes no axis_index_groups under check_vma=True"))
    result: Array = _REDUCE[reduction](x.astype(dtype), axes, axis_index_groups=groups)
    return result


def reduce_scatter(
    name: str,
    x: Array,
    axes: Axes,
    groups: Groups | None,
    reduction: Reduction,
    dtype: Any,
    *,
    dimension: int,
    tiled: bool,
) -> Array:
    """`lax.psum_scatter` in a dtype, from which the result is not converted back.

    Raises:
      ValueError: for an operation other than the sum.
    """
    if reduction != SUM:
        raise ValueError(_refuse(name, f"cannot scatter op={reduction.name!r}"))
    result: Array = lax.psum_scatter(
        x.astype(dtype), axes, scatter_dimension=dimension, axis_index_groups=groups, tiled=tiled
    )
    return result
