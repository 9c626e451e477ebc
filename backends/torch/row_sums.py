"""The rows of the torch backend's table for sums and dots of rows on CUDA: segment sums, and messages of graphs.

Torch takes rows, multiplies and adds them up in three operators with the rows in memory between them, and adds by
atomics, so in any order. The kernels read each row through its index, and write each result once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from planner.backends.torch.cuda_rows import ORDER_LAUNCHES, cuda_kernels, kernel_function, order_bytes
from planner.cost.device import Device
from planner.cost.figures import Work
from planner.cost.layout import Layout, flattens, reordered
from planner.kernels.segment_sum import WINDOW
from planner.language.dtypes import itemsize
from planner.language.spec import Gather
from planner.program.forms import RowsForm, rows_form
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Einsum, Op

__all__ = ["row_sums"]


def row_sums() -> list[Implementation]:
    """Return the rows."""

    def row(name: str, summed: bool, work: Callable[..., list[Work]], run: Any) -> Implementation:
        def find(op: Op) -> RowsForm | str:
            form = rows_form(op.spec) if isinstance(op, Einsum) else "the step is of another kind"
            if isinstance(form, RowsForm) and (form.target is not None) != summed:
                return "rows are multiplied with each other" if summed else "rows are added up"
            return form

        refuses = cuda_kernels().refuses
        return form_row(
            name, find, work, run, _layouts, refuses, kinds=("cuda",), brackets=3
        )

    return [
        row("segment sum, Triton", True, _summed_work, _run_sums),
        row("dots of rows, Triton", False, _dots_work, _run_dots),
    ]


def _layouts(op: Op, form: RowsForm) -> tuple[Layout | None, ...]:
    return (None if form.target else reordered(form.rows, op.spec.output, op.spec),)


def _moved(op: Op, form: RowsForm) -> int:
    """Return the bytes that are read and written, with the rows that are taken."""
    taken = sum(gather is not None for gather in form.gathers[:-1])
    return op.bytes_touched() + taken * math.prod(form.sizes) * itemsize(op.dtype)


def _tables(op: Op, form: RowsForm) -> int:
    """Return the bytes of tables of positions: of rows, and of columns, that have no single stride."""
    needed = 0
    for term, layout in zip(op.spec.terms, (*(op.layouts or (None,) * len(op.spec.inputs)), None), strict=True):
        rows = [e for e in term if isinstance(e, Gather)] or form.rows
        columns = [e for e in form.columns if e in term]
        # Each table is computed from two more.
        if not flattens(term, layout, [rows], op.spec):
            needed += 24 * form.sizes[0]
        repeats = 0 < len(columns) < len(form.columns)
        if repeats or not flattens(term, layout, [columns], op.spec):
            needed += 24 * form.sizes[1]
    return needed


def _summed_work(op: Op, form: RowsForm, device: Device) -> list[Work]:
    (n, columns), size, target = form.sizes, itemsize(op.dtype), form.target
    assert target is not None
    tables = _tables(op, form)
    scratch = order_bytes(n, target.size or 0) + tables + (n // WINDOW) * columns * max(4, size)
    moved = _moved(op, form) + 16 * n + 2 * tables
    launches = ORDER_LAUNCHES + 1 + (n >= WINDOW) + 6 * bool(tables)
    return [Work(op.flops(), device.flop_rate, moved, scratch=scratch, launches=launches, sorted=n)]


def _dots_work(op: Op, form: RowsForm, device: Device) -> list[Work]:
    tables = _tables(op, form)
    launches = 1 + 6 * bool(tables)
    return [Work(op.flops(), device.flop_rate, _moved(op, form) + 2 * tables, scratch=tables, launches=launches)]


def _read(op: Op, form: RowsForm, number: int, x: Any, index: Any) -> Any:
    """Return an input, or the result, as kernels read its rows and columns."""
    term, gather = list(op.spec.terms[number]), form.gathers[number]
    for axis in form.columns:
        if axis not in term:  # it is the same in all of these columns
            x = x.unsqueeze(-1)
            x, term = x.expand(*x.shape[:-1], op.spec.size(axis)), [*term, axis]
    rows = [term.index(e) for e in ((gather,) if gather else form.rows)]
    columns = [term.index(e) for e in form.columns]
    table = index[gather].reshape(-1) if gather and number < len(op.spec.inputs) else None
    return kernel_function("segment_sum.triton_sum", "Rows.of")(x, rows, columns, table)


def _run_sums(op: Op, form: RowsForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    out, target = inputs[0].new_empty(op.spec.output_shape), form.target
    assert target is not None
    x, *factor = [_read(op, form, number, x, index) for number, x in enumerate(inputs)]
    groups = cuda_kernels().groups(target, op.spec, index)
    into = _read(op, form, len(inputs), out, index)
    kernel_function("segment_sum.triton_sum", "sum_rows")(x, into, form.sizes[1], groups, *factor)
    return (out,)


def _run_dots(op: Op, form: RowsForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    out, (n, columns) = inputs[0].new_empty(op.spec.shape(form.rows)), form.sizes
    x, y = [_read(op, form, number, x, index) for number, x in enumerate(inputs)]
    kernel_function("gathered_dot.triton_pooled", "dot_rows")(x, y, out, (1, n, 1, columns))
    return (out.permute([form.rows.index(str(e)) for e in op.spec.output]),)
