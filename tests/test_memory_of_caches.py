"""Caches are bounded by bytes, and tell about how many they hold."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import opt_einsum
import pytest

import planner
from planner import api, members
from planner.language import cached
from planner.search import family


@pytest.fixture(autouse=True)
def empty():
    """No test meets what another one planned."""
    planner.caches().clear()
    yield
    planner.caches().clear()


def call_chain(operands, size):
    """Contract a chain of small matrices, of which the first has so many rows."""
    letters = [opt_einsum.get_symbol(i) for i in range(operands + 1)]
    spec = ",".join(map("".join, zip(letters, letters[1:], strict=False))) + f"->{letters[0]}{letters[-1]}"
    planner.contract(spec, np.ones((size, 2)), *[np.ones((2, 2))] * (operands - 1), optimize="greedy")


def call_gather(torch, size):
    """Contract gathered rows of so many columns with others, and compute the gradients."""
    pool, rows = torch.ones(50, size, requires_grad=True), torch.ones(20, size, requires_grad=True)
    planner.contract("q[n]c, nc -> n", pool, rows, q=torch.arange(20), minimize="flops").sum().backward()


def held_by(call, sizes):
    """The bytes that calls of some sizes leave in memory, and those that `planner.caches()` tells."""
    call(2)
    gc.collect()
    before = planner.caches().bytes
    tracemalloc.start()
    for size in sizes:
        call(size)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held, planner.caches().bytes - before


@pytest.mark.parametrize(("operands", "calls"), [(3, 60), (12, 12), (100, 4), (400, 2)])
def test_bytes_of_plans_are_told(operands, calls):
    """Each plan of 400 operands holds a megabyte, and once counted as 22 kB."""
    held, told = held_by(lambda size: call_chain(operands, size), range(3, 3 + calls))
    assert 0.5 < told / held < 2


def test_bytes_of_gathers_are_told(torch):
    held, told = held_by(lambda size: call_gather(torch, size), range(3, 33))
    assert 0.5 < told / held < 2


def test_shapes_without_a_family_hold_no_more_than_their_budget(torch, monkeypatch):
    """A twentieth of the promise, 6,000 shapes in 60 MB, and of the budgets."""
    monkeypatch.setattr(api, "_MOST_ALONE", api._MOST_ALONE // 20)
    monkeypatch.setattr(cached, "MOST_IN_ALL", cached.MOST_IN_ALL // 20)
    held, told = held_by(lambda size: call_gather(torch, size), range(3, 123))
    assert max(held, told) < 3_000_000
    assert 10 < planner.caches().plans < 50
    assert len(api._RUNNERS) == len(api._ALONE)


def test_large_plans_take_the_place_of_many(monkeypatch):
    monkeypatch.setattr(api, "_MOST_ALONE", 500_000)
    for size in range(2, 12):
        call_chain(3, size)
    assert planner.caches().plans == 10
    call_chain(200, 2)
    assert planner.caches().plans == 4
    call_chain(400, 2)  # more than the budget: the newest plan stays
    assert planner.caches().plans == 1
    call_chain(3, 2)
    assert planner.caches().plans == 1


def test_families_hold_no_more_than_their_budget(monkeypatch):
    w = np.ones((20, 20), np.float32)
    for rows in (32, 64, 128, 256, 512):
        planner.contract("ij, jk, kl -> il", np.ones((rows, 20), np.float32), w, w)
    families = planner.caches().families
    assert families == len(members.BOUND) == 5
    planner.caches().clear()
    monkeypatch.setattr(family, "MOST_BYTES", 20_000)
    monkeypatch.setattr(members, "MOST_BYTES", 40_000)
    for rows in (32, 64, 128, 256, 512):
        planner.contract("ij, jk, kl -> il", np.ones((rows, 20), np.float32), w, w)
    assert 1 <= len(family.FAMILIES) == len(family.HELD) < 5
    assert 1 <= len(members.BOUND) == len(members.HELD) < 5
    assert planner.caches().held["families"] <= 20_000


def test_what_is_entered_again_counts_as_new():
    held = {}
    for key, count in (("a", 50), ("b", 50)):
        assert cached.enter_bytes(held, key, count, 100) == []
    assert cached.enter_bytes(held, "a", 60, 100) == ["b"]
    assert held == {"a": 60}
