"""A pytest plugin: redirects, counts what reached `planner`, and holds the outcome of each test to a list."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import conftest
import pytest
import rewritten

# What says once more what other tests say, and waits for the nightly run: calls that differ in use_blas= only, which is
# left out; opt_einsum's other names for searches of the path; gradients that take seconds each; products in JAX of two
# dtypes, and at a given precision.
LATER = re.compile(
    r"opt_einsum.*::test_(compare_blas|contract_expressions\[\w+-True)"
    r"|opt_einsum.*\b(auto-hq|branch-all|branch-1|branch-2|eager|opportunistic|dynamic-programming|random-greedy-128)\b"
    r"|torch_samples::test_gradients\[(__rmatmul__|matmul|linalg|nn)"
    r"|jax_harnesses.*(different_dtypes|_precision_Precision)"
)
# The suites of which fewer than so many percent may be listed.
MOST_LISTED = 5.0
BOUNDED = ("opt_einsum.tests.test_contract", "opt_einsum.tests.test_input", "opt_einsum.tests.test_edge_cases")


@dataclasses.dataclass
class Entry:
    """Tests that are not expected to pass, and why.

    Attributes:
        kind: "skips" are not run, or skip themselves; "fails" are run, and fail.
        tests: names of functions, all their parameters meant, or of single tests.
        reason: why.
        at: a piece of the statement of the test at which it fails.
        met: the tests that were found.
    """

    kind: str
    tests: list[str]
    reason: str
    at: str = ""
    met: set[str] = dataclasses.field(default_factory=set)


def suite_of(item: pytest.Item) -> str:
    """The module of a test, with the packages that it lies in: some folders of tests are no packages."""
    path = item.path.with_suffix("").as_posix()
    return next(
        (suite for suite in rewritten.REDIRECTED if path.endswith("/" + suite.replace(".", "/"))), item.path.stem
    )


def name_of(item: pytest.Item) -> str:
    """`package.module::Class::function[parameters]`, wherever the package lies."""
    return "::".join([suite_of(item), *item.nodeid.split("::")[1:]])


class Strict:
    """One run of the suites against one list."""

    def __init__(self, listed: pathlib.Path) -> None:
        with listed.open("rb") as file:
            tables = tomllib.load(file)
        self.entries = [Entry(kind, **entry) for kind, entries in tables.items() for entry in entries]
        assert {entry.kind for entry in self.entries} <= {"skips", "fails"}
        assert all(bool(entry.at) == (entry.kind == "fails") for entry in self.entries)
        self.counts: dict[str, Counter[str]] = {}
        self.rules: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.faults: list[str] = []
        self.later = 0

    def entry(self, item: pytest.Item) -> Entry | None:
        name = name_of(item)
        for entry in self.entries:
            if found := {name, name.partition("[")[0]}.intersection(entry.tests):
                entry.met |= found
                return entry
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        modules = {suite_of(item): item.module for item in items}  # type: ignore[attr-defined]
        for suite, names in rewritten.REDIRECTED.items():
            for name, ours in names.items() if suite in modules else ():
                assert hasattr(modules[suite], name), f"{suite} has no {name!r} to redirect any more"
                setattr(modules[suite], name, ours)
        for item in items:
            for key, value in (item.callspec.params if hasattr(item, "callspec") else {}).items():
                if callable(value):
                    item.callspec.params[key] = rewritten.PARAMETERS.get(value, value)  # type: ignore[attr-defined]
            entry = self.entry(item)
            if entry is not None and entry.kind == "skips":
                item.add_marker(pytest.mark.skip(reason=entry.reason))
        if conftest.PROFILE != "nightly":
            self.later = sum(LATER.match(name_of(item)) is not None for item in items)
            items[:] = [item for item in items if not LATER.match(name_of(item))]
        if not config.option.keyword:
            self.faults += [f"{name} was not collected" for name in rewritten.REDIRECTED if name not in modules]
            unmet = [test for entry in self.entries for test in entry.tests if test not in entry.met]
            self.faults += [f"the list names {test}, and there is no such test" for test in unmet]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        rewritten.calls.clear()
        rewritten.rules.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.judge(item, call, report)
        return report  # type: ignore[return-value]

    def judge(self, item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
        """Count a test, and turn its outcome into a failure where the list says another."""
        entry, counts = self.entry(item), self.counts.setdefault(suite_of(item), Counter())
        counts["tests"] += 1
        made = sum(rewritten.calls.values()) if report.when == "call" else 0
        self.rules.update(rewritten.rules if made else ())
        self.calls.update(rewritten.calls if made else ())
        if entry is not None and report.outcome == {"skips": "skipped", "fails": "failed"}[entry.kind]:
            if entry.kind == "fails":
                statement = _failing_statement(item, call)
                if entry.at not in statement:
                    report.longrepr = f"{report.longrepr}\n\nlisted to fail at {entry.at!r}, not at\n{statement}"
                    counts["failed"] += 1
                    return
                report.outcome, report.wasxfail = "skipped", entry.reason  # type: ignore[attr-defined]
            counts["listed"] += 1
        elif report.passed and entry is None and made:
            counts["passed"] += 1
        else:
            counts["failed"] += 1
            if report.passed:
                why = f"is listed ({entry.reason})" if entry else "never called planner"
                report.outcome, report.longrepr = "failed", f"{name_of(item)} passed, but {why}"
            elif report.skipped:
                report.outcome, report.longrepr = "failed", f"{name_of(item)} was skipped, unlisted: {report.longrepr}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        width = max(map(len, self.counts), default=0)
        write(f"\n{'suite':{width}}  tests  passed  listed  percent  failed")
        for suite, counts in self.counts.items():
            share = 100 * counts["listed"] / counts["tests"]
            write(f"{suite:{width}}  {counts['tests']:5}  {counts['passed']:6}  {counts['listed']:6}  {share:6.1f}%"
                  f"  {counts['failed']:6}")  # fmt: skip
        write(f"left to the nightly run: {self.later}")
        write("calls of ours: " + ", ".join(f"{name} {count}" for name, count in sorted(self.calls.items())))
        write("written otherwise, in so many tests:")
        for rule, why in rewritten.RULES.items():
            write(f"  {self.rules[rule]:5}  {why}")
        for fault in self.faults:
            write(f"ERROR: {fault}", red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.keyword or session.config.option.collectonly:
            return
        self.faults += [f"no test needs the rule {rule!r}" for rule in rewritten.RULES if not self.rules[rule]]
        bounded = [self.counts.get(suite, Counter()) for suite in BOUNDED]
        listed, tests = (sum(counts[name] for counts in bounded) for name in ("listed", "tests"))
        if not tests or 100 * listed >= MOST_LISTED * tests:
            self.faults.append(f"{listed} of {tests} tests of {', '.join(BOUNDED)} are listed: too many")
        if self.faults:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _failing_statement(item: pytest.Item, call: pytest.CallInfo[Any]) -> str:
    """The innermost statement of the test's own file that an error went through."""
    assert call.excinfo is not None
    lines = [entry.lineno + 1 for entry in call.excinfo.traceback if str(entry.path) == str(item.path)]
    if not lines:
        return str(call.excinfo.value)
    text = item.path.read_text(encoding="utf-8")
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= lines[-1] <= (node.end_lineno or 0)]
    innermost = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    return ast.get_source_segment(text, innermost) or ""
