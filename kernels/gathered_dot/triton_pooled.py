"""Pooled dots and their gradients on CUDA, by the kernel of grouped products: keys are rows, queries are groups.

    scores       s[r] = pool[x(r)] . query[g]             "rows",  one matrix (D, 1) a query
    query        dq[g] = sum of s[r] pool[x(r)]           "terms", a query's keys stand together
    pool         dp[m] = sum of s[r] query[q(r)]          "terms", keys sorted by the row that they name

Arguments are those of `planner.kernels.gathered_dot.torch_pooled`. Nothing waits for the device but the range check of
an index that is not prepared, and no row of the pool is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planner.kernels.grouped_matmul.triton_grouped import rows_product, terms_product
from planner.kernels.grouping.keys import IndexArray
from planner.kernels.grouping.torch_grouping import group_rows
from planner.kernels.tiled_product.triton_axes import Axis, Matrices

__all__ = ["gradients", "pool_gradient", "query_gradient", "scores"]


def scores(query: Tensor, pool: Tensor, keys: IndexArray, tiling: str = "") -> Tensor:
    """Scores `(B, Q, K)` of queries `(B, Q, D)` against a pool `(B, M, D)`."""
    (b, q, d), k = query.shape, keys.values.shape[2]
    out, query = query.new_empty((b, q, k)), query.resolve_neg()
    rows_product(
        _pool_rows(pool, keys), Matrices(query, Axis(query.stride(1)), Axis(query.stride(2)), Axis(0), query.stride(0)),
        Matrices(out, Axis(1), Axis(0), Axis(0)), (b * q * k, 1, 1, d), None, _even(b * q, k, query), b * q,
        batch_groups=max(1, q), tiling=tiling,
    )  # fmt: skip
    return out


def query_gradient(g: Tensor, pool: Tensor, keys: IndexArray, tiling: str = "") -> Tensor:
    """The gradient of the query `(B, Q, D)`, of the scores' `(B, Q, K)`."""
    (b, q, k), d = keys.values.shape, pool.shape[2]
    out = g.new_empty((b, q, d))
    terms_product(
        _weights(g), _pool_rows(pool, keys), Matrices(out, Axis(d), Axis(0), Axis(1)), (b * q * k, 1, 1, d), None,
        _even(b * q, k, g), b * q, batch_groups=max(1, q), tiling=tiling,
    )  # fmt: skip
    return out


def pool_gradient(g: Tensor, query: Tensor, keys: IndexArray, size: int, tiling: str = "") -> Tensor:
    """The gradient of the pool `(B, size, D)`, of the scores' `(B, Q, K)`."""
    (b, q, k), d = keys.values.shape, query.shape[2]
    out = g.new_empty((b, size, d))
    x = _in_pool(keys, size)
    entries = torch.arange(b, device=x.device).view(-1, 1, 1)
    # A key that names no row belongs to the group behind the last.
    groups = group_rows(torch.where(x < 0, b * size, x + entries * size).reshape(-1), b * size)
    query = query.resolve_neg()
    queries = torch.arange(q, device=x.device).view(1, -1, 1)
    rows = (entries * query.stride(0) + queries * query.stride(1)).expand(b, q, k).reshape(-1)
    terms_product(
        _weights(g), Matrices(query, Axis(1, rows), Axis(0), Axis(query.stride(2))),
        Matrices(out, Axis(d), Axis(0), Axis(1)), (b * q * k, 1, 1, d), groups.order, groups.offsets, b * size,
        tiling=tiling,
    )  # fmt: skip
    return out


def gradients(g: Tensor, query: Tensor, pool: Tensor, keys: IndexArray, tiling: str = "") -> tuple[Tensor, Tensor]:
    """Both gradients, of the query and of the pool."""
    keys = IndexArray(keys.part(keys.values), may_drop=keys.may_drop)  # brought into range once
    return query_gradient(g, pool, keys, tiling), pool_gradient(g, query, keys, pool.shape[1], tiling)


def _weights(g: Tensor) -> Matrices:
    return Matrices(g.resolve_neg().reshape(-1), Axis(1), Axis(0), Axis(0))


def _pool_rows(pool: Tensor, keys: IndexArray) -> Matrices:
    """The row of the pool that each key names, entry by entry of the batch."""
    pool = pool.resolve_neg()
    x = _in_pool(keys, pool.shape[1]).reshape(-1)
    return Matrices(pool, Axis(pool.stride(1), x), Axis(0), Axis(pool.stride(2)), pool.stride(0))


def _in_pool(keys: IndexArray, size: int) -> Tensor:
    """Rows that the keys name, -1 for none."""
    x = keys.part(keys.values).long()
    return torch.where(x == size, -1, x) if keys.may_drop else x


def _even(groups: int, each: int, like: Tensor) -> Tensor:
    return torch.arange(groups + 1, device=like.device).mul_(each)
