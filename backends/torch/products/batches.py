"""Batches of vectors: the order in which an Intel Xeon multiplies them fastest, and what MKL takes for some of them.

Other processors take them as given. The order was measured on one core with AVX-512, torch 2.13, 2026-11-29. Any module
of `backends/torch/` may ask this one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from planner.backends.common.elementwise import LINE_BYTES
from planner.backends.common.stock import SMALL_MATRIX
from planner.backends.common.stock_layout import matrix_copies
from planner.backends.torch.contexts.modes import usual
from planner.cost.device import Device
from planner.cost.layout import Layout, in_memory, neighbours
from planner.cost.rates import cpu_name
from planner.language.dtypes import itemsize
from planner.language.spec import Spec
from planner.program.forms import ProductForm
from planner.program.ops import Op

# A dot product is long from `SMALL_MATRIX` terms on: those of fewer torch multiplies in a loop of its own, those of
# more MKL. 2,048 of 1,024 floats take 6.5 ms by MKL, and 1.6 in parts of so many terms.
DOT_PART = 128
# Vectors come second if the matrices have so many neighbours at most: as rows they take 1.1 to 1.7 times as long with
# 2 to 8 neighbours, and 0.2 to 0.8 times with 16 or more.
_FEW = 8
# What MKL takes for each term of long dot products where that is more than reading them; and for each line of the cache
# that holds a run of neighbours in matrices that it multiplies by vectors, if they are parts of an array that the cache
# does not hold, and the next run of a matrix is so many bytes away. One core of an AMD EPYC 7003, torch 2.13,
# 2026-11-29: runs of a whole line took 4 to 18 ns, runs of 12 bytes 3, runs of 16 bytes that are 80 bytes apart none.
_TERM_SECONDS, _LINE_SECONDS, _FAR_BYTES = 1.35e-9, 12e-9, 512
_NAMES, _DTYPES = ("float32", "float64"), (torch.float32, torch.float64)


@lru_cache
def is_intel() -> bool:
    """Whether this machine's processor is Intel's, as far as the system tells."""
    return bool(re.search(r"\bIntel\b|GenuineIntel", cpu_name()))


def has_long_dots(form: ProductForm) -> bool:
    """Whether a product is a batch of dot products that can be cut into parts."""
    batch, m, n, k = form.sizes
    return batch > 1 and m == n == 1 and k >= SMALL_MATRIX and k % DOT_PART == 0


def dot_scratch(form: ProductForm, dtype: str) -> int:
    """Return the bytes of the results of the parts of dot products."""
    return form.sizes[0] * form.sizes[3] // DOT_PART * itemsize(dtype) if has_long_dots(form) and dtype in _NAMES else 0


def vector_seconds(form: ProductForm, op: Op, device: Device) -> float:
    """Return what products of a batch of vectors take beyond moving and multiplying."""
    (batch, m, n, k), size = form.sizes, itemsize(op.dtype)
    if batch == 1 or 1 not in (m, n) or device.products or op.dtype not in _NAMES:
        return 0.0
    if m == n:
        longer = batch * k * _TERM_SECONDS - device.moving_seconds(op.bytes_touched())
        return max(0.0, longer) if k >= SMALL_MATRIX else 0.0
    number = int(m == 1)
    term, layout = op.spec.inputs[number], (op.layouts or (None, None))[number]
    if matrix_copies(term, layout, form.matrices[number], op.spec):
        return 0.0
    run, apart, sizes = size, 0, dict(zip(term, op.spec.shape(term), strict=True))
    for axis in reversed(in_memory(term, layout)):
        in_batch = axis in form.batch
        if apart and not in_batch and sizes[axis] > 1:
            break
        if in_batch and sizes[axis] > 1:
            apart = max(apart, run) * sizes[axis]
        elif not apart:
            run *= sizes[axis]
    total = op.spec.elements[number] * size
    scattered = run < m * n * k * size and run <= LINE_BYTES and apart >= _FAR_BYTES and total > device.cache_bytes
    return total / LINE_BYTES * _LINE_SECONDS if scattered else 0.0


def has_few_neighbours(form: ProductForm, spec: Spec, layouts: Sequence[Layout | None]) -> bool:
    """Whether vectors should come second, as the matrices of a batch have few neighbours."""
    if not (form.batch and is_intel()) or bool(form.left) == bool(form.right):
        return False
    number, (_, m, n, k) = 0 if form.left else 1, form.sizes
    close = neighbours(spec.inputs[number], layouts[number], spec)
    return close is not None and (k if close in form.contracted else m * n) <= _FEW


def may_be_turned(form: ProductForm) -> bool:
    """Whether `multiply_batch` may do otherwise than `torch.bmm` with a product of these sizes."""
    _, m, n, k = form.sizes
    return 1 in (m, n) and (min(k, m * n) <= _FEW)


def multiply_batch(a: Tensor, b: Tensor) -> Tensor:
    """Multiply batches of matrices, of which the first may be rows."""
    (batch, rows, terms), columns = a.shape, b.shape[2]
    if rows != 1 or not (is_intel() and a.is_cpu and a.dtype in _DTYPES and usual(a, b)):
        return torch.bmm(a, b)
    if columns > 1:
        few = (terms if b.stride(1) == 1 else columns) <= _FEW
        return torch.bmm(b.mT, a.mT).mT if few and terms * columns >= SMALL_MATRIX else torch.bmm(a, b)
    if terms < SMALL_MATRIX or terms % DOT_PART or not (a.is_contiguous() and b.is_contiguous()):
        return torch.bmm(a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return torch.bmm(a, b)
    parts = torch.bmm(a.view(-1, 1, DOT_PART), b.view(-1, DOT_PART, 1))
    return parts.view(batch, terms // DOT_PART, 1).sum(1, keepdim=True)
