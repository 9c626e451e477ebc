"""The command `python -m planner demo`: its options, and the order in which it runs and prints."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import textwrap
import time
from collections.abc import Sequence

from planner.demo.answers import Answer, answers
from planner.demo.cases import Case, Scale, cases
from planner.demo.report import HEADINGS, Comparison, case_table, gain_line, gains, header, line, table
from planner.demo.runs import Row, measure_case
from planner.demo.ways import Framework
from planner.language.errors import PlannerError
from planner.pages.tables import Table, page_of_tables
from planner.progress import Progress

_WIDTH = 100
_UNIT = re.compile(r"(?<=\d) (?=([kMG]?B|[mu]?s|min|h)\b)")
_ABOUT = """\
Each author compared ways to write one contraction and asked why they differ. The demo runs those ways and
`planner.contract` on the same arrays, in torch and JAX, forward and with gradients. It measures the time, the
peak memory and the memory kept for the backward pass of each way, checks that all values and gradients are
equal, and answers the authors' questions with the figures that it measured.
"""
_INTRODUCTION = """\
Four authors were surprised by torch.einsum or torch.matmul, and wrote about it. Here is what they
wrote, beside planner.contract, on the same arrays{sizes}.
{duration}

  forward, and backward   time of the forward pass alone, and of both passes
  peak                    the most new memory at any moment of it
  kept                    memory that the forward pass keeps for the backward pass
"""
_SCALES: dict[Scale, str] = {
    "main": "the main cases at their authors' sizes: three minutes (the default)",
    "full": "all cases, measured at length: eight minutes",
    "quick": "all cases at small sizes: a minute; the times say little",
}
_SIZES: dict[Scale, str] = {
    "main": " at the authors' sizes",
    "full": " (the largest are made smaller)",
    "quick": " at small sizes, where times say little",
}
_DURATIONS: dict[Scale, str] = {
    "main": "It takes about three minutes on two quiet cores; slow ways run once, or on some of the rows.",
    "full": "It takes about eight minutes on two quiet cores.",
    "quick": "It takes about a minute.",
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m planner demo", description=_ABOUT)
    scale = parser.add_mutually_exclusive_group()
    for name, words in _SCALES.items():
        scale.add_argument(f"--{name}", dest="scale", action="store_const", const=name, help=words)
    parser.add_argument("--framework", choices=("torch", "jax"), help="one framework instead of both")
    parser.add_argument("--only", default="", metavar="NAME", help="only the cases whose name begins so")
    parser.add_argument("--html", metavar="FILE", help="also write a page with all tables, which any browser opens")
    parser.set_defaults(scale="main")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 when all values and gradients are equal, 1 when any differs."""
    options = _arguments(argv)
    started = time.monotonic()
    asked: tuple[Framework, ...] = (options.framework,) if options.framework else ("torch", "jax")
    installed = [framework for framework in asked if importlib.util.find_spec(framework)]
    for missing in set(asked) - set(installed):
        print(f"{missing} is not installed: pip install 'contraction-planner[{missing}]'", file=sys.stderr)
    chosen = [
        case
        for framework in installed
        for case in cases(framework, options.scale)
        if case.name.startswith(options.only)
    ]
    if not chosen:
        print("nothing to run", file=sys.stderr)
        return 2
    _say(_INTRODUCTION.format(sizes=_SIZES[options.scale], duration=_DURATIONS[options.scale]))
    progress = Progress(sum(len(case.ways) for case in chosen), "{done}/{total}  {what:.60}")
    rows: list[Row] = []
    tables: list[Table] = []
    comparisons: list[Comparison] = []
    for case in chosen:
        measured = _show(case, options.scale, progress)
        rows += measured
        tables.append(case_table(measured, [f"Document {case.seed}."]))
        comparison = Comparison.of(measured)
        if comparison:
            _say(gain_line(comparison))
            comparisons.append(comparison)
        _say()
    if comparisons:
        _say("Forward and backward pass, against the fastest of the other ways. The largest gain comes first.")
        _say(table(comparisons))
        _say()
    found = answers(comparisons)
    _answer(found)
    wrong = [row for row in rows if row.differs]
    for row in wrong:
        _say(f"{row.case.name}, {row.case.framework}, {row.way.label}: {row.differs} differs")
    verdict = f"{len(wrong)} of {len(rows)} ways differ." if wrong else "All values and gradients are equal."
    verdict += f" The demo took {time.monotonic() - started:.0f} s."
    _say(verdict)
    if options.html:
        try:
            page_of_tables("The demo", verdict, _page(comparisons, found, tables), options.html)
        except PlannerError as error:
            print(error, file=sys.stderr)
            return 2
    return 1 if wrong else 0


def _page(comparisons: Sequence[Comparison], found: Sequence[Answer], tables: Sequence[Table]) -> list[Table]:
    """Return the sections of the demo's page: the closing table, the answers, and each comparison."""
    sections = []
    if comparisons:
        head = ["case", "time of theirs", "of planner", "faster", "peak of theirs", "of planner"]
        said = "Forward and backward pass, against the fastest of the other ways. The largest gain comes first."
        sections.append(Table("All comparisons", [said], head, gains(comparisons)))
    for question in dict.fromkeys((answer.seed, answer.question) for answer in found):
        words = [f"{x.framework}: {x.text}" for x in found if (x.seed, x.question) == question]
        sections.append(Table(": ".join(question), words, [], []))
    return [*sections, *tables]


def _say(text: str = "") -> None:
    """Print at once, into a pipe too: a reader waits for each line."""
    print(text, flush=True)


def _show(case: Case, scale: Scale, progress: Progress) -> list[Row]:
    """Run the ways of a case, and print their lines when all are measured."""
    _say(header(case))
    _say(HEADINGS)
    rows = measure_case(case, scale, lambda way: progress(f"{case.name}, {case.framework}: {way.label}"))
    progress.close()
    for row in rows:
        _say(line(row))
    return rows


def _answer(found: Sequence[Answer]) -> None:
    """Print each question once, with what each framework's figures say to it below."""
    asked = ""
    for answer in found:
        question = f"{answer.seed}: {answer.question}"
        if question != asked:
            _say(f"{question}")
        asked = question
        text = _UNIT.sub("\u00a0", f"{answer.framework}: {answer.text}")  # no line ends between a number and its unit
        _say(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ").replace("\u00a0", " "))
    if found:
        _say()
