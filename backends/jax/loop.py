"""A plan's loop over slices: one `scan` for all slices of a size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from planner.backends.jax.index import index_shape
from planner.backends.jax.tree import Run, tree_run
from planner.language.spec import Gather
from planner.program.loops import accumulator, body_of, covers, slice_counts
from planner.program.plan import PlanRecord

__all__ = ["as_one", "plan_run"]


def plan_run(plan: PlanRecord) -> Run:
    """Return the function that runs a plan, slice by slice where it is a loop."""
    if plan.loop is None:
        return tree_run(plan)
    # Only counters are kept of a loop whose body is checkpointed; a checkpoint around it computes them anew instead.
    return as_one(_SliceLoop(plan).whole)


def as_one(run: Run) -> Run:
    """Return a run as one compiled function, which keeps nothing for a backward pass, under `jax.disable_jit` too."""

    def planner_contraction(leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
        return run(leaves, index_values, mode)

    compiled: Run = jax.jit(jax.checkpoint(planner_contraction, static_argnums=(2,)), static_argnums=(2,))

    def whole(leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
        with jax.disable_jit(False):
            return compiled(leaves, index_values, mode)

    return whole


class _SliceLoop:
    """A plan's loop.

    Operands are cut inside a checkpointed body, and sums are carried: so nothing of a slice is kept for the backward
    pass.

    Attributes:
        bodies: sizes that slices have, how many have them, and the function that runs one.
        brackets: the axes of each index array.
    """

    def __init__(self, plan: PlanRecord) -> None:
        assert plan.loop is not None
        self.axes, self.spec, self.dtype = plan.loop.axes, plan.resolved.spec, plan.dtype
        self.bodies = [
            (sizes, count, plan_run(body_of(plan, sizes))) for sizes, count in slice_counts(self.axes, self.spec)
        ]
        self.brackets = [next(g.axes for g in self.spec.gathers if g.array == name) for name in self.spec.arrays]

    def whole(self, leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
        """Run all slices."""
        spec = self.spec
        xs = [x.reshape(spec.shape(term)) for x, term in zip(leaves, spec.inputs, strict=True)]
        shapes = [index_shape(spec, name) for name in spec.arrays]
        indices = [q.reshape(shape) for q, shape in zip(index_values, shapes, strict=True)]
        out = jnp.zeros(spec.output_shape, jnp.dtype(accumulator(self.dtype)))
        for sizes, count, body in self.bodies:
            of_slice = jax.checkpoint(partial(self._with_slice, sizes, body, mode))

            def step(out: Any, number: Any, of_slice: Callable[..., Any] = of_slice) -> Any:
                return of_slice(out, number, xs, indices), None

            out, _ = lax.scan(step, out, jnp.arange(count, dtype=jnp.int32))
        return out.astype(self.dtype)

    def _with_slice(
        self, sizes: Mapping[str, int], body: Run, mode: str, out: Any, number: Any, xs: Sequence[Any],
        indices: Sequence[Any],
    ) -> Any:  # fmt: skip
        """The result so far with that of a slice: it is a part of it, or is added to it."""
        starts, term = self._starts(sizes, number), self.spec.output
        pieces = tuple(_cut(x, term, sizes, starts) for x, term in zip(xs, self.spec.inputs, strict=True))
        rows = tuple(_cut(q, axes, sizes, starts) for q, axes in zip(indices, self.brackets, strict=True))
        value = body(pieces, rows, mode).astype(out.dtype)
        if not covers(self.axes, term):
            here = _cut(out, term, sizes, starts)
            value = here | value if value.dtype == bool else here + value
        return lax.dynamic_update_slice(out, value, _corner(term, starts))

    def _starts(self, sizes: Mapping[str, int], number: Any) -> dict[str, Any]:
        """Where the slice of a number starts, among those of the same sizes: the last axis is cut fastest."""
        starts: dict[str, Any] = {}
        for axis, size in reversed(self.axes):
            whole = self.spec.size(axis) // size
            if sizes[axis] < size:  # the one that is left over
                starts[axis] = whole * size
            else:
                starts[axis] = lax.rem(number, jnp.int32(whole)) * size
                number = lax.div(number, jnp.int32(whole))
        return starts


def _cut(x: Any, term: Sequence[str | Gather], sizes: Mapping[str, int], starts: Mapping[str, Any]) -> Any:
    """A slice of an array with this term."""
    shape = [sizes.get(e, n) if isinstance(e, str) else n for e, n in zip(term, x.shape, strict=True)]
    return lax.dynamic_slice(x, _corner(term, starts), shape)


def _corner(term: Sequence[str | Gather], starts: Mapping[str, Any]) -> list[Any]:
    """Where a slice of an array with this term begins: numbers of one dtype, also where 64 bits are enabled."""
    return [jnp.int32(starts.get(e, 0) if isinstance(e, str) else 0) for e in term]
