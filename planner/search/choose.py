"""Chooses the plan of a contraction: runs the searches, compares their results, takes the best within the limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from planner.cost.limits import NO_LIMITS, Limits, keeps_within, limits_of
from planner.cost.objective import OBJECTIVES, check_objective, plan_key
from planner.language.cached import cached_until_cleared
from planner.language.errors import PlannerLimitError
from planner.language.options import SEARCHES
from planner.program.build import Lowerer
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.plan import PlanRecord
from planner.search.bounds import least_by_sizes, least_of_loops, lower_bound
from planner.search.devices.collectives import add_exchanges
from planner.search.exact.steps import SearchResult
from planner.search.lean import no_slower_than_naive, no_worse_than_einsum
from planner.search.many.searches import run_searches
from planner.search.naive import MOST_COMPARED, naive_candidate
from planner.search.refine import (
    is_fastest_kept,
    keep_inputs,
    order_children,
    order_values,
    prefer_autograd,
    quicken_steps,
    with_row_major_results,
)
from planner.search.slicing import allocates_little, fastest, loop_candidates
from planner.search.space import ADDITIVE, AUTO, PATH_STOP, Candidate, SearchSpace, marked_interrupted
from planner.search.stored import remembered

# Plans of up to `MOST_COMPARED` operands are searched for again if they take `_MUCH` times what the search predicted.
# From `_MORE` times on they are compared with the naive tree.
_MUCH, _MORE = 1.1, 1.05


def make_plan(
    contraction: Contraction, given: Callable[[SearchSpace], Candidate] | None = None, loops: bool = True
) -> PlanRecord:
    """Choose the plan of a contraction. What a long search chose is remembered on disk, see `planner.search.stored`.

    Args:
        contraction: what to plan.
        given: returns the candidate to take in place of the searches' results; see `planner.search.family`.
        loops: whether the plan may be a loop over slices.

    Raises:
        PlannerLimitError: no plan that was found is within the limits.
        SearchLimitError: the problem is too large for any search.
        PlannerError: an option is unknown.
    """
    check_objective(contraction.options.minimize)
    if given is not None:
        return _search_plan(contraction, given, loops)
    return remembered(contraction, loops, lambda: _search_plan(contraction, None, loops))


def _search_plan(contraction: Contraction, given: Callable[[SearchSpace], Candidate] | None, loops: bool) -> PlanRecord:
    """Search for the plan of a contraction; the arguments are those of `make_plan`."""
    space, on_mesh = SearchSpace(contraction), contraction.mesh is not None
    best, candidates = _best(space, given, loops and not on_mesh)
    bound = None
    try:
        best = best if given else prefer_autograd(space, order_children(space, best))
        # A member of a family is not searched for itself; `PlanRecord.gap` does that when it is asked for.
        bound = None if given else lower_bound(space, best, candidates)
        plan = _plan_of(contraction, best, bound)
        if given is None and not on_mesh:
            plan = no_worse_than_einsum(no_slower_than_naive(plan), loops, make_plan)
    except KeyboardInterrupt:
        plan = _plan_of(contraction, marked_interrupted(best), bound)
    return add_exchanges(plan) if on_mesh else plan


def _plan_of(contraction: Contraction, best: Candidate, bound: float | None) -> PlanRecord:
    cost = dataclasses.replace(best.cost, bound=bound)
    return PlanRecord.of_contraction(
        contraction,
        tree=best.tree,
        programs=dataclasses.replace(best.programs, cost=cost),
        proven=best.proven,
        origin=best.origin,
    )


def check_interrupt(plan: PlanRecord) -> PlanRecord:
    """Return a plan.

    Raises:
        KeyboardInterrupt: Ctrl-C ended its search.
    """
    if plan.interrupted:
        raise KeyboardInterrupt
    return plan


def find_bound(contraction: Contraction, in_loops: bool = False) -> float | None:
    """Return what no plan of a contraction costs less than, by a search without limits where all trees are searched.

    With `in_loops` no plan with a loop over slices costs less either. None for contractions with limits, with a path of
    the caller's, or on a mesh.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the search. Its bound would be loose, and is not remembered.
    """
    options = contraction.options
    if options.limited or options.optimize not in SEARCHES or contraction.mesh is not None:
        return None
    return _find_bound(contraction, in_loops)


@cached_until_cleared(256)
def _find_bound(contraction: Contraction, in_loops: bool) -> float | None:
    space, objective = SearchSpace(contraction), contraction.options.minimize
    if in_loops and objective in ("time", "bytes"):
        return max(least_by_sizes(space, objective), least_of_loops(space, objective))
    if space.may_be_exact(objective, AUTO):
        return check_interrupt(make_plan(contraction, loops=False)).cost.bound
    return least_by_sizes(space, objective)


class _Found:
    """The candidates that the searches for one plan have found so far.

    Attributes:
        candidates: the candidates.
        interrupted: whether Ctrl-C ended a search. After it none begins.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space, self.limits, self._key = space, limits_of(space.options), plan_key(space.options.minimize)
        self.candidates: list[Candidate] = []
        self.interrupted = False
        self._searched: set[tuple[str, Limits, bool]] = set()

    def add(self, more: Iterable[Candidate]) -> None:
        """Collect candidates until Ctrl-C."""
        if self.interrupted:
            return
        try:
            for candidate in more:
                self.candidates.append(candidate)
                self.interrupted |= candidate.interrupted
        except KeyboardInterrupt:
            self.interrupted = True

    def search(self, objectives: Iterable[str], limits: Limits = NO_LIMITS, quicker: bool = False) -> None:
        """Run the searches for some objectives that did not run yet."""
        for objective in objectives:
            if (objective, limits, quicker) not in self._searched:
                self._searched.add((objective, limits, quicker))
                found = _candidates(self.space, objective, limits)
                self.add((quicken_steps(self.space, candidate) for candidate in found) if quicker else found)

    def best(self) -> Candidate | None:
        """Return the best candidate."""
        return min(self.candidates, key=lambda c: self._key(c.cost), default=None)

    def best_allowed(self) -> Candidate | None:
        """Return the best candidate within the limits."""
        allowed = [c for c in self.candidates if keeps_within(c.cost, self.limits)]
        best = min(allowed, key=lambda c: self._key(c.cost), default=None)
        if best is not None and self.limits == NO_LIMITS and self.space.options.minimize == "time":
            best = fastest(allowed)
        if best is None or not self.interrupted:
            return best
        return dataclasses.replace(marked_interrupted(best), interrupted=True)


def _best(
    space: SearchSpace, given: Callable[[SearchSpace], Candidate] | None, loops: bool
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate within the limits, and all that were found; the arguments are those of `make_plan`.

    First the search for the objective runs without limits. If its result is within the limits, it is the best.
    Otherwise a search under the limits chooses what is kept together with the tree. If that finds nothing, the searches
    for the least retained bytes and the least peak may still find a plan within the limits. Loops over slices come
    last.

    Raises:
        PlannerLimitError: no candidate is within the limits.
    """
    found = _Found(space)
    try:
        _search(found, given, loops)
    except KeyboardInterrupt:
        found.interrupted = True
    chosen = found.best_allowed()
    if chosen is None:
        raise KeyboardInterrupt if found.interrupted else _limit_error(found.candidates, found.limits, space.is_late())
    return chosen, found.candidates


def _search(found: _Found, given: Callable[[SearchSpace], Candidate] | None, loops: bool) -> None:
    """Run the searches for the best candidate, see `_best`. Ctrl-C within a search leaves what others have found."""
    space, options, limits, candidates = found.space, found.space.options, found.limits, found.candidates
    objectives = OBJECTIVES if callable(options.minimize) else (options.minimize,)
    if given is not None:
        found.add([_made(partial(given, space))])
    else:
        found.search(objectives)
    best = found.best()
    if best is not None and _lies_badly(space, best, _MORE):
        if _lies_badly(space, best, _MUCH):
            found.search(ADDITIVE)
            found.add(with_row_major_results(space, best))
        if not any(space.requires):
            found.add(map(naive_candidate, [space]))
        best = found.best()
    if best is not None and not best.proven and given is None and options.minimize in ("peak", "bytes"):
        if options.minimize == "peak" and space.index_bytes:
            found.search(OBJECTIVES)  # the search for the least peak does not know what guards need
        if load_backend(space.backend).strided and len(space.operands) <= MOST_COMPARED and not space.is_late():
            # They do not know what is copied of values that lie otherwise than row-major. Einsum's path may copy less.
            found.search(ADDITIVE)
            found.add(_along_path(space))
        best = found.best()
    if best is None or not keeps_within(best.cost, limits):
        known = len(candidates)
        found.search(objectives, limits)
        if limits.memory is not None and candidates[known:]:
            # As values really lie, steps may copy what the search did not see.
            excess = candidates[known].cost.peak_bytes - limits.memory
            if 0 < excess < limits.memory:
                found.search(objectives, limits._replace(memory=limits.memory - excess))
        within_limits = found.best_allowed()
        if within_limits is None or not within_limits.proven:
            # Searches for other objectives may find what this one missed, as they may search other trees where not
            # all can be searched.
            found.search(["retained"], quicker=True)
            found.search(["peak"], Limits(None, options.retain_limit), quicker=True)
        if found.best_allowed() is None and space.index_bytes:
            found.search(OBJECTIVES)  # the searches do not know what guards need: any of their results may do
    if candidates and loops:
        tried: Iterable[Candidate] = candidates
        if given is None and best is not None and not allocates_little(best.programs):
            tried = _with_slow_ones(space, candidates)  # loops may go around any tree
        found.add(loop_candidates(space, tuple(tried)))


def _candidates(space: SearchSpace, objective: str, limits: Limits = NO_LIMITS) -> Iterator[Candidate]:
    """Yield the result of each search for an objective, and the same tree with nothing kept but the inputs."""
    # Searches compare peaks as if every value were in memory.
    about_peaks = objective == "peak" or limits.memory is not None
    can_prove = objective == space.options.minimize and not (about_peaks and load_backend(space.backend).compiled_peak)
    can_prove &= limits in (NO_LIMITS, limits_of(space.options))

    def candidate_of(result: SearchResult, lower: Lowerer, search_name: str) -> Candidate:
        programs = space.programs(result.tree, lower)
        exact = result.exact and search_name == "exact"
        origin = f"{search_name}{' in part' * (search_name == 'exact' and not exact)}, {objective}"
        bounds = can_prove and limits == NO_LIMITS and objective in ADDITIVE and search_name == "exact"
        found = result if bounds else None
        candidate = Candidate(programs, result.tree, lower, False, origin, result.interrupted, found)
        candidate = order_values(space, candidate)
        # The search takes intermediates to be row-major, and guards to need no memory. Where that does not hold, a plan
        # may cost more or less than its score.
        # Of two equal steps one may have a named row, and the programs have it in both.
        scored = programs.row_major and objective != "peak" and not result.names
        as_searched = scored or plan_key(objective)(candidate.cost)[0] <= _score(space, objective, result)
        return dataclasses.replace(candidate, proven=exact and can_prove and as_searched)

    for result, lower, search_name in run_searches(space, space.options.optimize, objective, limits):
        yield (candidate := _made(partial(candidate_of, result, lower, search_name)))
        is_fastest = limits == NO_LIMITS and (candidate.proven or is_fastest_kept(space, candidate))
        if any(space.requires) and not is_fastest:
            yield _made(partial(keep_inputs, space, candidate))
        if candidate.interrupted and not result.interrupted:
            return


def _along_path(space: SearchSpace) -> Iterator[Candidate]:
    """Yield the candidate along opt_einsum's path, which einsum takes, with the best implementations of its steps."""
    if space.options.optimize in SEARCHES and len(space.operands) > 1:
        result, lower = space.search(space.options.minimize, PATH_STOP, space.path("auto"))
        if result is not None:
            yield Candidate(space.programs(result.tree, lower), result.tree, lower, False, "opt_einsum auto")


def _made(make: Callable[[], Candidate]) -> Candidate:
    """Return the candidate that a function makes. After Ctrl-C it is made again, as its tree is known.

    A second Ctrl-C drops it.
    """
    try:
        return make()
    except KeyboardInterrupt:
        return dataclasses.replace(make(), proven=False, interrupted=True)


def _with_slow_ones(space: SearchSpace, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield candidates, and after each the one that `_candidates` left out as it takes longer."""
    for candidate in candidates:
        yield candidate
        if any(space.requires) and not candidate.proven and is_fastest_kept(space, candidate):
            yield keep_inputs(space, candidate)


def _lies_badly(space: SearchSpace, best: Candidate, times: float) -> bool:
    """Whether a small plan takes so many times what the search thought, which took intermediates to be row-major.

    Then another tree may be faster, and searches for other objectives may know it.
    """
    if best.found is None or space.options.minimize != "time" or len(space.operands) > MOST_COMPARED:
        return False
    return best.cost.seconds > times * _score(space, "time", best.found)


def _score(space: SearchSpace, objective: str, result: SearchResult) -> float:
    """Return the score of a search, as plans measure it."""
    if objective == "peak":
        peak: int = result.score[0]
        return peak + space.index_bytes
    first: int = result.score[0][0]
    return first * 1e-12 if objective == "time" else first


def _limit_error(candidates: Sequence[Candidate], limits: Limits, late: bool) -> PlannerLimitError:
    """Return an error that names limits that succeed. If possible one limit stays as it is, and the other is raised."""
    why = "no plan was found" + " before the deadline ended the search" * late
    memory, retain = limits
    costs = [candidate.cost for candidate in candidates]
    within_retain = [cost for cost in costs if retain is None or cost.retained_bytes <= retain]
    within_memory = [cost for cost in costs if memory is None or cost.peak_bytes <= memory]
    least_peak = min(within_retain, key=lambda cost: cost.peak_bytes, default=None)
    least_retained = min(within_memory, key=lambda cost: cost.retained_bytes, default=None)
    enough = Limits(memory, retain)
    if memory is not None and least_peak is not None:
        enough = enough._replace(memory=least_peak.peak_bytes)
    elif retain is not None and least_retained is not None:
        enough = enough._replace(retain=least_retained.retained_bytes)
    else:
        pair = min(costs, key=lambda c: (c.peak_bytes, c.retained_bytes))
        enough = Limits(pair.peak_bytes, pair.retained_bytes)
    return PlannerLimitError.naming(why, limits, enough)
