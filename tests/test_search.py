"""The search against brute force, its programs against a second count of memory, its paths against opt_einsum."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import types
from operator import attrgetter
from random import Random
from unittest import mock

import numpy as np
import opt_einsum
import pytest
from brute_force import TooManyTreesError, every_keep, every_order, every_tree, figure, least, ops, price, price_all
from conftest import examples, installed_frameworks
from hypothesis import assume, example, given, reject, settings
from hypothesis import strategies as st
from laws import Floors

import planner
from planner.cost.device import CPU
from planner.cost.objective import OBJECTIVES, step_key
from planner.language.dtypes import itemsize
from planner.language.options import Options
from planner.language.resolve import resolve_shapes
from planner.language.spec import unused_letters
from planner.program.build import Lowerer
from planner.program.contraction import Contraction
from planner.program.tree import Leaf
from planner.search.dynamic import PartialPlan, Peaks, Search
from planner.search.paths import splits_of
from planner.search.space import AUTO_WORK, MOST_TRIED, SearchSpace
from planner.testing import problems

MOST_TREES = examples(600, 20_000)  # that a random network may have, orders of evaluation included


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
        return "".join(e if isinstance(e, str) else f"{brackets[e][0]}[{''.join(brackets[e][1])}]" for e in term)

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


# Brute force knows trees and what they keep; a loop over slices may do what none of them does.
WITHOUT_LOOPS = mock.patch("planner.search.choose.loop_candidates", return_value=())


def problem_of(network, backend):
    spec, operands, indices, output = network
    resolved = resolve_shapes(spec, [o.shape for o in operands], indices, output)
    dtype = "float64" if any(o.dtype == "float64" for o in operands) else "float32"
    return RowMajor(Contraction(spec, resolved, (), tuple(operands), dtype, "raise", backend, CPU, Options()))


class RowMajor(SearchSpace):
    """A problem whose values are all row-major, as the search takes them to be."""

    def choices(self, op):
        return [dataclasses.replace(choice, layouts=()) for choice in super().choices(op)]


def lowerers(problem, backend):
    if backend == "numpy":  # one row for each op: all objectives choose alike
        only = Lowerer(problem.choices, step_key("time"))
        return dict.fromkeys(OBJECTIVES, only)
    return {objective: Lowerer(problem.choices, step_key(objective)) for objective in OBJECTIVES}


def assert_least(network, backend, most_trees):
    spec, operands, indices, output = network
    problem = problem_of(network, backend)
    priced = {}
    try:
        trees = every_tree(problem, most_trees)
        chosen = lowerers(problem, backend)
        for lower in set(chosen.values()):
            priced[lower] = price_all(problem, trees, lower, most_trees)
    except TooManyTreesError:
        reject()
    for objective, lower in chosen.items():
        options = {"sizes": output, "minimize": objective, "optimize": "optimal", **indices}
        plan = planner.plan(spec, *operands, backend=backend, **options)
        assert plan.proven or not plan.programs.row_major
        cost = problem.programs(plan.tree, lower).cost
        assert figure(cost, objective) == least(priced[lower], objective), (objective, str(plan))
        assert figure(plan.cost, objective) == figure(cost, objective) or not plan.proven


def test_search_finds_the_least_of_all_trees():
    floors = Floors()

    @settings(max_examples=examples(100, 1000))
    @given(networks())
    def law(network):
        assert_least(network, "numpy", MOST_TREES)
        nodes = len(network[1]) + len(network[2])
        floors.note(four=nodes >= 4, five=nodes >= 5)

    law()
    floors.at_least(examples(90, 900), four=0.15, five=0.01)  # of a hundred, 38 to 65 and 2 to 20 were seen


@pytest.mark.parametrize(
    ("spec", "shapes", "indices"),
    [
        ("ab,bc,cd,de,ea->ad", [(3, 8), (8, 2), (2, 5), (5, 13), (13, 3)], {}),
        ("q[n]ab,bc,cd,p[n]d->na", [(9, 4, 3), (3, 8), (8, 5), (7, 5)], {"q": (6,), "p": (6,)}),
        ("q[n]a,p[n]b,ab->s[n]", [(9, 4), (7, 3), (4, 3)], {"q": (6,), "p": (6,), "s": (6,)}),
    ],
)
def test_search_finds_the_least_with_many_nodes_and_all_gradients(spec, shapes, indices):
    operands = tuple(planner.Operand(shape, requires_grad=True) for shape in shapes)
    output = planner.resolve(spec, *shapes, sizes={"s": 5} if "s" in indices else None, **indices).output_shape
    assert_least((spec, operands, indices, output), "numpy", 10**6)


@st.composite
def six_nodes(draw):
    """A network of six operands and distinct index arrays, without gradients, or each with one."""
    letters, sizes = "abcde", st.sampled_from((1, 2, 5, 13))
    extents = {a: draw(sizes) for a in letters}
    gathers = draw(st.integers(0, 1))
    terms = [draw(st.lists(st.sampled_from(letters), min_size=1, max_size=3, unique=True)) for _ in range(6 - gathers)]
    output = draw(st.lists(st.sampled_from(letters), max_size=2, unique=True))
    pool, indices = draw(sizes), {}
    for term in draw(st.lists(st.sampled_from(terms), min_size=gathers, max_size=gathers)):
        term.insert(0, "q[a]")
        indices = {"q": (extents["a"],)}
    needs = draw(st.booleans())
    shapes = [tuple(pool if e == "q[a]" else extents[e] for e in term) for term in terms]
    operands = tuple(planner.Operand(shape, requires_grad=needs) for shape in shapes)
    spec = f"{','.join(map(''.join, terms))}->{''.join(output)}"
    return spec, operands, indices, tuple(extents[e] for e in output)


@settings(max_examples=examples(12, 120))
@given(six_nodes())
def test_search_finds_the_least_of_all_trees_of_six_nodes(network):
    """Of every tree, with all values kept, which additive objectives cannot better; the peak without gradients."""
    spec, operands, indices, output = network
    problem = problem_of(network, "numpy")
    lower = Lowerer(problem.choices, step_key("time"))
    trees = every_tree(problem)
    assert len(trees) >= (105 if indices else 945)  # ways to contract five or six operands pairwise
    costs = [problem.programs(tree, lower).cost for tree in trees]
    for objective in ("time", "flops", "bytes"):
        found, _ = problem.search(objective, 10**6)
        assert figure(problem.programs(found.tree, lower).cost, objective) == min(figure(c, objective) for c in costs)
    if not any(problem.requires):
        found, _ = problem.search("peak", 10**6)
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
    assert plan.proven
    assert plan.origin == f"exact, {objective}"


# Taken as an outer product of which operands and result are all empty.
EMPTY = ("q[a],a->", (planner.Operand((0,), "float32"), planner.Operand((0,), "float32")), {"q": (0,)}, ())


@settings(max_examples=examples(40, 400))
@example(EMPTY, "numpy")
@given(networks(most_nodes=4, sizes=(0, 1, 2, 40)), st.sampled_from(installed_frameworks()))
def test_no_product_costs_less_than_what_the_search_takes_for_the_least(network, backend):
    problem = problem_of(network, backend)
    assume(len(problem.operands) > 1)
    products = {op for tree in every_tree(problem)[:200] for op in ops(tree) if len(op.spec.inputs) == 2}
    for objective in ("time", "flops", "bytes", "retained"):
        lower = Lowerer(problem.choices, step_key(objective))
        known = (problem.network, problem.requires, problem.casts, problem.dtype, lower, objective, "any", 10**6)
        floor = Search(*known, bound=((10**30,) * 4,)).least[objective == "retained"]
        for op in products:
            steps = [lower(op)]
            if all(problem.requires):
                steps += [gradient.choice for gradient in lower.gradients(op, (True, True))]
            assert sum(lower.key(choice.cost)[0] for choice in steps) >= floor


# Its peak is a sum of which the bits overlap.
OVERLAP = (
    "q[a],,,->",
    (planner.Operand((5,), requires_grad=True), *[planner.Operand(())] * 2, planner.Operand((), requires_grad=True)),
    {"q": (5,)},
    (),
)


@pytest.mark.parametrize(
    ("backend", "count", "most_nodes"), [("numpy", examples(200, 2000), 5), ("torch", examples(30, 300), 4)]
)
def test_scores_are_the_costs_of_the_programs(backend, count, most_nodes):
    pytest.importorskip(backend, reason=f"{backend} is not installed")

    @settings(max_examples=count)
    @example(OVERLAP)
    @given(networks(most_nodes=most_nodes))
    def law(network):
        problem = problem_of(network, backend)
        for objective in OBJECTIVES:
            found, lower = problem.search(objective, 10**6)
            cost = problem.programs(found.tree, lower).cost
            score = found.score[0] if objective == "peak" else found.score[0][0]
            assert score == figure(cost, objective), objective
            if objective == "retained":
                assert cost.retained_bytes == 0
                assert found.score[0][1] == figure(cost, "time")

    law()


@settings(max_examples=examples(30, 300))
@given(networks(most_nodes=4))
def test_torch_search_finds_the_least_of_all_trees(torch, network):
    assert_least(network, "torch", MOST_TREES // 3)


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
    assert plan.proven
    assert plan.cost.peak_bytes <= bounds[0]
    assert plan.cost.retained_bytes <= bounds[1]
    assert figure(plan.cost, objective) == best, (objective, memory, retain, str(plan))
    return plan


@settings(max_examples=examples(60, 600))
@given(networks(most_nodes=4), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
def test_what_is_kept_is_the_best_within_limits(network, objective, random):
    spec, operands, indices, output = network
    problem = problem_of(network, "numpy")
    assume(any(problem.requires))
    try:
        trees = every_tree(problem, MOST_TREES)
        priced = price_all(problem, trees, Lowerer(problem.choices, step_key(objective)), 2 * MOST_TREES)
    except TooManyTreesError:
        reject()

    def make_plan(**options):
        given = {"sizes": output, "optimize": "optimal", "backend": "numpy", **indices, **options}
        with WITHOUT_LOOPS:
            return planner.plan(spec, *operands, **given)

    for _ in range(3):
        assert_least_within(make_plan, priced, objective, *limits_of(random, priced))


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


def chain(sizes, path=None):
    """A spec and operands of a product of matrices, all with gradients; and what makes its plans in NumPy."""
    letters = unused_letters((), len(sizes))
    terms = [f"{a}{b}" for a, b in itertools.pairwise(letters)]
    spec = f"{','.join(terms)}->{letters[0]}{letters[-1]}"
    operands = tuple(planner.Operand(shape, requires_grad=True) for shape in itertools.pairwise(sizes))

    def make_plan(**options):
        with WITHOUT_LOOPS:
            return planner.plan(spec, *operands, backend="numpy", optimize=path or "optimal", **options)

    problem = problem_of((spec, operands, {}, None), "numpy")
    return problem, make_plan


@pytest.mark.parametrize(("count", "objective"), [*itertools.product([4, 5], OBJECTIVES), (6, "time")])
def test_chains_keep_the_best_of_all_trees(count, objective):
    random = Random(count)
    problem, make_plan = chain([random.choice([2, 3, 5, 8, 13]) for _ in range(count + 1)])
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
    random = Random(count)
    path = [(0, 1), *((0, left - 1) for left in range(count - 1, 1, -1))]
    problem, make_plan = chain([random.choice([2, 3, 5, 8, 13]) for _ in range(count + 1)], path)
    lower = Lowerer(problem.choices, step_key("time"))
    found, _ = problem.search("time", 10**6, path)
    priced = list(price(problem, found.tree, lower))
    assert len(priced) == 2 ** (count - 2)
    for _ in range(20):
        memory, retain = limits_of(random, priced)
        bounds = [math.inf if limit is None else limit for limit in (memory, retain)]
        best = least(priced, "time", *bounds)
        if best is not None:
            plan = make_plan(memory_limit=memory, retain_limit=retain)
            assert figure(plan.cost, "time") == best
            assert plan.cost.peak_bytes <= bounds[0]
            assert plan.cost.retained_bytes <= bounds[1]


@pytest.mark.parametrize("count", range(4, 11))
def test_recomputing_a_chain_is_linear(count):
    for path in (None, [(0, 1), *((0, left - 1) for left in range(count - 1, 1, -1))]):
        _, make_plan = chain([16] * (count + 1), path)
        plan = make_plan(minimize="retained")
        assert plan.cost.retained_bytes == 0
        assert plan.cost.backward.flops <= 3 * plan.cost.forward.flops
        # Two gradient steps a product; each product but the last is computed again, once.
        assert len(plan.programs.backward.steps) == 2 * (count - 1) + count - 2


# -- every tree computes the same ------------------------------------------------------------------------


@settings(max_examples=examples(60, 600))
@given(problems(max_operands=4, max_size=3, index_modes=("raise", "drop", "clip")))
def test_every_tree_gives_the_oracles_values(random_problem):
    case = random_problem
    operands = case.operands()
    sizes = case.output_shape()
    plan = planner.plan(case.spec, *operands, sizes=sizes, index_mode=case.index_mode, backend="numpy", **case.indices)
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
    memory = {}
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
        released = {storage[v] for v in step.releases}
        assert released == gone & {storage[v] for v in (*step.inputs, *step.outputs)}
        assert gone == released
        for base in gone:
            del memory[base]
    return peak


@settings(max_examples=examples(200, 2000))
@given(networks(most_nodes=5), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
def test_liveness_is_that_of_a_simulated_allocator(network, objective, random):
    problem = problem_of(network, "numpy")
    found, lower = problem.search(objective, 10**6)
    programs = problem.programs(random.choice(list(every_keep(problem, found.tree))), lower)
    variables, forward = programs.variables, programs.forward
    bases = {variables[v].base for v in programs.kept}
    own = bases - {variables[programs.result].base} - set(range(len(problem.operands)))
    retained = sum(math.prod(variables[b].shape) * itemsize(variables[b].dtype) for b in own)
    assert programs.cost.retained_bytes == retained
    held = (programs.result, *programs.kept)
    assert simulated_peak(forward.steps, variables, forward.given, held, 0) == forward.peak_bytes
    if programs.backward is not None:
        backward = programs.backward
        peak = simulated_peak(backward.steps, variables, backward.given, backward.results, retained)
        assert peak == backward.peak_bytes
        wanted = [operand.requires_grad for operand in problem.operands]
        assert [g is not None for g in programs.gradients] == wanted


# -- paths -----------------------------------------------------------------------------------------------


@settings(max_examples=examples(100, 1000))
@given(problems(max_operands=6, gathers=False, without=["repeated output", "broadcast output"], max_size=9))
def test_flops_are_at_most_opt_einsums(case):
    """opt_einsum counts a step as the size of its joint space, doubled where it sums; so do we, per product."""
    shapes = case.shapes
    plan = planner.plan(case.spec, *shapes, minimize="flops", optimize="optimal", backend="numpy")
    terms = plan.resolved.spec
    sizes = dict(terms.sizes)
    assume(0 not in sizes.values())
    path = opt_einsum.contract_path(
        ",".join("".join(t) for t in terms.inputs) + "->" + "".join(terms.output),
        *plan.resolved.shapes, shapes=True, optimize="optimal",
    )[0]  # fmt: skip
    theirs = planner.plan(case.spec, *shapes, minimize="flops", optimize=path, backend="numpy")
    assert plan.cost.flops <= theirs.cost.flops


def opt_einsum_flops(spec, shapes, path):
    """FLOPs by opt_einsum's own count."""
    return opt_einsum.contract_path(spec, *shapes, shapes=True, optimize=path)[1].opt_cost


@settings(max_examples=examples(60, 600))
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
    best = opt_einsum.contract_path(spec, *shapes, shapes=True, optimize="optimal")[0]
    ours, theirs = (opt_einsum_flops(spec, shapes, path) for path in (plan.path, best))
    assert plan.cost.flops <= theirs
    assert ours <= theirs


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


@pytest.mark.parametrize("step", [*itertools.permutations(range(3)), (3, 1), (1, 3, 0, 2)])
def test_splits_of_a_path_have_the_lowest_operand_first(step):
    path = [step, *([] if len(step) == 4 else [tuple(range(5 - len(step)))])]
    found = list(splits_of(path, 4)(sum(1 << i for i in step)))
    assert len(found) == 2 ** (len(step) - 1) - 1
    assert all(left & -left < right & -right for left, right in found)


@settings(max_examples=examples(100, 500))
@given(networks(most_nodes=5), st.sampled_from(OBJECTIVES))
def test_a_path_fed_back_gives_the_same_tree(network, objective):
    spec, operands, indices, output = network
    options = {"sizes": output, "minimize": objective, "backend": "numpy", **indices}
    plan = planner.plan(spec, *operands, **options)
    again = planner.plan(spec, *operands, optimize=plan.path, **options)
    assert figure(again.cost, objective) == figure(plan.cost, objective)
    assert again.path == plan.path
    if not any(o.requires_grad for o in operands):
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
    """The steps that the searches of a test have scored, a search an entry: what takes their time, on any machine."""
    counts, run = [], Search.run

    def counted(self, *arguments):
        try:
            return run(self, *arguments)
        finally:
            counts.append(self.work)

    monkeypatch.setattr(Search, "run", counted)
    return counts


def test_ten_nodes_are_planned_exactly_with_little_work(work):
    """Six operands and four gathers, gradients of all."""
    spec = "q[n]ab,p[n]bc,cd,de,ef,fg->s[n]a t[m]g"
    shapes = [(50, 4, 5), (60, 5, 6), (6, 7), (7, 8), (8, 9), (9, 3)]
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    indices = {"q": (100,), "p": (100,), "s": (100,), "t": (20,)}
    plan = planner.plan(spec, *operands, sizes={"s": 30, "t": 40}, optimize="optimal", backend="numpy", **indices)
    assert plan.proven
    assert sum(work) < 3_000


@pytest.mark.parametrize("operands", [10, 12])
def test_plain_networks_of_ten_and_more_are_exact(operands, work):
    letters = "abcdefghijklmn"
    spec = ",".join(letters[i : i + 2] for i in range(operands)) + f"->{letters[0]}{letters[operands]}"
    shapes = [(i % 5 + 2, (i + 1) % 5 + 2) for i in range(operands)]
    plan = planner.plan(spec, *shapes, minimize="flops", optimize="optimal", backend="numpy")
    assert plan.proven
    assert sum(work) < {10: 800, 12: 2_400}[operands]
    best = opt_einsum.contract_path(spec, *shapes, shapes=True, optimize="dp")[0]
    assert plan.cost.flops <= opt_einsum_flops(spec, shapes, best)


@pytest.mark.parametrize("operands", [30, 100, 200])
def test_long_chains_are_planned_by_paths(operands, work):
    letters = unused_letters((), operands + 1)
    spec = ",".join(f"{letters[i]}{letters[i + 1]}" for i in range(operands)) + f"->{letters[0]}{letters[operands]}"
    plan = planner.plan(spec, *[(3, 3)] * operands, backend="numpy")
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


@pytest.mark.parametrize(
    ("spec", "shapes", "indices", "work"),
    [("ij,jk->ik", [(2, 3), (3, 4)], {}, 4), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)], {}, 13),
     ("q[n]j,jk,kl->nl", [(2, 3), (3, 4), (4, 5)], {"q": (6,)}, 39)],
)  # fmt: skip
def test_the_work_of_a_search_is_foretold(spec, shapes, indices, work):
    """Each operand is on one side of a split, or on the other, or not there; so is each index array."""
    found = SearchSpace(planner.plan(spec, *shapes, backend="numpy", **indices).contraction)
    assert found.exact_work() == work


def test_a_chain_whose_splits_are_few_is_searched_exactly_beyond_the_work_that_is_foretold():
    """Of eleven matrices 88,573 steps are foretold, which is tried though it is more than the search may score."""
    letters = "abcdefghijkl"
    spec = ",".join(a + b for a, b in itertools.pairwise(letters)) + "->al"
    plan = planner.plan(spec, *[(n + 2, n + 3) for n in range(11)], backend="numpy")
    assert AUTO_WORK < SearchSpace(plan.contraction).exact_work() <= MOST_TRIED * AUTO_WORK
    assert plan.origin.startswith("exact")
