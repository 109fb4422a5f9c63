"""The only module that touches private JAX names.

Checked on jax 0.10.2 and 0.12.0.1. What each is for:

- `config._check_vma`: whether the surrounding `shard_map` checks varying types.
- `config.auto_pcast`: whether an invarying operand may be cast to varying silently.
- `core.NamedAxisEffect`: the effect by which a primitive says that it uses a named axis.
- `parallel._check_axis_names`: lax's own check that axes are bound and collectives allowed.
- `dispatch.apply_primitive`: evaluates a primitive eagerly, as lax's own are.
- `ManualAxisType.update` and `ShapedArray.update`: result types made from operand types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

OLDEST_JAX = "0.10.2"
NEWEST_CHECKED_JAX = "0.12.0.1"

try:
    from jax._src import config as _config
    from jax._src import core as _core
    from jax._src import dispatch as _dispatch
    from jax._src.lax import parallel as _parallel

    _CHECK_VMA = _config._check_vma
    _AUTO_PCAST = _config.auto_pcast
    _NAMED_AXIS_EFFECT = _core.NamedAxisEffect
    _CHECK_AXIS_NAMES: Any = _parallel._check_axis_names
    _APPLY_PRIMITIVE = _dispatch.apply_primitive
    _BATCHERS = batching.fancy_primitive_batchers
except (ImportError, AttributeError) as missing:
    raise ImportError(
        f"this jax_ring was checked with jax {OLDEST_JAX} to {NEWEST_CHECKED_JAX} and does not fit "
        f"the installed jax {jax.__version__} ({missing}): install a jax in that range, or a newer "
        "jax_ring"
    ) from missing

Aval = Any  # jax.core.ShapedArray; private by name, public by jax.typeof


def check_vma() -> bool:
    """Whether varying types are checked where this is called (`shard_map(check_vma=True)`)."""
    return bool(_CHECK_VMA.value)


def auto_pcast() -> bool:
    """Whether invarying operands of collectives are cast to varying silently."""
    return bool(_AUTO_PCAST.value)


def check_axis_names(axes: tuple[str, ...], api_name: str) -> None:
    """Raises NameError for an unbound axis, and lax's own error where collectives are forbidden."""
    _CHECK_AXIS_NAMES(axes, api_name)


def axis_effects(axes: Iterable[str]) -> set[Any]:
    """The effects of a primitive that communicates over axes."""
    return {_NAMED_AXIS_EFFECT(axis) for axis in axes}


def varying(aval: Aval) -> frozenset[str]:
    """The manual axes over which a value of this type varies."""
    return frozenset(aval.manual_axis_type.varying)


def unreduced(aval: Aval) -> frozenset[str]:
    """The manual axes over which a value of this type still has to be summed."""
    return frozenset(aval.manual_axis_type.unreduced)


def reduced(aval: Aval) -> frozenset[str]:
    """The manual axes over which a value is replicated, and its cotangent unreduced."""
    return frozenset(aval.manual_axis_type.reduced)


def unreduced_kind(aval: Aval) -> str:
    """What an unreduced value is missing: a sum, or in newer JAX also "max" or "min"."""
    kind = getattr(aval.manual_axis_type, "unreduced_kind", None)
    return "sum" if kind is None else str(getattr(kind, "name", kind))


def retype(
    aval: Aval,
    *,
    varying: Iterable[str],
    unreduced: Iterable[str] = (),
    reduced: Iterable[str] | None = None,
    **changes: Any,
) -> Aval:
    """A type like `aval`, with other manual axes and other fields."""
    fields: dict[str, Any] = {
        "varying": frozenset(varying),
        "unreduced": frozenset(unreduced),
    }
    if reduced is not None:
        fields["reduced"] = frozenset(reduced)
    if not fields["unreduced"] and hasattr(aval.manual_axis_type, "unreduced_kind"):
        fields["unreduced_kind"] = None
    return aval.update(manual_axis_type=aval.manual_axis_type.update(**fields), **changes)


def collective_primitive(
    name: str,
    *,
    abstract_eval: Callable[..., tuple[Aval, set[Any]]],
    body: Callable[..., jax.Array],
    transpose: Callable[..., Any],
    batch: Callable[..., tuple[Any, Any]],
    jvp: Callable[..., tuple[Any, Any]] | None = None,
) -> Primitive:
    """Makes a collective primitive with one operand and one result.

    Args:
      name: shown in jaxprs.
      abstract_eval: `(aval, **params) -> (aval, effects)`.
      body: `(x, **params) -> y`, traced when the primitive is lowered.
      transpose: `(cotangent, x, **params) -> (cotangent,)` of the linear primitive.
      batch: `(axis_data, values, dims, **params) -> (value, dim)`, for vmapped dimensions and for
        vmapped named axes alike.
      jvp: `(primals, tangents, **params)`; if None the primitive is linear.

    Returns:
      The primitive.
    """
    body, batch = _with_casts(body), _with_casts(batch)
    primitive = Primitive(name)
    primitive.def_impl(functools.partial(_APPLY_PRIMITIVE, primitive))
    primitive.def_effectful_abstract_eval(abstract_eval)
    lower = mlir.lower_fun(body, multiple_results=False)

    def lowering(ctx: Any, x: Any, **params: Any) -> Any:
        return lower(ctx.replace(avals_in=[_as_varying(a) for a in ctx.avals_in]), x, **params)

    mlir.register_lowering(primitive, lowering)
    ad.deflinear2(primitive, transpose)
    if jvp is not None:
        ad.primitive_jvps[primitive] = _with_casts(jvp)
    _BATCHERS[primitive] = batch
    return primitive


def _with_casts(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule whose own constants are cast to varying, whatever the user has set for theirs."""

    @functools.wraps(rule)
    def cast(*args: Any, **params: Any) -> Any:
        with _AUTO_PCAST(True):
            return rule(*args, **params)

    return cast


def _as_varying(aval: Aval) -> Aval:
    """An unreduced or reduced operand is, on each device, just a value that may vary."""
    pending = unreduced(aval) | reduced(aval)
    return retype(aval, varying=varying(aval) | pending, reduced=()) if pending else aval
