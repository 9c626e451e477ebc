"""A thousand index arrays with bad values, in every mode and transform of every framework: one answer, none in silence.

The oracle is asked for the answer to the same values. Where nothing can raise, the rule of `raise` is that a bad index
is a row of NaN in a one-hot matrix: which entries that reaches is an einsum of its own, on ones.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import pytest
from conftest import PROFILE, examples
from engines import ENGINES
from laws import INDEX_DTYPES, MODES

import planner
from planner.testing import Problem


@dataclasses.dataclass(frozen=True)
class Family:
    """A contraction of which only the index array varies; `plain` is the spec with a letter and a matrix in its place.

    Attributes:
        spec: the contraction, of an index array q.
        plain: of the operands and the one-hot matrix of q, which comes last.
        shapes: of the operands.
        index_shape: of q.
        size: of the dimension that q indexes.
        sizes: as `contract` takes them.
    """

    spec: str
    plain: str
    shapes: tuple[tuple[int, ...], ...]
    index_shape: tuple[int, ...]
    size: int
    sizes: dict[str, int] | None = None

    def problem(self, q=None, mode="raise"):
        """The problem with an index array, or with one of zeros."""
        q = np.zeros(self.index_shape, int) if q is None else q
        return Problem(self.spec, self.shapes, self.sizes, {"q": q}, mode, seed=1)

    def poisoned(self, bad, *, gradient_of=None):
        """Where the NaN of bad rows gets to: in the result, or in an operand's gradient."""
        terms, output = self.plain.split("->")
        terms, hot = terms.split(","), np.repeat(bad[..., None], self.size, -1).astype(float)
        arrays = [*(np.ones(shape) for shape in self.shapes), hot]
        if gradient_of is not None:
            terms[gradient_of], output = output, terms[gradient_of]
            arrays[gradient_of] = np.ones(self.problem().output_shape())
        return np.einsum(f"{','.join(terms)}->{output}", *arrays) > 0


FAMILIES = {
    "take": Family("q[n]j -> nj", "mj,nm->nj", ((5, 2),), (4,), 5),
    "grouped": Family("nij, q[n]jk -> nik", "nij,mjk,nm->nik", ((4, 2, 3), (3, 3, 2)), (4,), 3),
    "scatter": Family("nj -> q[n]j", "nj,nm->mj", ((4, 2),), (4,), 6, {"q": 6}),
    "pool": Family("bxd, b q[bxk] d -> bxk", "bxd,bmd,bxkm->bxk", ((2, 2, 3), (2, 4, 3)), (2, 2, 3), 4),
    "far": Family("q[n], n -> n", "m,n,nm->n", ((300,), (4,)), (4,), 300),  # past what int8 and uint8 can name
    "one": Family("ij, q[] -> ij", "ij,m,m->ij", ((2, 3), (7,)), (), 7),
}
# In CI every family meets wide and narrow, signed and unsigned types; of each pair a graph is compiled.
PAIRS = [
    (family, dtype)
    for row, family in enumerate(FAMILIES)
    for column, dtype in enumerate(INDEX_DTYPES)
    if (PROFILE == "nightly" or (row + column) % 6 == 3) and not (family == "far" and dtype in ("int8", "uint8"))
]
COUNT = examples(1_000, 5_000)


def bad_values(dtype, size):
    """Values of a dtype that are out of range, those above all that a narrower type would take for others."""
    info = np.iinfo(dtype)
    near = [-size - 1, size, size + 1, -2 * size - 1, int(info.min), int(info.max), int(info.min) + 1]
    aliases = [sign * 2**bits + k for bits in (8, 16, 31, 32, 63, 64) for sign in (1, -1) for k in (-1, 0, 1, size - 1)]
    found = [v for v in dict.fromkeys(near + aliases) if info.min <= v <= info.max and not -size <= v < size]
    assert found, (dtype, size)
    return found


def bad_arrays(family, dtype):
    """Index arrays with at least one bad value each, as often at either end as in the middle."""
    random = np.random.default_rng([len(family.spec), INDEX_DTYPES.index(dtype)])
    info, pool = np.iinfo(dtype), bad_values(dtype, family.size)
    good = [v for v in range(-family.size, family.size) if info.min <= v <= info.max]
    count = int(np.prod(family.index_shape))
    for number in range(-(-COUNT // len(PAIRS))):
        values = [good[i] for i in random.integers(0, len(good), count)]
        for place in random.permutation(count)[: random.integers(1, min(3, count) + 1)]:
            values[place] = pool[number % len(pool)] if number < len(pool) else pool[random.integers(len(pool))]
        yield np.array(values, dtype).reshape(family.index_shape)


class Expected:
    """What the oracle says of one index array."""

    def __init__(self, family, q):
        self.family = family
        # The oracle's indices are of int64: what is beyond is as far out of range as its ends are.
        self.q = np.array([min(max(int(v), -(2**62)), 2**62) for v in q.ravel()], np.int64).reshape(q.shape)
        self.bad = (self.q < -family.size) | (self.q >= family.size)

    @functools.cache  # noqa: B019
    def __call__(self, mode):
        """The result and the gradients under "drop" and "clip", or under "raise" where nothing can raise."""
        q, family = self.q, self.family
        if mode != "raise":
            return self._all(mode, q)
        found = self._all("drop", np.where((q < 0) & ~self.bad, q + family.size, q))
        for number, x in enumerate(found):
            reached = family.poisoned(self.bad, gradient_of=number - 1 if number else None)
            assert reached.any() == self.bad.any()
            x[np.broadcast_to(reached, x.shape)] = np.nan
        return found

    def _all(self, mode, q):
        problem = self.family.problem(q, mode)
        return [problem.expected(), *problem.expected_gradients()]


def assert_named(error, q, size):
    """An error names the array, a place in it, the value there and the size; the value is bad."""
    pattern = r"index array 'q'(.*) is (-?\d+), outside of \[(.*), (.*)\)"
    place, value, low, high = re.match(pattern, str(error)).groups()
    position = tuple(map(int, place.strip("[]").split(", "))) if place else ()
    assert (int(low), int(high)) == (-size, size)
    assert int(value) == int(q[position])
    assert not -size <= int(value) < size


def refusal(call, *arguments):
    """What a call is refused with."""
    with pytest.raises(planner.IndexRangeError) as caught:
        call(*arguments)
    assert isinstance(caught.value, IndexError)
    return caught.value


class Runs:
    """The runs in NumPy, which has no gradients; those of the other frameworks differ from them."""

    name = "numpy"

    def __init__(self, family):
        pytest.importorskip(self.name, reason=f"{self.name} is not installed")
        self.family, self.engine, problem = family, ENGINES[self.name](), family.problem()
        self.given = self.engine.array
        self.operands, self.gout = [self.given(x) for x in problem.operands()], self.given(problem.output_gradient())

    def call(self, mode, q, *operands):
        return planner.contract(self.family.spec, *operands, sizes=self.family.sizes, index_mode=mode, q=q)

    def functional(self, mode, q):
        """The result and the gradients, by a functional transform."""
        return self.engine.functional(functools.partial(self.call, mode, q), self.operands, self.gout)

    def refused(self, q):
        """The errors that are to be the same in all frameworks."""
        yield refusal(self.call, "raise", q, *self.operands)
        yield refusal(self.functional, "raise", q)

    def answers(self, mode, q):
        yield "eager", self.functional(mode, q)

    def mapped(self, qs):
        """By mode, the results and gradients of many index arrays at once."""
        return {mode: self.engine.vmap(functools.partial(self.functional, mode), 0)(qs) for mode in ("drop", "clip")}

    def assert_same(self, found, expected, *what):
        """Values and NaN alike."""
        expected = expected if self.engine.differentiates else expected[:1]
        for number, (x, wanted) in enumerate(zip(found, expected, strict=True)):
            got, dtype = self.engine.described(x)
            assert (dtype, got.shape) == ("float32", wanted.shape)
            same = np.array_equal(got, wanted.astype(np.float32), equal_nan=True)
            assert same, f"{self.name}, {what}, {number}:\n{got}\nnot\n{wanted}"

    def check(self, q, expected, message):
        for error in self.refused(self.given(q)):
            assert str(error) == message
        for mode in ("drop", "clip"):
            for what, found in self.answers(mode, self.given(q)):
                self.assert_same(found, expected(mode), mode, what)

    def check_mapped(self, arrays, every):
        for q in arrays:
            twice = np.stack([q, q])
            mapped = self.engine.vmap(functools.partial(self.functional, "raise"), 0)
            assert_named(refusal(mapped, self.given(twice)), twice, self.family.size)
        for mode, found in self.mapped(self.given(np.stack(arrays))).items():
            for row, expected in enumerate(every):
                self.assert_same([x[row] for x in found], expected(mode), mode, "mapped, row", row)


class Torch(Runs):
    """The runs in torch; a pair's functions are compiled once."""

    name = "torch"

    def __init__(self, family):
        super().__init__(family)
        import torch

        kind = "aot_eager" if PROFILE != "nightly" else "inductor"
        torch._dynamo.reset()
        self.compiled = {
            mode: torch.compile(lambda q, *xs, mode=mode: self.call(mode, q, *xs), backend=kind, fullgraph=True)
            for mode in MODES
        }

    def with_gradients(self, call, q):
        leaves = [x.detach().clone().requires_grad_() for x in self.operands]
        return self.engine.pulled(lambda xs, q: call(q, *xs), leaves, q, self.gout, range(len(leaves)))

    def refused(self, q):
        yield from super().refused(q)
        yield refusal(self.with_gradients, functools.partial(self.call, "raise"), q)

    def answers(self, mode, q):
        yield from super().answers(mode, q)
        yield "with gradients", self.with_gradients(functools.partial(self.call, mode), q)
        yield "compiled", self.with_gradients(self.compiled[mode], q)

    def check(self, q, expected, message):
        super().check(q, expected, message)
        assert_named(refusal(self.with_gradients, self.compiled["raise"], self.given(q)), q, self.family.size)


class Jax(Runs):
    """The runs in JAX, with its 64-bit types on; a pair's functions are compiled once."""

    name = "jax"

    def __init__(self, family):
        super().__init__(family)
        self.engine.in_a_hurry = PROFILE != "nightly"
        self.jitted = self.engine.jit(lambda q: {mode: self.functional(mode, q) for mode in MODES})
        self.mapped = self.engine.jit(
            lambda qs: {mode: self.engine.vmap(functools.partial(self.functional, mode), 0)(qs) for mode in MODES}
        )

    def answers(self, mode, q):
        yield from super().answers(mode, q)
        yield "jitted", self.jitted(q)[mode]

    def check(self, q, expected, message):
        super().check(q, expected, message)
        # Where nothing can raise, rows are NaN.
        self.assert_same(self.jitted(self.given(q))["raise"], expected("raise"), "raise, jitted")


@pytest.fixture(autouse=True)
def plain_tracebacks(jax):
    """To shorten the traceback of a refusal takes JAX longer than to refuse."""
    with jax.enable_x64(True), jax._src.config.traceback_filtering("off"):
        yield


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_bad_indices_have_one_answer(name, dtype):
    family = FAMILIES[name]
    in_numpy, *others = Runs(family), Torch(family), Jax(family)
    arrays = list(bad_arrays(family, dtype))
    every = [Expected(family, q) for q in arrays]
    for q, expected in zip(arrays, every, strict=True):
        error = refusal(in_numpy.functional, "raise", q)
        assert_named(error, q, family.size)
        for runs in (in_numpy, *others):
            runs.check(q, expected, str(error))
    for runs in others:
        runs.check_mapped(arrays, every)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_narrow_types_reach_far_sizes(dtype):
    """All that the type can name is in range, and the size is beyond the type."""
    info = np.iinfo(dtype)
    size = 2 * int(info.max) + 3
    family = dataclasses.replace(FAMILIES["far"], shapes=((size,), (4,)), size=size)
    q = np.array([info.max, 1, max(info.min, -size), 1], dtype)
    expected = Expected(family, q)
    for runs in (Runs(family), Torch(family), Jax(family)):
        for mode in MODES:
            for what, found in runs.answers(mode, runs.given(q)):
                runs.assert_same(found, expected(mode), mode, what)


def test_there_are_a_thousand_bad_arrays():
    found = [(name, q) for name, dtype in PAIRS for q in bad_arrays(FAMILIES[name], dtype)]
    assert len(found) >= COUNT
    assert all(Expected(FAMILIES[name], q).bad.any() for name, q in found)
    assert {q.dtype.name for _, q in found} == set(INDEX_DTYPES)
    assert len({(q.dtype.name, q.shape, q.tobytes()) for _, q in found}) > COUNT / 2
