"""A pytest plugin: redirects, sees that `planner` was called, and holds the outcome of each test to a list."""

from __future__ import annotations

import ast
import pathlib
import re
import tomllib
import traceback
from collections.abc import Collection, Iterator
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


class Listed(Exception):
    """A failure at the statement that the list names."""


def suite_of(item: pytest.Item) -> str:
    """The module of a test, with the packages that it lies in: some folders of tests are not packages."""
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
        tables = tomllib.loads(listed.read_text(encoding="utf-8"))
        assert tables.keys() == {"skips", "fails"}
        # What is not run has a reason; what fails also has a piece of the statement at which it fails.
        assert all(("at" in entry) == (kind == "fails") for kind, entries in tables.items() for entry in entries)
        self.listed = {test: entry for entries in tables.values() for entry in entries for test in entry["tests"]}
        self.met: set[str] = set()

    def entry(self, item: pytest.Item) -> dict[str, Any]:
        """What the list says of a test, by its name or its function's; nothing if it is to pass."""
        name = name_of(item)
        met = [test for test in (name, name.partition("[")[0]) if test in self.listed]
        self.met.update(met)
        return self.listed[met[0]] if met else {}

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
            if entry := self.entry(item):
                fails = pytest.mark.xfail(reason=entry["reason"], raises=Listed, strict=True)
                item.add_marker(fails if "at" in entry else pytest.mark.skip(reason=entry["reason"]))
        later = [item for item in items if conftest.PROFILE != "nightly" and LATER.match(name_of(item))]
        items[:] = [item for item in items if item not in later]
        config.hook.pytest_deselected(items=later)
        if not config.option.keyword:
            self.hold_list(items, modules)

    def hold_list(self, items: list[pytest.Item], modules: Collection[str]) -> None:
        """Refuse a list that names what is not there, or too many tests."""
        if unmet := [*(rewritten.REDIRECTED.keys() - modules), *(self.listed.keys() - self.met)]:
            raise pytest.UsageError(f"there are no such tests: {', '.join(unmet)}")
        bounded = [bool(self.entry(item)) for item in items if suite_of(item) in BOUNDED]
        if 100 * sum(bounded) >= MOST_LISTED * len(bounded):
            raise pytest.UsageError(f"{sum(bounded)} of {len(bounded)} tests are listed: too many")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        rewritten.calls.clear()
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            if at := self.entry(item).get("at"):
                statement = _failing_statement(item, error)
                if at in statement:
                    raise Listed from error
                error.add_note(f"listed to fail at {at!r}, not at\n{statement}")
            raise
        assert rewritten.calls, "it never called planner"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        if report.skipped and not self.entry(item):
            report.outcome, report.longrepr = "failed", f"{name_of(item)} was skipped, unlisted: {report.longrepr}"
        return report  # type: ignore[return-value]


def _failing_statement(item: pytest.Item, error: BaseException) -> str:
    """The innermost statement of the test's own file that an error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(item.path)]
    if not lines:
        return str(error)
    text = item.path.read_text(encoding="utf-8")
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= lines[-1] <= (node.end_lineno or 0)]
    innermost = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    return ast.get_source_segment(text, innermost) or ""
