"""Index arrays in torch: checks, conversion into range, and arrays prepared for many calls with their rows sorted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.indices import IndexOps, PreparedIndex, in_range
from planner.backends.torch.contexts.modes import (
    bare_operators,
    below_transforms,
    compiles,
    fixed,
    in_functorch,
    unscripted,
    usual,
    watched,
    whole,
)
from planner.backends.torch.ops import is_recorded, not_dense, unseen
from planner.kernels.grouping import torch_grouping
from planner.language.errors import IndexRangeError, PlannerError
from planner.language.options import MODES
from planner.language.spec import Gather
from planner.program.callbacks import callbacks


class TorchIndex(PreparedIndex, torch.nn.Module):
    """A prepared index with its rows sorted by group.

    It is a module whose tensors are buffers. So as an attribute of a module it moves with the module, and is saved in
    its `state_dict`.
    """

    prepared_framework = "torch"

    def __init__(
        self,
        tensors: Iterable[Tensor],
        size: int,
        mode: str,
        may_drop: bool,
        in_order: bool = False,
        longest: int | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.size, self.mode, self.may_drop = size, mode, may_drop
        # Whether the values rise, and none is dropped: then kernels on a card walk the rows as they are.
        self.in_order = in_order
        self.longest = longest  # the most rows that have the same value
        self._buffers: dict[str, Any]
        self._buffers.update(zip(("values", "order", "offsets"), tensors, strict=True))
        self._groups: torch_grouping.Groups | None = None

    @classmethod
    def of(cls, values: Tensor, size: int, mode: str, may_drop: bool) -> TorchIndex:
        """Return the index of values in range."""
        flat = values.reshape(-1)
        groups = torch_grouping.group_rows(flat, size)
        in_order = not may_drop and bool((flat[1:] >= flat[:-1]).all())
        longest = int(groups.offsets.diff().max()) if size else 0
        return cls((values, groups.row_numbers, groups.offsets), size, mode, may_drop, in_order, longest)

    # A module would look for its buffers elsewhere first, which takes as long as a launch.
    @property
    def values(self) -> Tensor:
        """The values."""
        values: Tensor = self._buffers["values"]
        return values

    @property
    def order(self) -> Tensor:
        """The row numbers sorted by group."""
        order: Tensor = self._buffers["order"]
        return order

    @property
    def offsets(self) -> Tensor:
        """Where each group starts in `order`."""
        offsets: Tensor = self._buffers["offsets"]
        return offsets

    @property
    def groups(self) -> torch_grouping.Groups:
        """The rows sorted by group."""
        groups, offsets = self._groups, self._buffers["offsets"]
        if groups is None or groups.offsets is not offsets:  # it was moved, or other tensors were put in
            on_card, order = offsets.is_cuda, self.order
            ordered = order if on_card else order.long()  # on a card row numbers are of int32, if it sorted them
            self._groups = groups = torch_grouping.Groups(
                None if self.in_order and on_card else ordered,
                offsets,
                self.size,
                len(order),
                self.may_drop,
                longest=self.longest,
            )
        return groups

    @property
    def shape(self) -> torch.Size:
        """Shape of the index array."""
        return self.values.shape

    def reshape(self, shape: Sequence[int]) -> TorchIndex:
        """Return the same rows in another shape."""
        if tuple(shape) == tuple(self.shape):
            return self
        return self._with([self.values.reshape(tuple(shape)), self.order, self.offsets])

    def _with(self, tensors: Iterable[Tensor]) -> TorchIndex:
        """Return the same index with other tensors that hold the same numbers."""
        return TorchIndex(tensors, self.size, self.mode, self.may_drop, self.in_order, self.longest)

    def parts(self) -> tuple[list[Tensor], tuple[str, ...]]:
        """Return its tensors, and the facts that a graph holds. These are text: Dynamo turns numbers into symbols.

        Other facts differ from one index to the next, and a graph would be compiled for each.
        """
        return [self.values, self.order, self.offsets], (str(self.size), self.mode, str(self.may_drop))

    @classmethod
    def join(cls, tensors: Iterable[Tensor], facts: Iterable[str]) -> TorchIndex:
        """Return the index of some tensors and facts, as `parts` returns them."""
        size, mode, may_drop = facts
        return cls(tensors, int(size), mode, may_drop == "True")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Read the tensors. What is not known of them is forgotten: `set_extra_state` comes after this, if at all."""
        self.in_order, self.longest, self._groups = False, None, None
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what is saved beside the tensors."""
        names = "size", "mode", "may_drop", "in_order", "longest"
        return {name: getattr(self, name) for name in names}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what was saved beside the tensors, which have been written before."""
        self.size, self.mode, self.may_drop = state["size"], state["mode"], state["may_drop"]
        self.in_order, self.longest = state.get("in_order", False), state.get("longest")
        self._groups = None

    def extra_repr(self) -> str:
        """Return what is shown of it."""
        return f"{tuple(self.shape)}, size={self.size}, index_mode={self.mode!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        return callbacks().group, (self.values, self.size, self.mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchIndex:
        return self._with([copy.deepcopy(x, memo) for x in (self.values, self.order, self.offsets)])


def refuse_sparse(raw: Tensor, gather: Gather) -> None:
    """Refuse an index array that is not laid out with strides."""
    if raw.layout != torch.strided:
        raise PlannerError(f"index array {gather.array!r} {not_dense(raw)}")


def _signed(raw: Tensor, size: int) -> Tensor:
    if raw.dtype in (torch.int64, torch.int32):
        return raw if raw.is_contiguous() else raw.clone(memory_format=torch.contiguous_format)
    values = raw.to(torch.int64, memory_format=torch.contiguous_format)
    # A uint64 has no comparisons of its own: values from 2^63 on become negative.
    return values.masked_fill_(values < 0, torch.iinfo(torch.int64).max) if raw.dtype == torch.uint64 else values


def _in_place(owned: bool) -> bool:
    return owned and not (in_functorch() or watched())  # transforms may have no rule for it, modes may have saved it


def _bounds(values: Tensor) -> tuple[Any, Any]:
    """Return the least and the greatest entry. Each look waits for a card, so there both are looked at together."""
    low, high = torch.aminmax(values)
    if not values.is_cuda or in_functorch():
        return low, high
    low, high = torch.stack((low, high)).tolist()
    return low, high


_TORCH = IndexOps(
    signed=_signed,
    bounds=lambda values: None if unseen(values) else _bounds(values),
    first=lambda mask: tuple(mask.nonzero()[0].tolist()),
    # An index array may be as large as the operands: no second copy of it is made.
    wrap=lambda values, size, owned: (values.remainder_ if _in_place(owned) else values.remainder)(max(size, 1)),
    fill=lambda values, mask, number, owned: (values.masked_fill_ if _in_place(owned) else values.masked_fill)(
        mask, number
    ),
    clip=lambda values, low, high, owned: (values.clamp_ if _in_place(owned) else values.clamp)(low, high),
)


def torch_in_range(raw: Tensor | TorchIndex, gather: Gather, mode: str) -> tuple[Tensor, bool]:
    """Bring an index array into range; see `in_range`.

    While a CUDA graph is captured, values cannot be looked at. Then `size` may occur under "drop", and under "raise"
    the device refuses a bad index when the graph runs.

    Raises:
        IndexRangeError: an index is out of range under "raise", or is clipped into a dimension of size 0.
        PlannerError: the index array is sparse, or was prepared for another size or mode.
    """
    if isinstance(raw, TorchIndex):
        return raw.read(gather, mode)
    rule, size = MODES[mode], gather.size
    assert size is not None
    if _is_inside(raw, size):
        return raw, False
    refuse_sparse(raw, gather)
    if raw.is_meta:
        return raw.long(), False
    if is_recorded(raw):  # a tracer records the check, which looks at the values when it runs
        if rule.bad == "refuse" and rule.wraps and _fuses(raw):
            return _refused_if_outside(raw, gather.array, "".join(gather.axes), fixed(size)), False
        return _in_range_later(raw, gather.array, "".join(gather.axes), fixed(size), mode), rule.bad == "drop"
    if raw.numel() == 0:
        return raw.long(), False
    if rule.bad == "refuse" and unseen(raw) and (batch := whole(raw)) is not raw:
        with below_transforms():
            torch_in_range(batch, gather, mode)
        rule = MODES["checked"]
    values, may_drop = in_range(_TORCH, raw, gather, rule)
    if may_drop and rule.bad == "refuse":
        inside = values < size
        torch._assert_async(inside.all(), f"index array {gather.array!r} has values outside of [-{size}, {size})")
        return torch.where(inside, values, 0), False
    return values, may_drop


def _is_inside(raw: Tensor, size: int) -> bool:
    """Return whether a plain array is in range as it is, in a third of the time that the rule for all arrays takes."""
    if not (usual(raw) and raw.dtype is torch.int64 and raw.is_cpu and raw.is_contiguous() and raw.numel()):
        return False
    low, high = torch.aminmax(raw)
    return int(low) >= 0 and int(high) < size


def counted_from_start(values: Tensor, size: int, owned: bool) -> Tensor | None:
    """Return indices in place of negative ones, which count from the end; None if an index is out of range.

    One array is allocated at most: plans count no more. If they are `owned`, they are changed.
    """
    low, high = torch.aminmax(values)
    if low < -size or high >= size:
        return None
    return (values.remainder_ if owned else values.remainder)(size)


def _in_range_now(raw: Tensor, array: str, axes: str, size: int, mode: str) -> Tensor:
    if _is_inside(raw, size):
        return raw.clone()
    with unscripted():
        normal, _ = torch_in_range(raw, Gather(array, tuple(axes), size), mode)
    return normal.clone(memory_format=torch.contiguous_format) if normal.dtype == torch.int64 else normal.long()


def _in_range_rule(raw: Tensor, array: str, axes: str, size: int, mode: str) -> Tensor:
    return torch.empty(raw.shape, dtype=torch.int64, device=raw.device)


def _fuses(raw: Tensor) -> bool:
    """Return whether a compiler fuses a look at an index array with the steps around it."""
    compiled = compiles() and not (bare_operators() or in_functorch())
    return compiled and raw.is_cpu and raw.dtype in (torch.int64, torch.int32)


def _refused_if_outside(raw: Tensor, array: str, axes: str, size: int) -> Tensor:
    """Return the entries in range, by operators that a compiler fuses. One in Python refuses what they find outside.

    That takes half of the time of looking in Python.
    """
    values = raw.long()  # a size need not fit the dtype of the index array
    outside = ((values < -size) | (values >= size)).any()
    torch.ops.planner.refuse.default(outside, raw, array, axes, size)
    # Nothing is added, but a compiler may not read rows before the look.
    return torch.where(values < 0, values + size, values) + outside


def _refuse(outside: Tensor, raw: Tensor, array: str, axes: str, size: int) -> None:
    if outside:
        torch_in_range(raw, Gather(array, tuple(axes), size), "raise")


# `torch.library.custom_op` would wrap these functions in ways that take longer than a small check.
_library = torch.library.Library("planner", "FRAGMENT")
_library.define(
    "in_range(Tensor raw, str array, str axes, SymInt size, str mode) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("in_range", _in_range_now, "CompositeExplicitAutograd")
torch.library.register_fake("planner::in_range", _in_range_rule, lib=_library)
# It is said to write to the flag, for otherwise a compiler would drop it.
_library.define(
    "refuse(Tensor(a!) outside, Tensor raw, str array, str axes, SymInt size) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("refuse", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("planner::refuse", lambda outside, raw, array, axes, size: None, lib=_library)
_in_range_later: Callable[[Tensor, str, str, int, str], Tensor] = torch.ops.planner.in_range.default


def part_in_range(part: Tensor, whole: Tensor, gather: Gather, mode: str) -> Tensor:
    """Bring a part of an index array into range. An error names the position in the whole array."""
    try:
        return torch_in_range(part, gather, mode)[0]
    except IndexRangeError:
        torch_in_range(whole, gather, mode)
        raise
