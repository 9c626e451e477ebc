"""Running a plan's tree in JAX, a step for each node; the plan decides what JAX keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from planner.backends.common.masks import mask_term
from planner.backends.common.unread_rows import steps_with_unread_rows
from planner.backends.jax.evaluation import Mode, cast, lowerer_of
from planner.backends.jax.index import index_shape, normalise
from planner.backends.jax.reads import Reads
from planner.backends.jax.rows import OPS
from planner.backends.jax.step import bind_step
from planner.language.spec import Term, plain_axes
from planner.program.implementations import RangedIndices
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
        # Without a checkpoint JAX keeps everything that gradients read. A checkpoint that names all of it is slower.
        return tree.run
    policy = jax.checkpoint_policies.save_only_these_names(KEPT) if tree.kept else None
    kept: Run = jax.checkpoint(tree.run, static_argnums=(2,), policy=policy)
    return kept


class _PlanTree:
    """A plan's tree, with what its nodes need to run.

    Attributes:
        spec: the resolved spec of the contraction.
        lower: chooses the implementations of the steps, and of those derived from them.
        reads: what each node's step reads, by the node's id.
        kept: ids of the nodes whose results are named, where the plan keeps some.
        dropping: whether indices out of range are dropped.
    """

    def __init__(self, plan: PlanRecord) -> None:
        self.plan, self.spec = plan, plan.resolved.spec
        self.lower = lowerer_of(plan)
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
        """Return the value of a part of the tree."""
        if isinstance(tree, Leaf):
            return leaves[tree.operand]
        inputs = [self._value(child, leaves, indices, mode) for child in tree.children]
        run: Callable[..., Any] = partial(self._node, tree, mode)
        if any(self._is_masked(term) for term in self._outer_terms(tree)):
            # The checkpoint keeps operands and index arrays for the backward pass, instead of masks and masked copies.
            run = jax.checkpoint(run)
        result = run(inputs, indices)
        return checkpoint_name(result, KEPT) if id(tree) in self.kept else result

    def _node(self, tree: Node, mode: str, inputs: Sequence[Any], indices: Mapping[str, Any]) -> Any:
        """Run one step. In the contraction's operands and its result, entries of dropped indices are set to zero."""
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
            how = Mode(mode, self.plan.options.precision, self.lower)
            (result,) = bind_step(op, arguments, how, op.output_shapes, reads)
        return self._masked(result, self.spec.output, indices) if self._is_root(tree) and self.dropping else result

    def _is_root(self, tree: Node) -> bool:
        return tree is self.plan.tree

    def _outer_terms(self, tree: Node) -> list[Term]:
        """Return the terms of a node's inputs and result that are operands of the contraction, or its result."""
        terms = [self.spec.inputs[child.operand] for child in tree.children if isinstance(child, Leaf)]
        return [*terms, *[self.spec.output] * self._is_root(tree)]

    def _is_masked(self, term: Term) -> bool:
        """Return whether indices may be dropped and `mask_term` would mask an array with this term."""
        plain = plain_axes(term)
        return self.dropping and any(g.axes and g not in term and set(g.axes) <= set(plain) for g in self.spec.gathers)

    def _masked(self, x: Any, term: Term, indices: Mapping[str, Any]) -> Any:
        """Return an operand or the result with the entries that only dropped indices address set to zero."""
        index = RangedIndices(True)
        for gather in self.spec.gathers:
            values = normalise(indices[gather.array], gather, "drop")
            index[gather] = values.reshape(index_shape(self.spec, gather.array))
        return mask_term(OPS, x.reshape(self.spec.shape(term)), term, self.spec, index)
