"""Meters: one interface to what each framework can measure, for `planner.inspect.analyze`.

Meters run single steps from `Backend.stepwise`, and whole calls from `Backend.bind`. They do not change the caller's
arrays: torch is measured on detached leaves that share the operands' storages.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from planner.inspect import memory as measure
from planner.inspect.analysis import Figures
from planner.inspect.memory import Counted, Measured
from planner.program.calls import Stepwise
from planner.program.frameworks import Backend
from planner.program.plan import PlanRecord
from planner.program.program import Program, Step
from planner.run import bind_plan
from planner.tune.timing import timed

# A contraction as a function of operands and index arrays.
Call: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], Any]
# From a call and what waits for its result to the call's seconds.
Timer: TypeAlias = Callable[[Callable[[], Any], Callable[[Any], Any]], float]


def of_some(
    call: Call, operands: Sequence[Any], indices: Mapping[str, Any], wanted: Sequence[int]
) -> Callable[..., Any]:
    """Return a call as a function of the wanted operands alone."""

    def function(*chosen: Any) -> Any:
        given = dict(zip(wanted, chosen, strict=True))
        return call([given.get(number, x) for number, x in enumerate(operands)], indices)

    return function


class Meter:
    """Measures one plan on one set of arrays. This class is for NumPy; subclasses override what their framework can do.

    Args:
        plan: the plan.
        backend: the plan's backend.
        operands: the arrays that the plan is called with.
        indices: the index arrays that the plan is called with.
        rounds: each time is the median of so many runs, after one run to warm up.
        timer: times a step in place of that, given a call and what waits for its result.
    """

    def __init__(
        self,
        plan: PlanRecord,
        backend: Backend,
        operands: Sequence[Any],
        indices: Mapping[str, Any],
        rounds: int,
        timer: Timer | None = None,
    ) -> None:
        self.plan, self.backend, self.rounds, self.timer = plan, backend, rounds, timer
        self.operands, self.indices = self.own(operands), indices
        self.run = bind_plan(plan)
        self.wanted = [number for number, v in enumerate(plan.programs.gradients) if v is not None]

    def own(self, operands: Sequence[Any]) -> list[Any]:
        """Return operands that can be differentiated without changing the caller's arrays."""
        return list(operands)

    def wait(self, result: Any) -> Any:
        """Wait for a result."""
        return result

    def seconds(self, call: Callable[[Any], Any], before: Callable[[], Any] = lambda: None) -> float:
        """Return the median seconds of a call. `before` returns the call's argument and is not timed."""
        seconds = []
        for _ in range(self.rounds + 1):
            argument = self.wait(before())
            seconds.append(timed(partial(lambda given: self.wait(call(given)), argument))[1])
            del argument
        return statistics.median(seconds[1:])

    # -- steps -----------------------------------------------------------------------------------

    def compile(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the function that runs a step, compiled if the framework compiles steps."""
        return function

    def counts(self, call: Callable[[], Any]) -> Counted:
        """Return the FLOPs and bytes of a call as the framework counts them."""
        return Counted(None, None)

    def buffers(self, arrays: Sequence[Any]) -> dict[int, int]:
        """Return the memory blocks of some arrays: an identifier of each block, and its bytes."""
        return measure.numpy_owned(arrays)

    def live(self, once: Callable[[], None], held: int) -> int | None:
        """Run a step once and return the most bytes alive. Earlier steps allocated `held` of them."""
        return held + measure.numpy_memory(once)[1].peak_bytes

    def begin(self, kept: Sequence[Any], result: Any) -> None:
        """Start a program. The backward program starts with the kept values and the result of the forward program."""

    def steps(self, stepwise: Stepwise, program: Program) -> tuple[list[Figures], dict[int, Any]]:
        """Run a program step by step. Return the figures of each step, and the values that are left in the end."""
        values, figures = dict(stepwise.values), []
        free = self.buffers([x for v, x in values.items() if v not in self.plan.programs.kept])
        for step in program.steps:
            run, seconds, counted = self._rehearse(stepwise, step, values)
            held = sum(n for key, n in self.buffers(list(values.values())).items() if key not in free)
            live = self.live(partial(self._once, stepwise, step, values, run), held)
            figures.append(Figures(seconds, counted.flops, counted.bytes_moved, live))
        return figures, values

    def _rehearse(
        self, stepwise: Stepwise, step: Step, values: Mapping[int, Any]
    ) -> tuple[Callable[..., Any], float, Counted]:
        """Run a step several times. The sorted orders of index arrays stay as they were."""
        orders = dict(stepwise.orders)
        bound = stepwise.bind(step, [values[v] for v in step.inputs])
        run = self.compile(bound.func, bound.args)

        def restore() -> None:
            stepwise.orders.clear()
            stepwise.orders.update(orders)

        if self.timer is None:
            seconds = self.seconds(lambda _: run(*bound.args), restore)
        elif self.indices:

            def again() -> Any:
                restore()
                return bound()

            seconds = self.timer(again, self.wait)
        else:
            seconds = self.timer(bound, self.wait)
        restore()
        counted = self.counts(lambda: run(*bound.args))
        restore()
        return run, seconds, counted

    @staticmethod
    def _once(stepwise: Stepwise, step: Step, values: dict[int, Any], run: Callable[..., Any]) -> None:
        """Run a step as its program does, and drop the values that no later step reads."""
        results = run(*stepwise.bind(step, [values[v] for v in step.inputs]).args)
        values.update(zip(step.outputs, results, strict=True))
        del results
        for variable in step.releases:
            values.pop(variable, None)

    # -- whole calls -----------------------------------------------------------------------------

    def measuring(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the framework's settings for measuring. Afterwards the caller's settings hold again."""
        return contextlib.nullcontext()

    def call(self, *_: Any) -> Any:
        """Call the plan."""
        return self.run(self.operands, self.indices)

    def forward(self, steps: Sequence[Figures]) -> list[tuple[str, Figures]]:
        """Return labelled figures of the whole forward program. `steps` are the figures of its steps."""
        seconds = self.seconds(self.call)
        measured = self.memory()
        return [("", Figures(seconds, *_sums(steps), measured.peak_bytes, measured.retained_bytes))]

    def memory(self) -> Measured:
        """Return the bytes that a call of the plan allocates."""
        return measure.numpy_memory(self.call)[1]

    def output_gradient(self, result: Any) -> Any:
        """Return ones in the shape of a result."""
        raise AssertionError("numpy computes no gradients")

    def backward(self, steps: Sequence[Figures]) -> list[tuple[str, Figures]]:
        """Return labelled figures of the whole backward program. `steps` are the figures of its steps."""
        raise AssertionError("numpy computes no gradients")


def _sums(steps: Sequence[Figures]) -> tuple[int | None, int | None]:
    """Return the FLOPs and bytes moved of all steps; None if they are unknown for every step."""
    flops = [s.flops for s in steps if s.flops is not None]
    moved = [s.bytes_moved for s in steps if s.bytes_moved is not None]
    return (sum(flops) if flops else None, sum(moved) if moved else None)


class TorchMeter(Meter):
    """PyTorch on a CPU: every allocation is seen."""

    def own(self, operands: Sequence[Any]) -> list[Any]:
        """Return leaves that share the operands' storages. Those that the plan differentiates require gradients."""
        import torch

        needs = [o.requires_grad for o in self.plan.operands]
        with torch.inference_mode(False):
            leaves = [x.clone() if x.is_inference() else x.detach() for x in operands]
            return [x.requires_grad_(need) for x, need in zip(leaves, needs, strict=True)]

    def measuring(self) -> contextlib.AbstractContextManager[Any]:
        """Record gradients if the plan has any."""
        import torch

        stack = contextlib.ExitStack()
        if self.plan.programs.backward is not None:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
        return stack

    def counts(self, call: Callable[[], Any]) -> Counted:
        """Count operator by operator."""
        return measure.torch_counts(call)

    def buffers(self, arrays: Sequence[Any]) -> dict[int, int]:
        """Return the arrays' storages."""
        return measure.torch_storages(list(arrays))

    def begin(self, kept: Sequence[Any], result: Any) -> None:
        """Count the kept values, without the result, as alive from the start."""
        kept_storages = measure.torch_storages(list(kept)).keys() - measure.torch_storages(result).keys()
        self.alive = {pointer: n for pointer, n in getattr(self, "alive", {}).items() if pointer in kept_storages}

    def live(self, once: Callable[[], None], held: int) -> int | None:
        """Ask torch's CPU allocator."""
        _, peak, self.alive = measure.torch_allocations(once, self.alive)
        return peak

    def memory(self) -> Measured:
        """Ask torch's CPU allocator."""
        return measure.torch_memory(self.call)[1]

    def output_gradient(self, result: Any) -> Any:
        """Return ones in the shape of a result."""
        import torch

        return torch.ones_like(result)

    def backward(self, steps: Sequence[Figures]) -> list[tuple[str, Figures]]:
        """Measure the gradients of all operands that the plan differentiates, from an output gradient of ones."""
        import torch

        leaves = [self.operands[number] for number in self.wanted]

        def before() -> Any:
            result = self.call()
            return result, torch.ones_like(result)

        seconds = self.seconds(lambda pair: torch.autograd.grad(pair[0], leaves, pair[1]), before)
        return [("", Figures(seconds, *_sums(steps), self.backward_memory(leaves).peak_bytes))]

    def backward_memory(self, leaves: Sequence[Any]) -> Measured:
        """Ask torch's CPU allocator."""
        return measure.torch_backward_memory(self.call, leaves)[1]


class CudaMeter(TorchMeter):
    """PyTorch on a CUDA device, by the allocator's statistics. It resets the allocator's record of its peak."""

    @property
    def device(self) -> Any:
        """The operands' device."""
        return self.operands[0].device

    def wait(self, result: Any) -> Any:
        """Wait for all kernels."""
        import torch

        torch.cuda.synchronize(self.device)
        return result

    def live(self, once: Callable[[], None], held: int) -> int | None:
        """Return `held` plus the rise of the allocator's peak above what was allocated before."""
        import torch

        before = torch.cuda.memory_allocated(self.device)
        return held + measure.torch_cuda_peak(once, self.device)[1] - before

    def memory(self) -> Measured:
        """Ask the allocator's statistics."""
        return measure.torch_cuda_memory(self.call, self.device)[1]

    def backward_memory(self, leaves: Sequence[Any]) -> Measured:
        """Ask the allocator's statistics."""
        return measure.torch_cuda_backward_memory(self.call, leaves, self.device)[1]


class JaxMeter(Meter):
    """JAX: each step jitted on its own; then both programs, as calls outside of jit run them and jitted by the user."""

    def wait(self, result: Any) -> Any:
        """Wait for all arrays of a result."""
        import jax

        return jax.block_until_ready(result)  # type: ignore[no-untyped-call]

    def compile(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
        """Compile the step, and keep what XLA says about it."""
        run, self.said = measure.jax_compiled(function, *arguments)
        return run

    def counts(self, call: Callable[[], Any]) -> Counted:
        """Return the counts of XLA."""
        return self.said

    def buffers(self, arrays: Sequence[Any]) -> dict[int, int]:
        """Return the arrays' buffers."""
        return measure.jax_buffers(list(arrays))

    def live(self, once: Callable[[], None], held: int) -> int | None:
        """Return `held` plus the temporaries and results that XLA plans."""
        once()
        return None if self.said.peak_bytes is None else held + self.said.peak_bytes

    def output_gradient(self, result: Any) -> Any:
        """Return ones in the shape of a result."""
        import jax.numpy as jnp

        return jnp.ones_like(result)

    def _of(self, indices: Mapping[str, Any]) -> Callable[..., Any]:
        return of_some(self.run, self.operands, indices, self.wanted)

    @property
    def _chosen(self) -> list[Any]:
        return [self.operands[number] for number in self.wanted]

    def _arguments(self) -> dict[str, Any]:
        """Return prepared index arrays. A compiled program can take them as arguments, and they are checked already."""
        sizes: dict[str, set[int | None]] = {}
        for gather in self.plan.resolved.spec.gathers:
            sizes.setdefault(gather.array, set()).add(gather.size)
        prepared = {}
        for name, array_sizes in sizes.items():
            if len(array_sizes) == 1 and not hasattr(self.indices[name], "prepared_framework"):
                (size,) = array_sizes
                assert size is not None
                prepared[name] = self.backend.group(self.indices[name], size, self.plan.index_mode)
        return prepared

    def forward(self, steps: Sequence[Figures]) -> list[tuple[str, Figures]]:
        """Measure the call, and the program as a user compiles it. Both are compiled as a whole."""
        held = (self.operands, self.indices)
        retained = 0
        if self.wanted:
            retained = measure.jax_retained(self._of(self.indices), *self._chosen, held=held)
        eager = self.seconds(self.call)
        prepared = self._arguments()
        run, said = measure.jax_compiled(
            lambda xs, q: self.run(xs, {**self.indices, **q}), tuple(self.operands), prepared
        )
        seconds = self.seconds(lambda _: run(tuple(self.operands), prepared))
        rows = [("", Figures(eager, *_sums(steps), said.peak_bytes, retained))]
        return [*rows, ("compiled", Figures(seconds, said.flops, said.bytes_moved, said.peak_bytes))]

    def backward(self, steps: Sequence[Figures]) -> list[tuple[str, Figures]]:
        """Measure the pullback from ones, and the pullback as a user compiles it. Both are compiled as a whole."""
        import jax

        result, pullback = jax.vjp(self._of(self.indices), *self._chosen)
        gradient = self.output_gradient(result)
        eager = self.seconds(lambda _: pullback(gradient))
        del result, pullback

        prepared = self._arguments()

        def both(chosen: Any, q: Any) -> Any:
            return jax.vjp(self._of({**self.indices, **q}), *chosen)

        result, pullback = self.wait(jax.jit(both)(tuple(self._chosen), prepared))
        run, said = measure.jax_compiled(lambda back, g: back(g), pullback, gradient)
        seconds = self.seconds(lambda _: run(pullback, gradient))
        free = measure.jax_buffers((self.operands, self.indices, prepared, result))
        retained = sum(n for pointer, n in measure.jax_buffers(pullback).items() if pointer not in free)
        live = None if said.peak_bytes is None else said.peak_bytes + retained
        rows = [("", Figures(eager, *_sums(steps), live))]
        return [*rows, ("compiled", Figures(seconds, said.flops, said.bytes_moved, live))]


def meter_of(
    plan: PlanRecord,
    backend: Backend,
    operands: Sequence[Any],
    indices: Mapping[str, Any],
    rounds: int,
    timer: Timer | None = None,
) -> Meter:
    """Return the meter for a plan's backend and the operands' device."""
    kind: type[Meter] = {"torch": TorchMeter, "jax": JaxMeter}.get(plan.backend, Meter)
    if plan.backend == "torch" and operands[0].is_cuda:
        kind = CudaMeter
    return kind(plan, backend, operands, indices, rounds, timer)
