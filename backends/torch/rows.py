"""The table of the torch backend: stock rows, rows for products, and rows for the grouped and pooled kernels."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
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
    has_turned_rows,
    kernel_rows,
    pool_function,
    views_of,
)
from planner.backends.common.stock_layout import stock_layout
from planner.backends.common.stock_rows import (
    ADD_LAUNCHES,
    SCATTERED_LAUNCHES,
    TAKE_LAUNCHES,
    VIEW_LAUNCHES,
    flat_stock_work,
    stock_kind,
    stock_rows,
)
from planner.backends.torch.cuda.indexed import indexed_rows
from planner.backends.torch.cuda.rows import cuda_rows, grouped_mm_kernels
from planner.backends.torch.cuda.stock import card_work
from planner.backends.torch.indexed_rows import INDEXED, indexed_calls
from planner.backends.torch.ops import GUARD, MOST_MULTIPLIED, OPS, cast, empty, torch_dtype
from planner.backends.torch.products.batches import dot_scratch, vector_seconds
from planner.backends.torch.products.copied import copy_first_row, copying_ops, joint_row, with_quick_copies
from planner.backends.torch.products.einsum import einsum_row
from planner.backends.torch.products.elementwise import CUT_LAUNCHES, TERM_LAUNCHES, elementwise_rows
from planner.backends.torch.products.few_columns import few_scratch
from planner.backends.torch.products.few_rows import few_rows_scratch, lies_as_columns
from planner.backends.torch.products.sliced import SLICE_LAUNCHES, sliced_rows
from planner.backends.torch.products.transposed import reordered_rows
from planner.cost.device import Device
from planner.cost.figures import Work
from planner.cost.floor import Launches
from planner.cost.layout import flattens, neighbours
from planner.kernels.gathered_dot import torch_pooled
from planner.kernels.grouped_matmul import torch_grouped
from planner.kernels.grouping import torch_grouping
from planner.language.cached import cached_by_step
from planner.language.dtypes import is_inexact, itemsize
from planner.language.spec import term_axes
from planner.program.calls import PreparedRun, Run
from planner.program.forms import GroupedForm, PooledForm, known_product, pooled_form, product_of_rows
from planner.program.implementations import Implementation, Table
from planner.program.ops import JointGradient, Op, joint_elements

# For buffers of 1/2 or 1/16 of their usual bytes: the end of the names of the rows that use them, and how much longer
# these take, measured on seed 000, on two cores of an AMD EPYC 7003 and of an Intel Xeon.
_SHARES = {1: "", 2: ", half buffers", 16: ", small buffers"}
_SHARE_TIMES = {2: 1.25, 16: 1.8}
# Without measured classes, a product by fewer columns than 12 is computed at this part of `Device.skinny_rate` for each
# column: MKL computed 8 to 14 GFLOP/s by 8 and 9 columns, and 2 to 7 by 3 and 4. Each group takes as long as this many
# matrices of a batch, in a product and in both gradients: 0.4 and 0.7 us with matrices 3 x 8 and 8 x 8, where a matrix
# of a batch takes 0.07 (one core of an AMD EPYC with AVX-512, torch 2.13, 2026-11-30).
_COLUMN_SHARE, _MANY_COLUMNS, _GROUP_MATRICES = 0.1, 12, {1: 5, 2: 8}
# Shares of buffers for the dense scores of a pool: 2 cores of an Intel Xeon at 2.8 GHz, torch 2.13, 2026-11-21.
_POOL_SHARES = {1: "", 4: ", small buffers"}
_POOL_SHARE_TIMES = {1: 1.0, 4: 1.2}
# `sampled_addmm` multiplies shorter rows than this element by element.
_SHORT_DOT = 8
# How many operators, as to their time, each of its functions takes beside its work: 110, 70 and 170 us were measured
# for scores, one gradient and both, for 16 queries of 64 rows (AMD EPYC, torch 2.13, 2026-11-25).
_POOL_LAUNCHES = {"scores": 33, "query_gradient": 23, "pool_gradient": 23, "gradients": 52}


def _grouped_work(share: int, op: Op, form: GroupedForm, device: Device) -> list[Work]:
    (n, i, g, j, k), size, dtype = form.sizes, itemsize(op.dtype), torch_dtype(op.dtype)
    # Sorting is over before the results are made; the order stays for the call.
    sourced, pair = form.rows_a != form.gather.axes, isinstance(op, JointGradient)
    turned = has_turned_rows(op, form)
    kernel = torch_grouped.scratch_bytes(form.sizes, dtype, sourced, share, pair, turned)
    scratch = 8 * n * form.maps + max(8 * (n + g + 1) + kernel, torch_grouping.group_bytes(n, g) - op.result_bytes())
    copied = flattened_bytes(op, form)
    moved = op.bytes_touched() + 2 * copied
    in_buffers = (op.products + 1) * n * i * (j + k) * size
    # The gradient of rows has as many columns as these have. The result, and the gradient of matrices, have k.
    rates = []
    for columns in (j, k) if op.products > 1 else (k,):
        rate = device.product_rate(*form.sides)
        if columns < _MANY_COLUMNS and not device.products:
            rate = min(rate, device.skinny_rate * _COLUMN_SHARE * max(1, columns))
        rates.append(rate)
    # Rows are gathered, then multiplied, then written, so the times add up. For few rows 110 of torch's operators run,
    # which took 0.75 ms on an Intel Xeon where each takes twice as long as by the preset (torch 2.13, 2026-11-28).
    multiplying = sum(op.flops() / len(rates) / rate for rate in rates)
    seconds = multiplying + device.moving_seconds(moved + in_buffers)
    work = Work(
        op.flops(),
        moved=moved + 16 * n,
        copied=copied,
        scratch=copied + scratch,
        fresh=(op.result_bytes(), copied),
        launches=100,
        matrices=_GROUP_MATRICES[op.products] * min(g, n),
        taken=n * (op.products + 2),
        sorted=n,
        seconds=seconds,
    )
    if share == 1:
        return [work]
    slower = Work(launches=10, seconds=(_SHARE_TIMES[share] - 1) * device.work_seconds(work))
    return [work, slower]


def _pooled_work(share: int, op: Op, form: PooledForm, device: Device) -> list[Work]:
    """Return what a pooled dot does by the whole pool, in buffers of 1/share of their bytes.

    A share of 0 stands for the implementation that takes rows.
    """
    (b, q, m, d, k), size, dtype = form.sizes, itemsize(op.dtype), torch_dtype(op.dtype)
    function, chosen, moved = pool_function(op, form), b * q * k, op.bytes_touched()
    launches = _POOL_LAUNCHES[function] if share else 10
    if share:
        scratch = torch_pooled.pooled_scratch_bytes(form.sizes, dtype, share=share)
        # Measured: 6.4 ms for 0.5 GFLOP of depth 32; half a nanosecond for each score taken, one for each added, to
        # weights that are zeroed first.
        flops = op.products * 2 * b * q * m * d + (0 if function == "scores" else chosen)
        seconds = flops / (0.85 * device.flop_rate) + chosen * (0.5e-9 if function == "scores" else 1e-9)
        seconds += 0.0 if function == "scores" else device.moving_seconds(b * q * m * size)
        seconds *= _POOL_SHARE_TIMES[share]
    else:
        scratch = torch_pooled.gathered_scratch_bytes(function, form.sizes, dtype)
        if function == "scores" and _reads_in_place(op, form):
            scratch = torch_pooled.sampled_scratch_bytes(form.sizes, dtype)
        flops = op.products * 2 * chosen * d
        moved += chosen * d * size
        # Of each taken row and each of its elements, and of each query and its elements. One core of an Intel Xeon with
        # AVX-512, torch 2.13, 2026-12-01; rows of 2 to 64 floats, 1 to 100 for each query.
        seconds_of = {
            "scores": chosen * (9e-9 + 0.85e-9 * d) + 2e-4,
            "query_gradient": chosen * d * 0.5e-9 + 2e-4,
            "pool_gradient": chosen * d * 0.75e-9 + 2e-4,
        }
        if dtype in torch_pooled.BAGGED:
            short = 12e-9 if d < _SHORT_DOT else 0.0
            seconds_of["scores"] = chosen * (3.5e-9 + 0.07e-9 * d + short) + b * q * (10e-9 + 0.35e-9 * d) + 1e-4
            seconds_of["query_gradient"] = chosen * (4e-9 + 0.06e-9 * d) + b * q * d * 1.1e-9 + 2e-4
            if torch_pooled.sorts(q, k, m, dtype):
                summed = device.moving_seconds(2 * b * m * d * size)
                seconds_of["pool_gradient"] = chosen * (0.6e-9 * d + device.sort_row_seconds + 30e-9) + summed + 2e-4
        seconds_of["gradients"] = seconds_of["query_gradient"] + seconds_of["pool_gradient"]
        seconds = seconds_of[function]
    fresh = (op.result_bytes(),)
    dots = Work(flops, device.flop_rate, moved, scratch=scratch, fresh=fresh, launches=launches + b, seconds=seconds)
    return [Work.of_copies(flattened_bytes(op, form)), dots]


def _reads_in_place(op: Op, form: PooledForm) -> bool:
    """Whether the rows of the pool of some scores lie one after the other, and the queries as one matrix."""
    layouts, given = op.layouts or (None, None), views_of(op, form)[0]
    (term, (batch, members, depth)), layout = given[form.place], layouts[form.place]
    queries, (first, second, third) = given[1 - form.place]
    return (
        flattens(term, layout, (batch, (*members, *depth)), op.spec)
        and (neighbours(term, layout, op.spec) in depth or form.sizes[3] == 1)
        and flattens(queries, layouts[1 - form.place], ((*first, *second, *third),), op.spec)
    )


def _taken_scratch(share: int, op: Op, drops: bool) -> int:
    """Return how much more scratch a step needs that fetches rows, for dropped indices, or NaN or infinity."""
    form, dtype = pooled_form(op.spec), torch_dtype(op.dtype)
    assert isinstance(form, PooledForm)
    function = pool_function(op, form)
    if not share:
        more = drops and function == "scores" and _reads_in_place(op, form)
        fetched = torch_pooled.gathered_scratch_bytes("scores", form.sizes, dtype)
        return fetched - torch_pooled.sampled_scratch_bytes(form.sizes, dtype) if more else 0
    if function == "scores":
        return 0
    taken = torch_pooled.gathered_scratch_bytes(function, form.sizes, dtype)
    return max(0, taken - torch_pooled.pooled_scratch_bytes(form.sizes, dtype, share=share))


def _pools() -> dict[str, PoolKernels]:
    """Return the ways to compute pooled dots: by the whole pool, in large or small buffers, or by taking rows."""
    pools, functions = {}, dict[str, Any]()
    for share, label in _POOL_SHARES.items():
        functions = {what: partial(getattr(torch_pooled, f"pooled_{what}"), share=share) for what in POOL_FUNCTIONS}
        work, guarded = partial(_pooled_work, share), partial(_taken_scratch, share)
        pools[WHOLE_POOL + label] = PoolKernels(**functions, work=work, guarded_scratch=guarded, launches=10)
    functions = {what: getattr(torch_pooled, f"gathered_{what}") for what in POOL_FUNCTIONS}
    work, guarded = partial(_pooled_work, 0), partial(_taken_scratch, 0)
    return {**pools, "take in chunks": PoolKernels(**functions, work=work, guarded_scratch=guarded, launches=10)}


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
        partial(_grouped_work, share),
        _pools() if share == 1 else {},
        any_sizes=True,
        kinds=("cpu",),  # they loop over offsets on the host, and reuse buffers there
        label=_SHARES[share],
        launches=40,
    )


def _grouped_rows() -> list[Implementation]:
    """Return the rows of grouped products and pooled dots; those in smaller buffers are known to take longer."""
    full = [dataclasses.replace(row, cost=cached_by_step(row.cost)) for row in kernel_rows(_kernels(1), strided=True)]
    smaller = []
    for share in _SHARES:
        if share != 1:
            for row, whole in zip(kernel_rows(_kernels(share), strided=True), full, strict=False):
                smaller.append(dataclasses.replace(row, slower_than=whole.name))
    return [*full, *smaller]


def make_table() -> Table:
    """Return the table of the torch backend."""
    grouped = _grouped_rows()
    on_card = [*cuda_rows(), *indexed_rows()] if importlib.util.find_spec("triton") else []
    if on_card and hasattr(torch.nn.functional, "grouped_mm"):  # what it does not take goes to Triton's kernel
        on_card += kernel_rows(grouped_mm_kernels(), strided=True)
    stock = stock_rows(OPS, cast, GUARD, work=_stock_work, layouts=lambda op: (stock_layout(op)[1],), empty=empty)
    stock = [_indexed(row) if row.name in INDEXED else row for row in stock]
    for place, row in enumerate(stock):
        if row.name == "matmul":
            product = with_quick_copies(dataclasses.replace(row, inexact=("cuda",)))
            stock[place : place + 1] = [product, _of_integers(row)]
            lean = einsum_row(product)
        elif row.name == "take, multiply, add":
            stock[place] = with_quick_copies(row)
    launches = Launches(
        VIEW_LAUNCHES,
        SCATTERED_LAUNCHES,
        SLICE_LAUNCHES,
        TAKE_LAUNCHES,
        ADD_LAUNCHES,
        CUT_LAUNCHES,
        TERM_LAUNCHES,
        follows=True,
    )
    products = [*sliced_rows(), *elementwise_rows(), *reordered_rows(), joint_row(product), copy_first_row(), lean]
    return Table([*stock, *products, *grouped, *on_card], more=launches)


def _of_integers(row: Implementation) -> Implementation:
    """Return the row for products of matrices of integers and booleans on a card, which torch does not multiply."""

    def supports(op: Op) -> str | None:
        return row.supports(op) or (f"torch multiplies matrices of {op.dtype}" if is_inexact(op.dtype) else None)

    return dataclasses.replace(row, name="multiply integers, sum", supports=supports, kinds=("cuda",))


def _stock_work(op: Op, device: Device) -> list[Work]:
    """Return what the stock evaluation does. On a card it multiplies integers by `multiply_and_sum`."""
    parts, spec = flat_stock_work(op, device), op.spec
    if device.kind == "cpu" and stock_kind(op) in ("matmul", "take, multiply, add"):
        inner = product_of_rows(spec)
        form = known_product(inner)
        given = zip(spec.inputs, inner.inputs, op.layouts or (None, None), strict=True)
        layouts = [layout if term == taken else None for term, taken, layout in given]
        apart = lies_as_columns(form, inner, layouts) or copying_ops(op) is not OPS
        rows = few_rows_scratch(form, op.dtype) if apart else 0
        parts.append(Work(scratch=dot_scratch(form, op.dtype) + few_scratch(form, op.dtype, inner) + rows))
        if not spec.gathers:
            parts.append(Work(seconds=vector_seconds(form, op, device)))
    if device.kind == "cuda":
        parts = card_work(parts, op, device)
    if device.kind != "cuda" or is_inexact(op.dtype) or stock_kind(op) not in ("matmul", "take, multiply, add"):
        return parts
    products, size = joint_elements(spec), itemsize(op.dtype)
    axes = {axis for term in spec.inputs for axis in term_axes(term)} & {*term_axes(spec.output)}
    result = max(1, math.prod(spec.shape(tuple(sorted(axes)))))
    terms = max(1, MOST_MULTIPLIED // result)
    wide, turns = min(products, terms * result), -(-products // (terms * result))
    moved = 2 * size * (products + max(0, turns - 1) * result)
    scratch = size * (wide + (result if turns > 1 else 0))
    return [*parts, Work(moved=moved, scratch=scratch, fresh=(size * wide,), launches=3 * turns)]


def _indexed(row: Implementation) -> Implementation:
    """Return a stock row that reads or writes rows by torch's own calls, as long as no index may mean "no row"."""

    def prepare(op: Op) -> Run:
        run, calls = row.prepared(op), indexed_calls(op)
        if calls is None or not calls.lies_as_stock(op):
            return run
        step = calls.flat_if_many()

        def run_step(inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
            return run(inputs, index) if getattr(index, "may_drop", True) else (step(inputs[0], index),)

        return run_step

    return dataclasses.replace(row, run=PreparedRun(prepare, any_sizes=True))
