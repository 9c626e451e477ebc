"""A resolved spec as a network in which each index array is a one-hot factor, and the legal steps on it.

Each distinct gather ``q[n]`` of size M is a factor E[n, m] = 1 where q[n] = m, with a *pool axis* m of its own.
Two uses of one gather share E, since E[n, m] E[n, m'] = E[n, m] where m = m', else 0. So E may be used in one place,
after the operands that hold m were joined on m, or in several, on each operand before they meet.

A value in the search is a set of operands, multiplied and summed as far as the outside allows, and for each E
a *status*:

    POOL     E is not used yet; the value still has the pool axis m (if any of its operands has it)
    ROWS     E was used as a take: m is replaced by the row axes
    SCATTER  E was used as a segment sum: the row axes are summed (unless others need them) and m is there

Axes are bits of an integer, sets of operands likewise.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from planner.language.spec import Gather, Spec, Term, unused_letters

__all__ = ["POOL", "ROWS", "SCATTER", "Network", "Status", "Value"]

POOL, ROWS, SCATTER = 0, 1, 2
Status = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A value of the search: its operands (a bit set) and the status of each one-hot factor."""

    operands: int
    status: Status


def _targets(options: list[tuple[int, ...]], few: bool) -> Iterator[Status]:
    """Statuses to try: every combination, or only one factor at a time and all of them at once."""
    if not few:
        yield from itertools.product(*options)
        return
    stay = tuple(choices[0] for choices in options)
    tried = dict.fromkeys([stay])
    for factor, choices in enumerate(options):
        for target in choices[1:]:
            tried[(*stay[:factor], target, *stay[factor + 1 :])] = None
    for level in (ROWS, SCATTER):
        tried[tuple(max((c for c in choices if c <= level), default=choices[0]) for choices in options)] = None
    yield from tried


def bits(mask: int) -> Iterator[int]:
    """Numbers of the set bits, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Network:
    """The one-hot network of a resolved spec.

    Args:
        spec: a resolved spec.
        few: leave most combinations of statuses out, for specs with many index arrays: then a step changes one factor's
            status, or all.

    Attributes:
        spec: the spec, with the sizes of the pool axes added.
        leaves: each operand's term with pool axes in place of gathers.
        result: the output's term, likewise.
    """

    def __init__(self, spec: Spec, few: bool = False) -> None:
        self.few = few
        gathers = spec.gathers
        used = {axis for axis, _ in spec.sizes} | set(spec.arrays)
        pools = dict(zip(gathers, unused_letters(used, len(gathers)), strict=True))
        sizes = dict(spec.sizes) | {pool: spec.size(gather) for gather, pool in pools.items()}
        self.spec = dataclasses.replace(spec, sizes=tuple(sorted(sizes.items())))
        self.sizes = sizes
        self.gathers = gathers
        self.leaves = tuple(tuple(pools[e] if isinstance(e, Gather) else e for e in t) for t in spec.inputs)
        self.result = tuple(pools[e] if isinstance(e, Gather) else e for e in spec.output)
        # Output axes first: intermediates then tend to have the result's layout.
        order = dict.fromkeys(self.result)
        for term in self.leaves:
            order.update(dict.fromkeys(term))
        for gather in gathers:
            order.update(dict.fromkeys(gather.axes))
        self.axes = tuple(order)
        self._bit = {axis: 1 << i for i, axis in enumerate(self.axes)}
        self._leaf_masks = [self.mask(term) for term in self.leaves]
        self.result_mask = self.mask(self.result)
        self.pools = [self._bit[pools[g]] for g in gathers]
        self.rows = [self.mask(g.axes) for g in gathers]
        self.everything = (1 << len(self.leaves)) - 1
        self._union_cache: dict[int, int] = {0: 0}
        self._axes_cache: dict[tuple[int, Status], int] = {}
        self.open = (POOL,) * len(gathers)
        self.final: Status = tuple(SCATTER if pool & self.result_mask else ROWS for pool in self.pools)

    def mask(self, term: Term | str) -> int:
        """Bit set of a term's axes."""
        mask = 0
        for axis in term:
            mask |= self._bit[axis]  # type: ignore[index]
        return mask

    def term(self, mask: int) -> tuple[str, ...]:
        """Axes of a bit set in the network's order."""
        return tuple(self.axes[i] for i in bits(mask))

    def elements(self, mask: int) -> int:
        """Product of the sizes of a bit set of axes."""
        product = 1
        for i in bits(mask):
            product *= self.sizes[self.axes[i]]
        return product

    def union(self, operands: int) -> int:
        """Axes of a set of operands, in pool form."""
        known = self._union_cache.get(operands)
        if known is None:
            low = operands & -operands
            known = self.union(operands ^ low) | self._leaf_masks[low.bit_length() - 1]
            self._union_cache[operands] = known
        return known

    def value_axes(self, value: Value) -> int:
        """Axes that a value has: its operands' and factors', less what is summed already."""
        key = (value.operands, value.status)
        known = self._axes_cache.get(key)
        if known is not None:
            return known
        here = self.union(value.operands)
        needed = self.union(self.everything ^ value.operands) | self.result_mask
        outside = needed
        for status, pool, rows in zip(value.status, self.pools, self.rows, strict=True):
            if status == POOL:
                needed |= rows | pool
            elif status == ROWS:
                here = here & ~pool | rows
                if pool & outside:  # the factor will be used again, on the others or on the result
                    needed |= rows
            else:
                here |= pool | rows  # the factor brings its row axes where others need them
        known = here & needed
        self._axes_cache[key] = known
        return known

    # -- legal steps ---------------------------------------------------------------------------------

    def closable(self, operands: int, factor: int, status: Status) -> bool:
        """Whether a factor may become a segment sum on this set of operands."""
        rows = self.rows[factor]
        outside = self.union(self.everything ^ operands) | self.result_mask
        if not self._open(operands, factor):
            return False
        if operands == self.everything:
            return True
        # Else it must sum over some row axis: [rows, m] with all rows kept would only blow up.
        others = outside
        for f, (state, r, p) in enumerate(zip(status, self.rows, self.pools, strict=True)):
            if f != factor and (state == POOL or (state == ROWS and p & outside)):
                others |= r
        return bool(rows & ~others)

    def advances(self, value: Value) -> Iterator[Status]:
        """Statuses that a unary step can reach from a value."""
        axes = self.value_axes(value)
        options: list[tuple[int, ...]] = []
        for f, status in enumerate(value.status):
            targets = [status]
            if status == POOL and axes & self.pools[f]:
                targets.append(ROWS)
            meets = status == ROWS or axes & (self.pools[f] | self.rows[f]) or self._alone(f)
            if status != SCATTER and meets and self._open(value.operands, f):
                targets.append(SCATTER)
            options.append(tuple(targets))
        for after in _targets(options, self.few):
            if after != value.status and self._closing_legal(value.operands, value.status, after):
                yield after

    def _alone(self, factor: int) -> bool:
        """Whether no operand has any axis of the factor, so that the result must bring it in."""
        return not self.union(self.everything) & (self.pools[factor] | self.rows[factor])

    def _open(self, operands: int, factor: int) -> bool:
        """Whether the outside of a set of operands has a factor's pool axis."""
        return bool(self.pools[factor] & (self.union(self.everything ^ operands) | self.result_mask))

    def _closing_legal(self, operands: int, before: Status, after: Status) -> bool:
        return all(
            b == a or a != SCATTER or self.closable(operands, f, after)
            for f, (b, a) in enumerate(zip(before, after, strict=True))
        )

    def merges(self, a: Value, b: Value) -> Iterator[Status]:
        """Statuses that the product of two values can have."""
        axes_a, axes_b = self.value_axes(a), self.value_axes(b)
        operands = a.operands | b.operands
        options: list[tuple[int, ...]] = []
        for f, (left, right) in enumerate(zip(a.status, b.status, strict=True)):
            pool = self.pools[f]
            if left == right == POOL:
                targets = [POOL]
                if (axes_a | axes_b) & pool:
                    targets.append(ROWS)
                if (axes_a | axes_b) & (pool | self.rows[f]) and self._open(operands, f):
                    targets.append(SCATTER)
            elif SCATTER in (left, right):
                if ROWS in (left, right) or left == right:
                    return
                targets = [SCATTER]
            else:
                targets = [ROWS, SCATTER] if self._open(operands, f) else [ROWS]
            options.append(tuple(targets))
        before = tuple(max(pair) for pair in zip(a.status, b.status, strict=True))
        for status in _targets(options, self.few):
            if self._closing_legal(operands, before, status):
                yield status

    # -- the spec of a step --------------------------------------------------------------------------

    def input_term(self, value: Value, after: Status, fixed: tuple[str, ...] | None = None) -> Term:
        """Term of a value as the input of a step that leads to `after`: pool axes that are taken become gathers."""
        taken = {
            self.axes[pool.bit_length() - 1]: gather
            for pool, gather, old, new in zip(self.pools, self.gathers, value.status, after, strict=True)
            if old == POOL and new != POOL
        }
        term = self.term(self.value_axes(value)) if fixed is None else fixed
        # A merge with a segment-summed value (SCATTER with POOL) joins on the pool axis, it does not take.
        return tuple(taken.get(axis, axis) for axis in term)

    def step_spec(self, inputs: tuple[tuple[Value, tuple[str, ...] | None], ...], result: Value) -> Spec:
        """Spec of the step from one or two values to another; a value may come with its own axis order."""
        after = list(result.status)
        joined = tuple(max(s) for s in zip(*(value.status for value, _ in inputs), strict=True))
        for f, (before, new) in enumerate(zip(joined, result.status, strict=True)):
            if before == SCATTER == new:
                after[f] = POOL  # summed before: the others meet it on the pool axis
        terms = tuple(self.input_term(value, tuple(after), fixed) for value, fixed in inputs)
        scattered = {
            self.axes[pool.bit_length() - 1]: gather
            for pool, gather, before, new in zip(self.pools, self.gathers, joined, result.status, strict=True)
            if before != SCATTER and new == SCATTER
        }
        axes = self.value_axes(result)
        order = self.term(axes)
        if result == Value(self.everything, self.final) and set(self.result) == set(order):
            order = tuple(dict.fromkeys(self.result))
        output = tuple(scattered.get(axis, axis) for axis in order)
        return self.restricted(Spec(terms, output))

    def restricted(self, spec: Spec) -> Spec:
        """Give a step's spec the sizes of its own axes."""
        named = {axis for term in spec.terms for e in term for axis in (e.axes if isinstance(e, Gather) else e)}
        return dataclasses.replace(spec, sizes=tuple(sorted((axis, self.sizes[axis]) for axis in named)))
