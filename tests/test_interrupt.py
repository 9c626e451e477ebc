"""Ctrl-C during a search: the best plan so far is given, marked; or there is none yet, and it goes through."""

from __future__ import annotations

import re

import numpy as np
import pytest

import planner
from planner.search.dynamic import Search

SPEC = "ab,bc,cd,de->ae"
OPERANDS = [np.arange(float(n * m)).reshape(n, m) % 3 for n, m in ((4, 3), (3, 6), (6, 2), (2, 5))]
EXPECTED = np.linalg.multi_dot(OPERANDS)


class Interrupts:
    """Raises KeyboardInterrupt at the given scored step, once."""

    def __init__(self, monkeypatch, at):
        self.calls = 0
        plain = Search.extend

        def extend(search, *arguments):
            self.calls += 1
            if self.calls == at:
                raise KeyboardInterrupt
            return plain(search, *arguments)

        monkeypatch.setattr(Search, "extend", extend)


def steps(monkeypatch, **options):
    with monkeypatch.context() as patched:
        count = Interrupts(patched, None)
        planner.plan(SPEC, *OPERANDS, **options)
    return count.calls


@pytest.mark.parametrize("objective", ["time", "peak"])
@pytest.mark.parametrize("limit", [None, 10**9])
def test_ctrl_c_gives_the_best_so_far_or_goes_through(monkeypatch, objective, limit):
    options = {"minimize": objective, "memory_limit": limit}
    whole = planner.plan(SPEC, *OPERANDS, **options)
    outcomes = []
    for at in range(1, steps(monkeypatch, **options) + 1, 3):
        with monkeypatch.context() as patched:
            Interrupts(patched, at)
            try:
                plan = planner.plan(SPEC, *OPERANDS, **options)
            except KeyboardInterrupt:
                outcomes.append("through")
                continue
        np.testing.assert_array_equal(plan(*OPERANDS), EXPECTED)
        outcomes.append(plan.origin.split(":")[0])
        assert outcomes[-1] == "interrupted"
        assert not plan.proven
        assert "not proven" in str(plan)
        assert planner.Plan.from_json(plan.to_json()) == plan
        assert plan.cost.seconds >= whole.cost.seconds or objective == "peak"
    # The greedy search comes first: nothing is there before its end, and something is ever after. The last search of
    # all prices the naive way, and without it there is no plan.
    assert re.fullmatch("t+i+t*", "".join(outcome[0] for outcome in outcomes))


def test_an_interrupted_search_that_is_within_no_limit_goes_through(monkeypatch):
    options = {"memory_limit": planner.plan(SPEC, *OPERANDS, minimize="peak").cost.peak_bytes}
    Interrupts(monkeypatch, steps(monkeypatch, minimize="time") // 2)
    try:
        plan = planner.plan(SPEC, *OPERANDS, **options)
    except KeyboardInterrupt:
        return
    assert plan.cost.peak_bytes <= options["memory_limit"]
