"""A plan under a memory limit, held to what its programs take as the framework compiles them.

A compiler fuses, copies and orders as it likes: XLA's peak is 1.5 times that of the steps at the median, 3 times at the
95th percentile. So such a plan is compiled once, each program apart, and taken if both are within the limit; else
another is searched, within a limit that is tighter by as much as was exceeded; at last that of the least predicted
peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from planner.dispatch import load_backend
from planner.errors import PlannerLimitError
from planner.plan import Options, Plan

__all__ = ["accepted", "fits_compiled"]

# Compiling takes a second or so.
MOST_TIGHTENED = 3


def accepted(make: Callable[[Options], Plan], options: Options, backend: str) -> Plan:
    """Return what `make` gives for these options, or for tighter limits, and fits when compiled.

    Args:
        make: chooses a plan by predictions.
        options: with or without a memory limit; without, nothing is compiled.
        backend: its name.

    Raises:
        PlannerLimitError: none of the plans that were compiled is within the limits; what it names succeeds.
    """
    limit = options.memory_limit
    framework = load_backend(backend)
    if limit is None or not framework.compiles:
        return make(options)
    tightened = limit
    for number in range(MOST_TIGHTENED):
        try:
            plan = make(dataclasses.replace(options, memory_limit=tightened))
        except PlannerLimitError:
            break
        taken = framework.compiled_bytes(plan)
        if taken is None or taken <= limit:
            return dataclasses.replace(
                plan, options=options, compiled_bytes=taken, proven=plan.proven and number == 0
            )  # fmt: skip
        tightened = plan.cost.peak_bytes * limit // taken
    plan = _least(make, options)
    taken, retain = framework.compiled_bytes(plan), plan.options.retain_limit
    taken = plan.cost.peak_bytes if taken is None else taken
    if taken <= limit and retain == options.retain_limit:
        return dataclasses.replace(plan, options=options, compiled_bytes=taken, proven=False)
    asked = (limit, options.retain_limit)
    raise PlannerLimitError.naming("no plan was found whose compiled programs stay", asked, (taken, retain))


def _least(make: Callable[[Options], Plan], options: Options) -> Plan:
    """The plan of the least predicted peak, within the retain limit if there is one."""
    try:
        return make(dataclasses.replace(options, memory_limit=0))
    except PlannerLimitError as error:
        enough = dataclasses.replace(options, memory_limit=error.memory_limit, retain_limit=error.retain_limit)
        return make(enough)


def fits_compiled(plan: Plan) -> bool:
    """Whether a plan's compiled programs are within its memory limit, as far as that can be known."""
    limit, framework = plan.options.memory_limit, load_backend(plan.backend)
    if limit is None or not framework.compiles:
        return True
    taken = framework.compiled_bytes(plan)
    return taken is None or taken <= limit
