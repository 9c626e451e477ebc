"""The rows of the table: every way of a case run, its results checked, its figures taken."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.demo.cases import Case
from planner.demo.figures import Figures, extrapolated
from planner.demo.runs import RUNS
from planner.demo.ways import Way
from planner.workloads import Workload

__all__ = ["Row", "differences", "run_case"]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: which way, what it took, and what differed ("" when nothing did)."""

    case: Case
    way: Way
    figures: Figures
    differs: str


def run_case(case: Case, tick: Callable[[str], None] = lambda label: None, *, quick: bool = False) -> list[Row]:
    """Run every way of a case: check its values and gradients against the first way's, and measure it."""
    rows = []
    expected: dict[Workload, list[np.ndarray[Any, Any]]] = {}
    for way in case.ways:
        tick(f"{case.name}, {case.framework}: {way.label}")
        whole, part = case.workload, case.workload
        if way.part and way.part[1] < dict(whole.sizes)[way.part[0]]:
            part = whole.resized(**dict([way.part]))
        differs, figures = _run_way(case, way, part, expected, quick)
        if part is not whole and not differs:
            axis, size = way.part or ("", 0)
            differs, half = _run_way(case, way, part.resized(**{axis: size // 2}), expected, quick)
            if not differs:
                figures = extrapolated(figures, half, dict(whole.sizes)[axis] / size)
        rows.append(Row(case, way, figures, differs))
    return rows


def _run_way(
    case: Case,
    way: Way,
    workload: Workload,
    expected: dict[Workload, list[np.ndarray[Any, Any]]],
    quick: bool,
) -> tuple[str, Figures]:
    """Run one way on a workload: what differs from the first way's results, and if nothing, the figures."""
    runner = RUNS[case.framework]
    if workload not in expected and way is not case.ways[0]:
        expected[workload] = runner(case.ways[0], workload, case.gradients).results()
    run = runner(way, workload, case.gradients)
    results = run.results()
    differs = differences(results, expected.setdefault(workload, results))
    del results
    figures = Figures(math.nan, math.nan, math.nan, math.nan, math.nan) if differs else run.figures(quick)
    del run
    gc.collect()
    return differs, figures


def differences(results: Sequence[np.ndarray[Any, Any]], expected: Sequence[np.ndarray[Any, Any]]) -> str:
    """Say what differs: integer-valued operands make every sum exact, so the comparison is `==`."""
    names = ("the value", *(f"gradient {number}" for number in range(len(expected) - 1)))
    wrong = [
        name
        for name, result, wanted in zip(names, results, expected, strict=True)
        if result.dtype != wanted.dtype or not np.array_equal(result, wanted)
    ]
    return ", ".join(wrong)
