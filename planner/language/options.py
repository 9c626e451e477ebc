"""What a caller asks for besides the arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from planner.language.errors import PlannerError

__all__ = ["INDEX_MODES", "PRECISIONS", "Options", "SEARCHES", "Request", "check_index_mode"]

# The searches over all trees. "measure" finds its candidates by the search of "auto".
SEARCHES = ("auto", "optimal", "measure")
INDEX_MODES = ("raise", "drop", "clip")
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")


class Request(NamedTuple):
    """The arguments of a call of `contract`, apart from the arrays.

    A request equals the plain tuple of these arguments. `contract` uses that tuple to find the function for a repeated
    call, so the fields must stay in the order of the tuple.
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
    """Raise an error if the index mode is unknown."""
    if index_mode not in INDEX_MODES:
        raise PlannerError(f"index_mode={index_mode!r:.80} is unknown: take one of {', '.join(map(repr, INDEX_MODES))}")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options that the choice of a plan depends on, checked and converted; see `planner.contract`."""

    optimize: Any = "auto"
    minimize: Any = "time"
    memory_limit: int | None = None
    retain_limit: int | None = None
    precision: str | None = None
