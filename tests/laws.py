"""What the law files share: exact problems, comparisons that fail on a wrong dtype or shape, floors over a run."""

from __future__ import annotations

import collections
from random import Random

import numpy as np
from hypothesis import strategies as st

from planner.testing import Problem, problems
from planner.testing.reference import reference, reference_gradients

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


def assert_equal(got, expected, dtype: str, what: str = "result") -> None:
    """Compare shape, dtype and every value, without tolerance; `got` is a numpy array and its dtype's name."""
    array, name = got
    assert name == dtype, f"{what} has dtype {name}, not {dtype}"
    assert array.shape == expected.shape, f"{what} has shape {array.shape}, not {expected.shape}"
    wanted = expected.astype(array.dtype)
    assert (array == wanted).all(), f"{what} is\n{array}\nnot\n{wanted}"


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


def tangents_of(problem: Problem, wanted) -> list:
    """Small integers in the shape of each wanted operand."""
    random = np.random.default_rng([problem.seed, 7])
    return [
        random.integers(-2, 3, x.shape).astype(x.dtype) if want else None
        for x, want in zip(problem.operands(), wanted, strict=True)
    ]


class Floors:
    """Counts over a run, so that a sample of trivial cases does not pass for a test."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def note(self, **facts: object) -> None:
        self.counts["examples"] += 1
        for name, fact in facts.items():
            self.counts[name] += bool(fact)

    def at_least(self, examples: int, **shares: float) -> None:
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
        **facts,
    )


def pick(problem: Problem, values):
    """One of the values, settled by the problem, so that a replay takes the same; the first for simple ones."""
    return values[problem.seed % len(values)]


def with_unread_nan(problem: Problem) -> tuple[list, bool]:
    """The operands with NaN wherever no point of the sum reads them; also whether there is such a place."""
    operands = problem.operands()
    ones = [np.ones_like(x) for x in operands]
    counts = reference_gradients(problem.spec, np.ones(problem.output_shape()), *ones, **problem.arguments())
    for x, count in zip(operands, counts, strict=True):
        x[count == 0] = np.nan
    return operands, any((count == 0).any() for count in counts)


# Out-of-range indices, as (values, size, position of the first bad one, its value).
BAD_INDICES = [
    ([0, 3, 1], 3, 1, 3),
    ([0, 1, -4], 3, 2, -4),
    ([7, 0, 1], 3, 0, 7),
    ([[0, 1], [2, 99]], 3, (1, 1), 99),
]

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
