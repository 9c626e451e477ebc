"""The map from lines of the library to the tests that run them, made once and kept beside the checkout, untracked."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.judge import ROOT, alarm, few_examples, run_in_copies

STORED = ROOT / ".mutants" / "map.json"
FOLDERS = ("planner", "backends", "kernels")
# What no mutant is judged by. They build the distribution or time things on a clock, or they try the mutants.
LEFT_OUT = ("tests/test_packaging.py", "tests/test_bench.py", "tests/mutants")
_EXAMPLES = 3
_LONG = 5
_FILE_SECONDS = 10_000

# Tests that read files or run them in another process, where no coverage is seen; and how the names of these begin.
BESIDE = {
    "tests/kernels/test_offsets.py": (
        "kernels/tiled_product/triton_", "kernels/segment_sum/triton_", "kernels/grouped_matmul/triton_",
    ),
    "tests/test_sharding_jax.py": (
        "backends/jax/partition", "planner/language/split", "planner/inspect/collectives",
    ),
}  # fmt: skip


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
        with alarm():
            start = time.process_time()
            result = yield
        self.seconds[item.nodeid] = round(time.process_time() - start, 2)
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)


def _record(name: str, folder: Path) -> None:
    import coverage

    watch = coverage.Coverage(
        data_file=None, config_file=False, source=[str(folder / name) for name in FOLDERS], messages=False
    )
    watch.start()
    recorder = Recorder(watch)
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", name], plugins=[recorder])
    watch.stop()
    data = watch.get_data()
    seconds = {test: time_ for test, time_ in recorder.seconds.items() if test not in recorder.failed}
    # The import belongs to no test.
    lines = {
        str(Path(file).relative_to(folder)): {
            line: [test for test in tests if test in seconds] for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    _part(name).write_text(json.dumps({"seconds": seconds, "lines": lines, "failed": sorted(recorder.failed)}))


def make_map() -> None:
    """Runs each test file under coverage, a process each, two at a time, and joins what they ran."""
    os.nice(5)
    names = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py"))
    files = [name for name in names if not name.startswith(LEFT_OUT)]
    _part("").parent.mkdir(parents=True, exist_ok=True)
    waiting = [name for name in files if not _part(name).exists()]
    with tempfile.TemporaryDirectory() as scratch:
        ran = run_in_copies(waiting, _record, Path(scratch).resolve(), at_once=2, seconds=_FILE_SECONDS)
        for name, folder, status in ran:
            shutil.copy2(folder.with_suffix(".log"), _part(name).with_suffix(".log"))
            print(f"{name}: {status}", file=sys.stderr, flush=True)
    join(files)


def _part(name: str) -> Path:
    return STORED.parent / "parts" / (name.replace("/", "-") + ".json")


def join(files: list[str]) -> None:
    seconds: dict[str, float] = {}
    lines: dict[str, dict[str, list[str]]] = {}
    for name in files:
        if _part(name).exists():
            part = json.loads(_part(name).read_text())
            seconds |= part["seconds"]
            for file, covered in part["lines"].items():
                for line, tests in covered.items():
                    lines.setdefault(file, {}).setdefault(line, []).extend(tests)
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
        beside = [test for test, prefixes in BESIDE.items() if file.startswith(prefixes)]
        for first, last in _spans(ast.parse((ROOT / file).read_text()), line):
            found = {test for number in range(first, last + 1) for test in lines.get(number, ())}
            if found:
                return beside + sorted(found, key=lambda x: (not self._speaks_of(x, file), self.seconds[x], x))
        return beside

    def _speaks_of(self, test: str, file: str) -> bool:
        """Whether a test that does not take long is named for what a module does: it asks more than others do."""
        words = [word for word in Path(file).stem.split("_") if word not in ("torch", "jax", "planner", "triton")]
        return self.seconds[test] < _LONG and any(word in test for word in words)


def first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    """Where a definition begins: at its first decorator, if it has one."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


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
            first = first_line(node)
        if first <= line <= last:
            around.append((first, last))
            inner = [(first, body[0].lineno - 1 if body else last)]
    return inner + around[::-1]


if __name__ == "__main__":
    make_map()
