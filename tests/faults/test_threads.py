"""Threads share every cache: each call gives its own result, also while what another one needs is being forgotten."""

from __future__ import annotations

import concurrent.futures
import inspect
import itertools
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
from planner.program.calls import Member
from planner.program.frameworks import load_backend
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
    """Threads take turns fifty times as often as usual. With 1e-5 they once did little else for twenty minutes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
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


def run_at_each_instruction(function, prepare, call, meanwhile):
    """For each instruction of a function prepare and call, and run `meanwhile` before it, as another thread would."""

    codes = [function.__code__, *filter(inspect.iscode, function.__code__.co_consts)]

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                meanwhile(prepared)
        return trace

    before, left, prepared = sys.gettrace(), 0, None
    for count in itertools.count(1):
        prepared, left = prepare(), count
        sys.settrace(trace)
        try:
            call(prepared)
        finally:
            sys.settrace(before)
        if left > 0:  # the function has no instruction of this number
            return count - 1
    return None


@pytest.mark.parametrize("function", ["__call__", "_own"])
def test_another_thread_runs_the_same_member_of_a_family(function, torch):
    """The first call with gradients of a member whose indices count from the end changes what runs the member."""
    from planner.backends.torch.indexed_rows import IndexedRun

    x, w, q = torch.arange(40.0)[:, None].requires_grad_(), torch.ones(50, 1), torch.arange(50) - 20

    def prepare():
        planner.caches().clear()
        planner.contract("q[n]d, nd -> n", x, w, q=q % 20)
        (run,) = api._RUNNERS.values()
        assert isinstance(run, IndexedRun)
        return run

    def call(run):
        assert torch.equal(run((x, w), {"q": q}), x[q, 0])

    assert run_at_each_instruction(getattr(IndexedRun, function), prepare, call, call) > 10


def test_executables_of_members_are_made_while_another_thread_uses_the_representative(torch):
    from planner.backends.torch.executable import Executable

    plan = planner.plan("ij, jk -> ik", (20, 30), (30, 40), backend="torch")
    member, table = ({"i": 21, "j": 31, "k": 41}, (None, None), {}), load_backend("torch").table

    def make_member(executable):
        executable.resized(Member(*member))

    def prepare():
        return Executable(plan, table)

    def use(executable):
        assert executable.text

    assert run_at_each_instruction(Executable._shared.func, prepare, make_member, use) > 10
