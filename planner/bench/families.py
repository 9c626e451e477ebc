"""Loops over many sizes, planning included, compared with the same loops in torch's own operators."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import planner
from planner.bench.corpus import corpus
from planner.bench.timing import Result, Settings
from planner.demo.ways import OURS, Framework
from planner.tune.timing import timed

# How many sizes each loop has, and each row of the corpus: some that find the classes, and those that are timed.
SIZES, FIRST, TIMED = 300, 8, 17
# What a new size may take above the same call again, in seconds: without gradients, and with.
MOST = (6e-5, 1.2e-4)
# From a size to our call and the peer's, which take turns, and to the tensors whose gradients they accumulate.
Make = Callable[[int], tuple[Callable[[], Any], Callable[[], Any], Sequence[Any]]]


def families(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Time five loops in which every call has a size that was not seen before, and such calls of the whole corpus."""
    if framework != "torch":
        return
    for needs in (False, True):
        yield from _public(needs)
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
            "families", framework, what, 1 + MOST[1] / again, first / again, at_most=True,
            medians={"new": first, "again": again}, rounds=SIZES,
        )  # fmt: skip


def _public(needs: bool) -> Iterator[Result]:
    """Time calls of new sizes for each row of the corpus of which a letter grows, at the scale "overhead"."""
    extra: dict[str, float] = {}
    for row in corpus("overhead"):
        if not row.grow:
            continue
        letter, known = row.grow[0], {**row.sizes, **row.pools}
        least, draw, more = max(known[letter], 17), random.Random(row.spec), []
        for size in draw.sample(range(least, 2 * least + 60), FIRST + TIMED):
            sized = row.resized(**{letter: size})
            operands = [x.requires_grad_(needs) for x in sized.operands("torch", seed=0)]
            call = partial(_call, sized.spec, operands, needs, {**sized.options, **sized.indices("torch", seed=0)})
            first, again = timed(call)[1], min(timed(call)[1] for _ in range(2))
            more.append(first - again)
        extra[row.name] = statistics.median(more[FIRST:])
    slow = sum(seconds > 2 * MOST[needs] for seconds in extra.values())
    what = (
        f"a new size of {len(extra)} public strings{' with gradients' * needs}: the median, above the same call again"
    )
    yield Result(
        "families", "torch", what, MOST[needs], statistics.median(extra.values()), unit="s", at_most=True, rounds=TIMED
    )
    what = f"the greatest such median; {slow} of {len(extra)} are above {2e3 * MOST[needs]:.2f} ms"
    yield Result("families", "torch", what, 1e-3, max(extra.values()), unit="s", at_most=True, rounds=TIMED)


def _call(spec: str, operands: Sequence[Any], needs: bool, others: Any) -> None:
    result = planner.contract(spec, *operands, **others)
    if needs:
        result.sum().backward()


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
