"""Plans under a memory limit, checked against the peaks of their compiled programs.

A compiler fuses, copies and reorders steps. XLA's peak is within a quarter of the predicted one for 19 random programs
in 20, and can be twice as large. So a plan made under a memory limit is compiled once, each program on its own, and
rejected if a peak exceeds the limit. Then the search makes another plan, for a limit that is tighter by the ratio of
the excess. The last plan to try is the one with the least predicted peak. The predicted peak must be within the limit
too: inside another `jit` nothing else is known.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable

from planner.cost.limits import within
from planner.language.errors import PlannerLimitError
from planner.language.options import Options
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.plan import AnyPlan, PlanRecord
from planner.search.family import make_family_plan

# How many searches run before the one for the least peak. Each costs its own time and a compilation, about a second.
MOST_SEARCHED = 3


def accept_plan(contraction: Contraction) -> PlanRecord:
    """Return a plan of a contraction whose compiled programs are within the limits.

    After Ctrl-C no further search runs, and a plan that is being compiled counts as unverified.

    Args:
        contraction: what to plan. Without a memory limit, and on a mesh, nothing is compiled.

    Raises:
        PlannerLimitError: no compiled plan is within the limits. The message names limits that succeed.
    """
    options, limit = contraction.options, contraction.options.memory_limit

    def make(options: Options) -> PlanRecord:
        return make_family_plan(dataclasses.replace(contraction, options=options))

    if limit is None or not load_backend(contraction.backend).compiles or contraction.mesh is not None:
        try:
            return make(options)
        except PlannerLimitError as refusal:
            least, why = _least(make, options, refusal), refusal.why
        named = (least.options.memory_limit, least.options.retain_limit)
        raise PlannerLimitError.naming(why, (limit, options.retain_limit), named)
    tightened = limit
    for number in range(MOST_SEARCHED):
        try:
            plan = _verify(make(dataclasses.replace(options, memory_limit=tightened)))
        except PlannerLimitError:
            break
        if _need(plan) <= limit:
            return dataclasses.replace(plan, options=options, proven=plan.proven and number == 0)
        if plan.interrupted:
            raise KeyboardInterrupt
        tightened = plan.cost.peak_bytes * limit // _need(plan)
    try:
        least = make(dataclasses.replace(options, memory_limit=0))
    except PlannerLimitError as refusal:
        least = _least(make, options, refusal)
    least = _verify(least)
    if _need(least) <= limit and least.options.retain_limit == options.retain_limit:
        return dataclasses.replace(least, options=options, proven=False)
    enough = (_need(least), least.options.retain_limit)
    # A loop over very small slices may need more when compiled than a plan that has room.
    try:
        roomy = _verify(make(dataclasses.replace(options, memory_limit=sys.maxsize)))
    except PlannerLimitError:
        pass  # the retain limit alone cannot be met
    else:
        if _need(roomy) <= limit:
            return dataclasses.replace(roomy, options=options, proven=False)
        enough = min(enough, (_need(roomy), options.retain_limit), key=lambda limits: limits[0])
    asked = (limit, options.retain_limit)
    raise PlannerLimitError.naming("no plan was found whose compiled programs stay", asked, enough)


def _verify(plan: AnyPlan) -> AnyPlan:
    """Return a plan with the peak of its compiled programs, if the framework compiles any."""
    framework = load_backend(plan.backend)
    if not framework.compiles:
        return plan
    try:
        return dataclasses.replace(plan, compiled_bytes=framework.compiled_bytes(plan))
    except KeyboardInterrupt:
        return dataclasses.replace(plan, compiled_bytes=None, proven=False, origin=f"interrupted: {plan.origin}")


def keep_fitting(plans: Iterable[AnyPlan]) -> list[AnyPlan]:
    """Return the plans that are within their own limits: by prediction, and under a memory limit when compiled."""
    fitting = []
    for plan in plans:
        limit = plan.options.memory_limit
        if within(plan.cost, plan.options):
            verified = plan if limit is None else _verify(plan)
            if limit is None or _need(verified) <= limit:
                fitting.append(verified)
    return fitting


def _need(plan: PlanRecord) -> int:
    """Return the least memory limit that a verified plan is within."""
    return max(plan.cost.peak_bytes, plan.compiled_bytes or 0)


def _least(make: Callable[[Options], PlanRecord], options: Options, refusal: PlannerLimitError) -> PlanRecord:
    """Return the plan for the limits that a refusal names, or for the least ones above them that a search is within.

    A search under other limits looks at other trees and loops. So the plan that a refusal had in mind may not be found
    again; then this search names limits that are not as tight.
    """
    while True:
        memory, retain = refusal.memory_limit, refusal.retain_limit
        try:
            return make(dataclasses.replace(options, memory_limit=memory, retain_limit=retain))
        except PlannerLimitError as another:
            refusal = another
