"""A plan's loop over slices: one `scan` for all slices of a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from planner.backends.jax_index import index_shape
from planner.backends.jax_tree import Run, tree_run
from planner.loops import accumulator, body_of, covers, parts, slice_counts
from planner.spec import Gather

if TYPE_CHECKING:
    from planner.plan import Plan

__all__ = ["plan_run"]


def plan_run(plan: Plan) -> Run:
    """Return the function that runs a plan, slice by slice where it is a loop."""
    if plan.loop is None:
        return tree_run(plan)
    sliced: Run = jax.jit(_SliceLoop(plan).whole, static_argnums=(2,))
    return sliced


class _SliceLoop:
    """A plan's loop.

    Operands are closed over and cut inside a checkpointed body, and sums are carried: so nothing of a slice is
    kept for the backward pass.

    Attributes:
        bodies: sizes that slices have, and the function that runs a slice of them.
        starts: where the slices of some sizes start, along each axis that is cut.
        brackets: the axes of each index array.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.loop is not None
        self.axes, self.spec, self.dtype = plan.loop.axes, plan.resolved.spec, plan.dtype
        self.bodies = [(sizes, plan_run(body_of(plan, sizes))) for sizes, _ in slice_counts(self.axes, self.spec)]
        self.starts: dict[tuple[int, ...], list[list[int]]] = {}
        for part in parts(self.axes, self.spec):
            self.starts.setdefault(tuple(part.sizes.values()), []).append([start for _, start, _ in part.spans])
        self.brackets = [next(g.axes for g in self.spec.gathers if g.array == name) for name in self.spec.arrays]

    def whole(self, leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
        """Run all slices."""
        spec = self.spec
        xs = [x.reshape(spec.shape(term)) for x, term in zip(leaves, spec.inputs, strict=True)]
        shapes = [index_shape(spec, name) for name in spec.arrays]
        indices = [q.reshape(shape) for q, shape in zip(index_values, shapes, strict=True)]
        out = jnp.zeros(spec.output_shape, jnp.dtype(accumulator(self.dtype)))
        for sizes, body in self.bodies:

            def step(out: Any, position: Any, sizes: Mapping[str, int] = sizes, body: Run = body) -> Any:
                starts = {axis: position[number] for number, axis in enumerate(sizes)}
                of_slice = jax.checkpoint(partial(self._of_slice, sizes, body, mode))
                return self._placed(of_slice(xs, indices, starts), out, sizes, starts), None

            out, _ = lax.scan(step, out, jnp.asarray(self.starts[tuple(sizes.values())], jnp.int32))
        return out.astype(self.dtype)

    def _of_slice(
        self, sizes: Mapping[str, int], body: Run, mode: str, xs: Sequence[Any], indices: Sequence[Any],
        starts: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """What a slice computes, cut from the whole operands and index arrays."""
        pieces = tuple(_cut(x, term, sizes, starts) for x, term in zip(xs, self.spec.inputs, strict=True))
        rows = tuple(_cut(q, axes, sizes, starts) for q, axes in zip(indices, self.brackets, strict=True))
        return body(pieces, rows, mode)

    def _placed(self, value: Any, out: Any, sizes: Mapping[str, int], starts: Mapping[str, Any]) -> Any:
        """The result so far with that of a slice: it is a part of it, or is added to it."""
        term = self.spec.output
        value = value.astype(out.dtype)
        if not covers(self.axes, term):
            here = _cut(out, term, sizes, starts)
            value = here | value if value.dtype == bool else here + value
        return lax.dynamic_update_slice(out, value, _corner(term, starts))


def _cut(x: Any, term: Sequence[str | Gather], sizes: Mapping[str, int], starts: Mapping[str, Any]) -> Any:
    """A slice of an array with this term."""
    shape = [sizes.get(e, n) if isinstance(e, str) else n for e, n in zip(term, x.shape, strict=True)]
    return lax.dynamic_slice(x, _corner(term, starts), shape)


def _corner(term: Sequence[str | Gather], starts: Mapping[str, Any]) -> list[Any]:
    """Where a slice of an array with this term begins."""
    return [starts.get(e, 0) if isinstance(e, str) else 0 for e in term]
