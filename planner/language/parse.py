"""Parse a string, or numpy's sublist form, into a `Spec`. No module after this one looks at strings again."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from planner.language.errors import PlannerTypeError, SpecError
from planner.language.spec import ELLIPSIS, WHITESPACE, Gather, Spec, Term, is_axis, is_letter, unused_letters

# A list of these numbers is not a list of operands.
NUMBERS = (int, float, complex, np.integer)


def parse(text: str) -> Spec:
    """Parse a spec such as ``"nij, q[n]jk -> nik"``.

    Example:
        >>> from planner.language.parse import parse
        >>> parse("ij,jk").output
        ('i', 'k')

    Args:
        text: terms separated by commas, and optionally ``->`` and the output's term.

    Returns:
        The unresolved spec. If the output is implicit, numpy's rule fills it in.

    Raises:
        PlannerTypeError: the text is not a string.
        SpecError: the text is malformed. The message shows the place.
    """
    if not isinstance(text, str):
        raise PlannerTypeError(f"the spec must be a string, not {type(text).__name__}; an example is 'ij, jk -> ik'")
    return _parsed(text)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Spec:
    terms, has_output = _Parser(text).terms()
    inputs = tuple(terms[:-1] if has_output else terms)
    output = terms[-1] if has_output else _implicit_output(inputs, text)
    spec = Spec(inputs, output)
    _check_letters(spec, text)
    return spec


class _Parser:
    """Reads the characters once. `position` is the place that an error points at."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def fail(self, message: str, position: int | None = None) -> SpecError:
        return SpecError(message, self.text, self.position if position is None else position)

    def peek(self) -> str:
        while self.position < len(self.text) and self.text[self.position] in WHITESPACE:
            self.position += 1
        return self.text[self.position] if self.position < len(self.text) else ""

    def terms(self) -> tuple[list[Term], bool]:
        terms, has_output = [self.term()], False
        while next_character := self.peek():
            if next_character == "," and not has_output:
                self.position += 1
            elif self.text.startswith("->", self.position) and not has_output:
                self.position += 2
                has_output = True
            elif next_character in ",-" and has_output:
                raise self.fail("a spec has one output term: remove what follows it")
            else:
                raise self.fail("'-' must be followed by '>': write '->' before the output")
            terms.append(self.term())
        return terms, has_output

    def term(self) -> Term:
        """Read a term, up to a comma, an arrow or the end."""
        entries: list[str | Gather] = []
        while (character := self.peek()) and character not in ",-":
            if character == ".":
                self.ellipsis(entries)
            elif is_axis(character):
                start = self.position
                self.position += 1
                entries.append(self.gather(character, start) if self.peek() == "[" else character)
            else:
                raise self.fail(self.reason(character))
        return tuple(entries)

    def ellipsis(self, entries: Sequence[Any]) -> None:
        if not self.text.startswith(ELLIPSIS, self.position):
            raise self.fail("an ellipsis is three dots: '...'")
        if ELLIPSIS in entries:
            raise self.fail("a term or bracket holds at most one '...'")
        self.position += 3
        entries.append(ELLIPSIS)  # type: ignore[attr-defined]

    def gather(self, array: str, start: int) -> Gather:
        if not is_letter(array):
            raise self.fail(_no_array(array), start)
        opened = self.position
        self.position += 1
        axes: list[str] = []
        while (character := self.peek()) != "]":
            if not character or character in ",-":
                raise self.fail("this bracket is never closed: add ']'", opened)
            if character == ".":
                self.ellipsis(axes)
            elif is_axis(character):
                self.position += 1
                if self.peek() == "[":
                    raise self.fail("a bracket may hold only axes; to index an index array, do it before the call")
                axes.append(character)
            else:
                raise self.fail(self.reason(character, "inside a bracket, "))
        self.position += 1
        return Gather(array, tuple(axes))

    def reason(self, character: str, where: str = "") -> str:
        if character == "[":
            return "a bracket needs the letter of its index array before it, as in 'q[n]'"
        if character == "]":
            return "this ']' has no '[' before it"
        if character == ">":
            return "'>' must follow '-': write '->' before the output"
        return (
            f"{where}{character!r} cannot name an axis: an axis is one character other than ASCII whitespace, "
            "ASCII digits and , - > . [ ]"
        )


def _no_array(character: str) -> str:
    """Return why a character before a bracket cannot name an index array."""
    normal = unicodedata.normalize("NFKC", character)
    if normal != character and character.isidentifier():
        return (
            f"{character!r} cannot name an index array: index arrays are keyword arguments, and Python reads this one "
            f"as {normal!r} (NFKC normalisation); take another letter"
        )
    return (
        f"{character!r} cannot name an index array: index arrays are keyword arguments, so their names are single "
        "letters, as in 'q[n]'"
    )


def _implicit_output(inputs: tuple[Term, ...], text: str) -> Term:
    """Return the output by numpy's rule: the ellipsis, then the axes that appear exactly once, sorted."""
    counts: dict[str, int] = {}
    for term in inputs:
        for entry in term:
            if isinstance(entry, Gather):
                raise SpecError("with a gather the output must be written: add '->' and its term", text, len(text))
            counts[entry] = counts.get(entry, 0) + 1
    dots = (ELLIPSIS,) if counts.pop(ELLIPSIS, 0) else ()
    return (*dots, *sorted(axis for axis, count in counts.items() if count == 1))


def _check_letters(spec: Spec, text: str) -> None:
    """Raise an error if a letter names both an axis and an index array."""
    arrays = set(spec.arrays)
    if not arrays:
        return
    for term in spec.terms:
        for entry in term:
            for axis in entry.axes if isinstance(entry, Gather) else (entry,):
                if axis in arrays:
                    position = re.search(rf"{re.escape(axis)}[{WHITESPACE}]*+(?!\[)", text)
                    raise SpecError(
                        f"{axis!r} names an index array elsewhere, so it cannot name an axis: take another letter",
                        text,
                        position.start() if position else None,
                    )


def _label_list(sublist: Any) -> Any:
    """Return an array of integer labels as a list, and anything else unchanged."""
    labels = isinstance(sublist, np.ndarray) and sublist.ndim == 1 and sublist.dtype.kind in "iu"
    return sublist.tolist() if labels else sublist


def parse_sublists(arguments: Sequence[Any]) -> tuple[Spec, tuple[Any, ...], dict[Any, str]]:
    """Parse numpy's sublist form: ``a, [0, 1], b, [1, 2], [0, 2]``.

    Args:
        arguments: operands, each followed by its list of labels, and optionally the output's list. Labels must be
            hashable and sortable; `Ellipsis` is allowed. A tuple, a range or a NumPy array of integers is a list too.

    Returns:
        The unresolved spec, the operands, and the letter of each label.

    Raises:
        PlannerTypeError: the arguments do not alternate, or labels cannot be sorted.
        SpecError: a list holds two ellipses.
    """
    paired = len(arguments) - len(arguments) % 2
    operands = tuple(arguments[0:paired:2])
    sublists = [*arguments[1::2], *arguments[paired:]]
    sublists = [_label_list(sublist) for sublist in sublists]
    for number, sublist in enumerate(sublists):
        if not isinstance(sublist, (list, tuple, range)):
            raise PlannerTypeError(
                f"sublist form: argument {2 * number + 1} must be a list of labels, "
                f"not {type(sublist).__name__}; write contract(a, [0, 1], b, [1, 2], [0, 2])"
            )
    try:
        labels = {label for sublist in sublists for label in sublist if label is not Ellipsis}
        ordered = sorted(labels)
    except TypeError as error:
        raise PlannerTypeError(f"sublist form: labels must be hashable and of one sortable type ({error})") from None
    letters = sorted(unused_letters((), len(ordered)))
    names = dict(zip(ordered, letters, strict=True))

    def term(sublist: Sequence[Any]) -> Term:
        if sum(label is Ellipsis for label in sublist) > 1:
            raise SpecError("sublist form: a list holds at most one Ellipsis")
        return tuple(ELLIPSIS if label is Ellipsis else names[label] for label in sublist)

    inputs = tuple(term(sublist) for sublist in sublists[: len(operands)])
    if len(sublists) > len(operands):
        return Spec(inputs, term(sublists[-1])), operands, names
    return Spec(inputs, _implicit_output(inputs, "")), operands, names


def unpack_operands(spec: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the operands of a call. As in `torch.einsum`, they may come as one list or tuple.

    A list or tuple of numbers is not a list of operands. A list of integers is a shape.
    """
    if len(operands) != 1 or not isinstance(spec, (str, Spec)) or not isinstance(operands[0], (list, tuple)):
        return operands
    (entries,) = operands
    return operands if all(isinstance(entry, NUMBERS) for entry in entries) else tuple(entries)
