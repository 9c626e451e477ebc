"""`optimize="measure"`: times the best few plans on the arrays of the call, and remembers the fastest.

Predictions choose the plans to time. The plans take turns in rounds, so that anything that slows the machine for a
while slows all of them. In each round a plan first runs once untimed, because a program pays for memory that the one
before it gave back. Medians decide.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.cost.layout import row_major
from planner.cost.limits import within
from planner.cost.objective import plan_key
from planner.cost.rates import cpu_name
from planner.cost.store import remember
from planner.language.units import seconds_text
from planner.program.frameworks import framework_of, load_backend
from planner.program.plan import PlanRecord
from planner.program.program import Programs
from planner.program.serial import encode
from planner.program.tree import Tree
from planner.search.alternatives import alternatives
from planner.search.stored import recall_plan
from planner.search.verify import keep_fitting
from planner.tune.tiles import tune_tiles
from planner.tune.timing import block_seconds
from planner.version import __version__

MOST_CANDIDATES = 4
# Predictions are rarely off by a larger factor, so plans that are predicted to be slower are not timed. Neither are
# plans that could fill the memory.
SLOWEST = 8.0
ROOM_FACTOR, ROOM_BYTES = 4, 2**28
# The fields of a plan that are remembered, besides the measurement.
_PARTS = ("tree", "programs")
BUDGET_SECONDS, MOST_ROUNDS = 1.0, 15


@dataclasses.dataclass(frozen=True, slots=True)
class Timings:
    """Measured times: seconds of one run for each program and round, and whether Ctrl-C ended the rounds."""

    seconds: tuple[tuple[float, ...], ...]
    interrupted: bool = False

    def median(self, number: int) -> float:
        """Return a program's median seconds; infinite if none of its rounds was completed."""
        return statistics.median(self.seconds[number]) if self.seconds[number] else float("inf")


def autotune(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> PlanRecord:
    """Return the plan that is remembered as the fastest; if there is none, time a few plans and remember the fastest.

    Args:
        plan: the plan that is chosen without measuring.
        operands: the arrays to run on. If one is a stand-in, a shape or a tracer, nothing is timed.
        indices: the index arrays, by letter.

    Returns:
        The plan. Its origin says where it comes from.
    """
    if plan.interrupted:
        return plan
    key = key_of(plan, operands)
    if key is not None and (remembered := _recall_plan(plan, key)) is not None:
        return remembered
    clock = _Clock(operands, indices)
    if clock.program(plan) is None:
        return dataclasses.replace(plan, origin=f"not measured, no values to time: {plan.origin}")
    try:
        others = candidates(plan)
    except KeyboardInterrupt:
        return _interrupted(plan)
    tried = [plan, *others]
    seconds = clock.timings(tried) if len(tried) > 1 else [float("inf")]
    order = sorted(range(len(tried)), key=seconds.__getitem__)
    counted = sum(median < float("inf") for median in seconds)
    if clock.interrupted and not counted:
        return _interrupted(plan)
    best, tilings, taken = tune_tiles(tried[order[0]], clock.timings)
    if len(tried) == 1 and not tilings:
        return dataclasses.replace(plan, origin=f"measured: no other plan comes near; {plan.origin}")
    places = zip((f"best of {counted},", "next"), order[:counted], strict=False)
    parts = [f"{what} {seconds_text(seconds[number])}" for what, number in places]
    if tilings:
        parts.append(f"other tiles in {taken} of {tilings} kernels")
    result = ", ".join(parts)
    origin = f"{'interrupted: ' * clock.interrupted}measured: {result}"
    winner = dataclasses.replace(
        plan,
        tree=best.tree,
        programs=best.programs,
        compiled_bytes=best.compiled_bytes,
        origin=origin,
        proven=False,
    )
    if key is not None and not clock.interrupted:
        fields = {name: encode(getattr(winner, name)) for name in (*_PARTS, "compiled_bytes")}
        remember("measured", key, {"result": result, **fields})
    return winner


class _Clock:
    """Times plans on the arrays of a call, until Ctrl-C."""

    def __init__(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        self.operands, self.indices = operands, indices
        self.interrupted = False

    def program(self, plan: PlanRecord) -> Callable[[], None] | None:
        """Return the backend's trial of a plan; None if an operand or index array is only a shape."""
        if any(framework_of(x) is None for x in (*self.operands, *self.indices.values())):
            return None
        return load_backend(plan.backend).trial(plan, self.operands, self.indices)

    def timings(self, plans: Sequence[PlanRecord]) -> list[float]:
        """Return the median seconds of each plan; infinite if the plan did not run, or after Ctrl-C."""
        if self.interrupted:
            return [float("inf")] * len(plans)
        timings = time_programs([program for plan in plans if (program := self.program(plan)) is not None])
        self.interrupted = timings.interrupted
        return [timings.median(number) for number in range(len(plans))]


def _interrupted(plan: PlanRecord) -> PlanRecord:
    return dataclasses.replace(plan, origin=f"interrupted, not measured: {plan.origin}", proven=False)


def candidates(plan: PlanRecord) -> list[PlanRecord]:
    """Return the plans to time beside the chosen one.

    They are within the limits, not predicted to be far slower, and do not need far more memory. Only predictions of
    time are unsure. Any other objective is known exactly, so for it only plans with the same value are timed.
    """
    key, cost = plan_key(plan.options.minimize), plan.cost
    others = [alternative.plan for alternative in alternatives(plan, 100)]
    # If a lean loop was chosen in place of a plan that is predicted to be faster, that plan may be timed too.
    faster = (other.cost.peak_bytes for other in others if other.cost.seconds < cost.seconds)
    room = max(ROOM_FACTOR * cost.peak_bytes, ROOM_BYTES, *faster)
    near_ones = []
    for other in others:
        ties = plan.options.minimize == "time" or key(other.cost)[0] == key(cost)[0]
        near = other.cost.seconds <= SLOWEST * cost.seconds and other.cost.peak_bytes <= room
        if ties and near and within(other.cost, plan.options):
            near_ones.append(other)
    return keep_fitting(near_ones[: MOST_CANDIDATES - 1])


def time_programs(
    programs: Sequence[Callable[[], object]],
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time programs in turn, round after round, until the budget is spent. One round always runs.

    Example:
        >>> timings = time_programs([lambda: sum(range(10)), lambda: sum(range(10_000))], budget_seconds=0.05)
        >>> timings.median(0) < timings.median(1)
        True

    Args:
        programs: functions that run once and wait for the end. The first must not fail. Another that fails, for
            example because memory is short, is left out.
        budget_seconds: no further round begins after so many seconds.
        clock: returns the time in seconds.
    """
    seconds: list[list[float]] = [[] for _ in programs]
    running = list(range(len(programs)))
    begun = clock()
    try:
        for number in tuple(running):
            try:
                programs[number]()  # compiles, fills caches
            except Exception:  # frameworks have errors of their own for a lack of memory
                if number == 0:
                    raise
                running.remove(number)
        begun = clock()
        for completed in range(MOST_ROUNDS):
            if completed and clock() - begun > budget_seconds:
                break
            for number in running:
                seconds[number].append(block_seconds(programs[number], clock))
    except KeyboardInterrupt:
        return Timings(tuple(map(tuple, seconds)), True)
    return Timings(tuple(map(tuple, seconds)))


# -- the key ---------------------------------------------------------------------------------------------


def key_of(plan: PlanRecord, operands: Sequence[Any]) -> dict[str, Any] | None:
    """Return everything that the choice depends on, as JSON; None if a function is part of it."""
    options = plan.options
    if callable(options.minimize):
        return None
    backend = load_backend(plan.backend)
    arrays = [x for x in operands if framework_of(x) is not None]
    return {
        "planner": __version__,
        "format": 3,  # of the programs: guards and loops are steps
        "spec": plan.text,
        "resolved": encode(plan.resolved),
        "index_shapes": encode(plan.index_shapes),
        "operands": [
            [list(o.shape), o.dtype, list(o.strides or row_major(o.shape)), o.requires_grad] for o in plan.operands
        ],
        "dtype": plan.dtype,
        "index_mode": plan.index_mode,
        "options": encode(options),
        "device": encode(plan.device),
        "backend": plan.backend,
        "environment": {"processor": cpu_name(), **backend.environment(arrays)},
    }


def _recall_plan(plan: PlanRecord, key: Mapping[str, Any]) -> PlanRecord | None:
    """Return the remembered plan if the backend still has its implementations, at the same costs; else None."""

    def make(value: Mapping[str, Any], tree: Tree, programs: Programs) -> PlanRecord:
        result, compiled_bytes = value["result"], value["compiled_bytes"]
        if not isinstance(result, str):
            raise ValueError("it holds no plan")
        if not (compiled_bytes is None or isinstance(compiled_bytes, int)):
            raise ValueError("its compiled bytes are not a number")
        return dataclasses.replace(
            plan,
            tree=tree,
            programs=programs,
            compiled_bytes=compiled_bytes,
            proven=False,
            origin=f"remembered: {result}",
        )

    return recall_plan("measured", key, make)
