"""The demo: it prints each comparison as soon as it is measured, its verdict and answers follow the figures."""

import dataclasses
import html
import io
import math
import re

import numpy as np
import pytest
from conftest import installed_frameworks

from planner.demo import command
from planner.demo.answers import answers
from planner.demo.cases import cases
from planner.demo.report import Comparison, bytes_text, gain_line, header, line, seconds_text, table
from planner.demo.runs import EFFORTS, RUNS, Effort, Row, Run, WayFigures, differences, extrapolate, measure_case
from planner.demo.ways import OURS, Part, Way
from planner.workloads import WORKLOADS

FRAMEWORKS = [name for name in installed_frameworks() if name != "numpy"]
SCALES = ("main", "full", "quick")
WIDTH = 100


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    """Each framework that the demo compares."""
    return request.param


def _case(framework, name, scale="quick"):
    (case,) = (case for case in cases(framework, scale) if case.name == name)
    return case


def _rows(case, seconds_of):
    """Rows with made-up figures: a megabyte each, and the times that a function of the way says."""
    return [Row(case, way, WayFigures(seconds_of(way), 1e6, seconds_of(way), 1e6, 0), "") for way in case.ways]


def test_the_demo_runs_a_seed_and_says_that_all_is_equal(framework, capsys, tmp_path):
    page = tmp_path / "demo.html"
    options = ["--quick", "--framework", framework, "--only", "seed-outer-and-matmul/large"]
    status = command.main([*options, "--html", str(page)])
    printed = capsys.readouterr().out
    assert status == 0
    assert "All values and gradients are equal." in printed.splitlines()[-1]
    assert OURS in printed
    assert "nan" not in printed
    assert "002: What about speed?\n" in printed
    assert max(map(len, printed.splitlines())) <= WIDTH
    shown = html.unescape(page.read_text(encoding="utf-8"))
    assert "All values and gradients are equal." in shown
    assert "002: What about speed?" in shown
    (ours,) = (line for line in printed.splitlines() if line.startswith(f"  {OURS} "))
    figures = re.findall(r"\d[\d.]* (?:us|ms|s|B|kB|MB)", ours)
    assert len(figures) == 5
    assert "".join(f"<td>{figure}</td>" for figure in figures) in shown


@pytest.mark.parametrize(
    ("wrong", "differs"),
    [
        (lambda xp, x, y: 2 * (x @ y), "the value, gradient 0, gradient 1"),
        (lambda xp, x, y: x @ y + 1, "the value"),
        (lambda xp, x, y: x @ y + (x - xp.round(x)).sum(), "gradient 0"),  # at integers: zero, of slope 1
    ],
)
def test_a_way_that_differs_makes_the_demo_fail(framework, wrong, differs, monkeypatch, capsys):
    case = _case(framework, "seed-outer-and-matmul")
    case = dataclasses.replace(case, ways=(*case.ways, Way("wrong", wrong)))
    monkeypatch.setattr(command, "cases", lambda framework, scale: iter([case]))
    assert command.main(["--quick", "--framework", framework]) == 1
    printed = capsys.readouterr().out
    assert f"1 of {len(case.ways)} ways differ." in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("seed-outer-and-matmul, ") and ": " in line)
    assert line.endswith(f", wrong: {differs} differs")


def test_nothing_to_run_is_an_error(capsys):
    assert command.main(["--only", "no-such-case"]) == 2
    assert "nothing to run" in capsys.readouterr().err


def test_the_lines_of_a_case_reach_a_pipe_before_the_next_case_runs(framework, monkeypatch):
    """What is printed to a pipe waits in a buffer until it is flushed."""
    case = _case(framework, "seed-outer-and-matmul")
    pipe = io.BytesIO()
    seen = []

    def watched(number, way):
        def call(xp, *operands):
            seen.append((number, pipe.getvalue().decode()))
            return way.call(xp, *operands)

        return Way(way.label, call)

    both = [
        dataclasses.replace(case, title=f"Case {number}", ways=tuple(watched(number, way) for way in case.ways))
        for number in range(2)
    ]
    monkeypatch.setattr(command, "cases", lambda framework, scale: iter(both))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(pipe, 1 << 20), encoding="utf-8"))
    assert command.main(["--quick", "--framework", framework]) == 0
    assert {number for number, _ in seen} == {0, 1}
    for number, printed in seen:
        assert header(both[number]) in printed
        for way in case.ways:
            assert printed.count(f"\n  {way.label} ") == number


def test_short_ways_are_timed_in_turn(framework, monkeypatch):
    """Each round times every way, so that what disturbs the machine disturbs all of them."""
    case = _case(framework, "seed-outer-and-matmul")
    order = []

    def block_seconds(program, least_seconds):
        order.append((program.__name__, program.__self__.way.label))
        return float(len(order))

    monkeypatch.setattr("planner.demo.runs.block_seconds", block_seconds)
    rows = measure_case(case, "quick")
    labels = [way.label for way in case.ways]
    assert order == [(program, label) for program in ("forward", "both") for _ in range(2) for label in labels]
    ways = len(labels)
    for number, row in enumerate(rows, 1):
        assert row.figures.seconds == number + ways / 2
        assert row.figures.gradient_seconds == row.figures.seconds + 2 * ways
        assert not row.figures.once


def test_a_slow_way_keeps_the_times_of_its_single_run(framework, monkeypatch):
    monkeypatch.setitem(EFFORTS, "quick", Effort(long_seconds=0.0, runs=2, timing_seconds=0.1))
    monkeypatch.setattr("planner.demo.runs.block_seconds", None)  # nothing may be timed again
    case = _case(framework, "seed-outer-and-matmul")
    (row,) = measure_case(dataclasses.replace(case, ways=case.ways[:1]), "quick")
    assert row.figures.once
    assert row.figures.seconds > 0


@pytest.mark.parametrize("scale", SCALES)
def test_every_seed_has_its_cases_and_its_way_of_ours(framework, scale):
    found = list(cases(framework, scale))
    expected = {"000", "002", "003"} if (framework, scale) == ("jax", "main") else {"000", "001", "002", "003"}
    assert {case.seed for case in found} == expected
    for case in found:
        assert [way.label for way in case.ways].count(OURS) == 1
        assert len(case.ways) >= 2


def test_the_main_cases_are_a_part_of_all_and_have_their_authors_sizes(framework):
    main = list(cases(framework))
    assert {case.name for case in main} < {case.name for case in cases(framework, "full")}
    for case in main:
        full = {"seed-gathered-matmul, only c": "seed-gathered-matmul"}.get(case.name, case.name)
        assert case.workload == WORKLOADS[full]


def test_a_part_is_extrapolated_in_proportion_but_for_its_constant_share():
    # bytes: 100 constant and 10 a row; seconds: 2 a row
    figures = {rows: WayFigures(2 * rows, 100 + 10 * rows, 2 * rows, 100 + 10 * rows, 10 * rows) for rows in (4, 8, 64)}
    assert extrapolate(figures[8], figures[4], 64 / 8) == dataclasses.replace(figures[64], extrapolated=True)


@pytest.mark.parametrize("in_proportion", [True, False])
def test_a_way_that_runs_on_a_part_says_so(framework, in_proportion):
    case = _case(framework, "seed-outer-and-matmul")
    part = Way("slow", case.ways[0].call, Part("i", 4, backward_in_proportion=in_proportion))
    _, row = measure_case(dataclasses.replace(case, ways=(case.ways[0], part)), "quick")
    assert row.figures.extrapolated
    assert math.isnan(row.figures.gradient_seconds) is not in_proportion
    assert line(row).endswith("~ by 4 rows")
    assert line(row).split()[1].startswith("~")


@pytest.mark.parametrize(("ours", "verdict"), [(0.1, "10x faster than"), (1.0, "as fast as"), (2.0, "2x slower than")])
def test_answers_turn_with_the_figures(ours, verdict, framework):
    case = _case(framework, "seed-outer-and-matmul/large")
    rows = _rows(case, lambda way: ours if way.label == OURS else 1.0)
    (answer,) = answers([Comparison.of(rows)])
    assert verdict in answer.text
    assert Comparison.of([dataclasses.replace(row, differs="the value") for row in rows]) is None


def test_a_way_that_is_faster_forward_is_named(framework):
    case = _case(framework, "seed-gathered-matmul")
    for ours, said in ((0.5, False), (2.0, True)):
        figures = {True: WayFigures(ours, 1e6, 3, 1e6, 0), False: WayFigures(1, 2e6, 4, 2e6, 0)}
        rows = [Row(case, way, figures[way.label == OURS], "") for way in case.ways]
        (answer,) = answers([Comparison.of(rows)])
        assert answer.text.startswith("Yes, both at once.")
        assert ("Forward alone, matmul(a, c[q]) is faster" in answer.text) is said


def test_all_questions_are_answered_by_the_full_cases(framework):
    compared = [Comparison.of(_rows(case, lambda way: 1.0)) for case in cases(framework, "full")]
    assert {answer.seed for answer in answers(compared)} == {"000", "001", "002", "003"}


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (0, 0, "as much memory"),
        (0, 2000, "2 kB of memory"),
        (2000, 0, "0 B of memory"),
        (2000, 1000, "1/2 of the memory"),
        (1000, 2000, "2x of the memory"),
    ],
)
def test_a_gain_over_a_way_that_allocates_nothing(theirs, ours, said):
    case, (mine, other) = next(iter(cases("torch"))), [WayFigures(1e-3, x, 1e-3, x, 0) for x in (ours, theirs)]
    assert gain_line(Comparison(case, mine, {"einsum": other})).endswith(f"with {said}.")


def test_the_largest_gain_comes_first_and_no_line_is_too_wide(framework):
    gains = iter((2.0, 8.0, 4.0))
    compared = []
    for case in list(cases(framework))[:3]:
        gain = next(gains)
        rows = _rows(case, lambda way, gain=gain: 1e-3 if way.label == OURS else gain * 1e-3)
        compared.append(Comparison.of(rows))
        assert f"planner is {gain:.0f}x as fast ({gain:.0f}x forward), with as much memory." in gain_line(compared[-1])
    lines = table(compared).splitlines()
    assert [text.split()[-5] for text in lines[2:]] == ["8x", "4x", "2x"]
    for scale in SCALES:
        for case in cases(framework, scale):
            figures = WayFigures(*[1.234e-4, 1.234e8] * 2, 1.234e8, extrapolated=True)
            wide = [Row(case, way, figures, "") for way in case.ways]
            comparison = Comparison.of(wide)
            texts = [header(case), *map(line, wide), gain_line(comparison), table([comparison])]
            assert max(len(text) for text in "\n".join(texts).splitlines()) <= WIDTH


def test_what_differs_is_not_measured(framework):
    case = _case(framework, "seed-outer-and-matmul")
    case = dataclasses.replace(case, ways=(case.ways[0], Way("wrong", lambda xp, x, y: -(x @ y))))
    right, wrong = measure_case(case, "quick")
    assert not right.differs
    assert right.figures.seconds > 0
    assert wrong.differs
    assert math.isnan(wrong.figures.seconds)


class _Clocked:
    """A run whose passes take a given time, as it says, and that counts how often it is asked to run everything."""

    framework = "torch"

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, 0

    def once(self):
        self.asked += 1
        return (np.zeros(2),), WayFigures(self.seconds, 1, self.seconds, 1, 0, once=True)

    def forward(self):
        return None

    both = forward


@pytest.mark.parametrize(("seconds", "slowest", "once"), [(1, 0, False), (5, 0, True), (5, 9, True), (5, 11, False)])
def test_a_slow_way_is_run_once_unless_another_was_slower(seconds, slowest, once):
    run = _Clocked(seconds)
    _, differs, figures = Run.measure(run, [np.zeros(2)], EFFORTS["quick"], slowest)
    assert differs == ""
    assert figures.once is once
    assert run.asked == (1 if once else 2)
    assert figures.gradient_seconds == seconds


def test_a_run_that_uses_another_way_keeps_the_arrays(framework):
    case = _case(framework, "seed-outer-and-matmul")
    first = RUNS[framework](case.ways[0], case.workload, case.gradients)
    ours = first.use(case.ways[-1])
    assert ours.way.label == OURS
    assert first.way is case.ways[0]
    assert differences(ours.results(), first.results()) == ""
    assert ours.cotangent is first.cotangent


def test_figures_as_text():
    seconds = [seconds_text(x) for x in (9440, 130, 2.915, 0.04639, 2.5e-6)]
    assert seconds == ["2.62 h", "2.17 min", "2.92 s", "46.4 ms", "2.5 us"]
    assert [bytes_text(x) for x in (2.147e9, 1.5e6, 102400, 0)] == ["2.15 GB", "1.5 MB", "102 kB", "0 B"]
    assert seconds_text(math.nan) == bytes_text(math.nan) == "-"
