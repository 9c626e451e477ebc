"""Rows sorted by group, in JAX.

Everything here has static shapes and runs under ``jax.jit``: no value leaves the device.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from planner.language import dtypes

UINT32_BITS = 32
# The most pairs of numbers that are compared instead of searched for: XLA compiles one loop in place of a dozen.
FEW_PAIRS = 1 << 14
# The same where a program should be compiled fast rather than run fast.
MANY_PAIRS = 1 << 18
# The method that compares all pairs, if these are not more, with few loops.
COMPARE = "compare"
# XLA on a CPU sums more numbers than this along a dimension in two loops.
_SUMMED = 32


class Groups(NamedTuple):
    """Rows sorted by their group; a pytree, so it can pass through ``jit`` and ``scan``.

    Attributes:
        order: Row numbers `(N,)`, int32, group after group, rising within a group; dropped rows come last.
        offsets: Where each group starts in `order`, `(groups + 1,)`, int32; the last entry counts the kept rows.
    """

    order: jax.Array
    offsets: jax.Array


def group_rows(index: jax.Array, size: int, search: str = "scan") -> Groups:
    """Sort the rows by the group that `index` gives them.

    >>> import jax.numpy as jnp
    >>> group_rows(jnp.array([1, 0, 2, 1]), size=2)  # row 2 is dropped
    Groups(order=Array([1, 0, 3, 2], dtype=int32), offsets=Array([0, 1, 3], dtype=int32))

    Args:
        index: Group of each row, `(N,)`, any integer dtype, values in `[0, size]`; `size` drops the row.
        size: Number of groups.
        search: The method of `jnp.searchsorted`, or `COMPARE`.

    Raises:
        ValueError: `index` is not flat, or has 2**31 rows or more.
    """
    if index.ndim != 1:
        raise ValueError(f"index must be flat, got shape {index.shape}")
    rows = index.shape[0]
    if rows >= 2**31:
        raise ValueError(f"at most 2**31 - 1 rows can be grouped, got {rows}")
    if fits_packed(rows, size):
        return _group_packed(index, size, search)
    keys = _not_folded(index.astype(_key_dtype(size)))
    key, order = lax.sort((keys, lax.iota(jnp.int32, rows)), num_keys=1, is_stable=True)
    return Groups(order, _search(key, lax.iota(key.dtype, size + 1), "left", search))


class Tiles(NamedTuple):
    """Groups cut into tiles of some rows. The tiles of a group follow one another, and unused tiles come last.

    Attributes:
        group: Group of each tile, `(T,)`.
        start: Position of the tile's first row in the sorted order, `(T,)`.
        stop: Position behind the last row of the tile's group, `(T,)`; for an unused tile not above its start.
        firsts: Number of tiles before each group, and of all that are used, `(groups + 1,)`.
    """

    group: jax.Array
    start: jax.Array
    stop: jax.Array
    firsts: jax.Array


def most_tiles(rows: int, each: int, groups: int, empty: bool = True) -> int:
    """Return how many tiles there can be at most.

    A group of m > 0 rows has `1 + (m - 1) // each` tiles. With `empty`, groups without rows have a tile too, and the
    number is largest if one group has all the rows. Without it, the number is largest if one group has all rows but one
    for each other group.

    Args:
        rows: number of rows.
        each: rows of a tile.
        groups: number of groups.
        empty: whether a group without rows has a tile.
    """
    if empty:
        return groups + max(0, rows - 1) // each
    named = min(groups, rows)
    return named + (rows - named) // each


def cut_groups(groups: Groups, rows: int, most: int, empty: bool, search: str = "scan") -> Tiles:
    """Cut groups into tiles of `rows` rows, of which there are at most `most`.

    Args:
        groups: the groups.
        rows: rows of a tile.
        most: number of tiles.
        empty: whether a group without rows has a tile.
        search: the method of `jnp.searchsorted`, or `COMPARE`.
    """
    starts, stops = groups.offsets[:-1], groups.offsets[1:]
    # Operations of `lax`: those of `jnp` would be as many again, for numbers that are negative.
    counts = lax.max(lax.div(stops - starts + (rows - 1), jnp.int32(rows)), jnp.int32(empty))
    tile = lax.iota(jnp.int32, most)
    if search == COMPARE:
        return _cut_by_sums(stops - starts, counts, rows, tile)
    ends = lax.cumsum(counts)
    firsts = lax.concatenate([ends - counts, ends[-1:]], 0)
    group = lax.min(_search(ends, tile, "right", search), jnp.int32(starts.shape[0] - 1))
    first, start, stop = (_take(values, group) for values in (firsts, starts, stops))
    start, used = start + (tile - first) * rows, tile < ends[-1]
    absent = lax.full_like(start, groups.order.shape[0])
    return Tiles(group, lax.select(used, start, absent), lax.select(used, stop, lax.full_like(stop, 0)), firsts)


def _cut_by_sums(sizes: jax.Array, counts: jax.Array, rows: int, tile: jax.Array) -> Tiles:
    """Cut groups of these sizes into so many tiles each, by sums over groups alone: XLA makes a loop of each sum.

    The tiles before a tile have as many lanes as rows of the groups before it, and the padding of these groups.
    """
    group = lax.iota(jnp.int32, sizes.shape[0])
    ends = _sum_where(group[:, None] <= group, counts)
    firsts = ends - counts
    done = ends[:, None] <= tile
    number = jnp.sum(done[:-1], axis=0, dtype=jnp.int32)
    start = tile * rows - _sum_where(done, counts * rows - sizes)
    stop = _sum_where(firsts[:, None] <= tile, sizes)
    return Tiles(number, start, stop, lax.concatenate([firsts, ends[-1:]], 0))


def _sum_where(mask: jax.Array, values: jax.Array) -> jax.Array:
    """Return the sum of the values, one a row of the mask, where each column of it is true."""
    wide = lax.broadcast_in_dim(values, mask.shape, (0,))
    return jnp.sum(lax.select(mask, wide, lax.full_like(wide, 0)), axis=0, dtype=jnp.int32)


def accumulator(dtype: DTypeLike) -> "np.dtype[Any]":
    """Return the dtype in which sums of `dtype` are formed: float32 for the half types."""
    exact = jnp.dtype(dtype)
    return jnp.dtype(dtypes.accumulator(exact.name))


def fits_packed(rows: int, size: int) -> bool:
    """Whether a group number and a row number fit one 32-bit key together."""
    return size.bit_length() + _row_bits(rows) <= UINT32_BITS


def scratch_bytes(rows: int, size: int) -> int:
    """Upper bound of the bytes that `group_rows` allocates beside its results."""
    key_bytes = 4 if size < 2**32 else 8
    search = 4 * 4 * (size + 1)
    keys = 2 * rows * 4 if fits_packed(rows, size) else 2 * rows * (key_bytes + 4)
    return keys + search + 1024


def _group_packed(index: jax.Array, size: int, search: str) -> Groups:
    # One sort of single numbers takes 4.7 ms for 131,072 rows, argsort takes 23 ms (2-core CPU). The row number in the
    # low bits makes every key distinct, so the sort need not be stable to keep the order within a group.
    bits = _row_bits(index.shape[0])
    row = lax.iota(jnp.uint32, index.shape[0])
    key = lax.sort(_not_folded((index.astype(jnp.uint32) << bits) | row), is_stable=False)
    order = (key & jnp.uint32(2**bits - 1)).astype(jnp.int32)
    # Compare the group of each sorted row, not the packed key: `size << bits` may be one bit too long.
    return Groups(order, _search(key >> bits, lax.iota(jnp.uint32, size + 1), "left", search))


def _not_folded(x: jax.Array) -> jax.Array:
    """Keep XLA from computing with a constant while it compiles: it took 4 s to sort 131,072 numbers so."""
    return lax.optimization_barrier(x)


def _search(ascending: jax.Array, wanted: jax.Array, side: str, search: str) -> jax.Array:
    """Return the position of each wanted number among ascending ones."""
    if ascending.size * wanted.size <= (MANY_PAIRS if search == COMPARE else FEW_PAIRS):
        column, row = _split(ascending)[..., None], wanted
        before = column < row if side == "left" else column <= row
        return jnp.sum(before, axis=tuple(range(before.ndim - 1)), dtype=jnp.int32)
    search = "scan" if search == COMPARE else search
    if search == "scan_unrolled":  # XLA of JAX 0.11 takes minutes to look for constants in it
        wanted = _not_folded(wanted)
    return jnp.searchsorted(ascending, wanted, side=side, method=search).astype(jnp.int32)


def _split(ascending: jax.Array) -> jax.Array:
    """Return numbers in dimensions along which XLA sums in one loop, with greatest numbers behind them."""
    shape = [ascending.shape[0]]
    while shape[0] > _SUMMED:
        shape[:1] = [-(-shape[0] // _SUMMED), _SUMMED]
    absent = np.array(jnp.iinfo(ascending.dtype).max, ascending.dtype)
    padding = math.prod(shape) - ascending.shape[0]
    return lax.pad(ascending, absent, [(0, padding, 0)]).reshape(shape)


def _take(values: jax.Array, positions: jax.Array) -> jax.Array:
    return values.at[positions].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _row_bits(rows: int) -> int:
    return max(rows - 1, 0).bit_length()


def _key_dtype(size: int) -> "np.dtype[Any]":
    return jnp.dtype("int32") if size < 2**31 else jnp.dtype("int64")
