"""What only the grouped kernels of torch on a CPU do: results in another dtype, and pieces of rows."""

from functools import partial

import numpy as np
import pytest
from conftest import examples
from grouped_laws import KERNELS, torch_scratch
from hypothesis import given, settings

torch = pytest.importorskip("torch", reason="torch is not installed")

import planner  # noqa: E402
from planner.backends.common.kernel_rows import has_turned_rows  # noqa: E402
from planner.inspect.memory import torch_memory  # noqa: E402
from planner.kernels.grouped_matmul import torch_grouped  # noqa: E402
from planner.kernels.grouping import torch_grouping  # noqa: E402
from planner.kernels.grouping.torch_grouping import group_rows, pieces  # noqa: E402
from planner.program.forms import grouped_form  # noqa: E402

TORCH = KERNELS[0]


@settings(max_examples=examples(50, 1000))
@given(TORCH.problems)
def test_pieces_hold_every_row_once_within_the_limits(case):
    with TORCH.open(case):
        cut = torch_grouped.cutting(case.i, case.j, case.k, case.rows, torch.float32)
        index = case.index()
        groups = group_rows(torch.from_numpy(index), case.groups)
        rows, seen = [], [0] * case.groups
        for piece in pieces(groups, cut):
            assert len(piece.padded) == piece.count * piece.pad <= cut.rows
            rows += piece.rows.tolist()
            kept = piece.padded if piece.kept is None else piece.padded[piece.kept]
            assert kept.tolist() == piece.rows.tolist()
            blank = piece.blank()
            assert len(kept) + (0 if blank is None else len(blank)) == len(piece.padded)
            names = range(case.groups)[piece.groups] if isinstance(piece.groups, slice) else piece.groups.tolist()
            assert len(names) == piece.count
            for name in names if piece.first else ():
                seen[name] += 1
        assert sorted(rows) == np.flatnonzero(index < case.groups).tolist()
        assert min(seen, default=1) >= 1


@pytest.mark.parametrize("index_dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "size"), [(30000, 2000), (50000, 40000), (200, 30)])
def test_sorting_stays_within_its_bound(rows, size, index_dtype):
    index = torch.arange(rows).remainder(min(size, 2**15 - 1)).to(index_dtype)

    def sort():
        groups = group_rows(index, size)
        return groups.order, groups.offsets

    kept = 8 * (rows + size + 1)
    bound = torch_grouping.group_bytes(rows, size, index.itemsize)
    assert 0.6 * (bound - 1024) <= torch_scratch(sort) + kept <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("groups", [2, 300, 9_000])
def test_rows_whose_columns_come_first_are_taken_within_the_bound(groups, dtype):
    """They are taken as they lie: so no row is read element by element."""
    n, i, j, k = 20_000, 3, 8, 4
    index = torch.arange(n).mul(7).remainder(groups)
    a, c, b = (torch.randint(-1, 2, shape).to(dtype) for shape in ((n, i, j), (groups, j, k), (n, i, k)))
    turned_a, turned_b = (x.mT.contiguous().mT for x in (a, b))
    held = group_rows(index, groups)
    for run, straight, turned, pair in (
        (torch_grouped.grouped_matmul, (a, c), (turned_a, c), False),
        (torch_grouped.grouped_outer, (a, b), (turned_a, turned_b), False),
        (torch_grouped.grouped_gradients, (b, a, c), (turned_b, turned_a, c), True),
    ):
        expected, found = (run(*arrays, held) for arrays in (straight, turned))
        if isinstance(found, torch.Tensor):
            expected, found = (expected,), (found,)
        assert all(map(torch.equal, found, expected))
        bound = torch_grouped.scratch_bytes((n, i, groups, j, k), dtype, pair=pair, turned=True)
        assert torch_scratch(lambda run=run, turned=turned: run(*turned, held)) <= bound


def test_steps_with_such_rows_count_what_they_take():
    """A row-major gradient of `euk` is read as rows of `ku`, whose columns come first."""
    operands = [torch.randint(-3, 4, shape).float().requires_grad_() for shape in [(2_000, 8, 3), (20_000, 3, 3)]]
    index = torch.arange(20_000).mul(7).remainder(2_000)
    plan = planner.plan("s[e]ui, eki -> euk", *operands, s=index)
    (step,) = (step for step in plan.steps if step.choice.lowering == "both grouped gradients")
    form = grouped_form(step.op.spec)
    assert has_turned_rows(step.op, form)  # though the plan expects a gradient that lies as its result
    result = planner.contract("s[e]ui, eki -> euk", *operands, s=index)
    run = partial(torch.autograd.grad, result, operands, torch.ones(result.shape), retain_graph=True)
    run()
    assert torch_memory(run)[1].peak_bytes <= plan.cost.backward.peak_bytes


def test_products_without_columns_have_a_price():
    plan = planner.plan("nij, q[n]jk -> nik", (2, 2, 2), (2, 2, 0), q=(2,), backend="torch", minimize="peak")
    assert plan.cost.flops == 0
