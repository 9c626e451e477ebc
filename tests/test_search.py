"""The search against brute force, its programs against a second count of memory, its paths against opt_einsum."""

from __future__ import annotations

import numpy as np
import pytest
from brute_force import every_order, every_tree, figure, leasts
from conftest import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import planner
from planner.device import CPU
from planner.objective import OBJECTIVES, step_key
from planner.planning import Problem
from planner.program import Lowerer
from planner.resolve import resolve_shapes

ORDERS = ("order", "backward_order")
MOST_TREES = examples(2_500, 20_000)


@st.composite
def networks(draw, most_nodes=6, sizes=(1, 2, 3, 5, 8, 13, 40), most_letters=6):
    """A spec, operands with gradient flags and index shapes: up to `most_nodes` operands and distinct gathers."""
    letters = "abcdefg"[: draw(st.integers(1, most_letters))]
    extents = {a: draw(st.sampled_from(sizes)) for a in letters}
    gathers = draw(st.integers(0, min(3, most_nodes - 1)))
    operands = draw(st.integers(max(1, 3 - gathers), most_nodes - gathers))
    brackets = [
        (
            "qps"[i],
            tuple(draw(st.lists(st.sampled_from(letters), min_size=0 if i else 1, max_size=2, unique=True))),
        )
        for i in range(gathers)
    ]
    pools = [draw(st.sampled_from(sizes)) for _ in brackets]
    entries = st.lists(st.sampled_from(letters), max_size=3, unique=draw(st.sampled_from([True, True, False])))
    terms = [list(draw(entries)) for _ in range(operands)]
    output = list(draw(entries))
    for number in range(gathers):
        places = draw(st.lists(st.integers(0, operands), min_size=1, max_size=3))
        for place in places:
            term = output if place == operands else terms[place]
            term.insert(draw(st.integers(0, len(term))), number)

    def text(term):
        return "".join(
            e if isinstance(e, str) else f"{brackets[e][0]}[{''.join(brackets[e][1])}]" for e in term
        )

    def shape(term):
        return tuple(extents[e] if isinstance(e, str) else pools[e] for e in term)

    spec = f"{','.join(map(text, terms))}->{text(output)}"
    wide = draw(st.booleans())
    given = tuple(
        planner.Operand(
            shape(term),
            draw(st.sampled_from(["float32", "float64"])) if wide else "float32",
            requires_grad=draw(st.booleans()),
        )
        for term in terms
    )
    used = "".join(map(text, [*terms, output]))
    indices = {name: tuple(extents[a] for a in axes) for name, axes in brackets if f"{name}[" in used}
    return spec, given, indices, shape(output)


def problem_of(network, backend):
    spec, operands, indices, output = network
    resolved = resolve_shapes(spec, [o.shape for o in operands], indices, output)
    dtype = "float64" if any(o.dtype == "float64" for o in operands) else "float32"
    return Problem(resolved, operands, dtype, backend, CPU)


def lowerers(problem, backend):
    if backend == "numpy":  # one row for each op: all objectives choose alike
        only = Lowerer(problem.choices, step_key("time"))
        return dict.fromkeys(OBJECTIVES, only)
    return {objective: Lowerer(problem.choices, step_key(objective)) for objective in OBJECTIVES}


def assert_least(network, backend, most_trees):
    spec, operands, indices, output = network
    problem = problem_of(network, backend)
    trees = every_tree(problem)
    assume(sum(1 for tree in trees for field in ORDERS for _ in every_order(tree, field)) <= most_trees)
    least = leasts(problem, trees, lowerers(problem, backend))
    for objective in OBJECTIVES:
        plan = planner.plan(
            spec, *operands, sizes=output, minimize=objective, optimize="optimal", backend=backend, **indices
        )
        assert plan.proven
        assert figure(plan.cost, objective) == least[objective], (objective, str(plan))


@settings(max_examples=examples(100, 1000))
@given(networks())
def test_search_finds_the_least_of_all_trees(network):
    assert_least(network, "numpy", MOST_TREES)


def assert_score_is_the_cost(network, backend):
    problem = problem_of(network, backend)
    for objective in OBJECTIVES:
        for keep in problem.keeps():
            found, lower = problem.search(objective, keep, 10**6)
            cost = problem.programs(found.tree, lower, keep).cost
            score = found.score[0] if objective == "peak" else found.score[0][0]
            if objective == "retained" and keep == "inputs":
                assert cost.retained_bytes == 0
                objective = "time"  # nothing is retained: the tie is broken by time
            assert score == figure(cost, objective), (objective, keep)


@settings(max_examples=examples(200, 2000))
@given(networks(most_nodes=5))
def test_scores_are_the_costs_of_the_programs(network):
    assert_score_is_the_cost(network, "numpy")
