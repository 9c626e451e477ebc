"""What every implementation is said to cost, on file: a price that changes is one that someone meant to change."""

from __future__ import annotations

import math

import pytest
from conftest import assert_on_file

import planner
from planner.cost.device import CPU, H100, TPU_V5E, Device
from planner.cost.figures import StepCost, Work
from planner.language.derive import transpose
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum, JointGradient, Op

MACHINES = {"numpy": (CPU,), "torch": (CPU, H100), "jax": (CPU, H100, TPU_V5E)}
# Sizes that no two axes share, with rows enough that groups are cut, and not multiples of a tile.
STEPS = {
    "grouped": ("nij, q[n]jk -> nik", [(9001, 3, 40), (50, 40, 24)], {"q": (9001,)}),
    "grouped, wide": ("nij, q[n]jk -> nik", [(20000, 64, 128), (7, 128, 256)], {"q": (20000,)}),
    "grouped, rows are tiles": ("nij, q[n]jk -> nik", [(90, 256, 128), (7, 128, 192)], {"q": (90,)}),
    "grouped, one row each": ("nj, q[n]jk -> nk", [(300, 96), (2000, 96, 80)], {"q": (300,)}),
    "grouped, rows shared and summed": ("aij, q[ab]jk -> bik", [(30, 5, 8), (11, 8, 16)], {"q": (30, 70)}),
    "pooled": ("bqd, b i[bqk] d -> bqk", [(3, 200, 24), (3, 1100, 24)], {"i": (3, 200, 17)}),
    "pooled, one key": ("bqd, b i[bqk] d -> bqk", [(5, 1, 64), (5, 90, 64)], {"i": (5, 1, 1)}),
    "pooled, all chosen": ("bqd, b i[bqk] d -> bqk", [(2, 50, 16), (2, 40, 16)], {"i": (2, 50, 37)}),
    "pooled, copied": ("bqhd, bhi[bhqk]d -> bhqk", [(2, 50, 3, 16), (2, 3, 90, 16)], {"i": (2, 3, 50, 7)}),
    "take": ("q[n]e -> ne", [(500, 70)], {"q": (3000,)}),
    "take along a diagonal": ("q[nn]e -> ne", [(50, 70)], {"q": (60, 60)}),
    "segment sum": ("ne -> q[n]e", [(9000, 33)], {"q": (9000,)}),
    "two brackets": ("q[n]p[n]e, ne -> n", [(30, 20, 9), (800, 9)], {"q": (800,), "p": (800,)}),
    "rows added up": ("x[pi]c, w[p]cm -> q[pi]m", [(500, 24), (9, 24, 40)], {"x": (60, 70), "w": (60,), "q": (60, 70)}),
    "typed rows added up": (
        "x[n]c, w[n]cm -> q[n]m",
        [(500, 64), (9, 64, 64)],
        {"x": (7000,), "w": (7000,), "q": (7000,)},
    ),
    "matrices": ("bij, bjk -> bik", [(6, 150, 70), (6, 70, 310)], {}),
    "narrow matrices": ("ki, ko -> io", [(512, 250), (512, 3)], {}),
    "copied matrices": ("aibj, jbk -> kai", [(40, 9, 12, 30), (30, 12, 20)], {}),
    "elements": ("ijk, ki -> jik", [(90, 80, 5), (5, 90)], {}),
    "sums": ("ijk -> j", [(60, 7, 900)], {}),
    "sums of short runs": ("ijk -> j", [(60, 700, 9)], {}),
    "sums in another order": ("ijk -> kj", [(60, 7, 900)], {}),
    "few segments": ("ne -> q[n]e", [(9000, 64)], {"q": (9000,)}),
}


def ops(spec: planner.Spec, dtype: str) -> list[Op]:
    """A step, the steps of its gradients, and both at once."""
    found = [Einsum(spec, dtype)] + [Einsum(transpose(spec, i), dtype) for i in range(len(spec.inputs))]
    return found + [found[0].joint_gradient()] * (len(spec.inputs) == 2)


def prices(name: str, backend: str) -> list[str]:
    """For each step of one kind, what can run it on each machine: FLOPs, bytes moved, copied, scratch, picoseconds."""
    spec, shapes, indices = STEPS[name]
    resolved = planner.resolve(spec, *shapes, sizes={"q": 400} if "-> q" in spec else None, **indices)
    table, lines = load_backend(backend).table, []
    for dtype in ("float32", "bfloat16") if backend != "numpy" else ("float32",):
        for op in ops(resolved, dtype):
            lines.append(f"{name}, {dtype}: {'both gradients of ' * isinstance(op, JointGradient)}{op.spec}")
            for device in MACHINES[backend]:
                found = table.choices(op, device)
                lines += [f"  {device.name}, {c.lowering}: {' '.join(map(str, c.cost))}" for c in found]
    return lines


def test_parts_of_a_step_add_up():
    """Within a part computing overlaps with moving; measured seconds stand in place of both."""
    device = Device("mine", 1e9, 1e9, 1e8, 1e8, launch_seconds=1e-3, matrix_seconds=1e-4, take_row_seconds=1e-5,
                    add_row_seconds=1e-6, sort_row_seconds=1e-7)  # fmt: skip
    product = Work(flops=7000, rate=1e6, moved=5_000_000, fresh=(100, 200), launches=2, matrices=3)
    assert device.price(product) == (7000, 5_000_000, 0, 0, 9_303_000_000)
    rows = Work(flops=50, moved=10, scratch=8, taken=4, added=5, sorted=6)
    assert device.price(rows) == (50, 10, 0, 8, 45_610_000)
    measured = rows._replace(seconds=1.0)
    assert device.price(measured).picoseconds == 10**12 + 45_600_000
    copies = Work.of_copies(100, scratch=1)
    assert copies == Work(moved=200, copied=100, scratch=101, fresh=(100,))
    both = device.price(product, rows, copies)
    assert both == (7050, 5_000_210, 100, 109, 9_303_000_000 + 45_610_000 + 1_200_000)
    assert device.price() == StepCost()


@pytest.mark.parametrize(("backend", "share"), [("torch", 0.4), ("numpy", 1.0), ("jax", 1.0)])
def test_rows_that_torch_adds_up_in_a_cache_take_less(backend, share):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    op = Einsum(planner.resolve("ne -> q[n]e", (100, 16), sizes={"q": 10}, q=(100,)), "float32")
    moved = op.bytes_touched() + 2 * 4 * 100 * 16
    for cached, counted in ((moved, share), (moved - 1, 1.0)):
        device, free = (
            Device("mine", 1e9, 1e9, cache_bytes=cached, cache_bandwidth=1e9, add_row_seconds=each)
            for each in (1e-6, 0)
        )
        more, less = (load_backend(backend).table.choices(op, rates)[0].cost.picoseconds for rates in (device, free))
        assert more - less == 100 * 1_000_000 * counted


def test_products_of_matrices_are_slower_than_others_in_an_outer_cache():
    """Here it moves 4 GB/s, and memory 1: what is packed there moves 2."""
    device = Device("mine", 1e18, 1e9, outer_cache_bytes=2**20, outer_cache_bandwidth=4e9, loop_seconds=0.0)
    for text, inputs, rate in (("ij,jk->ik", 2, 2), ("ij,ij->ij", 2, 4)):
        for side, beyond in ((256, False), (512, True)):
            op = Einsum(planner.resolve(text, *[(side, side)] * inputs), "float32")
            cost = next(c.cost for c in load_backend("numpy").table.choices(op, device))
            moved = 12 * side * side
            assert cost.picoseconds == pytest.approx(moved * 1000 / (1 if beyond else rate), rel=1e-3)


@pytest.mark.parametrize(
    ("spec", "shapes", "indices", "read"),
    [
        ("q[n]e -> ne", [(500, 70)], {"q": (30,)}, [30 * 70]),
        ("q[n]e -> ne", [(500, 70)], {"q": (3000,)}, [500 * 70]),
        ("i[nk]e, ne -> nk", [(500, 7), (20, 7)], {"i": (20, 3)}, [20 * 3 * 7, 20 * 7]),
        ("iij -> ij", [(9, 9, 5)], {}, [9 * 5]),
        ("ne -> q[n]e", [(20, 7)], {"q": (20,)}, [20 * 7]),
    ],
)
def test_a_step_reads_no_more_than_the_rows_it_takes(spec, shapes, indices, read):
    """All of a pool is read only where rows as many are taken; what is added up is written into the whole result."""
    resolved = planner.resolve(spec, *shapes, sizes={"q": 400} if "-> q" in spec else None, **indices)
    assert [*resolved.elements_read] == read
    entries = sum(math.prod(shape) for shape in indices.values())
    assert Einsum(resolved, "float32").bytes_touched() == 4 * (sum(read) + resolved.elements[-1]) + 8 * entries


@pytest.mark.parametrize("backend", MACHINES)
def test_prices_are_those_on_file(backend):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    assert_on_file("".join(f"{line}\n" for name in STEPS for line in prices(name, backend)), f"prices-{backend}.txt")
