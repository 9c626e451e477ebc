"""Rows that multiply slices, because torch's own einsum would copy an operand.

If the summed axes of an operand cannot be viewed as one dimension, einsum copies the operand, and keeps the copy for
the backward pass. But slices along one axis may be matrices without a copy. Their products are written or added into
one result one by one, or are computed as a batch that is summed afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner.backends.common.stock import Product, count_views
from planner.backends.common.stock_layout import matrix_copies, product_copies
from planner.backends.common.stock_rows import VIEW_LAUNCHES, small_matrix_seconds
from planner.backends.torch.cuda.stock import batch_seconds
from planner.backends.torch.ops import OPS
from planner.backends.torch.products.batches import dot_scratch, vector_seconds
from planner.backends.torch.products.einsum import copied_form, least_of_product, refuses_partial_sums, with_doubt
from planner.backends.torch.products.few_columns import few_scratch
from planner.backends.torch.products.few_rows import few_rows_scratch, first_as_rows
from planner.cost.device import Device
from planner.cost.figures import StepCost, Work
from planner.cost.layout import Layout, reordered, without
from planner.language.cached import cached_by_step
from planner.language.dtypes import itemsize
from planner.language.spec import Spec
from planner.program.forms import ProductForm
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Op

# A product on all cores that is added to the result of the one before waits for it. Two products of 128 x 1024 x 128
# took 25 us each longer than one of twice the terms, and sixteen took 50 us; 2 cores of an Intel Xeon at 2.8 GHz, torch
# 2.13, 2026-11-22.
_WAIT_SECONDS = 25e-6
# Times on a CPU as numbers of operators. The product of a slice takes the first with the views of its operands: 10 us.
# A step by slices takes the second besides, whatever their number. A batched product that is summed takes the third
# besides what it launches. The last two come from products of 2 to 16 slices of 16 x 16, beside `matmul` (one core of
# an AMD EPYC 9005, torch 2.13, 2026-11-30).
SLICE_LAUNCHES, _ALL_LAUNCHES, _SUM_LAUNCHES = 4.3, 6, 2


def sliced_rows() -> list[Implementation]:
    """Return the rows."""

    def row(name: str, find: Callable[[Op], Any], work: Any, run: Any, layouts: Any, least: Any) -> Implementation:
        return form_row(name, lambda op: refuses_partial_sums(op) or find(op), work, run, layouts, inputs=2,
                        inexact=("cuda",), alike=lambda op: _axis_of(find(op)), least=least)  # fmt: skip

    return [
        row("matmul by slices", _find_slices, _sliced_work, _run_sliced, _sliced_layouts, _sliced_least),
        row("batched matmul, then sum", _find_batch, _batched_work, _run_batched, _batched_layouts, _batched_least),
    ]


def _axis_of(found: tuple[Any, ...] | str) -> Any:
    """Return the axis that a row cuts, or None if it refuses the op."""
    return found[0] if isinstance(found, tuple) else None


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
    scratch = few_rows_scratch(form, op.dtype) if device.kind == "cpu" else 0
    rate = device.product_rate(m, n, k, op.dtype)
    work = Work(op.flops(), rate, moved, scratch=scratch, fresh=(op.result_bytes(),))
    wait = 0.0
    if accumulates and device.kind == "cpu":  # a product that takes less time than the wait runs on one core
        wait = min(device.work_seconds(work), count * _WAIT_SECONDS)
    launches = _ALL_LAUNCHES + count * SLICE_LAUNCHES if device.kind == "cpu" else count
    return [work, Work(launches=launches, seconds=wait)]


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
            torch.mm(first_as_rows(a, b), b, out=into)
        order = (axis, *part.left, *part.right)
    else:
        out = inputs[0].new_zeros((m, n))
        for a, b in zip(*slices, strict=True):
            out.addmm_(first_as_rows(a, b), b)
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
    others, launches = 0.0, 2
    if device.kind == "cpu":
        launches += _SUM_LAUNCHES
        scratch = dot_scratch(form, op.dtype) + few_scratch(form, op.dtype, spec) + few_rows_scratch(form, op.dtype)
        product = product._replace(scratch=wide + scratch)
        others = small_matrix_seconds(form, device) + vector_seconds(form, op, device)
    parts = [product, Work(seconds=others), Work(moved=wide + result, fresh=(result,), launches=launches)]
    return with_doubt(parts, device, 0.05) if device.kind == "cpu" else parts


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
