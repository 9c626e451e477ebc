"""What calls would launch on a card, compiled without one: the very kernels, with nothing spilled."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import examples

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from planner.bench.ahead_of_time import ARCHES, Built, failures, markdown, programs_of  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
SEED = "seed-gathered-matmul"


def command(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    run = [sys.executable, "-W", "ignore", "-m", "planner.bench.ahead_of_time", *arguments]
    return subprocess.run(run, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("arch", ["90", *list(ARCHES)[: examples(0, None)]])
def test_the_seed_is_compiled_as_calls_launch_it(arch):
    """Forward and both gradients in each dtype: tensor cores where the dtype has them, reads of 16 bytes, no spills.

    Sums over rows in tf32 read 8 bytes at a time: on sm_90 its tensor cores want both operands transposed.
    """
    done = command("--serve", arch, "--only", SEED)
    found = [Built(**json.loads(line)) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert not [x.error for x in found if x.error]
    products = [x for x in found if x.multiplies]
    assert {(x.dtype, x.program) for x in products} == {
        (dtype, program)
        for dtype in ("float32", "bfloat16", "float32 as tf32", "float16", "float64")
        for program in ("forward", "backward")
    }
    for x in products:
        assert x.grid > 1000, x  # a call of the real size
        assert x.spilled == 0, x
        assert x.shared <= ARCHES[arch].most_shared, x
        transposed = (x.dtype, x.program) == ("float32 as tf32", "backward")
        assert x.widest == 16 or ARCHES[arch].is_amd or (transposed and x.widest == 8), x
        if arch == "90" and x.tensor_cores:
            assert "wgmma" in x.multiplies, x


def test_faults_are_found():
    """A kernel that spills, is too large, leaves tensor cores unused, or leaves a multiprocessor idle; and an error."""
    sound = Built(
        "3.9", "90", SEED, "bfloat16", "forward", "product_kernel", "64 x 64 x 64", tensor_cores=True,
        multiplies=("wgmma",), warps=4, grid=9, registers=90, shared=1 << 15, programs=5, widest=16,
    )  # fmt: skip
    assert failures([sound]) == []
    spills = dataclasses.replace(sound, spilled=8)
    assert "spills 8 bytes a thread (90 registers, 4 warps)" in failures([spills])[0]
    assert "shared memory" in failures([dataclasses.replace(sound, arch="86", shared=100 << 10)])[0]
    assert "without tensor cores" in failures([dataclasses.replace(sound, multiplies=("fma.f32",))])[0]
    alone = dataclasses.replace(sound, dtype="float32", tensor_cores=False, programs=1)
    assert "1 programs run at once on a multiprocessor, not 2" in failures([alone])[0]
    raised = Built("3.6", "80", SEED, "float32", error="CompilationError: mask")
    assert failures([raised, raised]) == [f"{SEED}, float32,  on 80 with Triton 3.6: CompilationError: mask"]
    # The worst of both versions is shown.
    table = markdown([sound, dataclasses.replace(sound, triton="3.6", registers=120, programs=4)])
    assert f"| {SEED}, bfloat16 | forward | product | 120 r, 4 p, 16 B, wgmma |" in table
    # Kernels that prepare a product have one row for all workloads: on AMD they divide by multiplying floats.
    prepares = dataclasses.replace(sound, arch="gfx942", kernel="tasks_kernel", multiplies=("fma.f32",))
    table = markdown([prepares, dataclasses.replace(prepares, workload="experts"), sound])
    assert table.splitlines()[2].startswith(f"| {SEED}")
    assert table.splitlines()[3:] == ["| all |  | tasks |  | 90 r, 5 p, 16 B |"]


def test_how_many_programs_run_at_once():
    """Registers are given out by 256 a warp; each program takes a KiB of shared memory for the system."""
    eighth = (228 << 10) // 8
    assert [programs_of(ARCHES["90"], 32, eighth - system, 4) for system in (1024, 1023)] == [8, 7]
    assert [programs_of(ARCHES["90"], registers, 0, 8) for registers in (128, 129)] == [2, 1]
    assert programs_of(ARCHES["86"], 16, 0, 4) == 12
    assert programs_of(ARCHES["gfx942"], 128, 40 << 10, 4) == 1
    assert programs_of(ARCHES["gfx942"], 256, 0, 4) == 2
