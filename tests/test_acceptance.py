"""Limits hold for what JAX makes of a plan: measured by XLA on the arrays of the call."""

import dataclasses
from random import Random

import numpy as np
import pytest
from conftest import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from laws import Floors, exact_problems

import planner
from planner.testing.measure import jax_compiled, jax_retained

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy


def measured_bytes(plan, operands, indices):
    """Peaks of both programs, each compiled by itself, as XLA plans them; the backward's with what is retained."""
    _, forward = jax_compiled(lambda xs, qs: plan(*xs, **qs), tuple(operands), indices)
    call = lambda *xs: plan(*xs, **indices)  # noqa: E731
    retained = jax_retained(call, *operands, held=(operands, indices))
    result, pull = jax.jit(lambda xs, qs: jax.vjp(lambda *ys: plan(*ys, **qs), *xs))(tuple(operands), indices)
    _, backward = jax_compiled(lambda back, gradient: back(gradient), pull, result)
    return max(forward.peak_bytes, backward.peak_bytes + retained)


def test_a_limit_holds_compiled_or_the_error_names_one_that_does():
    floors = Floors()
    shapes = {"min_operands": 2, "max_operands": 4, "max_axes": 4, "max_size": 6, "without": ("size zero", "scalar")}

    @settings(max_examples=examples(30, 400))
    @given(st.one_of(exact_problems(**shapes, gathers=True), exact_problems(**shapes)))
    def law(problem):
        operands = [jnp.asarray(x) for x in problem.operands()]
        indices = {name: jnp.asarray(q) for name, q in problem.indices.items()}
        stand_ins = [planner.Operand(x.shape, x.dtype.name, requires_grad=True) for x in operands]

        def planned(limit):
            options = problem.arguments() | {n: q.shape for n, q in problem.indices.items()}
            return planner.plan(problem.spec, *stand_ins, backend="jax", memory_limit=limit, **options)

        unlimited = planned(None)
        result_bytes = 4 * int(np.prod(problem.output_shape()))
        assume(unlimited.cost.peak_bytes >= 2 * result_bytes > 0)
        limit = Random(problem.seed).randint(result_bytes, 2 * unlimited.cost.peak_bytes)
        refused = False
        try:
            plan = planned(limit)
        except planner.PlannerLimitError as error:
            refused, limit = True, error.memory_limit
            plan = planned(limit)
        assert plan.options.memory_limit == limit
        assert plan.cost.peak_bytes <= limit
        assert measured_bytes(plan, operands, indices) <= plan.compiled_bytes <= limit
        floors.note(refused=refused, held=not refused, sliced=plan.loop is not None)

    law()
    floors.at_least(examples(30, 400), held=0.2)


def test_a_plan_that_compiles_to_more_than_it_seems_gives_way(monkeypatch):
    """Where XLA takes twice what was predicted, a plan of half the peak is taken; the error names what holds."""
    backend = planner.dispatch.load_backend("jax")
    monkeypatch.setattr(type(backend), "compiled_bytes", lambda self, plan: 2 * plan.cost.peak_bytes)
    sizes = [planner.Operand((64, 64), requires_grad=True) for _ in range(5)]

    def planned(limit, **options):
        return planner.plan("ab,bc,cd,de,ef->af", *sizes, backend="jax", memory_limit=limit, **options)

    free = planned(None)
    assert free.compiled_bytes is None
    roomy = planned(2 * free.cost.peak_bytes)
    assert (roomy.tree, roomy.proven, roomy.compiled_bytes) == (free.tree, free.proven, 2 * free.cost.peak_bytes)
    tight = planned(2 * free.cost.peak_bytes - 1)
    assert tight.cost.peak_bytes < free.cost.peak_bytes
    assert tight.compiled_bytes <= tight.options.memory_limit == 2 * free.cost.peak_bytes - 1
    assert not tight.proven
    with pytest.raises(planner.PlannerLimitError, match="compiled programs stay within memory_limit=1000") as caught:
        planned(1000)
    named = planned(caught.value.memory_limit)
    assert named.compiled_bytes == caught.value.memory_limit
    with pytest.raises(planner.PlannerLimitError):
        planned(caught.value.memory_limit - 1)


def test_the_plan_says_what_was_compiled():
    shapes = [planner.Operand((8, 8), requires_grad=True)] * 3
    plan = planner.plan("ij,jk,kl->il", *shapes, backend="jax", memory_limit="1 MB")
    assert "; compiled " in str(plan)
    assert "inside another jit unverified" in str(plan)
    assert planner.Plan.from_json(plan.to_json()) == plan
    elsewhere = planner.plan("ij,jk,kl->il", *shapes, backend="jax", memory_limit="1 MB", device="H100")
    assert elsewhere.compiled_bytes is None
    assert "limit unverified" in str(elsewhere)
    assert "compiled" not in str(dataclasses.replace(plan, options=planner.plan("i->", (2,), backend="jax").options))


def test_inside_jit_grad_and_vmap_a_limit_is_planned_with():
    x = jnp.arange(12.0).reshape(3, 4)
    y = jnp.arange(20.0).reshape(4, 5)

    def contracted(x, y):
        return planner.contract("ij,jk->ik", x, y, memory_limit="1 MB")

    assert (jax.jit(contracted)(x, y) == x @ y).all()
    assert (jax.grad(lambda x: contracted(x, y).sum())(x) == y.sum(1)).all()
    assert (jax.vmap(contracted, (0, None))(x[None], y)[0] == x @ y).all()
