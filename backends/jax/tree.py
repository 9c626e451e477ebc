"""A plan's tree, run: a step for each node, and what of their results is kept for a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from planner.backends.common.common import RangedIndices, mask_term, steps_with_unread_rows
from planner.backends.jax.evaluation import cast
from planner.backends.jax.index import index_shape, normalised
from planner.backends.jax.reads import Reads
from planner.backends.jax.rows import OPS
from planner.backends.jax.step import bind_step
from planner.language.spec import Term
from planner.program.ops import Cast
from planner.program.plan import PlanRecord
from planner.program.tree import Leaf, Node, Tree

__all__ = ["Run", "tree_run"]

# From operands, index arrays and an index mode to the result.
Run = Callable[[tuple[Any, ...], tuple[Any, ...], str], Any]

# Name of the values that a plan keeps where it does not keep all.
KEPT = "planner_kept"


def tree_run(plan: PlanRecord) -> Run:
    """Return the function that runs a plan's tree and keeps what the plan says."""
    tree = _PlanTree(plan)
    if plan.keep == "all":
        # Without a checkpoint JAX keeps all that gradients read, and faster than one which names all of it.
        return tree.run
    policy = jax.checkpoint_policies.save_only_these_names(KEPT) if tree.kept else None
    kept: Run = jax.checkpoint(tree.run, static_argnums=(2,), policy=policy)
    return kept


class _PlanTree:
    """A plan's tree with what its nodes need to run.

    Attributes:
        spec: the resolved spec of the contraction.
        lowerings: the implementation of each op.
        reads: what each node's step reads, by the node's id.
        kept: ids of the nodes whose results are named, where the plan keeps some.
        dropping: whether indices out of range are dropped.
    """

    def __init__(self, plan: PlanRecord) -> None:
        self.plan, self.spec = plan, plan.resolved.spec
        self.lowerings = {step.op: step.choice.lowering for step in plan.programs.forward.steps}
        self.reads = {
            id(node): Reads.of(node.op, unread_rows)
            for node, unread_rows in steps_with_unread_rows(plan.tree, self.spec)
        }
        self.kept = {id(node) for node in plan.kept_nodes} if plan.keep == "some" else set()
        self.dropping = plan.index_mode == "drop"

    def run(self, leaves: tuple[Any, ...], index_values: tuple[Any, ...], mode: str) -> Any:
        """Run the tree."""
        tree = self.plan.tree
        if isinstance(tree, Leaf):
            return leaves[tree.operand].reshape(self.spec.output_shape)
        return self._value(tree, leaves, dict(zip(self.spec.arrays, index_values, strict=True)), mode)

    def _value(self, tree: Tree, leaves: Sequence[Any], indices: Mapping[str, Any], mode: str) -> Any:
        """What a part of the tree computes."""
        if isinstance(tree, Leaf):
            return leaves[tree.operand]
        inputs = [self._value(child, leaves, indices, mode) for child in tree.children]
        run: Callable[..., Any] = partial(self._node, tree, mode)
        if any(self._is_masked(term) for term in self._outer_terms(tree)):
            # Else masks and masked copies would be kept for the backward pass, where operands and index arrays do.
            run = jax.checkpoint(run)
        result = run(inputs, indices)
        return checkpoint_name(result, KEPT) if id(tree) in self.kept else result

    def _node(self, tree: Node, mode: str, inputs: Sequence[Any], indices: Mapping[str, Any]) -> Any:
        """One step, with the entries that only dropped indices meet set to zero in operands and result."""
        op = tree.op
        inputs = [
            self._masked(x, self.spec.inputs[child.operand], indices)
            if isinstance(child, Leaf) and self._is_masked(self.spec.inputs[child.operand])
            else x
            for x, child in zip(inputs, tree.children, strict=True)
        ]
        if isinstance(op, Cast):
            (x,) = inputs
            result = cast(x, op.dtype)
        else:
            reads = self.reads[id(tree)]
            arguments = (*inputs, *(indices[name] for name in reads.arrays))
            settings = (mode, self.plan.options.precision)
            (result,) = bind_step(op, arguments, settings, op.output_shapes, reads, self.lowerings[op])
        return self._masked(result, self.spec.output, indices) if self._is_root(tree) and self.dropping else result

    def _is_root(self, tree: Node) -> bool:
        return tree is self.plan.tree

    def _outer_terms(self, tree: Node) -> list[Term]:
        """Terms of the contraction's own operands, and of its result, that a node takes and gives."""
        terms = [self.spec.inputs[child.operand] for child in tree.children if isinstance(child, Leaf)]
        return [*terms, *[self.spec.output] * self._is_root(tree)]

    def _is_masked(self, term: Term) -> bool:
        """Whether indices are dropped and `mask_term` would do anything to a term."""
        plain = {e for e in term if isinstance(e, str)}
        return self.dropping and any(g.axes and g not in term and plain.issuperset(g.axes) for g in self.spec.gathers)

    def _masked(self, x: Any, term: Term, indices: Mapping[str, Any]) -> Any:
        """An operand or the result with the entries that only dropped indices meet set to zero."""
        index = RangedIndices(True)
        for gather in self.spec.gathers:
            values = normalised(indices[gather.array], gather, "drop")
            index[gather] = values.reshape(index_shape(self.spec, gather.array))
        return mask_term(OPS, x.reshape(self.spec.shape(term)), term, self.spec, index)
