"""The search for trees whose score is a sum over steps: time, FLOPs and bytes moved. It prices few steps.

Each step has a lower bound that costs next to nothing, see `planner.cost.floor`. A dynamic programme over the sets of
operands, and the statuses of one-hot factors, finds the best tree by these bounds. The steps of that tree are priced,
their prices take the place of their bounds, and the programme is repeated. If all steps of the best tree are priced, no
other tree is better: its steps cost what they cost, and those of all others cost at least what was assumed.

A tree whose steps are priced is an incumbent. Steps are dropped if no tree as good as the incumbent has them. The score
of the best tree lies in the *gap*, between the score of the best tree by bounds and that of the incumbent.
"""

from __future__ import annotations

import dataclasses
import itertools
import string
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.language.spec import Spec
from planner.program.build import Lowerer
from planner.program.ops import Op
from planner.program.tree import Leaf, Node, Tree
from planner.search.exact.graph import Edge, StepGraph, first_of, pack, unpack
from planner.search.exact.listing import Bounds, list_edges, list_plain_edges
from planner.search.exact.network import Status, Value
from planner.search.exact.sizes import has_tables
from planner.search.exact.steps import NetworkSteps, SearchResult, Splits, add_keys, all_splits
from planner.search.exact.vectors import VectorListing

# From so many operands on, steps are listed by numpy.
VECTOR_OPERANDS = 5
# After so many prices, steps that differ in the names of axes share one. The chosen steps are priced by their own names
# when the programs are built, which small searches can do without.
FEW_PRICED = 24
# "auto" ends a search if a thousand calls would win less than this many picoseconds for each step that may have to be
# priced: about the time that pricing takes.
CALLS, STEP_PICOSECONDS = 1_000, 100_000_000
# Then it looks at so many steps, those of the trees that are best by bounds, if numpy lists more: each takes some 5 us.
MOST_LEFT = 30_000
# As long as numpy has more steps left, it finds the next tree to price: each step takes some 10 us to look at alone.
MOST_EDGES = 500
# Most steps never have to be priced. Of dense networks of 8 to 12 operands, with an index array and without, half had
# a gap of less than 5% after half as many prices as before, and of 0 after 0.3 to 2 times as many.
PRICED_AGAIN = 0.5


class Stop(NamedTuple):
    """How much a search may do before it ends.

    Attributes:
        priced: the most steps to price, and the most trees to find among many steps.
        listed: the most steps to list one by one.
        scored: the most steps to score in a search that keeps fronts of partial plans.
        operands: the most operands of a search over all trees.
        gains: whether to end when pricing would take longer than the time that it can win in a thousand calls.
        deadline: the time of `time.monotonic` at which to end, or None.
    """

    priced: int
    listed: int
    scored: int
    operands: int
    gains: bool = False
    deadline: float | None = None


class LazySearch:
    """One search for the best tree by an additive score.

    Args:
        steps: the steps on the network.
        lower: chooses the implementation of each step by the objective's key.
        bounds: what lower bounds on steps depend on, the objective among it.
        stop: when to end early.
        by_sizes: whether steps that differ in their letters only have one price.
    """

    def __init__(self, steps: NetworkSteps, lower: Lowerer, bounds: Bounds, stop: Stop, by_sizes: bool = True) -> None:
        self.steps, self.network, self.lower, self.bounds, self.stop = steps, steps.network, lower, bounds, stop
        self.by_sizes = by_sizes
        self.priced = 0
        self._prices: dict[tuple[Op, tuple[bool, ...]], int] = {}
        self.interrupted = False
        # The key of a tree that is known, see `run`; and a score, see `has_below`.
        self.known: int | None = None
        self.wanted: int | None = None

    def run(self, splits: Splits | None = None, known: SearchResult | None = None) -> SearchResult:
        """Return the best tree over the given splits of the operands, or over all; or the best so far.

        Args:
            splits: the splits; None for all.
            known: a tree of this network that another search found. It is returned if no other is better.

        Raises:
            SearchEnded: the deadline was over before a first tree was priced.
            SearchLimitError: there are more steps than may be listed.
        """
        last, last_key = self._last()
        if known is not None:
            self.known = pack(known.score[0]) - last_key
        edges, key, bound = self._search(splits)
        if known is not None and not edges:
            tree = known.tree
        else:
            tree = self._build(edges)
            if last is not None:
                tree = Node(last.with_layouts(()), (tree,))
        return SearchResult(
            tree,
            (unpack(key + last_key),),
            exact=bound == key,
            interrupted=self.interrupted,
            bound=first_of(bound + last_key),
        )

    def has_below(self, score: int) -> bool:
        """Whether a tree has a lower score. The search ends as soon as that is known, often before a step is priced.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the search.
            SearchEnded, SearchLimitError: as `run`.
        """
        self.wanted = score - first_of(self._last()[1])  # the keys that are compared lack the last step
        key = first_of(self._search(None)[1])
        if self.interrupted:
            raise KeyboardInterrupt
        return key < self.wanted

    def _last(self) -> tuple[Op | None, int]:
        """Return the step that may have to follow every tree, and what it adds to the score."""
        last = self.steps.last()
        return last, 0 if last is None else self.price(last, (self.network.everything,))

    def _search(self, splits: Splits | None) -> tuple[list[Edge], int, int]:
        """Return the steps of the best tree, its key, and a lower bound on the key of any tree.

        There are no steps if the known tree is the best, or if the bound alone says that no tree is below the wanted
        score.
        """
        if splits is None and self._uses_vectors():
            return self._search_vectors()
        return self._search_listed(splits or all_splits)

    def _uses_vectors(self) -> bool:
        """Whether there are so many steps that numpy lists them, and it can."""
        many = len(self.network.leaves) >= VECTOR_OPERANDS
        return many and self.bounds.hold and has_tables(self.network)

    def _search_listed(self, splits: Splits) -> tuple[list[Edge], int, int]:
        """Search with all steps listed one by one."""
        listed = (self.network, self._leaf_edges, splits, self.bounds, self.stop.listed, self.stop.deadline)
        edges = list_edges(*listed) if self.network.gathers else list_plain_edges(*listed)
        return self._solve(StepGraph(edges, self.network.number(self.steps.final)), None)

    def _search_vectors(self) -> tuple[list[Edge], int, int]:
        """Search with all steps listed by numpy, and only those one by one that can still win."""
        leaves: dict[int, Edge] = {}
        for operand in range(len(self.network.leaves)):
            for status, edge in self._leaf_edges(operand):
                edge.result = self.network.number(Value(1 << operand, status))
                if edge.result not in leaves or edge.key < leaves[edge.result].key:
                    leaves[edge.result] = edge
        priced = {(number, 0, 0): edge for number, edge in leaves.items()}
        edges: list[Edge] = []
        key = self.known
        limit = self.wanted if key is None else first_of(key)
        while True:
            reads = {number: edge.key for number, edge in leaves.items()}
            listing = VectorListing(self.network, reads, self.bounds, self.stop.deadline, limit)
            if self.wanted is not None and listing.least >= self.wanted:
                bound = pack((self.wanted, 0, 0, 0))
                return [], bound, bound
            tree = self._price_steps(listing.best_steps(), priced)
            total = sum(edge.key for edge in tree)
            if key is None or total < key:
                edges, key = tree, total
            if first_of(key) <= listing.limit or self.wanted is not None:
                break
            limit = first_of(key)
        ends_early = self.stop.gains and self.bounds.objective == "time"
        left_over, cut = listing.drop_worse(first_of(key), MOST_LEFT if ends_early else None)
        if left_over > MOST_EDGES:
            prices = {step: first_of(edge.key) for step, edge in priced.items() if edge.children}
            left_over = listing.put_prices(prices, first_of(key))
        try:
            for number in itertools.count():
                bound = pack((int(listing.least), 0, 0, 0))
                stops = not left_over or number > self.stop.priced
                if stops or self._ends(key, bound, left_over + len(leaves) - len(priced)):
                    return edges, key, min(bound, key)
                unpriced = [step for step in listing.best_steps() if step not in priced]
                if left_over <= MOST_EDGES or not unpriced:
                    break
                tree = self._price_steps(listing.best_steps(), priced)
                total = sum(edge.key for edge in tree)
                if total < key:
                    edges, key = tree, total
                left_over = listing.put_prices({step: first_of(priced[step].key) for step in unpriced}, first_of(key))
        except KeyboardInterrupt:
            self.interrupted = True
            return edges, key, min(bound, key)
        edges, key, bound = self._solve(StepGraph(listing.edges(priced), listing.root), (edges, key))
        return edges, key, bound if cut is None else min(bound, pack((cut, 0, 0, 0)))

    def _price_steps(
        self, steps: Sequence[tuple[int, int, int]], priced: dict[tuple[int, int, int], Edge]
    ) -> list[Edge]:
        """Return the steps of a tree, with their prices, from the values that each computes and reads.

        Args:
            steps: the values; see `VectorListing.best_steps`.
            priced: the steps that are priced already; the others are added.
        """
        for result, left, right in steps:
            if (result, left, right) not in priced:
                edge = Edge(result, (left, right) if right else (left,), 0)
                self._price_edge(edge)
                priced[result, left, right] = edge
        return [priced[step] for step in steps]

    def _solve(self, graph: StepGraph, incumbent: tuple[list[Edge], int] | None) -> tuple[list[Edge], int, int]:
        """Return the steps of the best tree, its key, and a lower bound on the key of any tree."""
        left, bound = 0, graph.key
        try:
            while True:
                chosen, bound = graph.best_edges(), graph.key
                if self.wanted is not None and first_of(bound) >= self.wanted:
                    return [], bound, bound
                unpriced = [edge for edge in chosen if not edge.priced]
                for edge in unpriced:
                    self._price_edge(edge)
                key = sum(edge.key for edge in chosen)
                if not unpriced:
                    if incumbent is None or key <= incumbent[1]:
                        return chosen, key, key
                    break  # the graph lacks steps of the incumbent
                left -= len(unpriced)
                if incumbent is None or key < incumbent[1]:
                    incumbent, left = (chosen, key), -1
                graph.raise_keys(unpriced)
                if left < 0:
                    left = graph.drop_worse(incumbent[1])
                if self._ends(incumbent[1], graph.key, left):
                    bound = graph.key
                    break
        except KeyboardInterrupt:
            if incumbent is None:
                raise
            self.interrupted = True
        assert incumbent is not None
        edges, key = incumbent
        return edges, key, min(bound, key)

    def _ends(self, key: int, bound: int, left: int) -> bool:
        """Whether the search ends although its gap is not zero.

        Args:
            key: the key of the best tree so far.
            bound: the key that no tree is below.
            left: how many steps may still have to be priced.
        """
        stop = self.stop
        if self.wanted is not None and (first_of(key) < self.wanted or first_of(bound) >= self.wanted):
            return True
        if self.priced > stop.priced:
            return True
        if stop.deadline is not None and time.monotonic() > stop.deadline:
            return True
        steps = min(left, PRICED_AGAIN * self.priced)
        little = first_of(key - bound) * CALLS < STEP_PICOSECONDS * steps
        return stop.gains and self.bounds.objective == "time" and little

    # -- steps ---------------------------------------------------------------------------------------

    def price(self, op: Op, parts: Sequence[int]) -> int:
        """Return what a step and its gradients add to the score, as one integer.

        Args:
            op: the step.
            parts: the set of operands of each value that it reads.
        """
        needs = tuple(map(self.bounds.wanted, parts))
        if self.priced >= FEW_PRICED and self.by_sizes:
            op = _renamed(op)
        packed = self._prices.get((op, needs))
        if packed is None:
            gradients = self.lower.gradients(op, needs) if any(needs) else ()
            costs = [self.lower(op).cost, *(step.choice.cost for step in gradients)]
            key = add_keys(*map(self.lower.key, costs))
            self.priced += len(costs)
            packed = self._prices[op, needs] = pack(key)
        return packed

    def _leaf_edges(self, operand: int) -> Iterator[tuple[Status, Edge]]:
        """Yield the edges that read an operand, each with the status of its result: as it is, and taking its rows."""
        steps, parts = self.steps, (1 << operand,)
        tree: Tree = Leaf(operand)
        key = 0
        if (cast := steps.cast(operand)) is not None:
            key, tree = self.price(cast, parts), Node(cast.with_layouts(()), (tree,))
        read = Edge(1 << operand, (), key)
        read.tree, read.priced = tree, True
        if (first := steps.first(operand)) is not None:
            read.key += self.price(first, parts)
            read.tree = Node(first.with_layouts(()), (tree,))
        for status, op, cast in steps.casts_last(operand):
            wide = Edge(1 << operand, (), self.price(op, parts) + self.price(cast, parts))
            wide.tree, wide.priced = Node(cast, (Node(op.with_layouts(()), (Leaf(operand),)),)), True
            if status != self.network.open:
                yield status, wide
            elif wide.key < read.key:
                read = wide
        yield self.network.open, read
        for status, op in steps.first_takes(operand):
            take = Edge(0, (), key + self.price(op, parts))
            take.tree, take.priced = Node(op.with_layouts(()), (tree,)), True
            yield status, take

    def _price_edge(self, edge: Edge) -> None:
        """Put the price of an edge in the place of its lower bound."""
        inputs = tuple(map(self.network.value, edge.children))
        edge.op = self.steps.step(inputs, self.network.value(edge.result))
        edge.key, edge.priced = self.price(edge.op, [value.operands for value in inputs]), True

    def _build(self, edges: Sequence[Edge]) -> Tree:
        """Return the tree of some edges; those into a value come before those that read it."""
        trees: dict[int, Tree] = {}
        for edge in edges:
            tree = edge.tree
            if tree is None:
                assert edge.op is not None
                tree = Node(edge.op.with_layouts(()), tuple(trees[child] for child in edge.children))
            trees[edge.result] = tree
        return trees[edges[-1].result]


def _renamed(op: Op) -> Op:
    """Return an op with the first letters in place of its axes, in the same order, so that steps differ in sizes only.

    Ops with index arrays are left as they are.
    """
    spec = op.spec
    if spec.gathers:
        return op
    names = dict(zip((axis for axis, _ in spec.sizes), string.ascii_lowercase, strict=False))
    if len(names) < len(spec.sizes):
        return op
    *inputs, output = (tuple(names[str(axis)] for axis in term) for term in spec.terms)
    sizes = tuple((names[axis], size) for axis, size in spec.sizes)
    return dataclasses.replace(op, spec=Spec(tuple(inputs), output, sizes))
