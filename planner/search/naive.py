"""The naive plan: what the framework's own einsum does. Plans that are slower, or need more memory, are replaced."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from planner.cost.figures import PlanCost
from planner.cost.limits import Limits
from planner.cost.objective import plan_key
from planner.language.errors import PlannerLimitError
from planner.language.options import SEARCHES
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.loops import least_seconds
from planner.program.ops import Op
from planner.program.plan import NAIVE, PlanRecord
from planner.program.program import Programs
from planner.search.bounds import least_of_naive
from planner.search.refine import order_values, prefer_autograd
from planner.search.slicing import CLOSE
from planner.search.space import PATH_STOP, Candidate, SearchSpace, marked_interrupted

# A plan for the least time may take so many bytes more than einsum. All tensors of a small call are in the cache.
SLACK_BYTES = 2**16
# Plans of at most so many operands are compared with einsum's memory, and searched for again where values lie badly.
MOST_COMPARED = 5
# A compiler gets the program of einsum if no plan is predicted to be faster by this: predictions are not that exact.
_CLEARLY = 1.1


def naive_plan(contraction: Contraction, as_run: bool = False, keeps_copies: bool = True) -> PlanRecord:
    """Return the naive plan: gather whole operands, then contract along opt_einsum's path.

    It keeps what the framework's own autograd keeps. That includes copies of operands that a product made: torch saves
    what it gives to `bmm`. Its steps allocate what the framework's own functions do; `as_run` says to count what our
    stock implementations allocate, which may copy more. A naive plan that is run itself keeps no such copies.
    """
    found = naive_candidate(SearchSpace(contraction), as_run)
    programs = found.programs
    copies_of = load_backend(contraction.backend).einsum_copies
    if keeps_copies and programs.backward is not None and copies_of is not None and not programs.copies:
        programs = with_einsum_copies(programs, copies_of)
    return PlanRecord.of_contraction(
        contraction, tree=found.tree, programs=programs, known_naive_cost=programs.cost, proven=False, origin=NAIVE
    )


def naive_candidate(space: SearchSpace, as_run: bool = True) -> Candidate:
    """Return the naive tree; `as_run` is as in `naive_plan`."""
    result, lower = space.search("flops", PATH_STOP, space.path("auto"), naive=True, as_run=as_run)
    assert result is not None
    found = Candidate(space.programs(result.tree, lower), result.tree, lower, False, NAIVE)
    return order_values(space, found) if load_backend(space.backend).compiles else found


def with_einsum_copies(programs: Programs, copies_of: Callable[[Op], Sequence[int]]) -> Programs:
    """Return the programs of a naive plan with the copies of operands that autograd keeps: `Backend.einsum_copies`."""
    cost = programs.cost
    assert programs.backward is not None
    assert cost.backward is not None
    wanted = {number for number, gradient in enumerate(programs.gradients) if gradient is not None}
    kept, steps = 0, []
    for step in programs.forward.steps:
        steps.append(dataclasses.replace(step, live_bytes=step.live_bytes + kept))
        if len(step.inputs) == 2:
            for variable, other, size in zip(step.inputs, step.inputs[::-1], copies_of(step.op), strict=True):
                # Of a computed value the copy is kept in place of the value.
                if other in wanted and programs.variables[variable].base < len(programs.gradients):
                    kept += size
        if wanted.intersection(step.inputs):
            wanted.update(step.outputs)
    if not kept:
        return programs
    back = [dataclasses.replace(step, live_bytes=step.live_bytes + kept) for step in programs.backward.steps]
    forward_peak = max([step.live_bytes for step in steps])
    backward_peak = cost.backward.peak_bytes + kept
    retained = cost.retained_bytes + kept
    return dataclasses.replace(
        programs,
        forward=dataclasses.replace(programs.forward, steps=tuple(steps), peak_bytes=forward_peak),
        backward=dataclasses.replace(programs.backward, steps=tuple(back), peak_bytes=backward_peak),
        cost=PlanCost.of(
            dataclasses.replace(cost.forward, peak_bytes=forward_peak, retained_bytes=retained),
            dataclasses.replace(cost.backward, peak_bytes=backward_peak, retained_bytes=retained),
        ),
    )


def is_compared(contraction: Contraction) -> bool:
    """Whether plans of a contraction are compared with einsum's memory. A search under limits can take seconds."""
    options = contraction.options
    is_usual = options.minimize == "time" and options.optimize in SEARCHES and not options.limited
    return is_usual and len(contraction.operands) <= MOST_COMPARED


def needed(plan: PlanRecord) -> int:
    """Return the bytes that count: those retained with gradients, the peak without."""
    return plan.cost.peak_bytes if plan.programs.backward is None else plan.cost.retained_bytes


def is_lean(plan: PlanRecord, other: PlanRecord) -> bool:
    """Whether a plan needs no more memory than another, or little."""
    return needed(plan) <= max(needed(other), SLACK_BYTES)


def needs_little(plan: PlanRecord) -> bool:
    """Whether a plan needs no more memory than any naive plan would, or little: then that need not be made."""
    return needed(plan) <= max(SLACK_BYTES, least_of_naive(plan.contraction))


def is_as_lean_as_einsum(plan: PlanRecord) -> bool:
    """Whether a plan needs no more memory than the naive plan where plans are compared with it."""
    if not is_compared(plan.contraction) or needs_little(plan):
        return True
    return is_lean(plan, naive_plan(plan.contraction, as_run=True))


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
    The framework's own einsum may need less memory than that. A plan that allocates more must save as large a part of
    the time as it needs more memory.

    Args:
        plan: the plan.
        loops: whether the plan may be a loop over slices.
        search: `planner.search.choose.make_plan`.
    """
    contraction = plan.contraction
    if contraction.symbols or plan.interrupted or not is_compared(contraction):
        return plan
    compiles = load_backend(contraction.backend).compiles
    gathers, trains = bool(contraction.resolved.spec.gathers), plan.programs.backward is not None
    has_choice = len(contraction.operands) > 2 or gathers
    if needs_little(plan) and not (compiles and has_choice):
        return plan
    naive = naive_plan(contraction, as_run=True)
    least, seconds = plan.cost.seconds, naive.cost.seconds
    # If both take as long, the plan may be proven.
    if compiles and has_choice and least < seconds <= _CLEARLY * least and is_lean(naive, plan):
        return _in_place_of(plan, naive, "within a tenth of the least time found")
    if not is_lean(plan, naive):
        # With gradients the naive plan is priced with copies that only torch's autograd keeps.
        plan = _as_lean(plan, naive, [] if trains and not compiles else [naive], loops, search)
    if compiles or gathers or trains or plan.interrupted:
        return plan
    einsum = naive_plan(contraction)
    if is_lean(plan, einsum):
        return plan
    lean = _as_lean(plan, einsum, [], loops, search)
    best = lean if lean.cost.seconds * needed(lean) < plan.cost.seconds * needed(plan) else plan
    return marked_interrupted(best) if lean.interrupted else best


def _as_lean(
    plan: PlanRecord, other: PlanRecord, found: list[PlanRecord], loops: bool, search: Callable[..., PlanRecord]
) -> PlanRecord:
    """Return the fastest plan that needs no more memory than another, or `plan` if none is found.

    A loop over slices comes in place of a plan without one only if it is `CLOSE` times as fast.

    Args:
        plan: the fastest plan.
        other: the other plan.
        found: plans that are known to need no more memory than it.
        loops: as of `no_worse_than_einsum`.
        search: as of `no_worse_than_einsum`.
    """
    contraction, options, trains = plan.contraction, plan.options, plan.programs.backward is not None
    most = max(needed(other), SLACK_BYTES)
    limits = Limits(None, most) if trains else Limits(most, None)
    limited = dataclasses.replace(options, memory_limit=limits.memory, retain_limit=limits.retain)
    contraction = dataclasses.replace(contraction, options=limited)
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
    return _in_calls_of_autograd(lean, limits) if trains else lean


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
