"""Cut rows into tiles that lie within one group, for kernels whose grid covers the largest number of tiles possible.

    sorted rows   | group 0     | group 1 | group 3          |
    tiles         [ 0:0  ][ 0:1 ][ 1:0   ][ 2  ][ 3:0  ][ 3:1  ][ none ]

Each tile has a fixed number of slots, one per row. An empty slot names the row behind the last: reading it gives zeros,
and writing it changes nothing. Shapes are static, and no value leaves the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from planner.kernels.grouping.jax_grouping import Groups, cut_groups, most_tiles


class Shape(NamedTuple):
    """The limits of a platform's tiles.

    Attributes:
        dtypes: the dtypes that its kernels multiply.
        unit: the rows of a tile's matrix are a multiple of this, counted in bytes of one column.
        most: most rows of a tile's matrix that tiles of several rows may have.
        limit: most rows of a tile's matrix that any tile may have.
        tiles: most tiles.
        empty: whether a group without rows needs a tile, which writes that group's sum.
    """

    dtypes: tuple[str, ...]
    unit: int
    most: int
    limit: int
    tiles: int
    empty: bool

    def rows(self, rows: int, inner: int, groups: int, itemsize: int) -> int:
        """Return how many rows a tile has: about as many as a group, rounded to matrices that the platform multiplies.

        Args:
            rows: number of rows.
            inner: each row is a matrix with this many rows.
            groups: number of groups.
            itemsize: bytes of an element.
        """
        least = self.unit // itemsize
        unit = least // math.gcd(least, inner)
        average = rows / max(1, groups)
        wanted = math.floor((average + 2 * math.sqrt(average)) / unit) * unit
        return max(unit, min(wanted, max(unit, self.most // max(1, inner) // unit * unit)))

    def takes(
        self,
        rows: int,
        inner: int,
        groups: int,
        left: int,
        right: int,
        dtype: str,
        sums: bool = True,
    ) -> bool:
        """Whether the kernels take the problem: it is not empty, they multiply its dtype, and the tiles fit in memory.

        Args:
            rows: number of rows.
            inner: each row is a matrix with this many rows.
            groups: number of groups.
            left: columns of the rows.
            right: columns of the results.
            dtype: dtype of all operands.
            sums: whether the groups' sums are wanted.
        """
        if dtype not in self.dtypes or 0 in (rows, inner, groups, left, right):
            return False
        each = self.rows(rows, inner, groups, jnp.dtype(dtype).itemsize)
        return each * inner <= self.limit and most_tiles(rows, each, groups, sums and self.empty) <= self.tiles

    def is_tile(self, rows: int, inner: int, itemsize: int) -> bool:
        """Whether a single row is large enough to be a tile, so that no row has to be moved."""
        least = self.unit // itemsize
        return 4 * least <= inner and inner % least == 0 and rows <= self.tiles


# A register of a TPU holds 8 rows of 32 bits. The group numbers of 2^16 tiles take half of a v5e's scalar memory of
# 1 MB. For the rows of a tile, see the blocks of `planner.kernels.grouped_matmul.pallas_tpu`.
TPU = Shape(("float32", "bfloat16"), 32, 256, 512, 2**16, empty=True)
# A warpgroup of a GPU multiplies 64 rows of 16 bits by a matrix, and takes any number of tiles one after another.
GPU = Shape(("bfloat16", "float16"), 128, 128, 2**30, 2**30, empty=False)


class RowTiles(NamedTuple):
    """The tiles of a grouping.

    Attributes:
        group: group of each tile, `(T,)`, in rising order.
        live: 1 for each tile of a group, 0 for the unused tiles behind the last, `(T,)`.
        slot: row in each slot, `(T, rows)`; an empty slot holds the number of all rows.
        starts: number of tiles before each group, and of all tiles, `(G + 1,)`.
    """

    group: jax.Array
    live: jax.Array
    slot: jax.Array
    starts: jax.Array


def cut(groups: Groups, rows: int, empty: bool = True) -> RowTiles:
    """Cut the groups into tiles of `rows` rows; with `empty`, a group without rows has a tile too."""
    count, size = groups.order.shape[0], groups.offsets.shape[0] - 1
    most = most_tiles(count, rows, size, empty)
    tiles = cut_groups(groups, rows, most, empty)
    position = tiles.start[:, None] + lax.iota(jnp.int32, rows)
    row = groups.order.at[position].get(mode="clip") if count else position
    slot = jnp.where(position < tiles.stop[:, None], row, count)
    live = lax.iota(jnp.int32, most) < tiles.firsts[-1]
    return RowTiles(tiles.group, live.astype(jnp.int32), slot, tiles.firsts)


def gather_rows(x: jax.Array, slot: jax.Array, source: jax.Array | None = None) -> jax.Array:
    """Gather the rows of each tile into one matrix, `(T, rows * I, J)`; empty slots are zero.

    Args:
        x: rows `(N, I, J)`.
        slot: as in `RowTiles`.
        source: the place of each row in x; None if row r is `x[r]`.
    """
    if source is not None:
        slot = source.at[slot].get(mode="fill", fill_value=x.shape[0])
    rows = x.at[slot].get(mode="fill", fill_value=0)
    return rows.reshape(slot.shape[0], slot.shape[1] * x.shape[1], x.shape[2])


def put_back(tiled: jax.Array, slot: jax.Array, rows: int, inner: int) -> jax.Array:
    """Move the rows in the slots, `(T, rows * I, K)`, to their places in `(N, I, K)`; rows without a slot are zero."""
    flat = slot.reshape(-1)
    place = jnp.full(rows, flat.shape[0], jnp.int32).at[flat].set(lax.iota(jnp.int32, flat.shape[0]), mode="drop")
    values = tiled.reshape(flat.shape[0], inner, tiled.shape[2])
    return values.at[place].get(mode="fill", fill_value=0)
