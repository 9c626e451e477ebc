"""What a step reads of a pool by index arrays: a row that no index names may hold anything, NaN as well.

A plan that contracts before it takes multiplies such rows: `Reads` tells its steps and their gradients which index
arrays say what is read, and they look whether the operand is finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from planner.backends.common.common import WHOLE_POOL, RangedIndices, UnreadRows, find_read_rows
from planner.backends.jax.index import normalised
from planner.backends.jax.rows import OPS
from planner.language.spec import Gather, Spec, Term, term_axes
from planner.program.forms import PooledForm, pooled_form
from planner.program.ops import JointGradient, Op

__all__ = ["Reads", "zero_unread_rows", "read_mask", "unread", "unread_pool"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reads:
    """What a step and those derived from it know of index arrays.

    Attributes:
        arrays: letters of the index arrays among the step's arguments.
        unread_rows: for each operand of the op's spec, whether rows are read of it that no index may name.
        gradient: whether the step is part of a gradient, no step of a plan.
    """

    arrays: tuple[str, ...]
    unread_rows: tuple[UnreadRows | None, ...]
    gradient: bool = False

    @classmethod
    def of(cls, op: Op, unread_rows: tuple[UnreadRows | None, ...]) -> Reads:
        """Return what a step of a plan reads: the index arrays of its own spec, and of unread_rows operands."""
        later = {name for e in unread_rows if e is not None for name in e.spec.arrays}
        return cls(tuple(sorted({*op.spec.arrays, *later})), unread_rows)

    def without(self, *places: int, gradient: bool = True) -> Reads:
        """With a tangent or a cotangent in some operands' places, whose unread rows are zero."""
        unread_rows = tuple(None if i in places else e for i, e in enumerate(self.unread_rows))
        return Reads(self.arrays, unread_rows, self.gradient or gradient)

    def batched(self, size: int, operands: Sequence[int], arrays: Sequence[str]) -> Reads:
        """With a leading axis on some operands and index arrays."""
        unread_rows = tuple(e and e.batched(size, i in operands, arrays) for i, e in enumerate(self.unread_rows))
        return Reads(self.arrays, unread_rows, self.gradient)


def unread(op: Op, reads: Reads) -> list[tuple[int, Spec, Term]]:
    """Inputs of which this step could carry rows that no index of a later step names into what is seen.

    Returns:
        For each its place, and the spec and the term by which it is read later.
    """
    if not jnp.issubdtype(jnp.dtype(op.dtype), jnp.inexact):
        return []
    return [
        (place + op.first_operand, e.spec, e.spec.inputs[0])
        for place, e in enumerate(reads.unread_rows)
        if e is not None and (isinstance(op, JointGradient) or reads.gradient or not e.at_once)
    ]


def unread_pool(op: Op, lowering: str) -> int | None:
    """The place of the pool where an implementation multiplies all of it, and the result would show it."""
    if lowering != WHOLE_POOL or not jnp.issubdtype(jnp.dtype(op.dtype), jnp.inexact):
        return None
    form = pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    return (
        form.place + op.first_operand
        if form.place != 2 and (isinstance(op, JointGradient) or form.scores != 2)
        else None
    )


def zero_unread_rows(x: Any, spec: Spec, term: Term, given: Mapping[Gather, Any], index_mode: str) -> Any:
    """Where an operand holds NaN or infinity, zero the rows that no index names."""
    return OPS.select(read_mask(x, spec, term, given, index_mode), x, 0)


def read_mask(x: Any, spec: Spec, term: Term, given: Mapping[Gather, Any], index_mode: str) -> Any:
    """Which rows of an operand some index names; all, where it holds no NaN or infinity.

    Zero times NaN is NaN, so a row that is multiplied by zeros only must not hold one. Only the mask is made in a
    branch, as XLA would copy what goes into a whole step and comes out of it. It is made for one position of an index
    axis after another: memory is set aside for a branch, taken or not.

    Args:
        x: the operand.
        spec: by which it is read.
        term: of the operand.
        given: index arrays as the spec has them.
        index_mode: how they are read.
    """
    sizes = dict(spec.sizes)
    rows = term_axes(tuple(e for e in term if isinstance(e, Gather) or term.count(e) > 1))
    shape = [n if isinstance(e, Gather) or e in rows else 1 for e, n in zip(term, x.shape, strict=True)]
    slow = max((axis for axis in rows if axis not in term and sizes[axis]), key=lambda axis: sizes[axis], default=None)
    narrow = dataclasses.replace(spec, sizes=tuple((a, 1 if a == slow else size) for a, size in spec.sizes))

    def read() -> Any:
        def at(position: Any, mask: Any) -> Any:
            here = RangedIndices(index_mode in ("raise", "drop"))
            for gather in spec.gathers:
                values = given[gather]
                for dim, axis in enumerate(gather.axes):
                    if axis == slow:
                        values = lax.dynamic_slice_in_dim(values, position, 1, dim)
                here[gather] = normalised(values, gather, index_mode)
            return mask | find_read_rows(OPS, x, term, narrow, here)

        return lax.fori_loop(0, sizes[slow] if slow else 1, at, jnp.zeros(shape, bool))

    return lax.cond(_finite(x), lambda: jnp.ones(shape, bool), read)


def _finite(x: Any) -> Any:
    """Whether an array holds finite numbers only; on CPUs in a half to a quarter of the time of `isfinite(x).all()`."""
    return jnp.abs(x).max(initial=0) < jnp.inf
