"""Index arrays in JAX: bringing them into range, and checking them where their values can be seen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from planner.backends.common.indices import PreparedIndex, prepare_numpy
from planner.kernels.grouping.keys import IndexArray
from planner.language.errors import PlannerError
from planner.language.spec import Gather, Spec
from planner.program.implementations import RangedIndices
from planner.program.plan import PlanRecord

__all__ = ["JaxIndex", "bring_into_range", "check_values", "checked_arrays", "index_shape", "is_bad", "normalise"]


def index_shape(spec: Spec, array: str) -> tuple[int, ...]:
    """Return the shape of an index array: the sizes of its bracket's axes."""
    sizes = dict(spec.sizes)
    gather = next(g for g in spec.gathers if g.array == array)
    return tuple(sizes[axis] for axis in gather.axes)


def normalise(raw: Any, gather: Gather, mode: str) -> Any:
    """Bring an index array into [0, size]. Values out of range become `size`, unless the mode clips them.

    There are two modes besides the index modes. "checked" trusts that all values are in range, and only wraps negative
    ones. "wrapped" wraps negative ones and then clips.
    """
    size = gather.size
    assert size is not None
    info = jnp.iinfo(raw.dtype)
    wide_dtype = jnp.int32 if size < 2**31 - 1 else jnp.int64
    above = raw >= jnp.asarray(size, raw.dtype) if size <= info.max else jnp.zeros(raw.shape, bool)
    below = raw < 0 if info.min < 0 else jnp.zeros(raw.shape, bool)
    wide = raw.astype(wide_dtype)
    if mode == "clip":
        return jnp.where(above, size - 1, jnp.where(below, 0, wide))
    if mode in ("raise", "checked", "wrapped"):
        wide = jnp.where(below, wide + size, wide)
        if mode == "checked":
            return wide
        if mode == "wrapped":
            return jnp.where(above, size - 1, jnp.maximum(wide, 0))
        below = raw < jnp.asarray(-size, raw.dtype) if -size >= info.min else jnp.zeros(raw.shape, bool)
    return jnp.where(above | below, size, wide)


def is_bad(raw: Any, gather: Gather) -> Any:
    """Return a mask of the entries that are out of range; negative entries count from the end."""
    return normalise(raw, gather, "raise") == gather.size


def bring_into_range(given: Mapping[Gather, Any], index_mode: str, inexact: bool = True) -> RangedIndices:
    """Bring index arrays into range.

    Under "raise" a bad index that cannot be refused turns all results that depend on it into NaN, if they are inexact.
    Before that it may read any row.
    """
    poisons = index_mode == "raise" and inexact and all(gather.size for gather in given)
    index = RangedIndices(index_mode in ("raise", "drop") and not poisons)
    for gather, values in given.items():
        normal = partial(normalise, gather=gather, mode="wrapped" if poisons else index_mode)
        index[gather] = normal(values)
        index.given[gather] = IndexArray(
            values, normal, index.may_drop, partial(is_bad, gather=gather) if poisons else None
        )
    return index


class JaxIndex(PreparedIndex):
    """A prepared index: a pytree whose leaf is the index array with values in [0, size].

    Attributes:
        checked: True if its values could be checked, so that all of them are in range.
    """

    prepared_framework = "jax"

    def __init__(self, values: Any, size: int, mode: str, checked: bool) -> None:
        super().__init__(values, size, mode)
        self.checked = checked

    @classmethod
    def of(cls, q: Any, size: int, mode: str) -> JaxIndex:
        """Check an index array and bring it into range."""
        gather = Gather("q", (), size)
        if isinstance(q, jax.core.Tracer):
            if mode == "raise":
                check_p.bind(q, gather=gather, mode=mode)
            return cls(normalise(q, gather, mode), size, mode, False)
        values = prepare_numpy(np.asarray(q), gather, mode)
        return cls(jnp.asarray(values.astype(np.int32 if size < 2**31 else np.int64)), size, mode, True)


jax.tree_util.register_pytree_node(
    JaxIndex,
    lambda q: ((q.values,), (q.size, q.mode, q.checked)),
    lambda aux, children: JaxIndex(children[0], *aux),
)


# -- the range check: it raises where values can be seen -------------------------------------------------

# The check returns nothing, so that a program that is traced as a whole (under `jit`, or as the derivative of a
# `checkpoint`) drops it; results are NaN there. If the check returned the array, that would be a second array, which
# `vjp` under `jit` would keep besides the caller's.
check_p = Primitive("planner_check")
check_p.multiple_results = True


def check_values(raw: Any, gather: Gather, mode: str) -> list[Any]:
    """Check an index array whose values can be seen.

    Raises:
        IndexRangeError: one of them is out of range.
    """
    prepare_numpy(np.asarray(raw), gather, mode)
    return []


check_p.def_impl(check_values)


check_p.def_abstract_eval(lambda raw, **_: [])
mlir.register_lowering(check_p, mlir.lower_fun(lambda raw, **_: [], multiple_results=True))


def _check_batched(args: Any, dims: Any, **parameters: Any) -> tuple[list[Any], list[Any]]:
    return check_p.bind(args[0], **parameters), []


batching.primitive_batchers[check_p] = _check_batched


def checked_arrays(plan: PlanRecord, indices: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the index arrays by letter, checked where values can be seen, and the mode in which steps read them.

    Raises:
        IndexRangeError: an index is out of range.
        PlannerError: an index array is traced under "raise" and the result is of integers, which have no NaN; or it was
            prepared for another call.
    """
    spec, mode = plan.resolved.spec, plan.index_mode
    inexact = jnp.issubdtype(jnp.dtype(plan.dtype), jnp.inexact)

    def refuse_integers(name: str) -> None:
        if not inexact:
            raise PlannerError(
                f"index array {name!r} is traced and the result is {plan.dtype}, which has no NaN to mark a bad "
                "index with: pass index_mode='drop' or 'clip'"
            )

    values = {}
    concrete = True
    for name in spec.arrays:
        raw = indices[name]
        gathers = [g for g in spec.gathers if g.array == name]
        if isinstance(raw, JaxIndex):
            for gather in gathers:
                raw.check(gather, mode)
            values[name] = raw.values
            concrete = concrete and raw.checked
            if mode == "raise" and not raw.checked:
                refuse_integers(name)
            continue
        traced = isinstance(raw, jax.core.Tracer)
        concrete = concrete and not traced
        if mode == "raise":
            if traced:
                refuse_integers(name)
            for gather in gathers:
                # A constant under `jit` is checked at once. The primitive would become a part of the traced program.
                check = check_p.bind if traced else check_values
                check(raw, gather=gather, mode=mode)
        values[name] = raw
    return values, "checked" if mode == "raise" and concrete else mode
