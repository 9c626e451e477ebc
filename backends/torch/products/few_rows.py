"""Matrices of few rows that lie as columns, by others that do too: MKL takes up to 50 times as long for them on Intel.

They are copied as rows first, or the transposed product is copied, if that takes little memory. Microseconds as they
lie, and with the copy, on one core of an Intel Xeon of 2023 (torch 2.13, 2026-12-01):

| matrices, rows, terms, columns | float32 | float64 |
|---|---|---|
| 2, 5, 256 | 10, 8 | 8, 9 |
| 5, 5, 64 | 11, 7 | 7, 8 |
| 5, 5, 8192 | 1079, 27 | 488, 48 |
| 7, 256, 128 | 26, 17 | 22, 31 |
| 7, 256, 1024 | 1297, 78 | 1041, 298 |
| 7, 1100, 128 | 63, 70 | 126, 166 |
| 7, 1100, 256 | 1545, 123 | 231, 258 |
| 64 of 2, 5, 16 | 31, 26 | 30, 28 |
| 64 of 7, 16, 16 | 152, 54 | 96, 45 |
| 64 of 7, 64, 32 | 74, 123 | 95, 152 |
| 64 of 7, 64, 64 | 1321, 173 | 1128, 280 |

With 8 rows MKL is fast: 8 x 5 by 5 x 8192 takes 27 us as they lie. How results lie, predicted times and predicted
memory are the same on all processors; results are rounded otherwise. Any module of `backends/torch/` may ask this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.backends.torch.contexts.modes import usual
from planner.backends.torch.products.batches import is_intel
from planner.cost.layout import Layout, neighbours
from planner.language.dtypes import itemsize
from planner.language.spec import Spec
from planner.program.forms import ProductForm

# The first factor has one of these numbers of rows. The product of two matrices has `_LEAST_ELEMENTS` or more. Each
# product of a batch has `_LEAST_COLUMNS` or more, or `_MORE_COLUMNS` if more than `_FEW_TERMS` terms are summed.
_ROWS, _LEAST_ELEMENTS, _LEAST_COLUMNS, _MORE_COLUMNS, _FEW_TERMS = range(2, 8), 2**10, 16, 64, 16
# Copies of a first factor, and of a transposed product, have so many elements or fewer; of a batch so many are made
# at a time.
_MOST_COPIED = 2**13
# Torch copies a transposed matrix of so many elements or more in blocks of so many, beside the copy.
_BLOCK = 60 * 60
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def _is_few(batch: bool, rows: int, columns: int, terms: int) -> bool:
    if rows not in _ROWS or terms <= 1:
        return False
    least = _LEAST_COLUMNS if terms <= _FEW_TERMS else _MORE_COLUMNS
    return columns >= least if batch else rows * columns >= _LEAST_ELEMENTS


def has_few_rows(form: ProductForm) -> bool:
    """Whether `multiply_few_rows` may do otherwise than torch with a product of these sizes, in either order."""
    batch, m, n, k = form.sizes
    stacked = len(form.batch) > 1 and len(form.left) == len(form.right) == len(form.contracted) == 1
    # Of stacked batches `torch.matmul` makes one.
    return not stacked and (_is_few(batch > 1, m, n, k) or _is_few(batch > 1, n, m, k))


def runs_few_rows(form: ProductForm) -> bool:
    """Whether `multiply_few_rows` may do otherwise than torch with such a product on this processor."""
    return has_few_rows(form) and is_intel()


def lies_as_columns(form: ProductForm, spec: Spec, layouts: Sequence[Layout | None]) -> bool:
    """Whether a matrix of few rows and the other one both lie as columns, with the former as the first factor."""
    if not has_few_rows(form):
        return False
    _, m, n, _ = form.sizes
    first, second = (neighbours(term, layout, spec) for term, layout in zip(spec.inputs, layouts, strict=True))
    return (m in _ROWS and first in form.left and second in form.contracted) or (
        n in _ROWS and second in form.right and first in form.contracted
    )


def few_rows_scratch(form: ProductForm, dtype: str) -> int:
    """Return the bytes that `multiply_few_rows` may allocate besides the result, if both matrices lie as columns."""
    batch, m, n, k = form.sizes
    copied = min(_MOST_COPIED, batch * max(min(m, n) * k, m * n))
    copied += _BLOCK if copied >= _BLOCK else 0
    return copied * itemsize(dtype) if dtype in _DTYPES and has_few_rows(form) else 0


def first_as_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return the first of two matrices, copied as rows if MKL would take long for their product as they lie."""
    return a.contiguous() if a.numel() <= _MOST_COPIED and is_slow(a, b) else a


def multiply_few_rows(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices, or two batches of them, as `torch.mm` and `torch.bmm` do, in less time where Intel can.

    Autograd must not record it: it would keep the copy.
    """
    if not is_slow(a, b):
        return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    (rows, terms), columns = a.shape[-2:], b.shape[-1]
    if a.numel() <= _MOST_COPIED:
        return multiply(a.contiguous(), b)
    if rows * terms > _MOST_COPIED:
        small = a.dim() == 2 and rows * columns <= _MOST_COPIED
        return torch.mm(b.t(), a.t()).t().contiguous() if small else multiply(a, b)
    at_once, result = _MOST_COPIED // (rows * terms), a.new_empty((a.shape[0], rows, columns))
    for x, y, into in zip(a.split(at_once), b.split(at_once), result.split(at_once), strict=True):
        torch.bmm(x.contiguous(), y, out=into)
    return result


def is_slow(a: Tensor, b: Tensor) -> bool:
    """Whether this processor takes long for a product as the two matrices, or batches of them, lie."""
    (rows, terms), columns = a.shape[-2:], b.shape[-1]
    # Sizes may be symbols where a tracer or a compiler looks, and would be specialised. Most numbers end it here.
    if not is_intel() or (type(rows) is int and rows not in _ROWS):
        return False
    if not usual(a, b) or a.dtype not in _DTYPES.values() or not a.is_cpu:
        return False
    return _is_few(a.dim() == 3 and a.shape[0] > 1, rows, columns, terms) and _as_columns(a) and _as_columns(b)


def _as_columns(x: Tensor) -> bool:
    down, right = x.stride()[-2:]
    return down == 1 and right > 1
