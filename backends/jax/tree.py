"""Running a plan's tree in JAX, a step for each node; the plan decides what JAX keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from planner.backends.jax.evaluation import Mode, cast, lowerer_of, plain_row, run_plain
from planner.backends.jax.guards import Guards
from planner.backends.jax.loop import Run, SliceLoop, as_one
from planner.backends.jax.step import bind_step
from planner.program.guards import add_guards
from planner.program.ops import Cast, Guard
from planner.program.plan import Loop, PlanRecord
from planner.program.tree import Leaf, Node, Tree, kept_nodes

# Name of the values that a plan keeps where it does not keep all.
KEPT = "planner_kept"


def tree_run(plan: PlanRecord, inside: bool = False, own: bool = True) -> Run:
    """Return the function that runs a plan's tree and keeps what the plan says.

    Args:
        plan: the plan.
        inside: whether the function runs inside of one that keeps nothing, see `as_one`.
        own: as in `plain_row`.
    """
    tree, backward = _PlanTree(plan, inside, own), plan.programs.backward
    if backward is None or not any(step.recomputed for step in backward.steps):
        # Without a checkpoint JAX keeps everything that gradients read. A checkpoint that names all of it is slower.
        return tree.run
    policy = jax.checkpoint_policies.save_only_these_names(KEPT) if tree.kept else None
    kept: Run = jax.checkpoint(tree.run, static_argnums=(2,), policy=policy)
    return kept


def loop_run(loop: Loop, inside: bool = False) -> Run:
    """Return the function that runs a loop over slices; `inside` is as in `tree_run`."""
    run = SliceLoop(loop, partial(tree_run, inside=True)).run
    # JAX would keep the counters of a loop with a checkpointed body. A checkpoint around the loop computes them again.
    return run if inside else as_one(run)


class _PlanTree:
    """A plan's tree, with what its nodes need to run.

    Attributes:
        tree: the tree with its guards.
        spec: the resolved spec of the contraction.
        lower: chooses the implementations of the steps, and of those derived from them.
        kept: ids of the nodes whose results are named, where the plan keeps some.
        own: as in `plain_row`.
    """

    def __init__(self, plan: PlanRecord, inside: bool, own: bool) -> None:
        self.spec, self.precision, self.own = plan.resolved.spec, plan.options.precision, own
        self.tree = add_guards(plan.tree, self.spec, plan.index_mode, gradients=True)
        self.lower = lowerer_of(plan)
        self.loop_run = cache(partial(loop_run, inside=inside))
        self.kept = {id(node) for node in kept_nodes(self.tree, plan.requires_grad)} if plan.keep == "some" else set()

    def run(self, leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
        """Run the tree."""
        tree = self.tree
        if isinstance(tree, Leaf):
            return leaves[tree.operand].reshape(self.spec.output_shape)
        return self._value(tree, leaves, dict(zip(self.spec.arrays, index_values, strict=True)), mode)

    def _value(self, tree: Tree, leaves: Sequence[Any], indices: Mapping[str, Any], mode: str) -> Any:
        """Return the value of a part of the tree."""
        if isinstance(tree, Leaf):
            return leaves[tree.operand]
        after, node = _guarded(tree)
        if isinstance(node, Leaf) or isinstance(node.op, Cast | Loop):
            # What neither a step before nor a step after can take with it is a step of its own.
            after, node = None, tree
        assert isinstance(node, Node)
        if isinstance(node.op, Loop):
            return self._loop_value(node, node.op, leaves, indices, mode)
        guards, children = zip(*(_guarded(child) for child in node.children), strict=True)
        inputs = [self._value(child, leaves, indices, mode) for child in children]
        op = node.op
        if isinstance(op, Cast):
            if op.fused:
                return inputs[0]
            result = cast(inputs[0], op.dtype)
        elif not any((*guards, after)) and (row := plain_row(op, self.lower, self.own)):
            result = run_plain(op, inputs, row, self.precision)
        else:
            step_guards = Guards.of(op, guards, after)
            arguments = (*inputs, *(indices[name] for name in step_guards.arrays))
            how = Mode(mode, self.precision, self.lower)
            (result,) = bind_step(op, arguments, how, op.output_shapes, step_guards)
        return _kept(result) if id(node) in self.kept else result

    def _loop_value(self, node: Node, loop: Loop, leaves: Sequence[Any], indices: Mapping[str, Any], mode: str) -> Any:
        inputs = tuple(self._value(child, leaves, indices, mode) for child in node.children)
        result = self.loop_run(loop)(inputs, tuple(indices[name] for name in loop.spec.arrays), mode)
        return _kept(result) if id(node) in self.kept else result


def _kept(value: Any) -> Any:
    """Return a value under the name by which the checkpoint keeps it.

    A complex value is named by its real and imaginary parts. JAX rounds values that a checkpoint keeps and the forward
    program also reads, and it cannot round complex numbers.
    """
    if not jax.numpy.iscomplexobj(value):
        return checkpoint_name(value, KEPT)
    return jax.lax.complex(*(checkpoint_name(part(value), KEPT) for part in (jax.lax.real, jax.lax.imag)))


def _guarded(tree: Tree) -> tuple[Guard | None, Tree]:
    """Return the guard at the root of a tree, or None, and what it guards."""
    if isinstance(tree, Node) and isinstance(tree.op, Guard):
        return tree.op, tree.children[0]
    return None, tree
