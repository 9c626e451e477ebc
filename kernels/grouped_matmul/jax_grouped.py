"""Each row times the matrix of its group, in stock XLA, and both gradients. The package states the contract.

Rows are read in the order of their groups, in tiles that lie within one group:

    sorted rows   | group 0     | group 1 | group 3          |
    tiles         [ 0:0  ][ 0:1 ][ 1:0   ][ 3:0  ][ 3:1  ][ 3:2 ]

A loop takes a few tiles per step. It gathers their rows and matrices, multiplies them as one batched product, and
scatters the products to their rows. `CARD` has the same functions with other tiles, for graphics cards:

- On a CPU the number of steps is dynamic, and a step's numbers stay in the cache.
- On one of several devices of a CPU, one step takes all tiles if they are few.
- On a card the host would have to wait for a dynamic number in every step. So the loop also takes tiles that are not
  used. A step takes hundreds of tiles, because each of its kernels costs a launch.

A lane is a place for a row in a tile. Lanes beyond the end of a tile's group point behind the last row, so a scatter
drops them. If a product sums over the lanes, both gathers read zeros for them: zero times the NaN of another group's
row would be NaN.

XLA would transpose all matrices before a loop that reads them in another order. So matrices may be `turned`, see the
package; `grouped_outer` of the factors in the other order gives turned sums.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from planner.kernels.grouped_matmul.jax_tilings import Tiling, TilingOf, card_tiling, part_tiling, tiling
from planner.kernels.grouping.jax_bits import bits, gather_rows, of_bits
from planner.kernels.grouping.jax_grouping import (
    COMPARE,
    Groups,
    Tiles,
    accumulator,
    cut_groups,
    group_rows,
    most_tiles,
)

# How `jnp.searchsorted` works on a card: other than a loop, an unrolled search is few kernels.
CARD_SEARCH = "scan_unrolled"

Carry = TypeVar("Carry")

_SKIP = lax.GatherScatterMode.FILL_OR_DROP


def grouped_matmul(
    a: jax.Array,
    c: jax.Array,
    groups: Groups,
    source: jax.Array | None = None,
    target: jax.Array | None = None,
    targets: int | None = None,
    turned: bool = False,
    tiling_of: TilingOf = tiling,
) -> jax.Array:
    """Multiply each row by the matrix of its group, see the package.

    Raises:
        ValueError: Only one of `target` and `targets` is given.
    """
    if (target is None) != (targets is None):
        raise ValueError("target and targets go together")
    rows, size_i, (size, size_j, size_k) = groups.order.shape[0], a.shape[1], matrix_sizes(c, turned)
    dtype = jnp.result_type(a, c)
    shape = (rows if target is None else targets or 0, size_i, size_k)
    if 0 in (rows, *a.shape, *c.shape, *shape):
        return jnp.zeros(shape, dtype)

    tile_sizes = tiling_of((rows, size_i, size, size_j, size_k), dtype.itemsize)
    spec = "tij,tkj->tik" if turned else "tij,tjk->tik"
    tiles = _make_tiles(groups, tile_sizes)
    results = _Results(shape, dtype, tiles, groups, tile_sizes)
    out = results.start(1) if target is None else _filled(shape, accumulator(dtype), groups, 1)

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        group, row = results.step_rows(number)
        # Lanes without a row read some row: the scatter drops their products.
        left = gather_rows(a, row if source is None else gather_rows(source, row))
        product = _tile_matmul(spec, _tile_matrix(left, tile_sizes), gather_rows(c, group), tile_sizes)
        product = product.reshape(-1, size_i, size_k)
        if target is None:
            return results.put(out, number, row, product)
        return _add(out, _take_index(target, row, out.shape[0]), product.astype(out.dtype))

    out = _loop(tiles, tile_sizes, step, out)
    return results.finish(out) if target is None else out.astype(dtype)


def ragged_matmul(
    a: jax.Array,
    c: jax.Array,
    groups: Groups,
    source: jax.Array | None = None,
    target: jax.Array | None = None,
    targets: int | None = None,
    turned: bool = False,
) -> jax.Array:
    """Do what `grouped_matmul` does without sources and targets, by JAX's own `ragged_dot` on sorted rows.

    Raises:
        ValueError: Sources or targets are given.
    """
    if source is not None or target is not None:
        raise ValueError("ragged_dot takes rows as they are")
    c = c.swapaxes(1, 2) if turned else c
    rows, size_i, size_k = groups.order.shape[0], a.shape[1], c.shape[2]
    dtype = jnp.result_type(a, c)
    out = _filled((rows, size_i, size_k), dtype, groups, 1)
    if 0 in (rows, *a.shape, *c.shape):
        return out
    lines = gather_rows(a, groups.order).reshape(rows * size_i, a.shape[2])
    exact = accumulator(dtype)
    product = lax.ragged_dot(lines, c, jnp.diff(groups.offsets) * size_i, preferred_element_type=exact)
    # What stands behind the last group is not to be read.
    position = lax.iota(jnp.int32, rows)
    place = jnp.where(position < groups.offsets[-1], groups.order, rows + position)
    return of_bits(_put(bits(out), place, bits(product.reshape(out.shape).astype(dtype)), True), dtype)


def grouped_outer(
    a: jax.Array,
    b: jax.Array,
    groups: Groups,
    size: int,
    source_a: jax.Array | None = None,
    source_b: jax.Array | None = None,
    tiling_of: TilingOf = tiling,
) -> jax.Array:
    """Sum `a[r]^T @ b[r]` over the rows of each of `size` groups, see the package."""
    dtype = jnp.result_type(a, b)
    rows = groups.order.shape[0]
    out = _filled((size, a.shape[2], b.shape[2]), accumulator(dtype), groups, 2)
    if 0 in (rows, *a.shape, *b.shape, size):
        return out.astype(dtype)

    tile_sizes = tiling_of((rows, a.shape[1], *out.shape), dtype.itemsize)
    tiles = _make_tiles(groups, tile_sizes)

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        group, row = _step_rows(tiles, groups.order, number, tile_sizes)
        left = _take(a, row if source_a is None else _take_index(source_a, row, a.shape[0]))
        right = _take(b, row if source_b is None else _take_index(source_b, row, b.shape[0]))
        left, right = _tile_matrix(left, tile_sizes), _tile_matrix(right, tile_sizes)
        product = _tile_matmul("tij,tik->tjk", left, right, tile_sizes)
        return _add(out, group, product.astype(out.dtype), rising=True)

    return _loop(tiles, tile_sizes, step, out).astype(dtype)


def grouped_gradients(
    gout: jax.Array,
    a: jax.Array,
    c: jax.Array,
    groups: Groups,
    source: jax.Array | None = None,
    turned: bool = False,
    tiling_of: TilingOf = tiling,
) -> tuple[jax.Array, jax.Array]:
    """Return both gradients of `grouped_matmul`, see the package; one loop gathers each row once for both."""
    rows = groups.order.shape[0]
    dtype = jnp.result_type(gout, a, c)
    shape = (rows, *a.shape[1:])
    if 0 in (rows, *a.shape, *c.shape):
        return jnp.zeros(shape, dtype), jnp.zeros(c.shape, dtype)

    tile_sizes = tiling_of((rows, a.shape[1], *matrix_sizes(c, turned)), dtype.itemsize)
    tiles = _make_tiles(groups, tile_sizes)
    results = _Results(shape, dtype, tiles, groups, tile_sizes)
    spec_rows, spec_c = ("tik,tkj->tij", "tij,tik->tkj") if turned else ("tik,tjk->tij", "tij,tik->tjk")

    def step(number: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        group, row = results.step_rows(number)
        left = _tile_matrix(_take(a, row if source is None else _take_index(source, row, a.shape[0])), tile_sizes)
        gradient = _tile_matrix(_take(gout, row), tile_sizes)
        to_rows = _tile_matmul(spec_rows, gradient, gather_rows(c, group), tile_sizes)
        to_c = _tile_matmul(spec_c, left, gradient, tile_sizes)
        grad_rows, grad_c = grads
        grad_rows = results.put(grad_rows, number, row, to_rows.reshape(-1, *a.shape[1:]))
        return grad_rows, _add(grad_c, group, to_c.astype(grad_c.dtype), rising=True)

    start = results.start(3), _filled(c.shape, accumulator(dtype), groups, 4)
    grad_rows, grad_c = _loop(tiles, tile_sizes, step, start)
    return results.finish(grad_rows), grad_c.astype(dtype)


def scratch_bytes(
    what: str,
    sizes: tuple[int, int, int, int, int],
    dtype: DTypeLike,
    targets: int | None = None,
    tiling_of: TilingOf = tiling,
) -> int:
    """Upper bound of the bytes that the function `grouped_` + `what` allocates beside its results.

    Args:
        what: "matmul", "outer" or "gradients".
        sizes: rows N, size I, groups G, sizes J and K.
        dtype: dtype of the operands.
        targets: rows of the result of a matmul whose rows have targets.
        tiling_of: chooses the tiles.
    """
    rows, size_i, groups, size_j, size_k = sizes
    pair = what == "gradients"
    if what == "matmul":
        sums, in_bits = (targets or 0) * size_i * size_k, rows * size_i * size_k * (targets is None)
    else:
        sums, in_bits = groups * size_j * size_k, rows * size_i * size_j * pair
    tile_sizes, exact = tiling_of(sizes, jnp.dtype(dtype).itemsize), accumulator(dtype)
    lanes = tile_sizes.tiles * tile_sizes.rows
    left, right, matrices = lanes * size_i * size_j, lanes * size_i * size_k, tile_sizes.tiles * size_j * size_k
    # Both factors and the product; if a step has one tile, the product as multiplied and as scattered. Both gradients
    # make a second product.
    numbers = max(left + right + matrices, 2 * right * (tile_sizes.tiles == 1)) + pair * left
    rounded = 0 if exact == jnp.dtype(dtype) else 2 * (left if pair else right)
    table = rows // tile_sizes.rows + min(groups, rows) + tile_sizes.tiles + groups
    # A small result lane after lane, and the lane of each row.
    all_lanes = -(-most_tiles(rows, tile_sizes.rows, groups, empty=False) // tile_sizes.tiles) * lanes
    each = size_i * (size_j if pair else size_k) * jnp.dtype(dtype).itemsize
    in_lanes = (pair or (what == "matmul" and targets is None)) and tile_sizes.in_lanes(all_lanes * each)
    stored = in_lanes * (all_lanes * (each + 8) + 4 * rows)
    # The float32 array in which a loop sums half types, and the integers in which it keeps bfloat16 results.
    results = 4 * sums * (exact != jnp.dtype(dtype)) + 2 * in_bits * (jnp.dtype(dtype) == jnp.bfloat16)
    # A card multiplies half types as they are.
    narrow = left + (matrices if what == "matmul" else right) if tile_sizes.on_card else 0
    spared = max(0, exact.itemsize - jnp.dtype(dtype).itemsize) * narrow
    return max(exact.itemsize, 4) * numbers - spared + rounded + results + stored + 4 * 4 * (lanes + table) + 4096


def matrix_sizes(c: jax.Array, turned: bool) -> tuple[int, int, int]:
    """Return the sizes G, J and K of matrices, which are `(G, K, J)` if they are turned."""
    g, j, k = c.shape
    return (g, k, j) if turned else (g, j, k)


def _make_tiles(groups: Groups, tile_sizes: Tiling) -> Tiles:
    """Cut sorted rows into tiles; there are as many as any grouping of so many rows could need."""
    rows, size = groups.order.shape[0], groups.offsets.shape[0] - 1
    steps = -(-most_tiles(rows, tile_sizes.rows, size, empty=False) // tile_sizes.tiles)
    search = CARD_SEARCH if tile_sizes.on_card else COMPARE if tile_sizes.whole else "scan"
    return cut_groups(groups, tile_sizes.rows, steps * tile_sizes.tiles, empty=False, search=search)


def _loop(tiles: Tiles, tile_sizes: Tiling, step: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Run `step` for each batch of tiles, up to the last tile that has rows, or for all of them."""
    steps = tile_sizes.steps
    if tile_sizes.whole:
        return step(jnp.int32(0), carry)
    if steps is None:
        last = lax.div(tiles.firsts[-1] + (tile_sizes.tiles - 1), jnp.int32(tile_sizes.tiles))
        return lax.fori_loop(jnp.int32(0), last, step, carry)
    return lax.fori_loop(0, steps, lambda number, carry: step(jnp.int32(number), carry), carry)


def _step_rows(tiles: Tiles, order: jax.Array, number: jax.Array, tile_sizes: Tiling) -> tuple[jax.Array, jax.Array]:
    """Return the groups of a step's tiles, and the row of each of their lanes."""
    first = number * tile_sizes.tiles
    group, start, stop = (_part(values, first, tile_sizes.tiles) for values in tiles[:3])
    return group, _lane_rows(Tiles(group, start, stop, tiles.firsts), order, tile_sizes)


def _part(values: jax.Array, start: jax.Array, count: int) -> jax.Array:
    if count == values.shape[0]:
        return values
    return lax.dynamic_slice(values, (start,), (count,), allow_negative_indices=False)


def _lane_rows(tiles: Tiles, order: jax.Array, tile_sizes: Tiling) -> jax.Array:
    """Return the row of each lane of some tiles.

    A lane without a row holds N, or on a card N plus its number: there a scatter of distinct rows needs no atomics.
    """
    position = tiles.start[:, None] + lax.iota(jnp.int32, tile_sizes.rows)
    row = gather_rows(order, position.reshape(-1)).reshape(position.shape)
    absent = lax.full_like(row, order.shape[0])
    if tile_sizes.on_card:
        absent = absent + lax.iota(jnp.int32, position.size).reshape(position.shape)
    return lax.select(position < tiles.stop[:, None], row, absent).reshape(-1)


class _Results:
    """How a loop stores a result for each row.

    A small result is stored lane after lane; when the loop has ended, each row is taken from its lane. XLA takes 10 ms
    to compile a scatter, and loops whose index array is the same share one here. Other results are scattered to their
    rows in each step.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: DTypeLike, tiles: Tiles, groups: Groups, tile_sizes: Tiling
    ) -> None:
        self.shape, self.dtype, self.tiles, self.groups, self.tile_sizes = shape, dtype, tiles, groups, tile_sizes
        self.lanes = tiles.group.shape[0] * tile_sizes.rows
        in_lanes = tile_sizes.in_lanes(self.lanes * math.prod(shape[1:]) * jnp.dtype(dtype).itemsize)
        self.rows = _lane_rows(tiles, groups.order, tile_sizes) if in_lanes else None

    def start(self, number: int) -> jax.Array:
        """Return what the loop starts with; the number is as in `_filled`."""
        count = self.shape[0] if self.rows is None else self.lanes
        return bits(_filled((count, *self.shape[1:]), self.dtype, self.groups, number))

    def step_rows(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the groups of a step's tiles, and the row of each of their lanes."""
        if self.rows is None:
            return _step_rows(self.tiles, self.groups.order, number, self.tile_sizes)
        tiles, each = self.tile_sizes.tiles, self.tile_sizes.rows
        return _part(self.tiles.group, number * tiles, tiles), _part(self.rows, number * (tiles * each), tiles * each)

    def put(self, out: jax.Array, number: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
        """Store the results of a step, one for each lane."""
        values = bits(values.astype(self.dtype))
        if self.rows is None:
            return _put(out, row, values, self.tile_sizes.on_card)
        if self.tile_sizes.whole:
            return values
        corner = (number * values.shape[0], *[jnp.int32(0)] * (out.ndim - 1))
        return lax.dynamic_update_slice(out, values, corner, allow_negative_indices=False)

    def finish(self, out: jax.Array) -> jax.Array:
        """Return the results row by row; zeros for rows that are in no group."""
        out = of_bits(out, self.dtype)
        if self.rows is None:
            return out
        absent = jnp.full((self.shape[0], 1), self.lanes, jnp.int32)
        lane = lax.broadcasted_iota(jnp.int32, (self.lanes, 1), 0)
        return _take(out, _put(absent, self.rows, lane, False)[:, 0])


def _tile_matrix(rows: jax.Array, tile_sizes: Tiling) -> jax.Array:
    """Reshape the rows of a step, `(tiles * rows, I, J)`, to one matrix per tile, `(tiles, rows * I, J)`."""
    return rows.reshape(tile_sizes.tiles, tile_sizes.rows * rows.shape[1], rows.shape[2])


def _tile_matmul(spec: str, left: jax.Array, right: jax.Array, tile_sizes: Tiling) -> jax.Array:
    exact = accumulator(jnp.result_type(left, right))
    if not tile_sizes.on_card:  # a CPU converts half types in any case
        left, right = left.astype(exact), right.astype(exact)
    return jnp.einsum(spec, left, right, preferred_element_type=exact)


def _take(operand: jax.Array, rows: jax.Array) -> jax.Array:
    """Return `operand[rows]`, zero where a row is beyond the end."""
    return gather_rows(operand, rows, zeros=True)


def _take_index(index: jax.Array, rows: jax.Array, absent: int) -> jax.Array:
    """Return `index[rows]` as int32, `absent` where a row is out of bounds."""
    values = gather_rows(index, rows).astype(jnp.int32)
    return jnp.where(rows < index.shape[0], values, absent)


def _put(out: jax.Array, rows: jax.Array, values: jax.Array, unique: bool) -> jax.Array:
    """Return `out` with values in these rows, which are `unique` if no two are equal, nor behind the last one."""
    numbers = _scatter_numbers(out)
    return lax.scatter(out, rows[:, None], values[:, None], numbers, unique_indices=unique, mode=_SKIP)


def _add(out: jax.Array, rows: jax.Array, values: jax.Array, rising: bool = False) -> jax.Array:
    numbers = _scatter_numbers(out)
    return lax.scatter_add(out, rows[:, None], values[:, None], numbers, indices_are_sorted=rising, mode=_SKIP)


def _scatter_numbers(out: jax.Array) -> lax.ScatterDimensionNumbers:
    # Windows have the operand's rank, `(1, I, K)`: without the row axis XLA copies the updates once more.
    return lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, out.ndim + 1)),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(0,),
    )


def _filled(shape: tuple[int, ...], dtype: DTypeLike, groups: Groups, number: int) -> jax.Array:
    """Return zeros that XLA cannot merge with other zeros.

    XLA shares equal constants between results of equal size, and then copies each one before a loop writes to it: 33 MB
    for each on seed 000. The first offset is always zero, but XLA does not know that.
    """
    return jnp.full(shape, groups.offsets[0] * number, dtype)


class TiledKernels(NamedTuple):
    """Grouped products in tiles that suit a kind of device, and how rows are sorted for them."""

    grouped_matmul: Callable[..., jax.Array]
    grouped_outer: Callable[..., jax.Array]
    grouped_gradients: Callable[..., tuple[jax.Array, jax.Array]]
    group_rows: Callable[..., Groups]


CPU = TiledKernels(grouped_matmul, grouped_outer, grouped_gradients, group_rows)
CARD = TiledKernels(
    partial(grouped_matmul, tiling_of=card_tiling),
    partial(grouped_outer, tiling_of=card_tiling),
    partial(grouped_gradients, tiling_of=card_tiling),
    partial(group_rows, search=CARD_SEARCH),
)
"""The functions of this module with the tiles of a graphics card."""
PART = TiledKernels(
    partial(grouped_matmul, tiling_of=part_tiling),
    partial(grouped_outer, tiling_of=part_tiling),
    partial(grouped_gradients, tiling_of=part_tiling),
    partial(group_rows, search=COMPARE),
)
"""The functions of this module with the tiles of one of several devices on a CPU."""
