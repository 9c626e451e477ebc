"""How Triton kernels are started: on the device of their arrays and the stream that is current there, and quickly.

For each launch Triton works out which compiled kernel fits the arguments, in some 20 us. Here the compiled kernel is
found by a key, and a call that is like an earlier one in all but its arrays replays that call's launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# Compiled kernels, by all that Triton may choose them by and more; None where Triton must start them itself.
_COMPILED: dict[Hashable, Any] = {}
# The launches of a call, by what equal calls share; None if they cannot be replayed.
_REPLAYS: dict[Hashable, list[_Replay] | None] = {}
_MOST = 4096
_local = threading.local()  # holds the launches that `replayed` records


def device_of(x: Tensor) -> int:
    """Return the number of a tensor's device; -1 for a CPU, where Triton's interpreter runs."""
    return x.get_device()


def place_of(x: Tensor) -> tuple[int, int]:
    """Return the device of a tensor and the stream that is current there; zeros for a CPU."""
    device = device_of(x)
    return (0, 0) if device < 0 else (device, driver.active.get_current_stream(device))


def launch(kernel: Any, programs: int, arguments: Sequence[Any], **constants: Any) -> None:
    """Start a kernel.

    Args:
        kernel: a function of `triton.jit`.
        programs: the number of programs.
        arguments: its arguments but for constants, in order. The first one is a tensor on the device to start it on.
        constants: its constants, and options such as `num_warps`, by name.

    Raises:
        ValueError: a device does not take that many programs.
    """
    if programs >= 2**31:
        raise ValueError(f"the product needs {programs} programs, of which a device takes {2**31 - 1}")
    recorded = getattr(_local, "recorded", None)
    if not isinstance(kernel, JITFunction):  # the interpreter
        if recorded is not None:
            recorded.append(None)
        if programs:
            kernel[(programs,)](*arguments, **constants)
    elif programs:
        if recorded is not None:
            recorded.append((kernel, programs, arguments, constants))
        facts = [(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x for x in arguments]
        device = device_of(arguments[0])
        key = id(kernel), device, *constants.items(), *facts
        _start(kernel, programs, arguments, constants, device, _COMPILED, key)


def replayed(key: Hashable, arrays: Sequence[Any], run: Callable[[], None]) -> None:
    """Start the launches that `run` starts. Later calls with an equal key start them on their arrays, without `run`.

    Args:
        key: all that the launches depend on, but for the addresses of the arrays.
        arrays: the tensors that the launches read and write, or None, in the same order in each call. The first one is
            a tensor on the device.
        run: starts the launches. If they take tensors that are not among the arrays, nothing is replayed.
    """
    replays = _REPLAYS.get(key)
    if replays is not None:
        device, aligned = device_of(arrays[0]), tuple([x is None or x.data_ptr() % 16 == 0 for x in arrays])
        for replay in replays:
            replay.start(arrays, device, aligned)
        return
    known = {id(x) for x in arrays if x is not None}
    # One tensor in two places says nothing about calls with two tensors there.
    distinct = len(known) == sum([x is not None for x in arrays])
    if key in _REPLAYS or not distinct or getattr(_local, "recorded", None) is not None:
        run()
        return
    recorded: list[Any] = []
    _local.recorded = recorded
    try:
        run()
    finally:
        _local.recorded = None
    if len(_REPLAYS) >= _MOST:
        _REPLAYS.clear()
    _REPLAYS[key] = None
    if all(one and all(id(x) in known for x in one[2] if isinstance(x, Tensor)) for one in recorded):
        _REPLAYS[key] = [_Replay(one, arrays) for one in recorded]


class _Replay:
    """A launch of an earlier call, which can be started on other arrays.

    Attributes:
        places: where tensors stand among the arguments, and which of the call's arrays they are.
        compiled: the compiled kernel, by device and by which arrays begin at multiples of 16 bytes.
    """

    __slots__ = ("arguments", "compiled", "constants", "kernel", "places", "programs")

    def __init__(self, launched: tuple[Any, ...], arrays: Sequence[Any]) -> None:
        self.kernel, self.programs, arguments, self.constants = launched
        numbers = {id(x): number for number, x in enumerate(arrays)}
        self.places = [(place, numbers[id(x)]) for place, x in enumerate(arguments) if isinstance(x, Tensor)]
        self.arguments = [None if isinstance(x, Tensor) else x for x in arguments]
        self.compiled: dict[Hashable, Any] = {}

    def start(self, arrays: Sequence[Any], device: int, aligned: Hashable) -> None:
        arguments = self.arguments.copy()
        for place, number in self.places:
            arguments[place] = arrays[number]
        _start(self.kernel, self.programs, arguments, self.constants, device, self.compiled, (device, aligned))


def _start(
    kernel: Any,
    programs: int,
    arguments: Sequence[Any],
    constants: dict[str, Any],
    device: int,
    forms: dict[Hashable, Any],
    key: Hashable,
) -> None:
    """Start a kernel. Its compiled form is kept in `forms` under a key."""
    active, form = driver.active, forms.get(key)
    current = active.get_current_device()
    if device < 0:  # tensors of a CPU stand for those of a card
        device = current
    if device != current:
        active.set_current_device(device)
    try:
        if form is None or _hooked() or kernel.pre_run_hooks:
            compiled = kernel[(programs,)](*arguments, **constants)
            if len(forms) >= _MOST:
                forms.clear()
            forms[key] = _form_of(kernel, len(arguments), constants, compiled)
            return
        run, function, metadata, values = form
        stream = active.get_current_stream(device)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *values)
    finally:
        if device != current:
            active.set_current_device(current)


def _hooked() -> bool:
    """Return whether something wants to see launches as Triton describes them, as its profiler does."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any([hook is not None and getattr(hook, "calls", True) for hook in hooks])


def _form_of(kernel: Any, count: int, constants: dict[str, Any], compiled: Any) -> tuple[Any, ...] | None:
    """Return what `JITFunction.run` of Triton 3.6 to 3.9 starts a compiled kernel by; None if a version has it not."""
    try:
        values = [constants[name] for name in kernel.arg_names[count:]]
        return compiled.run, compiled.function, compiled.packed_metadata, values
    except (AttributeError, KeyError):
        return None
