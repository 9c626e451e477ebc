"""The laws that `planner.testing.check` tests. A law is a function of one problem in one framework.

A law returns nothing if it holds. Otherwise it raises `Broken`, with both results and a program that prints them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import assume

from planner.api import plan
from planner.inspect.meter import of_some
from planner.language.errors import IndexRangeError
from planner.language.options import INDEX_MODES
from planner.program.frameworks import framework_of
from planner.testing import scripts
from planner.testing.engines import Engine, engine_of
from planner.testing.judgement import Broken, Subject, allowed, differs, raising, steps_of, terms_of
from planner.testing.problem import FLOATS, Array, Problem
from planner.testing.reference import absolute, exact_range, magnitude, reference_gradients, second_derivatives
from planner.testing.steps import lowerings

# --- values and derivatives ---------------------------------------------------------------------


def values(engine: Engine, subject: Subject, problem: Problem, **options: Any) -> None:
    """The result equals the oracle's."""
    script = functools.partial(scripts.of_values, engine.name, problem, subject, options)
    with engine.context(problem), raising(problem, script):
        operands = engine.operands(problem)
        result = subject.call(problem, **options)(operands, engine.indices(problem))
        if framework_of(result) != engine.name:
            raise Broken(
                problem, f"the result is a {type(result).__name__}, no array of {engine.name}", "", "", script()
            )
        found = engine.described(result)
        expected, dtype, spec = problem.expected(), engine.result_dtype(problem.dtypes), problem.resolved()

        def room() -> Array:
            size = magnitude(problem.spec, *problem.operands(), **problem.arguments())
            return allowed(_narrowest(problem), steps_of(spec), terms_of(spec, spec.output), size)

        if wrong := differs(found, expected, dtype, None if problem.is_exact() else room):
            text = repr(expected.astype(found[0].dtype))
            raise Broken(problem, f"the result {wrong}", repr(found[0]), text, script())
        for number, (x, given) in enumerate(zip(operands, problem.operands(), strict=True)):
            if (engine.described(x)[0] != given).any():
                raise Broken(
                    problem, f"operand {number} is overwritten", repr(engine.described(x)[0]), repr(given), script()
                )


def gradients(engine: Engine, subject: Subject, problem: Problem, **options: Any) -> None:
    """Each gradient equals the oracle's."""
    _check_gradients(engine, subject, problem, None, options)


def second(engine: Engine, subject: Subject, problem: Problem) -> None:
    """Second derivatives equal the oracle's."""
    vectors = scripts.vectors_of(problem)
    _check_gradients(engine, subject, problem, {number: vectors[number] for number in problem.wanted}, {})


def _check_gradients(
    engine: Engine, subject: Subject, problem: Problem, vectors: dict[int, Array] | None, options: Mapping[str, Any]
) -> None:
    """Raise `Broken` if a gradient differs from the oracle's, or, with vectors, a second derivative along them."""
    assume(problem.wanted)
    gout, dtypes, spec = problem.output_gradient(), problem.dtypes, problem.resolved()
    narrowest, count = _narrowest(problem), len(problem.wanted)

    script = functools.partial(scripts.of_gradients, engine.name, problem, subject, options, vectors)

    def oracle(change: Callable[[Array], Array], gout: Array) -> list[Array]:
        operands = [change(x) for x in problem.operands()]
        if vectors is None:
            return reference_gradients(problem.spec, gout, *operands, **problem.arguments())
        along = {number: change(v) for number, v in vectors.items()}
        return second_derivatives(problem.spec, gout, operands, along, **problem.arguments())

    with engine.context(problem), raising(problem, script):
        along = None if vectors is None else [engine.array(v, dtypes[number]) for number, v in vectors.items()]
        operands = engine.operands(problem)
        function = of_some(subject.call(problem, **options), operands, engine.indices(problem), problem.wanted)
        found = engine.gradients(function, [operands[n] for n in problem.wanted], engine.array(gout), along)
        expected = oracle(np.conj if engine.conjugates else np.asarray, gout)
        sizes = functools.cache(lambda: oracle(absolute, absolute(gout)))
        exact = problem.is_exact(len(problem.shapes))
        for number, gradient in zip(problem.wanted, found, strict=True):
            exactly = expected[number] if dtypes[number].startswith("complex") else expected[number].real

            def room(number: int = number) -> Array:
                terms = count * terms_of(spec, spec.inputs[number])
                return allowed(narrowest, 2 * steps_of(spec), terms, sizes()[number])

            described = engine.described(gradient)
            if wrong := differs(described, exactly, dtypes[number], None if exact else room):
                what = f"{'gradient' if vectors is None else 'second derivative'} {number} {wrong}"
                raise Broken(problem, what, repr(described[0]), repr(exactly.astype(described[0].dtype)), script())


def _narrowest(problem: Problem) -> str:
    return min(problem.dtypes, key=exact_range)


def both(engine: Engine, subject: Subject, problem: Problem, **options: Any) -> None:
    """The result and the gradients equal the oracle's."""
    values(engine, subject, problem, **options)
    if engine.differentiates and any(problem.requires_grad):
        gradients(engine, subject, problem, **options)


def modes(engine: Engine, subject: Subject, problem: Problem) -> None:
    """Modes but "raise" give the oracle's results; "raise" names a bad index in the same words as NumPy."""
    both(engine, subject, problem)
    bad = _with_bad_index(problem)
    if bad is None:
        return
    name, position, size = bad
    value = size + problem.seed % 3 if problem.seed % 2 else -size - 1
    changed = np.array(np.clip(problem.indices[name].astype(np.int64), 0, max(0, size - 1)))
    changed[position] = value
    spoiled = dataclasses.replace(problem, indices={**problem.indices, name: changed}, index_mode="raise")
    plain = dataclasses.replace(spoiled, dtypes=("float32",) * len(problem.shapes))
    message = _index_message(engine, spoiled)
    place = f"[{', '.join(map(str, position))}]" if position else ""
    named = f"index array {name!r}{place} is {value}, outside of [-{size}, {size})"
    expected = _index_message(engine_of("numpy"), plain)
    if not message.startswith(named) or message != expected:
        script = scripts.of_values(engine.name, spoiled, subject, {}, expected=False)
        what = "the error for a bad index differs"
        raise Broken(spoiled, what, message, f"{named}, ... as NumPy: {expected}", script)


def _index_message(engine: Engine, problem: Problem) -> str:
    """Return the error message for a bad index."""
    with engine.context(problem):
        try:
            indices = engine.indices(problem)  # an error gives the value while the array is there
            result = Subject().call(problem)(engine.operands(problem), indices)
            engine.wait()
            return f"no error but {engine.described(result)[0]!r}"
        except IndexRangeError as error:
            with contextlib.suppress(IndexRangeError):  # what the call told once more
                engine.wait()
            return str(error)


def _with_bad_index(problem: Problem) -> tuple[str, tuple[int, ...], int] | None:
    """Return an index array that can hold a bad index, a place in it, and the size that it indexes; None if none can.

    All other index arrays must be in range, and the array must index a single size: which of two bad indices is named
    first is not promised.
    """
    sizes: dict[str, set[int]] = {}
    for gather in problem.resolved().gathers:
        sizes.setdefault(gather.array, set()).add(gather.size or 0)
    for name, q in problem.indices.items():
        others = [(n, p) for n, p in problem.indices.items() if n != name]
        fine = all(p.size == 0 or (p.min() >= 0 and p.max() < min(sizes[n])) for n, p in others)
        whole = q.shape == dict(problem.resolved_indices())[name] and len(sizes[name]) == 1
        if q.size and whole and min(sizes[name]) and fine:
            position = np.unravel_index(problem.seed % q.size, q.shape)
            return name, tuple(int(i) for i in position), min(sizes[name])
    return None


# --- plans --------------------------------------------------------------------------------------


def pairwise_orders(count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield all orders in which operands can be contracted pairwise, in opt_einsum's form."""
    if count < 2:
        yield ()
    for i, j in itertools.combinations(range(count), 2):
        for rest in pairwise_orders(count - 1):
            yield ((i, j), *rest)


def paths(engine: Engine, subject: Subject, problem: Problem) -> None:
    """Every path, every objective and every alternative plan give the oracle's values and gradients."""
    if subject.paths is not None:
        for path in subject.paths:
            both(engine, subject, problem, optimize=path)
        return
    count = len(problem.shapes)
    orders = pairwise_orders(count) if 1 < count <= 4 else ()
    for path in ("auto", "optimal", "greedy", *map(list, orders)):
        both(engine, subject, problem, optimize=path)
    for objective in ("flops", "peak", "retained", "bytes"):
        both(engine, subject, problem, minimize=objective)
    with engine.context(problem):
        operands, indices = engine.operands(problem), engine.indices(problem)
        chosen = plan(problem.spec, *operands, sizes=problem.sizes, index_mode=problem.index_mode, **indices)
        others = chosen.alternatives()
    for number in range(len(others)):
        both(engine, subject, problem, alternative=number)


# --- memory -------------------------------------------------------------------------------------


def retained(engine: Engine, subject: Subject, problem: Problem) -> None:
    """The bytes retained for the backward pass are those that the plan predicts, to the byte."""
    script = functools.partial(scripts.of_memory, engine.name, problem)
    with engine.context(problem), raising(problem, script):
        predicted, measured = engine.retained(problem, subject.call(problem))
        if predicted != measured:
            raise Broken(problem, "retained bytes differ", f"{measured} bytes", f"{predicted} bytes", script())


def peak(engine: Engine, subject: Subject, problem: Problem) -> None:
    """In torch a memory limit holds; elsewhere the peak is at most twice the predicted one."""
    assume(engine.name != "jax" or problem.index_mode == "raise")  # there guards do not count in the peak
    script = functools.partial(scripts.of_memory, engine.name, problem)
    with engine.context(problem), raising(problem, script):
        operands, indices = engine.operands(problem), engine.indices(problem)
        for what, measured, most in engine.peaks(problem, operands, indices):
            if measured > most:
                raise Broken(problem, what, f"{measured} bytes", f"{most} bytes at most", script())


# --- all frameworks -----------------------------------------------------------------------------


def agreement(engines: Sequence[Engine], problem: Problem) -> None:
    """All frameworks give the same values, and the same gradients for real dtypes: torch conjugates complex ones."""
    wanted, spec = problem.wanted, problem.resolved()
    real = not any(d.startswith("complex") for d in problem.dtypes)
    seen: dict[int | None, tuple[str, Array]] = {}
    for engine in engines:
        script = functools.partial(scripts.of_values, engine.name, problem, Subject(), {})
        with engine.context(problem), raising(problem, script):
            call, operands, arrays = Subject().call(problem), engine.operands(problem), engine.indices(problem)
            # The result under None, and the gradients by operand number.
            found: dict[int | None, Any] = {None: call(operands, arrays)}
            if engine.differentiates and wanted and real:
                function, gout = of_some(call, operands, arrays, wanted), engine.array(problem.output_gradient())
                given = engine.gradients(function, [operands[number] for number in wanted], gout)
                found |= dict(zip(wanted, given, strict=True))
            for number, x in found.items():
                array = engine.described(x)[0]
                name, other = seen.setdefault(number, (engine.name, array))
                term = spec.output if number is None else spec.inputs[number]
                if array.shape != other.shape or not _close(problem, terms_of(spec, term), number, array, other):
                    make = scripts.of_values if number is None else scripts.of_gradients
                    both_scripts = [f"# {n}\n{make(n, problem, Subject(), {})}" for n in (name, engine.name)]
                    what = "the result" if number is None else f"gradient {number}"
                    text = f"{what} differs between {name} and {engine.name}"
                    raise Broken(
                        problem, text, f"{engine.name}: {array!r}", f"{name}: {other!r}", "\n".join(both_scripts)
                    )


def _close(problem: Problem, terms: int, number: int | None, x: Array, y: Array) -> bool:
    """Whether two results, or two gradients of an operand, are equal, or differ by no more than rounding explains."""
    if problem.is_exact() or _narrowest(problem) not in FLOATS:
        return bool((x == y).all())
    operands, arguments = problem.operands(), problem.arguments()
    if number is None:
        size = magnitude(problem.spec, *operands, **arguments)
    else:
        factors = map(absolute, (problem.output_gradient(), *operands))
        size = reference_gradients(problem.spec, *factors, **arguments)[number]
    room = 2 * allowed(_narrowest(problem), 2 * steps_of(problem.resolved()), terms, size)
    return bool((np.abs(x - y) <= room).all())


# --- the table ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Law:
    """A law, which is one row of a report.

    Attributes:
        name: the name that the report shows.
        holds: a function that raises `Broken` if the law does not hold.
        draws: options of `problems_of` that the law fixes; "large" for sizes at which arrays outweigh Python objects.
        own: whether the law applies to a user's implementation too; else it applies to `planner.contract` alone.
        derives: whether the law is about gradients.
        lays: whether the law is about strides.
    """

    name: str
    holds: Callable[[Engine, Subject, Problem], None]
    draws: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: bool = True
    derives: bool = False
    lays: bool = False


_LARGE = {"large": True, "without": ("size zero", "size one"), "strided": False}
_ALL_MODES = {**_LARGE, "index_modes": INDEX_MODES}
LAWS = (
    Law("values", values),
    Law("gradients", gradients, derives=True),
    Law("second derivatives", second, {"max_value": 2}, derives=True),
    Law("strides", both, {"strided": True}, lays=True),
    Law("sizes 0 and 1", both, {"max_size": 1}),
    Law("index modes", modes, {"index_modes": ("drop", "clip", "nan")}, own=False),
    Law("every path", paths, own=False),
    Law("every lowering", lowerings, own=False),
    Law("retained bytes", retained, _LARGE, own=False),
    Law("peak bytes", peak, _ALL_MODES, own=False),
)
