"""What holds for the Pallas kernels of every platform: they equal a loop over rows, and so do their derivatives."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from planner.kernels.grouping.jax_grouping import group_rows

__all__ = ["EXPORTED", "PROBLEM", "hold", "largest_tensor", "recorded_races"]

PROBLEM = {
    "seed": st.integers(0, 2**30), "kind": st.sampled_from(["any", "sorted", "constant", "skewed", "dropped"]),
}  # fmt: skip
# Rows, I, J, K and groups of programs that are lowered: the seed, edges, experts, tiles, one of each.
EXPORTED = [
    (131_072, 1, 64, 64, 2048), (90, 2, 5, 7, 3), (4096, 1, 2048, 2000, 16), (50, 64, 96, 128, 7),
    (33, 3, 700, 130, 4), (1, 1, 1, 1, 1), (60, 1, 1, 40, 3), (60, 1, 40, 1, 3), (600, 512, 640, 128, 9),
]  # fmt: skip


@functools.cache
def _compiled(setting, groups):
    """Everything that the kernels compute of one problem, under a setting."""

    def run(a, c, gradient, q, source, target):
        index = group_rows(q, groups)
        with setting() as kernels:
            return (
                kernels.grouped_matmul(a, c, index),
                kernels.grouped_matmul(a, c, index, source, target, 4),
                kernels.grouped_outer(a, gradient, index, groups, source),
                *kernels.grouped_gradients(gradient, a, c, index),
            )

    return jax.jit(run)


def _expected(a, c, gradient, q, source, target):
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


def hold(setting, seed, shape, kind):
    """Hold all kernels to the loop; what no index names, and what is dropped, is NaN.

    Args:
        setting: gives, as a context, a platform's kernels, interpreted.
        seed: of the numbers.
        shape: rows, I, J, K, groups and dtype.
        kind: how rows choose groups.
    """
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
    wanted = _expected(a, c, gradient, q, source, target)
    a[(q == groups) & ~np.isin(np.arange(n), source)] = np.nan
    c[~np.isin(np.arange(groups), q)], gradient[q == groups] = np.nan, np.nan
    found = _compiled(setting, groups)(*(jnp.asarray(x, dtype) for x in (a, c, gradient)), q, source, target)
    for x, y in zip(found, wanted, strict=True):
        assert np.array_equal(np.asarray(x, float), np.asarray(jnp.asarray(y, dtype), float))


@contextlib.contextmanager
def recorded_races(module):
    """The states of JAX's race detection, of which it makes one for each kernel that runs.

    Args:
        module: of the interpreter, which makes them.
    """
    states, make = [], module.RaceDetectionState

    def recorded(*given, **how):
        states.append(make(*given, **how))
        return states[-1]

    module.RaceDetectionState = recorded
    try:
        yield states
    finally:
        module.RaceDetectionState = make


def largest_tensor(module):
    """Elements of the largest array in an exported module."""
    return max(math.prod(map(int, dims.rstrip("x").split("x"))) for dims in re.findall(r"tensor<((?:\d+x)+)", module))
