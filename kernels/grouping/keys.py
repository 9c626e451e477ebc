"""An index array as a kernel is handed it: its values, and how these are to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

__all__ = ["IndexArray"]


@dataclasses.dataclass(frozen=True, slots=True)
class IndexArray:
    """An index array of a pool with M rows.

    Attributes:
        values: integers.
        normal: brings some of the values, or all, into [0, M), or refuses them; None where all are in [0, M] already.
            A kernel that reads blocks, each through `normal`, makes no copy of the whole.
        may_drop: whether values may be M, which stands for no row; not with `normal` in torch.
        bad: tells which values are out of range and could not be refused: a kernel that writes NaN there spares the
            caller a look at all of them. None where there are none.
    """

    values: Any
    normal: Callable[[Any], Any] | None = None
    may_drop: bool = True
    bad: Callable[[Any], Any] | None = None

    def part(self, values: Any) -> Any:
        """Return some of the values, in range."""
        return values if self.normal is None else self.normal(values)
