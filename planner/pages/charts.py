"""Charts of a plan: what is in memory while it runs, and where its time goes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from xml.etree.ElementTree import Element

from planner.inspect.text import equation, lowered_to
from planner.language.resolve import shorten
from planner.language.units import bytes_text, seconds_text
from planner.pages.figures import Moment, ticks, time_of
from planner.pages.markup import svg, tag
from planner.program.plan import PlanRecord

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 400, 190, 62, 14, 30
MOST_BARS = 40


def _share(part: int, whole: int) -> float:
    """Return a part of a whole; both may be larger than any float."""
    return float(Fraction(part, whole)) if whole else 0.0


def timeline(moments: Sequence[Moment], title: str, most: int | None = None) -> Element:
    """Return the memory of a plan step by step, as areas one on the other: kept values, other values, scratch.

    Args:
        moments: the steps.
        title: what the plan is called in the label.
        most: the bytes at the top of the axis; the peak by default.
    """
    peak = max((moment.live for moment in moments), default=0)
    peak = max([peak, *(m.measured_live or 0 for m in moments)])
    marks = ticks(max(most or 0, peak))
    top = marks[-1]
    each = (WIDTH - LEFT - 10) / max(len(moments), 1)
    floor = HEIGHT - BOTTOM

    def height(size: int) -> float:
        return (floor - TOP) * _share(size, top)

    parts: list[Element] = []
    for mark in marks:
        y = f"{floor - height(mark):.1f}"
        parts.append(tag("line", x1=str(LEFT), x2=str(WIDTH - 10), y1=y, y2=y, class_="grid"))
        parts.append(tag("text", bytes_text(mark), x=str(LEFT - 6), y=y, dy="4", text_anchor="end", class_="tick"))
    levels: list[tuple[str, str, Callable[[Moment], int]]] = [
        ("scratch", "scratch of the step", lambda m: m.live),
        ("values", "values that a later step reads", lambda m: m.live - m.scratch),
        ("kept", "kept for the backward program", lambda m: m.kept),
    ]
    for name, said, level in levels:  # the largest first: the others cover it
        heights = [height(level(moment)) for moment in moments]
        parts.append(tag("path", tag("title", said), d=_steps(heights, each, floor), class_=f"area {name}"))
    measured = [m.measured_live for m in moments]
    if any(size is not None for size in measured):
        for number, size in enumerate(measured):
            if size is not None:
                x, y = LEFT + number * each, f"{floor - height(size):.1f}"
                parts.append(
                    tag("line", tag("title", f"measured {bytes_text(size)}"), x1=f"{x:.1f}", x2=f"{x + each:.1f}",
                        y1=y, y2=y, class_="measured")
                )  # fmt: skip
    parts += _programs(moments, each, floor)
    if len(moments) <= 200:
        for number, moment in enumerate(moments):
            parts.append(_hover(moment, LEFT + number * each, each, floor))
    label = f"Memory of {title} over its {len(moments)} steps; at most {bytes_text(peak)} are newly allocated."
    return svg(WIDTH, HEIGHT, label, *parts, class_="chart")


def _steps(heights: Sequence[float], each: float, floor: float) -> str:
    """Return the outline of columns of these heights, side by side, as a path."""
    path = [f"M{LEFT} {floor}"]
    for number, height in enumerate(heights):
        path.append(f"L{LEFT + number * each:.1f} {floor - height:.1f}H{LEFT + (number + 1) * each:.1f}")
    return "".join([*path, f"V{floor}Z"])


def _programs(moments: Sequence[Moment], each: float, floor: float) -> Iterable[Element]:
    """Yield the names of the programs below the axis, and a line between them."""
    forward = sum(not moment.backward for moment in moments)
    y = str(floor + 18)
    for name, first, count in (("forward", 0, forward), ("backward", forward, len(moments) - forward)):
        if count:
            x = f"{LEFT + (first + count / 2) * each:.1f}"
            yield tag("text", name, x=x, y=y, text_anchor="middle", class_="tick")
            if first:
                x = f"{LEFT + first * each:.1f}"
                yield tag("line", x1=x, x2=x, y1=str(TOP), y2=str(floor + 8), class_="border")


def _hover(moment: Moment, x: float, width: float, floor: float) -> Element:
    said = [
        f"step {moment.number}, {equation(moment.step)}",
        f"{bytes_text(moment.live)} in all",
        f"{bytes_text(moment.kept)} kept for the backward program",
        f"{bytes_text(moment.scratch)} of scratch",
    ]
    if moment.measured_live is not None:
        said.append(f"measured {bytes_text(moment.measured_live)}")
    return tag(
        "rect", tag("title", "\n".join(said)), x=f"{x:.1f}", y=str(TOP), width=f"{width:.1f}",
        height=f"{floor - TOP}", class_="hover",
    )  # fmt: skip


def time_bars(plan: PlanRecord, moments: Sequence[Moment]) -> Element:
    """Return a bar for the time of each step, the 40 longest if there are more, and what that time goes into."""
    shown = list(moments)
    if len(shown) > MOST_BARS:
        longest = heapq.nlargest(MOST_BARS, shown, key=lambda m: m.picoseconds)
        shown = sorted(longest, key=lambda m: m.number)
    most = max((max(m.picoseconds, m.measured_picoseconds or 0) for m in shown), default=0)
    row = 44 if any(m.measured_picoseconds is not None for m in shown) else 34
    parts: list[Element] = []
    for position, moment in enumerate(shown):
        y = position * row
        goes = time_of(plan, moment.step.choice.cost)
        name = shorten(f"{moment.number}  {equation(moment.step)}  {lowered_to(moment.step)}", 58)
        parts.append(tag("text", name, x="0", y=str(y + 12)))
        time = seconds_text(moment.picoseconds / 1e12)
        parts += _bar(y + 17, _share(moment.picoseconds, most), f"{time}, {goes}" if goes != "neither" else time, goes)
        if moment.measured_picoseconds is not None:
            time = seconds_text(moment.measured_picoseconds / 1e12)
            parts += _bar(y + 29, _share(moment.measured_picoseconds, most), f"measured {time}", "measured")
    label = f"Predicted time of {len(shown)} of {len(moments)} steps. The table of steps has the figures."
    return svg(WIDTH, max(row * len(shown), 1), label, *parts, class_="chart bars")


def _bar(y: int, share: float, text: str, name: str) -> list[Element]:
    width = max(1.0, share * (WIDTH - 170))
    return [
        tag("rect", x="0", y=str(y), width=f"{width:.1f}", height="10", rx="2", class_=f"bar {name}"),
        tag("text", text, x=f"{width + 6:.1f}", y=str(y + 9), class_="tick"),
    ]
