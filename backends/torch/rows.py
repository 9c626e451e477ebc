"""The table of the torch backend: stock rows, rows for products, and rows for the grouped and pooled kernels."""

from __future__ import annotations

import importlib.util
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.kernel_rows import (
    POOL_FUNCTIONS,
    WHOLE_POOL,
    Kernels,
    PoolKernels,
    flattened_bytes,
    group_sizes,
    kernel_rows,
)
from planner.backends.common.stock_layout import stock_layout
from planner.backends.common.stock_rows import flat_stock_cost, picoseconds, stock_rows
from planner.backends.torch.cuda_rows import cuda_rows, grouped_mm_kernels
from planner.backends.torch.ops import GUARD, OPS, cast, empty, torch_dtype
from planner.backends.torch.products import product_rows
from planner.cost.device import Device
from planner.cost.figures import StepCost
from planner.kernels.gathered_dot import torch_pooled
from planner.kernels.grouped_matmul import torch_grouped
from planner.kernels.grouping import torch_grouping
from planner.language.dtypes import itemsize
from planner.program.forms import GroupedForm, PooledForm, grouped_form, pooled_form
from planner.program.implementations import Table
from planner.program.ops import JointGradient, Op, spec_flops

__all__ = ["make_table"]


# For buffers of 1/2 or 1/16 of their usual bytes: the end of the names of the rows that use them, and how much longer
# these take, measured on seed 000, on two cores of an AMD EPYC 7003 and of an Intel Xeon.
_SHARES = {1: "", 2: ", half buffers", 16: ", small buffers"}
_SHARE_TIMES = {2: 1.25, 16: 1.8}
# The same for the dense scores of a pool: 2 cores of an Intel Xeon at 2.8 GHz, torch 2.13, 2026-11-21.
_POOL_SHARES = {1: "", 4: ", small buffers"}
_POOL_SHARE_TIMES = {1: 1.0, 4: 1.2}


def _grouped_cost(share: int, op: Op, device: Device) -> StepCost:
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    n, i, j, k = group_sizes(op.spec, form.gather.axes, form.inner, form.left, form.right)
    g = form.gather.size or 0
    size = itemsize(op.dtype)
    dtype = torch_dtype(op.dtype)
    mapped = (form.rows_a, form.rows_b if form.outer else form.rows_out)
    maps = sum(8 * n for rows in mapped if rows != form.gather.axes)
    scratch_of = (
        torch_grouped.gradients_scratch_bytes
        if isinstance(op, JointGradient)
        else torch_grouped.outer_scratch_bytes
        if form.outer
        else torch_grouped.matmul_scratch_bytes
    )
    flops = spec_flops(op.spec) * op.products
    moved = op.bytes_touched()
    results = sum(math.prod(shape) for shape in op.output_shapes) * size
    # Sorting is over before the results are made; the order stays for the call.
    kernel = scratch_of(n, i, g, j, k, dtype, form.rows_a != form.gather.axes, share)
    copied = flattened_bytes(op, form)
    scratch = copied + max(8 * (n + g + 1) + maps + kernel, torch_grouping.group_bytes(n, g) + maps - results)
    rows = n * i * (j + k) * size
    # Rows are gathered, then multiplied, then written, so the times add up.
    seconds = (
        flops / device.product_rate(max(1, n * i // max(1, min(g, n))), j, k)
        + device.moving_seconds(moved + 2 * copied + (op.products + 1) * rows)
        + device.fresh_seconds(results)
        + device.fresh_seconds(copied)
        + n * (device.take_row_seconds * (op.products + 2) + device.sort_row_seconds)
        + min(g, n) * 2 * device.matrix_seconds
        + 40 * device.launch_seconds
    )
    if share > 1:
        seconds = _SHARE_TIMES[share] * seconds + 10 * device.launch_seconds
    return StepCost(flops, moved + 2 * copied + 16 * n, copied, scratch, picoseconds(seconds))


def _pooled_cost(share: int, op: Op, device: Device) -> StepCost:
    """Return the cost of a pooled dot by the whole pool, in buffers of 1/share of their bytes.

    A share of 0 stands for the implementation that takes rows.
    """
    form = pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    size, dtype = itemsize(op.dtype), torch_dtype(op.dtype)
    b, q, k, d = group_sizes(op.spec, form.batch, form.queries, form.chosen, form.depth)
    m = form.gather.size or 0
    products = op.products
    kind: torch_pooled.Function = "gradients"
    if not isinstance(op, JointGradient):
        kind = "scores" if form.scores == 2 else "pool_gradient" if form.place == 2 else "query_gradient"
    results = sum(math.prod(shape) for shape in op.output_shapes) * size
    moved = op.bytes_touched()
    chosen = b * q * k
    if share:
        scratch = torch_pooled.pooled_scratch_bytes(b, q, m, d, k, dtype, share=share)
        # Measured: 6.4 ms for 0.5 GFLOP of depth 32; half a nanosecond for each score taken, one for each added, to
        # weights that are zeroed first.
        flops = products * 2 * b * q * m * d + (0 if kind == "scores" else chosen)
        seconds = flops / (0.85 * device.flop_rate) + chosen * (0.5e-9 if kind == "scores" else 1e-9)
        seconds += 0.0 if kind == "scores" else device.moving_seconds(b * q * m * size)
        seconds *= _POOL_SHARE_TIMES[share]
    else:
        scratch = torch_pooled.gathered_scratch_bytes(kind, b, q, m, d, k, dtype)
        flops = products * 2 * chosen * d
        moved += chosen * d * size
        # Measured per element of the taken rows, buffers reused.
        times = {"scores": 0.5e-9, "query_gradient": 0.5e-9, "pool_gradient": 0.75e-9}
        seconds_of = {what: chosen * d * each + 2e-4 for what, each in times.items()}
        if dtype in torch_pooled.BAGGED:
            # With 10, 30 and 100 keys of 8,000 queries, depth 32: the query's 0.9, 1.3 and 2.5 ms, the pool's 3.1, 6
            # and 19 ms; 2 cores of an Intel Xeon at 2.8 GHz, torch 2.13, 2026-11-21.
            seconds_of["query_gradient"] = chosen * d * 0.08e-9 + 5e-4
            if torch_pooled.sorts(q, k, m, dtype):
                summed = device.moving_seconds(2 * b * m * d * size)
                seconds_of["pool_gradient"] = chosen * (d * 0.08e-9 + device.sort_row_seconds + 12e-9) + summed + 1e-3
        seconds = (
            seconds_of["query_gradient"] + seconds_of["pool_gradient"]
            if isinstance(op, JointGradient)
            else seconds_of[kind]
        )
    copied = flattened_bytes(op, form)
    seconds += device.moving_seconds(2 * copied) + device.fresh_seconds(copied)
    seconds += device.fresh_seconds(results) + (10 + b) * device.launch_seconds
    return StepCost(flops, moved + 2 * copied, copied, scratch + copied, picoseconds(seconds))


def _pools() -> dict[str, PoolKernels]:
    """Return the ways to compute pooled dots: by the whole pool, in large or small buffers, or by taking rows."""
    pools = {}
    for share, label in _POOL_SHARES.items():
        functions = {what: partial(getattr(torch_pooled, f"pooled_{what}"), share=share) for what in POOL_FUNCTIONS}
        pools[WHOLE_POOL + label] = PoolKernels(**functions, cost=partial(_pooled_cost, share))
    functions = {what: getattr(torch_pooled, f"gathered_{what}") for what in POOL_FUNCTIONS}
    return {**pools, "take in chunks": PoolKernels(**functions, cost=partial(_pooled_cost, 0))}


def _kernels(share: int) -> Kernels:
    """Return the kernels with buffers of 1/share of their usual bytes."""

    def outer(a: Tensor, b: Tensor, groups: Any, size: int, source_a: Tensor | None, source_b: Tensor | None) -> Tensor:
        return torch_grouped.grouped_outer(a, b, groups, source_a, source_b, share)

    return Kernels(
        OPS,
        torch_grouping.group_rows,
        partial(torch_grouped.grouped_matmul, share=share),
        outer,
        partial(torch_grouped.grouped_gradients, share=share),
        partial(_grouped_cost, share),
        _pools() if share == 1 else {},
        # The gradient kernels conjugate their operands, but a backward program passes operands that are conjugated
        # already. So they are conjugated once more before.
        hand_over=torch.conj,
        kinds=("cpu",),  # they loop over offsets on the host, and reuse buffers there
        label=_SHARES[share],
    )


def make_table() -> Table:
    """Return the table of the torch backend."""
    grouped = [row for share in _SHARES for row in kernel_rows(_kernels(share), strided=True)]
    on_card = cuda_rows() if importlib.util.find_spec("triton") else []
    if on_card and hasattr(torch.nn.functional, "grouped_mm"):  # what it does not take goes to Triton's kernel
        on_card += kernel_rows(grouped_mm_kernels(), strided=True)
    stock = stock_rows(OPS, cast, GUARD, cost=flat_stock_cost, layouts=lambda op: (stock_layout(op)[1],), empty=empty)
    return Table([*stock, *product_rows(), *grouped, *on_card])
