"""Each step of a plan is a primitive of ours, and its derivatives are steps again.

One primitive, the step, runs any op in a named implementation. Its derivative in forward mode is a step with a tangent
in an operand's place, or, where the gradients of both operands share a loop, one joint tangent: a primitive that is
linear in both tangents together, so that its transpose can be that loop. Transposes are transposed specs, `vmap` is
one more axis. What is kept follows from that: a step's tangent reads the other operand, and nothing else.

The two primitives bind each other, so they are one module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from planner.backends.jax.evaluation import LOWER, PLATFORMS, Mode, Shape, evaluate, input_count
from planner.backends.jax.index import check_values
from planner.backends.jax.partition import devices_of, devices_wanted
from planner.backends.jax.reads import Reads
from planner.language.derive import batched, transpose
from planner.program.ops import Cast, Einsum, JointGradient, Op

__all__ = ["bind_step", "compiled", "gradient_op"]


class _StepPrimitive(Primitive):
    """A primitive whose arguments vary alike inside of `shard_map`, and that is lowered for devices with names."""

    def bind(self, *arguments: Any, **parameters: Any) -> Any:
        return super().bind(*_varying_alike(arguments), **{"devices": devices_wanted(), **parameters})


def _varying_alike(arguments: Sequence[Any]) -> Sequence[Any]:
    """Arguments of which, inside of `shard_map`, all vary over the axes of the mesh over which one does."""
    if not any([jax.typeof(x).mat.varying for x in arguments if isinstance(x, jax.core.Tracer)]):
        return arguments
    axes = [jax.typeof(x).mat.varying if isinstance(x, jax.core.Tracer) else frozenset() for x in arguments]
    together = frozenset().union(*axes)
    missing = [tuple(together - own) for own in axes]
    return [lax.pcast(x, names, to="varying") if names else x for x, names in zip(arguments, missing, strict=True)]


def _typed(view: Shape, dtype: str, like: Any) -> Any:
    """The type of a result; inside of `shard_map` it varies as the arguments do."""
    found = jax.core.ShapedArray(view, jnp.dtype(dtype))
    if not like.mat.varying:
        return found
    sharding = like.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(view)))
    return like.update(shape=found.shape, dtype=found.dtype, weak_type=False, sharding=sharding)


# Parameters: op, lowering, mode, `views`, the shapes of the results as the caller sees them, and `reads`. Arguments are
# the op's inputs, then index arrays in the order of `reads.arrays`. The primitives add `devices` themselves, see
# `devices_wanted`.
step_p = _StepPrimitive("planner_step")
step_p.multiple_results = True
tangent_p = _StepPrimitive("planner_tangent")


def bind_step(
    op: Op, arguments: Sequence[Any], mode: Mode, views: tuple[Shape, ...], reads: Reads, lowering: str | None = None
) -> list[Any]:
    """Bind a step.

    Args:
        op: the op.
        arguments: its inputs, then the index arrays of `reads`.
        mode: the index mode and the precision. Where no precision was asked for, it is that of the context here, as in
            `jax.lax.dot_general`: the derivatives of a step then have the precision of the step.
        views: the shapes of the results.
        reads: what the step reads.
        lowering: the implementation that the plan chose; the fastest one by default.
    """
    lowering = lowering or LOWER(op).lowering
    if mode[1] is None and (precision := jax.config.jax_default_matmul_precision) is not None:  # type: ignore[attr-defined]
        mode = (mode[0], precision)
    found: list[Any] = step_p.bind(*arguments, op=op, lowering=lowering, mode=mode, views=views, reads=reads)
    return found


@lru_cache(maxsize=4096)
def compiled(**parameters: Any) -> Callable[..., list[Any]]:
    """Return the step with these parameters, jitted: what it runs is chosen for the platform that it is lowered for."""

    def planner_step(*arguments: Any) -> list[Any]:
        if any(isinstance(x, jax.core.Tracer) for x in arguments):
            found: list[Any] = step_p.bind(*arguments, **parameters)
            return found
        return _not_traced(arguments, parameters)

    return jax.jit(planner_step)


def _not_traced(arguments: Sequence[Any], parameters: Mapping[str, Any]) -> list[Any]:
    """Run a step whose jitted function JAX calls with arrays: it does so in two cases.

    Under `jax.disable_jit` a step is compiled all the same, as every primitive of JAX is. Under `jax.debug_nans` and
    `jax.debug_infs` JAX calls the function of a result that holds one, to learn where it comes from: from here.

    Raises:
        IndexRangeError: an index is out of range, and the NaN marks what it had a say in.
        FloatingPointError: the NaN or the infinity comes from the operands.
    """
    config: Any = jax.config
    if config.jax_disable_jit:
        with jax.disable_jit(False):
            return compiled(**parameters)(*arguments)
    op: Op = parameters["op"]
    raw = dict(zip(parameters["reads"].arrays, arguments[input_count(op) :], strict=True))
    if parameters["mode"][0] == "raise":
        for gather in op.spec.gathers:
            check_values(raw[gather.array], gather, "raise")
    held = " or ".join(name for name, on in (("nan", config.jax_debug_nans), ("inf", config.jax_debug_infs)) if on)
    raise FloatingPointError(f"invalid value ({held}) encountered in planner's step {str(op.spec)!r}")


@step_p.def_impl
def _step_impl(*arguments: Any, **parameters: Any) -> list[Any]:
    return compiled(**parameters)(*arguments)


@step_p.def_abstract_eval
def _step_abstract(*arguments: Any, op: Op, views: tuple[Shape, ...], **_: Any) -> list[Any]:
    return [_typed(view, op.dtype, arguments[0]) for view in views]


def _step_lowering(context: Any, *values: Any, platform: str = "", **parameters: Any) -> Any:
    devices = devices_of(context)
    # Kernels of a platform run on one device: XLA cannot partition them.
    function = partial(evaluate, platform="" if devices == "unknown" else platform, several=devices == "several")
    # Inside of `shard_map` types say over which axes values vary: constants of the step's own would not agree.
    if any(aval.mat.varying for aval in context.avals_in):
        context = context.replace(avals_in=[jax.core.ShapedArray(x.shape, x.dtype) for x in context.avals_in])
    # Under `disable_jit` loops would be traced turn by turn.
    with jax.disable_jit(False):
        return mlir.lower_fun(function, multiple_results=True)(context, *values, **parameters)


mlir.register_lowering(step_p, _step_lowering)
for _platform in PLATFORMS:
    mlir.register_lowering(step_p, partial(_step_lowering, platform=_platform), platform=_platform)


def gradient_op(op: Op, child: int) -> Op:
    """The op that gives one child's gradient."""
    return Einsum(transpose(op.spec, child), op.dtype)


def _instantiated(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero)


def _step_jvp(
    primals: Any, tangents: Any, *, op: Op, lowering: str, mode: Mode, views: Any, reads: Reads, **_: Any
) -> Any:
    results = bind_step(op, primals, mode, views, reads, lowering)
    count = input_count(op)
    active = [i for i in range(count) if _instantiated(tangents[i])]
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    if not active:
        return results, zeros
    if not isinstance(op, JointGradient):
        return results, [_multilinear(op, primals, tangents, active, mode, views, reads, lowering)]
    # Both gradients: each is a single step, bilinear in the output gradient and the other operand.
    slots = ((0, 2), (1, 0))  # inputs of each single step, by position in (gradient, a, b)
    outputs = []
    for child in (0, 1):
        single, order = gradient_op(op, child), slots[child]
        inner = [*(primals[i] for i in order), *primals[count:]]
        inner_tangents = [tangents[i] for i in order]
        here = [i for i in (0, 1) if _instantiated(inner_tangents[i])]
        rest = reads.without(child)
        outputs.append(
            _multilinear(single, inner, inner_tangents, here, mode, (views[child],), rest, None)
            if here
            else zeros[child]
        )
    return results, outputs


def _multilinear(
    op: Op, primals: Any, tangents: Any, active: Sequence[int], mode: Mode, views: Any, reads: Reads,
    lowering: str | None,
) -> Any:  # fmt: skip
    """The tangent of a step: the sum over operands of the step with a tangent in that operand's place."""
    count = input_count(op)
    if len(active) == 2 and _joint(op):
        return tangent_p.bind(
            *primals[:count], *tangents[:count], *primals[count:],
            op=op, lowering=lowering, mode=mode, views=views, reads=reads,
        )  # fmt: skip
    total = None
    for i in active:
        swapped = list(primals)
        swapped[i] = tangents[i]
        (part,) = bind_step(op, swapped, mode, views, reads.without(i, gradient=False), lowering)
        total = part if total is None else ad.add_jaxvals(total, part)
    return total


@lru_cache(maxsize=4096)
def _joint(op: Op) -> bool:
    """Whether one implementation gives both gradients and beats two steps."""
    return len(op.spec.inputs) == 2 and any(
        isinstance(g, JointGradient) for g, _, _ in LOWER.gradients(op, (True, True))
    )


def _step_transpose(
    cotangents: Any, *arguments: Any, op: Op, lowering: str, mode: Mode, views: Any, reads: Reads, **_: Any
) -> Any:
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
        # Linear in the output gradient: with a tangent in each operand's place, the forward step itself.
        _, a, b = arguments[:count]
        ga, gb = (ad.instantiate_zeros(ct) for ct in cotangents)
        forward = Einsum(op.spec, op.dtype)
        results[0] = tangent_p.bind(
            a, b, ga, gb, *indices, op=forward, lowering=None, mode=mode, views=(shape,), reads=reads
        )
        return results
    if isinstance(op, Cast):
        raise AssertionError("casts are convert_element_type")
    swapped = list(arguments)
    swapped[i] = cotangents[0]
    # The cotangent has the shape that the caller sees; the step reshapes its inputs itself.
    results[i] = bind_step(gradient_op(op, i), swapped, mode, (shape,), reads.without(i))[0]
    return results


def _axis_front(x: Any, dim: Any) -> Any:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


def _step_batch(
    arguments: Any, dims: Any, *, op: Op, lowering: str, mode: Mode, views: Any, reads: Reads, **_: Any
) -> Any:
    count = input_count(op)
    size = next(x.shape[d] for x, d in zip(arguments, dims, strict=True) if d is not None)
    moved = [_axis_front(x, d) for x, d in zip(arguments, dims, strict=True)]
    mapped = [d is not None for d in dims]
    if isinstance(op, JointGradient):
        gradient, a, b = moved[:3]
        outputs = []
        for child, inputs, places in ((0, (gradient, b), (0, 2)), (1, (a, gradient), (1, 0))):
            outputs.append(
                _batched_step(
                    gradient_op(op, child), (*inputs, *moved[3:]), [*(mapped[p] for p in places), *mapped[3:]], 2, size,
                    mode, views[child], reads.without(child),
                )
            )  # fmt: skip
        return outputs, [0, 0]
    result = _batched_step(op, moved, mapped, count, size, mode, views[0], reads)
    return [result], [0]


def _batched_step(
    op: Op, arguments: Sequence[Any], mapped: Sequence[bool], count: int, size: int, mode: Mode, view: Shape,
    reads: Reads,
) -> Any:  # fmt: skip
    """One step with a leading batch axis; broadcast where nothing of this step is batched."""
    operands = [i for i in range(count) if mapped[i]]
    hit = [name for name, is_mapped in zip(reads.arrays, mapped[count:], strict=True) if is_mapped]
    arrays = [name for name in hit if name in op.arrays]
    reads = reads.batched(size, operands, hit)
    if not operands and not arrays:
        (result,) = bind_step(op, arguments, mode, (view,), reads)
        return jnp.broadcast_to(result, (size, *view))
    spec = batched(op.spec, size, operands, arrays)
    (result,) = bind_step(Einsum(spec, op.dtype), arguments, mode, ((size, *view),), reads)
    return result


ad.primitive_jvps[step_p] = _step_jvp
ad.primitive_transposes[step_p] = _step_transpose
batching.primitive_batchers[step_p] = _step_batch


# -- the joint tangent of a binary step: f(da, b) + f(a, db) -------------------------------------------


def _tangent_parts(arguments: Any, op: Op, mode: Mode, views: Any, reads: Reads, lowering: str | None, **_: Any) -> Any:
    a, b, da, db, *indices = arguments
    (left,) = bind_step(op, (da, b, *indices), mode, views, reads.without(0, gradient=False), lowering)
    (right,) = bind_step(op, (a, db, *indices), mode, views, reads.without(1, gradient=False), lowering)
    return ad.add_jaxvals(left, right)


@tangent_p.def_impl
def _tangent_impl(*arguments: Any, **parameters: Any) -> Any:
    return _tangent_parts(arguments, **parameters)


@tangent_p.def_abstract_eval
def _tangent_abstract(*arguments: Any, op: Op, views: tuple[Shape, ...], **_: Any) -> Any:
    return _typed(views[0], op.dtype, arguments[0])


def _tangent_lowering(context: Any, *values: Any, **parameters: Any) -> Any:
    # The precision was settled when the program was traced.
    with jax.default_matmul_precision(None):
        return mlir.lower_fun(_tangent_impl, multiple_results=False)(context, *values, **parameters)


mlir.register_lowering(tangent_p, _tangent_lowering)


def _tangent_jvp(
    primals: Any, tangents: Any, *, op: Op, lowering: str | None, mode: Mode, views: Any, reads: Reads, **_: Any
) -> Any:
    result = tangent_p.bind(*primals, op=op, lowering=lowering, mode=mode, views=views, reads=reads)
    total = None
    a, b, da, db, *indices = primals
    for position, (left, right), free in (
        (2, (None, b), (0,)), (1, (da, None), (0, 1)), (0, (None, db), (0, 1)), (3, (a, None), (1,)),
    ):  # fmt: skip
        tangent = tangents[position]
        if _instantiated(tangent):
            pair = (tangent if left is None else left, tangent if right is None else right)
            (part,) = bind_step(op, (*pair, *indices), mode, views, reads.without(*free, gradient=False), lowering)
            total = part if total is None else ad.add_jaxvals(total, part)
    if total is None:
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, total


def _tangent_transpose(
    cotangent: Any, *arguments: Any, op: Op, lowering: str | None, mode: Mode, views: Any, reads: Reads, **_: Any
) -> Any:
    results: list[Any] = [None] * len(arguments)
    a, b, da, db, *indices = arguments
    linear = [i for i in (0, 1, 2, 3) if ad.is_undefined_primal(arguments[i])]
    if isinstance(cotangent, ad.Zero):
        for i in linear:
            results[i] = ad.Zero(arguments[i].aval)
        return results
    if linear == [2, 3]:
        pair = Einsum(op.spec, op.dtype).joint_gradient()
        shapes = (da.aval.shape, db.aval.shape)
        results[2], results[3] = bind_step(pair, (cotangent, a, b, *indices), mode, shapes, reads)
        return results
    for i, child, others, free in (
        (2, 0, (None, b), (0,)), (3, 1, (a, None), (1,)), (0, 0, (None, db), (0, 1)), (1, 1, (da, None), (0, 1)),
    ):  # fmt: skip
        if i in linear:
            inputs = [cotangent if other is None else other for other in others]
            shape, rest = arguments[i].aval.shape, reads.without(*free)
            results[i] = bind_step(gradient_op(op, child), (*inputs, *indices), mode, (shape,), rest)[0]
    return results


def _tangent_batch(
    arguments: Any, dims: Any, *, op: Op, lowering: str | None, mode: Mode, views: Any, reads: Reads, **_: Any
) -> Any:
    size = next(x.shape[d] for x, d in zip(arguments, dims, strict=True) if d is not None)
    moved = [_axis_front(x, d) for x, d in zip(arguments, dims, strict=True)]
    mapped = [d is not None for d in dims]
    parts = []
    for child, places in enumerate(((2, 1), (0, 3))):
        parts.append(
            _batched_step(
                op, [*(moved[p] for p in places), *moved[4:]], [*(mapped[p] for p in places), *mapped[4:]], 2, size,
                mode, views[0], reads.without(child, gradient=False),
            )
        )  # fmt: skip
    return ad.add_jaxvals(*parts), 0


ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[tangent_p] = _tangent_batch
