"""The map from lines of the library to the tests that run them, made once and kept beside the checkout, untracked."""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.judge import ROOT, alarm, copy_tree, few_examples, forked, load_frameworks

STORED = ROOT / ".mutants" / "map.json"
FOLDERS = ("planner", "backends", "kernels")
# What no mutant is judged by. They build the distribution or time things on a clock, or they try the mutants.
LEFT_OUT = ("tests/test_packaging.py", "tests/test_bench.py", "tests/mutants")
_EXAMPLES = 3
_LONG = 5
_TEST_SECONDS = 60
# The files that take longest come last: a map of the others is of use before.
_LAST = ("pallas", "jax", "memory", "limits", "measure", "hostile")

# Tests that read a file or run it in another process, where no coverage is seen.
BESIDE = {
    "kernels/tiled_product/triton_": ("tests/kernels/test_offsets.py",),
    "kernels/segment_sum/triton_": ("tests/kernels/test_offsets.py",),
    "kernels/grouped_matmul/triton_": ("tests/kernels/test_offsets.py",),
    "backends/jax/partition": ("tests/test_sharding_jax.py",),
    "planner/language/split": ("tests/test_sharding_jax.py",),
    "planner/inspect/collectives": ("tests/test_sharding_jax.py",),
}


class Recorder:
    """A pytest plugin: the lines that each test runs, and its time; tests that fail are left out."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        few_examples(items, _EXAMPLES)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.coverage.switch_context(item.nodeid)
        with alarm(_TEST_SECONDS):
            start = time.process_time()
            result = yield
        self.seconds[item.nodeid] = round(time.process_time() - start, 2)
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)


def _record(files: list[str], folder: Path, answer: Path) -> None:
    import coverage

    watch = coverage.Coverage(
        data_file=None, config_file=False, source=[str(folder / name) for name in FOLDERS], messages=False
    )
    watch.start()
    recorder = Recorder(watch)
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", *files], plugins=[recorder])
    watch.stop()
    data = watch.get_data()
    seconds = {name: time_ for name, time_ in recorder.seconds.items() if name not in recorder.failed}
    numbers = {name: number for number, name in enumerate(seconds)}
    lines = {
        str(Path(name).relative_to(folder)): {
            line: [numbers.get(test, -1) for test in tests if not test or test in numbers]
            for line, tests in data.contexts_by_lineno(name).items()
        }
        for name in data.measured_files()
    }
    answer.write_text(json.dumps({"seconds": seconds, "lines": lines, "failed": sorted(recorder.failed)}))


def make_map() -> None:
    """Runs each test file under coverage, a process each, two at a time, and joins what they ran."""
    os.nice(5)
    load_frameworks()
    STORED.parent.mkdir(exist_ok=True)
    parts = STORED.parent / "parts"
    parts.mkdir(exist_ok=True)
    names = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py"))
    files = [name for name in names if not name.startswith(LEFT_OUT)]
    waiting = [name for name in files if not (parts / _part(name)).exists()]
    waiting.sort(key=lambda name: [word in name for word in _LAST][::-1])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve() / "copy"
        copy_tree(folder)
        running: dict[int, str] = {}
        while waiting or running:
            while waiting and len(running) < 2:
                name = waiting.pop(0)
                log = (parts / _part(name)).with_suffix(".log")
                child = forked(folder, lambda name=name: _record([name], folder, parts / _part(name)), log)
                running[child] = name
            child, status = os.wait()
            print(f"{running.pop(child)}: {status}", file=sys.stderr, flush=True)
    join(parts, files)


def _part(name: str) -> str:
    return name.replace("/", "-") + ".json"


def join(parts: Path, files: list[str]) -> None:
    seconds: dict[str, float] = {}
    lines: dict[str, dict[str, list[str]]] = {}
    for name in files:
        if (parts / _part(name)).exists():
            part = json.loads((parts / _part(name)).read_text())
            seconds |= part["seconds"]
            tests = list(part["seconds"])
            for file, covered in part["lines"].items():
                for line, numbers in covered.items():
                    # -1 is the import: it belongs to no test.
                    lines.setdefault(file, {}).setdefault(line, []).extend(tests[n] for n in numbers if n >= 0)
    STORED.write_text(json.dumps({"seconds": seconds, "lines": lines}))


class Map:
    """Which tests run a line, the quickest first."""

    def __init__(self) -> None:
        stored = json.loads(STORED.read_text())
        self.seconds: dict[str, float] = stored["seconds"]
        self.lines: dict[str, dict[int, list[str]]] = {
            file: {int(line): tests for line, tests in lines.items()} for file, lines in stored["lines"].items()
        }

    def tests(self, file: str, line: int) -> list[str]:
        """The tests that run the statement of a line; for what an import runs, those of its definition or its file."""
        lines = self.lines.get(file, {})
        beside = [test for prefix, tests in BESIDE.items() if file.startswith(prefix) for test in tests]
        for first, last in _spans(ast.parse((ROOT / file).read_text()), line):
            found = {test for number in range(first, last + 1) for test in lines.get(number, ())}
            if found:
                return beside + sorted(
                    found, key=lambda test: (not self._speaks_of(test, file), self.seconds[test], test)
                )
        return beside

    def _speaks_of(self, test: str, file: str) -> bool:
        """Whether a test that does not take long is named for what a module does: it asks more than others do."""
        words = [word for word in Path(file).stem.split("_") if word not in ("torch", "jax", "planner", "triton")]
        return self.seconds[test] < _LONG and any(word in test for word in words)


def _spans(tree: ast.Module, line: int) -> list[tuple[int, int]]:
    """The lines of the innermost statement that holds a line (of a compound one its head), then of those around it."""
    around: list[tuple[int, int]] = [(1, 10**6)]
    inner: list[tuple[int, int]] = []
    for node in ast.walk(tree):  # from the outermost inwards
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([first, *(d.lineno for d in node.decorator_list)])
        if first <= line <= last:
            around.append((first, last))
            inner = [(first, body[0].lineno - 1 if body else last)]
    return inner + around[::-1]


if __name__ == "__main__":
    make_map()
