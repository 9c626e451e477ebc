"""Tile sizes of products on CUDA; they depend on shapes and the card, so equal calls run equal programs."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import NamedTuple

from planner.kernels.tiled_product.measured import measurable

# Alternatives to the default tiles, which `optimize="measure"` times. None of them needs more memory than the default.
TILINGS = ("half tiles", "large tiles", "four stages")
# Terms after which a sum is cut if one walk makes both gradients.
PAIR_TERMS = 1024


class Tiles(NamedTuple):
    """The tiles of one product.

    Attributes:
        m, n, k: sides of a tile: powers of two, at least 16; k is 32 where float32 is multiplied by parts.
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


# The largest tiles, by arithmetic and mode. With them kernels spill no registers on cards from sm_80 to sm_120, and all
# stages fit 99 KiB of shared memory. `tests/kernels/test_triton.py` compiles them; docs/benchmarks/triton.md says how
# many programs run on a multiprocessor at once: one where a side is 128, and of some with 8 warps in float32, float64.
# By parts ("bf16x6") an H200 was up to 1.5 times as fast in larger tiles. `tiles.json` has them for the sizes that were
# measured. At other sizes and strides they spill, on sm_90 too, and Triton 3.6 refuses them on sm_100.
_LARGEST = {
    ("half", "rows"): Tiles(128, 128, 64, warps=8, stages=3),
    ("half", "plain"): Tiles(128, 128, 64, warps=8, stages=3),
    ("half", "terms"): Tiles(128, 128, 64, warps=8, stages=3),
    ("half", "pair"): Tiles(64, 64, 32),
    ("tf32", "rows"): Tiles(128, 128, 32, warps=8),
    ("tf32", "plain"): Tiles(128, 128, 32, warps=8),
    ("tf32", "terms"): Tiles(64, 64, 32),
    ("bf16x6", "rows"): Tiles(64, 64, 32, warps=8),
    ("bf16x6", "plain"): Tiles(64, 64, 32, warps=8, stages=1),
    ("bf16x6", "terms"): Tiles(64, 64, 32, warps=8),
    ("float64", "rows"): Tiles(64, 64, 32),
    ("float64", "plain"): Tiles(64, 64, 32),
    ("float64", "terms"): Tiles(64, 64, 16, stages=3),
    ("float64", "pair"): Tiles(64, 64, 32),
    ("float", "rows"): Tiles(32, 64, 32, warps=2, stages=1),
    ("float", "plain"): Tiles(64, 128, 16, warps=8, stages=3),
    ("float", "terms"): Tiles(64, 64, 16),
    ("double", "rows"): Tiles(32, 64, 16, warps=8),
    ("double", "plain"): Tiles(64, 64, 16, warps=8, stages=3),
    ("double", "terms"): Tiles(32, 64, 16, warps=8),
}
# In place of these on some cards, by the major number of the compute capability. On consumer Blackwell larger tiles
# spill 8 bytes in Triton 3.6 and 3.9; and float64 is 64 times as slow as float32 there, whatever its tiles are.
_LARGEST_ON = {(12, "double", "rows"): Tiles(32, 32, 16, warps=8)}
# Products whose tile holds all terms, on tensor cores: the matrix is read once for all rows of a program.
_ALL_TERMS = {
    ("half", "rows"): Tiles(64, 64, 64, stages=3),
    ("half", "plain"): Tiles(64, 64, 64),
    ("tf32", "rows"): Tiles(64, 64, 64),
    ("tf32", "plain"): Tiles(64, 64, 64),
    ("float64", "rows"): Tiles(32, 64, 64, stages=1),
}
# The most m, n and k if positions are looked up in tables, which takes registers.
_WITH_TABLES = {
    "half": (64, 64, 32), "tf32": (32, 64, 32), "bf16x6": (64, 64, 32), "float64": (64, 64, 32), "float": (32, 64, 16),
    "double": (64, 64, 16),
}  # fmt: skip


def side(size: int, most: int) -> int:
    """Return the smallest power of two that is at least `size`, between 16 and `most`."""
    return max(16, min(most, 1 << max(0, size - 1).bit_length()))


def float32_precision(terms: int, capability: int, card: str, grouped: bool) -> str:
    """Return how the kernels add up products of float32, unless a setting forbids it; see `triton_arithmetic`.

    Args:
        terms: how many products are added up; for a grouped axis, the average.
        capability: the compute capability of a card, times ten.
        card: the name of a card, or of a preset of `planner.Device`.
        grouped: whether rows meet the matrix of their group. Other products were not timed in float64.

    >>> [float32_precision(terms, 80, "NVIDIA A100-SXM4-80GB", True) for terms in (255, 256)]
    ['ieee', 'bf16x6']
    """
    words = card.lower().replace("-", " ").split()
    if grouped and capability == 90 and _multiplies_float64() and not _FLOAT64_CARDS.isdisjoint(words):
        return "float64"
    # By their data sheets the tensor cores of these cards multiply bfloat16 over ten times as fast as other units
    # multiply float32. On other cards, such as an L40S, six products take longer than one. Shorter sums are more
    # accurate in float32.
    return "bf16x6" if terms >= 256 and capability in (80, 90, 100, 103) else "ieee"


# Cards whose tensor cores multiply float64 as fast as other units multiply float32. Others of the same compute
# capability, an H20 and an H800, are sixty times slower.
_FLOAT64_CARDS = frozenset(("h100", "h200"))


@functools.cache
def _multiplies_float64() -> bool:
    """Whether Triton forms products of float64 in the largest instructions of a Hopper card, of 16 x 8 x 16.

    Triton 3.8 and 3.9 take those of 8 x 8 x 4, which reach two thirds of the rate (Triton's pull request 10313).
    """
    return triton_version().startswith(("3.6.", "3.7."))


@functools.cache
def triton_version() -> str:
    """Return the version of Triton that is installed; "" without it. Tiles and prices depend on it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def covers_pair(j: int, k: int, itemsize: int, precision: str) -> bool:
    """Whether one walk over the rows makes both gradients: where a program holds a matrix and its gradient.

    On an H200 one walk takes 43 us in bfloat16 where two products take 54 (2,048 matrices of 64 x 64), and 108 us in
    float32 on the tensor cores of float64 where they take 120. Without these it takes 255 us where they take 172.
    """
    return (itemsize == 2 or precision == "float64") and 0 < j <= 64 and 0 < k <= 64


@measurable
def tiles_of(
    mode: str,
    m: int,
    n: int,
    k: int,
    itemsize: int,
    precision: str = "ieee",
    tables: bool = False,
    tiling: str = "",
    capability: int = 0,
) -> Tiles:
    """Choose the tiles of a product from `_LARGEST`, smaller where the product is, see docs/benchmarks/triton.md.

    Args:
        mode: as in `triton_product`; or "pair" for `triton_pair`.
        m: size of the axis m; for a grouped axis, a group's average size.
        n: size of the axis n.
        k: size of the axis k; for a grouped axis, a group's average size.
        itemsize: bytes of an element.
        precision: how float32 is multiplied, see `triton_arithmetic`.
        tables: whether positions are looked up in tables.
        tiling: "" for the default, or one of `TILINGS`.
        capability: the compute capability of the card, times ten; 0 on AMD.
    """
    kind = {2: "half", 4: "float" if precision == "ieee" else precision, 8: "double"}[itemsize]
    most = _LARGEST_ON.get((capability // 10, kind, mode), _LARGEST[kind, mode])
    if k <= 64:
        most = _ALL_TERMS.get((kind, mode), most)
    sides = [most.m, most.n, most.k]
    if tables and mode != "pair":
        sides = list(map(min, sides, _WITH_TABLES[kind]))
    block_m, block_n, block_k = map(side, (m, n, k), sides)
    if block_m != block_n and most.m == most.n:  # a side of 128 needs the other one
        block_m, block_n = min(block_m, 64), min(block_n, 64)
    if tiling == "half tiles":
        if mode == "pair":
            block_k = max(16, block_k // 2)
        elif block_m >= block_n:
            block_m = max(16, block_m // 2)
        else:
            block_n = max(16, block_n // 2)
    if tiling == "large tiles" and block_m == block_n == 128 and itemsize == 2:
        block_m = 256
    # A program that holds a matrix reads it once for up to 256 rows of its group, or for 1,024 if it makes the matrix's
    # gradient too. Other programs have one tile of rows. Sums are cut after 4,096 terms.
    chunk = {
        "rows": 256 // block_m if k <= most.k and (kind, mode) in _ALL_TERMS else 1,
        "pair": PAIR_TERMS // block_k,
        "terms": 4096 // block_k,
        "plain": 1,
    }[mode]
    warps = most.warps if 2 * block_m * block_n >= most.m * most.n else min(most.warps, 4)
    return Tiles(block_m, block_n, block_k, chunk, warps, 4 if tiling == "four stages" else most.stages)
