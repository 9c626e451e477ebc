"""Compiles the kernels that calls of sums and dots of rows launch, for some cards, and prints what they need.

``python compile_row_sums.py cuda:80 hip:gfx942`` prints a line of JSON for each kernel; ``few`` before the cards leaves
out dtypes and sizes. No card is needed, see `for_cards.py`.
"""

import itertools

import torch
from for_cards import print_needs

from planner.kernels.gathered_dot import triton_pooled
from planner.kernels.grouping.keys import IndexArray
from planner.kernels.grouping.torch_grouping import group_rows
from planner.kernels.segment_sum import triton_sum
from planner.kernels.segment_sum.triton_sum import Rows

DTYPES = [
    (torch.float16, torch.int64),
    (torch.bfloat16, torch.int32),
    (torch.float32, torch.int64),
    (torch.float64, torch.int32),
]


def launch_all(dtype, index_dtype, few):
    """Run each kind of call: aligned and odd sizes, strides and tables."""
    sizes = [(2, 64, 48, 100, 32), (2, 64, 48, 10, 33), (1, 1, 48, 1500, 128), (2, 600, 48, 2, 300)]
    for (b, q, m, k, d), permuted in itertools.product(
        sizes[: 1 if few else None], (False, True)[: 1 if few else None]
    ):
        query, pool = torch.zeros(b, q, d, dtype=dtype), torch.zeros(b, m, d, dtype=dtype)
        if permuted:
            query, pool = (x.mT.contiguous().mT for x in (query, pool))
        keys = IndexArray(torch.zeros(b, q, k, dtype=index_dtype))
        triton_pooled.scores(query, pool, keys)
        triton_pooled.gradients(torch.zeros(b, q, k, dtype=dtype), query, pool, keys)
    for columns, rows in itertools.product((64,) if few else (1, 64, 200), (20_000,) if few else (500, 20_000)):
        x, y, out = (torch.zeros(n, columns, dtype=dtype) for n in (50, rows, 70))
        table, groups = torch.zeros(rows, dtype=index_dtype), group_rows(torch.arange(rows) % 70, 70)
        sources = Rows.of(x, [0], [1], table)
        for factor in (None, Rows.of(y, [0], [1]), Rows.of(y[:, :1].expand(rows, columns), [0], [1])):
            triton_sum.sum_rows(sources, Rows.of(out, [0], [1]), columns, groups, factor)
        triton_pooled.dot_rows(sources, sources, torch.zeros(rows, dtype=dtype), (1, rows, 1, columns))
    apart = torch.zeros(60, 4, 30, 6, dtype=dtype)[:, ::2, :, ::2]
    into = Rows.of(torch.zeros(3, 70, 2, dtype=dtype), [1], [2, 0])
    triton_sum.sum_rows(Rows.of(apart, [0, 2], [1, 3]), into, 6, group_rows(torch.arange(1800) % 70, 70))


if __name__ == "__main__":
    print_needs([(triton_sum, "sum_kernel"), (triton_pooled, "dots_kernel")], DTYPES, DTYPES[::2], launch_all)
