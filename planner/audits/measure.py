"""Measures a call as the program makes it today, and with planner, on arrays of the same shapes and strides."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from planner.api import contract
from planner.audits.expression import Array, Problem
from planner.audits.replay import Today, replay
from planner.audits.sites import Figures
from planner.inspect.memory import (
    jax_compiled,
    torch_backward_memory,
    torch_cuda_backward_memory,
    torch_cuda_memory,
    torch_memory,
)
from planner.language.errors import PlannerError
from planner.plan import Plan
from planner.program.frameworks import load_backend
from planner.tune.timing import timed

# Both calls run in turn: so many times at least and at most, and in between for so many seconds together. In a turn a
# call runs so many times, after one that is not counted: the system takes back memory that the other call freed, and a
# call that touches it anew may take twice as long. Steps of a program reuse most of theirs.
_LEAST, _MOST, _SECONDS, _TURN = 9, 200, 0.3, 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    """A call on arrays: `run` does it with its gradients and waits, `memory` returns its peak and retained bytes."""

    run: Callable[[], object]
    memory: Callable[[], tuple[int, int]]


def measure_site(problem: Problem, today: Today, plan: Plan, predicted: Sequence[Figures]) -> list[Figures]:
    """Run what a program calls today, and the line to write instead, in turn. Return the medians of their times.

    Operands are random numbers. Index arrays are those of the program if they were kept, else random rows. Gradients of
    the result have the strides that they had in the program.

    Args:
        problem: the contraction.
        today: what the program calls.
        plan: the plan of the contraction.
        predicted: the figures of both, whose copied bytes are taken over.
    """
    values = _values(problem, today, plan)
    operands = [array.identity for array in problem.operands]
    indices = {letter: index.identity for letter, index in problem.indices.items()}
    sizes = dict(problem.sizes) or None

    def change(arrays: Mapping[int, Any]) -> Any:
        chosen = {letter: arrays[identity] for letter, identity in indices.items()}
        result = contract(
            problem.spec, *(arrays[each] for each in operands), sizes=sizes, index_mode=problem.index_mode, **chosen
        )
        if not problem.target:
            return result
        target = arrays[today.extras[0].identity]
        return target.add_(result) if problem.in_place else target + result

    wanted = {array.identity for array in problem.operands if array.operand.requires_grad}
    trial = {"torch": _torch_trial, "jax": _jax_trial}[plan.backend]
    with today.context():
        calls = functools.partial(replay, today.step), change
        trials = [trial(call, values, wanted, today.gradients[:1]) for call in calls]
        found: list[list[float]] = [[], []]
        while len(found[1]) < _LEAST or (len(found[1]) < _MOST and sum(map(sum, found)) < _SECONDS):
            for each, times in zip(trials, found, strict=True):
                each.run()
                times += [timed(each.run)[1] for _ in range(_TURN)]
        # Other programs only lengthen times: the lower quartile tells how far the median may be off.
        quartiles = [statistics.quantiles(times) for times in found]
        memory = [each.memory() for each in trials]
    return [
        Figures(median, *taken, figures.copied_bytes, measured=True, noise=median - low)
        for (low, median, _), taken, figures in zip(quartiles, memory, predicted, strict=True)
    ]


def _torch_trial(
    call: Callable[[Mapping[int, Any]], Any],
    values: Mapping[int, Any],
    wanted: set[int],
    gradients: Sequence[tuple[int, ...]],
) -> _Trial:
    import torch

    leaves = {each: x.detach().requires_grad_(each in wanted) for each, x in values.items()}
    inputs = [x for x in leaves.values() if x.requires_grad]
    device = next(iter(leaves.values())).device

    def forward() -> Any:
        # A target of additions in place is another tensor in each run, over the same memory.
        return call({each: x if x.requires_grad else x.detach() for each, x in leaves.items()})

    ones = torch.ones_like(forward())
    for strides in gradients if ones.numel() else ():
        reach = sum((n - 1) * stride for n, stride in zip(ones.shape, strides, strict=True))
        ones = ones.new_ones(1 + reach).as_strided(ones.shape, strides)

    def run() -> None:
        result = forward()
        if inputs:
            torch.autograd.grad(result, inputs, ones)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def memory() -> tuple[int, int]:
        if device.type == "cuda":
            taken = [torch_cuda_memory(forward, device)[1]]
            taken += [torch_cuda_backward_memory(forward, inputs, device)[1]] if inputs else []
        else:
            taken = [torch_memory(forward)[1]]
            taken += [torch_backward_memory(forward, inputs, ones)[1]] if inputs else []
        return max(each.peak_bytes for each in taken), taken[0].retained_bytes

    return _Trial(run, memory)


def _jax_trial(
    call: Callable[[Mapping[int, Any]], Any],
    values: Mapping[int, Any],
    wanted: set[int],
    gradients: Sequence[tuple[int, ...]],
) -> _Trial:
    import jax

    # What a jaxpr computes is all there is, its gradients too: nothing is kept.
    run, counted = jax_compiled(call, values)
    if counted.peak_bytes is None:
        raise PlannerError("this platform does not say what it allocates")  # the audit shows what is predicted
    peak = counted.peak_bytes
    return _Trial(lambda: jax.block_until_ready(run(values)), lambda: (peak, 0))  # type: ignore[no-untyped-call]


def _values(problem: Problem, today: Today, plan: Plan) -> dict[int, Any]:
    """Return arrays for all that a site takes, by identity."""
    backend, kind = load_backend(plan.backend), plan.device.kind
    random = np.random.default_rng(0)
    arrays = (*problem.operands, *today.extras)
    values = {array.identity: _strided(array, random, backend, kind) for array in arrays}
    sizes: dict[str, int] = {}
    for gather in plan.resolved.spec.gathers:  # rows that fit all pools of an index array
        sizes[gather.array] = min(sizes.get(gather.array, gather.size or 0), gather.size or 0)
    for letter, index in problem.indices.items():
        drawn = random.integers(0, max(sizes[letter], 1), index.operand.shape)
        value = backend.from_numpy(drawn, "int32", kind) if index.value is None else index.value
        values[index.identity] = value
    return values


def _strided(array: Array, random: np.random.Generator, backend: Any, kind: str) -> Any:
    """Return random numbers of an array's shape, dtype and strides."""
    operand = array.operand
    values = random.integers(-3, 4, operand.shape)
    if operand.strides is None or math.prod(operand.shape) == 0:
        return backend.from_numpy(values.astype("float32"), operand.dtype, kind)
    size = 1 + sum((n - 1) * stride for n, stride in zip(operand.shape, operand.strides, strict=True))
    base = np.zeros(size, "float32")
    view = np.lib.stride_tricks.as_strided(base, operand.shape, [4 * stride for stride in operand.strides])
    view[...] = values
    return backend.from_numpy(view, operand.dtype, kind)
