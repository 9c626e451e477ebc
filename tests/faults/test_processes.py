"""Plans are the same in every process, whatever its hash seed; a forked child plans; an import starts nothing."""

from __future__ import annotations

import json
import os
import pathlib
import re

import pytest
from conftest import examples, run_python

# Plans of many kinds: by every search and objective, with gathers, scatters, gradients, limits, ties and loops.
PROGRAM = """
import functools, sys
import planner
from planner.language.spec import unused_letters
from planner.workloads import WORKLOADS

backend, every = sys.argv[1], int(sys.argv[2])
letters = unused_letters((), 60)

plan = functools.partial(planner.plan, backend=backend)

def needing(*shapes):
    return [planner.Operand(shape, requires_grad=True) for shape in shapes]

def plans():
    for minimize in ("time", "flops", "peak", "retained", "bytes"):
        yield plan("ab, bc, cd, de, ea ->", *needing(*[(4, 4)] * 5), minimize=minimize)
        yield plan("q[n]j, p[m]k, jk -> nm", (5, 4), (6, 4), (4, 4), q=(7,), p=(7,), minimize=minimize)
    yield plan("q[e]f, e, fg -> p[e]g", *needing((9, 4), (8,), (4, 4)), q=(8,), p=(8,), sizes={"p": 9})
    yield plan("ijkl, jmik, jmil -> jm", *needing((9, 8, 3, 3), (8, 6, 9, 3), (8, 6, 9, 3)), memory_limit="20 kB")
    yield plan("ij, jk, kl -> il", *needing((64, 64), (64, 64), (64, 64)), retain_limit=40_000)
    chain = ",".join(letters[i] + letters[i + 1] for i in range(30)) + "->"
    for optimize in ("auto", "greedy", "random-greedy"):
        yield plan(chain, *[(2, 2)] * 30, optimize=optimize)
    yield plan(",".join("a" + letters[i + 2] for i in range(20)) + "->a", *[(3, 2)] * 20)
    yield plan(",".join(f"{x}[n]k" for x in "abcd") + "->nk", *[(3, 2)] * 4, **{x: (4,) for x in "abcd"})
    for workload in list(WORKLOADS.values())[::every]:
        small = {letter: min(size, 4) for letter, size in {**workload.sizes, **workload.pools}.items()}
        small = workload.resized(**small)
        yield plan(small.spec, *needing(*small.shapes), **small.options, **small.index_shapes)

for found in plans():
    print(found)
    print(found.to_json())
    if every == 1 and len(found.operands) < 4:
        print(*found.alternatives(3), sep="\\n")
"""


@pytest.mark.parametrize(
    ("backend", "seeds"), [("numpy", examples(8, 40)), ("torch", examples(2, 20)), ("jax", examples(2, 20))]
)
def test_plans_are_the_same_whatever_the_hash_seed(backend, seeds):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    first, *others = (run_python(PROGRAM, backend, examples(6, 1), PYTHONHASHSEED=str(n)) for n in range(seeds))
    assert first.count('"type": "Plan"') > 20
    for seed, other in enumerate(others, 1):
        assert other == first, f"another plan with PYTHONHASHSEED={seed}"


# -- a forked child --------------------------------------------------------------------------------------

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

FORKED = """
import os, sys, threading
import numpy as np
import planner

framework = sys.argv[1]
if framework == "torch":
    import torch as module
    make = lambda shape: module.ones(shape, requires_grad=True)
    index = module.tensor
else:
    make, index = np.ones, np.array

def work(rows, backward=True):
    a, c, q = make((rows, 1, 8)), make((5, 8, 4)), index([0, 4] * (rows // 2))
    out = planner.contract("nij, q[n]jk -> nik", a, c, q=q)
    if framework == "torch" and backward:
        out.sum().backward()
        assert (a.grad == 4).all()
    assert (out == 8).all()

work(40)
if framework == "torch":
    # A pool of OpenMP's threads does not outlive a fork, whoever started it: torch's own products hang there too.
    module.set_num_threads(1)
stop = threading.Event()
# Autograd's engine locks the list of the profiler's callbacks, and a child that is forked meanwhile finds it locked.
others = [threading.Thread(target=lambda: [work(6, False) for _ in iter(stop.is_set, True)]) for _ in range(3)]
for thread in others:
    thread.start()
children = []
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        work(40)  # by what is cached
        for rows in (2, 12, 52):
            work(rows)  # planned here
        os._exit(0)
    children.append(child)
statuses = [os.waitpid(child, 0)[1] for child in children]
stop.set()
for thread in others:
    thread.join()
print(statuses)
"""


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@forks
def test_a_forked_child_plans_and_contracts(framework):
    """While other threads of the parent plan too. JAX starts threads of its own and warns of any fork."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    children = examples(8, 100)
    printed = run_python(FORKED, framework, children, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    assert json.loads(printed) == [0] * children


LOCKED = """
import os, signal, threading
from planner.language.cached import cached_property

computing, forked = threading.Event(), threading.Event()

class Value:
    @cached_property
    def slow(self):
        computing.set()
        forked.wait()
        return 1

value, other = Value(), Value()
thread = threading.Thread(target=lambda: value.slow)
thread.start()
computing.wait()
child = os.fork()
forked.set()
if not child:
    signal.alarm(20)  # ends a child that waits
    os._exit(0 if other.slow == 1 else 1)
thread.join()
print(os.waitpid(child, 0)[1], value.slow)
"""


@forks
def test_a_child_that_is_forked_while_a_property_is_computed_computes_it_too():
    """Before Python 3.12 the `cached_property` of functools has a lock, which stayed locked in the child."""
    assert run_python(LOCKED).split() == ["0", "1"]


def test_properties_are_computed_once_without_the_lock_of_functools():
    root = pathlib.Path(__file__).resolve().parents[2]
    sources = [path.read_text() for room in ("planner", "backends", "kernels") for path in (root / room).rglob("*.py")]
    assert sum("cached_property" in source for source in sources) > 3
    assert sum(bool(re.search(r"from functools import .*cached_property", source)) for source in sources) == 1


# -- an import -------------------------------------------------------------------------------------------

IMPORTED = """
import json, pathlib, sys, threading
import numpy, opt_einsum
tasks = pathlib.Path("/proc/self/task")
def count():
    return [threading.active_count(), len(list(tasks.iterdir())) if tasks.exists() else 0]
before = count()
import planner
planner.plan("q[n]j, jk -> nk", (4, 3), (3, 2), q=(5,), backend="numpy")
print(json.dumps([before, count(), sorted({"torch", "jax", "triton"} & set(sys.modules))]))
"""


def test_an_import_starts_no_thread_and_loads_no_framework():
    """NumPy's own threads are there before."""
    before, after, frameworks = json.loads(run_python(IMPORTED))
    assert before == after
    assert before[0] == 1
    assert frameworks == []
