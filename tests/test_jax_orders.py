"""In JAX on a CPU: products whose results' axes have an order into which XLA multiplies fast."""

import dataclasses
from functools import partial

import numpy as np
import pytest

import planner
from planner.language.parse import parse
from planner.language.spec import Spec
from planner.program.frameworks import load_backend

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from jax.experimental import sparse  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from planner.backends.jax.compiled import arrangement  # noqa: E402
from planner.backends.jax.evaluation import TABLE  # noqa: E402
from planner.backends.jax.products import as_dot, count_taken_apart  # noqa: E402
from planner.backends.jax.rows import PERMUTED  # noqa: E402
from planner.testing.reference import reference, reference_gradients  # noqa: E402

jax_backend = load_backend("jax")


def numbers(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(-2, 3, shape), dtype)


# Narrow matrices in the four ways in which both operands can lie. XLA turns each of these products round.
NARROW = [
    ("ki, ko -> io", (512, 256), (512, 3)),
    ("ki, ok -> io", (512, 256), (3, 512)),
    ("ik, ko -> oi", (256, 512), (512, 3)),
    ("bki, bko -> bio", (8, 64, 256), (8, 64, 3)),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("spec", "a", "b"), NARROW, ids=[row[0] for row in NARROW])
def test_a_narrow_product_is_computed_the_other_way_round(spec, a, b, dtype):
    """Its value and gradients are einsum's, and so is what is kept."""
    xs = numbers(*a).astype(dtype), numbers(*b).astype(dtype)
    (step,) = planner.plan(spec, *xs, device="cpu").steps
    assert step.choice.lowering == PERMUTED
    ours, theirs = partial(planner.contract, spec), partial(jnp.einsum, spec)
    (found, pull), (wanted, pull_wanted) = jax.vjp(ours, *xs), jax.vjp(theirs, *xs)
    assert (found == wanted).all()
    for cotangent in (jnp.ones_like(found), numbers(*found.shape).astype(dtype)):
        assert all((x == y).all() for x, y in zip(pull(cotangent), pull_wanted(cotangent), strict=True))
    assert sum(x.nbytes for x in jax.tree.leaves(pull)) <= sum(x.nbytes for x in jax.tree.leaves(pull_wanted))


@pytest.mark.parametrize(
    ("spec", "a", "b", "dtype"),
    [
        ("ki, ko -> oi", (512, 256), (512, 3), "float32"),  # fast as it is
        ("ik, ko -> io", (256, 512), (512, 3), "float32"),
        ("ki, ko -> io", (512, 256), (512, 3), "int32"),
        ("ki, ko -> io", (32, 16), (32, 3), "float32"),  # small
        ("ki, jk -> ij", (512, 512), (512, 512), "float32"),  # the result would be in memory twice
    ],
)
def test_other_products_are_those_of_jax(spec, a, b, dtype):
    shapes = [planner.Operand(shape, dtype) for shape in (a, b)]
    (step,) = planner.plan(spec, *shapes, backend="jax", device="cpu").steps
    assert step.choice.lowering == "matmul"


def test_a_layer_with_few_outputs_leaves_the_derivatives_of_jax_for_a_faster_gradient():
    """The gradient of its weight is a narrow product. A layer with as many outputs as inputs stays JAX's own."""
    x, small, square = numbers(512, 256), numbers(256, 10), numbers(256, 256)

    def steps(w):
        operands = [planner.Operand(y.shape, requires_grad=True) for y in (x, w)]
        return planner.plan("ni, io -> no", *operands, backend="jax", device="cpu")

    assert [step.choice.lowering for step in steps(small).steps] == ["matmul", "matmul", PERMUTED]
    assert [step.choice.lowering for step in steps(square).steps] == ["matmul"] * 3

    def loss(product, x, w):
        return (product("ni, io -> no", x, w) ** 2).sum()

    for w, own in ((small, True), (square, False)):
        ours, theirs = (jax.grad(partial(loss, f), (0, 1)) for f in (planner.contract, jnp.einsum))
        assert ("planner_step" in str(jax.make_jaxpr(ours)(x, w))) == own
        assert all((a == b).all() for a, b in zip(ours(x, w), theirs(x, w), strict=True))
    # A call that takes no gradient is JAX's own.
    call = jax.make_jaxpr(partial(planner.contract, "ni, io -> no"))(x, small)
    assert "planner_step" not in str(call)


def test_a_layer_whose_gradient_would_win_little_stays_plain():
    operands = [planner.Operand(shape, requires_grad=True) for shape in ((256, 128), (128, 24))]
    plan = planner.plan("ni, io -> no", *operands, backend="jax", device="cpu")
    steps = {step.op.spec.output: step for step in plan.steps}
    weight = steps["i", "o"]
    assert {x.lowering: x.cost.picoseconds for x in TABLE.choices(weight.op, plan.device)}.keys() == {
        "matmul",
        PERMUTED,
    }
    assert weight.choice.lowering == "matmul"


def test_gradients_of_weak_operands_are_weak_and_sums_that_come_later_stay_so():
    """Those of einsum are, whatever the size."""
    x, w = jax.lax.broadcast(1.0, (512, 256)), jax.lax.broadcast(2.0, (256, 10))
    assert jax.grad(lambda w: planner.contract("ni, io -> no", x, w).sum())(w).weak_type
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((512, 256)), NamedSharding(mesh, PartitionSpec("x")))
        w = jax.device_put(jnp.ones((256, 12)), NamedSharding(mesh, PartitionSpec(reduced={"x"})))

        def later(product):
            return jax.typeof(jax.jit(jax.grad(lambda w: product("ni, io -> no", x, w).sum()))(w))

        assert later(planner.contract) == later(jnp.einsum)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
def test_sparsify_knows_products_that_are_computed_the_other_way_round(jit):
    a, b = numbers(512, 256), numbers(512, 3)
    product = sparse.sparsify(jit(partial(planner.contract, "ki, ko -> io")))
    assert (product(sparse.BCOO.fromdense(a), b) == a.T @ b).all()


@pytest.mark.parametrize(
    ("spec", "sizes", "factors"),
    [
        ("uiwj, zuiwj -> zu", {"i": 5, "j": 5, "u": 8, "w": 8, "z": 64}, (1, 0)),
        ("zuik, zuiwk -> uw", {"i": 3, "k": 5, "u": 8, "w": 8, "z": 128}, (0, 1)),
        ("cuji, cj -> cui", {"c": 512, "i": 5, "j": 4, "u": 3}, (0, 1)),
        ("binh, tnh -> bnit", {"b": 32, "h": 8, "i": 128, "n": 4, "t": 2}, (1, 0)),  # two rows, and not two columns
        ("dnb, bidn -> dni", {"b": 64, "d": 64, "i": 16, "n": 2}, (0, 1)),  # else it sums rows one by one
        ("bnid, bijd -> bnij", {"b": 4, "d": 16, "i": 32, "j": 128, "n": 4}, (1, 0)),  # the second factor has d last
        ("khmi, imj -> ijhk", {"h": 4, "i": 64, "j": 16, "k": 8, "m": 2}, (1, 0)),  # two terms, so Eigen is not called
        ("bildk, biokl -> bold", {"b": 4, "d": 8, "i": 8, "k": 3, "l": 64, "o": 16}, (1, 0)),  # else it divides by 3
    ],
)
def test_products_are_given_to_xla_as_it_is_fast(spec, sizes, factors):
    """In the other order the same products, some with longer axes, took 1.5 to 4 times as long (AMD EPYC 7003)."""
    product = dataclasses.replace(parse(spec), sizes=tuple(sizes.items()))
    assert arrangement.factors(product) == factors
    assert arrangement.count_reordered(product).divided == 0
    xs = [numbers(*product.shape(term)) for term in product.inputs]
    assert (as_dot(product)(*xs) == jnp.einsum(spec, *xs)).all()


@pytest.mark.parametrize(("size", "divided"), [(5, 8), (12, 2), (24, 1), (16, 0)])
def test_copies_into_joined_axes_divide_by_the_size_of_the_last(size, divided):
    """As many elements share a division as the greatest power of two that divides the size."""
    product = Spec((("k", "z", "i"), ("w", "z", "k", "i")), ("w",), (("i", size), ("k", 3), ("w", 64), ("z", 7)))
    assert arrangement.count_reordered(product).divided == divided * 3 * 7 * size


@pytest.mark.parametrize(("size", "divided"), [(1000, 0), (1024, 8)])
def test_copies_that_read_along_an_axis_of_their_own_divide_nothing(size, divided):
    """But they divide for two neighbours if the size of the outer one is a power of two."""
    sizes = {"a": 9, "b": size, "c": 16}
    assert arrangement._division_time("bac", [(), ("c",), ("a", "b")], sizes | {"a": size, "b": 9}) == 0
    assert arrangement._division_time("bac", [(), ("c",), ("b", "a")], sizes) == divided * 16 * size * 9
    assert arrangement._division_time("cba", [(), ("c",), ("b", "a")], sizes) == 0  # no copy
    assert arrangement._division_time("bca", [(), ("c",), ("b", "a")], sizes) == 8 * 16 * size * 9


def test_values_have_the_orders_in_which_xla_reads_them_fast():
    """A product computes an outer product again, which takes longer if its innermost axis is short: 192 us for 119.

    A sum lies as what it adds up: 145 us for 77 (one core of an AMD EPYC 7003, JAX 0.10.2).
    """
    shapes, indices = [(2048, 16), (8, 8), (16, 8, 16), (2048, 16)], dict.fromkeys("hrt", np.arange(1024) % 8)
    spec = "h[n]i, r[n]j, ijk, t[n]k -> n"
    path = [(0, 1), (0, 2), (0, 1)]
    tucker = planner.plan(spec, *shapes, **indices, backend="jax", device="cpu", optimize=path)
    assert "ni, nj -> nji" in [str(step.op.spec) for step in tucker.steps]
    summed = planner.plan("pijk, i, j -> k", (4, 72, 36, 25), (72,), (36,), backend="jax", device="cpu")
    assert str(summed.steps[0].op.spec) == "pijk -> ijk"
    assert summed.naive_cost == summed.cost
    # Products by element read outer products as fast in any order.
    outer = planner.plan("uv, ijk, vj, uw -> uiwvk", (64, 8), (4, 3, 5), (8, 3), (64, 8), backend="jax", device="cpu")
    assert not any(str(step.op.spec).endswith("viku") for step in outer.steps)
    for plan, arrays in (tucker, indices), (summed, {}), (outer, {}):
        operands = [planner.Operand(x.shape, requires_grad=True) for x in plan.operands]
        trained = planner.plan(plan.text, *operands, **arrays, backend="jax", device="cpu")
        xs = [numbers(*x.shape) for x in plan.operands]
        wanted = reference(plan.text, *map(np.asarray, xs), **arrays)
        result, pull = jax.vjp(lambda *xs, run=trained, arrays=arrays: run(*xs, **arrays), *xs)
        weights = numbers(*wanted.shape)
        gradients = reference_gradients(plan.text, np.asarray(weights), *map(np.asarray, xs), **arrays)
        assert (plan(*xs, **arrays) == wanted).all()
        assert (result == wanted).all()
        assert all((x == y).all() for x, y in zip(pull(weights), gradients, strict=True))


def test_no_path_takes_less_than_the_bound_of_a_plan():
    """Orders of outer products make no plan cheaper than what the search has proven."""
    for spec, shapes in [
        ("cba, ec, ae -> bea", [(3, 16, 200), (40, 3), (200, 40)]),
        ("cba, bc, bad -> cdb", [(5, 2, 3), (2, 5), (2, 3, 200)]),
        ("dabc, edc, b -> bac", [(8, 8, 200, 5), (2, 8, 5), (200,)]),
    ]:
        plan_of = partial(planner.plan, spec, *shapes, backend="jax", device="cpu")
        bound = plan_of(optimize="optimal").cost.bound
        for first in ((0, 1), (0, 2), (1, 2)):
            assert plan_of(optimize=[first, (0, 1)]).cost.seconds >= bound


def test_a_value_between_two_steps_is_read_in_the_order_that_is_fast():
    """The product of the last two has few columns. XLA reads it as it is: no copy is made."""
    shapes = (64, 4096), (4096, 512), (512, 8)
    plan = planner.plan("ij, jk, kl -> il", *shapes, backend="jax", device="cpu")
    assert [step.choice.lowering for step in plan.steps] == [PERMUTED, "matmul"]
    xs = [numbers(*shape) for shape in shapes]
    assert (plan(*xs) == jnp.einsum("ij, jk, kl -> il", *xs)).all()
    assert plan.cost.peak_bytes == jax_backend.compiled_bytes(plan) == 4 * (4096 * 8 + 64 * 8)


def test_matrices_that_rows_choose_are_read_and_written_as_they_lie():
    """XLA transposes no pool as a whole: plans of both orders hold the same bytes."""
    x, y, pool, index = numbers(512, 32), numbers(512, 64), numbers(300, 32, 64), np.arange(512) % 300
    for straight, turned, others in [
        (("nj, q[n]jk -> nk", x, pool), ("nj, q[n]kj -> nk", x, pool.swapaxes(1, 2)), lambda out: out),
        (("nj, nk -> q[n]jk", x, y), ("nj, nk -> q[n]kj", x, y), lambda out: out.swapaxes(1, 2)),
    ]:
        plans = [planner.plan(*call, q=index, sizes={"q": 300}) for call in (straight, turned)]
        assert {plan.steps[-1].choice.lowering for plan in plans} <= {"grouped matmul", "grouped outer"}
        (predicted, measured), second = ((plan.cost.peak_bytes, jax_backend.compiled_bytes(plan)) for plan in plans)
        assert second == (predicted, measured)
        assert measured <= predicted <= 1.2 * measured
        assert (plans[0](*straight[1:], q=index) == others(plans[1](*turned[1:], q=index))).all()


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("q[n]kj, nj -> nk", [(300, 64, 32), (512, 32)]),  # the matrices first
        ("nj, q[n]klj -> nlk", [(512, 32), (300, 8, 8, 32)]),
        ("nij, q[n]kj -> ink", [(512, 1, 32), (300, 64, 32)]),
        ("pnj, zq[n]kj -> pnkz", [(1, 512, 32), (1, 300, 64, 32)]),
    ],
)
def test_values_and_gradients_of_matrices_whose_columns_come_first(spec, shapes):
    xs = [numbers(*shape) for shape in shapes]
    index = np.arange(512) * 7 % 300
    found = planner.contract(spec, *xs, q=index)
    assert (found == reference(spec, *map(np.asarray, xs), q=index)).all()
    weights = numbers(*found.shape)
    gradients = jax.jit(jax.grad(lambda *xs: (planner.contract(spec, *xs, q=index) * weights).sum(), argnums=(0, 1)))(
        *xs
    )
    wanted = reference_gradients(spec, np.asarray(weights), *map(np.asarray, xs), q=index)
    assert all((x == y).all() for x, y in zip(gradients, wanted, strict=True))


def test_runs_that_are_taken_beyond_one_for_each_index_are_counted():
    def apart(spec, shapes, index):
        (step,) = planner.plan(spec, *shapes, r=index, backend="jax", device="cpu").steps[:1]
        return count_taken_apart(step.op.spec)

    assert apart("r[i]d -> id", [(30, 16)], (50,)) == 0
    assert apart("bhr[i]d -> bhid", [(2, 3, 30, 16)], (50,)) == 50 * (2 * 3 - 1)
    assert apart("bhir[ij] -> bhij", [(2, 3, 5, 30)], (5, 7)) == 5 * 7 * (2 * 3 - 1)
