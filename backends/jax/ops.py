"""The array functions of JAX that the stock evaluation needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from planner.backends.common.stock import Product
from planner.backends.jax.products import as_matrices
from planner.kernels.grouping.jax_grouping import accumulator
from planner.language.spec import Spec
from planner.program.forms import ProductForm

__all__ = ["OPS", "JaxOps", "spread"]


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
        names = {axis: number for number, (axis, _) in enumerate(spec.sizes)}
        terms = [[names[str(e)] for e in term] for term in spec.terms]
        order = [names[e] for e in (*form.batch, *form.left, *form.right)]
        back = [order.index(axis) for axis in terms[2]]
        if not form.contracted and set(terms[2]) == {*terms[0], *terms[1]}:
            return lambda a, b: jnp.transpose(spread(a, terms[0], order) * spread(b, terms[1], order), back)

        def summed(a: Any, b: Any) -> Any:
            kind = None if a.dtype == jnp.bool_ else accumulator(a.dtype)
            return jnp.einsum(a, terms[0], b, terms[1], terms[2], preferred_element_type=kind).astype(a.dtype)

        if 0 in form.sizes:
            return summed
        matrices = as_matrices(spec)
        return lambda a, b: (summed if a.dtype == jnp.bool_ else matrices)(a, b)

    def iota(self, size: int, like: Any) -> Any:
        return jnp.arange(size)

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        return x.at[tuple(index)].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def add_at(self, shape: Sequence[int], index: Sequence[Any], values: Any) -> Any:
        # XLA cannot add booleans up. A result is true if any of its values is.
        kind = jnp.int32 if values.dtype == jnp.bool_ else accumulator(values.dtype)
        out = jnp.zeros(tuple(shape), kind)
        out = out.at[tuple(index)].add(values.astype(out.dtype), mode="drop", wrap_negative_indices=False)
        return out.astype(values.dtype)

    def select(self, mask: Any, x: Any, otherwise: float) -> Any:
        # `jnp.where` and each of its derivatives would be compiled as functions of their own.
        return lax.select(jnp.broadcast_to(mask, x.shape), x, lax.full_like(x, otherwise))

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        return jnp.zeros_like(like, shape=tuple(shape))  # weakly typed if that is


def spread(x: Any, axes: Sequence[int], order: Sequence[int]) -> Any:
    """Permute an array to an order of axes; axes that it lacks get size 1."""
    present = [axis for axis in order if axis in axes]
    x = jnp.transpose(x, [axes.index(axis) for axis in present])
    missing = tuple(position for position, axis in enumerate(order) if axis not in axes)
    return jnp.expand_dims(x, missing)


OPS = JaxOps()
