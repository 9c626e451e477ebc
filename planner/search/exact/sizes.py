"""The sizes that lower bounds on steps with gathers depend on: of one step, or of many by numpy."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from planner.cost.floor import Launches
from planner.search.exact.network import POOL, SCATTER, Bits, Network, Status

__all__ = ["StepSizes", "row_launches", "sizes_of"]

Array = Any  # of float64, or a number


class StepSizes(NamedTuple):
    """Sizes of a step on one value or two; see `planner.cost.floor`.

    Attributes:
        gathers: how many index arrays the step reads.
        share: which share of the joint elements must be multiplied if the product is made with the whole pool, for a
            step of one index array. Instead of the rows that are chosen for each query, all rows of the pool are
            multiplied, once.
        joint: the number of joint elements.
        elements: the number of elements of all terms.
        copies: the number of elements of those terms that are indexed, with their rows in the place of the pool.
        taken: the number of rows that it takes; see `planner.backends.common.stock_rows`.
        added: the number of rows that it adds up.
        indexed: whether each term is indexed, the result last.
    """

    gathers: Array
    share: Array
    joint: Array
    elements: Array
    copies: Array
    taken: Array
    added: Array
    indexed: Sequence[Any]


def sizes_of(
    network: Network,
    size: Callable[[Bits], Array],
    before: Sequence[Status],
    after: Status,
    terms: Sequence[Bits],
    xp: Any,
) -> StepSizes:
    """Return the sizes of a step.

    Args:
        network: the network.
        size: returns the product of the sizes of some axes.
        before: the status of each value that is read.
        after: the status of the result.
        terms: the axes of these values and of the result.
        xp: what the terms are, `numpy` or `planner.cost.floor.NUMBERS`.
    """
    everything: Bits = -1
    elements = sum([size(term) for term in terms])
    share: Array = 1.0
    gathers: Array = 0
    indexed: list[Any] = [False] * len(terms)
    chosen: list[Bits] = [0] * len(terms)
    for factor, new in enumerate(after):
        olds = [status[factor] for status in before]
        if new == POOL or SCATTER in olds:
            continue  # a value that is segment-summed joins others on the pool axis
        pool, rows = network.pools[factor], network.rows[factor]
        takes = [(old == POOL) & (term & pool != 0) for old, term in zip(olds, terms, strict=False)]
        by_factor = [*takes, new == SCATTER]
        any_term, common, number = False, everything, 0
        for term, now in zip(terms, by_factor, strict=True):
            any_term, number = any_term | now, number + now
            common = common & xp.where(now, everything, term)
        # Rows that both other terms have are no choice.
        queries = size(rows & ~xp.where(number == 1, common, 0))
        share = xp.where(any_term, xp.minimum(1.0, size(pool) / xp.maximum(1.0, queries)), share)
        gathers = gathers + any_term
        chosen = [old | rows * now for old, now in zip(chosen, by_factor, strict=True)]
        indexed = [old | now for old, now in zip(indexed, by_factor, strict=True)]
        terms = [xp.where(now, term & ~pool | rows, term) for term, now in zip(terms, by_factor, strict=True)]
    joint = size(functools.reduce(operator.or_, terms))
    copies = sum([size(term) * now for term, now in zip(terms, indexed, strict=True)])
    counts = [size(axes) * now for axes, now in zip(chosen, indexed, strict=True)]
    adds = size(terms[-1] & ~chosen[-1]) > 1  # adding up rows of one element is like taking them
    taken = sum(counts[:-1]) + (1 - 1 * adds) * counts[-1]
    return StepSizes(gathers, share, joint, elements, copies, taken, adds * counts[-1], indexed)


def row_launches(launches: Launches | None, indexed: Sequence[Any]) -> Array:
    """Return how many operators more the stock implementation launches to take and add up rows.

    Its gradient adds up rows where it takes some.

    Args:
        launches: what the framework's operators take; None if that is not known.
        indexed: whether each term of the step is indexed.
    """
    if launches is None:
        return 0.0
    both = 2 * launches.view * (len(indexed) == 3)
    return min(launches.take, launches.add) * sum([1 * now for now in indexed]) + both
