"""One matrix product for CUDA that copies nothing: over a batch, over the rows of groups, or summed over these rows.

Each operand is addressed through three axes, `x[outer, inner, column]`, so permuted, sliced, expanded and gathered
operands are read without a copy. A position along an axis may be looked up in a table; then it is multiplied by a
stride. A negative position in the table of a row stands for zeros.

    mode     sum over k of                            gives           groups
    "plain"  a[z, m, k]        b[z, k, n]             out[z, m, n]    none
    "rows"   a[r, i, k]        b[g, k, n]             out[r, i, n]    the rows r of group g meet its matrix
    "terms"  a[r, i, m]        b[r, i, n]             out[g, m, n]    summed over r and i too, the rows r of group g

Rows are walked in the order of their groups. Nothing waits for the device: the grid is an upper bound, and programs
past the last tile return. Sums are in float32, or in float64 for float64 and where float32 is multiplied so. They are
formed in one order: equal calls give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from planner.kernels.tiled_product.triton_arithmetic import add_product, joined

# Tiles of rows whose programs run side by side and share the columns of `b` in the cache.
_NEIGHBOURS = tl.constexpr(8)


@triton.jit
def position(index, table, mask, INDEX: tl.constexpr = tl.int64):  # type: ignore[no-untyped-def]
    """Return positions along an axis, as integers that hold a position times a stride."""
    if table is not None:
        return tl.load(table + index, mask=mask, other=-1).to(INDEX)
    else:
        return index.to(INDEX)


@triton.jit
def pieces_of(size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many tiles cover an axis. `tl.cdiv` would add to the size, beyond 2^31 for the largest of 32 bits."""
    return (size - 1) // BLOCK + 1


@triton.jit
def program_place(tiles_n):  # type: ignore[no-untyped-def]
    """Return this program's tile along rows and along n. Neighbouring programs share rows and columns in the cache."""
    width = _NEIGHBOURS * tiles_n
    first = tl.program_id(0) // width * _NEIGHBOURS
    within = tl.program_id(0) % width
    rows = tl.minimum(tl.num_programs(0) // tiles_n - first, _NEIGHBOURS)
    return first + within % rows, within // rows


@triton.jit
def group_of(tile, tile_starts, groups):  # type: ignore[no-untyped-def]
    """Return the group of a tile: the last group that begins at or before it; others that begin there are empty."""
    low = tile * 0
    high = low + groups
    while low + 1 < high:
        middle = (low + high) // 2
        behind = tl.load(tile_starts + middle) > tile
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle)
    return low


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]  # noqa: D417
    a, a_outer_table, a_outer, a_inner_table, a_inner, a_column_table, a_column,
    b, b_outer_table, b_outer, b_inner_table, b_inner, b_column_table, b_column,
    out, out_outer_table, out_outer, out_inner_table, out_inner, out_column_table, out_column,
    order, starts, tasks, most, parts,
    groups, inner, size_m, size_k, size_n,
    MODE: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ONE_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile; see the module.

    Args:
        a, b, out: pointers, each followed by a table or None, and a stride, for each of its three axes.
        order: ("rows", "terms") row numbers sorted by group; None if the rows are sorted already. ("plain") the inner
            position in `a` of each z and m, `(z, m)`, negative for zeros; None if that is m.
        starts: ("terms") where each group begins in `order`, and where the dropped rows do; read for `DROPS` only.
        tasks: ("rows", "terms") what each program walks, see `planner.kernels.grouping.triton_grouping.Tasks`.
        most: ("rows", "terms") number of tasks.
        parts: ("terms") sums of the pieces of groups that are cut, `(slots, size_m, size_n)`; None if none is cut.
        groups: number of groups; ("plain") size of the batch.
        inner: ("rows", "terms") size of the axis i.
        size_m, size_k, size_n: sizes of the axes m, k, n; an axis that stands for rows and i has the size of both.
        DROPS: ("rows") 0 if no row is dropped; else the last group holds dropped rows, whose products are zero for 1
            and NaN for 2. ("terms") 2 if all results are NaN where a row is dropped. ("plain") whether `groups` is the
            number of matrices, and a batch entry for which the table of `b` names no matrix is zero.
        PRECISION: how products are formed, see `triton_arithmetic`.
        INDEX: type of positions and offsets, int32 if all of them fit, else int64.
        ONE_K: ("plain", "rows") whether one step of BLOCK_K covers all of k: then `b` is read once for all tiles.
    """
    wide: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 or PRECISION == "float64" else tl.float32
    tile_of_rows, tile_n = program_place(pieces_of(size_n, BLOCK_N))
    tile = tile_of_rows.to(INDEX)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_there = (n >= 0) & (n < size_n)  # the last tile may reach beyond 2^31
    b_n = position(n, b_column_table, n_there, INDEX) * b_column
    tiles_m = pieces_of(size_m, BLOCK_M)
    terms = size_k
    if MODE == "plain":
        group = tile // tiles_m
        start = group * 0
        first = (tile % tiles_m) * BLOCK_M
        last = tl.minimum(first + BLOCK_M, size_m)
        a_group = position(group, a_outer_table, group >= 0, INDEX) * a_outer
        entry = position(group, b_outer_table, group >= 0, INDEX)
        if DROPS:
            named = (entry >= 0) & (entry < groups)
            terms = tl.where(named, size_k, 0)
            entry = tl.where(named, entry, 0)
        b_group = entry * b_outer
    else:
        at_m = tile * 0
        if MODE == "terms":
            at_m = (tile % tiles_m) * BLOCK_M
            tile = tile // tiles_m
        group = tl.load(tasks + tile).to(INDEX)
        if group < 0:
            return
        start = tile * 0  # terms are counted through all groups
        first = tl.load(tasks + most + tile).to(INDEX)
        last = first + tl.load(tasks + 2 * most + tile).to(INDEX)
        if MODE == "rows":
            named = group >= 0
            if DROPS:
                named = group < groups - 1
                terms = tl.where(named, size_k, 0)
            b_group = position(group, b_outer_table, named, INDEX) * b_outer
    if MODE == "terms":
        m = at_m + tl.arange(0, BLOCK_M)
        m_there = m < size_m
        a_m = position(m, a_column_table, m_there, INDEX) * a_column
        total = tl.zeros((BLOCK_M, BLOCK_N), wide)
        low = total
        for at in range(first, last, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            there = k < last
            row = start + k // inner
            if order is not None:
                row = tl.load(order + row, mask=there, other=0)
            a_row = position(row, a_outer_table, there, INDEX)
            b_row = position(row, b_outer_table, there, INDEX)
            a_k = a_row * a_outer + position(k % inner, a_inner_table, there, INDEX) * a_inner
            b_k = b_row * b_outer + position(k % inner, b_inner_table, there, INDEX) * b_inner
            # Triton 3.6 cannot compile a look-up in a table whose mask depends on another look-up.
            there = there & (a_row >= 0) & (b_row >= 0)
            x = tl.load(a + a_m[:, None] + a_k[None, :], mask=m_there[:, None] & there[None, :], other=0.0)
            y = tl.load(b + b_k[:, None] + b_n[None, :], mask=there[:, None] & n_there[None, :], other=0.0)
            total, low = add_product(x, y, total, low, PRECISION)
        total = joined(total, low, PRECISION)
        if DROPS == 2:
            total = tl.where(tl.load(starts + groups).to(INDEX) * inner < size_k, float("nan"), total)
        inside = m_there[:, None] & n_there[None, :]
        if parts is not None:
            slot = tl.load(tasks + 3 * most + tile).to(INDEX)
            where = (slot * size_m + m[:, None]) * size_n + n[None, :]
            tl.store(parts + where, total, mask=tl.where(slot >= 0, inside, False))
            inside = tl.where(slot < 0, inside, False)
        out_m = position(group, out_outer_table, group >= 0, INDEX) * out_outer
        out_m += position(m, out_inner_table, m_there, INDEX) * out_inner
        out_n = position(n, out_column_table, n_there, INDEX) * out_column
        tl.store(out + out_m[:, None] + out_n[None, :], total.to(out.dtype.element_ty), mask=inside)
    else:
        k = tl.arange(0, BLOCK_K)
        there = k < terms
        if ONE_K:
            b_k = b_group + position(k, b_inner_table, there, INDEX) * b_inner
            a_k = position(k, a_column_table, there, INDEX) * a_column
            y = tl.load(b + b_k[:, None] + b_n[None, :], mask=there[:, None] & n_there[None, :], other=0.0)
        for at in range(first, last, BLOCK_M):
            m = at + tl.arange(0, BLOCK_M)
            m_there = m < last
            if MODE == "rows":
                row = start + m // inner
                if order is not None:
                    row = tl.load(order + row, mask=m_there, other=0)
                m = m % inner
                a_row = position(row, a_outer_table, m_there, INDEX)
                reads = m_there
                if a_outer_table is not None:
                    reads = m_there & (a_row >= 0)
                a_m = a_row * a_outer + position(m, a_inner_table, m_there, INDEX) * a_inner
                out_m = position(row, out_outer_table, m_there, INDEX) * out_outer
            else:
                reads, place = m_there, m
                if order is not None:
                    place = tl.load(order + group * size_m + m, mask=m_there, other=-1).to(INDEX)
                    reads = m_there & (place >= 0)
                a_m = a_group + position(place, a_inner_table, reads, INDEX) * a_inner
                out_m = position(group, out_outer_table, group >= 0, INDEX) * out_outer
            out_m += position(m, out_inner_table, m_there, INDEX) * out_inner
            total = tl.zeros((BLOCK_M, BLOCK_N), wide)
            low = total
            if ONE_K:
                x = tl.load(a + a_m[:, None] + a_k[None, :], mask=reads[:, None] & there[None, :], other=0.0)
                total, low = add_product(x, y, total, low, PRECISION)
            else:
                for from_k in range(0, terms, BLOCK_K):
                    k = from_k + tl.arange(0, BLOCK_K)
                    there = k < terms
                    a_k = position(k, a_column_table, there, INDEX) * a_column
                    b_k = b_group + position(k, b_inner_table, there, INDEX) * b_inner
                    x = tl.load(a + a_m[:, None] + a_k[None, :], mask=reads[:, None] & there[None, :], other=0.0)
                    y = tl.load(b + b_k[:, None] + b_n[None, :], mask=there[:, None] & n_there[None, :], other=0.0)
                    total, low = add_product(x, y, total, low, PRECISION)
            total = joined(total, low, PRECISION)
            if (a_outer_table is not None) if MODE == "rows" else (order is not None):
                total = tl.where(reads[:, None], total, 0.0)  # zero times NaN would be NaN
            if MODE == "rows" and DROPS == 2:
                total = tl.where(group < groups - 1, total, float("nan"))
            out_n = position(n, out_column_table, n_there, INDEX) * out_column
            tl.store(
                out + out_m[:, None] + out_n[None, :],
                total.to(out.dtype.element_ty),
                mask=m_there[:, None] & n_there[None, :],
            )


@triton.jit
def add_parts_kernel(  # type: ignore[no-untyped-def]
    parts, part_starts, out, out_outer_table, out_outer, out_inner_table, out_inner, out_column_table, out_column,
    size_m, size_n, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of each group that was cut, in order; the results of other groups are not touched."""
    elements = tl.cast(size_m, tl.int64) * size_n
    blocks = tl.cdiv(elements, BLOCK)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(part_starts + group), tl.load(part_starts + group + 1)
    if first == last:
        return
    there = at < elements
    total = tl.zeros((BLOCK,), parts.dtype.element_ty)
    for slot in range(first, last):
        total += tl.load(parts + slot * elements + at, mask=there, other=0.0)
    where = position(group, out_outer_table, group >= 0) * out_outer
    where += position(at // size_n, out_inner_table, there) * out_inner
    where += position(at % size_n, out_column_table, there) * out_column
    tl.store(out + where, total.to(out.dtype.element_ty), mask=there)
