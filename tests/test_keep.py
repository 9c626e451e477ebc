"""Any choice of kept values, forced upon a plan: the gradients are the oracle's, what is held is what the plan says."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from random import Random

import numpy as np
import pytest
from brute_force import every_keep
from conftest import examples, installed_frameworks
from engines import in_each
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from laws import Floors, exact_problems, judge, plan_of, values_and_gradients

import planner
from planner.cost.objective import plan_key, step_key
from planner.inspect import memory as measure
from planner.program.build import Lowerer
from planner.search.refine import is_fastest_kept, keep_inputs
from planner.search.space import PATH_STOP, Candidate, SearchSpace
from planner.testing import Problem, problems


def with_kept(plan, random):
    """The plan with its kept values drawn anew; some of them kept and some not, where there is such a choice."""
    problem = SearchSpace(plan.contraction)
    lower = Lowerer(problem.choices, step_key("time"))
    trees = list(itertools.islice(every_keep(problem, plan.tree), 256))
    plans = [dataclasses.replace(plan, tree=tree, programs=problem.programs(tree, lower)) for tree in trees]
    return random.choice([p for p in plans if p.keep == "some"] or plans)


_SIZES = {"min_operands": 3, "max_operands": 4, "max_axes": 4, "max_size": 3, "without": ("size zero", "scalar")}
# Half with index arrays for sure: such plans more often keep all, and are passed over below.
PROBLEMS = st.one_of(exact_problems(**_SIZES, gathers=True), exact_problems(**_SIZES))


@in_each(torch=(examples(60, 1_000), 0.25, 0.5), jax=(examples(15, 400), 0.2, 0.3))
def test_any_choice_of_kept_values_runs(engine, sample, jax_in_a_hurry):
    (count, some, gather), floors = sample, Floors()

    @settings(max_examples=count)
    # Rows that single numbers choose are copied, as all others are: torch's own indexing would return a view.
    @example(Problem("q[a]  q[a] a, a, a -> ", ((2, 2, 2), (2,), (2,)), indices={"q": np.zeros(1, int)}))
    @given(PROBLEMS)
    def law(problem):
        problem = dataclasses.replace(problem, requires_grad=(True,) * len(problem.shapes))
        operands, indices = engine.operands(problem), engine.indices(problem)
        plan = with_kept(engine.plan(problem, operands, indices), Random(problem.seed))
        assume(engine.name == "torch" or plan.keep != "all")

        def call(operands, indices):
            return plan(*operands, **indices)

        call(operands, indices)
        assert set(engine.held(call, operands, indices, problem.wanted)) == {plan.cost.retained_bytes}, str(plan)
        judge(engine, partial(values_and_gradients, call=call), [problem])
        floors.note(some=plan.keep == "some", gather=bool(problem.indices))

    law()
    floors.at_least(count, some=some, gather=gather)


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


def test_what_keeps_nothing_is_left_out_only_where_it_is_no_better():
    """On a device that takes no time, keeping nothing may take less memory, at equal time."""
    floors, quick = Floors(), planner.Device("quick", flop_rate=1e30, bandwidth=1e30)

    @settings(max_examples=examples(50, 800))
    @given(
        problems(min_operands=2, max_operands=4, mixed_dtypes=True),
        st.sampled_from(installed_frameworks()),
        st.sampled_from((None, quick)),
    )
    def law(problem, backend, device):
        space = SearchSpace(plan_of(problem, backend, device=device).contraction)
        key, (result, lower) = plan_key("time"), space.search("time", PATH_STOP, space.path("greedy"))
        programs = space.programs(result.tree, lower)
        candidate = Candidate(programs, result.tree, lower, False, "drawn")
        left_out = is_fastest_kept(space, candidate)
        assert not left_out or key(keep_inputs(space, candidate).cost) >= key(candidate.cost)
        floors.note(left_out=left_out and programs.kept, tried=not left_out)

    law()
    floors.at_least(50, left_out=0.08, tried=0.05)
