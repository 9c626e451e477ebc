"""What the demo prints of its comparisons: a block for each case, and a closing table. No line is over 100 wide."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from planner.demo.cases import Case
from planner.demo.runs import Row, WayFigures
from planner.demo.ways import OURS
from planner.pages.tables import Table

_COLUMNS = "  {:<22}{:>9}{:>10}{:>13}{:>10}{:>10}  {}"
HEADINGS = _COLUMNS.format("", "forward", "peak", "and backward", "peak", "kept", "").rstrip()


def bytes_text(count: float) -> str:
    """Write bytes with three digits and a decimal prefix; a dash for what was not measured."""
    if math.isnan(count):
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Write a time with three digits; a dash for what was not measured."""
    if math.isnan(seconds):
        return "-"
    for unit, size in (("h", 3600), ("min", 120), ("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / (60 if unit == 'min' else size))} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us"


def ratio_text(ratio: float) -> str:
    """Write a ratio with two digits, such as 63x."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A case as measured: planner's figures, and those of the ways whose results are the same."""

    case: Case
    ours: WayFigures
    theirs: dict[str, WayFigures]

    @staticmethod
    def of(rows: Sequence[Row]) -> Comparison | None:
        """Collect the rows of a case; None where one differs, or nothing can be compared."""
        ours = [row.figures for row in rows if row.way.label == OURS]
        theirs = {row.way.label: row.figures for row in rows if row.way.label != OURS}
        if not ours or not theirs or any(row.differs for row in rows):
            return None
        return Comparison(rows[0].case, ours[0], theirs)

    def least(self, quantity: str) -> tuple[str, float]:
        """Return which of the other ways has the least of a quantity, and how much that is."""
        known = {label: getattr(figures, quantity) for label, figures in self.theirs.items()}
        label = min(known, key=lambda way: math.inf if math.isnan(known[way]) else known[way])
        return label, known[label]

    def gain(self, quantity: str = "gradient_seconds") -> float:
        """Return how many times less of a quantity planner takes than the way that is fastest with gradients."""
        label, _ = self.least("gradient_seconds")
        ours = getattr(self.ours, quantity)
        return float(getattr(self.theirs[label], quantity) / ours) if ours else math.inf


def header(case: Case) -> str:
    """Return the lines above a case: what it is, its spec and its shapes."""
    return f"{case.title} ({case.framework}, document {case.seed})\n  {case.workload.spec}   {_shapes(case)}"


def _shapes(case: Case) -> str:
    return ", ".join("x".join(map(str, shape)) or "a number" for shape in case.workload.shapes)


def line(row: Row) -> str:
    """Return the line of a way: its figures, with a note if they are not medians of several runs."""
    return _COLUMNS.format(row.way.label, *_cells(row)).rstrip()


def _cells(row: Row) -> list[str]:
    figures, about = row.figures, "~" if row.figures.extrapolated else ""
    times_and_bytes = (
        seconds_text(figures.seconds),
        bytes_text(figures.peak_bytes),
        seconds_text(figures.gradient_seconds),
        bytes_text(figures.gradient_peak_bytes),
        bytes_text(figures.retained_bytes),
    )
    note = "run once" if figures.once else ""
    if row.differs:
        note = f"DIFFERS: {row.differs}"
    elif figures.extrapolated and row.way.part:
        note = f"~ by {row.way.part.size} rows"
    return [*(cell if cell == "-" else about + cell for cell in times_and_bytes), note]


def case_table(rows: Sequence[Row], said: Sequence[str] = ()) -> Table:
    """Return the ways of a case as a table of a page, with a bar for the time of both passes."""
    case, found = rows[0].case, Comparison.of(rows)
    head = ["way", "forward", "peak", "and backward", "peak of both", "kept", "note"]
    words = [f"{case.workload.spec} of {_shapes(case)}", *said, gain_line(found).strip() if found else ""]
    bars = "forward and backward", [row.figures.gradient_seconds for row in rows]
    cells = [[row.way.label, *_cells(row)] for row in rows]
    return Table(f"{case.title} ({case.framework})", words, head, cells, ("note", bars[0]), bars)


def gain_line(comparison: Comparison) -> str:
    """Say in a line what planner gains over the fastest of the other ways."""
    label, _ = comparison.least("gradient_seconds")
    both, forward = comparison.gain(), comparison.gain("seconds")
    ours, theirs = comparison.ours.gradient_peak_bytes, comparison.theirs[label].gradient_peak_bytes
    if 0.95 * theirs <= ours <= 1.05 * theirs:
        memory = "as much memory"
    else:
        memory = f"{_share_text(ours / theirs)} of the memory" if ours and theirs else f"{bytes_text(ours)} of memory"
    return f"  Against {label}, planner is {ratio_text(both)} as fast ({ratio_text(forward)} forward), with {memory}."


def _share_text(share: float) -> str:
    return f"1/{ratio_text(1 / share)[:-1]}" if share < 0.67 else ratio_text(share)


def table(comparisons: Sequence[Comparison]) -> str:
    """Lay out all comparisons, largest gain first: forward and backward pass, against the fastest other way."""
    layout = "  {:<50}{:>9}{:>10}{:>8}{:>10}{:>10}"
    lines = [layout.format("", "time of", "time of", "", "peak of", "peak of").rstrip()]
    lines += [layout.format("", "theirs", "planner", "faster", "theirs", "planner")]
    return "\n".join([*lines, *(layout.format(*cells) for cells in gains(comparisons))])


def gains(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return the rows of that table."""
    rows = []
    for found in sorted(comparisons, key=Comparison.gain, reverse=True):
        label, seconds = found.least("gradient_seconds")
        peaks = (bytes_text(figures.gradient_peak_bytes) for figures in (found.theirs[label], found.ours))
        what = f"{found.case.framework:<6} {found.case.title}"
        theirs, ours = seconds_text(seconds), seconds_text(found.ours.gradient_seconds)
        rows.append([what, theirs, ours, ratio_text(found.gain()), *peaks])
    return rows
