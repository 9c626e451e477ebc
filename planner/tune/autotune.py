"""`optimize="measure"`: the best few plans timed on the arrays of the call, and the fastest of them remembered.

Predictions choose whom to time. Rounds are interleaved, so that what slows the machine for a while slows all; in each
a plan first runs once untimed, because a program pays for memory that the one before it gave back. Medians decide.
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
from planner.language.errors import PlannerError
from planner.language.units import seconds_text
from planner.program.frameworks import framework_of, load_backend
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Programs
from planner.program.serial import decode, encode
from planner.program.tree import Leaf, Node
from planner.search.alternatives import alternatives
from planner.search.verify import keep_fitting
from planner.tune.store import recall, remember, warn_of_damage
from planner.tune.tiles import tune_tiles
from planner.version import __version__

__all__ = ["Timings", "block_seconds", "candidates", "key_of", "autotune", "time_programs"]

MOST_CANDIDATES = 4
# Predictions are rarely off by more; what is predicted to be slower is not tried, nor what could fill the machine.
SLOWEST = 8.0
ROOM_FACTOR, ROOM_BYTES = 4, 2**28
# What is remembered of a plan, besides what was measured.
_PARTS = ("tree", "programs", "loop")
BUDGET_SECONDS, MOST_ROUNDS, BLOCK_SECONDS = 1.0, 15, 1e-3


@dataclasses.dataclass(frozen=True, slots=True)
class Timings:
    """What was measured of programs: seconds a run of each, one for each round, and whether Ctrl-C ended it."""

    seconds: tuple[tuple[float, ...], ...]
    interrupted: bool = False

    def median(self, number: int) -> float:
        """Median of a program; infinite where none of its rounds was completed."""
        return statistics.median(self.seconds[number]) if self.seconds[number] else float("inf")


def autotune(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> PlanRecord:
    """Return the plan remembered as the fastest for this problem, else the fastest of a few, timed now and remembered.

    Args:
        plan: what would be chosen without measuring.
        operands: arrays to run on; where any is a stand-in, a shape or a tracer, nothing is timed.
        indices: index arrays, by letter.

    Returns:
        A plan whose origin tells which of these it is.
    """
    if plan.origin.startswith("interrupted"):
        return plan
    key = key_of(plan, operands)
    if key is not None and (known := _recalled(plan, key)) is not None:
        return known
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
    said = [f"{what} {seconds_text(seconds[number])}" for what, number in places]
    said += [f"other tiles in {taken} of {tilings} kernels"] * bool(tilings)
    result = ", ".join(said)
    origin = f"{'interrupted: ' * clock.interrupted}measured: {result}"
    winner = dataclasses.replace(
        plan, tree=best.tree, programs=best.programs, loop=best.loop, compiled_bytes=best.compiled_bytes, origin=origin,
        proven=False,
    )  # fmt: skip
    if key is not None and not clock.interrupted:
        parts = (*_PARTS, "compiled_bytes")
        remember("measured", key, {"result": result, **{name: encode(getattr(winner, name)) for name in parts}})
    return winner


class _Clock:
    """Times plans on the arrays of a call, until Ctrl-C."""

    def __init__(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        self.operands, self.indices = operands, indices
        self.interrupted = False

    def program(self, plan: PlanRecord) -> Callable[[], None] | None:
        """The backend's trial of a plan; None where an operand or index array is none at all, but a shape."""
        if any(framework_of(x) is None for x in (*self.operands, *self.indices.values())):
            return None
        return load_backend(plan.backend).trial(plan, self.operands, self.indices)

    def timings(self, plans: Sequence[PlanRecord]) -> list[float]:
        """The median seconds of each plan; infinite where it did not run, or after Ctrl-C."""
        if self.interrupted:
            return [float("inf")] * len(plans)
        timings = time_programs([program for plan in plans if (program := self.program(plan)) is not None])
        self.interrupted = timings.interrupted
        return [timings.median(number) for number in range(len(plans))]


def _interrupted(plan: PlanRecord) -> PlanRecord:
    return dataclasses.replace(plan, origin=f"interrupted, not measured: {plan.origin}", proven=False)


def candidates(plan: PlanRecord) -> list[PlanRecord]:
    """Return the plans to time beside the chosen one: as good by what is minimised, within limits and reason.

    Time is what predictions are unsure of. Any other objective is known exactly: then only ties are timed.
    """
    key, cost = plan_key(plan.options.minimize), plan.cost
    others = [alternative.plan for alternative in alternatives(plan, 100)]
    # A lean loop may have been taken in place of a plan that is predicted to be faster: that one has its room.
    faster = (other.cost.peak_bytes for other in others if other.cost.seconds < cost.seconds)
    room = max(ROOM_FACTOR * cost.peak_bytes, ROOM_BYTES, *faster)
    found = []
    for other in others:
        ties = plan.options.minimize == "time" or key(other.cost)[0] == key(cost)[0]
        near = other.cost.seconds <= SLOWEST * cost.seconds and other.cost.peak_bytes <= room
        if ties and near and within(other.cost, plan.options):
            found.append(other)
    return keep_fitting(found[: MOST_CANDIDATES - 1])


def time_programs(
    programs: Sequence[Callable[[], object]],
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time programs in turn, round after round, until the budget is spent; one round is always made.

    Example:
        >>> timings = time_programs([lambda: sum(range(10)), lambda: sum(range(10_000))], budget_seconds=0.05)
        >>> timings.median(0) < timings.median(1)
        True

    Args:
        programs: each runs once and waits for its end. The first must run; another that fails, for want of memory say,
            is left out.
        budget_seconds: after which no further round begins.
        clock: tells the seconds.
    """
    seconds: list[list[float]] = [[] for _ in programs]
    running = list(range(len(programs)))
    begun = clock()
    try:
        for number in tuple(running):
            try:
                programs[number]()  # compiles, fills caches
            except Exception:  # memory of a kind that the framework has its own error for, say
                if number == 0:
                    raise
                running.remove(number)
        begun = clock()
        for done in range(MOST_ROUNDS):
            if done and clock() - begun > budget_seconds:
                break
            for number in running:
                seconds[number].append(block_seconds(programs[number], clock))
    except KeyboardInterrupt:
        return Timings(tuple(map(tuple, seconds)), True)
    return Timings(tuple(map(tuple, seconds)))


def block_seconds(
    program: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    least_seconds: float = BLOCK_SECONDS,
) -> float:
    """Return seconds of one run after an untimed one, averaged over as many as last for `least_seconds`."""
    program()
    calls, begun = 0, clock()
    while True:
        program()
        calls += 1
        if (spent := clock() - begun) >= least_seconds or calls == 1000:
            return spent / calls


# -- the key ---------------------------------------------------------------------------------------------


def key_of(plan: PlanRecord, operands: Sequence[Any]) -> dict[str, Any] | None:
    """Return all that the choice depends on, as JSON; None where a function is part of it."""
    options = plan.options
    if callable(options.minimize):
        return None
    backend = load_backend(plan.backend)
    arrays = [x for x in operands if framework_of(x) is not None]
    return {
        "planner": __version__,
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


def _recalled(plan: PlanRecord, key: Mapping[str, Any]) -> PlanRecord | None:
    """Return the remembered plan, after seeing that its steps are still offered, at the price that they had."""
    value = recall("measured", key)
    if value is None:
        return None
    try:
        result, (tree, programs, loop) = value["result"], (decode(value[name]) for name in _PARTS)
        compiled_bytes = value["compiled_bytes"]
        if not (isinstance(tree, (Leaf, Node)) and isinstance(programs, Programs) and isinstance(result, str)):
            raise ValueError("it holds no plan")
        if not (loop is None or isinstance(loop, Loop)):
            raise ValueError("its loop is none")
        if not (compiled_bytes is None or isinstance(compiled_bytes, int)):
            raise ValueError("its compiled bytes are none")
        table = load_backend(plan.backend).table
        winner = dataclasses.replace(
            plan, tree=tree, programs=programs, loop=loop, compiled_bytes=compiled_bytes, proven=False,
            origin=f"remembered: {result}",
        )  # fmt: skip
        whole = winner if loop is None else loop.body
        offered = all(table.offers(step.choice, step.op, whole.device) for step in whole.steps)
    except (PlannerError, ValueError, KeyError, TypeError, AttributeError) as error:
        warn_of_damage("measured", key, error)
        return None
    return winner if offered else None
