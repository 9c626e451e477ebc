"""A contraction as the searches see it: its network, its paths, what they find, and candidates for a plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from planner.cost.figures import PlanCost
from planner.cost.limits import NO_LIMITS, Limits
from planner.cost.objective import step_key
from planner.language.errors import PlannerError, SearchLimitError
from planner.language.options import SEARCHES
from planner.program.build import Lowerer, build, given_variables
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.ops import Op, PricedImplementation
from planner.program.plan import Loop
from planner.program.program import Programs
from planner.program.tree import Tree
from planner.search.dynamic import FRONT_LIMIT, Search, SearchResult
from planner.search.network import Network
from planner.search.paths import PATH_NAMES, checked_path, external_path, is_path_name, splits_of

__all__ = [
    "AUTO_WORK",
    "MOST_TRIED",
    "PATH_WORK",
    "SLICE_WORK",
    "Candidate",
    "SearchSpace",
    "run_searches",
]

# Steps that a search may score; each takes 50 to 250 us. Any ten operands without index arrays have less than 30,000.
AUTO_WORK, OPTIMAL_WORK, PATH_WORK = 32_000, 3_000_000, 4_000
# A search is tried where it would score this many times as much if nothing were ruled out early.
MOST_TRIED = 12
# The same for the trees of a slice, of which there may be many.
SLICE_WORK = 1_000
# With more distinct gathers than this a path's search does not try every combination of their placements.
MOST_FACTORS = 5
# The same where what is kept is chosen too, and the ways that are then kept for one value: most, few, and fewest.
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
        self.variables = given_variables(self.resolved, self.operands, self.backend)
        self.layouts = tuple(variable.layout for variable in self.variables)
        self._paths: dict[Any, Any] = {}

    def choices(self, op: Op) -> Sequence[PricedImplementation]:
        """Return the implementations of an op, priced for the contraction's device."""
        return self.table.choices(op, self.device)

    def stock_choices(self, op: Op) -> Sequence[PricedImplementation]:
        """Only what a user would write by hand: the framework's own take, einsum and scatter."""
        return [choice for choice in self.choices(op) if self.table.rows[choice.lowering].stock]

    def search(
        self,
        objective: str,
        work: int,
        path: Any = None,
        naive: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> tuple[SearchResult | None, Lowerer]:
        """Search over the trees of a path, or over all of them; then the greedy path's score bounds what is followed.

        Where recomputing can serve the objective or a limit, what is kept is chosen with the tree. Nothing is found
        where no tree is within the limits.

        Raises:
            SearchLimitError: the search needs more work. Over a path it looks at fewer placements of the takes first,
                in the end only at takes of whole operands.
        """
        lower = Lowerer(self.stock_choices if naive else self.choices, step_key(objective))
        chooses = any(self.requires) and (limits != NO_LIMITS or objective in ("peak", "retained"))

        def over(network: Network, work: int = work, **options: Any) -> Search:
            return Search(
                network, self.requires, self.casts, self.dtype, lower, objective, "any" if chooses else "all", work,
                limits, layouts=self.layouts, **options,
            )  # fmt: skip

        def along(path: Any) -> SearchResult | None:
            splits = splits_of(path, len(self.operands))
            keeps = chooses or limits != NO_LIMITS
            fronts, steps = (PATH_FRONTS, KEEPING_PATH_WORK) if keeps else ((FRONT_LIMIT,), PATH_WORK)
            if not naive:
                for front in fronts:
                    with contextlib.suppress(SearchLimitError):
                        return over(self.few, steps, front_limit=front).run(splits)
            try:
                return over(self.few, steps, front_limit=fronts[-1], takes_first=True).run(splits)
            except SearchLimitError:
                if not keeps:
                    raise
                return None  # another path may be within the limits

        if path is not None:
            if not naive and len(self.network.gathers) <= MOST_FACTORS:
                with contextlib.suppress(SearchLimitError):
                    return over(self.network).run(splits_of(path, len(self.operands))), lower
            return along(path), lower
        if len(self.operands) <= 2:
            return over(self.network).run(), lower
        greedy = along(self.path("greedy"))
        try:
            # Ways with peaks take twice as long to compare.
            peaks = chooses and (limits.memory is not None or objective == "peak")
            return over(self.network, work // (1 + peaks), bound=greedy.score if greedy else None).run(), lower
        except KeyboardInterrupt:
            if greedy is None:
                raise
            return dataclasses.replace(greedy, exact=False, interrupted=True), lower

    def path(self, optimize: Any) -> Any:
        """Return a path as given, checked, or as opt_einsum finds it by a name or an optimizer."""
        if isinstance(optimize, str) or callable(optimize):
            if optimize not in self._paths:
                self._paths[optimize] = external_path(self.network, optimize)
            return self._paths[optimize]
        return checked_path(optimize, len(self.operands))

    def programs(self, tree: Tree, lower: Lowerer) -> Programs:
        """Return the forward and backward programs of a tree."""
        return build(tree, self.variables, self.requires, lower, self.dtype, self.gradient_strides)

    def naive(self) -> Programs:
        """What `einsum` on materialised gathers would do, by opt_einsum's path."""
        found, lower = self.search("flops", PATH_WORK, self.path("auto"), naive=True)
        assert found is not None
        return self.programs(found.tree, lower)

    def exact_work(self) -> int:
        """Roughly the steps that the exact search would score."""
        return int(3 ** len(self.operands) // 2 * 3 ** len(self.network.gathers))


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """What may become the plan: a tree with its programs, or a loop, and how it was found."""

    programs: Programs
    tree: Tree
    lower: Lowerer
    proven: bool
    origin: str
    loop: Loop | None = None
    interrupted: bool = False

    @property
    def cost(self) -> PlanCost:
        """What both programs cost."""
        return self.programs.cost


def run_searches(
    space: SearchSpace, optimize: Any, objective: str, limits: Limits, auto_work: int = AUTO_WORK
) -> Iterator[tuple[SearchResult, Lowerer, str]]:
    """Yield what the searches that `optimize` asks for find, and by what name; "auto" may score so many steps.

    Raises:
        PlannerError: `optimize` is unknown.
    """

    def along(path: Any, origin: str) -> Iterator[tuple[SearchResult, Lowerer, str]]:
        found, lower = space.search(objective, PATH_WORK, path, limits=limits)
        if found is not None:
            yield found, lower, origin

    if isinstance(optimize, str) and optimize in SEARCHES:
        work = OPTIMAL_WORK if optimize == "optimal" else auto_work
        if space.exact_work() <= MOST_TRIED * work:
            try:
                found, lower = space.search(objective, work, limits=limits)
            except SearchLimitError:
                pass
            else:
                if found is not None:
                    yield found, lower, "exact"
                return
        for name in ("greedy",) if len(space.operands) > 40 else ("greedy", "auto"):
            yield from along(space.path(name), f"opt_einsum {name}")
        return
    if isinstance(optimize, str) and not is_path_name(optimize):
        known = ", ".join(map(repr, (*SEARCHES, *PATH_NAMES)))
        raise PlannerError(f"optimize={optimize!r} is unknown: take one of {known}, a path or a PathOptimizer")
    yield from along(space.path(optimize), f"opt_einsum {optimize}" if isinstance(optimize, str) else "given path")
