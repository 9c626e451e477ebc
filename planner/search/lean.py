"""Replaces plans that are slower than the naive plan, or need more memory than it or the framework's own einsum."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from planner.cost.limits import Limits, within
from planner.cost.objective import plan_key
from planner.language.errors import PlannerLimitError
from planner.language.options import SEARCHES
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.loops import least_seconds
from planner.program.plan import PlanRecord
from planner.search.naive import SLACK_BYTES, is_compared, is_lean, naive_plan, needed, needs_little
from planner.search.refine import prefer_autograd, quicken_steps
from planner.search.slicing import CLOSE
from planner.search.space import Candidate, SearchSpace, marked_interrupted

# A compiler gets the program of einsum if no plan is predicted to be faster by this: predictions are not that exact.
_CLEARLY = 1.1
# A plan that needs so many times the memory of the framework's own einsum is compared with leaner ones.
_MUCH_MORE = 1.1


def no_slower_than_naive(plan: PlanRecord) -> PlanRecord:
    """Return the plan, or the naive one if that is faster. On a card, where launches count, a search may end early."""
    contraction, options = plan.contraction, plan.options
    if plan.proven or options.minimize != "time" or options.optimize not in SEARCHES or options.limited:
        return plan
    if contraction.symbols or plan.device.kind == "cpu" or plan.interrupted:
        return plan
    naive = naive_plan(contraction, as_run=True, keeps_copies=False)
    if naive.cost.seconds >= plan.cost.seconds:
        return plan
    return _in_place_of(plan, naive, "faster than the trees that were searched")


def no_worse_than_einsum(plan: PlanRecord, loops: bool, search: Callable[..., PlanRecord]) -> PlanRecord:
    """Return the plan, or the fastest that allocates, or with gradients retains, no more than the naive plan does.

    Callers who replace einsum must not run out of memory. Those who set a limit have said what they have. Where einsum
    is compiled too, the naive plan is taken if it needs no more memory and is predicted to take about as long.

    Args:
        plan: the fastest plan.
        loops: whether the plan may be a loop over slices. One comes in place of a plan without one only if it is
            `CLOSE` times as fast.
        search: `planner.search.choose.make_plan`.
    """
    contraction, options = plan.contraction, plan.options
    if contraction.symbols or plan.interrupted or not is_compared(contraction):
        return plan
    compiles = load_backend(contraction.backend).compiles
    has_choice = len(contraction.operands) > 2 or bool(contraction.resolved.spec.gathers)
    if needs_little(plan) and not (compiles and has_choice):
        return plan
    naive = naive_plan(contraction, as_run=True)
    least, seconds = plan.cost.seconds, naive.cost.seconds
    # If both take as long, the plan may be proven.
    if compiles and has_choice and least < seconds <= _CLEARLY * least and is_lean(naive, plan):
        return _in_place_of(plan, naive, "within a tenth of the least time found")
    if is_lean(plan, naive):
        return _as_lean_as_calls(plan)
    trains = plan.programs.backward is not None
    contraction, limits = _limited_to(naive)
    # With gradients the naive plan is priced with copies that only torch's autograd keeps.
    found = [] if trains and not compiles else [naive]
    # No loop is expected to beat the fastest plan without limits plus the overhead of its slices.
    enough = CLOSE * (plan.cost.seconds + least_seconds(contraction))
    for in_loops in (False, True) if loops and options.optimize == "auto" else (loops,):
        if in_loops and options.optimize == "auto" and found and _fastest(found).cost.seconds < enough:
            break
        with contextlib.suppress(PlannerLimitError):
            found.append(search(contraction, loops=in_loops))
            if found[-1].interrupted:
                return _in_place_of(plan, found[-1], "as lean as einsum")
    if not found:
        return plan
    lean = _in_place_of(plan, _fastest(found), "as lean as einsum")
    return _in_calls_of_autograd(lean, limits) if trains else _as_lean_as_calls(lean)


def _as_lean_as_calls(plan: PlanRecord) -> PlanRecord:
    """Return the plan, or one that allocates no more than the framework's own einsum, if its time x memory is less.

    Torch's einsum may need less memory than the naive plan in planner's own functions, which copy whole operands. The
    plan's tree and the naive one are tried with lean steps, but only if the plan needs over `_MUCH_MORE` times as much.
    """
    contraction, backend = plan.contraction, load_backend(plan.contraction.backend)
    alone = plan.programs.backward is None and not contraction.resolved.spec.gathers and plan.loop is None
    if backend.einsum_cost is None or contraction.device.kind != "cpu" or not alone:
        return plan
    einsum = naive_plan(contraction)
    if needed(plan) <= _MUCH_MORE * max(needed(einsum), SLACK_BYTES):
        return plan
    limited, _ = _limited_to(einsum)
    space, allowed = SearchSpace(limited), list[Candidate]()
    for tree in dict.fromkeys((plan.tree, einsum.tree)):
        lower = space.lowerer("peak")
        lean = quicken_steps(space, Candidate(space.programs(tree, lower), tree, lower, False, plan.origin))
        if within(lean.cost, limited.options):
            allowed.append(lean)
    best = min(allowed, key=lambda each: each.cost.seconds, default=None)
    if best is None or best.cost.seconds * best.cost.peak_bytes >= plan.cost.seconds * needed(plan):
        return plan
    return _in_place_of(plan, best, "as lean as einsum")


def _limited_to(other: PlanRecord) -> tuple[Contraction, Limits]:
    """Return a plan's contraction with the plan's memory, or little, as its limit; and the limits."""
    contraction, most = other.contraction, max(needed(other), SLACK_BYTES)
    limits = Limits(None, most) if other.programs.backward is not None else Limits(most, None)
    options = dataclasses.replace(contraction.options, memory_limit=limits.memory, retain_limit=limits.retain)
    return dataclasses.replace(contraction, options=options), limits


def _in_calls_of_autograd(plan: PlanRecord, limits: Limits) -> PlanRecord:
    """Return the plan, or one within the limits that the framework's own autograd runs, or einsum's own calls."""
    space = SearchSpace(plan.contraction)
    best = Candidate(plan.programs, plan.tree, space.lowerer("time"), False, plan.origin)
    try:
        found = prefer_autograd(space, best, most=limits)
    except KeyboardInterrupt:
        return _in_place_of(plan, marked_interrupted(best))
    return plan if found is best else _in_place_of(plan, found)


def _fastest(plans: Sequence[PlanRecord]) -> PlanRecord:
    """Return the plan that takes the least time; one with a loop only if it is `CLOSE` times as fast as the others."""
    key = plan_key("time")
    best = min(plans, key=lambda plan: key(plan.cost))
    whole = min((plan for plan in plans if plan.loop is None), key=lambda plan: key(plan.cost), default=best)
    return best if CLOSE * best.cost.seconds <= whole.cost.seconds else whole


def _in_place_of(plan: PlanRecord, other: PlanRecord | Candidate, why: str = "") -> PlanRecord:
    """Return another plan of a contraction, or a candidate, as the plan that was chosen."""
    bound = plan.cost.bound if other.loop is None else other.cost.bound  # of a loop, one that holds for loops
    return PlanRecord.of_contraction(
        plan.contraction,
        tree=other.tree,
        programs=dataclasses.replace(other.programs, cost=dataclasses.replace(other.cost, bound=bound)),
        proven=False,
        origin=f"{other.origin}, {why}" if why else other.origin,
    )
