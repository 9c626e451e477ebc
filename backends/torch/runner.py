"""Choose how a plan runs in torch: as a few native calls, as an autograd Function, or by operators that torch traces.

The plan decides what is kept for the backward pass. If torch's own operators keep exactly that, the plan runs as native
calls (see `eager`). Otherwise it runs as one `autograd.Function` (see `autograd`), whose programs become operators of
torch's library when tensors have no data (see `traced`). In forward mode, and on tensors that run operators in their
own way, the plan runs by stock operators, out of place, which torch differentiates itself.

Casts of operands come before all that (see `casts`). Autocast must not change a dtype of the plan. If it could, because
the plan computes in another floating dtype than autocast does, native calls would not do: autocast would cast the
arguments of their derivatives. Then the Function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from planner.backends.torch.autograd import record
from planner.backends.torch.casts import Casts
from planner.backends.torch.contexts.autocast import autocast_changes
from planner.backends.torch.contexts.modes import as_planned, autocasts, forward_mode, in_functorch, transformed
from planner.backends.torch.contexts.ranges import Range, named_native, profiler
from planner.backends.torch.contexts.traced import opaque, run_forward, wide_result
from planner.backends.torch.eager import NATIVE, compile_native
from planner.backends.torch.executable import Executable
from planner.backends.torch.ops import dispatches
from planner.backends.torch.strides import Strided
from planner.cost.layout import row_major
from planner.language.errors import PlannerError
from planner.program.calls import Member
from planner.program.implementations import Table
from planner.program.plan import PlanRecord
from planner.program.tree import Leaf

__all__ = ["family_runner", "runner"]

Runner = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def runner(plan: PlanRecord, table: Table) -> Runner:
    """Return the function that computes a plan's result from operands and index arrays."""
    casts = Casts(plan, table)
    executable = Executable(casts.rest, table)
    native = None if autocast_changes(casts.rest.dtype) and not executable.only_views else _native(executable)
    run = native or partial(_run, executable)
    return _after_casts(casts, _as_planned(run) if autocasts() else run)


def _after_casts(casts: Casts, run: Runner) -> Runner:
    """Return a runner that casts some operands first."""
    return (lambda operands, indices: run(*casts(operands, indices))) if casts.dtypes else run


def _as_planned(run: Runner) -> Runner:
    """Return a runner whose dtypes autocast does not change."""

    def run_as_planned(operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        with as_planned():
            return run(operands, indices)

    return run_as_planned


def family_runner(plan: PlanRecord, table: Table) -> Callable[[Member], Runner] | None:
    """Return what makes the function that runs the plan of a member of a family; see `Backend.bind_family`."""
    casts = Casts(plan, table)
    if casts.before:  # contractions that are for the representative's sizes
        return None
    rest, executable = casts.rest, Executable(casts.rest, table)
    # These calls need sizes that their inputs do not show.
    sized = any(step.choice.lowering in ("broadcast", "diagonal") for step in rest.programs.forward.steps)
    native = None if sized or autocast_changes(rest.dtype) else _native(executable)

    def bind_plain(member: Member) -> Runner:
        if native is None:
            return partial(_run, executable.resized(member))
        if all(shape is None for shape in member.shapes):
            return native
        views = executable.resized(member).views
        return lambda operands, indices: native(views(operands), indices)

    def bind(member: Member) -> Runner:
        run = bind_plain(member)
        return _after_casts(casts, _as_planned(run) if autocasts() else run)

    return bind


def _has_kept(plan: PlanRecord) -> bool:
    """Return whether a plan that keeps everything would keep any intermediate result."""
    return sum(len(step.inputs) > 0 for step in plan.programs.forward.steps) > 1


def _native(executable: Executable) -> Runner | None:
    """Return the plan as native calls.

    Return None if the plan needs more than native calls, or if native calls would keep or compute something else than
    the plan says.
    """
    plan, requires = executable.plan, executable.programs.backward is not None
    if executable.gathers or (requires and plan.keep != "all" and _has_kept(plan)):
        return None
    if requires and plan.options.memory_limit is not None:  # native calls copy gradients that repeat elements
        return None
    if isinstance(plan.tree, Leaf):
        return lambda operands, indices: executable.views(operands)[0].view_as(executable.views(operands)[0])
    if not all(step.choice.lowering in NATIVE for step in plan.programs.forward.steps):
        return None
    under_transform = transformed()  # there steps behave as they do when autograd records
    standins = []
    for o, shape in zip(plan.operands, executable.reshape, strict=True):
        strides = row_major(o.shape) if o.strides is None else o.strides
        x = Strided(o.shape, strides, requires and o.requires_grad and not under_transform)
        standins.append(x if shape is None else x.reshape(shape))
    backward = executable.programs.backward
    compiled: Any = partial(compile_native, plan.tree, standins, backward, under_transform)
    native = compiled()
    if native is None:
        return None
    show = lru_cache(maxsize=1)(partial(compiled, named_native))  # compiled when a profiler is on first
    label = f"planner {plan.text}"

    def run(operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        if profiler._is_profiler_enabled:
            with Range(label):
                return show()(operands)
        result: Tensor = native(operands)
        return result

    if all(shape is None for shape in executable.reshape):
        return run
    return lambda operands, indices: run(executable.views(operands), indices)


def _run(executable: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
    if executable.sizes is not None and opaque(executable, operands[0]):
        executable = executable.by_itself(operands)
    if executable.drops and not (in_functorch() or opaque(executable, operands[0])):
        wide = wide_result(executable, operands, indices, executable.prepare(indices))
        if wide is not None:
            return wide
    if forward_mode() or any([type(x) is not Tensor and dispatches(x) for x in operands]):
        return executable.stock(operands, indices)
    _check_gradients(executable, operands)
    if executable.programs.backward is None:
        return run_forward(executable, operands, indices)[0]
    return record(executable, operands, indices)


def _check_gradients(executable: Executable, operands: Sequence[Tensor]) -> None:
    """Refuse operands that require a gradient which the plan does not give."""
    for number in executable.underived:
        if operands[number].requires_grad and torch.is_grad_enabled():
            raise PlannerError(
                f"the plan was made without the gradient of operand {number}, which requires one: "
                "plan with such operands, with Operand(..., requires_grad=True), "
                "or call it under torch.no_grad()"
            )
