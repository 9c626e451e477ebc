"""Every framework against the oracle: one law a test, on integers that make every sum exact, so without tolerance."""

import collections
import dataclasses
import itertools
import warnings
from functools import partial
from random import Random

import laws
import numpy as np
import pytest
from conftest import examples
from engines import Ask, Jax, in_each, of_some
from laws import (
    asked,
    compare,
    directional,
    exact_problems,
    hold,
    judge,
    oracle,
    pick,
    problem_of,
    tiny,
    values_and_gradients,
)

import planner
from planner.backends.common.indices import numpy_in_range
from planner.cost.device import CPU
from planner.inspect.memory import jax_temp_bytes, torch_memory
from planner.language.options import MODES
from planner.language.spec import Gather
from planner.program.calls import RangedIndices
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum
from planner.testing import Problem
from planner.testing.judgement import Subject
from planner.testing.reference import second_derivatives as second_derivatives_of
from planner.testing.scripts import vectors_of
from planner.workloads import WORKLOADS


@pytest.fixture(autouse=True)
def compiled_in_a_hurry(request):
    """The steps of JAX's eager calls; but as users compile them in the nightly run, and where a test asks for it."""
    engine = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    if isinstance(engine, Jax):
        request.getfixturevalue("jax_in_a_hurry" if engine.in_a_hurry else "jax_as_users")


# --- the laws: what is asked of a framework about a problem, and what the oracle says -------------


def values(engine, problem, **options):
    """The result, of a call that nothing surrounds."""
    call = Subject().call(problem, **options)
    arrays = engine.operands(problem), engine.indices(problem)
    return [Ask(lambda xs, qs: [call(xs, qs)], arrays, oracle(engine, problem)[:1])]


def everywhere(engine, problem, **options):
    """The result without `jit`; then values and gradients, of operands in any strides too."""
    options.setdefault("minimize", pick(problem, laws.OBJECTIVES))
    laid = [problem, dataclasses.replace(problem, strided=True)] if engine.strided else [problem]
    found = [ask for one in laid for ask in values_and_gradients(engine, one, **options)]
    return found if engine.strided else values(engine, problem, **options) + found


def in_some_strides(engine, problem):
    """As `everywhere`; in torch, which plans for the strides, contiguous or in any strides."""
    if engine.name != "torch":
        return everywhere(engine, problem)
    return values_and_gradients(engine, dataclasses.replace(problem, strided=problem.seed % 2 == 1))


def every_plan(engine, problem):
    """Each plan that was not taken gives what the plan gives; in JAX, which compiles it, of three the result."""
    plan = engine.plan(problem, engine.operands(problem), engine.indices(problem))
    if engine.name == "jax":
        problem = dataclasses.replace(problem, requires_grad=(False,) * len(problem.shapes), seed=problem.seed | 1)
    asks = []
    for other in (plan, *(alternative.plan for alternative in plan.alternatives(*engine.alternatives))):
        asks += values_and_gradients(engine, problem, lambda xs, qs, other=other: other(*xs, **qs))
    return asks


def prepared(engine, problem):
    """Prepared index arrays give the same as plain ones, the second time too; those of one size can be prepared."""
    problem = dataclasses.replace(problem, requires_grad=(engine.differentiates,) * len(problem.shapes))
    call, gout, sizes = Subject().call(problem), engine.array(problem.output_gradient()), {}
    for gather in problem.resolved().gathers:
        sizes.setdefault(gather.array, set()).add(gather.size)
    given = {
        name: planner.group(q, min(sizes[name]), problem.index_mode) if len(sizes[name]) == 1 else q
        for name, q in engine.indices(problem).items()
    }
    arrays = engine.operands(problem), given, gout
    run, expected = lambda xs, qs, g: engine.pulled(call, xs, qs, g, problem.wanted), oracle(engine, problem)
    return [Ask(run, arrays, expected, jitted) for jitted in (*engine.ways(problem), engine.name == "jax")]


def second_derivatives(engine, problem):
    """Derivatives of the gradients: those of one gradient are gradients with another operand.

    With the vectors v for the operands x: the sum over i and j of the gradients of x_j with v_i in the place of x_i,
    and for the output's gradient the result's directional derivative.
    """
    wanted, gout = problem.wanted, problem.output_gradient()
    operands, vectors = problem.operands(), vectors_of(problem)
    conjugated = [np.conj(x) for x in operands], [np.conj(x) for x in vectors]
    others, along = conjugated if engine.conjugates else (operands, vectors)
    along = {number: along[number] for number in wanted}
    total, twice = second_derivatives_of(problem.spec, gout, others, along, **problem.arguments()), 0
    for number in wanted:
        rest = [v if n in wanted and n != number else None for n, v in enumerate(vectors)]
        if any(v is not None for v in rest):
            twice = twice + directional(problem, [*operands[:number], vectors[number], *operands[number + 1 :]], rest)
    dtypes = [problem.dtypes[n] for n in wanted]
    hessian = [(f"second derivative {n}", laws.real(total[n], problem.dtypes[n]), problem.dtypes[n]) for n in wanted]
    moved = [v if n in wanted else None for n, v in enumerate(vectors)]
    ahead = ("derivative by the output's gradient", directional(problem, operands, moved), dtypes[0])
    twice = ("second directional derivative", twice + np.zeros(problem.output_shape()), dtypes[0])
    orders = [[*hessian, ahead]] * 3 + [oracle(engine, problem)[1:], [twice]]
    call = Subject().call(problem)

    def run(xs, qs, gout, given):
        found = engine.seconds(of_some(call, xs, qs, wanted), [xs[n] for n in wanted], gout, given)
        return [x for order in found for x in order]

    expected = [row for order in orders[: 1 if engine.name == "torch" else 5] for row in order]
    given = [engine.array(vectors[n], problem.dtypes[n]) for n in wanted]
    return asked(engine, problem, run, engine.array(gout), given, expected=expected)


def forward_mode(engine, problem):
    """The directional derivative, and in torch the gradients of a functional transform."""
    wanted = problem.wanted or tuple(range(len(problem.shapes)))
    strided = engine.strided and problem.seed % 2 == 1
    plain = dataclasses.replace(problem, requires_grad=(False,) * len(problem.shapes), strided=strided)
    vectors = [v if n in wanted else None for n, v in enumerate(vectors_of(problem))]
    tangent = directional(problem, problem.operands(), vectors)
    expected = [("result", problem.expected(), "float32"), ("tangent", tangent, "float32")]
    call, gout = Subject().call(problem), engine.array(problem.output_gradient())

    def run(xs, qs, given):
        return engine.tangents(of_some(call, xs, qs, wanted), [xs[n] for n in wanted], given)

    asks = asked(engine, plain, run, [engine.array(vectors[n]) for n in wanted], expected=expected)
    if engine.name == "torch":
        asks = [ask._replace(expected=expected * 2) for ask in asks]
        own = dataclasses.replace(problem, requires_grad=tuple(n in wanted for n in range(len(problem.shapes))))

        def gradients(xs, qs, gout):
            return engine.functional(of_some(call, xs, qs, wanted), [xs[n] for n in wanted], gout)

        asks += asked(engine, plain, gradients, gout, expected=oracle(engine, own))
    return asks


def mapped(engine, problem):
    """`vmap` over some dimensions of operands and index arrays is a loop; inside of it are gradients and tangents."""
    size, random, draws = pick(problem, (2, 1, 3)), np.random.default_rng([problem.seed, 9]), Random(problem.seed)
    arrays, count = [*problem.operands(), *problem.indices.values()], len(problem.shapes)
    dims = [draws.choice([None, *range(x.ndim + 1)]) for x in arrays]
    if all(dim is None for dim in dims):
        dims[0] = 0
    singles = [list(arrays) for _ in range(size)]
    for place, (x, dim) in enumerate(zip(arrays, dims, strict=True)):
        for one in singles:
            if dim is not None and place < count:
                one[place] = random.integers(-3, 4, x.shape).astype(x.dtype)
            elif dim is not None:
                one[place] = random.permutation(x.ravel()).reshape(x.shape)
    batch = [x if dim is None else np.stack([one[place] for one in singles], dim)
             for place, (x, dim) in enumerate(zip(arrays, dims, strict=True))]  # fmt: skip
    whole = dataclasses.replace(problem, requires_grad=(True,) * count)
    rows, vectors = [], vectors_of(problem)
    for one in singles:
        row = dataclasses.replace(whole, indices=dict(zip(problem.indices, one[count:], strict=True)))
        value, *gradients = oracle(engine, row, one[:count])
        tangent = "tangent", directional(row, one[:count], vectors), value[2]
        rows.append([value, *gradients, value, tangent])
    expected = [(cells[0][0], np.stack([x for _, x, _ in cells]), cells[0][2]) for cells in zip(*rows, strict=True)]
    call, gout = Subject().call(problem), engine.array(problem.output_gradient())

    def run(*arrays):
        indices = dict(zip(problem.indices, arrays[count:], strict=True))

        def contracted(*xs):
            return call(xs, indices)

        found = engine.functional(contracted, arrays[:count], gout)
        return [*found, *engine.jvp(contracted, arrays[:count], [engine.array(v) for v in vectors])]

    arrays = [engine.array(x) for x in batch]
    return [Ask(engine.vmap(run, tuple(dims)), tuple(arrays), expected, engine.name == "jax")]


def unread_rows(engine, problem):
    """NaN in rows that no index names reaches neither the result nor a gradient."""
    problem = dataclasses.replace(problem, requires_grad=(engine.differentiates,) * len(problem.shapes))
    values = laws.with_unread_nan(problem)[0]
    call = Subject().call(problem, minimize=pick(problem, laws.OBJECTIVES))

    @np.errstate(invalid="ignore")  # NumPy warns of NaN in rows that it multiplies before it takes others
    def run(xs, qs, gout):
        return engine.pulled(call, xs, qs, gout, problem.wanted)

    indices, expected = engine.indices(problem), oracle(engine, problem)
    arrays = engine.leaves(values), indices, engine.array(problem.output_gradient())
    bare = [engine.array(x) for x in values], indices  # no gradient is asked for
    alone = Ask(np.errstate(invalid="ignore")(lambda xs, qs: [call(xs, qs)]), bare, expected[:1], engine.name == "jax")
    return [alone, *(Ask(run, arrays, expected, jitted) for jitted in engine.ways(problem))]


def gradients_of_unread_rows(engine, problem):
    """Infinity in one operand leaves the gradients of the rows of others that no index names at zero."""
    problem = dataclasses.replace(problem, requires_grad=(True,) * len(problem.shapes))
    numbers, arrays = list(range(len(problem.shapes))), problem.operands()
    infinite = pick(problem, numbers)
    arrays[infinite].flat[:1] = np.inf
    others = {n: np.flatnonzero(mask) for n, mask in enumerate(laws.unread_places(problem)) if n != infinite}
    call = Subject().call(problem, minimize=pick(problem, laws.OBJECTIVES))

    def run(xs, qs, gout):
        _, *gradients = engine.pulled(call, xs, qs, gout, numbers)
        return [gradients[n].reshape(-1)[places] for n, places in others.items()]

    zeros = [(f"gradient {n}", np.zeros(len(places)), "float32") for n, places in others.items()]
    arrays = engine.leaves(arrays), engine.indices(problem), engine.array(problem.output_gradient())
    return [Ask(run, arrays, zeros, jitted) for jitted in engine.ways(problem)]


# --- values and gradients -------------------------------------------------------------------------

# In JAX in parts, which several processes may share. Of a hundred problems, which resemble each other, shares are too
# far from their means (43 to 87 had gathers where 75 are the mean): three parts have three operands, three gathers.
JAX_PARTS = [
    (
        examples(30, 2_000),
        {"min_operands": least, "max_operands": examples(3, 4), "max_axes": 5, "max_size": 3, "gathers": gathers},
        {"three_operands": 0.95 if least == 3 else 0.1, "gather": 0.95 if gathers else 0.25,
         "scatter": examples(2, 5) / 100 if gathers else 0},
    )
    for least, gathers in ((3, True), (3, None), (3, True), (1, None), (1, True))
]  # fmt: skip
WHOLE = (examples(220, 10_000), {}, {"three_operands": 0.5, "gather": 0.5, "scatter": 0.1})


@in_each(numpy=WHOLE, torch=WHOLE, jax=JAX_PARTS)
def test_values_and_gradients(engine, sample):
    """By every objective; contiguous and in any strides; in JAX without `jit` and with it."""
    count, options, shares = sample
    pinned = [
        Problem("a, , q[a] aa -> ", ((2,), (), (2, 2, 2)), indices={"q": np.array([0, 0])}),
        Problem("a, a, ab -> q[b] aab", ((2,), (2,), (2, 2)), {"q": 2}, {"q": np.array([0, 0])}),
        # The result is the diagonal alone, though the term is the operand's.
        Problem("aa -> aa", ((3, 3),)),
        Problem("aba -> aba", ((2, 3, 2),)),
    ]
    hold(engine, everywhere, exact_problems(**options), count, pinned=pinned, nonzero=0.3, gradient=0.8, **shares)


@pytest.mark.parametrize("engine", [pytest.param(Jax(in_a_hurry=False), id="jax")])
def test_values_and_gradients_as_users_compile_them(engine):
    pytest.importorskip("jax", reason="jax is not installed")
    nothing = {"kbl,kbl->b": [(2, 3, 0)] * 2, "ikj,kj->ik": [(0, 2, 3), (2, 3)], "jk,ijkl->il": [(0, 1), (2, 0, 1, 3)]}
    pinned = [Problem(spec, tuple(shapes)) for spec, shapes in nothing.items()]
    hold(engine, values_and_gradients, exact_problems(max_operands=3, gathers=True), examples(10, 500), pinned=pinned)


@in_each(
    numpy=(examples(12, 800), "float64 float16 int64 int32 int8 complex64 complex128"),
    torch=(examples(12, 800), "float64 float16 bfloat16 complex64 complex128 int64 int32 int8 uint8"),
    jax=(examples(10, 400), "float64 float16 bfloat16 int64 int32 complex64 complex128"),
)
def test_values_and_gradients_in_each_dtype(engine, sample):
    count, dtypes = sample
    for dtype in dtypes.split():
        small = {"max_operands": 3, "max_axes": 4} if engine.name == "jax" or "int" in dtype else {}
        hold(engine, in_some_strides, exact_problems((dtype,), max_size=3, **small), count)


@in_each(numpy=examples(30, 1_000), torch=examples(30, 1_000), jax=examples(10, 400))
def test_mixed_dtypes_promote_as_the_framework_does(engine, sample):
    dtypes = ("float32", "float64", "float16", "int32", "complex64")
    if engine.name == "jax":  # 64 bits are a setting there
        dtypes = ("float32", "float16", "int32", "complex64")
    hold(engine, in_some_strides, exact_problems(dtypes, mixed_dtypes=True, **engine.smaller), sample)


def in_double_precision(engine, problem):
    """`dtype=` is the dtype of the result; gradients are of the operands' dtypes."""
    asks = values_and_gradients(engine, problem, dtype="float64")
    return [ask._replace(expected=[(*ask.expected[0][:2], "float64"), *ask.expected[1:]]) for ask in asks]


@in_each(numpy=examples(30, 1_000), torch=examples(30, 1_000))
def test_dtype_is_the_dtype_of_the_result(engine, sample):
    hold(engine, in_double_precision, exact_problems(max_size=3), sample)


@in_each(numpy=examples(30, 2_000), torch=examples(20, 2_000), jax=examples(15, 400))
def test_every_plan_gives_the_same_values_and_gradients(engine, sample):
    hold(engine, every_plan, exact_problems(**engine.smaller), sample)


@in_each(numpy=examples(30, 1_000), torch=examples(30, 1_000), jax=examples(10, 400))
def test_prepared_indices_give_the_same_values_and_gradients(engine, sample):
    hold(engine, prepared, exact_problems(gathers=True, **engine.smaller), sample)


@in_each(torch=(examples(30, 1_000), {}), jax=(examples(12, 500), {"max_axes": 4, "max_size": 3, "max_operands": 3}))
def test_vmap_is_a_loop(engine, sample):
    count, small = sample
    hold(engine, mapped, exact_problems(**small), count)


@in_each(torch=examples(30, 500), jax=examples(10, 500))
def test_forward_mode(engine, sample):
    hold(engine, forward_mode, exact_problems(slack=8, **engine.smaller), sample)


@in_each(torch=(("float64", "float64", "complex128"), 1), jax=(("float64",), 2))
def test_second_derivatives(engine, sample):
    dtypes, least = sample
    # The second derivative passed index arrays on with their dims of size 1.
    pinned = Problem(
        "a p[c]  p[a] c, ca, acb -> q[ca]", ((2, 2, 2, 2), (2, 2), (2, 2, 2)), {"q": 2},
        {"q": np.array([[3, 0], [0, 1]]), "p": np.array([-1])}, "drop", ("float64",) * 3, seed=72,
    )  # fmt: skip
    small = {"max_operands": 3, "max_axes": 3, "max_size": 2, "max_value": 2, "without": ("size zero",)}
    drawn = exact_problems(dtypes, slack=16, min_operands=least, **small).filter(lambda problem: problem.wanted)
    shares = {"gather": 0.2, "nonzero": 0.3, "three_operands": 0.2}
    hold(engine, second_derivatives, drawn, examples(15, 500), pinned=[pinned], **shares)


@in_each("torch")
def test_output_gradients_in_any_strides(engine):
    """Repeated along some dimensions, permuted, with gaps; what repeats is planned as a gradient of the sum."""
    import torch

    def law(engine, problem):
        gout = laws.repeating(problem.output_gradient(), Random(problem.seed))
        call = Subject().call(problem, **{"memory_limit": 10**9} if problem.seed % 2 else {})

        def run(xs, qs):
            result, wanted = call(xs, qs), [xs[n] for n in problem.wanted]
            return [result, *torch.autograd.grad(result, wanted, engine.array(gout), create_graph=problem.seed % 4 > 1)]

        return asked(engine, problem, run, expected=oracle(engine, problem, gout=gout))

    hold(engine, law, exact_problems().filter(lambda problem: problem.wanted), examples(30, 2_000))


@in_each(numpy=laws.OBJECTIVES, torch=laws.OBJECTIVES, jax=("time",))
def test_named_workloads(engine, sample):
    """Of torch's operands some are one tensor, whose gradient is the sum of those of its places."""
    asks = []
    for minimize, workload in itertools.product(sample, (tiny(workload) for workload in WORKLOADS.values())):
        problem = problem_of(workload)
        xs, gout = engine.of_workload(workload), workload.cotangent("numpy")
        result, *gradients = oracle(engine, problem, workload.operands("numpy"), gout)
        if engine.name == "torch":
            by_tensor = collections.Counter()
            for n, (_, gradient, _) in zip(problem.wanted, gradients, strict=True):
                by_tensor[id(xs[n])] = by_tensor[id(xs[n])] + gradient
            gradients = [(f"gradient {n}", by_tensor[id(xs[n])], "float32") for n in problem.wanted]
        call, arrays = Subject().call(problem, minimize=minimize), (xs, engine.indices(problem), engine.array(gout))
        run = partial(lambda call, wanted, xs, qs, g: engine.pulled(call, xs, qs, g, wanted), call, problem.wanted)
        asks.append(Ask(run, arrays, [result, *gradients], engine.name == "jax"))
    compare(engine, [*WORKLOADS] * len(sample), asks)


# --- index arrays ---------------------------------------------------------------------------------


@in_each("numpy", "torch", "jax")
def test_the_width_of_an_index_never_matters(engine):
    """Of indices up to the largest that a dtype names, in arrays that are larger and smaller than that."""
    for narrow in (True, False) if engine.name == "jax" else (None,):  # 64 bits are a setting there
        dtype = "float32" if narrow else "float64"
        for size in (5, 1000):
            some = []
            for mode, kind in itertools.product(laws.MODES, laws.INDEX_DTYPES):
                q = laws.wide_index(kind, size)
                if narrow in (None, "64" not in kind):
                    given = {"indices": {"q": q}, "index_mode": mode, "dtypes": (dtype,), "seed": 9, "max_value": 10**4}
                    some.append(Problem("q[n]c -> nc", ((size, 2),), **given))
                    some.append(Problem("nc -> q[n]c", ((q.size, 2),), {"q": size}, **given))
            judge(engine, values, some)
            judge(engine, values_and_gradients, some)


@in_each("numpy", "torch", "jax")
@pytest.mark.parametrize(
    ("spec", "shapes", "rows", "sizes"),
    [
        ("nij, q[n]jk -> nik", [(6, 2, 3), (5, 3, 2)], (6,), None),
        ("nij, nik -> q[n]jk", [(6, 2, 3), (6, 2, 2)], (6,), {"q": 5}),
        ("bnd, b q[bnk] d -> bnk", [(2, 3, 4), (2, 5, 4)], (2, 3, 6), None),
        ("bnk, b q[bnk] d -> bnd", [(2, 3, 6), (2, 5, 4)], (2, 3, 6), None),
        ("bnk, bnd -> b q[bnk] d", [(2, 3, 6), (2, 3, 4)], (2, 3, 6), {"q": 5}),
    ],
)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8"])
def test_every_row_that_takes_a_step_computes_in_its_dtype(engine, spec, shapes, rows, sizes, dtype):
    """Frameworks have fewer products of booleans than of numbers."""
    random = np.random.default_rng(0)
    arrays, q = [random.integers(0, 2, shape) for shape in shapes], random.integers(0, 5, rows)
    expected = planner.contract(spec, *arrays, sizes=sizes, q=q).astype(dtype)
    op = Einsum(planner.resolve(spec, *shapes, sizes=sizes, q=rows), dtype)
    (gather,) = op.gathers
    given, index = [engine.array(x.astype(dtype)) for x in arrays], RangedIndices(False, {gather: engine.array(q)})
    table = load_backend(engine.name).table
    for choice in table.choices(op, CPU):
        (found,) = table.run(choice.lowering, op, given, index)
        assert np.array_equal(np.asarray(found), expected), choice.lowering
        assert dtype in str(found.dtype), choice.lowering


@in_each("numpy", "torch", "jax")
def test_a_uint64_beyond_int64_is_out_of_range(engine):
    problem = Problem(
        "q[n] -> n", ((2,),), indices={"q": np.array([0, 2**64 - 1, 2**63], np.uint64)}, dtypes=("float64",)
    )
    with engine.context(problem):
        x, q = engine.array(np.array([1.0, 2.0])), engine.array(problem.indices["q"])
        with pytest.raises(planner.IndexRangeError, match=r"\[1\] is 18446744073709551615,"):
            planner.contract("q[n] -> n", x, q=q)
        for mode, expected in (("drop", [1, 0, 0]), ("clip", [1, 2, 2])):
            for wrap in (lambda f: f, engine.jit):
                run = wrap(lambda x, q, mode=mode: planner.contract("q[n] -> n", x, q=q, index_mode=mode))
                assert run(x, q).tolist() == expected


@pytest.mark.parametrize("low", [-3, -2, -1, 0])
def test_prepared_positions_count_from_the_first_row(low):
    prepared, may_drop = numpy_in_range(np.arange(low, 3), Gather("q", ("n",), 3), MODES["raise"])
    assert not may_drop
    assert prepared.tolist() == [*range(3 + low, 3), *range(3)]


@in_each(numpy=examples(40, 3_000), torch=examples(30, 2_000), jax=examples(10, 1_000))
def test_an_index_out_of_range_reads_nan(engine, sample):
    """Values are NaN where they depend on it; gradients leave it out, and so does what is added in the output."""
    kinds = ("float32",) if engine.name == "jax" else ("float32", "complex64", "int32")
    drawn = exact_problems(kinds, gathers=True, mixed_dtypes=len(kinds) > 1, index_modes=("nan",))
    of_q = {
        "a, a, q[a] a -> q[a]": (((2,), (2,), (0, 2)), [0]),
        "bb, q[b] c -> q[a] bc": (((1, 1), (2, 2)), [2]),
        "q[a] a, abc, abc -> a": (((2, 2), (2, 0, 2), (2, 0, 2)), [0, 2]),
        "q[b] a, a, abc -> ": (((2, 2), (2,), (2, 2, 2)), [0, 2]),
        "q[n] j, q[n]q[n], nj -> q[n] j": (((3, 2), (5, 4), (4, 2)), [0, -1, 4, -4]),
        "q[bb] a, a, ab -> bb": (((2, 3), (3,), (3, 2)), [[0, 0], [2, 0]]),
    }
    pinned = [
        Problem(spec, shapes, {"q": 3} if "j" in spec else None, {"q": np.array(q)}, "nan")
        for spec, (shapes, q) in of_q.items()
    ]

    def note(floors, problem):
        floors.note(nan=np.isnan(problem.expected()).any())

    hold(engine, everywhere, drawn, sample, pinned=pinned, note=note, nan=0.2)
    hold(engine, prepared, exact_problems(gathers=True, index_modes=("nan",)), sample // 4)


GROUPED = "nij, q[n]jk -> nik"


@in_each(numpy=examples(30, 2_000), torch=examples(30, 2_000), jax=examples(15, 2_000))
def test_rows_that_no_index_names_never_matter(engine, sample):
    """In any spec, and where grouped kernels run."""
    pinned = [
        Problem("nj, q[n]jk -> q[n]k", ((9, 2), (4, 2, 3)), indices={"q": np.array([0, 2] * 4 + [0])}),
        Problem("nj, q[n]jk, mk -> nm", ((3, 2), (4, 2, 3), (2, 3)), indices={"q": np.array([0, 2, 0])}),
        # Two products keep the rows apart until they are taken, and one adds them up.
        Problem("ni, r[n]j, ijk, ek -> ne", ((300, 4), (4, 2), (4, 2, 3), (5, 3)), indices={"r": np.arange(300) % 3}),
        Problem("ni, r[n]j, r[m]k, ij -> nkm", ((90, 4), (4, 2), (4, 3), (4, 2)), indices={"r": np.arange(90) % 3}),
        # A segment sum meets the whole pool, of which no rows are taken.
        Problem("q[n]d, nk -> q[n]dk", ((4, 8), (180, 8)), indices={"q": np.arange(180) % 2}, max_value=1),
        *(Problem(GROUPED, ((3, 1, n), (4, n, 3)), indices={"q": np.array([0, 2, -2])}) for n in (2, 100)),
        *(
            Problem(GROUPED, ((n, 1, m), (64, m, m)), indices={"q": np.arange(n) % 30 * 2}, max_value=1)
            for n, m in ((2000, 32), (500, 8))
        ),
    ]
    drawn = exact_problems(gathers=True, index_modes=("raise", "clip"), without=("size zero",))

    def note(floors, problem):
        floors.note(unread=laws.with_unread_nan(problem)[1])

    hold(engine, unread_rows, drawn, sample, pinned=pinned, note=note, unread=0.5 if engine.name == "torch" else 0.4)


@in_each(torch=examples(20, 2_000), jax=examples(10, 1_000))
def test_gradients_of_rows_that_no_index_names_stay_zero(engine, sample):
    pinned = [
        # Contracted whole, and then taken: zero gradients of unread rows meet the infinity.
        Problem("nj, jk, q[n]k -> n", ((4, 3), (3, 3), (6, 3)), indices={"q": np.array([1, 2, 2, 4])}, seed=seed)
        for seed in range(3)
    ]
    # Of the index array of one bracket the diagonal is read only.
    diagonal = {"q": np.array([[0, 0], [1, 0]])}
    pinned.append(Problem("q[ab] a, q[bb] a, a, a -> ", ((2, 2), (2, 2), (2,), (2,)), indices=diagonal))
    drawn = exact_problems(gathers=True, index_modes=("raise", "clip"), without=("size zero",))

    def note(floors, problem):
        floors.note(unread=any(mask.any() for mask in laws.unread_places(problem)))

    hold(engine, gradients_of_unread_rows, drawn, sample, pinned=pinned, note=note, unread=0.4)


@in_each("numpy", "torch", "jax")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_drop_ignores_the_other_factors(engine, bad):
    """What would multiply a dropped row is not read, in gradients neither."""
    a, c, gout = (np.ones(shape, np.float32) for shape in ((3, 1, 2), (2, 2, 3), (3, 1, 3)))
    a[1] = gout[1] = bad
    problem = Problem(GROUPED, (a.shape, c.shape), indices={"q": np.array([0, 5, -1])}, index_mode="drop")
    call, ways, expected = Subject().call(problem), {False, engine.name == "jax"}, oracle(engine, problem, [a, c], gout)
    arrays = engine.leaves((a, c)), engine.indices(problem), engine.array(gout)
    asks = [Ask(lambda xs, qs, g: engine.pulled(call, xs, qs, g, (0, 1)), arrays, expected, way) for way in ways]
    assert all(np.isfinite(values).all() for _, values, _ in expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compare(engine, ways, asks)


@in_each("numpy", "torch", "jax")
def test_a_prepared_index_refuses_another_size_or_mode(engine):
    q = planner.group(engine.array(np.array([0, 1])), 2)
    with pytest.raises(planner.PlannerError, match="size 2"):
        planner.contract("q[n] -> n", engine.array(np.ones(3)), q=q)
    with pytest.raises(planner.PlannerError, match="index_mode"):
        planner.contract("q[n] -> n", engine.array(np.ones(2)), q=q, index_mode="drop")


@in_each("numpy", "torch", "jax")
@pytest.mark.parametrize(
    ("spec", "shapes", "sizes"),
    [
        ("nc -> q[n]c", [(20_000, 8)], {"q": 7}),
        (GROUPED, [(20_000, 1, 8), (7, 8, 8)], None),
        ("n, q[n] -> ", [(20_000,), (7,)], None),
    ],
)
def test_calls_repeat_bitwise(engine, spec, shapes, sizes):
    """Sums of many duplicates, whose order decides how they are rounded."""
    random = np.random.default_rng(0)
    operands = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    problem = Problem(spec, tuple(shapes), sizes, {"q": random.integers(0, 7, 20_000)})
    gout = random.standard_normal(problem.output_shape()).astype(np.float32)
    arrays, call = (engine.leaves(operands), engine.indices(problem), engine.array(gout)), Subject().call(problem)
    run = engine.jit(lambda xs, qs, g: engine.pulled(call, xs, qs, g, tuple(range(len(shapes)))))
    first, *others = ([engine.described(x)[0] for x in run(*arrays)] for _ in range(4))
    for again in others:
        assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))


# --- the kernels run ------------------------------------------------------------------------------


@in_each("torch", "jax")
def test_the_grouped_kernels_run(engine, monkeypatch, xla_sizes):
    """In the call itself, which never holds a matrix for each row."""
    names, rows, calls = ["grouped matmul", "both grouped gradients"], load_backend(engine.name).table.rows, []
    for row in [rows[name] for name in names]:

        def counted(*args, row=row):
            calls.append(row.name)
            return row.run(*args)

        monkeypatch.setitem(rows, row.name, dataclasses.replace(row, run=counted))
    # Sizes that no other test traces, and a seed with which JAX runs it under `jit`.
    problem = dataclasses.replace(problem_of(WORKLOADS["seed-gathered-matmul"].resized(n=4112, q=64)), seed=1)
    operands, indices = engine.operands(problem), engine.indices(problem)
    assert [step.choice.lowering for step in engine.plan(problem, operands, indices).steps] == names
    judge(engine, values_and_gradients, [problem])
    assert calls == names
    call, gout = Subject().call(problem), engine.array(problem.output_gradient())

    def run(xs, qs, gout):
        return engine.pulled(call, xs, qs, gout, (0, 1))

    arrays, share = (operands, indices, gout), 4 if engine.name == "torch" else 2
    taken = jax_temp_bytes(run, *arrays) if engine.name == "jax" else torch_memory(lambda: run(*arrays))[1].peak_bytes
    assert taken < 4 * 4112 * operands[1].shape[1] * operands[1].shape[2] / share
