"""Grouped products on CUDA by one Triton kernel. The package states the contract.

Nothing waits for the device. Operands are read in any strides without a copy. Sums are formed in one order, so equal
calls give equal bits. In all functions `tiling` is as in `planner.kernels.tiled_product.triton_tiles.tiles_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor

from planner.kernels.grouped_matmul.triton_pair import both_gradients
from planner.kernels.grouping.torch_grouping import Groups, accumulator, group_rows
from planner.kernels.grouping.triton_grouping import Tasks
from planner.kernels.grouping.triton_launch import launch, replayed
from planner.kernels.segment_sum.triton_sum import add_parts, grouped_sum
from planner.kernels.tiled_product.triton_arithmetic import capability_of, precision
from planner.kernels.tiled_product.triton_axes import (
    Axis,
    Grouping,
    Matrices,
    axis_of,
    index_type,
    packed,
    registers_for,
    sums_of,
)
from planner.kernels.tiled_product.triton_product import product_kernel
from planner.kernels.tiled_product.triton_tiles import Tiles, covers_pair, tiles_of


def grouped_matmul(
    a: Tensor,
    c: Tensor,
    groups: Groups,
    source: Tensor | None = None,
    target: Tensor | None = None,
    targets: int | None = None,
    tiling: str = "",
    wide: bool = False,
) -> Tensor:
    """Multiply each row by the matrix of its group, see the package; products of half types are float32 if `wide`."""
    n, (_, i, j), k = groups.rows, a.shape, c.shape[2]
    a, c = a.resolve_neg(), c.resolve_neg()  # the imaginary part of a conjugate is negated lazily
    rows = a.new_empty((n, i, k), dtype=accumulator(a.dtype) if wide or target is not None else a.dtype)

    def run() -> None:
        x, y, z = Matrices.of(a, source), Matrices.of(c), Matrices.of(rows)
        rows_product(x, y, z, (n, i, k, j), Grouping.of(groups), _drops(groups), tiling)

    if source is None and rows.numel():
        how = precision(a, j)
        tiles, table = _plan_rows(a, groups, i, k, j, how, tiling)
        replayed(("rows", rows.dtype, how, tiles, *_facts(groups, a, c)), (a, c, rows, groups.order, table), run)
    else:
        run()
    if target is None:
        return rows
    assert targets is not None
    return grouped_sum(rows.reshape(n, i * k), group_rows(target, targets)).reshape(targets, i, k).to(a.dtype)


def grouped_outer(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    source_a: Tensor | None = None,
    source_b: Tensor | None = None,
    tiling: str = "",
) -> Tensor:
    """Sum `a[r]^T @ b[r]` over the rows of each group, see the package."""
    i, m, k = a.shape[1], a.shape[2], b.shape[2]
    a, b = a.resolve_neg(), b.resolve_neg()
    out = a.new_empty((groups.size, m, k))
    if not out.numel():
        return out
    how, tiles, tasks = _plan_terms(a, groups, i, m, k, source_a is not None or source_b is not None, tiling)
    parts = sums_of(tasks, out, m, k)

    def run() -> None:
        x, y, z = Matrices.of(a, source_a), Matrices.of(b, source_b), Matrices.of(out)
        terms_product(x, y, z, (groups.rows, i, m, k), Grouping.of(groups), _drops(groups), tiling, parts)

    arrays = a, b, out, groups.order, groups.offsets, tasks.table, tasks.part_starts, parts, source_a, source_b
    replayed(("terms", how, tiles, tasks.slots, *_facts(groups, a, b, source_a, source_b)), arrays, run)
    return out


def grouped_gradients(
    gout: Tensor, a: Tensor, c: Tensor, groups: Groups, source: Tensor | None = None, tiling: str = ""
) -> tuple[Tensor, Tensor]:
    """Return both gradients of `grouped_matmul` without a target, see the package.

    One walk over the rows makes both in half types, and where float32 is multiplied in float64, if a matrix is small
    enough for one program.
    """
    n, (_, i, j), k, drops = groups.rows, a.shape, c.shape[2], _drops(groups)
    gout, a, c = gout.resolve_neg(), a.resolve_neg(), c.resolve_neg()
    da, dc = a.new_empty((n, i, j)), c.new_empty((groups.size, j, k))
    how, table = precision(gout, k), None
    plan: tuple[Any, ...] = ()
    one_walk = covers_pair(j, k, a.element_size(), how)
    if one_walk:
        each = max(1, n * i // max(1, groups.size))
        tiles = tiles_of("pair", j, k, each, a.element_size(), how, False, tiling, capability_of(a))
        tasks = groups.tasks(i, tiles.k * tiles.chunk, drops > 0, True)
    else:
        tiles, table = _plan_rows(gout, groups, i, j, k, how, tiling)
        plan = how, tiles
        how, tiles, tasks = _plan_terms(a, groups, i, j, k, source is not None, tiling)
    parts = sums_of(tasks, dc, j, k)

    def run() -> None:
        x, y, z = Matrices.of(gout), Matrices.of(a, source), Matrices.of(c)
        of_rows, of_matrices, sizes, grouping = Matrices.of(da), Matrices.of(dc), (n, i, j, k), Grouping.of(groups)
        if one_walk:
            both_gradients(x, y, z, of_rows, of_matrices, sizes, grouping, tiles, how, drops, parts)
        else:
            rows_product(x, z.transposed, of_rows, sizes, grouping, drops, tiling)
            terms_product(y, x, of_matrices, sizes, grouping, drops, tiling, parts)

    arrays = gout, a, c, da, dc, groups.order, groups.offsets, table, tasks.table, tasks.part_starts, parts, source
    replayed(("gradients", *plan, how, tiles, tasks.slots, *_facts(groups, gout, a, c, source)), arrays, run)
    return da, dc


def _plan_rows(x: Tensor, groups: Groups, i: int, n: int, k: int, how: str, tiling: str) -> tuple[Tiles, Tensor]:
    """Return the tiles in which rows `x` are multiplied with matrices `(k, n)`, and the table of tasks."""
    each = max(1, groups.rows * i // max(1, groups.size))
    tiles = tiles_of("rows", each, n, k, x.element_size(), how, False, tiling, capability_of(x))
    return tiles, groups.tasks(i, tiles.m * tiles.chunk, _drops(groups) > 0, False).table


def _plan_terms(
    x: Tensor, groups: Groups, i: int, m: int, n: int, tables: bool, tiling: str
) -> tuple[str, Tiles, Tasks]:
    """Return how products `(m, n)` of rows are summed, in which tiles, and the tasks."""
    each = max(1, groups.rows * i // max(1, groups.size))
    how = precision(x, each)
    tiles = tiles_of("terms", m, n, each, x.element_size(), how, tables, tiling, capability_of(x))
    return how, tiles, groups.tasks(i, tiles.k * tiles.chunk, False, True)


def _drops(groups: Groups) -> int:
    """Return what becomes of dropped rows, as kernels take it: 0 if there are none, 1 for zeros, 2 for NaN."""
    return 2 if groups.poisons else int(groups.drops)


def _facts(groups: Groups, *arrays: Tensor | None) -> tuple[Any, ...]:
    """Return what launches depend on: facts of the groups, and of arrays all but where they lie."""
    order = None if groups.order is None else groups.order.dtype
    facts: list[Any] = [_drops(groups), groups.rows, groups.size, order, groups.offsets.dtype]
    for x in arrays:
        facts += (None,) if x is None else (x.dtype, x.shape, x.stride())
    return tuple(facts)


def batched_matmul(
    a: Tensor, b: Tensor, out: Tensor, dims: Sequence[Sequence[Sequence[int]]], tiling: str = ""
) -> None:
    """Write a batched product of operands with dimensions in any order and any strides; nothing is copied.

    Args:
        a: left operand.
        b: right operand.
        out: the result is written here.
        dims: for each of the three tensors, its dimensions in three groups: the batch, then rows, then columns.
        tiling: see the module.
    """
    x, y, z = (
        Matrices(tensor, axis_of(tensor, outer), axis_of(tensor, inner), axis_of(tensor, column))
        for tensor, (outer, inner, column) in zip((a.resolve_neg(), b.resolve_neg(), out), dims, strict=True)
    )
    batch, m, n = (math.prod(out.shape[d] for d in group) for group in dims[2])
    k = math.prod(a.shape[d] for d in dims[0][2])
    plain_product(x, y, z, (batch, m, n, k), tiling=tiling)


def plain_product(
    a: Matrices,
    b: Matrices,
    out: Matrices,
    sizes: tuple[int, int, int, int],
    named: int | None = None,
    tiling: str = "",
    places: Tensor | None = None,
) -> None:
    """Write a batch of products, `a[z, m, k] b[z, k, n]`.

    Args:
        a: left operand.
        b: right operand.
        out: the result is written here.
        sizes: sizes of z, m, n and k.
        named: if given, the number of matrices of `b`, of which its table names one for each z. An entry outside of
            that range gives zeros.
        tiling: see the module.
        places: if given, the inner position in `a` of each z and m, `(z * m,)`; a negative one gives zeros.
    """
    batch, m, n, k = sizes
    if batch * m * n:
        tiles, how = _tiles("plain", m, n, k, a, b, out, tiling=tiling)
        grouping, tables = Grouping(places, None, batch if named is None else named), (None, 0, None)
        count = triton.cdiv(m, tiles.m) * batch
        _launch("plain", a, b, out, (m, n, k), tiles, how, count, grouping, tables, drops=named is not None)


def chosen_matmul(a: Tensor, c: Tensor, index: Tensor, source: Tensor | None = None, tiling: str = "") -> Tensor:
    """Multiply each row by the matrix that `index` names, `grouped_matmul` without sorted rows.

    Each program reads the matrix of one row. This is for rows `(I, J)` of many elements I.

    Args:
        a: the rows, `(Na, I, J)`.
        c: the matrices, `(G, J, K)`.
        index: the matrix of each row, `(N,)`; the value G drops the row.
        source: place of each row in `a`, `(N,)`; None if they are in order.
        tiling: see the module.
    """
    n, (i, j), k = len(index), a.shape[1:], c.shape[2]
    a, c = a.resolve_neg(), c.resolve_neg()
    rows = a.new_empty((n, i, k))
    matrices = Matrices.of(c, index)
    plain_product(Matrices.of(a, source), matrices, Matrices.of(rows), (n, i, k, j), len(c), tiling)
    return rows


def chosen_rows(
    a: Tensor, c: Tensor, index: Tensor, inner: int, source: Tensor | None = None, wide: bool = False
) -> Tensor:
    """Multiply each `inner` rows by the matrix that `index` names for them, `a[source[n I + i]] @ c[index[n]]`.

    Nothing is sorted. This is for many rows I by one matrix.

    Args:
        a: the rows, `(Na, J)`.
        c: the matrices, `(G, J, K)`.
        index: the matrix of I rows, `(N,)`; the value G drops them.
        inner: the number of rows I.
        source: place of each row in `a`, `(N * I,)`; a negative one drops the row. None if rows are in order.
        wide: whether products of half types are float32.

    Returns:
        The products, `(N, I, K)`; zero for what is dropped.
    """
    n, k = len(index), c.shape[2]
    a, c = a.resolve_neg(), c.resolve_neg()
    rows = a.new_empty((n, inner, k), dtype=accumulator(a.dtype) if wide else a.dtype)
    block = Axis(inner * a.stride(0) if source is None else 0)
    taken = Matrices(a, block, Axis(a.stride(0)), Axis(a.stride(1)))
    sizes = n, inner, k, a.shape[1]
    plain_product(taken, Matrices.of(c, index), Matrices.of(rows), sizes, len(c), places=source)
    return rows


def rows_product(
    a: Matrices,
    b: Matrices,
    out: Matrices,
    sizes: tuple[int, int, int, int],
    grouping: Grouping,
    drops: int = 0,
    tiling: str = "",
) -> None:
    """Write the products of rows with the matrix of their group, `a[r, i, k] b[g, k, n]`.

    Args:
        a: the rows.
        b: one matrix per group.
        out: the result is written here; no two of its elements may share memory.
        sizes: sizes of r, i, n and k.
        grouping: the groups of the rows.
        drops: 0 if no row is dropped; else the products of dropped rows are zero for 1 and NaN for 2.
        tiling: see the module.
    """
    rows, i, n, k = sizes
    if rows * i * n:
        each = max(1, rows * i // max(1, grouping.groups))
        tiles, how = _tiles("rows", each, n, k, a, b, out, tiling=tiling)
        tasks = grouping.tasks(rows, i, tiles.m * tiles.chunk, drops > 0, empty=False)
        tables = tasks.table, tasks.most, None
        _launch("rows", a, b, out, (rows * i, n, k), tiles, how, tasks.most, grouping, tables, i, drops)


def terms_product(
    a: Matrices,
    b: Matrices,
    out: Matrices,
    sizes: tuple[int, int, int, int],
    grouping: Grouping,
    drops: int = 0,
    tiling: str = "",
    parts: Tensor | None = None,
) -> None:
    """Write the products summed over the rows of each group, `a[r, i, m] b[r, i, n]`.

    `sizes` are those of r, i, m and n. Where `drops` is 2 and a row is dropped, all results are NaN. `parts` is memory
    for the sums of tasks, see `sums_of`; None to allocate it. The other arguments are as in `rows_product`.
    """
    (rows, i, m, n), groups = sizes, grouping.groups
    if not groups * m * n:
        return
    tiles, how = _tiles("terms", m, n, max(1, rows * i // groups), a, b, out, tiling=tiling)
    tasks = grouping.tasks(rows, i, tiles.k * tiles.chunk, False, empty=True)
    if parts is None:
        parts = sums_of(tasks, out.x, m, n)
    tables, count = (tasks.table, tasks.most, parts), tasks.most * triton.cdiv(m, tiles.m)
    poisons = 2 if drops == 2 else 0
    _launch("terms", a, b, out, (m, n, rows * i), tiles, how, count, grouping, tables, i, poisons)
    if parts is not None:
        add_parts(parts, tasks.part_starts, groups, out.x, (out.outer, out.inner, out.column))


def _tiles(mode: str, m: int, n: int, k: int, *operands: Matrices, tiling: str = "") -> tuple[Tiles, str]:
    """Return the tiles of a product, and how float32 is multiplied."""
    x = operands[0].x
    tables = any(axis.table is not None for operand in operands for axis in operand[1:])
    how = precision(x, k, mode != "plain")
    return tiles_of(mode, m, n, k, x.element_size(), how, tables, tiling, capability_of(x)), how


def _launch(
    mode: str,
    a: Matrices,
    b: Matrices,
    out: Matrices,
    sizes: tuple[int, int, int],
    tiles: Tiles,
    how: str,
    count: int,
    grouping: Grouping,
    tables: tuple[Tensor | None, int, Tensor | None],
    inner: int = 1,
    drops: int = 0,
) -> None:
    """Start the kernel in `count` programs along rows; arguments as in `product_kernel`.

    `sizes` are those of m, n and k. `tables` are `tasks`, `most` and `parts`.
    """
    (m, n, k), groups = sizes, grouping.groups + (drops > 0 and mode == "rows")
    starts = grouping.starts if drops == 2 and mode == "terms" else None
    arguments = (
        *a.flat, *b.flat, *out.flat, packed(grouping.order), starts, *tables,
        groups, inner, m, k, n,
    )  # fmt: skip
    launch(
        product_kernel, count * triton.cdiv(n, tiles.n), arguments,
        MODE=mode, DROPS=int(drops), PRECISION=how, INDEX=index_type(max(m, k), tables[2], a.x, b.x, out.x),
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, ONE_K=k <= tiles.k,
        num_stages=tiles.stages, **registers_for(a.x, tiles.warps),
    )  # fmt: skip
