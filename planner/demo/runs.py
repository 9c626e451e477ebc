"""Run each way to write a contraction: check its results, time it, and measure its memory."""

from __future__ import annotations

import abc
import copy
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.demo.cases import Case, Scale
from planner.demo.ways import Framework, Way
from planner.tune.timing import block_seconds, timed
from planner.workloads import Skew, Workload

_BLOCK_SECONDS = 0.02

Results = list[np.ndarray[Any, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How often a way is run.

    Attributes:
        long_seconds: a way whose forward and backward pass take longer than this is run once, unless they take less
            than half the time of a way before it.
        runs: the most runs behind a median.
        timing_seconds: no further round of runs begins after this much time for each way. The forward passes are timed
            first, then those with gradients.
    """

    long_seconds: float
    runs: int
    timing_seconds: float


EFFORTS: dict[Scale, Effort] = {
    "main": Effort(long_seconds=1.5, runs=9, timing_seconds=0.5),
    "full": Effort(long_seconds=2.0, runs=15, timing_seconds=1.0),
    "quick": Effort(long_seconds=2.0, runs=2, timing_seconds=0.4),
}


@dataclasses.dataclass(frozen=True, slots=True)
class WayFigures:
    """What was measured of one way. "With gradients" means the forward and backward pass together.

    Attributes:
        seconds: the forward pass alone, when no gradient is asked for.
        peak_bytes: the most bytes newly allocated in it, the result counted.
        gradient_seconds: with gradients.
        gradient_peak_bytes: the most bytes newly allocated with gradients.
        retained_bytes: what stays allocated between forward and backward pass, the result not counted.
        once: whether the times are those of a single run.
        extrapolated: whether only a part was run.
    """

    seconds: float = math.nan
    peak_bytes: float = math.nan
    gradient_seconds: float = math.nan
    gradient_peak_bytes: float = math.nan
    retained_bytes: float = math.nan
    once: bool = False
    extrapolated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One way of a case: its figures, and which of its results differed ("" if none did)."""

    case: Case
    way: Way
    figures: WayFigures
    differs: str


def _median_seconds(programs: Sequence[Callable[[], Any]], effort: Effort) -> list[float]:
    """Time programs in turn, round after round, so that whatever else disturbs the machine disturbs all of them.

    A run that does not count comes before each timed one: it pays for the memory that the program before gave back,
    and wakes the threads. Programs of less than 20 ms are averaged over as many runs as take that long, at most 1,000.
    """
    begun = time.perf_counter()
    rounds: list[list[float]] = []
    while len(rounds) < effort.runs and time.perf_counter() - begun < effort.timing_seconds * len(programs):
        rounds.append([block_seconds(program, least_seconds=_BLOCK_SECONDS) for program in programs])
    return [statistics.median(seconds) for seconds in zip(*rounds, strict=True)]


class Run(abc.ABC):
    """One way to write a contraction, on fresh arrays.

    Args:
        way: what runs.
        workload: its arrays, of small integers.
        gradients: per operand, whether it takes a gradient.
        skew: how often the index arrays name each row.
    """

    framework: Framework
    way: Way

    def use(self, way: Way) -> Run:
        """Return a run of another way on the same arrays."""
        other = copy.copy(self)
        other.way = way
        return other

    @abc.abstractmethod
    def forward(self) -> Any:
        """Run forward to the end; no gradient is asked for."""

    @abc.abstractmethod
    def both(self) -> tuple[Any, ...]:
        """Run forward and backward to the end; return the value and the gradients."""

    @abc.abstractmethod
    def once(self) -> tuple[tuple[Any, ...], WayFigures]:
        """Run everything once; return what `both` returns, and all figures."""

    def results(self) -> Results:
        """Return the value and the gradients as NumPy arrays."""
        return [np.asarray(x) for x in self.both()]

    def memory(self) -> tuple[int, int, int]:
        """Measure peak bytes of `forward`, peak bytes of `both`, and bytes retained between the two passes."""
        _, figures = self.once()
        return int(figures.peak_bytes), int(figures.gradient_peak_bytes), int(figures.retained_bytes)

    def measure(
        self, expected: Results | None, effort: Effort, slowest_seconds: float = 0.0
    ) -> tuple[Results, str, WayFigures]:
        """Compare the results with those expected, and measure the memory of what agrees.

        Args:
            expected: the results that it must have, if known.
            effort: how often to run it.
            slowest_seconds: forward and backward pass of the slowest way before it.

        Returns:
            The results, which of them differ, and the figures, with the times of a single run. `once` is set if the way
            takes so long that it is not timed again.
        """
        found, figures = self.once()
        results = [np.asarray(x) for x in found]
        differs = differences(results, expected or results)
        if differs:
            return results, differs, WayFigures()
        del found
        if figures.gradient_seconds > max(effort.long_seconds, slowest_seconds / 2):
            return results, "", figures
        # The first run made the plan and warmed all caches, so its memory does not count either.
        _, figures = self.once()
        return results, "", dataclasses.replace(figures, once=False)


class TorchRun(Run):
    """One way in torch, eager."""

    framework = "torch"

    def __init__(self, way: Way, workload: Workload, gradients: tuple[bool, ...], skew: Skew = "uniform") -> None:
        import torch

        self.way, self.torch = way, torch
        self.indices = workload.indices("torch", skew=skew)
        self.cotangent = workload.cotangent("torch")
        masked = dataclasses.replace(workload, gradients=gradients)
        self.operands = masked.operands("torch", requires_grad=True)
        self.plain = tuple(x.detach() for x in self.operands)
        self.wanted = [x for x, wanted in zip(self.operands, gradients, strict=True) if wanted]

    def forward(self) -> Any:
        """Run forward; no gradient is asked for."""
        return self.way.call(self.torch, *self.plain, **self.indices)

    def forward_kept(self) -> Any:
        """Run forward, and keep what the backward pass will need."""
        return self.way.call(self.torch, *self.operands, **self.indices)

    def _backward(self, result: Any) -> Any:
        return self.torch.autograd.grad(result, self.wanted, self.cotangent)

    def both(self) -> tuple[Any, ...]:
        """Run forward and backward; return the value and the gradients."""
        result = self.forward_kept()
        return (result.detach(), *self._backward(result))

    def once(self) -> tuple[tuple[Any, ...], WayFigures]:
        """Run each pass once, and count torch's own allocations."""
        from planner.inspect.memory import torch_allocations, torch_memory, torch_storages

        (_, seconds), forward = torch_memory(lambda: timed(self.forward))
        (result, kept_seconds), kept_peak, live = torch_allocations(lambda: timed(self.forward_kept), {})
        own = torch_storages(result)
        retained = sum(count for pointer, count in live.items() if pointer not in own)
        (gradients, backward_seconds), backward_peak, _ = torch_allocations(
            lambda: timed(lambda: self._backward(result)), live
        )
        figures = WayFigures(
            seconds=seconds,
            peak_bytes=forward.peak_bytes,
            gradient_seconds=kept_seconds + backward_seconds,
            gradient_peak_bytes=max(kept_peak, backward_peak),
            retained_bytes=retained,
            once=True,
        )
        return (result.detach(), *gradients), figures

    def backward_peak_bytes(self) -> int:
        """Count what the backward alone has at most: what is retained, what it allocates, and the gradients."""
        from planner.inspect.memory import torch_backward_memory

        return torch_backward_memory(self.forward_kept, self.wanted, self.cotangent)[1].peak_bytes


class JaxRun(Run):
    """One way in JAX, jitted."""

    framework = "jax"

    def __init__(self, way: Way, workload: Workload, gradients: tuple[bool, ...], skew: Skew = "uniform") -> None:
        import jax

        operands = workload.operands("jax")
        wanted = tuple(x for x, takes in zip(operands, gradients, strict=True) if takes)
        fixed = {number: x for number, x in enumerate(operands) if not gradients[number]}

        self.ready: Callable[[Any], Any] = jax.block_until_ready
        self.arguments = (wanted, fixed, workload.indices("jax", skew=skew))
        self.cotangent = workload.cotangent("jax")
        self._compile_later(way)

    def use(self, way: Way) -> JaxRun:
        """Return a run of another way on the same arrays."""
        other = copy.copy(self)
        other._compile_later(way)
        return other

    def _compile_later(self, way: Way) -> None:
        """Make functions of a way that compile when they are first called."""
        import jax
        import jax.numpy as jnp

        def forward(wanted: tuple[Any, ...], fixed: dict[int, Any], indices: dict[str, Any]) -> Any:
            rest = iter(wanted)
            numbers = range(len(wanted) + len(fixed))
            whole = (fixed[number] if number in fixed else next(rest) for number in numbers)
            return way.call(jnp, *whole, **indices)

        def both(
            wanted: tuple[Any, ...], fixed: dict[int, Any], indices: dict[str, Any], cotangent: Any
        ) -> tuple[Any, ...]:
            result, pullback = jax.vjp(lambda *w: forward(w, fixed, indices), *wanted)
            return (result, *pullback(cotangent))

        self.way = way
        self.traced_forward, self.traced_both = forward, both
        self.jitted_forward, self.jitted_both = jax.jit(forward), jax.jit(both)

    def forward(self) -> Any:
        """Run forward to the end; no gradient is asked for."""
        return self.ready(self.jitted_forward(*self.arguments))

    def both(self) -> tuple[Any, ...]:
        """Run forward and backward to the end; return the value and the gradients."""
        results: tuple[Any, ...] = self.ready(self.jitted_both(*self.arguments, self.cotangent))
        return results

    def temporary_bytes(self) -> tuple[int, int]:
        """Ask XLA for the temporaries of `forward` and of `both`: results are not counted."""
        from planner.inspect.memory import jax_temp_bytes

        return (
            jax_temp_bytes(self.traced_forward, *self.arguments),
            jax_temp_bytes(self.traced_both, *self.arguments, self.cotangent),
        )

    def once(self) -> tuple[tuple[Any, ...], WayFigures]:
        """Compile; run each pass once; ask XLA for its temporaries; outside jit, count what the pullback holds."""
        from planner.inspect.memory import jax_compiled, jax_retained

        wanted, fixed, indices = self.arguments
        # The calls below run the programs that are compiled here, so that compiling is not timed.
        _, forward = jax_compiled(self.jitted_forward, *self.arguments)
        _, both = jax_compiled(self.jitted_both, *self.arguments, self.cotangent)
        assert forward.peak_bytes is not None, "this platform does not say what it allocates"
        assert both.peak_bytes is not None, "this platform does not say what it allocates"
        _, seconds = timed(self.forward)
        results, gradient_seconds = timed(self.both)
        retained = jax_retained(lambda *w: self.traced_forward(w, fixed, indices), *wanted, held=(fixed, indices))
        figures = WayFigures(
            seconds=seconds,
            peak_bytes=forward.peak_bytes,
            gradient_seconds=gradient_seconds,
            gradient_peak_bytes=both.peak_bytes,
            retained_bytes=retained,
            once=True,
        )
        return results, figures


RUNS: dict[Framework, type[TorchRun] | type[JaxRun]] = {"torch": TorchRun, "jax": JaxRun}


def measure_case(case: Case, scale: Scale = "main", starting: Callable[[Way], None] = lambda way: None) -> list[Row]:
    """Measure the ways of a case: memory and results of each, then the times of all that take short, in turn.

    A way that runs on a part of the workload is timed by itself.

    Args:
        case: what to run.
        scale: how often to run it.
        starting: called with each way before it runs.
    """
    effort = EFFORTS[scale]
    runs: dict[Workload, Run] = {}
    expected: dict[Workload, Results] = {}
    slowest_seconds: dict[Workload, float] = {}

    def measure(way: Way, workload: Workload) -> tuple[Run, str, WayFigures]:
        """Measure a way on a workload; the first way's results on it are what all must have."""
        if workload not in runs:
            runs[workload] = RUNS[case.framework](case.ways[0], workload, case.gradients)
        if workload not in expected and way is not case.ways[0]:
            expected[workload] = runs[workload].results()
        run = runs[workload].use(way)
        slowest = slowest_seconds.get(workload, 0.0)
        results, differs, figures = run.measure(expected.get(workload), effort, slowest)
        if not differs:
            slowest_seconds[workload] = max(slowest_seconds.get(workload, 0.0), figures.gradient_seconds)
        expected.setdefault(workload, results)
        gc.collect()
        return run, differs, figures

    def measure_part(way: Way, size: int) -> tuple[str, WayFigures]:
        """Measure and time a way on a part of the workload."""
        assert way.part is not None
        run, differs, figures = measure(way, case.workload.resized(**{way.part.axis: size}))
        return differs, figures if differs or figures.once else _timed_in_turn([(run, figures)], effort)[0]

    rows: list[Row] = []
    short: dict[int, Run] = {}
    for number, way in enumerate(case.ways):
        starting(way)
        sizes = case.workload.sizes
        if way.part is None or way.part.size >= sizes[way.part.axis]:
            run, differs, figures = measure(way, case.workload)
            if not differs and not figures.once:
                short[number] = run
        else:
            axis, size = way.part.axis, way.part.size
            differs, figures = measure_part(way, size)
            if not differs:
                differs, half = measure_part(way, size // 2)
                figures = WayFigures() if differs else extrapolate(figures, half, sizes[axis] / size)
            if not way.part.backward_in_proportion:
                figures = dataclasses.replace(figures, gradient_seconds=math.nan, gradient_peak_bytes=math.nan)
        rows.append(Row(case, way, figures, differs))
    timed_figures = _timed_in_turn([(run, rows[number].figures) for number, run in short.items()], effort)
    for number, figures in zip(short, timed_figures, strict=True):
        rows[number] = dataclasses.replace(rows[number], figures=figures)
    return rows


def _timed_in_turn(found: Sequence[tuple[Run, WayFigures]], effort: Effort) -> list[WayFigures]:
    """Time runs in turn; return the figures of each with its times."""
    forward = _median_seconds([run.forward for run, _ in found], effort)
    both = _median_seconds([run.both for run, _ in found], effort)
    return [
        dataclasses.replace(figures, seconds=seconds, gradient_seconds=gradient_seconds)
        for (_, figures), seconds, gradient_seconds in zip(found, forward, both, strict=True)
    ]


def extrapolate(part: WayFigures, half: WayFigures, times: float) -> WayFigures:
    """Return the figures of a whole that is `times` the part, from those of the part and of half of the part.

    Time grows in proportion: it is all in the loop. Bytes have a constant share too, such as the gradient of an
    operand that every row reads, so they grow by what the second half of the part added.
    """

    def bytes_of(quantity: str) -> float:
        second_half = getattr(part, quantity) - getattr(half, quantity)
        return float(getattr(part, quantity) + 2 * second_half * (times - 1))

    return WayFigures(
        part.seconds * times,
        bytes_of("peak_bytes"),
        part.gradient_seconds * times,
        bytes_of("gradient_peak_bytes"),
        bytes_of("retained_bytes"),
        extrapolated=True,
    )


def differences(results: Sequence[np.ndarray[Any, Any]], expected: Sequence[np.ndarray[Any, Any]]) -> str:
    """Say what differs. The operands are small integers, so every sum is exact and the comparison is `==`."""
    names = ("the value", *(f"gradient {number}" for number in range(len(expected) - 1)))
    wrong = [
        name
        for name, result, wanted in zip(names, results, expected, strict=True)
        if result.dtype != wanted.dtype or not np.array_equal(result, wanted)
    ]
    return ", ".join(wrong)
