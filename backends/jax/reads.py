"""Unread rows in JAX: rows of a pool that no index names are zeroed where they hold NaN or infinity.

A plan that contracts a pool before it takes rows multiplies unread rows too. `Reads` tells a step, and the steps of its
gradients, which index arrays name the rows that are read. The step zeroes the other rows if the pool is not finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from planner.backends.common.unread_rows import WHOLE_POOL, UnreadRows, find_read_rows
from planner.backends.jax.index import normalise
from planner.backends.jax.rows import OPS
from planner.language.spec import Gather, Spec, Term, indexed_dims, row_axes
from planner.program.forms import PooledForm, pooled_form
from planner.program.implementations import RangedIndices
from planner.program.ops import JointGradient, Op

__all__ = ["Reads", "zero_unread_rows", "read_mask", "unread_inputs", "unread_pool"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reads:
    """What a step, and every step derived from it, reads of index arrays.

    Attributes:
        arrays: the letters of the index arrays among the step's arguments.
        unread_rows: for each operand of the op's spec, the unread rows that the step reads; None for an operand that is
            read without them.
        gradient: True if the step is part of a gradient, and not a step of a plan's forward program.
    """

    arrays: tuple[str, ...]
    unread_rows: tuple[UnreadRows | None, ...]
    gradient: bool = False

    @classmethod
    def of(cls, op: Op, unread_rows: tuple[UnreadRows | None, ...]) -> Reads:
        """Return what a step of a plan reads: index arrays of its spec, and those that say which rows are unread."""
        later_arrays = {name for rows in unread_rows if rows is not None for name in rows.spec.arrays}
        return cls(tuple(sorted({*op.spec.arrays, *later_arrays})), unread_rows)

    def without(self, *places: int, gradient: bool = True) -> Reads:
        """Return it for a step with tangents or cotangents in some operands' places: their unread rows are zero."""
        unread_rows = tuple(None if i in places else rows for i, rows in enumerate(self.unread_rows))
        return Reads(self.arrays, unread_rows, self.gradient or gradient)

    def batched(self, size: int, operands: Sequence[int], arrays: Sequence[str]) -> Reads:
        """Return it with a leading axis on some operands and index arrays."""
        unread_rows = tuple(
            rows and rows.batched(size, i in operands, arrays) for i, rows in enumerate(self.unread_rows)
        )
        return Reads(self.arrays, unread_rows, self.gradient)


def unread_inputs(op: Op, reads: Reads) -> list[tuple[int, Spec, Term]]:
    """Return the inputs whose unread rows could show in a result or a gradient.

    Returns:
        For each of them its position, and the spec and the term by which a later step takes its rows.
    """
    if not jnp.issubdtype(jnp.dtype(op.dtype), jnp.inexact):
        return []
    return [
        (place + op.first_operand, rows.spec, rows.spec.inputs[0])
        for place, rows in enumerate(reads.unread_rows)
        if rows is not None and (isinstance(op, JointGradient) or reads.gradient or not rows.at_once)
    ]


def unread_pool(op: Op, lowering: str) -> int | None:
    """Return the pool's position among the inputs if this implementation could carry its unread rows into the result.

    Only the implementation that multiplies the whole pool can; for others the answer is None.
    """
    if lowering != WHOLE_POOL or not jnp.issubdtype(jnp.dtype(op.dtype), jnp.inexact):
        return None
    form = pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    is_gradient = isinstance(op, JointGradient) or form.scores != 2
    return form.place + op.first_operand if form.place != 2 and is_gradient else None


def zero_unread_rows(x: Any, spec: Spec, term: Term, given: Mapping[Gather, Any], index_mode: str) -> Any:
    """Zero the rows of an operand that no index names, if the operand holds NaN or infinity."""
    return OPS.select(read_mask(x, spec, term, given, index_mode), x, 0)


def read_mask(x: Any, spec: Spec, term: Term, given: Mapping[Gather, Any], index_mode: str) -> Any:
    """Return a mask of the rows of an operand that some index names. It is true everywhere if the operand is finite.

    Zero times NaN is NaN, so a row that is multiplied by zeros only must not hold NaN. The mask is computed in a branch
    of a `cond`. The step itself is not: XLA would copy the inputs and results of the branch. XLA also reserves the
    memory of a branch that is not taken. To need little, the branch goes through one index axis position by position.

    Args:
        x: the operand.
        spec: the spec by which its rows are read.
        term: the operand's term.
        given: the index arrays of the spec, before they are brought into range.
        index_mode: the index mode.
    """
    sizes = dict(spec.sizes)
    rows, indexed = row_axes(term), indexed_dims(term)
    shape = [n if d in indexed else 1 for d, n in enumerate(x.shape)]
    slow = max((axis for axis in rows if axis not in term and sizes[axis]), key=lambda axis: sizes[axis], default=None)
    narrow = dataclasses.replace(spec, sizes=tuple((a, 1 if a == slow else size) for a, size in spec.sizes))

    def find_read() -> Any:
        def add_position(position: Any, mask: Any) -> Any:
            index = RangedIndices(index_mode in ("raise", "drop"))
            for gather in spec.gathers:
                values = given[gather]
                for dim, axis in enumerate(gather.axes):
                    if axis == slow:
                        values = lax.dynamic_slice_in_dim(values, position, 1, dim)
                index[gather] = normalise(values, gather, index_mode)
            return mask | find_read_rows(OPS, x, term, narrow, index)

        return lax.fori_loop(0, sizes[slow] if slow else 1, add_position, jnp.zeros(shape, bool))

    return lax.cond(_finite(x), lambda: jnp.ones(shape, bool), find_read)


def _finite(x: Any) -> Any:
    """Return whether all numbers are finite, on CPUs in a half to a quarter of the time of `isfinite(x).all()`."""
    return jnp.abs(x).max(initial=0) < jnp.inf
