"""The plan: written and read back, printed, run, compared with what was not taken, held to its limits."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import operator
import random
import re

import numpy as np
import pytest
from conftest import GOLDEN, assert_on_file, examples, run_python
from hypothesis import example, given, settings
from hypothesis import strategies as st
from laws import exact_problems, needing_gradients, plan_of

import planner
from planner.backends.common.elementwise import scattered_read_seconds, short_run_seconds
from planner.cli import main
from planner.cost.device import CPU
from planner.cost.layout import Layout
from planner.cost.objective import OBJECTIVES, plan_key
from planner.language.dtypes import dtype_name
from planner.language.spec import Spec
from planner.language.units import count_text
from planner.program.guards import index_bytes
from planner.program.loops import resize_tree, slice_counts
from planner.program.ops import Guard
from planner.program.serial import decode
from planner.search.slicing import worth_cutting
from planner.testing import Problem, problems
from planner.workloads import WORKLOADS

# Guards that show in gradients only, and no gradient reads: the bound was lost.
UNREAD = Problem(
    spec="q[a] abf, af, a, ab -> ", shapes=((2, 2, 2, 3), (2, 3), (2,), (2, 2)), indices={"q": np.zeros(2, int)},
    dtypes=("float32",) * 4, requires_grad=(False, False, True, True),
)  # fmt: skip


@example(UNREAD, "time")
@settings(max_examples=examples(30, 1000))
@given(problems(), st.sampled_from(OBJECTIVES))
def test_json_gives_an_equal_plan_back(case, objective):
    plan = plan_of(case, minimize=objective)
    again = planner.Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()
    assert str(again) == str(plan)


def test_infinite_rates_are_null_in_json():
    infinite = planner.Device("ideal", flop_rate=1e12, bandwidth=float("inf"), launch_seconds=1e-6)
    for device in (infinite, planner.Device("plain", flop_rate=1e12, bandwidth=1e10)):
        plan = planner.plan("ij,jk->ik", (2, 3), (3, 4), backend="numpy", device=device)
        written = json.loads(plan.to_json(), parse_constant=pytest.fail)
        assert written["device"]["skinny_rate"] is None
        again = planner.Plan.from_json(plan.to_json())
        assert again == plan
        assert again.device.seconds(1e12, 1e12, 1) == device.seconds(1e12, 1e12, 1)


def test_a_deadline_is_kept_with_the_options():
    plan = planner.plan("ij,jk->ik", (2, 3), (3, 4), backend="numpy", deadline=2)
    assert plan.options.deadline == 2.0
    assert planner.Plan.from_json(plan.to_json()) == plan
    np.testing.assert_array_equal(planner.contract("i,i->", np.arange(3), np.arange(3), deadline=1.5), 5)


def test_json_holds_no_infinity():
    good = planner.plan("ij->i", (2, 3), backend="numpy")
    with pytest.raises(planner.PlannerError, match="not a plan written by to_json"):
        planner.Plan.from_json(good.to_json().replace('"bandwidth": 12000000000.0', '"bandwidth": Infinity'))


def by_hand(inputs, output, sizes, memory_limit):
    return [(0, 2), *[(0, 1)] * (len(inputs) - 2)]


class Optimizer:
    def __call__(self, inputs, output, sizes, memory_limit):
        return [(1, 2), (0, 1)]


@pytest.mark.parametrize(
    ("options", "field", "name"),
    [
        ({"minimize": lambda cost: cost.flops}, "minimize", "<lambda>"),
        ({"optimize": by_hand}, "optimize", "by_hand"),
        ({"optimize": Optimizer()}, "optimize", "Optimizer"),
    ],
)
def test_functions_come_back_from_json_as_names_that_plan_nothing(options, field, name):
    operands = [np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 5))]
    plan = planner.plan("ij,jk,kl->il", *operands, **options)
    json.loads(plan.to_json(), parse_constant=pytest.fail)
    again = planner.Plan.from_json(plan.to_json())
    # The plan is whole, but for the function.
    assert dataclasses.replace(again, options=plan.options) == plan
    assert str(again) == str(plan)
    assert again.to_json() == plan.to_json()
    assert planner.Plan.from_json(again.to_json()) == again
    np.testing.assert_array_equal(again(*operands), np.linalg.multi_dot(operands))
    forgotten = getattr(again.options, field)
    assert repr(forgotten) == f"<{name}, not in JSON>"
    with pytest.raises(planner.PlannerError, match=f"JSON, which holds the name of '{name}' only: plan anew"):
        planner.plan("ij,jk,kl->il", *operands, **{field: forgotten})
    if field == "minimize":
        with pytest.raises(planner.PlannerError, match="plan anew"):
            again.alternatives()
    else:
        assert [str(other) for other in again.alternatives()] == [str(other) for other in plan.alternatives()]


NO_PLANS = ["", "{", "[]", "1", "null", '{"type": "Nope"}', '{"type": "Operand", "shape": [2]}', '{"a": 1}', '"x"']
STEP = json.loads(planner.plan("ij->i", (2, 3), backend="numpy").to_json())
LOOP = json.loads((GOLDEN / "plans" / "loop-numpy.json").read_text())
CHANGES = ({"version": 99}, {"programs": None}, {"extra": 1}, {"tree": 7}, {"resolved": []}, {"operands": 3})
BODIES = ("x", None, 3, [1], {**LOOP["loop"]["body"], "programs": None})
DAMAGED = [{**STEP, **change} for change in CHANGES]
DAMAGED += [{**LOOP, "loop": {**LOOP["loop"], "body": body}} for body in BODIES]


@pytest.mark.parametrize("text", [*NO_PLANS, *map(json.dumps, DAMAGED)], ids=lambda text: text[:20])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(planner.PlannerError, match="not a plan written by to_json" if text in NO_PLANS else None):
        planner.Plan.from_json(text)


@pytest.mark.parametrize("runs", [[], [[2, 0]], [[2, 0, 1, 1]], [[2, 0, -1]], [[2, 0, 3]], [[2, 0, 2**70]]])
@pytest.mark.parametrize("place", ["variables", "steps"])
def test_layouts_along_dimensions_that_a_value_lacks_are_refused(place, runs):
    pytest.importorskip("torch", reason="torch is not installed")
    lying = planner.Operand((3, 4, 5), strides=(4, 1, 12))
    plan = planner.plan("abc,cd,b->ad", lying, (5, 6), (4,), backend="torch")
    written = json.loads(plan.to_json())
    assert planner.Plan.from_json(json.dumps(written)) == plan
    programs = written["programs"]
    variable, (op, *_) = programs["variables"][0], [step["op"] for step in programs["forward"]["steps"]]
    layout = {"variables": variable["layout"], "steps": op["layouts"][0]}[place]
    assert layout["runs"] == [[2, 0, 1]]
    layout["runs"] = runs
    with pytest.raises(planner.PlannerError, match="along dimensions that"):
        planner.Plan.from_json(json.dumps(written))


def leaves(value, path=()):
    """Yield the path to each number, text and truth value in what JSON holds."""
    if not isinstance(value, (dict, list)):
        yield path
    else:
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, (*path, key))


def changed(stored, path, value):
    """Return JSON with another value at the end of a path."""
    stored = copy.deepcopy(stored)
    functools.reduce(operator.getitem, path[:-1], stored)[path[-1]] = value
    return json.dumps(stored)


NEED = [planner.Operand(shape, requires_grad=True) for shape in ((8, 1, 4), (5, 4, 3))]
IN_JSON = {
    "gathered": planner.plan("nij, q[n]jk -> nik", *NEED, q=(8,), backend="numpy"),
    "loop": planner.plan("nij, njk, nkl -> il", *[(100, 16, 16)] * 3, backend="numpy", memory_limit="40 kB"),
}


@pytest.mark.parametrize("name", IN_JSON)
def test_a_part_of_another_type_is_refused(name):
    """A plan with such a part would print, or run, until some step needs the part."""
    stored = json.loads(IN_JSON[name].to_json())
    paths = [path for path in leaves(stored) if "optimize" not in path]
    assert len(paths) > 300
    # Those of ops were believed.
    of_ops = [path for path in paths if path[-1] in ("pair", "source_dtype")]
    for path in [*random.Random(0).sample(paths, 300), *of_ops]:
        for value in ([[True]], {"type": "Leaf", "operand": 0}):
            with pytest.raises(planner.PlannerError):
                planner.Plan.from_json(changed(stored, path, value))


PRODUCT = planner.plan(
    "ij, jk -> ik",
    *[planner.Operand(shape, requires_grad=True) for shape in ((2, 3), (3, 4))],
    backend="numpy",
)
TAKE = planner.plan("q[n]j -> nj", (3, 2), q=(4,), backend="numpy")
STEP_0 = ("programs", "forward", "steps", 0)


@pytest.mark.parametrize(
    ("plan", "path", "value"),
    [
        (PRODUCT, (*STEP_0, "inputs", 0), 99),
        (PRODUCT, (*STEP_0, "outputs", 0), 0),
        (PRODUCT, (*STEP_0, "op", "dtype"), "float64"),
        (PRODUCT, (*STEP_0, "op", "dtype"), "floats"),
        (PRODUCT, (*STEP_0, "op", "spec", "output", 0), "j"),
        (PRODUCT, ("tree", "op", "spec", "output", 0), "j"),
        (PRODUCT, ("tree", "op", "source_dtype"), "float64"),
        (PRODUCT, ("tree", "children", 0, "operand"), 1),
        (PRODUCT, ("tree", "children", 0, "operand"), -1),
        (PRODUCT, ("programs", "result"), 0),
        (PRODUCT, ("programs", "forward", "results"), []),
        (PRODUCT, ("programs", "gradients", 0), 1),
        (PRODUCT, ("programs", "gradients"), []),
        (PRODUCT, ("resolved", "shapes", 0, 0), 7),
        (PRODUCT, ("index_mode",), "wrap"),
        (PRODUCT, ("backend",), "cupy"),
        (PRODUCT, ("options", "minimize"), "money"),
        (PRODUCT, ("options", "optimize"), 3),
        (PRODUCT, ("options", "precision"), "some"),
        (PRODUCT, ("device", "bandwidth"), 0),
        (TAKE, ("resolved", "spec", "inputs", 0, 0, "array"), "r"),
        (TAKE, ("index_shapes",), []),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(plan, path, value):
    stored = json.loads(plan.to_json())
    assert planner.Plan.from_json(json.dumps(stored)) == plan
    with pytest.raises(planner.PlannerError):
        planner.Plan.from_json(changed(stored, path, value))


def test_a_plan_is_immutable_and_hashable():
    plan = planner.plan("ij,jk->ik", (2, 3), (3, 4), backend="numpy")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.proven = False
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.cost.flops = 0
    assert {plan: 1}[planner.plan("ij,jk->ik", (2, 3), (3, 4), backend="numpy")] == 1


def test_the_order_of_keywords_makes_no_other_plan():
    first, second = ({"q": (4,), "p": (3,)}, {"p": (3,), "q": (4,)})
    plan = planner.plan("q[n]p[m] -> nm", (5, 6), backend="numpy", **first)
    assert plan == planner.plan("q[n]p[m] -> nm", (5, 6), backend="numpy", **second)


def test_repr_is_short():
    spec = ",".join("ab" for _ in range(100)) + "->"
    plan = planner.plan(spec, *[(2, 2)] * 100, backend="numpy")
    assert len(repr(plan)) < 250
    assert "numpy" in repr(plan)


@settings(max_examples=examples(25, 800))
@given(exact_problems(max_operands=4, max_size=9), st.sampled_from(OBJECTIVES))
def test_alternatives_differ_lose_and_run(case, objective):
    if case.seed % 2:  # NumPy runs plans without gradients
        case = dataclasses.replace(case, requires_grad=(False,) * len(case.shapes))
    plan, key = plan_of(case, minimize=objective), plan_key(objective)
    others = plan.alternatives()
    assert len(others) <= 5
    assert [key(o.plan.cost) for o in others] == sorted(key(o.plan.cost) for o in others)
    for other in others:
        if plan.proven:
            assert key(other.plan.cost)[0] >= key(plan.cost)[0]
        assert other.plan.programs != plan.programs
        assert other.loses
        assert str(other)
        if plan.programs.backward is None:
            np.testing.assert_array_equal(other.plan(*case.operands(), **case.indices), case.expected())


CHAIN = ("ab,bc,cd,de->ae", [(20, 3), (3, 30), (30, 4), (4, 9)])


def chain(**options):
    return planner.plan(CHAIN[0], *needing_gradients(*CHAIN[1]), backend="numpy", **options)


def test_alternatives_are_as_many_as_any_integer_says():
    plan = chain()
    assert len(plan.alternatives(np.int64(2))) == 2
    for most in (2.0, True, "2", -1):
        with pytest.raises(planner.PlannerError, match="must be a number of plans"):
            plan.alternatives(most)


def test_alternatives_say_by_what_they_lose():
    plan = chain()
    others = plan.alternatives(50)
    assert others
    for other in others:
        assert "path than" not in other.loses
        for name in ("seconds", "flops"):
            ours, theirs = getattr(plan.cost, name), getattr(other.plan.cost, name)
            said = f"{theirs / ours:.3g}x {name.replace('flops', 'FLOPs')}"
            assert (said in other.loses) == (ours != theirs)


@pytest.mark.parametrize("limits", [("memory",), ("retain",), ("memory", "retain")])
@pytest.mark.parametrize("slack", [0, 1])
def test_alternatives_say_which_limit_they_break(limits, slack):
    free = chain()
    assert not any("limit" in other.loses for other in free.alternatives(50))
    options = {}
    if "memory" in limits:
        options["memory_limit"] = chain(minimize="peak").cost.peak_bytes + slack
    if "retain" in limits:
        options["retain_limit"] = chain(minimize="retained").cost.retained_bytes + slack
    plan = chain(**options)
    others = plan.alternatives(50)
    assert any("limit" in other.loses for other in others)
    for other in others:
        cost = other.plan.cost
        over_memory = cost.peak_bytes > options.get("memory_limit", cost.peak_bytes)
        over_retain = cost.retained_bytes > options.get("retain_limit", cost.retained_bytes)
        assert ("over the memory limit" in other.loses) == over_memory
        assert ("over the retain limit" in other.loses) == over_retain
        # A limit that is broken is the first thing said.
        assert other.loses.startswith("over the") == (over_memory or over_retain)


def joined(path):
    """Sets of the chain's operands that a path's steps make, as masks."""
    groups, found = [1, 2, 4, 8], set()
    for step in path:
        found.add(sum(groups[i] for i in step))
        groups = [group for i, group in enumerate(groups) if i not in step] + [sum(groups[i] for i in step)]
    return found


PATHS = ([(0, 1), (0, 1), (0, 1)], [(0, 3), (0, 2), (0, 1)], [(1, 2), (0, 1, 2)], [(0, 1, 2, 3)])


@pytest.mark.parametrize("path", [*PATHS, "greedy", by_hand])
def test_alternatives_say_that_their_path_is_not_the_given_one(path):
    plan = chain(optimize=path)
    asked = {"greedy": plan.path, by_hand: by_hand("abcd", "", {}, None)}
    given = joined(path if path in PATHS else asked[path])
    others = plan.alternatives(50)
    assert given <= joined(plan.path)
    assert any("path" in other.loses for other in others) == (path != [(0, 1, 2, 3)])
    for other in others:
        assert ("another path than the given one" in other.loses) == (not given <= joined(other.plan.path))


def test_ordering_children_keeps_the_implementations_that_the_search_chose(torch):
    operands = needing_gradients((512, 4), (8, 4, 4), (512, 16), (8, 16, 4))

    def least(minimize):
        return planner.plan("nj, q[n]jk, nl, q[n]lk -> k", *operands, q=(512,), minimize=minimize, backend="torch").cost

    assert least(lambda cost: cost.bytes_moved).bytes_moved == least("bytes").bytes_moved


def test_minimize_may_be_a_function_of_the_cost():
    def mostly_peak(cost):
        return cost.peak_bytes + cost.seconds

    plan = chain(minimize=mostly_peak)
    assert plan.cost.peak_bytes == chain(minimize="peak").cost.peak_bytes
    assert not plan.proven
    operands = [np.ones(shape) for shape in CHAIN[1]]
    found = planner.contract(CHAIN[0], *operands, minimize=mostly_peak)
    np.testing.assert_array_equal(found, np.linalg.multi_dot(operands))


# -- limits ----------------------------------------------------------------------------------------------


@settings(max_examples=examples(20, 1000))
@given(problems(max_operands=4, max_size=8), st.floats(0, 1.2), st.sampled_from(["memory", "retain", "both"]))
def test_a_limit_holds_or_the_error_names_one_that_does(case, share, which):
    free = plan_of(case)
    limits = {}
    if which != "retain":
        limits["memory_limit"] = int(free.cost.peak_bytes * share)
    if which != "memory":
        limits["retain_limit"] = int(free.cost.retained_bytes * share)
    try:
        plan = plan_of(case, **limits)
    except planner.PlannerLimitError as error:
        named = {name: int(value) for name, value in re.findall(r"(\w+_limit)=(\d+)", str(error).split("; ")[1])}
        assert set(named) == set(limits)
        plan, limits = plan_of(case, **named), named
    assert plan.cost.peak_bytes <= limits.get("memory_limit", plan.cost.peak_bytes)
    assert plan.cost.retained_bytes <= limits.get("retain_limit", plan.cost.retained_bytes)


def test_limits_are_bytes_or_words():
    said = {7: 7, "7": 7, "2 GiB": 2**31, "2GiB": 2**31, "1.5 MB": 1_500_000, "3 kB": 3000, "8 B": 8, None: None}
    for limit, parsed in said.items():
        plan = planner.plan("ij->i", (2, 3), retain_limit=limit, backend="numpy")
        assert plan.options.retain_limit == parsed


# -- running ---------------------------------------------------------------------------------------------


def test_a_plan_refuses_what_it_was_not_made_for():
    plan = planner.plan("q[n]j->nj", np.ones((5, 2)), q=np.array([0, 1]))
    c, q = np.ones((5, 2)), np.array([4, 0])
    np.testing.assert_array_equal(plan(c, q=q), c[q])
    for operands, indices, message in (
        ((c, c), {"q": q}, "takes 1 operands, but 2 were given"),
        ((c[:4],), {"q": q}, r"operand 0 is float64\[4, 2\]"),
        ((c.astype("float32"),), {"q": q}, r"operand 0 is float32"),
        ((c,), {}, "'q' is missing"),
        ((c,), {"q": q, "p": q}, "unknown index array 'p'"),
        ((c,), {"q": q[:1]}, "'q' has shape"),
        ((c,), {"q": [0, 1]}, "'q' is a list"),
        ((c,), {"q": q > 0}, "'q' has dtype bool"),
        ((c,), {"q": q + 4}, r"'q'\[0\] is 8"),
        (([1.0],), {"q": q}, "operand 0 is a list"),
        ((), {"q": q}, "takes 1 operands, but 0 were given"),
    ):
        kind = planner.ShapeError if "were given" in message else planner.PlannerError
        with pytest.raises(kind, match=message):
            plan(*operands, **indices)


@pytest.mark.parametrize(
    ("spec", "shapes", "made_for", "fits", "refused"),
    [
        ("q[nm]j, nk, mk -> nmj", [(5, 2), (1, 3), (4, 3)], (1, 4), (), [(4, 1), (4,), (1, 1, 4), (1, 1), (2, 2)]),
        ("q[nm]j -> nmj", [(5, 2)], (4, 1), (), [(1, 4), (4,), (4, 1, 1)]),
        ("q[nm]j, nm -> nmj", [(5, 2), (4, 3)], (1, 3), (), [(3, 1), (4, 3), (4, 1), (1, 1)]),
        ("q[...]j, ...k -> ...jk", [(5, 2), (4, 3)], (4,), (), [(1, 4), (4, 1), (1,), ()]),
        # Where the ellipsis gets its dimensions from another operand, a leading 1 changes nothing.
        ("q[...]j, ...k -> ...jk", [(5, 2), (3, 4, 3)], (1, 4), [(4,)], [(4, 1), (3, 4), (1, 1), ()]),
        ("q[...]j, ...k -> ...jk", [(5, 2), (3, 4, 3)], (4,), [(1, 4)], [(4, 1), (1, 1, 4)]),
    ],
)
def test_a_plan_takes_index_arrays_as_contract_would(spec, shapes, made_for, fits, refused):
    operands = [np.arange(float(np.prod(shape))).reshape(shape) for shape in shapes]

    def index(shape):
        return np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5

    plan = planner.plan(spec, *operands, q=index(made_for))
    for shape in (made_for, *fits):
        expected = planner.contract(spec, *operands, q=index(shape))
        np.testing.assert_array_equal(plan(*operands, q=index(shape)), expected)
        assert plan(*operands, q=index(shape)).shape == expected.shape
    for shape in refused:
        with pytest.raises(planner.ShapeError) as caught:
            plan(*operands, q=index(shape))
        assert f"'q' has shape {shape}, but the plan was made for {made_for}" in str(caught.value)


def test_a_plan_of_a_resolved_spec_takes_its_shapes_only():
    spec = planner.resolve("q[nm]j, nm -> nmj", (5, 2), (4, 1), q=(4, 1))
    a, b, q = np.ones((5, 2)), np.ones((4, 1)), np.zeros((4, 1), int)
    plan = planner.Plan.from_json(planner.plan(spec, a, b, q=q).to_json())
    np.testing.assert_array_equal(plan(a, b, q=q), np.ones((4, 1, 2)))
    with pytest.raises(planner.ShapeError, match=r"shape \(1, 4\), but the plan was made for \(4, 1\)"):
        plan(a, b, q=q.reshape(1, 4))


# -- printing --------------------------------------------------------------------------------------------

PRINTED = {
    "gathered-matmul": ("nij, q[n]jk -> nik", needing_gradients((128, 1, 64), (32, 64, 64)), {"q": (128,)}),
    "chain": ("ij, jk, kl -> il", [(200, 300), (300, 40), (40, 50)], {}),
    "peak": ("ij, jk, kl -> il", needing_gradients(*[(64, 64)] * 3), {"minimize": "peak"}),
    "message-passing": (
        "q[e]f, e, fg -> p[e]g", [(1000, 32), (5000,), (32, 16)], {"q": (5000,), "p": (5000,), "sizes": {"p": 1000}},
    ),
    "no-steps": ("ij -> ij", [(2, 3)], {}),
    "long": (",".join(["ab", "bc"] * 30) + "->", [(2, 2)] * 60, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_printed_plans_are_those_on_file(name):
    spec, operands, options = PRINTED[name]
    printed = str(planner.plan(spec, *operands, backend="numpy", **options)) + "\n"
    assert_on_file(printed, f"{name}.txt")
    assert all(len(line) < 240 for line in printed.splitlines())


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_planned_and_printed(name):
    workload = WORKLOADS[name].cpu()
    operands, sizes = needing_gradients(*workload.shapes), workload.output_shape
    plan = planner.plan(workload.spec, *operands, sizes=sizes, backend="numpy", **workload.index_shapes)
    text = str(plan)
    assert all(word in text for word in ("naive", "this plan", "FLOPs", "moves", "peak", "retained", "backward"))
    # A table of the numpy backend has the stock rows only: the plan is never worse than the naive one.
    if plan.loop is None:
        assert plan.cost.seconds <= plan.naive_cost.seconds
    else:
        assert worth_cutting(plan.cost, plan.naive_cost)


@pytest.mark.parametrize(
    ("spec", "shapes", "options", "way"),
    [
        ("ni, q[n]i -> n", ((4, 2), (3, 2)), {"q": (4,)}, "take the gathered operands, then contract pairwise"),
        ("ij, jk -> ik", ((2, 3), (3, 4)), {}, "contract pairwise"),
        ("q[n]j -> nj", ((5, 2),), {"q": (3,)}, "take the gathered operands"),
        ("n -> q[n]", ((3,),), {"q": (3,), "sizes": (6,)}, "add into the result"),
        (
            "na, nb -> q[n]ab",
            [(3, 2)] * 2,
            {"q": (3,), "sizes": {"q": 6}},
            "contract pairwise, then add into the result",
        ),
        (
            "q[n] -> p[n]",
            [(5,)],
            {"q": (3,), "p": (3,), "sizes": (6,)},
            "take the gathered operands, then add into the result",
        ),
        ("ij -> ji", ((2, 3),), {}, "the framework's own way"),
    ],
)
def test_the_naive_way_is_told_as_it_is(spec, shapes, options, way):
    plan = planner.plan(spec, *shapes, backend="numpy", **options)
    (line,) = (line for line in str(plan).splitlines() if line.startswith("  naive"))
    assert line.endswith(f"us  {way}")


@pytest.mark.parametrize(
    ("spec", "lonely"),
    [("ni, q[z]ij -> nj", "z"), ("ni, q[n]ij -> nj", ""), ("ni, z q[z] ij -> nj", ""), ("nz, zi -> q[n]i", "")],
)
def test_an_axis_of_one_bracket_alone_is_named(spec, lonely):
    shapes = [(6,) * (len(term.replace(" ", "").replace("q[z]", "q").replace("q[n]", "q")))
              for term in spec.split("->")[0].split(",")]  # fmt: skip
    text = str(planner.plan(spec, *shapes, q=(6,), sizes={"q": 6}, backend="numpy"))
    assert ("z stands in one bracket only" in text) == bool(lonely)


# -- the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "H200"])
def test_each_implementation_has_a_cost_or_a_refusal(device, torch):
    operands = needing_gradients((90, 1, 8), (7, 8, 8))
    plan = planner.plan("nij, q[n]jk -> nik", *operands, q=(90,), backend="torch", device=device)
    assert len(plan.implementations()) == len(plan.steps) >= 2
    table = planner.program.frameworks.load_backend("torch").table
    rows = {name: row for name, row in table.rows.items() if not row.variant_of}
    for step, ways in zip(plan.steps, plan.implementations(), strict=True):
        if isinstance(step.op, Guard):
            assert [way.name for way in ways] == ["mask"]
            continue
        assert [way.name for way in ways if way.chosen] == [step.choice.lowering] == [ways[0].name]
        priced = {way.name: way.cost for way in ways if way.cost is not None}
        assert priced == {choice.lowering: choice.cost for choice in table.choices(step.op, plan.device)}
        assert all(bool(way.refusal) == (way.cost is None) for way in ways)
        assert {way.name for way in ways} >= {name for name, row in rows.items() if not row.stock}
        kind = "cpu" if device else "cuda"
        refused = {way.name for way in ways if way.refusal == f"it runs on {kind}"}
        assert refused == {name for name, row in rows.items() if row.kinds == (kind,) and not row.stock}


FRONT = ("tradeoff", "ij -> i", "8x8", "--grad")
EXPLAIN = ["explain", "ij, jk, kl -> il", "8x9", "9x4", "4x3", "--backend", "numpy"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--grad", "backward"),
        ("--alternatives", "alternatives"),
        ("--implementations", "implementations\n  jk, kl -> lj\n    matmul: "),
    ],
)
def test_explain_prints_the_plan_and_what_is_asked_for(option, said, capsys):
    assert main([*EXPLAIN, option]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ij, jk, kl -> il ")
    assert said in printed
    assert option != "--implementations" or printed.rstrip().endswith("chosen")
    assert main([*EXPLAIN, "--json"]) == 0
    assert planner.Plan.from_json(capsys.readouterr().out).path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "ij, jk -> ik", "8x9", "4x3"), "ShapeError: axis 'j'"),
        (("explain", "i] -> i", "8"), "SpecError"),
        (("explain", "i -> i", "8", "--minimize", "luck"), "minimize='luck'"),
        (("explain", "q[n] -> n", "8"), "'q' is missing"),
        (("explain", "ij -> i", "8xz"), "'8xz' is not a shape: write 128x1x64"),
        (("explain", "ij -> i", "8x"), "'8x' is not a shape"),
        (("explain", "ij -> i", "1.5x2"), "'1.5x2' is not a shape"),
        (("explain", "i -> i", "9" * 5000), "is not a shape"),
        (("explain", "i -> i", "-3"), "sizes are not negative"),
        (("explain", "ij -> ij", "9" * 30 + "x" + "9" * 30), "more than 2^62 elements"),
        (("explain", "i -> ij", "8"), "pass sizes={'j': N}"),
        (("explain", "i -> ij", "8", "--size", "j=many"), "'many' is not a size: write d=100"),
        (("explain", "i -> ij", "8", "--size", "j"), "'j' is not a size of an axis or index array: write d=100"),
        (("explain", "i -> ij", "8", "--size", "=3"), "'=3' is not a size of an axis or index array"),
        (("explain", "i -> ij", "8", "--size", "j=-1"), "must be a non-negative integer, not -1"),
        (("explain", "i -> i", "8", "--size", "i=9"), "sizes= says 9 for axis 'i'"),
        (("explain", "i -> i", "8", "--size", "z=9"), "'z', which is neither an axis nor an index array"),
        (("explain", "i -> ij", "8", "--size", "j=1", "--size", "j=2"), "--size gives 'j' twice"),
        (("explain", "q[n] -> n", "8", "--index", "q=x2"), "'x2' is not a shape"),
        (("explain", "q[n] -> n", "8", "--index", "q"), "'q' is not a shape of an index array: write q=128"),
        (("explain", "q[n] -> n", "8", "--index", "backend=3"), "'backend=3' is not a shape of an index array"),
        (("explain", "q[n] -> n", "8", "--index", "spec=3"), "index arrays are named by single letters"),
        (("explain", "q[n] -> n", "8", "--index", "_=3"), "index arrays are named by single letters"),
        (("explain", "q[n] -> n", "8", "--index", "\ufb01=3"), "index arrays are named by single letters"),
        (("explain", "q[n] -> n", "8", "--index", "q=2", "--index", "q=3"), "--index gives 'q' twice"),
        (("explain", "q[n] -> n", "8", "--index", "q=2x2"), "'q' has 2 dimensions, but its axes are n"),
        (("explain", "i -> i", "8", "--index", "q=2"), "unknown option or index array 'q'"),
        (("explain", ""), "1 input terms, but 0 operands"),
        (("explain", "", "8"), "operand 0 has 1 dimensions, but its axes are ''"),
        (("explain", "i"), "1 input terms, but 0 operands"),
        (("explain", "i -> i", "8", "--dtype", "float13"), "'float13'"),
        (("explain", "i -> i", "8", "--backend", "tensorflow"), "invalid choice: 'tensorflow'"),
        (("explain", "i -> i", "8", "--sizes", "i=8", "--no-such-option"), "--no-such-option"),
        ((*FRONT, "--memory-limit", "1 B"), "PlannerLimitError: no plan was found within memory_limit=1"),
        ((*FRONT, "--retain-limit", "many"), "retain_limit='many' is not a number of bytes"),
        ((*FRONT, "--plot", "/no/such/folder/front.png"), "nothing was drawn to '/no/such/folder/front.png'"),
        ((*FRONT, "--plot", "front.unknown"), "nothing was drawn to 'front.unknown'"),
        (("explain", "i, j -> ij", "99999999", "99999999", "--analyze"), "MemoryError: Unable to allocate"),
        (("explain",), "spec"),
        ((), "command"),
        (("explode",), "invalid choice: 'explode'"),
    ],
)
def test_hostile_command_lines_end_in_one_line(arguments, message, capsys):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    try:
        status = main(list(arguments))
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert status == 2
    assert message in err
    assert len(err) < 1000
    # Only a caret under the place, or the call that it stands for, follows the line.
    first, *more = err.splitlines()
    assert message in first or "SpecError" in first
    assert all(line.startswith("    ") for line in more)
    assert out == ""


def test_axes_on_the_command_line_may_be_any_character(capsys):
    line = ["explain", "×=, q[×]÷ -> ÷=_", "4x3", "5x2", "--index", "q=4", "--size", "_=7", "--size", "==3"]
    assert main(line) == 0
    assert "×=, q[×]÷ -> ÷=_" in capsys.readouterr().out
    assert main([*line, "--json"]) == 0
    assert planner.Plan.from_json(capsys.readouterr().out).resolved.spec.output_shape == (2, 3, 7)


def test_a_plan_is_printed_on_an_ascii_terminal_too():
    program = 'from planner.cli import main\nmain(["explain", "q[n] -> n", "8", "--index", "q=2"])'
    assert "this plan" in run_python(program, PYTHONIOENCODING="ascii")


def test_within_a_limit_only_the_step_that_is_near_it_is_lean(torch):
    """Seed 000: both gradients take 67 MB; the forward is far from the limit, and keeps its large buffers."""
    operands = needing_gradients((131072, 1, 64), (2048, 64, 64))

    def planned(limit):
        return planner.plan("nij, q[n]jk -> nik", *operands, q=(131072,), backend="torch", memory_limit=limit)

    assert [step.choice.lowering for step in planned("80 MB").steps] == ["grouped matmul", "both grouped gradients"]
    tight = planned("74 MB")
    assert [step.choice.lowering for step in tight.steps] == ["grouped matmul", "both grouped gradients, half buffers"]
    assert tight.cost.peak_bytes <= 74 * 10**6
    assert tight.cost.seconds <= 1.3 * planned(None).cost.seconds
    leanest = planned(71 * 10**6)
    assert leanest.steps[0].choice.lowering == "grouped matmul"
    assert leanest.cost.backward.peak_bytes <= 71 * 10**6


def test_a_plan_is_bound_once(monkeypatch):
    """What JAX compiles for a loop is kept with the function that runs it; another x64 mode or autocast binds anew."""
    backend = planner.program.frameworks.load_backend("numpy")
    plan = planner.plan("ij,jk->ik", (2, 3), (3, 2), backend="numpy")
    bound, bind = [], type(backend).bind
    monkeypatch.setattr(type(backend), "bind", lambda self, plan: bound.append(plan) or bind(self, plan))
    x, y = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
    for _ in range(3):
        assert (plan(x, y) == 3).all()
    assert bound == [plan]
    again = planner.Plan.from_json(plan.to_json())
    assert again == plan
    again(x, y)
    assert len(bound) == 2


@pytest.mark.parametrize(
    ("order", "terms", "sizes", "nanoseconds"),
    [
        ("ak", ("ak", "ak"), {"a": 100, "k": 3}, 0),  # one run
        ("ak", ("ak", "k"), {"a": 100, "k": 3}, 30 + 300 * 1.3),  # a run for each row, in one block
        ("akl", ("ak", "al"), {"a": 100, "k": 3, "l": 3}, 100 * 30 + 900 * 1.3),
        ("akl", ("ak", "al"), {"a": 100, "k": 16, "l": 16}, 100 * 30 + 1600 * 2),  # vectors
        ("akl", ("ak",), {"a": 100, "k": 3, "l": 3}, 300 * 10),  # sums of neighbours
        ("akl", ("al",), {"a": 100, "k": 3, "l": 3}, 100 * 30 + 900 * 1.3),
        ("abk", ("abk", "k"), {"a": 10, "b": 10, "k": 64}, 30 + 100 * 2),  # a and b are one
        ("abk", ("bak", "ab"), {"a": 10, "b": 10, "k": 64}, 10 * 30 + 100 * 2),  # a and b lie otherwise
        ("abk", ("akb", "ab"), {"a": 10, "b": 10, "k": 64}, 10 * 30 + 100 * 2 + 6400 * 0.5),  # strided runs
        ("a1k", ("ak", "ak"), {"a": 10, "1": 1, "k": 3}, 0),
    ],
)
def test_short_runs_take_time(order, terms, sizes, nanoseconds):
    spec = Spec((tuple(order),), (), tuple(sorted(sizes.items())))
    device = dataclasses.replace(CPU, loop_seconds=3e-8)
    seconds = short_run_seconds(tuple(order), [tuple(term) for term in terms], spec, device)
    assert seconds == pytest.approx(nanoseconds * 1e-9)


@pytest.mark.parametrize(
    ("order", "out", "sizes", "nanoseconds"),
    [
        ("abcd", "bd", (64, 8, 64, 16), 512 * 30 + 2**19 * (0.6 + 7 / 64)),  # two runs are summed, none innermost
        ("abcd", "ac", (64, 8, 64, 16), 2**15 * 10 + 2**12 * 37),  # the innermost run is summed, and another
        ("abcd", "cd", (64, 8, 64, 16), 30 + 512 * 2),  # one run, of neighbours
        ("abc", "ac", (64, 8, 64), 64 * 30 + 512 * 2),
        ("abcd", "bd", (64, 8, 0, 16), 512 * 30),  # nothing is summed
    ],
)
def test_sums_over_two_runs_go_element_by_element(order, out, sizes, nanoseconds):
    spec = Spec((tuple(order),), tuple(out), tuple(zip(order, sizes, strict=True)))
    device = dataclasses.replace(CPU, loop_seconds=3e-8)
    seconds = short_run_seconds(tuple(order), [tuple(out)], spec, device)
    assert seconds == pytest.approx(nanoseconds * 1e-9)


@pytest.mark.parametrize(
    ("order", "sizes", "times"),
    [
        ("cba", (32768, 4, 32), 16),  # each line is read for each of its 16 elements
        ("cadb", (256, 128, 32, 4), 4),  # for four of `c`, of which `d` is read at once
        ("acb", (4096, 32, 32), 1),  # what is copied in between stays in the cache
        ("ba", (131072, 32), 1),  # torch copies in blocks
    ],
)
def test_copies_read_lines_of_the_cache_again(order, sizes, times):
    term = tuple("abcd"[: len(sizes)])
    spec = Spec((term,), (), tuple(zip(term, sizes, strict=True)))
    device = dataclasses.replace(CPU, loop_seconds=3e-8)
    seconds = scattered_read_seconds(tuple(order), term, None, spec, 4, device)
    assert seconds == pytest.approx(math.prod(sizes) * (times - 1) / 16 * 2.5e-9)


@pytest.mark.parametrize(
    ("terms", "layouts", "follows", "nanoseconds"),
    [
        (("jmk", "jnmk"), (), False, 8 * 30 + 1024 * 2),
        (("jkm", "jnmk"), (), False, 1024 * 30 + 4096 * 2 + 65536 * 0.5),  # k is strided in `jkm`
        (("jkm", "jnmk"), (Layout(((0, 2, 1),)), None), False, 8 * 30 + 1024 * 2),  # which lies as `jmk`
        (("jmk", "jnmk"), (), True, 8 * 30 + 1024 * 2),
    ],
)
def test_runs_are_short_and_strided_by_how_operands_lie(terms, layouts, follows, nanoseconds):
    spec = Spec((tuple("jnmk"),), (), (("j", 8), ("k", 16), ("m", 4), ("n", 128)))
    device = dataclasses.replace(CPU, loop_seconds=3e-8)
    seconds = short_run_seconds(tuple("jnmk"), list(map(tuple, terms)), spec, device, layouts, follows)
    assert seconds == pytest.approx(nanoseconds * 1e-9)


@pytest.mark.parametrize(
    ("given", "name"),
    [("float32", "float32"), ("torch.float16", "float16"), (np.float32, "float32"), (np.dtype("int8"), "int8"),
     (float, "float64"), ("half", "float16"), (complex, "complex128")],
)  # fmt: skip
def test_dtypes_are_given_by_name_or_as_frameworks_have_them(given, name):
    assert dtype_name(given) == name


NO_BFLOAT16 = """
import numpy as np, planner
half, x = planner.Operand((2,), "bfloat16"), np.ones(2, "float32")
print(planner.plan("i, i -> ", half, half, backend="numpy").dtype)
for call in (
    lambda: planner.plan("i, i -> ", half, (2,), backend="numpy"),
    lambda: planner.contract("i, i -> ", x, x, dtype="bfloat16"),
):
    try:
        call()
    except planner.PlannerTypeError as error:
        print(error)
"""


def test_numpy_has_no_bfloat16_of_its_own():
    """Only a process in which no package has added it can tell."""
    planned, *refused = run_python(NO_BFLOAT16).splitlines()
    assert planned == "bfloat16"
    assert refused == ["NumPy has no bfloat16 until ml_dtypes is imported: import it, or take float32"] * 2


def test_dtypes_of_torch_and_jax_have_names(torch, jnp):
    assert dtype_name(torch.bfloat16) == dtype_name(jnp.bfloat16) == "bfloat16"
    assert dtype_name(torch.double) == dtype_name(jnp.dtype("float64")) == "float64"
    with pytest.raises(planner.PlannerError, match="dtype 'object' is not supported"):
        dtype_name(object)


def test_a_limit_that_binds_nothing_leaves_the_plan_proven():
    free, wide = chain(), chain(memory_limit="1 GB", retain_limit="1 GB")
    assert (wide.origin, wide.proven, wide.path) == ("exact, time", True, free.path)


def test_a_printed_plan_says_what_each_step_keeps():
    """The intermediates that gradients read, each by the step that reads it."""
    assert [line.split("us")[-1].strip() for line in str(chain()).splitlines()[5:8]] == ["", "bd, 48 B", "eb, 108 B"]


def test_counts_have_three_digits():
    found = [count_text(x) for x in (0, 999, 1000, 999_499, 999_500, 10**6, 1_234_567, 10**21)]
    assert found == ["0", "999", "1 k", "999 k", "1 M", "1 M", "1.23 M", "1e+03 E"]


STORED = sorted((GOLDEN / "plans").glob("*.json"))


def read_written(text):
    """Read JSON that was written now, without the rates that devices had not when the stored plans were written."""

    def without(fields):
        if fields.get("type") == "Device":
            assert all(fields.pop(name) == 0.0 for name in ("group_seconds", "kernel_seconds"))
        return fields

    return json.loads(text, object_hook=without)


LOOPS = [path for path in STORED if path.stem.startswith("loop")]


@pytest.mark.parametrize("path", [path for path in STORED if path not in LOOPS], ids=lambda path: path.stem)
def test_a_plan_that_an_earlier_version_wrote_is_read_and_written_alike(path):
    """Written by the version of 2026-11-23, before classes and modules were renamed, and before guards were steps."""
    plan = planner.Plan.from_json(path.read_text())
    assert type(plan) is planner.Plan
    written, stored = read_written(plan.to_json()), json.loads(path.read_text())
    assert stored.pop("loop") is None
    if plan.programs.has_guards:
        now, before = written.pop("programs"), stored.pop("programs")
        for program in ("forward", "backward"):
            steps = [step for step in now[program]["steps"] if step["choice"]["lowering"] != "mask"]
            for step, old in zip(steps, before[program]["steps"], strict=True):
                assert (step["op"], step["choice"]) == (old["op"], old["choice"])
    assert written == stored
    assert planner.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_a_loop_that_an_earlier_version_wrote_is_read_as_a_step(path, torch):
    """It stood beside the tree and the programs of a slice, and the programs had a step without an implementation."""
    plan, stored = planner.Plan.from_json(path.read_text()), json.loads(path.read_text())
    written = read_written(plan.to_json())
    loop, tree, programs = (stored.pop(name) for name in ("loop", "tree", "programs"))
    body = written.pop("tree")["op"]["bodies"][0]
    assert (str(plan.loop), body["tree"]) == (
        programs["forward"]["steps"][0]["choice"]["lowering"],
        loop["body"]["tree"],
    )
    assert body["programs"] == loop["body"]["programs"]
    assert len(plan.loop.bodies) == len(slice_counts(plan.loop.axes, plan.resolved.spec))
    assert resize_tree(plan.loop.body.tree, dict(plan.resolved.spec.sizes)) == decode(tree)
    now = written.pop("programs")
    assert written == stored
    # Index arrays in range count in peaks by now.
    start = 0 if plan.backend == "jax" else index_bytes(plan.resolved.spec)
    for cost in filter(None, (programs["cost"], programs["cost"]["forward"], programs["cost"]["backward"])):
        cost["peak_bytes"] += start
    assert now["cost"] == programs["cost"]
    for program in ("forward", "backward"):
        old_steps, new_steps = ((x[program] or {"steps": []})["steps"] for x in (programs, now))
        for old, new in zip(old_steps, new_steps, strict=True):
            assert (old["live_bytes"] + start, old["choice"]["cost"]) == (new["live_bytes"], new["choice"]["cost"])
    assert planner.Plan.from_json(plan.to_json()) == plan
    assert type(plan.loop.body) is planner.Plan
    # It runs, and gives what a new plan gives.
    array = torch.tensor if plan.backend == "torch" else np.asarray
    operands = [array(np.ones(operand.shape, operand.dtype)) for operand in plan.operands]
    indices = {name: array(np.full(shape, 2)) for name, shape in plan.index_shapes}
    expected = planner.contract(plan.text, *operands, **indices, index_mode=plan.index_mode)
    assert np.allclose(plan(*operands, **indices), expected)


def test_stored_plans_cover_each_kind():
    plans = [planner.Plan.from_json(path.read_text()) for path in STORED]
    ops = {type(step.op).__name__ for plan in plans for step in plan.steps}
    assert ops == {"Einsum", "Cast", "JointGradient", "Guard", "Loop", "LoopGradient"}
    assert {plan.backend for plan in plans} == {"torch", "jax", "numpy"}
    assert any(plan.loop for plan in plans)
    assert any(plan.keep == "some" for plan in plans)


def test_a_plan_that_an_earlier_version_wrote_runs():
    plan = planner.Plan.from_json((GOLDEN / "plans" / "chain-numpy.json").read_text())
    a, b, c = (np.arange(math.prod(o.shape), dtype=o.dtype).reshape(o.shape) % 3 for o in plan.operands)
    assert (plan(a, b, c) == a @ b @ c).all()


@pytest.mark.parametrize(
    ("spec", "shapes", "rows", "taken"),
    [
        ("bhts, p[bt]shd -> bhd", ((4, 4, 8, 8), (16, 8, 4, 16)), (4, 8), "p[bt]shd -> btshd"),
        ("bhij, p[ij]h -> bhij", ((8, 4, 16, 16), (49, 4)), (16, 16), "p[ij]h -> hij"),  # runs of four elements
        ("bhij, p[ij] -> bhij", ((8, 4, 16, 16), (49,)), (16, 16), "p[ij] -> ij"),
    ],
)
def test_long_runs_stay_together_as_rows_are_taken(spec, shapes, rows, taken):
    """XLA wrote each element elsewhere: 1.7 times as long as einsum."""
    plan = planner.plan(spec, *shapes, p=rows, backend="numpy")
    assert str(plan.steps[0].op.spec) == taken
