"""Rows sorted by group in torch, and how a CPU kernel cuts them into pieces that it can process at once."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planner.language import dtypes
from planner.language.cached import cached_property

_WIDER = {getattr(torch, name): getattr(torch, dtypes.accumulator(name)) for name in dtypes.HALF_TYPES}


@dataclass(frozen=True, eq=False)
class Groups:
    """The rows of an index, sorted by group.

    On a card, kernels walk the rows by `order` if it is given, and else as they are: an index that `planner.group`
    found sorted, without a dropped row, has the order None. Functions for a CPU read `row_numbers`. A table of tasks is
    made when it is first asked for, and kept: the backward pass and later calls with a prepared index launch no kernel
    for it.

    Attributes:
        order: Row numbers `(rows,)`, int64 on a CPU, int32 or int64 on a card, group after group; dropped rows come
            last. None if that is the order of the rows themselves.
        offsets: Where each group starts in `order`, `(size + 1,)`; the last entry counts the kept rows.
        size: The number of groups.
        rows: The number of rows, dropped ones included.
        drops: Whether a row may be dropped.
        poisons: Whether a dropped row had an index that should be refused: its results must be NaN, and sums over the
            rows of groups.
        longest: The most rows that a group has; None if the host does not know.
    """

    order: Tensor | None
    offsets: Tensor
    size: int
    rows: int
    drops: bool = True
    poisons: bool = False
    longest: int | None = None
    _made: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def row_numbers(self) -> Tensor:
        """The row numbers in the order of their groups, also where `order` is None."""
        return torch.arange(self.rows, device=self.offsets.device) if self.order is None else self.order

    @cached_property
    def ends(self) -> np.ndarray:
        """`offsets` on the host, int64. The first look waits for the device; later ones do not."""
        return self.offsets.cpu().numpy().astype(np.int64)

    def tasks(self, inner: int, step: int, drops: bool, empty: bool) -> Any:
        """Return the groups cut into tasks for a kernel, see `planner.kernels.grouping.triton_grouping.cut_tasks`."""

        def cut() -> Any:
            tasks = _triton().cut_tasks(self.offsets, self.rows, self.size, inner, step, drops, empty)
            is_whole = self.longest is not None and self.longest * inner <= step
            return tasks._replace(slots=0) if is_whole else tasks

        return self._kept((inner, step, drops, empty), cut)

    def split(self, inner: int) -> Groups:
        """Return the sorted order of parts of the rows: each row is `inner` parts, which follow one another.

        A prepared index keeps it. Otherwise it would stay until the backward pass.
        """

        def make() -> Groups:
            order, longest = self.order, self.longest
            if order is not None:
                order = (order.long().unsqueeze(1) * inner + torch.arange(inner, device=order.device)).reshape(-1)
            return replace(
                self,
                order=order,
                offsets=self.offsets.long() * inner,
                rows=self.rows * inner,
                longest=None if longest is None else longest * inner,
                _made={},
            )

        return self if inner == 1 else self.kept((inner,), make)

    def kept(self, about: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what many calls read beside the order, such as a table of positions: a prepared index keeps it.

        Args:
            about: all that it depends on, but for these groups.
            make: makes it.
        """
        return make() if self.longest is None else self._kept(about, make)

    def _kept(self, about: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what was made for the current stream before, or make it."""
        # Another stream would not wait for it. A graph that is captured makes its own each time it is replayed.
        key = *about, _launches().place_of(self.offsets)
        made = self._made.get(key)
        if made is None:
            made = make()
            if not (self.offsets.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._made[key] = made
        return made


def group_rows(index: Tensor, size: int, check: Any = None, drops: bool = True) -> Groups:
    """Sort the rows by the group that `index` gives them; the sort is stable and does not wait for a device.

    >>> groups = group_rows(torch.tensor([1, 0, 2, 1]), 2)
    >>> groups.order.tolist(), groups.offsets.tolist()
    ([1, 0, 3, 2], [0, 1, 3])

    Args:
        index: Group of each row, `(N,)`, any integer dtype, values in `[0, size]`; `size` drops the row. The caller
            must check the range: narrowed keys wrap around and would hide bad values.
        size: The number of groups.
        check: On a card, where values that are out of range are told; then the caller need not check them. It is a
            `planner.kernels.grouping.triton_grouping.Check`.
        drops: Whether `size` may occur.
    """
    if index.is_cuda and has_triton():
        order, offsets = _triton().sort_rows(index.contiguous(), size, check)
        return Groups(order, offsets, size, len(index), drops or check is not None, check is not None)
    # A stable sort of int16 keys is a radix sort of two passes: 1.0 ms for 131,072 rows, int64 several times that.
    keys = index.to(_key_dtype(size))
    if keys.is_cpu:
        order = torch.sort(keys, stable=True).indices
        counts = torch.bincount(index, minlength=size + 1)  # On a GPU bincount would wait for the device.
        offsets = torch.nn.functional.pad(counts[:size].cumsum(0), (1, 0))
    else:
        ordered, order = torch.sort(keys, stable=True)
        offsets = torch.searchsorted(ordered, torch.arange(size + 1, dtype=keys.dtype, device=keys.device))
    return Groups(order, offsets, size, len(index), drops)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=1)
def _triton() -> Any:
    return importlib.import_module("planner.kernels.grouping.triton_grouping")


@lru_cache(maxsize=1)
def _launches() -> Any:
    return importlib.import_module("planner.kernels.grouping.triton_launch")


def group_bytes(n: int, size: int, index_itemsize: int = 8) -> int:
    """Return the bytes that `group_rows` allocates on a CPU at its peak; `8 * (n + size + 1)` of them are kept."""
    key = _key_dtype(size).itemsize
    # The sort holds its keys, the sorted keys and two int64 orders. `bincount` converts other integers to int64.
    return ((0 if key == index_itemsize else key) + key + 16) * n + 3 * 8 * (size + 1) + 1024


def _key_dtype(size: int) -> torch.dtype:
    return torch.int16 if size < 2**15 else torch.int32 if size < 2**31 else torch.int64


@dataclass(frozen=True, slots=True)
class Piece:
    """Some groups as one rectangle of rows: each group is padded to the same number of rows.

    Attributes:
        groups: The groups: a range, or their numbers.
        count: Number of groups.
        pad: Rows of each padded group; 0 if the groups have no rows.
        padded: Row numbers `(count * pad,)`; the padding of a group names some other row.
        kept: Positions in `padded` that are not padding, in sorted order; None if there is no padding.
        rows: The row numbers at `kept`.
        first: Whether no earlier piece had rows of these groups. Only a single group is cut into several pieces, and
            these follow one another.
    """

    groups: slice | Tensor
    count: int
    pad: int
    padded: Tensor
    kept: Tensor | None
    rows: Tensor
    first: bool = True

    def blank(self) -> Tensor | None:
        """Return the positions in `padded` that are padding; None if there is no padding."""
        if self.kept is None:
            return None
        is_padding = torch.ones(len(self.padded), dtype=torch.bool, device="cpu").index_fill_(0, self.kept, False)
        return is_padding.nonzero().view(-1)


@dataclass(frozen=True, slots=True)
class Cutting:
    """Limits and prices that decide how sorted rows are cut into pieces.

    Attributes:
        rows: Most rows of a piece.
        matrices: Most groups of a piece that is a range of groups.
        picked: Most groups of a piece that names its groups one by one.
        row_seconds: Seconds that a row of padding costs.
        pick_seconds: Seconds that naming a group costs, because its matrix is copied.
        piece_seconds: Seconds that one more piece costs.
    """

    rows: int
    matrices: int
    picked: int
    row_seconds: float
    pick_seconds: float
    piece_seconds: float


def pieces(groups: Groups, cutting: Cutting) -> Iterator[Piece]:
    """Cut sorted rows into pieces, at low cost for any distribution of group sizes.

    Every group is in one piece, or alone in several. Groups of usual size form ranges, and each range has the height
    that is cheapest for it:

        range 0   ████████░░   group 0        names 900, 4, 61 (sorted by size)   ██████████████████
                  ██████████   group 1                                            █████████████████░
                  ░░░░░░░░░░   group 2: too long, is in another piece             █████████████████░

    Longer groups are sorted by size, and pieces of them name groups of nearly the same size; the longest are alone. If
    most groups are empty, all other groups are named in that way.
    """
    sizes = np.diff(groups.ends)
    starts = groups.ends[:-1]
    alone = np.ones(groups.size, bool)  # the groups that no range holds
    filled = int(np.count_nonzero(sizes))
    if 2 * filled > groups.size:
        usual = float(np.median(sizes))
        width = int(max(1, min(cutting.matrices, groups.size, cutting.rows / max(1.0, 1.2 * usual))))
        if width > 1:
            grid = np.zeros((-(-groups.size // width), width), np.int64)
            grid.reshape(-1)[: groups.size] = sizes
            pads = _cheapest_heights(grid, cutting)
            alone = (sizes > pads.repeat(width)[: groups.size]) | (pads.repeat(width)[: groups.size] == 0)
            inside = np.where(alone, 0, sizes)
            for block in np.flatnonzero(pads).tolist():
                span = slice(block * width, min((block + 1) * width, groups.size))
                yield _rectangle(groups, span, starts[span], inside[span], int(pads[block]), not alone[span].any())
    names = np.flatnonzero(alone)
    names = names[np.argsort(-sizes[names], kind="stable")]
    lengths = sizes[names]
    position, stop = 0, int(np.count_nonzero(lengths))
    while position < stop:
        height = int(lengths[position])
        width = max(1, min(cutting.picked, cutting.rows // height, stop - position))
        waste = (height - lengths[position : position + width]).cumsum()
        width = int(np.searchsorted(waste * cutting.row_seconds, cutting.piece_seconds, side="right"))
        if width > 1:
            chosen, real = names[position : position + width], lengths[position : position + width]
            yield _rectangle(groups, torch.from_numpy(chosen), starts[chosen], real, height, False)
        else:
            yield from _split_group(groups, int(names[position]), cutting.rows)
        position += width
    if stop < len(names):
        nothing = groups.row_numbers[:0]
        empty = torch.from_numpy(names[stop:])
        yield Piece(empty, len(empty), 0, nothing, None, nothing)


def _rectangle(
    groups: Groups, span: slice | Tensor, starts: np.ndarray, sizes: np.ndarray, pad: int, together: bool
) -> Piece:
    """Return a piece of groups that start at `starts` in the order and have these sizes.

    `together` says that their rows are one contiguous part of the order.
    """
    order, count, real = groups.row_numbers, len(sizes), int(sizes.sum())
    positions = (starts[:, None] + np.arange(pad)).reshape(-1)
    if starts[-1] + pad > len(order) or not together:
        np.minimum(positions, len(order) - 1, out=positions)
    padded = order.index_select(0, torch.from_numpy(positions))
    if real == len(padded):
        return Piece(span, count, pad, padded, None, padded)
    # The r-th row is shifted by the padding of the groups before its own.
    shifts = np.arange(count) * pad - (sizes.cumsum() - sizes)
    kept = torch.from_numpy(shifts.repeat(sizes) + np.arange(real))
    rows = order[int(starts[0]) : int(starts[0]) + real] if together else padded.index_select(0, kept)
    return Piece(span, count, pad, padded, kept, rows)


def _split_group(groups: Groups, name: int, capacity: int) -> Iterator[Piece]:
    """Cut a single group into equal pieces of at most `capacity` rows."""
    start, stop = int(groups.ends[name]), int(groups.ends[name + 1])
    parts = -(-(stop - start) // capacity)
    cuts = [start + (stop - start) * part // parts for part in range(parts + 1)]
    for low, high in zip(cuts, cuts[1:], strict=False):
        rows = groups.row_numbers[low:high]
        yield Piece(slice(name, name + 1), 1, high - low, rows, None, rows, low == start)


def _cheapest_heights(grid: np.ndarray, cutting: Cutting) -> np.ndarray:
    """Return the cheapest height of each range, given the sizes of its groups `(ranges, width)`."""
    blocks, width = grid.shape
    heights = np.concatenate([np.zeros((blocks, 1), np.int64), np.sort(grid, axis=1)], axis=1)
    longer = width - np.arange(width + 1)
    elsewhere = heights.sum(axis=1, keepdims=True) - heights.cumsum(axis=1)
    rows = heights * width + elsewhere
    cost = rows * cutting.row_seconds + longer * cutting.pick_seconds + (heights > 0) * cutting.piece_seconds
    cost[heights * width > cutting.rows] = np.inf
    return np.asarray(np.take_along_axis(heights, cost.argmin(axis=1)[:, None], axis=1)[:, 0])


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of `dtype` are summed: float32 for float16 and bfloat16."""
    return _WIDER.get(dtype, dtype)
