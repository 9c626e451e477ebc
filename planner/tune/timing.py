"""How long calls take. Everything that times a call does it with these functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call, and the seconds that it took."""
    begun = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begun


def block_seconds(
    program: Callable[[], object], clock: Callable[[], float] = time.perf_counter, least_seconds: float = 1e-3
) -> float:
    """Return the seconds of one run, after an untimed run: an average over runs that last `least_seconds` together."""
    program()
    calls, begun = 0, clock()
    while True:
        program()
        calls += 1
        if (spent := clock() - begun) >= least_seconds or calls == 1000:
            return spent / calls


# A block of calls takes at least so long, so that reading the clock costs nothing beside it.
_BLOCK_SECONDS = 5e-4


def least_seconds(
    run: Callable[[], Any],
    wait: Callable[[Any], Any] = lambda result: result,
    blocks: int = 7,
    most_seconds: float = 1.5,
) -> float:
    """Return the seconds of a call, as the fastest of several blocks of calls. Other processes only make one slower.

    Args:
        run: the call. It is warmed up once.
        wait: waits for a result. Only the last call of a block is waited for, so that calls overlap as in a program.
        blocks: how many blocks are timed, or fewer, but at least two, once they have taken `most_seconds`.
        most_seconds: see `blocks`.
    """
    wait(run())
    start = time.perf_counter()
    wait(run())
    first = time.perf_counter() - start
    calls = max(1, round(_BLOCK_SECONDS / max(first, 1e-7)))
    found: list[float] = []
    spent = 0.0
    while len(found) < blocks and (len(found) < 2 or spent < most_seconds):
        start = time.perf_counter()
        for _ in range(calls):
            result = run()
        wait(result)
        seconds = time.perf_counter() - start
        del result
        found.append(seconds / calls)
        spent += seconds
    return min(found)
