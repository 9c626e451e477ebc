"""A hundred repeats of every named workload are bitwise equal, gradients that add up duplicates included."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from conftest import PROFILE, examples

import planner
from planner.workloads import WORKLOADS

REPEATS = 100


def sized(name):
    """A workload at sizes at which a hundred runs are short, and with so few groups that indices collide."""
    workload = WORKLOADS[name].cpu()
    most = examples(12, 100)
    sizes = {axis: min(size, most) for axis, size in workload.sizes}
    # Many rows, few groups: duplicates in every gradient that is scattered.
    long = max(workload.index_shapes.values(), key=len, default=())
    if len(long) == 1:
        letter = next(axis for gather in workload.parsed.gathers for axis in gather.axes)
        sizes[letter] = min(dict(workload.sizes)[letter], examples(200, 2_000))
    return workload.resized(**sizes, **{array: min(size, 7) for array, size in workload.pools})


def in_numpy(workload):
    operands, indices = workload.operands("numpy", values="normal"), workload.indices("numpy")
    return lambda: [planner.contract(workload.spec, *operands, **workload.options, **indices)]


def in_torch(workload):
    import torch

    operands = workload.operands("torch", values="normal", requires_grad=True)
    indices, gout = workload.indices("torch"), torch.from_numpy(noise(workload))
    wanted = list({id(x): x for x in operands}.values())

    def run():
        result = planner.contract(workload.spec, *operands, **workload.options, **indices)
        return [result.detach(), *torch.autograd.grad(result, wanted, gout)]

    return run


def in_jax(workload):
    import jax

    operands, indices = workload.operands("jax", values="normal"), workload.indices("jax")
    gout = jax.numpy.asarray(noise(workload))

    @jax.jit
    def run(operands, indices, gout):
        def call(*operands):
            return planner.contract(workload.spec, *operands, **workload.options, **indices)

        result, pull = jax.vjp(call, *operands)
        return [result, *pull(gout)]

    return lambda: run(operands, indices, gout)


def noise(workload):
    return np.random.default_rng(3).standard_normal(workload.output_shape, np.float32)


RUNS = {"numpy": in_numpy, "torch": in_torch, "jax": in_jax}


@contextlib.contextmanager
def torch_threads(count):
    """Torch with a number of threads; its pool grows at need."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits(arrays):
    return [np.asarray(x).tobytes() for x in arrays]


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
def test_workloads_repeat_bitwise(framework, threads, name):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    workload = sized(name)
    for q in workload.indices("numpy").values():
        assert len(np.unique(q)) < q.size, "no duplicates"
    with torch_threads(threads) if framework == "torch" else contextlib.nullcontext():
        run = RUNS[framework](workload)
        first = bits(run())
        assert any(any(x) for x in first)
        for number in range(REPEATS):
            assert bits(run()) == first, f"repeat {number}"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_new_plan_repeats_too(framework):
    """What is planned, bound and compiled anew adds in the same order."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    workload = sized("message-passing")
    found = []
    for _ in range(3):
        planner.api._RUNNERS.clear()
        found.append(bits(RUNS[framework](workload)()))
    assert found[0] == found[1] == found[2]
