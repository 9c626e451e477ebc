"""Matrices of few rows that lie as columns, by others that do too: MKL takes up to 50 times as long for them on Intel.

They are copied as rows first, or the transposed product is copied, if that takes little memory. Microseconds of `mm` by
the three ways, and of `bmm` by the first two, in float32 on one core of an Intel Xeon of 2023 (torch 2.13, 2026-12-01):

| matrices, rows, terms, columns | as they lie | copied | transposed |
|---|---|---|---|
| 2, 5, 8192 | 274 | 21 | 30 |
| 5, 5, 8192 | 1631 | 37 | 35 |
| 7, 5, 8192 | 1308 | 29 | 29 |
| 7, 256, 1024 | 1070 | 73 | 109 |
| 7, 1024, 256 | 1141 | 82 | 114 |
| 8, 5, 8192 | 27 | 32 | 29 |
| 16 of 7, 16, 64 | 139 | 20 | |
| 256 of 4, 64, 16 | 982 | 223 | |

How results lie, predicted times and predicted memory are the same on all processors; results are rounded otherwise. Any
module of `backends/torch/` may ask this one.
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

# So many rows, by so many columns or more. Copies of a first factor, and of a transposed product, have so many elements
# or fewer; of a batch so many are copied at a time.
_ROWS, _LEAST_COLUMNS, _MOST_COPIED = range(2, 8), 16, 2**13
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def has_few_rows(form: ProductForm) -> bool:
    """Whether `multiply_few_rows` may do otherwise than torch with a product of these sizes, in either order."""
    _, m, n, k = form.sizes
    return k > 1 and ((m in _ROWS and n >= _LEAST_COLUMNS) or (n in _ROWS and m >= _LEAST_COLUMNS))


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
    return copied * itemsize(dtype) if dtype in _DTYPES and has_few_rows(form) else 0


def first_as_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return the first of two matrices, copied as rows if MKL would take long for their product as they lie."""
    return a.contiguous() if a.numel() <= _MOST_COPIED and is_slow(a, b) else a


def multiply_few_rows(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices, or two batches of them, as `torch.mm` and `torch.bmm` do, in less time where Intel can.

    Autograd must not record it: it would keep the copy.
    """
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    if not is_slow(a, b):
        return multiply(a, b)
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
    few = rows in _ROWS and columns >= _LEAST_COLUMNS and terms > 1
    if not (few and _as_columns(a) and _as_columns(b) and is_intel()) or a.dtype not in _DTYPES.values():
        return False
    return a.is_cpu and usual(a, b)


def _as_columns(x: Tensor) -> bool:
    down, right = x.stride()[-2:]
    return down == 1 and right > 1
