"""The naive plan: what the framework's own einsum does, and whether a plan needs more memory than that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from planner.cost.figures import PlanCost
from planner.language.options import SEARCHES
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.ops import Op
from planner.program.plan import NAIVE, PlanRecord
from planner.program.program import Programs
from planner.search.bounds import least_of_naive
from planner.search.refine import in_cheaper_orders
from planner.search.space import PATH_STOP, Candidate, SearchSpace

# A plan for the least time may take so many bytes more than einsum. All tensors of a small call are in the cache.
SLACK_BYTES = 2**16
# Plans of at most so many operands are compared with einsum's memory, and searched for again where values lie badly.
MOST_COMPARED = 5


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
    return in_cheaper_orders(found, space) if load_backend(space.backend).compiles else found


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
