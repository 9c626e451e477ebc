"""Tile sizes of products on CUDA; they depend on shapes alone, so equal calls run equal programs."""

from __future__ import annotations

import dataclasses

from planner.kernels.tiled_product.measured import measurable

__all__ = ["PAIR_TERMS", "TILINGS", "Tiles", "covers_pair", "tiles_of"]

# Alternatives to the default tiles, which `optimize="measure"` times. None of them needs more memory than the default.
TILINGS = ("half tiles", "four stages")
# Terms after which a sum is cut if one walk makes both gradients.
PAIR_TERMS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one product.

    Attributes:
        m, n, k: sides of a tile: powers of two, at least 16.
        chunk: tiles along the grouped axis per program.
        warps: warps per program.
        stages: stages of the loads' software pipeline.
    """

    m: int
    n: int
    k: int
    chunk: int = 1
    warps: int = 4
    stages: int = 2


def side(size: int, most: int) -> int:
    """Return the smallest power of two that is at least `size`, between 16 and `most`."""
    return max(16, min(most, 1 << max(0, size - 1).bit_length()))


def covers_pair(j: int, k: int) -> bool:
    """Whether one program can hold a matrix and its gradient, so that one walk over the rows makes both gradients."""
    return 0 < j <= 64 and 0 < k <= 64


@measurable
def tiles_of(
    mode: str, m: int, n: int, k: int, itemsize: int, fma: bool = False, tables: bool = False, tiling: str = ""
) -> Tiles:
    """Choose the largest tiles with which no registers spill to memory, see docs/benchmarks/triton.md.

    Args:
        mode: as in `triton_product`; or "pair" for `triton_pair`.
        m: size of the axis m; for a grouped axis, a group's average size.
        n: size of the axis n.
        k: size of the axis k; for a grouped axis, a group's average size.
        itemsize: bytes of an element.
        fma: whether elements are multiplied one by one, as in float32 without tf32.
        tables: whether positions are looked up in tables, which takes registers for addresses.
        tiling: "" for the default, or one of `TILINGS`.
    """
    most = 128 if itemsize == 2 and not tables and mode != "pair" else 64
    most_k = {2: 64, 4: 16 if fma else 32, 8: 16}[itemsize]
    block_m, block_n, block_k = (
        side(m, 32 if fma and tables and mode != "pair" else most),
        side(n, most),
        side(k, min(32, most_k) if tables else most_k),
    )
    if block_m == block_n == 128:
        block_k = min(32, block_k)
    if tiling == "half tiles":
        if mode == "pair":
            block_k = max(16, block_k // 2)
        elif block_m >= block_n:
            block_m = max(16, block_m // 2)
        else:
            block_n = max(16, block_n // 2)
    many = 32 * 64 if (fma and tables) or mode == "pair" else 64 * 64 if itemsize > 2 or tables else 128 * 64
    warps = 8 if block_m * block_n >= many or max(block_m, block_n) == 128 else 4
    # A program reads one matrix for up to 512 rows of its group, or for 1,024 if it makes the matrix's gradient too.
    # Sums are cut after 4,096 terms.
    chunk = {"rows": 512 // block_m, "pair": PAIR_TERMS // block_k, "terms": 4096 // block_k, "plain": 1}[mode]
    stages = 4 if tiling == "four stages" else 3 if (fma and not tables) or itemsize == 8 else 2
    return Tiles(block_m, block_n, block_k, chunk, warps, stages)
