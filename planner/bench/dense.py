"""Products without gathers, compared with the ways to write them in torch."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from planner.bench.timing import (
    PASSES,
    Result,
    Settings,
    block_of,
    equal,
    medians_of,
    prepare_runs,
    time_in_turn,
    time_runs,
)
from planner.demo.runs import TorchRun
from planner.demo.ways import OURS, Framework, Way, einsum_of, flattened_gemm, our_way, two_step_sum
from planner.tune.timing import timed
from planner.workloads import WORKLOADS


def three_way_batch(framework: Framework, settings: Settings) -> Iterator[Result]:
    """opt_einsum #254: it is cheapest to multiply the (b, k) weight with the small operand first."""
    if framework != "torch":
        return
    part = "three-way-batch"
    workload = WORKLOADS[part]
    peer = Way("torch.einsum", einsum_of(workload.spec))
    runs = prepare_runs(framework, workload, [peer, our_way(workload)])
    times = time_runs(runs, "f", framework, settings)
    medians = medians_of(times)
    ratio = medians["torch.einsum"] / medians[OURS]
    what = "forward: times faster than torch.einsum"
    yield Result(part, framework, what, 5, ratio, medians=medians, rounds=len(times[OURS]))


def warm_call(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Time a call on small matrices, which is all overhead: the plan must be looked up in a few microseconds."""
    if framework == "jax":
        yield from _warm_eager_calls(settings)
        return
    import torch

    import planner

    small = WORKLOADS["seed-outer-and-matmul"]
    chain = "ab,bc,cd,de->ae"
    matrices = tuple(torch.randint(-2, 3, (8, 8)).float() for _ in range(4))
    lines: tuple[tuple[str, str, tuple[Any, ...], float], ...] = (
        ("5 x 784 by 784 x 10: of a torch.einsum call", small.spec, small.operands("torch"), 0.7),
        (
            "5 x 784 by 784 x 10, operands that take gradients: of a torch.einsum call",
            small.spec,
            small.operands("torch", requires_grad=True),
            0.85,
        ),
        ("a chain of four 8 x 8: of a torch.einsum call", chain, matrices, 0.15),
    )
    for what, spec, operands, target in lines:
        programs = {
            "torch.einsum": block_of(functools.partial(torch.einsum, spec, *operands), settings.calls),
            OURS: block_of(functools.partial(planner.contract, spec, *operands), settings.calls),
        }
        equal(planner.contract(spec, *operands), torch.einsum(spec, *operands), what)
        for program in programs.values():
            program()
        times = time_in_turn(programs, framework, settings)
        medians = {label: seconds / settings.calls for label, seconds in medians_of(times).items()}
        ratio = medians[OURS] / medians["torch.einsum"]
        yield Result(
            "warm-call",
            framework,
            what,
            target,
            ratio,
            at_most=True,
            medians=medians,
            rounds=len(times[OURS]),
        )
    yield from _warm_contexts(settings)


def _warm_contexts(settings: Settings) -> Iterator[Result]:
    """Time calls of torch within transforms and hooks, beside those of `torch.einsum` after indexing."""
    import torch
    from torch.func import grad, jvp, vmap

    import planner

    def small(*shape: int) -> Any:
        return torch.randint(-2, 3, shape).float()

    calls = max(1, settings.calls // 10)  # each takes some ten times as long as one without a context
    q, gathered = torch.arange(8) % 4, "nij, q[n]jk -> nik"
    products: dict[str, tuple[tuple[Any, Any], Callable[..., Any], Callable[..., Any]]] = {
        "a product": (
            (small(8, 16), small(16, 12)),
            functools.partial(planner.contract, "ij, jk -> ik"),
            functools.partial(torch.einsum, "ij, jk -> ik"),
        ),
        "a gather": (
            (small(8, 2, 16), small(4, 16, 12)),
            functools.partial(planner.contract, gathered, q=q),
            lambda a, c: torch.einsum("nij, njk -> nik", a, c[q]),
        ),
    }

    def backward(call: Callable[..., Any], a: Any, c: Any) -> Any:
        leaves = [x.detach().requires_grad_() for x in (a, c)]
        return torch.autograd.grad(call(*leaves).sum(), leaves)

    def hooked(call: Callable[..., Any], a: Any, c: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return backward(call, a, c)

    def of_sum(call: Callable[..., Any]) -> Callable[..., Any]:
        return grad(lambda a, c: call(a, c).sum(), argnums=(0, 1))

    contexts: dict[str, Callable[[Callable[..., Any], Any, Any], Any]] = {
        "with gradients": backward,
        "with hooks on saved tensors": hooked,
        "under torch.func.grad": lambda call, a, c: of_sum(call)(a, c),
        "under jvp": lambda call, a, c: jvp(call, (a, c), (a, c)),
        "under vmap over 16": lambda call, a, c: vmap(call, (0, None))(a.expand(16, *a.shape), c),
        "under vmap of grad over 16": lambda call, a, c: vmap(of_sum(call), (0, None))(a.expand(16, *a.shape), c),
    }
    for name, (operands, ours, theirs) in products.items():
        for context, run in contexts.items():
            programs = {
                "torch.einsum": block_of(functools.partial(run, theirs, *operands), calls),
                OURS: block_of(functools.partial(run, ours, *operands), calls),
            }
            for found, expected in zip(run(ours, *operands), run(theirs, *operands), strict=True):
                equal(found, expected, f"{name} {context}")
            for program in programs.values():
                program()
            times = time_in_turn(programs, "torch", settings)
            medians = {label: seconds / calls for label, seconds in medians_of(times).items()}
            title, ratio = f"{name} {context}: of a torch.einsum call", medians[OURS] / medians["torch.einsum"]
            rounds = len(times[OURS])
            yield Result("warm-call", "torch", title, 1.1, ratio, at_most=True, medians=medians, rounds=rounds)


def _warm_eager_calls(settings: Settings) -> Iterator[Result]:
    """Time eager calls in JAX, of `contract` and of a plan: the processor time of the caller's thread.

    Programs run in threads of JAX meanwhile. On a busy machine waiting for them takes longer than the calls.
    """
    import jax.numpy as jnp

    import planner

    rng, part = np.random.default_rng(0), "warm-call"

    def small(*shape: int) -> Any:
        return jnp.asarray(rng.integers(-2, 3, shape), "float32")

    rows, q = small(64, 16), jnp.asarray(rng.integers(0, 8, 64), "int32")
    pool, four, gather = small(8, 16, 16), [small(8, 8) for _ in range(4)], "nj, q[n]jk -> nk"
    einsum, chain, taken = jnp.einsum, "ab, bc, cd, de -> ae", "nj, njk -> nk"
    lines: tuple[tuple[str, str, Sequence[Any], dict[str, Any], Callable[[], Any], float], ...] = (
        ("a product", "ij, jk -> ik", (rows, pool[0]), {}, lambda: einsum("ij, jk -> ik", rows, pool[0]), 0.5),
        ("a gather", gather, (rows, pool), {"q": q}, lambda: einsum(taken, rows, pool[q]), 0.5),
        (
            'a gather under "drop"',
            gather,
            (rows, pool),
            {"q": q, "index_mode": "drop"},
            lambda: einsum(taken, rows, pool.at[q].get(mode="fill", fill_value=0)),
            0.5,
        ),
        ("a chain of four 8 x 8", chain, four, {}, lambda: einsum(chain, *four), 0.5),
    )
    for what, spec, operands, options, peer, target in lines:
        plan = planner.plan(spec, *operands, **options)
        arrays = {name: value for name, value in options.items() if len(name) == 1}
        calls: dict[str, Callable[[], Any]] = {
            "jnp.einsum": peer,
            OURS: functools.partial(planner.contract, spec, *operands, **options),
            "plan(...)": functools.partial(plan, *operands, **arrays),
        }
        for call in calls.values():
            equal(call(), peer(), what)
        seconds: dict[str, list[float]] = {label: [] for label in calls}
        for _ in range(settings.calls):
            for label, call in calls.items():
                begun = time.thread_time()
                result = call()
                seconds[label].append(time.thread_time() - begun)
                result.block_until_ready()
        medians = medians_of(seconds)
        for label, peer_label, most in ((OURS, "jnp.einsum", target), ("plan(...)", OURS, 1.1)):
            title = f"{what}, {label}: of the time of {peer_label}"
            shown = {name: medians[name] for name in (label, peer_label)}
            ratio = medians[label] / medians[peer_label]
            yield Result(part, "jax", title, most, ratio, at_most=True, medians=shown, rounds=settings.calls)


# A variant of the workload, its title, and how much of the fastest peer's time it may take, forward alone and with
# gradients. If nothing can be gained over a plain product, the share is 1.1: a tenth is left to noise.
_SLICED = (
    ("seed-sliced-einsum", "X[:8]", 0.97, 1.1),
    ("seed-sliced-einsum/strided", "X[:8, ::2]", 0.97, 1.1),
    ("seed-sliced-einsum/overlap", "X[4:12]", 1.1, 1.1),
    ("seed-sliced-einsum/k-major", "X k-major", 1.1, 1.1),
    ("seed-two-by-matrices", "two by matrices", 1.1, 1.1),
    ("seed-sliced-einsum", "X contiguous", 1.1, 1.1),
)


def sliced_einsum(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Seed 001: slices and strides of one array, compared with einsum, a two-step sum and a GEMM written by hand."""
    if framework != "torch":
        return
    for name, title, *targets in _SLICED:
        workload = WORKLOADS[name].cpu()
        if title == "X contiguous":
            workload = dataclasses.replace(workload, views=())
        peers = [
            Way("torch.einsum", einsum_of(workload.spec)),
            Way("(x @ y).sum(0)", two_step_sum),
            Way("flattened GEMM", flattened_gemm),
        ]
        runs = prepare_runs(framework, workload, [*peers, our_way(workload)])
        for (which, words), target in zip(PASSES, targets, strict=True):
            times = time_runs(runs, which, framework, settings)
            medians = medians_of(times)
            ratio = medians[OURS] / min(medians[peer.label] for peer in peers)
            what = f"{title}, {words}: of the fastest other way's time"
            rounds = len(times[OURS])
            part = "seed-sliced-einsum"
            yield Result(part, framework, what, target, ratio, at_most=True, medians=medians, rounds=rounds)


def clique(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Jax #24915: the fastest plan goes slice by slice. einsum, which takes half a minute and 17 GB, runs once."""
    if framework != "torch":
        return
    part = "clique"
    workload = WORKLOADS[part].cpu()
    ours = TorchRun(our_way(workload), workload, workload.takes_gradient)
    ours.both()
    found = ours.forward()
    programs = {"forward": ours.forward, "with gradients": ours.both}
    times = time_in_turn(programs, framework, settings)
    medians = medians_of(times)
    peer = TorchRun(Way("torch.einsum", einsum_of(workload.spec)), workload, workload.takes_gradient)
    expected, seconds = timed(peer.forward)
    once = {"torch.einsum": seconds}
    equal(found, expected, part)
    rounds = len(times["forward"])
    what = "forward: times faster than torch.einsum, which is run once"
    ratio = once["torch.einsum"] / medians["forward"]
    shown = {**once, OURS: medians["forward"]}
    yield Result(part, framework, what, 150, ratio, medians=shown, rounds=rounds)
    what = "with gradients: of the forward's time"
    ratio = medians["with gradients"] / medians["forward"]
    yield Result(part, framework, what, 6, ratio, at_most=True, medians=medians, rounds=rounds)
    forward, both, retained = ours.memory()
    for what, limit, count in (
        ("newly allocated in the forward", 2, forward),
        ("newly allocated with gradients", 5, both),
        ("retained", 0, retained),
    ):
        yield Result(part, framework, what, limit, count / 1e6, "MB", at_most=True, medians={OURS: count})
