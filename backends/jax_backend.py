"""JAX: each step of a plan is a primitive of ours, and its derivatives are steps again.

One primitive, `step`, runs any op in a named implementation. Its derivative in forward mode is a step with a tangent in
an operand's place, or, where the gradients of both operands share a loop, one `tangent` primitive that is linear in
both tangents together, so that its transpose can be that loop. Transposes are transposed specs, `vmap` is one more
axis. What is kept follows from that: a step's tangent reads the other operand, and nothing else.

A row of a pool that no index names may hold anything, yet a plan that contracts before it takes multiplies it: `Reads`
tells such steps and their gradients which index arrays say what is read, and they look whether the operand is finite.

Operands and index arrays come as the caller gave them; reshaping and range handling happen inside of the steps, so
that what the backward pass holds is the caller's own array wherever possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from planner.backends.common import (
    WHOLE_POOL,
    Exposed,
    Given,
    Prepared,
    PreparedIndex,
    check_index_dtype,
    clip_error,
    exposures,
    mask_term,
    prepare_numpy,
    read_rows,
)
from planner.backends.jax_rows import OPS, make_table
from planner.backends.protocol import Backend, Stepwise
from planner.derive import batched, transpose
from planner.device import CPU, TPU_V5E, Device, gpu_preset
from planner.errors import PlannerError
from planner.loops import accumulator, body_of, covers, parts, slice_counts
from planner.lower import Op, PooledForm, pooled_form
from planner.objective import step_key
from planner.program import Leaf, Lowerer, Node, Step, Tree
from planner.spec import Gather, Operand, Spec, Term, term_axes

if TYPE_CHECKING:
    from planner.plan import Plan

__all__ = ["JaxBackend", "backend"]

Shape = tuple[int, ...]
Mode = tuple[str, str | None]

# Name of the values that a plan keeps where it does not keep all.
KEPT = "planner_kept"

# What JAX takes in place of 64-bit types, silently, unless they are enabled.
NARROW = {"float64": "float32", "complex128": "complex64", "int64": "int32", "uint64": "uint32"}


def _wide_types() -> bool:
    """Whether JAX's 64-bit types are on, here and now: there is a context manager for it."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


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
# Parameters: op, lowering, mode (the index mode and the precision of products), `views`, the shapes of the results as
# the caller sees them, and `reads`. Arguments are the op's inputs, then index arrays in the order of `reads.arrays`.

step_p = Primitive("planner_step")
step_p.multiple_results = True
tangent_p = Primitive("planner_tangent")
check_p = Primitive("planner_check")

backend_table = make_table()
_lower = Lowerer(lambda op: backend_table.choices(op, CPU), step_key("time"))


def _wide_dtype(dtype: str) -> Any:
    """The dtype in which slices are added up."""
    return jnp.dtype(accumulator(dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class Reads:
    """What a step and those derived from it know of index arrays.

    Attributes:
        arrays: letters of the index arrays among the step's arguments.
        exposed: for each operand of the op's spec, whether rows are read of it that no index may name.
        gradient: whether the step is part of a gradient, no step of a plan.
    """

    arrays: tuple[str, ...]
    exposed: tuple[Exposed | None, ...]
    gradient: bool = False

    @classmethod
    def of(cls, op: Op, exposed: tuple[Exposed | None, ...]) -> Reads:
        """Return what a step of a plan reads: the index arrays of its own spec, and of exposed operands."""
        later = {name for e in exposed if e is not None for name in e.spec.arrays}
        return cls(tuple(sorted({*op.spec.arrays, *later})), exposed)

    def without(self, *places: int, gradient: bool = True) -> Reads:
        """With a tangent or a cotangent in some operands' places, whose unread rows are zero."""
        exposed = tuple(None if i in places else e for i, e in enumerate(self.exposed))
        return Reads(self.arrays, exposed, self.gradient or gradient)

    def batched(self, size: int, operands: Sequence[int], arrays: Sequence[str]) -> Reads:
        """With a leading axis on some operands and index arrays."""
        exposed = tuple(e and e.batched(size, i in operands, arrays) for i, e in enumerate(self.exposed))
        return Reads(self.arrays, exposed, self.gradient)


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


def _index_arrays(raw: Mapping[str, Any], spec: Spec, index_mode: str, poisons: bool = False) -> Prepared:
    """Index arrays as a spec has them, in range; `poisons` says that results will be NaN wherever a bad one acts."""
    index = Prepared(index_mode in ("raise", "drop") and not poisons)
    for gather in spec.gathers:
        given = raw[gather.array].reshape(_index_shape(spec, gather.array))
        normal = partial(_normalised, gather=gather, mode="wrapped" if poisons else index_mode)
        index[gather] = normal(given)
        index.given[gather] = Given(given, normal, partial(_is_bad, gather=gather) if poisons else None)
    return index


def _unread(op: Op, lowering: str, reads: Reads) -> list[tuple[int, Spec, Term]]:
    """Inputs of which this step could carry rows that no index names into what is seen: place, spec and term."""
    if not jnp.issubdtype(jnp.dtype(op.dtype), jnp.inexact):
        return []
    spec, found = op.spec, []
    for place, e in enumerate(reads.exposed):
        if e is not None and (op.pair or reads.gradient or not e.at_once):
            found.append((place + op.pair, e.spec, e.spec.inputs[0]))
    if lowering == WHOLE_POOL:
        form = pooled_form(spec)
        assert isinstance(form, PooledForm)
        if form.place != 2 and (op.pair or form.scores != 2):
            found.append((form.place + op.pair, spec, spec.inputs[form.place]))
    return found


def _only_read_rows(x: Any, spec: Spec, term: Term, raw: Mapping[str, Any], index_mode: str) -> Any:
    """Where an operand holds NaN or infinity, zero the rows that no index names.

    Zero times NaN is NaN, so a row that is multiplied by zeros only must not hold one. Only the mask is made in a
    branch, as XLA would copy what goes into a whole step and comes out of it. It is made for one position of an index
    axis after another: memory is set aside for a branch, taken or not.
    """
    sizes = dict(spec.sizes)
    rows = term_axes(tuple(e for e in term if isinstance(e, Gather) or term.count(e) > 1))
    shape = [n if isinstance(e, Gather) or e in rows else 1 for e, n in zip(term, x.shape, strict=True)]
    slow = max((axis for axis in rows if axis not in term and sizes[axis]), key=lambda axis: sizes[axis], default=None)
    narrow = dataclasses.replace(spec, sizes=tuple((a, 1 if a == slow else size) for a, size in spec.sizes))

    def read() -> Any:
        def at(position: Any, mask: Any) -> Any:
            here = Prepared(index_mode in ("raise", "drop"))
            for gather in spec.gathers:
                values = raw[gather.array].reshape(_index_shape(spec, gather.array))
                for dim, axis in enumerate(gather.axes):
                    if axis == slow:
                        values = lax.dynamic_slice_in_dim(values, position, 1, dim)
                here[gather] = _normalised(values, gather, index_mode)
            return mask | read_rows(OPS, x, term, narrow, here)

        return lax.fori_loop(0, sizes[slow] if slow else 1, at, jnp.zeros(shape, bool))

    mask = lax.cond(_finite(x), lambda: jnp.ones(shape, bool), read)
    return OPS.select(mask, x, 0)


def _finite(x: Any) -> Any:
    """Whether an array holds finite numbers only; on CPUs in a half to a quarter of the time of `isfinite(x).all()`."""
    return jnp.abs(x).max(initial=0) < jnp.inf


def _evaluate(*arguments: Any, op: Op, lowering: str, mode: Mode, views: tuple[Shape, ...], reads: Reads) -> list[Any]:
    """Compute a step; this is what the primitive lowers to."""
    count, (index_mode, precision) = _count(op), mode
    inputs = [x.reshape(shape) for x, shape in zip(arguments[:count], op.input_shapes, strict=True)]
    raw = dict(zip(reads.arrays, arguments[count:], strict=True))
    # A bad index that cannot be refused puts NaN wherever it had a say, so until then it may read any row of its own.
    poisons = index_mode == "raise" and jnp.issubdtype(op.dtype, jnp.inexact) and all(g.size for g in op.spec.gathers)
    index = _index_arrays(raw, op.spec, index_mode, poisons)
    for place, spec, term in _unread(op, lowering, reads):
        inputs[place] = _only_read_rows(inputs[place], spec, term, raw, index_mode)
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
def _compiled(**parameters: Any) -> Callable[..., list[Any]]:
    return jax.jit(partial(_evaluate, **parameters))


def _step(
    op: Op, arguments: Sequence[Any], mode: Mode, views: tuple[Shape, ...], reads: Reads, lowering: str | None = None
) -> list[Any]:
    """Bind a step; the implementation is the fastest one unless the plan chose another."""
    lowering = lowering or _lower(op).lowering
    found: list[Any] = step_p.bind(*arguments, op=op, lowering=lowering, mode=mode, views=views, reads=reads)
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


def _step_jvp(primals: Any, tangents: Any, *, op: Op, lowering: str, mode: Mode, views: Any, reads: Reads) -> Any:
    results = _step(op, primals, mode, views, reads, lowering)
    count = _count(op)
    active = [i for i in range(count) if _instantiated(tangents[i])]
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    if not active:
        return results, zeros
    if not op.pair:
        return results, [_multilinear(op, primals, tangents, active, mode, views, reads, lowering)]
    # Both gradients: each is a single step, bilinear in the output gradient and the other operand.
    slots = ((0, 2), (1, 0))  # inputs of each single step, by position in (gradient, a, b)
    outputs = []
    for child in (0, 1):
        single, order = _single(op, child), slots[child]
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
    count = _count(op)
    if len(active) == 2 and _joint(op):
        return tangent_p.bind(
            *primals[:count], *tangents[:count], *primals[count:],
            op=op, lowering=lowering, mode=mode, views=views, reads=reads,
        )  # fmt: skip
    total = None
    for i in active:
        swapped = list(primals)
        swapped[i] = tangents[i]
        (part,) = _step(op, swapped, mode, views, reads.without(i, gradient=False), lowering)
        total = part if total is None else ad.add_jaxvals(total, part)
    return total


@lru_cache(maxsize=4096)
def _joint(op: Op) -> bool:
    """Whether one implementation gives both gradients and beats two steps."""
    return len(op.spec.inputs) == 2 and any(g.pair for g, _, _ in _lower.gradients(op, (True, True)))


def _step_transpose(
    cotangents: Any, *arguments: Any, op: Op, lowering: str, mode: Mode, views: Any, reads: Reads
) -> Any:
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
        results[0] = tangent_p.bind(
            a, b, ga, gb, *indices, op=forward, lowering=None, mode=mode, views=(shape,), reads=reads
        )
        return results
    if op.source_dtype is not None:
        raise AssertionError("casts are convert_element_type")
    swapped = list(arguments)
    swapped[i] = cotangents[0]
    # The cotangent has the shape that the caller sees; the step reshapes its inputs itself.
    results[i] = _step(_single(op, i), swapped, mode, (shape,), reads.without(i))[0]
    return results


def _axis_front(x: Any, dim: Any) -> Any:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


def _step_batch(arguments: Any, dims: Any, *, op: Op, lowering: str, mode: Mode, views: Any, reads: Reads) -> Any:
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
        (result,) = _step(op, arguments, mode, (view,), reads)
        return jnp.broadcast_to(result, (size, *view))
    spec = batched(op.spec, size, operands, arrays)
    (result,) = _step(Op(spec, op.dtype), arguments, mode, ((size, *view),), reads)
    return result


ad.primitive_jvps[step_p] = _step_jvp
ad.primitive_transposes[step_p] = _step_transpose
batching.primitive_batchers[step_p] = _step_batch


# -- the joint tangent of a binary step: f(da, b) + f(a, db) -------------------------------------------


def _tangent_parts(arguments: Any, op: Op, mode: Mode, views: Any, reads: Reads, lowering: str | None) -> Any:
    a, b, da, db, *indices = arguments
    (left,) = _step(op, (da, b, *indices), mode, views, reads.without(0, gradient=False), lowering)
    (right,) = _step(op, (a, db, *indices), mode, views, reads.without(1, gradient=False), lowering)
    return ad.add_jaxvals(left, right)


@tangent_p.def_impl
def _tangent_impl(*arguments: Any, **parameters: Any) -> Any:
    return _tangent_parts(arguments, **parameters)


@tangent_p.def_abstract_eval
def _tangent_abstract(*arguments: Any, op: Op, views: tuple[Shape, ...], **_: Any) -> Any:
    return jax.core.ShapedArray(views[0], jnp.dtype(op.dtype))


mlir.register_lowering(
    tangent_p,
    mlir.lower_fun(lambda *arguments, **parameters: _tangent_parts(arguments, **parameters), multiple_results=False),
)


def _tangent_jvp(
    primals: Any, tangents: Any, *, op: Op, lowering: str | None, mode: Mode, views: Any, reads: Reads
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
            (part,) = _step(op, (*pair, *indices), mode, views, reads.without(*free, gradient=False), lowering)
            total = part if total is None else ad.add_jaxvals(total, part)
    if total is None:
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, total


def _tangent_transpose(
    cotangent: Any, *arguments: Any, op: Op, lowering: str | None, mode: Mode, views: Any, reads: Reads
) -> Any:
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
        results[2], results[3] = _step(pair, (cotangent, a, b, *indices), mode, shapes, reads)
        return results
    for i, child, others, free in (
        (2, 0, (None, b), (0,)), (3, 1, (a, None), (1,)), (0, 0, (None, db), (0, 1)), (1, 1, (da, None), (0, 1)),
    ):  # fmt: skip
        if i in linear:
            inputs = [cotangent if other is None else other for other in others]
            shape, rest = arguments[i].aval.shape, reads.without(*free)
            results[i] = _step(_single(op, child), (*inputs, *indices), mode, (shape,), rest)[0]
    return results


def _tangent_batch(
    arguments: Any, dims: Any, *, op: Op, lowering: str | None, mode: Mode, views: Any, reads: Reads
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

    def signature(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> Hashable:
        """Return all of some arrays that a plan depends on: here also what decides promotion."""
        weak = tuple(x.weak_type for x in operands)
        return (super().signature(operands, indices), weak, _wide_types())

    def result_dtype(self, dtypes: Sequence[str], operands: Sequence[Any]) -> str:
        """Promote as JAX does: an array made from a Python number gives way to any other of its kind."""
        pairs = zip(dtypes, operands, strict=True)
        return jnp.result_type(*(x if hasattr(x, "weak_type") else jnp.dtype(dtype) for dtype, x in pairs)).name

    def device(self, operands: Sequence[Any]) -> Device:
        """Rates of the machine that JAX runs on."""
        platform = jax.default_backend()
        if platform in ("cpu", "tpu"):
            return CPU if platform == "cpu" else TPU_V5E
        return gpu_preset(jax.devices()[0].device_kind)

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

    def trial(self, plan: Plan, operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return a function that runs a plan, compiled, with its gradients, and waits for them.

        Eager differentiation shows the arrays that it differentiates at; other tracing shows none.
        """
        seen = tuple(_primal(x) for x in operands)
        arrays = dict(indices)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((seen, arrays))):
            return None
        run = self.bind(plan)
        needs = [number for number, variable in enumerate(plan.programs.gradients) if variable is not None]

        def whole(values: tuple[Any, ...], arrays: dict[str, Any]) -> Any:
            def of(*wanted: Any) -> Any:
                given = dict(zip(needs, wanted, strict=True))
                return run([given.get(number, x) for number, x in enumerate(values)], arrays)

            if not needs:
                return of()
            result, pullback = jax.vjp(of, *(values[number] for number in needs))
            return result, pullback(jnp.ones_like(result))

        # Where a traced index array would be refused, the plan runs step by step.
        eager = plan.index_mode == "raise" and not jnp.issubdtype(jnp.dtype(plan.dtype), jnp.inexact)
        call: Callable[..., Any] = whole if eager and arrays else jax.jit(whole)

        def once() -> None:
            with jax.ensure_compile_time_eval():
                jax.block_until_ready(call(seen, arrays))

        return once

    def environment(self, operands: Sequence[Any]) -> dict[str, str]:
        """Name the version and the device."""
        device = jax.devices()[0]
        return {"jax": jax.__version__, "device": f"{device.platform} {device.device_kind}"}

    def _whole(self, plan: Plan) -> Callable[[tuple[Any, ...], tuple[Any, ...], str], Any]:
        """The function that runs a plan on operands, index arrays and an index mode."""
        if plan.loop is not None:
            return self._slices(plan)
        spec, arrays = plan.resolved.spec, plan.resolved.spec.arrays
        lowerings = {step.op: step.choice.lowering for step in plan.programs.forward.steps}
        dropping = plan.index_mode == "drop"
        reads = {id(node): Reads.of(node.op, exposed) for node, exposed in exposures(plan.tree, spec)}

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
                arguments = (*inputs, *(indices[name] for name in reads[id(tree)].arrays))
                settings = (mode, plan.options.precision)
                (result,) = _step(op, arguments, settings, op.output_shapes, reads[id(tree)], lowerings[op])
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
            result = run(inputs, indices)
            return checkpoint_name(result, KEPT) if id(tree) in kept else result

        def run_tree(leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
            indices = dict(zip(arrays, index_values, strict=True))
            if isinstance(plan.tree, Leaf):
                return leaves[plan.tree.operand].reshape(spec.output_shape)
            return value(plan.tree, leaves, indices, mode, True)

        # Without a checkpoint JAX keeps all that gradients read, and faster than one which names all of it.
        kept = {id(node) for node in plan.kept_nodes} if plan.keep == "some" else ()
        policy = jax.checkpoint_policies.save_only_these_names(KEPT) if kept else None
        whole = run_tree if plan.keep == "all" else jax.checkpoint(run_tree, static_argnums=(2,), policy=policy)
        return whole

    def _slices(self, plan: Plan) -> Callable[[tuple[Any, ...], tuple[Any, ...], str], Any]:
        """The function that runs a plan slice by slice.

        Operands are closed over and cut inside a checkpointed body, and sums are carried: so nothing of a slice is
        kept for the backward pass.
        """
        spec, loop = plan.resolved.spec, plan.loop
        assert loop is not None
        brackets = {name: next(g.axes for g in spec.gathers if g.array == name) for name in spec.arrays}
        bodies = [(sizes, self._whole(body_of(plan, sizes))) for sizes, _ in slice_counts(loop.axes, spec)]
        positions: dict[tuple[int, ...], list[list[int]]] = {}
        for part in parts(loop.axes, spec):
            positions.setdefault(tuple(part.sizes.values()), []).append([start for _, start, _ in part.spans])

        def whole(leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
            xs = [x.reshape(spec.shape(term)) for x, term in zip(leaves, spec.inputs, strict=True)]
            shapes = [_index_shape(spec, name) for name in spec.arrays]
            indices = [q.reshape(shape) for q, shape in zip(index_values, shapes, strict=True)]
            out = jnp.zeros(spec.output_shape, _wide_dtype(plan.dtype))

            def cut(x: Any, term: Sequence[Any], sizes: Mapping[str, int], starts: Mapping[str, Any]) -> Any:
                first = [starts.get(e, 0) if isinstance(e, str) else 0 for e in term]
                shape = [sizes.get(e, n) if isinstance(e, str) else n for e, n in zip(term, x.shape, strict=True)]
                return lax.dynamic_slice(x, first, shape)

            for sizes, run in bodies:

                def step(out: Any, position: Any, sizes: Any = sizes, run: Any = run) -> Any:
                    starts = {axis: position[number] for number, axis in enumerate(sizes)}

                    @jax.checkpoint
                    def of_slice(xs: Any, indices: Any, starts: Any) -> Any:
                        pieces = tuple(cut(x, term, sizes, starts) for x, term in zip(xs, spec.inputs, strict=True))
                        rows = tuple(
                            cut(q, brackets[name], sizes, starts) for name, q in zip(spec.arrays, indices, strict=True)
                        )
                        return run(pieces, rows, mode)

                    value = of_slice(xs, indices, starts).astype(out.dtype)
                    if not covers(loop.axes, spec.output):
                        here = cut(out, spec.output, sizes, starts)
                        value = here | value if value.dtype == bool else here + value
                    first = [starts.get(e, 0) if isinstance(e, str) else 0 for e in spec.output]
                    return lax.dynamic_update_slice(out, value, first), None

                out, _ = lax.scan(step, out, jnp.asarray(positions[tuple(sizes.values())], jnp.int32))
            return out.astype(plan.dtype)

        return jax.jit(whole, static_argnums=(2,))

    def bind(self, plan: Plan) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        """Return the function that runs a plan."""
        spec, arrays = plan.resolved.spec, plan.resolved.spec.arrays
        if plan.dtype in NARROW and not _wide_types():
            raise PlannerError(
                f"dtype {plan.dtype} is off in jax, which would compute in {NARROW[plan.dtype]}: "
                "call jax.config.update('jax_enable_x64', True) at the start of the program, or set JAX_ENABLE_X64=1; "
                f"or pass dtype={NARROW[plan.dtype]!r}"
            )
        if plan.index_mode == "clip":
            for gather in spec.gathers:
                if gather.size == 0 and 0 not in _index_shape(spec, gather.array):
                    raise clip_error(gather)

        whole = self._whole(plan)

        def run(operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
            values, mode = _checked_arrays(plan, indices)
            return whole(tuple(operands), tuple(values[name] for name in arrays), mode)

        return run

    def refuse_dataless(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse traced arrays."""
        arrays = [(f"operand {number}", x) for number, x in enumerate(operands)]
        arrays += [(f"index array {n!r}", getattr(q, "values", q)) for n, q in indices.items()]
        for label, x in arrays:
            if isinstance(x, jax.core.Tracer):
                raise PlannerError(f"{label} is traced, so nothing can be measured: call it outside of jit and grad")

    def stepwise(
        self,
        plan: Plan,
        operands: Sequence[Any],
        indices: Mapping[str, Any],
        gradient: Any = None,
        kept: Mapping[int, Any] | None = None,
    ) -> Stepwise:
        """Return the forward program with what it is given, or the backward program: each step jitted apart."""
        spec = plan.resolved.spec
        arrays, mode = _checked_arrays(plan, indices)
        values = {**dict(enumerate(operands)), **(kept or {})}
        if gradient is not None:
            values[plan.programs.output_gradient] = gradient
        reads = {}
        for node, exposed in exposures(plan.tree, spec):
            known = reads[node.op] = Reads.of(node.op, exposed)
            if gradient is not None and len(node.children) == 2:
                reads[dataclasses.replace(node.op, pair=True)] = known
            for child in range(len(node.children)) if gradient is not None else ():
                reads[_single(node.op, child)] = known.without(child)

        def bind(step: Step, inputs: Sequence[Any]) -> partial[Any]:
            op = step.op
            if op.source_dtype is not None:
                return partial(_compiled_cast(op.dtype), *inputs)
            own = reads.get(op) or Reads.of(op, (None,) * len(op.spec.inputs))
            function = _compiled(
                op=op, lowering=step.choice.lowering, mode=(mode, plan.options.precision), views=op.output_shapes,
                reads=own,
            )  # fmt: skip
            return partial(function, *inputs, *(arrays[name] for name in own.arrays))

        return Stepwise(values, bind, {})


@lru_cache(maxsize=64)
def _compiled_cast(dtype: str) -> Callable[..., list[Any]]:
    def cast(x: Any) -> list[Any]:
        if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(jnp.dtype(dtype), jnp.complexfloating):
            x = x.real
        return [lax.convert_element_type(x, jnp.dtype(dtype))]

    return jax.jit(cast)


def _checked_arrays(plan: Plan, indices: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Index arrays by letter, checked where their values can be seen, and the mode in which the steps read them."""
    spec, mode = plan.resolved.spec, plan.index_mode
    inexact = jnp.issubdtype(jnp.dtype(plan.dtype), jnp.inexact)

    def refuse_integers(name: str) -> None:
        if not inexact:
            raise PlannerError(
                f"index array {name!r} is traced and the result is {plan.dtype}, which has no NaN to mark a bad "
                "index with: pass index_mode='drop' or 'clip'"
            )

    values = {}
    concrete = True
    for name in spec.arrays:
        raw = indices[name]
        gathers = [g for g in spec.gathers if g.array == name]
        if isinstance(raw, JaxIndex):
            for gather in gathers:
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
            for gather in gathers:
                # A constant under jit is checked here, where its values can be seen; a primitive would be staged.
                raw = (
                    check_p.bind(raw, gather=gather, mode=mode)
                    if traced
                    else _check_impl(raw, gather=gather, mode=mode)
                )
        values[name] = raw
    return values, "checked" if mode == "raise" and concrete else mode


def _primal(x: Any) -> Any:
    """The array at which a tracer of eager differentiation stands; any other array, and tracer, is itself."""
    while type(x).__name__ in ("JVPTracer", "LinearizeTracer"):
        x = x.primal
    return x


backend = JaxBackend()
