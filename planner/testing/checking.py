"""`check` tests one spec against every law in every framework, and returns a `Report`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import FailedHealthCheck, Flaky, Unsatisfiable
from hypothesis.strategies import SearchStrategy

from planner.language.dtypes import HALF_TYPES
from planner.language.errors import PlannerError
from planner.language.options import INDEX_MODES, check_index_mode
from planner.language.parse import parse
from planner.program.implementations import Implementation
from planner.search.paths import explicit_path, is_path_name
from planner.testing import scripts
from planner.testing.drawn_specs import axes_of, wrong_sizes
from planner.testing.engines import Engine, engine_of, installed
from planner.testing.judgement import Broken, Subject, raising
from planner.testing.laws import LAWS, Law, agreement
from planner.testing.problem import DTYPES, FLOATS, Problem
from planner.testing.report import Failure, Report, Verdict
from planner.testing.steps import lowerings
from planner.testing.strategies import problems_of

__all__ = ["Failure", "Report", "Verdict", "check"]

AGREEMENT = "frameworks agree"
# Checks run one at a time: they measure what calls allocate, and would measure each other's allocations.
_ALONE = threading.Lock()
# Which arguments a failure depends on is not shown: finding it out takes long.
_PHASES = [phase for phase in Phase if phase is not Phase.explain]


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

    Hypothesis draws problems of the spec, and shrinks those that fail. These are the laws:

    - Values, gradients and second derivatives equal the oracle's, also for operands in any strides and sizes 0 and 1.
    - Bad indices are treated as the index mode says, and every framework names them in the same words.
    - Every path, and every implementation of every step, gives the same results.
    - The retained bytes are those that the plan predicts, to the byte.
    - A memory limit holds in torch. Elsewhere the peak is at most twice the predicted one.
    - The frameworks agree.

    Values are small integers, so results must be equal, not just close. If sums are too long for exact arithmetic,
    results may differ by as much as rounding explains.

    Example:
        >>> report = check("ij, j -> i", backends="numpy", max_examples=5)
        >>> report.passed, report.verdicts[0].law
        (True, 'values')

    Args:
        spec: the spec.
        sizes: fixed sizes: of axes by letter, and of indexed dimensions by the letter of the index array. Other sizes
            are drawn: from 0 to 4 for values; for memory such that there are some 10^5 points.
        backends: frameworks, or one; by default those that are installed.
        dtypes: dtype names, or one; each problem takes one of them.
        paths: values of `optimize=` for the law "every path"; by default the searches, all pairwise orders of up to
            four operands, the objectives, and the alternatives to the plan.
        laws: names of laws to test, or one, as the report shows them; by default all.
        max_examples: how many problems are drawn for each law in each framework; in JAX a quarter of that, because JAX
            compiles every problem.
        index_modes: index modes to draw from, or one; by default all, but "nan" for the law "index modes" only.
        implementation: a function to check instead of `planner.contract`, called as ``f(*operands, **indices)`` with
            arrays of the framework. If the spec leaves sizes open, they are passed as `sizes=`. If `index_modes` is
            given, the mode is passed as `index_mode=`; else indices are in range. Index arrays are then int64, and
            sizes of 1 do not broadcast.
        kernel: a row for a backend's table (`Implementation`), to check on all forward and backward steps that it
            supports; give one backend. It must compute what the step means, change no input, and in torch allocate no
            more than its results and its scratch.
        progress: called before each law in each framework, with what begins and the number of these calls in all.

    Returns:
        The report; `report.passed` says whether every law holds.

    Raises:
        SpecError: the spec is malformed.
        PlannerError: an option is unknown, a framework is not installed, or no sizes fit the spec.

    Source:
        Results on small integers are exact whatever the order of a sum: see `planner.testing.judgement`.
    """
    names = tuple(dict.fromkeys(_names("backends", installed() if backends is None else backends)))
    kinds, modes = _names("dtypes", dtypes), None if index_modes is None else _names("index_modes", index_modes)
    wanted = None if laws is None else _names("laws", laws)
    _check_arguments(spec, sizes, kinds, modes, max_examples)
    _check_own_code(names, kernel, implementation)
    subject = Subject(implementation, kernel, _paths(paths, kernel, implementation), modes is not None)
    chosen = _laws(subject, wanted)
    engines = [engine_of(name) for name in names]
    trials = [(law, [engine], engine.name) for law in chosen for engine in engines]
    own_code = kernel is not None or implementation is not None
    if not own_code and len(engines) > 1 and (wanted is None or AGREEMENT in wanted):
        compare = Law(AGREEMENT, lambda engine, subject, problem: agreement(engines, problem))
        trials.append((compare, engines, "all"))
    task, start, verdicts = _Task(spec, sizes, kinds, modes, subject, max_examples), time.monotonic(), []
    with _ALONE:
        for law, judged, name in trials:
            if progress is not None:
                progress(f"{law.name} in {name}", len(trials))
            verdicts.append(task.verdict(law, judged, name))
    report = Report(spec, names, tuple(verdicts), time.monotonic() - start)
    if all(verdict.skipped for verdict in verdicts):
        reasons = dict.fromkeys(f"{v.law} in {v.backend}: {v.skipped}" for v in verdicts)
        raise PlannerError("; ".join(["nothing was checked", *reasons]))
    return report


def _names(option: str, value: Any) -> tuple[str, ...]:
    """Return the names that an option was given, as one string or as a collection."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Collection) or isinstance(names, Mapping) or not all(isinstance(x, str) for x in names):
        raise PlannerError(f"{option}={value!r:.80} is neither a name nor names")
    if not names:
        raise PlannerError(f"{option}= is empty: give at least one")
    return tuple(names)


def _check_arguments(
    spec: Any, sizes: Any, dtypes: Sequence[str], modes: Sequence[str] | None, max_examples: Any
) -> None:
    """Raise `PlannerError` if an argument of `check` is wrong."""
    if wrong := wrong_sizes(spec, parse(spec), sizes):
        raise PlannerError(wrong)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise PlannerError(f"dtype {dtype!r:.80} is unknown: take from {', '.join(DTYPES)}")
    for mode in modes or ():
        check_index_mode(mode)
    if isinstance(max_examples, bool) or not isinstance(max_examples, int) or max_examples < 1:
        raise PlannerError(f"max_examples={max_examples!r:.80} must be a positive integer")


def _check_own_code(names: Sequence[str], kernel: Any, implementation: Any) -> None:
    """Raise `PlannerError` if a user's kernel or implementation cannot be checked."""
    if implementation is not None and not callable(implementation):
        raise PlannerError(f"implementation={implementation!r:.80} is not a function")
    if kernel is None:
        return
    if implementation is not None:
        raise PlannerError("kernel= and implementation= are checked one at a time")
    if len(names) != 1:
        raise PlannerError(f"kernel= is a row of one backend's table: give backends= as one of {', '.join(names)}")
    if not isinstance(kernel, Implementation):
        raise PlannerError(f"kernel={kernel!r:.80} is not a planner.program.implementations.Implementation")


def _paths(paths: Any, kernel: Any, implementation: Any) -> tuple[Any, ...] | None:
    """Return the values of `optimize=` to test, checked; None for the default."""
    if paths is None:
        return None
    if kernel is not None or implementation is not None:
        raise PlannerError("paths= is about planner.contract: a kernel or an implementation has none")
    values = (paths,) if isinstance(paths, str) else paths
    if not isinstance(values, Sequence) or not values:
        raise PlannerError(f"paths={paths!r:.80} is not a list of values that optimize= takes")
    for path in values:
        if isinstance(path, str):
            if path not in ("auto", "optimal", "greedy") and not is_path_name(path):
                raise PlannerError(f"paths= has {path!r:.80}, which optimize= does not take")
        elif not callable(path):
            explicit_path(path)
    return tuple(values)


def _laws(subject: Subject, names: Sequence[str] | None) -> tuple[Law, ...]:
    """Return the laws that apply to a subject, or those of them that were asked for."""
    if subject.kernel is not None:
        if names is not None:
            raise PlannerError("laws= is about planner.contract or an implementation: a kernel has one law")
        return (Law(f"kernel {subject.kernel.name!r}", lowerings),)
    laws = {law.name: law for law in LAWS if law.own or subject.implementation is None}
    for name in names or ():
        if name not in (*laws, AGREEMENT):
            raise PlannerError(f"law {name!r:.80} is unknown: take from {', '.join((*laws, AGREEMENT))}")
    return tuple(law for name, law in laws.items() if names is None or name in names)


def _refusal(law: Law, engine: Engine, dtype: str) -> str:
    """Return why a law is not tested on a dtype; "" if it is."""
    if reason := engine.refuses(dtype):
        return reason
    if law.derives and dtype not in FLOATS:
        return "integers have no gradients"
    if law.name == "peak bytes" and dtype in HALF_TYPES and engine.name != "jax":
        return "plans do not predict what a CPU's library allocates for half types"
    return ""


@dataclass(frozen=True, slots=True)
class _Task:
    """What `check` was asked; the attributes are its arguments. `modes` is None if any index mode will do."""

    spec: str
    sizes: Mapping[str, int] | None
    dtypes: tuple[str, ...]
    modes: tuple[str, ...] | None
    subject: Subject
    max_examples: int

    def verdict(self, law: Law, engines: Sequence[Engine], name: str) -> Verdict:
        """Test a law in a framework, or in all of them together; `name` is the framework's, or "all"."""
        usable = [kind for kind in self.dtypes if not any(_refusal(law, engine, kind) for engine in engines)]
        reason = self.skip_reason(law, engines[0])
        if not reason and not usable:
            reason = "no dtype that was asked for is known to all frameworks"
            if len(engines) == 1:
                reason = _refusal(law, engines[0], self.dtypes[0])
        return Verdict(law.name, name, skipped=reason) if reason else self._judge(law, engines[0], usable, name)

    def skip_reason(self, law: Law, engine: Engine) -> str:
        """Return why a law is not tested in a framework, whatever the dtype; "" if it is."""
        parsed, modes = parse(self.spec), self.modes
        if law.derives and not engine.differentiates:
            return f"{engine.name} computes no gradients"
        if law.lays and not engine.strided:
            return f"arrays of {engine.name} have no strides"
        if law.name == "index modes" and not parsed.arrays:
            return "the spec has no index array"
        if law.name == "second derivatives" and modes is not None and set(modes) == {"nan"}:
            return "the oracle's second derivatives are of results, and not of NaN in them"
        if law.draws.get("max_size") == 1 and set(axes_of(parsed)) <= set(self.sizes or {}) and "..." not in self.spec:
            return "all sizes are given"
        never_raises = modes is not None and "raise" not in modes and parsed.arrays
        if law.name == "peak bytes" and engine.name == "jax" and never_raises:
            return "JAX's plans do not predict peaks where indices may be dropped or clipped"
        return ""

    def problems(self, law: Law, dtypes: Sequence[str]) -> SearchStrategy[Problem]:
        """Return a strategy for the problems on which a law is tested."""
        # What differs under "nan" are results, which the law "index modes" compares.
        all_modes = [m for m in INDEX_MODES if m != "nan"] if self.subject.implementation is None else ["raise"]
        options: dict[str, Any] = {
            "strided": False,
            "dtypes": dtypes,
            "max_value": 1 if {*HALF_TYPES} & {*dtypes} else 3,
            "index_modes": all_modes,
            **law.draws,
        }
        if self.modes is not None:
            options["index_modes"] = self.modes
        if self.subject.implementation is not None:
            options["without"] = ("size one", "sizes tuple", "index dtypes", *options.get("without", ()))
        if options.pop("large", False):
            # Some 3 * 10^5 points, so that arrays outweigh Python objects.
            axes = len(axes_of(parse(self.spec))) + 2 * ("..." in self.spec)
            most = max(3, min(4096, int(3e5 ** (1 / max(1, axes)))))
            options |= {"min_size": most // 2, "max_size": most}
        return problems_of(self.spec, self.sizes, **options)

    def _judge(self, law: Law, engine: Engine, dtypes: Sequence[str], name: str) -> Verdict:
        """Test a law on drawn problems; Hypothesis shrinks a problem that fails. Scripts are for `engine`."""
        count, subject = 0, self.subject
        last: list[Problem] = []

        @settings(
            max_examples=-(-self.max_examples // 4) if name in ("jax", "all") else self.max_examples,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            phases=_PHASES,
        )
        @given(self.problems(law, dtypes))
        def attempt(problem: Problem) -> None:
            nonlocal count
            last[:] = [problem]
            with raising(problem, lambda: scripts.of_values(engine.name, problem, subject, {})):
                law.holds(engine, subject, problem)
            count += 1

        def failed(*found: Any) -> Verdict:
            return Verdict(law.name, name, count, Failure(law.name, name, *found))

        try:
            attempt()
        except Broken as broken:
            return failed(*broken.args)
        except FailedHealthCheck as error:
            raise PlannerError(f"check draws its problems itself: call it outside of a @given test ({error})") from None
        except Flaky:
            script, what = scripts.of_values(engine.name, last[0], subject, {}), "something depends on chance"
            return failed(last[0], f"the same problem fails and does not fail: {what}", "", "", script)
        except Unsatisfiable:
            if subject.kernel is not None:
                raise PlannerError(
                    f"{subject.kernel.name!r} supports no step of the spec: nothing was checked"
                ) from None
            return Verdict(law.name, name, skipped="no sizes that fit were found")
        return Verdict(law.name, name, count)
