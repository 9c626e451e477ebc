"""Compiles the kernels that takes launch, for some cards, as `compile_row_sums.py` does, and prints what they need."""

import itertools

import torch
from for_cards import print_needs

from planner.kernels.grouping.triton_grouping import Check
from planner.kernels.take import Read, triton_take

ROWS = Read(((), (1,)), (((0,), ((0,), ())),))  # s[e]c -> ec
BATCH = Read(((0,), (), (2,)), (((1,), ((0,), (1,), ())),))  # b s[be] c -> bec
INNER = Read(((0,), ()), (((1,), ((), (0,))),))  # cs[e] -> ce
SINGLE = Read(((),), (((0,), ((0,),)),))  # s[e] -> e
SEVERAL = Read(((), (3,)), tuple(((d,), ((0,), ())) for d in range(3)))  # s[e]t[e]u[e]c -> ec
DTYPES = [
    (torch.bool, torch.int64),
    (torch.bfloat16, torch.int32),
    (torch.float32, torch.int64),
    (torch.float64, torch.uint8),
    (torch.complex128, torch.int64),
]


def launch_all(dtype, index_dtype, few):
    """Run each kind of take: aligned and odd widths, and other strides."""

    def take(x, read, shape, *index_shapes, drops=False):
        triton_take.take(x, read, [torch.zeros(n, dtype=index_dtype) for n in index_shapes], shape, drops)

    for width, drops in itertools.product((64,) if few else (1, 3, 16, 64, 2048, 5000), (False, True)):
        take(torch.zeros(100, width, dtype=dtype), ROWS, (4096, width), (4096,), drops=drops)
        if dtype.is_floating_point and drops:  # the kernel checks indices
            index, told = torch.zeros(4096, dtype=index_dtype), torch.zeros(2, dtype=torch.int64)
            check = Check(told[1:], torch.ones(1), 3)
            triton_take.take(torch.zeros(100, width, dtype=dtype), ROWS, [index], (4096, width), False, check)
    for width in () if few else (16, 17):
        take(torch.zeros(width, 100, dtype=dtype).T, ROWS, (4096, width), (4096,))
        take(torch.zeros(2, 100, width, dtype=dtype), BATCH, (2, 50, width), (2, 50))
        take(torch.zeros(width, 100, dtype=dtype), INNER, (width, 4096), (4096,))
        take(torch.zeros(100, dtype=dtype), SINGLE, (4096 * width,), (4096 * width,))
        take(torch.zeros(5, 6, 7, width, dtype=dtype), SEVERAL, (4096, width), *[(4096,)] * 3, drops=True)


if __name__ == "__main__":
    print_needs([(triton_take, "take_kernel")], DTYPES, DTYPES[1:3], launch_all)
