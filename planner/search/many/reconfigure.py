"""Improves trees of many operands: the order within small parts of a tree is searched exactly, one part after another.

A part is a step of the tree with some steps below it. The values that these read from outside the part, at most
`MOST_CUT`, are the operands of a small contraction of their own. Its best order is searched over all splits, and
replaces the part if it is better. So a tree only gets better.

Costs are estimates from sizes alone: the exact FLOPs of networks without gathers, and floors of bytes and times. Sizes
are held as logarithms to the base 2, and so are no more than a few hundred. For a set S of the part's operands let

    touch(S) = the size of all axes that an operand in S has
    inner(S) = the size of those that no operand outside of S has, nor the part's result

The product of S then has the size touch(S) - inner(S), and the product of two disjoint sets A and B goes over
touch(A + B) - inner(A) - inner(B). Both are tables of 2^k entries, from which NumPy prices all splits at once.

Source:
    Subtree reconfiguration is cotengra's idea: J. Gray and S. Kourtis, "Hyper-optimized tensor network contraction",
    Quantum 5, 410 (2021).
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.cost.device import Device
from planner.language.cached import cached_until_cleared
from planner.language.dtypes import itemsize

# The table of splits of ten operands has 28,501 rows; each operand more triples it.
MOST_CUT = 10
# Steps that cost less than this share of the average step are not the root of a part.
LEAST_SHARE = 1e-5
# A part must get better by more than rounding can make it.
LEAST_GAIN = 1e-9
# The largest power of two that costs are scaled to: floats end at 1,024.
LARGEST = 900.0
# Sizes are sums of logarithms. The least size that is not 1 has the logarithm 1.
ROUNDING = 0.5

Array = Any  # of float64, or of integers


class StepSizes(NamedTuple):
    """The sizes of some products, as logarithms to the base 2, and which of their operands need gradients.

    Attributes:
        joint: what the product goes over.
        left, right, result: the two operands and the result.
        left_needs, right_needs: 1 if a gradient of the operand is needed, else 0; None if none is needed anywhere.
    """

    joint: Array
    left: Array
    right: Array
    result: Array
    left_needs: Array | None = None
    right_needs: Array | None = None

    @property
    def products(self) -> Array:
        """How many products are computed: the product itself, and one for each gradient."""
        return 1.0 if self.left_needs is None else 1.0 + self.left_needs + self.right_needs


# Returns the costs of some products, divided by 2^scale.
Estimate = Callable[[StepSizes, float], Array]


def estimate_of(objective: str, device: Device, dtype: str) -> Estimate:
    """Return the estimate of what an objective minimises: FLOPs, bytes moved, seconds, or the bytes of the results.

    For a peak these are the bytes of what each step reads and writes.
    """
    width = itemsize(dtype)
    matrix_seconds = 0.0 if device.products else device.matrix_seconds

    def flops(sizes: StepSizes, scale: float) -> Array:
        joint = sizes.joint
        factor = 1.0 + (joint > sizes.result + ROUNDING)
        for needs, operand in ((sizes.left_needs, sizes.left), (sizes.right_needs, sizes.right)):
            if needs is not None:
                factor += needs * (1.0 + (joint > operand + ROUNDING))
        return np.exp2(joint - scale) * factor

    def moved(sizes: StepSizes, scale: float) -> Array:
        elements = np.exp2(sizes.left - scale) + np.exp2(sizes.right - scale) + np.exp2(sizes.result - scale)
        return elements * (width * sizes.products)

    def results(sizes: StepSizes, scale: float) -> Array:
        return np.exp2(sizes.result - scale) * width

    def held(sizes: StepSizes, scale: float) -> Array:
        return (np.exp2(sizes.left - scale) + np.exp2(sizes.right - scale) + np.exp2(sizes.result - scale)) * width

    def seconds(sizes: StepSizes, scale: float) -> Array:
        joint, *operands = sizes[:4]
        # rows, columns and terms of the matrix product
        sides = [joint - operand for operand in operands]
        least = np.minimum(np.minimum(sides[0], sides[1]), sides[2])
        rate = device.most_product_rate(np.exp2(np.minimum(least, LARGEST)), dtype)
        computing = np.where(sides[2] > 0, np.exp2(joint + 1 - scale) / rate, 0.0)
        elements = np.exp2(sizes.left - scale) + np.exp2(sizes.right - scale) + np.exp2(sizes.result - scale)
        moved = elements * width
        beyond = np.where(
            moved <= device.outer_cache_bytes * 2.0**-scale, device.outer_cache_bandwidth, device.bandwidth
        )
        moving = moved / np.where(moved <= device.cache_bytes * 2.0**-scale, device.cache_bandwidth, beyond)
        made = np.exp2(sizes.result - scale) * width
        large = made >= device.fresh_bytes * 2.0**-scale
        fresh = made / np.where(large, device.fresh_bandwidth, device.reused_bandwidth)
        fresh = np.where(made > device.warm_bytes * 2.0**-scale, fresh, 0.0)
        matrices = np.exp2(operands[0] + operands[1] + operands[2] - 2 * joint - scale) * matrix_seconds
        one = np.maximum(computing, moving) + fresh + matrices + device.launch_seconds * 2.0**-scale
        return one * sizes.products

    estimates = {"flops": flops, "bytes": moved, "time": seconds, "peak": held, "retained": results}
    return estimates[objective]


class _Splits(NamedTuple):
    """All splits of the sets of k operands in two, sorted by the size of the set.

    Attributes:
        left, right, whole: the three sets of each split.
        levels: for each size of set from 2 on: the first row, the row after the last, the sets, and where in these rows
            the splits of each set begin.
        rows: the first row of each set, and the row after its last.
    """

    left: Array
    right: Array
    whole: Array
    levels: tuple[tuple[int, int, Array, Array], ...]
    rows: dict[int, tuple[int, int]]


@cached_until_cleared(MOST_CUT)
def _all_splits(operands: int) -> _Splits:
    """Return the table of the splits of all sets of so many operands."""
    left: list[int] = []
    right: list[int] = []
    whole: list[int] = []
    levels, rows = [], {}
    for size in range(2, operands + 1):
        first, starts = len(left), []
        sets = [mask for mask in range(1 << operands) if mask.bit_count() == size]
        for mask in sets:
            start = len(left)
            starts.append(start - first)
            low = mask & -mask
            part = mask ^ low
            while part:
                part = (part - 1) & (mask ^ low)
                left.append(part | low)
                right.append(mask ^ part ^ low)
            whole += [mask] * (len(left) - start)
            rows[mask] = (start, len(left))
        levels.append((first, len(left), np.array(sets), np.array(starts)))
    return _Splits(np.array(left), np.array(right), np.array(whole), tuple(levels), rows)


class OrderTree:
    """A contraction tree whose steps are products of two values, with what each is estimated to cost.

    Values have numbers: operands come first, then a value for each step; the last one is the result.

    Args:
        inputs: the axes of each operand, as numbers.
        output: the axes of the result.
        sizes: the size of each axis, as a logarithm to the base 2.
        needs: for each operand, whether its gradient is needed.
        estimate: what steps cost.
        steps: the two values that each step reads, in an order in which they can run.
    """

    def __init__(
        self,
        inputs: Sequence[Collection[int]],
        output: Iterable[int],
        sizes: Sequence[float],
        needs: Sequence[bool],
        estimate: Estimate,
        steps: Sequence[tuple[int, int]],
    ) -> None:
        self.operands, self.sizes, self.estimate = len(inputs), sizes, estimate
        self.children: list[tuple[int, int]] = [(-1, -1)] * len(inputs) + list(steps)
        self.needs = [float(need) for need in needs] + [0.0] * len(steps)
        self.axes = axes_of_values(inputs, output, steps)
        self.costs: list[float] = []
        # The sizes of values, and of what steps go over, as logarithms.
        self._size = list(map(self._size_of, self.axes))
        self._joint = [0.0] * len(inputs) + [self._joint_of(step) for step in steps]
        # How often each number was given to another value; and the parts that are in their best order, as hashes of the
        # values that they read, for there are millions of them.
        self.versions = [0] * len(self.children)
        self.settled: set[int] = set()
        for value in range(len(inputs), len(self.children)):
            a, b = self.children[value]
            self.needs[value] = max(self.needs[a], self.needs[b])
        self.rescale()

    @property
    def cost(self) -> float:
        """The logarithm to the base 2 of what all steps cost together."""
        total = math.fsum(self.costs)
        return math.log2(total) + self.scale if total else -math.inf

    def rescale(self) -> None:
        """Price all steps anew, in a unit that floats can hold."""
        size, rows = self._size, []
        for value in range(self.operands, len(self.children)):
            a, b = self.children[value]
            rows.append((self._joint[value], size[a], size[b], size[value], self.needs[a], self.needs[b]))
        columns = StepSizes(*np.array(rows, dtype=float).reshape(-1, 6).T)
        if not any(self.needs):
            columns = StepSizes(*columns[:4])
        self.scale = max(0.0, float(max(columns.joint, default=0.0)) - LARGEST)
        self.costs = [0.0] * self.operands + [float(cost) for cost in self.estimate(columns, self.scale)]

    def order(self) -> list[int]:
        """Return the steps in an order in which they can run: those that the first child needs come first."""
        order, stack = [], [len(self.children) - 1]
        while stack:
            value = stack.pop()
            if value >= self.operands:
                order.append(value)
                stack += self.children[value]
        return order[::-1]

    def path(self) -> tuple[tuple[int, ...], ...]:
        """Return the path in opt_einsum's form."""
        number: dict[int, int] = {}
        left, path = list(range(self.operands)), list[tuple[int, ...]]()
        for step in self.order():
            places = sorted(bisect.bisect_left(left, number.get(child, child)) for child in self.children[step])
            for place in reversed(places):
                del left[place]
            number[step] = self.operands + len(path)
            left.append(number[step])
            path.append(tuple(places))
        return tuple(path)

    def sweep(self, most: int, rng: random.Random | None, may_go_on: Callable[[], bool]) -> float:
        """Improve the part below each step that counts, the dearest first. Return how much the cost fell, as a share.

        Args:
            most: how many values a part reads at most.
            rng: draws the steps of a part; without it, a part has the dearest steps.
            may_go_on: says whether there is time for another part.
        """
        self.rescale()
        before = math.fsum(self.costs)
        least = LEAST_SHARE * before / self.operands
        for value in sorted(self.order(), key=lambda value: -self.costs[value]):
            if self.costs[value] >= least:
                if not may_go_on():
                    break
                self.improve(value, most, rng)
        return 1 - math.fsum(self.costs) / before if before else 0.0

    def improve(self, root: int, most: int, rng: random.Random | None = None) -> bool:
        """Search the best order of the part below a step, and return whether it is better than the present one."""
        cut, inside = self._part(root, most, rng)
        part_read = hash(frozenset((value, self.versions[value]) for value in cut))
        if len(cut) < 3 or part_read in self.settled:
            return False
        self.settled.add(part_read)
        outside, counted = frozenset(self.axes[root]), Counter[int]()
        for number, value in enumerate(cut):
            for axis in self.axes[value]:
                counted[axis] |= 1 << number
        table, steps = self._prices(cut, outside, counted)
        best = np.zeros(1 << len(cut))
        for first, end, sets, starts in table.levels:
            sums = best[table.left[first:end]] + best[table.right[first:end]] + steps[first:end]
            best[sets] = np.minimum.reduceat(sums, starts)
        before = math.fsum(self.costs[step] for step in inside)
        if not best[-1] < before * (1 - LEAST_GAIN):
            return False
        free = [step for step in inside if step != root]
        stack = [(len(best) - 1, root)]
        while stack:
            whole, step = stack.pop()
            start, end = table.rows[whole]
            sums = best[table.left[start:end]] + best[table.right[start:end]] + steps[start:end]
            row = start + int(np.argmin(sums))
            children = []
            for part in (int(table.left[row]), int(table.right[row])):
                if part.bit_count() == 1:
                    children.append(cut[part.bit_length() - 1])
                    continue
                child = free.pop()
                self.versions[child] += 1
                self.axes[child] = tuple(a for a, m in counted.items() if m & part and (m & ~part or a in outside))
                self._size[child] = self._size_of(self.axes[child])
                stack.append((part, child))
                children.append(child)
            self.children[step] = (children[0], children[1])
            self.costs[step] = float(steps[row])
        for step in reversed(self._below(root, set(inside))):
            a, b = self.children[step]
            self.needs[step] = max(self.needs[a], self.needs[b])
            self._joint[step] = self._joint_of((a, b))
        return True

    def _size_of(self, axes: Iterable[int]) -> float:
        """Return the product of the sizes of some axes, as a logarithm; exactly rounded, whatever their order."""
        return math.fsum([self.sizes[axis] for axis in axes])

    def _joint_of(self, step: tuple[int, int]) -> float:
        return self._size_of({*self.axes[step[0]], *self.axes[step[1]]})

    def _below(self, root: int, inside: set[int]) -> list[int]:
        """Return the steps of a part, each before those that it reads."""
        order = [root]
        for step in order:
            order += [child for child in self.children[step] if child in inside]
        return order

    def _part(self, root: int, most: int, rng: random.Random | None) -> tuple[list[int], list[int]]:
        """Return the values that a part reads, and its steps."""
        cut: list[int] = []
        inside: list[int] = []
        open_steps = [(-self.costs[root], root)]
        while open_steps and len(cut) + len(open_steps) < most:
            _, step = heapq.heappop(open_steps) if rng is None else open_steps.pop(rng.randrange(len(open_steps)))
            inside.append(step)
            for child in self.children[step]:
                if child < self.operands:
                    cut.append(child)
                else:
                    heapq.heappush(open_steps, (-self.costs[child], child))
        return [*cut, *(step for _, step in open_steps)], inside

    def _prices(self, cut: Sequence[int], outside: Collection[int], counted: Counter[int]) -> tuple[_Splits, Array]:
        """Return all splits of the values that a part reads, and what each costs.

        Args:
            cut: the values.
            outside: the axes of the part's result.
            counted: for each axis, the values that have it, as a bit set.
        """
        inner, held = [0.0] * (1 << len(cut)), [0.0] * (1 << len(cut))
        for axis, values in counted.items():
            held[values] += self.sizes[axis]
            if axis not in outside:
                inner[values] += self.sizes[axis]
        inside, within = _sums_over_subsets(inner), _sums_over_subsets(held)
        touch = within[-1] - within[::-1]  # an axis touches a set unless it lies within the others
        table, size = _all_splits(len(cut)), touch - inside
        left, right = table.left, table.right
        joint = touch[table.whole] - inside[left] - inside[right]
        sizes = StepSizes(joint, size[left], size[right], size[table.whole])
        mask = sum(1 << number for number, value in enumerate(cut) if self.needs[value])
        if mask:
            needed = (np.arange(1 << len(cut)) & mask != 0).astype(float)
            sizes = sizes._replace(left_needs=needed[left], right_needs=needed[right])
        with np.errstate(over="ignore"):  # steps that no float can price are in no best order
            return table, self.estimate(sizes, self.scale)


def _sums_over_subsets(entries: Sequence[float]) -> Array:
    """Return, for each bit set, the sum of the entries of its subsets."""
    sums = np.array(entries)
    for bit in range(len(entries).bit_length() - 1):
        pairs = sums.reshape(-1, 2, 1 << bit)
        pairs[:, 1] += pairs[:, 0]
    return sums


def axes_of_values(
    inputs: Sequence[Collection[int]], output: Iterable[int], steps: Sequence[tuple[int, int]]
) -> list[tuple[int, ...]]:
    """Return the axes of each value: those that its operands share with other operands or with the result.

    Sets of the axes of all values would take gigabytes for some networks of 5,000 operands.
    """
    uses = Counter(output)
    for term in inputs:
        uses.update(set(term))
    axes: list[tuple[int, ...]] = []
    counts: list[dict[int, int] | None] = []
    for term in inputs:
        counts.append({axis: 1 for axis in term if uses[axis] > 1})
        axes.append(tuple(counts[-1] or ()))
    for a, b in steps:
        both = Counter(counts[a])
        both.update(counts[b] or ())
        counts[a] = counts[b] = None
        counts.append({axis: count for axis, count in both.items() if count < uses[axis]})
        axes.append(tuple(counts[-1] or ()))
    return axes
