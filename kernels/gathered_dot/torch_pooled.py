"""Scores of a query against some rows of a pool, `b q d, b index[b q k] d -> b q k`, and both gradients, on a CPU.

The package states the contract. Each function comes in two variants, with the same arguments and results:

- *pooled*: multiply the query with the whole pool, `query @ pool^T` in a buffer, then take the named scores. The work
  does not depend on K, and runs at the speed of a matrix product.
- *gathered*: fetch the named rows of the pool into a buffer, then multiply. The work grows with K. Gradients are
  weighted sums of rows. In float32 and float64 no rows are copied: `sampled_addmm` multiplies a query with the rows
  that it names, and `embedding_bag` adds up these rows, or, after sorting, the queries that name a row.

Both walk blocks of queries through buffers used again, and neither builds `pool[index]`. Duplicates add up in order.

The pooled variant hands the caller's index to torch unchecked. Torch refuses values out of bounds, and only blocks that
it refuses are brought into range and checked. That saves a pass over the index, as long as the scores themselves take.
"""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from planner.kernels.grouping.keys import IndexArray
from planner.kernels.grouping.torch_grouping import accumulator, group_rows

Place = tuple[slice, slice]
Function = Literal["scores", "query_gradient", "pool_gradient", "gradients"]
Sizes = tuple[int, int, int, int, int]  # B, Q, M, D and K

# The dtypes in which `embedding_bag` rounds as a matrix product does.
BAGGED = (torch.float32, torch.float64)

# Bytes of a block: of its dense scores, and of its fetched rows. Fetched blocks of 1 MiB take up to twice the time.
# Dense blocks hold several entries of the batch, multiplied in one call: each call waits for the slowest core (1000
# keys of 8,000 queries: 19.4 ms; 26.5 ms in blocks of 4 MiB; 2 cores of an Intel Xeon, torch 2.13, 2026-11-21).
DENSE_BYTES = 16 << 20
FETCHED_BYTES = 4 << 20
# Bytes that a block may allocate to sort its index, and how many of them each element takes: the element, its group and
# the sort's own arrays. Small sorts are slow: on the same machine 30,000 integers took 3.4 ms, 240,000 took 4.4 ms.
SORTED_BYTES = 16 << 20
SORTED_ROW_BYTES = 56
# Elements of an index that are copied at a time if they are narrow or must be brought into range.
COPIED_KEYS = 1 << 16
# Rows of dense scores start at multiples of this many elements. Dropped scores are written to the columns past M.
ALIGN = 16


def pooled_scores(query: Tensor, pool: Tensor, keys: IndexArray, share: int = 1) -> Tensor:
    """Return the scores `(B, Q, K)`, by multiplying with the whole pool.

    Args:
        query: `(B, Q, D)`.
        pool: `(B, M, D)`.
        keys: `(B, Q, K)` integers.
        share: divides the buffer's size: the buffer has `DENSE_BYTES // share` bytes.
    """
    query, pool = query.resolve_conj(), pool.resolve_conj()
    out = query.new_empty(keys.values.shape)
    if not out.numel():
        return out
    m = pool.shape[1]
    buffer, blocks = _dense_buffer(keys, m, query.dtype, share)
    for b, q in blocks:
        scores = _reshape(buffer, (b.stop - b.start, q.stop - q.start, *buffer.shape[1:]))
        scores[..., m:].zero_()
        _multiply(query[b, q], pool[b].transpose(1, 2), scores[..., :m])

        def take(at: Place, chosen: Tensor, scores: Tensor = scores, into: Tensor = out[b, q]) -> None:
            if into.dtype == scores.dtype:
                torch.gather(scores[at], 2, chosen, out=into[at])
            else:
                into[at].copy_(scores[at].gather(2, chosen))

        _act_on_block(take, keys, b, q)
    return out


def pooled_query_gradient(g: Tensor, pool: Tensor, keys: IndexArray, share: int = 1) -> Tensor:
    """Return the gradient of the query `(B, Q, D)`, from dense weights; arguments as in `pooled_gradients`."""
    if not sum_is_finite(pool):
        return gathered_query_gradient(g, pool, keys)
    out = pool.new_zeros((*keys.values.shape[:2], pool.shape[2]))
    for b, q, weights in _weights(g, keys, pool.shape[1], share):
        _multiply(weights, pool[b], out[b, q])
    return out


def pooled_pool_gradient(g: Tensor, query: Tensor, keys: IndexArray, size: int, share: int = 1) -> Tensor:
    """Return the gradient of a pool `(B, size, D)`, from dense weights; arguments as in `pooled_gradients`."""
    if not sum_is_finite(query):
        return gathered_pool_gradient(g, query, keys, size)
    out = query.new_zeros((query.shape[0], size, query.shape[2]), dtype=accumulator(query.dtype))
    for b, q, weights in _weights(g, keys, size, share):
        _multiply(weights.transpose(1, 2), query[b, q], out[b], add=q.start > 0)
    return out.to(query.dtype)


def pooled_gradients(g: Tensor, query: Tensor, pool: Tensor, keys: IndexArray, share: int = 1) -> tuple[Tensor, Tensor]:
    """Return both gradients, `(B, Q, D)` and `(B, M, D)`, from dense weights that are scattered once.

    With W[q, m] = sum of g[q, k] over the k with x(q, k) = m:

        dquery = W @ pool,   dpool = W^T @ query

    The products also read rows that no key names, with weight zero. If an operand is not finite, zero times it would be
    NaN, so the gathered variant runs instead.

    Args:
        g: `(B, Q, K)`, the gradient of the scores.
        query: `(B, Q, D)`.
        pool: `(B, M, D)`.
        keys: `(B, Q, K)` integers.
        share: as in `pooled_scores`.
    """
    if not (sum_is_finite(query) and sum_is_finite(pool)):
        return gathered_gradients(g, query, pool, keys)
    grad_query = query.new_zeros(query.shape)
    grad_pool = pool.new_zeros(pool.shape, dtype=accumulator(pool.dtype))
    for b, q, weights in _weights(g, keys, pool.shape[1], share):
        _multiply(weights, pool[b], grad_query[b, q])
        _multiply(weights.transpose(1, 2), query[b, q], grad_pool[b], add=q.start > 0)
    return grad_query, grad_pool.to(pool.dtype)


def gathered_scores(query: Tensor, pool: Tensor, keys: IndexArray) -> Tensor:
    """Return the scores, by fetching the named rows; arguments and result as in `pooled_scores`."""
    query, pool = query.resolve_conj(), pool.resolve_conj()
    out = query.new_zeros(keys.values.shape)
    k, d = keys.values.shape[2], pool.shape[2]
    # Torch makes no sparse matrix of more elements than it has places, and modes often cannot look into one.
    in_place = k <= pool.shape[1] and not torch._C._len_torch_dispatch_stack()
    if in_place and query.dtype == pool.dtype and _can_bag(pool, keys):
        for b, q, table, chosen, _ in _row_blocks(pool, keys, False, _bag_bytes(k, d, pool.dtype)):
            starts, into = torch.arange(0, chosen.numel() + 1, k, device="cpu"), out[b, q].view(-1)
            options = {"size": (len(starts) - 1, len(table)), "device": "cpu", "check_invariants": False}
            scores = _sparse()(starts, chosen.reshape(-1), into, **options)
            torch.sparse.sampled_addmm(scores, query[b, q].reshape(-1, d), table.t(), beta=0.0, out=scores)
            del chosen, starts, scores
        return out
    for b, q, rows in _fetch_rows(pool, keys):
        # One row times many columns runs several times as fast as many rows times one column.
        scores = torch.bmm(query[b, q].to(rows.dtype).reshape(-1, 1, rows.shape[3]), rows.flatten(0, 1).transpose(1, 2))
        out[b, q].copy_(scores.view(rows.shape[:3]))
        del scores
    return out


def gathered_query_gradient(g: Tensor, pool: Tensor, keys: IndexArray) -> Tensor:
    """Return the gradient of the query, from the named rows; arguments and result as in `pooled_query_gradient`."""
    g, pool = g.resolve_conj(), pool.resolve_conj()
    out = pool.new_zeros((*keys.values.shape[:2], pool.shape[2]))
    if _can_bag(pool, keys):
        k = keys.values.shape[2]
        for b, q, table, chosen, _ in _row_blocks(pool, keys, False, _bag_bytes(k, pool.shape[2], pool.dtype)):
            weights = g[b, q].reshape(-1, k)
            sums = embedding_bag(chosen.reshape(-1, k), table, per_sample_weights=weights, mode="sum")
            out[b, q].copy_(sums.view(out[b, q].shape))
            del chosen, weights, sums
        return out
    for b, q, rows in _fetch_rows(pool, keys):
        sums = torch.bmm(g[b, q].to(rows.dtype).reshape(-1, 1, rows.shape[2]), rows.flatten(0, 1))
        out[b, q].copy_(sums.view(out[b, q].shape))
        del sums
    return out


def gathered_pool_gradient(g: Tensor, query: Tensor, keys: IndexArray, size: int) -> Tensor:
    """Return the gradient of a pool, by adding one row per score; arguments and result as in `pooled_pool_gradient`."""
    g, query = g.resolve_conj(), query.resolve_conj()
    batch, queries, k = keys.values.shape
    d, wide = query.shape[2], accumulator(query.dtype)
    out = torch.zeros((batch, size, d), dtype=wide, device="cpu")
    if _is_empty(keys, size, d):
        return out.to(query.dtype)
    if sorts(queries, k, size, query.dtype):
        for b, q in _blocks(batch, queries, k * SORTED_ROW_BYTES, SORTED_BYTES):
            _add_sorted(out[b], g[b, q], query[b, q], _in_range(keys, keys.values[b, q]))
        return out
    flat = out.view(batch * size, d)
    first = torch.arange(batch, device="cpu")[:, None, None] * size
    sizes = batch, queries, k * d * wide.itemsize, FETCHED_BYTES
    buffer = torch.empty(_queries(*sizes) * k * d, dtype=wide, device="cpu")
    for b, q in _blocks(*sizes):
        chosen = _in_range(keys, keys.values[b, q])
        terms = _reshape(buffer, (*chosen.shape, d))
        torch.mul(g[b, q, :, None].to(wide), query[b, q, None, :].to(wide), out=terms)
        rows, terms = (chosen + first[b]).reshape(-1), terms.view(-1, d)
        dropped = (chosen == size).reshape(-1).nonzero().view(-1) if keys.may_drop else None
        if dropped is not None and len(dropped):  # Dropped entries add zeros to row 0.
            rows.index_fill_(0, dropped, 0)
            terms.index_fill_(0, dropped, 0)
        flat.index_add_(0, rows, terms)
    return out.to(query.dtype)


def _add_sorted(out: Tensor, g: Tensor, query: Tensor, chosen: Tensor) -> None:
    """Add to each row of `out`, `(B, M, D)`, the queries that name it, times their gradients."""
    b, m, d = out.shape
    # The batch entries' rows are numbered one after the other; the number behind the last stands for dropped entries.
    keys = torch.where(chosen == m, b * m, chosen + m * torch.arange(b, device="cpu")[:, None, None])
    groups = group_rows(keys.reshape(-1), b * m)
    del keys
    order = groups.row_numbers[: groups.offsets[-1]]
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
    """Return both gradients, from fetched rows; arguments and results as in `pooled_gradients`."""
    return gathered_query_gradient(g, pool, keys), gathered_pool_gradient(g, query, keys, pool.shape[1])


def pooled_scratch_bytes(sizes: Sizes, dtype: torch.dtype, index_itemsize: int = 8, share: int = 1) -> int:
    """Upper bound of the bytes that each `pooled_*` function allocates beside its results."""
    batch, queries, pool, size_d, keys = sizes
    wide = accumulator(dtype).itemsize
    row = (pool // ALIGN + 1) * ALIGN * wide
    count = _queries(batch, queries, row, DENSE_BYTES // share)
    copied = 0 if index_itemsize == 8 else 8 * min(count * keys, max(COPIED_KEYS, keys))
    needed = count * row + copied + 2048
    if accumulator(dtype) != dtype:
        entries = -(-count // max(1, queries))
        needed += wide * (count * keys + 2 * (count + entries * pool) * size_d + batch * pool * size_d)
    return needed


def sampled_scratch_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """The same of `gathered_scores` that reads rows where they lie, of int64 keys none of which is dropped."""
    batch, queries, pool, size_d, keys = sizes
    if dtype not in BAGGED or keys > pool:
        return gathered_scratch_bytes("scores", sizes, dtype)
    count = _queries(batch, queries, _bag_bytes(keys, size_d, dtype), FETCHED_BYTES)
    return count * (8 * keys * (batch > 1) + 8) + 2048


def gathered_scratch_bytes(what: Function, sizes: Sizes, dtype: torch.dtype, index_itemsize: int = 8) -> int:
    """Upper bound of the bytes that the function `gathered_` + `what` allocates beside its results."""
    if what == "gradients":
        return max(
            gathered_scratch_bytes("query_gradient", sizes, dtype, index_itemsize),
            gathered_scratch_bytes("pool_gradient", sizes, dtype, index_itemsize),
        )
    batch, queries, pool, size_d, keys = sizes
    wide = accumulator(dtype).itemsize
    if what == "pool_gradient" and sorts(queries, keys, pool, dtype):
        count = _queries(batch, queries, SORTED_ROW_BYTES * keys, SORTED_BYTES)
        groups = -(-count // max(1, queries)) * pool
        return count * (keys * (SORTED_ROW_BYTES + wide) + size_d * wide) + groups * (32 + size_d * wide) + 2048
    count = _queries(batch, queries, keys * size_d * wide, FETCHED_BYTES)
    chosen = count * keys
    # The rows, their scores, and their row numbers: taken from the index, offset by the batch entry, and the dropped.
    needed = chosen * size_d * wide + count * max(keys, size_d) * wide + 8 * chosen * (2 + (index_itemsize != 8)) + 2048
    if accumulator(dtype) != dtype:
        needed += chosen * size_d * dtype.itemsize + wide * (count * (size_d + keys) + batch * pool * size_d)
    if what != "pool_gradient" and dtype in BAGGED:  # The pool's strides decide whether rows are read or fetched.
        count = _queries(batch, queries, _bag_bytes(keys, size_d, dtype), FETCHED_BYTES)
        needed = max(needed, count * (keys * (16 + 8 * (index_itemsize != 8)) + 40 + size_d * wide) + 2048)
    return needed


def _block_shape(batch: int, queries: int, bytes_each: int, limit: int) -> tuple[int, int]:
    """Return how many batch entries a block of `limit` bytes holds, and into how many parts their queries are cut."""
    most = max(1, limit // max(1, bytes_each))
    if most >= queries:
        return max(1, min(batch, most // max(1, queries))), 1
    return 1, -(-queries // most)


def _queries(batch: int, queries: int, bytes_each: int, limit: int) -> int:
    """Return how many queries the largest block has."""
    entries, parts = _block_shape(batch, queries, bytes_each, limit)
    return entries * -(-queries // parts)


def _blocks(batch: int, queries: int, bytes_each: int, limit: int) -> Iterator[Place]:
    """Yield the blocks: slices of the batch and of the queries, each within a limit of bytes."""
    entries, parts = _block_shape(batch, queries, bytes_each, limit)
    for b in range(0, batch, entries):
        for part in range(parts):
            yield slice(b, min(b + entries, batch)), slice(queries * part // parts, queries * (part + 1) // parts)


def _dense_buffer(keys: IndexArray, m: int, dtype: torch.dtype, share: int) -> tuple[Tensor, Iterator[Place]]:
    """Return a buffer `(queries, M or more)` for the dense scores of a block, and the blocks.

    An index that may drop entries needs columns past M. Without such columns, the batch entries are contiguous, and
    torch multiplies all of them in one call.
    """
    columns = (m // ALIGN + 1) * ALIGN
    batch, queries, _ = keys.values.shape
    sizes = batch, queries, columns * accumulator(dtype).itemsize, DENSE_BYTES // share
    shape = _queries(*sizes), columns if keys.may_drop else m
    return torch.empty(shape, dtype=accumulator(dtype), device="cpu"), _blocks(*sizes)


def _is_empty(keys: IndexArray, *sizes: int) -> bool:
    """Return True if there is nothing to read or write; the index is checked even then."""
    if keys.values.numel() and all(sizes):
        return False
    keys.part(keys.values)
    return True


def _act_on_block(act: Callable[[Place, Tensor], None], keys: IndexArray, b: slice, q: slice) -> None:
    """Call `act` on a block of the index: once for all of it, or piece by piece if torch refuses or cannot read it.

    Torch refuses values out of bounds, and reads int64 alone. A piece is brought into range and made int64 first.
    """
    block = keys.values[b, q]
    if block.dtype == torch.int64:
        with suppress(RuntimeError) if keys.normal is not None else nullcontext():
            act((slice(None), slice(None)), block)
            return
    step = max(1, COPIED_KEYS // max(1, block.shape[2]))
    for entry in range(block.shape[0]):
        for low in range(0, block.shape[1], step):
            at = slice(entry, entry + 1), slice(low, low + step)
            act(at, _in_range(keys, block[at]))


def sum_is_finite(x: Tensor) -> bool:
    """Whether the sum of all elements is finite; then no element is NaN or infinite.

    A sum that overflows, as float16 may, counts as not finite.
    """
    return not (x.is_floating_point() or x.is_complex()) or cmath.isfinite(x.sum().item())


def _weights(g: Tensor, keys: IndexArray, m: int, share: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield each block with its dense weights `W[b, q, m]`: the sum of the gradients whose index is m."""
    if _is_empty(keys, m):
        return
    g = g.resolve_conj()
    buffer, blocks = _dense_buffer(keys, m, g.dtype, share)
    for b, q in blocks:
        weights, terms = _reshape(buffer, (*g[b, q].shape[:2], *buffer.shape[1:])), g[b, q].to(buffer.dtype)

        def add(at: Place, chosen: Tensor, weights: Tensor = weights, terms: Tensor = terms) -> None:
            weights[at].zero_().scatter_add_(2, chosen, terms[at])

        _act_on_block(add, keys, b, q)
        yield b, q, weights[..., :m]


@cache
def _sparse() -> Callable[..., Tensor]:
    """Return `torch.sparse_csr_tensor`, after it warned, unseen and once for all, that it may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), device="cpu")
    return torch.sparse_csr_tensor


def _can_bag(pool: Tensor, keys: IndexArray) -> bool:
    """Whether torch can read named rows of the pool without a copy: they are contiguous, and no key is dropped."""
    if pool.dtype not in BAGGED or pool.stride()[1:] != (pool.shape[2], 1):
        return False
    return not (keys.may_drop and keys.values.numel() and int(keys.values.max()) == pool.shape[1])


def _bag_bytes(keys: int, size_d: int, dtype: torch.dtype) -> int:
    """Return the bytes of a query's row numbers or of its sum, whichever is larger."""
    return max(8 * keys, size_d * dtype.itemsize)


def sorts(queries: int, keys: int, size: int, dtype: torch.dtype) -> bool:
    """Whether the pool's gradient is summed after sorting the keys; with few keys for a large pool this is slower."""
    return dtype in BAGGED and queries * keys >= size


def _row_blocks(
    pool: Tensor, keys: IndexArray, may_drop: bool, bytes_each: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor | None]]:
    """Yield each block with a table of rows, the row numbers that its keys name in it, and the dropped positions.

    The dropped positions are None unless `may_drop` is set.
    """
    batch, m, d = pool.shape
    if _is_empty(keys, m, d):
        return
    shared, joined = pool.stride(0) == 0, pool.stride(0) == m * pool.stride(1)
    table = pool[0] if shared or not joined else pool.view(batch * m, d)
    blocks = _blocks(batch, keys.values.shape[1], bytes_each, FETCHED_BYTES)
    if not (shared or joined):
        blocks = ((slice(i, i + 1), q) for b, q in blocks for i in range(b.start, b.stop))
    for b, q in blocks:
        chosen, dropped = _in_range(keys, keys.values[b, q]), None
        if may_drop:
            dropped = (chosen == m).reshape(-1).nonzero().reshape(-1)
            chosen = chosen.clamp(max=m - 1) if len(dropped) else chosen
        if joined and not shared:
            chosen = chosen + torch.arange(b.start, b.stop, device="cpu")[:, None, None] * m
        elif not shared:
            table = pool[b.start]
        yield b, q, table, chosen, dropped
        del chosen, dropped  # Freed before the next ones are made, as in all loops of this module.


def _fetch_rows(pool: Tensor, keys: IndexArray) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield each block with the rows `(B, Q, K, D)` that its keys name, zero where a key is dropped."""
    (batch, _, d), wide, k = pool.shape, accumulator(pool.dtype), keys.values.shape[2]
    count = _queries(batch, keys.values.shape[1], k * d * wide.itemsize, FETCHED_BYTES)
    buffer = torch.empty(count * k * d, dtype=wide, device="cpu")
    for b, q, table, chosen, dropped in _row_blocks(pool, keys, keys.may_drop, k * d * wide.itemsize):
        rows = _reshape(buffer, (chosen.numel(), d))
        if rows.dtype == table.dtype:
            torch.index_select(table, 0, chosen.reshape(-1), out=rows)
        else:
            rows.copy_(table.index_select(0, chosen.reshape(-1)))
        if dropped is not None:
            rows.index_fill_(0, dropped, 0)
        yield b, q, rows.view(*chosen.shape, d)
        del chosen, dropped


def _in_range(keys: IndexArray, part: Tensor) -> Tensor:
    """Return a part of the index as int64 values in `[0, M]`."""
    values: Tensor = keys.part(part)
    return values.long()


def _multiply(x: Tensor, y: Tensor, out: Tensor, add: bool = False) -> None:
    """Write the batched product `x @ y` into `out`, or add it; computed in the dtype that sums are kept in."""
    wide = accumulator(x.dtype) if x.dtype == y.dtype else torch.promote_types(x.dtype, y.dtype)
    x, y = x.to(wide), y.to(wide)
    if out.dtype != wide:
        out.copy_(x @ y)
    elif x.shape[0] == 1:
        torch.addmm(out[0], x[0], y[0], beta=int(add), out=out[0])
    else:
        torch.baddbmm(out, x, y, beta=int(add), out=out)


def _reshape(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer.view(-1)[: prod(shape)].view(shape)
