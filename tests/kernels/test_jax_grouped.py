"""What only the grouped kernels in stock XLA do: packed keys, temporaries of bounded size."""

from functools import partial

import numpy as np
import pytest
from grouped_laws import JAX_SHAPES, KERNELS, Problem, hold

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax_fast import SIZES_ALONE  # noqa: E402

from planner.kernels.grouped_matmul import jax_grouped  # noqa: E402
from planner.kernels.grouped_matmul.jax_grouped import grouped_gradients, grouped_matmul, grouped_outer  # noqa: E402
from planner.kernels.grouping import jax_grouping  # noqa: E402
from planner.kernels.grouping.jax_grouping import group_rows  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "complex64"])
def test_as_users_compile_them_they_equal_a_loop_over_rows_too(dtype):
    """In `test_grouped.py` programs are compiled in a hurry."""
    (kernels,) = (kernels for kernels in KERNELS if kernels.name == "JAX")
    hold(kernels, Problem(*JAX_SHAPES[1], dtype, "half in one"), jit=jax.jit)


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


def used(run, *operands):
    """Bytes of the temporaries of a compiled call."""
    return jax.jit(run).lower(*operands).compile(SIZES_ALONE).memory_analysis().temp_size_in_bytes


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


@pytest.mark.parametrize(("n", "g"), [(32768, 16), (32768, 512), (50, 1), (20000, 64), (1000, 1000)])
def test_sorting_stays_under_its_bound(n, g):
    assert used(partial(group_rows, size=g), jax.ShapeDtypeStruct((n,), jnp.int32)) <= jax_grouping.scratch_bytes(n, g)


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
