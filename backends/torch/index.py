"""Index arrays in torch: checks, conversion into range, and arrays prepared for many calls with their rows sorted."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from planner.backends.common.indices import PreparedIndex, clip_error, range_error
from planner.backends.torch.ops import captured, dataless, not_dense
from planner.kernels.grouping import torch_grouping
from planner.language.errors import IndexRangeError, PlannerError
from planner.language.spec import Gather

__all__ = ["TorchIndex", "in_range", "part_in_range", "refuse_sparse"]


class TorchIndex(PreparedIndex):
    """A prepared index with its rows sorted by group."""

    prepared_framework = "torch"

    def __init__(self, values: Tensor, size: int, mode: str, may_drop: bool) -> None:
        super().__init__(values, size, mode)
        self.may_drop = may_drop
        self.groups = torch_grouping.group_rows(values.reshape(-1), size)
        self.facts = str(size), mode, str(may_drop)

    def reshape(self, shape: Sequence[int]) -> TorchIndex:
        """Return the same rows in another shape."""
        if tuple(shape) == tuple(self.shape):
            return self
        view = copy.copy(self)
        view.values = self.values.reshape(tuple(shape))
        return view

    def parts(self) -> tuple[list[Tensor], tuple[str, ...]]:
        """Return its tensors and its other facts. These are text, because Dynamo turns numbers into symbols."""
        return [self.values, self.groups.order, self.groups.offsets], self.facts

    @classmethod
    def join(cls, tensors: Iterable[Tensor], facts: Iterable[str]) -> TorchIndex:
        """Return the index of some tensors and facts: the inverse of `parts`."""
        index = cls.__new__(cls)
        (index.values, order, offsets), (size, index.mode, may_drop) = tensors, facts
        index.size, index.may_drop, index.facts = int(size), may_drop == "True", (size, index.mode, may_drop)
        index.groups = torch_grouping.Groups(order, offsets, index.size)
        return index


def refuse_sparse(raw: Tensor, gather: Gather) -> None:
    """Refuse an index array that is not laid out with strides."""
    if raw.layout != torch.strided:
        raise PlannerError(f"index array {gather.array!r} {not_dense(raw)}")


def in_range(raw: Tensor, gather: Gather, mode: str) -> tuple[Tensor, bool]:
    """Bring an index array into [0, size], and return whether the value `size`, which means "no row", can occur.

    While a CUDA graph is captured, values cannot be looked at. Then `size` may occur under "drop", and under "raise"
    the device refuses a bad index when the graph runs.

    Raises:
        IndexRangeError: an index is out of range under "raise", or is clipped into a dimension of size 0.
        PlannerError: the index array is sparse.
    """
    size = gather.size
    assert size is not None
    refuse_sparse(raw, gather)
    if raw.numel() == 0 or raw.is_meta:
        return raw.long(), False
    if dataless(raw):  # a tracer records the check, which looks at the values when it runs
        return _in_range_later(raw, gather.array, "".join(gather.axes), size, mode), mode == "drop"
    # A uint64 has no comparisons of its own: values from 2^63 on become negative, far out of any range.
    wide = raw if raw.dtype in (torch.int64, torch.int32) else raw.long()
    if raw.dtype == torch.uint64:
        wide = torch.where(wide < 0, torch.iinfo(torch.int64).max, wide)
    if mode == "clip":
        if size == 0:
            raise clip_error(gather)
        return wide.clamp(0, size - 1), False
    if captured(wide):
        inside = (wide >= (-size if mode == "raise" else 0)) & (wide < size)
        if mode == "raise":
            torch._assert_async(inside.all(), f"index array {gather.array!r} has values outside of [-{size}, {size})")
            return torch.where(inside, torch.where(wide < 0, wide + size, wide), 0), False
        return torch.where(inside, wide, size), True
    low, high = (int(v) for v in torch.aminmax(wide))
    if mode == "raise":
        if low < -size or high >= size:
            bad = (wide < -size) if low < -size else (wide >= size)
            position = tuple(int(i) for i in bad.nonzero()[0])
            raise range_error(gather, position, int(raw[position].item()))
        return (torch.where(wide < 0, wide + size, wide) if low < 0 else wide), False
    if low < 0 or high >= size:
        return torch.where((wide >= 0) & (wide < size), wide, size), True
    return wide, False


@torch.library.custom_op("planner::in_range", mutates_args=())
def _in_range_later(raw: Tensor, array: str, axes: str, size: int, mode: str) -> Tensor:
    normal, _ = in_range(raw, Gather(array, tuple(axes), size), mode)
    return normal.long().clone(memory_format=torch.contiguous_format)


@_in_range_later.register_fake
def _(raw: Tensor, array: str, axes: str, size: int, mode: str) -> Tensor:
    return torch.empty(raw.shape, dtype=torch.int64, device=raw.device)


def part_in_range(part: Tensor, whole: Tensor, gather: Gather, mode: str) -> Tensor:
    """Bring a part of an index array into range. An error names the position in the whole array."""
    try:
        return in_range(part, gather, mode)[0]
    except IndexRangeError:
        in_range(whole, gather, mode)
        raise
