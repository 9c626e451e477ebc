"""`tradeoff`: the plans that no other plan beats in time, peak and retained bytes at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from planner.api import check_names, plan
from planner.compare import Comparison
from planner.cost.device import Device
from planner.cost.objective import OBJECTIVES
from planner.language.errors import PlannerError, PlannerLimitError
from planner.language.options import SEARCHES, is_name
from planner.language.resolve import shorten
from planner.language.units import bytes_text, parse_bytes, seconds_text
from planner.plan import Plan
from planner.program.loops import least_seconds
from planner.search.alternatives import alternatives
from planner.search.verify import keep_fitting

# How many limits to try between the least and the most of a quantity on the front, and how many below the least peak.
RUNGS = 4
# Each limit below the least peak is this share of it. Only loops over slices are within such limits. The front ends
# where they take more than SLOWEST times as long as the fastest plan.
LESS, SLOWEST = 0.9, 4


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Tradeoff(Comparison):
    """Plans of one contraction. None is as good as another one in time, peak and retained bytes, and better in one.

    Example:
        >>> import planner
        >>> front = planner.tradeoff("ab, bc, cd -> ad", (40, 3), (3, 50), (50, 30), backend="numpy")
        >>> all(p.cost.seconds >= front[0].cost.seconds for p in front)
        True

    Attributes:
        plans: the plans, sorted by predicted time.
    """

    def plot(self, path: Any = None) -> Any:
        """Draw peak against time: one point for each plan, coloured by its retained bytes.

        Args:
            path: the file to save the drawing to; None to save none. Its ending sets the format.

        Returns:
            The matplotlib axes.

        Raises:
            PlannerError: matplotlib is not installed, or the file cannot be written.
        """
        from planner.pages.plots import load_pyplot, save_figure

        pyplot = load_pyplot()
        costs = [point.cost for point in self.plans]
        figure, axes = pyplot.subplots(layout="constrained")
        points = axes.scatter(
            [c.seconds for c in costs], [c.peak_bytes for c in costs], c=[c.retained_bytes for c in costs], zorder=2
        )
        for number, cost in enumerate(costs):
            axes.annotate(str(number), (cost.seconds, cost.peak_bytes), xytext=(4, 4), textcoords="offset points")
        axes.set_xlabel("predicted time")
        axes.set_ylabel("peak")
        axes.set_title(shorten(self.plans[0].text, 80), parse_math=False)
        axes.xaxis.set_major_formatter(lambda value, _: seconds_text(value) if value > 0 else "0")
        axes.yaxis.set_major_formatter(lambda value, _: bytes_text(round(value)))
        axes.grid(alpha=0.3)
        figure.colorbar(points, label="retained", format=lambda value, _: bytes_text(round(value)))
        save_figure(figure, path)
        return axes


def tradeoff(
    spec: Any,
    *operands: Any,
    sizes: Mapping[str, int] | Sequence[int] | None = None,
    optimize: Any = "auto",
    memory_limit: int | str | None = None,
    retain_limit: int | str | None = None,
    index_mode: str = "raise",
    dtype: Any = None,
    backend: str | None = None,
    device: Device | None = None,
    **indices: Any,
) -> Tradeoff:
    """Find the plans that are best for some balance of time, peak and retained bytes, of all that the searches find.

    The searches are those for each objective, and those for the least time under limits: below, between and at the
    figures of the plans found so far. Plans that go slice by slice are among them if they take at most four times as
    long as the fastest plan.

    Example:
        >>> import planner
        >>> a, b, c = (planner.Operand(s, requires_grad=True) for s in ((64, 8), (8, 64), (64, 64)))
        >>> front = planner.tradeoff("ij, jk, kl -> il", a, b, c, backend="numpy")
        >>> front[0].cost.retained_bytes > front[-1].cost.retained_bytes
        True

    Args:
        spec: as in `plan`, and so are all other arguments.
        *operands: arrays, `Operand` stand-ins, or shapes (float32).
        sizes: sizes that do not follow from the operands.
        optimize: how trees are found. An explicit path holds for all plans. Nothing is measured here.
        memory_limit: only plans whose peak is within it.
        retain_limit: only plans that retain no more.
        index_mode: what happens to an index out of range.
        dtype: dtype of the computation and the result.
        backend: "torch", "jax" or "numpy".
        device: rates of the machine that times are predicted for.
        **indices: index arrays or their shapes, by letter.

    Returns:
        The plans, sorted by time. After Ctrl-C, the plans found until then.

    Raises:
        PlannerLimitError: no plan is within the limits.
        PlannerError: for the reasons that `plan` has, or for ``optimize="measure"``.
    """
    check_names(tradeoff, indices)
    if is_name(optimize) and optimize == "measure":
        raise PlannerError("tradeoff compares predictions: pass another optimize=, then time its plans")
    options: dict[str, Any] = {
        "sizes": sizes,
        "optimize": optimize,
        "memory_limit": parse_bytes(memory_limit, "memory_limit"),
        "retain_limit": parse_bytes(retain_limit, "retain_limit"),
        "index_mode": index_mode,
        "dtype": dtype,
        "backend": backend,
        "device": device,
    }

    def make(objective: str, **others: int | None) -> Plan:
        return plan(spec, *operands, minimize=objective, **{**options, **others}, **indices)

    def make_within(**limits: int) -> list[Plan]:
        """Return the fastest plan within limits, if there is one."""
        try:
            point = make("time", **limits)
        except PlannerLimitError:
            return []
        names = [f"{name}={bytes_text(limit)}" for name, limit in limits.items()]
        return [dataclasses.replace(point, origin=", ".join([point.origin, *names]))]

    plans: list[Plan] = []
    try:
        first = make("time")
        plans.append(first)
        plans += [make(objective) for objective in OBJECTIVES if objective != "time"]
        if first.options.optimize in SEARCHES:
            others = (alternative.plan for alternative in alternatives(first, 100))
            plans += keep_fitting(others)
        # Under a limit a search may find a compromise that is best for no single objective.
        for name, field in (("memory_limit", "peak_bytes"), ("retain_limit", "retained_bytes")):
            for rung in _rungs(sorted({getattr(point.cost, field) for point in _front(plans)})):
                plans += make_within(**{name: rung})
        longest = SLOWEST * min(point.cost.seconds for point in plans)
        for _ in range(RUNGS if least_seconds(first.contraction) <= longest else 0):
            leaner = make_within(memory_limit=int(LESS * min(point.cost.peak_bytes for point in plans)))
            if not leaner or leaner[0].cost.seconds > longest:
                break
            plans += leaner
        # At the limits that a plan just meets, a loop may be as lean and faster.
        seen: set[tuple[int, int]] = set()
        while rows := {_bytes_of(point) for point in _front(plans)} - seen:
            for peak, retained in sorted(rows):
                plans += make_within(memory_limit=peak, retain_limit=retained)
            seen |= rows
    except KeyboardInterrupt:
        if not plans:
            raise
    return Tradeoff(_front(plans))


def _rungs(values: Sequence[int]) -> list[int]:
    """Return limits between the least and the most of some values, evenly by ratio, without the values themselves."""
    low, high = max(1, values[0]), values[-1]
    if high <= low:
        return []
    ratio = high / low
    rungs = {round(low * ratio ** (step / (RUNGS + 1))) for step in range(1, RUNGS + 1)}
    return sorted(rungs - set(values))


def _bytes_of(point: Plan) -> tuple[int, int]:
    """Return the peak and the retained bytes of a plan."""
    return point.cost.peak_bytes, point.cost.retained_bytes


def _front(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Return the plans that no other plan beats, sorted by time. Of plans with equal figures one is returned."""

    def figures(point: Plan) -> tuple[float, ...]:
        cost = point.cost
        return cost.seconds, cost.peak_bytes, cost.retained_bytes, cost.flops, cost.bytes_moved

    front: list[Plan] = []
    for point in sorted(plans, key=figures):
        _, peak, retained, *_ = figures(point)
        # No plan that came before takes longer.
        if not any(p.cost.peak_bytes <= peak and p.cost.retained_bytes <= retained for p in front):
            front.append(point)
    return tuple(front)
