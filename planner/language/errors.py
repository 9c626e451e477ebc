"""Every error the library raises on purpose, all of them `PlannerError`.

The classes that Python users already catch for the same fault are bases too: a bad value is a `ValueError`, an index
out of range an `IndexError`, an argument of a type that its place does not take a `TypeError`.
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "IndexRangeError",
    "PlannerError",
    "PlannerLimitError",
    "PlannerTypeError",
    "SearchLimitError",
    "ShapeError",
    "SpecError",
]


class PlannerError(ValueError):
    """Base of all errors of this library; raised itself for bad options, dtypes and mixed frameworks."""


class SpecError(PlannerError):
    """The spec string is malformed; the message shows it with a caret under the place."""

    def __init__(self, message: str, spec: str = "", position: int | None = None) -> None:
        self.spec, self.position = spec, position
        if position is not None:
            # A window around the place, so that a spec of 10^5 characters stays readable.
            start = max(0, position - 60)
            # One column for each character: a tab, a line break or another invisible character shows as a space.
            window = "".join(c if c.isprintable() else " " for c in spec[start : position + 60])
            message = f"{message}\n    {window}\n    {' ' * (position - start)}^"
        super().__init__(message)


class PlannerTypeError(SpecError, TypeError):
    """An argument has a type or dtype that its place does not take, or a keyword is neither option nor index array."""


class ShapeError(PlannerError):
    """The operands' or index arrays' shapes do not fit the spec or each other."""


class IndexRangeError(PlannerError, IndexError):
    """An index array holds a value outside of the dimension that it reads or adds into."""


class PlannerLimitError(PlannerError):
    """No plan satisfies the given limits; the message names a value that would succeed.

    Attributes:
        memory_limit, retain_limit: limits in bytes that succeed, given together; None for no limit.
    """

    def __init__(self, message: str, memory_limit: int | None = None, retain_limit: int | None = None) -> None:
        self.memory_limit, self.retain_limit = memory_limit, retain_limit
        super().__init__(message)

    @classmethod
    def naming(cls, why: str, asked: tuple[int | None, int | None], enough: tuple[int | None, int | None]) -> Self:
        """Say why limits cannot be met, and name limits that succeed; both as memory and retain limit."""

        def text(limits: tuple[int | None, int | None]) -> str:
            named = zip(("memory_limit", "retain_limit"), limits, strict=True)
            return " with ".join(f"{name}={limit}" for name, limit in named if limit is not None)

        return cls(f"{why} within {text(asked)}; {text(enough)} succeeds", *enough)


class SearchLimitError(PlannerError):
    """The problem is beyond any search or any addressable size."""
