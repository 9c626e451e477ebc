"""Parts of a tree as contractions of their own: a loop may go around one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from planner.cost.layout import row_major, strides_in
from planner.language.resolve import Resolved
from planner.language.spec import Operand, Spec, Term, plain_axes
from planner.program.contraction import Contraction
from planner.program.loops import Axes, resize_tree, slice_of
from planner.program.ops import Cast, Einsum
from planner.program.plan import Loop
from planner.program.tree import Leaf, Node, Tree, change_tree, nodes_of

# For how many sizes of large values parts are cut out.
MOST_SIZES = 2


def parts_to_cut(contraction: Contraction, tree: Tree) -> Iterator[tuple[TreePart, Axes, str]]:
    """Yield the parts of a tree that a loop may go around, the axes that it cuts already, and one more to cut.

    Values are large, for each of the largest sizes in turn, if they have that size or more. The parts are: the steps
    that make or read large values, for each axis that all of these values have; the steps that have an axis of the
    largest values, so that no step is repeated; and those in a loop, which then cuts one more axis.
    """
    nodes = list(nodes_of(tree))
    seen: set[tuple[int, ...]] = set()
    for least in sorted({_size(node) for node in nodes[1:]}, reverse=True)[:MOST_SIZES]:
        ends = [node for node in nodes if any(_size(child) >= least for child in node.children)]
        found = [large_part(contraction, tree, node, least) for node in ends if node is tree or _size(node) < least]
        pairs = [(part, axis) for part in found if part is not None for axis in part.large_axes]
        large = dict.fromkeys(
            axis for node in nodes[1:] if _size(node) >= least for axis in plain_axes(node.op.spec.output)
        )
        pairs += [(part, axis) for axis in large if (part := axis_part(contraction, tree, axis)) is not None]
        for part, axis in pairs:
            key = (id(part.root), hash(axis), *map(id, part.children))
            if key not in seen:
                seen.add(key)
                yield part, (), axis
    for node in nodes:
        if isinstance(node.op, Loop):
            part = loop_part(tree, node)
            yield from ((part, node.op.axes, axis) for axis in part.large_axes if axis not in dict(node.op.axes))


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


def loop_part(whole: Tree, root: Node) -> TreePart:
    """Return the part of a tree that a loop goes around, without the loop."""
    loop = root.op
    assert isinstance(loop, Loop)
    sizes = loop.spec.by_axis
    return TreePart(
        whole, root, slice_of(loop.body.contraction, sizes), resize_tree(loop.body.tree, sizes), root.children
    )


def large_part(contraction: Contraction, whole: Tree, root: Node, least: int) -> TreePart | None:
    """Take a node out of a tree, with the nodes below it that are connected to it by large values.

    Args:
        contraction: the contraction that the tree is of.
        whole: the tree.
        root: the node.
        least: how many elements a large value has at least.

    Returns:
        The part; None if it reads a whole pool.
    """
    return _cut_out(contraction, whole, root, lambda node: _size(node) >= least)


def axis_part(contraction: Contraction, whole: Tree, axis: str) -> TreePart | None:
    """Take the nodes that have an axis out of a tree; None if there are none, or if one of them reads a whole pool."""
    root = next((node for node in nodes_of(whole) if axis in node.op.spec.axes), None)
    return root if root is None else _cut_out(contraction, whole, root, lambda node: axis in node.op.spec.axes)


def _cut_out(contraction: Contraction, whole: Tree, root: Node, joins: Callable[[Node], bool]) -> TreePart | None:
    sizes, children, terms = contraction.resolved.spec.by_axis, list[Tree](), list[Term]()
    fits = True

    def visit(node: Node) -> Node:
        nonlocal fits
        spec = node.op.spec
        # A letter that the contraction lacks stands for the rows of a pool, or of two pools in two places.
        fits &= isinstance(node.op, Einsum | Cast | Loop) and set(spec.axes) <= sizes.keys()
        inner: list[Tree] = []
        for child, term in zip(node.children, spec.inputs, strict=True):
            if isinstance(child, Node) and joins(child):
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
    resolved = Resolved.of(spec)
    operands = zip(children, resolved.shapes, strict=True)
    part = dataclasses.replace(
        contraction,
        text=str(spec),
        resolved=resolved,
        index_shapes=resolved.index_shapes,
        operands=tuple(_operand(contraction, child, shape) for child, shape in operands),
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
