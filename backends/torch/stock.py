"""Runs a tree by torch's own operators, which torch can differentiate. It keeps nothing from one call to the next."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from planner.backends.common.stock import evaluate
from planner.backends.torch.ops import GUARD, OPS, cast
from planner.program.calls import RangedIndices
from planner.program.ops import Cast, Guard
from planner.program.tree import Tree, flatten


def run_stock(tree: Tree, operands: Sequence[Tensor], index: RangedIndices) -> Tensor:
    """Return the value of a tree with guards and without loops."""
    values: list[Tensor] = []
    for entry in flatten(tree):
        if isinstance(entry, int):
            values.append(operands[entry])
            continue
        op, count = entry[:2]
        inputs = values[-count:]
        del values[-count:]
        if isinstance(op, Guard):
            values += GUARD(op, inputs, index)
        elif isinstance(op, Cast):
            values.append(cast(inputs[0], op.dtype))
        else:
            values.append(evaluate(OPS, op.spec, inputs, index, index.may_drop))
    return values[0]
