"""Meshes of devices and placements of arrays on them, as frameworks and users write them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from planner.language.errors import PlannerError
from planner.language.split import Placement


def read_mesh(mesh: Any) -> dict[str, int]:
    """Return the sizes of a mesh by the names of its axes.

    Args:
        mesh: a `DeviceMesh` of torch, a `Mesh` of JAX, a mapping of names to sizes, or a tuple of sizes, whose axes are
            named "0", "1" and so on.

    Raises:
        PlannerError: it is none of these.
    """
    shape, names = getattr(mesh, "shape", mesh), getattr(mesh, "mesh_dim_names", None)
    try:
        names = [str(number) for number in range(len(shape))] if names is None else names
        pairs = shape.items() if isinstance(shape, Mapping) else [*zip(names, shape, strict=True)]
        axes = {name: 0 if isinstance(size, bool) else operator.index(size) for name, size in pairs}
    except TypeError:
        axes = {}
    if not axes or min(axes.values()) < 1 or not all(isinstance(name, str) for name in axes):
        raise PlannerError(
            f"mesh={mesh!r:.80} is no mesh: give a DeviceMesh, a jax Mesh, or a mapping such as {{'x': 8}}"
        )
    return axes


def read_placement(
    placement: Any, shape: Sequence[int], axes: Mapping[str, int], what: str, empty_parts: bool = False
) -> Placement:
    """Return the placement of an array: for each dimension, the axes of the mesh that it is split over.

    Example:
        >>> read_placement([None, ("x", "y")], (4, 8), {"x": 2, "y": 2}, "operand 0")
        ((), ('x', 'y'))

    Args:
        placement: None for an array that is whole on each device; for each dimension of the array a name, some names,
            or None, as in a `PartitionSpec`; a sharding with such a `spec`; or, for each axis of the mesh, a placement
            of torch.
        shape: the shape of the array.
        axes: sizes of the mesh by name.
        what: what to call the array in errors.
        empty_parts: whether a dimension may have fewer elements than parts, as those of DTensors may.

    Raises:
        PlannerError: it is no placement of such an array on the mesh.
    """
    try:
        found = _names_of_dims(placement, len(shape), axes)
    except (TypeError, ValueError, IndexError):
        found = ((),) * (len(shape) + 1)
    used = [name for names in found for name in names]
    if len(found) != len(shape):
        why = f"it is no placement of an array with {len(shape)} dimensions"
    elif unknown := [name for name in used if name not in axes]:
        why = f"the mesh has no axis {unknown[0]!r}, but {', '.join(axes)}"
    elif len(set(used)) < len(used):
        why = "an axis of the mesh splits one dimension of an array"
    else:
        short = [d for d, n in enumerate(found) if n and shape[d] < math.prod(axes[name] for name in n)]
        if empty_parts or not short:
            return found
        why = f"dimension {short[0]} has size {shape[short[0]]}, which is fewer than the parts"
    raise PlannerError(f"{what} cannot be placed as {placement!r:.80}: {why}")


def _names_of_dims(placement: Any, ndim: int, axes: Mapping[str, int]) -> Placement:
    """Return a placement without the axes of size 1, which split nothing."""
    entries = [] if placement is None else [*getattr(placement, "spec", placement)]
    if any(hasattr(entry, "is_shard") for entry in entries):
        dims: list[tuple[str, ...]] = [()] * ndim
        for name, entry in zip(axes, entries, strict=True):
            if entry.is_shard():
                dims[entry.dim] += (name,)
    else:
        dims = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
        dims += [()] * (ndim - len(dims))
    return tuple(tuple(name for name in names if axes.get(name) != 1) for names in dims)
