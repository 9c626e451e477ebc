"""What a call asks for besides its arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from planner.language.errors import PlannerError

__all__ = ["INDEX_MODES", "PRECISIONS", "Options", "SEARCHES", "Request", "check_index_mode"]

# Searches over all trees; "measure" looks for its candidates as "auto" does.
SEARCHES = ("auto", "optimal", "measure")
INDEX_MODES = ("raise", "drop", "clip")
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")


class Request(NamedTuple):
    """What a call asks for, besides its arrays; equal to the plain tuple that a warm call looks its runner up by.

    The fields are the arguments of `contract`, in the order in which it puts them.
    """

    spec: Any
    sizes: Any
    optimize: Any
    minimize: Any
    memory_limit: Any
    retain_limit: Any
    index_mode: Any
    dtype: Any
    precision: Any = None

    def hashable(self) -> Request:
        """Return the request with dictionaries and lists as tuples."""
        sizes, optimize = self.sizes, self.optimize
        return self._replace(
            sizes=tuple(sorted(sizes.items())) if isinstance(sizes, dict) else sizes,
            optimize=tuple(map(tuple, optimize)) if isinstance(optimize, list) else optimize,
        )


def check_index_mode(index_mode: Any) -> None:
    """Refuse an unknown index mode."""
    if index_mode not in INDEX_MODES:
        raise PlannerError(f"index_mode={index_mode!r:.80} is unknown: take one of {', '.join(map(repr, INDEX_MODES))}")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What the caller asked for, besides the problem itself."""

    optimize: Any = "auto"
    minimize: Any = "time"
    memory_limit: int | None = None
    retain_limit: int | None = None
    precision: str | None = None
