"""What the library remembers between calls: how much it is, and how to forget it."""

from __future__ import annotations

import dataclasses

from planner import api, run
from planner.cost import store
from planner.search import family

__all__ = ["Caches", "caches"]

# Bytes that an entry holds in the mean, measured with tracemalloc on plans of two to four operands; CPython 3.11,
# 2026-11-24. A call is a key and a few sizes; a family is a plan with its bound functions.
CALL_BYTES, PLAN_BYTES, FAMILY_BYTES = 5_000, 60_000, 60_000


@dataclasses.dataclass(frozen=True, slots=True)
class Caches:
    """The caches of the library; print them for a table of their sizes.

    Example:
        >>> import planner
        >>> planner.caches().clear()
        >>> planner.caches().bytes
        0

    Attributes:
        calls: entries of the functions that run calls met before.
        families: entries of the plans that members of families share.
        bound: entries of the functions made of these plans.
    """

    calls: int
    families: int
    bound: int

    @property
    def bytes(self) -> int:
        """About how many bytes all entries hold in memory."""
        return self.calls * CALL_BYTES + self.families * PLAN_BYTES + self.bound * FAMILY_BYTES

    def clear(self) -> None:
        """Forget what is in memory. Files on disk stay."""
        api.forget_calls()
        run.forget_families()
        family.FAMILIES.clear()

    def disk(self, on: bool) -> None:
        """Turn reading and writing remembered measurements on disk off, or on again, in this process."""
        store.use_disk(on)

    def __str__(self) -> str:
        lines = [f"{'cache':10}{'entries':>9}{'about':>10}"]
        rows = (("calls", self.calls, CALL_BYTES), ("families", self.families, PLAN_BYTES))
        for name, count, each in (*rows, ("bound", self.bound, FAMILY_BYTES)):
            lines.append(f"{name:10}{count:9,}{count * each / 1e6:7.1f} MB")
        return "\n".join(lines)


def caches() -> Caches:
    """Return the sizes of the library's caches, which can be cleared.

    Example:
        >>> import planner
        >>> planner.caches().clear()
        >>> print(planner.caches())
        cache       entries     about
        calls             0    0.0 MB
        families          0    0.0 MB
        bound             0    0.0 MB
    """
    return Caches(len(api._RUNNERS), len(family.FAMILIES), len(run._FAMILIES))
