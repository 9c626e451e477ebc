"""The strategies: what they draw, what they refuse, how far failures shrink, and that Hypothesis knows them."""

import dataclasses
import pathlib
import re
import sys
import tomllib

import conftest
import numpy as np
import pytest
from conftest import examples, run_python
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from laws import MODES

import planner
from planner.testing import Problem, indices, operands, problems, problems_of, specs
from planner.testing.array_strategies import INDEX_DTYPES
from planner.testing.strategy_tools import sampled


@settings(max_examples=50, deadline=None)
@given(indices(3, (2, 2), dtypes=("int8",)), indices(3, (4,), index_mode="drop"), indices(400, (3,), dtypes=("uint8",)))
def test_indices(q, p, narrow):
    assert (q.dtype, q.shape, narrow.dtype) == (np.int8, (2, 2), np.uint8)
    assert ((q >= -3) & (q < 3)).all()
    assert ((p >= -2) & (p <= 4)).all()


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(["float32", "bfloat16", "int8", "uint8", "complex64"]), st.booleans())
def test_operands(data, dtype, strided):
    x = data.draw(operands((2, 3), dtype, max_value=2, strided=strided))
    assert x.shape == (2, 3)
    assert x.dtype == ("float32" if dtype == "bfloat16" else dtype)
    assert (np.abs(x.real) <= 2).all()
    assert (x.real == np.round(x.real)).all()
    assert strided or x.flags.c_contiguous


@pytest.mark.parametrize(
    "spec",
    [
        "nij, q[n]jk -> nik",
        "...i, i... -> ...",
        "ii, i",
        "q[...]k, ...k -> p[...]k",
        "q[ab]c, q[cd]a -> bd",
        "n -> q[n]",
        "a -> abb",
        "q[]i, i ->",
    ],
)
def test_problems_of_a_spec_fit_it(spec):
    @settings(max_examples=30, deadline=None, database=None)
    @given(problems_of(spec, index_modes=MODES))
    def law(problem):
        assert problem.spec == spec
        found = planner.contract(spec, *problem.operands(), **problem.arguments())
        assert (found == problem.expected()).all()

    law()
    for size in (0, 1, 2):
        problem = find(problems_of(spec), lambda problem, size=size: any(size in shape for shape in problem.shapes))
        assert planner.resolve(spec, *problem.shapes, sizes=problem.sizes, **problem.indices)


@settings(max_examples=30, deadline=None)
@given(problems_of("nij, q[n]jk -> nik", {"n": 3, "q": 5}, min_size=2, max_size=2, without=("size one",)))
def test_given_sizes_stay(problem):
    assert problem.shapes == ((3, 2, 2), (5, 2, 2))
    assert problem.indices["q"].shape == (3,)


@settings(max_examples=examples(30, 600), deadline=None)
@given(problems(index_modes=MODES, dtypes=("float32", "int64", "complex64", "bfloat16"), mixed_dtypes=True))
def test_a_problem_prints_what_makes_it_again(problem):
    """The seed, the strides and everything else stand in the text; in other strides the values are the same."""
    names = [field.name for field in dataclasses.fields(Problem)]
    again = Problem(**{name: getattr(problem, name) for name in names})
    views = dataclasses.replace(again, strided=True).operands()
    for x, y, strided in zip(problem.operands(), again.operands(), views, strict=True):
        assert (x == y).all()
        assert (x == strided).all()
        assert (x.strides, x.shape, x.dtype) == (y.strides, strided.shape, strided.dtype)
        assert min(strided.strides, default=0) >= 0
    assert repr(again) == repr(problem)
    for name in names[2:]:
        assert f"{name}=" in repr(problem)


DRAWS = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest
from hypothesis import given, settings
from planner.testing import problems

@settings(max_examples=30)
@given(problems(dtypes=("float32", "int64", "complex64"), mixed_dtypes=True, index_modes=("raise", "drop", "clip")))
def law(problem):
    print(problem)

law()
"""


def test_every_run_draws_the_same_examples_but_the_nightly_one(tmp_path):
    """Whatever the hash seed and the modules loaded; nothing is written down that a later run would read."""

    def drawn(profile, seed, before=""):
        folder, environment = pathlib.Path(conftest.__file__).parent, {"HYPOTHESIS_PROFILE": profile}
        return run_python(before + DRAWS, folder, cwd=tmp_path, PYTHONHASHSEED=seed, **environment).splitlines()

    first = drawn("ci", "1")
    assert len(first) >= 30
    assert drawn("ci", "2") == first
    assert drawn("ci", "1", "import planner.demo.command, planner.bench.command\n") == first
    assert not any(tmp_path.rglob("examples"))
    assert drawn("nightly", "1") != drawn("nightly", "1")


# -- arguments ----------------------------------------------------------------------------------------

WRONG = [
    (lambda: problems(0), "min_operands=0"),
    (lambda: problems(3, 2), "larger"),
    (lambda: problems("two"), "min_operands='two'"),
    (lambda: problems(max_axes=16), "max_axes=16"),
    (lambda: problems(max_size=0), "max_size=0"),
    (lambda: problems(max_size=True), "max_size=True"),
    (lambda: problems(gathers="yes"), "gathers"),
    (lambda: problems(gathers=True, without=("gather", "scatter")), "left out"),
    (lambda: problems(dtypes="float32"), "not a collection"),
    (lambda: problems(dtypes=("float8",)), "float8"),
    (lambda: problems(dtypes=()), "empty"),
    (lambda: problems(index_modes=("wrap",)), "wrap"),
    (lambda: problems(without=("gathers",)), "gathers"),
    (lambda: problems(max_value=-1), "max_value=-1"),
    (lambda: problems(strided=2), "strided=2"),
    (lambda: specs(3, 2), "larger"),
    (lambda: problems_of("ij ->", {"k": 2}), "'k', which 'ij ->' does not have"),
    (lambda: problems_of("ij ->", {"i": 1.5}), "1.5"),
    (lambda: problems_of("i[ ->"), "bracket"),
    (lambda: problems_of("ij ->", min_size=3, max_size=2), "larger"),
    (lambda: operands((2, -1)), "shape"),
    (lambda: operands(3), "shape"),
    (lambda: operands((3,), "float8"), "float8"),
    (lambda: operands((3,), strided="no"), "strided"),
    (lambda: indices(-1, (2,)), "size=-1"),
    (lambda: indices(0, (2,)), "no index"),
    (lambda: indices(3, (2,), index_mode="wrap"), "wrap"),
    (lambda: indices(3, (2,), dtypes=("float32",)), "float32"),
    (lambda: indices(3, (2,), max_size=2), "larger"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_refused_when_first_drawn(make, message):
    strategy = make()  # as Hypothesis's own strategies, it may stand in a module

    @settings(max_examples=1, database=None)
    @given(strategy)
    def draw(_):
        raise AssertionError("nothing can be drawn")

    with pytest.raises(InvalidArgument, match=re.escape(message)):
        draw()


def test_defaults_adapt():
    find(problems(6), lambda problem: len(problem.shapes) == 6)
    assert find(indices(300, (1,), dtypes=("int8",), negative=False), lambda q: q[0] > 100)[0] == 101
    assert find(indices(0, (1,), index_mode="drop"), lambda q: q[0] > 0).tolist() == [1]
    assert set(INDEX_DTYPES) == {np.dtype(d).name for d in INDEX_DTYPES}


def test_some_problems_have_index_arrays_and_some_of_these_one_element():
    assert find(problems(), lambda problem: problem.indices)
    rows = find(problems_of("n, q[n]k -> nk"), lambda problem: problem.indices["q"].shape == (1,) != problem.shapes[0])
    assert planner.resolve(rows.spec, *rows.shapes, **rows.indices)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems_of("q[...]a, q[a]... -> a"))
def test_sizes_that_do_not_agree_are_drawn_again(problem):
    assert planner.resolve(problem.spec, *problem.shapes, sizes=problem.sizes, **problem.indices)


@settings(max_examples=30, deadline=None)
@given(problems(2, dtypes=("float32", "int64")))
def test_a_problem_has_one_dtype_unless_told(problem):
    assert len(set(problem.dtypes)) == 1


# -- shrinking ------------------------------------------------------------------------------------------


def wrong_where(condition, bug=lambda right: right + 1):
    """The oracle with a planted bug, which shows in the problems of a kind."""
    return lambda problem: bug(problem.expected()) if condition(problem) else problem.expected()


def clipped(problem):
    indices = {name: np.maximum(q, 0) for name, q in problem.indices.items()}
    return dataclasses.replace(problem, indices=indices).expected()


def scatters_duplicates(problem):
    _, _, right = problem.spec.partition("->")
    arrays = [q for name, q in problem.indices.items() if f"{name}[" in right]
    return any(q.ndim == 1 and len(np.unique(q)) < q.size for q in arrays)


def has_a_diagonal(problem):
    left, _, _ = problem.spec.partition("->")
    terms = [re.sub(r"\w\[.*?\]|\.\.\.| ", "", term) for term in left.split(",")]
    return any(len(set(t)) < len(t) and np.prod(n) > 1 for t, n in zip(terms, problem.shapes, strict=True))


BUGS = {
    "a negative index clips": clipped,
    "of what adds into one place the first arrives": wrong_where(scatters_duplicates, lambda right: right * 0 - 1),
    "a diagonal is summed": wrong_where(has_a_diagonal),
    "ones do not broadcast": wrong_where(lambda p: sum(map(len, p.shapes)) > sum(map(len, p.resolved().inputs))),
    "axes of equal sizes change places": wrong_where(lambda p: p.output_shape() in {(2, 2), (3, 3)}, np.transpose),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_failures_shrink_to_three_axes_at_most(bug):
    """Bugs that show with few axes are shown with few: letters of axes, and axes of an ellipsis."""
    problem = find(
        problems(index_modes=("raise", "drop")),
        lambda problem: not np.array_equal(bug(problem), problem.expected()),
        settings=settings(max_examples=20_000, deadline=None, database=None, derandomize=True),
    )
    assert len(problem.resolved().sizes) <= 3, problem
    assert len(problem.shapes) <= 3, problem
    assert max(max(shape, default=1) for shape in problem.shapes) <= 3, problem


# -- Hypothesis's entry point -----------------------------------------------------------------------------


def test_types_are_known_to_hypothesis():
    """In a fresh process that imports Hypothesis alone: the package's entry point tells it."""
    run_python("""
import hypothesis, sys
assert "torch" not in sys.modules and "jax" not in sys.modules
from hypothesis import find, strategies as st
import planner
from planner.testing import Problem
assert isinstance(find(st.from_type(Problem), lambda _: True), Problem)
spec = find(st.from_type(planner.Spec), lambda _: True)
assert spec.output_shape is not None
""")


def test_the_entry_point_is_the_hook():
    text = (pathlib.Path(conftest.__file__).parent.parent / "pyproject.toml").read_text()
    (value,) = tomllib.loads(text)["project"]["entry-points"]["hypothesis"].values()
    module, _, name = value.partition(":")
    assert callable(getattr(sys.modules[module], name))


def test_choices_that_are_equal_and_of_other_types_stay_apart():
    """Strategies are kept, by what they choose from."""
    kinds = [type(find(sampled(one), lambda _: True)) for one in (True, 1, np.str_("a"), "a")]
    assert kinds == [bool, int, np.str_, str]
    assert sampled("a", "b") is sampled("a", "b")
    first = find(problems(dtypes=[np.str_("float64")]), lambda _: True)
    then = find(problems(dtypes=["float64"]), lambda _: True)
    assert first.dtypes == then.dtypes
    assert type(then.dtypes[0]) is str


def test_what_a_problem_wants():
    assert Problem("ij, jk, k ->", ((1, 1), (1, 1), (1,)), requires_grad=(True, False, True)).wanted == (0, 2)
    assert Problem("i ->", ((1,),), dtypes=("int32",)).wanted == ()
