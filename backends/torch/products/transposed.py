"""Products whose result is computed in another order of axes, in which it takes less time, and viewed in the output's.

There is a row for products that MKL multiplies faster as their transpose, and one for products by element that follow
the order of an operand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from planner.backends.common.elementwise import runs_of
from planner.backends.common.stock import SMALL_MATRIX, Product, evaluation, is_swapped
from planner.backends.common.stock_rows import (
    MOST_FEW,
    TRANSPOSED_DTYPES,
    VIEW_LAUNCHES,
    flat_stock_work,
    has_few_columns,
    row_operand,
    stock_kind,
)
from planner.backends.torch.ops import OPS, TorchOps, viewing
from planner.backends.torch.products.einsum import MOST_LETTERS, einsum_call, least_of_product
from planner.backends.torch.products.elementwise import broadcast_product
from planner.backends.torch.products.few_columns import is_amd
from planner.backends.torch.strides import STRIDE_OPS, TRANSFORMED_STRIDE_OPS, Strided, StrideOps
from planner.cost.device import Device
from planner.cost.figures import StepCost, Work
from planner.cost.layout import Layout, in_memory, layout_of, neighbours, reordered
from planner.language.cached import cached_by_step
from planner.language.spec import Spec, Term, term_axes
from planner.program.forms import ProductForm, known_product, product_form
from planner.program.implementations import Implementation, Table, form_row
from planner.program.ops import Einsum, Op
from planner.program.program import Step

TRANSPOSED, FOLLOWING = "transposed matmul", "multiply in the order of an operand"
# The rows of this module.
REORDERED = (TRANSPOSED, FOLLOWING)
# From so many elements of the operand with the rows on: a product of fewer takes less than 10 us, and so does its
# transpose (one core of an AMD EPYC and of an Intel Xeon with AVX-512, torch 2.13, 2026-11-28).
LEAST_ELEMENTS = 2**14
# Up to how many terms a sum has few.
# From how many rows and elements on a result is large: an Intel Xeon computes smaller ones faster as they are.
_MOST_TERMS, _LEAST_ROWS, _LARGE_RESULT = 9, 64, 2**17
# A product whose rows lie as rows is transposed if it has at most so many columns and terms, and so many elements in
# the operand with the rows; see `is_faster_on_amd`.
_MOST_COLUMNS, _MOST_ROW_TERMS, _LEAST_ROW_ELEMENTS = 9, 64, 2**12
# An outer product gets another order of axes if its runs have at most so many elements, if the larger operand has so
# many times as many, and if the result has so many: then that saves more than the view takes.
_SHORT_RUN, _MUCH_LONGER, _LEAST_OUTER = 16, 4, 2**10
_HAS_MKL = torch.backends.mkl.is_available()


def reordered_rows() -> list[Implementation]:
    """Return the rows."""

    def row(
        name: str, find: Callable[[Op], Op | str], least: Callable[[Op, Device], StepCost], values_only: bool = False
    ) -> Implementation:
        return form_row(name, find, _work, _run, _layouts, any_sizes=True, alike=partial(_order_of, find), inputs=2,
                        kinds=("cpu",), least=least, values_only=values_only)  # fmt: skip

    return [
        row(TRANSPOSED, _find, lambda op, device: least_of_product(op, device, 1)),
        row(FOLLOWING, _find_order, lambda op, device: StepCost(picoseconds=int(1e12 * device.launch_seconds)), True),
    ]


def calls_torch(table: Table, steps: Iterable[Step]) -> bool:
    """Whether steps call torch's own operators only, so that a compiler or a selective checkpoint may see these.

    The rows of this module call `mm`, `bmm` or `mul`, and make views.
    """
    return all(table.rows[name].stock for name in {step.choice.lowering for step in steps} - {*REORDERED})


@cached_by_step
def _find(op: Op) -> Op | str:
    """Return the step whose result is that of a product with few columns, transposed.

    MKL multiplies few rows by many columns faster than many rows by few columns, by up to 10 times on an AMD EPYC and 4
    on an Intel Xeon with AVX-512 (one core, torch 2.13, 2026-11-28), if the many rows lie as columns in memory. If they
    lie as rows, the transposed product is faster on the EPYC too, but up to 11 times slower on the Xeon. If they lie
    neither way, they are copied first, and the Xeon is slower again.
    """
    found = _transpose(op)
    if isinstance(found, str):
        return found
    transposed, (batch, rows, columns, terms) = found
    if batch * rows * terms < LEAST_ELEMENTS:
        return f"needs {LEAST_ELEMENTS} elements of the operand with the rows, since small products take as long"
    if batch > 1 and rows * columns * terms < SMALL_MATRIX:
        return "torch multiplies small matrices of a batch itself"
    if columns == 1 or not has_few_columns(rows, columns):
        return f"needs a result of 2 to {MOST_FEW} columns, and of four times as many rows"
    form, layouts = known_product(op.spec), op.layouts or (None, None)
    number = row_operand(form, op.spec)
    if neighbours(op.spec.inputs[number], layouts[number], op.spec) not in (form.left, form.right)[number]:
        return "the rows of the first factor do not lie as columns in memory"
    return transposed


def _transpose(op: Op) -> tuple[Op, tuple[int, int, int, int]] | str:
    """Return the step with a transposed result, and the batch, rows, columns and terms of the op; or why there is none.

    A product that `torch.mm` or `torch.bmm` computes is computed transposed too, with the result's other axes first.
    """
    form = product_form(op.spec) if isinstance(op, Einsum) else None
    if form is None or not form.contracted or op.dtype not in TRANSPOSED_DTYPES or not _HAS_MKL:
        return "needs a product of matrices of float32 or float64, and MKL"
    (batch, rows, columns, terms), order = form.sizes, (*form.batch, *form.right, *form.left)
    if is_swapped(form, op.spec):
        rows, columns, order = columns, rows, (*form.batch, *form.left, *form.right)
    return dataclasses.replace(op, spec=Spec(op.spec.inputs, order, op.spec.sizes)), (batch, rows, columns, terms)


@cached_by_step
def _find_order(op: Op) -> Op | str:
    """Return the product by element whose result has the axes of its larger operand innermost, as they lie in memory.

    Torch's loop then reads that operand as it lies. `u, zivk -> zuivk`, of 8 by 491,520 elements that lie as `ikzv`,
    takes 10 ms into a row-major result, and 1.5 so (one core of an AMD EPYC 7003, torch 2.13, 2026-11-29).
    """
    if not isinstance(op, Einsum) or stock_kind(op) != "multiply":
        return "needs a product by element"
    spec, out = op.spec, term_axes(op.spec.output)
    number = int(spec.elements[1] > spec.elements[0])
    term, layout = spec.inputs[number], (op.layouts or (None, None))[number]
    lies = term_axes(in_memory(term, layout))
    order = (*(axis for axis in out if axis not in lies), *lies)
    if sorted(order) != sorted(out):
        return "the larger operand repeats elements, or has an axis that the result lacks"
    if order == out:
        return "the result lies as the larger operand does"
    return dataclasses.replace(op, spec=Spec(spec.inputs, order, spec.sizes))


def _order_of(find: Callable[[Op], Op | str], op: Op) -> Term | None:
    """Return the order of the axes in which a result is computed, or None if the row refuses the op."""
    found = find(op)
    return None if isinstance(found, str) else found.spec.output


def _work(op: Op, ordered: Op, device: Device) -> list[Work]:
    form, spec = known_product(ordered.spec), ordered.spec
    views = VIEW_LAUNCHES if not form.contracted or form.batch or len(spec.output) > 2 else 0
    parts = [*flat_stock_work(ordered, device), Work(launches=views)]
    if not form.contracted and max(spec.elements[:2]) < spec.elements[-1]:
        # The larger operand is read again for each element of the other one: 0.43 ms for 0.29 with 32 by 131,072 floats
        # (one core of an AMD EPYC with AVX-512, torch 2.13, 2026-11-30).
        parts.append(Work(seconds=op.result_bytes() / device.cache_bandwidth))
    return parts


def _run(op: Op, ordered: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    return (_viewed(op.spec, ordered.spec)(*inputs),)


def _product(op: Op) -> Product:
    """Return the function that multiplies two operands, and returns a view of the transposed result."""
    found = _transpose(op)
    assert not isinstance(found, str)
    return _viewed(op.spec, found[0].spec)


@cached_by_step
def _viewed(given: Spec, spec: Spec) -> Product:
    """Return the function that computes a product in another order of axes, and views the result in the given one."""
    product = OPS.product(known_product(spec), spec)
    back = viewing([spec.output.index(e) for e in given.output], (1,) * len(spec.output))
    return lambda a, b: back(product(a, b))


class ResultOps(TorchOps):
    """`TorchOps` for the last step of a plan without gradients, whose result may lie otherwise than the plan says.

    Products by element lie as torch allocates them, not row-major; those with few terms are transposed.

    Args:
        dtype: the dtype of the operands.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def product(self, form: ProductForm, spec: Spec) -> Product:
        """Return the function that computes a product."""
        if not form.contracted:
            return broadcast_product(spec)
        op = Einsum(spec, self.dtype)
        return _product(op) if has_few_terms(op) else super().product(form, spec)


def is_faster_on_amd(op: Op, recorded: bool = False) -> bool:
    """Whether the transpose of a product with few columns is faster though the rows lie as rows in memory.

    On one core of an AMD EPYC with AVX-512, products of 2,048 and 20,000 rows, 3 to 32 terms and 2, 5 and 8 columns
    took 0.1 to 0.6 of the time (torch 2.13, 2026-11-29); of 16 columns, 1.0 to 1.7. On an EPYC 7003, products of 2,000
    and 16,384 rows, 4 to 64 terms and 2, 5, 8 and 9 columns took 0.1 to 0.9, one and batches of 8. An Intel Xeon takes
    up to 11 times as long.

    Args:
        op: the step.
        recorded: whether autograd records the product, and so multiplies transposes for both gradients. Then torch's
            einsum must do so too: the operand with the rows is its second. With 8,192 rows and 4 to 9 terms both
            passes took 0.7 to 1.0 of the time, with 16 and 32 terms 1.0 to 1.2 (an EPYC 9005, 2026-11-30).
    """
    found = _transpose(op) if is_amd() else ""
    if isinstance(found, str):
        return False
    batch, rows, columns, terms = found[1]
    form, layouts = known_product(op.spec), op.layouts or (None, None)
    number = row_operand(form, op.spec)
    lie_as_rows = neighbours(op.spec.inputs[number], layouts[number], op.spec) in form.contracted
    least, most = (LEAST_ELEMENTS, _MOST_TERMS) if recorded else (_LEAST_ROW_ELEMENTS, _MOST_ROW_TERMS)
    few = 2 <= columns <= _MOST_COLUMNS and has_few_columns(rows, columns) and 2 <= terms <= most
    return lie_as_rows and few and batch * rows * terms >= least and (number == 1 or not recorded)


def has_few_terms(op: Op) -> bool:
    """Whether a product has so few terms, some rows and many columns that its transpose is faster.

    MKL multiplies the transpose in a half to a fifth of the time on an AMD EPYC, and in 0.7 to 0.95 on an Intel Xeon
    (one core, torch 2.13, 2026-11-28). But gradients of large results would be copied: as a rule they come row-major.
    """
    found = _transpose(op)
    if isinstance(found, str):
        return False
    _, rows, columns, terms = found[1]
    return terms <= _MOST_TERMS and rows >= _LEAST_ROWS and columns >= 4 * rows and rows * columns >= _LARGE_RESULT


@lru_cache
def result_ops(dtype: str) -> TorchOps:
    """Return what runs the last step of a plan without gradients."""
    return OPS if dtype == "bool" else ResultOps(dtype)


def native_reordered(op: Op, standins: Sequence[Strided], ops: StrideOps) -> tuple[Product, Strided] | None:
    """Return the native calls of a row of `REORDERED`, and the stand-in of their result; None if it refuses the step.

    Autograd must not record them. It would compute the gradients transposed, too, and the operands of some of these lie
    as rows, which an Intel Xeon multiplies slowly that way.

    Args:
        op: the step, without layouts.
        standins: stand-ins of the operands.
        ops: what runs steps on stand-ins.
    """
    planned = op.with_layouts(layout_of(x.shape, x.strides) for x in standins)
    multiplies = not known_product(op.spec).contracted
    found = _find_order(planned) if multiplies else _find(planned)
    if isinstance(found, str):
        return None
    spec, output = found.spec, term_axes(found.spec.output)
    result = evaluation(ops, spec)(standins, {}, False)
    run = _viewed(op.spec, spec) if multiplies else _native_calls(planned, spec)
    return run, STRIDE_OPS.permute(result, [output.index(str(e)) for e in op.spec.output])


def _native_calls(op: Op, transposed: Spec) -> Product:
    """Return a function that multiplies by one call of torch's einsum, if it can, and views the result transposed."""
    if len(transposed.axes) > MOST_LETTERS or 1 in transposed.by_axis.values():
        return _product(op)
    form, output = known_product(transposed), term_axes(transposed.output)
    call = einsum_call(form, transposed, output, is_swapped(form, transposed))
    dims = [*map(output.index, op.spec.output)]
    return lambda a, b: call(a, b).permute(dims)


def last_product(
    op: Op, standins: Sequence[Strided], operands: Sequence[Strided], recorded: bool = False
) -> Product | None:
    """Return the native calls of a plan's last product if its transpose is faster; else None.

    Args:
        op: the step, without layouts.
        standins: stand-ins of the operands.
        operands: those of the plan's operands.
        recorded: whether autograd records the calls.
    """
    # Of more axes torch's einsum takes one call, and smaller members of a family may run as this.
    if not recorded and len(op.spec.axes) == 3 and has_few_terms(op):
        return _product(op)
    planned = op.with_layouts(layout_of(x.shape, x.strides) for x in standins)
    # A product of operands as they are runs as einsum's own, whose result is row-major. If einsum sums an operand
    # first, it may multiply the other way round.
    is_single = all(any(x is operand for operand in operands) for x in standins)
    if len(operands) != 2 or is_single or not is_faster_on_amd(planned, recorded):
        return None
    found = _transpose(planned)
    assert not isinstance(found, str)
    is_short = len(op.spec.axes) == 3 and not recorded  # `mm` would compute gradients in the order of their operands
    return _product(planned) if is_short else _native_calls(planned, found[0].spec)


def outer_product(op: Op, standins: Sequence[Strided]) -> tuple[Product, Strided] | None:
    """Return the native calls of a plan's last step if it is an outer product with short runs, and their result.

    Where the output has axes of both operands by turns, as in `ui, vj -> uvij`, torch's loop takes a few elements at a
    time. So the result has the axes of the larger operand innermost, and is viewed in the order of the output. Of 64 x
    9 by 64 x 9 that takes 28 us for 353 (one core of an AMD EPYC, torch 2.13, 2026-11-29). Runs are counted as if
    operands were row-major.

    Args:
        op: the step, a product by element, without layouts.
        standins: stand-ins of the operands.
    """
    spec = op.spec
    first, second = sorted(map(term_axes, spec.inputs), key=lambda term: math.prod(map(spec.size, term)))
    order, output = (*first, *second), term_axes(spec.output)
    longer, elements = math.prod(map(spec.size, second)), math.prod(map(spec.size, output))
    if sorted(order) != sorted(output) or elements < _LEAST_OUTER:
        return None
    runs, _ = runs_of(output, (first, second), spec)
    if len(runs) < 3 or runs[-1] > _SHORT_RUN or longer < _MUCH_LONGER * runs[-1]:
        return None
    ordered, dims = dataclasses.replace(spec, output=order), [order.index(axis) for axis in output]
    multiply, result = broadcast_product(ordered), evaluation(TRANSFORMED_STRIDE_OPS, ordered)(standins, {}, False)
    return (lambda a, b: multiply(a, b).permute(dims)), STRIDE_OPS.permute(result, dims)


def _layouts(op: Op, ordered: Op) -> tuple[Layout | None, ...]:
    return (reordered(ordered.spec.output, op.spec.output, op.spec),)
