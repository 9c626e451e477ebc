"""NumPy against the oracle, on integers that make every sum exact: no tolerance anywhere but where it is named."""

import warnings

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import (
    BAD_INDICES,
    INDEX_DTYPES,
    MODES,
    OBJECTIVES,
    Floors,
    assert_equal,
    exact_problems,
    note_language,
    pick,
    wide_index,
)

import planner
from planner.backends.common.common import prepare_numpy
from planner.language.spec import Gather
from planner.testing.reference import reference


def described(x):
    return np.asarray(x), x.dtype.name


def check_values(problem, **options):
    expected = problem.expected()
    dtype = np.result_type(*problem.operands()).name
    for operands in (problem.operands(), problem.strided_operands()):
        got = planner.contract(problem.spec, *operands, **problem.arguments(), **options)
        assert_equal(described(got), expected, dtype)


def test_values():
    floors = Floors()

    @settings(max_examples=examples(500, 10_000))
    @given(exact_problems())
    def law(problem):
        check_values(problem, minimize=pick(problem, OBJECTIVES))
        note_language(floors, problem)

    law()
    floors.at_least(examples(450, 9_000), three_operands=0.5, gather=0.5, scatter=0.1, nonzero=0.3)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "int32", "int8", "complex64", "complex128"])
def test_values_in_each_dtype(dtype):
    @settings(max_examples=examples(40, 800))
    @given(exact_problems((dtype,), max_size=3))
    def law(problem):
        check_values(problem)

    law()


@settings(max_examples=examples(60, 1_000))
@given(exact_problems(("float32", "float64", "float16", "int32", "complex64"), mixed_dtypes=True))
def test_mixed_dtypes_promote_as_numpy_does(problem):
    check_values(problem)


@settings(max_examples=examples(60, 1_000))
@given(exact_problems(("float32",), max_size=3))
def test_dtype_is_the_dtype_of_the_result(problem):
    got = planner.contract(problem.spec, *problem.operands(), **problem.arguments(), dtype="float64")
    assert_equal(described(got), problem.expected(), "float64")


@settings(max_examples=examples(100, 2_000))
@given(exact_problems())
def test_every_plan_gives_the_same_values(problem):
    plan = planner.plan(problem.spec, *problem.operands(), **problem.arguments())
    expected = problem.expected()
    for other in (plan, *(alternative.plan for alternative in plan.alternatives())):
        got = other(*problem.operands(), **problem.indices)
        assert_equal(described(got), expected, "float32", str(other))


def resolved_problem(problem):
    """The spec without ellipsis, size-1 dims and mixed sizes, and operands in its shapes."""
    shapes = {name: q.shape for name, q in problem.indices.items()}
    spec = planner.resolve(problem.spec, *(x.shape for x in problem.operands()), sizes=problem.sizes, **shapes)
    operands = [x.reshape(spec.shape(t)) for x, t in zip(problem.operands(), spec.inputs, strict=True)]
    sizes = dict(spec.sizes)
    arrays = {g.array: problem.indices[g.array].reshape([sizes[axis] for axis in g.axes]) for g in spec.gathers}
    return spec, operands, arrays


def test_adjoint():
    """<y', f(x)> = <f^T(y'), x> in every operand, and a transpose twice is the spec."""
    floors = Floors()

    @settings(max_examples=examples(200, 4_000))
    @given(exact_problems(("int64",)))
    def law(problem):
        spec, operands, arrays = resolved_problem(problem)
        options = {"index_mode": problem.index_mode, **arrays}
        y = planner.contract(spec, *operands, **options)
        gout = problem.output_gradient().reshape(y.shape)
        pairing = int((gout * y).sum())
        for number, x in enumerate(operands):
            flipped = planner.transpose(spec, number)
            assert planner.transpose(flipped, number) == spec
            swapped = [*operands[:number], gout, *operands[number + 1 :]]
            back = planner.contract(flipped, *swapped, **options)
            assert back.shape == x.shape
            assert int((back * x).sum()) == pairing
        floors.note(nonzero=pairing != 0, gather=bool(arrays))

    law()
    floors.at_least(examples(150, 3_000), nonzero=0.2, gather=0.5)


@settings(max_examples=examples(100, 2_000))
@given(exact_problems(("int64",)))
def test_transpose_is_the_oracles_gradient(problem):
    spec, operands, arrays = resolved_problem(problem)
    gout = problem.output_gradient()
    for number, expected in enumerate(problem.expected_gradients()):
        swapped = [*operands[:number], gout.reshape(spec.output_shape), *operands[number + 1 :]]
        got = planner.contract(planner.transpose(spec, number), *swapped, index_mode=problem.index_mode, **arrays)
        assert_equal(described(got.reshape(expected.shape)), expected, "int64", f"gradient {number}")


@settings(max_examples=examples(100, 2_000))
@given(exact_problems(("int64",)), st.integers(0, 3), st.data())
def test_batched_is_a_loop(problem, size, data):
    spec, operands, arrays = resolved_problem(problem)
    chosen = [i for i in range(len(operands)) if data.draw(st.booleans(), label=f"operand {i} has the axis")]
    moved = [name for name in arrays if data.draw(st.booleans(), label=f"{name} has the axis")]
    random = np.random.default_rng(problem.seed)
    stacked = [random.integers(-3, 4, (size, *x.shape)) if i in chosen else x for i, x in enumerate(operands)]
    shuffled = {
        n: np.stack([random.permutation(q.ravel()).reshape(q.shape) for _ in range(size)] or [q])[:size]
        if n in moved
        else q
        for n, q in arrays.items()
    }
    wide = planner.batched(spec, size, chosen, moved)
    got = planner.contract(wide, *stacked, index_mode=problem.index_mode, **shuffled)
    assert got.shape == (size, *spec.output_shape)
    for b in range(size):
        one = planner.contract(
            spec,
            *(x[b] if i in chosen else x for i, x in enumerate(stacked)),
            index_mode=problem.index_mode,
            **{n: q[b] if n in moved else q for n, q in shuffled.items()},
        )
        assert (got[b] == one).all()


# -- index modes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "size", "position", "value"), BAD_INDICES)
def test_a_bad_index_is_named(values, size, position, value):
    q = np.array(values)
    axes = "ab"[: q.ndim]
    place = f"q[{', '.join(map(str, np.atleast_1d(position)))}]".replace("q", "'q'", 1)
    for spec, operands, sizes in (
        (f"q[{axes}]c -> {axes}c", [np.ones((size, 2), np.float32)], None),
        (f"{axes}c -> q[{axes}]c", [np.ones((*q.shape, 2), np.float32)], {"q": size}),
    ):
        with pytest.raises(planner.IndexRangeError) as caught:
            planner.contract(spec, *operands, sizes=sizes, q=q)
        message = str(caught.value)
        assert place in message
        assert f"is {value}," in message
        assert f"[-{size}, {size})" in message
        assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("size", [5, 1000])
def test_the_width_of_an_index_never_matters(dtype, size):
    q = wide_index(dtype, size)
    x = np.arange(2 * size, dtype=np.float64).reshape(size, 2)
    g = np.arange(2 * q.size, dtype=np.float64).reshape(q.size, 2)
    for mode in MODES:
        for spec, operand, sizes in (("q[n]c -> nc", x, None), ("nc -> q[n]c", g, {"q": size})):
            expected = reference(spec, operand, sizes=sizes, q=q.astype(np.int64), index_mode=mode)
            got = planner.contract(spec, operand, sizes=sizes, q=q, index_mode=mode)
            assert_equal(described(got), expected, "float64")


@pytest.mark.parametrize("low", [-3, -2, -1, 0])
def test_prepared_positions_count_from_the_first_row(low):
    prepared = prepare_numpy(np.arange(low, 3), Gather("q", ("n",), 3), "raise")
    assert prepared.tolist() == [*range(3 + low, 3), *range(3)]


def test_a_uint64_beyond_int64_is_out_of_range():
    q = np.array([0, 2**64 - 1, 2**63], np.uint64)
    x = np.array([1.0, 2.0])
    with pytest.raises(planner.IndexRangeError, match=r"\[1\] is 18446744073709551615,"):
        planner.contract("q[n] -> n", x, q=q)
    assert planner.contract("q[n] -> n", x, q=q, index_mode="drop").tolist() == [1, 0, 0]
    assert planner.contract("q[n] -> n", x, q=q, index_mode="clip").tolist() == [1, 2, 2]


def test_rows_that_no_index_names_never_matter():
    c = np.ones((4, 2, 3), np.float32)
    c[1] = np.nan
    c[3] = np.inf
    a = np.ones((3, 1, 2), np.float32)
    q = np.array([0, 2, -2])
    got = planner.contract("nij, q[n]jk -> nik", a, c, q=q)
    assert (got == 2).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_drop_ignores_the_other_factors(bad):
    a = np.ones((3, 1, 2), np.float32)
    a[1] = bad
    c = np.ones((2, 2, 3), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = planner.contract("nij, q[n]jk -> nik", a, c, q=np.array([0, 5, -1]), index_mode="drop")
    assert got[:, 0].tolist() == [[2] * 3, [0] * 3, [0] * 3]


# -- prepared indices ----------------------------------------------------------------------------


@settings(max_examples=examples(100, 1_000))
@given(exact_problems(gathers=True))
def test_prepared_indices_give_the_same_values(problem):
    spec, *_ = resolved_problem(problem)
    sizes = {}
    for gather in spec.gathers:
        sizes.setdefault(gather.array, set()).add(gather.size)
    prepared = {
        name: planner.group(q, next(iter(sizes[name])), problem.index_mode) if len(sizes[name]) == 1 else q
        for name, q in problem.indices.items()
    }
    arguments = {**problem.arguments(), **prepared}
    got = planner.contract(problem.spec, *problem.operands(), **arguments)
    assert_equal(described(got), problem.expected(), "float32")


def test_a_prepared_index_refuses_another_size_or_mode():
    q = planner.group(np.array([0, 1]), 2)
    with pytest.raises(planner.PlannerError, match="size 2"):
        planner.contract("q[n] -> n", np.ones(3), q=q)
    with pytest.raises(planner.PlannerError, match="index_mode"):
        planner.contract("q[n] -> n", np.ones(2), q=q, index_mode="drop")


def test_sums_of_duplicates_repeat_bitwise():
    random = np.random.default_rng(0)
    x = random.standard_normal((5000, 8)).astype(np.float32)
    q = random.integers(0, 7, 5000)
    first = planner.contract("nc -> q[n]c", x, sizes={"q": 7}, q=q)
    assert all(np.array_equal(first, planner.contract("nc -> q[n]c", x, sizes={"q": 7}, q=q)) for _ in range(3))
