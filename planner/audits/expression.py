"""What a program computes from arrays by reading rows, multiplying and summing, as one einsum with gathers.

An expression is immutable. Its axes are numbers; each use of an expression renames them, so the same array may stand in
a product twice.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from planner.language.errors import PlannerError
from planner.language.spec import Operand

_fresh = itertools.count()
# Letters of axes, in the order in which they are given out, and those of index arrays.
_AXES = "ijklmnabcdefghostuvwxyz"
_INDICES = "qpr" + "QPRSTUVWXYZABCDEFGHIJKLMNO"
# Index modes of `planner.contract`, in the order of preference.
_MODES = ("raise", "nan", "drop", "clip")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Array:
    """An array that a program has: an operand, or an index array.

    Attributes:
        operand: its shape, dtype, strides, and whether it needs a gradient.
        name: what the program calls it; "" if no name was found.
        value: the array itself where values are measured, else None.
        origin: the tensor of the program, as long as the program may still change it; else None.
        version: how often the tensor had been changed in place; None if torch does not count that.
        identity: a number that no other array of the program has; 0 to take the `id` of the origin, or of this object.
    """

    operand: Operand
    name: str = ""
    value: Any = None
    origin: Any = None
    version: int | None = None
    identity: int = 0

    @property
    def unchanged(self) -> bool:
        """Whether the tensor surely holds the values that it held when it was read."""
        return self.origin is None or (self.version is not None and self.origin._version == self.version)


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """A dimension that is read at the positions that an index array holds, along the axes of that array.

    Attributes:
        index: the index array.
        axes: its axes.
        modes: the index modes of `planner.contract` that give the program's values, out of range too.
        size: the size of the dimension if the program promises positions from -size to size - 1, else 0.
    """

    index: Array
    axes: tuple[int, ...]
    modes: frozenset[str] = frozenset({"raise"})
    size: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """A product of arrays, of which some axes may be summed.

    Attributes:
        factors: the arrays, each with its axes; in place of an axis may stand a `Read`.
        dims: the axes of the result, in order. All others are summed.
        sizes: the size of each axis. An array may have size 1 where the axis is longer.
        letters: what the program calls an axis, such as the letters of an einsum.
    """

    factors: tuple[tuple[Array, tuple[int | Read, ...]], ...]
    dims: tuple[int, ...]
    sizes: Mapping[int, int]
    letters: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, array: Array) -> Expression:
        """Return the expression that is an array."""
        axes = tuple(next(_fresh) for _ in array.operand.shape)
        return cls(((array, axes),), axes, dict(zip(axes, array.operand.shape, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(self.sizes[axis] for axis in self.dims)

    @property
    def reads(self) -> bool:
        """Whether an array is read at the positions that an index array holds."""
        return any(isinstance(entry, Read) for _, term in self.factors for entry in term)

    @property
    def arrays(self) -> Iterator[Array]:
        """The arrays, index arrays included."""
        for array, term in self.factors:
            yield array
            yield from (entry.index for entry in term if isinstance(entry, Read))

    def renamed(self, new: Mapping[int, int]) -> Expression:
        """Return the same expression with other axes."""

        def entry(old: int | Read) -> int | Read:
            if isinstance(old, int):
                return new.get(old, old)
            return dataclasses.replace(old, axes=tuple(new.get(a, a) for a in old.axes))

        sizes: dict[int, int] = {}
        for axis, size in self.sizes.items():
            name = new.get(axis, axis)
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
        factors = tuple((array, tuple(map(entry, term))) for array, term in self.factors)
        return Expression(factors, tuple(new.get(a, a) for a in self.dims), sizes)

    def fresh(self) -> Expression:
        """Return the same expression with axes that nothing else has."""
        return self.renamed({axis: next(_fresh) for axis in self.sizes})

    def take(self, dim: int, index: Array, **promises: Any) -> Expression | None:
        """Return the expression with one dimension read at an index array's positions; None if that is no one array.

        `promises` are the modes and the size of a `Read`.
        """
        if len(self.factors) != 1:
            return None
        ((array, term),) = self.factors
        axis = self.dims[dim]
        if axis not in term:
            return None
        axes = tuple(next(_fresh) for _ in index.operand.shape)
        term = tuple(Read(index, axes, **promises) if entry == axis else entry for entry in term)
        dims = (*self.dims[:dim], *axes, *self.dims[dim + 1 :])
        sizes = {a: n for a, n in self.sizes.items() if a != axis}
        return Expression(((array, term),), dims, {**sizes, **dict(zip(axes, index.operand.shape, strict=True))})

    def permuted(self, order: Sequence[int]) -> Expression:
        """Return the expression with its dimensions in another order."""
        return dataclasses.replace(self, dims=tuple(self.dims[d] for d in order))

    def unsqueezed(self, dim: int) -> Expression:
        """Return the expression with a new dimension of size 1."""
        axis = next(_fresh)
        return dataclasses.replace(self, dims=(*self.dims[:dim], axis, *self.dims[dim:]), sizes={**self.sizes, axis: 1})

    def squeezed(self, dims: Iterable[int]) -> Expression:
        """Return the expression without some dimensions of size 1, or summed over some dimensions."""
        gone = set(dims)
        return dataclasses.replace(self, dims=tuple(axis for d, axis in enumerate(self.dims) if d not in gone))


def multiply(a: Expression, b: Expression) -> Expression | None:
    """Return the elementwise product of two expressions with NumPy's broadcasting; None if their shapes do not fit."""
    labels = list(range(max(len(a.dims), len(b.dims))))
    return contract([(x, labels[len(labels) - len(x.dims) :]) for x in (a, b)], labels)


def matmul(a: Expression, b: Expression) -> Expression | None:
    """Return the product of matrices as `torch.matmul` has it; None if the shapes do not fit."""
    if not a.dims or not b.dims:
        return None
    rows, columns = ["row"] * (len(a.dims) > 1), ["column"] * (len(b.dims) > 1)
    batch = list(range(max(len(a.dims), len(b.dims), 2) - 2))
    left = [*batch[len(batch) - max(len(a.dims) - 2, 0) :], *rows, "sum"]
    right = [*batch[len(batch) - max(len(b.dims) - 2, 0) :], "sum", *columns]
    return contract([(a, left), (b, right)], [*batch, *rows, *columns])


def contract(parts: Sequence[tuple[Expression, Sequence[Hashable]]], out: Sequence[Hashable]) -> Expression | None:
    """Return the contraction of expressions whose dimensions have labels: equal labels are one axis.

    Labels that are letters are those of the axes. None if sizes do not fit. A size of 1 fits any.
    """
    axis_of: dict[Hashable, int] = {}
    merged: dict[int, int] = {}
    sizes: dict[int, int] = {}
    factors: list[tuple[Array, tuple[int | Read, ...]]] = []
    for part, labels in parts:
        fresh = part.fresh()
        factors += fresh.factors
        sizes.update(fresh.sizes)
        for label, axis in zip(labels, fresh.dims, strict=True):
            first = axis_of.setdefault(label, axis)
            merged[axis] = first
            if sizes[first] == 1:
                sizes[first] = sizes[axis]
            elif sizes[axis] not in (1, sizes[first]):
                return None
    both = Expression(tuple(factors), (), sizes).renamed(merged)
    letters = {axis: each for each, axis in axis_of.items() if isinstance(each, str) and len(each) == 1}
    return dataclasses.replace(both, dims=tuple(axis_of[label] for label in out), letters=letters)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A contraction in planner's language, with the arrays that it is of.

    Attributes:
        spec: the spec.
        operands: the operands, in order.
        indices: the index arrays by letter.
        sizes: sizes of axes that no operand has.
        index_mode: what `planner.contract` does out of range.
        target: what the program calls the array that the result is added to; "" if there is none.
        in_place: whether it is added in place.
        device: the device that the arrays are on; None for the CPU.
        dtype: the dtype of the result where it is not that of the operands.
    """

    spec: str
    operands: tuple[Array, ...]
    indices: Mapping[str, Array]
    sizes: Mapping[str, int]
    index_mode: str = "raise"
    target: str = ""
    in_place: bool = False
    device: Any = None
    dtype: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What two calls that are the same contraction have in common."""
        indices = tuple((letter, index.operand.shape) for letter, index in self.indices.items())
        operands = tuple(array.operand for array in self.operands)
        return self.spec, operands, indices, self.index_mode, self.target, self.in_place, self.device, self.dtype

    @property
    def code(self) -> str:
        """The call to write."""
        count = len(self.operands)
        names = [array.name or f"x{number}" for number, array in enumerate(self.operands)]
        names += [f"sizes={dict(self.sizes)}"] * bool(self.sizes)
        names += [f'index_mode="{self.index_mode}"'] * (self.index_mode != "raise")
        indices = enumerate(self.indices.items(), count)
        names += [f"{letter}={_index_text(index, f'x{number}')}" for number, (letter, index) in indices]
        call = f'planner.contract("{self.spec}", {", ".join(names)})'
        if not self.target:
            return call
        return f"{self.target}.add_({call})" if self.in_place else f"{self.target} + {call}"


def _index_text(index: Array, otherwise: str) -> str:
    return index.name.replace("?", otherwise) or otherwise


def problem_of(
    expression: Expression,
    scatter: tuple[int, Read, int] | None = None,
    named: Callable[[Array], Array] = lambda array: array,
    **rest: Any,
) -> Problem:
    """Return an expression in planner's language.

    Args:
        expression: the expression.
        scatter: the dimension of the result whose rows are added up, the read that says where, and the size of the
            dimension that they are added into. The axes of that read are ignored.
        named: gives an array its name, and cuts it off from the program. The array keeps its identity.
        **rest: other attributes of the problem.

    Raises:
        PlannerError: no index mode gives the values of all reads.
    """
    letters = dict(expression.letters)
    given = set(letters.values())
    indices: dict[str, Array] = {}
    by_index: dict[Any, str] = {}
    free, names = _unused(_AXES, 0x4E00, given), _unused(_INDICES, 0x5E00, given)
    reads = [entry for _, term in expression.factors for entry in term if isinstance(entry, Read)]
    target = None if scatter is None else dataclasses.replace(scatter[1], axes=(expression.dims[scatter[0]],))
    mode, wrapped = _index_mode(reads, target)

    def letter(axis: int) -> str:
        if axis not in letters:
            letters[axis] = next(free)
        return letters[axis]

    def identified(array: Array) -> Array:
        return dataclasses.replace(named(array), identity=_identity(array))

    def text(entry: int | Read) -> str:
        if isinstance(entry, int):
            return letter(entry)
        # One index array may be held by several objects, and some of its reads may count from the end.
        size = wrapped(entry)
        key = _identity(entry.index), size
        if key not in by_index:
            index = identified(entry.index)
            by_index[key] = next(names)
            # Positions that are promised to be in range wrap as a remainder.
            indices[by_index[key]] = dataclasses.replace(index, name=f"{index.name or '?'} % {size}") if size else index
        return f"{by_index[key]}[{''.join(map(letter, entry.axes))}]"

    terms = ["".join(map(text, term)) for _, term in expression.factors]
    known = {axis for _, term in expression.factors for entry in term for axis in _axes_of(entry)}
    output = list(map(letter, expression.dims))
    sizes = {letters[axis]: expression.sizes[axis] for axis in expression.dims if axis not in known}
    if scatter is not None and target is not None:
        dim, _, size = scatter
        output[dim] = text(target)
        sizes[output[dim][0]] = size
    arrays = tuple(identified(array) for array, _ in expression.factors)
    return Problem(f"{', '.join(terms)} -> {''.join(output)}", arrays, indices, sizes, mode, **rest)


def _unused(first: str, then: int, given: set[str]) -> Iterator[str]:
    """Yield letters that are not given: the first ones, and then those from a code point on."""
    return (each for each in itertools.chain(first, map(chr, itertools.count(then))) if each not in given)


def _axes_of(entry: int | Read) -> tuple[int, ...]:
    return (entry,) if isinstance(entry, int) else entry.axes


def _identity(array: Array) -> int:
    return array.identity or id(array if array.origin is None else array.origin)


def _index_mode(reads: Sequence[Read], scatter: Read | None) -> tuple[str, Callable[[Read], int]]:
    """Return an index mode that gives the values of all reads, and the size by which a read must wrap before."""

    def best(modes: Iterable[frozenset[str]]) -> str | None:
        common = frozenset(_MODES).intersection(*modes)
        return next((mode for mode in _MODES if mode in common), None)

    every = [*reads, *([scatter] if scatter is not None else [])]
    mode = best(read.modes for read in every)
    if mode is not None:
        return mode, lambda read: 0
    mode = best(read.modes for read in every if not read.size)
    if mode is None:
        raise PlannerError("the reads treat positions out of range in different ways")
    # Rows that are read at dropped positions of the output are dropped with them.
    dropped = (_identity(scatter.index), scatter.axes) if scatter is not None and mode == "drop" else None
    return mode, lambda read: read.size if (_identity(read.index), read.axes) != dropped else 0
