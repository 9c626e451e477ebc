"""Lists the legal steps of networks with gathers by numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.search.exact.network import Network, Status
from planner.search.exact.sizes import ValueSizes, set_sizes, split_blocks

# Sets of several sizes are listed at once if they have at most so many splits: listing them takes some milliseconds.
STAGE_SPLITS = 4_000

# A status, and the bits that it adds to the numbers of values.
_Numbered = tuple[int, Status]


def stages(operands: int) -> list[list[int]]:
    """Return the numbers of operands of the sets that are listed at once, small sets first."""
    found, splits = [[1]], 0
    for count in range(2, operands + 1):
        more = math.comb(operands, count) << count - 1
        if splits and splits + more > STAGE_SPLITS:
            found.append([])
            splits = 0
        found[-1].append(count)
        splits += more
    return found


class GatheredSteps:
    """The legal steps of a network with gathers.

    Args:
        network: the network.
        values: the axes of its values.
    """

    def __init__(self, network: Network, values: ValueSizes) -> None:
        self.network, self.values, self.operands = network, values, len(network.leaves)
        # The statuses of results and of the values that steps read. A step on one value has no third.
        self._kinds: list[tuple[_Numbered, _Numbered, _Numbered | None]] = []
        numbered = [(number << self.operands, status) for number, status in enumerate(network.statuses)]
        for after, a in itertools.product(numbered, repeat=2):
            merges = [b for b in numbered if network.can_merge(a[1], b[1], after[1], -1, -1, True)]
            self._kinds += [(after, a, b) for b in merges]
            if network.can_advance(a[1], after[1], -1, -1, True):
                self._kinds.append((after, a, None))

    def into(self, counts: Sequence[int], good: Any) -> tuple[Any, Any, Any, Any]:
        """Return the steps into sets of so many operands: the values that they compute, and those that they read.

        Those into small sets come first, then those into low statuses. The steps of a value are neighbours. The second
        value is 0 in a step on one.

        Args:
            counts: the numbers of operands, in ascending order.
            good: whether a step may read each value of fewer operands.

        Returns:
            The three, and where the steps begin that lead into sets of another size or status than those before.
        """
        network, values, bits = self.network, self.values, self.operands
        sizes = set_sizes(bits)
        listed = np.isin(sizes, counts)
        good = good | np.tile(listed, len(network.statuses))
        good_sets = good.reshape(len(network.statuses), -1).any(axis=0)
        splits = split_blocks(bits, good=good_sets, counts=[count for count in counts if count > 1])
        nothing = (np.zeros(0, dtype=np.int64),) * 3
        union, *parts = (np.concatenate(part) for part in zip(nothing, *splits, strict=True))
        reached = listed & (sizes == 1)
        reached[union] = True
        sets = np.flatnonzero(reached)
        steps: list[tuple[Any, Any, Any]] = [nothing]

        def add(legal: Any, result: Any, left: Any, right: Any) -> None:
            some = np.flatnonzero(np.broadcast_to(legal, len(result)))
            steps.append((result[some], left[some], right[some]))

        for (high, after), (low, a), second in self._kinds:
            if second is None:
                axes, whole = values.axes[low | sets], sets == network.everything
                legal = network.can_advance(a, after, axes, values.outside[sets], whole)
                add(legal, high | sets, low | sets, np.zeros_like(sets))
                continue
            number, b = second
            left, right = low | parts[0], number | parts[1]
            some = np.flatnonzero(good[left] & good[right])
            of, left, right = union[some], left[some], right[some]
            axes, whole = values.axes[left] | values.axes[right], of == network.everything
            add(network.can_merge(a, b, after, axes, values.outside[of], whole), high | of, left, right)
        result, left, right = (np.concatenate(part) for part in zip(*steps, strict=True))
        stage = sizes[result & network.everything] * len(network.statuses) + (result >> bits)
        order = np.lexsort((result, stage))
        return result[order], left[order], right[order], np.flatnonzero(np.diff(stage[order])) + 1
