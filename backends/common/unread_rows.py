"""Unread rows: rows of a gathered operand that no index names.

Example: in `b q[bsk] d`, row 7 of the pool is unread if no entry of `q` is 7. What it holds must not matter, not even
NaN. A plan that takes rows first never sees unread rows. A plan that contracts the whole pool and then takes does
multiply them, and 0 times NaN is NaN. This module says which steps do that, and zeroes unread rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from planner.backends.common.stock import ArrayOps, evaluate
from planner.language.derive import batched
from planner.language.spec import Gather, Spec, Term, indexed_dims, row_axes, term_gathers
from planner.program.implementations import RangedIndices
from planner.program.ops import Cast
from planner.program.tree import Leaf, Node, Tree

__all__ = ["WHOLE_POOL", "UnreadRows", "find_read_rows", "operands_with_unread_rows", "steps_with_unread_rows",
           "zero_unread_rows"]  # fmt: skip


# Name of the row of the table that contracts a whole pool, its unread rows included.
WHOLE_POOL = "whole pool, then take"


def operands_with_unread_rows(tree: Tree, spec: Spec) -> tuple[int, ...]:
    """Return the operands that a step contracts before the plan takes their rows.

    The products of unread rows are never taken. But the backward program multiplies unread rows by zero, and 0 times
    NaN is NaN.
    """
    numbers: set[int] = set()

    def visit(node: Tree) -> None:
        if not isinstance(node, Node):
            return
        for child, term in zip(node.children, node.op.spec.inputs, strict=True):
            if isinstance(child, Leaf) and set(term_gathers(spec.inputs[child.operand])) - set(term):
                numbers.add(child.operand)
            visit(child)

    visit(tree)
    return tuple(sorted(numbers))


@dataclasses.dataclass(frozen=True, slots=True)
class UnreadRows:
    """An operand that a step multiplies before the plan takes its rows: the step reads the unread rows too.

    Attributes:
        spec: a spec whose only input is the operand's whole term, brackets included.
        at_once: True if the very next step takes rows of this step's result. Then an unread row shows in gradients
            only.
    """

    spec: Spec
    at_once: bool

    def batched(self, size: int, operand: bool, arrays: Sequence[str]) -> UnreadRows:
        """Return it with a leading axis on the operand, if asked, and on some index arrays."""
        read_here = [name for name in arrays if name in self.spec.arrays]
        return dataclasses.replace(self, spec=batched(self.spec, size, [0] * operand, read_here))


def steps_with_unread_rows(tree: Tree, spec: Spec) -> list[tuple[Node, tuple[UnreadRows | None, ...]]]:
    """Return the steps of a tree, casts left out, each with the unread rows that it reads of its inputs.

    Args:
        tree: the plan's tree.
        spec: the resolved spec of the contraction.

    Returns:
        Steps in the order of the tree from its root, each with one entry for each of its inputs: None where the input
        is no operand, or is read without unread rows.
    """
    steps: list[tuple[Node, tuple[UnreadRows | None, ...]]] = []

    def visit(node: Tree, next_term: Term | None) -> None:
        if not isinstance(node, Node):
            return
        terms = node.op.spec.inputs
        if not isinstance(node.op, Cast):
            inputs = zip(node.children, terms, strict=True)
            steps.append((node, tuple(_unread_rows(node, child, term, next_term, spec) for child, term in inputs)))
        for child, term in zip(node.children, terms, strict=True):
            visit(child, term)

    visit(tree, None)
    return steps


def _unread_rows(node: Node, child: Tree, term: Term, next_term: Term | None, spec: Spec) -> UnreadRows | None:
    """Return the unread rows that a step reads of one input, or None.

    Args:
        node: the step.
        child: what the input is computed by, or the operand that it is.
        term: the input's term in the step.
        next_term: the term by which the next step reads this step's result; None for the last step.
        spec: the resolved spec of the contraction.
    """
    if isinstance(child, Node) and isinstance(child.op, Cast):
        (child,) = child.children
    if not isinstance(child, Leaf):
        return None
    whole_term = spec.inputs[child.operand]
    # A dimension that the contraction gathers, but that this step reads as an axis of all rows.
    row_axes = _axes_gathered_in(term, whole_term)
    if not row_axes:
        return None
    taken_next = () if next_term is None else _axes_gathered_in(node.op.spec.output, next_term)
    return UnreadRows(Spec((whole_term,), (), spec.sizes), set(taken_next).issuperset(row_axes))


def _axes_gathered_in(term: Term, other: Term) -> tuple[str, ...]:
    """Return the axes of a term in whose place another term of the same array has a gather."""
    pairs = zip(term, other, strict=True)
    return tuple(entry for entry, other_entry in pairs if isinstance(entry, str) and isinstance(other_entry, Gather))


def find_read_rows(ops: ArrayOps, x: Any, term: Term, spec: Spec, index: RangedIndices) -> Any:
    """Return a mask of the rows of a gathered operand that some index names; it broadcasts to the operand.

    The gradient of a take, for an output gradient of ones, counts how often each row is read.
    """
    rows, sizes, addressed = row_axes(term), dict(spec.sizes), tuple(term[d] for d in indexed_dims(term))
    ones = ops.zeros([sizes[axis] for axis in rows], x) + 1
    reads = evaluate(ops, Spec((rows,), addressed, spec.sizes), [ones], index, index.may_drop)
    shape = [spec.size(e) if e in addressed else 1 for e in term]
    return (reads != 0).reshape(shape)


def zero_unread_rows(ops: ArrayOps, x: Any, term: Term, spec: Spec, index: RangedIndices) -> Any:
    """Zero the rows of a gathered operand that no index names."""
    return ops.select(find_read_rows(ops, x, term, spec, index), x, 0)
