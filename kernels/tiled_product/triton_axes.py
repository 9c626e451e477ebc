"""How Triton kernels address tensors, by strides and tables of positions, and how they cut groups into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from planner.kernels.grouping.torch_grouping import Groups, accumulator
from planner.kernels.grouping.triton_grouping import Tasks, cut_tasks

# Without a limit NVIDIA's assembler keeps some bytes of a thread in memory, for more programs at once. AMD's has none.
_ALL_REGISTERS: dict[str, Any] = {} if torch.version.hip else {"maxnreg": 255}


class Axis(NamedTuple):
    """An axis of an operand: index n is read at `stride * n`, or at `stride * table[n]` if there is a table."""

    stride: int
    table: Tensor | None = None

    @property
    def flat(self) -> list[Any]:
        """The kernel's arguments for this axis."""
        return [packed(self.table), self.stride]


def axis_of(x: Tensor, dims: Sequence[int]) -> Axis:
    """Join some dimensions of a tensor, the last innermost, to one axis; it has a table unless one stride is enough."""
    layout = [(x.shape[d], x.stride(d)) for d in dims if x.shape[d] != 1]
    if all(outer == size * inner for (_, outer), (size, inner) in zip(layout, layout[1:], strict=False)):
        return Axis(layout[-1][1] if layout else 0)
    positions = torch.zeros((), dtype=torch.int64, device=x.device)
    for size, stride in layout:
        positions = positions.unsqueeze(-1) + torch.arange(size, device=x.device) * stride
    return Axis(1, positions.reshape(-1))


class Matrices(NamedTuple):
    """An operand as product kernels read it, `x[outer, inner, column]`."""

    x: Tensor
    outer: Axis
    inner: Axis
    column: Axis

    @classmethod
    def of(cls, x: Tensor, rows: Tensor | None = None) -> Matrices:
        """Read a tensor of three dimensions; the first one through `rows`, if given."""
        x = x.resolve_neg()  # the imaginary part of a conjugate is negated lazily
        return cls(x, Axis(x.stride(0), rows), Axis(x.stride(1)), Axis(x.stride(2)))

    @property
    def transposed(self) -> Matrices:
        """The operand with each of its matrices transposed."""
        return self._replace(inner=self.column, column=self.inner)

    @property
    def flat(self) -> list[Any]:
        """The kernel's arguments for this operand."""
        return [self.x, *(part for axis in self[1:] for part in axis.flat)]


class Grouping(NamedTuple):
    """Rows in the order of their groups, as product kernels walk them.

    Attributes:
        order: row numbers sorted by group; None if the rows are sorted already.
        starts: where each group begins in `order`, and where the dropped rows do.
        groups: number of groups, without the group of dropped rows.
        made: the groups that this was made of; they keep tables of tasks.
    """

    order: Tensor | None
    starts: Tensor | None
    groups: int
    made: Groups | None = None

    @classmethod
    def of(cls, groups: Groups) -> Grouping:
        """Return groups as kernels walk them."""
        return cls(groups.order, groups.offsets, groups.size, made=groups)

    def tasks(self, rows: int, inner: int, step: int, drops: bool, empty: bool) -> Tasks:
        """Return the groups cut into tasks, see `cut_tasks`."""
        if self.made is not None:
            return self.made.tasks(inner, step, drops, empty)
        assert self.starts is not None
        return cut_tasks(self.starts, rows, self.groups, inner, step, drops, empty)


def packed(table: Tensor | None) -> Tensor | None:
    """Return a table as kernels read it, contiguous; a table that was expanded has a stride of 0."""
    return None if table is None else table.contiguous()


def registers_for(x: Tensor, warps: int) -> dict[str, Any]:
    """Return the options that give the threads of a program their registers, `num_warps` among them.

    Args:
        x: an operand.
        warps: warps of a program.
    """
    if x.element_size() < 8:
        return {"num_warps": warps, **_ALL_REGISTERS}
    # Products of float64 keep more in memory with all registers. AMD's warps have 64 threads: with 8 of them a thread
    # has too few registers for float64.
    return {"num_warps": warps if _ALL_REGISTERS else min(warps, 4)}


def sums_of(tasks: Tasks, like: Tensor, m: int, n: int) -> Tensor | None:
    """Allocate memory for the sums of tasks, `(slots, m, n)`; None if there are no slots."""
    return like.new_empty((tasks.slots, m, n), dtype=accumulator(like.dtype)) if tasks.slots else None


def index_type(terms: int, *arrays: Tensor | None) -> tl.dtype:
    """Return int32 if that holds every number of a term and every offset into the arrays, else int64.

    A kernel also computes with positions up to a tile's rows beyond the last one.
    """
    reach = max(terms, 0, *(x.untyped_storage().nbytes() // x.element_size() for x in arrays if x is not None))
    return tl.int32 if reach < 2**31 - 2**16 else tl.int64
