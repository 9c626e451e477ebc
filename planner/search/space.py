"""A contraction as the searches see it: its network, its paths, the searches themselves, and candidates for plans."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from planner.cost.figures import PlanCost
from planner.cost.limits import NO_LIMITS, Limits
from planner.cost.objective import Objective, StepKey, step_key
from planner.language.errors import SearchLimitError
from planner.language.options import is_name
from planner.program.build import Lowerer, build, given_variables
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.guards import index_bytes
from planner.program.ops import Op, PricedImplementation
from planner.program.plan import Loop, PlanRecord, find_loop
from planner.program.program import Programs
from planner.program.tree import Tree
from planner.search.devices.collectives import exchange_pricer
from planner.search.exact.dynamic import FRONT_LIMIT, Search
from planner.search.exact.lazy import LazySearch, Stop
from planner.search.exact.listing import Bounds, fused_terms, kernel_launches
from planner.search.exact.network import Network
from planner.search.exact.sizes import has_tables
from planner.search.exact.steps import NetworkSteps, SearchEnded, SearchResult, Splits, all_splits
from planner.search.paths import check_path, external_path, splits_of

# The objectives that are sums over steps.
ADDITIVE = ("time", "flops", "bytes")
# What searches may do: with "auto", with "optimal", over a path, and for the trees of a slice, of which there may be
# many. Scoring a step takes 50 to 250 us, pricing one some 200 us, listing one some 5 us.
AUTO = Stop(priced=1_000, listed=40_000, scored=32_000, operands=14, gains=True)
OPTIMAL = Stop(priced=1_000_000, listed=1_000_000, scored=3_000_000, operands=16)
PATH_WORK = 4_000
PATH_STOP = Stop(priced=PATH_WORK, listed=40_000, scored=PATH_WORK, operands=0)
SLICE_STOP = Stop(priced=60, listed=2_000, scored=1_000, operands=10, gains=True)
# A search that scores steps is tried if there are at most this many times as many steps as it may score: most steps are
# ruled out before they are scored.
MOST_TRIED = 12
# How many more steps a search over a path may score for each operand.
OPERAND_WORK = 4
# Up to so many operands splits are dropped by bounds, where a gather counts as two; the tables of so many take some
# 100 MB.
MOST_FILTERED = 13
# How long fronts are where the search only wants a good tree to compare others with.
FILTER_FRONT = 6
# From so many operands and gathers on, the search over all trees lists only the steps of trees that are as good as the
# best tree of a path.
PATHS_FIRST = 11
# If there are more distinct gathers than this, the search over a path does not try every combination of their places.
MOST_FACTORS = 5
# Bounds are used if the contraction has fewer joint elements. A float ends at 2^1024.
MOST_ELEMENTS = 2**900
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
        backend = load_backend(self.backend)
        self.table = backend.table
        self._stock = frozenset([row.name for row in self.table.rows.values() if row.stock])
        self.requires = contraction.requires_grad
        self._names = self.table.names_for(contraction)
        self.casts = tuple(o.dtype if o.dtype != self.dtype else None for o in self.operands)
        self.variables = given_variables(contraction)
        self.layouts = tuple(variable.layout for variable in self.variables)
        self.network = Network(self.resolved.spec, keeps_order=backend.strided, keeps_sums=backend.compiles)
        plain = not self.resolved.spec.gathers
        self.fused = tuple(plain and backend.fuses_cast(o.dtype, self.dtype) for o in self.operands)
        self.steps = self._steps_on(self.network)
        # When searches end by the clock; None if they end when their work is done.
        deadline = self.options.deadline
        self.ends = None if deadline is None else time.monotonic() + deadline
        self._paths: dict[Any, Any] = {}
        self._exchange = exchange_pricer(contraction)

    def is_late(self) -> bool:
        """Whether the deadline is over."""
        return self.ends is not None and time.monotonic() > self.ends

    def _steps_on(self, network: Network) -> NetworkSteps:
        return NetworkSteps(network, self.casts, self.dtype, self.layouts, self.fused)

    def choices(
        self, op: Op, key: StepKey | None = None, among: frozenset[str] | None = None
    ) -> Sequence[PricedImplementation]:
        """Return the implementations of an op, priced for the contraction's device; see `Table.choices`.

        They are those that its plans may have. With symbolic sizes they are stock ones, because these need no numbers.
        """
        if self.contraction.symbols:
            return [c for c in self.stock_choices(op) if among is None or c.lowering in among]
        return self._with_exchange(
            op, self.table.choices(op, self.device, key, self._names if among is None else among)
        )

    def _with_exchange(self, op: Op, choices: Sequence[PricedImplementation]) -> Sequence[PricedImplementation]:
        """Add to prices, on a mesh, the time in which devices add up the results of an op."""
        more = 0 if self._exchange is None else self._exchange(op)
        if not more:
            return choices
        costs = (choice.cost._replace(picoseconds=choice.cost.picoseconds + more) for choice in choices)
        return [dataclasses.replace(choice, cost=cost) for choice, cost in zip(choices, costs, strict=True)]

    def lowerer(
        self,
        objective: Objective,
        fixed: Mapping[Op, PricedImplementation] = MappingProxyType({}),
        records: bool | None = None,
    ) -> Lowerer:
        """Return what chooses the implementation of each step by an objective, but for some that are fixed."""
        key = step_key(objective)
        return Lowerer(partial(self.choices, key=key), key, fixed, self.table.plain, records)

    def stock_choices(self, op: Op) -> Sequence[PricedImplementation]:
        """Return only the implementations that a user would call by hand: the framework's take, einsum and scatter."""
        return self._with_exchange(op, self.table.choices(op, self.device, None, self._stock))

    def naive_choices(self, op: Op) -> Sequence[PricedImplementation]:
        """Return the stock implementations at the cost of the framework's own functions, which may copy less."""
        choices, cost_of = self.stock_choices(op), load_backend(self.backend).einsum_cost
        if cost_of is None:
            return choices
        return [dataclasses.replace(choice, cost=cost_of(op, choice.cost, self.device)) for choice in choices]

    def search(
        self,
        objective: str,
        stop: Stop,
        path: Any = None,
        naive: bool = False,
        limits: Limits = NO_LIMITS,
        as_run: bool = False,
        known: SearchResult | None = None,
    ) -> tuple[SearchResult | None, Lowerer]:
        """Search over the trees of a path, or over all trees.

        Without limits, time, FLOPs and bytes are sums over steps. `LazySearch` prices only the steps that can still
        win. Otherwise `Search` keeps a front of partial plans for each value. If recomputing can serve the objective or
        a limit, it chooses what is kept together with the tree, and it drops whatever is worse than the best tree of
        the greedy path. Over a path it tries fewer and fewer places for gathers if it would take too long, in the end
        only gathers of whole operands.

        Args:
            objective: one of `planner.cost.objective.OBJECTIVES`.
            stop: how much the search over all trees may do.
            path: the path; None to search over all trees.
            naive: whether to find the naive plan: gathers of whole operands first, and only stock implementations.
            limits: the limits that the tree must meet.
            as_run: whether the steps of the naive plan cost what our stock implementations take, which may copy more
                than the framework's own functions.
            known: the best tree that is known, for a search over all trees without limits.

        Returns:
            What the search found, or None if no tree is within the limits; and the lowerer that chooses as it did.

        Raises:
            SearchLimitError: the search would have to look at more steps.
        """
        if limits.memory is not None:
            limits = limits._replace(memory=limits.memory - self.index_bytes)
        key = step_key(objective)
        if naive:
            lower = Lowerer(self.stock_choices if as_run else self.naive_choices, key)
        elif limits.memory is None:
            lower = self.lowerer(objective)
        else:  # with all rows: one that takes longer may have less scratch
            lower = Lowerer(self.choices, key, plain=self.table.plain)
        search = _TreeSearch(self, lower, objective, limits, naive)
        if path is not None:
            result = search.over_path(path)
        elif search.additive:
            result = search.over_all_lazily(stop, known)
        else:
            result = search.over_all_with_fronts(stop)
        return result, lower.naming(result.names) if result is not None and result.names else lower

    @property
    def has_plain_bounds(self) -> bool:
        """Whether numpy can bound the steps of all trees, and there are no gathers."""
        return not self.network.gathers and has_tables(self.network) and self.step_bounds("time").hold

    @property
    def is_filtered(self) -> bool:
        """Whether splits that cannot win are dropped before a search that keeps fronts looks at them."""
        size = len(self.operands) + 2 * len(self.network.gathers)
        return size <= MOST_FILTERED and has_tables(self.network) and self.step_bounds("time").hold

    def has_quicker(self, picoseconds: int, stop: Stop) -> bool:
        """Whether a tree takes less time, as far as the search over all trees can tell.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the search.
            SearchLimitError: the search would have to look at more steps.
        """
        return self._lazy_search(self.lowerer("time"), "time", stop).has_below(picoseconds)

    def _lazy_search(self, lower: Lowerer, objective: str, stop: Stop) -> LazySearch:
        return LazySearch(self.steps, lower, self.step_bounds(objective), stop, self._exchange is None)

    def step_bounds(self, objective: str) -> Bounds:
        """Return what lower bounds on steps depend on."""
        gradient_operands = sum(needed << operand for operand, needed in enumerate(self.requires))
        # Rows with brackets bound steps of gathers only.
        launches = kernel_launches(self.table, self.device) if self.network.gathers else (math.inf, math.inf)
        # Bounds are floats.
        hold = self.bounded and math.prod(self.network.sizes.values()) < MOST_ELEMENTS
        fused = fused_terms(self.table, self.device)
        known = self.table.more if self.device.kind == "cpu" else None
        if known is not None and known.follows and self._names is not None:
            known = dataclasses.replace(known, follows=False)  # this plan leaves such rows out
        more = None if self.table.has_changed else known
        listed = more is not None and not self.network.gathers and len(self.operands) > 2
        orders = self.steps.orders if listed else None  # of one product nothing has to be known
        return Bounds(objective, self.device, self.dtype, gradient_operands, hold, launches, fused, more, orders, known)

    @property
    def bounded(self) -> bool:
        """Whether no implementation costs less than the bounds of `planner.cost.floor`."""
        return all([row.bounded for row in self.table.rows.values()])

    @property
    def index_bytes(self) -> int:
        """The bytes of index arrays in range, which the searches leave out of peaks."""
        return 0 if load_backend(self.backend).compiles else index_bytes(self.resolved.spec)

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

    def may_be_exact(self, objective: str, stop: Stop, limits: Limits = NO_LIMITS) -> bool:
        """Whether the search over all trees is worth a try."""
        operands, gathers = len(self.operands), len(self.network.gathers)
        if operands > stop.operands:
            return False
        # Roughly how many steps there are.
        steps: int = 3**operands // 2 * 3**gathers
        if objective in ADDITIVE and limits == NO_LIMITS:
            by_numpy = has_tables(self.network) and self.step_bounds(objective).hold
            return gathers == 0 or steps <= stop.listed or (by_numpy and operands + 5 * gathers // 2 <= stop.operands)
        return steps <= MOST_TRIED * stop.scored

    def begins_with_paths(self, objective: str, limits: Limits) -> bool:
        """Whether the search over all trees takes less time if it knows the tree of a path."""
        gathers = len(self.network.gathers)
        many = gathers > 0 and len(self.operands) + gathers >= PATHS_FIRST
        return many and objective in ADDITIVE and limits == NO_LIMITS


class _TreeSearch:
    """One search of a space; `SearchSpace.search` describes it, and its arguments.

    Attributes:
        additive: whether what it minimises is a sum over steps, without limits.
        chooses: whether it chooses what is kept together with the tree.
    """

    def __init__(self, space: SearchSpace, lower: Lowerer, objective: str, limits: Limits, naive: bool) -> None:
        self.space, self.lower, self.objective, self.limits, self.naive = space, lower, objective, limits, naive
        self.additive = objective in ADDITIVE and limits == NO_LIMITS and not naive
        self.chooses = any(space.requires) and (limits != NO_LIMITS or objective in ("peak", "retained"))
        # With many operands a path has many steps.
        self._more = OPERAND_WORK * len(space.operands)

    def over_path(self, path: Any) -> SearchResult | None:
        """Search over the trees of a path, with gathers at any place unless that takes too long."""
        space = self.space
        if not self.naive and len(space.network.gathers) <= MOST_FACTORS:
            sets, splits = space.network.prepare(path), splits_of(path, len(space.operands))
            with contextlib.suppress(SearchLimitError):
                if self.additive:
                    stop = PATH_STOP._replace(priced=PATH_WORK + self._more, listed=PATH_STOP.listed + 10 * self._more)
                    return space._lazy_search(self.lower, self.objective, stop).run(splits)
                return self._with_fronts(space.steps, PATH_WORK + self._more).run(splits, sets)
        return self._over_path_with_few_places(path)

    def over_all_lazily(self, stop: Stop, known: SearchResult | None) -> SearchResult:
        """Search over all trees for the least sum over steps; if that is interrupted, along the greedy path."""
        search = self.space._lazy_search(self.lower, self.objective, stop._replace(deadline=self.space.ends))
        try:
            if known is None and self.space.begins_with_paths(self.objective, self.limits):
                known = self.over_path(self.space.path("greedy"))
            return search.run(known=known)
        except (KeyboardInterrupt, SearchEnded) as end:
            # Nothing is priced yet.
            greedy = known or self._over_path_with_few_places(self.space.path("greedy"))
            if greedy is None:
                raise
            return dataclasses.replace(greedy, exact=False, interrupted=isinstance(end, KeyboardInterrupt), bound=0)

    def over_all_with_fronts(self, stop: Stop) -> SearchResult | None:
        """Search over all trees with a front of plans for each value; if interrupted, return the best so far."""
        space, limits, work = self.space, self.limits, stop.scored
        if len(space.operands) <= 2:
            return self._with_fronts(space.steps, work).run()
        best = self._over_path_with_few_places(space.path("greedy"))
        try:
            # Partial plans with peaks take twice as long to compare.
            if self.chooses and (limits.memory is not None or self.objective == "peak"):
                work //= 2
            allowed: Splits = all_splits
            if space.is_filtered:
                from planner.search.exact.survivors import SplitFilter

                bounds = space.step_bounds(self.objective if self.objective in ADDITIVE else "time")
                repeats = self.objective == "retained" and all(space.requires)
                few = SplitFilter(space.steps, space.requires, bounds, repeats, space.ends)
                if limits.memory is not None:
                    few.drop_above_peak(limits.memory)
                for tree in few.good_trees(self.objective == "peak", limits.memory is not None):
                    with contextlib.suppress(SearchLimitError):
                        search = self._with_fronts(space.steps, work, front_limit=FILTER_FRONT, ends=space.ends)
                        best = min(filter(None, (best, search.run(tree))), key=attrgetter("score"), default=None)
                allowed = few.splits(self.objective, best)
            last = self._with_fronts(space.steps, work, bound=best.score if best else None, ends=space.ends)
            return last.run(allowed)
        except (KeyboardInterrupt, SearchEnded) as end:
            if best is None:
                raise
            return dataclasses.replace(best, exact=False, interrupted=isinstance(end, KeyboardInterrupt))

    def _over_path_with_few_places(self, path: Any) -> SearchResult | None:
        """Search over a path with few places for gathers, at last only of whole operands; None if no tree is found."""
        splits = splits_of(path, len(self.space.operands))
        keeps = self.chooses or self.limits != NO_LIMITS
        fronts, work = (PATH_FRONTS, KEEPING_PATH_WORK) if keeps else ((FRONT_LIMIT,), PATH_WORK)
        work += self._more
        whole = self.space.network
        few = self.space._steps_on(Network(self.space.resolved.spec, True, whole.keeps_order, whole.keeps_sums))
        sets = few.network.prepare(path)
        if not self.naive:
            for front in fronts:
                with contextlib.suppress(SearchLimitError):
                    return self._with_fronts(few, work, front_limit=front).run(splits, sets)
        try:
            return self._with_fronts(few, work, front_limit=fronts[-1], takes_first=True).run(splits, sets)
        except SearchLimitError:
            if not keeps:
                raise
            return None  # another path may be within the limits

    def _with_fronts(self, steps: NetworkSteps, work: int, **options: Any) -> Search:
        keep: Literal["all", "any"] = "any" if self.chooses else "all"
        return Search(steps, self.space.requires, self.lower, self.objective, keep, work, self.limits, **options)


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate for the plan: a tree with its programs, and how it was found.

    Attributes:
        programs: the programs of the tree.
        tree: the tree.
        lower: what chose the implementations of its steps.
        proven: whether no better plan exists in the space that was searched.
        origin: the search that found it.
        interrupted: whether Ctrl-C ended that search.
        found: what that search found, if it searched all trees for the contraction's own objective without limits.
    """

    programs: Programs
    tree: Tree
    lower: Lowerer
    proven: bool
    origin: str
    interrupted: bool = False
    found: SearchResult | None = None

    @property
    def loop(self) -> Loop | None:
        """The first loop over slices in the tree; None if there is none."""
        return find_loop(self.tree)

    @property
    def cost(self) -> PlanCost:
        """The cost of both programs."""
        return self.programs.cost


AnyPlan = TypeVar("AnyPlan", PlanRecord, Candidate)


def marked_interrupted(plan: AnyPlan) -> AnyPlan:
    """Return a plan that says that Ctrl-C ended its search."""
    if plan.origin.startswith("interrupted"):
        return plan
    return dataclasses.replace(plan, proven=False, origin=f"interrupted: {plan.origin}")
