"""The plans that were not taken, and what each loses by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

from planner.cost.objective import OBJECTIVES, plan_key
from planner.language.errors import SearchLimitError
from planner.language.options import SEARCHES
from planner.program.build import Lowerer
from planner.program.plan import AnyPlan, PlanRecord
from planner.program.program import Programs
from planner.program.tree import keep_values
from planner.search.dynamic import SearchResult
from planner.search.paths import joined_by, left_to_right
from planner.search.slicing import worth_cutting
from planner.search.space import AUTO_WORK, MOST_TRIED, PATH_WORK, SearchSpace

__all__ = ["Alternative", "alternatives"]


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative(Generic[AnyPlan]):
    """A plan that was considered and not taken.

    Attributes:
        plan: the plan, as runnable as the chosen one.
        origin: where it comes from.
        loses: why it was not taken, in figures.
    """

    plan: AnyPlan
    origin: str
    loses: str

    def __str__(self) -> str:
        steps = "; ".join(str(step.op.spec) for step in self.plan.programs.forward.steps)
        return f"{self.origin}: {steps or 'no steps'} ({self.loses})"


def alternatives(plan: AnyPlan, most: int) -> tuple[Alternative[AnyPlan], ...]:
    """Return the best other plans: other objectives, other keep settings, other paths, the naive way."""
    space = SearchSpace(plan.contraction)
    seen = {_signature(plan.programs)}
    key = plan_key(plan.options.minimize)
    key(plan.cost)  # a function that is not there any more shows here
    found: list[tuple[Any, AnyPlan, str]] = []

    def consider(make: Callable[[], tuple[SearchResult | None, Lowerer]], origin: str, bare: bool = False) -> None:
        try:
            known, lower = make()
        except SearchLimitError:
            return
        if known is None:
            return
        tree = keep_values(known.tree, False) if bare else known.tree
        origin += ", keeps only the inputs" * bare
        programs = space.programs(tree, lower)
        if _signature(programs) not in seen:
            seen.add(_signature(programs))
            other = dataclasses.replace(
                plan, tree=tree, programs=programs, proven=False, origin=origin, loop=None, compiled_bytes=None
            )
            found.append((key(programs.cost), other, origin))

    exact = space.exact_work() <= MOST_TRIED * AUTO_WORK
    for bare in (False, True) if any(space.requires) else (False,):
        for objective in OBJECTIVES:
            if exact:
                consider(partial(space.search, objective, AUTO_WORK), f"least {objective}", bare)
        for name in ("greedy", "left to right"):
            path = left_to_right(len(plan.operands)) if name == "left to right" else space.path(name)
            consider(partial(space.search, "time", PATH_WORK, path), f"{name} path", bare)
    consider(lambda: space.search("flops", PATH_WORK, space.path("auto"), naive=True), "naive: takes first")
    found.sort(key=lambda entry: entry[0])
    return tuple(Alternative(p, origin, _why(plan, p)) for _, p, origin in found[:most])


def _signature(programs: Programs) -> tuple[Any, ...]:
    steps = programs.forward.steps + (programs.backward.steps if programs.backward else ())
    return tuple((step.op, step.choice.lowering) for step in steps)


def _why(plan: PlanRecord, other: PlanRecord) -> str:
    """What rules another plan out, then figures by which it is worse, and better, than the chosen one."""
    options = plan.options
    parts = []
    if options.memory_limit is not None and other.cost.peak_bytes > options.memory_limit:
        parts.append("over the memory limit")
    if options.retain_limit is not None and other.cost.retained_bytes > options.retain_limit:
        parts.append("over the retain limit")
    if options.optimize not in SEARCHES:
        # What an optimizer's path was, the plan knows; asked again, it may answer otherwise.
        given = options.optimize if isinstance(options.optimize, tuple) else plan.path
        if not joined_by(given, len(plan.operands)) <= joined_by(other.path, len(plan.operands)):
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
