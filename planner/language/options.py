"""What a caller asks for besides the arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeGuard

from planner.language.errors import PlannerError

# The searches over all trees. "measure" finds its candidates by the search of "auto".
SEARCHES = ("auto", "optimal", "measure")
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")


class IndexMode(NamedTuple):
    """What an index mode does with the entries of an index array.

    Attributes:
        wraps: whether negative entries count from the end.
        bad: what becomes of an entry that is out of range. "refuse": an error; where values cannot be seen, results
            that depend on the entry become NaN in JAX, and torch checks the entry later. "drop": it becomes the size,
            which means "no row". "clamp": it becomes the nearest row. "trust": there is no such entry.
        unmarked: if results that depend on a bad entry become NaN afterwards, see `planner.run`: the mode in which they
            and all derivatives are computed.
    """

    wraps: bool
    bad: str
    unmarked: str = ""


# Users call by the names in `INDEX_MODES`. "checked" is for index arrays that were refused or accepted before.
MODES = {
    "raise": IndexMode(True, "refuse"),
    "drop": IndexMode(False, "drop"),
    "clip": IndexMode(False, "clamp"),
    "nan": IndexMode(True, "drop", unmarked="wrap and drop"),
    "wrap and drop": IndexMode(True, "drop"),
    "checked": IndexMode(True, "trust"),
}
INDEX_MODES = ("raise", "drop", "clip", "nan")


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
    deadline: Any = None

    def hashable(self) -> Request:
        """Return the request with dictionaries and lists as tuples."""
        sizes, optimize = self.sizes, self.optimize
        return self._replace(
            sizes=tuple(sorted(sizes.items())) if isinstance(sizes, dict) else sizes,
            optimize=tuple(map(tuple, optimize)) if isinstance(optimize, list) else optimize,
        )


def is_name(value: Any) -> TypeGuard[str]:
    """Whether an option is given by name, and not as a function, a path or an object."""
    return isinstance(value, str)


def check_index_mode(index_mode: Any) -> None:
    """Raise an error if the index mode is unknown."""
    # Derivatives under "nan" are contractions in the mode that its row names. "checked" is no mode for a call.
    if not is_name(index_mode) or index_mode not in (
        *INDEX_MODES,
        *(mode.unmarked for mode in MODES.values() if mode.unmarked),
    ):
        raise PlannerError(f"index_mode={index_mode!r:.80} is unknown: take one of {', '.join(map(repr, INDEX_MODES))}")


def read_precision(precision: Any, framework: str) -> str | None:
    """Return the name of a precision; JAX's `lax.Precision` has names too."""
    if precision is None:
        return None
    if framework != "jax":
        raise PlannerError(f"precision= is for jax; {framework} has no setting per call")
    name = str(getattr(precision, "name", precision)).lower()
    if name not in PRECISIONS:
        raise PlannerError(f"precision={name!r} is unknown: take one of {', '.join(map(repr, PRECISIONS))}")
    return name


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options that the choice of a plan depends on, checked and converted; see `planner.contract`."""

    optimize: Any = "auto"
    minimize: Any = "time"
    memory_limit: int | None = None
    retain_limit: int | None = None
    precision: str | None = None
    deadline: float | None = None

    @property
    def objective(self) -> str:
        """The objective that steps are chosen by: a function of the cost only ranks plans."""
        return self.minimize if isinstance(self.minimize, str) else "time"

    @property
    def limited(self) -> bool:
        """Whether there is a limit in bytes."""
        return self.memory_limit is not None or self.retain_limit is not None
