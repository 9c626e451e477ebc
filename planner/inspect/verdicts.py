"""Why each step runs as it does: every implementation that the backend has, with its cost or why it was refused."""

from __future__ import annotations

import dataclasses

from planner.cost.device import Device
from planner.cost.figures import StepCost
from planner.language.units import bytes_text, seconds_text
from planner.program.frameworks import load_backend
from planner.program.implementations import Table
from planner.program.ops import Guard, Op
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Step


@dataclasses.dataclass(frozen=True, slots=True)
class ImplementationVerdict:
    """One implementation that a step could run, or the reason why it cannot.

    Example:
        >>> import planner
        >>> p = planner.plan("ij, jk -> ik", (30, 40), (40, 50), backend="numpy")
        >>> [verdict.name for verdict in p.implementations()[0] if verdict.chosen]
        ['matmul']

    Attributes:
        name: the row of the backend's table.
        cost: its predicted cost; None if it cannot run the step.
        refusal: why it cannot run the step; "" if it can.
        chosen: whether the plan runs the step with it.
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


def verdicts(plan: PlanRecord) -> tuple[tuple[ImplementationVerdict, ...], ...]:
    """Return a verdict on each implementation of each step; see `planner.plan.Plan.implementations`."""
    return tuple(step_verdicts(part, step) for part, step in plan.inner_steps())


def step_verdicts(plan: PlanRecord, step: Step) -> tuple[ImplementationVerdict, ...]:
    """Return a verdict on each implementation of a step: the chosen one, others by their time, then refused ones."""
    table, chosen, judged = load_backend(plan.backend).table, step.choice.lowering, []
    names = table.names_for(plan)
    for name, found in table_verdicts(table, step.op, plan.device, chosen).items():
        if names is not None and name not in names and isinstance(found, StepCost):
            found = "plans with gradients or index arrays leave it out"
        cost, refusal = (found, "") if isinstance(found, StepCost) else (None, found)
        judged.append(ImplementationVerdict(name, cost, refusal, name == chosen))
    return tuple(sorted(judged, key=lambda v: (not v.chosen, v.cost is None, v.cost.picoseconds if v.cost else 0)))


def table_verdicts(table: Table, op: Op, device: Device, chosen: str = "") -> dict[str, StepCost | str]:
    """Return, for each row of a table, what it would cost to run an op, or why the row cannot run it.

    Stock rows that cannot run the op are left out, and variants except the chosen one.
    """
    verdicts: dict[str, StepCost | str] = {}
    for row in table.rows.values():
        if row.variant_of and row.name != chosen:
            continue
        priced = table.price(row.name, op, device)
        if priced is not None:
            verdicts[row.name] = priced.cost
        elif not row.stock and not isinstance(op, Guard | Loop):
            verdicts[row.name] = row.refusal(op, device) or ""
    return verdicts


def implementations_text(plan: PlanRecord) -> str:
    """Return the implementations of each step as text. Refused ones are grouped by their reason."""
    lines = ["implementations"]
    for (_, step), step_verdicts in zip(plan.inner_steps(), verdicts(plan), strict=True):
        refused: dict[str, list[str]] = {}
        lines.append(f"  {step.op.spec}")
        for verdict in step_verdicts:
            if verdict.cost is not None:
                lines.append(f"    {verdict}")
            else:
                refused.setdefault(verdict.refusal, []).append(verdict.name)
        lines += [f"    refused, {reason}: {'; '.join(names)}" for reason, names in refused.items()]
    return "\n".join(lines)
