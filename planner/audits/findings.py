"""What an audit finds: for each line its calls and costs, what planner would take, and the code to write instead."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

from planner.api import plan
from planner.audits.measure import Times, measured_times
from planner.audits.sites import Call, Place, Record
from planner.language.errors import PlannerError
from planner.plan import Plan

__all__ = ["Site", "find_sites"]

# What a change must save to be named: a tenth of the time, and so many seconds in all calls; or a tenth of the peak or
# of the retained bytes of a call, and so many bytes.
_SHARE, _SECONDS, _BYTES = 0.1, 50e-6, 2**16


@dataclasses.dataclass(frozen=True)
class Site:
    """One contraction at one line of a program.

    Attributes:
        place: the file and the line.
        function: what the program calls: "einsum", "matmul", "mul", "mul, sum" or "index_add".
        calls: how many calls there were.
        spec: the contraction in planner's language; the code reads rows where it has brackets.
        code: the call to write instead. Names that the audit did not find are `x0`, `x1` and so on.
        plan: the plan of that call; its `naive` is what the program does today.
        times: measured times of a call; None if the audit did not measure, or could not.
    """

    place: Place
    function: str
    calls: int
    spec: str
    code: str
    plan: Plan
    times: Times | None

    @functools.cached_property
    def naive(self) -> Plan:
        """What the program does today, as a plan."""
        return self.plan.naive

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of a call today and with planner, gradients included: measured if the audit measured."""
        if self.times is not None:
            return self.times.now, self.times.planned
        return self.naive.cost.seconds, self.plan.cost.seconds

    @property
    def copied_bytes(self) -> int:
        """Bytes that a call copies today: operands into another order, and rows that are read."""
        steps = self.naive.programs.forward.steps
        taken = [step for step in steps if len(step.inputs) == 1 and step.op.arrays and not step.choice.view]
        rows = sum(self.naive.programs.variables[step.outputs[0]].bytes for step in taken)
        return self.naive.cost.copied_bytes + rows

    @property
    def wasteful(self) -> bool:
        """Whether planner would save a tenth of the time or of the bytes, and cost no more than that of the other."""
        (now, planned), before, after = self.seconds, self.naive.cost, self.plan.cost
        saves_time = now - planned > max(_SHARE * now, _SECONDS / self.calls)
        pairs = (before.peak_bytes, after.peak_bytes), (before.retained_bytes, after.retained_bytes)
        saves_bytes = any(old - new > max(_SHARE * old, _BYTES) for old, new in pairs)
        costs_bytes = any(new - old > max(_SHARE * old, _BYTES) for old, new in pairs)
        return (saves_time and not costs_bytes) or (saves_bytes and planned <= (1 + _SHARE) * now)

    def __str__(self) -> str:
        return f"{self.place}: {self.function}, {self.spec}"


def find_sites(record: Record, backend: str, measure: bool) -> tuple[tuple[Site, ...], dict[str, int]]:
    """Plan the recorded calls, those of one line and one contraction together, and measure them if asked.

    Returns:
        The sites, and how many calls planner refused, by the reason.
    """
    groups: dict[Any, list[Call]] = {}
    for call in record:
        groups.setdefault((call.place, call.function, *call.problem.key), []).append(call)
    sites: list[Site] = []
    unread: dict[str, int] = {}
    for calls in groups.values():
        problem = calls[0].problem
        shapes = {letter: index.operand.shape for letter, index in problem.indices.items()}
        operands = [array.operand for array in problem.operands]
        try:
            options: dict[str, Any] = {"sizes": problem.sizes or None, "backend": backend, **shapes}
            options |= {name: getattr(problem, name) for name in ("index_mode", "device", "dtype")}
            chosen = plan(problem.spec, *operands, **options)
        except PlannerError as error:
            unread[str(error)] = unread.get(str(error), 0) + len(calls)
            continue
        times = None
        if measure:
            with contextlib.suppress(Exception):  # then the times are predicted
                times = measured_times(problem, chosen)
        first = calls[0]
        sites.append(Site(first.place, first.function, len(calls), problem.spec, problem.code, chosen, times))
    sites.sort(key=lambda site: -site.calls * site.seconds[0])
    return tuple(sites), unread
