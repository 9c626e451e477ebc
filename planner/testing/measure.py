"""What a call really allocates, measured without asking the planner.

Importing this module imports no framework; each function imports the one that it measures.

Example:
    >>> import numpy as np
    >>> result, measured = numpy_memory(lambda: np.ones(10_000).sum())
    >>> 80_000 <= measured.peak_bytes < 90_000, measured.retained_bytes
    (True, 0)
"""

from __future__ import annotations

import gc
import os
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

__all__ = [
    "Measured",
    "jax_retained",
    "jax_temp_bytes",
    "numpy_memory",
    "saved_tensor_bytes",
    "torch_backward_memory",
    "torch_memory",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that a call allocated.

    Attributes:
        peak_bytes: most bytes newly allocated at any moment, the result counted.
        retained_bytes: bytes still allocated while only the result is held, the result's own not counted.
    """

    peak_bytes: int
    retained_bytes: int


# --- torch --------------------------------------------------------------------------------------


def torch_memory(call: Callable[[], T]) -> tuple[T, Measured]:
    """Run a torch CPU call and count each allocation that it makes, internal temporaries too.

    Every allocation of torch's CPU allocator in the calling thread counts with the bytes that were
    asked for (not rounded up to the alignment of 64), a storage as a whole. What other threads
    allocate (`threading`, not torch's own loops over elements), and the scratch that a library
    such as MKL takes from the C heap, is not seen. Cyclic garbage is collected only after the
    call, so the peak does not depend on when Python happens to collect.

    Args:
        call: takes nothing; its arguments must exist before, so that they are not counted.

    Returns:
        The call's result and what was measured. Warm caches by a first run, or they count as retained.
    """
    result, peak, live = _track(call, {})
    own = _storages(result)
    return result, Measured(peak, sum(n for pointer, n in live.items() if pointer not in own))


def torch_backward_memory(
    call: Callable[[], Any], operands: Sequence[Any], gout: Any = None
) -> tuple[tuple[Any, ...], Measured]:
    """Run a torch CPU call, then its backward, and count what is alive during the backward.

    Args:
        call: takes nothing and returns one tensor.
        operands: the tensors whose gradients are asked for; they require gradients.
        gout: the output's gradient, not counted; ones if None.

    Returns:
        The gradients and what was measured in the backward. The peak counts the bytes that the forward
        retained, until they are freed, all that is newly allocated, and the gradients, but not the
        result's own storage; retained is what is alive in the end beside gradients and result.
    """
    import torch

    result, _, live = _track(call, {})
    own = _storages(result)
    gout = torch.ones_like(result) if gout is None else gout
    before = {pointer: n for pointer, n in live.items() if pointer not in own}
    gradients, peak, live = _track(lambda: torch.autograd.grad(result, operands, gout), before)
    own |= _storages(gradients)
    return gradients, Measured(peak, sum(n for pointer, n in live.items() if pointer not in own))


def saved_tensor_bytes(call: Callable[[], Any], operands: Iterable[Any] = ()) -> int:
    """Count the storages that torch's autograd saves, by its own hooks: a second count of retained bytes.

    Storages of the operands (index arrays among them) and of the result are left out, as is what
    was saved and dropped again before the call returned. The hooks do not see tensors that an
    `autograd.Function` keeps as attributes of its context, nor Python numbers, which ``2 * x`` keeps
    in 8 bytes; `torch_memory` sees both.
    """
    import torch

    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Any) -> _Saved:
        holder = _Saved(tensor)
        saved.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        result = call()
    gc.collect(0)
    own = _storages(result) | _storages(list(operands))
    storages = [holder.tensor.untyped_storage() for holder in saved]
    found = {s.data_ptr(): s.nbytes() for s in storages}
    return sum(n for pointer, n in found.items() if pointer not in own)


class _Saved:
    """Holds one saved tensor, and can be weakly referenced."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor.detach()  # a saved output with its grad_fn would keep itself alive


def _track(call: Callable[[], T], live: Mapping[int, int]) -> tuple[T, int, dict[int, int]]:
    """Run the call; return its result, the peak, and the size of each allocation alive in the end.

    `live` are allocations from an earlier run that count too; frees of any others do not, and the
    profiler reports them only by accident.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints when it starts and stops
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


def _storages(tree: Any) -> set[int]:
    import torch
    from torch.utils import _pytree

    leaves = _pytree.tree_leaves(tree)
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}


# --- jax ----------------------------------------------------------------------------------------


def jax_retained(call: Callable[..., Any], *operands: Any, held: Any = ()) -> int:
    """Count the bytes of the buffers that the backward of a jax call holds, outside jit.

    Each buffer among the leaves of ``jax.vjp(call, *operands)[1]`` counts once; those of the
    operands, of `held` and of the result do not.

    Args:
        call: differentiable in all operands.
        operands: pytrees of arrays.
        held: more arrays not to count, such as index arrays that `call` closes over.
    """
    import jax

    result, pullback = jax.vjp(call, *operands)
    jax.block_until_ready(result)  # type: ignore[no-untyped-call]
    leaves = jax.tree.leaves
    not_counted = {_buffer(x) for x in leaves((operands, held, result)) if _has_buffer(x)}
    found = {_buffer(x): int(x.nbytes) for x in leaves(pullback) if _has_buffer(x)}
    return sum(n for pointer, n in found.items() if pointer not in not_counted)


def jax_temp_bytes(call: Callable[..., Any], *operands: Any) -> int:
    """Compile a call and ask XLA for its temporaries: bytes beside the arguments and the results."""
    import jax

    analysis = jax.jit(call).lower(*operands).compile().memory_analysis()
    assert analysis is not None, "this platform does not say what it allocates"
    return int(analysis.temp_size_in_bytes)


def _has_buffer(x: Any) -> bool:
    import jax

    return isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))


def _buffer(x: Any) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.unsafe_buffer_pointer())


# --- numpy --------------------------------------------------------------------------------------


def numpy_memory(call: Callable[[], T]) -> tuple[T, Measured]:
    """Run a numpy call under tracemalloc.

    The peak counts Python's own objects too (some KB), so it is an upper bound. Retained counts
    array data alone, and exactly. Traces that tracemalloc already has are cleared.
    """
    domain = np.lib.tracemalloc_domain
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        with _collecting_afterwards():
            tracemalloc.clear_traces()  # arrays from before the call are then told by having no trace
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


def _owned_bytes(result: Any) -> int:
    arrays = result if isinstance(result, (list, tuple)) else [result]
    bases = {}
    for array in arrays:
        while isinstance(array, np.ndarray):
            if array.base is None and tracemalloc.get_object_traceback(array) is not None:
                bases[id(array)] = array.nbytes
            array = array.base
    return sum(bases.values())
