"""A step on several devices: what each computes of it, and what must be added up between them.

Devices stand in a mesh with named axes. An *entry* of a spec (an axis, or what a gather reads or adds into) that is
split over axes of the mesh is shorter on each device, and so is every dimension that has it: the step there is the same
einsum of shorter operands. Of a split pool each device holds a slice, and rows whose index lies outside of it are
dropped. Where a result lacks a split entry, what a device computes is its part of a sum.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from planner.cost.figures import itemsize
from planner.inspect.text import bytes_text
from planner.language.errors import PlannerError
from planner.language.spec import Gather, Spec, Term, term_axes

if TYPE_CHECKING:
    from planner.program.plan import Plan
    from planner.program.program import Step

__all__ = ["Collective", "Entry", "Placement", "Split", "collectives", "divided", "divisible", "letter_of",
           "local_gather", "local_spec", "local_term", "missing"]  # fmt: skip

Entry = str | Gather
# For each dimension of an array the axes of the mesh that it is split over, the major one first.
Placement = tuple[tuple[str, ...], ...]
# For each entry that is split the axes of the mesh.
Split = Mapping[Entry, tuple[str, ...]]


def divisible(spec: Spec) -> tuple[Entry, ...]:
    """Return the entries that can be split: of two or more elements, and but once in every term and bracket.

    Nor a pool that one index array reads in the same brackets as a pool of another size, for the two could get one
    name; nor the axes of an index array that is read in two brackets.
    """
    entries = dict.fromkeys(e for term in spec.terms for e in (*term, *term_axes(term)))
    brackets = [gather.axes for gather in spec.gathers]
    names = [(gather.array, gather.axes) for gather in spec.gathers]
    unlike = {axis for array, axes in names for axis in axes if any(array == a and axes != b for a, b in names)}

    def once(entry: Entry) -> bool:
        if entry in unlike or (isinstance(entry, Gather) and names.count((entry.array, entry.axes)) > 1):
            return False
        return all(places.count(entry) <= 1 for places in (*spec.terms, *brackets))

    return tuple(entry for entry in entries if spec.size(entry) > 1 and once(entry))


def divided(
    spec: Spec, arrays: Sequence[tuple[Term, Placement]], before: Split = MappingProxyType({})
) -> dict[Entry, tuple[str, ...]]:
    """Return what a step splits over which axes of the mesh: what its arrays are split over, the largest array's first.

    An axis of the mesh splits one entry only, so of arrays that disagree the smaller one moves.

    Args:
        spec: the step's.
        arrays: terms, or brackets, of its operands and index arrays, or of its results, and how these are placed.
        before: what is split already.
    """
    allowed, split = set(divisible(spec)), dict(before)
    used = {name for names in split.values() for name in names}
    for term, placement in sorted(arrays, key=lambda array: -math.prod(spec.shape(array[0]))):
        for entry, names in zip(term, placement, strict=True):
            if entry in allowed and entry not in split and names and used.isdisjoint(names):
                split[entry] = names
                used.update(names)
    return split


def local_gather(gather: Gather, parts: Mapping[Entry, int]) -> Gather:
    """Return a gather of one device's slice of the pool."""
    assert gather.size is not None
    return dataclasses.replace(gather, size=-(-gather.size // parts.get(gather, 1)))


def local_term(term: Term, parts: Mapping[Entry, int]) -> Term:
    """Return a term with gathers of one device's slices."""
    return tuple(local_gather(e, parts) if isinstance(e, Gather) else e for e in term)


def local_spec(spec: Spec, parts: Mapping[Entry, int]) -> Spec:
    """Return what one device computes, of slices rounded up where an entry is not a multiple of its parts.

    Example:
        >>> import planner
        >>> spec = planner.resolve("nij, q[n]jk -> nik", (10, 1, 2), (3, 2, 4), q=(10,))
        >>> local_spec(spec, {"n": 4}).output_shape
        (3, 1, 4)

    Args:
        spec: a resolved spec.
        parts: into how many parts entries are split.
    """
    sizes = tuple((axis, -(-size // parts.get(axis, 1))) for axis, size in spec.sizes)
    return Spec(tuple(local_term(term, parts) for term in spec.inputs), local_term(spec.output, parts), sizes)


def missing(term: Term, split: Split) -> tuple[str, ...]:
    """Return the axes of the mesh over which parts of a result with this term are to be added up."""
    return tuple(name for entry, names in split.items() if entry not in term for name in names)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Collective:
    """What devices exchange for one step: they add up their parts of a result, or of a mask.

    Attributes:
        step: the step of the plan.
        over: letters of the split axes and pools that the result lacks.
        bytes: of the result on one device.
        mask: whether it is none of the step's results, but which rows of a pool the indices of any device name; the
            others, which may hold NaN, are not to be multiplied.
        kind: its name in XLA's programs.
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


def collectives(plan: Plan, splits: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return what devices exchange; see `planner.plan.Plan.collectives`."""
    splits = _checked(plan, splits)
    spec, programs = plan.resolved.spec, plan.programs

    def placed(term: Term) -> Placement:
        return tuple((letter_of(e),) if splits.get(letter_of(e), 1) > 1 else () for e in term)

    def parts(split: Split) -> dict[Entry, int]:
        return {entry: splits[name] for entry, (name,) in split.items()}

    brackets = {gather.array: placed(gather.axes) for gather in spec.gathers}
    places = {number: placed(term) for number, term in enumerate(spec.inputs)}
    places[programs.output_gradient] = placed(spec.output)
    exposed = _exposed(plan)
    found = []
    for step in plan.steps:
        op, given = step.op, [places[v] for v in step.inputs]
        if op.source_dtype is not None:
            places[step.outputs[0]] = given[0]
            continue
        for variable, whole in zip(step.inputs, exposed[step.outputs], strict=True):
            if whole is None:
                continue
            reads = dataclasses.replace(spec, inputs=(whole,), output=whole)
            arrays = [(gather.axes, brackets[gather.array]) for gather in reads.gathers]
            split = divided(reads, [(whole, places[variable]), *arrays])
            if over := missing(whole, split):
                axes = term_axes(tuple(e for e in whole if isinstance(e, Gather) or whole.count(e) > 1))
                rows = tuple(e for e in local_term(whole, parts(split)) if isinstance(e, Gather) or e in axes)
                found.append(Collective(step, over, math.prod(local_spec(reads, parts(split)).shape(rows)), mask=True))
        indices = [(gather.axes, brackets[gather.array]) for gather in op.spec.gathers]
        split = divided(op.spec, [*zip(op.input_terms, given, strict=True), *indices])
        shapes = dataclasses.replace(op, spec=local_spec(op.spec, parts(split))).output_shapes
        for variable, term, shape in zip(step.outputs, op.output_terms, shapes, strict=True):
            places[variable] = tuple(split.get(entry, ()) for entry in term)
            if over := missing(term, split):
                found.append(Collective(step, over, math.prod(shape) * itemsize(op.dtype)))
    return tuple(found)


def _exposed(plan: Plan) -> dict[tuple[int, ...], list[Term | None]]:
    """The terms of operands of which a step multiplies rows that no index may name, by the step's results.

    For each of its inputs; None where it is no such operand, or where a forward step's result is taken at once by the
    same indices: then nothing shows of these rows.
    """
    operands: dict[int, Term] = dict(enumerate(plan.resolved.spec.inputs))
    count = len(plan.programs.forward.steps)
    read: dict[int, Term] = {}
    for step in plan.steps:
        if step.op.source_dtype is not None and step.inputs[0] in operands:
            operands[step.outputs[0]] = operands[step.inputs[0]]
        for variable, term in zip(step.inputs, step.op.input_terms, strict=True):
            read.setdefault(variable, term)

    def rows(variable: int, term: Term) -> set[Entry]:
        entries = zip(term, operands.get(variable, term), strict=True)
        return {e for e, entry in entries if isinstance(entry, Gather) and not isinstance(e, Gather)}

    found = {}
    for number, step in enumerate(plan.steps):
        (out, *_), result = step.op.output_terms, step.outputs[0]
        gradient = number >= count and not step.recomputed
        taken = {e for e, entry in zip(out, read.get(result, out), strict=True) if isinstance(entry, Gather)}
        found[step.outputs] = [
            operands[v] if (own := rows(v, term)) and (gradient or not own <= taken) else None
            for v, term in zip(step.inputs, step.op.input_terms, strict=True)
        ]
    return found


def _checked(plan: Plan, splits: Mapping[str, int]) -> dict[str, int]:
    """Refuse letters and numbers that mean nothing, and plans of which nothing is foretold."""
    if not isinstance(splits, Mapping):
        raise PlannerError(f"splits={splits!r:.80} is no mapping from letters to numbers of parts, such as {{'n': 8}}")
    spec, found = plan.resolved.spec, {}
    entries: list[Entry] = [*(axis for axis, _ in spec.sizes), *spec.gathers]
    for letter, given in splits.items():
        named = [e for e in entries if letter == letter_of(e)]
        if not named:
            raise PlannerError(f"'{spec}' has no axis or index array {letter!r:.80} to split")
        try:
            parts = 0 if isinstance(given, bool) else operator.index(given)
        except TypeError:
            parts = 0
        if parts < 1:
            raise PlannerError(f"{letter!r} is split into a positive number of parts, not {given!r:.80}")
        if parts > 1 and not set(named) <= set(divisible(spec)):
            raise PlannerError(
                f"{letter!r} of '{spec}' cannot be split: it has fewer than two elements, repeats in a term, or an "
                "index array reads pools of two sizes or along two brackets; XLA gathers arrays that are split so"
            )
        found[letter] = parts
    if plan.loop is not None:
        raise PlannerError(f"the plan is a {plan.loop}, and of those what devices exchange is not foretold")
    return found


def letter_of(entry: Entry) -> str:
    """Return the letter by which users name an entry: of a pool that of its index array."""
    return entry.array if isinstance(entry, Gather) else entry
