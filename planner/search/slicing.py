"""Which axes to cut, and into slices of which size: candidate plans that are loops over slices."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from planner.cost.figures import Cost
from planner.cost.limits import NO_LIMITS, keeps_within, limits_of
from planner.cost.objective import plan_key
from planner.language.dtypes import itemsize
from planner.language.errors import SearchLimitError
from planner.language.spec import Spec, term_axes
from planner.program.build import Lowerer
from planner.program.contraction import Contraction
from planner.program.loops import (
    Axes,
    device_in_loop,
    least_seconds,
    lie_as_expected,
    loop_node,
    loop_over,
    resize_tree,
    slice_counts,
    slice_of,
)
from planner.program.ops import Einsum
from planner.program.plan import Loop
from planner.program.program import Programs
from planner.program.tree import Tree, keep_nothing, nodes_of
from planner.search.many.searches import MOST_AUTO, run_searches
from planner.search.parts import TreePart, loop_part, parts_to_cut, whole_part
from planner.search.space import SLICE_STOP, Candidate, SearchSpace

# Without limits, loops over slices are considered if a plan allocates this much beyond its results.
LARGE_BYTES = 1 << 25
MOST_LOOPS, MOST_SLICES = 3, 4096
# How many trees with loops get another loop.
MOST_NESTED = 2
# The share of the steps that loops around parts of a tree may take.
PART_SHARE = 8
# Loops around parts are tried for up to so many operands.
MOST_PART_OPERANDS = 200
# For many operands the search for loops may price this many times fewer steps.
LARGE_SHARE = 4
# How many steps the search for loops may price, without limits and with; each takes 50 to 200 us.
# The last is for limits that a small plan without a loop is within: then no trees are searched for slices either.
PRICED_STEPS, PRICED_STEPS_LIMITED, PRICED_STEPS_RIVALLED = 10_000, 30_000, 1_000
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
    """Yield candidates that go slice by slice, if a limit rules the best plan out or if large intermediates cost time.

    If other plans without a loop are within the limits, loops compete with them: slices get smaller only as long as
    that may save time. Where peaks or retained bytes are minimised they do not: the smallest, slowest ones would win.

    The loops grow by one axis at a time. Each time the search prices slices of every axis that can be cut, those of the
    largest values first, and takes the best. It ends if nothing gets better or if it has priced enough. It prices
    slices with the trees that were found for the whole contraction, and with trees made for slices of one element. Of
    slices that take about the same time it takes those with the least peak.

    Args:
        space: the contraction, and the searches on it.
        candidates: the candidates found so far.
    """
    options = space.options
    limits = limits_of(options)
    key = plan_key(options.minimize)
    allowed = [candidate for candidate in candidates if keeps_within(candidate.cost, limits)]
    rival = min(allowed or candidates, key=lambda candidate: key(candidate.cost))
    small = bool(allowed) and allocates_little(rival.programs)
    ruled_out = key(rival.cost) > min(key(candidate.cost) for candidate in candidates)
    competes = bool(allowed) and ruled_out and options.minimize not in ("peak", "retained")
    too_fast = options.minimize == "time" and rival.cost.seconds < least_seconds(space.contraction)
    if small and (too_fast or not competes):
        return
    trees = dict.fromkeys(keep_nothing(candidate.tree) for candidate in candidates)
    search = _LoopSearch(space, rival.programs, tuple(trees), rival.cost if competes else None)
    if small:
        search.steps_left, search.searches = PRICED_STEPS_RIVALLED, False
    yield from search.around_parts(candidates)
    if search.large and limits.memory is not None and not allowed:
        for candidate in search.price_many_axes(rival.tree, limits.memory):
            yield candidate
            if keeps_within(candidate.cost, limits):
                return
    yield from search.around_all(1 if small or not allowed else 2)


class _LoopSearch:
    """Finds loops, until it has priced as many steps as it may.

    Args:
        space: the contraction, and the searches on it.
        whole: the best programs without a loop, or the best ones that exceed the limits.
        trees: trees for the whole contraction; each loop is priced with all of them.
        rival: the cost that loops must beat, if there is one.
    """

    def __init__(self, space: SearchSpace, whole: Programs, trees: Sequence[Tree], rival: Cost | None) -> None:
        self.space, self.whole, self.trees = space, whole, trees
        options, self.limits = space.options, limits_of(space.options)
        self.key = plan_key(options.minimize)
        self.rival = None if rival is None else self.key(rival)
        self.only_time = options.minimize == "time" and not options.limited
        self.steps_left = PRICED_STEPS_LIMITED if options.limited else PRICED_STEPS
        # The steps of many operands are small ones, and the loops over them are many.
        self.large = len(space.operands) > MOST_AUTO
        self.searches = not self.large
        if self.large:
            self.steps_left //= LARGE_SHARE
        self.keys = ("time", "peak") if options.limited or options.minimize in ("peak", "retained") else ("time",)

    def around_parts(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield candidates with loops around parts of their trees: with one, then with one more in the best, and so on.

        It ends once one is within the limits, or if nothing gets better.
        """
        options, previous = self.space.options, None
        for _ in range(MOST_LOOPS if options.limited or options.minimize != "time" else 1):
            tried = self.price_parts(candidates)
            candidates = sorted(tried, key=self._rank)[:MOST_NESTED]
            if not candidates or (previous is not None and self._rank(candidates[0]) >= self._rank(previous)):
                return
            previous = candidates[0]
            yield from self._best_of(tried)
            if options.limited and keeps_within(previous.cost, self.limits):
                return

    def around_all(self, least_axes: int) -> Iterator[Candidate]:
        """Yield candidates with a loop around the whole tree: over one axis, then over one more, and so on.

        It ends once one over `least_axes` axes is within the limits, or if nothing gets better.
        """
        axes: Axes = ()
        previous = None
        for _ in range(MOST_LOOPS):
            tried = self.price_another_axis(axes)
            if not tried:
                return
            first = min(tried, key=self._rank)
            if previous is not None and self._rank(first) >= self._rank(previous):
                return
            previous = first
            best, *others = self._best_of(tried)
            yield from (best, *others)
            assert best.loop is not None
            axes = best.loop.axes
            if keeps_within(best.cost, self.limits) and (len(axes) >= least_axes or self.is_hopeless(first)):
                return

    def _best_of(self, tried: Sequence[Candidate]) -> list[Candidate]:
        """Return the best candidate; if time decides without limits, the leanest of the fast ones before it."""
        first, options = min(tried, key=self._rank), self.space.options
        best = self._leanest_of_the_fast(tried, first) if options.minimize == "time" else first
        return [best] if best is first or options.limited else [best, first]

    def _leanest_of_the_fast(self, tried: Sequence[Candidate], first: Candidate) -> Candidate:
        most = (TIES if self.space.options.limited else CLOSE) * first.cost.seconds
        fast = [c for c in tried if self._excess(c) == self._excess(first) and c.cost.seconds <= most]
        return min(fast, key=lambda candidate: (candidate.cost.peak_bytes, self._rank(candidate)))

    def _rank(self, candidate: Candidate) -> Any:
        return (self._excess(candidate), *self.key(candidate.cost))

    def _excess(self, candidate: Candidate) -> int:
        """Return the bytes by which a candidate exceeds the limits."""
        cost, limits = candidate.cost, self.limits
        pairs = ((cost.peak_bytes, limits.memory), (cost.retained_bytes, limits.retain))
        return sum(max(0, size - limit) for size, limit in pairs if limit is not None)

    def is_over(self) -> bool:
        """Whether as many steps as allowed are priced, or the deadline is over."""
        return self.steps_left <= 0 or (self.space.ends is not None and time.monotonic() > self.space.ends)

    def is_beaten(self, priced: Sequence[Candidate], larger: Sequence[Candidate]) -> bool:
        """Whether loops are no better than the rival nor than those in larger slices: then smaller ones are worse.

        Where only time decides, they must take `CLOSE` times as long as the whole, and as those in larger slices.
        """
        if not larger:
            return False
        best, before = (min(self.key(candidate.cost) for candidate in some) for some in (priced, larger))
        if self.only_time:
            return bool(best[0] > CLOSE * max(self.whole.cost.seconds, before[0]))
        return self.rival is not None and bool(best >= self.rival and best >= before)

    def is_hopeless(self, fastest: Candidate) -> bool:
        """Whether time alone decides, and the fastest loop so far is not fast enough to be taken."""
        whole, may_save = self.whole.cost, SAVING * self.whole.given_bytes <= self.whole.cost.peak_bytes
        return self.only_time and not may_save and fastest.cost.seconds * CLOSE > whole.seconds

    def price_another_axis(self, axes: Axes) -> list[Candidate]:
        """Return loops over the given axes and one more: each axis that can be cut, in slices of several sizes."""
        spec = self.space.resolved.spec
        priced: list[Candidate] = []
        for axis, size in _by_bytes(self.whole, spec):
            if size < 2 or axis in dict(axes) or not can_be_cut(spec, axis) or self.is_over():
                continue
            self.steps_left -= SLICE_STOP.priced
            slice_trees = _slice_trees(self.space, {**dict(axes), axis: 1}) if self.searches else []
            trees = tuple(dict.fromkeys((*self.trees, *slice_trees)))
            larger: list[Candidate] = []
            for slice_size in _ladder(size):
                cut = (*axes, (axis, slice_size))
                if _slices(cut, spec) > MOST_SLICES:
                    break
                found = self._price(cut, trees)
                priced += found
                if self.is_beaten(found, larger):
                    break
                larger = found
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

    def price_parts(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return trees with one more loop, over an axis of their largest values, in smaller and smaller slices.

        The loop goes around a part of the tree, which may hold other loops, or inside of another loop. Under limits
        slices get no smaller once the limits are met and smaller ones are slower.
        """
        if len(self.space.operands) > MOST_PART_OPERANDS:
            return []
        left, self.steps_left = self.steps_left, self.steps_left // PART_SHARE
        priced = list(self._price_parts(candidates))
        self.steps_left += left - left // PART_SHARE
        return priced

    def _price_parts(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        for candidate in {candidate.tree: candidate for candidate in candidates}.values():
            for key in self.keys:
                loop = partial(_loop_around, self.space, key=key)
                for sizes, looped in _with_loops(self.space.contraction, candidate.tree, loop):
                    larger: Candidate | None = None
                    for size in sizes:
                        if self.is_over():
                            return
                        self.steps_left -= 2 * len(candidate.programs.steps)  # those of the whole, and of a slice
                        priced = _price_tree(self.space, looped(size), candidate.lower)
                        if priced is None:
                            break
                        yield priced
                        if larger is not None and self.only_time and self.is_beaten([priced], [larger]):
                            break
                        if larger is not None and self.space.options.limited:
                            # Smaller slices help no more if the peak is elsewhere, or if they are slower.
                            slower = self.key(priced.cost) >= self.key(larger.cost)
                            enough = keeps_within(priced.cost, self.limits) or self.is_beaten([priced], [larger])
                            if priced.cost.peak_bytes >= larger.cost.peak_bytes or (slower and enough):
                                break
                        larger = priced

    def _price(self, axes: Axes, trees: Sequence[Tree]) -> list[Candidate]:
        """Return a loop with each tree, its steps lowered by each key."""
        steps = len(slice_counts(axes, self.space.resolved.spec)) * len(self.whole.forward.computing)
        if any(self.space.requires):
            steps *= 4
        priced = []
        for tree in trees:
            for key in self.keys:
                looped = _loop_around(self.space, whole_part(self.space.contraction, tree), axes, key)
                candidate = _price_tree(self.space, looped, self.space.lowerer(key))
                assert candidate is not None
                priced.append(candidate)
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


def _slices(axes: Axes, spec: Spec) -> int:
    """Return the number of slices of a loop."""
    return math.prod(-(-spec.size(axis) // size) for axis, size in axes)


def _ladder(size: int) -> list[int]:
    """Return the sizes of slices to consider: a half of the size, a quarter, and so on down to one."""
    steps = [size]
    while steps[-1] > 1:
        steps.append(-(-steps[-1] // 2))
    return steps[1:]


def allocates_little(programs: Programs) -> bool:
    """Whether programs allocate less than `LARGE_BYTES` besides the result of the contraction, or the gradients."""
    return programs.cost.peak_bytes - programs.given_bytes < LARGE_BYTES


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
    return [keep_nothing(resize_tree(tree, whole)) for tree in trees]


def _loop_around(space: SearchSpace, part: TreePart, axes: Axes, key: str) -> Tree:
    """Return a tree with a loop around a part of it.

    Args:
        space: the contraction.
        part: what the loop goes around.
        axes: the axes that are cut and their slices' sizes.
        key: names the objective by which the steps of slices are chosen.
    """
    loop = loop_over(part.contraction, axes, part.tree, device_in_loop(space.device, space.backend), key)
    return part.replaced(loop_node(loop, part.children))


def _with_loops(
    contraction: Contraction, tree: Tree, loop: Callable[[TreePart, Axes], Tree], inside: bool = False
) -> Iterator[tuple[list[int], Callable[[int], Tree]]]:
    """Yield the ways to put one more loop into a tree: the sizes of slices, and what returns the tree for a size.

    Args:
        contraction: the contraction that the tree is of.
        tree: the tree.
        loop: puts a loop around a part.
        inside: whether the tree is that of a loop's slices.
    """

    def cut_axis(part: TreePart, axes: Axes, axis: str, size: int) -> Tree:
        return loop(part, (*axes, (axis, size)))

    def cut_inside(part: TreePart, axes: Axes, looped: Callable[[int], Tree], size: int) -> Tree:
        return loop(dataclasses.replace(part, tree=looped(size)), axes)

    has_loops = any(isinstance(node.op, Loop) for node in nodes_of(tree))
    for part, axes, axis in parts_to_cut(contraction, tree):
        spec = part.contraction.resolved.spec
        # Loops around a whole tree without loops are priced by themselves.
        if can_be_cut(spec, axis) and not (part.is_whole and not axes and (inside or not has_loops)):
            slices = _slices(axes, spec)
            sizes = [n for n in _ladder(spec.size(axis)) if slices * -(-spec.size(axis) // n) <= MOST_SLICES]
            yield sizes, partial(cut_axis, part, axes, axis)
    for node in nodes_of(tree):
        if isinstance(node.op, Loop):
            part = loop_part(tree, node)
            for sizes, looped in _with_loops(part.contraction, part.tree, loop, inside=True):
                yield sizes, partial(cut_inside, part, node.op.axes, looped)


def _price_tree(space: SearchSpace, tree: Tree, lower: Lowerer) -> Candidate | None:
    """Return a tree with loops as a candidate; `lower` chooses the steps outside of them.

    None if a value lies otherwise in memory than slices were planned for.
    """
    programs = space.programs(tree, lower)
    return Candidate(programs, tree, lower, False, "sliced") if lie_as_expected(programs) else None
