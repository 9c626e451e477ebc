"""Scores of a query against some rows of a pool, `b q d, b index[b q k] d -> b q k`, and both gradients.

Two ways with the same arguments, results and gradients:

- *pooled*: every row of the pool is contracted, `query @ pool^T` in a buffer, then the asked scores are taken. The
  work does not depend on K, and runs at the speed of a matrix product.
- *gathered*: the asked rows of the pool are fetched into a buffer, then contracted. The work grows with K. Gradients
  are weighted sums of rows, and in float32 and float64 `embedding_bag` adds up rows where they lie: those of the pool
  that a query asked for, or, after sorting, those of the queries that asked for a row.

Either walks blocks of queries through buffers that are used again, and neither builds `pool[index]`. In all functions
B, Q, D, M and K are the sizes of batch, queries, features, pool and asked rows. Any strides; half types are summed in
float32; duplicates in an index add up, in order. An index of M is dropped: its score is 0 and it sends no gradient.
An `IndexArray` says how the index is read. As the caller gave it, it is brought into range, and checked, by the pooled
way only in blocks that torch refuses: torch reads and writes nothing out of bounds. That saves a look at all of
it, which takes as long as the scores themselves when there are many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from planner.kernels.grouping.keys import IndexArray
from planner.kernels.grouping.torch_grouping import accumulator, group_rows

Place = tuple[slice, slice]
Function = Literal["scores", "query_gradient", "pool_gradient", "gradients"]

# What `embedding_bag` adds up exactly as a product would.
BAGGED = (torch.float32, torch.float64)

# Bytes of the dense scores of a block, and of the fetched rows of a block. Fetched blocks of 1 MiB take up to twice the
# time. Dense ones hold several entries of the batch, which is multiplied as one: each product and each take waits until
# the slowest core is done (1000 keys of 8,000 queries: 19.4 ms; 26.5 ms in blocks of 4 MiB; 2 cores of an Intel Xeon at
# 2.8 GHz, torch 2.13, 2026-11-21).
DENSE_BYTES = 16 << 20
FETCHED_BYTES = 4 << 20
# Bytes that a block allocates to sort its index, and of these for each element: itself, its group and what sorting
# needs. Small sorts are slow: there 30,000 integers took 3.4 ms, 240,000 took 4.4 ms.
SORTED_BYTES = 16 << 20
SORTED_ROW_BYTES = 56
# Elements of an index that are copied at a time, where they are narrow or have to be brought into range.
COPIED_KEYS = 1 << 16
# Rows of dense scores start at multiples of this many elements; the columns past M take what is dropped.
ALIGN = 16


def pooled_scores(query: Tensor, pool: Tensor, keys: IndexArray, share: int = 1) -> Tensor:
    """Scores by contracting the whole pool.

    Args:
        query: `(B, Q, D)`.
        pool: `(B, M, D)`.
        keys: `(B, Q, K)` integers.
        share: the buffer has one share of its usual bytes, of as many as this.

    Returns:
        `(B, Q, K)`.
    """
    query, pool = query.resolve_conj(), pool.resolve_conj()
    out = query.new_empty(keys.values.shape)
    if not out.numel():
        return out
    m = pool.shape[1]
    buffer, blocks = _dense(keys, m, query.dtype, share)
    for b, q in blocks:
        scores = _block(buffer, b, q)
        scores[..., m:].zero_()
        _product(query[b, q], pool[b].transpose(1, 2), scores[..., :m])

        def take(at: Place, chosen: Tensor, scores: Tensor = scores, into: Tensor = out[b, q]) -> None:
            if into.dtype == scores.dtype:
                torch.gather(scores[at], 2, chosen, out=into[at])
            else:
                into[at].copy_(scores[at].gather(2, chosen))

        _at(take, keys, b, q)
    return out


def pooled_query_gradient(g: Tensor, pool: Tensor, keys: IndexArray, share: int = 1) -> Tensor:
    """The gradient of the query by dense weights: `(B, Q, K)`, `(B, M, D)`, `(B, Q, K)` to `(B, Q, D)`."""
    if not finite(pool):
        return gathered_query_gradient(g, pool, keys)
    out = pool.new_zeros((*keys.values.shape[:2], pool.shape[2]))
    for b, q, weights in _weights(g, keys, pool.shape[1], share):
        _product(weights, pool[b].conj(), out[b, q])
    return out


def pooled_pool_gradient(g: Tensor, query: Tensor, keys: IndexArray, size: int, share: int = 1) -> Tensor:
    """The gradient of a pool by dense weights: `(B, Q, K)`, `(B, Q, D)`, `(B, Q, K)` to `(B, size, D)`."""
    if not finite(query):
        return gathered_pool_gradient(g, query, keys, size)
    out = query.new_zeros((query.shape[0], size, query.shape[2]), dtype=accumulator(query.dtype))
    for b, q, weights in _weights(g, keys, size, share):
        _product(weights.transpose(1, 2), query[b, q].conj(), out[b], add=q.start > 0)
    return out.to(query.dtype)


def pooled_gradients(g: Tensor, query: Tensor, pool: Tensor, keys: IndexArray, share: int = 1) -> tuple[Tensor, Tensor]:
    """Both gradients, from dense weights that are scattered once; the gathered way where an operand is not finite.

        s[q, k] = query[q] . pool[x(q, k)]   gives, with W[q, m] = sum of g[q, k] over the k with x(q, k) = m,
        dquery = W @ conj(pool),   dpool = W^T @ conj(query)

    Args:
        g: `(B, Q, K)`, the gradient of the scores.
        query: `(B, Q, D)`.
        pool: `(B, M, D)`.
        keys: `(B, Q, K)` integers.
        share: as in `pooled_scores`.

    Returns:
        `(B, Q, D)` and `(B, M, D)`.
    """
    if not (finite(query) and finite(pool)):
        return gathered_gradients(g, query, pool, keys)
    grad_query = query.new_zeros(query.shape)
    grad_pool = pool.new_zeros(pool.shape, dtype=accumulator(pool.dtype))
    for b, q, weights in _weights(g, keys, pool.shape[1], share):
        _product(weights, pool[b].conj(), grad_query[b, q])
        _product(weights.transpose(1, 2), query[b, q].conj(), grad_pool[b], add=q.start > 0)
    return grad_query, grad_pool.to(pool.dtype)


def gathered_scores(query: Tensor, pool: Tensor, keys: IndexArray) -> Tensor:
    """Scores by fetching the asked rows; arguments and result as in `pooled_scores`."""
    query, pool = query.resolve_conj(), pool.resolve_conj()
    out = query.new_zeros(keys.values.shape)
    for b, q, rows in _fetched(pool, keys):
        # A row times many columns runs several times as fast as many rows times a column.
        scores = torch.bmm(query[b, q].to(rows.dtype).reshape(-1, 1, rows.shape[3]), rows.flatten(0, 1).transpose(1, 2))
        out[b, q].copy_(scores.view(rows.shape[:3]))
        del scores
    return out


def gathered_query_gradient(g: Tensor, pool: Tensor, keys: IndexArray) -> Tensor:
    """The gradient of the query from the asked rows; arguments and result as in `pooled_query_gradient`."""
    g, pool = g.resolve_conj(), pool.resolve_conj()
    out = pool.new_zeros((*keys.values.shape[:2], pool.shape[2]))
    if _bagged(pool, keys):
        k = keys.values.shape[2]
        for b, q, table, chosen, _ in _rows(pool, keys, False, _bag_bytes(k, pool.shape[2], pool.dtype)):
            weights = g[b, q].reshape(-1, k)
            sums = embedding_bag(chosen.reshape(-1, k), table, per_sample_weights=weights, mode="sum")
            out[b, q].copy_(sums.view(out[b, q].shape))
            del chosen, weights, sums
        return out
    for b, q, rows in _fetched(pool, keys):
        sums = torch.bmm(g[b, q].to(rows.dtype).reshape(-1, 1, rows.shape[2]), rows.flatten(0, 1).conj())
        out[b, q].copy_(sums.view(out[b, q].shape))
        del sums
    return out


def gathered_pool_gradient(g: Tensor, query: Tensor, keys: IndexArray, size: int) -> Tensor:
    """The gradient of a pool by adding a row for each asked score; as `pooled_pool_gradient`."""
    g, query = g.resolve_conj(), query.resolve_conj()
    batch, queries, k = keys.values.shape
    d, wide = query.shape[2], accumulator(query.dtype)
    out = torch.zeros((batch, size, d), dtype=wide, device="cpu")
    if _nothing(keys, size, d):
        return out.to(query.dtype)
    if sorts(queries, k, size, query.dtype):
        for b, q in _blocks(batch, queries, k * SORTED_ROW_BYTES, SORTED_BYTES):
            _add_sorted(out[b], g[b, q], query[b, q], _chosen(keys, keys.values[b, q]))
        return out
    flat = out.view(batch * size, d)
    first = torch.arange(batch, device="cpu")[:, None, None] * size
    sizes = batch, queries, k * d * wide.itemsize, FETCHED_BYTES
    buffer = torch.empty(_queries(*sizes) * k * d, dtype=wide, device="cpu")
    for b, q in _blocks(*sizes):
        chosen = _chosen(keys, keys.values[b, q])
        terms = _shaped(buffer, (*chosen.shape, d))
        torch.mul(g[b, q, :, None].to(wide), query[b, q, None, :].conj().to(wide), out=terms)
        rows, terms = (chosen + first[b]).reshape(-1), terms.view(-1, d)
        dropped = (chosen == size).reshape(-1).nonzero().view(-1) if keys.may_drop else None
        if dropped is not None and len(dropped):  # They add zero somewhere.
            rows.index_fill_(0, dropped, 0)
            terms.index_fill_(0, dropped, 0)
        flat.index_add_(0, rows, terms)
    return out.to(query.dtype)


def _add_sorted(out: Tensor, g: Tensor, query: Tensor, chosen: Tensor) -> None:
    """Add to each row of `out`, `(B, M, D)`, the queries that asked for it, times their gradients."""
    b, m, d = out.shape
    # The entries' rows stand one after the other; what is dropped belongs to none of them.
    keys = torch.where(chosen == m, b * m, chosen + m * torch.arange(b, device="cpu")[:, None, None])
    groups = group_rows(keys.reshape(-1), b * m)
    del keys
    order = groups.order[: groups.offsets[-1]]
    weights = g.reshape(-1)[order]
    sums = embedding_bag(
        order.div_(g.shape[2], rounding_mode="floor"),
        query.reshape(-1, d),
        groups.offsets[:-1],
        per_sample_weights=weights,
        mode="sum",
    )
    out += sums.view(out.shape)


def gathered_gradients(g: Tensor, query: Tensor, pool: Tensor, keys: IndexArray) -> tuple[Tensor, Tensor]:
    """Both gradients by fetched rows; arguments and results as in `pooled_gradients`."""
    return gathered_query_gradient(g, pool, keys), gathered_pool_gradient(g, query, keys, pool.shape[1])


def pooled_scratch_bytes(
    batch: int,
    queries: int,
    pool: int,
    size_d: int,
    keys: int,
    dtype: torch.dtype,
    index_itemsize: int = 8,
    share: int = 1,
) -> int:
    """Upper bound of what each `pooled_*` function allocates beside its results."""
    wide = accumulator(dtype).itemsize
    row = (pool // ALIGN + 1) * ALIGN * wide
    count = _queries(batch, queries, row, DENSE_BYTES // share)
    copied = 0 if index_itemsize == 8 else 8 * min(count * keys, max(COPIED_KEYS, keys))
    needed = count * row + copied + 2048
    if accumulator(dtype) != dtype:
        entries = -(-count // max(1, queries))
        needed += wide * (count * keys + 2 * (count + entries * pool) * size_d + batch * pool * size_d)
    return needed


def gathered_scratch_bytes(
    what: Function,
    batch: int,
    queries: int,
    pool: int,
    size_d: int,
    keys: int,
    dtype: torch.dtype,
    index_itemsize: int = 8,
) -> int:
    """Upper bound of what the function `gathered_` and that name allocates beside its results."""
    if what == "gradients":
        sizes = batch, queries, pool, size_d, keys, dtype, index_itemsize
        return max(gathered_scratch_bytes(one, *sizes) for one in ("query_gradient", "pool_gradient"))
    wide = accumulator(dtype).itemsize
    if what == "pool_gradient" and sorts(queries, keys, pool, dtype):
        count = _queries(batch, queries, SORTED_ROW_BYTES * keys, SORTED_BYTES)
        groups = -(-count // max(1, queries)) * pool
        return count * (keys * (SORTED_ROW_BYTES + wide) + size_d * wide) + groups * (32 + size_d * wide) + 2048
    count = _queries(batch, queries, keys * size_d * wide, FETCHED_BYTES)
    chosen = count * keys
    # The rows, their scores, and their numbers: from the index, moved to the batch's place, and those dropped.
    needed = chosen * size_d * wide + count * max(keys, size_d) * wide + 8 * chosen * (2 + (index_itemsize != 8)) + 2048
    if accumulator(dtype) != dtype:
        needed += chosen * size_d * dtype.itemsize + wide * (count * (size_d + keys) + batch * pool * size_d)
    if what == "query_gradient" and dtype in BAGGED:  # Which way it goes depends on the pool's strides too.
        count = _queries(batch, queries, _bag_bytes(keys, size_d, dtype), FETCHED_BYTES)
        needed = max(needed, count * (keys * (16 + 8 * (index_itemsize != 8)) + 40 + size_d * wide) + 2048)
    return needed


def _cut(batch: int, queries: int, bytes_each: int, limit: int) -> tuple[int, int]:
    """How many entries of the batch a block has within a limit of bytes, and in how many parts their queries come."""
    most = max(1, limit // max(1, bytes_each))
    if most >= queries:
        return max(1, min(batch, most // max(1, queries))), 1
    return 1, -(-queries // most)


def _queries(batch: int, queries: int, bytes_each: int, limit: int) -> int:
    """The most queries that a block has."""
    entries, parts = _cut(batch, queries, bytes_each, limit)
    return entries * -(-queries // parts)


def _blocks(batch: int, queries: int, bytes_each: int, limit: int) -> Iterator[Place]:
    """The blocks: slices of batch and queries within a limit of bytes."""
    entries, parts = _cut(batch, queries, bytes_each, limit)
    for b in range(0, batch, entries):
        for part in range(parts):
            yield slice(b, min(b + entries, batch)), slice(queries * part // parts, queries * (part + 1) // parts)


def _dense(keys: IndexArray, m: int, dtype: torch.dtype, share: int) -> tuple[Tensor, Iterator[Place]]:
    """A buffer `(queries, M or more)` for the dense scores of a block, and the blocks.

    Only a marked index may reach past the pool; without columns there, entries of the batch lie as torch multiplies
    them all at once.
    """
    columns = (m // ALIGN + 1) * ALIGN
    batch, queries, _ = keys.values.shape
    sizes = batch, queries, columns * accumulator(dtype).itemsize, DENSE_BYTES // share
    shape = _queries(*sizes), columns if keys.may_drop else m
    return torch.empty(shape, dtype=accumulator(dtype), device="cpu"), _blocks(*sizes)


def _block(buffer: Tensor, b: slice, q: slice) -> Tensor:
    shape = (b.stop - b.start, q.stop - q.start)
    return buffer[: prod(shape)].unflatten(0, shape)


def _nothing(keys: IndexArray, *sizes: int) -> bool:
    """Whether there is nothing to read or write; the index is checked all the same."""
    if keys.values.numel() and all(sizes):
        return False
    keys.part(keys.values)
    return True


def _at(act: Callable[[Place, Tensor], None], keys: IndexArray, b: slice, q: slice) -> None:
    """Read or write at a block of an index: at once, or, where torch refuses or cannot read it, piece by piece."""
    block = keys.values[b, q]
    if block.dtype == torch.int64:
        with suppress(RuntimeError) if keys.normal is not None else nullcontext():
            act((slice(None), slice(None)), block)
            return
    step = max(1, COPIED_KEYS // max(1, block.shape[2]))
    for entry in range(block.shape[0]):
        for low in range(0, block.shape[1], step):
            at = slice(entry, entry + 1), slice(low, low + step)
            act(at, _chosen(keys, block[at]))


def finite(x: Tensor) -> bool:
    """Whether a sum is finite, as none with NaN or infinity is: zero times these is NaN, where nothing was asked for.

    One that overflows, as in float16 it may, counts as not finite.
    """
    return not (x.is_floating_point() or x.is_complex()) or bool(x.sum().isfinite())


def _weights(g: Tensor, keys: IndexArray, m: int, share: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """The dense weights `W[b, q, m]` of each block: the gradients of the scores, added up where their index is m."""
    if _nothing(keys, m):
        return
    g = g.resolve_conj()
    buffer, blocks = _dense(keys, m, g.dtype, share)
    for b, q in blocks:
        weights, terms = _block(buffer, b, q), g[b, q].to(buffer.dtype)

        def add(at: Place, chosen: Tensor, weights: Tensor = weights, terms: Tensor = terms) -> None:
            weights[at].zero_().scatter_add_(2, chosen, terms[at])

        _at(add, keys, b, q)
        yield b, q, weights[..., :m]


def _bagged(pool: Tensor, keys: IndexArray) -> bool:
    """Whether rows of the pool can be added up where they lie: one after the other, and none is dropped."""
    if pool.dtype not in BAGGED or pool.stride()[1:] != (pool.shape[2], 1):
        return False
    return not (keys.may_drop and keys.values.numel() and int(keys.values.max()) == pool.shape[1])


def _bag_bytes(keys: int, size_d: int, dtype: torch.dtype) -> int:
    """Bytes of a query's row numbers or of its sum, whichever are more."""
    return max(8 * keys, size_d * dtype.itemsize)


def sorts(queries: int, keys: int, size: int, dtype: torch.dtype) -> bool:
    """Whether the pool's gradient is summed after sorting: for few rows of a large pool it is not worth it."""
    return dtype in BAGGED and queries * keys >= size


def _rows(
    pool: Tensor, keys: IndexArray, may_drop: bool, bytes_each: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor | None]]:
    """Blocks of the index as row numbers of a table, and which of them are dropped, if some are."""
    batch, m, d = pool.shape
    if _nothing(keys, m, d):
        return
    shared, joined = pool.stride(0) == 0, pool.stride(0) == m * pool.stride(1)
    table = pool[0] if shared or not joined else pool.view(batch * m, d)
    blocks = _blocks(batch, keys.values.shape[1], bytes_each, FETCHED_BYTES)
    if not (shared or joined):
        blocks = ((slice(i, i + 1), q) for b, q in blocks for i in range(b.start, b.stop))
    for b, q in blocks:
        chosen, dropped = _chosen(keys, keys.values[b, q]), None
        if may_drop:
            dropped = (chosen == m).reshape(-1).nonzero().reshape(-1)
            chosen = chosen.clamp(max=m - 1) if len(dropped) else chosen
        if joined and not shared:
            chosen = chosen + torch.arange(b.start, b.stop, device="cpu")[:, None, None] * m
        elif not shared:
            table = pool[b.start]
        yield b, q, table, chosen, dropped
        del chosen, dropped  # before the next are made, as everywhere here


def _fetched(pool: Tensor, keys: IndexArray) -> Iterator[tuple[slice, slice, Tensor]]:
    """The asked rows `(B, Q, K, D)` of each block, zero where dropped."""
    (batch, _, d), wide, k = pool.shape, accumulator(pool.dtype), keys.values.shape[2]
    count = _queries(batch, keys.values.shape[1], k * d * wide.itemsize, FETCHED_BYTES)
    buffer = torch.empty(count * k * d, dtype=wide, device="cpu")
    for b, q, table, chosen, dropped in _rows(pool, keys, keys.may_drop, k * d * wide.itemsize):
        rows = _shaped(buffer, (chosen.numel(), d))
        if rows.dtype == table.dtype:
            torch.index_select(table, 0, chosen.reshape(-1), out=rows)
        else:
            rows.copy_(table.index_select(0, chosen.reshape(-1)))
        if dropped is not None:
            rows.index_fill_(0, dropped, 0)
        yield b, q, rows.view(*chosen.shape, d)
        del chosen, dropped


def _chosen(keys: IndexArray, part: Tensor) -> Tensor:
    chosen: Tensor = keys.part(part)
    return chosen.long()


def _product(x: Tensor, y: Tensor, out: Tensor, add: bool = False) -> None:
    """`x @ y`, batched, into (or added to) `out`; computed in the dtype that sums are kept in."""
    wide = accumulator(x.dtype) if x.dtype == y.dtype else torch.promote_types(x.dtype, y.dtype)
    x, y = x.to(wide), y.to(wide)
    if out.dtype != wide:
        out.copy_(x @ y)
    elif x.shape[0] == 1:
        torch.addmm(out[0], x[0], y[0], beta=int(add), out=out[0])
    else:
        torch.baddbmm(out, x, y, beta=int(add), out=out)


def _shaped(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: prod(shape)].view(shape)
