"""What the steps of one call share: `RangedIndices`, its index arrays in range; `Member`, its sizes in a family.

`PreparedRun` is how a row runs a step, ready before the call.

`SizeReader` reads these sizes from the shapes of the arrays. `Stepwise` is a program that runs one step at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from planner.language.spec import Gather, Spec, Term, pool_letters, term_gathers
from planner.program.contraction import Contraction
from planner.program.ops import Op
from planner.program.program import Step

Indices = Mapping[Gather, Any]
# From a step's inputs and the index arrays in range to its results.
Run = Callable[[Sequence[Any], Indices], tuple[Any, ...]]
# From operands and index arrays to the result.
RunPlan = Callable[[Sequence[Any], Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """How a row runs ops if it can do beforehand what depends on the op alone.

    Attributes:
        prepare: takes an op, and returns the function that runs it, from the inputs and the index arrays.
        any_sizes: whether the function also runs ops of other sizes, which it finds in `RangedIndices.sizes` or in the
            shapes of its inputs; and the row's refusals ask no more of a size than whether it is 0 or 1, unless `alike`
            says on what.
        alike: for functions that run ops of other sizes, or whose results lie in memory as theirs do, only if these ops
            agree on something, such as the axis that is cut: returns that for an op.
    """

    prepare: Callable[[Any], Run]
    any_sizes: bool = False
    alike: Callable[[Any], Any] | None = None

    def __call__(self, op: Op, inputs: Sequence[Any], indices: Indices) -> tuple[Any, ...]:
        """Run an op."""
        return self.prepare(op)(inputs, indices)


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
        poison: what results must be multiplied by, in torch on a card: 1, or NaN if an index was out of range, which is
            told later. None if no step read values that may be out of range. Steps that sort rows by such an index
            write NaN themselves.
        told: where all checks of this call's index arrays write NaN, in torch on a card; None before the first one.
    """

    def __init__(self, may_drop: bool, values: Mapping[Gather, Any] | Iterable[tuple[Gather, Any]] = ()) -> None:
        super().__init__(values)
        self.may_drop = may_drop
        self.orders: dict[Any, Any] = {}
        self.given: dict[Gather, Any] = {}
        self.sizes: Mapping[str | Gather, int] | None = None
        self.shown = False
        self.poison: Any = None
        self.told: Any = None

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


class SizeReader:
    """Reads the sizes of contractions of one spec from the shapes of their arrays.

    Args:
        spec: the spec with the axes and gathers that sizes are read for.
        contraction: one of the contractions, by which the dimensions of arrays are told apart.
        names: the letters of the index arrays, in the order in which their shapes are given.

    Attributes:
        assumed: the sizes of the output's axes and gathers that no array shows, for calls that give none. A dimension
            that is added into through an index array is not among them if the same array reads one of its size.
    """

    def __init__(self, spec: Spec, contraction: Contraction, names: Sequence[str]) -> None:
        resolved, fitted = contraction.resolved, dict(contraction.resolved.index_shapes)
        self.names, self.count, passed = tuple(names), len(spec.inputs), dict(contraction.index_shapes)
        shapes = [*(o.shape for o in contraction.operands), *(passed[name] for name in self.names)]
        kept = [*resolved.shapes, *(fitted[name] for name in self.names)]
        # For each array the dimensions that are not broadcast; None if that is all.
        self.dims = [
            None if len(shape) == len(wanted) else _kept_dims(shape, wanted)
            for shape, wanted in zip(shapes, kept, strict=True)
        ]
        self.fits, self.as_given = all(dims is None for dims in self.dims), (None,) * self.count
        # The arrays by number, and what their dimensions are. An index array may stand in several brackets.
        self.terms: list[tuple[int, Term]] = [
            *enumerate(spec.inputs),
            *((self.count + self.names.index(gather.array), gather.axes) for gather in spec.gathers),
        ]
        self.output = spec.output
        self.written = {gather.array: gather for gather in term_gathers(spec.output)}
        self.read = {gather.array: gather for term in spec.inputs for gather in term_gathers(term)}
        self.pools = {axis: gather for gather, axis in zip(spec.gathers, pool_letters(spec), strict=True)}
        # Axes of which nothing is left but a dimension of size 1 that is broadcast.
        self.dropped: dict[str | Gather, int] = {axis: size for axis, size in spec.sizes if axis not in spec.axes}
        shown = {entry for _, term in self.terms for entry in term}
        shown.update(g for g in self.written.values() if g.array in self.read and self.read[g.array].size == g.size)
        self.assumed = [(e, spec.size(e)) for e in dict.fromkeys(spec.output) if e not in shown]

    def places(self, given: Sequence[str | Gather]) -> dict[str | Gather, list[tuple[int, int]]]:
        """Return where the size of each axis and gather stands: the numbers of arrays and of their dimensions.

        The array after the last one holds the sizes that a call gives for some axes and gathers.
        """
        places: dict[str | Gather, list[tuple[int, int]]] = {}
        all_dims = [*self.dims, None]
        for number, term in (*self.terms, (len(self.dims), given)):
            for dim, entry in zip(all_dims[number] or range(len(term)), term, strict=True):
                places.setdefault(entry, []).append((number, dim))
        for entry in self.written.values():
            if entry not in places:  # the size is that of what the same index array reads
                places[entry] = places[self.read[entry.array]][:1]
        return {entry: found for entry, found in places.items() if entry not in self.dropped}

    def given(self, given: Any) -> tuple[str | Gather, ...]:
        """Return the axes and gathers whose sizes `sizes=` of a call gives."""
        return tuple(entry for entry, _ in self.entries(given))

    def entries(self, given: Any) -> list[tuple[str | Gather, Any]]:
        """Return the sizes that `sizes=` of a call gives, by axis and gather."""
        if given is None:
            return []
        by_letter = given.items() if isinstance(given, Mapping) else zip(self.output, given, strict=True)
        named: dict[Any, Gather] = {**self.read, **self.written}
        return [(named.get(entry, entry), size) for entry, size in by_letter]

    def member(
        self,
        shapes: Sequence[Sequence[int]],
        given: Iterable[tuple[str | Gather, Any]] = (),
        differ: Callable[[Any, Any], Any] = operator.ne,
    ) -> Member | None:
        """Return the sizes of a contraction; None if its sizes do not fit each other.

        Args:
            shapes: the shapes of operands and index arrays.
            given: sizes that are given, by axis and gather.
            differ: tells whether two sizes differ.
        """
        sizes: dict[str | Gather, Any] = {**self.dropped}
        for number, term in self.terms:
            for entry, size in zip(term, self._kept(shapes[number], self.dims[number]), strict=True):
                if differ(sizes.setdefault(entry, size), size):
                    return None
        for entry, size in given:
            if differ(sizes.setdefault(entry, size), size):
                return None
        for entry in self.written.values():
            if entry not in sizes:  # the size is that of what the same index array reads
                sizes[entry] = sizes[self.read[entry.array]]
        return self.member_of(sizes, shapes)

    def member_of(self, sizes: dict[str | Gather, Any], shapes: Sequence[Any]) -> Member:
        """Return a contraction of some sizes, by axis and gather, and of operands and index arrays of some shapes."""
        if self.dropped:
            sizes.update(self.dropped)
        for letter, gather in self.pools.items():
            sizes[letter] = sizes[gather]
        if self.fits:
            return Member(sizes, self.as_given, dict(zip(self.names, shapes[self.count :], strict=True)))
        kept = list(map(self._kept, shapes, self.dims))
        reshape = [None if dims is None else tuple(shape) for shape, dims in zip(kept, self.dims, strict=True)]
        index_shapes = {name: tuple(shape) for name, shape in zip(self.names, kept[self.count :], strict=True)}
        return Member(sizes, reshape[: self.count], index_shapes)

    @staticmethod
    def _kept(shape: Sequence[int], dims: Sequence[int] | None) -> Sequence[int]:
        return shape if dims is None else [shape[d] for d in dims]


def _kept_dims(shape: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Return the dimensions of a shape without those of size 1 that are broadcast."""
    dims: list[int] = []
    for d, size in enumerate(shape):
        if len(dims) < len(kept) and size == kept[len(dims)]:
            dims.append(d)
    return dims


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
