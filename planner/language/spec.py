"""The nouns of the language: `Gather`, `Spec` and the stand-in `Operand`.

A *parsed* spec may hold ``"..."`` and has no sizes. A *resolved* spec (see `planner.resolve`) has neither ellipsis nor
size-1 broadcasting. It holds the size of every axis, and every gather holds the size of the dimension that it reads or
adds into. All modules after the parser work on resolved specs.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from planner.language.cached import cached_property

ELLIPSIS = "..."
# The characters that a spec ignores. Other Unicode spaces are axes, because `opt_einsum.get_symbol` returns them.
WHITESPACE = " \t\n\r\f\v"
_NO_AXIS = frozenset(f"{WHITESPACE}0123456789,->.[]")


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """One dimension addressed through an index array: ``q[n]``.

    Example:
        >>> import planner
        >>> (gather,) = planner.resolve("nij, q[n]jk -> nik", (5, 1, 2), (3, 2, 4), q=(5,)).gathers
        >>> str(gather), gather.array, gather.axes, gather.size
        ('q[n]', 'q', ('n',), 3)

    Attributes:
        array: letter of the index array, passed to `contract` as the keyword of that name.
        axes: axes of the index array, one for each of its dimensions.
        size: size of the dimension that is read (in an input) or added into (in the output);
            None until the spec is resolved.
    """

    array: str
    axes: tuple[str, ...]
    size: int | None = None

    def __str__(self) -> str:
        return f"{self.array}[{''.join(self.axes)}]"


Term = tuple["str | Gather", ...]
New = TypeVar("New")


def is_letter(character: str) -> bool:
    """Whether the character can name an index array: a letter that Python's keyword normalisation leaves alone."""
    return character.isidentifier() and character != "_" and unicodedata.normalize("NFKC", character) == character


def is_axis(character: str) -> bool:
    """Whether the character can name an axis: any but ASCII whitespace, ASCII digits and the grammar's own characters.

    Half of a surrogate pair is refused, because neither files nor JSON can hold it.
    """
    return len(character) == 1 and character not in _NO_AXIS and not "\ud800" <= character <= "\udfff"


# What is asked of a term for each step that has it.
_cached_by_term = lru_cache(maxsize=1024)


@_cached_by_term
def term_axes(term: Term) -> tuple[str, ...]:
    """Return all axes of a term in order of appearance, each once. Axes in brackets count."""
    seen: dict[str, None] = {}
    for entry in term:
        for axis in entry_axes(entry):
            seen[axis] = None
    return tuple(seen)


def plain_axes(term: Iterable[Any]) -> tuple[str, ...]:
    """Return the entries of a term that are axes, and not gathers. A repeated axis is returned each time."""
    return tuple([entry for entry in term if isinstance(entry, str)])


def axis_of(entry: str | Gather) -> str | None:
    """Return the axis that an entry of a term is; None for a gather."""
    return None if isinstance(entry, Gather) else entry


def gather_of(entry: str | Gather) -> Gather | None:
    """Return the gather that an entry of a term is; None for an axis."""
    return entry if isinstance(entry, Gather) else None


def entry_axes(entry: str | Gather) -> tuple[str, ...]:
    """Return the axes of an entry of a term: itself, or those in its bracket."""
    return entry.axes if isinstance(entry, Gather) else (entry,)


@_cached_by_term
def term_gathers(term: Term) -> tuple[Gather, ...]:
    """Return the gathers of a term."""
    return tuple([entry for entry in term if isinstance(entry, Gather)])


@_cached_by_term
def row_axes(term: Term) -> tuple[str, ...]:
    """Return the axes that a term is indexed by, in order of appearance: axes in brackets, and axes that repeat.

    Example:
        >>> term = ("n", Gather("q", ("n", "k")), "d", "i", "i")
        >>> row_axes(term)
        ('n', 'k', 'i')
    """
    return term_axes(tuple(entry for entry in term if isinstance(entry, Gather) or term.count(entry) > 1))


@_cached_by_term
def indexed_dims(term: Term) -> tuple[int, ...]:
    """Return the dimensions of a term that are indexed: gathers, and those of `row_axes`.

    Example:
        >>> term = ("n", Gather("q", ("n", "k")), "d", "i", "i")
        >>> indexed_dims(term)
        (0, 1, 3, 4)
    """
    rows = row_axes(term)
    return tuple(d for d, entry in enumerate(term) if isinstance(entry, Gather) or entry in rows)


def replace_gathers(term: Term, change: Callable[[Gather], New]) -> tuple[str | New, ...]:
    """Return a term with every gather replaced by `change(gather)`."""
    return tuple(change(entry) if isinstance(entry, Gather) else entry for entry in term)


def _letters() -> Iterator[str]:
    yield from "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    yield from (chr(code) for code in range(0x3B1, 0x110000) if is_letter(chr(code)))


@lru_cache(maxsize=8)
def _first_letters(count: int) -> tuple[str, ...]:
    return tuple(letter for letter, _ in zip(_letters(), range(count), strict=False))


def unused_letters(used: Iterable[str], count: int) -> tuple[str, ...]:
    """Return `count` letters that are not in `used`, latin ones first."""
    taken = set(used)
    # Round up to a power of two, so that few different counts reach the cache.
    enough = 1 << (len(taken) + count).bit_length()
    return tuple(letter for letter in _first_letters(enough) if letter not in taken)[:count]


@dataclasses.dataclass(frozen=True)
class Spec:
    """An einsum with gathers: input terms, an output term and, once resolved, the size of each axis.

    Example:
        >>> import planner
        >>> spec = planner.resolve("nij, q[n]jk -> nik", (5, 1, 2), (3, 2, 4), q=(5,))
        >>> print(spec)
        nij, q[n]jk -> nik
        >>> spec.size("n"), spec.shape(spec.inputs[1]), spec.output_shape
        (5, (3, 2, 4), (5, 1, 4))

    Attributes:
        inputs: a term for each operand; an entry is an axis or a `Gather`.
        output: the term of the result.
        sizes: pairs of axis and size, sorted by axis; empty until resolved.
    """

    inputs: tuple[Term, ...]
    output: Term
    sizes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        inputs = ", ".join("".join(map(str, term)) for term in self.inputs)
        return f"{inputs} -> {''.join(map(str, self.output))}"

    @property
    def terms(self) -> tuple[Term, ...]:
        """All terms, the output last."""
        return (*self.inputs, self.output)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.output, self.sizes))

    @cached_property
    def by_axis(self) -> Mapping[str, int]:
        """The size of each axis."""
        return dict(self.sizes)

    @property
    def by_entry(self) -> dict[str | Gather, int]:
        """The size of each axis, and of the dimension of each gather."""
        return dict[str | Gather, int](self.sizes) | {gather: self.size(gather) for gather in self.gathers}

    @cached_property
    def wide(self) -> frozenset[str | Gather]:
        """The axes and gathers whose size is not 1."""
        gathers = [gather for gather in self.gathers if gather.size != 1]
        return frozenset([*[axis for axis, size in self.sizes if size != 1], *gathers])

    def __getstate__(self) -> dict[str, Any]:
        # Another process has other hashes.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes, those in brackets too, in order of appearance."""
        return tuple(dict.fromkeys([axis for term in self.terms for axis in term_axes(term)]))

    @cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """All distinct gathers, in order of appearance."""
        return tuple(dict.fromkeys([gather for term in self.terms for gather in term_gathers(term)]))

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """The number of elements of an array that has each term, the output last."""
        return tuple([math.prod(self.shape(term)) for term in self.terms])

    @cached_property
    def elements_read(self) -> tuple[int, ...]:
        """The number of elements of each input that a step reads.

        Of a pool it reads no more than the rows that it takes have, and of a diagonal only its entries.
        """
        taken = [math.prod(self.shape(term_axes(term))) for term in self.inputs]
        return tuple(map(min, self.elements, taken))

    @property
    def arrays(self) -> tuple[str, ...]:
        """Letters of the index arrays, in order of appearance."""
        return tuple(dict.fromkeys([gather.array for gather in self.gathers]))

    def size(self, entry: str | Gather) -> int:
        """Return the size of an axis, or of the dimension that a gather reads or adds into."""
        if isinstance(entry, Gather):
            assert entry.size is not None, "spec is not resolved"
            return entry.size
        return self.by_axis[entry]

    def shape(self, term: Term) -> tuple[int, ...]:
        """Return the shape of an array that has this term."""
        sizes = self.by_axis
        return tuple([self.size(e) if isinstance(e, Gather) else sizes[e] for e in term])

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The result's shape."""
        return self.shape(self.output)


def pool_letters(spec: Spec) -> tuple[str, ...]:
    """Return the letter of the pool axis of each gather of a resolved spec."""
    used = {axis for axis, _ in spec.sizes} | set(spec.arrays)
    return unused_letters(used, len(spec.gathers))


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """A stand-in for an array: everything that a plan depends on, without data.

    Example:
        >>> import planner
        >>> a = planner.Operand((5, 1, 2), requires_grad=True)
        >>> cost = planner.plan("nij, q[n]jk -> nik", a, (3, 2, 4), q=(5,), backend="numpy").cost
        >>> cost.forward.flops, cost.backward.flops
        (80, 80)

    Attributes:
        shape: sizes of the dimensions.
        dtype: a dtype name that NumPy or the backend knows, such as ``"float32"`` or ``"bfloat16"``.
        strides: elements (not bytes) between neighbours along each dimension; None for row-major.
        requires_grad: whether the backward program must compute this operand's gradient.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None
    requires_grad: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


# -- symbolic sizes ------------------------------------------------------------------------------------------

# The number that stands for a symbol without an upper bound.
USUAL = 1_024
# Bounds are looked for among these.
_SIZES = range(1 << 40)


def is_symbol(size: Any) -> bool:
    """Return whether a size is a symbolic dimension of JAX, as `jax.export.symbolic_shape` makes them.

    These are expressions such as `b` or `2*n + 1`, which compute and compare as integers do, and hash. Two are equal
    only if JAX can prove it. An order that it cannot decide is an error of JAX's own.
    """
    if type(size) is int:
        return False
    export = sys.modules.get("jax.export")  # whoever made the symbol has imported it
    return export is not None and bool(export.is_symbolic_dim(size))


@lru_cache(maxsize=1024)
def largest(size: Any) -> int | None:
    """Return the upper bound of a size that JAX can prove from the constraints of its symbols; None if there is none.

    Example:
        >>> from jax import export
        >>> b, n = export.symbolic_shape("b, n", constraints=["b <= 64"])
        >>> largest(b), largest(2 * b), largest(n), largest(7)
        (64, 128, None, 7)
    """
    if not is_symbol(size):
        return int(size)
    most = bisect_left(_SIZES, True, key=lambda n: _proves(lambda: size <= n))
    return None if most == len(_SIZES) else most


@lru_cache(maxsize=1024)
def stand_in(size: Any) -> int:
    """Return the number that stands for a size in a plan: its upper bound, else 1,024 or the lower bound above that.

    A dimension of size 1 would be broadcast, so a symbol stands for 2 at least.

    Example:
        >>> from jax import export
        >>> b, n, k = export.symbolic_shape("b, n, k", constraints=["b <= 64", "n >= 5000"])
        >>> stand_in(b), stand_in(n), stand_in(k), stand_in(7)
        (64, 5000, 1024, 7)
    """
    if not is_symbol(size):
        return int(size)
    most = largest(size)
    if most is not None:
        return max(2, most)
    return max(USUAL, bisect_left(_SIZES, True, key=lambda n: not _proves(lambda: size >= n)) - 1)


def _proves(comparison: Callable[[], bool]) -> bool:
    """Return whether JAX can prove a comparison with a symbol."""
    try:
        return bool(comparison())
    except sys.modules["jax"].errors.InconclusiveDimensionOperation:
        return False
