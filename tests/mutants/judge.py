"""A changed copy of the tree and the tests that judge it: one process a mutant, the quickest tests first.

A judge runs the tests of the suite, with fewer examples of each property (``EXAMPLES``) and without shrinking: a mutant
needs one failure, not the least one. Each test passed so on the unchanged tree when the map was made (``covered.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERDICTS = Path(__file__).with_name("verdicts.json")
EXAMPLES = 30
# Of the processor, for one test.
TEST_SECONDS = 60
# What a mutant may map: one that asks for an array of 2**40 elements must not take the machine's memory with it.
BYTES = 16 << 30
# Set before torch, JAX and NumPy are loaded: a fork keeps only the thread that forks.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One file with other text, and the tests that judge it, in their order."""

    name: str
    file: str
    text: str
    tests: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the test that killed it and why; or how many tests it passed.

    Why it changes no result is then written by hand, into `why` in the file of verdicts.
    """

    killed: bool
    by: str = ""
    why: str = ""
    passed: int = 0
    seconds: float = 0.0


def verdicts() -> dict[str, Verdict]:
    """What is known from earlier runs, by the mutant's name."""
    return {name: Verdict(**found) for name, found in json.loads(VERDICTS.read_text()).items()}


def copy_tree(folder: Path) -> None:
    """Copies what git tracks, and what it does not ignore, as it lies in the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in listed:
        source, target = ROOT / name, folder / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


class Judge:
    """A pytest plugin: the named tests in their order, few examples, a limit for each test, the first failure told."""

    def __init__(self, order: Iterable[str], seconds: float, examples: int) -> None:
        self.order = {name: place for place, name in enumerate(order)}
        self.ends = time.process_time() + seconds
        self.examples = examples
        self.verdict = Verdict(False)
        self.passed = 0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.verdict.killed:
            self.verdict = Verdict(True, report.nodeid, _reason(report))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        places = {item: place for item in items if (place := self._place(item.nodeid)) is not None}
        items[:] = sorted(places, key=places.__getitem__)
        few_examples(items, self.examples)

    def _place(self, test: str) -> int | None:
        """Where a test was named: itself, the function of its parameters, or its file."""
        names = (test, test.split("[")[0], test.split("::")[0])
        return next((self.order[name] for name in names if name in self.order), None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if time.process_time() > self.ends:
            item.session.shouldstop = "out of time"
        with alarm():
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"
        if report.failed and not self.verdict.killed:
            self.verdict = Verdict(True, report.nodeid, _reason(report))


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip(" >E\t") for line in text.splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:100] if lines else ""


def few_examples(items: Iterable[pytest.Item], most: int) -> None:
    """Caps the examples of each property, in an order that is the same each time."""
    import hypothesis

    for item in items:
        function = getattr(item, "obj", None)
        if getattr(function, "is_hypothesis_test", False):
            function = getattr(function, "__func__", function)
            old = getattr(function, "_hypothesis_internal_use_settings", None) or hypothesis.settings()
            function._hypothesis_internal_use_settings = hypothesis.settings(
                old,
                max_examples=min(old.max_examples, most),
                phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
                derandomize=True,
                database=None,
            )


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """Raises in a test that never ends, by the processor's time: other work on the machine makes no verdict."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"no end after {TEST_SECONDS} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, TEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def load_frameworks() -> None:
    """Loads what every judge needs, once: a fork then starts in no time. Nothing of the library is loaded."""
    os.environ.update(ONE_THREAD, TRITON_INTERPRET="1", PYTHONDONTWRITEBYTECODE="1", JAX_PLATFORMS="cpu")
    os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # the library is one: a child loads that of its own copy
    import warnings

    warnings.filterwarnings("ignore", message="os.fork")
    import hypothesis  # noqa: F401
    import jax  # noqa: F401
    import opt_einsum  # noqa: F401
    import torch

    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "planner" for name in sys.modules), "the library is loaded before the fork"


def forked(folder: Path, work: Callable[[], object], log: Path) -> int:
    """Runs ``work`` in a child that sees the copy in ``folder`` and no other; returns the child's process id."""
    import hypothesis.entry_points

    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        sys.path[:] = [str(folder), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(folder)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        del os.environ["HYPOTHESIS_NO_PLUGINS"]
        hypothesis.entry_points.run()
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


Job = TypeVar("Job")


def run_in_copies(
    jobs: Iterable[Job],
    work: Callable[[Job, Path], object],
    scratch: Path,
    *,
    at_once: int,
    seconds: float,
    prepare: Callable[[Job, Path], object] = lambda job, folder: None,
) -> Iterator[tuple[Job, Path, int]]:
    """Runs ``work(job, folder)`` for each job, some at once: in a child of its own, in a copy of the tree.

    ``prepare(job, folder)`` is called before: a child loads Hypothesis's plugins first, of which the library is one.

    Yields a job when its child has ended, or was killed after so many seconds; with the folder of the copy, which the
    next job gets after that, and the child's status.
    """
    load_frameworks()
    free = [scratch / f"copy{number}" for number in range(at_once)]
    for folder in free:
        copy_tree(folder)
    waiting, running = iter(jobs), dict[int, tuple[Job, Path, threading.Timer]]()
    try:
        while True:
            while free and (job := next(waiting, None)) is not None:
                folder = free.pop()
                prepare(job, folder)
                child = forked(folder, functools.partial(work, job, folder), folder.with_suffix(".log"))
                timer = threading.Timer(seconds, os.killpg, (child, signal.SIGKILL))
                running[child] = job, folder, timer
                timer.start()
            if not running:
                return
            child, status = os.wait()
            job, folder, timer = running.pop(child)
            timer.cancel()
            yield job, folder, status
            free.append(folder)
    finally:
        for child, (_, _, timer) in running.items():
            timer.cancel()
            os.killpg(child, signal.SIGKILL)


def judge_here(seconds: float, examples: int, mutant: Mutant, folder: Path) -> None:
    """In the child: imports the changed copy, then runs the tests; writes the verdict beside the copy."""
    start = time.process_time()
    judge = Judge(mutant.tests, seconds, examples)
    files = list(dict.fromkeys(name.split("::")[0] for name in mutant.tests))
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    code = int(pytest.main([*options, *files], plugins=[judge])) if files else 0
    verdict = judge.verdict
    # 3 and 4: pytest itself broke, or conftest; the others say that tests ran, failed, or were none.
    if not verdict.killed and code in (3, 4):
        verdict = Verdict(True, "import", f"pytest ended with {code}")
    found = vars(verdict) | {"passed": judge.passed, "seconds": round(time.process_time() - start, 1)}
    folder.with_suffix(".json").write_text(json.dumps(found))


def judge_all(
    mutants: Iterable[Mutant], scratch: Path, *, seconds: float, examples: int, at_once: int
) -> Iterator[tuple[Mutant, Verdict]]:
    """Judges mutants, some at once, each in a copy of the tree below ``scratch``; yields each verdict as it comes."""
    work = functools.partial(judge_here, seconds, examples)

    def change(mutant: Mutant, folder: Path) -> None:
        (folder / mutant.file).write_text(mutant.text)

    limits = {"at_once": at_once, "seconds": 4 * (seconds + TEST_SECONDS)}
    for mutant, folder, status in run_in_copies(mutants, work, scratch, prepare=change, **limits):
        shutil.copy2(ROOT / mutant.file, folder / mutant.file)
        answer = folder.with_suffix(".json")
        if answer.exists():
            yield mutant, Verdict(**json.loads(answer.read_text()))
            answer.unlink()
        else:
            why = "never ended" if status == signal.SIGKILL else f"ended with status {status}"
            yield mutant, Verdict(True, "process", why)
