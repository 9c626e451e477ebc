"""Grouped products on CUDA by torch's own grouped product of matrices; `torch_grouped`'s contracts.

It takes rows that lie group by group, so they are taken in that order and put back. Matrices that it does not take as
they lie, in memory that 16 does not divide say, are left to the Triton kernel, which does. Nothing waits for the device
on cards of capability 9.0 and 10.0; elsewhere torch copies the groups' sizes to the host.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from planner.kernels.grouping.torch_grouping import Groups

__all__ = ["grouped_gradients", "grouped_matmul", "grouped_outer"]


def grouped_matmul(a: Tensor, c: Tensor, groups: Groups) -> Tensor:
    """Multiply each row by the matrix of its group; those of dropped rows are zero."""
    if not _takes(c):
        return _kernels().grouped_matmul(a, c, groups)
    return _put_back(_products(_taken(a, groups), c, groups, a.shape[1]), groups, a.shape[1])


def grouped_outer(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """Sum `a[r]^T @ b[r]` over the rows of each group."""
    return _sums(_taken(a, groups), _taken(b, groups), groups, a.shape[1])


def grouped_gradients(gout: Tensor, a: Tensor, c: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Both gradients of `grouped_matmul`."""
    if not _takes(c):
        return _kernels().grouped_gradients(gout, a, c, groups)
    i, g = a.shape[1], _taken(gout, groups)
    rows = _put_back(_products(g, c.transpose(1, 2), groups, i), groups, i)
    return rows, _sums(_taken(a, groups), g, groups, i)


def _takes(c: Tensor) -> bool:
    """Whether matrices lie as torch takes them: by rows or by columns, all of it in steps of 16 bytes."""
    size = c.element_size()
    strides = [c.stride(d) for d in range(3) if c.shape[d] > 1]
    by_lines = c.stride(2) == 1 and c.stride(1) >= c.shape[2] or c.stride(1) == 1 and c.stride(2) >= c.shape[1]
    return by_lines and c.data_ptr() % 16 == 0 and all(x == 1 or (x * size) % 16 == 0 and x > 0 for x in strides)


def _kernels() -> Any:
    return importlib.import_module("planner.kernels.grouped_matmul.triton_grouped")


def _taken(x: Tensor, groups: Groups) -> Tensor:
    """Rows in the order of their groups, as a matrix."""
    return x.index_select(0, groups.order).reshape(-1, x.shape[2])


def _ends(groups: Groups, inner: int) -> Tensor:
    return (groups.offsets[1:] * inner).to(torch.int32)


def _products(rows: Tensor, c: Tensor, groups: Groups, inner: int) -> Tensor:
    found = torch.nn.functional.grouped_mm(rows, c, offs=_ends(groups, inner))
    # What lies behind the last group is whatever was in memory.
    dropped = torch.arange(len(rows), device=rows.device) >= groups.offsets[-1] * inner
    return found.masked_fill_(dropped.unsqueeze(1), 0)


def _put_back(found: Tensor, groups: Groups, inner: int) -> Tensor:
    n, k = len(groups.order), found.shape[1]
    return found.new_empty((n, inner, k)).index_copy_(0, groups.order, found.view(n, inner, k))


def _sums(a: Tensor, b: Tensor, groups: Groups, inner: int) -> Tensor:
    found = torch.nn.functional.grouped_mm(a.t(), b, offs=_ends(groups, inner))
    return found.masked_fill_((groups.offsets.diff() == 0).view(-1, 1, 1), 0)
