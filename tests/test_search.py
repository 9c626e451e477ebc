"""The search against brute force, its programs against a second count of memory, its paths against opt_einsum."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import types
from functools import partial
from operator import attrgetter
from random import Random
from unittest import mock

import numpy as np
import opt_einsum
import pytest
from brute_force import every_keep, every_order, every_tree, figure, least, ops, price, price_all
from conftest import examples, installed_frameworks
from hypothesis import assume, example, given, reject, settings
from hypothesis import strategies as st
from laws import Floors, as_searched, plan_of, stand_ins

import planner
from planner.bench.planning import MAKERS, gathers
from planner.cost.device import CPU
from planner.cost.figures import StepCost
from planner.cost.limits import Limits
from planner.cost.objective import OBJECTIVES, step_key
from planner.language.dtypes import itemsize
from planner.language.errors import SearchLimitError
from planner.language.options import Options
from planner.language.resolve import resolve_shapes
from planner.language.spec import unused_letters
from planner.program import build
from planner.program.build import Lowerer
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.program import live_bytes
from planner.program.tree import Leaf
from planner.search.exact.dynamic import PartialPlan, Peaks, Search
from planner.search.exact.lazy import LazySearch
from planner.search.exact.network import Network
from planner.search.exact.sizes import sizes_of
from planner.search.exact.vectors import VectorListing
from planner.search.many import searches
from planner.search.naive import naive_plan
from planner.search.paths import splits_of
from planner.search.space import ADDITIVE, OPTIMAL, PATH_STOP, SearchSpace
from planner.testing import Problem, problems
from planner.testing.reference import reference


@pytest.fixture(autouse=True, scope="module")
def _no_guards():
    """The laws here are those of the search, which does not know what guards need."""
    with mock.patch.object(build, "live_bytes", lambda *given: live_bytes(*given[:5])):
        yield


MOST_TREES = examples(600, 20_000)  # that a random network may have, orders of evaluation included


def networks(most_nodes=5, least_nodes=3, **options):
    """Problems of so many operands and distinct gathers together, which are the nodes of a search."""
    options = {"max_size": 13, "dtypes": ("float32", "float32", "float64"), "strided": False, **options}
    drawn = problems(max_operands=most_nodes, mixed_dtypes=True, **options)
    return drawn.filter(lambda case: least_nodes <= nodes_of(case) <= most_nodes)


def nodes_of(case):
    return len(case.shapes) + len(set(case.resolved().gathers))


# Brute force knows trees and what they keep; a loop over slices may do what none of them does.
plan_without_loops = mock.patch("planner.search.choose.loop_candidates", mock.Mock(return_value=()))(plan_of)


def space_of(case, backend="numpy", dtype=None):
    operands, given = stand_ins(case)
    resolved = resolve_shapes(case.spec, case.shapes, {name: q.shape for name, q in case.indices.items()}, case.sizes)
    dtype = dtype or np.result_type(*case.dtypes).name
    return RowMajor(Contraction(case.spec, resolved, (), tuple(operands), dtype, "raise", backend, CPU, Options()))


class RowMajor(SearchSpace):
    """A problem whose values are all row-major, as the search takes them to be."""

    def choices(self, op, key=None):
        return [dataclasses.replace(choice, layouts=()) for choice in super().choices(op, key)]


def lowerers(problem, backend):
    if backend == "numpy":  # one row for each op: all objectives choose alike
        only = Lowerer(problem.choices, step_key("time"))
        return dict.fromkeys(OBJECTIVES, only)
    return {objective: Lowerer(problem.choices, step_key(objective)) for objective in OBJECTIVES}


# That a plan is as lean as einsum counts more than its time; `test_plans_are_as_lean_as_einsum` looks at that.
@mock.patch("planner.search.choose.no_worse_than_einsum", lambda plan, loops, search: plan)
@as_searched
def assert_least(case, backend, most_trees, dtype=None):
    problem = space_of(case, backend, dtype)
    chosen, trees = lowerers(problem, backend), every_tree(problem, most_trees)
    priced = {lower: price_all(problem, trees, lower, most_trees) for lower in set(chosen.values())}
    for objective, lower in chosen.items():
        plan = plan_of(case, backend, minimize=objective, optimize="optimal", dtype=dtype)
        assert plan.proven or not plan.programs.row_major
        cost = problem.programs(plan.tree, lower).cost
        fewest = least(priced[lower], objective)
        if plan.proven or figure(cost, objective) == fewest:
            assert figure(cost, objective) == fewest, (objective, str(plan))
        else:  # as values really lie, the least of row-major ones costs no less than the plan
            as_they_lie = SearchSpace(plan.contraction)
            real = lowerers(as_they_lie, backend)[objective]
            alike = [p.tree for p in priced[lower] if least([p], objective) == fewest]
            costs = [figure(as_they_lie.programs(tree, real).cost, objective) for tree in alike]
            assert figure(plan.cost, objective) <= max(costs), (objective, str(plan))
        assert figure(plan.cost, objective) <= figure(cost, objective) or not plan.proven
        assert_bounded(plan, objective, figure(cost, objective))


def assert_bounded(plan, objective, least_figure):
    """The bound is never above the least of all trees, and above 0 where that is; a plan knows its gap."""
    bound = plan.cost.bound * (1e12 if objective == "time" else 1)
    assert 0 <= bound <= least_figure * (1 + 1e-12)
    assert bound > 0 or not least_figure or objective in ("peak", "retained"), (objective, str(plan))
    assert plan.gap >= 0
    assert plan.gap == 0 or not plan.proven


ROWS = np.zeros(6, int)


@pytest.mark.parametrize("backend", installed_frameworks())
def test_plans_are_as_lean_as_einsum(backend):
    """Of up to five operands, from 64 KiB on; the least time alone would retain more."""
    draw, slower = Random(3), 0
    for _ in range(12):
        spec, shapes, _ = MAKERS["dense"](draw.choice((3, 4)), draw)
        operands = [planner.Operand([4 * n for n in shape], requires_grad=True) for shape in shapes]
        plan = planner.plan(spec, *operands, backend=backend)
        assert plan.cost.retained_bytes <= max(2**16, naive_plan(plan.contraction, as_run=True).cost.retained_bytes)
        slower += "as lean as einsum" in plan.origin
    assert slower or backend == "torch"  # there the fastest of these are lean


SPECIAL_CASES = [
    Problem("ab,bc,cd,de,ea->ad", ((3, 8), (8, 2), (2, 5), (5, 13), (13, 3))),
    Problem("q[n]ab,bc,cd,p[n]d->na", ((9, 4, 3), (3, 8), (8, 5), (7, 5)), indices={"q": ROWS, "p": ROWS}),
    Problem("aa->aa", ((3, 3),)),
    # The least time retains more than einsum does.
    Problem(
        "cba, d...b, c...db, d",
        ((8, 12, 2), (7, 8, 12), (8, 8, 7, 12), (7,)),
        dtypes=("float32", "float32", "float32", "float64"),
    ),
    Problem("q[n]a,p[n]b,ab->s[n]", ((9, 4), (7, 3), (4, 3)), {"s": 5}, {name: ROWS for name in "qps"}),
]


@pytest.mark.parametrize(
    ("backend", "count", "most_trees"),
    [("numpy", examples(100, 1000), MOST_TREES), ("torch", examples(20, 300), MOST_TREES // 3)],
)
def test_search_finds_the_least_of_all_trees(backend, count, most_trees):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    floors = Floors()

    @settings(max_examples=count)
    @given(networks())
    def law(case):
        assert_least(case, backend, most_trees)
        floors.note(four=nodes_of(case) >= 4, five=nodes_of(case) >= 5)

    law()
    floors.at_least(count * 9 // 10, four=0.15, five=0.01 if backend == "numpy" else 0)
    for case in SPECIAL_CASES if backend == "numpy" else ():
        assert_least(case, backend, 10**6)


@settings(max_examples=examples(15, 300))
@given(networks(4, 1))
def test_search_finds_the_least_of_all_trees_with_casts_after_takes_and_sums(case):
    """Casts to a smaller dtype may come last."""
    assert_least(case, "numpy", MOST_TREES, "float16")


@settings(max_examples=examples(8, 120))
@given(networks(6, 6, min_operands=5, max_axes=5), st.booleans())
def test_search_finds_the_least_of_all_trees_of_six_nodes(case, needs):
    """Of every tree, with all values kept, which additive objectives cannot better; the peak without gradients."""
    problem = space_of(dataclasses.replace(case, requires_grad=(needs,) * len(case.shapes)))
    lower = Lowerer(problem.choices, step_key("time"))
    trees = every_tree(problem, 4_000)
    assert len(trees) >= (105 if case.indices else 945)  # ways to contract five or six operands pairwise
    costs = [problem.programs(tree, lower).cost for tree in trees]
    for objective in ("time", "flops", "bytes"):
        along_path, _ = problem.search(objective, PATH_STOP, problem.path("greedy"))
        for known, stage_splits in ((None, 10**9), (along_path, 1)):
            with mock.patch("planner.search.exact.gathered.STAGE_SPLITS", stage_splits):
                found, _ = problem.search(objective, OPTIMAL, known=known)
            least = min(figure(cost, objective) for cost in costs)
            assert found.exact
            assert figure(problem.programs(found.tree, lower).cost, objective) == least
    if not needs:
        found, _ = problem.search("peak", OPTIMAL)
        orders = (ordered for tree in trees for ordered in every_order(tree, "order"))
        least_peak = min(problem.programs(tree, lower).cost.peak_bytes for tree in orders)
        assert problem.programs(found.tree, lower).cost.peak_bytes == least_peak


@pytest.mark.parametrize("objective", ["time", "flops", "bytes", "peak"])
@pytest.mark.parametrize(
    "spec",
    [
        ",".join("a" + x for x in "bcdefghijk") + "->bc",
        ",".join("ab" + x for x in "cdefghijkl") + "->acd",
        ",".join("abcdefghij"[i] + "abcdefg"[(3 * i + 1) % 7] for i in range(10)) + "->a",
    ],
    ids=["star", "batch", "dense"],
)
def test_ten_operands_are_searched_exactly_by_default(spec, objective):
    shapes = [(8,) * len(term) for term in spec.split("->")[0].split(",")]
    operands = [planner.Operand(shape, requires_grad=objective != "peak") for shape in shapes]
    plan = planner.plan(spec, *operands, backend="numpy", minimize=objective)
    # A search for the least time ends where a thousand calls would not win the time that it takes.
    assert plan.proven or (objective == "time" and plan.gap < 0.1)
    assert plan.origin in (f"exact, {objective}", "exact in part, time")


# Taken as an outer product of which operands and result are all empty.
EMPTY = Problem("q[a],a->", ((0,), (0,)), indices={"q": ROWS[:0]}, requires_grad=(False, False))


@settings(max_examples=examples(20, 400))
@example(EMPTY, "numpy")
@given(networks(4), st.sampled_from(installed_frameworks()))
def test_no_product_costs_less_than_what_the_search_takes_for_the_least(case, backend):
    problem = space_of(case, backend)
    assume(len(problem.operands) > 1)
    products = {op for tree in every_tree(problem)[:200] for op in ops(tree) if len(op.spec.inputs) == 2}
    for objective in ("time", "flops", "bytes", "retained"):
        lower = Lowerer(problem.choices, step_key(objective))
        known = (problem.steps, problem.requires, lower, objective, "any", 10**6)
        floor = Search(*known, bound=((10**30,) * 4,)).least[objective == "retained"]
        for op in products:
            steps = [lower(op)]
            if all(problem.requires):
                steps += [gradient.choice for gradient in lower.gradients(op, (True, True))]
            assert sum(lower.key(choice.cost)[0] for choice in steps) >= floor


# Its peak is a sum of which the bits overlap.
OVERLAP = Problem("q[a],,,->", ((5,), (), (), ()), indices={"q": ROWS[:5]}, requires_grad=(True, False, False, True))


@pytest.mark.parametrize(
    ("backend", "count", "most_nodes"), [("numpy", examples(60, 2000), 5), ("torch", examples(10, 300), 4)]
)
def test_scores_are_the_costs_of_the_programs(backend, count, most_nodes):
    pytest.importorskip(backend, reason=f"{backend} is not installed")

    @settings(max_examples=count)
    @example(OVERLAP)
    @given(networks(most_nodes))
    def law(case):
        problem = space_of(case, backend)
        for objective in OBJECTIVES:
            found, lower = problem.search(objective, OPTIMAL)
            cost = problem.programs(found.tree, lower).cost
            score = found.score[0] + problem.index_bytes if objective == "peak" else found.score[0][0]
            assert score == figure(cost, objective), objective
            if objective == "retained":
                assert cost.retained_bytes == 0
                assert found.score[0][1] == figure(cost, "time")

    law()


# -- keep or recompute -----------------------------------------------------------------------------------


def limits_of(random, priced):
    """Limits that bind: what some way to do it needs, or a byte less, or none."""

    def near(figures):
        few = min(random.choices(figures, k=random.choice([1, 3])))
        return random.choice([None, few, few, max(0, few - 1)])

    return near([p.peak for p in priced]), near([p.cost.retained_bytes for p in priced])


def assert_least_within(make_plan, priced, objective, memory, retain):
    """A plan within limits is the best there is; or the error names limits that succeed."""
    bounds = [math.inf if limit is None else limit for limit in (memory, retain)]
    best = least(priced, objective, *bounds)
    limits = {"memory_limit": memory, "retain_limit": retain}
    if best is None:
        with pytest.raises(planner.PlannerLimitError, match="succeeds") as caught:
            make_plan(minimize=objective, **limits)
        named = {name: int(value) for name, value in re.findall(r"(\w+_limit)=(\d+)", str(caught.value).split(";")[-1])}
        plan = make_plan(minimize=objective, **named)
        assert all(named[name] >= limit for name, limit in limits.items() if limit is not None)
        assert least(priced, "peak", retain=bounds[1]) == named["memory_limit"]
        return plan
    plan = make_plan(minimize=objective, **limits)
    assert plan.proven or plan.origin.startswith("given path")
    assert plan.cost.peak_bytes <= bounds[0]
    assert plan.cost.retained_bytes <= bounds[1]
    assert figure(plan.cost, objective) == best, (objective, memory, retain, str(plan))
    assert_bounded(plan, objective, best)
    return plan


@as_searched
@settings(max_examples=examples(30, 600))
@given(networks(4), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
def test_what_is_kept_is_the_best_within_limits(case, objective, random):
    problem = space_of(case)
    assume(any(problem.requires))
    trees = every_tree(problem, MOST_TREES)
    priced = price_all(problem, trees, Lowerer(problem.choices, step_key(objective)), 2 * MOST_TREES)
    for _ in range(3):
        limits = limits_of(random, priced)
        assert_least_within(partial(plan_without_loops, case, optimize="optimal"), priced, objective, *limits)


def every_program(problem, tree, lower):
    """The programs of a tree with every implementation of its forward steps, in the order of least peak."""
    steps = [op.with_layouts(()) for op in ops(tree)]
    rows = [[choice.lowering for choice in lower.choices(op)] for op in steps]
    for names in itertools.product(*rows):
        named = lower.naming(zip(steps, names, strict=True))
        yield min([problem.programs(t, named).cost for t in every_order(tree, "order")], key=lambda c: c.peak_bytes)


@pytest.mark.skipif("torch" not in installed_frameworks(), reason="only torch has several rows for most steps")
def test_under_a_memory_limit_slower_rows_with_less_scratch_are_searched():
    floors, count = Floors(), examples(30, 600)

    @settings(max_examples=count)
    @given(networks(4, 2, max_size=40), st.randoms(use_true_random=False))
    def law(case, random):
        case = dataclasses.replace(case, requires_grad=(False,) * len(case.shapes))
        problem = space_of(case, "torch")
        lower = Lowerer(problem.choices, step_key("time"))
        trees = every_tree(problem, MOST_TREES)
        costs = [cost for tree in trees for cost in every_program(problem, tree, lower)]
        fastest = min(costs, key=lambda cost: (figure(cost, "time"), cost.peak_bytes))
        for memory in (fastest.peak_bytes - 1, random.choice(costs).peak_bytes):
            limits = Limits(memory, None)
            found, lower = problem.search("time", OPTIMAL._replace(scored=60_000), limits=limits)
            allowed = [figure(cost, "time") for cost in costs if cost.peak_bytes <= memory]
            assert (found is not None) == bool(allowed)
            if found:
                cost = problem.programs(found.tree, lower).cost
                assert cost.peak_bytes <= memory
                assert figure(cost, "time") == found.score[0][0] == min(allowed)
                floors.note(slower=bool(found.names))

    law()
    floors.at_least(count, slower=0.1)


@pytest.mark.skipif("torch" not in installed_frameworks(), reason="only torch has several rows for most steps")
@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("nij, q[n]jk -> nik", ((3000, 1, 16), (40, 16, 24))),
        ("nj, q[n]jk, kl -> nl", ((3000, 16), (40, 16, 24), (24, 8))),
    ],
)
def test_rows_that_a_search_names_take_what_it_says(spec, shapes):
    """With gradients too, in which only kernels have several rows with different scratch."""
    q = np.arange(shapes[0][0]) % 40
    case = Problem(
        spec, shapes, indices={"q": q}, dtypes=("float32",) * len(shapes), requires_grad=(True,) * len(shapes)
    )
    problem, stop, named = space_of(case, "torch"), OPTIMAL._replace(scored=60_000), 0
    low, high = (problem.search(objective, stop) for objective in ("peak", "time"))
    least, most = (problem.programs(found.tree, lower).cost.peak_bytes for found, lower in (low, high))
    assert least < most
    for share in (0.2, 0.4, 0.6, 0.8):
        limits = Limits(int(least + share * (most - least)), None)
        found, lower = problem.search("time", stop, limits=limits)
        cost = problem.programs(found.tree, lower).cost
        assert cost.peak_bytes <= limits.memory
        assert figure(cost, "time") == found.score[0][0]
        named += bool(found.names)
    assert named


@settings(max_examples=examples(15, 300))
@given(networks(4).filter(lambda case: case.indices), st.randoms(use_true_random=False))
def test_with_guards_a_plan_for_the_least_peak_is_proven_only_if_it_is_the_best(case, random):
    with mock.patch.object(build, "live_bytes", live_bytes):
        problem = space_of(case)
        trees = every_tree(problem, MOST_TREES)
        priced = price_all(problem, trees, Lowerer(problem.choices, step_key("peak")), 2 * MOST_TREES)
        for limits in ({}, dict(zip(("memory_limit", "retain_limit"), limits_of(random, priced), strict=True))):
            try:
                plan = plan_without_loops(case, minimize="peak", optimize="optimal", **limits)
            except planner.PlannerLimitError:
                continue
            bounds = [math.inf if limit is None else limit for limit in (limits or dict.fromkeys("ab")).values()]
            best = least(priced, "peak", *bounds)
            assert best is not None
            assert plan.cost.bound <= best <= plan.cost.peak_bytes
            assert plan.cost.peak_bytes == best or not plan.proven


def test_a_full_front_loses_one_of_the_most_alike():
    """Never the least in retained bytes, in peak or in score: of 0, 40, 50 and 100 bytes the third goes."""
    front = [
        PartialPlan(Leaf(i), (key, 0, 0, 0), kept, Peaks(forward=forward), 0, False, (kept,))
        for i, (kept, key, forward) in enumerate([(50, 5, 600), (0, 9, 900), (100, 0, 500), (40, 7, 700)])
    ]
    search = types.SimpleNamespace(least_score=attrgetter("key"), least_peak=attrgetter("peaks.forward"))
    gone = front[0]
    Search.thin(search, front, False)
    assert len(front) == 3
    assert not any(partial is gone for partial in front)


def chain(sizes):
    """A product of matrices, all with gradients."""
    letters = unused_letters((), len(sizes))
    spec = f"{','.join(map(''.join, itertools.pairwise(letters)))}->{letters[0]}{letters[-1]}"
    return Problem(spec, tuple(itertools.pairwise(sizes)))


def drawn_chain(random, count):
    """A product of so many matrices of drawn sizes."""
    return chain([random.choice([2, 3, 5, 8, 13]) for _ in range(count + 1)])


def from_both_ends(count):
    """A path for a chain: the first two, then what is left from the last to the first."""
    return [(0, 1), *((0, left - 1) for left in range(count - 1, 1, -1))]


@pytest.mark.parametrize(("count", "objective"), [*itertools.product([4, 5], OBJECTIVES), (6, "time")])
def test_chains_keep_the_best_of_all_trees(count, objective):
    random = Random(count)
    case = drawn_chain(random, count)
    problem, make_plan = space_of(case), partial(plan_without_loops, case, optimize="optimal")
    orders = count < 6  # with six, brute force over the orders of evaluation too would take a minute
    priced = price_all(problem, every_tree(problem), Lowerer(problem.choices, step_key(objective)), orders=orders)
    kept = set()
    for _ in range(20):
        memory, retain = limits_of(random, priced)
        kept.add(assert_least_within(make_plan, priced, objective, memory if orders else None, retain).keep)
    if objective in ("time", "flops", "bytes"):
        assert kept == {"all", "some", "inputs"}


@pytest.mark.parametrize("count", range(4, 11))
def test_chains_keep_the_best_of_one_tree(count):
    random, path = Random(count), from_both_ends(count)
    case = drawn_chain(random, count)
    problem, make_plan = space_of(case), partial(plan_without_loops, case, optimize=path)
    found, _ = problem.search("time", OPTIMAL, path)
    priced = list(price(problem, found.tree, Lowerer(problem.choices, step_key("time"))))
    assert len(priced) == 2 ** (count - 2)
    for _ in range(20):
        assert_least_within(make_plan, priced, "time", *limits_of(random, priced))


@pytest.mark.parametrize("count", range(4, 11))
def test_recomputing_a_chain_is_linear(count):
    for path in ("optimal", from_both_ends(count)):
        plan = plan_without_loops(chain([16] * (count + 1)), optimize=path, minimize="retained")
        assert plan.cost.retained_bytes == 0
        assert plan.cost.backward.flops <= 3 * plan.cost.forward.flops
        # Two gradient steps a product; each product but the last is computed again, once.
        assert len(plan.programs.backward.steps) == 2 * (count - 1) + count - 2


# -- every tree computes the same ------------------------------------------------------------------------


@settings(max_examples=examples(30, 600))
@given(problems(max_operands=4, max_size=3, index_modes=("raise", "drop", "clip")))
def test_every_tree_gives_the_oracles_values(case):
    operands = case.operands()
    plan = planner.plan(case.spec, *operands, **case.arguments())
    problem = SearchSpace(dataclasses.replace(plan.contraction, device=CPU))
    assume(3 ** len(operands) * 4 ** len(problem.network.gathers) <= 1500)
    assume(case.exact_bound() < 2**24)
    lower = Lowerer(problem.choices, step_key("time"))
    expected = case.expected()
    for tree in every_tree(problem)[:: examples(3, 1)]:
        programs = problem.programs(tree, lower)
        found = dataclasses.replace(plan, tree=tree, programs=programs)(*operands, **case.indices)
        np.testing.assert_array_equal(found, expected, str(tree))


# -- liveness --------------------------------------------------------------------------------------------


def simulated_peak(steps, variables, given, held, start):
    """Allocate and free step by step, looking ahead through all later steps for readers."""
    storage = {number: variable.base for number, variable in enumerate(variables)}
    memory, alive = {}, set()
    peak = start
    caller = {storage[v] for v in given}
    for number, step in enumerate(steps):
        for output in step.outputs:
            base = storage[output]
            if base not in caller:
                memory[base] = math.prod(variables[base].shape) * itemsize(variables[base].dtype)
        now = start + sum(memory.values()) + step.choice.cost.scratch_bytes
        assert step.live_bytes == now
        peak = max(peak, now)
        later = {storage[v] for s in steps[number + 1 :] for v in s.inputs} | {storage[v] for v in held}
        gone = {base for base in memory if base not in later}
        # Each value is released after its last use, and so is all storage.
        alive = {*alive, *step.outputs} - set(step.releases)
        read_later = {v for s in steps[number + 1 :] for v in s.inputs} | set(held)
        assert alive <= read_later
        assert not read_later & set(step.releases)
        assert not gone & {storage[v] for v in alive}
        for base in gone:
            del memory[base]
    return peak


@settings(max_examples=examples(60, 2000))
@given(networks(), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
def test_liveness_is_that_of_a_simulated_allocator(case, objective, random):
    problem = space_of(case)
    found, lower = problem.search(objective, OPTIMAL)
    programs = problem.programs(random.choice(list(every_keep(problem, found.tree))), lower)
    variables, forward = programs.variables, programs.forward
    bases = {variables[v].base for v in programs.kept}
    own = bases - {variables[programs.result].base} - set(range(len(problem.operands)))
    retained = sum(math.prod(variables[b].shape) * itemsize(variables[b].dtype) for b in own)
    assert programs.cost.retained_bytes == retained
    held, start = (programs.result, *programs.kept), problem.index_bytes
    assert simulated_peak(forward.steps, variables, forward.given, held, start) == forward.peak_bytes
    if programs.backward is not None:
        backward = programs.backward
        peak = simulated_peak(backward.steps, variables, backward.given, backward.results, retained + start)
        assert peak == backward.peak_bytes
        wanted = [operand.requires_grad for operand in problem.operands]
        assert [g is not None for g in programs.gradients] == wanted


# -- paths -----------------------------------------------------------------------------------------------


def opt_einsum_flops(spec, shapes, path):
    """FLOPs by opt_einsum's own count."""
    return opt_einsum.contract_path(spec, *shapes, shapes=True, optimize=path)[1].opt_cost


@settings(max_examples=examples(30, 600))
@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_flops_of_pure_products_equal_opt_einsums(count, random):
    """Where every axis is shared by two terms, or by one and the result, both count alike."""
    size = {}
    terms = [""] * count
    for letter in "abcdefghij":
        size[letter] = random.randint(2, 9)
        first, second = random.sample(range(count + 1), 2)
        for place in (first, second):
            if place < count:
                terms[place] += letter
    output = "".join(letter for letter in size if sum(letter in t for t in terms) == 1)
    spec = f"{','.join(terms)}->{output}"
    shapes = [tuple(size[a] for a in term) for term in terms]
    plan = planner.plan(spec, *shapes, minimize="flops", optimize="optimal", backend="numpy")
    ours, theirs = (opt_einsum_flops(spec, shapes, path) for path in (plan.path, "optimal"))
    assert plan.cost.flops <= theirs
    assert ours <= theirs


@pytest.mark.parametrize("count", [7, 8, 9, 10])
def test_flops_equal_those_of_opt_einsums_dynamic_programme(count):
    """In connected networks whose axes have two places each, every step sums, so that both count alike."""
    for seed in range(3):
        spec, shapes, _ = MAKERS["dense"](count, Random(seed))
        plan = planner.plan(spec, *shapes, minimize="flops", optimize="optimal", backend="numpy")
        ours, theirs = (opt_einsum_flops(spec, shapes, path) for path in (plan.path, "dp"))
        everywhere = opt_einsum_flops(spec, shapes, opt_einsum.DynamicProgramming(search_outer=True))
        assert plan.proven
        assert plan.cost.flops == ours == everywhere <= theirs


CHAIN = ("ab,bc,cd,de->ae", (3, 4), (4, 5), (5, 6), (6, 2))


@pytest.mark.parametrize(
    "optimize",
    [
        "auto", "optimal", "greedy", "dp", "branch-1", "branch-2", "branch-all", "auto-hq", "eager",
        opt_einsum.DynamicProgramming(), opt_einsum.RandomGreedy(max_repeats=4), [(0, 1), (0, 2), (0, 1)],
        ((0, 1, 2, 3),), [(1, 2), (0, 1, 2)],
    ],
    ids=lambda optimize: str(optimize).split(" object")[0].strip("<"),
)  # fmt: skip
def test_paths_of_every_kind(optimize):
    plan = planner.plan(*CHAIN, optimize=optimize, backend="numpy")
    again = planner.plan(*CHAIN, optimize=plan.path, backend="numpy")
    assert again.tree == plan.tree
    assert again.path == plan.path
    assert planner.Plan.from_json(again.to_json()) == again
    operands = [np.arange(float(math.prod(s)), dtype="float32").reshape(s) for s in CHAIN[1:]]
    np.testing.assert_array_equal(plan(*operands), np.linalg.multi_dot(operands))


@pytest.mark.parametrize(
    "optimize", ["greedy", "dp", "auto-hq", "random-greedy", "random-greedy-128", opt_einsum.RandomGreedy(), [(0,)]],
    ids=lambda optimize: str(optimize).split(" object")[0].strip("<"),
)  # fmt: skip
def test_one_operand_has_one_path(optimize):
    """opt_einsum's random searches fail for it."""
    plan = planner.plan("iij -> ji", (2, 2, 3), optimize=optimize, backend="numpy")
    assert plan.path == ((0,),)
    x = np.arange(12.0, dtype="float32").reshape(2, 2, 3)
    np.testing.assert_array_equal(plan(x), np.einsum("iij->ji", x))


@pytest.mark.parametrize("step", [*itertools.permutations(range(3)), (3, 1), (1, 3, 0, 2)])
def test_splits_of_a_path_have_the_lowest_operand_first(step):
    path = [step, *([] if len(step) == 4 else [tuple(range(5 - len(step)))])]
    found = list(splits_of(path, 4)(sum(1 << i for i in step)))
    assert len(found) == 2 ** (len(step) - 1) - 1
    assert all(left & -left < right & -right for left, right in found)


@settings(max_examples=examples(30, 500))
# The search ends near the best possible; the best tree of its path is 0.1% faster.
@example(Problem("q[a] a, a -> ", ((2, 1), (1,)), indices={"q": np.array([0])}), "time")
@given(networks(), st.sampled_from(OBJECTIVES))
def test_a_path_fed_back_gives_the_same_tree(case, objective):
    plan = plan_of(case, minimize=objective)
    again = plan_of(case, minimize=objective, optimize=plan.path)
    assert again.path == plan.path
    assert figure(again.cost, objective) <= figure(plan.cost, objective)
    if plan.gap == 0:
        assert figure(again.cost, objective) == figure(plan.cost, objective)
    if plan.gap == 0 and objective in ADDITIVE and not any(case.requires_grad):  # peaks are often equal
        assert again.tree == plan.tree


@pytest.mark.parametrize(
    ("optimize", "message"),
    [
        ("fastest", "'fastest' is unknown"),
        ([(0, 5)], r"step 0 of optimize= is \(0, 5\), but there are 4 operands left"),
        ([(0, 0)], r"step 0 of optimize= is \(0, 0\)"),
        ([()], r"step 0 of optimize= is \(\)"),
        ([(0, 1)], "leaves 3 operands uncontracted"),
        ([("a", 1)], "is not a path"),
        (7, "is not a path"),
        ([7], "is not a path"),
    ],
)
def test_wrong_paths_say_what_is_wrong(optimize, message):
    with pytest.raises(planner.PlannerError, match=message):
        planner.plan(*CHAIN, optimize=optimize, backend="numpy")


@pytest.fixture
def work(monkeypatch):
    """The steps that the searches of a test have priced or scored, a search an entry: what takes their time."""
    counts = []

    def counting(kind, done):
        run = kind.run

        def counted(self, *arguments, **options):
            try:
                return run(self, *arguments, **options)
            finally:
                counts.append(getattr(self, done))

        monkeypatch.setattr(kind, "run", counted)

    counting(Search, "work")
    counting(LazySearch, "priced")
    return counts


def test_ten_nodes_are_planned_exactly_with_little_work(work):
    """Six operands and four gathers, gradients of all."""
    spec, sizes = "q[n]ab,p[n]bc,cd,de,ef,fg->s[n]a t[m]g", {"s": 30, "t": 40}
    shapes = ((50, 4, 5), (60, 5, 6), (6, 7), (7, 8), (8, 9), (9, 3))
    indices = {name: np.zeros(20 if name == "t" else 100, int) for name in "qpst"}
    assert plan_of(Problem(spec, shapes, sizes, indices), optimize="optimal").proven
    assert sum(work) < 3_000


@pytest.mark.parametrize("operands", [10, 12])
def test_plain_networks_of_ten_and_more_are_exact(operands, work):
    case = chain([i % 5 + 2 for i in range(operands + 1)])
    plan = planner.plan(case.spec, *case.shapes, minimize="flops", optimize="optimal", backend="numpy")
    assert plan.proven
    assert sum(work) < {10: 800, 12: 2_400}[operands]
    assert plan.cost.flops <= opt_einsum_flops(case.spec, case.shapes, "dp")


@pytest.mark.parametrize("operands", [30, 100, 200])
def test_long_chains_are_planned_by_paths(operands, work):
    case = chain([3] * (operands + 1))
    plan = planner.plan(case.spec, *case.shapes, backend="numpy")
    assert not plan.proven
    assert len(plan.path) == operands - 1
    assert sum(work) <= 3 * operands


@pytest.mark.parametrize("optimize", ["auto", "greedy", [(0, 1)] * 15], ids=["auto", "greedy", "path"])
@pytest.mark.parametrize("scattered", ["", "abc"])
def test_specs_with_many_index_arrays_are_planned(optimize, scattered):
    """Where placements of takes are too many to score, takes come first."""
    names = "abcdefghijlmopqr"
    output = "".join(f"{name}[n]" for name in scattered)
    spec = ",".join(f"{name}[n]k" for name in names) + "->" + (output or "n") + "k"
    indices = {name: np.zeros(4, int) for name in names}
    sizes = {name: 3 for name in scattered}
    plan = planner.plan(spec, *[(3, 2)] * 16, backend="numpy", optimize=optimize, sizes=sizes, **indices)
    assert plan(*[np.ones((3, 2), "float32")] * 16, **indices).sum() == 8


@pytest.mark.parametrize("operands", [6, 9, 12, 14])
def test_few_steps_are_priced(operands, work):
    """Of the 2,391,484 steps of 14 operands, some hundred."""
    case = chain([i % 5 + 2 for i in range(operands + 1)])
    plan = planner.plan(case.spec, *case.shapes, optimize="optimal", backend="numpy")
    assert plan.proven
    assert sum(work) <= operands**2


def test_rows_that_are_added_or_replaced_are_priced_anew(monkeypatch):
    table = load_backend("numpy").table
    row = table.rows["matmul"]

    def taken(picoseconds=None):
        """The row and the time of a product, after a row of one's own was put into the table."""
        if picoseconds is not None:
            own = dataclasses.replace(row, name="own", cost=lambda op, device: StepCost(picoseconds=picoseconds))
            monkeypatch.setitem(table.rows, "own", own)
        (step,) = planner.plan("ab, bc -> ac", (5, 6), (6, 7), backend="numpy").programs.forward.steps
        return step.choice.lowering, step.choice.cost.picoseconds

    before = taken()
    assert before[0] == "matmul"
    assert [taken(5), taken(6), taken(10**12)] == [("own", 5), ("own", 6), before]
    monkeypatch.delitem(table.rows, "own")
    assert taken() == before


@pytest.mark.parametrize(("removed", "said"), [(("take",), "removed: take"), ((), "removed: .*cast.*matmul")])
def test_a_step_that_no_row_is_left_for_is_named(monkeypatch, removed, said):
    table = load_backend("numpy").table
    left = {name: row for name, row in table.rows.items() if removed and name not in removed}
    monkeypatch.setattr(table, "rows", left)  # rows that are put back have another order
    with pytest.raises(planner.PlannerError, match=rf"no row .* runs the step q\[n\]j -> nj of float32 on .*{said}"):
        planner.plan("q[n]j -> nj", (5, 3), q=(2,), backend="numpy")


def test_auto_ends_where_little_can_be_won(work):
    """A search ends when a thousand calls would win less than the time that pricing has taken."""
    spec, shapes, _ = MAKERS["dense"](8, Random(1))
    for times in (1, 2):
        wider = [tuple(times * size for size in shape) for shape in shapes]
        plan = planner.plan(spec, *wider, backend="numpy", deadline=1e6)  # a deadline is no family's
        assert plan.gap < 0.1
    little, much = work[:2]
    assert 2 * little < much


def test_a_known_tree_whose_steps_are_not_listed_stays(monkeypatch):
    """More steps than a search looks at are in better trees by bounds."""
    monkeypatch.setattr("planner.search.exact.lazy.MOST_LEFT", 3)
    monkeypatch.setattr("planner.search.exact.lazy.MOST_EDGES", 0)
    for seed in range(6):
        spec, shapes, indices = gathers(10, Random(seed))
        plan = planner.plan(spec, *shapes, **indices, backend="numpy", deadline=1e6)  # a deadline is no family's
        assert not plan.proven
        assert plan.cost.bound < plan.cost.seconds


def test_a_plan_is_proven_though_a_path_is_as_good():
    spec = "fg, fa, p[x]fed, fh, q[x]aebax, e, gaeg, dai, bhb -> e"
    size = {"a": 3, "b": 2, "d": 5, "e": 1, "f": 1, "g": 1, "h": 3, "i": 1, "p": 2, "q": 1, "x": 1}
    shapes = [tuple(size[letter] for letter in term.strip().replace("[x]", "")) for term in spec[:-5].split(",")]
    for objective in ADDITIVE:
        plan = planner.plan(spec, *shapes, p=(1,), q=(1,), backend="numpy", minimize=objective, optimize="optimal")
        assert plan.proven


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_interrupted_path_ends_the_search(which, monkeypatch):
    """Also if another path is better, or the last is not found at all."""
    found = iter(["greedy", "auto", "improved"])

    def interrupted(*arguments):
        for result, lower, origin in real(*arguments):
            if next(found, None) == ("greedy", "auto", None)[which]:
                yield dataclasses.replace(result, interrupted=True), lower, origin
                return
            if which == 2 and origin != "opt_einsum greedy":
                raise KeyboardInterrupt
            yield result, lower, origin

    real = searches._search_large
    monkeypatch.setattr(searches, "_search_large", interrupted)
    monkeypatch.setattr(VectorListing, "__init__", None)
    spec, shapes, indices = gathers(11, Random(0))
    plan = planner.plan(spec, *shapes, **indices, backend="numpy", optimize="optimal")
    assert plan.origin.startswith("interrupted: opt_einsum")


@settings(max_examples=examples(30, 600))
@given(networks(6, 2), st.sampled_from((-1, 0, 1)), st.sampled_from((1, 10, 9, 11)))
def test_a_search_that_decides_says_whether_a_tree_is_below_a_score(case, more, tenths):
    problem = space_of(case)
    best = problem.search("time", OPTIMAL)[0].score[0][0]
    wanted = best * tenths // 10 + more
    assert problem.has_quicker(wanted, OPTIMAL) == (best < wanted)


@pytest.mark.parametrize("operands", [4, 10])
def test_a_search_that_ends_early_proves_nothing(operands):
    """With steps listed one by one, and by numpy: the best tree by bounds is priced, and no more."""
    spec = ",".join("ab" + x for x in "cdefghijkl"[:operands]) + "->acd"
    plan = planner.plan(spec, *[(8, 8, 8)] * operands, backend="numpy", optimize="optimal")
    found, _ = SearchSpace(plan.contraction).search("time", OPTIMAL._replace(priced=1))
    assert not found.exact
    assert found.bound < plan.cost.seconds * 1e12 <= found.score[0][0] * (1 + 1e-12)


def test_a_deadline_ends_a_search_with_what_it_has():
    case = chain([i % 5 + 2 for i in range(13)])
    plan = planner.plan(case.spec, *case.shapes, optimize="optimal", deadline=1e-9, backend="numpy")
    assert plan.origin == "exact in part, time"
    assert not plan.proven
    assert 0 < plan.gap < 10
    assert "some of all trees searched for time, at most " in str(plan)


def test_a_limit_error_says_that_the_deadline_ended_the_search():
    for deadline, late in ((None, False), (600, False), (1e-9, True)):
        with pytest.raises(planner.PlannerLimitError, match="memory_limit=8; memory_limit=") as caught:
            planner.plan(*CHAIN, backend="numpy", memory_limit=8, deadline=deadline)
        assert ("found before the deadline ended the search within" in str(caught.value)) is late


def test_a_deadline_ends_the_listing_of_steps_with_gathers():
    spec, shapes = "q[n]ab,p[m]bc,r[m]cd,de,ef,fa->nm", [(9, 4, 5), (8, 5, 6), (4, 6, 3), (3, 7), (7, 4), (4, 4)]
    counts = []
    for options in ({"deadline": 1e-9}, {}):
        with mock.patch.object(Network, "merges", autospec=True, side_effect=Network.merges) as merges:
            plan = planner.plan(
                spec, *shapes, backend="numpy", q=(10,), p=(11,), r=(11,), optimize="optimal", **options
            )
        counts.append(merges.call_count)
        assert plan.origin.startswith("exact")
    assert 20 * counts[0] < counts[1]


@pytest.mark.parametrize("objective", ["time", "peak"])
def test_a_deadline_ends_the_listing_of_steps_with_gathers_by_numpy(objective):
    spec, shapes = "q[n]ab,bc,cd,de,ea->n", [(9, 4, 5), (5, 6), (6, 3), (3, 7), (7, 4)]
    counts = []
    for options in ({"deadline": 1e-9}, {}):
        with mock.patch("planner.search.exact.vectors.sizes_of", side_effect=sizes_of) as sizes:
            options |= {"backend": "numpy", "optimize": "optimal", "minimize": objective}
            plan = planner.plan(spec, *shapes, q=(10,), **options)
        counts.append(sizes.call_count)
        assert plan.origin.startswith("exact")
    assert counts[0] == 0 < counts[1]


@settings(max_examples=examples(30, 600))
@given(networks(5, max_axes=6), st.sampled_from(("time", "flops", "bytes")), st.booleans())
def test_steps_listed_by_numpy_are_those_listed_one_by_one(case, objective, needs):
    """The same tree, of the same score and bounds; with gathers another one may be as good."""
    problem = space_of(dataclasses.replace(case, requires_grad=(needs,) * len(case.shapes)))
    assume(len(problem.operands) > 1 and 0 not in problem.network.sizes.values() and len(problem.network.gathers) <= 2)
    found = []
    for least_operands in (2, 100):
        with mock.patch("planner.search.exact.lazy.VECTOR_OPERANDS", least_operands):
            found.append(problem.search(objective, OPTIMAL)[0])
    if problem.network.gathers:
        found = [dataclasses.replace(each, tree=found[0].tree) for each in found]
    assert found[0] == found[1]


LIMITS = st.sampled_from(((None, None), (0.5, None), (0.8, None), (None, 0.5), (0.8, 0.5)))


@settings(max_examples=examples(12, 1_000))
@example(5, 693, "time", (0.8, None))  # operands take no memory
@given(st.integers(3, 6), st.integers(0, 10**6), st.sampled_from(OBJECTIVES), LIMITS)
def test_splits_that_cannot_win_are_dropped_and_no_others(operands, seed, objective, shares):
    """The search without the filter finds the same tree."""
    draw = Random(seed)
    kind = draw.choice(("chain", "dense", "gathers"))
    spec, shapes, arrays = MAKERS[kind](min(operands, 5) if kind == "gathers" else operands, draw)
    indices = {name: np.zeros(shape, int) for name, shape in arrays.items()}
    dtypes = tuple(draw.choice(("float32", "float32", "float64")) for _ in shapes)
    requires = draw.choice(((False,), (True,), (False, True))) * operands
    case = Problem(spec, tuple(shapes), indices=indices, dtypes=dtypes, requires_grad=requires[: len(shapes)])
    space = space_of(case, "torch")
    limits = (
        share and int(share * getattr(plan_of_space(space).cost, figure))
        for share, figure in zip(shares, ("peak_bytes", "retained_bytes"), strict=True)
    )
    limits, stop = Limits(*limits), OPTIMAL._replace(scored=60_000)
    try:
        found, _ = space.search(objective, stop, limits=limits)
        with mock.patch.object(SearchSpace, "is_filtered", new=False):
            plain, _ = space.search(objective, stop, limits=limits)
    except SearchLimitError:
        reject()
    assert (found and found.score) == (plain and plain.score)
    assert found is None or found.exact or not plain.exact
    assert found is None or not (found.exact and plain.exact) or found.tree == plain.tree


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize(
    "arguments",
    [
        (",".join(["a"] * 11) + "->a", *[(5,)] * 11),
        (",".join(["ab"] * 12) + "->ab", *[(3, 4)] * 12),
        ("ab,bc,cd,de,ef,fg,gh,hi,ij,jk,kl->al", *[(1, 1)] * 11),
        (",,,,->", *[()] * 5),
        (",".join([""] * 11) + "->", *[()] * 11),
    ],
    ids=["vectors", "matrices", "chain of numbers", "five numbers", "eleven numbers"],
)
def test_networks_of_which_all_trees_are_as_good_are_planned(arguments, backend):
    """More steps than may be left were in trees as good as the best, and all were dropped. Numbers have no axes."""
    pytest.importorskip(backend)
    plan = planner.plan(*arguments, backend=backend)
    assert len(plan.programs.forward.steps) == len(arguments) - 2
    assert plan.gap < 0.05


def test_a_product_whose_rows_are_added_up_last_is_not_run_again():
    """The gradient of the segment sum does not read it. A bound that counts it twice rules out all trees."""
    pytest.importorskip("jax", reason="jax is not installed")
    operands = [planner.Operand(shape, requires_grad=True) for shape in ((4,), (4, 2, 2), (4,), (2, 2, 4), (4, 1))]
    options = {"sizes": {"q": 4}, "backend": "jax", "minimize": "retained"}
    assert planner.plan("c, bda, c, adb, cb -> bc q[c] d", *operands, q=(4,), **options).proven


def plan_of_space(space):
    """The programs of the quickest tree."""
    result, lower = space.search("time", OPTIMAL)
    return space.programs(result.tree, lower)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_axes_may_have_any_names(objective):
    """The letter that a search gives to the axis of a pool may be that of an axis in a spec that it met before."""
    random, q = np.random.default_rng(0), np.array([0, 0, 1])
    for specs, *shapes in (
        (("a q[c] -> ", "q[c] a -> "), (2, 2)),
        (("a q[c] -> c", "q[c] a -> c"), (2, 2)),
        (("aq[c], b -> cb", "q[c]a, b -> bc"), (2, 2), (3,)),
        (("q[c]a, ab -> b", "aq[c], ba -> b"), (3, 3), (3, 3)),
        (("ab q[c], db -> q[c]d", "q[c]ab, db -> q[c]d"), (2, 2, 2), (3, 2)),
    ):
        operands = [random.integers(-3, 4, shape).astype(float) for shape in shapes]
        expected = [reference(spec, *operands, q=q) for spec in specs]
        for names in itertools.permutations("abc"):
            for spec, wanted in zip(specs, expected, strict=True):
                renamed = spec.translate(str.maketrans("abc", "".join(names)))
                found = planner.contract(renamed, *operands, q=q, minimize=objective)
                assert np.array_equal(found, wanted), renamed


@pytest.mark.skipif("torch" not in installed_frameworks(), reason="torch is not installed")
def test_an_operand_that_repeats_an_axis_may_have_any_strides():
    """Steps that differ in letters only have one price, once some have been priced: this is the last operand's."""
    spec, shapes = (
        "a p[b] q[ac] b p[b] b, bac, b q[ad], becb -> ",
        ((3, 4, 2, 4, 3, 4), (4, 3, 2), (4, 3), (4, 2, 2, 4)),
    )
    operands = [planner.Operand(s, strides=tuple(math.prod(s[:d]) for d in range(len(s))), requires_grad=True)
                for s in shapes]  # fmt: skip
    plan = planner.plan(spec, *operands, p=(4,), q=(3, 2), backend="torch", device="cpu")
    assert {n for step in plan.programs.forward.steps for n in step.inputs} >= set(range(4))  # each operand is read


@pytest.mark.skipif("torch" not in installed_frameworks(), reason="torch is not installed")
def test_equal_steps_in_different_rows_are_not_proven():
    """The programs run both segment sums in one row, and the search had one of them in another."""
    operands = [planner.Operand(shape, requires_grad=True) for shape in [(200_000, 64)] * 2 + [(100_000, 64)]]
    plan = planner.plan(
        "q[n]j, q[n]j, nj -> nj", *operands, q=(100_000,), backend="torch", device="h100", memory_limit=154_400_000
    )
    assert not plan.proven


@pytest.mark.skipif("torch" not in installed_frameworks(), reason="torch is not installed")
def test_a_limit_that_a_copy_exceeds_is_searched_for_again():
    """A plan under a looser limit took longer: the search had not seen the copy, and the next one was for the peak."""
    shapes = [(4000, 32), (60, 32, 8), (60, 8, 32), (50, 32, 16)]
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    spec, given = "nj, q[n]jk, q[n]kl, p[n]lm -> nm", {"q": (4000,), "p": (4000,), "backend": "torch", "device": "cpu"}
    seconds = []
    for limit in (3_300_000, 3_500_000, 3_700_000):
        plan = planner.plan(spec, *operands, memory_limit=limit, **given)
        assert plan.cost.peak_bytes <= limit
        seconds.append(plan.cost.seconds)
    assert seconds == sorted(seconds, reverse=True)
