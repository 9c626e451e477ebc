"""From a resolved problem to a plan: run the searches, compare what they found, build the programs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from planner.cost import PlanCost
from planner.device import Device
from planner.dispatch import load_backend
from planner.errors import PlannerError, PlannerLimitError, SearchLimitError
from planner.lower import Choice, Op
from planner.network import Network
from planner.objective import OBJECTIVES, check_objective, plan_key, step_key
from planner.plan import Alternative, Options, Plan
from planner.program import Keep, Leaf, Lowerer, Node, Programs, Tree, Variable, build
from planner.resolve import Resolved
from planner.search.dynamic import Found, Search, Vector
from planner.search.paths import checked_path, external_path, joined_by, left_to_right, path_names, splits_of
from planner.spec import Operand

__all__ = ["alternatives", "make_plan", "within"]

# Steps that a search may score; each takes 50 to 250 us.
AUTO_WORK, OPTIMAL_WORK, PATH_WORK = 20_000, 3_000_000, 4_000
# Ways to search over all trees; "measure" looks for its candidates as "auto" does.
SEARCHES = ("auto", "optimal", "measure")
# With more distinct gathers than this a path's search does not try every combination of their placements.
MOST_FACTORS = 5
# The score of a tree that retains nothing and takes any time.
RETAINS_NOTHING: Vector = ((0, 2**200, 0, 0),)


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

    def keeps(self) -> tuple[Keep, ...]:
        return ("all", "inputs") if any(self.requires) else ("all",)

    def search(
        self,
        objective: str,
        keep: Keep,
        work: int,
        path: Any = None,
        naive: bool = False,
        ceiling: Vector | None = None,
    ) -> tuple[Found, Lowerer]:
        """Search over the trees of a path, or over all of them; then the greedy path's score bounds what is followed.

        Raises:
            SearchLimitError: the search over all trees needs more work. One over a path then looks at fewer placements.
        """
        lower = Lowerer(self.stock_choices if naive else self.choices, step_key(objective))

        def over(network: Network, **options: Any) -> Search:
            return Search(
                network, self.requires, self.casts, self.dtype, lower, objective, keep, work, **options
            )  # fmt: skip

        count = len(self.operands)
        if path is not None:
            splits = splits_of(path, count)
            if not naive and len(self.network.gathers) <= MOST_FACTORS:
                with contextlib.suppress(SearchLimitError):
                    return over(self.network).run(splits), lower
            return over(self.few, takes_first=naive).run(splits), lower
        if count <= 2:
            return over(self.network).run(), lower
        greedy = over(self.few).run(splits_of(self.path("greedy"), count))
        try:
            if ceiling is None or greedy.score <= ceiling:
                return over(self.network, bound=greedy.score).run(), lower
            # Nothing need be below the ceiling; then the greedy tree is as good as any above it.
            search = over(self.network, bound=ceiling)
            return (search.run() if search.has_tree() else dataclasses.replace(greedy, exact=True)), lower
        except KeyboardInterrupt:
            return dataclasses.replace(greedy, exact=False, interrupted=True), lower

    def path(self, optimize: Any) -> Any:
        if isinstance(optimize, str) or callable(optimize):
            if optimize not in self._paths:
                self._paths[optimize] = external_path(self.network, optimize)
            return self._paths[optimize]
        return checked_path(optimize, len(self.operands))

    def programs(self, tree: Tree, lower: Lowerer, keep: Keep) -> Programs:
        return build(tree, self.variables, self.requires, lower, keep, self.dtype)

    def naive(self) -> Programs:
        """What `einsum` on materialised gathers would do, by opt_einsum's path."""
        found, lower = self.search("flops", "all", PATH_WORK, self.path("auto"), naive=True)
        return self.programs(found.tree, lower, "all")

    def exact_work(self) -> int:
        """Roughly the steps that the exact search would score."""
        return int(3 ** len(self.operands) // 2 * 3 ** len(self.network.gathers))


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    programs: Programs
    tree: Tree
    lower: Lowerer
    keep: Keep
    proven: bool
    origin: str
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
    candidates, interrupted = _so_far(_candidates(problem, options))
    key = plan_key(options.minimize)
    allowed = [c for c in candidates if within(c.cost, options)]
    if not allowed:
        raise KeyboardInterrupt if interrupted else _limit_error(candidates, options)
    best = min(allowed, key=lambda c: key(c.cost))
    try:
        best = _ordered(problem, best, options)
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        best = dataclasses.replace(best, proven=False, origin=f"interrupted: {best.origin}")
    given = tuple((name, index_shapes[name]) for name in resolved.spec.arrays)
    return Plan(
        text, resolved, given, problem.operands, dtype, index_mode, backend, device, options,
        best.tree, best.keep, best.programs, problem.naive().cost, best.proven, best.origin,
    )  # fmt: skip


def _so_far(candidates: Iterator[_Candidate]) -> tuple[list[_Candidate], bool]:
    """Collect candidates until Ctrl-C, and say whether it came; then no further search is begun."""
    found: list[_Candidate] = []
    try:
        for candidate in candidates:
            found.append(candidate)
            if candidate.interrupted:
                return found, True
    except KeyboardInterrupt:
        return found, True
    return found, False


def _objectives(options: Options) -> tuple[str, ...]:
    """Objectives whose best trees are candidates."""
    if callable(options.minimize):
        return OBJECTIVES
    if options.memory_limit is None and options.retain_limit is None:
        return (options.minimize,)
    return tuple(dict.fromkeys((options.minimize, "peak", "retained")))


def _candidates(problem: Problem, options: Options) -> Iterator[_Candidate]:
    limited = options.memory_limit is not None or options.retain_limit is not None
    for objective in _objectives(options):
        keeps = problem.keeps()
        if objective in ("time", "flops", "bytes") and not limited and not callable(options.minimize):
            keeps = ("all",)  # recomputing never saves time
        for keep in keeps:
            # Recomputing retains nothing, so trees that keep values compete only if they retain nothing either.
            rival = objective == "retained" and keep == "all" and "inputs" in keeps and not limited
            ceiling = RETAINS_NOTHING if rival and not callable(options.minimize) else None
            for found, lower, origin in _found(problem, options.optimize, objective, keep, ceiling):
                programs = problem.programs(found.tree, lower, keep)
                proven = found.exact and origin == "exact" and not limited and not callable(options.minimize)
                how = f"{origin}, {objective}"
                yield _Candidate(programs, found.tree, lower, keep, proven, how, found.interrupted)


def _found(
    problem: Problem, optimize: Any, objective: str, keep: Keep, ceiling: Vector | None
) -> Iterator[tuple[Found, Lowerer, str]]:
    if isinstance(optimize, str) and optimize in SEARCHES:
        work = OPTIMAL_WORK if optimize == "optimal" else AUTO_WORK
        if problem.exact_work() <= 20 * work:
            try:
                yield (*problem.search(objective, keep, work, ceiling=ceiling), "exact")
                return
            except SearchLimitError:
                pass
        names = ("greedy",) if len(problem.operands) > 40 else ("greedy", "auto")
        for name in names:
            yield (*problem.search(objective, keep, PATH_WORK, problem.path(name)), f"opt_einsum {name}")
        return
    if isinstance(optimize, str) and optimize not in path_names():
        known = ", ".join(map(repr, (*SEARCHES, *path_names())))
        raise PlannerError(f"optimize={optimize!r} is unknown: take one of {known}, a path or a PathOptimizer")
    origin = f"opt_einsum {optimize}" if isinstance(optimize, str) else "given path"
    yield (*problem.search(objective, keep, PATH_WORK, problem.path(optimize)), origin)


def within(cost: PlanCost, options: Options) -> bool:
    """Whether a plan keeps to the limits."""
    return (options.memory_limit is None or cost.peak_bytes <= options.memory_limit) and (
        options.retain_limit is None or cost.retained_bytes <= options.retain_limit
    )


def _limit_error(candidates: Sequence[_Candidate], options: Options) -> PlannerLimitError:
    """Name limits that succeed: one of them raised and the other held where that is possible, else both."""
    memory, retain = options.memory_limit, options.retain_limit
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
    if options.minimize == "peak":
        return best
    nodes = _binary_nodes(best.tree)
    if len(nodes) > 12:
        return best
    for path in nodes:
        for field in ("order", "backward_order"):
            tree = _flipped(best.tree, path, field)
            programs = problem.programs(tree, best.lower, best.keep)
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

    def consider(make: Callable[[], tuple[Found, Lowerer]], keep: Keep, origin: str) -> None:
        try:
            tree, lower = make()
        except SearchLimitError:
            return
        programs = problem.programs(tree.tree, lower, keep)
        if _signature(programs) not in seen:
            seen.add(_signature(programs))
            other = dataclasses.replace(plan, tree=tree.tree, keep=keep, programs=programs, proven=False, origin=origin)
            found.append((key(programs.cost), other, origin))

    exact = problem.exact_work() <= 20 * AUTO_WORK
    for keep in problem.keeps():
        for objective in OBJECTIVES:
            if exact:
                consider(lambda o=objective, k=keep: problem.search(o, k, AUTO_WORK), keep, f"least {objective}")  # type: ignore[misc]
        for name in ("greedy", "left to right"):
            path = left_to_right(len(plan.operands)) if name == "left to right" else problem.path(name)
            consider(lambda p=path, k=keep: problem.search("time", k, PATH_WORK, p), keep, f"{name} path")  # type: ignore[misc]
    consider(
        lambda: problem.search("flops", "all", PATH_WORK, problem.path("auto"), naive=True),
        "all",
        "naive: takes first",
    )
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
