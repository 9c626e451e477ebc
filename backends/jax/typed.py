"""What types of arrays say in JAX besides shape and dtype, and what the result's must say: explicit axes, weak types.

Explicit axes of a mesh say over which axes an array is split. An array of a Python number is weakly typed: in a
promotion it gives way to other dtypes. Inside of `shard_map` types say over which axes of the mesh values vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from planner.backends.jax.partition import lacks_devices, placement
from planner.language.errors import PlannerError
from planner.language.split import Entry, choose_splits, letter_of, place_term, view_placement
from planner.program.plan import PlanRecord


def result_sharding(plan: PlanRecord, operands: Sequence[Any], arrays: Sequence[Any]) -> NamedSharding | None:
    """Return the sharding of the result if the type of an operand or index array has explicit axes; else None.

    It is None as well if a type says that an array, or its gradient, is not added up yet over some axes of the mesh.

    Args:
        plan: the plan.
        operands: the operands of the call.
        arrays: the index arrays of the call, in the order of the spec.

    Raises:
        PlannerError: two arrays are split in ways that do not fit together, or a contraction with index arrays has an
            operand that is added up later.
    """
    mesh = next(filter(None, map(_explicit_mesh, (*operands, *arrays))), None)
    if mesh is None:
        return None
    reduced = [number for number, x in enumerate(operands) if _reduced(x)]
    if reduced and arrays:
        raise PlannerError(
            f"operand {reduced[0]} or its gradient is added up later (reduced= or unreduced= of its type), and steps "
            "with index arrays cannot say so: place it anew with jax.sharding.reshard"
        )
    if reduced:
        return None
    spec, resolved = plan.resolved.spec, plan.resolved
    shapes, by_letter = dict(resolved.index_shapes), dict(zip(spec.arrays, arrays, strict=True))
    seen = [(f"operand {i}", *x) for i, x in enumerate(zip(spec.inputs, resolved.shapes, operands, strict=True))]
    seen += [(f"index array {g.array!r}", g.axes, shapes[g.array], by_letter[g.array]) for g in spec.gathers]
    placed = [(label, term, view_placement(placement(jax.typeof(x)), x.shape, shape)) for label, term, shape, x in seen]
    split = choose_splits(spec, [(term, places) for _, term, places in placed])
    for label, term, places in placed:
        for dim, names in enumerate(places):
            if names and place_term(term, split, places)[dim] != names:
                raise PlannerError(_conflict(label, term[dim], names, split))
    return NamedSharding(mesh, PartitionSpec(*(names or None for names in place_term(spec.output, split))))


def like_einsum(result: Any, operands: Sequence[Any]) -> Any:
    """Return a result weakly typed where that of `jnp.einsum` is.

    It is if the operand that decides the dtype is. It is also if none does: whole numbers of which some are uint64 and
    some have a sign are promoted to weakly typed floats. Beside a float that is none no result is weak.
    """
    strong = [x.dtype for x in operands if not getattr(x, "weak_type", False)]
    if any([dtype == result.dtype or dtype.kind not in "iub" for dtype in strong]):
        return result
    with jax.numpy_dtype_promotion("standard"):  # whether they may be mixed was asked before
        dtype, weak = jax.dtypes.result_type(*operands, return_weak_type_flag=True)
    if not weak or dtype != result.dtype:
        return result
    return convert_element_type_p.bind(result, new_dtype=dtype, weak_type=True, sharding=None)


def asks_for_plain(operands: Sequence[Any]) -> bool:
    """Return whether only JAX's own operations do what operands ask for.

    These are weak types of gradients, and gradients that are added up later.
    """
    return any(x.weak_type or (_explicit_mesh(x) is not None and _reduced(x)) for x in operands)


def varying_alike(arguments: Sequence[Any]) -> Sequence[Any]:
    """Mark all arguments as varying over the same axes of the mesh, as JAX asks for inside of `shard_map`.

    Those are the axes over which at least one argument varies.
    """
    if not any([jax.typeof(x).mat.varying for x in arguments if isinstance(x, jax.core.Tracer)]):
        return arguments
    axes = [jax.typeof(x).mat.varying if isinstance(x, jax.core.Tracer) else frozenset() for x in arguments]
    all_axes = frozenset().union(*axes)
    missing = [tuple(all_axes - varying) for varying in axes]
    return [lax.pcast(x, names, to="varying") if names else x for x, names in zip(arguments, missing, strict=True)]


def result_type(view: tuple[int, ...], dtype: str, arguments: Sequence[Any]) -> Any:
    """Return the type of a result of arguments of some types.

    Inside of `shard_map` it varies as the arguments do. It names a mesh without devices if one of them does, so that
    steps which read the result know that there are none, see `devices_wanted`.
    """
    plain = jax.core.ShapedArray(view, jax.numpy.dtype(dtype))
    first = next((x for x in arguments if lacks_devices(x.sharding)), arguments[0])
    if not (first.mat.varying or lacks_devices(first.sharding)):
        return plain
    sharding = first.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(view)))
    return first.update(shape=plain.shape, dtype=plain.dtype, weak_type=False, sharding=sharding)


def _explicit_mesh(x: Any) -> Any:
    """Return the mesh whose explicit axes are in the type of an array; None if there is none."""
    if not isinstance(x, jax.core.Tracer) and not isinstance(x.sharding, NamedSharding):
        return None  # an array on one device: asking for its type would take microseconds
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def _reduced(x: Any) -> bool:
    """Return whether an array or its gradient is added up later. JAX's own operations say so, automatic axes do not."""
    spec = jax.typeof(x).sharding.spec
    return bool(spec.reduced or spec.unreduced)


def _conflict(label: str, entry: Entry, names: tuple[str, ...], split: dict[Entry, tuple[str, ...]]) -> str:
    """Return why the split of an array does not fit the other arrays, and what to do."""
    other = split.get(entry)
    if other is not None:
        why = f"another dimension has it split over {', '.join(other)}"
    else:
        taken = next(e for e, axes in split.items() if not set(axes).isdisjoint(names))
        why = f"that splits {letter_of(taken)!r} in another array"
    return (
        f"{label} has {letter_of(entry)!r} split over {', '.join(names)}, but {why}: "
        f"place that dimension anew with jax.sharding.reshard"
    )
