"""`Report`, what `check` found: a table as text or as a page, and a program for each failure."""

from __future__ import annotations

import os
from dataclasses import dataclass

from planner.inspect.text import table_lines
from planner.pages.markup import tag
from planner.pages.tables import Table, page_of_tables
from planner.testing.problem import Problem


@dataclass(frozen=True, slots=True)
class Failure:
    """A law that does not hold, with the smallest problem that was found to break it.

    Example:
        >>> from planner.testing import check
        >>> report = check("i -> i", backends="numpy", laws="values", implementation=lambda x: 2 * x)
        >>> report.failures[0].law, report.failures[0].backend
        ('values', 'numpy')

    Attributes:
        law: the law's name.
        backend: the framework.
        problem: the problem; None if none was drawn.
        what: what is wrong, in words.
        found: the result, as text.
        expected: the expected result, as text.
        script: a Python program that prints both.
    """

    law: str
    backend: str
    problem: Problem | None
    what: str
    found: str
    expected: str
    script: str

    def __str__(self) -> str:
        lines = [f"{self.law} in {self.backend}: {self.what}"]
        for name, text in (("found", self.found), ("expected", self.expected)):
            if text:
                lines += [f"  {name}", *(f"    {line}" for line in text[:2000].splitlines())]
        return "\n".join(
            [*lines, "  to see it again, run", "", *(f"    {x}".rstrip() for x in self.script.splitlines())]
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one law in one framework.

    Example:
        >>> from planner.testing import check
        >>> check("i -> i", backends="numpy", laws="values", max_examples=5).verdicts
        (Verdict(law='values', backend='numpy', examples=5, failure=None, skipped=''),)

    Attributes:
        law: the law's name.
        backend: the framework; "all" for the law that compares the frameworks.
        examples: number of problems on which the law held.
        failure: the failure; None if the law holds.
        skipped: why the law was not tested; "" if it was.
    """

    law: str
    backend: str
    examples: int = 0
    failure: Failure | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What `check` found. It prints as a table, followed by a program for each failure.

    Example:
        >>> from planner.testing import check
        >>> report = check("i -> i", backends="numpy", laws="values", max_examples=5)
        >>> report.passed, report.failures, report.to_html()[:15]
        (True, (), '<!doctype html>')

    Attributes:
        spec: the spec.
        backends: the frameworks.
        verdicts: one for each law and framework.
        seconds: how long the check took.
    """

    spec: str
    backends: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The laws that do not hold."""
        return tuple(v.failure for v in self.verdicts if v.failure is not None)

    @property
    def passed(self) -> bool:
        """Whether every law that was tested holds."""
        return not self.failures

    def __str__(self) -> str:
        table = table_lines([[row[0], *(f"{cell:>6}" for cell in row[1:])] for row in self._cells()], (0,))
        failures = [f"\n{failure}" for failure in self.failures]
        return "\n".join([self._summary(), *table, *(f"  -: {reason}" for reason in self._reasons()), *failures])

    __repr__ = __str__

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Return a page with the table of laws, and a program for each failure.

        Args:
            path: the file to write the page to; None to return the page.

        Raises:
            PlannerError: the file cannot be written.
        """
        (_, *backends), *rows = self._cells()
        cells = [[tag("span", x, class_="bad") if x == "BROKEN" else x for x in row] for row in rows]
        said = ["Each figure is the number of problems on which the law held.", *self._reasons()]
        laws = Table("Laws", said, ["law", *backends], cells)
        failed = [Table(f"{x.law} in {x.backend}", [], [], [], programs=[str(x)]) for x in self.failures]
        return page_of_tables(f"{self.spec}: a check", f"{self._summary()}.", [laws, *failed], path)

    def _summary(self) -> str:
        tested = [v for v in self.verdicts if not v.skipped]
        laws = len({v.law for v in tested})
        broken = len({f.law for f in self.failures})
        outcome = f"{broken} of {laws} laws broken" if broken else f"{laws} laws hold"
        problems = sum(v.examples for v in tested)
        return f"{self.spec}: {outcome}, {problems} problems in {self.seconds:.0f} s"

    def _reasons(self) -> list[str]:
        """Return why laws were not tested."""
        return list(dict.fromkeys(f"{v.law} in {v.backend}: {v.skipped}" for v in self.verdicts if v.skipped))

    def _cells(self) -> list[list[str]]:
        """Return the table: a row for each law, a column for each framework."""
        columns = list(self.backends)
        if any(v.backend == "all" for v in self.verdicts):
            columns.append("all")
        cells = {(v.law, v.backend): _cell(v) for v in self.verdicts}
        laws = dict.fromkeys(v.law for v in self.verdicts)
        return [["", *columns], *([law, *(cells.get((law, column), "") for column in columns)] for law in laws)]


def _cell(verdict: Verdict) -> str:
    if verdict.failure is not None:
        return "BROKEN"
    return "-" if verdict.skipped else str(verdict.examples)
