"""What the law files share: exact problems, comparisons that fail on a wrong dtype or shape, floors over a run."""

from __future__ import annotations

import collections
import itertools
import zlib
from collections.abc import Callable, Sequence
from random import Random, getrandbits
from typing import Any
from unittest import mock

import numpy as np
from conftest import PROFILE
from engines import Ask
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import planner
from planner import Operand, Plan
from planner.testing import Problem, problems
from planner.testing.engines import Engine
from planner.testing.judgement import Subject
from planner.testing.reference import reference, reference_gradients
from planner.workloads import Workload

MODES = ("raise", "drop", "clip")
OBJECTIVES = ("time", "flops", "peak", "retained", "bytes")
# Few points and values: a product of four operands over them stays an exact integer in the dtype.
LIMITS = {
    "float16": {"max_operands": 3, "max_axes": 4, "max_size": 2, "max_value": 1},
    "bfloat16": {"max_operands": 3, "max_axes": 3, "max_size": 2, "max_value": 1},
}


def exact_problems(dtypes=("float32",), slack: int = 1, **options) -> st.SearchStrategy[Problem]:
    """Problems of which every intermediate, in any order, is exact in the narrowest of their dtypes.

    `slack` leaves room for sums of that many results, as directional derivatives make.
    """
    for dtype in dtypes:
        options = {**options, **LIMITS.get(dtype, {})}

    return problems(dtypes=dtypes, **{"index_modes": MODES, "strided": False, **options}).filter(
        lambda problem: problem.is_exact(slack)
    )


def tiny(workload: Workload) -> Workload:
    """A workload with a few elements along each axis, neighbouring axes unequal, so that a mistaken axis shows."""
    sizes = {axis: min(size, (3, 4, 2, 5, 6)[n % 5]) for n, (axis, size) in enumerate(workload.sizes.items())}
    terms = workload.parsed.inputs
    for number, original in enumerate(workload.same_as):
        # An array that is passed twice has one shape, so both terms have the same sizes.
        for axis, other in zip(terms[number], terms[original], strict=True):
            if isinstance(axis, str) and isinstance(other, str):
                sizes[axis] = sizes[other]
    return workload.resized(**sizes, **{array: min(size, 4) for array, size in workload.pools.items()})


# The search gives the axes of all values one order, and knows no other.
as_searched = mock.patch("planner.search.choose.order_values", lambda space, best: best)


def stand_ins(problem: Problem) -> tuple[list[Operand], dict[str, Any]]:
    """A problem without its values, as planning may be asked: operands, and options with the shapes of index arrays."""
    described = zip(problem.shapes, problem.dtypes, problem.requires_grad, strict=True)
    operands = [Operand(shape, dtype, requires_grad=wanted) for shape, dtype, wanted in described]
    indices = {name: q.shape for name, q in problem.indices.items()}
    return operands, {"sizes": problem.sizes, "index_mode": problem.index_mode, **indices}


def needing_gradients(*shapes: Sequence[int]) -> list[Operand]:
    """Operands of these shapes, which need gradients."""
    return [Operand(tuple(shape), requires_grad=True) for shape in shapes]


def plan_of(problem: Problem, backend: str = "numpy", **options: Any) -> Plan:
    """The plan of a problem without its values."""
    operands, given = stand_ins(problem)
    return planner.plan(problem.spec, *operands, backend=backend, **given, **options)


def assert_equal(got, expected, dtype: str, what: str = "result") -> None:
    """Compare shape, dtype and every value, without tolerance; `got` is a numpy array and its dtype's name."""
    array, name = got
    assert name == dtype, f"{what} has dtype {name}, not {dtype}"
    assert array.shape == expected.shape, f"{what} has shape {array.shape}, not {expected.shape}"
    wanted = expected.astype(array.dtype)
    equal = (array == wanted) | (np.isnan(array) & np.isnan(wanted))
    assert equal.all(), f"{what} is\n{array}\nnot\n{wanted}"


def problem_of(workload: Workload) -> Problem:
    """A named workload's spec, shapes, index arrays and flags, on small integers."""
    indices = workload.indices("numpy")
    return Problem(
        workload.spec, workload.shapes, indices=indices, requires_grad=workload.takes_gradient, **workload.options
    )


def directional(problem: Problem, operands, tangents) -> np.ndarray:
    """The oracle's directional derivative: with one operand at a time exchanged for its tangent."""
    parts = []
    for number, tangent in enumerate(tangents):
        if tangent is not None:
            swapped = [*operands[:number], tangent, *operands[number + 1 :]]
            parts.append(reference(problem.spec, *swapped, **problem.arguments()))
    return sum(parts[1:], parts[0])


def in_other_strides(x: np.ndarray, random: Random) -> np.ndarray:
    """The same shape, and where nothing repeats the same values, in memory that is permuted, has gaps or repeats."""
    order = random.sample(range(x.ndim), x.ndim)
    steps = [random.choice([1, 1, 2]) for _ in order]
    memory = np.zeros([n * step for n, step in zip(x.transpose(order).shape, steps, strict=True)], x.dtype)
    view = memory[(*(slice(None, None, step) for step in steps), ...)].transpose(np.argsort(order))
    view[...] = x
    if x.size and x.ndim and random.random() < 0.2:
        dim = random.randrange(x.ndim)
        strides = [0 if d == dim else stride for d, stride in enumerate(view.strides)]
        return np.lib.stride_tricks.as_strided(view, x.shape, strides)
    return view


def repeating(x: np.ndarray, random: Random) -> np.ndarray:
    """The same shape, in other strides; along half of the dimensions the first elements repeat."""
    view = in_other_strides(x, random)
    if not view.size:
        return view
    first = tuple(slice(1) if random.random() < 0.5 else slice(None) for _ in view.shape)
    strides = [0 if s.stop else stride for s, stride in zip(first, view.strides, strict=True)]
    return np.lib.stride_tricks.as_strided(view, x.shape, strides)


class Floors:
    """Counts over a run, so that a sample of trivial cases does not pass for a test."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def note(self, **facts: object) -> None:
        self.counts["examples"] += 1
        for name, fact in facts.items():
            self.counts[name] += bool(fact)

    def at_least(self, examples: int, **shares: float) -> None:
        if PROFILE == "mutants":  # of so few draws no share is promised
            return
        total = self.counts["examples"]
        assert total >= examples, f"only {total} of {examples} examples ran"
        for name, share in shares.items():
            assert self.counts[name] >= share * total, f"{name}: {self.counts[name]} of {total}, not {share:.0%}"


def note_language(floors: Floors, problem: Problem, **facts: object) -> None:
    """Note what DESIGN section 8 sets floors for."""
    floors.note(
        three_operands=len(problem.shapes) >= 3,
        gather=bool(problem.indices),
        scatter="[" in problem.spec.rpartition("->")[2] if "->" in problem.spec else False,
        nonzero=problem.expected().any(),
        gradient=any(problem.requires_grad),
        **facts,
    )


def pick(problem: Problem, values):
    """One of the values, settled by the problem, so that a replay takes the same; the first for simple ones."""
    return values[problem.seed % len(values)]


def unread_places(problem: Problem) -> list[np.ndarray]:
    """For each operand a mask of the places that no point of the sum reads."""
    ones = [np.ones_like(x) for x in problem.operands()]
    counts = reference_gradients(problem.spec, np.ones(problem.output_shape()), *ones, **problem.arguments())
    return [count == 0 for count in counts]


def with_unread_nan(problem: Problem) -> tuple[list, bool]:
    """The operands with NaN and infinity where no point of the sum reads them; and whether there is such a place."""
    operands, unread = problem.operands(), unread_places(problem)
    for x, mask in zip(operands, unread, strict=True):
        x[mask] = np.resize([np.nan, np.inf, -np.inf], mask.sum())
    return operands, any(mask.any() for mask in unread)


# Every integer dtype, with a size that the narrow ones do not reach and one that they do.
INDEX_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def wide_index(dtype: str, size: int) -> np.ndarray:
    """Indices of a dtype that fit its range, up to the largest it can name in `size`, from the end too."""
    info = np.iinfo(dtype)
    top = min(int(info.max), size - 1)
    values = [0, 1, top, top // 2, top, 2]
    if info.min < 0:
        values += [-1, -2, max(int(info.min), -size)]
    return np.array(values, dtype)


# --- what is asked of a framework, and what the oracle says ---------------------------------------


def asked(engine, problem, run, *more, expected):
    """Ask for `run(operands, indices, *more)`, in each way in which the framework runs a problem."""
    operands, indices = engine.operands(problem), engine.indices(problem)
    inexact = problem.output_gradient().dtype.kind in "fc"
    if engine.name == "jax" and problem.index_mode == "raise" and not inexact:
        # Under jit no NaN could mark a bad index: such calls are refused, unless the array is a constant.
        asks = (lambda xs, *more: run(xs, indices, *more)), (operands, *more)
    else:
        asks = run, (operands, indices, *more)
    return [Ask(*asks, expected, jitted) for jitted in engine.ways(problem)]


def oracle(engine, problem, operands=None, gout=None):
    """What the result and the gradients are to be, by the framework's convention of conjugates."""
    operands = problem.operands() if operands is None else operands
    result = reference(problem.spec, *operands, **problem.arguments())
    expected = [("result", result, engine.result_dtype(problem.dtypes))]
    if engine.differentiates and problem.wanted:
        others = [np.conj(x) for x in operands] if engine.conjugates else operands
        gout = problem.output_gradient() if gout is None else gout
        gradients = reference_gradients(problem.spec, gout, *others, **problem.arguments())
        for n in problem.wanted:
            expected.append((f"gradient {n}", real(gradients[n], problem.dtypes[n]), problem.dtypes[n]))
    return expected


def real(gradient, dtype):
    return gradient if dtype.startswith("complex") else gradient.real


def values_and_gradients(engine, problem, call=None, **options):
    """The result, and the gradients of the operands that need one."""
    call = call or Subject().call(problem, **options)
    wanted, gout = problem.wanted, engine.array(problem.output_gradient())

    def run(xs, qs, gout):
        return engine.pulled(call, xs, qs, gout, wanted)

    return asked(engine, problem, run, gout, expected=oracle(engine, problem))


# --- holding a framework to a law -----------------------------------------------------------------


def judge(engine: Engine, law: Callable, some: Sequence[Problem]) -> None:
    """Hold a framework to a law on these problems, which ask for the same settings."""
    with engine.context(some[0]):
        rows = [(problem, ask) for problem in some for ask in law(engine, problem)]
        compare(engine, *zip(*rows, strict=True))


def compare(engine: Engine, owners: Sequence[object], asks: Sequence) -> None:
    """Run what is asked of a framework, and compare what comes out; of a failure the owner is told."""
    for owner, ask, answers in zip(owners, asks, engine.answers(asks), strict=True):
        for answer, (what, expected, dtype) in zip(answers, ask.expected, strict=True):
            try:
                assert_equal(engine.described(answer), expected, dtype, what)
            except AssertionError as error:
                error.add_note(f"{engine.name}{', jitted' if ask.jitted else ''}: {owner}")
                raise


def hold(
    engine: Engine, law: Callable, problems: st.SearchStrategy[Problem], count: int,
    *, pinned: Sequence[Problem] = (), note: Callable = note_language, **shares: float,
) -> None:  # fmt: skip
    """Hold a framework to a law on drawn problems; of one that fails, on the smallest.

    Args:
        engine: the framework.
        law: what to ask of it about a problem: see `Ask`.
        problems: what to draw from.
        count: how many are drawn.
        pinned: problems that are tried first: failures of old.
        note: told of the counts and of each problem that was drawn.
        shares: how many of the problems must be of a kind that `note` tells.
    """
    drawn, floors = [], Floors()
    # With the same seed a second run draws what the first one drew.
    number = zlib.crc32(f"{engine.name} {law.__name__} {count}".encode())
    if not settings.default.derandomize:
        number = getrandbits(32)

    def each(function: Callable, after: int = 0) -> None:
        place = itertools.count()

        def one(problem: Problem) -> None:
            if next(place) >= after:
                function(problem)

        seed(number)(settings(max_examples=count, database=None)(given(problems)(one)))()

    def alone(problem: Problem) -> None:
        judge(engine, law, [problem])

    def draw(problem: Problem) -> None:
        drawn.append(problem)
        if engine.batch == 1:
            alone(problem)

    for problem in pinned:
        alone(problem)
    each(draw)
    for start in range(0, len(drawn) if engine.batch > 1 else 0, engine.batch):
        some = drawn[start : start + engine.batch]
        try:
            judge(engine, law, some)
        except Exception as error:
            each(alone, after=start)
            raise AssertionError(f"fails beside other problems only: {some}") from error
    for problem in drawn:
        note(floors, problem)
    floors.at_least(count * 9 // 10, **shares)
