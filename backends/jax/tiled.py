"""The cost of grouped products in Pallas kernels, which move rows into tiles and results out of tiles.

The kernels have run on no device yet, so times are estimates. Memory on a TPU is bounded by what XLA's compiler for a
v5e allocates; it keeps arrays of a few megabytes in vector memory instead. Memory on a GPU is the sum of the arrays.
"""

from __future__ import annotations

import math

from planner.backends.common.kernel_rows import group_sizes
from planner.backends.common.stock_rows import picoseconds
from planner.cost.device import Device
from planner.cost.figures import StepCost
from planner.kernels.grouped_matmul.pallas_tiles import TPU, Shape, most_tiles
from planner.kernels.grouping import jax_grouping
from planner.language.dtypes import itemsize
from planner.program.forms import GroupedForm
from planner.program.ops import JointGradient, Op, spec_flops

__all__ = ["tiled_cost"]


def tiled_cost(
    op: Op, form: GroupedForm, sizes: tuple[int, int, int, int, int], shape: Shape, device: Device, copied: int
) -> StepCost:
    """Return the cost of a step that a platform's kernels run.

    Args:
        op: the step.
        form: its axes by group, as the kernels see them.
        sizes: the number of rows, the rows of the matrix that one row is, the number of groups, and the columns of the
            rows and of the results.
        shape: the shape of the platform's tiles.
        device: the rates of the device.
        copied: bytes that are copied before and after the kernels.
    """
    n, i, g, j, k = sizes
    size, sums = itemsize(op.dtype), isinstance(op, JointGradient) or form.outer
    each = shape.rows(n, i, g, size)
    tiles = most_tiles(n, each, g, sums and shape.empty)
    summed = not sums and form.rows_out != form.gather.axes
    targets = group_sizes(op.spec, form.rows_out)[0] if summed else 0
    direct = not summed and not sums and form.rows_a == form.gather.axes and shape.is_tile(n, i, size)
    what = (
        "pair"
        if isinstance(op, JointGradient)
        else "outer"
        if form.outer
        else "summed"
        if summed
        else "direct"
        if direct
        else "product"
    )
    held = (_tpu_bytes if shape is TPU else _gpu_bytes)(what, sizes, tiles * each, targets, size)
    maps = sum(rows != form.gather.axes for rows in (form.rows_a, form.rows_b if form.outer else form.rows_out))
    sort = max(jax_grouping.scratch_bytes(n, g), 16 * tiles * each + 4 * n)
    tables = 4 * (n + g + 1) + 8 * n * maps + sort + _padded_bytes(1, tiles, each, 4)
    moved = (
        op.bytes_touched()
        + 2 * copied
        + (0 if direct else 2 * tiles * each * i * (j + k + (op.products - 1) * j) * size)
    )
    flops = spec_flops(op.spec) * op.products
    rate = device.product_rate(max(1, n * i // max(1, min(g, n))), j, k, op.dtype)
    seconds = max(flops / rate, device.moving_seconds(moved)) + n * device.sort_row_seconds
    seconds += 20 * device.launch_seconds
    return StepCost(flops, moved, copied, tables + held + copied, picoseconds(seconds))


def _tpu_bytes(what: str, sizes: tuple[int, int, int, int, int], slots: int, targets: int, size: int) -> int:
    """Return the bytes that a TPU's kernels hold at once, besides their tables.

    Outside of kernels arrays have no padding. An array that a kernel needs padded to whole registers is copied before
    the kernel, or after it. Rows are taken and then masked with zeros, in a second array; so are results.
    """
    n, i, g, j, k = sizes
    shapes = (n, i, j), (n, i, k), (g, j, k)
    a, b, c = (_padded_bytes(*x, size) for x in shapes)
    copy_a, copy_b, copy_c = (
        whole if whole > math.prod(x) * size else 0 for whole, x in zip((a, b, c), shapes, strict=True)
    )
    tiles_a = _padded_bytes(slots, i, j, size)
    tiles_b = _padded_bytes(slots, i, k, 4 if what == "summed" else size)
    if what == "pair":
        return max(2 * (tiles_a + tiles_b) + copy_a + copy_b, 3 * tiles_a + tiles_b + a + copy_a) + copy_c
    if what == "outer":
        return 2 * (tiles_a + tiles_b) + max(copy_a + copy_b, copy_c)
    if what == "direct":
        return copy_a + copy_b + copy_c
    last = 2 * _padded_bytes(targets, i, k, 4) if what == "summed" else b + copy_b
    return max(copy_a + 2 * tiles_a, tiles_a + tiles_b + copy_c, 2 * tiles_b + last)


def _padded_bytes(rows: int, inner: int, columns: int, size: int) -> int:
    """Return the bytes of `(rows, inner, columns)` padded for a TPU's registers.

    A register is 128 columns wide, and has 8 rows of 4 bytes, or as many rows as the next power of 2 if that is fewer.
    """
    high = min(32 // size, 1 << (inner - 1).bit_length())
    return rows * (-(-inner // high) * high) * (-(-columns // 128) * 128) * size


def _gpu_bytes(what: str, sizes: tuple[int, int, int, int, int], slots: int, targets: int, size: int) -> int:
    """Return the bytes that a GPU's kernels hold at once, besides their tables.

    Columns, and the rows of matrices, are padded with zeros to multiples of 64, in a copy if they are not multiples
    already. Gradients transpose the matrices, and sums transpose the rows. Tiles are counted twice: once as taken, and
    once as padded.
    """
    n, i, g, j, k = sizes
    wide_j, wide_k = (-(-x // 64) * 64 for x in (j, k))
    matrices = g * wide_j * wide_k * size
    copy_c = matrices if what == "pair" or (wide_j, wide_k) != (j, k) else 0
    if what == "direct":
        return n * i * (wide_j + wide_k) * size + copy_c
    tiles_a, tiles_b = slots * i * wide_j * size, slots * i * wide_k * (4 if what == "summed" else size)
    if what == "pair":
        return 4 * tiles_a + 2 * tiles_b + copy_c + matrices
    if what == "outer":
        return 3 * tiles_a + 2 * tiles_b + matrices
    return max(2 * tiles_a, tiles_a + tiles_b + copy_c, 2 * tiles_b) + 4 * targets * i * k
