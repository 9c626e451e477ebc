"""The row for products with few columns and many rows: the transposed product, whose result is viewed transposed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from planner.backends.common.stock import SMALL_MATRIX, Product, is_swapped
from planner.backends.common.stock_rows import MOST_FEW, are_dots, flat_stock_work
from planner.backends.torch.ops import OPS, viewing
from planner.backends.torch.products import least_of_product
from planner.cost.device import Device
from planner.cost.figures import Work
from planner.cost.layout import Layout, reordered
from planner.language.cached import cached_by_step
from planner.language.spec import Spec
from planner.program.forms import known_product, product_form
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Einsum, Op

TRANSPOSED = "transposed matmul"
_HAS_MKL = torch.backends.mkl.is_available()


def transposed_row() -> Implementation:
    """Return the row."""
    return form_row(
        TRANSPOSED,
        _find,
        _work,
        _run,
        _layouts,
        any_sizes=True,
        inputs=2,
        kinds=("cpu",),
        least=lambda op, device: least_of_product(op, device, 1),
    )


@cached_by_step
def _find(op: Op) -> Op | str:
    """Return the step whose result is that of a product with few columns and many rows, transposed.

    MKL multiplies few rows by many columns in a third to a fortieth of the time of many rows by few columns (one core
    of an AMD EPYC, torch 2.13, 2026-11-28). If the terms of both operands' sums are neighbours in memory, it takes as
    long.
    """
    form = product_form(op.spec) if isinstance(op, Einsum) else None
    if form is None or not form.contracted or op.dtype not in ("float32", "float64") or not _HAS_MKL:
        return "needs a product of matrices of float32 or float64, and MKL"
    (batch, rows, columns, terms), order = form.sizes, (*form.batch, *form.right, *form.left)
    if is_swapped(form, op.spec):
        rows, columns, order = columns, rows, (*form.batch, *form.left, *form.right)
    if not 1 < columns <= MOST_FEW or rows < 4 * columns:
        return f"needs a result of 2 to {MOST_FEW} columns, and of four times as many rows"
    if batch > 1 and rows * columns * terms < SMALL_MATRIX:
        return "torch multiplies small matrices of a batch itself"
    if terms > MOST_FEW and are_dots(form, op):
        return "the terms of both operands' sums are neighbours in memory"
    return dataclasses.replace(op, spec=Spec(op.spec.inputs, order, op.spec.sizes))


def transposed_step(op: Op) -> Op | None:
    """Return the step whose result the row `TRANSPOSED` transposes; None if it refuses the op."""
    found = _find(op)
    return None if isinstance(found, str) else found


def _work(op: Op, transposed: Op, device: Device) -> list[Work]:
    return flat_stock_work(transposed, device)


def _run(op: Op, transposed: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    return (transposed_product(op)(*inputs),)


@cached_by_step
def transposed_product(op: Op) -> Product:
    """Return the function that multiplies two operands, and returns a view of the transposed result."""
    transposed = transposed_step(op)
    assert transposed is not None
    spec = transposed.spec
    product = OPS.product(known_product(spec), spec)
    back = viewing([spec.output.index(e) for e in op.spec.output], (1,) * len(spec.output))
    return lambda a, b: back(product(a, b))


def _layouts(op: Op, transposed: Op) -> tuple[Layout | None, ...]:
    return (reordered(transposed.spec.output, op.spec.output, op.spec),)
