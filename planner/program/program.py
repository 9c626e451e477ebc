"""Forward and backward as two programs of one form, and the one liveness loop that prices both.

A tree says which steps are done; `build` turns it into a `Program`, a list of steps in SSA form. The backward
program is derived from the same tree: each step's gradients are its transposed specs. What the two share is what
is kept: of the values that the backward program needs, those whose node says so. The others it computes again, each
once, where the gradient first reaches a step that reads them, from operands, kept values and what is still there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from planner.cost.figures import Cost, PlanCost
from planner.cost.layout import Layout
from planner.language.dtypes import itemsize
from planner.program.ops import Op, PricedImplementation

__all__ = ["Keep", "Program", "Programs", "Step", "Variable", "live_bytes", "program_cost"]

Keep = Literal["all", "some", "inputs"]


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
    choice: PricedImplementation
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


def program_cost(steps: Sequence[Step], peak: int, retained: int) -> Cost:
    """Return what the steps cost together, with the peak and retained bytes of their program."""
    costs = [step.choice.cost for step in steps]
    return Cost(
        flops=sum(c.flops for c in costs),
        bytes_moved=sum(c.bytes_moved for c in costs),
        copied_bytes=sum(c.copied_bytes for c in costs),
        peak_bytes=peak,
        retained_bytes=retained,
        seconds=sum(c.picoseconds for c in costs) / 1e12,
    )
