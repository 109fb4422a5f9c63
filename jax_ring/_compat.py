"""The only module that touches private JAX names.

Checked on jax 0.10.2 and 0.12.1. What each is for:

- `config._check_vma`: whether the surrounding `shard_map` checks varying types.
- `config.auto_pcast`: whether an invarying operand may be cast to varying silently.
- `core.NamedAxisEffect`: the effect by which a primitive says that it uses a named axis.
- `parallel._check_axis_names`: lax's own check that axes are bound and collectives allowed.
- `dispatch.apply_primitive`: evaluates a primitive eagerly, as lax's own are.
- `ManualAxisType.update` and `ShapedArray.update`: result types made from operand types.
- `distributed.global_state`: the key-value store of the coordination service, and what JAX shuts
  down when Python exits.
- `source_info_util.current`: the traceback of the equation that is lowered.
- the event by which `jax.monitoring` tells that a program was lowered, and `lib.mlir.ir`, to read
  its operations.
- `module_context.axis_context` of a lowering, and `SPMDAxisContext`: which mesh axes are manual.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr as ClosedJaxpr  # type: ignore[attr-defined]
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

OLDEST_JAX = "0.10.2"
NEWEST_CHECKED_JAX = "0.12.1"

try:
    from jax._src import config as _config
    from jax._src import core as _core
    from jax._src import dispatch as _dispatch
    from jax._src import distributed as _distributed
    from jax._src import sharding_impls as _sharding_impls
    from jax._src import source_info_util as _source_info
    from jax._src.lax import parallel as _parallel
    from jax._src.lib.mlir import ir as _ir  # type: ignore[attr-defined]

    _CHECK_VMA = _config._check_vma
    _AUTO_PCAST = _config.auto_pcast
    _NAMED_AXIS_EFFECT = _core.NamedAxisEffect
    _CHECK_AXIS_NAMES: Any = _parallel._check_axis_names
    _APPLY_PRIMITIVE = _dispatch.apply_primitive
    _BATCHERS = batching.fancy_primitive_batchers
    _DISTRIBUTED: Any = _distributed.global_state
    _SPMD_CONTEXT: Any = _sharding_impls.SPMDAxisContext
    _SOURCE: Any = _source_info.current
    _ADVANCE: Any = _ir.WalkResult.ADVANCE
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


def varying_struct(shape: tuple[int, ...], dtype: Any, *avals: Aval) -> jax.ShapeDtypeStruct:
    """A shape that varies where any of the types does. A bare one would type as replicated."""
    axes = frozenset[str]().union(*(varying(aval) for aval in avals))
    kind = avals[0].manual_axis_type.update(varying=axes)
    sharding = avals[0].sharding.update(spec=(None,) * len(shape))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=kind)


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A collective that becomes part of a program.

    Attributes:
      primitive: of the collective.
      aval: the type of its operand.
      params: its parameters.
      mesh: the mesh, concrete where JAX knows it; None outside of `shard_map`.
      module: the program, which is not yet complete.
      traceback: of its call, or None.
    """

    primitive: Primitive
    aval: Aval
    params: Mapping[str, Any]
    mesh: Any
    module: Any
    traceback: Any


class _Collective(Primitive):
    """From jax 0.12.1 on unreduced values become varying ones before a program is lowered."""

    def is_high(self, *avals: Any, **_: Any) -> bool:
        return any(getattr(aval, "is_high", False) for aval in avals)

    def to_lojax(self, *values: Any, **params: Any) -> Any:
        untyped: Any = self
        avals = [jax.typeof(value) for value in values]
        types, _ = untyped.abstract_eval(*avals, **params)
        lowered = [aval.lower_val(x)[0] for aval, x in zip(avals, values, strict=True)]
        if "dimension" in params:
            # One for each explicit axis over which the value is unreduced comes first.
            params["dimension"] += len(avals[0].sharding.spec.unreduced)
        results = untyped.bind(*lowered, **params)
        if not self.multiple_results:
            return types.raise_val(results)
        return [aval.raise_val(y) for aval, y in zip(types, results, strict=True)]


def collective_primitive(
    name: str,
    *,
    abstract_eval: Callable[..., tuple[Aval, set[Any]]],
    body: Callable[..., Any],
    lowered: Callable[[Lowering], None],
    batch: Callable[..., tuple[Any, Any]],
    transpose: Callable[..., Any] | None = None,
    jvp: Callable[..., tuple[Any, Any]] | None = None,
    multiple_results: bool = False,
) -> Primitive:
    """Makes a collective primitive, of an operand and perhaps a seed to round it by.

    Args:
      name: shown in jaxprs.
      abstract_eval: `(aval, *seed, **params) -> (aval, effects)`.
      body: `(x, *seed, **params) -> y`, traced when the primitive is lowered.
      lowered: is told when that happens, in a program once for all that are alike.
      batch: `(axis_data, values, dims, **params) -> (value, dim)`, for vmapped dimensions and for
        vmapped named axes alike.
      transpose: `(cotangent, x, **params) -> (cotangent,)` of the linear primitive; if None there
        are no derivatives.
      jvp: `(primals, tangents, **params)`; the tangents of a seed mean nothing.
      multiple_results: whether `abstract_eval` and `body` give a tuple of results.

    Returns:
      The primitive.
    """
    body, batch = _with_casts(body), _with_casts(batch)
    made = _Collective(name)
    primitive: Any = made
    primitive.multiple_results = multiple_results
    primitive.def_impl(functools.partial(_APPLY_PRIMITIVE, primitive))
    primitive.def_effectful_abstract_eval(abstract_eval)
    lower = mlir.lower_fun(body, multiple_results=multiple_results)

    def lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
        context = ctx.module_context
        mesh = getattr(context.axis_context, "mesh", None)
        lowered(
            Lowering(primitive, ctx.avals_in[0], params, mesh, context.module, _SOURCE().traceback)
        )
        avals = [_as_varying(aval) for aval in ctx.avals_in]
        return lower(ctx.replace(avals_in=avals), *operands, **params)

    mlir.register_lowering(primitive, lowering)
    if transpose is not None:
        ad.deflinear2(primitive, transpose)
    if jvp is not None:
        ad.primitive_jvps[primitive] = _with_casts(jvp)
    _BATCHERS[primitive] = batch
    return made


def local_primitive(
    name: str,
    *,
    result: Callable[..., tuple[tuple[int, ...], Any]],
    body: Callable[..., jax.Array],
    native: Mapping[str, Callable[..., jax.Array]],
    wanted: Callable[..., bool],
    batch: Callable[..., tuple[Any, Any]],
) -> Primitive:
    """Makes a primitive without communication that is a custom call where that is right.

    That is decided when it is lowered: where the partitioner has no axes of its own to shard the
    operands over, since it gathers the operands of a custom call, and where nothing is exported;
    elsewhere `body` is traced.

    Args:
      name: shown in jaxprs.
      result: `(*avals, **params) -> (shape, dtype)`; the result varies where any operand does.
      body: `(*operands, **params) -> y`, plain JAX.
      native: for each platform that may have one, the same with a custom call.
      wanted: `(platform, *avals, **params)`, whether the custom call is preferred there.
      batch: `(values, dims, **params) -> (value, dim)`.

    Returns:
      The primitive.
    """
    primitive = Primitive(name)
    primitive.def_impl(functools.partial(_APPLY_PRIMITIVE, primitive))

    def abstract_eval(*avals: Aval, **params: Any) -> Aval:
        shape, dtype = result(*avals, **params)
        axes = frozenset[str]().union(*(varying(aval) for aval in avals))
        plain = avals[0].sharding.update(spec=(None,) * len(shape))
        return retype(avals[0], varying=axes, shape=shape, dtype=dtype, sharding=plain)

    primitive.def_abstract_eval(abstract_eval)
    plain = mlir.lower_fun(_with_casts(body), multiple_results=False)
    mlir.register_lowering(primitive, plain)
    for platform, call in native.items():
        custom = mlir.lower_fun(_with_casts(call), multiple_results=False)

        def lowering(
            ctx: Any,
            *operands: Any,
            custom: Any = custom,
            platform: str = platform,
            **params: Any,
        ) -> Any:
            possible = _unpartitioned(ctx) and not _for_export(ctx)
            use = possible and wanted(platform, *ctx.avals_in, **params)
            return (custom if use else plain)(ctx, *operands, **params)

        mlir.register_lowering(primitive, lowering, platform=platform)
    batching.primitive_batchers[primitive] = _with_casts(batch)
    return primitive


def _for_export(ctx: Any) -> bool:
    """Whether the program is exported: a custom call would tie it to where there is a handler."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def _unpartitioned(ctx: Any) -> bool:
    """Whether what is lowered here is the program of one device: nothing is left to partition."""
    context = ctx.module_context.axis_context
    if isinstance(context, _SPMD_CONTEXT):
        sizes = context.mesh.shape
        return all(size == 1 or axis in context.manual_axes for axis, size in sizes.items())
    return getattr(context, "num_devices", None) == 1


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


def mesh_inside(eqn: JaxprEqn) -> Any:
    """The abstract mesh in force in the body of a `shard_map`, from its equation in a jaxpr.

    The names of the parameters are JAX's own business; checked on jax 0.10.2 and 0.12.1.
    """
    manual = dict.fromkeys(eqn.params["newly_manual_axes"], AxisType.Manual)
    return eqn.params["mesh"].abstract_mesh.update_axis_types(manual)


def platform() -> str:
    """The platform of the mesh that is in force, else JAX's default one.

    An abstract mesh made from devices knows their platform (jax 0.10.2 to 0.12.1), one made by
    hand does not.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    found = getattr(device, "platform", None)
    return found if isinstance(found, str) else str(jax.default_backend())


def coordination_client() -> Any:
    """The client of `jax.distributed`'s coordination service; None before it is initialized."""
    return _DISTRIBUTED.client


def coordinator_address() -> str | None:
    """Host and port of that service, where it is initialized."""
    address = _DISTRIBUTED.coordinator_address
    return None if address is None else str(address)


def abandon_coordination() -> None:
    """Keeps the exit of JAX from waiting for other processes, which it does by these two objects.

    They live as long as the process: the destructor of the one waits too, that of the other, which
    process 0 has, aborts the other processes.
    """
    for owned in (_DISTRIBUTED.client, _DISTRIBUTED.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))
    _DISTRIBUTED.client = _DISTRIBUTED.service = None


# --- programs -------------------------------------------------------------------------------------

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMMUNICATES = (
    *("stablehlo.collective_permute", "stablehlo.all_reduce", "stablehlo.all_gather"),
    *("stablehlo.reduce_scatter", "stablehlo.all_to_all", "stablehlo.collective_broadcast"),
)
_WITH_WHOM = ("source_target_pairs", "replica_groups")


def on_lowered(listener: Callable[[str], None]) -> None:
    """Calls a function, from now on, with the name of each program whose lowering is complete.

    It is called in the thread that lowers.
    """

    def heard(event: str, duration_secs: float, **details: Any) -> None:
        del duration_secs
        if event != _LOWERED:
            return
        try:
            listener(str(details.get("fun_name", "")))
        except Exception as error:
            # JAX compiles meanwhile, which nothing here may stop.
            warnings.warn(f"jax_ring: a program was not noted: {error!r}", stacklevel=2)

    jax.monitoring.register_event_duration_secs_listener(heard)


def communication(module: Any) -> list[str] | None:
    """What a lowered program sends, in its order: operations, types, and who sends to whom.

    The body of a loop counts once, called functions count at each call. None as long as the
    program is not complete: while one is lowered JAX may lower another.
    """
    functions = {
        op.attributes["sym_name"].value: op
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    texts: dict[str, list[str]] = {}

    def of(name: str) -> list[str]:
        if name not in texts:
            texts[name] = [text for op in _calls_and_sends(functions[name]) for text in each(op)]
        return texts[name]

    def each(op: Any) -> list[str]:
        if op.name == "func.call":
            return of(op.attributes["callee"].value)
        with_whom = [str(op.attributes[n]) for n in _WITH_WHOM if n in op.attributes]
        return [" ".join([op.name, *(str(x.type) for x in op.operands), *with_whom])]

    complete = all(_ends(function) for function in functions.values())
    return of("main") if complete and "main" in functions else None


def _ends(function: Any) -> bool:
    """Whether the last operation of a function, if it has a body, returns."""
    blocks = function.regions[0].blocks
    operations = blocks[0].operations if len(blocks) else ()
    return len(operations) > 0 and operations[len(operations) - 1].name == "func.return"


def _calls_and_sends(function: Any) -> list[Any]:
    found = []

    def see(op: Any) -> Any:
        if op.name == "func.call" or op.name in _COMMUNICATES:
            found.append(op)
        return _ADVANCE

    function.operation.walk(see)
    return found
