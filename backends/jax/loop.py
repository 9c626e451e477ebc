"""Loops over slices in JAX: one `scan` for all slices of the same sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from planner.language.dtypes import accumulator
from planner.language.spec import Term
from planner.program.loops import covers, slice_counts
from planner.program.plan import Loop, PlanRecord

__all__ = ["Run", "SliceLoop", "as_one", "compile_whole"]

# From operands, index arrays and an index mode to the result.
Run = Callable[[tuple[Any, ...], tuple[Any, ...], str], Any]


def compile_whole(run: Run) -> Run:
    """Return a function that is compiled as a whole, under a name that profiles show."""

    def planner_contraction(leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
        return run(leaves, index_values, mode)

    compiled: Run = jax.jit(planner_contraction, static_argnums=(2,))
    return compiled


def as_one(run: Run) -> Run:
    """Return a function that is compiled as a whole and keeps nothing for the backward pass.

    It is compiled under `jax.disable_jit` too.
    """
    compiled = compile_whole(jax.checkpoint(run, static_argnums=(2,)))

    def whole(leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
        with jax.disable_jit(False):
            return compiled(leaves, index_values, mode)

    return whole


class SliceLoop:
    """A loop over slices.

    The body is checkpointed and cuts its slices out of the inputs itself, and the scan carries the result. So nothing
    of a slice is kept for the backward pass.

    Attributes:
        bodies: for each combination of slice sizes, how many slices have it and the function that runs one of them.
        brackets: the axes of each index array.
    """

    def __init__(self, loop: Loop, body_run: Callable[[PlanRecord], Run]) -> None:
        self.axes, self.spec, self.dtype = loop.axes, loop.spec, loop.dtype
        counts = slice_counts(self.axes, self.spec)
        self.bodies = [(sizes, n, body_run(body)) for (sizes, n), body in zip(counts, loop.bodies, strict=True)]
        self.brackets = [next(g.axes for g in self.spec.gathers if g.array == name) for name in self.spec.arrays]

    def run(self, inputs: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
        """Run all slices."""
        spec = self.spec
        xs = [x.reshape(spec.shape(term)) for x, term in zip(inputs, spec.inputs, strict=True)]
        indices = [q.reshape(spec.shape(axes)) for q, axes in zip(index_values, self.brackets, strict=True)]
        out = jnp.zeros(spec.output_shape, jnp.dtype(accumulator(self.dtype)))
        for sizes, count, body in self.bodies:
            add_slice = jax.checkpoint(partial(self._add_slice, sizes, body, mode))

            def step(out: Any, number: Any, add_slice: Callable[..., Any] = add_slice) -> Any:
                return add_slice(out, number, xs, indices), None

            out, _ = lax.scan(step, out, jnp.arange(count, dtype=jnp.int32))
        return out.astype(self.dtype)

    def _add_slice(
        self,
        sizes: Mapping[str, int],
        body: Run,
        mode: str,
        out: Any,
        number: Any,
        xs: Sequence[Any],
        indices: Sequence[Any],
    ) -> Any:
        """Run one slice, and return `out` with its result: written as a part of `out`, or added to it."""
        starts, term = self._starts(sizes, number), self.spec.output
        pieces = tuple(_cut(x, term, sizes, starts) for x, term in zip(xs, self.spec.inputs, strict=True))
        rows = tuple(_cut(q, axes, sizes, starts) for q, axes in zip(indices, self.brackets, strict=True))
        value = body(pieces, rows, mode).astype(out.dtype)
        if not covers(self.axes, term):
            so_far = _cut(out, term, sizes, starts)
            value = so_far | value if value.dtype == bool else so_far + value
        return lax.dynamic_update_slice(out, value, _corner(term, starts))

    def _starts(self, sizes: Mapping[str, int], number: Any) -> dict[str, Any]:
        """Return where a slice starts along each axis. Slices of the same sizes are numbered, the last axis fastest."""
        starts: dict[str, Any] = {}
        for axis, size in reversed(self.axes):
            whole = self.spec.size(axis) // size
            if sizes[axis] < size:  # the shorter slice at the end
                starts[axis] = whole * size
            else:
                starts[axis] = lax.rem(number, jnp.int32(whole)) * size
                number = lax.div(number, jnp.int32(whole))
        return starts


def _cut(x: Any, term: Term, sizes: Mapping[Any, int], starts: Mapping[Any, Any]) -> Any:
    """Return a slice of an array with this term."""
    shape = [sizes.get(e, n) for e, n in zip(term, x.shape, strict=True)]
    return lax.dynamic_slice(x, _corner(term, starts), shape)


def _corner(term: Term, starts: Mapping[Any, Any]) -> list[Any]:
    """Return where a slice of an array with this term begins; all numbers are int32, even if 64 bits are enabled."""
    return [jnp.int32(starts.get(e, 0)) for e in term]
