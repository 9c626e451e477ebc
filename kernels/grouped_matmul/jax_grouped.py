"""Rows meet the matrix of their group, in stock XLA: `out[r] = a[r] @ c[g(r)]`, and both gradients.

`c[g]` is never built. The rows are read in the order of their groups, in tiles that lie within one group:

    sorted rows   | group 0     | group 1 | group 3          |
    tiles         [ 0:0  ][ 0:1 ][ 1:0   ][ 3:0  ][ 3:1  ][ 3:2 ]

A loop with a dynamic number of steps takes a few tiles a step, gathers their rows and matrices, multiplies
them as one batched product, and scatters the result to its rows. Lanes beyond the end of a tile's group point
behind the last row. A scatter drops them. Where a product sums over the lanes, a gather reads zeros for them,
on both sides: zero times the NaN of another group's row would be NaN.

Shapes: a `(Na, I, J)`, c `(G, J, K)`, out `(N, I, K)`; N is the number of rows in the groups.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from planner.kernels.grouping.jax_bits import bits, of_bits
from planner.kernels.grouping.jax_grouping import Groups

TILE_ROWS = 256  # most rows of matrices in a tile
LANES = 8  # rows per tile are a multiple of this
STEP_NUMBERS = 2**19  # numbers that a step touches: 2 MB of float32
MAX_TILES = 64

Carry = TypeVar("Carry")

_CLIP, _SKIP = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP


class Tiling(NamedTuple):
    """How many rows make a tile and how many tiles a step of the loop takes.

    Attributes:
        rows: Rows of a tile.
        tiles: Tiles of a step.
    """

    rows: int
    tiles: int


class _Tiles(NamedTuple):
    """The tiles of a grouping; entries from `total` on are empty tiles.

    Attributes:
        group: Group of each tile, `(T,)`.
        start: First sorted position, `(T,)`.
        stop: Sorted position behind the tile's group, `(T,)`.
        total: How many tiles there are.
    """

    group: jax.Array
    start: jax.Array
    stop: jax.Array
    total: jax.Array


def grouped_matmul(
    a: jax.Array,
    c: jax.Array,
    groups: Groups,
    source: jax.Array | None = None,
    target: jax.Array | None = None,
    targets: int | None = None,
) -> jax.Array:
    """Multiply each row by the matrix of its group.

    Args:
        a: Left factors `(Na, I, J)`.
        c: One matrix per group, `(G, J, K)`.
        groups: Which rows belong to which group.
        source: Which left factor a row has, `(N,)`; without it, row r has `a[r]`.
        target: Which result a row is added to, `(N,)`, values in `[0, targets]`; `targets` means that it is
            dropped. Without it, row r is `out[r]`.
        targets: Number of results; given exactly when `target` is.

    Returns:
        `(N, I, K)`, or `(targets, I, K)` with `target`.

    Raises:
        ValueError: only one of `target` and `targets` is given.
    """
    if (target is None) != (targets is None):
        raise ValueError("target and targets go together")
    rows, (_, size_i, size_j), (_, _, size_k) = groups.order.shape[0], a.shape, c.shape
    dtype = jnp.result_type(a, c)
    if target is None:
        out = _filled((rows, size_i, size_k), dtype, groups, 1)
    else:
        out = _filled((targets or 0, size_i, size_k), _accumulator(dtype), groups, 1)
    if 0 in (rows, *a.shape[:2], c.shape[0], *out.shape):
        return out.astype(dtype)
    if size_j == 0:
        return out.astype(dtype) if target is not None else _fill_kept(out, groups)

    cut = tiling(rows, size_i, *c.shape)
    tiles = _cut(groups, cut)

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        group, row = _step_rows(tiles, groups.order, number, cut)
        # Lanes without a row read any row: their products go nowhere.
        left = _gather(a, row if source is None else _gather(source, row))
        product = _tile_matmul("tij,tjk->tik", _tile_matrix(left, cut), _take_group(c, group))
        product = product.reshape(-1, size_i, size_k)
        if target is None:
            return _put(out, row, bits(product.astype(dtype)))
        return _add(out, _take_index(target, row, out.shape[0]), product.astype(out.dtype))

    if target is None:
        return of_bits(_loop(tiles, cut, step, bits(out)), dtype)
    return _loop(tiles, cut, step, out).astype(dtype)


def grouped_outer(
    a: jax.Array,
    b: jax.Array,
    groups: Groups,
    size: int,
    source_a: jax.Array | None = None,
    source_b: jax.Array | None = None,
) -> jax.Array:
    """Sum `a[r].T @ b[r]` over the rows of each group.

    Args:
        a: Left factors `(Na, I, J)`.
        b: Right factors `(Nb, I, K)`.
        groups: Which rows belong to which group.
        size: Number of groups.
        source_a: Which left factor a row has, `(N,)`; without it, row r has `a[r]`.
        source_b: Which right factor a row has, `(N,)`; without it, row r has `b[r]`.

    Returns:
        `(size, J, K)`; a group without rows is zero.
    """
    dtype = jnp.result_type(a, b)
    rows = groups.order.shape[0]
    out = _filled((size, a.shape[2], b.shape[2]), _accumulator(dtype), groups, 2)
    if 0 in (rows, *a.shape, *b.shape, size):
        return out.astype(dtype)

    cut = tiling(rows, a.shape[1], *out.shape)
    tiles = _cut(groups, cut)

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        group, row = _step_rows(tiles, groups.order, number, cut)
        left = _take(a, row if source_a is None else _take_index(source_a, row, a.shape[0]))
        right = _take(b, row if source_b is None else _take_index(source_b, row, b.shape[0]))
        product = _tile_matmul("tij,tik->tjk", _tile_matrix(left, cut), _tile_matrix(right, cut))
        return _add(out, group, product.astype(out.dtype))

    return _loop(tiles, cut, step, out).astype(dtype)


def grouped_gradients(
    gout: jax.Array, a: jax.Array, c: jax.Array, groups: Groups, source: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Both gradients of `grouped_matmul` in one loop, which gathers each row once for both.

    With `out[r] = a[r] @ c[g]`: the gradient of the row is `gout[r] @ c[g].T`, and that of `c[g]` is the sum
    of `a[r].T @ gout[r]` over the rows of g. Nothing is conjugated.

    Args:
        gout: Gradient of the result, `(N, I, K)`.
        a: Left factors `(Na, I, J)`.
        c: One matrix per group, `(G, J, K)`.
        groups: Which rows belong to which group.
        source: Which left factor a row has, `(N,)`.

    Returns:
        The gradient of each row's left factor `(N, I, J)`, zero for a dropped row, and that of c `(G, J, K)`.
    """
    rows = groups.order.shape[0]
    dtype = jnp.result_type(gout, a, c)
    grad_rows = _filled((rows, *a.shape[1:]), dtype, groups, 3)
    grad_c = _filled(c.shape, _accumulator(dtype), groups, 4)
    if 0 in (rows, *a.shape, *c.shape):
        return grad_rows, grad_c.astype(dtype)

    cut = tiling(rows, a.shape[1], *c.shape)
    tiles = _cut(groups, cut)

    def step(number: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        group, row = _step_rows(tiles, groups.order, number, cut)
        left = _tile_matrix(_take(a, row if source is None else _take_index(source, row, a.shape[0])), cut)
        gradient = _tile_matrix(_take(gout, row), cut)
        to_rows = _tile_matmul("tik,tjk->tij", gradient, _take_group(c, group))
        to_c = _tile_matmul("tij,tik->tjk", left, gradient)
        grad_rows, grad_c = grads
        grad_rows = _put(grad_rows, row, bits(to_rows.reshape(-1, *a.shape[1:]).astype(dtype)))
        return grad_rows, _add(grad_c, group, to_c.astype(grad_c.dtype))

    grad_rows, grad_c = _loop(tiles, cut, step, (bits(grad_rows), grad_c))
    return of_bits(grad_rows, dtype), grad_c.astype(dtype)


def tiling(rows: int, size_i: int, groups: int, size_j: int, size_k: int) -> Tiling:
    """Choose the tiles for `rows` rows `(I, J)` or `(I, K)` that meet `groups` matrices `(J, K)`.

    A tile should hold a whole group, yet lanes beyond its end are multiplied in vain: so it has the average
    and two standard deviations, for rows that chose their groups independently. A step takes as many tiles as
    stay in the cache.
    """
    average = rows / max(groups, 1)
    whole_group = math.ceil((average + 2 * math.sqrt(average)) / LANES) * LANES
    tile_rows = max(1, min(whole_group, max(TILE_ROWS // max(size_i, 1), 1), rows))
    tile_numbers = tile_rows * size_i * (size_j + size_k) + size_j * size_k
    tiles = max(1, min(STEP_NUMBERS // max(tile_numbers, 1), MAX_TILES, -(-rows // tile_rows)))
    return Tiling(tile_rows, tiles)


def matmul_scratch_bytes(
    rows: int, size_i: int, groups: int, size_j: int, size_k: int, dtype: DTypeLike, targets: int | None = None
) -> int:  # fmt: skip
    """Upper bound of what `grouped_matmul` allocates beside its result."""
    found = _bits_bytes(rows * size_i * size_k, dtype)
    if targets is not None:
        found = _float32_sum(targets * size_i * size_k, dtype)
    return _scratch_bytes(rows, size_i, groups, size_j, size_k, dtype) + found


def outer_scratch_bytes(rows: int, size_i: int, groups: int, size_j: int, size_k: int, dtype: DTypeLike) -> int:
    """Upper bound of what `grouped_outer` allocates beside its result."""
    return _scratch_bytes(rows, size_i, groups, size_j, size_k, dtype) + _float32_sum(groups * size_j * size_k, dtype)


def gradients_scratch_bytes(rows: int, size_i: int, groups: int, size_j: int, size_k: int, dtype: DTypeLike) -> int:
    """Upper bound of what `grouped_gradients` allocates beside its results."""
    sums = _float32_sum(groups * size_j * size_k, dtype) + _bits_bytes(rows * size_i * size_j, dtype)
    return _scratch_bytes(rows, size_i, groups, size_j, size_k, dtype, pair=True) + sums


def _scratch_bytes(
    rows: int, size_i: int, groups: int, size_j: int, size_k: int, dtype: DTypeLike, pair: bool = False
) -> int:  # fmt: skip
    cut, exact = tiling(rows, size_i, groups, size_j, size_k), _accumulator(dtype)
    lanes = cut.tiles * cut.rows
    left, right, matrices = lanes * size_i * size_j, lanes * size_i * size_k, cut.tiles * size_j * size_k
    # Both factors of a product and the product, or of one tile this as multiplied and as put; of a pair two products.
    numbers = max(left + right + matrices, 2 * right * (cut.tiles == 1)) + pair * left
    rounded = 0 if exact == jnp.dtype(dtype) else 2 * (left if pair else right)
    table = rows // cut.rows + min(groups, rows) + cut.tiles + groups
    return max(exact.itemsize, 4) * numbers + rounded + 4 * 4 * (lanes + table) + 4096


def _bits_bytes(numbers: int, dtype: DTypeLike) -> int:
    return 2 * numbers if jnp.dtype(dtype) == jnp.bfloat16 else 0


def _float32_sum(numbers: int, dtype: DTypeLike) -> int:
    return 0 if _accumulator(dtype) == jnp.dtype(dtype) else 4 * numbers


def _cut(groups: Groups, cut: Tiling) -> _Tiles:
    rows, size = groups.order.shape[0], groups.offsets.shape[0] - 1
    bound = -(-rows // cut.rows) + min(size, rows)
    bound = -(-bound // cut.tiles) * cut.tiles
    starts, stops = groups.offsets[:-1], groups.offsets[1:]
    counts = (stops - starts + (cut.rows - 1)) // cut.rows
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    tile = lax.iota(jnp.int32, bound)
    group = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    group = jnp.minimum(group, size - 1)
    start = starts[group] + (tile - (ends - counts)[group]) * cut.rows
    exists = tile < ends[-1]
    return _Tiles(group, jnp.where(exists, start, rows), jnp.where(exists, stops[group], 0), ends[-1])


def _loop(tiles: _Tiles, cut: Tiling, step: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    steps = (tiles.total + (cut.tiles - 1)) // cut.tiles
    return lax.fori_loop(jnp.int32(0), steps, step, carry)


def _step_rows(tiles: _Tiles, order: jax.Array, number: jax.Array, cut: Tiling) -> tuple[jax.Array, jax.Array]:
    """Groups of the step's tiles, and the rows of all of them; lanes without a row hold N."""
    first = number * cut.tiles
    group, start, stop = (lax.dynamic_slice(part, (first,), (cut.tiles,)) for part in tiles[:3])
    position = start[:, None] + lax.iota(jnp.int32, cut.rows)
    row = _gather(order, position.reshape(-1)).reshape(position.shape)
    return group, jnp.where(position < stop[:, None], row, order.shape[0]).reshape(-1)


def _tile_matrix(taken: jax.Array, cut: Tiling) -> jax.Array:
    return taken.reshape(cut.tiles, cut.rows * taken.shape[1], taken.shape[2])


def _tile_matmul(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    exact = _accumulator(jnp.result_type(left, right))
    return jnp.einsum(spec, left.astype(exact), right.astype(exact))


def _take(operand: jax.Array, rows: jax.Array) -> jax.Array:
    """`operand[rows]`, zero where a row is out of bounds."""
    return _gather(operand, rows, _SKIP)


def _take_group(matrices: jax.Array, group: jax.Array) -> jax.Array:
    return _gather(matrices, group)


def _take_index(index: jax.Array, rows: jax.Array, absent: int) -> jax.Array:
    """`index[rows]` as int32, `absent` where a row is out of bounds."""
    taken = _gather(index, rows).astype(jnp.int32)
    return jnp.where(rows < index.shape[0], taken, absent)


def _gather(operand: jax.Array, rows: jax.Array, mode: lax.GatherScatterMode = _CLIP) -> jax.Array:
    # lax.gather and not `operand[rows]`: jnp's indexing adds two passes over the rows for negative numbers.
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, operand.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    fill, dtype = 0 if mode is _SKIP else None, operand.dtype
    if dtype == jnp.bfloat16:  # bound to the rows: its bits are not to be copied before the loop either
        operand, rows = lax.optimization_barrier((operand, rows))
    taken = lax.gather(bits(operand), rows[:, None], numbers, (1, *operand.shape[1:]), mode=mode, fill_value=fill)
    return of_bits(taken, dtype)


def _put(out: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    # Not unique_indices: several lanes point behind the last row.
    return lax.scatter(out, rows[:, None], values[:, None], _scatter_numbers(out), mode=_SKIP)


def _add(out: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    return lax.scatter_add(out, rows[:, None], values[:, None], _scatter_numbers(out), mode=_SKIP)


def _scatter_numbers(out: jax.Array) -> lax.ScatterDimensionNumbers:
    # Windows of the operand's rank, `(1, I, K)`: without the row axis XLA copies the updates once more.
    return lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, out.ndim + 1)),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(0,),
    )


def _filled(shape: tuple[int, ...], dtype: DTypeLike, groups: Groups, number: int) -> jax.Array:
    """Zeros that no other array of zeros is merged with.

    XLA shares equal constants between results of equal size and then copies each before a loop writes to it: 33 MB
    for each on seed 000. The first offset is always zero, which XLA cannot know.
    """
    return jnp.full(shape, groups.offsets[0] * number, dtype)


def _fill_kept(out: jax.Array, groups: Groups) -> jax.Array:
    """Zero the rows that have a group: a product over an empty axis."""
    kept = lax.iota(jnp.int32, groups.order.shape[0]) < groups.offsets[-1]
    rows = jnp.where(kept, groups.order, out.shape[0])
    return _put(out, rows, jnp.zeros_like(out))


def _accumulator(dtype: DTypeLike) -> "np.dtype[Any]":
    """The dtype in which sums of `dtype` are formed."""
    exact = jnp.dtype(dtype)
    return jnp.dtype("float32") if exact in (jnp.bfloat16, jnp.float16) else exact
