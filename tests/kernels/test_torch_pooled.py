"""Both ways of scoring chosen rows of a pool against plain indexing; small integers, so every result is exact."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from planner.kernels.gathered_dot import torch_pooled  # noqa: E402
from planner.kernels.grouping.keys import IndexArray  # noqa: E402
from planner.language.errors import IndexRangeError  # noqa: E402

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "complex64")


@dataclass(frozen=True)
class Case:
    """The sizes of batch, queries, pool, features and chosen rows, and how the arrays lie in memory."""

    batch: int
    queries: int
    pool: int
    depth: int
    chosen: int
    dropped: bool
    layout: str
    small: bool
    seed: int


cases = st.builds(
    Case,
    batch=st.integers(0, 3),
    queries=st.integers(0, 9),
    pool=st.integers(0, 20),
    depth=st.integers(0, 5),
    chosen=st.integers(0, 12),
    dropped=st.booleans(),
    layout=st.sampled_from(["plain", "transposed", "batch inside", "shared", "sliced"]),
    small=st.booleans(),
    seed=st.integers(0, 2**20),
)


def laid_out(make, shape, layout):
    """An array of that shape whose memory is in another order, or shared by the batch."""
    if layout == "transposed":
        return make((shape[0], shape[2], shape[1])).transpose(1, 2)
    if layout == "batch inside":
        return make((shape[1], shape[0], shape[2])).transpose(0, 1)
    if layout == "sliced":
        return make((*shape[:2], shape[2] + 3))[..., : shape[2]]
    if layout == "shared":
        return make((min(1, shape[0]), *shape[1:])).expand(shape)
    return make(shape)


def exact(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def same(result, expected, dtype):
    assert result.dtype == getattr(torch, dtype)
    assert result.shape == expected.shape
    assert torch.equal(exact(result), exact(expected.to(result.dtype)))


@example(case=Case(2, 5, 7, 3, 4, True, "plain", True, 0), dtype="float32", index_dtype="int64")
@example(case=Case(1, 9, 300, 3, 12, False, "plain", False, 1), dtype="float32", index_dtype="uint8")
@example(case=Case(3, 40, 30, 8, 50, True, "batch inside", True, 0), dtype="bfloat16", index_dtype="int32")
@given(cases, st.sampled_from(DTYPES), st.sampled_from(["int64", "int32", "uint8"]))
@settings(max_examples=200, deadline=None)
def test_both_ways_are_plain_indexing(case, dtype, index_dtype):
    random = np.random.default_rng(case.seed)

    def integers(shape):
        x = random.integers(-2, 3, shape).astype(np.float64)
        if dtype == "complex64":
            x = x + 1j * random.integers(-2, 3, shape)
        return torch.from_numpy(x).to(getattr(torch, dtype))

    def places(shape):
        high = case.pool + (case.dropped or not case.pool)
        return torch.from_numpy(random.integers(0, high, shape)).to(getattr(torch, index_dtype))

    b, m = case.batch, case.pool
    query = laid_out(integers, (b, case.queries, case.depth), case.layout)
    pool = laid_out(integers, (b, m, case.depth), case.layout)
    g = laid_out(integers, (b, case.queries, case.chosen), case.layout)
    index = laid_out(places, (b, case.queries, case.chosen), case.layout)

    entry, row = torch.arange(b)[:, None, None], index.long()
    rows = torch.cat([exact(pool), torch.zeros(b, 1, case.depth, dtype=exact(pool).dtype)], 1)[entry, row]
    scores = (rows * exact(query)[:, :, None]).sum(3)
    grad_query = (exact(g)[..., None] * rows.conj()).sum(2)
    terms = exact(g)[..., None] * exact(query).conj()[:, :, None]
    grad_pool = torch.zeros(b, m + 1, case.depth, dtype=terms.dtype)
    grad_pool = grad_pool.index_put_((entry.expand(row.shape), row), terms, accumulate=True)[:, :m]

    with pytest.MonkeyPatch.context() as patch:
        if case.small:
            patch.setattr(torch_pooled, "DENSE_BYTES", 2000)
            patch.setattr(torch_pooled, "FETCHED_BYTES", 600)
        for way in ("pooled", "gathered"):
            kernel = {
                name: getattr(torch_pooled, f"{way}_{name}")
                for name in ("scores", "query_gradient", "pool_gradient", "gradients")
            }
            keys = IndexArray(index)
            same(kernel["scores"](query, pool, keys), scores, dtype)
            same(kernel["query_gradient"](g, pool, keys), grad_query, dtype)
            same(kernel["pool_gradient"](g, query, keys, m), grad_pool, dtype)
            both = kernel["gradients"](g, query, pool, keys)
            same(both[0], grad_query, dtype)
            same(both[1], grad_pool, dtype)


@given(cases, st.sampled_from(["int64", "int32", "uint8"]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_an_index_as_given_is_brought_into_range_or_refused(case, index_dtype, refused):
    random = np.random.default_rng(case.seed)

    def integers(shape):
        return torch.from_numpy(random.integers(-2, 3, shape).astype(np.float32))

    b, m = case.batch, case.pool
    query, pool = (laid_out(integers, (b, n, case.depth), case.layout) for n in (case.queries, m))
    g = integers((b, case.queries, case.chosen))
    low = 0 if index_dtype == "uint8" else -m
    numbers = random.integers(low, max(m, low + 1), g.shape)
    bad = g.numel() > 0 and (refused or not m)
    if bad:
        place = tuple(int(random.integers(0, n)) for n in g.shape)
        numbers[place] = random.choice([m, m + 1, m + 40, *([-m - 1] if low else [])])
    index = torch.from_numpy(numbers).to(getattr(torch, index_dtype))
    positive = torch.from_numpy(np.where(numbers < 0, numbers + m, numbers))

    def normal(part):
        part = part.long()
        if ((part < -m) | (part >= m)).any():
            raise IndexRangeError("refused")
        return torch.where(part < 0, part + m, part)

    with pytest.MonkeyPatch.context() as patch:
        if case.small:
            patch.setattr(torch_pooled, "DENSE_BYTES", 2000)
            patch.setattr(torch_pooled, "FETCHED_BYTES", 600)
        for way in ("pooled", "gathered"):
            for name, arguments in (
                ("scores", (query, pool)), ("query_gradient", (g, pool)), ("pool_gradient", (g, query)),
                ("gradients", (g, query, pool)),
            ):  # fmt: skip
                kernel, size = getattr(torch_pooled, f"{way}_{name}"), [m] * (name == "pool_gradient")
                if bad:
                    with pytest.raises(IndexRangeError, match="refused"):
                        kernel(*arguments, IndexArray(index, normal, may_drop=False), *size)
                    continue
                found = kernel(*arguments, IndexArray(index, normal, may_drop=False), *size)
                expected = kernel(*arguments, IndexArray(positive), *size)
                for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, expected)), strict=True):
                    assert torch.equal(x, y)


@pytest.mark.parametrize("way", ["pooled", "gathered"])
def test_dropped_scores_are_zero_beside_values_that_are_not_finite(way):
    pool = torch.full((1, 3, 2), torch.nan)
    pool[0, 0] = 1
    scores = getattr(torch_pooled, f"{way}_scores")(torch.ones(1, 1, 2), pool, IndexArray(torch.tensor([[[3, 0, 3]]])))
    assert scores.tolist() == [[[0, 2, 0]]]


def test_scratch_of_many_blocks_is_no_walk_over_them(monkeypatch):
    monkeypatch.delattr(torch_pooled, "_blocks")
    for bound, first in (
        (torch_pooled.pooled_scratch_bytes, ()),
        (torch_pooled.gathered_scratch_bytes, ("gradients",)),
    ):
        assert bound(*first, 10**12, 10**9, 10**6, 16, 3, torch.float32) < 10**9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("b", "q", "m", "keys", "index_dtype", "layout"),
    [
        (4, 300, 500, 10, torch.int64, "plain"),
        (4, 300, 500, 100, torch.int32, "plain"),
        (4, 300, 500, 100, torch.int64, "transposed"),
        (4, 300, 500, 30, torch.int64, "sliced"),
        (1, 4180, 1000, 20, torch.int64, "plain"),  # just over the queries of a block
        (8, 200, 20_000, 3, torch.int64, "plain"),  # few rows of a large pool
        (2, 20_000, 50, 1, torch.int64, "plain"),  # sums larger than what they are made of
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_scratch_stays_within_its_bound(dtype, b, q, m, keys, index_dtype, layout, given):
    d = 16
    query, pool, g = (
        laid_out(lambda shape: torch.ones(shape, dtype=dtype), shape, layout)
        for shape in ((b, q, d), (b, m, d), (b, q, keys))
    )
    index = torch.from_numpy(np.random.default_rng(0).integers(0, m + (not given), (b, q, keys))).to(index_dtype)
    keyed = IndexArray(index, lambda part: part, may_drop=False) if given else IndexArray(index)
    sizes = (b, q, m, d, keys, dtype, index.itemsize)
    calls = {
        "scores": (query, pool, keyed), "query_gradient": (g, pool, keyed), "pool_gradient": (g, query, keyed, m),
        "gradients": (g, query, pool, keyed),
    }  # fmt: skip
    for way in ("pooled", "gathered"):
        for name, arguments in calls.items():
            if way == "pooled":
                bound = torch_pooled.pooled_scratch_bytes(*sizes)
            else:
                bound = torch_pooled.gathered_scratch_bytes(name, *sizes)
            run = getattr(torch_pooled, f"{way}_{name}")
            cpu = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
                result = run(*arguments)
            events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
            held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
            results = result if isinstance(result, tuple) else (result,)
            assert int(held.max()) - sum(x.nbytes for x in results) <= bound, (way, name)
