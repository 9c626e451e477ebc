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
from laws import INDEX_DTYPES, MODES, assert_equal

import planner
from planner.testing.reference import reference, reference_gradients


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

    def operands(self):
        random = np.random.default_rng(1)
        return [random.integers(-3, 4, shape).astype(np.float32) for shape in self.shapes]

    def output_gradient(self):
        random = np.random.default_rng(2)
        return random.integers(-3, 4, self.poisoned(np.zeros(self.index_shape, bool)).shape).astype(np.float32)

    def poisoned(self, bad, *, gradient_of=None):
        """Where the NaN of bad rows gets to: in the result, or in an operand's gradient."""
        terms, output = self.plain.split("->")
        terms, hot = terms.split(","), np.repeat(bad[..., None], self.size, -1).astype(float)
        arrays = [*(np.ones(shape) for shape in self.shapes), hot]
        if gradient_of is not None:
            terms[gradient_of], output = output, terms[gradient_of]
            arrays[gradient_of] = np.ones(self.output_gradient().shape)
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
        self.family, size = family, family.size
        # The oracle's indices are of int64: what is beyond is as far out of range as its ends are.
        self.q = np.array([min(max(int(v), -(2**62)), 2**62) for v in q.ravel()], np.int64).reshape(q.shape)
        self.bad = (self.q < -size) | (self.q >= size)

    @functools.cache  # noqa: B019
    def __call__(self, mode):
        """The result and the gradients under "drop" and "clip", or under "raise" where nothing can raise."""
        q, family = self.q, self.family
        if mode == "raise":
            mode, q = "drop", np.where((q < 0) & ~self.bad, q + family.size, q)
            found = self._all(mode, q)
            for number, x in enumerate(found):
                reached = family.poisoned(self.bad, gradient_of=number - 1 if number else None)
                assert reached.any() == self.bad.any()
                x[np.broadcast_to(reached, x.shape)] = np.nan
            return found
        return self._all(mode, q)

    def _all(self, mode, q):
        family, arguments = self.family, {"sizes": self.family.sizes, "index_mode": mode, "q": q}
        gout = family.output_gradient()
        return [
            reference(family.spec, *family.operands(), **arguments),
            *reference_gradients(family.spec, gout, *family.operands(), **arguments),
        ]


def assert_same(found, expected, what):
    """Values and NaN alike."""
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        got = np.asarray(got)
        assert got.dtype == np.float32
        assert got.shape == wanted.shape
        assert np.array_equal(got, wanted.astype(np.float32), equal_nan=True), (
            f"{what}, {number}:\n{got}\nnot\n{wanted}"
        )


def assert_named(error, q, size):
    """An error names the array, a place in it, the value there and the size; the value is bad."""
    place, value, low, high = re.match(
        r"index array 'q'(.*) is (-?\d+), outside of \[(.*), (.*)\)", str(error)
    ).groups()
    position = tuple(map(int, place.strip("[]").split(", "))) if place else ()
    assert (int(low), int(high)) == (-size, size)
    assert int(value) == int(q[position])
    assert not -size <= int(value) < size


def refusal(call, *arguments):
    """What a call is refused with."""
    with pytest.raises(planner.IndexRangeError) as caught:
        call(*arguments)
    return caught.value


def assert_rows_same(found, every, mode, what):
    """Compare what was mapped over all arrays at once."""
    found = [np.asarray(x) for x in found]
    for row, expected in enumerate(every):
        assert_same([x[row] for x in found], expected(mode), f"{what}, {mode}, mapped, row {row}")


def numpy_runs(family, q, expected):
    operands = family.operands()

    def call(mode):
        return planner.contract(family.spec, *operands, sizes=family.sizes, index_mode=mode, q=q)

    assert_named(error := refusal(call, "raise"), q, family.size)
    for mode in ("drop", "clip"):
        got = call(mode)
        assert_equal((got, got.dtype.name), expected(mode)[0], "float32", f"numpy, {mode}")
    return str(error)


class Torch:
    """The runs in torch; a pair's functions are compiled once."""

    def __init__(self, family):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        self.torch, self.family, self.given = torch, family, torch.from_numpy
        self.gout = torch.from_numpy(family.output_gradient())
        kind = "aot_eager" if PROFILE == "ci" else "inductor"
        torch._dynamo.reset()
        self.compiled = {
            mode: torch.compile(lambda q, *xs, mode=mode: self.call(mode, q, *xs), backend=kind, fullgraph=True)
            for mode in MODES
        }

    def call(self, mode, q, *operands):
        return planner.contract(self.family.spec, *operands, sizes=self.family.sizes, index_mode=mode, q=q)

    def operands(self, needs=False):
        found = [self.torch.from_numpy(x) for x in self.family.operands()]
        return [x.requires_grad_() for x in found] if needs else found

    def with_gradients(self, call, q):
        operands = self.operands(needs=True)
        result = call(q, *operands)
        return [x.detach() for x in (result, *self.torch.autograd.grad(result, operands, self.gout))]

    def pulled(self, mode, q):
        result, pull = self.torch.func.vjp(lambda *xs: self.call(mode, q, *xs), *self.operands())
        return result, *pull(self.gout)

    def check(self, q, expected, message):
        torch, size = self.torch, self.family.size
        given, twice = self.given(q), np.stack([q, q])
        for needs in (False, True):
            assert str(refusal(self.call, "raise", given, *self.operands(needs))) == message
        assert_named(refusal(self.compiled["raise"], given, *self.operands(True)), q, size)
        mapped = torch.func.vmap(lambda q: self.pulled("raise", q))
        assert_named(refusal(mapped, self.given(twice)), twice, size)
        for mode in ("drop", "clip"):
            for what, found in self.answers(mode, given):
                assert_same(found, expected(mode), f"torch, {mode}, {what}")

    def answers(self, mode, q):
        yield "with gradients", self.with_gradients(lambda *xs: self.call(mode, *xs), q)
        yield "compiled", self.with_gradients(self.compiled[mode], q)
        yield "without gradients", [self.call(mode, q, *self.operands()), *self.pulled(mode, q)[1:]]

    def check_mapped(self, arrays, every):
        many = self.given(np.stack(arrays))
        for mode in ("drop", "clip"):
            assert_rows_same(self.torch.func.vmap(lambda q, m=mode: self.pulled(m, q))(many), every, mode, "torch")


class Jax:
    """The runs in JAX, with its 64-bit types on; a pair's functions are compiled once."""

    def __init__(self, family):
        jax = pytest.importorskip("jax", reason="jax is not installed")
        self.jax, self.family = jax, family
        self.operands = [jax.numpy.asarray(x) for x in family.operands()]
        self.given = jax.numpy.asarray
        self.gout = jax.numpy.asarray(family.output_gradient())
        jit = jax.jit
        if PROFILE == "ci":
            from jax_fast import jit
        self.jitted = jit(lambda q: {mode: self.pulled(mode, q) for mode in MODES})
        self.mapped = jit(lambda qs: {mode: jax.vmap(functools.partial(self.pulled, mode))(qs) for mode in MODES})

    def call(self, mode, q, *operands):
        return planner.contract(self.family.spec, *operands, sizes=self.family.sizes, index_mode=mode, q=q)

    def pulled(self, mode, q):
        result, pull = self.jax.vjp(lambda *xs: self.call(mode, q, *xs), *self.operands)
        return result, *pull(self.gout)

    def check(self, q, expected, message):
        given, twice = self.given(q), np.stack([q, q])
        assert str(refusal(self.call, "raise", given, *self.operands)) == message
        assert str(refusal(self.pulled, "raise", given)) == message
        mapped = self.jax.vmap(lambda q: self.pulled("raise", q))
        assert_named(refusal(mapped, self.given(twice)), twice, self.family.size)
        for mode in ("drop", "clip"):
            for what, found in self.answers(mode, given):
                assert_same(found, expected(mode), f"jax, {mode}, {what}")
        # Where nothing can raise, rows are NaN.
        assert_same(self.jitted(given)["raise"], expected("raise"), "jax, raise, jitted")

    def answers(self, mode, q):
        yield "eager", self.pulled(mode, q)
        yield "jitted", self.jitted(q)[mode]

    def check_mapped(self, arrays, every):
        rows = self.mapped(self.given(np.stack(arrays)))
        for mode in MODES:
            assert_rows_same(rows[mode], every, mode, "jax")


@pytest.fixture(autouse=True)
def plain_tracebacks(jax):
    """To shorten the traceback of a refusal takes JAX longer than to refuse."""
    with jax.enable_x64(True), jax._src.config.traceback_filtering("off"):
        yield


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_bad_indices_have_one_answer(name, dtype):
    family = FAMILIES[name]
    in_torch, in_jax = Torch(family), Jax(family)
    arrays = list(bad_arrays(family, dtype))
    every = [Expected(family, q) for q in arrays]
    for q, expected in zip(arrays, every, strict=True):
        message = numpy_runs(family, q, expected)
        in_torch.check(q, expected, message)
        in_jax.check(q, expected, message)
    in_torch.check_mapped(arrays, every)
    in_jax.check_mapped(arrays, every)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_narrow_types_reach_far_sizes(dtype):
    """All that the type can name is in range, and the size is beyond the type."""
    info = np.iinfo(dtype)
    size = 2 * int(info.max) + 3
    family = dataclasses.replace(FAMILIES["far"], shapes=((size,), (4,)), size=size)
    q = np.array([info.max, 1, max(info.min, -size), 1], dtype)
    expected, frameworks = Expected(family, q), (Torch(family), Jax(family))
    for mode in MODES:
        got = planner.contract(family.spec, *family.operands(), index_mode=mode, q=q)
        assert_equal((got, got.dtype.name), expected(mode)[0], "float32", mode)
        for runs in frameworks:
            for what, found in runs.answers(mode, runs.given(q)):
                assert_same(found, expected(mode), f"{type(runs).__name__}, {mode}, {what}")


def test_there_are_a_thousand_bad_arrays():
    found = [q for name, dtype in PAIRS for q in bad_arrays(FAMILIES[name], dtype)]
    assert len(found) >= COUNT
    assert all(
        Expected(FAMILIES[name], q).bad.any() for name, dtype in PAIRS for q in bad_arrays(FAMILIES[name], dtype)
    )
    assert {q.dtype.name for q in found} == set(INDEX_DTYPES)
    assert len({(q.dtype.name, q.shape, q.tobytes()) for q in found}) > COUNT / 2
