"""Every error that the library raises on purpose. All are subclasses of `PlannerError`.

Each error is also of the class that Python itself raises for such a fault: a bad value is a `ValueError`, an index out
of range is an `IndexError`, an argument of a wrong type is a `TypeError`.
"""

from __future__ import annotations

from typing import Self


class PlannerError(ValueError):
    """Base class of all errors of this library. It is raised itself for bad options and mixed frameworks.

    Example:
        >>> import planner
        >>> try:
        ...     planner.plan("ij -> i", (3, 4), index_mode="wrap")
        ... except planner.PlannerError as error:
        ...     print(error)
        index_mode='wrap' is unknown: take one of 'raise', 'drop', 'clip', 'nan'
    """


class SpecError(PlannerError):
    """The spec is malformed. The message shows it with a caret under the place.

    Example:
        >>> import planner
        >>> try:
        ...     planner.resolve("ij, j[ -> i", (3, 4), (4,))
        ... except planner.SpecError as error:
        ...     print(error)
        this bracket is never closed: add ']'
            ij, j[ -> i
                 ^
    """

    def __init__(self, message: str, spec: str = "", position: int | None = None) -> None:
        self.spec, self.position = spec, position
        if position is not None:
            # Show a window around the place only: a spec may have 10^5 characters.
            start = max(0, position - 60)
            # Show invisible characters such as tabs and line breaks as spaces, so that each takes one column.
            window = "".join(c if c.isprintable() else " " for c in spec[start : position + 60])
            message = f"{message}\n    {window}\n    {' ' * (position - start)}^"
        super().__init__(message)


class PlannerTypeError(SpecError, TypeError):
    """An argument has a wrong type or dtype, or a keyword is neither an option nor an index array.

    Example:
        >>> import planner
        >>> try:
        ...     planner.plan("ij -> i", (3, 4), colour="red")
        ... except planner.PlannerTypeError as error:
        ...     print(error)
        'colour' is not an option, and the name of an index array is one letter: options are ...
    """


class ShapeError(PlannerError):
    """The shapes of the operands or index arrays do not fit the spec or each other.

    Example:
        >>> import planner
        >>> try:
        ...     planner.resolve("ij, j -> i", (3, 4), (5,))
        ... except planner.ShapeError as error:
        ...     print(error)
        axis 'j' has size 4 in operand 0 but 5 in operand 1
    """


class IndexRangeError(PlannerError, IndexError):
    """An index array holds a value outside of the dimension that it indexes.

    Example:
        >>> import numpy as np
        >>> import planner
        >>> try:
        ...     planner.contract("q[n] -> n", np.ones(4), q=np.array([0, 4]))
        ... except planner.IndexRangeError as error:
        ...     print(error)
        index array 'q'[1] is 4, outside of [-4, 4), the range of the dimension q[n]; ...
    """


class PlannerLimitError(PlannerError):
    """No plan is within the limits. The message names limits that would succeed.

    Example:
        >>> import planner
        >>> try:
        ...     planner.plan("ij, jk -> ik", (30, 40), (40, 50), backend="numpy", memory_limit=1000)
        ... except planner.PlannerLimitError as error:
        ...     print(error.memory_limit)
        6000

    Attributes:
        memory_limit, retain_limit: limits in bytes that succeed if they are set together; None for no limit.
        why: how the message begins: what was not found, and whether the deadline ended the search.
    """

    def __init__(self, message: str, memory_limit: int | None = None, retain_limit: int | None = None) -> None:
        self.memory_limit, self.retain_limit, self.why = memory_limit, retain_limit, ""
        super().__init__(message)

    @classmethod
    def naming(cls, why: str, asked: tuple[int | None, int | None], enough: tuple[int | None, int | None]) -> Self:
        """Return the error that says which limits cannot be met and which can; each a memory and a retain limit."""

        def text(limits: tuple[int | None, int | None]) -> str:
            named = zip(("memory_limit", "retain_limit"), limits, strict=True)
            return " with ".join(f"{name}={limit}" for name, limit in named if limit is not None)

        error = cls(f"{why} within {text(asked)}; {text(enough)} succeeds", *enough)
        error.why = why
        return error


class SearchLimitError(PlannerError):
    """The problem is too large for any search, or too large to address.

    Example:
        >>> import planner
        >>> try:
        ...     planner.plan("i, j -> ij", (2**40,), (2**40,), backend="numpy")
        ... except planner.SearchLimitError as error:
        ...     print(error)
        the result would have more than 2^62 elements; the sizes must be wrong
    """


def refusal_of(found: object) -> str | None:
    """Return what a function gave if it is a refusal in words, and None if it is what was asked for."""
    return found if isinstance(found, str) else None
