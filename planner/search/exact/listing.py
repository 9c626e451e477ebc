"""Lists the steps of all trees over a network, each with a lower bound on what it adds to the score."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from planner.cost.device import Device
from planner.cost.floor import NUMBERS, Launches, Order, gathered_floor, product_floor, unary_floor, view_launches
from planner.language.cached import cached_by_step
from planner.language.dtypes import itemsize
from planner.language.errors import SearchLimitError
from planner.program.implementations import Table
from planner.search.exact.graph import Edge, pack
from planner.search.exact.network import Network, Status, Value
from planner.search.exact.sizes import StepSizes, row_launches, sizes_of
from planner.search.exact.steps import NETWORK, Orders, SearchEnded, Splits, all_splits, ascending, order_of

# So many edges or fewer are bounded one by one, which takes 4 us each; numpy takes 40 us for all.
FEW_EDGES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What lower bounds on steps depend on.

    Attributes:
        objective: "time", "flops" or "bytes".
        device: the rates.
        dtype: the dtype of the computation.
        gradient_operands: the set of operands that need gradients.
        hold: whether all implementations keep to the bounds. If not, all bounds are 0.
        launches: how many operators rows that run only steps with brackets launch at least: for steps of one index
            array, and of several.
        fused: see `product_floor`.
        more: what the framework's operators launch besides; None if nothing is known of it.
        orders: how operands lie; None if that is not known.
        by_terms: see `product_floor`.
    """

    objective: str
    device: Device
    dtype: str
    gradient_operands: int
    hold: bool
    launches: tuple[float, float]
    fused: int
    more: Launches | None = None
    orders: Orders | None = None
    by_terms: Launches | None = None

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objective, and time, by which ties go. In a search for the least time few trees tie."""
        return (self.objective,) if self.objective == "time" else (self.objective, "time")

    def wanted(self, operands: int) -> bool:
        """Whether the gradient of a value of these operands is needed."""
        return bool(self.gradient_operands & operands)


def fused_terms(table: Table, device: Device) -> int:
    """Return how long the shortest side of a product is at most that a row runs as products by element, added up."""
    return max([row.fused for row in table.rows.values() if row.kinds is None or device.kind in row.kinds], default=0)


def kernel_launches(table: Table, device: Device) -> tuple[float, float]:
    """Return how many operators any row that runs only steps with brackets launches at least; infinite without one.

    The first is for steps of one index array, the second for those of several.
    """
    rows = [row for row in table.rows.values() if row.brackets and (row.kinds is None or device.kind in row.kinds)]
    several = [row.launches for row in rows if row.brackets > 1]
    return min((row.launches for row in rows), default=math.inf), min(several, default=math.inf)


def list_edges(
    network: Network,
    leaves: Callable[[int], Iterable[tuple[Status, Edge]]],
    splits: Splits,
    bounds: Bounds,
    most: int,
    ends: float | None = None,
) -> list[Edge]:
    """List the steps of all trees over the given splits, one by one.

    Args:
        network: the network.
        leaves: returns the edges that read an operand, each with the status of its result.
        splits: the splits of sets of operands.
        bounds: what their lower bounds depend on.
        most: how many steps to list at most.
        ends: the time of `time.monotonic` at which to end, or None.

    Returns:
        The edges between the numbers of values. Those into a value come before those that read it.

    Raises:
        SearchLimitError: there are more steps.
        SearchEnded: the time is over.
    """
    numbers: dict[Value, int] = {}
    edges: list[Edge] = []
    products = _Products(network, bounds)
    unary: list[Edge] = []
    sizes: list[tuple[float, ...]] = []
    statuses: dict[int, list[Status]] = {}

    def into(value: Value) -> int:
        number = numbers.get(value)
        if number is None:
            number = numbers[value] = network.number(value)
        return number

    for operands in _ascending_sets(network.everything, splits):
        found: dict[Status, list[Edge]] = {}
        if operands & (operands - 1) == 0:
            for status, edge in leaves(operands.bit_length() - 1):
                edge.result = into(Value(operands, status))
                found.setdefault(status, []).append(edge)
        else:
            for left, right in splits(operands):
                _check_work(len(edges), most, ends)
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
                sizes.append((bounds.wanted(operands), *products.unary_sizes(value, Value(operands, target))))
                found.setdefault(target, []).append(edge)
        statuses[operands] = list(found)
        for status in ascending(found):
            edges += found[status]
    products.bound_edges()
    if bounds.hold:
        # They take rows or add them up, so they are no views.
        size = itemsize(bounds.dtype)

        def floor(objective: str, xp: Any, wanted: Any, elements: Any, taken: Any, added: Any, more: Any) -> Any:
            return unary_floor(objective, bounds.device, wanted, elements * size, (taken, added), more, xp)

        _set_floors(unary, sizes, bounds.objectives, floor)
    return edges


def list_plain_edges(
    network: Network,
    leaves: Callable[[int], Iterator[tuple[Status, Edge]]],
    splits: Splits,
    bounds: Bounds,
    most: int,
    ends: float | None = None,
) -> list[Edge]:
    """Return what `list_edges` lists for a network without gathers."""
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
            _check_work(len(edges), most, ends)
            edge = Edge(operands, (left, right), 0)
            edges.append(edge)
            products.add_plain(edge, left, right, (axes[left], axes[right], axes[operands]))
    products.bound_edges()
    return edges


def _check_work(listed: int, most: int, ends: float | None) -> None:
    """Raise an error if more steps are listed than may be, or if the time is over."""
    if listed > most:
        raise SearchLimitError(f"there are more than {most} steps: pass optimize='greedy' or a path")
    if ends is not None and time.monotonic() > ends:
        raise SearchEnded


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


def set_keys(edges: Iterable[Edge], floors: Sequence[Any]) -> None:
    """Set the keys of edges to their lower bounds: those on the score, and on the time where ties go by it."""
    first, *rest = floors
    second = rest[0] if rest else np.zeros_like(first)
    for edge, least, seconds in zip(edges, first.tolist(), second.tolist(), strict=True):
        edge.key = pack((int(least), int(seconds), 0, 0))


def _set_floors(
    edges: list[Edge], rows: list[tuple[float, ...]], objectives: Sequence[str], floor: Callable[..., Any]
) -> None:
    """Set the keys of edges to their lower bounds.

    Args:
        edges: the edges.
        rows: the sizes of each.
        objectives: as in `Bounds`.
        floor: returns the bound, from the objective, what the sizes are (see `planner.cost.floor`), and the sizes.
    """
    if len(edges) > FEW_EDGES:
        columns = np.array(rows, dtype=float).T
        set_keys(edges, [floor(objective, np, *columns) for objective in objectives])
        return
    for edge, row in zip(edges, rows, strict=True):
        first, *rest = [int(floor(objective, NUMBERS, *row)) for objective in objectives]
        edge.key = pack((first, *rest, 0, 0) if rest else (first, 0, 0, 0))


def launches_of(
    launches: Launches,
    terms: tuple[Any, Any, Any],
    orders: tuple[Order, Order, Order],
    wide: int,
    gradients: bool,
    xp: Any,
    copies: bool = True,
) -> tuple[Any, Any, Any]:
    """Return how many operators more than one a product and its two gradients launch; args as in `view_launches`."""
    (a, b, out), (of_a, of_b, of_out) = terms, orders
    more = partial(view_launches, launches, wide=wide, xp=xp, copies=copies)
    forward = more(terms, orders)
    if not gradients:
        return forward, 0.0, 0.0
    return forward, more((out, b, a), (of_out, of_b, of_a)), more((a, out, b), (of_a, of_out, of_b))


@cached_by_step
def _launches_of(
    launches: Launches,
    terms: tuple[int, int, int],
    orders: tuple[tuple[int, ...] | None, tuple[int, ...] | None],
    wide: int,
    gradients: bool,
) -> tuple[float, float, float]:
    """Return the same for one step; it depends on no sizes, so that the members of a family share it."""
    of_a, of_b = map(order_of, orders)
    return launches_of(launches, terms, (of_a, of_b, NETWORK), wide, gradients, NUMBERS)


def gathered_sizes(sizes: StepSizes, bounds: Bounds, xp: Any) -> tuple[Any, ...]:
    """Return the sizes of products with gathers that `_Products` collects, but for which gradients are wanted."""
    share = xp.where(sizes.gathers == 1, sizes.share, 1.0)
    kernels = xp.where(sizes.gathers > 1, bounds.launches[1], bounds.launches[0])
    stock = row_launches(bounds.more, sizes.indexed)
    return (sizes.joint, share, sizes.elements, sizes.copies, sizes.taken, sizes.added, kernels, stock)


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
        terms = [self.network.value_axes(value) for value in (a, b, result)]
        if not a.status == b.status == result.status:
            sizes = sizes_of(self.network, self.size, (a.status, b.status), result.status, terms, NUMBERS)
            if sizes.gathers:
                wanted = (self.bounds.wanted(a.operands), self.bounds.wanted(b.operands))
                self._gathered[0].append(edge)
                self._gathered[1].append((*gathered_sizes(sizes, self.bounds, NUMBERS), *wanted))
                return
        self.add_plain(edge, a.operands, b.operands, terms)

    def add_plain(self, edge: Edge, left: int, right: int, terms: Sequence[int]) -> None:
        """Note a product without gathers of values of two sets of operands; the axes of both and of the result."""
        if not self.bounds.hold or self.network.everything == 0b11 and not self.network.gathers:
            return  # the only product is priced in any case
        a, b, out = terms
        wanted = (self.bounds.wanted(left), self.bounds.wanted(right))
        more = (0.0, 0.0, 0.0)
        if self.bounds.more is not None:
            orders, wide = (self._order(left), self._order(right)), (a | b) & self.network.wide
            more = _launches_of(self.bounds.more, (a, b, out), orders, wide, bool(self.bounds.gradient_operands))
        self._plain[0].append(edge)
        self._plain[1].append((self.size(a | b), self.size(a), self.size(b), self.size(out), *wanted, *more))

    def _order(self, operands: int) -> tuple[int, ...] | None:
        if self.bounds.orders is not None:
            return self.bounds.orders.axes_of(operands)
        return () if operands & (operands - 1) else None

    def unary_sizes(self, value: Value, result: Value) -> tuple[float, ...]:
        """Return the sizes of a step on one value.

        These are the elements that it reads and writes, the rows that it takes and adds up, and how many operators more
        than one it launches.
        """
        terms = [self.network.value_axes(value), self.network.value_axes(result)]
        sizes = sizes_of(self.network, self.size, (value.status,), result.status, terms, NUMBERS)
        return (sizes.elements, sizes.taken, sizes.added, row_launches(self.bounds.more, sizes.indexed))

    def bound_edges(self) -> None:
        """Set the keys of all edges to their lower bounds."""
        bounds = self.bounds
        device, dtype = bounds.device, bounds.dtype

        def plain(objective: str, xp: Any, joint: Any, a: Any, b: Any, out: Any, *rest: Any) -> Any:
            empty, wanted, more = joint == 0, rest[:2], rest[2:]
            joint, a, b, out = (xp.where(empty, 1.0, size) for size in (joint, a, b, out))
            terms, fused, by_terms = (a, b, out), bounds.fused, bounds.by_terms
            floor = product_floor(objective, device, dtype, joint, terms, wanted, fused, more, xp, by_terms)
            return xp.where(empty, unary_floor(objective, device, xp.maximum(*wanted), xp=xp), floor)

        def gathered(objective: str, xp: Any, joint: Any, share: Any, elements: Any, copies: Any, *rest: Any) -> Any:
            taken, added, kernels, stock, *wanted = rest
            sizes = (joint, share, elements, copies, (taken, added))
            return gathered_floor(objective, device, dtype, *sizes, kernels, wanted, stock, xp)

        _set_floors(*self._plain, bounds.objectives, plain)
        _set_floors(*self._gathered, bounds.objectives, gathered)
