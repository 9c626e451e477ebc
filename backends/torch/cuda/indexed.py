"""The rows of torch's table that read or add up rows through index arrays by Triton kernels on CUDA.

There torch takes rows, multiplies and adds them up in three operators with the rows in memory between them, and adds by
atomics, so in any order. Four rows do without, and a fifth takes rows faster than torch:

    take               s[e]c -> ec                   and whatever else is read through index arrays, of any dtype
    segment sum        s[e]c, e -> d[e]c             sums of rows, and of products of rows: messages of graphs
    dots of rows       s[e]c, d[e]c -> e             their gradients
    taken rows         x[n]j, q[n]jk -> nk           grouped products, and
                       x[n]j, y[n]k -> q[n]jk        grouped outer products
    ..., segment sum   x[n]j, q[n]jk -> d[n]k        grouped products that are added up: convolutions, and the
                                                     gradients of their rows, which are convolutions too
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from planner.backends.common.kernel_rows import is_chosen
from planner.backends.common.stock import evaluation
from planner.backends.common.stock_layout import matrix_copies
from planner.backends.common.stock_rows import stock_kind
from planner.backends.torch.cuda.rows import (
    CUT,
    DTYPES,
    LAUNCHES,
    TABLES,
    cuda_kernels,
    kernel_function,
    order_bytes,
    product_rate,
)
from planner.backends.torch.ops import OPS, is_recorded, torch_dtype
from planner.cost.device import Device
from planner.cost.figures import Work
from planner.cost.layout import Layout, flattens, reordered
from planner.kernels.segment_sum import WINDOW
from planner.kernels.take import MOST_AXES, MOST_INDICES, Read
from planner.language.dtypes import itemsize
from planner.language.spec import Spec, Term, term_axes, term_gathers
from planner.program.calls import shape_in
from planner.program.forms import RowsForm, SummedForm, TakenForm, rows_form, summed_form, taken_form
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Einsum, Op

# The row that takes rows. Where a compiler records its steps they are torch's own operators.
TAKE = "take, Triton"


def indexed_rows() -> list[Implementation]:
    """Return the rows."""

    def row(name: str, find: Any, work: Callable[..., list[Work]], run: Any, layouts: Any) -> Implementation:
        def find_einsum(op: Op) -> Any:
            return find(op.spec) if isinstance(op, Einsum) else "the step is of another kind"

        refuses = cuda_kernels().refuses
        return form_row(name, find_einsum, work, run, layouts, refuses, kinds=("cuda",), brackets=3)

    return [
        form_row(
            TAKE, _find_take, _take_work, _run_take, lambda op, form: (None,), any_sizes=True,
            kinds=("cuda",), brackets=MOST_INDICES, inputs=1,
        ),
        row("segment sum, Triton", _find_sums, _summed_work, _run_sums, lambda op, form: (None,)),
        row("dots of rows, Triton", _find_dots, _dots_work, _run_dots, _dots_layouts),
        row("taken rows times matrices, Triton", taken_form, _taken_work, _run_taken, _taken_layouts),
        row("rows times matrices, added up, Triton", summed_form, _added_work, _run_added, lambda op, form: (None,)),
    ]  # fmt: skip


def _find_take(op: Op) -> Read | str:
    """Return how a step reads its input, or why it is no take."""
    spec = op.spec
    if not isinstance(op, Einsum) or stock_kind(op) != "take":
        return "the step is of another kind"
    (term,), out = spec.inputs, spec.output
    gathers = tuple(dict.fromkeys(term_gathers(term)))
    if not set(term_axes(term)) <= set(out) or len(set(out)) < len(out):
        return "what is taken is summed, or written on a diagonal"
    if len(term_gathers(term)) > MOST_INDICES or len(out) + (op.dtype == "complex128") > MOST_AXES:
        return f"the kernel knows up to {MOST_INDICES} index arrays, and {MOST_AXES} axes"

    def places(entries: Sequence[Any], wanted: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(d for d, entry in enumerate(entries) if entry == each) for each in wanted)

    indexed = zip(places(term, gathers), [places(gather.axes, out) for gather in gathers], strict=True)
    return Read(places(term, out), tuple(indexed))


def _take_work(op: Op, form: Read, device: Device) -> list[Work]:
    return [Work(moved=op.bytes_touched(), fresh=(op.result_bytes(),), launches=1)]


def _run_take(op: Op, form: Read, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    if is_recorded(inputs[0]):  # a compiler takes rows in a kernel of its own, with the steps around
        return (evaluation(OPS, op.spec)(inputs, index, getattr(index, "may_drop", True)),)
    gathers, shape, drops = op.spec.gathers, shape_in(index, op.spec, op.spec.output), getattr(index, "may_drop", True)
    if len(gathers) == 1 and op.dtype in DTYPES and len({*gathers[0].axes}) == len(gathers[0].axes):
        given = None if gathers[0] in index else index.given.get(gathers[0])
        check = None if given is None or given.check is None else given.check()
        if given is not None and check is not None:
            return (_take(inputs[0], form, [given.values], shape, drops, check),)
    return (_take(inputs[0], form, [index[gather] for gather in gathers], shape, drops),)


_take = kernel_function("take.triton_take", "take")


def _find_sums(spec: Spec) -> RowsForm | str:
    form = rows_form(spec)
    return "rows are multiplied with each other" if isinstance(form, RowsForm) and form.target is None else form


def _find_dots(spec: Spec) -> RowsForm | str:
    form = rows_form(spec)
    return "rows are added up" if isinstance(form, RowsForm) and form.target is not None else form


def _moved(op: Op, form: RowsForm) -> int:
    """Return the bytes that are read and written, with the rows that are taken."""
    taken = sum(gather is not None for gather in form.gathers[:-1])
    return op.bytes_touched() + taken * math.prod(form.sizes) * itemsize(op.dtype)


def _tables(op: Op, form: RowsForm) -> int:
    """Return the bytes of tables of positions: of rows, and of columns, that have no single stride."""
    needed = 0
    for term, layout in zip(op.spec.terms, (*(op.layouts or (None,) * len(op.spec.inputs)), None), strict=True):
        rows = term_gathers(term) or form.rows
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
    kernels = 1 + (n >= WINDOW)
    launches = kernels + 6 * bool(tables)
    return [Work(op.flops(), device.flop_rate, moved, scratch=scratch, launches=launches, kernels=kernels, sorted=n)]


def _dots_work(op: Op, form: RowsForm, device: Device) -> list[Work]:
    tables = _tables(op, form)
    moved, launches = _moved(op, form) + 2 * tables, 1 + 6 * bool(tables)
    return [Work(op.flops(), device.flop_rate, moved, scratch=tables, launches=launches, kernels=1)]


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
    target = form.target
    assert target is not None
    x, *factor = [_read(op, form, number, x, index) for number, x in enumerate(inputs)]
    groups = cuda_kernels().groups(target, op.spec, index)
    out = inputs[0].new_empty(op.spec.output_shape, dtype=torch_dtype(op.dtype))
    into = _read(op, form, len(inputs), out, index)
    kernel_function("segment_sum.triton_sum", "sum_rows")(x, into, form.sizes[1], groups, *factor)
    return (out,)


def _run_dots(op: Op, form: RowsForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    x, y = [_read(op, form, number, x, index) for number, x in enumerate(inputs)]
    out, (n, columns) = inputs[0].new_empty(op.spec.shape(form.rows)), form.sizes
    kernel_function("gathered_dot.triton_pooled", "dot_rows")(x, y, out, (1, n, 1, columns))
    return (out.permute([form.rows.index(str(e)) for e in op.spec.output]),)


def _dots_layouts(op: Op, form: RowsForm) -> tuple[Layout | None, ...]:
    return (reordered(form.rows, op.spec.output, op.spec),)


def _views(op: Op, form: TakenForm) -> list[tuple[Term, tuple[Term, ...]]]:
    """Return the terms of a grouped product, each with the axes that are one dimension each to the kernel.

    Rows are those of the index arrays that take them: one for each row of the product, and each inner element of it.
    """
    product = form.product
    rows: Term = (*product.rows_a, *product.inner)
    columns = [product.left, product.right]
    matrix: tuple[Term, ...] = ((product.gather,), product.left, product.right)
    if product.outer:
        groups = [((source,) if source else rows, c) for source, c in zip(form.sources, columns, strict=True)]
        return list(zip(op.spec.terms, (*groups, matrix), strict=True))
    # The product with a matrix that comes first is that with the matrix that comes second.
    source = form.sources[1 - product.matrix]
    taken: tuple[Term, ...] = ((source,) if source else rows, product.left)
    given = (taken, matrix) if product.matrix == 1 else (matrix, taken)
    return list(zip(op.spec.terms, (*given, (rows, product.right)), strict=True))


def _taken_work(op: Op, form: TakenForm, device: Device) -> list[Work]:
    (n, i, g, j, k), size = form.product.sizes, itemsize(op.dtype)
    rows, sources = n * i, sum(source is not None for source in form.sources)
    *given, _ = _views(op, form)
    layouts = op.layouts or (None, None)
    copied = size * sum(
        matrix_copies(term, layout, groups, op.spec) for (term, groups), layout in zip(given, layouts, strict=True)
    )
    widths = (j, k) if form.product.outer else (j, j)
    taken = sum(rows * width * size for source, width in zip(form.sources, widths, strict=True) if source)
    moved = op.bytes_touched() + taken + 2 * copied
    if is_chosen(form.product):
        rate, scratch = product_rate(device, (i, k, j), op.dtype), copied + 9 * rows * sources
        return [Work(op.flops(), rate, moved, copied, scratch, launches=LAUNCHES + sources, kernels=LAUNCHES)]
    # The order of the index array of matrices, that of all rows, where matrices begin, and rows that may be dropped.
    scratch = order_bytes(n, g) + 16 * rows + TABLES * (g + 2) + 9 * rows * sources
    scratch += 2 * (rows // CUT) * j * k * max(4, size) if form.product.outer else 0
    moved, launches = moved + 32 * rows, LAUNCHES + 2 + sources
    rate = product_rate(device, form.product.sides, op.dtype)
    return [Work(op.flops(), rate, moved, copied, copied + scratch, launches=launches, kernels=LAUNCHES, sorted=n)]


def _multiply(op: Op, form: TakenForm, inputs: Sequence[Any], index: Any, wide: bool = False) -> Any:
    """Return the products of rows, `(rows, K)` with more dimensions of size 1, or the sums of outer products.

    Products are `wide` if those of half types stay in float32.
    """
    kernels, product, spec = cuda_kernels(), form.product, op.spec
    *given, _ = _views(op, form)
    flats = [kernels.flat(x, term, groups) for x, (term, groups) in zip(inputs, given, strict=True)]
    tables = []
    for x, source in zip(flats, form.sources, strict=True):
        table = None if source is None else index[source].reshape(-1)
        # The kernel takes -1 for no row.
        tables.append(OPS.select(table < len(x), table, -1) if table is not None and index.may_drop else table)
    rows, inner = 1 - product.matrix, product.sizes[1]
    if is_chosen(product):
        run, named = kernel_function("grouped_matmul.triton_grouped", "chosen_rows"), index[product.gather].reshape(-1)
        return run(flats[rows], flats[product.matrix], named, inner, tables[rows], wide)
    groups = kernels.groups(product.gather, spec, index).split(inner)
    if product.outer:
        a, b = (x.unsqueeze(1) for x in flats)
        return kernels.outer(a, b, groups, product.sizes[2], *tables)
    a, c = flats[rows].unsqueeze(1), flats[product.matrix]
    return kernels.matmul(a, c, groups, tables[rows], None, None, wide=wide)


def _run_taken(op: Op, form: TakenForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    term, groups = _views(op, form)[-1]
    order = [entry for group in groups for entry in group]
    out = _multiply(op, form, inputs, index).reshape(op.spec.shape(tuple(order)))
    return (out.permute([order.index(e) for e in term]),)


def _taken_layouts(op: Op, form: TakenForm) -> tuple[Layout | None, ...]:
    term, groups = _views(op, form)[-1]
    return (reordered([entry for group in groups for entry in group], term, op.spec),)


def _added_work(op: Op, form: SummedForm, device: Device) -> list[Work]:
    (n, i, _, _, k), size = form.taken.product.sizes, itemsize(op.dtype)
    product, sums = dataclasses.replace(op, spec=form.product), Einsum(form.sums, op.dtype)
    # The products are in memory between both, of half types in float32.
    wide = max(4, size)
    between = Work(moved=2 * n * i * k * (wide - size), scratch=n * i * k * wide)
    (added,) = _summed_work(sums, form.rows, device)
    return [*_taken_work(product, form.taken, device), between, added._replace(flops=0)]


def _run_added(op: Op, form: SummedForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    products = _multiply(dataclasses.replace(op, spec=form.product), form.taken, inputs, index, wide=True)
    rows = products.reshape(form.sums.shape(form.sums.inputs[0]))
    return _run_sums(Einsum(form.sums, op.dtype), form.rows, [rows], index)
