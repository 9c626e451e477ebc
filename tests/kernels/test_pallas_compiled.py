"""Pallas kernels compiled for a TPU that is not here, by its own compiler: its memories hold them, or it says no."""

import os

import pytest
from conftest import examples

jax = pytest.importorskip("jax", reason="jax is not installed")
libtpu = pytest.importorskip(
    "libtpu", reason="no compiler for TPUs: pip install --no-deps 'libtpu==0.0.42.*', and set JAX_PLATFORMS=cpu"
)

import jax.numpy as jnp  # noqa: E402
from grouped_laws import TPU_SHAPES  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402
from test_pallas import EXPORTED  # noqa: E402

import planner  # noqa: E402
from planner.backends.jax import evaluation as jax_evaluation  # noqa: E402
from planner.cost.device import TPU_V5E  # noqa: E402
from planner.kernels.grouped_matmul.pallas_tiles import TPU  # noqa: E402
from planner.kernels.grouped_matmul.pallas_tpu import KERNELS  # noqa: E402
from planner.kernels.grouping.jax_grouping import Groups, most_tiles  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402

# Rows, I, J, K and groups at the limits of the code.
LIMITS = [
    # Tiles of 512 rows with blocks of 512, edges behind them, and vectors on either side.
    (600, 512, 640, 1030, 9), (600, 256, 512, 512, 9), (600, 512, 1, 513, 9), (600, 512, 513, 1, 9),
    (600, 512, 1, 1, 9), (5000, 1, 512, 513, 64), (5000, 1, 513, 512, 64), (60, 1, 1, 1, 3),
    # Most rows of a tile where one row fills no registers: 504 and 496.
    (90, 63, 600, 600, 5), (90, 31, 600, 600, 5),
    # 65,536 tiles of products, of sums, and of both where rows are tiles.
    (65_536, 1, 8, 16, 65_536), (44_289, 1, 16, 8, 60_000), (65_536, 64, 16, 16, 1), (65_536, 32, 24, 8, 1),
    # The least rows that are tiles, of float32 and of bfloat16.
    (90, 32, 700, 20, 4), (90, 64, 20, 700, 4),
]  # fmt: skip


@pytest.fixture(scope="module")
def compiled():
    """Compile a function of arrays of these shapes and dtypes for one TPU v5e."""
    # Nobody is asked which machine this is, and another process may compile beside.
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", chips_per_host_bounds=[2, 2, 1]
    )  # fmt: skip
    device = SingleDeviceSharding(topology.devices[0])

    def compile_for_tpu(run, *arrays):
        return jax.jit(run).lower(*(jax.ShapeDtypeStruct(*x, sharding=device) for x in arrays)).compile()

    return compile_for_tpu


UNEVEN = [(rows, i, j, k, groups) for rows, _, groups, i, j, k, _ in TPU_SHAPES]
PRECISIONS = [("float32", "highest"), ("float32", "default"), ("bfloat16", "default")]
COMPILED = [
    *((shape, *how) for shape in LIMITS for how in PRECISIONS),
    *((shape, *how) for shape in (*EXPORTED, *UNEVEN) for how in PRECISIONS[1:]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dtype", "precision"), COMPILED[: examples(3, 1000)])
def test_kernels_compile_for_a_tpu(compiled, shape, dtype, precision):
    n, i, j, k, groups = shape

    def product(a, c, gradient, *index):
        return KERNELS.grouped_matmul(a, c, Groups(*index))

    def summed(a, c, gradient, *index):
        rows = jnp.arange(n)
        return KERNELS.grouped_matmul(a, c, Groups(*index), rows[::-1], rows // 2, 4)

    def outer(a, c, gradient, *index):
        return KERNELS.grouped_outer(a, gradient, Groups(*index), groups)

    def gradients(a, c, gradient, *index):
        return KERNELS.grouped_gradients(gradient, a, c, Groups(*index))

    arrays = ((n, i, j), dtype), ((groups, j, k), dtype), ((n, i, k), dtype), ((n,), "int32"), ((groups + 1,), "int32")
    for run, empty, names in (
        (product, False, ["matmul"]), (summed, False, ["matmul"]), (outer, True, ["outer"]),
        (gradients, True, ["matmul", "outer"]),
    ):  # fmt: skip
        with jax.default_matmul_precision(precision):
            text = compiled(run, *arrays).as_text()
        held = [f"%planner_grouped_{name}" in text for name in names]
        assert held == [TPU.takes(n, i, groups, j, k, dtype, empty)] * len(names), run


def test_the_limits_are_those_of_the_code():
    """Each is reached, and one more row or group is refused."""
    tiles = TPU.tiles
    assert most_tiles(65_536, 8, 65_536, False) == most_tiles(44_289, 8, 60_000) == tiles
    for rows, inner, groups, empty in ((65_536, 1, 65_536, False), (44_289, 1, 60_000, True), (90, 512, 9, True)):
        for dtype in TPU.dtypes:
            each = TPU.rows(rows, inner, groups, jnp.dtype(dtype).itemsize)
            assert TPU.takes(rows, inner, groups, 8, 8, dtype, empty) or each != 8
    assert not TPU.takes(65_537, 1, 65_537, 8, 8, "float32", False)
    assert not TPU.takes(44_289, 1, 60_001, 8, 8, "float32")
    assert not TPU.takes(90, 513, 9, 8, 8, "float32")


# What is computed, rows, I, J, K, groups and dtype: the seed, experts, small ones, matrices that are most of all bytes,
# more groups than rows, rows that are tiles.
PRICED = [
    ("product", 131_072, 1, 64, 64, 2048, "float32"), ("pair", 131_072, 1, 64, 64, 2048, "float32"),
    ("outer", 131_072, 1, 64, 64, 2048, "float32"), ("product", 131_072, 1, 64, 64, 2048, "bfloat16"),
    ("pair", 131_072, 1, 64, 64, 2048, "bfloat16"), ("product", 4096, 1, 2048, 2048, 16, "bfloat16"),
    ("pair", 4096, 1, 2048, 2048, 16, "bfloat16"), ("product", 200, 1, 24, 20, 4, "float32"),
    ("pair", 200, 1, 24, 20, 4, "bfloat16"), ("product", 131_072, 2, 64, 64, 2048, "float32"),
    ("pair", 65_536, 2, 128, 128, 512, "float32"), ("product", 16_384, 32, 64, 64, 256, "float32"),
    ("pair", 16_384, 32, 64, 64, 256, "float32"), ("product", 16_384, 32, 128, 256, 256, "bfloat16"),
    ("pair", 65_536, 8, 300, 40, 64, "bfloat16"), ("pair", 65_536, 8, 40, 300, 64, "float32"),
    ("summed", 131_072, 1, 64, 64, 2048, "float32"), ("summed", 131_072, 1, 128, 128, 512, "bfloat16"),
    ("taken", 131_072, 1, 128, 128, 512, "float32"), ("product", 65_536, 3, 40, 72, 64, "bfloat16"),
    ("product", 1000, 1, 256, 256, 50_000, "float32"), ("outer", 1000, 1, 64, 64, 50_000, "float32"),
    ("product", 8000, 1, 100, 100, 8000, "float32"), ("pair", 8000, 1, 100, 100, 8000, "float32"),
    ("outer", 8000, 1, 100, 100, 8000, "float32"),
]  # fmt: skip
# Of each 16 rows, the operand or the result has one in "taken" and "summed".
SHARED = 16
SPECS = {
    "product": "nij, q[n]jk -> nik", "pair": "nij, q[n]jk -> nik", "outer": "nij, nik -> q[n]jk",
    "summed": "mpij, q[mp]jk -> mik", "taken": "mij, q[mp]jk -> mpik",
}  # fmt: skip
# XLA's own gathers keep up to a megabyte, in programs without our kernels too.
KEPT_BY_XLA = 2**20


def step_of(what, n, i, j, k, groups, dtype):
    """The step, the shape of its index array, and the row that runs it on the kernels."""
    rows = (n // SHARED, SHARED) if what in ("summed", "taken") else (n,)
    a = (n // SHARED, i, j) if what == "taken" else (*rows, i, j)
    shapes = a, (n, i, k) if what == "outer" else (groups, j, k)
    operands = [planner.Operand(shape, dtype) for shape in shapes]
    sizes = {"q": groups} if what == "outer" else None
    op = Einsum(planner.resolve(SPECS[what], *operands, q=planner.Operand(rows, "int32"), sizes=sizes), dtype)
    name = {"pair": "both grouped gradients", "outer": "grouped outer"}.get(what, "grouped matmul")
    return op.joint_gradient() if what == "pair" else op, rows, name


@pytest.mark.slow
@pytest.mark.parametrize("case", PRICED[: examples(3, 1000)])
def test_no_more_is_allocated_than_foretold(compiled, case):
    """Nor less than half, where arrays are too large for the 128 MB of vector memory that XLA uses first.

    Tiles may lie where results will.
    """
    op, rows, name = step_of(*case)
    mode = jax_evaluation.Mode("drop", None)

    def run(*given):
        return jax_evaluation._run(op, given[:-1], {op.spec.gathers[0]: given[-1]}, "drop", name, mode, "tpu")

    memory = compiled(run, *((shape, op.dtype) for shape in op.input_shapes), (rows, "int32")).memory_analysis()
    (foretold,) = (x.cost.scratch_bytes for x in jax_evaluation.TABLE.choices(op, TPU_V5E) if x.lowering == name)
    allocated, results = memory.temp_size_in_bytes, memory.output_size_in_bytes
    assert allocated <= foretold + KEPT_BY_XLA
    assert foretold <= 2 * (allocated + results) or allocated < 2**28
