"""JAX: each step of a plan is a primitive of ours, and its derivatives are steps again.

One primitive, `step`, runs any op in a named implementation. Its derivative in forward mode is a step with a tangent in
an operand's place, or, where the gradients of both operands share a loop, one `tangent` primitive that is linear in
both tangents together, so that its transpose can be that loop. Transposes are transposed specs, `vmap` is one more
axis. What is kept follows from that: a step's tangent reads the other operand, and nothing else.

Operands and index arrays come as the caller gave them; reshaping and range handling happen inside of the steps, so
that what the backward pass holds is the caller's own array wherever possible.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from planner.backends.common import (
    Given,
    Prepared,
    PreparedIndex,
    check_index_dtype,
    clip_error,
    mask_term,
    prepare_numpy,
)
from planner.backends.jax_rows import OPS, make_table
from planner.backends.protocol import Backend
from planner.derive import batched, transpose
from planner.device import CPU, GPU, Device
from planner.errors import PlannerError
from planner.lower import Op
from planner.objective import step_key
from planner.program import Leaf, Lowerer, Node, Tree
from planner.spec import Gather, Operand, Spec, Term

if TYPE_CHECKING:
    from planner.plan import Plan

__all__ = ["JaxBackend", "backend"]

Shape = tuple[int, ...]
Mode = tuple[str, str | None]


# -- index arrays --------------------------------------------------------------------------------------


def _normalised(raw: Any, gather: Gather, mode: str) -> Any:
    """Bring an index array into [0, size]; out-of-range values become `size` unless the mode clips them.

    Besides the index modes there are "checked", which trusts that values are in range, and "wrapped", which clips.
    """
    size = gather.size
    assert size is not None
    info = jnp.iinfo(raw.dtype)
    wide_dtype = jnp.int32 if size < 2**31 - 1 else jnp.int64
    above = raw >= jnp.asarray(size, raw.dtype) if size <= info.max else jnp.zeros(raw.shape, bool)
    below = raw < 0 if info.min < 0 else jnp.zeros(raw.shape, bool)
    wide = raw.astype(wide_dtype)
    if mode == "clip":
        return jnp.where(above, size - 1, jnp.where(below, 0, wide))
    if mode in ("raise", "checked", "wrapped"):
        wide = jnp.where(below, wide + size, wide)
        if mode == "checked":
            return wide
        if mode == "wrapped":
            return jnp.where(above, size - 1, jnp.maximum(wide, 0))
        below = raw < jnp.asarray(-size, raw.dtype) if -size >= info.min else jnp.zeros(raw.shape, bool)
    return jnp.where(above | below, size, wide)


def _is_bad(raw: Any, gather: Gather) -> Any:
    """Which entries of an index array are out of range, negative ones counting from the end."""
    return _normalised(raw, gather, "raise") == gather.size


class JaxIndex(PreparedIndex):
    """A prepared index: a pytree whose leaf is the index array with values in [0, size].

    Attributes:
        checked: whether its values were seen, so that none of them is out of range.
    """

    prepared_framework = "jax"

    def __init__(self, values: Any, size: int, mode: str, checked: bool) -> None:
        super().__init__(values, size, mode)
        self.checked = checked


jax.tree_util.register_pytree_node(
    JaxIndex,
    lambda q: ((q.values,), (q.size, q.mode, q.checked)),
    lambda aux, children: JaxIndex(children[0], *aux),
)


# -- the step primitive --------------------------------------------------------------------------------
# Parameters: op, lowering, mode (the index mode and the precision of products), and `views`, the shapes of the results
# as the caller sees them. Arguments are the op's inputs, then its index arrays in the order of `op.arrays`.

step_p = Primitive("planner_step")
step_p.multiple_results = True
tangent_p = Primitive("planner_tangent")
check_p = Primitive("planner_check")

backend_table = make_table()
_lower = Lowerer(lambda op: backend_table.choices(op, CPU), step_key("time"))


def _is_masked(term: Term, spec: Spec) -> bool:
    """Whether `mask_term` would do anything to a term."""
    plain = {e for e in term if isinstance(e, str)}
    return any(g.axes and g not in term and plain.issuperset(g.axes) for g in spec.gathers)


def _index_shape(spec: Spec, array: str) -> Shape:
    sizes = dict(spec.sizes)
    gather = next(g for g in spec.gathers if g.array == array)
    return tuple(sizes[axis] for axis in gather.axes)


def _count(op: Op) -> int:
    """Number of array inputs of an op, index arrays not counted."""
    return 1 if op.source_dtype is not None else len(op.spec.inputs) + op.pair


def _evaluate(*arguments: Any, op: Op, lowering: str, mode: Mode, views: tuple[Shape, ...]) -> list[Any]:
    """Compute a step; this is what the primitive lowers to."""
    count, (index_mode, precision) = _count(op), mode
    inputs = [x.reshape(shape) for x, shape in zip(arguments[:count], op.input_shapes, strict=True)]
    raw = dict(zip(op.arrays, arguments[count:], strict=True))
    # A bad index that cannot be refused puts NaN wherever it had a say, so until then it may read any row.
    poisons = index_mode == "raise" and jnp.issubdtype(op.dtype, jnp.inexact) and all(g.size for g in op.spec.gathers)
    index = Prepared(index_mode in ("raise", "drop") and not poisons)
    for gather in op.spec.gathers:
        given = raw[gather.array].reshape(_index_shape(op.spec, gather.array))
        normal = partial(_normalised, gather=gather, mode="wrapped" if poisons else index_mode)
        index[gather] = normal(given)
        index.given[gather] = Given(given, normal, partial(_is_bad, gather=gather) if poisons else None)
    with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
        results = backend_table.run(lowering, op, inputs, index)
    if index_mode == "raise" and not index.shown:
        terms = op.spec.inputs if op.pair else (op.spec.output,)
        results = tuple(_poisoned(x, term, op.spec, index) for x, term in zip(results, terms, strict=True))
    return [x.reshape(view) for x, view in zip(results, views, strict=True)]


def _poisoned(x: Any, term: Term, spec: Spec, index: Prepared) -> Any:
    """Put NaN where a bad index had a say: its own rows, or every target that it could have meant."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x

    def poison(x: Any) -> Any:
        for gather, given in index.given.items():  # brought into range here, so that no such copy waits
            x = jnp.where(_bad_mask(gather, _is_bad(given.values, gather), term, spec), jnp.nan, x)
        return x

    bad = [_is_bad(given.values, gather).any() for gather, given in index.given.items()]
    # The usual case reads the index arrays, and leaves the result where it is.
    return lax.cond(functools.reduce(operator.or_, bad), poison, lambda x: x, x) if bad else x


def _bad_mask(gather: Gather, bad: Any, term: Term, spec: Spec) -> Any:
    """Where bad entries of an index array have a say in a result, broadcastable to its term."""
    plain = [e for e in term if isinstance(e, str)]
    axes = list(gather.axes)
    if len(axes) > len(set(axes)) or not set(axes) & set(plain):
        return bad.any()
    bad = bad.any(axis=tuple(d for d, axis in enumerate(axes) if axis not in plain))
    axes = [axis for axis in axes if axis in plain]
    sizes = dict(spec.sizes)
    distinct = tuple(dict.fromkeys(plain))
    mask = jnp.transpose(bad, [axes.index(e) for e in distinct if e in axes])
    first = {e: term.index(e) for e in distinct}
    mask = mask.reshape([sizes[str(e)] if e in axes and first[str(e)] == d else 1 for d, e in enumerate(term)])
    for dim, e in enumerate(term):
        if e in axes and dim != first[str(e)]:  # a repeated axis: only the diagonal is the index's
            one, other = ([sizes[str(e)] if d == at else 1 for d in range(len(term))] for at in (first[str(e)], dim))
            mask = mask & (jnp.arange(sizes[str(e)]).reshape(one) == jnp.arange(sizes[str(e)]).reshape(other))
    return mask


@lru_cache(maxsize=4096)
def _compiled(op: Op, lowering: str, mode: Mode, views: tuple[Shape, ...]) -> Callable[..., list[Any]]:
    return jax.jit(partial(_evaluate, op=op, lowering=lowering, mode=mode, views=views))


def _step(
    op: Op, arguments: Sequence[Any], mode: Mode, views: tuple[Shape, ...], lowering: str | None = None
) -> list[Any]:
    """Bind a step; the implementation is the fastest one unless the plan chose another."""
    found: list[Any] = step_p.bind(*arguments, op=op, lowering=lowering or _lower(op).lowering, mode=mode, views=views)
    return found


@step_p.def_impl
def _step_impl(*arguments: Any, **parameters: Any) -> list[Any]:
    return _compiled(**parameters)(*arguments)


@step_p.def_abstract_eval
def _step_abstract(*arguments: Any, op: Op, views: tuple[Shape, ...], **_: Any) -> list[Any]:
    return [jax.core.ShapedArray(view, jnp.dtype(op.dtype)) for view in views]


mlir.register_lowering(step_p, mlir.lower_fun(_evaluate, multiple_results=True))


def _single(op: Op, child: int) -> Op:
    """The op that gives one child's gradient."""
    return Op(transpose(op.spec, child), op.dtype)


def _instantiated(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero)


def _step_jvp(primals: Any, tangents: Any, *, op: Op, lowering: str, mode: Mode, views: Any) -> Any:
    results = _step(op, primals, mode, views, lowering)
    count = _count(op)
    active = [i for i in range(count) if _instantiated(tangents[i])]
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    if not active:
        return results, zeros
    if not op.pair:
        return results, [_multilinear(op, primals, tangents, active, mode, views, lowering)]
    # Both gradients: each is a single step, bilinear in the output gradient and the other operand.
    slots = ((0, 2), (1, 0))  # inputs of each single step, by position in (gradient, a, b)
    outputs = []
    for child in (0, 1):
        single, order = _single(op, child), slots[child]
        inner = [*(primals[i] for i in order), *primals[count:]]
        inner_tangents = [tangents[i] for i in order]
        here = [i for i in (0, 1) if _instantiated(inner_tangents[i])]
        outputs.append(
            _multilinear(single, inner, inner_tangents, here, mode, (views[child],), None) if here else zeros[child]
        )
    return results, outputs


def _multilinear(
    op: Op, primals: Any, tangents: Any, active: Sequence[int], mode: Mode, views: Any, lowering: str | None
) -> Any:
    """The tangent of a step: the sum over operands of the step with a tangent in that operand's place."""
    count = _count(op)
    if len(active) == 2 and _joint(op):
        return tangent_p.bind(
            *primals[:count], *tangents[:count], *primals[count:], op=op, lowering=lowering, mode=mode, views=views
        )
    total = None
    for i in active:
        swapped = list(primals)
        swapped[i] = tangents[i]
        (part,) = _step(op, swapped, mode, views, lowering)
        total = part if total is None else ad.add_jaxvals(total, part)
    return total


@lru_cache(maxsize=4096)
def _joint(op: Op) -> bool:
    """Whether one implementation gives both gradients and beats two steps."""
    return len(op.spec.inputs) == 2 and any(g.pair for g, _, _ in _lower.gradients(op, (True, True)))


def _step_transpose(cotangents: Any, *arguments: Any, op: Op, lowering: str, mode: Mode, views: Any) -> Any:
    count = _count(op)
    linear = [i for i in range(count) if ad.is_undefined_primal(arguments[i])]
    results: list[Any] = [None] * len(arguments)
    if all(isinstance(ct, ad.Zero) for ct in cotangents):
        for i in linear:
            results[i] = ad.Zero(arguments[i].aval)
        return results
    (i,) = linear
    shape = arguments[i].aval.shape
    indices = arguments[count:]
    if op.pair:
        # Linear in the output gradient: with a tangent in each operand's place, the forward step itself.
        _, a, b = arguments[:count]
        ga, gb = (ad.instantiate_zeros(ct) for ct in cotangents)
        forward = Op(op.spec, op.dtype)
        results[0] = tangent_p.bind(a, b, ga, gb, *indices, op=forward, lowering=None, mode=mode, views=(shape,))
        return results
    if op.source_dtype is not None:
        raise AssertionError("casts are convert_element_type")
    swapped = list(arguments)
    swapped[i] = cotangents[0]
    # The cotangent has the shape that the caller sees; the step reshapes its inputs itself.
    results[i] = _step(_single(op, i), swapped, mode, (shape,))[0]
    return results


def _axis_front(x: Any, dim: Any) -> Any:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


def _step_batch(arguments: Any, dims: Any, *, op: Op, lowering: str, mode: Mode, views: Any) -> Any:
    count = _count(op)
    size = next(x.shape[d] for x, d in zip(arguments, dims, strict=True) if d is not None)
    moved = [_axis_front(x, d) for x, d in zip(arguments, dims, strict=True)]
    mapped = [d is not None for d in dims]
    if op.pair:
        gradient, a, b = moved[:3]
        outputs = []
        for child, inputs, places in ((0, (gradient, b), (0, 2)), (1, (a, gradient), (1, 0))):
            outputs.append(
                _batched_step(
                    _single(op, child), (*inputs, *moved[3:]), [*(mapped[p] for p in places), *mapped[3:]], 2, size,
                    mode, views[child],
                )
            )  # fmt: skip
        return outputs, [0, 0]
    result = _batched_step(op, moved, mapped, count, size, mode, views[0])
    return [result], [0]


def _batched_step(
    op: Op, arguments: Sequence[Any], mapped: Sequence[bool], count: int, size: int, mode: Mode, view: Shape
) -> Any:
    """One step with a leading batch axis; broadcast where nothing of this step is batched."""
    operands = [i for i in range(count) if mapped[i]]
    arrays = [name for name, hit in zip(op.arrays, mapped[count:], strict=True) if hit]
    if not operands and not arrays:
        (result,) = _step(op, arguments, mode, (view,))
        return jnp.broadcast_to(result, (size, *view))
    spec = batched(op.spec, size, operands, arrays)
    (result,) = _step(Op(spec, op.dtype), arguments, mode, ((size, *view),))
    return result


ad.primitive_jvps[step_p] = _step_jvp
ad.primitive_transposes[step_p] = _step_transpose
batching.primitive_batchers[step_p] = _step_batch


# -- the joint tangent of a binary step: f(da, b) + f(a, db) -------------------------------------------


def _tangent_parts(arguments: Any, op: Op, mode: Mode, views: Any, lowering: str | None) -> Any:
    a, b, da, db, *indices = arguments
    (left,) = _step(op, (da, b, *indices), mode, views, lowering)
    (right,) = _step(op, (a, db, *indices), mode, views, lowering)
    return ad.add_jaxvals(left, right)


@tangent_p.def_impl
def _tangent_impl(*arguments: Any, op: Op, lowering: str | None, mode: Mode, views: Any) -> Any:
    return _tangent_parts(arguments, op, mode, views, lowering)


@tangent_p.def_abstract_eval
def _tangent_abstract(*arguments: Any, op: Op, views: tuple[Shape, ...], **_: Any) -> Any:
    return jax.core.ShapedArray(views[0], jnp.dtype(op.dtype))


mlir.register_lowering(
    tangent_p,
    mlir.lower_fun(
        lambda *arguments, op, lowering, mode, views: _tangent_parts(arguments, op, mode, views, lowering),
        multiple_results=False,
    ),
)


def _tangent_jvp(primals: Any, tangents: Any, *, op: Op, lowering: str | None, mode: Mode, views: Any) -> Any:
    result = tangent_p.bind(*primals, op=op, lowering=lowering, mode=mode, views=views)
    total = None
    a, b, da, db, *indices = primals
    for position, (left, right) in ((2, (None, b)), (1, (da, None)), (0, (None, db)), (3, (a, None))):
        tangent = tangents[position]
        if _instantiated(tangent):
            pair = (tangent if left is None else left, tangent if right is None else right)
            (part,) = _step(op, (*pair, *indices), mode, views, lowering)
            total = part if total is None else ad.add_jaxvals(total, part)
    if total is None:
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, total


def _tangent_transpose(cotangent: Any, *arguments: Any, op: Op, lowering: str | None, mode: Mode, views: Any) -> Any:
    results: list[Any] = [None] * len(arguments)
    a, b, da, db, *indices = arguments
    linear = [i for i in (0, 1, 2, 3) if ad.is_undefined_primal(arguments[i])]
    if isinstance(cotangent, ad.Zero):
        for i in linear:
            results[i] = ad.Zero(arguments[i].aval)
        return results
    if linear == [2, 3]:
        pair = Op(op.spec, op.dtype, pair=True)
        shapes = (da.aval.shape, db.aval.shape)
        results[2], results[3] = _step(pair, (cotangent, a, b, *indices), mode, shapes)
        return results
    for i, child, others in ((2, 0, (None, b)), (3, 1, (a, None)), (0, 0, (None, db)), (1, 1, (da, None))):
        if i in linear:
            inputs = [cotangent if other is None else other for other in others]
            results[i] = _step(_single(op, child), (*inputs, *indices), mode, (arguments[i].aval.shape,))[0]
    return results


def _tangent_batch(arguments: Any, dims: Any, *, op: Op, lowering: str | None, mode: Mode, views: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(arguments, dims, strict=True) if d is not None)
    moved = [_axis_front(x, d) for x, d in zip(arguments, dims, strict=True)]
    mapped = [d is not None for d in dims]
    parts = []
    for places in ((2, 1), (0, 3)):
        parts.append(
            _batched_step(
                op, [*(moved[p] for p in places), *moved[4:]], [*(mapped[p] for p in places), *mapped[4:]], 2, size,
                mode, views[0],
            )
        )  # fmt: skip
    return ad.add_jaxvals(*parts), 0


ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[tangent_p] = _tangent_batch


# -- the range check: raises wherever values can be seen -----------------------------------------------


@check_p.def_impl
def _check_impl(raw: Any, *, gather: Gather, mode: str) -> Any:
    prepare_numpy(np.asarray(raw), gather, mode)
    return raw


@check_p.def_abstract_eval
def _check_abstract(raw: Any, **_: Any) -> Any:
    return raw


mlir.register_lowering(check_p, mlir.lower_fun(lambda raw, **_: raw, multiple_results=False))
batching.primitive_batchers[check_p] = lambda args, dims, **parameters: (
    check_p.bind(args[0], **parameters),
    dims[0],
)


# -- the backend ---------------------------------------------------------------------------------------


class JaxBackend(Backend):
    """Runs plans on JAX arrays."""

    name = "jax"

    def __init__(self) -> None:
        self.table = backend_table

    def operand(self, array: Any) -> Operand:
        """Describe an array; under differentiation outside of jit it is known that it needs a gradient."""
        traced = type(array).__name__ in ("JVPTracer", "LinearizeTracer")
        return Operand(tuple(array.shape), jnp.dtype(array.dtype).name, None, traced)

    def result_dtype(self, dtypes: Sequence[str]) -> str:
        """Promote as JAX does."""
        return jnp.result_type(*map(jnp.dtype, dtypes)).name

    def device(self, operands: Sequence[Any]) -> Device:
        """Rates of the machine that JAX runs on."""
        return CPU if jax.default_backend() == "cpu" else GPU

    def check_index(self, name: str, index: Any) -> None:
        """Refuse an index array that is not of integers."""
        check_index_dtype(name, jnp.dtype(index.dtype).name)

    def check_devices(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """JAX refuses mixed devices itself, with the names of both."""

    def group(self, q: Any, size: int, index_mode: str) -> JaxIndex:
        """Check an index array and bring it into range."""
        gather = Gather("q", (), size)
        if isinstance(q, jax.core.Tracer):
            if index_mode == "raise":
                q = check_p.bind(q, gather=gather, mode=index_mode)
            return JaxIndex(_normalised(q, gather, index_mode), size, index_mode, False)
        values = prepare_numpy(np.asarray(q), gather, index_mode)
        return JaxIndex(jnp.asarray(values.astype(np.int32 if size < 2**31 else np.int64)), size, index_mode, True)

    def bind(self, plan: Plan) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        """Return the function that runs a plan."""
        spec, arrays = plan.resolved.spec, plan.resolved.spec.arrays
        gathers = {name: [g for g in spec.gathers if g.array == name] for name in arrays}
        lowerings = {step.op: step.choice.lowering for step in plan.programs.forward.steps}
        inexact = jnp.issubdtype(jnp.dtype(plan.dtype), jnp.inexact)
        if plan.index_mode == "clip":
            for gather in spec.gathers:
                if gather.size == 0 and 0 not in _index_shape(spec, gather.array):
                    raise clip_error(gather)

        dropping = plan.index_mode == "drop"

        def masked(x: Any, term: Term, indices: Mapping[str, Any]) -> Any:
            index = Prepared(True)
            for gather in spec.gathers:
                values = _normalised(indices[gather.array], gather, "drop")
                index[gather] = values.reshape(_index_shape(spec, gather.array))
            return mask_term(OPS, x.reshape(spec.shape(term)), term, spec, index)

        def node(tree: Node, root: bool, mode: str, inputs: Sequence[Any], indices: Mapping[str, Any]) -> Any:
            """One step, with the entries that only dropped indices meet set to zero in operands and result."""
            op = tree.op
            inputs = [
                masked(x, spec.inputs[child.operand], indices)
                if dropping and isinstance(child, Leaf) and _is_masked(spec.inputs[child.operand], spec)
                else x
                for x, child in zip(inputs, tree.children, strict=True)
            ]
            if op.source_dtype is not None:
                (x,) = inputs
                if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(op.dtype, jnp.complexfloating):
                    x = x.real
                result = jax.lax.convert_element_type(x, jnp.dtype(op.dtype))
            else:
                used = tuple(indices[name] for name in op.arrays)
                (result,) = _step(op, (*inputs, *used), (mode, plan.options.precision), op.output_shapes, lowerings[op])
            return masked(result, spec.output, indices) if root and dropping else result

        def value(tree: Tree, leaves: Sequence[Any], indices: Mapping[str, Any], mode: str, root: bool) -> Any:
            if isinstance(tree, Leaf):
                return leaves[tree.operand]
            inputs = [value(child, leaves, indices, mode, False) for child in tree.children]
            terms = [spec.inputs[child.operand] for child in tree.children if isinstance(child, Leaf)]
            run: Callable[..., Any] = partial(node, tree, root, mode)
            if dropping and any(_is_masked(term, spec) for term in (*terms, *[spec.output] * root)):
                # Else masks and masked copies would be kept for the backward pass, where operands and index arrays do.
                run = jax.checkpoint(run)
            return run(inputs, indices)

        def run_tree(leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
            indices = dict(zip(arrays, index_values, strict=True))
            if isinstance(plan.tree, Leaf):
                return leaves[plan.tree.operand].reshape(spec.output_shape)
            return value(plan.tree, leaves, indices, mode, True)

        recompute = plan.keep == "inputs" and plan.programs.backward is not None
        whole = jax.checkpoint(run_tree, static_argnums=(2,)) if recompute else run_tree

        def refuse_integers(name: str) -> None:
            if not inexact:
                raise PlannerError(
                    f"index array {name!r} is traced and the result is {plan.dtype}, which has no NaN to mark a bad "
                    "index with: pass index_mode='drop' or 'clip'"
                )

        def run(operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
            mode = plan.index_mode
            values = {}
            concrete = True
            for name in arrays:
                raw = indices[name]
                if isinstance(raw, JaxIndex):
                    for gather in gathers[name]:
                        raw.check(gather, mode)
                    values[name] = raw.values
                    concrete = concrete and raw.checked
                    if mode == "raise" and not raw.checked:
                        refuse_integers(name)
                    continue
                traced = isinstance(raw, jax.core.Tracer)
                concrete = concrete and not traced
                if mode == "raise":
                    if traced:
                        refuse_integers(name)
                    for gather in gathers[name]:
                        # A constant under jit is checked here, where its values can be seen; a primitive would
                        # be staged.
                        raw = (
                            check_p.bind(raw, gather=gather, mode=mode)
                            if traced
                            else _check_impl(raw, gather=gather, mode=mode)
                        )
                values[name] = raw
            if mode == "raise" and concrete:
                mode = "checked"
            return whole(tuple(operands), tuple(values[name] for name in arrays), mode)

        return run


backend = JaxBackend()
