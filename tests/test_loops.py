"""Loops over slices: the same values and gradients as without, nothing retained, peaks that hold."""

import contextlib
import dataclasses
import math
import re
from functools import partial
from itertools import combinations, pairwise, product
from random import Random
from unittest import mock

import numpy as np
import pytest
from conftest import examples
from engines import in_each
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from laws import exact_problems, hold, judge, needing_gradients, note_language, values_and_gradients
from looped import make_loop

import planner
from planner.bench.planning import MAKERS
from planner.cost.figures import Cost
from planner.inspect.memory import jax_compiled, torch_backward_memory, torch_memory
from planner.language.derive import slice_spec
from planner.program.loops import covers, parts, resize_plan, slice_counts
from planner.program.ops import joint_elements
from planner.program.plan import Loop
from planner.program.tree import Leaf, Node
from planner.search import slicing
from planner.search.bounds import least_by_sizes, least_of_loops
from planner.search.parts import _cut_out, axis_part, large_part
from planner.search.slicing import can_be_cut, worth_cutting
from planner.search.space import OPTIMAL, PATH_STOP, SearchSpace
from planner.testing.problem import Problem
from planner.tune.autotune import candidates
from planner.workloads import WORKLOADS

# Index arrays in range, scalars of checks: beyond the plan's own values.
SMALL = 4096
CLIQUE = "ij,ik,il,jk,jl,kl->ij"
# Each of 4096 tokens goes through two of 16 experts.
TOP_TWO = "tm, e[ts] m h, ts -> th", needing_gradients((4096, 64), (16, 64, 128), (4096, 2))


@st.composite
def slicings(draw, problem, most=2):
    """Some of a problem's axes of two and more, each with a slice size below its size."""
    spec = problem.resolved()
    axes = [(axis, size) for axis, size in spec.sizes if size > 1]
    assume(axes)
    chosen = draw(st.lists(st.sampled_from(axes), min_size=1, max_size=most, unique=True))
    return {axis: draw(st.integers(1, size - 1)) for axis, size in chosen}


@settings(max_examples=examples(60, 2_000))
@given(st.data())
def test_slices_tile_the_iteration_space(data):
    problem = data.draw(exact_problems())
    axes = data.draw(slicings(problem, most=3))
    spec = problem.resolved()
    seen = list(parts(tuple(axes.items()), spec))
    counted = slice_counts(tuple(axes.items()), spec)
    assert sum(count for _, count in counted) == len(seen)
    for sizes, count in counted:
        assert sum(part.sizes == sizes for part in seen) == count
        assert dict(slice_spec(spec, sizes).sizes).items() >= sizes.items()
    grid = np.zeros([size for axis, size in spec.sizes], int)
    for part in seen:
        grid[part.of([axis for axis, _ in spec.sizes])] += 1
    assert (grid == 1).all()
    once = np.zeros(spec.output_shape, int)
    for part in seen:
        once[part.of(spec.output)] += 1
    assert not covers(tuple(axes.items()), spec.output) or (once == 1).all()


def cut(engine, problem):
    """Axes to slice and the sizes of the slices, settled by the problem's seed; {} if no axis can be cut."""
    random, spec = Random(problem.seed), problem.resolved()
    axes = [(axis, size) for axis, size in spec.sizes if size > 1 and (engine.name != "jax" or can_be_cut(spec, axis))]
    some = random.sample(axes, min(len(axes), 1 + problem.seed % 2))
    return {axis: random.randint(1, size - 1) for axis, size in some}


def slice_by_slice(engine, problem):
    """Values and gradients are those of the whole; nothing is retained, and torch's peak is no higher than planned."""
    operands, indices = engine.operands(problem), engine.indices(problem)
    plan = make_loop(engine.plan(problem, operands, indices), cut(engine, problem))
    assert plan.cost.retained_bytes == 0

    def call(operands, indices):
        return plan(*operands, **indices)

    if engine.name == "torch":
        measured = torch_memory(lambda: call(operands, indices))[1]
        assert measured.peak_bytes <= plan.cost.forward.peak_bytes + SMALL
    if problem.wanted and engine.differentiates:
        assert set(engine.held(call, operands, indices, problem.wanted)) == {0}
    return values_and_gradients(engine, problem, call)


@in_each(
    numpy=(examples(60, 2_000), {}), torch=(examples(60, 2_000), {}), jax=(examples(10, 1_000), {"max_operands": 3})
)
def test_values_and_gradients_slice_by_slice(engine, sample):
    count, small = sample

    def note(floors, problem):
        note_language(floors, problem, two=len(cut(engine, problem)) > 1)

    problems = exact_problems(**small).filter(partial(cut, engine))
    least = 0.4 if engine.name != "jax" else 0.2
    hold(engine, slice_by_slice, problems, count, note=note, gather=least, two=0.05, nonzero=0.3, gradient=0.7)


def nodes_of(tree):
    """The nodes of a tree, the root first."""
    children = () if isinstance(tree, Leaf) else tree.children
    return [tree, *(node for child in children for node in nodes_of(child))][isinstance(tree, Leaf) :]


def loops_of(plan, seed):
    """Plans with a loop around a part of the tree."""
    random, found, spec = Random(seed), [], plan.resolved.spec
    parts_of_tree = [axis_part(plan.contraction, plan.tree, axis) for axis in spec.by_axis]
    for root in nodes_of(plan.tree):
        sizes = [math.prod(child.op.spec.output_shape) for child in root.children if isinstance(child, Node)]
        for least in {min(sizes, default=1), max(sizes, default=1)}:
            parts_of_tree.append(large_part(plan.contraction, plan.tree, root, least))
    for part in filter(None, parts_of_tree):
        own = part.contraction.resolved.spec
        axes = [(axis, n) for axis, n in own.sizes if n > 1 and can_be_cut(own, axis)]
        if axes:
            axis, size = random.choice(axes)
            with contextlib.suppress(planner.PlannerError):
                found.append(make_loop(plan, {axis: random.randint(1, size - 1)}, part))
    return found


def some_loop(engine, problem):
    """A plan with loops, settled by the problem's seed; None if there is none."""
    operands, indices = engine.operands(problem), engine.indices(problem)
    plan = engine.plan(problem, operands, indices)
    random = Random(problem.seed)
    found = loops_of(plan, problem.seed)
    if found and problem.seed % 3:
        plan = random.choice(found)
    if not found or problem.seed % 3 != 1:
        axes = cut(engine, problem)
        plan = make_loop(plan, axes) if axes else plan
        axes = cut(engine, dataclasses.replace(problem, seed=problem.seed + 1))
        if axes and not problem.seed % 3:
            with contextlib.suppress(planner.PlannerError):
                plan = make_loop(plan, axes)
    return plan


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@settings(max_examples=examples(15, 2_000))
@given(st.integers(2, 4), st.sampled_from(("chain", "dense", "gathers")), st.booleans(), st.integers(0, 10**6))
def test_no_loop_beats_the_bounds_that_hold_for_loops(backend, operands, kind, needs, seed):
    """The least FLOPs of any tree; and the bytes, the time and the peak of reading operands and writing the result."""
    random = Random(seed)
    spec, shapes, indices = MAKERS[kind](min(operands, 3) if kind == "gathers" else operands, random)
    given = [planner.Operand(shape, requires_grad=needs) for shape in shapes]
    plan = planner.plan(spec, *given, **indices, backend=backend, device="cpu", optimize="greedy")
    space = SearchSpace(plan.contraction)
    least, _ = space.search("flops", OPTIMAL)
    assert least.exact
    by_floors = {objective: least_of_loops(space, objective) for objective in ("time", "bytes")}
    assert all(by_floors.values())
    trees = [
        least.tree,
        space.search("time", OPTIMAL)[0].tree,
        space.search("flops", PATH_STOP, space.path("greedy"))[0].tree,
    ]
    axes = [
        (axis, size) for axis, size in space.resolved.spec.sizes if size > 1 and can_be_cut(space.resolved.spec, axis)
    ]
    looped = [
        make_loop(dataclasses.replace(plan, tree=tree), {axis: length})
        for axis, size in random.sample(axes, min(3, len(axes)))
        for tree, length in zip(trees, (1, -(-size // 2), random.randint(1, size - 1)), strict=True)
    ]
    looped += [other for tree in trees for other in loops_of(dataclasses.replace(plan, tree=tree), seed)]
    for cost in (plan.cost for plan in looped):
        assert cost.flops >= max(least.score[0][0], least_by_sizes(space, "flops"))
        assert cost.bytes_moved >= max(least_by_sizes(space, "bytes"), by_floors["bytes"])
        assert cost.seconds >= max(least_by_sizes(space, "time"), by_floors["time"])
        assert cost.peak_bytes >= least_by_sizes(space, "peak")


def test_the_gap_of_a_loop_leaves_room_for_other_loops():
    """That it is faster than every plan without a loop says nothing of loops."""
    plan = planner.plan(CLIQUE, *[(256, 256)] * 6, backend="numpy", device="cpu")
    assert plan.loop is not None
    assert 0 < plan.cost.bound < plan.cost.seconds
    unknown = dataclasses.replace(plan.cost, bound=None)
    again = dataclasses.replace(plan, programs=dataclasses.replace(plan.programs, cost=unknown))
    assert again.gap == plan.gap > 0.1


@pytest.mark.parametrize(
    ("spec", "shapes", "arrays", "hopeless"),
    [
        ("nij, q[n]jk -> nik", [(3283, 64, 64), (400, 64, 128)], {"q": (3283,)}, True),  # the result is half the peak
        ("bid, q[bk]d -> bik", [(3585, 8, 128), (677, 128)], {"q": (3585, 128)}, False),
        (CLIQUE, [(256, 256)] * 6, {}, False),
    ],
)
def test_slices_get_no_smaller_once_they_are_much_slower(spec, shapes, arrays, hopeless, monkeypatch):
    """All slices down to one element were priced, most of a plan's time; the chosen plans are the same."""
    priced, plans = [], []
    price = slicing._LoopSearch._price

    def count(search, axes, trees):
        priced[-1] += len(trees)
        return price(search, axes, trees)

    monkeypatch.setattr(slicing._LoopSearch, "_price", count)
    for rule in ("is_beaten", "is_hopeless", None):
        with monkeypatch.context() as patch:
            if rule is not None:
                patch.setattr(slicing._LoopSearch, rule, lambda *_: False)
            priced.append(0)
            plan = planner.plan(spec, *shapes, **arrays, optimize="optimal", backend="torch", device="cpu")
        plans.append((plan.cost.seconds, plan.cost.peak_bytes))
    assert plans[0] == plans[1] == plans[2]
    assert priced[2] < priced[0]
    assert (priced[2] < priced[1]) == hopeless


def test_a_loop_that_is_taken_for_its_memory_has_the_bound_of_loops():
    """The bound of the plans without a loop was above the time that the loop takes."""
    x = planner.Operand((8,), requires_grad=True)
    others = [(17, 17, 17, 8, 17), (), planner.Operand((17, 8), "float64")]
    plan = planner.plan("l, fialf, , il -> fia", x, *others, backend="numpy", device="cpu", optimize="optimal")
    assert plan.loop is not None
    assert "as lean as einsum" in plan.origin
    unknown = dataclasses.replace(plan.cost, bound=None)
    again = dataclasses.replace(plan, programs=dataclasses.replace(plan.programs, cost=unknown))
    assert 0 < plan.cost.bound <= plan.cost.seconds
    assert again.gap == pytest.approx(plan.gap)


def in_parts_and_nested(engine, problem):
    """Values and gradients are those of the whole, and torch's peaks are no higher than planned."""
    operands, indices = engine.operands(problem), engine.indices(problem)
    plan = some_loop(engine, problem)

    def call(operands, indices):
        return plan(*operands, **indices)

    if engine.name == "torch":
        measured = torch_memory(lambda: call(operands, indices))[1]
        assert measured.peak_bytes <= plan.cost.forward.peak_bytes + SMALL
        assert measured.retained_bytes <= plan.cost.retained_bytes
    return values_and_gradients(engine, problem, call)


@in_each(numpy=(examples(40, 2_000), 5), torch=(examples(40, 2_000), 5), jax=(examples(12, 1_000), 4))
def test_values_and_gradients_of_loops_around_parts_and_in_loops(engine, sample):
    count, most = sample

    def note(floors, problem):
        plan = some_loop(engine, problem)
        loops = [node for node in nodes_of(plan.tree) if isinstance(node.op, Loop)]
        inner = any(isinstance(node.op, Loop) for loop in loops for node in nodes_of(loop.op.body.tree))
        part = bool(loops) and len(plan.programs.forward.computing) > 1
        reads = part and any(loop.op.spec.gathers for loop in loops)
        note_language(floors, problem, part=part, nested=inner, reads=reads)

    problems = exact_problems(min_operands=3, max_operands=most).filter(partial(cut, engine))
    hold(engine, in_parts_and_nested, problems, count, note=note, part=0.1, nested=0.15, reads=0.02, gradient=0.7)


@pytest.mark.parametrize("axes", [{"i": 1}, {"i": 2, "j": 16}, {"i": 1, "j": 64, "l": 32}], ids=str)
def test_jax_slices_are_arrays_that_count(axes, jax, xla_sizes):
    """XLA cuts each slice out of its operand before a product reads it; one to be transposed it cuts in that order."""
    operands = [jax.numpy.ones(shape, "float32") for shape in ((8, 128, 64), (8, 64, 96))]
    plan = make_loop(planner.plan("ijk, ikl -> jl", *operands), axes)
    _, compiled = jax_compiled(plan, *operands)
    assert 0.9 * plan.cost.peak_bytes <= compiled.peak_bytes <= plan.cost.peak_bytes + SMALL


def test_jax_slices_where_64_bits_are_enabled(jax):
    """Scan's counters and the constants beside them are of one dtype all the same."""
    with jax.enable_x64(True):
        operands = [jax.numpy.ones(shape, "float64") for shape in ((6, 5, 4), (6, 4, 3))]
        plan = make_loop(planner.plan("ijk, ikl -> jl", *operands), {"i": 4, "j": 2})
        result, pull = jax.vjp(plan, *operands)
        assert (result == 24).all()
        assert [(x.dtype, x[0, 0, 0]) for x in pull(result)] == [("float64", 24 * 3), ("float64", 24 * 5)]


def test_jax_goes_slice_by_slice_only_where_that_is_faster(jax):
    clique, chain = (WORKLOADS[name].cpu() for name in ("clique", "chain-ijkl"))

    def planned(workload, requires_grad):
        operands = [planner.Operand(shape, requires_grad=requires_grad) for shape in workload.shapes]
        return planner.plan(workload.spec, *operands, backend="jax", device="cpu")

    assert planned(clique, False).loop is not None
    assert planned(chain, True).loop is None


def test_jax_multiplies_no_crumbs(jax):
    """A slice of few rows is a slow product in XLA, and its other operand is copied for each."""
    shapes = (8, 2048, 1024), (8, 1024, 512)
    plan = planner.plan("ijk, ikl -> jl", *shapes, backend="jax", device="cpu")
    assert plan.loop is None or dict(plan.loop.axes).get("j", 2048) >= 256
    whole = plan if plan.loop is None else plan.alternatives(9)[0].plan
    assert make_loop(whole, {"i": 1, "j": 64}).cost.seconds > 1.3 * make_loop(whole, {"i": 1}).cost.seconds


def test_what_each_slice_and_each_stretch_of_one_takes_counts(torch):
    """Thousands of slices of 4 x 4 matrices are Python's time; slices along the last axis are read in stretches."""
    x, y = torch.ones(1024, 4), torch.ones(4, 1024)
    plan = planner.plan("ij, jk -> ik", x, y, device="cpu")
    short, long = (make_loop(plan, {"i": size}).cost.seconds for size in (1, 64))
    assert 1024 * 6e-5 < short < 1.3 * 1024 * 6e-5
    assert short > 8 * long
    rows, columns = (make_loop(plan, {axis: 64}).cost.seconds for axis in ("i", "k"))
    assert columns - rows > 16 * 1024 * 1e-7  # the result is written in as many stretches as it has rows


def test_slices_of_a_transposed_operand_are_read_as_they_lie(torch):
    x, y = torch.ones(64, 32), torch.ones(32, 4096)
    across, along = (
        make_loop(planner.plan("ij, jk -> ik", x, b, device="cpu"), {"k": 64}).cost.seconds
        for b in (y, y.t().contiguous().t())
    )
    assert across - along > 64 * 31 * 1e-7  # 32 rows in 64 slices, or each slice at once


@pytest.mark.parametrize(
    ("loop", "whole", "worth"),
    [((1.0, 100), (1.3, 100), True), ((1.0, 100), (1.2, 100), False), ((1.0, 5), (0.85, 100), True),
     ((1.0, 5), (0.75, 100), False), ((1.0, 7), (0.85, 100), False)],
)  # fmt: skip
def test_a_loop_is_clearly_faster_or_as_fast_and_far_leaner(loop, whole, worth):
    costs = (Cost(0, 0, 0, peak_bytes=peak, retained_bytes=0, seconds=seconds) for seconds, peak in (loop, whole))
    assert worth_cutting(*costs) is worth


def test_loops_that_are_as_fast_are_taken_for_the_memory_that_they_save():
    def planned(spec, shapes, **options):
        return planner.plan(spec, *needing_gradients(*shapes), device="cpu", **options)

    shapes = [(256, 256)] * 6
    plan = planned(CLIQUE, shapes, backend="jax")
    others = [other for other in plan.alternatives(20) if other.plan.loop is None]
    fastest = min(others, key=lambda other: other.plan.cost.seconds)
    assert fastest.plan.cost.seconds < plan.cost.seconds
    assert plan.loop is not None
    assert worth_cutting(plan.cost, fastest.plan.cost)
    assert fastest.loses.startswith("as fast as far as predictions tell")
    assert any(other.cost.seconds == fastest.plan.cost.seconds for other in candidates(plan))
    # Where time is not what is minimised, what is counted exactly decides.
    assert planned(CLIQUE, shapes, backend="jax", minimize="bytes").loop is None
    exactly = planned(CLIQUE, shapes, backend="jax", minimize=lambda cost: cost.seconds)
    assert exactly.cost.seconds <= fastest.plan.cost.seconds


def network(seed):
    """A chain or another small network, some with an index array, and which limits to set."""
    random = Random(seed)
    kind, count = random.choice((("chain", 3), ("chain", 4), ("dense", 3), ("gathers", 2)))
    spec, shapes, indices = MAKERS[kind](count, random)
    times, needs = random.choice((2, 6)), random.random() < 0.7
    operands = [planner.Operand([times * n for n in shape], requires_grad=needs) for shape in shapes]
    names = ("memory_limit", "retain_limit")[: random.choice((1, 2))]
    backend = random.choice(("numpy", "torch"))
    return (
        spec,
        operands,
        names,
        {"backend": backend, **{q: [times * n for n in shape] for q, shape in indices.items()}},
    )


CHAIN_IJKL = WORKLOADS["chain-ijkl"].cpu()


@pytest.mark.parametrize(
    ("spec", "operands", "names", "options"),
    [
        (*TOP_TWO, ("memory_limit",), {"backend": "torch", "e": (4096, 2)}),
        (CHAIN_IJKL.spec, needing_gradients(*CHAIN_IJKL.shapes), ("memory_limit",), {"backend": "torch"}),
        *map(network, range(examples(5, 40))),
    ],
)
def test_a_wider_limit_never_makes_a_plan_slower(spec, operands, names, options):
    """Loops compete with plans without loops, also where these are within the limits.

    Where the fastest plan without a loop is within them it is taken, though predictions may prefer a loop a little.
    """
    free = planner.plan(spec, *operands, device="cpu", memory_limit=10**15, **options)
    most = {"memory_limit": free.cost.peak_bytes, "retain_limit": free.cost.retained_bytes}
    found = []
    for share in (0.3, 0.45, 0.6, 0.8, 0.95, 1):
        limits = {name: int(share * most[name]) for name in names}
        with contextlib.suppress(planner.PlannerLimitError):
            found.append(planner.plan(spec, *operands, device="cpu", **limits, **options))
    for tight, wide in pairwise(found):
        assert wide.cost.seconds <= max(tight.cost.seconds, free.cost.seconds)


def test_a_loop_is_taken_where_it_is_faster_and_leaner_than_what_fits_without():
    free, wide, tight = (
        planner.plan(TOP_TWO[0], *TOP_TWO[1], e=(4096, 2), backend="torch", device="cpu", memory_limit=limit)
        for limit in (None, "8.7 MB", "7 MB")
    )
    without = planner.plan(TOP_TWO[0], *TOP_TWO[1], e=(4096, 2), backend="torch", device="cpu", minimize="peak")
    assert without.cost.peak_bytes <= 8_700_000
    assert wide.loop is not None
    assert free.cost.seconds < wide.cost.seconds < without.cost.seconds
    assert wide.cost == tight.cost


def test_a_loop_goes_to_json_and_back_and_runs():
    whole = planner.plan("ij, jk -> ik", (4, 6), (6, 5), backend="numpy")
    plan = planner.Plan.of(make_loop(whole, {"j": 4, "i": 3}))
    again = planner.Plan.from_json(plan.to_json())
    assert again == plan
    a, b = np.arange(24.0, dtype="float32").reshape(4, 6), np.arange(30.0, dtype="float32").reshape(6, 5)
    np.testing.assert_array_equal(again(a, b), a @ b)
    assert "loop over j by 4, i by 3" in str(plan)


@pytest.mark.parametrize("mode", ["raise", "clip", "drop"])
def test_a_loop_that_reads_index_arrays_goes_to_json_and_back(mode):
    whole = planner.plan("q[a]bc, ba -> ac", (5, 3, 4), (3, 6), q=(6,), backend="numpy", index_mode=mode)
    plan = planner.Plan.of(make_loop(whole, {"a": 2}))
    assert planner.Plan.from_json(plan.to_json()) == plan


def test_the_clique_is_sliced_where_that_is_fastest(torch):
    """Six matrices of 256 x 256, whose pairwise contraction builds 17 GB."""
    seeded = torch.Generator().manual_seed(0)
    operands = [torch.randint(-2, 3, (256, 256), generator=seeded).float() for _ in range(6)]
    plan = planner.plan(CLIQUE, *operands)
    assert plan.loop is not None
    got, measured = torch_memory(lambda: plan(*operands))
    assert measured.peak_bytes <= plan.cost.peak_bytes + SMALL <= 2e6
    ij, ik, il, jk, jl, kl = operands
    for j in (0, 255):
        column = ij[:, j] * (il * ((ik * jk[j]) @ (jl[j] * kl))).sum(1)
        assert torch.equal(got[:, j], column)
    trained = [x.requires_grad_() for x in operands]
    plan = planner.plan(CLIQUE, *trained)
    assert plan.cost.retained_bytes <= 256 * 256 * 4  # one matrix of 17 GB
    plan(*trained)
    _, measured = torch_backward_memory(lambda: plan(*trained), trained)
    assert measured.peak_bytes <= plan.cost.peak_bytes + SMALL <= 5e6


def test_the_clique_runs_with_gradients_where_its_pairwise_intermediate_is_vast(torch):
    """Nightly 1024 x 1024: n^4 elements are 4 TB, and without a limit the fastest plan takes 21 GB."""
    n = examples(100, 1024)
    seeded = torch.Generator().manual_seed(0)
    # Sums of n^2 products stay below 2^24: exact.
    operands = [torch.randint(-1, 2, (n, n), generator=seeded).float().requires_grad_() for _ in range(6)]
    limit = min(100 * n * n, 10**8)  # six gradients: 24 n^2
    plan = planner.plan(CLIQUE, *operands, memory_limit=limit)
    found, measured = torch_backward_memory(lambda: plan(*operands), operands)
    ij, ik, il, jk, jl, kl = (x.detach() for x in operands)
    for j in (0, n - 1):
        assert torch.equal(found[0][:, j], (il * ((ik * jk[j]) @ (jl[j] * kl))).sum(1))
    for k in (0, n - 1):
        assert torch.equal(found[5][k], ((il * ik[:, k : k + 1]) * (ij @ (jk[:, k : k + 1] * jl))).sum(0))
    assert measured.peak_bytes <= plan.cost.peak_bytes <= limit


@in_each("torch", "jax")
def test_only_the_steps_around_a_large_value_are_sliced(engine):
    """Of a chain of four products the first two make and read it. Slices of the whole would repeat the other two."""
    problem = Problem("ab,cb,ac,ad,de->ce", ((256, 16), (256, 16), (256, 256), (256, 16), (16, 192)))
    operands = engine.operands(problem)
    free = engine.plan(problem, operands, {})
    plan = engine.plan(problem, operands, {}, memory_limit=free.cost.peak_bytes * 6 // 10)
    loop, product = plan.programs.forward.steps
    assert (str(loop.op.spec), str(product.op.spec)) == ("ab, cb, ac, ad -> cd", "cd, de -> ce")
    assert [op.products for op in (step.op for step in plan.programs.backward.steps) if isinstance(op, Loop)] == [2]
    assert plan.path == free.path
    with mock.patch("planner.search.slicing._LoopSearch.price_parts", mock.Mock(return_value=[])):
        whole = engine.plan(problem, operands, {}, memory_limit=free.cost.peak_bytes * 6 // 10)
    assert whole.cost.seconds > plan.cost.seconds
    if engine.name == "torch":
        _, measured = torch_backward_memory(lambda: plan(*operands), operands)
        assert measured.peak_bytes <= plan.cost.peak_bytes <= plan.options.memory_limit
    assert re.search(
        "sliced, (not proven the best|at most [^;]*); keeps 1 intermediate, computes those of slices again", str(plan)
    )
    judge(engine, partial(values_and_gradients, call=lambda operands, indices: plan(*operands, **indices)), [problem])


def single_loops(plan, most_flops):
    """Every plan with one loop over up to three axes, around any part of the tree, that is no more FLOPs."""
    nodes = nodes_of(plan.tree)

    def joined(node):
        """The sets of connected nodes that end in a node."""
        sets = [{id(node)}]
        for child in node.children:
            sets += [s | below for s in sets for below in joined(child)] if isinstance(child, Node) else []
        return sets

    for root in nodes:
        for ids in joined(root):
            part = _cut_out(plan.contraction, plan.tree, root, lambda node, ids=ids: id(node) in ids)
            axes = [(axis, size) for axis, size in part.contraction.resolved.spec.sizes if size > 1]
            for chosen in (some for count in (1, 2, 3) for some in combinations(axes, count)):
                for sizes in product(*(halves(size) for _, size in chosen)):
                    flops = sum(
                        2
                        * joint_elements(node.op.spec)
                        * math.prod(
                            -(-size // length)
                            for (axis, size), length in zip(chosen, sizes, strict=True)
                            if id(node) in ids and axis not in node.op.spec.axes
                        )
                        for node in nodes
                    )
                    if flops <= most_flops:
                        yield make_loop(plan, dict(zip(dict(chosen), sizes, strict=True)), part)


def halves(size):
    """The sizes of slices: a half, a quarter, and so on."""
    return [] if size == 1 else [-(-size // 2), *halves(-(-size // 2))]


def test_a_loop_in_a_loop_meets_a_limit_that_no_single_loop_meets_with_as_few_flops():
    spec, shapes = "beha,eac,bfd,fdcg->gh", ((16, 8, 32, 4), (8, 4, 8), (16, 8, 4), (8, 4, 8, 4))
    whole = planner.plan(spec, *shapes, backend="numpy", optimize="greedy")
    plan = planner.plan(spec, *shapes, backend="numpy", optimize=whole.path, memory_limit=2457)
    (loop,) = (node.op for node in nodes_of(plan.tree) if isinstance(node.op, Loop))
    (inner,) = (node.op for node in nodes_of(loop.body.tree) if isinstance(node.op, Loop))
    assert (str(loop), str(inner)) == ("loop over b by 4", "loop over h by 1")
    tried = [looped.cost for looped in single_loops(whole, plan.cost.flops)]
    assert len(tried) > 1000
    assert any(cost.flops <= plan.cost.flops for cost in tried)
    assert not any(cost.flops <= plan.cost.flops and cost.peak_bytes <= 2457 for cost in tried)
    operands = [np.random.default_rng(0).integers(-2, 3, shape).astype("float32") for shape in shapes]
    expected = np.einsum(spec, *operands, optimize=True)
    np.testing.assert_array_equal(plan(*operands), expected)
    again = planner.Plan.from_json(plan.to_json())
    assert again == plan
    np.testing.assert_array_equal(again(*operands), expected)
    rows = [(row.program, row.lowering) for row in plan.analyze(*operands, rounds=1).steps]
    number = next(n for n, step in enumerate(loop.body.programs.forward.steps) if isinstance(step.op, Loop))
    outer = next(n for n, step in enumerate(plan.programs.forward.steps) if isinstance(step.op, Loop))
    of_inner = f"forward of a slice in step {number} of a slice in step {outer}"
    steps = inner.body.programs.forward.steps
    assert [row for row in rows if row[0] == of_inner] == [(of_inner, step.choice.lowering) for step in steps]


@in_each("numpy", "torch", "jax")
@pytest.mark.parametrize(("axis", "second"), [("n", "nj"), ("i", "nj"), ("j", "nj"), ("n", "p[n]j"), ("j", "p[n]j")])
def test_what_a_loop_around_a_part_reads_is_guarded(engine, axis, second):
    """NaN at the place of a dropped index counts for nothing, in the loop or in a later step."""
    rows = {"q": np.array([0, 99, 1, 99, 2]), "p": np.array([2, 0, 99, 1, 1])}
    taken, first = (rows, (40, 6)) if second == "p[n]j" else ({"q": rows["q"]}, (5, 6))
    shapes = ((5, 4), first, (4, 6, 3), (40, 3))
    problem = Problem(f"ni, {second}, ijk, q[n]k -> ik", shapes, indices=taken, index_mode="drop", seed=1)
    operands, indices = engine.operands(problem), engine.indices(problem)
    plan = engine.plan(problem, operands, indices, optimize=((0, 1), (0, 2), (0, 1)))
    part = axis_part(plan.contraction, plan.tree, "j")
    assert part is not None
    plan = make_loop(plan, {axis: 2}, part)
    assert plan.loop.spec.arrays[:1] == ("p",) * ("p" in taken)
    assert len(plan.programs.forward.computing) > 1
    judge(engine, partial(values_and_gradients, call=lambda operands, indices: plan(*operands, **indices)), [problem])
    spoilt = [np.array(engine.described(x)[0]) for x in operands]
    spoilt[0][[1, 3]] = np.nan
    if "p" in taken:
        spoilt[0][2] = np.inf
    else:
        spoilt[1][3] = np.inf
    got = plan(*(engine.array(x) for x in spoilt), **indices)
    np.testing.assert_array_equal(engine.described(got)[0], engine.described(plan(*operands, **indices))[0])


@in_each("numpy", "torch", "jax")
def test_slices_of_a_half_type_are_added_up_in_float32(engine):
    """2048 + 1 is 2048 in float16: ones that are added one by one would be lost."""
    x, ones = (engine.array(np.array([first] + [1.0] * 20, np.float16)) for first in (2048.0, 1.0))
    assert float(make_loop(planner.plan("i, i -> ", x, ones), {"i": 1})(x, ones)) == 2068


@pytest.mark.parametrize("operands", [1, 2, 3])
def test_every_value_of_a_loop_has_storage_of_its_own(operands):
    spec = ",".join(["ij"] * operands) + "->i"
    plan = planner.plan(spec, *needing_gradients(*[(4, 6)] * operands), backend="numpy")
    programs = make_loop(plan, {"i": 2}).programs
    assert [x.base for x in programs.variables] == list(range(2 * operands + 2))


def test_the_steps_of_a_shorter_last_slice_are_its_own():
    plan = make_loop(planner.plan("ij, jk -> ik", (5, 7), (7, 3), backend="numpy"), {"j": 3})
    assert [sizes for sizes, _ in slice_counts(plan.loop.axes, plan.resolved.spec)] == [{"j": 3}, {"j": 1}]
    flops = 2 * 5 * 7 * 3
    adds = 3 * 5 * 3
    assert plan.cost.flops == flops + adds
    assert [body.resolved.spec.size("j") for body in plan.loop.bodies] == [3, 1]


@in_each("numpy", "torch", "jax")
def test_a_loop_is_analyzed_as_a_step_and_in_its_first_slice(engine):
    rows = {"q": np.arange(40) % 7}
    problem = Problem("ni, q[n]ij, nj -> n", ((40, 30), (7, 30, 20), (40, 20)), indices=rows)
    operands, indices = engine.operands(problem), engine.indices(problem)
    plan = make_loop(engine.plan(problem, operands, indices), {"n": 16})
    found = plan.analyze(*operands, **indices, rounds=1)
    body, programs = plan.loop.body.programs, ("forward", "backward")[: 1 + engine.differentiates]
    for program in programs:
        (loop,) = (row for row in found.steps if row.program == program)
        assert loop.lowering == "loop over n by 16"
        if engine.name == "torch":
            assert loop.measured.live_bytes <= loop.predicted.live_bytes
        rows = [row for row in found.steps if row.program == f"{program} of a slice in step 0"]
        steps = getattr(body, program).steps
        assert [row.lowering for row in rows] == [step.choice.lowering for step in steps]
        assert [row.predicted.live_bytes for row in rows] == [step.live_bytes for step in steps]
        assert found.total(program).predicted.live_bytes == loop.predicted.live_bytes
    assert found.total("forward").measured.retained_bytes == 0
    assert f"  {programs[-1]} of a slice in step 0" in str(found).splitlines()


def test_an_axis_that_cuts_an_index_array_in_two_ways_is_not_cut():
    plan = planner.plan(
        "q[n]a, aq[m], nm -> a", (400, 2000), (2000, 400), (3000, 3000), q=(3000,), backend="numpy", minimize="peak"
    )
    assert str(plan.loop) == "loop over a by 1"


def test_a_loop_is_there_at_other_sizes_too():
    """As in graphs of `torch.compile`: it cuts the same axes into slices of the same sizes."""
    plan = planner.Plan.of(make_loop(planner.plan("ij, jk -> ik", (4, 6), (6, 5), backend="numpy"), {"j": 2}))
    other = planner.plan("ij, jk -> ik", (8, 10), (10, 7), backend="numpy")
    resized = planner.Plan.of(resize_plan(plan, other.contraction, {"i": 8, "j": 10, "k": 7}))
    assert str(resized.loop) == "loop over j by 2"
    a, b = np.arange(80.0, dtype="float32").reshape(8, 10), np.arange(70.0, dtype="float32").reshape(10, 7)
    np.testing.assert_array_equal(resized(a, b), a @ b)
