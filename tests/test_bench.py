"""The benchmark: what it times, when it stops, and what it writes."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
from conftest import Clock, installed_frameworks
from engines import ENGINES

import planner
from planner.bench import choices, command, dense, families, report, timing
from planner.bench.corpus import corpus
from planner.bench.timing import Result, Settings
from planner.demo.ways import OURS

QUICK = Settings(rounds=5, budget_seconds=0.0, pause_seconds={"torch": 0.0, "jax": 0.0})


def result(measured, **options):
    return Result("part", "torch", "what", 2.0, measured, medians={OURS: 0.002, "peer": 4e-6}, **options)


def test_a_target_is_a_lower_bound_or_an_upper_one():
    assert [result(x).met for x in (1.9, 2.0, 2.1)] == [False, True, True]
    assert [result(x, at_most=True).met for x in (1.9, 2.0, 2.1)] == [True, True, False]


@pytest.fixture
def clock(monkeypatch):
    """The clock of whatever is timed."""
    clock = Clock()
    monkeypatch.setattr(timing, "stolen_seconds", lambda: 0.0)
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    monkeypatch.setattr(timing, "block_seconds", partial(timing.block_seconds, clock=clock))
    return clock


def test_rounds_are_interleaved_and_end_with_the_budget(clock):
    ran = []
    programs = {name: partial(clock.run, 0.03, ran, name) for name in "ab"}
    times = timing.time_in_turn(programs, "torch", QUICK)
    # One round to see how long they take, then three are made however little time there is.
    assert ran == ["a", "b"] * 4
    assert [len(seconds) for seconds in times.values()] == [3, 3]


def test_short_runs_are_averaged_over_many(clock):
    ran = []
    programs = {name: partial(clock.run, seconds, ran, name) for name, seconds in (("short", 0.001), ("long", 0.03))}
    times = timing.time_in_turn(programs, "torch", QUICK)
    assert ran.count("long") == 1 + 2 * 3, "each is warmed and timed"
    assert ran.count("short") > 3 * 5
    assert times["short"] == pytest.approx([0.001] * 3)
    assert times["long"] == pytest.approx([0.03] * 3)


@pytest.mark.parametrize(
    ("lost", "expected", "runs"),
    [
        ([0], 1.0, {"timed": 1, "repeated": 0}),
        ([0.5, 0.001], 2.0, {"timed": 1, "repeated": 1}),
        ([0.5, 0.3, 0.1, 0.2, 0.4, 0.6], 3.0, {"timed": 1, "repeated": 1, "disturbed": 1}),
    ],
)
def test_a_run_whose_core_was_taken_is_repeated(monkeypatch, lost, expected, runs):
    clock = {"now": 0.0, "stolen": 0.0, "run": 0}

    def measure():
        clock["stolen"] += lost[clock["run"]]
        clock["now"] += 1.0
        clock["run"] += 1
        return float(clock["run"])

    monkeypatch.setattr(timing, "stolen_seconds", lambda: clock["stolen"])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["now"])
    settings = Settings()
    assert timing.seconds_in_peace(measure, 0.0, settings) == expected
    assert settings.runs == runs


def test_stolen_time_is_read_or_nothing():
    assert timing.stolen_seconds() >= 0


def test_what_cannot_win_is_run_once(monkeypatch):
    seconds = {OURS: 3.0, "fast": 1.0, "near": 1.4, "hopeless": 2.0}
    monkeypatch.setattr(choices, "seconds_in_peace", lambda measure, pause, settings: seconds[measure.args[0]()])
    programs = {name: lambda name=name: name for name in seconds}
    times = choices._best_rounds(programs, Settings(rounds=4, budget_seconds=100.0), 0.0)
    assert {name: len(found) for name, found in times.items()} == {OURS: 4, "fast": 4, "near": 4, "hopeless": 1}


@pytest.mark.parametrize("framework", installed_frameworks())
def test_known_plans_differ_and_compute_the_same(framework):
    shapes = (6, 5), (4, 5, 3)
    operands = [planner.Operand(shape, requires_grad=framework != "numpy") for shape in shapes]
    plan = planner.plan("nj, q[n]jk -> nk", *operands, q=(6,), backend=framework)
    others = choices.known_plans(plan)
    assert len(others) >= len(plan.alternatives(100)), "each has a label of its own"
    ways = [tuple(step.choice.lowering for step in p.steps) for p in (plan, *others.values())]
    assert others
    assert len(set(ways)) == len(ways)
    arrays = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 5 for shape in shapes]
    q = np.array([0, 3, 3, 1, 2, 0])
    expected = np.einsum("nj,njk->nk", arrays[0], arrays[1][q])

    engine = ENGINES[framework]()
    for label, other in others.items():
        found = np.asarray(other(*map(engine.array, arrays), q=engine.array(q)))
        assert (found == expected).all(), label


def test_the_command_writes_a_whole_run_only(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "PARTS", {"part": lambda framework, settings: iter([result(1.5)])})
    monkeypatch.setattr(command, "_refusal", lambda frameworks: "")
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: object())
    out = tmp_path / "figures"
    assert command.main(["--only", "part", "--out", str(out)]) == 0
    assert not out.exists()
    assert command.main(["--strict", "--out", str(out)]) == 1
    assert "0 of 2 targets met" in capsys.readouterr().out
    page, figures = (out / "cpu.md").read_text(), json.loads((out / "cpu.json").read_text())
    assert "| part | torch | what | >= 2x | 1.5x | NO | planner.contract 2 ms, peer 4 us |" in page
    assert [row["met"] for row in figures["results"]] == [False, False]
    assert figures["circumstances"]["processor"] in page
    assert "- 0 runs, 0 of them repeated" in page


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("rounds", 2, "a median needs 3"), ("sample", -1, "0 for all"), ("passes", 0, "1 or more")],
)
def test_too_few_rounds_and_rows_are_refused(option, value, said, capsys):
    with pytest.raises(SystemExit):
        command.main([f"--{option}", str(value)])
    assert f"--{option} {value}: " in (error := capsys.readouterr().err)
    assert said in error


@pytest.mark.parametrize(("kind", "counts"), [("peak_bytes", True), ("retained_bytes", True), ("seconds", False)])
def test_plans_that_need_more_memory_than_einsum_are_no_candidates(kind, counts):
    operands = [planner.Operand(shape, requires_grad=True) for shape in [(60, 5), (4, 5, 3)]]
    plan = planner.plan("nj, q[n]jk -> nk", *operands, q=(60,), backend="numpy")
    most = max(getattr(cost, kind) for cost in (plan.cost, plan.naive_cost))
    for more in (0, 1):
        cost = dataclasses.replace(plan.cost, **{kind: most + more})
        other = dataclasses.replace(plan, programs=dataclasses.replace(plan.programs, cost=cost))
        assert choices._is_as_lean(other, plan) == (not (more and counts))


@pytest.mark.parametrize("framework", [name for name in installed_frameworks() if name != "numpy"])
def test_steps_and_choices_of_rows_of_the_corpus_are_counted(framework, monkeypatch):
    first, second = kept = corpus("overhead")[:2]
    settings = Settings(scales=("overhead",))
    monkeypatch.setattr(choices, "sampled_rows", lambda scale, settings: kept)
    monkeypatch.setattr(choices, "known_plans", lambda plan: {"another": plan})
    seconds = iter([1.2e-6, 1e-6] * 3 + [1.1e-6, 1e-6] * 3 + [1e-6] * 12)  # of the chosen plan and the other, in turn
    monkeypatch.setattr(choices, "least_seconds", lambda run, blocks: next(seconds))
    forward, trained = choices.corpus_choices(framework, settings)
    assert (forward.measured, trained.measured) == (0.5, 1.0)
    assert forward.what.startswith("share of 2 rows at overhead, forward, within 1.15x")
    assert forward.what.endswith(f"worst {first.spec} 1.20x, {second.spec} 1.10x")
    assert "with gradients" in trained.what

    step = choices.StepTime(framework, first.name, first.spec, "matmul", False, predicted=1e-6, measured=1.8e-6)
    times = iter([step, step, dataclasses.replace(step, measured=1.2e-6), step, step, step])
    monkeypatch.setattr(choices, "check_workload", lambda framework, row: iter([next(times)]))
    assert [result.measured for result in choices.predicted_steps(framework, settings)] == [0.5, 1.0]


def test_options_reach_the_parts(monkeypatch):
    assert {"corpus", "workloads"} <= set(command.PARTS)
    given = []

    def part(framework, settings):
        given.append((framework, settings.passes, settings.sample, settings.scales))
        return iter(())

    monkeypatch.setattr(command, "PARTS", {"part": part})
    monkeypatch.setattr(command, "_refusal", lambda frameworks: "")
    command.main(["--only", "part", "--framework", "torch", "--passes", "3", "--sample", "7", "--scale", "cache"])
    assert given == [("torch", 3, 7, ("cache",))]


def test_bytes_are_shown_without_times():
    assert report.cells(result(1.0, unit="MB", at_most=True))[3:] == ("<= 2 MB", "1 MB", "yes", "")


CONTEXTS = ("with gradients", "with hooks on saved tensors", "under torch.func.grad", "under jvp",
            "under vmap over 16", "under vmap of grad over 16")  # fmt: skip


def test_warm_calls_are_timed_in_each_context(torch):
    settings = Settings(rounds=3, budget_seconds=0.0, pause_seconds={"torch": 0.0}, calls=3)
    found = list(dense.warm_call("torch", settings))
    assert [line.what.split(": ")[0] for line in found] == [
        "5 x 784 by 784 x 10",
        "5 x 784 by 784 x 10, operands that take gradients",
        "a chain of four 8 x 8",
        *[f"{name} {context}" for name in ("a product", "a gather") for context in CONTEXTS],
    ]
    assert all(set(line.medians) == {OURS, "torch.einsum"} for line in found)


def test_warm_eager_calls_of_jax_are_timed(jax):
    """Values are compared first; a call of a plan is compared with one of `contract`, and this with einsum."""
    found = list(dense.warm_call("jax", Settings(calls=3)))
    names = ["a product", "a gather", 'a gather under "drop"', "a chain of four 8 x 8"]
    assert [line.what for line in found] == [
        f"{name}, {ours}: of the time of {peer}"
        for name in names
        for ours, peer in ((OURS, "jnp.einsum"), ("plan(...)", OURS))
    ]
    assert all(line.framework == "jax" and line.measured > 0 and len(line.medians) == 2 for line in found)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_compare_runs_a_spec_beside_what_users_write(framework, tmp_path, capsys):
    pytest.importorskip(framework)
    pytest.importorskip("matplotlib").use("Agg")
    from planner.cli import main

    arguments = ["compare", "nij, q[n]jk -> nik", "60x1x8", "5x8x8", "--index", "q=60", "--backend", framework]
    page = tmp_path / "ways.html"
    assert main([*arguments, "--plot", str(tmp_path / "ways.png"), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    labels = ["gather, einsum", "torch.compile", "opt_einsum", "planner.contract"]
    assert [label for label in labels if f"  {label} " in shown] == [
        x for x in labels if framework == "torch" or x[0] != "t"
    ]
    assert "DIFFERS" not in shown
    table = page.read_text(encoding="utf-8")
    assert "All values and gradients are equal." in table
    assert [x for x in labels if f">{x}</th>" in table] == [x for x in labels if f"  {x} " in shown]
    assert table.count('class="bar compute"') == table.count('scope="row"')
    assert (tmp_path / "ways.png").stat().st_size > 1000
    assert main(["compare", "ij, ij -> ij", "1x3", "4x3", "--backend", framework]) == 2
    assert "broadcast" in capsys.readouterr().err
    assert main([*arguments, "--memory-limit", "1 MB"]) == 2
    assert main(["compare", "ij -> j", "3x4", "--backend", "numpy"]) == 2


def test_compare_says_what_it_cannot_run(capsys):
    pytest.importorskip("torch")
    from planner.cli import main

    def refusal(*arguments):
        assert main(["compare", *arguments]) == 2
        return capsys.readouterr().err

    assert "'j' repeats the result" in refusal("i -> ij", "3", "--size", "j=4")
    assert "'i' repeats the result" in refusal("i -> ii", "3")
    assert "'q' indexes 5 and 3" in refusal("q[n]j, q[n]k -> njk", "5x2", "3x2", "--index", "q=4")
    assert "no index array 'q' fits" in refusal("q[n]j -> nj", "0x2", "--index", "q=4")
    assert "no index array 'q' fits" in refusal("n -> q[n]", "4", "--index", "q=4", "--size", "q=0")


def test_new_sizes_of_public_strings_are_timed_above_the_same_call_again(monkeypatch):
    rows = [row for row in corpus("overhead") if row.grow][:2]
    monkeypatch.setattr(families, "corpus", lambda scale: rows)
    monkeypatch.setattr(families, "_loops", dict)
    results = list(families.families("torch", Settings()))
    assert ["with gradients" in result.what for result in results[::2]] == [False, True]
    assert all("above the same call again" in result.what for result in results[::2])
    assert all(result.unit == "s" and result.at_most for result in results)
    assert results[0].measured <= results[1].measured
    assert list(families.families("jax", Settings())) == []
