"""Caches in memory. `planner.caches()` counts what they hold, and clears them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# The functions that remember what they found about a step, see `cached_by_step`.
STEP_CACHES: list[Any] = []
# Other functions that remember what they return, see `cached_until_cleared`.
OTHER_CACHES: list[Any] = []
# What backends remember of calls, by the kind of call.
BACKEND_CACHES: list[dict[Any, Any]] = []
# How many steps each of `STEP_CACHES` remembers, and how many all of them do before a contraction is planned. Some hold
# whole plans with a step, plans too that are forgotten elsewhere.
MOST_STEPS, MOST_IN_ALL = 8_192, 32_768


def cached_by_step(function: F) -> F:
    """Remember what a function of a step, its spec or its form returns."""
    cached = lru_cache(maxsize=MOST_STEPS)(function)
    STEP_CACHES.append(cached)
    return cast(F, cached)


def count_steps() -> int:
    """Return how many steps all caches of steps remember."""
    return sum([cache.cache_info().currsize for cache in STEP_CACHES])


def forget_many_steps() -> None:
    """Forget all steps if there are more than `MOST_IN_ALL`. A large search may remember more while it runs."""
    if count_steps() > MOST_IN_ALL:
        for cache in STEP_CACHES:
            cache.cache_clear()


def cached_until_cleared(most: int) -> Callable[[F], F]:
    """Remember what a function returns for its `most` latest arguments, until `planner.caches().clear()`."""

    def cached(function: F) -> F:
        remembers = lru_cache(maxsize=most)(function)
        OTHER_CACHES.append(remembers)
        return cast(F, remembers)

    return cached


if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class CachedProperty(functools.cached_property):
        """A property that is computed once for each object, without a lock.

        Before Python 3.12 that of `functools` holds a lock for all objects of a class while it computes. If a process
        forks meanwhile, the lock stays locked in the child, which then waits for ever. Two threads may both compute
        here, as they may since Python 3.12.
        """

        def __get__(self, instance, owner=None):
            """Return the value, which from then on is an attribute of the object."""
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value

    cached_property = CachedProperty


def enter(cache: dict[Any, Any], key: Any, value: Any, most: int) -> list[Any]:
    """Enter a value into a cache, and return the keys of the oldest entries, which are removed beyond `most`.

    Other threads may change the cache meanwhile. A lock would not do: a process that forks while a thread holds it
    leaves it locked in the child.
    """
    removed = []
    while len(cache) >= most:
        with contextlib.suppress(RuntimeError, StopIteration):
            oldest = next(iter(cache))
            cache.pop(oldest, None)
            removed.append(oldest)
    cache[key] = value
    return removed


def enter_bytes(held: dict[Any, int], key: Any, count: int, most: int) -> list[Any]:
    """Enter how many bytes an entry holds, and return the keys of the oldest entries, which are removed.

    As many are removed as have to be, so that all entries together hold at most `most` bytes, or the new one is alone.
    The bytes are added up anew, which takes some 10 us for 2,000 entries: a sum that is kept would drift when threads
    change it at once. See `enter`.
    """
    removed = []
    held.pop(key, None)  # or it would stay as old as it was
    held[key] = count
    total = sum([*held.values()])
    while total > most and len(held) > 1:
        with contextlib.suppress(RuntimeError, StopIteration):
            oldest = next(iter(held))
            total -= held.pop(oldest, 0)
            removed.append(oldest)
    return removed


def enter_held(
    cache: dict[Any, Any], held: dict[Any, int], key: Any, value: Any, most: int, count: int, most_bytes: int
) -> None:
    """Enter a value into a cache, and the bytes that it holds, if any, beside it: what leaves one leaves both."""
    for old in enter(cache, key, value, most):
        held.pop(old, None)
    for old in enter_bytes(held, key, count, most_bytes) if count else ():
        cache.pop(old, None)
