"""Specs as `problems` draws them: lists of axes with their sizes, before they are written as text.

Letters and their sizes are drawn first, then the axes of every term, then the index arrays and the places that they
read or add into, and last the ellipses. A caller's spec is read into the same form.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import strategies as st

from planner.language.spec import ELLIPSIS, Spec, gather_of, term_axes
from planner.testing.strategy_tools import chance, is_drawn, sampled

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
        "odd axes",  # axes that are not letters, or letters that look alike
    }
)

_AXES = "abcdefghijklmno"
# Unicode's spaces, digits, marks and line ends, characters with a meaning in regular expressions, in Python or in C,
# and pairs that NFKC would unify. Each of them is an axis, and no two are the same axis.
_ODD_AXES = "×\u00b5\u03bcK\u212a\u00a0\u0663²_\u0301ﬁ\u2028\0+\u3000*𝒜\u200b\x1f'\\({$\u0085→"
_INDEX_ARRAYS = "qp"
MOST_AXES = len(_AXES)


@dataclass(frozen=True)
class DrawnArray:
    """An index array before its values: its shape and the brackets that suit it."""

    shape: tuple[int, ...]
    brackets: list[tuple[Any, ...]]


class Written(NamedTuple):
    """A drawn spec: its terms are lists of letters, of (index array, bracket) pairs and of `...`; and its sizes.

    `ranks` says how many of the ellipsis's axes each operand has. `output` is None if the spec does not write it.
    """

    terms: list[list[Any]]
    output: list[Any] | None
    arrays: dict[str, DrawnArray]
    extents: dict[str, int]
    ellipsis: tuple[int, ...]
    ranks: list[int]


def axes_of(spec: Spec) -> list[str]:
    """Return all axes of a parsed spec, including those in brackets, without ellipses."""
    return [axis for axis in term_axes(tuple(entry for term in spec.terms for entry in term)) if axis != ELLIPSIS]


def wrong_sizes(text: str, spec: Spec, sizes: Any) -> str:
    """Return what is wrong with sizes by letter for a spec and its text; "" if nothing is."""
    if sizes is not None and not isinstance(sizes, Mapping):
        return f"sizes={sizes!r:.80} is not a mapping of letters to sizes"
    known = (*axes_of(spec), *spec.arrays)
    for letter, size in (sizes or {}).items():
        if letter not in known:
            return f"sizes= has {letter!r:.80}, which {text!r:.80} does not have"
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            return f"sizes= has {size!r:.80} for {letter!r}, which is not a size"
    return ""


def tie(spec: Spec, extents: dict[str, int]) -> None:
    """Give axes equal sizes if they stand at the same place in brackets of one index array."""
    first: dict[tuple[str, int], str] = {}
    for _ in spec.gathers:  # ties may follow from one another
        for gather in spec.gathers:
            for place, axis in enumerate(gather.axes):
                other = first.setdefault((gather.array, place), axis)
                if axis in extents and other in extents:
                    extents[axis] = extents[other] = min(extents[axis], extents[other])


def read_spec(
    draw: st.DrawFn, spec: Spec, has_output: bool, extents: dict[str, int], ellipsis: tuple[int, ...]
) -> Written:
    """Return a parsed spec in the form in which specs are drawn."""

    def item(entry: Any) -> Any:
        if gather := gather_of(entry):
            return gather.array, tuple(... if axis == ELLIPSIS else axis for axis in gather.axes)
        return ... if entry == ELLIPSIS else entry

    def items(term: tuple[Any, ...]) -> list[Any]:
        return [item(entry) for entry in term]

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
        arrays[name] = DrawnArray(tuple(shape), brackets)
    return Written(terms, items(spec.output) if has_output else None, arrays, extents, ellipsis, ranks)


def drawn_spec(
    draw: st.DrawFn,
    min_operands: int,
    max_operands: int,
    max_axes: int,
    max_size: int,
    gathers: bool | None,
    features: frozenset[str],
) -> Written:
    """Draw a spec with the sizes of its axes."""
    happens = functools.partial(is_drawn, draw, features)
    counts = [n for n in range(min_operands, max_operands + 1) for _ in range(2 if n < 3 else 3)]
    fewer, more = [n for n in counts if n < 3], [n for n in counts if n >= 3]
    if fewer and more:
        counts = more if draw(chance(6, 9)) else fewer
    number = draw(sampled(*counts))
    if gathers is None:
        gathers = bool(features & {"gather", "scatter"}) and draw(chance(6))

    letters = _AXES[: draw(st.integers(1, max_axes))]
    if happens("odd axes", 1):
        first = draw(st.integers(0, len(_ODD_AXES) - 1))
        letters = (_ODD_AXES[first:] + _ODD_AXES)[: len(letters)]
    sizes = sizes_to_choose(max_size)
    extents: dict[str, int] = {a: draw(sampled(*sizes)) for a in letters}
    if happens("size zero", 1, 12):
        extents[draw(sampled(*letters))] = 0
    ellipsis = tuple(draw(st.lists(sampled(*sizes), min_size=1, max_size=2))) if happens("ellipsis", 2) else ()
    implicit = not gathers and happens("implicit", 3)

    terms: list[list[Any]] = [[] for _ in range(number)]
    for k in range(number):
        fewest = 0 if "scalar" in features and draw(chance(1)) else 1
        chosen = draw(st.lists(sampled(*letters), min_size=fewest, max_size=3, unique=True))
        if chosen and happens("repeated", 1):
            chosen.insert(draw(st.integers(0, len(chosen))), draw(sampled(*chosen)))
        if k and draw(chance(1)):
            chosen = draw(st.permutations(terms[draw(st.integers(0, k - 1))]))
        terms[k] = list(chosen)
    output: list[Any] = []
    if not implicit:
        carried = sorted({a for term in terms for a in term})
        if carried:
            output = list(draw(st.lists(sampled(*carried), max_size=3, unique=True)))
        if output and happens("repeated output", 1):
            output.insert(draw(st.integers(0, len(output))), draw(sampled(*output)))
        if draw(chance(1)):
            output = list(terms[draw(st.integers(0, number - 1))])
            output = output if "repeated output" in features else list(dict.fromkeys(output))
        fresh = [a for a in letters if a not in carried]
        if fresh and happens("broadcast output", 2):
            output.insert(draw(st.integers(0, len(output))), draw(sampled(*fresh)))

    arrays: dict[str, DrawnArray] = {}
    if gathers:
        names = _INDEX_ARRAYS[: 2 if draw(chance(3)) else 1]
        for name in names:
            array = draw(_drawn_array(letters, extents, ellipsis, features))
            for place in _places(draw, number, features):
                target = output if place == number else terms[place]
                gather = (name, draw(sampled(*array.brackets)))
                target.insert(draw(st.integers(0, len(target))), gather)
            arrays[name] = array

    ranks = [0] * number
    if ellipsis:
        full = draw(st.integers(0, number - 1))
        for k in range(number):
            if k == full or draw(chance(4)):
                ranks[k] = len(ellipsis) if k == full else draw(st.integers(0, len(ellipsis)))
                terms[k].insert(draw(st.integers(0, len(terms[k]))), ...)
        if not implicit and draw(chance(6)):
            output.insert(draw(st.integers(0, len(output))), ...)
    return Written(terms, None if implicit else output, arrays, extents, ellipsis, ranks)


def sizes_to_choose(max_size: int) -> list[int]:
    """Return sizes to choose from, the simplest first."""
    return [n for n in (2, 3, 1, 2, 3, 4, 2, 3, *range(5, max_size + 1)) if n <= max_size] or [1]


@st.composite
def _drawn_array(
    draw: st.DrawFn,
    letters: str,
    extents: dict[Any, int],
    ellipsis: tuple[int, ...],
    features: frozenset[str],
) -> DrawnArray:
    fewest = 0 if "scalar" in features and draw(chance(1)) else 1
    distinct = "repeated" not in features or not draw(chance(1, 10))
    axes = st.lists(sampled(*letters), min_size=fewest, max_size=2, unique=distinct)
    bracket: tuple[Any, ...] = tuple(draw(axes))
    shape = tuple(extents[a] for a in bracket)
    brackets = [bracket] * 3
    alike = tuple(draw(sampled(*[b for b in letters if extents[b] == extents[a]])) for a in bracket)
    brackets.append(alike)
    if bool(ellipsis) and draw(chance(3)):
        place = draw(st.integers(0, len(bracket)))
        tail = ellipsis[len(ellipsis) - draw(st.integers(0, len(ellipsis))) :]
        shape = (*shape[:place], *tail, *shape[place:])
        brackets = [(*b[:place], ..., *b[place:]) for b in brackets]
    return DrawnArray(shape, brackets)


def _places(draw: st.DrawFn, operands: int, features: frozenset[str]) -> list[int]:
    """Draw which terms an index array indexes, at least one; the output has the number `operands`."""
    places = []
    if "gather" in features:
        places = draw(st.lists(st.integers(0, operands - 1), min_size=1, max_size=2))
    if "scatter" in features and (not places or draw(chance(3))):
        reads_too = draw(chance(4))
        places = [*(places if reads_too else []), operands]
    return places


def text_of(terms: list[list[Any]], output: list[Any] | None) -> str:
    """Write a drawn spec as text."""

    def text(item: Any) -> str:
        if item is ...:
            return "..."
        return item if len(item) == 1 else f" {item[0]}[{''.join(map(text, item[1]))}] "

    left = ", ".join("".join(map(text, term)).strip(" ") for term in terms)
    return left if output is None else f"{left} -> {''.join(map(text, output)).strip(' ')}"
