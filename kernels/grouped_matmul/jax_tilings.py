"""How many rows the tiles of stock XLA have, and how many a step of the loop takes, on CPUs and on a graphics card."""

import math
from collections.abc import Callable
from typing import NamedTuple

from planner.kernels.grouping.jax_grouping import MANY_PAIRS, most_tiles

TILE_ROWS = 256  # most rows of a tile's matrix
LANES = 8  # rows per tile are a multiple of this
STEP_NUMBERS = 2**19  # numbers that a step reads and writes: 2 MB of float32
MAX_TILES = 64
CARD_ROWS = 256  # most rows of a tile's matrix on a card
CARD_STEP_BYTES = 3 * 2**23  # the factors and the product of a step on a card: 512 tiles of 64 rows by 64 x 64
CARD_STEP_PART = 8  # the same, as a part of operands and result, if that is more
PART_NUMBERS = 2**21  # the same as STEP_NUMBERS, if a step takes all tiles of one of several devices
LANE_BYTES = 2**16  # most bytes of a result that is stored lane after lane: larger ones take longer so than scattered


class Tiling(NamedTuple):
    """How many rows a tile has, and how a loop takes tiles.

    Attributes:
        rows: Rows per tile.
        tiles: Tiles per step.
        steps: Steps of the loop; None if it ends after the last tile that has rows.
        on_card: Whether they are made for a card.
    """

    rows: int
    tiles: int
    steps: int | None = None
    on_card: bool = False

    @property
    def whole(self) -> bool:
        """Whether one step on a CPU takes all tiles, without a loop."""
        return self.steps == 1 and not self.on_card

    def in_lanes(self, lane_bytes: int) -> bool:
        """Whether a result is stored lane after lane, in so many bytes."""
        return self.whole or (not self.on_card and lane_bytes <= LANE_BYTES)


# From the sizes (N, I, G, J, K) and the bytes of a number to the tiles.
TilingOf = Callable[[tuple[int, ...], int], Tiling]


def tiling(sizes: tuple[int, ...], itemsize: int = 4) -> Tiling:
    """Choose the tiles on a CPU for N rows `(I, J)` or `(I, K)` and G matrices `(J, K)`.

    A tile should hold a whole group, but lanes beyond the group's end are multiplied in vain. So a tile has the average
    number of rows plus two standard deviations, as if rows chose their groups independently. A step takes as many tiles
    as stay in the cache.
    """
    rows, size_i, groups, size_j, size_k = sizes
    average = rows / max(groups, 1)
    whole_group = math.ceil((average + 2 * math.sqrt(average)) / LANES) * LANES
    tile_rows = max(1, min(whole_group, max(TILE_ROWS // max(size_i, 1), 1), rows))
    tile_numbers = tile_rows * size_i * (size_j + size_k) + size_j * size_k
    tiles = max(1, min(STEP_NUMBERS // max(tile_numbers, 1), MAX_TILES, -(-rows // tile_rows)))
    return Tiling(tile_rows, tiles)


def part_tiling(sizes: tuple[int, ...], itemsize: int = 4) -> Tiling:
    """Choose the tiles of one of several devices on a CPU, so that a program with many layers compiles fast.

    If few numbers are read and written, one step takes all tiles. Then there is no loop to compile, and no scatter of
    rows: XLA compiles kernels that are alike once, but a scatter for each layer. The program takes 0.9
    to 1.6 times as long to run as one with a loop, and up to 3 times with few rows in many groups, such as 1,024 rows
    in 100 (512 to 4,096 rows by 16 x 16, 2-core AMD EPYC, 2026-11-25).
    """
    rows, size_i, groups, size_j, size_k = sizes
    tile_rows = max(1, min(math.ceil(_best_rows(sizes) / LANES) * LANES // max(size_i, 1), rows))
    tiles = max(1, most_tiles(rows, tile_rows, groups, empty=False))
    numbers = tiles * (tile_rows * size_i * (size_j + size_k) + size_j * size_k)
    if numbers > PART_NUMBERS or groups * max(groups, tiles) > MANY_PAIRS:
        return tiling(sizes, itemsize)
    return Tiling(tile_rows, tiles, 1)


def card_tiling(sizes: tuple[int, ...], itemsize: int = 4) -> Tiling:
    """Choose the tiles on a graphics card for N rows `(I, J)` or `(I, K)` and G matrices `(J, K)`.

    A step should take so many tiles that its launches do not matter, but few next to what is in memory anyway.
    """
    rows, size_i, groups, size_j, size_k = sizes
    matrix_rows = min(CARD_ROWS, 1 << max(3, math.ceil(math.log2(max(_best_rows(sizes), 1)))))
    tile_rows = max(1, min(matrix_rows // max(size_i, 1), rows))
    most = max(1, most_tiles(rows, tile_rows, groups, empty=False))
    tile_numbers = tile_rows * size_i * (size_j + size_k) + size_j * size_k
    all_numbers = rows * size_i * (size_j + size_k) + groups * size_j * size_k
    step_numbers = max(CARD_STEP_BYTES // itemsize, all_numbers // CARD_STEP_PART)
    steps = -(-most // max(1, step_numbers // max(tile_numbers, 1)))
    return Tiling(tile_rows, -(-most // steps), steps, on_card=True)


def _best_rows(sizes: tuple[int, ...]) -> float:
    """Return how many rows the matrix of a tile should have, if all tiles are padded.

    Let a group have m rows `(J,)` and a tile r. Padding the group's last tile moves up to `r (J + K)` numbers, and
    taking the matrices of its tiles moves `m / r J K`. The sum is least if r is the square root of `m J K / (J + K)`.
    """
    rows, size_i, groups, size_j, size_k = sizes
    average = rows * size_i / max(min(groups, rows), 1)
    return math.sqrt(average * size_j * size_k / max(size_j + size_k, 1))
