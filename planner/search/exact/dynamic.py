"""Exact dynamic programming over sets of operands and the status of each one-hot factor.

For every set of operands and every status (see `network`) the search keeps the best partial plans: a single one if the
objective adds up over steps, a Pareto front if it does not (the peak). Every quantity of a larger tree is a
nondecreasing function of the same quantities of its subtrees. So a dominated partial plan is never part of a best tree.

A partial plan is *saved* or *recomputed*. The backward program computes the value of a recomputed one again. It finds
the value of a saved one among the values that the forward program kept, or does not need it. The backward program needs
a child's value in two cases: a gradient step reads it because the sibling needs a gradient, or the parent is
recomputed. A saved child is kept only if it is needed, and only a needed child may be recomputed. So the search chooses
the kept values together with the tree.

The quantities of a step S with children A and B follow from the children's. Below, `out` is the size of a value in
bytes and g the size of its gradient:

    retained         R(S) = R(A) + R(B) + [out(child) for each child that is kept]
    forward peak     F(S) = max(F(first), R(first) + out(first) + F(second), R(A) + out(A) + R(B) + out(B) + last)
    recompute peak   Q(S) = the same as F(S), over the recomputed children, with W in place of R
    waiting          W(S) = W(A) + W(B) + [out(child) for each recomputed child that a gradient step of S reads]
    backward peak    G(S) = max(g(S) + alive(S), after(S))
                 alive(S) = the children's gradients computed so far + scratch + waiting values   while g(S) is alive
                 after(S) = max(g(other) + G(first), finished(first) + G(second))                 once g(S) is freed

where `last` is scratch + out(S), and `finished` is the size of the operands' gradients computed below. If S is saved,
each gradient step first recomputes the children that it reads, so alive(S) includes their Q. If a gradient step is a
view, g(S) lives on in the child's gradient. The retained bytes R of the whole tree are alive all the time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from planner.cost.figures import StepCost
from planner.cost.limits import NO_LIMITS, Limits
from planner.language.dtypes import itemsize
from planner.language.errors import SearchLimitError
from planner.language.spec import Spec
from planner.program.build import GradientStep, Lowerer, Names
from planner.program.ops import Einsum, JointGradient, Op, PricedImplementation
from planner.program.tree import Leaf, Node, Tree, read_by_gradients
from planner.search.exact.implementations import Choice, Implementations
from planner.search.exact.network import ROWS, Status, Value
from planner.search.exact.steps import (
    Key,
    NetworkSteps,
    SearchEnded,
    SearchResult,
    Splits,
    Vector,
    add_keys,
    all_splits,
    ascending,
)

FRONT_LIMIT = 128
FEW_STATUSES = 4


class Peaks(NamedTuple):
    """The bytes that peaks are made of. The backward program's do not count the retained bytes.

    Attributes:
        forward: peak of the forward program.
        recompute: peak of computing a recomputed value again.
        waiting: bytes below a recomputed value that wait for their gradient steps once the value is computed again.
        held: bytes that a recomputed value itself takes once it is computed again.
        alive: peak of the backward program while the value's gradient is alive. The gradient itself is not counted.
        after: peak of the backward program from then on.
        finished: bytes of the operands' gradients computed below.
        is_result: 1 if the value's gradient is one of these in the end, else 0.
    """

    forward: int = 0
    recompute: int = 0
    waiting: int = 0
    held: int = 0
    alive: int = 0
    after: int = 0
    finished: int = 0
    is_result: int = 0


NO_PEAKS = Peaks()


@dataclasses.dataclass(frozen=True, slots=True)
class PartialPlan:
    """A plan for one value of the search: its tree, and the quantities that larger trees need.

    Attributes:
        tree: the steps that compute the value. The root says whether the value is kept.
        key: the objective's additive key, summed over all steps below in both programs.
        retained: bytes kept below the value.
        peaks: what its peaks are made of; all 0 if neither the objective nor a limit is about peaks.
        bytes: bytes of the value's own storage: 0 if it is a view of an operand.
        recomputed: whether the backward program computes the value again.
        vector: the quantities that are compared. Of two partial plans that are both saved, or both recomputed, one is
            at least as good as the other if no entry of its vector is larger.
        names: the rows of the steps below whose implementations are not all the best by the objective.
    """

    tree: Tree
    key: Key
    retained: int
    peaks: Peaks
    bytes: int
    recomputed: bool
    vector: Vector
    names: Names = ()

    def is_as_good_as(self, other: PartialPlan) -> bool:
        """Whether both are saved, or both recomputed, and no entry of this plan's vector is larger."""
        return self.recomputed == other.recomputed and all(map(operator.le, self.vector, other.vector))


@dataclasses.dataclass(frozen=True, slots=True)
class _PricedStep:
    """What extending partial plans by a step needs to know of the step.

    Attributes:
        op: the step in a tree, without layouts: the programs find out how inputs lie in memory.
        choice: its implementation.
        bytes: the bytes that it allocates for its result; 0 if that is a view.
        gradients: the steps that compute the gradients of what it reads.
        needs: for each value that it reads, whether its gradient is needed.
        reads: for each of these values, whether a gradient step reads it.
        produced: for each of these values, the bytes of its gradient, or 0 if that is not needed; empty unless peaks
            count.
        key: what the step and its gradient steps add to the score.
        again: the same, if the backward program runs the step a second time.
        may_be_recomputed: whether the backward program may do that.
        names: its row if that is not the best, and those of its gradient steps if not all of them are.
    """

    op: Op
    choice: PricedImplementation
    bytes: int
    gradients: Sequence[GradientStep]
    needs: tuple[bool, ...]
    reads: tuple[bool, ...]
    produced: tuple[int, ...]
    key: Key
    again: Key
    may_be_recomputed: bool
    names: Names


# The best partial plans for one set of operands and one status, and those for each status.
Front = list[PartialPlan]
Fronts = dict[Status, Front]


def _zero() -> Key:
    return (0, 0, 0, 0)


class Search:
    """One search: the steps of a network, the operands that need gradients, how steps are lowered, what is minimised.

    Args:
        steps: the steps on the network.
        requires: for each operand, whether it needs a gradient.
        lower: chooses the best implementation of each step by the objective's key; see `Implementations` for others.
        objective: one of `planner.cost.objective.OBJECTIVES`.
        keep: "all" to keep every value that gradients read, "any" to choose what is kept.
        work_limit: the search fails if it would score more steps than this.
        limits: the memory and retain limits that every tree must meet.
        front_limit: most partial plans kept for one value. If a front grows beyond it, the search is not exact.
        takes_first: whether to search only the trees that gather every operand before anything else, the naive plan.
        bound: score of a tree that is already known. Partial plans that exceed it are dropped.
        ends: the time of `time.monotonic` at which to end, or None.
    """

    def __init__(
        self,
        steps: NetworkSteps,
        requires: Sequence[bool],
        lower: Lowerer,
        objective: str,
        keep: Literal["all", "any"],
        work_limit: int,
        limits: Limits = NO_LIMITS,
        front_limit: int = FRONT_LIMIT,
        takes_first: bool = False,
        bound: Vector | None = None,
        ends: float | None = None,
    ) -> None:
        self.steps, self.network, self.requires, self.dtype = steps, steps.network, requires, steps.dtype
        self.lower, self.objective, self.keep = lower, objective, keep
        self.work, self.work_limit, self.front_limit, self.exact = 0, work_limit, front_limit, True
        self.limits = limits
        self.about_peaks = objective == "peak" or limits.memory is not None
        self.counts_retained = self.about_peaks or limits.retain is not None
        self.interrupted = False
        self.implementations = Implementations(lower, limits.memory is not None)
        self.takes_first, self.bound, self.ends = takes_first, bound, ends
        self.least = _zero() if bound is None else self._least_of_a_product()
        self._ahead = self._least_by_products_to_come()
        self._gradient_operands = 0
        for operand, needed in enumerate(requires):
            self._gradient_operands |= needed << operand
        self._fronts: dict[int, Fronts] = {}

    def _least_of_a_product(self) -> Key:
        """Return a lower bound on what any product adds to the score: the cheapest product of almost no elements."""
        if self.objective == "peak":
            return _zero()
        kinds = (("", "", ""), ("a", "a", "a"), ("a", "a", ""), ("a", "b", "ab"))
        # If all sizes are 0, an outer product is the cheapest: not even its result takes a byte.
        tiny = [_product(terms, size) for terms in kinds for size in (0, 1)]
        first = min(self.key(self.lower(Einsum(spec, self.dtype)).cost)[0] for spec in tiny)
        first *= self._least_steps()
        return (0, first, 0, 0) if self.objective == "retained" else (first, 0, 0, 0)

    def _least_steps(self) -> int:
        """Return the least number of steps that a product takes, its gradients counted.

        Only a product with a gather can have both gradients in one step.
        """
        return (2 if self.network.gathers else 3) if all(self.requires) else 1

    def _least_by_products_to_come(self) -> dict[tuple[int, int], Key]:
        """Return a lower bound on the score still to come, for a number of products and of those computed again."""
        once, again = self.least, _zero()
        may_retain_nothing = self.objective == "retained" and self.keep == "any" and all(self.requires)
        if may_retain_nothing and 0 not in self.network.sizes.values():
            # A tree that retains nothing computes every product but the last twice.
            again = tuple(entry // self._least_steps() for entry in once)
        bounds: dict[tuple[int, int], Key] = {}
        for products in range(len(self.network.leaves)):
            for repeated in (max(products - 1, 0), products):
                pairs = zip(once, again, strict=True)
                bounds[products, repeated] = tuple(products * first + repeated * second for first, second in pairs)
        return bounds

    def run(self, splits: Splits = all_splits, sets: Iterable[int] = ()) -> SearchResult | None:
        """Return the best tree over the given splits of the operands, or None if no tree is within the limits.

        Args:
            splits: the splits of each set of operands.
            sets: sets to begin with, each after those that it is made of: so that a deep tree needs no deep recursion.
        """
        for operands in sets:
            self.best_partials(operands, splits)
        complete = self.finish(self.best_partials(self.network.everything, splits).get(self.network.final, []))
        if not complete:
            if self.limits != NO_LIMITS or self.bound is not None:
                return None
            raise SearchLimitError(f"no tree was found for '{self.network.spec}': please report this spec")
        best = min(complete, key=lambda partial: (self.score(partial), partial.key))
        return SearchResult(best.tree, self.score(best), self.exact, self.interrupted, names=best.names)

    # -- states --------------------------------------------------------------------------------------

    def best_partials(self, operands: int, splits: Splits) -> Fronts:
        """Return the best partial plans for a set of operands, by status."""
        cached = self._fronts.get(operands)
        if cached is not None:
            return cached
        fronts: Fronts = {}
        if operands & (operands - 1) == 0:
            self.add_operand(operands, fronts)
        else:
            try:
                for left, right in splits(operands):
                    self.add_products(left, right, splits, fronts)
            except KeyboardInterrupt:
                # Whole trees are enough for an answer; the trees of a part are not.
                if operands != self.network.everything or not fronts.get(self.network.final):
                    raise
                self.exact, self.interrupted = False, True
        # Unary steps only ever raise a status, so ascending order visits each source before its targets.
        for status in tuple(fronts) if self.network.few else ascending(fronts):
            value = Value(operands, status)
            for target in self.network.advances(value):
                self.add_unary(value, target, fronts)
        if operands != self.network.everything:
            fronts = self._reduce_statuses(fronts)
        self._fronts[operands] = fronts
        return fronts

    def _reduce_statuses(self, fronts: Fronts) -> Fronts:
        """Return the statuses to go on with: all of them, the naive one, or a few."""
        if not self.takes_first and (not self.network.few or len(fronts) <= FEW_STATUSES):
            return fronts
        # The status with the most gathers done. Every tree can be finished from it.
        most_taken = max(fronts, key=lambda status: (status.count(ROWS), [-factor for factor in status]))
        if self.takes_first:
            return {most_taken: fronts[most_taken]}

        def best(status: Status) -> tuple[Vector, Key]:
            return min((self.least_score(partial), partial.key) for partial in fronts[status])

        order = sorted((status for status, front in fronts.items() if front), key=best)
        return {status: fronts[status] for status in dict.fromkeys((most_taken, *order[:FEW_STATUSES]))}

    def add_operand(self, operands: int, fronts: Fronts) -> None:
        """Offer one operand: as it is, cast, and with its repeated and private axes removed."""
        steps, operand = self.steps, operands.bit_length() - 1
        peaks = Peaks(is_result=int(self.requires[operand]))
        raw = front = [self.partial_plan(Leaf(operand), _zero(), 0, peaks, 0, False)]
        if (cast := steps.cast(operand)) is not None:
            front = self.extend_all(cast, front, (operands,))
        first = steps.first(operand)
        fronts[self.network.open] = front if first is None else self.extend_all(first, front, (operands,))
        for target, op in steps.first_takes(operand):
            self.offer(fronts, target, op, (front,), (operands,), Value(operands, target))
        for target, op, cast in steps.casts_last(operand):
            wide = self.extend_all(op, raw, (operands,))
            self.offer(fronts, target, cast, (wide,), (operands,), Value(operands, target))

    def add_products(self, left: int, right: int, splits: Splits, fronts: Fronts) -> None:
        """Offer every product of a value of one set of operands with a value of the other."""
        network = self.network
        for status_a, front_a in self.best_partials(left, splits).items():
            a = Value(left, status_a)
            for status_b, front_b in self.best_partials(right, splits).items():
                b = Value(right, status_b)
                axes = network.value_axes(a) | network.value_axes(b)
                if self.cannot_win(front_a, front_b, left, right, axes):
                    continue
                for status in network.merges(a, b):
                    if self.takes_first and status != tuple(map(max, status_a, status_b)):
                        continue
                    result = Value(left | right, status)
                    self.offer(
                        fronts, status, self.steps.step((a, b), result), (front_a, front_b), (left, right), result
                    )

    def add_unary(self, value: Value, target: Status, fronts: Fronts) -> None:
        """Offer the step that takes a value alone to another status."""
        result = Value(value.operands, target)
        op = self.steps.step((value,), result)
        self.offer(fronts, target, op, (fronts[value.status],), (value.operands,), result)

    # -- what can be dropped -------------------------------------------------------------------------

    def cannot_win(self, front_a: Front, front_b: Front, left: int, right: int, axes: int) -> bool:
        """Whether no product of these partial plans can be part of a tree as good as the known one."""
        if self.bound is None:
            return False
        if not front_a or not front_b:
            return True
        least = [min(self.least_score(partial) for partial in front) for front in (front_a, front_b)]
        if self.objective == "peak":
            return max(least) > self.bound
        so_far = add_keys(*least, self.least, self.least_ahead(left | right, False))
        if self.objective == "flops" and not self.network.gathers:
            # Every implementation multiplies each element of the joint space at least.
            so_far = (so_far[0] + self.network.elements(axes), *so_far[1:])
        return bool(so_far > self.bound[0])

    def is_beaten(self, partial: PartialPlan, operands: int) -> bool:
        """Whether a partial plan cannot be part of a tree as good as the known one."""
        if self.bound is None:
            return False
        if self.objective == "peak":
            return self.least_score(partial) > self.bound
        return bool(add_keys(self.least_score(partial), self.least_ahead(operands, True)) > self.bound[0])

    def is_too_dear(self, op: Op, children: tuple[Front, ...], operands: int) -> bool:
        """Whether every tree with a step is worse than the known one, even if the step's gradients cost nothing.

        Then its gradients need no prices.

        Args:
            op: the step.
            children: the fronts of the values that it reads; none is empty.
            operands: the set of operands of its result.
        """
        if self.bound is None or self.objective in ("peak", "retained"):
            return False
        least = [min(partial.key for partial in front) for front in children]
        so_far = add_keys(self.key(self.lower(op).cost), *least, self.least_ahead(operands, True))
        return bool(so_far > self.bound[0])

    def exceeds_limit(self, partial: PartialPlan) -> bool:
        """Whether a partial plan exceeds a limit. Then every tree that contains it does."""
        memory, retain = self.limits
        if retain is not None and partial.retained > retain:
            return True
        return memory is not None and self.least_peak(partial) > memory

    def least_ahead(self, operands: int, decided: bool) -> Key:
        """Return a lower bound on what the products with all other operands add to the score.

        Args:
            operands: the set of operands of a value.
            decided: whether the value's score already says if the value is recomputed.
        """
        products = len(self.network.leaves) - operands.bit_count()
        return self._ahead[products, max(products - decided, 0)]

    @staticmethod
    def least_peak(partial: PartialPlan) -> int:
        """Return a lower bound on the peak of any tree that contains a partial plan."""
        return max(partial.peaks.forward, partial.retained + max(partial.peaks.alive, partial.peaks.after))

    def least_score(self, partial: PartialPlan) -> Vector:
        """Return a lower bound on what a partial plan adds to the score of any tree that contains it."""
        return (self.least_peak(partial),) if self.objective == "peak" else partial.key

    # -- fronts --------------------------------------------------------------------------------------

    def offer(
        self,
        fronts: Fronts,
        status: Status,
        op: Op,
        children: tuple[Front, ...],
        parts: tuple[int, ...],
        result: Value,
    ) -> None:
        """Extend each combination of the children's partial plans by a step, and keep what is not dominated.

        Args:
            fronts: the fronts of the result's operands; the one of `status` grows.
            status: the result's status.
            op: the step.
            children: the fronts of the values that the step reads.
            parts: the set of operands of each of these values.
            result: the value that the step computes.

        Raises:
            SearchLimitError: the search has scored as many steps as it may.
            SearchEnded: the deadline is over.
        """
        front, limited = fronts.setdefault(status, []), self.limits != NO_LIMITS
        if not all(children):
            return  # no step is priced that nothing will use
        self.work += math.prod(map(len, children))
        if self.work > self.work_limit:
            raise SearchLimitError(
                f"the exact search needs more than {self.work_limit} steps: pass optimize='greedy' or an explicit path"
            )
        if self.ends is not None and time.monotonic() > self.ends:
            raise SearchEnded
        if self.is_too_dear(op, children, result.operands):
            return
        steps = self.price_step(op, parts)
        self.work += (len(steps) - 1) * math.prod(map(len, children))
        for step in steps:
            for combination in itertools.product(*children):
                for partial in self.extend(step, combination):
                    if not self.is_beaten(partial, result.operands) and not (limited and self.exceeds_limit(partial)):
                        self.insert(front, partial)

    def insert(self, front: Front, partial: PartialPlan) -> None:
        """Insert a partial plan into a Pareto front unless another is as good; drop those that it dominates."""
        for other in front:
            if other.is_as_good_as(partial) and (other.vector != partial.vector or other.key <= partial.key):
                return
        front[:] = [other for other in front if not partial.is_as_good_as(other)]
        front.append(partial)
        if len(front) > self.front_limit:
            alike = sum(other.recomputed == partial.recomputed for other in front)
            if alike > self.front_limit:
                self.exact = False
                self.thin(front, partial.recomputed)

    def thin(self, front: Front, recomputed: bool) -> None:
        """Drop one partial plan of a full front, but none that is the least in score, peak or retained bytes."""
        alike = [partial for partial in front if partial.recomputed == recomputed]
        alike.sort(key=lambda partial: (partial.vector, partial.key))
        figures = (self.least_score, self.least_peak, lambda partial: (partial.retained, self.least_peak(partial)))
        spared = [min(alike, key=figure) for figure in figures]
        # Neighbours in the order of the vectors are the most alike: one of a close pair goes.
        free = [i for i in range(1, len(alike)) if not any(alike[i] is partial for partial in spared)]
        closest = min(free or [len(alike) - 1], key=lambda i: abs(alike[i].retained - alike[i - 1].retained))
        front[:] = [partial for partial in front if partial is not alike[closest]]

    def finish(self, front: Front) -> Front:
        """Add the last step if the result repeats axes or has axes that no input has."""
        last = self.steps.last()
        if last is None or not front:
            return front
        steps = self.price_step(last, (self.network.everything,))
        finished = [complete for step in steps for partial in front for complete in self.extend(step, (partial,))]
        return [complete for complete in finished if not self.exceeds_limit(complete)]

    # -- quantities ----------------------------------------------------------------------------------

    def needs_gradient(self, operands: int) -> bool:
        """Whether any of these operands needs a gradient."""
        return bool(self._gradient_operands & operands)

    def partial_plan(
        self, tree: Tree, key: Key, retained: int, peaks: Peaks, size: int, recomputed: bool, names: Names = ()
    ) -> PartialPlan:
        """Return a partial plan with the vector that it is compared by."""
        vector: Vector = () if self.objective == "peak" else (key,)
        if self.counts_retained and self.objective != "retained":
            vector = (*vector, retained)
        if self.about_peaks:
            vector = (*vector, *peaks)
        return PartialPlan(tree, key, retained, peaks, size, recomputed, vector, names)

    def score(self, partial: PartialPlan) -> Vector:
        """Return what the search minimises, of a complete plan."""
        return (self.least_peak(partial),) if self.objective == "peak" else (partial.key,)

    def extend_all(self, op: Op, children: Front, parts: tuple[int, ...]) -> Front:
        """Return a front of some partial plans, each extended by one unary step."""
        front: Front = []
        for step in self.price_step(op, parts):
            for child in children:
                for partial in self.extend(step, (child,)):
                    self.insert(front, partial)
        return front

    def price_step(self, op: Op, parts: tuple[int, ...]) -> list[_PricedStep]:
        """Return what extending partial plans by a step needs to know of the step, for each implementation to try.

        Args:
            op: the step.
            parts: the set of operands of each value that it reads.
        """
        needs = tuple(self.needs_gradient(part) for part in parts)
        # The backward program can need the value only if some other operand needs a gradient.
        may_be_recomputed = self.keep == "any" and self.needs_gradient(self.network.everything ^ sum(parts))
        return [self._priced(op, needs, may_be_recomputed, choice) for choice in self.implementations(op, needs)]

    def _priced(self, op: Op, needs: tuple[bool, ...], may_be_recomputed: bool, implementation: Choice) -> _PricedStep:
        choice, gradients, names = implementation
        own = self.key(choice.cost)
        key = add_keys(own, *(self.key(gradient.choice.cost) for gradient in gradients))
        return _PricedStep(
            op=op.with_layouts(()),
            choice=choice,
            bytes=0 if choice.view else math.prod(op.spec.output_shape) * itemsize(op.dtype),
            gradients=gradients,
            needs=needs,
            reads=read_by_gradients(needs),
            produced=_gradient_bytes(op, needs) if self.about_peaks else (),
            key=key,
            again=add_keys(own, key),
            may_be_recomputed=may_be_recomputed,
            names=names,
        )

    def extend(self, step: _PricedStep, children: tuple[PartialPlan, ...]) -> Iterator[PartialPlan]:
        """Yield the partial plans that add one step to its children's: saved and recomputed, in each useful order."""
        trees = tuple(child.tree for child in children)
        held = children[0].bytes if step.choice.view else step.bytes
        names = sum((child.names for child in children), step.names)
        below = [child.key for child in children]
        if self.keep == "all" and not self.about_peaks and self.objective != "retained":
            key = add_keys(step.key, *below)
            yield PartialPlan(Node(step.op, trees), key, 0, NO_PEAKS, held, False, (key,))
            return
        for recomputed in (False, True) if step.may_be_recomputed else (False,):
            needed = [read or recomputed for read in step.reads]
            if any(child.recomputed and not need for child, need in zip(children, needed, strict=True)):
                continue  # nothing that is not needed is recomputed
            kept = sum(
                child.bytes for child, need in zip(children, needed, strict=True) if need and not child.recomputed
            )
            retained = kept + sum(child.retained for child in children)
            added = step.again if recomputed else step.key
            if self.objective == "retained":
                added = (kept, *added[:3])
            key = add_keys(added, *below)
            if not self.about_peaks:
                node = Node(step.op, trees, kept=not recomputed)
                yield self.partial_plan(node, key, retained, NO_PEAKS, held, recomputed, names)
                continue
            for order in _useful_orders(trees):
                peaks, backward_order = self._peaks(step, children, order, recomputed)
                node = Node(step.op, trees, order, backward_order, not recomputed)
                yield self.partial_plan(node, key, retained, peaks, held, recomputed, names)

    def key(self, cost: StepCost) -> Key:
        """Return the additive part of a step's score."""
        return self.lower.key(cost)

    def _peaks(
        self, step: _PricedStep, children: tuple[PartialPlan, ...], order: tuple[int, ...], recomputed: bool
    ) -> tuple[Peaks, tuple[int, ...]]:
        """Return the peaks of a step, and the order in which the backward program best descends into its children."""
        choice, gradients, needs, reads, produced = step.choice, step.gradients, step.needs, step.reads, step.produced
        below = [child.peaks for child in children]
        last = choice.cost.scratch_bytes + step.bytes
        forward = _evaluation_peak(
            order, [peaks.forward for peaks in below], [child.retained + child.bytes for child in children], last
        )
        # The bytes of each recomputed child that this step's gradients read, and then free.
        read_bytes = [
            child.peaks.held if child.recomputed and read else 0 for child, read in zip(children, reads, strict=True)
        ]
        recompute = waiting = held = 0
        if recomputed:
            recompute = _evaluation_peak(
                [child for child in order if children[child].recomputed],
                [peaks.recompute for peaks in below],
                [peaks.waiting + peaks.held for peaks in below],
                last,
            )
            waiting = sum(peaks.waiting for peaks in below) + sum(read_bytes)
            held = step.bytes if not choice.view else below[0].held
        is_copied = isinstance(children[0].tree, Leaf) and gradients and gradients[0].op.repeats  # by autograd
        if len(gradients) == 1 and gradients[0].choice.view and not is_copied:
            # The gradient of the value lives on as that of its only child.
            (child,) = below
            alive = max(child.alive, gradients[0].choice.cost.scratch_bytes + waiting)
            view = Peaks(forward, recompute, waiting, held, alive, child.after, child.finished, child.is_result)
            return view, (0,)
        reading = [i for i in order if reads[i]]
        computed = {i for i, child in enumerate(children) if recomputed or not child.recomputed}
        alive = _gradient_steps_peak(gradients, below, reading, computed, produced, read_bytes, waiting)
        finished = [peaks.finished + peaks.is_result * size for peaks, size in zip(below, produced, strict=True)]

        def peak_after(backward_order: tuple[int, ...]) -> int:
            rest, peak = sum(produced) + sum(peaks.waiting for peaks in below), 0
            for i in backward_order:
                if needs[i]:
                    rest -= produced[i] + below[i].waiting
                    peak = max(peak, rest + max(produced[i] + below[i].alive, below[i].after))
                    rest += finished[i]
            return peak

        orders = _useful_orders([child.tree for child in children])
        after, backward_order = min((peak_after(order), order) for order in orders)
        return Peaks(forward, recompute, waiting, held, alive, after, sum(finished), 0), backward_order


def _gradient_bytes(op: Op, needs: Sequence[bool]) -> tuple[int, ...]:
    """Return the bytes of the gradient of each value that a step reads; 0 if it is not needed."""
    size = itemsize(op.source_dtype or op.dtype)
    return tuple(math.prod(shape) * size if need else 0 for shape, need in zip(op.input_shapes, needs, strict=True))


def _evaluation_peak(order: Iterable[int], peaks: Sequence[int], left: Sequence[int], last: int) -> int:
    """Return the peak of evaluating a step's children one after the other, then the step itself.

    Args:
        order: the children, in the order in which they are evaluated.
        peaks: the peak of evaluating each child.
        left: the bytes that each child leaves behind.
        last: the bytes that the step itself allocates.
    """
    before = peak = 0
    for child in order:
        peak = max(peak, before + peaks[child])
        before += left[child]
    return max(peak, before + last)


def _gradient_steps_peak(
    gradients: Sequence[GradientStep],
    below: Sequence[Peaks],
    reading: Sequence[int],
    computed: set[int],
    produced: Sequence[int],
    read_bytes: Sequence[int],
    waiting: int,
) -> int:
    """Return the peak of a step's gradient steps. The gradient that they start from is not counted.

    Args:
        gradients: the gradient steps, in order.
        below: the peaks of the step's children.
        reading: the children whose values gradient steps read, in the order of their evaluation.
        computed: the children whose values need not be recomputed before that.
        produced: the bytes of each child's gradient.
        read_bytes: the bytes of each child that a gradient step frees after it has read them.
        waiting: the bytes that wait for gradient steps at the start.
    """
    computed = set(computed)
    peak = so_far = 0
    for gradient, choice, served in gradients:
        joint = isinstance(gradient, JointGradient)
        read = [i for i in reading if joint or i != served[0]]
        for i in read:
            if i not in computed:
                computed.add(i)
                peak = max(peak, waiting + so_far + below[i].recompute)
                waiting += below[i].waiting + read_bytes[i]
        so_far += sum(produced[i] for i in served)
        peak = max(peak, so_far + choice.cost.scratch_bytes + waiting)
        if not joint:
            waiting -= sum(read_bytes[i] for i in read)
    return peak


def _product(terms: tuple[str, str, str], size: int) -> Spec:
    """Return the spec of a product of two terms whose axes all have one size."""
    a, b, output = (tuple(term) for term in terms)
    return Spec((a, b), output, tuple((axis, size) for axis in sorted({*a, *b})))


def _useful_orders(children: Sequence[Tree]) -> tuple[tuple[int, ...], ...]:
    """Return the orders of evaluation that can differ in memory: an operand costs nothing whenever its turn comes."""
    if len(children) == 1:
        return ((0,),)
    return ((0, 1), (1, 0)) if all(isinstance(child, Node) for child in children) else ((0, 1),)
