"""The plans that were not chosen, and why each loses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

from planner.cost.objective import OBJECTIVES, plan_key
from planner.language.errors import PlannerError, SearchLimitError
from planner.language.options import SEARCHES
from planner.language.resolve import shorten
from planner.program.build import Lowerer
from planner.program.plan import AnyPlan, PlanRecord
from planner.program.program import Programs
from planner.program.tree import keep_nothing
from planner.search.devices.collectives import add_exchanges
from planner.search.exact.steps import SearchResult
from planner.search.paths import find_joined_sets, left_to_right
from planner.search.slicing import worth_cutting
from planner.search.space import AUTO, PATH_STOP, SearchSpace

# From left to right the values of a network of more operands have hundreds of axes, and pricing them takes a minute.
MOST_LEFT_TO_RIGHT = 200
# The text of a plan shows so many of its steps, and so many characters of each.
MOST_STEPS, MOST_TEXT = 20, 120


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative(Generic[AnyPlan]):
    """A plan that was considered and not chosen.

    Example:
        >>> import planner
        >>> p = planner.plan("ij, jk, kl -> il", (2, 30), (30, 40), (40, 5), backend="numpy")
        >>> other = p.alternatives()[0]
        >>> other.plan.cost.seconds >= p.cost.seconds
        True

    Attributes:
        plan: the plan. It can be run like the chosen one.
        origin: the search that found it.
        loses: why it was not chosen, in figures.
    """

    plan: AnyPlan
    origin: str
    loses: str

    def __str__(self) -> str:
        steps = [shorten(str(step.op.spec), MOST_TEXT) for step in self.plan.programs.forward.steps]
        if len(steps) > MOST_STEPS:
            left_out = f"... {len(steps) - MOST_STEPS} more steps ..."
            steps = [*steps[: MOST_STEPS // 2], left_out, *steps[-MOST_STEPS // 2 :]]
        return f"{self.origin}: {'; '.join(steps) or 'no steps'} ({self.loses})"


def alternatives(plan: AnyPlan, most: int) -> tuple[Alternative[AnyPlan], ...]:
    """Return the best other plans: for other objectives, what is kept, other paths, and the naive plan.

    Args:
        plan: the chosen plan.
        most: how many other plans to return at most.
    """
    if isinstance(most, bool) or not hasattr(most, "__index__") or most < 0:
        raise PlannerError(f"most={most!r:.80} must be a number of plans, such as 5")
    space = SearchSpace(plan.contraction)
    seen = {_signature(plan.programs)}
    key = plan_key(plan.options.minimize)
    key(plan.cost)  # raises an error now if `minimize` was a function that was not read back from JSON
    others: list[tuple[Any, AnyPlan, str]] = []

    def consider(make: Callable[[], tuple[SearchResult | None, Lowerer]], origin: str, bare: bool = False) -> None:
        try:
            result, lower = make()
        except SearchLimitError:
            return
        if result is None:
            return
        tree = keep_nothing(result.tree) if bare else result.tree
        if bare:
            origin += ", keeps only the inputs"
        programs = space.programs(tree, lower)
        if _signature(programs) not in seen:
            seen.add(_signature(programs))
            other = dataclasses.replace(
                plan, tree=tree, programs=programs, proven=False, origin=origin, compiled_bytes=None
            )
            other = add_exchanges(other) if plan.mesh is not None else other
            others.append((key(other.cost), other, origin))

    for bare in (False, True) if any(space.requires) else (False,):
        for objective in OBJECTIVES:
            if space.may_be_exact(objective, AUTO):
                consider(partial(space.search, objective, AUTO), f"least {objective}", bare)
        for name in ("greedy", "left to right") if len(plan.operands) <= MOST_LEFT_TO_RIGHT else ("greedy",):
            path = left_to_right(len(plan.operands)) if name == "left to right" else space.path(name)
            consider(partial(space.search, "time", PATH_STOP, path), f"{name} path", bare)
    consider(lambda: space.search("flops", PATH_STOP, space.path("auto"), naive=True), "naive: takes first")
    others.sort(key=lambda entry: entry[0])
    return tuple(Alternative(other, origin, _why(plan, other)) for _, other, origin in others[:most])


def _signature(programs: Programs) -> tuple[Any, ...]:
    return tuple((step.op, step.choice.lowering) for step in programs.steps)


def _why(plan: PlanRecord, other: PlanRecord) -> str:
    """Return what rules another plan out, then by which figures it is worse or better than the chosen one."""
    options = plan.options
    parts = []
    if options.memory_limit is not None and other.cost.peak_bytes > options.memory_limit:
        parts.append("over the memory limit")
    if options.retain_limit is not None and other.cost.retained_bytes > options.retain_limit:
        parts.append("over the retain limit")
    if options.optimize not in SEARCHES:
        # The plan knows the path that an optimizer returned. Asked again, it might return another one.
        asked = options.optimize if isinstance(options.optimize, tuple) else plan.path
        if not find_joined_sets(asked, len(plan.operands)) <= find_joined_sets(other.path, len(plan.operands)):
            parts.append("another path than the given one")
    key = plan_key(options.minimize)
    if not parts and key(other.cost)[0] < key(plan.cost)[0]:
        leaner = options.minimize == "time" and plan.loop is not None and worth_cutting(plan.cost, other.cost)
        parts.append("as fast as far as predictions tell" if leaner else "better, but not among the candidates")
    for name, chosen, value in (
        ("seconds", plan.cost.seconds, other.cost.seconds),
        ("FLOPs", plan.cost.flops, other.cost.flops),
        ("peak", plan.cost.peak_bytes, other.cost.peak_bytes),
        ("retained", plan.cost.retained_bytes, other.cost.retained_bytes),
        ("moves", plan.cost.bytes_moved, other.cost.bytes_moved),
    ):
        if chosen != value:
            unit = "" if name in ("seconds", "FLOPs") else " bytes"
            parts.append(f"{value / chosen:.3g}x {name}" if chosen else f"{value:.6g}{unit} {name} instead of 0")
    return ", ".join(parts) or "a tie, later in canonical order"
