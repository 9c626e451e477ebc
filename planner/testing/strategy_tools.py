"""Helpers of the strategies: frequent choices, and checks of arguments."""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument


# Hypothesis inspects each new strategy object, so keeping them halves the time of a draw (from 12.6 to 6.1 ms per
# problem, 2026-11-23). 56 were kept after 210 problems.
@functools.lru_cache(1024, typed=True)
def sampled(*values: Hashable) -> st.SearchStrategy[Any]:
    """Choose one of some names, sizes or brackets."""
    return st.sampled_from(values)


@functools.cache
def chance(share: int, of: int = 8) -> st.SearchStrategy[bool]:
    """Draw True in share/of of the cases; shrinks to False."""
    return st.sampled_from([False] * (of - share) + [True] * share)


def is_drawn(draw: st.DrawFn, features: Collection[str], feature: str, share: int, of: int = 8) -> bool:
    """Draw whether a feature is used: in share/of of the cases, or never if it is not one of `features`."""
    return feature in features and draw(chance(share, of))


def check_range(name: str, low: Any, high: Any, least: int, most: int | None = None) -> None:
    """Refuse bounds that are not integers or in the wrong order; `name` comes after ``min_`` and ``max_``."""
    for label, value in ((f"min_{name}", low), (f"max_{name}", high)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"{label}={value!r} is not an integer")
        if value < least or (most is not None and value > most):
            bounds = f"{least} or more" if most is None else f"between {least} and {most}"
            raise InvalidArgument(f"{label}={value!r} must be {bounds}")
    if low > high:
        raise InvalidArgument(f"min_{name}={low} is larger than max_{name}={high}")


def check_names(name: str, given: Any, known: Collection[str], empty: bool = False) -> None:
    """Refuse unknown names; a single string does not count as a collection of names."""
    if isinstance(given, str) or not isinstance(given, Collection):
        raise InvalidArgument(f"{name}={given!r} is not a collection of names")
    unknown = [x for x in given if not isinstance(x, str) or x not in known]
    if unknown:
        raise InvalidArgument(f"{name} has unknown {unknown}: take from {', '.join(sorted(known))}")
    if not given and not empty:
        raise InvalidArgument(f"{name} is empty")


def check_flag(name: str, value: Any, open_too: bool = True) -> None:
    """Refuse a value that is not a bool; None is allowed if `open_too` is set."""
    if not (isinstance(value, bool) or (open_too and value is None)):
        raise InvalidArgument(f"{name}={value!r} is not one of {'None, ' if open_too else ''}True, False")


def check_shape(shape: Any) -> None:
    """Refuse a value that is not a tuple or list of sizes."""
    if not isinstance(shape, (tuple, list)) or any(
        isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in shape
    ):
        raise InvalidArgument(f"shape={shape!r} is not a tuple of sizes")
