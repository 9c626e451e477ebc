"""Scores of queries against rows of a pool, and their gradients, on CUDA. The package states the contract.

The kernel is that of grouped products (`kernels/tiled_product`): each key is a row r, each query q(r) a group.

    scores       s[r] = pool[x(r)] . query[q(r)]          mode "rows": each query is a matrix (D, 1)
    query        dq[q] = sum of g[r] pool[x(r)]           mode "terms": the keys of a query are neighbours
    pool         dp[m] = sum of g[r] query[q(r)]          mode "terms": keys sorted by the row that they name

Only the range check of an index that is not prepared waits for the device. No row of the pool is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planner.kernels.grouped_matmul.triton_grouped import rows_product, terms_product
from planner.kernels.grouping.keys import IndexArray
from planner.kernels.grouping.torch_grouping import group_rows
from planner.kernels.tiled_product.triton_axes import Axis, Grouping, Matrices

__all__ = ["gradients", "pool_gradient", "query_gradient", "scores"]


def scores(query: Tensor, pool: Tensor, keys: IndexArray, tiling: str = "") -> Tensor:
    """Return the scores `(B, Q, K)` of queries `(B, Q, D)` against a pool `(B, M, D)`.

    Here and below, `tiling` is as in `planner.kernels.tiled_product.triton_tiles.tiles_of`.
    """
    (b, q, d), k = query.shape, keys.values.shape[2]
    out, query = query.new_empty((b, q, k)), query.resolve_neg()
    rows_product(
        _pool_rows(pool, keys),
        Matrices(query, Axis(query.stride(1)), Axis(query.stride(2)), Axis(0), query.stride(0)),
        Matrices(out, Axis(1), Axis(0), Axis(0)),
        (b * q * k, 1, 1, d),
        _keys_of_queries(keys),
        tiling=tiling,
    )
    return out


def query_gradient(g: Tensor, pool: Tensor, keys: IndexArray, tiling: str = "") -> Tensor:
    """Return the gradient of the query `(B, Q, D)`, from that of the scores `(B, Q, K)`."""
    (b, q, k), d = keys.values.shape, pool.shape[2]
    out = g.new_empty((b, q, d))
    terms_product(
        _weights(g),
        _pool_rows(pool, keys),
        Matrices(out, Axis(d), Axis(0), Axis(1)),
        (b * q * k, 1, 1, d),
        _keys_of_queries(keys),
        tiling,
    )
    return out


def pool_gradient(g: Tensor, query: Tensor, keys: IndexArray, size: int, tiling: str = "") -> Tensor:
    """Return the gradient of the pool `(B, size, D)`, from that of the scores `(B, Q, K)`."""
    (b, q, k), d = keys.values.shape, query.shape[2]
    out = g.new_empty((b, size, d))
    named_rows = _named_rows(keys, size)
    entries = torch.arange(b, device=named_rows.device).view(-1, 1, 1)
    # A key that names no row belongs to the group behind the last.
    group_of_key = torch.where(named_rows < 0, b * size, named_rows + entries * size)
    groups = group_rows(group_of_key.reshape(-1), b * size)
    query = query.resolve_neg()
    queries = torch.arange(q, device=named_rows.device).view(1, -1, 1)
    query_positions = (entries * query.stride(0) + queries * query.stride(1)).expand(b, q, k).reshape(-1)
    terms_product(
        _weights(g),
        Matrices(query, Axis(1, query_positions), Axis(0), Axis(query.stride(2))),
        Matrices(out, Axis(d), Axis(0), Axis(1)),
        (b * q * k, 1, 1, d),
        Grouping(groups.order, groups.offsets, b * size),
        tiling,
    )
    return out


def gradients(g: Tensor, query: Tensor, pool: Tensor, keys: IndexArray, tiling: str = "") -> tuple[Tensor, Tensor]:
    """Return both gradients, of the query and of the pool."""
    keys = IndexArray(keys.part(keys.values), may_drop=keys.may_drop)  # brought into range once
    return query_gradient(g, pool, keys, tiling), pool_gradient(g, query, keys, pool.shape[1], tiling)


def _weights(g: Tensor) -> Matrices:
    return Matrices(g.resolve_neg().reshape(-1), Axis(1), Axis(0), Axis(0))


def _pool_rows(pool: Tensor, keys: IndexArray) -> Matrices:
    """Return the rows of the pool that the keys name, as the kernel addresses them."""
    pool = pool.resolve_neg()
    rows = _named_rows(keys, pool.shape[1]).reshape(-1)
    return Matrices(pool, Axis(pool.stride(1), rows), Axis(0), Axis(pool.stride(2)), pool.stride(0))


def _named_rows(keys: IndexArray, size: int) -> Tensor:
    """Return the row that each key names, -1 for a dropped key."""
    rows = keys.part(keys.values).long()
    return torch.where(rows == size, -1, rows) if keys.may_drop else rows


def _keys_of_queries(keys: IndexArray) -> Grouping:
    """Return the groups if each query is a group of its keys, which are neighbours."""
    b, q, k = keys.values.shape
    return Grouping(None, torch.arange(b * q + 1, device=keys.values.device).mul_(k), b * q, max(1, q))
