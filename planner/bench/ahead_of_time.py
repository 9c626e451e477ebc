"""Compile what calls would launch on a card, without a card, and check what the kernels need of it.

``python -m planner.bench.ahead_of_time`` plans the named workloads and some random problems for each card, runs the
plans against a stand-in for it (`planner.bench.cards.stand_in`), and reads registers, spills and memory of each kernel
that was launched. It prints a table and what fails, and returns 1 if anything does:

- a kernel does not compile, spills registers, or takes more shared memory than a program may have;
- a product of 16-bit numbers or of tf32 is computed without tensor cores;
- fewer programs run on a multiprocessor than `AT_LEAST` says.

    --arch 80 90       compute capabilities times ten, or names of AMD's architectures; all by default
    --triton FOLDER    compile with the Triton in this folder too; may be repeated
    --only WORKLOAD    one named workload, or "random"; may be repeated
    --jobs N           compile for so many architectures at once
    --write            write the table into docs/benchmarks/triton.md

All versions and architectures take long. Triton keeps what it compiled in the folder that TRITON_CACHE_DIR names, so
after an interruption the same command goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np

from planner.cost.device import GPU, Device

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "benchmarks" / "triton.md"
_RESERVED = 1 << 10  # bytes of shared memory that CUDA reserves for each program


@dataclasses.dataclass(frozen=True, slots=True)
class Arch:
    """What a multiprocessor has.

    Attributes:
        device: the preset that plans are made with; "gpu" for a card without one.
        most_shared: bytes of shared memory that a program may have.
        shared: bytes of all programs that run at once.
        warps, programs: how many run at once.
        registers: of all threads; on AMD, of a thread.
    """

    device: str
    most_shared: int
    shared: int
    warps: int
    programs: int
    registers: int = 65536

    @property
    def is_amd(self) -> bool:
        """Whether the architecture is AMD's."""
        return self.registers < 65536


# CUDA C++ Programming Guide 13.0, tables of features and of technical specifications by compute capability; AMD CDNA2
# and CDNA3 instruction set guides (512 registers of a thread, 64 KiB of LDS, four units of eight waves).
ARCHES = {
    "80": Arch("a100", 163 << 10, 164 << 10, 64, 32),
    "86": Arch("gpu", 99 << 10, 100 << 10, 48, 16),
    "89": Arch("l40s", 99 << 10, 100 << 10, 48, 24),
    "90": Arch("h200", 227 << 10, 228 << 10, 64, 32),
    "100": Arch("b200", 227 << 10, 228 << 10, 64, 32),
    "120": Arch("gpu", 99 << 10, 100 << 10, 48, 24),
    "gfx90a": Arch("gpu", 64 << 10, 64 << 10, 32, 32, 512),
    "gfx942": Arch("mi300x", 64 << 10, 64 << 10, 32, 32, 512),
}
_COLUMNS = {"sm_80, 86, 89": ("80", "86", "89"), "sm_90": ("90",), "sm_100, 120": ("100", "120"),
            "gfx90a, 942": ("gfx90a", "gfx942")}  # fmt: skip

# By workload, dtype and program: how many programs must run at once on every multiprocessor.
AT_LEAST = {("seed-gathered-matmul", "float32", "forward"): 2}
RANDOM, _PROBLEMS = "random", 24
_DTYPES = ("float32", "bfloat16")
_MORE = {"seed-gathered-matmul": ("float32 as tf32", "float16", "float64"), "experts": ("float32 as tf32",)}
# Kernels that prepare or finish products, or only copy. On AMD they multiply floats to divide integers.
_PREPARE = ("add_parts", "check", "starts", "take", "tasks")
# Workloads that launch the kernels of another one.
_ALIKE = ("seed-gathered-keys/k10", "seed-gathered-keys/k30", "experts/8")
_SPECS = (
    ("nij, q[n]jk -> nik", "q", "n"), ("bij, q[b]jk -> ik", "q", "b"), ("nij, nik -> q[n]jk", "q", "n"),
    ("nj -> q[n]j", "q", "n"), ("bqd, b i[bqk] d -> bqk", "i", ""), ("ti, q[t]ir, q[t]ro -> to", "q", "t"),
    ("s[e]c, e -> d[e]c", "sd", "e"), ("kbde, embd -> mbk", "", ""),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """A kernel that a call would launch; or why the call fails, as `error`.

    Attributes:
        triton: the version of Triton.
        arch: a key of `ARCHES`.
        workload, dtype: what was called.
        program: "forward" or "backward".
        kernel: the kernel's name.
        tile: its tile sizes, as text.
        tensor_cores: whether 16-bit numbers or tf32 are multiplied.
        multiplies: the kinds of its multiplications.
        warps: warps of a program.
        grid: the number of programs.
        registers, spilled: registers of a thread, and bytes of it that are kept in memory for want of registers.
        shared: bytes of shared memory of a program.
        programs: how many run at once on a multiprocessor.
        widest: bytes of the widest read of a thread.
        error: what was raised.
    """

    triton: str
    arch: str
    workload: str
    dtype: str
    program: str = ""
    kernel: str = ""
    tile: str = ""
    tensor_cores: bool = False
    multiplies: tuple[str, ...] = ()
    warps: int = 0
    grid: int = 0
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    programs: int = 0
    widest: int = 0
    error: str = ""


# -- one process for each architecture and Triton ---------------------------------------------------------------


def cases(only: Sequence[str] = ()) -> Iterator[tuple[str, str, Callable[[Device], tuple[Any, ...]]]]:
    """Yield a workload's name, a dtype, and a function that makes its plan for a device, its operands and indices."""
    from planner.workloads import WORKLOADS

    for name, workload in WORKLOADS.items():
        if only and name not in only or (not only and name in _ALIKE):
            continue
        gathers = bool(workload.parsed.gathers)
        for dtype in (*_DTYPES, *_MORE.get(name, ())) if gathers else _DTYPES[:1]:
            yield name, dtype, partial(_of_workload, workload.cpu(), dtype)
    if not only or RANDOM in only:
        for seed in range(_PROBLEMS):
            random = np.random.default_rng(seed)
            dtype = str(random.choice(["float32", "bfloat16", "float16", "float64", "float32 as tf32"]))
            yield f"{RANDOM} {seed}: {_SPECS[seed % len(_SPECS)][0]}", dtype, partial(_of_random, random, seed, dtype)


def _device(arch: str) -> Device:
    """Return the rates that plans for an architecture are made with."""
    name, capability = ARCHES[arch].device, 0 if ARCHES[arch].is_amd else int(arch)
    return dataclasses.replace(GPU if name == "gpu" else Device.preset(name), capability=capability)


def _of_workload(workload: Any, dtype: str, device: Device) -> tuple[Any, ...]:
    import torch

    import planner

    operands = [x.to(getattr(torch, dtype.split()[0])) for x in workload.operands("torch")]
    leaves = [x.requires_grad_(need) for x, need in zip(operands, workload.takes_gradient, strict=True)]
    indices = workload.indices("torch")
    return planner.plan(workload.spec, *leaves, device=device, **workload.options, **indices), leaves, indices


def _of_random(random: np.random.Generator, seed: int, dtype: str, device: Device) -> tuple[Any, ...]:
    """Draw sizes, strides and an index for one of the specs. Launches are free: they would decide if it is small."""
    import torch

    import planner
    from planner.language.parse import parse

    spec, arrays, long = _SPECS[seed % len(_SPECS)]
    parsed = parse(spec)
    pools = {name: int(random.choice([3, 60, 1000])) for name in arrays}
    sizes = {axis: int(random.choice([1, 3, 16, 40, 64, 128])) for axis in parsed.axes}
    sizes |= {axis: int(random.choice([200, 5000, 20_000])) for axis in long}
    operands = []
    for term in parsed.inputs:
        shape = [sizes[e] if isinstance(e, str) else pools[e.array] for e in term]
        order = random.permutation(len(shape))
        x = torch.ones([shape[d] for d in order], dtype=getattr(torch, dtype.split()[0]))
        operands.append(x.permute(*np.argsort(order).tolist()).requires_grad_())
    indices: dict[str, Any] = {
        g.array: torch.from_numpy(random.integers(0, pools[g.array], [sizes[axis] for axis in g.axes]))
        for g in parsed.gathers
    }
    outs = {e.array: pools[e.array] for e in parsed.output if not isinstance(e, str)}
    free = dataclasses.replace(device, launch_seconds=0.0, kernel_seconds=0.0, group_seconds=0.0)
    options: dict[str, Any] = {"sizes": outs or None, "index_mode": "drop" if seed % 2 else "raise"} if indices else {}
    return planner.plan(spec, *operands, device=free, **options, **indices), operands, indices


def serve(arch: str, only: Sequence[str]) -> None:
    """Print each kernel that calls would launch on a card as a line of JSON."""
    import torch
    import triton

    from planner.bench.cards.stand_in import stand_in
    from planner.program.frameworks import load_backend

    limits, rows = ARCHES[arch], load_backend("torch").table.rows
    kind, number, warp = ("hip", arch, 64) if limits.is_amd else ("cuda", int(arch), 32)
    with stand_in(kind, number, limits.most_shared, warp, limits.device) as launches:
        for name, dtype, make in cases(only):
            about = {"triton": triton.__version__, "arch": arch, "workload": name, "dtype": dtype}
            program, seen = "forward", 0
            launches.clear()
            try:
                with _float32("tf32" if dtype.endswith("tf32") and not limits.is_amd else "none"):
                    plan, operands, indices = make(_device(arch))
                    # Other plans launch no kernel of ours.
                    if any(x in rows and rows[x].kinds for x in (step.choice.lowering for step in plan.steps)):
                        result = plan(*operands, **indices)
                        seen, program = len(launches), "backward"
                        if result.requires_grad:
                            result.backward(torch.ones_like(result))
            except Exception as error:  # a call that fails is a finding
                said = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
                print(json.dumps({**about, "program": program, "error": said}), flush=True)
            for number, launch in enumerate(launches):
                of = "forward" if number < seen or program == "forward" else "backward"
                built = Built(**about, program=of, **read_kernel(launch, arch, dtype))
                print(json.dumps(dataclasses.asdict(built)), flush=True)


@contextlib.contextmanager
def _float32(precision: str) -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def read_kernel(launch: Any, arch: str, dtype: str) -> dict[str, Any]:
    """Return the fields of `Built` that a launch tells, but its workload and program."""
    kernel, limits = launch.kernel, ARCHES[arch]
    files = {name.rpartition(".")[2]: path for name, path in kernel.files.items()}
    text = pathlib.Path(files["amdgcn" if limits.is_amd else "ptx"]).read_text()
    cubin = b"" if limits.is_amd else pathlib.Path(files["cubin"]).read_bytes()
    registers, spilled = _amd_registers(text) if limits.is_amd else _resources(cubin)
    patterns = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma": r"\bmma\.sync", "mfma": r"v_mfma",
                "fma.f32": r"fma\.rn(?:\.ftz)?\.f32|v_(?:pk_)?fmac?_f32", "fma.f64": r"fma\.rn\.f64"}  # fmt: skip
    blocks = [str(value) for name, value in kernel.constants.items() if name.startswith("BLOCK")]
    return {
        "kernel": kernel.name,
        "tile": " x ".join(blocks),
        "tensor_cores": "DOT" not in kernel.name and dtype != "float32" and dtype != "float64",
        "multiplies": tuple(name for name, pattern in patterns.items() if re.search(pattern, text)),
        "warps": kernel.warps,
        "grid": int(np.prod(launch.grid)),
        "registers": registers,
        "spilled": spilled,
        "shared": kernel.shared,
        "programs": programs_of(limits, registers, kernel.shared, kernel.warps),
        "widest": _widest(text),
    }


@lru_cache
def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and its bytes of local memory, which hold what it has no registers for."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if match is None:
        raise RuntimeError(f"cuobjdump reports no registers: {said}")
    return int(match[1]), int(match[2])


def _amd_registers(text: str) -> tuple[int, int]:
    """Return the vector registers of a thread, and its bytes of memory for those that it lacks."""
    found = {name: int(n) for name, n in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
    return found["vgpr_count"], 4 * found["vgpr_spill_count"]


def _widest(text: str) -> int:
    """Return the bytes of the widest read: a load of several words, or an asynchronous copy."""
    loads = re.findall(r"ld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.b(\d+)", text)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", text)
    words = re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?", text)
    sizes = [int(n or 1) * int(bits) // 8 for n, bits in loads] + [int(size, 0) for size in copies]
    sizes += [2] * bool(re.search(r"(?:global|buffer)_load_[us]short", text))
    return max(sizes + [4 * int(n or 1) for n in words], default=0)


def programs_of(limits: Arch, registers: int, shared: int, warps: int) -> int:
    """Return how many programs run at once on a multiprocessor; registers are given out in units."""
    if limits.is_amd:  # four units, each with its own registers, run `waves` each
        waves = min(8, limits.registers // max(1, -(-registers // 8) * 8))
        return min(4 * waves // warps, limits.shared // max(1, shared))
    of_warp = -(-registers * 32 // 256) * 256
    return min(limits.registers // (of_warp * warps), limits.shared // (shared + _RESERVED), limits.warps // warps,
               limits.programs)  # fmt: skip


# -- the process that reports -----------------------------------------------------------------------------------


def collect(arch: str, folder: str, only: Sequence[str]) -> list[Built]:
    """Compile for an architecture in a process of its own, with the Triton of a folder; "" for the one at hand."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--serve", arch]
    for name in only:
        command += ["--only", name]
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {arch} ended with {done.returncode}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [Built(**{**line, "multiplies": tuple(line.get("multiplies", ()))}) for line in lines]


def failures(builds: Sequence[Built]) -> list[str]:
    """Return a line for each finding that is a fault."""
    lines = []
    for x in builds:
        limits, what = ARCHES[x.arch], f"{x.workload}, {x.dtype}, {x.program}"
        where = f"{what}: {x.kernel} {x.tile} on {x.arch} with Triton {x.triton}"
        if x.error:
            lines.append(f"{what} on {x.arch} with Triton {x.triton}: {x.error}")
            continue
        if x.spilled:
            lines.append(f"{where} spills {x.spilled} bytes a thread ({x.registers} registers, {x.warps} warps)")
        if x.shared > limits.most_shared:
            lines.append(f"{where} needs {x.shared} of {limits.most_shared} bytes of shared memory")
        units = {"mma", "wgmma", "tcgen05", "mfma"} & set(x.multiplies)
        if x.tensor_cores and not units and "product" in x.kernel:
            lines.append(f"{where} multiplies without tensor cores")
        least = AT_LEAST.get((x.workload, x.dtype, x.program), 1) if x.kernel.startswith("product") else 1
        if x.programs < least and not limits.is_amd:
            lines.append(f"{where}: {x.programs} programs run at once on a multiprocessor, not {least}")
    return list(dict.fromkeys(lines))


def markdown(builds: Sequence[Built]) -> str:
    """Return a table with a row for each kernel of a workload; each cell shows the worst of its architectures."""
    cells: dict[tuple[str, str, str], dict[str, list[Built]]] = {}
    for x in builds:
        if not x.error:
            key = (f"{x.workload}, {x.dtype}", x.program, x.kernel.removesuffix("_kernel"))
            is_random = x.workload.startswith(RANDOM)
            if is_random or key[2] in _PREPARE or not x.multiplies:  # one row for all
                key = (RANDOM if is_random else "all", "", key[2])
            column = next(name for name, arches in _COLUMNS.items() if x.arch in arches)
            cells.setdefault(key, {}).setdefault(column, []).append(x)
    columns = [name for name in _COLUMNS if any(name in row for row in cells.values())]
    rows = [f"| workload | pass | kernel | {' | '.join(columns)} |", "| --- " * (3 + len(columns)) + "|"]
    places = {f"{name}, {dtype}": place for place, (name, dtype, _) in enumerate(cases())}
    for key in sorted(cells, key=lambda x: (places.get(x[0], len(places)), x[0], x[1] != "forward", x[2])):
        rows.append(f"| {' | '.join((*key, *(_cell(cells[key].get(name, ())) for name in columns)))} |")
    return "\n".join(rows) + "\n"


def _cell(builds: Sequence[Built]) -> str:
    if not builds:
        return ""
    multiply = [x for x in builds if x.multiplies and x.kernel.removesuffix("_kernel") not in _PREPARE]
    units = "/".join(dict.fromkeys(x.multiplies[0] for x in multiply))
    registers, programs = max(x.registers for x in builds), min(x.programs for x in builds)
    widest, spilled = min(x.widest for x in builds), max(x.spilled for x in builds)
    more = [units] * bool(units) + [f"spills {spilled}"] * bool(spilled)
    return ", ".join([f"{registers} r", f"{programs} p", f"{widest} B", *more])


def page(builds: Sequence[Built], faults: Sequence[str]) -> str:
    """Return the page for docs/benchmarks."""
    versions = " and ".join(sorted({x.triton for x in builds}))
    kernels = len({(x.triton, x.arch, x.kernel, x.tile, x.registers, x.shared) for x in builds})
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        "# What the Triton kernels need of a GPU",
        "",
        "`python -m planner.bench.ahead_of_time --write` writes this page without a GPU. It plans the named workloads",
        "for each card and compiles what the plans would launch: with the strides, alignments and tables of the calls.",
        f"Triton {versions}, {today}; {kernels} different kernels. Nothing here ran on a GPU.",
        "",
        "A cell shows the worst of its architectures and of all versions of Triton: the registers of a thread (r), how",
        "many programs run at once on a multiprocessor (p), the widest read of a thread (B, bytes), and what",
        "multiplies: tensor cores (`mma`, `wgmma`, `tcgen05`, `mfma`) or `fma`. A cell is empty if the plan for this",
        "card launches no such kernel. `product` multiplies matrices, `pair` makes both gradients in one walk over the",
        "rows, `dots` and `sum` read rows through index arrays. The rows of `all` workloads are kernels that prepare",
        f"products, finish them or only add. `{RANDOM}`: {_PROBLEMS} random problems.",
        "",
        markdown(builds),
        "## What fails",
        "",
        *([f"- {line}" for line in faults] or ["Nothing: no kernel spills, and all fit."]),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print the table and what fails; return 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(ARCHES), choices=list(ARCHES), metavar="ARCH")
    parser.add_argument("--triton", action="append", default=[""], metavar="FOLDER")
    parser.add_argument("--only", action="append", default=[], metavar="WORKLOAD")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--serve", choices=list(ARCHES), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve, options.only)
        return 0
    runs = list(itertools.product(options.triton, options.arch))
    builds: list[Built] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(lambda run: collect(run[1], run[0], options.only), runs)
        for (_, arch), of_run in zip(runs, found, strict=True):
            builds += of_run
            print(f"{arch}: {len(builds)} launches so far", file=sys.stderr, flush=True)
    faults = failures(builds)
    text = page(builds, faults)
    if options.write:
        PAGE.write_text(text)
    print(text, end="")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
