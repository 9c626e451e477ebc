"""`Plan.analyze`: a plan is run and measured, each figure beside the predicted one."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planner.cost.figures import Cost
from planner.inspect.meter import Figures, Meter, meter_of
from planner.inspect.text import equation
from planner.language.errors import PlannerError
from planner.program.program import Program, Step
from planner.run import check_call

if TYPE_CHECKING:
    from planner.program.plan import Plan

__all__ = ["Analysis", "AnalyzedStep", "Figures", "analyze"]

# A figure is off where it is this many times the other; what is small is not judged: timers and objects of Python
# would be measured, not the plan.
FACTOR = 2
LEAST_SECONDS = 50e-6
LEAST_BYTES = 2**14
# The median of measured over predicted from which on the machine is another than the one that was calibrated.
WRONG_RATES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class AnalyzedStep:
    """A step, or a program as a whole: predicted figures and measured ones.

    Attributes:
        program: "forward" or "backward".
        number: the step's place in `Plan.steps`; None for the program as a whole.
        text: what it computes; empty for a program.
        lowering: the implementation of a step; of a program "", or "compiled" where it ran as one jitted function.
        predicted: as the plan has them.
        measured: as they were found.
    """

    program: str
    number: int | None
    text: str
    lowering: str
    predicted: Figures
    measured: Figures

    @property
    def off(self) -> tuple[tuple[str, float], ...]:
        """What is off by more than a factor of 2: "time" or "live", and measured over predicted."""
        found = []
        for name, field, least in (("time", "seconds", LEAST_SECONDS), ("live", "live_bytes", LEAST_BYTES)):
            predicted, measured = getattr(self.predicted, field), getattr(self.measured, field)
            if predicted is None or measured is None or max(predicted, measured) <= least:
                continue
            # Below what is judged there is no telling how far.
            ratio = max(measured, least) / max(predicted, least)
            if not 1 / FACTOR <= ratio <= FACTOR:
                found.append((name, ratio))
        return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Analysis:
    """What `Plan.analyze` found; `print` shows it as a table.

    Attributes:
        text: the plan's spec.
        backend, device, dtype: of the plan.
        rounds: of how many runs each time is the median.
        steps: of the forward program, then of the backward program.
        totals: the programs as wholes; in JAX also as one compiled function each.
        warnings: what casts doubt on the predictions.
    """

    text: str
    backend: str
    device: str
    dtype: str
    rounds: int
    steps: tuple[AnalyzedStep, ...]
    totals: tuple[AnalyzedStep, ...]
    warnings: tuple[str, ...]

    def total(self, program: str, lowering: str = "") -> AnalyzedStep:
        """Return the row of a program as a whole.

        Raises:
            KeyError: there is none.
        """
        for row in self.totals:
            if (row.program, row.lowering) == (program, lowering):
                return row
        raise KeyError(program)

    def to_json(self) -> str:
        """Return the figures as JSON, with what is off in each row."""
        fields = dataclasses.asdict(self)
        for name in ("steps", "totals"):
            for row, made in zip(getattr(self, name), fields[name], strict=True):
                made["off"] = dict(row.off)
        return json.dumps(fields, indent=1, allow_nan=False)

    def __str__(self) -> str:
        from planner.inspect.analysis_text import analysis_text

        return analysis_text(self)


def analyze(plan: Plan, operands: Sequence[Any], indices: Mapping[str, Any], rounds: int = 3) -> Analysis:
    """Run a plan and measure it; see `Plan.analyze`."""
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise PlannerError(f"rounds={rounds!r:.80} is no number of runs: give an int from 1 on")
    backend = check_call(plan, operands, indices)
    backend.refuse_dataless(operands, indices)
    meter = meter_of(plan, backend, operands, indices, rounds)
    with meter.measuring():
        steps, totals = _measure(plan, meter)
    return Analysis(
        plan.text, plan.backend, plan.device.name, plan.dtype, rounds, tuple(steps), tuple(totals), _warnings(steps)
    )


def _measure_steps(plan: Plan, meter: Meter) -> tuple[list[AnalyzedStep], list[Figures], list[Figures]]:
    """Every step of both programs: rows, and what was measured of each program's."""
    programs = plan.programs
    forward, backward = programs.forward, programs.backward
    meter.begin((), None)
    given = meter.backend.stepwise(plan, meter.operands, meter.indices)
    figures, values = meter.steps(given, forward)
    retained = _kept_bytes(plan, meter, values)
    figures = [dataclasses.replace(f, retained_bytes=r) for f, r in zip(figures, retained, strict=True)]
    predicted = [
        dataclasses.replace(_predicted(s), retained_bytes=r)
        for s, r in zip(forward.steps, _predicted_kept(plan), strict=True)
    ]
    steps = _rows("forward", 0, forward, predicted, figures)
    back: list[Figures] = []
    if backward is not None:
        result, kept = values[programs.result], {v: values[v] for v in programs.kept}
        del values
        meter.begin(list(kept.values()), result)
        gradient = meter.output_gradient(result)
        del result
        given = meter.backend.stepwise(plan, meter.operands, meter.indices, gradient, kept)
        del kept
        back, values = meter.steps(given, backward)
        steps += _rows("backward", len(forward.steps), backward, [_predicted(s) for s in backward.steps], back)
    del given, values  # else what they hold would stand in the way of what is measured next
    return steps, figures, back


def _measure(plan: Plan, meter: Meter) -> tuple[list[AnalyzedStep], list[AnalyzedStep]]:
    """Both programs, step by step and as wholes; a loop over slices as a whole only."""
    steps, figures, back = ([], [], []) if plan.loop is not None else _measure_steps(plan, meter)
    cost = plan.cost
    whole = _whole(cost.forward, cost.forward.retained_bytes)
    totals = [AnalyzedStep("forward", None, "", how, whole, found) for how, found in meter.forward(figures)]
    if cost.backward is not None:
        whole = _whole(cost.backward, None)
        totals += [AnalyzedStep("backward", None, "", how, whole, found) for how, found in meter.backward(back)]
    return steps, totals


def _rows(
    program: str, first: int, steps: Program, predicted: Sequence[Figures], measured: Sequence[Figures]
) -> list[AnalyzedStep]:
    return [
        AnalyzedStep(program, number, equation(step), step.choice.lowering, before, after)
        for number, (step, before, after) in enumerate(zip(steps.steps, predicted, measured, strict=True), first)
    ]


def _predicted(step: Step) -> Figures:
    cost = step.choice.cost
    return Figures(cost.picoseconds / 1e12, cost.flops, cost.bytes_moved, step.live_bytes)


def _whole(cost: Cost, retained: int | None) -> Figures:
    return Figures(cost.seconds, cost.flops, cost.bytes_moved, cost.peak_bytes, retained)


def _predicted_kept(plan: Plan) -> list[int]:
    """Bytes that each forward step is the first to make the backward program keep."""
    programs = plan.programs
    variables = programs.variables
    seen = {*range(len(plan.operands)), variables[programs.result].base}
    found = []
    for step in programs.forward.steps:
        fresh = {variables[v].base for v in step.keeps} - seen
        found.append(sum(variables[base].bytes for base in fresh))
        seen |= fresh
    return found


def _kept_bytes(plan: Plan, meter: Meter, values: Mapping[int, Any]) -> list[int]:
    """The same, of the memory that the kept values really hold."""
    programs = plan.programs
    seen = set(meter.buffers([*meter.operands, values[programs.result]]))
    found = []
    for step in programs.forward.steps:
        held = meter.buffers([values[v] for v in step.keeps if v in programs.kept])
        found.append(sum(n for key, n in held.items() if key not in seen))
        seen |= set(held)
    return found


def _warnings(steps: Sequence[AnalyzedStep]) -> tuple[str, ...]:
    ratios = []
    for step in steps:
        predicted, measured = step.predicted.seconds, step.measured.seconds
        if predicted and measured and max(predicted, measured) > LEAST_SECONDS:
            ratios.append(max(measured, LEAST_SECONDS) / max(predicted, LEAST_SECONDS))
    if not ratios:
        return ()
    median = statistics.median(ratios)
    if 1 / WRONG_RATES <= median <= WRONG_RATES:
        return ()
    return (
        f"the machine's rates look wrong: steps take {median:.3g} times as long as predicted at the median; "
        "run `python -m planner calibrate` or pass device=Device(...)",
    )
