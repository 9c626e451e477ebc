"""A candidate made better where its search left something open: the order of children, and faster implementations."""

from __future__ import annotations

import dataclasses

from planner.cost.limits import within
from planner.cost.objective import plan_key
from planner.program.ops import JointGradient
from planner.program.tree import Leaf, Node, Tree
from planner.search.space import Candidate, SearchSpace

__all__ = ["order_children", "quicken_steps"]

# Each try builds the programs anew.
MOST_NODES, MOST_OPS = 12, 24


def quicken_steps(space: SearchSpace, candidate: Candidate) -> Candidate:
    """Run steps in better implementations, one after the other, where the limits leave room.

    A search for the least peak takes the leanest of each, also in a program, or a step, that is far from the limit. The
    slowest steps have their turn first.
    """
    options = space.options
    key = plan_key(options.minimize)
    if not within(candidate.cost, options):
        return candidate
    forward, backward = candidate.programs.forward, candidate.programs.backward
    steps = forward.steps + (backward.steps if backward else ())
    ops = [step.op for step in sorted(steps, key=lambda step: -step.choice.cost.picoseconds)]
    if backward:
        # Both gradients in one step, where they are two now.
        known = dict.fromkeys((v.shape, v.layout) for v in candidate.programs.variables)
        pairs = [step.op for step in forward.steps if len(step.inputs) == 2]
        ops += [op.joint_gradient(layout) for op in pairs for shape, layout in known if shape == op.spec.output_shape]
    for op in [op for op in dict.fromkeys(ops) if len(space.choices(op)) > 1 or isinstance(op, JointGradient)][
        :MOST_OPS
    ]:
        for choice in sorted(space.choices(op), key=lambda choice: choice.cost.picoseconds):
            lower = candidate.lower.fixing(op, choice)
            programs = space.programs(candidate.tree, lower)
            if within(programs.cost, options) and key(programs.cost) < key(candidate.cost):
                candidate = dataclasses.replace(candidate, programs=programs, lower=lower, proven=False)
                break
    return candidate


def order_children(space: SearchSpace, best: Candidate) -> Candidate:
    """Evaluate children in the order that needs the least memory, where the objective left it open."""
    if space.options.minimize == "peak" or best.loop is not None:
        return best
    nodes = _binary_nodes(best.tree)
    if len(nodes) > MOST_NODES:
        return best
    for path in nodes:
        for field in ("order", "backward_order"):
            tree = _flipped(best.tree, path, field)
            programs = space.programs(tree, best.lower)
            if programs.cost.peak_bytes < best.cost.peak_bytes:
                best = dataclasses.replace(best, tree=tree, programs=programs)
    return best


def _binary_nodes(tree: Tree, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if isinstance(tree, Leaf):
        return []
    own = [path] if sum(isinstance(c, Node) for c in tree.children) == 2 else []
    return own + [p for i, child in enumerate(tree.children) for p in _binary_nodes(child, (*path, i))]


def _flipped(tree: Tree, path: tuple[int, ...], field: str) -> Tree:
    assert isinstance(tree, Node)
    if not path:
        if field == "order":
            return dataclasses.replace(tree, order=tree.order[::-1])
        return dataclasses.replace(tree, backward_order=tree.backward_order[::-1])
    children = list(tree.children)
    children[path[0]] = _flipped(children[path[0]], path[1:], field)
    return dataclasses.replace(tree, children=tuple(children))
