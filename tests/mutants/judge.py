"""A changed copy of the tree, and the tests that judge it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERDICTS = Path(__file__).with_name("verdicts.json")
# What a mutant may map: one that asks for an array of 2**40 elements must not take the machine's memory with it.
BYTES = 32 << 30
# Which tests run which functions. pytest-testmon writes it when all tests are run once.
AFFECTED = ".testmondata"
# pytest-testmon sees no line that runs in another process, and no file that a test reads. These tests are named here,
# each with the prefixes of the paths of the files that it judges.
BESIDE = {
    "tests/kernels/test_offsets.py": (
        "kernels/tiled_product/triton_", "kernels/segment_sum/triton_", "kernels/grouped_matmul/triton_",
        "kernels/take/triton_",
    ),
    "tests/test_sharding_jax.py": (
        "backends/jax/partition", "planner/language/split", "planner/search/devices/collectives",
    ),
}  # fmt: skip
# What judges no mutant: it builds the distribution, or tries the mutants.
LEFT_OUT = ("tests/test_packaging.py", "tests/mutants", "tests/peers")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One file with other text; the tests that judge it first, and whether all tests that run the function follow."""

    name: str
    file: str
    text: str
    tests: tuple[str, ...]
    all: bool = True


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the test that killed it and why, or how many tests it passed.

    Why it changes no result is then written by hand, into `why` in the file of verdicts.
    """

    killed: bool
    by: str = ""
    why: str = ""
    passed: int = 0


def verdicts() -> dict[str, Verdict]:
    """What is known from earlier runs, by the mutant's name."""
    return {name: Verdict(**found) for name, found in json.loads(VERDICTS.read_text()).items()}


def run_tests(folder: Path, *options: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run pytest in a copy of the tree, with few examples of each property, on one thread."""
    environment = {
        **os.environ, "HYPOTHESIS_PROFILE": "mutants", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400",
    }  # fmt: skip
    left_out = [f"--ignore={name}" for name in LEFT_OUT]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", *left_out, *options],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=seconds,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES)),
    )  # fmt: skip


def judge(mutant: Mutant, folder: Path, seconds: float) -> Verdict:
    """The verdict on a mutant, found in a copy of the tree: first by the tests that it names, then by those affected.

    In each of the two runs no test starts after so many seconds. A test that takes more than a minute fails.
    """
    changed = folder / mutant.file
    sound, passed = changed.read_text(), 0
    changed.write_text(mutant.text)
    try:
        for tests in [[*mutant.tests]] * bool(mutant.tests) + [["--testmon", "--testmon-nocollect"]] * mutant.all:
            limits = "-x", "--timeout=60", f"--session-timeout={seconds:.0f}"
            try:
                ran = run_tests(folder, *limits, *tests, seconds=seconds + 300)
            except subprocess.TimeoutExpired:
                return Verdict(True, "process", "never ended", passed)
            passed += sum(map(int, re.findall(r"(\d+) passed", ran.stdout)))
            if found := re.search(r"^(?:FAILED|ERROR) (\S+::.+?\]?)(?: - (.*))?$", ran.stdout, re.MULTILINE):
                return Verdict(True, found[1], (found[2] or "")[:100], passed)
            if "not found: " in ran.stderr and mutant.all:
                continue  # a test that killed the mutant once has another name now
            if ran.returncode not in (0, 1, 5):  # passed, out of time, no tests
                return Verdict(True, "process", f"pytest ended with {ran.returncode}", passed)
    finally:
        changed.write_text(sound)
    return Verdict(False, passed=passed)
