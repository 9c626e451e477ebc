"""An analysis of a plan: what was predicted of each step, what was measured, and both as text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from planner.inspect.text import MOST_ROWS, table_lines
from planner.language.units import bytes_text, count_text, seconds_text

__all__ = ["Analysis", "AnalyzedStep", "Figures", "analysis_text"]


# A figure is off where it is this many times the other; what is small is not judged: timers and objects of Python
# would be measured, not the plan.
FACTOR = 2
LEAST_SECONDS = 50e-6
LEAST_BYTES = 2**14


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Cost of a step or a program; None is what nothing tells.

    Attributes:
        seconds: time.
        flops: a multiply-add is 2.
        bytes_moved: bytes read and written.
        live_bytes: of a step, bytes newly allocated by its program while it runs; of a program, its peak.
        retained_bytes: bytes that stay alive for the backward program.
    """

    seconds: float | None
    flops: int | None = None
    bytes_moved: int | None = None
    live_bytes: int | None = None
    retained_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AnalyzedStep:
    """A step, or a program as a whole: predicted figures and measured ones.

    Attributes:
        program: "forward" or "backward".
        number: the step's place in `Plan.steps`; None for the program as a whole.
        text: what it computes; empty for a program.
        lowering: the implementation of a step; of a program "", or "compiled" where it ran as one jitted function.
        predicted: as the plan has them.
        measured: as they were found.
    """

    program: str
    number: int | None
    text: str
    lowering: str
    predicted: Figures
    measured: Figures

    @property
    def off(self) -> tuple[tuple[str, float], ...]:
        """What is off by more than a factor of 2: "time" or "live", and measured over predicted."""
        found = []
        for name, field, least in (("time", "seconds", LEAST_SECONDS), ("live", "live_bytes", LEAST_BYTES)):
            predicted, measured = getattr(self.predicted, field), getattr(self.measured, field)
            if predicted is None or measured is None or max(predicted, measured) <= least:
                continue
            # Below what is judged there is no telling how far.
            ratio = max(measured, least) / max(predicted, least)
            if not 1 / FACTOR <= ratio <= FACTOR:
                found.append((name, ratio))
        return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Analysis:
    """What `Plan.analyze` found; `print` shows it as a table.

    Attributes:
        text: the plan's spec.
        backend, device, dtype: of the plan.
        rounds: of how many runs each time is the median.
        steps: of the forward program, then of the backward program.
        totals: the programs as wholes; in JAX also as one compiled function each.
        warnings: what casts doubt on the predictions.
    """

    text: str
    backend: str
    device: str
    dtype: str
    rounds: int
    steps: tuple[AnalyzedStep, ...]
    totals: tuple[AnalyzedStep, ...]
    warnings: tuple[str, ...]

    def total(self, program: str, lowering: str = "") -> AnalyzedStep:
        """Return the row of a program as a whole.

        Raises:
            KeyError: there is none.
        """
        for row in self.totals:
            if (row.program, row.lowering) == (program, lowering):
                return row
        raise KeyError(program)

    def to_json(self) -> str:
        """Return the figures as JSON, with what is off in each row."""
        fields = dataclasses.asdict(self)
        for name in ("steps", "totals"):
            for row, made in zip(getattr(self, name), fields[name], strict=True):
                made["off"] = dict(row.off)
        return json.dumps(fields, indent=1, allow_nan=False)

    def __str__(self) -> str:
        return analysis_text(self)


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
