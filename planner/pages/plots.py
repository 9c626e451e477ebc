"""The pictures of a plan's page, drawn with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from planner.inspect.analysis import Analysis
from planner.inspect.text import equation, lowered_to
from planner.language.errors import PlannerError
from planner.language.resolve import shorten
from planner.language.units import bytes_text, seconds_text
from planner.pages.charts import MOST_BARS
from planner.pages.figures import Moment, graph_of, moments, time_of
from planner.pages.tree_drawing import places_of
from planner.program.plan import PlanRecord

# Colours that stay apart in grey: dark, middle and light.
KEPT, VALUES, SCRATCH, OVERHEAD = "#0b5d3b", "#4a8fd0", "#f0c078", "#b8c0c8"
COMPUTE, MEMORY = "#6b4fa8", "#62b7b9"
_LARGEST = 1e300


def load_pyplot() -> Any:
    """Return `matplotlib.pyplot`.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise PlannerError("plotting needs matplotlib: pip install 'contraction-planner[viz]'") from None
    return pyplot


def save_figure(figure: Any, path: str | os.PathLike[str] | None) -> None:
    """Save a figure if a path is given.

    Raises:
        PlannerError: the file cannot be written, or matplotlib does not know the format.
    """
    if path is not None:
        try:
            figure.savefig(path)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise PlannerError(f"nothing was drawn to {str(path)!r:.200}: {error}") from None


def plot_plan(plan: PlanRecord, path: str | os.PathLike[str] | None = None, analysis: Analysis | None = None) -> Any:
    """Draw a plan; see `planner.plan.Plan.plot`."""
    found = moments(plan, analysis)
    pyplot = load_pyplot()
    bars = min(len(found), MOST_BARS)
    figure, (tree, memory, time) = pyplot.subplots(
        3, 1, figsize=(9, 7 + 0.3 * bars), layout="constrained", height_ratios=(3, 3, max(1, 0.5 * bars))
    )
    figure.suptitle(shorten(plan.text, 80), parse_math=False)
    _draw_tree(tree, plan)
    _draw_memory(memory, found)
    _draw_time(time, plan, found)
    save_figure(figure, path)
    return figure


def _draw_tree(axes: Any, plan: PlanRecord) -> None:
    graph = graph_of(plan)
    places = places_of(graph)
    for edge in graph.edges:
        start, end = places[edge.source], places[edge.target]
        middles = [place.x + place.width / 2 for place in (start, end)]
        axes.plot(middles, [-start.y, -end.y], color=KEPT if edge.kept else OVERHEAD,
                  linestyle="--" if edge.gathers else "-", zorder=1)  # fmt: skip
    for node in graph.nodes:
        place = places[node.name]
        text = f"{shorten(node.title, 34)}\n{shorten(node.detail, 34)}"
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": VALUES if node.kind == "step" else OVERHEAD}
        axes.text(place.x + place.width / 2, -place.y, text, fontsize=7, ha="center", va="center", bbox=box,
                  family="monospace", parse_math=False)  # fmt: skip
    right = max(place.x + place.width for place in places.values())
    axes.set_xlim(0, right + 20)
    axes.set_ylim(-max(place.y for place in places.values()) - 40, 0)
    axes.set_axis_off()


def _draw_memory(axes: Any, found: Sequence[Moment]) -> None:
    if not found:
        axes.set_axis_off()
        return
    edges = [number - 0.5 for number in range(len(found) + 1)]
    below = [0.0] * len(found)
    for label, colour, sizes in (
        ("kept for the backward program", KEPT, [m.kept for m in found]),
        ("other values", VALUES, [m.live - m.kept - m.scratch for m in found]),
        ("scratch", SCRATCH, [m.scratch for m in found]),
    ):
        top = [low + _float(size) for low, size in zip(below, sizes, strict=True)]
        axes.stairs(top, edges, baseline=below, fill=True, color=colour, label=label)
        below = top
    measured = [(m.number, m.measured_live) for m in found if m.measured_live is not None]
    if measured:
        axes.hlines([_float(size) for _, size in measured], [n - 0.5 for n, _ in measured],
                    [n + 0.5 for n, _ in measured], color="black", label="measured")  # fmt: skip
    forward = sum(not moment.backward for moment in found)
    if forward < len(found):
        axes.axvline(forward - 0.5, color="black", linestyle=":", linewidth=1)
    axes.yaxis.set_major_formatter(lambda value, _: bytes_text(round(value)))
    axes.set_ylabel("memory")
    axes.set_xlabel("step, forward then backward" if forward < len(found) else "step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)


def _draw_time(axes: Any, plan: PlanRecord, found: Sequence[Moment]) -> None:
    longest = sorted(found, key=lambda m: -m.picoseconds)[:MOST_BARS]
    shown = sorted(longest, key=lambda m: m.number)
    colours = {"compute": COMPUTE, "memory": MEMORY, "neither": OVERHEAD}
    labels = [shorten(f"{m.number}  {equation(m.step)}  {lowered_to(m.step)}", 60) for m in shown]
    goes = [time_of(plan, m.step.choice.cost) for m in shown]
    measured = any(m.measured_picoseconds is not None for m in shown)
    height = 0.4 if measured else 0.7
    axes.barh(range(len(shown)), [_float(m.picoseconds) / 1e12 for m in shown], height,
              color=[colours[g] for g in goes])  # fmt: skip
    if measured:
        axes.barh([n + height for n in range(len(shown))], [_float(m.measured_picoseconds or 0) / 1e12 for m in shown],
                  height, fill=False, edgecolor="black", label="measured")  # fmt: skip
        axes.legend(fontsize=8)
    axes.set_yticks(range(len(shown)), labels, fontsize=7, family="monospace", parse_math=False)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: seconds_text(value) if value > 0 else "0")
    axes.set_xlabel("predicted time; violet: at the rate of products, teal: of memory, grey: below both")


def _float(number: int) -> float:
    return float(min(number, int(_LARGEST)))
