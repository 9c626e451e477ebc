"""Predicted against measured times: each step of the named workloads is timed alone, as its plan runs it."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from planner.api import plan
from planner.calibrate.labs import Framework
from planner.inspect.analyze import analyze_steps
from planner.language.errors import PlannerError
from planner.language.units import seconds_text
from planner.program.frameworks import load_backend
from planner.program.implementations import MASK
from planner.program.plan import PlanRecord
from planner.tune.timing import least_seconds
from planner.workloads import WORKLOADS, Workload


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """One step of a named workload, predicted and measured.

    Attributes:
        framework: "torch", "jax" or "numpy".
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

    def within(self, factor: float) -> bool:
        """Whether the prediction is within a factor."""
        return self.predicted <= factor * self.measured and self.measured <= factor * self.predicted


# Workloads with a larger peak in bytes, or with a longer predicted time, are not timed.
MOST_PEAK, MOST_SECONDS = 6 * 10**9, 10.0
# Within which factors predictions are counted.
FACTORS = (1.5, 2.0)
# Views and values that XLA does not compute are no work.
_FREE = (MASK, "view", "broadcast", "fused cast")


def check_workload(framework: Framework, workload: Workload) -> Iterator[StepTime]:
    """Time every step of a workload at its CPU sizes; no step if the workload needs too much memory or time here.

    If the plan goes slice by slice, the steps of the first slice are timed.
    """
    workload = workload.cpu()
    operands = workload.operands(framework, values="normal")
    indices, describe = workload.indices(framework), load_backend(framework).operand
    described = [
        dataclasses.replace(describe(x), requires_grad=takes and framework != "numpy")
        for x, takes in zip(operands, workload.takes_gradient, strict=True)
    ]
    record: PlanRecord = plan(workload.spec, *described, backend=framework, **workload.options, **indices)
    if record.cost.peak_bytes > MOST_PEAK or record.cost.seconds > MOST_SECONDS:
        return
    for step in analyze_steps(record, operands, indices, partial(least_seconds, blocks=5, most_seconds=0.3)):
        predicted, measured = step.predicted.seconds, step.measured.seconds
        if step.lowering in _FREE or step.lowering.startswith("loop over") or predicted is None or measured is None:
            continue
        backward = step.program.startswith("backward")
        yield StepTime(framework, workload.name, step.text, step.lowering, backward, predicted, measured)


def check(names: Sequence[str] = (), progress: Callable[[str], None] = lambda what: None) -> list[StepTime]:
    """Time the steps of named workloads, all by default, in each framework that is installed.

    Raises:
        PlannerError: A name is not that of a workload.
    """
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise PlannerError(f"there is no workload {unknown[0]!r:.80}; there are {', '.join(WORKLOADS)}")
    known: tuple[Framework, ...] = ("torch", "jax", "numpy")
    frameworks = [name for name in known if importlib.util.find_spec(name) is not None]
    times: list[StepTime] = []
    for framework in frameworks:
        for name in names or WORKLOADS:
            progress(f"{framework} {name}")
            times += check_workload(framework, WORKLOADS[name])
            gc.collect()
    return times


def check_text(times: Sequence[StepTime]) -> str:
    """Return a table with a row for each step, then the shares of predictions that are within some factors."""
    lines = [f"{'predicted':>10} {'measured':>10} {'ratio':>6}"]
    for t in times:
        mark = " " if t.within(FACTORS[-1]) else "!"
        lines.append(
            f"{seconds_text(t.predicted):>10} {seconds_text(t.measured):>10} {t.predicted / t.measured:6.2f} {mark} "
            f"{t.framework:5} {t.workload:30} {'b' if t.backward else 'f'}  {t.step}  [{t.lowering}]"
        )
    for framework in dict.fromkeys(t.framework for t in times):
        lines.append(shares_text(framework, [t for t in times if t.framework == framework]))
    if times:
        lines.append(shares_text("all", times))
    return "\n".join(lines)


def shares_text(of: str, times: Sequence[StepTime]) -> str:
    """Return a line that says how many steps were predicted well."""
    shares = [f"{sum(t.within(factor) for t in times) / len(times):.0%} within {factor:g}x" for factor in FACTORS]
    return f"{of}: of {len(times)} steps {', '.join(shares)}"
