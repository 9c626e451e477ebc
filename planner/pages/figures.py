"""What the pictures show of a plan, as records: its graph, its memory over time, and the time of each step.

Bytes and picoseconds are integers of any size, so a picture of a network with 10^200 FLOPs is as exact as a table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from planner.cost.figures import StepCost
from planner.inspect.analysis import Analysis, AnalyzedStep
from planner.inspect.text import equation, lowered_to
from planner.language.errors import PlannerError
from planner.language.spec import term_gathers
from planner.language.units import bytes_text
from planner.program.ops import Cast, Guard
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Program, Step

Kind = Literal["operand", "index", "step", "guard", "loop", "result"]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """An operand, an index array, a step or the result. `title` says what, `detail` how large or how."""

    name: str
    kind: Kind
    title: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """A value on its way from the node that has it to the step that reads it.

    Attributes:
        source, target: names of nodes.
        term: the axes of the value; the letter of an index array.
        bytes: bytes of the value.
        kept: whether the forward program keeps it for the backward program.
        gathers: whether the step reads it, or adds into it, at places that an index array names.
    """

    source: str
    target: str
    term: str
    bytes: int
    kept: bool = False
    gathers: bool = False

    @property
    def label(self) -> str:
        """The value as text: its axes and its size."""
        return f"{self.term}, {bytes_text(self.bytes)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """The contraction tree of a plan: nodes, each after all that it reads, and edges."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def graph_of(plan: PlanRecord) -> Graph:
    """Return the contraction tree of a plan. An index array stands beside each step that reads it."""
    programs = plan.programs
    variables = programs.variables
    nodes: list[Node] = []
    edges: list[Edge] = []
    made_by: dict[int, str] = {}
    for number, term in enumerate(plan.resolved.spec.inputs):
        made_by[number] = f"o{number}"
        size = f"{_sizes(variables[number].shape)}, {bytes_text(variables[number].bytes)}"
        nodes.append(Node(f"o{number}", "operand", f"{number}: {_term(term)}", size))
    shapes = dict(plan.index_shapes)
    for number, step in enumerate(programs.forward.steps):
        name = f"s{number}"
        arrays = step.op.arrays
        for letter in arrays:
            shape = shapes.get(letter, ())
            nodes.append(Node(f"{name}{letter}", "index", letter, f"index array, {_sizes(shape)}"))
            edges.append(Edge(f"{name}{letter}", name, letter, 8 * math.prod(shape), gathers=True))
        for variable, term in zip(step.inputs, step.op.input_terms, strict=True):
            gathers = bool(term_gathers(term))
            kept = variable in step.keeps
            edges.append(Edge(made_by[variable], name, _term(term), variables[variable].bytes, kept, gathers))
        nodes.append(Node(name, _kind(step), equation(step), lowered_to(step)))
        made_by.update(dict.fromkeys(step.outputs, name))
    out = variables[programs.result]
    nodes.append(Node("r", "result", _term(plan.resolved.spec.output), f"{_sizes(out.shape)}, {bytes_text(out.bytes)}"))
    edges.append(Edge(made_by[programs.result], "r", _term(plan.resolved.spec.output), out.bytes))
    return Graph(tuple(nodes), tuple(edges))


def _kind(step: Step) -> Kind:
    if isinstance(step.op, Loop):
        return "loop"
    return "guard" if isinstance(step.op, Guard | Cast) else "step"


def _term(term: tuple[object, ...]) -> str:
    return "".join(map(str, term)) or "()"


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """One step of a plan, with what is in memory while it runs, and how long it takes.

    Attributes:
        number: the step's place in `Plan.steps`.
        backward: whether the step is of the backward program.
        step: the step.
        kept: bytes of values that stay alive for the backward program.
        scratch: bytes of the step's scratch.
        live: bytes newly allocated while the step runs: what is kept, scratch, and all other values.
        measured: the measured figures of the step; None if there is no analysis.
    """

    number: int
    backward: bool
    step: Step
    kept: int
    scratch: int
    live: int
    measured: AnalyzedStep | None = None

    @property
    def picoseconds(self) -> int:
        """The predicted time."""
        return self.step.choice.cost.picoseconds

    @property
    def measured_picoseconds(self) -> int | None:
        """The measured time; None if it is not known."""
        seconds = self.measured.measured.seconds if self.measured else None
        return None if seconds is None else round(seconds * 1e12)

    @property
    def measured_live(self) -> int | None:
        """The measured live bytes; None if they are not known."""
        return self.measured.measured.live_bytes if self.measured else None


def moments(plan: PlanRecord, analysis: Analysis | None = None) -> tuple[Moment, ...]:
    """Return the steps of both programs as moments.

    Raises:
        PlannerError: the analysis is that of another plan.
    """
    if not (analysis is None or isinstance(analysis, Analysis)):
        raise PlannerError(f"analysis={analysis!r:.80}: pass what plan.analyze(...) of this plan returned")
    rows = {row.number: row for row in analysis.steps if row.program in ("forward", "backward")} if analysis else {}
    if analysis is not None:
        ours = [(equation(step), lowered_to(step)) for step in plan.steps]
        theirs = [(row.text, row.lowering) for row in rows.values()]
        if ours != theirs:
            raise PlannerError(
                "the analysis is that of another plan: pass what plan.analyze(...) of this plan returned"
            )
    programs = plan.programs
    retained = programs.cost.retained_bytes
    found = list(_moments(plan, programs.forward, 0, False, rows))
    if programs.backward is not None:
        first = len(programs.forward.steps)
        for moment in _moments(plan, programs.backward, first, True, rows):
            found.append(dataclasses.replace(moment, kept=min(retained, moment.live)))
    return tuple(found)


def _moments(
    plan: PlanRecord, program: Program, first: int, backward: bool, rows: dict[int | None, AnalyzedStep]
) -> Iterator[Moment]:
    variables = plan.programs.variables
    free = {*range(len(plan.operands)), variables[plan.programs.result].base}
    later = {variables[v].base for v in plan.programs.kept} - free
    kept = 0
    for number, step in enumerate(program.steps, first):
        kept += sum(variables[v].bytes for v in step.outputs if v in later and variables[v].base == v)
        scratch = min(step.choice.cost.scratch_bytes, step.live_bytes)
        yield Moment(
            number, backward, step, min(kept, step.live_bytes - scratch), scratch, step.live_bytes, rows.get(number)
        )


def time_of(plan: PlanRecord, cost: StepCost) -> str:
    """Return what the time of a step goes into: "compute", "memory", or "neither" if neither is half of it.

    The first two compare its FLOPs at the device's full rate, and its bytes at that of memory or the cache, with the
    predicted time. What is left are launches, single rows, small matrices, first writes to memory and sorting.
    """
    device = plan.device
    computing = cost.flops / device.flop_rate * 1e12 if cost.flops < 1e290 else math.inf
    moving = device.moving_seconds(cost.bytes_moved) * 1e12 if cost.bytes_moved < 1e290 else math.inf
    if 2 * max(computing, moving) < cost.picoseconds:
        return "neither"
    return "compute" if computing >= moving else "memory"


def ticks(most: int, wanted: int = 4) -> list[int]:
    """Return round numbers from 0 to the first at or above `most`, some `wanted` of them.

    Example:
        >>> ticks(75_000_000)
        [0, 20000000, 40000000, 60000000, 80000000]
    """
    step = 10 ** max(0, len(str(max(most, 1))) - 1)
    while step > 1 and step * wanted > most:
        step //= 10
    for factor in (1, 2, 5, 10):
        if step * factor * wanted >= most:
            step *= factor
            break
    return list(range(0, max(most, 1) + step, step))[: wanted + 2]
