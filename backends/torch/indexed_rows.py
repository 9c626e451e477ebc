"""Steps that read or write rows through index arrays in torch: by torch's own calls, and by three rows on CUDA.

The calls of a take and of a segment sum need no index array but the caller's, so autograd keeps no other. They are
`index_select` and `index_add` for one bracket, `x[q, r]` and `index_put` for several, and `gather` and `scatter_add` if
a bracket shares axes with its term, as in `b q[bn] c`. Through many indices at once, one flat index is faster.

On CUDA torch takes rows, multiplies and adds them up in three operators with the rows in memory between them, and adds
by atomics, so in any order. Three rows do without:

    segment sum        s[e]c, e -> d[e]c             sums of rows, and of products of rows: messages of graphs
    dots of rows       s[e]c, d[e]c -> e             their gradients
    taken rows         x[n]j, q[n]jk -> nk           grouped products, and
                       x[n]j, y[n]k -> q[n]jk        grouped outer products
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.backends.common import stock
from planner.backends.common.kernel_rows import is_chosen
from planner.backends.common.stock import evaluation
from planner.backends.common.stock_layout import matrix_copies
from planner.backends.common.stock_rows import stock_kind
from planner.backends.torch.contexts.modes import transformed, watched
from planner.backends.torch.cuda_rows import (
    CUT,
    LAUNCHES,
    TABLES,
    cuda_kernels,
    kernel_function,
    order_bytes,
    product_rate,
)
from planner.backends.torch.ops import OPS, is_recorded, viewing
from planner.backends.torch.strides import STRIDE_OPS, Strided
from planner.cost.device import Device
from planner.cost.figures import Work
from planner.cost.layout import Layout, flattens, reordered, row_major
from planner.kernels.segment_sum import WINDOW
from planner.language.cached import cached_by_step
from planner.language.dtypes import itemsize
from planner.language.spec import Gather, Spec, Term, indexed_dims, plain_axes, term_axes, term_gathers
from planner.program.calls import shape_in, size_in
from planner.program.forms import RowsForm, TakenForm, rows_form, taken_form
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Einsum, Op

__all__ = ["INDEXED", "MOST_PUT", "IndexedCalls", "indexed_calls", "indexed_rows"]

# Steps that read or write through index arrays, and what torch computes the gradient of one by.
INDEXED = {"take": "segment sum", "segment sum": "take", "take, segment sum": "take, segment sum"}
# Dtypes that torch adds up by index in that dtype.
_ADDED = ("float32", "float64", "complex64", "complex128")
# Up to so many indices torch goes faster through several dimensions by several index arrays than by one flat index: 64
# pairs took 2.1 us for 3.9, 1,000 took 4.4 for 4.9, and 10,000 took 25 for 13 (AMD EPYC, torch 2.13, 2026-11-25).
_FEW = 1_024
# `index_put` adds up so many floats on several cores, in any order.
MOST_PUT = 1 << 15


def indexed_rows() -> list[Implementation]:
    """Return the rows."""

    def row(name: str, find: Any, work: Callable[..., list[Work]], run: Any, layouts: Any) -> Implementation:
        def find_einsum(op: Op) -> Any:
            return find(op.spec) if isinstance(op, Einsum) else "the step is of another kind"

        refuses = cuda_kernels().refuses
        return form_row(name, find_einsum, work, run, layouts, refuses, kinds=("cuda",), brackets=3)

    return [
        row("segment sum, Triton", _find_sums, _summed_work, _run_sums, lambda op, form: (None,)),
        row("dots of rows, Triton", _find_dots, _dots_work, _run_dots, _dots_layouts),
        row("taken rows times matrices, Triton", taken_form, _taken_work, _run_taken, _taken_layouts),
    ]


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
    out = inputs[0].new_empty(op.spec.output_shape)
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
    assert source is not None
    taken: tuple[Term, ...] = ((source,), product.left)
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
        rate, scratch = product_rate(device, (i, k, j), op.dtype), copied + 9 * rows
        return [Work(op.flops(), rate, moved, copied, scratch, launches=LAUNCHES + sources, kernels=LAUNCHES)]
    # The order of the index array of matrices, that of all rows, where matrices begin, and rows that may be dropped.
    scratch = order_bytes(n, g) + 16 * rows + TABLES * (g + 2) + 9 * rows * sources
    scratch += 2 * (rows // CUT) * j * k * max(4, size) if form.product.outer else 0
    moved, launches = moved + 32 * rows, LAUNCHES + 2 + sources
    rate = product_rate(device, form.product.sides, op.dtype)
    return [Work(op.flops(), rate, moved, copied, copied + scratch, launches=launches, kernels=LAUNCHES, sorted=n)]


def _run_taken(op: Op, form: TakenForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    kernels, product, spec = cuda_kernels(), form.product, op.spec
    *given, (out_term, out_groups) = _views(op, form)
    flats = [kernels.flat(x, term, groups) for x, (term, groups) in zip(inputs, given, strict=True)]
    tables = []
    for x, source in zip(flats, form.sources, strict=True):
        table = None if source is None else index[source].reshape(-1)
        # The kernel takes -1 for no row.
        tables.append(OPS.select(table < len(x), table, -1) if table is not None and index.may_drop else table)
    rows = 1 - product.matrix
    if is_chosen(product):
        source, matrices = tables[rows].reshape(-1, product.sizes[1]), index[product.gather].reshape(-1)
        run = kernel_function("grouped_matmul.triton_grouped", "chosen_rows")
        out = run(flats[rows], flats[product.matrix], matrices, source)
    else:
        groups = kernels.groups(product.gather, spec, index).split(product.sizes[1])
        if product.outer:
            a, b = (x.unsqueeze(1) for x in flats)
            out = kernels.outer(a, b, groups, product.sizes[2], *tables)
        else:
            out = kernels.matmul(flats[rows].unsqueeze(1), flats[product.matrix], groups, tables[rows], None, None)
    order = [entry for group in out_groups for entry in group]
    return (out.reshape(spec.shape(tuple(order))).permute([order.index(e) for e in out_term]),)


def _taken_layouts(op: Op, form: TakenForm) -> tuple[Layout | None, ...]:
    term, groups = _views(op, form)[-1]
    return (reordered([entry for group in groups for entry in group], term, op.spec),)


# -- torch's own calls -------------------------------------------------------------------------------------


class IndexedCalls(NamedTuple):
    """A take, a segment sum, or one after the other, as torch's own calls.

    Attributes:
        spec: the step's spec.
        run: computes the step, from the input and the index arrays in range.
        result: returns the stand-in of the result, from that of the input.
        keeps: whether autograd keeps the input.
    """

    spec: Spec
    run: Callable[[Tensor, Mapping[Any, Tensor]], Tensor]
    result: Callable[[Strided], Strided]
    keeps: bool

    def lies_as_stock(self, op: Op) -> bool:
        """Whether the result of an op lies in memory as that of the stock evaluation does."""
        spec, (term,) = self.spec, self.spec.inputs
        follows = len(term_gathers(term)) > 1 and op.layouts and op.layouts[0]  # `x[q, r]` follows the strides of `x`
        x, arrays = _row_major(spec.shape(term)), {g: _row_major(spec.shape(g.axes)) for g in spec.gathers}
        return not follows and self.result(x).strides == evaluation(STRIDE_OPS, spec)([x], arrays, False).strides

    def flat_if_many(self, checks: bool = False) -> Callable[[Tensor, Mapping[Any, Tensor]], Tensor]:
        """Return the function that computes the step, by one flat index if that is faster.

        Args:
            checks: whether it refuses an index out of range with an `IndexError`, as the calls do.
        """
        direct, spec = self.run, self.spec
        if all(len(indexed_dims(term)) < 2 for term in spec.terms):
            return direct
        gathers, flat = spec.gathers, evaluation(OPS, spec)

        def run(x: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
            seen = x.is_cpu and not is_recorded(x)  # what a compiler records has index arrays in range
            if seen and x.numel() < MOST_PUT and all([index[gather].numel() <= _FEW for gather in gathers]):
                return direct(x, index)
            for gather in gathers if checks and seen else ():
                low, high = torch.aminmax(index[gather])
                if int(low) < 0 or int(high) >= size_in(index, spec, gather):
                    raise IndexError
            result: Tensor = flat((x,), index, False)
            return result

        return run


@cached_by_step
def indexed_calls(op: Op) -> IndexedCalls | None:
    """Return a step as torch's own calls; None if it is no such step, takes a diagonal, or sums or repeats besides."""
    spec = op.spec
    if stock_kind(op) not in INDEXED or op.dtype not in _ADDED:
        return None
    (term,), out = spec.inputs, spec.output
    reads, writes = (_rows_of(each, spec) for each in (term, out))
    if reads is None or writes is None or sorted(reads.axes) != sorted(writes.axes):
        return None
    order = [reads.axes.index(e) for e in writes.axes]
    arrange = viewing(order, (1,) * len(order))
    take, add = reads.take, writes.add

    def result(x: Strided) -> Strided:
        taken = STRIDE_OPS.permute(reads.taken(x), order)
        return writes.added(taken)

    def run(x: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        taken: Tensor = arrange(x if take is None else take(x, index))
        return taken if add is None else add(taken, index)

    return IndexedCalls(spec, run, result, reads.keeps)


class _Rows(NamedTuple):
    """How torch reads and writes through the brackets of a term, without an index array of its own.

    Attributes:
        axes: the axes of what is taken, and of what is added up.
        take: takes rows of a tensor, by the index arrays; None without brackets.
        add: adds values into zeros, by the index arrays; None without brackets.
        taken: the stand-in of what is taken of a stand-in.
        added: the stand-in of what a stand-in is added into.
        keeps: whether autograd keeps the tensor that rows are taken of.
    """

    axes: tuple[str, ...]
    take: Callable[[Tensor, Mapping[Any, Tensor]], Tensor] | None
    add: Callable[[Tensor, Mapping[Any, Tensor]], Tensor] | None
    taken: Callable[[Strided], Strided]
    added: Callable[[Strided], Strided]
    keeps: bool = False


def _rows_of(term: Term, spec: Spec) -> _Rows | None:
    """Return how torch reads and writes through the brackets of a term; None if a diagonal is taken."""
    gathers, plain = term_gathers(term), plain_axes(term)
    if any(len({*axes}) < len(axes) for axes in (plain, *(gather.axes for gather in gathers))):
        return None
    if not gathers:
        return _Rows(plain, None, None, lambda x: x, lambda x: x)
    if {*plain} & {*term_axes(gathers)}:
        return _elements_of(term, spec) if len(gathers) == 1 else None
    return _slices_of(term, spec)


def _slices_of(term: Term, spec: Spec) -> _Rows:
    """Return how torch reads and writes rows, such as those of `s[e]c`, or of `s[e]d[e]`."""
    gathers = term_gathers(term)
    (first, *others), rows, rank = gathers, term_axes(gathers), len(gathers[0].axes)
    dims = [d for d, e in enumerate(term) if isinstance(e, Gather)]
    order = [*dims, *(d for d in range(len(term)) if d not in dims)]
    arranged: Term = tuple(term[d] for d in order)
    back = [order.index(d) for d in range(len(term))]
    moves, shape = order != back or order != sorted(order), spec.shape(rows)
    orders = [([g.axes.index(e) for e in rows if e in g.axes], [int(e in g.axes) for e in rows]) for g in gathers]
    views, standin_views = ([viewing(*o) for o in orders], [stock.viewing(STRIDE_OPS.permute, *o) for o in orders])

    def indices(index: Mapping[Any, Tensor]) -> tuple[Tensor, ...]:
        return tuple([view(index[gather]) for view, gather in zip(views, gathers, strict=True)])

    def take(x: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        if moves:
            x = x.permute(order)
        if others and rows:
            return x[indices(index)]
        if others:  # by single numbers torch would return a view
            return x[tuple([q.reshape(1) for q in indices(index)])].squeeze(0)
        q = index[first]
        if rank == 1:
            return x.index_select(0, q)
        return x.index_select(0, q.reshape(-1)).reshape((*q.shape, *x.shape[1:]))

    def add(values: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        sizes = shape_in(index, spec, arranged)
        if others:
            out = values.new_zeros(sizes)
            put = out.index_put if transformed() or watched() else out.index_put_
            out = put(indices(index), values, accumulate=True)
        else:
            out = OPS.add_at(sizes, [index[first]], values)
        return out.permute(back) if moves else out

    def taken(x: Strided) -> Strided:
        x = STRIDE_OPS.permute(x, order)
        if not others:
            return STRIDE_OPS.take(x, [Strided(shape, row_major(shape))])
        arrays = [_row_major(spec.shape(gather.axes)) for gather in gathers]
        return STRIDE_OPS.take_by(x, [view(array) for view, array in zip(standin_views, arrays, strict=True)])

    def added(x: Strided) -> Strided:
        return STRIDE_OPS.permute(_written(x, spec.shape(arranged)), back)

    return _Rows((*rows, *plain_axes(term)), take, add, taken, added)


def _row_major(shape: tuple[int, ...]) -> Strided:
    return Strided(shape, row_major(shape))


def _written(x: Strided, shape: tuple[int, ...]) -> Strided:
    return Strided(shape, row_major(shape), x.requires_grad, x.copied)


def _elements_of(term: Term, spec: Spec) -> _Rows:
    """Return how torch reads and writes elements, such as those of `n k q[n]`, or of `b s[bn] c`.

    The index array is viewed as large as what is taken.
    """
    (gather,) = term_gathers(term)
    dim = term.index(gather)
    own = [axis for axis in gather.axes if axis not in term]
    order = [
        gather.axes.index(str(e)) for each in term for e in ([each] if each != gather else own) if e in gather.axes
    ]
    view = viewing(order, [len(own) if e == gather else int(e in gather.axes) for e in term])
    axes = tuple(str(e) for each in term for e in ([each] if each != gather else own))
    places = [gather.axes.index(e) for e in own]

    def take(x: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        q, shape = index[gather], list(x.shape)
        wide = view(q).long()
        shape[dim] = wide.shape[dim]
        x = x.gather(dim, wide.expand(shape))
        if len(own) == 1:
            return x
        shape[dim : dim + 1] = [q.shape[d] for d in places]
        return x.reshape(shape)

    def add(values: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        wide = view(index[gather]).long()
        if len(own) != 1:
            shape = list(values.shape)
            shape[dim : dim + len(own)] = [wide.shape[dim]]
            values = values.reshape(shape)
        out = values.new_zeros(shape_in(index, spec, term))
        add = out.scatter_add if transformed() or watched() else out.scatter_add_
        return add(dim, wide.expand(values.shape), values)

    return _Rows(
        axes, take, add, lambda x: _written(x, spec.shape(axes)), lambda x: _written(x, spec.shape(term)), keeps=True
    )
