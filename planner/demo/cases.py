"""The cases of the demo: every contraction of the four seeds, with the ways to write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from planner.demo.ways import (
    OURS,
    Framework,
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

__all__ = ["POOLED", "THREE_SLICES", "Case", "cases"]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One contraction in one framework, and the ways to write it, the author's plainest first.

    Attributes:
        seed: number of the document it is from.
        name: what the table calls it.
        framework: where it runs.
        workload: its arrays.
        ways: what is compared; the first gives the values that all must have.
        gradients: per operand, whether it takes a gradient.
    """

    seed: str
    name: str
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


def _sized(name: str, quick: bool) -> Workload:
    workload = WORKLOADS[name].cpu().resized(**_LEAN.get(name, {}))
    if not quick:
        return workload
    wanted = _QUICK.get(name, _QUICK[name.split("/")[0]])
    now = dict(workload.sizes + workload.pools)
    return workload.resized(**{letter: min(size, now[letter]) for letter, size in wanted.items()})


def cases(framework: Framework, quick: bool = False) -> Iterator[Case]:
    """Yield every contraction of the four seeds, with the ways to write it."""

    def case(seed: str, name: str, *ways: Way, title: str = "", gradients: tuple[bool, ...] = ()) -> Case:
        workload = _sized(name, quick)
        wanted = gradients or workload.takes_gradient
        return Case(seed, title or name, framework, workload, (*ways, our_way(workload)), wanted)

    gathered = "seed-gathered-matmul"
    rows = _sized(gathered, quick).output_shape[0]
    # The author's loops: torch runs them step by step, XLA unrolls them and compiles for minutes beyond a few
    # dozen.
    steps = min(rows, 256 if framework == "torch" else 32)
    batches = rows if framework == "torch" else min(rows, 2048)
    plain = Way("matmul(a, c[q])", direct)
    yield case(
        "000",
        gathered,
        plain,
        Way("strategy 1: loop", strategy1, ("n", steps)),
        Way("strategy 2: loop", strategy2, ("n", steps)),
        Way("strategy 3: by 256", strategy3, ("n", batches)),
    )
    yield case("000", gathered, plain, title=f"{gathered}, only c", gradients=(False, True))

    spec = WORKLOADS["seed-sliced-einsum"].spec
    products = (
        Way("einsum", einsum_of(spec)),
        Way("(x @ y).sum(0)", two_step_sum),
        Way("flattened GEMM", flattened_gemm),
    )
    for variant in ("", "/strided", "/k-major"):
        yield case("001", f"seed-sliced-einsum{variant}", *products)
    three = (Way(way.label, three_slices(way.call)) for way in (*products, Way(OURS, contraction(spec))))
    yield Case("001", THREE_SLICES, framework, _three_slices_workload(quick), tuple(three), (True, True))
    yield case("001", "seed-two-by-matrices", *products)
    layout = "seed-layout"
    by_hand = Way("permute and flatten", permute_flatten_matmul)
    yield case("001", layout, Way("einsum", einsum_of(WORKLOADS[layout].spec)), by_hand)

    for variant in ("", "/large", "/outer", "/outer-large"):
        name = f"seed-outer-and-matmul{variant}"
        einsum = Way("einsum", einsum_of(WORKLOADS[name].spec))
        matmul = () if "outer" in variant else (Way("m1 @ m2", lambda xp, x, y: x @ y),)
        yield case("002", name, einsum, *matmul)

    for name, product in (
        ("seed-separate-keys", separate_matmul),
        ("seed-shared-keys", shared_matmul),
        ("seed-shared-keys/all", shared_matmul),
    ):
        spec = WORKLOADS[name].spec
        peer = Way("opt_einsum.contract", opt_einsum_of(spec))
        yield case("003", name, Way("einsum", einsum_of(spec)), Way("matmul", product), peer)
    for name in POOLED:
        yield case("003", name, Way("gather, einsum", gather_then_einsum))


THREE_SLICES = "seed-sliced-einsum, three slices"
POOLED = (
    "seed-gathered-keys/k10",
    "seed-gathered-keys/k30",
    "seed-gathered-keys",
    "seed-gathered-keys/k1000",
)


def _three_slices_workload(quick: bool) -> Workload:
    """The whole of X, from which three slices are cut inside the calls."""
    one = _sized("seed-sliced-einsum", quick)
    sizes = (*one.sizes, ("x", 2 * dict(one.sizes)["i"]))
    return dataclasses.replace(one, spec="xjk, ikl -> jl", sizes=sizes, cpu_sizes=(), views=())
