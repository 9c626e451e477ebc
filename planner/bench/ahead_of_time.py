"""Compile the Triton kernels without a card, and print the registers and memory that they take.

``python -m planner.bench.ahead_of_time`` takes these options:

--arch 80 90      compute capabilities, times ten
--every           every tile that can be chosen, not only tiles with sides of 64
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from planner.kernels.grouped_matmul.triton_pair import pair_kernel
from planner.kernels.segment_sum.triton_sum import sum_kernel
from planner.kernels.tiled_product.triton_product import add_parts_kernel, product_kernel
from planner.kernels.tiled_product.triton_tiles import TILINGS, Tiles, covers_pair, tiles_of

__all__ = ["Built", "KernelConfig", "build", "kernel_configs", "markdown"]

_POINTEES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# By capability: a multiprocessor's registers, its bytes of shared memory, and the warps and programs it runs at once.
_LIMITS = {80: (65536, 164 << 10, 64, 32), 90: (65536, 228 << 10, 64, 32)}
# Kernels by mode; all other modes are of `product_kernel`.
_KERNELS = {"sum": sum_kernel, "add": add_parts_kernel, "pair": pair_kernel}
_OF_GROUPS = ("order", "starts", "tile_starts", "part_starts", "parts")
_STRIDES = ("_outer", "_inner", "_batch", "_row", "_group")
_RESERVED = 1 << 10  # bytes of shared memory that CUDA reserves for each program


@dataclasses.dataclass(frozen=True, slots=True)
class KernelConfig:
    """A kernel with the constants that it is compiled for.

    Attributes:
        mode: a mode of the product kernel, or "pair", "sum", "add" for the other kernels.
        dtype: dtype of the operands.
        precision: how float32 is multiplied, see `planner.kernels.tiled_product.triton_arithmetic`.
        tiles: tile sizes.
        one_k: whether a tile covers all of k, in the modes that distinguish it.
        tables: whether every axis is looked up in a table.
        aligned: whether the sizes are multiples of 16, which Triton detects when it compiles for a call.
    """

    mode: str
    dtype: str
    precision: str
    tiles: Tiles
    one_k: bool = True
    tables: bool = False
    aligned: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """A compiled kernel.

    Attributes:
        arch: compute capability, times ten.
        config: what was compiled.
        instructions: the kinds of multiplications that it uses: "mma", "wgmma", "fma.f32", "fma.f64".
        registers: registers per thread.
        spilled: bytes of a thread's registers that are spilled to memory.
        shared: bytes of shared memory per program.
        occupancy: share of a multiprocessor's warps that run at once.
        widest: bytes of the widest read of a thread.
    """

    arch: int
    config: KernelConfig
    instructions: tuple[str, ...]
    registers: int
    spilled: int
    shared: int
    occupancy: float
    widest: int


def kernel_configs(every: bool = False) -> Iterator[KernelConfig]:
    """Yield the kernels to compile: with default tiles, or with all tiles that `tiles_of` can choose."""
    sides = (16, 32, 64, 128) if every else (64,)
    seen = set()
    for dtype, mode in itertools.product(_POINTEES, ("rows", "terms", "plain", "pair")):
        problems = itertools.product(sides, sides, (*sides, 4096) if every else sides)
        settings = itertools.product(
            ("ieee", "tf32", "bf16x6") if dtype == "float32" else ("ieee",),
            (False, True) if every or dtype == "float32" else (False,),
            ("", *TILINGS) if every else ("",),
        )
        for (m, n, k), (precision, tables, tiling) in itertools.product(problems, settings):
            if mode == "pair" and not covers_pair(m, n):
                continue
            if (mode, precision) == ("pair", "bf16x6"):
                continue
            tiles = tiles_of(mode, m, n, k, _ITEMSIZES[dtype], precision, tables, tiling)
            one_k = k <= tiles.k and mode in ("rows", "plain")
            for aligned in (True, False) if every else (True,):
                config = KernelConfig(mode, dtype, precision, tiles, one_k, tables, aligned)
                if config not in seen:
                    seen.add(config)
                    yield config
    for dtype, mode, tables in itertools.product(_POINTEES, ("sum", "add"), (False, True)):
        yield KernelConfig(mode, dtype, "", Tiles(16, 128, 1, 64), tables=tables)


def build(config: KernelConfig, arch: int) -> Built:
    """Compile a kernel for a compute capability; this needs no card, but Triton must not be in interpreter mode."""
    source = ASTSource(_KERNELS.get(config.mode, product_kernel), *_signature(config))
    options = {"num_warps": config.tiles.warps, "num_stages": config.tiles.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    patterns = {
        "wgmma": r"wgmma\.mma_async",
        "mma": r"\bmma\.sync",
        "fma.f32": r"fma\.rn\.f32",
        "fma.f64": r"fma\.rn\.f64",
    }
    instructions = tuple(name for name, text in patterns.items() if re.search(text, kernel.asm["ptx"]))
    registers, spilled = _resources(kernel.asm["cubin"])
    shared = kernel.metadata.shared
    occupancy = _occupancy(arch, registers, shared, config.tiles.warps)
    return Built(arch, config, instructions, registers, spilled, shared, occupancy, _widest(kernel.asm["ptx"]))


def _widest(ptx: str) -> int:
    """Return the bytes of the widest read: a load of several words, or an asynchronous copy."""
    loads = (int(n or 1) * int(bits) // 8 for n, bits in re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", ptx))
    copies = (int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx))
    return max(*loads, *copies, 0, 0)


def _signature(config: KernelConfig) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Return the types of the arguments, the constants, and the arguments that are multiples of 16."""
    element, wide = _POINTEES[config.dtype], "fp64" if config.dtype == "float64" else "fp32"
    tiles, names = config.tiles, _KERNELS.get(config.mode, product_kernel).arg_names
    constants: dict[str, Any] = {
        "MODE": config.mode,
        "DROPS": config.mode == "rows",
        "PRECISION": config.precision,
        "INDEX": tl.int32,
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "CHUNK": tiles.chunk,
        "ONE_K": config.one_k,
        "inner": 1,
        "BLOCK_R": tiles.m,
        "BLOCK": 1024,
    }
    absent = {
        "rows": ("part_starts", "parts"),
        "plain": ("order", "starts", "tile_starts", "part_starts", "parts"),
    }.get(config.mode, ())
    types: dict[str, str] = {}
    for name in names:
        if name.endswith("_column"):
            constants[name] = 1
        elif name in absent or (name.endswith("_table") and not config.tables):
            constants[name] = None
        if name in constants:
            types[name] = "constexpr"
        elif name in ("a", "b", "x", "out", "g", "c", "da", "dc"):
            types[name] = f"*{element}"
        elif name == "parts":
            types[name] = f"*{wide}"
        elif name.endswith("_table") or name in ("order", "starts", "tile_starts", "part_starts"):
            types[name] = "*i64"
        else:
            types[name] = "i32"
    place: dict[str, tuple[int, ...]] = {name: (number,) for number, name in enumerate(names)}
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name.endswith(_STRIDES)]
    aligned += [name for name in types if config.aligned and name.startswith("size_")]
    divisible = {place[name]: [["tt.divisibility", 16]] for name in aligned if types[name] != "constexpr"}
    return types, {place[name]: value for name, value in constants.items() if name in place}, divisible


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and spilled bytes of a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run(
            [str(tool), "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if match is None:
        raise RuntimeError(f"cuobjdump reports no registers: {said}")
    return int(match[1]), int(match[2])


def _occupancy(arch: int, registers: int, shared: int, warps: int) -> float:
    """Return the share of a multiprocessor's warps that run at once; a warp gets registers in units of 256."""
    all_registers, all_shared, all_warps, programs = _LIMITS[arch]
    of_warp = -(-registers * 32 // 256) * 256
    running = min(all_registers // (of_warp * warps), all_shared // (shared + _RESERVED), all_warps // warps, programs)
    return running * warps / all_warps


def markdown(kernels: list[Built]) -> str:
    """Return the compiled kernels as a table in Markdown."""
    rows = ["| sm | mode | dtype | tile | warps | multiplies by | reads | registers | spilled | shared | occupancy |"]
    rows.append("| --- " * 11 + "|")
    for x in kernels:
        config, tiles = x.config, x.config.tiles
        dtype = config.dtype + (f" ({config.precision})" if config.dtype == "float32" and config.precision else "")
        mode = config.mode + ", tables" * config.tables + ", odd sizes" * (not config.aligned)
        rows.append(
            f"| {x.arch} | {mode} | {dtype} | {tiles.m} x {tiles.n} x {tiles.k} | {tiles.warps} | "
            f"{', '.join(x.instructions)} | {x.widest} B | {x.registers} | "
            f"{x.spilled} B | {x.shared} B | {x.occupancy:.0%} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    """Compile all kernels and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(_LIMITS), choices=sorted(_LIMITS))
    parser.add_argument("--every", action="store_true")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: nothing can be compiled; unset it")
    print(markdown([build(config, arch) for arch in options.arch for config in kernel_configs(options.every)]), end="")


if __name__ == "__main__":
    main()
