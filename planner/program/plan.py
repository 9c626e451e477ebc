"""A plan as data: what was chosen for one contraction, and what it costs. `planner.plan.Plan` adds the methods."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from planner.cost.figures import PlanCost
from planner.program.callbacks import callbacks
from planner.program.contraction import Contraction
from planner.program.program import Keep, Programs, Step
from planner.program.tree import Tree, path_of

__all__ = ["AnyPlan", "Loop", "PlanRecord"]


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A contraction done slice by slice. No value of a slice outlives the slice, not even in the backward program.

    Attributes:
        axes: each axis that is cut and the size of its slices, the outermost axis first. The last slice may be shorter.
        body: the plan of one whole slice.
    """

    axes: tuple[tuple[str, int], ...]
    body: PlanRecord

    def __str__(self) -> str:
        return "loop over " + ", ".join(f"{axis} by {size}" for axis, size in self.axes)


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
        loop: the loop over slices, if the plan is one. Then each program is one step, which runs the loop.
        compiled_bytes: the larger peak of the two compiled programs; None if there was no memory limit to check.
    """

    tree: Tree
    programs: Programs
    known_naive_cost: PlanCost | None = dataclasses.field(default=None, compare=False)
    proven: bool
    origin: str
    loop: Loop | None = None
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
        return self.known_naive_cost or callbacks().naive_cost(self.contraction)

    @property
    def cost(self) -> PlanCost:
        """Predicted cost of both programs."""
        return self.programs.cost

    @property
    def steps(self) -> tuple[Step, ...]:
        """Steps of the forward program, then those of the backward program."""
        return self.programs.steps

    @property
    def keep(self) -> Keep:
        """What the forward program keeps for the backward one: "all" that it needs, "some" or the "inputs"."""
        backward = self.programs.backward
        if backward is not None and self.loop is not None:
            return "inputs"
        if backward is None or not any(step.recomputed for step in backward.steps):
            return "all"
        bases = {self.programs.variables[v].base for v in self.programs.kept}
        return "some" if bases - set(range(len(self.operands))) else "inputs"

    @property
    def path(self) -> tuple[tuple[int, ...], ...]:
        """The order of contraction in opt_einsum's form."""
        return path_of(self.tree, len(self.operands))


# A `PlanRecord` or a `Plan`. A function that takes one returns the same type.
AnyPlan = TypeVar("AnyPlan", bound=PlanRecord)
