"""The workload table says what ANCHORS' rows say, and makes the arrays that they call for."""

import math

import numpy as np
import pytest
from conftest import installed_frameworks
from laws import tiny

from planner.language.spec import Gather
from planner.workloads import WORKLOADS, skewed_rows

NAMED = {
    "seed-gathered-matmul", "seed-sliced-einsum", "seed-two-by-matrices", "seed-layout", "seed-outer-and-matmul",
    "seed-separate-keys", "seed-gathered-keys", "seed-shared-keys", "three-way-batch", "clique",
    "permuted-contraction", "repeated", "chain-ijkl", "gathered-heads", "sparse-convolution", "experts", "lora",
    "message-passing", "equivariant",
}  # fmt: skip

every = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)


def test_every_named_workload_is_here():
    assert {name.split("/")[0] for name in WORKLOADS} == NAMED
    assert set(WORKLOADS) >= NAMED


@every
def test_fields_fit_the_spec(workload):
    spec = workload.parsed
    axes = {a for term in spec.terms for e in term for a in (e.axes if isinstance(e, Gather) else (e,))}
    assert set(workload.sizes) == axes
    assert set(workload.pools) == set(spec.arrays)
    assert set(workload.cpu_sizes) <= axes | set(spec.arrays)
    assert workload.source
    for per_operand in (workload.views, workload.gradients, workload.same_as, workload.takes_gradient):
        assert len(per_operand) in (0, len(spec.inputs))
    assert len(workload.takes_gradient) == len(spec.inputs)


@every
def test_cpu_sizes_fit_a_cpu(workload):
    small = workload.cpu()
    arrays = [*small.shapes, small.output_shape, *small.index_shapes.values()]
    # The largest is the outer product of seed 002, 1.6 GB, which is its result.
    assert sum(8 * math.prod(shape) for shape in arrays) <= 6 * 2**30


def test_sizes_of_the_seeds():
    assert WORKLOADS["seed-gathered-matmul"].shapes == ((131072, 1, 64), (2048, 64, 64))
    assert WORKLOADS["seed-gathered-matmul"].index_shapes == {"q": (131072,)}
    sliced = WORKLOADS["seed-sliced-einsum"]
    assert sliced.shapes == ((8, 16384, 2048), (8, 2048, 1024))
    assert sliced.views[0].base_shape(sliced.shapes[0]) == (16, 16384, 2048)
    assert sliced.cpu().views[0].base_shape(sliced.cpu().shapes[0]) == (16, 2048, 1024)
    strided = WORKLOADS["seed-sliced-einsum/strided"].cpu()
    assert strided.views[0].base_shape(strided.shapes[0]) == (16, 2048, 1024)
    assert strided.views[0].slices(strided.shapes[0]) == (slice(0, 8, 1), slice(0, 2047, 2), slice(0, 1024, 1))
    overlap = WORKLOADS["seed-sliced-einsum/overlap"]
    assert overlap.views[0].slices(overlap.shapes[0])[0] == slice(4, 12, 1)
    keys = WORKLOADS["seed-gathered-keys"]
    assert keys.shapes == ((8, 1, 1000, 32), (8, 1, 1000, 32))
    assert keys.output_shape == keys.index_shapes["i"] == (8, 1, 1000, 100)
    assert [WORKLOADS[f"seed-gathered-keys/k{k}"].output_shape[-1] for k in (10, 30, 1000)] == [10, 30, 1000]
    assert WORKLOADS["sparse-convolution"].output_shape == (87680, 64)


@every
def test_tiny_arrays_are_the_same_in_each_framework(workload):
    small = tiny(workload)
    assert all(1 <= size <= 6 for size in (*small.sizes.values(), *small.pools.values()))
    made = {name: small.operands(name, seed=3) for name in installed_frameworks()}
    rows = {name: small.indices(name, seed=3) for name in made}
    outputs = {name: small.cotangent(name, seed=3) for name in made}
    for name, operands in made.items():
        assert tuple(map(np.shape, operands)) == small.shapes
        assert outputs[name].shape == small.output_shape
        np.testing.assert_array_equal(np.asarray(outputs[name]), outputs["numpy"], strict=True)
        for number, operand in enumerate(operands):
            np.testing.assert_array_equal(np.asarray(operand), made["numpy"][number], strict=True)
        assert {k: v.shape for k, v in rows[name].items()} == small.index_shapes
        for array, values in rows[name].items():
            np.testing.assert_array_equal(np.asarray(values), rows["numpy"][array])
            assert 0 <= int(values.min()) <= int(values.max()) < small.pools[array]


@every
def test_operands_are_small_integers(workload):
    values = np.concatenate([np.ravel(operand) for operand in tiny(workload).operands("numpy")])
    assert set(np.unique(values)) <= {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert len(np.unique(values)) > 1


def test_seeds_differ_and_repeat():
    small = tiny(WORKLOADS["lora"])
    first, again, other = (small.operands("numpy", seed=seed, values="normal")[0] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_views_share_their_base(torch):
    small = tiny(WORKLOADS["seed-sliced-einsum/strided"])
    x, y = small.operands("torch", requires_grad=True)
    i, j, k = small.shapes[0]
    assert x.stride() == (2 * j * k, 2 * k, 1)
    assert x.untyped_storage().nbytes() == 4 * (2 * i) * (2 * j) * k
    assert x.requires_grad
    assert not x.is_leaf
    assert y.is_leaf
    major, _ = tiny(WORKLOADS["seed-sliced-einsum/k-major"]).operands("torch")
    assert major.stride() == (k * j, 1, j)
    assert isinstance(x, torch.Tensor)


def test_one_array_twice():
    first, second = tiny(WORKLOADS["repeated"]).operands("numpy")
    assert first is second


def test_scattered_sizes():
    assert WORKLOADS["message-passing"].options == {"sizes": {"d": 50000}}
    assert tiny(WORKLOADS["sparse-convolution"]).options == {"sizes": {"o": 4}}
    assert WORKLOADS["lora"].options == {}


def test_sorted_indices():
    rows = WORKLOADS["sparse-convolution"].resized(p=50, i=2).indices("numpy")
    assert (np.diff(rows["w"]) >= 0).all()
    assert (np.diff(rows["x"].ravel()) < 0).any()


def test_unknown_size_is_refused():
    with pytest.raises(ValueError, match="no axis and no index array z"):
        WORKLOADS["lora"].resized(z=3)


@pytest.mark.parametrize(
    ("skew", "low", "high"), [("uniform", 0, 60), ("half", 480, 560), ("zipf", 130, 300), ("one", 1000, 1000)]
)
def test_skew(skew, low, high):
    rows = skewed_rows(np.random.default_rng(0), 1000, 100, skew)
    assert rows.min() >= 0
    assert rows.max() < 100
    assert low <= np.bincount(rows).max() <= high
    if skew in ("half", "one"):
        assert np.bincount(rows).argmax() == 50, "the row in the middle"
