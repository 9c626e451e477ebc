"""What `planner.testing.check` holds a contraction to: one law a row, each for one problem in one framework.

A law returns nothing where it holds and raises `Broken` where it does not, with both results and a program that shows
them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from planner.errors import IndexRangeError
from planner.testing import scripts
from planner.testing.engines import Engine, engine_of
from planner.testing.judgement import Broken, Subject, absolute, allowed, differs, points
from planner.testing.problem import Array, Problem
from planner.testing.reference import exact_range, magnitude, reference_gradients
from planner.testing.steps import lowerings

__all__ = ["LAWS", "Law", "agreement"]


def _conjugated(engine: Engine, operands: Sequence[Array]) -> list[Array]:
    return [np.conj(x) for x in operands] if engine.conjugates else list(operands)


def _real(x: Array, dtype: str) -> Array:
    return x if dtype.startswith("complex") else x.real


# --- values and derivatives ---------------------------------------------------------------------


def values(engine: Engine, subject: Subject, problem: Problem, **options: Any) -> None:
    """The result is the oracle's."""
    with engine.context(problem):
        result = subject.call(problem, **options)(engine.operands(problem), engine.indices(problem))
        found = engine.described(result)
        expected, dtype = problem.expected(), engine.result_dtype(problem.dtypes)

        def room() -> Array:
            return allowed(dtype, points(problem), magnitude(problem.spec, *problem.operands(), **problem.arguments()))

        if wrong := differs(found, expected, dtype, None if problem.is_exact() else room):
            script = scripts.of_values(engine.name, problem, subject.implementation, options)
            raise Broken(problem, f"the result {wrong}", repr(found[0]), repr(expected.astype(found[0].dtype)), script)


def gradients(engine: Engine, subject: Subject, problem: Problem, **options: Any) -> None:
    """Each gradient is the oracle's."""
    wanted = [number for number, need in enumerate(problem.requires_grad) if need]
    if not wanted:
        return
    gout = problem.output_gradient()
    with engine.context(problem):
        found = engine.gradients(
            subject.call(problem, **options), engine.operands(problem), engine.indices(problem), wanted,
            engine.array(gout),
        )  # fmt: skip
        operands, arguments = _conjugated(engine, problem.operands()), problem.arguments()
        expected = reference_gradients(problem.spec, gout, *operands, **arguments)
        sizes = _once(lambda: reference_gradients(problem.spec, absolute(gout), *map(absolute, operands), **arguments))
        _compare_gradients(engine, subject, problem, wanted, found, expected, sizes, "gradient", options)


def second(engine: Engine, subject: Subject, problem: Problem) -> None:
    """Derivatives of the gradients are the oracle's: those of one gradient are gradients with another operand."""
    wanted = [number for number, need in enumerate(problem.requires_grad) if need]
    if not wanted:
        return
    gout, arguments = problem.output_gradient(), problem.arguments()
    with engine.context(problem):
        vectors = dataclasses.replace(problem, seed=problem.seed + 1000, strided=False).operands()
        given = [engine.array(vectors[number], problem.dtypes[number]) for number in wanted]
        found = engine.second(
            subject.call(problem), engine.operands(problem), engine.indices(problem), wanted, engine.array(gout), given
        )

        def summed(gout: Array, operands: Sequence[Array], vectors: Sequence[Array]) -> list[Array]:
            total = [np.zeros(x.shape, np.result_type(x, gout)) for x in operands]
            for number in wanted:
                changed = [*operands[:number], vectors[number], *operands[number + 1 :]]
                for other, part in enumerate(reference_gradients(problem.spec, gout, *changed, **arguments)):
                    if other != number:
                        total[other] = total[other] + part
            return total

        operands, vectors = _conjugated(engine, problem.operands()), _conjugated(engine, vectors)
        expected = summed(gout, operands, vectors)
        sizes = _once(lambda: summed(absolute(gout), [*map(absolute, operands)], [*map(absolute, vectors)]))
        _compare_gradients(engine, subject, problem, wanted, found, expected, sizes, "second derivative", {})


def _once(make: Callable[[], list[Array]]) -> Callable[[], list[Array]]:
    """What a function makes when it is first asked for."""
    made: list[list[Array]] = []

    def once() -> list[Array]:
        if not made:
            made.append(make())
        return made[0]

    return once


def _compare_gradients(
    engine: Engine,
    subject: Subject,
    problem: Problem,
    wanted: Sequence[int],
    found: Sequence[Any],
    expected: Sequence[Array],
    sizes: Callable[[], list[Array]],
    what: str,
    options: Mapping[str, Any],
) -> None:
    exact = problem.is_exact(len(problem.shapes))
    for number, gradient in zip(wanted, found, strict=True):
        dtype = problem.dtypes[number]
        exactly = _real(expected[number], dtype)
        narrowest = min(problem.dtypes, key=exact_range)

        def room(number: int = number, narrowest: str = narrowest) -> Array:
            return allowed(narrowest, len(wanted) * points(problem), sizes()[number])

        described = engine.described(gradient)
        if wrong := differs(described, exactly, dtype, None if exact else room):
            make = scripts.of_gradients if what == "gradient" else scripts.of_second
            script = make(engine.name, problem, subject.implementation, options)
            text = repr(exactly.astype(described[0].dtype))
            raise Broken(problem, f"{what} {number} {wrong}", repr(described[0]), text, script)


def both(engine: Engine, subject: Subject, problem: Problem, **options: Any) -> None:
    """The result and the gradients are the oracle's."""
    values(engine, subject, problem, **options)
    if engine.differentiates:
        gradients(engine, subject, problem, **options)


def modes(engine: Engine, subject: Subject, problem: Problem) -> None:
    """Under "drop" and "clip" as the oracle; under "raise" a bad index is named, in the same words as by NumPy."""
    both(engine, subject, problem)
    bad = _with_bad_index(problem) if subject.implementation is None else None
    if bad is None:
        return
    with engine.context(problem):
        name, value = bad
        spoiled = dataclasses.replace(problem, indices={**problem.indices, name: value}, index_mode="raise")
        told = []
        for one in (engine, engine_of("numpy")):
            plain = (
                dataclasses.replace(spoiled, dtypes=("float32",) * len(problem.shapes))
                if one is not engine
                else spoiled
            )
            try:
                result = Subject().call(plain)(one.operands(plain), one.indices(plain))
                told.append(f"no error but {one.described(result)[0]!r}")
            except IndexRangeError as error:
                told.append(str(error))
        if told[0] != told[1] or repr(name) not in told[0]:
            script = scripts.of_values(engine.name, spoiled, None, {}, expected=False)
            raise Broken(spoiled, "a bad index is told otherwise", told[0], told[1], script)


def _with_bad_index(problem: Problem) -> tuple[str, Array] | None:
    """The first index array that has elements, with its last one beyond all that it indexes."""
    sizes: dict[str, int] = {}
    for gather in problem.resolved().gathers:
        sizes[gather.array] = max(sizes.get(gather.array, 0), gather.size or 0)
    for name, q in problem.indices.items():
        if q.size:
            changed = np.array(np.clip(q.astype(np.int64), 0, max(0, sizes[name] - 1)))
            changed.flat[-1] = sizes[name] + problem.seed % 3
            others = {n: np.clip(p, 0, None) for n, p in problem.indices.items() if n != name}
            if any((p >= sizes[n]).any() for n, p in others.items()):
                return None  # two bad ones: which is named first is not promised
            return name, changed
    return None


# --- plans --------------------------------------------------------------------------------------


def pairwise_orders(count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All orders in which operands can be contracted two by two, in opt_einsum's form."""
    if count < 2:
        yield ()
    for i, j in itertools.combinations(range(count), 2):
        for rest in pairwise_orders(count - 1):
            yield ((i, j), *rest)


def paths(engine: Engine, subject: Subject, problem: Problem) -> None:
    """Every path, every objective and every plan that was not taken give the oracle's values and gradients."""
    count = len(problem.shapes)
    chosen: Sequence[Any] = subject.paths or (
        "auto", "optimal", "greedy", *([[*order] for order in pairwise_orders(count)] if 1 < count <= 4 else []),
    )  # fmt: skip
    for path in chosen:
        both(engine, subject, problem, optimize=path)
    for objective in ("flops", "peak", "retained", "bytes") if subject.paths is None else ():
        both(engine, subject, problem, minimize=objective)


# Bytes that are not judged: objects of Python, and what frameworks hold to work at all.
_FRAMEWORKS_OWN = 2**15


# --- memory -------------------------------------------------------------------------------------


def retained(engine: Engine, subject: Subject, problem: Problem) -> None:
    """What stays alive for the backward pass is what the plan says, to the byte."""
    with engine.context(problem):
        predicted, measured = engine.retained(problem, subject.call(problem))
        if predicted != measured:
            script = scripts.of_memory(engine.name, problem, None, {})
            raise Broken(problem, "retained bytes differ", f"{measured} bytes", f"{predicted} bytes", script)


def peak(engine: Engine, subject: Subject, problem: Problem) -> None:
    """In torch a memory limit holds; elsewhere the most bytes alive are those that the plan says, within twice that."""
    with engine.context(problem):
        operands, indices = engine.operands(problem), engine.indices(problem)
        for what, measured, allowed in engine.peaks(problem, operands, indices):
            if measured > allowed + _FRAMEWORKS_OWN:
                script = scripts.of_memory(engine.name, problem, None, {})
                raise Broken(problem, what, f"{measured} bytes", f"{allowed} bytes at most", script)


# --- all frameworks -----------------------------------------------------------------------------


def agreement(engines: Sequence[Engine], problem: Problem) -> None:
    """All frameworks give the same values and, of real dtypes, gradients: of complex ones torch conjugates them."""
    wanted = [number for number, need in enumerate(problem.requires_grad) if need]
    real = not any(d.startswith("complex") for d in problem.dtypes)
    seen: dict[str, tuple[str, Array]] = {}
    for engine in engines:
        with engine.context(problem):
            call, operands, indices = Subject().call(problem), engine.operands(problem), engine.indices(problem)
            found = {"the result": call(operands, indices)}
            if engine.differentiates and wanted and real:
                given = engine.gradients(call, operands, indices, wanted, engine.array(problem.output_gradient()))
                found |= {f"gradient {number}": x for number, x in zip(wanted, given, strict=True)}
            for what, x in found.items():
                array = engine.described(x)[0]
                name, other = seen.setdefault(what, (engine.name, array))
                if array.shape != other.shape or not _close(problem, array, other):
                    script = scripts.of_values(engine.name, problem, None, {})
                    text = f"{what} differs between {name} and {engine.name}"
                    raise Broken(problem, text, f"{engine.name}: {array!r}", f"{name}: {other!r}", script)


def _close(problem: Problem, x: Array, y: Array) -> bool:
    """Whether two results are equal, or, where sums are rounded, as near to one another as both are to the oracle."""
    if problem.is_exact():
        return bool((x == y).all())
    narrowest = min(problem.dtypes, key=exact_range)
    room = 2 * allowed(narrowest, len(problem.shapes) * points(problem), np.asarray(problem.exact_bound()))
    return bool((np.abs(x - y) <= room).all())


# --- the table ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Law:
    """One row of a report.

    Attributes:
        name: as the report shows it.
        holds: raises `Broken` if it does not.
        draws: what of the problems is settled: options of `problems_of`; "large" for sizes at which memory counts.
        shows: makes the program that shows a problem on which something was raised.
        own: whether an implementation of the user's is held to it too; else it is about `planner.contract` alone.
        derives: whether it is about gradients.
        lays: whether it is about strides.
    """

    name: str
    holds: Callable[[Engine, Subject, Problem], None]
    draws: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shows: Callable[..., str] = scripts.of_values
    own: bool = True
    derives: bool = False
    lays: bool = False


_LARGE = {"large": True, "without": ("size zero", "size one"), "strided": False}
# What a limit does not cover, see docs/how-it-works.md: indices that are copied or dropped.
_COVERED = {**_LARGE, "index_modes": ("raise",), "without": ("size zero", "size one", "negative", "index dtypes")}
LAWS = (
    Law("values", values),
    Law("gradients", gradients, shows=scripts.of_gradients, derives=True),
    Law("second derivatives", second, {"max_value": 2}, scripts.of_second, derives=True),
    Law("strides", both, {"strided": True}, lays=True),
    Law("sizes 0 and 1", both, {"max_size": 1}),
    Law("index modes", modes, {"index_modes": ("drop", "clip")}, own=False),
    Law("every path", paths, own=False),
    Law("every lowering", lowerings, own=False),
    Law("retained bytes", retained, _LARGE, scripts.of_memory, own=False),
    Law("peak bytes", peak, _COVERED, scripts.of_memory, own=False),
)
