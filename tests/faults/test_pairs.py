"""Two calls that look alike never share a wrong plan: each gives, after the other, what it gives without caches.

What may differ between the two is one circumstance or a few of those that a plan depends on, or that callers think it
may: strides, dtypes, gradient flags, modes, devices. Compared are results, gradients, what is kept, and the plans run.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from random import Random

import numpy as np
import pytest
from conftest import examples
from engines import ENGINES
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import MODES, Floors, exact_problems, in_other_strides

import planner
from planner import api
from planner.program.frameworks import load_backend
from planner.testing.problem import Problem

OPTIONS = {
    "index_mode": MODES,
    "dtype": (None, "float32", "float64"),
    "sizes": ("given", "shape"),
    "minimize": ("time", "peak", "flops"),
    "memory_limit": (None, 10**9),
    "optimize": ("auto", "greedy"),
    "operand_dtype": ("float32", "float64"),
    "index_dtype": ("int64", "int32", "int16"),
    "prepared": (False, True),
}
CIRCUMSTANCES = {
    "numpy": {**OPTIONS, "strides": (None, 1, 2)},
    "torch": {
        **OPTIONS,
        "strides": (None, 1, 2, 3),
        "index_strides": (None, 1),
        "gradients": ("none", "all", "first"),
        "mode": ("grad", "no_grad", "inference", "autocast", "vmap", "deterministic"),
        "device": ("cpu", "meta"),
        "conjugate": (False, True),
    },
    "jax": {
        **OPTIONS,
        "gradients": ("none", "all", "first"),
        "mode": ("eager", "jit", "vmap"),
        "x64": (True, False),
        "precision": (None, "highest", "default"),
    },
}


def empty_caches():
    """Forget every plan, runner and table entry; what the frameworks themselves compiled stays."""
    planner.caches().clear()
    api._SIGNATURES.clear()
    for name in list(sys.modules):
        if name.split(".")[0] == "planner":
            for value in list(vars(sys.modules[name]).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    """The plans that calls run, in order, those of derivatives included."""
    ran = []

    def watched(bind):
        def bound(backend, plan):
            run = bind(backend, plan)

            def noted(operands, indices):
                ran.append(plan)
                return run(operands, indices)

            return noted

        return bound

    for name in ("numpy", "torch", "jax"):
        with contextlib.suppress(planner.PlannerError):
            kind = type(load_backend(name))
            monkeypatch.setattr(kind, "bind", watched(kind.bind))
    empty_caches()
    yield ran
    empty_caches()


def arrays_of(problem, given):
    """Operands and index arrays as numpy has them, in the strides and dtypes of the circumstances."""
    random = Random(given.get("strides") or 0)
    operands = [x.astype(given["operand_dtype"]) for x in problem.operands()]
    if given.get("strides"):
        operands = [in_other_strides(x, random) for x in operands]
    indices = {name: q.astype(given["index_dtype"]) for name, q in problem.indices.items()}
    if given.get("index_strides"):
        indices = {name: in_other_strides(q, random) for name, q in indices.items()}
    return operands, indices


def options_of(problem, given):
    options = {name: given[name] for name in ("index_mode", "dtype", "minimize", "memory_limit", "optimize")}
    sizes = problem.sizes if given["sizes"] == "given" else problem.output_shape()
    return {**options, "sizes": sizes, **({"precision": given["precision"]} if "precision" in given else {})}


def needing(given, count):
    return [given["gradients"] == "all" or (given["gradients"] == "first" and number == 0) for number in range(count)]


def prepared(problem, given, indices):
    """Index arrays by `group`, where each indexes dims of one size."""
    if not given["prepared"]:
        return indices
    sizes = {name: {g.size for g in problem.resolved().gathers if g.array == name} for name in indices}
    return {
        name: planner.group(q, *sizes[name], index_mode=given["index_mode"]) if len(sizes[name]) == 1 else q
        for name, q in indices.items()
    }


def call_numpy(problem, given):
    operands, indices = arrays_of(problem, given)
    indices = prepared(problem, given, indices)
    result = planner.contract(problem.spec, *operands, **options_of(problem, given), **indices)
    return [(result.dtype.name, result.shape, result.tolist())]


def call_torch(problem, given):
    import torch

    from planner.inspect.memory import torch_memory

    arrays, rows = arrays_of(problem, given)
    operands = [torch.from_numpy(x) for x in arrays]
    if given["conjugate"]:
        operands = [x.to(torch.complex64).conj() if number == 0 else x for number, x in enumerate(operands)]
    operands = [x.to(given["device"]) for x in operands]
    operands = [x.requires_grad_(need) for x, need in zip(operands, needing(given, len(operands)), strict=True)]
    raw = {name: torch.from_numpy(q).to(given["device"]) for name, q in rows.items()}
    options, mode = options_of(problem, given), given["mode"]
    seen = []

    def contracted(*operands):
        return planner.contract(problem.spec, *operands, **options, **indices)

    @contextlib.contextmanager
    def deterministic():
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    surrounding = {
        "inference": torch.inference_mode, "no_grad": torch.no_grad, "deterministic": deterministic,
        "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    }  # fmt: skip
    with surrounding.get(mode, contextlib.nullcontext)():
        indices = prepared(problem, given, raw)
        if mode == "vmap":
            stacked = [torch.stack([x, x]) for x in operands]
            result = torch.func.vmap(contracted)(*stacked)
        else:
            result = contracted(*operands)
            if given["device"] == "cpu":
                seen.append(torch_memory(lambda: contracted(*operands))[1].retained_bytes)
    results = [result]
    if result.requires_grad:
        wanted = [x for x in operands if x.requires_grad]
        results += torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
    for x in results:
        values = None if x.is_meta else x.detach().resolve_conj().resolve_neg().tolist()
        seen.append((x.dtype, x.shape, x.stride(), x.requires_grad, x.is_inference(), x.device, values))
    return seen


def call_jax(problem, given):
    import jax

    with jax.enable_x64(given["x64"]):
        arrays, rows = arrays_of(problem, given)
        operands = [jax.numpy.asarray(x) for x in arrays]
        indices = prepared(problem, given, {name: jax.numpy.asarray(q) for name, q in rows.items()})
        wanted = [number for number, need in enumerate(needing(given, len(operands))) if need]

        gout = jax.numpy.ones(problem.output_shape())

        def contracted(operands, indices):
            return planner.contract(problem.spec, *operands, **options_of(problem, given), **indices)

        def run(operands, indices):
            return ENGINES["jax"]().pulled(contracted, operands, indices, gout, wanted)

        if given["mode"] == "vmap":
            operands = [jax.numpy.stack([x, x]) for x in operands]
            found = jax.vmap(lambda xs: run(xs, indices))(operands)
        else:
            found = (jax.jit(run) if given["mode"] == "jit" else run)(operands, indices)
        return [(x.dtype.name, x.shape, np.asarray(x).tolist()) for x in found]


CALLS = {"numpy": call_numpy, "torch": call_torch, "jax": call_jax}


def outcome(framework, problem, given, plans):
    """All that can be seen of a call: what it gave, or the error; and the plans that it ran."""
    plans.clear()
    try:
        found = CALLS[framework](problem, given)
    except planner.PlannerError as error:
        found = (type(error), str(error))
    # NaN is equal to itself here.
    return repr(found), list(plans)


@st.composite
def pairs(draw, framework):
    """A problem, and two sets of circumstances that differ in one or two of them."""
    problem = draw(exact_problems(max_operands=3, max_axes=4, max_size=3, gathers=draw(st.sampled_from([True, None]))))
    choices = CIRCUMSTANCES[framework]
    # Plain in most respects: what differs should not be hidden behind an error that both give.
    first = {name: draw(st.sampled_from([values[0]] * 3 + list(values))) for name, values in choices.items()}
    differs = draw(st.lists(st.sampled_from(sorted(choices)), min_size=1, max_size=2, unique=True))
    second = {
        name: draw(st.sampled_from([v for v in values if v != first[name]])) if name in differs else first[name]
        for name, values in choices.items()
    }
    return problem, first, second


@pytest.mark.parametrize(("framework", "ci", "nightly"), [("numpy", 40, 1_000), ("torch", 50, 2_000), ("jax", 5, 100)])
def test_calls_never_share_a_wrong_plan(framework, ci, nightly, jax_in_a_hurry, plans):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    floors = Floors()

    @settings(max_examples=examples(ci, nightly))
    @given(pairs(framework))
    def law(pair):
        problem, *both = pair
        fresh = []
        for circumstances in both:
            empty_caches()
            fresh.append(outcome(framework, problem, circumstances, plans))
        empty_caches()
        for number in (0, 1, 0, 1):
            seen, ran = outcome(framework, problem, both[number], plans)
            assert seen == fresh[number][0], both[number]
            assert ran == fresh[number][1], "another plan was run"
        floors.note(
            results=all(run for _, run in fresh), other_plans=fresh[0][1] != fresh[1][1], other=fresh[0] != fresh[1]
        )

    law()
    floors.at_least(examples(ci, nightly) * 0.8, results=0.5, other_plans=0.2)


# Circumstances that show in what a call gives, where they differ from the plain ones.
SHOWN = {"operand_dtype": "float64", "dtype": "float64", "gradients": "all", "device": "meta", "conjugate": True,
         "mode": "inference"}  # fmt: skip


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_each_circumstance_after_a_plain_call(framework, plans):
    """The property's pairs that differ in one respect from a plain call, one by one; and that outcomes differ."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    problem = Problem("q[n]j, jk -> nk", ((4, 3), (3, 2)), indices={"q": np.array([0, 3, 1])})
    plain = {name: values[0] for name, values in CIRCUMSTANCES[framework].items()}
    for name, values in CIRCUMSTANCES[framework].items():
        for value in values[1:]:
            other = {**plain, name: value}
            empty_caches()
            fresh = outcome(framework, problem, other, plans)
            empty_caches()
            base = outcome(framework, problem, plain, plans)
            assert outcome(framework, problem, other, plans) == fresh, (name, value)
            assert base[0] != fresh[0] or SHOWN.get(name) != value, (name, value)
