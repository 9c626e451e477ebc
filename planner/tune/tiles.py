"""`optimize="measure"`, after a plan is chosen: times other tilings of its kernels, one step after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from planner.program.frameworks import load_backend
from planner.program.ops import Op, PricedImplementation
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Program
from planner.program.tree import change_ops

# A tiling must be faster by this factor. A smaller difference may be noise.
CLEARLY = 0.97


def tune_tiles(
    plan: PlanRecord, timings: Callable[[Sequence[PlanRecord]], Sequence[float]]
) -> tuple[PlanRecord, int, int]:
    """Choose the fastest tiling of each kernel that has several, in whole slices of a loop too.

    All tilings of a step need the same memory.

    Args:
        plan: the chosen plan.
        timings: times plans, and returns the seconds of each; infinite if one did not run.

    Returns:
        The plan with these tilings, the number of kernels whose tilings were timed, and how many of them changed.
    """
    timed, changed = 0, 0
    for op, chosen, choices in _tilings(plan):
        tried = [plan, *(_with_choice(plan, op, chosen, choice) for choice in choices)]
        seconds = timings(tried)
        timed += seconds[0] < math.inf
        place = min(range(len(tried)), key=seconds.__getitem__)
        if seconds[place] < CLEARLY * seconds[0] < math.inf:
            plan, changed = tried[place], changed + 1
    return plan, timed, changed


def _tilings(plan: PlanRecord) -> Iterator[tuple[Op, PricedImplementation, tuple[PricedImplementation, ...]]]:
    """Yield the steps with several tilings, each once: the op, its implementation, and the other tilings."""
    backend = load_backend(plan.backend)
    if backend.pins_tiles():
        return
    for (op, chosen), device in {(step.op, step.choice): part.device for part, step in plan.inner_steps()}.items():
        choices = backend.table.variants(chosen.lowering, op, device)
        if choices:
            yield op, chosen, choices


def _with_choice(plan: PlanRecord, op: Op, chosen: PricedImplementation, choice: PricedImplementation) -> PlanRecord:
    """Return the plan with another choice for each step with this op and this implementation."""

    def in_op(other: Op) -> Op:
        if not isinstance(other, Loop):
            return other
        return dataclasses.replace(other, bodies=tuple(_with_choice(body, op, chosen, choice) for body in other.bodies))

    def in_program(program: Program) -> Program:
        steps = [
            dataclasses.replace(step, choice=choice)
            if (step.op, step.choice) == (op, chosen)
            else dataclasses.replace(step, op=in_op(step.op))
            for step in program.steps
        ]
        return dataclasses.replace(program, steps=tuple(steps))

    forward, backward = plan.programs.forward, plan.programs.backward
    programs = dataclasses.replace(
        plan.programs, forward=in_program(forward), backward=backward and in_program(backward)
    )
    return dataclasses.replace(plan, tree=change_ops(plan.tree, in_op), programs=programs)
