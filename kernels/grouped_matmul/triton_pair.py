"""Both gradients of a grouped product on CUDA, in one walk over the rows: the output's gradient is read once.

    da[r, i, j] = sum over k of g[r, i, k] c[group, j, k],    dc[group, j, k] = sum over r, i of a[r, i, j] g[r, i, k]

One program holds a whole matrix: one tile of `c` and one tile of its gradient, so this is for small matrices. Rows are
walked in the order of their groups, and sums are formed in one order. `triton_product` says how operands are addressed.
A row with a negative position in the table of `g` or `a` adds nothing, and its gradient is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from planner.kernels.grouping.triton_launch import launch
from planner.kernels.segment_sum.triton_sum import add_parts
from planner.kernels.tiled_product.triton_arithmetic import add_product
from planner.kernels.tiled_product.triton_axes import Grouping, Matrices, index_type, packed, registers_for, sums_of
from planner.kernels.tiled_product.triton_product import position
from planner.kernels.tiled_product.triton_tiles import Tiles


@triton.jit
def pair_kernel(  # type: ignore[no-untyped-def]  # noqa: D417
    g, g_outer_table, g_outer, g_inner_table, g_inner, g_column_table, g_column,
    a, a_outer_table, a_outer, a_inner_table, a_inner, a_column_table, a_column,
    c, c_outer_table, c_outer, c_inner_table, c_inner, c_column_table, c_column,
    da, da_outer_table, da_outer, da_inner_table, da_inner, da_column_table, da_column,
    dc, dc_outer_table, dc_outer, dc_inner_table, dc_inner, dc_column_table, dc_column,
    order, starts, tasks, most, parts, groups, rows, inner, size_m, size_n,
    DROPS: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Walk one piece of a group's rows; see the module, and `triton_product` for the other arguments.

    Args:
        g, a, c, da, dc: pointers, each followed by a table or None, and a stride, for each of its three axes.
        starts: where each group begins in `order`, and where the dropped rows do; read for `DROPS` only.
        groups: number of groups; the last one holds the dropped rows and has no matrix.
        rows: number of rows, dropped ones included.
        DROPS: 2 if the gradient of dropped rows is NaN and not zero; and that of all matrices, if a row is dropped.
        size_m, size_n: sizes of j and k.
        BLOCK_M, BLOCK_N: at least the sizes of j and k.
        BLOCK_K: rows per step.
    """
    wide: tl.constexpr = tl.float64 if dc.dtype.element_ty == tl.float64 or PRECISION == "float64" else tl.float32
    tile = tl.program_id(0).to(INDEX)
    group = tl.load(tasks + tile).to(INDEX)
    if group < 0:
        return
    stays = group < groups - 1
    start = tile * 0  # terms are counted through all groups
    first = tl.load(tasks + most + tile).to(INDEX)
    last = first + tl.load(tasks + 2 * most + tile).to(INDEX)
    j, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    j_there, k_there = j < size_m, k < size_n
    g_k = position(k, g_column_table, k_there, INDEX) * g_column
    a_j = position(j, a_column_table, j_there, INDEX) * a_column
    da_j = position(j, da_column_table, j_there, INDEX) * da_column
    c_j = position(group, c_outer_table, stays, INDEX) * c_outer + position(j, c_inner_table, j_there, INDEX) * c_inner
    c_k = position(k, c_column_table, k_there, INDEX) * c_column
    k_held = k < tl.where(stays, size_n, 0)
    y = tl.load(c + c_j[None, :] + c_k[:, None], mask=j_there[None, :] & k_held[:, None], other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_N), wide)
    last_read = tl.where(stays, last, first)
    for at in range(first, last, BLOCK_K):
        m = at + tl.arange(0, BLOCK_K)
        there = m < last
        reads = m < last_read
        row = start + m // inner
        if order is not None:
            row = tl.load(order + row, mask=there, other=0)
        m = m % inner
        g_row = position(row, g_outer_table, reads, INDEX)
        a_row = position(row, a_outer_table, reads, INDEX)
        g_m = g_row * g_outer + position(m, g_inner_table, reads, INDEX) * g_inner
        a_m = a_row * a_outer + position(m, a_inner_table, reads, INDEX) * a_inner
        # Triton 3.6 cannot compile a look-up in a table whose mask depends on another look-up.
        reads = reads & (g_row >= 0) & (a_row >= 0)
        x = tl.load(g + g_m[:, None] + g_k[None, :], mask=reads[:, None] & k_there[None, :], other=0.0)
        z = tl.load(a + a_j[:, None] + a_m[None, :], mask=j_there[:, None] & reads[None, :], other=0.0)
        total, _ = add_product(z, x, total, total, PRECISION)
        of_rows = tl.zeros((BLOCK_K, BLOCK_M), wide)
        of_rows, _ = add_product(x, y, of_rows, of_rows, PRECISION)
        if DROPS == 2:
            of_rows = tl.where(stays, of_rows, float("nan"))
        da_m = (
            position(row, da_outer_table, there, INDEX) * da_outer
            + position(m, da_inner_table, there, INDEX) * da_inner
        )
        tl.store(
            da + da_m[:, None] + da_j[None, :],
            of_rows.to(da.dtype.element_ty),
            mask=there[:, None] & j_there[None, :],
        )
    if DROPS == 2:
        total = tl.where(tl.load(starts + groups - 1) < rows, float("nan"), total)
    inside = j_there[:, None] & k_held[None, :]
    if parts is not None:
        slot = tl.load(tasks + 3 * most + tile).to(INDEX)
        where = (slot * size_m + j[:, None]) * size_n + k[None, :]
        tl.store(parts + where, total, mask=tl.where(slot >= 0, inside, False))
        inside = tl.where(slot < 0, inside, False)
    dc_j = (
        position(group, dc_outer_table, stays, INDEX) * dc_outer
        + position(j, dc_inner_table, j_there, INDEX) * dc_inner
    )
    dc_k = position(k, dc_column_table, k_there, INDEX) * dc_column
    tl.store(dc + dc_j[:, None] + dc_k[None, :], total.to(dc.dtype.element_ty), mask=inside)


def both_gradients(
    g: Matrices,
    a: Matrices,
    c: Matrices,
    da: Matrices,
    dc: Matrices,
    sizes: tuple[int, int, int, int],
    grouping: Grouping,
    tiles: Tiles,
    how: str = "ieee",
    drops: int = 1,
    parts: Tensor | None = None,
) -> None:
    """Write both gradients.

    Args:
        g: the output's gradient, `g[r, i, k]`.
        a: the rows, `a[r, i, j]`.
        c: the matrices, `c[group, j, k]`.
        da: the gradient of the rows is written here; zero for dropped rows.
        dc: the gradient of the matrices is written here.
        sizes: sizes of r, i, j and k.
        grouping: the groups of the rows.
        tiles: tile sizes for j, k and rows; those for j and k cover the whole axes.
        how: how float32 is multiplied, see `triton_arithmetic`; not by parts.
        drops: 0 if no row is dropped; else the gradient of dropped rows is zero for 1 and NaN for 2, and that of all
            matrices too.
        parts: memory for the sums of tasks, see `sums_of`; None to allocate it.
    """
    (rows, i, m, n), groups = sizes, grouping.groups
    tasks = grouping.tasks(rows, i, tiles.k * tiles.chunk, drops > 0, empty=True)
    if parts is None:
        parts = sums_of(tasks, dc.x, m, n)
    arguments = (
        *g.flat, *a.flat, *c.flat, *da.flat, *dc.flat, packed(grouping.order), grouping.starts if drops == 2 else None,
        tasks.table, tasks.most, parts, groups + 1, rows, i, m, n,
    )  # fmt: skip
    launch(
        pair_kernel, tasks.most, arguments,
        DROPS=drops, PRECISION=how, INDEX=index_type(rows * i, parts, g.x, a.x, c.x, da.x, dc.x),
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, num_stages=tiles.stages, **registers_for(a.x, tiles.warps),
    )  # fmt: skip
    if parts is not None:
        add_parts(parts, tasks.part_starts, groups, dc.x, (dc.outer, dc.inner, dc.column))
