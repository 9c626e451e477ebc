"""Values between the steps of a plan may have their axes in other orders than the search gave them."""

from __future__ import annotations

import dataclasses
import operator
from functools import partial
from random import Random
from unittest import mock

import pytest
from conftest import examples
from engines import in_each
from hypothesis import given, settings
from laws import Floors, as_searched, exact_problems, judge, needing_gradients, values_and_gradients

import planner
from planner.bench.planning import MAKERS
from planner.cost.objective import step_key
from planner.program.build import Lowerer
from planner.program.tree import nodes_of
from planner.search import choose
from planner.search.refine import with_result_in_order
from planner.search.space import SearchSpace

# The product of the two largest is written in the order that the next product reads: 49.9 us for 53.9.
SPEC, SHAPES = "bag,ae,defbhc,fcd->gh", ((3, 4, 2), (4, 3), (8, 3, 2, 3, 9, 8), (2, 8, 8))

# Other orders would save time here, and need more memory.
NEED_MORE = [
    ("faed,cba,hdebf,cg->gh", ((8, 5, 3, 3), (5, 2, 5), (2, 3, 3, 2, 8), (5, 9))),
    ("heaif,ahgbic,kgbd,jc,fd,e->jk", ((9, 2, 4, 8, 9), (4, 9, 4, 4, 8, 5), (9, 4, 4, 2), (8, 5), (9, 2), (2,))),
]


def in_other_orders(plan, random):
    """The plan with orders of its values drawn anew."""
    space, tree = SearchSpace(plan.contraction), plan.tree
    for number in range(sum(1 for _ in nodes_of(tree))):
        if number and random.random() < 0.8:
            tree = with_result_in_order(tree, number, random.random() < 0.5)
    lower = Lowerer(space.choices, step_key("time"))
    return dataclasses.replace(plan, tree=tree, programs=space.programs(tree, lower))


@in_each(torch=(examples(60, 1_000), 0.4), numpy=(examples(60, 1_000), 0.4), jax=(examples(15, 300), 0.4))
def test_values_in_any_order_give_the_same_results_and_gradients(engine, sample):
    (count, share), floors = sample, Floors()
    sizes = {"min_operands": 3, "max_operands": 5, "max_axes": 5, "max_size": 3, "without": ("scalar",)}

    @settings(max_examples=count)
    @given(exact_problems(**sizes))
    def law(problem):
        operands, indices = engine.operands(problem), engine.indices(problem)
        plain = engine.plan(problem, operands, indices)
        plan = in_other_orders(plain, Random(problem.seed))
        judge(engine, partial(values_and_gradients, call=lambda xs, qs: plan(*xs, **qs)), [problem])
        assert planner.Plan.from_json(plan.to_json()) == plan
        floors.note(changed=plan.tree != plain.tree)

    law()
    floors.at_least(count * 9 // 10, changed=share)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("objective", ["time", "bytes"])
def test_plans_cost_little_more_for_it_at_most_and_some_less(objective, gradients, torch):
    draw, less = Random(5), 0
    for operands in (3, 4, 5, 6) * 2:
        spec, shapes, _ = MAKERS["dense"](operands, draw)
        given = needing_gradients(*shapes) if gradients else shapes
        cost = partial(planner.plan, spec, *given, backend="torch", device="cpu", minimize=objective)
        figure = {"time": "seconds", "bytes": "bytes_moved"}[objective]
        planner.caches().clear()
        with as_searched:
            before = getattr(cost().cost, figure)
        planner.caches().clear()
        after = getattr(cost().cost, figure)
        # A plan that costs less than 1.05 times its score is not searched for again, and autograd may run another one.
        assert after <= 1.05 * before
        less += after < 0.98 * before
    assert less >= 2, less


@pytest.mark.parametrize("objective", ["time", "bytes"])
def test_other_orders_cost_less_and_need_no_more_memory(objective, torch):
    draw, taken, plain = Random(7), [], choose.order_values

    def spied(space, best):
        found = plain(space, best)
        if found is not best:
            taken.append((best.cost, found.cost))
            late = SearchSpace(space.contraction)
            late.ends = 0.0
            assert plain(late, best) is best
            interrupted = dataclasses.replace(best, interrupted=True)
            assert plain(space, interrupted) is interrupted
        return found

    planner.caches().clear()
    with mock.patch.object(choose, "order_values", spied):
        for spec, shapes in [*[MAKERS["dense"](operands, draw)[:2] for operands in (4, 5, 6, 8) * 3], *NEED_MORE]:
            planner.plan(spec, *needing_gradients(*shapes), backend="torch", device="cpu", minimize=objective)
    planner.caches().clear()
    assert len(taken) >= 3
    for before, after in taken:
        assert after.peak_bytes <= before.peak_bytes
        assert after.retained_bytes <= before.retained_bytes
        figure = operator.attrgetter({"time": "seconds", "bytes": "bytes_moved"}[objective])
        assert figure(after) < figure(before)


def test_no_step_copies_what_another_could_have_written_in_order(torch):
    plans = [planner.plan(SPEC, *SHAPES, backend="torch", device="cpu")]
    planner.caches().clear()
    with as_searched:
        plans.append(planner.plan(SPEC, *SHAPES, backend="torch", device="cpu"))
    after, before = ([step.choice.cost.copied_bytes for step in plan.steps] for plan in plans)
    assert (after[1], before[1]) == (0, 324)
    assert plans[0].gap == 0


def test_ctrl_c_gives_the_orders_so_far(torch):
    draw = Random(7)
    spec, shapes, _ = [MAKERS["dense"](6, draw) for _ in range(8)][-1]  # of which several values have another order
    operands, calls, trees = [torch.ones(shape) for shape in shapes], [], set()
    planner.caches().clear()
    whole = planner.plan(spec, *operands)

    def plan(at):
        programs = SearchSpace.programs
        calls.clear()

        def counted(space, tree, lower):
            calls.append(tree)
            if len(calls) == at:
                raise KeyboardInterrupt
            return programs(space, tree, lower)

        planner.caches().clear()
        with mock.patch.object(SearchSpace, "programs", counted):
            return planner.plan(spec, *operands)

    assert plan(None) == whole
    for at in range(2, len(calls) + 1):
        found = plan(at)
        assert found.interrupted
        trees.add(found.tree)
    assert len(trees) > 2
