"""Index arrays on a card, checked without a wait. A bad index gives NaN, and an error at a later call.

The kernel that brings an index array into range, or sorts it, writes to a flag when it meets an index out of range.
There is one flag for each device and stream. A part of it is memory of the host, which the device writes to and which
the host looks at without waiting; so a CUDA graph that is replayed raises its flag too. `raise_pending` raises the
error. Results that the index had a say in are NaN by then: kernels that take rows or walk sorted rows write NaN for a
row with a bad index, and for all sums over groups. What other steps computed is multiplied by the flag's `poison`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.indices import range_error
from planner.backends.torch.contexts.modes import in_functorch, is_symbol
from planner.backends.torch.index import TorchIndex, part_in_range, refuse_sparse, torch_in_range
from planner.backends.torch.ops import captured, is_recorded
from planner.kernels.grouping.keys import IndexArray
from planner.kernels.grouping.torch_grouping import group_rows, has_triton
from planner.language.errors import IndexRangeError
from planner.language.options import MODES
from planner.language.spec import Gather
from planner.program.calls import RangedIndices

_POSITIONS = 40  # bits of a position in a flag's word
_MOST_ASKED = 1 << 16
_NOTE = (
    "planner checks indices on a card without waiting for it, so this may be about an earlier call; after "
    "planner.synchronize(every_call=True) each call checks its own indices before it computes"
)


class CallIndices(dict[str, Any]):
    """The index arrays of a call by name. The backward pass finds in `found` what the forward pass made of them.

    That is so for arrays that are prepared or on a card. Of others, on a CPU, nothing is kept in between.
    """

    found: list[RangedIndices]


def poisoned(x: Tensor, index: RangedIndices) -> Tensor:
    """Return an array that steps computed, or NaN if they read an index out of range; in place if that is possible."""
    if index.poison is None:
        return x
    return x * index.poison[0] if 0 in x.stride() else x.mul_(index.poison[0])


class _Flag:
    """Where kernels on one stream tell of a bad index, as `planner.kernels.grouping.triton_grouping.Check` has it."""

    def __init__(self, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self.stream = torch.cuda.current_stream(device) if on_card else None

        def make() -> tuple[Tensor, ...]:
            told = torch.zeros(2, dtype=torch.int64, device="cpu")
            # Kernels that read an index array again write to the second word, which nobody looks at.
            return *(told.pin_memory() if on_card else told).split(1), self._one(device)

        self.word, self.unread, self.poison = _apart(make)
        self.captured = False  # whether a CUDA graph writes to it
        self.seen = ctypes.c_int64.from_address(self.word.data_ptr())

    def take(self) -> int:
        """Return the word, and lower the flag. Backward passes of calls before find the poison that they had."""
        with _lock, torch.cuda.stream(self.stream), torch.inference_mode(False):
            word, self.seen.value = self.seen.value, 0
            if word and self.captured:
                self.poison.fill_(1)
            elif word:
                self.poison = _apart(partial(self._one, self.poison.device))
        return word

    def _one(self, device: torch.device) -> Tensor:
        with torch.cuda.stream(self.stream):
            return torch.ones(1, dtype=torch.float32, device=device)


def _apart(make: Callable[[], Any]) -> Any:
    """Return what a function makes in a thread of its own, for memory that outlives the call.

    What a thread allocates may come from a pool, as it does where `torch.compile` runs a function before it captures
    it. Such a pool must not hold what the function does not return; and a thread of its own allocates from none. Nor is
    it in the caller's modes.
    """
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # raised below
            made.set_exception(error)

    # An executor starts no thread once the main thread has ended, though others still run.
    thread = threading.Thread(target=run)
    try:
        thread.start()
    except RuntimeError:  # Python ends, and starts no more threads
        run()
    return made.result()


class _Asked:
    """What a ticket stands for: an index array by name, dimension and shape, and the last one that was checked so."""

    def __init__(self, gather: Gather, shape: tuple[int, ...], mode: str) -> None:
        self.gather, self.shape, self.mode = gather, shape, mode
        self.array: Callable[[], Tensor | None] = lambda: None
        self.version = 0

    def error(self, position: int) -> IndexRangeError:
        """Return the error for a position in the flattened array."""
        array = self.array()
        if array is not None and _version(array) == self.version and not captured(array):
            try:
                torch_in_range(array, self.gather, self.mode)
            except IndexRangeError as error:
                return error
        place: list[int] = []
        for size in reversed(self.shape):
            position, at = divmod(position, size)
            place.insert(0, at)
        return range_error(self.gather, tuple(place), None)


_flags: dict[tuple[int, int], _Flag] = {}
_tickets: dict[Any, int] = {}
_asked: list[_Asked] = []
_every_call = False
_lock = threading.Lock()
# Flags of a process that this one was forked from. They are kept, since a child cannot free memory of a card.
_of_parents: list[dict[tuple[int, int], _Flag]] = []


def can_wait(raw: Tensor) -> bool:
    """Return whether an index array can be checked by a kernel, and an error raised later."""
    return (
        raw.is_cuda
        and not _every_call
        and raw.dtype != torch.uint64  # its greatest values would count as negative
        and type(raw) is Tensor
        and not in_functorch()
        and not is_recorded(raw)
        and has_triton()
    )


def prepare_indices(
    indices: Mapping[str, Any],
    gathers: Mapping[Gather, Gather],
    shapes: Mapping[str, tuple[int, ...]],
    mode: str,
    sizes: Mapping[str | Gather, int] | None,
    *,
    here: bool,
    shows: bool,
    keeps: bool,
) -> RangedIndices:
    """Shape the index arrays of a call as the spec has them.

    Args:
        indices: the index arrays by name.
        gathers: the gathers of the programs, and those of this call.
        shapes: the shape to give each array.
        mode: the index mode.
        sizes: see `RangedIndices.sizes`.
        here: whether to check ranges here. This is for calls in which dropped indices decide which program runs, and
            for empty contractions, in which no step reads the arrays.
        shows: whether results can hold NaN. Then arrays on a card are checked while the call goes on.
        keeps: whether the backward pass may find what was made of the arrays, which takes memory in between.
    """
    found = indices.found if isinstance(indices, CallIndices) else None
    if found and found[0].sizes is sizes and all([g in found[0] or g in found[0].given for g in gathers]):
        return found[0]  # the backward pass does not check and sort again
    prepared = RangedIndices(False)
    prepared.sizes = sizes
    later = shows and not here and MODES[mode].bad == "refuse"
    # An error names the first dimension of a size that the array indexes, whichever step reads the array first.
    named: dict[tuple[str, int | None], Gather] = {}
    for gather, own in gathers.items():
        raw, shape = indices[gather.array], shapes[gather.array]
        if not isinstance(raw, TorchIndex):
            refuse_sparse(raw, own)
            first = own if is_symbol(own.size) else named.setdefault((own.array, own.size), own)
            if later and can_wait(raw):
                prepared.given[gather] = checked_later(raw, shape, first, mode, prepared)
                continue
            keeps = False
            if not here and raw.is_contiguous():  # any other array is copied once, not by each step
                normal = partial(part_in_range, whole=raw, gather=first, mode=mode)
                shaped = raw if raw.shape == shape else raw.reshape(shape)
                prepared.given[gather] = IndexArray(shaped, normal, may_drop=False)
                continue
        values, may_drop = torch_in_range(raw, own, mode)
        prepared[gather] = values if values.shape == shape else values.reshape(shape)
        prepared.may_drop |= may_drop
        if isinstance(raw, TorchIndex) and gather.axes and values.dim() == len(gather.axes):
            prepared.orders[gather] = raw.groups
    if found is not None and keeps:
        found[:] = [prepared]
    return prepared


def checked_later(raw: Tensor, shape: tuple[int, ...], gather: Gather, mode: str, index: RangedIndices) -> IndexArray:
    """Return an index array whose range is checked by the kernel that reads it.

    If values are asked for, index 0 stands where one is out of range, and `index.poison` is set. If rows are sorted, a
    row with a bad index is dropped, and what kernels make of the sorted rows is NaN.

    Args:
        raw: the index array.
        shape: the shape to give it.
        gather: what it indexes.
        mode: the index mode, under which a bad index is refused.
        index: the index arrays of the call.
    """
    whole, was_told = raw.contiguous(), False
    call = weakref.ref(index)  # the call holds these functions: otherwise its arrays would live until a collection

    def check(values: Tensor) -> Any:
        nonlocal was_told
        flag, called = _flag_of(values), call()
        if flag is None or called is None:
            return None
        # A flag has another poison once its error was raised: what is NaN stays NaN for the rest of this call.
        if called.told is None:
            called.told = flag.poison
        word, was_told = flag.unread if was_told else flag.word, True
        return _kernels().Check(word, called.told, _ticket(raw, gather, mode))

    def normal(values: Tensor) -> Tensor:
        told, called = check(values), call()
        if told is None or called is None:
            return torch_in_range(values, gather, mode)[0]
        called.poison = called.told
        checked: Tensor = _kernels().check_values(values.contiguous(), gather.size, told)
        return checked

    def sort(size: int) -> Any:
        told = check(whole)
        if told is None:
            return group_rows(torch_in_range(whole, gather, mode)[0].reshape(-1), size, drops=False)
        return group_rows(whole.reshape(-1), size, told)

    return IndexArray(whole.reshape(shape), normal, may_drop=False, sort=sort, check=lambda: check(whole))


def raise_pending() -> None:
    """Raise the error for a bad index that a card has told of by now.

    Raises:
        IndexRangeError: an earlier call read an index array with an entry out of range.
    """
    for flag in list(_flags.values()):
        word = flag.take() if flag.seen.value and not captured(flag.poison) else 0
        if word:  # no other thread took it
            ticket, position = divmod(word - 1, 1 << _POSITIONS)
            known = ticket < len(_asked)
            error = _asked[ticket].error(position) if known else IndexRangeError("an index array was out of range")
            error.add_note(_NOTE)
            raise error


def synchronize(every_call: bool | None = None) -> None:
    """Wait for all cards that indices were checked on, and raise what they tell; see `planner.synchronize`."""
    global _every_call
    if every_call is not None:
        _every_call = bool(every_call)
    for flag in list(_flags.values()):
        if flag.poison.device.type == "cuda":
            torch.cuda.synchronize(flag.poison.device)
    raise_pending()


def _flag_of(x: Tensor) -> _Flag | None:
    """Return the flag of a tensor's device and the current stream; None if a capture needs one and there is none.

    While a graph is captured no memory is allocated. The flag of any stream on the device will do.
    """
    place = importlib.import_module("planner.kernels.grouping.triton_launch").place_of(x)
    flag = _flags.get(place)
    if captured(x):
        flag = flag or next((flag for (device, _), flag in _flags.items() if device == place[0]), None)
        if flag is not None:
            flag.captured = True
    if flag is not None or captured(x):
        return flag
    if not _flags:
        atexit.register(_at_exit)
    return _flags.setdefault(place, _Flag(x.device))


def _ticket(raw: Tensor, gather: Gather, mode: str) -> int:
    """Return the number that stands for an index array in the word of a flag."""
    key = gather, raw.shape, mode
    with _lock:
        ticket = _tickets.get(key)
        if ticket is None:
            ticket = len(_asked)
            if ticket >= _MOST_ASKED:  # so many sizes: the error names no array
                return ticket
            _asked.append(_Asked(gather, tuple(raw.shape), mode))
            _tickets[key] = ticket
        asked = _asked[ticket]
        asked.array, asked.version = weakref.ref(raw), _version(raw)
    return ticket


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _kernels() -> Any:
    return importlib.import_module("planner.kernels.grouping.triton_grouping")


def _after_fork() -> None:
    """Leave what cards tell to the process that asked."""
    _of_parents.append(dict(_flags))
    _flags.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    """Raise what is pending when Python ends, which prints it."""
    with contextlib.suppress(RuntimeError):  # the device may have failed before
        for flag in _flags.values():
            if flag.poison.device.type == "cuda":
                torch.cuda.synchronize(flag.poison.device)
    raise_pending()
