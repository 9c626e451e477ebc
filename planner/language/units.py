"""Quantities as people write them: counts, bytes and seconds."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from planner.language.errors import PlannerError

# Larger counts are written as powers of ten. Floats end at 1.8e308.
LARGEST = 10**300
_DECIMAL_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL_UNITS, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_IN_ANY_CASE = {name.lower(): size for name, size in _UNITS.items()}


def parse_bytes(limit: Any, name: str) -> int | None:
    """Read a limit: bytes as an int, or a string such as ``"2 GiB"``, the unit in any case.

    Raises:
        PlannerError: the limit is neither.
    """
    if limit is None:
        return None
    with contextlib.suppress(TypeError):
        if not isinstance(limit, bool) and operator.index(limit) >= 0:
            return operator.index(limit)
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", limit)
        if match and match[2].lower() in _IN_ANY_CASE and len(match[1]) < 40:
            return int(Fraction(match[1]) * _IN_ANY_CASE[match[2].lower()])
    units = ", ".join(filter(None, _UNITS))
    raise PlannerError(
        f"{name}={limit!r:.80} is not a number of bytes: give an int or a string such as '2 GiB', in one of {units}"
    )


def parse_seconds(seconds: Any, name: str) -> float | None:
    """Read a time in seconds.

    Raises:
        PlannerError: it is not a positive finite number.
    """
    if seconds is None:
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(seconds, bool | str) and 0 < float(seconds) < math.inf:
            return float(seconds)
    raise PlannerError(f"{name}={seconds!r:.80} is not a number of seconds: give a positive number such as 0.5")


def count_text(count: float) -> str:
    """Write a count with three digits and a decimal prefix: 1.07 G."""
    if count > LARGEST:
        return f"{Decimal(count):.2e} "
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if count < 999.5 or unit == "E":
            return f"{count:.3g} {unit}".rstrip() if unit else f"{count:.0f}"
        count /= 1000
    raise AssertionError


def bytes_text(count: int) -> str:
    """Write bytes with three digits and a decimal prefix: 33.6 MB."""
    text = count_text(count)
    return f"{text}B" if " " in text else f"{text} B"


def seconds_text(seconds: float) -> str:
    """Write a time with three digits: 1.07 ms."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 0.9995 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError
