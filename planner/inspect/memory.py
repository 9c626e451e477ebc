"""Measures what a call really allocates, independently of the planner's predictions.

Importing this module imports no framework. Each function imports the framework that it measures.

Example:
    >>> import numpy as np
    >>> result, measured = numpy_memory(lambda: np.ones(10_000).sum())
    >>> 80_000 <= measured.peak_bytes < 90_000, measured.retained_bytes
    (True, 0)
"""

from __future__ import annotations

import gc
import math
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that a call allocated.

    Attributes:
        peak_bytes: most bytes newly allocated at any moment, the result included.
        retained_bytes: bytes still allocated while only the result is held, without the result's own bytes.
    """

    peak_bytes: int
    retained_bytes: int


@dataclass(frozen=True, slots=True)
class Counted:
    """What a framework says about a call. A figure is None if unknown.

    Attributes:
        flops: FLOPs.
        bytes_moved: bytes read and written.
        peak_bytes: bytes of the temporaries and results of a compiled function.
    """

    flops: int | None
    bytes_moved: int | None
    peak_bytes: int | None = None


# --- torch --------------------------------------------------------------------------------------


def torch_memory(call: Callable[[], T]) -> tuple[T, Measured]:
    """Run a torch CPU call and count each of its allocations, internal temporaries too.

    The function counts every allocation of torch's CPU allocator in the calling thread, with the bytes that were asked
    for, not rounded up to the alignment of 64. A storage counts as a whole. It does not see what other Python threads
    allocate, nor the scratch that a library such as MKL takes from the C heap. Cyclic garbage is collected only after
    the call, so the peak does not depend on when Python happens to collect.

    Args:
        call: takes no arguments. The arrays that it uses must exist before, so that they are not counted.

    Returns:
        The call's result and the measurement. Run the call once before, or its caches count as retained.
    """
    result, peak, live = torch_allocations(call, {})
    in_result = torch_storages(result)
    return result, Measured(peak, sum(n for pointer, n in live.items() if pointer not in in_result))


def torch_backward_memory(
    call: Callable[[], Any], operands: Sequence[Any], gout: Any = None
) -> tuple[tuple[Any, ...], Measured]:
    """Run a torch CPU call, then its backward pass, and count what is alive during the backward pass.

    Args:
        call: takes no arguments and returns one tensor.
        operands: the tensors to differentiate. They require gradients.
        gout: the output's gradient, which is not counted; ones if None.

    Returns:
        The gradients and the measurement of the backward pass. The peak counts the bytes that the forward pass retained
        until they are freed, all new allocations, and the gradients, but not the result's own storage. The retained
        bytes are those alive in the end, without gradients and result. Gradients that repeat elements count in full,
        as `.grad` holds them. Others that are views of the output's gradient are in memory that the caller has.
    """
    import torch

    result, _, live = torch_allocations(call, {})
    not_counted = torch_storages(result)
    gout = torch.ones_like(result) if gout is None else gout
    before = {pointer: n for pointer, n in live.items() if pointer not in not_counted}
    gradients, peak, live = torch_allocations(lambda: torch.autograd.grad(result, operands, gout), before)
    not_counted |= torch_storages(gradients)
    retained = sum(n for pointer, n in live.items() if pointer not in not_counted)
    theirs = torch_storages(gout).keys()
    new = [x.nbytes for x in gradients if _repeats(x) or not torch_storages(x).keys() & theirs]
    return gradients, Measured(max(peak, retained + sum(new)), retained)


def _repeats(x: Any) -> bool:
    """Whether several elements of a tensor stand at one place in memory, as `expand` makes them."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def torch_allocations(call: Callable[[], T], live: Mapping[int, int]) -> tuple[T, int, dict[int, int]]:
    """Run a torch CPU call. Return its result, the peak, and the size of each allocation alive in the end.

    `live` holds allocations of an earlier run, which count too. The profiler reports the freeing of other allocations
    only by accident, so that is ignored.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints when it starts and stops
    import torch
    from torch.autograd.profiler import profile

    with _collecting_afterwards(), profile(use_kineto=True, profile_memory=True) as profiler:
        result = call()
        gc.collect(0)  # all that was created since collecting stopped is in the youngest generation
    recorded = profiler.kineto_results
    assert recorded is not None
    events = sorted(_allocations(recorded.experimental_event_tree()), key=lambda e: e.start_time_ns)

    alive = dict(live)
    total = peak = sum(alive.values())
    for event in (e.extra_fields for e in events):
        if event.device != torch.device("cpu"):
            continue
        if event.alloc_size > 0:
            alive[event.ptr] = event.alloc_size
            total += event.alloc_size
            peak = max(peak, total)
        else:
            total -= alive.pop(event.ptr, 0)
    return result, peak, alive


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        if event.name == "[memory]":
            yield event
        waiting.extend(event.children)


@contextmanager
def _collecting_afterwards() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def torch_storages(tree: Any) -> dict[int, int]:
    """Return the addresses and bytes of the storages of all tensors in a tree of containers."""
    import torch
    from torch.utils import _pytree

    storages = [leaf.untyped_storage() for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {s.data_ptr(): s.nbytes() for s in storages}


def torch_cuda_peak(call: Callable[[], T], device: Any) -> tuple[T, int]:
    """Run a torch CUDA call. Return its result and the most bytes that the allocator held at any moment.

    The count covers everything on the device, not only the call. The allocator's own record of its peak is reset.
    """
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device)


def torch_cuda_memory(call: Callable[[], T], device: Any) -> tuple[T, Measured]:
    """Do as `torch_memory`, for a CUDA call, by the allocator's statistics. It rounds each size up to 512 bytes."""
    import torch

    with _collecting_afterwards():
        before = torch.cuda.memory_allocated(device)
        result, peak = torch_cuda_peak(call, device)
        gc.collect(0)
        result_bytes = _result_bytes(result)
        return result, Measured(peak - before, torch.cuda.memory_allocated(device) - before - result_bytes)


def torch_cuda_backward_memory(
    call: Callable[[], Any], operands: Sequence[Any], device: Any
) -> tuple[tuple[Any, ...], Measured]:
    """Do as `torch_backward_memory`, for a CUDA call and a gradient of ones, by the allocator's statistics."""
    import torch

    with _collecting_afterwards():
        before = torch.cuda.memory_allocated(device)
        result = call()
        gout = torch.ones_like(result)
        before += _result_bytes((result, gout))
        gradients, peak = torch_cuda_peak(lambda: torch.autograd.grad(result, operands, gout), device)
        gc.collect(0)
        gradient_bytes = _result_bytes(gradients)
        return gradients, Measured(peak - before, torch.cuda.memory_allocated(device) - before - gradient_bytes)


def _result_bytes(tree: Any) -> int:
    """Return the bytes of the storages of all tensors in a tree, rounded up as the CUDA allocator does."""
    return sum(-(-size // 512) * 512 for size in torch_storages(tree).values())


def torch_counts(call: Callable[[], Any]) -> Counted:
    """Run a torch call and count its operators: the FLOPs of matrix products, and the bytes that each reads and writes.

    Only matrix products count FLOPs; without any, FLOPs are None. A view moves nothing. A take reads as many bytes as
    it writes. The count does not see what torch reads again because it does not fit a cache.
    """
    import torch
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    in_place = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
    allocations = (torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.new_empty)
    flops = moved = 0

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal flops, moved
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            plain = {name: value for name, value in kwargs.items() if name != "out"}
            packet = in_place.get(func._overloadpacket, func._overloadpacket)
            if packet in flop_registry:
                flops += int(flop_registry[packet](*args, **plain, out_val=result))
            inputs = [x for x in _pytree.tree_leaves((args, plain)) if isinstance(x, torch.Tensor)]
            outputs = [x for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            storages = {x.untyped_storage().data_ptr() for x in inputs}
            shares = any(x.untyped_storage().data_ptr() in storages for x in outputs)
            is_view = shares and not func._schema.is_mutable
            if not is_view and packet not in allocations:
                if packet in (torch.ops.aten.index_select, torch.ops.aten.gather, torch.ops.aten.index):
                    inputs = [*inputs[1:], *outputs]
                moved += sum(_bytes(x) for x in (*inputs, *outputs))
            return result

    with Counter():  # type: ignore[no-untyped-call]
        call()
    return Counted(flops or None, moved)


def _bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements, each element counted once."""
    distinct = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(distinct) * int(tensor.element_size()) if tensor.numel() else 0


# --- jax ----------------------------------------------------------------------------------------


def jax_retained(call: Callable[..., Any], *operands: Any, held: Any = ()) -> int:
    """Count the bytes of the buffers that the backward pass of a jax call holds, outside of jit.

    Each buffer among the leaves of ``jax.vjp(call, *operands)[1]`` counts once. Those of the operands, of `held` and of
    the result do not count.

    Args:
        call: a function that is differentiable in all operands.
        operands: pytrees of arrays.
        held: more arrays that do not count, such as index arrays that `call` closes over.
    """
    import jax

    result, pullback = jax.vjp(call, *operands)
    jax.block_until_ready(result)  # type: ignore[no-untyped-call]
    not_counted = jax_buffers((operands, held, result))
    return sum(n for pointer, n in jax_buffers(pullback).items() if pointer not in not_counted)


def jax_buffers(tree: Any) -> dict[int, int]:
    """Return the addresses and bytes of the buffers of all arrays in a pytree."""
    import jax

    return {_buffer(x): int(x.nbytes) for x in jax.tree.leaves(tree) if _has_buffer(x)}


def jax_temp_bytes(call: Callable[..., Any], *operands: Any) -> int:
    """Compile a call and return the bytes of temporaries that XLA reports, without arguments and results."""
    import jax

    analysis = jax.jit(call).lower(*operands).compile().memory_analysis()
    assert analysis is not None, "this platform does not say what it allocates"
    return int(analysis.temp_size_in_bytes)


def jax_compiled(call: Callable[..., Any], *operands: Any) -> tuple[Callable[..., Any], Counted]:
    """Compile a call for operands. Return the compiled function and what XLA says about it.

    A figure is None if the platform does not report it. XLA counts the body of a loop once.
    """
    import jax

    function: Any = call if hasattr(call, "lower") else jax.jit(call)
    compiled = function.lower(*operands).compile()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    peak = None if memory is None else int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
    cost = cost[0] if isinstance(cost, (list, tuple)) and cost else cost or {}
    flops, moved = (int(cost[key]) if cost.get(key, -1) >= 0 else None for key in ("flops", "bytes accessed"))
    return compiled, Counted(flops, moved, peak)


def _has_buffer(x: Any) -> bool:
    import jax

    return isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))


def _buffer(x: Any) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.unsafe_buffer_pointer())


# --- numpy --------------------------------------------------------------------------------------


def numpy_memory(call: Callable[[], T]) -> tuple[T, Measured]:
    """Run a numpy call and measure it with tracemalloc.

    The peak counts Python's own objects too (some KB), so it is an upper bound. The retained bytes are exact and count
    array data only. The call clears the traces that tracemalloc already has.
    """
    domain = np.lib.tracemalloc_domain
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        with _collecting_afterwards():
            tracemalloc.clear_traces()  # arrays from before the call then have no trace
            tracemalloc.reset_peak()
            start, _ = tracemalloc.get_traced_memory()
            result = call()
            _, peak = tracemalloc.get_traced_memory()
            gc.collect(0)
            retained = _traced_arrays(domain) - _owned_bytes(result)
    finally:
        if not tracing:
            tracemalloc.stop()
    return result, Measured(peak - start, retained)


def _traced_arrays(domain: int) -> int:
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, domain)])
    return sum(trace.size for trace in snapshot.traces)


def numpy_owned(arrays: Iterable[Any]) -> dict[int, int]:
    """Return the identities and bytes of the arrays that own the memory of some arrays."""
    owners = map(_owner, arrays)
    return {id(owner): int(owner.nbytes) for owner in owners}


def _owner(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _owned_bytes(result: Any) -> int:
    arrays = result if isinstance(result, (list, tuple)) else [result]
    owners = {id(owner): owner for owner in (_owner(x) for x in arrays if isinstance(x, np.ndarray))}
    traced = (x for x in owners.values() if x.base is None and tracemalloc.get_object_traceback(x) is not None)
    return sum(max(x.nbytes, 1) for x in traced)  # numpy allocates a byte for no elements
