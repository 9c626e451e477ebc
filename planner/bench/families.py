"""Loops over many sizes, planning included, compared with the same loops in torch's own operators."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import planner
from planner.bench.timing import Result, Settings
from planner.demo.ways import OURS, Framework
from planner.tune.timing import timed

# How many sizes each loop has.
SIZES = 300
# From a size to our call and the peer's, which take turns, and to the tensors whose gradients they accumulate.
Make = Callable[[int], tuple[Callable[[], Any], Callable[[], Any], Sequence[Any]]]


def families(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Time five loops in which every call has a size that was not seen before."""
    if framework != "torch":
        return
    for name, (make, low, high) in _loops().items():
        planner.caches().clear()
        make(7)[0]()  # what the first call imports does not count
        make(7)[1]()
        rng = np.random.default_rng(0)
        times: dict[str, list[float]] = {OURS: [], "torch": [], "again": [], "": []}
        for number, size in enumerate(rng.permutation(rng.choice(np.arange(low, high + 1), SIZES, replace=False))):
            ours, peer, leaves = make(int(size))
            # Who comes first brings the arrays into the cache. Our second call always follows one of the peer's.
            turns = [(OURS, ours), ("torch", peer)] if number % 2 else [("torch", peer), (OURS, ours), ("", peer)]
            for label, call in (*turns, ("again", ours)):
                for leaf in leaves:
                    leaf.grad = None
                times[label].append(timed(call)[1])
        totals = {label: sum(seconds) for label, seconds in times.items() if label}
        ratio = totals[OURS] / totals["torch"]
        target = 1.1 if statistics.median(times["torch"]) > 1e-3 else 1.5
        what = f"{name}, {SIZES} sizes: times the loop in torch.einsum and indexing"
        yield Result("families", framework, what, target, ratio, at_most=True, medians=totals)
        first, again = (statistics.median(times[label]) for label in (OURS, "again"))
        what = f"{name}: a call of a new size, times the same call again"
        yield Result(
            "families", framework, what, 1 + 1.2e-4 / again, first / again, at_most=True,
            medians={"new": first, "again": again}, rounds=SIZES,
        )  # fmt: skip


def _loops() -> dict[str, tuple[Make, int, int]]:
    """Return each loop, with the least and the greatest size."""
    import torch

    leaf = partial(torch.randn, requires_grad=True)
    nodes, experts, weight = torch.randn(1000, 16), leaf(8, 32, 32), leaf(64, 64)
    chain = [leaf(32, 32) for _ in range(3)]

    def message_passing(n: int) -> Any:
        source, target, edges = torch.randint(0, 1000, (n,)), torch.randint(0, 1000, (n,)), torch.randn(n, 16)

        def ours() -> Any:
            spec = "s[e] d, e d -> t[e] d"
            return planner.contract(spec, nodes, edges, s=source, t=target, sizes={"t": 1000})

        def peer() -> Any:
            return torch.zeros(1000, 16).index_add_(0, target, nodes[source] * edges)

        return ours, peer, []

    def expert_layer(n: int) -> Any:
        x, q = leaf(n, 32), torch.randint(0, 8, (n,))

        def ours() -> None:
            planner.contract("nj, q[n]jk -> nk", x, experts, q=q).sum().backward()

        def peer() -> None:
            torch.einsum("nj,njk->nk", x, experts[q]).sum().backward()  # type: ignore[no-untyped-call]

        return ours, peer, [x, experts]

    def dense(spec: str, shapes: Sequence[Any], others: Sequence[Any], n: int) -> Any:
        operands = [*(leaf(*(n if size == 0 else size for size in shape)) for shape in shapes), *others]

        def ours() -> None:
            planner.contract(spec, *operands).sum().backward()

        def peer() -> None:
            torch.einsum(spec, *operands).sum().backward()  # type: ignore[no-untyped-call]

        return ours, peer, operands

    scores = [(2, 0, 4, 16)] * 2
    return {
        "message passing": (message_passing, 50, 5000),
        "experts": (expert_layer, 50, 2000),
        "linear layer": (partial(dense, "bi,oi->bo", [(0, 64)], [weight]), 50, 3000),
        "chain of four": (partial(dense, "ij,jk,kl,lm->im", [(0, 32)], chain), 50, 3000),
        "attention scores": (partial(dense, "bqhd,bkhd->bhqk", scores, []), 16, 400),
    }
