"""Why each step runs as it does: every implementation that the backend has, with its cost or the reason against it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from planner.cost.figures import StepCost
from planner.language.units import bytes_text, seconds_text
from planner.program.frameworks import load_backend

if TYPE_CHECKING:
    from planner.program.plan import Plan
    from planner.program.program import Step

__all__ = ["Implementation", "implementations", "implementations_text"]


@dataclasses.dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run a step.

    Attributes:
        name: the row of the backend's table.
        cost: what it is predicted to cost; None where it cannot run the step.
        refusal: why it cannot; "" where it can.
        chosen: whether the plan runs the step so.
    """

    name: str
    cost: StepCost | None
    refusal: str
    chosen: bool

    def __str__(self) -> str:
        if self.cost is None:
            return f"{self.name}: refused, {self.refusal}"
        figures = f"{seconds_text(self.cost.picoseconds / 1e12)}, {bytes_text(self.cost.scratch_bytes)} of scratch"
        return f"{self.name}: {figures}{', chosen' if self.chosen else ''}"


def implementations(plan: Plan) -> tuple[tuple[Implementation, ...], ...]:
    """Return the ways to run each of a plan's steps; see `planner.plan.Plan.implementations`."""
    plan = plan if plan.loop is None else plan.loop.body
    return tuple(_of_step(plan, step) for step in plan.steps)


def _of_step(plan: Plan, step: Step) -> tuple[Implementation, ...]:
    verdicts = load_backend(plan.backend).table.verdicts(step.op, plan.device, step.choice.lowering)
    found = [
        Implementation(name, None, verdict, False)
        if isinstance(verdict, str)
        else Implementation(name, verdict, "", name == step.choice.lowering)
        for name, verdict in verdicts.items()
    ]
    return tuple(sorted(found, key=lambda x: (not x.chosen, x.cost is None, x.cost.picoseconds if x.cost else 0)))


def implementations_text(plan: Plan) -> str:
    """Return the ways to run each step as text, those that were refused by reason."""
    body = plan if plan.loop is None else plan.loop.body
    lines = ["implementations"]
    for step, ways in zip(body.steps, plan.implementations(), strict=True):
        refused: dict[str, list[str]] = {}
        lines.append(f"  {step.op.spec}")
        for way in ways:
            if way.cost is not None:
                lines.append(f"    {way}")
            else:
                refused.setdefault(way.refusal, []).append(way.name)
        lines += [f"    refused, {reason}: {'; '.join(names)}" for reason, names in refused.items()]
    return "\n".join(lines)
