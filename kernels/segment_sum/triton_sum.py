"""Sums of rows by group on CUDA, and of products of rows. The package states the contract.

A program adds up the rows of one group, so each sum is written once. Long groups are shared out by windows, each of
`WINDOW` neighbouring rows in sorted order. A window inside of one group is summed by a program of its own, in a launch
before. The program of the group then adds these sums up, and the rows that are in none of the windows:

    sorted rows   |  0  0  0  1 | 1  1  1  1 | 1  1  1  1 | 1  1  2  2 |     in windows of 4
    group 1       =         row + window     + window     + two rows

Nothing depends on the sizes of groups but loads, so a call with sorted rows is one launch, or two if a group may have a
whole window. A prepared index knows its longest group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from planner.kernels.grouping.torch_grouping import Groups, accumulator
from planner.kernels.grouping.triton_launch import launch
from planner.kernels.segment_sum import WINDOW
from planner.kernels.tiled_product.triton_axes import Axis, axis_of, packed
from planner.kernels.tiled_product.triton_product import add_parts_kernel, group_of, pieces_of, position

# Bytes of a tile of sums in float32, the most rows of one, and elements of a group's parts that one program adds up.
# With larger tiles some kernels spill registers, see docs/benchmarks/triton.md.
_TILE, _MOST_ROWS, _ADDED = 4096, 256, 1024
# Without a limit NVIDIA's assembler keeps some bytes of a thread in memory, for more programs at once. AMD's has none.
REGISTERS: dict[str, Any] = {} if torch.version.hip else {"maxnreg": 128}


@triton.jit
def row_places(row, there, table, size, row_stride, inner, inner_stride):  # type: ignore[no-untyped-def]
    """Return the positions of rows, which of them exist, and which of them are out of range.

    In a table `size` stands for no row, and what is not in [0, size] for an error: results that depend on it are NaN.
    """
    if table is not None:
        place = tl.load(table + row, mask=there, other=0).to(tl.int64)
        inside = (place >= 0) & (place < size)
        return place * row_stride, there & inside, there & (inside == 0) & (place != size)
    else:
        place = (row // inner).to(tl.int64) * row_stride + (row % inner).to(tl.int64) * inner_stride
        return place, there, there & (row < 0)


@triton.jit
def quotient(number, by, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `number // by` in 64 bits; processors divide 32 bits, and call a function for 64."""
    if NARROW:
        return (number.to(tl.int32) // by).to(tl.int64)
    else:
        return number.to(tl.int64) // by


@triton.jit
def first_from(order, low, high, rows):  # type: ignore[no-untyped-def]
    """Return the first place in [low, high), where the order grows, of a row no less than `rows`; else `high`."""
    if order is not None:
        while low < high:
            middle = (low + high) // 2
            before = tl.load(order + middle).to(tl.int64) < rows
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
    else:
        low = tl.minimum(tl.maximum(low, rows), high)
    return low


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]  # noqa: D417
    x, x_table, x_size, x_row, x_inner, x_batch, x_column_table, x_column,
    y, y_table, y_size, y_row, y_inner, y_batch, y_column_table, y_column,
    out, out_group, out_column_table, out_column,
    order, starts, parts, groups, rows, batch_rows, inner, size_n,
    POISONS: tl.constexpr, WINDOWS: tl.constexpr, BATCHED: tl.constexpr, NARROW: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sum one group's rows, or one window's.

    Args:
        x, y: pointers to the factors; `y` is None if there is only one. Each is followed by a table or None and the
            number of rows that it may name; the strides of a row, of the row within `inner` and of a batch entry; and
            a table or None and a stride of its columns.
        out: pointer to the result, the stride of a group, and its columns.
        order: row numbers sorted by group; None if the rows are sorted already.
        starts: where each group begins in `order`, `(groups / batches + 1,)`; None if each group has `inner` rows.
        parts: the sums of windows, `(rows // STEP, size_n)`; None if there is no whole window.
        groups: number of groups. With a batch, its entries have as many each.
        rows, batch_rows: number of rows of all batch entries, and of one.
        inner: rows without a table are read at `row // inner` and `row % inner`.
        size_n: number of columns.
        POISONS: whether all results are NaN if a row is dropped.
        WINDOWS: whether a program sums a window; else a group.
        BATCHED: whether the result has a batch. `starts` knows nothing of it: rows of equal groups are in the order of
            their entries, so those of one entry are found by halving.
        NARROW: whether row numbers have 32 bits.
    """
    wide = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    tiles_n = pieces_of(size_n, BLOCK_N)
    which = (tl.program_id(0) // tiles_n).to(tl.int64)
    n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_there = (n >= 0) & (n < size_n)  # the last tile may reach beyond 2^31
    x_n = position(n, x_column_table, n_there) * x_column
    if y is not None:
        y_n = position(n, y_column_table, n_there) * y_column
    entry = which * 0
    if WINDOWS:
        start = which * STEP
        end = start + STEP
        if starts is None:
            if (quotient(start, inner, NARROW) + 1) * inner < end:
                return
        else:
            if tl.load(starts + group_of(start, starts, groups) + 1) < end:
                return
        if BATCHED:
            first, last = start, end - 1
            if order is not None:
                first, last = tl.load(order + start).to(tl.int64), tl.load(order + end - 1).to(tl.int64)
            entry = quotient(first, batch_rows, NARROW)
            if quotient(last, batch_rows, NARROW) > entry:
                return
        elif starts is None:
            entry = quotient(start, batch_rows, NARROW)
        head, skipped = end - start, which * 0
    else:
        if starts is None:
            start = which * inner
            end = start + inner
            entry = quotient(which, groups, NARROW)
        elif BATCHED:
            entry = quotient(which, groups, NARROW)
            group = which - entry * groups
            first, last = tl.load(starts + group), tl.load(starts + group + 1)
            start = first_from(order, first.to(tl.int64), last.to(tl.int64), entry * batch_rows)
            end = first_from(order, start, last.to(tl.int64), (entry + 1) * batch_rows)
        else:
            start, end = tl.load(starts + which).to(tl.int64), tl.load(starts + which + 1).to(tl.int64)
        head, skipped = end - start, which * 0
        window = tl.cdiv(start, STEP)
        if parts is not None:
            skipped = tl.maximum(end // STEP - window, 0)
            head = tl.where(skipped > 0, window * STEP - start, head)
    total = tl.zeros((BLOCK_R, BLOCK_N), wide)
    for at in range(0, end - start - skipped * STEP, BLOCK_R):
        r = start + at + tl.arange(0, BLOCK_R)
        row = tl.where(r - start < head, r, r + skipped * STEP)
        there = row < end
        if order is not None:
            row = tl.load(order + row, mask=there, other=0)
        if NARROW:
            row = row.to(tl.int32)
        x_r, reads, bad = row_places(row, there, x_table, x_size, x_row, inner, x_inner)
        x_r += entry * x_batch
        if y is not None:
            y_r, y_reads, y_bad = row_places(row, there, y_table, y_size, y_row, inner, y_inner)
            y_r += entry * y_batch
            reads, bad = reads & y_reads, bad | y_bad
        inside = reads[:, None] & n_there[None, :]
        taken = tl.load(x + x_r[:, None] + x_n[None, :], mask=inside, other=0.0).to(wide)
        if y is not None:
            taken *= tl.load(y + y_r[:, None] + y_n[None, :], mask=inside, other=0.0).to(wide)
        total += tl.where(bad[:, None], float("nan"), taken)
    if WINDOWS:
        tl.store(parts + which * size_n + n, tl.sum(total, 0), mask=n_there)
    else:
        if parts is not None:
            for at in range(window, window + skipped, BLOCK_R):
                w = at + tl.arange(0, BLOCK_R)
                inside = (w < window + skipped)[:, None] & n_there[None, :]
                total += tl.load(parts + w[:, None] * size_n + n[None, :], mask=inside, other=0.0)
        if POISONS:
            total = tl.where(tl.load(starts + groups) < rows, float("nan"), total)
        where = which * out_group + position(n, out_column_table, n_there) * out_column
        tl.store(out + where, tl.sum(total, 0).to(out.dtype.element_ty), mask=n_there)


class Rows(NamedTuple):
    """A tensor read as rows and columns, each of which may be several of its dimensions.

    Attributes:
        x: the tensor.
        column: its columns.
        row: the stride of a row, of `table[row]` if there is a table, or of `row // inner`.
        inner: the stride of `row % inner`, without a table; the sum says what `inner` is.
        batch: the stride of a batch entry.
        table: the row of `x` that each row is; `size` counts as zeros, and others out of range as NaN.
        size: number of rows that the table may name.
    """

    x: Tensor
    column: Axis
    row: int
    inner: int = 0
    batch: int = 0
    table: Tensor | None = None
    size: int = 0

    @classmethod
    def of(cls, x: Tensor, rows: Sequence[int], columns: Sequence[int], table: Tensor | None = None) -> Rows:
        """Read some dimensions of a tensor as rows and the others as columns, in any strides."""
        x = x.resolve_neg()  # a copy with strides of its own
        row = axis_of(x, rows)
        if table is None:
            return cls(x, axis_of(x, columns), row.stride, table=row.table, size=2**62)
        assert row.table is None, "the rows of a table have one stride"
        size = 1
        for d in rows:
            size *= x.shape[d]
        return cls(x, axis_of(x, columns), row.stride, table=table, size=size)

    @property
    def flat(self) -> list[Any]:
        """The kernel's arguments for this tensor."""
        return [self.x, packed(self.table), self.size, self.row, self.inner, self.batch, *self.column.flat]


class Runs(NamedTuple):
    """Which rows are summed, as `Groups` with a batch, or as groups of equal sizes.

    Attributes:
        rows: number of rows.
        groups: number of groups, in each entry of a batch.
        sorted: the rows by group; None if each group is the next `inner` rows.
        batches: number of entries of a batch. All have as many rows, which follow one another in the order of entries.
        inner: rows are read at `row // inner` and `row % inner`.
    """

    rows: int
    groups: int
    sorted: Groups | None = None
    batches: int = 1
    inner: int = 1


def sum_rows(x: Rows, out: Rows, columns: int, runs: Groups | Runs, y: Rows | None = None) -> None:
    """Write the sum of each group's rows to `out`, or of the products of two; zero if a group has none.

    Args:
        x: the operand.
        out: the result, one row per group; with a batch, per entry and group.
        columns: number of columns of all.
        runs: which rows belong to which group.
        y: the factors of the operand's rows.
    """
    if isinstance(runs, Groups):
        runs = Runs(runs.rows, runs.size, runs)
    rows, groups, batches = runs.rows, runs.groups, runs.batches
    count = groups * batches
    if not count * columns:
        return
    order, starts = (None, None) if runs.sorted is None else (runs.sorted.order, runs.sorted.offsets)
    poisons = runs.sorted is not None and runs.sorted.poisons
    block_n = min(64, triton.next_power_of_2(columns))
    mean = triton.next_power_of_2(max(1, rows // count))
    most = max(1, min(_MOST_ROWS, _TILE // (accumulator(out.x.dtype).itemsize * block_n)))
    block_r = min(most, max(8, mean))
    tiles = triton.cdiv(columns, block_n)
    parts, longest = None, runs.inner
    if runs.sorted is not None:
        longest = rows if runs.sorted.longest is None else runs.sorted.longest
    if min(rows, longest) >= WINDOW:
        parts = out.x.new_empty((rows // WINDOW, columns), dtype=accumulator(out.x.dtype))
    factor = [None, None, 0, 0, 0, 0, None, 0] if y is None else y.flat
    arguments = [
        *x.flat, *factor, out.x, out.row, *out.column.flat, packed(order), packed(starts), parts,
        groups, rows, max(1, rows // batches), runs.inner, columns,
    ]  # fmt: skip
    for windows in (True, False) if parts is not None else (False,):
        high = most if windows else block_r
        warps = max(1, min(4, high * block_n // 256))
        launch(
            sum_kernel, (rows // WINDOW if windows else count) * tiles, arguments,
            POISONS=poisons, WINDOWS=windows, BATCHED=runs.sorted is not None and batches > 1,
            NARROW=max(rows, count) < 2**31, BLOCK_R=high, BLOCK_N=block_n, STEP=WINDOW, num_warps=warps, **REGISTERS,
        )  # fmt: skip


def add_parts(parts: Tensor, part_starts: Tensor, groups: int, out: Tensor, axes: tuple[Axis, Axis, Axis]) -> None:
    """Add up the pieces of each group that was cut, and write the sums to `out`.

    Args:
        parts: the sums of the pieces, `(slots, m, n)`.
        part_starts: number of slots before each group's first.
        groups: number of groups.
        out: the result is written here.
        axes: the result's axes: groups, m and n.
    """
    _, m, n = parts.shape
    arguments = parts, part_starts, out, *(part for axis in axes for part in axis.flat), m, n
    launch(add_parts_kernel, groups * triton.cdiv(m * n, _ADDED), arguments, BLOCK=_ADDED)


def grouped_sum(x: Tensor, groups: Groups) -> Tensor:
    """Return the sum of each group's rows, `(groups, K)`, for rows `(N, K)`."""
    out = x.new_empty((groups.size, x.shape[1]))
    sum_rows(Rows.of(x, [0], [1]), Rows.of(out, [0], [1]), x.shape[1], groups)
    return out
