"""A contraction as the searches see it: its network, its paths, the searches themselves, and candidates for plans."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from planner.cost.figures import PlanCost
from planner.cost.limits import NO_LIMITS, Limits
from planner.cost.objective import step_key
from planner.language.errors import PlannerError, SearchLimitError
from planner.language.options import SEARCHES, is_name
from planner.program.build import Lowerer, build, given_variables
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.ops import Op, PricedImplementation
from planner.program.plan import Loop, find_loop
from planner.program.program import Programs
from planner.program.tree import Tree
from planner.search.dynamic import FRONT_LIMIT, Search, SearchResult
from planner.search.large import improved_path
from planner.search.network import Network
from planner.search.paths import PATH_NAMES, check_path, external_path, is_path_name, splits_of
from planner.search.reconfigure import MOST_CUT, estimate_of

__all__ = [
    "AUTO_WORK",
    "MOST_TRIED",
    "PATH_WORK",
    "SLICE_WORK",
    "Candidate",
    "SearchSpace",
    "run_searches",
]

# The most steps that a search may score: with "auto", with "optimal", and over a path. Each takes 50 to 250 us. Ten
# operands without index arrays never have 30,000 steps or more.
AUTO_WORK, OPTIMAL_WORK, PATH_WORK = 32_000, 3_000_000, 4_000
# The exact search is tried if there are at most this many times as many steps as it may score: most steps are ruled out
# before they are scored.
MOST_TRIED = 12
# How many more steps a search over a path may score for each operand.
OPERAND_WORK = 4
# opt_einsum's "auto" is tried up to so many operands; beyond 14 it is its greedy path.
MOST_AUTO = 40
# The most steps that a search for the trees of a slice may score. There may be many such searches.
SLICE_WORK = 1_000
# If there are more distinct gathers than this, the search over a path does not try every combination of their places.
MOST_FACTORS = 5
# The most steps that a search over a path may score if it also chooses what is kept, and the lengths of fronts that it
# tries, one after the other, until one search ends within that many steps.
KEEPING_PATH_WORK, PATH_FRONTS = 8_000, (32, 6, 2)


class SearchSpace:
    """All plans of one contraction, and the searches that can be run on it."""

    def __init__(self, contraction: Contraction) -> None:
        self.contraction = contraction
        self.resolved, self.operands, self.dtype = contraction.resolved, contraction.operands, contraction.dtype
        self.options, self.backend, self.device = contraction.options, contraction.backend, contraction.device
        self.gradient_strides = contraction.gradient_strides
        self.table = load_backend(self.backend).table
        self.network = Network(self.resolved.spec)
        self.few = Network(self.resolved.spec, few=True)
        self.requires = contraction.requires_grad
        self.casts = tuple(o.dtype if o.dtype != self.dtype else None for o in self.operands)
        self.variables = given_variables(contraction)
        self.layouts = tuple(variable.layout for variable in self.variables)
        # When searches end by the clock; None if they end when their work is done.
        deadline = self.options.deadline
        self.ends = None if deadline is None else time.monotonic() + deadline
        self._paths: dict[Any, Any] = {}

    def choices(self, op: Op) -> Sequence[PricedImplementation]:
        """Return the implementations of an op, priced for the contraction's device."""
        return self.table.choices(op, self.device)

    def stock_choices(self, op: Op) -> Sequence[PricedImplementation]:
        """Return only the implementations that a user would call by hand: the framework's take, einsum and scatter."""
        return [choice for choice in self.choices(op) if self.table.rows[choice.lowering].stock]

    def search(
        self,
        objective: str,
        work: int,
        path: Any = None,
        naive: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> tuple[SearchResult | None, Lowerer]:
        """Search over the trees of a path, or over all trees.

        The search over all trees drops whatever is worse than the best tree of the greedy path. If recomputing can
        serve the objective or a limit, the search chooses what is kept together with the tree. The search over a path
        tries fewer and fewer places for gathers if it would take too long, in the end only gathers of whole operands.

        Args:
            objective: one of `planner.cost.objective.OBJECTIVES`.
            work: how many steps the search over all trees may score.
            path: the path; None to search over all trees.
            naive: whether to find the naive plan: gathers of whole operands first, and only stock implementations.
            limits: the limits that the tree must meet.

        Returns:
            What the search found, or None if no tree is within the limits; and the lowerer that it used.

        Raises:
            SearchLimitError: the search would have to score more steps.
        """
        lower = Lowerer(self.stock_choices if naive else self.choices, step_key(objective))
        chooses = any(self.requires) and (limits != NO_LIMITS or objective in ("peak", "retained"))

        def search_of(network: Network, work: int = work, **options: Any) -> Search:
            return Search(
                network,
                self.requires,
                self.casts,
                self.dtype,
                lower,
                objective,
                "any" if chooses else "all",
                work,
                limits,
                layouts=self.layouts,
                **options,
            )

        def along(path: Any) -> SearchResult | None:
            splits = splits_of(path, len(self.operands))
            sets = self.few.prepare(path)
            keeps = chooses or limits != NO_LIMITS
            fronts, steps = (PATH_FRONTS, KEEPING_PATH_WORK) if keeps else ((FRONT_LIMIT,), PATH_WORK)
            steps += OPERAND_WORK * len(self.operands)
            if not naive:
                for front in fronts:
                    with contextlib.suppress(SearchLimitError):
                        return search_of(self.few, steps, front_limit=front).run(splits, sets)
            try:
                return search_of(self.few, max(work, steps), front_limit=fronts[-1], takes_first=True).run(splits, sets)
            except SearchLimitError:
                if not keeps:
                    raise
                return None  # another path may be within the limits

        if path is not None:
            work += OPERAND_WORK * len(self.operands)
            if not naive and len(self.network.gathers) <= MOST_FACTORS:
                sets = self.network.prepare(path)
                with contextlib.suppress(SearchLimitError):
                    return search_of(self.network).run(splits_of(path, len(self.operands)), sets), lower
            return along(path), lower
        if len(self.operands) <= 2:
            return search_of(self.network).run(), lower
        greedy = along(self.path("greedy"))
        try:
            # Partial plans with peaks take twice as long to compare.
            if chooses and (limits.memory is not None or objective == "peak"):
                work //= 2
            bound = greedy.score if greedy else None
            return search_of(self.network, work, bound=bound).run(), lower
        except KeyboardInterrupt:
            if greedy is None:
                raise
            return dataclasses.replace(greedy, exact=False, interrupted=True), lower

    def path(self, optimize: Any) -> Any:
        """Return an explicit path, checked, or the path that opt_einsum finds for a name or an optimizer."""
        if is_name(optimize) or callable(optimize):
            if optimize not in self._paths:
                self._paths[optimize] = external_path(self.network, optimize)
            return self._paths[optimize]
        return check_path(optimize, len(self.operands))

    def programs(self, tree: Tree, lower: Lowerer) -> Programs:
        """Return the forward and backward programs of a tree."""
        return build(tree, self.contraction, self.variables, lower)

    def naive(self) -> Programs:
        """Return the programs of the naive plan: gather whole operands, then contract along opt_einsum's path."""
        result, lower = self.search("flops", PATH_WORK, self.path("auto"), naive=True)
        assert result is not None
        return self.programs(result.tree, lower)

    def exact_work(self) -> int:
        """Return roughly how many steps the exact search would score if it ruled none out."""
        return int(3 ** len(self.operands) // 2 * 3 ** len(self.network.gathers))


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate for the plan: a tree with its programs, and how it was found."""

    programs: Programs
    tree: Tree
    lower: Lowerer
    proven: bool
    origin: str
    interrupted: bool = False

    @property
    def loop(self) -> Loop | None:
        """The first loop over slices in the tree; None if there is none."""
        return find_loop(self.tree)

    @property
    def cost(self) -> PlanCost:
        """The cost of both programs."""
        return self.programs.cost


def run_searches(
    space: SearchSpace, optimize: Any, objective: str, limits: Limits, auto_work: int = AUTO_WORK
) -> Iterator[tuple[SearchResult, Lowerer, str]]:
    """Run the searches that `optimize` asks for. Yield each result, the lowerer of its steps, and the search's name.

    Args:
        space: the contraction to search.
        optimize: as in `planner.contract`.
        objective: one of `planner.cost.objective.OBJECTIVES`.
        limits: the limits that trees must meet.
        auto_work: how many steps the exact search of "auto" may score.

    Raises:
        PlannerError: `optimize` is unknown.
    """

    def along(path: Any, origin: str) -> Iterator[tuple[SearchResult, Lowerer, str]]:
        result, lower = space.search(objective, PATH_WORK, path, limits=limits)
        if result is not None:
            yield result, lower, origin

    if optimize in SEARCHES:
        work = OPTIMAL_WORK if optimize == "optimal" else auto_work
        if space.exact_work() <= MOST_TRIED * work:
            try:
                result, lower = space.search(objective, work, limits=limits)
            except SearchLimitError:
                pass
            else:
                if result is not None:
                    yield result, lower, "exact"
                return
        yield from _search_large(space, objective, limits, auto_work == AUTO_WORK)
        return
    if is_name(optimize) and not is_path_name(optimize):
        known = ", ".join(map(repr, (*SEARCHES, *PATH_NAMES)))
        raise PlannerError(f"optimize={optimize!r} is unknown: take one of {known}, a path or a PathOptimizer")
    yield from along(space.path(optimize), f"opt_einsum {optimize}" if is_name(optimize) else "given path")


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
        return space.search(objective, PATH_WORK, path, limits=limits)

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
    result, lower = along(improved.path)
    if result is not None:
        yield dataclasses.replace(result, exact=False, interrupted=improved.interrupted), lower, "improved greedy"
