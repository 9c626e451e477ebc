"""`Plan.analyze`: measured is what happens, predicted is what the plan says, and nothing of the caller's changes."""

import contextlib
import dataclasses
import importlib
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from conftest import examples
from engines import Torch, in_each
from hypothesis import assume, example, given, settings
from laws import exact_problems, problem_of

import planner
from planner.cli import main
from planner.inspect import memory as measure
from planner.inspect.analysis import Analysis, AnalyzedStep, Figures
from planner.program.calls import PreparedRun
from planner.program.frameworks import load_backend
from planner.testing import Problem
from planner.workloads import WORKLOADS

in_each_framework = in_each("torch", "jax", "numpy")
GATHERED = problem_of(WORKLOADS["seed-gathered-matmul"].resized(n=256, q=16))
THREE_WAY = problem_of(WORKLOADS["three-way-batch"].resized(b=8, k=512))


def planned(engine, problem, **options):
    """The plan of a problem, with its gradients where the framework has any, its operands and its index arrays."""
    operands, indices = engine.operands(problem), engine.indices(problem)
    return engine.plan(problem, operands, indices, **options), operands, indices


def assert_faithful(plan, found):
    """What holds of every analysis."""
    assert [row.number for row in found.steps] == list(range(len(plan.steps)))
    for row, step in zip(found.steps, plan.steps, strict=True):
        assert row.lowering == step.choice.lowering
        assert row.predicted.live_bytes == step.live_bytes
        assert row.predicted.flops == step.choice.cost.flops
        assert row.measured.seconds > 0
    forward = [row for row in found.steps if row.program == "forward"]
    assert len(forward) == len(plan.programs.forward.steps)
    retained = plan.cost.retained_bytes
    assert found.total("forward").predicted.retained_bytes == retained
    assert sum(row.predicted.retained_bytes for row in forward) == retained
    assert {row.program for row in found.totals} == ({"forward", "backward"} if plan.programs.backward else {"forward"})
    text = str(found)
    assert text.startswith(plan.text)
    values = json.loads(found.to_json())
    assert values["warnings"] == list(found.warnings)
    for row, read in zip((*found.steps, *found.totals), (*values["steps"], *values["totals"]), strict=True):
        assert Figures(**read["predicted"]) == row.predicted
        assert Figures(**read["measured"]) == row.measured
        assert read["off"] == dict(row.off)


def drawn(engine, **jax):
    """Draw problems; in JAX, which compiles each, fewer of them and some options."""
    few = jax if engine.name == "jax" else {}
    count = examples(6, 60) if engine.name == "jax" else examples(20, 400)
    return lambda law: settings(max_examples=count)(given(exact_problems(min_operands=2, max_axes=4, **few))(law))


pytestmark = pytest.mark.usefixtures("xla_sizes")


@in_each_framework
def test_retained_is_measured_as_predicted_and_nothing_changes(engine):
    @drawn(engine, max_operands=3, without=("size zero", "scalar"))
    def law(problem):
        assume(engine.name != "jax" or any(problem.requires_grad))
        plan, operands, indices = planned(engine, problem)
        with untouched(operands, problem.requires_grad) if engine.name == "torch" else contextlib.nullcontext():
            found = plan.analyze(*operands, rounds=1, **indices)
        assert_faithful(plan, found)
        retained = plan.cost.retained_bytes
        assert found.total("forward").measured.retained_bytes == retained
        if engine.name == "torch":
            kept = sum(row.measured.retained_bytes for row in found.steps if row.program == "forward")
            assert kept == retained

    if engine.name == "numpy":  # of an empty result a byte was left over
        law = example(Problem("a -> q[]", ((2,),), {"q": 0}, {"q": np.array(0)}, "drop"))(law)
    law()


@contextlib.contextmanager
def untouched(operands, needs):
    """Nothing within changes torch's operands, random numbers and settings."""
    import torch

    before = [x.detach().clone() for x in operands]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        state = torch.get_rng_state()
        yield
        assert torch.equal(state, torch.get_rng_state())
    for x, old, need in zip(operands, before, needs, strict=True):
        assert torch.equal(x, old)
        assert x.grad is None
        assert x.requires_grad == need
    assert torch.is_grad_enabled()


@in_each_framework
def test_steps_one_by_one_compute_what_the_call_does(engine, jax_in_a_hurry):
    @drawn(engine, max_operands=3)
    def law(problem):
        plan, operands, indices = planned(engine, problem)
        programs, backend = plan.programs, load_backend(engine.name)

        def run(given, program):
            values = dict(given.values)
            for step in program.steps:
                values.update(zip(step.outputs, given.bind(step, [values[v] for v in step.inputs])(), strict=True))
            return values

        def check(values, variables, expected):
            for variable, wanted in zip(variables, expected, strict=True):
                if variable is not None:
                    found = engine.described(values[variable])[0]
                    assert (found.reshape(wanted.shape) == wanted).all()

        values = run(backend.stepwise(plan, operands, indices), programs.forward)
        check(values, [programs.result], [problem.expected()])
        if programs.backward is not None:
            kept, gout = {v: values[v] for v in programs.kept}, engine.array(problem.output_gradient())
            values = run(backend.stepwise(plan, operands, indices, gout, kept), programs.backward)
            check(values, programs.gradients, problem.expected_gradients())

    law()


@in_each("torch", "numpy")
def test_how_a_step_runs_is_looked_up_before_it_is_timed(engine, monkeypatch):
    """To look up how a take runs takes torch 20 us, and the take itself 4."""
    plan, operands, indices = planned(engine, THREE_WAY)
    backend, asked = load_backend(engine.name), []
    step = plan.steps[0]
    row = backend.table.rows[step.choice.lowering]
    counted = PreparedRun(lambda op: asked.append(op) or row.prepared(op))
    monkeypatch.setitem(backend.table.rows, row.name, dataclasses.replace(row, run=counted))
    stepwise = backend.stepwise(plan, operands, indices)
    run = stepwise.bind(step, [stepwise.values[v] for v in step.inputs])
    asked.clear()
    run()
    assert asked == []


@in_each_framework
def test_live_bytes_are_near_what_is_predicted(engine):
    plan, operands, indices = planned(engine, THREE_WAY)
    found = plan.analyze(*operands, rounds=1, **indices)
    assert_faithful(plan, found)
    for row in found.steps:
        assert row.measured.live_bytes == pytest.approx(row.predicted.live_bytes, rel=0.3)
    assert not any("live" in dict(row.off) for row in found.steps)
    if engine.name == "torch":
        products = [row for row in found.steps if row.lowering == "matmul"]
        assert products
        assert all(row.measured.flops == row.predicted.flops for row in products)
        assert all(row.measured.bytes_moved == row.predicted.bytes_moved for row in found.steps)
    if engine.name == "jax":
        assert found.total("forward", "compiled").measured.live_bytes > 0
        assert "compiled" in str(found)


@in_each_framework
def test_a_false_cost_is_marked(engine):
    plan, operands, indices = planned(engine, THREE_WAY)
    first, *rest = plan.programs.forward.steps
    first = dataclasses.replace(first, live_bytes=10 * first.live_bytes)
    forward = dataclasses.replace(plan.programs.forward, steps=(first, *rest))
    plan = dataclasses.replace(plan, programs=dataclasses.replace(plan.programs, forward=forward))
    found = plan.analyze(*operands, rounds=1, **indices)
    assert dict(found.steps[0].off)["live"] == pytest.approx(0.1, rel=0.4)
    assert "  !  " in str(found)
    assert "off by more than 2x" in str(found)


def test_a_long_report_says_how_many_steps_it_leaves_out(monkeypatch):
    monkeypatch.setattr("planner.inspect.analysis.MOST_ROWS", 2)  # a step has two
    matrices = [np.ones((3, 3))] * 6
    found = planner.plan("ab, bc, cd, de, ef, fg -> ag", *matrices).analyze(*matrices, rounds=1)
    assert len(found.steps) == 5
    assert "... 4 more steps" in str(found)


@in_each_framework
@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_wrong_rates_are_warned_of(engine, factor):
    rates = {"flop_rate": 1e11 * factor, "bandwidth": 1e10 * factor, "skinny_rate": 1e11 * factor}
    problem = problem_of(WORKLOADS["three-way-batch"].resized(b=16, k=1024))
    problem = dataclasses.replace(problem, requires_grad=(False,) * len(problem.shapes))
    wrong = planner.Device("wrong", launch_seconds=0.0, **rates)
    plan, operands, indices = planned(engine, problem, device=wrong)
    found = plan.analyze(*operands, rounds=1, **indices)
    (warning,) = found.warnings
    assert "the machine's rates look wrong" in warning
    assert "run `python -m planner calibrate` or pass device=Device(...)" in warning
    assert f"warning: {warning}" in str(found)
    assert any("time" in dict(row.off) for row in found.steps)


PRODUCT = "ij, jk -> ik"
NOTHING = [Problem("ij -> ij", ((3, 4),)), Problem(PRODUCT, ((0, 4), (4, 5))), Problem(PRODUCT, ((3, 0), (0, 5)))]


@in_each_framework
@pytest.mark.parametrize("problem", [GATHERED, *NOTHING], ids=str)
def test_prepared_groups_no_steps_and_no_elements(engine, problem):
    plan, operands, indices = planned(engine, problem)
    groups = {name: planner.group(q, 16) for name, q in indices.items()}
    assert_faithful(plan, plan.analyze(*operands, **groups))


def test_a_call_that_does_not_fit_is_refused_as_the_plan_does():
    a, c, q = np.ones((4, 1, 2)), np.ones((3, 2, 1)), np.array([2, 0, 0, 1])
    plan = planner.plan("nij, q[n]jk -> nik", a, c, q=q)
    for operands, indices in [
        ((a, c[:2]), {"q": q}),
        ((a,), {"q": q}),
        ((a, c), {"q": q[:2]}),
        ((a, c), {}),
        ((a, c), {"q": q, "p": q}),
        ((a, c), {"q": q + 1}),
    ]:
        with pytest.raises(planner.PlannerError) as called:
            plan(*operands, **indices)
        with pytest.raises(planner.PlannerError) as analyzed:
            plan.analyze(*operands, **indices)
        assert type(analyzed.value) is type(called.value)
        assert str(analyzed.value) == str(called.value)
    for rounds in (0, True, 1.5):
        with pytest.raises(planner.PlannerError, match="must be a positive integer"):
            plan.analyze(a, c, q=q, rounds=rounds)


@in_each(
    torch=("torch.func", ("vmap", "grad"), "arrays have no values inside a transform"),
    jax=("jax", ("vmap", "grad", "jit"), "operand 0 is traced: it has no values"),
)
def test_arrays_without_values_are_refused(engine, sample):
    module, transforms, message = sample
    a, b = engine.array(np.ones((3, 4), "f4")), engine.array(np.ones((4, 5), "f4"))
    plan = planner.plan("ij, jk -> ik", a, b)
    for name in transforms:
        transform = getattr(importlib.import_module(module), name)
        with pytest.raises(planner.PlannerError, match=message):
            transform(lambda x: plan.analyze(x, b) and x.sum())(a[None] if name == "vmap" else a)
    if engine.name == "torch":
        with pytest.raises(planner.PlannerError, match="operand 0 is a meta or fake tensor"):
            plan.analyze(a.to("meta"), b.to("meta"))
        with pytest.raises(planner.PlannerError, match="operand 1 is on meta, but operand 0 on cpu"):
            plan.analyze(a, b.to("meta"))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
def test_torch_settings_are_as_before(mode, torch):
    plan, operands, indices = planned(Torch(), GATHERED)
    with getattr(torch, mode)():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = plan.analyze(*operands, rounds=1, **indices)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
        if mode == "inference_mode":  # operands made there
            plan.analyze(*(x * 1 for x in operands), rounds=1, **indices)
    assert_faithful(plan, found)
    assert found.total("backward").measured.live_bytes > 0


def test_torch_counts_operators(torch):
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    assert measure.torch_counts(lambda: a @ b) == measure.Counted(2 * 3 * 4 * 5, 4 * (12 + 20 + 15))
    assert measure.torch_counts(lambda: a.t().reshape(2, 6)) == measure.Counted(None, 4 * (12 + 12))
    assert measure.torch_counts(lambda: a.t().view(4, 3)) == measure.Counted(None, 0)
    assert measure.torch_counts(lambda: b.expand(7, 4, 5) + 1) == measure.Counted(None, 4 * (20 + 140))


def test_the_table():
    figures = Figures(2e-3, 10**6, 10**6, 10**6, 0)
    slower = dataclasses.replace(figures, seconds=7e-3, flops=None, retained_bytes=None)
    backward = dataclasses.replace(figures, retained_bytes=None)
    steps = (
        AnalyzedStep("forward", 0, "ij, jk -> ik", "matmul", figures, figures),
        AnalyzedStep("backward", 1, "ik, jk -> ij", "matmul", backward, slower),
    )
    measured = [("forward", "", figures), ("forward", "compiled", slower), ("backward", "", slower)]
    totals = tuple(AnalyzedStep(program, None, "", how, figures, found) for program, how, found in measured)
    found = Analysis("ij, jk -> ik", "jax", "cpu", "float32", 3, steps, totals, ("rates",))
    assert str(found).splitlines() == [
        "ij, jk -> ik        jax · cpu · float32 · medians of 3 rounds",
        "  #  step                  lowered to  FLOPs  moves  live  retained  time",
        "  0  ij, jk -> ik          matmul        1 M   1 MB  1 MB       0 B  2 ms",
        "                             measured    1 M   1 MB  1 MB       0 B  2 ms",
        "     the forward program                 1 M   1 MB  1 MB       0 B  2 ms",
        "                             measured    1 M   1 MB  1 MB       0 B  2 ms",
        "  !                          compiled      -   1 MB  1 MB         -  7 ms  time x3.5",
        "  1  ik, jk -> ij          matmul        1 M   1 MB  1 MB         -  2 ms",
        "  !                          measured      -   1 MB  1 MB         -  7 ms  time x3.5",
        "     the backward program                1 M   1 MB  1 MB       0 B  2 ms",
        "  !                          measured      -   1 MB  1 MB         -  7 ms  time x3.5",
        "  ! time or live bytes are off by more than 2x; under 50 us and 16 KiB they are not judged",
        "warning: rates",
    ]
    with pytest.raises(KeyError):
        found.total("backward", "compiled")


@in_each_framework
def test_explain_analyze(engine, capsys):
    grad = ["--grad"] if engine.name != "numpy" else []
    line = ["explain", "nij, q[n]jk -> nik", "64x1x8", "4x8x8", "--index", "q=64", "--backend", engine.name, *grad]
    assert main([*line, "--analyze"]) == 0
    shown = capsys.readouterr().out
    assert "this plan" in shown
    assert "the forward program" in shown
    assert main([*line, "--analyze", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "nij, q[n]jk -> nik"


def test_explain_analyze_refuses_what_no_index_fits(capsys):
    assert main(["explain", "q[n] -> n", "0", "--index", "q=3", "--analyze"]) == 2
    assert "size 0" in capsys.readouterr().err


PAGE = """```python
import numpy as np
import planner

a, b = np.ones((20, 30)), np.ones((30, 40))
print(planner.plan("ij, jk -> ik", a, b).analyze(a, b))
```

```text
out of date
```

After.
"""


def test_the_page_is_built(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    build = str(Path(__file__).parent.parent / "docs" / "build.py")
    monkeypatch.setattr("sys.argv", [build, str(page)])
    runpy.run_path(build, run_name="__main__")
    text = page.read_text(encoding="utf-8")
    assert "out of date" not in text
    assert "```text\nij, jk -> ik        numpy · cpu · float64 · medians of 3 rounds\n" in text
    assert text.endswith("```\n\nAfter.\n")
    page.write_text(PAGE.replace("print(", "prunt("))
    with pytest.raises(SystemExit, match="name 'prunt' is not defined"):
        runpy.run_path(build, run_name="__main__")
    assert "out of date" in page.read_text()


def test_the_cost_model_shows_each_seed():
    page = (Path(__file__).parent.parent / "docs" / "cost-model.md").read_text(encoding="utf-8")
    names = [name for name in WORKLOADS if name.startswith("seed-") and f'WORKLOADS["{name}"]' in page]
    assert len({WORKLOADS[name].source for name in names}) == 4
    assert page.count("the forward program") == 4
