"""Which axes to cut, and into slices of which size: candidates that go slice by slice."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.cost.figures import Cost
from planner.cost.limits import NO_LIMITS, Limits, keeps_within
from planner.cost.objective import plan_key, step_key
from planner.language.errors import SearchLimitError
from planner.language.options import Options
from planner.language.spec import Spec, term_axes
from planner.program.build import Lowerer, build, given_variables
from planner.program.contraction import Contraction
from planner.program.loops import device_in_loop, loop_programs, resize_tree, slice_counts, slice_of
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Programs
from planner.program.tree import Tree, keep_values
from planner.search.space import SLICE_WORK, Candidate, SearchSpace, run_searches

__all__ = ["can_be_cut", "fastest", "loop_candidates", "make_loop", "worth_cutting"]

# Without limits, loops over slices are considered where a plan allocates this much beyond its results.
LARGE_BYTES = 1 << 25
MOST_LOOPS, MOST_SLICES = 3, 4096
# Steps that may be priced for it, without limits and with; each takes 50 to 200 us.
PRICED_STEPS, PRICED_STEPS_LIMITED = 10_000, 30_000
# Under a limit slices predicted to take no more than this times the fastest are as fast, and the leanest are taken.
TIES = 1.05
# Without limits, for time: between plans that are closer no prediction decides, and what allocates this many times less
# is taken, for new memory must be touched. Measured with gradients in torch, time of the loop over that of the whole:
# clique 0.9 to 1.0 (3 MB for 337), chain-ijkl 1.3 to 2.5 (169 for 369), equivariant 2.2 (68 for 101); in JAX clique 0.6
# (11 for 337) and seed-sliced-einsum, forward, 1.3 (13 for 71). Each was predicted to be about as fast.
CLOSE, SAVING = 1.25, 16


def loop_candidates(space: SearchSpace, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Candidates that go slice by slice: where a limit asks for it, or where large intermediates cost time.

    Axes are added one at a time, each time the one whose slices serve best, until nothing gets better or enough were
    tried: first those of the largest values. Slices are priced with the trees that were found for the whole, and with
    trees made for slices of one element. Of slices that take about the same time, those with the least peak are taken.
    """
    options = space.options
    limits = Limits(options.memory_limit, options.retain_limit)
    limited = limits != NO_LIMITS
    key = plan_key(options.minimize)
    allowed = [c for c in candidates if keeps_within(c.cost, limits)]
    rival = min(allowed or candidates, key=lambda c: key(c.cost))
    if allowed and rival.cost.peak_bytes - _results_bytes(rival.programs) < LARGE_BYTES:
        return
    lowerers = {name: _body_lowerer(space, name) for name in ("time", "peak")}
    keys = ("time", "peak") if limited or options.minimize in ("peak", "retained") else ("time",)
    found: list[Candidate] = []
    trees = list(dict.fromkeys(keep_values(c.tree, False) for c in candidates))
    axes: tuple[tuple[str, int], ...] = ()
    left = PRICED_STEPS_LIMITED if limited else PRICED_STEPS

    def rank(c: Candidate) -> Any:
        over = max(0, c.cost.peak_bytes - options.memory_limit) if options.memory_limit is not None else 0
        return (over, *key(c.cost))

    for _ in range(MOST_LOOPS):
        tried: list[Candidate] = []
        for axis, size in _by_bytes(rival.programs, space.resolved.spec):
            if size < 2 or axis in dict(axes) or not can_be_cut(space.resolved.spec, axis) or left <= 0:
                continue
            left -= min(SLICE_WORK, space.exact_work())
            pool = list(dict.fromkeys((*trees, *_slice_trees(space, {**dict(axes), axis: 1}))))
            for step in _ladder(size):
                cut = (*axes, (axis, step))
                if math.prod(-(-space.resolved.spec.size(a) // s) for a, s in cut) > MOST_SLICES:
                    continue
                for tree, name in itertools.product(pool, keys):
                    tried.append(_loop_candidate(space, cut, tree, lowerers[name], name))
                    priced = len(slice_counts(cut, space.resolved.spec)) * len(rival.programs.forward.steps)
                    left -= priced * (4 if any(space.requires) else 1)
        if not tried:
            break
        best = first = min(tried, key=rank)
        if found and rank(first) >= rank(found[-1]):
            break
        found.append(first)
        if options.minimize == "time":
            over, most = rank(first)[0], (TIES if limited else CLOSE) * first.cost.seconds
            near = [c for c in tried if rank(c)[0] == over and c.cost.seconds <= most]
            best = min(near, key=lambda c: (c.cost.peak_bytes, rank(c)))
        yield best
        if best is not first and not limited:
            yield first
        assert best.loop is not None
        axes = best.loop.axes
        if keeps_within(best.cost, limits) and (not allowed or len(axes) > 1):
            break


def worth_cutting(loop: Cost, whole: Cost) -> bool:
    """Whether a loop is faster than a plan without one, or as fast, as far as predictions tell, and far leaner."""
    if CLOSE * loop.seconds <= whole.seconds:
        return True
    return loop.seconds <= CLOSE * whole.seconds and SAVING * loop.peak_bytes <= whole.peak_bytes


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate without a loop, or of the loops that are worth it the leanest of the fast ones."""
    key = plan_key("time")
    whole = min((c for c in candidates if c.loop is None), key=lambda c: key(c.cost))
    loops = [c for c in candidates if c.loop is not None and worth_cutting(c.cost, whole.cost)]
    most = CLOSE * min((c.cost.seconds for c in loops), default=0.0)
    near = [c for c in loops if c.cost.seconds <= most]
    return min(near, key=lambda c: (c.cost.peak_bytes, key(c.cost)), default=whole)


def _by_bytes(programs: Programs, spec: Spec) -> list[tuple[str, int]]:
    """The axes and their sizes, first those of what the steps of a program make most of."""
    made = dict.fromkeys(dict(spec.sizes), 0)
    for step in programs.forward.steps:
        for axis in {axis for term in step.op.spec.terms for axis in term_axes(term)} & made.keys():
            made[axis] += sum(programs.variables[v].bytes for v in step.outputs)
    return sorted(spec.sizes, key=lambda pair: -made[pair[0]])


def can_be_cut(spec: Spec, axis: str) -> bool:
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


def _body_lowerer(space: SearchSpace, key: str) -> Lowerer:
    """What lowers the steps of a slice."""
    device = device_in_loop(space.device, space.backend)
    return Lowerer(lambda op: space.table.choices(op, device), step_key(key))


def _slice_trees(space: SearchSpace, sizes: Mapping[str, int]) -> list[Tree]:
    """Trees made for a slice, at the sizes of the whole."""
    part = SearchSpace(_slice_contraction(space, sizes))
    whole = dict(space.resolved.spec.sizes)
    try:
        found = [tree for tree, _, _ in run_searches(part, space.options.optimize, "time", NO_LIMITS, SLICE_WORK)]
    except SearchLimitError:
        return []
    return [keep_values(resize_tree(f.tree, whole), False) for f in found]


def _slice_contraction(space: SearchSpace, sizes: Mapping[str, int]) -> Contraction:
    """The contraction of one slice, on the device that runs it."""
    resolved, operands = slice_of(space.resolved, space.operands, sizes)
    return dataclasses.replace(
        space.contraction, text=str(space.resolved.spec), resolved=resolved, index_shapes=resolved.index_shapes,
        operands=operands, device=device_in_loop(space.device, space.backend),
    )  # fmt: skip


def _loop_candidate(
    space: SearchSpace, axes: tuple[tuple[str, int], ...], tree: Tree, lower: Lowerer, key: str
) -> Candidate:
    """Price one loop with one tree, whose steps are lowered by that key."""
    spec = space.resolved.spec
    tree = keep_values(tree, False)
    bodies, first = [], None
    for sizes, count in slice_counts(axes, spec):
        part = _slice_contraction(space, sizes)
        variables = given_variables(part.resolved, part.operands, part.backend)
        small = resize_tree(tree, sizes)
        programs = build(small, variables, space.requires, lower, space.dtype, space.gradient_strides)
        bodies.append((programs, count))
        if first is None:
            options = Options(minimize=key, precision=space.options.precision)
            first = PlanRecord.of_contraction(
                dataclasses.replace(part, options=options), tree=small, programs=programs,
                naive_cost=programs.cost, proven=False, origin="slice",
            )  # fmt: skip
    assert first is not None
    programs = loop_programs(
        spec, axes, bodies, space.variables, space.requires, space.dtype, space.device, space.backend
    )
    return Candidate(programs, tree, lower, False, "sliced", Loop(axes, first))


def make_loop(plan: PlanRecord, axes: Mapping[str, int]) -> PlanRecord:
    """Return a plan with the same tree that goes slice by slice, whatever that costs.

    Args:
        plan: a plan that is no loop.
        axes: the size of a slice for each axis that is cut, the outermost first.
    """
    space = SearchSpace(plan.contraction)
    key = plan.options.minimize if isinstance(plan.options.minimize, str) else "time"
    lower = _body_lowerer(space, key)
    found = _loop_candidate(space, tuple(axes.items()), plan.tree, lower, key)
    return dataclasses.replace(
        plan, tree=found.tree, programs=found.programs, proven=False, origin="sliced", loop=found.loop
    )
