"""Index arrays: checks and errors that all backends share, and arrays that `planner.group` checked before the call."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.language.errors import IndexRangeError, PlannerError
from planner.language.spec import Gather

__all__ = ["PreparedIndex", "check_index_dtype", "clip_error", "prepare_numpy", "range_error"]


class PreparedIndex:
    """An index array that `planner.group` checked, for use in many calls.

    Attributes:
        values: the index array with values in [0, size].
        size: size of the dimension that it indexes.
        mode: the index mode that it was checked under.
    """

    prepared_framework = "numpy"

    def __init__(self, values: Any, size: int, mode: str) -> None:
        self.values, self.size, self.mode = values, size, mode

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

    def check(self, gather: Gather, mode: str) -> None:
        """Refuse a call whose size or index mode is another than the array was prepared for.

        Raises:
            PlannerError: the size or the mode differs.
        """
        if self.size != gather.size or self.mode != mode:
            raise PlannerError(
                f"index array {gather.array!r} was prepared by group for size {self.size} and index_mode "
                f"{self.mode!r}, but {gather} has size {gather.size} and the call index_mode {mode!r}"
            )


def check_index_dtype(name: str, dtype: str) -> None:
    """Refuse an index array whose dtype is not an integer.

    Raises:
        PlannerError: it is none; the message names the array.
    """
    if not dtype.startswith(("int", "uint")):
        raise PlannerError(
            f"index array {name!r} has dtype {dtype}: it must be an integer array; cast it, or for a mask use where()"
        )


def range_error(gather: Gather, position: tuple[int, ...], value: int) -> IndexRangeError:
    """Return the error for a bad index under ``index_mode="raise"``."""
    place = f"[{', '.join(map(str, position))}]" if position else ""
    dimension = str(gather) if gather.axes or not position else "that it indexes"
    return IndexRangeError(
        f"index array {gather.array!r}{place} is {value}, outside of [-{gather.size}, {gather.size}), the range of "
        f"the dimension {dimension}; to ignore such entries pass index_mode='drop', to clamp them index_mode='clip'"
    )


def clip_error(gather: Gather) -> IndexRangeError:
    """Return the error for clipping into a dimension of size 0."""
    return IndexRangeError(f"index array {gather.array!r} cannot be clipped: the dimension {gather} has size 0")


def prepare_numpy(raw: np.ndarray[Any, Any], gather: Gather, mode: str) -> np.ndarray[Any, Any]:
    """Bring an index array into [0, size), counting negative indices from the end under "raise".

    Under "drop", an index out of range becomes `size`, which means "no row".

    Raises:
        IndexRangeError: under "raise", an index is out of range; under "clip", the dimension has size 0.
        PlannerError: the array is not of integers.
    """
    check_index_dtype(gather.array, raw.dtype.name)
    size = gather.size
    assert size is not None
    if raw.size == 0:
        return raw.astype(np.int64)
    low, high = int(raw.min()), int(raw.max())
    if mode == "raise":
        if low < -size or high >= size:
            bad = (raw < -size) if low < -size else (raw >= size)
            position = tuple(int(i) for i in np.argwhere(bad)[0]) if raw.ndim else ()
            raise range_error(gather, position, int(raw[position]))
        wide = raw.astype(np.int64)
        return np.where(wide < 0, wide + size, wide) if low < 0 else wide
    if mode == "clip":
        if size == 0:
            raise clip_error(gather)
        # Clamp before narrowing: a uint64 may exceed int64.
        return np.clip(raw, 0, min(size - 1, np.iinfo(raw.dtype).max)).astype(np.int64)
    if low < 0 or high >= size:
        fits = (raw >= 0) & (raw < size)
        return np.where(fits, raw, 0).astype(np.int64) + np.where(fits, 0, size)
    return raw.astype(np.int64)
