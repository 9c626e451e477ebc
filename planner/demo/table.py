"""The table: a line for each row, grouped by contraction and framework."""

from __future__ import annotations

from collections.abc import Sequence

from planner.demo.cases import Case
from planner.demo.figures import bytes_text, seconds_text
from planner.demo.rows import Row

__all__ = ["table"]

_HEADINGS = ("", "forward", "peak", "with gradients", "peak", "retained", "values")


def _cells(row: Row) -> tuple[str, ...]:
    figures, about = row.figures, "~" if row.figures.extrapolated else ""
    measured = (
        seconds_text(figures.seconds),
        bytes_text(figures.peak_bytes),
        seconds_text(figures.gradient_seconds),
        bytes_text(figures.gradient_peak_bytes),
        bytes_text(figures.retained_bytes),
    )
    verdict = f"DIFFERS: {row.differs}" if row.differs else "equal"
    return (f"  {row.way.label}", *(about + cell for cell in measured), verdict)


def table(rows: Sequence[Row]) -> str:
    """Lay out all rows, grouped by contraction and framework."""
    lines: list[tuple[str, ...]] = []
    previous: Case | None = None
    for row in rows:
        if row.case is not previous:
            shapes = " and ".join("x".join(map(str, shape)) for shape in row.case.workload.shapes)
            lines.append((f"{row.case.name}   {row.case.workload.spec}   {shapes}   {row.case.framework}",))
        previous = row.case
        lines.append(_cells(row))
    full = [line for line in (_HEADINGS, *lines) if len(line) > 1]
    widths = [max(len(line[column]) for line in full) for column in range(len(_HEADINGS))]

    def laid_out(line: tuple[str, ...]) -> str:
        if len(line) == 1:
            return f"\n{line[0]}"
        cells = (cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True))
        return "  ".join((line[0].ljust(widths[0]), *cells, line[-1]))

    text = "\n".join(laid_out(line) for line in (_HEADINGS, *lines))
    if any(row.figures.extrapolated for row in rows):
        text += "\n\n~ run on a part of the rows, and extrapolated"
    return text
