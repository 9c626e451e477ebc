"""Plans for a mesh of devices: the contraction of one device's parts.

Each device contracts its parts of the arrays, see `planner.language.split`. So a plan for a mesh is the plan of a
contraction of smaller sizes, whose steps wait for what devices exchange, see `planner.search.devices.collectives`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from planner.language.errors import PlannerError
from planner.language.mesh import read_mesh, read_placement
from planner.language.resolve import Resolved
from planner.language.spec import Operand
from planner.language.split import (
    Placement,
    choose_splits,
    local_spec,
    view_placement,
)
from planner.program.contraction import Contraction, OnMesh


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
    if not isinstance(placements, Mapping | None):
        raise PlannerError(
            f"placements={placements!r:.80} is not a mapping: pass one from the number of an operand, the letter of an "
            "index array, or 'result', to a placement; or what planner.shard returns"
        )
    if mesh is None:
        raise PlannerError("placements= needs mesh=, the devices that the arrays are split over")
    axes, given = read_mesh(mesh), dict(placements or {})
    wrong = [key for key in given if isinstance(key, bool)]  # Python takes True for 1
    if whole.options.optimize == "measure":
        raise PlannerError("optimize='measure' times plans on one device: plan for a mesh with another search")
    resolved, shapes = whole.resolved, dict(whole.index_shapes)

    def place(key: int | str, what: str, x: Any, shape: Sequence[int], seen: Sequence[int]) -> Placement:
        own = getattr(x, "sharding", None) if hasattr(getattr(x, "sharding", None), "spec") else None
        is_own = key not in given
        asked = given.pop(key, getattr(x, "placements", own))
        return view_placement(read_placement(asked, shape, axes, what, empty_parts=is_own), shape, seen)

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
    if wrong := wrong or list(given):
        known = ", ".join(map(repr, (*range(len(operands)), *shapes, "result")))
        raise PlannerError(f"placements= names {wrong[0]!r:.80}: take one of {known}")
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
    counts = {entry: math.prod(axes[name] for name in names) for entry, names in split.items()}
    resolved = Resolved.of(local_spec(spec, counts))
    parts = zip(resolved.shapes, whole.operands, strict=True)
    mesh = OnMesh(tuple(axes.items()), whole, tuple(operands), tuple(indices.items()), result, tuple(split.items()))
    return dataclasses.replace(
        whole,
        resolved=resolved,
        index_shapes=resolved.index_shapes,
        operands=tuple(Operand(shape, x.dtype, None, x.requires_grad) for shape, x in parts),
        mesh=mesh,
    )
