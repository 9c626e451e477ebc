"""A plan under a memory limit, held to what its programs take as the framework compiles them.

A compiler fuses, copies and orders as it likes: XLA's peak is 1.5 times that of the steps at the median, 3 times at the
95th percentile. So such a plan is compiled once, each program apart, and taken if both are within the limit; else
another is searched, within a limit that is tighter by as much as was exceeded; at last that of the least predicted
peak. Calls that nothing compiles run step by step, so the predicted peak is held to the limit too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from planner.cost.limits import within
from planner.language.errors import PlannerLimitError
from planner.language.options import Options
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.plan import AnyPlan, PlanRecord
from planner.search.choose import make_plan

__all__ = ["accept_plan", "keep_fitting"]

# Searches before that of the least peak: each costs its own time and a compilation, a second or so.
MOST_SEARCHED = 3


def accept_plan(contraction: Contraction) -> PlanRecord:
    """Return the plan of a contraction, made for its limits or for tighter ones, that fits when compiled.

    After Ctrl-C nothing more is searched, and what is being compiled counts as unverified.

    Args:
        contraction: what to plan; without a memory limit nothing is compiled.

    Raises:
        PlannerLimitError: none of the plans that were compiled is within the limits; what it names succeeds.
    """
    options, limit = contraction.options, contraction.options.memory_limit

    def make(options: Options) -> PlanRecord:
        return make_plan(dataclasses.replace(contraction, options=options))

    if limit is None or not load_backend(contraction.backend).compiles:
        return make(options)
    tightened = limit
    for number in range(MOST_SEARCHED):
        try:
            plan = _verified(make(dataclasses.replace(options, memory_limit=tightened)))
        except PlannerLimitError:
            break
        if _need(plan) <= limit:
            return dataclasses.replace(plan, options=options, proven=plan.proven and number == 0)
        if plan.origin.startswith("interrupted"):
            raise KeyboardInterrupt
        tightened = plan.cost.peak_bytes * limit // _need(plan)
    least = _verified(_least(make, options))
    if _need(least) <= limit and least.options.retain_limit == options.retain_limit:
        return dataclasses.replace(least, options=options, proven=False)
    enough = (_need(least), least.options.retain_limit)
    # A loop of very small slices may compile to more than the plan without a limit, which its own need finds again.
    try:
        free = _verified(make(dataclasses.replace(options, memory_limit=None)))
    except PlannerLimitError:
        pass  # by the retain limit
    else:
        enough = min(enough, (_need(free), options.retain_limit), key=lambda limits: limits[0])
    asked = (limit, options.retain_limit)
    raise PlannerLimitError.naming("no plan was found whose compiled programs stay", asked, enough)


def _verified(plan: AnyPlan) -> AnyPlan:
    """Return a plan with the peak of its programs as the framework compiles them, where it compiles any."""
    framework = load_backend(plan.backend)
    if not framework.compiles:
        return plan
    try:
        return dataclasses.replace(plan, compiled_bytes=framework.compiled_bytes(plan))
    except KeyboardInterrupt:
        return dataclasses.replace(plan, compiled_bytes=None, proven=False, origin=f"interrupted: {plan.origin}")


def keep_fitting(plans: Iterable[AnyPlan]) -> list[AnyPlan]:
    """Return the plans that are within their own limits: as predicted, and under a memory limit as compiled."""
    found = []
    for plan in plans:
        limit = plan.options.memory_limit
        if within(plan.cost, plan.options):
            seen = plan if limit is None else _verified(plan)
            if limit is None or _need(seen) <= limit:
                found.append(seen)
    return found


def _need(plan: PlanRecord) -> int:
    """The least memory limit that a verified plan is within."""
    return max(plan.cost.peak_bytes, plan.compiled_bytes or 0)


def _least(make: Callable[[Options], PlanRecord], options: Options) -> PlanRecord:
    """The plan of the least predicted peak, within the retain limit if there is one."""
    try:
        return make(dataclasses.replace(options, memory_limit=0))
    except PlannerLimitError as error:
        enough = dataclasses.replace(options, memory_limit=error.memory_limit, retain_limit=error.retain_limit)
        return make(enough)
