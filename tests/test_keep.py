"""Any choice of kept values, forced upon a plan: the gradients are the oracle's, what is held is what the plan says."""

from __future__ import annotations

import dataclasses
import itertools
from random import Random

import numpy as np
import pytest
from brute_force import every_keep
from conftest import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from laws import Floors, exact_problems

import planner
from planner.cost.objective import step_key
from planner.inspect import memory as measure
from planner.program.build import Lowerer
from planner.search.space import SearchSpace


def with_kept(plan, random):
    """The plan with its kept values drawn anew; some of them kept and some not, where there is such a choice."""
    problem = SearchSpace(plan.contraction)
    lower = Lowerer(problem.choices, step_key("time"))
    trees = list(itertools.islice(every_keep(problem, plan.tree), 256))
    plans = [dataclasses.replace(plan, tree=tree, programs=problem.programs(tree, lower)) for tree in trees]
    return random.choice([p for p in plans if p.keep == "some"] or plans)


def drawn(problem, backend):
    """A plan of a drawn problem with kept values at random, for operands that all need gradients."""
    stand_ins = [planner.Operand(x.shape, x.dtype.name, requires_grad=True) for x in problem.operands()]
    indices = {name: q.shape for name, q in problem.indices.items()}
    options = problem.arguments() | indices
    plan = planner.plan(problem.spec, *stand_ins, backend=backend, **options)
    return with_kept(plan, Random(problem.seed))


_SIZES = {"min_operands": 3, "max_operands": 4, "max_axes": 4, "max_size": 3, "without": ("size zero", "scalar")}
# Half with index arrays for sure: such plans more often keep all, and are passed over below.
PROBLEMS = st.one_of(exact_problems(**_SIZES, gathers=True), exact_problems(**_SIZES))


def test_torch_runs_any_choice_of_kept_values(torch):
    floors = Floors()

    @settings(max_examples=examples(100, 1_000))
    @given(PROBLEMS)
    def law(problem):
        plan = drawn(problem, "torch")
        operands = [torch.from_numpy(x).requires_grad_() for x in problem.operands()]
        indices = {n: torch.from_numpy(q) for n, q in problem.indices.items()}

        def call():
            return plan(*operands, **indices)

        call()
        result, measured = measure.torch_memory(call)
        assert measured.retained_bytes == plan.cost.retained_bytes, str(plan)
        assert measure.saved_tensor_bytes(call, [*operands, *indices.values()]) == plan.cost.retained_bytes
        assert (result.detach().numpy() == problem.expected()).all()
        gradients = torch.autograd.grad(result, operands, torch.from_numpy(problem.output_gradient()))
        for found, expected in zip(gradients, problem.expected_gradients(), strict=True):
            assert (found.numpy() == expected).all(), str(plan)
        floors.note(some=plan.keep == "some", gather=bool(problem.indices))

    law()
    floors.at_least(examples(100, 1_000), some=0.25, gather=0.5)


def test_jax_runs_any_choice_of_kept_values(jax):
    floors = Floors()

    @settings(max_examples=examples(25, 400))
    @given(PROBLEMS)
    def law(problem):
        plan = drawn(problem, "jax")
        assume(plan.keep != "all")
        operands = [jax.numpy.asarray(x) for x in problem.operands()]
        indices = {n: jax.numpy.asarray(q) for n, q in problem.indices.items()}

        def call(*xs):
            return plan(*xs, **indices)

        held = measure.jax_retained(call, *operands, held=(operands, indices))
        assert held == plan.cost.retained_bytes, str(plan)
        result, pull = jax.vjp(call, *operands)
        assert (np.asarray(result) == problem.expected()).all()
        gradients = pull(jax.numpy.asarray(problem.output_gradient()))
        for found, expected in zip(gradients, problem.expected_gradients(), strict=True):
            assert (np.asarray(found) == expected).all(), str(plan)
        floors.note(some=plan.keep == "some", gather=bool(problem.indices))

    law()
    floors.at_least(examples(25, 400), some=0.2, gather=0.3)


@pytest.mark.parametrize("seed", range(6))
def test_torch_backward_peak_of_a_chain(seed, torch):
    random = Random(seed)
    sizes = [random.choice([64, 96, 128, 256]) for _ in range(8)]
    operands = [torch.ones(shape).requires_grad_() for shape in itertools.pairwise(sizes)]
    plan = with_kept(planner.plan("ab,bc,cd,de,ef,fg,gh->ah", *operands), random)
    assert plan.keep == "some"
    plan(*operands).sum().backward()
    _, measured = measure.torch_backward_memory(lambda: plan(*operands), operands)
    assert 0.75 <= measured.peak_bytes / plan.cost.backward.peak_bytes <= 1.25


def test_a_limit_between_nothing_and_all_keeps_some():
    operands = [planner.Operand((16, 16), requires_grad=True)] * 8
    spec = "ab,bc,cd,de,ef,fg,gh,hi->ai"
    whole = planner.plan(spec, *operands, backend="numpy")
    limit = whole.cost.retained_bytes // 2
    plan = planner.plan(spec, *operands, retain_limit=limit, backend="numpy")
    assert plan.keep == "some"
    assert 0 < plan.cost.retained_bytes <= limit
    assert "keeps 3 intermediates, computes 3 steps again" in str(plan)
    assert str(plan).count("computed again") == 3
    assert planner.Plan.from_json(plan.to_json()) == plan
