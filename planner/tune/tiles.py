"""`optimize="measure"`, after a plan is chosen: times other tilings of its kernels, one step after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from planner.program.frameworks import load_backend
from planner.program.ops import PricedImplementation
from planner.program.plan import PlanRecord

__all__ = ["tune_tiles"]

# A tiling must be faster by this factor. A smaller difference may be noise.
CLEARLY = 0.97


def tune_tiles(
    plan: PlanRecord, timings: Callable[[Sequence[PlanRecord]], Sequence[float]]
) -> tuple[PlanRecord, int, int]:
    """Choose the fastest tiling of each step that has several.

    All tilings of a step need the same memory. A plan that is a loop over slices does not change.

    Args:
        plan: the chosen plan.
        timings: times plans, and returns the seconds of each; infinite if one did not run.

    Returns:
        The plan with these tilings, the number of steps whose tilings were timed, and how many of them changed.
    """
    timed, changed = 0, 0
    for backward, number, choices in _tilings(plan):
        tried = [plan, *(_with_choice(plan, backward, number, choice) for choice in choices)]
        seconds = timings(tried)
        timed += seconds[0] < math.inf
        place = min(range(len(tried)), key=seconds.__getitem__)
        if seconds[place] < CLEARLY * seconds[0] < math.inf:
            plan, changed = tried[place], changed + 1
    return plan, timed, changed


def _tilings(plan: PlanRecord) -> Iterator[tuple[bool, int, tuple[PricedImplementation, ...]]]:
    """Yield the steps with several tilings: whether it is a backward step, its number, and the other tilings."""
    backend = load_backend(plan.backend)
    if plan.loop is not None or backend.pins_tiles():
        return
    for backward, program in enumerate((plan.programs.forward, plan.programs.backward)):
        for number, step in enumerate(program.steps if program else ()):
            choices = backend.table.variants(step.choice.lowering, step.op, plan.device)
            if choices:
                yield bool(backward), number, choices


def _with_choice(plan: PlanRecord, backward: bool, number: int, choice: PricedImplementation) -> PlanRecord:
    programs = plan.programs
    program = programs.backward if backward else programs.forward
    assert program is not None
    steps = list(program.steps)
    steps[number] = dataclasses.replace(steps[number], choice=choice)
    changed = dataclasses.replace(program, steps=tuple(steps))
    if backward:
        return dataclasses.replace(plan, programs=dataclasses.replace(programs, backward=changed))
    return dataclasses.replace(plan, programs=dataclasses.replace(programs, forward=changed))
