"""From a contraction to its plan: run the searches, compare what they found, take the best within the limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from planner.cost.limits import NO_LIMITS, Limits, keeps_within
from planner.cost.objective import OBJECTIVES, check_objective, plan_key
from planner.language.errors import PlannerLimitError
from planner.program.contraction import Contraction
from planner.program.plan import PlanRecord
from planner.program.tree import keep_values
from planner.search.refine import order_children, quicken_steps
from planner.search.slicing import fastest, loop_candidates
from planner.search.space import Candidate, SearchSpace, run_searches

__all__ = ["make_plan"]


def make_plan(contraction: Contraction) -> PlanRecord:
    """Choose the plan of a contraction.

    Raises:
        PlannerLimitError: no plan that was found satisfies the limits.
        SearchLimitError: the problem is beyond any search.
        PlannerError: an option is unknown.
    """
    check_objective(contraction.options.minimize)
    space = SearchSpace(contraction)
    best = _best(space)
    try:
        best = order_children(space, best)
    except KeyboardInterrupt:
        best = dataclasses.replace(best, proven=False, origin=f"interrupted: {best.origin}")
    return PlanRecord.of_contraction(
        contraction, tree=best.tree, programs=best.programs, naive_cost=space.naive().cost, proven=best.proven,
        origin=best.origin, loop=best.loop,
    )  # fmt: skip


def _best(space: SearchSpace) -> Candidate:
    """Return the best candidate within the limits.

    Without a limit, and where no limit binds, the objective's own search decides. Else what is kept is chosen together
    with the tree, under the limits; where that finds nothing, the least peak within the retain limit may do.

    Raises:
        PlannerLimitError: no candidate is within the limits.
    """
    options = space.options
    key = plan_key(options.minimize)
    limits = Limits(options.memory_limit, options.retain_limit)
    objectives = OBJECTIVES if callable(options.minimize) else (options.minimize,)
    candidates: list[Candidate] = []
    interrupted = False

    def consider(more: Iterable[Candidate]) -> None:
        """Collect candidates until Ctrl-C; then no further search is begun."""
        nonlocal interrupted
        if interrupted:
            return
        try:
            for candidate in more:
                candidates.append(candidate)
                interrupted |= candidate.interrupted
        except KeyboardInterrupt:
            interrupted = True

    def least() -> Candidate | None:
        allowed = [c for c in candidates if keeps_within(c.cost, limits)]
        best = min(allowed, key=lambda c: key(c.cost), default=None)
        if best is not None and limits == NO_LIMITS and options.minimize == "time":
            best = fastest(allowed)
        if best is None or not interrupted:
            return best
        return dataclasses.replace(best, proven=False, origin=f"interrupted: {best.origin}", interrupted=True)

    for objective in objectives:
        consider(_candidates(space, objective))
    best = min(candidates, key=lambda c: key(c.cost), default=None)
    if best is None or not keeps_within(best.cost, limits):
        for objective in objectives:
            consider(_candidates(space, objective, limits))
        allowed = least()
        if allowed is None or not allowed.proven:
            # Steps with less scratch, or a search that is not over all trees, may do what the objective's own did not.
            for objective, held in (("retained", NO_LIMITS), ("peak", Limits(None, options.retain_limit))):
                lean = _candidates(space, objective, held)
                consider(quicken_steps(space, candidate) for candidate in lean)
    if candidates:
        consider(loop_candidates(space, tuple(candidates)))
    allowed = least()
    if allowed is None:
        raise KeyboardInterrupt if interrupted else _limit_error(candidates, limits)
    return allowed


def _candidates(space: SearchSpace, objective: str, limits: Limits = NO_LIMITS) -> Iterator[Candidate]:
    for found, lower, origin in run_searches(space, space.options.optimize, objective, limits):
        programs = space.programs(found.tree, lower)
        proven = found.exact and origin == "exact" and objective == space.options.minimize and programs.row_major
        how = f"{origin}, {objective}"
        yield Candidate(programs, found.tree, lower, proven, how, interrupted=found.interrupted)
        if any(space.requires) and not (limits == NO_LIMITS and proven):
            bare = keep_values(found.tree, False)
            yield Candidate(space.programs(bare, lower), bare, lower, False, how)


def _limit_error(candidates: Sequence[Candidate], limits: Limits) -> PlannerLimitError:
    """Name limits that succeed: one of them raised and the other held where that is possible, else both."""
    memory, retain = limits
    costs = [candidate.cost for candidate in candidates]
    least_peak = min((c for c in costs if retain is None or c.retained_bytes <= retain),
                     key=lambda c: c.peak_bytes, default=None)  # fmt: skip
    least_retained = min((c for c in costs if memory is None or c.peak_bytes <= memory),
                         key=lambda c: c.retained_bytes, default=None)  # fmt: skip
    enough = Limits(memory, retain)
    if memory is not None and least_peak is not None:
        enough = enough._replace(memory=least_peak.peak_bytes)
    elif retain is not None and least_retained is not None:
        enough = enough._replace(retain=least_retained.retained_bytes)
    else:
        pair = min(costs, key=lambda c: (c.peak_bytes, c.retained_bytes))
        enough = Limits(pair.peak_bytes, pair.retained_bytes)
    return PlannerLimitError.naming("no plan was found", limits, enough)
