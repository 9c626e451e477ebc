"""A resolved spec as a network in which each index array is a one-hot factor, and the legal steps on it.

Each distinct gather ``q[n]`` of size M is a factor E with a *pool axis* m of its own: E[n, m] is 1 where q[n] = m, else
0. Applying the same index twice changes nothing: E[n, m] E[n, m'] is E[n, m] where m = m', else 0. So all uses of a
gather share one E. It can be applied once, after the operands that have m were multiplied, or to each operand before
they are multiplied.

A value of the search is a product of a set of operands. Each axis that no other operand and not the result needs is
summed. Each factor E has a *status* in the value:

    POOL     E is not applied yet. The value still has the pool axis m if any of its operands has it.
    ROWS     E was applied as a take: the row axes stand in place of m.
    SCATTER  E was applied as a segment sum: the value has m, and the row axes are summed unless others need them.

Sets of axes and sets of operands are the bits of an integer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from planner.language.cached import cached_by_step
from planner.language.spec import Spec, Term, entry_axes, pool_letters, replace_gathers

__all__ = ["POOL", "ROWS", "SCATTER", "Network", "Status", "Value"]

POOL, ROWS, SCATTER = 0, 1, 2
# Networks of so many operands share what does not depend on sizes.
MOST_SHARED = 4
Status = tuple[int, ...]


class Value(NamedTuple):
    """A value of the search: its operands (a bit set) and the status of each one-hot factor."""

    operands: int
    status: Status


def _targets(options: list[tuple[int, ...]], few: bool) -> Iterator[Status]:
    """Yield the statuses to try: every combination; or if `few`, changes of one factor, and of all factors at once."""
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
    """Yield the numbers of the bits that are set, in ascending order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _Facts(NamedTuple):
    """What `Network.value_axes`, `advances` and `merges` returned."""

    axes: dict[tuple[int, Status], int]
    advances: dict[Value, tuple[Status, ...]]
    merges: dict[tuple[Value, Value], tuple[Status, ...]]


@cached_by_step
def _facts_of(*terms: Any) -> _Facts:
    """Return what is known of networks of some terms, at first nothing."""
    return _Facts({}, {}, {})


class Network:
    """The one-hot network of a resolved spec.

    Args:
        spec: a resolved spec.
        few: whether to leave out most combinations of statuses, for specs with many index arrays. Then a step changes
            the status of one factor, or of all.

    Attributes:
        spec: the spec, with the sizes of the pool axes added.
        leaves: each operand's term with pool axes in place of gathers.
        result: the output's term, likewise.
    """

    def __init__(self, spec: Spec, few: bool = False) -> None:
        self.few = few
        gathers = spec.gathers
        pools = dict(zip(gathers, pool_letters(spec), strict=True))
        sizes = {**spec.by_axis, **{pool: spec.size(gather) for gather, pool in pools.items()}}
        self.spec = dataclasses.replace(spec, sizes=tuple(sorted(sizes.items()))) if gathers else spec
        self.sizes = sizes
        self.gathers = gathers
        self.leaves = tuple(replace_gathers(term, pools.__getitem__) for term in spec.inputs)
        self.result = replace_gathers(spec.output, pools.__getitem__)
        # The output's axes come first, so that intermediates tend to have the result's layout.
        # The row axes of a gather stand in the place of its pool axis: rows are taken and added up one after the other.
        order: dict[str, None] = {}
        for leaf, term in ((self.result, spec.output), *zip(self.leaves, spec.inputs, strict=True)):
            for axis, entry in zip(leaf, term, strict=True):
                order.update(dict.fromkeys((axis, *entry_axes(entry))))
        self.axes = tuple(order)
        self._bit = {axis: 1 << i for i, axis in enumerate(self.axes)}
        self.wide = self.mask([axis for axis in self.axes if sizes[axis] != 1])
        self._leaf_masks = [self.mask(term) for term in self.leaves]
        self.result_mask = self.mask(self.result)
        self.pools = [self._bit[pools[g]] for g in gathers]
        self.rows = [self.mask(g.axes) for g in gathers]
        self.everything = (1 << len(self.leaves)) - 1
        self._union_cache: dict[int, int] = {0: 0}
        # What does not depend on sizes is found once for all small networks of the same terms.
        facts = _Facts({}, {}, {})
        if gathers and len(self.leaves) <= MOST_SHARED:
            # The letter of a pool is part of the key: in `q[c]b` and in `aq[c]` both leaves are `ab`.
            factors = tuple((pools[gather], gather.array, gather.axes) for gather in gathers)
            facts = _facts_of(self.leaves, self.result, factors, few)
        self._axes_cache: dict[tuple[int, Status], int] = facts.axes
        self._advances, self._merges = facts.advances, facts.merges
        self.open = (POOL,) * len(gathers)
        self.final: Status = tuple(SCATTER if pool & self.result_mask else ROWS for pool in self.pools)

    def mask(self, term: Iterable[Any]) -> int:
        """Return the bit set of a term's axes."""
        mask = 0
        for axis in term:
            mask |= self._bit[axis]
        return mask

    def term(self, mask: int) -> tuple[str, ...]:
        """Return the axes of a bit set, in the network's order."""
        return tuple(self.axes[i] for i in bits(mask))

    def elements(self, mask: int) -> int:
        """Return the product of the sizes of the axes in a bit set."""
        product = 1
        for i in bits(mask):
            product *= self.sizes[self.axes[i]]
        return product

    def union(self, operands: int) -> int:
        """Return the axes of a set of operands, with pool axes in place of gathers."""
        axes = self._union_cache.get(operands)
        if axes is None:
            low = operands & -operands
            axes = self.union(operands ^ low) | self._leaf_masks[low.bit_length() - 1]
            self._union_cache[operands] = axes
        return axes

    def prepare(self, path: Sequence[Sequence[int]]) -> list[int]:
        """Return the sets of operands that a path joins, in its order, and remember the axes of them and of the others.

        `union` finds the axes of a set by taking one operand after the other out of it, here by its two parts.
        """
        sets = [1 << operand for operand in range(len(self.leaves))]
        joined: list[tuple[int, list[int]]] = []
        for step in path:
            parts = [sets[i] for i in step]
            for i in sorted(step, reverse=True):
                del sets[i]
            sets.append(sum(parts))
            joined.append((sets[-1], parts))
            axes = 0
            for part in parts:
                axes |= self.union(part)
            self._union_cache[sets[-1]] = axes
        for whole, parts in reversed(joined):
            outside = self.union(self.everything ^ whole)
            for part in parts if len(parts) == 2 else ():
                self._union_cache[self.everything ^ part] = outside | self.union(whole ^ part)
        return [whole for whole, _ in joined]

    def value_axes(self, value: Value) -> int:
        """Return the axes of a value: those of its operands and factors, without the ones that are summed already."""
        key = (value.operands, value.status)
        cached = self._axes_cache.get(key)
        if cached is not None:
            return cached
        axes = self.union(value.operands)
        needed = self.union(self.everything ^ value.operands) | self.result_mask
        outside = needed
        for status, pool, rows in zip(value.status, self.pools, self.rows, strict=True):
            if status == POOL:
                needed |= rows | pool
            elif status == ROWS:
                axes = axes & ~pool | rows
                if pool & outside:  # the factor will be applied again, to the others or to the result
                    needed |= rows
            else:
                axes |= pool | rows  # the factor brings its row axes if others need them
        axes &= needed
        self._axes_cache[key] = axes
        return axes

    def value_term(self, value: Value) -> tuple[str, ...]:
        """Return the axes of a value in the network's order; those of the whole product in the result's."""
        order = self.term(self.value_axes(value))
        if value == Value(self.everything, self.final) and set(self.result) == set(order):
            return tuple(dict.fromkeys(self.result))
        return order

    # -- legal steps ---------------------------------------------------------------------------------

    def closable(self, operands: int, factor: int, status: Status) -> bool:
        """Whether a factor may be applied as a segment sum to the value of this set of operands."""
        rows = self.rows[factor]
        outside = self.union(self.everything ^ operands) | self.result_mask
        if not self._open(operands, factor):
            return False
        if operands == self.everything:
            return True
        # The segment sum must sum over some row axis. If all rows stayed, the value would only grow.
        others = outside
        for f, (state, r, p) in enumerate(zip(status, self.rows, self.pools, strict=True)):
            if f != factor and (state == POOL or (state == ROWS and p & outside)):
                others |= r
        return bool(rows & ~others)

    def advances(self, value: Value) -> tuple[Status, ...]:
        """Return the statuses that a unary step can reach from a value."""
        found = self._advances.get(value)
        if found is None:
            found = self._advances[value] = tuple(self._find_advances(value))
        return found

    def _find_advances(self, value: Value) -> Iterator[Status]:
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
        """Whether no operand has any axis of the factor. Then only the result has its axes."""
        return not self.union(self.everything) & (self.pools[factor] | self.rows[factor])

    def _open(self, operands: int, factor: int) -> bool:
        """Whether another operand, or the result, has the pool axis of a factor."""
        return bool(self.pools[factor] & (self.union(self.everything ^ operands) | self.result_mask))

    def _closing_legal(self, operands: int, before: Status, after: Status) -> bool:
        """Whether all factors that become segment sums may do so."""
        return all(
            b == a or a != SCATTER or self.closable(operands, f, after)
            for f, (b, a) in enumerate(zip(before, after, strict=True))
        )

    def merges(self, a: Value, b: Value) -> tuple[Status, ...]:
        """Return the statuses that the product of two values can have."""
        found = self._merges.get((a, b))
        if found is None:
            found = self._merges[a, b] = tuple(self._find_merges(a, b))
        return found

    def _find_merges(self, a: Value, b: Value) -> Iterator[Status]:
        axes_a, axes_b = self.value_axes(a), self.value_axes(b)
        operands, axes = a.operands | b.operands, axes_a | axes_b
        before = tuple(max(pair) for pair in zip(a.status, b.status, strict=True))
        takes = [f for f, status in enumerate(before) if status == POOL and axes & self.pools[f]]
        rows = self._rows_of(takes)
        options: list[tuple[int, ...]] = []
        for f, (left, right) in enumerate(zip(a.status, b.status, strict=True)):
            pool = self.pools[f]
            if left == right == POOL:
                targets = [POOL]
                if axes & pool:
                    targets.append(ROWS)
                if (axes | rows) & (pool | self.rows[f]) and self._open(operands, f):
                    targets.append(SCATTER)
            elif SCATTER in (left, right):
                if ROWS in (left, right) or left == right:
                    return
                targets = [SCATTER]
            else:
                targets = [ROWS, SCATTER] if self._open(operands, f) else [ROWS]
            options.append(tuple(targets))
        for status in _targets(options, self.few):
            # A step may add up rows that it takes itself, if all of their axes are there then.
            met = axes | self._rows_of([f for f in takes if status[f] == ROWS])
            adds = [
                f for f, (old, new) in enumerate(zip(before, status, strict=True)) if old == POOL and new == SCATTER
            ]
            meet = all([axes & (self.pools[f] | self.rows[f]) or not self.rows[f] & ~met for f in adds])
            if meet and self._closing_legal(operands, before, status):
                yield status

    def _rows_of(self, factors: Iterable[int]) -> int:
        """Return the row axes of some factors."""
        rows = 0
        for f in factors:
            rows |= self.rows[f]
        return rows

    # -- the spec of a step --------------------------------------------------------------------------

    def input_term(self, value: Value, after: Status, fixed: tuple[str, ...] | None = None) -> Term:
        """Return the term of a value as an input of a step.

        Args:
            value: the value.
            after: the status that the step leads to. Pool axes that it takes become gathers.
            fixed: the value's own axis order; None for the network's.
        """
        gathers = {
            self.axes[pool.bit_length() - 1]: gather
            for pool, gather, old, new in zip(self.pools, self.gathers, value.status, after, strict=True)
            if old == POOL and new != POOL
        }
        term = self.value_term(value) if fixed is None else fixed
        # A product with a value that is segment-summed (SCATTER with POOL) joins on the pool axis: it takes nothing.
        return tuple(gathers.get(axis, axis) for axis in term)

    def step_spec(self, inputs: tuple[tuple[Value, tuple[str, ...] | None], ...], result: Value) -> Spec:
        """Return the spec of the step from one or two values to another. A value may come with its own axis order."""
        if not self.gathers:
            plain = tuple([self.value_term(value) if fixed is None else fixed for value, fixed in inputs])
            return self.restrict(Spec(plain, self.value_term(result)))
        after = list(result.status)
        joined = tuple(max(s) for s in zip(*(value.status for value, _ in inputs), strict=True))
        for f, (before, new) in enumerate(zip(joined, result.status, strict=True)):
            if before == SCATTER == new:
                after[f] = POOL  # it was applied before: the other value joins on the pool axis
        terms = tuple(self.input_term(value, tuple(after), fixed) for value, fixed in inputs)
        scattered = {
            self.axes[pool.bit_length() - 1]: gather
            for pool, gather, before, new in zip(self.pools, self.gathers, joined, result.status, strict=True)
            if before != SCATTER and new == SCATTER
        }
        output = tuple(scattered.get(axis, axis) for axis in self.value_term(result))
        return self.restrict(Spec(terms, output))

    def restrict(self, spec: Spec) -> Spec:
        """Return the spec of a step with the sizes of its own axes only."""
        return Spec(spec.inputs, spec.output, tuple(sorted([(axis, self.sizes[axis]) for axis in spec.axes])))
