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
from laws import INDEX_DTYPES

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
COUNT = examples(250, 5_000)
MODES = ("raise", "drop", "clip", "nan")


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


def is_bad(q, size):
    return (q < -size) | (q >= size)


def expected_of(family, q):
    """By mode the result and the gradients, as the oracle has them; under "raise" where nothing can raise."""
    # The oracle's indices are of int64: what is beyond is as far out of range as its ends are.
    q = np.array([min(max(int(v), -(2**62)), 2**62) for v in q.ravel()], np.int64).reshape(q.shape)
    bad = is_bad(q, family.size)
    indices = {"raise": np.where((q < 0) & ~bad, q + family.size, q), "drop": q, "clip": q, "nan": q}
    problems = {mode: family.problem(q, mode.replace("raise", "drop")) for mode, q in indices.items()}
    found = {mode: [problem.expected(), *problem.expected_gradients()] for mode, problem in problems.items()}
    for number, x in enumerate(found["raise"]):
        reached = family.poisoned(bad, gradient_of=number - 1 if number else None)
        assert reached.any() == bad.any()
        x[np.broadcast_to(reached, x.shape)] = np.nan
    return found


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
    """The ways to run a family in a framework; what is compiled is compiled once. NumPy has no gradients."""

    def __init__(self, name, family):
        module = pytest.importorskip(name, reason=f"{name} is not installed")
        self.family, self.engine, problem = family, ENGINES[name](), family.problem()
        self.given = self.engine.array
        self.operands, self.gout = [self.given(x) for x in problem.operands()], self.given(problem.output_gradient())
        self.ways = {"eager": self.functional}
        if name == "torch":
            backend = "aot_eager" if PROFILE != "nightly" else "inductor"
            module._dynamo.reset()
            compiled = {
                mode: module.compile(lambda q, *xs, mode=mode: self.call(mode, q, *xs), backend=backend, fullgraph=True)
                for mode in MODES
            }
            self.ways["with gradients"] = lambda mode, q: self.with_gradients(functools.partial(self.call, mode), q)
            self.ways["compiled"] = lambda mode, q: self.with_gradients(compiled[mode], q)
        if name == "jax":
            self.engine.in_a_hurry = PROFILE != "nightly"
            jitted = self.engine.jit(lambda q: {mode: self.functional(mode, q) for mode in MODES})
            self.ways["jitted"] = lambda mode, q: jitted(q)[mode]
            self.map = self.engine.jit(lambda qs: {mode: self.mapped(mode, qs) for mode in MODES})
        else:
            self.map = lambda qs: {mode: self.mapped(mode, qs) for mode in MODES[1:]}

    def call(self, mode, q, *operands):
        return planner.contract(self.family.spec, *operands, sizes=self.family.sizes, index_mode=mode, q=q)

    def functional(self, mode, q):
        """The result and the gradients, by a functional transform."""
        return self.engine.functional(functools.partial(self.call, mode, q), self.operands, self.gout)

    def with_gradients(self, call, q):
        """The result and the gradients, by autograd."""
        leaves = [x.detach().clone().requires_grad_() for x in self.operands]
        return self.engine.pulled(lambda xs, q: call(q, *xs), leaves, q, self.gout, range(len(leaves)))

    def mapped(self, mode, qs):
        """The results and gradients of many index arrays at once."""
        return self.engine.vmap(functools.partial(self.functional, mode), 0)(qs)

    def mapped_tangents(self, mode, qs):
        """The results of many index arrays at once, in forward mode."""
        return self.engine.vmap(
            lambda q: self.engine.jvp(functools.partial(self.call, mode, q), self.operands, self.operands), 0
        )(qs)

    def assert_same(self, found, expected, *what):
        """Values and NaN alike."""
        expected = expected if self.engine.differentiates else expected[:1]
        for number, (x, wanted) in enumerate(zip(found, expected, strict=True)):
            got, dtype = self.engine.described(x)
            assert (dtype, got.shape) == ("float32", wanted.shape)
            same = np.array_equal(got, wanted.astype(np.float32), equal_nan=True)
            assert same, f"{self.engine.name}, {what}, {number}:\n{got}\nnot\n{wanted}"

    def check(self, q, expected, message):
        given = self.given(q)
        assert str(refusal(self.call, "raise", given, *self.operands)) == message
        for what, run in self.ways.items():
            if what == "jitted":  # where nothing can raise, rows are NaN
                self.assert_same(run("raise", given), expected["raise"], "raise", what)
            elif what == "compiled":
                assert_named(refusal(run, "raise", given), q, self.family.size)
            else:
                assert str(refusal(run, "raise", given)) == message
            for mode in MODES[1:]:
                self.assert_same(run(mode, given), expected[mode], mode, what)

    def check_mapped(self, arrays, every):
        for q in arrays:
            twice = np.stack([q, q])
            for run in (self.mapped, self.mapped_tangents):
                assert_named(refusal(run, "raise", self.given(twice)), twice, self.family.size)
        for mode, found in self.map(self.given(np.stack(arrays))).items():
            for row, expected in enumerate(every):
                self.assert_same([x[row] for x in found], expected[mode], mode, "mapped, row", row)


@pytest.fixture(autouse=True)
def plain_tracebacks(jax):
    """To shorten the traceback of a refusal takes JAX longer than to refuse."""
    with jax.enable_x64(True), jax._src.config.traceback_filtering("off"):
        yield


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_bad_indices_have_one_answer(name, dtype):
    family = FAMILIES[name]
    in_numpy, *others = (Runs(framework, family) for framework in ENGINES)
    arrays = list(bad_arrays(family, dtype))
    every = [expected_of(family, q) for q in arrays]
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
    expected = expected_of(family, q)
    for framework in ENGINES:
        runs = Runs(framework, family)
        for mode in MODES:
            for what, run in runs.ways.items():
                runs.assert_same(run(mode, runs.given(q)), expected[mode], mode, what)


def test_there_are_a_thousand_bad_arrays():
    found = [(name, q) for name, dtype in PAIRS for q in bad_arrays(FAMILIES[name], dtype)]
    assert len(found) >= COUNT
    assert all(is_bad(q, FAMILIES[name].size).any() for name, q in found)
    assert {q.dtype.name for _, q in found} == set(INDEX_DTYPES)
    assert len({(q.dtype.name, q.shape, q.tobytes()) for _, q in found}) > COUNT / 2


TAKEN = [("q[]j->j", 2), ("q[n]j->nj", [1]), ("q[n]j->nj", [0, 1, 2]), ("q[n]j->nj", [])]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("mode", ["raise", "drop", "clip", "nan"])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "uint64"])
def test_what_is_taken_shares_no_memory(framework, mode, dtype):
    """A single number, one row, no rows, or all rows in order: the caller may write into the result."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    engine = ENGINES[framework]()
    for spec, q in TAKEN:
        pool = np.arange(12, dtype=np.float32).reshape(3, 4)
        x, index = engine.array(pool.copy()), engine.array(np.array(q, dtype))
        result = planner.contract(spec, x, q=index, index_mode=mode)
        result += 1
        assert (np.asarray(x) == pool).all()
        assert type(planner.group(index, 3, mode).values) is type(x)
