"""Hypothesis strategies: random indirect einsums with their operands.

A problem is drawn axes first: the letters and their sizes, then the index arrays and the places that
they read or add into, then the axes of every term. What is drawn first in each choice is the simple
case, so problems shrink to few operands, few axes, no gathers.

Example:
    >>> from hypothesis import given
    >>> @given(problems(max_operands=3))
    ... def test_contract(problem):
    ...     got = contract(problem.spec, *problem.operands(), **problem.arguments())
    ...     assert (got == problem.expected()).all()
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from planner.testing.reference import exact_bound, output_shape, reference, reference_gradients

__all__ = ["FEATURES", "Problem", "index_arrays", "problems", "specs"]

Array: TypeAlias = npt.NDArray[Any]

FEATURES = frozenset(
    {
        "gather",  # index arrays in inputs
        "scatter",  # index arrays in the output
        "repeated",  # an axis twice in one input
        "repeated output",  # an axis twice in the output: the diagonal
        "broadcast output",  # an output axis that no input has
        "size one",  # dims of size 1 whose axis is larger
        "size zero",
        "ellipsis",
        "implicit",  # no written output
        "scalar",  # 0-d operands and index arrays
        "negative",  # negative indices under "raise"
        "index dtypes",  # other than int64
        "sizes tuple",  # the whole output shape as sizes
    }
)

_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_AXES = "abcdefghijklmno"
_INDEX_ARRAYS = "qp"
_GAP = 99  # stands between the elements of a strided operand


@dataclass(frozen=True, eq=False)
class Problem:
    """A spec with all that a call needs.

    Attributes:
        spec: the spec string.
        shapes: one shape an operand.
        sizes: what to pass as ``sizes=``: by letter, the whole output shape, or None.
        indices: the index arrays by letter.
        index_mode: "raise", "drop" or "clip".
        dtypes: one dtype name an operand.
        requires_grad: which operands need a gradient.
        seed: determines the operands' values.
        max_value: operands hold integers from -max_value to max_value.
    """

    spec: str
    shapes: tuple[tuple[int, ...], ...]
    sizes: dict[str, int] | tuple[int, ...] | None = None
    indices: Mapping[str, Array] = field(default_factory=dict)
    index_mode: str = "raise"
    dtypes: tuple[str, ...] = ()
    requires_grad: tuple[bool, ...] = ()
    seed: int = 0
    max_value: int = 3

    def __post_init__(self) -> None:
        """Fill in float32 and a gradient for every operand where nothing is said."""
        if not self.dtypes:
            object.__setattr__(self, "dtypes", ("float32",) * len(self.shapes))
        if not self.requires_grad:
            object.__setattr__(self, "requires_grad", tuple(d in _FLOATS for d in self.dtypes))

    def operands(self) -> list[Array]:
        """Draw small integers in each operand's dtype; bfloat16, which numpy lacks, comes as float32."""
        random = np.random.default_rng(self.seed)
        return [
            _small_integers(random, shape, dtype, self.max_value)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    def strided_operands(self) -> list[Array]:
        """The same values in views that are not contiguous: transposed, sliced with steps, offset."""
        random = np.random.default_rng([self.seed, 1])
        return [_strided(random, x) for x in self.operands()]

    def output_gradient(self) -> Array:
        """Draw small integers in the output's shape and the operands' common dtype."""
        random = np.random.default_rng([self.seed, 2])
        dtype = np.result_type(*self.operands())
        return _small_integers(random, self.output_shape(), dtype.name, self.max_value)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the call: sizes, index_mode and the index arrays."""
        return {"sizes": self.sizes, "index_mode": self.index_mode, **self.indices}

    def output_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return output_shape(self.spec, *self.operands(), **self.arguments())

    def expected(self) -> Array:
        """The oracle's result, in higher precision."""
        return reference(self.spec, *self.operands(), **self.arguments())

    def expected_gradients(self) -> list[Array]:
        """The oracle's gradient of every operand for `output_gradient`."""
        gout = self.output_gradient()
        return reference_gradients(self.spec, gout, *self.operands(), **self.arguments())

    def exact_bound(self) -> float:
        """Bound every number that a plan can meet, forward or backward (see `reference.exact_bound`)."""
        gout = self.output_gradient()
        return exact_bound(self.spec, *self.operands(), gout=gout, **self.arguments())

    def __repr__(self) -> str:
        """An expression that makes the problem again, given `array` and the dtypes of numpy."""
        indices = {name: q.tolist() if q.size else np.zeros(q.shape, int) for name, q in self.indices.items()}
        kinds = {name: q.dtype.name for name, q in self.indices.items()}
        return (
            f"Problem({self.spec!r}, {self.shapes}, sizes={self.sizes}, indices={indices} ({kinds}), "
            f"index_mode={self.index_mode!r}, dtypes={self.dtypes}, requires_grad={self.requires_grad}, "
            f"seed={self.seed})"
        )


def _small_integers(random: np.random.Generator, shape: tuple[int, ...], dtype: str, limit: int) -> Array:
    values = random.integers(-limit, limit + 1, shape)
    if dtype.startswith("complex"):
        return np.asarray(values + 1j * random.integers(-limit, limit + 1, shape), dtype)
    if dtype.startswith("uint"):
        values = np.abs(values)
    return np.asarray(values, "float32" if dtype == "bfloat16" else dtype)


def _strided(random: np.random.Generator, x: Array) -> Array:
    """Equal values in a view of a larger, permuted buffer; steps are positive, as torch demands."""
    order = random.permutation(x.ndim)
    steps = [int(n) for n in random.integers(1, 4, x.ndim)]
    offsets = [int(n) for n in random.integers(0, 3, x.ndim)]
    stops = [offset + step * n for offset, step, n in zip(offsets, steps, x.shape, strict=True)]
    buffer = np.full([2, *(stops[d] + 1 for d in order)], _GAP, x.dtype)
    slices = [slice(offsets[d], stops[d], steps[d]) for d in order]
    view = buffer[1][tuple(slices)].transpose(np.argsort(order)) if x.ndim else buffer[1:].reshape(())
    view[...] = x
    return view


# --- strategies ---------------------------------------------------------------------------------


def _chance(share: int, of: int = 8) -> st.SearchStrategy[bool]:
    """True in share/of of the draws; shrinks to False."""
    return st.sampled_from([False] * (of - share) + [True] * share)


@st.composite
def index_arrays(
    draw: st.DrawFn,
    size: int,
    shape: tuple[int, ...],
    mode: str = "raise",
    *,
    negative: bool = True,
    dtypes: Sequence[str] = ("int64",),
    largest: int | None = None,
) -> Array:
    """Index arrays of a shape for a dim of `size`; duplicates are common.

    Args:
        draw: given by Hypothesis.
        size: the indexed dim's size; the smallest, if the array indexes several.
        shape: the array's shape.
        mode: "raise" keeps indices in range; "drop" and "clip" go beyond it on both sides.
        negative: whether "raise" counts from the end too.
        dtypes: integer dtypes to choose from.
        largest: the largest indexed dim's size, if the array indexes several.
    """
    low, high = (-size if negative else 0, size - 1) if mode == "raise" else (-2, (largest or size) + 1)
    count = int(np.prod(shape))
    if count and high < low:
        raise ValueError(f"no index is in range for size {size}")
    dtype = draw(st.sampled_from(list(dtypes)))
    if dtype.startswith("uint"):
        low = 0
    element = st.integers(0, high) if low == 0 else st.one_of(st.integers(0, high), st.integers(low, high))
    if mode == "raise" and size == 0:
        return np.zeros(shape, dtype)
    values = draw(st.lists(element, min_size=count, max_size=count))
    return np.array(values, dtype).reshape(shape)


@st.composite
def problems(
    draw: st.DrawFn,
    min_operands: int = 1,
    max_operands: int = 4,
    max_axes: int = 6,
    max_size: int = 4,
    gathers: bool | None = None,
    dtypes: Sequence[str] = ("float32",),
    index_modes: Sequence[str] = ("raise",),
    without: Collection[str] = (),
    mixed_dtypes: bool = False,
    max_value: int = 3,
) -> Problem:
    """Random problems of the whole language.

    Floors, which a test holds over 300 draws: at least half have 3 operands or more (two thirds
    are asked to, if the limits allow it), and at least half have an index array (three quarters are
    asked to).

    Args:
        draw: given by Hypothesis.
        min_operands: fewest operands.
        max_operands: most operands.
        max_axes: most letters, ellipsis axes (at most 2) not counted.
        max_size: largest size of an axis; gathered dims go one beyond.
        gathers: whether there is an index array; None for three quarters of the draws.
        dtypes: dtype names to choose from, one a problem.
        index_modes: index modes to choose from.
        without: members of `FEATURES` to leave out.
        mixed_dtypes: choose a dtype for every operand by itself.
        max_value: operands hold integers from -max_value to max_value.
    """
    unknown = set(without) - FEATURES
    if unknown:
        raise ValueError(f"no such features: {sorted(unknown)}")
    features = FEATURES - set(without)

    def happens(feature: str, share: int, of: int = 8) -> bool:
        return feature in features and draw(_chance(share, of))

    counts = [n for n in range(min_operands, max_operands + 1) for _ in range(2 if n < 3 else 3)]
    fewer, more = [n for n in counts if n < 3], [n for n in counts if n >= 3]
    if fewer and more:
        counts = more if draw(_chance(6, 9)) else fewer
    operands = draw(st.sampled_from(counts))
    if gathers is None:
        gathers = bool(features & {"gather", "scatter"}) and draw(_chance(6))
    mode = draw(st.sampled_from(list(index_modes)))

    letters = _AXES[: draw(st.integers(1, max_axes))]
    sizes = [n for n in (2, 3, 1, 2, 3, 4, 2, 3, *range(5, max_size + 1)) if n <= max_size] or [1]
    extents: dict[Any, int] = {a: draw(st.sampled_from(sizes)) for a in letters}
    if happens("size zero", 1, 12):
        extents[draw(st.sampled_from(letters))] = 0
    ellipsis = tuple(draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=2))) if happens("ellipsis", 2) else ()
    implicit = not gathers and happens("implicit", 3)

    # A term is a list of letters, of (index array, bracket) pairs and of `...`.
    terms: list[list[Any]] = [[] for _ in range(operands)]
    for k in range(operands):
        fewest = 0 if "scalar" in features and draw(_chance(1)) else 1
        chosen = draw(st.lists(st.sampled_from(letters), min_size=fewest, max_size=3, unique=True))
        if chosen and happens("repeated", 1):
            chosen.insert(draw(st.integers(0, len(chosen))), draw(st.sampled_from(chosen)))
        terms[k] = list(chosen)
    output: list[Any] = []
    if not implicit:
        carried = sorted({a for term in terms for a in term})
        if carried:
            output = list(draw(st.lists(st.sampled_from(carried), max_size=3, unique=True)))
        if output and happens("repeated output", 1):
            output.insert(draw(st.integers(0, len(output))), draw(st.sampled_from(output)))
        fresh = [a for a in letters if a not in carried]
        if fresh and happens("broadcast output", 2):
            output.insert(draw(st.integers(0, len(output))), draw(st.sampled_from(fresh)))

    arrays: dict[str, _Drawn] = {}
    if gathers:
        names = _INDEX_ARRAYS[: 2 if draw(_chance(3)) else 1]
        for name in names:
            array = draw(_drawn_arrays(letters, extents, ellipsis, features))
            for place in _places(draw, operands, features):
                target = output if place == operands else terms[place]
                gather = (name, draw(st.sampled_from(array.brackets)))
                target.insert(draw(st.integers(0, len(target))), gather)
            arrays[name] = array

    ranks = [0] * operands
    if ellipsis:
        full = draw(st.integers(0, operands - 1))
        for k in range(operands):
            if k == full or draw(_chance(4)):
                ranks[k] = len(ellipsis) if k == full else draw(st.integers(0, len(ellipsis)))
                terms[k].insert(draw(st.integers(0, len(terms[k]))), ...)
        if not implicit and draw(_chance(6)):
            output.insert(draw(st.integers(0, len(output))), ...)

    # Shapes: index arrays first, since the dims they read must hold their indices.
    index_shapes = {}
    for name, array in arrays.items():
        distinct = all(len(set(b)) == len(b) for b in array.brackets)  # else dims of one bracket must agree
        index_shapes[name] = tuple(1 if distinct and happens("size one", 1, 12) else n for n in array.shape)
    dims: dict[str, list[int]] = {name: [] for name in arrays}

    def indexed_size(name: str) -> int:
        empty = 0 in index_shapes[name]
        least = 0 if "size zero" in features and (empty or mode == "drop") and draw(_chance(1)) else 1
        size = least and draw(st.sampled_from([*sizes, max_size + 1]))
        dims[name].append(size)
        return size

    shapes = []
    for term, rank in zip(terms, ranks, strict=True):
        ones = {a for a in dict.fromkeys(a for a in term if isinstance(a, str)) if happens("size one", 1, 12)}
        shape: list[int] = []
        for item in term:
            if item is ...:
                tail = ellipsis[len(ellipsis) - rank :]
                shape += [1 if happens("size one", 1, 6) else n for n in tail]
            elif isinstance(item, tuple):
                shape.append(indexed_size(item[0]))
            else:
                shape.append(1 if item in ones else extents[item])
        shapes.append(tuple(shape))

    # Sizes that no input tells; now and then some that one does.
    told = {a for term in terms for a in term if isinstance(a, str)}
    told |= {a for term in (*terms, output) for g in term if isinstance(g, tuple) for a in g[1]}
    given: dict[str, int] = {a: extents[a] for a in output if isinstance(a, str) and a not in told}
    for name in {item[0]: None for item in output if isinstance(item, tuple)}:
        if len(set(dims[name])) != 1 or draw(_chance(2)):
            given[name] = indexed_size(name)

    indices = {}
    for name in arrays:
        kinds = ("int64", "int32", "int16", "int8", "uint8", "uint32") if "index dtypes" in features else ("int64",)
        indices[name] = draw(
            index_arrays(
                min(dims[name]),
                index_shapes[name],
                mode,
                negative="negative" in features,
                dtypes=("int64", "int64", *kinds),
                largest=max(dims[name]),
            )
        )

    if mixed_dtypes:
        kinds_drawn = tuple(draw(st.sampled_from(list(dtypes))) for _ in range(operands))
    else:
        kinds_drawn = (draw(st.sampled_from(list(dtypes))),) * operands
    problem = Problem(
        spec=_write(terms, None if implicit else output),
        shapes=tuple(shapes),
        sizes=given or None,
        indices=indices,
        index_mode=mode,
        dtypes=kinds_drawn,
        requires_grad=tuple(d in _FLOATS and not draw(_chance(2)) for d in kinds_drawn),
        seed=draw(st.integers(0, 999)),
        max_value=max_value,
    )
    if not implicit and happens("sizes tuple", 1, 6):
        object.__setattr__(problem, "sizes", problem.output_shape())
    return problem


def specs(**options: Any) -> st.SearchStrategy[str]:
    """Spec strings alone; options as for `problems`."""
    return problems(**options).map(lambda problem: problem.spec)


@dataclass(frozen=True)
class _Drawn:
    """An index array before its values: its shape and the brackets that suit it."""

    shape: tuple[int, ...]
    brackets: list[tuple[Any, ...]]


@st.composite
def _drawn_arrays(
    draw: st.DrawFn,
    letters: str,
    extents: dict[Any, int],
    ellipsis: tuple[int, ...],
    features: frozenset[str],
) -> _Drawn:
    fewest = 0 if "scalar" in features and draw(_chance(1)) else 1
    distinct = "repeated" not in features or not draw(_chance(1, 10))
    axes = st.lists(st.sampled_from(letters), min_size=fewest, max_size=2, unique=distinct)
    bracket: tuple[Any, ...] = tuple(draw(axes))
    shape = tuple(extents[a] for a in bracket)
    brackets = [bracket] * 3
    alike = tuple(draw(st.sampled_from([b for b in letters if extents[b] == extents[a]])) for a in bracket)
    brackets.append(alike)
    if bool(ellipsis) and draw(_chance(3)):
        place = draw(st.integers(0, len(bracket)))
        tail = ellipsis[len(ellipsis) - draw(st.integers(0, len(ellipsis))) :]
        shape = (*shape[:place], *tail, *shape[place:])
        brackets = [(*b[:place], ..., *b[place:]) for b in brackets]
    return _Drawn(shape, brackets)


def _places(draw: st.DrawFn, operands: int, features: frozenset[str]) -> list[int]:
    """Which terms an index array reads, the output being number `operands`; at least one."""
    places = []
    if "gather" in features:
        places = draw(st.lists(st.integers(0, operands - 1), min_size=1, max_size=2))
    if "scatter" in features and (not places or draw(_chance(3))):
        reads_too = draw(_chance(4))
        places = [*(places if reads_too else []), operands]
    return places


def _write(terms: list[list[Any]], output: list[Any] | None) -> str:
    def text(item: Any) -> str:
        if item is ...:
            return "..."
        return item if isinstance(item, str) else f" {item[0]}[{''.join(map(text, item[1]))}] "

    left = ", ".join("".join(map(text, term)).strip() for term in terms)
    return left if output is None else f"{left} -> {''.join(map(text, output)).strip()}"
