"""Exact dynamic programming over sets of operands and the status of each one-hot factor.

For every set of operands and every status (see `planner.network`) the best ways to get there are kept: one way for an
objective that adds up over steps, a Pareto front where it does not (the peak). Every quantity of a larger tree is a
nondecreasing function of the same quantities of its subtrees, so a dominated way is never part of a best tree.

How the quantities of a step S with children A, B follow from the children's. `held` is what a subtree leaves allocated,
`kept` the part of it that the backward program will read, `out` a value's bytes, g its gradient's bytes:

    forward peak   F(S) = max(F(first), held(first) + F(second), held(A) + held(B) + scratch + out(S))
    kept(S)             = kept(A) + kept(B) + [out(A) if B needs a gradient] + [out(B) if A does]
    backward peak  G(S) = max(g(S) + alive(S), after(S))
                alive(S) = g(A) + g(B) + scratch                                           while g(S) is there
                after(S) = max(g(other) + G(first), done(first) + G(second))               once it is gone

where `done` is the bytes of the operands' gradients below. Where a gradient step is a view, g(S) lives on in the
child's gradient. With ``keep="all"`` the retained bytes are alive all the time; with ``keep="inputs"`` the kept values
are computed at the start of the backward program and freed one by one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from planner.cost import StepCost, itemsize
from planner.errors import SearchLimitError
from planner.lower import Choice, Op
from planner.network import ROWS, Network, Status, Value
from planner.program import Keep, Leaf, Lowerer, Node, Tree, read_by_gradients
from planner.spec import Spec

__all__ = ["Found", "Search", "all_splits"]

Key = tuple[int, ...]
Vector = tuple[Any, ...]
Splits = Callable[[int], Iterable[tuple[int, int]]]

FRONT_LIMIT = 128
FEW_STATUSES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a value: its tree and the quantities that larger trees need."""

    tree: Tree
    vector: Vector
    tie: Key
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
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
        objective: one of `planner.objective.OBJECTIVES`.
        keep: the setting whose trees are scored.
        work_limit: number of steps that may be scored.
        takes_first: only trees that take every operand's gathers before anything else: the naive way.
        bound: score of a tree that is known already; what exceeds it in part is not followed.
    """

    def __init__(
        self,
        network: Network,
        requires: Sequence[bool],
        casts: Sequence[str | None],
        dtype: str,
        lower: Lowerer,
        objective: str,
        keep: Keep,
        work_limit: int,
        takes_first: bool = False,
        bound: Vector | None = None,
    ) -> None:
        self.network, self.requires, self.casts, self.dtype = network, requires, casts, dtype
        self.lower, self.objective, self.keep = lower, objective, keep
        self.work, self.work_limit, self.exact = 0, work_limit, True
        self.interrupted = False
        self.itemsize = itemsize(dtype)
        self.takes_first, self.bound = takes_first, bound
        self.least = _zero() if bound is None else self._least()
        self.least_ahead = self.least
        if keep == "inputs" and all(requires):
            # Every product but the last is computed twice: one for each that is still to come.
            self.least_ahead = _add(self.least, tuple(part // self._steps() for part in self.least))
        self._needs = 0
        for operand, needed in enumerate(requires):
            self._needs |= needed << operand
        self._ways: dict[int, dict[Status, list[Way]]] = {}
        self._fixed: dict[int, tuple[str, ...] | None] = {}
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
        empty = [_product(terms, size) for terms in (("", "", ""), ("a", "a", "a"), ("a", "a", "")) for size in (0, 1)]
        first = min(self.key(self.lower(Op(spec, self.dtype)).cost)[0] for spec in empty)
        first *= self._steps()
        return (0, first, 0, 0) if self.objective == "retained" and self.keep == "all" else (first, 0, 0, 0)

    def _steps(self) -> int:
        """Return how many products a product brings at least, its gradients counted; a fused pair needs a gather."""
        return (2 if self.network.gathers else 3) if all(self.requires) else 1

    def run(self, splits: Splits = all_splits) -> Found:
        """Return the best tree over the given splits of the operands."""
        ways = self.ways(self.network.everything, splits).get(self.network.final, [])
        if not ways:
            raise SearchLimitError(f"no tree was found for '{self.network.spec}': please report this spec")
        best = min((self.finish(way) for way in ways), key=lambda way: (self.score(way), way.tie))
        return Found(best.tree, self.score(best), self.exact, self.interrupted)

    def has_tree(self) -> bool:
        """Whether any tree over all splits is within the bound."""
        return bool(self.ways(self.network.everything, all_splits).get(self.network.final))

    # -- states --------------------------------------------------------------------------------------

    def ways(self, operands: int, splits: Splits) -> dict[Status, list[Way]]:
        """Best ways to each status of a set of operands."""
        known = self._ways.get(operands)
        if known is not None:
            return known
        found: dict[Status, list[Way]] = {}
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
            order = sorted((s for s in found if found[s]), key=lambda s: min((self.part(w), w.tie) for w in found[s]))
            found = {status: found[status] for status in dict.fromkeys((taken, *order[:FEW_STATUSES]))}
        self._ways[operands] = found
        return found

    def _ascending(self, operands: int, found: dict[Status, list[Way]]) -> Iterable[Status]:
        done: set[Status] = set()
        while pending := [status for status in found if status not in done]:
            status = min(pending, key=lambda s: (sum(s), s))
            done.add(status)
            yield status

    def leaf(self, operands: int, found: dict[Status, list[Way]]) -> None:
        """Offer an operand: as it is, cast, and with its repeated and private axes gone."""
        network, operand = self.network, operands.bit_length() - 1
        value = Value(operands, network.open)
        term = network.leaves[operand]
        way = Way(Leaf(operand), self.leaf_vector(operand), _zero(), 0)
        shape_only = network.restricted(dataclasses.replace(network.spec, inputs=(term,), output=term))
        if (source := self.casts[operand]) is not None:
            (way,) = self.extend(Op(shape_only, self.dtype, source), (way,), self.count(term), (operands,))
        raw, mask = way, network.value_axes(value)
        fixed: tuple[str, ...] | None = term
        output = network.result if self.one_step else network.term(mask)
        if (term != output) if self.one_step else (len(set(term)) < len(term) or network.mask(term) != mask):
            spec = network.restricted(dataclasses.replace(network.spec, inputs=(term,), output=output))
            (way,) = self.extend(Op(spec, self.dtype), (way,), self.count(output), (operands,))
            fixed = None
        self._fixed[operands] = fixed
        found[network.open] = [way]
        if fixed is None and not self.one_step:
            # A take of few rows comes before the sums over axes of its own, not after: one step does both.
            for target in network.advances(value):
                spec = network.step_spec(((value, term),), Value(operands, target))
                self.offer(found, target, Op(spec, self.dtype), ([raw],), (operands,), Value(operands, target))

    def count(self, term: Iterable[str]) -> int:
        """Bytes of a value with these axes."""
        product = self.itemsize
        for axis in term:
            product *= self.network.sizes[axis]
        return product

    def products(self, left: int, right: int, splits: Splits, found: dict[Status, list[Way]]) -> None:
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
                    self.offer(found, status, Op(spec, self.dtype), (ways_a, ways_b), (left, right), result)

    def hopeless(self, ways_a: list[Way], ways_b: list[Way], left: int, right: int, axes: int) -> bool:
        """Whether no product of these ways can be part of a tree as good as the one that is known."""
        if self.bound is None:
            return False
        if not ways_a or not ways_b:
            return True
        least = [min(self.part(way) for way in ways) for ways in (ways_a, ways_b)]
        if self.objective == "peak":
            return max(least) > self.bound
        so_far = _add(*least, self.least, self.ahead(left | right))
        if self.objective == "flops" and not self.network.gathers:
            # Every implementation multiplies each element of the joint space at least.
            so_far = (so_far[0] + self.network.elements(axes), *so_far[1:])
        return bool(so_far > self.bound[0])

    def beaten(self, way: Way, operands: int) -> bool:
        """Whether a way cannot be part of a tree as good as the one that is known."""
        if self.bound is None:
            return False
        if self.objective == "peak":
            return self.part(way) > self.bound
        return bool(_add(self.part(way), self.ahead(operands)) > self.bound[0])

    def ahead(self, operands: int) -> Key:
        """Return what the products with all other operands add to the score at least."""
        left = len(self.network.leaves) - operands.bit_count()
        return tuple(left * part for part in self.least_ahead)

    def part(self, way: Way) -> Vector:
        """Return what a way adds to the score of any tree that it is part of, at least."""
        if self.objective == "peak":
            return (way.vector[1 if self.keep == "all" else 2],)
        return tuple(way.vector[-1])

    def unary(self, value: Value, target: Status, found: dict[Status, list[Way]]) -> None:
        """Offer the step from a value alone to another status of it."""
        result = Value(value.operands, target)
        spec = self.network.step_spec(((value, self.order_of(value)),), result)
        self.offer(found, target, Op(spec, self.dtype), (found[value.status],), (value.operands,), result)

    def order_of(self, value: Value) -> tuple[str, ...] | None:
        """Axis order of a value where it is not the network's own: an operand's."""
        if value.status == self.network.open:
            return self._fixed.get(value.operands)
        return None

    def offer(
        self,
        found: dict[Status, list[Way]],
        status: Status,
        op: Op,
        fronts: tuple[list[Way], ...],
        parts: tuple[int, ...],
        result: Value,
    ) -> None:
        """Extend each combination of the children's ways by a step and keep what is not dominated."""
        front = found.setdefault(status, [])
        size = self.network.elements(self.network.value_axes(result)) * self.itemsize
        for children in itertools.product(*fronts):
            self.work += 1
            if self.work > self.work_limit:
                raise SearchLimitError(
                    f"the exact search needs more than {self.work_limit} steps: "
                    "pass optimize='greedy' or an explicit path"
                )
            for way in self.extend(op, children, size, parts):
                if not self.beaten(way, result.operands):
                    self.insert(front, way)

    def insert(self, front: list[Way], way: Way) -> None:
        """Put a way into a Pareto front, unless another is as good; drop those that it beats."""
        for other in front:
            if all(o <= w for o, w in zip(other.vector, way.vector, strict=True)) and (
                other.vector != way.vector or other.tie <= way.tie
            ):
                return
        front[:] = [o for o in front if not all(w <= v for w, v in zip(way.vector, o.vector, strict=True))]
        front.append(way)
        if len(front) > FRONT_LIMIT:
            self.exact = False
            front.sort(key=lambda w: (w.vector, w.tie))
            del front[FRONT_LIMIT:]

    def finish(self, way: Way) -> Way:
        """Add the last step where the result repeats axes or has ones that no input has."""
        if not self.needs_finish:
            return way
        network = self.network
        spec = network.restricted(
            dataclasses.replace(
                network.spec,
                inputs=(network.term(network.value_axes(self.final)),),
                output=network.result,
            )
        )
        size, everything = self.count(network.result), network.everything
        return min(
            self.extend(Op(spec, self.dtype), (way,), size, (everything,)),
            key=lambda finished: (self.score(finished), finished.tie),
        )

    # -- quantities ----------------------------------------------------------------------------------

    def needs(self, operands: int) -> bool:
        """Whether any of these operands needs a gradient."""
        return bool(self._needs & operands)

    def leaf_vector(self, operand: int) -> Vector:
        """Quantities of an operand: it costs nothing; its gradient stays."""
        if self.objective == "peak":
            return (0, 0, 0, 0, 0, 0, 0, int(self.requires[operand]))
        return (_zero(),) if self.keep == "all" else (_zero(), _zero())

    def score(self, way: Way) -> Vector:
        """Return what is minimised, of a complete way."""
        if self.objective == "peak":
            kept, all_peak, none_peak, again, alive, after, _, _ = way.vector
            back = max(alive, after)  # the output's gradient is the caller's
            return (max(all_peak, kept + back) if self.keep == "all" else max(none_peak, again, back),)
        return way.vector if self.keep == "all" else (way.vector[1],)

    def extend(self, op: Op, children: tuple[Way, ...], size: int, parts: tuple[int, ...]) -> Iterator[Way]:
        """Yield the ways that add one step to its children's ways."""
        needs = tuple(self.needs(part) for part in parts)
        choice = self.lower(op)
        gradients = self.lower.gradients(op, needs) if any(needs) else ()
        reads = read_by_gradients(needs)
        trees = tuple(way.tree for way in children)
        own = children[0].bytes if choice.view else size
        step = _add(self.key(choice.cost), *(self.key(c.cost) for _, c, _ in gradients))
        if self.objective == "peak":
            tie = _add(step, *(way.tie for way in children))
            for order in _orders(len(children)):
                vector, backward_order = self._peaks(op, choice, gradients, children, needs, reads, order)
                yield Way(Node(op, trees, order, backward_order), vector, tie, own)
            return
        if self.objective == "retained" and self.keep == "all":
            step = (sum(way.bytes for way, read in zip(children, reads, strict=True) if read), *step[:3])
        vector = (_add(step, *(way.vector[0] for way in children)),)
        if self.keep == "inputs":
            # With and without this step in the recomputation that begins the backward program.
            partly = [way.vector[0 if read else 1] for way, read in zip(children, reads, strict=True)]
            vector = (_add(*vector, self.key(choice.cost)), _add(step, *partly))
        yield Way(Node(op, trees), vector, _zero(), own)

    def key(self, cost: StepCost) -> Key:
        """Return the additive part of a step's score."""
        return self.lower.key(cost)  # type: ignore[return-value]

    def _peaks(
        self,
        op: Op,
        choice: Choice,
        gradients: Sequence[tuple[Op, Choice, tuple[int, ...]]],
        children: tuple[Way, ...],
        needs: tuple[bool, ...],
        reads: tuple[bool, ...],
        order: tuple[int, ...],
    ) -> tuple[Vector, tuple[int, ...]]:
        """Return the peak vector of a step, and the best order of descent in the backward program.

        The vector: kept bytes; forward peak with everything kept; forward peak with nothing kept; peak of computing
        only the kept values again; backward peak while the step's own gradient is alive, that one not counted;
        backward peak from then on; bytes of the operands' gradients made below; whether the step's own
        gradient is one of these in the end. Retained bytes are not part of the backward peaks.
        """
        kept_below = [way.vector[0] for way in children]
        bytes_below = [way.bytes for way in children]
        here = [b if read else 0 for b, read in zip(bytes_below, reads, strict=True)]
        kept = sum(kept_below) + sum(here)
        last = choice.cost.scratch_bytes + (0 if choice.view else self._output_bytes(op))

        def climb(peaks: Sequence[int], held: Sequence[int], last: int) -> int:
            before = top = 0
            for child in order:
                top = max(top, before + peaks[child])
                before += held[child]
            return max(top, before + last)

        all_peaks = [way.vector[1] for way in children]
        all_peak = climb(all_peaks, [k + b for k, b in zip(kept_below, bytes_below, strict=True)], last)
        none_peak = again = 0
        if self.keep == "inputs":
            none_peak = climb([way.vector[2] for way in children], bytes_below, last)
            again = climb(
                [way.vector[1 if read else 3] for way, read in zip(children, reads, strict=True)],
                [k + b for k, b in zip(kept_below, here, strict=True)],
                0,
            )
        # Kept values count in the backward peak only where they die one by one.
        waiting = kept_below if self.keep == "inputs" else [0] * len(children)
        held = kept if self.keep == "inputs" else 0
        if len(gradients) == 1 and gradients[0][1].view:
            below = children[0].vector
            alive = max(below[4], gradients[0][1].cost.scratch_bytes + held)
            return (kept, all_peak, none_peak, again, alive, *below[5:]), (0,)
        produced = [self._input_bytes(op, i) if need else 0 for i, need in enumerate(needs)]
        alive = so_far = 0
        for gradient, chosen, served in gradients:
            so_far += sum(produced[i] for i in served)
            alive = max(alive, so_far + chosen.cost.scratch_bytes + held)
            if self.keep == "inputs" and not gradient.pair:
                held -= sum(b for i, b in enumerate(here) if i not in served)
        done = [way.vector[6] + way.vector[7] * g for way, g in zip(children, produced, strict=True)]
        best: tuple[int, tuple[int, ...]] | None = None
        for backward_order in _orders(len(children)):
            rest, after = sum(produced) + sum(waiting), 0
            for child in backward_order:
                if needs[child]:
                    rest -= produced[child] + waiting[child]
                    child_alive, child_after = children[child].vector[4:6]
                    after = max(after, rest + max(produced[child] + child_alive, child_after))
                    rest += done[child]
            if best is None or after < best[0]:
                best = (after, backward_order)
        assert best is not None
        return (kept, all_peak, none_peak, again, alive, best[0], sum(done), 0), best[1]

    def _output_bytes(self, op: Op) -> int:
        return math.prod(op.spec.output_shape) * itemsize(op.dtype)

    def _input_bytes(self, op: Op, child: int) -> int:
        return math.prod(op.spec.shape(op.spec.inputs[child])) * itemsize(op.source_dtype or op.dtype)


def _product(terms: tuple[str, str, str], size: int) -> Spec:
    """Return the spec of a product of two terms, all axes of one size."""
    a, b, output = (tuple(term) for term in terms)
    return Spec((a, b), output, tuple((axis, size) for axis in sorted({*a, *b})))


def _orders(children: int) -> tuple[tuple[int, ...], ...]:
    return ((0,),) if children == 1 else ((0, 1), (1, 0))
