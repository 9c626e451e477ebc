"""Casts of operands run before the rest of a plan, as torch's own operators.

A plan that casts operands is split: torch casts them, and the rest is a plan for operands that are cast already. So
autograd keeps the cast copy of an operand if a gradient reads it, and never the operand too. Derivatives of any order
go through torch's cast. If the plan first takes rows of an operand, or sums axes of it, that is a contraction of its
own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from planner.backends.torch.ops import cast
from planner.cost.layout import dense_strides, layout_of
from planner.cost.objective import step_key
from planner.language.options import MODES
from planner.language.spec import Operand, Spec
from planner.program.build import Lowerer, build, given_variables
from planner.program.callbacks import callbacks
from planner.program.calls import RunPlan
from planner.program.implementations import Table
from planner.program.ops import Cast
from planner.program.plan import PlanRecord
from planner.program.tree import Leaf, Node, Tree, change_tree


class Casts:
    """The casts of operands in a plan that come before all else.

    A cast stays in the plan in these cases: the backward program casts again, because nothing is kept; the elements of
    the operand repeat; rows are taken first, and some may be dropped; no gradient reads what is cast, which a Function
    would save all the same, as it saves operands. Under a memory limit all casts stay, because the plan says when each
    is done.

    Args:
        plan: the plan.
        table: the backend's implementations.
        saved: whether what is cast will be saved as an operand even if no gradient reads it.

    Attributes:
        dtypes: the dtype that an operand is cast to, by its number.
        before: the spec of what is done to an operand before it is cast, by its number.
        rest: the plan of the rest.
    """

    def __init__(self, plan: PlanRecord, table: Table, saved: bool = False) -> None:
        self.unread = unread_casts(plan) if saved else frozenset()
        self.dtypes: dict[int, str] = {}
        self.before: dict[int, Spec] = {}
        self.plan = self.rest = plan
        if plan.options.memory_limit is None:
            tree = change_tree(plan.tree, self._change)
            if self.dtypes:
                self.rest = self._rest(tree, table)
        self.arrays = dict(self.rest.resolved.index_shapes)

    def __call__(
        self, operands: Sequence[Tensor], indices: Mapping[str, Any]
    ) -> tuple[list[Tensor], Mapping[str, Any]]:
        """Return the operands and the index arrays of the rest."""
        done = list(operands)
        for number, dtype in self.dtypes.items():
            x = operands[number]
            done[number] = cast(self._take(number, x, indices) if number in self.before else x, dtype)
        return done, {name: indices[name] for name in self.arrays} if self.before else indices

    def _take(self, number: int, x: Tensor, indices: Mapping[str, Any]) -> Tensor:
        """Return what an operand is before its cast."""
        spec, resolved, plan = self.before[number], self.plan.resolved, self.plan
        shapes = dict(resolved.index_shapes)
        taken: Tensor = callbacks().contract(
            spec,
            x.reshape(resolved.shapes[number]),
            minimize=plan.options.objective,
            index_mode=plan.index_mode,
            dtype=plan.operands[number].dtype,
            **{name: indices[name].reshape(shapes[name]) for name in spec.arrays},
        )
        return taken

    def _change(self, node: Node, children: tuple[Tree, ...]) -> Tree:
        node = dataclasses.replace(node, children=children)
        child = children[0]
        if not isinstance(node.op, Cast) or not node.kept:
            return node
        if isinstance(child, Leaf):
            operand = self.plan.operands[child.operand]
            if child.operand in self.unread:
                return node
            layout = layout_of(operand.shape, operand.strides)
            if layout is not None and layout.repeated:
                return node
            self.dtypes[child.operand] = node.op.dtype
            return child
        (below,), spec = child.children, child.op.spec
        if not isinstance(below, Leaf) or below.operand in self.unread or MODES[self.plan.index_mode].bad == "drop":
            return node
        if not set(spec.output) <= self.plan.resolved.spec.by_axis.keys():  # a segment sum, onto rows of a pool
            return node
        self.dtypes[below.operand], self.before[below.operand] = node.op.dtype, spec
        return below

    def _rest(self, tree: Tree, table: Table) -> PlanRecord:
        plan = self.plan
        spec, shapes = plan.resolved.spec, list(plan.resolved.shapes)
        operands, terms = list(plan.operands), list(spec.inputs)
        for number, dtype in self.dtypes.items():
            operand = operands[number]
            if number in self.before:
                terms[number] = self.before[number].output
                shapes[number] = self.before[number].output_shape
                operands[number] = Operand(shapes[number], dtype, None, operand.requires_grad)
            else:
                strides = dense_strides(layout_of(operand.shape, operand.strides), operand.shape)
                operands[number] = dataclasses.replace(operand, dtype=dtype, strides=strides)
        spec = dataclasses.replace(spec, inputs=tuple(terms))
        spec = dataclasses.replace(spec, sizes=tuple((axis, n) for axis, n in spec.sizes if axis in spec.axes))
        contraction = dataclasses.replace(
            plan.contraction,
            text=plan.text if not self.before else str(spec),
            resolved=dataclasses.replace(
                plan.resolved,
                spec=spec,
                shapes=tuple(shapes),
                index_shapes=tuple((n, s) for n, s in plan.resolved.index_shapes if n in spec.arrays),
            ),
            index_shapes=tuple((n, s) for n, s in plan.index_shapes if n in spec.arrays),
            operands=tuple(operands),
        )
        chosen = {step.op: step.choice for step in plan.steps}
        lower = Lowerer(lambda op: table.choices(op, plan.device), step_key(plan.options.objective), chosen)
        programs = build(tree, contraction, given_variables(contraction), lower)
        return PlanRecord.of_contraction(contraction, tree=tree, programs=programs, proven=False, origin=plan.origin)


def after_casts(casts: Casts, run: RunPlan, otherwise: RunPlan | None = None) -> RunPlan:
    """Return a runner that casts some operands first.

    Args:
        casts: the casts.
        run: what runs the rest.
        otherwise: what runs a call, casts included, for which `run` returns None.
    """
    if not casts.dtypes:
        return run
    if otherwise is None:
        return lambda operands, indices: run(*casts(operands, indices))
    other = otherwise

    def run_either(operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Any:
        result = run(*casts(operands, indices))
        return other(operands, indices) if result is None else result

    return run_either


def unread_casts(plan: PlanRecord) -> frozenset[int]:
    """Return the numbers of operands whose cast no gradient reads."""
    programs, origin = plan.programs, {number: number for number in range(len(plan.operands))}
    read, unread = {programs.variables[v].base for v in programs.kept}, set()
    for step in programs.forward.steps:
        if len(step.inputs) == 1 and step.inputs[0] in origin:
            number, (made,) = origin[step.inputs[0]], step.outputs
            origin[made] = number
            if isinstance(step.op, Cast) and made not in read:
                unread.add(number)
    return frozenset(unread)
