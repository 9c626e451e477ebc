"""Compiles the kernels that calls of grouped and batched products launch, for some cards, and prints what they need.

``python compile_products.py cuda:80 hip:gfx942`` prints a line of JSON for each kernel; ``few`` before the cards leaves
out most dtypes and sizes. No card is needed, see `for_cards.py`.
"""

import itertools
import json
import re
import sys
from functools import partial
from unittest import mock

import torch
import triton
from for_cards import Driver
from triton.backends.compiler import GPUTarget

from planner.bench.ahead_of_time import _resources
from planner.kernels.grouped_matmul import triton_grouped, triton_pair
from planner.kernels.grouping import triton_grouping
from planner.kernels.grouping.torch_grouping import Groups
from planner.kernels.tiled_product import triton_arithmetic, triton_axes
from planner.kernels.tiled_product.triton_axes import Axis, Grouping, Matrices
from planner.kernels.tiled_product.triton_tiles import TILINGS

# Rows, I, groups, J, K.
SEED, EXPERTS, SHARED = (131072, 1, 2048, 64, 64), (16384, 1, 16, 2048, 1408), (3000, 3, 40, 96, 64)
PRODUCT, PAIR = triton_grouped.product_kernel, triton_pair.pair_kernel
FEW = (SEED, "float32"), (EXPERTS, "bfloat16")
MORE = [((64, 128, 8, 80, 48), "float32"), ((400, 1, 80, 24, 40), "float32"), ((400, 1, 80, 24, 40), "float16")]


class Compiled:
    """A kernel that is compiled where it would be launched; `found` has what each needs."""

    def __init__(self, kernel, found, **facts):
        self.kernel, self.found, self.facts = kernel, found, facts

    def __getitem__(self, grid):
        def compile_for(*arguments, **constants):
            made = self.kernel.warmup(*arguments, grid=grid, **constants)
            if "cubin" in made.asm:
                registers, spilled = _resources(made.asm["cubin"])
                kinds = {"wgmma": "wgmma.mma", "mma": r"\bmma\.sync", "tcgen05": r"tcgen05\.mma"}
                text = made.asm["ptx"]
            else:
                text = made.asm["amdgcn"]
                counts = (re.search(rf"\.vgpr_{x}:\s+(\d+)", text) for x in ("count", "spill_count"))
                registers, spilled = (int(count[1]) for count in counts)
                kinds = {"mma": "v_mfma"}
            tiles = [constants[f"BLOCK_{x}"] for x in "MNK"]
            mode, precision = constants.get("MODE", "pair"), constants.get("PRECISION", "ieee")
            how = {"mode": mode, "precision": precision, "tiles": tiles}
            units = [name for name, pattern in kinds.items() if re.search(pattern, text)]
            needs = {"registers": registers, "spilled": spilled, "shared": made.metadata.shared, "units": units}
            how |= {"index": str(constants["INDEX"]), "warps": made.metadata.num_warps}
            self.found.append({**self.facts, **how, **needs})

        return compile_for


def launch(sizes, dtype, tiling, sorted_already):
    """Call each function."""
    n, i, g, j, k = sizes
    a, c, b = (torch.empty(shape, dtype=getattr(torch, dtype)) for shape in ((n, i, j), (g, j, k), (n, i, k)))
    groups = Groups(torch.arange(n), torch.arange(g + 1) * (n // g), g, n)
    if sorted_already:
        order = Grouping(None, groups.offsets, g)
        triton_grouped.rows_product(*map(Matrices.of, (a, c, b)), (n, i, k, j), order, tiling=tiling)
        return
    triton_grouped.grouped_matmul(a, c, groups, tiling=tiling)
    triton_grouped.grouped_gradients(b, a, c, groups, tiling=tiling)
    if i >= 64:
        index, source = torch.zeros(n, dtype=torch.int32), torch.zeros(n * i, dtype=torch.int64)
        triton_grouped.chosen_matmul(a, c, index, tiling=tiling)
        triton_grouped.chosen_rows(a.flatten(0, 1), c, index, i, source, wide=True)
    x, y, z = a.flatten(1).T, torch.empty(i * j, k, dtype=a.dtype), torch.empty(n, k, dtype=a.dtype).T
    triton_grouped.batched_matmul(x.T, y, z.T, [[[], [0], [1]], [[], [0], [1]], [[], [0], [1]]], tiling)


def launch_with_tables(dtype):
    """Every axis is looked up."""
    n, g, side = 600, 6, 64
    given = torch.empty(n, 1, side, dtype=dtype), torch.empty(g, side, side, dtype=dtype)
    a, c, out = (
        Matrices(x, *(Axis(stride, torch.arange(size)) for size, stride in zip(x.shape, x.stride(), strict=True)))
        for x in (*given, torch.empty_like(given[0]))
    )
    order = Grouping(torch.arange(n), torch.arange(g + 1) * 100, g)
    triton_grouped.rows_product(a, c, out, (n, 1, side, side), order)
    triton_grouped.terms_product(a, out, c, (n, 1, side, side), order)
    triton_grouped.plain_product(a, c, out, (g, 1, side, side))


def main(few, *cards):
    """Print what each kernel needs on each card."""
    found, tilings = [], ("",) if few else ("", *TILINGS)
    for number, card in enumerate(cards):
        kind, arch = card.split(":")
        warp = 64 if arch.startswith("gfx9") else 32
        triton.runtime.driver.set_active(Driver(GPUTarget(kind, int(arch) if kind == "cuda" else arch, warp), number))
        triton_arithmetic._tensor_cores.cache_clear()
        dtypes = "float32", "bfloat16", "float64"
        cases = FEW if few else [*itertools.product((SEED, EXPERTS, SHARED), dtypes), *MORE]
        for tiling in tilings:
            kernel = partial(Compiled, found=found, card=card, tiling=tiling)
            with (
                mock.patch.multiple(triton_grouped, product_kernel=kernel(PRODUCT), add_parts=mock.DEFAULT),
                mock.patch.multiple(triton_pair, pair_kernel=kernel(PAIR), add_parts=mock.DEFAULT),
                mock.patch.object(triton_grouping, "launch"),
                mock.patch.dict(triton_axes._ALL_REGISTERS, clear=kind == "hip"),
            ):
                for sizes, dtype in cases:
                    for asked in ("none", *(("tf32",) if dtype == "float32" and not few else ())):
                        torch.backends.cuda.matmul.fp32_precision = asked
                        launch(sizes, dtype, tiling, False)
                    torch.backends.cuda.matmul.fp32_precision = "none"
                if card == "cuda:90":  # with other versions of Triton, and on some cards, this is the default
                    with mock.patch.object(triton_grouped, "precision", return_value="float64"):
                        for sizes in dict.fromkeys(sizes for sizes, dtype in cases if dtype == "float32"):
                            launch(sizes, "float32", tiling, False)
                launch(SEED, "float32", tiling, True)
                if not (few or tiling):
                    for dtype in (torch.bfloat16, torch.float32, torch.float64):
                        launch_with_tables(dtype)
    for one in {json.dumps(x, sort_keys=True): None for x in found}:
        print(one)


if __name__ == "__main__":
    few, cards = ("few" in sys.argv), [x for x in sys.argv[1:] if x != "few"]
    main(few, *cards)
