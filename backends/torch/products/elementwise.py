"""Products of two operands as elementwise products that are summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.elementwise import LINE_BYTES, runs_of, short_run_seconds
from planner.backends.common.stock import Product
from planner.backends.common.stock_rows import SCATTERED_LAUNCHES, VIEW_LAUNCHES
from planner.backends.torch.contexts.modes import usual
from planner.backends.torch.ops import viewing
from planner.backends.torch.products.einsum import refuses_partial_sums, with_doubt
from planner.backends.torch.strides import STRIDE_OPS, Strided
from planner.cost.device import Device
from planner.cost.figures import StepCost, Work
from planner.cost.layout import Layout, in_memory, layout_of, neighbours, reordered, without
from planner.language.cached import cached_by_step
from planner.language.dtypes import itemsize
from planner.language.spec import Spec, term_axes
from planner.program.forms import ProductForm, known_product, product_form
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Einsum, Op, joint_elements

MULTIPLY_SUM, MULTIPLY_ADD = "multiply, then sum", "multiply and add, term by term"
SUM_SLICES = "multiply, then sum, slice by slice"
# The rows of this module. Torch counts no FLOPs of what they call.
BY_ELEMENT = (MULTIPLY_SUM, SUM_SLICES, MULTIPLY_ADD)
# The bytes of a slice's product, which stays in the cache; and how many operators, as to their time, a slice takes.
_SLICE_BYTES, _SLICE_LAUNCHES = 2**21, 4.0
# The least bytes of neighbours in a slice. Reading shorter pieces takes up to ten times as long: 4 million products in
# slices with pieces of 128 bytes take 21 ms, and 2 whole (one core of an AMD EPYC 7003, torch 2.13, 2026-11-29).
_PIECE_BYTES = 2**10
# How many operators, as to their time, `added_product` takes for each term, and to cut the operands.
TERM_LAUNCHES, CUT_LAUNCHES = 1.2, 7.0
_MOST_TERMS = 64
# What torch takes to multiply and add an element where that is more than moving it: one core of an Intel Xeon with
# AVX-512, torch 2.13, 2026-11-29.
_ADD_SECONDS = {"complex64": 8e-10, "complex128": 1.6e-9, "int64": 1.5e-9, "int32": 1e-9}


def elementwise_rows() -> list[Implementation]:
    """Return the rows."""

    def row(name: str, find: Callable[[Op], Any], work: Any, run: Any, layouts: Any, **fields: Any) -> Implementation:
        return form_row(name, lambda op: refuses_partial_sums(op) or find(op), work, run, layouts, inputs=2,
                        any_sizes=True, least=_least, **fields)  # fmt: skip

    return [
        row(MULTIPLY_SUM, _find_vectors, _summed_work, _run_summed, _summed_layouts, alike=_summed_order),
        row(MULTIPLY_ADD, _find_terms, _added_work, _run_added, None, kinds=("cpu",),
            alike=lambda op: None if isinstance(_find_terms(op), str) else True),
        row(SUM_SLICES, _find_slices, _slices_work, _run_slices, _summed_layouts, kinds=("cpu",), alike=_slice_order),
    ]  # fmt: skip


def _least(op: Op, device: Device) -> StepCost:
    return StepCost(picoseconds=int(2e12 * device.launch_seconds))


def _find_vectors(op: Op) -> ProductForm | str:
    """Return the form of a product in which one operand is a vector, or a batch of vectors."""
    form = product_form(op.spec) if isinstance(op, Einsum) else None
    if form is None or not form.contracted or 1 not in form.sizes[1:3]:
        return "both operands have rows or columns of their own"
    return form


def _summed_work(op: Op, form: ProductForm, device: Device) -> list[Work]:
    spec, wide, result = op.spec, joint_elements(op.spec) * itemsize(op.dtype), op.result_bytes()
    product = Work(op.flops(), moved=op.bytes_touched() - result + wide, scratch=wide, fresh=(wide,), launches=1)
    total = Work(moved=wide + result, fresh=(result,), launches=1)
    if device.kind != "cpu":
        return [product, total]
    order, _ = _summed_order(op)
    # Torch's loop takes the order of the larger operand, and the product lies so.
    loops = short_run_seconds(order, spec.inputs, spec, device, op.layouts)
    short = loops + short_run_seconds(order, [spec.output], spec, device, follows=True)
    axes = [term_axes(term) for term in spec.inputs]
    views = sum(([e for e in order if e in each] != [*each]) + (len(each) < len(order)) for each in axes)
    launches = VIEW_LAUNCHES * views + SCATTERED_LAUNCHES * (views > 0)
    return [product, total, Work(launches=launches, seconds=short)]


def _run_summed(op: Op, form: ProductForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    return (summed_product(op)(*inputs),)


def _summed_layouts(op: Op, form: ProductForm) -> tuple[Layout | None, ...]:
    return (reordered(summed_axes(op), op.spec.output, op.spec),)


def summed_axes(op: Op) -> tuple[str, ...]:
    """Return the axes of the result of `summed_product` as it lies in memory."""
    out = term_axes(op.spec.output)
    return tuple(e for e in _summed_order(op)[0] if e in out)


def _summed_order(op: Op) -> tuple[tuple[str, ...], int]:
    """Return the order of the axes in which elements are multiplied and summed, and the number of the larger operand.

    It is the order in which the larger operand lies in memory. Sums in another order take up to 15 times as long. The
    result is viewed in its own order.
    """
    sizes, layouts = op.spec.by_axis, op.layouts or (None, None)
    terms = [term_axes(term) for term in op.spec.inputs]
    larger = max((0, 1), key=lambda number: math.prod(sizes[e] for e in terms[number]))
    widest, layout = terms[larger], layouts[larger]
    if layout is not None and not layout.unknown:
        lies = term_axes(in_memory(widest, layout))
        widest = (*(e for e in widest if e not in lies), *lies)
    # Of vectors and matrices the first ones have size 1.
    return (*(e for term in terms for e in term if e not in widest), *widest), larger


def _is_watched(a: Tensor, b: Tensor) -> bool:
    """Whether autograd, a transform or a mode may read what a product of two operands writes in place."""
    return not usual(a, b) or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))


def _views_in_order(op: Op) -> tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any], tuple[int, ...]]:
    """Return what views each operand with all axes in order, what views the sum as the result, and what is summed."""
    order, _ = _summed_order(op)
    first_axes, second_axes, out = (term_axes(term) for term in op.spec.terms)

    def view_in_order(axes: tuple[str, ...]) -> Callable[[Any], Any]:
        """Return the function that gives an operand all axes in order; those that it lacks have size 1."""
        present = [e for e in order if e in axes]
        return viewing([axes.index(e) for e in present], [int(e in axes) for e in order])

    summed = tuple(dim for dim, e in enumerate(order) if e not in out)
    kept = [e for e in order if e in out]
    back = viewing([kept.index(e) for e in out], (1,) * len(out))
    return view_in_order(first_axes), view_in_order(second_axes), back, summed


@cached_by_step
def summed_product(op: Op) -> Product:
    """Return the function that multiplies two operands element by element and sums."""
    _, larger = _summed_order(op)
    first, second, back, summed = _views_in_order(op)

    def product(a: Tensor, b: Tensor) -> Tensor:
        # The product lies in memory as its first factor does.
        wide = second(b) * first(a) if larger else first(a) * second(b)
        return back(wide.sum(summed, dtype=wide.dtype))

    return product


@cached_by_step
def _find_slices(op: Op) -> str | tuple[str, int]:
    """Return the axis that cuts a product into slices which fit in the cache, and how long a slice is.

    `sliced_sum` multiplies and sums one after the other. The whole product would take memory, and would not stay in
    the cache. Of 2^21 products that are summed by 512, both ways take 0.9 ms once a process has that memory, and `bmm`
    takes 2.8 (one core of an AMD EPYC 7003, torch 2.13, 2026-11-29).
    """
    form = _find_vectors(op)
    if isinstance(form, str):
        return form
    out, size = term_axes(op.spec.output), joint_elements(op.spec) * itemsize(op.dtype)
    outer = 1  # the elements of the axes outside of the one that is cut
    for axis in _summed_order(op)[0]:
        whole = op.spec.size(axis)
        length, pieces, outer = _slice_length(size, whole), outer, outer * whole
        if axis not in out or 2 * length > whole or size * length > 2 * _SLICE_BYTES * whole:
            continue
        if pieces > 1 and size // outer * length < _PIECE_BYTES:
            continue
        # Torch sums to one element in parts, which need memory.
        if (whole % length or length) * math.prod(op.spec.output_shape) > whole:
            return axis, length
    return "no axis of the result cuts the product into slices that fit in the cache"


def _slice_length(size: int, length: int) -> int:
    """Return how long slices are along the axis that cuts a product, from its bytes and the length of the axis."""
    return max(1, _SLICE_BYTES * length // max(1, size))


def _slice_order(op: Op) -> Any:
    found = _find_slices(op)
    return None if isinstance(found, str) else (found[0], _summed_order(op))


def _slices_work(op: Op, found: tuple[str, int], device: Device) -> list[Work]:
    axis, length = found
    count, result = -(-op.spec.size(axis) // length), op.result_bytes()
    product, _, views = _summed_work(op, known_product(op.spec), device)
    scratch, wide = product.scratch // op.spec.size(axis) * length, product.scratch
    inside = 2 * wide / device.cache_bandwidth  # what is written to the cache and read from it
    launches = views.launches + count * _SLICE_LAUNCHES
    product = Work(op.flops(), moved=op.bytes_touched(), scratch=scratch, fresh=(result,), launches=launches)
    return with_doubt([product, views._replace(launches=0), Work(seconds=inside)], device, 0.1)


def _run_slices(op: Op, found: tuple[str, int], inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    return (sliced_sum(op)(*inputs),)


@cached_by_step
def sliced_sum(op: Op) -> Product:
    """Return the function that does what `summed_product` does, slice by slice: the product of each stays in the cache.

    Where something else may read what is written in place, the product is summed as a whole.
    """
    found, whole = _find_slices(op), summed_product(op)
    if isinstance(found, str):
        return whole
    (order, _), (first, second, back, summed) = _summed_order(op), _views_in_order(op)
    dim, out_dim = order.index(found[0]), summed_axes(op).index(found[0])

    def product(a: Tensor, b: Tensor) -> Tensor:
        if _is_watched(a, b):
            return whole(a, b)
        x, y = first(a), second(b)
        shape = [n if m == 1 else m for m, n in zip(x.shape, y.shape, strict=True)]
        size = shape[dim]
        length = _slice_length(math.prod(shape) * x.element_size(), size)
        result = x.new_empty([n for place, n in enumerate(shape) if place not in summed])
        shape[dim] = min(size, length)
        scratch = x.new_empty(shape)
        count = max(1, -(-size // length))
        parts = [t.split(length, dim) if t.shape[dim] > 1 else [t] * count for t in (x, y)]
        for x, y, into in zip(*parts, result.split(length, out_dim), strict=True):
            part = scratch.narrow(dim, 0, into.shape[out_dim])
            torch.sum(torch.mul(x, y, out=part), summed, dtype=part.dtype, out=into)
        return back(result)

    return product


@cached_by_step
def _find_terms(op: Op) -> ProductForm | str:
    """Return the form of a product of a batch that lies innermost in both operands and in the result.

    Torch copies each matrix of such a batch, or multiplies small ones element by element: 4,096 complex products of 2 x
    20 by 20 x 20 take 20 ms (one core of an Intel Xeon with AVX-512, torch 2.13, 2026-11-29). To multiply along the
    batch, and to add up the terms, takes 2.7 ms.
    """
    form, layouts = product_form(op.spec) if isinstance(op, Einsum) else None, op.layouts or (None, None)
    if form is None or not form.contracted or not form.batch:
        return "needs a batch and a summed axis"
    innermost = {neighbours(term, x, op.spec) for term, x in zip(op.spec.terms, (*layouts, None), strict=True)}
    if len(innermost) > 1 or not innermost <= {*form.batch}:
        return "the batch is not innermost in both operands and the result"
    return form if 1 <= form.sizes[3] <= _MOST_TERMS else f"needs 1 to {_MOST_TERMS} terms"


def _added_work(op: Op, form: ProductForm, device: Device) -> list[Work]:
    count, result, spec = form.sizes[3], op.result_bytes(), op.spec
    read, terms, layouts = op.bytes_touched() - result, [], []
    for term, layout in zip(spec.inputs, op.layouts or (None, None), strict=True):
        for axis in form.contracted:  # what a term reads lies apart
            layout = without(layout, term.index(axis), spec.shape(term))
            term = tuple(e for e in term if e != axis)
        terms.append(term)
        layouts.append(layout)
    (*_, run), _ = runs_of(term_axes(spec.output), terms, spec, layouts)
    lines = max(1, LINE_BYTES // max(1, run * itemsize(op.dtype)))  # each term reads whole lines of the cache
    adding = math.prod(spec.output_shape) * _ADD_SECONDS.get(op.dtype, 0.0)
    adding = max(adding, device.moving_seconds(2 * result))
    adding += short_run_seconds(term_axes(spec.output), terms, spec, device, layouts)
    moved, launches = op.bytes_touched() + 2 * (count - 1) * result, count * TERM_LAUNCHES + CUT_LAUNCHES
    seconds = count * adding + device.moving_seconds(read * lines)
    return [Work(op.flops(), moved=moved, fresh=(result,), seconds=seconds, launches=launches)]


def _run_added(op: Op, form: ProductForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    return (added_product(op)(*inputs),)


@cached_by_step
def added_product(op: Op) -> Product:
    """Return the function that multiplies two operands term by term, and adds the terms up in place."""
    form, out = known_product(op.spec), term_axes(op.spec.output)

    def terms_of(axes: tuple[str, ...]) -> Callable[[Any], list[Tensor]]:
        """Return the function that cuts an operand into what each term reads, with all axes of the output in order."""
        order = [*form.contracted, *(e for e in out if e in axes)]
        view = viewing([axes.index(e) for e in order], [1] * len(form.contracted) + [int(e in axes) for e in out])

        def cut(x: Tensor) -> list[Tensor]:
            parts = list(view(x).unbind(0))
            for _ in form.contracted[1:]:
                parts = [part for whole in parts for part in whole.unbind(0)]
            return parts

        return cut

    first, second = map(terms_of, map(term_axes, op.spec.inputs))

    def product(a: Tensor, b: Tensor) -> Tensor:
        (x, *others), (y, *more) = first(a), second(b)
        if _is_watched(a, b):
            total = x * y  # others may read what a write in place would change
            for x, y in zip(others, more, strict=True):
                total = torch.addcmul(total, x, y)
            return total.contiguous()
        result = x.new_empty([n if m == 1 else m for m, n in zip(x.shape, y.shape, strict=True)])
        torch.mul(x, y, out=result)
        for x, y in zip(others, more, strict=True):
            result.addcmul_(x, y)
        return result

    return product


def native_by_element(row: str, op: Op, standins: Sequence[Strided]) -> tuple[Product, Strided]:
    """Return the function that runs a step in a row of `BY_ELEMENT`, and the stand-in of its result.

    Args:
        row: the row.
        op: the step.
        standins: the stand-ins of its inputs.
    """
    if row == MULTIPLY_ADD:
        return added_product(op), Strided.new(op.spec.output_shape)
    planned = op.with_layouts(layout_of(x.shape, x.strides) for x in standins)
    order = summed_axes(planned)
    trains, copied = any(x.requires_grad for x in standins), any(x.copied for x in standins)
    result = Strided.new(op.spec.shape(order), trains, copied)
    run = summed_product(planned) if row == MULTIPLY_SUM else sliced_sum(planned)
    return run, STRIDE_OPS.permute(result, [order.index(str(e)) for e in op.spec.output])


@cached_by_step
def broadcast_product(spec: Spec) -> Product:
    """Return a product by element with the strides that torch gives it, in fewer calls than `OPS.product`.

    Operands get the axes of the output, of size 1 where they lack one, but for leading ones.
    """
    out = term_axes(spec.output)

    def view_as_output(term: tuple[str, ...]) -> Callable[[Any], Any]:
        order = [*(e for e in out if e in term), *(e for e in term if e not in out)]
        lengths = [int(e in term) for e in out]
        leading = lengths.index(1) if 1 in lengths else len(lengths)
        return viewing([term.index(e) for e in order], lengths[leading:])

    first, second = map(view_as_output, map(term_axes, spec.inputs))
    return lambda a, b: torch.mul(first(a), second(b))
