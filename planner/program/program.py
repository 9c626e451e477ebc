"""The forward and the backward program, and the liveness loop that finds the peak of both.

A tree says which steps are done. `build` turns it into a `Program`, a list of steps in SSA form. The backward program
comes from the same tree: each step's gradients are its transposed specs. The forward program keeps some of the values
that the backward program needs; the nodes of the tree say which. The backward program computes the other values again,
each once: when the gradient first reaches a step that reads the value, from operands, kept values and values that are
still alive.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from planner.cost.figures import Cost, PlanCost
from planner.cost.layout import Layout
from planner.language.dtypes import itemsize
from planner.program.ops import Guard, Op, PricedImplementation

Keep = Literal["all", "some", "inputs"]


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """A value of a program.

    Attributes:
        shape, dtype: shape and dtype of the value.
        base: the variable whose storage it shares, or its own number.
        layout: how it lies in memory; None if it is row-major or the layout makes no difference.
    """

    shape: tuple[int, ...]
    dtype: str
    base: int
    layout: Layout | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the value's elements."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of a program: an op in one implementation, from variables to variables.

    Attributes:
        op: what the step computes.
        choice: the implementation and its cost.
        inputs, outputs: numbers of variables.
        releases: variables that no later step reads, so that their storage can be freed.
        live_bytes: bytes that the program has newly allocated while the step runs, scratch included.
        keeps: variables among its inputs that stay alive for the backward program.
        recomputed: whether the step, in the backward program, repeats a step of the forward program whose value was
            not kept.
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
    """Steps, the variables that the program is given, and those of its results."""

    steps: tuple[Step, ...]
    given: tuple[int, ...]
    results: tuple[int, ...]
    peak_bytes: int

    @property
    def computing(self) -> tuple[Step, ...]:
        """The steps without guards, for which no time and no bytes are predicted."""
        return tuple(step for step in self.steps if not isinstance(step.op, Guard))


@dataclasses.dataclass(frozen=True, slots=True)
class Programs:
    """Both programs of a plan over one table of variables.

    Attributes:
        variables: the operands, then all other values in the order in which they are computed.
        forward: computes `result` from the operands.
        backward: computes the operands' gradients from `output_gradient`; None if no operand needs one.
        result: the variable of the result.
        kept: the variables that the forward program keeps for the backward program, operands not counted.
        output_gradient: the variable of the result's gradient.
        gradients: for each operand, the variable of its gradient or None.
        cost: the cost of both programs.
        copies: what `Backend.kept_copies` returned.
        by_autograd: whether the framework's own autograd was chosen to run the steps; see `prefer_autograd`.
    """

    variables: tuple[Variable, ...]
    forward: Program
    backward: Program | None
    result: int
    kept: tuple[int, ...]
    output_gradient: int
    gradients: tuple[int | None, ...]
    cost: PlanCost
    copies: int | None = None
    by_autograd: bool = False

    @property
    def steps(self) -> tuple[Step, ...]:
        """Steps of the forward program, then those of the backward program."""
        return self.forward.steps + (self.backward.steps if self.backward else ())

    @property
    def given_bytes(self) -> int:
        """The bytes of what a caller is given at once: the result, or the gradients if they are larger."""
        gradients = sum(self.variables[v].bytes for v in self.gradients if v is not None)
        return max(gradients, self.variables[self.result].bytes)

    @property
    def has_guards(self) -> bool:
        """Whether a step is a guard."""
        return any(isinstance(step.op, Guard) for step in self.steps)

    @property
    def row_major(self) -> bool:
        """Whether every intermediate that a step reads is row-major, as the search assumes. Guards do not count."""
        source: dict[int, int] = {}
        read: set[int] = set()
        for step in self.steps:
            inputs = [source.get(v, v) for v in step.inputs]
            if isinstance(step.op, Guard):
                source[step.outputs[0]] = inputs[0]
            else:
                read.update(inputs)
        return not any(self.variables[v].layout for v in read if v >= len(self.gradients))


# Returns the bytes of a program that a compiler makes as a whole: results, and what is alive at once besides.
CompiledPeak = Callable[[Sequence[Step], Sequence[Variable], Sequence[int], Sequence[int], int | None, str], int]
# Returns the scratch of a step for the sake of guards.
Guarding = Callable[[Step], int]


def live_bytes(
    steps: Sequence[Step],
    variables: Sequence[Variable],
    given: Sequence[int],
    held: Sequence[int],
    start: int = 0,
    guarding: Guarding | None = None,
) -> tuple[list[Step], int]:
    """Find the bytes that are alive while each step of a program runs, and the peak.

    Storage is alive from the step that writes it to the last step that reads it or a view of it. Variables in `held`
    stay alive to the end. Given variables cost nothing.

    Args:
        steps: the program.
        variables: the table of variables.
        given: the variables that the caller owns.
        held: the variables that outlive the program.
        start: bytes that are alive all the time.
        guarding: returns the scratch of a step for the sake of guards; None if guards do not count.

    Returns:
        The steps with `releases` and `live_bytes` filled in, as they run one by one, and the peak.
    """
    alive = _alive(steps, variables, given, held, start)
    if guarding is not None:
        copies = _guarded_bytes(steps, variables, held)
        alive = [now + guarding(step) + copied for step, now, copied in zip(steps, alive, copies, strict=True)]
    last_use = {variable: number for number, step in enumerate(steps) for variable in (*step.inputs, *step.outputs)}
    stay = {*given, *held}
    priced = []
    for number, (step, now) in enumerate(zip(steps, alive, strict=True)):
        used = dict.fromkeys((*step.inputs, *step.outputs))
        releases = tuple(v for v in used if last_use[v] == number and v not in stay)
        priced.append(Step(step.op, step.choice, step.inputs, step.outputs, releases, now, step.keeps, step.recomputed))
    return priced, max(alive, default=start)


def peak_by_autograd(back: Sequence[Step], variables: Sequence[Variable], output_gradient: int, peak: int) -> int:
    """Return the peak of a backward program that autograd runs.

    Autograd multiplies for both gradients of a product by element before it sums for one.

    Args:
        back: the steps, with the bytes that are alive in each if they run one by one.
        variables: the table of variables.
        output_gradient: the variable of the output's gradient. Those of the backward program come after it.
        peak: the peak if they run one by one.
    """
    unsummed: dict[int, int] = {}  # by variable: the bytes of products that earlier steps make of it
    for step in back:
        product = step.choice.cost.scratch_bytes - step.choice.cost.copied_bytes
        live = step.live_bytes - (sum(variables[v].bytes for v in step.outputs) if product else 0)  # no sum yet
        for variable in step.inputs:
            if variable >= output_gradient:
                before = unsummed.get(variable, 0)
                peak, unsummed[variable] = max(peak, live + before), before + product
    return peak


def _alive(
    steps: Sequence[Step],
    variables: Sequence[Variable],
    given: Sequence[int],
    held: Sequence[int],
    start: int,
) -> list[int]:
    """Return the bytes that are alive while each step runs."""
    free = {variables[v].base for v in given}
    forever = {variables[v].base for v in held}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for variable in (*step.inputs, *step.outputs):
            base = variables[variable].base
            last[base] = number
    dying: dict[int, int] = dict.fromkeys(range(len(steps)), 0)
    for base, number in last.items():
        if base not in forever and base not in free:
            dying[number] += variables[base].bytes
    live, alive = start, []
    for number, step in enumerate(steps):
        live += sum(variables[v].bytes for v in step.outputs if variables[v].base == v and v not in free)
        alive.append(live + step.choice.cost.scratch_bytes)
        live -= dying[number]
    return alive


def _guarded_bytes(steps: Sequence[Step], variables: Sequence[Variable], held: Sequence[int]) -> list[int]:
    """Return the bytes of the copies that guards make if they act, and that are alive while each step runs."""
    guard: dict[int, int] = {}  # the guard whose copy a variable is, or is a view of
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for variable in set(step.inputs) & set(guard):
            last[guard[variable]] = number
        if isinstance(step.op, Guard):
            guard[step.outputs[0]] = last[number] = number
        elif step.choice.view and step.inputs[0] in guard:
            guard[step.outputs[0]] = guard[step.inputs[0]]
    last |= {guard[variable]: len(steps) - 1 for variable in held if variable in guard}
    alive = [0] * len(steps)
    for first, end in last.items():
        for number in range(first, end + 1):
            alive[number] += variables[steps[first].outputs[0]].bytes
    return alive


def program_cost(steps: Sequence[Step], peak: int, retained: int) -> Cost:
    """Return the cost of a program: the sum over its steps, and the peak and retained bytes given."""
    costs = [step.choice.cost for step in steps]
    return Cost(
        flops=sum(c.flops for c in costs),
        bytes_moved=sum(c.bytes_moved for c in costs),
        copied_bytes=sum(c.copied_bytes for c in costs),
        peak_bytes=peak,
        retained_bytes=retained,
        seconds=sum(c.picoseconds for c in costs) / 1e12,
    )
