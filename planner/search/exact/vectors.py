"""Lists the steps of all trees over a network by numpy, each with a lower bound on what it adds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from planner.cost.floor import Order, gathered_floor, product_floor, unary_floor, value_floor
from planner.language.dtypes import itemsize
from planner.search.exact.gathered import GatheredSteps, stages
from planner.search.exact.graph import Edge, first_of
from planner.search.exact.listing import Bounds, gathered_sizes, launches_of, set_keys
from planner.search.exact.network import Network, Value
from planner.search.exact.sizes import BLOCK, ValueSizes, row_launches, sizes_of, split_blocks
from planner.search.exact.steps import NETWORK, UNKNOWN, SearchEnded

# Up to how many operands the bounds of steps are kept for a second look.
KEPT_OPERANDS = 14
# A search lists the steps of trees that cost at most so many times what a greedy tree costs by bounds. It lists more if
# the best tree turns out to cost more.
LIMIT_TIMES = 2

# Steps: the value that each computes, those that it reads (the second is 0 in a step on one value), and a lower bound.
# The steps of a value are neighbours.
_Block = tuple[Any, Any, Any, Any]


class VectorListing:
    """The steps of all trees over a network, bounded by numpy.

    Most sets of operands have values so large that no good tree computes them. Steps with such a value are left out.

    Args:
        network: the network; its sizes are not 0.
        leaves: what the steps that read operands add to the score, by the values that they compute.
        bounds: what lower bounds depend on. They hold.
        deadline: the time of `time.monotonic` at which to end, or None.
        limit: steps may be left out that are only in trees of a higher score. If it is None, it is a multiple of what a
            greedy tree has by bounds, or infinite with gathers.

    Raises:
        SearchEnded: the deadline was over before the best tree by bounds was found.

    Attributes:
        limit: likewise.
        root: the value that trees compute.
        elements: the number of elements of each value.
        wanted: whether the gradient of each value is needed.
        blocks: the steps, those into small sets first; none if there are more operands than `KEPT_OPERANDS`.
        least: the least score of any tree by these bounds; more than the limit if no tree is known to be within it.
    """

    def __init__(
        self,
        network: Network,
        leaves: Mapping[int, int],
        bounds: Bounds,
        deadline: float | None = None,
        limit: float | None = None,
    ) -> None:
        self.network, self.bounds, self.operands = network, bounds, len(network.leaves)
        self._values = ValueSizes(network, self.operands)
        self.statuses, self.elements = network.statuses, self._values.elements
        sets = np.arange(network.everything + 1)
        self.wanted = np.tile((sets & bounds.gradient_operands) != 0, len(self.statuses))
        self.root = network.number(Value(network.everything, network.final))
        self._leaves = {number: float(first_of(key)) for number, key in leaves.items()}
        self._survivors: list[_Block] = []
        self._known = math.inf
        if network.gathers:
            limit = math.inf if limit is None else limit
        else:
            self._least_of_sets = self._bound_sets()
        self.limit = LIMIT_TIMES * self._greedy_score() if limit is None else limit
        self._deadline = deadline
        while not self._list() and limit is None:
            self.limit *= LIMIT_TIMES
        self._deadline = None  # now there is a tree to return

    def _check_time(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise SearchEnded

    def _list(self) -> bool:
        """List the steps of trees within the limit. Return whether there is such a tree, by bounds."""
        self.blocks: list[_Block] = []
        self._inside, self._parts = self.best_trees(self._bounded_blocks())
        self.least = float(self._inside[self.root])
        return self.least <= self.limit

    def best_trees(self, blocks: Iterable[_Block]) -> tuple[Any, tuple[Any, Any]]:
        """Return the least score of a tree of each value, and the values that the step at its root reads.

        Args:
            blocks: steps, those into small sets first.
        """
        inside = self._inside_of_leaves()
        first, second = np.zeros((2, len(inside)), dtype=np.int64)
        for result, left, right, floors in blocks:
            self._check_time()
            rows, least = least_rows(result, inside[left] + inside[right] + floors)
            some = least < inside[result[rows]]
            rows, values = rows[some], result[rows[some]]
            first[values], second[values], inside[values] = left[rows], right[rows], least[some]
        return inside, (first, second)

    def _inside_of_leaves(self) -> Any:
        """Return the least score of a tree of each value, as far as steps that read operands tell."""
        inside = np.full(len(self.wanted), np.inf)
        inside[0] = 0.0
        inside[list(self._leaves)] = list(self._leaves.values())
        return inside

    def best_steps(self) -> list[tuple[int, int, int]]:
        """Return the best tree by bounds; see `tree_steps`."""
        return tree_steps(self.root, self._parts)

    def drop_worse(self, limit: int, most: int | None = None) -> tuple[int, int | None]:
        """Drop the steps that are in no tree with this score or a lower one. A listing does so once; see `put_prices`.

        Args:
            limit: the score; no more than that of the listing.
            most: how many steps to leave at most; None for all. Those in the best trees are left.

        Returns:
            How many steps are left, and the score from which on steps of trees are missing; None if none are.
        """
        highest = known = limit * (1 + 1e-9) + 1
        left_over, totals = self._within(self._bounded_blocks(reverse=True), highest, self._inside)
        cut = None
        if most is not None and len(totals) > most:
            known = float(np.partition(totals, most)[most]) * (1 - 1e-9) - 1
            cut = int(known)
            ends = np.cumsum([len(block[0]) for block in left_over])[:-1]
            within = [total <= known for total in np.split(totals, ends)]
            if known < self.least * (1 + 1e-9) + 1:  # more steps than may be left are in trees as good as the best
                best = self.best_steps()
                within = [some | _among(block, best) for block, some in zip(left_over, within, strict=True)]
            left_over = [_rows(block, some) for block, some in zip(left_over, within, strict=True)]
        self._known = known
        self._survivors = self._sharpen(left_over, highest)
        return sum([len(block[0]) for block in self._survivors]), cut

    def put_prices(self, prices: Mapping[tuple[int, int, int], int], limit: int) -> int:
        """Put prices in the place of the bounds of steps that are left, and drop worse steps once more.

        Args:
            prices: the price of each step, by the values that it computes and reads.
            limit: as in `drop_worse`.

        Returns:
            How many steps are left.
        """
        for (value, a, b), price in prices.items():
            for result, left, right, floors in self._survivors:
                floors[(result == value) & (left == a) & (right == b)] = price
        self._survivors = self._within_reach(self._survivors, limit * (1 + 1e-9) + 1)
        return sum([len(block[0]) for block in self._survivors])

    def _within_reach(self, blocks: list[_Block], highest: float) -> list[_Block]:
        """Return the steps of trees with a score of at most `highest`, and find the best tree and its score again."""
        self._inside, self._parts = self.best_trees(reversed(blocks))
        # Steps of trees of a higher score than is known may be missing.
        self.least = max(self.least, min(float(self._inside[self.root]), self._known))
        return self._within(blocks, highest, self._inside)[0]

    def _sharpen(self, blocks: list[_Block], highest: float) -> list[_Block]:
        """Return the steps of trees with a score of at most `highest`: of few steps more is found out.

        Args:
            blocks: steps, those into large sets first.
            highest: the score.
        """
        if self.bounds.more is None or self.bounds.objective != "time" or not blocks or self.network.gathers:
            return blocks  # of steps with gathers all is known from the beginning
        union, left, right, _ = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        floors = self._floors("time", union, left, right, True)
        ends = np.cumsum([len(block[0]) for block in blocks])[:-1]
        sharper = [(*block[:3], part) for block, part in zip(blocks, np.split(floors, ends), strict=True)]
        return self._within_reach(sharper, highest)

    def _within(self, blocks: Iterable[_Block], highest: float, inside: Any) -> tuple[list[_Block], Any]:
        """Return the steps of trees with a score of at most `highest`, and the least score of a tree with each.

        Args:
            blocks: steps, those into large sets first.
            highest: the score.
            inside: the least score of a tree of each value.
        """
        outside = np.full(len(inside), np.inf)
        outside[self.root] = 0.0
        left_over: list[_Block] = []
        totals: list[Any] = [np.zeros(0)]
        for union, left, right, floors in blocks:
            above = outside[union] + floors
            total = above + inside[left] + inside[right]
            some = np.flatnonzero(total <= highest)
            if len(some):
                union, a, b, above = union[some], left[some], right[some], above[some]
                np.minimum.at(outside, a, above + inside[b])
                np.minimum.at(outside, b, above + inside[a])
                left_over.append((union, a, b, floors[some]))
                totals.append(total[some])
        return left_over, np.concatenate(totals)

    def edges(self, priced: Mapping[tuple[int, int, int], Edge] = MappingProxyType({})) -> list[Edge]:
        """Return the steps that are left, those into a value before those that read it.

        Args:
            priced: the steps that have a price, as in `put_prices`; those that read operands are returned too.
        """
        edges = {step: edge for step, edge in priced.items() if not edge.children}
        for result, left, right, floors in self._survivors:
            steps = list(zip(result.tolist(), left.tolist(), right.tolist(), strict=True))
            new = [Edge(value, (a, b) if b else (a,), 0) for value, a, b in steps]
            others = self.bounds.objectives[1:]
            set_keys(new, [floors, *(self._floors(name, result, left, right, True) for name in others)])
            edges.update((step, priced.get(step, edge)) for step, edge in zip(steps, new, strict=True))
        everything = self.network.everything
        return sorted(edges.values(), key=lambda edge: ((edge.result & everything).bit_count(), edge.result))

    def _greedy_score(self) -> float:
        """Return the score, by bounds, of a tree that multiplies the two values next whose product adds least."""
        elements, steps = self.elements, []
        parts = [1 << operand for operand in range(self.operands)]

        def added(pair: tuple[int, int]) -> float:
            a, b = pair
            return float(elements[a | b] - elements[a] - elements[b])

        while len(parts) > 1:
            a, b = min(itertools.combinations(parts, 2), key=added)
            steps.append((a, b))
            parts = [*[part for part in parts if part not in (a, b)], a | b]
        left, right = np.array(steps).T
        floors = self._floors(self.bounds.objective, left | right, left, right)
        return sum(self._leaves.values()) + float(floors.sum())

    def _bound_sets(self) -> Any:
        """Return what any tree with the value of each set costs at least: the value is written, and read again."""
        bounds, everything = self.bounds, self.network.everything
        elements = np.where(np.arange(everything + 1) & np.arange(-1, everything), self.elements, 0.0)
        elements[everything] = 0.0  # of operands and the result, which all trees have, nothing is said
        steps = self.operands - 1 + bounds.gradient_operands.bit_count()
        return value_floor(bounds.objective, bounds.device, bounds.dtype, elements, self.wanted, steps)

    def _bounded_blocks(self, reverse: bool = False) -> Iterator[_Block]:
        if self.blocks:
            yield from reversed(self.blocks) if reverse else self.blocks
            return
        if self.network.gathers:
            self.blocks = list(self._gathered_blocks())
            yield from self.blocks
            return
        good = self._least_of_sets <= self.limit * (1 + 1e-9) + 1
        blocks: list[tuple[Any, Any, Any]] = []
        for block in split_blocks(self.operands, reverse, good):
            blocks.append(block)
            if sum([len(union) for union, _, _ in blocks]) >= BLOCK:
                yield from self._bound(blocks)
                blocks = []
        yield from self._bound(blocks)

    def _bound(self, blocks: Sequence[tuple[Any, Any, Any]]) -> Iterator[_Block]:
        """Yield blocks with the bounds of their splits. Bounding all of them at once takes less time if they are small.

        Args:
            blocks: what `split_blocks` yielded.
        """
        if not blocks:
            return
        union, left, right = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        floors = self._floors(self.bounds.objective, union, left, right)
        ends = np.cumsum([len(union) for union, _, _ in blocks])[:-1]
        for block, part in zip(blocks, np.split(floors, ends), strict=True):
            bounded = (*block, part)
            if self.operands <= KEPT_OPERANDS:
                self.blocks.append(bounded)
            yield bounded

    def _gathered_blocks(self) -> Iterator[_Block]:
        """Yield the steps of a network with gathers, those into small sets and low statuses first.

        What no tree within the limit has is left out as soon as that is known, and what would read it is not listed.
        """
        bounds, everything = self.bounds, self.network.everything
        to_come = 0.0  # what each product costs at least that the tree has besides
        if bounds.objective == "time":
            to_come = min(1.0, *bounds.launches) * (bounds.device.launch_seconds - 1e-11) * 1e12
        inside, steps = self._inside_of_leaves(), GatheredSteps(self.network, self._values)
        for counts in stages(self.operands):
            self._check_time()
            result, left, right, ends = steps.into(counts, np.isfinite(inside))
            parts = (result, left, right, self._floors(bounds.objective, result, left, right))
            for block in zip(*(np.split(part, ends) for part in parts), strict=True):
                result, left, right, floors = block
                if not len(result):
                    continue
                others = self.operands - (int(result[0]) & everything).bit_count()
                scores = inside[left] + inside[right] + floors
                within = scores <= self.limit * (1 + 1e-9) + 1 - to_come * others
                np.minimum.at(inside, result[within], scores[within])
                yield _rows(block, within)

    def _orders_of(self, values: Any, copies: bool) -> Order:
        operands = values & self.network.everything
        if copies and self.bounds.orders is not None:
            return self.bounds.orders.of_sets(operands)
        known = operands & (operands - 1) != 0
        return UNKNOWN._replace(known=known, own=~known)

    def _floors(self, objective: str, result: Any, left: Any, right: Any, copies: bool = False) -> Any:
        if not self.network.gathers:
            return self._plain_floors(objective, result, left, right, copies)
        bits, count = self.operands, len(self.statuses)
        kinds = ((result >> bits) * count + (left >> bits)) * (count + 1) + np.where(right, right >> bits, count)
        floors = np.full(len(result), -1.0)
        for kind in np.unique(kinds):
            self._check_time()
            some = np.flatnonzero(kinds == kind)
            floors[some] = self._gathered_floors(objective, result[some], left[some], right[some])
        plain = np.flatnonzero(floors < 0)
        floors[plain] = self._plain_floors(objective, result[plain], left[plain], right[plain], True)
        return floors

    def _gathered_floors(self, objective: str, result: Any, left: Any, right: Any) -> Any:
        """Return the bounds of steps between values of the same statuses; -1 for products that read no index array."""
        bounds, values, network = self.bounds, self._values, self.network
        read = [left, right] if right[0] else [left]
        before, after = [network.value(int(part[0])).status for part in read], network.value(int(result[0])).status
        terms = [values.axes[part] for part in (*read, result)]
        sizes = sizes_of(network, values.size, before, after, terms, np)
        wanted = [self.wanted[part] for part in read]
        if len(read) == 1:
            moved, rows = sizes.elements * itemsize(bounds.dtype), (sizes.taken, sizes.added)
            launches = row_launches(bounds.more, sizes.indexed)
            return unary_floor(objective, bounds.device, wanted[0], moved, rows, launches, np)
        if np.all(sizes.gathers == 0):
            return -1.0
        joint, share, elements, copies, taken, added, kernels, stock = gathered_sizes(sizes, bounds, np)
        what = (joint, share, elements, copies, (taken, added), kernels, wanted, stock)
        floors = gathered_floor(objective, bounds.device, bounds.dtype, *what, np)
        return np.where(sizes.gathers, floors, -1.0)

    def _plain_floors(self, objective: str, result: Any, left: Any, right: Any, copies: bool) -> Any:
        bounds, values = self.bounds, self._values
        joint = values.size(values.axes[left] | values.axes[right])
        terms = (self.elements[left], self.elements[right], self.elements[result])
        wanted = (self.wanted[left], self.wanted[right]) if bounds.gradient_operands else (False, False)
        sets = (values.axes[left], values.axes[right], values.axes[result])
        if bounds.more is None:
            more = (0.0, 0.0, 0.0)
        else:
            orders = (self._orders_of(left, copies), self._orders_of(right, copies), NETWORK)
            gradients = bool(bounds.gradient_operands)
            more = launches_of(bounds.more, sets, orders, self.network.wide, gradients, np, copies)
        device, fused, by_terms = bounds.device, bounds.fused, bounds.by_terms
        return product_floor(objective, device, bounds.dtype, joint, terms, wanted, fused, more, by_terms=by_terms)


def least_rows(result: Any, scores: Any) -> tuple[Any, Any]:
    """Return the best step into each value, and its score. Of equally good ones the first is taken.

    Args:
        result: the value that each step computes; those of a value are neighbours.
        scores: the score of each.
    """
    starts = np.flatnonzero(np.diff(result, prepend=-1))
    least = np.minimum.reduceat(scores, starts)
    best = scores == np.repeat(least, np.diff(starts, append=len(result)))
    return np.minimum.reduceat(np.where(best, np.arange(len(result)), len(result)), starts), least


def tree_steps(root: int, parts: tuple[Any, Any]) -> list[tuple[int, int, int]]:
    """Return the steps of a tree: each value and the values that it is computed from, those first.

    The second is 0 in a step on one value. Both are 0 in a step that reads an operand.

    Args:
        root: the value that the tree computes.
        parts: the values that each value is computed from.
    """
    (first, second), steps, stack = parts, [], [root]
    while stack:
        value = stack.pop()
        read = int(first[value]), int(second[value])
        steps.append((value, *read))
        stack += [part for part in read if part]
    return steps[::-1]


def _among(block: _Block, steps: Sequence[tuple[int, int, int]]) -> Any:
    """Return which steps of a block are among some."""
    result, left, right, _ = block
    found = np.zeros(len(result), dtype=bool)
    for value, a, b in steps:
        found |= (result == value) & (left == a) & (right == b)
    return found


def _rows(block: _Block, some: Any) -> _Block:
    """Return some of the steps of a block."""
    result, left, right, floors = block
    return result[some], left[some], right[some], floors[some]
