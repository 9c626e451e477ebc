"""Loops over slices in JAX: one `scan` for all slices of the same sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from planner.language.dtypes import accumulator
from planner.language.spec import Term
from planner.program.loops import covers, slice_counts
from planner.program.plan import Loop, PlanRecord

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
        spec, devices = self.spec, _device_count((*inputs, *index_values))
        xs = [x.reshape(spec.shape(term)) for x, term in zip(inputs, spec.inputs, strict=True)]
        indices = [q.reshape(spec.shape(axes)) for q, axes in zip(index_values, self.brackets, strict=True)]
        # Of each axis a slice takes the same share from each of several devices, if its size allows that.
        parts = {axis: 1 if spec.size(axis) % devices or size % devices else devices for axis, size in self.axes}
        out = jnp.zeros(spec.output_shape, jnp.dtype(accumulator(self.dtype)))
        for sizes, count, body in self.bodies:
            add_slice = jax.checkpoint(partial(self._add_slice, sizes, parts, body, mode))

            def step(out: Any, number: Any, add_slice: Callable[..., Any] = add_slice) -> Any:
                return add_slice(out, number, xs, indices), None

            out, _ = lax.scan(step, out, jnp.arange(count, dtype=jnp.int32))
        return out.astype(self.dtype)

    def _add_slice(
        self,
        sizes: Mapping[str, int],
        parts: Mapping[str, int],
        body: Run,
        mode: str,
        out: Any,
        number: Any,
        xs: Sequence[Any],
        indices: Sequence[Any],
    ) -> Any:
        """Run one slice, and return `out` with its result: written as a part of `out`, or added to it."""
        starts, term = self._starts(sizes, number), self.spec.output

        def cut(x: Any, term: Term) -> Any:
            return _Slice(x.shape, term, sizes, starts, parts).of(x)

        pieces = tuple(map(cut, xs, self.spec.inputs))
        rows = tuple(map(cut, indices, self.brackets))
        value = body(pieces, rows, mode).astype(out.dtype)
        if not covers(self.axes, term):
            so_far = cut(out, term)
            value = so_far | value if value.dtype == bool else so_far + value
        return _Slice(out.shape, term, sizes, starts, parts).put(value, out)

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


class _Slice:
    """A slice of an array with a term.

    Where an axis has several parts, as many as there are devices, the slice has the same share of each part. So if the
    axis is split over devices, each cuts its share out of what it holds, and no array is gathered.

    Args:
        shape: the shape of the array.
        term: the term.
        sizes: the size of the slice along each axis that is cut.
        starts: where the slice begins.
        parts: the number of parts of each axis.
    """

    def __init__(
        self,
        shape: Sequence[int],
        term: Term,
        sizes: Mapping[Any, int],
        starts: Mapping[Any, Any],
        parts: Mapping[Any, int],
    ) -> None:
        self.whole: list[int] = []
        self.part: list[int] = []
        self.corner: list[Any] = []  # all numbers are int32, even if 64 bits are enabled
        self.shape = [sizes.get(entry, n) for entry, n in zip(term, shape, strict=True)]
        for entry, n, size in zip(term, shape, self.shape, strict=True):
            start, count = jnp.int32(starts.get(entry, 0)), parts.get(entry, 1)
            if count > 1:
                self.whole, self.part = [*self.whole, count], [*self.part, count]
                self.corner.append(jnp.int32(0))
                n, size, start = n // count, size // count, lax.div(start, jnp.int32(count))
            self.whole, self.part = [*self.whole, n], [*self.part, size]
            self.corner.append(start)

    def of(self, x: Any) -> Any:
        """Return the slice of an array."""
        return lax.dynamic_slice(x.reshape(self.whole), self.corner, self.part).reshape(self.shape)

    def put(self, value: Any, x: Any) -> Any:
        """Return an array with other values in the slice."""
        whole = lax.dynamic_update_slice(x.reshape(self.whole), value.reshape(self.part), self.corner)
        return whole.reshape(x.shape)


def _device_count(arrays: Sequence[Any]) -> int:
    """Return the number of devices over which XLA may split some arrays, as far as their types say."""
    mesh = next((mesh for x in arrays if not (mesh := jax.typeof(x).sharding.mesh).empty), None)
    if mesh is None:
        return 1
    types = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in types if kind != AxisType.Manual)
