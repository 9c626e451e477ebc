"""Predicted against measured times: each step of the named workloads is timed alone, as its plan runs it."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from planner.api import plan
from planner.language.errors import PlannerError
from planner.language.spec import Gather
from planner.language.units import seconds_text
from planner.program.frameworks import load_backend
from planner.program.implementations import RangedIndices
from planner.program.loops import parts
from planner.program.ops import Guard
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Step
from planner.workloads import WORKLOADS, Workload

__all__ = ["StepTime", "check", "check_text"]

Framework = Literal["torch", "numpy"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """One step of a named workload, predicted and measured.

    Attributes:
        framework: "torch" or "numpy".
        workload: the workload's name.
        step: the step's spec.
        lowering: the implementation.
        backward: whether the step is part of the backward program.
        predicted, measured: seconds.
    """

    framework: str
    workload: str
    step: str
    lowering: str
    backward: bool
    predicted: float
    measured: float

    @property
    def within(self) -> bool:
        """Whether the prediction is within a factor of 2."""
        return self.predicted <= 2 * self.measured and self.measured <= 2 * self.predicted


# Workloads with a larger peak in bytes, or with a longer predicted time, are not timed.
MOST_PEAK, MOST_SECONDS = 6 * 10**9, 10.0


def check_workload(framework: Framework, workload: Workload) -> Iterator[StepTime]:
    """Time every step of a workload at its CPU sizes; no step if the workload needs too much memory or time here.

    If the plan goes slice by slice, the steps of the first slice are timed.
    """
    workload = workload.cpu()
    torch = framework == "torch"
    arrays = workload.operands(framework, values="normal", requires_grad=torch)
    indices = workload.indices(framework)
    record: PlanRecord = plan(workload.spec, *arrays, **workload.options, **indices)
    if record.cost.peak_bytes > MOST_PEAK or record.cost.seconds > MOST_SECONDS:
        return
    if torch:
        arrays = tuple(x.detach() for x in arrays)
    spec, shapes = record.resolved.spec, dict(record.resolved.index_shapes)
    arrays = tuple(x.reshape(shape) for x, shape in zip(arrays, record.resolved.shapes, strict=True))
    rows = {g: indices[g.array].reshape(shapes[g.array]) for g in spec.gathers}
    yield from _time_programs(framework, workload.name, record, arrays, rows)


def _time_programs(
    framework: Framework, name: str, record: PlanRecord, arrays: Sequence[Any], rows: Mapping[Gather, Any]
) -> Iterator[StepTime]:
    """Time every step of a plan. The result stands for the output gradient."""
    programs, index = record.programs, RangedIndices(False, rows)
    values: dict[int, Any] = dict(enumerate(arrays))
    kept = {*programs.kept, *range(len(arrays))}
    for program in (programs.forward, programs.backward):
        if program is None:
            continue
        for step in program.steps:
            inputs = [values[v] for v in step.inputs]
            if isinstance(step.op, Loop) and program is programs.forward:
                part = next(parts(step.op.axes, step.op.spec))
                slices = [x[part.of(term)] for x, term in zip(inputs, step.op.input_terms, strict=True)]
                cut_rows = {g: rows[g][part.of(g.axes)] for g in step.op.gathers}
                yield from _time_programs(framework, name, step.op.body, slices, cut_rows)
            seconds, results = _time_step(framework, step, inputs, index)
            values.update(zip(step.outputs, results, strict=True))
            for variable in step.releases:
                if variable not in kept:
                    values.pop(variable, None)
            if isinstance(step.op, Guard | Loop):
                continue
            yield StepTime(
                framework,
                name,
                str(step.op.spec),
                step.choice.lowering,
                backward=program is programs.backward,
                predicted=step.choice.cost.picoseconds / 1e12,
                measured=seconds,
            )
        values[programs.output_gradient] = values[programs.result]


def _time_step(
    framework: Framework, step: Step, inputs: Sequence[Any], index: RangedIndices
) -> tuple[float, Sequence[Any]]:
    """Run a step several times, and return the median seconds and the results."""
    table = load_backend(framework).table
    times: list[float] = []
    results: Any = None
    # One run to warm up, then five more, or fewer if they take long.
    while len(times) < 6 and sum(times) < 2.0:
        index.orders.clear()
        results = None
        start = time.perf_counter()
        results = table.run(step.choice.lowering, step.op, inputs, index)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times), results


def check(names: Sequence[str] = (), progress: Callable[[str], None] = lambda what: None) -> list[StepTime]:
    """Time the steps of named workloads, all by default, in torch and NumPy.

    Raises:
        PlannerError: A name is not that of a workload.
    """
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise PlannerError(f"there is no workload {unknown[0]!r:.80}; there are {', '.join(WORKLOADS)}")
    frameworks: list[Framework] = ["numpy"]
    if importlib.util.find_spec("torch") is not None:
        frameworks.insert(0, "torch")
    times: list[StepTime] = []
    for framework in frameworks:
        for name in names or WORKLOADS:
            progress(f"{framework} {name}")
            times += check_workload(framework, WORKLOADS[name])
            gc.collect()
    return times


def check_text(times: Sequence[StepTime]) -> str:
    """Return a table with a row for each step, then the share of predictions within a factor of 2."""
    lines = [f"{'predicted':>10} {'measured':>10} {'ratio':>6}"]
    for t in times:
        mark = " " if t.within else "!"
        lines.append(
            f"{seconds_text(t.predicted):>10} {seconds_text(t.measured):>10} {t.predicted / t.measured:6.2f} {mark} "
            f"{t.framework:5} {t.workload:30} {'b' if t.backward else 'f'}  {t.step}  [{t.lowering}]"
        )
    for framework in dict.fromkeys(t.framework for t in times):
        within = [t.within for t in times if t.framework == framework]
        lines.append(f"{framework}: {sum(within)} of {len(within)} steps within 2x, {sum(within) / len(within):.0%}")
    if times:
        share = sum(t.within for t in times) / len(times)
        lines.append(f"within 2x: {share:.0%} of {len(times)} steps")
    return "\n".join(lines)
