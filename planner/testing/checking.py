"""`check`: one spec, held to every law in every framework; what was found is a `Report`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Verbosity, given, settings
from hypothesis.errors import FailedHealthCheck, Flaky, Unsatisfiable
from hypothesis.strategies import SearchStrategy

from planner.language.errors import PlannerError
from planner.language.options import INDEX_MODES, check_index_mode
from planner.language.parse import parse
from planner.program.frameworks import load_backend
from planner.program.implementations import Implementation
from planner.search.paths import explicit_path, is_path_name
from planner.testing import scripts
from planner.testing.drawn_specs import axes_of, wrong_sizes
from planner.testing.engines import Engine, engine_of, installed
from planner.testing.judgement import Broken, Subject, raising
from planner.testing.laws import LAWS, Law, agreement
from planner.testing.problem import DTYPES, FLOATS, Problem
from planner.testing.steps import lowerings
from planner.testing.strategies import problems_of

__all__ = ["Failure", "Report", "Verdict", "check"]

AGREEMENT = "frameworks agree"
# What calls allocate is measured: two checks at once would see each other's.
_ALONE = threading.Lock()


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
    paths: str | Sequence[Any] | None = None,
    laws: str | Sequence[str] | None = None,
    max_examples: int = 40,
    index_modes: str | Sequence[str] | None = None,
    implementation: Callable[..., Any] | None = None,
    kernel: Implementation | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Report:
    """Property-test a spec: its values, derivatives and memory, in every framework, against an independent oracle.

    Hypothesis draws problems of the spec and makes those that fail smaller. The laws: values, gradients and second
    derivatives are the oracle's, also of operands in any strides and of sizes 0 and 1; bad indices do what the index
    mode says, and are named in the same words everywhere; every path, and every implementation of every step, gives the
    same; what is retained is what the plan says, to the byte; a memory limit holds in torch, and elsewhere the peak is
    at most twice what the plan says; the frameworks agree.
    Values are small integers, so that results are equal, not close; where sizes make sums too long for that, they may
    differ by what rounding explains.

    Example:
        >>> report = check("ij, j -> i", backends="numpy", max_examples=5)
        >>> report.passed, report.verdicts[0].law
        (True, 'values')

    Args:
        spec: the spec.
        sizes: sizes to settle, of axes, and by the letter of an index array of the dimension that it indexes; others
            are drawn, from 0 to 4 for values, and for memory so that there are some 10^5 points.
        backends: frameworks, or one; by default those that are installed.
        dtypes: dtype names, or one; each problem takes one of them.
        paths: what `optimize=` is to take in the law "every path"; by default the searches, all pairwise orders of up
            to four operands, the objectives, and the plans that were not taken.
        laws: laws to hold it to, or one, by the names that the report has; by default all.
        max_examples: how many problems are drawn for each law in each framework; in JAX a quarter of that, for it
            compiles every one.
        index_modes: index modes to draw from, or one; by default all.
        implementation: a function to check in place of `planner.contract`, as ``f(*operands, **indices)`` of arrays of
            the framework; sizes that the spec leaves open are passed as `sizes=`, `index_mode=` if `index_modes` was
            given, else indices are in range. Index arrays are of int64 then, and sizes of 1 do not broadcast.
        kernel: a row for a backend's table (`Implementation`) to check on all steps, forward and
            backward, that it supports; it needs one backend. It must give what the step means, change no input, and in
            torch allocate no more than its results and its scratch.
        progress: called before each law in each framework, with what begins and how many of these there are.

    Returns:
        The report; `report.passed` says whether every law holds.

    Raises:
        SpecError: the spec is malformed.
        PlannerError: an option is unknown, a framework is not installed, or no sizes fit the spec.

    Source:
        Exact arithmetic on small integers as the test of a sum's order: see `planner.testing.judgement`.
    """
    names = tuple(dict.fromkeys(_names("backends", installed() if backends is None else backends)))
    kinds = _names("dtypes", dtypes)
    wanted = None if laws is None else _names("laws", laws)
    modes = None if index_modes is None else _names("index_modes", index_modes)
    _check_arguments(spec, sizes, names, kinds, modes, max_examples, kernel, implementation)
    subject = Subject(implementation, kernel, _paths(paths, kernel, implementation), modes is not None)
    chosen = _laws(subject, wanted)
    engines = [engine_of(name) for name in names]
    compared = (
        kernel is None and implementation is None and len(engines) > 1 and (wanted is None or AGREEMENT in wanted)
    )
    told = progress or (lambda what, total: None)
    total, start, verdicts = len(chosen) * len(engines) + compared, time.monotonic(), []
    with _ALONE:
        for law in chosen:
            for engine in engines:
                told(f"{law.name} in {engine.name}", total)
                usable = [kind for kind in kinds if not _refused(law, engine, kind)]
                if reason := _skip(law, engine, spec, sizes, modes) or (
                    "" if usable else _refused(law, engine, kinds[0])
                ):
                    verdicts.append(Verdict(law.name, engine.name, skipped=reason))
                    continue
                problems = _problems(law, spec, sizes, usable, modes, subject)
                verdicts.append(_judged(law, engine, subject, problems, max_examples, engine.name))
        if compared:
            told(AGREEMENT, total)
            law = Law(AGREEMENT, lambda engine, subject, problem: agreement(engines, problem))
            usable = [kind for kind in kinds if not any(_refused(law, engine, kind) for engine in engines)]
            if usable:
                problems = _problems(law, spec, sizes, usable, modes, subject)
                verdicts.append(_judged(law, engines[0], subject, problems, max_examples, "all"))
            else:
                verdicts.append(
                    Verdict(AGREEMENT, "all", skipped="no dtype that was asked for is known to all frameworks")
                )
    report = Report(spec, names, tuple(verdicts), time.monotonic() - start)
    if all(verdict.skipped for verdict in verdicts):
        reasons = dict.fromkeys(f"{v.law} in {v.backend}: {v.skipped}" for v in verdicts)
        raise PlannerError("; ".join(["nothing was checked", *reasons]))
    return report


def _names(option: str, given: Any) -> tuple[str, ...]:
    """Names that an option gives, or one."""
    found = (given,) if isinstance(given, str) else given
    if not isinstance(found, Collection) or isinstance(found, Mapping) or not all(isinstance(x, str) for x in found):
        raise PlannerError(f"{option}={given!r:.80} is neither a name nor names")
    if not found:
        raise PlannerError(f"{option}= is empty: give at least one")
    return tuple(found)


def _check_arguments(
    spec: Any, sizes: Any, names: Sequence[str], dtypes: Sequence[str], modes: Sequence[str] | None, max_examples: Any,
    kernel: Any, implementation: Any,
) -> None:  # fmt: skip
    if wrong := wrong_sizes(spec, parse(spec), sizes):
        raise PlannerError(wrong)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise PlannerError(f"dtype {dtype!r:.80} is unknown: take from {', '.join(DTYPES)}")
    for mode in modes or ():
        check_index_mode(mode)
    if isinstance(max_examples, bool) or not isinstance(max_examples, int) or max_examples < 1:
        raise PlannerError(f"max_examples={max_examples!r:.80} is no number of problems: give an int from 1 on")
    if implementation is not None and not callable(implementation):
        raise PlannerError(f"implementation={implementation!r:.80} is no function")
    if kernel is None:
        return
    if implementation is not None:
        raise PlannerError("kernel= and implementation= are checked one at a time")
    if len(names) != 1:
        raise PlannerError(f"kernel= is a row of one backend's table: give backends= as one of {', '.join(names)}")
    engine_of(names[0])
    row = next(iter(load_backend(names[0]).table.rows.values()))
    if not isinstance(kernel, type(row)):
        raise PlannerError(f"kernel={kernel!r:.80} is no planner.program.implementations.Implementation")


def _paths(paths: Any, kernel: Any, implementation: Any) -> tuple[Any, ...] | None:
    """What `optimize=` is to take; None for the default."""
    if paths is None:
        return None
    if kernel is not None or implementation is not None:
        raise PlannerError("paths= is about planner.contract: a kernel or an implementation has none")
    found = (paths,) if isinstance(paths, str) else paths
    if not isinstance(found, Sequence) or not found:
        raise PlannerError(f"paths={paths!r:.80} is no list of what optimize= takes")
    for path in found:
        if isinstance(path, str):
            if path not in ("auto", "optimal", "greedy") and not is_path_name(path):
                raise PlannerError(f"paths= has {path!r:.80}, which optimize= does not take")
        elif not callable(path):
            explicit_path(path)
    return tuple(found)


def _laws(subject: Subject, names: Sequence[str] | None) -> tuple[Law, ...]:
    """The laws that a subject is held to, or those of them that were asked for."""
    if subject.kernel is not None:
        if names is not None:
            raise PlannerError("laws= is about planner.contract or an implementation: a kernel has one law")
        return (Law(f"kernel {subject.kernel.name!r}", lowerings),)
    known = {law.name: law for law in LAWS if law.own or subject.implementation is None}
    for name in names or ():
        if name not in (*known, AGREEMENT):
            raise PlannerError(f"law {name!r:.80} is unknown: take from {', '.join((*known, AGREEMENT))}")
    return tuple(law for name, law in known.items() if names is None or name in names)


def _refused(law: Law, engine: Engine, dtype: str) -> str:
    """Why a law is not tried on a dtype; "" if it is."""
    if reason := engine.refuses(dtype):
        return reason
    if law.derives and dtype not in FLOATS:
        return "integers have no gradients"
    if law.name == "peak bytes" and dtype in ("float16", "bfloat16") and engine.name != "jax":
        return "what a CPU's library allocates for half types is not foretold"
    if law.name == "peak bytes" and dtype.startswith("complex") and engine.name == "torch":
        return "conjugates of complex operands are not foretold"
    return ""


def _skip(law: Law, engine: Engine, spec: str, sizes: Mapping[str, int] | None, modes: Sequence[str] | None) -> str:
    """Why a law is not tried whatever the dtype; "" if it is."""
    parsed = parse(spec)
    if law.derives and not engine.differentiates:
        return f"{engine.name} computes no gradients"
    if law.lays and not engine.strided:
        return f"arrays of {engine.name} have no strides"
    if law.name == "index modes" and not parsed.arrays:
        return "the spec has no index array"
    if law.draws.get("max_size") == 1 and set(axes_of(parsed)) <= set(sizes or {}) and "..." not in spec:
        return "all sizes are given"
    if law.draws.get("index_modes") == ("raise",) and modes is not None and "raise" not in modes and parsed.arrays:
        return "of what may be dropped or clipped no peak is foretold"
    return ""


def _problems(
    law: Law, spec: str, sizes: Mapping[str, int] | None, dtypes: Sequence[str], modes: Sequence[str] | None,
    subject: Subject,
) -> SearchStrategy[Problem]:  # fmt: skip
    """The problems on which a law is tried."""
    every = INDEX_MODES if subject.implementation is None else ("raise",)
    chosen: dict[str, Any] = {
        "strided": False, "dtypes": dtypes, "max_value": 1 if {"float16", "bfloat16"} & {*dtypes} else 3,
        "index_modes": every if modes is None else modes, **law.draws,
    }  # fmt: skip
    if modes is not None and law.name == "index modes":
        chosen["index_modes"] = modes
    if subject.implementation is not None:
        chosen["without"] = ("size one", "sizes tuple", "index dtypes", *chosen.get("without", ()))
    if chosen.pop("large", False):
        # Some 3 * 10^5 points, so that bytes count and not objects.
        axes = len(axes_of(parse(spec))) + 2 * ("..." in spec)
        most = max(3, min(4096, int(3e5 ** (1 / max(1, axes)))))
        chosen |= {"min_size": most // 2, "max_size": most}
    return problems_of(spec, sizes, **chosen)


def _judged(
    law: Law, engine: Engine, subject: Subject, problems: SearchStrategy[Problem], max_examples: int, name: str
) -> Verdict:
    """Try a law on problems; of one that fails, on the smallest.

    `name` is the framework's, or "all" for a law that asks no single engine: programs are the first one's then.
    """
    count = 0
    if name in ("jax", "all"):
        max_examples = -(-max_examples // 4)
    last: list[Problem] = []

    @settings(
        max_examples=max_examples, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(problems)
    def attempt(problem: Problem) -> None:
        nonlocal count
        last[:] = [problem]
        with raising(problem, lambda: scripts.of_values(engine.name, problem, subject, {})):
            law.holds(engine, subject, problem)
        count += 1

    def failed(problem: Problem, what: str, found: str = "", expected: str = "", script: str = "") -> Verdict:
        return Verdict(law.name, name, count, Failure(law.name, name, problem, what, found, expected, script))

    try:
        attempt()
    except Broken as e:
        return failed(e.problem, e.what, e.found, e.expected, e.script)
    except FailedHealthCheck as error:
        raise PlannerError(f"check draws its problems itself: call it outside of a @given test ({error})") from None
    except Flaky:
        script = scripts.of_values(engine.name, last[0], subject, {})
        return failed(last[0], "the same problem fails and does not fail: something depends on chance", script=script)
    except Unsatisfiable:
        if subject.kernel is not None:
            raise PlannerError(f"{subject.kernel.name!r} supports no step of the spec: nothing was checked") from None
        return Verdict(law.name, name, skipped="no sizes that fit were found")
    return Verdict(law.name, name, count)
