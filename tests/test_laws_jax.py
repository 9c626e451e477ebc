"""What is JAX's own: weak types, the 64-bit setting, bad indices under `jit`, what XLA copies. See `test_laws.py`."""

from functools import partial

import laws
import numpy as np
import pytest
from conftest import PROFILE, examples
from engines import Jax, of_some
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.backends.jax.index import bring_into_range
from planner.inspect.memory import jax_temp_bytes
from planner.language.spec import Gather, Spec
from planner.testing.judgement import Subject
from planner.testing.scripts import vectors_of

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from jax import export  # noqa: E402
from jax.ad_checkpoint import checkpoint_name  # noqa: E402
from jax.experimental.jet import jet2  # noqa: E402
from jax_fast import jit  # noqa: E402

from planner.backends.jax.compiled.arrangement import permuted  # noqa: E402
from planner.backends.jax.products import as_dot, join_axes, multiply_flat, multiply_permuted  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_in_a_hurry")


def test_weak_types_promote_as_jnp_einsum_does():
    """An array of a Python number takes the other operand's type; which one is weak is part of what is cached."""
    half, weak, strong = jnp.ones(3, "float16"), jnp.asarray(2.0), jnp.ones((), "float32")
    brain, integer = jnp.ones(3, "bfloat16"), jnp.asarray(2)
    vectors = [(half, weak), (half, strong), (brain, weak), (half, integer), (jnp.arange(3), weak)]

    def found(contract):
        for spec, pair in [(",->", (integer, weak)), *(("i,->i", pair) for pair in vectors)]:
            yield contract(spec, *pair)
            yield jit(partial(contract, spec))(*pair)
        call = partial(contract, "i,->i")
        yield from jax.grad(lambda a, b: call(a, b).sum(), (0, 1))(half, weak)
        yield jax.vmap(call, (None, 0))(half, jnp.full(2, 2.0))
        yield jit(lambda a: call(a, jnp.asarray(3.0)))(half)

    for got, expected in zip(found(planner.contract), found(jnp.einsum), strict=True):
        assert got.dtype == expected.dtype
        assert (got == expected).all()


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


# -- index modes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "matrix"), [(6, 32), (300, 128)])
def test_under_jit_a_bad_row_is_nan_and_no_other(rows, matrix):
    """In gradients too, but for those of the matrices: the bad index could have meant each of them.

    For the larger matrices grouped kernels run.
    """
    q = np.resize([0, 3, 1, -3, 2, -4], rows)
    bad = (q == 3) | (q == -4)

    @jit
    def found(a, c, q):
        result, pull = jax.vjp(lambda a, c: planner.contract("nij, q[n]jk -> nik", a, c, q=q), a, c)
        return result, *pull(jnp.where(bad[:, None, None], 0, jnp.ones_like(result)))

    result, to_a, to_c = found(jnp.ones((rows, 1, matrix)), jnp.ones((3, matrix, matrix)), jnp.asarray(q))
    for x in (result, to_a):
        assert jnp.isnan(x[bad]).all()
        assert (x[~bad] == matrix).all()
    assert jnp.isnan(to_c).all()


def test_under_jit_a_bad_constant_is_named():
    x, q = jnp.ones((3, 2)), jnp.array([0, 3])
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[1\] is 3"):
        jit(lambda x: planner.contract("q[n]c -> nc", x, q=q))(x)


def test_integers_under_jit_need_a_mode():
    x, q = jnp.arange(3), jnp.array([0, 2])
    with pytest.raises(planner.PlannerError, match="index_mode='drop' or 'clip'"):
        jit(lambda x, q: planner.contract("q[n] -> n", x, q=q))(x, q)
    assert jit(lambda x, q: planner.contract("q[n] -> n", x, q=q, index_mode="drop"))(x, q).tolist() == [0, 2]
    assert jit(lambda x: planner.contract("q[n] -> n", x, q=q))(x).tolist() == [0, 2]


# -- the kernels run -----------------------------------------------------------------------------


@settings(max_examples=examples(20, 400))
@given(
    st.dictionaries(st.sampled_from("abcde"), st.sampled_from(["batch", "left", "right", "summed"]), min_size=1),
    st.sampled_from(["float32", "bfloat16", "int32", "complex64", "bool"]),
    st.lists(st.integers(1, 3), min_size=5, max_size=5),
    st.lists(st.integers(0, 4), max_size=2),
    st.randoms(use_true_random=False),
)
def test_a_product_in_any_order_of_axes_is_that_of_einsum(groups, dtype, sizes, broadcast, shuffler):
    """Also of operands that have more dimensions of size 1 than the spec."""
    without = {"left": 1, "right": 0, "summed": 2}
    terms = [[e for e, group in groups.items() if without.get(group) != place] for place in range(3)]
    for term in terms:
        shuffler.shuffle(term)
    size = dict(zip("abcde", sizes, strict=True))
    spec = Spec(tuple(map(tuple, terms[:2])), tuple(terms[2]), tuple((e, size[e]) for e in groups))
    random = np.random.default_rng(sum(sizes))
    xs = [jnp.asarray(random.integers(-2, 3, [size[e] for e in term]), dtype) for term in terms[:2]]
    wide = [jnp.expand_dims(x, [place for place in set(broadcast) if place <= x.ndim][:1]) for x in xs]
    result = as_dot(spec)(*wide)
    assert result.dtype == jnp.dtype(dtype)
    text = f"{','.join(map(''.join, terms[:2]))}->{''.join(terms[2])}"
    expected = jnp.einsum(text, *xs)
    assert (result == expected).all()
    assert (multiply_flat(spec, join_axes(spec), *xs) == expected).all()
    other = permuted(spec)
    assert other is None or (multiply_permuted(spec, other, *xs) == expected).all()


COPIES = {
    "matmul": [
        ("ijkl, mip -> jklmp", ((32, 16, 8, 8), (8, 32, 16)), 4 * 32 * 16 * (64 + 8)),
        ("jklmp, mip -> ijkl", ((16, 8, 8, 8, 16), (8, 32, 16)), 4 * 32 * 16 * 64),
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
    "flat matmul": [  # for a low peak axes side by side are joined, so that einsum's copies of 1 MiB are saved
        ("ijkl, mip -> jklmp", ((64, 64, 8, 8), (8, 64, 16)), 4 * 64 * 8 * 16),
        ("jklmp, mip -> ijkl", ((64, 8, 8, 4, 16), (4, 64, 16)), 4 * 64 * 4 * 16),
        ("bij, bik -> jk", ((8, 64, 512), (8, 64, 512)), 0),
    ],
    "matmul, then permute": [  # the result, before it is permuted
        ("ki, ko -> io", ((512, 256), (512, 3)), 4 * 256 * 3),
        ("ik, ko -> oi", ((256, 512), (512, 3)), 4 * 256 * 3),
        ("bkm, bkn -> bmn", ((8, 64, 256), (8, 64, 3)), 4 * 8 * 256 * 3),
    ],
    "": [
        ("ijk -> ki", ((16, 32, 64),), 4 * 16 * 64),
        ("ijk -> ik", ((16, 32, 64),), 0),
        ("abc -> bad", ((32, 64, 48),), 4 * 64 * 32 * 16),
        ("bdee -> de", ((16, 32, 24, 24),), 4 * (16 + 1) * 32 * 24),  # the diagonals, before they are summed
        ("ba -> bab", ((64, 32),), 4 * 64 * 32 * 64),
        ("ab -> aab", ((64, 32),), 0),
        ("ce -> s[e]c", ((64, 2000),), 4 * 64 * 2000),
        ("ec -> s[e]c", ((2000, 64),), 0),
        ("c -> s[e]c", ((64,),), 4 * 2000 * 64),  # repeated for each row
        ("ec -> cs[e]", ((2000, 64),), 4 * 50 * 64),
    ],
}


@pytest.mark.parametrize(
    ("lowering", "spec", "shapes", "copied"), [(name, *row) for name, rows in COPIES.items() for row in rows]
)
def test_xla_copies_what_is_predicted(lowering, spec, shapes, copied, xla_sizes):
    """But in other steps than products some bytes for the counters of loops.

    A segment sum has its index array in range in memory, a take does not.
    """
    operands, (inputs, output) = [jnp.ones(shape) for shape in shapes], spec.split("->")
    indices = {"s": jnp.zeros(2000, jnp.int32)} if "s[" in spec else {}
    sizes = {name: size for name, size in {"d": 16, "s": 50}.items() if name in output and name not in inputs}
    least = "peak" if lowering == "flat matmul" else "time"
    plan = planner.plan(spec, *operands, sizes=sizes, device="cpu", minimize=least, **indices)
    (step,) = plan.steps
    in_range = 4 * 2000 if "s[" in output else 0
    assert step.choice.cost.scratch_bytes == copied + in_range
    assert lowering in ("", step.choice.lowering)
    measured = jax_temp_bytes(lambda *xs: plan(*xs, **indices), *operands)
    fewest = copied if jax.__version_info__ < (0, 12) else 0  # later versions of XLA need not copy
    assert fewest <= measured <= copied + (0 if lowering else in_range + 8 * 2000 * len(indices) + 1024)


def test_products_are_exported():
    """Without custom calls that `jax.export` refuses."""
    for spec, *shapes in (("aij, jk -> iak", (1, 3, 4), (4, 2)), ("bhqd, bhkd -> bhqk", (2, 1, 3, 4), (2, 1, 5, 4))):
        operands = [jnp.ones(shape) for shape in shapes]
        call = jax.jit(lambda *xs, spec=spec: planner.contract(spec, *xs))
        assert (jax.export.export(call)(*operands).call(*operands) == call(*operands)).all()


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("spec", ["nj, q[n]j -> n", "nj, q[n]j -> j", "nj, q[n]j -> r[n]j"])
def test_a_missing_row_is_nan_as_in_take(spec, jitted):
    """And the pool's gradient is that of `take`; what is multiplied by NaN gets 0, where `take` gives NaN."""
    a, c = jnp.arange(1.0, 13).reshape(6, 2), jnp.arange(6.0).reshape(3, 2)
    q, r = jnp.array([-1, -3, -4, 0, 3, 7]), jnp.array([0, 1, 1, -2, 9, 3])
    arrays, sizes = ({"q": q, "r": r}, {"r": 4}) if "r" in spec else ({"q": q}, None)

    def by_take(a, c):
        rows = jnp.take(c, q, axis=0, mode="fill", fill_value=jnp.nan)
        if "r" in spec:
            return jnp.zeros((4, 2)).at[r].add(a * rows, mode="drop")
        return jnp.einsum(spec.replace("q[n]", "n").replace(" ", ""), a, rows)

    def call(a, c):
        return planner.contract(spec, a, c, sizes=sizes, index_mode="nan", **arrays)

    (found, back), (wanted, back_by_take) = (jax.vjp(f, a, c) for f in (jax.jit(call) if jitted else call, by_take))
    np.testing.assert_array_equal(found, wanted)
    (of_a, of_c), (wanted_a, wanted_c) = back(jnp.ones_like(found)), back_by_take(jnp.ones_like(wanted))
    np.testing.assert_array_equal(of_c, wanted_c)
    np.testing.assert_array_equal(of_a, jnp.where(jnp.isnan(wanted_a), 0, wanted_a))


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_wrapped_indices_name_rows_that_there_are(dtype):
    """Where a bad index shows as NaN the row that is read in its place is one: no read is out of bounds."""
    raw = jnp.asarray(np.array([-9, -6, -5, -1, 0, 4, 5, 100]).astype(dtype))
    gather = Gather("q", (), 5)
    found = bring_into_range({gather: raw}, "raise")[gather]
    expected = [4, 4, 4, 4, 0, 4, 4, 4] if dtype == "uint8" else [0, 0, 0, 4, 0, 4, 4, 4]
    assert found.tolist() == expected


# -- transforms ----------------------------------------------------------------------------------


def checkpointed(policy, function, xs, gout, tangents):
    """The result is read again by the backward pass, so that a policy has something to decide."""

    def whole(*xs):
        return checkpoint_name(function(*xs), "result") * 1

    return pulled(jax.checkpoint(whole, policy=policy), xs, gout, tangents)


def pulled(function, xs, gout, tangents):
    result, pull = jax.vjp(function, *xs)
    return [result, *pull(gout.astype(result.dtype))]


def scanned(function, xs, gout, tangents):
    """Of two turns the second one counts."""

    def both(*xs):
        return jax.lax.scan(lambda carry, xs: (carry, function(*xs)), 0, xs)[1][1]

    result, *gradients = pulled(both, [jnp.stack([x, x]) for x in xs], gout, tangents)
    return [result, *(g[0] + g[1] for g in gradients)]


def linearized(function, xs, gout, tangents):
    result, push = jax.linearize(function, *xs)
    return [result, push(*tangents)]


def in_a_series(function, xs, gout, tangents):
    result, (tangent, _) = jet2(function, xs, [[t, x] for t, x in zip(tangents, xs, strict=True)])
    return [result, tangent]


POLICIES = jax.checkpoint_policies
# From a function, its arguments, a gradient and tangents: the result with its gradients, or with its tangent.
TRANSFORMS = {
    "linearize": linearized,
    "jet": in_a_series,
    "gradients": pulled,
    "scan": scanned,
    "checkpoint": partial(checkpointed, None),
    "dots": partial(checkpointed, POLICIES.dots_saveable),
    "dots without batch": partial(checkpointed, POLICIES.dots_with_no_batch_dims_saveable),
    "names": partial(checkpointed, POLICIES.save_only_these_names("result")),
    "offloaded": partial(checkpointed, POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")),
}
PUSHED = ("linearize", "jet")


def transformed(engine, problem):
    """Each problem in one transform; in the nightly run in all."""
    wanted, call = problem.wanted, Subject().call(problem)
    vectors = [v if n in wanted else None for n, v in enumerate(vectors_of(problem))]
    tangent = laws.directional(problem, problem.operands(), vectors)
    pushed = [("result", problem.expected(), "float32"), ("tangent", tangent, "float32")]
    given = engine.array(problem.output_gradient()), [engine.array(vectors[n]) for n in wanted]
    names, asks = list(TRANSFORMS), []
    for name in names if PROFILE == "nightly" else [laws.pick(problem, names)]:

        def run(xs, qs, gout, tangents, name=name):
            return TRANSFORMS[name](of_some(call, xs, qs, wanted), [xs[n] for n in wanted], gout, tangents)

        expected = pushed if name in PUSHED else laws.oracle(engine, problem)
        asks += laws.asked(engine, problem, run, *given, expected=expected)
    return asks


class WideJax(Jax):
    """JAX with 64-bit types enabled; the operands have 32 bits."""

    def context(self, problem):
        return jax.enable_x64(True)


@pytest.mark.parametrize(("engine", "count"), [(Jax(), 16), (WideJax(), 8)], ids=["32 bits", "64 bits"])
def test_transforms_of_specs_with_gathers(engine, count):
    drawn = laws.exact_problems(gathers=True, slack=8, **engine.smaller).filter(lambda problem: problem.wanted)
    laws.hold(engine, transformed, drawn, examples(count, 200), gather=0.9)


def exported(engine, problem):
    """Through a stored program, which is read again."""
    call, wanted, gout = Subject().call(problem), problem.wanted, engine.array(problem.output_gradient())

    def run(*given):
        described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
        program = export.export(jax.jit(partial(engine.pulled, call, wanted=wanted)))(*described)
        return export.deserialize(program.serialize()).call(*given)

    return laws.asked(engine, problem, run, gout, expected=laws.oracle(engine, problem))


def test_specs_with_gathers_are_exported():
    engine = Jax()
    drawn = laws.exact_problems(gathers=True, **engine.smaller).filter(lambda problem: problem.wanted)
    laws.hold(engine, exported, drawn, examples(8, 200), gather=0.9)


@pytest.mark.parametrize("jitted", [True, False])
def test_complex_values_are_kept_by_name(jitted):
    """JAX rounds what a checkpoint keeps and also reads, and has no such rounding for complex numbers."""

    def gradients(contract):
        def run(a, b, c):
            result, pull = jax.vjp(contract, a, b, c)
            return result, *pull(jnp.asarray(2 - 1j, result.dtype))

        given = jnp.arange(1, 3, dtype="float32"), jnp.arange(2, 4, dtype="float32"), jnp.ones((2, 2), "complex64") * 3j
        return (jax.jit(run) if jitted else run)(*given)

    q = jnp.asarray([1, 1])
    options = {"q": q, "minimize": "peak"}
    found = gradients(lambda *xs: planner.contract("q[a], a, ab -> ", *xs, **options))
    expected = gradients(lambda a, b, c: jnp.einsum("a,a,ab->", a[q], b, c))
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
