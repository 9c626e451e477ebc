"""Rows for products of two operands that torch's own einsum would copy, or multiply slowly.

If the summed axes of an operand cannot be viewed as one dimension, einsum copies the operand, and keeps the copy for
the backward pass. But slices along one axis may be matrices without a copy. Their products are written or added into
one result one by one, or are computed as a batch that is summed afterwards.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.elementwise import short_run_seconds
from planner.backends.common.stock import SMALL_MATRIX, Product, count_views
from planner.backends.common.stock_layout import matrix_copies, product_copies
from planner.backends.common.stock_rows import (
    SCATTERED_LAUNCHES,
    VIEW_LAUNCHES,
    small_matrix_seconds,
)
from planner.backends.torch.cuda.stock import batch_seconds
from planner.backends.torch.ops import OPS, viewing
from planner.cost.device import Device
from planner.cost.figures import StepCost, Work
from planner.cost.layout import Layout, flattens, reordered, without
from planner.language.cached import cached_by_step
from planner.language.dtypes import HALF_TYPES, itemsize
from planner.language.spec import Spec, Term, term_axes, term_gathers
from planner.program.forms import ProductForm, product_form
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Einsum, Op, joint_elements

MULTIPLY_SUM = "multiply, then sum"

# A product on all cores that is added to the result of the one before waits for it. Two products of 128 x 1024 x 128
# took 25 us each longer than one of twice the terms, and sixteen took 50 us; 2 cores of an Intel Xeon at 2.8 GHz, torch
# 2.13, 2026-11-22.
_WAIT_SECONDS = 25e-6
_OPERATORS: Any = torch._C._VariableFunctions
_LETTERS = string.ascii_uppercase + string.ascii_lowercase  # those of torch's einsum, in its order
MOST_LETTERS = len(_LETTERS)
# How many operators, as to their time, the product of a slice takes on a CPU with the views of its operands: 10 us.
SLICE_LAUNCHES = 4.3


def product_rows() -> list[Implementation]:
    """Return the rows."""

    def row(name: str, find: Callable[[Op], Any], work: Any, run: Any, layouts: Any, **fields: Any) -> Implementation:
        return form_row(name, lambda op: _rounds(op) or find(op), work, run, layouts, inputs=2, **fields)

    return [
        row("matmul by slices", _find_slices, _sliced_work, _run_sliced, _sliced_layouts, inexact=("cuda",),
            alike=lambda op: _axis_of(_find_slices(op)), least=_sliced_least),
        row("batched matmul, then sum", _find_batch, _batched_work, _run_batched, _batched_layouts,
            inexact=("cuda",), alike=lambda op: _axis_of(_find_batch(op)), least=_batched_least),
        row(MULTIPLY_SUM, _find_vectors, _summed_work, _run_summed, _summed_layouts,
            any_sizes=True, alike=_summed_order,
            least=lambda op, device: StepCost(picoseconds=int(2e12 * device.launch_seconds))),
    ]  # fmt: skip


def _axis_of(found: tuple[Any, ...] | str) -> Any:
    """Return the axis that a row cuts, or None if it refuses the op."""
    return found[0] if isinstance(found, tuple) else None


def least_of_product(op: Op, device: Device, launches: float) -> StepCost:
    """Return the least cost of a product in so many launches, each at no higher rate than the product as a whole."""
    form = product_form(op.spec)
    if form is None:
        return StepCost()
    batch, m, n, k = form.sizes
    most = float(device.most_product_rate(min(m, n, k), op.dtype))
    seconds = 2 * batch * m * n * k / most if form.contracted else 0.0
    return StepCost(picoseconds=int(1e12 * (seconds + launches * device.launch_seconds)))


def _rounds(op: Op) -> str | None:
    """Return why partial results in the op's dtype cannot be added up: they would be rounded."""
    return f"{op.dtype} would be rounded before it is summed" if op.dtype in (*HALF_TYPES, "bool") else None


def copied_form(op: Op) -> ProductForm | None:
    """Return the form of a product if torch would copy one of its operands in their present layouts, else None."""
    if not isinstance(op, Einsum):
        return None
    form = product_form(op.spec)
    if form is None or not form.contracted or not any(product_copies(form, op.spec, op.layouts or (None, None))):
        return None
    return form


def einsum_copies(op: Op) -> tuple[int, ...]:
    """Return, for each input, the bytes of the copy of it that `torch.bmm` is given, and that autograd then saves."""
    return tuple(whole for whole, _ in _einsum_copies(op)) or (0,) * len(op.spec.inputs)


def _einsum_copies(op: Op) -> list[tuple[int, int]]:
    """Return, for each input of a product, the bytes of two copies: for `torch.bmm`, and within it at any moment.

    The first makes the input a batch of matrices. Matrices without a stride of 1 are copied one at a time. Torch views
    axes of the result as one in its order, and summed ones in that of their letters.
    """
    form = product_form(op.spec) if isinstance(op, Einsum) else None
    if form is None or not form.contracted:
        return []
    batch, left, right = (
        tuple(sorted(group, key=op.spec.output.index)) for group in (form.batch, form.left, form.right)
    )
    form = dataclasses.replace(form, batch=batch, left=left, right=right, contracted=tuple(sorted(form.contracted)))
    layouts, size = op.layouts or (None, None), itemsize(op.dtype)
    if not any(product_copies(form, op.spec, layouts)):
        return []
    copies = []
    for term, layout, groups in zip(op.spec.inputs, layouts, form.matrices[:2], strict=True):
        if not matrix_copies(term, layout, groups, op.spec):
            copies.append((0, 0))
        elif not flattens(term, layout, groups, op.spec):
            copies.append((size * math.prod(op.spec.shape(term)), 0))
        else:
            copies.append((0, size * math.prod(op.spec.size(e) for group in groups[1:] for e in group)))
    return copies


def einsum_cost(op: Op, cost: StepCost, device: Device) -> StepCost:
    """Return what torch's own functions take for a step whose stock implementation takes `cost`.

    On a CPU they copy less: `torch.bmm` copies matrices one at a time, and the gradient of rows that were read is added
    up as it lies.
    """
    if device.kind != "cpu":
        return cost
    if len(op.spec.inputs) == 1 and term_gathers(op.spec.output):
        moved, copied, scratch = cost.bytes_moved, cost.copied_bytes, cost.scratch_bytes
        return cost._replace(bytes_moved=moved - 2 * copied, copied_bytes=0, scratch_bytes=scratch - copied)
    if len(op.spec.inputs) == 2 and (copies := _einsum_copies(op)):
        return cost._replace(scratch_bytes=cost.scratch_bytes - cost.copied_bytes + sum(map(sum, copies)))
    return cost


@cached_by_step
def _find_slices(op: Op) -> tuple[str, ProductForm] | str:
    """Return an axis along which the product needs no copy slice by slice, and the form of a slice's product.

    Slices along a summed axis are added up; slices along a row or column axis are parts of the result.
    """
    refusal = "no one axis parts operands that cannot be viewed flat"
    form, sizes, layouts = copied_form(op), op.spec.by_axis, op.layouts or (None, None)
    if form is None or form.batch:
        return refusal
    operands = tuple(zip(op.spec.inputs, layouts, strict=True))
    copied = [term for term, n in zip(op.spec.inputs, product_copies(form, op.spec, layouts), strict=True) if n]
    for axis in sorted((*form.contracted, *form.left, *form.right), key=lambda axis: (sizes[axis], axis)):
        if not all(axis in term for term in copied):
            continue
        left, right, summed = (tuple(e for e in g if e != axis) for g in (form.left, form.right, form.contracted))
        m, n, k = (math.prod(sizes[e] for e in g) for g in (left, right, summed))
        part = ProductForm((), left, right, summed, (1, m, n, k))
        if part.contracted and not any(
            matrix_copies(
                tuple(e for e in term if e != axis),
                without(layout, term.index(axis), op.spec.shape(term)) if axis in term else layout,
                groups,
                op.spec,
            )
            for (term, layout), groups in zip(operands, part.matrices[:2], strict=True)
        ):
            return axis, part
    return refusal


def _sliced_least(op: Op, device: Device) -> StepCost:
    # A slice along an axis of size 1 is as flat as the whole.
    count = min([size for size in op.spec.by_axis.values() if size > 1], default=0)
    return least_of_product(op, device, count * (SLICE_LAUNCHES if device.kind == "cpu" else 1))


def _sliced_work(op: Op, slices: tuple[str, ProductForm], device: Device) -> list[Work]:
    axis, form = slices
    count, (_, m, n, k) = op.spec.size(axis), form.sizes
    accumulates = axis not in op.spec.output
    moved = op.bytes_touched() + 2 * count * op.result_bytes() * accumulates
    work = Work(op.flops(), device.product_rate(m, n, k, op.dtype), moved, fresh=(op.result_bytes(),))
    wait = 0.0
    if accumulates and device.kind == "cpu":  # a product that takes less time than the wait runs on one core
        wait = min(device.work_seconds(work), count * _WAIT_SECONDS)
    return [work, Work(launches=count * (SLICE_LAUNCHES if device.kind == "cpu" else 1), seconds=wait)]


def _run_sliced(op: Op, form: tuple[str, ProductForm], inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    axis, part = form
    sizes = {
        e: size for x, term in zip(inputs, op.spec.inputs, strict=True) for e, size in zip(term, x.shape, strict=True)
    }
    m, n, k = (math.prod([sizes[e] for e in group]) for group in (part.left, part.right, part.contracted))
    slices = []
    groups_of = ((part.left, part.contracted), (part.contracted, part.right))
    for x, term, groups, shape in zip(inputs, op.spec.inputs, groups_of, ((m, k), (k, n)), strict=True):
        rest = [e for e in term if e != axis]
        views = x.movedim(term.index(axis), 0).unbind(0) if axis in term else [x] * sizes[axis]
        dims = [rest.index(e) for group in groups for e in group]
        slices.append([view.permute(dims).reshape(shape) for view in views])
    if axis in op.spec.output:
        out = inputs[0].new_empty((sizes[axis], m, n))
        for into, a, b in zip(out, *slices, strict=True):
            torch.mm(a, b, out=into)
        order = (axis, *part.left, *part.right)
    else:
        out = inputs[0].new_zeros((m, n))
        for a, b in zip(*slices, strict=True):
            out.addmm_(a, b)
        order = (*part.left, *part.right)
    shaped = out.view([sizes[e] for e in order])
    return (shaped.permute([order.index(str(e)) for e in op.spec.output]),)


def _sliced_layouts(op: Op, form: tuple[str, ProductForm]) -> tuple[Layout | None, ...]:
    axis, part = form
    order = (*((axis,) if axis in op.spec.output else ()), *part.left, *part.right)
    return (reordered(order, op.spec.output, op.spec),)


@cached_by_step
def _find_batch(op: Op) -> tuple[str, ProductForm, Spec] | str:
    """Return a summed axis that can be a batch axis instead, so that no operand is copied, and the batched product.

    The batched product is summed over that axis afterwards.
    """
    refusal = "no one summed axis parts operands that cannot be viewed flat"
    form, sizes, layouts = copied_form(op), op.spec.by_axis, op.layouts or (None, None)
    if form is None or len(form.contracted) < 2:
        return refusal
    for axis in sorted(form.contracted, key=lambda axis: (sizes[axis], axis)):
        rest = tuple([e for e in form.contracted if e != axis])
        together = tuple([str(e) for e in op.spec.inputs[0] if e == axis or e in form.batch])
        batch, m, n, k = form.sizes
        counts = (batch * sizes[axis], m, n, k // max(1, sizes[axis]))
        wide = ProductForm(together, form.left, form.right, rest, counts)
        if sizes[axis] > 1 and not any(map(matrix_copies, op.spec.inputs, layouts, wide.matrices, (op.spec, op.spec))):
            return axis, wide, Spec(op.spec.inputs, (*together, *form.left, *form.right), op.spec.sizes)
    return refusal


def _batched_least(op: Op, device: Device) -> StepCost:
    return least_of_product(op, device, 2 + (VIEW_LAUNCHES if device.kind == "cpu" else 0))


def _batched_work(op: Op, batched: tuple[str, ProductForm, Spec], device: Device) -> list[Work]:
    _, form, spec = batched
    batch, m, n, k = form.sizes
    wide, result = math.prod(spec.output_shape) * itemsize(op.dtype), op.result_bytes()
    read, rate = op.bytes_touched() - result, device.product_rate(m, n, k, op.dtype, batch)
    views = count_views(form, spec) if device.kind == "cpu" else 0
    product = Work(op.flops(), rate, read + wide, scratch=wide, fresh=(wide,), launches=VIEW_LAUNCHES * (views + 1),
                   matrices=device.matrices(batch),
                   seconds=batch_seconds(device, read + wide, batch))  # fmt: skip
    small = Work(seconds=small_matrix_seconds(form, device) if device.kind == "cpu" else 0.0)
    return [product, small, Work(moved=wide + result, fresh=(result,), launches=2)]


def _run_batched(op: Op, form: tuple[str, ProductForm, Spec], inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    return (_batched_product(op)(*inputs),)


@cached_by_step
def _batched_product(op: Op) -> Product:
    """Return the function that multiplies two operands as a batch and sums over the batch axis."""
    found = _find_batch(op)
    assert isinstance(found, tuple)
    axis, form, spec = found
    wide, summed = OPS.product(form, spec), (spec.output.index(axis),)
    order = [e for e in spec.output if e != axis]
    back = [order.index(e) for e in op.spec.output]
    return lambda a, b: OPS.permute(OPS.sum(wide(a, b), summed), back)


def _batched_layouts(op: Op, form: tuple[str, ProductForm, Spec]) -> tuple[Layout | None, ...]:
    axis, _, spec = form
    order = [e for e in spec.output if e != axis]
    return (reordered(order, op.spec.output, op.spec),)


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
    # The product lies as torch's loop takes it, which follows the operands.
    loops = short_run_seconds(order, spec.inputs, spec, device, follows=True)
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
        lies = [widest[d] for run in layout.runs for d in run]
        widest = (*(e for e in widest if e not in lies), *lies)
    # Of vectors and matrices the first ones have size 1.
    return (*(e for term in terms for e in term if e not in widest), *widest), larger


@cached_by_step
def summed_product(op: Op) -> Product:
    """Return the function that multiplies two operands element by element and sums."""
    order, larger = _summed_order(op)
    first_axes, second_axes, out = (term_axes(term) for term in op.spec.terms)

    def view_in_order(axes: tuple[str, ...]) -> Callable[[Any], Any]:
        """Return the function that gives an operand all axes in order; those that it lacks have size 1."""
        present = [e for e in order if e in axes]
        return viewing([axes.index(e) for e in present], [int(e in axes) for e in order])

    first, second = view_in_order(first_axes), view_in_order(second_axes)
    summed = tuple(dim for dim, e in enumerate(order) if e not in out)
    kept = [e for e in order if e in out]
    back = viewing([kept.index(e) for e in out], (1,) * len(out))

    def product(a: Tensor, b: Tensor) -> Tensor:
        # The product lies in memory as its first factor does.
        wide = second(b) * first(a) if larger else first(a) * second(b)
        return back(wide.sum(summed, dtype=wide.dtype))

    return product


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


def has_vectors(form: ProductForm, more_than: int = 0) -> bool:
    """Whether a product multiplies a batch of matrices by vectors, in more than so many multiplications in all.

    For the gradients of vectors autograd multiplies matrices by columns. That takes 86 us where rows take 9, for 16
    matrices of 512 x 16 (one core of an AMD EPYC, torch 2.13, 2026-11-27). Small matrices do not count: torch
    multiplies them in a loop, however they lie.
    """
    batch, m, n, k = form.sizes
    return batch > 1 and 1 in (m, n) and m * n * k >= SMALL_MATRIX and batch * m * n * k > more_than


def has_short_sums(form: ProductForm) -> bool:
    """Return whether gradients of a product of two matrices have few columns, which take longer than few rows.

    44 us for 56 to 275, by their strides, with 576 x 256 by 256 x 9 (one core of an AMD EPYC, torch 2.13, 2026-11-27).
    """
    batch, m, n, k = form.sizes
    return batch == 1 and k <= 16 and 2 * k <= min(m, n) and m * n * k > 2**15


def einsum_call(form: ProductForm, spec: Spec, output: Term, swapped: bool) -> Product:
    """Return torch's own einsum of a product, which multiplies matrices in the order of its operands.

    Args:
        form: the groups of axes; summed ones are viewed as one in its order.
        spec: the spec.
        output: the order of the axes of the result.
        swapped: whether the second operand comes first.
    """
    # The order of summed axes in memory is that of their letters.
    letters = dict(zip(dict.fromkeys((*form.contracted, *spec.axes)), _LETTERS, strict=False))
    first, second, out = ("".join(letters[str(axis)] for axis in term) for term in (*spec.inputs, output))
    einsum = _OPERATORS.einsum  # `torch.einsum` without its look for overrides and for a path
    equation = f"{second},{first}->{out}" if swapped else f"{first},{second}->{out}"
    return (lambda a, b: einsum(equation, (b, a))) if swapped else (lambda a, b: einsum(equation, (a, b)))


def count_matrix_views(form: ProductForm, spec: Spec) -> int:
    """Return how many calls the stock evaluation of a product makes for views, other than the product itself."""
    count = 0
    for term, groups in zip((*spec.inputs, spec.output), form.matrices, strict=True):
        count += tuple(axis for group in groups for axis in group) != term
        count += any(len(group) != 1 for group in (groups if form.batch else groups[1:]))
    return count
