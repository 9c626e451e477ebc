"""Hypothesis strategies: random contractions of the whole language, with all arguments of a call.

A problem's axes are drawn first (`drawn_specs`), then its shapes, index arrays and dtypes. The first alternative of
each choice is the simple one, so problems shrink to few operands, few axes, no gathers, row-major float32 and small
values.

All strategies check their arguments when they are first drawn from, as Hypothesis's own do, and raise its
``InvalidArgument``. If the package is installed, Hypothesis knows ``from_type(Problem)`` and
``from_type(planner.Spec)``.

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

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from planner.language.errors import PlannerError
from planner.language.options import INDEX_MODES
from planner.language.parse import parse
from planner.language.resolve import resolve
from planner.language.spec import ELLIPSIS, Spec, plain_axes, term_axes
from planner.testing.array_strategies import indices, operands
from planner.testing.drawn_specs import (
    FEATURES,
    MOST_AXES,
    Written,
    axes_of,
    drawn_spec,
    read_spec,
    sizes_to_choose,
    text_of,
    tie,
    wrong_sizes,
)
from planner.testing.problem import DTYPES, FLOATS, Problem
from planner.testing.reference import exact_range
from planner.testing.strategy_tools import chance, check_flag, check_names, check_range, is_drawn, sampled

__all__ = ["FEATURES", "indices", "operands", "problems", "problems_of", "specs"]


class _Choices(NamedTuple):
    """The options that `problems` and `problems_of` share: what a problem's arrays may be."""

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
        check_names("dtypes", dtypes, DTYPES)
        check_names("index_modes", index_modes, INDEX_MODES)
        check_range("value", 0, max_value, 0, min(map(exact_range, dtypes)))
        check_flag("strided", strided)
        check_flag("mixed_dtypes", mixed_dtypes, open_too=False)
        check_names("without", without, FEATURES, empty=True)
        if tuple(index_modes) == ("nan",) and not set(dtypes) & set(FLOATS):
            raise InvalidArgument("index_modes=('nan',) needs a dtype that has NaN, but all are of integers")
        return cls(tuple(dtypes), tuple(index_modes), mixed_dtypes, max_value, strided, FEATURES - frozenset(without))

    @property
    def modes(self) -> list[str]:
        """The index modes to choose from; integers have no NaN."""
        return [mode for mode in self.index_modes if mode != "nan" or set(self.dtypes) & set(FLOATS)]

    def dtypes_of(self, mode: str) -> list[str]:
        """The dtypes of which at least one operand has one under an index mode."""
        return [dtype for dtype in self.dtypes if mode != "nan" or dtype in FLOATS]


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

    Over many draws, at least half have 3 operands or more, if the bounds allow it, and at least half have an index
    array, unless `gathers` says otherwise.

    Example:
        >>> from hypothesis import find
        >>> problem = find(problems(2, 2, gathers=True, index_modes=("drop",)), lambda problem: True)
        >>> len(problem.shapes), problem.index_mode, "[" in problem.spec
        (2, 'drop', True)

    Args:
        draw: given by Hypothesis.
        min_operands: fewest operands.
        max_operands: most operands; None for 4, or `min_operands` if that is more.
        max_axes: most letters, at most 15; the axes of an ellipsis and the index arrays, at most 2 each, do not count.
        max_size: largest size of an axis; gathered dimensions may be larger by one.
        gathers: whether there is an index array; None to draw either.
        dtypes: dtype names to choose from, one per problem.
        mixed_dtypes: choose a dtype for each operand.
        index_modes: index modes to choose from.
        without: members of `FEATURES` to leave out.
        max_value: operands hold integers from -max_value to max_value.
        strided: whether operands are views that are not row-major; None to draw either.

    Returns:
        A strategy for problems.

    Raises:
        InvalidArgument: an argument is not as described.
    """
    if max_operands is None:
        max_operands = max(4, min_operands) if isinstance(min_operands, int) else 4
    check_range("operands", min_operands, max_operands, 1)
    check_range("axes", 1, max_axes, 1, MOST_AXES)
    check_range("size", 1, max_size, 1)
    check_flag("gathers", gathers)
    choices = _Choices.checked(dtypes, index_modes, mixed_dtypes, max_value, strided, without)
    if gathers and not choices.features & {"gather", "scatter"}:
        raise InvalidArgument("gathers=True needs the feature 'gather' or 'scatter', but both are left out")
    mode = draw(sampled(*choices.modes))
    written = drawn_spec(draw, min_operands, max_operands, max_axes, max_size, gathers, choices.features)
    return _fill(draw, written, mode, max_size, choices, {})


def specs(min_operands: int = 1, max_operands: int | None = None, **options: Any) -> st.SearchStrategy[str]:
    """Draw spec strings alone.

    Example:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=5, database=None)
        ... @given(specs(2, 2))
        ... def test_two_inputs(spec):
        ...     assert spec.count(",") == 1  # such as "nij, q[n]jk -> nik"
        >>> test_two_inputs()

    Args:
        min_operands: fewest operands.
        max_operands: most operands.
        **options: as for `problems`.

    Returns:
        A strategy for strings that `planner.contract` takes.

    Raises:
        InvalidArgument: an argument is not as described.
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
        sizes: fixed sizes: of axes by letter, and of indexed dimensions by the letter of the index array.
        min_size: smallest size of an axis that `sizes` does not give.
        max_size: largest size of an axis that `sizes` does not give.
        dtypes: dtype names to choose from, one per problem.
        mixed_dtypes: choose a dtype for each operand.
        index_modes: index modes to choose from.
        without: members of `FEATURES` to leave out; features of the spec itself stay.
        max_value: operands hold integers from -max_value to max_value.
        strided: whether operands are views that are not row-major; None to draw either.

    Returns:
        A strategy for problems.

    Raises:
        InvalidArgument: an argument is not as described, or the spec is malformed.
    """
    check_range("size", min_size, max_size, 0)
    choices = _Choices.checked(dtypes, index_modes, mixed_dtypes, max_value, strided, without)
    try:
        parsed = parse(spec)
    except PlannerError as error:
        raise InvalidArgument(str(error)) from None
    if wrong := wrong_sizes(spec, parsed, sizes):
        raise InvalidArgument(wrong)
    letters = axes_of(parsed)
    mode = draw(sampled(*choices.modes))
    drawn = [n for n in (2, 3, 1, 2, 3, 4, 0) if min_size <= n <= max_size]
    lengths = sampled(*drawn) if max_size <= 4 and drawn else st.integers(min_size, max_size)
    extents = {a: draw(lengths) for a in letters if a not in (sizes or {})}
    tie(parsed, extents)
    extents |= {a: n for a, n in (sizes or {}).items() if a in letters}
    ellipsis: tuple[int, ...] = ()
    if any(ELLIPSIS in term_axes(term) for term in parsed.terms):
        ellipsis = tuple(draw(st.lists(lengths, max_size=2)))
    written = read_spec(draw, parsed, "->" in spec, extents, ellipsis)
    pools = {name: (sizes or {}).get(name, draw(lengths)) for name in parsed.arrays}
    return _fill(draw, written, mode, max_size, choices, pools, spec)


def _fill(
    draw: st.DrawFn,
    written: Written,
    mode: str,
    max_size: int,
    choices: _Choices,
    pools: Mapping[str, int],
    text: str | None = None,
) -> Problem:
    """Draw everything beside the spec: shapes, sizes, index arrays, dtypes, strides and gradient flags.

    `pools` are fixed sizes of indexed dimensions by index array. `text` is the spec as the caller gave it.
    """
    terms, output, arrays, extents, ellipsis, ranks = written
    features, placed = choices.features, output or []
    happens = functools.partial(is_drawn, draw, features)

    # Index arrays come first, because the dimensions that they index must hold their indices.
    index_shapes = {}
    for name, array in arrays.items():
        distinct = all(len(set(b)) == len(b) for b in array.brackets)  # else the dimensions of one bracket must agree
        index_shapes[name] = tuple(1 if distinct and happens("size one", 1, 12) else n for n in array.shape)
    dims: dict[str, list[int]] = {name: [] for name in arrays}

    def indexed_size(name: str) -> int:
        empty = 0 in index_shapes[name]
        least = 0 if "size zero" in features and (empty or mode in ("drop", "nan")) and draw(chance(1)) else 1
        size = least and draw(sampled(*sizes_to_choose(max_size), max_size + 1))
        size = pools.get(name, size)
        if size == 0 and not empty and mode not in ("drop", "nan"):
            reject()  # no index is in range
        dims[name].append(size)
        return size

    shapes = []
    for term, rank in zip(terms, ranks, strict=True):
        ones = {a for a in dict.fromkeys(plain_axes(term)) if happens("size one", 1, 12)}
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

    # Sizes that no input determines; and sometimes sizes that one does.
    determined = {a for term in terms for a in plain_axes(term)}
    determined |= {a for term in (*terms, placed) for g in term if isinstance(g, tuple) for a in g[1]}
    sizes: dict[str, int] = {a: extents[a] for a in plain_axes(placed) if a not in determined}
    for name in {item[0]: None for item in placed if isinstance(item, tuple)}:
        if len(set(dims[name])) != 1 or draw(chance(2)):
            sizes[name] = indexed_size(name)

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
        first = draw(sampled(*choices.dtypes_of(mode)))
        kinds_drawn = (first, *(draw(sampled(*choices.dtypes)) for _ in terms[1:]))
    else:
        kinds_drawn = (draw(sampled(*choices.dtypes_of(mode))),) * len(terms)
    spec = text_of(terms, output) if text is None else text
    if text is not None:  # a caller's spec may constrain its sizes in more ways than are drawn
        try:
            resolve(spec, *shapes, sizes=sizes or None, **{name: q.shape for name, q in drawn.items()})
        except PlannerError:
            reject()
    problem = Problem(
        spec=spec,
        shapes=tuple(shapes),
        sizes=sizes or None,
        indices=drawn,
        index_mode=mode,
        dtypes=kinds_drawn,
        requires_grad=tuple(d in FLOATS and not draw(chance(2)) for d in kinds_drawn),
        seed=draw(st.integers(0, 999)),
        max_value=choices.max_value,
        strided=draw(st.booleans()) if choices.strided is None else choices.strided,
    )
    if output is not None and happens("sizes tuple", 1, 6):
        object.__setattr__(problem, "sizes", problem.output_shape())
    return problem


# For `from_type`: the package's entry point imports this module when Hypothesis is imported.
st.register_type_strategy(Problem, problems())
st.register_type_strategy(Spec, problems().map(Problem.resolved))
