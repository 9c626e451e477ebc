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

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.backends.common.stock_rows import stock_kind
from planner.backends.torch.autograd import record, record_usual
from planner.backends.torch.casts import Casts, after_casts, unread_casts
from planner.backends.torch.checks import raise_pending
from planner.backends.torch.conjugates import conjugates_much
from planner.backends.torch.contexts.autocast import autocast_changes
from planner.backends.torch.contexts.flops import count_native
from planner.backends.torch.contexts.modes import (
    as_planned,
    autocasts,
    bare_operators,
    compiles,
    in_functorch,
    only_grads,
    only_stock,
    usual,
    watched,
)
from planner.backends.torch.contexts.ranges import Range, named_native, profiler
from planner.backends.torch.contexts.traced import run_forward, wide_result
from planner.backends.torch.eager import MOST_NATIVE_SECONDS, MOST_SMALL_SECONDS, NATIVE, compile_native
from planner.backends.torch.executable import Executable
from planner.backends.torch.index import TorchIndex
from planner.backends.torch.indexed_rows import IndexedRun, NativeRun, Reads
from planner.backends.torch.ops import dispatches, is_recorded, unseen
from planner.backends.torch.products.elementwise import BY_ELEMENT, summed_product
from planner.backends.torch.strides import standins_of
from planner.language.errors import PlannerError
from planner.language.options import MODES
from planner.program.calls import Member, RangedIndices, RunPlan
from planner.program.forms import product_form
from planner.program.implementations import Table
from planner.program.ops import Guard, Op, joint_elements
from planner.program.plan import Loop, PlanRecord
from planner.program.tree import Leaf

MOST_FUSED = 2**13  # multiplications; measured 2026-11-27, torch 2.13, one core: 2 to 13 us less than `bmm` up to 2^15


def runner(plan: PlanRecord, table: Table) -> RunPlan:
    """Return the function that computes a plan's result from operands and index arrays."""
    run = _split(plan, table).bind()
    return _after_pending(run) if plan.device.kind == "cuda" else run


def _after_pending(run: RunPlan) -> RunPlan:
    """Return a runner that first raises what a card has told of earlier calls."""

    def run_after_pending(operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        raise_pending()
        return run(operands, indices)

    return run_after_pending


def family_runner(plan: PlanRecord, table: Table) -> Callable[[Member], RunPlan] | None:
    """Return what makes the function that runs the plan of a member of a family; see `Backend.bind_family`."""
    # These calls need sizes that their inputs do not show.
    sized = any(step.op.repeats or step.choice.lowering == "diagonal" for step in plan.programs.forward.steps)
    split = _split(plan, table, tries=not sized)
    # Contractions before casts are for the representative's sizes.
    return None if split.casts.before else split.bind


class _Split(NamedTuple):
    """A plan whose casts come first.

    Attributes:
        casts: the casts.
        executable: the rest, ready to run.
        native: the rest as native calls, if it can run so.
        other_casts: the casts where the rest runs as a Function, which saves all that it is given.
        other: the rest of these.
    """

    casts: Casts
    executable: Executable
    native: NativeRun | None
    other_casts: Casts
    other: Executable

    def bind(self, member: Member | None = None) -> RunPlan:
        """Return the function that runs the plan, or that of a member of its family."""
        executable, native, other = self.executable, self.native, self.other
        indexed = native is not None and bool(executable.gathers)
        run: RunPlan
        if native is not None and indexed:
            run = IndexedRun(native, executable, _run if other is executable else None, member)
        else:
            run = _runs(native, executable if member is None else executable.resized(member))
        otherwise: RunPlan | None = None
        if indexed and other is not executable:
            otherwise = partial(_run, other if member is None else other.resized(member))
            otherwise = after_casts(self.other_casts, _as_planned(otherwise) if autocasts() else otherwise)
        return after_casts(self.casts, _as_planned(run) if autocasts() else run, otherwise)


def _split(plan: PlanRecord, table: Table, tries: bool = True) -> _Split:
    """Return a plan whose casts come first; the rest runs as native calls if it can and it `tries`."""
    casts = other_casts = Casts(plan, table)
    executable = other = Executable(casts.rest, table)
    unkept = casts.dtypes.keys() & unread_casts(plan)
    native = _native(executable, unkept=unkept) if tries else None
    if unkept:
        other_casts = Casts(plan, table, saved=True)
        other = Executable(other_casts.rest, table)
    if native is None:
        casts, executable = other_casts, other
    return _Split(casts, executable, native, other_casts, other)


def _as_planned(run: RunPlan) -> RunPlan:
    """Return a runner whose dtypes autocast does not change."""

    def run_as_planned(operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        with as_planned():
            return run(operands, indices)

    return run_as_planned


def symbol_runner(plan: PlanRecord, table: Table, member: Member, given: Sequence[int]) -> RunPlan:
    """Return the function that runs a plan at sizes that are symbols of a compiler.

    Args:
        plan: the plan, for the sizes that the compiler traces with.
        table: the backend's implementations.
        member: the sizes.
        given: see `Executable.with_symbols`.
    """
    executable, index = Executable(plan, table), RangedIndices(False)
    index.sizes = member.sizes
    native = _native(executable, index)
    run = _runs(native, executable.with_symbols(member, given))
    return _as_planned(run) if autocasts() else run


def _runs(native: NativeRun | None, executable: Executable) -> RunPlan:
    """Return the function that runs native calls on the operands without their broadcast dimensions, or a Function."""
    if native is None:
        return partial(_run, executable)
    if executable.gathers:
        return IndexedRun(native, executable, _run)
    run = native.run
    return run if executable.fits else lambda operands, indices: run(executable.views(operands))


def _has_kept(plan: PlanRecord) -> bool:
    """Return whether a plan that keeps everything would keep any intermediate result."""
    return sum(len(step.inputs) > 0 for step in plan.programs.forward.steps) > 1


def _may_copy(plan: PlanRecord) -> bool:
    """Return whether a plan runs as native calls though torch then keeps copies of operands, which the plan does not.

    That is so for small plans under `torch.func.grad`, under which a Function takes ten times as long as a product.
    """
    options, least = plan.options, plan.cost.seconds <= MOST_SMALL_SECONDS
    return least and only_grads() and options.retain_limit is None and options.objective == "time"


def _native(
    executable: Executable, index: Mapping[Any, Any] = MappingProxyType({}), unkept: Collection[int] = ()
) -> NativeRun | None:
    """Return the plan as native calls.

    Return None if the plan needs more than native calls, or if native calls would keep or compute something else than
    the plan says. `index` holds the sizes of the calls, if they are not the plan's; `unkept` is for `compile_native`.
    """
    plan, requires = executable.plan, executable.programs.backward is not None
    if autocast_changes(plan.dtype) and not executable.only_views:
        return None
    if requires and plan.keep != "all" and _has_kept(plan):
        return None
    # If the contraction is empty, index arrays are checked, though no step reads them.
    if executable.gathers and (executable.empty or (requires and plan.cost.seconds > MOST_NATIVE_SECONDS)):
        return None
    if requires and plan.options.memory_limit is not None:  # native calls copy gradients that repeat elements
        return None
    if conjugates_much(plan.programs):  # of the largest member of a family
        return None
    if isinstance(plan.tree, Leaf):
        return NativeRun(lambda views, _=None: views[0].view_as(views[0]), Reads())
    if not all(step.choice.lowering in NATIVE for step in plan.programs.forward.computing):
        return None
    # Under `torch.func` steps behave as they do when autograd records. In forward mode by itself they do so too, but
    # there calls share what runs them with those outside.
    under_transform = in_functorch()
    standins = [
        x._replace(requires_grad=requires and x.requires_grad and not under_transform) for x in standins_of(plan)
    ]
    program = executable.programs.backward
    backward = None if program is None or (under_transform and _may_copy(plan)) else program.steps
    kept: list[int] | None = None if executable.programs.copies is None else []
    rows = {step.op.spec: step.choice.lowering for step in plan.programs.forward.steps}
    wraps = MODES[plan.index_mode].wraps
    compiled: Any = partial(
        compile_native,
        plan.tree,
        standins,
        backward,
        under_transform,
        index=index,
        kept=kept,
        rows=rows,
        wraps=wraps,
        unkept=unkept,
        on_cpu=plan.device.kind == "cpu",
        records=plan.programs.by_autograd,
    )
    reads = Reads()
    native = compiled(reads=reads)
    if native is None:
        return None
    show = lru_cache(maxsize=1)(partial(compiled, partial(named_native, rows)))  # compiled when a profiler is on first
    # Sizes that are symbols may turn out to be large.
    small = plan.device.kind == "cpu" and plan.dtype in ("float32", "float64") and getattr(index, "sizes", None) is None
    label, by_element = f"planner {plan.text}", not set(BY_ELEMENT).isdisjoint(rows.values())

    def counted(op: Op, run_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return count_native(op, run_step) if rows.get(op.spec) in BY_ELEMENT else run_step

    count = lru_cache(maxsize=1)(partial(compiled, counted))  # torch counts no FLOPs of products that are no matrices

    fuse = lru_cache(maxsize=1)(partial(compiled, _fusable))

    def run(views: Sequence[Tensor], _: Any = None) -> Tensor:
        if watched():  # as it also is by a compiler, which runs a call on tensors without values
            if small and compiles() and not bare_operators():
                return fuse()(views)
            if by_element and not profiler._is_profiler_enabled:
                return count()(views)
        if profiler._is_profiler_enabled:
            with Range(label):
                return show()(views)
        result: Tensor = native(views)
        return result

    return NativeRun(run, reads)


def _fusable(op: Op, run_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what a compiler shall record of a step: of a tiny product a loop over elements, which it fuses.

    A call of `bmm` takes it longer than such a loop, and gathered operands would be kept for it.
    """
    form = None if op.spec.gathers or len(op.spec.inputs) != 2 else product_form(op.spec)
    tiny = form is not None and form.contracted and joint_elements(op.spec) <= MOST_FUSED
    return summed_product(op) if tiny else run_step


def _run(executable: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
    is_usual = usual(*operands)
    if not is_usual and in_functorch():
        indices = _unsorted_batches(indices)
    if executable.drops and (is_usual or not (in_functorch() or is_recorded(operands[0]))):
        wide = wide_result(executable, operands, indices, executable.prepare(indices))
        if wide is not None:
            return wide
    if not is_usual and _by_stock(executable, operands):
        return executable.stock(operands, indices)
    _check_gradients(executable, operands)
    if executable.programs.backward is None:
        return run_forward(executable, operands, indices)[0]
    return (record_usual if is_usual else record)(executable, operands, indices)


def _unsorted_batches(indices: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the index arrays, with only the values of those prepared ones of which `vmap` holds many as one."""
    if not any(isinstance(q, TorchIndex) and unseen(q.values) for q in indices.values()):
        return indices
    return {n: q.values if isinstance(q, TorchIndex) and unseen(q.values) else q for n, q in indices.items()}


def _by_stock(executable: Executable, operands: Sequence[Tensor]) -> bool:
    """Return whether torch's own operators run a plan: nothing else has the derivatives, or a compiler fuses them."""
    if only_stock(*operands) or any(map(dispatches, operands)):
        return True
    recorded = is_recorded(operands[0]) and compiles()
    return recorded and not bare_operators() and _is_stock(executable)


def _is_stock(executable: Executable) -> bool:
    """Return whether a compiler may record a plan's steps: torch's own operators, without gradients and guards.

    A compiler can fuse them, and calling them takes less time than one operator that is written in Python. With
    gradients the compiler would decide what is kept. What dropped indices meet is looked at when the operator runs.
    """
    steps, mode = executable.programs.forward.steps, MODES[executable.plan.index_mode]
    return (
        executable.programs.backward is None
        and mode.bad != "drop"
        and all(not isinstance(step.op, Guard | Loop) and step.choice.lowering == stock_kind(step.op) for step in steps)
    )


def _check_gradients(executable: Executable, operands: Sequence[Tensor]) -> None:
    """Refuse operands that require a gradient which the plan does not give."""
    for number in executable.underived:
        if operands[number].requires_grad and torch.is_grad_enabled():
            raise PlannerError(
                f"the plan was made without the gradient of operand {number}, which requires one: "
                "plan with such operands, with Operand(..., requires_grad=True), "
                "or call it under torch.no_grad()"
            )
