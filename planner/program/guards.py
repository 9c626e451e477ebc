"""Guards of a tree: where values that must not count are set to zero, because 0 times NaN is NaN.

There are two kinds of such values. A *dropped* index means "no row", so nothing that stands at its place may count.
An *unread* row is a row of a gathered operand that no index names. A plan that takes rows first never sees unread rows,
but a plan that contracts the whole operand and then takes rows does multiply them. Example: in `b q[bsk] d`, row 7 of
the pool is unread if no entry of `q` is 7.

A guard stands where a step first computes with an operand, above views and casts of it, and at the result.

Guards act if an index is bad, or if an operand holds NaN or infinity. The bytes that are allocated then are part of a
plan's peaks, so that memory limits hold for all values: the functions that end in `_bytes` say how many
they are. Where a compiler makes a program as a whole, its peak is found otherwise, and these are not counted.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from planner.language.dtypes import is_inexact, itemsize
from planner.language.options import MODES
from planner.language.spec import (
    Gather,
    Spec,
    Term,
    axis_of,
    gather_of,
    plain_axes,
    row_axes,
    term_axes,
    term_gathers,
    unused_letters,
)
from planner.program.ops import Cast, Einsum, Guard, Op
from planner.program.plan import Loop
from planner.program.tree import Leaf, Node, Tree, change_tree, nodes_of

# Bytes of the single numbers that a step allocates: zeros to put in, sums to look at.
_NUMBERS = 64


def add_guards(tree: Tree, spec: Spec, index_mode: str, gradients: bool) -> Tree:
    """Return a contraction's tree with its guards as nodes.

    Args:
        tree: the tree, without guards.
        spec: the resolved spec of the contraction.
        index_mode: the index mode, which says whether indices can be dropped.
        gradients: whether some operand may take a gradient.
    """
    if isinstance(tree, Leaf) or not spec.gathers:
        return tree

    def guard(value: Tree, node: Node, term: Term, whole: Term, rows: Term | None = None, later: bool = False) -> Tree:
        """Return a value that a node reads or computes with its guard, if it needs one.

        Args:
            value: the value.
            node: the node.
            term: the value's term in the node.
            whole: its term with the brackets of the contraction.
            rows: see `Guard.rows`.
            later: whether unread rows show in gradients only.
        """
        dropped = dropped_brackets(whole, spec) if MODES[index_mode].bad == "drop" else ()
        if isinstance(node.op, Loop):  # the index arrays are cut with the slices, whose own guards zero their entries
            dropped = tuple(gather for gather in dropped if gather not in node.op.spec.gathers)
        if not is_inexact(node.op.dtype) or (not dropped and rows is None):
            return value
        identity = _identity(term, {**spec.by_axis, **node.op.spec.by_axis})
        return Node(Guard(identity, node.op.dtype, (), dropped, rows, later and not dropped), (value,), kept=False)

    # How the step that reads a node's value names its axes.
    next_terms: dict[int, Term] = {}
    parents: dict[int, Node] = {}
    for node in nodes_of(tree):
        next_terms.update(zip(map(id, node.children), node.op.spec.inputs, strict=True))
        parents.update(dict.fromkeys(map(id, node.children), node))

    def are_taken(node: Node, axes: set[str]) -> bool:
        """Return whether rows at some axes of a node's operand do not show in the result, because they are taken later.

        Each step until then keeps the axes, and so unread rows apart. With gradients the next step must take them: the
        gradient of a product would read unread rows of its operands.
        """
        while axes <= set(plain_axes(node.op.spec.output)) and id(node) in next_terms:
            term, output = next_terms[id(node)], node.op.spec.output
            left = axes - _axes_gathered_in(output, term)
            node = parents[id(node)]
            if not left or gradients or isinstance(node.op, Loop):
                return not left
            axes = {axis for entry, axis in zip(output, map(axis_of, term), strict=True) if entry in left and axis}
        return False

    def visit(node: Node, guarded: tuple[Tree, ...]) -> Tree:
        children = []
        for child, changed, term in zip(node.children, guarded, node.op.spec.inputs, strict=True):
            whole = None if _only_moves(node) else _operand_term(child, spec)
            if whole is None:
                children.append(changed)
                continue
            unread = _axes_gathered_in(term, whole)
            children.append(guard(child, node, term, whole, whole if unread else None, are_taken(node, unread)))
        return dataclasses.replace(node, children=tuple(children))

    return guard(change_tree(tree, visit), tree, tree.op.spec.output, spec.output)


def _identity(term: Term, sizes: dict[str, int]) -> Spec:
    """Return the identity on arrays of a term's shape. Dimensions that are gathered or repeat get letters of their own.

    The spec has all sizes given, because guards need those of the axes in brackets.
    """
    letters, given = iter(unused_letters(sizes, len(term))), Spec((), (), tuple(sizes.items()))
    axes: list[str] = []
    for entry in term:
        axis = axis_of(entry)
        if axis is None or axis in axes:
            axis = next(letters)
            sizes[axis] = given.size(entry)
        axes.append(axis)
    return Spec((tuple(axes),), tuple(axes), tuple(sorted(sizes.items())))


def _only_moves(tree: Tree) -> bool:
    """Return whether a tree's last step only views, reorders or casts its input: NaN stays where it is."""
    if isinstance(tree, Leaf):
        return False
    if isinstance(tree.op, Cast):
        return True
    (term, *others), output = tree.op.spec.inputs, tree.op.spec.output
    is_unary = isinstance(tree.op, Einsum) and not others and not tree.op.spec.gathers
    return is_unary and set(output) == set(term) and len(output) == len(set(output))


def _operand_term(tree: Tree, spec: Spec) -> Term | None:
    """Return the term of a value that is an operand, or moved from one, with its brackets; None for other values."""
    if isinstance(tree, Leaf):
        return spec.inputs[tree.operand]
    if not _only_moves(tree):
        return None
    whole = _operand_term(tree.children[0], spec)
    term = tree.op.spec.inputs[0]
    return whole and tuple(whole[term.index(entry)] for entry in tree.op.spec.output)


def _axes_gathered_in(term: Term, other: Term) -> set[str]:
    """Return the axes of a term in whose place another term of the same array has a gather."""
    pairs = zip(term, other, strict=True)
    return {axis for entry, other_entry in pairs if (axis := axis_of(entry)) and gather_of(other_entry)}


def dropped_brackets(term: Term, spec: Spec) -> tuple[Gather, ...]:
    """Return the brackets of a spec all of whose axes a term has: each entry is at the place of one index.

    An operand that is read through the bracket itself is left out: to take a dropped row gives zeros. So is a term with
    repeated axes.
    """
    plain = plain_axes(term)
    if len(set(plain)) < len(plain):
        return ()
    return tuple(g for g in spec.gathers if g.axes and set(g.axes) <= set(plain) and g not in term)


def masks(step: Any) -> bool:
    """Whether a step or a node of a tree is a guard of unread rows."""
    return isinstance(step.op, Guard) and step.op.rows is not None


def index_bytes(spec: Spec) -> int:
    """Return the bytes of all index arrays in range: an array of other integers, or with negative ones, is copied."""
    return sum(8 * math.prod(spec.shape(gather.axes)) for gather in spec.gathers)


def guard_bytes(op: Guard) -> int:
    """Return the most bytes that a guard allocates besides the array that it returns."""
    spec, size = op.spec, itemsize(op.dtype)
    masks = _NUMBERS + 2 * max((_rows(spec, gather.axes) for gather in op.dropped), default=0)
    between = op.result_bytes() if len(op.dropped) + (op.rows is not None) > 1 else 0
    if op.rows is None:
        return masks + between
    # The gradient of a take counts how often each row is read: a segment sum of ones.
    counts = Spec((row_axes(op.rows),), tuple(e for e in op.rows if gather_of(e) or e in row_axes(op.rows)), spec.sizes)
    ones, read = _rows(spec, row_axes(op.rows)), math.prod(counts.output_shape)
    return masks + between + (3 * size + 32) * ones + (size + 9) * read + dropping_bytes(Op(counts, op.dtype))


def dropping_bytes(op: Op) -> int:
    """Return the most bytes that stock operators allocate more for a step if indices are dropped.

    Rows that are taken or added are copied to be zeroed, and index arrays are copied to hold only rows that exist.
    """
    spec, size, total = op.spec, itemsize(op.dtype), 0
    for term in spec.terms:
        if gathers := term_gathers(term):
            total += size * _rows(spec, term_axes(term)) + 2 * _rows(spec, row_axes(term))
            total += sum(9 * _rows(spec, gather.axes) for gather in gathers) + _NUMBERS
    return total


def is_marked(spec: Spec) -> bool:
    """Whether results can depend on a bad index, which "nan" marks: an operand is read through an index array."""
    return any(term_gathers(term) for term in spec.inputs) and 0 not in spec.by_axis.values()


def mark_bytes(spec: Spec, dtype: str) -> int:
    """Return the most bytes that are allocated besides the result to mark it under "nan", see `planner.run`."""
    size, result = itemsize(dtype), math.prod(spec.output_shape)
    rows = max((_rows(spec, gather.axes) for gather in spec.gathers), default=0)
    return (5 * size + 16) * result + (7 * size + 60) * rows


def _rows(spec: Spec, axes: Term) -> int:
    return math.prod(spec.shape(tuple(dict.fromkeys(axes))))
