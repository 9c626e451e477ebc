"""Threads share every cache: each call gives its own result, also while what another one needs is being forgotten."""

from __future__ import annotations

import concurrent.futures
import random
import sys
import threading

import numpy as np
import pytest
from conftest import examples
from engines import ENGINES
from laws import compare, values_and_gradients

import planner
from planner import api
from planner.testing import Problem

THREADS = 32

GROUPED = Problem("nij, q[n]jk -> nik", ((40, 1, 8), (3, 8, 8)), indices={"q": np.arange(40) % 3}, max_value=2)
# Of one spec several shapes, dtypes and modes, which are keys of their own.
PROBLEMS = [
    *(Problem("ij, jk -> ik", ((2, n), (n, 3)), seed=n) for n in (1, 2, 3, 4)),
    *(Problem("ij, jk -> ik", ((2, 3), (3, 3)), dtypes=(d, d)) for d in ("float64", "int32")),
    *(
        Problem("q[n]j, jk -> nk", ((4, 3), (3, 2)), indices={"q": np.array(v)}, index_mode=mode)
        for mode, v in (("raise", [0, -1, 2]), ("drop", [0, 9, 2]), ("clip", [0, 9, -3]), ("raise", [3]))
    ),
    Problem("nj -> q[n]j", ((3, 2),), sizes={"q": 4}, indices={"q": np.array([3, 0, 3])}),
    GROUPED,
    Problem("ij, jk, kl -> il", ((2, 3), (3, 4), (4, 2))),
    Problem("ii -> i", ((3, 3),)),
]
BAD = ("q[n]j -> nj", np.ones((4, 3), np.float32), np.array([0, 9]))


@pytest.fixture
def impatient():
    """Threads take turns after almost every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# A cache of three runners forgets in almost every call what another thread looks for.
@pytest.mark.parametrize("limit", [4096, 3])
@pytest.mark.parametrize(("framework", "ci"), [("numpy", 500), ("torch", 25), ("jax", 5)])
def test_threads_share_caches(framework, ci, limit, impatient, monkeypatch, jax_in_a_hurry):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    monkeypatch.setattr(api, "_CACHE_LIMIT", limit)
    api._RUNNERS.clear()
    # Types of 64 bits are off in JAX; it compiles what each problem needs, so it gets half of them.
    problems = PROBLEMS if framework != "jax" else [p for p in PROBLEMS if "float64" not in p.dtypes][::2]
    engine = ENGINES[framework]()
    # The result and the gradients of each; NumPy has none.
    asks = [values_and_gradients(engine, problem)[0]._replace(jitted=False) for problem in problems]
    # Where runners are forgotten all the time, every call plans: fewer calls say as much.
    calls, together = examples(ci if limit > 3 else ci // 10 + 1, 500), threading.Barrier(THREADS, timeout=60)

    def work(number):
        rng = random.Random(number)
        together.wait()
        for done in range(calls):
            at = rng.randrange(len(problems))
            compare(engine, [problems[at]], [asks[at]])
            if framework == "numpy" and done % 50 == 0:
                with pytest.raises(planner.IndexRangeError, match=r"'q'\[1\] is 9"):
                    planner.contract(BAD[0], BAD[1], q=BAD[2])
        return calls

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(work, range(THREADS))) == THREADS * calls
    assert len(api._RUNNERS) <= limit + THREADS


def test_room_is_made_while_another_thread_makes_some(monkeypatch):
    """Python refuses to walk a dictionary that changed; the threads above meet it now and then."""

    class Changing(dict):
        walks = 0

        def __iter__(self):
            self.walks += 1
            if self.walks == 1:
                raise RuntimeError("dictionary changed size during iteration")
            return super().__iter__()

    found = Changing()
    monkeypatch.setattr(api, "_CACHE_LIMIT", 1)
    monkeypatch.setattr(api, "_RUNNERS", found)
    for n in (1, 2, 3):
        assert (planner.contract("ij -> i", np.ones((2, n))) == n).all()
    assert (len(found), found.walks) == (1, 3)


def test_the_answers_differ():
    """A result taken for another one's would show."""
    assert len({problem.expected().tobytes() for problem in PROBLEMS}) == len(PROBLEMS)


def test_threads_share_a_plan_and_a_prepared_index(impatient, torch):
    engine = ENGINES["torch"]()
    operands, indices = engine.operands(GROUPED), engine.indices(GROUPED)
    plan = engine.plan(GROUPED, operands, indices)
    rows = indices["q"], planner.group(indices["q"], 3)
    asks = [values_and_gradients(engine, GROUPED, lambda xs, _, q=q: plan(*xs, q=q)) for q in rows]

    def work(number):
        for _ in range(examples(10, 300)):
            compare(engine, [GROUPED], asks[number % 2])

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
