"""The host's side of calls on a card: what they launch, how long that takes, and how a bad index is told.

Launches and times are those of a stand-in for a card, `stand_in_card.py`. Values are those of Triton's interpreter, on
tensors of a CPU that say that they are on a card.
"""

import contextlib
import copy
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
import weakref
from unittest import mock

import numpy as np
import pytest
from conftest import examples, run_python
from hypothesis import assume, example, given, settings
from laws import MODES, plan_of

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import planner  # noqa: E402
from planner.backends.common.masks import find_read_rows  # noqa: E402
from planner.backends.torch import checks  # noqa: E402
from planner.backends.torch import ops as torch_ops  # noqa: E402
from planner.backends.torch.executable import Executable  # noqa: E402
from planner.bench.cards.random_specs import CudaEngine  # noqa: E402
from planner.cost.device import H200  # noqa: E402
from planner.kernels.grouped_matmul import torch_grouped, torch_grouped_mm, triton_grouped  # noqa: E402
from planner.kernels.grouping import torch_grouping, triton_grouping, triton_launch  # noqa: E402
from planner.kernels.segment_sum import triton_sum  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.ops import Einsum, Guard  # noqa: E402
from planner.testing import Problem  # noqa: E402
from planner.testing.judgement import Subject  # noqa: E402
from planner.testing.laws import LAWS  # noqa: E402
from planner.testing.strategies import problems  # noqa: E402

CHEAP = dataclasses.replace(H200, flop_rate=float("inf"), launch_seconds=0.0, kernel_seconds=0.0, group_seconds=0.0)
SPEC = "nij, q[n]jk -> nik"


@pytest.fixture(scope="module")
def stand_in():
    """What the functions of `stand_in_card.py` return. Memory is reused at once, as torch reuses a card's."""
    reused = {"MALLOC_MMAP_THRESHOLD_": str(2 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **reused}
    names = [
        "seed_prepared", "convolution", "experts", "dropping", "seed_sorted", "replayed", "aligned", "unprepared",
        "takes", "places", "told",
    ]  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(pathlib.Path(__file__).with_name("stand_in_card.py")), *names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]) | {"stderr": run.stderr}


def test_a_prepared_call_launches_its_kernels_only(stand_in):
    """A call, the same in training, and both gradients. A table is made once: here by the calls before."""
    found = stand_in["seed_prepared"]
    assert found["launches"] == [["product_kernel"], ["product_kernel"], ["product_kernel", "product_kernel"]]


def test_a_prepared_call_takes_few_calls_of_python(stand_in):
    """Their number stands for the host's time, which other processes disturb: 20, 29 and 43 us in November 2026."""
    for found, most in zip(stand_in["seed_prepared"]["calls"], (140, 165, 215), strict=True):
        assert found <= most


def test_an_index_that_is_not_prepared_takes_four_launches_more(stand_in):
    """No launch waits for the device. The backward pass checks and sorts nothing: it has another table of tasks.

    In half types both gradients are one walk. The kernels write NaN for a bad index themselves.
    """
    forward = ["check_kernel", "starts_kernel", "tasks_kernel", "product_kernel", "sort"]
    apart = ["tasks_kernel", "product_kernel", "product_kernel", "add_parts_kernel"]
    walk = ["tasks_kernel", "pair_kernel", "add_parts_kernel"]
    assert stand_in["unprepared"] == {"float32": [forward, forward, apart], "bfloat16": [forward, forward, walk]}


def test_a_take_is_one_launch(stand_in):
    """It checks an index array that is not prepared itself. Its gradient is a sum of rows, which are sorted once."""
    found = stand_in["takes"]
    assert found["prepared"] == [["take_kernel"], ["sum_kernel"]]
    assert found["not"][0] == ["take_kernel"]
    assert found["prepared, calls"] <= 125  # 28 us in November 2026


def test_a_convolution_launches_two_kernels(stand_in):
    """Its products, and their sums; so does the gradient of its rows. That of its matrices adds up parts of sums."""
    twice, forward, backward = stand_in["convolution"]
    assert twice == 2
    assert forward == ["product_kernel", "sum_kernel"]
    assert backward == [*forward, "product_kernel", "add_parts_kernel"]


def test_a_layer_of_experts_makes_its_tables_once(stand_in):
    """Which rows an expert reads depends on sizes alone, and results of one row are added up without a sort.

    Gates are multiplied, and rows in another order copied, by torch. The plan of half types has no such rows.
    """
    copy_of_rows, products = ["clone", "_unsafe_view"], ["product_kernel"] * 2
    assert stand_in["experts"] == {
        "float32": [
            ["product_kernel", "mul", *copy_of_rows, "sum"],
            [*products, *copy_of_rows, "mul", "sum", "mul", "sum"],
        ],
        "bfloat16": [["product_kernel", "bmm"], [*products, "bmm", "bmm"]],
    }


def test_dropped_rows_of_a_prepared_index_are_masked_without_a_look(stand_in):
    """`launches_of` lets nothing wait for the device. No operand lacks the row's axis, so none has to be repeated."""
    mask = ["lt", "full", "where"]
    product, take = stand_in["dropping"].values()
    assert product == [["product_kernel", *mask * 2], ["product_kernel"] * 2 + mask * 3]
    assert take == [["take_kernel", *mask], [*mask * 2, "full", "where", "new_zeros", "index_add_"]]


def test_replayed_calls_read_their_own_arrays(stand_in):
    assert stand_in["replayed"] == [True] * 5


def test_kernels_know_whether_arrays_begin_at_multiples_of_16_bytes(stand_in):
    """Compiled for such arrays, they read several words at once. A replay keeps compiled kernels of its own."""
    assert stand_in["aligned"] == [1, 1, 0, 0, 0, 1, 0, 0]


def test_sorted_rows_have_no_order(stand_in):
    launches = ["tasks_kernel", "product_kernel"]
    assert stand_in["seed_sorted"] == {"sorted": [True, launches], "not": [False, launches]}


def test_kernels_start_where_their_tensors_are(stand_in):
    """Tensors of device 1 while device 0 is current, on two streams in turn; each stream has a flag."""
    expected = {"launches": [[[1, 5]], [[1, 5]], [[1, 6]]], "current": 0, "flags": [[1, 5], [1, 6]]}
    assert stand_in["places"] == expected


def test_where_a_bad_index_is_told(stand_in):
    """With its value, if the array has not changed since; once; and at once where a result cannot hold NaN."""
    told = dict(stand_in["told"])
    assert told.pop("after it") == ""
    assert told.pop("changed").startswith("index array 'q'[7] was outside of [-4, 4), the range of the dimension q[n]")
    late, now = ("next call", "backward", "synchronize", "group"), ("every call", "integers")
    for values, names in ((4, late), (9, now)):
        for name in names:
            assert told.pop(name).startswith(f"index array 'q'[7] is {values}, outside of [-4, 4), the range"), name
    assert not told


def test_a_call_that_poisons_is_no_replay_of_one_that_does_not(card, monkeypatch):
    """Calls of equal shapes and strides differ in what becomes of dropped rows."""
    a, c, q = torch.ones(40, 1, 8), torch.ones(5, 8, 8), torch.arange(40) % 6
    keys = []
    monkeypatch.setattr(triton_grouped, "replayed", lambda key, arrays, run: keys.append(key))
    groups = torch_grouping.group_rows(q, 5)
    for each in (groups, dataclasses.replace(groups, poisons=True), dataclasses.replace(groups, drops=False)):
        triton_grouped.grouped_matmul(a, c, each)
        triton_grouped.grouped_gradients(a, a, c, each)
    assert len(set(keys)) == 6


def test_what_is_pending_is_raised_at_the_end(stand_in):
    assert "IndexRangeError: index array 'q'[7] is 9, outside of [-4, 4)" in stand_in["stderr"]


@pytest.fixture
def card(monkeypatch):
    """Tensors that say that they are on a card. No test leaves an error behind."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch_grouped_mm, "_waits", lambda device: False)
    yield
    with contextlib.suppress(planner.IndexRangeError):
        checks.raise_pending()


@pytest.mark.parametrize(
    ("rows", "groups", "skew"),
    [
        *itertools.product([0, 1, 200], [1, 7], ["even", "one", "sorted"]),
        (130, 70, "even"),
        (70, 40, "even"),
        (64, 4, "full"),
    ],
)
def test_rows_are_sorted_and_cut(monkeypatch, rows, groups, skew):
    """As NumPy sorts them; blocks are small here."""
    for name, value in {"_BLOCK": 64, "_TASKS": 32, "_GROUPS": 32}.items():
        monkeypatch.setattr(triton_grouping, name, value)
    random = np.random.default_rng(rows + groups)
    q = np.full(rows, groups // 2) if skew == "one" else random.integers(0, groups + 1, rows)
    q = np.sort(q) if skew == "sorted" else np.arange(rows) // 16 if skew == "full" else q
    starts = np.searchsorted(np.sort(q), np.arange(groups + 1))
    order, offsets = triton_grouping.sort_rows(torch.from_numpy(q), groups)
    assert order.tolist() == np.argsort(q, kind="stable").tolist()
    assert offsets.tolist() == starts.tolist()
    ends = [*starts[1:], rows]
    inner, step = (1, 16) if skew in ("even", "full") else (3, 8)
    for drops, empty in ((False, True), (True, False)):
        tasks, expected, part_starts = (
            triton_grouping.cut_tasks(offsets, rows, groups, inner, step, drops, empty),
            [],
            [0],
        )
        for group in range(groups + drops):
            first, last = starts[group] * inner, ends[group] * inner
            firsts = [*range(first, last, step)] or [first] * empty
            cut = len(firsts) > 1
            slots = range(part_starts[-1], part_starts[-1] + len(firsts)) if cut else [-1] * len(firsts)
            expected += [[group, x, min(step, last - x), slot] for x, slot in zip(firsts, slots, strict=True)]
            if group < groups:
                part_starts.append(part_starts[-1] + len(firsts) * cut)
        table = tasks.table.T.tolist()
        assert table[: len(expected)] == expected
        assert {x[0] for x in table[len(expected) :]} <= {-1}
        assert tasks.part_starts.tolist() == part_starts
        assert part_starts[-1] <= tasks.slots


def problem(spec=SPEC, groups=5):
    random = np.random.default_rng(0)
    shapes = {
        SPEC: ((40, 2, 3), (groups, 3, 4)),
        "nd, q[n]d -> n": ((40, 3), (groups, 3)),
        "q[n]d -> nd": ((groups, 3),),
    }.get(spec)
    shapes = shapes or ((40, 2, 3), (40, 2, 4))
    operands = [torch.from_numpy(random.integers(-3, 4, x).astype("f4")).requires_grad_() for x in shapes]
    return operands, torch.from_numpy(random.integers(-groups, groups, 40))


@pytest.mark.parametrize(
    ("spec", "device", "dtype"),
    [
        (SPEC, CHEAP, torch.int64), (SPEC, CHEAP, torch.int8), ("nd, q[n]d -> n", CHEAP, torch.int32),
        (SPEC, H200, torch.int64), ("q[n]d -> nd", H200, torch.int32), ("nij, nik -> q[n]jk", CHEAP, torch.int64),
    ],
)  # fmt: skip
def test_results_of_a_bad_index_are_nan(card, spec, device, dtype):
    """A grouped product's row and this row's gradient; whole arrays of other steps."""
    operands, q = problem(spec)
    sizes = {"q": 5} if spec.endswith("q[n]jk") else None
    plan = planner.plan(spec, *operands, q=q, sizes=sizes, device=device)
    assert ("take, Triton" in str(plan)) == (device is H200)
    with mock.patch.object(torch.Tensor, "is_cuda", property(lambda x: False)):
        expected = planner.contract(spec, *operands, q=q, sizes=sizes)
        gradient = torch.randint(-3, 4, expected.shape).float()
        wanted = torch.autograd.grad(expected, operands, gradient)
    result = plan(*operands, q=q.to(dtype))
    found = torch.autograd.grad(result, operands, gradient)
    planner.synchronize()
    assert torch.equal(result, expected)
    assert all(map(torch.equal, found, wanted))
    q = q.to(dtype)
    q[[7, 21]] = torch.tensor([5, -6], dtype=dtype)
    result = plan(*operands, q=q)
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[21\] is -6, outside of \[-5, 5\)") as caught:
        planner.synchronize()
    assert "synchronize(every_call=True)" in caught.value.__notes__[0]
    gradients = torch.autograd.grad(result, operands, gradient)  # after the error, too
    if sizes or spec == "nd, q[n]d -> n":
        assert result.isnan().all()
        assert all(x.isnan().any() for x in gradients)
        return
    bad = torch.zeros(40, dtype=torch.bool)
    bad[[7, 21]] = True
    assert result[bad].isnan().all()
    assert torch.equal(result[~bad], expected[~bad])
    if device is H200:  # which rows of gradients are NaN depends on the steps
        assert all(x.isnan().any() for x in gradients)
        return
    of_rows, of_matrices = gradients
    assert of_rows[bad].isnan().all()
    assert torch.equal(of_rows[~bad], wanted[0][~bad])
    assert of_matrices.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("nsj, q[ns]jk -> nk", ((5, 3), (5, 3))), ("snj, q[sn]jk -> nk", ((3, 5), (3, 5))),
        ("stj, q[snt]jk -> nk", ((2, 3), (2, 5, 3))),
    ],
)  # fmt: skip
def test_sums_of_products_are_nan_where_an_index_was_bad(card, spec, shapes, dtype):
    """A product that is added up makes its row of the result NaN, and no other row."""
    random, groups, table = np.random.default_rng(0), 4, load_backend("torch").table
    rows, matrices = random.integers(-2, 3, (*shapes[0], 7)), random.integers(-2, 3, (groups, 7, 6))
    q = random.integers(-groups, groups, shapes[1])
    operands = [torch.from_numpy(x).to(dtype) for x in (rows, matrices)]
    plan = planner.plan(spec, *operands, q=torch.from_numpy(q), device=H200)
    op = Einsum(plan.resolved.spec, str(dtype).removeprefix("torch."))

    def run(index):
        (found,) = table.run("grouped matmul, Triton", op, operands, Executable(plan, table).prepare({"q": index}))
        assert found.dtype == dtype
        return found.double().numpy()

    expected, prepared = planner.contract(spec, rows, matrices, q=q), planner.group(torch.from_numpy(q), groups)
    for index in (torch.from_numpy(q), prepared, prepared):
        assert np.array_equal(run(index), expected)
    row, axis = 2, spec[spec.index("[") :].index("n") - 1
    q[tuple(row if d == axis else 1 for d in range(q.ndim))] = groups
    found = run(torch.from_numpy(q))
    assert np.isnan(found[row]).all()
    assert np.array_equal(np.delete(found, row, 0), np.delete(expected, row, 0))
    with pytest.raises(planner.IndexRangeError):
        planner.synchronize()


def test_sums_over_groups_are_nan_if_an_index_was_bad(card):
    """Each kernel that walks sorted rows says so itself; no launch multiplies its sums by NaN."""
    rows, others = torch.ones(40, 2, 8), torch.ones(40, 2, 8)
    for bad in (False, True):
        q = torch.arange(40) % 5
        q[7] = 5 if bad else 0
        check = triton_grouping.Check(torch.zeros(1, dtype=torch.int64), torch.ones(1), 0)
        groups = torch_grouping.group_rows(q, 5, check)
        assert groups.poisons
        with mock.patch.object(torch.nn.functional, "grouped_mm", lambda x, y, offs: x.new_full((5, 8, 8), 3.0)):
            of_torch = torch_grouped_mm.grouped_outer(rows, others, groups)
        matrices = triton_grouped.grouped_gradients(rows, others, torch.ones(5, 8, 8), groups)[1]
        sums = triton_sum.grouped_sum(rows.flatten(1), groups)
        for found in (triton_grouped.grouped_outer(rows, others, groups), matrices, sums, of_torch):
            assert bool(found.isnan().all()) == bad
            assert bool(found.isnan().any()) == bad


def test_a_flag_that_inference_mode_made_serves_training(card, monkeypatch):
    (pool,), q = problem("q[n]d -> nd")
    monkeypatch.setattr(checks, "_flags", {})
    plan = planner.plan("q[n]d -> nd", pool, q=q, device=H200)
    for _ in range(2):
        with torch.inference_mode():
            plan(pool, q=q)
            plan(pool, q=q + 9)
            with pytest.raises(planner.IndexRangeError):
                planner.synchronize()
        (flag,) = checks._flags.values()
        assert not flag.poison.is_inference()
        flag.captured = True  # as for a flag of a graph: its memory is used on
    torch.func.grad(lambda x: plan(x, q=q).sum())(pool)
    plan(pool, q=q).sum().backward()
    assert pool.grad.sum() == q.numel() * pool.shape[1]


def test_a_captured_graph_raises_a_flag_that_was_there_before(card, monkeypatch):
    """While a graph is captured no memory of the host is allocated; without a flag the device refuses a bad index."""
    operands, q = problem()
    plan = planner.plan(SPEC, *operands, q=q, device=CHEAP)
    bad = q.where(q != 0, 5)
    monkeypatch.setattr(checks, "_flags", {})
    with monkeypatch.context() as capture:
        capture.setattr(torch_ops, "captured", lambda x: True)
        capture.setattr(checks, "captured", lambda x: True)
        with pytest.raises(RuntimeError, match=r"'q' has values outside"):
            plan(*operands, q=bad)
    plan(*operands, q=q)
    (flag,) = checks._flags.values()
    monkeypatch.setattr(checks, "_flags", {(0, 1): flag})
    with monkeypatch.context() as capture:
        capture.setattr(torch_ops, "captured", lambda x: True)
        capture.setattr(checks, "captured", lambda x: True)
        assert plan(*operands, q=bad).isnan().any()
    assert list(checks._flags) == [(0, 1)]
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[\d+\] is 5"):
        planner.synchronize()


@pytest.mark.parametrize("mode", ["raise", "drop"])
def test_sorted_rows_of_a_prepared_index(card, mode):
    """They are walked as they are, unless one is dropped; so does torch's grouped product take and return them."""
    (a, c), q = problem()
    falls = planner.group(q.sort().values, 5, index_mode=mode)  # negative values count from the end, or are dropped
    assert falls.groups.order is not None
    rises = planner.group((q % 5).sort().values, 5, index_mode=mode)
    assert rises.groups.order is None
    assert rises.groups.row_numbers.tolist() == [*range(40)]
    result = planner.plan(SPEC, a, c, q=rises, index_mode=mode, device=CHEAP)(a, c, q=rises)
    assert torch.equal(result, a @ c[rises.values])
    with mock.patch.object(torch.Tensor, "is_cuda", property(lambda x: False)):  # moved to a CPU
        moved = copy.deepcopy(rises)
        assert moved.groups.order.tolist() == [*range(40)]
        assert torch.equal(torch_grouped.grouped_matmul(a.detach(), c.detach(), moved.groups), result)
    matrices = torch.zeros(5, 8, 8)
    rows = torch.ones(40, 2, 8)
    with mock.patch.object(torch.nn.functional, "grouped_mm", lambda x, y, offs: x.new_full((80, 8), 3.0)):
        found = torch_grouped_mm.grouped_matmul(rows, matrices, rises.groups)
    assert found.shape == (40, 2, 8)
    assert bool((found == 3).all())


needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card")


@needs_card
def test_two_streams_of_a_card():
    a, c, q = (x.cuda() for x in (torch.ones(64, 1, 16), torch.ones(4, 16, 16), torch.randint(0, 4, (64,))))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        result = planner.contract(SPEC, a, c, q=q)
    stream.synchronize()
    assert torch.equal(result, a @ c[q])
    planner.contract(SPEC, a, c, q=q + 1)
    with pytest.raises(planner.IndexRangeError):
        planner.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA cards")
def test_two_cards():
    a, c, q = (x.to("cuda:1") for x in (torch.ones(64, 1, 16), torch.ones(4, 16, 16), torch.randint(0, 4, (64,))))
    with torch.cuda.device(0):
        result = planner.contract(SPEC, a, c, q=q)
    assert result.device == a.device
    assert torch.equal(result, a @ c[q])


@pytest.mark.parametrize(
    ("spec", "shape", "row"),
    [
        ("x[n]j, w[n]jk -> nk", (40,), "taken rows times matrices, Triton"),
        ("x[n]j, w[n]jk -> d[n]k", (40,), "rows times matrices, added up, Triton"),
        ("x[ni]j, w[n]jk -> d[ni]k", (3, 70), "rows times matrices, added up, Triton"),
    ],
)
def test_what_is_nan_stays_nan_after_the_error(card, spec, shape, row):
    """Of several index arrays one is bad: the error is raised between the passes, and once."""
    rows, matrices = torch.ones(7, 3, requires_grad=True), torch.ones(4, 3, 5, requires_grad=True)
    names = [name for name in "xwd" if f"{name}[" in spec]
    for bad in names:
        shapes = {name: shape[:1] if name == "w" else shape for name in names}
        indices = {name: torch.zeros(size, dtype=torch.int64) for name, size in shapes.items()}
        sizes = {"d": 6} if "d" in names else None
        plan = planner.plan(spec, rows, matrices, sizes=sizes, **indices, device=CHEAP)
        assert plan.steps[0].choice.lowering == row
        indices[bad][2] = 9
        result = plan(rows, matrices, **indices)
        with pytest.raises(planner.IndexRangeError, match=f"'{bad}'"):
            planner.synchronize()
        gradients = torch.autograd.grad(result, (rows, matrices), torch.ones_like(result))
        assert result.isnan().any()
        assert all(x.isnan().any() for x in gradients)
        planner.synchronize()


def test_a_call_leaves_no_cycle_behind(card):
    """Its index arrays would live until Python collects cycles, which knows nothing of the memory of a card."""
    operands, q = problem()
    plan = planner.plan(SPEC, *operands, q=q, device=CHEAP)
    plan(*operands, q=q)
    gc.collect()
    gc.disable()
    try:
        held = weakref.ref(array := q.clone())
        plan(*operands, q=array)
        del array
        assert held() is None
    finally:
        gc.enable()


@pytest.fixture
def made_since():
    """Two functions: one begins anew, the other returns the tensors that were made since, and are alive.

    Python lists no objects that are frozen; to look through all takes a second.
    """

    def begin():
        gc.collect()
        gc.freeze()

    def tensors():
        gc.collect()
        return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]

    yield begin, tensors
    gc.unfreeze()


@pytest.mark.parametrize(
    ("spec", "shapes", "prepared"),
    [
        (SPEC, ((40, 2, 3), (5, 3, 4)), False),
        (SPEC, ((40, 2, 3), (5, 3, 4)), True),
        ("nd, q[n]d -> n", ((40, 3), (5, 3)), False),
        ("q[n]d -> nd", ((5, 3),), False),
    ],
)
def test_a_compiled_call_leaves_nothing_in_its_pool(cheap, made_since, monkeypatch, spec, shapes, prepared):
    """A pool serves one thread, and what a CUDA graph's holds after a call must be results. So a flag, with the first
    call on a stream or after an error, is made in another thread.
    """
    monkeypatch.setattr(checks, "_flags", {})
    begin, tensors = made_since
    streams, apart = iter(range(1, 99)), []
    monkeypatch.setattr(triton_launch, "place_of", lambda x: (0, stream))
    ones = torch.ones

    def recording_ones(*arguments, **options):
        made = ones(*arguments, **options)
        if threading.current_thread() is not threading.main_thread():
            apart.append(made)
        return made

    monkeypatch.setattr(torch, "ones", recording_ones)
    leaves = [torch.randint(-2, 3, shape).float().requires_grad_() for shape in shapes]
    rows = torch.arange(40) % 5
    q = planner.group(rows, 5) if prepared else rows
    compiled = torch.compile(lambda *xs: planner.contract(spec, *xs, q=q), backend="aot_eager", fullgraph=True)

    def call():
        result = compiled(*leaves)
        return torch.autograd.grad(result, leaves, torch.ones_like(result))

    stream = next(streams)
    expected = call()  # compiles
    for bad in (False, False, True):
        stream = next(streams)
        begin()
        if bad and not prepared:
            rows[3] = 9
            with contextlib.suppress(planner.IndexRangeError):
                call()
            rows[3] = 3
            with contextlib.suppress(planner.IndexRangeError):
                planner.synchronize()
        found = call()
        assert all(map(torch.equal, found, expected))
        del found
        allowed = {id(y) for flag in checks._flags.values() for y in (flag.word, flag.unread, flag.word._base)}
        left = [x for x in tensors() if id(x) not in allowed]
        assert all(any(x is y for y in apart) for x in left), left
    assert prepared or apart


@pytest.mark.parametrize("when", ["thread", "exit"])
def test_a_flag_is_made_after_the_main_thread_ended(when):
    """By a thread that works on, and by what runs at the end of the program; errors in making it are raised."""
    program = """
import atexit, sys, threading
import torch
from planner.backends.torch.checks import _apart

def make():
    torch.cuda.nothing

def late():
    if sys.argv[1] == "thread":
        threading.main_thread().join()
    print(_apart(lambda: torch.ones(1)).tolist())
    try:
        _apart(make)
    except AttributeError:
        print("raised", flush=True)

threading.Thread(target=late).start() if sys.argv[1] == "thread" else atexit.register(late)
"""
    assert run_python(program, when).split() == ["[1.0]", "raised"]


class OnCard(CudaEngine):
    """The engine of `planner.bench.cards.random_specs`, for tensors that say that they are on a card."""

    place = "cpu"


@pytest.fixture
def cheap(card, monkeypatch):
    monkeypatch.setattr(type(load_backend("torch")), "device", lambda self, operands: CHEAP)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_law_of_index_modes_holds_on_a_card(cheap, dtype):
    """The error arrives later there, for which the engine waits."""
    (law,) = [law for law in LAWS if law.name == "index modes"]
    tried = []

    two_dimensions = Problem(
        "q[ca] c q[cb] b, cab, c -> cb",
        ((2, 2, 2, 2), (2, 2, 2), (2,)),
        indices={"q": np.array([[3, 1], [2, 2]])},
        index_mode="drop",
        dtypes=(dtype,) * 3,
        seed=255,
    )

    in_one_step = Problem(
        "q[a] bcd, cdb q[e], dbc -> cb",
        ((3, 2, 2, 4), (2, 4, 1, 3), (4, 2, 2)),
        sizes=(2, 2),
        indices={"q": np.array([2, 0, 0])},
        index_mode="drop",
        dtypes=("int16",) * 3,
    )

    @settings(max_examples=25)
    @example(two_dimensions)  # the dimension that is named is not the one that is read first
    @example(in_one_step)  # nor is it where integers are checked by the step that reads them
    @given(problems(gathers=True, max_size=3, index_modes=("raise", "drop", "clip"), dtypes=(dtype,)))
    def hold(problem):
        law.holds(OnCard(), Subject(), problem)
        tried.append(problem)

    hold()
    assert tried


def test_errors_of_a_problem_on_a_card_do_not_reach_the_next(cheap):
    """Nor are they lost, if nothing else went wrong."""
    engine, problem = OnCard(), Problem("q[n]d -> nd", ((3, 2),), indices={"q": np.array([0, 2, 1])})
    operands, q = engine.operands(problem), torch.tensor([0, 5, 1])
    with contextlib.suppress(ZeroDivisionError), engine.context(problem):
        planner.contract(problem.spec, *operands, q=q)
        1 / 0  # noqa: B018 -- something else goes wrong
    planner.synchronize()
    with pytest.raises(planner.IndexRangeError, match="'q'.1. is 5"), engine.context(problem):
        planner.contract(problem.spec, *operands, q=q)


FORKS = """
import os, torch, planner
from planner.cost.device import H200
torch.Tensor.is_cuda = property(lambda x: True)
torch.cuda.is_current_stream_capturing = lambda: False
pool, q = torch.ones(5, 3), torch.zeros(40, dtype=torch.int64)
plan = planner.plan("q[n]d -> nd", pool, q=q, device=H200)
q[3] = 9
plan(pool, q=q)
child = os.fork()
if not child:
    try:
        planner.synchronize()
        os._exit(0)
    finally:
        os._exit(1)
print(os.waitpid(child, 0)[1])
try:
    planner.synchronize()
except planner.IndexRangeError as error:
    print(error)
"""


def test_a_forked_process_raises_no_error_of_its_parent():
    child, error = run_python(FORKS, TRITON_INTERPRET="1").splitlines()
    assert child == "0"
    assert "'q'[3] is 9" in error


def test_tables_of_tasks_belong_to_a_stream(card, monkeypatch):
    """Another stream would not wait for a table; a table of a graph that is captured is written when it is replayed."""
    groups, place = planner.group(torch.arange(6) % 3, 3).groups, [(0, 1)]
    monkeypatch.setattr(triton_launch, "place_of", lambda x: place[0])
    first = groups.tasks(1, 64, False, False)
    assert groups.tasks(1, 64, False, False) is first
    place[0] = (0, 2)
    assert groups.tasks(1, 64, False, False) is not first
    place[0] = (0, 3)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = groups.tasks(1, 64, False, False)
    assert groups.tasks(1, 64, False, False) is not captured


def test_a_prepared_index_knows_its_longest_group(card):
    """Then sums that no group cuts need no second kernel. Rows of several elements count as so many."""
    q = torch.zeros(200, dtype=torch.int64)
    q[:3] = 1
    prepared = planner.group(q, 4)
    assert prepared.longest == 197
    assert prepared.groups.tasks(1, 256, False, True).slots == 0
    assert prepared.groups.tasks(2, 256, False, True).slots > 0
    assert prepared.groups.split(40).longest == 197 * 40
    other = planner.group(torch.tensor([5, 5, 5, 0, 1, 2]), 6)
    tensors = {name: x for name, x in other.state_dict().items() if "extra" not in name}
    ordered = planner.group(torch.arange(6), 6)
    assert ordered.groups.order is None
    ordered.load_state_dict(tensors, strict=False)
    assert torch.equal(ordered.groups.order, other.order)
    assert ordered.longest is None


@settings(max_examples=examples(45, 1500))
@given(problems(gathers=True, index_modes=MODES, strided=False))
def test_rows_that_are_read_are_marked_as_they_are_counted(problem):
    """On a card a guard marks rows, and does not look at values, for which it would wait."""
    plan = plan_of(problem, "torch")
    programs = filter(None, (plan.programs.forward, plan.programs.backward))
    ops = [step.op for program in programs for step in program.steps]
    guards = [op for op in ops if isinstance(op, Guard) and op.rows is not None]
    assume(guards)
    index = Executable(plan, load_backend("torch").table).prepare(
        {name: torch.from_numpy(q) for name, q in problem.indices.items()}
    )
    for op in guards:
        x = torch.ones(op.input_shapes[0])
        counted = find_read_rows(torch_ops.OPS, x, op.rows, op.spec, index)
        with (
            mock.patch.object(torch.Tensor, "is_cuda", property(lambda x: True)),
            mock.patch.object(torch.Tensor, "item", side_effect=AssertionError("this waits")),
        ):
            (kept,) = torch_ops.GUARD(dataclasses.replace(op, dropped=()), [torch.full_like(x, torch.nan)], index)
        assert torch.equal(kept.isnan(), counted.expand(x.shape))
