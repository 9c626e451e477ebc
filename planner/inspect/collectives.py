"""What several devices exchange for a plan: the predicted sums between them.

In JAX each step of the plan is split, and its result is added up. In torch each device makes its part of the whole
contraction, so that the result and the gradients alone are added up.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping

from planner.language.dtypes import itemsize
from planner.language.errors import PlannerError
from planner.language.spec import Term, indexed_dims
from planner.language.split import (
    Entry,
    Placement,
    Split,
    axes_to_add_over,
    choose_splits,
    letter_of,
    local_spec,
    part_shape,
    place_index,
    place_term,
    splittable,
)
from planner.language.units import bytes_text
from planner.program.ops import Cast, Guard
from planner.program.plan import PlanRecord
from planner.program.program import Step

__all__ = ["Collective", "collectives"]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Collective:
    """What devices exchange: they add up their parts of the result of a step, or of a mask.

    Attributes:
        step: the step of the plan. In torch it is the one that makes the result, or a gradient, of the whole plan.
        over: letters of the split axes and pools that the result lacks.
        bytes: bytes of what is added up, on one device.
        mask: whether the devices add up a mask instead of a result. It tells which rows of a pool are named by an index
            on any device. The other rows may hold NaN, so they must not be multiplied.
        kind: name of the operation in XLA's programs.
    """

    step: Step
    over: tuple[str, ...]
    bytes: int
    mask: bool = False
    kind: str = "all-reduce"

    def __str__(self) -> str:
        what = f"{bytes_text(self.bytes)}{', rows that are read' if self.mask else ''}"
        return f"{self.step.op.spec}: {self.kind} over {', '.join(self.over)} of {what}"

    def __repr__(self) -> str:
        return f"<Collective {self}>"


def collectives(plan: PlanRecord, splits: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return what devices exchange; see `planner.plan.Plan.collectives`."""
    splits = _check_splits(plan, splits)
    if plan.backend == "torch":
        return _of_whole(plan, splits)
    spec, programs = plan.resolved.spec, plan.programs

    entries: tuple[Entry, ...] = (*spec.axes, *spec.gathers)
    asked: Split = {entry: (letter_of(entry),) for entry in entries if splits.get(letter_of(entry), 1) > 1}

    def place(term: Term) -> Placement:
        return place_term(term, asked)

    def parts(split: Split) -> dict[Entry, int]:
        return {entry: splits[name] for entry, (name,) in split.items()}

    indices = {array: place_index(spec, array, asked) for array in spec.arrays}
    places = {number: place(term) for number, term in enumerate(spec.inputs)}
    places[programs.output_gradient] = place(spec.output)
    exchanges: list[Collective] = []

    def mask_exchange(step: Step, guard: Guard, rows: Term, placement: Placement) -> list[Collective]:
        """Return what devices exchange to find the rows that an index on any of them names."""
        reading = dataclasses.replace(guard.spec, inputs=(rows,), output=rows)
        arrays = [(gather.axes, indices[gather.array]) for gather in reading.gathers]
        split = choose_splits(reading, [(rows, placement), *arrays])
        over = axes_to_add_over(rows, split)
        if not over:
            return []
        local = local_spec(reading, parts(split))
        found = tuple(local.output[d] for d in indexed_dims(rows))
        mask_bytes = math.prod(local.shape(found))
        return [Collective(step, over, mask_bytes, mask=True)]

    for step in plan.steps:
        op, placements = step.op, [places[v] for v in step.inputs]
        if isinstance(op, Cast | Guard):
            places[step.outputs[0]] = placements[0]
            if isinstance(op, Guard) and op.rows is not None:
                exchanges += mask_exchange(step, op, op.rows, placements[0])
            continue
        arrays = [(gather.axes, indices[gather.array]) for gather in op.spec.gathers]
        split = choose_splits(op.spec, [*zip(op.input_terms, placements, strict=True), *arrays])
        shapes = dataclasses.replace(op, spec=local_spec(op.spec, parts(split))).output_shapes
        for variable, term, shape in zip(step.outputs, op.output_terms, shapes, strict=True):
            places[variable] = place_term(term, split)
            if over := axes_to_add_over(term, split):
                exchanges.append(Collective(step, over, math.prod(shape) * itemsize(op.dtype)))
    return tuple(exchanges)


def _of_whole(plan: PlanRecord, splits: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return the sums of the result and the gradients, one for each split letter that they lack."""
    spec, programs = plan.resolved.spec, plan.programs
    entries: tuple[Entry, ...] = (*spec.axes, *spec.gathers)
    split = {entry: (letter_of(entry),) for entry in entries if splits.get(letter_of(entry), 1) > 1}
    results = [(programs.result, spec.output), *zip(programs.gradients, spec.inputs, strict=True)]
    made_by = {variable: step for step in plan.steps for variable in step.outputs}
    exchanges = []
    for variable, term in results:
        if variable is None:
            continue
        shape = part_shape(spec.shape(term), place_term(term, split), splits)
        for letter in dict.fromkeys(axes_to_add_over(term, split)):
            size = math.prod(shape) * itemsize(programs.variables[variable].dtype)
            exchanges.append(Collective(made_by[variable], (letter,), size))
    return tuple(exchanges)


def _check_splits(plan: PlanRecord, splits: Mapping[str, int]) -> dict[str, int]:
    """Return the splits, after refusing unknown letters, numbers below one, and plans that are loops."""
    if not isinstance(splits, Mapping):
        raise PlannerError(f"splits={splits!r:.80} is not a mapping of letters to numbers of parts, such as {{'n': 8}}")
    spec, checked = plan.resolved.spec, {}
    entries: list[Entry] = [*(axis for axis, _ in spec.sizes), *spec.gathers]
    for letter, asked in splits.items():
        named = [e for e in entries if letter == letter_of(e)]
        if not named:
            raise PlannerError(f"'{spec}' has no axis or index array {letter!r:.80} to split")
        try:
            parts = 0 if isinstance(asked, bool) else operator.index(asked)
        except TypeError:
            parts = 0
        if parts < 1:
            raise PlannerError(f"{letter!r} is split into a positive number of parts, not {asked!r:.80}")
        if parts > 1 and not set(named) <= set(splittable(spec)):
            raise PlannerError(f"{letter!r} of '{spec}' cannot be split: it has fewer than two elements")
        if parts > 1 and len(named) > 1:
            raise PlannerError(
                f"{letter!r} of '{spec}' stands for {len(named)} pools; devices that split one hold the others whole"
            )
        checked[letter] = parts
    if plan.loop is not None and plan.backend != "torch":
        raise PlannerError(f"the plan is a {plan.loop}, and of those what devices exchange is not foretold")
    return checked
