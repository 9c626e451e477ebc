"""Times a call as a program does it today, and with planner, on arrays of the same shapes and strides."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import Any

import numpy as np

from planner.audits.expression import Array, Problem
from planner.language.errors import PlannerError
from planner.plan import Plan
from planner.program.frameworks import load_backend

__all__ = ["Times", "measured_times"]

_ROUNDS = 9


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a call, gradients included: medians of interleaved runs."""

    now: float
    planned: float


def measured_times(problem: Problem, plan: Plan) -> Times:
    """Run the naive plan and the plan of a problem in turn, and return the medians of their times.

    Operands are random numbers. Index arrays are those of the program if they were kept, else random rows.

    Raises:
        PlannerError: the arrays would have no values here.
    """
    backend = load_backend(plan.backend)
    random = np.random.default_rng(0)
    operands = [_strided(array, random, backend, plan.device.kind) for array in problem.operands]
    indices: dict[str, Any] = {}
    for gather in plan.resolved.spec.gathers:  # rows that fit all pools of an index array
        index = problem.indices[gather.array]
        shape, size = index.operand.shape, gather.size or 0
        drawn = backend.from_numpy(random.integers(0, max(size, 1), shape), "int32", plan.device.kind)
        if gather.array not in indices or size < indices[gather.array][1]:
            indices[gather.array] = (drawn if index.value is None else index.value), size
    arrays = {letter: values for letter, (values, _) in indices.items()}
    runs = [backend.trial(which, operands, arrays) for which in (plan.naive, plan)]
    found: list[list[float]] = [[], []]
    for number in range(_ROUNDS + 1):
        for run, times in zip(runs, found, strict=True):
            if run is None:
                raise PlannerError("an audit cannot measure within a transform: leave measure=True out")
            begin = time.perf_counter()
            run()
            if number:
                times.append(time.perf_counter() - begin)
    return Times(*map(statistics.median, found))


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
