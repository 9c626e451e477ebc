"""Parts of a tree around its largest values, as contractions of their own: a loop may go around one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from planner.cost.layout import Layout, row_major, strides_in
from planner.language.resolve import Resolved
from planner.language.spec import Operand, Spec, Term, term_axes
from planner.program.build import given_variables
from planner.program.contraction import Contraction
from planner.program.ops import Cast, Einsum
from planner.program.tree import Leaf, Node, Tree

__all__ = ["CutOut", "cut_out", "large_values", "replace_node"]

# For how many sizes of large values a part is cut out.
MOST_PARTS = 2


def large_values(tree: Tree) -> Iterator[tuple[Node, int]]:
    """Yield, for some sizes, the node that reads the largest values of a tree of that size and more.

    The values between the largest one and the node are of that size too.
    """
    parents: list[tuple[int, Node, Node]] = []

    def visit(node: Node) -> None:
        for child in node.children:
            if isinstance(child, Node):
                parents.append((math.prod(child.op.spec.output_shape), child, node))
                visit(child)

    if isinstance(tree, Node):
        visit(tree)
    sizes = sorted({size for size, _, _ in parents}, reverse=True)
    for least in sizes[:MOST_PARTS]:
        _, _, root = max(parents, key=lambda entry: entry[0])
        while (above := [parent for size, node, parent in parents if node is root and size >= least]) != []:
            (root,) = above
        yield root, least


def replace_node(tree: Tree, old: Node, new: Node) -> Tree:
    """Return a tree with another node in place of one of its nodes."""
    if tree is old:
        return dataclasses.replace(new, kept=old.kept)
    if isinstance(tree, Leaf):
        return tree
    return dataclasses.replace(tree, children=tuple(replace_node(child, old, new) for child in tree.children))


@dataclasses.dataclass(frozen=True, slots=True)
class CutOut:
    """A part of a tree as a contraction of its own.

    Attributes:
        contraction: the contraction. Its operands that are computed are expected to be row-major.
        tree: its tree.
        children: the trees of its operands.
    """

    contraction: Contraction
    tree: Tree
    children: tuple[Tree, ...]

    @property
    def layouts(self) -> tuple[Layout | None, ...]:
        """The layouts of its operands."""
        return tuple(variable.layout for variable in given_variables(self.contraction))


def cut_out(contraction: Contraction, root: Node, least: int) -> CutOut | None:
    """Take a node out of a tree, with the nodes below it that are connected to it by large values.

    Args:
        contraction: the contraction that the tree is of.
        root: the node.
        least: how many elements a large value has at least.

    Returns:
        The part; None if it reads index arrays, or uses a letter for two axes.
    """
    children: list[Tree] = []
    terms: list[Term] = []
    sizes: dict[str, int] = {}
    hidden: list[tuple[int, set[str]]] = []
    fits = True

    def axes_of(some: Sequence[Term]) -> set[str]:
        return {axis for term in some for axis in term_axes(term)}

    def visit(node: Node) -> Node:
        nonlocal fits
        spec = node.op.spec
        fits &= isinstance(node.op, Einsum | Cast) and not spec.gathers
        inner: list[Tree] = []
        for child, term in zip(node.children, spec.inputs, strict=True):
            if isinstance(child, Node) and math.prod(child.op.spec.output_shape) >= least:
                first = len(terms)
                inner.append(visit(child))
                # The axes that the child sums must be its own.
                summed = axes_of(terms[first:]) - axes_of([term])
                fits &= child.op.spec.output == term and not summed & axes_of([*terms[:first], *spec.terms])
                hidden.append((len(terms), summed))
            else:
                inner.append(Leaf(len(children)))
                children.append(child)
                terms.append(term)
        for axis in axes_of(spec.terms):
            fits &= sizes.setdefault(axis, spec.size(axis)) == spec.size(axis)
        return dataclasses.replace(node, children=tuple(inner))

    tree = visit(root)
    fits &= not any(summed & axes_of(terms[last:]) for last, summed in hidden)
    if not fits:
        return None
    spec = Spec(tuple(terms), root.op.spec.output, tuple(sorted(sizes.items())))
    operands = tuple(
        _value_of(contraction, child, spec.shape(term)) for child, term in zip(children, terms, strict=True)
    )
    shapes = tuple(operand.shape for operand in operands)
    part = dataclasses.replace(
        contraction,
        text=str(spec),
        resolved=Resolved(spec, shapes, ()),
        index_shapes=(),
        operands=operands,
        dtype=root.op.dtype,
        gradient_strides=row_major(spec.output_shape),
    )
    return CutOut(part, tree, tuple(children))


def _value_of(contraction: Contraction, tree: Tree, shape: tuple[int, ...]) -> Operand:
    """Return a value of a tree as the operand of another contraction."""
    if isinstance(tree, Leaf):
        whole = contraction.operands[tree.operand]
        return Operand(shape, whole.dtype, strides_in(whole, shape), whole.requires_grad)
    below = [
        _value_of(contraction, child, child_shape)
        for child, child_shape in zip(tree.children, tree.op.input_shapes, strict=True)
    ]
    return Operand(shape, tree.op.dtype, None, any(operand.requires_grad for operand in below))
