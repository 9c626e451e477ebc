"""Limits on the bytes that a plan allocates and retains."""

from __future__ import annotations

from typing import NamedTuple

from planner.cost.figures import PlanCost
from planner.language.options import Options


class Limits(NamedTuple):
    """The most bytes that a plan may allocate and retain; None for no limit."""

    memory: int | None = None
    retain: int | None = None


NO_LIMITS = Limits()


def limits_of(options: Options) -> Limits:
    """Return the limits of some options."""
    return Limits(options.memory_limit, options.retain_limit)


def within(cost: PlanCost, options: Options) -> bool:
    """Whether a cost is within the limits of some options."""
    return keeps_within(cost, limits_of(options))


def keeps_within(cost: PlanCost, limits: Limits) -> bool:
    """Whether a cost is within both limits."""
    if limits.memory is not None and cost.peak_bytes > limits.memory:
        return False
    return limits.retain is None or cost.retained_bytes <= limits.retain
