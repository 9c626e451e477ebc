"""Index arrays in JAX: brought into range, and checked wherever their values can be seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from planner.backends.common.common import PreparedIndex, prepare_numpy
from planner.language.errors import PlannerError
from planner.language.spec import Gather, Spec
from planner.program.plan import PlanRecord

__all__ = ["JaxIndex", "check_values", "checked_arrays", "index_shape", "is_bad", "normalised"]


def index_shape(spec: Spec, array: str) -> tuple[int, ...]:
    """The shape of an index array: the sizes of its bracket's axes."""
    sizes = dict(spec.sizes)
    gather = next(g for g in spec.gathers if g.array == array)
    return tuple(sizes[axis] for axis in gather.axes)


def normalised(raw: Any, gather: Gather, mode: str) -> Any:
    """Bring an index array into [0, size]; out-of-range values become `size` unless the mode clips them.

    Besides the index modes there are "checked", which trusts that values are in range, and "wrapped", which clips.
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
    """Which entries of an index array are out of range, negative ones counting from the end."""
    return normalised(raw, gather, "raise") == gather.size


class JaxIndex(PreparedIndex):
    """A prepared index: a pytree whose leaf is the index array with values in [0, size].

    Attributes:
        checked: whether its values were seen, so that none of them is out of range.
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
            return cls(normalised(q, gather, mode), size, mode, False)
        values = prepare_numpy(np.asarray(q), gather, mode)
        return cls(jnp.asarray(values.astype(np.int32 if size < 2**31 else np.int64)), size, mode, True)


jax.tree_util.register_pytree_node(
    JaxIndex,
    lambda q: ((q.values,), (q.size, q.mode, q.checked)),
    lambda aux, children: JaxIndex(children[0], *aux),
)


# -- the range check: raises where values can be seen ----------------------------------------------------

# It returns nothing, so that a program that is traced whole (`jit`, the derivative of a `checkpoint`) drops it: results
# are NaN there. What passed through it would be another array, which `vjp` under `jit` keeps besides the caller's.
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
    """Index arrays by letter, checked where their values can be seen, and the mode in which the steps read them."""
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
                # A constant under jit is checked here, where its values can be seen; a primitive would be staged.
                check = check_p.bind if traced else check_values
                check(raw, gather=gather, mode=mode)
        values[name] = raw
    return values, "checked" if mode == "raise" and concrete else mode
