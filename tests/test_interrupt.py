"""Ctrl-C during a search: it gives the best plan or front so far, marked; if there is none yet, it goes through."""

from __future__ import annotations

import importlib.util
import random
import re

import numpy as np
import pytest
from laws import needing_gradients

import planner
from planner import Operand, members
from planner.bench.planning import gathers
from planner.search import lean
from planner.search.exact.dynamic import Search
from planner.search.exact.lazy import LazySearch
from planner.search.family import FAMILIES
from planner.search.space import SearchSpace

SPEC = "ab,bc,cd,de->ae"
OPERANDS = [np.arange(float(n * m)).reshape(n, m) % 3 for n, m in ((4, 3), (3, 6), (6, 2), (2, 5))]


def interrupt(monkeypatch, at, methods=((Search, "extend"), (LazySearch, "price"))):
    """Raise KeyboardInterrupt at a call of the searches' methods, once; return a list that grows with each call."""
    calls = []

    def count(kind, method):
        plain = getattr(kind, method)

        def counted(search, *arguments):
            calls.append(method)
            if len(calls) == at:
                raise KeyboardInterrupt
            return plain(search, *arguments)

        monkeypatch.setattr(kind, method, counted)

    for kind, method in methods:
        count(kind, method)
    return calls


def steps(monkeypatch, spec=SPEC, operands=OPERANDS, **options):
    """The number of steps that the searches price or score."""
    with monkeypatch.context() as patched:
        calls = interrupt(patched, None)
        planner.plan(spec, *operands, **options)
    return len(calls)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("options", [{}, {"minimize": "bytes"}, {"memory_limit": 10**6}], ids=str)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_ctrl_c_after_the_first_search_gives_a_plan(monkeypatch, gradients, options, backend):
    """A program is built at each of the points where it comes."""
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    spec, shapes, indices = gathers(4, random.Random(0))
    operands = [Operand(shape, requires_grad=gradients) for shape in shapes]

    def plan_of(at):
        planner.caches().clear()
        with monkeypatch.context() as patched:
            calls = interrupt(patched, at, ((SearchSpace, "programs"),))
            return planner.plan(spec, *operands, backend=backend, **options, **indices), len(calls)

    whole, count = plan_of(None)
    for at in range(1, count + 1):
        plan, _ = plan_of(at)
        assert plan.interrupted
        assert not plan.proven
        assert planner.plan(spec, *operands, backend=backend, **options, **indices).cost == whole.cost


def test_ctrl_c_leaves_the_plan_that_keeps_inputs_alone(monkeypatch):
    """It may be the only one within a limit."""
    operands = [Operand(shape, requires_grad=True) for shape in ((40, 30), (30, 60), (60, 20), (20, 50))]
    interrupt(monkeypatch, 1, ((LazySearch, "price"),))
    plan = planner.plan(SPEC, *operands, backend="numpy", memory_limit=27_800)
    assert plan.interrupted
    assert plan.cost.peak_bytes <= 27_800


# The best tree of the chain is the first one that a search for the least time prices.
STAR = "abc,abd,abe,abf,abg->acd", [np.arange(9.0 * n).reshape(3, 3, n) % 3 for n in (2, 4, 3, 5, 2)]


@pytest.mark.parametrize("objective", ["time", "peak"])
@pytest.mark.parametrize("limit", [None, 10**9])
def test_ctrl_c_gives_the_best_so_far_or_goes_through(monkeypatch, objective, limit):
    spec, operands = (SPEC, OPERANDS) if objective == "peak" else STAR
    options = {"minimize": objective, "memory_limit": limit, "optimize": "optimal"}
    whole = planner.plan(spec, *operands, **options)
    outcomes = []
    for at in range(1, steps(monkeypatch, spec, operands, **options) + 1, 3):
        with monkeypatch.context() as patched:
            interrupt(patched, at)
            try:
                plan = planner.plan(spec, *operands, **options)
            except KeyboardInterrupt:
                outcomes.append("through")
                continue
        np.testing.assert_array_equal(plan(*operands), np.einsum(spec, *operands))
        outcomes.append(plan.origin.split(":")[0])
        assert outcomes[-1] == "interrupted"
        assert not plan.proven
        assert "interrupted: " in str(plan)
        assert planner.Plan.from_json(plan.to_json()) == plan
        assert plan.cost.seconds >= whole.cost.seconds or objective == "peak"
    # Nothing is there before the greedy path is priced, which is done after Ctrl-C too where it comes early enough. The
    # last search of all prices the naive way, and without it there is no plan.
    assert re.fullmatch("t*i+t*", "".join(outcome[0] for outcome in outcomes))


def test_an_interrupted_search_that_is_within_no_limit_goes_through(monkeypatch):
    options = {"memory_limit": planner.plan(SPEC, *OPERANDS, minimize="peak").cost.peak_bytes}
    interrupt(monkeypatch, steps(monkeypatch, minimize="time") // 2)
    try:
        plan = planner.plan(SPEC, *OPERANDS, **options)
    except KeyboardInterrupt:
        return
    assert plan.cost.peak_bytes <= options["memory_limit"]


def test_ctrl_c_among_loops_over_slices_is_never_lost(monkeypatch):
    """The plan of a slice is searched for too."""
    spec, shapes, options = "ij,jk,kl->il", ((40, 30), (30, 40), (40, 20)), {"backend": "numpy", "memory_limit": 5000}

    def plan(at):
        """The plan if Ctrl-C is pressed at a step, and how many steps were scored; None if it went through."""
        with monkeypatch.context() as patched:
            calls = interrupt(patched, at)
            try:
                return planner.plan(spec, *shapes, **options), len(calls)
            except KeyboardInterrupt:
                return None, len(calls)

    whole, scored = plan(None)
    assert whole.loop is not None
    found = [plan(at)[0] for at in range(1, scored + 1, max(1, scored // 40))]
    assert all(one is None or one.origin.startswith("interrupted") for one in found)
    assert all(one is None or one.cost.peak_bytes <= 5000 for one in found)


@pytest.mark.parametrize("at", [1, 200, 400])
def test_ctrl_c_gives_the_front_so_far(monkeypatch, at):
    interrupt(monkeypatch, at, [(Search, "offer"), (LazySearch, "price")])
    assert len(planner.tradeoff(SPEC, *needing_gradients(*(x.shape for x in OPERANDS)), backend="numpy")) >= 1


@pytest.mark.parametrize("case", ["star", "member"])
def test_contract_plans_a_call_anew_whose_search_ctrl_c_ended(monkeypatch, case):
    spec, operands = STAR if case == "star" else (MEMBER[0], [np.ones(shape, np.float32) for shape in MEMBER[1]])
    searched, ended = steps(monkeypatch, spec, operands), 0
    for at in range(searched // 2, searched + 1, max(1, searched // 20)):
        planner.caches().clear()
        with monkeypatch.context() as patched:
            interrupt(patched, at)
            try:
                result = planner.contract(spec, *operands)
            except KeyboardInterrupt:
                continue
        ended += 1
        with monkeypatch.context() as patched:
            calls = interrupt(patched, None)
            np.testing.assert_array_equal(planner.contract(spec, *operands), result)
        assert calls, "the plan of a search that was interrupted was taken again"
    assert ended


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_ctrl_c_after_a_lean_plan_is_found_gives_that_plan(monkeypatch):
    plain = lean.prefer_autograd

    def prefer(space, best, most=None):
        if most is not None:
            raise KeyboardInterrupt
        return plain(space, best)

    monkeypatch.setattr(lean, "prefer_autograd", prefer)
    plan = planner.plan(
        "pijk, i, j -> k", *needing_gradients((4, 64, 9, 32), (64,), (9,)), backend="torch", device="cpu"
    )
    assert plan.origin.startswith("interrupted: exact, time, as lean as einsum")
    assert plan.cost.retained_bytes <= plan.naive_cost.retained_bytes


# Judging its family takes a search of several steps.
MEMBER = "fbaecd,af,ebh,dgc->gh", [(36, 8, 32, 32, 8, 12), (32, 36), (32, 8, 36), (12, 16, 8)]


@pytest.mark.parametrize("run", [False, True], ids=["plan", "contract"])
def test_a_family_whose_judgement_ctrl_c_ended_is_not_remembered(monkeypatch, run):
    spec, shapes = MEMBER
    operands = [np.ones(shape, np.float32) for shape in shapes]
    planner.caches().clear()
    whole = planner.plan(spec, *operands)
    assert planner.caches().families
    planner.caches().clear()
    steps_in_all = steps(monkeypatch, spec, operands)
    ended = 0
    for at in range(1, steps_in_all + 1, max(1, steps_in_all // 25)):
        planner.caches().clear()
        with monkeypatch.context() as patched:
            calls = interrupt(patched, at)
            try:
                plan = planner.contract(spec, *operands) if run else planner.plan(spec, *operands)
            except KeyboardInterrupt:
                continue
        ended += 1
        assert run or plan.origin.startswith("interrupted")
        assert len(calls) < at + steps_in_all / 2, "another search began after Ctrl-C"
        assert not any(members.BOUND.values())
        assert not any(family.interrupted for family in FAMILIES.values())
        assert planner.plan(spec, *operands) == whole
    assert ended > 10


def test_ctrl_c_while_a_gap_is_searched_goes_through(monkeypatch):
    shapes = [(8, 16, 36, 20, 20), (36, 20, 20, 20), (8,), (8, 20, 32), (32, 20, 8)]
    planner.caches().clear()
    plan = planner.plan("bigad,ghca,b,fce,edf->hi", *shapes, backend="numpy")
    assert plan.cost.bound is None
    with monkeypatch.context() as patched:
        interrupt(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            _ = plan.gap
    calls = interrupt(monkeypatch, None)
    assert plan.gap == 0
    assert calls
    calls.clear()
    assert plan.gap == 0
    assert not calls
    planner.caches().clear()
    assert plan.gap == 0
    assert calls
