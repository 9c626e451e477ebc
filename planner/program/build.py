"""From a tree to its forward and backward programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from planner.cost.figures import PlanCost, StepCost
from planner.cost.layout import Layout, layout_of, strides_in, without_gaps
from planner.cost.objective import Objective, step_key
from planner.language.derive import swap_with_output
from planner.language.options import MODES
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.guards import add_guards, guard_bytes, index_bytes, is_marked, mark_bytes
from planner.program.ops import Cast, Einsum, Gradients, Guard, Op, PricedImplementation
from planner.program.plan import Loop
from planner.program.program import Program, Programs, Step, Variable, live_bytes, peak_by_autograd, program_cost
from planner.program.tree import Leaf, Node, Tree, find_needs, kept_nodes


class GradientStep(NamedTuple):
    """A step of the backward program that computes gradients of a forward step's children.

    Attributes:
        op: what the step computes.
        choice: its implementation.
        served: the children whose gradients it computes.
    """

    op: Op
    choice: PricedImplementation
    served: tuple[int, ...]


# A step is differentiated by its backend, and not by the framework, if its gradients then save this part of the time of
# the step and its gradients, and so many picoseconds. Prices are no more exact than that.
_WORTH_LEAVING, _LEAST_SAVED = 0.15, 10_000_000

# The rows of some steps, by their ops without layouts.
Names = tuple[tuple[Op, str], ...]


def _picoseconds(choices: Sequence[PricedImplementation]) -> int:
    return sum([choice.cost.picoseconds for choice in choices])


class Lowerer:
    """Chooses the implementation of each op by the objective's key. A tie goes to the first in the table.

    Args:
        choices: returns the backend's implementations of an op. There is at least one.
        key: turns a step's cost into what to minimise.
        fixed: implementations chosen beforehand. If a joint gradient is fixed, both gradients are one step. If both
            single gradients are fixed and the joint one is not, they are two steps.
        plain: for each row that the framework differentiates itself, the rows of gradients of its steps. If others are
            predicted to take much less time, the gradients have those under any objective, unless `records` is True.
        records: whether the framework may keep copies, see `Backend`; None if their plan decides.
        names: the rows of some ops without layouts, see `naming`.
    """

    def __init__(
        self,
        choices: Callable[[Op], Sequence[PricedImplementation]],
        key: Callable[[StepCost], tuple[int, ...]],
        fixed: Mapping[Op, PricedImplementation] = MappingProxyType({}),
        plain: Mapping[str, Sequence[str]] = MappingProxyType({}),
        records: bool | None = None,
        names: Mapping[Op, str] = MappingProxyType({}),
    ) -> None:
        self.choices, self.key, self.fixed, self.plain, self.records = choices, key, fixed, plain, records
        self.names = names
        self._chosen: dict[Op, PricedImplementation] = dict(fixed)
        self._gradients: dict[Hashable, tuple[GradientStep, ...]] = {}

    def __repr__(self) -> str:
        return "Lowerer"  # JAX prints it with each step of a program

    def fixing(self, op: Op, choice: PricedImplementation) -> Lowerer:
        """Return a lowerer that uses this implementation for this op, and else chooses as this one does."""
        return Lowerer(self.choices, self.key, {**self.fixed, op: choice}, self.plain, self.records, self.names)

    def naming(self, names: Iterable[tuple[Op, str]]) -> Lowerer:
        """Return a lowerer that uses these rows for ops of any layouts where they run them, and else does as this one.

        If a joint gradient is among the ops, both gradients are one step; if both single ones are, they are two.
        """
        return Lowerer(self.choices, self.key, self.fixed, self.plain, self.records, dict(names))

    def __call__(self, op: Op) -> PricedImplementation:
        """Return the best implementation of an op."""
        choice = self._chosen.get(op)
        if choice is None:
            choices, name = self.choices(op), self.names.get(op.with_layouts(())) if self.names else None
            named = [choice for choice in choices if choice.lowering == name]
            choice = min(named or choices, key=lambda c: self.key(c.cost))
            self._chosen[op] = choice
        return choice

    def gradients(self, op: Op, wanted: tuple[bool, ...], layout: Layout | None = None) -> tuple[GradientStep, ...]:
        """Return the steps that compute the gradients of the wanted children.

        Args:
            op: the forward step.
            wanted: for each child, whether its gradient is needed.
            layout: how the output's gradient lies in memory.
        """
        steps = self._gradients.get((op, wanted, layout))
        if steps is None:
            steps = self._gradients[op, wanted, layout] = self._choose_gradients(op, wanted, layout)
        return steps

    def _among(self, rows: Sequence[str], op: Op) -> PricedImplementation:
        """Return the best implementation of an op that is one of some rows; if none is, the best of all."""
        choice = self(op)
        if choice.lowering in rows:
            return choice
        plain = [choice for choice in self.choices(op) if choice.lowering in rows]
        return min(plain, key=lambda c: self.key(c.cost), default=choice)

    def _is_given(self, op: Op) -> bool:
        """Whether the implementation of an op is fixed, or its row is named."""
        return op in self.fixed or (bool(self.names) and op.with_layouts(()) in self.names)

    def _choose_gradients(self, op: Op, wanted: tuple[bool, ...], layout: Layout | None) -> tuple[GradientStep, ...]:
        if isinstance(op, Loop):
            gradient = op.gradient(layout)
            return (GradientStep(gradient, self(gradient), gradient.served),)
        if isinstance(op, Cast | Guard):
            if not wanted[0]:
                return ()
            back: Op = op
            if isinstance(op, Cast):
                back = dataclasses.replace(op, dtype=op.source_dtype, source_dtype=op.dtype, fused=False)
            back = back.with_layouts([layout])
            return (GradientStep(back, self(back), (0,)),)
        if len(wanted) == 2 and all(wanted):
            joint = op.joint_gradient(layout)
            if self._is_given(joint):
                return (GradientStep(joint, self(joint), (0, 1)),)
        layouts = op.layouts or (None,) * len(wanted)
        ops = []
        for child, want in enumerate(wanted):
            if want:
                lie = (*layouts[:child], layout, *layouts[child + 1 :])
                ops.append((child, Einsum(swap_with_output(op.spec, child), op.dtype, lie if any(lie) else ())))
        rows = self.plain.get(self(op).lowering) if self.plain else None
        choices = [self(swapped) for _, swapped in ops]
        if rows is not None and (self.records or not all(self._is_given(swapped) for _, swapped in ops)):
            plain = [self._among(rows, swapped) for _, swapped in ops]
            worth = max(_WORTH_LEAVING * (_picoseconds(plain) + self(op).cost.picoseconds), _LEAST_SAVED)
            if self.records or _picoseconds(plain) - _picoseconds(choices) < worth:
                choices = plain
        pairs = zip(ops, choices, strict=True)
        single = [GradientStep(swapped, choice, (child,)) for (child, swapped), choice in pairs]
        if len(single) == 2:
            fixed_apart = all(self._is_given(step.op) for step in single)
            if not fixed_apart and self.choices(joint):
                choice = self(joint)
                apart = single[0].choice.cost + single[1].choice.cost
                if self.key(choice.cost) < self.key(apart):
                    return (GradientStep(joint, choice, (0, 1)),)
        return tuple(single)


def lowerer_for(
    contraction: Contraction, objective: Objective, fixed: Mapping[Op, PricedImplementation] = MappingProxyType({})
) -> Lowerer:
    """Return what chooses, for an objective, among the implementations that a plan of a contraction may have."""
    table, key = load_backend(contraction.backend).table, step_key(objective)
    names, device = table.names_for(contraction), contraction.device
    return Lowerer(lambda op: table.choices(op, device, key, names), key, fixed, table.plain)


class _Builder:
    """Turns a tree into steps, and numbers the variables that they read and write."""

    def __init__(self, tree: Tree, operands: Sequence[Variable], requires: Sequence[bool], lower: Lowerer) -> None:
        self.variables = list(operands)
        self.requires, self.lower = requires, lower
        self.needs = find_needs(tree, requires)
        self.layouts: dict[int, Layout | None] = {}

    def layout(self, tree: Tree) -> Layout | None:
        """Return how a tree's value lies in memory. The value must have been computed once."""
        return self.variables[tree.operand].layout if isinstance(tree, Leaf) else self.layouts[id(tree)]

    def needs_gradient(self, tree: Tree) -> bool:
        if isinstance(tree, Leaf):
            return self.requires[tree.operand]
        return self.needs[id(tree)]

    def child_needs(self, node: Node) -> tuple[bool, ...]:
        return tuple(self.needs_gradient(child) for child in node.children)

    def add_variable(
        self, shape: tuple[int, ...], dtype: str, base: int | None = None, layout: Layout | None = None
    ) -> int:
        number = len(self.variables)
        self.variables.append(Variable(shape, dtype, number if base is None else base, layout))
        return number

    def emit(
        self,
        op: Op,
        choice: PricedImplementation,
        inputs: tuple[int, ...],
        steps: list[Step],
        again: bool = False,
        of_operand: bool = False,
    ) -> tuple[int, ...]:
        """Append a step, and return the variables of its results. `of_operand` says that one is an operand's gradient.

        Autograd copies an operand's gradient that repeats elements, so that it is no view.
        """
        is_view = choice.view and not (of_operand and op.repeats)
        base = self.variables[inputs[0]].base if is_view else None
        shapes = op.output_shapes
        layouts = choice.layouts or (None,) * len(shapes)
        outputs = tuple(
            self.add_variable(shape, dtype, base, layout)
            for shape, dtype, layout in zip(shapes, op.output_dtypes, layouts, strict=True)
        )
        steps.append(Step(op, choice, inputs, outputs, recomputed=again and not isinstance(op, Guard)))
        return outputs

    def value(self, tree: Tree, steps: list[Step], values: dict[int, int], again: bool = False) -> int:
        """Return the variable of a tree's value. Emit the steps that compute it unless `values` has it."""
        # The values of the trees that are done, but not for the callers: a guard may stand for its child.
        found: dict[int, int] = {}

        def known(tree: Tree) -> int | None:
            if isinstance(tree, Leaf):
                return tree.operand
            return values.get(id(tree), found.get(id(tree)))

        stack = [tree]
        while stack:
            top = stack[-1]
            if isinstance(top, Leaf) or known(top) is not None:
                stack.pop()
                continue
            missing = [top.children[i] for i in top.order[: len(top.children)] if known(top.children[i]) is None]
            if missing:
                stack += reversed(missing)
                continue
            inputs = tuple(variable for child in top.children if (variable := known(child)) is not None)
            if isinstance(top.op, Guard) and top.op.only_gradients and not again:  # `again`: in the backward program
                found[id(top)] = variable = inputs[0]
            else:
                op = top.op.with_layouts(map(self.layout, top.children))
                (variable,) = self.emit(op, self.lower(op), inputs, steps, again)
                values[id(top)] = variable
            self.layouts[id(top)] = self.variables[variable].layout
        variable_of_tree = known(tree)
        assert variable_of_tree is not None
        return variable_of_tree

    def backward(
        self, tree: Tree, gradient: int, steps: list[Step], values: dict[int, int], into: dict[int, int]
    ) -> None:
        """Emit the backward steps of a tree.

        Args:
            tree: the tree.
            gradient: the variable of its value's gradient.
            steps: where steps are appended.
            values: the variables of the trees' values that exist already.
            into: where the variable of each operand's gradient is entered.
        """
        stack = [(tree, gradient)]
        while stack:
            top, gradient = stack.pop()
            if isinstance(top, Leaf):
                into[top.operand] = gradient
                continue
            gradients = self.gradients(top, gradient, steps, values)
            order = top.backward_order[: len(top.children)]
            stack += [(top.children[child], gradients[child]) for child in reversed(order) if child in gradients]

    def gradients(self, node: Node, gradient: int, steps: list[Step], values: dict[int, int]) -> dict[int, int]:
        """Emit the steps that compute the gradients of a node's children, and return their variables by child.

        The arguments are those of `backward`.
        """
        children = range(len(node.children))
        needs = self.child_needs(node)
        gradients: dict[int, int] = {}
        forward = node.op.with_layouts(map(self.layout, node.children))
        for op, choice, served in self.lower.gradients(forward, needs, self.variables[gradient].layout):
            joint = isinstance(op, Gradients)
            read = [i for i in node.order[: len(children)] if joint or i != served[0]]
            read_values = {i: self.value(node.children[i], steps, values, again=True) for i in read}
            if joint:
                inputs = (gradient, *(read_values[i] for i in children))
            else:
                inputs = tuple(gradient if i == served[0] else read_values[i] for i in children)
            of_operand = any(isinstance(_unguarded(node.children[child]), Leaf) for child in served)
            outputs = self.emit(op, choice, inputs, steps, of_operand=of_operand)
            gradients.update(zip(served, outputs, strict=True))
        return {child: gradients[child] for child in children if needs[child]}


def _unguarded(tree: Tree) -> Tree:
    """Return what a guard guards; any other tree is returned unchanged."""
    return tree.children[0] if isinstance(tree, Node) and isinstance(tree.op, Guard) else tree


class _Peaks:
    """Finds the bytes that programs allocate.

    Attributes:
        outside: the bytes of index arrays in range, which are there as long as a program runs.
    """

    def __init__(self, contraction: Contraction, variables: list[Variable], in_loop: bool) -> None:
        self.contraction, self.variables, self.in_loop = contraction, variables, in_loop
        self.backend, self.spec = load_backend(contraction.backend), contraction.resolved.spec
        self.outside = 0 if in_loop or self.backend.compiles else index_bytes(self.spec)
        self._drops = MODES[contraction.index_mode].bad == "drop"

    def of_steps(
        self, steps: list[Step], given: tuple[int, ...], lasting: tuple[int, ...], held: int, gradient: int | None
    ) -> tuple[list[Step], int]:
        """Return steps with the bytes that are alive in each, and the peak of their program.

        Args:
            steps: the steps.
            given: the variables that the caller owns.
            lasting: those that outlive the program.
            held: bytes that are allocated as long as it runs.
            gradient: the variable of the output's gradient, in a backward program.
        """
        variables, compiled_peak = self.variables, self.backend.compiled_peak
        guarding = None if self.backend.compiles else self._guard_scratch
        steps, peak = live_bytes(steps, variables, given, lasting, held, guarding)
        if compiled_peak is not None:
            mode = self.contraction.index_mode
            peak = held + compiled_peak(steps, variables, given, lasting, gradient, mode)
        return steps, peak

    def of_marks(self, result: int, retained: int) -> int:
        """Return the bytes that are allocated while results that a bad index had a say in become NaN."""
        contraction = self.contraction
        if self.in_loop or self.backend.compiles or not MODES[contraction.index_mode].unmarked:
            return 0
        if not is_marked(self.spec):
            return 0
        return retained + self.variables[result].bytes + mark_bytes(self.spec, contraction.dtype)

    def _guard_scratch(self, step: Step) -> int:
        """Return the scratch of a step for the sake of guards."""
        if isinstance(step.op, Guard):
            return guard_bytes(step.op)
        row = self.backend.table.rows.get(step.choice.lowering)  # a row of a user's own may be missing
        return row.guarded_scratch(step.op, self._drops) if row else 0


def build(
    tree: Tree, contraction: Contraction, operands: Sequence[Variable], lower: Lowerer, in_loop: bool = False
) -> Programs:
    """Turn a tree into its two programs and their cost.

    Args:
        tree: the contraction tree; its nodes say what is kept.
        contraction: the contraction that the tree computes.
        operands: the operands as variables, numbered by position; see `given_variables`.
        lower: chooses each step's implementation.
        in_loop: whether the contraction is a slice. Its index arrays are in range, and its gradients are not
            conjugated: the loop's are.
    """
    requires, backend = contraction.requires_grad, load_backend(contraction.backend)
    tree = add_guards(tree, contraction.resolved.spec, contraction.index_mode, contraction.may_be_differentiated)
    builder = _Builder(tree, operands, requires, lower)
    variables, inputs = builder.variables, tuple(range(len(operands)))
    peaks = _Peaks(contraction, variables, in_loop)

    steps: list[Step] = []
    values: dict[int, int] = {}
    result = builder.value(tree, steps, values)
    saved = {id(node): values[id(node)] for node in kept_nodes(tree, requires)}
    kept = tuple(saved.values())
    steps, peak = peaks.of_steps(steps, inputs, (result, *kept), peaks.outside, None)
    retained_bases = {variables[v].base for v in kept} - {variables[result].base} - set(inputs)
    retained = sum(variables[base].bytes for base in retained_bases)
    peak = max(peak, peaks.of_marks(result, retained))
    if kept:
        steps = [dataclasses.replace(step, keeps=tuple([v for v in step.inputs if v in kept])) for step in steps]

    output_gradient = builder.add_variable(
        variables[result].shape, contraction.dtype, layout=_gradient_layout(contraction, variables[result])
    )
    gradients: dict[int, int] = {}
    backward, backward_cost, copies = None, None, None
    if builder.needs_gradient(tree):
        back: list[Step] = []
        builder.backward(tree, output_gradient, back, dict(saved), gradients)
        if not in_loop and backend.kept_copies:
            found = backend.kept_copies(contraction, tree, steps, back, lower.records)
            if found is not None:
                copies, steps, back = found
                retained += copies
                peak = peak if len(steps) == 1 else peak + copies
        held = peaks.outside + retained
        if backend.conjugated_bytes is not None and not in_loop:
            held += backend.conjugated_bytes(contraction, back, variables, output_gradient)
        given, results = (*inputs, output_gradient, *kept), tuple(gradients.values())
        back, back_peak = peaks.of_steps(back, given, results, held, output_gradient)
        if lower.records:
            back_peak = peak_by_autograd(back, variables, output_gradient, back_peak)
        backward = Program(tuple(back), given, results, back_peak)
        backward_cost = program_cost(back, back_peak, retained)
    return Programs(
        variables=tuple(variables),
        forward=Program(tuple(steps), inputs, (result,), peak),
        backward=backward,
        result=result,
        kept=kept,
        output_gradient=output_gradient,
        gradients=tuple(gradients.get(i) for i in inputs),
        cost=PlanCost.of(program_cost(steps, peak, retained), backward_cost),
        copies=copies,
        by_autograd=backward is not None and lower.records is True,
    )


def _gradient_layout(contraction: Contraction, result: Variable) -> Layout | None:
    """Return how the output's gradient lies: as the caller says, or as the result, if element-wise functions follow."""
    strides = contraction.gradient_strides
    return without_gaps(result.layout) if strides is None else layout_of(result.shape, strides)


def given_variables(contraction: Contraction) -> tuple[Variable, ...]:
    """Return the operands of a contraction as variables."""
    strided = load_backend(contraction.backend).strided
    shapes = zip(contraction.resolved.shapes, contraction.operands, strict=True)
    return tuple(
        Variable(shape, o.dtype, number, layout_of(shape, strides_in(o, shape)) if strided else None)
        for number, (shape, o) in enumerate(shapes)
    )
