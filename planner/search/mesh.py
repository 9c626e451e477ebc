"""Plans for a mesh of devices: the contraction of one device's parts, and what its steps wait for besides.

Each device contracts its parts of the arrays, see `planner.language.split`. So a plan for a mesh is the plan of a
contraction of smaller sizes. In JAX a step whose result lacks an axis that is split is followed by a sum over devices.
What the sum takes is added to the prices of the step. So the search finds the tree with the least time on the whole
mesh. In torch the result and the gradients alone are added up, whatever the tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.cost.objective import step_key
from planner.language.dtypes import itemsize
from planner.language.errors import PlannerError
from planner.language.mesh import read_mesh, read_placement
from planner.language.resolve import Resolved
from planner.language.spec import Gather, Operand, pool_letters
from planner.language.split import (
    Entry,
    Placement,
    choose_splits,
    local_gathers,
    local_spec,
    view_placement,
    with_sizes,
)
from planner.program.build import Lowerer, build, given_variables
from planner.program.contraction import Contraction, OnMesh
from planner.program.frameworks import load_backend
from planner.program.ops import Cast, Guard, Op
from planner.program.plan import PlanRecord
from planner.program.tree import Node, Tree, change_tree

__all__ = ["exchange_pricer", "put_on_mesh", "whole_plan"]


def put_on_mesh(
    whole: Contraction, operands: Sequence[Any], indices: Mapping[str, Any], mesh: Any, placements: Any
) -> Contraction:
    """Return the contraction of one device's parts; the whole if the mesh has one device.

    Args:
        whole: the contraction of the whole arrays.
        operands: arrays, stand-ins or shapes.
        indices: index arrays or shapes, by letter.
        mesh: as `planner.plan` takes it.
        placements: as `planner.plan` takes them.

    Raises:
        PlannerError: an array cannot be placed on the mesh as asked.
    """
    if hasattr(placements, "operands"):  # a `Sharding`
        mesh = placements.mesh if mesh is None else mesh
        placements = {**dict(enumerate(placements.operands)), **placements.indices, "result": placements.result}
    axes, given = read_mesh(mesh), dict(placements or {})
    if whole.options.optimize == "measure":
        raise PlannerError("optimize='measure' times plans on one device: plan for a mesh with another search")
    resolved, shapes = whole.resolved, dict(whole.index_shapes)

    def place(key: int | str, what: str, x: Any, shape: Sequence[int], seen: Sequence[int]) -> Placement:
        own = getattr(x, "sharding", None) if hasattr(getattr(x, "sharding", None), "spec") else None
        asked = given.pop(key, getattr(x, "placements", own))
        return view_placement(read_placement(asked, shape, axes, what), shape, seen)

    of_operands = [
        place(number, f"operand {number}", x, operand.shape, seen)
        for number, (x, operand, seen) in enumerate(zip(operands, whole.operands, resolved.shapes, strict=True))
    ]
    of_indices = {
        name: place(name, f"index array {name!r}", indices[name], shapes[name], seen)
        for name, seen in resolved.index_shapes
    }
    output = resolved.spec.output_shape
    result = place("result", "the result", None, output, output) if "result" in given else None
    if given:
        known = ", ".join(map(repr, (*range(len(operands)), *shapes, "result")))
        raise PlannerError(f"placements= names {next(iter(given))!r:.80}: take one of {known}")
    if math.prod(axes.values()) == 1:
        return whole
    return _part_of(whole, axes, of_operands, of_indices, result)


def _part_of(
    whole: Contraction,
    axes: Mapping[str, int],
    operands: Sequence[Placement],
    indices: Mapping[str, Placement],
    result: Placement | None,
) -> Contraction:
    """Return the contraction of one device's parts, the largest if they differ in size.

    Args:
        whole: the contraction of the whole arrays.
        axes: sizes of the mesh by the name of its axis.
        operands: the placement of each operand, in the shape that the spec has.
        indices: the placement of each index array, by letter.
        result: the placement that the caller wants for the result, or None.
    """
    spec = whole.resolved.spec
    arrays = [*zip(spec.inputs, operands, strict=True), *((g.axes, indices[g.array]) for g in spec.gathers)]
    split = choose_splits(spec, arrays)
    local = local_spec(spec, {entry: math.prod(axes[name] for name in names) for entry, names in split.items()})
    shapes = tuple(map(local.shape, local.inputs))
    brackets = {gather.array: gather.axes for gather in local.gathers}
    index_shapes = tuple((name, local.shape(brackets[name])) for name in local.arrays)
    parts = zip(shapes, whole.operands, strict=True)
    mesh = OnMesh(tuple(axes.items()), whole, tuple(operands), tuple(indices.items()), result, tuple(split.items()))
    return dataclasses.replace(
        whole,
        resolved=Resolved(local, shapes, index_shapes),
        index_shapes=index_shapes,
        operands=tuple(Operand(shape, x.dtype, None, x.requires_grad) for shape, x in parts),
        mesh=mesh,
    )


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
        parts[gathers[entry] if isinstance(entry, Gather) else entry] = count
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

    def change(node: Node, children: tuple[Tree, ...]) -> Tree:
        return dataclasses.replace(node, op=resize(node.op), children=children)

    fixed = {resize(step.op): step.choice for step in plan.steps if not isinstance(step.op, Guard)}
    table = load_backend(plan.backend).table
    lower = Lowerer(lambda op: table.choices(op, plan.device), step_key(plan.options.objective), fixed)
    tree = change_tree(plan.tree, change)
    programs = build(tree, mesh.whole, given_variables(mesh.whole), lower)
    return PlanRecord.of_contraction(mesh.whole, tree=tree, programs=programs, proven=False, origin=plan.origin)
