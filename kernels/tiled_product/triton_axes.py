"""How Triton kernels address tensors, by strides and tables of positions, and how they cut groups into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from planner.kernels.grouping.torch_grouping import accumulator

__all__ = [
    "Axis",
    "Cut",
    "Grouping",
    "Matrices",
    "axis_of",
    "count_pieces",
    "grid",
    "index_type",
    "most_tiles",
    "packed",
    "starts_of",
]


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
    """An operand as product kernels read it, `x[outer, inner, column]`; `batch` is the stride between batch entries."""

    x: Tensor
    outer: Axis
    inner: Axis
    column: Axis
    batch: int = 0

    @classmethod
    def of(cls, x: Tensor, rows: Tensor | None = None) -> Matrices:
        """Read a tensor of three dimensions; the first one through `rows`, if given."""
        x = x.resolve_neg()  # the imaginary part of a conjugate is negated lazily
        return cls(x, Axis(x.stride(0), rows), Axis(x.stride(1)), Axis(x.stride(2)))

    @property
    def flat(self) -> list[Any]:
        """The kernel's arguments for this operand."""
        return [self.x, *(part for axis in self[1:4] for part in axis.flat)]


class Grouping(NamedTuple):
    """Rows in the order of their groups, as product kernels walk them.

    Attributes:
        order: row numbers sorted by group; None if the rows are sorted already.
        starts: where each group begins in `order`, where the dropped rows begin if they are walked too, and the end.
        groups: number of groups, without the group of dropped rows.
        batch_groups: groups per batch entry; None if there is no batch.
    """

    order: Tensor | None
    starts: Tensor | None
    groups: int
    batch_groups: int | None = None


def packed(table: Tensor | None) -> Tensor | None:
    """Return a table as kernels read it, contiguous; a table that was expanded has a stride of 0."""
    return None if table is None else table.contiguous()


def grid(programs: int) -> tuple[int]:
    """Return the grid for a number of programs.

    Raises:
        ValueError: a device does not take that many programs.
    """
    if programs >= 2**31:
        raise ValueError(f"the product needs {programs} programs, of which a device takes {2**31 - 1}")
    return (programs,)


def index_type(terms: int, *arrays: Tensor | None) -> tl.dtype:
    """Return int32 if that holds every number of a term and every offset into the arrays, else int64.

    A kernel also computes with positions up to a tile's rows beyond the last one.
    """
    reach = max(terms, 0, *(x.untyped_storage().nbytes() // x.element_size() for x in arrays if x is not None))
    return tl.int32 if reach < 2**31 - 2**16 else tl.int64


def count_pieces(starts: Tensor, inner: int, step: int) -> Tensor:
    """Return how many pieces of `step` terms each group is cut into; a row has `inner` terms."""
    return (starts.diff() * inner + (step - 1)).div(step, rounding_mode="floor")


def starts_of(counts: Tensor) -> Tensor:
    """Return the running sums of the counts: where each one starts, and the total."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def most_tiles(terms: int, step: int, groups: int) -> int:
    """Return the most pieces that groups of `terms` terms in total can have: each group may end in a partial piece."""
    return triton.cdiv(terms, step) + groups


class Cut(NamedTuple):
    """Groups cut into pieces, whose sums are added up afterwards.

    A group without terms has one piece. A group of several pieces has a slot for the sum of each.

    Attributes:
        tile_starts: number of pieces before each group, and of all.
        part_starts: number of slots before each group, and of all.
        slots: most slots that any grouping needs.
        most: most pieces that any grouping needs.
    """

    tile_starts: Tensor
    part_starts: Tensor
    slots: int
    most: int

    @classmethod
    def of(cls, starts: Tensor, terms: int, inner: int, step: int) -> Cut:
        """Cut groups of `terms` terms in total into pieces of `step` terms; a row has `inner` terms."""
        pieces = count_pieces(starts, inner, step).clamp_min_(1)
        # A group that is cut has more terms than a step, and all of its pieces but one are full.
        slots = 2 * (terms // step)
        return cls(starts_of(pieces), starts_of(pieces * (pieces > 1)), slots, most_tiles(terms, step, len(starts) - 1))

    def parts(self, like: Tensor, m: int, n: int) -> Tensor:
        """Allocate memory for the sums of pieces, `(slots, m, n)`; one element if there are no slots."""
        wide = accumulator(like.dtype)
        return like.new_empty((self.slots, m, n) if self.slots else (1, 1, 1), dtype=wide)
