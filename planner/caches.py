"""What the library remembers between calls: how much it is, and how to forget it."""

from __future__ import annotations

import dataclasses

from planner import api, members
from planner.cost import store
from planner.language.cached import BACKEND_CACHES, OTHER_CACHES, STEP_CACHES, count_steps
from planner.program.loops import slice_plan
from planner.search import family

# Bytes that an entry holds, measured with tracemalloc on products of two matrices, a chain of four and a gathered
# product, which holds the most, with gradients, in torch 2.13 and CPython 3.11, 2026-11-24. Plans of slices were
# measured on a ring of four matrices with gradients under a memory limit, 2026-11-29. What plans, families and bound
# families hold is counted with each; `_BACKEND` is what other bound functions hold.
_MEMBER, _BACKEND, _STEP, _SLICE = 2_500, 20_000, 400, 12_000


@dataclasses.dataclass(frozen=True, slots=True)
class Caches:
    """The caches of the library; print them for a table of their sizes.

    Example:
        >>> import planner
        >>> planner.caches().clear()
        >>> planner.caches().bytes
        0

    Attributes:
        members: calls that were met before and share a plan with others of their family.
        plans: calls that were met before and have a plan of their own.
        families: plans that members of families share.
        bound: functions made of these plans, and in torch how calls of DTensors are divided.
        steps: what is known of single steps, as their prices.
        slices: plans of slices, which searches for loops try again.
        held: about how many bytes each of these caches holds.
    """

    members: int
    plans: int
    families: int
    bound: int
    steps: int
    slices: int
    held: dict[str, int] = dataclasses.field(compare=False)

    @property
    def bytes(self) -> int:
        """About how many bytes all entries hold in memory."""
        return sum(self.held.values())

    def clear(self) -> None:
        """Forget what is in memory. Files on disk stay."""
        api.forget_calls()
        members.READERS.clear()
        members.BOUND.clear()
        members.HELD.clear()
        family.FAMILIES.clear()
        family.HELD.clear()
        for cache in (*STEP_CACHES, *OTHER_CACHES, slice_plan):
            cache.cache_clear()
        for entries in BACKEND_CACHES:
            entries.clear()

    def disk(self, on: bool) -> None:
        """Turn off, or on again, what searches and measurements read and write on disk in this process.

        Example:
            >>> import planner
            >>> planner.caches().disk(False)
            >>> planner.caches().disk(True)
        """
        store.use_disk(on)

    def __str__(self) -> str:
        lines = [f"{'cache':10}{'entries':>9}{'about':>10}"]
        for name, count in self.held.items():
            lines.append(f"{name:10}{getattr(self, name):9,}{count / 1e6:7.1f} MB")
        return "\n".join(lines)


def caches() -> Caches:
    """Return the sizes of the library's caches, which can be cleared.

    Example:
        >>> import planner
        >>> planner.caches().clear()
        >>> print(planner.caches())
        cache       entries     about
        members           0    0.0 MB
        plans             0    0.0 MB
        families          0    0.0 MB
        bound             0    0.0 MB
        steps             0    0.0 MB
        slices            0    0.0 MB
    """
    alone, others = len(api._ALONE), sum(map(len, BACKEND_CACHES))
    counts = {
        "members": max(0, len(api._RUNNERS) - alone),  # other threads may change both meanwhile
        "plans": alone,
        "families": len(family.FAMILIES),
        "bound": len(members.BOUND) + others,
        "steps": count_steps(),
        "slices": slice_plan.cache_info().currsize,
    }
    held = {
        "members": counts["members"] * _MEMBER,
        "plans": sum([*api._ALONE.values()]),
        "families": sum([*family.HELD.values()]),
        "bound": sum([*members.HELD.values()]) + others * _BACKEND,
        "steps": counts["steps"] * _STEP,
        "slices": counts["slices"] * _SLICE,
    }
    return Caches(**counts, held=held)
