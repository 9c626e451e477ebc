"""The figures of one way: of a whole from those of a part, and as text."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["Figures", "bytes_text", "extrapolated", "seconds_text"]


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one way; with gradients means forward and backward together.

    Attributes:
        seconds: forward alone, when no gradient is asked for.
        peak_bytes: most bytes newly allocated in it, the result counted.
        gradient_seconds: forward and backward.
        gradient_peak_bytes: most bytes newly allocated in both.
        retained_bytes: what stays alive between forward and backward, the result not counted.
        extrapolated: whether only a part was run.
    """

    seconds: float
    peak_bytes: float
    gradient_seconds: float
    gradient_peak_bytes: float
    retained_bytes: float
    extrapolated: bool = False


def extrapolated(part: Figures, half: Figures, times: float) -> Figures:
    """Return the figures of a whole, `times` the part, from those of the part and of half of the part.

    Time grows in proportion: it is all in the loop. Bytes have a constant share too, such as the gradient of
    an operand that every row reads, so they go up by what the second half of the part added.
    """

    def bytes_of(quantity: str) -> float:
        second_half = getattr(part, quantity) - getattr(half, quantity)
        return float(getattr(part, quantity) + 2 * second_half * (times - 1))

    return Figures(
        part.seconds * times,
        bytes_of("peak_bytes"),
        part.gradient_seconds * times,
        bytes_of("gradient_peak_bytes"),
        bytes_of("retained_bytes"),
        extrapolated=True,
    )


def bytes_text(count: float) -> str:
    """Write bytes with three digits and a decimal prefix; a dash for what was not measured."""
    if math.isnan(count):
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Write a time with three digits; a dash for what was not measured."""
    if math.isnan(seconds):
        return "-"
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
