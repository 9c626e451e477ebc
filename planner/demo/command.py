"""The command `python -m planner demo`: its options and what it prints."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import textwrap
from collections.abc import Sequence

from planner import demo
from planner.demo.answers import answers
from planner.demo.cases import cases
from planner.demo.rows import run_case
from planner.demo.table import table
from planner.demo.ways import Framework
from planner.progress import Progress

__all__ = ["main"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (demo.__doc__ or "").split("\n\n")[1]
    parser = argparse.ArgumentParser("python -m planner demo", description=about)
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute at most; the times say little")
    parser.add_argument("--framework", choices=("torch", "jax"), help="one framework instead of both")
    parser.add_argument("--only", default="", metavar="NAME", help="only the cases whose name begins so")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 when all values and gradients are equal, 1 when any differs."""
    options = _arguments(argv)
    asked: tuple[Framework, ...] = (options.framework,) if options.framework else ("torch", "jax")
    installed = [framework for framework in asked if importlib.util.find_spec(framework)]
    for missing in set(asked) - set(installed):
        print(f"{missing} is not installed: pip install 'contraction-planner[{missing}]'", file=sys.stderr)
    chosen = [
        case
        for framework in installed
        for case in cases(framework, options.quick)
        if case.name.startswith(options.only)
    ]
    if not chosen:
        print("nothing to run", file=sys.stderr)
        return 2
    progress = Progress(sum(len(case.ways) for case in chosen), "{done}/{total}  {what:.70}")
    rows = [row for case in chosen for row in run_case(case, progress, quick=options.quick)]
    progress.clear()
    print(table(rows))
    print()
    for answer in answers(rows):
        print(textwrap.fill(answer, 110), end="\n\n")
    wrong = [row for row in rows if row.differs]
    for row in wrong:
        print(f"{row.case.name}, {row.case.framework}, {row.way.label}: {row.differs} differs")
    print("All values and gradients are equal." if not wrong else f"{len(wrong)} of {len(rows)} ways differ.")
    return 1 if wrong else 0
