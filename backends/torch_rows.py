"""The torch backend's table: stock rows, and the rows that run the grouped and pooled kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from planner.backends.common import Prepared, picoseconds, stock_rows
from planner.backends.protocol import Lowering, Table
from planner.backends.stock import matmul_product
from planner.cost import StepCost, itemsize
from planner.device import Device
from planner.kernels import torch_grouped, torch_grouping, torch_pooled
from planner.lower import GroupedForm, Op, PooledForm, ProductForm, grouped_form, pooled_form, spec_flops
from planner.spec import Gather, Spec, Term

__all__ = ["OPS", "TorchOps", "make_table", "torch_dtype"]


@lru_cache(maxsize=64)
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _is_half(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


class TorchOps:
    """`ArrayOps` in torch: every function is differentiable and out of place."""

    def permute(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.permute(tuple(dims))

    def diagonal(self, x: Tensor, first: int, second: int) -> Tensor:
        return x.diagonal(0, first, second)

    def expand(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.expand(tuple(shape))

    def sum(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.sum(tuple(dims), dtype=x.dtype)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if a.dtype == torch.bool:
            return torch.matmul(a.int(), b.int()).bool()
        return torch.matmul(a, b)

    def product(self, form: ProductForm, a: Tensor, b: Tensor, spec: Spec) -> Tensor:
        return matmul_product(self.matmul, self.permute, form, a, b, spec)  # type: ignore[no-any-return]

    def iota(self, size: int, like: Tensor) -> Tensor:
        return torch.arange(size, device=like.device)

    def take(self, x: Tensor, index: Sequence[Tensor]) -> Tensor:
        # index_select over one flat index is several times faster than indexing by several arrays.
        count = len(index)
        flat, rows = _flat_index(index, x.shape[:count])
        taken = x.reshape([math.prod(x.shape[:count]), *x.shape[count:]]).index_select(0, flat)
        return taken.reshape([*rows, *x.shape[count:]])

    def add_at(self, shape: Sequence[int], index: Sequence[Tensor], values: Tensor) -> Tensor:
        # index_add_ over one flat index: index_put_ with accumulate adds in any order on a CPU.
        count = len(index)
        flat, _ = _flat_index(index, shape[:count])
        wide = values.float() if _is_half(values) else values
        out = wide.new_zeros((math.prod(shape[:count]), *shape[count:]))
        out = out.index_add(0, flat, wide.reshape(flat.shape[0], *shape[count:]))
        return out.reshape(tuple(shape)).to(values.dtype)

    def select(self, mask: Tensor, x: Tensor, otherwise: float) -> Tensor:
        return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_zeros(tuple(shape))


def _flat_index(index: Sequence[Tensor], shape: Sequence[int]) -> tuple[Tensor, torch.Size]:
    """One index over flattened leading dimensions, and the shape of the rows that it addresses."""
    flat = index[0]
    for size, more in zip(shape[1:], index[1:], strict=True):
        flat = flat * size + more
    rows = torch.broadcast_shapes(*(q.shape for q in index))
    return flat.expand(rows).reshape(-1), rows


OPS = TorchOps()


def cast(x: Tensor, dtype: str) -> Tensor:
    """Convert; from complex to real by the real part, which is the gradient's rule."""
    wanted = torch_dtype(dtype)
    if x.is_complex() and not wanted.is_complex:
        x = x.real
    return x.to(wanted)


# -- grouped rows --------------------------------------------------------------------------------------


def _flat(x: Tensor, term: Term, groups: Sequence[Sequence[str | Gather]]) -> Tensor:
    """Permute an operand into groups of axes and flatten each group."""
    dims = [term.index(entry) for group in groups for entry in group]
    shape = [math.prod(x.shape[term.index(entry)] for entry in group) for group in groups]
    return x.permute(dims).reshape(shape)


def _unflat(x: Tensor, term: Term, groups: Sequence[Sequence[str | Gather]], spec: Spec) -> Tensor:
    """The inverse of `_flat`: give a result the axes and the order of its term."""
    order = [entry for group in groups for entry in group]
    return x.reshape(spec.shape(tuple(order))).permute([order.index(entry) for entry in term])


def _row_map(gather: Gather, rows: Sequence[str], spec: Spec, device: torch.device) -> Tensor | None:
    """For each row (over all row axes) the flat position over some of them; None where that is the row itself."""
    if tuple(rows) == gather.axes:
        return None
    sizes = dict(spec.sizes)
    position: Any = torch.zeros((), dtype=torch.int64, device=device)
    for dim, axis in enumerate(gather.axes):
        if axis in rows:
            shape = [1] * len(gather.axes)
            shape[dim] = sizes[axis]
            position = position * sizes[axis] + torch.arange(sizes[axis], device=device).reshape(shape)
    return position.expand([sizes[axis] for axis in gather.axes]).reshape(-1)  # type: ignore[no-any-return]


def _groups(gather: Gather, index: Prepared) -> torch_grouping.Groups:
    """The sorted order of an index array, made once per call."""
    known = index.orders.get(gather)
    if known is None:
        known = index.orders[gather] = torch_grouping.group_rows(index[gather].reshape(-1), gather.size or 0)
    return known  # type: ignore[no-any-return]


def _sizes(spec: Spec, *groups: Sequence[str]) -> tuple[int, ...]:
    sizes = dict(spec.sizes)
    return tuple(math.prod(sizes[axis] for axis in group) for group in groups)


def _grouped(op: Op, outer: bool) -> GroupedForm | str:
    if len(op.spec.inputs) != 2 or op.source_dtype is not None:
        return "the step is no product"
    form = grouped_form(op.spec)
    if isinstance(form, str):
        return form
    if len(set(form.gather.axes)) < len(form.gather.axes):
        return "an axis repeats in the bracket"
    if form.outer != outer:
        return "the gathered dimension is the result's" if form.outer else "the gathered dimension is an operand's"
    return form


def _supports_matmul(op: Op) -> str | None:
    if op.pair:
        return "the step is a pair of gradients"
    form = _grouped(op, outer=False)
    return form if isinstance(form, str) else None


def _supports_outer(op: Op) -> str | None:
    if op.pair:
        return "the step is a pair of gradients"
    form = _grouped(op, outer=True)
    return form if isinstance(form, str) else None


def _supports_pair(op: Op) -> str | None:
    if not op.pair:
        return "the step is no pair of gradients"
    form = _grouped(op, outer=False)
    if isinstance(form, str):
        return form
    if form.rows_out != form.gather.axes or form.rows_a != form.gather.axes:
        return "rows are shared or summed"
    return None


def _run_matmul(op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    spec, form = op.spec, grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    rows_term, matrix_term = spec.inputs[1 - form.matrix], spec.inputs[form.matrix]
    a = _flat(inputs[1 - form.matrix], rows_term, (form.rows_a, form.inner, form.left))
    c = _flat(inputs[form.matrix], matrix_term, ((form.gather,), form.left, form.right))
    source = _row_map(form.gather, form.rows_a, spec, a.device)
    target = _row_map(form.gather, form.rows_out, spec, a.device)
    targets = _sizes(spec, form.rows_out)[0]
    out = torch_grouped.grouped_matmul(
        a, c, _groups(form.gather, index), source, target, None if target is None else targets
    )
    return (_unflat(out, spec.output, (form.rows_out, form.inner, form.right), spec),)


def _run_outer(op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    spec, form = op.spec, grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    a = _flat(inputs[0], spec.inputs[0], (form.rows_a, form.inner, form.left))
    b = _flat(inputs[1], spec.inputs[1], (form.rows_b, form.inner, form.right))
    out = torch_grouped.grouped_outer(
        a, b, _groups(form.gather, index), _row_map(form.gather, form.rows_a, spec, a.device),
        _row_map(form.gather, form.rows_b, spec, a.device),
    )  # fmt: skip
    return (_unflat(out, spec.output, ((form.gather,), form.left, form.right), spec),)


def _run_pair(op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    spec, form = op.spec, grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    gout, operands = inputs[0], inputs[1:]
    rows_term, matrix_term = spec.inputs[1 - form.matrix], spec.inputs[form.matrix]
    # The kernel conjugates; the program hands over operands that are conjugated already.
    rows, matrix = operands[1 - form.matrix].conj(), operands[form.matrix].conj()
    a = _flat(rows, rows_term, (form.rows_a, form.inner, form.left))
    c = _flat(matrix, matrix_term, ((form.gather,), form.left, form.right))
    g = _flat(gout, spec.output, (form.rows_out, form.inner, form.right))
    grad_a, grad_c = torch_grouped.grouped_gradients(g, a, c, _groups(form.gather, index))
    grad_rows = _unflat(grad_a, rows_term, (form.rows_a, form.inner, form.left), spec)
    grad_matrix = _unflat(grad_c, matrix_term, ((form.gather,), form.left, form.right), spec)
    return (grad_rows, grad_matrix) if form.matrix == 1 else (grad_matrix, grad_rows)


def _grouped_shape(op: Op) -> tuple[GroupedForm, tuple[int, int, int, int, int, int]]:
    """The form, and rows N, groups G, I, J, K, and rows of the left operand."""
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    n, i, j, k, na = _sizes(op.spec, form.gather.axes, form.inner, form.left, form.right, form.rows_a)
    return form, (n, form.gather.size or 0, i, j, k, na)


def _grouped_cost(op: Op, device: Device) -> StepCost:
    form, (n, g, i, j, k, _) = _grouped_shape(op)
    size = itemsize(op.dtype)
    dtype = torch_dtype(op.dtype)
    maps = sum(8 * n for rows in (form.rows_a, form.rows_b if form.outer else form.rows_out) if rows != form.gather.axes)
    order = torch_grouping.group_bytes(n, g)
    cut = torch_grouped.cutting(i, j, k, n, dtype)
    scratch = 2 * cut.rows * i * max(j, k) * torch_grouped.accumulator(dtype).itemsize
    flops = spec_flops(op.spec) * (2 if op.pair else 1)
    moved = op.bytes_touched()
    results = sum(math.prod(shape) for shape in op.output_shapes) * size
    rows = n * i * (j + k) * size
    seconds = (
        max(flops / device.flop_rate, (moved + 2 * rows) / device.bandwidth)
        + device.fresh_seconds(results)
        + n * device.take_row_seconds * (4 if op.pair else 3)
        + min(g, n) * 2 * device.matrix_seconds
        + 40 * device.launch_seconds
    )
    return StepCost(flops, moved + 16 * n, 0, scratch + order + maps, picoseconds(seconds))


# -- pooled rows ---------------------------------------------------------------------------------------


def _pooled(op: Op) -> PooledForm | str:
    if len(op.spec.inputs) != 2 or op.source_dtype is not None:
        return "the step is no product"
    form = pooled_form(op.spec)
    if isinstance(form, str):
        return form
    if op.pair and form.place == 2:
        return "the pool is the result's"
    if op.pair and form.scores != 2:
        return "the step is a gradient itself"
    return form


def _supports_pooled(op: Op) -> str | None:
    form = _pooled(op)
    return form if isinstance(form, str) else None


def _run_pooled(op: Op, inputs: Sequence[Any], index: Any, dense: bool) -> tuple[Any, ...]:
    spec, form = op.spec, pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    query_groups = (form.batch, form.queries, form.depth)
    pool_groups: tuple[Any, ...] = (form.batch, (form.gather,), form.depth)
    score_groups = (form.batch, form.queries, form.chosen)
    q = _flat(index[form.gather], form.gather.axes, score_groups)
    names = "pooled" if dense else "gathered"
    if op.pair:
        query_at = 1 - form.place
        query = _flat(inputs[1 + query_at].conj(), spec.inputs[query_at], query_groups)
        pool = _flat(inputs[1 + form.place].conj(), spec.inputs[form.place], pool_groups)
        g = _flat(inputs[0], spec.output, score_groups)
        both = getattr(torch_pooled, f"{names}_gradients")(g, query, pool, q)
        grad_query = _unflat(both[0], spec.inputs[query_at], query_groups, spec)
        grad_pool = _unflat(both[1], spec.inputs[form.place], pool_groups, spec)
        return (grad_query, grad_pool) if query_at == 0 else (grad_pool, grad_query)
    if form.scores == 2:
        query_at = 1 - form.place
        out = getattr(torch_pooled, f"{names}_scores")(
            _flat(inputs[query_at], spec.inputs[query_at], query_groups),
            _flat(inputs[form.place], spec.inputs[form.place], pool_groups),
            q,
        )
        return (_unflat(out, spec.output, score_groups, spec),)
    g = _flat(inputs[form.scores], spec.inputs[form.scores], score_groups)
    if form.place == 2:
        query_at = 1 - form.scores
        # The gradient kernels conjugate the operand; ours comes conjugated where it must be.
        query = _flat(inputs[query_at].conj(), spec.inputs[query_at], query_groups)
        out = getattr(torch_pooled, f"{names}_pool_gradient")(g, query, q, form.gather.size)
        return (_unflat(out, spec.output, pool_groups, spec),)
    pool = _flat(inputs[form.place].conj(), spec.inputs[form.place], pool_groups)
    out = getattr(torch_pooled, f"{names}_query_gradient")(g, pool, q)
    return (_unflat(out, spec.output, query_groups, spec),)


def _pooled_cost(op: Op, device: Device, dense: bool) -> StepCost:
    form = pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    size, dtype = itemsize(op.dtype), torch_dtype(op.dtype)
    b, q, k, d = _sizes(op.spec, form.batch, form.queries, form.chosen, form.depth)
    m = form.gather.size or 0
    products = 2 if op.pair else 1
    kind = "both" if op.pair else "scores" if form.scores == 2 else "pool" if form.place == 2 else "query"
    wide = torch_grouped.accumulator(dtype).itemsize
    scratch = min(b * q * m * wide, torch_pooled.DENSE_BYTES) if dense else torch_pooled.FETCHED_BYTES
    results = sum(math.prod(shape) for shape in op.output_shapes) * size
    moved = op.bytes_touched()
    chosen = b * q * k
    if dense:
        # Measured: 6.4 ms for 0.5 GFLOP of depth 32; half a nanosecond for each score taken, one for each added.
        flops = products * 2 * b * q * m * d + (0 if kind == "scores" else chosen)
        seconds = flops / (0.75 * device.flop_rate) + chosen * (0.5e-9 if kind == "scores" else 1e-9)
    else:
        # Measured per element of the taken rows, buffers reused.
        flops = products * 2 * chosen * d
        moved += chosen * d * size
        seconds = chosen * d * {"scores": 1.7e-9, "query": 0.9e-9, "pool": 1.1e-9, "both": 2.2e-9}[kind]
    seconds += device.fresh_seconds(results) + (10 + b) * device.launch_seconds
    return StepCost(flops, moved, 0, scratch, picoseconds(seconds))


def make_table() -> Table:
    """Return the table of the torch backend."""
    rows = stock_rows(OPS, cast)
    rows += [
        Lowering("grouped matmul", _supports_matmul, _grouped_cost, _run_matmul),
        Lowering("grouped outer", _supports_outer, _grouped_cost, _run_outer),
        Lowering("both grouped gradients", _supports_pair, _grouped_cost, _run_pair),
        Lowering(
            "whole pool, then take",
            _supports_pooled,
            lambda op, device: _pooled_cost(op, device, True),
            lambda op, inputs, index: _run_pooled(op, inputs, index, True),
        ),
        Lowering(
            "take in chunks",
            _supports_pooled,
            lambda op, device: _pooled_cost(op, device, False),
            lambda op, inputs, index: _run_pooled(op, inputs, index, False),
        ),
    ]
    return Table(rows)
