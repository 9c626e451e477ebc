"""Compiles the kernels that calls of sums and dots of rows launch, for some cards, and prints what they need.

``python compile_row_sums.py cuda:80 hip:gfx942`` prints a line of JSON for each kernel; ``few`` before the cards leaves
out dtypes and sizes. No card is needed: a stand-in driver names the card, and what would be launched is compiled
instead. Triton must not be in interpreter mode.
"""

import itertools
import json
import re
import sys
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from planner.bench.ahead_of_time import _resources
from planner.kernels.gathered_dot import triton_pooled
from planner.kernels.grouping.keys import IndexArray
from planner.kernels.grouping.torch_grouping import group_rows
from planner.kernels.segment_sum import triton_sum
from planner.kernels.segment_sum.triton_sum import Rows

DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Driver:
    """Stands in for the driver of a card."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Compiled:
    """A kernel that is compiled where it would be launched; `found` has what each needs."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        def compile_for(*arguments, **constants):
            if triton.runtime.driver.active.get_current_target().backend == "hip":
                del constants["maxnreg"]
            made = self.kernel.warmup(*arguments, grid=grid, **constants)
            if "cubin" in made.asm:
                registers, spilled = _resources(made.asm["cubin"])
                loads = re.findall(r"ld\.global(?:\.L1::\w+)?(?:\.v(\d))?\.b(\d+)", made.asm["ptx"])
                widest = max(int(n or 1) * int(bits) // 8 for n, bits in loads)
            else:
                counts = dict(
                    re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", made.asm["amdgcn"])
                )
                registers, spilled = int(counts["vgpr_count"]), int(counts["vgpr_spill_count"])
                spilled += int(counts["sgpr_spill_count"])
                widest = 0
            what = {"kernel": self.kernel.__name__, "warps": made.metadata.num_warps, "shared": made.metadata.shared}
            self.found.append({**what, "registers": registers, "spilled": spilled, "widest": widest, **constants})

        return compile_for


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


def main(targets, few):
    for name in targets:
        kind, arch = name.split(":")
        target = GPUTarget(kind, int(arch) if kind == "cuda" else arch, 32 if kind == "cuda" else 64)
        triton.runtime.driver.set_active(Driver(target))
        found = []
        kernels = (triton_sum, "sum_kernel"), (triton_pooled, "dots_kernel")
        made = [mock.patch.object(module, name, Compiled(getattr(module, name), found)) for module, name in kernels]
        for module, kernel in kernels:
            getattr(module, kernel).device_caches.clear()
        with made[0], made[1]:
            keys = torch.int64, torch.int32, torch.int64, torch.int32
            for dtype, index_dtype in list(zip(DTYPES, keys, strict=True))[:: 2 if few else 1]:
                before = len(found)
                launch_all(dtype, index_dtype, few)
                for one in found[before:]:
                    one["dtype"] = str(dtype)
        unique = {json.dumps({"target": name, **one}, sort_keys=True) for one in found}
        print("\n".join(sorted(unique)))


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "few"], "few" in sys.argv)
