"""Lists the steps of all trees over a network, each with a lower bound on what it adds to the score."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from planner.cost.device import Device
from planner.cost.floor import gathered_floor, product_floor, unary_floor
from planner.language.errors import SearchLimitError
from planner.search.exact.graph import Edge, first_of, pack
from planner.search.exact.network import POOL, SCATTER, Network, Status, Value
from planner.search.exact.steps import SearchEnded, Splits, all_splits, ascending

__all__ = ["Bounds", "VectorListing", "list_edges", "list_plain_edges"]

# How many steps numpy looks at at once, and up to how many operands their bounds are kept for a second look.
BLOCK, KEPT_OPERANDS = 1 << 15, 14


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What lower bounds on steps depend on.

    Attributes:
        objective: "time", "flops" or "bytes".
        device: the rates.
        dtype: the dtype of the computation.
        gradient_operands: the set of operands that need gradients.
        hold: whether all implementations keep to the bounds. If not, all bounds are 0.
    """

    objective: str
    device: Device
    dtype: str
    gradient_operands: int
    hold: bool

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objective, and time, by which ties go. In a search for the least time few trees tie."""
        return (self.objective,) if self.objective == "time" else (self.objective, "time")

    def wanted(self, operands: int) -> bool:
        """Whether the gradient of a value of these operands is needed."""
        return bool(self.gradient_operands & operands)


def list_edges(
    network: Network,
    leaves: Callable[[int], Iterable[tuple[Status, Edge]]],
    splits: Splits,
    bounds: Bounds,
    most: int,
) -> tuple[list[Value], list[Edge]]:
    """List the steps of all trees over the given splits, one by one.

    Args:
        network: the network.
        leaves: returns the edges that read an operand, each with the status of its result.
        splits: the splits of sets of operands.
        bounds: what their lower bounds depend on.
        most: how many steps to list at most.

    Returns:
        The values, and the edges between their numbers. The edges into a value come before those that read it.

    Raises:
        SearchLimitError: there are more steps.
    """
    numbers: dict[Value, int] = {}
    edges: list[Edge] = []
    products = _Products(network, bounds)
    unary: list[Edge] = []
    statuses: dict[int, list[Status]] = {}

    def into(value: Value) -> int:
        return numbers.setdefault(value, len(numbers))

    for operands in _ascending_sets(network.everything, splits):
        found: dict[Status, list[Edge]] = {}
        if operands & (operands - 1) == 0:
            for status, edge in leaves(operands.bit_length() - 1):
                edge.result = into(Value(operands, status))
                found.setdefault(status, []).append(edge)
        else:
            for left, right in splits(operands):
                if len(edges) > most:
                    raise SearchLimitError(f"there are more than {most} steps: pass optimize='greedy' or a path")
                for a in [Value(left, status) for status in statuses[left]]:
                    for b in [Value(right, status) for status in statuses[right]]:
                        for status in network.merges(a, b):
                            result = Value(operands, status)
                            edge = Edge(into(result), (numbers[a], numbers[b]), 0)
                            products.add(edge, a, b, result)
                            found.setdefault(status, []).append(edge)
        # Steps on one value only ever raise a status, so ascending order visits each source before its targets.
        for status in ascending(found):
            value = Value(operands, status)
            for target in network.advances(value):
                edge = Edge(into(Value(operands, target)), (numbers[value],), 0)
                unary.append(edge)
                found.setdefault(target, []).append(edge)
        statuses[operands] = list(found)
        for status in ascending(found):
            edges += found[status]
    products.bound_edges()
    if bounds.hold and unary:
        values = list(numbers)
        wanted = np.array([bounds.wanted(values[edge.result].operands) for edge in unary])
        _set_keys(unary, [unary_floor(objective, bounds.device, wanted) for objective in bounds.objectives])
    return list(numbers), edges


def list_plain_edges(
    network: Network,
    leaves: Callable[[int], Iterator[tuple[Status, Edge]]],
    splits: Splits,
    bounds: Bounds,
    most: int,
) -> list[Edge]:
    """Return what `list_edges` lists for a network without gathers. The number of a value is its set of operands."""
    edges: list[Edge] = []
    products = _Products(network, bounds)
    axes: dict[int, int] = {}
    everything = network.everything
    sets = _ascending_sets(everything, splits)
    for operands in sets:
        axes[operands] = network.union(operands) & (network.union(everything ^ operands) | network.result_mask)
    for operands in sets:
        if operands & (operands - 1) == 0:
            edges += [edge for _, edge in leaves(operands.bit_length() - 1)]
            continue
        for left, right in splits(operands):
            if len(edges) > most:
                raise SearchLimitError(f"there are more than {most} steps: pass optimize='greedy' or a path")
            edge = Edge(operands, (left, right), 0)
            edges.append(edge)
            products.add_plain(edge, left, right, (axes[left], axes[right], axes[operands]))
    products.bound_edges()
    return edges


def _ascending_sets(everything: int, splits: Splits) -> list[int]:
    """Return the sets of operands that the splits lead to, from small to large."""
    if splits is all_splits:
        return sorted(range(1, everything + 1), key=int.bit_count)
    seen, stack = {everything}, [everything]
    while stack:
        operands = stack.pop()
        if operands & (operands - 1):
            for pair in splits(operands):
                for part in pair:
                    if part not in seen:
                        seen.add(part)
                        stack.append(part)
    return sorted(seen, key=lambda operands: (operands.bit_count(), operands))


def _set_keys(edges: Iterable[Edge], floors: Sequence[Any]) -> None:
    """Set the keys of edges to their lower bounds: those on the score, and on the time where ties go by it."""
    first, *rest = floors
    second = rest[0] if rest else np.zeros_like(first)
    for edge, least, seconds in zip(edges, first.tolist(), second.tolist(), strict=True):
        edge.key = pack((int(least), int(seconds), 0, 0))


class _Products:
    """Collects the sizes of products, and bounds all of them at once."""

    def __init__(self, network: Network, bounds: Bounds) -> None:
        self.network, self.bounds = network, bounds
        self._sizes: dict[int, float] = {}
        # For each kind of product: the edges, and a row of sizes and wanted gradients for each.
        self._plain: tuple[list[Edge], list[tuple[float, ...]]] = ([], [])
        self._gathered: tuple[list[Edge], list[tuple[float, ...]]] = ([], [])

    def size(self, axes: int) -> float:
        """Return the product of the sizes of some axes."""
        size = self._sizes.get(axes)
        if size is None:
            size = self._sizes[axes] = float(self.network.elements(axes))
        return size

    def add(self, edge: Edge, a: Value, b: Value, result: Value) -> None:
        """Note a product."""
        if not self.bounds.hold:
            return
        network = self.network
        terms = [network.value_axes(value) for value in (a, b, result)]
        elements = [self.size(term) for term in terms]
        share, gathers = 1.0, 0
        for factor, status in enumerate(result.status):
            pool, rows = network.pools[factor], network.rows[factor]
            before = a.status[factor], b.status[factor]
            if max(before) == SCATTER:
                continue  # the other value joins on the pool axis
            takes = [
                status != POOL and old == POOL and bool(term & pool) for old, term in zip(before, terms, strict=False)
            ]
            indexed = (*takes, status == SCATTER)
            if any(indexed):
                gathers += 1
                share = self._share(pool, rows, [term for i, term in enumerate(terms) if not indexed[i]])
                terms = [term & ~pool | rows if indexed[i] else term for i, term in enumerate(terms)]
        if gathers:
            joint = self.size(terms[0] | terms[1] | terms[2]) * (share if gathers == 1 else 1.0)
            wanted = (self.bounds.wanted(a.operands), self.bounds.wanted(b.operands))
            self._gathered[0].append(edge)
            self._gathered[1].append((joint, sum(elements), *wanted))
        else:
            self.add_plain(edge, a.operands, b.operands, terms)

    def add_plain(self, edge: Edge, left: int, right: int, terms: Sequence[int]) -> None:
        """Note a product without gathers of values of two sets of operands; the axes of both and of the result."""
        if not self.bounds.hold or self.network.everything == 0b11 and not self.network.gathers:
            return  # the only product is priced in any case
        a, b, out = terms
        wanted = (self.bounds.wanted(left), self.bounds.wanted(right))
        self._plain[0].append(edge)
        self._plain[1].append((self.size(a | b), self.size(a), self.size(b), self.size(out), *wanted))

    def _share(self, pool: int, rows: int, others: list[int]) -> float:
        """Return which share of the joint elements must be multiplied if the product is made with the whole pool.

        Instead of the rows that are chosen for each query, all rows of the pool are multiplied, once.

        Args:
            pool: the pool axis.
            rows: the axes of the index array.
            others: the terms that it does not index.
        """
        chosen = rows & ~(others[0] & others[1]) if len(others) == 2 else rows
        return min(1.0, self.size(pool) / max(1.0, self.size(chosen)))

    def bound_edges(self) -> None:
        """Set the keys of all edges to their lower bounds."""
        device, dtype, objectives = self.bounds.device, self.bounds.dtype, self.bounds.objectives
        edges, rows = self._plain
        if edges:
            joint, a, b, out, *wanted = np.array(rows, dtype=float).T
            empty, any_wanted = joint == 0, np.maximum(*wanted)
            joint, a, b, out = (np.where(empty, 1.0, size) for size in (joint, a, b, out))
            floors = []
            for objective in objectives:
                floor = product_floor(objective, device, dtype, joint, (a, b, out), wanted)
                floors.append(np.where(empty, unary_floor(objective, device, any_wanted), floor))
            _set_keys(edges, floors)
        edges, rows = self._gathered
        if edges:
            joint, elements, *wanted = np.array(rows, dtype=float).T
            _set_keys(edges, [gathered_floor(name, device, dtype, joint, elements, wanted) for name in objectives])


@lru_cache(maxsize=64)
def _patterns(count: int) -> Any:
    """Return the parts of a set of `count` operands that hold its first one, but not all, as rows of bits.

    They are in the order in which `all_splits` has them.
    """
    numbers = np.arange((1 << count - 1) - 2, -1, -1, dtype=np.int64)
    return (numbers[:, None] >> np.arange(count - 1) & 1).astype(np.int64)


def _blocks(operands: int, reverse: bool) -> Iterator[tuple[Any, Any, Any]]:
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
        self._axes, self._elements = self._value_axes()
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

    def drop_worse(self, limit: int) -> int:
        """Drop the steps that are in no tree with this score or a lower one. Return how many are left."""
        everything = self.network.everything
        outside = np.full(everything + 1, np.inf)
        outside[everything] = 0.0
        most = limit * (1 + 1e-9) + 1
        self._survivors = []
        for union, left, right, floors in self._bounded_blocks(reverse=True):
            reached = np.nonzero(outside[union] + self._inside[union] <= most)[0]
            if not len(reached):
                continue
            union, left, right, floors = union[reached], left[reached], right[reached], floors[reached]
            above = outside[union][:, None] + floors
            total = above + self._inside[left] + self._inside[right]
            rows, columns = np.nonzero(total <= most)
            a, b = left[rows, columns], right[rows, columns]
            above = above[rows, columns]
            np.minimum.at(outside, a, above + self._inside[b])
            np.minimum.at(outside, b, above + self._inside[a])
            self._survivors.append((union[rows], a, b, floors[rows, columns]))
        return sum(len(block[0]) for block in self._survivors)

    def edges(self) -> Iterator[Edge]:
        """Yield the steps that are left, those into a value before those that read it."""
        for union, left, right, floors in reversed(self._survivors):
            columns = zip(union.tolist(), left.tolist(), right.tolist(), strict=True)
            edges = [Edge(result, (a, b), 0) for result, a, b in columns]
            times = [self._floors(name, union, left, right) for name in self.bounds.objectives[1:]]
            _set_keys(edges, [floors, *times])
            yield from edges

    def _bounded_blocks(self, reverse: bool = False) -> Iterator[tuple[Any, Any, Any, Any]]:
        if self._kept:
            yield from reversed(self._kept) if reverse else self._kept
            return
        for union, left, right in _blocks(self.operands, reverse):
            floors = self._floors(self.bounds.objective, union[:, None], left, right)
            block = (union, left, right, floors)
            if self.operands <= KEPT_OPERANDS:
                self._kept.append(block)
            yield block

    def _floors(self, objective: str, union: Any, left: Any, right: Any) -> Any:
        bounds = self.bounds
        joint = self._size(self._axes[left] | self._axes[right])
        terms = (self._elements[left], self._elements[right], self._elements[union])
        wanted = (self._wanted[left], self._wanted[right]) if bounds.gradient_operands else (False, False)
        return product_floor(objective, bounds.device, bounds.dtype, joint, terms, wanted)

    def _value_axes(self) -> tuple[Any, Any]:
        """Return the axes of the value of each set of operands, and their numbers of elements."""
        network = self.network
        union = np.zeros(1, dtype=np.int64)
        for operand in range(self.operands):
            union = np.concatenate([union, union | network.union(1 << operand)])
        self._tables = _size_tables([network.sizes[axis] for axis in network.axes])
        axes = union & (union[::-1] | network.result_mask)
        return axes, self._size(axes)

    def _size(self, axes: Any) -> Any:
        """Return the product of the sizes of each set of axes."""
        shift, (table, *more) = 0, self._tables
        width = len(table).bit_length() - 1
        sizes = table[axes & len(table) - 1]
        for table in more:
            shift += width
            sizes = sizes * table[axes >> shift & len(table) - 1]
        return sizes


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
