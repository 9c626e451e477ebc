"""The JAX backend's table: stock rows through XLA, and the rows that run the grouped and pooled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from planner.backends.common import WHOLE_POOL
from planner.backends.kernel_rows import POOL_FUNCTIONS, Kernels, PoolKernels, group_sizes, kernel_rows
from planner.backends.protocol import Table
from planner.backends.stock import Product
from planner.backends.stock_rows import picoseconds, stock_cost, stock_kind, stock_rows
from planner.cost import StepCost, itemsize
from planner.device import Device
from planner.kernels import jax_grouped, jax_grouping, jax_pooled
from planner.lower import GroupedForm, Op, PooledForm, ProductForm, grouped_form, pooled_form, product_form, spec_flops
from planner.spec import Spec

__all__ = ["OPS", "JaxOps", "make_table"]


def _wide(dtype: Any) -> Any:
    """Half types accumulate in float32."""
    return jnp.float32 if jnp.dtype(dtype).name in ("float16", "bfloat16") else dtype


class JaxOps:
    """`ArrayOps` in JAX."""

    def permute(self, x: Any, dims: Sequence[int]) -> Any:
        return jnp.transpose(x, tuple(dims))

    def diagonal(self, x: Any, first: int, second: int) -> Any:
        return jnp.diagonal(x, 0, first, second)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return jnp.broadcast_to(x, tuple(shape))

    def sum(self, x: Any, dims: Sequence[int]) -> Any:
        return jnp.sum(x, axis=tuple(dims), dtype=_wide(x.dtype)).astype(x.dtype)

    def product(self, form: ProductForm, spec: Spec) -> Product:
        names = {axis: number for number, (axis, _) in enumerate(spec.sizes)}
        terms = [[names[str(e)] for e in term] for term in spec.terms]
        order = [names[e] for e in (*form.batch, *form.left, *form.right)]
        back = [order.index(axis) for axis in terms[2]]

        def multiplied(a: Any, b: Any) -> Any:
            return jnp.transpose(_spread(a, terms[0], order) * _spread(b, terms[1], order), back)

        def summed(a: Any, b: Any) -> Any:
            kind = None if a.dtype == jnp.bool_ else _wide(a.dtype)
            return jnp.einsum(a, terms[0], b, terms[1], terms[2], preferred_element_type=kind).astype(a.dtype)

        return multiplied if not form.contracted and set(terms[2]) == {*terms[0], *terms[1]} else summed

    def iota(self, size: int, like: Any) -> Any:
        return jnp.arange(size)

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        return x.at[tuple(index)].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def add_at(self, shape: Sequence[int], index: Sequence[Any], values: Any) -> Any:
        out = jnp.zeros(tuple(shape), _wide(values.dtype))
        out = out.at[tuple(index)].add(values.astype(out.dtype), mode="promise_in_bounds", wrap_negative_indices=False)
        return out.astype(values.dtype)

    def select(self, mask: Any, x: Any, otherwise: float) -> Any:
        # `jnp.where` is a compiled function of its own wherever it is called, and so is each derivative of it.
        return lax.select(jnp.broadcast_to(mask, x.shape), x, lax.full_like(x, otherwise))

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        return jnp.zeros(tuple(shape), like.dtype)


def _spread(x: Any, axes: Sequence[int], order: Sequence[int]) -> Any:
    """Permute to an order of axes that holds more of them, size 1 for those that x lacks."""
    present = [axis for axis in order if axis in axes]
    x = jnp.transpose(x, [axes.index(axis) for axis in present])
    missing = tuple(position for position, axis in enumerate(order) if axis not in axes)
    return jnp.expand_dims(x, missing)


OPS = JaxOps()


# XLA on a CPU multiplies at half of the rate of large products where the least side is this: 2 cores of an Intel Xeon
# at 2.8 GHz, JAX 0.10.2, 2026-11-22 (1024 terms, 512 columns; 16, 32, 64 and 128 rows: 28, 43, 58 and 100 GFLOP/s of
# some 115).
_HALF_RATE_SIDE = 32


def _stock_cost(op: Op, device: Device) -> StepCost:
    """The stock cost, with XLA's rate for products of few rows, columns or terms."""
    cost = stock_cost(op, device)
    if device.kind != "cpu" or stock_kind(op) != "matmul":
        return cost
    form = product_form(op.spec)
    assert form is not None
    side = min(form.sizes[1:])
    rate = max(device.skinny_rate, device.flop_rate * side / (side + _HALF_RATE_SIDE))
    return cost._replace(picoseconds=max(cost.picoseconds, picoseconds(cost.flops / rate)))


def _grouped_cost(op: Op, device: Device) -> StepCost:
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    n, i, j, k = group_sizes(op.spec, form.gather.axes, form.inner, form.left, form.right)
    g = form.gather.size or 0
    scratch = {
        (True, False): jax_grouped.gradients_scratch_bytes,
        (False, True): jax_grouped.outer_scratch_bytes,
        (False, False): jax_grouped.matmul_scratch_bytes,
    }[op.pair, form.outer and not op.pair](n, i, g, j, k, op.dtype)
    scratch += jax_grouping.scratch_bytes(n, g) + 4 * (n + g + 1)
    flops = spec_flops(op.spec) * (2 if op.pair else 1)
    moved = op.bytes_touched()
    # Measured on seed 000: a row's sort and addresses, filling the result, products on padded lanes, lanes moved.
    lanes = 1.28 * n * i
    seconds = (
        70e-9 * n + 1.8e-9 * n * i * k + lanes * (2 * j * k / 46e9 + 0.8e-9 * (j + k)) + 20 * device.launch_seconds
    )
    if op.pair:
        seconds *= 1.8
    return StepCost(flops, moved, 0, scratch, picoseconds(seconds))


def _pooled_cost(names: str, op: Op, device: Device) -> StepCost:
    form = pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    b, q, k, d = group_sizes(op.spec, form.batch, form.queries, form.chosen, form.depth)
    m = form.gather.size or 0
    products = 2 if op.pair else 1
    scores = not op.pair and form.scores == 2
    chosen, moved, size = b * q * k, op.bytes_touched(), itemsize(op.dtype)
    # Nanoseconds measured on seed 003; gradients are of both operands, half of that is one's.
    if names == "pooled":
        flops, dense = products * 2 * b * q * m * d, b * q * m * d / 32
        seconds = 0.8e-9 * dense + 1.4e-9 * chosen if scores else products * (0.55e-9 * dense + 0.7e-9 * chosen)
        scratch = jax_pooled.pooled_scratch_bytes(b, q, m, d, k, op.dtype)
    else:
        flops, taken = products * 2 * chosen * d, chosen * d
        moved += taken * size
        fits = (1 if scores else 2) * taken * size < device.fresh_bytes
        each = (0.55e-9 if fits else 3.2e-9) if scores else products * (0.6e-9 if fits else 1.4e-9)
        seconds = taken * each
        scratch = jax_pooled.gathered_scratch_bytes(b, q, m, d, k, op.dtype)
    return StepCost(flops, moved, 0, scratch, picoseconds(seconds + 10 * device.launch_seconds))


def _pool(names: str) -> PoolKernels:
    functions = {what: getattr(jax_pooled, f"{names}_{what}") for what in POOL_FUNCTIONS}
    return PoolKernels(**functions, cost=partial(_pooled_cost, names))


def _cast(x: Any, dtype: str) -> Any:
    return jax.lax.convert_element_type(x, jnp.dtype(dtype))


def make_table() -> Table:
    """Return the table of the JAX backend."""
    kernels = Kernels(
        OPS,
        jax_grouping.group_rows,
        jax_grouped.grouped_matmul,
        jax_grouped.grouped_outer,
        jax_grouped.grouped_gradients,
        _grouped_cost,
        {WHOLE_POOL: _pool("pooled"), "take, then dot": _pool("gathered")},
    )
    return Table([*stock_rows(OPS, _cast, views=False, cost=_stock_cost), *kernel_rows(kernels)])
