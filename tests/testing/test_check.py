"""`check` itself: specs that hold, contractions and kernels that are wrong, and the programs that show it."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

import planner
import planner.testing
from planner.cost.figures import StepCost
from planner.program.frameworks import load_backend
from planner.program.implementations import Implementation
from planner.program.ops import JointGradient
from planner.testing import Problem, check
from planner.testing.checking import _problems
from planner.testing.engines import engine_of, installed
from planner.testing.judgement import Broken, Subject, allowed
from planner.testing.laws import LAWS, _compare_gradients, _with_bad_index
from planner.testing.scripts import _code, of_gradients, of_second
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
    report = check("nj, q[n]j -> n", {"j": 2}, backends=("numpy", "jax"), max_examples=4)
    assert report.passed, report
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
    @given(_problems(law, spec, None, ("float32",), None, Subject()))
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


def test_a_law_without_problems_is_skipped_and_the_others_are_told():
    report = check("n, q[n] -> n", {"q": 0}, backends="numpy", max_examples=4)
    assert report.passed, report
    assert any(v.skipped == "no sizes that fit were found" for v in report.verdicts)
    assert any(v.examples for v in report.verdicts)


def test_frameworks_agree_in_integers():
    if "torch" in installed():
        report = check(
            "ij, jk, kl -> il", backends=("numpy", "torch"), dtypes=("uint8", "int8"), laws="frameworks agree"
        )
        assert report.passed, report


# -- what is wrong is found ---------------------------------------------------------------------------

WRONG = {
    "values": lambda a, c, q: gathered(a, c, q) * 2,
    "an index from the end": lambda a, c, q: gathered(a, c, np.maximum(q, 0)),
    "a repeated index": lambda a, c, q: (
        np.matmul(a, c[np.where(np.arange(q.size) == 0, q, q[:1])]) if q.size else gathered(a, c, q)
    ),
    "another dtype": lambda a, c, q: gathered(a, c, q).astype("float64"),
    "another shape": lambda a, c, q: gathered(a, c, q)[..., None],
    "operands are overwritten": lambda a, c, q: (gathered(a, c, q), a.fill(0))[0],
    "no array": lambda a, c, q: gathered(a, c, q).tolist(),
    "an exit": lambda a, c, q: sys.exit(3),
    "an error": lambda a, c, q: gathered(a, c, q).reshape(3, 3, 3),
    "strides are ignored": lambda a, c, q: np.matmul(
        np.ndarray(a.shape, a.dtype, a.base if a.base is not None and a.base.nbytes >= a.nbytes else a), c[q]
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_implementation_that_is_wrong_is_broken(name):
    report = check("nij, q[n]jk -> nik", backends="numpy", implementation=WRONG[name], max_examples=60)
    assert not report.passed, report
    failure = report.failures[0]
    assert failure.problem is not None
    text = str(report)
    assert "laws broken" in text
    assert "to see it again, run" in text
    assert "implementation = ..." in text


def test_an_implementation_that_is_right_holds():
    report = check("nij, q[n]jk -> nik", backends="numpy", implementation=gathered, max_examples=30)
    assert report.passed, report
    assert [v.law for v in report.verdicts if not v.skipped] == ["values", "strides", "sizes 0 and 1"]


@TORCH
def test_an_implementation_in_torch_is_differentiated():
    import torch

    def lost(a, c, q):
        return torch.matmul(a, c[q]) + torch.matmul(a.detach(), c[q]) - torch.matmul(a.detach(), c[q].detach())

    def twice_detached(a, c, q):
        class Once(torch.autograd.Function):
            @staticmethod
            def forward(ctx, a, c):
                ctx.save_for_backward(a, c)
                return torch.matmul(a, c[q])

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, g):
                a, c = ctx.saved_tensors
                gc = torch.zeros_like(c).index_add_(0, q.long() % max(1, c.shape[0]), torch.matmul(a.mT, g))
                return torch.matmul(g, c[q].mT), gc

        return Once.apply(a, c)

    spec, options = "nij, q[n]jk -> nik", {"backends": "torch", "max_examples": 30}
    right = check(spec, implementation=lambda a, c, q: torch.matmul(a, c[q.long()]), **options)
    assert right.passed, right
    assert {f.law for f in check(spec, implementation=lost, **options).failures} >= {"gradients"}
    found = {f.law for f in check(spec, implementation=twice_detached, **options).failures}
    assert "gradients" not in found
    assert "second derivatives" in found


def test_chance_is_told():
    calls = iter(range(10**9))
    report = check("i -> i", backends="numpy", implementation=lambda x: x + (next(calls) == 5), max_examples=20)
    assert "something depends on chance" in str(report)


# -- every law can fail -------------------------------------------------------------------------------


@TORCH
def test_every_law_can_fail(monkeypatch, torch):
    """Each law, with a fault that it alone is about."""
    table = load_backend("torch").table
    spec = "nij, q[n]jk -> nik"

    def broken(*laws, **options):
        report = check(spec, backends="torch", laws=laws, max_examples=12, **options)
        assert {f.law for f in report.failures} >= set(laws), report
        assert all(f.script for f in report.failures)

    row = table.rows["grouped matmul"]
    wrong = Implementation(
        **{
            **{f: getattr(row, f) for f in row.__dataclass_fields__},
            "run": lambda *a: tuple(x + 1 for x in row.run(*a)),
        }
    )
    monkeypatch.setitem(table.rows, "grouped matmul", wrong)
    broken("every lowering")
    monkeypatch.undo()

    from planner.testing import engines

    monkeypatch.setattr(engines.measure, "torch_memory", lambda call: (call(), engines.measure.Measured(10**9, 7)))
    broken("retained bytes", "peak bytes")
    monkeypatch.undo()

    real = planner.api.contract

    def forgetful(text, *operands, optimize="auto", **options):
        return real(text, *operands, **options) + (optimize == "greedy")

    monkeypatch.setattr("planner.testing.judgement.contract", forgetful)
    broken("every path")
    monkeypatch.undo()

    def silent(text, *operands, index_mode="raise", **options):
        return real(text, *operands, index_mode="clip" if index_mode == "raise" else index_mode, **options)

    monkeypatch.setattr("planner.testing.judgement.contract", silent)
    broken("index modes")
    monkeypatch.undo()

    def differs(text, *operands, **options):
        result = real(text, *operands, **options)
        return result * 2 if isinstance(result, torch.Tensor) else result

    monkeypatch.setattr("planner.testing.judgement.contract", differs)
    wrong = {"frameworks agree", "values", "gradients", "second derivatives", "strides", "sizes 0 and 1"}
    report = check(spec, backends=("numpy", "torch"), laws=wrong, max_examples=12)
    assert {f.law for f in report.failures} == wrong, report


def test_frameworks_that_disagree_are_each_shown(monkeypatch, torch, jax):
    """Which may be one without NumPy."""
    real = planner.contract

    def differs(text, *operands, **options):
        result = real(text, *operands, **options)
        return result + 1 if isinstance(result, torch.Tensor) else result

    monkeypatch.setattr("planner.testing.judgement.contract", differs)
    report = check("i ->", backends=("torch", "jax"), laws="frameworks agree", max_examples=4)
    (failure,) = report.failures
    assert (failure.law, failure.backend) == ("frameworks agree", "all")
    assert failure.script.startswith("# torch\n")
    assert "# jax\n" in failure.script


def test_an_array_in_a_program_holds_all_of_its_memory():
    x = np.arange(12, dtype="int16").reshape(3, 4).T
    memory = "np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 'int16')"
    assert _code(x) == f"np.lib.stride_tricks.as_strided({memory}, (4, 3), (2, 8))"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_only_second_derivatives_have_vectors_in_their_program(framework):
    problem = Problem("ij, jk -> ik", ((2, 3), (3, 2)), requires_grad=(True, True))
    assert "vs = [" in of_second(framework, problem, Subject(), {})
    assert "vs" not in of_gradients(framework, problem, Subject(), {})


def test_a_gradient_that_is_wrong_is_told():
    problem = Problem("i, i ->", ((2,), (2,)), requires_grad=(True, True))
    right = [np.ones(2, "float32"), np.ones(2, "float32")]
    for number in (0, 1):
        found = [x + (n == number) for n, x in enumerate(right)]
        with pytest.raises(Broken):
            _compare_gradients(engine_of("numpy"), problem, found, right, list, "gradient", str)
    _compare_gradients(engine_of("numpy"), problem, right, right, list, "gradient", str)


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


@TORCH
def test_a_kernel_of_ones_own():
    import torch

    spec, options = "ij, jk -> ik", {"backends": "torch", "max_examples": 20}
    report = check(spec, kernel=product(einsum), **options)
    assert report.passed, report
    assert "mine" not in load_backend("torch").table.rows

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
        report = check(spec, kernel=product(run), **options)
        assert not report.passed
        assert what in str(report), report
    with pytest.raises(planner.PlannerError, match="supports no step"):
        check("ijk, jk -> i", kernel=product(einsum), **options)


def test_a_kernel_in_numpy():
    assert check("ij, jk -> ik", kernel=product(einsum), backends="numpy", max_examples=20).passed


# -- reproductions ----------------------------------------------------------------------------------------


def run(script):
    return subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("framework", installed())
def test_programs_show_what_they_say(framework):
    """The program of each kind, of problems with all that a problem can have, runs and prints equal results."""
    from planner.testing import scripts

    options = {"dtypes": ("float32",), "max_value": 2, "without": ("size one",)}
    found = []

    @settings(max_examples=3 if framework == "jax" else 6, database=None, deadline=None)
    @given(problems(2, 3, gathers=True, index_modes=("drop", "clip", "raise"), **options))
    def collect(problem):
        if any(problem.requires_grad) and problem.is_exact(4):
            found.append(problem)

    collect()
    makers = [scripts.of_values] + ([] if framework == "numpy" else [scripts.of_gradients, scripts.of_second])
    assert found
    code = ["import numpy as np"]
    for problem in found:
        for make in makers:
            script = make(framework, problem, Subject(), {})
            code.append(_inlined(script))
    code.append("print('done')")
    result = run("\n".join(code))
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.endswith("done\n")


def _inlined(script):
    """A program, followed by a comparison of what it found with what it expected."""
    return script + (
        "\nas_list = lambda x: [np.asarray(y.detach() if hasattr(y, 'detach') else y) for y in "
        "(x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else [x])]"
        "\nfor one, other in zip(as_list(found), [y for n, y in enumerate(as_list(expected)) "
        "if not isinstance(expected, list) or n in wanted], strict=True):"
        "\n    assert one.shape == other.shape and (one == other).all(), (spec, one, other)\n"
    )


@TORCH
def test_programs_of_steps_and_memory_run():
    from planner.testing import scripts

    problem = planner.testing.Problem(
        "nij, q[n]jk -> nik", ((4, 1, 2), (3, 2, 2)), indices={"q": np.array([2, 0, 0, 1])}
    )
    plan = planner.plan(problem.spec, *problem.shapes, **problem.arguments(), backend="torch")
    step = run(scripts.of_step("torch", problem, 1, "", plan, own=False))
    assert step.returncode == 0, step.stderr
    assert "expected" in step.stdout
    memory = run(scripts.of_memory("torch", problem))
    assert memory.returncode == 0, memory.stderr
    assert "predicted" in memory.stdout or "measured" in memory.stdout


# -- arguments and the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("ij,",), {}, "needs"),
        (("i[",), {}, "bracket"),
        (("ij -> i", {"z": 3}), {}, "'z', which 'ij -> i' has not"),
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
        (("ij -> i", [3]), {}, "no mapping"),
        (("ij -> i",), {"backends": 3}, "backends"),
        (("ij -> i",), {"implementation": 3}, "no function"),
        (("ij -> i",), {"kernel": 3, "backends": "numpy"}, "Implementation"),
        (("ij -> i",), {"kernel": product(einsum), "backends": ("numpy", "torch")}, "one backend"),
        (("q[n] -> n", {"q": 0, "n": 2}), {"index_modes": "raise"}, "no sizes"),
    ],
)
def test_bad_arguments_are_named(arguments, options, message):
    if arguments == ("ij,",):
        assert check(*arguments, backends="numpy", max_examples=1).passed  # a scalar operand
        return
    with pytest.raises(planner.PlannerError, match=message):
        check(*arguments, **{"backends": "numpy", **options})


def test_the_command(capsys):
    from planner.cli import main

    assert main(["check", "ij, j -> i", "--backend", "numpy", "--max-examples", "3", "--size", "i=2"]) == 0
    assert "laws hold" in capsys.readouterr().out
    assert main(["check", "ij, j -> [", "--backend", "numpy"]) == 2
    assert "^" in capsys.readouterr().err


def test_the_command_tells_what_is_broken(capsys, monkeypatch):
    from planner.cli import main

    real = planner.api.contract
    monkeypatch.setattr("planner.testing.judgement.contract", lambda *a, **o: real(*a, **o) * 2)
    assert main(["check", "ij, j -> i", "--backend", "numpy", "--max-examples", "3"]) == 1
    assert "BROKEN" in capsys.readouterr().out
