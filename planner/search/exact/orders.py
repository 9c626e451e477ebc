"""How the values of a network lie in memory, for bounds on what products view and copy.

All values have their axes in the network's order, but operands that no step changes. See `planner.cost.floor.Order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.cost.floor import Order
from planner.language.cached import cached_by_step

__all__ = ["NETWORK", "UNKNOWN", "Orders", "order_of"]

NETWORK, UNKNOWN = Order(), Order(known=False, own=True)
# The places of so many axes are looked up at once.
_WIDTH = 8


class Orders:
    """The orders of the values of a network without gathers, by their sets of operands.

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
            for start in range(0, self._axes, _WIDTH):
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
