"""Scores against rows of a pool, in stock XLA: `bqd, b i[bqk] d -> bqk`. The package states the contract.

Each function comes in two variants:

- *pooled*: contract the query with the whole pool, one batch entry at a time, and take the wanted scores. Gradients
  are added into a dense `(Q, M)` matrix, which is then multiplied. The work is `Q M D` multiplications, even if few
  keys are asked for.
- *gathered*: take the rows that the keys name, then multiply. This builds an array `(B, Q, K, D)`.

The index is brought into `[0, M]` block by block, because a whole copy would be as large as the scores. Scores are NaN
where the index is bad (`IndexArray.bad`). So are gathered gradients of queries that have such a key, and of the pool of
their batch entry.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from planner.kernels.grouping.jax_bits import bits, of_bits
from planner.kernels.grouping.jax_grouping import accumulator
from planner.kernels.grouping.keys import IndexArray

Result = TypeVar("Result")


def pooled_scores(query: jax.Array, pool: jax.Array, keys: IndexArray) -> jax.Array:
    """Score each query against its keys, by scoring it against the whole pool."""
    shape, dtype = keys.values.shape, jnp.result_type(query, pool)
    if pool.shape[1] == 0 or 0 in shape:
        return _mark_bad(jnp.zeros(shape, dtype), keys.values, keys)

    def entry(query: jax.Array, pool: jax.Array, index: jax.Array) -> jax.Array:
        dense, rows = _matmul("qd,md->qm", query, pool), keys.part(index)
        scores = jnp.take_along_axis(dense, rows, axis=1, mode="clip")
        return _mark_bad(_zero_dropped(scores, rows, pool.shape[0], keys).astype(dtype), index, keys)

    each = shape[1] * shape[2]
    if shape[0] * each >= 2**31:
        return lax.map(lambda slices: entry(*slices), (query, pool, keys.values))

    # The result is flat: XLA copies one with more dimensions to insert dimensions of size 1.
    def write(n: jax.Array, all_scores: jax.Array) -> jax.Array:
        scores = entry(_entry(query, n), _entry(pool, n), keys.values[n])
        return lax.dynamic_update_slice(all_scores, bits(scores).reshape(-1), (n * each,))

    zeros = bits(jnp.zeros(shape[0] * each, dtype))
    return of_bits(lax.fori_loop(0, shape[0], write, zeros), dtype).reshape(shape)


def pooled_query_gradient(g: jax.Array, pool: jax.Array, keys: IndexArray) -> jax.Array:
    """Gradient `(B, Q, D)` of the query, from the gradient `g` of the scores."""
    return _multiply_dense(lambda dense, pool: _matmul("qm,md->qd", dense, pool), keys, pool.shape[1], g, pool)


def pooled_pool_gradient(g: jax.Array, query: jax.Array, keys: IndexArray, size: int) -> jax.Array:
    """Gradient `(B, size, D)` of the pool, from the gradient `g` of the scores."""
    return _multiply_dense(lambda dense, query: _matmul("qm,qd->md", dense, query), keys, size, g, query)


def pooled_gradients(g: jax.Array, query: jax.Array, pool: jax.Array, keys: IndexArray) -> tuple[jax.Array, jax.Array]:
    """Gradients of the query and of the pool; the dense matrix is built once for both."""

    def both(dense: jax.Array, query: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _matmul("qm,md->qd", dense, pool), _matmul("qm,qd->md", dense, query)

    return _multiply_dense(both, keys, pool.shape[1], g, query, pool)


def gathered_scores(query: jax.Array, pool: jax.Array, keys: IndexArray) -> jax.Array:
    """Score each query against its keys, by taking the named rows first."""
    dtype = jnp.result_type(query, pool)
    if pool.shape[1] == 0:
        return _mark_bad(jnp.zeros(keys.values.shape, dtype), keys.values, keys)
    rows = keys.part(keys.values)
    scores = _matmul("bqd,bqkd->bqk", query, _take_rows(pool, rows))
    return _mark_bad(_zero_dropped(scores, rows, pool.shape[1], keys).astype(dtype), keys.values, keys)


def gathered_query_gradient(g: jax.Array, pool: jax.Array, keys: IndexArray) -> jax.Array:
    """Gradient `(B, Q, D)` of the query, from the gradient `g` of the scores."""
    dtype, rows = jnp.result_type(g, pool), keys.part(keys.values)
    if pool.shape[1] == 0:
        return _mark_bad(jnp.zeros((*g.shape[:2], pool.shape[2]), dtype), keys.values, keys, over=(2,))
    # Both factors are masked: a dropped index still reads some row, and zero times a NaN in it would be NaN.
    pool_rows = _zero_dropped(_take_rows(pool, rows), rows[..., None], pool.shape[1], keys)
    result = _matmul("bqk,bqkd->bqd", _zero_dropped(g, rows, pool.shape[1], keys), pool_rows).astype(dtype)
    return _mark_bad(result, keys.values, keys, over=(2,))


def gathered_pool_gradient(g: jax.Array, query: jax.Array, keys: IndexArray, size: int) -> jax.Array:
    """Gradient `(B, size, D)` of the pool, from the gradient `g` of the scores."""
    dtype, rows = jnp.result_type(g, query), keys.part(keys.values)
    exact = accumulator(dtype)
    terms = g[..., None].astype(exact) * query[:, :, None, :].astype(exact)
    # Marks are in place before the sums, so that no pass over the result is needed.
    start = _mark_bad(jnp.zeros((g.shape[0], size, query.shape[2]), exact), keys.values, keys, over=(1, 2))
    if g.shape[0] == 1:
        return start[0].at[rows[0]].add(terms[0], mode="drop").astype(dtype)[None]
    entries = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return start.at[entries, rows].add(terms, mode="drop").astype(dtype)


def gathered_gradients(
    g: jax.Array, query: jax.Array, pool: jax.Array, keys: IndexArray
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the query and of the pool."""
    dtype = jnp.result_type(g, query, pool)
    g = g.astype(dtype)
    to_query = gathered_query_gradient(g, pool, keys)
    return to_query, gathered_pool_gradient(g, query, keys, pool.shape[1]).astype(dtype)


def pooled_scratch_bytes(what: str, sizes: tuple[int, int, int, int, int], dtype: DTypeLike) -> int:
    """Upper bound of the bytes that the function `pooled_` + `what` allocates beside its results."""
    batch, queries, pool, size_d, keys = sizes
    query, rows, dense, chosen = queries * size_d, pool * size_d, queries * pool, queries * keys
    # Elements that stand beside the dense matrix: slices of the operands; slices held after it is filled (while it is
    # filled, positions and gradients stand there); and slices of the results.
    first, last, results = {
        "scores": (query + rows, 0, chosen),
        "query_gradient": (rows, query, query),
        "pool_gradient": (query, rows, rows),
        "gradients": (query + rows, max(query, rows), query + rows),
    }[what]
    numbers = dense + first + (0 if what == "scores" else max(2 * chosen, last))
    rounded = batch * results + query + rows + dense + chosen if jnp.dtype(dtype) == jnp.bfloat16 else 0
    return numbers * max(accumulator(dtype).itemsize, 4) + 2 * rounded + 2**11


def gathered_scratch_bytes(what: str, sizes: tuple[int, int, int, int, int], dtype: DTypeLike) -> int:
    """Upper bound of the bytes that the function `gathered_` + `what` allocates beside its results."""
    batch, queries, pool, size_d, keys = sizes
    exact, scores = accumulator(dtype), batch * queries * keys
    numbers = scores * (2 * size_d + 5 if what == "gradients" else size_d + 3)
    if what == "query_gradient" and keys == 1:  # XLA takes and multiplies in one loop
        numbers = 0
        if queries == 1 and exact == jnp.dtype(dtype):  # and the same loop writes the result
            return 2**11
    if what in ("scores", "query_gradient") or exact != jnp.dtype(dtype):
        numbers += batch * queries * size_d
    if exact != jnp.dtype(dtype):  # the other operand in float32, or float32 sums
        numbers += batch * pool * size_d
    return numbers * max(exact.itemsize, 4) + 2**11


def _multiply_dense(
    products: Callable[..., Result], keys: IndexArray, size: int, g: jax.Array, *operands: jax.Array
) -> Result:
    """Call `products` for each batch entry, with the scores' gradient as a matrix and its part of each operand."""
    dtype = jnp.result_type(g, *operands)

    def of_entry(n: jax.Array) -> Any:
        index, part = keys.part(_entry(keys.values, n)), _entry(g, n)
        results = products(_scatter_dense(part, index, size, dtype), *(_entry(x, n) for x in operands))
        return jax.tree.map(lambda x: bits(x.astype(dtype)), results)

    results_as_bits = lax.map(of_entry, jnp.arange(keys.values.shape[0], dtype=jnp.int32))
    results: Result = jax.tree.map(lambda x: of_bits(x, dtype), results_as_bits)
    return results


def _entry(x: jax.Array, n: jax.Array) -> jax.Array:
    """Return batch entry `n`; zeros if the batch is empty."""
    if x.shape[0] == 0:
        return jnp.zeros(x.shape[1:], x.dtype)
    if x.dtype == jnp.bfloat16:  # bound to the loop step: else XLA converts the whole array to bits before the loop
        x, n = lax.optimization_barrier((x, n))
    return of_bits(bits(x)[n], x.dtype)


def _scatter_dense(g: jax.Array, index: jax.Array, size: int, dtype: DTypeLike) -> jax.Array:
    """Return the scores' gradient as a `(Q, size)` matrix; several gradients of one row add up."""
    rows, exact = g.shape[0], accumulator(dtype)
    query = lax.broadcasted_iota(jnp.int32, index.shape, 0)
    if rows * size >= 2**31:
        return jnp.zeros((rows, size), exact).at[query, index].add(g.astype(exact), mode="drop")
    # One flat position per gradient is a fifth faster than a pair of numbers (1000 keys per query, 2-core CPU).
    # A dropped gradient points behind the end of the matrix, not at the first row of the next query.
    index = index.astype(jnp.int32)
    position = jnp.where(index < size, query * size + index, rows * size)
    numbers = lax.ScatterDimensionNumbers((), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
    dense = lax.scatter_add(
        jnp.zeros(rows * size, exact),
        position.reshape(-1, 1),
        g.astype(exact).reshape(-1),
        numbers,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
    return dense.reshape(rows, size)


def _zero_dropped(x: jax.Array, rows: jax.Array, size: int, keys: IndexArray) -> jax.Array:
    """Return x with zeros where the index is dropped."""
    return jnp.where(rows < size, x, jnp.zeros((), x.dtype)) if keys.may_drop else x


def _mark_bad(x: jax.Array, index: jax.Array, keys: IndexArray, over: tuple[int, ...] = ()) -> jax.Array:
    """Return x with NaN where the caller's index is bad: at one place at least along the dimensions `over`."""
    if keys.bad is None:
        return x
    bad = keys.bad(index)
    return jnp.where(bad.any(over, keepdims=True) if over else bad, jnp.asarray(jnp.nan, x.dtype), x)


def _take_rows(pool: jax.Array, index: jax.Array) -> jax.Array:
    return jax.vmap(lambda pool, index: pool.at[index].get(mode="clip"))(pool, index)


def _matmul(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    exact = accumulator(jnp.result_type(left, right))
    return jnp.einsum(spec, left.astype(exact), right.astype(exact))
