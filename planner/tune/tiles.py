"""`optimize="measure"`, after a plan is chosen: other tilings of its kernels, timed one step after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from planner.program.frameworks import load_backend
from planner.program.ops import PricedImplementation
from planner.program.plan import PlanRecord

__all__ = ["tune_tiles"]

# A tiling that is not faster by this much is not told from the default.
CLEARLY = 0.97


def tune_tiles(
    plan: PlanRecord, timings: Callable[[Sequence[PlanRecord]], Sequence[float]]
) -> tuple[PlanRecord, int, int]:
    """Return the plan with the fastest tiling of each step that has several; of how many steps, and how many changed.

    Tilings cost the same memory. A plan that goes slice by slice is returned as it is.

    Args:
        plan: what was chosen.
        timings: from plans to the seconds of each; infinite where one did not run.
    """
    timed, taken = 0, 0
    for backward, number, choices in _tilings(plan):
        tried = [plan, *(_with_choice(plan, backward, number, choice) for choice in choices)]
        seconds = timings(tried)
        timed += seconds[0] < math.inf
        place = min(range(len(tried)), key=seconds.__getitem__)
        if seconds[place] < CLEARLY * seconds[0] < math.inf:
            plan, taken = tried[place], taken + 1
    return plan, timed, taken


def _tilings(plan: PlanRecord) -> Iterator[tuple[bool, int, tuple[PricedImplementation, ...]]]:
    """The steps that have tilings: whether of the backward program, number, and the other choices."""
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
    steps = tuple(
        dataclasses.replace(step, choice=choice) if place == number else step
        for place, step in enumerate(program.steps)
    )
    changed = dataclasses.replace(program, steps=steps)
    programs = (
        dataclasses.replace(programs, backward=changed) if backward else dataclasses.replace(programs, forward=changed)
    )
    return dataclasses.replace(plan, programs=programs)
