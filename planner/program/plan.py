"""A plan as data: what was chosen for one contraction, and what it costs. `planner.plan.Plan` adds the methods."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, TypeVar

from planner.cost.figures import PlanCost
from planner.cost.layout import Layout
from planner.cost.objective import plan_key
from planner.language.derive import resize_spec, slice_spec
from planner.language.resolve import Resolved
from planner.language.spec import Gather, pool_letters
from planner.program.callbacks import callbacks
from planner.program.contraction import Contraction
from planner.program.ops import Gradients, Op
from planner.program.program import Keep, Program, Programs, Step
from planner.program.tree import Node, Tree, change_ops, change_tree, nodes_of, path_of

# The origin of a naive plan.
NAIVE = "naive"


@dataclasses.dataclass(frozen=True, slots=True)
class Loop(Op):
    """A contraction of any number of inputs, done slice by slice.

    No value of a slice outlives the slice, not even in the backward program. `planner.program.loops` makes loops.

    Attributes:
        axes: each axis that is cut and the size of its slices, the outermost axis first. The last slice may be shorter.
        bodies: the plan of one whole slice, and the plans of shorter ones in the order of `slice_counts`.
    """

    axes: tuple[tuple[str, int], ...] = dataclasses.field(kw_only=True)
    bodies: tuple[PlanRecord, ...] = dataclasses.field(kw_only=True)

    def __hash__(self) -> int:
        return hash((self.spec, self.axes))  # hashing the bodies takes as long as pricing a step

    @property
    def body(self) -> PlanRecord:
        """The plan of one whole slice."""
        return self.bodies[0]

    @property
    def gradient_reads_all(self) -> bool:
        """True: the gradients are a loop too, which computes the values of each slice again."""
        return True

    def gradient(self, layout: Layout | None) -> LoopGradient:
        """Return the op that computes the gradients, from an output gradient of that layout."""
        layouts = self.layouts or (None,) * len(self.spec.inputs)
        whole = LoopGradient(self.spec, self.dtype, axes=self.axes, bodies=self.bodies)
        return whole.with_layouts((layout, *layouts))

    def program(self, body: PlanRecord) -> Program:
        """Return the program of a body that the loop runs."""
        return body.programs.forward

    def __str__(self) -> str:
        return "loop over " + ", ".join(f"{axis} by {size}" for axis, size in self.axes)


@dataclasses.dataclass(frozen=True, slots=True)
class LoopGradient(Loop, Gradients):
    """All wanted gradients of a loop, slice by slice."""

    __hash__ = Loop.__hash__

    @property
    def served(self) -> tuple[int, ...]:
        """The inputs that need a gradient."""
        return tuple(number for number, operand in enumerate(self.body.operands) if operand.requires_grad)

    @property
    def output_dtypes(self) -> tuple[str, ...]:
        """Dtypes of the inputs that need a gradient."""
        return tuple(self.body.operands[number].dtype for number in self.served)

    def program(self, body: PlanRecord) -> Program:
        """Return the backward program of a body, with its results in the order of the inputs."""
        backward, gradients = body.programs.backward, body.programs.gradients
        assert backward is not None
        return dataclasses.replace(backward, results=tuple(v for v in gradients if v is not None))


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class PlanRecord(Contraction):
    """How one contraction will be done. The searches create it, and backends run it.

    Attributes:
        tree: the chosen contraction tree; its nodes say which values are kept for the backward program.
        programs: the forward and the backward program.
        known_naive_cost: what `naive_cost` returns, or None if it must be found first.
        proven: True if no better plan within the limits exists in the space that was searched. That is all trees and,
            with limits or for peak and retained bytes, all choices of what is kept. Each step uses the implementation
            that the objective prefers, on row-major intermediates.
        origin: how the tree was found.
        compiled_bytes: the larger peak of the two compiled programs; None if there was no memory limit to check.
    """

    tree: Tree
    programs: Programs
    known_naive_cost: PlanCost | None = dataclasses.field(default=None, compare=False)
    proven: bool
    origin: str
    compiled_bytes: int | None = None

    @classmethod
    def of_contraction(cls, contraction: Contraction, **chosen: Any) -> PlanRecord:
        """Return the plan of a contraction. `chosen` holds the attributes that a plan adds to its contraction."""
        contracted = {field.name: getattr(contraction, field.name) for field in dataclasses.fields(Contraction)}
        return cls(**contracted, **chosen)

    @property
    def contraction(self) -> Contraction:
        """The contraction that the plan is for."""
        return Contraction(*(getattr(self, field.name) for field in dataclasses.fields(Contraction)))

    @property
    def naive_cost(self) -> PlanCost:
        """The cost of taking the gathered operands first and contracting pairwise in the framework's way.

        It is searched for when it is asked for: a call that nobody prints does not need it.
        """
        return self.known_naive_cost or self.naive.cost

    @property
    def naive(self) -> Self:
        """The naive plan: take the gathered operands first, then contract pairwise in the framework's own way.

        It is a plan like any other, without limits: print it to see its steps, what they copy and what they keep. It
        is searched for when it is asked for.
        """
        found: PlanRecord = callbacks().naive_plan(self.contraction)
        return dataclasses.replace(
            self,
            **{field: getattr(found, field) for field in ("tree", "programs", "known_naive_cost", "proven", "origin")},
            compiled_bytes=None,
        )

    @property
    def cost(self) -> PlanCost:
        """Predicted cost of both programs."""
        return self.programs.cost

    @property
    def gap(self) -> float | None:
        """How much more the plan may cost than the best possible one: 0.04 for at most 4%; None if it is not known.

        The gap is that between the plan's own figure, as the objective measures it, and `cost.bound`. If that is
        None, as for members of families and plans that were stored without it, a search finds the bound when the gap is
        asked for.
        """
        if callable(self.options.minimize):
            return None
        bound = self.cost.bound
        if bound is None:
            bound = callbacks().lower_bound(self.contraction, self.loop is not None)
        if bound is None:
            return None
        figure: float = plan_key(self.options.minimize)(self.cost)[0]
        if figure <= bound:
            return 0.0
        try:
            return (figure - bound) / bound if bound else math.inf
        except OverflowError:  # no float holds it
            return math.inf

    @property
    def steps(self) -> tuple[Step, ...]:
        """Steps of the forward program, then those of the backward program."""
        return self.programs.steps

    @property
    def keep(self) -> Keep:
        """What the forward program keeps for the backward one: "all" that it needs, "some" or the "inputs"."""
        backward = self.programs.backward
        if not any(step.recomputed or isinstance(step.op, Loop) for step in (backward.steps if backward else ())):
            return "all"
        bases = {self.programs.variables[v].base for v in self.programs.kept}
        return "some" if bases - set(range(len(self.operands))) else "inputs"

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search, and the plan is the best that it had found by then."""
        return self.origin.startswith("interrupted")

    @property
    def loop(self) -> Loop | None:
        """The first loop over slices in the tree; None if there is none."""
        return find_loop(self.tree)

    @property
    def path(self) -> tuple[tuple[int, ...], ...]:
        """The order of contraction in opt_einsum's form."""
        return path_of(without_loops(self.tree), len(self.operands))

    def inner_steps(
        self, steps: Sequence[Step] | None = None, every: bool = False
    ) -> Iterator[tuple[PlanRecord, Step]]:
        """Yield steps with the plan that they are of, in place of each loop the steps of a whole slice.

        Args:
            steps: the steps; those of both programs by default.
            every: whether to yield the steps of shorter slices too.
        """
        for step in self.steps if steps is None else steps:
            if isinstance(step.op, Loop):
                for body in step.op.bodies if every else step.op.bodies[:1]:
                    yield from body.inner_steps(step.op.program(body).steps, every)
            else:
                yield self, step


def find_loop(tree: Tree) -> Loop | None:
    """Return the first loop of a tree, or None."""
    return next((node.op for node in nodes_of(tree) if isinstance(node.op, Loop)), None)


def without_loops(
    tree: Tree, leaves: Sequence[Tree] | None = None, sizes: Mapping[str, int] = MappingProxyType({})
) -> Tree:
    """Return a tree with the steps of a slice, at the sizes of the whole, in place of each loop.

    Args:
        tree: the tree.
        leaves: what to put in place of each operand; nothing by default.
        sizes: the sizes of the whole.
    """

    def change(node: Node, children: tuple[Tree, ...]) -> Tree:
        op = node.op
        if isinstance(op, Loop):
            return without_loops(op.body.tree, children, {**op.spec.by_axis, **sizes})
        return dataclasses.replace(node, op=dataclasses.replace(op, spec=slice_spec(op.spec, sizes)), children=children)

    return change_tree(tree, change, lambda leaf: leaf if leaves is None else leaves[leaf.operand])


def at_symbols(plan: PlanRecord, resolved: Resolved) -> PlanRecord:
    """Return a plan with symbolic sizes in its spec and its tree. Its programs stay at the numbers, to be printed.

    Args:
        plan: the plan, made at numbers.
        resolved: its contraction at the symbols.
    """
    spec, symbolic = plan.resolved.spec, resolved.spec
    sizes: dict[str | Gather, Any] = dict(symbolic.sizes)
    for gather, letter, own in zip(spec.gathers, pool_letters(spec), symbolic.gathers, strict=True):
        sizes[gather] = sizes[letter] = own.size

    def resize(op: Op) -> Op:
        return dataclasses.replace(op, spec=resize_spec(op.spec, sizes))

    tree = change_ops(without_loops(plan.tree), resize)
    return dataclasses.replace(plan, resolved=resolved, tree=tree)


# A `PlanRecord` or a `Plan`. A function that takes one returns the same type.
AnyPlan = TypeVar("AnyPlan", bound=PlanRecord)


# About how many bytes a plan holds in memory, and each of its steps: as a record, and with the functions that run it.
# Measured on 2 to 400 operands, with gradients and without, and on gathers, in torch 2.13 and NumPy on CPython 3.11,
# 2026-11-30. The estimates are 0.7 to 1.3 times what was measured.
_RECORD, _STEP = 3_000, 1_500
_BOUND, _BOUND_STEP, _BOUND_GATHER = 11_000, 2_200, 20_000


def record_bytes(plan: PlanRecord) -> int:
    """Return about how many bytes a plan holds."""
    return _RECORD + _STEP * sum(1 for _ in plan.inner_steps(every=True))


def bound_bytes(plan: PlanRecord) -> int:
    """Return about how many bytes a plan holds with the functions that run it."""
    steps = [_BOUND_STEP + _BOUND_GATHER * bool(step.op.gathers) for _, step in plan.inner_steps(every=True)]
    return _BOUND + sum(steps)
