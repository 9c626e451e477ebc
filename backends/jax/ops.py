"""The array functions of JAX that the stock evaluation needs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from planner.backends.common.stock import Product
from planner.backends.jax.index import is_outside
from planner.backends.jax.products import as_dot
from planner.kernels.grouping.jax_grouping import accumulator
from planner.language.spec import Spec
from planner.program.forms import ProductForm

__all__ = ["MARKING_ALL", "MARKING_TAKES", "OPS", "JaxOps"]


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
        return x.at[tuple(index)].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def add_at(self, shape: Sequence[int], index: Sequence[Any], values: Any) -> Any:
        # XLA cannot add booleans up. A result is true if any of its values is.
        kind = jnp.int32 if values.dtype == jnp.bool_ else accumulator(values.dtype)
        out = self.start(tuple(shape), index, kind)
        out = out.at[tuple(index)].add(values.astype(out.dtype), mode="drop", wrap_negative_indices=False)
        return out.astype(values.dtype)

    def start(self, shape: tuple[int, ...], index: Sequence[Any], dtype: Any) -> Any:
        """Return what `add_at` adds values to."""
        return jnp.zeros(shape, dtype)

    def select(self, mask: Any, x: Any, otherwise: float) -> Any:
        # `jnp.where` and each of its derivatives would be compiled as functions of their own.
        return lax.select(jnp.broadcast_to(mask, x.shape), x, lax.full_like(x, otherwise))

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        return jnp.zeros_like(like, shape=tuple(shape))  # weakly typed if that is


class _TakingOps(JaxOps):
    """The same, but a row at an index out of range is NaN. XLA writes it in the loop that takes rows."""

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        return x.at[tuple(index)].get(mode="fill", fill_value=math.nan, wrap_negative_indices=False)


class _AddingOps(_TakingOps):
    """The same, and all sums are NaN if a value is added at an index out of range. XLA writes it in place of zeros."""

    def start(self, shape: tuple[int, ...], index: Sequence[Any], dtype: Any) -> Any:
        bad = [is_outside(values, 0, size) for values, size in zip(index, shape, strict=False)]
        return jnp.full(shape, jnp.where(functools.reduce(operator.or_, bad), math.nan, 0), dtype)


OPS, MARKING_TAKES, MARKING_ALL = JaxOps(), _TakingOps(), _AddingOps()
