"""Exact dynamic programming over sets of operands and the status of each one-hot factor.

For every set of operands and every status (see `network`) the best ways to get there are kept: one way for an
objective that adds up over steps, a Pareto front where it does not (the peak). Every quantity of a larger tree is a
nondecreasing function of the same quantities of its subtrees, so a dominated way is never part of a best tree.

Each way is *cold* or *hot*. The backward program computes the value of a hot way again; that of a cold one it has from
the forward program (it is kept), or does without. A child's value is needed in the backward program where the sibling
needs a gradient, or where the parent is hot; a child that is needed is kept or hot, any other is cold and not kept.
So the kept values are chosen together with the tree.

How the quantities of a step S with children A, B follow from the children's. There `out` is a value's bytes, g its
gradient's:

    retained       R(S) = R(A) + R(B) + [out(child) for each child that is kept]
    forward peak   F(S) = max(F(first), R(first) + out(first) + F(second), R(A) + out(A) + R(B) + out(B) + last)
    computing a hot S again
                   Q(S) = as F(S), over the hot children, with W in place of R
    what waits     W(S) = W(A) + W(B) + [out(child) for each hot child that a gradient step of S reads]
    backward peak  G(S) = max(g(S) + alive(S), after(S))
                alive(S) = gradients made so far + scratch + values that wait        while g(S) is there
                after(S) = max(g(other) + G(first), done(first) + G(second))         once it is gone

where `last` is scratch + out(S), and `done` the bytes of the operands' gradients below. Where S is cold, each gradient
step first computes the hot children again that it reads, so alive(S) includes their Q. Where a gradient step is a view,
g(S) lives on in the child's gradient. The retained bytes R of the whole tree are alive all the time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from planner.cost.figures import StepCost
from planner.cost.layout import Layout
from planner.cost.limits import NO_LIMITS, Limits
from planner.language.dtypes import itemsize
from planner.language.errors import SearchLimitError
from planner.language.spec import Spec
from planner.program.build import Lowerer
from planner.program.ops import Cast, Einsum, JointGradient, Op, PricedImplementation
from planner.program.tree import Leaf, Node, Tree, read_by_gradients
from planner.search.network import ROWS, Network, Status, Value

__all__ = ["SearchResult", "Search", "all_splits"]

Key = tuple[int, ...]
Vector = tuple[Any, ...]
Splits = Callable[[int], Iterable[tuple[int, int]]]

FRONT_LIMIT = 128
FEW_STATUSES = 4


class Peaks(NamedTuple):
    """Bytes that peaks are made of; retained ones are not part of what concerns the backward program.

    Attributes:
        forward: peak of the forward program.
        again: peak of computing a hot value again.
        waiting: bytes below a hot value that wait for their gradient steps once it is computed again.
        held: bytes of a hot value that are its own once it is computed again.
        alive: peak of the backward program while the value's gradient is there, that one not counted.
        after: peak of the backward program from then on.
        done: bytes of the operands' gradients made below.
        stays: whether the value's gradient is one of these in the end.
    """

    forward: int = 0
    again: int = 0
    waiting: int = 0
    held: int = 0
    alive: int = 0
    after: int = 0
    done: int = 0
    stays: int = 0


NO_PEAKS = Peaks()


@dataclasses.dataclass(frozen=True, slots=True)
class PartialPlan:
    """One way to compute a value: its tree and the quantities that larger trees need.

    Attributes:
        tree: how it is computed; the root says whether it is kept.
        key: the objective's additive key of all steps below, in both programs.
        retained: bytes kept below it.
        peaks: what its peaks are made of, where the search is about them.
        bytes: bytes of its own storage: none if it is a view of an operand.
        hot: whether the backward program computes it again.
        vector: the quantities that count; of two ways alike hot, one is as good if none of its entries is larger.
    """

    tree: Tree
    key: Key
    retained: int
    peaks: Peaks
    bytes: int
    hot: bool
    vector: Vector


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """The best tree, the objective's value for it, and whether no better one exists in the space searched.

    `interrupted` says that Ctrl-C ended the search: then it is the best so far.
    """

    tree: Tree
    score: Vector
    exact: bool
    interrupted: bool = False


def all_splits(operands: int) -> Iterable[tuple[int, int]]:
    """All ways to part a set of operands in two, each once."""
    low = operands & -operands
    rest = operands ^ low
    part = (rest - 1) & rest
    while True:
        yield part | low, rest ^ part
        if not part:
            return
        part = (part - 1) & rest


def _zero() -> Key:
    return (0, 0, 0, 0)


def _add(*keys: Key) -> Key:
    return tuple(map(sum, zip(*keys, strict=True)))


class Search:
    """One search: a network, who needs gradients, how steps are lowered and what is minimised.

    Args:
        network: the one-hot network.
        requires: which operands need a gradient.
        casts: for each operand the dtype that it must be cast from, or None.
        dtype: dtype of the computation.
        lower: chooses implementations, by the objective's key.
        objective: one of `planner.cost.objective.OBJECTIVES`.
        keep: "all" for trees that keep every value that gradients read, "any" to choose.
        work_limit: number of steps that may be scored.
        limits: what a tree must not exceed.
        front_limit: most ways that are kept for one value; where there are more, the search is not exact.
        takes_first: only trees that take every operand's gathers before anything else: the naive way.
        bound: score of a tree that is known already; what exceeds it in part is not followed.
        layouts: how the operands lie in memory; intermediates are taken for row-major.
    """

    def __init__(
        self,
        network: Network,
        requires: Sequence[bool],
        casts: Sequence[str | None],
        dtype: str,
        lower: Lowerer,
        objective: str,
        keep: Literal["all", "any"],
        work_limit: int,
        limits: Limits = NO_LIMITS,
        front_limit: int = FRONT_LIMIT,
        takes_first: bool = False,
        bound: Vector | None = None,
        layouts: Sequence[Layout | None] = (),
    ) -> None:
        self.network, self.requires, self.casts, self.dtype = network, requires, casts, dtype
        self.lower, self.objective, self.keep = lower, objective, keep
        self.work, self.work_limit, self.front_limit, self.exact = 0, work_limit, front_limit, True
        self.limits = limits
        self.about_peaks = objective == "peak" or limits.memory is not None
        self.counts_retained = self.about_peaks or limits.retain is not None
        self.interrupted = False
        self.itemsize = itemsize(dtype)
        self.takes_first, self.bound = takes_first, bound
        self.layouts = layouts or (None,) * len(network.leaves)
        self.least = _zero() if bound is None else self._least()
        self.least_again = _zero()
        if objective == "retained" and keep == "any" and all(requires) and 0 not in network.sizes.values():
            # What retains nothing computes every product but the last twice.
            self.least_again = tuple(part // self._steps() for part in self.least)
        # By the number of products to come, and of those among them that imply that one is computed again.
        self._ahead = {
            (left, again): tuple(
                left * part + again * more for part, more in zip(self.least, self.least_again, strict=True)
            )
            for left in range(len(network.leaves))
            for again in (max(left - 1, 0), left)
        }
        self._needs = 0
        for operand, needed in enumerate(requires):
            self._needs |= needed << operand
        self._ways: dict[int, dict[Status, list[PartialPlan]]] = {}
        self._fixed: dict[int, tuple[str, ...] | None] = {}
        self._layouts: dict[int, Layout | None] = {}
        self.final = Value(network.everything, network.final)
        # Whether the final value lacks axes of the result, or the result repeats some. A plain spec of one
        # operand is one step in any case.
        self.one_step = len(network.leaves) == 1 and not network.gathers
        self.needs_finish = not self.one_step and (
            len(set(network.result)) < len(network.result)
            or network.mask(network.result) != network.value_axes(self.final)
        )

    def _least(self) -> Key:
        """Return what any product adds to the score at least: as much as the cheapest one of almost nothing."""
        if self.objective == "peak":
            return _zero()
        kinds = (("", "", ""), ("a", "a", "a"), ("a", "a", ""), ("a", "b", "ab"))
        # Of size 0 an outer product is the cheapest: not even its result has a byte.
        empty = [_product(terms, size) for terms in kinds for size in (0, 1)]
        first = min(self.key(self.lower(Einsum(spec, self.dtype)).cost)[0] for spec in empty)
        first *= self._steps()
        return (0, first, 0, 0) if self.objective == "retained" else (first, 0, 0, 0)

    def _steps(self) -> int:
        """Return how many products a product brings at least, its gradients counted; a fused pair needs a gather."""
        return (2 if self.network.gathers else 3) if all(self.requires) else 1

    def run(self, splits: Splits = all_splits) -> SearchResult | None:
        """Return the best tree over the given splits of the operands, or None if limits leave none."""
        ways = self.ways(self.network.everything, splits).get(self.network.final, [])
        whole = [way for unfinished in ways for way in self.finish(unfinished)]
        if not whole:
            if self.limits != NO_LIMITS or self.bound is not None:
                return None
            raise SearchLimitError(f"no tree was found for '{self.network.spec}': please report this spec")
        best = min(whole, key=lambda way: (self.score(way), way.key))
        return SearchResult(best.tree, self.score(best), self.exact, self.interrupted)

    # -- states --------------------------------------------------------------------------------------

    def ways(self, operands: int, splits: Splits) -> dict[Status, list[PartialPlan]]:
        """Best ways to each status of a set of operands."""
        known = self._ways.get(operands)
        if known is not None:
            return known
        found: dict[Status, list[PartialPlan]] = {}
        if operands & (operands - 1) == 0:
            self.leaf(operands, found)
        else:
            try:
                for left, right in splits(operands):
                    self.products(left, right, splits, found)
            except KeyboardInterrupt:
                # Whole trees are enough to answer with; a part of one is not.
                if operands != self.network.everything or not found.get(self.network.final):
                    raise
                self.exact, self.interrupted = False, True
        # Unary steps only ever raise a status, so ascending order visits each source before its targets.
        for status in tuple(found) if self.network.few else self._ascending(operands, found):
            for target in self.network.advances(Value(operands, status)):
                self.unary(Value(operands, status), target, found)
        if self.takes_first and operands != self.network.everything:
            naive = max(found, key=lambda status: (sum(s == ROWS for s in status), [-s for s in status]))
            found = {naive: found[naive]}
        elif self.network.few and operands != self.network.everything and len(found) > FEW_STATUSES:
            # The best so far, and the one from which every tree can be finished.
            taken = max(found, key=lambda status: (sum(s == ROWS for s in status), [-s for s in status]))
            order = sorted((s for s in found if found[s]), key=lambda s: min((self.part(w), w.key) for w in found[s]))
            found = {status: found[status] for status in dict.fromkeys((taken, *order[:FEW_STATUSES]))}
        self._ways[operands] = found
        return found

    def _ascending(self, operands: int, found: dict[Status, list[PartialPlan]]) -> Iterable[Status]:
        done: set[Status] = set()
        while pending := [status for status in found if status not in done]:
            status = min(pending, key=lambda s: (sum(s), s))
            done.add(status)
            yield status

    def leaf(self, operands: int, found: dict[Status, list[PartialPlan]]) -> None:
        """Offer an operand: as it is, cast, and with its repeated and private axes gone."""
        network, operand = self.network, operands.bit_length() - 1
        value = Value(operands, network.open)
        term = network.leaves[operand]
        peaks = Peaks(stays=int(self.requires[operand]))
        way = self.way(Leaf(operand), _zero(), 0, peaks, 0, False)
        shape_only = network.restricted(dataclasses.replace(network.spec, inputs=(term,), output=term))
        ways, layout = [way], self.layouts[operand]
        if (source := self.casts[operand]) is not None:
            cast = Cast(shape_only, self.dtype, source_dtype=source).with_layouts([layout])
            ways, layout = self.extend_all(cast, (way,), self.count(term), (operands,)), None
        raw, mask = ways, network.value_axes(value)
        fixed: tuple[str, ...] | None = term
        output = network.result if self.one_step else network.term(mask)
        if (term != output) if self.one_step else (len(set(term)) < len(term) or network.mask(term) != mask):
            spec = network.restricted(dataclasses.replace(network.spec, inputs=(term,), output=output))
            first = Einsum(spec, self.dtype).with_layouts([layout])
            ways = self.extend_all(first, ways, self.count(output), (operands,))
            fixed = None
        self._fixed[operands] = fixed
        self._layouts[operands] = layout if fixed is not None else None
        found[network.open] = ways
        if fixed is None and not self.one_step:
            # A take of few rows comes before the sums over axes of its own, not after: one step does both.
            for target in network.advances(value):
                spec = network.step_spec(((value, term),), Value(operands, target))
                op = Einsum(spec, self.dtype).with_layouts([layout])
                self.offer(found, target, op, (raw,), (operands,), Value(operands, target))

    def count(self, term: Iterable[str]) -> int:
        """Bytes of a value with these axes."""
        product = self.itemsize
        for axis in term:
            product *= self.network.sizes[axis]
        return product

    def products(self, left: int, right: int, splits: Splits, found: dict[Status, list[PartialPlan]]) -> None:
        """Offer every product of a value of one set of operands with one of the other."""
        network = self.network
        for status_a, ways_a in self.ways(left, splits).items():
            a = Value(left, status_a)
            for status_b, ways_b in self.ways(right, splits).items():
                b = Value(right, status_b)
                if self.hopeless(ways_a, ways_b, left, right, network.value_axes(a) | network.value_axes(b)):
                    continue
                for status in network.merges(a, b):
                    if self.takes_first and status != tuple(map(max, status_a, status_b)):
                        continue
                    result = Value(left | right, status)
                    spec = network.step_spec(((a, self.order_of(a)), (b, self.order_of(b))), result)
                    op = Einsum(spec, self.dtype).with_layouts((self.layout_of(a), self.layout_of(b)))
                    self.offer(found, status, op, (ways_a, ways_b), (left, right), result)

    def hopeless(self, ways_a: list[PartialPlan], ways_b: list[PartialPlan], left: int, right: int, axes: int) -> bool:
        """Whether no product of these ways can be part of a tree as good as the one that is known."""
        if self.bound is None:
            return False
        if not ways_a or not ways_b:
            return True
        least = [min(self.part(way) for way in ways) for ways in (ways_a, ways_b)]
        if self.objective == "peak":
            return max(least) > self.bound
        so_far = _add(*least, self.least, self.ahead(left | right, False))
        if self.objective == "flops" and not self.network.gathers:
            # Every implementation multiplies each element of the joint space at least.
            so_far = (so_far[0] + self.network.elements(axes), *so_far[1:])
        return bool(so_far > self.bound[0])

    def beaten(self, way: PartialPlan, operands: int) -> bool:
        """Whether a way cannot be part of a tree as good as the one that is known."""
        if self.bound is None:
            return False
        if self.objective == "peak":
            return self.part(way) > self.bound
        return bool(_add(self.part(way), self.ahead(operands, True)) > self.bound[0])

    def over(self, way: PartialPlan) -> bool:
        """Whether a way exceeds a limit, and so every tree that it is part of."""
        memory, retain = self.limits
        if retain is not None and way.retained > retain:
            return True
        return memory is not None and self.peak(way) > memory

    def ahead(self, operands: int, there: bool) -> Key:
        """Return what the products with all other operands add to the score at least.

        Args:
            operands: the set that a value is of.
            there: whether the value itself was computed again already, if it has to be.
        """
        left = len(self.network.leaves) - operands.bit_count()
        return self._ahead[left, max(left - there, 0)]

    @staticmethod
    def peak(way: PartialPlan) -> int:
        """Return the peak of any tree that a way is part of, at least."""
        return max(way.peaks.forward, way.retained + max(way.peaks.alive, way.peaks.after))

    def part(self, way: PartialPlan) -> Vector:
        """Return what a way adds to the score of any tree that it is part of, at least."""
        return (self.peak(way),) if self.objective == "peak" else way.key

    def unary(self, value: Value, target: Status, found: dict[Status, list[PartialPlan]]) -> None:
        """Offer the step from a value alone to another status of it."""
        result = Value(value.operands, target)
        spec = self.network.step_spec(((value, self.order_of(value)),), result)
        op = Einsum(spec, self.dtype).with_layouts([self.layout_of(value)])
        self.offer(found, target, op, (found[value.status],), (value.operands,), result)

    def layout_of(self, value: Value) -> Layout | None:
        """How an operand lies in memory; anything that was computed is taken for row-major."""
        return self._layouts.get(value.operands) if value.status == self.network.open else None

    def order_of(self, value: Value) -> tuple[str, ...] | None:
        """Axis order of a value where it is not the network's own: an operand's."""
        if value.status == self.network.open:
            return self._fixed.get(value.operands)
        return None

    def offer(
        self,
        found: dict[Status, list[PartialPlan]],
        status: Status,
        op: Op,
        fronts: tuple[list[PartialPlan], ...],
        parts: tuple[int, ...],
        result: Value,
    ) -> None:
        """Extend each combination of the children's ways by a step and keep what is not dominated."""
        front, limited = found.setdefault(status, []), self.limits != NO_LIMITS
        size = self.network.elements(self.network.value_axes(result)) * self.itemsize
        for children in itertools.product(*fronts):
            self.work += 1
            if self.work > self.work_limit:
                raise SearchLimitError(
                    f"the exact search needs more than {self.work_limit} steps: "
                    "pass optimize='greedy' or an explicit path"
                )
            for way in self.extend(op, children, size, parts):
                if not self.beaten(way, result.operands) and not (limited and self.over(way)):
                    self.insert(front, way)

    def insert(self, front: list[PartialPlan], way: PartialPlan) -> None:
        """Put a way into a Pareto front, unless another is as good; drop those that it beats."""
        for other in front:
            if (
                other.hot == way.hot
                and all(o <= w for o, w in zip(other.vector, way.vector, strict=True))
                and (other.vector != way.vector or other.key <= way.key)
            ):
                return
        front[:] = [
            o for o in front if o.hot != way.hot or not all(w <= v for w, v in zip(way.vector, o.vector, strict=True))
        ]
        front.append(way)
        if len(front) > self.front_limit and sum(o.hot == way.hot for o in front) > self.front_limit:
            self.exact = False
            self.thin(front, way.hot)

    def thin(self, front: list[PartialPlan], hot: bool) -> None:
        """Drop one way of a full front, none that is the least in retained bytes, peak or score."""
        ways = sorted((o for o in front if o.hot == hot), key=lambda w: (w.vector, w.key))
        spared = [min(ways, key=figure) for figure in (self.part, self.peak, lambda w: (w.retained, self.peak(w)))]
        # Neighbours in the order of the vectors are the most alike: one of a close pair goes.
        free = [i for i in range(1, len(ways)) if not any(ways[i] is way for way in spared)] or [len(ways) - 1]
        gone = ways[min(free, key=lambda i: abs(ways[i].retained - ways[i - 1].retained))]
        front[:] = [o for o in front if o is not gone]

    def finish(self, way: PartialPlan) -> list[PartialPlan]:
        """Add the last step where the result repeats axes or has ones that no input has."""
        if not self.needs_finish:
            return [way]
        network = self.network
        spec = network.restricted(
            dataclasses.replace(
                network.spec,
                inputs=(network.term(network.value_axes(self.final)),),
                output=network.result,
            )
        )
        size, everything = self.count(network.result), network.everything
        return [w for w in self.extend(Einsum(spec, self.dtype), (way,), size, (everything,)) if not self.over(w)]

    # -- quantities ----------------------------------------------------------------------------------

    def needs(self, operands: int) -> bool:
        """Whether any of these operands needs a gradient."""
        return bool(self._needs & operands)

    def way(self, tree: Tree, key: Key, retained: int, peaks: Peaks, size: int, hot: bool) -> PartialPlan:
        """Return a way with the vector by which it is compared."""
        vector: Vector = () if self.objective == "peak" else (key,)
        if self.counts_retained and self.objective != "retained":
            vector = (*vector, retained)
        return PartialPlan(tree, key, retained, peaks, size, hot, (*vector, *peaks) if self.about_peaks else vector)

    def score(self, way: PartialPlan) -> Vector:
        """Return what is minimised, of a complete way."""
        return (self.peak(way),) if self.objective == "peak" else (way.key,)

    def extend_all(
        self, op: Op, children: Sequence[PartialPlan], size: int, parts: tuple[int, ...]
    ) -> list[PartialPlan]:
        """Return the ways that add one unary step to any of some ways, dominated ones left out."""
        front: list[PartialPlan] = []
        for child in children:
            for way in self.extend(op, (child,), size, parts):
                self.insert(front, way)
        return front

    def extend(
        self, op: Op, children: tuple[PartialPlan, ...], size: int, parts: tuple[int, ...]
    ) -> Iterator[PartialPlan]:
        """Yield the ways that add one step to its children's ways."""
        needs = tuple(self.needs(part) for part in parts)
        choice = self.lower(op)
        gradients = self.lower.gradients(op, needs) if any(needs) else ()
        reads = read_by_gradients(needs)
        trees = tuple(way.tree for way in children)
        done = op.with_layouts(())  # how its inputs lie is for the programs to say
        own = children[0].bytes if choice.view else size
        below = [way.key for way in children]
        if self.keep == "all" and not self.about_peaks and self.objective != "retained":
            key = _add(self.key(choice.cost), *(self.key(c.cost) for _, c, _ in gradients), *below)
            yield PartialPlan(Node(done, trees), key, 0, NO_PEAKS, own, False, (key,))
            return
        # The value can be needed in the backward program only if another operand's gradient can.
        may_be_hot = self.keep == "any" and self.needs(self.network.everything ^ sum(parts))
        for hot in (False, True) if may_be_hot else (False,):
            if any(way.hot and not (read or hot) for way, read in zip(children, reads, strict=True)):
                continue  # what is not needed is not computed again
            kept = sum(way.bytes for way, read in zip(children, reads, strict=True) if (read or hot) and not way.hot)
            retained = kept + sum(way.retained for way in children)
            costs = [choice.cost, *(c.cost for _, c, _ in gradients), *[choice.cost] * hot]
            step = _add(*map(self.key, costs))
            if self.objective == "retained":
                step = (kept, *step[:3])
            key = _add(step, *below)
            if not self.about_peaks:
                yield self.way(Node(done, trees, kept=not hot), key, retained, NO_PEAKS, own, hot)
                continue
            for order in _orders(trees):
                peaks, descent = self._peaks(op, choice, gradients, children, needs, reads, order, hot)
                yield self.way(Node(done, trees, order, descent, not hot), key, retained, peaks, own, hot)

    def key(self, cost: StepCost) -> Key:
        """Return the additive part of a step's score."""
        return self.lower.key(cost)

    def _peaks(
        self,
        op: Op,
        choice: PricedImplementation,
        gradients: Sequence[tuple[Op, PricedImplementation, tuple[int, ...]]],
        children: tuple[PartialPlan, ...],
        needs: tuple[bool, ...],
        reads: tuple[bool, ...],
        order: tuple[int, ...],
        hot: bool,
    ) -> tuple[Peaks, tuple[int, ...]]:
        """Return the peaks of a step, and the best order of descent in the backward program."""
        below = [way.peaks for way in children]
        last = choice.cost.scratch_bytes + (0 if choice.view else self._output_bytes(op))

        def climb(places: Iterable[int], peaks: Sequence[int], held: Sequence[int]) -> int:
            before = top = 0
            for child in places:
                top = max(top, before + peaks[child])
                before += held[child]
            return max(top, before + last)

        forward = climb(order, [p.forward for p in below], [way.retained + way.bytes for way in children])
        # Of the children that are computed again: all that waits, and the part that this step's gradients free.
        here = [p.held if way.hot and read else 0 for p, way, read in zip(below, children, reads, strict=True)]
        again = waiting = held = 0
        if hot:
            again = climb(
                [child for child in order if children[child].hot],
                [p.again for p in below],
                [p.waiting + p.held for p in below],
            )
            waiting = sum(p.waiting for p in below) + sum(here)
            held = self._output_bytes(op) if not choice.view else below[0].held
        there = waiting
        if len(gradients) == 1 and gradients[0][1].view:
            (child,) = below
            alive = max(child.alive, gradients[0][1].cost.scratch_bytes + there)
            return Peaks(forward, again, waiting, held, alive, child.after, child.done, child.stays), (0,)
        produced = [self._input_bytes(op, i) if need else 0 for i, need in enumerate(needs)]
        alive = so_far = 0
        computed = {i for i, way in enumerate(children) if hot or not way.hot}
        for gradient, chosen, served in gradients:
            read = [i for i in order if reads[i] and (isinstance(gradient, JointGradient) or i != served[0])]
            for i in read:
                if i not in computed:
                    computed.add(i)
                    alive = max(alive, there + so_far + below[i].again)
                    there += below[i].waiting + here[i]
            so_far += sum(produced[i] for i in served)
            alive = max(alive, so_far + chosen.cost.scratch_bytes + there)
            if not isinstance(gradient, JointGradient):
                there -= sum(here[i] for i in read)
        done = [p.done + p.stays * g for p, g in zip(below, produced, strict=True)]
        best: tuple[int, tuple[int, ...]] | None = None
        for backward_order in _orders([way.tree for way in children]):
            rest, after = sum(produced) + sum(p.waiting for p in below), 0
            for i in backward_order:
                if needs[i]:
                    rest -= produced[i] + below[i].waiting
                    after = max(after, rest + max(produced[i] + below[i].alive, below[i].after))
                    rest += done[i]
            if best is None or after < best[0]:
                best = (after, backward_order)
        assert best is not None
        return Peaks(forward, again, waiting, held, alive, best[0], sum(done), 0), best[1]

    def _output_bytes(self, op: Op) -> int:
        return math.prod(op.spec.output_shape) * itemsize(op.dtype)

    def _input_bytes(self, op: Op, child: int) -> int:
        return math.prod(op.spec.shape(op.spec.inputs[child])) * itemsize(op.source_dtype or op.dtype)


def _product(terms: tuple[str, str, str], size: int) -> Spec:
    """Return the spec of a product of two terms, all axes of one size."""
    a, b, output = (tuple(term) for term in terms)
    return Spec((a, b), output, tuple((axis, size) for axis in sorted({*a, *b})))


def _orders(children: Sequence[Tree]) -> tuple[tuple[int, ...], ...]:
    """Orders that can make a difference: an operand costs nothing whenever its turn comes."""
    if len(children) == 1:
        return ((0,),)
    return ((0, 1), (1, 0)) if all(isinstance(child, Node) for child in children) else ((0, 1),)
