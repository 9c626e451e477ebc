"""Grouped products on TPUs, by Pallas: `planner.kernels.jax_grouped`'s contracts.

Rows are taken in the order of their groups, in tiles that lie within one group; the kernel fetches the matrix of each
tile by its group, from a table that is there before the grid begins. `c[q]` is never built. Where each row is itself a
large enough tile, its matrix is fetched by its own index, and no row is moved.

Sums are in float32. What lies beyond an edge is left out by select, for zero times NaN is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from planner.kernels import jax_grouped
from planner.kernels.jax_grouping import Groups
from planner.kernels.pallas_tiles import DTYPES, cut, lanes, put_back, rows_of_tile, sublanes, taken

__all__ = ["grouped_gradients", "grouped_matmul", "grouped_outer", "matrices_outer", "matrices_product"]

# Side of a block of a large matrix, rows of a tile's matrix at most, and tiles whose groups scalar memory is asked to
# hold: of a v5e these take 6 MB of 16 and 0.5 MB of 1.
_SIDE, _MOST_ROWS, _MOST_TILES = 512, 512, 2**16
# What interprets the kernels; tests set it.
INTERPRET: Any = False


def grouped_matmul(
    a: jax.Array,
    c: jax.Array,
    groups: Groups,
    source: jax.Array | None = None,
    target: jax.Array | None = None,
    targets: int | None = None,
) -> jax.Array:
    """Multiply each row by the matrix of its group; see `planner.kernels.jax_grouped.grouped_matmul`."""
    rows, (_, i, j), (g, _, k) = groups.order.shape[0], a.shape, c.shape
    if not _takes(groups, a, c) or 0 in (j, k):
        return jax_grouped.grouped_matmul(a, c, groups, source, target, targets)
    if source is None and target is None and _is_tile(i, rows, a.dtype):
        group = _group_of_rows(groups)
        return matrices_product(a, c, jnp.minimum(group, g - 1), (group < g).astype(jnp.int32))
    tiles = cut(groups, rows_of_tile(rows, i, g, a.dtype.itemsize))
    wide = None if target is None else jnp.float32
    found = matrices_product(taken(a, tiles.slot, source), c, tiles.group, tiles.live, dtype=wide)
    if target is None:
        return put_back(found, tiles.slot, rows, i)
    assert targets is not None
    to = target.at[tiles.slot.reshape(-1)].get(mode="fill", fill_value=targets)
    out = jnp.zeros((targets, i, k), jnp.float32)
    return out.at[to].add(found.reshape(-1, i, k), mode="drop").astype(a.dtype)


def grouped_outer(
    a: jax.Array,
    b: jax.Array,
    groups: Groups,
    size: int,
    source_a: jax.Array | None = None,
    source_b: jax.Array | None = None,
) -> jax.Array:
    """Sum `a[r]^T @ b[r]` over the rows of each group; see `planner.kernels.jax_grouped.grouped_outer`."""
    rows, i = groups.order.shape[0], a.shape[1]
    if not _takes(groups, a, b) or 0 in (a.shape[2], b.shape[2]):
        return jax_grouped.grouped_outer(a, b, groups, size, source_a, source_b)
    tiles = cut(groups, rows_of_tile(rows, i, size, a.dtype.itemsize))
    left, right = taken(a, tiles.slot, source_a), taken(b, tiles.slot, source_b)
    return matrices_outer(left, right, tiles.group, tiles.live, size)


def grouped_gradients(
    gout: jax.Array, a: jax.Array, c: jax.Array, groups: Groups, source: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Both gradients of `grouped_matmul`; see `planner.kernels.jax_grouped.grouped_gradients`."""
    rows, i, g = groups.order.shape[0], a.shape[1], c.shape[0]
    if not _takes(groups, a, c, gout) or 0 in c.shape:
        return jax_grouped.grouped_gradients(gout, a, c, groups, source)
    tiles = cut(groups, rows_of_tile(rows, i, g, a.dtype.itemsize))
    left, gradient = taken(a, tiles.slot, source), taken(gout, tiles.slot)
    to_rows = matrices_product(gradient, c, tiles.group, tiles.live, transposes=True)
    to_c = matrices_outer(left, gradient, tiles.group, tiles.live, g)
    return put_back(to_rows, tiles.slot, rows, i), to_c


def _takes(groups: Groups, a: jax.Array, *others: jax.Array) -> bool:
    """Whether there is something to multiply of a dtype that the kernels take, and both memories hold the tiles."""
    rows, size, inner = groups.order.shape[0], groups.offsets.shape[0] - 1, a.shape[1]
    if not rows * size * inner or a.dtype.name not in DTYPES or any(x.dtype != a.dtype for x in others):
        return False
    each = rows_of_tile(rows, inner, size, a.dtype.itemsize)
    return each * inner <= _MOST_ROWS and lanes(rows, inner, size, a.dtype.itemsize) <= _MOST_TILES * each


def _is_tile(inner: int, rows: int, dtype: Any) -> bool:
    """Whether one row's matrix is a tile of its own."""
    least = sublanes(jnp.dtype(dtype).itemsize)
    return 4 * least <= inner and inner % least == 0 and rows <= _MOST_TILES


def _group_of_rows(groups: Groups) -> jax.Array:
    """The group of each row, the number of groups where it is dropped."""
    at = lax.iota(jnp.int32, groups.order.shape[0])
    group = jnp.searchsorted(groups.offsets, at, side="right").astype(jnp.int32) - 1
    return jnp.zeros_like(group).at[groups.order].set(group)


def _block(size: int) -> int:
    """Side of a block: the whole, or a multiple of the lanes."""
    return size if size <= _SIDE else _SIDE


def _inside(x: jax.Array, dim: int, begin: jax.Array, size: int, block: int) -> jax.Array:
    """Zeros for what lies beyond an edge along a dimension."""
    if size % block == 0:
        return x
    return jnp.where(begin + lax.broadcasted_iota(jnp.int32, x.shape, dim) < size, x, jnp.zeros_like(x))


def _dot(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    if 1 in (*x.shape, *y.shape):  # a product with a vector goes element by element, which bfloat16 does not
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    # Mosaic knows two precisions: that of one pass, exact for 16 bits, and that of float32.
    asked = str(jax.config.jax_default_matmul_precision or "default")  # type: ignore[attr-defined]
    exact = x.dtype == jnp.float32 and asked not in ("default", "fastest", "bfloat16")
    return lax.dot_general(
        x, y, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
    )  # fmt: skip


def _product_kernel(
    group: Any, live: Any, a: Any, c: Any, out: Any, total: Any, *, terms: int, block: int, transposes: bool
) -> None:
    del group
    tile, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(live[tile] == 1)
    def _() -> None:
        x = _inside(a[...], 1, step * block, terms, block)
        y = _inside(c[...], 1 if transposes else 0, step * block, terms, block)
        total[...] += _dot(x, y, (1, 1 if transposes else 0))

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def matrices_product(
    a: jax.Array, c: jax.Array, group: jax.Array, live: jax.Array, transposes: bool = False, dtype: Any = None
) -> jax.Array:
    """Multiply each tile by the matrix of its group, `a[t] @ c[group[t]]`.

    Args:
        a: `(T, M, J)`.
        c: `(G, J, K)`; `(G, K, J)` with `transposes`.
        group: of each tile, `(T,)` int32, values in `[0, G)`.
        live: 0 for tiles whose product is zero, `(T,)` int32.
        transposes: whether the matrices' transposes are meant.
        dtype: of the result; None for that of a.

    Returns:
        `(T, M, K)`.
    """
    (tiles, m, j), k = a.shape, c.shape[1 if transposes else 2]
    block_j, block_k = _block(j), _block(k)

    def tile(k: Any, t: Any, j: Any, group: Any, live: Any) -> tuple[Any, ...]:
        return jnp.where(live[t] == 1, t, 0), 0, jnp.where(live[t] == 1, j, 0)  # what is not there fetches no other

    def matrix(k: Any, t: Any, j: Any, group: Any, live: Any) -> tuple[Any, ...]:
        j = jnp.where(live[t] == 1, j, 0)
        return (group[t], k, j) if transposes else (group[t], j, k)

    return _call(
        partial(_product_kernel, terms=j, block=block_j, transposes=transposes),
        (pl.cdiv(k, block_k), tiles, pl.cdiv(j, block_j)),
        [
            pl.BlockSpec((None, m, block_j), tile),
            pl.BlockSpec((None, block_k, block_j) if transposes else (None, block_j, block_k), matrix),
        ],
        pl.BlockSpec((None, m, block_k), lambda k, t, j, group, live: (t, 0, k)),
        jax.ShapeDtypeStruct((tiles, m, k), dtype or a.dtype),
        (m, block_k),
        "planner_grouped_matmul",
    )(group, live, a, c)


def _outer_kernel(group: Any, live: Any, a: Any, b: Any, out: Any, total: Any) -> None:
    tile, last = pl.program_id(2), pl.num_programs(2) - 1

    @pl.when((tile == 0) | (group[tile] != group[jnp.maximum(tile - 1, 0)]))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(live[tile] == 1)
    def _() -> None:
        total[...] += _dot(a[...], b[...], (0, 0))

    @pl.when((tile == last) | (group[tile] != group[jnp.minimum(tile + 1, last)]))
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def matrices_outer(a: jax.Array, b: jax.Array, group: jax.Array, live: jax.Array, size: int) -> jax.Array:
    """Sum `a[t]^T @ b[t]` over the tiles of each group.

    Args:
        a: `(T, M, J)`.
        b: `(T, M, K)`.
        group: of each tile, `(T,)` int32; it never falls, and each group has a tile.
        live: 0 for tiles that are not there, behind all others.
        size: how many groups there are.

    Returns:
        `(size, J, K)`.
    """
    (tiles, m, j), k = a.shape, b.shape[2]
    block_j, block_k = _block(j), _block(k)

    def tile(place: int, j: Any, k: Any, t: Any, group: Any, live: Any) -> tuple[Any, ...]:
        return jnp.where(live[t] == 1, t, 0), 0, (j, k)[place]

    return _call(
        _outer_kernel,
        (pl.cdiv(j, block_j), pl.cdiv(k, block_k), tiles),
        [pl.BlockSpec((None, m, block_j), partial(tile, 0)), pl.BlockSpec((None, m, block_k), partial(tile, 1))],
        pl.BlockSpec((None, block_j, block_k), lambda j, k, t, group, live: (group[t], j, k)),
        jax.ShapeDtypeStruct((size, j, k), a.dtype),
        (block_j, block_k),
        "planner_grouped_outer",
    )(group, live, a, b)


def _call(
    kernel: Callable[..., None], grid: tuple[int, ...], in_specs: list[Any], out_specs: Any, out: Any,
    total: tuple[int, int], name: str,
) -> Callable[..., jax.Array]:  # fmt: skip
    found: Callable[..., jax.Array] = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=grid, in_specs=in_specs, out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(total, jnp.float32)],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=INTERPRET,
        name=name,
    )  # fmt: skip
    return found
