"""Predicted against measured times: each step of the named workloads is timed alone, as its plan runs it."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence

from planner.api import plan
from planner.calibrate.labs import Framework
from planner.inspect.analyze import analyze_steps
from planner.language.errors import PlannerError
from planner.language.units import seconds_text
from planner.program.implementations import MASK
from planner.program.plan import PlanRecord
from planner.workloads import WORKLOADS, Workload

__all__ = ["StepTime", "check", "check_text"]


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
# Each step is timed so often, or once if the workload is predicted to take longer than FEWER_SECONDS.
ROUNDS, FEWER_SECONDS = 5, 1.0


def check_workload(framework: Framework, workload: Workload) -> Iterator[StepTime]:
    """Time every step of a workload at its CPU sizes; no step if the workload needs too much memory or time here.

    If the plan goes slice by slice, the steps of the first slice are timed.
    """
    workload = workload.cpu()
    operands = workload.operands(framework, values="normal", requires_grad=framework == "torch")
    indices = workload.indices(framework)
    record: PlanRecord = plan(workload.spec, *operands, **workload.options, **indices)
    if record.cost.peak_bytes > MOST_PEAK or record.cost.seconds > MOST_SECONDS:
        return
    rounds = ROUNDS if record.cost.seconds < FEWER_SECONDS else 1
    for step in analyze_steps(record, operands, indices, rounds):
        predicted, measured = step.predicted.seconds, step.measured.seconds
        if step.lowering == MASK or step.lowering.startswith("loop over") or predicted is None or measured is None:
            continue
        backward = step.program.startswith("backward")
        yield StepTime(framework, workload.name, step.text, step.lowering, backward, predicted, measured)


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
