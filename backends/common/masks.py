"""Masks: what runs a guard, see `planner.program.guards`, and the rewriting of operands that no mask fits.

As a matrix, a dropped index is a row of zeros, and zero times NaN is NaN. So values are selected away before they are
multiplied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.backends.common.stock import ArrayOps, diagonals, evaluate
from planner.language.spec import Gather, Spec, Term, indexed_dims, row_axes
from planner.program.calls import RangedIndices, shape_in, size_in
from planner.program.ops import Guard

# From a guard, its input in a sequence, and index arrays to its result in a tuple, as `Implementation.run`.
GuardRun = Callable[[Guard, Sequence[Any], RangedIndices], tuple[Any, ...]]
# A function of the arguments of `find_read_rows`.
RowFinder = Callable[[ArrayOps, Any, Term, Spec, RangedIndices], Any]


def zero_dropped(ops: ArrayOps, x: Any, term: Term, dropped: Sequence[Gather], spec: Spec, index: RangedIndices) -> Any:
    """Zero the entries of an array that are at the place of a dropped index.

    Args:
        ops: the framework's array functions.
        x: the array.
        term: its term, which has all axes of the brackets.
        dropped: the brackets.
        spec: the spec, for the sizes of the axes.
        index: index arrays in range.
    """
    for gather in dropped:
        take_diagonals, axes = diagonals(ops, gather.axes)
        kept = take_diagonals(index[gather] < size_in(index, spec, gather))
        kept = ops.permute(kept, [axes.index(str(e)) for e in term if e in axes])
        x = ops.select(kept.reshape([size_in(index, spec, e) if e in axes else 1 for e in term]), x, 0)
    return x


def find_read_rows(ops: ArrayOps, x: Any, term: Term, spec: Spec, index: RangedIndices) -> Any:
    """Return a mask of the rows of an array that some index names; it broadcasts to the array.

    The gradient of a take, for an output gradient of ones, counts how often each row is read.

    Args:
        ops: the framework's array functions.
        x: the array.
        term: the term by which its rows are taken.
        spec: the spec, for the sizes of the axes.
        index: index arrays in range.
    """
    rows, addressed = row_axes(term), tuple(term[d] for d in indexed_dims(term))
    ones = ops.zeros(shape_in(index, spec, rows), x) + 1
    reads = evaluate(ops, Spec((rows,), addressed, spec.sizes), [ones], index, index.may_drop)
    shape = [size_in(index, spec, e) if e in addressed else 1 for e in term]
    return (reads != 0).reshape(shape)


def guard_run(ops: ArrayOps, finite: Callable[[Any], bool], read_rows: RowFinder = find_read_rows) -> GuardRun:
    """Return the function that runs guards in a framework whose values can be looked at.

    Args:
        ops: the framework's array functions.
        finite: tells whether an array holds finite numbers only.
        read_rows: finds the rows that some index names.
    """

    def run(op: Guard, inputs: Sequence[Any], index: RangedIndices) -> tuple[Any, ...]:
        (x,), (term,) = inputs, op.spec.inputs
        if index.may_drop:
            x = zero_dropped(ops, x, term, op.dropped, op.spec, index)
        if op.rows is not None and not finite(x):
            x = ops.select(read_rows(ops, x, op.rows, op.spec, index), x, 0)
        return (x,)

    return run


def widen_operands(
    ops: ArrayOps,
    operands: Sequence[Any],
    spec: Spec,
    index: RangedIndices,
    finite: Callable[[Any], bool],
    occurs: Callable[[Any], bool] = np.any,
) -> tuple[Spec, list[Any]] | None:
    """Rewrite a contraction in which dropped indices meet infinities or NaN that no guard can zero.

    An operand that lacks some axes of a bracket is multiplied both by rows of dropped indices and by other rows. Once
    it is repeated along those axes, it can be guarded like any other operand.

    Args:
        ops: the framework's array functions.
        operands: arrays as the spec sees them.
        spec: the resolved spec.
        index: prepared index arrays.
        finite: tells whether an array holds finite numbers only.
        occurs: tells whether any entry of a mask is true.

    Returns:
        The rewritten spec and its operands; None if nothing has to be rewritten.
    """
    if not index.may_drop:
        return None
    sizes = spec.by_axis
    terms, values = list(spec.inputs), list(operands)
    for gather, rows in index.items():
        lacking = {}
        for number, term in enumerate(terms):
            missing = tuple(axis for axis in dict.fromkeys(gather.axes) if axis not in term)
            if gather not in term and missing:
                lacking[number] = missing
        if not lacking or not occurs(rows == gather.size):  # this reads values, and so waits for a card
            continue
        for number, missing in lacking.items():
            if not finite(values[number]):
                values[number] = ops.expand(values[number], [*(sizes[axis] for axis in missing), *values[number].shape])
                terms[number] = (*missing, *terms[number])
    if tuple(terms) == spec.inputs:
        return None
    return dataclasses.replace(spec, inputs=tuple(terms)), values
