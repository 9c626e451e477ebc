"""The demo: its verdict follows what it compared, and its answers follow the figures."""

import dataclasses
import math

import pytest
from conftest import installed_frameworks

from planner.demo import command
from planner.demo.answers import answers
from planner.demo.cases import cases
from planner.demo.figures import Figures, extrapolated
from planner.demo.rows import Row, run_case
from planner.demo.ways import OURS, Way

FRAMEWORKS = [name for name in installed_frameworks() if name != "numpy"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_demo_runs_a_seed_and_says_that_all_is_equal(framework, capsys):
    status = command.main(["--quick", "--framework", framework, "--only", "seed-outer-and-matmul/large"])
    printed = capsys.readouterr().out
    assert status == 0
    assert printed.endswith("All values and gradients are equal.\n")
    assert OURS in printed
    assert "nan" not in printed
    assert f"002, what about the speed of einsum against matmul? ({framework}): " in " ".join(printed.split("\n"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("wrong", "differs"),
    [
        (lambda xp, x, y: 2 * (x @ y), "the value, gradient 0, gradient 1"),
        (lambda xp, x, y: x @ y + 1, "the value"),
        (lambda xp, x, y: x @ y + (x - xp.round(x)).sum(), "gradient 0"),  # at integers: zero, of slope 1
    ],
)
def test_a_way_that_differs_makes_the_demo_fail(framework, wrong, differs, monkeypatch, capsys):
    (case,) = (case for case in cases(framework, quick=True) if case.name == "seed-outer-and-matmul")
    case = dataclasses.replace(case, ways=(*case.ways, Way("wrong", wrong)))
    monkeypatch.setattr(command, "cases", lambda framework, quick: iter([case]))
    assert command.main(["--quick", "--framework", framework]) == 1
    printed = capsys.readouterr().out
    assert f"1 of {len(case.ways)} ways differ." in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("seed-outer-and-matmul, ") and ": " in line)
    assert line.endswith(f", wrong: {differs} differs")


def test_nothing_to_run_is_an_error(capsys):
    assert command.main(["--only", "no-such-case"]) == 2
    assert "nothing to run" in capsys.readouterr().err


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_seed_has_its_cases_and_its_way_of_ours(framework):
    found = list(cases(framework, quick=True))
    assert {case.seed for case in found} == {"000", "001", "002", "003"}
    for case in found:
        assert [way.label for way in case.ways].count(OURS) == 1
        assert len(case.ways) >= 2


def test_a_part_is_extrapolated_in_proportion_but_for_its_constant_share():
    # bytes: 100 constant and 10 a row; seconds: 2 a row
    figures = {rows: Figures(2 * rows, 100 + 10 * rows, 2 * rows, 100 + 10 * rows, 10 * rows) for rows in (4, 8, 64)}
    assert extrapolated(figures[8], figures[4], 64 / 8) == dataclasses.replace(figures[64], extrapolated=True)


@pytest.mark.parametrize(("ours", "verdict"), [(0.1, "10x faster than"), (1.0, "as fast as"), (2.0, "2x slower than")])
def test_answers_turn_with_the_figures(ours, verdict):
    if not FRAMEWORKS:
        pytest.skip("neither torch nor JAX is installed")
    (case,) = (c for c in cases(FRAMEWORKS[0], quick=True) if c.name == "seed-outer-and-matmul/large")

    def figures(seconds):
        return Figures(seconds, 1e6, seconds, 1e6, 0)

    rows = [Row(case, way, figures(ours if way.label == OURS else 1.0), "") for way in case.ways]
    (answer,) = answers(rows)
    assert verdict in answer
    assert answers([dataclasses.replace(row, differs="the value") for row in rows]) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_differs_is_not_measured(framework):
    (case,) = (case for case in cases(framework, quick=True) if case.name == "seed-outer-and-matmul")
    case = dataclasses.replace(case, ways=(case.ways[0], Way("wrong", lambda xp, x, y: -(x @ y))))
    right, wrong = run_case(case, quick=True)
    assert not right.differs
    assert right.figures.seconds > 0
    assert wrong.differs
    assert math.isnan(wrong.figures.seconds)
