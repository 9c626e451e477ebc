"""The contraction tree: its steps, what each reads, and which values are kept for the backward program."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from planner.language.spec import Spec, Term, plain_axes, term_axes, term_gathers
from planner.program.ops import Einsum, Op


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An operand, by its number."""

    operand: int


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A step of the contraction tree.

    A tree may be thousands of steps deep, so nothing here recurs: neither comparing nor hashing nor pickling.

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        return self is other or flatten(self) == flatten(other)

    def __hash__(self) -> int:
        return hash(flatten(self))

    def __reduce__(self) -> tuple[Callable[..., Tree], tuple[Any, ...]]:
        return unflatten, (flatten(self),)


Tree = Leaf | Node
# A step as `flatten` gives it: its op, the number of its children, and its other attributes.
FlatNode = tuple[Op, int, tuple[int, ...], tuple[int, ...], bool]


def nodes_of(tree: Tree) -> Iterator[Node]:
    """Yield the steps of a tree, each before those that it reads, and all of the first child before the second."""
    stack = [tree]
    while stack:
        top = stack.pop()
        if isinstance(top, Node):
            yield top
            stack += reversed(top.children)


def flatten(tree: Tree) -> tuple[int | FlatNode, ...]:
    """Return a tree as one tuple: operands by number and steps, each after all that it reads."""
    flat: list[int | FlatNode] = []
    stack = [tree]
    while stack:
        top = stack.pop()
        if isinstance(top, Leaf):
            flat.append(top.operand)
        else:
            flat.append((top.op, len(top.children), top.order, top.backward_order, top.kept))
            stack += top.children
    return tuple(reversed(flat))


def unflatten(nodes: Sequence[int | FlatNode]) -> Tree:
    """Return the tree that `flatten` turned into a tuple."""
    done: list[Tree] = []
    for entry in nodes:
        if isinstance(entry, int):
            done.append(Leaf(entry))
            continue
        op, count, order, backward_order, kept = entry
        first = len(done) - count
        if first < 0:
            raise ValueError("a step of a tree lacks children")
        done[first:] = [Node(op, tuple(done[first:]), order, backward_order, kept)]
    (tree,) = done
    return tree


def tree_depth(tree: Tree) -> int:
    """Return the number of steps from the root of a tree down to its deepest operand."""
    depths: list[int] = []
    for entry in flatten(tree):
        if isinstance(entry, int):
            depths.append(0)
        else:
            first = len(depths) - entry[1]
            depths[first:] = [1 + max(depths[first:], default=0)]
    return depths[0]


def change_tree(
    tree: Tree, change: Callable[[Node, tuple[Tree, ...]], Tree], leaf: Callable[[Leaf], Tree] = lambda leaf: leaf
) -> Tree:
    """Return a tree made anew from its operands upwards.

    Args:
        tree: the tree.
        change: returns what takes a node's place; it is given the node and its changed children.
        leaf: returns what takes an operand's place.
    """
    done: list[Tree] = []
    stack: list[tuple[Tree, bool]] = [(tree, False)]
    while stack:
        top, visited = stack.pop()
        if isinstance(top, Leaf):
            done.append(leaf(top))
        elif visited:
            first = len(done) - len(top.children)
            done[first:] = [change(top, tuple(done[first:]))]
        else:
            stack.append((top, True))
            stack += [(child, False) for child in reversed(top.children)]
    (changed,) = done
    return changed


def change_ops(tree: Tree, change: Callable[[Op], Op]) -> Tree:
    """Return a tree of the same shape with other ops."""
    return change_tree(tree, lambda node, children: dataclasses.replace(node, op=change(node.op), children=children))


def keep_nothing(tree: Tree) -> Tree:
    """Return the tree with none of its values kept for the gradient."""
    return change_tree(tree, lambda node, children: dataclasses.replace(node, children=children, kept=False))


def read_by_gradients(needs: Sequence[bool]) -> tuple[bool, ...]:
    """Return, for each child, whether a gradient step reads its value: if a sibling needs a gradient."""
    return tuple(any(needs[:i]) or any(needs[i + 1 :]) for i in range(len(needs)))


def find_needs(tree: Tree, requires: Sequence[bool]) -> dict[int, bool]:
    """Return, by the id of each node, whether the gradient of its value is needed.

    Args:
        tree: the tree.
        requires: which operands need a gradient.
    """
    needs: dict[int, bool] = {}
    for node in reversed(list(nodes_of(tree))):
        needs[id(node)] = any(
            requires[child.operand] if isinstance(child, Leaf) else needs[id(child)] for child in node.children
        )
    return needs


def kept_nodes(tree: Tree, requires: Sequence[bool]) -> tuple[Node, ...]:
    """Return the nodes below a tree whose values the forward program keeps for the backward program.

    The backward program needs the values that gradient steps read, and the values that recomputed ones are made from.

    Args:
        tree: the contraction tree.
        requires: which operands need a gradient.
    """
    kept: list[Node] = []
    needs = find_needs(tree, requires)
    stack = [(tree, False, False)]  # each with whether its value is needed, and whether it is recomputed
    while stack:
        node, needed, recomputed = stack.pop()
        if isinstance(node, Leaf):
            continue
        if needed and node.kept:
            kept.append(node)
        needed_by = [requires[c.operand] if isinstance(c, Leaf) else needs[id(c)] for c in node.children]
        reads = (any(needed_by),) * len(needed_by) if node.op.gradient_reads_all else read_by_gradients(needed_by)
        for child, read in zip(reversed(node.children), reversed(reads), strict=True):
            needed = read or recomputed
            again = needed and isinstance(child, Node) and not child.kept
            stack.append((child, needed, again))
    return tuple(kept)


def path_of(tree: Tree, operands: int) -> tuple[tuple[int, ...], ...]:
    """Return a tree's path over the operands in opt_einsum's form, without the steps on one operand."""
    steps: list[tuple[int, ...]] = []
    left = list(range(operands))  # the numbers of the values that are left, in ascending order
    done: list[int] = []
    for entry in flatten(tree):
        if isinstance(entry, int):
            done.append(entry)
            continue
        count = entry[1]
        if count == 1:
            continue
        places = sorted(bisect.bisect_left(left, number) for number in done[-count:])
        del done[-count:]
        for place in reversed(places):
            del left[place]
        done.append(operands + len(steps))
        left.append(done[-1])
        steps.append(tuple(places))
    return tuple(steps) or ((0,),)


def merge_takes(tree: Tree) -> Tree:
    """Return a tree in which each step takes the rows that it reads: one step in place of a take and its reader."""

    def change(node: Node, children: tuple[Tree, ...]) -> Tree:
        spec = node.op.spec
        terms, sizes, values = list(spec.inputs), dict(spec.sizes), list(children)
        for place, child in enumerate(children):
            if isinstance(node.op, Einsum) and isinstance(child, Node) and _only_takes(child.op, terms[place]):
                (terms[place],), (values[place],) = child.op.spec.inputs, child.children
                sizes |= child.op.spec.by_axis
        merged = Spec(tuple(terms), spec.output, tuple(sorted(sizes.items())))
        return dataclasses.replace(node, op=dataclasses.replace(node.op, spec=merged), children=tuple(values))

    return change_tree(tree, change)


def _only_takes(op: Op, term: Term) -> bool:
    """Return whether an op takes rows, sums nothing, and returns an array of this term."""
    (source, *others), output = op.spec.inputs, op.spec.output
    takes = isinstance(op, Einsum) and not others and bool(term_gathers(source)) and output == term
    return takes and not term_gathers(output) and sorted(term_axes(source)) == sorted(plain_axes(output))
