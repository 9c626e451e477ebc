"""`check`: one spec, held to every law in every framework; what was found is a `Report`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Flaky, HypothesisException, InvalidArgument, Unsatisfiable
from hypothesis.strategies import SearchStrategy

from planner.dispatch import load_backend
from planner.errors import PlannerError
from planner.parse import parse
from planner.testing.engines import Engine, engine_of, installed
from planner.testing.judgement import Broken, Subject
from planner.testing.laws import LAWS, Law, agreement
from planner.testing.problem import DTYPES, Problem
from planner.testing.steps import lowerings
from planner.testing.strategies import axes_of, problems_of

if TYPE_CHECKING:
    from planner.backends.protocol import Lowering

__all__ = ["Failure", "Report", "Verdict", "check"]


AGREEMENT = "frameworks agree"


@dataclass(frozen=True, slots=True)
class Failure:
    """A law that does not hold, on the smallest problem that was found to show it.

    Attributes:
        law: the law's name.
        backend: the framework.
        problem: the problem; None where none was drawn.
        what: what is wrong.
        found: what came out.
        expected: what should have.
        script: a Python program that shows both.
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
    """One law in one framework.

    Attributes:
        law: the law's name.
        backend: the framework; "all" for the law that compares them.
        examples: on how many problems it was tried.
        failure: how it fails; None if it holds.
        skipped: why it was not tried; "" if it was.
    """

    law: str
    backend: str
    examples: int = 0
    failure: Failure | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What `check` found; it prints as a table, with a program for each failure, in a failed assertion too.

    Attributes:
        spec: the spec.
        backends: the frameworks.
        verdicts: one for each law and framework.
        seconds: how long it took.
    """

    spec: str
    backends: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Laws that do not hold."""
        return tuple(v.failure for v in self.verdicts if v.failure is not None)

    @property
    def passed(self) -> bool:
        """Whether every law that was tried holds."""
        return not self.failures

    def __str__(self) -> str:
        tried = [v for v in self.verdicts if not v.skipped]
        laws = len({v.law for v in tried})
        broken = len({f.law for f in self.failures})
        summary = f"{broken} of {laws} laws broken" if broken else f"{laws} laws hold"
        problems = sum(v.examples for v in tried)
        lines = [f"{self.spec}: {summary}, {problems} problems in {self.seconds:.0f} s"]
        columns = [*self.backends, *(["all"] if any(v.backend == "all" for v in self.verdicts) else [])]
        cells = {(v.law, v.backend): _cell(v) for v in self.verdicts}
        names = list(dict.fromkeys(v.law for v in self.verdicts))
        width = max(map(len, names))
        lines.append("  ".join([" " * (width + 2), *(f"{c:>6}" for c in columns)]).rstrip())
        lines += [
            "  ".join([f"  {n:{width}}", *(f"{cells.get((n, c), ''):>6}" for c in columns)]).rstrip() for n in names
        ]
        reasons = dict.fromkeys(f"  -: {v.law} in {v.backend}: {v.skipped}" for v in self.verdicts if v.skipped)
        return "\n".join([*lines, *reasons, *(f"\n{failure}" for failure in self.failures)])

    __repr__ = __str__


def _cell(verdict: Verdict) -> str:
    if verdict.failure is not None:
        return "BROKEN"
    return "-" if verdict.skipped else str(verdict.examples)


def check(
    spec: str,
    sizes: Mapping[str, int] | None = None,
    *,
    backends: str | Sequence[str] | None = None,
    dtypes: str | Sequence[str] = ("float32",),
    paths: Sequence[Any] | None = None,
    laws: Sequence[str] | None = None,
    max_examples: int = 40,
    index_modes: Sequence[str] | None = None,
    implementation: Callable[..., Any] | None = None,
    kernel: Lowering | None = None,
    progress: Callable[[str, int], None] = lambda what, total: None,
) -> Report:
    """Property-test a spec: its values, derivatives and memory, in every framework, against an independent oracle.

    Hypothesis draws problems of the spec and makes those that fail smaller. The laws: values, gradients and second
    derivatives are the oracle's, also of operands in any strides and of sizes 0 and 1; bad indices do what the index
    mode says, and are named in the same words everywhere; every path, and every implementation of every step, gives the
    same; what is retained is what the plan says, to the byte, and the peak within a factor of 2; the frameworks agree.
    Values are small integers, so that results are equal, not close; where sizes make sums too long for that, they may
    differ by what rounding explains.

    Example:
        >>> report = check("ij, j -> i", backends="numpy", max_examples=5)
        >>> report.passed, report.verdicts[0].law
        (True, 'values')

    Args:
        spec: the spec.
        sizes: sizes to settle, of axes, and by the letter of an index array of the dimension that it indexes; others
            are drawn, from 0 to 4 for values, from 8 to 24 for memory.
        backends: frameworks, or one; by default those that are installed.
        dtypes: dtype names, or one; each problem takes one of them.
        paths: what `optimize=` is to take in the law "every path"; by default all pairwise orders of up to four
            operands, the searches, and the objectives.
        laws: names of laws to hold it to, as the report has them; by default all.
        max_examples: how many problems are drawn for each law in each framework; in JAX a quarter of that, for it
            compiles every one.
        index_modes: index modes to draw from; by default all.
        implementation: a function to check in place of `planner.contract`, as ``f(*operands, **indices)`` of arrays of
            the framework; sizes that the spec leaves open are passed as `sizes=`, `index_mode=` if `index_modes` was
            given, else indices are in range. Index arrays are of int64 then, and sizes of 1 do not broadcast.
        kernel: a row for a backend's table (`planner.backends.protocol.Lowering`) to check on all steps, forward and
            backward, that it supports; it needs one backend. It must give what the step means, change no input, and in
            torch allocate no more than its results and its scratch.
        progress: called before each law in each framework, with what begins and how many of these there are.

    Returns:
        The report; `report.passed` says whether every law holds.

    Raises:
        SpecError: the spec is malformed.
        PlannerError: an option is unknown, a framework is not installed, or no sizes fit the spec.

    Source:
        Exact arithmetic on small integers as the test of a sum's order: see `planner.testing.laws`.
    """
    names = (backends,) if isinstance(backends, str) else tuple(installed() if backends is None else backends)
    kinds = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    _check_arguments(spec, names, kinds, max_examples, kernel, implementation)
    engines = [engine_of(name) for name in names]
    options: dict[str, Any] = {"dtypes": kinds, "max_value": 1 if {"float16", "bfloat16"} & {*kinds} else 3}
    subject = Subject(implementation, kernel, None if paths is None else tuple(paths), index_modes is not None)
    start, verdicts, chosen = time.monotonic(), [], _laws(subject, laws)
    compared = len(engines) > 1 and kernel is None and implementation is None and (not laws or AGREEMENT in laws)
    total = len(chosen) * len(engines) + compared
    for law in chosen:
        for engine in engines:
            progress(f"{law.name} in {engine.name}", total)
            reason = _skip(law, engine, kinds, spec)
            verdicts.append(
                Verdict(law.name, engine.name, skipped=reason)
                if reason
                else _judged(
                    law, engine, subject, _problems(law, spec, sizes, options, index_modes, subject), max_examples
                )
            )
    if compared:
        progress(AGREEMENT, total)
        usable = [e for e in engines if not e.refuses(kinds)]
        law = Law(AGREEMENT, lambda engine, subject, problem: agreement(usable, problem))
        verdicts.append(
            _judged(law, None, subject, _problems(law, spec, sizes, options, index_modes, subject), max_examples)
        )
    return Report(spec, names, tuple(verdicts), time.monotonic() - start)


def _check_arguments(
    spec: Any, names: Sequence[Any], dtypes: Sequence[Any], max_examples: Any, kernel: Any, implementation: Any
) -> None:
    parse(spec)
    for name in names:
        engine_of(name)
    if not names:
        raise PlannerError("backends= is empty: give at least one")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise PlannerError(f"dtype {dtype!r:.80} is unknown: take from {', '.join(DTYPES)}")
    if not dtypes:
        raise PlannerError("dtypes= is empty: give at least one")
    if isinstance(max_examples, bool) or not isinstance(max_examples, int) or max_examples < 1:
        raise PlannerError(f"max_examples={max_examples!r:.80} is no number of problems: give an int from 1 on")
    if implementation is not None and not callable(implementation):
        raise PlannerError(f"implementation={implementation!r:.80} is no function")
    if kernel is not None and implementation is not None:
        raise PlannerError("kernel= and implementation= are checked one at a time")
    if kernel is not None and len(names) != 1:
        raise PlannerError(f"kernel= is a row of one backend's table: give backends= as one of {', '.join(names)}")
    if kernel is not None and not hasattr(kernel, "supports"):
        raise PlannerError(f"kernel={kernel!r:.80} is no planner.backends.protocol.Lowering")
    if kernel is not None:
        load_backend(names[0])


def _laws(subject: Subject, names: Sequence[str] | None) -> tuple[Law, ...]:
    """The laws that a subject is held to, or those of them that were asked for."""
    if subject.kernel is not None:
        return (Law(f"kernel {subject.kernel.name!r}", lowerings),)
    known = {law.name: law for law in LAWS if law.own or subject.implementation is None}
    for name in names or ():
        if name not in (*known, AGREEMENT):
            raise PlannerError(f"law {name!r:.80} is unknown: take from {', '.join((*known, AGREEMENT))}")
    return tuple(law for name, law in known.items() if names is None or name in names)


def _skip(law: Law, engine: Engine, dtypes: Sequence[str], spec: str) -> str:
    """Why a law is not tried; "" if it is."""
    if reason := engine.refuses(dtypes):
        return reason
    if law.derives and not engine.differentiates:
        return f"{engine.name} computes no gradients"
    if law.derives and not any(d.startswith(("float", "bfloat", "complex")) for d in dtypes):
        return "integers have no gradients"
    if law.lays and not engine.strided:
        return f"arrays of {engine.name} have no strides"
    if law.name == "peak bytes" and engine.name == "torch" and {"float16", "bfloat16"} & {*dtypes}:
        return "what the CPU's library allocates in products of half types is not foretold"
    if law.name == "index modes" and not parse(spec).arrays:
        return "the spec has no index array"
    return ""


def _problems(
    law: Law, spec: str, sizes: Mapping[str, int] | None, options: Mapping[str, Any],
    index_modes: Sequence[str] | None, subject: Subject,
) -> SearchStrategy[Problem]:  # fmt: skip
    """The problems on which a law is tried."""
    every = ("raise", "drop", "clip") if subject.implementation is None else ("raise",)
    modes = {"index_modes": tuple(every if index_modes is None else index_modes)}
    chosen = {"strided": False, **options, **modes, **law.draws}
    if subject.implementation is not None:
        chosen["without"] = ("size one", "sizes tuple", "index dtypes", *chosen.get("without", ()))
    if chosen.pop("large", False):
        # About 10^6 points in all, so that bytes count and not objects.
        most = max(3, min(48, int(1e6 ** (1 / max(1, len(axes_of(parse(spec))))))))
        chosen |= {"min_size": most // 2, "max_size": most}
    return problems_of(spec, sizes, **chosen)


def _judged(
    law: Law, engine: Engine | None, subject: Subject, problems: SearchStrategy[Problem], max_examples: int
) -> Verdict:
    """Try a law on problems; of one that fails, on the smallest."""
    count, name = 0, engine.name if engine is not None else "all"
    if name in ("jax", "all"):
        max_examples = -(-max_examples // 4)
    last: list[Problem] = []

    @settings(
        max_examples=max_examples, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(problems)
    def attempt(problem: Problem) -> None:
        nonlocal count
        count += 1
        last[:] = [problem]
        try:
            law.holds(engine, subject, problem)  # type: ignore[arg-type]
        except (Broken, HypothesisException):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            script = law.shows(name if engine is not None else "numpy", problem, subject.implementation, {})
            raise Broken(problem, "an error was raised", text, "", script) from error

    try:
        attempt()
    except Broken as found:
        return Verdict(
            law.name,
            name,
            count,
            Failure(law.name, name, found.problem, found.what, found.found, found.expected, found.script),
        )
    except Flaky:
        script = law.shows(name if engine is not None else "numpy", last[0], subject.implementation, {})
        what = "the same problem fails and does not fail: something depends on chance"
        return Verdict(law.name, name, count, Failure(law.name, name, last[0], what, "", "", script))
    except InvalidArgument as error:
        raise PlannerError(str(error).partition("\n")[0]) from None
    except Unsatisfiable:
        if subject.kernel is not None:
            raise PlannerError(f"{subject.kernel.name!r} supports no step of the spec: nothing was checked") from None
        raise PlannerError(f"{law.name}: no sizes that fit the spec were found; give some by sizes=") from None
    return Verdict(law.name, name, count)
