"""The analysis of a plan: predicted and measured figures of each step, and both as text."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from planner.inspect.files import save
from planner.inspect.text import MOST_ROWS, table_lines
from planner.language.units import bytes_text, count_text, seconds_text
from planner.program.implementations import MASK

# A measured figure is off if it differs from the predicted one by more than this factor. Small figures are not judged:
# they would measure timers and objects of Python, not the plan.
FACTOR = 2
LEAST_SECONDS = 50e-6
LEAST_BYTES = 2**14


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """The cost of a step or a program. A figure is None if unknown.

    Attributes:
        seconds: time.
        flops: FLOPs. A multiply-add counts as 2.
        bytes_moved: bytes read and written.
        live_bytes: of a step, the bytes that its program has newly allocated while it runs; of a program, its peak.
        retained_bytes: bytes that stay alive for the backward program.
    """

    seconds: float | None
    flops: int | None = None
    bytes_moved: int | None = None
    live_bytes: int | None = None
    retained_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AnalyzedStep:
    """The predicted and the measured figures of a step, or of a whole program.

    Attributes:
        program: "forward" or "backward"; of a loop's slice "forward of a slice in step 0", and so on.
        number: the step's place in `Plan.steps`, or in those of the slice; None for a whole program.
        text: what the step computes; empty for a program.
        lowering: the implementation of a step. For a program it is "", or "compiled" if it ran as one jitted function.
        predicted: the plan's figures.
        measured: the measured figures.
    """

    program: str
    number: int | None
    text: str
    lowering: str
    predicted: Figures
    measured: Figures

    @property
    def off(self) -> tuple[tuple[str, float], ...]:
        """The figures that are off by more than a factor of 2: "time" or "live", and measured divided by predicted.

        Guards are not judged: nothing is predicted for them.
        """
        if self.lowering == MASK:
            return ()
        off = []
        for name, field, least in (("time", "seconds", LEAST_SECONDS), ("live", "live_bytes", LEAST_BYTES)):
            predicted, measured = getattr(self.predicted, field), getattr(self.measured, field)
            if predicted is None or measured is None or max(predicted, measured) <= least:
                continue
            # A figure that is too small to judge counts as the smallest that is judged.
            ratio = max(measured, least) / max(predicted, least)
            if not 1 / FACTOR <= ratio <= FACTOR:
                off.append((name, ratio))
        return tuple(off)


@dataclasses.dataclass(frozen=True, slots=True)
class Analysis:
    """The result of `Plan.analyze`. `print` shows it as a table.

    Example:
        >>> import json
        >>> import numpy as np
        >>> import planner
        >>> p = planner.plan("ij, jk -> ik", (30, 40), (40, 50), backend="numpy")
        >>> found = p.analyze(np.ones((30, 40), "float32"), np.ones((40, 50), "float32"))
        >>> len(found.steps), found.total("forward").measured.seconds > 0, json.loads(found.to_json())["backend"]
        (1, True, 'numpy')

    Attributes:
        text: the plan's spec.
        backend, device, dtype: the plan's backend, device and dtype.
        rounds: each time is the median of so many runs.
        steps: the steps of the forward program, then those of the backward program, then those of a slice of each loop.
        totals: the whole programs; in JAX also each program as the caller compiles it.
        warnings: reasons to doubt the predictions.
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
            KeyError: there is no such row.
        """
        for row in self.totals:
            if (row.program, row.lowering) == (program, lowering):
                return row
        raise KeyError(program)

    def to_json(self) -> str:
        """Return the figures as JSON. Each row lists which of its figures are off."""
        fields = dataclasses.asdict(self)
        for name in ("steps", "totals"):
            for row, entry in zip(getattr(self, name), fields[name], strict=True):
                entry["off"] = dict(row.off)
        return json.dumps(fields, indent=1, allow_nan=False)

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Return the analysis as a trace, which Perfetto (ui.perfetto.dev) and Chrome's tracing page open.

        Steps are slices, measured ones and predicted ones on tracks of their own. Live bytes are counters.

        Example:
            >>> import json
            >>> import numpy as np
            >>> import planner
            >>> a, b = np.ones((20, 30)), np.ones((30, 40))
            >>> trace = json.loads(planner.plan("ij, jk -> ik", a, b).analyze(a, b).to_chrome_trace())
            >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
            ['ij, jk -> ik (matmul)', 'ij, jk -> ik (matmul)']

        Args:
            path: the file to write the trace to; None to return the trace.

        Raises:
            PlannerError: the file cannot be written.
        """
        return save(json.dumps(_trace_of(self), allow_nan=False), path)

    def __str__(self) -> str:
        return analysis_text(self)


def analysis_text(analysis: Analysis) -> str:
    """Return the text that `print(analysis)` shows."""
    of = f"medians of {analysis.rounds} rounds" if analysis.rounds > 1 else "one round"
    head = f"{analysis.text}        {analysis.backend} · {analysis.device} · {analysis.dtype} · {of}"
    rows: list[Sequence[str]] = [["#", "step", "lowered to", "FLOPs", "moves", "live", "retained", "time"]]
    for program in dict.fromkeys(("forward", "backward", *(step.program for step in analysis.steps))):
        rows += _program(analysis, program)
    lines = [head, *table_lines(rows, (0, 1, 2, 8))]
    if any(row.off for row in (*analysis.steps, *analysis.totals)):
        lines.append("  ! time or live bytes are off by more than 2x; under 50 us and 16 KiB they are not judged")
    lines += [f"warning: {warning}" for warning in analysis.warnings]
    return "\n".join(lines)


def _program(analysis: Analysis, program: str) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [] if program in ("forward", "backward") else [[f"  {program}"]]
    for step in analysis.steps:
        if step.program == program:
            rows.append([str(step.number), step.text, step.lowering, *_figures(step.predicted)])
            rows.append(_format_measured(step, "  measured"))
    if len(rows) > MOST_ROWS:
        cut = (len(rows) - MOST_ROWS) // 2
        rows = [*rows[: MOST_ROWS // 2], [f"  ... {cut} more steps, see analysis.steps"], *rows[-MOST_ROWS // 2 :]]
    for number, total in enumerate(total for total in analysis.totals if total.program == program):
        if not number:
            rows.append(["", f"the {program} program", "", *_figures(total.predicted)])
        rows.append(_format_measured(total, f"  {total.lowering or 'measured'}"))
    return rows


def _format_measured(row: AnalyzedStep, label: str) -> list[str]:
    off = ", ".join(f"{name} x{ratio:{'.2g' if ratio < 99.5 else '.0f'}}" for name, ratio in row.off)
    return ["!" if off else "", "", label, *_figures(row.measured), off]


def _figures(figures: Figures) -> list[str]:
    sizes = (figures.bytes_moved, figures.live_bytes, figures.retained_bytes)
    return [
        "-" if figures.flops is None else count_text(figures.flops),
        *("-" if n is None else bytes_text(n) for n in sizes),
        "-" if figures.seconds is None else seconds_text(figures.seconds),
    ]


# --- a trace ------------------------------------------------------------------------------------


def _trace_of(analysis: Analysis) -> dict[str, Any]:
    """Return an analysis in the format of Chrome's trace events, with times in microseconds.

    Its events are slices ("X"), counters ("C") and names of tracks ("M"). Measured and predicted steps have tracks of
    their own. The steps of each program follow one another. Steps of a loop's slice have tracks of their own too,
    because a loop runs them many times.
    """
    programs = list(dict.fromkeys(step.program for step in analysis.steps))
    tracks = [("forward", "backward"), *((name,) for name in programs if name not in ("forward", "backward"))]
    events: list[dict[str, Any]] = [_named("process_name", 0, analysis.text)]
    for number, track in enumerate(tracks):
        steps = [step for step in analysis.steps if step.program in track]
        what = "" if number == 0 else f", {track[0]}"
        for offset, kind in enumerate(("measured", "predicted")):
            thread = 2 * number + offset + 1
            events.append(_named("thread_name", thread, f"{kind}{what}"))
            events += _events(steps, kind, thread, f"{kind} live bytes{what}")
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"backend": analysis.backend,
            "device": analysis.device, "dtype": analysis.dtype, "rounds": analysis.rounds}}  # fmt: skip


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}


def _events(steps: Iterable[AnalyzedStep], kind: str, thread: int, counter: str) -> Iterator[dict[str, Any]]:
    begin = 0.0
    for step in steps:
        figures = getattr(step, kind)
        duration = 1e6 * (figures.seconds or 0.0)
        known = {"FLOPs": figures.flops, "bytes moved": figures.bytes_moved, "live bytes": figures.live_bytes}
        yield {
            "name": f"{step.text} ({step.lowering})", "cat": step.program, "ph": "X", "pid": 1, "tid": thread,
            "ts": begin, "dur": duration,
            "args": {"step": step.number, **{name: value for name, value in known.items() if value is not None}},
        }  # fmt: skip
        if figures.live_bytes is not None:
            yield {"name": counter, "ph": "C", "pid": 1, "ts": begin, "args": {"bytes": figures.live_bytes}}
        begin += duration
    yield {"name": counter, "ph": "C", "pid": 1, "ts": begin, "args": {"bytes": 0}}
