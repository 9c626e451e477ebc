"""Grouped products by Pallas, over the kernels of a platform. The package states the contract.

Rows are gathered in the order of their groups, in tiles that lie within one group. A kernel fetches the matrix of each
tile by the number of its group. If a single row is large enough to be a tile, no row is moved: the kernel fetches the
row's matrix by the row's own group. Problems that a platform's kernels do not take run in stock XLA (`jax_grouped`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from planner.kernels.grouped_matmul import jax_grouped
from planner.kernels.grouped_matmul.pallas_tiles import RowTiles, Shape, cut, gather_rows, put_back
from planner.kernels.grouping.jax_grouping import Groups


class Platform(NamedTuple):
    """The kernels of a platform.

    Attributes:
        shape: the limits of its tiles.
        product: multiplies tiles, see `planner.kernels.grouped_matmul.pallas_tpu.matrices_product`.
        outer: sums products of tiles, see `planner.kernels.grouped_matmul.pallas_tpu.matrices_outer`.
        stock: the functions in stock XLA, for problems that the kernels do not take.
    """

    shape: Shape
    product: Callable[..., jax.Array]
    outer: Callable[[jax.Array, jax.Array, RowTiles], jax.Array]
    stock: jax_grouped.TiledKernels

    @property
    def group_rows(self) -> Callable[..., Groups]:
        """From an index array and the number of groups to the sorted order."""
        return self.stock.group_rows

    def grouped_matmul(
        self,
        a: jax.Array,
        c: jax.Array,
        groups: Groups,
        source: jax.Array | None = None,
        target: jax.Array | None = None,
        targets: int | None = None,
        turned: bool = False,
    ) -> jax.Array:
        """Multiply each row by the matrix of its group, see the package and `jax_grouped`."""
        rows, i, (g, j, k) = groups.order.shape[0], a.shape[1], jax_grouped.matrix_sizes(c, turned)
        if a.dtype != c.dtype or not self.shape.takes(rows, i, g, j, k, a.dtype.name, sums=False):
            return self.stock.grouped_matmul(a, c, groups, source, target, targets, turned)
        if source is None and target is None and self.shape.is_tile(rows, i, a.dtype.itemsize):
            return self.product(a, c, *_groups_of_rows(groups), turned)
        tiles = cut(groups, self.shape.rows(rows, i, g, a.dtype.itemsize), empty=False)
        wide = None if target is None else jnp.float32
        products = self.product(gather_rows(a, tiles.slot, source), c, tiles.group, tiles.live, turned, wide)
        if target is None:
            return put_back(products, tiles.slot, rows, i)
        assert targets is not None
        to = target.at[tiles.slot.reshape(-1)].get(mode="fill", fill_value=targets)
        out = jnp.zeros((targets, i, k), jnp.float32)
        return out.at[to].add(products.reshape(-1, i, k), mode="drop").astype(a.dtype)

    def grouped_outer(
        self,
        a: jax.Array,
        b: jax.Array,
        groups: Groups,
        size: int,
        source_a: jax.Array | None = None,
        source_b: jax.Array | None = None,
    ) -> jax.Array:
        """Sum `a[r]^T @ b[r]` over the rows of each of `size` groups, see the package."""
        rows, (_, i, j), k = groups.order.shape[0], a.shape, b.shape[2]
        if a.dtype != b.dtype or not self.shape.takes(rows, i, size, j, k, a.dtype.name):
            return self.stock.grouped_outer(a, b, groups, size, source_a, source_b)
        tiles = cut(groups, self.shape.rows(rows, i, size, a.dtype.itemsize), self.shape.empty)
        return self.outer(gather_rows(a, tiles.slot, source_a), gather_rows(b, tiles.slot, source_b), tiles)

    def grouped_gradients(
        self,
        gout: jax.Array,
        a: jax.Array,
        c: jax.Array,
        groups: Groups,
        source: jax.Array | None = None,
        turned: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Return both gradients of `grouped_matmul`, see the package and `jax_grouped`."""
        rows, i, (g, j, k) = groups.order.shape[0], a.shape[1], jax_grouped.matrix_sizes(c, turned)
        if not a.dtype == c.dtype == gout.dtype or not self.shape.takes(rows, i, g, j, k, a.dtype.name):
            return self.stock.grouped_gradients(gout, a, c, groups, source, turned)
        tiles = cut(groups, self.shape.rows(rows, i, g, a.dtype.itemsize), self.shape.empty)
        gradient, row = gather_rows(gout, tiles.slot), gather_rows(a, tiles.slot, source)
        to_c = self.outer(gradient, row, tiles) if turned else self.outer(row, gradient, tiles)
        if self.shape.is_tile(rows, i, a.dtype.itemsize):
            return self.product(gout, c, *_groups_of_rows(groups), not turned), to_c
        to_rows = self.product(gradient, c, tiles.group, tiles.live, not turned)
        return put_back(to_rows, tiles.slot, rows, i), to_c


def _groups_of_rows(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Return the group of each row, and 1 for each row that is not dropped."""
    at, size = lax.iota(jnp.int32, groups.order.shape[0]), groups.offsets.shape[0] - 1
    group = jnp.searchsorted(groups.offsets, at, side="right").astype(jnp.int32) - 1
    group = jnp.zeros_like(group).at[groups.order].set(group)
    return jnp.minimum(group, size - 1), (group < size).astype(jnp.int32)
