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
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from planner.language.cached import cached_by_step
from planner.language.spec import Spec, Term, entry_axes, pool_letters, replace_gathers

POOL, ROWS, SCATTER = 0, 1, 2
# Networks of so many operands share what does not depend on sizes.
MOST_SHARED = 4
# XLA takes runs of so many elements faster if they stay together: 1.0 times as long as with einsum, instead of 1.4 to
# 1.8. With runs of 4, gradients take 1.6 times as long that way (one core of an Intel Xeon, JAX 0.10.2, 2026-11-28).
LONG_RUN = 8
Status = tuple[int, ...]
Bits = Any  # an integer, or an array of integers


class Value(NamedTuple):
    """A value of the search: its operands (a bit set) and the status of each one-hot factor.

    It has a number: the bits of its operands, and above them the number of its status among all statuses.
    """

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
    """What `Network.value_axes`, and `advances` and `merges`, returned."""

    axes: dict[tuple[int, Status], int]
    steps: dict[Any, tuple[Status, ...]]


@cached_by_step
def _facts_of(*terms: Any) -> _Facts:
    """Return what is known of networks of some terms, at first nothing."""
    return _Facts({}, {})


class Network:
    """The one-hot network of a resolved spec.

    Args:
        spec: a resolved spec.
        few: whether to leave out most combinations of statuses, for specs with many index arrays. Then a step changes
            the status of one factor, or of all.
        keeps_order: whether what is taken or added up has its operand's order; else only if `LONG_RUN` asks for it.
        keeps_sums: whether what is added up without gathers has its operand's order.

    Attributes:
        spec: the spec, with the sizes of the pool axes added.
        leaves: each operand's term with pool axes in place of gathers.
        result: the output's term, likewise.
    """

    def __init__(self, spec: Spec, few: bool = False, keeps_order: bool = False, keeps_sums: bool = False) -> None:
        self.few, self.keeps_order, self.keeps_sums = few, keeps_order, keeps_sums and not spec.gathers
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
        self._leaf_orders = [
            tuple(dict.fromkeys((*itertools.chain(*[(axis, *entry_axes(entry)) for axis, entry in pairs]), *order)))
            for pairs in (zip(*terms, strict=True) for terms in zip(self.leaves, spec.inputs, strict=True) if gathers)
        ]
        self._bit = {axis: 1 << i for i, axis in enumerate(self.axes)}
        self.wide = self.mask([axis for axis in self.axes if sizes[axis] != 1])
        self._leaf_masks = [self.mask(term) for term in self.leaves]
        self.result_mask = self.mask(self.result)
        self.pools = [self._bit[pools[g]] for g in gathers]
        self.rows = [self.mask(g.axes) for g in gathers]
        self.everything = (1 << len(self.leaves)) - 1
        self._union_cache: dict[int, int] = {0: 0}
        # What does not depend on sizes is found once for all small networks of the same terms.
        facts = _Facts({}, {})
        if gathers and len(self.leaves) <= MOST_SHARED:
            # The letter of a pool is part of the key: in `q[c]b` and in `aq[c]` both leaves are `ab`.
            factors = tuple((pools[gather], gather.array, gather.axes) for gather in gathers)
            facts = _facts_of(self.leaves, self.result, factors, few)
        self._axes_cache: dict[tuple[int, Status], int] = facts.axes
        self._steps = facts.steps
        self._factor_axes = sum(self.pools) | functools.reduce(operator.or_, self.rows, 0)
        self.open = (POOL,) * len(gathers)
        self.final: Status = tuple(SCATTER if pool & self.result_mask else ROWS for pool in self.pools)

    @functools.cached_property
    def statuses(self) -> list[Status]:
        """All statuses that values may have, in the order of their numbers."""
        return list(itertools.product((POOL, ROWS, SCATTER), repeat=len(self.gathers)))

    def number(self, value: Value) -> int:
        """Return the number of a value."""
        status = 0
        for state in value.status:
            status = 3 * status + state
        return status << len(self.leaves) | value.operands

    def value(self, number: int) -> Value:
        """Return the value of a number."""
        return Value(number & self.everything, self.statuses[number >> len(self.leaves)])

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
        axes: int = self.axes_with(self.union(value.operands), self.outside(value.operands), value.status)
        self._axes_cache[key] = axes
        return axes

    def outside(self, operands: int) -> int:
        """Return the axes that the other operands and the result have, with pool axes in place of gathers."""
        return self.union(self.everything ^ operands) | self.result_mask

    def axes_with(self, union: Bits, outside: Bits, status: Status) -> Bits:
        """Return the axes of a value from those of its operands, those outside, and its status."""
        axes, needed = union, outside
        for state, pool, rows in zip(status, self.pools, self.rows, strict=True):
            if state == POOL:
                needed = needed | rows | pool
            elif state == ROWS:
                axes = axes & ~pool | rows
                # The factor will be applied again, to the others or to the result.
                needed = needed | rows * (pool & outside != 0)
            else:
                axes = axes | pool | rows  # the factor brings its row axes if others need them
        return axes & needed

    def value_term(self, value: Value) -> tuple[str, ...]:
        """Return the axes of a value in the network's order; those of the whole product in the result's.

        With `keeps_order`, what is taken from an operand, or added up, has the operand's order, with the row axes in
        the place of the pool axis, unless they come last. Without it the order is kept only where another one would
        tear apart runs of `LONG_RUN` elements or more, or for sums with `keeps_sums`.
        """
        axes = self.value_axes(value)
        order = self.term(axes)
        if value == Value(self.everything, self.final) and set(self.result) == set(order):
            return tuple(dict.fromkeys(self.result))
        is_single = value.operands & (value.operands - 1) == 0
        if is_single and self.keeps_sums:
            leaf = self.leaves[value.operands.bit_length() - 1]
            return tuple([axis for axis in dict.fromkeys(leaf) if axis in order])
        if value.status != self.open and is_single:
            leaf = self._leaf_orders[value.operands.bit_length() - 1]
            own = tuple([axis for axis in leaf if axes & self._bit[axis]])
            torn = own and own[-1] != order[-1] and self.sizes[own[-1]] >= LONG_RUN
            if own and (self.keeps_order or torn) and not self._bit[own[-1]] & self._factor_axes:
                return own
        return order

    # -- legal steps ---------------------------------------------------------------------------------
    # `axes` are those of the values that a step reads, `outside` those that others or the result have, and `whole` says
    # whether the step computes the product of all operands. All may be arrays, of many steps.

    def can_advance(self, before: Status, after: Status, axes: Bits, outside: Bits, whole: Bits) -> Any:
        """Whether a step on one value may lead from one status to another."""
        legal: Any = before != after
        for f, (old, new) in enumerate(zip(before, after, strict=True)):
            legal = legal & self._advances_to(f, old, new, axes, outside)
        return legal & self._may_close(before, after, outside, whole)

    def can_merge(self, a: Status, b: Status, after: Status, axes: Bits, outside: Bits, whole: Bits) -> Any:
        """Whether a product of values with two statuses may have another."""
        before = tuple(map(max, a, b))
        legal: Any = True
        met = axes | self._taken([f for f, old in enumerate(before) if old == POOL], axes)
        for f, new in enumerate(after):
            legal = legal & self._merges_to(f, a[f], b[f], new, met, axes, outside)
        # A step may add up rows that it takes itself, if all of their axes are there then.
        met = axes | self._taken([f for f, old in enumerate(before) if old == POOL and after[f] == ROWS], axes)
        for old, new, pool, rows in zip(before, after, self.pools, self.rows, strict=True):
            if old == POOL and new == SCATTER:
                legal = legal & ((axes & (pool | rows) != 0) | (rows & ~met == 0))
        return legal & self._may_close(before, after, outside, whole)

    def _taken(self, factors: Iterable[int], axes: Bits) -> Bits:
        """Return the row axes of those of some factors whose rows a step on values with these axes can take."""
        rows: Bits = 0
        for f in factors:
            rows = rows | self.rows[f] * (axes & self.pools[f] != 0)
        return rows

    def _advances_to(self, factor: int, old: int, new: int, axes: Bits, outside: Bits) -> Any:
        pool, rows = self.pools[factor], self.rows[factor]
        if new <= old:
            return new == old
        if new == ROWS:
            return axes & pool != 0
        # If no operand has any axis of the factor, only the result has its axes.
        alone = not self.union(self.everything) & (pool | rows)
        return (pool & outside != 0) & (old == ROWS or alone or axes & (pool | rows) != 0)

    def _merges_to(self, factor: int, a: int, b: int, new: int, met: Bits, axes: Bits, outside: Bits) -> Any:
        pool, rows = self.pools[factor], self.rows[factor]
        if SCATTER in (a, b):
            return new == SCATTER and POOL in (a, b)
        if new < max(a, b):
            return False
        if new == SCATTER:
            return (pool & outside != 0) & (ROWS in (a, b) or met & (pool | rows) != 0)
        return True if new == max(a, b) else axes & pool != 0

    def _may_close(self, before: Status, after: Status, outside: Bits, whole: Bits) -> Any:
        """Whether all factors that become segment sums may do so."""
        legal: Any = True
        for f, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new and new == SCATTER:
                # It must sum over some row axis. If all rows stayed, the value would only grow.
                others = outside
                for g, (state, pool, rows) in enumerate(zip(after, self.pools, self.rows, strict=True)):
                    if g != f and state != SCATTER:
                        others = others | (rows if state == POOL else rows * (pool & outside != 0))
                legal = legal & (self.pools[f] & outside != 0) & (whole | (self.rows[f] & ~others != 0))
        return legal

    def advances(self, value: Value) -> tuple[Status, ...]:
        """Return the statuses that a unary step can reach from a value."""
        where = self._where(value.operands, self.value_axes(value))
        found = self._steps.get((value.status, where))
        if found is None:
            options = [
                tuple([new for new in range(old, SCATTER + 1) if self._advances_to(f, old, new, *where[:2])])
                for f, old in enumerate(value.status)
            ]
            found = tuple([s for s in _targets(options, self.few) if self.can_advance(value.status, s, *where)])
            self._steps[value.status, where] = found
        return found

    def merges(self, a: Value, b: Value) -> tuple[Status, ...]:
        """Return the statuses that the product of two values can have."""
        where = self._where(a.operands | b.operands, self.value_axes(a) | self.value_axes(b))
        found = self._steps.get((a.status, b.status, where))
        if found is None:
            axes, outside, _ = where
            pairs = list(zip(a.status, b.status, strict=True))
            met = axes | self._taken([f for f, pair in enumerate(pairs) if max(pair) == POOL], axes)
            options = [
                tuple([new for new in range(SCATTER + 1) if self._merges_to(f, *pair, new, met, axes, outside)])
                for f, pair in enumerate(pairs)
            ]
            targets = _targets(options, self.few) if all(options) else ()
            found = tuple([status for status in targets if self.can_merge(a.status, b.status, status, *where)])
            self._steps[a.status, b.status, where] = found
        return found

    def _where(self, operands: int, axes: int) -> tuple[int, int, bool]:
        """Return what the legal steps on values of some operands depend on, but for their statuses."""
        return axes & self._factor_axes, self.outside(operands) & self._factor_axes, operands == self.everything

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
