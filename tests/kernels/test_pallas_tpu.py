"""Pallas kernels for TPUs, interpreted on the CPU, and lowered for a TPU that is not here."""

import contextlib
import functools

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import pallas_laws  # noqa: E402
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

import planner  # noqa: E402
from planner.backends.jax import evaluation as jax_evaluation  # noqa: E402
from planner.cost.device import CPU, TPU_V5E  # noqa: E402
from planner.kernels.grouped_matmul import pallas_tiles, pallas_tpu  # noqa: E402
from planner.kernels.grouping.jax_grouping import group_rows  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402

KERNELS = pallas_tpu.KERNELS
SPEC = "nij, q[n]jk -> nik"
# Rows, I, J, K, groups and dtype: one of each, sizes that no tile divides, matrices of several blocks, rows that are
# tiles, none, more groups than rows.
SHAPES = [
    (1, 1, 1, 1, 1, "float32"), (0, 1, 4, 4, 3, "float32"), (50, 1, 5, 7, 3, "bfloat16"), (90, 2, 16, 33, 6, "float32"),
    (40, 3, 8, 8, 9, "bfloat16"), (130, 1, 300, 200, 2, "float32"), (20, 1, 140, 130, 4, "bfloat16"),
    (9, 32, 16, 24, 3, "float32"), (9, 64, 20, 130, 3, "bfloat16"), (6, 1, 0, 3, 2, "float32"),
    (5, 1, 8, 8, 40, "float32"),
]  # fmt: skip
# What is read out of bounds is an error, what nothing wrote is NaN, and accesses that race are told.
SIMULATION = pltpu.InterpretParams(
    out_of_bounds_reads="raise", uninitialized_memory="nan", detect_races=True, skip_floating_point_ops=False
)


@contextlib.contextmanager
def interpreted(how):
    """The kernels in an interpreter, with small blocks."""
    before = pallas_tpu.INTERPRET, pallas_tpu._SIDE
    pallas_tpu.INTERPRET, pallas_tpu._SIDE = how, 128
    try:
        yield KERNELS
    finally:
        pallas_tpu.INTERPRET, pallas_tpu._SIDE = before


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def tiles_of(q, size, each, empty):
    return pallas_tiles.cut(group_rows(q, size), each, empty)


@settings(max_examples=examples(50, 1000))
@given(st.integers(0, 2**30), st.sampled_from([0, 1, 7, 40]), st.sampled_from([1, 9]), st.sampled_from([1, 4]),
       st.booleans())  # fmt: skip
def test_tiles_hold_each_row_once_and_are_as_many_as_foretold(seed, n, size, each, empty):
    q = np.random.default_rng(seed).integers(0, size + 1, n)
    group, live, slot, starts = map(np.asarray, tiles_of(q, size, each, empty))
    assert sorted(slot[slot < n]) == list(np.flatnonzero(q < size))
    assert all(q[row] == group[tile] for tile, rows in enumerate(slot) for row in rows if row < n)
    assert set(group[live == 1]) == (set(range(size)) if empty else set(q[q < size]))
    assert list(starts) == [int(np.sum(group[live == 1] < x)) for x in range(size + 1)]
    counts = [int(np.sum(q == x)) for x in range(size)]
    assert live.sum() == sum(max(int(empty), -(-x // each)) for x in counts)
    # The most there can be are there where one group has all rows, or all that are more than one of each group.
    worst = np.zeros(n, int) if empty else np.where(np.arange(n) < size, np.arange(n), 0)
    assert np.all(tiles_of(worst, size, each, empty).live == 1)
    assert len(live) == pallas_tiles.most_tiles(n, each, size, empty)


PLAIN, SIMULATED = functools.partial(interpreted, True), functools.partial(interpreted, SIMULATION)


@settings(max_examples=examples(200, 2000))
@given(shape=st.sampled_from(SHAPES), **pallas_laws.PROBLEM)
def test_kernels_equal_a_loop_over_rows(shape, seed, kind):
    pallas_laws.hold(PLAIN, seed, shape, kind)


@settings(max_examples=examples(20, 400))
@given(
    shape=st.sampled_from([x for x in SHAPES if x[0] in (20, 50)] if examples(1, 0) else SHAPES), **pallas_laws.PROBLEM
)
def test_on_a_simulated_tpu_nothing_is_read_out_of_bounds_and_nothing_races(shape, seed, kind):
    with pallas_laws.recorded_races(interpret_pallas_call) as states:
        pallas_laws.hold(SIMULATED, seed, shape, kind)
    assert len(states) == 5  # three products and two sums
    assert not any(state.races_found for state in states)


def test_products_are_not_rounded_before_they_are_added():
    a, c = jnp.array([[[16.0, 1.0]], [[-16.0, 0.0]]], "bfloat16"), jnp.array([[[16.0], [1.0]]], "bfloat16")
    zeros = jnp.zeros(2, "int32")
    with PLAIN():
        assert KERNELS.grouped_matmul(a, c, group_rows(zeros, 1), None, zeros, 1) == 1


# -- lowered for a TPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", pallas_laws.EXPORTED)
def test_programs_for_a_tpu_hold_the_kernels_and_no_gathered_matrices(shape, dtype):
    n, i, j, k, groups = shape
    a, c = jax.ShapeDtypeStruct((n, i, j), dtype), jax.ShapeDtypeStruct((groups, j, k), dtype)
    q = jax.ShapeDtypeStruct((n,), "int32")

    def run(a, c, q):
        index = group_rows(q, groups)
        return KERNELS.grouped_gradients(KERNELS.grouped_matmul(a, c, index), a, c, index)

    exported = jax.export.export(jax.jit(run), platforms=["tpu"])(a, c, q).mlir_module()
    assert all(name in exported for name in ("planner_grouped_matmul", "planner_grouped_outer"))
    assert f"tensor<{n}x{j}x{k}x" not in exported or n == groups or i == j
    # In any other shape neither, where c[q] is larger than all rows in tiles of 256, one of each group not full.
    if n * j * k > (n + 256 * groups) * i * (j + k):
        assert pallas_laws.largest_tensor(exported) < n * j * k


@pytest.mark.parametrize("dtype", pallas_tiles.TPU.dtypes)
def test_every_tile_is_lowered(dtype):
    """Products with matrices and with their transposes, and outer products, of tiles of every height there can be."""
    heights = range(pallas_tiles.TPU.unit // jnp.dtype(dtype).itemsize, pallas_tiles.TPU.limit + 1)
    heights = [m for m in heights if m % heights[0] == 0]

    def run(x, c, group):
        found = []
        for m in heights:
            found.append(pallas_tpu.matrices_product(jnp.full((3, m, 5), x), c, group, group))
            found.append(pallas_tpu.matrices_product(found[-1], c, group, group, transposes=True))
            tiles = pallas_tiles.Tiles(group, group, group, group)
            found.append(pallas_tpu.matrices_outer(found[-1], found[-2], tiles))
        return found

    shapes = ((), dtype), ((2, 5, 7), dtype), ((3,), "int32")
    exported = jax.export.export(jax.jit(run), platforms=["tpu"])(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    for name, each in (("planner_grouped_matmul", 2), ("planner_grouped_outer", 1)):
        assert exported.mlir_module().count(f'kernel_name = "{name}"') == each * len(heights)


@pytest.mark.parametrize("precision", ["high", "tensorfloat32", "highest", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_precision_is_lowered(precision, dtype):
    a, c = jax.ShapeDtypeStruct((64, 1, 128), dtype), jax.ShapeDtypeStruct((4, 128, 128), dtype)
    run = jax.jit(lambda a, c, q: KERNELS.grouped_matmul(a, c, group_rows(q, 4)))
    with jax.default_matmul_precision(precision):
        exported = jax.export.export(run, platforms=["tpu"])(a, c, jax.ShapeDtypeStruct((64,), "int32")).mlir_module()
    assert "planner_grouped_matmul" in exported


@pytest.mark.parametrize(
    "shape", [(64, 2048, 512, 512, 4), (600, 257, 64, 64, 4), (100_000, 1, 16, 16, 200_000), (0, 1, 8, 8, 3)]
)
def test_what_a_tpu_has_no_memory_for_stays_with_stock_xla(shape):
    """Tiles of many rows, and more groups than scalar memory holds."""
    n, i, j, k, groups = shape
    a, c = jax.ShapeDtypeStruct((n, i, j), "float32"), jax.ShapeDtypeStruct((groups, j, k), "float32")
    run = jax.jit(lambda a, c, q: KERNELS.grouped_matmul(a, c, group_rows(q, groups)))
    exported = jax.export.export(run, platforms=["tpu"])(a, c, jax.ShapeDtypeStruct((n,), "int32")).mlir_module()
    assert "planner_grouped_matmul" not in exported


def test_the_platform_is_chosen_when_a_program_is_lowered():
    a, c, q = (
        jax.ShapeDtypeStruct(*x) for x in (((4096, 1, 64), "float32"), ((64, 64, 64), "float32"), ((4096,), "int32"))
    )

    def loss(a, c, q):
        return planner.contract(SPEC, a, c, q=q, minimize="peak").sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for platforms, kernels in ((["tpu"], True), (["cpu"], False), (["cpu", "tpu"], True)):
        exported = jax.export.export(gradients, platforms=platforms)(a, c, q).mlir_module()
        assert ("planner_grouped_outer" in exported) == kernels
        assert "tensor<4096x64x64x" not in exported


def test_plans_for_a_tpu_count_what_is_moved_into_tiles():
    operands = planner.Operand((4096, 1, 64)), planner.Operand((64, 64, 64))
    op = planner.plan(SPEC, *operands, q=(4096,), backend="jax", device="tpu v5e").steps[-1].op
    costs = {x.lowering: x.cost for x in jax_evaluation.TABLE.choices(op, TPU_V5E)}
    rows = 4096 + 63 * pallas_tiles.TPU.rows(4096, 1, 64, 4)
    assert costs["grouped matmul"].scratch_bytes >= 2 * rows * 64 * 4


@pytest.mark.parametrize(("i", "kernels"), [(512, True), (2048, False)])
def test_what_the_kernels_refuse_is_priced_as_the_loops_that_run(i, kernels):
    operands = planner.Operand((64, i, 64)), planner.Operand((4, 64, 64))
    op = Einsum(planner.resolve(SPEC, *operands, q=planner.Operand((64,), "int32")), "float32")
    tpu, cpu = (
        next(x.cost for x in jax_evaluation.TABLE.choices(op, device) if x.lowering == "grouped matmul")
        for device in (TPU_V5E, CPU)
    )
    assert (tpu.scratch_bytes == cpu.scratch_bytes) != kernels


def test_how_many_rows_a_tile_has():
    """About those of a group and two standard deviations more, in whole registers, of at most 256 rows."""
    tile = pallas_tiles.TPU
    assert tile.rows(1000, 1, 10, 4) == 120
    assert tile.rows(1000, 1, 10, 2) == 112  # registers of 16 bits hold 16 rows
    assert tile.rows(10**6, 1, 10, 4) == 256
    assert tile.rows(10**6, 12, 10, 4) == 20  # 12 rows each: two of them fill registers, 256 hold 21
    assert tile.rows(3, 1, 10, 4) == 8
    assert tile.rows(9, 1, 0, 4) == 8


def test_which_matrices_of_one_row_are_tiles():
    tile = pallas_tiles.TPU
    assert [tile.is_tile(10, inner, 4) for inner in (8, 24, 32, 36, 40)] == [False, False, True, False, True]
    assert not tile.is_tile(10, 32, 2)
    assert tile.is_tile(2**16, 32, 4)
    assert not tile.is_tile(2**16 + 1, 32, 4)
