"""Products of tiles with the matrix of their group on TPUs, by Pallas; `pallas_grouped` cuts the tiles.

The kernel fetches a tile's matrix by its group, from a table that is prefetched before the grid starts. Sums are in
float32. Values beyond the edge of an array are replaced by zeros on both sides, because they may be NaN.
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

from planner.kernels.grouped_matmul import jax_grouped
from planner.kernels.grouped_matmul.pallas_grouped import Platform
from planner.kernels.grouped_matmul.pallas_tiles import TPU, RowTiles

# Side of a block of a large matrix: with tiles of 512 rows, buffers take 7 MB of a v5e's 16 MB.
_SIDE = 512
# The `interpret` argument of the kernels; tests set it.
INTERPRET: Any = False


def _block(size: int) -> int:
    """Return the side of a block: the whole dimension, or a multiple of the lanes."""
    return size if size <= _SIDE else _SIDE


def _inside(x: jax.Array, dim: int, begin: jax.Array, size: int, block: int) -> jax.Array:
    """Replace the values beyond the edge of a dimension by zeros."""
    if size % block == 0:
        return x
    if 1 in x.shape:  # Mosaic cannot select within a vector of bfloat16
        x = x.astype(jnp.float32)
    return jnp.where(begin + lax.broadcasted_iota(jnp.int32, x.shape, dim) < size, x, jnp.zeros_like(x))


def _dot(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    if 1 in (*x.shape, *y.shape):  # Mosaic multiplies a vector element by element, which it cannot do in bfloat16
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    # Mosaic knows two precisions: one pass, which is exact for 16 bits, and float32.
    asked = str(jax.config.jax_default_matmul_precision or "default")  # type: ignore[attr-defined]
    exact = x.dtype == jnp.float32 and asked not in ("default", "fastest", "bfloat16")
    return lax.dot_general(
        x,
        y,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
    )


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
        transposes: whether to multiply by the transposed matrices.
        dtype: dtype of the result; None for the dtype of a.

    Returns:
        `(T, M, K)`.
    """
    (tiles, m, j), k = a.shape, c.shape[1 if transposes else 2]
    block_j, block_k = _block(j), _block(k)

    def tile(k: Any, t: Any, j: Any, group: Any, live: Any) -> tuple[Any, ...]:
        # An unused tile keeps to one block, so that nothing new is fetched for it.
        return jnp.where(live[t] == 1, t, 0), 0, jnp.where(live[t] == 1, j, 0)

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
        jax.ShapeDtypeStruct((tiles, m, k), dtype or a.dtype, manual_axis_type=jax.typeof(a).mat),
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


def matrices_outer(a: jax.Array, b: jax.Array, of: RowTiles) -> jax.Array:
    """Sum `a[t]^T @ b[t]` over the tiles of each group.

    Args:
        a: `(T, M, J)`.
        b: `(T, M, K)`.
        of: the tiles.

    Returns:
        `(G, J, K)`.
    """
    (tiles, m, j), k, size = a.shape, b.shape[2], of.starts.shape[0] - 1
    block_j, block_k = _block(j), _block(k)

    def tile(place: int, j: Any, k: Any, t: Any, group: Any, live: Any) -> tuple[Any, ...]:
        return jnp.where(live[t] == 1, t, 0), 0, (j, k)[place]

    return _call(
        _outer_kernel,
        (pl.cdiv(j, block_j), pl.cdiv(k, block_k), tiles),
        [pl.BlockSpec((None, m, block_j), partial(tile, 0)), pl.BlockSpec((None, m, block_k), partial(tile, 1))],
        pl.BlockSpec((None, block_j, block_k), lambda j, k, t, group, live: (group[t], j, k)),
        jax.ShapeDtypeStruct((size, j, k), a.dtype, manual_axis_type=jax.typeof(a).mat),
        (block_j, block_k),
        "planner_grouped_outer",
    )(of.group, of.live, a, b)


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    in_specs: list[Any],
    out_specs: Any,
    out: Any,
    total: tuple[int, int],
    name: str,
) -> Callable[..., jax.Array]:
    """Return the call of a kernel; `total` is the shape of its float32 sums."""
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(total, jnp.float32)],
    )
    call: Callable[..., jax.Array] = pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=out,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=INTERPRET,
        name=name,
    )
    return call


KERNELS = Platform(TPU, matrices_product, matrices_outer, jax_grouped.CPU)
