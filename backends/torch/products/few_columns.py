"""Products with few columns on processors of AMD, in other calls than torch's: its `mm` and `bmm` call MKL.

Microseconds by `mm`, and by oneDNN, in float32 on one core of an AMD EPYC 7003 (torch 2.13, 2026-11-29):

| rows, terms | 2 columns | 5 | 8 | 9 | 12 | 16 |
|---|---|---|---|---|---|---|
| 2048, 36 | 89, 57 | 125, 61 | 95, 48 | 147, 73 | 52, 73 | 38, 60 |
| 16384, 4 | 114, 112 | 171, 115 | 127, 61 | 197, 130 | 86, 131 | 77, 77 |
| 16384, 64 | 1287, 332 | 1680, 379 | 1333, 277 | 1989, 535 | 734, 531 | 463, 413 |
| 131072, 36 | 5636, 1897 | 8021, 2180 | 6202, 1674 | 9608, 2793 | 3941, 2819 | 2803, 1955 |

If the rows lie as columns in memory, as in gradients of weights, the transposed product takes less time. Microseconds
by `mm`, and by the transposed product and a copy of its result:

| rows, terms | 2 columns | 5 | 8 | 9 | 12 | 16 |
|---|---|---|---|---|---|---|
| 16, 2048 | 46, 15 | 55, 17 | 46, 17 | 64, 21 | 30, 21 | |
| 64, 2048 | 193, 36 | 234, 43 | 221, 44 | 283, 54 | 115, 56 | 77, 70 |
| 9, 32768 | 387, 132 | 460, 301 | 390, 510 | | | |
| 64, 32768 | 3838, 436 | 4541, 615 | 5029, 734 | 5888, 756 | 1933, 809 | 1259, 1027 |

Batches of matrices are multiplied as their transposes, too, some at a time, and the results are copied. Microseconds by
`bmm`, and so (AMD EPYC with AVX-512, 2026-11-30):

| matrices, rows, terms | 2 columns | 8 | 9 |
|---|---|---|---|
| 8192, 40, 3 | | 6776, 2795 | |
| 256, 64, 64 | | 1145, 411 | |
| 64, 256, 128 | | | 3198, 851 |
| 64, 1024, 16 | 1023, 567 | | |

How results lie, predicted times and predicted memory are the same on all processors; results are rounded otherwise. Any
module of `backends/torch/` may ask this one. On processors of Intel its functions do what `few_rows.py` says.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.stock import SMALL_MATRIX, is_swapped
from planner.backends.torch.contexts.modes import usual
from planner.backends.torch.products.few_rows import is_slow, multiply_few_rows
from planner.cost.rates import cpu_name
from planner.language.dtypes import itemsize
from planner.language.spec import Spec
from planner.program.forms import ProductForm

_MOST_COLUMNS = 9
# oneDNN computes products of so many elements of the first factor or more, of so many terms or fewer, for which it does
# not copy that factor, and of so many rows for each column or more.
_LEAST_ELEMENTS, _MOST_TERMS, _MORE_ROWS = 2**16, 512, 4
# From so many terms on, a product takes longer than its transpose and a copy of that.
_LEAST_TERMS = 32
# MKL is faster if the second factor lies as columns: up to 4 of more than 16 terms took 0.5 to 1.3 of oneDNN's time,
# and 3 to 8 of 256 and 512 terms 0.25 to 0.9 on a newer EPYC (AVX-512, torch 2.13, 2026-11-30).
_MOST_DOTS, _SHORT_DOTS, _LONG_DOTS = 4, 16, 128
# What is allocated besides matrices, rounded up: by oneDNN 1,536 bytes for each of 700 products of 2 to 11 columns, and
# 14,400 where torch copies a matrix that is transposed.
_SCRATCH_BYTES = 2**14
# Products whose rows lie as columns are transposed from so many elements of the first factor on, with so many rows for
# each column or more, if the result has so many elements or fewer.
_LEAST_TURNED, _MORE_TURNED, _MOST_COPIED = 2**14, 1.75, 2**14
# Batches are multiplied as their transposes if the first factors have so many elements or more, and the sums so many
# terms or fewer. So many elements of the result are computed and copied at a time; of a larger matrix all.
_LEAST_BATCH, _MOST_BATCH_TERMS, _COPIED_AT_ONCE = 2**16, 256, 2**18


@lru_cache
def is_amd() -> bool:
    """Whether this machine's processor is AMD's, as far as the system tells."""
    return bool(re.search(r"\bAMD\b|AuthenticAMD", cpu_name()))


@lru_cache
def _linear() -> Any:
    """Return the operator by which torch's own compiler calls oneDNN's product; None if it is of no use here."""
    if not (is_amd() and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return None
    return torch.ops.mkldnn._linear_pointwise.default


def _is_few(rows: int, columns: int, terms: int) -> bool:
    few = 2 <= columns <= _MOST_COLUMNS and _MORE_ROWS * columns <= rows and terms <= _MOST_TERMS
    return few and rows * terms >= _LEAST_ELEMENTS


def _may_be_turned(rows: int, columns: int, terms: int) -> bool:
    few = 2 <= columns <= _MOST_COLUMNS and _MORE_TURNED * columns <= rows
    is_long = terms >= _LEAST_TERMS and rows * terms >= _LEAST_TURNED
    return few and is_long and rows * columns <= _MOST_COPIED


def _is_turned_batch(batch: int, rows: int, columns: int, terms: int) -> bool:
    few = batch > 1 and 2 <= columns <= _MOST_COLUMNS and _MORE_ROWS * columns <= rows
    is_long = rows * columns * terms >= SMALL_MATRIX and batch * rows * terms >= _LEAST_BATCH
    return few and is_long and terms <= _MOST_BATCH_TERMS


def _copied_at_once(batch: int, rows: int, columns: int) -> int:
    """Return how many matrices are multiplied and copied at a time."""
    return min(batch, max(1, _COPIED_AT_ONCE // (rows * columns)))


def _as_dots(b: Tensor) -> bool:
    """Whether MKL is faster if `b`, or each matrix of it, is the second factor."""
    terms, columns = b.shape[-2:]
    few = columns <= _MOST_DOTS or terms >= _LONG_DOTS
    return few and terms > _SHORT_DOTS and b.stride(-2) == 1


def has_few_columns(form: ProductForm, by_chunks: bool = True) -> bool:
    """Whether `multiply_few` may do otherwise than torch with a product of these sizes, in either order.

    Args:
        form: the product.
        by_chunks: whether batches count that are multiplied as their transposes. One call of torch's einsum may do so
            without a copy.
    """
    batch, m, n, k = form.sizes
    return any(
        _is_few(*sides) or (_may_be_turned(*sides) if batch == 1 else by_chunks and _is_turned_batch(batch, *sides))
        for sides in ((m, n, k), (n, m, k))
    )


def runs_few(form: ProductForm, by_chunks: bool = True) -> bool:
    """Whether `multiply_few` may do otherwise than torch with such a product on this processor."""
    return has_few_columns(form, by_chunks) and _linear() is not None


def few_scratch(form: ProductForm, dtype: str, spec: Spec) -> int:
    """Return the bytes that `multiply_few` may allocate besides the result: copies of one matrix, and of results.

    Args:
        form: the product.
        dtype: the dtype of the operands.
        spec: its spec, which tells the first factor.
    """
    if dtype != "float32" or not has_few_columns(form):
        return 0
    batch, m, n, k = form.sizes
    weights = min(m, n) * k if _is_few(max(m, n), min(m, n), k) else 0
    copied = m * n if batch > 1 or m * n <= _MOST_COPIED else 0
    if _is_turned_batch(batch, *((n, m) if is_swapped(form, spec) else (m, n)), k):
        copied *= _copied_at_once(batch, m, n)
    return _SCRATCH_BYTES + itemsize(dtype) * (weights + copied)


def multiply_few(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices, or two batches of them, as `torch.mm` and `torch.bmm` do, in less time where it can be."""
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    (rows, terms), columns, linear = a.shape[-2:], b.shape[-1], _linear()
    if linear is None:
        trains = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
        if not trains:
            return multiply_few_rows(a, b)
        return _FewColumns.apply(a, b) if a.dim() == 2 and is_slow(a, b) else multiply(a, b)
    if not (2 <= columns <= _MOST_COLUMNS and a.dtype == b.dtype == torch.float32 and a.is_cpu):
        return multiply(a, b)
    sides, batch = (rows, columns, terms), 1 if a.dim() == 2 else a.shape[0]
    is_few, may_be_turned = _is_few(*sides), batch == 1 and _may_be_turned(*sides)
    by_chunks = _is_turned_batch(batch, *sides)
    if not (is_few or may_be_turned or by_chunks) or not (usual(a, b) and torch._C._get_mkldnn_enabled()):
        return multiply(a, b)
    trains = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if a.dim() == 3:
        lies_apart = a.stride(2) != 1 or a.stride(1) != terms  # then oneDNN would copy the matrices
        if trains or a.stride(2) != 1 or not batch:
            return torch.bmm(a, b)
        if batch == 1:
            return multiply_few(a[0], b[0]).unsqueeze(0)
        if _as_dots(b) or (lies_apart and not by_chunks):
            return torch.bmm(a, b)
        return _by_chunks(a, b) if by_chunks else _one_by_one(a, b, linear)
    by_linear = is_few and a.is_contiguous() and not _as_dots(b)
    if not by_linear and not (a.stride(0) == 1 and may_be_turned):
        return torch.mm(a, b)
    if trains:
        return _FewColumns.apply(a, b)
    if by_linear:
        return linear(a, b.contiguous().t(), None, "none", [], "")
    return torch.mm(b.t(), a.t()).t().contiguous()


def _by_chunks(a: Tensor, b: Tensor) -> Tensor:
    """Multiply batches of matrices as their transposes, some at a time, and copy the results."""
    result = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    at_once = _copied_at_once(*result.shape)
    for x, y, into in zip(a.split(at_once), b.split(at_once), result.split(at_once), strict=True):
        into.copy_(torch.bmm(y.mT, x.mT).mT)
    return result


def _one_by_one(a: Tensor, b: Tensor, linear: Any) -> Tensor:
    """Multiply batches of matrices by oneDNN."""
    result = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    for x, y, into in zip(a, b, result, strict=True):
        into.copy_(linear(x, y.contiguous().t(), None, "none", [], ""))
    return result


class _FewColumns(torch.autograd.Function):
    """`multiply_few` of two matrices with gradients, of few columns or few rows.

    It keeps what `torch.mm` does, and its gradients lie as there.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """Multiply, and keep each matrix of which the gradient of the other is computed."""
        for_a, for_b = ctx.needs_input_grad
        ctx.save_for_backward(a if for_b else None, b if for_a else None)
        ctx.columns = [x.stride(0) == 1 and x.stride(1) == x.shape[0] for x in (a, b)]
        return multiply_few(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return both gradients, which may be differentiated again.

        As those of `torch.mm`, the gradient of a matrix that is transposed in memory lies so too.
        """
        a, b = ctx.saved_tensors
        of_a = of_b = None
        if b is not None:
            of_a = multiply_few(b, gradient.t()).t() if ctx.columns[0] else multiply_few(gradient, b.t())
        if a is not None:
            of_b = multiply_few(gradient.t(), a).t() if ctx.columns[1] else multiply_few(a.t(), gradient)
        return of_a, of_b
