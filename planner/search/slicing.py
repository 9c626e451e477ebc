"""Which axes to cut, and into slices of which size: candidate plans that are loops over slices."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.cost.figures import Cost
from planner.cost.limits import NO_LIMITS, Limits, keeps_within
from planner.cost.objective import plan_key
from planner.language.dtypes import itemsize
from planner.language.errors import PlannerError, SearchLimitError
from planner.language.spec import Spec, term_axes
from planner.program.build import Lowerer, lowerer_for
from planner.program.loops import (
    device_in_loop,
    loop_node,
    loop_over,
    resize_tree,
    slice_counts,
    slice_of,
)
from planner.program.ops import Einsum
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Programs
from planner.program.tree import Node, Tree, keep_values, nodes_of
from planner.search.parts import TreePart, cut_out, large_values, whole_part
from planner.search.space import MOST_AUTO, SLICE_STOP, Candidate, SearchSpace, run_searches

__all__ = ["can_be_cut", "fastest", "loop_candidates", "make_loop", "worth_cutting"]

# Without limits, loops over slices are considered if a plan allocates this much beyond its results.
LARGE_BYTES = 1 << 25
MOST_LOOPS, MOST_SLICES = 3, 4096
# The share of the steps that loops around parts of a tree may take.
PART_SHARE = 8
# Loops around parts are tried for up to so many operands.
MOST_PART_OPERANDS = 200
# For many operands the search for loops may price this many times fewer steps.
LARGE_SHARE = 4
# How many steps the search for loops may price, without limits and with; each takes 50 to 200 us.
PRICED_STEPS, PRICED_STEPS_LIMITED = 10_000, 30_000
# Under a limit, slices predicted to take no more than this times the fastest count as equally fast, and the leanest of
# them are taken.
TIES = 1.05
# Without limits, for time: predictions do not decide between plans whose times are closer than CLOSE. Of those a loop
# is taken if it allocates SAVING times less, because touching new memory costs time. Measured with gradients in torch,
# time of the loop over the time without: clique 0.9 to 1.0 (3 MB for 337), chain-ijkl 1.3 to 2.5 (169 for 369),
# equivariant 2.2 (68 for 101); in JAX clique 0.6 (11 for 337) and seed-sliced-einsum, forward, 1.3 (13 for 71). Each
# was predicted to be about as fast.
CLOSE, SAVING = 1.25, 16


def loop_candidates(space: SearchSpace, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield candidates that go slice by slice, if a limit asks for them or if large intermediates cost time.

    The loops grow by one axis at a time. Each time the search prices slices of every axis that can be cut, those of the
    largest values first, and takes the best. It ends if nothing gets better or if it has priced enough. It prices
    slices with the trees that were found for the whole contraction, and with trees made for slices of one element. Of
    slices that take about the same time it takes those with the least peak.

    Args:
        space: the contraction, and the searches on it.
        candidates: the candidates found so far.
    """
    options = space.options
    limits = Limits(options.memory_limit, options.retain_limit)
    limited = limits != NO_LIMITS
    key = plan_key(options.minimize)
    allowed = [candidate for candidate in candidates if keeps_within(candidate.cost, limits)]
    rival = min(allowed or candidates, key=lambda candidate: key(candidate.cost))
    if allowed and rival.cost.peak_bytes - _results_bytes(rival.programs) < LARGE_BYTES:
        return
    trees = dict.fromkeys(keep_values(candidate.tree, False) for candidate in candidates)
    search = _LoopSearch(space, rival.programs, tuple(trees))
    around_parts = search.price_parts(candidates, limits)

    def excess(candidate: Candidate) -> int:
        """Return the bytes by which a candidate exceeds the limits."""
        cost = candidate.cost
        pairs = ((cost.peak_bytes, limits.memory), (cost.retained_bytes, limits.retain))
        return sum(max(0, size - limit) for size, limit in pairs if limit is not None)

    def rank(candidate: Candidate) -> Any:
        return (excess(candidate), *key(candidate.cost))

    def leanest_of_the_fast(tried: Sequence[Candidate], first: Candidate) -> Candidate:
        most = (TIES if limited else CLOSE) * first.cost.seconds
        fast = [c for c in tried if excess(c) == excess(first) and c.cost.seconds <= most]
        return min(fast, key=lambda candidate: (candidate.cost.peak_bytes, rank(candidate)))

    def best_of(tried: Sequence[Candidate]) -> list[Candidate]:
        """Return the best candidate; if time decides without limits, the leanest of the fast ones before it."""
        first = min(tried, key=rank)
        best = leanest_of_the_fast(tried, first) if options.minimize == "time" else first
        return [best] if best is first or limited else [best, first]

    if around_parts:
        yield from best_of(around_parts)
    if search.large and limits.memory is not None and not allowed:
        for candidate in search.price_many_axes(rival.tree, limits.memory):
            yield candidate
            if keeps_within(candidate.cost, limits):
                return
    axes: tuple[tuple[str, int], ...] = ()
    previous: Candidate | None = None
    for _ in range(MOST_LOOPS):
        tried = search.price_another_axis(axes)
        if not tried:
            break
        first = min(tried, key=rank)
        if previous is not None and rank(first) >= rank(previous):
            break
        previous = first
        best, *others = best_of(tried)
        yield from (best, *others)
        assert best.loop is not None
        axes = best.loop.axes
        if keeps_within(best.cost, limits) and (not allowed or len(axes) > 1):
            break


class _LoopSearch:
    """Prices loops, until it has priced as many steps as it may.

    Args:
        space: the contraction, and the searches on it.
        whole: the best programs without a loop, or the best ones that exceed the limits.
        trees: trees for the whole contraction; each loop is priced with all of them.
    """

    def __init__(self, space: SearchSpace, whole: Programs, trees: Sequence[Tree]) -> None:
        self.space, self.whole, self.trees = space, whole, trees
        options = space.options
        limited = options.memory_limit is not None or options.retain_limit is not None
        self.steps_left = PRICED_STEPS_LIMITED if limited else PRICED_STEPS
        # The steps of many operands are small ones, and the loops over them are many.
        self.large = len(space.operands) > MOST_AUTO
        if self.large:
            self.steps_left //= LARGE_SHARE
        keys = ("time", "peak") if limited or options.minimize in ("peak", "retained") else ("time",)
        device = device_in_loop(space.device, space.backend)
        self.lowerers = {key: lowerer_for(space.backend, device, key) for key in keys}

    def is_over(self) -> bool:
        """Whether as many steps as allowed are priced, or the deadline is over."""
        return self.steps_left <= 0 or (self.space.ends is not None and time.monotonic() > self.space.ends)

    def price_another_axis(self, axes: tuple[tuple[str, int], ...]) -> list[Candidate]:
        """Return loops over the given axes and one more: each axis that can be cut, in slices of several sizes."""
        spec = self.space.resolved.spec
        priced: list[Candidate] = []
        for axis, size in _by_bytes(self.whole, spec):
            if size < 2 or axis in dict(axes) or not can_be_cut(spec, axis) or self.is_over():
                continue
            self.steps_left -= SLICE_STOP.priced
            slice_trees = [] if self.large else _slice_trees(self.space, {**dict(axes), axis: 1})
            trees = tuple(dict.fromkeys((*self.trees, *slice_trees)))
            for slice_size in _ladder(size):
                cut = (*axes, (axis, slice_size))
                if math.prod(-(-spec.size(a) // length) for a, length in cut) <= MOST_SLICES:
                    priced += self._price(cut, trees)
        return priced

    def price_many_axes(self, tree: Tree, limit: int) -> Iterator[Candidate]:
        """Yield loops over more and more axes, in slices of one element, once the largest value is within the limit.

        Among the axes of the largest value, each time the one is cut that adds the fewest FLOPs: a step without the
        axis is done again for each slice.
        """
        spec = self.space.resolved.spec
        sizes, width, slices = dict(spec.sizes), itemsize(self.space.dtype), 1
        nodes = [node for node in nodes_of(tree) if isinstance(node.op, Einsum)]
        joints = [set(node.op.spec.axes) for node in nodes]
        results = [set(term_axes(node.op.spec.output)) for node in nodes]
        cut: list[tuple[str, int]] = []

        def elements(axes: set[str]) -> int:
            return math.prod(sizes.get(axis, 1) for axis in axes)

        while results:
            largest = max(results, key=elements)
            free = [axis for axis in sorted(largest) if sizes.get(axis, 1) > 1 and can_be_cut(spec, axis)]
            if not free:
                return
            work = [(elements(axes), axes) for axes in joints]

            def flops(axis: str, work: Sequence[tuple[int, set[str]]] = work) -> int:
                return sum(count if axis in axes else count * sizes[axis] for count, axes in work)

            axis = min(free, key=flops)
            slices *= sizes[axis]
            if slices > MOST_SLICES:
                return
            cut.append((axis, 1))
            sizes[axis] = 1
            if elements(max(results, key=elements)) * width <= limit:
                yield from self._price(tuple(cut), (tree,))

    def price_parts(self, candidates: Sequence[Candidate], limits: Limits) -> list[Candidate]:
        """Return trees with a loop around the steps that make and read their largest values.

        Each axis that all of these values have is cut, into smaller and smaller slices until limits are met.
        """
        if len(self.space.operands) > MOST_PART_OPERANDS:
            return []
        left, self.steps_left = self.steps_left, self.steps_left // PART_SHARE
        priced = list(self._price_parts(candidates, limits))
        self.steps_left += left - left // PART_SHARE
        return priced

    def _price_parts(self, candidates: Sequence[Candidate], limits: Limits) -> Iterator[Candidate]:
        for candidate in {candidate.tree: candidate for candidate in candidates}.values():
            for root, least in large_values(candidate.tree):
                part = cut_out(self.space.contraction, candidate.tree, root, least)
                if part is None or part.is_whole:
                    continue
                for axis in part.large_axes:
                    size = part.contraction.resolved.spec.size(axis)
                    sizes = [n for n in _ladder(size) if -(-size // n) <= MOST_SLICES]
                    for (key, lower), slice_size in itertools.product(self.lowerers.items(), sizes):
                        if self.is_over():
                            return
                        self.steps_left -= 2 * len(candidate.programs.steps)  # those of the whole, and of a slice
                        looped = _loop_around(self.space, part, ((axis, slice_size),), key, lower, candidate.lower)
                        if looped is None:
                            break
                        yield looped
                        if limits != NO_LIMITS and keeps_within(looped.cost, limits):
                            break

    def _price(self, axes: tuple[tuple[str, int], ...], trees: Sequence[Tree]) -> list[Candidate]:
        """Return a loop with each tree, its steps lowered by each key."""
        steps = len(slice_counts(axes, self.space.resolved.spec)) * len(self.whole.forward.computing)
        if any(self.space.requires):
            steps *= 4
        priced = []
        for tree in trees:
            for key, lower in self.lowerers.items():
                looped = _loop_around(self.space, whole_part(self.space.contraction, tree), axes, key, lower)
                assert looped is not None
                priced.append(looped)
                self.steps_left -= steps
        return priced


def worth_cutting(loop: Cost, whole: Cost) -> bool:
    """Whether a loop is faster than a plan without one, or far leaner and, as far as predictions tell, as fast."""
    if CLOSE * loop.seconds <= whole.seconds:
        return True
    return loop.seconds <= CLOSE * whole.seconds and SAVING * loop.peak_bytes <= whole.peak_bytes


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best candidate for time.

    If some loops are worth it, that is the leanest of those that are about as fast as the fastest loop. Otherwise it is
    the fastest candidate without a loop.
    """
    key = plan_key("time")
    whole = min((c for c in candidates if c.loop is None), key=lambda c: key(c.cost))
    loops = [c for c in candidates if c.loop is not None and worth_cutting(c.cost, whole.cost)]
    most = CLOSE * min((c.cost.seconds for c in loops), default=0.0)
    near = [c for c in loops if c.cost.seconds <= most]
    return min(near, key=lambda c: (c.cost.peak_bytes, key(c.cost)), default=whole)


def _by_bytes(programs: Programs, spec: Spec) -> list[tuple[str, int]]:
    """Return the axes and their sizes, sorted by how many bytes the steps that involve the axis write, most first."""
    written = dict.fromkeys(spec.by_axis, 0)
    for step in programs.forward.computing:
        size = sum(programs.variables[v].bytes for v in step.outputs)
        step_axes: set[str] = set()
        for term in step.op.spec.terms:
            step_axes.update(term_axes(term))
        for axis in step_axes & written.keys():
            written[axis] += size
    return sorted(spec.sizes, key=lambda pair: -written[pair[0]])


def can_be_cut(spec: Spec, axis: str) -> bool:
    """Whether a slice along an axis cuts each index array in one way only.

    An index array that is used in several different brackets must have the axis in none of them.
    """
    brackets: dict[str, set[tuple[str, ...]]] = {}
    for gather in spec.gathers:
        brackets.setdefault(gather.array, set()).add(gather.axes)
    return all(len(uses) == 1 or all(axis not in axes for axes in uses) for uses in brackets.values())


def _ladder(size: int) -> list[int]:
    """Return the sizes of slices to consider: a half of the size, a quarter, and so on down to one."""
    steps = [size]
    while steps[-1] > 1:
        steps.append(-(-steps[-1] // 2))
    return steps[1:]


def _results_bytes(programs: Programs) -> int:
    """Return the bytes of the larger program's results: the result of the contraction, or the gradients."""
    gradients = sum(programs.variables[v].bytes for v in programs.gradients if v is not None)
    return max(gradients, programs.variables[programs.result].bytes)


def _slice_trees(space: SearchSpace, sizes: Mapping[str, int]) -> list[Tree]:
    """Search trees for a slice, and return them with the sizes of the whole contraction."""
    device = device_in_loop(space.device, space.backend)
    part = SearchSpace(dataclasses.replace(slice_of(space.contraction, sizes), device=device))
    whole = space.resolved.spec.by_axis
    try:
        results = [result for result, _, _ in run_searches(part, space.options.optimize, "time", NO_LIMITS, SLICE_STOP)]
    except SearchLimitError:
        return []
    if any(result.interrupted for result in results):
        raise KeyboardInterrupt
    trees = [result.tree for result in results]
    return [keep_values(resize_tree(tree, whole), False) for tree in trees]


def _loop_around(
    space: SearchSpace,
    part: TreePart,
    axes: tuple[tuple[str, int], ...],
    key: str,
    lower: Lowerer | None = None,
    whole_lower: Lowerer | None = None,
) -> Candidate | None:
    """Price one loop around a part of a tree.

    Args:
        space: the contraction.
        part: what the loop goes around.
        axes: the axes that are cut and their slices' sizes.
        key: names the objective by which the steps of slices are chosen.
        lower: what chooses these.
        whole_lower: what chooses the other steps; by the same objective, if it is None.

    Returns:
        The candidate; None if a value lies in memory otherwise than the part's contraction has it.
    """
    loop = loop_over(part.contraction, axes, part.tree, device_in_loop(space.device, space.backend), key, lower)
    whole_lower = whole_lower or space.lowerer(key)
    tree = part.replaced(loop_node(loop, part.children))
    programs = space.programs(tree, whole_lower)
    layouts = part.layouts
    for step in programs.steps:
        if isinstance(step.op, Loop) and (step.op.spec, step.op.axes) == (loop.spec, loop.axes):
            expected = layouts if step.op.first_operand else layouts[1:]
            if step.op.layouts != (expected if any(expected) else ()):
                return None
    return Candidate(programs, tree, whole_lower, False, "sliced")


def make_loop(plan: PlanRecord, axes: Mapping[str, int], around: tuple[Node, int] | None = None) -> PlanRecord:
    """Return a plan with the same tree that goes slice by slice, whatever it costs.

    Args:
        plan: a plan; if its tree has a loop, that one runs in each slice.
        axes: the size of a slice for each axis that is cut, the outermost first.
        around: the part of the tree to cut, as `cut_out` takes it; None for the whole tree.

    Raises:
        PlannerError: there can be no loop around that part.
    """
    whole = whole_part(plan.contraction, plan.tree)
    part = whole if around is None else cut_out(plan.contraction, plan.tree, *around)
    axes_and_sizes = tuple(axes.items())
    looped = None
    if part is not None:
        looped = _loop_around(SearchSpace(plan.contraction), part, axes_and_sizes, plan.options.objective)
    if looped is None:
        raise PlannerError("the steps read index arrays, or values that lie in another order than expected")
    return dataclasses.replace(plan, tree=looped.tree, programs=looped.programs, proven=False, origin="sliced")
