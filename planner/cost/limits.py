"""The most bytes that a plan may allocate and retain."""

from __future__ import annotations

from typing import NamedTuple

from planner.cost.figures import PlanCost
from planner.language.options import Options

__all__ = ["NO_LIMITS", "Limits", "keeps_within", "within"]


class Limits(NamedTuple):
    """Most bytes that a plan may allocate and retain; None where there is no limit."""

    memory: int | None = None
    retain: int | None = None


NO_LIMITS = Limits()


def within(cost: PlanCost, options: Options) -> bool:
    """Whether a plan keeps to the limits."""
    return keeps_within(cost, Limits(options.memory_limit, options.retain_limit))


def keeps_within(cost: PlanCost, limits: Limits) -> bool:
    """Whether a cost keeps to both limits."""
    return (limits.memory is None or cost.peak_bytes <= limits.memory) and (
        limits.retain is None or cost.retained_bytes <= limits.retain
    )
