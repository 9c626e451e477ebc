"""Grouped products on CUDA by torch's own `grouped_mm`. The package states the contract, here without source or target.

`grouped_mm` reads rows in the order of their groups, so the rows are copied into that order and the results are put
back. It refuses some layouts, for example addresses that are not a multiple of 16. Rows in these are copied too, and
the Triton kernel takes such matrices. On NVIDIA's cards of capability 9.0 and 10.0 nothing waits for the device; on
others torch copies the groups' sizes to the host. A tiny product finds out, and a card that waits gets the Triton
kernel too.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
from torch import Tensor

from planner.kernels.grouping.torch_grouping import Groups, has_triton


def grouped_matmul(a: Tensor, c: Tensor, groups: Groups) -> Tensor:
    """Multiply each row by the matrix of its group."""
    if not _takes(c):
        return _kernels().grouped_matmul(a, c, groups)
    return _put_back(_multiply(_sort_rows(a, groups), c, groups, a.shape[1]), groups, a.shape[1])


def grouped_outer(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """Sum `a[r]^T @ b[r]` over the rows of each group."""
    return _sum_outer(_sort_rows(a, groups), _sort_rows(b, groups), groups, a.shape[1])


def grouped_gradients(gout: Tensor, a: Tensor, c: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return both gradients of `grouped_matmul`."""
    if not _takes(c):
        return _kernels().grouped_gradients(gout, a, c, groups)
    i, g = a.shape[1], _sort_rows(gout, groups)
    rows = _put_back(_multiply(g, c.transpose(1, 2), groups, i), groups, i)
    return rows, _sum_outer(_sort_rows(a, groups), g, groups, i)


def _takes(c: Tensor) -> bool:
    """Whether `grouped_mm` takes matrices in this layout: row- or column-major, in multiples of 16 bytes."""
    # While a graph is captured nothing can be tried: then it is taken to run, as on all cards that plans use it for.
    if c.is_cuda and not torch.cuda.is_current_stream_capturing() and _waits(c.device):
        return False
    return _lies_well(c)


def _lies_well(x: Tensor) -> bool:
    """Whether matrices lie by rows or by columns, and begin at multiples of 16 bytes, as all of their lines do."""
    (rows, columns), (outer, inner) = x.shape[-2:], x.stride()[-2:]
    by_lines = inner == 1 and outer >= columns or outer == 1 and inner >= rows
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    aligned = all(stride == 1 or (stride * x.element_size()) % 16 == 0 and stride > 0 for stride in strides)
    return by_lines and aligned and x.data_ptr() % 16 == 0


@functools.cache
def _waits(device: torch.device) -> bool:
    """Whether `grouped_mm` waits for a device, or does not run on it; a tiny product tells."""
    mode = torch.cuda.get_sync_debug_mode()
    rows, ends = torch.zeros(16, 16, dtype=torch.bfloat16, device=device), torch.full((1,), 16, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.nn.functional.grouped_mm(rows, rows.view(1, 16, 16), offs=ends.to(torch.int32))
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return False


def _kernels() -> Any:
    return importlib.import_module("planner.kernels.grouped_matmul.triton_grouped")


def _sort_rows(x: Tensor, groups: Groups) -> Tensor:
    """Return rows in the order of their groups, as one matrix; copied unless they are, and lie as torch takes them."""
    rows = (x if groups.order is None else _take_rows(x, groups.order)).reshape(-1, x.shape[2])
    return rows if _lies_well(rows) else rows.clone(memory_format=torch.contiguous_format)


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    if not has_triton():
        return x.index_select(0, rows)
    taken: Tensor = importlib.import_module("planner.kernels.take.triton_take").take_rows(x, rows)
    return taken


def _ends(groups: Groups, inner: int) -> Tensor:
    ends = groups.offsets[1:]
    return (ends if inner == 1 else ends * inner).to(torch.int32)


def _multiply(rows: Tensor, c: Tensor, groups: Groups, inner: int) -> Tensor:
    products = torch.nn.functional.grouped_mm(rows, c, offs=_ends(groups, inner))
    if not groups.drops:
        return products
    # `grouped_mm` leaves the rows behind the last group uninitialised.
    dropped = torch.arange(len(rows), device=rows.device) >= groups.offsets[-1] * inner
    return products.masked_fill_(dropped.unsqueeze(1), math.nan if groups.poisons else 0)


def _put_back(products: Tensor, groups: Groups, inner: int) -> Tensor:
    n, k = groups.rows, products.shape[1]
    if groups.order is None:
        return products.view(n, inner, k)
    return products.new_empty((n, inner, k)).index_copy_(0, groups.order.long(), products.view(n, inner, k))


def _sum_outer(a: Tensor, b: Tensor, groups: Groups, inner: int) -> Tensor:
    sums = torch.nn.functional.grouped_mm(a.t(), b, offs=_ends(groups, inner))
    sums.masked_fill_((groups.offsets.diff() == 0).view(-1, 1, 1), 0)
    return sums.masked_fill_(groups.offsets[-1] < groups.rows, math.nan) if groups.poisons else sums
