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

from planner.kernels.jax_grouping import Groups

__all__ = ["DTYPES", "Tiles", "cut", "lanes", "put_back", "rows_of_tile", "sublanes", "taken"]

# What the kernels multiply, and rows of a tile's matrix where one row has no more.
DTYPES = ("float32", "bfloat16")
_MOST_ROWS = 256


class Tiles(NamedTuple):
    """The tiles of a grouping.

    Attributes:
        group: group of each tile, `(T,)`; it never falls, and each group has a tile.
        live: 1 for each tile that there is, 0 for those behind the last, `(T,)`.
        slot: row of each slot, `(T, rows)`; the number of rows where a slot has none.
    """

    group: jax.Array
    live: jax.Array
    slot: jax.Array


def sublanes(itemsize: int) -> int:
    """Rows of a matrix that one register of a TPU holds."""
    return 32 // itemsize


def rows_of_tile(rows: int, inner: int, groups: int, itemsize: int) -> int:
    """Return how many rows a tile has: about those of a group, in matrices whose rows fill registers.

    Args:
        rows: how many there are.
        inner: rows of the matrix that one row is.
        groups: how many there are.
        itemsize: bytes of an element.
    """
    least = sublanes(itemsize)
    unit = least // math.gcd(least, inner)
    average = rows / max(1, groups)
    wanted = math.ceil((average + 2 * math.sqrt(average)) / unit) * unit
    return max(unit, min(wanted, max(unit, _MOST_ROWS // max(1, inner) // unit * unit)))


def lanes(rows: int, inner: int, groups: int, itemsize: int) -> int:
    """Return the slots of all tiles."""
    each = rows_of_tile(rows, inner, groups, itemsize)
    return (-(-rows // each) + groups) * each


def cut(groups: Groups, rows: int) -> Tiles:
    """Return the tiles of so many rows; a group without rows has an empty one."""
    count, size = groups.order.shape[0], groups.offsets.shape[0] - 1
    starts, stops = groups.offsets[:-1], groups.offsets[1:]
    tiles = jnp.maximum((stops - starts + (rows - 1)) // rows, 1)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    number = lax.iota(jnp.int32, -(-count // rows) + size)
    group = jnp.minimum(jnp.searchsorted(ends, number, side="right").astype(jnp.int32), size - 1)
    live = number < ends[-1]
    start = starts[group] + (number - (ends - tiles)[group]) * rows
    position = start[:, None] + lax.iota(jnp.int32, rows)
    there = live[:, None] & (position < stops[group][:, None])
    row = groups.order.at[position].get(mode="clip") if count else position
    return Tiles(group, live.astype(jnp.int32), jnp.where(there, row, count))


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
