"""What a plan minimises: a key of step costs for choosing implementations, and a key of plan costs."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from planner.cost.figures import Cost, StepCost
from planner.language.errors import PlannerError

OBJECTIVES = ("time", "flops", "peak", "retained", "bytes")

Objective = str | Callable[[Cost], Any]
StepKey = Callable[[StepCost], tuple[int, ...]]


def check_objective(minimize: Objective) -> None:
    """Raise an error if the objective is unknown."""
    if not callable(minimize) and minimize not in OBJECTIVES:
        raise PlannerError(
            f"minimize={minimize!r} is unknown: take one of {', '.join(map(repr, OBJECTIVES))}, "
            "or a function of the cost"
        )


_STEP_KEYS: dict[str, StepKey] = {
    "flops": lambda c: (c.flops, c.picoseconds, c.bytes_moved, c.scratch_bytes),
    "bytes": lambda c: (c.bytes_moved, c.picoseconds, c.flops, c.scratch_bytes),
    "peak": lambda c: (c.scratch_bytes, c.picoseconds, c.flops, c.bytes_moved),
    "time": lambda c: (c.picoseconds, c.flops, c.bytes_moved, c.scratch_bytes),
}


def step_key(minimize: Objective) -> StepKey:
    """Return the key that chooses a step's implementation. Ties go by time, FLOPs, then bytes."""
    return _STEP_KEYS.get("" if callable(minimize) else minimize, _STEP_KEYS["time"])


def plan_key(minimize: Objective) -> Callable[[Cost], tuple[Any, ...]]:
    """Return the key that compares plans. Ties go by time, FLOPs, then peak."""

    def key(cost: Cost) -> tuple[Any, ...]:
        ties = (cost.seconds, cost.flops, cost.peak_bytes)
        if callable(minimize):
            try:
                score = minimize(cost)
            except Exception as error:
                raise PlannerError(
                    f"minimize= raised {type(error).__name__}: {error}; it is called with the cost of a plan, which "
                    "has seconds, flops, bytes_moved, peak_bytes and retained_bytes, and returns a number or a tuple "
                    "of numbers; less is better"
                ) from error
            if not isinstance(score, (numbers.Real, tuple)):
                raise PlannerError(
                    f"minimize= gave {score!r:.80} for a cost: return a number or a tuple of numbers; less is better"
                )
            return (score, *ties)
        first = {
            "time": cost.seconds,
            "flops": cost.flops,
            "peak": cost.peak_bytes,
            "retained": cost.retained_bytes,
            "bytes": cost.bytes_moved,
        }[minimize]
        return (first, *ties)

    return key
