"""The contraction tree: its steps, what each reads, and which values are kept for the backward program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from planner.program.ops import Op

__all__ = ["Leaf", "Node", "Tree", "keep_values", "kept_nodes", "path_of", "read_by_gradients"]


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An operand, by its number."""

    operand: int


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A step of the contraction tree.

    Attributes:
        op: what the step computes.
        children: the trees whose values it reads.
        order: the order in which the forward program evaluates the children.
        backward_order: the order in which the backward program descends into the children.
        kept: if the backward program needs the step's value: True to keep it, False to compute it again.
    """

    op: Op
    children: tuple[Tree, ...]
    order: tuple[int, ...] = (0, 1)
    backward_order: tuple[int, ...] = (0, 1)
    kept: bool = True


Tree = Leaf | Node


def keep_values(tree: Tree, kept: bool) -> Tree:
    """Return the tree with all of its values kept, or with none kept."""
    if isinstance(tree, Leaf):
        return tree
    return dataclasses.replace(tree, children=tuple(keep_values(child, kept) for child in tree.children), kept=kept)


def read_by_gradients(needs: Sequence[bool]) -> tuple[bool, ...]:
    """Return, for each child, whether a gradient step reads its value: if a sibling needs a gradient."""
    return tuple(any(needs[:i]) or any(needs[i + 1 :]) for i in range(len(needs)))


def kept_nodes(tree: Tree, requires: Sequence[bool]) -> tuple[Node, ...]:
    """Return the nodes below a tree whose values the forward program keeps for the backward program.

    The backward program needs the values that gradient steps read, and the values that recomputed ones are made from.

    Args:
        tree: the contraction tree.
        requires: which operands need a gradient.
    """
    kept: list[Node] = []
    needs: dict[int, bool] = {}

    def needs_gradient(tree: Tree) -> bool:
        if isinstance(tree, Leaf):
            return requires[tree.operand]
        if id(tree) not in needs:
            needs[id(tree)] = any(needs_gradient(child) for child in tree.children)
        return needs[id(tree)]

    def visit(node: Node, recomputed: bool) -> None:
        needed_by = [needs_gradient(child) for child in node.children]
        reads = (any(needed_by),) * len(needed_by) if node.op.gradient_reads_all else read_by_gradients(needed_by)
        for child, read in zip(node.children, reads, strict=True):
            if isinstance(child, Node):
                needed = read or recomputed
                if needed and child.kept:
                    kept.append(child)
                visit(child, needed and not child.kept)

    if isinstance(tree, Node):
        visit(tree, False)
    return tuple(kept)


def path_of(tree: Tree, operands: int) -> tuple[tuple[int, ...], ...]:
    """Return a tree's path over the operands in opt_einsum's form, without the steps on one operand."""
    steps: list[tuple[int, ...]] = []
    positions: list[object] = list(range(operands))

    def visit(node: Tree) -> object:
        if isinstance(node, Leaf):
            return node.operand
        names = [visit(child) for child in node.children]
        if len(names) == 1:
            return names[0]
        places = sorted(positions.index(name) for name in names)
        for place in reversed(places):
            del positions[place]
        result = object()
        positions.append(result)
        steps.append(tuple(places))
        return result

    visit(tree)
    return tuple(steps) or ((0,),)
