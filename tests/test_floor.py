"""Lower bounds on steps: no implementation of any backend costs less, on any device."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from unittest import mock

import numpy as np
import pytest
from conftest import examples, installed_frameworks
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from laws import Floors, plan_of

import planner
from planner.bench.planning import dense, gathers
from planner.cost.device import A100, CPU, GPU, H100, H200, TPU_V5E, Device
from planner.cost.floor import gathered_floor, product_floor
from planner.cost.layout import permuted, strides_of
from planner.cost.objective import OBJECTIVES, step_key
from planner.cost.products import CLASSES
from planner.kernels.tiled_product import triton_tiles
from planner.language.resolve import resolve_shapes
from planner.language.spec import Gather, Spec, replace_gathers
from planner.program.build import Lowerer
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum
from planner.search.bounds import least_of_naive
from planner.search.exact import gathered
from planner.search.exact.graph import Edge, unpack
from planner.search.exact.lazy import LazySearch
from planner.search.exact.listing import Bounds, fused_terms, kernel_launches, list_edges, list_plain_edges
from planner.search.exact.network import Network, Value
from planner.search.exact.steps import NetworkSteps, all_splits
from planner.search.exact.vectors import VectorListing
from planner.search.naive import naive_plan
from planner.search.space import ADDITIVE, OPTIMAL, SearchSpace
from planner.testing import Problem, problems

SIZES = st.sampled_from((1, 2, 3, 7, 16, 100, 1_000, 30_000))
RATES = st.sampled_from((1e6, 1e9, 1e10, 1e11, 1e13, float("inf")))
# These cards multiply float32 in float64 here, whatever Triton is installed. Prices are remembered by device, so their
# sources differ from those of the presets.
HOPPER = [dataclasses.replace(device, source="with products in float64") for device in (H100, H200)]
# Rates that no preset has: slow products beside a fast memory, and the other way round.
DEVICES = st.one_of(
    st.sampled_from((CPU, GPU, A100, *HOPPER, TPU_V5E)),
    st.builds(
        Device,
        name=st.sampled_from(("drawn", "drawn h200")),
        flop_rate=RATES,
        bandwidth=RATES,
        fresh_bandwidth=RATES,
        fresh_bytes=st.sampled_from((0, 1 << 12, 1 << 25)),
        skinny_rate=RATES,
        half_rate=st.sampled_from((0.0, 1e9, 1e14)),
        launch_seconds=st.sampled_from((0.0, 3e-6)),
        matrix_seconds=st.sampled_from((0.0, 1e-7)),
        cache_bytes=st.sampled_from((0, 1 << 10, 1 << 21)),
        cache_bandwidth=RATES,
        outer_cache_bytes=st.sampled_from((0, 1 << 14, 1 << 25)),
        outer_cache_bandwidth=RATES,
        take_row_seconds=st.sampled_from((0.0, 5e-9)),
        add_row_seconds=st.sampled_from((0.0, 4e-8)),
        kind=st.sampled_from(("cpu", "cuda")),
        capability=st.sampled_from((0, 90)),
        products=st.one_of(
            st.just(()),
            st.integers(0, 2**32).map(
                lambda seed: tuple(random.Random(seed).choices((1e8, 1e9, 1e11), k=len(CLASSES)))
            ),
        ),
    ),
)


@pytest.fixture(autouse=True, scope="module")
def _in_float64():
    with mock.patch.object(triton_tiles, "_multiplies_float64", return_value=True):
        yield


def resized(spec, draw_size):
    """The spec with other sizes; an index array reads dimensions of one size."""
    sizes = tuple((axis, draw_size()) for axis, _ in spec.sizes)
    pools = {gather: dataclasses.replace(gather, size=draw_size()) for gather in spec.gathers}
    terms = [replace_gathers(term, pools.__getitem__) for term in spec.terms]
    return dataclasses.replace(spec, inputs=tuple(terms[:-1]), output=terms[-1], sizes=sizes)


@pytest.mark.parametrize("objective", ADDITIVE)
@settings(max_examples=examples(60, 2000))
@given(
    problems(min_operands=1, max_operands=3),
    st.sampled_from(installed_frameworks()),
    DEVICES,
    st.sampled_from(("float32", "float64", "bfloat16")),
    st.data(),
)
def test_no_step_costs_less_than_its_bound(objective, case, backend, device, dtype, data):
    shapes = {name: index.shape for name, index in case.indices.items()}
    resolved = resolve_shapes(case.spec, case.shapes, shapes, case.sizes)
    spec = resized(resolved.spec, lambda: data.draw(SIZES))
    steps = NetworkSteps(Network(spec), (None,) * len(spec.inputs), dtype)
    requires = data.draw(st.tuples(*[st.booleans()] * len(spec.inputs)))
    table = load_backend(backend).table
    assert all(row.bounded for row in table.rows.values())
    lower = Lowerer(lambda op: table.choices(op, device), step_key(objective))
    gradient_operands = sum(needed << operand for operand, needed in enumerate(requires))
    kernels, fused = kernel_launches(table, device), fused_terms(table, device)
    more = table.more if device.kind == "cpu" else None
    bounds = Bounds(objective, device, dtype, gradient_operands, True, kernels, fused, more, by_terms=more)
    search = LazySearch(steps, lower, bounds, OPTIMAL)
    for edge in list_edges(steps.network, search._leaf_edges, all_splits, search.bounds, OPTIMAL.listed):
        if not edge.priced:
            least = unpack(edge.key)
            search._price_edge(edge)
            assert unpack(edge.key)[:1] >= least[:1], (str(edge.op), least, unpack(edge.key))


@settings(max_examples=examples(150, 5000))
@example(Device("an h200", 1e13, 1e12, kind="cuda", capability=90), (30_000,) * 3, "float32", True)
@given(DEVICES, st.tuples(SIZES, SIZES, SIZES), st.sampled_from(("float32", "float64", "bfloat16")), st.booleans())
def test_no_kernel_multiplies_faster_than_bounds_assume(device, sides, dtype, grouped):
    pytest.importorskip("torch", reason="torch is not installed")
    from planner.backends.torch.cuda.rows import product_rate

    assert product_rate(device, sides, dtype, grouped) <= device.most_product_rate(min(sides), dtype)


@pytest.mark.parametrize("half_rate", [1e9, 1e14])
def test_sums_of_rows_need_no_tensor_cores(half_rate):
    """A card adds half types up at the rate of float32, also if it multiplies them more slowly."""
    pytest.importorskip("torch", reason="torch is not installed")
    device = Device("drawn", flop_rate=1e10, bandwidth=1e14, half_rate=half_rate, launch_seconds=3e-6, kind="cuda")
    pool = Gather("p", ("a", "b"), 1)
    op = Einsum(Spec((("a", "b"), ("a", "b")), (pool,), (("a", 100), ("b", 100))), "bfloat16")
    least = gathered_floor("time", device, "bfloat16", 10_000, 1.0, 20_001, 0, (0, 10_000), 1, (False, False))
    row = load_backend("torch").table.price("segment sum, Triton", op, device)
    assert 0 < least <= row.cost.picoseconds


def test_products_with_rows_may_run_at_the_rate_of_half_types():
    """A device multiplies these a thousand times as fast as float32 here, as a drawn one did."""
    device = Device("drawn", flop_rate=1e6, bandwidth=1e9, half_rate=1e9, kind="cpu")
    spec = resolve_shapes("nij, q[n]jk -> nik", ((70, 30, 70), (16, 70, 50)), {"q": (70,)}).spec
    pytest.importorskip("torch", reason="torch is not installed")
    cost = load_backend("torch").table.price("take, multiply, add", Einsum(spec, "bfloat16"), device).cost
    elements, copies = sum(spec.elements), 70 * 70 * 50
    joint = 70 * 30 * 70 * 50
    least = gathered_floor("time", device, "bfloat16", joint, 1.0, elements, copies, (70, 0), math.inf, (False, False))
    assert 0 < least <= cost.picoseconds


@st.composite
def products(draw):
    """Return a product with its operands in any order of memory, or the step for both its gradients."""
    terms = [[], [], []]
    for axis in "abcdef"[: draw(st.integers(1, 6))]:
        for term in draw(st.sampled_from(((0, 1), (0, 1), (0, 2), (1, 2), (0, 1, 2)))):
            terms[term].insert(draw(st.integers(0, len(terms[term]))), axis)
    axes = sorted({axis for term in terms for axis in term})
    sizes = tuple((axis, draw(st.sampled_from((1, 2, 3, 30)))) for axis in axes)
    *inputs, output = map(tuple, terms)
    op = Einsum(Spec(tuple(inputs), output, sizes), draw(st.sampled_from(("float32", "float64", "bfloat16"))))
    if draw(st.integers(0, 9)) == 0:
        op = op.joint_gradient()
    shapes = op.input_shapes
    return op.with_layouts(permuted(None, draw(st.permutations(range(len(shape)))), shape) for shape in shapes)


@settings(max_examples=examples(150, 5000))
@given(products(), st.sampled_from(installed_frameworks()), DEVICES, st.sampled_from(OBJECTIVES))
def test_products_that_a_key_leaves_out_are_not_the_best(op, backend, device, objective):
    table, key = load_backend(backend).table, step_key(objective)
    every = table.choices(op, device)
    for choice in every:
        least = table.rows[choice.lowering].least
        if least is not None:
            assert all(low <= cost for low, cost in zip(least(op, device), choice.cost, strict=True)), choice
    some = table.choices(op, device, key)
    assert set(some) <= set(every)
    if every:
        assert min(some, key=lambda c: key(c.cost)) == min(every, key=lambda c: key(c.cost))


def free_leaves(operands):
    """What reading operands adds to the score, by the numbers of the values: nothing."""
    return {1 << operand: 0 for operand in range(operands)}


@pytest.mark.parametrize("objective", ADDITIVE)
@settings(max_examples=examples(30, 2000))
@given(problems(min_operands=2, max_operands=5), st.sampled_from(installed_frameworks()), DEVICES, st.data())
def test_numpy_lists_and_bounds_the_steps_of_gathers_that_are_listed_one_by_one(objective, case, backend, device, data):
    shapes = {name: index.shape for name, index in case.indices.items()}
    spec = resolve_shapes(case.spec, case.shapes, shapes, case.sizes).spec
    network = Network(resized(spec, lambda: max(1, data.draw(SIZES))))
    assume(1 <= len(network.gathers) <= 2)
    table = load_backend(backend).table
    requires = data.draw(st.tuples(*[st.booleans()] * len(spec.inputs)))
    gradient_operands = sum(needed << operand for operand, needed in enumerate(requires))
    kernels, fused = kernel_launches(table, device), fused_terms(table, device)
    more = table.more if device.kind == "cpu" else None
    bounds = Bounds(objective, device, "float32", gradient_operands, True, kernels, fused, more, by_terms=more)
    operands = len(network.leaves)

    def reads(operand):
        yield network.open, Edge(1 << operand, (), 0)

    edges = list_edges(network, reads, all_splits, bounds, OPTIMAL.listed)
    root = Value(network.everything, network.final)
    # Some values lead to no result: numpy drops the steps that read them.
    one_by_one, leading = {}, {root}
    for edge in reversed(edges):
        result, children = network.value(edge.result), sorted(map(network.value, edge.children))
        if children and result in leading:
            leading |= {*children}
            one_by_one[result, *children] = unpack(edge.key)[0]
    listing = VectorListing(network, free_leaves(operands), bounds, limit=float("inf"))
    assert network.value(listing.root) == root == network.value(listing.best_steps()[-1][0])
    listing.drop_worse(10**300)
    at_once = {
        (network.value(edge.result), *sorted(map(network.value, edge.children))): unpack(edge.key)[0]
        for edge in listing.edges()
    }
    assert at_once.keys() == one_by_one.keys()
    assert all(abs(least - one_by_one[step]) <= 2 + 1e-12 * least for step, least in at_once.items())


@pytest.mark.parametrize(
    ("seed", "trained"), [*[(seed, 0.5) for seed in (*range(4), 12, 42, 129)], (0, 0), (1, 0), (2, 0)]
)
def test_no_product_of_torch_takes_less_than_its_views_say(seed, trained):
    """Operands lie in any order of memory, and have axes of size 1; numpy bounds steps as numbers are bounded.

    Half of the operands require gradients, or none: then products by element may have the order of an operand.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    draw = random.Random(seed)
    for _ in range(12):
        sizes = {axis: draw.choice((1, 2, 2, 3, 5, 8, 16, 40)) for axis in "abcdefghi"[: draw.randint(3, 9)]}
        terms = [[], [], [], []]
        for axis in sizes:
            for number in draw.sample(range(4), draw.choice((1, 2, 2, 2, 3))):
                terms[number].insert(draw.randint(0, len(terms[number])), axis)
        output = draw.sample(list(sizes), draw.randint(0, len(sizes) // 2))
        operands = []
        for term in terms:
            shape = tuple(sizes[axis] for axis in term)
            layout = permuted(None, draw.sample(range(len(shape)), len(shape)), shape) if draw.random() < 0.3 else None
            operands.append(planner.Operand(shape, "float32", strides_of(layout, shape), draw.random() < trained))
        spec = ",".join(map("".join, terms)) + "->" + "".join(output)
        space = SearchSpace(planner.plan(spec, *operands, backend="torch", optimize="greedy").contraction)
        search = space._lazy_search(space.lowerer("time"), "time", OPTIMAL)
        assert search.bounds.more is not None
        edges = list_plain_edges(space.network, search._leaf_edges, all_splits, search.bounds, OPTIMAL.listed)
        products = {(edge.result, *edge.children): edge for edge in edges if len(edge.children) == 2}
        listing = VectorListing(space.network, free_leaves(4), search.bounds, limit=float("inf"))
        listing.drop_worse(10**18)
        bounded = {(edge.result, *edge.children): unpack(edge.key)[0] for edge in listing.edges()}
        assert bounded.keys() == products.keys()
        for key, edge in products.items():
            least = unpack(edge.key)[0]
            assert abs(bounded[key] - least) <= 2
            search._price_edge(edge)
            assert unpack(edge.key)[0] >= least, (spec, str(edge.op.spec), edge.op.layouts)


@pytest.mark.parametrize("objective", ADDITIVE)
@pytest.mark.parametrize("backend", installed_frameworks())
def test_steps_of_trees_within_a_limit_are_all_listed(backend, objective, monkeypatch):
    monkeypatch.setattr(gathered, "STAGE_SPLITS", 1)
    draw = random.Random(f"{backend} {objective}")
    left_out = 0
    networks = [(dense, 3), (dense, 5), (dense, 6), (dense, 7), (dense, 7), (gathers, 5), (gathers, 6), (gathers, 7)]
    for make, operands in networks:
        spec, shapes, indices = make(operands, draw)
        stand_ins = [planner.Operand(shape, requires_grad=draw.random() < 0.4) for shape in shapes]
        plan = planner.plan(spec, *stand_ins, backend=backend, optimize="greedy", **indices)
        space = SearchSpace(plan.contraction)
        arguments = (space.network, free_leaves(operands), space.step_bounds(objective))
        everything, guess = VectorListing(*arguments, limit=float("inf")), VectorListing(*arguments)
        assert guess.least == everything.least <= guess.limit
        for limit in (everything.least, 1.2 * everything.least, 2 * everything.least):
            some, everything = (VectorListing(*arguments, limit=each) for each in (limit, float("inf")))
            left = []
            for listing in (some, everything):
                listing.drop_worse(int(limit))
                left.append([(edge.result, edge.children, edge.key) for edge in listing.edges()])
            assert left[0] == left[1]
            counts = [sum(len(block[0]) for block in listing.blocks) for listing in (some, everything)]
            left_out += counts[0] < counts[1]
    assert left_out >= 12


@pytest.mark.parametrize("device", ["a100", "l40s", "h100", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("spec", ["ij,ik,il,jk,jl,kl->ij", "kbde,embd->mbk", "ij,jk->ik"])
def test_the_bound_of_a_large_contraction_on_a_card_holds(device, spec):
    """Kernels that multiply float32 in parts of bfloat16 are faster than the card's float32 rate."""
    axes = dict.fromkeys(spec.partition("->")[0].replace(",", ""), 8192 if "b" not in spec else 128)
    shapes = [[axes[axis] for axis in term] for term in spec.partition("->")[0].split(",")]
    operands = [planner.Operand(shape, "float32", requires_grad=True) for shape in shapes]
    for backend in installed_frameworks():
        if backend != "numpy":
            cost = planner.plan(spec, *operands, backend=backend, device=device).cost
            assert cost.bound <= cost.seconds * (1 + 1e-9)


@pytest.mark.parametrize("device", ["a100", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("sizes", [(100_000, 2, 2, 2), (1000, 32, 32, 32), (8000, 100, 1, 32), (64, 4096, 8, 128)])
def test_the_bound_of_a_batch_of_products_on_a_card_holds(device, sizes):
    """XLA takes no time of its own for each matrix of a batch, as torch does."""
    batch, m, n, k = map(float, sizes)
    spec = Spec((("b", "m", "k"), ("b", "k", "n")), ("b", "m", "n"), tuple(zip("bmnk", sizes, strict=True)))
    for backend, dtype in itertools.product(installed_frameworks(), ("float32", "bfloat16")):
        choices = load_backend(backend).table.choices(Einsum(spec, dtype), Device.preset(device))
        terms = batch * m * k, batch * k * n, batch * m * n
        least = product_floor("time", Device.preset(device), dtype, batch * m * n * k, terms)
        assert all(least <= choice.cost.picoseconds for choice in choices)


@pytest.mark.parametrize(
    ("spec", "shapes", "indices"),
    [
        ("q[n]c, nc, cd -> q[n]d", [(50, 8), (20000, 8), (8, 8)], {"q": (20000,)}),
        ("q[n]c, nc, cd -> q[n]d", [(3, 2), (30000, 2), (2, 3)], {"q": (30000,)}),
        ("s[e]i, e, io -> d[e]o", [(64, 32), (4096,), (32, 32)], {"s": (4096,), "d": (4096,), "sizes": {"d": 64}}),
    ],
)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_no_path_beats_a_proven_plan_of_rows_in_jax(spec, shapes, indices, device):
    """XLA adds rows up in a thirtieth of torch's time. Prices and bounds have its rates."""
    pytest.importorskip("jax", reason="jax is not installed")
    best = planner.plan(spec, *shapes, backend="jax", optimize="optimal", device=device, **indices)
    for path in itertools.permutations(range(3), 2):
        other = planner.plan(spec, *shapes, backend="jax", optimize=[path, (0, 1)], device=device, **indices)
        assert best.cost.bound <= best.cost.seconds <= other.cost.seconds


def test_no_naive_plan_needs_less_than_its_bound():
    """The bound spares most of the naive plans that plans are compared with, so it is often what the plan needs."""
    floors = Floors()

    @settings(max_examples=examples(120, 1200))
    @example(Problem("q[a] b, b -> q[a]", ((2, 2), (2,)), indices={"q": np.zeros(0, np.int64)}), "numpy", False)
    @given(problems(max_operands=3, mixed_dtypes=True), st.sampled_from(installed_frameworks()), st.booleans())
    def holds(case, backend, as_run):
        contraction = plan_of(case, backend, optimize="greedy").contraction
        cost, bound = naive_plan(contraction, as_run).cost, least_of_naive(contraction)
        needed = cost.peak_bytes if cost.backward is None else cost.retained_bytes
        assert bound <= needed
        floors.note(close=2 * bound >= needed > 0, gathers=bound and case.indices, trains=bound and cost.backward)

    holds()
    floors.at_least(100, close=0.05, gathers=0.05, trains=0.02)
