"""Forward and backward as two programs of one form, and the one liveness loop that prices both.

A tree says which steps are done; `build` turns it into a `Program`, a list of steps in SSA form. The backward
program is derived from the same tree: each step's gradients are its transposed specs. What the two share is what
is kept: of the values that the backward program needs, those whose node says so. The others it computes again, each
once, where the gradient first reaches a step that reads them, from operands, kept values and what is still there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from planner.cost.figures import Cost, PlanCost, StepCost, itemsize
from planner.cost.layout import Layout, closed, layout_of
from planner.language.derive import transpose
from planner.program.ops import Choice, Op

__all__ = ["Keep", "Leaf", "Lowerer", "Node", "Program", "Programs", "Step", "Tree", "Variable", "build",
           "keeping", "kept_nodes", "live_bytes", "read_by_gradients"]  # fmt: skip

Keep = Literal["all", "some", "inputs"]


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An operand, by number."""

    operand: int


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A step of the contraction tree.

    Attributes:
        op: what it computes.
        children: what it reads.
        order: children in the order in which the forward program evaluates them.
        backward_order: children in the order in which the backward program descends into them.
        kept: whether its value, where the backward program needs it, is left by the forward program; else it is
            computed again.
    """

    op: Op
    children: tuple[Tree, ...]
    order: tuple[int, ...] = (0, 1)
    backward_order: tuple[int, ...] = (0, 1)
    kept: bool = True


Tree = Leaf | Node


def keeping(tree: Tree, kept: bool) -> Tree:
    """Return a tree of which all values are kept, or none."""
    if isinstance(tree, Leaf):
        return tree
    return dataclasses.replace(tree, children=tuple(keeping(child, kept) for child in tree.children), kept=kept)


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """A value of a program.

    Attributes:
        shape, dtype: what it is.
        base: the variable whose storage it shares: itself, if its own.
        layout: how it lies in memory; None where it is row-major, or where that makes no difference.
    """

    shape: tuple[int, ...]
    dtype: str
    base: int
    layout: Layout | None = None

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of a program: an op in one implementation, from variables to variables.

    Attributes:
        op: what it computes.
        choice: the implementation and its cost.
        inputs, outputs: numbers of variables.
        releases: variables that no later step reads; their storage may go.
        live_bytes: bytes newly allocated while it runs, scratch included.
        keeps: variables among its inputs that stay alive for the backward program.
        recomputed: whether it computes again, in the backward program, what the forward program did not keep.
    """

    op: Op
    choice: Choice
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    releases: tuple[int, ...] = ()
    live_bytes: int = 0
    keeps: tuple[int, ...] = ()
    recomputed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Steps, with the variables given to it and the ones it leaves."""

    steps: tuple[Step, ...]
    given: tuple[int, ...]
    results: tuple[int, ...]
    peak_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Programs:
    """Both programs of a plan over one table of variables.

    Attributes:
        variables: operands first, then in the order in which they are made.
        forward: gives `result` from the operands.
        backward: gives the operands' gradients from `output_gradient`; None if none needs one.
        kept: variables that the forward program leaves to the backward program, operands not counted.
        gradients: for each operand the variable of its gradient, or None.
    """

    variables: tuple[Variable, ...]
    forward: Program
    backward: Program | None
    result: int
    kept: tuple[int, ...]
    output_gradient: int
    gradients: tuple[int | None, ...]
    cost: PlanCost

    @property
    def row_major(self) -> bool:
        """Whether all values that steps read are row-major, operands aside: as the search takes them to be."""
        steps = self.forward.steps + (self.backward.steps if self.backward else ())
        computed = len(self.gradients)
        return not any(self.variables[v].layout for step in steps for v in step.inputs if v >= computed)


class Lowerer:
    """Chooses the implementation of each op by the key of the objective; ties keep the table's order.

    Args:
        choices: the backend's offers for an op, at least one.
        key: what to minimise, of a step's cost.
        fixed: implementations that are given; that of a pair of gradients goes before two steps.
    """

    def __init__(
        self,
        choices: Callable[[Op], Sequence[Choice]],
        key: Callable[[StepCost], tuple[int, ...]],
        fixed: Mapping[Op, Choice] = MappingProxyType({}),
    ) -> None:
        self.choices, self.key, self.fixed = choices, key, fixed
        self._chosen: dict[Op, Choice] = dict(fixed)
        self._gradients: dict[Hashable, tuple[tuple[Op, Choice, tuple[int, ...]], ...]] = {}

    def fixing(self, op: Op, choice: Choice) -> Lowerer:
        """Return one that has this implementation for this op."""
        return Lowerer(self.choices, self.key, {**self.fixed, op: choice})

    def __call__(self, op: Op) -> Choice:
        """Return the best implementation of an op."""
        choice = self._chosen.get(op)
        if choice is None:
            choice = min(self.choices(op), key=lambda c: self.key(c.cost))
            self._chosen[op] = choice
        return choice

    def gradients(
        self, op: Op, wanted: tuple[bool, ...], layout: Layout | None = None
    ) -> tuple[tuple[Op, Choice, tuple[int, ...]], ...]:
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
    ) -> tuple[tuple[Op, Choice, tuple[int, ...]], ...]:
        if op.source_dtype is not None:
            back = dataclasses.replace(op, dtype=op.source_dtype, source_dtype=op.dtype).laid([layout])
            return ((back, self(back), (0,)),) if wanted[0] else ()
        layouts = op.layouts or (None,) * len(wanted)
        single = []
        for child, want in enumerate(wanted):
            if want:
                gradient = dataclasses.replace(op, spec=transpose(op.spec, child))
                gradient = gradient.laid((*layouts[:child], layout, *layouts[child + 1 :]))
                single.append((gradient, self(gradient), (child,)))
        if len(single) == 2:
            pair = op.paired(layout)
            if self.choices(pair):
                choice = self(pair)
                apart = single[0][1].cost + single[1][1].cost
                if pair in self.fixed or self.key(choice.cost) < self.key(apart):
                    return ((pair, choice, (0, 1)),)
        return tuple(single)


def read_by_gradients(needs: Sequence[bool]) -> tuple[bool, ...]:
    """Which children's values a step's gradients read: each whose sibling needs a gradient."""
    return tuple(any(needs[:i]) or any(needs[i + 1 :]) for i in range(len(needs)))


def kept_nodes(tree: Tree, requires: Sequence[bool]) -> tuple[Node, ...]:
    """Return the nodes below a tree whose values the forward program leaves to the backward program.

    That needs what gradient steps read, and what the values are computed from that are computed again.

    Args:
        tree: the contraction tree.
        requires: which operands need a gradient.
    """
    found: list[Node] = []
    needs: dict[int, bool] = {}

    def needs_gradient(tree: Tree) -> bool:
        if isinstance(tree, Leaf):
            return requires[tree.operand]
        if id(tree) not in needs:
            needs[id(tree)] = any(needs_gradient(child) for child in tree.children)
        return needs[id(tree)]

    def visit(node: Node, recomputed: bool) -> None:
        reads = read_by_gradients([needs_gradient(child) for child in node.children])
        for child, read in zip(node.children, reads, strict=True):
            if isinstance(child, Node):
                needed = read or recomputed
                if needed and child.kept:
                    found.append(child)
                visit(child, needed and not child.kept)

    if isinstance(tree, Node):
        visit(tree, False)
    return tuple(found)


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
        self, op: Op, choice: Choice, inputs: tuple[int, ...], steps: list[Step], again: bool = False
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
            op = tree.op.laid(map(self.layout, tree.children))
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
        forward = tree.op.laid(map(self.layout, tree.children))
        for op, choice, served in self.lower.gradients(forward, needs, self.variables[gradient].layout):
            read = [i for i in tree.order[: len(tree.children)] if op.pair or i != served[0]]
            found = {i: self.value(tree.children[i], steps, values, again=True) for i in read}
            if op.pair:
                inputs = (gradient, *(found[i] for i in range(len(tree.children))))
            else:
                inputs = tuple(gradient if i == served[0] else found[i] for i in range(len(tree.children)))
            gradients.update(zip(served, self.emit(op, choice, inputs, steps), strict=True))
        for child in tree.backward_order[: len(tree.children)]:
            if needs[child]:
                self.backward(tree.children[child], gradients[child], steps, values, into)


def live_bytes(
    steps: Sequence[Step], variables: Sequence[Variable], given: Sequence[int], held: Sequence[int], start: int = 0
) -> tuple[list[Step], int]:
    """Price a program: what is alive while each step runs, and the most of it.

    Storage is alive from the step that makes it to the last that reads it or a view of it; what is `held` never
    dies. Given variables cost nothing.

    Args:
        steps: the program.
        variables: the table of variables.
        given: variables that the caller owns.
        held: variables that outlive the program.
        start: bytes that are alive all the time.

    Returns:
        The steps with `releases` and `live_bytes` filled in, and the peak.
    """
    free = {variables[v].base for v in given}
    forever = {variables[v].base for v in held}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for variable in (*step.inputs, *step.outputs):
            last[variables[variable].base] = number
    dying: dict[int, list[int]] = {}
    for base, number in last.items():
        if base not in forever:
            dying.setdefault(number, []).append(base)
    live = peak = start
    priced = []
    for number, step in enumerate(steps):
        live += sum(variables[v].bytes for v in step.outputs if variables[v].base == v and v not in free)
        now = live + step.choice.cost.scratch_bytes
        peak = max(peak, now)
        gone = dying.get(number, [])
        live -= sum(variables[base].bytes for base in gone if base not in free)
        releases = tuple(
            v
            for v in dict.fromkeys((*step.inputs, *step.outputs))
            if variables[v].base in gone and variables[v].base not in free
        )
        priced.append(dataclasses.replace(step, releases=releases, live_bytes=now))
    return priced, peak


def _cost(steps: Sequence[Step], peak: int, retained: int) -> Cost:
    costs = [step.choice.cost for step in steps]
    return Cost(
        flops=sum(c.flops for c in costs),
        bytes_moved=sum(c.bytes_moved for c in costs),
        copied_bytes=sum(c.copied_bytes for c in costs),
        peak_bytes=peak,
        retained_bytes=retained,
        seconds=sum(c.picoseconds for c in costs) / 1e12,
    )


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
    forward_cost = _cost(steps, peak, retained)

    gradients: dict[int, int] = {}
    shape = variables[result].shape
    # It is taken to lie as the result does: so do gradients that come of element-wise functions.
    alike = closed(variables[result].layout)
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
        backward_cost = _cost(back, back_peak, retained)
    return Programs(
        tuple(variables), forward, backward, result, kept, output_gradient,
        tuple(gradients.get(i) for i in range(count)), PlanCost.of(forward_cost, backward_cost),
    )  # fmt: skip
