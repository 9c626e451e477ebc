"""`check` itself: specs that hold, contractions and kernels that are wrong, and the programs that show it."""

import dataclasses
import sys

import numpy as np
import pytest
from conftest import run_python
from hypothesis import given, settings
from laws import MODES

import planner
import planner.testing
from planner.cli import main
from planner.cost.figures import StepCost
from planner.program.frameworks import load_backend
from planner.program.implementations import Implementation
from planner.program.ops import JointGradient
from planner.testing import Problem, check, engines, run_step, scripts
from planner.testing.checking import _Task
from planner.testing.engines import installed
from planner.testing.judgement import Subject, allowed
from planner.testing.laws import LAWS, _with_bad_index
from planner.testing.strategies import problems

TORCH = pytest.mark.skipif("torch" not in installed(), reason="torch is not installed")


def gathered(a, c, q):
    return np.matmul(a, c[q])


@pytest.mark.parametrize(
    "spec",
    [
        "nij, q[n]jk -> nik",
        "ij, jk, kl -> il",
        "n, nk -> q[n]k",
        "...i, i... -> ...",
        "ii, i -> i",
        "q[...]k, ...k -> ...",
        "ab -> aab",
        "ij",
        "ij,",  # a scalar operand
        "bhqd, b h i[bhqk] d -> bhqk",
    ],
)
def test_specs_that_hold(spec):
    report = check(spec, backends=("numpy", "torch") if "torch" in installed() else "numpy", max_examples=4)
    assert report.passed, report
    tried = {v.law for v in report.verdicts if not v.skipped}
    assert {"values", "strides", "every path", "every lowering", "retained bytes", "peak bytes"} <= tried
    assert all(v.examples >= 1 or v.skipped for v in report.verdicts)
    assert "laws hold" in str(report)


def test_jax_and_the_agreement_of_frameworks(jax):
    told = []
    report = check(
        "nj, q[n]j -> n", {"j": 2}, backends=("numpy", "jax"), max_examples=4, progress=lambda *what: told.append(what)
    )
    assert report.passed, report
    assert {total for _, total in told} == {len(told)}
    assert {"frameworks agree", "second derivatives"} <= {v.law for v in report.verdicts if v.examples}


def test_what_rounding_explains_is_a_figure():
    """Two units a step, and four a term, for half types of float32."""
    assert allowed("float32", 2, 8, np.float64(3)) == (2 * 2 + 4 * 8) * 2.0**-24 * 3
    assert allowed("bfloat16", 1, 2, np.float64(1)) == 2 * 2.0**-8 + 8 * 2.0**-24


@pytest.mark.parametrize(("spec", "most"), [("ij, j -> i", 547), ("nij, q[n]jk -> nik", 23), ("...i, i -> ...", 66)])
def test_problems_for_memory_have_some_hundred_thousand_points(spec, most):
    (law,) = (law for law in LAWS if law.name == "peak bytes")
    sizes = set()

    @settings(max_examples=20, database=None, deadline=None)
    @given(_Task(spec, None, ("float32",), None, Subject(), 1).problems(law, ("float32",)))
    def draw(problem):
        sizes.update(n for shape in problem.shapes for n in shape)

    draw()
    assert most // 2 <= min(sizes)
    assert max(sizes) <= most + 1


@TORCH
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "int32"])
def test_dtypes_and_sizes_that_need_rounding(dtype):
    """What rounding explains holds; nothing, and the wrong sign, do not."""
    options = {"backends": "torch", "dtypes": dtype, "max_examples": 4}
    report = check("ij, jk -> ik", {"j": 300}, **options)
    assert report.passed, report
    for wrong in (lambda a, b: (a @ b) * 0, lambda a, b: -(a @ b)):
        report = check("ij, jk -> ik", {"i": 4, "j": 300, "k": 4}, implementation=wrong, laws="values", **options)
        assert not report.passed


def test_a_law_without_problems_is_skipped_and_the_others_are_told(monkeypatch):
    draws = {"index_modes": ("raise",), "min_size": 2}
    values = dataclasses.replace(LAWS[0], name="of good indices", draws=draws)
    monkeypatch.setattr("planner.testing.checking.LAWS", (*LAWS, values))
    report = check("n, q[n] -> n", {"q": 0}, backends="numpy", max_examples=4)
    assert report.passed, report
    assert any(v.skipped == "no sizes that fit were found" for v in report.verdicts)
    assert any(v.examples for v in report.verdicts)


@TORCH
def test_frameworks_agree_in_integers():
    frameworks, dtypes = ("numpy", "torch"), ("uint8", "int8")
    report = check("ij, jk, kl -> il", backends=frameworks, dtypes=dtypes, laws="frameworks agree")
    assert report.passed, report


# -- what is wrong is found ---------------------------------------------------------------------------


def of_its_memory(a):
    """What lies at the start of the array's memory, whatever its strides."""
    memory = a.base if a.base is not None and a.base.nbytes >= a.nbytes else a
    return np.ndarray(a.shape, a.dtype, memory)


WRONG = {
    "values": lambda a, c, q: gathered(a, c, q) * 2,
    "an index from the end": lambda a, c, q: gathered(a, c, np.maximum(q, 0)),
    "a repeated index": lambda a, c, q: gathered(a, c, np.repeat(q[:1], q.size)),
    "another dtype": lambda a, c, q: gathered(a, c, q).astype("float64"),
    "another shape": lambda a, c, q: gathered(a, c, q)[..., None],
    "operands are overwritten": lambda a, c, q: (gathered(a, c, q), a.fill(0))[0],
    "no array": lambda a, c, q: gathered(a, c, q).tolist(),
    "an exit": lambda a, c, q: sys.exit(3),
    "an error": lambda a, c, q: gathered(a, c, q).reshape(3, 3, 3),
    "strides are ignored": lambda a, c, q: gathered(of_its_memory(a), c, q),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_implementation_that_is_wrong_is_broken(name):
    report = check("nij, q[n]jk -> nik", backends="numpy", implementation=WRONG[name], max_examples=60)
    assert not report.passed, report
    assert report.failures[0].problem is not None
    assert all(text in str(report) for text in ("laws broken", "to see it again, run", "implementation = ..."))


def test_an_implementation_that_is_right_holds():
    report = check("nij, q[n]jk -> nik", backends="numpy", implementation=gathered, max_examples=30)
    assert report.passed, report
    assert [v.law for v in report.verdicts if not v.skipped] == ["values", "strides", "sizes 0 and 1"]


@TORCH
def test_an_implementation_in_torch_is_differentiated():
    """Broken are the laws of the derivatives that are wrong, and of the first operand as of the second."""
    import torch

    def product(a, c, q):
        return torch.matmul(a, c[q.long()])

    def doubled(x):
        return 2 * x - x.detach()

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g.clone()

    both = {"gradients", "second derivatives"}
    for implementation, broken in (
        (product, set()),
        (lambda a, c, q: product(doubled(a), c, q), both),
        (lambda a, c, q: product(a, doubled(c), q), both),
        (lambda a, c, q: product(Once.apply(a), c, q), {"second derivatives"}),
    ):
        report = check("nij, q[n]jk -> nik", implementation=implementation, backends="torch", max_examples=30)
        found = {failure.law for failure in report.failures}
        assert found & both == broken, report
        assert report.passed == (not broken)


def test_chance_is_told():
    calls = iter(range(10**9))
    report = check("i -> i", backends="numpy", implementation=lambda x: x + (next(calls) == 5), max_examples=20)
    assert "something depends on chance" in str(report)


# -- every law can fail -------------------------------------------------------------------------------


CONTRACT = "planner.testing.judgement.contract"


@TORCH
def test_every_law_can_fail(monkeypatch, torch):
    """Each law, with a fault that it alone is about."""
    real, spec = planner.contract, "nij, q[n]jk -> nik"

    def broken(*laws, backends="torch"):
        report = check(spec, backends=backends, laws=laws, max_examples=12)
        assert {f.law for f in report.failures} == set(laws), report
        assert all(f.script for f in report.failures)
        monkeypatch.undo()

    rows = load_backend("torch").table.rows
    row = rows["grouped matmul"]
    wrong = dataclasses.replace(row, run=lambda *given: tuple(x + 1 for x in row.run(*given)))
    monkeypatch.setitem(rows, "grouped matmul", wrong)
    broken("every lowering")

    monkeypatch.setattr(engines.measure, "torch_memory", lambda call: (call(), engines.measure.Measured(10**9, 7)))
    broken("retained bytes", "peak bytes")

    def forgetful(*given, optimize="auto", **options):
        return real(*given, **options) + (optimize == "greedy")

    monkeypatch.setattr(CONTRACT, forgetful)
    broken("every path")

    def silent(*given, index_mode="raise", **options):
        return real(*given, index_mode="clip" if index_mode == "raise" else index_mode, **options)

    monkeypatch.setattr(CONTRACT, silent)
    broken("index modes")

    def differs(*given, **options):
        result = real(*given, **options)
        return result * 2 if isinstance(result, torch.Tensor) else result

    monkeypatch.setattr(CONTRACT, differs)
    every = ("frameworks agree", "values", "gradients", "second derivatives", "strides", "sizes 0 and 1")
    broken(*every, backends=("numpy", "torch"))


def test_frameworks_that_disagree_are_each_shown(monkeypatch, torch, jax):
    """Which may be some without NumPy."""
    real = planner.contract
    monkeypatch.setattr(CONTRACT, lambda *given, **options: real(*given, **options) + (type(given[1]) is torch.Tensor))
    report = check("i ->", backends=("torch", "jax"), laws="frameworks agree", max_examples=4)
    (failure,) = report.failures
    assert (failure.law, failure.backend) == ("frameworks agree", "all")
    assert failure.script.startswith("# torch\n")
    assert "# jax\n" in failure.script


def test_an_array_in_a_program_holds_all_of_its_memory():
    x = np.arange(12, dtype="int16").reshape(3, 4).T
    memory = "np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 'int16')"
    assert scripts._code(x) == f"np.lib.stride_tricks.as_strided({memory}, (4, 3), (2, 8))"


def test_one_bad_index_is_made_among_several():
    """Of two bad ones it is not promised which is named."""
    q, p = np.array([0, 2, -1]), np.array([1, 1, 0])
    problem = Problem("q[n]p[n] -> n", ((3, 2),), indices={"q": q, "p": p}, index_mode="clip")
    assert _with_bad_index(problem) == ("q", (0,), 3)
    assert _with_bad_index(dataclasses.replace(problem, indices={"q": q, "p": p + 1})) is None


# -- a kernel of one's own ------------------------------------------------------------------------------


def product(run, **fields):
    """A row for plain products of two matrices."""

    def supports(op):
        plain = len(op.spec.inputs) == 2 and not isinstance(op, JointGradient) and not op.spec.gathers
        return None if plain and sorted(map(len, op.spec.terms)) == [2, 2, 2] else "it multiplies two matrices"

    return Implementation("mine", supports, lambda op, device: StepCost(0, 0, 0, 0), run, **fields)


def einsum(op, inputs, index):
    text = str(op.spec).replace(" ", "")
    module = sys.modules[type(inputs[0]).__module__.partition(".")[0]]
    return (module.einsum(text, *inputs),)


@pytest.mark.parametrize("framework", [name for name in installed() if name != "jax"])
def test_a_kernel_of_ones_own(framework):
    options = {"kernel": product(einsum), "backends": framework, "max_examples": 20}
    report = check("ij, jk -> ik", **options)
    assert report.passed, report
    assert "mine" not in load_backend(framework).table.rows
    with pytest.raises(planner.PlannerError, match="supports no step"):
        check("ijk, jk -> i", **options)


@TORCH
def test_a_kernel_that_is_wrong_is_broken():
    import torch

    def off_by_one(op, inputs, index):
        (x,) = einsum(op, inputs, index)
        return (x + 1 if x.shape[0] > 2 else x,)

    def overwrites(op, inputs, index):
        found = einsum(op, inputs, index)
        inputs[0].zero_()
        return found

    def wasteful(op, inputs, index):
        spare = torch.zeros(10**6)
        return (einsum(op, inputs, index)[0] + spare[0],)

    for run, what in ((off_by_one, "differs"), (overwrites, "changes its inputs"), (wasteful, "allocates more")):
        report = check("ij, jk -> ik", kernel=product(run), backends="torch", max_examples=20)
        assert not report.passed
        assert what in str(report), report


# -- reproductions ----------------------------------------------------------------------------------------


# What a program found is what it expected.
COMPARED = """
def arrays(x):
    some = x if isinstance(x, (list, tuple)) else [x]
    return [np.asarray(y.detach() if hasattr(y, "detach") else y) for y in some]
wanted = arrays(expected) if not isinstance(expected, list) else [arrays(expected)[n] for n in wanted]
for one, other in zip(arrays(found), wanted, strict=True):
    assert one.shape == other.shape and (one == other).all(), (spec, one, other)
"""


@pytest.mark.parametrize("framework", installed())
def test_programs_show_what_they_say(framework):
    """The program of each kind, of problems with all that a problem can have, runs and prints equal results."""
    found = []

    @settings(max_examples=3 if framework == "jax" else 6, database=None, deadline=None)
    @given(problems(2, 3, gathers=True, index_modes=MODES, max_value=2, without=("size one",)))
    def collect(problem):
        if any(problem.requires_grad) and problem.is_exact(4):
            found.append(problem)

    collect()
    assert found
    made = []
    for problem in found:
        made.append(scripts.of_values(framework, problem, Subject(), {}))
        if framework != "numpy":
            vectors = {number: v for number, v in enumerate(scripts.vectors_of(problem)) if number in problem.wanted}
            made += [scripts.of_gradients(framework, problem, Subject(), {}, along) for along in (None, vectors)]
    run_python("\n".join(script + COMPARED for script in made))


def test_masks_are_judged_by_what_they_mean():
    """Of an operand that its step reads through another bracket, too."""
    indices = {"q": np.array([1, 1]), "r": np.array([0, 9, 2])}
    arrays = [np.arange(30.0).reshape(10, 3), np.ones((7, 8))]
    plan = planner.plan("q[m]n, r[n]k -> mk", *arrays, index_mode="drop", **indices)
    masks = [number for number, step in enumerate(plan.steps) if step.choice.lowering == "mask"]
    assert masks
    for number in masks:
        (found,), (expected,) = run_step(plan, arrays, indices, number)
        assert (found == expected).all()


@pytest.mark.parametrize("framework", [name for name in installed() if name != "numpy"])
@pytest.mark.parametrize("spec", ["q[], q[] cd, cbd -> c", "d q[ac], q[ac], abc, dca -> c q[ac]"])
def test_masks_zero_the_rows_that_no_index_names(framework, spec):
    """A framework may zero them always, or only where they hold NaN: the law puts NaN there. In all index modes."""
    assert check(spec, backends=framework, laws="every lowering", max_examples=12).passed


@pytest.mark.parametrize("framework", [name for name in installed() if name != "numpy"])
def test_masks_that_leave_nan_in_unread_rows_are_found(framework, monkeypatch):
    if framework == "jax":
        monkeypatch.setattr("planner.backends.jax.guards.zero_unread_rows", lambda x, *rest: x)
    else:
        monkeypatch.setattr("planner.backends.torch.ops.find_read_rows", lambda ops, x, *rest: ops.zeros((), x) == 0)
    report = check("q[], q[] ce, cbe -> c", sizes={"q": 3}, backends=framework, laws="every lowering", max_examples=8)
    assert not report.passed
    assert "as 'mask'" in str(report)


@TORCH
def test_programs_of_steps_and_memory_run():
    problem = Problem("nij, q[n]jk -> nik", ((4, 1, 2), (3, 2, 2)), indices={"q": np.array([2, 0, 0, 1])})
    plan = planner.plan(problem.spec, *problem.shapes, **problem.arguments(), backend="torch")
    assert "expected" in run_python(scripts.of_step("torch", problem, 1, "", plan, own=False))
    assert "measured" in run_python(scripts.of_memory("torch", problem))


# -- arguments and the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("i[",), {}, "bracket"),
        (("ij -> i", {"z": 3}), {}, "'z', which 'ij -> i' does not have"),
        (("ij -> i", {"i": -1}), {}, "-1"),
        (("ij -> i",), {"backends": "cupy"}, "cupy"),
        (("ij -> i",), {"backends": ()}, "empty"),
        (("ij -> i",), {"dtypes": "float8"}, "float8"),
        (("ij -> i",), {"max_examples": 0}, "max_examples"),
        (("ij -> i",), {"index_modes": ("wrap",)}, "wrap"),
        (("ij -> i",), {"laws": ("speed",)}, "speed"),
        (("ij -> i",), {"laws": ()}, "laws= is empty"),
        (("ij -> i",), {"laws": "frameworks agree"}, "nothing was checked"),
        (("ij -> i",), {"dtypes": "bfloat16"}, "NumPy has no bfloat16"),
        (("ij -> i",), {"paths": "quick"}, "quick"),
        (("ij -> i",), {"paths": []}, "paths"),
        (("ij -> i",), {"paths": "auto", "implementation": len}, "paths="),
        (("ij -> i", [3]), {}, "not a mapping"),
        (("ij -> i",), {"backends": 3}, "backends"),
        (("ij -> i",), {"implementation": 3}, "not a function"),
        (("ij -> i",), {"kernel": 3, "backends": "numpy"}, "Implementation"),
        (("ij -> i",), {"kernel": product(einsum), "backends": ("numpy", "torch")}, "one backend"),
        (("q[n] -> n", {"q": 0, "n": 2}), {"index_modes": "raise"}, "no sizes"),
    ],
)
def test_bad_arguments_are_named(arguments, options, message):
    with pytest.raises(planner.PlannerError, match=message):
        check(*arguments, **{"backends": "numpy", **options})


@pytest.mark.parametrize(
    ("spec", "fault", "status", "printed"),
    [("ij, j -> i", 1, 0, "laws hold"), ("ij, j -> i", 2, 1, "BROKEN"), ("ij, j -> [", 1, 2, "^")],
)
def test_the_command(spec, fault, status, printed, capsys, monkeypatch, tmp_path):
    real = planner.contract
    monkeypatch.setattr(CONTRACT, lambda *given, **options: real(*given, **options) * fault)
    page = tmp_path / "check.html"
    options = ["--backend", "numpy", "--max-examples", "3", "--size", "i=2", "--html", str(page)]
    assert main(["check", spec, *options]) == status
    assert printed in "".join(capsys.readouterr())
    assert page.exists() == (status < 2)
    if status < 2:
        text = page.read_text(encoding="utf-8")
        assert printed in text
        assert ("import planner" in text) == ('<span class="bad">BROKEN</span>' in text) == bool(status)
        assert "numpy computes no gradients" in text


def test_all_paths_of_many_operands_are_not_looked_at():
    """Twelve operands have more than a billion."""
    spec = "ab,bc,cd,de,ef,fg,gh,hi,ij,jk,kl,lm->am"
    assert check(spec, backends=("numpy",), laws=("every path",), max_examples=1).passed


@pytest.mark.parametrize("spec", ["q[a]->a", "q[n]j,jk->nk", "nj->q[n]j"])
def test_steps_of_plans_that_read_nan_are_right(spec):
    """Steps leave out what is out of range; results are marked afterwards."""
    report = check(spec, index_modes=("nan",), backends=("numpy",), laws="every lowering", max_examples=20)
    assert report.passed, report
