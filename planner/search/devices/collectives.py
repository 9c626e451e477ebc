"""What several devices exchange for a plan: the predicted sums between them.

In JAX each step of the plan is split, and its result is added up. In torch each device makes its part of the whole
contraction, so that the result and the gradients alone are added up.

A plan for a mesh is the plan of one device's part. What the sums take is added to the prices of its steps. So the
search finds the tree with the least time on the whole mesh.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence

from planner.cost.figures import Cost, PlanCost
from planner.language.dtypes import itemsize
from planner.language.errors import PlannerError
from planner.language.spec import Term, gather_of, indexed_dims, pool_letters
from planner.language.split import (
    Entry,
    Placement,
    Split,
    axes_to_add_over,
    choose_splits,
    letter_of,
    local_gathers,
    local_spec,
    part_shape,
    place_index,
    place_term,
    splittable,
    with_sizes,
)
from planner.language.units import bytes_text
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.loops import plan_of_tree
from planner.program.ops import Cast, Guard, Op
from planner.program.plan import AnyPlan, Loop, PlanRecord
from planner.program.program import Step
from planner.program.tree import change_ops


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Collective:
    """What devices exchange for a step: parts of its result or of a mask to add up, or parts of its inputs.

    Attributes:
        step: the step of the plan. In torch it is the one that makes the result, or a gradient, of the whole plan.
        over: letters of the split axes and pools that the result lacks; for a plan on a mesh, axes of the mesh.
        bytes: bytes of what each device holds afterwards.
        mask: whether the devices add up a mask instead of a result. It tells which rows of a pool are named by an index
            on any device. The other rows may hold NaN, so they must not be multiplied.
        kind: name of the operation in XLA's programs: "all-reduce"; or "all-gather" or "all-to-all" for an input that
            is split otherwise than the step asks for.
        seconds: the predicted time.
    """

    step: Step
    over: tuple[str, ...]
    bytes: int
    mask: bool = False
    kind: str = "all-reduce"
    seconds: float = 0.0

    def __str__(self) -> str:
        what = f"{bytes_text(self.bytes)}{', rows that are read' if self.mask else ''}"
        return f"{self.step.op.spec}: {self.kind} over {', '.join(self.over)} of {what}"

    def __repr__(self) -> str:
        return f"<Collective {self}>"


def collectives(plan: PlanRecord, splits: Mapping[str, int] | None) -> tuple[Collective, ...]:
    """Return what devices exchange; see `planner.plan.Plan.collectives`."""
    if splits is None and plan.mesh is not None:
        return foretell(plan)[0]
    splits = _check_splits(plan, splits)
    spec = plan.resolved.spec
    entries: tuple[Entry, ...] = (*spec.axes, *spec.gathers)
    split: Split = {entry: (letter_of(entry),) for entry in entries if splits.get(letter_of(entry), 1) > 1}
    if plan.backend == "torch":
        return _of_whole(plan, split, splits)
    operands = [place_term(term, split) for term in spec.inputs]
    indices = {array: place_index(spec, array, split) for array in spec.arrays}
    return _of_steps(plan, operands, indices, place_term(spec.output, split), splits)[0]


def foretell(plan: PlanRecord) -> tuple[tuple[Collective, ...], dict[int, Placement]]:
    """Return what devices exchange for a plan on a mesh, and the placement of each variable of its programs."""
    mesh = plan.mesh
    assert mesh is not None
    whole, sizes = whole_plan(plan), dict(mesh.axes)
    if plan.backend == "torch":
        return _of_whole(whole, dict(mesh.split), sizes), {}
    return _of_steps(whole, mesh.operands, dict(mesh.indices), mesh.result, sizes, plan.steps)


def add_exchanges(plan: AnyPlan) -> AnyPlan:
    """Return a plan on a mesh with what devices exchange as a part of its costs, and not in the prices of its steps.

    The search takes each axis to be split in all values that have it. If an array is placed otherwise, or masks are
    exchanged, the plan may cost more or less than the search found. Then it is not proven.
    """
    table, found, programs, cost = load_backend(plan.backend).table, plan.cost.seconds, plan.programs, plan.cost

    def priced(step: Step) -> Step:
        choice = table.price(step.choice.lowering, step.op, plan.device)
        return step if choice is None else dataclasses.replace(step, choice=choice)

    forward, backward = (
        part and dataclasses.replace(part, steps=tuple(map(priced, part.steps)))
        for part in (programs.forward, programs.backward)
    )
    assert forward is not None
    plan = dataclasses.replace(plan, programs=dataclasses.replace(programs, forward=forward, backward=backward))
    exchanges, _ = foretell(plan)

    def with_seconds(cost: Cost, steps: Sequence[Step]) -> Cost:
        """Return the cost of a program with the seconds of its steps and exchanges."""
        outputs = {step.outputs for step in steps}
        seconds = sum(step.choice.cost.picoseconds for step in steps) / 1e12
        return dataclasses.replace(
            cost, seconds=math.fsum((seconds, *(c.seconds for c in exchanges if c.step.outputs in outputs)))
        )

    backward_cost = with_seconds(cost.backward, backward.steps) if backward and cost.backward else None
    total = PlanCost.of(with_seconds(cost.forward, forward.steps), backward_cost)
    as_found = math.isclose(total.seconds, found, rel_tol=1e-6)
    total = dataclasses.replace(total, bound=cost.bound if as_found else None)
    programs = dataclasses.replace(plan.programs, cost=total)
    return dataclasses.replace(plan, programs=programs, proven=plan.proven and as_found)


def _of_steps(
    plan: PlanRecord,
    operands: Sequence[Placement],
    indices: Mapping[str, Placement],
    result: Placement | None,
    sizes: Mapping[str, int],
    steps: Sequence[Step] = (),
) -> tuple[tuple[Collective, ...], dict[int, Placement]]:
    """Return what devices exchange if each step is split by itself, and the placement of each variable.

    Args:
        plan: the plan of the whole arrays.
        operands: the placement of each operand.
        indices: the placement of each index array.
        result: the placement that is wanted for the result; None for any. Its gradient has the same.
        sizes: sizes of the mesh by the name of its axis.
        steps: what stands in the collectives for the steps of the plan; by default these themselves. They are those of
            one device, whose operands may lie otherwise than their sizes say: then these move too.
    """
    spec, programs, exchanges = plan.resolved.spec, plan.programs, list[Collective]()
    places: dict[int, Placement] = dict(enumerate(operands))

    def parts(split: Split) -> dict[Entry, int]:
        return {entry: math.prod(sizes[name] for name in names) for entry, names in split.items()}

    def exchange(step: Step, over: Sequence[str], size: int, kind: str = "all-reduce", mask: bool = False) -> None:
        seconds = plan.device.exchange_seconds(kind, size, math.prod(sizes[name] for name in over))
        exchanges.append(Collective(step, tuple(over), size, mask, kind, seconds))

    def exchange_mask(step: Step, guard: Guard, rows: Term, placement: Placement) -> None:
        """Add what devices exchange to find the rows that an index on any of them names."""
        reading = dataclasses.replace(guard.spec, inputs=(rows,), output=rows)
        arrays = [(gather.axes, indices[gather.array]) for gather in reading.gathers]
        split = choose_splits(reading, [(rows, placement), *arrays])
        if over := axes_to_add_over(rows, split):
            local = local_spec(reading, parts(split))
            found = tuple(local.output[d] for d in indexed_dims(rows))
            exchange(step, over, math.prod(local.shape(found)), mask=True)

    def move(step: Step, term: Term, split: Split, placement: Placement, shape: Sequence[int], dtype: str) -> None:
        """Add what devices exchange if an array is split over an axis of the mesh where the step wants it whole."""
        wanted = place_term(term, split, placement)
        kept = {name for names in wanted for name in names}
        moved = [n for names, new in zip(placement, wanted, strict=True) for n in names if n not in new]
        if moved:
            kind = "all-to-all" if kept.issuperset(moved) else "all-gather"
            exchange(step, moved, math.prod(part_shape(shape, wanted, sizes)) * itemsize(dtype), kind)

    for step, shown in zip(plan.steps, steps or plan.steps, strict=True):
        if programs.backward is not None and step is programs.backward.steps[0]:
            places[programs.output_gradient] = places[programs.result] if result is None else result
        op, placements = step.op, [places[v] for v in step.inputs]
        if isinstance(op, Cast | Guard):
            places[step.outputs[0]] = placements[0]
            if isinstance(op, Guard) and op.rows is not None:
                exchange_mask(shown, op, op.rows, placements[0])
            continue
        arrays = [(gather.axes, indices[gather.array]) for gather in op.spec.gathers]
        split = choose_splits(op.spec, [*zip(op.input_terms, placements, strict=True), *arrays])
        if steps and programs.result in step.outputs and result is not None:
            split = choose_splits(op.spec, [(op.spec.output, result)], split)
        if steps:
            for term, placement, shape in zip(op.input_terms, placements, op.input_shapes, strict=True):
                move(shown, term, split, placement, shape, op.dtype)
            for gather in op.spec.gathers:
                move(shown, gather.axes, split, indices[gather.array], op.spec.shape(gather.axes), "int32")
        shapes = dataclasses.replace(op, spec=local_spec(op.spec, parts(split))).output_shapes
        for variable, term, shape in zip(step.outputs, op.output_terms, shapes, strict=True):
            places[variable] = place_term(term, split)
            if over := axes_to_add_over(term, split):
                exchange(shown, over, math.prod(shape) * itemsize(op.dtype))
        if steps and programs.result in step.outputs and result is not None:
            wanted = {entry: names for entry, names in zip(spec.output, result, strict=True) if names}
            move(shown, spec.output, wanted, places[programs.result], spec.output_shape, op.dtype)
    return tuple(exchanges), places


def _of_whole(plan: PlanRecord, split: Split, sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return the sums of the result and the gradients, one for each axis of the mesh whose split they lack."""
    spec, programs = plan.resolved.spec, plan.programs
    results = [(programs.result, spec.output), *zip(programs.gradients, spec.inputs, strict=True)]
    made_by = {variable: step for step in plan.steps for variable in step.outputs}
    exchanges = []
    for variable, term in results:
        if variable is None:
            continue
        shape = part_shape(spec.shape(term), place_term(term, split), sizes)
        for name in dict.fromkeys(axes_to_add_over(term, split)):
            size = math.prod(shape) * itemsize(programs.variables[variable].dtype)
            seconds = plan.device.exchange_seconds("all-reduce", size, sizes[name])
            exchanges.append(Collective(made_by[variable], (name,), size, seconds=seconds))
    return tuple(exchanges)


def exchange_pricer(contraction: Contraction) -> Callable[[Op], int] | None:
    """Return what tells the picoseconds that devices take to add up the results of a step; None if they never do."""
    mesh = contraction.mesh
    if mesh is None or contraction.backend == "torch":
        return None
    whole, sizes, device = mesh.whole.resolved.spec, dict(mesh.axes), contraction.device
    split = {entry: math.prod(sizes[name] for name in names) for entry, names in mesh.split}
    gathers = local_gathers(whole, split)
    parts: dict[Entry, int] = {}
    for entry, count in split.items():
        gather = gather_of(entry)
        parts[entry if gather is None else gathers[gather]] = count
    # Before its rows are taken, the dimension of a pool is an axis with a letter of its own.
    for own, letter in zip(gathers.values(), pool_letters(contraction.resolved.spec), strict=True):
        parts[letter] = parts.get(own, 1)

    def picoseconds(op: Op) -> int:
        if isinstance(op, Cast | Guard):
            return 0
        total, entries = 0.0, list[Entry]((*op.spec.axes, *op.spec.gathers))
        for term, shape in zip(op.output_terms, op.output_shapes, strict=True):
            count = math.prod(parts.get(entry, 1) for entry in entries if entry not in term)
            if count > 1:
                total += device.exchange_seconds("all-reduce", math.prod(shape) * itemsize(op.dtype), count)
        return round(total * 1e12)

    return picoseconds


def whole_plan(plan: PlanRecord) -> PlanRecord:
    """Return the plan of the whole arrays: the same tree, whose steps run in the same implementations.

    Args:
        plan: the plan of one device's part.
    """
    mesh = plan.mesh
    assert mesh is not None
    local, whole = plan.resolved.spec, mesh.whole.resolved.spec
    split = {entry: math.prod(dict(mesh.axes)[name] for name in names) for entry, names in mesh.split}
    gathers = {own: gather for gather, own in local_gathers(whole, split).items()}
    pools = zip(pool_letters(local), local.gathers, strict=True)
    sizes = {**whole.by_axis, **{letter: whole.size(gathers[own]) for letter, own in pools}}

    def resize(op: Op) -> Op:
        return dataclasses.replace(op, spec=with_sizes(op.spec, sizes, gathers), layouts=())

    table, fixed = load_backend(plan.backend).table, {}
    for step in plan.steps:
        if isinstance(step.op, Guard):
            continue
        # The order of a result in memory depends on sizes. So each row is priced anew for the whole arrays.
        op, row = resize(step.op), step.choice.lowering
        choice = step.choice if isinstance(op, Loop) else table.price(row, op, plan.device)
        if choice is not None:
            fixed[op] = choice
    return plan_of_tree(plan, mesh.whole, change_ops(plan.tree, resize), fixed, plan.origin)


def _check_splits(plan: PlanRecord, splits: object) -> dict[str, int]:
    """Return the splits, after refusing unknown letters, numbers below one, and plans that are loops."""
    if not isinstance(splits, Mapping):
        raise PlannerError(f"splits={splits!r:.80} is not a mapping of letters to numbers of parts, such as {{'n': 8}}")
    spec, checked = plan.resolved.spec, {}
    for letter, asked in splits.items():
        named = [e for e in spec.by_entry if letter == letter_of(e)]
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
