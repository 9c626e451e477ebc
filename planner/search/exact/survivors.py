"""Drops splits that no tree within a limit on the peak, or as good as a known tree, has: before any step is priced.

Searches that compare peaks keep fronts of partial plans, and price each step that they look at. What they never have to
look at is found from sizes alone, by dynamic programmes over the sets of operands. They are those of
`planner.search.exact.dynamic` with nothing kept and without scratch:

    forward peak     F(S) = the least of max(F(first), out(first) + F(second), out(A) + out(B) + out(S))
    backward peak    G(S) = the least of max(g(S) + g(A) + g(B), g(second) + G(first), finished(first) + G(second))
    score            the sum of the lower bounds of `planner.cost.floor`

over all splits of S into A and B, and both orders; for a step on one value A, B is empty and takes nothing. Each status
of one-hot factors has values of its own. Kept values, scratch and recomputing only ever add to these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from planner.language.dtypes import itemsize
from planner.search.exact.listing import Bounds
from planner.search.exact.steps import NetworkSteps, SearchResult, Splits
from planner.search.exact.vectors import VectorListing, least_rows, tree_steps

# Bounds are sums of floats.
SLACK = 1 + 1e-9

Array = Any  # of float64, or of integers


@dataclasses.dataclass(slots=True)
class _Block:
    """Steps into values of the same status and number of operands; see `planner.search.exact.vectors`.

    Attributes:
        result, left, right: the values that each computes and reads.
        peaks: the least peak of a tree with the step at its root.
        floors: the least that the step adds to the score; infinite if the step is dropped.
    """

    result: Array
    left: Array
    right: Array
    peaks: Array
    floors: Array


class SplitFilter:
    """The splits of all sets of operands, without empty axes and with few gathers.

    Args:
        steps: the steps on the network.
        requires: for each operand, whether it needs a gradient.
        bounds: what bounds on the score depend on.
        repeats: whether the backward program runs all products but the last again. Of gathers nothing is assumed: rows
            that are taken or added up last need no product again.
        deadline: the time of `time.monotonic` at which to end, or None.

    Raises:
        SearchEnded: the deadline was over before all steps were bounded.
    """

    def __init__(
        self,
        steps: NetworkSteps,
        requires: Sequence[bool],
        bounds: Bounds,
        repeats: bool,
        deadline: float | None = None,
    ) -> None:
        leaves = {1 << operand: 0 for operand in range(len(requires))}
        self._listing = VectorListing(steps.network, leaves, bounds, deadline, np.inf)
        self._everything, root = steps.network.everything, self._listing.root
        again = dataclasses.replace(bounds, gradient_operands=0)
        repeats = repeats and not steps.network.gathers
        repeated = VectorListing(steps.network, leaves, again, deadline, np.inf).blocks if repeats else None
        # Operands take no memory, and what casts and first steps make of them may be views.
        made = itemsize(steps.dtype) * self._listing.elements
        gradient = made * self._listing.wanted
        made[[0, *leaves]] = 0.0
        finished = np.zeros(1)
        for operand, needed in enumerate(requires):
            plain = needed and steps.cast(operand) is None and steps.first(operand) is None
            finished = np.concatenate([finished, finished + plain * gradient[1 << operand]])
        finished = np.tile(finished, len(self._listing.statuses))
        forward, backward = np.full((2, len(made)), np.inf)
        forward[[0, *leaves]], backward[0] = 0.0, 0.0
        backward[list(leaves)] = gradient[list(leaves)]
        gradient[0] = 0.0
        given = np.where(np.arange(len(gradient)) == root, 0.0, gradient)  # the result's belongs to the caller
        self._blocks: list[_Block] = []
        for number, (result, a, b, floors) in enumerate(self._listing.blocks):
            computed = _least_order(forward[a], made[a] + forward[b], forward[b], made[b] + forward[a])
            computed = np.maximum(computed, made[a] + made[b] + made[result])
            descended = _least_order(
                gradient[b] + backward[a],
                finished[a] + backward[b],
                gradient[a] + backward[b],
                finished[b] + backward[a],
            )
            descended = np.maximum(descended, given[result] + gradient[a] + gradient[b])
            for known, peaks in ((forward, computed), (backward, descended)):
                rows, least = least_rows(result, peaks)
                known[result[rows]] = np.minimum(known[result[rows]], least)
            if repeated is not None:
                floors = floors + np.where(result == root, 0.0, repeated[number][3])
            self._blocks.append(_Block(result, a, b, np.maximum(computed, descended), floors))

    def drop_above_peak(self, most: float) -> None:
        """Drop the steps that are in no tree with this peak or a lower one."""
        outside = np.full(len(self._listing.elements), np.inf)
        outside[self._listing.root] = 0.0
        for block in reversed(self._blocks):
            peaks = np.maximum(block.peaks, outside[block.result])
            np.minimum.at(outside, block.left, peaks)
            np.minimum.at(outside, block.right, peaks)
            block.floors = np.where(peaks > most * SLACK, np.inf, block.floors)

    def drop_above_score(self, most: float) -> None:
        """Drop the steps that are in no tree with this score or a lower one."""
        inside, _ = self._best_trees()
        outside = np.full(len(inside), np.inf)
        outside[self._listing.root] = 0.0
        for block in reversed(self._blocks):
            above = outside[block.result] + block.floors
            np.minimum.at(outside, block.left, above + inside[block.right])
            np.minimum.at(outside, block.right, above + inside[block.left])
            total = above + inside[block.left] + inside[block.right]
            block.floors = np.where(total > most * SLACK + 1, np.inf, block.floors)

    def good_trees(self, by_peak: bool, within: bool) -> Iterator[Splits]:
        """Yield good trees by bounds, each as the only split of each of its sets.

        Args:
            by_peak: whether the least peak is all that counts.
            within: whether peaks count too, besides the score.
        """
        if by_peak or within:
            first, second = np.zeros((2, len(self._listing.elements)), dtype=np.int64)
            for block in self._blocks:
                rows, _ = least_rows(block.result, block.peaks)
                values = block.result[rows]
                first[values], second[values] = block.left[rows], block.right[rows]
            yield self._tree(first, second)
        if not by_peak:
            scores, parts = self._best_trees()
            if np.isfinite(scores[self._listing.root]):
                yield self._tree(*parts)

    def splits(self, objective: str, best: SearchResult | None) -> Splits:
        """Return the splits of trees that may be as good as the best one known, in the order of `all_splits`."""
        if best is not None:
            first = best.score[0]
            if objective == "peak":
                self.drop_above_peak(first)
            elif objective != "retained":
                self.drop_above_score(first[0])
            elif first[0] == 0:  # it retains nothing, so time decides
                self.drop_above_score(first[1])
        left_over: dict[int, set[int]] = {}
        for block in self._blocks:
            some = np.flatnonzero(np.isfinite(block.floors) & (block.right > 0))
            unions, parts = (numbers[some] & self._everything for numbers in (block.result, block.left))
            for union, part in zip(unions.tolist(), parts.tolist(), strict=True):
                left_over.setdefault(union, set()).add(part)
        return _splits({union: sorted(parts, reverse=True) for union, parts in left_over.items()})

    def _tree(self, first: Array, second: Array) -> Splits:
        """Return a tree as the splits of its sets, from the values that each value is computed from."""
        steps = tree_steps(self._listing.root, (first, second))
        return _splits({value & self._everything: [a & self._everything] for value, a, b in steps if b})

    def _best_trees(self) -> tuple[Array, tuple[Array, Array]]:
        """Return the least score of a tree of each value, and the values that the step at its root reads."""
        return self._listing.best_trees((block.result, block.left, block.right, block.floors) for block in self._blocks)


def _splits(parts: dict[int, list[int]]) -> Splits:
    """Return splits of sets of operands, from the first parts of each."""
    return lambda operands: [(part, operands ^ part) for part in parts.get(operands, ())]


def _least_order(first: Array, then: Array, other_first: Array, other_then: Array) -> Array:
    """Return the lower peak of two orders, each with the peaks of its two halves."""
    return np.minimum(np.maximum(first, then), np.maximum(other_first, other_then))
