"""The oracle against Python loops and numpy.einsum, and what only it promises."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
import sys
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import run_python
from hypothesis import example, given, settings
from laws import MODES, tiny

from planner.language.spec import Gather
from planner.testing import Problem, problems, specs
from planner.testing import reference as contract
from planner.testing.reference import exact_bound, exact_range, magnitude, output_shape, reference_gradients
from planner.workloads import WORKLOADS

oracle = sys.modules["planner.testing.reference"]


# --- the meaning, once more, as nested loops over points ----------------------------------------


def loops(problem: Problem, operands: list[Any], gout: Any) -> list[Any]:
    """Result and gradients, one multiplication at a time; the library, not the oracle, reads the spec."""
    spec, shapes = problem.resolved(), dict(problem.resolved_indices())
    arrays = [x.reshape(spec.shape(term)) for term, x in zip(spec.inputs, operands, strict=True)]

    def place(term: Any, point: dict[str, int]) -> tuple[int, ...] | None:
        found = []
        for entry in term:
            if not isinstance(entry, Gather):
                found.append(point[entry])
                continue
            q, n = problem.indices[entry.array].reshape(shapes[entry.array]), spec.size(entry)
            i = int(q[tuple(point[axis] for axis in entry.axes)])
            if problem.index_mode == "raise":
                assert -n <= i < n
                i %= n
            elif problem.index_mode == "clip":
                i = min(max(i, 0), n - 1)
            elif not 0 <= i < n:
                return None
            found.append(i)
        return tuple(found)

    result = np.zeros(spec.output_shape, complex)
    gradients = [np.zeros(x.shape, complex) for x in arrays]
    names, extents = [axis for axis, _ in spec.sizes], [range(n) for _, n in spec.sizes]
    for values in itertools.product(*extents):
        point = dict(zip(names, values, strict=True))
        *places, target = [place(term, point) for term in spec.terms]
        if target is None or None in places:
            continue
        factors = [x[p].item() for x, p in zip(arrays, places, strict=True)]
        result[target] += math.prod(factors)
        for i, p in enumerate(places):
            gradients[i][p] += gout[target].item() * math.prod(factors[:i] + factors[i + 1 :])
    return [result, *(g.reshape(x.shape) for g, x in zip(gradients, operands, strict=True))]


# At once, in blocks, and factor by factor.
WAYS = ((oracle.BLOCK_POINTS, oracle.SMALL_POINTS), (7, oracle.SMALL_POINTS), (7, -1))


def hold_to_loops(problem: Problem) -> None:
    """On integers; and where some elements are NaN, which only reach what reads them."""
    operands, gout = problem.operands(), problem.output_gradient()
    random = np.random.default_rng(problem.seed)
    for share in (0, 0.2):
        for x in (*operands, gout):
            if x.dtype.kind in "fc":
                x[random.random(x.shape) < share] = np.nan
        expected = loops(problem, operands, gout)
        for block, small in WAYS:
            with mock.patch.multiple(oracle, BLOCK_POINTS=block, SMALL_POINTS=small):
                found = [contract(problem.spec, *operands, **problem.arguments())]
                found += reference_gradients(problem.spec, gout, *operands, **problem.arguments())
            for got, wanted in zip(found, expected, strict=True):
                assert np.array_equal(got, wanted, equal_nan=True)


@settings(max_examples=200, deadline=None)
@given(
    problems(max_operands=5, max_size=3, index_modes=MODES, dtypes=("float32", "int32", "complex64"), mixed_dtypes=True)
)
@example(Problem("i -> ii", ((3,),)))
@example(Problem("ij -> jkk", ((2, 3),), sizes={"k": 2}))
@example(Problem("ab, b -> a", ((2, 0), (0,))))
@example(Problem("q[] j -> j", ((4, 2),), indices={"q": np.array(-1)}))
@example(Problem("i -> q[i]", ((3,),), {"q": 0}, {"q": np.array([0, 1, -1])}, "drop"))
@example(Problem("q[n]q[n] -> q[n]", ((3, 2),), {"q": 4}, {"q": np.array([0, 1, 1])}))
def test_reference_equals_loops(problem: Problem) -> None:
    hold_to_loops(problem)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_equal_loops(name: str) -> None:
    small = tiny(WORKLOADS[name])
    hold_to_loops(Problem(small.spec, small.shapes, indices=small.indices("numpy"), **small.options))


@settings(max_examples=100, deadline=None)
@given(problems(gathers=False, without={"broadcast output", "repeated output", "sizes tuple", "odd axes"}))
def test_ordinary_specs_equal_numpy(problem: Problem) -> None:
    operands = [x.astype(np.float64) for x in problem.operands()]
    left, arrow, right = problem.spec.partition("->")
    if arrow and "..." in left and "..." not in right:  # numpy refuses; then sum by hand
        y = np.einsum(f"{left}->...{right.strip()}", *operands)
        y = y.sum(tuple(range(y.ndim - len(right.strip()))))
    else:
        y = np.einsum(problem.spec, *operands)
    got = problem.expected()
    assert got.shape == y.shape
    assert (got == y).all()


# --- what the loops do not say -------------------------------------------------------------------

random = np.random.default_rng(0)


def integers(*shape: int) -> Any:
    return random.integers(-3, 4, shape).astype(np.float32)


def test_sublist_form() -> None:
    a, b = integers(2, 3), integers(3, 4)
    assert (contract(a, [0, 1], b, [1, 2], [2, 0]) == (a @ b).T).all()
    assert (contract(a, [0, 1], b, [1, 2]) == a @ b).all()
    assert (contract(a, [..., 1], b, [1, 2], [..., 2]) == a @ b).all()


def test_index_modes_out_of_range() -> None:
    x = np.arange(3.0)
    assert contract("q[n] -> n", x, q=[-3, 2]).tolist() == [0, 2]
    assert contract("q[n] -> n", x, q=[-3, 7], index_mode="clip").tolist() == [0, 2]
    for bad in (3, -4, np.uint64(2**64 - 1)):
        with pytest.raises(IndexError, match="'q' is out of range for size 3"):
            contract("q[n] -> n", x, q=np.array([bad]))
        assert contract("q[n] -> n", x, q=np.array([bad]), index_mode="drop").tolist() == [0]
    with pytest.raises(IndexError, match="size 0"):
        contract("q[n] -> n", np.ones(0), q=[0], index_mode="clip")
    assert contract("q[n] -> n", np.ones(0), q=np.zeros(0, int), index_mode="clip").shape == (0,)
    assert contract("q[n] -> n", np.ones(0), q=[0], index_mode="drop").tolist() == [0]


@pytest.mark.parametrize(
    ("spec", "shapes", "arguments", "match"),
    [
        ("ij", [(2,)], {}, "does not fit 1 dims"),
        ("ij,jk", [(2, 3), (4, 5)], {}, r"axis 'j' has sizes \[3, 4\]"),
        ("ii", [(1, 3)], {}, "in one term"),
        ("i,j", [(1,)], {}, "2 terms but 1 operands"),
        ("q[n]", [(1,)], {"q": [0]}, "output written"),
        ("q[n]->n", [(1,)], {}, "uses index arrays"),
        ("q[n]q->n", [(1, 1)], {"q": [0]}, "both axes and index arrays"),
        ("i->j->k", [(1,)], {}, "cannot read"),
        ("p[q[n]]->n", [(1,)], {"p": [0], "q": [0]}, "cannot read"),
        ("......", [(1,)], {}, "two ellipses"),
        ("\N{MICRO SIGN}[n]->n", [(1,)], {}, "NFKC"),
        ("×[n]->n", [(1,)], {}, "cannot name an index array"),
        ("i1", [(1, 1)], {}, "cannot read"),
        ("q[n]q[n] -> q[n]", [(5, 2)], {"q": [0, 1]}, "scatters into is not known"),
        ("i -> ik", [(3,)], {}, "no input has output axis 'k'"),
        ("i -> i", [(3,)], {"sizes": {"i": 1}}, "sizes= gives 1 for axis 'i', but the arrays give 3"),
        ("i -> i", [(3,)], {"sizes": {"z": 1}}, "which the spec does not"),
    ],
)
def test_errors(spec: str, shapes: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        contract(spec, *map(np.ones, shapes), **arguments)


def test_higher_precision_and_wrapping() -> None:
    assert contract("i,i", np.full(2, 2.0**13, np.float16), np.full(2, 2.0**13, np.float16)) == 2**27
    assert contract("i,i", np.full(2, 100, np.int8), np.full(2, 100, np.int8)) == 20_000
    assert contract("i->i", np.ones(2, np.complex64)).dtype == np.complex128
    assert contract("i->i", np.array([0.1]), dtype="float32") == np.float32(0.1)
    huge = np.full(1, 2**62, np.int64)
    assert contract("i,i", huge, np.full(1, 2, np.int64)) == -(2**63)


def test_more_letters_than_numpy_has_dims() -> None:
    letters = [chr(0x4E00 + k) for k in range(100)]
    spec = ",".join(map("".join, itertools.pairwise(letters)))
    signs = [np.sign(integers(2, 2)) for _ in range(20)] + [np.eye(2)] * 79
    expected = np.linalg.multi_dot(signs)
    assert (contract(f"{spec}->{letters[0]}{letters[-1]}", *signs) == expected).all()


def test_bounds() -> None:
    x, y = np.array([[1.0, -2.0], [3.0, 0.0]]), np.array([[-1.0], [2.0]])
    assert magnitude("ij,jk->ik", x, y).tolist() == [[5], [3]]
    assert magnitude("i->", np.array([3 - 4j])) == 7
    assert exact_bound("ij,jk->ik", x, y) == 3 * 2 * 4
    assert exact_bound("ij,jk->ik", x, y, gout=np.full((2, 1), 5.0)) == 3 * 2 * 4 * 5
    assert exact_range("float16") == 2**11
    assert exact_range(np.int8) == 127
    assert output_shape("ij,jk->ik", x, y) == (2, 1)


@settings(max_examples=100, deadline=None)
@given(problems(index_modes=MODES))
def test_bounds_hold(problem: Problem) -> None:
    operands, arguments = problem.operands(), problem.arguments()
    y, largest = problem.expected(), magnitude(problem.spec, *operands, **arguments)
    assert (np.abs(y) <= largest).all()
    assert largest.max(initial=0) <= exact_bound(problem.spec, *operands, **arguments)
    for g in problem.expected_gradients():
        assert np.abs(g).max(initial=0) <= problem.exact_bound()


# --- the strategies -----------------------------------------------------------------------------


def test_floors() -> None:
    """What the random problems must contain to test anything, over 400 draws."""
    counts: Counter[str] = Counter()

    @settings(max_examples=400, deadline=None, database=None, derandomize=True)
    @given(problems(max_operands=5, index_modes=MODES))
    def count(problem: Problem) -> None:
        left, _, right = problem.spec.partition("->")
        names = re.findall(r"(\w)\[", left)
        brackets = re.findall(r"\[(.*?)\]", problem.spec)
        terms = [re.sub(r"\w\[.*?\]", "", t) for t in left.split(",")]
        letters = [t.replace("...", "").replace(" ", "") for t in terms]
        q = [a for a in problem.indices.values() if a.size]
        plain = re.sub(r"\w\[.*?\]|\.\.\.| ", "", right)
        sizes = [n for shape in problem.shapes for n in shape]
        counts["draws"] += 1
        counts["at least 3 operands"] += len(problem.shapes) >= 3
        counts["index array"] += bool(problem.indices)
        counts["gather"] += bool(names)
        counts["array used twice"] += len(names) > len(set(names))
        counts["two arrays"] += len(problem.indices) == 2
        counts["scatter"] += "[" in right
        counts["gather and scatter by one"] += bool(set(names) & set(re.findall(r"(\w)\[", right)))
        counts["bracket of two"] += any(len(b.replace("...", "")) == 2 for b in brackets)
        counts["empty bracket"] += "" in brackets
        counts["ellipsis in bracket"] += any("..." in b for b in brackets)
        counts["ellipsis"] += "..." in problem.spec
        counts["implicit"] += "->" not in problem.spec
        counts["repeated axis"] += any(len(set(t)) < len(t) for t in letters)
        counts["repeated output axis"] += len(set(plain)) < len(plain)
        counts["broadcast axis"] += any(a not in left for a in plain)
        counts["odd axes"] += any(not axis.isalpha() for term in letters for axis in term)
        counts["sizes tuple"] += isinstance(problem.sizes, tuple)
        counts["size 0"] += 0 in sizes
        counts["size 1"] += 1 in sizes
        counts["0-d operand"] += () in problem.shapes
        counts["duplicates"] += any(len(np.unique(a)) < a.size for a in q)
        counts["negative"] += problem.index_mode == "raise" and any((a < 0).any() for a in q)
        counts["beyond the range"] += problem.index_mode != "raise" and any((a < 0).any() for a in q)
        counts["nonzero result"] += bool(problem.expected().any())
        counts["exact in float32"] += problem.exact_bound() <= exact_range("float32")
        counts["some gradient"] += any(problem.requires_grad)

    count()
    assert counts["draws"] >= 400
    for name in ("at least 3 operands", "index array", "gather", "nonzero result", "some gradient"):
        assert counts[name] >= counts["draws"] / 2, (name, counts)
    assert counts["exact in float32"] >= 0.95 * counts["draws"], counts
    # Rare kinds come in bursts; nightly runs mix in constants of the modules that are loaded, and draw fewer of them.
    for name, number in counts.items():
        assert number >= 3, (name, counts)


def test_strided_operands_are_mostly_not_contiguous() -> None:
    found = [Problem("ij", ((3, 4),), seed=seed, strided=True).operands()[0] for seed in range(20)]
    assert sum(x.flags.c_contiguous for x in found) <= 2
    assert any(x.strides[0] < x.strides[1] for x in found)


@settings(max_examples=50, deadline=None)
@given(
    problems(without={"gather", "ellipsis", "size zero", "size one"}, min_operands=2, max_operands=2),
    specs(gathers=True),
)
def test_features_can_be_left_out_or_asked_for(problem: Problem, spec: str) -> None:
    assert len(problem.shapes) == 2
    assert "[" not in problem.spec.split("->")[0]
    assert "..." not in problem.spec
    assert all(0 not in shape for shape in problem.shapes)
    assert re.search(r"\w\[", spec)


def test_the_oracle_needs_numpy_alone() -> None:
    run_python("""
import sys
sys.modules["hypothesis"] = None
from planner.testing import reference
assert reference("i,i", [1, 2], [3, 4]) == 11
assert not {"torch", "jax"} & set(sys.modules)
import planner.testing.reference
assert callable(planner.testing.reference), "the attribute is the function, not the module"
""")


def test_the_oracle_imports_nothing_that_it_judges() -> None:
    tree = ast.parse(inspect.getsource(oracle))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {n.module or "" for n in imports if isinstance(n, ast.ImportFrom)}
    modules |= {alias.name for n in imports if isinstance(n, ast.Import) for alias in n.names}
    outside = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert outside == {"numpy"}
