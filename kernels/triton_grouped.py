"""Grouped products on CUDA by one Triton kernel: `planner.kernels.torch_grouped`'s contracts, without a host's loop.

Nothing waits for the device. Strides are taken as they are; sums are in one order, so that equal calls give equal bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from planner.kernels.torch_grouped import accumulator
from planner.kernels.torch_grouping import Groups, group_rows
from planner.kernels.triton_product import add_parts_kernel, product_kernel
from planner.kernels.triton_tiles import Tiles, tiles_of

__all__ = ["DTYPES", "Axis", "Matrices", "grouped_gradients", "grouped_matmul", "grouped_outer", "grouped_sum",
           "plain_product", "rows_product", "terms_product"]  # fmt: skip

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# How many elements of a cut group are added by one program.
_ADDED = 1024


class Axis(NamedTuple):
    """An axis of an operand: elements between neighbours, and the position of each index where it is not the index."""

    stride: int
    table: Tensor | None = None


class Matrices(NamedTuple):
    """An operand as the kernel sees it; `batch` is a stride along entries of a batch of groups."""

    x: Tensor
    outer: Axis
    inner: Axis
    column: Axis
    batch: int = 0

    @classmethod
    def of(cls, x: Tensor, rows: Tensor | None = None) -> Matrices:
        """Three dimensions, the first through a map of rows if there is one."""
        x = x.resolve_neg()  # of a conjugate's imaginary part, say
        return cls(x, Axis(x.stride(0), rows), Axis(x.stride(1)), Axis(x.stride(2)))

    @property
    def flat(self) -> list[Any]:
        """What the kernel takes of it."""
        return [self.x, *(part for axis in self[1:4] for part in (_packed(axis.table), axis.stride))]


def precision() -> str:
    """What torch is set to for products of float32."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def grouped_matmul(
    a: Tensor,
    c: Tensor,
    groups: Groups,
    source: Tensor | None = None,
    target: Tensor | None = None,
    targets: int | None = None,
) -> Tensor:
    """Multiply each row by the matrix of its group; see `planner.kernels.torch_grouped.grouped_matmul`."""
    n, (i, j), (g, _, k) = len(groups.order), a.shape[1:], c.shape
    rows = a.new_empty((n, i, k), dtype=a.dtype if target is None else accumulator(a.dtype))
    # Dropped rows are one more group, whose products are zero.
    starts = torch.nn.functional.pad(groups.offsets, (0, 1), value=n)
    rows_product(Matrices.of(a, source), Matrices.of(c), Matrices.of(rows), (n, i, k, j), groups.order, starts, g, True)
    if target is None:
        return rows
    assert targets is not None
    return grouped_sum(rows.reshape(n, i * k), group_rows(target, targets)).reshape(targets, i, k).to(a.dtype)


def grouped_sum(x: Tensor, groups: Groups) -> Tensor:
    """Sum the rows `(N, K)` of each group: `(groups, K)`, in the order of the rows."""
    ones = x.new_ones(1, 1, 1).expand(len(x), 1, 1)
    return grouped_outer(ones, x.unsqueeze(1), groups)[:, 0]


def grouped_outer(
    a: Tensor, b: Tensor, groups: Groups, source_a: Tensor | None = None, source_b: Tensor | None = None
) -> Tensor:
    """Sum `a[r]^T @ b[r]` over the rows of each group; see `planner.kernels.torch_grouped.grouped_outer`."""
    sizes = len(groups.order), a.shape[1], a.shape[2], b.shape[2]
    out = a.new_empty((groups.size, *sizes[2:]))
    terms_product(
        Matrices.of(a, source_a), Matrices.of(b, source_b), Matrices.of(out), sizes, groups.order, groups.offsets,
        groups.size,
    )  # fmt: skip
    return out


def grouped_gradients(
    gout: Tensor, a: Tensor, c: Tensor, groups: Groups, source: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Both gradients of `grouped_matmul` without target; see `planner.kernels.torch_grouped.grouped_gradients`."""
    return grouped_matmul(gout, c.transpose(1, 2), groups), grouped_outer(a, gout, groups, source)


def plain_product(a: Matrices, b: Matrices, out: Matrices, sizes: tuple[int, int, int, int]) -> None:
    """Write a batch of products, `a[z, m, k] b[z, k, n]`; sizes of z, m, n, k."""
    batch, m, n, k = sizes
    if batch * m * n:
        tiles = _tiles("plain", m, n, k, a, b, out)
        _launch("plain", a, b, out, (m, n, k), tiles, batch, triton.cdiv(m, tiles.m) * batch)


def rows_product(
    a: Matrices, b: Matrices, out: Matrices, sizes: tuple[int, int, int, int], order: Tensor | None, starts: Tensor,
    groups: int, drops: bool = False, batch_groups: int | None = None,
) -> None:  # fmt: skip
    """Write the products of rows with the matrix of their group, `a[r, i, k] b[g, k, n]`.

    Args:
        a: operand.
        b: matrices.
        out: result, of which no two places are one.
        sizes: of r, i, n and k.
        order: rows sorted by group; None where they are.
        starts: where each group begins in it, and where the last ends.
        groups: how many there are, the dropped ones aside.
        drops: whether there is one more group, of rows whose products are zero.
        batch_groups: groups of an entry of a batch; None where there is none.
    """
    rows, i, n, k = sizes
    if rows * i * n:
        tiles = _tiles("rows", max(1, rows * i // max(1, groups)), n, k, a, b, out)
        step = tiles.m * tiles.chunk
        tile_starts = _starts(_pieces(starts, i, step))
        # Each group ends in one piece that is not full, at most.
        count = triton.cdiv(rows * i, step) + groups + drops
        _launch(
            "rows", a, b, out, (rows * i, n, k), tiles, groups + drops, count, order, starts, tile_starts,
            inner=i, drops=drops, batch_groups=batch_groups,
        )  # fmt: skip


def terms_product(
    a: Matrices, b: Matrices, out: Matrices, sizes: tuple[int, int, int, int], order: Tensor | None, starts: Tensor,
    groups: int, batch_groups: int | None = None,
) -> None:  # fmt: skip
    """Write the products summed over the rows of each group, `a[r, i, m] b[r, i, n]`; arguments as of `rows_product`.

    Sizes are of r, i, m and n.
    """
    rows, i, m, n = sizes
    if not groups * m * n:
        return
    tiles = _tiles("terms", m, n, max(1, rows * i // groups), a, b, out)
    step = tiles.k * tiles.chunk
    # Groups without rows are written too.
    pieces = _pieces(starts, i, step).clamp_min_(1)
    part_starts = _starts(pieces * (pieces > 1))
    # A group that is cut has more terms than a step, and all of its pieces but one are full.
    slots = 2 * (rows * i // step)
    wide = torch.float64 if a.x.dtype == torch.float64 else torch.float32
    parts = out.x.new_empty((max(1, slots), m, n), dtype=wide)
    count = (triton.cdiv(rows * i, step) + groups) * triton.cdiv(m, tiles.m)
    _launch(
        "terms", a, b, out, (m, n, rows * i), tiles, groups, count, order, starts, _starts(pieces), part_starts, parts,
        inner=i, batch_groups=batch_groups,
    )  # fmt: skip
    if slots:
        grid = _grid(groups * triton.cdiv(m * n, _ADDED))
        with torch.cuda.device_of(out.x):
            add_parts_kernel[grid](parts, part_starts, *out.flat, m, n, BLOCK=_ADDED)


def _tiles(mode: str, m: int, n: int, k: int, *operands: Matrices) -> Tiles:
    x = operands[0].x
    tables = any(axis.table is not None for operand in operands for axis in operand[1:4])
    return tiles_of(mode, m, n, k, x.element_size(), x.dtype == torch.float32 and precision() == "ieee", tables)


def _launch(
    mode: str, a: Matrices, b: Matrices, out: Matrices, sizes: tuple[int, int, int], tiles: Tiles, groups: int,
    count: int, order: Tensor | None = None, starts: Tensor | None = None, tile_starts: Tensor | None = None,
    part_starts: Tensor | None = None, parts: Tensor | None = None, *, inner: int = 1, drops: bool = False,
    batch_groups: int | None = None,
) -> None:  # fmt: skip
    m, n, k = sizes
    with torch.cuda.device_of(out.x):  # Triton launches on the device that is current
        product_kernel[_grid(count * triton.cdiv(n, tiles.n))](
            *a.flat, *b.flat, *out.flat, _packed(order), _packed(starts), tile_starts, part_starts, parts,
            groups, batch_groups or max(1, groups), a.batch, b.batch, inner, m, k, n,
            MODE=mode, DROPS=drops, PRECISION=precision(),
            BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, CHUNK=tiles.chunk, ONE_K=k <= tiles.k,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


def _packed(table: Tensor | None) -> Tensor | None:
    """A table as the kernel reads it, without gaps: one that repeats an entry has a stride of 0."""
    return None if table is None else table.contiguous()


def _grid(programs: int) -> tuple[int]:
    if programs >= 2**31:
        raise ValueError(f"the product needs {programs} programs, of which a device takes {2**31 - 1}")
    return (programs,)


def _pieces(starts: Tensor, inner: int, step: int) -> Tensor:
    """How many programs each group takes."""
    return (starts.diff() * inner + (step - 1)).div(step, rounding_mode="floor")


def _starts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
