"""What an audit finds: for each line its calls and costs, what planner would take, and the code to write instead."""

from __future__ import annotations

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
from planner.language.resolve import shorten
from planner.language.spec import term_axes, term_gathers
from planner.language.units import bytes_text, seconds_text
from planner.plan import Plan
from planner.program.frameworks import load_backend
from planner.program.program import live_bytes

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
        shapes: how many shapes these calls had. The figures and the plan are those of one: of the shape that takes the
            most time in all its calls, among those that planner would change if there are any.
        backward: whether JAX derived the call from that line, for a gradient. It changes with the line.
        unmeasured: why its figures are predicted, if they should have been measured; else "".
        spec: the contraction in planner's language; the code reads rows where it has brackets.
        code: the call to write instead, "" if `backward`. Names that the audit did not find are `x0`, `x1` and so on.
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
    shapes: int = 1
    backward: bool = False
    unmeasured: str = ""

    @functools.cached_property
    def naive(self) -> Plan:
        """The framework's own way to compute the spec, as a plan. The program may take other steps."""
        return self.plan.naive

    @property
    def wasteful(self) -> bool:
        """Whether planner would make the call leaner, or faster without more bytes; see `verdict`."""
        return bool(self.verdict)

    @property
    def verdict(self) -> str:
        """What planner would change, such as "faster, leaner" or "leaner, 1.2x slower here"; "" for nothing.

        Leaner: a tenth less of the peak or of the retained bytes, however long the call takes. Faster: a tenth less
        time, and no more bytes. A difference of time counts only beyond the noise of the measurements.
        """
        before, after = self.today, self.planned
        noise = max(_SHARE * before.seconds, before.noise + after.noise)
        gained = before.seconds - after.seconds
        pairs = (before.peak_bytes, after.peak_bytes), (before.retained_bytes, after.retained_bytes)
        leaner = any(old - new > max(_SHARE * old, _BYTES) for old, new in pairs)
        fatter = any(new - old > max(_SHARE * old, _BYTES) for old, new in pairs)
        words = ["faster"] * (gained > max(noise, _SECONDS / self.calls) and (leaner or not fatter))
        words += ["leaner"] * leaner
        if leaner and -gained > noise:
            words.append(f"{after.seconds / before.seconds:.2g}x slower{' here' * after.measured}")
        return ", ".join(words)

    def __str__(self) -> str:
        return f"{self.place}: {self.function}, {self.spec}"


def find_sites(record: Record, backend: str, measure: bool) -> tuple[tuple[Site, ...], dict[str, int]]:
    """Plan the recorded calls, those of one line and one contraction together, and measure them if asked.

    Returns:
        The sites, those of one line and code as one, and how many calls planner refused, by the reason.
    """
    groups: dict[Any, list[Call]] = {}
    for call in record:
        groups.setdefault((call.place, call.function, call.backward, *call.problem.key), []).append(call)
    lines: dict[Any, list[Site]] = {}
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
        reason = ""
        if measure and first.today is None:
            reason = "not all calls between its arrays and the result were seen"
        elif measure and first.today is not None:
            try:
                figures = measure_site(problem, first.today, chosen, figures)
            except Exception as error:  # of the program's own calls: no audit stops a program
                said = str(error).strip().partition("\n")[0]
                reason = f"when its calls ran again: {type(error).__name__}{f': {said}' * bool(said)}"
        site = Site(
            first.place,
            first.function,
            len(calls),
            problem.spec,
            "" if first.backward else problem.code,
            chosen,
            today=figures[0],
            planned=figures[1],
            backward=first.backward,
            unmeasured=reason,
        )
        code = dataclasses.replace(problem, sizes={}).code
        lines.setdefault((first.place, first.function, first.backward, code), []).append(site)
    by_cost = sorted(lines.values(), key=lambda sites: -sum(map(_seconds, sites)))
    return tuple(map(_as_one, by_cost)), unread


def _seconds(site: Site) -> float:
    return site.calls * site.today.seconds


def _as_one(sites: Sequence[Site]) -> Site:
    """Return the sites of one line and code, of a shape each, as one."""
    shown = max(sites, key=lambda site: (site.wasteful, _seconds(site)))
    return dataclasses.replace(shown, calls=sum(site.calls for site in sites), shapes=len(sites))


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


def calls_text(site: Site) -> str:
    """Return how many calls a site has, in how many shapes."""
    return f"{site.calls} calls, {site.shapes} shapes" if site.shapes > 1 else str(site.calls)


def instead_of(site: Site, sites: Sequence[Site]) -> str:
    """Return what to write instead of the line of a site. Where only its gradient is wasteful, the line itself."""
    if site.code:
        return site.code
    line = site.place.line
    said = f"backward of line {line}: goes when line {line} is changed"
    forward = [other.code for other in sites if other.place == site.place and other.code and not other.wasteful]
    return f"{said}, to {forward[0]}" if forward else said


def why_predicted(sites: Sequence[Site]) -> list[str]:
    """Say of sites whose figures should have been measured why they are predicted: a line for each reason."""
    places: dict[str, list[str]] = {}
    for site in sites:
        if site.unmeasured:
            places.setdefault(shorten(site.unmeasured), []).append(str(site.place))
    return [f"{', '.join(dict.fromkeys(found))}: predicted; {reason}" for reason, found in places.items()]


def source_of_figures(sites: Sequence[Site]) -> str:
    """Say which figures were measured."""
    count = sum(site.today.measured for site in sites)
    rest = "" if count == len(sites) else ", but for those with a ~, which are predicted"
    said = f"Time, peak and retained bytes are measured by running each call again{rest}. Copied bytes are predicted."
    if not count:
        said = "All figures are predicted, those of today as of the naive plan."
    recorded = [any(operand.requires_grad for operand in site.plan.operands) for site in sites]
    with_gradients = "with its gradients" if all(recorded) else "with its gradients where operands need some"
    said += f" Figures are of one call, {with_gradients if any(recorded) else 'without gradients'}."
    several = any(site.shapes > 1 for site in sites)
    return said + " Of several shapes, they are those of the one that takes the most time." * several
