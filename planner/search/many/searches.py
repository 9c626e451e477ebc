"""Runs the searches that `optimize=` asks for: over all trees, along a path, or along paths for many operands."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from planner.cost.limits import Limits
from planner.language.errors import PlannerError, SearchLimitError
from planner.language.options import SEARCHES, is_name
from planner.program.build import Lowerer
from planner.search.exact.lazy import Stop
from planner.search.exact.steps import SearchResult
from planner.search.many.greedy import improved_path
from planner.search.many.reconfigure import MOST_CUT, estimate_of
from planner.search.paths import PATH_NAMES, is_path_name
from planner.search.space import AUTO, OPTIMAL, PATH_STOP, SearchSpace

# opt_einsum's "auto" is tried up to so many operands; beyond 14 it is its greedy path.
MOST_AUTO = 40
# The least peak is that of one of so many improved paths, for up to `MOST_AUTO` operands; else of the best by estimate.
MOST_PEAKS = 10


def run_searches(
    space: SearchSpace, optimize: Any, objective: str, limits: Limits, auto: Stop = AUTO
) -> Iterator[tuple[SearchResult, Lowerer, str]]:
    """Run the searches that `optimize` asks for. Yield each result, the lowerer of its steps, and the search's name.

    Args:
        space: the contraction to search.
        optimize: as in `planner.contract`.
        objective: one of `planner.cost.objective.OBJECTIVES`.
        limits: the limits that trees must meet.
        auto: how much the exact search of "auto" may do.

    Raises:
        PlannerError: `optimize` is unknown.
    """

    def along(path: Any, origin: str) -> Iterator[tuple[SearchResult, Lowerer, str]]:
        result, lower = space.search(objective, PATH_STOP, path, limits=limits)
        if result is not None:
            yield result, lower, origin

    if optimize in SEARCHES:
        stop = OPTIMAL if optimize == "optimal" else auto
        if space.may_be_exact(objective, stop, limits):
            yield from _search_all(space, objective, limits, stop, auto is AUTO)
        else:
            yield from _search_large(space, objective, limits, auto is AUTO)
        return
    if is_name(optimize) and not is_path_name(optimize):
        names = ", ".join(map(repr, (*SEARCHES, *PATH_NAMES)))
        raise PlannerError(f"optimize={optimize!r} is unknown: take one of {names}, a path or a PathOptimizer")
    yield from along(space.path(optimize), f"opt_einsum {optimize}" if is_name(optimize) else "given path")


def _search_all(
    space: SearchSpace, objective: str, limits: Limits, stop: Stop, improves: bool
) -> Iterator[tuple[SearchResult, Lowerer, str]]:
    """Yield the best of all trees, and what the searches for more operands find if that may not be the best.

    The arguments are those of `_search_large`, and how much the search over all trees may do.
    """
    paths, found = _search_large(space, objective, limits, improves), list[tuple[SearchResult, Lowerer, str]]()
    if space.begins_with_paths(objective, limits):
        try:
            for along_path in paths:  # one by one, so that Ctrl-C leaves what was found
                found.append(along_path)
        except KeyboardInterrupt:
            if not found:
                raise
            found = [(dataclasses.replace(each[0], interrupted=True), *each[1:]) for each in found]
        if any(result.interrupted for result, _, _ in found):
            yield from found
            return
    known = min([result for result, _, _ in found], key=attrgetter("score"), default=None)
    try:
        result, lower = space.search(objective, stop, limits=limits, known=known)
    except SearchLimitError:
        yield from found
        yield from paths
        return
    if result is not None:
        yield result, lower, "exact"
        if not result.exact:
            yield from found


def _search_large(
    space: SearchSpace, objective: str, limits: Limits, improves: bool
) -> Iterator[tuple[SearchResult, Lowerer, str]]:
    """Yield what the searches for more operands than the exact search takes find; see `run_searches`.

    Args:
        space: the contraction.
        objective: what is minimised.
        limits: the limits that trees must meet.
        improves: whether to improve greedy paths too.
    """

    def along(path: Any) -> tuple[SearchResult | None, Lowerer]:
        return space.search(objective, PATH_STOP, path, limits=limits)

    names = ("greedy",) if len(space.operands) > MOST_AUTO else ("greedy", "auto")
    paths = [space.path(name) for name in names]
    begun = time.monotonic()
    for name, path in zip(names, paths, strict=True):
        result, lower = along(path)
        if result is not None:
            yield result, lower, f"opt_einsum {name}"
    if not improves:
        return
    # What is found must still be priced before the deadline.
    pricing = (time.monotonic() - begun) / len(names)
    estimate = estimate_of(objective, space.device, space.dtype)
    ends = None if space.ends is None else space.ends - pricing
    # A time takes several times as long to estimate as FLOPs.
    most = MOST_CUT if objective == "flops" else MOST_CUT - 1
    improved = improved_path(space.network, space.requires, estimate, paths, ends, most)
    # An estimate that is a sum says little about a peak.
    tried = MOST_PEAKS if objective == "peak" and len(space.operands) <= MOST_AUTO else 1
    for path in improved.paths[:tried]:
        result, lower = along(path)
        if result is not None:
            yield dataclasses.replace(result, exact=False, interrupted=improved.interrupted), lower, "improved greedy"
