"""Scores of queries against rows of a pool, and their gradients, on CUDA. The package states the contract.

    scores       s[r] = pool[x(r)] . query[q(r)]          a program for some keys of a query, or of some queries
    query        dq[q] = sum of g[r] pool[x(r)]           the keys of a query are neighbours
    pool         dp[m] = sum of g[r] query[q(r)]          keys sorted by the row that they name

Both gradients are sums of products of rows, `kernels/segment_sum`. Operands are read in any strides, and no row of the
pool is copied. The kernels never touch a row outside of the pool: a key out of range makes its results NaN.
Sums are formed in one order, so equal calls give equal bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from planner.kernels.grouping.keys import IndexArray
from planner.kernels.grouping.torch_grouping import accumulator, group_rows
from planner.kernels.grouping.triton_launch import launch
from planner.kernels.segment_sum.triton_sum import REGISTERS, Rows, Runs, quotient, row_places, sum_rows
from planner.kernels.tiled_product.triton_axes import Axis, packed
from planner.kernels.tiled_product.triton_product import pieces_of, position

# Bytes of the products that a program holds in float32, the most of them along the depth, and the most keys.
_TILE, _DEPTH, _KEYS = 8192, 128, 256


@triton.jit
def dots_kernel(  # type: ignore[no-untyped-def]  # noqa: D417
    x, x_table, x_size, x_row, x_batch, x_column_table, x_column,
    y, y_table, y_size, y_row, y_batch, y_column_table, y_column,
    out, queries, all_queries, keys, depth,
    NARROW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, ONE_D: tl.constexpr,
):  # fmt: skip
    """Multiply some queries with the rows that some of their keys name.

    Args:
        x: pointer to the queries, and how their rows and columns are read, as in `triton_sum.sum_kernel`. Rows are
            numbered in each batch entry.
        y: the same of the pool. The table holds the row of each key, `(all_queries, keys)`.
        out: pointer to the scores, `(all_queries, keys)`.
        queries: number of queries of a batch entry.
        all_queries: number of all queries.
        keys: number of keys of a query.
        depth: number of columns.
        NARROW: whether the numbers of queries have 32 bits.
        ONE_D: whether a tile covers the depth.
    """
    wide = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    tiles_k = pieces_of(keys, BLOCK_K)
    query = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    entry = quotient(query, queries, NARROW)
    k = (tl.program_id(0) % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    q_there = query < all_queries
    r = query[:, None] * keys + k[None, :]
    r_there = q_there[:, None] & (k >= 0)[None, :] & (k < keys)[None, :]  # the last tile may reach beyond 2^31
    y_r, there, bad = row_places(r, r_there, y_table, y_size, y_row, 1, 0)
    y_r += entry[:, None] * y_batch
    x_r, x_there, x_bad = row_places(query - entry * queries, q_there, x_table, x_size, x_row, 1, 0)
    x_r += entry * x_batch
    there, bad = there & x_there[:, None], bad | (r_there & x_bad[:, None])
    total = tl.zeros((BLOCK_Q, BLOCK_K, BLOCK_D), wide)
    for at in range(0, BLOCK_D if ONE_D else depth, BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        d_there = d < depth
        x_d = position(d, x_column_table, d_there) * x_column
        y_d = position(d, y_column_table, d_there) * y_column
        left = tl.load(x + x_r[:, None] + x_d[None, :], mask=x_there[:, None] & d_there[None, :], other=0.0)
        inside = there[:, :, None] & d_there[None, None, :]
        right = tl.load(y + y_r[:, :, None] + y_d[None, None, :], mask=inside, other=0.0)
        total += left.to(wide)[:, None, :] * right.to(wide)
    # The query of a key that names no row may be NaN.
    dots = tl.where(there, tl.sum(total, 2), tl.where(bad, float("nan"), 0.0))
    tl.store(out + r, dots.to(out.dtype.element_ty), mask=r_there)


def dot_rows(x: Rows, y: Rows, out: Tensor, sizes: tuple[int, int, int, int]) -> None:
    """Write the dot products of queries with the rows that their keys name.

    Args:
        x: the queries, numbered in each batch entry.
        y: the pool. Its table has the row of each key, `(b, q, k)`.
        out: the result `(b, q, k)`, contiguous.
        sizes: sizes of b, q, k and of the depth.
    """
    b, q, k, depth = sizes
    if not b * q * k:
        return
    block_d = min(_DEPTH, triton.next_power_of_2(max(1, depth)))
    most = max(1, min(_KEYS, _TILE // (accumulator(out.dtype).itemsize * block_d)))
    block_k = min(most, triton.next_power_of_2(k))
    block_q = min(most // block_k, triton.next_power_of_2(b * q))
    programs = triton.cdiv(b * q, block_q) * triton.cdiv(k, block_k)
    arguments: list[Any] = []
    for rows in (x, y):
        arguments += [rows.x, packed(rows.table), rows.size, rows.row, rows.batch, *rows.column.flat]
    launch(
        dots_kernel, programs, [*arguments, out, q, b * q, k, depth], NARROW=b * q < 2**31,
        BLOCK_Q=block_q, BLOCK_K=block_k, BLOCK_D=block_d, ONE_D=depth <= block_d, num_warps=4, **REGISTERS,
    )  # fmt: skip


def scores(query: Tensor, pool: Tensor, keys: IndexArray) -> Tensor:
    """Return the scores `(B, Q, K)` of queries `(B, Q, D)` against a pool `(B, M, D)`."""
    (b, q, d), k, query = query.shape, keys.values.shape[2], query.resolve_neg()
    out = query.new_empty((b, q, k))
    queries = Rows(query, Axis(query.stride(2)), query.stride(1), batch=query.stride(0))
    dot_rows(queries, _pool_rows(pool, keys), out, (b, q, k, d))
    return out


def query_gradient(g: Tensor, pool: Tensor, keys: IndexArray) -> Tensor:
    """Return the gradient of the query `(B, Q, D)`, from that of the scores `(B, Q, K)`."""
    (b, q, k), d = keys.values.shape, pool.shape[2]
    out = g.new_empty((b, q, d))
    runs = Runs(b * q * k, q, batches=b, inner=k)
    sum_rows(_per_key(g, q), Rows(out, Axis(1), d), d, runs, _pool_rows(pool, keys))
    return out


def pool_gradient(g: Tensor, query: Tensor, keys: IndexArray, size: int) -> Tensor:
    """Return the gradient of the pool `(B, size, D)`, from that of the scores `(B, Q, K)`."""
    (b, q, k), d = keys.values.shape, query.shape[2]
    out = g.new_empty((b, size, d))
    groups = group_rows(keys.part(keys.values).reshape(-1), size) if keys.groups is None else keys.groups()
    runs = Runs(b * q * k, size, groups, b, inner=max(1, k))
    sum_rows(_per_key(g, q), Rows(out, Axis(1), d), d, runs, _per_key(query.unsqueeze(2), q))
    return out


def gradients(g: Tensor, query: Tensor, pool: Tensor, keys: IndexArray) -> tuple[Tensor, Tensor]:
    """Return both gradients, of the query and of the pool."""
    keys = IndexArray(keys.part(keys.values), may_drop=keys.may_drop, groups=keys.groups)  # brought into range once
    return query_gradient(g, pool, keys), pool_gradient(g, query, keys, pool.shape[1])


def _pool_rows(pool: Tensor, keys: IndexArray) -> Rows:
    """Return the rows of the pool that the keys name."""
    pool, named = pool.resolve_neg(), keys.part(keys.values).reshape(-1)
    return Rows(pool, Axis(pool.stride(2)), pool.stride(1), batch=pool.stride(0), table=named, size=pool.shape[1])


def _per_key(x: Tensor, queries: int) -> Rows:
    """Return a tensor `(B, Q, K)` or `(B, Q, 1, D)` as one row per key, of one column or D."""
    x = x.resolve_neg()
    of_entry, row, inner, column = (*x.stride(), 0) if x.dim() == 3 else (*x.stride()[:2], 0, x.stride(3))
    # Rows are numbered through all entries of the batch.
    return Rows(x, Axis(column), row, inner, of_entry - queries * row)
