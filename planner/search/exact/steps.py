"""The steps that the trees over a network consist of, as ops; what searches take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from planner.cost.floor import Order
from planner.cost.layout import Layout
from planner.language.cached import cached_by_step, cached_property
from planner.language.dtypes import itemsize
from planner.language.errors import SearchLimitError
from planner.language.spec import term_gathers
from planner.program.build import Names
from planner.program.ops import Cast, Einsum
from planner.program.tree import Tree
from planner.search.exact.network import Network, Status, Value

Key = tuple[int, ...]
Vector = tuple[Any, ...]
Splits = Callable[[int], Iterable[tuple[int, int]]]


NETWORK, UNKNOWN = Order(), Order(known=False, own=True)
# The places of so many axes are looked up at once.
_WIDTH = 8


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        tree: the best tree.
        score: the objective's value for it.
        exact: whether no better tree exists in the space that was searched.
        interrupted: whether Ctrl-C ended the search. Then the tree is the best that was found until then.
        bound: the score that no tree in that space is below.
        names: the rows of steps whose implementations are not all the best by the objective, for `Lowerer.naming`.
    """

    tree: Tree
    score: Vector
    exact: bool
    interrupted: bool = False
    bound: int = 0
    names: Names = ()


class SearchEnded(SearchLimitError):
    """A deadline ended a search that had found no tree."""


def all_splits(operands: int) -> Iterable[tuple[int, int]]:
    """Yield every split of a set of operands into two parts, each split once."""
    low = operands & -operands
    rest = operands ^ low
    part = (rest - 1) & rest
    while True:
        yield part | low, rest ^ part
        if not part:
            return
        part = (part - 1) & rest


def add_keys(*keys: Key) -> Key:
    """Return the sum of some keys."""
    return tuple(map(sum, zip(*keys, strict=True)))


def ascending(statuses: Iterable[Status]) -> Iterator[Status]:
    """Yield statuses in ascending order, those included that are added meanwhile."""
    visited: set[Status] = set()
    while pending := [status for status in statuses if status not in visited]:
        status = min(pending, key=lambda s: (sum(s), s))
        visited.add(status)
        yield status


class NetworkSteps:
    """Makes the ops of steps on a network.

    Args:
        network: the one-hot network.
        casts: for each operand, the dtype that it must be cast from, or None.
        dtype: dtype of the computation.
        layouts: how the operands lie in memory. Intermediates are assumed row-major.
        fused: for each operand, whether the step that reads it casts it.

    Attributes:
        final: the value that the trees compute; `last` may have to follow.
        one_step: whether the contraction is one step on one operand.
    """

    def __init__(
        self,
        network: Network,
        casts: Sequence[str | None],
        dtype: str,
        layouts: Sequence[Layout | None] = (),
        fused: Sequence[bool] = (),
    ) -> None:
        self.network, self.casts, self.dtype = network, casts, dtype
        self.layouts = layouts or (None,) * len(network.leaves)
        self.fused = fused or (False,) * len(network.leaves)
        self.final = Value(network.everything, network.final)
        # A plain spec of one operand is one step in any case.
        self.one_step = len(network.leaves) == 1 and not network.gathers
        self._unchanged: dict[int, bool] = {}

    def _is_unchanged(self, operand: int) -> bool:
        """Whether an operand is read as it is. Others lose their repeated and private axes first."""
        unchanged = self._unchanged.get(operand)
        if unchanged is None:
            network, term = self.network, self.network.leaves[operand]
            if self.one_step:
                unchanged = term == network.result and len(set(term)) == len(term)  # "bb -> bb" keeps the diagonal
            else:
                axes = network.value_axes(Value(1 << operand, network.open))
                unchanged = len(set(term)) == len(term) and network.mask(term) == axes
            self._unchanged[operand] = unchanged
        return unchanged

    def cast(self, operand: int) -> Cast | None:
        """Return the step that casts an operand, or None."""
        source = self.casts[operand]
        if source is None:
            return None
        term = self.network.leaves[operand]
        spec = self.network.restrict(dataclasses.replace(self.network.spec, inputs=(term,), output=term))
        # A cast that is all there is to do has no reader.
        fused = self.fused[operand] and not (self.one_step and self._is_unchanged(operand))
        return Cast(spec, self.dtype, source_dtype=source, fused=fused).with_layouts([self.layouts[operand]])

    def casts_last(self, operand: int) -> Iterator[tuple[Status, Einsum, Cast]]:
        """Yield the steps that take rows of an operand or sum its private axes, and the casts of their results.

        They come before the cast if it makes elements smaller: then sums are formed in the wider dtype.
        """
        network, source = self.network, self.casts[operand]
        if source is None or not source.startswith("float") or itemsize(source) <= itemsize(self.dtype):
            return
        value, layout = Value(1 << operand, network.open), self.layouts[operand]
        for target in (network.open, *(() if self.one_step else network.advances(value))):
            result = Value(value.operands, target)
            if target != network.open:
                spec = network.step_spec(((value, network.leaves[operand]),), result)
            elif (first := self.first(operand)) is not None:
                spec = first.spec
            else:
                continue
            unchanged = network.restrict(dataclasses.replace(spec, inputs=(spec.output,)))
            if not term_gathers(spec.output):
                cast = Cast(unchanged, self.dtype, source_dtype=source)
                yield target, Einsum(spec, source).with_layouts([layout]), cast

    def first(self, operand: int) -> Einsum | None:
        """Return the step that removes an operand's repeated and private axes, or None."""
        network = self.network
        if self._is_unchanged(operand):
            return None
        value = Value(1 << operand, network.open)
        output = network.result if self.one_step else network.value_term(value)
        spec = dataclasses.replace(network.spec, inputs=(network.leaves[operand],), output=output)
        return Einsum(network.restrict(spec), self.dtype).with_layouts([self._layout(operand)])

    def first_takes(self, operand: int) -> Iterator[tuple[Status, Einsum]]:
        """Yield the steps that take rows of an operand and remove its repeated and private axes at once.

        To take few rows pays before the sums over private axes, not after them.
        """
        network, value = self.network, Value(1 << operand, self.network.open)
        if self._is_unchanged(operand) or self.one_step:
            return
        for target in network.advances(value):
            spec = network.step_spec(((value, network.leaves[operand]),), Value(value.operands, target))
            yield target, Einsum(spec, self.dtype).with_layouts([self._layout(operand)])

    @cached_property
    def orders(self) -> Orders:
        """How the values of a network without gathers lie in memory."""
        network, found = self.network, list[tuple[int, ...] | None]()
        numbers = {axis: number for number, axis in enumerate(network.axes)}
        for operand in range(len(network.leaves)):
            value = Value(1 << operand, network.open)
            term = self._order_of(value) or network.value_term(value)
            found.append(None if self._layout_of(value) is not None else tuple(numbers[axis] for axis in term))
        return Orders(len(network.axes), found)

    def step(self, inputs: Sequence[Value], result: Value) -> Einsum:
        """Return the step from one or two values to another."""
        spec = self.network.step_spec(tuple((value, self._order_of(value)) for value in inputs), result)
        return Einsum(spec, self.dtype).with_layouts(tuple(map(self._layout_of, inputs)))

    def last(self) -> Einsum | None:
        """Return the step that ends the contraction if the result repeats axes, or has axes that no input has."""
        network = self.network
        axes = network.value_axes(self.final)
        if self.one_step or (len(set(network.result)) == len(network.result) and network.mask(network.result) == axes):
            return None
        spec = dataclasses.replace(network.spec, inputs=(network.value_term(self.final),), output=network.result)
        return Einsum(network.restrict(spec), self.dtype)

    def _layout(self, operand: int) -> Layout | None:
        """Return how an operand lies in memory after it is cast."""
        return self.layouts[operand] if self.casts[operand] is None else None

    def _operand_of(self, value: Value) -> int | None:
        operand = value.operands.bit_length() - 1
        is_operand = value.operands == 1 << operand and value.status == self.network.open
        return operand if is_operand and self._is_unchanged(operand) else None

    def _order_of(self, value: Value) -> tuple[str, ...] | None:
        """Return an operand's own axis order; None for a value in the network's order."""
        operand = self._operand_of(value)
        return None if operand is None else self.network.leaves[operand]

    def _layout_of(self, value: Value) -> Layout | None:
        """Return the memory layout of an operand; computed values are assumed row-major."""
        operand = self._operand_of(value)
        return None if operand is None else self._layout(operand)


class Orders:
    """How the values of a network without gathers lie in memory, by their sets of operands; see `planner.cost.floor`.

    All have their axes in the network's order, but operands that no step changes.

    Args:
        axes: how many axes the network has.
        operands: for each operand the numbers of its axes in the order of memory; None if that is not known.
    """

    def __init__(self, axes: int, operands: Sequence[tuple[int, ...] | None]) -> None:
        self._axes, self._operands = axes, operands
        self._tables: list[Any] = []

    def axes_of(self, operands: int) -> tuple[int, ...] | None:
        """Return the numbers of the axes of a set of operands in the order of memory, as `order_of` takes them."""
        return () if operands & (operands - 1) else self._operands[operands.bit_length() - 1]

    def of_sets(self, operands: Any) -> Order:
        """Return the orders of the values of many sets of operands, for sets of axes in arrays of their shape."""
        rows = np.where(operands & (operands - 1), 0, np.log2(np.maximum(operands, 1)).astype(np.int64) + 1)
        known, own, descents, tables = self._arrays()

        def place(axes: Any) -> Any:
            placed = tables[0][rows, axes & (1 << _WIDTH) - 1]
            for number, table in enumerate(tables[1:], 1):
                placed = placed | table[rows, axes >> number * _WIDTH & (1 << _WIDTH) - 1]
            return placed

        return Order(known[rows], own[rows], place, descents[rows])

    def _arrays(self) -> tuple[Any, Any, Any, list[Any]]:
        """Return arrays of the fields of orders, and tables of places: a row for all sets, and one for each operand."""
        if not self._tables:
            orders = [NETWORK, *map(order_of, self._operands)]
            kind = np.int32 if self._axes < 31 else np.int64
            self._fields = tuple(
                np.array(column, dtype=dtype)
                for column, dtype in (
                    ([order.known for order in orders], bool),
                    ([order.own for order in orders], bool),
                    ([order.descents for order in orders], kind),
                )
            )
            for start in range(0, max(self._axes, 1), _WIDTH):
                table = np.zeros((len(orders), 1), dtype=kind)
                for axis in range(start, start + _WIDTH):
                    places = np.array([order.place(1 << axis) for order in orders], dtype=object)
                    table = np.concatenate([table, table | (places % (1 << 62)).astype(kind)[:, None]], axis=1)
                self._tables.append(table)
        known, own, descents = self._fields
        return known, own, descents, self._tables


@cached_by_step
def order_of(axes: tuple[int, ...] | None) -> Order:
    """Return the order of a value.

    Args:
        axes: the numbers of its axes in the order of memory; empty for the network's order, None if nothing is known.
    """
    if axes is None:
        return UNKNOWN
    descents = [number for number in range(1, len(axes)) if axes[number] < axes[number - 1]]
    if not descents:
        return NETWORK
    found: dict[int, int] = {}

    def place(some: int) -> int:
        placed = found.get(some)
        if placed is None:
            placed = found[some] = sum([1 << number for number, axis in enumerate(axes) if some >> axis & 1])
        return placed

    return Order(own=True, place=place, descents=sum([1 << number for number in descents]))
