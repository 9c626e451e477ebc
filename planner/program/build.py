"""From a tree to its forward and backward programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType

from planner.cost.figures import PlanCost, StepCost
from planner.cost.layout import Layout, layout_of, strides_in, without_gaps
from planner.language.derive import transpose
from planner.language.resolve import Resolved
from planner.language.spec import Operand
from planner.program.frameworks import load_backend
from planner.program.ops import Cast, JointGradient, Op, PricedImplementation
from planner.program.program import Program, Programs, Step, Variable, live_bytes, program_cost
from planner.program.tree import Leaf, Node, Tree, kept_nodes

__all__ = ["Lowerer", "build", "given_variables"]


class Lowerer:
    """Chooses the implementation of each op by the key of the objective; ties keep the table's order.

    Args:
        choices: the backend's offers for an op, at least one.
        key: what to minimise, of a step's cost.
        fixed: implementations that are given; that of a pair of gradients goes before two steps.
    """

    def __init__(
        self,
        choices: Callable[[Op], Sequence[PricedImplementation]],
        key: Callable[[StepCost], tuple[int, ...]],
        fixed: Mapping[Op, PricedImplementation] = MappingProxyType({}),
    ) -> None:
        self.choices, self.key, self.fixed = choices, key, fixed
        self._chosen: dict[Op, PricedImplementation] = dict(fixed)
        self._gradients: dict[Hashable, tuple[tuple[Op, PricedImplementation, tuple[int, ...]], ...]] = {}

    def fixing(self, op: Op, choice: PricedImplementation) -> Lowerer:
        """Return one that has this implementation for this op."""
        return Lowerer(self.choices, self.key, {**self.fixed, op: choice})

    def __call__(self, op: Op) -> PricedImplementation:
        """Return the best implementation of an op."""
        choice = self._chosen.get(op)
        if choice is None:
            choice = min(self.choices(op), key=lambda c: self.key(c.cost))
            self._chosen[op] = choice
        return choice

    def gradients(
        self, op: Op, wanted: tuple[bool, ...], layout: Layout | None = None
    ) -> tuple[tuple[Op, PricedImplementation, tuple[int, ...]], ...]:
        """Return the steps that give the wanted children's gradients: op, implementation, children served.

        Args:
            op: the forward step.
            wanted: which children need a gradient.
            layout: how the output's gradient lies in memory.
        """
        known = self._gradients.get((op, wanted, layout))
        if known is None:
            known = self._gradients[op, wanted, layout] = self._choose_gradients(op, wanted, layout)
        return known

    def _choose_gradients(
        self, op: Op, wanted: tuple[bool, ...], layout: Layout | None
    ) -> tuple[tuple[Op, PricedImplementation, tuple[int, ...]], ...]:
        if isinstance(op, Cast):
            back = dataclasses.replace(op, dtype=op.source_dtype, source_dtype=op.dtype).with_layouts([layout])
            return ((back, self(back), (0,)),) if wanted[0] else ()
        layouts = op.layouts or (None,) * len(wanted)
        single = []
        for child, want in enumerate(wanted):
            if want:
                gradient = dataclasses.replace(op, spec=transpose(op.spec, child))
                gradient = gradient.with_layouts((*layouts[:child], layout, *layouts[child + 1 :]))
                single.append((gradient, self(gradient), (child,)))
        if len(single) == 2:
            pair = op.joint_gradient(layout)
            if self.choices(pair):
                choice = self(pair)
                apart = single[0][1].cost + single[1][1].cost
                if pair in self.fixed or self.key(choice.cost) < self.key(apart):
                    return ((pair, choice, (0, 1)),)
        return tuple(single)


class _Builder:
    def __init__(self, operands: Sequence[Variable], requires: Sequence[bool], lower: Lowerer) -> None:
        self.variables = list(operands)
        self.requires, self.lower = requires, lower
        self.needs: dict[int, bool] = {}
        self.layouts: dict[int, Layout | None] = {}

    def layout(self, tree: Tree) -> Layout | None:
        """How a tree's value lies in memory, which must have been computed once."""
        return self.variables[tree.operand].layout if isinstance(tree, Leaf) else self.layouts[id(tree)]

    def needs_gradient(self, tree: Tree) -> bool:
        if isinstance(tree, Leaf):
            return self.requires[tree.operand]
        known = self.needs.get(id(tree))
        if known is None:
            known = self.needs[id(tree)] = any(self.needs_gradient(child) for child in tree.children)
        return known

    def child_needs(self, node: Node) -> tuple[bool, ...]:
        return tuple(self.needs_gradient(child) for child in node.children)

    def variable(
        self, shape: tuple[int, ...], dtype: str, base: int | None = None, layout: Layout | None = None
    ) -> int:
        number = len(self.variables)
        self.variables.append(Variable(shape, dtype, number if base is None else base, layout))
        return number

    def emit(
        self, op: Op, choice: PricedImplementation, inputs: tuple[int, ...], steps: list[Step], again: bool = False
    ) -> tuple[int, ...]:
        base = self.variables[inputs[0]].base if choice.view else None
        shapes = op.output_shapes
        layouts = choice.layouts or (None,) * len(shapes)
        outputs = tuple(
            self.variable(shape, op.dtype, base, layout) for shape, layout in zip(shapes, layouts, strict=True)
        )
        steps.append(Step(op, choice, inputs, outputs, recomputed=again))
        return outputs

    def value(self, tree: Tree, steps: list[Step], values: dict[int, int], again: bool = False) -> int:
        """Return the variable of a tree's value; emit the steps that compute it unless it is there."""
        if isinstance(tree, Leaf):
            return tree.operand
        if id(tree) not in values:
            for child in tree.order[: len(tree.children)]:
                self.value(tree.children[child], steps, values, again)
            inputs = tuple(self.value(child, steps, values) for child in tree.children)
            op = tree.op.with_layouts(map(self.layout, tree.children))
            values[id(tree)] = made = self.emit(op, self.lower(op), inputs, steps, again)[0]
            self.layouts[id(tree)] = self.variables[made].layout
        return values[id(tree)]

    def backward(
        self, tree: Tree, gradient: int, steps: list[Step], values: dict[int, int], into: dict[int, int]
    ) -> None:
        if isinstance(tree, Leaf):
            into[tree.operand] = gradient
            return
        needs = self.child_needs(tree)
        gradients: dict[int, int] = {}
        forward = tree.op.with_layouts(map(self.layout, tree.children))
        for op, choice, served in self.lower.gradients(forward, needs, self.variables[gradient].layout):
            read = [i for i in tree.order[: len(tree.children)] if isinstance(op, JointGradient) or i != served[0]]
            found = {i: self.value(tree.children[i], steps, values, again=True) for i in read}
            if isinstance(op, JointGradient):
                inputs = (gradient, *(found[i] for i in range(len(tree.children))))
            else:
                inputs = tuple(gradient if i == served[0] else found[i] for i in range(len(tree.children)))
            gradients.update(zip(served, self.emit(op, choice, inputs, steps), strict=True))
        for child in tree.backward_order[: len(tree.children)]:
            if needs[child]:
                self.backward(tree.children[child], gradients[child], steps, values, into)


def build(
    tree: Tree,
    operands: Sequence[Variable],
    requires: Sequence[bool],
    lower: Lowerer,
    dtype: str,
    gradient_strides: Sequence[int] | None = None,
) -> Programs:
    """Turn a tree into its two programs and their cost.

    Args:
        tree: the contraction tree; its nodes say what is kept.
        operands: the operands as variables, numbered by position.
        requires: which operands need a gradient.
        lower: chooses each step's implementation.
        dtype: dtype of the result.
        gradient_strides: how the output's gradient lies; None where nothing says so.
    """
    builder = _Builder(operands, requires, lower)
    count = len(operands)
    steps: list[Step] = []
    values: dict[int, int] = {}
    result = builder.value(tree, steps, values)
    differentiable = builder.needs_gradient(tree)
    left = kept_nodes(tree, requires)
    kept = tuple(values[id(node)] for node in left)
    variables = builder.variables
    steps, peak = live_bytes(steps, variables, range(count), (result, *kept))
    bases = {variables[v].base for v in kept} - {variables[result].base} - set(range(count))
    retained = sum(variables[base].bytes for base in bases)
    steps = [dataclasses.replace(s, keeps=tuple(v for v in s.inputs if v in kept)) for s in steps]
    forward = Program(tuple(steps), tuple(range(count)), (result,), peak)
    forward_cost = program_cost(steps, peak, retained)

    gradients: dict[int, int] = {}
    shape = variables[result].shape
    # It is taken to lie as the result does: so do gradients that come of element-wise functions.
    alike = without_gaps(variables[result].layout)
    layout = alike if gradient_strides is None else layout_of(shape, gradient_strides)
    output_gradient = builder.variable(shape, dtype, layout=layout)
    backward, backward_cost = None, None
    if differentiable:
        back: list[Step] = []
        values = {id(node): values[id(node)] for node in left}
        builder.backward(tree, output_gradient, back, values, gradients)
        given = (*range(count), output_gradient, *kept)
        back, back_peak = live_bytes(back, variables, given, tuple(gradients.values()), retained)
        backward = Program(tuple(back), given, tuple(gradients.values()), back_peak)
        backward_cost = program_cost(back, back_peak, retained)
    return Programs(
        tuple(variables), forward, backward, result, kept, output_gradient,
        tuple(gradients.get(i) for i in range(count)), PlanCost.of(forward_cost, backward_cost),
    )  # fmt: skip


def given_variables(resolved: Resolved, operands: Sequence[Operand], backend: str) -> tuple[Variable, ...]:
    """Return the operands of a resolved problem as variables."""
    strided = load_backend(backend).strided
    return tuple(
        Variable(shape, o.dtype, number, layout_of(shape, strides_in(o, shape)) if strided else None)
        for number, (shape, o) in enumerate(zip(resolved.shapes, operands, strict=True))
    )
