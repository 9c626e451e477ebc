"""Pallas kernels for TPUs and for Hopper GPUs: in JAX's simulations of these, and lowered for what is not here."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
import types
from unittest import mock

import numpy as np
import pytest
from conftest import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from grouped_laws import GPU_SHAPES, TPU_SHAPES, Kernels, Problem, hold, pallas, problems  # noqa: E402
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from jax_fast import FAST  # noqa: E402

import planner  # noqa: E402
from planner.backends.jax import backend as jax_backend  # noqa: E402
from planner.backends.jax import evaluation as jax_evaluation  # noqa: E402
from planner.cost.device import CPU, TPU_V5E  # noqa: E402
from planner.kernels.grouped_matmul import pallas_gpu, pallas_tiles, pallas_tpu  # noqa: E402
from planner.kernels.grouping.jax_grouping import group_rows  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402

SPEC = "nij, q[n]jk -> nik"
NAMES = "planner_grouped_matmul", "planner_grouped_outer"
# Rows, I, J, K and groups of programs that are lowered: the seed, edges, experts, tiles, one of each.
EXPORTED = [
    (131_072, 1, 64, 64, 2048), (90, 2, 5, 7, 3), (4096, 1, 2048, 2000, 16), (50, 64, 96, 128, 7),
    (33, 3, 700, 130, 4), (1, 1, 1, 1, 1), (60, 1, 1, 40, 3), (60, 1, 40, 1, 3), (600, 512, 640, 128, 9),
]  # fmt: skip


PLATFORMS = {"tpu": pallas_tpu.KERNELS, "cuda": pallas_gpu.KERNELS}


@pytest.fixture
def absl():
    """What JAX needs to lower for GPUs."""
    pytest.importorskip("absl", reason="absl-py is not installed, which JAX needs to lower for GPUs")


@pytest.fixture(params=PLATFORMS)
def platform(request):
    if request.param == "cuda":
        request.getfixturevalue("absl")
    return request.param


# -- simulated -------------------------------------------------------------------------------------------


def simulated(platform):
    """The kernels where what is read out of bounds is an error, what nothing wrote is NaN, and races are told."""
    how = {"out_of_bounds_reads": "raise", "uninitialized_memory": "nan", "detect_races": True}
    if platform == "cuda":
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        opened = functools.partial(pallas, platform="gpu", how=InterpretGPUParams(**how))
        return Kernels("cuda", ("jax",), problems(st.sampled_from(GPU_SHAPES)), (12, 400), opened)
    shapes = [x for x in TPU_SHAPES if x[0] in (20, 50)] if examples(1, 0) else TPU_SHAPES
    opened = functools.partial(pallas, how=pltpu.InterpretParams(**how, skip_floating_point_ops=False))
    return Kernels("tpu", ("jax",), problems(st.sampled_from(shapes)), (20, 400), opened)


def test_on_a_simulated_device_nothing_is_read_out_of_bounds_and_nothing_races(platform):
    kernels, begin = simulated(platform), RaceDetectionState.__init__

    @settings(max_examples=examples(*kernels.examples))
    @example(Problem(*GPU_SHAPES[1], skew="all dropped"))
    @given(kernels.problems)
    def law(problem):
        with mock.patch.object(RaceDetectionState, "__init__", autospec=True, side_effect=begin) as made:
            hold(kernels, problem)
        states = [call.args[0] for call in made.call_args_list]
        empty = 0 in dataclasses.astuple(problem)[:6]
        assert len(states) == (0 if empty else 5)  # three products and two sums
        assert not any(state.races_found for state in states)

    law()


ORDERS = ("tile", "row", "column"), ("column", "row", "tile")


def test_programs_that_run_at_a_time_read_the_same_rows_on_a_gpu():
    """Programs are started by their number. If the tile changed the fastest, each column would read all rows again."""

    def places(number):
        with mock.patch.object(jax.lax, "axis_index", return_value=jnp.int32(number)):
            return [int(x) for x in pallas_gpu._place({"tile": 3, "row": 2, "column": 4})]

    assert [places(number) for number in range(24)] == np.argwhere(np.ones((3, 2, 4))).tolist()


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_both_orders_of_programs_multiply_and_are_lowered(absl, monkeypatch, order):
    """In blocks of several rows, columns and tiles."""
    monkeypatch.setattr(pallas_gpu, "GRID", order)
    hold(simulated("cuda"), Problem(150, 150, 2, 1, 20, 130, "bfloat16"))

    def run(a, c, q):
        return pallas_gpu.KERNELS.grouped_matmul(a, c, group_rows(q, 3))

    assert NAMES[0] in exported(run, *arrays(400, 1, 200, 300, 3, "bfloat16"), platforms=["cuda"])


def test_products_are_not_rounded_before_they_are_added_on_a_gpu(absl):
    """On a TPU they are held to it beside the other kernels."""
    a, c = jnp.array([[[16.0, 1.0]], [[-16.0, 0.0]]], "bfloat16"), jnp.array([[[16.0], [1.0]]], "bfloat16")
    zeros = jnp.zeros(2, "int32")
    with simulated("cuda").open(None) as kernels:
        assert kernels.grouped_matmul(a, c, group_rows(zeros, 1), None, zeros, 1) == 1


@functools.partial(jax.jit, static_argnums=(1, 2, 3), compiler_options=FAST)
def tiles_of(q, size, each, empty):
    return pallas_tiles.cut(group_rows(q, size), each, empty)


@settings(max_examples=examples(15, 1000))
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


# -- lowered ---------------------------------------------------------------------------------------------


def exported(function, *shapes, platforms):
    stand_ins = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return jax.export.export(jax.jit(function), platforms=platforms)(*stand_ins).mlir_module()


def arrays(n, i, j, k, groups, dtype="float32"):
    """Rows, matrices and indices to lower for."""
    return ((n, i, j), dtype), ((groups, j, k), dtype), ((n,), "int32")


def largest_tensor(module):
    """Elements of the largest array in an exported module."""
    return max(math.prod(map(int, dims.rstrip("x").split("x"))) for dims in re.findall(r"tensor<((?:\d+x)+)", module))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("shape", EXPORTED)
def test_programs_hold_the_kernels_and_no_gathered_matrices(shape, number, platform):
    (n, i, j, k, groups), kernels = shape, PLATFORMS[platform]

    def run(a, c, q):
        index = group_rows(q, groups)
        return kernels.grouped_gradients(kernels.grouped_matmul(a, c, index), a, c, index)

    module = exported(run, *arrays(*shape, kernels.shape.dtypes[number]), platforms=[platform])
    assert all(name in module for name in NAMES)
    assert f"tensor<{n}x{j}x{k}x" not in module or n == groups or i == j
    # In any other shape neither, where c[q] is larger than all rows in full tiles, one of each group not full.
    if n * j * k > (n + kernels.shape.most * groups) * i * (j + k):
        assert largest_tensor(module) < n * j * k


@pytest.mark.parametrize("dtype", pallas_tiles.GPU.dtypes)
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("j", "k"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_every_block_is_lowered_for_a_card(absl, rows, j, k, dtype):
    """Products as they are and transposed, results in float32, outer products, in all blocks that there can be."""
    kernels = pallas_gpu.KERNELS

    def run(a, c, q):
        index = group_rows(q, 3)
        out = kernels.grouped_matmul(a, c, index)
        return kernels.grouped_gradients(out, a, c, index), kernels.grouped_matmul(a, c, index, None, q, 3)

    module = exported(run, *arrays(3 * rows, 1, j, k, 3, dtype), platforms=["cuda"])
    assert all(name in module for name in NAMES)


@pytest.mark.parametrize("dtype", pallas_tiles.TPU.dtypes)
def test_every_tile_is_lowered_for_a_tpu(dtype):
    """Products with matrices and with their transposes, and outer products, of tiles of every height there can be."""
    heights = range(pallas_tiles.TPU.unit // jnp.dtype(dtype).itemsize, pallas_tiles.TPU.limit + 1)
    heights = [m for m in heights if m % heights[0] == 0]

    def run(x, c, group):
        found = []
        for m in heights:
            found.append(pallas_tpu.matrices_product(jnp.full((3, m, 5), x), c, group, group))
            found.append(pallas_tpu.matrices_product(found[-1], c, group, group, transposes=True))
            tiles = pallas_tiles.RowTiles(group, group, group, group)
            found.append(pallas_tpu.matrices_outer(found[-1], found[-2], tiles))
        return found

    module = exported(run, ((), dtype), ((2, 5, 7), dtype), ((3,), "int32"), platforms=["tpu"])
    for name, each in zip(NAMES, (2, 1), strict=True):
        assert module.count(f'kernel_name = "{name}"') == each * len(heights)


def product_for_a_tpu(n, i, j, k, groups, dtype):
    def run(a, c, q):
        return pallas_tpu.KERNELS.grouped_matmul(a, c, group_rows(q, groups))

    return exported(run, *arrays(n, i, j, k, groups, dtype), platforms=["tpu"])


@pytest.mark.parametrize("precision", ["high", "tensorfloat32", "highest", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", pallas_tiles.TPU.dtypes)
def test_every_precision_is_lowered_for_a_tpu(precision, dtype):
    with jax.default_matmul_precision(precision):
        assert NAMES[0] in product_for_a_tpu(64, 1, 128, 128, 4, dtype)


@pytest.mark.parametrize(
    "shape", [(64, 2048, 512, 512, 4), (600, 257, 64, 64, 4), (100_000, 1, 16, 16, 200_000), (0, 1, 8, 8, 3)]
)
def test_what_a_tpu_has_no_memory_for_stays_with_stock_xla(shape):
    """Tiles of many rows, and more groups than scalar memory holds."""
    assert NAMES[0] not in product_for_a_tpu(*shape, "float32")


# -- in plans --------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    """Programs are compiled for a card of capability 9.0."""
    monkeypatch.setattr(jax_evaluation, "hopper", lambda: True)
    jax.clear_caches()
    yield
    jax.clear_caches()


def lowered_gradients(platforms, dtype):
    def gradients(a, c, q):
        def loss(a, c):
            return planner.contract(SPEC, a, c, q=q, minimize="peak").astype("float32").sum()

        return jax.grad(loss, argnums=(0, 1))(a, c)

    return exported(gradients, *arrays(4096, 1, 64, 64, 64, dtype), platforms=platforms)


@pytest.mark.parametrize(("platforms", "dtype", "on_card"), [
    (["cuda"], "bfloat16", True), (["cuda"], "float16", True), (["cuda"], "float32", False),
    (["tpu"], "float32", False), (["cpu"], "bfloat16", False), (["cpu", "tpu"], "float32", False),
    (["cpu", "cuda", "tpu"], "bfloat16", True),
])  # fmt: skip
def test_the_platform_is_chosen_when_a_program_is_lowered(request, hopper, platforms, dtype, on_card):
    if "cuda" in platforms:
        request.getfixturevalue("absl")
    module = lowered_gradients(platforms, dtype)
    assert ("mosaic_gpu" in module) == on_card
    assert ("tpu_custom_call" in module) == ("tpu" in platforms)
    assert (NAMES[1] in module) == (on_card or "tpu" in platforms)
    assert "tensor<4096x64x64x" not in module


def test_where_no_card_is_visible_programs_run_on_any(absl):
    assert "mosaic_gpu" not in lowered_gradients(["cuda"], "bfloat16")


@pytest.mark.parametrize(("capability", "installed", "found"), [("9.0", True, 90), ("9.0", False, 0), ("8.0", True, 0)])
def test_kernels_are_priced_where_they_run(monkeypatch, capability, installed, found):
    cards = [types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability=capability)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: cards)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: installed or None)
    assert jax_backend.backend.device(()).capability == found


def grouped_cost(a, c, n, device):
    op = Einsum(planner.resolve(SPEC, a, c, q=planner.Operand((n,), "int32")), "float32")
    return next(x.cost for x in jax_evaluation.TABLE.choices(op, device) if x.lowering == "grouped matmul")


def test_plans_for_a_tpu_count_what_is_moved_into_tiles():
    rows = 4096 + 63 * pallas_tiles.TPU.rows(4096, 1, 64, 4)
    assert grouped_cost((4096, 1, 64), (64, 64, 64), 4096, TPU_V5E).scratch_bytes >= 2 * rows * 64 * 4


@pytest.mark.parametrize(("i", "kernels"), [(512, True), (2048, False)])
def test_what_the_kernels_refuse_is_priced_as_the_loops_that_run(i, kernels):
    on_tpu, on_cpu = (grouped_cost((64, i, 64), (4, 64, 64), 64, device) for device in (TPU_V5E, CPU))
    assert (on_tpu.scratch_bytes == on_cpu.scratch_bytes) != kernels
