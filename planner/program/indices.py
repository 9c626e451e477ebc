"""The index arrays of a call, as steps read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from planner.language.spec import Gather

__all__ = ["Indices", "RangedIndices", "Run"]

Indices = Mapping[Gather, Any]
# From a step's inputs and the index arrays in range to its results.
Run = Callable[[Sequence[Any], Indices], tuple[Any, ...]]


class RangedIndices(dict[Gather, Any]):
    """The index arrays of a call by gather, with values in [0, size]; the value `size` means "no row".

    An array that is in `given` only is brought into range when a step first asks for it.

    Attributes:
        may_drop: True if the value `size` can occur.
        orders: sorted orders of the index arrays, shared by the steps of one call.
        given: index arrays as the caller gave them, each a `planner.kernels.grouping.keys.IndexArray`, for kernels that
            read an index piece by piece. Such a kernel needs no copy of the whole index in range, and no look at all of
            it before. Empty where ranges were checked beforehand.
        shown: True if the kernel that ran wrote NaN for the bad indices that could not be refused, see
            `IndexArray.bad`.
    """

    def __init__(self, may_drop: bool, values: Mapping[Gather, Any] | Iterable[tuple[Gather, Any]] = ()) -> None:
        super().__init__(values)
        self.may_drop = may_drop
        self.orders: dict[Any, Any] = {}
        self.given: dict[Gather, Any] = {}
        self.shown = False

    @property
    def guarded(self) -> bool:
        """Return `may_drop`. Rows that users wrote for earlier versions ask so."""
        return self.may_drop

    def __missing__(self, gather: Gather) -> Any:
        given = self.given[gather]
        values = self[gather] = given.part(given.values)
        return values
