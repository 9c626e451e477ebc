"""Copies of operands: in the order that takes the least time, once for both gradients, and before they are repeated.

A copy of a matrix takes long if it changes which elements are neighbours: 4 x 8192 x 128 floats take 27 ms so, and 4 if
their rows stay rows (one core of an Intel Xeon with AVX-512, torch 2.13, 2026-11-29). Matrices may be multiplied as
their transposes, so a copy never has to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from planner.backends.common.elementwise import short_run_seconds
from planner.backends.common.stock import Product, evaluation, is_swapped, matmul_product
from planner.backends.common.stock_layout import matrix_copies, product_copies
from planner.backends.common.stock_rows import (
    VIEW_LAUNCHES,
    copy_loops_seconds,
    flat_stock_work,
    has_small_vectors,
    inner_group,
    stock_kind,
)
from planner.backends.torch.contexts.modes import usual
from planner.backends.torch.ops import OPS, TorchOps, multiply, unit_strided, viewing
from planner.backends.torch.products.einsum import one_call as einsum_one_call
from planner.backends.torch.products.einsum import recorded_form
from planner.backends.torch.products.few_columns import few_scratch
from planner.backends.torch.products.few_rows import few_rows_scratch
from planner.backends.torch.products.transposed import TRANSPOSED, result_ops
from planner.backends.torch.strides import Strided
from planner.cost.device import Device
from planner.cost.figures import StepCost, Work
from planner.cost.layout import Layout, flattens, layout_of, neighbours, reordered
from planner.language.cached import cached_by_step
from planner.language.derive import swap_with_output
from planner.language.dtypes import itemsize
from planner.language.spec import Gather, Spec, Term, term_axes
from planner.program.calls import PreparedRun, Run
from planner.program.forms import ProductForm, known_product, product_form, product_of_rows
from planner.program.implementations import Implementation, Table, form_row
from planner.program.ops import Einsum, JointGradient, Op
from planner.program.program import Programs, Step

ONE_COPY, COPY_FIRST = "both gradients, one copy", "copy, then multiply"
# An operand is copied before a product by element if the product has so many times as many elements: 5 x 1024 x 1 by a
# transposed 5 x 1 x 1024 take 3.6 ms, and 1.4 with a copy (one core of an AMD EPYC 7003, torch 2.13, 2026-11-29).
_REPEATED = 4
# An operand is copied in its own order, and not in einsum's, if it has so many elements, and so many along the axis of
# stride 1. Of twelve products with such operands, five then took 0.49 to 0.95 of the time, five 0.97 to 1.06, and two
# 1.09 and 1.27. With axes of 2 to 4 elements others took up to 2.4 times as long (the machine of `one_call`).
_LEAST_COPIED, _LEAST_RUN = 2**15, 16


class TurnedOps(TorchOps):
    """`TorchOps` that copy some operands of products as the transposes of matrices.

    Args:
        turned: which operands they are.
    """

    def __init__(self, turned: tuple[bool, bool]) -> None:
        self.turned = turned

    def product(self, form: ProductForm, spec: Spec) -> Product:
        """Return the function that computes a product."""
        first, second = self.turned[::-1] if is_swapped(form, spec, vectors_first=True) else self.turned

        # `matmul_product` copies the transpose if its axes cannot be joined. If they can, it makes a view, and a copy
        # is made here if the view has no stride of 1.
        def matmul(a: Tensor, b: Tensor) -> Tensor:
            return self.matmul(unit_strided(a.mT).mT if first else a, unit_strided(b.mT).mT if second else b)

        return matmul_product(matmul, multiply, viewing, form, spec, vectors_first=True, turned=self.turned)


@lru_cache
def _ops(turned: tuple[bool, bool]) -> TorchOps:
    return TurnedOps(turned) if any(turned) else OPS


@cached_by_step
def copying_ops(op: Op) -> TorchOps:
    """Return what runs a product, and makes its copies in the order of axes in which operands lie in memory.

    Rows that a step takes first are row-major then.
    """
    spec = product_of_rows(op.spec)
    form = product_form(spec) if len(spec.inputs) == 2 else None
    if form is None or not form.contracted or op.dtype == "bool":
        return OPS
    swapped, turned = is_swapped(form, spec, vectors_first=True), []
    for number, (term, given) in enumerate(zip(spec.inputs, op.layouts or (None, None), strict=True)):
        layout = given if term == op.spec.inputs[number] else None
        groups, free = form.matrices[number], (form.left, form.right)[number]
        rows = free if (number == 0) != swapped else form.contracted
        inner = form.contracted if has_small_vectors(form) else inner_group(groups, term, layout, spec)
        turned.append(inner == rows and matrix_copies(term, layout, groups, spec) > 0)
    first, second = turned
    return _ops((first, second))


def native_ops(op: Op, standins: Sequence[Strided], last: bool) -> TorchOps:
    """Return what runs a product with index arrays as native calls without gradients, perhaps as the last of a plan."""
    ops = copying_ops(op.with_layouts(layout_of(x.shape, x.strides) for x in standins))
    return result_ops(op.dtype) if last and ops is OPS else ops


def one_call(op: Op, standins: Sequence[Strided], recorded: bool) -> Callable[..., Tensor] | None:
    """Return `einsum.one_call`, but without gradients large operands are copied in their own order.

    Einsum's copy of 16 x 32 x 64 x 2 elements that lie as 16 x 2 x 32 x 64, and its product with 16 x 4 x 64 x 32, take
    156 us; in the order of the operand they take 55 (one core of an Intel Xeon of 2023, torch 2.13, 2026-12-01).
    """
    call = einsum_one_call(op, standins, recorded)
    planned = op.with_layouts(layout_of(x.shape, x.strides) for x in standins)
    ops = copying_ops(planned)
    if call is None or recorded or not isinstance(ops, TurnedOps):
        return call
    layouts, spec, einsum = planned.layouts or (None, None), op.spec, call
    close = [neighbours(term, layout, spec) for term, layout in zip(spec.inputs, layouts, strict=True)]
    # The operands that are copied as transposes, and the dimension of each that has stride 1.
    turned = [
        (number, spec.inputs[number].index(axis))
        for number, axis in enumerate(close)
        if ops.turned[number] and axis is not None
    ]
    product = ops.product(known_product(spec), spec)

    def run(a: Tensor, b: Tensor) -> Tensor:
        if usual(a, b):  # elsewhere sizes may be symbols. A family's members share these calls.
            for number, dim in turned:
                x = b if number else a
                if x.shape[dim] >= _LEAST_RUN and x.numel() >= _LEAST_COPIED:
                    return product(a, b)
        return einsum(a, b)

    return run


def _innermost(term: Term, layout: Layout | None, batch: Sequence[str], spec: Spec) -> str | Gather | None:
    """Return the innermost axis in memory of an array, but for those of a batch."""
    lies = range(len(term)) if layout is None else [d for run in layout.runs for d in run]
    return next((term[d] for d in reversed(lies) if term[d] not in batch and term[d] in spec.wide), None)


def with_quick_copies(row: Implementation) -> Implementation:
    """Return the stock row of products, which on a CPU makes its copies in the order that takes the least time."""

    def prepare(op: Op) -> Run:
        ops = copying_ops(op)
        if ops is OPS:
            return row.prepared(op)
        on_card, quick = row.prepared(op), evaluation(ops, op.spec)

        def run(inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
            if not inputs[0].is_cpu:
                return on_card(inputs, index)
            return (quick(inputs, index, bool(op.gathers) and getattr(index, "may_drop", True)),)

        return run

    return dataclasses.replace(row, run=PreparedRun(prepare, any_sizes=True))


def with_kept_copies(
    forward: Sequence[Step], backward: Sequence[Step], table: Table, device: Device
) -> tuple[list[Step], list[Step]]:
    """Return the steps of both programs of a plan that autograd runs, if it keeps copies in place of operands.

    Torch copies into the order of the axes of matrices, which may take longer than planner's own copies. The backward
    program reads the copies. Those that `bmm` makes for unit strides are not kept. Only prices change: by their ops the
    members of a family find their rows.
    """
    orders: dict[int, list[str]] = {}
    before = []
    for step in forward:
        seconds, form = 0.0, product_form(step.op.spec) if isinstance(step.op, Einsum) else None
        if form is not None and form.contracted:
            written = recorded_form(step.op, last=step is forward[-1])
            for number, order in _orders_of_copies(step.op, written).items():
                orders[step.inputs[number]] = order
                seconds += copy_loops_seconds(number, written, step.op, device, in_order=True)
                seconds -= copy_loops_seconds(number, form, step.op, device)
        cost = step.choice.cost
        cost = cost._replace(picoseconds=cost.picoseconds + max(0, round(1e12 * seconds)))
        before.append(dataclasses.replace(step, choice=dataclasses.replace(step.choice, cost=cost)))
    after = []
    for step in backward:
        if isinstance(step.op, Einsum) and not orders.keys().isdisjoint(step.inputs):
            terms, lie = step.op.spec.inputs, step.op.layouts or (None,) * len(step.inputs)
            read = [
                reordered(orders[variable], term, step.op.spec) if variable in orders else layout
                for variable, term, layout in zip(step.inputs, terms, lie, strict=True)
            ]
            op = step.op.with_layouts(tuple(read))
            choice = table.price(step.choice.lowering, op, device)
            step = step if choice is None else dataclasses.replace(step, choice=choice)
        after.append(step)
    return before, after


def _orders_of_copies(op: Op, form: ProductForm) -> dict[int, list[str]]:
    """Return the orders of axes into which torch copies operands of a product of matrices, by the operands' numbers."""
    layouts = op.layouts or (None, None)
    return {
        number: [axis for group in groups for axis in group]
        for number, groups in enumerate(form.matrices[:2])
        if not flattens(op.spec.inputs[number], layouts[number], groups, op.spec)
    }


def gradient_copy(programs: Programs) -> Callable[[Tensor], Tensor] | None:
    """Return what copies a row-major output gradient into the order that the backward program was planned for.

    It returns any other gradient as it is. Return None if no step needs the copy, or if a product of matrices would not
    make it: that one would take more memory with the copy beside it. A product by element that repeats the gradient
    has a much larger result.
    """
    number, steps = programs.output_gradient, () if programs.backward is None else programs.backward.steps
    gradient = programs.variables[number]
    if gradient.layout is None or gradient.layout.repeated:
        return None
    readers = [step for step in steps if number in step.inputs]
    for step in readers:
        form, place = product_form(step.op.spec) if isinstance(step.op, Einsum) else None, step.inputs.index(number)
        lie = step.op.layouts or (None, None)
        if form is not None and step.choice.lowering == "multiply" and _is_strided(step.op, place):
            continue
        if form is None or not form.contracted or step.choice.lowering not in ("matmul", TRANSPOSED):
            return None
        row_major = (*lie[:place], None, *lie[place + 1 :])
        planned, found = (product_copies(form, step.op.spec, layouts)[place] for layouts in (lie, row_major))
        if planned or not found:
            return None
    if not readers:
        return None
    inner = [d for run in gradient.layout.runs for d in run]
    order = (*(d for d in range(len(gradient.shape)) if d not in inner), *inner)
    back = [order.index(d) for d in range(len(order))]
    return lambda x: x.permute(order).contiguous().permute(back) if x.is_contiguous() and x.is_cpu else x


def copy_first_row() -> Implementation:
    """Return the row of products by element that copy an operand first, as they read it several times with a stride."""
    return form_row(
        COPY_FIRST,
        _find_strided,
        _strided_work,
        _run_strided,
        any_sizes=True,
        inputs=2,
        kinds=("cpu",),
        alike=lambda op: None if isinstance(found := _find_strided(op), str) else (found.spec.inputs, found.layouts),
        least=lambda op, device: StepCost(picoseconds=int(2e12 * device.launch_seconds)),
    )


def _is_strided(op: Op, number: int) -> bool:
    """Whether a product by element reads an operand several times, with a stride if that is row-major."""
    spec, term = op.spec, op.spec.inputs[number]
    inner = next((axis for axis in reversed(term_axes(spec.output)) if axis in spec.wide), None)
    strided = inner in term and neighbours(term, None, spec) != inner
    return strided and spec.elements[-1] >= _REPEATED * spec.elements[number]


@cached_by_step
def _find_strided(op: Op) -> Einsum | str:
    """Return the product of operands of which some are copied into the order of the output's axes."""
    if not isinstance(op, Einsum) or stock_kind(op) != "multiply":
        return "needs a product by element"
    spec, out = op.spec, term_axes(op.spec.output)
    inner = next((axis for axis in reversed(out) if axis in spec.wide), None)
    terms, layouts = list(spec.inputs), list(op.layouts or (None, None))
    for number, (term, layout) in enumerate(zip(spec.inputs, layouts, strict=True)):
        if inner not in term or neighbours(term, layout, spec) == inner or not set(term) <= set(out):
            continue
        if spec.elements[-1] >= _REPEATED * spec.elements[number]:
            terms[number], layouts[number] = tuple(axis for axis in out if axis in term), None
    copied = Einsum(Spec(tuple(terms), spec.output, spec.sizes), op.dtype, tuple(layouts) if any(layouts) else ())
    return "no operand is read several times with a stride" if copied == op else copied


def _strided_work(op: Op, copied: Einsum, device: Device) -> list[Work]:
    parts, layouts = flat_stock_work(copied, device), op.layouts or (None, None)
    for number in _copied_numbers(op, copied):
        order, lies = term_axes(copied.spec.inputs[number]), [op.spec.inputs[number]]
        seconds = short_run_seconds(order, lies, op.spec, device, [layouts[number]])
        copy = Work.of_copies(op.spec.elements[number] * itemsize(op.dtype))
        parts += [copy._replace(launches=1 + VIEW_LAUNCHES), Work(seconds=seconds)]
    return parts


@cached_by_step
def _copied_numbers(op: Op, copied: Einsum) -> list[int]:
    """Return the numbers of the operands that are copied."""
    lie = [zip(each.spec.inputs, each.layouts or (None, None), strict=True) for each in (op, copied)]
    return [number for number, (before, after) in enumerate(zip(*lie, strict=True)) if before != after]


def _run_strided(op: Op, copied: Einsum, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    given = list(inputs)
    for number in _copied_numbers(op, copied):
        term, order = op.spec.inputs[number], copied.spec.inputs[number]
        given[number] = inputs[number].permute([term.index(axis) for axis in order]).contiguous()
    return (evaluation(OPS, copied.spec)(given, {}, False),)


def joint_row(product: Implementation) -> Implementation:
    """Return the row of both gradients of a product, which copies the output's gradient once.

    Args:
        product: the row that computes one gradient.
    """

    @cached_by_step
    def prepared(op: Op, order: Term) -> list[Run]:
        return [product.prepared(step) for step in _gradients(op, order)]

    def run(op: Op, order: Term, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
        gradient, first, second = inputs
        out = op.spec.output
        dims = [out.index(e) for e in order]
        copy = gradient.permute(dims).contiguous().permute([order.index(e) for e in out])
        of_first, of_second = prepared(op, order)
        return (*of_first((copy, second), index), *of_second((first, copy), index))

    def layouts(op: Op, order: Term) -> tuple[Layout | None, ...]:
        assert product.layouts is not None
        return tuple(layout for step in _gradients(op, order) for layout in product.layouts(step))

    return form_row(ONE_COPY, _find, _work, run, layouts, any_sizes=True, inputs=3, kinds=("cpu",), alike=_order_of)


def _order_of(op: Op) -> Term | None:
    found = _find(op)
    return None if isinstance(found, str) else found


@cached_by_step
def _find(op: Op) -> Term | str:
    """Return the order of axes in which the output's gradient is copied, so that both gradients view the copy."""
    form = product_form(op.spec) if isinstance(op, JointGradient) else None
    if form is None or not form.contracted or not form.left or not form.right or op.dtype == "bool":
        return "needs both gradients of a product of matrices"
    out, layout = op.spec.output, (op.layouts or (None,))[0]
    groups = (form.batch, form.left, form.right)
    if not matrix_copies(out, layout, groups, op.spec) or flattens(out, layout, groups, op.spec):
        return "the output's gradient needs no copy"
    turned = _innermost(out, layout, form.batch, op.spec) in form.left
    order = (*form.batch, *form.right, *form.left) if turned else (*form.batch, *form.left, *form.right)
    for number, step in enumerate(_gradients(op, order)):
        own = product_form(step.spec)
        if own is None or product_copies(own, step.spec, step.layouts or (None, None))[number]:
            return "the two gradients would view a copy in different orders"
    return order


@cached_by_step
def _gradients(op: Op, order: Term) -> tuple[Einsum, Einsum]:
    """Return the two gradients of a product, whose output's gradient lies in an order of axes."""
    copy = reordered(order, op.spec.output, op.spec)
    _, first, second = op.layouts or (None, None, None)
    pairs = ((copy, second), (first, copy))
    one, other = (
        Einsum(swap_with_output(op.spec, child), op.dtype, pair if any(pair) else ())
        for child, pair in enumerate(pairs)
    )
    return one, other


def _work(op: Op, order: Term, device: Device) -> list[Work]:
    (one, other), size = _gradients(op, order), itemsize(op.dtype) * op.spec.elements[-1]
    first, second = (
        [
            *flat_stock_work(each, device),
            Work(scratch=few_scratch(form, op.dtype, each.spec) + few_rows_scratch(form, op.dtype)),
        ]
        for each, form in ((each, known_product(each.spec)) for each in (one, other))
    )
    # While the first gradient is computed, the second is not yet there.
    more = max(_scratch(first) - other.result_bytes(), _scratch(second), 0)
    copy = Work.of_copies(size, more)._replace(launches=1 + 2 * VIEW_LAUNCHES)
    return [copy, *(part._replace(scratch=0) for part in (*first, *second))]


def _scratch(parts: Sequence[Work]) -> int:
    return sum([part.scratch for part in parts])
