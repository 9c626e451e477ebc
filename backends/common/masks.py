"""Masks for dropped indices: values that only dropped indices address are set to zero, NaN and infinities included.

A dropped index means "no row". As a matrix, such an index is a row of zeros, and zero times NaN is NaN. So the values
are selected away before they are multiplied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.backends.common.stock import ArrayOps, diagonals
from planner.language.spec import Gather, Spec, Term, plain_axes
from planner.program.implementations import RangedIndices

__all__ = ["mask_operands", "mask_term", "widen_operands"]


def _term_mask(ops: ArrayOps, valid: Any, gather: Gather, term: Term, spec: Spec) -> Any:
    """Shape a mask over a bracket's axes so that it broadcasts over a term that has all of them."""
    take_diagonals, axes = diagonals(ops, gather.axes)
    sizes = dict(spec.sizes)
    valid = ops.permute(take_diagonals(valid), [axes.index(str(e)) for e in term if e in axes])
    return valid.reshape([sizes[str(e)] if e in axes else 1 for e in term])


def mask_term(ops: ArrayOps, x: Any, term: Term, spec: Spec, index: RangedIndices) -> Any:
    """Zero the entries of an operand or a result that only dropped indices would meet, whatever they hold.

    This is done for each bracket whose axes the term has all of: there each entry belongs to one index.
    """
    if not index.may_drop:
        return x
    plain = plain_axes(term)
    repeats = len(plain) > len(set(plain))
    for gather, values in index.items():
        covers_bracket = gather.axes and set(gather.axes) <= set(plain)
        if covers_bracket and gather not in term and not repeats:
            x = ops.select(_term_mask(ops, values < gather.size, gather, term, spec), x, 0)
    return x


def mask_operands(ops: ArrayOps, operands: Sequence[Any], spec: Spec, index: RangedIndices) -> list[Any]:
    """Apply `mask_term` to every operand."""
    return [mask_term(ops, x, term, spec, index) for x, term in zip(operands, spec.inputs, strict=True)]


def widen_operands(
    ops: ArrayOps,
    operands: Sequence[Any],
    spec: Spec,
    index: RangedIndices,
    finite: Callable[[Any], bool],
    occurs: Callable[[Any], bool] = np.any,
) -> tuple[Spec, list[Any]] | None:
    """Rewrite a contraction in which dropped indices meet infinities or NaN that `mask_term` cannot reach.

    An operand that lacks some axes of a bracket is multiplied both by rows of dropped indices and by other rows. Once
    it is repeated along those axes, it can be masked like any other operand.

    Args:
        ops: the framework's array functions.
        operands: arrays as the spec sees them.
        spec: the resolved spec.
        index: prepared index arrays.
        finite: tells whether an array holds finite numbers only.
        occurs: tells whether any entry of a mask is true.

    Returns:
        The rewritten spec and its operands, masked; None if nothing has to be rewritten.
    """
    sizes = dict(spec.sizes)
    terms, values = list(spec.inputs), list(operands)
    for gather, rows in index.items():
        if not occurs(rows == gather.size):
            continue
        for number, term in enumerate(terms):
            missing = tuple(axis for axis in dict.fromkeys(gather.axes) if axis not in term)
            if gather not in term and missing and not finite(values[number]):
                values[number] = ops.expand(values[number], [*(sizes[axis] for axis in missing), *values[number].shape])
                terms[number] = (*missing, *term)
    if tuple(terms) == spec.inputs:
        return None
    wide = dataclasses.replace(spec, inputs=tuple(terms))
    return wide, mask_operands(ops, values, wide, index)
