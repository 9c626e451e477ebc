"""Pallas kernels for Hopper GPUs, in JAX's simulation of one, and lowered for a card that is not here."""

import contextlib
import importlib.util
import types

import pytest
from conftest import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("absl", reason="absl-py is not installed, which JAX needs to lower for GPUs")

import jax.numpy as jnp  # noqa: E402
import pallas_laws  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # noqa: E402

import planner  # noqa: E402
from planner.backends.jax import backend as jax_backend  # noqa: E402
from planner.backends.jax import evaluation as jax_evaluation  # noqa: E402
from planner.kernels.grouped_matmul import pallas_gpu  # noqa: E402
from planner.kernels.grouping.jax_grouping import group_rows  # noqa: E402

KERNELS = pallas_gpu.KERNELS
SPEC = "nij, q[n]jk -> nik"
# What is read out of bounds is an error, what nothing wrote is NaN, and accesses that race are told.
SIMULATION = InterpretGPUParams(out_of_bounds_reads="raise", uninitialized_memory="nan", detect_races=True)
# Rows, I, J, K, groups and dtype: sizes that no block divides, several blocks of rows, columns and terms, rows that are
# tiles, none, one of each.
SHAPES = [
    (50, 1, 5, 7, 3, "bfloat16"), (20, 3, 16, 70, 4, "float16"), (150, 1, 130, 20, 1, "bfloat16"),
    (2, 256, 20, 64, 2, "float16"), (0, 1, 4, 4, 3, "float16"), (6, 1, 0, 3, 2, "bfloat16"),
    (1, 1, 1, 1, 1, "bfloat16"),
]  # fmt: skip


@contextlib.contextmanager
def simulated():
    """The kernels on a simulated card."""
    pallas_gpu.INTERPRET = SIMULATION
    try:
        yield KERNELS
    finally:
        pallas_gpu.INTERPRET = None


@settings(max_examples=examples(12, 400))
@example(shape=SHAPES[3], seed=0, kind="dropped")
@given(shape=st.sampled_from(SHAPES), **pallas_laws.PROBLEM)
def test_kernels_equal_a_loop_over_rows_and_nothing_races(shape, seed, kind):
    with pallas_laws.recorded_races(gpu_callbacks) as states:
        pallas_laws.hold(simulated, seed, shape, kind)
    assert len(states) == (0 if 0 in shape[:5] else 5)  # three products and two sums
    assert not any(state.races_found for state in states)


def test_products_are_not_rounded_before_they_are_added():
    a, c = jnp.array([[[16.0, 1.0]], [[-16.0, 0.0]]], "bfloat16"), jnp.array([[[16.0], [1.0]]], "bfloat16")
    zeros = jnp.zeros(2, "int32")
    with simulated():
        assert KERNELS.grouped_matmul(a, c, group_rows(zeros, 1), None, zeros, 1) == 1


# -- lowered for a card ----------------------------------------------------------------------------------


def exported(function, *shapes, platforms=("cuda",)):
    stand_ins = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return jax.export.export(jax.jit(function), platforms=platforms)(*stand_ins).mlir_module()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("j", "k"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_every_block_is_lowered(rows, j, k, dtype):
    """Products as they are and transposed, results in float32, outer products, in all blocks that there can be."""

    def run(a, c, q):
        index = group_rows(q, 3)
        out = KERNELS.grouped_matmul(a, c, index)
        return KERNELS.grouped_gradients(out, a, c, index), KERNELS.grouped_matmul(a, c, index, None, q, 3)

    module = exported(run, ((3 * rows, 1, j), dtype), ((3, j, k), dtype), ((3 * rows,), "int32"))
    assert all(name in module for name in ("planner_grouped_matmul", "planner_grouped_outer"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", pallas_laws.EXPORTED)
def test_programs_for_a_card_hold_the_kernels_and_no_gathered_matrices(shape, dtype):
    n, i, j, k, groups = shape

    def run(a, c, q):
        index = group_rows(q, groups)
        return KERNELS.grouped_gradients(KERNELS.grouped_matmul(a, c, index), a, c, index)

    module = exported(run, ((n, i, j), dtype), ((groups, j, k), dtype), ((n,), "int32"))
    assert all(name in module for name in ("planner_grouped_matmul", "planner_grouped_outer"))
    assert f"tensor<{n}x{j}x{k}x" not in module or n == groups or i == j
    # In any other shape neither, where c[q] is larger than all rows in tiles of 128, one of each group not full.
    if n * j * k > (n + 128 * groups) * i * (j + k):
        assert pallas_laws.largest_tensor(module) < n * j * k


@pytest.fixture
def hopper(monkeypatch):
    """Programs are compiled for a card of capability 9.0."""
    monkeypatch.setattr(jax_evaluation, "hopper", lambda: True)
    jax.clear_caches()
    jax_evaluation.platform_table.cache_clear()
    yield
    jax.clear_caches()
    jax_evaluation.platform_table.cache_clear()


def gradients(a, c, q):
    def loss(a, c):
        return planner.contract(SPEC, a, c, q=q, minimize="peak").astype("float32").sum()

    return jax.grad(loss, argnums=(0, 1))(a, c)


def problem(dtype):
    return ((4096, 1, 64), dtype), ((64, 64, 64), dtype), ((4096,), "int32")


@pytest.mark.parametrize(("platforms", "dtype", "kernels"), [
    (["cuda"], "bfloat16", True), (["cuda"], "float16", True), (["cuda"], "float32", False),
    (["cpu"], "bfloat16", False), (["cpu", "cuda", "tpu"], "bfloat16", True),
])  # fmt: skip
def test_the_platform_is_chosen_when_a_program_is_lowered(hopper, platforms, dtype, kernels):
    module = exported(gradients, *problem(dtype), platforms=platforms)
    assert ("mosaic_gpu" in module) == kernels
    assert ("tpu_custom_call" in module) == ("tpu" in platforms)
    assert "tensor<4096x64x64x" not in module


def test_where_no_card_is_visible_programs_run_on_any():
    assert "mosaic_gpu" not in exported(gradients, *problem("bfloat16"))


@pytest.mark.parametrize(("capability", "installed", "found"), [("9.0", True, 90), ("9.0", False, 0), ("8.0", True, 0)])
def test_kernels_are_priced_where_they_run(monkeypatch, capability, installed, found):
    cards = [types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability=capability)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: cards)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: installed or None)
    assert jax_backend.backend.device(()).capability == found
