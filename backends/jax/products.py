"""Products as JAX's own operation, and how many elements XLA copies for takes and sums."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from planner.backends.common.stock import Product
from planner.backends.common.stock_rows import stock_kind
from planner.backends.jax.compiled.arrangement import (
    arranged,
    count_copies_of,
    count_reordered,
    is_derived_slowly,
    wide_axes,
)
from planner.kernels.grouping.jax_grouping import accumulator
from planner.language.cached import cached_by_step
from planner.language.derive import swap_with_output
from planner.language.spec import Spec, Term, indexed_dims, plain_axes, stand_in, term_axes, term_gathers
from planner.program.forms import ProductForm, inner_product, known_product, product_form
from planner.program.ops import Einsum

# From so many matrices on, XLA's calls of a function for each take longer than a loop by element.
MANY_MATRICES = 16
# Unless XLA copies something, matrices of so many rows or columns are large. YNNPACK multiplies them fast if the sums
# have 4 or 8 terms. For a single matrix copies of at most this part of the result are then small: a loop took 1.8
# times as long (AMD EPYC, JAX 0.10.2, 2026-11-27). With `_LEAST_SIDE` rows and columns or more it took 1.0 to 2.8 times
# as long for sums of two terms, of 16 to 64 matrices in any order, and for a single matrix (Intel Xeon, 2026-11-28).
_LARGE_MATRIX, _SMALL_COPY, _LEAST_SIDE = 64, 1 / 8, 32
# A product whose result has fewer columns than this is narrow. A loop by element takes 0.1 to 0.9 of the time of XLA's
# product then: 26 us for 297 with 16,384 x 3 by 3 x 3 (one core of an AMD EPYC 7003, JAX 0.10.2, 2026-12-01).
_NARROW = 8
# The innermost axis of an outer product is short if it has fewer elements than this.
_SHORT_OUTER = 16
# Runs of so many neighbours or more take no longer to add up than other elements.
_LONG_RUN = 64


@cached_by_step
def as_dot(spec: Spec, lean: bool = False) -> Product:
    """Return the function that multiplies two operands as one `lax.dot_general`, and permutes nothing but the result.

    The operands may have more dimensions of size 1 than the spec, such as those that were broadcast. These and axes of
    size 1 that are summed are left free, so that JAX keeps the operands themselves for gradients. So are operands of
    narrower dtypes than that of the result.
    """
    # An arrangement is one of axes. Symbolic sizes cannot be compared, so numbers stand for them.
    planned = dataclasses.replace(spec, sizes=tuple((axis, stand_in(size)) for axis, size in spec.sizes))
    first, second, batch, contracted, _ = arranged(planned, lean)
    terms, out = [term_axes(spec.inputs[number]) for number in (first, second)], term_axes(spec.output)

    def product(*operands: Any, precision: Any = None, dtype: Any = None) -> Any:
        factors = (operands[first], operands[second])
        dims = [_dims_of(x.shape, term, spec) for x, term in zip(factors, terms, strict=True)]
        summed, shared = ([tuple(map(each.index, group)) for each in dims] for group in (contracted, batch))
        numbers = ((summed[0], summed[1]), (shared[0], shared[1]))
        result = lax.dot_general(*factors, numbers, precision=precision, preferred_element_type=dtype)
        axes = [*batch, *(axis for each in dims for axis in each if axis not in (*contracted, *batch))]
        result = lax.squeeze(result, [dim for dim, axis in enumerate(axes) if axis not in out])
        axes = [axis for axis in axes if axis in out]
        return result if axes == [*out] else lax.transpose(result, [axes.index(axis) for axis in out])

    return product


@cached_by_step
def multiply_and_add(spec: Spec) -> Product:
    """Return the function that multiplies two operands for one term of the sums after the other, and adds the products.

    XLA computes all of it in one loop over the elements of the result, without a copy of an operand. It is a call that
    XLA does not inline: a loop that reads the result would compute each element as often as it reads it.
    """
    terms, out = [term_axes(term) for term in spec.inputs], term_axes(spec.output)
    summed = [axis for axis in terms[0] if axis not in out]

    def part(x: Any, term: Term, at: Mapping[str, int]) -> Any:
        """Return one term of the sums of an operand, with an axis for each axis of the result."""
        kept, left = [axis for axis in out if axis in term], [axis for axis in term if axis not in at]
        for axis in at:
            x = lax.slice_in_dim(x, at[axis], at[axis] + 1, axis=term.index(axis))
        x = lax.transpose(lax.squeeze(x, [term.index(axis) for axis in at]), [left.index(axis) for axis in kept])
        return lax.broadcast_in_dim(x, spec.output_shape, [out.index(axis) for axis in kept])

    def product(a: Any, b: Any) -> Any:
        total, dtype = None, accumulator(a.dtype)
        a, b = (x if x.dtype == dtype else lax.convert_element_type(x, dtype) for x in (a, b))
        for numbers in itertools.product(*(range(spec.size(axis)) for axis in summed)):
            at = dict(zip(summed, numbers, strict=True))
            one = part(a, terms[0], at) * part(b, terms[1], at)
            total = one if total is None else total + one
        return total

    compiled = jax.jit(product)

    def call(a: Any, b: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return compiled(a, b)

    return call


def inner_strides(spec: Spec) -> list[int]:
    """Return how far apart neighbours along a product's innermost axis lie in each operand; 0 if it lacks the axis."""
    (*terms, out), sizes = [wide_axes(term, spec) for term in spec.terms], spec.by_axis
    return [math.prod(sizes[e] for e in term[term.index(out[-1]) + 1 :]) if out[-1] in term else 0 for term in terms]


@cached_by_step
def join_axes(spec: Spec) -> Spec:
    """Return the spec of a product in which axes that stand side by side in each term that has one are one axis.

    It is the same product of reshaped operands, which need no copy. Axes of size 1 stay apart: XLA would copy a result
    that lacks one behind a larger axis.
    """
    terms, sizes = [term_axes(term) for term in spec.terms], dict(spec.by_axis)

    def are_beside(one: str, other: str) -> bool:
        return all((one, other) in itertools.pairwise(term) for term in terms if one in term or other in term)

    wide = [pair for term in terms for pair in itertools.pairwise(term) if min(map(spec.size, pair)) > 1]
    before = {other: one for one, other in dict.fromkeys(wide) if are_beside(one, other)}
    for axis in before:
        first = axis
        while first in before:
            first = before[first]
        sizes[first] *= sizes.pop(axis)
    *inputs, output = (tuple(axis for axis in term if axis not in before) for term in terms)
    return Spec(tuple(inputs), output, tuple(sorted(sizes.items())))


def multiply_flat(spec: Spec, joined: Spec, *operands: Any) -> Any:
    """Multiply two operands by a product whose axes are joined, see `join_axes`."""
    views = [x.reshape(joined.shape(term)) for x, term in zip(operands, joined.inputs, strict=True)]
    return as_dot(joined, True)(*views).reshape(spec.output_shape)


def multiply_permuted(spec: Spec, other: Spec, *operands: Any) -> Any:
    """Multiply two operands by a product that has the result's axes in another order, and permute its result.

    XLA would turn a product round whose result is permuted, if it saw both at once.
    """
    result, order = lax.optimization_barrier(as_dot(other)(*operands)), term_axes(other.output)
    return lax.transpose(result, [order.index(axis) for axis in term_axes(spec.output)])


def _dims_of(shape: Sequence[Any], term: tuple[str, ...], spec: Spec) -> list[str]:
    """Return the axis of each dimension of an operand, and "" for a dimension of size 1 that the term lacks."""
    if len(shape) == len(term):
        return list(term)
    left, dims = list(term), []
    for size in shape:
        named = bool(left) and (size != 1 or spec.size(left[0]) == 1)
        dims.append(left.pop(0) if named else "")
    return dims


@cached_by_step
def count_copied(spec: Spec) -> int:
    """Return how many elements XLA copies for a sum, a segment sum, a diagonal or a product of what is taken."""
    before = _of_product(spec) if len(spec.inputs) == 2 else _of_operand(spec)
    out = spec.output
    indexed = tuple(out[d] for d in indexed_dims(out))
    if indexed:  # written row by row, each a slice of the remaining axes
        first = (*indexed, *(e for e in out if e not in indexed))
        copied = not _same_order(first, out, spec)
    else:
        term = spec.inputs[0]
        summed = len(spec.inputs) == 1 and not set(term) <= set(out) and not term_gathers(term)
        copied = summed and not _same_order(
            tuple(e for e in term if e in out), tuple(e for e in out if e in term), spec
        )
    return before + copied * math.prod(spec.output_shape)


def _of_operand(spec: Spec) -> int:
    """Return how many elements are copied of a single operand: diagonals that are summed, or rows that are added up."""
    (term,), out = spec.inputs, spec.output
    if term_gathers(term):
        return 0
    if len(set(term)) < len(term):
        return 0 if set(term) <= set(out) else math.prod(spec.shape(tuple(dict.fromkeys(term))))
    gathers = term_gathers(out)
    if not gathers:
        return 0
    wanted = dict.fromkeys((*term_axes(gathers), *plain_axes(out)))
    if any(e not in term and spec.size(e) != 1 for e in wanted):  # repeated along an axis that it lacks
        return math.prod(spec.shape(tuple(wanted)))
    order = tuple(e for e in wanted if e in term)
    return 0 if _same_order(tuple(e for e in term if e in order), order, spec) else math.prod(spec.shape(term))


def _of_product(spec: Spec) -> int:
    """Return how many elements are copied for a product with a take before it or a segment sum after it."""
    if not spec.gathers:
        return 0
    inner = product_within(spec)
    form = product_form(inner)
    if form is None or not form.contracted:
        return 0
    # A take writes its result in the order that the product needs, and a product in the order of the segment sum.
    return count_copies_of(inner, [place for place, term in enumerate(spec.terms) if not term_gathers(term)])


def fused_takes(spec: Spec) -> int:
    """Return how many of the elements that a product takes are never in memory.

    XLA takes elements and sums axes that only one operand has in one loop. A product without a sum joins that loop.
    """
    fused = 0
    inner = product_within(spec)
    form = product_form(inner)
    for term, kept in zip(spec.inputs, inner.inputs, strict=True):
        if term_gathers(term):
            taken, left = (math.prod(spec.shape(axes)) for axes in (term_axes(term), kept))
            whole = left == taken and form is not None and not form.contracted
            fused += taken if whole else taken - left
    return fused


def count_taken_apart(spec: Spec) -> int:
    """Return how many runs of neighbouring elements XLA takes for the inputs beyond one for each index."""
    apart = 0
    for term in spec.inputs:
        if gathers := term_gathers(term):
            before = term[: indexed_dims(term)[-1] + 1]
            apart += math.prod(spec.shape(term_axes(before))) - math.prod(spec.shape(term_axes(gathers)))
    return apart


def multiplies_fast(spec: Spec, form: ProductForm) -> bool:
    """Return whether XLA multiplies matrices with few terms as fast as a loop by element does."""
    batch, rows, columns, terms = form.sizes
    least, even = min(rows, columns), terms % 4 == 0
    wide = least > 1 and max(rows, columns) >= _LARGE_MATRIX
    broad = wide and least >= _LEAST_SIDE
    if broad and terms == 2:
        return True
    few = _SMALL_COPY * rows * columns if batch == 1 and (even or broad) else 0
    return (batch < MANY_MATRICES or (wide and even)) and count_reordered(spec).elements <= few


def is_narrow(spec: Spec) -> bool:
    """Return whether XLA multiplies matrices slowly because the result has many rows of few columns.

    It multiplies vectors, matrices with one row or column, in a loop.
    """
    form, out = known_product(spec), wide_axes(spec.output, spec)
    _, *sides, _ = form.sizes
    rows, columns = sides if out and out[-1] in form.right else sides[::-1]
    return 1 < columns < _NARROW and rows >= _LARGE_MATRIX


def count_short_outer(spec: Spec) -> int:
    """Return how many elements an outer product of two operands has, if its innermost axis is short; else 0."""
    form = product_form(spec)
    if form is None or form.contracted or 1 in form.sizes[1:3] or spec.size(spec.output[-1]) >= _SHORT_OUTER:
        return 0
    return math.prod(spec.output_shape)


def short_runs(spec: Spec) -> float:
    """Return how many short runs of neighbours a sum of one operand adds up, each by the part that it lacks."""
    term, summed = spec.inputs[0], 1
    if len(spec.inputs) > 1 or spec.gathers or len({*term}) < len(term):
        return 0.0
    for axis in itertools.takewhile(lambda axis: axis not in spec.output, reversed(term)):
        summed *= spec.size(axis)
    elements = math.prod(spec.shape(term))
    return elements / summed * (1 - summed / _LONG_RUN) if 1 < summed < _LONG_RUN else 0.0


def has_slow_gradients(op: Einsum, operands: tuple[int, ...]) -> bool:
    """Return whether XLA for CPUs takes longer for gradients that JAX derives than for those that are steps of ours.

    Args:
        op: the step.
        operands: the numbers of the operands whose gradients are computed.
    """
    if stock_kind(op) != "matmul":
        return False
    swapped = {place: Einsum(swap_with_output(op.spec, place), op.dtype) for place in operands}
    return is_derived_slowly(op.spec, tuple(place for place in operands if stock_kind(swapped[place]) == "matmul"))


def product_within(spec: Spec) -> Spec:
    """Return the spec of the product that is left after takes, and after sums over axes that only one input has."""
    kept = []
    for number, term in enumerate(spec.inputs):
        others = {axis for place, other in enumerate(spec.terms) if place != number for axis in term_axes(other)}
        kept.append(tuple(axis for axis in term_axes(term) if axis in others))
    return inner_product(spec, kept)


def _same_order(one: Term, other: Term, spec: Spec) -> bool:
    return [e for e in one if spec.size(e) != 1] == [e for e in other if spec.size(e) != 1]
