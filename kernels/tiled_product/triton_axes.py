"""How Triton kernels address tensors: an axis is a stride, or a table and a stride; and how groups are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from planner.kernels.grouping.torch_grouping import accumulator

__all__ = ["Axis", "Cut", "Matrices", "axis_of", "cut", "grid", "most_tiles", "packed", "starts_of"]


class Axis(NamedTuple):
    """An axis of an operand: elements between neighbours, and the position of each index where it is not the index."""

    stride: int
    table: Tensor | None = None

    @property
    def flat(self) -> list[Any]:
        """What a kernel takes of it."""
        return [packed(self.table), self.stride]


def axis_of(x: Tensor, dims: Sequence[int]) -> Axis:
    """Return some dimensions of a tensor, the last innermost, as one axis: a stride where they lie so, else a table."""
    known = [(x.shape[d], x.stride(d)) for d in dims if x.shape[d] != 1]
    if all(outer == size * inner for (_, outer), (size, inner) in zip(known, known[1:], strict=False)):
        return Axis(known[-1][1] if known else 0)
    positions = torch.zeros((), dtype=torch.int64, device=x.device)
    for size, stride in known:
        positions = positions.unsqueeze(-1) + torch.arange(size, device=x.device) * stride
    return Axis(1, positions.reshape(-1))


class Matrices(NamedTuple):
    """An operand as the kernels of products see it; `batch` is a stride along entries of a batch of groups."""

    x: Tensor
    outer: Axis
    inner: Axis
    column: Axis
    batch: int = 0

    @classmethod
    def of(cls, x: Tensor, rows: Tensor | None = None) -> Matrices:
        """Three dimensions, the first through a map of rows if there is one."""
        x = x.resolve_neg()  # of a conjugate's imaginary part, say
        return cls(x, Axis(x.stride(0), rows), Axis(x.stride(1)), Axis(x.stride(2)))

    @property
    def flat(self) -> list[Any]:
        """What a kernel takes of it."""
        return [self.x, *(part for axis in self[1:4] for part in axis.flat)]


def packed(table: Tensor | None) -> Tensor | None:
    """Return a table as kernels read it, without gaps: one that repeats an entry has a stride of 0."""
    return None if table is None else table.contiguous()


def grid(programs: int) -> tuple[int]:
    """Return the grid of a number of programs.

    Raises:
        ValueError: a device does not take that many.
    """
    if programs >= 2**31:
        raise ValueError(f"the product needs {programs} programs, of which a device takes {2**31 - 1}")
    return (programs,)


def cut(starts: Tensor, inner: int, step: int) -> Tensor:
    """Return into how many pieces of `step` terms, `inner` of which belong to a row, each group is cut."""
    return (starts.diff() * inner + (step - 1)).div(step, rounding_mode="floor")


def starts_of(counts: Tensor) -> Tensor:
    """Return the sums of all counts before each, and of all."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def most_tiles(terms: int, step: int, groups: int) -> int:
    """Return the most pieces that groups of so many terms in all are cut into: each ends in one that is not full."""
    return triton.cdiv(terms, step) + groups


class Cut(NamedTuple):
    """Groups cut into pieces, whose sums are added up afterwards; a group without terms is a piece too.

    Attributes:
        tile_starts: pieces before those of each group, and of all.
        part_starts: slots before those of each group, and of all: a group that is cut has one for each piece.
        slots: the most slots that there can be.
        most: the most pieces.
    """

    tile_starts: Tensor
    part_starts: Tensor
    slots: int
    most: int

    @classmethod
    def of(cls, starts: Tensor, terms: int, inner: int, step: int) -> Cut:
        """Groups of `terms` in all, in pieces of `step`; `inner` of them belong to a row."""
        pieces = cut(starts, inner, step).clamp_min_(1)
        # A group that is cut has more terms than a step, and all of its pieces but one are full.
        slots = 2 * (terms // step)
        return cls(starts_of(pieces), starts_of(pieces * (pieces > 1)), slots, most_tiles(terms, step, len(starts) - 1))

    def parts(self, like: Tensor, m: int, n: int) -> Tensor:
        """Memory for the sums of pieces, `(slots, m, n)`; one element where there are none."""
        wide = accumulator(like.dtype)
        return like.new_empty((self.slots, m, n) if self.slots else (1, 1, 1), dtype=wide)
