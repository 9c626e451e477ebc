"""What a program computes from arrays by reading rows, multiplying and summing, as one einsum with gathers.

An expression is immutable. Its axes are numbers; each use of an expression renames them, so the same array may stand in
a product twice.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from planner.language.spec import Operand

__all__ = ["Array", "Expression", "Problem", "Read", "contract", "matmul", "multiply", "problem_of"]

_fresh = itertools.count()
# Letters of axes, in the order in which they are given out, and those of index arrays.
_AXES = "ijklmnabcdefghopstuvwxyz"
_INDICES = "qpr" + "QPRSTUVWXYZABCDEFGHIJKLMNO"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Array:
    """An array that a program has: an operand, or an index array.

    Attributes:
        operand: its shape, dtype, strides, and whether it needs a gradient.
        name: what the program calls it; "" if no name was found.
        value: the array itself where values are measured, else None.
    """

    operand: Operand
    name: str = ""
    value: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """A dimension that is read at the positions that an index array holds, along the axes of that array."""

    index: Array
    axes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """A product of arrays, of which some axes may be summed.

    Attributes:
        factors: the arrays, each with its axes; in place of an axis may stand a `Read`.
        dims: the axes of the result, in order. All others are summed.
        sizes: the size of each axis. An array may have size 1 where the axis is longer.
    """

    factors: tuple[tuple[Array, tuple[int | Read, ...]], ...]
    dims: tuple[int, ...]
    sizes: Mapping[int, int]

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

    def renamed(self, new: Mapping[int, int]) -> Expression:
        """Return the same expression with other axes."""

        def entry(old: int | Read) -> int | Read:
            return (
                Read(old.index, tuple(new.get(a, a) for a in old.axes)) if isinstance(old, Read) else new.get(old, old)
            )

        sizes: dict[int, int] = {}
        for axis, size in self.sizes.items():
            name = new.get(axis, axis)
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
        factors = tuple((array, tuple(map(entry, term))) for array, term in self.factors)
        return Expression(factors, tuple(new.get(a, a) for a in self.dims), sizes)

    def fresh(self) -> Expression:
        """Return the same expression with axes that nothing else has."""
        return self.renamed({axis: next(_fresh) for axis in self.sizes})

    def take(self, dim: int, index: Array) -> Expression | None:
        """Return the expression with one dimension read at an index array's positions; None if that is no one array."""
        if len(self.factors) != 1:
            return None
        ((array, term),) = self.factors
        axis = self.dims[dim]
        if axis not in term:
            return None
        axes = tuple(next(_fresh) for _ in index.operand.shape)
        term = tuple(Read(index, axes) if entry == axis else entry for entry in term)
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

    None if sizes do not fit. A size of 1 fits any.
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
    return dataclasses.replace(both, dims=tuple(axis_of[label] for label in out))


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A contraction in planner's language, with the arrays that it is of.

    Attributes:
        spec: the spec.
        operands: the operands, in order.
        indices: the index arrays by letter.
        sizes: sizes of axes that no operand has.
    """

    spec: str
    operands: tuple[Array, ...]
    indices: Mapping[str, Array]
    sizes: Mapping[str, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """What two calls that are the same contraction have in common."""
        indices = tuple((letter, index.operand.shape) for letter, index in self.indices.items())
        return self.spec, tuple(array.operand for array in self.operands), indices

    @property
    def code(self) -> str:
        """The call to write."""
        names = [array.name or f"x{number}" for number, array in enumerate(self.operands)]
        names += [f"sizes={dict(self.sizes)}"] * bool(self.sizes)
        names += [f"{letter}={index.name or letter}" for letter, index in self.indices.items()]
        return f'planner.contract("{self.spec}", {", ".join(names)})'


def problem_of(expression: Expression, scatter: tuple[int, Array, int] | None = None) -> Problem:
    """Return an expression in planner's language.

    Args:
        expression: the expression.
        scatter: the dimension of the result whose rows are added up, the index array that says where, and the size of
            the dimension that they are added into.
    """
    letters: dict[int, str] = {}
    indices: dict[str, Array] = {}
    by_index: dict[int, str] = {}
    free: Iterator[str] = itertools.chain(_AXES, map(chr, itertools.count(0x4E00)))
    names: Iterator[str] = itertools.chain(_INDICES, map(chr, itertools.count(0x5E00)))

    def letter(axis: int) -> str:
        if axis not in letters:
            letters[axis] = next(free)
        return letters[axis]

    def text(entry: int | Read) -> str:
        if isinstance(entry, int):
            return letter(entry)
        # One index array may be held by several objects of the program, such as views.
        key = id(entry.index)
        if key not in by_index:
            by_index[key] = next(names)
            indices[by_index[key]] = entry.index
        return f"{by_index[key]}[{''.join(map(letter, entry.axes))}]"

    terms = ["".join(map(text, term)) for _, term in expression.factors]
    known = set(letters)
    output = list(map(letter, expression.dims))
    sizes = {letters[axis]: expression.sizes[axis] for axis in expression.dims if axis not in known}
    if scatter is not None:
        dim, index, size = scatter
        output[dim] = text(Read(index, (expression.dims[dim],)))
        sizes[output[dim][0]] = size
    arrays = tuple(array for array, _ in expression.factors)
    return Problem(f"{', '.join(terms)} -> {''.join(output)}", arrays, indices, sizes)
