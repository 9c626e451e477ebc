"""What the steps of one call share: `RangedIndices`, its index arrays in range; `Member`, its sizes in a family.

`Stepwise` is a program that runs one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from planner.language.spec import Gather, Spec, Term
from planner.program.program import Step

__all__ = ["Indices", "Member", "RangedIndices", "Stepwise", "shape_in", "size_in"]

Indices = Mapping[Gather, Any]


class RangedIndices(dict[Gather, Any]):
    """The index arrays of a call by gather, with values in [0, size]; the value `size` means "no row".

    An array that is in `given` only is brought into range when a step first asks for it.

    Attributes:
        may_drop: True if the value `size` can occur.
        orders: sorted orders of the index arrays, shared by the steps of one call.
        given: index arrays as the caller gave them, each a `planner.kernels.grouping.keys.IndexArray`, for kernels that
            read an index piece by piece. Such a kernel needs no copy of the whole index in range, and no look at all of
            it before. Empty where ranges were checked beforehand.
        sizes: the sizes of this call, by axis and gather of the program's specs, if the program was prepared for other
            sizes (see `PreparedRun.any_sizes`); None if they are those of the specs.
        shown: True if the kernel that ran wrote NaN for the bad indices that could not be refused, see
            `IndexArray.bad`.
    """

    def __init__(self, may_drop: bool, values: Mapping[Gather, Any] | Iterable[tuple[Gather, Any]] = ()) -> None:
        super().__init__(values)
        self.may_drop = may_drop
        self.orders: dict[Any, Any] = {}
        self.given: dict[Gather, Any] = {}
        self.sizes: Mapping[str | Gather, int] | None = None
        self.shown = False

    @property
    def guarded(self) -> bool:
        """Return `may_drop`. Rows that users wrote for earlier versions ask so."""
        return self.may_drop

    def __missing__(self, gather: Gather) -> Any:
        given = self.given[gather]
        values = self[gather] = given.part(given.values)
        return values


def size_in(index: Indices, spec: Spec, entry: str | Gather) -> int:
    """Return the size of an axis or a gathered dimension in the call that the index arrays are of."""
    sizes = getattr(index, "sizes", None)
    size: int = spec.size(entry) if sizes is None else sizes[entry]
    return size


def shape_in(index: Indices, spec: Spec, term: Term) -> tuple[int, ...]:
    """Return the shape of an array with a term in the call that the index arrays are of."""
    sizes = getattr(index, "sizes", None)
    return spec.shape(term) if sizes is None else tuple([sizes[entry] for entry in term])


class Member(NamedTuple):
    """A member of a family, by its sizes; see `planner.search.family`.

    Attributes:
        sizes: the size of each axis and gather of the specs in the programs of the representative's plan.
        shapes: for each operand, the shape to give it; None if it has that shape.
        index_shapes: the shape to give to each index array.
    """

    sizes: Mapping[str | Gather, int]
    shapes: Sequence[tuple[int, ...] | None]
    index_shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stepwise:
    """A program of a plan, ready to be run one step at a time.

    Attributes:
        values: the arrays that the program is given, by the number of their variable.
        bind: takes a step and its inputs, and returns a function that runs the step without further arguments. In JAX
            it is a jitted function bound to its arguments. Autograd does not record the run.
        orders: the sorted orders of index arrays, which the steps of one call share. A step adds the orders that it
            computes. To run a step a second time under the same conditions, restore what was here before the first.
    """

    values: dict[int, Any]
    bind: Callable[[Step, Sequence[Any]], partial[Any]]
    orders: dict[Any, Any]
