"""What the library remembers between calls: how much it is, and how to forget it."""

from __future__ import annotations

import dataclasses

from planner import api, members
from planner.cost import store
from planner.language.cached import STEP_CACHES
from planner.search import family

__all__ = ["Caches", "caches"]

# Bytes that an entry holds in the mean, measured with tracemalloc on plans of two to four operands; CPython 3.11,
# 2026-11-24. A call is a key and a few sizes; a family is a plan with its bound functions; a step is its prices, or one
# of the facts that they follow from.
BYTES = {"calls": 5_000, "families": 60_000, "bound": 60_000, "steps": 1_000}


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
        steps: entries of what is known of steps, as their prices.
    """

    calls: int
    families: int
    bound: int
    steps: int

    @property
    def bytes(self) -> int:
        """About how many bytes all entries hold in memory."""
        return sum(count * BYTES[name] for name, count in dataclasses.asdict(self).items())

    def clear(self) -> None:
        """Forget what is in memory. Files on disk stay."""
        api.forget_calls()
        members.forget_families()
        family.FAMILIES.clear()
        for cache in STEP_CACHES:
            cache.cache_clear()

    def disk(self, on: bool) -> None:
        """Turn reading and writing remembered measurements on disk off, or on again, in this process."""
        store.use_disk(on)

    def __str__(self) -> str:
        lines = [f"{'cache':10}{'entries':>9}{'about':>10}"]
        for name, count in dataclasses.asdict(self).items():
            lines.append(f"{name:10}{count:9,}{count * BYTES[name] / 1e6:7.1f} MB")
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
        steps             0    0.0 MB
    """
    steps = sum(cache.cache_info().currsize for cache in STEP_CACHES)
    return Caches(len(api._RUNNERS), len(family.FAMILIES), len(members.BOUND), steps)
