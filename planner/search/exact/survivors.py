"""Drops splits that no tree within a limit on the peak, or as good as a known tree, has: before any step is priced.

Searches that compare peaks keep fronts of partial plans, and price each step that they look at. What they never have to
look at is found from sizes alone, by dynamic programmes over the sets of operands. They are those of
`planner.search.exact.dynamic` with nothing kept and without scratch:

    forward peak     F(S) = the least of max(F(first), out(first) + F(second), out(A) + out(B) + out(S))
    backward peak    G(S) = the least of max(g(S) + g(A) + g(B), g(second) + G(first), finished(first) + G(second))
    score            the sum of the lower bounds of `planner.cost.floor`

over all splits of S into A and B, and both orders. Kept values, scratch and recomputing only ever add to these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from planner.cost.floor import product_floor
from planner.language.dtypes import itemsize
from planner.search.exact.listing import Bounds
from planner.search.exact.sizes import ValueSizes, split_blocks
from planner.search.exact.steps import NetworkSteps, SearchResult, Splits

__all__ = ["SplitFilter"]

# Bounds are sums of floats.
SLACK = 1 + 1e-9

Array = Any  # of float64, or of integers


@dataclasses.dataclass(slots=True)
class _Block:
    """The splits of some sets of the same number of operands.

    Attributes:
        union: the sets.
        left, right: for each set, the two parts of each of its splits.
        peaks: the least peak of a tree of the set that has the split at its root.
        floors: the least that the step adds to the score; infinite if the split is dropped.
    """

    union: Array
    left: Array
    right: Array
    peaks: Array
    floors: Array


class SplitFilter:
    """The splits of all sets of operands, without gathers and without empty axes.

    Args:
        steps: the steps on the network.
        requires: for each operand, whether it needs a gradient.
        bounds: what bounds on the score depend on.
        repeats: whether the backward program runs all steps but the last again.
    """

    def __init__(self, steps: NetworkSteps, requires: Sequence[bool], bounds: Bounds, repeats: bool) -> None:
        self.everything = steps.network.everything
        sets = np.arange(self.everything + 1)
        wanted = (sets & bounds.gradient_operands) != 0
        values = ValueSizes(steps.network, len(requires))
        width = itemsize(steps.dtype)
        # Operands take no memory, and what casts and first steps make of them may be views.
        made, gradient = np.where(sets & (sets - 1), width * values.elements, 0.0), wanted * width * values.elements
        finished = np.zeros(1)
        for operand, needed in enumerate(requires):
            plain = needed and steps.cast(operand) is None and steps.first(operand) is None
            finished = np.concatenate([finished, finished + plain * gradient[1 << operand]])
        forward, backward = np.zeros(len(sets)), np.where(sets & (sets - 1), 0.0, gradient)
        self._blocks: list[_Block] = []
        for union, a, b in split_blocks(len(requires)):
            root, whole = union[0] == self.everything, union[:, None]
            computed = _least_order(forward[a], made[a] + forward[b], forward[b], made[b] + forward[a])
            computed = np.maximum(computed, made[a] + made[b] + made[whole])
            descended = _least_order(
                gradient[b] + backward[a],
                finished[a] + backward[b],
                gradient[a] + backward[b],
                finished[b] + backward[a],
            )
            descended = np.maximum(descended, (0.0 if root else gradient[whole]) + gradient[a] + gradient[b])
            forward[union], backward[union] = computed.min(axis=1), descended.min(axis=1)
            joint = values.size(values.axes[a] | values.axes[b])
            terms = (values.elements[a], values.elements[b], values.elements[whole])
            what = (bounds.objective, bounds.device, bounds.dtype, joint, terms)
            floors = product_floor(*what, (wanted[a], wanted[b]), bounds.fused)
            if repeats and not root:
                floors = floors + product_floor(*what, fused=bounds.fused)
            self._blocks.append(_Block(union, a, b, np.maximum(computed, descended), floors))

    def drop_above_peak(self, most: float) -> None:
        """Drop the splits that are in no tree with this peak or a lower one."""
        outside = np.full(self.everything + 1, np.inf)
        outside[self.everything] = 0.0
        for block in reversed(self._blocks):
            peaks = np.maximum(block.peaks, outside[block.union][:, None])
            np.minimum.at(outside, block.left, peaks)
            np.minimum.at(outside, block.right, peaks)
            block.floors[peaks > most * SLACK] = np.inf

    def drop_above_score(self, most: float) -> None:
        """Drop the splits that are in no tree with this score or a lower one."""
        inside, _ = self._least_scores()
        outside = np.full(self.everything + 1, np.inf)
        outside[self.everything] = 0.0
        for block in reversed(self._blocks):
            above = outside[block.union][:, None] + block.floors
            np.minimum.at(outside, block.left, above + inside[block.right])
            np.minimum.at(outside, block.right, above + inside[block.left])
            block.floors[above + inside[block.left] + inside[block.right] > most * SLACK + 1] = np.inf

    def good_trees(self, by_peak: bool, within: bool) -> Iterator[Splits]:
        """Yield good trees by bounds, each as the only split of each of its sets.

        Args:
            by_peak: whether the least peak is all that counts.
            within: whether peaks count too, besides the score.
        """
        scores, cheapest = self._least_scores()
        if by_peak or within:
            left = np.zeros(self.everything + 1, dtype=np.int64)
            for block in self._blocks:
                left[block.union] = _at(block.left, block.peaks.argmin(axis=1))
            yield _tree(left)
        if not by_peak and np.isfinite(scores[self.everything]):
            yield _tree(cheapest)

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
        left_over: dict[int, list[tuple[int, int]]] = {}
        for block in self._blocks:
            rows, columns = np.nonzero(np.isfinite(block.floors))
            parts = (block.union[rows], block.left[rows, columns], block.right[rows, columns])
            for union, a, b in zip(*(part.tolist() for part in parts), strict=True):
                left_over.setdefault(union, []).append((a, b))
        return lambda operands: left_over.get(operands, [])

    def _least_scores(self) -> tuple[Array, Array]:
        """Return the least score of a tree of each set, and the first part of the split at its root."""
        sets = np.arange(self.everything + 1)
        inside, left = np.where(sets & (sets - 1), np.inf, 0.0), np.zeros(len(sets), dtype=np.int64)
        for block in self._blocks:
            total = inside[block.left] + inside[block.right] + block.floors
            best = total.argmin(axis=1)
            inside[block.union], left[block.union] = _at(total, best), _at(block.left, best)
        return inside, left


def _at(table: Array, columns: Array) -> Array:
    """Return one entry of each row."""
    return np.take_along_axis(table, columns[:, None], axis=1)[:, 0]


def _tree(left: Array) -> Splits:
    """Return a tree as the splits of its sets, from the first part of each set."""
    return lambda operands: [(int(left[operands]), operands ^ int(left[operands]))]


def _least_order(first: Array, then: Array, other_first: Array, other_then: Array) -> Array:
    """Return the lower peak of two orders, each with the peaks of its two halves."""
    return np.minimum(np.maximum(first, then), np.maximum(other_first, other_then))
