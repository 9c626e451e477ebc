"""The search's judge: every tree there is, by plain recursion, and what each costs.

Only the *legal steps* are `Network`'s own, since they define the space; no tree is dropped for being worse than
another, and each is priced whole, through `planner.program.build.build`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import reject

from planner.cost.figures import Cost, PlanCost
from planner.program.build import Lowerer
from planner.program.ops import Cast, Einsum, Op
from planner.program.tree import Leaf, Node, Tree
from planner.search.exact.network import Network, Status, Value
from planner.search.space import SearchSpace


@dataclass(frozen=True)
class Grown:
    """A tree for some operands, the status that it reaches and the axis order of its value."""

    tree: Tree
    status: Status
    order: tuple[str, ...]


def every_tree(problem: SearchSpace, most: int = 10**9) -> list[Tree]:
    """All trees of a problem, each in its plain order of evaluation.

    Hypothesis draws another problem if some set of operands has more than `most` trees.
    """
    network, dtype = problem.network, problem.dtype

    def leaf(operand: int) -> Iterator[Grown]:
        term = network.leaves[operand]
        tree: Tree = Leaf(operand)
        if (source := problem.casts[operand]) is not None:
            tree = Node(Cast(step((term,), term), dtype, source_dtype=source), (tree,))
        for status, op, cast in problem.steps.casts_last(operand):  # which casts may come last is part of the space
            later = Node(cast, (Node(op.with_layouts(()), (Leaf(operand),)),))
            yield Grown(later, status, cast.spec.output)
        if len(network.leaves) == 1 and not network.gathers:  # one operand, no index array: one step, if any
            if term != network.result or len(set(term)) < len(term):  # "aa -> aa" keeps the diagonal
                tree = Node(Einsum(step((term,), network.result), dtype), (tree,))
            yield Grown(tree, network.open, network.result)
            return
        tidy = network.term(network.value_axes(Value(1 << operand, network.open)))
        if sorted(term) == sorted(tidy):
            yield Grown(tree, network.open, term)
            return
        # Private and repeated axes go in a step of their own, or in the one that takes.
        yield Grown(Node(Einsum(step((term,), tidy), dtype), (tree,)), network.open, tidy)
        yield Grown(tree, network.open, term)

    def step(terms, output):
        return network.restrict(dataclasses.replace(network.spec, inputs=tuple(terms), output=output))

    def value(operands: int, grown: Grown) -> Value:
        return Value(operands, grown.status)

    def made(operands: int, status: Status, parts: Sequence[tuple[int, Grown]]) -> Grown:
        result = Value(operands, status)
        spec = network.step_spec(tuple((value(o, g), g.order) for o, g in parts), result)
        return Grown(Node(Einsum(spec, dtype), tuple(g.tree for _, g in parts)), status, network.value_term(result))

    def alone(operands: int, grown: Grown) -> Iterator[Grown]:
        """The value itself, and all that steps on it alone lead to."""
        yield grown
        for status in network.advances(value(operands, grown)):
            yield from alone(operands, made(operands, status, [(operands, grown)]))

    def is_tidy(operands: int, grown: Grown) -> bool:
        return sorted(grown.order) == sorted(network.term(network.value_axes(value(operands, grown))))

    known: dict[int, list[Grown]] = {}

    def grow(operands: int) -> list[Grown]:
        if operands in known:
            return known[operands]
        numbers = [i for i in range(len(network.leaves)) if operands >> i & 1]
        found = []
        if len(numbers) == 1:
            starts = [grown for start in leaf(numbers[0]) for grown in alone(operands, start)]
            # A raw operand joins nothing: products see distinct axes only.
            one_step = len(network.leaves) == 1 and not network.gathers
            found = [g for g in starts if one_step or is_tidy(operands, g)]
        for count in range(1, len(numbers)):
            for chosen in itertools.combinations(numbers, count):
                if numbers[0] not in chosen:
                    continue
                left = sum(1 << i for i in chosen)
                right = operands ^ left
                for a, b in itertools.product(grow(left), grow(right)):
                    for status in network.merges(value(left, a), value(right, b)):
                        found += alone(operands, made(operands, status, [(left, a), (right, b)]))
            if len(found) > most:
                reject()
        known[operands] = found
        return found

    everything = (1 << len(network.leaves)) - 1
    return [finished(network, g, dtype) for g in grow(everything) if g.status == network.final]


def finished(network: Network, grown: Grown, dtype: str) -> Tree:
    """Add the step that writes a diagonal, or axes that no input has."""
    if set(grown.order) == set(network.result) and len(network.result) == len(set(network.result)):
        return grown.tree
    if len(network.leaves) == 1 and not network.gathers:
        return grown.tree
    spec = dataclasses.replace(network.spec, inputs=(grown.order,), output=network.result)
    return Node(Einsum(network.restrict(spec), dtype), (grown.tree,))


def every_order(tree: Tree, field: str) -> Iterator[Tree]:
    """The tree with its children evaluated ("order") or descended into ("backward_order") in every order."""
    if isinstance(tree, Leaf):
        yield tree
        return
    free = sum(isinstance(child, Node) for child in tree.children) == 2
    for children in itertools.product(*(tuple(every_order(child, field)) for child in tree.children)):
        for order in ((0, 1), (1, 0)) if free else ((0, 1),):
            yield dataclasses.replace(tree, children=children, **{field: order})


def figure(cost: Cost, objective: str) -> int:
    """What an objective minimises, as an exact integer; times in picoseconds."""
    return {
        "time": round(cost.seconds * 1e12),
        "flops": cost.flops,
        "peak": cost.peak_bytes,
        "retained": cost.retained_bytes,
        "bytes": cost.bytes_moved,
    }[objective]


def every_keep(problem: SearchSpace, tree: Tree) -> Iterator[Tree]:
    """The tree with every choice of which values are kept, of those that the backward program would need."""

    def needs(tree: Tree) -> bool:
        return problem.requires[tree.operand] if isinstance(tree, Leaf) else any(map(needs, tree.children))

    def vary(tree: Tree, needed: bool) -> Iterator[Tree]:
        if isinstance(tree, Leaf):
            yield tree
            return
        for kept in (True, False) if needed else (True,):
            again = not kept
            parts = []
            for child in tree.children:
                siblings = [c for c in tree.children if c is not child]
                parts.append(tuple(vary(child, again or any(map(needs, siblings)))))
            for children in itertools.product(*parts):
                yield dataclasses.replace(tree, children=children, kept=kept)

    return vary(tree, False)


@dataclass(frozen=True)
class Priced:
    """What one tree with one choice of kept values costs, evaluated in the order of least peak."""

    tree: Tree
    cost: PlanCost
    peak: int

    def within(self, memory: float, retain: float) -> bool:
        return self.peak <= memory and self.cost.retained_bytes <= retain


def price(problem: SearchSpace, tree: Tree, lower: Lowerer, orders: bool = True) -> Iterator[Priced]:
    """Price a tree with every choice of kept values."""
    for chosen in every_keep(problem, tree):
        evaluated = every_order(chosen, "order") if orders else [chosen]
        costs = [
            problem.programs(descended, lower).cost
            for ordered in evaluated
            for descended in (every_order(ordered, "backward_order") if orders else [ordered])
        ]
        yield Priced(chosen, costs[0], min(cost.peak_bytes for cost in costs))


def price_all(
    problem: SearchSpace, trees: Sequence[Tree], lower: Lowerer, most: int = 10**9, orders: bool = True
) -> list[Priced]:
    """Price all trees with every choice of kept values.

    Hypothesis draws another problem if that is more than `most` programs.
    """
    count = 0
    for tree in trees:
        choices = sum(1 for _ in every_keep(problem, tree))
        count += choices * math.prod(sum(1 for _ in every_order(tree, f)) for f in ("order", "backward_order"))
        if count > most:
            reject()
    return [priced for tree in trees for priced in price(problem, tree, lower, orders)]


def least(priced: Sequence[Priced], objective: str, memory: float = math.inf, retain: float = math.inf) -> int | None:
    """The least of an objective within limits, or None."""
    allowed = [p for p in priced if p.within(memory, retain)]
    return min((p.peak if objective == "peak" else figure(p.cost, objective) for p in allowed), default=None)


def ops(tree: Tree) -> Iterator[Op]:
    """All steps of a tree."""
    if isinstance(tree, Node):
        yield tree.op
        for child in tree.children:
            yield from ops(child)
