"""What only the grouped kernels of torch on a CPU do: results in another dtype, and pieces of rows."""

import numpy as np
import pytest
from conftest import examples
from grouped_laws import KERNELS, torch_scratch
from hypothesis import given, settings

torch = pytest.importorskip("torch", reason="torch is not installed")

from planner.kernels.grouped_matmul import torch_grouped  # noqa: E402
from planner.kernels.grouping import torch_grouping  # noqa: E402
from planner.kernels.grouping.torch_grouping import group_rows, pieces  # noqa: E402

TORCH = KERNELS[0]


@settings(max_examples=examples(100, 1000))
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
