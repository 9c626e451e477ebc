"""The page of one plan, and the page that sets several plans of a contraction side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from xml.etree.ElementTree import Element

from planner.cost.figures import PlanCost
from planner.inspect.analysis import Analysis
from planner.inspect.text import equation, found_text, gap_text, how_text, keeps_text, kept_text, lowered_to, naive_text
from planner.inspect.verdicts import step_verdicts
from planner.language.resolve import shorten
from planner.language.units import bytes_text, count_text, seconds_text
from planner.pages.charts import MOST_BARS, time_bars, timeline
from planner.pages.figures import Moment, graph_of, moments
from planner.pages.markup import scrolling, tag
from planner.pages.tree_drawing import draw_tree
from planner.program.plan import Loop, PlanRecord
from planner.version import __version__

# For how many steps the table lists all implementations, the longest steps first. Each takes a kilobyte.
MOST_LISTED = 100
# The figures of a plan: how to read each from its cost, and how to write it.
FIGURES: tuple[tuple[str, Callable[[PlanCost], int], Callable[[int], str]], ...] = (
    ("time", lambda cost: round(cost.seconds * 1e12) if cost.seconds < 1e290 else 10**302,
     lambda n: seconds_text(n / 1e12)),
    ("FLOPs", lambda cost: cost.flops, count_text),
    ("peak", lambda cost: cost.peak_bytes, bytes_text),
    ("retained", lambda cost: cost.retained_bytes, bytes_text),
    ("moves", lambda cost: cost.bytes_moved, bytes_text),
    ("copies", lambda cost: cost.copied_bytes, bytes_text),
)  # fmt: skip


def title_of(plan: PlanRecord) -> str:
    """Return the title of a plan's page."""
    return f"{shorten(plan.text, 80)}: a plan for {plan.backend}"


def plan_sections(plan: PlanRecord, analysis: Analysis | None = None) -> list[Element]:
    """Return the sections of a plan's page.

    Raises:
        PlannerError: the analysis is that of another plan.
    """
    found = moments(plan, analysis)
    naive = plan.naive
    sections = [_head(plan)]
    if analysis is not None and analysis.warnings:
        sections.append(tag("section", tag("h2", "Warnings"), *[tag("p", text) for text in analysis.warnings]))
    sections.append(_summary([("naive", naive), ("this plan", plan)], _measured_text(found)))
    sections += _pictures(plan, found, naive)
    sections += _steps(plan, found)
    for number, step in enumerate(plan.programs.forward.steps):
        if isinstance(step.op, Loop):
            sections += _slice(step.op.body, f"In each whole slice of step {number}, {lowered_to(step)}")
    source = f"Times by the rates of {plan.device.name}: {plan.device.source}. contraction-planner {__version__}."
    return [*sections, tag("footer", tag("p", source))]


def comparison_sections(plans: Sequence[PlanRecord]) -> list[Element]:
    """Return the sections of a page that compares plans: their figures, then each plan's pictures."""
    first = plans[0]
    named = [(f"{number}: {how_text(plan, first)}", plan) for number, plan in enumerate(plans)]
    header = tag("header", tag("h1", first.text), tag("p", f"{len(plans)} plans side by side.", class_="lead"))
    found = [moments(plan) for plan in plans]
    most = max((moment.live for of in found for moment in of), default=0)
    columns = []
    for (name, plan), steps in zip(named, found, strict=True):
        parts = [tag("h3", "Contraction tree"), scrolling(_tree(plan, steps), f"Contraction tree of {name}")]
        if steps:
            parts += [tag("h3", "Memory"), _memory("At the same scale", plan, steps, most)]
            parts += [tag("h3", "Time"), time_bars(plan, steps)]
        columns.append(tag("section", tag("h2", name), tag("p", gap_text(plan)), *parts))
    return [header, _summary(named), _memory_legend(), _time_legend(), tag("div", *columns, class_="pair")]


def _head(plan: PlanRecord) -> Element:
    wanted = [str(n) for n, operand in enumerate(plan.operands) if operand.requires_grad]
    gradients = f"gradients of operands {', '.join(wanted)}" if wanted else "no gradients"
    how = f"{found_text(plan)}."
    return tag(
        "header",
        tag("h1", plan.text),
        tag("p", f"{plan.backend} · {plan.device.name} · {plan.dtype} · {gradients}", class_="lead"),
        tag("p", f"{how[0].upper()}{how[1:]} {kept_text(plan).capitalize() + '.' if wanted else ''}"),
    )


def _measured_text(found: Sequence[Moment]) -> str:
    """Return what the steps of a plan took beside what was predicted; "" if nothing was measured."""
    taken = [(m.picoseconds, m.measured_picoseconds) for m in found if m.measured_picoseconds is not None]
    if not taken:
        return ""
    predicted, measured = (seconds_text(sum(each) / 1e12) for each in zip(*taken, strict=True))
    return (
        f"These figures are predicted. The steps of this plan took {measured} here, where {predicted} were predicted."
    )


def _summary(plans: Sequence[tuple[str, PlanRecord]], measured: str = "") -> Element:
    """Return the figures of plans, and how each compares with the first."""
    head = [tag("th", "", scope="col"), *[tag("th", name, scope="col") for name, _, _ in FIGURES]]
    rows = []
    base = plans[0][1].cost
    for number, (name, plan) in enumerate(plans):
        cells = [tag("th", name, scope="row", class_="text")]
        for figure, read, write in FIGURES:
            cell = tag("td", write(read(plan.cost)), data_figure=figure, data_value=str(read(plan.cost)))
            if number:
                cell.append(tag("div", *_ratio(read(base), read(plan.cost))))
            cells.append(cell)
        rows.append(tag("tr", *cells, data_plan=name))
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
    said = f"The naive plan: {naive_text(plans[0][1])}." if plans[0][0] == "naive" else ""
    return tag(
        "section",
        tag("h2", "What it costs"),
        tag("p", f"Forward and backward together. Peak: newly allocated bytes at most. Retained: bytes that stay alive "
                 f"for the backward pass. {said}"),
        tag("p", measured, class_="lead") if measured else None,
        scrolling(table, "Costs"),
    )  # fmt: skip


def _ratio(base: int, value: int) -> list[Element]:
    if base == value:
        return [tag("span", "the same")]
    if not base or not value:
        return [tag("span", "all gone", class_="good")] if base else [tag("span", "new", class_="bad")]
    less = value < base
    ratio = Fraction(base, value) if less else Fraction(value, base)
    text = count_text(int(ratio)) if ratio >= 1000 else format(float(ratio), ".3g")
    return [tag("span", f"{text.strip()}x {'less' if less else 'more'}", class_="good" if less else "bad")]


def _tree(plan: PlanRecord, found: Sequence[Moment]) -> Element:
    times = {f"s{m.number}": seconds_text(m.picoseconds / 1e12) for m in found if not m.backward}
    for moment in found:
        if moment.measured_picoseconds is not None and not moment.backward:
            times[f"s{moment.number}"] += f", measured {seconds_text(moment.measured_picoseconds / 1e12)}"
    return draw_tree(graph_of(plan), times)


def _memory_legend(measured: bool = False) -> Element:
    names = {"kept": "kept for the backward program", "values": "other values", "scratch": "scratch of the step"}
    return _legend("Memory:", names, measured)


def _time_legend(measured: bool = False) -> Element:
    names = {
        "compute": "at the rate of products",
        "memory": "at the rate of memory",
        "neither": "below both: launches, single rows, small matrices",
    }
    return _legend("Time:", names, measured)


def _legend(group: str, names: dict[str, str], measured: bool) -> Element:
    marks = [tag("span", group)]
    for name, said in {**names, **({"measured": "measured"} if measured else {})}.items():
        marks += [tag("span", class_=f"key {name}", aria_hidden="true"), tag("span", said)]
    return tag("p", *marks)


def _memory(name: str, plan: PlanRecord, found: Sequence[Moment], most: int | None = None) -> Element:
    cost = plan.cost
    said = f"{name}: at most {bytes_text(cost.peak_bytes)}, {bytes_text(cost.retained_bytes)} retained"
    return tag("figure", tag("figcaption", said), timeline(found, name.lower(), most))


def _pictures(plan: PlanRecord, found: Sequence[Moment], naive: PlanRecord) -> Iterator[Element]:
    measured = any(moment.measured is not None for moment in found)
    yield tag(
        "section",
        tag("h2", "Contraction tree"),
        tag("p", "Operands stand on the left, the result on the right. A dashed line is read at the places that an "
                 "index array names. Green values are kept for the backward program. Wider lines are larger values."),
        scrolling(_tree(plan, found), "Contraction tree"),
    )  # fmt: skip
    if not found:
        yield tag("p", "There are no steps: the result is the operand.")
        return
    theirs = moments(naive)
    most = max(max(moment.live, moment.measured_live or 0) for moment in (*found, *theirs))
    yield tag(
        "section",
        tag("h2", "Memory over time"),
        _memory_legend(measured),
        tag(
            "div",
            _memory("This plan", plan, found, most),
            _memory("The naive plan, at the same scale", naive, theirs, most),
            class_="pair",
        ),
    )
    few = f", the {MOST_BARS} longest of {len(found)}" if len(found) > MOST_BARS else ""
    yield tag(
        "section",
        tag("h2", "Time by step"),
        tag("p", f"Predicted time of each step{few}, and what most of it goes into."),
        _time_legend(measured),
        time_bars(plan, found),
    )


def _steps(plan: PlanRecord, found: Sequence[Moment]) -> Iterator[Element]:
    """Yield the table of the steps, with what each could run as."""
    if not found:
        return
    longest = sorted(found, key=lambda m: -m.picoseconds)[:MOST_LISTED]
    listed = {moment.number for moment in longest}
    titles = ("#", "step", "lowered to", "FLOPs", "moves", "copies", "live", "time", "keeps")
    text = {"step", "lowered to", "keeps"}
    head = [tag("th", title, scope="col", class_="text" if title in text else None) for title in titles]
    rows: list[Element] = []
    for moment in found:
        if moment.backward and not any(m.backward for m in found[: found.index(moment)][-1:]):
            peak = plan.cost.backward.peak_bytes if plan.cost.backward else 0
            note = f"backward, needs {bytes_text(peak)} at most"
            rows.append(tag("tr", tag("th", note, colspan=str(len(titles)), class_="text", scope="rowgroup")))
        rows += _step_rows(plan, moment, moment.number in listed)
    few = f" The implementations of the {MOST_LISTED} longest steps are listed." if len(found) > MOST_LISTED else ""
    yield tag(
        "section",
        tag("h2", "Steps"),
        tag("p", f"Open an implementation to see what else could run the step, and why it does not.{few}"),
        scrolling(tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows)), "Steps"),
    )


def _step_rows(plan: PlanRecord, moment: Moment, listed: bool) -> Iterator[Element]:
    step, cost = moment.step, moment.step.choice.cost
    lowered: Element | str = lowered_to(step)
    if listed and not isinstance(step.op, Loop):
        others = [tag("li", str(verdict)) for verdict in step_verdicts(plan, step)]
        lowered = tag("details", tag("summary", lowered_to(step)), tag("ul", *others))
    figures = [count_text(cost.flops), *map(bytes_text, (cost.bytes_moved, cost.copied_bytes, moment.live))]
    yield tag(
        "tr",
        tag("td", str(moment.number)),
        tag("td", shorten(equation(step), 120), class_="text wide"),
        tag("td", lowered, class_="text"),
        *[tag("td", figure) for figure in figures],
        tag("td", seconds_text(moment.picoseconds / 1e12)),
        tag("td", keeps_text(plan, step), class_="text wide"),
        data_step=str(moment.number),
    )
    if moment.measured is not None:
        measured = moment.measured.measured
        read = [
            "-" if measured.flops is None else count_text(measured.flops),
            "-" if measured.bytes_moved is None else bytes_text(measured.bytes_moved),
            "-",
            "-" if measured.live_bytes is None else bytes_text(measured.live_bytes),
            "-" if measured.seconds is None else seconds_text(measured.seconds),
        ]
        off = "; ".join(
            f"{name} off by {round(ratio) if ratio >= 100 else format(ratio, '.2g')}x"
            for name, ratio in moment.measured.off
        )
        cells = [tag("td"), tag("td", "measured", class_="text"), tag("td"), *[tag("td", figure) for figure in read]]
        yield tag("tr", *cells, tag("td", off, class_="text bad"), class_="measured")


def _slice(body: PlanRecord, title: str) -> Iterator[Element]:
    """Yield the tree and the steps of one slice of a loop, and of the loops within."""
    found = moments(body)
    yield tag("section", tag("h2", title), scrolling(_tree(body, found), title))
    yield from _steps(body, found)
    for number, step in enumerate(body.programs.forward.steps):
        if isinstance(step.op, Loop):
            yield from _slice(step.op.body, f"{title}: in a slice of its step {number}, {lowered_to(step)}")
