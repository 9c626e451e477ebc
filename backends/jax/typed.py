"""Arrays whose types say over which axes of a mesh they are split: JAX's explicit axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from planner.backends.jax.partition import placement
from planner.language.errors import PlannerError
from planner.language.split import Entry, Placement, choose_splits, letter_of
from planner.program.plan import PlanRecord

__all__ = ["result_sharding"]


def result_sharding(plan: PlanRecord, operands: Sequence[Any], arrays: Sequence[Any]) -> NamedSharding | None:
    """Return how the result is split where the types of operands or index arrays say how these are; else None.

    Args:
        plan: the plan.
        operands: what it is called with.
        arrays: index arrays, in the order of the spec.

    Raises:
        PlannerError: two of them are split in ways that one result cannot have, or a gradient is taken outside of
            `jit`.
    """
    mesh = next(filter(None, map(_explicit_mesh, (*operands, *arrays))), None)
    if mesh is None:
        return None
    # What is kept for the backward pass is on automatic axes, the output's gradient is not, and JAX compiles no program
    # of both for devices that are named.
    if any(type(x).__name__ == "LinearizeTracer" and not isinstance(x.primal, jax.core.Tracer) for x in operands):
        raise PlannerError("gradients on explicit axes of a mesh are taken under jit: call jax.jit(jax.grad(...))")
    spec, resolved = plan.resolved.spec, plan.resolved
    brackets = {gather.array: gather.axes for gather in spec.gathers}
    shapes = dict(resolved.index_shapes)
    seen = {
        **{f"operand {i}": x for i, x in enumerate(zip(spec.inputs, resolved.shapes, operands, strict=True))},
        **{f"index array {q!r}": (brackets[q], shapes[q], x) for q, x in zip(spec.arrays, arrays, strict=True)},
    }
    placed = {label: (term, _seen(x, shape)) for label, (term, shape, x) in seen.items()}
    split = choose_splits(spec, list(placed.values()))
    for label, (term, places) in placed.items():
        for entry, names in zip(term, places, strict=True):
            if names and split.get(entry) != names:
                raise PlannerError(_conflict(label, entry, names, split))
    return NamedSharding(mesh, PartitionSpec(*(split.get(entry) for entry in spec.output)))


def _explicit_mesh(x: Any) -> Any:
    """The mesh by whose axes the type of an array says how it is split; None where it does not."""
    if not isinstance(x, jax.core.Tracer) and not isinstance(x.sharding, NamedSharding):
        return None  # an array on one device, without asking for its type: that takes microseconds
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def _seen(x: Any, shape: Sequence[int]) -> Placement:
    """How an array is placed as the spec sees it: without some dimensions of size 1, which are not split."""
    longer = (names for names, size in zip(placement(jax.typeof(x)), x.shape, strict=True) if size != 1)
    return tuple(() if size == 1 else next(longer) for size in shape)


def _conflict(label: str, entry: Entry, names: tuple[str, ...], split: dict[Entry, tuple[str, ...]]) -> str:
    """Why an array cannot stay as it is split, and what to do."""
    other = split.get(entry)
    if other is not None:
        why = f"another array has it split over {', '.join(other)}"
    elif taken := [e for e, axes in split.items() if not set(axes).isdisjoint(names)]:
        why = f"that splits {letter_of(taken[0])!r} in another array"
    else:
        why = "it repeats in a term, or one index array reads pools of two sizes or along two brackets"
    return (
        f"{label} has {letter_of(entry)!r} split over {', '.join(names)}, but {why}: "
        f"place that dimension anew with jax.sharding.reshard"
    )
