"""The rows of the torch backend's table that run torch's own grouped product of matrices on CUDA.

It waits for nothing where the operands are bfloat16, the card's capability is 9.0 or 10.0 and there are at most 1,023
groups; otherwise torch copies the groups' sizes to the host, or fails.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from planner.backends.common.kernel_rows import Kernels, flattened_bytes, group_sizes
from planner.backends.common.stock_rows import picoseconds
from planner.backends.torch.cuda import LAUNCHES, TABLES, cuda_kernels
from planner.cost.device import Device
from planner.cost.figures import StepCost
from planner.kernels.grouped_matmul import torch_grouped_mm
from planner.language.dtypes import itemsize
from planner.language.spec import Term
from planner.program.forms import GroupedForm, grouped_form
from planner.program.ops import Op, spec_flops

__all__ = ["grouped_mm_kernels"]


def _refuses(op: Op) -> str | None:
    """Why torch's own grouped product does not take a step: it wants strides of whole 16 bytes, and few groups."""
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    n, i, j, k = group_sizes(op.spec, form.gather.axes, form.inner, form.left, form.right)
    if op.dtype != "bfloat16":
        return f"torch's grouped_mm does not multiply {op.dtype} without looking at the groups' sizes"
    if not 0 < (form.gather.size or 0) < 1024:
        return "torch's grouped_mm takes 1 to 1,023 groups"
    if not 0 < n * i < 2**31:
        return "torch's grouped_mm takes 1 to 2^31 - 1 rows"
    if not j * k or j % 8 or k % 8:
        return "torch's grouped_mm takes matrices whose sides are multiples of 8"
    mapped = form.rows_b if form.outer else form.rows_out
    if form.rows_a != form.gather.axes or mapped != form.gather.axes:
        return "rows are shared or summed"
    if not form.outer and not _in_order(op, form):
        return "torch's grouped_mm takes matrices that lie one after the other"
    return None


def _in_order(op: Op, form: GroupedForm) -> bool:
    """Whether the matrices lie one after the other without gaps, each by rows or by columns."""
    term, layout = op.spec.inputs[form.matrix], (op.layouts or (None,) * 3)[form.matrix + op.pair]
    if layout is not None and (layout.repeated or not layout.unit or len(layout.runs) > 1):
        return False
    found = [term[d] for d in (range(len(term)) if layout is None else layout.runs[0]) if op.spec.size(term[d]) != 1]
    orders: list[Term] = [(form.gather, *form.left, *form.right), (form.gather, *form.right, *form.left)]
    return any([e for e in order if op.spec.size(e) != 1] == found for order in orders)


def _cost(op: Op, device: Device) -> StepCost:
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    n, i, j, k = group_sizes(op.spec, form.gather.axes, form.inner, form.left, form.right)
    g, size = form.gather.size or 0, itemsize(op.dtype)
    flops = spec_flops(op.spec) * (2 if op.pair else 1)
    # Rows in the order of their groups, of two arrays at a time; a pair takes those of three.
    rows = n * i * (j + k) * size
    taken = rows + (n * i * j * size if op.pair else 0)
    tables = 24 * n + TABLES * (g + 2) + 9 * n * i
    moved = op.bytes_touched() + 2 * taken + 16 * n
    rate = device.product_rate(max(1, n * i // max(1, min(g, n))), j, k, op.dtype)
    seconds = max(flops / rate, device.moving_seconds(op.bytes_touched())) + device.moving_seconds(2 * taken)
    seconds += n * device.sort_row_seconds + LAUNCHES * (2 if op.pair else 1) * device.launch_seconds
    copied = flattened_bytes(op, form)
    return StepCost(flops, moved, copied, copied + rows + tables, picoseconds(seconds))


def grouped_mm_kernels() -> Kernels:
    """Return torch's own grouped products of matrices."""

    def matmul(a: Any, c: Any, groups: Any, source: Any, target: Any, targets: Any) -> Any:
        return torch_grouped_mm.grouped_matmul(a, c, groups)

    def outer(a: Any, b: Any, groups: Any, size: int, source_a: Any, source_b: Any) -> Any:
        return torch_grouped_mm.grouped_outer(a, b, groups)

    return dataclasses.replace(
        cuda_kernels(), matmul=matmul, outer=outer, gradients=torch_grouped_mm.grouped_gradients,
        grouped_cost=_cost, pools={}, refuses=_refuses, capabilities=(90, 100), label=", grouped_mm",
    )  # fmt: skip
