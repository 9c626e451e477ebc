"""The grouped kernels in stock XLA against a loop over the rows; small integers, so every result is exact."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax_fast import SIZES_ALONE  # noqa: E402

from planner.kernels.grouped_matmul import jax_grouped  # noqa: E402
from planner.kernels.grouped_matmul.jax_grouped import grouped_gradients, grouped_matmul, grouped_outer  # noqa: E402
from planner.kernels.grouping import jax_grouping  # noqa: E402
from planner.kernels.grouping.jax_grouping import Groups, group_rows  # noqa: E402

DTYPES = ("float32", "bfloat16", "float16", "int32", "complex64")
INDEX_DTYPES = ("int8", "uint8", "int32", "uint32")


@dataclass(frozen=True)
class Shape:
    """Sizes of one case: rows N, left factors Na, groups G, and the matrices' I, J, K."""

    rows: int
    factors: int
    groups: int
    i: int
    j: int
    k: int


# A handful, since each compiles once per dtype; the index values vary freely within each.
SHAPES = (
    Shape(60, 60, 7, 1, 3, 4),
    Shape(300, 40, 2, 2, 5, 3),  # more than one step of tiles, left factors repeated
    Shape(9, 20, 30, 3, 2, 1),  # more groups than rows
    Shape(1, 1, 1, 1, 1, 1),
    Shape(0, 3, 2, 1, 2, 2),
    Shape(5, 5, 0, 1, 2, 2),
    Shape(5, 5, 3, 0, 2, 2),
    Shape(5, 5, 3, 1, 0, 2),
    Shape(5, 5, 3, 2, 2, 0),
)


@dataclass(frozen=True)
class Case:
    """One grouping, with the maps from rows to left factors and to targets."""

    shape: Shape
    index: np.ndarray
    source: np.ndarray
    target: np.ndarray
    seed: int

    @property
    def kept(self) -> list[int]:
        return [row for row in range(self.shape.rows) if self.index[row] < self.shape.groups]

    def operands(self, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Left factors, matrices and an output gradient, of small integers."""
        random, shape = np.random.default_rng(self.seed), self.shape
        a, c = (shape.factors, shape.i, shape.j), (shape.groups, shape.j, shape.k)
        parts = [random.integers(-3, 4, size) for size in (a, c, (shape.rows, shape.i, shape.k))]
        if np.dtype(jnp.dtype(dtype)).kind == "c":
            parts = [part + 1j * random.integers(-3, 4, part.shape) for part in parts]
        return tuple(parts)


@st.composite
def cases(draw):
    shape = draw(st.sampled_from(SHAPES))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from(("uniform", "one group", "half in one", "all dropped")))
    index = random.integers(0, shape.groups + 1, shape.rows)
    if spread == "one group":
        index[:] = shape.groups // 2
    elif spread == "half in one":
        index[random.random(shape.rows) < 0.5] = shape.groups // 2
    elif spread == "all dropped":
        index[:] = shape.groups
    source = random.integers(0, shape.factors, shape.rows)
    target = random.integers(0, TARGETS + 1, shape.rows)
    return Case(shape, index, source, target, draw(st.integers(0, 2**16)))


TARGETS = 6
FEW = settings(max_examples=20)


def same(result, expected, dtype):
    """Whether an array has this dtype, this shape, and these values; NaN equals NaN."""
    assert result.dtype == jnp.dtype(dtype)
    assert result.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(result).astype(expected.dtype), expected)


def device(dtype, *arrays):
    return tuple(jnp.asarray(array).astype(dtype) for array in arrays)


@jax.jit
def _matmul(a, c, groups, source):
    return grouped_matmul(a, c, groups, source)


@jax.jit
def _matmul_add(a, c, groups, source, target):
    return grouped_matmul(a, c, groups, source, target, TARGETS)


@jax.jit
def _gradients(gout, a, c, groups, source):
    return grouped_gradients(gout, a, c, groups, source)


_group = jax.jit(group_rows, static_argnames="size")
_outer = jax.jit(grouped_outer, static_argnames="size")


def plan(case: Case) -> Groups:
    return _group(jnp.asarray(case.index, jnp.int32), size=case.shape.groups)


@settings(max_examples=40)
@given(
    values=st.lists(st.integers(0, 5), max_size=40),
    dtype=st.sampled_from(INDEX_DTYPES),
    packed=st.booleans(),
)
@example(values=[], dtype="int32", packed=True)
def test_rows_are_sorted_by_group_and_stay_in_order(values, dtype, packed):
    index = np.array(values, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        if not packed:
            patch.setattr(jax_grouping, "UINT32_BITS", 0)
        groups = group_rows(jnp.asarray(index), 5)
    np.testing.assert_array_equal(groups.order, np.argsort(index, kind="stable"))
    np.testing.assert_array_equal(groups.offsets, [np.sum(index < group) for group in range(6)])
    assert groups.order.dtype == groups.offsets.dtype == jnp.int32


def test_a_key_is_packed_while_it_fits_32_bits():
    assert jax_grouping.fits_packed(2**17, 2**15 - 1)
    assert not jax_grouping.fits_packed(2**17 + 1, 2**15 - 1)
    assert not jax_grouping.fits_packed(2**17, 2**15)


def test_the_widest_packed_key_sorts():
    rows, size = 2**17, 2**15 - 1
    index = np.random.default_rng(0).integers(0, size + 1, rows)
    index[:3] = size
    groups = group_rows(jnp.asarray(index), size)
    np.testing.assert_array_equal(groups.order, np.argsort(index, kind="stable"))
    np.testing.assert_array_equal(groups.offsets, np.searchsorted(np.sort(index), np.arange(size + 1)))


def test_an_index_that_is_not_flat_is_refused():
    with pytest.raises(ValueError, match=r"flat.*\(2, 2\)"):
        group_rows(jnp.zeros((2, 2), jnp.int32), 3)


@FEW
@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_matmul(case, dtype):
    a, c, _ = case.operands(dtype)
    expected = np.zeros((case.shape.rows, case.shape.i, case.shape.k), a.dtype)
    for row in case.kept:
        expected[row] = a[case.source[row]] @ c[case.index[row]]
    same(_matmul(*device(dtype, a, c), plan(case), jnp.asarray(case.source)), expected, dtype)


@FEW
@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_matmul_adds_into_targets(case, dtype):
    a, c, _ = case.operands(dtype)
    expected = np.zeros((TARGETS, case.shape.i, case.shape.k), a.dtype)
    for row in case.kept:
        if case.target[row] < TARGETS:
            expected[case.target[row]] += a[case.source[row]] @ c[case.index[row]]
    result = _matmul_add(*device(dtype, a, c), plan(case), jnp.asarray(case.source), jnp.asarray(case.target))
    same(result, np.asarray(*device(dtype, expected)).astype(expected.dtype), dtype)


@FEW
@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_gradients(case, dtype):
    a, c, gout = case.operands(dtype)
    grad_rows = np.zeros((case.shape.rows, case.shape.i, case.shape.j), a.dtype)
    grad_c = np.zeros_like(c)
    for row in case.kept:
        grad_rows[row] = gout[row] @ c[case.index[row]].T
        grad_c[case.index[row]] += a[case.source[row]].T @ gout[row]
    rows, matrices = _gradients(*device(dtype, gout, a, c), plan(case), jnp.asarray(case.source))
    same(rows, grad_rows, dtype)
    # The sum is formed in float32 and rounded once.
    same(matrices, np.asarray(*device(dtype, grad_c)).astype(c.dtype), dtype)


@FEW
@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_outer(case, dtype):
    a, c, gout = case.operands(dtype)
    expected = np.zeros_like(c)
    for row in case.kept:
        expected[case.index[row]] += a[case.source[row]].T @ gout[row]
    left, right = device(dtype, a, gout)
    result = _outer(left, right, plan(case), size=case.shape.groups, source_a=jnp.asarray(case.source))
    same(result, np.asarray(*device(dtype, expected)).astype(c.dtype), dtype)


def test_outer_takes_both_sides_through_maps():
    random = np.random.default_rng(0)
    a, b = random.integers(-3, 4, (4, 2, 3)), random.integers(-3, 4, (9, 2, 5))
    index, source_a, source_b = (random.integers(0, high, 50) for high in (4, 4, 9))
    expected = np.zeros((3, 3, 5))
    for row in np.flatnonzero(index < 3):
        expected[index[row]] += a[source_a[row]].T @ b[source_b[row]]
    groups = group_rows(jnp.asarray(index), 3)
    left, right = device("float32", a, b)
    result = grouped_outer(left, right, groups, 3, jnp.asarray(source_a), jnp.asarray(source_b))
    same(result, expected, "float32")


@pytest.mark.parametrize("rows_j", [3, 0])
def test_dropped_rows_are_zero_and_kept_ones_are_not(rows_j):
    a, c = jnp.ones((5, 1, rows_j)), jnp.ones((2, rows_j, 4))
    groups = group_rows(jnp.array([0, 2, 1, 2, 0]), 2)
    result = grouped_matmul(a, c, groups)
    np.testing.assert_array_equal(result[:, 0, 0], [rows_j, 0, rows_j, 0, rows_j])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_leaks_from_one_group_or_dropped_row_into_another(bad):
    # Rows 2 (group 1) and 3 (dropped) are poisoned; each tile of group 0 has lanes that lie over them.
    index = np.array([0, 0, 1, 2, 0, 1])
    a, gout = np.ones((6, 1, 2), np.float32), np.ones((6, 1, 3), np.float32)
    a[[2, 3]] = gout[[2, 3]] = bad
    c = np.ones((2, 2, 3), np.float32)
    groups = group_rows(jnp.asarray(index), 2)
    clean = [0, 1, 4]
    assert np.isfinite(grouped_matmul(a, c, groups)[jnp.array(clean)]).all()
    target = jnp.asarray(np.where(index == 0, 0, 1))
    assert np.isfinite(grouped_matmul(a, c, groups, None, target, 2)[0]).all()
    rows, matrices = grouped_gradients(jnp.asarray(gout), jnp.asarray(a), jnp.asarray(c), groups)
    assert np.isfinite(rows[jnp.array(clean)]).all()
    np.testing.assert_array_equal(rows[3], np.zeros((1, 2)))
    np.testing.assert_array_equal(matrices[0], np.full((2, 3), 3.0))
    np.testing.assert_array_equal(grouped_outer(a, gout, groups, 2)[0], np.full((2, 3), 3.0))


def test_half_precision_sums_in_float32():
    # In bfloat16 256 + 1 is 256: a running sum of ones would stop there.
    rows = 1000
    groups = group_rows(jnp.zeros(rows, jnp.int32), 1)
    ones, matrix = jnp.ones((rows, 1, 1), "bfloat16"), jnp.ones((1, 1, 1), "bfloat16")
    assert grouped_outer(ones, ones, groups, 1)[0, 0, 0] == 1000
    assert grouped_gradients(ones, ones, matrix, groups)[1][0, 0, 0] == 1000
    assert grouped_matmul(ones, matrix, groups, None, jnp.zeros(rows, jnp.int32), 1)[0, 0, 0] == 1000


def test_target_and_targets_go_together():
    a, c, groups = jnp.ones((2, 1, 1)), jnp.ones((1, 1, 1)), group_rows(jnp.zeros(2, jnp.int32), 1)
    with pytest.raises(ValueError, match="together"):
        grouped_matmul(a, c, groups, targets=3)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        a, c = jnp.ones((5, 1, 2), "float64") / 3, jnp.ones((2, 2, 2), "float64")
        groups = group_rows(jnp.array([0, 1, 0, 2, 1]), 2)
        result = grouped_matmul(a, c, groups)
        assert result.dtype == jnp.float64
        assert result[0, 0, 0] == np.float64(1) / 3 * 2
        rows, matrices = grouped_gradients(result, a, c, groups)
        assert rows.dtype == matrices.dtype == jnp.float64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize(
    "sizes",
    [
        (32768, 1, 16, 32, 32),
        (32768, 1, 512, 32, 32),
        (50, 5, 1, 16, 130),  # one tile
        (20000, 1, 64, 5, 64),
        (1000, 1, 1000, 128, 256),  # matrices that are larger than rows
    ],
    ids=str,
)
def test_temporaries_stay_under_the_bound(sizes, dtype):
    """And close to it: they do not grow as the rows do, but for a bfloat16 result, which is there as bits too."""
    n, i, g, j, k = sizes
    a, c, out = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((n, i, j), (g, j, k), (n, i, k)))
    index = jax.ShapeDtypeStruct((n,), jnp.int32)
    plan = jax.eval_shape(partial(group_rows, size=g), index)
    close = 0.8 if dtype == "float32" and jax_grouped.tiling(n, i, g, j, k).tiles > 1 else 0.4

    def used(run, *operands):
        return jax.jit(run).lower(*operands).compile(SIZES_ALONE).memory_analysis().temp_size_in_bytes

    for temporaries, bound in (
        (used(grouped_matmul, a, c, plan), jax_grouped.matmul_scratch_bytes(*sizes, dtype)),
        (
            used(lambda a, c, plan, to: grouped_matmul(a, c, plan, to, to, n // 3), a, c, plan, index),
            jax_grouped.matmul_scratch_bytes(*sizes, dtype, n // 3),
        ),
        (used(lambda a, b, p: grouped_outer(a, b, p, g), a, out, plan), jax_grouped.outer_scratch_bytes(*sizes, dtype)),
        (used(grouped_gradients, out, a, c, plan), jax_grouped.gradients_scratch_bytes(*sizes, dtype)),
    ):
        assert temporaries <= bound
        assert temporaries > close * bound
    assert used(partial(group_rows, size=g), index) <= jax_grouping.scratch_bytes(n, g)


def test_how_programs_are_compiled_moves_no_buffers():
    """Above and in other files temporaries are read where LLVM does not optimise."""
    for dtype in ("float32", "bfloat16"):
        a, c, out = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((900, 2, 8), (30, 8, 16), (900, 2, 16)))
        plan = jax.eval_shape(partial(group_rows, size=30), jax.ShapeDtypeStruct((900,), jnp.int32))
        lowered = jax.jit(grouped_gradients).lower(out, a, c, plan)
        sizes = {lowered.compile(how).memory_analysis().temp_size_in_bytes for how in (None, SIZES_ALONE)}
        assert len(sizes) == 1
        assert min(sizes) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_are_no_float32_as_a_whole(dtype):
    """XLA's own take of bfloat16 rows makes all of them float32 on a CPU, and its scatter does in every step."""
    n, i, g, j, k = sizes = 100_000, 1, 1000, 16, 16
    a, c = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((n, i, j), (g, j, k)))
    plan = jax.eval_shape(partial(group_rows, size=g), jax.ShapeDtypeStruct((n,), jnp.int32))
    used = jax.jit(grouped_matmul).lower(a, c, plan).compile().memory_analysis().temp_size_in_bytes
    assert used < 2 * n * i * k + jax_grouped.matmul_scratch_bytes(*sizes, "float32")
