"""Why each step runs as it does: every implementation that the backend has, with its cost or the reason against it."""

from __future__ import annotations

import dataclasses

from planner.cost.figures import StepCost
from planner.language.units import bytes_text, seconds_text
from planner.program.frameworks import load_backend
from planner.program.plan import PlanRecord
from planner.program.program import Step

__all__ = ["Verdict", "implementations_text", "verdicts"]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
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


def verdicts(plan: PlanRecord) -> tuple[tuple[Verdict, ...], ...]:
    """Return a verdict on each implementation of each step; see `planner.plan.Plan.implementations`."""
    plan = plan if plan.loop is None else plan.loop.body
    return tuple(_of_step(plan, step) for step in plan.steps)


def _of_step(plan: PlanRecord, step: Step) -> tuple[Verdict, ...]:
    chosen = step.choice.lowering
    found = []
    for name, cost in load_backend(plan.backend).table.verdicts(step.op, plan.device, chosen).items():
        found.append(
            Verdict(name, None, cost, False) if isinstance(cost, str) else Verdict(name, cost, "", name == chosen)
        )
    return tuple(sorted(found, key=lambda x: (not x.chosen, x.cost is None, x.cost.picoseconds if x.cost else 0)))


def implementations_text(plan: PlanRecord) -> str:
    """Return the ways to run each step as text, those that were refused by reason."""
    body = plan if plan.loop is None else plan.loop.body
    lines = ["implementations"]
    for step, ways in zip(body.steps, verdicts(plan), strict=True):
        refused: dict[str, list[str]] = {}
        lines.append(f"  {step.op.spec}")
        for way in ways:
            if way.cost is not None:
                lines.append(f"    {way}")
            else:
                refused.setdefault(way.refusal, []).append(way.name)
        lines += [f"    refused, {reason}: {'; '.join(names)}" for reason, names in refused.items()]
    return "\n".join(lines)
