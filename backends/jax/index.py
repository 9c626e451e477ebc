"""Index arrays in JAX: bringing them into range, and checking them where their values can be seen."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from planner.backends.common.indices import IndexOps, PreparedIndex, in_range, lies_within, numpy_in_range
from planner.kernels.grouping.keys import IndexArray
from planner.language.errors import PlannerError
from planner.language.options import MODES, IndexMode
from planner.language.spec import Gather, is_symbol, largest
from planner.program.calls import RangedIndices
from planner.program.plan import PlanRecord


def _signed(raw: Any, size: int) -> Any:
    wide, info = jnp.int32 if _is_narrow(size) else jnp.int64, jnp.iinfo(raw.dtype)
    if info.max > jnp.iinfo(wide).max:  # limit before narrowing
        least = -size - 1 if info.min else 0
        raw = jnp.clip(raw, least, size)
    return raw.astype(wide)


def _is_narrow(size: Any) -> bool:
    """Return whether 32 bits hold a size. JAX itself computes symbolic sizes in 64 bits if these are enabled."""
    most = largest(size)
    if most is None:
        return not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return most < 2**31 - 1


def repeat_like(x: Any, number: float) -> Any:
    """Return an array like another one with one number everywhere. `lax.full_like` is traced as more operations."""
    return lax.broadcast(np.asarray(number, x.dtype), x.shape)


def _wrap(values: Any, size: Any) -> Any:
    if is_symbol(size):
        return lax.select(values < 0, values + size, values)
    # The operators of `jnp` are compiled functions, which are traced anew for each size.
    return lax.select(lax.lt(values, repeat_like(values, 0)), lax.add(values, repeat_like(values, size)), values)


_JAX = IndexOps(
    signed=_signed,
    bounds=lambda values: None,
    first=lambda mask: (),
    wrap=lambda values, size, owned: _wrap(values, size),
    fill=lambda values, mask, number, owned: jnp.where(mask, number, values),
    clip=lambda values, low, high, owned: lax.clamp(
        jnp.asarray(low, values.dtype), values, jnp.asarray(high, values.dtype)
    ),
)
# The most indices that one loop of XLA looks at, where it would compile several that share the work.
FEW = 1 << 12
# The same for the least and the greatest index. So many run as fast in one loop, which compiles in half the time.
_FEW_BOUNDS = 1 << 14
# Under "raise" an entry may read any row where NaN marks the results that depend on it.
_MARKED = IndexMode(True, "clamp")


def traced_in_range(raw: Any, gather: Gather, mode: IndexMode) -> Any:
    """Bring an index array into [0, size] whose values cannot be seen; see `in_range`."""
    return in_range(_JAX, raw, gather, mode)[0]


def is_bad(raw: Any, gather: Gather) -> Any:
    """Return a mask of the entries that are out of range; negative entries count from the end."""
    size = gather.size
    assert size is not None
    values = _signed(raw, size)
    return (values >= size) | (values < -size)


def any_bad(raw: Any, gather: Gather) -> Any:
    """Return whether any entry is out of range; negative entries count from the end."""
    assert gather.size is not None
    return is_outside(_signed(raw, gather.size), -gather.size, gather.size)


def is_outside(values: Any, low: int, high: int) -> Any:
    """Return whether any value is outside of [low, high).

    XLA compiles the bounds of an array as one loop, and sums of masks as three. The one is slower where there are many.
    """
    count = largest(math.prod(values.shape))
    if count is None or count > _FEW_BOUNDS or is_symbol(high):
        return ((values < low) | (values >= high)).any()
    number = values.dtype.type
    least, most = lax.reduce((values, values), (number(0), number(-1)), _wider_bounds, range(values.ndim))
    return lax.bitwise_or(lax.lt(least, number(low)), lax.ge(most, number(high)))


def _wider_bounds(x: Any, y: Any) -> Any:
    """Return the bounds of two pairs of bounds. JAX traces the function once, because it is always the same one."""
    return lax.min(x[0], y[0]), lax.max(x[1], y[1])


def bring_into_range(given: Mapping[Gather, Any], index_mode: str, inexact: bool = True) -> RangedIndices:
    """Bring index arrays into range.

    Under "raise" a bad index that cannot be refused turns all results that depend on it into NaN, if they are inexact.
    Before that it may read any row.
    """
    mode = MODES[index_mode]
    marks = mode.bad == "refuse" and inexact and all(gather.size for gather in given)
    index = RangedIndices(mode.bad not in ("clamp", "trust") and not marks)
    for gather, values in given.items():
        normal = partial(traced_in_range, gather=gather, mode=_MARKED if marks else mode)
        index[gather] = normal(values)
        index.given[gather] = IndexArray(
            values, normal, index.may_drop, partial(is_bad, gather=gather) if marks else None
        )
    return index


class JaxIndex(PreparedIndex):
    """A prepared index: a pytree whose leaf is the index array with values in [0, size].

    If it was traced under "raise", a value that is `size` stands for an index that could not be refused.
    """

    prepared_framework = "jax"


def _is_hidden(raw: Any) -> bool:
    """Whether the values of an index array cannot be seen: it is traced, or parts of it lie in other processes."""
    return isinstance(raw, jax.core.Tracer) or not getattr(raw, "is_fully_addressable", True)


def jax_in_range(raw: Any, gather: Gather, mode: str) -> tuple[Any, bool]:
    """Bring an index array into range; see `in_range`.

    Raises:
        IndexRangeError: an index is out of range under "raise", and its values can be seen.
        PlannerError: the array was prepared for another size or mode.
    """
    if isinstance(raw, JaxIndex):
        return raw.read(gather, mode)
    if not _is_hidden(raw) and not is_symbol(gather.size):
        values, may_drop = numpy_in_range(np.asarray(raw), gather, MODES[mode])
        return jnp.asarray(values.astype(np.int32 if (gather.size or 0) < 2**31 else np.int64)), may_drop
    if MODES[mode].bad == "refuse" and isinstance(raw, jax.core.Tracer):
        check_p.bind(raw, gather=gather)
    return in_range(_JAX, raw, gather, MODES[mode])


def is_in_range(raw: Any, gather: Gather, mode: str) -> bool:
    """Return whether all entries of an index array are known to be in range, negative ones too if the mode wraps them.

    Raises:
        PlannerError: the array was prepared for another size or mode.
    """
    if isinstance(raw, JaxIndex):
        return not raw.read(gather, mode)[1]
    if _is_hidden(raw) or is_symbol(gather.size):
        return False
    size = gather.size or 0
    return lies_within(np.asarray(raw), -size if MODES[mode].wraps else 0, size)


def _as_jax(values: Any) -> Any:
    """Return a prepared index array's values as an array of JAX: `jax.device_get` makes NumPy arrays of a pytree's."""
    if not isinstance(values, np.ndarray):
        return values
    with jax.ensure_compile_time_eval():  # so that they can be checked under `jit`
        return jnp.asarray(values)


class _Checked:
    """What a pytree of a prepared index knows besides the values, and which array it was made of.

    Two are equal if they say the same, whatever array they were made of: they are parts of the keys of `jit`.
    """

    def __init__(self, facts: tuple[int, str, bool], values: Any = None) -> None:
        self.facts = facts  # size, index mode, whether an entry may be dropped
        self.values = weakref.ref(values) if isinstance(values, jax.Array) else lambda: None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Checked) and self.facts == other.facts

    def __hash__(self) -> int:
        return hash(self.facts)

    def __repr__(self) -> str:  # JAX's errors show it
        return "size={}, index_mode={!r}, may_drop={}".format(*self.facts)

    def index(self, values: Any) -> JaxIndex:
        """Return the prepared index with these values.

        Values that a program computed, as in `jax.tree.map`, may be out of range. Those that a transform put in the
        place of what it was called with are the same values.
        """
        size, mode, may_drop = self.facts
        if _is_computed(values, self.values()):
            may_drop = may_drop or _may_be_bad(values, size)
        return JaxIndex(values, size, mode, may_drop)


def _is_computed(x: Any, before: Any) -> bool:
    """Return whether an array may hold other values than one before it, or than what a transform made of that."""
    if x is before:
        return False
    if hasattr(x, "parent"):  # what a traced operation computes has the operation as its parent, an argument has none
        return x.parent is not None
    # A tracer of `vmap` is around the array with the mapped axis.
    return not isinstance(x, jax.core.Tracer) or not hasattr(x, "val") or _is_computed(x.val, before)


def _may_be_bad(values: Any, size: int) -> bool:
    """Return whether values may be outside of [0, size). What holds no integers is judged where it is used."""
    if isinstance(values, jax.core.Tracer):
        return True
    if not isinstance(values, jax.Array | np.ndarray) or values.dtype.kind not in "iu":
        return False
    if not getattr(values, "is_fully_addressable", True):  # a part of it is in another process
        return True
    return numpy_in_range(np.asarray(values), Gather("q", (), size), MODES["drop"])[1]


jax.tree_util.register_pytree_node(
    JaxIndex,
    lambda q: ((q.values,), _Checked((q.size, q.mode, q.may_drop), q.values)),
    lambda checked, children: checked.index(children[0]),
)
# For programs of `jax.export` that take prepared index arrays.
export.register_pytree_node_serialization(
    JaxIndex,
    serialized_name="planner.JaxIndex",
    serialize_auxdata=lambda checked: json.dumps(checked.facts).encode(),
    deserialize_auxdata=lambda text: _Checked(tuple(json.loads(text))),
)


# -- the range check: it raises where values can be seen -------------------------------------------------

# The check returns nothing, so that a program that is traced as a whole (under `jit`, or as the derivative of a
# `checkpoint`) drops it; results are NaN there. If the check returned the array, that would be a second array, which
# `vjp` under `jit` would keep besides the caller's.
check_p = Primitive("planner_check")
check_p.multiple_results = True


def check_values(raw: Any, gather: Gather) -> list[Any]:
    """Check an index array whose values can be seen.

    Raises:
        IndexRangeError: one of them is out of range.
    """
    values, size = np.asarray(raw), gather.size or 0
    if not lies_within(values, -size, size):
        numpy_in_range(values, gather, MODES["raise"])
    return []


check_p.def_impl(check_values)


check_p.def_abstract_eval(lambda raw, **_: [])
mlir.register_lowering(check_p, mlir.lower_fun(lambda raw, **_: [], multiple_results=True))


def _check_batched(args: Any, dims: Any, **parameters: Any) -> tuple[list[Any], list[Any]]:
    return check_p.bind(args[0], **parameters), []


batching.primitive_batchers[check_p] = _check_batched


class IndexReader:
    """Reads the index arrays of calls of a plan.

    Args:
        plan: the plan.
    """

    def __init__(self, plan: PlanRecord) -> None:
        spec, self.mode, self.dtype = plan.resolved.spec, plan.index_mode, plan.dtype
        self.refuses = MODES[self.mode].bad == "refuse"
        self.inexact = bool(jnp.issubdtype(jnp.dtype(plan.dtype), jnp.inexact))
        # The letters of the index arrays, what they index, and whether a size of that is a symbol: then nothing is
        # known to be out of range.
        self.arrays: list[tuple[str, list[Gather], bool]] = []
        for name in spec.arrays:
            gathers = [gather for gather in spec.gathers if gather.array == name]
            self.arrays.append((name, gathers, any(is_symbol(gather.size) for gather in gathers)))

    def read(self, indices: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the index arrays by letter, checked where values can be seen, and the mode in which steps read them.

        Raises:
            IndexRangeError: an index is out of range.
            PlannerError: an index array is traced under "raise" and the result is of integers, which have no NaN; or it
                was prepared for another call.
        """
        values, concrete = {}, True
        for name, gathers, symbolic in self.arrays:
            raw = indices[name]
            if isinstance(raw, JaxIndex):
                for gather in gathers:
                    raw.read(gather, self.mode)
                checked, raw = not raw.may_drop, _as_jax(raw.values)
                values[name] = raw
                if checked:
                    continue
            values[name] = raw
            if not self.refuses:
                continue
            traced, hidden = isinstance(raw, jax.core.Tracer), symbolic or _is_hidden(raw)
            concrete = concrete and not hidden
            if hidden and not self.inexact:
                why = "is traced" if traced or symbolic else "lies in several processes"
                raise PlannerError(
                    f"index array {name!r} {why} and the result is {self.dtype}, which has no NaN to mark a bad "
                    "index with: pass index_mode='drop' or 'clip'"
                )
            for gather in gathers if not symbolic and (traced or not hidden) else ():
                # A constant under `jit` is checked at once. The primitive would become a part of the traced program.
                check = check_p.bind if traced else check_values
                check(raw, gather=gather)
        return values, "checked" if self.refuses and concrete else self.mode
