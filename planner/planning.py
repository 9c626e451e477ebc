"""From a resolved problem to a plan: run the searches, compare what they found, build the programs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from planner.cost import PlanCost
from planner.device import Device
from planner.dispatch import load_backend
from planner.errors import PlannerError, PlannerLimitError, SearchLimitError
from planner.loops import loop_programs, resized, slice_counts, slice_operands, sliced_problem
from planner.lower import Choice, Op
from planner.network import Network
from planner.objective import OBJECTIVES, check_objective, plan_key, step_key
from planner.plan import Alternative, Loop, Options, Plan
from planner.program import Leaf, Lowerer, Node, Programs, Tree, Variable, build, keeping
from planner.resolve import Resolved
from planner.search.dynamic import NO_LIMITS, Found, Limits, Search
from planner.search.paths import checked_path, external_path, joined_by, left_to_right, path_names, splits_of
from planner.spec import Operand, Spec

__all__ = ["SEARCHES", "alternatives", "looped", "make_plan", "within"]

# Steps that a search may score; each takes 50 to 250 us.
AUTO_WORK, OPTIMAL_WORK, PATH_WORK = 20_000, 3_000_000, 4_000
# Ways to search over all trees; "measure" looks for its candidates as "auto" does.
SEARCHES = ("auto", "optimal", "measure")
# With more distinct gathers than this a path's search does not try every combination of their placements.
MOST_FACTORS = 5
# The same where what is kept is chosen too, and the ways that are then kept for one value: most, few, and fewest.
KEEPING_PATH_WORK, PATH_FRONTS = 8_000, (32, 6, 2)
# Without limits, loops over slices are considered where a plan allocates this much beyond its results.
LARGE_BYTES = 1 << 25
MOST_LOOPS, MOST_SLICES = 3, 4096
# Loops predicted to take no more than this times the fastest are as fast: no prediction is that exact.
CLOSE = 1.05


class Problem:
    """One resolved problem on one device, and the searches that can be run on it."""

    def __init__(
        self, resolved: Resolved, operands: Sequence[Operand], dtype: str, backend: str, device: Device
    ) -> None:
        self.resolved, self.operands, self.dtype, self.device = resolved, tuple(operands), dtype, device
        self.table = load_backend(backend).table
        self.backend = backend
        self.network = Network(resolved.spec)
        self.few = Network(resolved.spec, few=True)
        self.requires = tuple(operand.requires_grad for operand in operands)
        self.casts = tuple(o.dtype if o.dtype != dtype else None for o in operands)
        self.variables = tuple(
            Variable(shape, operand.dtype, number)
            for number, (shape, operand) in enumerate(zip(resolved.shapes, operands, strict=True))
        )
        self._paths: dict[Any, Any] = {}

    def choices(self, op: Op) -> Sequence[Choice]:
        return self.table.choices(op, self.device)

    def stock_choices(self, op: Op) -> Sequence[Choice]:
        """Only what a user would write by hand: the framework's own take, einsum and scatter."""
        return [choice for choice in self.choices(op) if self.table.rows[choice.lowering].stock]

    def search(
        self,
        objective: str,
        work: int,
        path: Any = None,
        naive: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> tuple[Found | None, Lowerer]:
        """Search over the trees of a path, or over all of them; then the greedy path's score bounds what is followed.

        Where recomputing can serve the objective or a limit, what is kept is chosen with the tree. Nothing is found
        where no tree is within the limits.

        Raises:
            SearchLimitError: the search over all trees needs more work. One over a path then looks at fewer placements.
        """
        lower = Lowerer(self.stock_choices if naive else self.choices, step_key(objective))
        chooses = any(self.requires) and (limits != NO_LIMITS or objective in ("peak", "retained"))

        def over(network: Network, work: int = work, **options: Any) -> Search:
            return Search(
                network, self.requires, self.casts, self.dtype, lower, objective, "any" if chooses else "all", work,
                limits, **options,
            )  # fmt: skip

        def along(path: Any) -> Found | None:
            splits = splits_of(path, len(self.operands))
            if not chooses and limits == NO_LIMITS:
                return over(self.few, PATH_WORK, takes_first=naive).run(splits)
            for front in PATH_FRONTS:
                with contextlib.suppress(SearchLimitError):
                    return over(self.few, KEEPING_PATH_WORK, front_limit=front).run(splits)
            return None

        if path is not None:
            if not naive and len(self.network.gathers) <= MOST_FACTORS:
                with contextlib.suppress(SearchLimitError):
                    return over(self.network).run(splits_of(path, len(self.operands))), lower
            return along(path), lower
        if len(self.operands) <= 2:
            return over(self.network).run(), lower
        greedy = along(self.path("greedy"))
        try:
            return over(self.network, bound=greedy.score if greedy else None).run(), lower
        except KeyboardInterrupt:
            if greedy is None:
                raise
            return dataclasses.replace(greedy, exact=False, interrupted=True), lower

    def path(self, optimize: Any) -> Any:
        if isinstance(optimize, str) or callable(optimize):
            if optimize not in self._paths:
                self._paths[optimize] = external_path(self.network, optimize)
            return self._paths[optimize]
        return checked_path(optimize, len(self.operands))

    def programs(self, tree: Tree, lower: Lowerer) -> Programs:
        return build(tree, self.variables, self.requires, lower, self.dtype)

    def naive(self) -> Programs:
        """What `einsum` on materialised gathers would do, by opt_einsum's path."""
        found, lower = self.search("flops", PATH_WORK, self.path("auto"), naive=True)
        assert found is not None
        return self.programs(found.tree, lower)

    def exact_work(self) -> int:
        """Roughly the steps that the exact search would score."""
        return int(3 ** len(self.operands) // 2 * 3 ** len(self.network.gathers))


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    programs: Programs
    tree: Tree
    lower: Lowerer
    proven: bool
    origin: str
    loop: Loop | None = None
    interrupted: bool = False

    @property
    def cost(self) -> PlanCost:
        return self.programs.cost


def make_plan(
    text: str,
    resolved: Resolved,
    index_shapes: Mapping[str, tuple[int, ...]],
    operands: Sequence[Operand],
    dtype: str,
    index_mode: str,
    backend: str,
    device: Device,
    options: Options,
) -> Plan:
    """Choose the plan of a resolved problem.

    Raises:
        PlannerLimitError: no plan that was found satisfies the limits.
        SearchLimitError: the problem is beyond any search.
        PlannerError: an option is unknown.
    """
    check_objective(options.minimize)
    problem = Problem(resolved, operands, dtype, backend, device)
    best = _best(problem, options, index_mode)
    try:
        best = _ordered(problem, best, options)
    except KeyboardInterrupt:
        best = dataclasses.replace(best, proven=False, origin=f"interrupted: {best.origin}")
    given = tuple((name, index_shapes[name]) for name in resolved.spec.arrays)
    return Plan(
        text, resolved, given, problem.operands, dtype, index_mode, backend, device, options,
        best.tree, best.programs, problem.naive().cost, best.proven, best.origin, best.loop,
    )  # fmt: skip


def _best(problem: Problem, options: Options, index_mode: str) -> _Candidate:
    """Return the best candidate within the limits.

    Without a limit, and where no limit binds, the objective's own search decides. Else what is kept is chosen together
    with the tree, under the limits; where that finds nothing, the least peak within the retain limit may do.

    Raises:
        PlannerLimitError: no candidate is within the limits.
    """
    key = plan_key(options.minimize)
    limits = Limits(options.memory_limit, options.retain_limit)
    objectives = OBJECTIVES if callable(options.minimize) else (options.minimize,)
    candidates: list[_Candidate] = []
    interrupted = False

    def consider(more: Iterable[_Candidate]) -> None:
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

    def least() -> _Candidate | None:
        allowed = [c for c in candidates if _within(c.cost, limits)]
        best = min(allowed, key=lambda c: key(c.cost), default=None)
        if best is None or not interrupted:
            return best
        return dataclasses.replace(best, proven=False, origin=f"interrupted: {best.origin}", interrupted=True)

    for objective in objectives:
        consider(_candidates(problem, options, objective))
    best = min(candidates, key=lambda c: key(c.cost), default=None)
    if best is None or not _within(best.cost, limits):
        for objective in objectives:
            consider(_candidates(problem, options, objective, limits))
        allowed = least()
        if allowed is None or not allowed.proven:
            # Steps with less scratch, or a search that is not over all trees, may do what the objective's own did not.
            consider(_candidates(problem, options, "retained"))
            consider(_candidates(problem, options, "peak", Limits(None, options.retain_limit)))
    if candidates:
        consider(_loops(problem, options, tuple(candidates), index_mode))
    allowed = least()
    if allowed is None:
        raise KeyboardInterrupt if interrupted else _limit_error(candidates, limits)
    return allowed


def _candidates(problem: Problem, options: Options, objective: str, limits: Limits = NO_LIMITS) -> Iterator[_Candidate]:
    for found, lower, origin in _found(problem, options.optimize, objective, limits):
        proven = found.exact and origin == "exact" and objective == options.minimize
        programs = problem.programs(found.tree, lower)
        how = f"{origin}, {objective}"
        yield _Candidate(programs, found.tree, lower, proven, how, interrupted=found.interrupted)
        if any(problem.requires) and not (limits == NO_LIMITS and proven):
            bare = keeping(found.tree, False)
            yield _Candidate(problem.programs(bare, lower), bare, lower, False, f"{origin}, {objective}")


def _found(problem: Problem, optimize: Any, objective: str, limits: Limits) -> Iterator[tuple[Found, Lowerer, str]]:
    def along(path: Any, origin: str) -> Iterator[tuple[Found, Lowerer, str]]:
        found, lower = problem.search(objective, PATH_WORK, path, limits=limits)
        if found is not None:
            yield found, lower, origin

    if isinstance(optimize, str) and optimize in SEARCHES:
        work = OPTIMAL_WORK if optimize == "optimal" else AUTO_WORK
        if problem.exact_work() <= 20 * work:
            try:
                found, lower = problem.search(objective, work, limits=limits)
            except SearchLimitError:
                pass
            else:
                if found is not None:
                    yield found, lower, "exact"
                return
        for name in ("greedy",) if len(problem.operands) > 40 else ("greedy", "auto"):
            yield from along(problem.path(name), f"opt_einsum {name}")
        return
    if isinstance(optimize, str) and optimize not in path_names():
        known = ", ".join(map(repr, (*SEARCHES, *path_names())))
        raise PlannerError(f"optimize={optimize!r} is unknown: take one of {known}, a path or a PathOptimizer")
    yield from along(problem.path(optimize), f"opt_einsum {optimize}" if isinstance(optimize, str) else "given path")


# -- loops over slices -----------------------------------------------------------------------------------


def _loops(
    problem: Problem, options: Options, candidates: Sequence[_Candidate], index_mode: str
) -> Iterator[_Candidate]:
    """Candidates that go slice by slice: where a limit asks for it, or where large intermediates cost time.

    Axes are added one at a time, each time the one whose slices serve best, until nothing gets better. Slices are
    priced with the trees that were found for the whole, and with trees made for slices of one element. Of slices
    that take about the same time, those with the least peak are taken.
    """
    limits = Limits(options.memory_limit, options.retain_limit)
    limited = limits != NO_LIMITS
    key = plan_key(options.minimize)
    allowed = [c for c in candidates if _within(c.cost, limits)]
    rival = min(allowed or candidates, key=lambda c: key(c.cost))
    if allowed and rival.cost.peak_bytes - _results_bytes(rival.programs) < LARGE_BYTES:
        return
    keys = ("time", "peak") if limited or options.minimize in ("peak", "retained") else ("time",)
    found: list[_Candidate] = []
    trees = list(dict.fromkeys(keeping(c.tree, False) for c in candidates))
    axes: tuple[tuple[str, int], ...] = ()

    def rank(c: _Candidate) -> Any:
        over = max(0, c.cost.peak_bytes - options.memory_limit) if options.memory_limit is not None else 0
        return (over, *key(c.cost))

    for _ in range(MOST_LOOPS):
        tried: list[_Candidate] = []
        for axis, size in problem.resolved.spec.sizes:
            if size < 2 or axis in dict(axes) or not _can_be_cut(problem.resolved.spec, axis):
                continue
            pool = list(dict.fromkeys((*trees, *_slice_trees(problem, options, {**dict(axes), axis: 1}))))
            for step in _ladder(size):
                cut = (*axes, (axis, step))
                if math.prod(-(-problem.resolved.spec.size(a) // s) for a, s in cut) > MOST_SLICES:
                    continue
                for tree, name in itertools.product(pool, keys):
                    tried.append(_loop_candidate(problem, options, cut, tree, name, index_mode))
        if not tried:
            break
        best = min(tried, key=rank)
        if options.minimize == "time":
            over, most = rank(best)[0], CLOSE * best.cost.seconds
            near = [c for c in tried if rank(c)[0] == over and c.cost.seconds <= most]
            best = min(near, key=lambda c: (c.cost.peak_bytes, rank(c)))
        if found and rank(best) >= rank(found[-1]):
            break
        found.append(best)
        yield best
        assert best.loop is not None
        axes = best.loop.axes
        if _within(best.cost, limits) and (not allowed or len(axes) > 1):
            break


def _can_be_cut(spec: Spec, axis: str) -> bool:
    """Whether a slice cuts each index array in one way: not if one is used with other brackets too."""
    brackets: dict[str, set[tuple[str, ...]]] = {}
    for gather in spec.gathers:
        brackets.setdefault(gather.array, set()).add(gather.axes)
    return all(len(uses) == 1 or all(axis not in axes for axes in uses) for uses in brackets.values())


def _ladder(size: int) -> list[int]:
    """Sizes of slices to consider: halves, down to one."""
    steps = [size]
    while steps[-1] > 1:
        steps.append(-(-steps[-1] // 2))
    return steps[1:]


def _results_bytes(programs: Programs) -> int:
    """Bytes that the larger program must allocate whatever it does: the result, or the gradients."""
    gradients = sum(programs.variables[v].bytes for v in programs.gradients if v is not None)
    return max(gradients, programs.variables[programs.result].bytes)


def _slice_trees(problem: Problem, options: Options, sizes: Mapping[str, int]) -> list[Tree]:
    """Trees made for a slice, at the sizes of the whole."""
    resolved = sliced_problem(problem.resolved, sizes)
    part = Problem(resolved, slice_operands(resolved, problem.operands), problem.dtype, problem.backend, problem.device)
    whole = dict(problem.resolved.spec.sizes)
    try:
        found = [tree for tree, _, _ in _found(part, options.optimize, "time", NO_LIMITS)]
    except SearchLimitError:
        return []
    return [keeping(resized(f.tree, whole), False) for f in found]


def _loop_candidate(
    problem: Problem,
    options: Options,
    axes: tuple[tuple[str, int], ...],
    tree: Tree,
    key: str,
    index_mode: str,
) -> _Candidate:
    """Price one loop with one tree."""
    spec = problem.resolved.spec
    tree = keeping(tree, False)
    lower = Lowerer(problem.choices, step_key(key))
    bodies, first = [], None
    for sizes, count in slice_counts(axes, spec):
        resolved = sliced_problem(problem.resolved, sizes)
        operands = slice_operands(resolved, problem.operands)
        variables = [Variable(o.shape, o.dtype, n) for n, o in enumerate(operands)]
        small = resized(tree, sizes)
        programs = build(small, variables, problem.requires, lower, problem.dtype)
        bodies.append((programs.cost, count))
        if first is None:
            first = Plan(
                str(spec), resolved, resolved.index_shapes, operands, problem.dtype, index_mode, problem.backend,
                problem.device, Options(minimize=key, precision=options.precision), small, programs,
                programs.cost, False, "slice",
            )  # fmt: skip
    assert first is not None
    programs = loop_programs(
        spec, axes, bodies, problem.variables, problem.requires, problem.dtype, problem.device
    )  # fmt: skip
    return _Candidate(programs, tree, lower, False, "sliced", Loop(axes, first))


def looped(plan: Plan, axes: Mapping[str, int]) -> Plan:
    """Return a plan with the same tree that goes slice by slice, whatever that costs.

    Args:
        plan: a plan that is no loop.
        axes: the size of a slice for each axis that is cut, the outermost first.
    """
    problem = Problem(plan.resolved, plan.operands, plan.dtype, plan.backend, plan.device)
    key = plan.options.minimize if isinstance(plan.options.minimize, str) else "time"
    found = _loop_candidate(problem, plan.options, tuple(axes.items()), plan.tree, key, plan.index_mode)
    return dataclasses.replace(
        plan, tree=found.tree, programs=found.programs, proven=False, origin="sliced", loop=found.loop
    )


def within(cost: PlanCost, options: Options) -> bool:
    """Whether a plan keeps to the limits."""
    return _within(cost, Limits(options.memory_limit, options.retain_limit))


def _within(cost: PlanCost, limits: Limits) -> bool:
    return (limits.memory is None or cost.peak_bytes <= limits.memory) and (
        limits.retain is None or cost.retained_bytes <= limits.retain
    )


def _limit_error(candidates: Sequence[_Candidate], limits: Limits) -> PlannerLimitError:
    """Name limits that succeed: one of them raised and the other held where that is possible, else both."""
    memory, retain = limits
    costs = [candidate.cost for candidate in candidates]
    least_peak = min((c for c in costs if retain is None or c.retained_bytes <= retain),
                     key=lambda c: c.peak_bytes, default=None)  # fmt: skip
    least_retained = min((c for c in costs if memory is None or c.peak_bytes <= memory),
                         key=lambda c: c.retained_bytes, default=None)  # fmt: skip
    asked = {"memory_limit": memory, "retain_limit": retain}
    enough = dict(asked)
    if memory is not None and least_peak is not None:
        enough["memory_limit"] = least_peak.peak_bytes
    elif retain is not None and least_retained is not None:
        enough["retain_limit"] = least_retained.retained_bytes
    else:
        pair = min(costs, key=lambda c: (c.peak_bytes, c.retained_bytes))
        enough = {"memory_limit": pair.peak_bytes, "retain_limit": pair.retained_bytes}
    tried, given = (
        " with ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None)
        for limits in (asked, enough)
    )
    return PlannerLimitError(f"no plan was found within {tried}; {given} succeeds")


def _ordered(problem: Problem, best: _Candidate, options: Options) -> _Candidate:
    """Evaluate children in the order that needs the least memory, where the objective left it open."""
    if options.minimize == "peak" or best.loop is not None:
        return best
    nodes = _binary_nodes(best.tree)
    if len(nodes) > 12:
        return best
    for path in nodes:
        for field in ("order", "backward_order"):
            tree = _flipped(best.tree, path, field)
            programs = problem.programs(tree, best.lower)
            if programs.cost.peak_bytes < best.cost.peak_bytes:
                best = dataclasses.replace(best, tree=tree, programs=programs)
    return best


def _binary_nodes(tree: Tree, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if isinstance(tree, Leaf):
        return []
    own = [path] if sum(isinstance(c, Node) for c in tree.children) == 2 else []
    return own + [p for i, child in enumerate(tree.children) for p in _binary_nodes(child, (*path, i))]


def _flipped(tree: Tree, path: tuple[int, ...], field: str) -> Tree:
    assert isinstance(tree, Node)
    if not path:
        return dataclasses.replace(tree, **{field: tuple(reversed(getattr(tree, field)))})  # type: ignore[arg-type]
    children = list(tree.children)
    children[path[0]] = _flipped(children[path[0]], path[1:], field)
    return dataclasses.replace(tree, children=tuple(children))


def alternatives(plan: Plan, most: int) -> tuple[Alternative, ...]:
    """Return the best other plans: other objectives, other keep settings, other paths, the naive way."""
    problem = Problem(plan.resolved, plan.operands, plan.dtype, plan.backend, plan.device)
    seen = {_signature(plan.programs)}
    key = plan_key(plan.options.minimize)
    key(plan.cost)  # a function that is not there any more shows here
    found: list[tuple[Any, Plan, str]] = []

    def consider(make: Callable[[], tuple[Found | None, Lowerer]], origin: str, bare: bool = False) -> None:
        try:
            known, lower = make()
        except SearchLimitError:
            return
        if known is None:
            return
        tree = keeping(known.tree, False) if bare else known.tree
        programs = problem.programs(tree, lower)
        if _signature(programs) not in seen:
            seen.add(_signature(programs))
            other = dataclasses.replace(plan, tree=tree, programs=programs, proven=False, origin=origin, loop=None)
            found.append((key(programs.cost), other, origin))

    exact = problem.exact_work() <= 20 * AUTO_WORK
    for bare in (False, True) if any(problem.requires) else (False,):
        for objective in OBJECTIVES:
            if exact:
                consider(partial(problem.search, objective, AUTO_WORK), f"least {objective}", bare)
        for name in ("greedy", "left to right"):
            path = left_to_right(len(plan.operands)) if name == "left to right" else problem.path(name)
            consider(partial(problem.search, "time", PATH_WORK, path), f"{name} path", bare)
    consider(lambda: problem.search("flops", PATH_WORK, problem.path("auto"), naive=True), "naive: takes first")
    found.sort(key=lambda entry: entry[0])
    return tuple(Alternative(p, origin, _why(plan, p)) for _, p, origin in found[:most])


def _signature(programs: Programs) -> tuple[Any, ...]:
    steps = programs.forward.steps + (programs.backward.steps if programs.backward else ())
    return tuple((step.op, step.choice.lowering) for step in steps)


def _why(plan: Plan, other: Plan) -> str:
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
        parts.append("better, but not among the candidates")
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
