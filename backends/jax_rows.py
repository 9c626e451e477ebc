"""The JAX backend's table: stock rows through XLA, and the rows that run the grouped and pooled kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from planner.backends.common import Prepared, picoseconds, stock_rows
from planner.backends.protocol import Lowering, Table
from planner.cost import StepCost, itemsize
from planner.device import Device
from planner.kernels import jax_grouped, jax_grouping, jax_pooled
from planner.lower import GroupedForm, Op, PooledForm, ProductForm, grouped_form, pooled_form, spec_flops
from planner.spec import Gather, Spec, Term

__all__ = ["OPS", "JaxOps", "make_table"]


def _wide(dtype: Any) -> Any:
    """Half types accumulate in float32."""
    return jnp.float32 if jnp.dtype(dtype).name in ("float16", "bfloat16") else dtype


class JaxOps:
    """`ArrayOps` in JAX."""

    def __init__(self, precision: Any = None) -> None:
        self.precision = precision

    def permute(self, x: Any, dims: Sequence[int]) -> Any:
        return jnp.transpose(x, tuple(dims))

    def diagonal(self, x: Any, first: int, second: int) -> Any:
        return jnp.diagonal(x, 0, first, second)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return jnp.broadcast_to(x, tuple(shape))

    def sum(self, x: Any, dims: Sequence[int]) -> Any:
        return jnp.sum(x, axis=tuple(dims), dtype=_wide(x.dtype)).astype(x.dtype)

    def product(self, form: ProductForm, a: Any, b: Any, spec: Spec) -> Any:
        names = {axis: number for number, (axis, _) in enumerate(spec.sizes)}
        terms = [[names[str(e)] for e in term] for term in spec.terms]
        wide = _wide(a.dtype)
        if not form.contracted:
            order = (*form.batch, *form.left, *form.right)
            return jnp.transpose(
                _spread(a, terms[0], [names[x] for x in order]) * _spread(b, terms[1], [names[x] for x in order]),
                [order.index(str(e)) for e in spec.output],
            )
        out = jnp.einsum(
            a, terms[0], b, terms[1], terms[2], precision=self.precision,
            preferred_element_type=None if a.dtype == jnp.bool_ else wide,
        )  # fmt: skip
        return out.astype(a.dtype)

    def iota(self, size: int, like: Any) -> Any:
        return jnp.arange(size)

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        return x.at[tuple(index)].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def add_at(self, shape: Sequence[int], index: Sequence[Any], values: Any) -> Any:
        out = jnp.zeros(tuple(shape), _wide(values.dtype))
        out = out.at[tuple(index)].add(
            values.astype(out.dtype), mode="promise_in_bounds", wrap_negative_indices=False
        )
        return out.astype(values.dtype)

    def select(self, mask: Any, x: Any, otherwise: float) -> Any:
        return jnp.where(mask, x, jnp.asarray(otherwise, x.dtype))

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        return jnp.zeros(tuple(shape), like.dtype)


def _spread(x: Any, axes: Sequence[int], order: Sequence[int]) -> Any:
    """Permute to an order of axes that holds more of them, size 1 for those that x lacks."""
    present = [axis for axis in order if axis in axes]
    x = jnp.transpose(x, [axes.index(axis) for axis in present])
    missing = tuple(position for position, axis in enumerate(order) if axis not in axes)
    return jnp.expand_dims(x, missing)


OPS = JaxOps()


def _flat(x: Any, term: Term, groups: Sequence[Sequence[str | Gather]]) -> Any:
    """Permute an operand into groups of axes and flatten each group."""
    dims = [term.index(entry) for group in groups for entry in group]
    shape = [math.prod(x.shape[term.index(entry)] for entry in group) for group in groups]
    return jnp.transpose(x, dims).reshape(shape)


def _unflat(x: Any, term: Term, groups: Sequence[Sequence[str | Gather]], spec: Spec) -> Any:
    """The inverse of `_flat`."""
    order = [entry for group in groups for entry in group]
    return jnp.transpose(x.reshape(spec.shape(tuple(order))), [order.index(entry) for entry in term])


def _sizes(spec: Spec, *groups: Sequence[str]) -> tuple[int, ...]:
    sizes = dict(spec.sizes)
    return tuple(math.prod(sizes[axis] for axis in group) for group in groups)


def _row_map(gather: Gather, rows: Sequence[str], spec: Spec) -> Any:
    """For each row the flat position over some of the row axes; None where that is the row itself."""
    if tuple(rows) == gather.axes:
        return None
    sizes = dict(spec.sizes)
    position: Any = jnp.zeros((), jnp.int32)
    for dim, axis in enumerate(gather.axes):
        if axis in rows:
            shape = [1] * len(gather.axes)
            shape[dim] = sizes[axis]
            position = position * sizes[axis] + jnp.arange(sizes[axis], dtype=jnp.int32).reshape(shape)
    return jnp.broadcast_to(position, [sizes[axis] for axis in gather.axes]).reshape(-1)


def _groups(gather: Gather, index: Prepared) -> Any:
    known = index.orders.get(gather)
    if known is None:
        known = index.orders[gather] = jax_grouping.group_rows(index[gather].reshape(-1), gather.size or 0)
    return known


def run_grouped_matmul(op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    """Run a grouped matmul."""
    spec, form = op.spec, grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    a = _flat(inputs[1 - form.matrix], spec.inputs[1 - form.matrix], (form.rows_a, form.inner, form.left))
    c = _flat(inputs[form.matrix], spec.inputs[form.matrix], ((form.gather,), form.left, form.right))
    target = _row_map(form.gather, form.rows_out, spec)
    out = jax_grouped.grouped_matmul(
        a, c, _groups(form.gather, index), _row_map(form.gather, form.rows_a, spec), target,
        None if target is None else _sizes(spec, form.rows_out)[0],
    )  # fmt: skip
    return (_unflat(out, spec.output, (form.rows_out, form.inner, form.right), spec),)


def run_grouped_outer(op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    """Run a grouped outer product."""
    spec, form = op.spec, grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    a = _flat(inputs[0], spec.inputs[0], (form.rows_a, form.inner, form.left))
    b = _flat(inputs[1], spec.inputs[1], (form.rows_b, form.inner, form.right))
    out = jax_grouped.grouped_outer(
        a, b, _groups(form.gather, index), form.gather.size or 0, _row_map(form.gather, form.rows_a, spec),
        _row_map(form.gather, form.rows_b, spec),
    )  # fmt: skip
    return (_unflat(out, spec.output, ((form.gather,), form.left, form.right), spec),)


def run_grouped_pair(op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    """Run both gradients of a grouped matmul."""
    spec, form = op.spec, grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    gout, operands = inputs[0], inputs[1:]
    rows_term, matrix_term = spec.inputs[1 - form.matrix], spec.inputs[form.matrix]
    a = _flat(operands[1 - form.matrix], rows_term, (form.rows_a, form.inner, form.left))
    c = _flat(operands[form.matrix], matrix_term, ((form.gather,), form.left, form.right))
    g = _flat(gout, spec.output, (form.rows_out, form.inner, form.right))
    grad_a, grad_c = jax_grouped.grouped_gradients(g, a, c, _groups(form.gather, index))
    rows = _unflat(grad_a, rows_term, (form.rows_a, form.inner, form.left), spec)
    matrix = _unflat(grad_c, matrix_term, ((form.gather,), form.left, form.right), spec)
    return (rows, matrix) if form.matrix == 1 else (matrix, rows)


def run_pooled(op: Op, inputs: Sequence[Any], index: Any, names: str) -> tuple[Any, ...]:
    """Run a pooled dot or its gradients."""
    spec, form = op.spec, pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    query_groups = (form.batch, form.queries, form.depth)
    pool_groups: tuple[Any, ...] = (form.batch, (form.gather,), form.depth)
    score_groups = (form.batch, form.queries, form.chosen)
    q = _flat(index[form.gather], form.gather.axes, score_groups)
    if op.pair:
        at = 1 - form.place
        query = _flat(inputs[1 + at], spec.inputs[at], query_groups)
        pool = _flat(inputs[1 + form.place], spec.inputs[form.place], pool_groups)
        g = _flat(inputs[0], spec.output, score_groups)
        both = getattr(jax_pooled, f"{names}_gradients")(g, query, pool, q)
        grad_query = _unflat(both[0], spec.inputs[at], query_groups, spec)
        grad_pool = _unflat(both[1], spec.inputs[form.place], pool_groups, spec)
        return (grad_query, grad_pool) if at == 0 else (grad_pool, grad_query)
    if form.scores == 2:
        at = 1 - form.place
        out = getattr(jax_pooled, f"{names}_scores")(
            _flat(inputs[at], spec.inputs[at], query_groups),
            _flat(inputs[form.place], spec.inputs[form.place], pool_groups),
            q,
        )
        return (_unflat(out, spec.output, score_groups, spec),)
    g = _flat(inputs[form.scores], spec.inputs[form.scores], score_groups)
    if form.place == 2:
        query = _flat(inputs[1 - form.scores], spec.inputs[1 - form.scores], query_groups)
        out = getattr(jax_pooled, f"{names}_pool_gradient")(g, query, q, form.gather.size)
        return (_unflat(out, spec.output, pool_groups, spec),)
    pool = _flat(inputs[form.place], spec.inputs[form.place], pool_groups)
    out = getattr(jax_pooled, f"{names}_query_gradient")(g, pool, q)
    return (_unflat(out, spec.output, query_groups, spec),)


def _grouped_cost(op: Op, device: Device) -> StepCost:
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    n, i, j, k = _sizes(op.spec, form.gather.axes, form.inner, form.left, form.right)
    g = form.gather.size or 0
    scratch = {
        (True, False): jax_grouped.gradients_scratch_bytes,
        (False, True): jax_grouped.outer_scratch_bytes,
        (False, False): jax_grouped.matmul_scratch_bytes,
    }[op.pair, form.outer and not op.pair](n, i, g, j, k, op.dtype)
    scratch += jax_grouping.scratch_bytes(n, g) + 4 * (n + g + 1)
    flops = spec_flops(op.spec) * (2 if op.pair else 1)
    moved = op.bytes_touched()
    rows = n * i * (j + k) * itemsize(op.dtype)
    seconds = (
        max(flops / (0.4 * device.flop_rate), (moved + 2 * rows) / device.bandwidth)
        + n * 5e-8 * (2 if op.pair else 1)
        + min(g, n) * 1e-6
        + 20 * device.launch_seconds
    )
    return StepCost(flops, moved, 0, scratch, picoseconds(seconds))


def _pooled_cost(op: Op, device: Device, names: str) -> StepCost:
    form = pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    b, q, k, d = _sizes(op.spec, form.batch, form.queries, form.chosen, form.depth)
    m = form.gather.size or 0
    products = 2 if op.pair else 1
    scores = not op.pair and form.scores == 2
    chosen, moved, size = b * q * k, op.bytes_touched(), itemsize(op.dtype)
    if names == "pooled":
        flops = products * 2 * b * q * m * d
        seconds = flops / (0.6 * device.flop_rate) + chosen * (1.5e-9 if scores else 4e-9)
        scratch = jax_pooled.pooled_scratch_bytes(b, q, m, d, k, op.dtype)
    else:
        flops = products * 2 * chosen * d
        moved += chosen * d * size
        per_byte = 5e-11 if scores or (form.place != 2 and not op.pair) else 2e-10
        seconds = chosen * d * size * per_byte * products
        scratch = jax_pooled.gathered_scratch_bytes(b, q, m, d, k, op.dtype)
    return StepCost(flops, moved, 0, scratch, picoseconds(seconds + 10 * device.launch_seconds))


def _grouped_reason(op: Op, pair: bool, outer: bool) -> str | None:
    """Why a step is no grouped product of the wanted kind."""
    if op.source_dtype is not None or len(op.spec.inputs) != 2 or op.pair != pair:
        return "the step is of another kind"
    form = grouped_form(op.spec)
    if isinstance(form, str):
        return form
    if len(set(form.gather.axes)) < len(form.gather.axes):
        return "an axis repeats in the bracket"
    if form.outer != outer:
        return "the gathered dimension is in another term"
    if pair and (form.rows_out != form.gather.axes or form.rows_a != form.gather.axes):
        return "rows are shared or summed"
    return None


def _pooled_reason(op: Op) -> str | None:
    """Why a step is no pooled dot."""
    if op.source_dtype is not None or len(op.spec.inputs) != 2:
        return "the step is of another kind"
    form = pooled_form(op.spec)
    if isinstance(form, str):
        return form
    if op.pair and (form.place == 2 or form.scores != 2):
        return "the step is a gradient itself"
    return None


def make_table() -> Table:
    """Return the table of the JAX backend."""
    rows = stock_rows(OPS, lambda x, dtype: jax.lax.convert_element_type(x, jnp.dtype(dtype)), views=False)
    rows += [
        Lowering("grouped matmul", lambda op: _grouped_reason(op, False, False), _grouped_cost, run_grouped_matmul),
        Lowering("grouped outer", lambda op: _grouped_reason(op, False, True), _grouped_cost, run_grouped_outer),
        Lowering("both grouped gradients", lambda op: _grouped_reason(op, True, False), _grouped_cost, run_grouped_pair),
        Lowering(
            "whole pool, then take",
            _pooled_reason,
            lambda op, device: _pooled_cost(op, device, "pooled"),
            lambda op, inputs, index: run_pooled(op, inputs, index, "pooled"),
        ),
        Lowering(
            "take, then dot",
            _pooled_reason,
            lambda op, device: _pooled_cost(op, device, "gathered"),
            lambda op, inputs, index: run_pooled(op, inputs, index, "gathered"),
        ),
    ]
    return Table(rows)
