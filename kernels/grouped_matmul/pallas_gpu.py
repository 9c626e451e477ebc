"""Products of tiles with the matrix of their group on NVIDIA's Hopper GPUs, by Pallas for Mosaic.

`pallas_grouped` cuts the tiles. One program multiplies a block of a tile's rows by a block of its matrix's columns, or
sums a block of one group's outer products over the group's tiles. The next blocks are copied to shared memory while the
current ones are multiplied. Sizes that are not a multiple of a block are padded with zeros. Sums are in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from planner.kernels.grouped_matmul import jax_grouped
from planner.kernels.grouped_matmul.pallas_grouped import Platform
from planner.kernels.grouped_matmul.pallas_tiles import GPU, RowTiles

# A block has 64 terms, and its rows and columns are multiples of 64: a swizzled row of shared memory holds 64 numbers
# of 16 bits. A program holds at most 128 by 128 sums, in 128 registers of each thread.
_UNIT, _MOST = 64, 128
# Blocks in flight. They take at most 32 kB of shared memory each for both operands, and the result 64 kB, of 227 kB.
_STAGES = 4
# The axes of the grid, the slowest first. Programs that run at a time should share what they read: those of one tile
# read the same rows, and those of one group the same matrix.
GRID = "tile", "row", "column"
# The `interpret` argument of the kernels; tests set it.
INTERPRET: Any = None


def _pad(x: jax.Array) -> jax.Array:
    """Pad matrices with zeros at the end of both dimensions, to multiples of a block."""
    return jnp.pad(x, [(0, 0), *((0, -size % _UNIT) for size in x.shape[1:])])


def _block(size: int) -> int:
    return _MOST if size % _MOST == 0 else _UNIT


def matrices_product(
    a: jax.Array, c: jax.Array, group: jax.Array, live: jax.Array, transposes: bool = False, dtype: Any = None
) -> jax.Array:
    """Multiply each tile by the matrix of its group; see `pallas_tpu.matrices_product`."""
    m, k, dtype = a.shape[1], c.shape[1 if transposes else 2], jnp.dtype(dtype or a.dtype)
    # Transposed matrices are copied: JAX's interpreter reads no transposed blocks, so no test could cover those.
    a, c = _pad(a), _pad(jnp.swapaxes(c, 1, 2) if transposes else c)
    (tiles, long, j), wide = a.shape, c.shape[2]
    rows, columns = _block(long), _block(wide)

    sizes = {"tile": tiles, "row": long // rows, "column": wide // columns}

    def body(group: Any, live: Any, a: Any, c: Any, out: Any, block: Any) -> None:
        tile, row, column = _place(sizes)
        # A tile behind the last has no terms: its product is zero.
        total = _sum_of_products(
            (live[tile] * (j // _UNIT), rows, columns),
            plgpu.BlockSpec((rows, _UNIT), lambda step: (row, step), delay_release=1),
            plgpu.BlockSpec((_UNIT, columns), lambda step: (step, column), delay_release=1),
        )(a.at[tile], c.at[group[tile]])
        _store(total, block, out.at[tile, pl.ds(row * rows, rows), pl.ds(column * columns, columns)])

    shape = jax.ShapeDtypeStruct((tiles, long, wide), dtype)
    return _call(body, shape, sizes, (rows, columns), "planner_grouped_matmul")(group, live, a, c)[:, :m, :k]


def matrices_outer(a: jax.Array, b: jax.Array, of: RowTiles) -> jax.Array:
    """Sum `a[t]^T @ b[t]` over the tiles of each group; see `pallas_tpu.matrices_outer`."""
    j, k, size = a.shape[2], b.shape[2], of.starts.shape[0] - 1
    a, b = _pad(a), _pad(b)
    parts, tall, wide = a.shape[1] // _UNIT, a.shape[2], b.shape[2]
    rows, columns = _block(tall), _block(wide)

    sizes = {"tile": size, "row": tall // rows, "column": wide // columns}

    def body(starts: Any, a: Any, b: Any, out: Any, block: Any) -> None:
        group, row, column = _place(sizes)
        first = starts[group] * parts
        total = _sum_of_products(
            (starts[group + 1] * parts - first, rows, columns),
            plgpu.BlockSpec((rows, _UNIT), lambda step: (row, first + step), delay_release=1),
            plgpu.BlockSpec((_UNIT, columns), lambda step: (first + step, column), delay_release=1),
        )(a, b)
        _store(total, block, out.at[group, pl.ds(row * rows, rows), pl.ds(column * columns, columns)])

    shape = jax.ShapeDtypeStruct((size, tall, wide), a.dtype)
    # Left factors are copied too: the kernel reads them with the terms along rows.
    left, right = jnp.swapaxes(a.reshape(-1, tall), 0, 1), b.reshape(-1, wide)
    return _call(body, shape, sizes, (rows, columns), "planner_grouped_outer")(of.starts, left, right)[:, :j, :k]


def _sum_of_products(sizes: tuple[Any, int, int], *in_specs: Any) -> Callable[..., Any]:
    """Return a function that sums the products of two blocks over steps; `sizes` are steps, rows and columns."""
    steps, rows, columns = sizes

    def run(*arrays: Any) -> Any:
        def accumulate(total: Any) -> Any:
            def add(_: Any, x: Any, y: Any) -> None:
                plgpu.wgmma(total, x, y)
                plgpu.wgmma_wait(1)  # wait for the previous product: the pipeline fills its blocks again

            plgpu.emit_pipeline(add, grid=(steps,), in_specs=in_specs, max_concurrent_steps=_STAGES)(*arrays)
            return total[...]

        return pl.run_scoped(accumulate, plgpu.ACC((rows, columns)))  # type: ignore[attr-defined]

    return run


def _place(sizes: dict[str, int]) -> tuple[Any, ...]:
    """Return a program's place on each axis of the grid, in the order of `sizes`."""
    number, places = lax.axis_index("program"), {}
    for name in reversed(GRID):
        places[name], number = lax.rem(number, jnp.int32(sizes[name])), lax.div(number, jnp.int32(sizes[name]))
    return tuple(places[name] for name in sizes)


def _store(total: Any, block: Any, out: Any) -> None:
    """Write sums to the output, through shared memory."""
    block[...] = total.astype(block.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(block, out)
    plgpu.wait_smem_to_gmem(0)


def _call(
    body: Callable[..., None], out: Any, sizes: dict[str, int], block: tuple[int, int], name: str
) -> Callable[..., jax.Array]:
    """Return the kernel. Its programs have one number: a card takes 2^31 along one axis, and 65,535 along others."""
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=out,
        grid=(math.prod(sizes.values()),),
        grid_names=("program",),
        scratch_types=[plgpu.SMEM(block, out.dtype)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=INTERPRET,
        kernel_name=name,
    )
    return kernel


KERNELS = Platform(GPU, matrices_product, matrices_outer, jax_grouped.CARD)
