"""What an audit finds: for each line its calls and costs, what planner would take, and the code to write instead."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from planner.api import plan
from planner.audits.measure import measure_site
from planner.audits.sites import Call, Figures, Place, Record
from planner.language.dtypes import itemsize
from planner.language.errors import PlannerError
from planner.language.spec import term_axes, term_gathers
from planner.language.units import bytes_text, seconds_text
from planner.plan import Plan
from planner.program.frameworks import load_backend
from planner.program.program import live_bytes

__all__ = ["Site", "figure_texts", "find_sites", "source_of_figures"]

# What a change must save to be named: a tenth of the time, and so many seconds in all calls; or a tenth of the peak or
# of the retained bytes of a call, and so many bytes.
_SHARE, _SECONDS, _BYTES = 0.1, 50e-6, 2**16
# What may copy operands into another order; other functions multiply and add elements where they lie.
_CONTRACTIONS = ("einsum", "matmul", "dot_general")


@dataclasses.dataclass(frozen=True)
class Site:
    """One contraction at one line of a program.

    Example:
        >>> import jax.numpy as jnp
        >>> import planner
        >>> (site,) = planner.audit(lambda x, w: x @ w, jnp.ones((3, 4)), jnp.ones((4, 5)))
        >>> site.function, site.spec, site.calls, site.today.peak_bytes, site.naive.cost.flops
        ('dot_general', 'ij, jk -> ik', 1, 60, 120)

    Attributes:
        place: the file and the line.
        function: what the program calls: "einsum", "matmul", "mul", "mul, sum" or "index_add".
        calls: how many calls there were.
        spec: the contraction in planner's language; the code reads rows where it has brackets.
        code: the call to write instead. Names that the audit did not find are `x0`, `x1` and so on.
        plan: the plan of that call.
        today: what a call takes as the program makes it; if nothing was measured, what the naive plan takes.
        planned: what the call to write takes; if nothing was measured, what the plan takes.
    """

    place: Place
    function: str
    calls: int
    spec: str
    code: str
    plan: Plan
    today: Figures
    planned: Figures

    @functools.cached_property
    def naive(self) -> Plan:
        """The framework's own way to compute the spec, as a plan. The program may take other steps."""
        return self.plan.naive

    @property
    def wasteful(self) -> bool:
        """Whether planner would save a tenth of the time or of the bytes, and cost no more than that of the other."""
        before, after = self.today, self.planned
        saves_time = before.seconds - after.seconds > max(_SHARE * before.seconds, _SECONDS / self.calls)
        pairs = (before.peak_bytes, after.peak_bytes), (before.retained_bytes, after.retained_bytes)
        saves_bytes = any(old - new > max(_SHARE * old, _BYTES) for old, new in pairs)
        costs_bytes = any(new - old > max(_SHARE * old, _BYTES) for old, new in pairs)
        return (saves_time and not costs_bytes) or (saves_bytes and after.seconds <= (1 + _SHARE) * before.seconds)

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
        first = calls[0]
        figures = [_predicted(chosen.naive, _copied_today(chosen.naive, first.function)), _predicted(chosen)]
        if measure and first.today is not None:
            with contextlib.suppress(Exception):  # then the figures are predicted
                figures = measure_site(problem, first.today, chosen, figures)
        sites.append(Site(first.place, first.function, len(calls), problem.spec, problem.code, chosen, *figures))
    sites.sort(key=lambda site: -site.calls * site.today.seconds)
    return tuple(sites), unread


def _predicted(plan: Plan, copied: int | None = None) -> Figures:
    cost = plan.cost
    return Figures(cost.seconds, usual_peak(plan), cost.retained_bytes, cost.copied_bytes if copied is None else copied)


def usual_peak(plan: Plan) -> int:
    """Return the peak of a plan's call where operands are finite, and indices are in range, int64 and not negative.

    The plan's own peak holds for other arrays too: it has room for the copies that guards make of them.
    """
    programs, peak = plan.programs, plan.cost.peak_bytes
    variables, back, retained = programs.variables, programs.backward, plan.cost.retained_bytes
    if load_backend(plan.backend).compiles:
        return peak
    steps, held = programs.forward.steps, (programs.result, *programs.kept)
    usual = live_bytes(steps, variables, programs.forward.given, held)[1]
    if programs.copies and len(steps) > 1:
        usual += programs.copies
    if back is not None:
        conjugate = variables[programs.output_gradient].bytes if plan.dtype.startswith("complex") else 0
        start = retained + conjugate
        usual = max(usual, live_bytes(back.steps, variables, back.given, back.results, start)[1])
    return min(usual, peak)


def _copied_today(naive: Plan, function: str) -> int:
    """Return the bytes of the rows that a call reads, and of the operands that a contraction copies."""
    spec, copied = naive.resolved.spec, naive.cost.copied_bytes if function in _CONTRACTIONS else 0
    for term, operand in zip(spec.inputs, naive.operands, strict=True):
        if term_gathers(term):
            copied += itemsize(operand.dtype) * math.prod(spec.by_axis[axis] for axis in term_axes(term))
    return copied


def figure_texts(figures: Figures, sites: Sequence[Site]) -> list[str]:
    """Return time, peak, copied and retained bytes as text. Among measured sites, ~ marks what is predicted."""
    mark = "~" * (not figures.measured and any(site.today.measured for site in sites))
    sizes = (figures.peak_bytes, figures.copied_bytes, figures.retained_bytes)
    peak, copied, retained = map(bytes_text, sizes)
    return [mark + seconds_text(figures.seconds), mark + peak, copied, mark + retained]


def source_of_figures(sites: Sequence[Site]) -> str:
    """Say which figures were measured."""
    count = sum(site.today.measured for site in sites)
    if not count:
        return "All figures are predicted, those of today as of the naive plan."
    rest = "" if count == len(sites) else ", but for those with a ~, which are predicted"
    return f"Time, peak and retained bytes are measured by running each call again{rest}. Copied bytes are predicted."
