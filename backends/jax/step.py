"""Two JAX primitives: a step of a plan, and the joint tangent of a step in both of its operands.

The step runs any op in a named implementation. Its rules make steps again: the tangent of a step is a step with a
tangent in an operand's place, its transpose is a step by the transposed spec, and `vmap` adds an axis to the spec. So
JAX keeps for a backward pass what these steps read, the other operand, and nothing else.

Some implementations compute the gradients of both operands in one loop. For these the tangent is a single primitive,
linear in both tangents together, whose transpose is that loop. The two primitives bind each other, so they share a
module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from planner.backends.jax.evaluation import (
    NARROW,
    PLATFORMS,
    Mode,
    Shape,
    cast,
    evaluate,
    input_count,
    split_row,
    wide_types,
)
from planner.backends.jax.guards import Guards, batch_guard
from planner.backends.jax.index import check_values
from planner.backends.jax.partition import devices_of, devices_wanted
from planner.backends.jax.typed import result_type, varying_alike
from planner.language.derive import batched, transpose
from planner.program.build import Lowerer
from planner.program.ops import Cast, Einsum, Guard, JointGradient, Op


class _StepPrimitive(Primitive):
    """A primitive that can be called inside of `shard_map`, and is told for which devices it is lowered.

    It needs not be told if XLA splits what it does, see `split_row`.
    """

    def bind(self, *arguments: Any, **parameters: Any) -> Any:
        if "devices" not in parameters:
            parameters["devices"] = None if _split_row(**parameters) else devices_wanted(arguments)
        return super().bind(*varying_alike(arguments), **parameters)


def _split_row(op: Op, guards: Guards, lowering: str = "matmul", **_: Any) -> str | None:
    """Return the row of JAX's own operation for a step without index arrays, see `split_row`."""
    return None if guards.arrays else split_row(op, lowering)


# Both primitives take the parameters op, mode, views (shapes of the results as the caller sees them) and guards. The
# step also takes `lowering`, the name of its implementation. Their arguments end with the index arrays, in the order of
# `guards.arrays`. The primitives add the parameter `devices` themselves, see `devices_wanted`.
step_p = _StepPrimitive("planner_step")
step_p.multiple_results = True
tangent_p = _StepPrimitive("planner_tangent")


def bind_step(op: Op, arguments: Sequence[Any], mode: Mode, views: tuple[Shape, ...], guards: Guards) -> list[Any]:
    """Compute a step by binding the primitive, and return its results.

    Args:
        op: the op.
        arguments: its inputs, then the index arrays of `guards`.
        mode: the index mode, the precision, and what chooses the implementation. If no precision was asked for, it is
            the default precision of the current context, as in `jax.lax.dot_general`.
        views: the shapes of the results.
        guards: the guards of the inputs and results.
    """
    if mode.precision is None and (precision := jax.config.jax_default_matmul_precision) is not None:  # type: ignore[attr-defined]
        mode = mode._replace(precision=precision)
    assert mode.lower is not None
    lowering = mode.lower(op).lowering
    results: list[Any] = step_p.bind(*arguments, op=op, lowering=lowering, mode=mode, views=views, guards=guards)
    return results


@lru_cache(maxsize=4096)
def compile_step(**parameters: Any) -> Callable[..., list[Any]]:
    """Return the step with these parameters, jitted. Its kernels are chosen for the platform that it is lowered for."""

    def planner_step(*arguments: Any) -> list[Any]:
        if any(isinstance(x, jax.core.Tracer) for x in arguments):
            results: list[Any] = step_p.bind(*arguments, **parameters)
            return results
        return _run_untraced(arguments, parameters)

    return jax.jit(planner_step)


def _run_untraced(arguments: Sequence[Any], parameters: Mapping[str, Any]) -> list[Any]:
    """Run a jitted step that JAX calls with arrays instead of tracers. JAX does so in two cases.

    Under `jax.disable_jit` the step is compiled all the same, as JAX compiles its own primitives. Under
    `jax.debug_nans` and `jax.debug_infs` JAX calls the function again if a result holds NaN or infinity, to find the
    operation that made it. Then this function raises.

    Raises:
        IndexRangeError: an index is out of range, and the NaN marks the results that depend on it.
        FloatingPointError: the NaN or the infinity comes from the operands.
    """
    config: Any = jax.config
    if config.jax_disable_jit:
        with jax.disable_jit(False):
            return compile_step(**parameters)(*arguments)
    op: Op = parameters["op"]
    raw = dict(zip(parameters["guards"].arrays, arguments[input_count(op) :], strict=True))
    if parameters["mode"].index_mode == "raise":
        for gather in op.gathers:
            check_values(raw[gather.array], gather)
    held = " or ".join(name for name, on in (("nan", config.jax_debug_nans), ("inf", config.jax_debug_infs)) if on)
    raise FloatingPointError(f"invalid value ({held}) encountered in planner's step {str(op.spec)!r}")


@step_p.def_impl
def _step_impl(*arguments: Any, mode: Mode, **parameters: Any) -> list[Any]:
    return compile_step(mode=mode._replace(lower=None), **parameters)(*arguments)


@step_p.def_abstract_eval
def _step_abstract(*arguments: Any, op: Op, views: tuple[Shape, ...], **_: Any) -> list[Any]:
    return [result_type(view, op.dtype, arguments) for view in views]


def _step_lowering(context: Any, *values: Any, platform: str = "", **parameters: Any) -> Any:
    devices = devices_of(context)
    # Pallas kernels run on one device: XLA cannot partition them.
    function = partial(evaluate, platform=platform, pallas=devices != "unknown", several=devices == "several")
    if devices != "one" and (row := _split_row(**parameters)):
        function, parameters = partial(evaluate, platform=platform), {**parameters, "lowering": row}
    # Inside of `shard_map` types say over which axes values vary. The constants that a step makes vary over none, and
    # would not fit; so types without axes are used inside the step.
    if any(aval.mat.varying for aval in context.avals_in):
        context = context.replace(avals_in=[jax.core.ShapedArray(x.shape, x.dtype) for x in context.avals_in])
    # A function may be lowered outside of the context in which its 64-bit steps were traced.
    wide = wide_types() or any(aval.dtype.name in NARROW for aval in (*context.avals_in, *context.avals_out))
    # Under `disable_jit` each turn of a loop would be traced by itself. How strictly the caller's own operations
    # promote is no concern of what a step does inside.
    with (
        jax.disable_jit(False),
        jax.enable_x64(wide),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        return mlir.lower_fun(function, multiple_results=True)(context, *values, **parameters)


# Equal steps of a program share one private function.
mlir.register_lowering(step_p, _step_lowering, inline=False)
for _platform in PLATFORMS:
    mlir.register_lowering(step_p, partial(_step_lowering, platform=_platform), platform=_platform, inline=False)


def gradient_op(op: Op, child: int) -> Op:
    """Return the op that computes the gradient of one operand. A guard is its own."""
    if isinstance(op, Guard):
        return op
    return Einsum(transpose(op.spec, child), op.dtype)


# The inputs of a joint gradient are (output gradient, a, b). These are the inputs, among them, of the steps that
# compute the gradient of a alone, and that of b alone.
SINGLE_GRADIENT_INPUTS = ((0, 2), (1, 0))


def _is_nonzero(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero)


def _step_jvp(primals: Any, tangents: Any, *, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any) -> Any:
    results = bind_step(op, primals, mode, views, guards)
    count = input_count(op)
    active = [i for i in range(count) if _is_nonzero(tangents[i])]
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    if not active:
        return results, zeros
    if not isinstance(op, JointGradient):
        return results, [_multilinear(op, primals, tangents, active, mode, views, guards)]
    # Each of both gradients is a step of its own, bilinear in the output gradient and the other operand.
    result_tangents = []
    for child, places in enumerate(SINGLE_GRADIENT_INPUTS):
        single_tangents = [tangents[place] for place in places]
        single_active = [i for i in (0, 1) if _is_nonzero(single_tangents[i])]
        if not single_active:
            result_tangents.append(zeros[child])
            continue
        single_primals = [*(primals[place] for place in places), *primals[count:]]
        single, view, single_guards = gradient_op(op, child), (views[child],), guards.transposed(child)
        result_tangents.append(
            _multilinear(single, single_primals, single_tangents, single_active, mode, view, single_guards)
        )
    return results, result_tangents


def _multilinear(
    op: Op,
    primals: Any,
    tangents: Any,
    active: Sequence[int],
    mode: Mode,
    views: Any,
    guards: Guards,
) -> Any:
    """Return the tangent of a step: the sum, over its active operands, of the step with the operand's tangent in place.

    Active operands are those whose tangent is not zero.
    """
    count = input_count(op)
    if len(active) == 2 and _joint(op, mode.lower):
        return tangent_p.bind(
            *primals[:count],
            *tangents[:count],
            *primals[count:],
            op=op,
            mode=mode,
            views=views,
            guards=guards,
        )
    parts: list[Any] = []
    for i in active:
        swapped = list(primals)
        swapped[i] = tangents[i]
        parts += bind_step(op, swapped, mode, views, guards)
    return reduce(ad.add_jaxvals, parts)


def _joint(op: Op, lower: Lowerer | None) -> bool:
    """Return whether both gradients of a step are one step."""
    assert lower is not None
    return len(op.spec.inputs) == 2 and len(lower.gradients(op, (True, True))) == 1


def _step_transpose(cotangents: Any, *arguments: Any, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any) -> Any:
    count = input_count(op)
    linear = [i for i in range(count) if ad.is_undefined_primal(arguments[i])]
    results: list[Any] = [None] * len(arguments)
    if all(isinstance(ct, ad.Zero) for ct in cotangents):
        for i in linear:
            results[i] = ad.Zero(arguments[i].aval)
        return results
    (i,) = linear
    shape = arguments[i].aval.shape
    indices = arguments[count:]
    if isinstance(op, JointGradient):
        # Both gradients are linear in the output gradient. Their transpose is the forward step, summed over the
        # operands, with a tangent in the operand's place: the joint tangent.
        _, a, b = arguments[:count]
        ga, gb = (ad.instantiate_zeros(ct) for ct in cotangents)
        forward = Einsum(op.spec, op.dtype)
        results[0] = tangent_p.bind(a, b, ga, gb, *indices, op=forward, mode=mode, views=(shape,), guards=guards)
        return results
    if isinstance(op, Cast):
        raise AssertionError("casts are convert_element_type")
    swapped = list(arguments)
    swapped[i] = cotangents[0]
    # The cotangent has the shape that the caller sees. The step reshapes its inputs itself.
    (gradient,) = bind_step(gradient_op(op, i), swapped, mode, (shape,), guards.transposed(i))
    results[i] = _cast_back(gradient, arguments[i])
    return results


def _cast_back(gradient: Any, argument: Any) -> Any:
    """Return a gradient in the dtype of its argument, which the step may have cast; see `Cast.fused`."""
    return cast(gradient, argument.aval.dtype)


def _batch_in_front(arguments: Any, dims: Any) -> tuple[int, list[Any], list[bool]]:
    """Return the size of the batch, the arguments with its axis in front, and which of them have it."""
    size = next(x.shape[d] for x, d in zip(arguments, dims, strict=True) if d is not None)
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(arguments, dims, strict=True)]
    return size, moved, [d is not None for d in dims]


def _step_batch(arguments: Any, dims: Any, *, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any) -> Any:
    count = input_count(op)
    size, moved, mapped = _batch_in_front(arguments, dims)
    if isinstance(op, JointGradient):
        gradients = []
        for child, places in enumerate(SINGLE_GRADIENT_INPUTS):
            inputs = [*(moved[p] for p in places), *moved[3:]]
            inputs_mapped = [*(mapped[p] for p in places), *mapped[3:]]
            single, view, single_guards = gradient_op(op, child), views[child], guards.transposed(child)
            gradients.append(_bind_batched(single, inputs, inputs_mapped, 2, size, mode, view, single_guards))
        return gradients, [0, 0]
    result = _bind_batched(op, moved, mapped, count, size, mode, views[0], guards)
    return [result], [0]


def _bind_batched(
    op: Op,
    arguments: Sequence[Any],
    mapped: Sequence[bool],
    count: int,
    size: int,
    mode: Mode,
    view: Shape,
    guards: Guards,
) -> Any:
    """Bind a step whose mapped arguments have a leading batch axis; its result has one too.

    If none of the step's own arguments is mapped, its result is repeated along that axis.
    """
    operands = [i for i in range(count) if mapped[i]]
    mapped_arrays = [name for name, is_mapped in zip(guards.arrays, mapped[count:], strict=True) if is_mapped]
    arguments = list(arguments)
    for i in guards.to_repeat(op, operands, mapped_arrays):
        arguments[i] = jnp.broadcast_to(arguments[i], (size, *arguments[i].shape))
        operands.append(i)
    arrays = [name for name in mapped_arrays if name in op.spec.arrays]
    has_axis = bool(operands or arrays)
    guards = guards.batched(size, operands, mapped_arrays, has_axis)
    if not has_axis:
        (result,) = bind_step(op, arguments, mode, (view,), guards)
        return jnp.broadcast_to(result, (size, *view))
    if isinstance(op, Guard):
        wide: Op = batch_guard(op, size, True, mapped_arrays)
    else:
        wide = Einsum(batched(op.spec, size, operands, arrays), op.dtype)
    (result,) = bind_step(wide, arguments, mode, ((size, *view),), guards)
    return result


ad.primitive_jvps[step_p] = _step_jvp
ad.primitive_transposes[step_p] = _step_transpose
batching.primitive_batchers[step_p] = _step_batch


# -- the joint tangent of a binary step f: f(da, b) + f(a, db) -----------------------------------------

# The positions of its arguments; index arrays follow.
A, B, DA, DB = range(4)
# The arguments of each of its two steps.
TANGENT_STEPS = ((DA, B), (A, DB))


class _Role(NamedTuple):
    """What an argument of the joint tangent is in the one of the two steps that reads it.

    Attributes:
        argument: its position.
        child: 0 or 1, the input of the step that it is.
        other: the position of the argument that is the step's other input.
    """

    argument: int
    child: int
    other: int

    def inputs(self, x: Any, arguments: Sequence[Any]) -> tuple[Any, Any]:
        """Return the step's inputs with x in the place of the argument."""
        other = arguments[self.other]
        return (x, other) if self.child == 0 else (other, x)


# In the order in which tangents are added up.
_ROLES = (_Role(DA, 0, B), _Role(B, 1, DA), _Role(A, 0, DB), _Role(DB, 1, A))


def _tangent_parts(arguments: Any, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any) -> Any:
    a, b, da, db, *indices = arguments
    (left,) = bind_step(op, (da, b, *indices), mode, views, guards)
    (right,) = bind_step(op, (a, db, *indices), mode, views, guards)
    return ad.add_jaxvals(left, right)


@tangent_p.def_impl
def _tangent_impl(*arguments: Any, **parameters: Any) -> Any:
    return _tangent_parts(arguments, **parameters)


@tangent_p.def_abstract_eval
def _tangent_abstract(*arguments: Any, op: Op, views: tuple[Shape, ...], **_: Any) -> Any:
    return result_type(views[0], op.dtype, arguments)


def _tangent_lowering(context: Any, *values: Any, **parameters: Any) -> Any:
    # The precision was fixed when the program was traced.
    with jax.default_matmul_precision(None):
        return mlir.lower_fun(_tangent_impl, multiple_results=False)(context, *values, **parameters)


mlir.register_lowering(tangent_p, _tangent_lowering)


def _tangent_jvp(primals: Any, tangents: Any, *, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any) -> Any:
    result = tangent_p.bind(*primals, op=op, mode=mode, views=views, guards=guards)
    parts: list[Any] = []
    for role in _ROLES:
        tangent = tangents[role.argument]
        if _is_nonzero(tangent):
            parts += bind_step(op, (*role.inputs(tangent, primals), *primals[4:]), mode, views, guards)
    return result, reduce(ad.add_jaxvals, parts) if parts else ad.Zero(jax.typeof(result).to_tangent_aval())


def _tangent_transpose(
    cotangent: Any, *arguments: Any, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any
) -> Any:
    results: list[Any] = [None] * len(arguments)
    a, b, da, db, *indices = arguments
    linear = [i for i in (A, B, DA, DB) if ad.is_undefined_primal(arguments[i])]
    if isinstance(cotangent, ad.Zero):
        for i in linear:
            results[i] = ad.Zero(arguments[i].aval)
        return results
    if linear == [DA, DB]:
        joint = Einsum(op.spec, op.dtype).joint_gradient()
        shapes = (da.aval.shape, db.aval.shape)
        gradients = bind_step(joint, (cotangent, a, b, *indices), mode, shapes, guards.of_gradients())
        results[DA], results[DB] = map(_cast_back, gradients, (da, db))
        return results
    for role in sorted(_ROLES):
        if role.argument in linear:
            inputs = (*role.inputs(cotangent, arguments), *indices)
            shape, role_guards = arguments[role.argument].aval.shape, guards.transposed(role.child)
            (gradient,) = bind_step(gradient_op(op, role.child), inputs, mode, (shape,), role_guards)
            results[role.argument] = _cast_back(gradient, arguments[role.argument])
    return results


def _tangent_batch(arguments: Any, dims: Any, *, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any) -> Any:
    size, moved, mapped = _batch_in_front(arguments, dims)
    parts = []
    for places in TANGENT_STEPS:
        inputs = [*(moved[p] for p in places), *moved[4:]]
        inputs_mapped = [*(mapped[p] for p in places), *mapped[4:]]
        parts.append(_bind_batched(op, inputs, inputs_mapped, 2, size, mode, views[0], guards))
    return ad.add_jaxvals(*parts), 0


ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[tangent_p] = _tangent_batch
