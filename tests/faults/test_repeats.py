"""A hundred repeats of every named workload are bitwise equal, gradients that add up duplicates included."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from conftest import PROFILE, examples
from engines import ENGINES

import planner
from planner.workloads import WORKLOADS

REPEATS = 100


def sized(name):
    """A workload at sizes at which a hundred runs are short, and with so few groups that indices collide."""
    workload = WORKLOADS[name].cpu()
    most = examples(12, 100)
    sizes = {axis: min(size, most) for axis, size in workload.sizes.items()}
    # Many rows, few groups: duplicates in every gradient that is scattered.
    long = max(workload.index_shapes.values(), key=len, default=())
    if len(long) == 1:
        letter = next(axis for gather in workload.parsed.gathers for axis in gather.axes)
        sizes[letter] = min(workload.sizes[letter], examples(200, 2_000))
    return workload.resized(**sizes, **{array: min(size, 7) for array, size in workload.pools.items()})


def run_of(framework, workload):
    """The workload's result and gradients as a function of nothing, compiled in JAX."""
    engine = ENGINES[framework](in_a_hurry=False) if framework == "jax" else ENGINES[framework]()
    given = {"requires_grad": True} if framework == "torch" else {}
    operands, indices = workload.operands(framework, values="normal", **given), workload.indices(framework)
    gout = engine.array(np.random.default_rng(3).standard_normal(workload.output_shape, np.float32))

    def call(operands, indices):
        return planner.contract(workload.spec, *operands, **workload.options, **indices)

    run = engine.jit(lambda xs, qs, gout: engine.pulled(call, xs, qs, gout, range(len(xs))))
    return lambda: [engine.described(x)[0].tobytes() for x in run(operands, indices, gout)]


def is_short(framework, threads, name):
    """Whether CI runs it: in JAX those with gathers, whose gradients are scattered."""
    return "/" not in name and (framework, threads) != ("torch", 1) and (framework != "jax" or WORKLOADS[name].pools)


CASES = [
    (framework, threads, name)
    for framework, threads in (("numpy", 1), ("torch", 1), ("torch", 2), ("jax", 1))
    for name in WORKLOADS
    if PROFILE == "nightly" or is_short(framework, threads, name)
]


@pytest.mark.parametrize(("framework", "threads", "name"), CASES)
def test_workloads_repeat_bitwise(framework, threads, name, request):
    module = pytest.importorskip(framework, reason=f"{framework} is not installed")
    if framework == "torch":
        request.addfinalizer(functools.partial(module.set_num_threads, module.get_num_threads()))
        module.set_num_threads(threads)
    workload = sized(name)
    for q in workload.indices("numpy").values():
        assert len(np.unique(q)) < q.size, "no duplicates"
    run = run_of(framework, workload)
    first = run()
    assert any(any(x) for x in first)
    for number in range(REPEATS):
        assert run() == first, f"repeat {number}"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_new_plan_repeats_too(framework):
    """What is planned, bound and compiled anew adds in the same order."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    workload = sized("message-passing")
    found = []
    for _ in range(3):
        planner.api._RUNNERS.clear()
        found.append(run_of(framework, workload)())
    assert found[0] == found[1] == found[2]
