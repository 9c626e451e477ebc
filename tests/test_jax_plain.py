"""Plain steps are JAX's own operations: JAX's tools treat them as those of `jnp.einsum`."""

import functools
import re

import numpy as np
import pytest

import planner

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from jax.ad_checkpoint import print_saved_residuals  # noqa: E402
from jax.experimental import jet, roofline, sparse  # noqa: E402
from jax.extend.core import jaxprs_in_params  # noqa: E402
from jax.sharding import AbstractMesh  # noqa: E402

from planner.backends.jax.compiled.arrangement import is_derived_slowly  # noqa: E402
from planner.backends.jax.evaluation import lowerer_of, plain_row  # noqa: E402
from planner.workloads import WORKLOADS  # noqa: E402


def numbers(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(-2, 3, shape), dtype)


A, B = numbers(3, 4), numbers(4, 5)
EINSUM, CONTRACT = jnp.einsum, planner.contract


def operations(function, *xs):
    """The names of the operations of a traced program, in order."""

    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for inner in jaxprs_in_params(eqn.params):
                yield from inside(inner)

    return list(inside(jax.make_jaxpr(function)(*xs).jaxpr))


# Specs, shapes, and the operations that they are.
PLAIN = [
    ("ij, jk -> ik", [(3, 4), (4, 5)], ["dot_general"]),
    ("ij, jk -> ki", [(3, 4), (4, 5)], ["dot_general"]),
    ("ibj, kbj -> ikb", [(3, 2, 4), (5, 2, 4)], ["dot_general", "transpose"]),
    ("aijk, kjbl -> ailb", [(2, 3, 4, 5), (5, 4, 2, 3)], ["dot_general", "transpose"]),
    # A dimension that is broadcast stays an axis of the product, so that JAX keeps no copy without it.
    ("bij, bjk -> bik", [(1, 3, 4), (6, 4, 5)], ["dot_general", "squeeze", "transpose"]),
    ("ij, ji -> ij", [(3, 4), (4, 3)], ["dot_general"]),
    ("i, j -> ij", [(3,), (4,)], ["dot_general"]),
    ("ijk -> ik", [(3, 4, 5)], ["reduce_sum"]),
    ("ij -> ji", [(3, 4)], ["transpose"]),
    ("ij, jk, kl -> il", [(3, 4), (4, 5), (5, 2)], ["dot_general", "dot_general"]),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize(("spec", "shapes", "wanted"), PLAIN, ids=[row[0] for row in PLAIN])
def test_plain_steps_are_operations_of_jax(spec, shapes, wanted, dtype):
    xs = [numbers(*shape).astype(dtype) for shape in shapes]
    call = functools.partial(CONTRACT, spec)
    found = operations(call, *xs)
    if dtype == "float32":
        assert found == wanted
    assert "planner_step" not in found
    result, expected = call(*xs), EINSUM(spec, *xs)
    assert result.dtype == expected.dtype
    assert (result == expected).all()
    if dtype in ("float32", "bfloat16"):
        gradients = [
            jax.grad(lambda *xs, f=f: (f(spec, *xs) ** 2).sum().astype("float32"), tuple(range(len(xs))))(*xs)
            for f in (CONTRACT, EINSUM)
        ]
        for got, known in zip(*gradients, strict=True):
            assert got.dtype == known.dtype
            if dtype == "float32":
                assert (got == known).all()


def both(function, *xs):
    """What a function gives with planner's products and with those of JAX."""
    return function(CONTRACT, *xs), function(EINSUM, *xs)


def test_a_taylor_expansion():
    def derivatives(product, a, b):
        def energy(a):
            return product("ij, jk, kl -> il", a, b, b.T).sum() + product("ij, ij -> i", a, a).sum()

        return jet.jet(energy, (a,), ((jnp.ones_like(a), a),))

    found, wanted = both(derivatives, A, B)
    assert jax.tree.map(float, found) == jax.tree.map(float, wanted)


def test_a_sparse_operand():
    def product(einsum, a, b):
        return sparse.sparsify(functools.partial(einsum, "ij, jk -> ik"))(sparse.BCOO.fromdense(a), b)

    found, wanted = both(product, A, B)
    assert (found == wanted).all()


def test_flops_of_the_roofline():
    def flops(einsum, a, b):
        count = roofline.roofline(functools.partial(einsum, "ij, jk -> ik"), mesh=AbstractMesh((), ()))
        return count(a, b)[1].flops

    assert both(flops, A, B) == (2 * 3 * 4 * 5,) * 2


POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


SEEN = [("ij, jk -> ik", A, B), ("ib, bj -> bij", A, B), ("brhp, rhp -> bhp", numbers(64, 3, 7, 32), numbers(3, 7, 32))]


@pytest.mark.parametrize(("spec", "a", "b"), SEEN, ids=[row[0] for row in SEEN])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policies_see_products(policy, spec, a, b, capsys):
    """Of the residuals that JAX prints, how many are no arguments, and their sizes. The last product is one loop."""

    def saved(einsum, a, b):
        print_saved_residuals(jax.checkpoint(lambda a, b: jnp.sin(einsum(spec, jnp.sin(a), b)), policy=policy), a, b)
        lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "argument" not in line]
        return sorted(
            sorted(re.findall(r"\d+", line)) for line in lines
        )  # einsum's product has its axes in another order

    found, wanted = both(saved, a, b)
    assert found == wanted
    assert bool(found) == (policy is POLICIES["dots"] or (policy is POLICIES["dots without batch"] and spec[1] == "j"))


def test_a_precision_context_inside_of_a_traced_function():
    def text(einsum, a, b):
        def call(a, b):
            with jax.default_matmul_precision("highest"):
                return einsum("ij, jk -> ik", a, b)

        return jax.jit(call).lower(a, b).as_text().count("HIGHEST")

    assert both(text, A, B) == (2, 2)


GATHERED = "nij, q[n]jk -> nik", [(6, 2, 3), (4, 3, 5)]


def test_a_step_whose_gradients_are_one_step_is_none_of_jax():
    """The plan computes both gradients in one loop, which no rule of JAX does."""
    spec, shapes = GATHERED
    q = jnp.array([0, 1, 3, 3, 2, 0])
    assert "planner_step" in operations(lambda a, c: CONTRACT(spec, a, c, q=q), *(numbers(*shape) for shape in shapes))


@pytest.mark.parametrize("gradients", [False, True])
def test_equal_steps_of_a_program_share_one_function(gradients):
    def functions(layers):
        def call(x, c, q):
            for _ in range(layers):
                x = jnp.tanh(CONTRACT("nj, q[n]jk -> nk", x, c, q=q))
            return x.sum()

        program = jax.grad(call, (0, 1)) if gradients else call
        return jax.jit(program).lower(numbers(6, 3), numbers(4, 3, 3), jnp.array([0, 1, 3, 3, 2, 0])).as_text()

    few, many = functions(2), functions(8)
    assert many.count("func.func") == few.count("func.func")
    assert len(many) < 2.3 * len(few)  # of four times the layers; JAX 0.11 writes 2.01 to 2.13 times the text


# Of this product XLA copies the first operand, 1 MiB, unless three of its axes are joined.
JOINED = "ijkl, mip -> jklmp", [(64, 64, 8, 8), (8, 64, 16)]


def temp_bytes(function, *xs):
    return jax.jit(function).lower(*xs).compile().memory_analysis().temp_size_in_bytes


def test_for_a_low_peak_axes_are_joined_where_xla_would_copy_a_mebibyte(xla_sizes):
    spec, shapes = JOINED
    xs, lean = [numbers(*shape) for shape in shapes], functools.partial(CONTRACT, minimize="peak")
    copied, joined = (temp_bytes(functools.partial(einsum, spec), *xs) for einsum in (EINSUM, lean))
    assert joined < 2**17 < 2**20 <= copied

    def loss(einsum, *xs):
        return (einsum(spec, *xs) ** 2).sum()

    gradients = [jax.grad(functools.partial(loss, einsum), (0, 1)) for einsum in (lean, EINSUM)]
    for found, wanted in zip(*(gradient(*xs) for gradient in gradients), strict=True):
        assert (found == wanted).all()
    joined, copied = (temp_bytes(gradient, *xs) for gradient in gradients)
    assert joined + 2**20 <= copied


# Products of few terms in each sum: XLA would copy operands into matrices, or call a function for each matrix.
FEW_TERMS = [
    ("brhp, rhp -> bhp", (64, 3, 7, 32), (3, 7, 32)),
    ("zuv, zui -> zvi", (128, 8, 8), (128, 8, 3)),
    ("bij, bnj -> bni", (16, 3, 3), (16, 256, 3)),
    ("ij, njk -> nik", (8, 2), (512, 2, 16)),
    ("ij, uj -> ui", (3, 3), (4096, 3)),  # points by one small matrix
    ("hwc, cd -> hwd", (64, 64, 8), (8, 7)),
    ("bnj, bij -> bni", (2, 2048, 3), (2, 4, 3)),
]


@pytest.mark.parametrize(
    ("spec", "a", "b"),
    [
        ("brn, brd -> bnd", (32, 2, 128), (32, 2, 32)),
        ("vik, ui -> uvk", (64, 3, 7), (256, 3)),
        ("bhij, bhjwd -> bhiwd", (16, 4, 4, 4), (16, 4, 4, 16, 16)),  # few rows, and many columns
    ],
)
def test_large_products_of_few_terms_are_those_of_jax(spec, a, b):
    """Many of two terms, a single one, and many of few rows."""
    (step,) = planner.plan(spec, numbers(*a), numbers(*b), device="cpu").steps
    assert step.choice.lowering == "matmul"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize(("spec", "a", "b"), FEW_TERMS, ids=[row[0] for row in FEW_TERMS])
def test_sums_of_few_terms_are_one_loop(spec, a, b, dtype):
    """It keeps the operands, as einsum does, and XLA copies none."""
    xs = numbers(*a).astype(dtype), numbers(*b).astype(dtype)
    ours, theirs = (functools.partial(einsum, spec) for einsum in (CONTRACT, EINSUM))
    (step,) = planner.plan(spec, *xs).steps
    assert step.choice.lowering == "multiply and add"
    assert temp_bytes(ours, *xs) <= (0 if dtype == "float32" else temp_bytes(theirs, *xs))
    (found, pull), (wanted, pull_wanted) = jax.vjp(ours, *xs), jax.vjp(theirs, *xs)
    assert (found == wanted).all()
    ones = jnp.ones_like(found)
    assert all((x == y).all() for x, y in zip(pull(ones), pull_wanted(ones), strict=True))
    assert sum(x.nbytes for x in jax.tree.leaves(pull)) <= sum(x.nbytes for x in jax.tree.leaves(pull_wanted))


def test_a_linear_layer_and_its_gradients_stay_plain():
    """The gradient of the weight would join axes if it were a product by itself: XLA copies 1 MiB for it."""
    x, w, lean = numbers(8, 64, 512), numbers(512, 512), functools.partial(CONTRACT, minimize="peak")
    layer = functools.partial(lean, "bij, kj -> bik")
    found = operations(jax.grad(lambda x, w: (layer(x, w) ** 2).sum(), (0, 1)), x, w)
    assert found.count("dot_general") == 3
    assert "planner_step" not in found
    plan = planner.plan(
        "bij, kj -> bik",
        *(planner.Operand(y.shape, requires_grad=True) for y in (x, w)),
        backend="jax",
        minimize="peak",
    )
    assert [step.choice.lowering for step in plan.steps] == ["matmul"] * 3
    assert "planner_step" in operations(functools.partial(lean, "bij, bik -> jk"), x, layer(x, w))


# Products of which JAX derives a gradient with copies, or slowly: XLA would reorder an operand, or multiply by Eigen.
DERIVED = [
    ("ijkl, mip -> jklmp", (16, 8, 8, 16), (4, 16, 16)),
    ("bnd, de -> bne", (8, 64, 64), (64, 256)),
    ("bhqk, bhkd -> bqhd", (4, 8, 64, 64), (4, 8, 64, 64)),
    ("ij, jab -> iab", (16, 256), (256, 16, 16)),
    ("sec, sm -> ecm", (64, 4, 64), (64, 128)),
]


@pytest.mark.parametrize(("spec", "a", "b"), DERIVED, ids=[row[0] for row in DERIVED])
def test_gradients_that_jax_derives_slowly_are_steps_of_ours(spec, a, b, xla_sizes):
    """They are equal, need no more memory, and keep the operands, as einsum does."""
    xs, ours, theirs = (numbers(*a), numbers(*b)), functools.partial(CONTRACT, spec), functools.partial(EINSUM, spec)
    (found, pull), (wanted, pull_wanted) = jax.vjp(ours, *xs), jax.vjp(theirs, *xs)
    assert (found == wanted).all()
    cotangent = numbers(*found.shape)
    assert all((x == y).all() for x, y in zip(pull(cotangent), pull_wanted(cotangent), strict=True))
    assert sum(x.nbytes for x in jax.tree.leaves(pull)) <= sum(x.nbytes for x in jax.tree.leaves(pull_wanted))

    def value_and_gradients(product, *xs):
        value, pull = jax.vjp(product, *xs[:-1])
        return value, pull(xs[-1])

    mine, native = (functools.partial(value_and_gradients, product) for product in (ours, theirs))
    mine_bytes, native_bytes = (temp_bytes(each, *xs, cotangent) for each in (mine, native))
    if spec == DERIVED[2][0]:  # it takes less time only
        assert mine_bytes == native_bytes
    else:
        assert mine_bytes < native_bytes
    assert "planner_step" in operations(mine, *xs, cotangent)
    plan = planner.plan(spec, *(planner.Operand(x.shape, requires_grad=True) for x in xs), backend="jax")
    assert {step.choice.lowering for step in plan.steps} == {"matmul"}


def test_gradients_on_a_card_are_those_of_jax():
    """What XLA copies on a CPU says nothing of a card."""
    spec, a, b = DERIVED[0]
    operands = [planner.Operand(shape, requires_grad=True) for shape in (a, b)]
    plans = [planner.plan(spec, *operands, backend="jax", device=device) for device in ("cpu", "h100")]
    rows = [plain_row(plan.steps[0].op, lowerer_of(plan)) for plan in plans]
    assert rows == [None, "matmul"]


def test_gradients_of_weak_operands_are_those_of_jax():
    """They are weak, as those of einsum are."""
    spec, a, b = DERIVED[1]
    x, w = numbers(*a), jnp.full(b, 2.0)
    assert w.weak_type
    gradients = [jax.grad(lambda x, w, f=f: f(spec, x, w).sum(), (0, 1))(x, w) for f in (CONTRACT, EINSUM)]
    assert [(y.weak_type, y.dtype) for y in gradients[0]] == [(y.weak_type, y.dtype) for y in gradients[1]]
    assert all((y == z).all() for y, z in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("spec", "a", "b", "operands", "slowly"),
    [
        ("bnd, de -> bne", (8, 64, 64), (64, 256), (1,), True),  # JAX has bnd copied
        ("bnd, de -> bne", (8, 64, 64), (64, 256), (0,), False),  # nothing is copied for this gradient
        ("bnd, de -> bne", (2, 4, 4), (4, 4), (0, 1), False),  # too few elements
        ("ij, jk -> ik", (512, 64), (64, 256), (0, 1), False),  # nothing is copied
        ("abk, kc -> bac", (16, 16, 4), (4, 256), (0,), True),  # JAX has the result's gradient copied
        ("vu, zui -> zvi", (16, 32), (1024, 32, 5), (0, 1), False),  # faster by the divisions alone
        ("dce, cb -> bde", (8, 32, 8), (32, 8), (1,), False),  # faster, with more copies
        ("ecb, acb -> bea", (4, 2, 8), (4, 2, 8), (1,), True),  # faster, with as many copies
        ("ecd, ea -> dca", (8, 4, 8), (8, 64), (1,), False),  # the product needs the same copy
    ],
)
def test_which_gradients_jax_derives_slowly(spec, a, b, operands, slowly):
    assert is_derived_slowly(planner.resolve(spec, a, b), operands) is slowly


def test_one_gradient_that_jax_derives_fast_is_its_own():
    """Of the same product, the gradient of the other operand is derived slowly."""
    spec, a, b = DERIVED[1]
    for takes in ((True, False), (False, True)):
        operands = [planner.Operand(x, requires_grad=t) for x, t in zip((a, b), takes, strict=True)]
        plan, number = planner.plan(spec, *operands, backend="jax"), takes.index(True)
        found = operations(jax.grad(lambda *xs, plan=plan: plan(*xs).sum(), number), numbers(*a), numbers(*b))
        assert ("planner_step" in found) is takes[1]


CONTEXTS = {
    "jvp": lambda f, a, b: jax.jvp(f, (a, b), (jnp.ones_like(a), jnp.ones_like(b))),
    "gradient of a gradient": lambda f, a, b: jax.grad(
        lambda a: (jax.grad(lambda b: (f(a, b) ** 2).sum())(b) ** 2).sum()
    )(a),
    "gradients of a batch": lambda f, a, b: jax.vmap(jax.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1)), (0, None))(
        jnp.stack([a, -a]), b
    ),
    "checkpoint": lambda f, a, b: jax.jit(jax.grad(jax.checkpoint(lambda a, b: (f(a, b) ** 2).sum()), (0, 1)))(a, b),
    "scan": lambda f, a, b: jax.grad(
        lambda b: jax.lax.scan(lambda total, a: (total + (f(a, b) ** 2).sum(), None), 0.0, jnp.stack([a, a]))[0]
    )(b),
    "bfloat16": lambda f, a, b: jax.grad(lambda a, b: f(a, b).astype("float32").sum(), (0, 1))(
        a.astype("bfloat16"), b.astype("bfloat16")
    ),
    "an inner jit": lambda f, a, b: jax.grad(jax.jit(lambda a, b: (f(a, b) ** 2).sum()), (0, 1))(a, b),
    "one gradient outside of jit": lambda f, a, b: jax.grad(lambda b: f(a, b).sum())(b),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_contexts_of_products_whose_gradients_are_steps_of_ours(context):
    spec, a, b = DERIVED[1]
    ours = functools.partial(CONTRACT, spec)
    found = operations(functools.partial(context, ours), numbers(*a), numbers(*b))
    assert "planner_step" in found
    assert "dot_general" not in found
    found, wanted = both(lambda einsum, a, b: context(functools.partial(einsum, spec), a, b), numbers(*a), numbers(*b))
    for got, known in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert got.dtype == known.dtype
        assert (got == known).all()


def test_slices_of_a_product_of_joined_axes_are_priced():
    """The slices of an operand lie in memory with its strides. Those of joined axes are others."""
    workload = WORKLOADS["equivariant"]
    operands = [planner.Operand(shape, requires_grad=True) for shape in workload.shapes]
    plan = planner.plan(workload.spec, *operands, **workload.index_shapes, backend="jax", device="cpu")
    assert plan.cost.backward.flops > 0
