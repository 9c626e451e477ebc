"""JAX against the oracle: values, gradients, transforms and kernels, eager and jitted, on exact integers."""

import contextlib
import dataclasses

import numpy as np
import pytest
from conftest import PROFILE, examples
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from laws import (
    BAD_INDICES,
    INDEX_DTYPES,
    MODES,
    OBJECTIVES,
    Floors,
    assert_equal,
    directional,
    exact_problems,
    note_language,
    pick,
    tangents_of,
    wide_index,
    with_unread_nan,
)

import planner
from planner.backends.jax.index import normalised
from planner.language.spec import Gather, Spec
from planner.testing import Problem
from planner.testing.reference import reference, reference_gradients
from planner.workloads import WORKLOADS

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

import jax_fast  # noqa: E402
from jax_fast import jit  # noqa: E402


@pytest.fixture(autouse=True)
def compiled_in_a_hurry(request, monkeypatch):
    """Steps of eager calls; but as users compile them in the nightly run, and where a test is marked."""
    if PROFILE == "ci" and not request.node.get_closest_marker("compiled_as_by_users"):
        monkeypatch.setattr("planner.backends.jax.step.compiled", jax_fast.compiled)


def x64(problem):
    """64-bit types are off by default: turn them on for problems that have them."""
    wide = any(d in ("float64", "int64", "complex128") for d in problem.dtypes)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def arrays_of(problem):
    return [jnp.asarray(x, dtype) for x, dtype in zip(problem.operands(), problem.dtypes, strict=True)]


def indices_of(problem):
    return {name: jnp.asarray(q) for name, q in problem.indices.items()}


def promoted(problem):
    return jnp.result_type(*map(jnp.dtype, problem.dtypes)).name


def described(x):
    name = x.dtype.name
    return np.asarray(x.astype(jnp.float32) if name == "bfloat16" else x), name


def call_of(problem, **options):
    """The contraction as a function of operands and index arrays."""
    chosen = {"sizes": problem.sizes, "index_mode": problem.index_mode, **options}
    return lambda operands, indices: planner.contract(problem.spec, *operands, **chosen, **indices)


def value_and_gradients(call, operands, indices, gout, wanted):
    """The result, and what `gout` gives back to the wanted operands."""

    def some(*chosen):
        full = list(operands)
        for number, x in zip(wanted, chosen, strict=True):
            full[number] = x
        return call(full, indices)

    result, pullback = jax.vjp(some, *(operands[number] for number in wanted))
    return result, pullback(gout.astype(result.dtype))


def check(problem, eager_gradients=True, jit=jit, **options):
    """Values eager and jitted, gradients jitted and, if asked, eager."""
    call, wanted = call_of(problem, **options), problem.wanted
    operands, indices = arrays_of(problem), indices_of(problem)
    expected, dtype = problem.expected(), promoted(problem)
    assert_equal(described(call(operands, indices)), expected, dtype)
    gout = jnp.asarray(problem.output_gradient())
    traced = problem.index_mode == "raise" and not jnp.issubdtype(dtype, jnp.inexact) and indices
    if traced:  # no NaN could mark a bad index: refused, see below
        assert_equal(described(jit(lambda xs: call(xs, indices))(operands)), expected, dtype)
        return

    def both(operands, indices, gout):
        if not wanted:
            return call(operands, indices), ()
        return value_and_gradients(call, operands, indices, gout, wanted)

    gradients = reference_gradients(problem.spec, problem.output_gradient(), *problem.operands(), **problem.arguments())
    runs = [jit(both), both] if eager_gradients and wanted else [jit(both)]
    for run in runs:
        result, found = run(operands, indices, gout)
        assert_equal(described(result), expected, dtype)
        for number, gradient in zip(wanted, found, strict=True):
            exact = gradients[number]
            if not jnp.issubdtype(gradient.dtype, jnp.complexfloating):
                exact = exact.real
            assert_equal(described(gradient), exact, problem.dtypes[number], f"gradient {number}")


# 500 examples in parts, which several processes may share.
@pytest.mark.parametrize("part", range(5))
def test_values_and_gradients(part):
    """Every example's values eager and jitted and its gradients jitted; every eighth's gradients eager too.

    Three of the parts have three operands, three have gathers: in a hundred examples, which resemble each other, shares
    are too far from their means (43 to 87 of 100 had gathers where 75 are the mean) for floors over all five.
    """
    floors = Floors()
    operands, gathers = (3 if part < 3 else 1, True if part % 2 == 0 else None)

    @settings(max_examples=examples(100, 2_000))
    @example(Problem("a, , q[a] aa -> ", ((2,), (), (2, 2, 2)), indices={"q": np.array([0, 0])}))
    @given(
        exact_problems(
            min_operands=operands, max_operands=examples(3, 4), max_axes=5, max_size=3, gathers=gathers
        )
    )  # fmt: skip
    def law(problem):
        check(problem, problem.seed % 8 == 0, minimize=pick(problem, OBJECTIVES))
        note_language(floors, problem, gradient=any(problem.requires_grad))

    law()
    three, gather = (0.95 if operands == 3 else 0.1, 0.95 if gathers else 0.25)
    scatter = examples(2, 5) / 100 if gathers else 0  # of a hundred with gathers 17 to 61 were seen, of others 7 to 41
    floors.at_least(
        examples(90, 1_800), three_operands=three, gather=gather, scatter=scatter, nonzero=0.3, gradient=0.8
    )  # fmt: skip


@pytest.mark.compiled_as_by_users
@settings(max_examples=examples(20, 500))
@given(exact_problems(max_operands=3, gathers=True))
def test_values_and_gradients_as_users_compile_them(problem):
    check(problem, eager_gradients=problem.seed % 2 == 0, jit=jax.jit)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int64", "int32", "complex64", "complex128"])
def test_values_and_gradients_in_each_dtype(dtype):
    @settings(max_examples=examples(10, 400))
    @given(exact_problems((dtype,), max_axes=4, max_size=3, max_operands=3))
    def law(problem):
        with x64(problem):
            check(problem, eager_gradients=False)

    law()


@settings(max_examples=examples(20, 400))
@given(exact_problems(("float32", "float16", "int32", "complex64"), mixed_dtypes=True, max_size=3, max_axes=4))
def test_mixed_dtypes_promote_as_jax_does(problem):
    check(problem, eager_gradients=False)


def test_weak_types_promote_as_jnp_einsum_does():
    """An array of a Python number takes the other operand's type; which one is weak is part of what is cached."""
    half, weak, strong = jnp.ones(3, "float16"), jnp.asarray(2.0), jnp.ones((), "float32")
    brain, integer = jnp.ones(3, "bfloat16"), jnp.asarray(2)
    for wrap in (lambda f: f, jit):
        for pair in (
            (half, weak),
            (half, strong),
            (brain, weak),
            (half, integer),
            (integer, weak),
            (jnp.arange(3), weak),
        ):
            spec = "i, -> i" if pair[0].ndim else ", -> "
            got = wrap(lambda a, b, spec=spec: planner.contract(spec, a, b))(*pair)
            expected = jnp.einsum(spec.replace(" ", ""), *pair)
            assert got.dtype == expected.dtype, pair
            assert (got == expected).all()
    ga, gb = jax.grad(lambda a, b: planner.contract("i, -> i", a, b).sum(), (0, 1))(half, weak)
    assert (ga.dtype, gb.dtype) == ("float16", "float32")
    assert (ga.tolist(), gb.tolist()) == ([2, 2, 2], 3)
    batches = [
        jax.vmap(call, (None, 0))(half, jnp.full(2, 2.0))
        for call in (lambda a, b: planner.contract("i, -> i", a, b), lambda a, b: jnp.einsum("i,->i", a, b))
    ]
    assert batches[0].dtype == batches[1].dtype
    assert jit(lambda a: planner.contract("i, -> i", a, jnp.asarray(3.0)))(half).dtype == "float16"


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128", float])
def test_a_64_bit_computation_needs_the_setting(dtype):
    x = jnp.arange(3)
    for wrap in (lambda f: f, jit):
        with pytest.raises(planner.PlannerError, match="jax_enable_x64") as caught:
            wrap(lambda x: planner.contract("i, i -> i", x, x, dtype=dtype))(x)
        assert "float32" in str(caught.value) or "int32" in str(caught.value) or "complex64" in str(caught.value)
    with jax.enable_x64(True):
        got = planner.contract("i, i -> i", x, x, dtype=dtype)
        assert got.dtype == dtype
    with pytest.raises(planner.PlannerError, match="jax_enable_x64"):
        planner.contract("i, i -> i", x, x, dtype=dtype)


def test_the_setting_of_64_bits_is_part_of_what_is_cached():
    with jax.enable_x64(True):
        x = jnp.ones(3, "float64")
        assert planner.contract("i, i -> ", x, x).dtype == "float64"
    with pytest.raises(planner.PlannerError, match="jax_enable_x64"):
        planner.contract("i, i -> ", x, x)
    assert planner.contract("i, i -> ", x, x, dtype="float32").dtype == "float32"


@settings(max_examples=examples(15, 400))
@given(exact_problems(max_size=3, max_axes=4))
def test_every_plan_gives_the_same_values(problem):
    operands, indices = arrays_of(problem), indices_of(problem)
    plan = planner.plan(problem.spec, *operands, **problem.arguments(), backend="jax")
    for other in (plan, *(alternative.plan for alternative in plan.alternatives(3))):
        got = jit(lambda xs, qs, other=other: other(*xs, **qs))(operands, indices)
        assert_equal(described(got), problem.expected(), "float32", str(other))


# -- higher derivatives --------------------------------------------------------------------------


# Jitted, each of the dozen functions that a check derives is compiled.
@pytest.mark.parametrize(("most_operands", "jitted", "share"), [(3, False, 50), (2, False, 35), (2, True, 15)])
def test_second_derivatives(most_operands, jitted, share):
    from jax.test_util import check_grads

    floors = Floors()

    @settings(max_examples=examples(share, 5 * share))
    @given(
        exact_problems(
            ("float64",),
            min_operands=2, max_operands=most_operands, max_axes=3, max_size=2, max_value=2,
            without=("size zero", "size one"),
        )
    )  # fmt: skip
    def law(problem):
        wanted = problem.wanted
        assume(wanted)
        with jax.enable_x64(True):
            operands, indices, call = arrays_of(problem), indices_of(problem), call_of(problem)

            def some(*chosen):
                full = list(operands)
                for number, x in zip(wanted, chosen, strict=True):
                    full[number] = jnp.asarray(x)  # numerical derivatives come as NumPy arrays
                return call(full, indices)

            check_grads(
                jax.jit(some) if jitted else some, tuple(operands[i] for i in wanted), order=2, modes=["fwd", "rev"]
            )
        floors.note(gather=bool(problem.indices), second=problem.expected().any())

    law()
    least = examples(10, 30) / 100  # 3 of 15 were seen, where of 300 there were 120
    floors.at_least(examples(share * 9 // 10, share * 9 // 2), gather=least, second=least)


@settings(max_examples=examples(20, 500))
@given(exact_problems(slack=8, max_axes=4, max_size=3), st.booleans())
def test_jvp(problem, jitted):
    wanted = problem.wanted or list(range(len(problem.shapes)))
    tangents = tangents_of(problem, [i in wanted for i in range(len(problem.shapes))])
    operands, indices, call = arrays_of(problem), indices_of(problem), call_of(problem)

    def some(*chosen):
        full = list(operands)
        for number, x in zip(wanted, chosen, strict=True):
            full[number] = x
        return call(full, indices)

    def run(primals, tangents):
        return jax.jvp(some, primals, tangents)

    primals = tuple(operands[i] for i in wanted)
    value, tangent = (jit(run) if jitted else run)(primals, tuple(jnp.asarray(tangents[i]) for i in wanted))
    assert_equal(described(value), problem.expected(), "float32")
    assert_equal(described(tangent), directional(problem, problem.operands(), tangents), "float32", "tangent")


@settings(max_examples=examples(25, 500))
@given(exact_problems(max_axes=4, max_size=3, max_operands=3), st.sampled_from([2, 1, 3]), st.data())
def test_vmap_is_a_loop(problem, size, data):
    random = np.random.default_rng([problem.seed, 9])
    batch, in_dims, singles = [], [], [[] for _ in range(size)]
    for label, x in [*enumerate(problem.operands()), *problem.indices.items()]:
        dim = data.draw(st.sampled_from([None, *range(x.ndim + 1)]), label=f"in_dim of {label}")
        in_dims.append(dim)
        if isinstance(label, int):
            rows = [random.integers(-3, 4, x.shape).astype(x.dtype) for _ in range(size)]
        else:
            rows = [random.permutation(x.ravel()).reshape(x.shape) for _ in range(size)]
        batch.append(jnp.asarray(x if dim is None else np.stack(rows, dim)))
        for one, row in zip(singles, rows, strict=True):
            one.append(x if dim is None else row)
    assume(any(dim is not None for dim in in_dims))
    count, call = len(problem.shapes), call_of(problem)
    gout = problem.output_gradient()

    def run(*arrays):
        indices = dict(zip(problem.indices, arrays[count:], strict=True))
        return value_and_gradients(call, arrays[:count], indices, jnp.asarray(gout), range(count))

    value, gradients = jit(jax.vmap(run, in_dims))(*batch)
    for b, one in enumerate(singles):
        arguments = {**problem.arguments(), **dict(zip(problem.indices, one[count:], strict=True))}
        expected = reference(problem.spec, *one[:count], **arguments)
        assert_equal(described(value[b]), expected, "float32")
        for got, exact in zip(
            gradients, reference_gradients(problem.spec, gout, *one[:count], **arguments), strict=True
        ):
            assert_equal(described(got[b]), exact, "float32", "gradient")


# -- index modes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "size", "position", "value"), BAD_INDICES)
@pytest.mark.parametrize("within", ["call", "grad", "vmap"])
def test_a_bad_index_is_named(values, size, position, value, within):
    q = jnp.array(values)
    axes = "ab"[: q.ndim]
    place = f"'q'[{', '.join(map(str, np.atleast_1d(position)))}]"
    for spec, shape, sizes in (
        (f"q[{axes}]c -> {axes}c", (size, 2), None),
        (f"{axes}c -> q[{axes}]c", (*q.shape, 2), {"q": size}),
    ):

        def call(x, spec=spec, sizes=sizes):
            return planner.contract(spec, x, sizes=sizes, q=q).sum()

        run = {"call": call, "grad": jax.grad(call), "vmap": jax.vmap(call)}[within]
        x = jnp.ones((3, *shape) if within == "vmap" else shape)
        with pytest.raises(planner.IndexRangeError) as caught:
            run(x)
        message = str(caught.value)
        assert place in message
        assert f"is {value}," in message
        assert f"[-{size}, {size})" in message


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("size", [5, 1000])
def test_the_width_of_an_index_never_matters(dtype, size):
    with jax.enable_x64("64" in dtype):
        q = wide_index(dtype, size)
        x = np.arange(2 * size, dtype=np.float32).reshape(size, 2)
        g = np.arange(2 * q.size, dtype=np.float32).reshape(q.size, 2)
        for mode in MODES:
            for spec, operand, sizes in (("q[n]c -> nc", x, None), ("nc -> q[n]c", g, {"q": size})):
                options = {"sizes": sizes, "index_mode": mode}
                expected = reference(spec, operand, q=q.astype(np.int64), **options)

                def call(x, q, spec=spec, options=options):
                    return planner.contract(spec, x, q=q, **options)

                for run in (call, jit(call)):
                    got = run(jnp.asarray(operand), jnp.asarray(q))
                    assert_equal(described(got), expected, "float32")


def test_a_uint64_beyond_int64_is_out_of_range():
    with jax.enable_x64(True):
        q = jnp.asarray(np.array([0, 2**64 - 1, 2**63], np.uint64))
        x = jnp.array([1.0, 2.0])
        with pytest.raises(planner.IndexRangeError, match=r"\[1\] is 18446744073709551615,"):
            planner.contract("q[n] -> n", x, q=q)
        for wrap in (lambda f: f, jit):
            run = {
                mode: wrap(lambda x, q, mode=mode: planner.contract("q[n] -> n", x, q=q, index_mode=mode))
                for mode in ("drop", "clip")
            }
            assert run["drop"](x, q).tolist() == [1, 0, 0]
            assert run["clip"](x, q).tolist() == [1, 2, 2]


@pytest.mark.parametrize("matrix", [2, 32])
def test_under_jit_a_bad_row_is_nan_and_no_other(matrix):
    a = jnp.ones((6, 1, matrix))
    c = jnp.ones((3, matrix, matrix))
    q = jnp.array([0, 3, 1, -3, -4, 2])
    bad = np.array([False, True, False, False, True, False])

    def call(a, c, q):
        return planner.contract("nij, q[n]jk -> nik", a, c, q=q)

    out = np.asarray(jit(call)(a, c, q))
    assert np.isnan(out[bad]).all()
    assert (out[~bad] == matrix).all()

    def loss(a, c, q):
        return jnp.where(bad[:, None, None], 0, call(a, c, q)).sum()

    ga, gc = jit(jax.grad(loss, (0, 1)))(a, c, q)
    assert np.isnan(np.asarray(ga)[bad]).all()
    assert (np.asarray(ga)[~bad] == matrix).all()
    assert np.isnan(np.asarray(gc)).all(), "a bad index could have meant every row"


def test_under_jit_a_bad_constant_is_named():
    x, q = jnp.ones((3, 2)), jnp.array([0, 3])
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[1\] is 3"):
        jit(lambda x: planner.contract("q[n]c -> nc", x, q=q))(x)


def test_under_jit_a_bad_scatter_is_nan_in_every_target():
    q = jnp.array([0, 5])
    out = jit(lambda x, q: planner.contract("nc -> q[n]c", x, sizes={"q": 3}, q=q))(jnp.ones((2, 2)), q)
    assert np.isnan(np.asarray(out)).all()
    out = jit(lambda x, q: planner.contract("nc -> q[n]c", x, sizes={"q": 3}, q=q))(
        jnp.ones((2, 2)), jnp.array([0, -1])
    )
    assert np.asarray(out).tolist() == [[1, 1], [0, 0], [1, 1]]


def test_integers_under_jit_need_a_mode():
    x, q = jnp.arange(3), jnp.array([0, 2])
    with pytest.raises(planner.PlannerError, match="index_mode='drop' or 'clip'"):
        jit(lambda x, q: planner.contract("q[n] -> n", x, q=q))(x, q)
    assert jit(lambda x, q: planner.contract("q[n] -> n", x, q=q, index_mode="drop"))(x, q).tolist() == [0, 2]
    assert jit(lambda x: planner.contract("q[n] -> n", x, q=q))(x).tolist() == [0, 2]


@pytest.mark.parametrize("jitted", [False, True])
def test_rows_that_no_index_names_never_matter(jitted):
    c = jnp.ones((4, 2, 3)).at[1].set(jnp.nan).at[3].set(jnp.inf)
    a = jnp.ones((3, 1, 2))
    q = jnp.array([0, 2, -2])

    def call(a, c):
        return planner.contract("nij, q[n]jk -> nik", a, c, q=q)

    got = (jit(call) if jitted else call)(a, c)
    assert (got == 2).all()


@pytest.mark.parametrize("jitted", [False, True])
def test_rows_that_no_index_names_never_matter_to_gradients(jitted):
    c = jnp.ones((4, 2, 3)).at[1].set(jnp.nan).at[3].set(jnp.inf)
    a = jnp.ones((3, 1, 2))
    q = jnp.array([0, 2, -2])

    def loss(a, c):
        return planner.contract("nij, q[n]jk -> nik", a, c, q=q).sum()

    ga, gc = (jit if jitted else lambda f: f)(jax.grad(loss, (0, 1)))(a, c)
    assert (ga == 3).all()
    assert gc[:, 0, 0].tolist() == [1, 0, 2, 0]


def test_rows_that_no_index_names_never_matter_in_any_spec():
    floors = Floors()

    @settings(max_examples=examples(50, 2_000))
    @example(Problem("nj, q[n]jk -> q[n]k", ((9, 2), (4, 2, 3)), indices={"q": np.array([0, 2] * 4 + [0])}))
    @example(Problem("nj, q[n]jk, mk -> nm", ((3, 2), (4, 2, 3), (2, 3)), indices={"q": np.array([0, 2, 0])}))
    @given(exact_problems(gathers=True, index_modes=("raise", "clip"), without=("size zero",)))
    def law(problem):
        operands, unread = with_unread_nan(problem)
        call, indices = call_of(problem, minimize=pick(problem, OBJECTIVES)), indices_of(problem)
        gout, wanted = jnp.asarray(problem.output_gradient()), range(len(operands))

        def both(operands, indices, gout):
            return value_and_gradients(call, operands, indices, gout, wanted)

        run = both if problem.seed % 8 == 0 else jit(both)
        value, gradients = run([jnp.asarray(x) for x in operands], indices, gout)
        assert_equal(described(value), problem.expected(), "float32")
        for found, expected in zip(gradients, problem.expected_gradients(), strict=True):
            assert_equal(described(found), expected, "float32", "gradient")
        floors.note(unread=unread)

    law()
    floors.at_least(examples(45, 1_800), unread=0.4)


@pytest.mark.parametrize("within", ["grad", "vmap", "jvp of grad", "checkpoint", "float16"])
@pytest.mark.parametrize("lowering", ["matmul", "whole pool, then take"])
def test_rows_that_no_index_names_never_matter_within(within, lowering):
    if lowering == "matmul":
        spec, a, c, q = "nij, q[n]jk -> nik", jnp.ones((3, 1, 2)), jnp.ones((4, 2, 3)), jnp.array([0, 2, -2])
    else:
        spec, q = "bqd, b i[bqk] d -> bqk", jnp.zeros((2, 100, 60), int).at[:, ::2, ::3].set(2)
        a, c = jnp.ones((2, 100, 8)), jnp.ones((2, 40, 8))
    name = "q" if lowering == "matmul" else "i"
    dtype = "float16" if within == "float16" else "float32"
    a, clean = a.astype(dtype), c.astype(dtype)
    stand_ins = [planner.Operand(x.shape, dtype, requires_grad=True) for x in (a, clean)]
    plan = planner.plan(spec, *stand_ins, backend="jax", **{name: q})
    assert lowering in [step.choice.lowering for step in plan.steps]
    axis = 0 if lowering == "matmul" else 1

    def gradients(a, c, q):
        def call(a, c):
            return planner.contract(spec, a, c, **{name: q})

        if within == "checkpoint":
            call = jax.checkpoint(call)
        return jax.grad(lambda a, c: (call(a, c) ** 2).sum(), (0, 1))(a, c)

    def run(a, c, q):
        if within == "jvp of grad":
            return jax.jvp(lambda a, c: gradients(a, c, q), (a, c), (jnp.ones_like(a), jnp.ones_like(c)))
        if within == "vmap":
            return jax.vmap(gradients, (0, None, None))(jnp.stack([a, 2 * a]), c, q)
        return gradients(a, c, q)

    at = (slice(None),) * axis
    dirty = clean.at[*at, 1].set(jnp.nan).at[*at, 3].set(-jnp.inf)
    expected = jax.tree.leaves(run(a, clean, q))
    for wrap in (jit, lambda f: f):
        found = jax.tree.leaves(wrap(run)(a, dirty, q))
        assert all((x == y).all() for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_drop_ignores_the_other_factors(bad, jitted):
    a = jnp.ones((3, 1, 2)).at[1].set(bad)
    c = jnp.ones((2, 2, 3))
    q = jnp.array([0, 5, -1])

    def call(a, c, q):
        return planner.contract("nij, q[n]jk -> nik", a, c, q=q, index_mode="drop")

    def both(a, c, q, gout):
        result, pullback = jax.vjp(lambda a, c: call(a, c, q), a, c)
        return result, *pullback(gout)

    gout = jnp.ones((3, 1, 3)).at[1].set(bad)
    out, ga, gc = (jit(both) if jitted else both)(a, c, q, gout)
    assert out[:, 0].tolist() == [[2] * 3, [0] * 3, [0] * 3]
    assert ga[:, 0].tolist() == [[3, 3], [0, 0], [0, 0]]
    assert gc[:, 0, 0].tolist() == [1, 0]


# -- prepared indices and determinism ------------------------------------------------------------


@settings(max_examples=examples(20, 400))
@given(exact_problems(gathers=True, max_axes=4, max_size=3, max_operands=3), st.booleans())
def test_prepared_indices_give_the_same_values_and_gradients(problem, jitted):
    shapes = {name: q.shape for name, q in problem.indices.items()}
    spec = planner.resolve(problem.spec, *problem.shapes, sizes=problem.sizes, **shapes)
    sizes = {}
    for gather in spec.gathers:
        sizes.setdefault(gather.array, set()).add(gather.size)
    assume(all(len(found) == 1 for found in sizes.values()))
    prepared = {name: planner.group(q, min(sizes[name]), problem.index_mode) for name, q in indices_of(problem).items()}
    call, operands = call_of(problem), arrays_of(problem)
    gout = jnp.asarray(problem.output_gradient())

    def both(operands, prepared, gout):
        return value_and_gradients(call, operands, prepared, gout, range(len(operands)))

    value, gradients = (jit(both) if jitted else both)(operands, prepared, gout)
    assert_equal(described(value), problem.expected(), "float32")
    for found, expected in zip(gradients, problem.expected_gradients(), strict=True):
        assert_equal(described(found), expected, "float32", "gradient")


def test_a_prepared_index_refuses_another_size_or_mode():
    q = planner.group(jnp.array([0, 1]), 2)
    with pytest.raises(planner.PlannerError, match="size 2"):
        planner.contract("q[n] -> n", jnp.ones(3), q=q)
    with pytest.raises(planner.PlannerError, match="index_mode"):
        planner.contract("q[n] -> n", jnp.ones(2), q=q, index_mode="drop")


@pytest.mark.parametrize(
    ("spec", "shapes", "sizes"),
    [
        ("nc -> q[n]c", [(20_000, 8)], {"q": 7}),
        ("nij, q[n]jk -> nik", [(20_000, 1, 8), (7, 8, 8)], None),
    ],
)
def test_calls_repeat_bitwise(spec, shapes, sizes):
    random = np.random.default_rng(0)
    operands = [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]
    q = jnp.asarray(random.integers(0, 7, 20_000))

    @jax.jit
    def run(operands, q):
        def loss(operands):
            result = planner.contract(spec, *operands, sizes=sizes, q=q)
            return (result**2).sum(), result

        (_, result), gradients = jax.value_and_grad(loss, has_aux=True)(operands)
        return result, gradients

    first = jax.tree.leaves(run(operands, q))
    for _ in range(3):
        again = jax.tree.leaves(run(operands, q))
        assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))


# -- the kernels run -----------------------------------------------------------------------------


def test_the_grouped_kernels_run(monkeypatch):
    from planner.backends.jax.backend import backend
    from planner.inspect.memory import jax_temp_bytes

    calls = []
    for name in ("grouped matmul", "both grouped gradients"):
        row = backend.table.rows[name]

        def counted(*args, row=row):
            calls.append(row.name)
            return row.run(*args)

        monkeypatch.setitem(backend.table.rows, name, dataclasses.replace(row, run=counted))
    workload = WORKLOADS["seed-gathered-matmul"].resized(n=4112, q=64)  # sizes that no other test traces
    a, c = workload.operands("jax")
    q = workload.indices("jax")["q"]
    stand_ins = [planner.Operand(x.shape, "float32", requires_grad=True) for x in (a, c)]
    plan = planner.plan(workload.spec, *stand_ins, backend="jax", q=q)
    assert [step.choice.lowering for step in plan.steps] == ["grouped matmul", "both grouped gradients"]
    gout = workload.cotangent("jax")

    def run(a, c, q, gout):
        result, pullback = jax.vjp(lambda a, c: planner.contract(workload.spec, a, c, q=q), a, c)
        return result, *pullback(gout)

    out, ga, gc = jax.jit(run)(a, c, q, gout)
    assert set(calls) == {"grouped matmul", "both grouped gradients"}
    gathered = 4 * q.size * c.shape[1] * c.shape[2]
    assert jax_temp_bytes(run, a, c, q, gout) < gathered / 2
    arrays, rows = (np.asarray(a), np.asarray(c)), {"q": np.asarray(q)}
    assert_equal(described(out), reference(workload.spec, *arrays, **rows), "float32")
    expected = reference_gradients(workload.spec, np.asarray(gout), *arrays, **rows)
    assert_equal(described(ga), expected[0], "float32")
    assert_equal(described(gc), expected[1], "float32")


@settings(max_examples=examples(40, 400))
@given(
    st.lists(st.sampled_from(["batch", "left", "summed"]), min_size=2, max_size=5),
    st.sampled_from(["float32", "bfloat16", "int32", "complex64"]),
    st.integers(0, 10**6),
    st.randoms(use_true_random=False),
)
def test_what_is_multiplied_and_summed_equals_the_product(groups, dtype, seed, shuffler):
    """Vectors times matrices in any order of axes: the row runs just where XLA's product would copy."""
    from planner.backends.jax.backend import backend
    from planner.backends.jax.products import reordered
    from planner.cost.device import CPU
    from planner.program.ops import Einsum

    names = dict(zip("abcde", groups, strict=False))
    small = [e for e, group in names.items() if group != "left"]
    assume("summed" in groups)
    terms = [list(names), small, [e for e, group in names.items() if group != "summed"]]
    for term in terms:
        shuffler.shuffle(term)
    terms[:2] = shuffler.sample(terms[:2], 2)
    sizes = tuple((e, 2 + number % 3) for number, e in enumerate(names))
    op = Einsum(Spec(tuple(map(tuple, terms[:2])), tuple(terms[2]), sizes), dtype)
    choices = {choice.lowering: choice for choice in backend.table.choices(op, CPU)}
    aligned = [e for e in terms[0] if e in terms[1]] == [e for e in terms[1] if e in terms[0]]
    assert ("multiply, then sum" in choices) == (aligned and reordered(op.spec).apart > 0)
    if "multiply, then sum" in choices:
        random = np.random.default_rng(seed)
        inputs = [jnp.asarray(random.integers(-2, 3, shape), dtype) for shape in op.input_shapes]
        (one,), (other,) = (backend.table.run(name, op, inputs, {}) for name in ("matmul", "multiply, then sum"))
        assert one.dtype == other.dtype == jnp.dtype(dtype)
        assert (one == other).all()


@pytest.mark.parametrize(
    ("spec", "shapes", "copied"),
    [
        ("ijkl, mip -> jklmp", ((32, 16, 8, 8), (8, 32, 16)), 4 * 8 * 32 * 16),  # einsum copies the other operand too
        ("jklmp, mip -> ijkl", ((16, 8, 8, 8, 16), (8, 32, 16)), 4 * 8 * 32 * 16),
        ("ijkl, jklmp -> mip", ((32, 16, 8, 8), (16, 8, 8, 8, 16)), 4 * 8 * 32 * 16),
        ("bhqd, bhkd -> bhqk", ((4, 1, 64, 32), (4, 1, 64, 32)), 4 * 4 * 64 * 64),  # the result, as einsum does
        ("hbqd, hbkd -> hbqk", ((1, 4, 64, 32), (1, 4, 64, 32)), 0),
        ("ij, jz -> iz", ((512, 512), (512, 1)), 4 * 512),  # in order, so not multiplied element by element
        ("bmk, bnk -> bnm", ((4, 64, 32), (4, 64, 32)), 0),
        ("ik, jk -> ij", ((64, 32), (64, 32)), 0),
        # The other operand is copied into the memory of the result, which is copied into it last.
        ("bca, dbc -> adb", ((32, 16, 16), (2, 32, 16)), 4 * 2 * 32 * 16),
        ("bcd, b -> cd", ((64, 48, 40), (64,)), 4 * 48 * 40),  # einsum copies the first operand, 64 times that
        ("cab, ca -> b", ((48, 32, 64), (48, 32)), 4 * 48 * 32),
    ],
)
def test_xla_copies_of_a_product_what_is_predicted(spec, shapes, copied):
    from planner.inspect.memory import jax_temp_bytes

    operands = [jnp.ones(shape) for shape in shapes]
    plan = planner.plan(spec, *operands, device="cpu")
    assert [step.choice.lowering for step in plan.steps] == ["matmul"]
    assert jax_temp_bytes(lambda *xs: plan(*xs), *operands) == copied == plan.steps[0].choice.cost.scratch_bytes


@pytest.mark.parametrize(
    ("spec", "shapes", "options", "copied"),
    [
        ("ijk -> ki", ((16, 32, 64),), {}, 4 * 16 * 64),
        ("ijk -> ik", ((16, 32, 64),), {}, 0),
        ("abc -> bad", ((32, 64, 48),), {"d": 16}, 4 * 64 * 32 * 16),
        ("bdee -> de", ((16, 32, 24, 24),), {}, 4 * (16 + 1) * 32 * 24),  # the diagonals, before they are summed
        ("ba -> bab", ((64, 32),), {}, 4 * 64 * 32 * 64),
        ("ab -> aab", ((64, 32),), {}, 0),
        ("ce -> s[e]c", ((64, 2000),), {"s": 50}, 4 * 64 * 2000),
        ("ec -> s[e]c", ((2000, 64),), {"s": 50}, 0),
        ("c -> s[e]c", ((64,),), {"s": 50}, 4 * 2000 * 64),  # repeated for each row
        ("ec -> cs[e]", ((2000, 64),), {"s": 50}, 4 * 50 * 64),
    ],
)
def test_xla_copies_of_other_steps_what_is_predicted(spec, shapes, options, copied):
    """But for the index array in range, and some bytes for the counters of loops."""
    from planner.inspect.memory import jax_temp_bytes

    operands = [jnp.ones(shape) for shape in shapes]
    indices = {name: jnp.zeros(2000, jnp.int32) for name in options if f"{name}[" in spec}
    plan = planner.plan(spec, *operands, sizes=options or None, device="cpu", **indices)
    (step,) = plan.steps
    assert step.choice.cost.scratch_bytes == copied
    measured = jax_temp_bytes(lambda *xs: plan(*xs, **indices), *operands)
    assert copied <= measured <= copied + 8 * 2000 * len(indices) + 1024


def test_products_are_exported():
    """Without custom calls that `jax.export` refuses."""
    for spec, *shapes in (("aij, jk -> iak", (1, 3, 4), (4, 2)), ("bhqd, bhkd -> bhqk", (2, 1, 3, 4), (2, 1, 5, 4))):
        operands = [jnp.ones(shape) for shape in shapes]
        call = jax.jit(lambda *xs, spec=spec: planner.contract(spec, *xs))
        assert (jax.export.export(call)(*operands).call(*operands) == call(*operands)).all()


def test_products_of_nothing_are_planned_and_run():
    for spec, *shapes in (
        ("kbl,kbl->b", (2, 3, 0), (2, 3, 0)),
        ("ikj,kj->ik", (0, 2, 3), (2, 3)),
        ("jk,ijkl->il", (0, 1), (2, 0, 1, 3)),
    ):
        operands = [jnp.zeros(shape) for shape in shapes]
        result, pull = jax.vjp(lambda *xs, spec=spec: planner.contract(spec, *xs), *operands)
        assert (result == jnp.einsum(spec, *operands)).all()
        assert [x.shape for x in pull(result)] == shapes


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [("ikj, kj -> ik", ((50, 200, 10), (200, 10))), ("jk, ijkl -> il", ((20, 30), (10, 20, 30, 40)))],
)
def test_a_vector_in_the_middle_is_no_copy_in_xla(spec, shapes):
    from planner.inspect.memory import jax_temp_bytes

    operands = [jnp.ones(shape) for shape in shapes]
    plan = planner.plan(spec, *operands, device="cpu")
    assert [step.choice.lowering for step in plan.steps] == ["multiply, then sum"]
    assert jax_temp_bytes(lambda *xs: plan(*xs), *operands) == 0 == plan.steps[0].choice.cost.scratch_bytes
    assert jax_temp_bytes(lambda *xs: jnp.einsum(spec, *xs), *operands) > 4 * operands[0].size


@pytest.mark.parametrize("name", WORKLOADS)
def test_named_workloads(name):
    tiny = WORKLOADS[name].tiny()
    operands, indices, gout = tiny.operands("jax"), tiny.indices("jax"), tiny.cotangent("jax")

    def both(operands, indices, gout):
        def call(operands):
            return planner.contract(tiny.spec, *operands, **tiny.options, **indices)

        result, pullback = jax.vjp(call, operands)
        return result, pullback(gout)[0]

    arrays, rows = [np.asarray(x) for x in operands], tiny.indices("numpy")
    expected = reference_gradients(tiny.spec, np.asarray(gout), *arrays, **tiny.options, **rows)
    result, gradients = jit(both)(operands, indices, gout)
    assert_equal(described(result), reference(tiny.spec, *arrays, **tiny.options, **rows), "float32")
    for found, gradient in zip(gradients, expected, strict=True):
        assert_equal(described(found), gradient, "float32", "gradient")


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_wrapped_indices_name_rows_that_there_are(dtype):
    """Where a bad index shows as NaN the row that is read in its place is one: no read is out of bounds."""
    raw = jnp.asarray(np.array([-9, -6, -5, -1, 0, 4, 5, 100]).astype(dtype))
    found = normalised(raw, Gather("q", (), 5), "wrapped")
    expected = [4, 4, 4, 4, 0, 4, 4, 4] if dtype == "uint8" else [0, 0, 0, 4, 0, 4, 4, 4]
    assert found.tolist() == expected
