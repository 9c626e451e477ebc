"""Every implementation of grouped products, whatever its framework, is held to one loop over rows."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import examples
from grouped_laws import KERNELS, Problem, hold, jax_array, torch_array, values
from hypothesis import example, given, settings
from hypothesis import strategies as st

EXAMPLES = {
    "torch": [
        Problem(90, 7, 40, 1, 3, 4, "float32", "steep", seed=1),
        Problem(90, 90, 9, 2, 3, 4, "bfloat16", "half in one", "transposed", small=False),
        Problem(60, 60, 8, 2, 3, 4, "complex64"),
    ],
}


@pytest.fixture(params=KERNELS, ids=lambda kernels: kernels.name)
def kernels(request):
    for name in request.param.needs:
        pytest.importorskip(name, reason=f"{name} is not installed")
    return request.param


def test_kernels_equal_a_loop_over_rows(kernels):
    @settings(max_examples=examples(*kernels.examples))
    @given(kernels.problems)
    def law(problem):
        hold(kernels, problem)

    for problem in EXAMPLES.get(kernels.name, ()):
        law = example(problem)(law)
    law()


def test_products_of_half_types_are_added_up_in_float32(kernels):
    """Unrounded: 64 * 64 + 1 is no half, and neither is the sum of many ones while it grows."""
    column, ones = np.array([64.0, 1.0, -64.0]), np.ones(4096)
    for x, matrix in ((column, 64.0), (ones, 1.0))[: 1 + kernels.long]:
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


@pytest.mark.parametrize("framework", ["torch", "jax"])
@settings(max_examples=examples(100, 1000))
@given(
    of=st.lists(st.integers(0, 5), max_size=90), dtype=st.sampled_from(["int8", "uint8", "int16", "int32", "int64"]),
    packed=st.booleans(),
)  # fmt: skip
@example(of=[], dtype="int32", packed=True)
def test_rows_are_sorted_by_group_and_stay_in_order(framework, of, dtype, packed):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    q, size = np.array(of, int), 5
    if framework == "torch":
        from planner.kernels.grouping.torch_grouping import group_rows

        groups = group_rows(torch_array(q, dtype), size)
    else:
        from planner.kernels.grouping import jax_grouping

        with pytest.MonkeyPatch.context() as patch:
            if not packed:
                patch.setattr(jax_grouping, "UINT32_BITS", 0)
            groups = jax_grouping.group_rows(jax_array(q, dtype), size)
    assert values(groups.order).tolist() == np.argsort(q, kind="stable").tolist()
    assert values(groups.offsets).tolist() == [np.sum(q < group) for group in range(size + 1)]
