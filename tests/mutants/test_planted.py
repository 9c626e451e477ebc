"""The planted mutants fit the library as it is, so that `make mutants` judges what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.judge import BESIDE, ROOT, verdicts
from tests.mutants.planted import PLANTED

VERDICTS = verdicts()


@pytest.mark.parametrize("row", PLANTED, ids=lambda row: row.bug)
def test_a_planted_bug_applies_compiles_and_was_killed(row):
    changed = row.apply()
    assert changed != (ROOT / row.file).read_text()
    compile(changed, row.file, "exec")
    assert VERDICTS[row.name].killed, "judge it: make mutants"


def test_planted_bugs_are_thirty_and_their_tests_are_there():
    assert len({row.bug for row in PLANTED}) == len(PLANTED) == 30
    for row in PLANTED:
        file, _, name = row.test.partition("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / file).read_text()


def test_a_text_that_is_gone_is_an_error():
    row = PLANTED[0]
    gone = type(row)(row.bug, row.file, row.old + "no such text", row.new, row.test)
    with pytest.raises(ValueError, match="occurs 0 times"):
        gone.apply()


def test_verdicts_are_of_functions_that_there_are():
    """A function that moved has other mutants: `make mutants` draws and judges them."""
    for name in VERDICTS.keys() - {row.name for row in PLANTED}:
        file, function, *_ = name.split(":")
        kept = [] if function == "module" else function.split(".")
        nodes = list(ast.walk(ast.parse((ROOT / file).read_text())))
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert set(kept) <= defined, f"{name}: judge what is drawn now, make mutants"


def test_explanations_of_mutants_that_survived_say_something():
    """That all of these are explained is for `make mutants` to say."""
    reasons = [verdict.why for verdict in VERDICTS.values() if verdict.why and not verdict.killed]
    assert len(reasons) >= 10
    assert all(len(reason) > 20 for reason in reasons)


@pytest.mark.parametrize("prefix", [prefix for prefixes in BESIDE.values() for prefix in prefixes])
def test_files_that_are_judged_beside_coverage_are_there(prefix):
    assert list((ROOT / prefix).parent.glob(f"{Path(prefix).name}*.py"))
