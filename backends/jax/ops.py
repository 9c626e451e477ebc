"""The array functions of JAX that the stock evaluation needs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from planner.backends.common.stock import Product
from planner.backends.jax.index import is_outside, repeat_like
from planner.backends.jax.products import as_dot
from planner.kernels.grouping.jax_grouping import accumulator
from planner.language.spec import Spec, is_symbol
from planner.program.forms import ProductForm


class JaxOps:
    """`ArrayOps` in JAX."""

    skips = True

    def permute(self, x: Any, dims: Sequence[int]) -> Any:
        return jnp.transpose(x, tuple(dims))

    def diagonal(self, x: Any, first: int, second: int) -> Any:
        return jnp.diagonal(x, 0, first, second)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return jnp.broadcast_to(x, tuple(shape))

    def sum(self, x: Any, dims: Sequence[int]) -> Any:
        return jnp.sum(x, axis=tuple(dims), dtype=accumulator(x.dtype)).astype(x.dtype)

    def product(self, form: ProductForm, spec: Spec) -> Product:
        return as_dot(spec)

    def iota(self, size: int, like: Any) -> Any:
        return jnp.arange(size)

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        if len(index) > 1:
            return x.at[tuple(index)].get(mode="promise_in_bounds", wrap_negative_indices=False)
        # The function of `jnp` takes a millisecond more to trace and lower for each size that is new.
        (rows,) = index
        dims = lax.GatherDimensionNumbers(tuple(range(rows.ndim, rows.ndim + x.ndim - 1)), (0,), (0,))
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.gather(x, lax.expand_dims(rows, (rows.ndim,)), dims, (1, *x.shape[1:]), mode=mode)

    def add_at(self, shape: Sequence[int], index: Sequence[Any], values: Any) -> Any:
        # XLA cannot add booleans up. A result is true if any of its values is.
        kind = jnp.int32 if values.dtype == jnp.bool_ else accumulator(values.dtype)
        out, dtype = self.start(tuple(shape), index, kind), values.dtype
        values = values if dtype == out.dtype else values.astype(out.dtype)
        if len(index) > 1 or values.shape != (*index[0].shape, *shape[1:]):
            out = out.at[tuple(index)].add(values, mode="drop", wrap_negative_indices=False)
        else:
            (rows,) = index
            dims = lax.ScatterDimensionNumbers(tuple(range(rows.ndim, values.ndim)), (0,), (0,))
            mode = lax.GatherScatterMode.FILL_OR_DROP
            out = lax.scatter_add(out, lax.expand_dims(rows, (rows.ndim,)), values, dims, mode=mode)
        return out if dtype == out.dtype else out.astype(dtype)

    def start(self, shape: tuple[int, ...], index: Sequence[Any], dtype: Any) -> Any:
        """Return what `add_at` adds values to."""
        return jnp.zeros(shape, dtype)

    def select(self, mask: Any, x: Any, otherwise: float) -> Any:
        # `jnp.where` and each of its derivatives would be compiled as functions of their own.
        mask = jnp.broadcast_to(mask, x.shape)
        if (split := jax.typeof(mask).sharding) != jax.typeof(x).sharding:  # on explicit axes
            x = jax.reshard(x, split)
        return lax.select(mask, x, lax.full_like(x, otherwise))

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        return jnp.zeros_like(like, shape=tuple(shape))  # weakly typed if that is

    empty_sum = zeros


class _TakingOps(JaxOps):
    """The same, but a row at an index out of range is NaN. XLA writes it in the loop that takes rows.

    If one CPU runs the program, a row of NaN stands behind the last row, where a take reads it for a bad index. XLA
    does so in the loop that takes rows, and makes no copy. Otherwise each step that reads the rows marks them in a
    loop of its own: two products by element of 4,096 rows of 16 took 58 us for 48 (one core of an AMD EPYC with
    AVX-512, JAX 0.10.2, 2026-11-30). XLA would copy an array that two steps take rows of if the same row stood behind
    it for both. So the lowest bits of NaN are a number of the step.

    Args:
        number: the number of the step; 0 if no row of NaN may stand behind an array.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def iota(self, size: int, like: Any) -> Any:
        # An array of NumPy's, so that `take` and `start` know that it is in range.
        return super().iota(size, like) if is_symbol(size) else np.arange(size)

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        if any(map(is_symbol, x.shape[: len(index)])):
            return x.at[tuple(index)].get(mode="fill", fill_value=math.nan, wrap_negative_indices=False)
        given = [dim for dim, rows in enumerate(index) if not isinstance(rows, np.ndarray)]
        rows, marks = [*index], []
        appends = self.number > 0 and len(given) == 1 and not any(map(is_symbol, (*x.shape, *rows[given[0]].shape)))
        if appends:
            count = math.prod(np.broadcast_shapes(*(each.shape for each in index)))
            appends = appends_nan(x.size, count, count * math.prod(x.shape[len(index) :]), x.dtype.itemsize)
        for dim in given:
            # As unsigned numbers negative ones are out of range too.
            numbers = lax.bitcast_convert_type(rows[dim], jnp.dtype(f"u{rows[dim].dtype.name}"))
            size = repeat_like(numbers, x.shape[dim])
            if appends:
                last = lax.broadcast(_nan(self.number, x.dtype), (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
                x, rows[dim] = lax.concatenate((x, last), dim), lax.min(numbers, size).astype(rows[dim].dtype)
            else:
                inside = lax.lt(numbers, size)
                marks.append(lax.expand_dims(inside, range(inside.ndim, inside.ndim + x.ndim - len(index))))
        taken = super().take(x, rows)
        return self.select(functools.reduce(operator.and_, marks), taken, math.nan) if marks else taken


class _AddingOps(_TakingOps):
    """The same, and all sums are NaN if a value is added at an index out of range. XLA writes it in place of zeros."""

    def start(self, shape: tuple[int, ...], index: Sequence[Any], dtype: Any) -> Any:
        given = [pair for pair in zip(index, shape, strict=False) if not isinstance(pair[0], np.ndarray)]
        bad = [is_outside(values, 0, size) for values, size in given]
        nan, zero = (np.asarray(number, dtype) for number in (math.nan, 0))
        return lax.broadcast(lax.select(functools.reduce(operator.or_, bad), nan, zero), shape)


def appends_nan(elements: int, rows: int, taken: int, itemsize: int) -> bool:
    """Whether a take reads a row of NaN behind its array for a bad index, if one CPU runs the program.

    If two equal steps of a program take rows of one array, XLA copies the array. So it may have twice the elements that
    are taken at most. A single number in place of a row is marked as fast as it is.

    Args:
        elements: the elements of the array.
        rows: how many rows are taken.
        taken: the elements of these rows.
        itemsize: the bytes of an element.
    """
    return rows < taken and elements <= 2 * taken and itemsize >= 4


def _nan(number: int, dtype: Any) -> Any:
    """Return a NaN whose lowest bits are a number."""
    real = jnp.finfo(dtype).dtype
    bits = np.asarray(math.nan, real).view(f"u{real.itemsize}") | number
    return bits.view(real).astype(dtype)


OPS = JaxOps()


@functools.lru_cache(maxsize=512)
def marking(adds: bool, number: int) -> JaxOps:
    """Return what marks the results of bad indices: of takes, and if it `adds` of sums too; see `_TakingOps`."""
    return (_AddingOps if adds else _TakingOps)(number)
