"""What the demo compares: each contraction of the four documents, with the ways to write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from planner.demo.ways import (
    OURS,
    Framework,
    Part,
    Way,
    contraction,
    direct,
    einsum_of,
    flattened_gemm,
    gather_then_einsum,
    opt_einsum_of,
    our_way,
    permute_flatten_matmul,
    separate_matmul,
    shared_matmul,
    strategy1,
    strategy2,
    strategy3,
    three_slices,
    two_step_sum,
)
from planner.workloads import WORKLOADS, Workload

Scale = Literal["main", "full", "quick"]
"""The main cases at their authors' sizes; all cases, measured at length; all cases at small sizes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One contraction in one framework, and the ways to write it, the author's plainest first.

    Attributes:
        seed: number of the document that it is from.
        name: what options and answers call it.
        title: what it is, in words.
        framework: where it runs.
        workload: its arrays.
        ways: what is compared; the first gives the values that all must have.
        gradients: per operand, whether it takes a gradient.
    """

    seed: str
    name: str
    title: str
    framework: Framework
    workload: Workload
    ways: tuple[Way, ...]
    gradients: tuple[bool, ...]


_QUICK = {
    "seed-gathered-matmul": {"n": 8192, "q": 256},
    "seed-sliced-einsum": {"j": 256, "k": 128, "l": 64},
    "seed-two-by-matrices": {},
    "seed-layout": {"i": 16, "j": 8, "k": 8, "l": 16},
    "seed-outer-and-matmul": {"i": 1000},
    "seed-separate-keys": {"q": 200, "k": 50},
    "seed-gathered-keys": {"q": 200, "i": 200, "k": 50},
    "seed-gathered-keys/k1000": {"q": 200, "i": 200, "k": 200},
    "seed-shared-keys": {"q": 200, "k": 50},
    "seed-shared-keys/all": {"q": 200, "k": 200},
}

# At its full 50,000 rows the outer product and its gradients fill 12 GB.
_LEAN = {"seed-outer-and-matmul/outer-large": {"i": 10000}}

THREE_SLICES = "seed-sliced-einsum, three slices"
POOLED = (
    "seed-gathered-keys/k10",
    "seed-gathered-keys/k30",
    "seed-gathered-keys",
    "seed-gathered-keys/k1000",
)

# XLA takes a second or two to compile the programs of a way, so JAX has fewer main cases.
_MAIN: dict[Framework, tuple[str, ...]] = {
    "torch": (
        "seed-gathered-keys/k1000",
        "seed-gathered-matmul",
        "seed-gathered-matmul, only c",
        "seed-sliced-einsum",
        "seed-layout",
        "seed-outer-and-matmul/large",
        "seed-separate-keys",
        "seed-shared-keys",
        "seed-gathered-keys",
        "seed-gathered-keys/k10",
    ),
    "jax": (
        "seed-gathered-keys/k1000",
        "seed-gathered-matmul",
        "seed-outer-and-matmul/large",
        "seed-separate-keys",
        "seed-shared-keys",
    ),
}


def cases(framework: Framework, scale: Scale = "main") -> Iterator[Case]:
    """Yield the cases of a scale, those of which most is expected first."""
    for case in _all_cases(framework, scale):
        if scale != "main" or case.name in _MAIN[framework]:
            yield case


def _all_cases(framework: Framework, scale: Scale) -> Iterator[Case]:
    def case(seed: str, name: str, title: str, *ways: Way) -> Case:
        workload = _sized(name, scale)
        return Case(seed, name, title, framework, workload, (*ways, our_way(workload)), workload.takes_gradient)

    def pooled(name: str) -> Case:
        keys = _sized(name, scale).sizes["k"]
        title = f"{keys} keys for each query, from a pool"
        return case("003", name, title, Way("gather, then einsum", gather_then_einsum))

    *fewer_keys, most_keys = POOLED
    yield pooled(most_keys)

    gathered = "seed-gathered-matmul"
    plain = Way("matmul(a, c[q])", direct)
    both = case("000", gathered, "A matrix for each row, taken by index", plain)
    yield dataclasses.replace(both, ways=(plain, *_loops(framework, scale), both.ways[-1]))
    title = "A matrix for each row, one gradient"
    yield dataclasses.replace(both, name=f"{gathered}, only c", title=title, gradients=(False, True))

    spec = WORKLOADS["seed-sliced-einsum"].spec
    products = (
        Way("einsum", einsum_of(spec)),
        Way("(x @ y).sum(0)", two_step_sum),
        Way("flatten, then matmul", flattened_gemm),
    )
    # At the author's sizes each takes 10 seconds: the one by hand, which does what einsum does, is left to --full.
    few = products[:2] if scale == "main" else products
    yield case("001", "seed-sliced-einsum", "A sum over two axes, of a slice", *few)
    yield case("001", "seed-sliced-einsum/strided", "A sum over two axes, of every second row", *products)
    yield case("001", "seed-sliced-einsum/k-major", "A sum over two axes, stored otherwise", *products)
    three = (Way(way.label, three_slices(way.call)) for way in (*products, Way(OURS, contraction(spec))))
    whole = _three_slices_workload(scale)
    title = "A sum over two axes, of three slices"
    yield Case("001", THREE_SLICES, title, framework, whole, tuple(three), (True, True))
    yield case("001", "seed-two-by-matrices", "A sum over two axes, of small matrices", *products)
    layout = "seed-layout"
    by_hand = Way("permute and flatten", permute_flatten_matmul)
    einsum = Way("einsum", einsum_of(WORKLOADS[layout].spec))
    yield case("001", layout, "A product whose axes change places", einsum, by_hand)

    for variant, title in (
        ("/large", "Many images by a matrix"),
        ("", "Five images by a matrix"),
        ("/outer", "Five images by a matrix, not summed"),
        ("/outer-large", "Many images by a matrix, not summed"),
    ):
        name = f"seed-outer-and-matmul{variant}"
        matmul = () if "outer" in variant else (Way("m1 @ m2", lambda xp, x, y: x @ y),)
        yield case("002", name, title, Way("einsum", einsum_of(WORKLOADS[name].spec)), *matmul)

    for name, title, product in (
        ("seed-separate-keys", "Keys of its own for each query", separate_matmul),
        ("seed-shared-keys", "The same keys for all queries", shared_matmul),
        ("seed-shared-keys/all", "All keys for all queries", shared_matmul),
    ):
        spec = WORKLOADS[name].spec
        peer = Way("opt_einsum.contract", opt_einsum_of(spec))
        yield case("003", name, title, Way("einsum", einsum_of(spec)), Way("matmul", product), peer)
    for name in reversed(fewer_keys):
        yield pooled(name)


def _loops(framework: Framework, scale: Scale) -> Iterator[Way]:
    """Yield the three strategies of document 000, each on a part of the rows."""
    # XLA unrolls the loops, and compiles for minutes beyond a few dozen steps.
    if framework == "jax" and scale == "main":
        return
    steps = {"main": 64, "full": 256, "quick": 256}[scale] if framework == "torch" else 32
    rows = {"main": 4096, "full": 131072, "quick": 131072}[scale] if framework == "torch" else 2048
    # The backward pass of strategy 1 writes a gradient of all taken matrices for each row.
    yield Way("strategy 1: loop", strategy1, Part("n", steps, backward_in_proportion=False))
    yield Way("strategy 2: loop", strategy2, Part("n", steps))
    yield Way("strategy 3: 256 rows", strategy3, Part("n", rows))


def _sized(name: str, scale: Scale) -> Workload:
    if scale == "main":
        return WORKLOADS[name]
    workload = WORKLOADS[name].cpu().resized(**_LEAN.get(name, {}))
    if scale == "full":
        return workload
    wanted = _QUICK.get(name, _QUICK[name.split("/")[0]])
    now = {**workload.sizes, **workload.pools}
    return workload.resized(**{letter: min(size, now[letter]) for letter, size in wanted.items()})


def _three_slices_workload(scale: Scale) -> Workload:
    """Return the whole of X, from which three slices are cut inside the calls."""
    one = _sized("seed-sliced-einsum", scale)
    sizes = {**one.sizes, "x": 2 * one.sizes["i"]}
    return dataclasses.replace(one, spec="xjk, ikl -> jl", sizes=sizes, cpu_sizes={}, views=())
