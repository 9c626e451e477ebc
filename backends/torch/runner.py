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

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.backends.common.stock_rows import stock_kind
from planner.backends.torch.autograd import record, record_usual
from planner.backends.torch.casts import Casts
from planner.backends.torch.checks import can_wait, raise_pending
from planner.backends.torch.contexts.autocast import autocast_changes
from planner.backends.torch.contexts.flops import count_native
from planner.backends.torch.contexts.modes import (
    as_planned,
    autocasts,
    bare_operators,
    below_transforms,
    carries_tangents,
    compiles,
    hooked,
    in_functorch,
    only_grads,
    only_stock,
    transformed,
    under_grads,
    usual,
    watched,
)
from planner.backends.torch.contexts.ranges import Range, named_native, profiler
from planner.backends.torch.contexts.traced import run_forward, wide_result
from planner.backends.torch.eager import MOST_NATIVE_SECONDS, NATIVE, Reads, compile_native, standins_of
from planner.backends.torch.executable import Executable
from planner.backends.torch.index import TorchIndex
from planner.backends.torch.ops import captured, dispatches, is_finite, is_recorded, unseen
from planner.backends.torch.products import MULTIPLY_SUM, summed_product
from planner.language.errors import PlannerError
from planner.language.options import MODES
from planner.language.spec import Gather
from planner.program.calls import Member, RangedIndices
from planner.program.forms import product_form
from planner.program.implementations import RunPlan, Table
from planner.program.ops import Guard, Op, joint_elements
from planner.program.plan import Loop, PlanRecord
from planner.program.tree import Leaf

__all__ = ["family_runner", "runner", "symbol_runner"]

MOST_FUSED = 2**13  # multiplications; measured 2026-11-27, torch 2.13, one core: 2 to 13 us less than `bmm` up to 2^15
_NOTHING: Any = contextlib.nullcontext()


def runner(plan: PlanRecord, table: Table) -> RunPlan:
    """Return the function that computes a plan's result from operands and index arrays."""
    casts = Casts(plan, table)
    executable = Executable(casts.rest, table)
    run = _runs(_native(executable), executable)
    if plan.device.kind == "cuda":
        run = _after_pending(run)
    return _after_casts(casts, _as_planned(run) if autocasts() else run)


def _after_pending(run: RunPlan) -> RunPlan:
    """Return a runner that first raises what a card has told of earlier calls."""

    def run_after_pending(operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        raise_pending()
        return run(operands, indices)

    return run_after_pending


def family_runner(plan: PlanRecord, table: Table) -> Callable[[Member], RunPlan] | None:
    """Return what makes the function that runs the plan of a member of a family; see `Backend.bind_family`."""
    casts = Casts(plan, table)
    if casts.before:  # contractions that are for the representative's sizes
        return None
    rest, executable = casts.rest, Executable(casts.rest, table)
    # These calls need sizes that their inputs do not show.
    sized = any(step.op.repeats or step.choice.lowering == "diagonal" for step in rest.programs.forward.steps)
    native = None if sized else _native(executable)

    def bind(member: Member) -> RunPlan:
        if native is not None and executable.gathers:
            run: RunPlan = _Indexed(native, executable, member)
        else:
            run = _runs(native, executable.resized(member))
        return _after_casts(casts, _as_planned(run) if autocasts() else run)

    return bind


def _after_casts(casts: Casts, run: RunPlan) -> RunPlan:
    """Return a runner that casts some operands first."""
    return (lambda operands, indices: run(*casts(operands, indices))) if casts.dtypes else run


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


class _Native(NamedTuple):
    """A plan as native calls.

    Attributes:
        run: takes the operands without their broadcast dimensions, and after them the index arrays.
        reads: what the calls ask of index arrays.
    """

    run: Callable[..., Tensor]
    reads: Reads


def _runs(native: _Native | None, executable: Executable) -> RunPlan:
    """Return the function that runs native calls on the operands without their broadcast dimensions, or a Function."""
    if native is None:
        return partial(_run, executable)
    if executable.gathers:
        return _Indexed(native, executable)
    run = native.run
    return run if executable.fits else lambda operands, indices: run(executable.views(operands))


class _Index(dict[Gather, Tensor]):
    """The index arrays of native calls, and `RangedIndices.sizes`."""

    __slots__ = ("sizes",)
    sizes: Mapping[str | Gather, int] | None


class _Indexed:
    """Runs native calls if the index arrays do as they are, and no guard would act; else it runs the plan as usual.

    Args:
        native: the native calls.
        executable: the plan, ready to run.
        member: the sizes of the calls, if they are not the plan's. Then the executable for them is made when the plan
            first runs as usual.
    """

    __slots__ = ("given", "made_for", "most", "native", "records", "sizes", "trusts")

    def __init__(self, native: _Native, executable: Executable, member: Member | None = None) -> None:
        self.native, self.trusts, self.most = native.run, native.reads.checked, native.reads.most
        self.made_for = executable, member  # replaced at once: another thread may read it meanwhile
        self.records = executable.programs.backward is not None
        owner = executable if member is None else member
        self.sizes, shapes = owner.sizes, executable.reshape if member is None else member.shapes
        # The index arrays and their shapes, if calls without gradients only look at how these arrays lie; else None.
        self.given: list[tuple[str, Gather, tuple[int, ...]]] | None = None
        if self.trusts and not (self.records or executable.reads_unread) and all(shape is None for shape in shapes):
            self.given = [(gather.array, gather, owner.index_shapes[gather.array]) for gather in executable.gathers]

    def __call__(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        if self.given is not None and usual(*operands) and (found := self._found(self.given, indices)) is not None:
            try:
                return self.native([*operands, found])
            except (IndexError, RuntimeError):
                return _run(self._own(), operands, indices)
        executable, member = self.made_for
        index: _Index | RangedIndices | None = None
        if self.most is not None and any([math.prod(indices[name].shape) > self.most for name in executable.arrays]):
            return _run(self._own(), operands, indices)
        if (inside := operands if usual(*operands) else under_grads(*operands)) is not None:
            # Hooks would see what autograd saves before an index is refused.
            trusts = self.trusts and not (self.records and hooked())
            looks = inside is not operands and (executable.reads_unread or not trusts)
            with below_transforms() if looks else _NOTHING:
                index = _as_read(executable, member, inside, indices, trusts)
            if index is not None and trusts:
                try:
                    return self.native([*executable.views(operands, member), index])
                except (IndexError, RuntimeError):  # an index out of range, or a negative one
                    index = None
        elif _as_usual(operands) and not any(map(unseen, operands)):
            index = _as_read(executable, member, operands, indices)
        elif compiles() and not (transformed() or bare_operators()):
            index = None if executable.reads_unread or executable.drops else self._own().prepare(indices)
        if index is None:
            return _run(self._own(), operands, indices)
        return self.native([*executable.views(operands, member), index])

    def _found(self, given: Sequence[tuple[str, Gather, tuple[int, ...]]], indices: Mapping[str, Any]) -> _Index | None:
        """Return the index arrays as `_as_they_are` does, if all are on a CPU and nothing has to be looked up in them.

        It takes a third of the time.
        """
        index = _Index()
        index.sizes = self.sizes
        for name, gather, shape in given:
            q = indices[name]
            if not (type(q) is Tensor and q.dtype is torch.int64 and q.is_cpu and q.is_contiguous() and q.numel()):
                return None
            index[gather] = q if q.shape == shape else q.reshape(shape)
        return index

    def _own(self) -> Executable:
        """Return the executable for the sizes of the calls."""
        executable, member = self.made_for
        if member is not None:
            executable = executable.resized(member)
            self.made_for = executable, None
        return executable


def _as_read(
    executable: Executable,
    member: Member | None,
    operands: Sequence[Tensor],
    indices: Mapping[str, Any],
    trusts: bool = False,
) -> _Index | None:
    """Return the index arrays for native calls, or None if these would have to copy or mask something.

    The operands have values, and none is batched.
    """
    index = _as_they_are(executable, member, operands, indices, trusts)
    if index is not None and executable.reads_unread and any(captured(x) or not is_finite(x) for x in operands):
        return None
    return index


def _as_usual(operands: Sequence[Tensor]) -> bool:
    """Return whether native calls may run though something surrounds the call.

    Modes see them, since they run without modes too. A checkpoint may run a call in a mode that its first run was not
    in, and must save the same tensors.
    """
    return not (is_recorded(operands[0]) or carries_tangents(*operands) or any(map(dispatches, operands)))


def _as_they_are(
    executable: Executable,
    member: Member | None,
    operands: Sequence[Tensor],
    indices: Mapping[str, Any],
    trusts: bool,
) -> _Index | None:
    """Return the index arrays if they are in range as they are and autograd may save them, else None.

    Then all are row-major, of int64, and without negative entries. If it `trusts` arrays on a CPU, the operators that
    read them find out whether they are in range.
    """
    index, records = _Index(), torch.is_grad_enabled()
    index.sizes = sizes = executable.sizes if member is None else member.sizes
    shapes = executable.index_shapes if member is None else member.index_shapes
    for gather, own in executable.gathers.items():
        raw, shape = indices[gather.array], shapes[gather.array]
        if isinstance(raw, TorchIndex):
            size = own.size if sizes is None else sizes[gather]
            raw, may_drop = raw.read(dataclasses.replace(own, size=size), executable.plan.index_mode)
            if may_drop:
                return None
        else:
            if type(raw) is not Tensor or raw.dtype is not torch.int64 or not (raw.is_contiguous() and raw.numel()):
                return None
            if unseen(raw) or can_wait(raw):  # a look at the values would wait for the device
                return None
            if not (trusts and raw.is_cpu):
                low, high = torch.aminmax(raw)
                if int(low) < 0 or int(high) >= ((own.size if sizes is None else sizes[gather]) or 0):
                    return None
        index[gather] = raw if raw.shape == shape else raw.reshape(shape)
    return None if records and any(map(Tensor.is_inference, (*operands, *index.values()))) else index


def _has_kept(plan: PlanRecord) -> bool:
    """Return whether a plan that keeps everything would keep any intermediate result."""
    return sum(len(step.inputs) > 0 for step in plan.programs.forward.steps) > 1


def _may_copy(plan: PlanRecord) -> bool:
    """Return whether a plan runs as native calls though torch then keeps copies of operands, which the plan does not.

    That is so for small plans under `torch.func.grad`, under which a Function takes ten times as long as a product.
    """
    options, least = plan.options, plan.cost.seconds <= MOST_NATIVE_SECONDS
    return least and only_grads() and options.retain_limit is None and options.objective == "time"


def _native(executable: Executable, index: Mapping[Any, Any] = MappingProxyType({})) -> _Native | None:
    """Return the plan as native calls.

    Return None if the plan needs more than native calls, or if native calls would keep or compute something else than
    the plan says. `index` holds the sizes of the calls, if they are not the plan's.
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
    if isinstance(plan.tree, Leaf):
        return _Native(lambda views, _=None: views[0].view_as(views[0]), Reads())
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
        compile_native, plan.tree, standins, backward, under_transform, index=index, kept=kept, rows=rows, wraps=wraps
    )
    reads = Reads()
    native = compiled(reads=reads)
    if native is None:
        return None
    show = lru_cache(maxsize=1)(partial(compiled, named_native))  # compiled when a profiler is on first
    # Sizes that are symbols may turn out to be large.
    small = plan.device.kind == "cpu" and plan.dtype in ("float32", "float64") and getattr(index, "sizes", None) is None
    label, sums = f"planner {plan.text}", MULTIPLY_SUM in rows.values()

    def counted(op: Op, run_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return count_native(op, run_step) if rows.get(op.spec) == MULTIPLY_SUM else run_step

    count = lru_cache(maxsize=1)(partial(compiled, counted))  # torch counts no FLOPs of products that are no matrices

    fuse = lru_cache(maxsize=1)(partial(compiled, _fusable))

    def run(views: Sequence[Tensor], _: Any = None) -> Tensor:
        if watched():  # as it also is by a compiler, which runs a call on tensors without values
            if small and compiles() and not bare_operators():
                return fuse()(views)
            if sums and not profiler._is_profiler_enabled:
                return count()(views)
        if profiler._is_profiler_enabled:
            with Range(label):
                return show()(views)
        result: Tensor = native(views)
        return result

    return _Native(run, reads)


def _fusable(op: Op, run_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what a compiler shall record of a step: of a tiny product a loop over elements, which it fuses.

    A call of `bmm` takes it longer than such a loop, and gathered operands would be kept for it.
    """
    form = None if op.spec.gathers or len(op.spec.inputs) != 2 else product_form(op.spec)
    tiny = form is not None and form.contracted and joint_elements(op.spec) <= MOST_FUSED
    return summed_product(op.spec) if tiny else run_step


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
