"""`Plan.analyze`: runs a plan, measures it, and sets each figure beside the predicted one."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.cost.figures import Cost
from planner.inspect.analysis import LEAST_SECONDS, Analysis, AnalyzedStep, Figures
from planner.inspect.meter import Meter, Timer, meter_of
from planner.inspect.text import equation, lowered_to
from planner.language.errors import PlannerError
from planner.program.frameworks import load_backend
from planner.program.loops import parts
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Program, Step
from planner.run import check_call

# If the median ratio of measured to predicted time exceeds this, the rates are not those of this machine.
WRONG_RATES = 3


def analyze(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any], rounds: int = 3) -> Analysis:
    """Run a plan and measure it; see `Plan.analyze`."""
    if isinstance(rounds, bool) or not hasattr(rounds, "__index__") or rounds < 1:
        raise PlannerError(f"rounds={rounds!r:.80} must be a positive integer")
    rounds = int(rounds)  # NumPy has integers of its own
    backend = check_call(plan, operands, indices)
    backend.refuse_dataless(operands, indices)
    meter = meter_of(plan, backend, operands, indices, rounds)
    with meter.measuring():
        steps, totals = _measure(plan, meter)
    return Analysis(
        plan.text, plan.backend, plan.device.name, plan.dtype, rounds, tuple(steps), tuple(totals), _warnings(steps)
    )


def analyze_steps(
    plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any], timer: Timer
) -> list[AnalyzedStep]:
    """Run the steps of a plan and measure them, but not its programs as a whole. Each is timed by the timer."""
    meter = meter_of(plan, load_backend(plan.backend), operands, indices, 1, timer)
    with meter.measuring():
        return _measure_steps(plan, meter)[0]


def _measure_steps(
    plan: PlanRecord, meter: Meter, of: str = ""
) -> tuple[list[AnalyzedStep], list[Figures], list[Figures]]:
    """Measure every step of both programs. Return rows, and the measured figures of each program's steps.

    `of` says which loop's slice the plan is for.
    """
    programs = plan.programs
    forward, backward = programs.forward, programs.backward
    meter.begin((), None)
    stepwise = meter.backend.stepwise(plan, meter.operands, meter.indices)
    figures, values = meter.steps(stepwise, forward)
    retained = _kept_bytes(plan, meter, values)
    figures = [dataclasses.replace(f, retained_bytes=r) for f, r in zip(figures, retained, strict=True)]
    predicted = [
        dataclasses.replace(_predict(s), retained_bytes=r)
        for s, r in zip(forward.steps, _predict_kept(plan), strict=True)
    ]
    steps = _rows(f"forward{of}", 0, forward, predicted, figures)
    back: list[Figures] = []
    if backward is not None:
        result, kept = values[programs.result], {v: values[v] for v in programs.kept}
        del values
        meter.begin(list(kept.values()), result)
        gradient = meter.output_gradient(result)
        del result
        stepwise = meter.backend.stepwise(plan, meter.operands, meter.indices, gradient, kept)
        del kept
        back, values = meter.steps(stepwise, backward)
        steps += _rows(f"backward{of}", len(forward.steps), backward, [_predict(s) for s in backward.steps], back)
    del stepwise, values  # free what they hold before anything else is measured
    for number, loop, inputs in _loops(plan, meter):
        slices, arrays = _first_slice(plan, loop, inputs, meter.indices)
        body_meter = meter_of(loop.body, meter.backend, slices, arrays, meter.rounds, meter.timer)
        steps += _measure_steps(loop.body, body_meter, f" of a slice in step {number}{of}")[0]
    return steps, figures, back


def _loops(plan: PlanRecord, meter: Meter) -> Iterator[tuple[int, Loop, list[Any]]]:
    """Run the forward program up to its last loop. Yield each loop's number, the loop and its inputs."""
    steps = plan.programs.forward.steps
    last = max((number for number, step in enumerate(steps) if isinstance(step.op, Loop)), default=-1)
    if last < 0:
        return
    stepwise = meter.backend.stepwise(plan, meter.operands, meter.indices)
    values = dict(stepwise.values)
    for number, step in enumerate(steps[: last + 1]):
        inputs = [values[v] for v in step.inputs]
        if isinstance(step.op, Loop):
            yield number, step.op, inputs
        if number < last:
            values.update(zip(step.outputs, stepwise.bind(step, inputs)(), strict=True))


def _first_slice(
    plan: PlanRecord, loop: Loop, inputs: Sequence[Any], indices: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the first slice of a loop's inputs and of its index arrays."""
    spec, shapes = loop.spec, dict(plan.resolved.index_shapes)
    part = next(parts(loop.axes, spec))
    slices = [x.reshape(spec.shape(term))[part.of(term)] for x, term in zip(inputs, spec.inputs, strict=True)]
    arrays = {}
    for gather in spec.gathers:
        raw = indices[gather.array]
        values = raw.values if hasattr(raw, "prepared_framework") else raw
        arrays[gather.array] = values.reshape(shapes[gather.array])[part.of(gather.axes)]
    return slices, arrays


def _measure(plan: PlanRecord, meter: Meter) -> tuple[list[AnalyzedStep], list[AnalyzedStep]]:
    """Measure both programs, step by step and as a whole. Of a loop the steps of the first slice are measured too."""
    steps, figures, back = _measure_steps(plan, meter)
    cost = plan.cost
    whole = _whole(cost.forward, cost.forward.retained_bytes)
    totals = [AnalyzedStep("forward", None, "", how, whole, measured) for how, measured in meter.forward(figures)]
    if cost.backward is not None:
        whole = _whole(cost.backward, None)
        totals += [AnalyzedStep("backward", None, "", how, whole, measured) for how, measured in meter.backward(back)]
    return steps, totals


def _rows(
    program: str, first: int, steps: Program, predicted: Sequence[Figures], measured: Sequence[Figures]
) -> list[AnalyzedStep]:
    return [
        AnalyzedStep(program, number, equation(step), lowered_to(step), before, after)
        for number, (step, before, after) in enumerate(zip(steps.steps, predicted, measured, strict=True), first)
    ]


def _predict(step: Step) -> Figures:
    cost = step.choice.cost
    return Figures(cost.picoseconds / 1e12, cost.flops, cost.bytes_moved, step.live_bytes)


def _whole(cost: Cost, retained: int | None) -> Figures:
    return Figures(cost.seconds, cost.flops, cost.bytes_moved, cost.peak_bytes, retained)


def _predict_kept(plan: PlanRecord) -> list[int]:
    """Return, for each forward step, the bytes that are kept because of it and no earlier step."""
    programs = plan.programs
    variables = programs.variables
    seen = {*range(len(plan.operands)), variables[programs.result].base}
    kept = []
    for step in programs.forward.steps:
        fresh = {variables[v].base for v in step.keeps} - seen
        kept.append(sum(variables[base].bytes for base in fresh))
        seen |= fresh
    return kept


def _kept_bytes(plan: PlanRecord, meter: Meter, values: Mapping[int, Any]) -> list[int]:
    """Return the same figures as `_predict_kept`, for the memory that the kept values really hold."""
    programs = plan.programs
    seen = set(meter.buffers([*meter.operands, values[programs.result]]))
    kept = []
    for step in programs.forward.steps:
        held = meter.buffers([values[v] for v in step.keeps if v in programs.kept])
        kept.append(sum(n for key, n in held.items() if key not in seen))
        seen |= set(held)
    return kept


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
