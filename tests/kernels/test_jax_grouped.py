"""What only the grouped kernels in stock XLA do: packed keys, and temporaries that are not what XLA alone makes."""

from functools import partial

import numpy as np
import pytest
from grouped_laws import JAX_SHAPES, KERNELS, Problem, hold, xla_temporaries

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import jax_fast  # noqa: E402

from planner.kernels.grouped_matmul import jax_grouped, jax_tilings  # noqa: E402
from planner.kernels.grouped_matmul.jax_grouped import grouped_gradients, grouped_matmul  # noqa: E402
from planner.kernels.grouping import jax_grouping  # noqa: E402
from planner.kernels.grouping.jax_grouping import group_rows  # noqa: E402

(STOCK,) = (kernels for kernels in KERNELS if kernels.name == "JAX")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "complex64"])
def test_as_users_compile_them_they_equal_a_loop_over_rows_too(dtype):
    """In `test_grouped.py` programs are compiled in a hurry."""
    hold(STOCK, Problem(*JAX_SHAPES[1], dtype, "half in one"), jit=partial(jax_fast.jit, options=jax_fast.AS_USERS))


def test_a_key_is_packed_while_it_fits_32_bits():
    assert jax_grouping.fits_packed(2**17, 2**15 - 1)
    assert not jax_grouping.fits_packed(2**17 + 1, 2**15 - 1)
    assert not jax_grouping.fits_packed(2**17, 2**15)


def test_an_index_that_is_not_flat_is_refused():
    with pytest.raises(ValueError, match=r"flat.*\(2, 2\)"):
        group_rows(jnp.zeros((2, 2), jnp.int32), 3)


def test_target_and_targets_go_together():
    a, c, groups = jnp.ones((2, 1, 1)), jnp.ones((1, 1, 1)), group_rows(jnp.zeros(2, jnp.int32), 1)
    with pytest.raises(ValueError, match="together"):
        grouped_matmul(a, c, groups, targets=3)


def test_float64_stays_float64():
    """Of numbers that float32 does not hold."""
    problem = Problem(*JAX_SHAPES[1], "float64")
    (a, *operands), index = problem.arrays()
    with jax.enable_x64(True):
        hold(STOCK, problem, ([a * (2**30 + 1), *operands], index))


def stand_ins(n, i, g, j, k, dtype):
    """Rows, matrices, a gradient and groups."""
    a, c, out = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((n, i, j), (g, j, k), (n, i, k)))
    return a, c, out, jax.eval_shape(partial(group_rows, size=g), jax.ShapeDtypeStruct((n,), jnp.int32))


def test_turned_matrices_are_not_transposed_as_a_whole():
    """XLA does it before a loop that reads them in another order."""
    n, i, g, j, k = 64, 1, 1000, 32, 64
    a, c, out, groups = stand_ins(n, i, g, j, k, "float32")
    turned = jax.ShapeDtypeStruct((g, k, j), "float32")
    for run, given in ((grouped_matmul, (a,)), (grouped_gradients, (out, a))):
        straight, transposed, used = (
            xla_temporaries(run, *given, c, groups),
            xla_temporaries(lambda *x, run=run: run(*x[:-2], x[-2].swapaxes(1, 2), x[-1]), *given, turned, groups),
            xla_temporaries(partial(run, turned=True), *given, turned, groups),
        )
        assert used <= straight * 1.1 < 4 * g * j * k < transposed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_how_programs_are_compiled_moves_no_buffers(dtype):
    """In other tests temporaries are read where LLVM does not optimise."""
    a, c, out, groups = stand_ins(900, 2, 30, 8, 16, dtype)
    quick, slow = (xla_temporaries(grouped_gradients, out, a, c, groups, hurries=how) for how in (True, False))
    assert quick == slow > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_are_no_float32_as_a_whole(dtype):
    """XLA's own take of bfloat16 rows makes all of them float32 on a CPU, and its scatter does in every step."""
    n, i, g, j, k = sizes = 100_000, 1, 1000, 16, 16
    a, c, _, groups = stand_ins(*sizes, dtype)
    used = xla_temporaries(grouped_matmul, a, c, groups, hurries=False)
    assert used < 2 * n * i * k + jax_grouped.scratch_bytes("matmul", sizes, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_the_same_whether_rows_are_scattered_or_stored_tile_by_tile(dtype, monkeypatch):
    """Rows that are dropped give zeros. Only larger results are scattered row by row, in the loop."""
    random, found = np.random.default_rng(0), []
    arrays = [random.integers(-2, 3, shape) for shape in ((90, 2, 3), (5, 3, 4), (90, 2, 4))]
    a, c, gradient = (jnp.asarray(x, dtype) for x in arrays)
    index = jnp.asarray(random.integers(0, 6, 90), jnp.int32)

    for most in (jax_tilings.LANE_BYTES, 0):
        monkeypatch.setattr(jax_tilings, "LANE_BYTES", most)

        def run(a, c, gradient, index):
            groups = group_rows(index, 5)
            return grouped_matmul(a, c, groups), *grouped_gradients(gradient, a, c, groups)

        lowered = jax_fast.jit(run).lower(a, c, gradient, index)
        scatters = lowered.as_text().count("}) : (tensor<90x2x")
        found.append((scatters, lowered.compile()(a, c, gradient, index)))
    (none, stored), (two, scattered) = found
    assert (none, two) == (0, 2)
    for one, other in zip(stored, scattered, strict=True):
        assert one.dtype == other.dtype == dtype
        assert one.any()
        np.testing.assert_array_equal(one, other)
    for rows in stored[:2]:
        assert not rows[index == 5].any()


def test_rows_of_a_step_on_a_card_are_distinct():
    """XLA is told so, and scatters them without atomics: lanes without a row have numbers of their own."""
    groups, tiles = group_rows(jnp.array([1, 0, 2, 1, 0, 3]), 3), jax_tilings.Tiling(4, 2, 3, on_card=True)
    cut = jax_grouped._make_tiles(groups, tiles)
    steps = [jax_grouped._step_rows(cut, groups.order, jnp.int32(step), tiles)[1].tolist() for step in range(2)]
    assert all(len({*rows}) == len(rows) == 8 for rows in steps)
    assert sorted(row for rows in steps for row in rows if row < 6) == [0, 1, 2, 3, 4]
