"""Index arrays: the rule that brings them into range, its errors, and arrays that `planner.group` checked before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from planner.language.errors import IndexRangeError, PlannerError
from planner.language.options import MODES, IndexMode
from planner.language.spec import Gather


class PreparedIndex:
    """An index array that `planner.group` checked, for use in many calls.

    Attributes:
        values: the index array with values in [0, size].
        size: size of the dimension that it indexes.
        mode: the index mode that it was checked under.
        may_drop: whether a value may be `size`, which means "no row".
    """

    prepared_framework = "numpy"

    def __init__(self, values: Any, size: int, mode: str, may_drop: bool) -> None:
        self.values, self.size, self.mode, self.may_drop = values, size, mode, may_drop

    @property
    def shape(self) -> Any:
        """Shape of the index array."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the prepared values."""
        return self.values.dtype

    @property
    def device(self) -> Any:
        """Device of the prepared values."""
        return self.values.device

    def read(self, gather: Gather, mode: str) -> tuple[Any, bool]:
        """Return the values, and whether one may be `size`, for a call of the same size and index mode.

        Raises:
            PlannerError: the size or the mode differs.
        """
        if self.size != gather.size or mode not in (self.mode, MODES[self.mode].unmarked):
            raise PlannerError(
                f"index array {gather.array!r} was prepared by group for size {self.size} and index_mode "
                f"{self.mode!r}, but {gather} has size {gather.size} and the call index_mode {mode!r}"
            )
        return self.values, self.may_drop


def check_index_dtype(name: str, dtype: str) -> None:
    """Refuse an index array whose dtype is not an integer.

    Raises:
        PlannerError: it is none; the message names the array.
    """
    if not dtype.startswith(("int", "uint")):
        raise PlannerError(
            f"index array {name!r} has dtype {dtype}: it must be an integer array; cast it, or for a mask use where()"
        )


def range_error(gather: Gather, position: tuple[int, ...], value: int | None) -> IndexRangeError:
    """Return the error for a bad index under ``index_mode="raise"``; the value is None if it is not known any more."""
    place = f"[{', '.join(map(str, position))}]" if position else ""
    dimension = str(gather) if gather.axes or not position else "that it indexes"
    is_value = "was" if value is None else f"is {value},"
    return IndexRangeError(
        f"index array {gather.array!r}{place} {is_value} outside of [-{gather.size}, {gather.size}), the range of "
        f"the dimension {dimension}; to ignore such entries pass index_mode='drop', to clamp them index_mode='clip'"
    )


def clip_error(gather: Gather) -> IndexRangeError:
    """Return the error for clipping into a dimension of size 0."""
    return IndexRangeError(f"index array {gather.array!r} cannot be clipped: the dimension {gather} has size 0")


class IndexOps(NamedTuple):
    """The functions of a framework that bring its index arrays into range.

    Attributes:
        signed: takes an index array and a size, and returns the array in a signed type that holds -size - 1 and size.
            Entries that the type cannot hold become others that are out of range on the same side.
        bounds: returns the least and the greatest entry, or None if values cannot be seen.
        first: returns the position of the first true entry of a mask.
        wrap: adds a size to negative entries; what it makes of entries that are out of range does not matter.
        fill: puts a number at the true entries of a mask.
        clip: limits the entries of an array, as `np.clip`.

    The last three may write into the array if that is `owned`: a copy of the caller's.
    """

    signed: Callable[[Any, int], Any]
    bounds: Callable[[Any], tuple[Any, Any] | None]
    first: Callable[[Any], tuple[int, ...]]
    wrap: Callable[[Any, int, bool], Any]
    fill: Callable[[Any, Any, int, bool], Any]
    clip: Callable[[Any, int, int, bool], Any]


def in_range(ops: IndexOps, raw: Any, gather: Gather, mode: IndexMode) -> tuple[Any, bool]:
    """Bring an index array into [0, size], and return whether the value `size`, which means "no row", can occur.

    Where values cannot be seen, an entry that should be refused becomes `size`.

    Raises:
        IndexRangeError: an entry is to be refused, or is clamped into a dimension of size 0.
    """
    size = gather.size
    assert size is not None
    values = ops.signed(raw, size)
    owned = values is not raw
    if 0 in raw.shape:
        return values, False
    if mode.bad == "clamp" and size == 0:
        raise clip_error(gather)
    bounds = None if mode.bad == "clamp" else ops.bounds(values)  # to clamp, no value need be looked at
    if bounds is not None:
        low, high = (int(bound) for bound in bounds)
        least = -size if mode.wraps else 0
        if least <= low and high < size:
            return (ops.wrap(values, size, owned) if low < 0 else values), False
        if mode.bad == "refuse":
            position = ops.first(values < least if low < least else values >= size)
            raise range_error(gather, position, raw[position].item())
    bad = None if mode.bad in ("clamp", "trust") else (values >= size) | (values < (-size if mode.wraps else 0))
    if mode.wraps:
        values, owned = ops.wrap(values, size, owned), True
    if mode.bad == "clamp":
        return ops.clip(values, 0, size - 1, owned), False
    return (values, False) if bad is None else (ops.fill(values, bad, size, owned), True)


def _signed(raw: Any, size: int) -> Any:
    limit = np.iinfo(np.int64).max
    return (np.minimum(raw, limit) if raw.dtype == np.uint64 else raw).astype(np.int64, copy=False)


_NUMPY = IndexOps(
    signed=_signed,
    bounds=lambda values: (values.min(), values.max()),
    first=lambda mask: tuple(np.argwhere(mask)[0].tolist()),
    wrap=lambda values, size, owned: np.remainder(values, max(size, 1)),
    fill=lambda values, mask, number, owned: np.where(mask, number, values),
    clip=lambda values, low, high, owned: np.clip(values, low, high),
)


def lies_within(values: np.ndarray[Any, Any], low: int, high: int) -> bool:
    """Return whether an array holds integers, all of them in [low, high)."""
    if values.dtype.kind not in "iu":
        return False
    if not values.size:
        return True
    # The methods `min` and `max` take a microsecond longer.
    return low <= int(np.minimum.reduce(values, axis=None)) and int(np.maximum.reduce(values, axis=None)) < high


def numpy_in_range(raw: np.ndarray[Any, Any], gather: Gather, mode: IndexMode) -> tuple[Any, bool]:
    """Bring an index array of NumPy into range; see `in_range`.

    Raises:
        IndexRangeError: an entry is to be refused, or is clamped into a dimension of size 0.
        PlannerError: the array is not of integers.
    """
    check_index_dtype(gather.array, raw.dtype.name)
    values, may_drop = in_range(_NUMPY, raw, gather, mode)
    return np.asarray(values), may_drop  # NumPy makes a number of an array without dimensions
