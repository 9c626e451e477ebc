"""Lists the steps of all trees over a network without gathers by numpy, each with a lower bound on what it adds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from planner.cost.floor import product_floor
from planner.search.exact.graph import Edge, first_of
from planner.search.exact.listing import Bounds, launches_of, set_keys
from planner.search.exact.network import Network
from planner.search.exact.steps import SearchEnded

__all__ = ["ValueSizes", "VectorListing", "split_blocks"]

# How many steps numpy looks at at once, and up to how many operands their bounds are kept for a second look.
BLOCK, KEPT_OPERANDS = 1 << 15, 14


@lru_cache(maxsize=64)
def _patterns(count: int) -> Any:
    """Return the parts of a set of `count` operands that hold its first one, but not all, as rows of bits.

    They are in the order in which `all_splits` has them.
    """
    numbers = np.arange((1 << count - 1) - 2, -1, -1, dtype=np.int64)
    return (numbers[:, None] >> np.arange(count - 1) & 1).astype(np.int64)


def split_blocks(operands: int, reverse: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Yield all splits of all sets of operands: sets, and the two parts of each of their splits.

    Args:
        operands: how many operands there are.
        reverse: whether to begin with large sets rather than with small ones.
    """
    order = -1 if reverse else 1
    masks = np.arange(1, 1 << operands, dtype=np.int64)
    counts = (masks[:, None] >> np.arange(operands) & 1).sum(axis=1)
    for count in range(2, operands + 1)[::order]:
        patterns = _patterns(count)
        sets = masks[counts == count]
        each = max(1, BLOCK // len(patterns))
        for start in range(0, len(sets), each)[::order]:
            union = sets[start : start + each]
            places = np.nonzero(union[:, None] >> np.arange(operands) & 1)[1].reshape(-1, count)
            members = np.int64(1) << places
            left = members[:, :1] + members[:, 1:] @ patterns.T
            yield union, left, union[:, None] - left


class ValueSizes:
    """The axes of the value of each set of operands, as bit sets, and their numbers of elements.

    Args:
        network: a network without gathers.
        operands: how many operands it has.

    Attributes:
        axes: by the set of operands.
        elements: likewise.
    """

    def __init__(self, network: Network, operands: int) -> None:
        union = np.zeros(1, dtype=np.int64)
        for operand in range(operands):
            union = np.concatenate([union, union | network.union(1 << operand)])
        self._tables = _size_tables([network.sizes[axis] for axis in network.axes])
        few = len(network.axes) < 31
        self.axes: Any = (union & (union[::-1] | network.result_mask)).astype(np.int32 if few else np.int64)
        self.elements: Any = self.size(self.axes)

    def size(self, axes: Any) -> Any:
        """Return the product of the sizes of each set of axes."""
        shift, (table, *more) = 0, self._tables
        width = len(table).bit_length() - 1
        sizes = table[axes & len(table) - 1]
        for table in more:
            shift += width
            sizes = sizes * table[axes >> shift & len(table) - 1]
        return sizes


class VectorListing:
    """The steps of all trees over a network without gathers, bounded by numpy.

    Args:
        network: the network; its sizes are not 0.
        leaves: what reading each operand adds to the score.
        bounds: what lower bounds depend on. They hold.
        deadline: the time of `time.monotonic` at which to end, or None.

    Raises:
        SearchEnded: the deadline was over before the best tree by bounds was found.

    Attributes:
        least: the least score of any tree by these bounds.
    """

    def __init__(self, network: Network, leaves: Sequence[int], bounds: Bounds, deadline: float | None = None) -> None:
        self.network, self.bounds, self.operands = network, bounds, len(leaves)
        everything = network.everything
        self._values = ValueSizes(network, len(leaves))
        self._wanted = (np.arange(everything + 1) & bounds.gradient_operands) != 0
        self._inside = np.full(everything + 1, np.inf)
        self._left = np.zeros(everything + 1, dtype=np.int64)
        for operand, key in enumerate(leaves):
            self._inside[1 << operand] = first_of(key)
        self._kept: list[Any] = []
        for union, left, right, floors in self._bounded_blocks():
            if deadline is not None and time.monotonic() > deadline:
                raise SearchEnded
            total = self._inside[left] + self._inside[right] + floors
            best = np.argmin(total, axis=1)
            places = np.arange(len(union))
            self._inside[union] = total[places, best]
            self._left[union] = left[places, best]
        self.least = float(self._inside[everything])
        self._survivors: list[Any] = []

    def best_splits(self) -> list[tuple[int, int]]:
        """Return the best tree by bounds: each set of operands and its first part, small sets first."""
        splits, stack = [], [self.network.everything]
        while stack:
            union = stack.pop()
            if union & (union - 1):
                left = int(self._left[union])
                splits.append((union, left))
                stack += (left, union ^ left)
        return splits[::-1]

    def drop_worse(self, limit: int, most: int | None = None) -> tuple[int, int | None]:
        """Drop the steps that are in no tree with this score or a lower one.

        Args:
            limit: the score.
            most: how many steps to leave at most; None for all. Those in the best trees are left.

        Returns:
            How many steps are left, and the score from which on steps of trees are missing; None if none are.
        """
        everything = self.network.everything
        outside = np.full(everything + 1, np.inf)
        outside[everything] = 0.0
        highest = limit * (1 + 1e-9) + 1
        left_over: list[tuple[Any, Any, Any, Any]] = []
        for union, left, right, floors in self._bounded_blocks(reverse=True):
            reached = np.nonzero(outside[union] + self._inside[union] <= highest)[0]
            if not len(reached):
                continue
            union, left, right, floors = union[reached], left[reached], right[reached], floors[reached]
            above = outside[union][:, None] + floors
            total = above + self._inside[left] + self._inside[right]
            rows, columns = np.nonzero(total <= highest)
            a, b = left[rows, columns], right[rows, columns]
            above = above[rows, columns]
            np.minimum.at(outside, a, above + self._inside[b])
            np.minimum.at(outside, b, above + self._inside[a])
            left_over.append((union[rows], a, b, total[rows, columns]))
        totals = np.concatenate([block[3] for block in left_over])
        cut = None
        if most is not None and len(totals) > most:
            highest = float(np.partition(totals, most)[most]) * (1 - 1e-9) - 1
            cut = int(highest)
        self._survivors = [tuple(part[total <= highest] for part in rest) for *rest, total in left_over]
        return sum([len(union) for union, _, _ in self._survivors]), cut

    def edges(self) -> Iterator[Edge]:
        """Yield the steps that are left, those into a value before those that read it."""
        for union, left, right in reversed(self._survivors):
            columns = zip(union.tolist(), left.tolist(), right.tolist(), strict=True)
            edges = [Edge(result, (a, b), 0) for result, a, b in columns]
            # Of few steps more is found out.
            set_keys(edges, [self._floors(name, union, left, right, True) for name in self.bounds.objectives])
            yield from edges

    def _bounded_blocks(self, reverse: bool = False) -> Iterator[tuple[Any, Any, Any, Any]]:
        if self._kept:
            yield from reversed(self._kept) if reverse else self._kept
            return
        blocks: list[tuple[Any, Any, Any]] = []
        for block in split_blocks(self.operands, reverse):
            blocks.append(block)
            if sum([left.size for _, left, _ in blocks]) >= BLOCK:
                yield from self._bound(blocks)
                blocks = []
        yield from self._bound(blocks)

    def _bound(self, blocks: Sequence[tuple[Any, Any, Any]]) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield blocks with the bounds of their splits. Bounding all of them at once takes less time if they are small.

        Args:
            blocks: what `split_blocks` yielded.
        """
        if not blocks:
            return
        unions = [np.repeat(union, left.shape[1]) for union, left, _ in blocks]
        lefts, rights = [left.ravel() for _, left, _ in blocks], [right.ravel() for _, _, right in blocks]
        union, left, right = (np.concatenate(parts) for parts in (unions, lefts, rights))
        floors = self._floors(self.bounds.objective, union, left, right)
        ends = np.cumsum([len(part) for part in lefts])[:-1]
        for (union, left, right), part in zip(blocks, np.split(floors, ends), strict=True):
            bounded = (union, left, right, part.reshape(left.shape))
            if self.operands <= KEPT_OPERANDS:
                self._kept.append(bounded)
            yield bounded

    def _floors(self, objective: str, union: Any, left: Any, right: Any, copies: bool = False) -> Any:
        bounds, values = self.bounds, self._values
        joint = values.size(values.axes[left] | values.axes[right])
        terms = (values.elements[left], values.elements[right], values.elements[union])
        wanted = (self._wanted[left], self._wanted[right]) if bounds.gradient_operands else (False, False)
        sets = (values.axes[left], values.axes[right], values.axes[union])
        in_order = (left & (left - 1) != 0, right & (right - 1) != 0, True)
        more = launches_of(bounds, sets, in_order, self.network.wide, np, copies)
        return product_floor(objective, bounds.device, bounds.dtype, joint, terms, wanted, bounds.fused, more)


def _size_tables(sizes: Sequence[int]) -> list[Any]:
    """Return tables of the products of the sizes of each set of axes, for up to 12 axes each."""
    count = max(1, -(-len(sizes) // 12))
    width = max(1, -(-len(sizes) // count))
    tables = []
    for start in range(0, max(1, len(sizes)), width):
        table = np.ones(1)
        part = sizes[start : start + width]
        for size in (*part, *(1,) * (width - len(part))):
            table = np.concatenate([table, table * float(size)])
        tables.append(table)
    return tables
