"""Runs: one way to write a contraction on arrays of one framework, timed and measured."""

from __future__ import annotations

import abc
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.demo.figures import Figures
from planner.demo.ways import Framework, Way
from planner.workloads import Skew, Workload

__all__ = ["PAUSE_SECONDS", "RUNS", "JaxRun", "Run", "TorchRun"]

# A program pays for the memory that the one before it gave back: without a pause equal code differs by 1.7x
# in torch, by up to 3x in JAX (on 2 cores). So there is one before each program, a short one between runs.
PAUSE_SECONDS = {"torch": 0.05, "jax": 0.6}
_BETWEEN_SECONDS = 0.05
# A run this long is not repeated.
_LONG_SECONDS = 2.0
_TIMING_SECONDS = 0.4
_BLOCK_SECONDS = 0.005
_MOST_RUNS, _MOST_QUICK_RUNS = 5, 2


def _median_seconds(run: Callable[[], Any], framework: Framework, quick: bool) -> float:
    """Time a program; a short one in blocks, so that waking threads after a pause is not what is timed."""
    time.sleep(0 if quick else PAUSE_SECONDS[framework])
    first = _block_seconds(run, 1)
    if first > _TIMING_SECONDS:
        return first
    calls = max(1, min(100, int(_BLOCK_SECONDS / _block_seconds(run, 1))))
    times: list[float] = []
    while not times or (len(times) < (_MOST_QUICK_RUNS if quick else _MOST_RUNS) and sum(times) < _TIMING_SECONDS):
        time.sleep(0 if quick else _BETWEEN_SECONDS)
        times.append(_block_seconds(run, calls))
    return statistics.median(times) / calls


def _block_seconds(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


class Run(abc.ABC):
    """One way to write a contraction, on fresh arrays: what can be timed and measured of it.

    Args:
        way: what runs.
        workload: its arrays, of small integers.
        gradients: per operand, whether it takes a gradient.
        skew: how often the index arrays name each row.
    """

    framework: Framework
    checked_seconds = 0.0

    @abc.abstractmethod
    def forward(self) -> Any:
        """Run forward, no gradient asked for, to the end."""

    @abc.abstractmethod
    def both(self) -> tuple[Any, ...]:
        """Run forward and backward, to the end: the value and the gradients."""

    @abc.abstractmethod
    def memory(self) -> tuple[int, int, int]:
        """Measure peak bytes of `forward`, peak bytes of `both`, and retained bytes between the two."""

    def results(self) -> list[np.ndarray[Any, Any]]:
        """Return the value and the gradients as NumPy arrays."""
        start = time.perf_counter()
        results = self.both()
        self.checked_seconds = time.perf_counter() - start
        return [np.asarray(x) for x in results]

    def figures(self, quick: bool) -> Figures:
        """Time and measure, after `results`."""
        # In JAX the first run compiles; in torch one that took long is not run again for its time.
        gradient_seconds = self.checked_seconds
        if self.framework == "jax" or gradient_seconds < _LONG_SECONDS:
            gradient_seconds = _median_seconds(self.both, self.framework, quick)
        self.forward()  # warm: a plan is found, and XLA compiles, once
        seconds = _median_seconds(self.forward, self.framework, quick)
        peak_bytes, gradient_peak_bytes, retained_bytes = self.memory()
        return Figures(seconds, peak_bytes, gradient_seconds, gradient_peak_bytes, retained_bytes)


class TorchRun(Run):
    """One way in torch, eager."""

    framework = "torch"

    def __init__(self, way: Way, workload: Workload, gradients: tuple[bool, ...], skew: Skew = "uniform") -> None:
        import torch

        self.way, self.torch = way, torch
        self.plain = workload.operands("torch")
        self.indices = workload.indices("torch", skew=skew)
        self.cotangent = workload.cotangent("torch")
        masked = dataclasses.replace(workload, gradients=gradients)
        self.operands = masked.operands("torch", requires_grad=True)
        self.wanted = [x for x, wanted in zip(self.operands, gradients, strict=True) if wanted]

    def forward(self) -> Any:
        """Run forward, no gradient asked for."""
        return self.way.call(self.torch, *self.plain, **self.indices)

    def forward_kept(self) -> Any:
        """Run forward, and keep what the backward will need."""
        return self.way.call(self.torch, *self.operands, **self.indices)

    def both(self) -> tuple[Any, ...]:
        """Run forward and backward: the value and the gradients."""
        result = self.forward_kept()
        return (result.detach(), *self.torch.autograd.grad(result, self.wanted, self.cotangent))

    def memory(self) -> tuple[int, int, int]:
        """Count torch's own allocations."""
        from planner.inspect.memory import torch_memory

        _, forward = torch_memory(self.forward)
        _, kept = torch_memory(self.forward_kept)
        _, both = torch_memory(self.both)
        return forward.peak_bytes, both.peak_bytes, kept.retained_bytes

    def backward_peak_bytes(self) -> int:
        """Count what the backward alone has at most: what is retained, what it allocates, and the gradients."""
        from planner.inspect.memory import torch_backward_memory

        return torch_backward_memory(self.forward_kept, self.wanted, self.cotangent)[1].peak_bytes


class JaxRun(Run):
    """One way in JAX, jitted."""

    framework = "jax"

    def __init__(self, way: Way, workload: Workload, gradients: tuple[bool, ...], skew: Skew = "uniform") -> None:
        import jax
        import jax.numpy as jnp

        operands = workload.operands("jax")
        wanted = tuple(x for x, takes in zip(operands, gradients, strict=True) if takes)
        fixed = {number: x for number, x in enumerate(operands) if not gradients[number]}

        def forward(wanted: tuple[Any, ...], fixed: dict[int, Any], indices: dict[str, Any]) -> Any:
            rest = iter(wanted)
            whole = (fixed[number] if number in fixed else next(rest) for number in range(len(operands)))
            return way.call(jnp, *whole, **indices)

        def both(
            wanted: tuple[Any, ...], fixed: dict[int, Any], indices: dict[str, Any], cotangent: Any
        ) -> tuple[Any, ...]:
            result, pullback = jax.vjp(lambda *w: forward(w, fixed, indices), *wanted)
            return (result, *pullback(cotangent))

        self.ready: Callable[[Any], Any] = jax.block_until_ready
        self.arguments = (wanted, fixed, workload.indices("jax", skew=skew))
        self.cotangent = workload.cotangent("jax")
        self.traced_forward, self.traced_both = forward, both
        self.jitted_forward, self.jitted_both = jax.jit(forward), jax.jit(both)

    def forward(self) -> Any:
        """Run forward, no gradient asked for, to the end."""
        return self.ready(self.jitted_forward(*self.arguments))

    def both(self) -> tuple[Any, ...]:
        """Run forward and backward, to the end: the value and the gradients."""
        results: tuple[Any, ...] = self.ready(self.jitted_both(*self.arguments, self.cotangent))
        return results

    def temporary_bytes(self) -> tuple[int, int]:
        """Ask XLA for the temporaries of `forward` and of `both`: results are not counted."""
        from planner.inspect.memory import jax_temp_bytes

        return (
            jax_temp_bytes(self.traced_forward, *self.arguments),
            jax_temp_bytes(self.traced_both, *self.arguments, self.cotangent),
        )

    def memory(self) -> tuple[int, int, int]:
        """Ask XLA for temporaries, the results added; and outside jit, count what the pullback holds."""
        from planner.inspect.memory import jax_retained

        wanted, fixed, indices = self.arguments
        forward, both = self.temporary_bytes()
        retained = jax_retained(lambda *w: self.traced_forward(w, fixed, indices), *wanted, held=(fixed, indices))
        result_bytes = int(self.cotangent.nbytes)
        gradient_bytes = sum(int(x.nbytes) for x in wanted)
        return forward + result_bytes, both + result_bytes + gradient_bytes, retained


RUNS: dict[Framework, type[TorchRun] | type[JaxRun]] = {"torch": TorchRun, "jax": JaxRun}
