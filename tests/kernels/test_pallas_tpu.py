"""Pallas kernels for TPUs, interpreted on the CPU, and lowered for a TPU that is not here."""

import functools
import itertools

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import planner  # noqa: E402
from planner.backends import jax_evaluation, jax_step  # noqa: E402
from planner.device import CPU, TPU_V5E  # noqa: E402
from planner.kernels import pallas_tiles, pallas_tpu  # noqa: E402
from planner.kernels.jax_grouping import group_rows  # noqa: E402
from planner.objective import step_key  # noqa: E402
from planner.program import Lowerer  # noqa: E402

# The interpreter of all platforms, and the simulation of a TPU: what is read out of bounds is an error, what nothing
# wrote is NaN, and accesses that race are told.
MODES = {
    "interpreted": True,
    "simulated": pltpu.InterpretParams(
        out_of_bounds_reads="raise", uninitialized_memory="nan", detect_races=True, skip_floating_point_ops=False
    ),
}
# Rows, I, J, K, groups and dtype: one of each, sizes that no tile divides, matrices of several blocks, rows that are
# tiles, none.
SHAPES = [
    (1, 1, 1, 1, 1, "float32"), (0, 1, 4, 4, 3, "float32"), (50, 1, 5, 7, 3, "bfloat16"), (90, 2, 16, 33, 6, "float32"),
    (40, 3, 8, 8, 9, "bfloat16"), (130, 1, 300, 200, 2, "float32"), (20, 1, 140, 130, 4, "bfloat16"),
    (9, 32, 16, 24, 3, "float32"), (9, 64, 20, 130, 3, "bfloat16"), (6, 1, 0, 3, 2, "float32"),
]  # fmt: skip


@functools.cache
def compiled(mode, groups):
    """Everything that the kernels compute of one problem."""

    def run(a, c, gradient, q, source, target):
        index = group_rows(q, groups)
        return (
            pallas_tpu.grouped_matmul(a, c, index),
            pallas_tpu.grouped_matmul(a, c, index, source, target, 4),
            pallas_tpu.grouped_outer(a, gradient, index, groups, source),
            *pallas_tpu.grouped_gradients(gradient, a, c, index),
        )

    def with_mode(*arguments):
        before = pallas_tpu.INTERPRET, pallas_tpu._SIDE
        pallas_tpu.INTERPRET, pallas_tpu._SIDE = MODES[mode], 128
        try:
            return run(*arguments)
        finally:
            pallas_tpu.INTERPRET, pallas_tpu._SIDE = before

    return jax.jit(with_mode)


def expected(a, c, gradient, q, source, target):
    """The same by a loop over rows."""
    (n, i, k), j, groups = gradient.shape, a.shape[2], len(c)
    plain, summed = np.zeros((n, i, k)), np.zeros((4, i, k))
    outer, da, dc = np.zeros((groups, j, k)), np.zeros((n, i, j)), np.zeros((groups, j, k))
    for row in np.flatnonzero(q < groups):
        matrix, other = c[q[row]], a[source[row]]
        plain[row], da[row] = a[row] @ matrix, gradient[row] @ matrix.T
        if target[row] < 4:
            summed[target[row]] += other @ matrix
        outer[q[row]] += other.T @ gradient[row]
        dc[q[row]] += a[row].T @ gradient[row]
    return plain, summed, outer, da, dc


def hold(mode, seed, shape, kind):
    """Hold all kernels to the loop; what no index names, and what is dropped, is NaN."""
    n, i, j, k, groups, dtype = shape
    random = np.random.default_rng(seed)
    q = random.integers(0, groups + 1, n)
    if kind == "sorted":
        q = np.sort(q)
    elif kind in ("constant", "dropped"):
        q = np.full(n, random.integers(groups) if kind == "constant" else groups)
    elif kind == "skewed":
        q = np.where(random.random(n) < 0.9, 0, q)
    a, c, gradient = (random.integers(-2, 3, x).astype(float) for x in ((n, i, j), (groups, j, k), (n, i, k)))
    source, target = random.integers(0, max(1, n), n), random.integers(0, 5, n)
    wanted = expected(a, c, gradient, q, source, target)
    a[(q == groups) & ~np.isin(np.arange(n), source)] = np.nan
    c[~np.isin(np.arange(groups), q)], gradient[q == groups] = np.nan, np.nan
    found = compiled(mode, groups)(*(jnp.asarray(x, dtype) for x in (a, c, gradient)), q, source, target)
    for x, y in zip(found, wanted, strict=True):
        assert np.array_equal(np.asarray(x, float), np.asarray(jnp.asarray(y, dtype), float))


PROBLEM = {
    "seed": st.integers(0, 2**30), "kind": st.sampled_from(["any", "sorted", "constant", "skewed", "dropped"]),
}  # fmt: skip


@settings(max_examples=examples(200, 2000))
@given(shape=st.sampled_from(SHAPES), **PROBLEM)
def test_kernels_equal_a_loop_over_rows(shape, seed, kind):
    hold("interpreted", seed, shape, kind)


@settings(max_examples=examples(20, 400))
@given(shape=st.sampled_from([x for x in SHAPES if x[0] in (20, 50)] if examples(1, 0) else SHAPES), **PROBLEM)
def test_on_a_simulated_tpu_nothing_is_read_out_of_bounds_and_nothing_races(shape, seed, kind):
    hold("simulated", seed, shape, kind)
    races = interpret_pallas_call.races
    assert races is None or not races.races_found


# -- through the library ---------------------------------------------------------------------------------

SPEC = "nij, q[n]jk -> nik"


def arrays(n=64, i=2, j=24, k=20, groups=4, seed=0):
    random = np.random.default_rng(seed)
    a, c, w = (jnp.asarray(random.integers(-2, 3, x), "float32") for x in ((n, i, j), (groups, j, k), (n, i, k)))
    return a, c, jnp.asarray(random.integers(0, groups, n)), w


@pytest.fixture
def forced(monkeypatch):
    """Programs for this machine run what they would run on a TPU, interpreted."""
    ran = []
    real = pallas_tpu.matrices_product
    monkeypatch.setattr(pallas_tpu, "INTERPRET", True)
    monkeypatch.setattr(pallas_tpu, "matrices_product", lambda *given, **how: ran.append(1) or real(*given, **how))
    monkeypatch.setattr(jax_evaluation, "TABLE", jax_evaluation.platform_table("tpu"))
    monkeypatch.setattr(jax_step, "LOWER", Lowerer(lambda op: grouped_first(op), step_key("time")))

    def grouped_first(op):
        """The grouped kernels wherever they can run."""
        choices = jax_evaluation.TABLE.choices(op, CPU)
        return [x for x in choices if "group" in x.lowering] or choices

    jax.clear_caches()
    jax_step.compiled.cache_clear()
    yield ran
    jax.clear_caches()
    jax_step.compiled.cache_clear()


def call(a, c, q, **options):
    return planner.contract(SPEC, a, c, q=q, minimize="peak", **options)


def plain(a, c, q):
    return jnp.einsum("nij,njk->nik", a, c[q], precision="highest")


def test_derivatives_of_the_kernels(forced):
    """`jit(grad)`, forward mode, `linearize`, `checkpoint`, and second derivatives both ways."""
    a, c, q, w = arrays()

    def loss(f, a, c):
        return jnp.sum(jnp.sin(f(a, c, q)) * w)

    value = jax.jit(call)(a, c, q)
    assert forced
    assert jnp.array_equal(value, plain(a, c, q))
    for transformed in (jax.grad, lambda f, argnums: jax.grad(jax.checkpoint(f), argnums)):
        found = jax.jit(transformed(functools.partial(loss, call), argnums=(0, 1)))(a, c)
        wanted = jax.grad(functools.partial(loss, plain), argnums=(0, 1))(a, c)
        assert all(jnp.allclose(x, y, atol=1e-4) for x, y in zip(found, wanted, strict=True))
    tangents = a[::-1], c[::-1]
    found, wanted = (jax.jvp(lambda a, c, f=f: f(a, c, q), (a, c), tangents) for f in (call, plain))
    assert all(map(jnp.array_equal, found, wanted))
    _, linear = jax.linearize(lambda a, c: call(a, c, q), a, c)
    assert jnp.array_equal(linear(*tangents), wanted[1])
    check_grads(
        lambda a, c: call(jnp.asarray(a), jnp.asarray(c), q),
        (a, c),
        order=2,
        modes=["fwd", "rev"],
        atol=1e-2,
        rtol=1e-2,
    )


@pytest.mark.parametrize("mapped", [x for x in itertools.product((0, None), repeat=3) if any(y == 0 for y in x)])
def test_vmap_over_any_operands(forced, mapped):
    batches = [arrays(seed=seed)[:3] for seed in range(3)]
    given = [
        jnp.stack([batch[place] for batch in batches]) if mapped[place] == 0 else batches[0][place]
        for place in range(3)
    ]
    found, wanted = (jax.jit(jax.vmap(f, in_axes=mapped))(*given) for f in (call, plain))
    assert jnp.array_equal(found, wanted)
    # Matrices that are mapped along with rows or indices make no grouped product: stock operators run there.
    assert bool(forced) == (mapped[1] is None or mapped == (None, 0, None))


@pytest.mark.parametrize("mode", ["drop", "clip", "raise"])
def test_index_modes_on_the_kernels(forced, mode):
    a, c, q, w = arrays()
    q = q.at[3].set(9 if mode != "raise" else -1)
    wanted = plain(a, c, jnp.clip(q, 0, 3) if mode == "clip" else q)
    wanted = wanted.at[3].set(0) if mode == "drop" else wanted
    a = a.at[3].set(jnp.nan) if mode == "drop" else a
    run = jax.jit(functools.partial(call, index_mode=mode, sizes={"q": 4}))
    assert jnp.array_equal(run(a, c, q), wanted)
    found = jax.jit(jax.grad(lambda a, c: jnp.sum(run(a, c, q) * w), argnums=(0, 1)))(a, c)
    assert not any(jnp.isnan(x).any() for x in found)
    assert forced


# -- lowered for a TPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [
        (131_072, 1, 64, 64, 2048), (90, 2, 5, 7, 3), (4096, 1, 2048, 2000, 16), (50, 64, 96, 128, 7),
        (33, 3, 700, 130, 4), (1, 1, 1, 1, 1), (60, 1, 1, 40, 3), (60, 1, 40, 1, 3), (600, 512, 640, 128, 9),
    ],
)  # fmt: skip
def test_programs_for_a_tpu_hold_the_kernels_and_no_gathered_matrices(shape, dtype):
    n, i, j, k, groups = shape
    a, c = jax.ShapeDtypeStruct((n, i, j), dtype), jax.ShapeDtypeStruct((groups, j, k), dtype)
    q = jax.ShapeDtypeStruct((n,), "int32")

    def run(a, c, q):
        index = group_rows(q, groups)
        return pallas_tpu.grouped_gradients(pallas_tpu.grouped_matmul(a, c, index), a, c, index)

    exported = jax.export.export(jax.jit(run), platforms=["tpu"])(a, c, q).mlir_module()
    assert all(name in exported for name in ("planner_grouped_matmul", "planner_grouped_outer"))
    assert f"tensor<{n}x{j}x{k}x" not in exported or n == groups or i == j


@pytest.mark.parametrize("precision", ["high", "tensorfloat32", "highest", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_precision_is_lowered(precision, dtype):
    a, c = jax.ShapeDtypeStruct((64, 1, 128), dtype), jax.ShapeDtypeStruct((4, 128, 128), dtype)
    run = jax.jit(lambda a, c, q: pallas_tpu.grouped_matmul(a, c, group_rows(q, 4)))
    with jax.default_matmul_precision(precision):
        exported = jax.export.export(run, platforms=["tpu"])(a, c, jax.ShapeDtypeStruct((64,), "int32")).mlir_module()
    assert "planner_grouped_matmul" in exported


@pytest.mark.parametrize(
    "shape", [(64, 2048, 512, 512, 4), (600, 257, 64, 64, 4), (1000, 1, 16, 16, 200_000), (0, 1, 8, 8, 3)]
)
def test_what_a_tpu_has_no_memory_for_stays_with_stock_xla(shape):
    """Tiles of many rows, and more groups than scalar memory holds."""
    n, i, j, k, groups = shape
    a, c = jax.ShapeDtypeStruct((n, i, j), "float32"), jax.ShapeDtypeStruct((groups, j, k), "float32")
    run = jax.jit(lambda a, c, q: pallas_tpu.grouped_matmul(a, c, group_rows(q, groups)))
    exported = jax.export.export(run, platforms=["tpu"])(a, c, jax.ShapeDtypeStruct((n,), "int32")).mlir_module()
    assert "planner_grouped_matmul" not in exported


def test_products_are_not_rounded_before_they_are_added(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "INTERPRET", True)
    a, c = jnp.array([[[16.0, 1.0]], [[-16.0, 0.0]]], "bfloat16"), jnp.array([[[16.0], [1.0]]], "bfloat16")
    zeros = jnp.zeros(2, "int32")
    assert pallas_tpu.grouped_matmul(a, c, group_rows(zeros, 1), None, zeros, 1) == 1


def test_the_platform_is_chosen_when_a_program_is_lowered():
    a, c, q = (
        jax.ShapeDtypeStruct(*x) for x in (((4096, 1, 64), "float32"), ((64, 64, 64), "float32"), ((4096,), "int32"))
    )
    gradients = jax.jit(jax.grad(lambda a, c, q: call(a, c, q).sum(), argnums=(0, 1)))
    for platforms, kernels in ((["tpu"], True), (["cpu"], False), (["cpu", "tpu"], True)):
        exported = jax.export.export(gradients, platforms=platforms)(a, c, q).mlir_module()
        assert ("planner_grouped_outer" in exported) == kernels
        assert "tensor<4096x64x64x" not in exported


def test_plans_for_a_tpu_count_what_is_moved_into_tiles():
    operands = planner.Operand((4096, 1, 64)), planner.Operand((64, 64, 64))
    op = planner.plan(SPEC, *operands, q=(4096,), backend="jax", device="tpu v5e").steps[-1].op
    costs = {x.lowering: x.cost for x in jax_evaluation.TABLE.choices(op, TPU_V5E)}
    rows = pallas_tiles.lanes(4096, 1, 64, 4)
    assert costs["grouped matmul"].scratch_bytes >= 2 * rows * 64 * 4
