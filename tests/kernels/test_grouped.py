"""Every implementation of grouped products, whatever its framework, is held to one loop over rows."""

from __future__ import annotations

import itertools
from functools import partial
from unittest import mock

import numpy as np
import pytest
from conftest import examples
from grouped_laws import (
    ARRAYS,
    KERNELS,
    Problem,
    each,
    hold,
    kernel_module,
    torch_array,
    torch_scratch,
    values,
    xla_temporaries,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

EXAMPLES = {
    "torch": [
        Problem(90, 7, 40, 1, 3, 4, "float32", "steep", seed=1),
        Problem(90, 90, 9, 2, 3, 4, "bfloat16", "half in one", "transposed", small=False),
        Problem(60, 60, 8, 2, 3, 4, "complex64"),
    ],
}


@each(KERNELS)
def test_kernels_equal_a_loop_over_rows(kernels):
    @settings(max_examples=examples(*kernels.examples))
    @given(kernels.problems)
    def law(problem):
        hold(kernels, problem)

    for problem in EXAMPLES.get(kernels.name, ()):
        law = example(problem)(law)
    law()


@each(KERNELS)
def test_products_of_half_types_are_added_up_in_float32(kernels):
    """Unrounded: 64 * 64 + 1 is not a half, and neither is the sum of many ones while it grows."""
    column, ones = np.array([64.0, 1.0, -64.0]), np.ones(4096)
    for x, matrix in (column, 64.0), (ones, 1.0):
        n = len(x)
        a, c, b = np.zeros((n, 1, 8)), np.zeros((1, 8, 8)), np.zeros((n, 1, 8))
        a[:, 0, 0], a[0, 0, 1], b[:, 0, 0], c[0, :2, 0] = x, 1, np.abs(x), (matrix, 1)
        index = np.zeros(n, int), None, None, np.zeros(n, int)
        hold(kernels, Problem(n, n, 1, 1, 8, 8, kernels.half), ([a, c, b, b], index))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("skew", ["even", "half in one", "all in one", "steep"])
def test_sizes_of_the_seed(skew, dtype, torch):
    hold(KERNELS[0], Problem(9000, 9000, 150, 1, 64, 64, dtype, skew, small=False))


# -- groups ----------------------------------------------------------------------------------------------


def hold_groups(framework, q, dtype, size):
    """Hold the sorted rows to NumPy's sort."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    groups = kernel_module(f"grouping.{framework}_grouping").group_rows(ARRAYS[framework](q, dtype), size)
    assert np.array_equal(values(groups.order), np.argsort(q, kind="stable"))
    assert np.array_equal(values(groups.offsets), np.searchsorted(np.sort(q), np.arange(size + 1)))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@settings(max_examples=examples(30, 1000))
@given(
    of=st.lists(st.integers(0, 5), max_size=90), dtype=st.sampled_from(["int8", "uint8", "int16", "int32", "int64"]),
    packed=st.booleans(),
)  # fmt: skip
@example(of=[], dtype="int32", packed=True)
def test_rows_are_sorted_by_group_and_stay_in_order(framework, of, dtype, packed):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    with mock.patch.object(kernel_module(f"grouping.{framework}_grouping"), "UINT32_BITS", 32 * packed, create=True):
        hold_groups(framework, np.array(of, int), dtype, 5)


@pytest.mark.parametrize(
    ("framework", "rows", "size"),
    [("torch", 5, 2**15 - 1), ("torch", 5, 2**15), ("torch", 5, 2**15 + 1), ("jax", 2**17, 2**15 - 1)],
)
def test_a_dropped_row_comes_last_where_its_key_is_the_widest(framework, rows, size):
    """Keys are narrowed, or packed with the row: the number of groups itself, which drops a row, must fit too."""
    q = np.random.default_rng(0).integers(0, size + 1, rows)
    q[:5] = size, 0, size - 1, size, 1
    hold_groups(framework, q, "int32", size)


# -- scratch ---------------------------------------------------------------------------------------------

TORCH_SIZES, TORCH_DTYPES = [(20000, 1, 300, 64, 64), (3000, 1, 8, 128, 256)], ["float32", "bfloat16"]
JAX_SIZES = [
    (32768, 1, 16, 32, 32), (32768, 1, 512, 32, 32), (20000, 1, 64, 5, 64),
    (50, 5, 1, 16, 130),  # one tile
    (1000, 1, 1000, 128, 256),  # matrices that are larger than rows
]  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "sizes", "skew", "dtype"),
    [
        *itertools.product(["torch"], TORCH_SIZES, ["even", "steep"], TORCH_DTYPES),
        *itertools.product(["jax"], JAX_SIZES, ["even"], [*TORCH_DTYPES, "float16", "complex64"]),
    ],
    ids=str,
)
def test_scratch_stays_within_its_bound(framework, sizes, skew, dtype):
    """And close to it: it grows with the rows only for a bfloat16 result in JAX, which is there as bits too."""
    module, (n, i, g, j, k) = pytest.importorskip(framework, reason=f"{framework} is not installed"), sizes
    kernels = kernel_module(f"grouped_matmul.{framework}_grouped")
    group_rows = partial(kernel_module(f"grouping.{framework}_grouping").group_rows, size=g)
    shapes, size = ((n, i, j), (g, j, k), (n, i, k)), ()
    if framework == "torch":
        a, c, b = (torch_array(np.ones(shape), dtype) for shape in shapes)
        groups = group_rows(torch_array(Problem(n, n, g, i, j, k, dtype, skew).index()))
        measure, kind, close = torch_scratch, a.dtype, 0.7
    else:
        a, c, b, to = (module.ShapeDtypeStruct(*x) for x in (*((shape, dtype) for shape in shapes), ((n,), "int32")))
        groups, size = module.eval_shape(group_rows, to), (g,)
        measure, kind = xla_temporaries, dtype
        close = 0.8 if dtype == "float32" and kernels.tiling(sizes).tiles > 1 else 0.4

    def bound(what, targets=None):
        if framework == "torch":
            return kernels.scratch_bytes(sizes, kind, pair=what == "gradients")
        return kernels.scratch_bytes(what, sizes, kind, targets)

    measured = [
        (kernels.grouped_matmul, (a, c, groups), bound("matmul")),
        (lambda *xs: kernels.grouped_outer(*xs, *size), (a, b, groups), bound("outer")),
        (kernels.grouped_gradients, (b, a, c, groups), bound("gradients")),
    ]
    if framework == "jax":
        measured.append(
            (lambda *xs: kernels.grouped_matmul(*xs, n // 3), (a, c, groups, to, to), bound("matmul", n // 3))
        )
        assert measure(group_rows, to) <= kernel_module("grouping.jax_grouping").scratch_bytes(n, g)
    for run, arrays, foretold in measured:
        assert close * foretold < measure(run, *arrays) <= foretold
