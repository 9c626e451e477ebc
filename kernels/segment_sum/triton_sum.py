"""Sums of rows by group on CUDA. The package states the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from planner.kernels.grouping.torch_grouping import Groups
from planner.kernels.grouping.triton_launch import launch
from planner.kernels.tiled_product.triton_axes import Axis, Cut, axis_of
from planner.kernels.tiled_product.triton_product import add_parts_kernel, group_of, position

__all__ = ["Rows", "add_parts", "grouped_sum", "sum_kernel", "sum_rows"]

# Elements of a tile, tiles of rows per program, and elements of a group's parts that one program adds up.
_TILE, _CHUNK, _ADDED = 2048, 64, 1024


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    x, x_row_table, x_row, x_column_table, x_column,
    out, out_group_table, out_group, out_column_table, out_column,
    order, starts, tile_starts, part_starts, parts, groups, size_n,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum a piece of one group's rows; the arguments are those of `triton_product.product_kernel`."""
    tiles_n = tl.cdiv(size_n, BLOCK_N)
    tile = (tl.program_id(0) // tiles_n).to(tl.int64)
    if tile >= tl.load(tile_starts + groups):
        return
    n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_there = (n >= 0) & (n < size_n)  # the last tile may reach beyond 2^31
    x_n = position(n, x_column_table, n_there) * x_column
    group = group_of(tile, tile_starts, groups)
    start = tl.load(starts + group)
    piece = tile - tl.load(tile_starts + group)
    first = start + piece * CHUNK * BLOCK_R
    last = tl.minimum(first + CHUNK * BLOCK_R, tl.load(starts + group + 1))
    total = tl.zeros((BLOCK_R, BLOCK_N), parts.dtype.element_ty)
    for at in range(first, last, BLOCK_R):
        r = at + tl.arange(0, BLOCK_R)
        there = r < last
        row = tl.load(order + r, mask=there, other=0)
        x_r = position(row, x_row_table, there) * x_row
        taken = tl.load(x + x_r[:, None] + x_n[None, :], mask=there[:, None] & n_there[None, :], other=0.0)
        total += taken.to(parts.dtype.element_ty)
    summed = tl.sum(total, 0)
    slot = tl.load(part_starts + group)
    if slot == tl.load(part_starts + group + 1):
        where = position(group, out_group_table, group >= 0) * out_group
        where += position(n, out_column_table, n_there) * out_column
        tl.store(out + where, summed.to(out.dtype.element_ty), mask=n_there)
    else:
        tl.store(parts + (slot + piece) * size_n + n, summed, mask=n_there)


class Rows(NamedTuple):
    """A tensor read as rows and columns, each of which may be several of its dimensions."""

    x: Tensor
    row: Axis
    column: Axis

    @classmethod
    def of(cls, x: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Rows:
        """Read some dimensions of a tensor as rows and the others as columns, in any strides."""
        x = x.resolve_neg()  # a copy with strides of its own
        return cls(x, axis_of(x, rows), axis_of(x, columns))

    @property
    def flat(self) -> list[Any]:
        """The kernel's arguments for this tensor."""
        return [self.x, *self.row.flat, *self.column.flat]


def sum_rows(rows: Rows, out: Rows, columns: int, groups: Groups) -> None:
    """Write the sum of each group's rows to `out`; zero if a group has none.

    Args:
        rows: the operand.
        out: the result, one row per group.
        columns: number of columns of both.
        groups: which rows belong to which group.
    """
    if not groups.size * columns:
        return
    block_n = min(128, triton.next_power_of_2(columns))
    block_r = _TILE // block_n
    pieces = Cut.of(groups.offsets, groups.rows, 1, block_r * _CHUNK)
    parts = pieces.parts(out.x, 1, columns)
    programs = pieces.most * triton.cdiv(columns, block_n)
    arguments = (
        *rows.flat, *out.flat, groups.row_numbers, groups.offsets, pieces.tile_starts, pieces.part_starts, parts,
        groups.size, columns,
    )  # fmt: skip
    launch(sum_kernel, programs, arguments, BLOCK_R=block_r, BLOCK_N=block_n, CHUNK=_CHUNK)
    if pieces.slots:
        add_parts(parts, pieces.part_starts, groups.size, out.x, (out.row, Axis(0), out.column))


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
