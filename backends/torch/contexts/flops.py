"""What `torch.utils.flop_counter` counts for planner's operators: the FLOPs of a plan's product steps.

torch counts 2 FLOPs for each multiply-add of a matrix product, and none for sums and for products by element. So a step
counts if it multiplies two arrays and sums over axes that both have. A gradient counts if it is the gradient of such a
step, as torch counts that of a column by a row; torch multiplies by element in its gradients of other steps. What a
kernel pads does not count.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from planner.language.spec import axis_of, plain_axes, term_axes
from planner.program.calls import SizeReader
from planner.program.loops import slice_counts
from planner.program.ops import JointGradient, Op
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Program
from planner.program.serial import plan_from_json

Shape = Sequence[int]


def product_flops(plan: PlanRecord, program: Program | None, sizes: Mapping[str, int] | None = None) -> int:
    """Return the FLOPs of the product steps of a plan's forward or backward program.

    Args:
        plan: the plan.
        program: the program; None counts nothing.
        sizes: sizes of axes that differ from the plan's.
    """
    from_gradient, total = {plan.programs.output_gradient}, 0
    for step in program.steps if program else ():
        op, gradients = step.op, [number for number, v in enumerate(step.inputs) if v in from_gradient]
        if gradients:
            from_gradient.update(step.outputs)
        if isinstance(op, Loop):
            for (_, count), body in zip(slice_counts(op.axes, op.spec), op.bodies, strict=True):
                total += count * product_flops(body, op.program(body))
        elif len(op.spec.inputs) == 2:
            total += _step_flops(op, gradients, {**op.spec.by_axis, **(sizes or {})})
    return total


def _step_flops(op: Op, gradients: Sequence[int], sizes: Mapping[str, int]) -> int:
    """Return the FLOPs of a step; `gradients` are the numbers of its inputs that come from the output gradient."""
    a, b, result = op.spec.terms
    if gradients and not isinstance(op, JointGradient):  # the product whose gradient it is has a result with this term
        a, b, result = op.spec.inputs[1 - gradients[0]], result, op.spec.inputs[gradients[0]]
    summed = {*term_axes(a)} & {*term_axes(b)} - {*plain_axes(result)}
    if math.prod(sizes[axis] for axis in summed) == 1:
        return 0
    # Axes that one term has are summed before the product, or repeated after it.
    joint = [axis for axis in op.spec.axes if sum(axis in term_axes(term) for term in op.spec.terms) > 1]
    return 2 * op.products * math.prod(sizes[axis] for axis in joint)


def count_native(op: Op, run_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that runs a product as an elementwise product and a sum, and tells counters its FLOPs."""

    def run(*inputs: Any) -> Tensor:
        result = run_step(*inputs)
        pairs = zip(op.spec.inputs, inputs, strict=True)
        sizes = {axis: n for term, x in pairs for axis, n in zip(plain_axes(term), x.shape, strict=True)}
        flops, gradients = _step_flops(op, (), sizes), sum(x.requires_grad for x in inputs)
        _add_to_counters(flops)
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(lambda _: _add_to_counters(gradients * flops))
        return result

    return run


def _counters() -> Iterable[Any]:
    """Return the counters that are at work."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return []
    return [mode.counter for mode in _get_current_dispatch_mode_stack() if isinstance(mode, module._FlopCounterMode)]


def _add_to_counters(flops: int) -> None:
    for counter in _counters():
        for module in set(counter.mod_tracker.parents):
            counter.flop_counts[module][torch.ops.aten.mul] += flops


# -- the operators ---------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _plan(text: str) -> PlanRecord:
    return plan_from_json(text)


def _forward_flops(
    plan: str,
    names: str,
    arrays: Sequence[Shape],
    operands: Sequence[Shape],
    sizes: Sequence[int] | None = None,
    **_: Any,
) -> int:
    record = _plan(plan)
    return product_flops(record, record.programs.forward, _sizes(record, names, arrays, operands, sizes))


def _backward_flops(
    plan: str,
    names: str,
    arrays: Sequence[Shape],
    gradient: Shape,
    operands: Sequence[Shape],
    kept: Sequence[Shape],
    sizes: Sequence[int] | None = None,
    **_: Any,
) -> int:
    record = _plan(plan)
    return product_flops(record, record.programs.backward, _sizes(record, names, arrays, operands, sizes))


def _sizes(
    plan: PlanRecord, names: str, arrays: Sequence[Shape], operands: Sequence[Shape], given: Sequence[int] | None
) -> dict[str, int]:
    """Return the sizes of the axes of a call; `given` is the last argument of the operators."""
    spec, tensors, shapes = plan.resolved.spec, iter(arrays), {}
    for name, facts in json.loads(names):
        shapes[name], *_ = [next(tensors) for _ in range(1 if facts is None else 3)]
    reader = SizeReader(spec, plan, tuple(shapes))
    known = [(e, n) for e, n in zip(spec.output, given or (), strict=False) if n != -1]
    member = reader.member([*operands, *shapes.values()], known or reader.assumed)
    assert member is not None  # the operator has read the same sizes
    return {axis: size for e, size in member.sizes.items() if (axis := axis_of(e))}


def register_flops() -> None:
    """Tell the module `torch.utils.flop_counter` what the operators count, and counters that are at work.

    The module is not loaded for that, because it loads Triton. A counter copies the formulas when it is made.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    formulas = {torch.ops.planner.forward: _forward_flops, torch.ops.planner.backward: _backward_flops}
    for operator, formula in formulas.items():
        if operator not in module.flop_registry:
            module.register_flop_formula(operator)(formula)
    for counter in _counters():
        counter.flop_registry.update({packet: module.flop_registry[packet] for packet in formulas})
