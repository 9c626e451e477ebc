"""Scores against rows taken from a pool, in stock XLA: `bqd, b i[bqk] d -> bqk`.

Two ways for each function. The *pooled* way contracts the query with the whole pool, one batch entry at a
time, and takes the wanted scores; its gradients add into a dense `(Q, M)` matrix and multiply. The *gathered*
way takes the keys first. Pooled multiplies `Q M D` numbers however few keys are asked for, gathered builds
`(B, Q, K, D)`.

Shapes: query `(B, Q, D)`, pool `(B, M, D)`, index and scores `(B, Q, K)`. An index equal to `M` is dropped: its score
is 0 and it receives no gradient. An `IndexArray` says how the index is read: it is brought into `[0, M]` block by
block, since a whole copy in range would be as large as the scores. Scores are NaN where the index is bad.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from planner.kernels.grouping.jax_bits import bits, of_bits
from planner.kernels.grouping.keys import IndexArray

Result = TypeVar("Result")


def pooled_scores(query: jax.Array, pool: jax.Array, keys: IndexArray) -> jax.Array:
    """Score each query against its keys, by scoring it against the whole pool."""
    shape, dtype = keys.values.shape, jnp.result_type(query, pool)
    if pool.shape[1] == 0 or 0 in shape:
        return _shown(jnp.zeros(shape, dtype), keys.values, keys)

    def entry(query: jax.Array, pool: jax.Array, index: jax.Array) -> jax.Array:
        dense, rows = _matmul("qd,md->qm", query, pool), keys.part(index)
        taken = jnp.take_along_axis(dense, rows, axis=1, mode="clip")
        return _shown(_kept(taken, rows, pool.shape[0], keys).astype(dtype), index, keys)

    each = shape[1] * shape[2]
    if shape[0] * each >= 2**31:
        return lax.map(lambda slices: entry(*slices), (query, pool, keys.values))

    # A flat result: one with more dimensions XLA copies to put others of size 1 between them.
    def write(n: jax.Array, scores: jax.Array) -> jax.Array:
        found = entry(_entry(query, n), _entry(pool, n), keys.values[n])
        return lax.dynamic_update_slice(scores, bits(found).reshape(-1), (n * each,))

    zeros = bits(jnp.zeros(shape[0] * each, dtype))
    return of_bits(lax.fori_loop(0, shape[0], write, zeros), dtype).reshape(shape)


def pooled_query_gradient(g: jax.Array, pool: jax.Array, keys: IndexArray) -> jax.Array:
    """Gradient `(B, Q, D)` of the query, from the gradient `g` of the scores."""
    dtype = jnp.result_type(g, pool)

    def entry(index: jax.Array, g: jax.Array, pool: jax.Array) -> jax.Array:
        return _matmul("qm,md->qd", _dense(g, index, pool.shape[0], dtype), pool).astype(dtype)

    return _each_entry(entry, keys, g, pool)


def pooled_pool_gradient(g: jax.Array, query: jax.Array, keys: IndexArray, size: int) -> jax.Array:
    """Gradient `(B, size, D)` of the pool, from the gradient `g` of the scores."""
    dtype = jnp.result_type(g, query)

    def entry(index: jax.Array, g: jax.Array, query: jax.Array) -> jax.Array:
        return _matmul("qm,qd->md", _dense(g, index, size, dtype), query).astype(dtype)

    return _each_entry(entry, keys, g, query)


def pooled_gradients(g: jax.Array, query: jax.Array, pool: jax.Array, keys: IndexArray) -> tuple[jax.Array, jax.Array]:
    """Gradients of the query and of the pool; the dense matrix is built once for both."""
    dtype = jnp.result_type(g, query, pool)

    def entry(index: jax.Array, g: jax.Array, query: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        dense = _dense(g, index, pool.shape[0], dtype)
        return _matmul("qm,md->qd", dense, pool).astype(dtype), _matmul("qm,qd->md", dense, query).astype(dtype)

    return _each_entry(entry, keys, g, query, pool)


def gathered_scores(query: jax.Array, pool: jax.Array, keys: IndexArray) -> jax.Array:
    """Score each query against its keys, by taking the keys first."""
    dtype = jnp.result_type(query, pool)
    if pool.shape[1] == 0:
        return _shown(jnp.zeros(keys.values.shape, dtype), keys.values, keys)
    rows = keys.part(keys.values)
    scores = _matmul("bqd,bqkd->bqk", query, _taken(pool, rows))
    return _shown(_kept(scores, rows, pool.shape[1], keys).astype(dtype), keys.values, keys)


def gathered_query_gradient(g: jax.Array, pool: jax.Array, keys: IndexArray) -> jax.Array:
    """Gradient `(B, Q, D)` of the query, from the gradient `g` of the scores."""
    dtype, rows = jnp.result_type(g, pool), keys.part(keys.values)
    if pool.shape[1] == 0:
        return jnp.zeros((*g.shape[:2], pool.shape[2]), dtype)
    # Both factors are masked: a dropped index reads some key, and zero times a NaN there would be NaN.
    taken = _kept(_taken(pool, rows), rows[..., None], pool.shape[1], keys)
    return _matmul("bqk,bqkd->bqd", _kept(g, rows, pool.shape[1], keys), taken).astype(dtype)


def gathered_pool_gradient(g: jax.Array, query: jax.Array, keys: IndexArray, size: int) -> jax.Array:
    """Gradient `(B, size, D)` of the pool, from the gradient `g` of the scores."""
    dtype, rows = jnp.result_type(g, query), keys.part(keys.values)
    exact = _accumulator(dtype)
    terms = g[..., None].astype(exact) * query[:, :, None, :].astype(exact)
    entries = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    zeros = jnp.zeros((g.shape[0], size, query.shape[2]), exact)
    return zeros.at[entries, rows].add(terms, mode="drop").astype(dtype)


def gathered_gradients(
    g: jax.Array, query: jax.Array, pool: jax.Array, keys: IndexArray
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the query and of the pool."""
    dtype = jnp.result_type(g, query, pool)
    keys = IndexArray(keys.part(keys.values), may_drop=keys.may_drop)  # once for both
    g = g.astype(dtype)
    to_query = gathered_query_gradient(g, pool, keys)
    return to_query, gathered_pool_gradient(g, query, keys, pool.shape[1]).astype(dtype)


def pooled_scratch_bytes(
    what: str, batch: int, queries: int, pool: int, size_d: int, keys: int, dtype: DTypeLike
) -> int:
    """Upper bound of what a `pooled_*` function allocates beside its results."""
    query, rows, dense, chosen = queries * size_d, pool * size_d, queries * pool, queries * keys
    # Slices of the operands; while the dense matrix is filled, positions and gradients; then slices of the results.
    first, last, results = {
        "scores": (query + rows, 0, chosen),
        "query_gradient": (rows, query, query),
        "pool_gradient": (query, rows, rows),
        "gradients": (query + rows, max(query, rows), query + rows),
    }[what]
    numbers = dense + first + (0 if what == "scores" else max(2 * chosen, last))
    rounded = batch * results + query + rows + dense + chosen if jnp.dtype(dtype) == jnp.bfloat16 else 0
    return numbers * max(_accumulator(dtype).itemsize, 4) + 2 * rounded + 2**11


def gathered_scratch_bytes(
    what: str, batch: int, queries: int, pool: int, size_d: int, keys: int, dtype: DTypeLike
) -> int:
    """Upper bound of what a `gathered_*` function allocates beside its results."""
    exact, scores = _accumulator(dtype), batch * queries * keys
    numbers = scores * (2 * size_d + 5 if what == "gradients" else size_d + 3)
    if what == "query_gradient" and keys == 1:  # one loop takes and multiplies
        numbers = 0
        if queries == 1 and exact == jnp.dtype(dtype):  # and writes the result
            return 2**11
    if what in ("scores", "query_gradient") or exact != jnp.dtype(dtype):
        numbers += batch * queries * size_d
    if exact != jnp.dtype(dtype):  # the other operand in float32, or sums
        numbers += batch * pool * size_d
    return numbers * max(exact.itemsize, 4) + 2**11


def _each_entry(entry: Callable[..., Result], keys: IndexArray, *operands: jax.Array) -> Result:
    """Apply a function to each batch entry of the index, brought into range, and of its operands."""

    def of_entry(n: jax.Array) -> Any:
        return jax.tree.map(bits, entry(keys.part(_entry(keys.values, n)), *(_entry(x, n) for x in operands)))

    found = lax.map(of_entry, jnp.arange(keys.values.shape[0], dtype=jnp.int32))
    dtype = jnp.result_type(*operands)
    mapped: Result = jax.tree.map(lambda x: of_bits(x, dtype), found)
    return mapped


def _entry(x: jax.Array, n: jax.Array) -> jax.Array:
    """The part of one batch entry; some zeros where there is none."""
    if x.shape[0] == 0:
        return jnp.zeros(x.shape[1:], x.dtype)
    if x.dtype == jnp.bfloat16:  # bound to the entry: its bits are not to be copied before the loop either
        x, n = lax.optimization_barrier((x, n))
    return of_bits(bits(x)[n], x.dtype)


def _dense(g: jax.Array, index: jax.Array, size: int, dtype: DTypeLike) -> jax.Array:
    """The scores' gradient as a `(Q, size)` matrix; several gradients of one key add up."""
    rows, exact = g.shape[0], _accumulator(dtype)
    query = lax.broadcasted_iota(jnp.int32, index.shape, 0)
    if rows * size >= 2**31:
        return jnp.zeros((rows, size), exact).at[query, index].add(g.astype(exact), mode="drop")
    # One flat position per gradient: a fifth faster than a pair of numbers (1000 keys a query, 2-core CPU).
    # A dropped one points behind the last row, and not at the first key of the next query.
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


def _kept(x: jax.Array, rows: jax.Array, size: int, keys: IndexArray) -> jax.Array:
    """X, zero where the index is dropped."""
    return jnp.where(rows < size, x, jnp.zeros((), x.dtype)) if keys.may_drop else x


def _shown(scores: jax.Array, index: jax.Array, keys: IndexArray) -> jax.Array:
    """The scores, NaN where some of the index as given is bad."""
    return scores if keys.bad is None else jnp.where(keys.bad(index), jnp.asarray(jnp.nan, scores.dtype), scores)


def _taken(pool: jax.Array, index: jax.Array) -> jax.Array:
    return jax.vmap(lambda pool, index: pool.at[index].get(mode="clip"))(pool, index)


def _matmul(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    exact = _accumulator(jnp.result_type(left, right))
    return jnp.einsum(spec, left.astype(exact), right.astype(exact))


def _accumulator(dtype: DTypeLike) -> "np.dtype[Any]":
    """The dtype in which sums of `dtype` are formed."""
    exact = jnp.dtype(dtype)
    return jnp.dtype("float32") if exact in (jnp.bfloat16, jnp.float16) else exact
