"""An analysis as text: under each step as predicted the same as measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.inspect.text import MOST_ROWS, table_lines
from planner.language.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from planner.inspect.analyze import Analysis, AnalyzedStep
    from planner.inspect.meter import Figures

__all__ = ["analysis_text"]


def analysis_text(analysis: Analysis) -> str:
    """Return what `print(analysis)` shows."""
    of = f"medians of {analysis.rounds} rounds" if analysis.rounds > 1 else "one round"
    head = f"{analysis.text}        {analysis.backend} · {analysis.device} · {analysis.dtype} · {of}"
    rows: list[Sequence[str]] = [["#", "step", "lowered to", "FLOPs", "moves", "live", "retained", "time"]]
    for program in ("forward", "backward"):
        rows += _program(analysis, program)
    lines = [head, *table_lines(rows, (0, 1, 2, 8))]
    if any(row.off for row in (*analysis.steps, *analysis.totals)):
        lines.append("  ! time or live bytes are off by more than 2x; under 50 us and 16 KiB they are not judged")
    lines += [f"warning: {warning}" for warning in analysis.warnings]
    return "\n".join(lines)


def _program(analysis: Analysis, program: str) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for step in analysis.steps:
        if step.program == program:
            rows.append([str(step.number), step.text, step.lowering, *_figures(step.predicted)])
            rows.append(_measured(step, "  measured"))
    if len(rows) > MOST_ROWS:
        cut = (len(rows) - MOST_ROWS) // 2
        rows = [*rows[: MOST_ROWS // 2], [f"  ... {cut} more steps, see analysis.steps"], *rows[-MOST_ROWS // 2 :]]
    for number, total in enumerate(total for total in analysis.totals if total.program == program):
        if not number:
            rows.append(["", f"the {program} program", "", *_figures(total.predicted)])
        rows.append(_measured(total, f"  {total.lowering or 'measured'}"))
    return rows


def _measured(row: AnalyzedStep, label: str) -> list[str]:
    off = ", ".join(f"{name} x{ratio:{'.2g' if ratio < 99.5 else '.0f'}}" for name, ratio in row.off)
    return ["!" if off else "", "", label, *_figures(row.measured), off]


def _figures(figures: Figures) -> list[str]:
    return [
        "-" if figures.flops is None else count_text(figures.flops),
        *(
            "-" if n is None else bytes_text(n)
            for n in (figures.bytes_moved, figures.live_bytes, figures.retained_bytes)
        ),
        "-" if figures.seconds is None else seconds_text(figures.seconds),
    ]
