"""What several devices exchange for a plan: the predicted sums between them, step by step."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping

from planner.language.dtypes import itemsize
from planner.language.errors import PlannerError
from planner.language.spec import Gather, Term, indexed_dims
from planner.language.split import (
    Entry,
    Placement,
    Split,
    axes_to_add_over,
    choose_splits,
    letter_of,
    local_spec,
    local_term,
    splittable,
)
from planner.language.units import bytes_text
from planner.program.ops import Cast
from planner.program.plan import PlanRecord
from planner.program.program import Step

__all__ = ["Collective", "collectives"]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Collective:
    """What devices exchange for one step: they add up their parts of a result, or of a mask.

    Attributes:
        step: the step of the plan.
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
    spec, programs = plan.resolved.spec, plan.programs

    def place(term: Term) -> Placement:
        return tuple((letter_of(e),) if splits.get(letter_of(e), 1) > 1 else () for e in term)

    def parts(split: Split) -> dict[Entry, int]:
        return {entry: splits[name] for entry, (name,) in split.items()}

    brackets = {gather.array: place(gather.axes) for gather in spec.gathers}
    places = {number: place(term) for number, term in enumerate(spec.inputs)}
    places[programs.output_gradient] = place(spec.output)
    exposed = _exposed(plan)
    exchanges: list[Collective] = []
    for step in plan.steps:
        op, placements = step.op, [places[v] for v in step.inputs]
        if isinstance(op, Cast):
            places[step.outputs[0]] = placements[0]
            continue
        for variable, whole in zip(step.inputs, exposed[step.outputs], strict=True):
            if whole is None:
                continue
            reads = dataclasses.replace(spec, inputs=(whole,), output=whole)
            arrays = [(gather.axes, brackets[gather.array]) for gather in reads.gathers]
            split = choose_splits(reads, [(whole, places[variable]), *arrays])
            if over := axes_to_add_over(whole, split):
                local = local_term(whole, parts(split))
                rows = tuple(local[d] for d in indexed_dims(whole))
                mask_bytes = math.prod(local_spec(reads, parts(split)).shape(rows))
                exchanges.append(Collective(step, over, mask_bytes, mask=True))
        indices = [(gather.axes, brackets[gather.array]) for gather in op.spec.gathers]
        split = choose_splits(op.spec, [*zip(op.input_terms, placements, strict=True), *indices])
        shapes = dataclasses.replace(op, spec=local_spec(op.spec, parts(split))).output_shapes
        for variable, term, shape in zip(step.outputs, op.output_terms, shapes, strict=True):
            places[variable] = tuple(split.get(entry, ()) for entry in term)
            if over := axes_to_add_over(term, split):
                exchanges.append(Collective(step, over, math.prod(shape) * itemsize(op.dtype)))
    return tuple(exchanges)


def _exposed(plan: PlanRecord) -> dict[tuple[int, ...], list[Term | None]]:
    """Find the steps that multiply rows of an operand that no index names.

    Returns:
        For each step, by its results: for each input the term of such an operand, or None. It is None too if the next
        step takes the result through the same indices: then these rows do not matter.
    """
    operands: dict[int, Term] = dict(enumerate(plan.resolved.spec.inputs))
    count = len(plan.programs.forward.steps)
    read: dict[int, Term] = {}
    for step in plan.steps:
        if isinstance(step.op, Cast) and step.inputs[0] in operands:
            operands[step.outputs[0]] = operands[step.inputs[0]]
        for variable, term in zip(step.inputs, step.op.input_terms, strict=True):
            read.setdefault(variable, term)

    def rows(variable: int, term: Term) -> set[Entry]:
        entries = zip(term, operands.get(variable, term), strict=True)
        return {e for e, entry in entries if isinstance(entry, Gather) and not isinstance(e, Gather)}

    exposed: dict[tuple[int, ...], list[Term | None]] = {}
    for number, step in enumerate(plan.steps):
        (out, *_), result = step.op.output_terms, step.outputs[0]
        gradient = number >= count and not step.recomputed
        taken = {e for e, entry in zip(out, read.get(result, out), strict=True) if isinstance(entry, Gather)}
        terms: list[Term | None] = []
        for variable, term in zip(step.inputs, step.op.input_terms, strict=True):
            unnamed = rows(variable, term)
            is_exposed = bool(unnamed) and (gradient or not unnamed <= taken)
            terms.append(operands[variable] if is_exposed else None)
        exposed[step.outputs] = terms
    return exposed


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
            raise PlannerError(
                f"{letter!r} of '{spec}' cannot be split: it has fewer than two elements, repeats in a term, or an "
                "index array reads pools of two sizes or along two brackets; XLA gathers arrays that are split so"
            )
        checked[letter] = parts
    if plan.loop is not None:
        raise PlannerError(f"the plan is a {plan.loop}, and of those what devices exchange is not foretold")
    return checked
