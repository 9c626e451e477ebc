"""``python -m tests.mutants`` judges the mutants that have no verdict yet and prints all of them: ``make mutants``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.mutants import covered, judge, sampled
from tests.mutants.judge import VERDICTS, Mutant, Verdict, verdicts
from tests.mutants.planted import PLANTED

# The rate that the sampled ones must reach.
LEAST = 0.9


def store(known: dict[str, Verdict]) -> None:
    """Writes one mutant a line, by name."""
    lines = (f"{json.dumps(name)}: {json.dumps(vars(known[name]))}" for name in sorted(known))
    fresh = VERDICTS.with_suffix(".new")
    fresh.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(fresh, VERDICTS)


def drawn(known: dict[str, Verdict], draws: list[sampled.Mutation], by: list[str]) -> Iterator[Mutant]:
    """The sampled mutants, to be judged by some tests, or those that run them; what killed one before comes first."""
    tests_of = None if by or not draws else covered.Map()
    for mutation in draws:
        tests = by if tests_of is None else tests_of.tests(mutation.file, mutation.line)
        before = known.get(mutation.name)
        if before is not None and before.by in tests:
            tests = [before.by, *tests]
        yield Mutant(mutation.name, mutation.file, str(mutation.apply()), tuple(dict.fromkeys(tests)))


def run(mutants: Iterable[Mutant], left: int, asked: argparse.Namespace) -> None:
    """Judges so many and stores each verdict as it comes."""
    os.nice(5)
    limits = {"seconds": asked.seconds, "examples": asked.examples, "at_once": asked.at_once}
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.closing(judge.judge_all(mutants, Path(scratch).resolve(), **limits)) as judged,
    ):
        for mutant, verdict in judged:
            left -= 1
            known = verdicts()  # another run may judge others
            if not verdict.killed and mutant.name in known and not known[mutant.name].killed:
                verdict = dataclasses.replace(verdict, why=known[mutant.name].why)
            store(known | {mutant.name: verdict})
            print(f"{left:4d} left  {line_of(mutant.name, verdict)}", file=sys.stderr, flush=True)


def line_of(name: str, verdict: Verdict) -> str:
    """A mutant and what became of it."""
    if verdict.killed:
        return f"killed    {name}  by {verdict.by}: {verdict.why}"
    return f"SURVIVED  {name}  {verdict.why or f'no explanation; {verdict.passed} tests passed'}"


def report(planted_names: list[str], sampled_names: list[str], known: dict[str, Verdict]) -> list[str]:
    """Prints the table; returns what is wrong."""
    for name in (*planted_names, *sampled_names):
        print(line_of(name, known[name]) if name in known else f"no verdict {name}")
    killed = {name for name, verdict in known.items() if verdict.killed}
    print(f"planted: {sum(n in killed for n in planted_names)} of {len(planted_names)} killed")
    rate = sum(n in killed for n in sampled_names) / len(sampled_names)
    print(f"sampled: {sum(n in killed for n in sampled_names)} of {len(sampled_names)} killed, {rate:.1%}")
    explained = {name for name, verdict in known.items() if verdict.why}
    wrong = [f"planted and not killed: {name}" for name in planted_names if name not in killed]
    wrong += [f"not explained: {name}" for name in sorted(set(sampled_names) - killed - explained)]
    return wrong + [f"the rate is below {LEAST:.0%}"] * (rate < LEAST)


def main() -> int:
    """Returns the exit status: 1 where a criterion is not met."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--again", choices=("all", "survivors"), help="judge these once more")
    parser.add_argument("--only", default="", help="judge those whose name contains this")
    parser.add_argument("--seconds", type=float, default=30, help="of the processor, then the last test is let end")
    parser.add_argument("--by", nargs="+", default=[], help="the sampled ones by these tests, not those of the map")
    parser.add_argument("--examples", type=int, default=judge.EXAMPLES, help="of each property")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--report", action="store_true", help="judge nothing")
    asked = parser.parse_args()
    known, draws = verdicts(), sampled.draw()

    def wanted(name: str) -> bool:
        done = name in known and not (asked.again == "all" or asked.again == "survivors" and not known[name].killed)
        return not done and asked.only in name

    if not asked.report:
        todo = [Mutant(row.name, row.file, row.apply(), (row.test,)) for row in PLANTED if wanted(row.name)]
        fresh = [mutation for mutation in draws if wanted(mutation.name)]
        if fresh and not asked.by and not covered.STORED.exists():
            covered.make_map()
        if todo or fresh:
            run(itertools.chain(todo, drawn(known, fresh, asked.by)), len(todo) + len(fresh), asked)
    names = [row.name for row in PLANTED], [m.name for m in draws]
    known = {name: verdict for name, verdict in verdicts().items() if name in {*names[0], *names[1]}}
    store(known)
    wrong = report(*names, known)
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
