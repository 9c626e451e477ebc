"""Plans as a few native torch calls, for plans without gathers, casts and copies.

Each step becomes a small function over views. Autograd then keeps exactly what the plan says, because `mm`, `bmm` and
`mul` save the operands that they are given. Under autograd a plan does not run as native calls in three cases:

- a step would copy an operand into another layout: autograd would keep the copy;
- a result would have other strides than the plan says;
- an operand is repeated along an axis in a product, and the plan sums its gradient in another way than torch does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.stock import evaluation
from planner.backends.common.stock_layout import stock_layout
from planner.backends.common.stock_rows import stock_kind
from planner.backends.torch.ops import OPS
from planner.backends.torch.strides import STRIDE_OPS, TRANSFORMED_STRIDE_OPS, Strided, StrideOps
from planner.cost.layout import layout_of
from planner.language.derive import transpose
from planner.language.spec import Spec
from planner.program.forms import product_form
from planner.program.ops import Cast, Op
from planner.program.program import Program
from planner.program.tree import Leaf, Tree, nodes_of

__all__ = ["NATIVE", "compile_native"]

# A function from operands to the result. It ignores its second argument, the index arrays: such a plan has none.
Run = Callable[..., Tensor]
# The implementation of each step of the backward program, by the step's spec; None if there is no backward program.
Lowerings = Mapping[Spec, str] | None
# Takes a step and the function that runs it, and returns another such function.
Around = Callable[[Op, Callable[..., Tensor]], Callable[..., Tensor]]

NATIVE = ("matmul", "multiply", "view", "sum", "broadcast", "diagonal", "multiply, sum")
# A function calls those of the steps before it, so there must not be too many for Python's stack.
MOST_STEPS = 200
# Steps made of several native calls, for which autograd would keep more than the step's operands: positions of the
# diagonal, or a sum inside of the step.
COMPOSED = ("diagonal", "multiply, sum")


def compile_native(
    tree: Tree,
    operands: Sequence[Strided],
    backward: Program | None,
    transformed: bool = False,
    around: Around = lambda op, step: step,
    index: Mapping[Any, Any] = MappingProxyType({}),
) -> Run | None:
    """Return a function from operands to the result, or None if the tree needs more than native calls.

    This runs no operator of torch. It tries the calls on stand-ins.

    Args:
        tree: the plan's tree.
        operands: stand-ins with the strides of the operands; they take gradients where operands do.
        backward: the plan's backward program; None if no gradient is asked for. Then steps may copy, since nothing is
            kept.
        transformed: whether the calls will run under a transform of `torch.func` or in forward mode.
        around: changes how a step runs.
        index: holds the sizes of the calls, if they are not the tree's, see `RangedIndices.sizes`.
    """
    if sum(1 for _ in nodes_of(tree)) > MOST_STEPS:
        return None
    chosen = None if backward is None else {step.op.spec: step.choice.lowering for step in backward.steps}
    table = TRANSFORMED_STRIDE_OPS if transformed else STRIDE_OPS
    compiled = _compile(tree, operands, chosen, table, around, index)
    return None if compiled is None else compiled[0]


def _compile(
    tree: Tree,
    operands: Sequence[Strided],
    chosen: Lowerings,
    stride_ops: StrideOps,
    around: Around,
    index: Mapping[Any, Any],
) -> tuple[Run, Strided] | None:
    """Return the function that computes a part of the tree, and the stand-in of its result; None if not native."""
    copies = chosen is None
    if isinstance(tree, Leaf):
        return operator.itemgetter(tree.operand), operands[tree.operand]
    if isinstance(tree.op, Cast) or stock_kind(tree.op) not in NATIVE:
        return None
    if not copies and stock_kind(tree.op) in COMPOSED:
        return None
    children = [_compile(child, operands, chosen, stride_ops, around, index) for child in tree.children]
    if any(child is None for child in children):
        return None
    parts = [child for child in children if child is not None]
    standins = [standin for _, standin in parts]
    if chosen is not None and not _sums_alike(tree.op, standins, chosen):
        return None
    result = evaluation(stride_ops, tree.op.spec)(standins, {}, False)
    if result.copied and not copies:
        return None
    planned = tree.op.with_layouts(layout_of(x.shape, x.strides) for x in standins)
    _, layout = stock_layout(planned)
    if not (layout is not None and layout.unknown) and layout != layout_of(result.shape, result.strides):
        return None
    direct = stock_kind(tree.op) == "matmul" and tree.op.dtype != "bool"  # torch multiplies no bool matrices
    step = around(tree.op, _matmul_step(tree.op) if direct else _stock_step(tree.op, index))
    if len(parts) == 1:
        (inner, _) = parts[0]
        return (lambda xs, _=None: step(inner(xs))), result
    (left, _), (right, _) = parts
    if all(isinstance(child, Leaf) for child in tree.children):
        i, j = (child.operand for child in tree.children if isinstance(child, Leaf))
        if (i, j, len(operands)) == (0, 1, 2):
            return (lambda xs, _=None: step(*xs)), result
        return (lambda xs, _=None: step(xs[i], xs[j])), result
    if tree.order == (1, 0):
        return (lambda xs, _=None: (lambda second: step(left(xs), second))(right(xs))), result
    return (lambda xs, _=None: step(left(xs), right(xs))), result


def _sums_alike(op: Op, standins: Sequence[Strided], chosen: Mapping[Spec, str]) -> bool:
    """Return whether the plan sums gradients of repeated operands as torch does: a whole product, then its sum."""
    if stock_kind(op) != "multiply":
        return True
    repeated = (any(op.spec.size(e) != 1 for e in op.spec.output if e not in term) for term in op.spec.inputs)
    return all(
        not (wide and x.requires_grad) or chosen.get(transpose(op.spec, number)) == "multiply, then sum"
        for number, (wide, x) in enumerate(zip(repeated, standins, strict=True))
    )


def _stock_step(op: Op, index: Mapping[Any, Any]) -> Callable[..., Tensor]:
    run = evaluation(OPS, op.spec)
    return lambda *inputs: run(inputs, index, False)


def _matmul_step(op: Op) -> Callable[..., Tensor]:
    spec, form = op.spec, product_form(op.spec)
    assert form is not None
    letters = [tuple(str(e) for e in term) for term in spec.inputs]
    out = tuple(str(e) for e in spec.output)
    if not form.batch and all(len(g) == 1 for g in (form.left, form.right, form.contracted)):
        # A product of two matrices: at most three transposes, and none for the result.
        if out == (form.right[0], form.left[0]):
            first, second = 1, 0
        else:
            first, second = 0, 1
        flip_a = letters[first][1] != form.contracted[0]
        flip_b = letters[second][0] != form.contracted[0]
        mm = torch.mm
        if (first, flip_a, flip_b) == (0, False, False):
            return mm
        if first == 0:
            return lambda a, b: mm(a.t() if flip_a else a, b.t() if flip_b else b)
        return lambda a, b: mm(b.t() if flip_a else b, a.t() if flip_b else a)
    return OPS.product(form, spec)
