"""Parts of a tree around its largest values, as contractions of their own: a loop may go around one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from planner.cost.layout import Layout, layout_of, row_major, strides_in
from planner.language.resolve import Resolved
from planner.language.spec import Operand, Spec, Term
from planner.program.build import given_variables
from planner.program.contraction import Contraction
from planner.program.ops import Cast, Einsum
from planner.program.tree import Leaf, Node, Tree, change_tree, nodes_of

__all__ = ["TreePart", "cut_out", "large_values", "whole_part"]

# For how many sizes of large values parts are cut out.
MOST_SIZES = 2


def large_values(tree: Tree) -> Iterator[tuple[Node, int]]:
    """Yield each node that reads a large value but makes a small one: a part of the tree may end there.

    Values are large, for each of the largest sizes in turn, if they have that size or more. The size comes with the
    node, in elements.
    """
    nodes = list(nodes_of(tree))
    for least in sorted({_size(node) for node in nodes[1:]}, reverse=True)[:MOST_SIZES]:
        for node in nodes:
            reads = any(_size(child) >= least for child in node.children)
            if reads and (node is tree or _size(node) < least):
                yield node, least


def _size(tree: Tree) -> int:
    """Return the number of elements that a node computes; 0 for an operand."""
    return 0 if isinstance(tree, Leaf) else math.prod(tree.op.spec.output_shape)


@dataclasses.dataclass(frozen=True, slots=True)
class TreePart:
    """A part of a tree as a contraction of its own.

    Attributes:
        whole: the tree.
        root: the node of the tree at which the part ends.
        contraction: what the part computes. Its operands that are computed are expected to be row-major.
        tree: its tree.
        children: the trees of its operands.
    """

    whole: Tree
    root: Tree
    contraction: Contraction
    tree: Tree
    children: tuple[Tree, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tree."""
        return self.root is self.whole and all(isinstance(child, Leaf) for child in self.children)

    @property
    def large_axes(self) -> list[str]:
        """The axes that all of the large values in it have."""
        _, *inner = nodes_of(self.tree)
        axes = self.contraction.resolved.spec.by_axis
        return [axis for axis in axes if all(axis in node.op.spec.output for node in inner)]

    @property
    def layouts(self) -> tuple[Layout | None, ...]:
        """The layouts of the output gradient and of the operands."""
        gradient = layout_of(self.contraction.resolved.spec.output_shape, self.contraction.gradient_strides)
        return gradient, *(variable.layout for variable in given_variables(self.contraction))

    def replaced(self, node: Node) -> Tree:
        """Return the whole tree with a node in place of the part."""

        def change(old: Node, children: tuple[Tree, ...]) -> Tree:
            if old is self.root:
                return dataclasses.replace(node, kept=old.kept)
            return dataclasses.replace(old, children=children)

        return change_tree(self.whole, change, lambda leaf: node if leaf is self.root else leaf)


def whole_part(contraction: Contraction, tree: Tree) -> TreePart:
    """Return all of a contraction's tree as a part."""
    return TreePart(tree, tree, contraction, tree, tuple(map(Leaf, range(len(contraction.operands)))))


def cut_out(contraction: Contraction, whole: Tree, root: Node, least: int) -> TreePart | None:
    """Take a node out of a tree, with the nodes below it that are connected to it by large values.

    Args:
        contraction: the contraction that the tree is of.
        whole: the tree.
        root: the node.
        least: how many elements a large value has at least.

    Returns:
        The part; None if it reads index arrays, or a whole pool.
    """
    sizes, children, terms = contraction.resolved.spec.by_axis, list[Tree](), list[Term]()
    fits = True

    def visit(node: Node) -> Node:
        nonlocal fits
        spec = node.op.spec
        # A letter that the contraction lacks stands for the rows of a pool, or of two pools in two places.
        fits &= isinstance(node.op, Einsum | Cast) and not spec.gathers and set(spec.axes) <= sizes.keys()
        inner: list[Tree] = []
        for child, term in zip(node.children, spec.inputs, strict=True):
            if isinstance(child, Node) and _size(child) >= least:
                fits &= child.op.spec.output == term
                inner.append(visit(child))
            else:
                inner.append(Leaf(len(children)))
                children.append(child)
                terms.append(term)
        return dataclasses.replace(node, children=tuple(inner))

    tree = visit(root)
    if not fits:
        return None
    spec = Spec(tuple(terms), root.op.spec.output)
    spec = dataclasses.replace(spec, sizes=tuple((axis, sizes[axis]) for axis in sorted(spec.axes)))
    shapes = tuple(map(spec.shape, terms))
    part = dataclasses.replace(
        contraction,
        text=str(spec),
        resolved=Resolved(spec, shapes, ()),
        index_shapes=(),
        operands=tuple(_operand(contraction, child, shape) for child, shape in zip(children, shapes, strict=True)),
        dtype=root.op.dtype,
        gradient_strides=row_major(spec.output_shape),
    )
    return TreePart(whole, root, part, tree, tuple(children))


def _operand(contraction: Contraction, tree: Tree, shape: tuple[int, ...]) -> Operand:
    """Return a value of a tree as the operand of another contraction."""
    if isinstance(tree, Leaf):
        operand = contraction.operands[tree.operand]
        return Operand(shape, operand.dtype, strides_in(operand, shape), operand.requires_grad)
    below = (child for node in nodes_of(tree) for child in node.children if isinstance(child, Leaf))
    return Operand(shape, tree.op.dtype, None, any(contraction.requires_grad[leaf.operand] for leaf in below))
