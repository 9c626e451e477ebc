"""``python -m tests.mutants`` judges the mutants that have no verdict yet and prints all of them: ``make mutants``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import sampled
from tests.mutants.judge import AFFECTED, BESIDE, ROOT, VERDICTS, Mutant, Verdict, judge, run_tests, verdicts
from tests.mutants.planted import PLANTED

# The rate that the sampled ones must reach.
LEAST = 0.9


def store(known: dict[str, Verdict]) -> None:
    """Write one mutant a line, by name."""
    lines = (f"{json.dumps(name)}: {json.dumps(vars(known[name]))}" for name in sorted(known))
    fresh = VERDICTS.with_suffix(".new")
    fresh.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(fresh, VERDICTS)


def to_judge(mutation: sampled.Mutation, before: Verdict | None) -> Mutant:
    """A sampled mutant with the tests that judge it first: what killed it before, and what reads its file."""
    beside = [test for test, prefixes in BESIDE.items() if mutation.file.startswith(prefixes)]
    killer = [before.by] if before and (ROOT / before.by.split("::")[0]).is_file() else []
    return Mutant(mutation.name, mutation.file, str(mutation.apply()), (*killer, *beside))


def judge_all(mutants: list[Mutant], seconds: float, at_once: int) -> None:
    """Judge the committed tree with each change, some at once, and store each verdict as it comes."""
    os.nice(5)
    free: queue.Queue[Path] = queue.Queue()

    def work(mutant: Mutant) -> tuple[Mutant, Verdict]:
        folder = free.get()
        try:
            return mutant, judge(mutant, folder, seconds)
        finally:
            free.put(folder)

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(at_once) as threads:
        for number in range(at_once):
            folder = Path(scratch).resolve() / str(number)
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
            free.put(folder)
        if any(mutant.all for mutant in mutants):
            if not (ROOT / AFFECTED).exists():
                print("running all tests once, to see which tests run which functions", file=sys.stderr, flush=True)
                ran = run_tests(folder, "--testmon", f"--numprocesses={at_once}")
                print(ran.stdout[-2000:], ran.stderr[-2000:], file=sys.stderr, flush=True)
                shutil.copy2(folder / AFFECTED, ROOT / AFFECTED)
            for folder in free.queue:
                shutil.copy2(ROOT / AFFECTED, folder / AFFECTED)
        for left, (mutant, verdict) in enumerate(threads.map(work, mutants), 1 - len(mutants)):
            known = verdicts()  # another run may judge others
            if not verdict.killed and mutant.name in known and not known[mutant.name].killed:
                verdict = dataclasses.replace(verdict, why=known[mutant.name].why)
            store(known | {mutant.name: verdict})
            print(f"{-left:4d} left  {line_of(mutant.name, verdict)}", file=sys.stderr, flush=True)


def line_of(name: str, verdict: Verdict) -> str:
    """A mutant and what became of it."""
    if verdict.killed:
        return f"killed    {name}  by {verdict.by}: {verdict.why}"
    return f"SURVIVED  {name}  {verdict.why or f'no explanation; {verdict.passed} tests passed'}"


def report(planted_names: list[str], sampled_names: list[str], known: dict[str, Verdict]) -> list[str]:
    """Print the table; return what is wrong."""
    for name in (*planted_names, *sampled_names):
        print(line_of(name, known[name]) if name in known else f"no verdict {name}")
    killed = {name for name, verdict in known.items() if verdict.killed}
    rate = sum(n in killed for n in sampled_names) / len(sampled_names)
    print(f"planted: {sum(n in killed for n in planted_names)} of {len(planted_names)} killed")
    print(f"sampled: {sum(n in killed for n in sampled_names)} of {len(sampled_names)} killed, {rate:.1%}")
    explained = {name for name, verdict in known.items() if verdict.why}
    wrong = [f"planted and not killed: {name}" for name in planted_names if name not in killed]
    wrong += [f"not explained: {name}" for name in sorted(set(sampled_names) - killed - explained)]
    return wrong + [f"the rate is below {LEAST:.0%}"] * (rate < LEAST)


def main() -> int:
    """Return the exit status: 1 where a criterion is not met."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--again", choices=("all", "survivors"), help="judge these once more")
    parser.add_argument("--only", default="", help="judge those whose name contains this")
    parser.add_argument("--seconds", type=float, default=120, help="of each run; then no other test of a mutant starts")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--report", action="store_true", help="judge nothing")
    asked = parser.parse_args()
    known, draws = verdicts(), sampled.draw()

    def wanted(name: str) -> bool:
        done = name in known and not (asked.again == "all" or asked.again == "survivors" and not known[name].killed)
        return not done and asked.only in name

    if not asked.report:
        mutants = [Mutant(row.name, row.file, row.apply(), (row.test,), all=False) for row in PLANTED]
        mutants += [to_judge(mutation, known.get(mutation.name)) for mutation in draws]
        judge_all([mutant for mutant in mutants if wanted(mutant.name)], asked.seconds, asked.at_once)
    names = [row.name for row in PLANTED], [m.name for m in draws]
    known = {name: verdict for name, verdict in verdicts().items() if name in {*names[0], *names[1]}}
    store(known)
    wrong = report(*names, known)
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
