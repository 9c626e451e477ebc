"""Hypothesis strategies: random contractions of the whole language, and everything that a call of one needs.

A problem is drawn axes first: the letters and their sizes, then the index arrays and the places that
they read or add into, then the axes of every term. What is drawn first in each choice is the simple
case, so problems shrink to few operands, few axes, no gathers, row-major float32 and small values.

All strategies check their arguments when they are first drawn from, as Hypothesis's own do, and raise its
``InvalidArgument``. With the package installed, ``from_type(Problem)`` and ``from_type(planner.Spec)`` are known to
Hypothesis.

Example:
    >>> from hypothesis import given, settings
    >>> import planner
    >>> @settings(max_examples=20, database=None)
    ... @given(problems(max_operands=3))
    ... def test_contract(problem):
    ...     found = planner.contract(problem.spec, *problem.operands(), **problem.arguments())
    ...     assert (found == problem.expected()).all()
    >>> test_contract()
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from planner.errors import PlannerError
from planner.parse import parse
from planner.resolve import resolve
from planner.spec import ELLIPSIS, Gather, Spec
from planner.testing.problem import DTYPES, FLOATS, Array, Problem, small_integers, strided_view
from planner.testing.reference import exact_range

__all__ = ["FEATURES", "INDEX_DTYPES", "axes_of", "indices", "operands", "problems", "problems_of", "specs"]

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
INDEX_MODES = ("raise", "drop", "clip")
INDEX_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")

_AXES = "abcdefghijklmno"
_INDEX_ARRAYS = "qp"
_MOST_AXES = len(_AXES)
# Of longer index arrays a seed is drawn, not each element.
_MOST_DRAWN = 64


# --- arguments ----------------------------------------------------------------------------------


def _check_range(name: str, low: Any, high: Any, least: int, most: int | None = None) -> None:
    """Refuse bounds that are no integers or in the wrong order; `name` is theirs without ``min_`` and ``max_``."""
    for label, value in ((f"min_{name}", low), (f"max_{name}", high)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"{label}={value!r} is no integer")
        if value < least or (most is not None and value > most):
            bounds = f"{least} or more" if most is None else f"between {least} and {most}"
            raise InvalidArgument(f"{label}={value!r} must be {bounds}")
    if low > high:
        raise InvalidArgument(f"min_{name}={low} is larger than max_{name}={high}")


def _check_names(name: str, given: Any, known: Collection[str], empty: bool = False) -> None:
    """Refuse names that are not known; a single string is no collection of names."""
    if isinstance(given, str) or not isinstance(given, Collection):
        raise InvalidArgument(f"{name}={given!r} is no collection of names")
    unknown = [x for x in given if not isinstance(x, str) or x not in known]
    if unknown:
        raise InvalidArgument(f"{name} has unknown {unknown}: take from {', '.join(sorted(known))}")
    if not given and not empty:
        raise InvalidArgument(f"{name} is empty")


def _check_flag(name: str, value: Any, open_too: bool = True) -> None:
    if not (isinstance(value, bool) or (open_too and value is None)):
        raise InvalidArgument(f"{name}={value!r} is none of {'None, ' if open_too else ''}True, False")


def _check_shape(shape: Any) -> None:
    if not isinstance(shape, (tuple, list)) or any(
        isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in shape
    ):
        raise InvalidArgument(f"shape={shape!r} is no tuple of sizes")


def _chance(share: int, of: int = 8) -> st.SearchStrategy[bool]:
    """True in share/of of the draws; shrinks to False."""
    return st.sampled_from([False] * (of - share) + [True] * share)


# --- arrays -------------------------------------------------------------------------------------


@st.composite
def operands(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    dtype: str = "float32",
    *,
    max_value: int = 3,
    strided: bool | None = None,
) -> Array:
    """Draw operands: arrays of small integers, so that sums of products are exact.

    Example:
        >>> from hypothesis import find
        >>> find(operands((2, 3), "float64"), lambda x: True).shape
        (2, 3)

    Args:
        draw: given by Hypothesis.
        shape: the array's shape.
        dtype: a dtype name; bfloat16, which NumPy lacks, comes as float32.
        max_value: values are integers from -max_value to max_value, from 0 on for unsigned dtypes.
        strided: whether the array is a view that is not row-major: permuted, with steps and an offset; None for both.

    Returns:
        A strategy for arrays of that shape and dtype.

    Raises:
        InvalidArgument: an argument is none of these.
    """
    _check_shape(shape)
    _check_names("dtype", (dtype,), DTYPES)
    _check_range("value", 0, max_value, 0, exact_range(dtype))
    _check_flag("strided", strided)
    seed = draw(st.integers(0, 999))
    values = small_integers(np.random.default_rng(seed), tuple(shape), dtype, max_value)
    strides = draw(st.booleans()) if strided is None else strided
    return strided_view(np.random.default_rng([seed, 1]), values) if strides else values


@st.composite
def indices(
    draw: st.DrawFn,
    size: int,
    shape: tuple[int, ...],
    *,
    index_mode: str = "raise",
    negative: bool = True,
    dtypes: Sequence[str] = ("int64",),
    max_size: int | None = None,
) -> Array:
    """Draw index arrays of a shape for a dim of `size`; duplicates are common.

    Example:
        >>> from hypothesis import find
        >>> find(indices(3, (4,)), lambda q: q[0] < 0)
        array([-1,  0,  0,  0])

    Args:
        draw: given by Hypothesis.
        size: the indexed dim's size; the smallest, if the array indexes several.
        shape: the array's shape.
        index_mode: "raise" keeps indices in range; "drop" and "clip" go beyond it on both sides.
        negative: whether "raise" counts from the end too.
        dtypes: integer dtypes to choose from; values stay within the chosen one.
        max_size: the largest indexed dim's size, if the array indexes several; None for `size`.

    Returns:
        A strategy for index arrays.

    Raises:
        InvalidArgument: an argument is none of these, or no index is in range.
    """
    _check_shape(shape)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidArgument(f"size={size!r} is no size")
    _check_range("size", size, size if max_size is None else max_size, 0)
    _check_flag("negative", negative, open_too=False)
    _check_names("index_mode", (index_mode,), INDEX_MODES)
    _check_names("dtypes", dtypes, INDEX_DTYPES)
    low, high = -size if negative else 0, size - 1
    if index_mode != "raise":
        low, high = -2, (size if max_size is None else max_size) + 1
    shape = tuple(map(int, shape))
    count = math.prod(shape)
    if count and high < low:
        raise InvalidArgument(f"no index is in range for size {size}")
    dtype = draw(st.sampled_from(list(dtypes)))
    limits = np.iinfo(dtype)
    low, high = max(low, int(limits.min)), min(high, int(limits.max))
    if index_mode == "raise" and size == 0:
        return np.zeros(shape, dtype)
    if count > _MOST_DRAWN:
        random = np.random.default_rng(draw(st.integers(0, 999)))
        return random.integers(low, high, shape, dtype, endpoint=True)
    element = st.integers(0, high) if low >= 0 else st.one_of(st.integers(0, high), st.integers(low, high))
    values = draw(st.lists(element, min_size=count, max_size=count))
    return np.array(values, dtype).reshape(shape)


# --- problems -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawn:
    """An index array before its values: its shape and the brackets that suit it."""

    shape: tuple[int, ...]
    brackets: list[tuple[Any, ...]]


class _Written(NamedTuple):
    """Terms before their shapes: lists of letters, of (index array, bracket) pairs and of `...`; and the sizes.

    `ranks` are how many of the ellipsis's axes each operand has; `output` is None where it is not written.
    """

    terms: list[list[Any]]
    output: list[Any] | None
    arrays: dict[str, _Drawn]
    extents: dict[str, int]
    ellipsis: tuple[int, ...]
    ranks: list[int]


class _Choices(NamedTuple):
    """What `problems` and `problems_of` have in common: what a problem's arrays may be."""

    dtypes: Sequence[str]
    index_modes: Sequence[str]
    mixed_dtypes: bool
    max_value: int
    strided: bool | None
    features: frozenset[str]

    @classmethod
    def checked(
        cls, dtypes: Any, index_modes: Any, mixed_dtypes: Any, max_value: Any, strided: Any, without: Any
    ) -> _Choices:
        _check_names("dtypes", dtypes, DTYPES)
        _check_names("index_modes", index_modes, INDEX_MODES)
        _check_range("value", 0, max_value, 0, min(map(exact_range, dtypes)))
        _check_flag("strided", strided)
        _check_flag("mixed_dtypes", mixed_dtypes, open_too=False)
        _check_names("without", without, FEATURES, empty=True)
        return cls(tuple(dtypes), tuple(index_modes), mixed_dtypes, max_value, strided, FEATURES - frozenset(without))


@st.composite
def problems(
    draw: st.DrawFn,
    min_operands: int = 1,
    max_operands: int | None = None,
    *,
    max_axes: int = 6,
    max_size: int = 4,
    gathers: bool | None = None,
    dtypes: Sequence[str] = ("float32",),
    mixed_dtypes: bool = False,
    index_modes: Sequence[str] = ("raise",),
    without: Collection[str] = (),
    max_value: int = 3,
    strided: bool | None = None,
) -> Problem:
    """Draw problems of the whole language: specs, shapes, sizes, index arrays, dtypes, strides, gradient flags.

    At least half of many draws have 3 operands or more, if the bounds allow it, and at least half have an index array,
    unless `gathers` says otherwise.

    Example:
        >>> from hypothesis import find
        >>> problem = find(problems(2, 2, gathers=True, index_modes=("drop",)), lambda problem: True)
        >>> len(problem.shapes), problem.index_mode, "[" in problem.spec
        (2, 'drop', True)

    Args:
        draw: given by Hypothesis.
        min_operands: fewest operands.
        max_operands: most operands; None for 4, or `min_operands` if that is more.
        max_axes: most letters, at most 15; axes of an ellipsis (at most 2) and index arrays (at most 2) not counted.
        max_size: largest size of an axis; gathered dims go one beyond.
        gathers: whether there is an index array; None for both.
        dtypes: dtype names to choose from, one a problem.
        mixed_dtypes: choose a dtype for every operand by itself.
        index_modes: index modes to choose from.
        without: members of `FEATURES` to leave out.
        max_value: operands hold integers from -max_value to max_value.
        strided: whether operands are views that are not row-major; None for both.

    Returns:
        A strategy for problems.

    Raises:
        InvalidArgument: an argument is none of these.
    """
    if max_operands is None:
        max_operands = max(4, min_operands) if isinstance(min_operands, int) else 4
    _check_range("operands", min_operands, max_operands, 1)
    _check_range("axes", 1, max_axes, 1, _MOST_AXES)
    _check_range("size", 1, max_size, 1)
    _check_flag("gathers", gathers)
    choices = _Choices.checked(dtypes, index_modes, mixed_dtypes, max_value, strided, without)
    if gathers and not choices.features & {"gather", "scatter"}:
        raise InvalidArgument("gathers=True needs the feature 'gather' or 'scatter', but both are left out")
    mode = draw(st.sampled_from(choices.index_modes))
    written = _written(draw, min_operands, max_operands, max_axes, max_size, gathers, choices.features)
    return _filled(draw, written, mode, max_size, choices, {})


def specs(min_operands: int = 1, max_operands: int | None = None, **options: Any) -> st.SearchStrategy[str]:
    """Draw spec strings alone.

    Example:
        >>> from hypothesis import find
        >>> "aa" in find(specs(2, 2, gathers=False), lambda spec: "aa" in spec)
        True

    Args:
        min_operands: fewest operands.
        max_operands: most operands.
        **options: as for `problems`.

    Returns:
        A strategy for strings that `planner.contract` takes.

    Raises:
        InvalidArgument: an argument is none of these.
    """
    return problems(min_operands, max_operands, **options).map(lambda problem: problem.spec)


@st.composite
def problems_of(
    draw: st.DrawFn,
    spec: str,
    sizes: Mapping[str, int] | None = None,
    *,
    min_size: int = 0,
    max_size: int = 4,
    dtypes: Sequence[str] = ("float32",),
    mixed_dtypes: bool = False,
    index_modes: Sequence[str] = ("raise",),
    without: Collection[str] = (),
    max_value: int = 3,
    strided: bool | None = None,
) -> Problem:
    """Draw problems of one spec: shapes that fit it, index arrays, dtypes, strides and gradient flags.

    Example:
        >>> from hypothesis import find
        >>> problem = find(problems_of("nij, q[n]jk -> nik", {"j": 2, "q": 5}), lambda problem: True)
        >>> problem.shapes[1][:2]
        (5, 2)

    Args:
        draw: given by Hypothesis.
        spec: the spec.
        sizes: sizes that are not drawn: of axes, and by the letter of an index array of all dims that it indexes.
        min_size: smallest size of an axis that `sizes` does not give.
        max_size: largest size of an axis that `sizes` does not give.
        dtypes: as for `problems`, and so are the next five.
        mixed_dtypes: choose a dtype for every operand by itself.
        index_modes: index modes to choose from.
        without: members of `FEATURES` to leave out; those of the spec itself stay.
        max_value: operands hold integers from -max_value to max_value.
        strided: whether operands are views that are not row-major; None for both.

    Returns:
        A strategy for problems.

    Raises:
        InvalidArgument: an argument is none of these, or the spec is malformed.
    """
    _check_range("size", min_size, max_size, 0)
    choices = _Choices.checked(dtypes, index_modes, mixed_dtypes, max_value, strided, without)
    try:
        parsed = parse(spec)
    except PlannerError as error:
        raise InvalidArgument(str(error)) from None
    letters = axes_of(parsed)
    if sizes is not None and not isinstance(sizes, Mapping):
        raise InvalidArgument(f"sizes={sizes!r} is no mapping of letters to sizes")
    for letter, size in (sizes or {}).items():
        if letter not in (*letters, *parsed.arrays):
            raise InvalidArgument(f"sizes has {letter!r}, which {spec!r} has not")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidArgument(f"sizes has {size!r} for {letter!r}, which is no size")
    mode = draw(st.sampled_from(choices.index_modes))
    drawn = [n for n in (2, 3, 1, 2, 3, 4, 0) if min_size <= n <= max_size]
    lengths = st.sampled_from(drawn) if max_size <= 4 and drawn else st.integers(min_size, max_size)
    extents = {a: draw(lengths) for a in letters if a not in (sizes or {})}
    _tie(parsed, extents)
    extents |= {a: n for a, n in (sizes or {}).items() if a in letters}
    ellipsis: tuple[int, ...] = ()
    if any(e == ELLIPSIS or (isinstance(e, Gather) and ELLIPSIS in e.axes) for term in parsed.terms for e in term):
        ellipsis = tuple(draw(st.lists(lengths, max_size=2)))
    return _filled(
        draw, _read(draw, parsed, "->" in spec, extents, ellipsis), mode, max_size, choices,
        {name: (sizes or {}).get(name, draw(lengths)) for name in parsed.arrays}, spec,
    )  # fmt: skip


def axes_of(spec: Spec) -> list[str]:
    """All axes of a parsed spec, those in brackets too, ellipses not."""
    found = [e.axes if isinstance(e, Gather) else (e,) for term in spec.terms for e in term]
    return list(dict.fromkeys(a for axes in found for a in axes if a != ELLIPSIS))


def _tie(spec: Spec, extents: dict[str, int]) -> None:
    """Make axes that stand at the same place in brackets of one index array equally long."""
    first: dict[tuple[str, int], str] = {}
    for _ in spec.gathers:  # ties may follow from one another
        for gather in spec.gathers:
            for place, axis in enumerate(gather.axes):
                other = first.setdefault((gather.array, place), axis)
                if axis in extents and other in extents:
                    extents[axis] = extents[other] = min(extents[axis], extents[other])


def _read(
    draw: st.DrawFn, spec: Spec, has_output: bool, extents: dict[str, int], ellipsis: tuple[int, ...]
) -> _Written:
    """A parsed spec in the form in which specs are drawn."""

    def items(term: tuple[Any, ...]) -> list[Any]:
        return [
            (e.array, tuple(... if a == ELLIPSIS else a for a in e.axes)) if isinstance(e, Gather)
            else ... if e == ELLIPSIS else e
            for e in term
        ]  # fmt: skip

    terms = [items(term) for term in spec.inputs]
    ranks = [draw(st.integers(0, len(ellipsis))) if ... in term else 0 for term in terms]
    arrays = {}
    for name in spec.arrays:
        brackets = [
            g[1] for term in (*terms, items(spec.output)) for g in term if isinstance(g, tuple) and g[0] == name
        ]
        shape: list[int] = []
        for axis in brackets[0]:
            shape += ellipsis if axis is ... else [extents[axis]]
        arrays[name] = _Drawn(tuple(shape), brackets)
    return _Written(terms, items(spec.output) if has_output else None, arrays, extents, ellipsis, ranks)


def _written(
    draw: st.DrawFn,
    min_operands: int,
    max_operands: int,
    max_axes: int,
    max_size: int,
    gathers: bool | None,
    features: frozenset[str],
) -> _Written:
    """Draw a spec with the sizes of its axes."""

    def happens(feature: str, share: int, of: int = 8) -> bool:
        return feature in features and draw(_chance(share, of))

    counts = [n for n in range(min_operands, max_operands + 1) for _ in range(2 if n < 3 else 3)]
    fewer, more = [n for n in counts if n < 3], [n for n in counts if n >= 3]
    if fewer and more:
        counts = more if draw(_chance(6, 9)) else fewer
    number = draw(st.sampled_from(counts))
    if gathers is None:
        gathers = bool(features & {"gather", "scatter"}) and draw(_chance(6))

    letters = _AXES[: draw(st.integers(1, max_axes))]
    sizes = _sizes(max_size)
    extents: dict[str, int] = {a: draw(st.sampled_from(sizes)) for a in letters}
    if happens("size zero", 1, 12):
        extents[draw(st.sampled_from(letters))] = 0
    ellipsis = tuple(draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=2))) if happens("ellipsis", 2) else ()
    implicit = not gathers and happens("implicit", 3)

    terms: list[list[Any]] = [[] for _ in range(number)]
    for k in range(number):
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
            for place in _places(draw, number, features):
                target = output if place == number else terms[place]
                gather = (name, draw(st.sampled_from(array.brackets)))
                target.insert(draw(st.integers(0, len(target))), gather)
            arrays[name] = array

    ranks = [0] * number
    if ellipsis:
        full = draw(st.integers(0, number - 1))
        for k in range(number):
            if k == full or draw(_chance(4)):
                ranks[k] = len(ellipsis) if k == full else draw(st.integers(0, len(ellipsis)))
                terms[k].insert(draw(st.integers(0, len(terms[k]))), ...)
        if not implicit and draw(_chance(6)):
            output.insert(draw(st.integers(0, len(output))), ...)
    return _Written(terms, None if implicit else output, arrays, extents, ellipsis, ranks)


def _sizes(max_size: int) -> list[int]:
    """Sizes to choose from, the simplest first."""
    return [n for n in (2, 3, 1, 2, 3, 4, 2, 3, *range(5, max_size + 1)) if n <= max_size] or [1]


def _filled(
    draw: st.DrawFn,
    written: _Written,
    mode: str,
    max_size: int,
    choices: _Choices,
    pools: Mapping[str, int],
    text: str | None = None,
) -> Problem:
    """Draw everything else: shapes, sizes, index arrays, dtypes, strides and gradient flags.

    `pools` are sizes of indexed dims that are settled, `text` the spec as it was given.
    """
    terms, output, arrays, extents, ellipsis, ranks = written
    features, placed = choices.features, output or []

    def happens(feature: str, share: int, of: int = 8) -> bool:
        return feature in features and draw(_chance(share, of))

    # Index arrays first, since the dims they read must hold their indices.
    index_shapes = {}
    for name, array in arrays.items():
        distinct = all(len(set(b)) == len(b) for b in array.brackets)  # else dims of one bracket must agree
        index_shapes[name] = tuple(1 if distinct and happens("size one", 1, 12) else n for n in array.shape)
    dims: dict[str, list[int]] = {name: [] for name in arrays}

    def indexed_size(name: str) -> int:
        empty = 0 in index_shapes[name]
        least = 0 if "size zero" in features and (empty or mode == "drop") and draw(_chance(1)) else 1
        size = least and draw(st.sampled_from([*_sizes(max_size), max_size + 1]))
        size = pools.get(name, size)
        if size == 0 and not empty and mode != "drop":
            reject()  # no index is in range
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
    told |= {a for term in (*terms, placed) for g in term if isinstance(g, tuple) for a in g[1]}
    given: dict[str, int] = {a: extents[a] for a in placed if isinstance(a, str) and a not in told}
    for name in {item[0]: None for item in placed if isinstance(item, tuple)}:
        if len(set(dims[name])) != 1 or draw(_chance(2)):
            given[name] = indexed_size(name)

    drawn = {}
    for name in arrays:
        kinds = ("int64", "int32", "int16", "int8", "uint8", "uint32") if "index dtypes" in features else ("int64",)
        drawn[name] = draw(
            indices(
                min(dims[name]),
                index_shapes[name],
                index_mode=mode,
                negative="negative" in features,
                dtypes=("int64", "int64", *kinds),
                max_size=max(dims[name]),
            )
        )

    if choices.mixed_dtypes:
        kinds_drawn = tuple(draw(st.sampled_from(choices.dtypes)) for _ in terms)
    else:
        kinds_drawn = (draw(st.sampled_from(choices.dtypes)),) * len(terms)
    spec = _write(terms, output) if text is None else text
    if text is not None:  # a spec that was not drawn may want more of its sizes than was thought of
        try:
            resolve(spec, *shapes, sizes=given or None, **{name: q.shape for name, q in drawn.items()})
        except PlannerError:
            reject()
    problem = Problem(
        spec=spec,
        shapes=tuple(shapes),
        sizes=given or None,
        indices=drawn,
        index_mode=mode,
        dtypes=kinds_drawn,
        requires_grad=tuple(d in FLOATS and not draw(_chance(2)) for d in kinds_drawn),
        seed=draw(st.integers(0, 999)),
        max_value=choices.max_value,
        strided=draw(st.booleans()) if choices.strided is None else choices.strided,
    )
    if output is not None and happens("sizes tuple", 1, 6):
        object.__setattr__(problem, "sizes", problem.output_shape())
    return problem


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


# `from_type` finds them: the entry point of the package imports this module when Hypothesis is imported.
st.register_type_strategy(Problem, problems())
st.register_type_strategy(Spec, problems().map(Problem.resolved))
