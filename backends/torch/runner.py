"""The function that runs a plan: a few native calls, stock operators, or the plan's own programs under autograd.

What is kept is the plan's decision. Where native operators keep just that, the plan runs as native calls (see
`torch_native`), elsewhere as one `autograd.Function` (see `torch_function`), whose programs are operators of torch's
library where tensors have no data (see `torch_operators`). In forward mode the plan is run with out-of-place stock
operators, which torch differentiates itself. Autocast changes no dtype: under it native calls, which torch would cast,
give way to the Function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.backends.torch.autograd import recorded
from planner.backends.torch.eager import NATIVE, compile_native
from planner.backends.torch.executable import Executable, executable_of
from planner.backends.torch.modes import as_planned, autocasts, forward_mode, in_functorch, transformed
from planner.backends.torch.ops import dataless
from planner.backends.torch.strides import Strided
from planner.backends.torch.traced import run_forward, wide_result
from planner.cost.layout import row_major
from planner.language.errors import PlannerError
from planner.program.implementations import Table
from planner.program.plan import PlanRecord
from planner.program.tree import Leaf

__all__ = ["runner"]

Runner = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def runner(plan: PlanRecord, table: Table) -> Runner:
    """Return the function from operands and index arrays to a plan's result."""
    bound = executable_of(plan, table)
    if autocasts() and not _only_views(plan):
        return partial(_run_as_planned, bound)
    return _native(bound) or partial(_run, bound)


def _only_views(plan: PlanRecord) -> bool:
    return all(step.choice.lowering in ("view", "broadcast") for step in plan.programs.forward.steps)


def _has_kept(plan: PlanRecord) -> bool:
    """Whether keeping everything would keep anything."""
    return sum(len(step.inputs) > 0 for step in plan.programs.forward.steps) > 1


def _native(bound: Executable) -> Runner | None:
    """The plan as native calls; None where it needs more, or they would keep or compute other things than it says."""
    plan, requires = bound.plan, bound.programs.backward is not None
    if plan.loop is not None or bound.gathers or (requires and plan.keep != "all" and _has_kept(plan)):
        return None
    if requires and plan.options.memory_limit is not None:  # they copy gradients that repeat elements
        return None
    if isinstance(plan.tree, Leaf):
        return lambda operands, indices: bound.views(operands)[0].view_as(bound.views(operands)[0])
    if not all(step.choice.lowering in NATIVE for step in plan.programs.forward.steps):
        return None
    under_transform = transformed()  # there steps do as they do where derivatives are recorded
    standins = []
    for o, shape in zip(plan.operands, bound.reshape, strict=True):
        strides = row_major(o.shape) if o.strides is None else o.strides
        x = Strided(o.shape, strides, requires and o.requires_grad and not under_transform)
        standins.append(x if shape is None else x.reshape(shape))
    native = compile_native(plan.tree, standins, bound.programs.backward, under_transform)
    if native is not None and any(shape is not None for shape in bound.reshape):
        return lambda operands, indices: native(bound.views(operands))
    return native


def _run_as_planned(bound: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
    with as_planned():
        return _run(bound, operands, indices)


def _run(bound: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
    if bound.plan.index_mode == "drop" and not (in_functorch() or dataless(operands[0])):
        wide = wide_result(bound, operands, indices, bound.prepare(indices))
        if wide is not None:
            return wide
    if forward_mode():
        return bound.stock(operands, indices)
    _check_gradients(bound, operands)
    if bound.programs.backward is None:
        return run_forward(bound, operands, indices)[0]
    return recorded(bound, operands, indices)


def _check_gradients(bound: Executable, operands: Sequence[Tensor]) -> None:
    """Refuse operands that require a gradient which the plan does not give."""
    if not bound.inexact or not torch.is_grad_enabled():
        return
    for number, (x, gradient) in enumerate(zip(operands, bound.programs.gradients, strict=True)):
        if x.requires_grad and gradient is None:
            raise PlannerError(
                f"the plan was made without the gradient of operand {number}, which requires one: "
                "plan with such operands, with Operand(..., requires_grad=True), "
                "or call it under torch.no_grad()"
            )
