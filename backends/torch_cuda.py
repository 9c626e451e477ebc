"""The rows of the torch backend's table that run Triton kernels on CUDA, and what they cost."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from planner.backends.kernel_rows import (
    POOL_FUNCTIONS,
    Kernels,
    PoolKernels,
    flattened_bytes,
    group_sizes,
)
from planner.backends.stock_rows import picoseconds
from planner.backends.torch_ops import OPS
from planner.cost import StepCost, itemsize
from planner.device import Device
from planner.kernels import torch_grouping
from planner.lower import GroupedForm, Op, PooledForm, grouped_form, pooled_form, spec_flops

__all__ = ["DTYPES", "cuda_kernels"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
# What a call launches beside the kernel: the tiles of each group and, unless the index is prepared, its order.
_LAUNCHES = 12
# Terms after which the sum of a group is cut, as `planner.kernels.triton_tiles` has them.
_CUT = 4096


def _kernel(module: str, name: str) -> Callable[..., Any]:
    """A function that imports its module, and Triton with it, when it is called."""

    def call(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"planner.kernels.{module}"), name)(*arguments)

    return call


def _grouped_cost(op: Op, device: Device) -> StepCost:
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    n, i, j, k = group_sizes(op.spec, form.gather.axes, form.inner, form.left, form.right)
    g, size = form.gather.size or 0, itemsize(op.dtype)
    flops = spec_flops(op.spec) * (2 if op.pair else 1)
    copied = flattened_bytes(op, form)
    # The order and where groups begin; the sort's keys and sorted keys; four tables of tiles.
    tables = 16 * n + 8 * 6 * (g + 2)
    mapped = form.rows_b if form.outer else form.rows_out
    tables += sum(8 * n for rows in (form.rows_a, mapped) if rows != form.gather.axes)
    if not (form.outer or op.pair) and mapped != form.gather.axes:  # rows' products, then added to their targets
        # summed in their order, which is sorted too.
        tables += n * i * k * max(4, size) + 40 * n + math.prod(op.output_shapes[0]) * (4 if size < 4 else 0)
    parts = 2 * (n * i // _CUT) * j * k * max(4, size) if form.outer or op.pair else 0
    moved = op.bytes_touched() + 2 * copied + 16 * n
    seconds = max(flops / device.product_rate(max(1, n * i // max(1, min(g, n))), j, k), device.moving_seconds(moved))
    seconds += n * device.sort_row_seconds + _LAUNCHES * (2 if op.pair else 1) * device.launch_seconds
    return StepCost(flops, moved, copied, copied + tables + parts, picoseconds(seconds))


def _pooled_cost(op: Op, device: Device) -> StepCost:
    form = pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    b, q, k, d = group_sizes(op.spec, form.batch, form.queries, form.chosen, form.depth)
    chosen, size = b * q * k, itemsize(op.dtype)
    flops = spec_flops(op.spec) * (2 if op.pair else 1)
    copied = flattened_bytes(op, form)
    sorts = op.pair or form.place == 2
    # Rows that keys name; where queries begin; the sort of the keys, and the query of each.
    scratch = 8 * chosen + 32 * b * q + (8 * 5 * chosen + 32 * b * (form.gather.size or 0) if sorts else 0)
    scratch += 2 * (chosen // _CUT) * d * max(4, size) if op.pair or form.scores != 2 else 0
    moved = op.bytes_touched() + 2 * copied + (2 if op.pair else 1) * chosen * d * size + 8 * chosen
    seconds = max(flops / device.flop_rate, device.moving_seconds(moved))
    seconds += sorts * chosen * device.sort_row_seconds + _LAUNCHES * (2 if op.pair else 1) * device.launch_seconds
    return StepCost(flops, moved, copied, scratch + copied, picoseconds(seconds))


def cuda_kernels() -> Kernels:
    """Return the kernels for CUDA; they need Triton when they run."""

    def outer(a: Any, b: Any, groups: Any, size: int, source_a: Any, source_b: Any) -> Any:
        return _kernel("triton_grouped", "grouped_outer")(a, b, groups, source_a, source_b)

    pool = PoolKernels(**{name: _kernel("triton_pooled", name) for name in POOL_FUNCTIONS}, cost=_pooled_cost)
    return Kernels(
        OPS,
        torch_grouping.group_rows,
        _kernel("triton_grouped", "grouped_matmul"),
        outer,
        _kernel("triton_grouped", "grouped_gradients"),
        _grouped_cost,
        {"gathered dot, Triton": pool},
        # As on a CPU, the programs hand over operands that are conjugated already; these are real.
        hand_over=torch.conj,
        kinds=("cuda",),
        dtypes=DTYPES,
        label=", Triton",
    )
