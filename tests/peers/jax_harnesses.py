"""JAX's own harnesses of `dot_general` and of `take`, each of them also as a spec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rewritten import assert_close, contract

import planner

jax = pytest.importorskip("jax", reason="jax is not installed")
from jax._src.internal_test_util.test_harnesses import all_harnesses  # noqa: E402

# Of the largest number: sums go in different orders.
CLOSE = {"float32": 1e-5, "complex64": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# What `enable_xla` says is another program's business, so half of them are doubles.
FOUND = [h for h in all_harnesses if h.params.get("enable_xla", True)]
PRODUCTS = {h.name: h for h in FOUND if h.group_name == "dot_general"}
TAKES = {h.name: h for h in FOUND if h.group_name == "gather" and h.name.startswith("from_take")}


def test_jax_has_the_harnesses():
    assert len(PRODUCTS) > 100
    assert len(TAKES) > 40
    contract("i ->", jax.numpy.ones(1))


def _spec(dimension_numbers: Any, left: int, right: int) -> str:
    """The spec of a `dot_general`: its output has the batch first, then what is free on the left, then on the right."""
    (summed, batch), letters = dimension_numbers, iter(LETTERS)
    a, b = [next(letters) for _ in range(left)], [next(letters) for _ in range(right)]
    for pairs in (summed, batch):
        for i, j in zip(*pairs, strict=True):
            b[j] = a[i]
    shared = {a[i] for i in summed[0]}
    output = [a[i] for i in batch[0]]
    output += [x for x in dict.fromkeys(a + b) if x not in shared and x not in output]
    return f"{''.join(a)}, {''.join(b)} -> {''.join(output)}"


@pytest.mark.parametrize("name", PRODUCTS, ids=list(PRODUCTS))
def test_dot_general(name):
    harness = PRODUCTS[name]
    given = harness.params
    a, b = harness.dyn_args_maker(np.random.RandomState(0))
    spec = _spec(given["dimension_numbers"], a.ndim, b.ndim)
    theirs = harness.dyn_fun(a, b)
    arrays = [jax.numpy.asarray(x) for x in (a, b)]
    ours = contract(spec, *arrays, precision=given["precision"], dtype=given["preferred_element_type"])
    assert_close(np.asarray(ours), np.asarray(theirs), CLOSE.get(ours.dtype.name, 0.0))


@pytest.mark.parametrize("name", TAKES, ids=list(TAKES))
def test_take(name):
    """Its "clip" is ours; its "fill" is what traced calls do with an index out of range, where eager ones raise."""
    harness = TAKES[name]
    pool, index, axis, mode = (getattr(x, "value", x) for x in harness.arg_descriptors)
    theirs = harness.dyn_fun(pool, index)
    rows = LETTERS[20 : 20 + index.ndim]
    axes = LETTERS[: pool.ndim]
    before, after = axes[:axis], axes[axis + 1 :]
    spec = f"{before} q[{rows}] {after} -> {before}{rows}{after}"
    pool, index = jax.numpy.asarray(pool), jax.numpy.asarray(index)

    def take(pool, index):
        return contract(spec, pool, q=index, index_mode="clip" if mode == "clip" else "raise")

    np.testing.assert_array_equal(jax.jit(take)(pool, index), theirs)
    if mode == "fill" and harness.params["index_oob"]:
        with pytest.raises(planner.IndexRangeError):
            take(pool, index)
    else:
        np.testing.assert_array_equal(take(pool, index), theirs)
