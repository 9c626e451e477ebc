"""In JAX on a CPU: products whose results' axes have an order into which XLA multiplies fast."""

import dataclasses
from functools import partial
from random import Random

import numpy as np
import pytest
from conftest import examples
from engines import in_each
from hypothesis import given, settings
from laws import Floors, exact_problems, judge, values_and_gradients

import planner
from planner.cost.objective import step_key
from planner.program.build import Lowerer
from planner.search.refine import inner_products, reorder_value
from planner.search.space import SearchSpace

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

PERMUTED = "matmul, then permute"


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


def test_a_value_between_two_steps_has_the_order_that_is_fast():
    """The product of the last two has few columns. In the order of the search, as in einsum, it is slow."""
    shapes = (64, 4096), (4096, 512), (512, 8)
    plan = planner.plan("ij, jk, kl -> il", *shapes, backend="jax", device="cpu")
    assert [str(step.op.spec) for step in plan.steps] == ["jk, kl -> jl", "ij, jl -> il"]
    assert "with axes reordered" in plan.origin
    assert not plan.proven
    assert plan.cost.bound <= plan.cost.seconds
    xs = [numbers(*shape) for shape in shapes]
    assert (plan(*xs) == jnp.einsum("ij, jk, kl -> il", *xs)).all()
    # Other objectives take each value in the order of the search.
    least = planner.plan("ij, jk, kl -> il", *shapes, backend="jax", device="cpu", minimize="flops")
    assert [str(step.op.spec) for step in least.steps] == ["jk, kl -> lj", "ij, lj -> il"]


def with_orders(plan, random):
    """The plan with the axes of the products that other steps read in orders drawn anew; how many have another one."""
    space, tree, changed = SearchSpace(plan.contraction), plan.tree, 0
    for path in inner_products(tree):
        node = tree
        for number in path:
            node = node.children[number]
        axes = node.op.spec.output
        order = tuple(random.sample(axes, len(axes)))
        tree, changed = reorder_value(tree, path, order), changed + (order != axes)
    lower = Lowerer(space.choices, step_key("time"))
    return dataclasses.replace(plan, tree=tree, programs=space.programs(tree, lower)), changed


@in_each(numpy=(examples(60, 1_000), 0.4, 0.3), jax=(examples(12, 200), 0.4, 0.2))
def test_a_plan_whose_values_have_other_orders_computes_the_same(engine, sample, jax_in_a_hurry):
    (count, some, gather), floors = sample, Floors()

    @settings(max_examples=count)
    @given(exact_problems(min_operands=3, max_operands=4, max_axes=5, max_size=3))
    def law(problem):
        operands, indices = engine.operands(problem), engine.indices(problem)
        plan, changed = with_orders(engine.plan(problem, operands, indices), Random(problem.seed))
        judge(engine, partial(values_and_gradients, call=lambda xs, qs: plan(*xs, **qs)), [problem])
        floors.note(some=changed, gather=bool(problem.indices))

    law()
    floors.at_least(count, some=some, gather=gather)
