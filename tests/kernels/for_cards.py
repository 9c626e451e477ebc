"""Compiles kernels for cards that are not there: what the scripts `compile_*.py` share.

A stand-in driver names the card, and what would be launched is compiled instead. Triton must not be in interpreter
mode.
"""

import contextlib
import json
import re
import sys
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget

from planner.bench.ahead_of_time import _resources


class Driver:
    """Stands in for the driver of a card; Triton keeps what it compiled by the card's number."""

    def __init__(self, target, number=0):
        self.target, self.number = target, number

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.number

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


def print_needs(kernels, dtypes, few_dtypes, launch_all):
    """Print a line of JSON for each kernel that is launched, on each card that the command names.

    Args:
        kernels: pairs of a module and the name of its kernel.
        dtypes: pairs of a dtype of values and one of indices.
        few_dtypes: those that the word `few` before the cards leaves.
        launch_all: launches the kernels, given such a pair and whether few sizes will do.
    """
    few, targets = "few" in sys.argv, [name for name in sys.argv[1:] if name != "few"]
    for name in targets:
        kind, arch = name.split(":")
        target = GPUTarget(kind, int(arch) if kind == "cuda" else arch, 32 if kind == "cuda" else 64)
        triton.runtime.driver.set_active(Driver(target))
        found = []
        with contextlib.ExitStack() as stack:
            for module, kernel in kernels:
                getattr(module, kernel).device_caches.clear()
                compiled = Compiled(getattr(module, kernel), found)
                stack.enter_context(mock.patch.object(module, kernel, compiled))
            for dtype, index_dtype in few_dtypes if few else dtypes:
                before = len(found)
                launch_all(dtype, index_dtype, few)
                for one in found[before:]:
                    one["dtype"] = str(dtype)
        unique = {json.dumps({"target": name, **one}, sort_keys=True, default=str) for one in found}
        print("\n".join(sorted(unique)))
