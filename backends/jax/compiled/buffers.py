"""XLA's memory as buffers: in which order they are filled, and which of them share memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
    """Memory, or what takes none but has to be there before other memory is filled.

    Attributes:
        size: its bytes.
        reads: the buffers that are read to fill it.
        over: those of them that it may be written over, if nothing reads them later.
        is_result: whether it holds a result of the program.
    """

    size: int
    reads: tuple[Buffer, ...]
    over: tuple[Buffer, ...] = ()
    is_result: bool = False


def peak_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the bytes of results, and of the other buffers that are alive at once and fit into no result.

    XLA places the largest buffers first, and of equal ones results. A buffer lies in the memory of the smallest result
    that is large enough and needed at other times.
    """
    start, end = _lifetimes(buffers)

    def meet(one: Buffer, other: Buffer) -> bool:
        """Return whether two buffers are needed at once."""
        first, second = (one, other) if start[one] <= start[other] else (other, one)
        return start[second] < end[first] or (start[second] == end[first] and first not in second.over)

    by_size = sorted(buffers, key=lambda buffer: -buffer.size)
    results = [[buffer] for buffer in by_size if buffer.is_result]
    apart: dict[Buffer, None] = {}
    for buffer in by_size:
        if buffer.is_result or not buffer.size:
            continue
        fitting = (placed for placed in reversed(results) if buffer.size <= placed[0].size)
        free = next((placed for placed in fitting if not any(meet(buffer, other) for other in placed)), None)
        if free is None:
            apart[buffer] = None
        else:
            free.append(buffer)
    alive = [0] * len(buffers)
    ends = {buffer: end[buffer] for buffer in apart}
    for buffer in apart:
        below = next((each for each in buffer.over if ends.get(each) == start[buffer]), None)
        if below is not None:
            ends[below] -= 1
    for buffer, last in ends.items():
        for number in range(start[buffer], last + 1):
            alive[number] += buffer.size
    return sum(placed[0].size for placed in results) + max(alive, default=0)


def _lifetimes(buffers: Sequence[Buffer]) -> tuple[dict[Buffer, int], dict[Buffer, int]]:
    """Return when each buffer is filled, and when it is read for the last time; results are needed to the end.

    What reads nothing comes first. Then whatever became ready waits in a queue.
    """
    users: dict[Buffer, list[Buffer]] = {buffer: [] for buffer in buffers}
    missing = {buffer: len(buffer.reads) for buffer in buffers}
    for buffer in buffers:
        for read in buffer.reads:
            users[read].append(buffer)
    queue = [buffer for buffer in buffers if not buffer.reads]
    for buffer in queue:  # it grows
        for user in users[buffer]:
            missing[user] -= 1
            if not missing[user]:
                queue.append(user)
    start = {buffer: number for number, buffer in enumerate(queue)}
    end = {buffer: max((start[user] for user in users[buffer]), default=start[buffer]) for buffer in buffers}
    end |= {buffer: len(queue) for buffer in buffers if buffer.is_result}
    return start, end
