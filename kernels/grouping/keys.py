"""An index array as kernels receive it: its values, and how to bring them into range."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class IndexArray:
    """An index array into a pool with M rows.

    Attributes:
        values: the integers that the caller gave.
        normal: a function that brings values into [0, M), or raises an error; None if all values are in [0, M] already.
            It can be called on parts: a kernel that reads block by block makes no copy of the whole array.
        may_drop: whether a value may be M, which stands for no row. In torch this is never set together with `normal`.
        bad: a function that says which values are out of range, if no error can be raised for them. The kernel writes
            NaN for these, so that no separate pass over the values is needed. None if no value is out of range.
        groups: a function that returns the values sorted, with a group for each of the M rows; the steps of a call
            share them, and so do the calls with a prepared index. None if the kernel must sort them.
        sort: a function that takes the number of groups, and returns the values sorted, their range checked on the way.
            None if the range must be checked before.
        check: a function that returns where a kernel that reads all values tells of one out of range, and writes NaN
            for it: a `planner.kernels.grouping.triton_grouping.Check`, or None if that cannot be now. None if the range
            must be checked before.
    """

    values: Any
    normal: Callable[[Any], Any] | None = None
    may_drop: bool = True
    bad: Callable[[Any], Any] | None = None
    groups: Callable[[], Any] | None = None
    sort: Callable[[int], Any] | None = None
    check: Callable[[], Any] | None = None

    def part(self, values: Any) -> Any:
        """Return a part of the values, brought into range."""
        return values if self.normal is None else self.normal(values)
