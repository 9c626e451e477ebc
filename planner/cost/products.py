"""The rates of matrix products by shape class: how many rows, columns and terms of sums, and whether in a batch.

Small sides change a product's FLOP/s by a factor of a hundred, and by which side it is: torch multiplies a batch of 64
rows by 4 columns, and 64 terms, at a sixth of the rate of one such product. No formula in one parameter says so for all
frameworks. So a table holds the rates at a few sizes of each side, in a batch and alone; between them, the logarithm
of the rate is linear in the logarithms of the sides. A side of 2 or 3 takes as long as one of 4: a product with a
vector is another function, and says nothing about them.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from typing import Any

import numpy as np

SIDES = (1, 4, 16, 64, 256)
"""The sizes of rows, columns and terms at which rates are measured."""

CLASSES = tuple(itertools.product((False, True), SIDES, SIDES, SIDES))
"""The classes of a table, in order: whether in a batch, rows, columns and terms."""

_LOGS = tuple(map(math.log, SIDES))


@functools.lru_cache(maxsize=4096)
def _place(size: int) -> tuple[int, float, float]:
    """Return the entry of `SIDES` before a size, how far it is on the way to the next, and the part that it fills."""
    if 1 < size < SIDES[1]:
        return 1, 0.0, size / SIDES[1]
    log = math.log(min(max(size, 1), SIDES[-1]))
    at = min(bisect.bisect_right(_LOGS, log), len(SIDES) - 1) - 1
    return at, (log - _LOGS[at]) / (_LOGS[at + 1] - _LOGS[at]), 1.0


def class_rate(rates: tuple[float, ...], batched: bool, rows: int, columns: int, terms: int) -> float:
    """Return the FLOP/s of a product.

    Args:
        rates: the rate of each entry of `CLASSES`.
        batched: whether the product is one of a batch.
        rows: the number of its rows. Beyond the largest of `SIDES` a rate no longer changes, here and below.
        columns: the number of its columns.
        terms: the number of terms of its sums.
    """
    count, log = len(SIDES), 0.0
    (i, u, some), (j, v, of_columns), (k, w, of_terms) = _place(rows), _place(columns), _place(terms)
    base = ((batched * count + i) * count + j) * count + k
    for row, share in ((0, 1 - u), (count * count, u)):
        for column, part in ((0, 1 - v), (count, v)):
            at = base + row + column
            if share * part:
                log += share * part * ((1 - w) * math.log(rates[at]) + w * math.log(rates[at + 1]))
    return math.exp(log) * some * of_columns * of_terms


def most_rate(rates: tuple[float, ...], least: Any) -> Any:
    """Return a rate that no product exceeds whose least side is `least` or less; `least` may be an array."""
    most = _most_logs(rates)
    if not isinstance(least, np.ndarray):
        at, share, _ = _place(least)
        return math.exp((1 - share) * most[at] + share * most[at + 1])
    return np.exp(np.where(least > 1, np.interp(np.log(np.maximum(least, SIDES[1])), _LOGS, most), most[0]))


@functools.lru_cache(maxsize=64)
def _most_logs(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Return, for each entry of `SIDES`, the logarithm of the highest rate of a product with a side of at most it."""
    most = [max(rate for rate, (_, *sides) in zip(rates, CLASSES, strict=True) if side in sides) for side in SIDES]
    return tuple(map(math.log, itertools.accumulate(most, max)))
