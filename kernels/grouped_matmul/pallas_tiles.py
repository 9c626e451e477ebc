"""Rows cut into tiles that lie within one group, for kernels whose grid is as large as any index array could make it.

    sorted rows   | group 0     | group 1 | group 3          |
    tiles         [ 0:0  ][ 0:1 ][ 1:0   ][ 2  ][ 3:0  ][ 3:1  ][ none ]

Each tile has a slot for each of its rows. A slot without one names the row behind the last: reading it gives zeros,
writing it nothing. Shapes are static and no value leaves the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from planner.kernels.grouping.jax_grouping import Groups

__all__ = ["GPU", "TPU", "Shape", "Tiles", "cut", "most_tiles", "put_back", "taken"]


class Shape(NamedTuple):
    """What the tiles of a platform are like.

    Attributes:
        dtypes: what its kernels multiply.
        unit: what the rows of a tile's matrix are a multiple of, as bytes of one column.
        most: rows of a tile's matrix, where one row has no more.
        limit: rows of a tile's matrix at all.
        tiles: how many tiles there may be.
        empty: whether the sum of a group without rows is written by a tile of its own.
    """

    dtypes: tuple[str, ...]
    unit: int
    most: int
    limit: int
    tiles: int
    empty: bool

    def rows(self, rows: int, inner: int, groups: int, itemsize: int) -> int:
        """Return how many rows a tile has: about those of a group, in matrices that the platform multiplies.

        Args:
            rows: how many there are.
            inner: rows of the matrix that one row is.
            groups: how many there are.
            itemsize: bytes of an element.
        """
        least = self.unit // itemsize
        unit = least // math.gcd(least, inner)
        average = rows / max(1, groups)
        wanted = math.floor((average + 2 * math.sqrt(average)) / unit) * unit
        return max(unit, min(wanted, max(unit, self.most // max(1, inner) // unit * unit)))

    def takes(
        self, rows: int, inner: int, groups: int, left: int, right: int, dtype: str, sums: bool = True
    ) -> bool:  # fmt: skip
        """Whether there is something to multiply of a dtype that the kernels take, and memory holds the tiles.

        Args:
            rows: how many there are.
            inner: rows of the matrix that one row is.
            groups: how many there are.
            left: columns of the rows.
            right: columns of the results.
            dtype: of all.
            sums: whether the groups' sums are wanted.
        """
        if dtype not in self.dtypes or 0 in (rows, inner, groups, left, right):
            return False
        each = self.rows(rows, inner, groups, jnp.dtype(dtype).itemsize)
        return each * inner <= self.limit and most_tiles(rows, each, groups, sums and self.empty) <= self.tiles

    def is_tile(self, rows: int, inner: int, itemsize: int) -> bool:
        """Whether the matrix that one row is makes a tile of its own, which needs no move."""
        least = self.unit // itemsize
        return 4 * least <= inner and inner % least == 0 and rows <= self.tiles


# A register of a TPU holds 8 rows of 32 bits. The groups of so many tiles take half of the 1 MB of a v5e's memory of
# scalars; a tile's rows, see the blocks of `planner.kernels.grouped_matmul.pallas_tpu`.
TPU = Shape(("float32", "bfloat16"), 32, 256, 512, 2**16, empty=True)
# A warpgroup of a GPU multiplies 64 rows of 16 bits by a matrix; it takes any number of them, one after another.
GPU = Shape(("bfloat16", "float16"), 128, 128, 2**30, 2**30, empty=False)


def most_tiles(rows: int, each: int, groups: int, empty: bool = True) -> int:
    """Return how many tiles there are at most.

    A group of m > 0 rows has `1 + (m - 1) // each` tiles. Those behind the first are most where one group has all rows
    (with `empty`, which gives a group without rows a tile too), or all but one row for each other group.

    Args:
        rows: how many there are.
        each: rows of a tile.
        groups: how many there are.
        empty: whether a group without rows has a tile.
    """
    if empty:
        return groups + max(0, rows - 1) // each
    named = min(groups, rows)
    return named + (rows - named) // each


class Tiles(NamedTuple):
    """The tiles of a grouping.

    Attributes:
        group: group of each tile, `(T,)`; it never falls.
        live: 1 for each tile that there is, 0 for those behind the last, `(T,)`.
        slot: row of each slot, `(T, rows)`; the number of rows where a slot has none.
        starts: tiles before each group, and all that there are, `(G + 1,)`.
    """

    group: jax.Array
    live: jax.Array
    slot: jax.Array
    starts: jax.Array


def cut(groups: Groups, rows: int, empty: bool = True) -> Tiles:
    """Return the tiles of so many rows; with `empty` a group without rows has one too."""
    count, size = groups.order.shape[0], groups.offsets.shape[0] - 1
    starts, stops = groups.offsets[:-1], groups.offsets[1:]
    tiles = jnp.maximum((stops - starts + (rows - 1)) // rows, int(empty))
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    number = lax.iota(jnp.int32, most_tiles(count, rows, size, empty))
    group = jnp.minimum(jnp.searchsorted(ends, number, side="right").astype(jnp.int32), size - 1)
    live = number < ends[-1]
    start = starts[group] + (number - (ends - tiles)[group]) * rows
    position = start[:, None] + lax.iota(jnp.int32, rows)
    there = live[:, None] & (position < stops[group][:, None])
    row = groups.order.at[position].get(mode="clip") if count else position
    before = jnp.concatenate([ends - tiles, ends[-1:]])
    return Tiles(group, live.astype(jnp.int32), jnp.where(there, row, count), before)


def taken(x: jax.Array, slot: jax.Array, source: jax.Array | None = None) -> jax.Array:
    """Return the rows `(N, I, J)` of each tile as one matrix, `(T, rows * I, J)`; zeros where a slot has none.

    Args:
        x: rows.
        slot: as in `Tiles`.
        source: which row of x a row is; None where it is the row itself.
    """
    if source is not None:
        slot = source.at[slot].get(mode="fill", fill_value=x.shape[0])
    found = x.at[slot].get(mode="fill", fill_value=0)
    return found.reshape(slot.shape[0], slot.shape[1] * x.shape[1], x.shape[2])


def put_back(tiled: jax.Array, slot: jax.Array, rows: int, inner: int) -> jax.Array:
    """Return the row of each slot `(T, rows * I, K)` at its place, `(N, I, K)`; rows without a slot are zero."""
    flat = slot.reshape(-1)
    place = jnp.full(rows, flat.shape[0], jnp.int32).at[flat].set(lax.iota(jnp.int32, flat.shape[0]), mode="drop")
    values = tiled.reshape(flat.shape[0], inner, tiled.shape[2])
    return values.at[place].get(mode="fill", fill_value=0)
