"""What the strategies share: choices that are made often, and the checks of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

__all__ = ["chance", "check_flag", "check_names", "check_range", "check_shape", "sampled"]


def sampled(values: Iterable[Any]) -> st.SearchStrategy[Any]:
    """One of some names, sizes or brackets. Equal ones are one strategy: Hypothesis looks into each that it meets."""
    return _sampled(tuple(values))


@functools.lru_cache(4096)
def _sampled(values: tuple[Hashable, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@functools.cache
def chance(share: int, of: int = 8) -> st.SearchStrategy[bool]:
    """True in share/of of the draws; shrinks to False."""
    return st.sampled_from([False] * (of - share) + [True] * share)


def check_range(name: str, low: Any, high: Any, least: int, most: int | None = None) -> None:
    """Refuse bounds that are no integers or in the wrong order; `name` is theirs without ``min_`` and ``max_``."""
    for label, value in ((f"min_{name}", low), (f"max_{name}", high)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"{label}={value!r} is no integer")
        if value < least or (most is not None and value > most):
            bounds = f"{least} or more" if most is None else f"between {least} and {most}"
            raise InvalidArgument(f"{label}={value!r} must be {bounds}")
    if low > high:
        raise InvalidArgument(f"min_{name}={low} is larger than max_{name}={high}")


def check_names(name: str, given: Any, known: Collection[str], empty: bool = False) -> None:
    """Refuse names that are not known; a single string is no collection of names."""
    if isinstance(given, str) or not isinstance(given, Collection):
        raise InvalidArgument(f"{name}={given!r} is no collection of names")
    unknown = [x for x in given if not isinstance(x, str) or x not in known]
    if unknown:
        raise InvalidArgument(f"{name} has unknown {unknown}: take from {', '.join(sorted(known))}")
    if not given and not empty:
        raise InvalidArgument(f"{name} is empty")


def check_flag(name: str, value: Any, open_too: bool = True) -> None:
    """Refuse what is no truth value; None is one that is left open."""
    if not (isinstance(value, bool) or (open_too and value is None)):
        raise InvalidArgument(f"{name}={value!r} is none of {'None, ' if open_too else ''}True, False")


def check_shape(shape: Any) -> None:
    """Refuse what is no shape."""
    if not isinstance(shape, (tuple, list)) or any(
        isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in shape
    ):
        raise InvalidArgument(f"shape={shape!r} is no tuple of sizes")
