"""The axes and sizes of all values and steps of a network, which lower bounds depend on."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.cost.floor import Launches
from planner.language.cached import cached_until_cleared
from planner.search.exact.network import POOL, SCATTER, Bits, Network, Status

# How many steps numpy looks at at once.
BLOCK = 1 << 15
# The most axes of a bit set in an integer of 64 bits, and the most gathers: each multiplies the kinds of products by
# eleven.
_MOST_AXES, _MOST_GATHERS = 62, 2

Array = Any  # of float64, or a number


class StepSizes(NamedTuple):
    """Sizes of a step on one value or two; see `planner.cost.floor`.

    Attributes:
        gathers: how many index arrays the step reads.
        share: which share of the joint elements must be multiplied if the product is made with the whole pool, for a
            step of one index array. Instead of the rows that are chosen for each query, all rows of the pool are
            multiplied, once.
        joint: the number of joint elements.
        elements: the number of elements of all terms; of a pool, no more than the rows have that are taken of it, or
            added up into it, because a gradient may take them.
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
    whole = [size(term) for term in terms]
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
        number = sum([1 * now for now in by_factor])
        any_term, queries = number > 0, 1.0
        for term, now in zip(terms, by_factor, strict=True):
            # The whole pool may be multiplied by one of the other two terms, once for all rows that this one lacks.
            others = xp.where(number == 1, xp.where(now, everything, term), 0)
            queries = xp.maximum(queries, size(rows & ~others))
        share = xp.where(any_term, xp.minimum(1.0, size(pool) / queries), share)
        gathers = gathers + any_term
        chosen = [old | rows * now for old, now in zip(chosen, by_factor, strict=True)]
        indexed = [old | now for old, now in zip(indexed, by_factor, strict=True)]
        terms = [xp.where(now, term & ~pool | rows, term) for term, now in zip(terms, by_factor, strict=True)]
    elements = sum([xp.minimum(least, size(term)) for least, term in zip(whole, terms, strict=True)])
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


@cached_until_cleared(64)
def _patterns(count: int) -> Any:
    """Return the parts of a set of `count` operands that hold its first one, but not all, as rows of bits.

    They are in the order in which `all_splits` has them.
    """
    numbers = np.arange((1 << count - 1) - 2, -1, -1, dtype=np.int64)
    return (numbers[:, None] >> np.arange(count - 1) & 1).astype(np.int64)


@cached_until_cleared(16)
def set_sizes(operands: int) -> Any:
    """Return how many operands each set has."""
    return (np.arange(1 << operands)[:, None] >> np.arange(operands) & 1).sum(axis=1)


def split_blocks(
    operands: int, reverse: bool = False, good: Any = None, counts: Sequence[int] | None = None
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield all splits of all sets of operands: sets, and the two parts of each of their splits.

    Args:
        operands: how many operands there are.
        reverse: whether to begin with large sets rather than with small ones.
        good: for each set whether to yield splits with it; None for all. Then what is yielded has no rows for sets.
        counts: how many operands the sets have; None for all from two on.
    """
    order = -1 if reverse else 1
    masks, size = np.arange(1 << operands, dtype=np.int64), set_sizes(operands)
    if good is not None:
        masks, size = masks[good], size[good]
    for count in (range(2, operands + 1) if counts is None else counts)[::order]:
        patterns = _patterns(count)
        sets = masks[size == count]
        each = max(1, BLOCK // len(patterns))
        for start in range(0, len(sets), each)[::order]:
            union = sets[start : start + each]
            places = np.nonzero(union[:, None] >> np.arange(operands) & 1)[1].reshape(-1, count)
            members = np.int64(1) << places
            left = members[:, :1] + members[:, 1:] @ patterns.T
            right = union[:, None] - left
            if good is None:
                yield union, left, right
                continue
            rows, columns = np.nonzero(good[left] & good[right])
            if len(rows):
                yield union[rows], left[rows, columns], right[rows, columns]


def has_tables(network: Network) -> bool:
    """Whether numpy can list and bound the steps of all trees; bounds divide by sizes."""
    few = len(network.axes) <= _MOST_AXES and len(network.gathers) <= _MOST_GATHERS
    return few and 0 not in network.sizes.values()


class ValueSizes:
    """The axes of all values, as bit sets, and their numbers of elements.

    Args:
        network: the network.
        operands: how many operands it has.

    Attributes:
        outside: the axes that others or the result have, by the set of operands.
        axes: by the number of the value.
        elements: likewise.
    """

    def __init__(self, network: Network, operands: int) -> None:
        union = np.zeros(1, dtype=np.int64)
        for operand in range(operands):
            union = np.concatenate([union, union | network.union(1 << operand)])
        self._tables = _size_tables([network.sizes[axis] for axis in network.axes])
        few = len(network.axes) < 31
        self.outside: Any = union[::-1] | network.result_mask
        axes = [network.axes_with(union, self.outside, status) for status in network.statuses]
        self.axes: Any = np.concatenate(axes).astype(np.int32 if few else np.int64)
        self.elements: Any = self.size(self.axes)

    def size(self, axes: Any) -> Any:
        """Return the product of the sizes of each set of axes."""
        shift, (table, *more) = 0, self._tables
        width = len(table).bit_length() - 1
        sizes = table[axes & len(table) - 1]
        for table in more:
            shift += width
            sizes = sizes * table[axes >> shift & len(table) - 1]
        return sizes


def _size_tables(sizes: Sequence[int]) -> list[Any]:
    """Return tables of the products of the sizes of each set of axes, for up to 12 axes each."""
    count = max(1, -(-len(sizes) // 12))
    width = max(1, -(-len(sizes) // count))
    tables = []
    for start in range(0, max(1, len(sizes)), width):
        table = np.ones(1)
        part = sizes[start : start + width]
        for size in (*part, *(1,) * (width - len(part))):
            table = np.concatenate([table, table * float(size)])
        tables.append(table)
    return tables
